"""Preference pairs: rollouts of one task and one prompt, the better against the worse by reward.

Two passes over the folder: the first remembers a reward and a hash of each rollout, the second reads the files of
a pair again. The best is paired with the worst, the second best with the second worst, and so on while the
rewards differ; each rollout stands in one pair at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .training_data import Row, Source, digest, masked_ids, message
from .trajectory import Trajectory, TrajectoryStep, read_trajectory


@dataclass
class PairCounts:
    """What became of the rollouts. `unfit`: no reward, several user turns, or nothing said."""

    rollouts: int = 0
    unfit: int = 0
    single: int = 0
    emitted: int = 0


@dataclass(frozen=True)
class _Rollout:
    name: str
    reward: float
    said: bytes


def pair_rows(source: Source, counts: PairCounts, *, ids: bool) -> Iterator[Row]:
    """A row for each pair: `prompt`, `chosen`, `rejected` as messages, or their ids and loss masks."""
    groups: dict[bytes, list[_Rollout]] = {}
    for name, trajectory in source:
        counts.rollouts += 1
        parts = _parts(trajectory, ids=ids)
        reward = trajectory.reward
        if parts is None or reward is None:
            counts.unfit += 1
            continue
        prompt, rest = parts
        key = digest([trajectory.task, *((step.content, step.ids if ids else 0) for step in prompt)])
        said = digest([(step.content, step.ids if ids else 0) for step in rest])
        groups.setdefault(key, []).append(_Rollout(name, reward, said))
    for group in groups.values():
        for better, worse in _pairs(group, counts):
            row = _row(source, better, worse, ids=ids)
            counts.emitted += 1
            yield row


def _parts(trajectory: Trajectory, *, ids: bool) -> tuple[list[TrajectoryStep], list[TrajectoryStep]] | None:
    """The steps up to the user's words, and those after them; None where nothing can be compared."""
    users = [number for number, step in enumerate(trajectory.steps) if step.role == "user"]
    if len(users) != 1 or (ids and len(trajectory.segments) > 1):
        return None
    prompt, rest = trajectory.steps[: users[0] + 1], trajectory.steps[users[0] + 1 :]
    if not any(step.role == "assistant" for step in rest) or any(step.role == "assistant" for step in prompt):
        return None
    return prompt, rest


def _pairs(group: list[_Rollout], counts: PairCounts) -> Iterator[tuple[_Rollout, _Rollout]]:
    ranked = sorted(group, key=lambda rollout: (-rollout.reward, rollout.name))
    first, last = 0, len(ranked) - 1
    used = 0
    while first < last and ranked[first].reward > ranked[last].reward:
        if ranked[first].said != ranked[last].said:  # the same words with two rewards teach nothing
            yield ranked[first], ranked[last]
            used += 2
        first, last = first + 1, last - 1
    counts.single += len(ranked) - used


def _row(source: Source, better: _Rollout, worse: _Rollout, *, ids: bool) -> Row:
    """Raises InputError if a file that was read a moment ago cannot be read again."""
    chosen, rejected = (read_trajectory(source.folder / rollout.name) for rollout in (better, worse))
    parts = [_parts(trajectory, ids=ids) for trajectory in (chosen, rejected)]
    assert parts[0] is not None
    assert parts[1] is not None
    (prompt, said), (_, other) = parts[0], parts[1]
    row: Row
    if ids:
        length = sum(len(step.ids) for step in prompt)
        row = {"prompt_ids": [token for step in prompt for token in step.ids]}
        for name, trajectory in (("chosen", chosen), ("rejected", rejected)):
            whole, mask = masked_ids(next(trajectory.stretches()))
            row |= {f"{name}_ids": whole[length:], f"{name}_loss_mask": mask[length:]}
    else:
        row = {
            "prompt": [message(step) for step in prompt],
            "chosen": [message(step) for step in said],
            "rejected": [message(step) for step in other],
        }
    return row | {
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
        "chosen_atraj": better.name,
        "rejected_atraj": worse.name,
        "task": chosen.task,
    }
