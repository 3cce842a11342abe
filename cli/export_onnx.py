"""`posttrainllm export-onnx`: a checkpoint becomes an ONNX bundle."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import UsageError
from .options import option, parse, positional
from .progress import progress_bar

if TYPE_CHECKING:
    from ..export.exporter import ExportReport


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `export-onnx`."""

    out: str = field(metadata={"help": "folder to write the bundle to", "metavar": "DIR"})
    model: str = positional("model", "a .tinygpt checkpoint")
    tokenizer: Optional[str] = option(
        None,
        "folder with the model's tokenizer.json (default: the one that the checkpoint names)",
        metavar="DIR",
    )
    graph: str = option(
        "fused",
        "fused (default): ONNX Runtime's own operators; standard: ai.onnx operators only, for other engines",
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
        example="  posttrainllm export-onnx model.tinygpt --out model-onnx",
    )
    if not options.out:
        raise UsageError("--out", "empty", "a folder")
    from ..export.exporter import export

    with progress_bar() as progress:
        report = export(
            Path(options.model),
            Path(options.out),
            tokenizer=Path(options.tokenizer) if options.tokenizer else None,
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
    print(
        f"parity     {parity['worst']:.1e} of the logit range, at most {parity['tolerance']:.0e} allowed "
        f"({len(parity['cases'])} cases of {parity['ids']} ids)"
    )
