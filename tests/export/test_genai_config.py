"""onnxruntime-genai opens our folder and decodes the same ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm.export import reference
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.genai_config import genai_config
from posttrainllm.runtime.bundle import read_manifest


def test_head_size_is_the_padded_one(make_file: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(make_file().save(tmp_path), out)
    config = json.loads((out / "genai_config.json").read_text(encoding="utf-8"))
    assert config == genai_config(read_manifest(out))
    assert config["model"]["decoder"]["head_size"] == 8
    assert config["model"]["context_length"] == 9
    assert config["search"]["past_present_share_buffer"] is True


@pytest.mark.peer
@pytest.mark.parametrize(
    "sizes", [{"vocab": 256, "width": 32, "heads": 4}, {"vocab": 77, "width": 30, "heads": 5}]
)
def test_onnxruntime_genai_decodes_the_same_ids(
    make_file: Callable[..., Any], tmp_path: Path, sizes: dict[str, int]
) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    path = make_file(ctx=48, layers=2, middle=40, **sizes).save(tmp_path)
    out = tmp_path / "out"
    export(path, out)
    prompt = [72, 5, 33, 8, 61]
    expected = list(prompt)
    with open_checkpoint(path) as checkpoint:
        while len(expected) < 40:
            row = reference.logits(checkpoint, np.array([expected]), np.arange(len(expected))[None])[0, -1]
            expected.append(int(row.argmax()))
    model = og.Model(str(out))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=40)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert generator.get_sequence(0).tolist() == expected


@pytest.mark.peer
def test_onnxruntime_genai_opens_the_tokenizer(
    make_file: Callable[..., Any], bpe_tokenizer: Path, tmp_path: Path
) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    from tokenizers import Tokenizer

    out = tmp_path / "out"
    export(make_file(vocab=450).save(tmp_path), out, tokenizer=bpe_tokenizer)
    text = "<|im_start|>user\nread_file hello<|im_end|>"
    ours = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    assert og.Tokenizer(og.Model(str(out))).encode(text).tolist() == ours
    config = json.loads((out / "genai_config.json").read_text(encoding="utf-8"))
    assert config["model"]["eos_token_id"] == [2]
