"""How a model writes a tool call: what stands before the name, between name and arguments, and behind them.

A template that knows tools says this itself: `learn` looks at how it renders a call. So `<tool_call>` tags, Llama's
bare JSON, Mistral's `[TOOL_CALLS]` lists and formats to come need no table of names; the few rows here
are for templates that know no tools. A format whose arguments are not JSON cannot be learned.

`read` finds a call in what a model said. One call a reply: of several only the first counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..runtime.template_ids import THINKING
from .reply import Answer, Call, Malformed, Reply
from .strict_json import StrictJsonError, parse_json

PROBE_TOOL = "probe_tool"
PROBE_ID = "probe0001"  # nine letters and digits: some templates want exactly that
PROBE_ARGUMENTS = {"probe_text": "probed value", "probe_flag": True}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ID = re.compile(rf'(,\s*)?"(id|tool_call_id|call_id)":\s*"{PROBE_ID}"(?(1)|,\s*)')
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|[^\s{\[\"']+")
_FENCE = re.compile(r"```(json|tool_code|tool_call)?\s*")
_STYLE = re.compile(r'"probe_text"(:\s*)"probed value"(,\s*)"probe_flag"')


@dataclass(frozen=True)
class CallFormat:
    """`{before}{name}{between}{arguments as JSON}{after}`.

    `item_separator` and `key_separator` are how the template writes JSON. `strings`: the template wants
    arguments given as JSON text.
    """

    before: str
    between: str
    after: str
    item_separator: str = ", "
    key_separator: str = ": "
    strings: bool = False

    @property
    def trigger(self) -> str:
        """What tells a call from text, wherever it stands; empty if a call is bare JSON, which opens a reply."""
        found = _TAG.match(self.before.lstrip())
        return found[0] if found else ""

    @property
    def example(self) -> str:
        """The format as people read it."""
        return f"{self.before}NAME{self.between}{{…}}{self.after}"

    def text(self, name: str, arguments: Any) -> str:
        """One call as the model should write it."""
        return f"{self.before}{name}{self.between}{self.json(arguments)}{self.after}"

    def json(self, value: Any) -> str:
        """`value` as JSON in the format's style."""
        return json.dumps(value, ensure_ascii=False, separators=(self.item_separator, self.key_separator))


LIST_IN_TAGS = CallFormat('<tool_call>[{"name": "', '", "arguments": ', "}]</tool_call>")
BARE_JSON = CallFormat('{"name": "', '", "parameters": ', "}")


def learn(region: str) -> CallFormat | None:
    """The format of `region`, what a template rendered for a call of PROBE_TOOL; None if it is not JSON."""
    region = _ID.sub("", region)
    name = region.find(PROBE_TOOL)
    if name < 0:
        return None
    behind = name + len(PROBE_TOOL)
    for start in _starts(region, behind):
        try:
            value, end = json.JSONDecoder().raw_decode(region, start)
        except ValueError:
            continue
        if value != PROBE_ARGUMENTS:
            continue
        style = _STYLE.search(region, start, end)
        plain = style is None or "\n" in style[1] + style[2]
        return CallFormat(
            region[:name],
            region[behind:start],
            region[end:].rstrip(),
            ", " if style is None or plain else style[2],
            ": " if style is None or plain else style[1],
        )
    return None


def _starts(region: str, position: int) -> list[int]:
    return [found.start() for found in re.finditer(r"\{", region) if found.start() >= position]


@dataclass(frozen=True)
class Parts:
    """A reply taken apart. `call` is what stood where a call begins; `said` is the text before it."""

    thought: str
    said: str
    reply: Reply
    closed: bool = False  # the call ends as the format wants

    @property
    def essence(self) -> object:
        """Equal for replies that differ in white space and JSON style only."""
        reply = self.reply
        content = (reply.tool, reply.arguments) if isinstance(reply, Call) else reply
        return self.thought.strip(), self.said.strip(), self.closed, _comparable(content)


def _comparable(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def split_thought(text: str, *, opened: bool) -> tuple[str, str]:
    """The block of thought that `text` begins with, tags included, and the rest. `opened`: the prompt began it."""
    begin, end = THINKING
    if not opened and not text.lstrip().startswith(begin):
        return "", text
    thought, tag, rest = text.partition(end)
    return thought + tag, rest


def read(text: str, format: CallFormat, tools: Collection[str], *, opened: bool = False) -> Parts:
    """What `text`, a whole reply, says: a call, an answer, or a call that cannot be understood."""
    thought, rest = split_thought(text, opened=opened)
    start, said = _call_start(rest, format)
    if start is None:
        return Parts(thought, "", Answer(rest.strip()))
    body = rest[start:]
    parts = _exact(body, format)
    if parts is not None:
        call, closed = parts
        if format.trigger or call.tool in tools:
            return Parts(thought, said, call, closed)
    found = _tolerant(body, format, tools)
    if isinstance(found, Answer):
        return Parts(thought, "", Answer(rest.strip()))
    return Parts(thought, said, found)


def _call_start(text: str, format: CallFormat) -> tuple[int | None, str]:
    """Where a call begins, and what was said before it."""
    if format.trigger:
        start = text.find(format.trigger)
        return (None, "") if start < 0 else (start, text[:start])
    start = len(text) - len(text.lstrip())
    for opening in (re.compile(r"<\|python_tag\|>\s*"), _FENCE):
        found = opening.match(text, start)
        start = found.end() if found else start
    return (start, "") if text[start : start + 1] in ("{", "[") else (None, "")


def _exact(body: str, format: CallFormat) -> tuple[Call, bool] | None:
    """The call in `body`, and whether it is closed; None if it is not written as the format wants."""
    before = format.before.lstrip()
    if not body.startswith(before):
        return None
    name = _NAME.match(body, len(before))
    if name is None or not body.startswith(format.between, name.end()):
        return None
    start = name.end() + len(format.between)
    try:
        _, end = json.JSONDecoder().raw_decode(body, start)
        arguments = parse_json(body[start:end])
    except (ValueError, RecursionError):
        return None
    rest = "".join(body[end:].split())
    wanted = "".join(format.after.split())
    if not rest.startswith(wanted[:1]):
        return None
    return Call(name[0], arguments, "chat_template"), rest == wanted


def _tolerant(body: str, format: CallFormat, tools: Collection[str]) -> Reply:
    """The first call in `body` in any of the usual JSON shapes."""
    start = re.search(r"[{]", body)
    if start is None:
        return Malformed("no JSON object follows the start of the call") if format.trigger else Answer("")
    text = body[start.start() :]
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        value = parse_json(text[:end])
    except (StrictJsonError, ValueError, RecursionError) as error:
        looks = format.trigger or re.match(r'\{\s*"(name|function|type|tool)"', text)
        return Malformed(f"not valid JSON: {error}") if looks else Answer("")
    name, arguments, shape = _shape(value)
    if not isinstance(name, str) or (name not in tools and not format.trigger):
        return Malformed('the call names no tool ("name")') if format.trigger else Answer("")
    return Call(name, arguments, shape)


def _shape(value: dict[str, Any]) -> tuple[object, object, str]:
    """Name, arguments and the shape's own name, of an object that is a call."""
    inner = value.get("function")
    shape = "function" if isinstance(inner, dict) else "name"
    holder = inner if isinstance(inner, dict) else value
    name = holder.get("name", inner if isinstance(inner, str) else holder.get("tool"))
    return name, holder.get("arguments", holder.get("parameters", {})), shape


class ReplyReader:
    """Finds a reply in text that arrives piece by piece; `reply` is set as soon as a call is whole."""

    def __init__(self, format: CallFormat, tools: Collection[str], *, opened: bool) -> None:
        self.text = ""
        self.reply: Reply | None = None
        self._format = format
        self._tools = tools
        self._opened = opened

    def push(self, delta: str) -> Reply | None:
        """Add text; a call once it is closed. An answer is never whole before the model ends its turn."""
        self.text += delta
        last = self._format.after.strip()[-1:] or "}"
        if last in delta:
            parts = read(self.text, self._format, self._tools, opened=self._opened)
            if isinstance(parts.reply, Call) and parts.closed:
                self.reply = parts.reply
        return self.reply

    def finish(self, *, ended: bool) -> Reply | None:
        """The reply of the whole text. Without `ended`, text is no answer: it was cut off."""
        if self.reply is None:
            reply = read(self.text, self._format, self._tools, opened=self._opened).reply
            if isinstance(reply, Answer):
                return reply if ended and reply.text else None
            if isinstance(reply, Malformed) and not ended:
                return Malformed("the call breaks off before its end")
            return reply
        return self.reply
