"""Metadata of a GGUF model as the dictionary that Hugging Face keeps in config.json.

What llama.cpp knows by heart and no file states (Gemma's windows, SmolLM3's layers without positions) is
filled in here, as its `src/models` has it. Frequency factors, which the file holds as tensors, become
`longrope` with the same factors at every length: that is what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..runtime.errors import CheckpointError
from .gguf_blocks import dequantise
from .gguf_file import GGUFFile
from .gguf_keys import Keys

Config = dict[str, Any]

_ROPE_FREQS = "rope_freqs.weight"
_ROPE_LONG, _ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset((_ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT))

# Keys that change what a model computes, and that none of these architectures has in our description.
_REFUSED = {
    "expert_count": "mixture of experts",
    "attention.clamp_kqv": "clamped queries and keys",
    "attention.max_alibi_bias": "ALiBi positions",
    "rope.dimension_sections": "multimodal rotary positions",
    "ssm.state_size": "a state space model",
    "rope.scaling.yarn_log_multiplier": "a YaRN log multiplier",
}


def huggingface_config(file: GGUFFile) -> Config:
    """The config of `file`. Raises CheckpointError for what is missing, unknown or not converted."""
    architecture = Keys(file.path, file.metadata, "general.").text("architecture")
    keys = Keys(file.path, file.metadata, f"{architecture}.")
    fill = _ARCHITECTURES.get(architecture)
    if fill is None:
        raise CheckpointError(
            file.path, f"architecture {architecture[:60]!r}", f"one of {', '.join(_ARCHITECTURES)}"
        )
    for key, name in _REFUSED.items():
        if keys.value(key) not in (None, 0):
            raise CheckpointError(file.path, f"has {name} ({architecture}.{key})", "a dense decoder")
    if not keys.boolean("attention.causal", True):
        raise CheckpointError(file.path, "attends in both directions", "a causal decoder")
    config = fill(file, keys)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return config | _token_ids(file, config["vocab_size"])


def _token_ids(file: GGUFFile, vocab_size: int) -> Config:
    """Ids that the file names; explicit None otherwise, because transformers' defaults are other models' ids."""
    keys = Keys(file.path, file.metadata, "tokenizer.ggml.")
    ids: Config = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = keys.integer(f"{key}_token_id", vocab_size)
        ids[f"{name}_token_id"] = number if number < vocab_size else None
    return ids


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise CheckpointError(file.path, f"tensor {name} is missing", "every tensor of the architecture")
    return file.tensors[name].shape[0]


def _vocab_size(file: GGUFFile) -> int:
    """The rows of the token table: converters pad or cut it, and some write another number."""
    return _rows(file, "token_embd.weight")


def _decoder(file: GGUFFile, keys: Keys, name: str, model_type: str) -> Config:
    """What all of them with RMSNorm and rotary positions have."""
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = _head_dim(keys)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.refuse("attention.value_length", f"the key length, {head_dim}")
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, keys),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _head_dim(keys: Keys) -> int:
    equal = keys.size("embedding_length") // keys.size("attention.head_count")
    return keys.size("attention.key_length", equal or 1)


def _whole_rotation(keys: Keys, config: Config) -> Config:
    """`config`, when all of a head is rotated."""
    if keys.size("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.refuse("rope.dimension_count", f"the head size, {config['head_dim']}")
    return config


def _rope_scaling(file: GGUFFile, keys: Keys) -> Config | None:
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    if kind in ("linear", "yarn"):
        if ROPE_TENSORS & file.tensors.keys():
            raise CheckpointError(file.path, f"{kind} rotary scaling and rotary factors", "one of them")
        return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(keys, factor)
    if kind not in ("none", "longrope"):
        raise keys.refuse("rope.scaling.type", "none, linear, yarn or longrope")
    if _ROPE_FREQS in file.tensors:
        factors = _factors(file, keys, _ROPE_FREQS)
        same = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        context = keys.size("context_length")
        return {"rope_type": "longrope", **same, "original_max_position_embeddings": context}
    if _ROPE_LONG in file.tensors:
        return _longrope(file, keys)
    if kind == "longrope":
        raise CheckpointError(file.path, f"tensor {_ROPE_LONG} is missing", "the factors of its longrope")
    return None


def _longrope(file: GGUFFile, keys: Keys) -> Config:
    context, original = keys.size("context_length"), keys.size("rope.scaling.original_context_length")
    if original < 2:
        raise keys.refuse("rope.scaling.original_context_length", "at least 2")
    scaling = {
        "rope_type": "longrope",
        "short_factor": _factors(file, keys, _ROPE_SHORT),
        "long_factor": _factors(file, keys, _ROPE_LONG),
        "original_max_position_embeddings": original,
    }
    usual = math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0
    attention = keys.number("rope.scaling.attn_factor", usual)
    return (
        scaling if math.isclose(attention, usual, rel_tol=1e-6) else scaling | {"attention_factor": attention}
    )


def _yarn(keys: Keys, factor: float) -> Config:
    if factor <= 0:
        raise keys.refuse("rope.scaling.factor", "a factor above 0")
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.refuse("rope.scaling.yarn_ext_factor", "1")
    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
    }
    for theirs, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"rope.scaling.{theirs}" in keys:
            scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    return scaling


def _factors(file: GGUFFile, keys: Keys, name: str) -> list[float]:
    if name not in file.tensors:
        raise CheckpointError(file.path, f"tensor {name} is missing", "both lists of rotary factors")
    rotated = keys.size("rope.dimension_count", _head_dim(keys))
    if file.tensors[name].shape != (rotated // 2,):
        found = list(file.tensors[name].shape)
        raise CheckpointError(file.path, f"tensor {name} has the shape {found}", f"[{rotated // 2}]")
    values = dequantise(file.blocks(name), file.tensors[name].type).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise CheckpointError(file.path, f"tensor {name} is not positive", "rotary factors")
    return [float(value) for value in values]


def _llama(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "LlamaForCausalLM", "llama"))
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if window := keys.integer("attention.sliding_window", 0):
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _smollm3(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "SmolLM3ForCausalLM", "smollm3"))
    step = 4
    layers = range(1, config["num_hidden_layers"] + 1)
    return config | {
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "no_rope_layer_interval": step,
        "no_rope_layers": [int(layer % step != 0) for layer in layers],
        "use_sliding_window": False,
    }


def _granite(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "GraniteForCausalLM", "granite"))
    return config | {
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


def _qwen2(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "Qwen2ForCausalLM", "qwen2"))
    return config | {"use_sliding_window": False}


def _qwen3(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "Qwen3ForCausalLM", "qwen3"))
    return config | {"use_sliding_window": False}


def _olmo2(file: GGUFFile, keys: Keys) -> Config:
    if keys.integer("attention.sliding_window", 0):
        raise CheckpointError(file.path, "has sliding windows (OLMo 3)", "OLMo 2")
    return _whole_rotation(keys, _decoder(file, keys, "Olmo2ForCausalLM", "olmo2"))


def _phi3(file: GGUFFile, keys: Keys) -> Config:
    config = _decoder(file, keys, "Phi3ForCausalLM", "phi3")
    original = config["max_position_embeddings"]
    return config | {
        "partial_rotary_factor": keys.size("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", original),
        "sliding_window": keys.integer("attention.sliding_window", 0) or None,
    }


def _gemma(file: GGUFFile, keys: Keys) -> Config:
    config = _whole_rotation(keys, _decoder(file, keys, "GemmaForCausalLM", "gemma"))
    return config | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _later_gemma(file: GGUFFile, keys: Keys) -> Config:
    config = _gemma(file, keys)
    del config["hidden_act"]  # an old name, of the first Gemma only
    return config


def _gemma2(file: GGUFFile, keys: Keys) -> Config:
    config = _later_gemma(file, keys) | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    window = keys.size("attention.sliding_window", 4096)
    return config | {
        "query_pre_attn_scalar": _query_scale(config, largest=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, period=2),
    }


def _gemma3(file: GGUFFile, keys: Keys) -> Config:
    config = _later_gemma(file, keys) | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    window = keys.integer("attention.sliding_window", 0)
    types = _layer_types(keys, config, period=6)
    return config | {
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scale(config, largest=62),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": types if window else ["full_attention"] * len(types),
    }


def _query_scale(config: Config, *, largest: int) -> int:
    """No file says it: Gemma's 27B models, known by their layers, scale by hidden size over heads."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(keys: Keys, config: Config, *, period: int) -> list[str]:
    """Windows in all layers but each `period`-th, unless the file states a period or a flag a layer."""
    layers = config["num_hidden_layers"]
    pattern = keys.value("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.size != layers:
            raise keys.refuse("attention.sliding_window_pattern", f"{layers} flags")
        windowed = [bool(flag) for flag in pattern]
    else:
        period = keys.size("attention.sliding_window_pattern", period)
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _gpt2(file: GGUFFile, keys: Keys) -> Config:
    hidden = keys.size("embedding_length")
    positions = _rows(file, "position_embd.weight")
    if keys.size("context_length", positions) != positions:
        raise keys.refuse("context_length", f"the rows of position_embd.weight, {positions}")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _vocab_size(file),
        "n_positions": positions,
        "n_ctx": positions,
        "n_embd": hidden,
        "n_layer": keys.size("block_count"),
        "n_head": keys.size("attention.head_count"),
        "n_inner": keys.size("feed_forward_length", 4 * hidden),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gptneox(file: GGUFFile, keys: Keys) -> Config:
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = _head_dim(keys)
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.size("context_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "rotary_pct": keys.size("rope.dimension_count", head_dim) / head_dim,
        "rotary_emb_base": theta,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, keys),
        "use_parallel_residual": keys.boolean("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
    }


_ARCHITECTURES: Mapping[str, Callable[[GGUFFile, Keys], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
}
