"""`posttrainllm traces-to-data`: recorded conversations in, training JSONL out, with counts of what was dropped."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import InputError, UsageError
from .options import option, parse, positional

if TYPE_CHECKING:
    from ..agent.preference_pairs import PairCounts
    from ..agent.training_data import Row, Source

EXAMPLE = """  posttrainllm traces-to-data runs --out train.jsonl
  posttrainllm traces-to-data runs --out pairs.jsonl --mode dpo --format ids"""
MODES, FORMATS = ("sft", "dpo"), ("messages", "ids")
THRESHOLD = 0.85


@dataclass(frozen=True, kw_only=True)
class TracesOptions:
    """Flags of `traces-to-data`."""

    folder: str = positional("folder", "a folder of .atraj files; those below it count too")
    out: Optional[str] = option(None, "the JSONL file to write", metavar="FILE")
    mode: str = option(
        "sft", "sft (default): replies; dpo: pairs of a better and a worse one", metavar="NAME"
    )
    format: str = option("messages", "messages (default), or ids with a loss mask", metavar="NAME")
    task: Optional[str] = option(None, "only trajectories with this label", metavar="TEXT")
    no_tool_echo_drop: bool = option(False, "keep responses that are only a tool call")
    minhash_threshold: Optional[float] = option(
        None, f"drop prompts that are this similar to an earlier one (default {THRESHOLD})", metavar="F"
    )
    dry_run: bool = option(False, "count, and write nothing")


def run(argv: list[str]) -> int:
    """Returns 0, also where damaged files were passed over (each is named on stderr)."""
    options = parse(
        TracesOptions,
        argv,
        command="traces-to-data",
        summary="Turn recorded conversations into training data, without encoding anything again.",
        example=EXAMPLE,
    )
    _check(options)
    from ..agent.preference_pairs import PairCounts, pair_rows
    from ..agent.training_data import Source, id_rows, message_rows

    source = Source(Path(options.folder), options.task, _tell)
    ids = options.format == "ids"
    threshold = THRESHOLD if options.minhash_threshold is None else options.minhash_threshold
    pairs = PairCounts() if options.mode == "dpo" else None
    if pairs is not None:
        rows = pair_rows(source, pairs, ids=ids)
    elif ids:
        rows = id_rows(source, threshold=threshold)
    else:
        rows = message_rows(source, threshold=threshold, drop_echoes=not options.no_tool_echo_drop)
    _write(rows, None if options.dry_run else options.out)
    print("\n".join(_summary(source, pairs)))
    _notes(source)
    return 0


def _check(options: TracesOptions) -> None:
    for flag, value, known in (("--mode", options.mode, MODES), ("--format", options.format, FORMATS)):
        if value not in known:
            raise UsageError(f"{flag} {value}", "unknown", " or ".join(known))
    if options.out is None and not options.dry_run:
        raise UsageError("--out", "missing", "the file to write", "or --dry-run")
    if options.out is not None and Path(options.out).is_dir():
        raise UsageError(f"--out {options.out}", "a folder", "the file to write")
    threshold = options.minhash_threshold
    if threshold is not None and not 0 < threshold <= 1:
        raise UsageError("--minhash-threshold", f"{threshold}", "more than 0, at most 1")
    if options.mode == "dpo" and threshold is not None:
        raise UsageError("--minhash-threshold", "given with --mode dpo", "--mode sft")
    if options.no_tool_echo_drop and (options.mode == "dpo" or options.format == "ids"):
        found = "given where tool calls are kept anyway"
        raise UsageError("--no-tool-echo-drop", found, "--mode sft --format messages")


def _write(rows: "Iterator[Row]", out: Optional[str]) -> None:
    """Write the rows as they come; the file is there when all are, or not at all."""
    if out is None:
        for _ in rows:
            pass
        return
    from ..agent.training_data import to_line
    from ..runtime.files import replacing

    try:
        with replacing(Path(out)) as file:
            for row in rows:
                file.write(to_line(row))
    except OSError as error:
        raise InputError(f"--out {out}", f"cannot be written ({error.strerror or error})") from None


def _summary(source: "Source", pairs: "Optional[PairCounts]") -> list[str]:
    if pairs is not None:
        return [
            f"rollouts read: {pairs.rollouts}",
            f"without a reward, or not of one user turn: {pairs.unfit}",
            f"without a counterpart: {pairs.single}",
            f"emitted: {pairs.emitted}",
        ]
    counts = source.counts
    return [
        f"raw (user->assistant) samples harvested: {counts.harvested}",
        f"exact-duplicates dropped: {counts.exact}",
        f"minhash near-duplicates dropped: {counts.near}",
        f"emitted: {counts.emitted}",
    ]


def _notes(source: "Source") -> None:
    """On stderr, what the summary has no line for."""
    counts = source.counts
    for number, words in (
        (counts.echoes, "responses that are only a tool call dropped"),
        (counts.other_task, "files of another task passed over"),
        (counts.damaged, f"of {counts.files} files cannot be read and were passed over"),
    ):
        if number:
            print(f"traces-to-data: {number} {words}", file=sys.stderr)


def _tell(error: InputError) -> None:
    print(f"traces-to-data: passed over: {error}", file=sys.stderr)
