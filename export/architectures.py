"""One normalised description of a decoder, and what each architecture calls its tensors.

Readers translate their file to `ModelConfig` and to our tensor names, which are those of Hugging Face's
Llama and Gemma; the graph builder and the reference ask what the config says, never what the model is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LinearLayout = Literal["in_out", "out_in"]  # how a source stores a linear weight
Activation = Literal["gelu_erf", "gelu_tanh", "relu", "silu"]
NormPlaces = Literal["before", "after", "around"]  # where a block's norms stand: around attention and MLP
Positions = Literal["learned", "rotary"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies differ from theta's plain powers; fields that a kind does not use are unset.

    linear: divided by `factor`. dynamic: a larger theta beyond `original_context`. llama3: low frequencies
    divided by `factor` (arXiv 2407.21783). yarn: a ramp between both (arXiv 2309.00071). longrope: divided by one of
    two lists (arXiv 2402.13753). `attention_factor` multiplies cosines and sines.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (arXiv 2104.09864): component j turns with component j + dim / 2, the rest stays."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class NormNames:
    """The norms of a block by what they feed or follow; None where there is none."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


_NORM_NAMES: Mapping[NormPlaces, NormNames] = {
    "before": NormNames("input_layernorm", None, "post_attention_layernorm", None),
    "after": NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": NormNames(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder computes. `head_dim` is the true size of a head, before any padding.

    A norm's gain is `norm_offset` + weight; `qk_norm` normalises queries and keys before they turn, each head by itself or the
    whole projection. Attention scores are multiplied by `attention_scale`, then capped (c · tanh(x / c)).
    `windowed_layers` attend to the last `sliding_window` ids, themselves included, and turn by
    `local_rotary` if there is one; `unrotated_layers` do not turn. Multipliers apply to the embedding, to what a
    layer adds to the stream, and to the logits. With `parallel_residual` attention and MLP see the same stream.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    norm: Literal["layer_norm", "rms_norm"]
    norm_eps: float
    positions: Positions
    activation: Activation
    attention_scale: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_head: bool
    gated_mlp: bool = True
    norm_places: NormPlaces = "before"
    norm_offset: float = 0.0
    parallel_residual: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    rotary: Rotary | None = None
    local_rotary: Rotary | None = None
    unrotated_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    @property
    def norm_names(self) -> NormNames:
        return _NORM_NAMES[self.norm_places]

    def window(self, layer: int) -> int | None:
        """How many ids a query of `layer` sees, itself included; None for all."""
        if (
            layer in self.windowed_layers
            and self.sliding_window
            and self.sliding_window < self.context_length
        ):
            return self.sliding_window
        return None

    def layer_rotary(self, layer: int) -> Rotary | None:
        """How queries and keys of `layer` turn."""
        if layer in self.unrotated_layers:
            return None
        local = self.local_rotary if layer in self.windowed_layers else None
        return local or self.rotary


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by our name; linear weights are [out, in]."""
    width = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    if config.positions == "learned":
        shapes["model.embed_positions.weight"] = (config.context_length, width)
    shapes |= _norm_shapes(config, "model.norm")
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    for layer in range(config.layers):
        shapes |= _block_shapes(config, f"model.layers.{layer}")
    return shapes


def _block_shapes(config: ModelConfig, block: str) -> dict[str, tuple[int, ...]]:
    c, m = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    names = config.norm_names
    for norm in (names.attention_in, names.attention_out, names.mlp_in, names.mlp_out):
        if norm is not None:
            shapes |= _norm_shapes(config, f"{block}.{norm}")
    linear = {
        "self_attn.q_proj": ((q, c), config.qkv_bias),
        "self_attn.k_proj": ((kv, c), config.qkv_bias),
        "self_attn.v_proj": ((kv, c), config.qkv_bias),
        "self_attn.o_proj": ((c, q), config.output_bias),
        "mlp.up_proj": ((m, c), config.mlp_bias),
        "mlp.down_proj": ((c, m), config.mlp_bias),
    }
    if config.gated_mlp:
        linear["mlp.gate_proj"] = ((m, c), config.mlp_bias)
    for name, (shape, bias) in linear.items():
        shapes[f"{block}.{name}.weight"] = shape
        if bias:
            shapes[f"{block}.{name}.bias"] = shape[:1]
    if config.qk_norm is not None:
        wide = config.qk_norm == "projection"
        shapes[f"{block}.self_attn.q_norm.weight"] = (q if wide else config.head_dim,)
        shapes[f"{block}.self_attn.k_norm.weight"] = (kv if wide else config.head_dim,)
    return shapes


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if config.norm == "layer_norm" else ("weight",)
    return {f"{name}.{part}": (config.hidden_size,) for part in parts}


@dataclass(frozen=True)
class Architecture:
    """What a format calls its modules (`{i}` is the block), by our name of the module."""

    name: str
    modules: Mapping[str, str]

    def source_names(self, config: ModelConfig) -> dict[str, str]:
        """Our name to the file's, for every tensor of `config`."""
        names = {}
        for ours, theirs in self.modules.items():
            blocks = range(config.layers) if "{i}" in ours else range(1)
            for i in blocks:
                for part in (".weight", ".bias"):
                    names[ours.format(i=i) + part] = theirs.format(i=i) + part
        return {name: names[name] for name in tensor_shapes(config)}


TINYGPT = Architecture(
    name="tinygpt",
    modules={
        "model.embed_tokens": "token_embedding",
        "model.embed_positions": "position_embedding",
        "model.norm": "ln_final",
        "model.layers.{i}.input_layernorm": "blocks.{i}.ln1",
        "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attn.q_proj",
        "model.layers.{i}.self_attn.k_proj": "blocks.{i}.attn.k_proj",
        "model.layers.{i}.self_attn.v_proj": "blocks.{i}.attn.v_proj",
        "model.layers.{i}.self_attn.o_proj": "blocks.{i}.attn.o_proj",
        "model.layers.{i}.post_attention_layernorm": "blocks.{i}.ln2",
        "model.layers.{i}.mlp.up_proj": "blocks.{i}.mlp.fc_in",
        "model.layers.{i}.mlp.down_proj": "blocks.{i}.mlp.fc_out",
    },
)
