"""generate(): what it yields, what it feeds, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.runtime import Grammar, KVCache, Sampler, Session, Step, generate, load
from posttrainllm.runtime.errors import ContextFullError
from posttrainllm.runtime.json_schema import closed
from posttrainllm.runtime.tokenizer import ByteTokenizer

PROMPT = list(b"Once upon a time")


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Session:
    return load(tiny_bundle, provider="cpu")


class Typist:
    """A session whose greedy output is `text`, byte by byte, then newlines for ever."""

    vocab_size = 256
    tokenizer = ByteTokenizer()

    def __init__(self, text: bytes, prompt: int = len(PROMPT)) -> None:
        self.text, self.prompt, self.runs = text, prompt, 0

    def prefill(self, ids: Sequence[int], cache: Any) -> NDArray[np.float32]:
        self.runs += 1
        position = len(ids) - self.prompt
        logits = np.zeros(256, np.float32)
        logits[self.text[position] if position < len(self.text) else ord("\n")] = 1
        return logits


class Room:
    """As much of a cache as `generate` looks at."""

    max_length = 1000


def typing(typist: Any, prompt: list[int] = PROMPT, **options: Any) -> Iterator[Step]:
    room: Any = Room()
    return generate(typist, prompt, cache=room, **options)


def typed(text: bytes, **options: Any) -> list[Step]:
    return list(typing(Typist(text), **options))


def test_greedy_output_is_the_argmax_of_a_fresh_forward_each_time(session: Session) -> None:
    """The slow, obvious way: no cache is kept between steps."""
    steps = list(generate(session, PROMPT, cache=session.new_cache(), max_tokens=20))
    ids = list(PROMPT)
    for step in steps:
        expected = int(np.argmax(session.forward(ids, session.new_cache())[-1]))
        assert step.id == expected
        ids.append(step.id)
    assert [step.finish_reason for step in steps] == [None] * 19 + ["length"]
    assert not any(step.forced for step in steps)


def test_the_cache_holds_a_prefix_and_the_next_call_goes_on(session: Session) -> None:
    cache = session.new_cache()
    first = [step.id for step in generate(session, PROMPT, cache=cache, max_tokens=5)]
    assert cache.ids == PROMPT + first[:-1]
    more = [step.id for step in generate(session, PROMPT + first, cache=cache, max_tokens=5)]
    together = [step.id for step in generate(session, PROMPT, cache=session.new_cache(), max_tokens=10)]
    assert first + more == together


def test_the_same_seed_gives_the_same_run(session: Session) -> None:
    def run(seed: int) -> list[int]:
        sampler = Sampler(1.5, seed=seed)
        return [
            step.id
            for step in generate(session, PROMPT, cache=session.new_cache(), sampler=sampler, max_tokens=30)
        ]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_a_full_context_ends_the_output(session: Session) -> None:
    cache = session.new_cache(max_length=len(PROMPT) + 4)
    steps = list(generate(session, PROMPT, cache=cache, max_tokens=50))
    assert len(steps) == 4
    assert steps[-1].finish_reason == "context"


def test_a_prompt_that_does_not_fit_is_an_error(session: Session) -> None:
    with pytest.raises(ContextFullError):
        next(generate(session, PROMPT, cache=session.new_cache(max_length=4)))


def test_no_tokens_are_an_error(session: Session) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        next(generate(session, PROMPT, cache=session.new_cache(), max_tokens=0))


@pytest.mark.parametrize("text", ["a😸b", "日本", "é" * 5, "plain"])
def test_streamed_text_never_breaks_a_character(text: str) -> None:
    """Pieces are whole characters, and together they are the whole text."""
    steps = typed(text.encode(), max_tokens=len(text.encode()))
    assert all("\ufffd" not in step.text for step in steps)
    assert "".join(step.text for step in steps) == text


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    steps = typed("é".encode(), max_tokens=1)
    assert [step.text for step in steps] == ["\ufffd"]


def test_invalid_bytes_come_out_as_replacement_characters() -> None:
    steps = typed(b"a\xff\xfeb", max_tokens=4)
    assert "".join(step.text for step in steps) == "a\ufffd\ufffdb"


def test_a_stop_sequence_ends_the_output_and_is_not_shown() -> None:
    """Not even its first half, and text that only resembles it is not lost."""
    steps = typed(b"hi <|im <|im_end|> more", stop=list(b"<|im_end|>"))
    assert "".join(step.text for step in steps) == "hi <|im "
    assert bytes(step.id for step in steps) == b"hi <|im <|im_end|>"
    assert [step.finish_reason for step in steps][-2:] == [None, "stop"]


def test_a_possible_stop_is_let_go_when_it_is_none() -> None:
    seen = []
    for step in typing(Typist(b"ab<|imx"), stop=list(b"<|im_end|>"), max_tokens=7):
        seen.append(step.text)
    assert "".join(seen) == "ab<|imx"
    assert seen[:2] == ["a", "b"], "nothing is held back without need"


def test_a_half_stop_at_the_limit_is_text() -> None:
    steps = typed(b"ab<|im_end|>", stop=list(b"<|im_end|>"), max_tokens=6)
    assert "".join(step.text for step in steps) == "ab<|im"
    assert steps[-1].finish_reason == "length"


def test_the_prompt_does_not_count_as_the_stop_sequence() -> None:
    steps = list(typing(Typist(b"d|>x", 8), list(b"<|im_end"), stop=list(b"<|im_end|>"), max_tokens=4))
    assert "".join(step.text for step in steps) == "d|>x"


def grammar(schema: dict[str, Any], tokenizer: Any = None, width: int = 256) -> Grammar:
    return Grammar(schema, tokenizer or ByteTokenizer(), vocab_size=width)


def test_forced_ids_ride_along_with_one_forward() -> None:
    schema = closed({"type": "object", "properties": {"flag": {"enum": ["yes", "no"]}}, "required": ["flag"]})
    typist = Typist(b'{"flag": "yes"}')
    steps = list(typing(typist, matcher=grammar(schema).matcher()))
    assert "".join(step.text for step in steps) == '{"flag": "yes"}'
    assert [step.forced for step in steps].count(False) == typist.runs == 1, "only y or n is a choice"
    assert steps[-1].finish_reason == "stop"
    assert steps[-1].forced


def test_forced_ids_do_not_count_as_tokens() -> None:
    steps = typed(
        b'{"a": "xy',
        max_tokens=2,
        matcher=grammar(
            {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"}
        ).matcher(),
    )
    assert "".join(step.text for step in steps) == '{"a": "xy'
    assert steps[-1].finish_reason == "length"


def test_a_grammar_without_any_choice_needs_no_model() -> None:
    typist = Typist(b"")
    steps = list(typing(typist, matcher=grammar({"const": {"a": 1}}).matcher()))
    assert "".join(step.text for step in steps) == '{"a": 1}'
    assert typist.runs == 0
    assert steps[-1].finish_reason == "stop"


def test_ids_that_the_tokenizer_does_not_know_are_never_sampled(
    make_bundle: Callable[..., Path], bpe_tokenizer: Path
) -> None:
    """The model's table has more rows than the tokenizer has tokens."""
    session = load(make_bundle(vocab=1000, d_model=16, heads=2, layers=1, ctx=128, tokenizer=bpe_tokenizer))
    known = session.tokenizer.vocab_size
    assert known < session.vocab_size
    cache: KVCache = session.new_cache()
    sampler = Sampler(5.0, seed=1)
    free = [step.id for step in generate(session, [1, 2], cache=cache, sampler=sampler, max_tokens=100)]
    matcher = grammar({"type": "string"}, session.tokenizer, 1000).matcher()
    bound = [
        s.id for s in generate(session, [1, 2], cache=cache, sampler=sampler, max_tokens=60, matcher=matcher)
    ]
    assert max(free + bound) < known
