"""One normalised description of a decoder, and one row per architecture that we know.

Readers translate their file to `ModelConfig` and to Hugging Face's tensor names; the graph builder and
the reference ask what the config says, never what the model is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LinearLayout = Literal["in_out", "out_in"]  # how a source stores a linear weight


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder computes. `head_dim` is the true size of a head, before any padding.

    A feature that has one value so far is typed as that value: whoever adds a second one widens the type
    and is led to every place that must branch.
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
    norm: Literal["layer_norm"]
    norm_eps: float
    positions: Literal["learned"]
    activation: Literal["gelu_erf"]
    biases: Literal[True]
    tied_head: Literal[True]


@dataclass(frozen=True)
class Architecture:
    """One row: the features that its files never state, its dialect, and what it calls its tensors.

    `tensor_names` maps our name (Hugging Face's style, `{i}` is the block) to the file's.
    """

    name: str
    dialect: str
    norm_eps: float
    tensor_names: Mapping[str, str]

    def source_names(self, config: ModelConfig) -> dict[str, str]:
        """Our name to the file's, for every tensor of `config`."""
        names = {}
        for ours, theirs in self.tensor_names.items():
            blocks = range(config.layers) if "{i}" in ours else range(1)
            names.update({ours.format(i=i): theirs.format(i=i) for i in blocks})
        return names


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by our name; linear weights are [out, in]."""
    c, m = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, c),
        "model.embed_positions.weight": (config.context_length, c),
        "model.norm.weight": (c,),
        "model.norm.bias": (c,),
    }
    linear = {
        "self_attn.q_proj": (q, c),
        "self_attn.k_proj": (kv, c),
        "self_attn.v_proj": (kv, c),
        "self_attn.o_proj": (c, q),
        "mlp.up_proj": (m, c),
        "mlp.down_proj": (c, m),
    }
    for i in range(config.layers):
        block = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{norm}.weight"] = (c,)
            shapes[f"{block}.{norm}.bias"] = (c,)
        for name, shape in linear.items():
            shapes[f"{block}.{name}.weight"] = shape
            shapes[f"{block}.{name}.bias"] = shape[:1]
    return shapes


def _with_bias(modules: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{ours}.{part}": f"{theirs}.{part}"
        for ours, theirs in modules.items()
        for part in ("weight", "bias")
    }


TINYGPT = Architecture(
    name="tinygpt",
    dialect="posttrainllm",
    norm_eps=1e-5,
    tensor_names={
        "model.embed_tokens.weight": "token_embedding.weight",
        "model.embed_positions.weight": "position_embedding.weight",
    }
    | _with_bias(
        {
            "model.norm": "ln_final",
            "model.layers.{i}.input_layernorm": "blocks.{i}.ln1",
            "model.layers.{i}.self_attn.q_proj": "blocks.{i}.attn.q_proj",
            "model.layers.{i}.self_attn.k_proj": "blocks.{i}.attn.k_proj",
            "model.layers.{i}.self_attn.v_proj": "blocks.{i}.attn.v_proj",
            "model.layers.{i}.self_attn.o_proj": "blocks.{i}.attn.o_proj",
            "model.layers.{i}.post_attention_layernorm": "blocks.{i}.ln2",
            "model.layers.{i}.mlp.up_proj": "blocks.{i}.mlp.fc_in",
            "model.layers.{i}.mlp.down_proj": "blocks.{i}.mlp.fc_out",
        }
    ),
)

ARCHITECTURES = {row.name: row for row in (TINYGPT,)}
