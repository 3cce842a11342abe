"""What a chat template can do, found out by rendering small conversations with it.

Whether it has a system role, shows tools, writes calls and results, and how: the template is asked, not its text
searched. What it lacks, the agent adds to the conversation in words (`tool_text`, `result_text`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.chat_template import ChatTemplate, Messages
from ..runtime.errors import ChatTemplateError
from ..runtime.template_ids import THINKING, TemplateIds
from ..runtime.tokenizer import HuggingFaceTokenizer
from .call_format import (
    BARE_JSON,
    LIST_IN_TAGS,
    PROBE_ARGUMENTS,
    PROBE_ID,
    PROBE_TOOL,
    CallFormat,
    learn,
)
from .tools import Tool, ToolResult

_QUESTION, _ANSWER, _SYSTEM, _RESULT = "probed question", "probed answer", "probed system", "probed result"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": PROBE_TOOL,
            "description": "a description",
            "parameters": {
                "type": "object",
                "properties": {"probe_text": {"type": "string", "description": "a text"}},
                "required": ["probe_text"],
            },
        },
    }
]
_USER = {"role": "user", "content": _QUESTION}
# Families whose templates know no tools, by a control token of theirs; others get `LIST_IN_TAGS`.
_WITHOUT_TOOLS = {"<start_of_turn>": BARE_JSON, "<|start_header_id|>": BARE_JSON}


@dataclass(frozen=True)
class TemplateFacts:
    """`system`, `tools`, `calls`, `results`: whether the template renders them. `thinks`: it has blocks of
    thought; `opened`: it begins one itself. `alternates`: it refuses a user's turn that follows one without an
    answer. Any of `stop_ids` ends the assistant's turn.
    """

    template: ChatTemplate
    ids: TemplateIds
    format: CallFormat
    system: bool
    tools: bool
    calls: bool
    results: bool
    thinks: bool
    opened: bool
    alternates: bool
    stop_ids: frozenset[int]

    def describe(self) -> dict[str, Any]:
        """For `inspect`."""
        return {
            "call format": self.format.example,
            "system prompt": "its own turn" if self.system else "before the first user turn's text",
            "tools": "shown by the template" if self.tools else "listed in the system prompt",
            "calls in history": "written by the template" if self.calls else "as the model wrote them",
            "results": "tool turns" if self.results else "user turns",
            "blocks of thought": self.thinks,
        }


def learn_template(
    template: ChatTemplate, tokenizer: HuggingFaceTokenizer, stop_ids: Collection[int], vocab_size: int
) -> TemplateFacts:
    """What `template` can do. `stop_ids` are the model's; the template's own end of turn is added.

    Raises ChatTemplateError if it cannot render a plain question, or writes calls in a form that is not JSON.
    """
    literals = template.literals()
    ids = TemplateIds(tokenizer, literals)
    opening = template.render([_USER])
    if _QUESTION not in opening:
        raise ChatTemplateError(template.where, "it leaves out what the user says", "a chat template")
    shown = _try(template, [{"role": "system", "content": _SYSTEM}, _USER])
    listed = _try(template, [_USER], _TOOLS)
    stops = frozenset(token for token in (*stop_ids, *_end_of_turn(template, ids)) if token < vocab_size)
    if not stops:
        raise ChatTemplateError(template.where, "no id ends the assistant's turn", "an end-of-turn token")
    tools = PROBE_TOOL in listed
    format, results = _call_format(template, ids, _TOOLS if tools else None, stops)
    began = opening[max((found.end() for found in ids.controls(opening)), default=0) :]
    if any(found[0] == THINKING[0] for found in ids.controls(opening)[-1:]):
        began = THINKING[0]
    return TemplateFacts(
        template=template,
        ids=ids,
        format=format or _written_format(template, literals, tools=tools),
        system=_SYSTEM in shown,
        tools=tools,
        calls=format is not None,
        results=results or (format is None and _shows_results(template)),
        thinks=any(THINKING[0] in text for text in literals),
        opened=THINKING[0] in began and THINKING[1] not in began,
        alternates=not _try(template, [_USER, _USER]),
        stop_ids=stops,
    )


def _try(template: ChatTemplate, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """What a probe renders; nothing if the template refuses it."""
    try:
        return template.render(messages, tools=tools)
    except ChatTemplateError:
        return ""


def _end_of_turn(template: ChatTemplate, ids: TemplateIds) -> list[int]:
    """The control token that the template writes behind an answer."""
    messages = [_USER, {"role": "assistant", "content": _ANSWER}, _USER]
    text = _try(template, messages)
    answer = text.find(_ANSWER)
    if answer < 0:
        return []
    behind = text[answer + len(_ANSWER) :]
    found = ids.controls(behind)
    closes = found and not behind[: found[0].start()].strip() and found[0][0] in ids.special
    return [ids.id_of(found[0][0])] if closes else []


def _call_format(
    template: ChatTemplate,
    ids: TemplateIds,
    tools: Sequence[Mapping[str, Any]] | None,
    stops: Collection[int],
) -> tuple[CallFormat | None, bool]:
    """How the template writes a call, None if it does not, and whether it shows results."""
    odd = ""
    opening = _try(template, [_USER], tools)
    for strings in (False, True):
        arguments: Any = json.dumps(PROBE_ARGUMENTS) if strings else PROBE_ARGUMENTS
        call = {"type": "function", "id": PROBE_ID, "function": {"name": PROBE_TOOL, "arguments": arguments}}
        messages: list[Mapping[str, Any]] = [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": PROBE_TOOL, "tool_call_id": PROBE_ID, "content": _RESULT},
        ]
        text = _try(template, messages, tools)
        region = _reply_region(text, opening, ids, stops)
        format = learn(region)
        if format is not None:
            written = CallFormat(**{**vars(format), "strings": strings})
            return written, _RESULT in text
        odd = region if PROBE_TOOL in region else odd
    if odd:
        raise ChatTemplateError(
            template.where,
            f"it writes tool calls in a form that cannot be used: {odd[:160]}",
            "a name, and arguments as one JSON object",
            "use --dialect posttrainllm",
        )
    return None, False


def _reply_region(text: str, opening: str, ids: TemplateIds, stops: Collection[int]) -> str:
    """What stands in `text` where the assistant's reply to `opening` belongs."""
    same = next((i for i, (a, b) in enumerate(zip(text, opening, strict=False)) if a != b), len(opening))
    controls = ids.controls(text)
    if same < len(opening):  # it renders the last turn in another way: begin at the turn's own marker
        same = max((found.end() for found in controls if found.end() <= same), default=0)
    ends = [found.start() for found in controls if found.start() >= same and ids.id_of(found[0]) in stops]
    result = text.find(_RESULT, same)
    return text[same : min([*ends, len(text) if result < 0 else result])]


def _shows_results(template: ChatTemplate) -> bool:
    messages = [
        _USER,
        {"role": "assistant", "content": _ANSWER},
        {"role": "tool", "name": PROBE_TOOL, "tool_call_id": PROBE_ID, "content": _RESULT},
    ]
    return _RESULT in _try(template, messages)


def _written_format(template: ChatTemplate, literals: Sequence[str], *, tools: bool) -> CallFormat:
    """The format for a template that writes no calls: what it tells the model, or what its family was taught."""
    if tools:
        told = "\n".join(literals)
        return IN_TAGS if "<tool_call>" in told else BARE_JSON
    source = template.source
    return next((format for token, format in _WITHOUT_TOOLS.items() if token in source), LIST_IN_TAGS)


IN_TAGS = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def tool_spec(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates know it."""
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def tool_text(tools: Sequence[Tool], format: CallFormat, mark: Callable[[str], str]) -> str:
    """What tells a model about its tools where its template does not, the tools' own words marked.

    The example of a call is written like the calls that are wanted, with the same ids.
    """
    if not tools:
        return ""
    listed = json.dumps([tool_spec(tool)["function"] for tool in tools], ensure_ascii=False)
    example = format.text("NAME", {"ARGUMENT": "VALUE"})
    return (
        "You have access to the following tools:\n"
        f"<tools>{mark(listed)}</tools>\n\n"
        "To use a tool, reply with nothing but one call in exactly this form:\n"
        f"{example}\n\n"
        "You are then given what the tool returned. When no tool is needed, answer in plain text."
    )


def result_text(result: ToolResult) -> str:
    """What a model is told of a call: plain output where all went well, else an object that says what did not."""
    whole = not (result.stderr or result.exit_code or result.timed_out or result.truncated)
    if whole:
        return result.stdout
    return json.dumps(result.told(), ensure_ascii=False)
