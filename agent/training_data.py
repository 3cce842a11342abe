"""Folders of trajectories to training rows. Text is the recorded text, ids are the recorded ids: nothing is encoded.

Files are read one at a time; what is remembered of each is a hash, a signature or a reward. A file that cannot be
read is reported and passed over. The order is that of the files' names, so the same folder gives the same rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..runtime.errors import InputError
from .minhash import NearDuplicates
from .trajectory import SUFFIX, Stretch, Trajectory, TrajectoryStep, read_trajectory

Row = dict[str, Any]


@dataclass
class Counts:
    """What became of the files and of what they hold."""

    files: int = 0
    damaged: int = 0
    other_task: int = 0
    harvested: int = 0
    echoes: int = 0
    exact: int = 0
    near: int = 0
    emitted: int = 0


@dataclass
class Source:
    """The trajectories in a folder and below it. `report` is told of each file that cannot be read."""

    folder: Path
    task: str | None = None
    report: Callable[[InputError], None] = lambda error: None
    counts: Counts = field(default_factory=Counts)

    def __iter__(self) -> Iterator[tuple[str, Trajectory]]:
        """Each trajectory of the task, with its file's name relative to the folder. Raises InputError: no file."""
        self.counts.files = self.counts.damaged = self.counts.other_task = 0
        for path in self._paths():
            self.counts.files += 1
            try:
                trajectory = read_trajectory(path)
            except InputError as error:
                self.counts.damaged += 1
                self.report(error)
                continue
            if self.task is not None and trajectory.task != self.task:
                self.counts.other_task += 1
                continue
            yield path.relative_to(self.folder).as_posix(), trajectory
        if not self.counts.files:
            raise InputError(self.folder, f"no {SUFFIX} file", "a folder that --trajectory-dir named")
        if self.counts.damaged == self.counts.files:
            raise InputError(self.folder, f"none of its {self.counts.files} {SUFFIX} files can be read")

    def _paths(self) -> Iterator[Path]:
        if not self.folder.is_dir():
            raise InputError(self.folder, "no such folder", "a folder of trajectories")
        for folder, folders, names in os.walk(self.folder, onerror=_raise):
            folders.sort()
            for name in sorted(names):
                if name.endswith(SUFFIX) and not name.startswith("."):
                    yield Path(folder, name)


def _raise(error: OSError) -> None:
    raise error


class Deduplicator:
    """Drops what was there before: exactly, then by the prompt. The first stays."""

    def __init__(self, threshold: float, counts: Counts) -> None:
        self._counts = counts
        self._seen: set[bytes] = set()
        self._near = NearDuplicates(threshold)

    def keep(self, prompt: str, whole: object, rows: int = 1) -> bool:
        """Whether `whole`, which answers `prompt` and makes so many rows, is new."""
        key = digest(whole)
        if key in self._seen:
            self._counts.exact += rows
            return False
        self._seen.add(key)
        if self._near.seen(prompt):
            self._counts.near += rows
            return False
        return True


def digest(value: object) -> bytes:
    """16 bytes that equal values share."""
    return blake2b(json.dumps(value).encode(), digest_size=16).digest()


def message_rows(source: Source, *, threshold: float, drop_echoes: bool) -> Iterator[Row]:
    """A row for each user turn and the last thing that the assistant said before the next."""
    counts = source.counts
    unique = Deduplicator(threshold, counts)
    for name, trajectory in source:
        for prompt, response in exchanges(trajectory.steps):
            if drop_echoes and is_tool_echo(response):
                counts.echoes += 1
                continue
            counts.harvested += 1
            if not unique.keep(prompt.content, [prompt.content, response.content]):
                continue
            counts.emitted += 1
            yield {
                "messages": [message(prompt), message(response)],
                "source_atraj": name,
                "task": trajectory.task,
            }


def id_rows(source: Source, *, threshold: float) -> Iterator[Row]:
    """A row for each segment of each conversation: the ids that the model saw, and which of them it said."""
    counts = source.counts
    unique = Deduplicator(threshold, counts)
    for name, trajectory in source:
        if not any(step.output_ids for step in trajectory.steps):
            continue
        stretches = list(trajectory.stretches())
        counts.harvested += len(stretches)
        prompt = "\n".join(step.content for step in trajectory.steps if step.role == "user")
        whole = [[step.content for step in trajectory.steps], [stretch.ids for stretch in stretches]]
        if not unique.keep(prompt, whole, len(stretches)):
            continue
        for number, stretch in enumerate(stretches):
            counts.emitted += 1
            ids, mask = masked_ids(stretch)
            yield {
                "input_ids": ids,
                "loss_mask": mask,
                "segment": number,
                "reward": trajectory.reward,
                "source_atraj": name,
                "task": trajectory.task,
            }


def exchanges(steps: Iterable[TrajectoryStep]) -> Iterator[tuple[TrajectoryStep, TrajectoryStep]]:
    """Each user step that was answered, and the last assistant step before the next user step."""
    prompt: TrajectoryStep | None = None
    response: TrajectoryStep | None = None
    for step in steps:
        if step.role == "user":
            if prompt is not None and response is not None:
                yield prompt, response
            prompt, response = step, None
        elif step.role == "assistant":
            response = step
    if prompt is not None and response is not None:
        yield prompt, response


def is_tool_echo(step: TrajectoryStep) -> bool:
    """Whether a response is a tool call and nothing else: no prose stands before it."""
    text = step.content.strip()
    if step.tool_call is not None:
        return not text or text[0] in "{[<"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get("tool"), str) and "answer" not in value


def masked_ids(stretch: Stretch) -> tuple[list[int], list[int]]:
    """The ids of a segment, and 1 for each that the model said in it, an end of turn that followed included.

    What was kept of the segment before is context (0): its own row trains it.
    """
    ids = list(stretch.kept)
    mask = [0] * len(ids)
    ends: list[tuple[int, list[int]]] = []
    for step in stretch.steps:
        said = [1] * len(step.output_ids)
        rest = [0] * len(step.input_ids)
        mask += said + rest if step.role == "assistant" else rest + said
        if step.role == "assistant" and step.stop == "stop":
            ends.append((len(ids) + len(said), step.end_of_turn_ids))
        ids += step.ids
    for start, marker in ends:
        if ids[start : start + len(marker)] == marker:
            mask[start : start + len(marker)] = [1] * len(marker)
    return ids, mask


def message(step: TrajectoryStep) -> dict[str, str]:
    """A step as a chat message."""
    return {"role": step.role, "content": step.content}


def to_line(row: Row) -> bytes:
    """A row as one line of UTF-8."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"
