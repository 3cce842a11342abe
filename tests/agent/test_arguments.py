"""Arguments: nothing runs with wrong ones, only what the schema asks for is changed, and never with loss."""

from __future__ import annotations

import copy
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from posttrainllm.agent.arguments import (
    ArgumentProblem,
    check_arguments,
    problem_result,
    unknown_tool_result,
)
from posttrainllm.agent.tools import Tool

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
STRING = {"type": "string"}
INTEGERS = {"type": "array", "items": INTEGER}
POINT = {"type": "object", "properties": {"x": INTEGER, "label": STRING}, "required": ["x"]}


def tool(required: list[str] | None = None, /, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required or []}
    return Tool("t", parameters={**schema, "$defs": {"I": INTEGER, "P": POINT}})


def fitted(schema: Any, value: Any) -> Any:
    """`value` as argument `a` of the given schema arrives; a problem if it does not."""
    result = check_arguments(tool(a=schema), {"a": value})
    return result["a"] if isinstance(result, dict) else result


def problem(schema: Any, value: Any) -> str:
    result = fitted(schema, value)
    assert isinstance(result, ArgumentProblem), result
    return result.text


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all through: 1 is not True and not 1.0."""
    return json.dumps(left, ensure_ascii=False) == json.dumps(right, ensure_ascii=False)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (INTEGER, "5", 5),
        (INTEGER, "-12", -12),
        (INTEGER, "123456789012345678901234567890", 123456789012345678901234567890),
        (NUMBER, "5", 5),
        (NUMBER, "2.50", 2.5),
        (NUMBER, "-1e3", -1000.0),
        (BOOLEAN, "true", True),
        (BOOLEAN, "false", False),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "5", 5),
        ({"oneOf": [BOOLEAN, INTEGER]}, "true", True),
        ({"$ref": "#/$defs/I"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/I"}, {"minimum": 3}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 7}, "7", 7),
    ],
)
def test_p13_text_becomes_the_number_or_boolean_that_the_schema_wants(
    schema: Any, text: str, value: Any
) -> None:
    assert same(fitted(schema, text), value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (INTEGER, "3.14"),
        (INTEGER, "5.0"),
        (INTEGER, " 5"),
        (INTEGER, "+5"),
        (INTEGER, "007"),
        (INTEGER, "1_000"),
        (INTEGER, "٥"),
        (INTEGER, ""),
        (INTEGER, "9" * 5000),
        (INTEGER, 3.14),
        (INTEGER, True),
        (NUMBER, "0.10000000000000000001"),
        (NUMBER, "1e400"),
        (NUMBER, "nan"),
        (NUMBER, "0x10"),
        (BOOLEAN, "thing"),
        (BOOLEAN, "True"),
        (BOOLEAN, "1"),
        (BOOLEAN, 1),
        (STRING, 5),
        (STRING, ["a"]),
        (INTEGERS, "1,2"),
        (INTEGERS, "[1"),
        (INTEGERS, '"[1]"'),
        (POINT, '{"x": 1, "x": 2}'),
        (INTEGERS, "[NaN]"),
        (INTEGERS, "[" * 10_000),
        ({"type": "null"}, "null"),
        ({"enum": [1, 2]}, "3"),
    ],
)
def test_p14_what_would_lose_or_invent_something_is_a_problem(schema: Any, value: Any) -> None:
    assert problem(schema, value).startswith("a: expected ") or schema in (INTEGERS, POINT)


def test_p14_the_problem_names_field_expected_and_got() -> None:
    assert problem(INTEGER, "3.14") == 'a: expected integer, got string "3.14"'
    assert problem(BOOLEAN, "thing") == 'a: expected boolean, got string "thing"'
    assert problem({"enum": ["on", "off"]}, "of") == 'a: expected one of "on", "off", got string "of"'
    assert problem({"type": "integer", "minimum": 3}, "2") == "a: expected minimum 3, got integer 2"
    assert problem({"anyOf": [INTEGER, BOOLEAN]}, "x") == 'a: expected integer or boolean, got string "x"'
    assert problem(POINT, {"x": 1, "label": 2}) == "a.label: expected string, got integer 2"
    assert problem(INTEGERS, [1, "b"]) == 'a[1]: expected integer, got string "b"'
    assert problem({"anyOf": [STRING, {"$ref": "#/$defs/P"}]}, {}) == "a.x: expected integer, got nothing"


def test_a_missing_argument_is_named_with_its_type() -> None:
    result = check_arguments(tool(["path", "n"], path=STRING, n=INTEGER), {"pth": "x"})
    assert result == ArgumentProblem("path: expected string, got nothing; n: expected integer, got nothing")


def test_an_unknown_argument_is_named_where_the_schema_is_closed() -> None:
    schema = {"type": "object", "properties": {"path": STRING}, "additionalProperties": False}
    result = check_arguments(Tool("t", parameters=schema), {"pth": "x"})
    assert result == ArgumentProblem("pth: no such argument, expected one of: path")


def test_problems_are_bounded_however_many_there_are() -> None:
    result = check_arguments(tool(a=INTEGERS), {"a": ["x" * 10_000] * 1000})
    assert isinstance(result, ArgumentProblem)
    assert len(result.text) < 1000
    assert result.text.endswith("; and 997 more")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "array"}, '["a"]', ["a"]),
        (INTEGERS, ' [1, "2"]\n', [1, 2]),
        (POINT, '{"x": "1"}', {"x": 1}),
        ({"$ref": "#/$defs/P"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [INTEGERS, {"type": "null"}]}, "[1]", [1]),
        ({"type": "array", "items": POINT}, ['{"x": 1}'], [{"x": 1}]),
        (
            {"type": "array", "prefixItems": [INTEGER, STRING], "items": BOOLEAN},
            ["1", "1", "true"],
            [1, "1", True],
        ),
        ({"type": "object", "additionalProperties": INTEGER}, {"k": "1"}, {"k": 1}),
    ],
)
def test_p15_json_text_is_decoded_where_an_array_or_object_is_wanted(
    schema: Any, text: Any, value: Any
) -> None:
    assert same(fitted(schema, text), value)


def test_p15_a_decoded_array_with_a_wrong_member_is_told_by_its_member() -> None:
    assert problem(INTEGERS, '["a"]') == 'a[0]: expected integer, got string "a"'


def test_p06_all_arguments_given_as_one_json_text() -> None:
    text = tool(["file"], file=STRING, n=INTEGER)
    assert check_arguments(text, '{"file": "a", "n": "3"}') == {"file": "a", "n": 3}
    for given_text in ('["a"]', "file=a", '{"file"', '"{}"'):
        result = check_arguments(text, given_text)
        assert isinstance(result, ArgumentProblem)
        assert result.text.startswith("arguments: expected an object, got string")


def test_p09_no_arguments_are_an_empty_object() -> None:
    nothings: list[Any] = [None, {}, "", " "]
    for nothing in nothings:
        assert check_arguments(tool(a=STRING), nothing) == {}
    assert isinstance(check_arguments(tool(["a"], a=STRING), None), ArgumentProblem)
    assert isinstance(check_arguments(tool(), []), ArgumentProblem)


def test_p16_one_stays_one_and_true_stays_true() -> None:
    for schema in (INTEGER, NUMBER, {}, {"anyOf": [BOOLEAN, INTEGER]}, {"enum": [True, 1]}):
        assert fitted(schema, 1) is not True
        assert same(fitted(schema, 1), 1)
    assert fitted({"anyOf": [INTEGER, BOOLEAN]}, True) is True


def test_p16_null_is_absent_if_optional_and_a_problem_if_required() -> None:
    assert check_arguments(tool(n=INTEGER, s=STRING), {"n": None, "s": "x"}) == {"s": "x"}
    required = check_arguments(tool(["n"], n=INTEGER), {"n": None})
    assert required == ArgumentProblem("n: expected integer, got null")
    nested = {"type": "object", "properties": {"x": INTEGER}}
    assert fitted(nested, {"x": None}) == {}


def test_p16_null_stays_where_the_schema_admits_it() -> None:
    for schema in (
        {"type": ["integer", "null"]},
        {"anyOf": [INTEGER, {"type": "null"}]},
        {},
        {"const": None},
    ):
        assert check_arguments(tool(["a"], a=schema), {"a": None}) == {"a": None}
        assert check_arguments(tool(a=schema), {"a": None}) == {"a": None}
        both = check_arguments(tool(a=schema, n=INTEGER), {"a": None, "n": "5"})
        assert both == {"a": None, "n": 5}


@pytest.mark.parametrize(
    "schema", [STRING, {}, {"type": ["integer", "string"]}, {"anyOf": [INTEGERS, STRING]}]
)
@pytest.mark.parametrize(
    "text", ["5", "true", "null", "[1]", '{"x": 1}', '"quoted"', " 5 ", "", "1e3", "é\r\n\t"]
)
def test_a_string_stays_a_string_byte_for_byte_where_one_is_admitted(schema: Any, text: str) -> None:
    assert fitted(schema, text) == text


def test_the_given_object_is_not_changed() -> None:
    arguments = {"a": {"x": "1", "label": None}}
    before = copy.deepcopy(arguments)
    assert check_arguments(tool(a=POINT), arguments) == {"a": {"x": 1}}
    assert arguments == before


@pytest.mark.parametrize(
    "value", ["a\ud800", {"\udfff": 1}, ["\ud800"], float("nan"), float("inf"), (1,), {1: 2}, b"x"]
)
def test_values_that_json_cannot_hold_are_problems(value: Any) -> None:
    result = fitted({}, value)
    assert isinstance(result, ArgumentProblem)
    result.text.encode()  # the problem itself can be told


def test_a_nul_is_a_problem_for_a_command_and_not_for_a_function() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    command = Tool("t", parameters=schema, exec="true", exec_args=("a",))
    result = check_arguments(command, {"a": "x\0y"})
    assert result == ArgumentProblem("a: expected text without NUL characters, got one at character 1")
    assert check_arguments(command, {"a": ["x\0y"]}) == {"a": ["x\0y"]}  # JSON writes it as \u0000
    assert check_arguments(Tool("t", parameters=schema, handler="h"), {"a": "x\0y"}) == {"a": "x\0y"}


def test_a_problem_becomes_a_result_with_exit_code_2() -> None:
    result = problem_result(tool(), ArgumentProblem("n: expected integer, got null"))
    assert (result.tool, result.exit_code, result.stdout) == ("t", 2, "")
    assert "n: expected integer, got null" in result.stderr


def test_an_unknown_tool_is_told_the_names_that_exist() -> None:
    result = unknown_tool_result("raed", ["read", "write"])
    assert (result.tool, result.exit_code) == ("raed", 2)
    assert result.stderr == 'no tool "raed"; the tools are: read, write'
    for name in ("\ud800", "x" * 10_000, ""):
        odd = unknown_tool_result(name, [])
        assert len((odd.tool + odd.stderr).encode()) < 400


def test_the_network_is_never_asked_even_for_a_tool_that_no_loader_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: asked.extend(names))
    assert isinstance(fitted({"$ref": "http://example.org/s.json"}, "5"), ArgumentProblem)
    assert isinstance(fitted({"$ref": "#/properties/a"}, "5"), ArgumentProblem)
    assert asked == []


def test_recursive_schemas_are_fitted_all_the_way_down() -> None:
    tree = {"type": "object", "properties": {"n": INTEGER, "next": {"$ref": "#/$defs/T"}}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": tree}}
    value: dict[str, Any] = {"n": "0"}
    wanted: dict[str, Any] = {"n": 0}
    for number in range(1, 20):
        value, wanted = {"n": str(number), "next": value}, {"n": number, "next": wanted}
    assert check_arguments(Tool("t", parameters=schema), {"a": value}) == {"a": wanted}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(["5", "-0", "3.5", "true", "null", "[1]", '{"x": "2"}', '["true", null]']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "label", "z"]), inner),
    max_leaves=8,
)
LEAVES = st.sampled_from([INTEGER, NUMBER, BOOLEAN, STRING, INTEGERS, POINT, {}, {"$ref": "#/$defs/P"}])
SCHEMAS = st.recursive(
    LEAVES | st.just({"type": ["integer", "null"]}) | st.just({"enum": [1, "1", True, None]}),
    lambda inner: (
        st.builds(
            lambda key, parts: {key: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        )
        | inner.map(lambda items: {"type": "array", "items": items})
        | st.builds(
            lambda x, req: {"type": "object", "properties": {"x": x}, "required": req},
            inner,
            st.sampled_from([[], ["x"]]),
        )
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(schema=SCHEMAS, value=JSON, required=st.sampled_from([[], ["a"]]))
def test_what_is_valid_is_untouched_and_what_comes_back_is_valid(
    schema: Any, value: Any, required: list[str]
) -> None:
    declared = tool(required, a=schema)
    arguments = {"a": value}
    validator = Draft202012Validator(declared.parameters)
    result = check_arguments(declared, arguments)
    if validator.is_valid(arguments):
        assert same(result, arguments)
    elif isinstance(result, dict):
        assert validator.is_valid(result)
        assert same(check_arguments(declared, result), result)
    else:
        result.text.encode()


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_for_a_string_argument_is_that_text(text: str) -> None:
    assert check_arguments(tool(a=STRING), {"a": text}) == {"a": text}


@settings(deadline=None)
@given(st.integers())
def test_any_integer_survives_being_quoted(number: int) -> None:
    assert same(fitted(INTEGER, str(number)), number)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives_being_quoted_as_json(number: float) -> None:
    assert fitted(NUMBER, json.dumps(number)) == number


@settings(deadline=None)
@given(JSON.filter(lambda value: isinstance(value, (list, dict))))
def test_any_array_or_object_survives_being_encoded_twice(value: Any) -> None:
    kind = "array" if isinstance(value, list) else "object"
    assert same(fitted({"type": kind}, json.dumps(value)), value)
