"""Which nodes of a graph CoreML would not take, by the list that ONNX Runtime publishes and ships.

The CoreML execution provider leaves what it does not know to the CPU, and every change of sides costs. Its
operators stand in its documentation (https://onnxruntime.ai/docs/execution-providers/CoreML-ExecutionProvider.html),
one list for each of its model formats; the same lists lie in the onnxruntime package, so the ones of the
installed version are read. Nothing of CoreML is needed, and nothing runs: shapes and types, on which some
conditions depend, are not looked at; such conditions are repeated for the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from .errors import InputError
from .onnx_file import Node, OnnxGraph

FORMATS = ("NeuralNetwork", "MLProgram")
# Inputs that a list may ask to be constant, where we know which ones its words mean.
_CONSTANT_INPUTS = {"MatMul": (1,), "Gemm": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "PRelu": (1,)}
# The lists misspell a few: `ai.onnx.ReduceSum`, `Argmax`.
_ROW = re.compile(r"\|(?P<domain>ai\.onnx|ai:onnx|com\.microsoft)[:.](?P<op>\w+)\|(?P<note>.*)\|")


@dataclass(frozen=True)
class CoreMLReport:
    """One format. `nodes` are those left when constants are folded; `refused` goes from an operator to the names of
    its nodes and the reason; `conditions` are words of the list that nobody has checked here."""

    source: str
    nodes: int
    taken: int
    refused: dict[str, tuple[str, tuple[str, ...]]]
    conditions: dict[str, str]


def coreml_report(graph: OnnxGraph) -> dict[str, CoreMLReport]:
    """A report for each of FORMATS. Raises InputError if the installed ONNX Runtime has no such list."""
    constants = _constants(graph)
    nodes = [node for node in graph.nodes if not all(name in constants for name in node.outputs if name)]
    source = f"onnxruntime {version_of_onnxruntime()}"
    return {name: _report(source, nodes, constants, _listed(name)) for name in FORMATS}


def version_of_onnxruntime() -> str:
    """Of the wheel, whatever it is called; unknown for a build of one's own."""
    try:
        return version("onnxruntime")
    except Exception:  # noqa: BLE001 - another wheel's name, or none
        return "of this environment"


def _report(
    source: str, nodes: list[Node], constants: frozenset[str], listed: Mapping[tuple[str, str], str]
) -> CoreMLReport:
    refused: dict[str, tuple[str, list[str]]] = {}
    conditions: dict[str, str] = {}
    for node in nodes:
        note = listed.get((node.domain, node.op.lower()))
        reason = _reason(node, note, constants)
        kind = f"{node.domain}:{node.op}" if node.domain else node.op
        if reason:
            key = kind if refused.get(kind, (reason,))[0] == reason else f"{kind} ({reason})"
            refused.setdefault(key, (reason, []))[1].append(node.name or node.outputs[0])
        elif note and not _checked(node, note):
            conditions[kind] = note
    count = sum(len(names) for _, names in refused.values())
    told = {kind: (reason, tuple(names)) for kind, (reason, names) in refused.items()}
    return CoreMLReport(source, len(nodes), len(nodes) - count, told, conditions)


def _reason(node: Node, note: str | None, constants: frozenset[str]) -> str:
    """Why `node` is not taken; empty if it is, as far as can be seen."""
    if note is None:
        return "not in the list"
    if _checked(node, note):
        for place in _CONSTANT_INPUTS[node.op]:
            name = node.inputs[place] if place < len(node.inputs) else ""
            if name and name not in constants:
                return f"its input {place + 1} is not constant"
    return ""


def _checked(node: Node, note: str) -> bool:
    return "constant" in note and node.op in _CONSTANT_INPUTS


def _constants(graph: OnnxGraph) -> frozenset[str]:
    """Values that ONNX Runtime knows before it partitions: weights, and whatever is computed from them alone."""
    names = {tensor.name for tensor in graph.tensors} - {port.name for port in graph.defaulted}
    for node in graph.nodes:  # in topological order, as the format demands
        if all(name in names for name in node.inputs if name):
            names.update(name for name in node.outputs if name)
    return frozenset(names)


def _listed(name: str) -> dict[tuple[str, str], str]:
    """Domain and lower-case operator to the note, as the list of the format `name` has them."""
    return {(domain, op.lower()): note for domain, op, note in _rows(_list_file(name))}


def _rows(file: Path) -> Iterator[tuple[str, str, str]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        if row := _ROW.fullmatch(line.strip()):
            domain = row["domain"] if row["domain"].startswith("com") else ""
            yield domain, row["op"], row["note"].replace("<br/>", " ").strip()


def _list_file(name: str) -> Path:
    spec = find_spec("onnxruntime")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "tools" / "mobile_helpers" / f"coreml_supported_{name.lower()}_ops.md"
        if file.is_file():
            return file
    raise InputError(
        "--provider coreml",
        f"this onnxruntime package has no list of operators for {name}",
        remedy="pip install onnxruntime",
    )
