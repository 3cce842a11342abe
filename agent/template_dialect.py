"""A conversation in the model's own chat template.

Each turn the whole conversation is rendered again, since templates look back. What they render is compared with
what was rendered before: as far as it agrees, the ids that were fed stay, and among them what the model said
stays as it was sampled. Where a template now writes the past differently (thoughts of earlier turns left out, a
date, trimmed text), the ids follow the template from there on, and only that part is fed again.

A call that the template writes in another JSON style than the model did is the same call: its ids stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.bundle import Bundle
from ..runtime.chat_template import find_template
from ..runtime.errors import BundleError, GrammarError, TokenizerError
from ..runtime.grammar import Grammar
from ..runtime.session import Session
from ..runtime.tokenizer import HuggingFaceTokenizer, Tokenizer
from .call_format import Parts, ReplyReader, read
from .call_grammar import arguments_schema, reply_lark
from .chat_format import IdSpan, Origin
from .conversation import Conversation
from .dialect import Update, refused_schema
from .reply import Call, Reply
from .strict_json import StrictJsonError, parse_json
from .template_facts import TemplateFacts, learn_template, result_text, tool_spec, tool_text
from .tools import Tool, ToolResult

NO_ANSWER = "(no answer)"  # ends a turn that stopped without one, where the template insists on an answer
_PROBE = "\N{WHITE CIRCLE} where the user speaks \N{WHITE CIRCLE}"


@dataclass(frozen=True)
class _UserTurn:
    text: str


@dataclass(frozen=True)
class _ReplyTurn:
    """What the model said: `text` without the id that ended it, `spans` with it."""

    text: str
    spans: tuple[IdSpan, ...]


@dataclass(frozen=True)
class _ResultTurn:
    result: ToolResult


_Turn = _UserTurn | _ReplyTurn | _ResultTurn


@dataclass(frozen=True)
class _Segment:
    """Rendered text, content marked, and the ids that were fed for it."""

    text: str
    spans: tuple[IdSpan, ...]


@dataclass(frozen=True)
class _State:
    turns: tuple[_Turn, ...] = ()
    segments: tuple[_Segment, ...] = ()
    heard: _ReplyTurn | None = None


class TemplateConversation:
    """The dialect of a chat template; see `dialect.Dialect`."""

    name = "chat_template"
    stop: Sequence[int] = ()

    def __init__(self, session: Session, facts: TemplateFacts, header: str, tools: Sequence[Tool]) -> None:
        self.facts = facts
        self.stop_ids = facts.stop_ids
        self._session = session
        self._tools = {tool.name: tool for tool in tools}
        words = "" if facts.tools else tool_text(tools, facts.format, facts.ids.mark)
        self._system = "\n\n".join(part for part in (facts.ids.mark(header), words) if part)  # marked
        specs = [tool_spec(tool) for tool in tools]
        self._specs = facts.ids.mark(specs) if facts.tools and specs else None
        self._state = _State()

    @classmethod
    def of(cls, session: Session, header: str, tools: Sequence[Tool]) -> TemplateConversation:
        """The conversation of `session`'s model. Raises BundleError, TokenizerError, ChatTemplateError."""
        facts = template_facts(session.bundle, session.tokenizer, tools=bool(tools))
        return cls(session, facts, header, tools)

    def opening(self) -> list[IdSpan]:
        """What stands before the first user's words."""
        marked = self._render((_UserTurn(_PROBE),))
        runs = self.facts.ids.encode(marked[: max(marked.find(_PROBE), 0)], first=True)
        return [IdSpan("template" if run.control else "system", run.ids) for run in runs]

    def user(self, conversation: Conversation, text: str) -> Update:
        """A user turn."""
        return self._advance(conversation, _UserTurn(text), "user", self.facts.ids.spelled(text))

    def result(self, conversation: Conversation, result: ToolResult) -> Update:
        """A tool turn; without a tool's name a user turn that says what was wrong."""
        spelled = self.facts.ids.spelled([result.tool, result.stdout, result.stderr])
        return self._advance(conversation, _ResultTurn(result), "tool", spelled)

    def commit(self, update: Update) -> None:
        """The turn of `update` was fed."""
        self._state = update.state

    def heard(self, spans: Sequence[IdSpan], text: str) -> None:
        """The model's reply; it gets its place when the next turn is rendered."""
        copies = tuple(IdSpan(span.origin, list(span.ids)) for span in spans)
        self._state = replace(self._state, heard=_ReplyTurn(text, copies))

    def mark(self) -> object:
        """The state, which never changes in place."""
        return self._state

    def restore(self, mark: object) -> None:
        """Back to a `mark`."""
        assert isinstance(mark, _State)
        self._state = mark

    def grammar(self, *, answer_only: bool) -> Grammar:
        """Text, or a call in the template's format. Raises ToolFileError naming tool and keyword."""
        facts, session = self.facts, self._session
        tools = [] if answer_only else list(self._tools.values())
        text = reply_lark(
            tools, facts.format, facts.ids, facts.stop_ids, thinks=facts.thinks, opened=facts.opened
        )
        try:
            return Grammar(text, session.tokenizer, vocab_size=session.vocab_size)
        except GrammarError:
            self._refuse_schemas(tools)
            raise

    def _refuse_schemas(self, tools: Sequence[Tool]) -> None:
        session = self._session
        for tool in tools:
            try:
                Grammar(arguments_schema(tool), session.tokenizer, vocab_size=session.vocab_size)
            except GrammarError as error:
                pointer = error.subject.removeprefix("#").removeprefix("/$defs/arguments")
                raise refused_schema(tool.name, pointer, error) from None

    def scanner(self) -> ReplyReader:
        """For a step without a grammar."""
        return ReplyReader(self.facts.format, self._tools, opened=self.facts.opened)

    def read(self, text: str) -> Reply | None:
        """The reply in `text`."""
        return self._read(text).reply

    def closing(self, conversation: Conversation) -> list[int]:
        """Nothing: the model ends its turn itself, and what follows the template writes with the next turn."""
        return []

    def system_text(self) -> str:
        """Header, and the tools where the template does not list them itself."""
        return self.facts.ids.restore(self._system)

    def result_text(self, result: ToolResult) -> str:
        """Plain output, or a JSON object; of a reply that was not understood, what was wrong with it."""
        return result_text(result) if result.tool else result.stderr

    def fingerprint(self) -> str:
        """Of the template's source."""
        return hashlib.sha256(self.facts.template.source.encode("utf-8", "replace")).hexdigest()

    def _read(self, text: str) -> Parts:
        return read(text, self.facts.format, self._tools, opened=self.facts.opened)

    def _advance(self, conversation: Conversation, turn: _Turn, origin: Origin, escaped: int) -> Update:
        state = self._state
        turns = (*state.turns, *([state.heard] if state.heard else []), turn)
        marked = self._render(turns)
        segments: list[_Segment] = []
        position = 0
        for segment in state.segments:
            if not marked.startswith(segment.text, position):
                break
            segments.append(segment)
            position += len(segment.text)
        same = len(segments) == len(state.segments)
        if same and state.heard:
            pinned = self._pin(marked[position:], state.heard)
            same = pinned is not None
            if pinned is not None:
                segments.append(pinned)
                position += len(pinned.text)
        runs = self.facts.ids.encode(marked[position:], first=position == 0)
        label: Origin = origin if same else "template"  # the past, as the template writes it now
        new = tuple(IdSpan("template" if run.control else label, run.ids) for run in runs)
        segments.append(_Segment(marked[position:], new))
        keep, spans = _difference(conversation, segments)
        return Update(keep, spans, escaped, _State(turns, tuple(segments)))

    def _pin(self, rest: str, reply: _ReplyTurn) -> _Segment | None:
        """The segment of `reply` at the start of `rest`, if the template writes what the model said."""
        ids, text = self.facts.ids, reply.text
        restored = ids.restore(rest)
        controls = ids.controls(rest)
        ends = [found.start() for found in controls if ids.id_of(found[0]) in self.stop_ids]
        if len(restored) == len(rest) and restored.startswith(text):
            end = len(text)
        elif ends and self._same_call(ids.restore(rest[: ends[0]]), text):
            end = ends[0]
        else:
            return None
        spans = list(reply.spans)
        last = spans[-1].ids[-1] if spans else None
        if last in self.stop_ids:
            closing = next((found for found in controls if found.start() == end), None)
            if closing is not None and ids.id_of(closing[0]) == last:
                end = closing.end()
            else:  # the model ended its turn with another id than the template's
                spans[-1] = IdSpan(spans[-1].origin, spans[-1].ids[:-1])
        return _Segment(rest[:end], tuple(span for span in spans if span.ids))

    def _same_call(self, written: str, said: str) -> bool:
        first, second = self._read(written), self._read(said)
        return isinstance(first.reply, Call) and bool(first.essence == second.essence)

    def _render(self, turns: Sequence[_Turn]) -> str:
        """The marked text of the conversation, the assistant's turn opened."""
        return self.facts.template.render(self._messages(turns), tools=self._specs)

    def _messages(self, turns: Sequence[_Turn]) -> list[dict[str, Any]]:
        mark = self.facts.ids.mark
        messages: list[dict[str, Any]] = []
        before = self._system
        if before and self.facts.system:
            messages.append({"role": "system", "content": before})
            before = ""
        call: dict[str, Any] | None = None
        for number, turn in enumerate(turns):
            following = turns[number + 1] if number + 1 < len(turns) else None
            if isinstance(turn, _ReplyTurn):
                call = self._call(turn.text, number) if isinstance(following, _ResultTurn) else None
                messages.append(self._reply(turn.text, call))
            elif isinstance(turn, _ResultTurn):
                messages.append(self._result(turn.result, call))
            else:
                if self.facts.alternates and messages and messages[-1]["role"] in ("user", "tool"):
                    messages.append({"role": "assistant", "content": NO_ANSWER})
                text = f"{before}\n\n{mark(turn.text)}" if before else mark(turn.text)
                messages.append({"role": "user", "content": text})
                before = ""
        return messages

    def _call(self, text: str, number: int) -> dict[str, Any] | None:
        """The call in a reply as templates know it; None if there is none, or the template writes none."""
        reply = self._read(text).reply
        if not isinstance(reply, Call) or not self.facts.calls:
            return None
        arguments = _object(reply.arguments)
        if arguments is None:
            return None
        given = self.facts.ids.mark(arguments)
        if self.facts.format.strings:
            given = self.facts.format.json(given)
        function = {"name": self.facts.ids.mark(reply.tool), "arguments": given}
        return {"type": "function", "id": f"call{number:05d}", "function": function}

    def _reply(self, text: str, call: dict[str, Any] | None) -> dict[str, Any]:
        mark = self.facts.ids.mark_reply
        if call is None:
            return {"role": "assistant", "content": mark(text.lstrip())}
        parts = self._read(text)
        return {
            "role": "assistant",
            "content": mark((parts.thought + parts.said).strip()),
            "tool_calls": [call],
        }

    def _result(self, result: ToolResult, call: dict[str, Any] | None) -> dict[str, Any]:
        mark = self.facts.ids.mark
        if not result.tool:
            return {"role": "user", "content": mark(result.stderr)}
        content = result_text(result)
        if call is None and (self.facts.calls or not self.facts.results):
            return {"role": "user", "content": mark(f"<tool_response>\n{content}\n</tool_response>")}
        message = {"role": "tool", "name": mark(result.tool), "content": mark(content)}
        return message if call is None else message | {"tool_call_id": call["id"]}


def template_facts(bundle: Bundle, tokenizer: Tokenizer, *, tools: bool = True) -> TemplateFacts:
    """What the chat template of a model can do. Raises BundleError, TokenizerError, ChatTemplateError."""
    template = find_template(bundle.path, tools=tools)
    if template is None:
        raise BundleError(bundle.path, "no chat template", remedy="use --dialect posttrainllm")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise TokenizerError(bundle.path, "a chat template and no tokenizer.json", "both")
    manifest = bundle.manifest
    ends = manifest.end_of_turn_ids if len(manifest.end_of_turn_ids) == 1 else []
    return learn_template(template, tokenizer, [*manifest.stop_ids, *ends], manifest.vocab_size)


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as an object, also where they came as JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except StrictJsonError:
            return None
    return arguments if isinstance(arguments, dict) else None


def _difference(conversation: Conversation, segments: Sequence[_Segment]) -> tuple[int, list[IdSpan]]:
    """How many leading ids of `conversation` the segments share, and their spans behind those."""
    spans = [span for segment in segments for span in segment.spans]
    new = [token for span in spans for token in span.ids]
    old = conversation.ids
    keep = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    left, behind = keep, []
    for span in spans:
        taken = min(left, len(span.ids))
        left -= taken
        if taken < len(span.ids):
            behind.append(IdSpan(span.origin, span.ids[taken:]))
    return keep, behind
