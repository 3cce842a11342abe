"""The pipeline: checkpoint, graph, weights on disk, parity check, sealed bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.bundle import (
    GRAPH,
    WEIGHTS,
    KVLayout,
    Manifest,
    SourceInfo,
    read_manifest,
    refuse_existing,
    seal,
    staged_bundle,
)
from ..runtime.errors import CheckFailedError, MissingExtraError, UnknownArchitectureError, UsageError
from . import genai_config
from .checkpoint import Checkpoint, open_checkpoint
from .precision import Recipe, block_source, default_precision, parse_precision
from .quantised import Dequantised
from .tokenizer_files import ResolvedTokenizer
from .tokenizer_source import resolve_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

    from .parity import ParityReport

FLAVOUR = "fused"
GRAPHS = (FLAVOUR, "standard")  # the flavours that --graph chooses from
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportReport:
    """What an export left behind: the bundle, its manifest, sentences of warning, file sizes."""

    bundle: Path
    manifest: Manifest
    warnings: tuple[str, ...]
    sizes: dict[str, int]


def export(
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    precision: str | None = None,
    quality: Path | None = None,
    context: int | None = None,
    flavour: str = FLAVOUR,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Convert the checkpoint `source` into the bundle folder `out`, or leave nothing behind.

    `context` is the longest text that the bundle is for, instead of the model's own. `precision` is what
    --precision takes (precision.py); None chooses by the source. With a text file in `quality` the manifest's parity
    record tells what the precision costs on it. `flavour` is "fused" (ONNX Runtime's own operators, keys and values
    appended in place) or "standard" (ai.onnx operators only, fp32). Weights are streamed.
    `progress(stage, done, total)` is called along the way. Raises UsageError for `out`, `flavour` and `precision`,
    CheckpointError, TokenizerError, and CheckFailedError when parity does not hold. An architecture that is not known
    here goes through optimum (`optimum_source.py`).
    """
    _require_onnx()
    asked = _asked_precision(precision, flavour)
    refuse_existing(out, force=force)
    if out.exists() and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(out, "holds the checkpoint that is exported", "another folder for --out")
    try:
        opened = open_checkpoint(source, context=context)
    except UnknownArchitectureError as unknown:
        from .optimum_source import export_with_optimum

        given = {"--precision": precision not in (None, "fp32"), "--graph": flavour != FLAVOUR}
        given |= {"--tokenizer": tokenizer is not None, "--quality": quality is not None}
        given |= {"--context": context is not None}
        refused = [flag for flag, wanted in given.items() if wanted]
        manifest = export_with_optimum(
            source, out, unknown, refused, force=force, progress=progress or _silent
        )
        sizes = {name: info.nbytes for name, info in manifest.files.items()}
        return ExportReport(out, manifest, (), sizes)
    with opened as checkpoint:
        recipe = asked or parse_precision(default_precision(checkpoint))
        words = resolve_tokenizer(checkpoint, tokenizer)
        windows = None
        if quality is not None:
            from .quality import text_windows

            length = checkpoint.config.context_length
            windows = text_windows(quality, words.files, words.info.kind, length)
        job = _Job(checkpoint, recipe, flavour, words, progress or _silent, quality, windows)
        try:
            with staged_bundle(out, force=force) as staging:
                manifest = _fill(staging, job)
                sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        except OSError as error:
            raise UsageError(out, f"cannot be written ({error.strerror or 'the disk is full'})") from error
        return ExportReport(out, manifest, checkpoint.warnings + words.warnings, sizes)


def _silent(stage: str, done: int, total: int) -> None:
    """The progress of an export that nobody watches."""


def _require_onnx() -> None:
    try:
        import onnx_ir  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "export",
            "the package onnx-ir is not installed",
            remedy="pip install 'posttrainllm-onnx[export]' (in a checkout: pip install '.[export]')",
        ) from None


def _asked_precision(precision: str | None, flavour: str) -> Recipe | None:
    """What --precision and --graph say together; None leaves the choice to the source."""
    if flavour not in GRAPHS:
        raise UsageError("--graph", repr(flavour), " or ".join(GRAPHS))
    if flavour == "standard" and precision is None:
        return parse_precision("fp32")
    asked = parse_precision(precision) if precision is not None else None
    if flavour == "standard" and asked is not None and asked.precision != "fp32":
        raise UsageError("--precision", f"{precision!r} with --graph standard", "fp32, or --graph fused")
    return asked


@dataclass(frozen=True)
class _Job:
    """What one export has been asked for."""

    checkpoint: Checkpoint
    recipe: Recipe
    flavour: str
    words: ResolvedTokenizer
    progress: Progress
    text: Path | None
    windows: list[NDArray[np.int64]] | None


def _fill(staging: Path, job: _Job) -> Manifest:
    from . import decoder
    from .attention import padded_head_dim
    from .half import to_half

    checkpoint, recipe, words, progress = job.checkpoint, job.recipe, job.words, job.progress
    config = checkpoint.config
    standard = job.flavour == "standard"
    model = decoder.build_decoder(checkpoint, block_source(recipe, checkpoint), chooses_rows=not standard)
    half = recipe.precision == "fp16"
    kv = KVLayout(config.layers, config.kv_heads, padded_head_dim(config), "float16" if half else "float32")
    if half:
        to_half(model, checkpoint.path)
    if standard:
        from .standard import to_standard

        to_standard(model)
        kv = replace(kv, style="growing", padding=1)
    _save(model, staging, progress)
    report = _check(staging, checkpoint, recipe, kv, progress)
    if not report.passed:
        raise _parity_failed(checkpoint, report)
    parity = report.to_json()
    if job.windows is not None:
        parity["quality"] = _quality(staging, job, kv)
    progress("hashing files", 0, 1)
    manifest = Manifest(
        architecture=config.architecture,
        flavour=job.flavour,
        precision=recipe.precision,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        kv=kv,
        tokenizer=words.info,
        end_of_turn_ids=words.end_of_turn_ids,
        dialect=words.dialect,
        source=SourceInfo(checkpoint.path.name, checkpoint.format, checkpoint.sha256()),
        config=asdict(config) | {"recipe": recipe.text, "tensors": _tensors(model)},
        parity=parity,
        stop_ids=list(words.stop_ids),
    )
    for name, content in words.files.items():
        (staging / name).write_bytes(content)
    (staging / genai_config.FILE).write_text(genai_config.to_text(manifest), encoding="utf-8", newline="\n")
    seal(staging, manifest)
    progress("hashing files", 1, 1)
    return read_manifest(staging)


def _check(
    staging: Path, checkpoint: Checkpoint, recipe: Recipe, kv: KVLayout, progress: Progress
) -> ParityReport:
    from . import parity

    def tell(done: int, total: int) -> None:
        progress("checking parity", done, total)

    graph = staging / GRAPH
    blocks = block_source(recipe, checkpoint, independent=True)
    if blocks is None:
        return parity.measure(checkpoint, graph, kv, precision=recipe.precision, progress=tell)
    exact = staging / "float-activations.onnx"
    try:
        _with_float_activations(graph, exact)
        return parity.measure(Dequantised(checkpoint, blocks), exact, kv, shipped=graph, progress=tell)
    finally:
        exact.unlink(missing_ok=True)


def _quality(staging: Path, job: _Job, kv: KVLayout) -> dict[str, object]:
    """Figures of the graph in `staging` on the text of `job`, beside those of a float32 graph made for it."""
    from . import decoder
    from .quality import compare, run_windows

    assert job.text is not None
    assert job.windows is not None
    config = job.checkpoint.config
    total = 2 * sum(len(window) for window in job.windows)

    def tell(done: int) -> None:
        job.progress("measuring quality", done, total)

    found = run_windows(staging / GRAPH, kv, config.vocab_size, job.windows, tell)
    if job.recipe.precision == "fp32" and not job.recipe.quantises:
        return compare(job.text, job.windows, found, found).to_json()
    plain = KVLayout(kv.layers, kv.heads, kv.head_dim, "float32")
    with tempfile.TemporaryDirectory(prefix="fp32.", dir=staging) as folder:
        _save(decoder.build_decoder(job.checkpoint), Path(folder), job.progress)
        exact = run_windows(
            Path(folder) / GRAPH, plain, config.vocab_size, job.windows, lambda done: tell(total // 2 + done)
        )
    return compare(job.text, job.windows, found, exact).to_json()


def _with_float_activations(graph: Path, out: Path) -> None:
    """`graph` over the same weights file, but with products of float32 activations."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(model, str(out))


def _save(model: ir.Model, staging: Path, progress: Progress) -> None:
    import onnx_ir as ir

    from .graph import INLINE_NBYTES

    def report(_: object, info: ir.external_data.CallbackInfo) -> None:
        progress("writing weights", info.index + 1, info.total)

    ir.save(
        model, staging / GRAPH, external_data=WEIGHTS, size_threshold_bytes=INLINE_NBYTES, callback=report
    )


def _tensors(model: ir.Model) -> dict[str, str]:
    """Name to type and shape, `float32[96, 32]`, of the weights as the graph stores them."""
    import onnx_ir as ir

    from .graph import HALF

    tensors = [value.const_value for value in model.graph.initializers.values()]
    return {
        str(tensor.name).removesuffix(HALF): f"{tensor.dtype.numpy().name}{list(tensor.shape.numpy())}"
        for tensor in tensors
        if tensor is not None
        and tensor.dtype != ir.DataType.INT64  # axes and sizes of the graph itself,
        and len(tensor.shape) > 0  # and its numbers
    }


def _parity_failed(checkpoint: Checkpoint, report: ParityReport) -> CheckFailedError:
    from .parity import ROUNDING_TOLERANCE

    if report.exact:
        return CheckFailedError(
            checkpoint.path,
            f"rounded activations move the logits by {report.activation_rounding:.2g} of their range",
            f"at most {ROUNDING_TOLERANCE:g}",
            "no bundle was written; fp32 has none",
        )
    case = max(report.cases, key=lambda name: report.cases[name])
    return CheckFailedError(
        checkpoint.path,
        f"the exported graph differs from the source by {report.worst:.2g} of the logit range ({case})",
        f"at most {report.tolerance:g}",
        "no bundle was written",
    )
