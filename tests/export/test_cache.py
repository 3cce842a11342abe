"""Exports are made once per content: what is remembered, and what is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrainllm.export import cache
from posttrainllm.export.cache import cached_bundles, cached_export, content_hash, remove_cached
from posttrainllm.runtime.bundle import Bundle, sha256_file
from posttrainllm.runtime.errors import CheckpointError, UsageError


@pytest.fixture
def model(make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTTRAINLLM_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.tinygpt"
    path.write_bytes(make_checkpoint(d_model=16, heads=2, layers=1, ctx=32).read_bytes())
    return path


def test_the_second_export_is_the_first_ones_bundle(model: Path) -> None:
    first, second = cached_export(model), cached_export(model)
    assert (first.fresh, second.fresh) == (True, False)
    assert first.bundle == second.bundle
    Bundle.open(first.bundle, verify=True)


def test_a_copy_shares_the_export(model: Path, tmp_path: Path) -> None:
    first = cached_export(model)
    copy = tmp_path / "copy.bin"
    copy.write_bytes(model.read_bytes())
    assert cached_export(copy).bundle == first.bundle
    assert not cached_export(copy).fresh


def test_the_hash_is_remembered_until_the_file_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def recorded(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(cache, "sha256_file", recorded)
    memory = tmp_path / "memory"
    memory.mkdir()
    first = content_hash(model, memory)
    assert content_hash(model, memory) == first == sha256_file(model)
    assert len(read) == 1, "a start does not read gigabytes again"
    stat = model.stat()
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert content_hash(model, memory) == first
    assert len(read) == 2
    for note in memory.iterdir():
        note.write_text("torn{")
    assert content_hash(model, memory) == first, "a damaged note is no obstacle"


def test_the_tokenizer_is_part_of_the_key(
    make_checkpoint: Callable[..., Path], bpe_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAINLLM_CACHE_DIR", str(tmp_path / "cache"))
    source = make_checkpoint(
        vocab=320, d_model=16, heads=2, layers=1, ctx=32, config={"tokenizerSource": "words"}
    )
    missing = cached_export(source)
    assert "tokenizer" in missing.warnings[0]
    folder = source.parent / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((bpe_tokenizer / "tokenizer.json").read_bytes())
    found = cached_export(source)
    assert found.fresh, "the tokenizer that appeared is noticed"
    assert found.bundle != missing.bundle
    assert found.warnings == ()


def test_what_cannot_be_read_or_written_is_one_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError):
        cached_export(tmp_path / "nothing")
    monkeypatch.setenv("POSTTRAINLLM_CACHE_DIR", str(model))
    with pytest.raises(UsageError, match="POSTTRAINLLM_CACHE_DIR"):
        cached_export(model)


def test_a_damaged_export_is_mended_and_leftovers_go(model: Path) -> None:
    """A file of the right size with the wrong bytes shows only when it is hashed, or when it fails."""
    bundle = cached_export(model).bundle
    graph = bundle / "model.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    leftover = bundle.parent / f".{bundle.name}.killed.tmp"
    leftover.mkdir()
    assert not cached_export(model).fresh, "a start does not hash"
    assert cached_export(model, repair=True).fresh
    Bundle.open(bundle, verify=True)
    assert not leftover.exists()
    assert not cached_export(model, repair=True).fresh


def test_a_removed_bundle_is_exported_anew(model: Path) -> None:
    first = cached_export(model)
    assert cached_bundles() == [first.bundle]
    remove_cached(first.bundle)
    assert cached_bundles() == []
    assert [entry.name for entry in first.bundle.parent.iterdir()] == [f"{first.bundle.name}.lock"]
    assert cached_export(model).fresh


def test_what_cannot_be_removed_stays_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = cached_export(model).bundle

    def in_use(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", in_use)
    with pytest.raises(UsageError, match="cannot be removed"):
        remove_cached(bundle)
    monkeypatch.undo()
    Bundle.open(bundle, verify=True)
    assert [entry for entry in bundle.parent.iterdir() if entry.is_dir()] == [bundle]
