"""The container: what is refused before a tensor's name means anything."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.export import tinygpt_header
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.runtime.errors import CheckpointError

MakeFile = Callable[..., Any]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(path):
        pass
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("nbytes", [5, 11, 12, 15, 300])
def test_a_truncated_file_is_refused(make_file: MakeFile, tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "cut.tinygpt"
    path.write_bytes(make_file().to_bytes()[:nbytes])
    refusal(path)


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (0, "version 0"), (3, "version 3")])
def test_other_versions_are_refused(make_file: MakeFile, tmp_path: Path, version: int, words: str) -> None:
    sample = make_file()
    sample.version = version
    assert words in refusal(sample.save(tmp_path))


def test_a_header_longer_than_the_file_allocates_nothing(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    sample.header_nbytes = 2**32 - 1
    path = sample.save(tmp_path)
    tracemalloc.start()
    try:
        assert "header of 4294967295 bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_oversized_header_is_refused(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinygpt_header, "MAX_HEADER_NBYTES", 100)
    assert "oversized header" in refusal(make_file().save(tmp_path))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff{}", "not UTF-8"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b'"x"', "a string"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"corpus": ' * 100_000, "nested too deeply"),
        (b'{"manifest": [], "manifest": []}', "twice"),
        (b'{"step": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"config": []}', "config is a list"),
        (b'{"config": {}}', "without a manifest"),
        (b'{"config": {}, "manifest": null}', "without a manifest"),
        (b'{"config": {}, "manifest": {}}', "manifest is an object"),
        (b'{"config": {}, "manifest": []}', "manifest is empty"),
    ],
)
def test_a_bad_header_is_refused(make_file: MakeFile, tmp_path: Path, header: bytes, words: str) -> None:
    assert words in refusal(make_file().save(tmp_path, header))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weightDtype", "int8"),
        ("weightDtype", 32),
        ("weightDtype", "int4"),
        ("includesOptimizerState", "yes"),
        ("includesOptimizerState", 1),
    ],
)
def test_a_bad_key_is_named(make_file: MakeFile, tmp_path: Path, key: str, value: object) -> None:
    sample = make_file()
    sample.header[key] = value
    message = refusal(sample.save(tmp_path))
    assert key in message
    assert str(value) in message


@pytest.mark.parametrize(
    "entry",
    [
        "text",
        None,
        {},
        {"name": "x"},
        {"shape": [1]},
        {"name": "", "shape": [1]},
        {"name": 3, "shape": [1]},
        {"name": "x", "shape": "4"},
        {"name": "x", "shape": ["4"]},
        {"name": "x", "shape": [4.0]},
        {"name": "x", "shape": [2.5]},
        {"name": "x", "shape": [True]},
        {"name": "x", "shape": None},
    ],
)
def test_a_manifest_entry_that_is_none_is_refused(make_file: MakeFile, tmp_path: Path, entry: object) -> None:
    sample = make_file()
    sample.manifest.append(entry)
    refusal(sample.save(tmp_path))


def test_a_name_that_stands_twice_is_refused(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    sample.manifest.append(dict(sample.manifest[3]))
    message = refusal(sample.save(tmp_path))
    assert "twice" in message
    assert sample.manifest[3]["name"] in message


@pytest.mark.parametrize("shape", [[], [6, 0], [-6, -6], [2, 3, 4], [10**9, 10**9], [2**62, 4], [10**400]])
def test_an_impossible_shape_is_refused_without_allocating(
    make_file: MakeFile, tmp_path: Path, shape: list[int]
) -> None:
    sample = make_file()
    sample.manifest[4]["shape"] = shape
    path = sample.save(tmp_path)
    tracemalloc.start()
    try:
        assert sample.manifest[4]["name"] in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_without_end_is_refused(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinygpt_header, "MAX_TENSORS", 30)
    assert "manifest of 36 tensors" in refusal(make_file().save(tmp_path))


def test_tolerated_headers_open(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    sample.step = -3
    sample.header |= {
        "corpus": "naïve ☃ " * 20_000,
        "finalLoss": None,
        "stateByteLength": 5,
        "unknown": {"deep": [1]},
    }
    sample.config.update({"backend": "wasm", "learningRate": 0.1, "dMlp": None, "kviBits": 4})
    for entry in sample.manifest:
        entry["floatOffset"] = -1  # the training layout does not use it
    padded = b" \n" + json.dumps(sample.header, ensure_ascii=False).encode() + b"  \t\n" * 50
    with open_checkpoint(sample.save(tmp_path, padded)) as checkpoint:
        assert checkpoint.warnings == ()
