"""Agent.run(): one user turn as events. Generate, parse, approve, execute, append; until an answer.

The model's ids, the KV cache and the events all come from one `Conversation`. A turn that ends without an
answer ends with a `Stop` event that says why; nothing is dropped silently. A turn that is interrupted is
taken back whole, so that the next one starts from a consistent conversation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from ..runtime.errors import ContextFullError
from ..runtime.generation import Step, generate
from ..runtime.kv_cache import KVCache
from ..runtime.sampler import Sampler
from ..runtime.session import PREFILL_CHUNK, Session
from ..runtime.tokenizer import decode
from . import events
from .arguments import check_arguments, problem_result, unknown_tool_result
from .chat_format import DEFAULT_HEADER, IdSpan
from .context_plan import Admitted, ContextPlan, NoRoomError, Policy, ResultTurn, Turn, UserTurn
from .conversation import Conversation
from .dialect import open_dialect
from .recorder import RunSettings, TrajectoryRecorder
from .repetition import NOT_RUN, REPEATS, Repetition
from .reply import Answer, Call, Malformed, Reply
from .tools import Tool, ToolBackend, ToolResult

Approval = Literal["yes", "no", "always"]
DECLINED = "not run: the user declined this call"
NOBODY_ASKED = "not run: this tool wants the user asked before each call, and nobody can be asked here"


@dataclass(frozen=True)
class Limits:
    """`max_steps`: tool calls in one user turn. `max_tokens`: sampled ids in one assistant step."""

    max_steps: int = 8
    max_tokens: int = 256


@dataclass
class _Output:
    """One assistant step as it was generated."""

    steps: list[Step] = field(default_factory=list)
    reply: Reply | None = None
    stop: str = "stop"
    cached: int = 0
    prompt: int = 0


class _Ended(Exception):
    """The turn cannot go on; carries the reason of its Stop event."""

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class Agent:
    """A model, its tools and one conversation.

    `approve(tool, arguments)` is asked before each call, or with `approve_all` False only for tools that want
    it (`Tool.confirm`), which do not run where it is not given. "no" is told to the model, "always" holds for
    further calls of that tool. With
    `constrain` (the default) a grammar made of the tools' schemas admits only calls and answers. A `cache`
    of the session may be given, from an earlier agent say: what both conversations begin with is not fed
    again. `dialect` names another than the model's own ("posttrainllm", "chat_template"). `drafts` saves forwards
    where the reply repeats what the conversation holds (`runtime/drafts.py`); the reply is the same without.
    `context_policy` says whether old exchanges leave a full context ("evict") or the turn ends ("stop"). A `recorder` writes the
    conversation to a file, token by token; without drafts, so that a replay can feed the same pieces. Raises
    ToolFileError if a schema cannot be compiled, ContextFullError if the system prompt does not fit,
    ChatTemplateError (also while it runs) for a template that fails, BundleError for a model without one.
    One thread at a time.
    """

    def __init__(
        self,
        session: Session,
        tools: Sequence[Tool],
        *,
        backend: ToolBackend,
        header: str = DEFAULT_HEADER,
        sampler: Sampler | None = None,
        limits: Limits | None = None,
        constrain: bool = True,
        approve: Callable[[Tool, Mapping[str, Any]], Approval] | None = None,
        approve_all: bool = True,
        preallocate: bool = True,
        cache: KVCache | None = None,
        dialect: str | None = None,
        drafts: bool = True,
        context_policy: Policy = "evict",
        recorder: TrajectoryRecorder | None = None,
    ) -> None:
        self.session = session
        self.tools = {tool.name: tool for tool in tools}
        self.dialect = open_dialect(session, header, tools, dialect)
        self.cache = session.new_cache(preallocate=preallocate) if cache is None else cache
        self.drafter = session.new_drafter() if drafts and recorder is None else None
        self._backend = backend
        self.sampler = sampler or Sampler()
        self._limits = limits or Limits()
        self._approve = approve
        self._approve_all = approve_all
        self._always: set[str] = set()
        grammar = self.dialect.grammar
        self._grammars = (grammar(answer_only=False), grammar(answer_only=True)) if constrain else None
        self.turn = -1
        self._fed_ahead = 0  # ids of `prepare` that no event has counted yet
        self._plan = ContextPlan(
            self.dialect, limit=self.cache.max_length, reserve=self._limits.max_tokens, policy=context_policy
        )
        self._check_room(len(tools))
        self._recorder = recorder
        if recorder:
            settings = RunSettings(header, tools, self.sampler, self._limits, constrain)
            recorder.begin(self.conversation, self.dialect, settings)

    @property
    def conversation(self) -> Conversation:
        """All ids so far."""
        return self._plan.conversation

    @property
    def opening(self) -> list[int]:
        """Ids of the system prompt."""
        return self._plan.opening

    @property
    def turns(self) -> list[Turn]:
        """What was said, less what left the context."""
        return self._plan.turns

    def resume(self, turns: Sequence[Turn], number: int, ids: Sequence[int]) -> bool:
        """Go on from a saved conversation, whose last user turn has `number`; False, and nothing changed, if
        `turns` do not give `ids`."""
        if not self._plan.resume(turns, ids):
            return False
        self.turn = number
        return True

    def restore(self, ids: Sequence[int], values: Sequence[NDArray[Any]]) -> None:
        """Take over the keys and values of a saved conversation's first `ids`."""
        self.cache.restore(ids, values)
        self._fed_ahead = 0

    def _check_room(self, tools: int) -> None:
        found, limit = len(self.conversation), self.cache.max_length
        if found > limit:
            raise ContextFullError(
                "system prompt", f"{found} ids, with {tools} tools", f"at most {limit}", "offer fewer tools"
            )

    def prepare(self) -> None:
        """Feed the system prompt, if it is not in the cache yet, so that the first turn need not wait for it.

        Always in chunks of its own: restored from a prompt cache it is then the same bit for bit.
        """
        ids = self.conversation.ids
        known = self.cache.common_prefix(ids)
        if ids == self._plan.opening and known < len(ids):
            known -= known % PREFILL_CHUNK
            self.cache.rewind(known)
            self.session.prefill(ids, self.cache)
            self._fed_ahead = len(ids) - known

    def run(self, text: str) -> Generator[events.Event, None, None]:
        """The events of one user turn; the last is an Answer or a Stop. Closing it takes the turn back."""
        self.turn += 1
        mark, recorder = self._plan.mark(), self._recorder
        recorded = recorder.mark() if recorder else None
        try:
            self.prepare()
            yield from self._run(text)
        except _Ended as end:
            if recorder:
                recorder.ended(end.reason)
            yield events.Stop(**self._stamp(), reason=end.reason, detail=end.detail)
        except BaseException:  # Ctrl-C, a closed generator, a fault: no half turn stays behind
            self._plan.restore(mark)
            if recorder and recorded:
                recorder.take_back(recorded)
            raise

    def interrupted(self) -> events.Stop:
        """The event for a turn that the caller stopped by closing `run`'s iterator."""
        return events.Stop(**self._stamp(), reason="interrupted", detail="the turn was taken back")

    def _run(self, text: str) -> Iterator[events.Event]:
        admitted = self._admit(UserTurn(self.turn, text))
        if self._recorder:
            self._recorder.fed("user", self.conversation, text)
        yield events.User(**self._stamp(), text=text, escaped=admitted.update.escaped or None)
        yield from self._left(admitted)
        retried = False
        repeated = Repetition()
        calls = 0
        for number in itertools.count():
            final = calls == self._limits.max_steps
            output = _Output()
            yield from self._generate(output, answer_only=final)
            yield self._assistant_event(number, output)
            reply = output.reply
            if isinstance(reply, Answer):
                yield events.AnswerEvent(**self._stamp(), text=reply.text)
                return
            if isinstance(reply, Malformed) and not retried and not final:
                retried = True  # one bounded retry a turn, with the parser's words
                yield from self._show(self._unparsed(reply, output), None)
                continue
            if not isinstance(reply, Call):
                yield self._without_reply(output)
                return
            if final:
                raise _Ended("steps", f"{calls} tool calls without an answer; --max-steps raises the limit")
            calls += 1
            if repeated.exhausted(reply):
                yield from self._show(ToolResult(reply.tool, "", NOT_RUN, 126), reply.arguments)
                raise _Ended(
                    "repeat", f"{reply.tool} was called {REPEATS} times in a row with the same result"
                )
            result, arguments = self._execute(reply)
            yield from self._show(result, arguments)
            repeated.count(reply, result)

    def _generate(self, output: _Output, *, answer_only: bool) -> Iterator[events.Event]:
        """Decode one assistant step into `output`, yielding deltas; the conversation keeps its ids."""
        prompt = self.conversation.ids
        output.prompt = len(prompt)
        output.cached = max(self.cache.common_prefix(prompt) - self._fed_ahead, 0)
        self._fed_ahead = 0
        matcher = self._grammars[answer_only].matcher() if self._grammars else None
        scanner = None if matcher else self.dialect.scanner()
        steps = generate(
            self.session,
            prompt,
            cache=self.cache,
            sampler=self.sampler,
            max_tokens=self._limits.max_tokens,
            matcher=matcher,
            stop=() if matcher else self.dialect.stop,
            stop_ids=self.dialect.stop_ids,
            drafter=self.drafter,
            logprobs=self._recorder is not None,
        )
        for step in steps:
            output.steps.append(step)
            output.stop = step.finish_reason or "stop"
            if step.text:
                yield events.Delta(**self._stamp(), text=step.text)
            if scanner and scanner.push(step.text):
                break
        before = len(self.conversation.spans)
        for step in output.steps:
            self._append_ids("forced" if step.forced else "sampled", [step.id])
        if scanner:
            output.reply = scanner.push("") or scanner.finish(ended=output.stop == "stop")
        elif output.stop == "stop":
            output.reply = self.dialect.read(self._raw(output))
        raw = self._raw(output)
        self._plan.heard(self.turn, self.conversation.spans[before:], raw)
        if self._recorder:
            self._recorder.said(self.conversation, output.steps, raw, output.reply, answer_only=answer_only)

    def _without_reply(self, output: _Output) -> events.Event:
        """How a turn ends when a step gave neither a call nor an answer."""
        if output.stop == "context":
            raise _Ended("context", f"the context of {self.cache.max_length} ids is full")
        cut = output.stop == "length" and (self._grammars is not None or output.reply is not None)
        if cut:
            raise _Ended(
                "tokens",
                f"cut off after {self._limits.max_tokens} sampled ids; --max-tokens raises the limit",
            )
        return events.AnswerEvent(**self._stamp(), text=self._raw(output).strip(), fallback=True)

    def _execute(self, call: Call) -> tuple[ToolResult, object]:
        """Check, approve and run one call; every failure is a result. Also the arguments that were used."""
        tool = self.tools.get(call.tool)
        if tool is None:
            return unknown_tool_result(call.tool, tuple(self.tools)), call.arguments
        arguments = check_arguments(tool, call.arguments)
        if not isinstance(arguments, dict):
            return problem_result(tool, arguments), call.arguments
        refusal = self._ask(tool, arguments)
        if refusal:
            return ToolResult(tool.name, "", refusal, 126), arguments
        return self._backend.call(tool, arguments), arguments

    def _ask(self, tool: Tool, arguments: Mapping[str, Any]) -> str | None:
        """Why a call may not run; None if it may."""
        wanted = tool.confirm or (self._approve is not None and self._approve_all)
        if not wanted or tool.name in self._always:
            return None
        if self._approve is None:
            return NOBODY_ASKED
        answer = self._approve(tool, arguments)
        if answer == "always":
            self._always.add(tool.name)
        return DECLINED if answer == "no" else None

    def _show(self, result: ToolResult, arguments: object) -> Iterator[events.Event]:
        """Report a result and append it for the model. Raises _Ended if it does not fit."""
        escaped = self.dialect.result(self.conversation, result).escaped
        yield events.ToolCallEvent(
            **self._stamp(),
            tool=result.tool,
            arguments=arguments,
            stdout=result.stdout,
            stderr=result.stderr,
            exit_code=result.exit_code,
            duration_sec=round(result.duration_sec, 6),
            timed_out=result.timed_out or None,
            truncated=result.truncated or None,
            replaced=result.replaced or None,
            escaped=escaped or None,
        )
        admitted = self._admit(ResultTurn(self.turn, result))
        yield from self._left(admitted)
        assert isinstance(admitted.turn, ResultTurn)
        shown = admitted.turn.result
        if self._recorder:
            self._recorder.fed("tool", self.conversation, self.dialect.result_text(shown), shown)
        yield events.ToolResultEvent(
            **self._stamp(),
            tool=shown.tool,
            stdout=shown.stdout,
            stderr=shown.stderr,
            exit_code=shown.exit_code,
        )

    def _unparsed(self, reply: Malformed, output: _Output) -> ToolResult:
        problem = reply.problem
        if output.stop == "length":
            problem = f"truncated: only {self._limits.max_tokens} sampled ids are allowed (--max-tokens)"
        return ToolResult("", "", f"your reply was not understood: {problem}", 2)

    def _admit(self, turn: UserTurn | ResultTurn) -> Admitted:
        try:
            return self._plan.admit(turn)
        except NoRoomError as error:
            raise _Ended("context", str(error)) from None

    def _left(self, admitted: Admitted) -> Iterator[events.Event]:
        """What had to leave for a turn, where something had to."""
        if admitted.dropped_turns or admitted.shortened:
            yield events.ContextEvent(
                **self._stamp(),
                dropped_turns=list(admitted.dropped_turns),
                dropped_tokens=admitted.dropped_tokens,
                shortened=admitted.shortened or None,
                held_tokens=len(self.conversation),
                limit=self.cache.max_length,
            )

    def _append_ids(self, origin: Literal["sampled", "forced"], ids: list[int]) -> None:
        last = self.conversation.spans[-1]
        if last.origin == origin:
            last.ids.extend(ids)
        else:
            self.conversation.extend([IdSpan(origin, ids)])

    def _raw(self, output: _Output) -> str:
        ids = [step.id for step in output.steps]
        count = len(self.dialect.stop)
        if count and ids[-count:] == list(self.dialect.stop):
            ids = ids[:-count]
        elif ids and ids[-1] in self.dialect.stop_ids:
            ids = ids[:-1]
        return decode(self.session.tokenizer, ids)

    def _assistant_event(self, number: int, output: _Output) -> events.Assistant:
        reply = output.reply
        foreign = isinstance(reply, Call) and reply.dialect != self.dialect.name
        return events.Assistant(
            **self._stamp(),
            step=number,
            raw=self._raw(output),
            prompt_tokens=output.prompt,
            cached_tokens=output.cached,
            forced_tokens=sum(step.forced for step in output.steps),
            sampled_tokens=sum(not step.forced for step in output.steps),
            stop=output.stop,
            dialect=reply.dialect if isinstance(reply, Call) and foreign else None,
        )

    def _stamp(self) -> dict[str, Any]:
        return {"turn": self.turn, "time": round(time.time(), 3)}
