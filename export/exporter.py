"""The pipeline: checkpoint, graph, weights on disk, parity check, sealed bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.bundle import (
    FLAVOURS,
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
from ..runtime.errors import CheckFailedError, MissingExtraError, UsageError
from . import genai_config
from .checkpoint import Checkpoint, open_checkpoint
from .tokenizer_source import ResolvedTokenizer, resolve_tokenizer

if TYPE_CHECKING:
    import onnx_ir as ir

    from .parity import ParityReport

PRECISION = "fp32"
FLAVOUR = "fused"
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
    flavour: str = FLAVOUR,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Convert the checkpoint `source` into the bundle folder `out`, or leave nothing behind.

    `flavour` is "fused" (ONNX Runtime's own operators, keys and values appended in place) or "standard" (ai.onnx
    operators only). Weights are streamed. `progress(stage, done, total)` is called along the way. Raises UsageError
    for `out`, CheckpointError, TokenizerError, and CheckFailedError when parity does not hold.
    """
    _require_onnx()
    if flavour not in FLAVOURS:
        raise UsageError("--graph", repr(flavour), " or ".join(FLAVOURS))
    refuse_existing(out, force=force)
    if out.exists() and source.resolve().is_relative_to(out.resolve()):
        raise UsageError(out, "holds the checkpoint that is exported", "another folder for --out")
    with open_checkpoint(source) as checkpoint:
        words = resolve_tokenizer(checkpoint, tokenizer)
        try:
            with staged_bundle(out, force=force) as staging:
                manifest = _fill(staging, checkpoint, words, flavour, progress or _silent)
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


def _fill(
    staging: Path, checkpoint: Checkpoint, words: ResolvedTokenizer, flavour: str, progress: Progress
) -> Manifest:
    from . import decoder, parity
    from .attention import padded_head_dim

    config = checkpoint.config
    model = decoder.build_decoder(checkpoint)
    kv = KVLayout(config.layers, config.kv_heads, padded_head_dim(config), "float32")
    if flavour == "standard":
        from .standard import to_standard

        to_standard(model)
        kv = replace(kv, style="growing", padding=1)
    _save(model, staging, progress)
    report = parity.measure(
        checkpoint,
        staging / GRAPH,
        kv,
        precision=PRECISION,
        progress=lambda done, total: progress("checking parity", done, total),
    )
    if not report.passed:
        raise _parity_failed(checkpoint, report)
    progress("hashing files", 0, 1)
    manifest = Manifest(
        architecture=config.architecture,
        flavour=flavour,
        precision=PRECISION,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        kv=kv,
        tokenizer=words.info,
        end_of_turn_ids=words.end_of_turn_ids,
        dialect=words.dialect,
        source=SourceInfo(checkpoint.path.name, checkpoint.format, checkpoint.sha256()),
        config=asdict(config) | {"tensors": _tensors(model)},
        parity=report.to_json(),
    )
    for name, content in words.files.items():
        (staging / name).write_bytes(content)
    (staging / genai_config.FILE).write_text(genai_config.to_text(manifest), encoding="utf-8", newline="\n")
    seal(staging, manifest)
    progress("hashing files", 1, 1)
    return read_manifest(staging)


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
    case = max(report.cases, key=lambda name: report.cases[name])
    return CheckFailedError(
        checkpoint.path,
        f"the exported graph differs from the source by {report.worst:.2g} of the logit range ({case})",
        f"at most {report.tolerance:g}",
        "no bundle was written",
    )
