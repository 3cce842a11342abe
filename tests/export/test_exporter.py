"""A checkpoint becomes a bundle that agrees with it, or nothing at all is left behind."""

from __future__ import annotations

import builtins
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrainllm.export import decoder, exporter, parity
from posttrainllm.export.exporter import export
from posttrainllm.runtime.bundle import Bundle
from posttrainllm.runtime.errors import (
    CheckFailedError,
    CheckpointError,
    MissingExtraError,
    TokenizerError,
    UsageError,
)

MakeFile = Callable[..., Any]


def only(folder: Path, *names: str) -> bool:
    """Whether `folder` holds exactly `names`: no staging folder, no half bundle."""
    return sorted(os.listdir(folder)) == sorted(names)


def run_bundle(folder: Path, ids: list[int]) -> Any:
    """Logits [n, vocab] of the bundle's graph, from the manifest's layout alone."""
    kv = Bundle.open(folder).manifest.kv
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((1, kv.heads, len(ids), kv.head_dim), np.float32)
    names = [f"past_key_values.{i}.{part}" for i in range(kv.layers) for part in ("key", "value")]
    feeds = dict.fromkeys(names, empty) | {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None],
    }
    return session.run(["logits"], feeds)[0][0]


@pytest.mark.parametrize(
    ("layout", "offsets"), [("fp32", False), ("fp32-contiguous", False), ("fp16", False), ("fp16", True)]
)
def test_every_layout_becomes_a_bundle_with_the_source_logits(
    make_file: MakeFile, plain: Callable[..., Any], tmp_path: Path, layout: str, offsets: bool
) -> None:
    sample = make_file(layout=layout, offsets=offsets)
    report = export(sample.save(tmp_path), tmp_path / "out")
    ids = [3, 10, 0, 7, 7, 2, 9, 1, 4]
    expected = np.array(plain(sample.tensors, 2, ids))
    found = run_bundle(tmp_path / "out", ids)
    assert np.abs(found - expected).max() < 1e-6 * np.ptp(expected)
    assert report.manifest.parity["worst"] < 5e-6
    assert only(tmp_path, "hand.tinygpt", "out")


def test_the_manifest_states_the_facts(make_file: MakeFile, tmp_path: Path) -> None:
    path = make_file(layout="fp16", vocab=256).save(tmp_path)
    export(path, tmp_path / "out")
    manifest = Bundle.open(tmp_path / "out", verify=True).manifest
    assert (manifest.architecture, manifest.flavour, manifest.precision) == ("tinygpt", "fused", "fp32")
    assert (manifest.context_length, manifest.vocab_size, manifest.dialect) == (9, 256, "posttrainllm")
    assert (manifest.kv.layers, manifest.kv.heads, manifest.kv.head_dim, manifest.kv.dtype) == (
        2,
        2,
        8,
        "float32",
    )
    assert manifest.config["head_dim"] == 3
    assert manifest.config["tensors"]["model.embed_tokens.weight"] == "float16[256, 6]"
    assert manifest.source.name == "hand.tinygpt"
    assert manifest.source.format == "tinygpt v2 float16"
    assert manifest.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest.files.keys() == {"genai_config.json", "model.onnx", "model.onnx.data"}
    assert len(manifest.parity["cases"]) == 5


def test_two_exports_are_the_same_bytes(make_file: MakeFile, tmp_path: Path) -> None:
    path = make_file().save(tmp_path)
    for name in ("a", "b"):
        export(path, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_a_tokenizer_is_copied_byte_for_byte(
    make_file: MakeFile, bpe_tokenizer: Path, tmp_path: Path
) -> None:
    report = export(make_file(vocab=450).save(tmp_path), tmp_path / "out", tokenizer=bpe_tokenizer)
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (bpe_tokenizer / "tokenizer.json").read_bytes()
    assert report.manifest.tokenizer.fingerprint == hashlib.sha256(copied).hexdigest()
    assert report.manifest.end_of_turn_ids == [2]
    assert report.warnings == ()
    with pytest.raises(TokenizerError):
        export(make_file(vocab=100).save(tmp_path), tmp_path / "other", tokenizer=bpe_tokenizer)
    assert only(tmp_path, "hand.tinygpt", "out")


def test_warnings_come_with_the_report(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    sample.body += b"\0" * 8
    sample.config["tokenizerSource"] = "/train/machine/words"
    warnings = export(sample.save(tmp_path), tmp_path / "out").warnings
    assert ["8 bytes" in warnings[0], "/train/machine/words" in warnings[1]] == [True, True]


@pytest.mark.parametrize("position", [0, -1])
def test_bad_weights_leave_nothing_behind(make_file: MakeFile, tmp_path: Path, position: int) -> None:
    sample = make_file(layout="fp32-contiguous")
    values = np.frombuffer(sample.body, "<f4").copy()
    values[position] = np.inf
    sample.body = values.tobytes()
    with pytest.raises(CheckpointError, match="NaN or infinity in tensor"):
        export(sample.save(tmp_path), tmp_path / "out")
    assert only(tmp_path, "hand.tinygpt")


def test_a_failed_check_leaves_nothing_behind(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decoder._ACTIVATIONS, "gelu_erf", ("Relu", "", {}))
    with pytest.raises(CheckFailedError, match="of the logit range") as caught:
        export(make_file().save(tmp_path), tmp_path / "out")
    assert caught.value.exit_code == 1
    assert only(tmp_path, "hand.tinygpt")


def test_an_interrupt_leaves_nothing_behind(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(make_file().save(tmp_path), tmp_path / "out")
    assert only(tmp_path, "hand.tinygpt")


def test_a_full_disk_is_one_sentence(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "_save", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        export(make_file().save(tmp_path), tmp_path / "out")
    assert only(tmp_path, "hand.tinygpt")


def test_force_replaces_a_bundle_and_nothing_else(make_file: MakeFile, tmp_path: Path) -> None:
    path = make_file().save(tmp_path)
    out = tmp_path / "out"
    export(path, out)
    before = (out / "bundle.json").read_bytes()
    with pytest.raises(UsageError, match="--force"):
        export(path, out)
    export(make_file(seed=2).save(tmp_path), out, force=True)
    assert (out / "bundle.json").read_bytes() != before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear", encoding="utf-8")
    for foreign in (tmp_path / "home", path):
        with pytest.raises(UsageError, match="not a bundle"):
            export(path, foreign, force=True)
    assert only(tmp_path, "hand.tinygpt", "home", "out")


def test_a_failed_replacement_keeps_the_old_bundle(make_file: MakeFile, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(make_file().save(tmp_path), out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    sample = make_file(layout="fp32-contiguous")
    sample.body = np.full(len(sample.body) // 4, np.nan, "<f4").tobytes()
    with pytest.raises(CheckpointError):
        export(sample.save(tmp_path), out, force=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert only(tmp_path, "hand.tinygpt", "out")


def test_the_checkpoint_is_not_replaced_by_its_own_bundle(make_file: MakeFile, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(make_file().save(tmp_path), out)
    inside = make_file().save(out)
    with pytest.raises(UsageError, match="holds the checkpoint"):
        export(inside, out, force=True)
    assert inside.exists()


def test_an_existing_folder_is_refused_before_the_file_is_read(make_file: MakeFile, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        export(tmp_path / "absent.tinygpt", tmp_path)


def test_a_missing_extra_is_one_sentence(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "onnx_ir":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'posttrainllm-onnx\[export\]'"):
        export(make_file().save(tmp_path), tmp_path / "out")


def test_progress_is_told(make_file: MakeFile, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    export(make_file().save(tmp_path), tmp_path / "out", progress=lambda *call: calls.append(call))
    for stage in ("writing weights", "checking parity", "hashing files"):
        done = [(done, total) for name, done, total in calls if name == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 5),
    head_dim=st.integers(1, 19),
    layers=st.integers(1, 3),
    vocab=st.integers(2, 300),
    middle=st.integers(1, 40),
    ctx=st.integers(1, 70),
    layout=st.sampled_from(["fp32", "fp16"]),
    seed=st.integers(0, 1000),
)
def test_parity_holds_for_every_shape(
    make_file: MakeFile, heads: int, head_dim: int, layout: str, **sizes: int
) -> None:
    """Heads not a multiple of 8 (down to one channel), odd contexts, any vocabulary, M ≠ 4C."""
    assume(heads * head_dim > 1)  # ONNX Runtime 1.22 cannot normalise a single channel
    with tempfile.TemporaryDirectory() as folder:
        path = make_file(width=heads * head_dim, heads=heads, layout=layout, **sizes).save(Path(folder))
        report = export(path, Path(folder) / "out")
        assert report.manifest.parity["worst"] < 2e-5
        assert report.manifest.kv.head_dim % 8 == 0


MEASURE = """
import sys, resource
from pathlib import Path
from posttrainllm.export.exporter import export
export(Path(sys.argv[1]), Path(sys.argv[2]))
unit = 1 if sys.platform == "darwin" else 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the resource module is POSIX only")
def test_peak_memory_is_at_most_the_weights_twice(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """100 MB of fp32 weights; the base is what an export of next to nothing needs (about 115 MB of imports)."""

    def peak(path: Path, name: str) -> int:
        command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / name)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    small = make_checkpoint(d_model=8, heads=1, layers=1, ctx=256)
    large = make_checkpoint(d_model=512, heads=8, layers=8, ctx=256, dtype="fp16")
    base, top = peak(small, "small"), peak(large, "large")
    weights = 2 * (tmp_path / "large" / "model.onnx.data").stat().st_size  # as float32
    large.unlink()
    assert weights > 100e6
    assert top < base + 2 * weights
