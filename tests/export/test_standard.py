"""The standard flavour: every operator against ONNX Runtime's own kernel, whole graphs against the references."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from posttrainllm.export import reference
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.standard import to_standard
from posttrainllm.runtime import Session, load
from posttrainllm.runtime.errors import UsageError

Array = NDArray[Any]
RANDOM = np.random.default_rng(11)
CONTRIB = "com.microsoft"


def draw(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def one_node(
    op: str,
    inputs: Mapping[str, Array | None],
    *,
    outputs: int = 1,
    weights: tuple[str, ...] = (),
    free: Mapping[str, Sequence[int | str]] | None = None,
    before: tuple[Any, ...] = (),
    extra: Mapping[str, Array] | None = None,
    domain: str = CONTRIB,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one operator; `weights` are initialisers, `free` shapes of inputs that are not fixed."""
    names = [name if inputs.get(name, 0) is not None else "" for name in inputs]
    results = [f"out{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="node", domain=domain, **attributes)
    arrays = {name: value for name, value in {**inputs, **(extra or {})}.items() if value is not None}
    produced = {name for made in before for name in made.output}
    ports, tensors = [], []
    for name, value in arrays.items():
        if name in weights:
            tensors.append(numpy_helper.from_array(value, name))
        elif name not in produced:
            shape = (free or {}).get(name, list(value.shape))
            ports.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)
            )
    first = next(iter(arrays.values())).ndim
    ranks = (first, 4, 4) if outputs == 3 else (first,) * outputs
    outs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}_{i}" for i in range(rank)])
        for name, rank in zip(results, ranks, strict=True)
    ]
    graph = helper.make_graph([*before, node], "one", ports, outs, tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = ir.serde.deserialize_model(model)
    to_standard(graph)
    result = ir.serde.serialize_model(graph)
    onnx.checker.check_model(result, full_check=True)
    assert {node.domain for node in result.graph.node} == {""}
    assert [(entry.domain, entry.version) for entry in result.opset_import] == [("", 18)]
    return result


def compare(model: onnx.ModelProto, feeds: dict[str, Array], *, outputs: tuple[int, ...] = (0,)) -> None:
    """ONNX Runtime's kernel against the definition, in ONNX Runtime and in onnx's reference evaluator."""
    standard = lowered(model)
    used = {port.name for port in model.graph.input}
    feeds = {name: value for name, value in feeds.items() if name in used}
    expected = session(model).run(None, feeds)
    left = {port.name for port in standard.graph.input}
    found = {
        "ort": session(standard).run(None, {k: v for k, v in feeds.items() if k in left}),
        "reference": ReferenceEvaluator(standard).run(None, feeds),
    }
    for engine, values in found.items():
        for i in outputs:
            np.testing.assert_allclose(values[i], expected[i], rtol=2e-4, atol=2e-4, err_msg=f"{engine} {i}")


def session(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


X, SKIP, GAIN, SHIFT = draw(2, 5, 16), draw(2, 5, 16), draw(16), draw(16)
SIMPLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SkipLayerNormalization": (
        {"x": X, "skip": SKIP, "gain": GAIN, "shift": SHIFT, "bias": draw(16)},
        {"outputs": 4, "epsilon": 1e-5},
    ),
    "SkipLayerNormalization without biases": ({"x": X, "skip": SKIP, "gain": GAIN}, {"epsilon": 1e-3}),
    "SkipSimplifiedLayerNormalization": (
        {"x": X, "skip": SKIP, "gain": GAIN, "bias": SHIFT},
        {"outputs": 4, "epsilon": 1e-5},
    ),
    "SkipSimplifiedLayerNormalization without a bias": (
        {"x": X, "skip": SKIP, "gain": GAIN},
        {"epsilon": 1e-1},
    ),
    "SimplifiedLayerNormalization": ({"x": X, "gain": GAIN}, {"domain": "", "epsilon": 1e-5, "axis": -1}),
    "Gelu": ({"x": 3 * X}, {}),
    "BiasGelu": ({"x": 3 * X, "bias": GAIN}, {}),
    "FastGelu": ({"x": 3 * X}, {}),
    "FastGelu with a bias": ({"x": 3 * X, "bias": GAIN}, {}),
    "QuickGelu": ({"x": 3 * X}, {"alpha": 1.5}),
}


@pytest.mark.parametrize("case", SIMPLE)
def test_an_operator_is_its_definition(case: str) -> None:
    inputs, options = SIMPLE[case]
    model = one_node(case.split()[0], inputs, **options)
    # Means and deviations, outputs 1 and 2 of the skip norms, are for training and are never connected.
    compare(model, inputs, outputs=(0, 3) if options.get("outputs") == 4 else (0,))


def tables(size: int, rotated: int, length: int = 64) -> dict[str, Array]:
    angles = np.outer(np.arange(length), 100.0 ** (-np.arange(0, rotated, 2) / size))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
def test_rotary_embedding(rank: int, interleaved: int, partial: bool) -> None:
    rotated = 16 if partial else 32
    positions = np.array([[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]])
    x = draw(2, 5, 96) if rank == 3 else draw(2, 3, 5, 32)
    inputs = {"x": x, "positions": positions, **tables(32, rotated)}
    options: dict[str, Any] = {"num_heads": 3, "rotary_embedding_dim": rotated} if partial else {}
    model = one_node("RotaryEmbedding", inputs, weights=("cos", "sin"), interleaved=interleaved, **options)
    compare(model, inputs)


ATTENTION: dict[str, dict[str, Any]] = {
    "one key head for each query head": {"kv_heads": 4},
    "groups of two": {"kv_heads": 2},
    "one key head for all": {"kv_heads": 1},
    "packed": {"kv_heads": 2, "packed": True},
    "another scale": {"kv_heads": 4, "scale": 0.11},
    "a window": {"kv_heads": 2, "local_window_size": 3},
    "a soft cap": {"kv_heads": 2, "softcap": 2.0},
    "rotary": {"kv_heads": 2, "rotated": 16},
    "rotary of half a head, packed": {"kv_heads": 4, "rotated": 16, "packed": True, "size": 32},
    "interleaved rotary": {"kv_heads": 2, "rotated": 16, "rotary_interleaved": 1},
    "rotary at given positions": {"kv_heads": 2, "rotated": 16, "positions": True},
    "everything": {
        "kv_heads": 2,
        "packed": True,
        "rotated": 16,
        "local_window_size": 4,
        "softcap": 3.0,
        "scale": 0.3,
    },
}


def attention(
    *, kv_heads: int, size: int = 16, packed: bool = False, rotated: int = 0, positions: bool = False, past: int,
    new: int, **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, Array]]:  # fmt: skip
    """GroupQueryAttention with the subgraph that a decoder has in front of it, and its feeds."""
    heads = 4
    q, k, v = draw(1, new, heads * size), draw(1, new, kv_heads * size), draw(1, new, kv_heads * size)
    total = past + new
    inputs: dict[str, Array | None] = {
        "query": np.concatenate([q, k, v], axis=-1) if packed else q,
        "key": None if packed else k,
        "value": None if packed else v,
        "past_key": draw(1, kv_heads, past, size),
        "past_value": draw(1, kv_heads, past, size),
        "seqlens": np.array([total - 1], np.int32),
        "total": np.array(total, np.int32),
    }
    if rotated:
        inputs |= tables(size, rotated)
        attributes["do_rotary"] = 1
        if positions:
            inputs["positions"] = np.arange(past + 5, total + 5)[None]
    before = (
        helper.make_node("ReduceSum", ["attention_mask", "axis1"], ["valid"], keepdims=0),
        helper.make_node("Sub", ["valid", "one"], ["last"]),
        helper.make_node("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["width"], start=1),
        helper.make_node("Squeeze", ["width", "axis0"], ["scalar"]),
        helper.make_node("Cast", ["scalar"], ["total"], to=TensorProto.INT32),
    )
    extra: dict[str, Array] = {
        "input_ids": np.zeros((1, new), np.int64),
        "attention_mask": np.ones((1, total), np.int64),
        "axis1": np.array([1]),
        "one": np.array([1]),
        "axis0": np.array([0]),
    }
    free: dict[str, Sequence[int | str]] = {"attention_mask": [1, "total"]}
    free |= {name: [1, kv_heads, "past", size] for name in ("past_key", "past_value")}
    model = one_node(
        "GroupQueryAttention",
        inputs,
        outputs=3,
        weights=("cos", "sin", "axis1", "one", "axis0"),
        free=free,
        before=before,
        extra=extra,
        num_heads=heads,
        kv_num_heads=kv_heads,
        **attributes,
    )
    used = {port.name for port in model.graph.input}
    return model, {
        name: value for name, value in (inputs | extra).items() if name in used and value is not None
    }


@pytest.mark.parametrize("lengths", [(0, 7), (6, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_its_definition(case: str, lengths: tuple[int, int]) -> None:
    past, new = lengths
    model, feeds = attention(past=past, new=new, **ATTENTION[case])
    compare(model, feeds, outputs=(0, 1, 2))


@pytest.mark.parametrize("case", ATTENTION)
def test_a_masked_first_position_stands_in_for_no_past(case: str) -> None:
    """What lies in it does not matter, and positions are counted without it."""
    options = ATTENTION[case]
    model, feeds = attention(past=0, new=7, **options)
    expected = session(model).run(None, feeds)
    size, kv_heads = options.get("size", 16), options["kv_heads"]
    hidden = {name: 50 * draw(1, kv_heads, 1, size) for name in ("past_key", "past_value")}
    mask = np.ones((1, 8), np.int64)
    mask[0, 0] = 0
    standard = lowered(model)
    used = {port.name for port in standard.graph.input}
    padded = {
        name: value for name, value in (feeds | hidden | {"attention_mask": mask}).items() if name in used
    }
    engines: list[Any] = [session(standard), ReferenceEvaluator(standard)]
    for found in (engine.run(None, padded) for engine in engines):
        np.testing.assert_allclose(found[0], expected[0], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(found[1][:, :, 1:], expected[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("MatMulNBits", {"K": 16, "N": 16}, "no definition of MatMulNBits in ai.onnx operators"),
        ("SimplifiedLayerNormalization", {"domain": "", "axis": 1}, "another axis than the last"),
    ],
)
def test_what_has_no_definition_is_refused(op: str, options: dict[str, Any], message: str) -> None:
    model = ir.serde.deserialize_model(one_node(op, {"x": X, "gain": GAIN}, **options))
    with pytest.raises(UsageError, match=message):
        to_standard(model)


def test_a_graph_in_fp16_is_refused() -> None:
    model = ir.serde.deserialize_model(one_node("Gelu", {"x": X.astype(np.float16)}))
    with pytest.raises(UsageError, match="input x of FLOAT16; expected a graph in fp32"):
        to_standard(model)


def test_attention_with_sinks_or_a_quantised_cache_is_refused() -> None:
    model, _ = attention(past=1, new=1, kv_heads=4, smooth_softmax=1)
    with pytest.raises(UsageError, match="GroupQueryAttention with smooth_softmax; expected --graph fused"):
        to_standard(ir.serde.deserialize_model(model))


@pytest.fixture(scope="module")
def checkpoint(make_file: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head size 6, which GroupQueryAttention wants padded."""
    path: Path = make_file(vocab=77, width=30, heads=5, ctx=48, middle=40).save(
        tmp_path_factory.mktemp("source")
    )
    return path


@pytest.fixture(scope="module")
def flavours(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    out = tmp_path_factory.mktemp("flavours")
    return {
        name: load(export(checkpoint, out / name, flavour=name).bundle, provider="cpu")
        for name in ("fused", "standard")
    }


IDS = np.random.default_rng(5).integers(0, 77, 40).tolist()


def difference(expected: Array, found: Array) -> float:
    return float(np.abs(expected - found).max() / np.ptp(expected))


def test_both_flavours_give_numpys_logits_however_the_ids_are_split(
    checkpoint: Path, flavours: dict[str, Session]
) -> None:
    with open_checkpoint(checkpoint) as source:
        expected = reference.logits(source, np.array([IDS]), np.arange(40)[None])[0]
    for name, opened in flavours.items():
        for lengths in ([40], [1] * 40, [7, 1, 32], [39, 1]):
            cache, start, rows = opened.new_cache(max_length=40), 0, []
            for length in lengths:
                rows.append(opened.forward(IDS[start : start + length], cache))
                start += length
            assert difference(expected, np.concatenate(rows)) < 1e-4, (name, lengths)
        cache.rewind(11)
        assert difference(expected[11:], opened.forward(IDS[11:], cache)) < 1e-4
        cache.rewind(0)
        assert difference(expected, opened.forward(IDS, cache)) < 1e-4
    assert flavours["standard"].manifest.parity["worst"] < 1e-4


def test_the_graph_is_standard_and_the_reference_evaluator_agrees(flavours: dict[str, Session]) -> None:
    """onnx's own evaluator, fed as the runtime feeds: never a dimension of length zero."""
    path = flavours["standard"].bundle.graph_path
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} == {""}
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    evaluator: Any = ReferenceEvaluator(model)
    kv = flavours["standard"].manifest.kv
    assert (kv.style, kv.padding) == ("growing", 1)
    names = [f"{layer}.{part}" for layer in range(kv.layers) for part in ("key", "value")]
    held = {name: np.zeros((1, kv.heads, 1, kv.head_dim), np.float32) for name in names}
    fused = flavours["fused"]
    cache = fused.new_cache()
    length = 0
    for size in (9, 1, 20):
        mask = np.ones((1, 1 + length + size), np.int64)
        mask[0, 0] = 0
        feeds: dict[str, Array] = {
            "input_ids": np.array([IDS[length : length + size]]),
            "attention_mask": mask,
            "position_ids": np.arange(length, length + size)[None],
        }
        feeds |= {f"past_key_values.{name}": value for name, value in held.items()}
        logits, *grown = evaluator.run(["logits", *(f"present.{name}" for name in names)], feeds)
        held = dict(zip(names, grown, strict=True))
        assert difference(fused.forward(IDS[length : length + size], cache), logits[0]) < 1e-4
        length += size


def test_the_files_say_what_they_are(flavours: dict[str, Session]) -> None:
    opened = flavours["standard"]
    assert opened.manifest.flavour == "standard"
    config = json.loads((opened.bundle.path / "genai_config.json").read_text())
    assert config["search"]["past_present_share_buffer"] is False
    assert set(opened.manifest.config["tensors"]) == set(flavours["fused"].manifest.config["tensors"])


def test_a_flavour_that_does_not_exist_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--graph: 'plain'; expected fused or standard"):
        export(checkpoint, tmp_path / "out", flavour="plain")
    assert not (tmp_path / "out").exists()


@pytest.mark.peer
def test_onnxruntime_genai_runs_the_standard_flavour_too(flavours: dict[str, Session]) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    opened = flavours["standard"]
    params = og.GeneratorParams(model := og.Model(str(opened.bundle.path)))
    params.set_search_options(max_length=40)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([IDS[:6]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    cache, ids = opened.new_cache(), IDS[:6]
    while len(ids) < 40:
        ids = [*ids, int(opened.prefill(ids, cache).argmax())]
    assert generator.get_sequence(0).tolist() == ids
