"""The choice of a reader: by the first bytes, never by the name."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.runtime.errors import CheckpointError


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(path):
        pass
    return str(caught.value)


def test_the_extension_decides_nothing(make_file: Callable[..., Any], tmp_path: Path) -> None:
    path = make_file().save(tmp_path).rename(tmp_path / "model.int4.bin")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == "tinygpt v2 float32"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"TG", "truncated"),
        (b"TGLA" + bytes(60), "LoRA adapter"),
        (b"TGMH" + bytes(60), "draft heads"),
        (b"TGTL" + bytes(60), "tuned-lens"),
        (b"GGUF" + bytes(60), "GGUF"),
        (pickle.dumps({"weight": [1.0]}), "pickle"),
        (
            struct.pack("<Q", 40) + json.dumps({"weight": {"dtype": "F32", "shape": [1]}}).encode(),
            "safetensors",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"hello world, this is a text", "unknown file"),
        (b"\x1b[2J\x1b[H" + bytes(60), "unknown file"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.tinygpt"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message
    assert message.isprintable()


def test_a_zip_of_torch_weights_is_refused_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.tinygpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert "zip archive" in refusal(tmp_path / "model.tinygpt")


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.tinygpt")
    assert "a folder" in refusal(tmp_path)
    refusal(tmp_path / ("n" * 5000))
    refusal(Path("a\0b"))


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in the file system")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
