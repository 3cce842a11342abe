"""GGUF blocks carried over without rounding: decided by the gguf package's own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from posttrainllm.export import reference
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.gguf_blocks import TYPES, BlockType
from posttrainllm.export.kept import carried_over, form_of
from posttrainllm.export.precision import block_source, parse_precision
from posttrainllm.export.quantize import QuantisedWeight, dequantise
from posttrainllm.runtime import load
from posttrainllm.runtime.errors import CheckpointError

gguf = pytest.importorskip("gguf")

QUANTISED = [kind for kind in TYPES.values() if kind.unpack is not None]


def quantised_rows(kind: BlockType, rows: int = 6, columns: int = 1024) -> NDArray[np.uint8]:
    """Blocks of normal weights where the package can write the type, else random bits under finite scales."""
    rng = np.random.default_rng(kind.number)
    values = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    try:
        return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.number)))
    except NotImplementedError:
        blocks = rng.integers(0, 256, (rows, columns // kind.count * kind.nbytes), dtype=np.uint8)
        halves = {
            "Q2_K": (80, 82),
            "Q3_K": (108,),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
            "Q6_K": (208,),
            "IQ4_NL": (0,),
        }
        for first in halves[kind.name]:
            scale = rng.uniform(1e-4, 1e-2, (rows, columns // kind.count)).astype(np.float16)
            for byte in range(2):
                blocks[:, first + byte :: kind.nbytes] = scale.view(np.uint8)[:, byte::2]
        return blocks


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_the_values_are_the_files_exactly(kind: BlockType) -> None:
    """As real numbers integer, scale and offset are the file's; in float32 they are ggml's to its last bit or two."""
    blocks = quantised_rows(kind)
    weight = carried_over(blocks, kind)
    form = form_of(kind)
    assert (weight.zero_points is not None, weight.offsets is not None) == (form.zero_points, form.offsets)
    assert kind.unpack is not None
    grid = kind.unpack(blocks.reshape(-1, kind.nbytes))
    exact: NDArray[Any] = grid.integers * grid.scale[..., None].astype(np.float64)
    if grid.offset is not None:
        exact = exact + grid.offset[..., None]
    centred = weight.unpacked().astype(np.int64) - weight.unpacked_zero_points()[..., None]
    ours: NDArray[Any] = centred * weight.scales[..., None].astype(np.float64)
    if weight.offsets is not None:
        ours = ours + weight.offsets[..., None]
    np.testing.assert_array_equal(ours.reshape(-1), exact.reshape(-1))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.number))
    np.testing.assert_allclose(dequantise(weight), expected, rtol=0, atol=3e-7 * np.abs(expected).max())
    if not form.offsets:
        np.testing.assert_array_equal(dequantise(weight), expected)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_scales_fit_the_type_they_are_stored_in(kind: BlockType) -> None:
    weight = carried_over(quantised_rows(kind), kind)
    stored = weight.scales.astype(form_of(kind).scales)
    np.testing.assert_array_equal(stored.astype(np.float32), weight.scales)


def test_extreme_minima_are_kept_too() -> None:
    """Scale and minimum so far apart that float32 has no room for their sum: the minimum stays by itself."""
    kind = next(kind for kind in QUANTISED if kind.name == "Q4_1")
    block = np.zeros((1, 20), np.uint8)
    block[0, :4] = np.array([3.0001e-4, -60000], np.float16).view(np.uint8)
    block[0, 4:] = np.arange(0x10, 0x20)
    weight = carried_over(block, kind)
    assert weight.offsets is not None
    assert weight.offsets[0, 0] == -60000
    assert weight.unpacked_zero_points()[0, 0] == 0
    zeros = carried_over(np.zeros((1, 20), np.uint8), kind)
    assert not dequantise(zeros).any()


HIDDEN, MIDDLE, VOCAB = 256, 512, 60
MATRICES = {
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (MIDDLE, HIDDEN),
    "blk.0.ffn_up": (MIDDLE, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, MIDDLE),
}


def save(path: Path, kinds: dict[str, BlockType], default: BlockType) -> Path:
    """A llama of one layer, its matrices in blocks of `kinds`, else `default`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, (rows, columns) in MATRICES.items():
        kind = kinds.get(name, default)
        raw = gguf.GGMLQuantizationType(kind.number)
        writer.add_tensor(f"{name}.weight", quantised_rows(kind, rows, columns), raw_dtype=raw)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(name: str) -> BlockType:
    return next(kind for kind in QUANTISED if kind.name == name)


MIXTURES: list[tuple[str, dict[str, str]]] = [(kind.name, {}) for kind in QUANTISED]
MIXTURES += [
    ("Q4_1", {"token_embd": "Q8_0"}),
    ("Q4_K", {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    ("Q2_K", {"blk.0.attn_k": "Q4_0", "blk.0.attn_v": "Q3_K"}),
]


@pytest.mark.parametrize(("default", "others"), MIXTURES, ids=lambda value: str(value))
def test_a_file_is_exported_with_its_own_values(tmp_path: Path, default: str, others: dict[str, str]) -> None:
    """Integers and scales in the bundle are the file's; logits are those of the values that ggml sees."""
    kinds = {name: named(kind) for name, kind in others.items()}
    source = save(tmp_path / "model.gguf", kinds, named(default))
    report = export(source, tmp_path / "out")  # kept because it is quantised
    assert report.manifest.precision == "keep"
    assert report.manifest.parity["worst"] < 2e-5
    graph = onnx.load(str(tmp_path / "out" / "model.onnx"))
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in graph.graph.initializer}
    for theirs, ours in (("ffn_down", "mlp.down_proj"), ("ffn_gate", "mlp.gate_proj")):
        kind = kinds.get(f"blk.0.{theirs}", named(default))
        form, shape = form_of(kind), MATRICES[f"blk.0.{theirs}"]
        prefix = f"model.layers.0.{ours}.weight"
        offsets = arrays.get(f"{prefix}.offsets")
        stored = QuantisedWeight(
            form.bits,
            form.block,
            shape,
            arrays[f"{prefix}.integers"],
            arrays[f"{prefix}.scales"].astype(np.float32),
            arrays.get(f"{prefix}.zero_points"),
            None if offsets is None else offsets.T,
        )
        raw = gguf.GGMLQuantizationType(kind.number)
        expected = gguf.quants.dequantize(quantised_rows(kind, *shape), raw)
        tolerance = 0 if offsets is None else 3e-7 * np.abs(expected).max()
        np.testing.assert_allclose(dequantise(stored), expected, rtol=0, atol=tolerance)
    ids = np.array([[1, 59, 7, 7, 30, 2]])
    with open_checkpoint(source) as checkpoint:  # dequantised by the reader, not by us
        wanted: Any = reference.logits(checkpoint, ids, np.arange(6)[None])[0]
    session = load(tmp_path / "out", provider="cpu")
    found = session.forward(ids[0].tolist(), session.new_cache())
    assert np.abs(found - wanted).max() < 0.1 * (wanted.max() - wanted.min())  # activations in int8


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "model.gguf", {}, named("Q4_0"))
    content = bytearray(source.read_bytes())
    block = quantised_rows(named("Q4_0"), HIDDEN, MIDDLE)[5, 18:36].tobytes()
    at = content.find(block)
    assert at > 0
    content[at : at + 2] = np.array(np.nan, np.float16).tobytes()
    source.write_bytes(content)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_in_few_enough_bits_is_not_rounded_again(tmp_path: Path) -> None:
    """int8 of a file in Q4_1 and Q8_0 is that file's values; int4 everywhere rounds its Q8_0 only."""
    kinds = {"token_embd": named("Q8_0"), "blk.0.ffn_up": named("Q8_0")}
    source = save(tmp_path / "model.gguf", kinds, named("Q4_1"))
    with open_checkpoint(source) as checkpoint:
        down, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up"))
        for precision, same in (("int8", (True, True)), ("int4,all=int4", (True, False))):
            blocks = block_source(parse_precision(precision), checkpoint)
            assert blocks is not None
            for name, expected in zip((down, up), same, strict=True):
                values = checkpoint.tensor(name)
                error = np.abs(dequantise(blocks.weight(name)) - values).max()
                assert (error <= 3e-7 * np.abs(values).max()) == expected
            assert blocks.form("model.norm.weight") is None
    assert export(source, tmp_path / "out", precision="int4").manifest.precision == "int4"
