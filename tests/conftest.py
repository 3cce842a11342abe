"""Small real models for every room: random checkpoints, and bundles that the real exporter made of them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.export.exporter import export
from posttrainllm.export.tinygpt_writer import write_tinygpt

Tensors = dict[str, NDArray[np.float32]]

# A shell that starts the tests in the background has Ctrl-C ignored, and every process below would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def random_tensors(
    *, vocab: int = 256, d_model: int = 32, layers: int = 2, d_mlp: int = 0, ctx: int = 512, seed: int = 0
) -> Tensors:
    """Seeded weights of a base model in logical orientation, scaled so that the logits spread."""
    rng = np.random.default_rng(seed)
    middle = d_mlp or 4 * d_model
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocab, d_model),
        "position_embedding.weight": (ctx, d_model),
        "ln_final.weight": (d_model,),
        "ln_final.bias": (d_model,),
    }
    for i in range(layers):
        block: dict[str, tuple[int, ...]] = {"ln1": (d_model,), "ln2": (d_model,)}
        block |= {f"attn.{letter}_proj": (d_model, d_model) for letter in "qkvo"}
        block |= {"mlp.fc_in": (middle, d_model), "mlp.fc_out": (d_model, middle)}
        for name, shape in block.items():
            shapes[f"blocks.{i}.{name}.weight"] = shape
            shapes[f"blocks.{i}.{name}.bias"] = shape[:1]
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) / (np.sqrt(shape[1]) if "proj" in name and len(shape) == 2 else 2)
        if len(shape) == 1 and name.endswith(".weight"):  # gains around one
            values = 1 + values / 2
        tensors[name] = values.astype(np.float32)
    return tensors


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint(vocab=, d_model=, heads=, layers=, d_mlp=, ctx=, seed=, dtype=, config=) -> file."""

    def make(
        *, heads: int = 4, dtype: Any = "fp32", config: dict[str, Any] | None = None, **sizes: int
    ) -> Path:
        tensors = random_tensors(**sizes)
        vocab, d_model = tensors["token_embedding.weight"].shape
        sizes_in_file = {
            "layers": sum(name.endswith("ln1.weight") for name in tensors),
            "dModel": d_model,
            "heads": heads,
            "dMlp": len(tensors["blocks.0.mlp.fc_in.bias"]),
            "ctx": len(tensors["position_embedding.weight"]),
            "vocabSize": vocab,
        }
        path = tmp_path_factory.mktemp("checkpoint") / "model.tinygpt"
        write_tinygpt(path, sizes_in_file | (config or {}), tensors, dtype=dtype)
        return path

    return make


@pytest.fixture(scope="session")
def make_bundle(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """make_bundle(**the arguments of make_checkpoint, tokenizer=folder) -> bundle folder."""

    def make(*, tokenizer: Path | None = None, **arguments: Any) -> Path:
        out = tmp_path_factory.mktemp("bundle") / "model"
        return export(make_checkpoint(**arguments), out, tokenizer=tokenizer).bundle

    return make


@pytest.fixture(scope="session")
def tiny_bundle(make_bundle: Callable[..., Path]) -> Path:
    """A byte-level bundle: 2 layers, d_model 32, 4 heads of 8, context 512, random weights. Do not write to it."""
    return make_bundle(d_model=32, heads=4, layers=2, ctx=512)


@pytest.fixture(scope="session")
def bpe_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level BPE tokenizer: turn markers, end of text and a plain added token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "the tool read_file path arguments answer echo text hello world"
    tokenizer.train_from_iterator(
        [words, f'{{"tool": "echo", "arguments": {{"text": "{words}"}}}}'] * 9, trainer
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# Added tokens of the families whose templates stand in tests/agent/templates: (special, not special).
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
    "chatml": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    ),
    "llama3": (
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ],
        [],
    ),
    "mistral": (
        [
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ],
        [],
    ),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], []),
    "opened": (
        ["<|begin|>", "<|end|>"],
        [
            "<|User|>",
            "<|Assistant|>",
            "<|result|>",
            "<|call|>",
            "<|sep|>",
            "<|/call|>",
            "<think>",
            "</think>",
        ],
    ),
}


@pytest.fixture(scope="session")
def family_tokenizer() -> Callable[[str], str]:
    """family_tokenizer("chatml") -> tokenizer.json as text: byte-level BPE, or SentencePiece's manner."""
    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            made[family] = _family_tokenizer(family)
        return made[family]

    return make


def _family_tokenizer(family: str) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special, plain = FAMILIES[family]
    words = "you are a helpful assistant user system tool name arguments parameters description type object "
    texts = [
        words * 3,
        f'{{"name": "echo", "arguments": {{"text": "{words}"}}}}\n\n\n',
        "What is it?\n\n",
    ] * 5
    alphabet = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789{}[]()<>|/\"':,._-!?\\\n▁")
    if family in ("mistral", "gemma"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        first = ["<unk>", *special, *(f"<0x{value:02X}>" for value in range(256))]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        first = special
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family in ("mistral", "gemma"):  # the bytes are pieces of the vocabulary, no added tokens
        import json

        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [
            entry for entry in content["added_tokens"] if not entry["content"].startswith("<0x")
        ]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return str(tokenizer.to_str())
