"""The specialist's training data is what the agent feeds, and asks for nothing that the grammar refuses."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from posttrainllm.agent import chat_format
from posttrainllm.agent.arguments import check_arguments
from posttrainllm.agent.chat_format import Piece, PosttrainDialect, reply_schema
from posttrainllm.runtime import Grammar
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer, decode

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "models" / "demo" / "tokenizer" / "tokenizer.json"
DEMO = {
    "list_files", "read_file", "count_lines", "count_words", "search_text", "file_size", "file_date", "calculate",
    "current_time",
}  # fmt: skip


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, loaded from the checkout; its neighbours are imported by their plain names."""
    monkeypatch.syspath_prepend(str(ROOT / "models" / "recipes"))
    yield importlib.import_module("specialist_data")
    for name in [name for name in sys.modules if name.startswith("specialist_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    assert TOKENIZER is not None
    return HuggingFaceTokenizer(TOKENIZER.read_text(encoding="utf-8"), str(TOKENIZER))


def scenes(data: Any, count: int) -> Iterator[Any]:
    for seed in range(count):
        rng = Random(seed)
        yield data.Scene(rng, data.offer(rng))


def test_the_ids_are_those_that_the_agent_feeds(data: Any, tokenizer: HuggingFaceTokenizer) -> None:
    dialect = PosttrainDialect()
    for scene in scenes(data, 60):
        exchange = data.exchange(scene)
        pieces = dialect.system(scene.offer.header, scene.offer.tools) + dialect.user(exchange.request)
        for call, result in exchange.steps:
            pieces += [Piece("sampled", json.dumps(call, ensure_ascii=False)), *dialect.end_of_turn()]
            pieces += dialect.tool_result(result)
        answer = json.dumps({"answer": exchange.answer}, ensure_ascii=False)
        pieces += [Piece("sampled", answer), *dialect.end_of_turn()]
        spans, escaped = chat_format.encode(pieces, tokenizer)
        system = [(data.DIALECT.system(scene.offer.header, scene.offer.tools), data.PROMPT)]
        ids, labels = data.encode([*system, *data.segments(exchange)], tokenizer)
        assert ids == [token for span in spans for token in span.ids]
        assert not escaped
        spoken = [
            token for token, label in zip(ids, labels, strict=True) if label in (data.CALL, data.ANSWER)
        ]
        replies = [*(call for call, _ in exchange.steps), {"answer": exchange.answer}]
        assert decode(tokenizer, spoken) == "".join(map(data.said, replies))
        assert labels.count(data.END) == len(replies)


def test_calls_fit_their_tools_and_replies_the_grammar(data: Any, tokenizer: HuggingFaceTokenizer) -> None:
    for scene in scenes(data, 60):
        tools = {tool.name: tool for tool in scene.offer.tools}
        grammar = Grammar(reply_schema(scene.offer.tools), tokenizer, vocab_size=tokenizer.vocab_size)
        for exchange in (data.exchange(scene), data.exchange(scene)):
            for call, result in exchange.steps:
                assert check_arguments(tools[call["tool"]], call["arguments"]) == call["arguments"]
                assert result.tool == call["tool"]
            for reply in [*(call for call, _ in exchange.steps), {"answer": exchange.answer}]:
                matcher = grammar.matcher()
                for token in tokenizer.encode_content(data.said(reply)).ids:
                    assert matcher.allowed()[token]
                    matcher.accept(token)
                assert matcher.finished


def test_a_seed_gives_one_conversation(data: Any, tokenizer: HuggingFaceTokenizer) -> None:
    first, again, other = (data.row(Random(seed), tokenizer, 512) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other
    assert len(first[0]) == len(first[1]) == 512
    assert set(first[1]) == {data.PROMPT, data.CALL, data.ANSWER, data.END}


def test_a_name_has_the_same_ids_wherever_it_stands(data: Any, tokenizer: HuggingFaceTokenizer) -> None:
    rng = Random(1)
    for _ in range(500):
        name = data.names.file_path(rng)
        ids = tokenizer.encode_content(name).ids
        assert decode(tokenizer, ids) == name
        for before, after in (("read ", "?"), ('{"path": "', '"}'), ("“", "”"), ("", "'s size")):
            whole = tokenizer.encode_content(before + name + after).ids
            start = len(tokenizer.encode_content(before).ids)
            assert whole[start : start + len(ids)] == ids


def test_every_request_is_filled_and_every_tool_is_asked_for(data: Any) -> None:
    called: set[str] = set()
    refused = 0
    for scene in scenes(data, 400):
        for _ in range(4):
            exchange = data.exchange(scene)
            assert exchange.request.strip()
            assert not re.search(
                r"\{[A-Za-z]\}|\{(path|folder|pattern|other|one|two)\}|<\|", exchange.request
            )
            called |= {call["tool"] for call, _ in exchange.steps}
            refused += exchange.answer == data.NO_TOOL_ANSWER
            if exchange.answer == data.NO_TOOL_ANSWER:
                assert not exchange.steps
    assert called >= DEMO
    assert 40 < refused < 400


def test_answers_hold_the_facts(data: Any) -> None:
    results = importlib.import_module("specialist_results")
    outcome, path = results.Outcome, {"path": "a b.txt"}
    assert results.answer("count_lines", path, outcome("42")) == "a b.txt has 42 lines."
    assert results.answer("count_words", path, outcome("1")) == "a b.txt has 1 word."
    assert results.answer("file_size", path, outcome("7 bytes")) == "a b.txt is 7 bytes."
    said = results.answer("file_date", path, outcome("2024-05-03 14:22"))
    assert said == "a b.txt was last changed on 2024-05-03 at 14:22."
    assert results.answer("read_file", path, outcome("")) == "a b.txt is empty."
    assert results.answer("read_file", path, outcome("a\nb\nc\nd")) == "a b.txt says: a\nb\nc…"
    given = {"pattern": "x", "path": "src"}
    found = results.answer("search_text", given, outcome("2 matches\nsrc/a:3: x\nsrc/b:1: x"))
    assert found == '2 matches for "x": first in src/a, line 3.'
    assert results.answer("search_text", given, outcome("0 matches")) == 'No match for "x" in src.'
    assert (
        results.answer("list_files", {"folder": "d"}, outcome("a\nb/\n(3 more)"))
        == "d holds: a, b/ (3 more)."
    )
    assert results.answer("calculate", {"expression": "1+1"}, outcome("2")) == "1+1 = 2"
    assert results.answer("current_time", {}, outcome("2024-05-03 14:22")) == "It is 14:22 on 2024-05-03."
    missing = outcome("", "no such file: a b.txt", 1)
    assert results.answer("file_size", path, missing) == "I could not do that: no such file: a b.txt."
