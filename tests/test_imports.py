"""Who may import whom, and what a start may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Room -> what its modules may import of ours. `runtime.bundle` means that module only.
ALLOWED = {
    "runtime": {"runtime"},
    "agent": {"agent", "runtime"},
    "export": {
        "export",
        *(f"runtime.{name}" for name in ("bundle", "errors", "foreign", "graph_io", "threads")),
    },
    "cli": {"cli", "agent", "export", "runtime", "package"},
}
FORBIDDEN = {
    "runtime": {"onnx", "onnx_ir", "torch", "transformers", "optimum"},
    "agent": {"onnx", "onnx_ir", "torch", "transformers", "optimum", "onnxruntime"},
    "export": {"torch", "transformers", "optimum"},
    "cli": {"onnx", "onnx_ir", "torch", "transformers", "optimum", "numpy"},
}
# What one module is about; it imports them when it is called.
MEANT = {"export/optimum_source.py": {"torch", "transformers"}}
MODULES = [path for room in ALLOWED for path in sorted((ROOT / room).glob("*.py"))]


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(our modules as room.module, top-level names of other packages) that a file imports anywhere."""
    ours: set[str] = set()
    others: set[str] = set()
    room = path.parent.name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = room if node.level == 1 else ""
            module = ".".join(part for part in (base, node.module or "") if part) or "package"
            ours.add(module)
    return ours, others


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_arrows_point_one_way(path: Path) -> None:
    room = path.parent.name
    ours, others = imports(path)
    for module in ours:
        assert {module, module.split(".")[0]} & ALLOWED[room], f"{room} must not import {module}"
    assert not others & (FORBIDDEN[room] - MEANT.get(f"{room}/{path.name}", set()))


def loaded(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_help_loads_nothing_heavy() -> None:
    code = "from posttrainllm.cli.main import main; main(['--help'])"
    assert not loaded(code) & {
        "numpy",
        "onnxruntime",
        "tokenizers",
        "llguidance",
        "jsonschema",
        "rich",
        "onnx",
    }


@pytest.mark.parametrize(
    "command",
    ["agent", "sample", "export-onnx", "inspect", "eval", "doctor", "trajectory", "traces-to-data"],
)
def test_a_commands_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "from posttrainllm.cli.main import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit as end: assert end.code == 0"
    )
    assert not loaded(code) & {
        "numpy",
        "onnxruntime",
        "tokenizers",
        "llguidance",
        "jsonschema",
        "rich",
        "onnx",
    }


def test_running_a_bundle_loads_neither_onnx_nor_torch(tiny_bundle: Path) -> None:
    code = (
        "from posttrainllm.runtime import load, generate\n"
        f"session = load({str(tiny_bundle)!r})\n"
        "list(generate(session, [1, 2], cache=session.new_cache(), max_tokens=3))"
    )
    assert not loaded(code) & {"onnx", "onnx_ir", "torch", "transformers", "optimum", "jsonschema", "rich"}
