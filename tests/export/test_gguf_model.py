"""GGUF files written the way llama.cpp's converter does, from tiny models of transformers, read back.

Names come from the gguf package's own table, keys from its writer; transformers decides what is right: its
tensors, and the logits of a model that it builds from the config and tensors that we read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.export.gguf_model import GGUFModel

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Tensor = NDArray[np.float32]
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 500.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows (half, pair) of each head become (pair, half): what ggml's rotation of neighbours wants."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def rotary_neighbours(config: Any, name: str, value: Tensor) -> Tensor:
    if re.search(r"q_proj\.(weight|bias)$", name):
        return permuted(value, config.num_attention_heads)
    if re.search(r"k_proj\.(weight|bias)$", name):
        return permuted(value, config.num_key_value_heads)
    return value


def norms_plus_one(config: Any, name: str, value: Tensor) -> Tensor:
    return value + 1 if name.endswith("norm.weight") else value


def conv1d(config: Any, name: str, value: Tensor) -> Tensor:
    return value.T if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name) else value


def packed_heads(config: Any, name: str, value: Tensor) -> Tensor:
    if "query_key_value" not in name:
        return value
    parts = value.reshape(config.num_attention_heads, 3, -1, *value.shape[1:])
    return np.concatenate([parts[:, i].reshape(-1, *value.shape[1:]) for i in range(3)])


def as_it_is(config: Any, name: str, value: Tensor) -> Tensor:
    return value


@dataclass
class Case:
    """A tiny model: config class and values, and what the converter does beyond names."""

    arch: str
    config: str
    values: dict[str, Any]
    change: Callable[[Any, str, Tensor], Tensor] = as_it_is
    extra: Callable[[Any, Any], None] = lambda writer, config: None
    sizes: dict[str, Any] = field(default_factory=dict)


SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rotation(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(8)


def llama3_factors(writer: Any, config: Any) -> None:
    """The frequency factors of Llama 3's rule (arXiv 2407.21783), as a tensor."""
    rotation(writer, config)
    rule = LLAMA3
    factors = []
    for i in range(0, 8, 2):
        length = 2 * math.pi * rule["rope_theta"] ** (i / 8)
        original = rule["original_max_position_embeddings"]
        if length < original / rule["high_freq_factor"]:
            factors.append(1.0)
        elif length > original / rule["low_freq_factor"]:
            factors.append(rule["factor"])
        else:
            smooth = (original / length - rule["low_freq_factor"]) / 3
            factors.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    assert len(set(factors)) > 2
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def yarn(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(16)


def phi3_keys(writer: Any, config: Any) -> None:
    rotation(writer, config)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    scaling = config.rope_parameters
    if "long_factor" in scaling:
        original = config.original_max_position_embeddings
        scale = math.log(config.max_position_embeddings / original) / math.log(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + scale))
        for kind in ("long", "short"):
            factors = np.array(scaling[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def gemma2_keys(writer: Any, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3_keys(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(500.0)


def granite_keys(writer: Any, config: Any) -> None:
    rotation(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def neox_keys(writer: Any, config: Any) -> None:
    writer.add_rope_dimension_count(4)
    writer.add_parallel_residual(config.use_parallel_residual)


GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GEMMA = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
CASES = {
    "llama": Case("LLAMA", "LlamaConfig", {"attention_bias": True}, rotary_neighbours, rotation),
    "llama3": Case("LLAMA", "LlamaConfig", {"rope_parameters": LLAMA3}, rotary_neighbours, llama3_factors),
    "tied": Case("LLAMA", "LlamaConfig", {"tie_word_embeddings": True}, rotary_neighbours, rotation),
    "wide heads": Case("LLAMA", "LlamaConfig", {"head_dim": 8}, rotary_neighbours, rotation),
    "smollm3": Case(
        "SMOLLM3",
        "SmolLM3Config",
        {"num_hidden_layers": 5, "no_rope_layers": None},
        rotary_neighbours,
        rotation,
    ),
    "granite": Case("GRANITE", "GraniteConfig", GRANITE, rotary_neighbours, granite_keys),
    "qwen2": Case("QWEN2", "Qwen2Config", {}),
    "qwen2 yarn": Case("QWEN2", "Qwen2Config", {"rope_parameters": YARN}, extra=yarn),
    "qwen3": Case("QWEN3", "Qwen3Config", {"head_dim": 16}),
    "olmo2": Case("OLMO2", "Olmo2Config", {}),
    "phi3": Case("PHI3", "Phi3Config", {"sliding_window": 5}, extra=phi3_keys),
    "phi3 long": Case(
        "PHI3",
        "Phi3Config",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16, "tie_word_embeddings": True},
        extra=phi3_keys,
    ),
    "gemma": Case("GEMMA", "GemmaConfig", GEMMA, norms_plus_one),
    "gemma2": Case(
        "GEMMA2",
        "Gemma2Config",
        GEMMA | {"query_pre_attn_scalar": 16, "sliding_window": 5},
        norms_plus_one,
        gemma2_keys,
    ),
    "gemma3": Case(
        "GEMMA3",
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPE,
        },
        norms_plus_one,
        gemma3_keys,
    ),
    "gpt2": Case("GPT2", "GPT2Config", {"n_positions": 64, "n_ctx": 64}, conv1d),
    "gptneox": Case(
        "GPTNEOX",
        "GPTNeoXConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        packed_heads,
        neox_keys,
    ),
}


@dataclass
class Written:
    path: Path
    model: Any
    tensors: dict[str, Tensor]


def write(case: Case, folder: Path) -> Written:
    """The tiny model of `case` as transformers has it, and as a GGUF."""
    torch.manual_seed(7)
    config = getattr(transformers, case.config)(**(SIZES | case.values))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.ndim == 1 and name.endswith("weight") and "GEMMA" not in case.arch
            parameter.copy_(torch.randn_like(parameter) * 0.2 + gain)
    tensors = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    head = tensors.pop("lm_head.weight")
    if not config.tie_word_embeddings:
        tensors["embed_out.weight" if case.arch == "GPTNEOX" else "lm_head.weight"] = head
    path = folder / "model.gguf"
    arch = gguf.MODEL_ARCH[case.arch]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    keys(writer, config)
    case.extra(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, value in tensors.items():
        changed = case.change(config, name, value)
        if case.change is conv1d and name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, np.ascontiguousarray(changed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model, tensors)


def keys(writer: Any, config: Any) -> None:
    """The keys that the converter writes for nearly all."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    gpt2 = config.model_type == "gpt2"
    writer.add_feed_forward_length(4 * config.hidden_size if gpt2 else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if kv := getattr(config, "num_key_value_heads", None):
        writer.add_head_count_kv(kv)
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for name in ("layer_norm_eps", "layer_norm_epsilon"):
        if (eps := getattr(config, name, None)) is not None:
            writer.add_layer_norm_eps(eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = getattr(config, "rope_parameters", None) or {}
    if (theta := rope.get("full_attention", rope).get("rope_theta")) and config.model_type != "gpt_neox":
        writer.add_rope_freq_base(theta)


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(CASES[request.param], tmp_path_factory.mktemp("gguf"))


def test_every_tensor_comes_back_under_its_own_name(written: Written) -> None:
    with GGUFModel(written.path) as model:
        expected = {name: value.shape for name, value in written.tensors.items()}
        assert model.shapes == expected
        for name, value in written.tensors.items():
            # Gemma's norms went through + 1 and back; all others did not change.
            np.testing.assert_allclose(model.tensor(name), value, rtol=0, atol=2e-7, err_msg=name)


def test_transformers_computes_the_same_from_what_was_read(written: Written) -> None:
    with GGUFModel(written.path) as model:
        config = transformers.AutoConfig.for_model(**dict(model.config))
        twin = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        state = {name: torch.from_numpy(np.ascontiguousarray(model.tensor(name))) for name in model.shapes}
        if "embed_out.weight" in state:  # its name in files; transformers 5 converts on loading
            state["lm_head.weight"] = state.pop("embed_out.weight")
        left = twin.load_state_dict(state, strict=False)
        assert not left.unexpected_keys
        twin.tie_weights()
    ids = torch.arange(50)[None] * 7 % 60
    with torch.no_grad():
        expected, got = written.model(ids).logits, twin(ids).logits
    spread = float(expected.max() - expected.min())
    assert float((expected - got).abs().max()) < 1e-5 * spread
