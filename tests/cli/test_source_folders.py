"""MODEL as a Hugging Face folder: exported at the first start, found at the next, exported again when it changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Run = Callable[..., Any]
ECHO = Path(__file__).parents[2] / "tools_schemas" / "echo.json"
TEMPLATE = Path(__file__).parents[1] / "agent" / "templates" / "hermes.jinja"


@pytest.fixture
def folder(tmp_path: Path, family_tokenizer: Callable[[str], str]) -> Path:
    """A Llama of one layer with random weights, in ChatML."""
    numpy_files = pytest.importorskip("safetensors.numpy")
    tokenizer = family_tokenizer("chatml")
    entries = json.loads(tokenizer)
    ids = {entry["content"]: entry["id"] for entry in entries["added_tokens"]}
    vocab = max(*ids.values(), *entries["model"]["vocab"].values()) + 1
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": vocab,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "eos_token_id": ids["<|im_end|>"],
    }  # fmt: skip
    shapes = {
        "model.embed_tokens": (vocab, 32), "model.norm": (32,),
        "model.layers.0.input_layernorm": (32,), "model.layers.0.post_attention_layernorm": (32,),
        "model.layers.0.self_attn.q_proj": (32, 32), "model.layers.0.self_attn.k_proj": (16, 32),
        "model.layers.0.self_attn.v_proj": (16, 32), "model.layers.0.self_attn.o_proj": (32, 32),
        "model.layers.0.mlp.gate_proj": (48, 32), "model.layers.0.mlp.up_proj": (48, 32),
        "model.layers.0.mlp.down_proj": (32, 48),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    weights = {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()
    }
    source = tmp_path / "model"
    source.mkdir()
    numpy_files.save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text(tokenizer)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (source / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return source


def test_a_hugging_face_folder_is_exported_once_for_each_content(run: Run, folder: Path) -> None:
    def start() -> Any:
        done = run("agent", folder, "--tools", ECHO, "--single", "hi", "--max-tokens", 4, "--json-out")
        assert done.returncode in (0, 4), done.stderr
        assert [json.loads(line)["type"] for line in done.stdout.splitlines()][:2] == ["user", "assistant"]
        return "agent: exported" in done.stderr

    assert [start(), start()] == [True, False]
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# changed #}")
    assert [start(), start()] == [True, False]


def test_a_folder_without_a_model_is_one_line(
    run: Run, error_line: Callable[[str], str], tmp_path: Path
) -> None:
    done = run("agent", tmp_path, "--tools", ECHO, "--single", "x")
    assert done.returncode == 3
    assert "a folder without bundle.json or config.json" in error_line(done.stderr)
