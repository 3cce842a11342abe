"""`posttrainllm export-onnx`: a checkpoint becomes an ONNX bundle."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import UsageError
from .options import option, parse, positional
from .progress import progress_bar

if TYPE_CHECKING:
    from ..export.exporter import ExportReport


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `export-onnx`."""

    out: str = field(metadata={"help": "folder to write the bundle to", "metavar": "DIR"})
    model: str = positional(
        "model", "a .tinygpt or .gguf file, a Hugging Face folder, or the id of a model on the hub"
    )
    tokenizer: Optional[str] = option(
        None,
        "folder with the model's tokenizer.json (default: the one that the checkpoint names)",
        metavar="DIR",
    )
    precision: Optional[str] = option(
        None,
        "fp32, fp16, int8, int4 or keep (a GGUF's own blocks), with a block size and exceptions if you like: "
        "int4:64,embed_tokens=fp32 (default: fp32 for a .tinygpt, keep for a quantised source, else int8)",
        metavar="P",
    )
    context: Optional[int] = option(
        None,
        "longest text in ids that the bundle is for (default: what the model was trained for)",
        metavar="N",
    )
    quality: Optional[str] = option(
        None,
        "a text: print the perplexity on it, and how often the likeliest id is the one of fp32",
        metavar="FILE",
    )
    graph: str = option(
        "fused",
        "fused (default): ONNX Runtime's own operators; standard: ai.onnx operators only, in fp32, for other engines",
        metavar="NAME",
    )
    force: bool = option(False, "replace DIR when it is a bundle already")


def run(argv: list[str]) -> int:
    """Export, print what was written and how exact it is."""
    options = parse(
        ExportOptions,
        argv,
        command="export-onnx",
        summary="Turn a checkpoint into an ONNX bundle, checked against the source weights.",
        example="  posttrainllm export-onnx model.tinygpt --out model-onnx\n"
        "  posttrainllm export-onnx SmolLM2-135M-Instruct/ --out smollm2 --precision int8 --quality notes.txt",
    )
    if not options.out:
        raise UsageError("--out", "empty", "a folder")
    from ..export.exporter import export
    from ..export.hub import local_source

    with progress_bar() as progress:
        report = export(
            local_source(options.model),
            Path(options.out),
            tokenizer=Path(options.tokenizer) if options.tokenizer else None,
            precision=options.precision,
            context=options.context,
            quality=Path(options.quality) if options.quality else None,
            flavour=options.graph,
            force=options.force,
            progress=progress,
        )
    for warning in report.warnings:
        print(f"posttrainllm: warning: {options.model}: {warning}", file=sys.stderr)
    _print(report)
    return 0


def _print(report: "ExportReport") -> None:
    manifest = report.manifest
    parity = manifest.parity
    sizes = ", ".join(f"{name} {info.nbytes:,} bytes" for name, info in manifest.files.items())
    print(f"bundle     {report.bundle}")
    print(f"model      {manifest.architecture}, {manifest.precision}, {manifest.flavour} flavour")
    print(f"tokenizer  {manifest.tokenizer.kind}")
    print(f"files      {sizes}")
    left_out = f", {parity['unsteady']} left out that float32 cannot hold" if parity["unsteady"] else ""
    print(
        f"parity     {parity['worst']:.1e} of the logit range, at most {parity['tolerance']:.0e} allowed "
        f"({len(parity['cases'])} cases of {parity['ids']} ids{left_out})"
    )
    if "activation_rounding" in parity:
        print(
            f"rounding   {parity['activation_rounding']:.1e} of the logit range (root mean square), of activations in int8; "
            "parity is without it"
        )
    if "quality" in parity:
        _print_quality(parity["quality"], manifest.tokenizer.kind)


def _print_quality(figures: dict[str, Any], tokenizer: str) -> None:
    change = figures["perplexity"] / figures["perplexity_fp32"] - 1
    print(
        f"quality    perplexity {figures['perplexity']:.4g} a token ({tokenizer}), fp32 {figures['perplexity_fp32']:.4g} "
        f"({change:+.2%}); the likeliest id is fp32's in {figures['agreement']:.1%} "
        f"({figures['predicted']:,} ids of {figures['text']}, windows of {figures['window']:,})"
    )
