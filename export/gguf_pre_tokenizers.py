"""How text is cut before byte-pair merges, by the name that a GGUF file gives it (tokenizer.ggml.pre).

The names are llama.cpp's (`src/llama-vocab.cpp`); the rules are those of the models' own tokenizer.json,
normalisation included, which llama.cpp leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_O200K = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


@dataclass(frozen=True)
class PreTokenizer:
    """`steps` in the form of tokenizer.json. `add_bos` is what holds where the file does not say."""

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_PLAIN = PreTokenizer((_byte_level(use_regex=True),))
_PLAIN_NFC = PreTokenizer(_PLAIN.steps, nfc=True)
_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)))
_GPT4 = PreTokenizer((_split(_LLAMA3), _byte_level(use_regex=False)))
_LLAMA_BPE = PreTokenizer(_GPT4.steps, ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_split(_QWEN2), _byte_level(use_regex=False)), nfc=True)
_MISTRAL = PreTokenizer((_split(_TEKKEN), _byte_level(use_regex=False)), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_split(_O200K), _byte_level(use_regex=False)))
# What llama.cpp does for files from before the names: three cuts one after the other.
_UNNAMED = PreTokenizer(
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(_GPT2),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        _byte_level(use_regex=False),
    )
)

DEFAULT = "default"
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    DEFAULT: _UNNAMED,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN_NFC,
    "mpt": _PLAIN_NFC,
    "smollm": _DIGITS,
    "refact": _DIGITS,  # Granite
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "dbrx": _GPT4,  # OLMo 2, Phi-4
    "smaug-bpe": _GPT4,  # SmolLM3
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _MISTRAL,
    "gpt-4o": _GPT4O,  # Phi-4-mini
}
