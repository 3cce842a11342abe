"""The context plan: what leaves the conversation when the next chunk does not fit.

The size of a chunk is known before it is fed. It has to fit together with room for one step of the assistant. If it
does not, whole exchanges leave, oldest first and no more than needed: earlier user turns with all that
followed them, then calls with their results of the present turn. The system prompt and the present user message never
leave. A result that does not fit even then is shortened to its head and its tail. What is left is put into ids
again by the dialect, with every reply as it was sampled, so the cache keeps the system prompt and only the rest is fed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from .chat_format import IdSpan
from .conversation import Conversation
from .dialect import Dialect, Update
from .output import cap_output
from .tools import ToolResult

Policy = Literal["evict", "stop"]


@dataclass(frozen=True)
class UserTurn:
    """A user's message; `number` counts user turns."""

    number: int
    text: str


@dataclass(frozen=True)
class ReplyTurn:
    """A step of the assistant, as it was generated."""

    number: int
    spans: tuple[IdSpan, ...]
    text: str


@dataclass(frozen=True)
class ResultTurn:
    """What came of the call in the reply before it."""

    number: int
    result: ToolResult


Turn = UserTurn | ReplyTurn | ResultTurn


@dataclass(frozen=True)
class Admitted:
    """A turn that is in the conversation now, as it was admitted, and what left for it.

    `dropped_turns` are numbers of user turns of which something left, `dropped_tokens` the ids that the conversation is
    shorter by before the new chunk, `shortened` the bytes that were cut out of the result.
    """

    turn: UserTurn | ResultTurn
    update: Update
    dropped_turns: tuple[int, ...] = ()
    dropped_tokens: int = 0
    shortened: int = 0


class NoRoomError(Exception):
    """A chunk does not fit; the message has the numbers."""


class ContextPlan:
    """A dialect and its conversation, kept within `limit` ids with room for `reserve` more.

    Raises what the dialect raises.
    """

    def __init__(self, dialect: Dialect, *, limit: int, reserve: int, policy: Policy) -> None:
        self.conversation = Conversation()
        self._dialect = dialect
        self._limit = limit
        self._reserve = reserve
        self._policy = policy
        self._turns: list[Turn] = []
        self.conversation.extend(dialect.opening())
        self._opening = list(self.conversation.spans)
        self._opened = self._present = dialect.mark()

    @property
    def opening(self) -> list[int]:
        """Ids of the system prompt, which never leave."""
        return [token for span in self._opening for token in span.ids]

    @property
    def turns(self) -> list[Turn]:
        """What was said since, less what left."""
        return list(self._turns)

    def resume(self, turns: Sequence[Turn], ids: Sequence[int]) -> bool:
        """Make the conversation that of `turns`, if it then has exactly `ids`; otherwise change nothing."""
        present = self._dialect.mark()
        conversation = self._put(turns)
        if conversation.ids != list(ids) or len(ids) > self._limit:
            self._dialect.restore(present)
            return False
        self._turns = list(turns)
        self.conversation.replace(conversation.spans)
        return True

    def admit(self, turn: UserTurn | ResultTurn) -> Admitted:
        """Append `turn`; afterwards a step has room. Raises NoRoomError, and changes nothing, if it cannot have it."""
        update = self._update(self.conversation, turn)
        if self._excess(update) <= 0:
            self._append(self.conversation, turn, update)
            return Admitted(turn, update)
        if self._policy == "stop":
            raise NoRoomError(self._numbers(update))
        self._present = self._dialect.mark()
        try:
            return self._evict(turn)
        except BaseException:
            self._dialect.restore(self._present)
            raise

    def heard(self, number: int, spans: Sequence[IdSpan], text: str) -> None:
        """A step of the assistant was generated: `spans` are in the conversation already."""
        copies = tuple(IdSpan(span.origin, list(span.ids)) for span in spans)
        self._turns.append(ReplyTurn(number, copies, text))
        self._dialect.heard(spans, text)

    def mark(self) -> object:
        """Where the conversation stands, for `restore`."""
        return (
            [IdSpan(span.origin, list(span.ids)) for span in self.conversation.spans],
            list(self._turns),
            self._dialect.mark(),
        )

    def restore(self, mark: object) -> None:
        """Forget all since `mark`; what left since then is back."""
        assert isinstance(mark, tuple)
        spans, self._turns, state = mark
        if self.conversation.spans != spans:
            self.conversation.replace(spans)
        self._dialect.restore(state)

    def _evict(self, turn: UserTurn | ResultTurn) -> Admitted:
        before, turns = len(self.conversation), list(self._turns)
        units = _units(turns, turn.number)
        shortened = 0
        smallest = self._rebuilt(turns, units)
        if self._excess(self._update(smallest, turn)) > 0:
            if not isinstance(turn, ResultTurn):
                raise NoRoomError(self._numbers(self._update(smallest, turn)))
            turn, shortened = self._shortened(smallest, turn)
        few, enough = 0 if shortened else 1, len(units)
        while few < enough:
            count = (few + enough) // 2
            if self._excess(self._update(self._rebuilt(turns, units[:count]), turn)) > 0:
                few = count + 1
            else:
                enough = count
        conversation = self._rebuilt(turns, units[:enough])
        update = self._update(conversation, turn)
        self._turns = _without(turns, units[:enough])
        if enough:
            self.conversation.replace(conversation.spans)
        self._append(self.conversation, turn, update)
        numbers = {turns[place].number for unit in units[:enough] for place in unit}
        return Admitted(turn, update, tuple(sorted(numbers)), before - len(conversation), shortened)

    def _rebuilt(self, turns: list[Turn], dropped: Sequence[range]) -> Conversation:
        """The conversation of the turns that are left; the dialect stands at its end afterwards."""
        if not dropped:
            self._dialect.restore(self._present)
            return self.conversation
        return self._put(_without(turns, dropped))

    def _put(self, turns: Sequence[Turn]) -> Conversation:
        """`turns` in ids; the dialect stands at their end afterwards."""
        conversation = Conversation()
        conversation.extend(self._opening)
        self._dialect.restore(self._opened)
        for turn in turns:
            if isinstance(turn, ReplyTurn):
                spans = [IdSpan(span.origin, list(span.ids)) for span in turn.spans]
                conversation.extend(spans)
                self._dialect.heard(spans, turn.text)
            else:
                update = self._update(conversation, turn)
                conversation.cut(update.keep)
                conversation.extend(update.spans)
                self._dialect.commit(update)
        return conversation

    def _shortened(self, conversation: Conversation, turn: ResultTurn) -> tuple[ResultTurn, int]:
        """`turn` with as much of its output as fits behind `conversation`, and how many bytes were cut out."""
        low, high = 0, max(len(turn.result.stdout.encode()), len(turn.result.stderr.encode()))
        if self._excess(self._update(conversation, _capped(turn, 0)[0])) > 0:
            raise NoRoomError(self._numbers(self._update(conversation, turn)))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._excess(self._update(conversation, _capped(turn, middle)[0])) <= 0
            low, high = (middle, high) if fits else (low, middle - 1)
        return _capped(turn, low)

    def _update(self, conversation: Conversation, turn: UserTurn | ResultTurn) -> Update:
        if isinstance(turn, UserTurn):
            return self._dialect.user(conversation, turn.text)
        return self._dialect.result(conversation, turn.result)

    def _append(self, conversation: Conversation, turn: Turn, update: Update) -> None:
        conversation.cut(update.keep)
        conversation.extend(update.spans)
        self._dialect.commit(update)
        self._turns.append(turn)

    def _excess(self, update: Update) -> int:
        return update.keep + _count(update) + self._reserve - self._limit

    def _numbers(self, update: Update) -> str:
        return (
            f"{update.keep} ids held + {_count(update)} new + {self._reserve} for the reply "
            f"do not fit in {self._limit}"
        )


def _count(update: Update) -> int:
    return sum(len(span.ids) for span in update.spans)


def _units(turns: Sequence[Turn], present: int) -> list[range]:
    """What can leave, in order: earlier user turns whole, then calls with their results of the `present` one."""
    units: list[range] = []
    starts = [place for place, turn in enumerate(turns) if isinstance(turn, UserTurn)]
    for start, end in pairwise([*starts, len(turns)]):
        if turns[start].number != present:
            units.append(range(start, end))
            continue
        results = [place for place in range(start, end) if isinstance(turns[place], ResultTurn)]
        units += [range(place - 1, place + 1) for place in results]
    return units


def _without(turns: Sequence[Turn], dropped: Sequence[range]) -> list[Turn]:
    gone = {place for unit in dropped for place in unit}
    return [turn for place, turn in enumerate(turns) if place not in gone]


def _capped(turn: ResultTurn, limit: int) -> tuple[ResultTurn, int]:
    """`turn` with at most `limit` bytes of each stream, and how many bytes were cut out."""
    result = turn.result
    out = cap_output(result.stdout.encode("utf-8", "surrogatepass"), limit)
    err = cap_output(result.stderr.encode("utf-8", "surrogatepass"), limit)
    cut = out.dropped + err.dropped
    return replace(
        turn,
        result=replace(result, stdout=out.text, stderr=err.text, truncated=result.truncated + cut),
    ), cut
