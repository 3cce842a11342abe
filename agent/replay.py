"""replay(): feed a recorded conversation again, and see whether the same ids come out.

The recorded ids are fed, so one deviation does not cause the next. Under a recorded grammar the same grammar is
followed: forced ids must be the ones it forces, and a sampled id the best of those it admits. How ids are split
into runs of the graph moves logits by rounding, and not all of how it was is known (a cached prompt, say). So where
another id comes out, and the recorded one's logit is within `bound` times the spread of the logits below it, the step
is a close call: counted, and not wrong. Sampled at a
temperature, an id cannot be predicted; then its log-probability must come out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import ContextFullError, InputError
from ..runtime.generation import log_probability
from ..runtime.grammar import Grammar, Matcher
from ..runtime.kv_cache import KVCache
from ..runtime.session import Session
from .dialect import Dialect, open_dialect
from .model_facts import weights_fingerprint
from .tools import Tool
from .trajectory import Trajectory, TrajectoryStep

# Share of the spread of a step's logits within which two of them count as equal. fp32 and fp16: what any split of
# the same ids may differ by. Quantised products move further: an activation's rounding is all or nothing.
BOUNDS = {"fp32": 1e-4, "fp16": 2e-3}
QUANTISED = 1e-2
_ROUNDING = 1e-6  # of a recorded log-probability


@dataclass(frozen=True)
class Deviation:
    """An id that did not come out again. `gap`: how far its logit is below the best, as a share of the spread."""

    step: int
    position: int
    recorded: int
    found: int | None
    reason: str
    gap: float = 0.0


@dataclass
class Replay:
    """What came of a replay. `ids` were fed; `sampled` and `forced` ids were checked."""

    greedy: bool
    constrained: bool
    bound: float
    segments: int = 0
    ids: int = 0
    sampled: int = 0
    forced: int = 0
    logprobs: int = 0
    worst_logprob: float = 0.0
    close: list[Deviation] = field(default_factory=list)
    wrong: list[Deviation] = field(default_factory=list)


def check_model(trajectory: Trajectory, session: Session, path: object, model: object) -> None:
    """Raises InputError, with both fingerprints, if `session` has other weights, tokenizer or template."""
    weights = weights_fingerprint(session.bundle)
    if trajectory.model_fingerprint not in (weights, session.manifest.source.sha256):
        raise InputError(
            path,
            f"recorded with the weights {trajectory.model_fingerprint or '(not stated)'}",
            f"those of {model}: {weights}",
            "name the model that the conversation was held with",
        )
    recorded = trajectory.facts.get("tokenizer_fingerprint")
    if recorded not in (None, session.tokenizer.fingerprint):
        raise InputError(
            path,
            f"recorded with the tokenizer {recorded}",
            f"that of {model}: {session.tokenizer.fingerprint}",
        )


def replay(trajectory: Trajectory, session: Session, path: object = "trajectory") -> Replay:
    """Feed every segment of `trajectory` to `session`. Raises InputError for ids that the model cannot take."""
    follower = _Follower(trajectory, session, path)
    cache = session.new_cache()
    first = 0
    for stretch in trajectory.stretches():
        follower.report.segments += 1
        try:
            _feed(follower, cache, stretch.kept, stretch.steps, first)
        except ContextFullError as error:
            raise InputError(path, f"a segment is longer than the context ({error})") from None
        first += len(stretch.steps)
        follower.report.ids += cache.length
    return follower.report


def _feed(
    follower: _Follower, cache: KVCache, kept: Sequence[int], steps: Sequence[TrajectoryStep], first: int
) -> None:
    session, sequence = follower.session, list(kept)
    for number, step in enumerate(steps, first):
        follower.refuse_unknown(step)
        if step.role == "system" and step.input_ids:  # fed by itself, as the agent does
            session.prefill([*sequence, *step.input_ids], cache)
        if step.output_ids:
            before = sequence if step.role == "assistant" else [*sequence, *step.input_ids]
            if not before:
                raise InputError(
                    follower.path, f"step {number} begins with output", "ids that were fed first"
                )
            rows = _rows(session, cache, before, step)
            follower.follow(number, step, rows)
        sequence += step.ids


def _rows(
    session: Session, cache: KVCache, before: Sequence[int], step: TrajectoryStep
) -> Iterator[NDArray[np.float32] | None]:
    """For each output id the logits [V] that it was sampled from; None where it was forced.

    Ids are fed as `generate` feeds them, forced ones together with the sampled one before them: the same splits
    give the same logits, where int8 activations would move them otherwise.
    """
    context = list(before)
    for position, token in enumerate(step.output_ids):
        forced = step.forced is not None and step.forced[position]
        yield None if forced else session.prefill(context, cache)
        context.append(token)


class _Follower:
    """Compares recorded outputs with logits."""

    def __init__(self, trajectory: Trajectory, session: Session, path: object) -> None:
        self.session = session
        self.path = path
        self._facts = trajectory.facts
        sampling: Any = self._facts.get("sampling")
        sampling = sampling if isinstance(sampling, dict) else {}
        self.report = Replay(
            greedy=not sampling.get("temperature"),
            constrained=bool(sampling.get("constrained")),
            bound=BOUNDS.get(session.manifest.precision, QUANTISED),
        )
        self._known = min(session.tokenizer.vocab_size, session.vocab_size)
        self._grammars: dict[bool, Grammar] = {}

    def refuse_unknown(self, step: TrajectoryStep) -> None:
        """Raises InputError for an id that the model has no row for."""
        highest = max(step.ids, default=0)
        if highest >= self.session.vocab_size:
            raise InputError(self.path, f"the id {highest}", f"ids below {self.session.vocab_size}")

    def follow(self, number: int, step: TrajectoryStep, rows: Iterator[NDArray[np.float32] | None]) -> None:
        """Check one step's ids, up to one that the grammar does not admit."""
        matcher = self._matcher(step.answer_only) if self.report.constrained else None
        waiting = matcher.force() if matcher else []
        for position, (token, logits) in enumerate(zip(step.output_ids, rows, strict=True)):
            place = (number, position, token)
            recorded = step.forced[position] if step.forced else bool(waiting)
            if recorded is not bool(waiting):
                self._wrong(*place, None, f"recorded as {'forced' if recorded else 'sampled'}, and is not")
                return
            if waiting:
                self.report.forced += 1
                if token != waiting[0]:
                    self._wrong(*place, waiting[0], "the grammar forces another id")
                    return
                waiting = waiting[1:]
                continue
            assert logits is not None
            if not self._sampled(place, step, logits, matcher):
                return
            if matcher:
                matcher.accept(token)
                waiting = matcher.force()

    def _sampled(
        self,
        place: tuple[int, int, int],
        step: TrajectoryStep,
        logits: NDArray[np.float32],
        matcher: Matcher | None,
    ) -> bool:
        """Check one sampled id; whether the grammar can go on behind it."""
        number, position, token = place
        report = self.report
        report.sampled += 1
        allowed = np.arange(logits.size) < self._known
        if matcher:
            if matcher.finished:
                self._wrong(*place, None, "the grammar had ended")
                return False
            allowed = matcher.allowed()
        if not allowed[token]:
            self._wrong(*place, None, "not admitted here")
            return False
        spread = float(np.ptp(logits[: self._known])) or 1.0
        best = int(np.argmax(np.where(allowed, logits, -np.inf)))
        if report.greedy and best != token:
            gap = float(logits[best] - logits[token]) / spread
            found = Deviation(number, position, token, best, "another id is better", gap)
            (report.close if gap <= report.bound else report.wrong).append(found)
        logprob = step.logprobs[position] if step.logprobs else None
        if logprob is not None:
            off = abs(log_probability(logits[: self._known], token) - logprob)
            report.logprobs += 1
            report.worst_logprob = max(report.worst_logprob, off)
            if off > 2 * report.bound * spread + _ROUNDING:
                self._wrong(*place, token, f"its log-probability is off by {off:.2g}")
        return True

    def _wrong(self, step: int, position: int, recorded: int, found: int | None, reason: str) -> None:
        self.report.wrong.append(Deviation(step, position, recorded, found, reason))

    def _matcher(self, answer_only: bool) -> Matcher:
        if answer_only not in self._grammars:
            self._grammars[answer_only] = self._dialect.grammar(answer_only=answer_only)
        return self._grammars[answer_only].matcher()

    @cached_property
    def _dialect(self) -> Dialect:
        """The dialect, with the tools that were offered. Raises InputError."""
        facts = self._facts
        try:
            tools = [
                Tool(entry["name"], entry.get("description"), entry["parameters"], handler=entry["name"])
                for entry in facts["tools"]
            ]
            dialect = open_dialect(self.session, facts["header"], tools, facts["dialect"])
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                self.path, f"a grammar was used, and its facts are not there ({error!r})"
            ) from None
        if dialect.fingerprint() != facts.get("template_fingerprint"):
            raise InputError(
                self.path,
                f"recorded with the template {facts.get('template_fingerprint')}",
                f"the model's: {dialect.fingerprint()}",
            )
        return dialect
