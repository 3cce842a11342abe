"""Finding the call or the answer in what a model wrote, in free text too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.agent.reply import Answer, Call, Malformed, Reply, ReplyScanner, parse_object

TOOLS = ("a", "b", "read_file")
CALL = '{"tool": "a", "arguments": {"x": "}{\\""}}'


def scan(text: str, size: int = 1) -> Reply | None:
    scanner = ReplyScanner(TOOLS)
    for start in range(0, len(text), size):
        if scanner.push(text[start : start + size]):
            break
    return scanner.reply or scanner.finish()


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (CALL, Call("a", {"x": '}{"'})),
        ('{"answer": "done"}', Answer("done")),
        ('{"answer": 42}', Answer("42")),
        ('{"answer": {"a": "é"}}', Answer('{"a": "é"}')),
        ('{"tool": "a"}', Call("a", {})),  # No arguments at all
        ('{"tool": "nope", "arguments": {}}', Call("nope", {})),  # told which tools there are
        # Other call shapes, for declared tools only
        ('{"name": "b", "arguments": {"k": 1}}', Call("b", {"k": 1}, "name")),
        ('{"type": "function", "function": {"name": "b", "arguments": "{}"}}', Call("b", "{}", "function")),
        ('{"name": "b", "parameters": {"k": 1}}', Call("b", {"k": 1}, "name")),
        ('{"name": "nope", "arguments": {}}', None),
        ('{"foo": 1}', None),
        ("[1]", None),
    ],
)
def test_one_object(text: str, reply: Reply | None) -> None:
    assert parse_object(text, TOOLS) == reply


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "prose",
    [
        "",
        "Let me look. ",
        'She said "hi ',  # a quote in prose does not hide the object
        "the set {1,2} and {x} ",  # braces in prose do not end the turn
        'an empty {} one, a {"foo": 1} one ',
        'broken {"a then ',
        '{"k" 1} ',
        '```json\n{"name": "a", "arguments": {}}\n```\n',  # A fenced block is text
        "{{{{ ",
        "<tool_call>\n",
    ],
)
def test_prose_does_not_hide_the_object(prose: str, size: int) -> None:
    assert scan(prose + CALL + " trailing", size) == Call("a", {"x": '}{"'})


def test_the_first_of_several_objects_counts() -> None:
    """The rule is: the first one."""
    assert scan('{"tool":"a"} {"tool":"b","arguments":{}}') == Call("a", {})


def test_the_scan_stops_at_the_closing_brace() -> None:
    """Nothing after the object is looked at."""
    scanner = ReplyScanner(TOOLS)
    replies = [scanner.push(character) for character in CALL]
    assert replies[:-1] == [None] * (len(CALL) - 1)
    assert replies[-1] == Call("a", {"x": '}{"'})


@pytest.mark.parametrize(
    "text",
    [
        '{"tool":"a","arguments":{"c":"echo \\\'hi\\\'"}}',  # \' is not JSON
        '{"tool": "a", "arguments": {"n": 01}}',
        '{"tool": "a", "arguments": {"n": NaN}}',
        '{"tool": "a", "arguments" {"n": 1}}',
        '{"answer": "x", }',
        '{"tool": "a", "arguments": {"id":"a","n":',  # Cut off
        '{"answer": "never en',
        '{"tool": "a", "arguments": {"x": "\n"}}',
    ],
)
def test_a_call_that_is_no_json_is_reported_not_run(text: str) -> None:
    reply = scan(text)
    assert isinstance(reply, Malformed)
    assert "JSON" in reply.problem or "closing brace" in reply.problem


def test_depth_does_not_crash() -> None:
    deep = '{"tool": "a", "arguments": ' + '{"k": ' * 100_000
    assert isinstance(scan(deep, 1000), Malformed)
    whole = '{"answer": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert isinstance(scan(whole, 1000), Malformed)


@pytest.mark.parametrize("text", ["", "hello", "{", "}", "{1,2}", '"', '```\n{"answer": "x"}'])
def test_no_reply(text: str) -> None:
    assert scan(text) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), VALUES, max_size=3),
    prose=st.text(alphabet=st.characters(exclude_characters="{`")),
    indent=st.sampled_from([None, 0, 2]),
    size=st.integers(1, 9),
)
def test_every_json_object_is_found_behind_any_prose(
    arguments: dict[str, object], prose: str, indent: int | None, size: int
) -> None:
    text = json.dumps({"tool": "a", "arguments": arguments}, indent=indent)
    assert scan(prose + text, size) == Call("a", arguments)


@given(st.text(alphabet=st.sampled_from('{}[]":,\\ 1atnul`ols"'), max_size=60))
def test_no_text_breaks_the_scanner(text: str) -> None:
    assert scan(text) == scan(text, 1000)
