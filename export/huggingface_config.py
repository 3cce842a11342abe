"""config.json to our description: one function an architecture, over what most of them have in common.

Defaults are those of transformers' configuration classes: files leave out what is the default. What a config
asks for and the builder does not have is refused by name; keys that nobody knows become a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..runtime.errors import CheckpointError
from .architectures import Activation, ModelConfig, Rotary
from .config_keys import ConfigKeys
from .rope_keys import PHI3_NAMES, layer_rotary, rotary

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu_erf",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Keys that do not change what a model computes from ids.
_INERT_NAMES = """
architectures model_type torch_dtype dtype transformers_version use_cache initializer_range _name_or_path
pad_token_id bos_token_id eos_token_id sep_token_id attention_dropout hidden_dropout resid_pdrop embd_pdrop
attn_pdrop classifier_dropout summary_type summary_use_proj summary_activation summary_proj_to_labels
summary_first_dropout task_specific_params id2label label2id tokenizer_class auto_map cache_implementation
max_window_layers chunk_size_feed_forward return_dict n_ctx pretraining_tp reorder_and_upcast_attn
sliding_window_pattern _sliding_window_pattern gradient_checkpointing unsloth_version unsloth_fixed
transformers.js_config finetuning_task problem_type
"""
_INERT = _INERT_NAMES.split()


def common(
    keys: ConfigKeys,
    *,
    vocab_size: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    activation: Activation | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
) -> ModelConfig:
    """A decoder with RMSNorm before attention and a gated MLP, its positions still to be filled in."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    groups = keys.size("num_key_value_heads", kv_heads or heads)
    if heads % groups:
        raise keys.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if head_dim is None and hidden % heads and "head_dim" not in keys:
        raise keys.refuse("hidden_size", f"a multiple of num_attention_heads, {heads}")
    size = keys.size("head_dim", head_dim or hidden // heads)
    biased = keys.boolean("attention_bias", attention_bias)
    return ModelConfig(
        architecture=keys.text("model_type"),
        vocab_size=keys.size("vocab_size", vocab_size),
        hidden_size=hidden,
        intermediate_size=keys.size("intermediate_size"),
        layers=keys.size("num_hidden_layers"),
        heads=heads,
        kv_heads=groups,
        head_dim=size,
        context_length=keys.size("max_position_embeddings"),
        norm="rms_norm",
        norm_eps=keys.positive("rms_norm_eps", norm_eps),
        positions="rotary",
        activation=activation or activation_of(keys, "hidden_act", "silu"),
        attention_scale=size**-0.5,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=keys.boolean("mlp_bias", mlp_bias),
        tied_head=keys.boolean("tie_word_embeddings", tied),
    )


def activation_of(keys: ConfigKeys, key: str, default: str) -> Activation:
    name = keys.text(key, default)
    if name not in _ACTIVATIONS:
        raise keys.refuse(key, " or ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def windowed(keys: ConfigKeys, config: ModelConfig, window: int | None, layers: list[bool]) -> ModelConfig:
    """`config` with windows in those of `layers` that `layer_types` names, or in the given ones."""
    types = keys.texts("layer_types", config.layers)
    if types is not None:
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise keys.refuse("layer_types", "full_attention and sliding_attention")
        layers = [kind == "sliding_attention" for kind in types]
    chosen = tuple(layer for layer, sliding in enumerate(layers) if sliding)
    if window is None or not chosen:
        return config
    return replace(config, sliding_window=window, windowed_layers=chosen)


def llama(keys: ConfigKeys) -> ModelConfig:
    config = common(keys)
    return replace(config, rotary=rotary(keys, config.head_dim))


def mistral(keys: ConfigKeys) -> ModelConfig:
    config = replace(common(keys, kv_heads=8), qkv_bias=False, output_bias=False, mlp_bias=False)
    config = replace(config, rotary=rotary(keys, config.head_dim))
    window = keys.optional_size("sliding_window", 4096)
    return windowed(keys, config, window, [True] * config.layers)


def smollm3(keys: ConfigKeys) -> ModelConfig:
    config = common(keys, vocab_size=128256, kv_heads=4, tied=True)
    turning = keys.raw("no_rope_layers")
    step = keys.size("no_rope_layer_interval", 4)
    if turning is None:
        turning = [int((layer + 1) % step != 0) for layer in range(config.layers)]
    if not isinstance(turning, list) or len(turning) < config.layers or set(turning) - {0, 1}:
        raise keys.refuse("no_rope_layers", f"a list of {config.layers} zeros and ones")
    still = tuple(layer for layer in range(config.layers) if not turning[layer])
    config = replace(config, rotary=rotary(keys, config.head_dim, theta=2e6), unrotated_layers=still)
    window = keys.optional_size("sliding_window")
    if not keys.boolean("use_sliding_window", False):
        window = None
    return windowed(keys, config, window, [layer in still for layer in range(config.layers)])


def qwen2(keys: ConfigKeys) -> ModelConfig:
    config = replace(common(keys, vocab_size=151936), qkv_bias=True, output_bias=False, mlp_bias=False)
    return _qwen(keys, config)


def qwen3(keys: ConfigKeys) -> ModelConfig:
    config = replace(common(keys, vocab_size=151936, head_dim=128), mlp_bias=False, qk_norm="head")
    return _qwen(keys, config)


def _qwen(keys: ConfigKeys, config: ModelConfig) -> ModelConfig:
    config = replace(config, rotary=rotary(keys, config.head_dim))
    full = keys.raw("max_window_layers")
    if type(full) is not int:
        full = 28
    window = keys.optional_size("sliding_window", 4096)
    if not keys.boolean("use_sliding_window", False):
        window = None
    return windowed(keys, config, window, [layer >= full for layer in range(config.layers)])


def gemma(keys: ConfigKeys) -> ModelConfig:
    # Both names of "gelu" mean the approximation here: early files said the wrong one.
    key = "hidden_activation" if "hidden_activation" in keys else "hidden_act"
    keys.raw("hidden_act")
    activation = activation_of(keys, key, "gelu_pytorch_tanh")
    if activation == "gelu_erf":
        activation = "gelu_tanh"
    config = _gemma(keys, common(keys, vocab_size=256000, head_dim=256, activation=activation, tied=True))
    return replace(config, rotary=rotary(keys, config.head_dim))


def gemma2(keys: ConfigKeys) -> ModelConfig:
    config = _sandwiched(keys, vocab_size=256000)
    config = replace(
        config,
        rotary=rotary(keys, config.head_dim),
        attention_softcap=keys.optional("attn_logit_softcapping", 50.0),
        logit_softcap=keys.optional("final_logit_softcapping", 30.0),
    )
    layers = [layer % 2 == 0 for layer in range(config.layers)]
    return windowed(keys, config, keys.optional_size("sliding_window", 4096), layers)


def gemma3(keys: ConfigKeys) -> ModelConfig:
    # transformers reads this key and does not apply it; no released model sets it.
    keys.only("attn_logit_softcapping", why="a soft cap on Gemma 3's attention")
    config = _sandwiched(keys, vocab_size=262208)
    config = replace(
        config,
        qk_norm="head",
        logit_softcap=keys.optional("final_logit_softcapping"),
    )
    config = _gemma3_rotary(keys, config)
    period = keys.size("_sliding_window_pattern", keys.size("sliding_window_pattern", 6))
    layers = [(layer + 1) % period != 0 for layer in range(config.layers)]
    config = windowed(keys, config, keys.optional_size("sliding_window", 4096), layers)
    if config.local_rotary == config.rotary:
        return replace(config, local_rotary=None)
    return config


def _gemma3_rotary(keys: ConfigKeys, config: ModelConfig) -> ModelConfig:
    """Windowed layers turn by another theta, and what `rope_scaling` says is for the others."""
    far, near = keys.positive("rope_theta", 1e6), keys.positive("rope_local_base_freq", 1e4)
    local: Rotary | None = Rotary(near, config.head_dim)
    general = Rotary(far, config.head_dim)
    both = keys.section("rope_parameters")
    scaling = keys.section("rope_scaling")
    if both is not None:
        section = both.section("full_attention")
        general = layer_rotary(keys, section, config.head_dim, theta=far) if section else general
        section = both.section("sliding_attention")
        local = layer_rotary(keys, section, config.head_dim, theta=near) if section else local
        if both.unread():
            raise keys.refuse("rope_parameters", "full_attention and sliding_attention")
    elif scaling is not None:
        general = layer_rotary(keys, scaling, config.head_dim, theta=far)
    return replace(config, rotary=general, local_rotary=local)


def _sandwiched(keys: ConfigKeys, *, vocab_size: int) -> ModelConfig:
    """Gemma 2 and 3: norms around attention and MLP, a scale of its own."""
    activation = activation_of(keys, "hidden_activation", "gelu_pytorch_tanh")
    config = common(keys, vocab_size=vocab_size, kv_heads=4, head_dim=256, activation=activation, tied=True)
    scale = keys.positive("query_pre_attn_scalar", 256) ** -0.5
    return _gemma(keys, replace(config, norm_places="around", attention_scale=scale))


def _gemma(keys: ConfigKeys, config: ModelConfig) -> ModelConfig:
    keys.only("use_bidirectional_attention", False, why="attention in both directions")
    return replace(config, mlp_bias=False, norm_offset=1.0, embedding_multiplier=config.hidden_size**0.5)


def phi3(keys: ConfigKeys) -> ModelConfig:
    config = replace(common(keys, norm_eps=1e-5), qkv_bias=False, output_bias=False, mlp_bias=False)
    config = replace(config, rotary=rotary(keys, config.head_dim, aliases=PHI3_NAMES))
    window = keys.optional_size("sliding_window")
    return windowed(keys, config, window, [True] * config.layers)


def olmo2(keys: ConfigKeys) -> ModelConfig:
    config = replace(common(keys, norm_eps=1e-5), mlp_bias=False)
    return replace(config, norm_places="after", qk_norm="projection", rotary=rotary(keys, config.head_dim))


def granite(keys: ConfigKeys) -> ModelConfig:
    config = common(keys)
    return replace(
        config,
        rotary=rotary(keys, config.head_dim),
        attention_scale=keys.positive("attention_multiplier", 1.0),
        embedding_multiplier=keys.positive("embedding_multiplier", 1.0),
        residual_multiplier=keys.positive("residual_multiplier", 1.0),
        logit_multiplier=1 / keys.positive("logits_scaling", 1.0),
    )


def gpt2(keys: ConfigKeys) -> ModelConfig:
    keys.only("scale_attn_weights", True, why="attention without a scale")
    keys.only("scale_attn_by_inverse_layer_idx", False, why="an attention scale by layer")
    keys.only("add_cross_attention", False, why="cross-attention")
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    if hidden % heads:
        raise keys.refuse("n_embd", f"a multiple of n_head, {heads}")
    return ModelConfig(
        architecture=keys.text("model_type"),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.size("n_inner", 4 * hidden),
        layers=keys.size("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        context_length=keys.size("n_positions"),
        norm="layer_norm",
        norm_eps=keys.positive("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=activation_of(keys, "activation_function", "gelu_new"),
        attention_scale=(hidden // heads) ** -0.5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_head=keys.boolean("tie_word_embeddings", True),
        gated_mlp=False,
    )


def gpt_neox(keys: ConfigKeys) -> ModelConfig:
    keys.only("is_decoder", False, True, why="another kind of model")
    config = common(
        keys, activation=activation_of(keys, "hidden_act", "gelu"), attention_bias=True, mlp_bias=True
    )
    turning = rotary(
        keys, config.head_dim, theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct"
    )
    keys.raw("rope_theta")  # the same number again
    return replace(
        config,
        norm="layer_norm",
        norm_eps=keys.positive("layer_norm_eps", 1e-5),
        rotary=turning,
        mlp_bias=True,
        gated_mlp=False,
        parallel_residual=keys.boolean("use_parallel_residual", True),
    )


@dataclass(frozen=True)
class Description:
    """What a config says: the decoder, the longest text that its positions are made for, and warnings."""

    config: ModelConfig
    longest: int
    warnings: tuple[str, ...]


def finish(keys: ConfigKeys, config: ModelConfig, context: int | None) -> Description:
    """`config` with its context: `context` if it is given, else the longest for which short texts are exact too."""
    longest = config.context_length
    warnings = []
    scaling = config.rotary.scaling if config.rotary else None
    if context is None and scaling and scaling.kind == "longrope" and scaling.original_context < longest:
        context = scaling.original_context
        if scaling.long_factors != scaling.short_factors:
            warnings.append(
                f"the context is {context:,} ids, as in training; --context {longest} takes the rotary factors "
                "of long texts, for short ones too"
            )
        else:
            context = longest
    if context is not None:
        most = longest
        if scaling and scaling.kind == "dynamic":
            most = int(longest * scaling.factor)
        fits = context <= most if config.positions == "rotary" else context == longest
        if not fits:
            expected = (
                f"at most {most}" if config.positions == "rotary" else f"{longest}, its learned positions"
            )
            raise CheckpointError(keys.where, f"a context of {context} ids", expected)
        config = replace(config, context_length=context)
    unknown = keys.unread(_INERT)
    if unknown:
        warnings.append(f"config.json has keys that are not known and were not used: {', '.join(unknown)}")
    return Description(config, longest, tuple(warnings))


def refuse_features(keys: ConfigKeys) -> None:
    """What no architecture here has, whatever its type. Raises CheckpointError."""
    quantised: Any = keys.raw("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise CheckpointError(
            keys.where,
            f"quantised weights ({method or 'unknown method'})",
            "plain weights in fp32, fp16 or bf16",
            "take the original model, or a GGUF file of it",
        )
    keys.only("is_encoder_decoder", False, why="an encoder-decoder model")
