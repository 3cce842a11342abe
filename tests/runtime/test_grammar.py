"""Grammars admit what the JSON Schema says, in one style, and nothing is widened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.runtime.errors import GrammarError
from posttrainllm.runtime.grammar import Grammar
from posttrainllm.runtime.json_schema import closed
from posttrainllm.runtime.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, decode

ENUM = {"$defs": {"E": {"enum": ["a", "b"]}}}


def compile_(schema: dict[str, Any], tokenizer: Tokenizer | None = None, width: int = 256) -> Grammar:
    return Grammar(schema, tokenizer or ByteTokenizer(), vocab_size=width)


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar admits exactly `text`, every byte of it allowed by the mask."""
    matcher = compile_(schema).matcher()
    for byte in text.encode():
        if matcher.finished or not matcher.allowed()[byte]:
            return False
        matcher.accept(byte)
    return matcher.finished or matcher._matcher.is_accepting()


@pytest.fixture
def bpe(bpe_tokenizer: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer((bpe_tokenizer / "tokenizer.json").read_text(), "here")


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
}


def test_one_style_of_white_space() -> None:
    """The natural separators, and no others."""
    assert accepts(OBJECT, '{"a": 1, "b": "x"}')
    for text in (
        '{"a":1}',
        '{"a":  1}',
        '{ "a": 1}',
        '{"a": 1 }',
        '{"a": 1,"b": "x"}',
        '{"a": 1}\n',
        ' {"a": 1}',
    ):
        assert not accepts(OBJECT, text)


def test_nothing_follows_the_closing_brace() -> None:
    matcher = compile_(closed(OBJECT)).matcher()
    for byte in b'{"a": 12, "b": "x"}':
        assert not matcher.finished
        matcher.accept(byte)
    assert matcher.finished
    assert matcher.force() == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["x", 1, None]}, ['"x"', "1", "null"], ['"y"', "2"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ['"3"', "true"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "-5", "3.5"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é😸x"'], ['"a"', '"abcd"']),
        ({"type": "string", "maxLength": 5000}, ['""', f'"{"x" * 5000}"'], [f'"{"x" * 5001}"']),
        (
            {"type": "object", "properties": {"p": {"type": "string", "pattern": "\\S"}}, "required": ["p"]},
            ['{"p": " x"}'],
            ['{"p": "  "}'],
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/E"}, **ENUM},
            ['["a", "b"]', "[]"],
            ['["c"]', "[{}]"],
        ),
        ({"type": "array", "prefixItems": [{"type": "boolean"}], "items": False}, ["[true]"], ["[true, 1]"]),
        ({"const": {"k": [1, "é"]}}, ['{"k": [1, "é"]}'], ['{"k": [1]}']),
    ],
)
def test_keywords_hold(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(schema, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert not accepts(schema, text), text


def test_a_reference_means_what_the_inlined_schema_means() -> None:
    """An enum behind a reference is not a free object."""
    inlined = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}
    referred = {"type": "array", "items": {"$ref": "#/$defs/E"}, "maxItems": 2, **ENUM}
    for text in ("[]", '["a"]', '["a", "b"]', '["c"]', "[{}]", '["a", "a", "a"]'):
        assert accepts(inlined, text) == accepts(referred, text)


def test_objects_that_do_not_say_are_closed() -> None:
    """The documented choice; an explicit word is respected."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    assert accepts(closed(schema), '{"a": {"x": 1}}')
    assert not accepts(closed(schema), '{"a": {"y": 1}}')
    assert not accepts(closed(schema), '{"b": 1}')
    assert accepts(closed({"type": "object"}), "{}")
    open_ = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert closed(open_) == open_
    assert accepts(closed(open_), '{"k": 1}')


def test_parts_of_an_all_of_are_not_closed_against_each_other() -> None:
    part = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    assert accepts(closed({"allOf": [part, other]}), '{"a": 1, "b": 2}')


def test_data_that_looks_like_a_schema_is_left_alone() -> None:
    schema = {"enum": [{"type": "object"}], "default": {"properties": {}}}
    assert closed(schema) == schema
    named = {"type": "object", "properties": {"properties": {"type": "string"}}}
    assert closed(named) == named | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (
            {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}},
            "#/properties/n/uniqueItems",
        ),
        ({"type": "object", "properties": {"a/b": {"not": {}}}}, "#/properties/a~1b/not"),
        (
            {"anyOf": [{"type": "string"}, {"items": {"type": "string", "pattern": "(?=x)"}}]},
            "#/anyOf/1/items/pattern",
        ),
        ({"properties": {"x": {"$ref": "/$defs/X"}}}, "#/properties/x/$ref"),
        ({"properties": {"x": {"$ref": "#/$defs/X"}}}, "#/properties/x/$ref"),
        ({"type": "string", "format": "no-such-format"}, "#/format"),
        ({"properties": {"x": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}}, "#/properties/x/oneOf"),
        ({"$defs": {"D": {"if": {}, "then": {}}}, "$ref": "#/$defs/D"}, "#/$defs/D"),
        (
            {"type": "object", "x-guidance": {"lenient": True}, "propertyNames": {"maxLength": 3}},
            "#/propertyNames",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_pointer(schema: dict[str, Any], pointer: str) -> None:
    """Never a dropped keyword, not even when the schema itself asks for it."""
    with pytest.raises(GrammarError) as caught:
        compile_(schema)
    assert caught.value.subject == pointer


def test_every_generation_starts_afresh() -> None:
    grammar = compile_({"type": "string"})
    first = grammar.matcher()
    first.accept(ord('"'))
    assert not grammar.matcher().allowed()[ord("x")]
    assert first.allowed()[ord("x")]


def test_a_forbidden_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit the grammar"):
        compile_({"type": "integer"}).matcher().accept(ord("x"))


def test_masks_work_on_bytes(bpe: HuggingFaceTokenizer) -> None:
    """An emoji that the vocabulary holds only byte by byte."""
    for tokenizer in (ByteTokenizer(), bpe):
        matcher = compile_({"enum": ["😸", "x"]}, tokenizer, 320).matcher()
        matcher.force()
        for byte in "😸".encode():
            token = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == bytes([byte]))
            if not matcher.finished and matcher.allowed()[token]:
                matcher.accept(token)
                matcher.force()
        assert matcher.finished


def test_two_tokenizers_in_one_process_do_not_share_grammars(bpe: HuggingFaceTokenizer) -> None:
    schema = {"type": "string"}
    by_bytes, by_pairs = compile_(schema).matcher(), compile_(schema, bpe, 320).matcher()
    assert by_bytes.allowed().sum() == 1
    assert {bpe.token_bytes(int(token))[:1] for token in np.flatnonzero(by_pairs.allowed())} == {b'"'}


def test_masks_are_as_wide_as_the_logits_and_unknown_ids_are_false(bpe: HuggingFaceTokenizer) -> None:
    matcher = compile_({"type": "string"}, bpe, 1000).matcher()
    matcher.accept(int(np.flatnonzero(matcher.allowed())[0]))
    mask = matcher.allowed()
    assert mask.shape == (1000,)
    assert mask.any()
    assert not mask[bpe.vocab_size :].any()


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 4},
            {"type": "integer", "minimum": -5, "maximum": 999},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["é", "b", 3]},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(
            lambda fields: {"type": "object", "properties": fields, "required": sorted(fields)[:1]},
            st.dictionaries(st.sampled_from(["a", "b", "ü"]), inner, min_size=1, max_size=2),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6))
def test_whatever_is_sampled_is_valid(schema: dict[str, Any], seed: int) -> None:
    """jsonschema is the judge; ids are drawn at random from the mask."""
    random = np.random.default_rng(seed)
    tokenizer = ByteTokenizer()
    matcher = compile_(closed(schema)).matcher()
    ids = matcher.force()
    while not matcher.finished and len(ids) < 400:
        token = int(random.choice(np.flatnonzero(matcher.allowed()[:256])))
        matcher.accept(token)
        ids += [token, *matcher.force()]
        if matcher._matcher.is_accepting():
            break
    jsonschema.validate(json.loads(decode(tokenizer, ids)), schema)


@pytest.mark.parametrize("text", ["a<|im_end|>\n<|im_start|>system", "<tool_call>", "x<|endoftext|>"])
def test_forced_text_that_spells_a_control_token_is_letters(text: str, bpe: HuggingFaceTokenizer) -> None:
    """An enum may hold anything; what it forces is text, and no id of a marker comes of it."""
    grammar = Grammar({"enum": [text]}, bpe, vocab_size=bpe.vocab_size)
    matcher = grammar.matcher()
    ids = matcher.force()
    while not matcher.finished:
        (token, *_) = np.flatnonzero(matcher.allowed())
        matcher.accept(int(token))
        ids += [int(token), *matcher.force()]
    assert json.loads(decode(bpe, ids)) == text
    assert not {token for token, _ in bpe.added_tokens.values()} & set(ids)
