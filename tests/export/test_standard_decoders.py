"""Whole decoders in the standard flavour against the NumPy reference, feature by feature of the description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from posttrainllm.export import reference
from posttrainllm.export.architectures import ModelConfig, RopeScaling, Rotary, tensor_shapes
from posttrainllm.export.decoder import build_decoder
from posttrainllm.export.standard import to_standard

Array = NDArray[Any]
IDS = np.random.default_rng(2).integers(0, 61, 30)


class Weights:
    """As much of a checkpoint as builder and reference ask for; seeded random values."""

    path = Path("random")
    linear_layout = "out_in"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.shapes = tensor_shapes(config)
        rng = np.random.default_rng(8)
        self._values = {
            name: (rng.standard_normal(shape) / (3 if len(shape) == 1 else shape[-1] ** 0.5)).astype(
                np.float32
            )
            for name, shape in self.shapes.items()
        }
        for name, values in self._values.items():
            if "norm" in name and name.endswith("weight"):
                values += 1 - config.norm_offset

    def dtype(self, name: str) -> str:
        return "float32"

    def tensor(self, name: str) -> Array:
        return self._values[name].copy()

    def stored(self, name: str) -> Array:
        return self._values[name].reshape(-1).copy()


LLAMA = ModelConfig(
    architecture="random",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context_length=64,
    norm="rms_norm",
    norm_eps=1e-5,
    positions="rotary",
    activation="silu",
    attention_scale=0.25,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tied_head=False,
    rotary=Rotary(10000.0, 16),
)
LLAMA3_SCALING = RopeScaling(
    "llama3", factor=8.0, original_context=16, low_freq_factor=1.0, high_freq_factor=4.0
)
CONFIGS: dict[str, ModelConfig] = {
    "Llama": LLAMA,
    "scaled rotary, tied head": replace(LLAMA, rotary=Rotary(500.0, 16, LLAMA3_SCALING), tied_head=True),
    "Qwen2: biases": replace(LLAMA, qkv_bias=True),
    "Qwen3: norms of queries and keys": replace(LLAMA, qk_norm="head", head_dim=24, rotary=Rotary(100.0, 24)),
    "OLMo2: norms behind": replace(LLAMA, norm_places="after", qk_norm="projection", kv_heads=4),
    "SmolLM3: a layer that does not turn": replace(LLAMA, unrotated_layers=(1,)),
    "Mistral: a window everywhere": replace(LLAMA, sliding_window=5, windowed_layers=(0, 1)),
    "Gemma2: windows, soft caps, norms around": replace(
        LLAMA,
        activation="gelu_tanh",
        norm_places="around",
        norm_offset=1.0,
        sliding_window=5,
        windowed_layers=(0,),
        attention_softcap=5.0,
        logit_softcap=3.0,
        embedding_multiplier=32**0.5,
    ),
    "Granite: multipliers": replace(
        LLAMA, residual_multiplier=0.22, logit_multiplier=0.125, embedding_multiplier=12
    ),
    "GPT-NeoX: partial rotary, both at once": replace(
        LLAMA,
        norm="layer_norm",
        activation="gelu_erf",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        kv_heads=4,
        parallel_residual=True,
        rotary=Rotary(10000.0, 4),
    ),
    "GPT-2: learned positions, odd heads": replace(
        LLAMA,
        norm="layer_norm",
        positions="learned",
        rotary=None,
        activation="gelu_tanh",
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        kv_heads=4,
        head_dim=6,
        tied_head=True,
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_decoder_in_ai_onnx_operators(case: str, tmp_path: Path) -> None:
    """In chunks, behind one masked position, in ONNX Runtime and in onnx's reference evaluator."""
    config = CONFIGS[case]
    weights: Any = Weights(config)
    model = build_decoder(weights)
    past = next(value for value in model.graph.inputs if value.name == "past_key_values.0.key")
    assert past.shape is not None
    hidden = np.zeros((1, config.kv_heads, 1, int(past.shape[3])), np.float32)  # type: ignore[arg-type]
    to_standard(model)
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    expected = reference.logits(weights, IDS[None], np.arange(30)[None])[0]
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    known = {entry.name for entry in session.get_inputs()}
    evaluator: Any = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    names = [f"{layer}.{part}" for layer in range(config.layers) for part in ("key", "value")]
    for engine in (session, evaluator):
        held = dict.fromkeys(names, hidden)
        rows, length = [], 0
        for size in (9, 1, 20):
            mask = np.ones((1, 1 + length + size), np.int64)
            mask[0, 0] = 0
            feeds: dict[str, Array] = {
                "input_ids": IDS[None, length : length + size],
                "attention_mask": mask,
                "position_ids": np.arange(length, length + size)[None],
            }
            feeds = {name: value for name, value in feeds.items() if name in known}
            feeds |= {f"past_key_values.{name}": value for name, value in held.items()}
            logits, *grown = engine.run(["logits", *(f"present.{name}" for name in names)], feeds)
            held = dict(zip(names, grown, strict=True))
            rows.append(logits[0])
            length += size
        assert np.abs(np.concatenate(rows) - expected).max() / np.ptp(expected) < 1e-4
