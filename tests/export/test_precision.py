"""Quantised exports of tiny models: what --precision takes, what is written, and that the logits are those of
the dequantised weights; decided by plain Python over NumPy's values, and by ONNX Runtime and onnxruntime-genai."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.precision import PARTS, Recipe, default_precision, parse_precision
from posttrainllm.export.quantize import Scheme, dequantise, quantise
from posttrainllm.runtime import load
from posttrainllm.runtime.errors import CheckpointError, UsageError

MakeFile = Callable[..., Any]
MakeCheckpoint = Callable[..., Path]
OURS = {"attn.q_proj": "q_proj", "attn.k_proj": "k_proj", "attn.v_proj": "v_proj", "attn.o_proj": "o_proj"}
OURS |= {"mlp.fc_in": "up_proj", "mlp.fc_out": "down_proj", "token_embedding": "embed_tokens"}


def test_a_recipe_is_a_precision_with_exceptions() -> None:
    recipe = parse_precision("int4:64,embed_tokens=fp32,o_proj=int8:128")
    block = "model.layers.3.self_attn"
    assert recipe.precision == "int4"
    assert recipe.of(f"{block}.q_proj.weight") == Scheme(4, 64)
    assert recipe.of(f"{block}.o_proj.weight") == Scheme(8, 128, symmetric=True, search=False)
    assert recipe.of("model.embed_tokens.weight") is None
    for kept in ("model.norm.weight", "model.embed_positions.weight", f"{block}.q_proj.bias"):
        assert recipe.of(kept) is None


def test_four_bits_leave_the_sensitive_parts_in_eight_unless_told() -> None:
    def bits(text: str) -> dict[str, int]:
        schemes = {part: parse_precision(text).of(f"model.layers.0.x.{part}.weight") for part in PARTS}
        return {part: scheme.bits for part, scheme in schemes.items() if scheme}

    assert {part for part, width in bits("int4").items() if width == 4} == {"q_proj", "gate_proj", "up_proj"}
    assert set(bits("int4,all=int4").values()) == {4}
    assert set(bits("int8").values()) == {8}
    assert bits("fp32") == bits("fp16") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int3",
        "int4:48",
        "fp32:32",
        "int4:",
        "int8,x=int4",
        "int8,embed_tokens",
        "int8,lm_head=keep",
        "fp16,lm_head=int8",
        "keep,lm_head=int8",
        "INT8",
        "int8,,",
        "int8,all=fp16",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--precision"):
        parse_precision(text)


def test_what_a_source_lacks_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(d_model=32, heads=4, layers=1, ctx=64)
    for text, expected in (("keep", "plain floats"), ("int8,lm_head=fp32", "token table")):
        with pytest.raises(UsageError, match=expected):
            export(source, tmp_path / "out", precision=text)
    assert not list(tmp_path.iterdir())
    with open_checkpoint(source) as checkpoint:
        assert default_precision(checkpoint) == "fp32"


def test_weights_too_small_for_scales_are_refused(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    name = "blocks.0.mlp.fc_in.weight"
    file = make_file(tensors=sample.tensors | {name: sample.tensors[name] * np.float32(1e-7)})
    with pytest.raises(CheckpointError, match=r"up_proj.*float16"):
        export(file.save(tmp_path), tmp_path / "out", precision="int8")
    assert not (tmp_path / "out").exists()


def rounded(tensors: dict[str, NDArray[np.float32]], recipe: Recipe) -> dict[str, NDArray[np.float32]]:
    """The logical tensors of a `.tinygpt` with what a recipe makes of them."""
    found = dict(tensors)
    for name, values in tensors.items():
        module, _, kind = name.rpartition(".")
        part = next((ours for theirs, ours in OURS.items() if module.endswith(theirs)), "")
        scheme = recipe.of(f"model.{part}.weight") if kind == "weight" else None
        if scheme:
            found[name] = dequantise(quantise(values, scheme))
    return found


def with_float_activations(bundle: Path) -> None:
    model = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    onnx.save(model, str(bundle / "model.onnx"))
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"]["model.onnx"]["nbytes"] = (bundle / "model.onnx").stat().st_size
    (bundle / "bundle.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("int8", {}),  # every convenient number avoided: heads of 3, an MLP of 5, blocks of one piece
        ("int4", {"width": 40, "heads": 2, "middle": 70}),  # padded heads of 20, short blocks
        ("fp32,embed_tokens=int4", {"width": 40, "heads": 2}),  # a table with zero points and a short block
        ("int4:32,all=int4", {"width": 64, "heads": 4, "middle": 96}),
        ("int8:32,embed_tokens=fp32", {"width": 64, "heads": 4}),
        ("fp32,embed_tokens=int4:64,q_proj=int8", {"width": 24, "heads": 3, "layers": 1}),
    ],
)
def test_the_logits_are_those_of_the_dequantised_weights(
    make_file: MakeFile, plain: Callable[..., Any], tmp_path: Path, precision: str, sizes: dict[str, int]
) -> None:
    """With float32 activations, by plain Python; and with rounded ones not far from it."""
    file = make_file(**sizes)
    heads = sizes.get("heads", 2)
    bundle = export(file.save(tmp_path), tmp_path / "out", precision=precision).bundle
    ids = [3, 1, 4, 1, 5, 9, 2]
    expected = np.array(plain(rounded(file.tensors, parse_precision(precision)), heads, ids))
    spread = expected.max() - expected.min()

    def distance() -> float:
        session = load(bundle, provider="cpu")
        cache = session.new_cache()
        rows = [*session.forward(ids[:4], cache), *session.forward(ids[4:5], cache)]
        rows += [*session.forward(ids[5:], cache)]
        return float(np.abs(np.array(rows) - expected).max() / spread)

    assert distance() < 0.1
    with_float_activations(bundle)
    assert distance() < 1e-5


def test_the_record_says_what_was_written(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(d_model=64, heads=4, layers=2, ctx=64)
    whole = export(source, tmp_path / "fp32")
    sizes = {"fp32": whole.sizes["model.onnx.data"]}
    for precision in ("int8", "int4", "int4,all=int4", "fp16"):
        report = export(source, tmp_path / precision, precision=precision)
        manifest = report.manifest
        assert (manifest.precision, manifest.config["recipe"]) == (precision.split(",")[0], precision)
        parity = manifest.parity
        assert parity["worst"] <= parity["tolerance"] == (2e-3 if precision == "fp16" else 1e-4)
        assert ("activation_rounding" in parity) == (precision != "fp16")
        assert ("dequantised" in parity["reference"]) == (precision != "fp16")
        sizes[precision] = report.sizes["model.onnx.data"]
        assert sorted(report.sizes) == sorted(whole.sizes)  # nothing that was made for the checks is left
    assert sizes["fp32"] > 1.9 * sizes["fp16"]
    assert sizes["fp16"] > sizes["int8"] > sizes["int4"] > sizes["int4,all=int4"]


def test_a_tied_table_is_stored_once(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Quantised: one set of integers for the embedding and the head."""
    source = make_checkpoint(vocab=300, d_model=64, layers=1, ctx=64)
    bundle = export(source, tmp_path / "out", precision="int8").bundle
    model = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    tables = [array.name for array in model.graph.initializer if 300 in array.dims]
    assert sorted(tables) == [f"model.embed_tokens.weight.{part}" for part in ("integers", "scales")]


def test_half_precision_keeps_keys_and_values_in_half(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(d_model=48, heads=2, layers=2, ctx=64, dtype="fp16")
    bundle = export(source, tmp_path / "out", precision="fp16").bundle
    session = load(bundle, provider="cpu")
    assert session.manifest.kv.dtype == "float16"
    whole = load(export(source, tmp_path / "fp32").bundle, provider="cpu")
    ids = list(b"Half of it")
    found, expected = (each.forward(ids, each.new_cache()) for each in (session, whole))
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 2e-3 * (expected.max() - expected.min())
    model = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    kinds = {array.data_type for array in model.graph.initializer}
    assert kinds == {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}


def test_weights_beyond_half_are_refused(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file(width=16)
    name = "blocks.1.mlp.fc_in.weight"
    file = make_file(tensors=sample.tensors | {name: np.full_like(sample.tensors[name], 7e4)})
    with pytest.raises(CheckpointError, match=r"up_proj.*float16"):
        export(file.save(tmp_path), tmp_path / "out", precision="fp16")
    assert not (tmp_path / "out").exists()


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_genai_runs_it_to_the_same_ids(
    make_checkpoint: MakeCheckpoint, bpe_tokenizer: Path, tmp_path: Path, precision: str
) -> None:
    genai = pytest.importorskip("onnxruntime_genai")
    source = make_checkpoint(vocab=400, d_model=64, heads=4, layers=2, ctx=64)
    bundle = export(source, tmp_path / "out", precision=precision, tokenizer=bpe_tokenizer).bundle
    session = load(bundle, provider="cpu")
    prompt = [5, 17, 301]
    cache, expected = session.new_cache(), list(prompt)
    feed = prompt
    for _ in range(12):
        feed = [int(session.forward(feed, cache)[-1].argmax())]
        expected += feed
    model = genai.Model(str(bundle))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=len(expected), do_sample=False)
    generator = genai.Generator(model, options)
    generator.append_tokens(prompt)
    while not generator.is_done() and len(generator.get_sequence(0)) < len(expected):
        generator.generate_next_token()
    found = generator.get_sequence(0).tolist()
    assert found == expected[: len(found)]
    assert len(found) > len(prompt)
