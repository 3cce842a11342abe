"""A byte-level BPE, trained on the generator, that cuts a name the same way wherever it stands."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import specialist_data as data
from specialist_model import CONTEXT, VOCAB
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from posttrainllm.agent.tools import Tool
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Letters together; each digit, punctuation mark and JSON escape by itself; spaces apart from words. So a
# name has the same ids in a question, in a call, in a result and in an answer, and copying is exact.
SPLIT = r"""\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]|[\p{L}\p{M}]+|\p{N}| +|\n+|[^\s\p{L}\p{M}\p{N}]|\s"""


def fixed_texts() -> list[str]:
    """Stretches of the template that never change: one id each, since the model has nothing to read there."""
    text = data.DIALECT.system("\0", [Tool("x")])[1].text
    before, after = text.split("\0")[1].split("- x()")
    return [before, after, '{"tool":"', '","stdout":"', '","stderr":"', '","exit_code":', ": string"]


def train_tokenizer(folder: Path, seed: int, exchanges: int = 30000) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    fixed = fixed_texts()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(fixed),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(data.texts(Random(f"tokenizer/{seed}"), exchanges), trainer)
    encoder.add_tokens([AddedToken(text, normalized=False, special=False) for text in fixed])
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def open_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    path = folder / "tokenizer.json"
    return HuggingFaceTokenizer(path.read_text(encoding="utf-8"), str(path))
