"""Dialects: how a conversation is put into ids, and how a reply is read.

A dialect speaks for one conversation. It says what each new turn adds to the ids that were fed, which is
mostly a continuation; a chat template may render what went before differently, and then the update keeps
less of it. An update takes effect once it is committed, so what does not fit changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..runtime.errors import BundleError, GrammarError, ToolFileError
from ..runtime.grammar import Grammar
from ..runtime.json_schema import children
from ..runtime.session import Session
from .chat_format import ANSWER_SCHEMA, IdSpan, Piece, PosttrainDialect, encode, reply_schema
from .conversation import Conversation
from .reply import Reply, ReplyScanner, parse_object
from .tools import Tool, ToolResult

MARKER_START = "<|"


@dataclass(frozen=True)
class Update:
    """The first `keep` ids of the conversation stay, `spans` follow them.

    `escaped`: how many control markers in new content were kept from becoming control ids. `state` is the dialect's own.
    """

    keep: int
    spans: list[IdSpan]
    escaped: int = 0
    state: Any = None


class Scanner(Protocol):
    """Finds a reply in text that arrives piece by piece, where no grammar shapes it."""

    def push(self, delta: str) -> Reply | None:
        """Add text; the reply as soon as it is whole."""

    def finish(self, *, ended: bool) -> Reply | None:
        """The reply of the whole text, None if there is none. `ended`: the model ended its turn itself."""


class Dialect(Protocol):
    """What the loop needs of a dialect."""

    name: str
    stop: Sequence[int]
    stop_ids: frozenset[int]

    def opening(self) -> list[IdSpan]:
        """What every conversation begins with. May be less than what stands before the first user turn."""

    def user(self, conversation: Conversation, text: str) -> Update:
        """A user turn, and the opening of the assistant's."""

    def result(self, conversation: Conversation, result: ToolResult) -> Update:
        """What came of the last reply's call (without a tool's name: of a reply that was not understood)."""

    def commit(self, update: Update) -> None:
        """`update` was admitted."""

    def heard(self, spans: Sequence[IdSpan], text: str) -> None:
        """The assistant's step as it was generated: its ids, and its text without a stop sequence."""

    def mark(self) -> object:
        """Where the conversation stands, for `restore`."""

    def restore(self, mark: object) -> None:
        """Forget all since `mark`."""

    def grammar(self, *, answer_only: bool) -> Grammar:
        """What a step may say. Raises ToolFileError naming tool and keyword."""

    def scanner(self) -> Scanner:
        """For a step without a grammar."""

    def read(self, text: str) -> Reply | None:
        """The reply in the whole text of a step that a grammar shaped."""

    def closing(self, conversation: Conversation) -> list[int]:
        """What the next turn will begin with, to end the assistant's last one; as far as that is known."""

    def system_text(self) -> str:
        """The system message without its markers."""

    def result_text(self, result: ToolResult) -> str:
        """What the model reads of a result, without markers."""

    def fingerprint(self) -> str:
        """SHA-256 of the template: two conversations of one template are put into ids alike."""


class PosttrainConversation:
    """The posttrainllm dialect (`chat_format.py`): every turn is a continuation."""

    name = PosttrainDialect.name

    def __init__(self, session: Session, header: str, tools: Sequence[Tool]) -> None:
        self.stop: Sequence[int] = session.manifest.end_of_turn_ids
        self.stop_ids = frozenset(session.manifest.stop_ids)
        self._session = session
        self._header = header
        self._tools = {tool.name: tool for tool in tools}
        self._dialect = PosttrainDialect()
        self._opened = encode(self._dialect.user("")[-1:], session.tokenizer)[0][0].ids

    def opening(self) -> list[IdSpan]:
        """The system turn."""
        spans, _ = encode(
            self._dialect.system(self._header, list(self._tools.values())), self._session.tokenizer
        )
        return [IdSpan("template", self._session.tokenizer.bos_ids), *spans]

    def user(self, conversation: Conversation, text: str) -> Update:
        """The user's text between its markers."""
        return self._turn(conversation, self._dialect.user(text))

    def result(self, conversation: Conversation, result: ToolResult) -> Update:
        """The result as JSON between its markers."""
        return self._turn(conversation, self._dialect.tool_result(result))

    def _turn(self, conversation: Conversation, pieces: list[Piece]) -> Update:
        spans, escaped = encode([*self._closing(conversation), *pieces], self._session.tokenizer)
        return Update(len(conversation), spans, escaped)

    def _closing(self, conversation: Conversation) -> list[Piece]:
        """What ends the assistant's last turn; the marker only if the model did not say it itself."""
        last = conversation.spans[-1]
        closing = self._dialect.end_of_turn()
        if last.origin not in (
            "sampled",
            "forced",
        ):  # the opening, or a turn that was opened and stopped there
            return closing if last.ids == self._opened else []
        said = conversation.ids[-len(self.stop) :] == list(self.stop)
        return closing[1:] if said else closing

    def commit(self, update: Update) -> None:
        """Nothing to remember: the conversation's ids are all there is."""

    def heard(self, spans: Sequence[IdSpan], text: str) -> None:
        """Nothing to remember."""

    def mark(self) -> object:
        """Nothing to remember."""
        return None

    def restore(self, mark: object) -> None:
        """Nothing to forget."""

    def grammar(self, *, answer_only: bool) -> Grammar:
        """A call or an answer, as one JSON object."""
        session = self._session
        if session.tokenizer.encode_content(MARKER_START).escaped:
            for name, held in self._tools.items():
                _refuse_markers(name, held.parameters, "")
        schema: Mapping[str, Any] = ANSWER_SCHEMA if answer_only else reply_schema(list(self._tools.values()))
        try:
            return Grammar(schema, session.tokenizer, vocab_size=session.vocab_size)
        except GrammarError as error:
            place = error.subject.removeprefix("#/$defs/")
            tool, _, pointer = place.partition("/")
            raise refused_schema(tool, f"/{pointer}", error) from None

    def scanner(self) -> Scanner:
        """Looks for the first call or answer in free text."""
        return ReplyScanner(self._tools)

    def read(self, text: str) -> Reply | None:
        """The one object that the grammar admits."""
        return parse_object(text, self._tools)

    def closing(self, conversation: Conversation) -> list[int]:
        """The end of turn, if the model did not say it, and a newline."""
        spans, _ = encode(self._closing(conversation), self._session.tokenizer)
        return [token for span in spans for token in span.ids]

    def system_text(self) -> str:
        """Header, tools and rules."""
        return self._dialect.system_text(self._header, list(self._tools.values()))

    def result_text(self, result: ToolResult) -> str:
        """One JSON object."""
        return self._dialect.result_text(result)

    def fingerprint(self) -> str:
        """Of what the template writes around fixed contents."""
        pieces = [
            *self._dialect.system("H", [Tool("t", "d")]),
            *self._dialect.user("u"),
            *self._dialect.end_of_turn(),
            *self._dialect.tool_result(ToolResult("t", "", "", 0)),
        ]
        return hashlib.sha256("".join(piece.text for piece in pieces).encode()).hexdigest()


def _refuse_markers(tool: str, schema: object, pointer: str) -> None:
    """For models that read a spelled marker as one: a schema must not make the grammar force it into a reply.

    Raises ToolFileError.
    """
    if not isinstance(schema, Mapping):
        return
    for keyword in ("properties", "enum", "const"):
        held = list(schema[keyword]) if keyword == "properties" and keyword in schema else schema.get(keyword)
        if MARKER_START in json.dumps(held, ensure_ascii=False):
            raise ToolFileError(
                f"tool {tool}",
                f"parameters#{pointer}/{keyword}: {MARKER_START} in a name or value",
                "none, for a model whose turn markers are spelled out with it",
                "or use --no-constrain",
            )
    for below, inner in children(schema):
        _refuse_markers(tool, inner, pointer + below)


def refused_schema(tool: str, pointer: str, error: GrammarError) -> ToolFileError:
    """The error for a tool whose schema no grammar can hold."""
    return ToolFileError(
        f"tool {tool}", f"parameters#{pointer}: {error.found}", error.expected, "or use --no-constrain"
    )


def open_dialect(session: Session, header: str, tools: Sequence[Tool], name: str | None = None) -> Dialect:
    """The dialect `name`, or the model's own. Raises BundleError, ChatTemplateError.

    `name` is "posttrainllm" or "chat_template".
    """
    name = name or session.manifest.dialect
    if name == PosttrainConversation.name:
        return PosttrainConversation(session, header, tools)
    if name == "chat_template":
        from .template_dialect import TemplateConversation

        return TemplateConversation.of(session, header, tools)
    raise BundleError(
        session.bundle.path,
        "the model has no chat template: a base model, which knows no turns",
        "a model that was trained on conversations",
        "--dialect posttrainllm lets it try; `posttrainllm sample` runs it on plain text",
    )
