"""`posttrainllm inspect`: what a checkpoint or a bundle holds."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import TokenizerError, UsageError
from .bundled import BUNDLED, NAMES, bundled_model
from .options import option, parse, positional

if TYPE_CHECKING:
    from ..export.checkpoint import Checkpoint
    from ..runtime.bundle import Bundle


@dataclass(frozen=True)
class InspectOptions:
    """Flags of `inspect`."""

    model: str = positional("model", f"a .tinygpt checkpoint, a model folder, or {NAMES}")
    provider: Optional[str] = option(
        None, "coreml: which nodes of the graph it would leave to the CPU", metavar="NAME"
    )
    json: bool = option(False, "print one JSON object")


def run(argv: list[str]) -> int:
    """Print config, sizes, tokenizer, parity and tensors."""
    options = parse(
        InspectOptions,
        argv,
        command="inspect",
        summary="Print what a checkpoint or a bundle holds; the files of a bundle are verified.",
        example="  posttrainllm inspect model.tinygpt --json",
    )
    if options.provider not in (None, "coreml"):
        raise UsageError(f"--provider {options.provider}", "no published list of operators", "coreml")
    path = Path(options.model)
    if options.model in BUNDLED and not path.exists():
        path = bundled_model(options.model)
    from ..runtime.foreign import find_foreign

    if path.is_dir() or find_foreign(path):
        facts = _coreml(path) if options.provider else _bundle(path)
    elif options.provider:
        raise UsageError("--provider", f"{path} has no graph", "a bundle", "export it first")
    else:
        facts = _checkpoint(path)
    print(json.dumps(facts, indent=2) if options.json else "\n".join(_lines(facts)))
    return 0


def _bundle(path: Path) -> dict[str, Any]:
    from ..runtime.foreign import open_model_folder

    bundle = open_model_folder(path, verify=True)
    manifest = asdict(bundle.manifest)
    tensors = manifest["config"].pop("tensors", {})
    sizes = {name: info["nbytes"] for name, info in manifest["files"].items()}
    keys = ("architecture", "flavour", "precision", "dialect", "config", "source", "kv", "tokenizer")
    ours = f"{manifest['format']} {manifest['format_version']}"
    facts = {
        "path": str(path),
        "format": ours if bundle.io is None else f"{manifest['flavour']} {bundle.graph}",
    }
    facts |= {key: manifest[key] for key in (*keys, "end_of_turn_ids", "stop_ids", "parity")}
    return facts | _template(bundle) | {"sizes": sizes, "tensors": tensors}


def _template(bundle: "Bundle") -> dict[str, Any]:
    """What an agent makes of the model's chat template."""
    if bundle.manifest.dialect != "chat_template":
        return {}
    from ..agent.template_dialect import template_facts
    from ..runtime.tokenizer import open_tokenizer

    return {"chat template": template_facts(bundle, open_tokenizer(bundle)).describe()}


def _coreml(path: Path) -> dict[str, Any]:
    """For each of CoreML's formats: how many nodes, and which ones not."""
    from ..runtime.coreml import coreml_report
    from ..runtime.foreign import open_model_folder
    from ..runtime.onnx_file import read_graph

    bundle = open_model_folder(path)
    facts: dict[str, Any] = {"path": str(path), "flavour": bundle.manifest.flavour}
    for name, report in coreml_report(read_graph(bundle.graph_path)).items():
        facts["operator list"] = report.source
        facts[name] = {
            "taken": f"{report.taken} of {report.nodes} nodes",
            "left to the CPU": {
                kind: {"nodes": len(names), "reason": reason, "names": list(names)}
                for kind, (reason, names) in report.refused.items()
            },
            "conditions, not checked": report.conditions,
        }
    return facts


def _checkpoint(path: Path) -> dict[str, Any]:
    from ..export.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        tokenizer, warnings = _tokenizer(checkpoint)
        shapes = checkpoint.shapes
        return {
            "path": str(path),
            "format": checkpoint.format,
            "architecture": checkpoint.config.architecture,
            "config": asdict(checkpoint.config),
            "tokenizer": tokenizer,
            "warnings": [*checkpoint.warnings, *warnings],
            "parameters": sum(prod(shape) for shape in shapes.values()),
            "sizes": {"file": checkpoint.nbytes, "weights": checkpoint.weight_nbytes},
            "tensors": {name: f"{checkpoint.stored_dtype}{list(shape)}" for name, shape in shapes.items()},
        }


def _tokenizer(checkpoint: "Checkpoint") -> tuple[dict[str, str], list[str]]:
    """The tokenizer that an export would use, and what there is to say about it."""
    from ..export.tokenizer_source import resolve_tokenizer

    try:
        found = resolve_tokenizer(checkpoint, None)
    except TokenizerError as error:
        return {"kind": "unusable", "fingerprint": "", "source": checkpoint.tokenizer_source or ""}, [
            str(error)
        ]
    return asdict(found.info), list(found.warnings)


def _lines(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """`facts` for people: a name and its value a line; the members of an object stand indented below it."""
    width = max((len(_printable(name)) for name in facts), default=0)
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{_printable(name)}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_printable(name):<{width}}  {_value(value)}".rstrip()


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if value > 9999 else str(value)
    return _printable(str(value))


def _printable(text: str) -> str:
    """`text` with everything escaped that could move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
