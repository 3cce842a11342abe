"""The bundle on disk: what opens, what is refused and how it is named, and that writing is all or nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.runtime.bundle import (
    Bundle,
    KVLayout,
    Manifest,
    SourceInfo,
    TokenizerInfo,
    is_bundle,
    read_manifest,
    seal,
    sha256_file,
    staged_bundle,
)
from posttrainllm.runtime.errors import BundleError, UsageError

MANIFEST = Manifest(
    architecture="tinygpt",
    flavour="fused",
    precision="fp32",
    context_length=64,
    vocab_size=256,
    kv=KVLayout(2, 4, 8, "float32"),
    tokenizer=TokenizerInfo("bytes", "bytes-256"),
    end_of_turn_ids=[60, 124],
    dialect="posttrainllm",
    source=SourceInfo("naïve ☃.tinygpt", "tinygpt v2 float32", "0" * 64),
    config={"hidden_size": 32},
    parity={"worst": 1e-7},
)
FILES = {"model.onnx": b"graph", "model.onnx.data": b"weights" * 9}


def write(out: Path, manifest: Manifest = MANIFEST, *, force: bool = False) -> Path:
    with staged_bundle(out, force=force) as staging:
        for name, content in FILES.items():
            (staging / name).write_bytes(content)
        seal(staging, manifest)
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "bundle.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, verify=True)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_what_was_written_comes_back(folder: Path) -> None:
    found = Bundle.open(folder, verify=True)
    assert replace(found.manifest, files={}) == MANIFEST
    assert found.graph_path.read_bytes() == b"graph"
    assert {name: info.nbytes for name, info in found.manifest.files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert found.manifest.files["model.onnx"].sha256 == sha256_file(found.graph_path)


def test_a_missing_file_is_named(folder: Path) -> None:
    """Model.onnx copied without its data."""
    (folder / "model.onnx.data").unlink()
    assert "model.onnx.data is missing" in refusal(folder)


def test_sizes_are_compared_and_contents_on_request(folder: Path) -> None:
    graph = folder / "model.onnx"
    graph.write_bytes(b"GRAPH")
    Bundle.open(folder)
    assert "SHA-256" in refusal(folder)
    graph.write_bytes(b"graph and more")
    with pytest.raises(BundleError, match=r"model\.onnx: 14 bytes; expected 5 bytes"):
        Bundle.open(folder)


def test_another_version_is_refused_with_a_sentence(folder: Path) -> None:
    edit(folder, lambda data: data.update(format_version=2, kv="of another shape"))
    assert "format version 2; expected version 1; update posttrainllm" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a posttrainllm manifest"),
        ('{"format": "other"}', "not a posttrainllm manifest"),
        ('{"format": "posttrainllm-bundle"}', "format version None"),
        ('{"format": "posttrainllm-bundle", "format_version": 1}', "without architecture"),
    ],
)
def test_a_damaged_manifest_is_refused(folder: Path, text: str, words: str) -> None:
    (folder / "bundle.json").write_text(text, encoding="utf-8")
    assert words in refusal(folder)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert "no readable bundle.json" in refusal(tmp_path)
    assert "no readable bundle.json" in refusal(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(vocab_size="256"), "bundle.json#/vocab_size: found str; expected int"),
        (lambda data: data.update(vocab_size=True), "vocab_size"),
        (lambda data: data["kv"].update(heads=None), "bundle.json#/kv/heads"),
        (lambda data: data["kv"].pop("heads"), "without heads"),
        (lambda data: data.update(kv=[]), "kv"),
        (lambda data: data.update(end_of_turn_ids=[1, "2"]), "end_of_turn_ids"),
        (lambda data: data.update(files=[]), "files"),
        (lambda data: data["files"].update({"../model.onnx": {}}), "../model.onnx"),
        (lambda data: data["files"].update({"/etc/passwd": {}}), "/etc/passwd"),
        (lambda data: data["files"].update({"..": {}}), "'..'"),
        (lambda data: data["files"].update({"": {}}), "''"),
    ],
)
def test_a_wrong_field_is_named(folder: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    """A manifest also never makes us look outside its folder."""
    edit(folder, change)
    assert words in refusal(folder)


def test_unknown_fields_are_ignored(folder: Path) -> None:
    edit(folder, lambda data: data.update(later={"idea": 1}))
    assert replace(read_manifest(folder), files={}) == MANIFEST


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_values_never_cause_another_error(folder: Path, data: st.DataObject) -> None:
    before = (folder / "bundle.json").read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        holders = [manifest, *(value for value in manifest.values() if isinstance(value, dict))]
        holder = data.draw(st.sampled_from(holders))
        key = data.draw(st.sampled_from(sorted(holder)))
        holder[key] = data.draw(
            st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers(), max_size=2))
        )

    edit(folder, change)
    try:
        Bundle.open(folder, verify=True)
    except BundleError:
        pass
    finally:
        (folder / "bundle.json").write_bytes(before)


class FillingFailedError(Exception):
    pass


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill() -> None:
        with staged_bundle(tmp_path / "deep" / "model") as staging:
            (staging / "model.onnx").write_bytes(b"half")
            raise FillingFailedError

    with pytest.raises(FillingFailedError):
        fill()
    assert os.listdir(tmp_path / "deep") == []


def test_nothing_is_visible_until_the_end(tmp_path: Path) -> None:
    with staged_bundle(tmp_path / "model") as staging:
        assert not (tmp_path / "model").exists()
        assert staging.parent == tmp_path  # the same file system: a rename is enough
        seal(staging, MANIFEST)
    assert os.listdir(tmp_path) == ["model"]


def test_force_swaps_and_a_failure_keeps_the_old(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --force"):
        write(folder)
    with pytest.raises(FillingFailedError), staged_bundle(folder, force=True):
        raise FillingFailedError
    assert replace(Bundle.open(folder, verify=True).manifest, files={}) == MANIFEST
    write(folder, replace(MANIFEST, context_length=99), force=True)
    assert Bundle.open(folder, verify=True).manifest.context_length == 99
    assert os.listdir(tmp_path) == ["model"]


def test_force_replaces_a_bundle_of_a_later_version(folder: Path) -> None:
    edit(folder, lambda data: data.update(format_version=7))
    assert is_bundle(folder)
    write(folder, force=True)
    assert read_manifest(folder).format_version == 1


def test_the_old_bundle_returns_when_the_swap_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp":
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write(folder, replace(MANIFEST, context_length=99), force=True)
    assert Bundle.open(folder, verify=True).manifest.context_length == 64
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("kind", ["empty folder", "folder", "file", "dangling link"])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("a letter", encoding="utf-8")
    elif kind == "dangling link":
        if sys.platform == "win32":
            pytest.skip("links need a privilege")
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
    if kind == "folder":
        (out / "bundle.json").write_text('{"format": "of someone else"}', encoding="utf-8")
    for force in (False, True):
        with pytest.raises(UsageError, match="exists and is not a bundle"):
            write(out, force=force)
    assert os.path.lexists(out)
    assert os.listdir(tmp_path) == ["out"]


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "file" / "model")


@pytest.mark.parametrize("where", ["../a", ".", "link"])
def test_a_bundle_is_replaced_whatever_its_name_is_relative_to(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Renaming a folder changes what `..` and the working directory mean."""
    bundle = tmp_path / "a"
    shutil.copytree(tiny_bundle, bundle)
    (bundle / "old").write_text("old")
    monkeypatch.chdir(bundle if where != "link" else tmp_path)
    if where == "link":
        (tmp_path / "link").symlink_to("a")
    with staged_bundle(Path(where), force=True) as staging:
        shutil.copytree(tiny_bundle, staging, dirs_exist_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"a", *({"link"} & {where})})
    assert not (bundle / "old").exists()
    assert (bundle / "bundle.json").is_file()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flavour", "other"),
        ("dialect", "chatml"),
        ("kind", "words"),
        ("context_length", 0),
        ("layers", -1),
    ],
)
def test_what_this_version_does_not_know_is_refused(
    tiny_bundle: Path, tmp_path: Path, field: str, value: object
) -> None:
    bundle = tmp_path / "a"
    shutil.copytree(tiny_bundle, bundle)
    text = (bundle / "bundle.json").read_text(encoding="utf-8")
    changed = re.sub(f'"{field}": ("[^"]*"|[0-9]+)', f'"{field}": {json.dumps(value)}', text)
    assert changed != text
    (bundle / "bundle.json").write_text(changed, encoding="utf-8")
    with pytest.raises(BundleError):
        Bundle.open(bundle)
