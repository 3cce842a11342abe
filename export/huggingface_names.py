"""The architectures of Hugging Face models that we know: one row each, with what its files call the modules.

Some files pack several of our modules into one tensor; an `Origin` says which part of it is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..runtime.errors import UnknownArchitectureError
from . import huggingface_config as describe
from .architectures import ModelConfig, tensor_shapes
from .config_keys import ConfigKeys

Piece = Literal["all", "query", "key", "value", "gate", "up"]


@dataclass(frozen=True)
class Origin:
    """The tensor that holds one of ours: as a whole, or a piece of its outputs.

    `by_head`: query, key and value of each head lie together. `transposed`: weights are [in, out].
    """

    name: str
    piece: Piece = "all"
    by_head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Slices:
    """Rows of a packed tensor: in each of `groups` runs of `period` rows, `count` from `start` on."""

    groups: int
    period: int
    start: int
    count: int


Modules = Mapping[str, Origin]
_BLOCK = "model.layers.{i}."


def _same(*names: str) -> dict[str, Origin]:
    """Modules that Hugging Face calls as we do, because we took its names."""
    return {name: Origin(name) for name in names}


_LLAMA = _same(
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    _BLOCK + "input_layernorm",
    _BLOCK + "post_attention_layernorm",
    _BLOCK + "self_attn.q_proj",
    _BLOCK + "self_attn.k_proj",
    _BLOCK + "self_attn.v_proj",
    _BLOCK + "self_attn.o_proj",
    _BLOCK + "mlp.gate_proj",
    _BLOCK + "mlp.up_proj",
    _BLOCK + "mlp.down_proj",
)
_QK_NORMS = _same(_BLOCK + "self_attn.q_norm", _BLOCK + "self_attn.k_norm")
_FEEDFORWARD_NORMS = _same(_BLOCK + "pre_feedforward_layernorm", _BLOCK + "post_feedforward_layernorm")
_PHI3 = _LLAMA | {
    _BLOCK + "self_attn.q_proj": Origin(_BLOCK + "self_attn.qkv_proj", "query"),
    _BLOCK + "self_attn.k_proj": Origin(_BLOCK + "self_attn.qkv_proj", "key"),
    _BLOCK + "self_attn.v_proj": Origin(_BLOCK + "self_attn.qkv_proj", "value"),
    _BLOCK + "mlp.gate_proj": Origin(_BLOCK + "mlp.gate_up_proj", "gate"),
    _BLOCK + "mlp.up_proj": Origin(_BLOCK + "mlp.gate_up_proj", "up"),
}
_GPT2 = {
    "model.embed_tokens": Origin("transformer.wte"),
    "model.embed_positions": Origin("transformer.wpe"),
    "model.norm": Origin("transformer.ln_f"),
    "lm_head": Origin("lm_head"),
    _BLOCK + "input_layernorm": Origin("transformer.h.{i}.ln_1"),
    _BLOCK + "post_attention_layernorm": Origin("transformer.h.{i}.ln_2"),
    _BLOCK + "self_attn.q_proj": Origin("transformer.h.{i}.attn.c_attn", "query", transposed=True),
    _BLOCK + "self_attn.k_proj": Origin("transformer.h.{i}.attn.c_attn", "key", transposed=True),
    _BLOCK + "self_attn.v_proj": Origin("transformer.h.{i}.attn.c_attn", "value", transposed=True),
    _BLOCK + "self_attn.o_proj": Origin("transformer.h.{i}.attn.c_proj", transposed=True),
    _BLOCK + "mlp.up_proj": Origin("transformer.h.{i}.mlp.c_fc", transposed=True),
    _BLOCK + "mlp.down_proj": Origin("transformer.h.{i}.mlp.c_proj", transposed=True),
}
_NEOX_BLOCK = "gpt_neox.layers.{i}."
_NEOX = {
    "model.embed_tokens": Origin("gpt_neox.embed_in"),
    "model.norm": Origin("gpt_neox.final_layer_norm"),
    "lm_head": Origin("embed_out"),
    _BLOCK + "input_layernorm": Origin(_NEOX_BLOCK + "input_layernorm"),
    _BLOCK + "post_attention_layernorm": Origin(_NEOX_BLOCK + "post_attention_layernorm"),
    _BLOCK + "self_attn.q_proj": Origin(_NEOX_BLOCK + "attention.query_key_value", "query", by_head=True),
    _BLOCK + "self_attn.k_proj": Origin(_NEOX_BLOCK + "attention.query_key_value", "key", by_head=True),
    _BLOCK + "self_attn.v_proj": Origin(_NEOX_BLOCK + "attention.query_key_value", "value", by_head=True),
    _BLOCK + "self_attn.o_proj": Origin(_NEOX_BLOCK + "attention.dense"),
    _BLOCK + "mlp.up_proj": Origin(_NEOX_BLOCK + "mlp.dense_h_to_4h"),
    _BLOCK + "mlp.down_proj": Origin(_NEOX_BLOCK + "mlp.dense_4h_to_h"),
}


@dataclass(frozen=True)
class Row:
    """One architecture: its class in transformers, how its config reads, what its files call our modules.

    Tensors may come without the `prefix`, which is how the model without its head was saved.
    """

    class_name: str
    describe: Callable[[ConfigKeys], ModelConfig]
    modules: Modules
    prefix: str = "model."


# By the model_type of config.json.
ROWS: Mapping[str, Row] = {
    "gemma": Row("GemmaForCausalLM", describe.gemma, _LLAMA),
    "gemma2": Row("Gemma2ForCausalLM", describe.gemma2, _LLAMA | _FEEDFORWARD_NORMS),
    "gemma3_text": Row("Gemma3ForCausalLM", describe.gemma3, _LLAMA | _FEEDFORWARD_NORMS | _QK_NORMS),
    "gpt2": Row("GPT2LMHeadModel", describe.gpt2, _GPT2, prefix="transformer."),
    "gpt_neox": Row("GPTNeoXForCausalLM", describe.gpt_neox, _NEOX, prefix="gpt_neox."),
    "granite": Row("GraniteForCausalLM", describe.granite, _LLAMA),
    "llama": Row("LlamaForCausalLM", describe.llama, _LLAMA),
    "mistral": Row("MistralForCausalLM", describe.mistral, _LLAMA),
    "olmo2": Row("Olmo2ForCausalLM", describe.olmo2, _LLAMA | _FEEDFORWARD_NORMS | _QK_NORMS),
    "phi3": Row("Phi3ForCausalLM", describe.phi3, _PHI3),
    "qwen2": Row("Qwen2ForCausalLM", describe.qwen2, _LLAMA),
    "qwen3": Row("Qwen3ForCausalLM", describe.qwen3, _LLAMA | _QK_NORMS),
    "smollm3": Row("SmolLM3ForCausalLM", describe.smollm3, _LLAMA),
}


def describe_model(
    values: Mapping[str, Any], where: object, context: int | None = None
) -> tuple[Row, describe.Description]:
    """The row and the description of a config.json's `values`. Raises CheckpointError naming `where`."""
    keys = ConfigKeys(where, values)
    kind = keys.text("model_type")
    row = ROWS.get(kind)
    if row is None:
        raise UnknownArchitectureError(
            where, f"model_type {kind[:60]!r} is not known", f"one of {', '.join(ROWS)}"
        )
    describe.refuse_features(keys)
    classes = keys.raw("architectures")
    if classes is not None and row.class_name not in (classes if isinstance(classes, list) else [classes]):
        raise keys.refuse("architectures", row.class_name)
    return row, describe.finish(keys, row.describe(keys), context)


def origins(row: Row, config: ModelConfig) -> dict[str, Origin]:
    """Where each tensor of `config` comes from, by our name."""
    found = {}
    for ours, origin in row.modules.items():
        for i in range(config.layers) if "{i}" in ours else range(1):
            for part in (".weight", ".bias"):
                name = origin.name.format(i=i) + part
                found[ours.format(i=i) + part] = Origin(name, origin.piece, origin.by_head, origin.transposed)
    return {name: found[name] for name in tensor_shapes(config)}


def slices(origin: Origin, config: ModelConfig) -> Slices | None:
    """Which rows of its tensor are ours; None for all."""
    q, kv, m = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate_size
    if origin.piece == "all":
        return None
    if origin.by_head:
        size = config.head_dim
        return Slices(config.heads, 3 * size, ("query", "key", "value").index(origin.piece) * size, size)
    runs = {
        "query": (q + 2 * kv, 0, q),
        "key": (q + 2 * kv, q, kv),
        "value": (q + 2 * kv, q + kv, kv),
        "gate": (2 * m, 0, m),
        "up": (2 * m, m, m),
    }
    return Slices(1, *runs[origin.piece])


def stored_shape(origin: Origin, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of the tensor in the file that holds one of ours of `shape`."""
    rows = slices(origin, config)
    outputs = shape[0] if rows is None else rows.groups * rows.period
    stored = (outputs, *shape[1:])
    return stored[::-1] if origin.transposed else stored
