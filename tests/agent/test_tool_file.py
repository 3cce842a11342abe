"""Tool files: both shapes, every rule, errors that point into the file, nothing that ends in a traceback."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.agent.tool_file import load_tools, parse_tools
from posttrainllm.agent.tools import HandlerRegistry, Tool
from posttrainllm.runtime.errors import ToolFileError

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}


def one(**fields: Any) -> Tool:
    """The tool of a file with one entry, its function's fields given."""
    (tool,) = parse_tools([{"function": {"name": "t", "_exec": "true", **fields}}], "f")
    return tool


def refused(data: Any, **options: Any) -> str:
    with pytest.raises(ToolFileError) as caught:
        parse_tools(data, "f", **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refused_schema(schema: Any) -> str:
    text = refused([{"name": "t", "_exec": "true", "parameters": schema}])
    assert text.startswith("f#/0/parameters")
    return text.removeprefix("f#/0/parameters")


def refused_file(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "tools.json"
    path.write_bytes(data)
    with pytest.raises(ToolFileError) as caught:
        load_tools(path)
    return str(caught.value)


BLOCK = {"name": "echo", "description": "Echo", "parameters": TEXT}


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "function", "function": {**BLOCK, "_exec": "x", "_exec_args": ["text"]}},
        {"type": "function", "function": BLOCK, "_exec": "x", "_exec_args": ["text"]},
        {"type": "function", "function": {**BLOCK, "_exec": "x"}, "_exec_args": ["text"]},
        {**BLOCK, "_exec": "x", "_exec_args": ["text"], "strict": True, "_comment": "mine"},
    ],
)
@pytest.mark.parametrize("wrap", [lambda entry: [entry], lambda entry: {"tools": [entry]}])
def test_every_accepted_shape_gives_the_same_tool(entry: Any, wrap: Any, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(wrap(entry)))
    assert load_tools(path) == (Tool("echo", "Echo", TEXT, "x", ("text",)),)


def test_order_is_kept_and_a_bom_is_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    tools = [{"name": name, "_exec": "true", "description": "é"} for name in ("b", "a")]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(tools, ensure_ascii=False).encode())
    assert [tool.name for tool in load_tools(path)] == ["b", "a"]


def test_a_tool_without_parameters_and_optional_fields_given_as_null() -> None:
    tool = one(description=None, parameters=None, _exec_args=None, _handler=None)
    assert tool == Tool("t", None, {"type": "object", "properties": {}}, "true", ())


def test_exec_args_default_to_all_properties_alphabetically() -> None:
    schema: dict[str, Any] = {"properties": {"b": {}, "a": {}, "C": {}}}
    tool = one(parameters=schema)
    assert tool.exec_args == ("C", "a", "b")
    assert tool.parameters == {"type": "object", **schema}


def test_a_property_that_is_no_variable_needs_exec_args_or_a_handler() -> None:
    schema: dict[str, Any] = {"properties": {"a-b": {}, "ok": {}}}
    text = refused_schema(schema)
    assert text.startswith("/properties/a-b: ")
    assert "_exec_args" in text
    assert refused_schema({"properties": {"PATH": {}}}).startswith("/properties/PATH: ")
    assert one(parameters=schema, _exec_args=["ok"]).exec_args == ("ok",)
    (tool,) = parse_tools([{"name": "t", "_handler": "h", "parameters": schema}], "f", {"h"})
    assert tool.exec_args == ()


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        (3, "#/0: "),
        ({"_exec": "x"}, "#/0/name: missing"),
        ({"name": "1", "_exec": "x"}, "#/0/name: "),
        ({"name": "a-b", "_exec": "x"}, "#/0/name: "),
        ({"name": 5, "_exec": "x"}, "#/0/name: an integer"),
        ({"function": []}, "#/0/function: an array"),
        ({"function": {"name": ""}}, "#/0/function/name: "),
        ({"name": "a", "_exec": " "}, "#/0/_exec: empty"),
        ({"name": "a", "_exec": "x\0y"}, "#/0/_exec: "),
        ({"name": "a", "_exec": ["x"]}, "#/0/_exec: an array"),
        ({"name": "a", "_exec": "x", "description": 1}, "#/0/description: "),
        ({"name": "a", "_exec": "x", "_exec_args": "b"}, "#/0/_exec_args: a string"),
        ({"name": "a", "_exec": "x", "_exec_args": ["b", "c d"]}, "#/0/_exec_args/1: "),
        ({"name": "a", "_exec": "x", "_exec_args": ["LD_PRELOAD"]}, "#/0/_exec_args/0: "),
        ({"name": "a", "_exec": "x", "_exec_args": [1]}, "#/0/_exec_args/0: "),
        ({"function": {"name": "a"}, "_exec": "x", "_exec_args": ["b", "PS4"]}, "#/0/_exec_args/1: "),
        ({"function": {"name": "a", "_exec": "x"}, "_exec": "y"}, "#/0/_exec: differs"),
        ({"name": "a"}, "#/0: tool a has no _exec, _exec_argv or _handler"),
        ({"name": "a", "_exec": "x", "parameters": []}, "#/0/parameters: an array"),
        ({"name": "\ud800", "_exec": "x"}, "#/0/name: half of a surrogate pair"),
    ],
)
def test_each_rule_is_an_error_that_points_at_the_place(entry: Any, where: str) -> None:
    assert refused([entry]).startswith(f"f{where}")
    assert refused({"tools": [entry]}).startswith(f"f{where.replace('#', '#/tools', 1)}")


ARGV = {"name": "a", "parameters": {"type": "object", "properties": {"x": {}}}}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"_exec_argv": []}, "/_exec_argv: an empty array"),
        ({"_exec_argv": "cat"}, "/_exec_argv: a string"),
        ({"_exec_argv": ["cat", 1]}, "/_exec_argv/1: an integer"),
        ({"_exec_argv": ["cat", "a\0"]}, "/_exec_argv/1: a NUL"),
        ({"_exec_argv": ["{x}"]}, "/_exec_argv/0: '{x}'; expected a program"),
        ({"_exec_argv": ["cat", "{y}"]}, "/_exec_argv/1: no argument 'y' is declared"),
        ({"_exec_argv": ["cat", "--file={x}"]}, "/_exec_argv/1: '--file={x}'; expected \"{x}\" alone"),
        ({"_timeout": 0}, "/_timeout: out of range"),
        ({"_timeout": 10**400}, "/_timeout: out of range"),
        ({"_timeout": True}, "/_timeout: a boolean"),
        ({"_max_output": 1 << 21}, "/_max_output: out of range"),
        ({"_max_output": 2.5}, "/_max_output: a number"),
        ({"_cwd": 1}, "/_cwd: an integer"),
        ({"_cwd": "/"}, "/_cwd: '/' is absolute"),
        ({"_cwd": "C:\\x"}, "/_cwd: 'C:\\\\x' is absolute"),
        ({"_cwd": "a/.."}, "/_cwd: 'a/..' leads out"),
        ({"_confirm": "yes"}, "/_confirm: a string"),
        ({"_sandbox": 0}, "/_sandbox: an integer"),
    ],
)
def test_each_setting_is_checked_and_its_error_points_at_it(fields: dict[str, Any], where: str) -> None:
    exec_ = {} if "_exec_argv" in fields else {"_exec": "true"}
    assert refused([{**ARGV, **exec_, **fields}]).startswith(f"f#/0{where}")
    assert refused([{"function": ARGV, **exec_, **fields}]).startswith(f"f#/0{where}")


def test_the_settings_of_a_tool() -> None:
    tool = one(_timeout=2, _max_output=100, _cwd="sub", _confirm=True, _sandbox=True)
    assert (tool.timeout_s, tool.max_output, tool.cwd, tool.confirm, tool.sandbox) == (
        2.0,
        100,
        "sub",
        True,
        True,
    )
    tool = one()
    assert (tool.timeout_s, tool.max_output, tool.cwd, tool.confirm, tool.sandbox) == (None,) * 3 + (
        False,
    ) * 2


def test_a_tool_without_a_shell() -> None:
    (tool,) = parse_tools([{**ARGV, "_exec_argv": ["cat", "--", "{x}", "{", "a{b}c"]}], "f")
    assert tool.exec is None
    assert tool.exec_argv == ("cat", "--", "{x}", "{", "a{b}c")
    assert tool.passed == ("x",)


def test_a_name_is_taken_once() -> None:
    text = refused({"tools": [{"name": "a", "_exec": "x"}, {"function": {"name": "a", "_exec": "y"}}]})
    assert text.startswith("f#/tools/1/function/name: 'a' is taken by f#/tools/0")


@pytest.mark.parametrize("data", [None, 3, "x", {}, {"tools": {}}, {"tool": []}])
def test_a_document_that_is_no_list_of_tools_is_refused(data: Any) -> None:
    assert refused(data).startswith("f#")


def test_a_handler_must_be_registered_before_the_file_is_loaded() -> None:
    handlers = HandlerRegistry()
    data = [{"name": "t", "_handler": "h"}]
    assert "register 'h'" in refused(data, handlers=handlers)
    handlers.register("h", lambda: "")
    assert parse_tools(data, "f", handlers) == (Tool("t", handler="h"),)
    both = [{"name": "t", "_handler": "absent", "_exec": "x"}]
    assert parse_tools(both, "f", handlers)[0].exec == "x"
    handlers.register("plain", lambda: "")
    assert parse_tools([{"name": "plain"}], "f", handlers) == (Tool("plain", handler="plain"),)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "array"}, "/type: "),
        ({"type": ["object", "null"]}, "/type: "),
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type: "),
        ({"properties": {"a/b": {"type": 3}}}, "/properties/a~1b/type: "),
        ({"properties": []}, "/properties: "),
        ({"properties": {"a": {"pattern": "("}}}, "/properties/a/pattern: "),
        ({"properties": {"a": {"minimum": "1"}}}, "/properties/a/minimum: "),
        ({"required": ["a", "b"], "properties": {"a": {}}}, "/required/1: "),
        ({"$schema": "https://example.org/mine"}, "/$schema: "),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "/properties/a/$dynamicRef: "),
        ({"properties": {"a": {"$id": "b", "type": "string"}}}, "/properties/a/$id: "),
    ],
)
def test_a_faulty_schema_is_refused_with_its_pointer(schema: Any, where: str) -> None:
    assert refused_schema(schema).startswith(where)


@pytest.mark.parametrize(
    "ref",
    [
        "#/$defs/X",
        "#/properties/a/type",
        "#anchor",
        "https://example.org/s.json",
        "file:///etc/passwd",
        "s.json",
        "#/$defs/",
    ],
)
def test_p17_a_reference_that_leads_nowhere_or_away_is_refused_with_its_pointer(
    ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: asked.extend(names))
    schema = {"properties": {"a": {"type": "array", "items": {"$ref": ref}}}, "$defs": {"Y": {}}}
    assert refused_schema(schema).startswith("/properties/a/items/$ref: ")
    assert asked == []


def test_p18_local_references_load_in_every_place() -> None:
    enum = {"enum": ["x"]}
    for schema in (
        {"properties": {"a": {"$ref": "#/$defs/E"}}, "$defs": {"E": enum}},
        {"properties": {"a": {"items": {"$ref": "#/definitions/E"}}}, "definitions": {"E": enum}},
        {"properties": {"a": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": enum}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/b"}]}, "b": enum}},
        {"properties": {"a": {"$ref": "#/x-shared/0"}}, "x-shared": [enum]},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"$ref": {"type": "string"}}},  # a property that happens to have that name
        {"properties": {"a": {"enum": [{"$ref": "#/nowhere"}]}}},  # data, not a reference
    ):
        one(parameters=schema, _exec_args=[])


def test_a_schema_behind_an_unusual_reference_is_checked_too() -> None:
    schema: Any = {"properties": {"a": {"$ref": "#/x-shared"}}, "x-shared": {"items": {"$ref": "#/nowhere"}}}
    assert refused_schema(schema).startswith("/x-shared/items/$ref: ")
    schema = {"properties": {"a": {"$ref": "#/x-shared"}}, "x-shared": {"type": "strin"}}
    assert refused_schema(schema).startswith("/x-shared/type: ")


def test_references_in_a_circle_are_refused_and_recursive_data_is_not() -> None:
    circle = {"X": {"$ref": "#/$defs/Y"}, "Y": {"allOf": [{"not": {"$ref": "#/$defs/X"}}]}}
    assert "without end" in refused_schema({"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": circle})
    assert "without end" in refused_schema({"properties": {"a": {"$ref": "#/properties/a"}}})
    tree = {"T": {"type": "object", "properties": {"child": {"$ref": "#/$defs/T"}}}}
    one(parameters={"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": tree})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "line 1, column 1"),
        (b'{"tools": [\n  oops]}', "line 2, column 3"),
        (b"[] []", "line 1, column 4"),
        (b'{"tools": [], "tools": []}', "'tools' stands twice"),
        (
            b'[{"name": "a", "_exec": "x", "parameters": {"properties": {"a": {}, "a": {}}}}]',
            "'a' stands twice",
        ),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "not finite"),
        (b"[" + b"9" * 5000 + b"]", "too long"),
        (b"[" * 100_000, "nested deeper"),
        (b"[" * 70 + b"]" * 70, "nested deeper"),
        (b'["\\ud800"]', "surrogate"),
        (b"\xff\xfe[\x00]\x00", "byte 0 is not UTF-8"),
        (b'[{"name": "caf\xe9"}]', "byte 14 is not UTF-8"),
        (b"\0" * 10, "line 1, column 1"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_the_place(data: bytes, text: str, tmp_path: Path) -> None:
    message = refused_file(tmp_path, data)
    assert message.startswith(str(tmp_path / "tools.json"))
    assert text in message
    assert "\n" not in message


def test_a_path_that_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    for path in (
        tmp_path,
        tmp_path / "absent.json",
        tmp_path / "tools.json" / "x",
        Path("a\0b"),
        Path("/dev/zero"),
    ):
        with pytest.raises(ToolFileError):
            load_tools(path)


def test_deep_schemas_load_or_are_refused_but_never_crash() -> None:
    for depth in (5, 25, 29, 31, 200, 5000):
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"properties": {"a": schema}}
        try:
            one(parameters=schema)
        except ToolFileError:
            assert depth > 25
        else:
            assert depth < 31


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
KEYS = ["function", "name", "_exec", "_exec_args", "_handler", "parameters", "description", "properties"]
SCHEMA_KEYS = ["type", "properties", "required", "$ref", "anyOf", "items", "enum", "$defs", "pattern", "not"]
FIELDS = st.dictionaries(
    st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(SCHEMA_KEYS), JSON, max_size=4), max_size=5
)


@settings(deadline=None)
@given(st.lists(FIELDS | FIELDS.map(lambda fields: {"name": "a", "_exec": "x", **fields}), max_size=2))
def test_whatever_the_document_it_loads_or_is_refused_in_one_line(data: list[Any]) -> None:
    refusal = None
    try:
        tools = parse_tools(data, "f")
        assert len(tools) == len(data)
    except ToolFileError as error:
        refusal = str(error)
    assert refusal is None or (refusal.startswith("f#") and "\n" not in refusal)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["b"], "'b' is no declared argument; expected one of a"), (["a", "a"], "'a' stands there twice")],
)
def test_exec_args_name_declared_arguments_once(names: list[str], words: str) -> None:
    """A typo would leave the variable that was meant unset, without a word."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool: dict[str, Any] = {"name": "t", "_exec": "true", "parameters": schema, "_exec_args": names}
    with pytest.raises(ToolFileError) as caught:
        parse_tools([tool], "tools.json")
    assert "/0/_exec_args/" in str(caught.value)
    assert words in str(caught.value)
    parse_tools(
        [tool | {"_exec_args": ["b"], "parameters": schema | {"additionalProperties": True}}], "tools.json"
    )
