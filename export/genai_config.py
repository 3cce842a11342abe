"""genai_config.json: lets onnxruntime-genai (C++, C#, Java, Python) open a bundle's folder."""

from __future__ import annotations

import json
from typing import Any

from ..runtime.bundle import GRAPH, Manifest

FILE = "genai_config.json"


def genai_config(manifest: Manifest) -> dict[str, Any]:
    """The configuration as JSON data.

    onnxruntime-genai stops at any of its end ids: the model's stop ids, else the id that ends a turn. A marker that
    is several ids long (a byte-level model has no other) cannot be one: the list is then empty and callers stop by
    text or length.
    """
    turn = manifest.end_of_turn_ids if len(manifest.end_of_turn_ids) == 1 else []
    ends = manifest.stop_ids or turn
    config = manifest.config
    return {
        "model": {
            "type": "decoder",
            "context_length": manifest.context_length,
            "vocab_size": manifest.vocab_size,
            "eos_token_id": ends,
            "pad_token_id": ends[0] if ends else 0,
            "decoder": {
                "filename": GRAPH,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": manifest.kv.head_dim,
                "hidden_size": config["hidden_size"],
                "num_attention_heads": config["heads"],
                "num_hidden_layers": manifest.kv.layers,
                "num_key_value_heads": manifest.kv.heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    **({"position_ids": "position_ids"} if config["positions"] == "learned" else {}),
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": manifest.context_length,
            "num_beams": 1,
            "past_present_share_buffer": manifest.kv.style == "shared",
        },
    }


def to_text(manifest: Manifest) -> str:
    return json.dumps(genai_config(manifest), indent=2) + "\n"
