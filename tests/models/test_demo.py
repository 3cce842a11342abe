"""The bundled specialist: the bundle is the checkpoint's, and the README's first command really works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.eval_tasks import load_tasks
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.runtime import load
from posttrainllm.runtime.bundle import Bundle, sha256_file

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
BUNDLE = DEMO / "bundle"


def ask(question: str, cwd: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and events of one question to the bundled model and tools, in the folder `cwd`."""
    done = subprocess.run(
        [sys.executable, "-m", "posttrainllm", "agent", "--single", question, "--json-out"],
        capture_output=True,
        encoding="utf-8",
        cwd=cwd,
        env={**os.environ, "TZ": "UTC"},
        timeout=120,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_shipped_bundle_is_the_exported_checkpoint(tmp_path: Path) -> None:
    fresh = export(DEMO / "demo.tinygpt", tmp_path / "bundle").bundle
    shipped = Bundle.open(BUNDLE, verify=True).manifest
    again = Bundle.open(fresh).manifest
    for name in ("model.onnx.data", "tokenizer.json"):
        assert sha256_file(fresh / name) == sha256_file(BUNDLE / name)
    assert shipped.source.sha256 == again.source.sha256 == sha256_file(DEMO / "demo.tinygpt")
    assert (shipped.kv, shipped.tokenizer, shipped.context_length) == (
        again.kv,
        again.tokenizer,
        again.context_length,
    )
    assert shipped.parity["worst"] <= 1e-4


def test_sizes_and_context() -> None:
    """At most 12 MB each, a context of at least 1,024 ids, and nothing of the checkpoint in the package."""
    assert (DEMO / "demo.tinygpt").stat().st_size < 12e6
    assert sum(path.stat().st_size for path in BUNDLE.iterdir()) < 12e6
    with open_checkpoint(DEMO / "demo.tinygpt") as checkpoint:
        assert checkpoint.config.context_length >= 1024
        assert checkpoint.tokenizer_source == "tokenizer"
    installed = Path(str(files("posttrainllm.models"))) / "demo"
    Bundle.open(installed / "bundle", verify=True)
    if installed.resolve() != DEMO.resolve():  # an ordinary install, not an editable one
        assert not (installed / "demo.tinygpt").exists()


def test_the_readmes_question_is_answered_with_the_files_own_number() -> None:
    lines = len((ROOT / "LICENSE").read_text(encoding="utf-8").splitlines())
    code, events = ask("How many lines does LICENSE have?", ROOT)
    assert code == 0
    (call,) = [event for event in events if event["type"] == "tool_call"]
    assert (call["tool"], call["arguments"]) == ("count_lines", {"path": "LICENSE"})
    assert str(lines) in events[-1]["text"]


@pytest.mark.parametrize(
    ("question", "tool", "arguments", "answer"),
    [
        ("What does notes.txt say?", "read_file", {"path": "notes.txt"}, "milk"),
        ("How big is src/main.py?", "file_size", {"path": "src/main.py"}, "15"),
        ("List the files in src", "list_files", {"folder": "src"}, "main.py"),
        ("What is 37*12?", "calculate", {"expression": "37*12"}, "444"),
    ],
)
def test_it_uses_the_tools_on_the_users_files(
    tmp_path: Path, question: str, tool: str, arguments: dict[str, str], answer: str
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_bytes(b"print('hello')\n")
    (tmp_path / "notes.txt").write_bytes(b"milk and bread\n")
    code, events = ask(question, tmp_path)
    assert code == 0
    call = next(event for event in events if event["type"] == "tool_call")
    assert (call["tool"], call["arguments"]) == (tool, arguments)
    assert answer in events[-1]["text"]


def test_the_card_states_the_figures_of_the_held_out_set() -> None:
    """The set that the card speaks of is the one that stands beside it."""
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    assert f"{len(load_tasks(DEMO / 'heldout.jsonl'))} tasks" in card
    assert sha256_file(DEMO / "demo.tinygpt") in card


def test_its_tokenizer_gives_a_name_the_same_ids_everywhere() -> None:
    """Why copying works: a file name in a question, in a call and in a result is the same ids."""
    tokenizer = load(BUNDLE, provider="cpu").tokenizer
    for name in ("src/utils/io_helpers.py", "Dockerfile", "año-2024.txt"):
        ids = tokenizer.encode_content(name).ids
        for text in (f"Read {name} please", f'"path": "{name}"', f"{name} has 3 lines."):
            around = tokenizer.encode_content(text).ids
            assert any(around[i : i + len(ids)] == ids for i in range(len(around)))
