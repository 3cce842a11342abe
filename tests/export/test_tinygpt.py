"""Bodies, inventories and configs of `.tinygpt` files; every file here is made by hand."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.export.architectures import TINYGPT
from posttrainllm.export.checkpoint import Checkpoint, open_checkpoint
from posttrainllm.runtime.errors import CheckpointError

MakeFile = Callable[..., Any]
LAYOUTS = [("fp32", False), ("fp32-contiguous", False), ("fp16", False), ("fp16", True)]


def check_weights(path: Path, sample: Any) -> Checkpoint:
    """Every tensor of the file equals the logical weights that the sample was made of."""
    with open_checkpoint(path) as checkpoint:
        names = TINYGPT.source_names(checkpoint.config)
        assert {names[name] for name in checkpoint.shapes} == sample.tensors.keys()
        for name, theirs in names.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), sample.tensors[theirs], err_msg=theirs)
            assert checkpoint.shapes[name] == sample.tensors[theirs].shape
    return checkpoint


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(path):
        pass
    return str(caught.value)


@pytest.mark.parametrize(("layout", "offsets"), LAYOUTS)
def test_every_layout_gives_the_logical_weights(
    make_file: MakeFile, tmp_path: Path, layout: str, offsets: bool
) -> None:
    sample = make_file(layout=layout, offsets=offsets)
    checkpoint = check_weights(sample.save(tmp_path), sample)
    assert checkpoint.warnings == ()
    assert checkpoint.weight_nbytes == sum(t.size for t in sample.tensors.values()) * (
        2 if layout == "fp16" else 4
    )


def test_square_weights_are_transposed(make_file: MakeFile, tmp_path: Path) -> None:
    """D_model = d_mlp, so that no shape tells a wrong orientation."""
    sample = make_file(width=6, middle=6, heads=3, layers=1)
    check_weights(sample.save(tmp_path), sample)


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_the_body_follows_the_manifest_not_the_canonical_order(
    make_file: MakeFile, tmp_path: Path, layout: str
) -> None:
    sample = make_file(layout=layout, shuffle=True)
    assert sample.manifest[0]["name"] != "token_embedding.weight"
    check_weights(sample.save(tmp_path), sample)


def test_offsets_decide_against_the_manifest_order(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file(layout="fp16", offsets=True)
    sample.manifest.reverse()
    check_weights(sample.save(tmp_path), sample)


@pytest.mark.parametrize("padding", range(4))
def test_any_alignment_of_the_body(make_file: MakeFile, tmp_path: Path, padding: int) -> None:
    sample = make_file()
    header = json.dumps(sample.header).encode() + b" " * padding
    check_weights(sample.save(tmp_path, header), sample)


@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 3, "heads": 3},  # heads of one channel
        {"heads": 1},
        {"layers": 1},
        {"vocab": 300},
        {"ctx": 1},
        {"middle": 1},
        {"width": 1, "heads": 1, "vocab": 1, "layers": 1, "middle": 1, "ctx": 1},
    ],
)
def test_unusual_sizes_open(make_file: MakeFile, tmp_path: Path, sizes: dict[str, int]) -> None:
    sample = make_file(**sizes)
    check_weights(sample.save(tmp_path), sample)


def test_sizes_come_from_the_manifest_where_the_config_lacks_them(
    make_file: MakeFile, tmp_path: Path
) -> None:
    sample = make_file()
    sample.header["config"] = {"heads": 2, "layers": None}
    with open_checkpoint(sample.save(tmp_path)) as checkpoint:
        config = checkpoint.config
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (11, 6, 5)
        assert (config.layers, config.context_length, config.head_dim) == (2, 9, 3)
        assert "vocabSize" in checkpoint.warnings[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heads", None),
        ("heads", 0),
        ("heads", -2),
        ("heads", 4),
        ("heads", 12),
        ("heads", "2"),
        ("heads", 10**300),
        ("layers", 3),
        ("layers", 1),
        ("layers", 10**9),
        ("layers", "2"),
        ("dModel", 8),
        ("dModel", 6.0),
        ("dModel", True),
        ("ctx", 8),
        ("ctx", -1),
        ("dMlp", 24),
        ("vocabSize", 256),
        ("useMoD", 1),
        ("nExperts", "4"),
        ("tokenizerSource", 4),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    make_file: MakeFile, tmp_path: Path, key: str, value: object
) -> None:
    sample = make_file()
    sample.config[key] = value
    assert f"config.{key}" in refusal(sample.save(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("nExperts", 4, "mixture of experts"),
        ("slidingWindow", 128, "sliding window"),
        ("useMoD", True, "mixture of depths"),
        ("useDifferentialAttention", True, "differential attention"),
        ("useYOCO", True, "YOCO"),
        ("useDeepNorm", True, "DeepNorm"),
        ("useEmbeddingRMSNorm", True, "embedding RMSNorm"),
    ],
)
def test_an_architecture_flag_is_refused_by_name(
    make_file: MakeFile, tmp_path: Path, key: str, value: object, words: str
) -> None:
    sample = make_file()
    sample.config[key] = value
    message = refusal(sample.save(tmp_path))
    assert words in message
    assert "not converted yet" in message


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blocks.0.moe.router.weight", [4, 6], "mixture of experts"),
        ("blocks.1.mod_router.weight", [1, 6], "mixture of depths"),
        ("blocks.0.diff_attn.lambda", [], "differential attention"),
        ("blocks.1.cross_attn.q_proj.weight", [6, 6], "YOCO"),
        ("embed_norm.weight", [6], "embedding RMSNorm"),
        ("lm_head.weight", [11, 6], "untied head"),
        ("router_head.weight", [7, 6], "tool-router classifier"),
    ],
)
def test_tensors_of_a_feature_without_its_flag_are_refused_by_name(
    make_file: MakeFile, tmp_path: Path, name: str, shape: list[int], words: str
) -> None:
    sample = make_file()
    sample.manifest.append({"name": name, "shape": shape})
    assert words in refusal(sample.save(tmp_path))


@pytest.mark.parametrize("key", ["nExperts", "slidingWindow", "useMoD", "useYOCO"])
def test_flags_that_are_off_are_no_obstacle(make_file: MakeFile, tmp_path: Path, key: str) -> None:
    sample = make_file()
    sample.config[key] = {"nExperts": 1, "slidingWindow": 0}.get(key, False)
    check_weights(sample.save(tmp_path), sample)


def test_every_tensor_is_needed(make_file: MakeFile, tmp_path: Path) -> None:
    for index, entry in enumerate(make_file().manifest):
        sample = make_file()
        del sample.manifest[index]
        assert entry["name"] in refusal(sample.save(tmp_path)), entry


@pytest.mark.parametrize(
    "name", ["blocks.2.ln1.weight", "blocks.00.ln1.weight", "ln_f.weight", "blocks.0.attn.bias"]
)
def test_no_tensor_is_too_much(make_file: MakeFile, tmp_path: Path, name: str) -> None:
    sample = make_file()
    sample.manifest.append({"name": name, "shape": [6]})
    assert name in refusal(sample.save(tmp_path)) or "layers" in refusal(sample.save(tmp_path))


def test_a_gap_in_the_blocks_is_refused(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file(layers=3)
    for entry in sample.manifest:
        entry["name"] = entry["name"].replace("blocks.1.", "blocks.7.")
    assert "blocks.1." in refusal(sample.save(tmp_path))


def test_every_shape_is_compared(make_file: MakeFile, tmp_path: Path) -> None:
    for index, entry in enumerate(make_file().manifest):
        sample = make_file()
        sample.manifest[index]["shape"] = [entry["shape"][-1], entry["shape"][0]][: len(entry["shape"])]
        sample.manifest[index]["shape"][0] += 1
        message = refusal(sample.save(tmp_path))
        assert entry["name"] in message or "config." in message


@pytest.mark.parametrize(("layout", "offsets"), LAYOUTS)
def test_a_short_body_is_refused(make_file: MakeFile, tmp_path: Path, layout: str, offsets: bool) -> None:
    for missing in (1, 5, 400):
        sample = make_file(layout=layout, offsets=offsets)
        sample.body = sample.body[:-missing]
        assert "body of" in refusal(sample.save(tmp_path))


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_bytes_after_the_weights_are_a_warning(make_file: MakeFile, tmp_path: Path, layout: str) -> None:
    sample = make_file(layout=layout)
    sample.body += b"tail!"
    checkpoint = check_weights(sample.save(tmp_path), sample)
    assert "5 bytes after the weights" in checkpoint.warnings[0]


@pytest.mark.parametrize("has_moments", [True, False, None])
@pytest.mark.parametrize("stored", ["fp32", "fp32-contiguous", "fp16"])
@pytest.mark.parametrize("label", ["fp32", "FP16", None])
def test_a_body_is_never_read_as_another_kind(
    make_file: MakeFile, tmp_path: Path, stored: str, label: str | None, has_moments: bool | None
) -> None:
    """Whatever the labels say, a file gives its own weights or is refused."""
    sample = make_file(layout=stored)
    sample.header |= {"weightDtype": label, "includesOptimizerState": has_moments}
    path = sample.save(tmp_path)
    right = {
        "fp32": label != "FP16" and has_moments is not False,
        "fp32-contiguous": label != "FP16" and has_moments is False,
        "fp16": label == "FP16" or has_moments is False,
    }[stored]
    if right:
        check_weights(path, sample)
    else:
        assert "body of" in refusal(path)


def test_fp16_subnormals_are_decoded(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file(layout="fp16")
    sample.body = b"\x01\x00\x01\x80" + sample.body[4:]
    with open_checkpoint(sample.save(tmp_path)) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.tensor("model.embed_tokens.weight")[0, :2], [2.0**-24, -(2.0**-24)]
        )


@pytest.mark.parametrize("change", ["some", "negative", "outside", "overlap", "fraction", "text", "huge"])
def test_bad_offsets_are_refused(make_file: MakeFile, tmp_path: Path, change: str) -> None:
    sample = make_file(layout="fp16", offsets=True)
    last = sample.manifest[-1]
    if change == "some":
        del last["floatOffset"]
    else:
        good = last["floatOffset"]
        values = {
            "negative": -1,
            "outside": good + 1,
            "overlap": good - 1,
            "fraction": 0.5,
            "text": "0",
            "huge": 10**40,
        }
        last["floatOffset"] = values[change]
    message = refusal(sample.save(tmp_path))
    assert "floatOffset" in message or "overlap" in message


@pytest.mark.parametrize("layout", ["fp32", "fp16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(
    make_file: MakeFile, tmp_path: Path, layout: str, value: float
) -> None:
    sample = make_file(layout=layout)
    bad = np.array([value], "<f4" if layout == "fp32" else "<f2").tobytes()
    sample.body = bad + sample.body[len(bad) :]
    with open_checkpoint(sample.save(tmp_path)) as checkpoint:
        with pytest.raises(CheckpointError, match=r"NaN or infinity in tensor token_embedding\.weight"):
            checkpoint.tensor("model.embed_tokens.weight")
        checkpoint.tensor("model.norm.weight")


@pytest.mark.parametrize("change", ["touched", "cut", "grown"])
def test_a_file_that_changes_is_refused(make_file: MakeFile, tmp_path: Path, change: str) -> None:
    path = make_file().save(tmp_path)
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensor("model.norm.weight")
        if change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size + (10 if change == "grown" else -3000))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.tensor("model.layers.1.mlp.down_proj.bias")
        with pytest.raises(CheckpointError, match="changed while it was read"):
            checkpoint.sha256()


def open_and_read(path: Path) -> None:
    """What an export reads. Only a CheckpointError may come out of it."""
    with contextlib.suppress(CheckpointError), open_checkpoint(path) as checkpoint:
        for name in checkpoint.shapes:
            checkpoint.tensor(name)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_random_bytes_in_a_file_never_cause_another_error(
    make_file: MakeFile, tmp_path: Path, data: st.DataObject
) -> None:
    whole = bytearray(make_file(layout="fp16", layers=1).to_bytes())
    edits = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=8)
    for position, value in data.draw(edits):
        whole[position] = value
    path = tmp_path / "fuzz.tinygpt"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    open_and_read(path)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(10**20), 10**20),
    st.text(max_size=5),
    st.lists(st.integers(-2, 2**40), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@FUZZ
@given(data=st.data())
def test_random_values_in_a_header_never_cause_another_error(
    make_file: MakeFile, tmp_path: Path, data: st.DataObject
) -> None:
    sample = make_file(layout="fp16", offsets=True, layers=1)
    places: list[tuple[Any, Any]] = [(sample.header, key) for key in sample.header]
    places += [(sample.config, key) for key in sample.config]
    places += [(entry, key) for entry in sample.manifest for key in entry]
    places += [(sample.manifest, index) for index in range(len(sample.manifest))]
    for holder, key in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        holder[key] = data.draw(HOSTILE)
    open_and_read(sample.save(tmp_path))
