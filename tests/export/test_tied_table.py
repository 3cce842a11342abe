"""A table that is embedding and head at once is stored once, whatever the source, the precision and the flavour."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from posttrainllm.export.exporter import export
from posttrainllm.export.tied_tables import share_tables

safetensors = pytest.importorskip("safetensors.numpy")

VOCAB, WIDTH = 3000, 64
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 259,
    "tie_word_embeddings": True,
}


@pytest.fixture
def make_source(tmp_path: Path, tokenizer_files: Callable[[Path], None]) -> Callable[..., Path]:
    """make_source(head=None | "equal" | "other", **config) -> the folder of a Llama of one layer."""

    def make(head: str | None = None, **config: Any) -> Path:
        rng = np.random.default_rng(3)
        block = "model.layers.0"
        shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
        shapes |= {f"{block}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        shapes |= {f"{block}.self_attn.{letter}_proj.weight": (WIDTH, WIDTH) for letter in "qo"}
        shapes |= {f"{block}.self_attn.{letter}_proj.weight": (WIDTH // 2, WIDTH) for letter in "kv"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (96, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (WIDTH, 96)}
        tensors = {
            name: (rng.standard_normal(shape) / 8 + (len(shape) == 1)).astype(np.float32)
            for name, shape in shapes.items()
        }
        if head is not None:
            table = tensors["model.embed_tokens.weight"]
            tensors["lm_head.weight"] = table.copy() if head == "equal" else table[::-1].copy()
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
        safetensors.save_file(tensors, folder / "model.safetensors")
        tokenizer_files(folder)
        return folder

    return make


def tables(bundle: Path) -> list[str]:
    """The initialisers that have a row, a block or a scale for every id."""
    model = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    return sorted(tensor.name for tensor in model.graph.initializer if VOCAB in tensor.dims)


TABLE = "model.embed_tokens.weight"


@pytest.mark.parametrize("head", [None, "equal"])
@pytest.mark.parametrize(
    ("precision", "flavour", "bits", "names"),
    [
        ("fp32", "fused", 32, [TABLE]),
        ("fp32", "standard", 32, [TABLE]),
        ("fp16", "fused", 16, [TABLE]),
        ("int8", "fused", 8.5, [f"{TABLE}.integers", f"{TABLE}.scales"]),
        (
            "int4,all=int4",
            "fused",
            5.5,
            [f"{TABLE}.{part}" for part in ("integers", "rows.offsets", "scales", "zero_points")],
        ),
    ],
)
def test_one_table_for_both_uses(
    make_source: Callable[..., Path],
    tmp_path: Path,
    head: str | None,
    precision: str,
    flavour: str,
    bits: float,
    names: list[str],
) -> None:
    """The file is no larger than the table and the layer in as many bits, even where the source holds two."""
    report = export(make_source(head), tmp_path / "out", precision=precision, flavour=flavour)
    assert report.warnings == ()
    assert tables(report.bundle) == names
    others = 2 * WIDTH * WIDTH + WIDTH * WIDTH + 3 * WIDTH * 96 + 3 * WIDTH
    assert report.sizes["model.onnx.data"] < VOCAB * WIDTH * bits / 8 * 1.15 + 4 * others


def test_a_head_that_differs_is_a_warning_where_the_config_ties_it(
    make_source: Callable[..., Path], tmp_path: Path
) -> None:
    report = export(make_source("other"), tmp_path / "out", precision="fp32")
    assert "lm_head.weight differs from model.embed_tokens.weight" in report.warnings[0]


def test_a_head_of_its_own_is_stored(make_source: Callable[..., Path], tmp_path: Path) -> None:
    report = export(make_source("other", tie_word_embeddings=False), tmp_path / "out", precision="fp32")
    assert tables(report.bundle) == ["lm_head.weight", TABLE]


def head_of(table: Any, weight: Any, *, opset: int) -> onnx.ModelProto:
    """ids -> rows of `table` -> times `weight`: what torch's exporter writes, in little."""
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["hidden"]),
        onnx.helper.make_node("MatMul", ["hidden", "weight"], ["logits"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "head",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "n"])],
        [
            onnx.helper.make_tensor_value_info(
                "logits", onnx.TensorProto.FLOAT, ["batch", "n", weight.shape[1]]
            )
        ],
        [onnx.numpy_helper.from_array(table, "table"), onnx.numpy_helper.from_array(weight, "weight")],
    )
    return onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", opset)])


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("tied", [True, False])
def test_a_turned_copy_in_a_graph_of_others_gives_way_to_the_table(tied: bool, opset: int) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 50)).astype(np.float32)  # square: only the values tell a copy
    weight = np.ascontiguousarray(table.T) if tied else table
    proto = head_of(table, weight, opset=opset)
    model = ir.from_proto(proto)
    assert share_tables(model) == int(tied)
    shared = ir.to_proto(model)
    onnx.checker.check_model(shared, full_check=True)
    assert len([t for t in shared.graph.initializer if len(t.dims) == 2]) == (1 if tied else 2)
    ids = rng.integers(0, 50, (3, 7))
    evaluators: list[Any] = [onnx.reference.ReferenceEvaluator, run_here]
    for evaluate in evaluators:
        (found,) = evaluate(shared).run(None, {"ids": ids})
        expected = table[ids] @ weight
        assert np.abs(found - expected).max() < 1e-5 * np.ptp(expected)


def run_here(model: onnx.ModelProto) -> Any:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
