"""Promises of the `.tinygpt` writer, checked on the bytes by hand: no reader of ours takes part."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.export.tinygpt_writer import canonical_names, write_tinygpt

CONFIG = {"layers": 1, "dModel": 2, "ctx": 3, "heads": 1, "dMlp": 4, "vocabSize": 5}


def parts(path: Path) -> tuple[dict[str, Any], int, bytes]:
    """(header, step, body) of a container."""
    data = path.read_bytes()
    magic, version, length = struct.unpack_from("<4sII", data)
    assert (magic, version) == (b"TGPT", 2)
    (step,) = struct.unpack_from("<i", data, 12 + length)
    return json.loads(data[12 : 12 + length]), step, data[16 + length :]


def numbers(*shape: int, start: int = 1) -> NDArray[np.float32]:
    """Consecutive integers, which float16 holds exactly."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def test_a_square_linear_weight_is_stored_transposed_and_declared_as_it_is(tmp_path: Path) -> None:
    weight = np.array([[1, 2], [3, 4]], np.float32)  # [out, in]
    write_tinygpt(tmp_path / "m", CONFIG, {"blocks.0.attn.q_proj.weight": weight}, dtype="fp16")
    header, _, body = parts(tmp_path / "m")
    assert header["manifest"][0]["shape"] == [2, 2]
    assert np.frombuffer(body, "<f2").tolist() == [1, 3, 2, 4]  # [in, out], row by row


def test_a_wide_linear_weight_is_stored_input_major_under_its_logical_shape(tmp_path: Path) -> None:
    write_tinygpt(tmp_path / "m", CONFIG, {"blocks.0.mlp.fc_in.weight": numbers(3, 2)}, dtype="fp16")
    header, _, body = parts(tmp_path / "m")
    assert header["manifest"][0]["shape"] == [3, 2]
    assert np.frombuffer(body, "<f2").tolist() == [1, 3, 5, 2, 4, 6]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embedding.weight", (5, 2)),
        ("position_embedding.weight", (2, 2)),
        ("ln_final.weight", (4,)),
        ("blocks.0.mlp.fc_in.bias", (4,)),
        ("blocks.0.diff_attn.lambda", ()),
    ],
)
def test_embeddings_vectors_and_scalars_keep_their_order(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    values = numbers(*shape)
    write_tinygpt(tmp_path / "m", CONFIG, {name: values}, dtype="fp16")
    header, _, body = parts(tmp_path / "m")
    assert header["manifest"][0]["shape"] == list(shape)
    assert np.frombuffer(body, "<f2").tolist() == values.ravel().tolist()


def test_fp32_holds_weights_then_two_zero_moments_per_tensor_and_no_offsets(tmp_path: Path) -> None:
    tensors = {"ln_final.weight": numbers(2), "blocks.0.attn.k_proj.weight": numbers(2, 2, start=3)}
    write_tinygpt(tmp_path / "m", CONFIG, tensors, dtype="fp32", step=-7)
    header, step, body = parts(tmp_path / "m")
    assert step == -7
    expected = [1, 2, *[0] * 4, 3, 5, 4, 6, *[0] * 8]
    assert np.frombuffer(body, "<f4").tolist() == expected
    assert (header["weightDtype"], header["includesOptimizerState"]) == ("fp32", True)
    assert header["stateByteLength"] == len(body) + 4
    assert all("floatOffset" not in entry for entry in header["manifest"])


def test_fp16_offsets_count_elements_in_manifest_order(tmp_path: Path) -> None:
    tensors = {"ln_final.weight": numbers(3), "token_embedding.weight": numbers(2, 2), "x.bias": numbers(1)}
    write_tinygpt(tmp_path / "m", CONFIG, tensors, dtype="fp16")
    header, step, body = parts(tmp_path / "m")
    assert [(e["name"], e["floatOffset"]) for e in header["manifest"]] == [
        ("ln_final.weight", 0),
        ("token_embedding.weight", 3),
        ("x.bias", 7),
    ]
    assert (header["weightDtype"], header["includesOptimizerState"], step) == ("fp16", False, 0)
    assert len(body) == 2 * 8
    assert header["stateByteLength"] == len(body) + 4


def test_offsets_can_be_left_out(tmp_path: Path) -> None:
    write_tinygpt(tmp_path / "m", CONFIG, {"a.bias": numbers(2)}, dtype="fp16", with_offsets=False)
    assert parts(tmp_path / "m")[0]["manifest"] == [{"name": "a.bias", "shape": [2]}]


def test_config_and_extra_keys_arrive_in_the_header_and_extra_keys_win(tmp_path: Path) -> None:
    extra = {"sample": "Zoë", "finalLoss": None, "stateByteLength": 0}
    write_tinygpt(tmp_path / "m", CONFIG, {"a.bias": numbers(1)}, dtype="fp16", header=extra)
    header = parts(tmp_path / "m")[0]
    assert header["config"] == CONFIG
    assert {key: header[key] for key in extra} == extra


@pytest.mark.parametrize(("value", "dtype"), [(70000.0, "fp16"), (np.nan, "fp32"), (-np.inf, "fp32")])
def test_a_value_that_is_not_finite_is_refused_by_tensor_name_and_leaves_nothing(
    tmp_path: Path, value: float, dtype: Any
) -> None:
    tensors = {"a.bias": numbers(2), "b.bias": np.array([value], np.float32)}
    with pytest.raises(ValueError, match=f"b.bias: .* {dtype}"):
        write_tinygpt(tmp_path / "m", CONFIG, tensors, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m"
    target.write_bytes(b"old")

    def no_space(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space left"):
        write_tinygpt(target, CONFIG, {"a.bias": numbers(2)}, dtype="fp32")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    assert target.read_bytes() == b"old"


def test_a_good_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.write_bytes(b"old")
    write_tinygpt(target, CONFIG, {"a.bias": numbers(2)}, dtype="fp32")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    assert target.read_bytes().startswith(b"TGPT")


def test_canonical_order_begins_with_embeddings_and_final_norm_then_goes_layer_by_layer() -> None:
    names = canonical_names(2)
    assert names[:6] == [
        "token_embedding.weight",
        "position_embedding.weight",
        "ln_final.weight",
        "ln_final.bias",
        "blocks.0.ln1.weight",
        "blocks.0.ln1.bias",
    ]
    assert names[6:8] == ["blocks.0.attn.q_proj.weight", "blocks.0.attn.q_proj.bias"]
    assert names[19] == "blocks.0.mlp.fc_out.bias"
    assert names[-1] == "blocks.1.mlp.fc_out.bias"
    assert len(names) == len(set(names)) == 4 + 2 * 16
