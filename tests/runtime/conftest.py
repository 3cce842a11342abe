"""Model folders that other programs write: a hand-made decoder in optimum's style, and onnxruntime-genai's builder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]
VOCAB, WIDTH, HEADS, KV_HEADS, SIZE, MIDDLE, LAYERS, CONTEXT = 420, 32, 4, 2, 16, 48, 2, 128
EPS, THETA = 1e-5, 10000.0


def llama_weights(seed: int = 0) -> dict[str, Array]:
    """A Llama of two layers by transformers' names; linear weights are [out, in]."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * SIZE, WIDTH),
            ("self_attn.k_proj", KV_HEADS * SIZE, WIDTH),
            ("self_attn.v_proj", KV_HEADS * SIZE, WIDTH),
            ("self_attn.o_proj", WIDTH, HEADS * SIZE),
            ("mlp.gate_proj", MIDDLE, WIDTH),
            ("mlp.up_proj", MIDDLE, WIDTH),
            ("mlp.down_proj", WIDTH, MIDDLE),
        ):
            shapes[f"{block}.{name}.weight"] = (rows, columns)
    weights: dict[str, Array] = {
        name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")]
    for name in (*norms, "model.norm"):
        weights[f"{name}.weight"] = (1 + rng.standard_normal(WIDTH) / 4).astype(np.float32)
    return weights


def rotary_tables() -> tuple[Array, Array]:
    """Cosines and sines [context, head size] of Llama's rotary positions."""
    angles = np.outer(np.arange(CONTEXT), THETA ** (-np.arange(0, SIZE, 2) / SIZE))
    both = np.concatenate([angles, angles], axis=1)
    return np.cos(both), np.sin(both)


def llama_logits(weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Logits [n, V] in float64, by the definition: the decider."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    cos, sin = (table[: len(ids)] for table in rotary_tables())

    def norm(x: Array, name: str) -> Array:
        scaled: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"]
        return scaled

    def heads(x: Array, name: str, count: int, *, rotate: bool) -> Array:
        y = (x @ w[f"{name}.weight"].T).reshape(len(ids), count, SIZE).transpose(1, 0, 2)
        if rotate:
            turned = np.concatenate([-y[..., SIZE // 2 :], y[..., : SIZE // 2]], axis=-1)
            y = y * cos + turned * sin
        return np.repeat(y, HEADS // count, axis=0)

    hidden = w["model.embed_tokens.weight"][list(ids)]
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        x = norm(hidden, f"{block}.input_layernorm")
        q = heads(x, f"{block}.self_attn.q_proj", HEADS, rotate=True)
        k = heads(x, f"{block}.self_attn.k_proj", KV_HEADS, rotate=True)
        v = heads(x, f"{block}.self_attn.v_proj", KV_HEADS, rotate=False)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(SIZE)
        scores[:, np.triu(np.ones((len(ids), len(ids)), bool), 1)] = -np.inf
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (share / share.sum(-1, keepdims=True)) @ v
        hidden = (
            hidden + mixed.transpose(1, 0, 2).reshape(len(ids), -1) @ w[f"{block}.self_attn.o_proj.weight"].T
        )
        x = norm(hidden, f"{block}.post_attention_layernorm")
        gate = x @ w[f"{block}.mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ w[f"{block}.mlp.up_proj.weight"].T)
        hidden = hidden + inner @ w[f"{block}.mlp.down_proj.weight"].T
    logits: Array = norm(hidden, "model.norm") @ w["lm_head.weight"].T
    return logits


@dataclass
class Style:
    """How an exporter may have written the same decoder."""

    ids: str = "INT64"
    mask: str | None = "INT64"
    positions: bool = True
    kv: str = "FLOAT"
    logits: str = "FLOAT"
    one_row: bool = False
    row_count: int | None = None  # rank of the input num_logits_to_keep
    default_input: bool = False  # an input nobody has to feed
    extra_input: str = ""
    free_sizes: bool = False
    layers: Sequence[int] = range(LAYERS)
    new: int | str = "new"
    past: int | str = "past"
    batch: int | str = "batch"


class Drawing:
    """An ONNX graph while it is being drawn, in ai.onnx operators of opset 17."""

    def __init__(self, weights: Mapping[str, Array], style: Style) -> None:
        self.weights, self.style = weights, style
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def linear(self, x: str, name: str) -> str:
        return self.op("MatMul", x, self.const(self.weights[f"{name}.weight"].T, np.float32))

    def norm(self, x: str, name: str) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.const(EPS, np.float32)))
        gain = self.const(self.weights[f"{name}.weight"], np.float32)
        return self.op("Mul", self.op("Div", x, root), gain)

    def cast(self, x: str, dtype: str, name: str = "") -> str:
        from onnx import TensorProto

        return self.op("Cast", x, to=getattr(TensorProto, dtype), name=name)

    def heads(self, x: str, count: int) -> str:
        split = self.op("Reshape", x, self.const([0, 0, count, SIZE]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotate(self, x: str, cos: str, sin: str) -> str:
        half = [self.const([SIZE // 2]), self.const([SIZE])]
        upper = self.op("Slice", x, half[0], half[1], self.const([3]))
        lower = self.op("Slice", x, self.const([0]), half[0], self.const([3]))
        turned = self.op("Concat", self.op("Neg", upper), lower, axis=-1)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))


def draw_decoder(weights: Mapping[str, Array], style: Style) -> Any:
    """An ONNX model that concatenates its keys and values, as optimum exports them."""
    from onnx import TensorProto, helper, numpy_helper

    d = Drawing(weights, style)
    ids = d.cast("input_ids", "INT64")
    new = d.op("Shape", ids, start=1, end=2)
    first = style.layers[0]
    past = d.op("Shape", f"past_key_values.{first}.key", start=2, end=3)
    total = d.op("Add", past, new)
    zero, one = d.const([0]), d.const(1)
    rows = d.op("Range", d.op("Squeeze", past, zero), d.op("Squeeze", total, zero), one)
    columns = d.op("Range", d.const(0), d.op("Squeeze", total, zero), one)
    allowed = d.op("LessOrEqual", columns, d.op("Unsqueeze", rows, d.const([1])))
    if style.mask:
        seen = d.op("Unsqueeze", d.cast("attention_mask", "BOOL"), d.const([1, 2]))
        allowed = d.op("And", allowed, seen)
    bias = d.op("Where", allowed, d.const(0, np.float32), d.const(-1e9, np.float32))
    places = d.cast("position_ids", "INT64") if style.positions else d.op("Unsqueeze", rows, zero)
    cos, sin = (
        d.op("Unsqueeze", d.op("Gather", d.const(table, np.float32), places), d.const([1]))
        for table in rotary_tables()
    )
    hidden = d.op("Gather", d.const(weights["model.embed_tokens.weight"], np.float32), ids)
    outputs = []
    for i, number in enumerate(style.layers):
        block = f"model.layers.{i}"
        x = d.norm(hidden, f"{block}.input_layernorm")
        q, k, v = (
            d.heads(d.linear(x, f"{block}.self_attn.{part}_proj"), count)
            for part, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        grown = []
        for part, value in (("key", d.rotate(k, cos, sin)), ("value", v)):
            value = d.cast(value, style.kv)
            present = d.op(
                "Concat", f"past_key_values.{number}.{part}", value, axis=2, name=f"present.{number}.{part}"
            )
            outputs.append(present)
            wide = d.op("Unsqueeze", d.cast(present, "FLOAT"), d.const([2]))
            wide = d.op("Concat", *[wide] * (HEADS // KV_HEADS), axis=2)
            grown.append(d.op("Reshape", wide, d.const([0, HEADS, -1, SIZE])))
        scores = d.op("MatMul", d.rotate(q, cos, sin), d.op("Transpose", grown[0], perm=[0, 1, 3, 2]))
        scores = d.op("Add", d.op("Mul", scores, d.const(SIZE**-0.5, np.float32)), bias)
        mixed = d.op("MatMul", d.op("Softmax", scores, axis=-1), grown[1])
        mixed = d.op("Reshape", d.op("Transpose", mixed, perm=[0, 2, 1, 3]), d.const([0, 0, HEADS * SIZE]))
        hidden = d.op("Add", hidden, d.linear(mixed, f"{block}.self_attn.o_proj"))
        x = d.norm(hidden, f"{block}.post_attention_layernorm")
        gate = d.linear(x, f"{block}.mlp.gate_proj")
        inner = d.op("Mul", d.op("Mul", gate, d.op("Sigmoid", gate)), d.linear(x, f"{block}.mlp.up_proj"))
        hidden = d.op("Add", hidden, d.linear(inner, f"{block}.mlp.down_proj"))
    if style.one_row:
        hidden = d.op("Slice", hidden, d.const([-1]), d.const([2**31]), d.const([1]))
    if style.row_count is not None:
        count = d.op("Neg", d.op("Reshape", "num_logits_to_keep", d.const([1])))
        hidden = d.op("Slice", hidden, count, d.const([2**31]), d.const([1]))
    logits = d.linear(d.norm(hidden, "model.norm"), "lm_head")
    if style.default_input:
        logits = d.op("Mul", logits, "temperature")
    d.cast(logits, style.logits, name="logits")

    def info(name: str, dtype: str, shape: Sequence[int | str]) -> Any:
        return helper.make_tensor_value_info(name, getattr(TensorProto, dtype), shape)

    sizes = ("kv_heads", "head") if style.free_sizes else (KV_HEADS, SIZE)
    inputs = [info("input_ids", style.ids, [style.batch, style.new])]
    if style.mask:
        inputs.append(info("attention_mask", style.mask, [style.batch, "total"]))
    if style.positions:
        inputs.append(info("position_ids", style.ids, [style.batch, style.new]))
    for number in style.layers:
        for part in ("key", "value"):
            inputs.append(
                info(
                    f"past_key_values.{number}.{part}",
                    style.kv,
                    [style.batch, sizes[0], style.past, sizes[1]],
                )
            )
    if style.row_count is not None:
        inputs.append(info("num_logits_to_keep", "INT64", ["n"] * style.row_count))
    if style.default_input:
        inputs.append(info("temperature", "FLOAT", [1]))
        d.constants["temperature"] = np.ones(1, np.float32)
    if style.extra_input:
        inputs.append(info(style.extra_input, "BOOL", [1]))
    last = "vocab" if style.free_sizes else VOCAB
    results = [info("logits", style.logits, ["batch", 1 if style.one_row else "rows", last])]
    results += [info(name, style.kv, ["batch", sizes[0], "total", sizes[1]]) for name in outputs]
    tensors = [numpy_helper.from_array(np.ascontiguousarray(v), name) for name, v in d.constants.items()]
    graph = helper.make_graph(d.nodes, "decoder", inputs, results, tensors)
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=9, producer_name="by hand")


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="session")
def weights() -> dict[str, Array]:
    return llama_weights()


@pytest.fixture(scope="session")
def numpy_logits(weights: dict[str, Array]) -> Callable[[Sequence[int]], Array]:
    """numpy_logits(ids) -> [n, V], by a forward that shares nothing with any engine."""
    return lambda ids: llama_logits(weights, ids)


@pytest.fixture(scope="session")
def make_folder(
    weights: dict[str, Array], bpe_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """make_folder(graphs=["onnx/model.onnx"], **Style) -> a folder in the `onnx-community` layout."""

    def make(graphs: Sequence[str] = ("onnx/model.onnx",), **style: Any) -> Path:
        import onnx

        folder = tmp_path_factory.mktemp("community") / "model"
        (folder / "onnx").mkdir(parents=True)
        model = draw_decoder(weights, Style(**style))
        onnx.checker.check_model(model)
        for graph in graphs:
            onnx.save(model, folder / graph)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
        shutil.copy(bpe_tokenizer / "tokenizer.json", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        return folder

    return make


_BUILD = """
import runpy, sys
for arguments in sys.argv[1:]:
    sys.argv = ["builder", *arguments.split(" ")]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="session")
def genai_folders(
    weights: dict[str, Array], bpe_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders by onnxruntime-genai's own builder, of the hand-made decoder's weights: fp32, int4, one-row, fp16."""
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    torch = pytest.importorskip("torch", reason="the builder needs torch")
    transformers = pytest.importorskip("transformers", reason="the builder needs transformers")
    root = tmp_path_factory.mktemp("genai")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model.generation_config.eos_token_id = [0, 2]
    model.save_pretrained(root / "source")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe_tokenizer / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(root / "source")
    flags = {
        "fp32": "-p fp32 -e cpu",
        "int4": "-p int4 -e cpu",
        "one_row": "-p fp32 -e cpu --extra_options prune_lm_head=true",
        "fp16": "-p fp16 -e dml",
    }
    calls = [f"-m {root}/source -o {root}/{name} -c {root}/cache {flag}" for name, flag in flags.items()]
    transformers.Gemma2ForCausalLM(gemma_config(transformers)).save_pretrained(root / "gemma")
    tokenizer.save_pretrained(root / "gemma")
    calls.append(f"-m {root}/gemma -o {root}/windows -c {root}/cache -p fp32 -e cpu")
    done = subprocess.run([sys.executable, "-c", _BUILD, *calls], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: root / name for name in (*flags, "gemma", "windows")}


def gemma_config(transformers: Any) -> Any:
    """Layers with a window of 16 and without one take turns; soft caps."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: CONFIG[name] for name in (*names, "num_key_value_heads", "head_dim")}
    return transformers.Gemma2Config(
        **sizes, max_position_embeddings=CONTEXT, sliding_window=16, initializer_range=0.2, eos_token_id=0
    )


@pytest.fixture(scope="session")
def transformers_logits(weights: dict[str, Array]) -> Callable[[Sequence[int]], Array]:
    """transformers_logits(ids) -> [n, V] of the same weights."""
    torch = pytest.importorskip("torch", reason="transformers' logits need torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    def logits(ids: Sequence[int]) -> Array:
        with torch.no_grad():
            found: Array = model(torch.tensor([list(ids)])).logits[0].numpy()
        return found

    return logits
