"""The grammar of a reply in a chat template's own call format: text, or a call bound by the tools' schemas.

Text is free until a call starts, and ends with an id that ends the model's turn. Where a call is bare JSON it
can only open a reply, and text then does not begin with a brace. A block of thought may come first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from ..runtime.grammar import json_rule
from ..runtime.json_schema import closed, moved
from ..runtime.template_ids import THINKING, TemplateIds
from .call_format import CallFormat
from .tools import Tool


def reply_lark(
    tools: Sequence[Tool],
    format: CallFormat,
    ids: TemplateIds,
    stop_ids: Collection[int],
    *,
    thinks: bool,
    opened: bool,
) -> str:
    """Lark text. Without `tools` only an answer fits.

    `thinks`: the template has blocks of thought; `opened`: the prompt has begun one.
    """
    lines = ["%llguidance {}", *_thought(ids, thinks=thinks, opened=opened)]
    start = "thought " if opened else "thought? " if thinks else ""
    lines.append(f"start: {start}reply")
    lines.append("end: " + " | ".join(f"<[{token}]>" for token in sorted(stop_ids)))
    unthinking = rf"\s*{re.escape(THINKING[0])}(?s:.*)" if thinks and not opened else ""
    barred = [unthinking] if unthinking else []
    bare = rf"\s*{_pattern(format.before.lstrip()[:1])}(?s:.*)"
    barred.append(rf"(?s:.*){_pattern(format.trigger)}(?s:.*)" if format.trigger else bare)
    lines.append(f"TEXT: {_text(chr(92) + 'S(?s:.*)', barred)}")
    if not tools:
        return "\n".join([*lines, "reply: TEXT end"]) + "\n"
    opening, more = _opening(format, ids, unthinking)
    lines += [*more, "reply: TEXT end | call", f"call: {opening} body {_literal(format.after, ids)}"]
    names = [
        f"{_literal(tool.name + format.between, ids)} args_{number}" for number, tool in enumerate(tools)
    ]
    lines.append("body: " + " | ".join(names))
    for number, tool in enumerate(tools):
        rule = json_rule(
            arguments_schema(tool),
            item_separator=format.item_separator,
            key_separator=format.key_separator,
        )
        lines.append(f"args_{number}: {rule}")
    return "\n".join(lines) + "\n"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The tool's schema, its objects closed, with its own references under `#/$defs`."""
    schema = {key: value for key, value in tool.parameters.items() if key not in ("$schema", "$id")}
    if '"#"' not in json.dumps(schema):
        return dict(closed(schema))
    return {"$ref": "#/$defs/arguments", "$defs": {"arguments": closed(moved(schema, "#/$defs/arguments"))}}


def _thought(ids: TemplateIds, *, thinks: bool, opened: bool) -> list[str]:
    begin, end = THINKING
    if not thinks and not opened:
        return []
    first, last = ids.whole(begin), ids.whole(end)
    if first is not None and last is not None:
        opening = "" if opened else f"<[{first}]> "
        return [f"thought: {opening}MUSING? <[{last}]>", "MUSING: /(?s:.+)/"]
    before = "" if opened else rf"\s*{_pattern(begin)}"
    return [f"thought[lazy]: /{before}(?s:.*){_pattern(end)}/"]


def _opening(format: CallFormat, ids: TemplateIds, unthinking: str) -> tuple[str, list[str]]:
    """What stands before the name, with the free text before it, and the rules that this needs."""
    before = format.before.lstrip()
    if not format.trigger:
        python = ids.whole("<|python_tag|>")
        return (f"<[{python}]>? " if python is not None else "") + _literal(before, ids), []
    rest = _literal(before.removeprefix(format.trigger), ids)
    token = ids.whole(format.trigger)
    if token is None:
        said = _text("", [unthinking] if unthinking else [])
        return f"called {rest}", [f"called[lazy]: ({said}) {json.dumps(format.trigger)}"]
    barred = [rf"(?s:.*){_pattern(format.trigger)}(?s:.*)", *([unthinking] if unthinking else [])]
    return f"SAID? <[{token}]> {rest}", [f"SAID: {_text('(?s:.)', barred)}"]


def _text(more: str, barred: Sequence[str]) -> str:
    """Any text that goes on with `more` somewhere and is none of `barred`."""
    return f"/(?s:.*){more}/" + "".join(f" & ~/{bar}/" for bar in barred)


def _literal(text: str, ids: TemplateIds) -> str:
    """`text` in Lark: strings, and by their ids the tokens that have no spelling in a grammar."""
    parts = ids.split_whole(text)
    return " ".join(json.dumps(part) if isinstance(part, str) else f"<[{part}]>" for part in parts)


def _pattern(text: str) -> str:
    """A regular expression for `text`, in the form that stands between slashes."""
    return re.sub(r"([^\w\s<>])", r"\\\1", text)
