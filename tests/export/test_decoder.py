"""The graph: its interface, its padding, what it stores, and that it is plain ONNX with external data."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from posttrainllm.export import reference
from posttrainllm.export.attention import padded_head_dim
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.decoder import build_decoder
from posttrainllm.export.exporter import export
from posttrainllm.export.graph import HALF

MakeFile = Callable[..., Any]


def saved(path: Path, folder: Path) -> Path:
    with open_checkpoint(path) as checkpoint:
        ir.save(build_decoder(checkpoint), folder / "model.onnx", external_data="model.onnx.data")
    return folder / "model.onnx"


def session(graph: Path) -> ort.InferenceSession:
    return ort.InferenceSession(graph, providers=["CPUExecutionProvider"])


def test_the_interface_is_the_ecosystems(make_file: MakeFile, tmp_path: Path) -> None:
    run = session(saved(make_file().save(tmp_path), tmp_path))
    inputs = {value.name: (value.type, value.shape) for value in run.get_inputs()}
    outputs = {value.name: (value.type, value.shape) for value in run.get_outputs()}
    cache = ("tensor(float)", ["batch", 2, "capacity", 8])
    layers = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    assert inputs == {
        "input_ids": ("tensor(int64)", ["batch", "new"]),
        "attention_mask": ("tensor(int64)", ["batch", "total"]),
        "position_ids": ("tensor(int64)", ["batch", "new"]),
    } | {f"past_key_values.{name}": cache for name in layers}
    assert outputs == {"logits": ("tensor(float)", ["batch", "new", 11])} | {
        f"present.{name}": cache for name in layers
    }


def test_the_count_of_rows_has_a_default_that_means_all(make_file: MakeFile, tmp_path: Path) -> None:
    """So that other programs, which do not know the input, run the file."""
    run = session(saved(make_file().save(tmp_path), tmp_path))
    assert [(entry.name, entry.shape) for entry in run.get_overridable_initializers()] == [
        ("num_logits_to_keep", [1])
    ]
    feeds: dict[str, Any] = {
        entry.name: np.zeros((1, 2, 4, 8), np.float32)
        for entry in run.get_inputs()
        if entry.name.startswith("past")
    }
    feeds |= {name: np.array([[3, 1, 2]]) for name in ("input_ids", "position_ids")}
    feeds["attention_mask"] = np.ones((1, 3), np.int64)
    (everything,) = run.run(["logits"], feeds)
    assert everything.shape == (1, 3, 11)
    for rows in (0, 1, 2, 3, 9):
        (last,) = run.run(["logits"], feeds | {"num_logits_to_keep": np.array([rows])})
        np.testing.assert_allclose(last, everything[:, -rows:], rtol=0, atol=1e-5)


def test_the_file_passes_the_onnx_checker(make_file: MakeFile, tmp_path: Path) -> None:
    graph = saved(make_file().save(tmp_path), tmp_path)
    onnx.checker.check_model(str(graph))
    model = onnx.load(str(graph), load_external_data=False)
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 18, "com.microsoft": 1}


@pytest.mark.parametrize(
    ("width", "heads", "padded"), [(6, 2, 8), (6, 6, 8), (8, 1, 8), (18, 2, 16), (32, 2, 16)]
)
def test_heads_are_padded_to_a_multiple_of_eight(
    make_file: MakeFile, tmp_path: Path, width: int, heads: int, padded: int
) -> None:
    """Padding is zeros after each head's channels, in q, k, v and o; the scale is that of the true size."""
    sample = make_file(width=width, heads=heads)
    model = onnx.load(str(saved(sample.save(tmp_path), tmp_path)))
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    true = width // heads
    packed = arrays["model.layers.1.self_attn.qkv_proj.weight"].reshape(width, 3, heads, padded)
    biases = arrays["model.layers.1.self_attn.qkv_proj.bias"].reshape(3, heads, padded)
    for index, letter in enumerate("qkv"):
        source = sample.tensors[f"blocks.1.attn.{letter}_proj.weight"]
        np.testing.assert_array_equal(packed[:, index, :, :true].reshape(width, width), source.T)
        bias = sample.tensors[f"blocks.1.attn.{letter}_proj.bias"]
        np.testing.assert_array_equal(biases[index, :, :true].ravel(), bias)
    out = arrays["model.layers.1.self_attn.o_proj.weight"].reshape(heads, padded, width)
    np.testing.assert_array_equal(
        out[:, :true].reshape(width, width), sample.tensors["blocks.1.attn.o_proj.weight"].T
    )
    assert not packed[..., true:].any()
    assert not biases[..., true:].any()
    assert not out[:, true:].any()
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    scales = [attribute.f for node in nodes for attribute in node.attribute if attribute.name == "scale"]
    assert scales == pytest.approx([1 / math.sqrt(true)] * 2)


def test_the_tied_table_is_stored_once(make_file: MakeFile, tmp_path: Path) -> None:
    """One initialiser feeds the embedding and the head, and the file holds nothing twice."""
    sample = make_file(vocab=3000, width=16, heads=2)
    graph = saved(sample.save(tmp_path), tmp_path)
    model = onnx.load(str(graph), load_external_data=False)
    users = [node.op_type for node in model.graph.node if "model.embed_tokens.weight" in node.input]
    assert sorted(users) == ["Gather", "Gemm"]
    weights = sum(tensor.nbytes for tensor in sample.tensors.values())
    assert (tmp_path / "model.onnx.data").stat().st_size <= weights
    assert graph.stat().st_size < 40_000


def test_external_data_is_one_file_named_relatively(make_file: MakeFile, tmp_path: Path) -> None:
    """The folder can be moved, and the proto holds no weights of note."""
    graph = saved(make_file(width=32, middle=64).save(tmp_path), tmp_path)
    model = onnx.load(str(graph), load_external_data=False)
    places = {
        entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"
    }
    assert places == {"model.onnx.data"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).rename(moved / name)
    session(moved / "model.onnx")


def test_a_batch_of_two_gives_each_row_its_own_logits(make_file: MakeFile, tmp_path: Path) -> None:
    """Batch 2, a prompt and then single steps (the operator takes no chunk onto a past in a batch)."""
    path = make_file(ctx=16).save(tmp_path)
    run = session(saved(path, tmp_path))
    ids = np.random.default_rng(5).integers(0, 11, (2, 9))
    positions = np.broadcast_to(np.arange(9), ids.shape)
    with open_checkpoint(path) as checkpoint:
        expected = reference.logits(checkpoint, ids, positions)
        config = checkpoint.config
    shape = (2, config.kv_heads, 12, padded_head_dim(config))
    names = [f"{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    cache = {name: np.zeros(shape, np.float32) for name in names}
    for start, end in [(0, 6), (6, 7), (7, 8), (8, 9)]:
        feeds = {
            "input_ids": ids[:, start:end],
            "attention_mask": np.ones((2, end), np.int64),
            "position_ids": np.ascontiguousarray(positions[:, start:end]),
        }
        past = {f"past_key_values.{name}": value for name, value in cache.items()}
        logits, *present = run.run(None, feeds | past)
        cache = dict(zip(names, present, strict=True))
        np.testing.assert_allclose(logits, expected[:, start:end], atol=2e-5)


def test_building_reads_only_what_the_graph_itself_holds(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices stay in the file until they are written."""
    with open_checkpoint(make_file(width=16, middle=64).save(tmp_path)) as checkpoint:
        read = checkpoint.tensor
        seen: list[str] = []

        def counted(name: str) -> Any:
            seen.append(name)
            return read(name)

        monkeypatch.setattr(checkpoint, "tensor", counted)
        model = build_decoder(checkpoint)
        tables = [name for name in seen if len(checkpoint.shapes[name]) > 1]
    assert tables == []
    assert len(model.graph.initializers) > 20


def test_fp16_weights_are_stored_in_half_the_bytes_and_compute_the_same(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The stored halves, widened by NumPy, are the source's values bit for bit; so are the logits."""
    source = make_checkpoint(
        d_model=24, heads=2, layers=1, ctx=64, dtype="fp16"
    )  # heads padded from 12 to 16
    bundle = export(source, tmp_path / "half").bundle
    stored = {
        name.removesuffix(HALF): value.const_value.numpy()
        for name, value in ir.load(bundle / "model.onnx").graph.initializers.items()
        if name.endswith(HALF) and value.const_value is not None
    }
    with open_checkpoint(source) as checkpoint:
        for name in ("model.embed_tokens.weight", "model.norm.bias"):
            assert stored[name].dtype == np.float16
            np.testing.assert_array_equal(stored[name].astype(np.float32), checkpoint.tensor(name))
        packed = stored["model.layers.0.self_attn.qkv_proj.weight"].astype(np.float32)
        query = packed[:, :32].reshape(24, 2, 16)[:, :, :12].reshape(24, 24).T
        np.testing.assert_array_equal(query, checkpoint.tensor("model.layers.0.self_attn.q_proj.weight"))
        weights = sum(int(np.prod(shape)) for shape in checkpoint.shapes.values())
    assert 2 * weights < (bundle / "model.onnx.data").stat().st_size + 8192 < 3 * weights
