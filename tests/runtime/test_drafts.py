"""Drafts: the output is the one without them, whatever they guess, in fewer runs where they guess well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.export.exporter import export
from posttrainllm.runtime import Grammar, Sampler, Session, Step, generate, load
from posttrainllm.runtime.drafts import LONGEST_DRAFT, PromptLookup, best_length
from posttrainllm.runtime.json_schema import closed

PROMPT = list(b"a list of names: anna, bert, anna, bert, anna")
CALL = closed(
    {
        "type": "object",
        "properties": {
            "tool": {"enum": ["read_file", "list_files"]},
            "path": {"type": "string", "maxLength": 30},
        },
        "required": ["tool", "path"],
    }
)


@pytest.fixture(scope="module")
def session(make_bundle: Callable[..., Path]) -> Session:
    return load(make_bundle(vocab=256, d_model=32, heads=4, layers=2, ctx=512, seed=5), provider="cpu")


class Told:
    """Proposes what it was told to, one list after the other, and remembers what came of it."""

    def __init__(self, proposals: Sequence[list[int]]) -> None:
        self.proposals = list(proposals)
        self.learnt: list[tuple[int, int]] = []

    def propose(self, ids: Sequence[int]) -> list[int]:
        return self.proposals.pop(0) if self.proposals else []

    def learn(self, proposed: int, right: int) -> None:
        self.learnt.append((proposed, right))


class Oracle:
    """Knows `output`, and spoils what it says from place `wrong` of each draft on."""

    def __init__(self, prompt: int, output: list[int], length: int, wrong: int) -> None:
        self.prompt, self.output, self.length, self.wrong = prompt, output, length, wrong

    def propose(self, ids: Sequence[int]) -> list[int]:
        done = len(ids) - self.prompt
        right = self.output[done : done + self.length]
        return [token if place < self.wrong else (token + 1) % 256 for place, token in enumerate(right)]

    def learn(self, proposed: int, right: int) -> None:
        assert right <= min(proposed, self.wrong)


def run(session: Session, drafter: Any, **options: Any) -> tuple[list[Step], int]:
    """The steps, and how many runs of the model they took."""
    cache = session.new_cache()
    runs, keep = 0, cache.keep

    def counted(ids: Sequence[int]) -> None:
        nonlocal runs
        runs += 1
        keep(ids)

    cache.keep = counted  # type: ignore[method-assign]
    if seed := options.pop("seed", None):
        options["sampler"] = Sampler(1.2, seed=seed)
    if options.pop("constrained", False):
        options["matcher"] = Grammar(CALL, session.tokenizer, vocab_size=session.vocab_size).matcher()
    steps = list(generate(session, PROMPT, cache=cache, drafter=drafter, **options))
    ids = PROMPT + [step.id for step in steps]
    assert cache.ids == ids[: cache.length], "no wrong guess stays behind"
    return steps, runs


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 3, 99])
def test_right_and_wrong_guesses_change_nothing_but_the_count_of_runs(
    session: Session, seed: int | None, constrained: bool, wrong: int
) -> None:
    plain, runs = run(session, None, seed=seed, constrained=constrained, max_tokens=40)
    output = [step.id for step in plain]
    drafted, fewer = run(
        session, Oracle(len(PROMPT), output, 4, wrong), seed=seed, constrained=constrained, max_tokens=40
    )
    assert drafted == plain
    assert fewer < runs if wrong else fewer == runs
    if wrong == 99 and not constrained:
        assert fewer == 8, "five ids a run"


@settings(max_examples=25, deadline=None)
@given(
    proposals=st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=10),
    seed=st.sampled_from([None, 7]),
    constrained=st.booleans(),
)
def test_any_guesses_at_all(
    session: Session, proposals: list[list[int]], seed: int | None, constrained: bool
) -> None:
    plain, _ = run(session, None, seed=seed, constrained=constrained, max_tokens=12)
    drafted, _ = run(session, Told(proposals), seed=seed, constrained=constrained, max_tokens=12)
    assert drafted == plain


def test_what_the_grammar_forces_after_a_guess_is_drafted_too(session: Session) -> None:
    plain, _ = run(session, None, constrained=True, max_tokens=1)
    choice = next(place for place, step in enumerate(plain) if not step.forced)
    after = [step.id for step in plain[choice + 1 :]]
    assert len(after) > 3
    told = Told([[plain[choice].id]])
    steps, runs = run(session, told, constrained=True, max_tokens=2)
    assert [step.id for step in steps][: len(plain)] == [step.id for step in plain]
    assert runs == 1, "the guess, what it forced, and the choice behind"


def test_a_stop_sequence_inside_a_draft_ends_the_output(session: Session) -> None:
    plain, _ = run(session, None, max_tokens=12)
    output = [step.id for step in plain]
    stop = output[4:6]
    expected, _ = run(session, None, stop=stop, max_tokens=12)
    drafted, _ = run(session, Oracle(len(PROMPT), output, 8, 99), stop=stop, max_tokens=12)
    assert drafted == expected
    assert drafted[-1].finish_reason == "stop"


def test_drafts_stay_within_the_context(session: Session) -> None:
    output = [step.id for step in run(session, None, max_tokens=10)[0]]
    cache = session.new_cache(max_length=len(PROMPT) + 3)
    steps = list(
        generate(session, PROMPT, cache=cache, drafter=Oracle(len(PROMPT), output, 8, 99), max_tokens=10)
    )
    assert [step.id for step in steps] == output[:3]
    assert steps[-1].finish_reason == "context"


def test_a_reader_who_leaves_early_leaves_no_guess_behind(session: Session) -> None:
    output = [step.id for step in run(session, None, max_tokens=10)[0]]
    cache = session.new_cache()
    steps = generate(session, PROMPT, cache=cache, drafter=Oracle(len(PROMPT), output, 8, 2), max_tokens=10)
    first = next(steps)
    steps.close()
    assert cache.ids == [*PROMPT, first.id]
    assert first.id == output[0]


def test_the_drafter_is_told_how_far_it_was_right(session: Session) -> None:
    output = [step.id for step in run(session, None, max_tokens=10)[0]]
    told = Told([[*output[:2], (output[2] + 1) % 256], [(output[3] + 1) % 256], []])
    run(session, told, max_tokens=10)
    assert told.learnt == [(3, 2), (1, 0)]


def test_lookup_proposes_what_followed_the_longest_match() -> None:
    lookup = PromptLookup("int8")
    ids = [1, 2, 3, 4, 9, 2, 3, 5, 7, 7, 1, 2, 3]
    assert lookup.propose(ids)[:2] == [4, 9], "1 2 3 matches more than 2 3, which came later"
    assert lookup.propose([*ids[:-3], 8, 2, 3])[:2] == [5, 7], "of equal matches the latest"
    assert lookup.propose([1, 2, 3]) == []
    assert lookup.propose([]) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=20), st.integers(0, 60))
def test_lookup_follows_a_conversation_that_is_cut_and_goes_on(
    ids: list[int], more: list[int], cut: int
) -> None:
    """Its index, kept from one call to the next, is that of a fresh one; a proposal is what stands behind a match."""
    lookup = PromptLookup("fp32")
    for text in (ids, [*ids[:cut], *more], [*ids[:cut], *more, 1]):
        found = lookup.propose(text)
        assert found == PromptLookup("fp32").propose(text)
        assert len(found) <= LONGEST_DRAFT
        if found:
            pairs = [place for place in range(1, len(text) - 1) if text[place - 1 : place + 1] == text[-2:]]
            assert any(text[place + 1 : place + 1 + len(found)] == found for place in pairs)


def test_lookup_stops_where_it_is_wrong_and_tries_again_later() -> None:
    lookup = PromptLookup("int4")
    silent = []
    for _ in range(200):
        proposal = lookup.propose([1, 2, 3, 1, 2])
        silent.append(not proposal)
        if proposal:
            lookup.learn(len(proposal), 0)
    assert not any(silent[:3])
    assert 0 < silent[50:].count(False) < 40, "now and then, not always"


@pytest.mark.parametrize("cost", [0.05, 0.11, 0.21, 0.5])
def test_the_length_is_the_one_that_gives_most_ids_for_the_time(cost: float) -> None:
    """Against a simulation of runs with that many guesses, each right with probability `hit`."""
    rng = np.random.default_rng(3)
    for hit in (0.05, 0.3, 0.6, 0.9):
        rights = np.cumprod(rng.random((200_000, LONGEST_DRAFT)) < hit, axis=1)
        speeds = [
            (1 + rights[:, :count].sum(axis=1).mean()) / (1 + count * cost)
            for count in range(LONGEST_DRAFT + 1)
        ]
        assert speeds[best_length(hit, cost)] > max(speeds) - 0.01


def test_a_graph_that_concatenates_gets_no_drafts(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Every wrong guess would move all keys and values together."""
    checkpoint = make_checkpoint(ctx=64)
    for flavour, drafts in (("fused", True), ("standard", False)):
        bundle = export(checkpoint, tmp_path / flavour, flavour=flavour).bundle
        assert (load(bundle, provider="cpu").new_drafter() is not None) == drafts
