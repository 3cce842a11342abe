"""The exported graph against the NumPy reference, before a bundle is declared good.

The graph runs as the runtime runs it: one buffer per layer bound as past and as present, filled with
NaN beyond the valid length; or, where keys and values grow, from the masked padding position on. One sequence starts at position 0, a second one ends at the last row of the
position table; both are cut into chunks in several ways.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from ..runtime.bundle import KVLayout
from ..runtime.errors import CheckFailedError, PosttrainError
from ..runtime.threads import usable_threads
from . import reference
from .architectures import ModelConfig
from .checkpoint import Checkpoint
from .quantised import Dequantised

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-3}
# What activations in int8 may move the logits by, root mean square, before a kernel, not rounding, must be at fault.
# Measured: 0.001 to 0.02. The largest difference says little: a single outlier in random ids reached 0.4.
ROUNDING_TOLERANCE = 0.1
# Ids whose logits float32 itself leaves open by more than this part of the tolerance tell nothing about a graph,
# and no more than one in so many may be of that kind.
_STEADY = 0.1
_UNSTEADY_ONE_IN = 8
MIN_IDS, MAX_IDS = 24, 128
_SPARE = 24
_SINGLE_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A way to feed the ids: sizes of the chunks, first position, and the capacity of the buffers."""

    name: str
    chunks: tuple[int, ...]
    first_position: int
    capacity: int


@dataclass(frozen=True)
class ParityReport:
    """Figures of one check. `cases` holds max |Δ logit| relative to the range of the logits.

    `unsteady` ids are not in them: a model with outliers can amplify rounding so far that float32 arithmetic cannot hold
    the tolerance, whoever does it. They are those for which the reference in float32 is not the one in float64.

    For fp16 they are root mean squares instead: where a model has outliers, arithmetic in 11 bits moves single logits by more.
    A quantised graph is checked with float32 activations, which shows that the weights are right;
    `activation_rounding` is how far the graph as it is written, with int8 activations, is from the same reference:
    the root mean square, in the same unit.
    """

    tolerance: float
    worst: float
    logit_range: float
    ids: int
    seed: int
    cases: dict[str, float]
    activation_rounding: float | None = None
    unsteady: int = 0

    @property
    def exact(self) -> bool:
        """Whether the weights and the arithmetic are right, up to float rounding."""
        return self.worst <= self.tolerance

    @property
    def passed(self) -> bool:
        rounding = self.activation_rounding
        return self.exact and (rounding is None or rounding <= ROUNDING_TOLERANCE)

    def to_json(self) -> dict[str, object]:
        quantised = self.activation_rounding is not None
        weights = "dequantised weights; the graph with float32 activations" if quantised else "source weights"
        record: dict[str, object] = {"reference": f"numpy float32 forward of the {weights}"}
        record |= asdict(self)
        if not quantised:
            del record["activation_rounding"]
        return record


def measure(
    checkpoint: Checkpoint | Dequantised,
    graph: Path,
    kv: KVLayout,
    *,
    precision: str = "fp32",
    shipped: Path | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ParityReport:
    """How far the graph is from the reference; the caller decides. Reads all weights once.

    `shipped` is the same graph with its activations rounded, where there is one.

    Raises CheckFailedError when the reference overflows or ONNX Runtime cannot run the graph.
    """
    config = checkpoint.config
    n = ids_checked(config, checkpoint.weight_nbytes)
    cases = parity_cases(n, config.context_length)
    if config.positions != "learned":  # positions are counted by the graph
        cases = [case for case in cases if case.first_position == 0]
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, n)
    tell = progress or (lambda done, total: None)
    tell(0, len(cases))
    expected = _expected(checkpoint, ids, sorted({case.first_position for case in cases}))
    spread = _spread(list(expected.values()), config.vocab_size)
    errors = {}
    with _runnable(checkpoint.path):
        session = _session(graph)
        for done, case in enumerate(cases, start=1):
            chunks = run_case(session, kv, config.vocab_size, ids, case)
            errors[case.name] = _errors(chunks, expected[case.first_position], squared=precision == "fp16")
            tell(done, len(cases))
        rounding = None
        if shipped is not None:
            session = _session(shipped, prepacked=True)
            chunks = run_case(session, kv, config.vocab_size, ids, cases[1])
            squares = _errors(chunks, expected[0], squared=True)
            rounding = _relative(_root(squares.mean()), spread)
    tolerance, unsteady = TOLERANCE[precision], 0
    if precision == "fp16":
        figures = {name: _relative(_root(rows.mean()), spread) for name, rows in errors.items()}
    else:
        figures = {name: _relative(float(rows.max()), spread) for name, rows in errors.items()}
        if not max(figures.values(), key=_nan_last) <= tolerance:
            steady = _steady(checkpoint, ids, expected, _STEADY * tolerance * spread)
            if np.count_nonzero(~steady) * _UNSTEADY_ONE_IN <= n:
                unsteady = int(np.count_nonzero(~steady))
                figures = {
                    name: _relative(float(rows[steady].max()), spread) for name, rows in errors.items()
                }
    worst = max(figures.values(), key=_nan_last)
    return ParityReport(tolerance, worst, spread, n, seed, figures, rounding, unsteady)


def _steady(
    checkpoint: Checkpoint | Dequantised,
    ids: NDArray[np.int64],
    expected: dict[int, reference.Array],
    limit: float,
) -> NDArray[np.bool_]:
    """[n]: the ids for which `expected` is within `limit` of the reference in float64."""
    steady = np.ones(len(ids), np.bool_)
    for start, rows in expected.items():
        exact = reference.logits(checkpoint, ids[None], start + np.arange(len(ids))[None], np.float64)[0]
        steady &= np.abs(exact - rows).max(axis=1) <= limit
    return steady


def ids_checked(config: ModelConfig, weight_nbytes: int) -> int:
    """How many ids are fed: MAX_IDS, or fewer where their logits would outweigh the weights themselves."""
    logits_nbytes = 4 * config.vocab_size * 4  # four arrays of them are held at once
    affordable = max(MIN_IDS, weight_nbytes // 2 // logits_nbytes)
    return min(config.context_length, MAX_IDS, affordable)


def parity_cases(n: int, context_length: int) -> list[Case]:
    """The splits of `n` ids that are checked: from one chunk to single steps, up to full buffers."""
    single = min(n // 2, _SINGLE_STEPS)
    spare = n + _SPARE
    return [
        Case("one chunk", (n,), 0, spare),
        Case(
            "single steps, a chunk, single steps",
            _clean([*[1] * single, n - 2 * single, *[1] * single]),
            0,
            spare,
        ),
        Case("uneven chunks", _uneven(n), 0, spare),
        Case("buffers filled to the last slot", _clean([n // 2, n - n // 2 - 1, 1]), 0, n),
        Case("end of the position table", _clean([n - 1, 1]), context_length - n, n),
    ]


def _uneven(n: int) -> tuple[int, ...]:
    chunks: list[int] = []
    for size in itertools.chain((1, 7, 2, 19, 3), itertools.repeat(50)):
        left = n - sum(chunks)
        if not left:
            return tuple(chunks)
        chunks.append(min(size, left))
    raise AssertionError("the cycle ended")


def _clean(chunks: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in chunks if size)


def _expected(
    checkpoint: Checkpoint | Dequantised, ids: NDArray[np.int64], starts: Sequence[int]
) -> dict[int, reference.Array]:
    """The reference's logits [n, vocab] of `ids` for each first position."""
    positions = np.array([np.arange(start, start + len(ids)) for start in starts], np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = reference.logits(checkpoint, np.broadcast_to(ids, positions.shape), positions)
    if not np.isfinite(truth).all():
        remedy = "these weights cannot be run in float32"
        raise CheckFailedError(checkpoint.path, "its own logits overflow", "finite logits", remedy)
    return dict(zip(starts, truth, strict=True))


def _spread(truth: Sequence[reference.Array], vocab_size: int) -> float:
    """Range of the logits. One id alone has none; its logits are then held to their own size."""
    low, high = min(float(rows.min()) for rows in truth), max(float(rows.max()) for rows in truth)
    return high - low if vocab_size > 1 else max(abs(low), abs(high))


@contextmanager
def _runnable(source: Path) -> Iterator[None]:
    """ONNX Runtime's own exceptions, which share no base class, as a failed check."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:
        found = f"ONNX Runtime {ort.__version__} cannot run the exported graph ({error})"
        raise CheckFailedError(source, found, remedy="no bundle was written") from error


def _relative(distance: float, spread: float) -> float:
    """`distance` over the range of the logits; without a range only equality is good."""
    if spread > 0:
        return distance / spread
    return 0.0 if distance == 0 else float("inf")


Chunks = Iterable[tuple[slice, NDArray[np.float32]]]


def _errors(chunks: Chunks, wanted: reference.Array, *, squared: bool) -> NDArray[np.float64]:
    """For each row the largest |found - wanted| of its logits, or the mean of the squares. Chunks are written over."""
    errors = np.empty(len(wanted))
    for rows, found in chunks:
        found -= wanted[rows]
        errors[rows] = np.square(found).mean(axis=1) if squared else np.abs(found, out=found).max(axis=1)
    return errors


def _root(square: np.floating[Any]) -> float:
    return math.sqrt(float(square))


def _nan_last(figure: float) -> float:
    return math.inf if math.isnan(figure) else figure


def _session(graph: Path, *, prepacked: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it has to say comes as an exception too
    options.intra_op_num_threads = usable_threads()
    # Threads that wait in a loop take time from whatever else the machine does, and from NumPy's.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not prepacked:  # packed copies of the weights would double the memory of the check
        options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run_case(
    session: ort.InferenceSession, kv: KVLayout, vocab_size: int, ids: NDArray[np.int64], case: Case
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Logits [rows, vocab] of the graph, fed chunk by chunk, and which rows they are."""
    if kv.style == "growing":
        yield from _run_growing(session, kv, ids, case)
        return
    inputs = {entry.name for entry in session.get_inputs()}
    shape = (1, kv.heads, case.capacity, kv.head_dim)
    buffers = {
        f"{layer}.{part}": ort.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, kv.dtype))
        for layer in range(kv.layers)
        for part in ("key", "value")
    }
    length = 0
    for size in case.chunks:
        rows = slice(length, length + size)
        first = case.first_position + length
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", ids[None, rows])
        binding.bind_cpu_input("attention_mask", np.ones((1, length + size), np.int64))
        if "position_ids" in inputs:
            binding.bind_cpu_input("position_ids", np.arange(first, first + size, dtype=np.int64)[None])
        for name, buffer in buffers.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", buffer)
            binding.bind_ortvalue_output(f"present.{name}", buffer)
        logits = ort.OrtValue.ortvalue_from_shape_and_type((1, size, vocab_size), np.float32)
        binding.bind_ortvalue_output("logits", logits)
        session.run_with_iobinding(binding)
        yield rows, logits.numpy()[0]
        length += size


def _run_growing(
    session: ort.InferenceSession, kv: KVLayout, ids: NDArray[np.int64], case: Case
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """As `run_case`, where the present of one run is the past of the next."""
    names = [f"{layer}.{part}" for layer in range(kv.layers) for part in ("key", "value")]
    known = {entry.name for entry in session.get_inputs()}
    padding = np.zeros((1, kv.heads, kv.padding, kv.head_dim), np.float32)
    held = dict.fromkeys(names, padding)
    length = 0
    for size in case.chunks:
        rows = slice(length, length + size)
        first = case.first_position + length
        mask = np.ones((1, kv.padding + length + size), np.int64)
        mask[:, : kv.padding] = 0
        feeds: dict[str, NDArray[np.generic]] = {
            "input_ids": ids[None, rows],
            "attention_mask": mask,
            "position_ids": np.arange(first, first + size, dtype=np.int64)[None],
        }
        feeds |= {f"past_key_values.{name}": value for name, value in held.items()}
        feeds = {name: value for name, value in feeds.items() if name in known}
        logits, *grown = session.run(["logits", *(f"present.{name}" for name in names)], feeds)
        held = dict(zip(names, grown, strict=True))
        yield rows, logits[0]
        length += size
