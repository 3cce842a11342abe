"""Every architecture against transformers, on tiny models with random weights.

transformers decides what is right: its logits of the whole text, against the exported graph fed in one chunk, in
single steps and in random pieces, over one buffer that is past and present.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm.export import parity
from posttrainllm.export.exporter import export
from posttrainllm.export.huggingface import HuggingFaceCheckpoint
from posttrainllm.export.parity import Case, run_case
from posttrainllm.runtime.errors import CheckFailedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 259,
}
WIDE = SIZES | {"head_dim": 16}
GPT2 = {"vocab_size": 270, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 259}
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {"hidden_size": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "rope_theta": 10000.0,
}
PHI3_LONG = SIZES | {"rope_parameters": LONG, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama, biases, tied": (
        "Llama",
        SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, odd heads": (
        "Llama",
        SIZES | {"hidden_size": 36, "head_dim": 14, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama, llama3 scaling": ("Llama", WIDE | {"rope_parameters": LLAMA3}),
    "llama, linear scaling": ("Llama", WIDE | {"rope_parameters": LINEAR}),
    "llama, dynamic scaling": ("Llama", WIDE | {"rope_parameters": DYNAMIC}),
    "llama, yarn": ("Llama", WIDE | {"rope_parameters": YARN}),
    "llama, yarn with mscale": (
        "Llama",
        WIDE | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0}},
    ),
    "smollm3": ("SmolLM3", SIZES | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3, windows": (
        "SmolLM3",
        SIZES | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5},
    ),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mistral, windows": ("Mistral", SIZES | {"sliding_window": 7, "head_dim": 24}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, windows": (
        "Qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", WIDE),
    "qwen3, odd heads": ("Qwen3", SIZES | {"head_dim": 20, "attention_bias": True}),
    "gemma": ("Gemma", SIZES | {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        SIZES | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 10, "num_hidden_layers": 3},
    ),
    "gemma3": ("Gemma3Text", SIZES | {"head_dim": 10, "sliding_window": 5, "num_hidden_layers": 7}),
    "gemma3, scaling and a cap": (
        "Gemma3Text",
        WIDE
        | {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", SIZES | {"sliding_window": 9}),
    "phi3, partial rotary": (
        "Phi3",
        SIZES
        | {"hidden_size": 64, "rope_parameters": {"partial_rotary_factor": 0.75, "rope_type": "default"}},
    ),
    "phi3, short texts": ("Phi3", PHI3_LONG),
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied": (
        "GPT2",
        GPT2 | {"n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox, sequential": (
        "GPTNeoX",
        NEOX
        | {
            "hidden_size": 48,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "olmo2": ("Olmo2", SIZES),
    "olmo2, odd heads": ("Olmo2", SIZES | {"hidden_size": 40, "num_key_value_heads": 4}),
    # Every matrix fits both ways: only the numbers tell whether one was turned.
    "llama, all square": ("Llama", SIZES | {"intermediate_size": 32, "num_key_value_heads": 4}),
    "gpt2, all square": ("GPT2", GPT2 | {"n_inner": 24}),
    "gpt_neox, all square": ("GPTNeoX", NEOX | {"intermediate_size": 128}),
    "granite": (
        "Granite",
        SIZES
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
}


def randomised(kind: str, values: dict[str, Any]) -> Any:
    """A model whose every parameter matters: norms away from 1, biases away from 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def splits(n: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(n)
    pieces = []
    for _ in range(2):
        cuts = np.sort(rng.choice(np.arange(1, n), size=5, replace=False))
        pieces.append(tuple(int(size) for size in np.diff([0, *cuts, n])))
    return [(n,), (1,) * n, *pieces]


def assert_parity(model: Any, bundle: Path, manifest: Any, n: int) -> None:
    ids = np.random.default_rng(1).integers(0, 270, n)
    with torch.no_grad():
        expected = model(torch.tensor(ids)[None]).logits[0].numpy()
    spread = float(expected.max() - expected.min())
    session = parity._session(bundle / "model.onnx")
    for number, chunks in enumerate(splits(n)):
        case = Case("", chunks, 0, n + number)
        for rows, found in run_case(session, manifest.kv, 270, ids, case):
            worst = float(np.abs(found - expected[rows]).max()) / spread
            assert worst < 1e-4, (chunks, rows, worst)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str, tmp_path: Path, tokenizer_files: Callable[[Path], None]
) -> None:
    model = randomised(*MODELS[name])
    model.save_pretrained(tmp_path / "model")
    tokenizer_files(tmp_path / "model")
    report = export(tmp_path / "model", tmp_path / "bundle", precision="fp32")
    assert_parity(model, report.bundle, report.manifest, min(48, report.manifest.context_length))


@pytest.mark.parametrize("name", ["llama, all square", "gpt2, all square"])
def test_a_reader_that_turns_square_matrices_is_found_out(
    name: str, tmp_path: Path, tokenizer_files: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check orients the weights by itself, from the order in which the file stores them."""
    randomised(*MODELS[name]).save_pretrained(tmp_path / "model")
    tokenizer_files(tmp_path / "model")
    right = HuggingFaceCheckpoint.tensor

    def turned(self: HuggingFaceCheckpoint, name: str) -> Any:
        values = right(self, name)
        return values.T if values.ndim == 2 and values.shape[0] == values.shape[1] else values

    monkeypatch.setattr(HuggingFaceCheckpoint, "tensor", turned)
    with pytest.raises(CheckFailedError, match="differs from the source"):
        export(tmp_path / "model", tmp_path / "bundle", precision="fp32")
    assert not (tmp_path / "bundle").exists()
