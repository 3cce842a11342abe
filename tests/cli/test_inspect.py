"""`posttrainllm inspect` of checkpoints and bundles, for people and as JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.cli import inspect
from posttrainllm.runtime.bundle import read_manifest
from posttrainllm.runtime.errors import BundleError, CheckpointError, UsageError


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert inspect.run([str(path), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(
        d_model=30, heads=5, layers=1, ctx=32, dtype="fp16", config={"tokenizerSource": "gone"}
    )


def test_a_checkpoint_as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = inspected(checkpoint, capsys)
    assert data["format"] == "tinygpt v2 float16"
    assert (data["config"]["heads"], data["config"]["head_dim"]) == (5, 6)
    assert data["tensors"]["model.layers.0.mlp.up_proj.weight"] == "float16[120, 30]"
    assert data["sizes"]["file"] == checkpoint.stat().st_size
    assert data["sizes"]["weights"] == 2 * data["parameters"]
    assert data["tokenizer"] == {"kind": "missing", "fingerprint": "", "source": "gone"}
    assert "--tokenizer" in data["warnings"][0]


def test_a_bundle_as_json(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = inspected(tiny_bundle, capsys)
    manifest = read_manifest(tiny_bundle)
    assert data["parity"] == manifest.parity
    assert data["tensors"]["model.embed_tokens.weight"] == "float32[256, 32]"
    assert data["sizes"] == {name: info.nbytes for name, info in manifest.files.items()}
    assert data["kv"]["head_dim"] == 8
    assert data["tokenizer"]["kind"] == "bytes"


@pytest.mark.parametrize("kind", ["checkpoint", "bundle"])
def test_text_names_everything(
    kind: str, checkpoint: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint if kind == "checkpoint" else tiny_bundle
    data = inspected(path, capsys)
    assert inspect.run([str(path)]) == 0
    text = capsys.readouterr().out
    for name in [*data, *data["config"], *data["tensors"], *data["sizes"]]:
        assert name in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_text_moves_no_cursor(
    make_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(
        d_model=8, heads=1, layers=1, ctx=4, config={"tokenizerSource": "a\x1b[2Jb\r\nc\x9bd"}
    )
    inspect.run([str(path)])
    text = capsys.readouterr().out
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_tokenizer_that_does_not_fit_is_reported(
    make_checkpoint: Callable[..., Path], bpe_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(
        d_model=8, heads=1, layers=1, ctx=4, config={"tokenizerSource": str(bpe_tokenizer)}
    )
    data = inspected(path, capsys)
    assert data["tokenizer"]["kind"] == "unusable"
    assert "ids up to" in data["warnings"][0]


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        inspect.run([str(tmp_path)])
    with pytest.raises(CheckpointError):
        inspect.run([str(tmp_path / "absent")])


LIGHT = """
import sys
from posttrainllm.cli.inspect import run
run([sys.argv[1], "--json"])
heavy = {"onnx", "onnx_ir", "onnxruntime", "tokenizers", "rich"} | ({"numpy"} if sys.argv[2] == "bundle" else set())
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["checkpoint", "bundle"])
def test_inspecting_needs_no_extra(kind: str, checkpoint: Path, tiny_bundle: Path) -> None:
    path = checkpoint if kind == "checkpoint" else tiny_bundle
    command = [sys.executable, "-c", LIGHT, str(path), kind]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


def test_as_a_command(tiny_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttrainllm", "inspect"]
    good = subprocess.run([*command, str(tiny_bundle)], check=False, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*command, str(tmp_path)], check=False, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (3, "", 1)


def test_a_folder_of_another_program(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime-genai's layout: our own folder without our manifest."""
    shutil.copytree(tiny_bundle, tmp_path / "genai")
    (tmp_path / "genai" / "bundle.json").unlink()
    data = inspected(tmp_path / "genai", capsys)
    assert data["format"] == "genai model.onnx"
    assert data["kv"] == inspected(tiny_bundle, capsys)["kv"]
    assert data["config"]["opsets"] == {"ai.onnx": 18, "com.microsoft": 1}
    assert data["tensors"]["model.embed_tokens.weight"] == "float32[256, 32]"
    inspect.run([str(tmp_path / "genai" / "model.onnx")])
    assert "genai model.onnx" in capsys.readouterr().out


def test_what_coreml_would_leave_to_the_cpu(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run([str(tiny_bundle), "--provider", "coreml", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    left = data["MLProgram"]["left to the CPU"]["com.microsoft:GroupQueryAttention"]
    assert (left["nodes"], left["reason"]) == (2, "not in the list")
    assert data["operator list"].startswith("onnxruntime ")


@pytest.mark.parametrize("provider", ["cuda", ""])
def test_only_coreml_has_a_list(tiny_bundle: Path, provider: str) -> None:
    with pytest.raises(UsageError, match="expected coreml"):
        inspect.run([str(tiny_bundle), "--provider", provider])


def test_a_checkpoint_has_no_graph_to_judge(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="has no graph"):
        inspect.run([str(checkpoint), "--provider", "coreml"])
