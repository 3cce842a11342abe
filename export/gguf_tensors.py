"""What a GGUF model calls its tensors, and what its converter did to them, by Hugging Face's names.

llama.cpp's converter interleaves the rows of queries and keys where it rotates neighbours, adds 1 to Gemma's
norms, turns GPT-2's matrices, and unties GPT-NeoX's packed heads. Each is undone here: rows are whole blocks,
so moving them is exact for quantised weights too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .gguf_config import ROPE_TENSORS
from .gguf_file import GGUFFile

RowOrder = Literal["as_stored", "rotary_query", "rotary_key", "packed_heads"]


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from, and what stands between: row order, orientation, a constant that was added."""

    name: str
    rows: RowOrder = "as_stored"
    transposed: bool = False
    added: float = 0.0


Table = Mapping[str, tuple[str, Origin]]  # the file's module -> Hugging Face's module, and the rule


def _plain(names: Mapping[str, str]) -> dict[str, tuple[str, Origin]]:
    return {theirs: (ours, Origin(theirs)) for theirs, ours in names.items()}


def _with(table: Table, rule: Origin, *theirs: str) -> dict[str, tuple[str, Origin]]:
    """`table` with the transformations of `rule` on some of its modules."""
    return {
        name: (ours, replace(rule, name=name) if name in theirs else origin)
        for name, (ours, origin) in table.items()
    }


_BLOCK = "model.layers.{i}."
_TOP = _plain({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_ATTENTION = _plain(
    {
        "blk.{i}.attn_q": _BLOCK + "self_attn.q_proj",
        "blk.{i}.attn_k": _BLOCK + "self_attn.k_proj",
        "blk.{i}.attn_v": _BLOCK + "self_attn.v_proj",
        "blk.{i}.attn_output": _BLOCK + "self_attn.o_proj",
    }
)
_GATED_MLP = _plain(
    {
        "blk.{i}.ffn_gate": _BLOCK + "mlp.gate_proj",
        "blk.{i}.ffn_up": _BLOCK + "mlp.up_proj",
        "blk.{i}.ffn_down": _BLOCK + "mlp.down_proj",
    }
)
_PRE_NORMS = _plain(
    {
        "blk.{i}.attn_norm": _BLOCK + "input_layernorm",
        "blk.{i}.ffn_norm": _BLOCK + "post_attention_layernorm",
    }
)
_POST_NORMS = _plain(
    {
        "blk.{i}.post_attention_norm": _BLOCK + "post_attention_layernorm",
        "blk.{i}.post_ffw_norm": _BLOCK + "post_feedforward_layernorm",
    }
)
_FOUR_NORMS = _POST_NORMS | _plain(
    {
        "blk.{i}.attn_norm": _BLOCK + "input_layernorm",
        "blk.{i}.ffn_norm": _BLOCK + "pre_feedforward_layernorm",
    }
)
_HEAD_NORMS = _plain(
    {
        "blk.{i}.attn_q_norm": _BLOCK + "self_attn.q_norm",
        "blk.{i}.attn_k_norm": _BLOCK + "self_attn.k_norm",
    }
)

_QWEN2 = _TOP | _ATTENTION | _GATED_MLP | _PRE_NORMS
_LLAMA = _with(
    _with(_QWEN2, Origin("", rows="rotary_query"), "blk.{i}.attn_q"),
    Origin("", rows="rotary_key"),
    "blk.{i}.attn_k",
)
_PHI3 = (
    _TOP
    | _PRE_NORMS
    | _plain(
        {
            "blk.{i}.attn_qkv": _BLOCK + "self_attn.qkv_proj",
            "blk.{i}.attn_output": _BLOCK + "self_attn.o_proj",
            "blk.{i}.ffn_up": _BLOCK + "mlp.gate_up_proj",
            "blk.{i}.ffn_down": _BLOCK + "mlp.down_proj",
        }
    )
)


def _gemma(table: Table) -> dict[str, tuple[str, Origin]]:
    return _with(table, Origin("", added=1.0), *(name for name in table if name.endswith("_norm")))


_GPT2_BLOCK = "transformer.h.{i}."
_GPT2 = _with(
    _plain(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "blk.{i}.attn_norm": _GPT2_BLOCK + "ln_1",
            "blk.{i}.ffn_norm": _GPT2_BLOCK + "ln_2",
            "blk.{i}.attn_qkv": _GPT2_BLOCK + "attn.c_attn",
            "blk.{i}.attn_output": _GPT2_BLOCK + "attn.c_proj",
            "blk.{i}.ffn_up": _GPT2_BLOCK + "mlp.c_fc",
            "blk.{i}.ffn_down": _GPT2_BLOCK + "mlp.c_proj",
        }
    ),
    Origin("", transposed=True),
    "blk.{i}.attn_qkv",
    "blk.{i}.attn_output",
    "blk.{i}.ffn_up",
    "blk.{i}.ffn_down",
)

_NEOX_BLOCK = "gpt_neox.layers.{i}."
_GPTNEOX = _with(
    _plain(
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
            "blk.{i}.attn_norm": _NEOX_BLOCK + "input_layernorm",
            "blk.{i}.ffn_norm": _NEOX_BLOCK + "post_attention_layernorm",
            "blk.{i}.attn_qkv": _NEOX_BLOCK + "attention.query_key_value",
            "blk.{i}.attn_output": _NEOX_BLOCK + "attention.dense",
            "blk.{i}.ffn_up": _NEOX_BLOCK + "mlp.dense_h_to_4h",
            "blk.{i}.ffn_down": _NEOX_BLOCK + "mlp.dense_4h_to_h",
        }
    ),
    Origin("", rows="packed_heads"),
    "blk.{i}.attn_qkv",
)

# By the model_type of the config.
_TABLES: Mapping[str, Table] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | _HEAD_NORMS,
    "olmo2": _TOP | _ATTENTION | _GATED_MLP | _POST_NORMS | _HEAD_NORMS,
    "phi3": _PHI3,
    "gemma": _gemma(_QWEN2),
    "gemma2": _gemma(_TOP | _ATTENTION | _GATED_MLP | _FOUR_NORMS),
    "gemma3_text": _gemma(_TOP | _ATTENTION | _GATED_MLP | _FOUR_NORMS | _HEAD_NORMS),
    "gpt2": _GPT2,
    "gpt_neox": _GPTNEOX,
}


def origins(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Origin]:
    """Hugging Face's name of every weight of `file` -> its origin. Raises CheckpointError for unknown ones."""
    layers = config.get("num_hidden_layers") or config["n_layer"]
    known: dict[str, tuple[str, Origin]] = {}
    for theirs, (ours, origin) in _expanded(_TABLES[config["model_type"]], layers, file):
        for part in (".weight", ".bias"):
            known[theirs + part] = ours + part, replace(origin, name=theirs + part)
    found: dict[str, Origin] = {}
    for name, info in file.tensors.items():
        if name in ROPE_TENSORS:  # they are in the config
            continue
        if name not in known:
            raise CheckpointError(file.path, f"unknown tensor {name}", "only tensors of the architecture")
        if len(info.shape) > 2:
            raise CheckpointError(file.path, f"tensor {name} has the shape {list(info.shape)}", "a matrix")
        ours, origin = known[name]
        found[ours] = replace(origin, transposed=origin.transposed and len(info.shape) == 2)
    return found


def _expanded(table: Table, layers: int, file: GGUFFile) -> Iterator[tuple[str, tuple[str, Origin]]]:
    """`table` with block numbers. A file that claims more blocks than it has tensors is cut short here."""
    for theirs, (ours, origin) in table.items():
        if "{i}" in theirs:
            for i in range(min(layers, len(file.tensors))):
                yield theirs.format(i=i), (ours.format(i=i), origin)
        else:
            yield theirs, (ours, origin)


def row_order(origin: Origin, rows: int, config: Mapping[str, Any]) -> NDArray[np.intp] | None:
    """Which stored row each of our `rows` rows is; None where they lie as they should."""
    if origin.rows == "as_stored":
        return None
    stored = np.arange(rows)
    heads = config["num_attention_heads"]
    if origin.rows == "packed_heads":
        return stored.reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    if origin.rows == "rotary_key":
        heads = config["num_key_value_heads"]
    return stored.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def check_rows(origin: Origin, rows: int, config: Mapping[str, Any]) -> bool:
    """Whether `rows` rows divide into the heads that `row_order` needs."""
    if origin.rows == "as_stored":
        return True
    if origin.rows == "packed_heads":
        parts = 3 * int(config["num_attention_heads"])
    else:
        kind = "num_key_value_heads" if origin.rows == "rotary_key" else "num_attention_heads"
        parts = 2 * int(config[kind])
    return rows % parts == 0
