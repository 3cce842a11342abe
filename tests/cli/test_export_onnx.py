"""`posttrainllm export-onnx` as a user meets it: a process, its two streams, its exit code, what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from posttrainllm.runtime.bundle import Bundle


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "posttrainllm", "export-onnx", *map(str, arguments)]
    return subprocess.run(
        command, check=False, cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def refused(code: int, *arguments: str | Path, cwd: Path) -> str:
    """The one line on stderr of a run that ends with `code`."""
    result = run(*arguments, cwd=cwd)
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("posttrainllm: ")
    return line


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(d_model=16, heads=2, layers=1, ctx=32, dtype="fp16")


def test_an_export_says_what_it_wrote(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, "--out", "made", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["made"]
    Bundle.open(tmp_path / "made", verify=True)
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["bundle"] == "made"
    assert "of the logit range" in lines["parity"]
    assert "model.onnx.data" in lines["files"]
    assert lines["tokenizer"] == "bytes"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_gets_a_progress_bar_and_pipes_get_none(checkpoint: Path, tmp_path: Path) -> None:
    """Colour and movement go to a terminal's stderr only; stdout stays what it is."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "posttrainllm", "export-onnx", str(checkpoint), "--out", "made"]
    env = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux says so when the other side closes
            while block := os.read(ours, 4096):
                seen += block
        os.close(ours)
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 0
    assert b"\x1b[" in seen
    assert b"reading the checkpoint" in seen
    assert b"\x1b" not in out
    assert out.startswith(b"bundle ")


def test_existing_folders(checkpoint: Path, tmp_path: Path) -> None:
    assert run(checkpoint, "--out", "made", cwd=tmp_path).returncode == 0
    assert "--force" in refused(2, checkpoint, "--out", "made", cwd=tmp_path)
    assert run(checkpoint, "--out", "made", "--force", cwd=tmp_path).returncode == 0
    (tmp_path / "mine").mkdir()
    assert "not a bundle" in refused(2, checkpoint, "--out", "mine", "--force", cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["made", "mine"]


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "truncated", "foreign", "oversized header", "short body"]
)
def test_bad_input_is_one_line_and_leaves_nothing(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    good = checkpoint.read_bytes()
    contents = {
        "empty": b"",
        "truncated": good[:200],
        "foreign": b"GGUF" + bytes(100),
        "oversized header": good[:8] + b"\xff\xff\xff\xff" + good[12:],
        "short body": good[:-10],
    }
    path = tmp_path / "bad\nname.tinygpt"
    if kind in contents:
        path.write_bytes(contents[kind])
    before = sorted(os.listdir(tmp_path))
    line = refused(3, path, "--out", "made", cwd=tmp_path)
    assert "bad\\nname.tinygpt" in line
    assert "expected" in line
    assert sorted(os.listdir(tmp_path)) == before


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, checkpoint: Path) -> None:
    whole = bytearray(checkpoint.read_bytes())
    whole[-2:] = np.array([np.nan], "<f2").tobytes()
    (tmp_path / "nan.tinygpt").write_bytes(whole)
    line = refused(3, "nan.tinygpt", "--out", "made", cwd=tmp_path)
    assert "NaN or infinity in tensor blocks.0.mlp.fc_out.bias" in line
    assert os.listdir(tmp_path) == ["nan.tinygpt"]


def test_a_missing_tokenizer_is_said_plainly(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(
        d_model=16, heads=2, layers=1, ctx=32, config={"tokenizerSource": "/trained/elsewhere"}
    )
    result = run(path, "--out", "made", cwd=tmp_path)
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("posttrainllm: warning: ")
    assert "/trained/elsewhere" in line
    assert "--tokenizer DIR" in line
    assert Bundle.open(tmp_path / "made").manifest.tokenizer.kind == "missing"


def test_a_given_tokenizer_is_used(
    make_checkpoint: Callable[..., Path], bpe_tokenizer: Path, tmp_path: Path
) -> None:
    path = make_checkpoint(vocab=420, d_model=16, heads=2, layers=1, ctx=32)
    assert run(path, "--out", "made", "--tokenizer", bpe_tokenizer, cwd=tmp_path).returncode == 0
    assert Bundle.open(tmp_path / "made").manifest.tokenizer.kind == "tokenizers"
    refused(3, path, "--out", "other", "--tokenizer", tmp_path, cwd=tmp_path)


@pytest.mark.parametrize(
    "arguments", [[], ["a.tinygpt"], ["--out", "x"], ["a.tinygpt", "--out", "x", "--fast"]]
)
def test_usage_errors(arguments: list[str], tmp_path: Path) -> None:
    refused(2, *arguments, cwd=tmp_path)


def test_help_has_an_example(tmp_path: Path) -> None:
    result = run("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "posttrainllm export-onnx model.tinygpt --out" in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to catch on Windows")
def test_being_asked_to_end_leaves_no_half_folder(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_checkpoint(d_model=512, heads=8, layers=6, ctx=64)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "posttrainllm", "export-onnx", str(source), "--out", str(out / "bundle")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not list(out.iterdir()):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert b"Traceback" not in stderr
    assert list(out.iterdir()) == []


def test_the_standard_flavour(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, "--out", "made", "--graph", "standard", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "standard flavour" in result.stdout
    assert Bundle.open(tmp_path / "made", verify=True).manifest.kv.style == "growing"
    refused(2, checkpoint, "--out", "other", "--graph", "coreml", cwd=tmp_path)
