"""The sampler against definitions written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.runtime import Sampler
from posttrainllm.runtime.errors import UsageError

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)


def expected(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Temperature, then top-k, top-p, min-p, as their papers define them. No two logits are equal here."""
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    keep = set(range(len(logits)))
    order = sorted(keep, key=lambda i: -weights[i])
    if top_k:
        keep &= set(order[:top_k])
    total = sum(weights[i] for i in keep)
    nucleus, mass = set(), 0.0
    for i in order:
        if i in keep and mass < top_p:
            nucleus.add(i)
            mass += weights[i] / total
    keep &= nucleus if top_p < 1 else keep
    best = max(weights[i] for i in keep)
    keep = {i for i in keep if weights[i] >= min_p * best}
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(logits))]


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400), min_size=1, max_size=30, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.93, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_the_distribution_is_the_definitions(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    values = [value / 40 for value in logits]
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    found = sampler.probabilities(np.array(values, np.float32))
    np.testing.assert_allclose(found, expected(values, temperature, top_k, top_p, min_p), atol=1e-5)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert Sampler().sample(np.array([1, 3, 3, 2], np.float32)) == 1


@given(LOGITS)
def test_a_forbidden_id_is_never_drawn(logits: list[float]) -> None:
    masked = np.array([*logits, -np.inf, 100], np.float32)
    masked[-1] = -np.inf
    before = masked.copy()
    for temperature in (0.0, 0.01, 5.0):
        assert Sampler(temperature, seed=1).sample(masked) < len(logits)
    np.testing.assert_array_equal(masked, before)


def test_draws_follow_the_distribution() -> None:
    """20,000 draws; five standard deviations leave a chance of about 1 in a million of a false alarm."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = Sampler(1.0, seed=7)
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=3)
    for count, p in zip(counts, (0.5, 0.3, 0.2), strict=True):
        assert abs(count - 20_000 * p) < 5 * math.sqrt(20_000 * p * (1 - p))


def test_tiny_temperatures_do_not_overflow() -> None:
    assert Sampler(1e-30, seed=0).sample(np.array([1e4, 2e4], np.float32)) == 1


def test_an_unseeded_sampler_says_its_seed() -> None:
    logits = np.zeros(1000, np.float32)
    first = Sampler(1.0)
    again = Sampler(1.0, seed=first.seed)
    assert [first.sample(logits) for _ in range(20)] == [again.sample(logits) for _ in range(20)]
    assert Sampler(1.0).seed != first.seed


@pytest.mark.parametrize(
    ("flag", "settings_"),
    [
        ("--temperature", {"temperature": -0.1}),
        ("--temperature", {"temperature": math.nan}),
        ("--temperature", {"temperature": math.inf}),
        ("--top-k", {"top_k": -1}),
        ("--top-p", {"top_p": 0.0}),
        ("--top-p", {"top_p": 1.1}),
        ("--min-p", {"min_p": 1.0}),
        ("--min-p", {"min_p": math.nan}),
        ("--seed", {"seed": -1}),
    ],
)
def test_values_outside_their_range_name_the_flag(flag: str, settings_: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=flag):
        Sampler(**settings_)  # type: ignore[arg-type]


def test_any_temperature_is_silent() -> None:
    """Warnings are errors in these tests."""
    assert Sampler(1e-310, seed=0).sample(np.array([3, 1, 2], np.float32)) == 0
