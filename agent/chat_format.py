"""The posttrainllm dialect: what the model sees, and what it may say.

One row per dialect is the plan; this is the protocol that `.tinygpt` specialists are trained on, byte for
byte. Rendering gives pieces, not strings: a turn marker is a marker only where the template says so, and
everything else (user text, tool output, descriptions) is content that cannot become one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..runtime.json_schema import closed, moved
from ..runtime.tokenizer import Tokenizer
from .tools import Tool, ToolResult

DEFAULT_HEADER = "You are a specialized on-device agent."
START = "<|im_start|>"
END = "<|im_end|>"

Origin = Literal["template", "system", "user", "tool", "sampled", "forced"]

_BEFORE_TOOLS = """

You have access to these tools:
<tools>
"""
_AFTER_TOOLS = """
</tools>

When you need to use a tool, respond with a SINGLE valid JSON object on its own line:
{ "tool": "<name>", "arguments": { ... } }

After the tool runs you will receive its output between <tool_result>...</tool_result>.
Use as many tool calls as you need.

When you have the final answer, respond with a SINGLE valid JSON object:
{ "answer": "..." }

Do not include any other text outside the JSON object."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt: a turn marker, or content that came from `origin`."""

    origin: Origin
    text: str
    marker: bool = False


@dataclass(frozen=True)
class IdSpan:
    """Ids of one piece, as fed."""

    origin: Origin
    ids: list[int]


_START = Piece("template", START, marker=True)
_END = Piece("template", END, marker=True)
_NEWLINE = Piece("template", "\n")
_ASSISTANT = (_NEWLINE, _START, Piece("template", "assistant\n"))


class PosttrainDialect:
    """Renders the posttrainllm protocol."""

    name = "posttrainllm"

    def system(self, header: str, tools: Sequence[Tool]) -> list[Piece]:
        """The system turn with its tool block; the same tools always give the same bytes."""
        return [_START, Piece("system", f"system\n{self.system_text(header, tools)}"), _END, _NEWLINE]

    def system_text(self, header: str, tools: Sequence[Tool]) -> str:
        """The system turn without its markers."""
        block = "\n".join(tool_line(tool) for tool in tools)
        return f"{header}{_BEFORE_TOOLS}{block}{_AFTER_TOOLS}"

    def user(self, text: str) -> list[Piece]:
        """One user turn and the opening of the assistant's."""
        return [_START, Piece("user", f"user\n{text}"), _END, *_ASSISTANT]

    def end_of_turn(self) -> list[Piece]:
        """What closes an assistant turn. Always fed, also when a grammar ended the object."""
        return [_END, _NEWLINE]

    def tool_result(self, result: ToolResult) -> list[Piece]:
        """One tool turn and the opening of the assistant's next."""
        return [_START, Piece("tool", f"tool\n{self.result_text(result)}"), _END, *_ASSISTANT]

    def result_text(self, result: ToolResult) -> str:
        """A tool turn without its markers: one JSON object."""
        fields = {"tool": result.tool, **result.told()}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def tool_line(tool: Tool) -> str:
    """`- name(required: type, optional?: type)  description`, as the model was trained to read it."""
    properties = tool.parameters.get("properties", {})
    required = list(tool.parameters.get("required", []))
    optional = sorted(name for name in properties if name not in required)
    arguments = [f"{name}: {_type_name(properties.get(name))}" for name in required]
    arguments += [f"{name}?: {_type_name(properties.get(name))}" for name in optional]
    line = f"- {tool.name}({', '.join(arguments)})"
    return f"{line}  {tool.description}" if tool.description else line


def _type_name(schema: object) -> str:
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        return "|".join(map(str, declared))
    return "any"


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> tuple[list[IdSpan], int]:
    """Spans of ids for `pieces`, and how often `<|` in content was broken up."""
    spans: list[IdSpan] = []
    escaped = 0
    for piece in pieces:
        if piece.marker:
            spans.append(IdSpan(piece.origin, tokenizer.encode_marker(piece.text)))
            continue
        content = tokenizer.encode_content(piece.text)
        spans.append(IdSpan(piece.origin, content.ids))
        escaped += content.escaped
    return spans, escaped


ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def reply_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON Schema of everything the assistant may say: an answer, or a call of one of `tools`.

    Each tool's own schema stands under `#/$defs/<name>`, its objects closed, its references moved.
    """
    calls = [
        {
            "type": "object",
            "properties": {"tool": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{tool.name}"}},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    definitions = {
        tool.name: closed(moved(_without_dialect(tool.parameters), f"#/$defs/{tool.name}")) for tool in tools
    }
    return {"anyOf": [*calls, ANSWER_SCHEMA], "$defs": definitions}


def _without_dialect(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` without `$schema` and `$id`, which mean nothing inside another schema."""
    return {key: value for key, value in schema.items() if key not in ("$schema", "$id")}
