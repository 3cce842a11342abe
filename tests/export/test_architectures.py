"""The table of architectures is consistent with itself."""

from __future__ import annotations

from dataclasses import replace

from posttrainllm.export.architectures import TINYGPT, ModelConfig, tensor_shapes

CONFIG = ModelConfig(
    architecture="tinygpt",
    vocab_size=11,
    hidden_size=6,
    intermediate_size=5,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=3,
    context_length=9,
    norm="layer_norm",
    norm_eps=1e-5,
    positions="learned",
    activation="gelu_erf",
    attention_scale=3**-0.5,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied_head=True,
    gated_mlp=False,
)


def test_tinygpt_names_exactly_the_tensors_of_its_config() -> None:
    names = TINYGPT.source_names(CONFIG)
    assert names.keys() == tensor_shapes(CONFIG).keys()
    assert len(set(names.values())) == len(names)


def test_parameter_count_is_the_formats_own_formula() -> None:
    big = replace(
        CONFIG,
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        layers=12,
        heads=8,
        context_length=256,
    )
    big = replace(big, kv_heads=8, head_dim=32)
    count = sum(a * (b[0] if b else 1) for a, *b in tensor_shapes(big).values())
    assert count == 9_608_704  # the gallery's "huge" preset


def test_names_of_tinygpt_tensors() -> None:
    names = TINYGPT.source_names(CONFIG)
    assert names["model.layers.1.self_attn.o_proj.weight"] == "blocks.1.attn.o_proj.weight"
    assert names["model.layers.0.mlp.up_proj.bias"] == "blocks.0.mlp.fc_in.bias"
