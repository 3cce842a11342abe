"""MinHash against a plain implementation of its definition, and the index against comparing with everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.agent.minhash import NearDuplicates, fnv1a, similarity


def plain_signature(text: str) -> list[int]:
    """By the definition, number by number, in Python's unbounded integers."""
    wrap = 1 << 64
    state = 0xC0FFEE1234ABCDEF
    numbers = []
    for _ in range(128):
        state = (state * 6364136223846793005 + 1442695040888963407) % wrap
        numbers.append(state)
    shingles = [text] if len(text) < 5 else [text[i : i + 5] for i in range(len(text) - 4)]
    hashes = []
    for shingle in shingles:
        value = 14695981039346656037
        for byte in shingle.encode():
            value = ((value ^ byte) * 1099511628211) % wrap
        hashes.append(value)
    return [
        min((numbers[2 * k] * value + numbers[2 * k + 1]) % wrap % (2**61 - 1) for value in hashes)
        for k in range(64)
    ]


def test_fnv1a_against_published_values() -> None:
    """From the test vectors of the FNV reference code."""
    assert fnv1a(b"") == 0xCBF29CE484222325
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


@pytest.mark.parametrize("text", ["", "a", "abcd", "abcde", "abcdef", "héllo wörld", "🙂" * 7, "x" * 9000])
def test_signatures(text: str) -> None:
    assert NearDuplicates(0.85).signature(text).tolist() == plain_signature(text)


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_signatures_of_any_text(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert NearDuplicates(0.5).signature(text).tolist() == plain_signature(text)


@given(
    st.lists(st.text(alphabet="ab ", max_size=14), max_size=25),
    st.sampled_from([0.01, 0.3, 0.5, 0.6, 0.85, 0.95, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_index_finds_what_comparing_with_everything_finds(texts: list[str], threshold: float) -> None:
    index = NearDuplicates(threshold)
    kept: list[list[int]] = []
    for text in texts:
        signature = plain_signature(text)
        near = any(
            sum(a == b for a, b in zip(signature, other, strict=True)) / 64 >= threshold for other in kept
        )
        assert index.seen(text) is near
        if not near:
            kept.append(signature)


def test_similarity_estimates_the_jaccard_index() -> None:
    index = NearDuplicates(0.85)
    first, second = "How many lines does LICENSE have", "How many  lines does LICENSE have"
    parts = [{text[i : i + 5] for i in range(len(text) - 4)} for text in (first, second)]
    exact = len(parts[0] & parts[1]) / len(parts[0] | parts[1])
    estimate = similarity(index.signature(first), index.signature(second))
    assert estimate == pytest.approx(exact, abs=0.25), "four standard deviations of 64 draws"


@pytest.mark.parametrize("threshold", [0, -1, 1.01, float("nan")])
def test_thresholds_that_mean_nothing(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        NearDuplicates(threshold)
