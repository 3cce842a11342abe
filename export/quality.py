"""What a precision costs on a text: perplexity of a graph, and how often its best id is the float32 graph's.

The text is cut into windows of the context (at most WINDOW ids), each fed from an empty cache in small chunks, so
that logits of a chunk are all that is held. Each id but a window's first is predicted once. Perplexity is per
token, so it compares models with the same tokenizer only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ..runtime.bundle import TOKENIZER, KVLayout
from ..runtime.errors import UsageError
from .parity import Case, run_case

WINDOW = 2048
_CHUNK = 256
_MAX_NBYTES = 64 << 20
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """`predicted` ids in windows of `window`: perplexity a token, the same in float32, share of equal best ids."""

    text: str
    predicted: int
    window: int
    perplexity: float
    perplexity_fp32: float
    agreement: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def text_windows(file: Path, tokenizer: Mapping[str, bytes], kind: str, context_length: int) -> list[Ids]:
    """The ids of text `file`, cut. Each window starts with what the tokenizer puts before a text, if anything.

    `tokenizer` holds the files of a bundle, `kind` is that of its manifest. Raises UsageError.
    """
    subject = f"--quality {file}"
    try:
        nbytes = file.stat().st_size
        if not file.is_file() or nbytes > _MAX_NBYTES:
            raise UsageError(
                subject, f"{nbytes} bytes, or not a file", f"a text of at most {_MAX_NBYTES} bytes"
            )
        text = file.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(subject, f"cannot be read ({error})", "a UTF-8 text file") from None
    if kind == "missing":
        raise UsageError(subject, "this model's tokenizer is missing", remedy="name it with --tokenizer DIR")
    first, ids = _encoded(text, tokenizer, kind)
    size = min(context_length, WINDOW) - len(first)
    windows = [np.array(first + ids[at : at + size], np.int64) for at in range(0, len(ids), max(size, 1))]
    windows = [window for window in windows if len(window) > 1]
    if size < 2 or not windows:
        raise UsageError(subject, f"{len(ids)} ids to predict in", "at least two, within the context")
    return windows


def _encoded(text: str, tokenizer: Mapping[str, bytes], kind: str) -> tuple[list[int], list[int]]:
    """What stands before every text, and the ids of `text`."""
    if kind == "bytes":
        return [], list(text.encode())
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(tokenizer[TOKENIZER].decode("utf-8"))
    mark = found.encode("a", add_special_tokens=False).ids
    marked = found.encode("a", add_special_tokens=True).ids
    before = next((i for i in range(len(marked)) if marked[i : i + len(mark)] == mark), 0)
    return list(marked[:before]), list(found.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Run:
    """One graph's answer to the windows: mean negative log likelihood in nats, and its best ids."""

    loss: float
    best: NDArray[np.int32]


def run_windows(
    graph: Path, kv: KVLayout, vocab_size: int, windows: list[Ids], tell: Callable[[int], None]
) -> Run:
    """`graph` over `windows`; `tell(n)` is called after each of them with how many ids are done."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    total, best, done = 0.0, [], 0
    for ids in windows:
        for rows, logits in _chunks(session, kv, vocab_size, ids):
            following = ids[rows.start + 1 : rows.stop + 1]
            logits = logits[: len(following)]
            if len(following):
                total += float(_losses(logits, following).sum())
                best.append(logits.argmax(axis=1).astype(np.int32))
        done += len(ids)
        tell(done)
    answers = np.concatenate(best)
    return Run(total / len(answers), answers)


def compare(text: Path, windows: list[Ids], found: Run, exact: Run) -> Quality:
    """The figures of a graph that answered `found`, where the float32 one answered `exact`."""
    return Quality(
        text=text.name,
        predicted=len(found.best),
        window=max(len(window) for window in windows),
        perplexity=float(np.exp(found.loss)),
        perplexity_fp32=float(np.exp(exact.loss)),
        agreement=float((found.best == exact.best).mean()),
    )


def _chunks(
    session: ort.InferenceSession, kv: KVLayout, vocab_size: int, ids: Ids
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    sizes = [min(_CHUNK, len(ids) - at) for at in range(0, len(ids), _CHUNK)]
    return run_case(session, kv, vocab_size, ids, Case("text", tuple(sizes), 0, len(ids)))


def _losses(logits: NDArray[np.float32], following: Ids) -> NDArray[np.float64]:
    """Negative log likelihood of each id, in nats; `logits` [n, vocab]."""
    highest = logits.max(axis=1)
    spread = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)
    losses: NDArray[np.float64] = np.log(spread) + highest - logits[np.arange(len(following)), following]
    return losses
