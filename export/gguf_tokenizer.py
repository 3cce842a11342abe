"""The tokenizer inside a GGUF model, rebuilt as tokenizer.json, tokenizer_config.json and a chat template.

Byte-pair vocabularies (`gpt2`) come with their merges. SentencePiece ones (`llama`) come with scores: the pair
whose piece has the highest score is joined first, which is a list of merges in the order of the scores.
Raises TokenizerError: `--tokenizer DIR` then gives the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runtime.errors import TokenizerError
from .gguf_file import GGUFFile
from .gguf_keys import Keys
from .gguf_pre_tokenizers import DEFAULT, PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_REMEDY = "give the model's own tokenizer: --tokenizer DIR"
_SPACE = "▁"  # what SentencePiece writes for a space
# Control tokens that end a turn in some model, for files that name only one of theirs.
_END_TEXTS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
    )
)
# Phi-3's own tokenizer drops the white space after its control tokens, but for these.
_PHI3_KEEPS = frozenset(("<unk>", "<s>", "<|endoftext|>"))


@dataclass(frozen=True)
class GGUFTokenizer:
    """`files` by the names that Hugging Face gives them; `end_ids` end a turn, the declared one first."""

    files: Mapping[str, bytes]
    end_ids: tuple[int, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id: texts without duplicates, and ggml's type of each. Ids that stand for nothing are None."""

    texts: Sequence[str | None]
    types: Sequence[int]

    def of(self, *types: int) -> Iterator[tuple[int, str]]:
        for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=True)):
            if text is not None and kind in types:
                yield token, text

    def ids(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.texts) if text is not None}


def has_tokenizer(file: GGUFFile) -> bool:
    """Whether `file` holds a vocabulary at all."""
    return file.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def rebuild_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """The tokenizer of `file`. Raises TokenizerError, and CheckpointError for keys of the wrong type."""
    keys = Keys(file.path, file.metadata, "tokenizer.ggml.")
    vocabulary = _vocabulary(keys)
    model = keys.text("model")
    warnings: list[str] = []
    if model == "gpt2":
        parts, bos_default = _byte_pairs(keys, vocabulary, warnings)
    elif model == "llama":
        parts, bos_default = _sentence_pieces(keys, vocabulary), True
    else:
        raise TokenizerError(
            file.path,
            f"a tokenizer of the kind {model[:60]!r}",
            "gpt2 (BPE) or llama (SentencePiece)",
            _REMEDY,
        )
    special = _special_tokens(keys, vocabulary)
    bos = special.get("bos_token") if keys.boolean("add_bos_token", bos_default) else None
    eos = special.get("eos_token") if keys.boolean("add_eos_token", False) else None
    strips = model == "llama" and file.metadata.get("general.architecture") == "phi3"
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, strips=strips),
        "post_processor": _template(vocabulary.ids(), bos, eos),
        **parts,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": _json(content)}
    template = _chat_template(file, warnings)
    if template is not None:
        config["chat_template"] = template
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = _json(config)
    return GGUFTokenizer(files, _end_ids(keys, vocabulary), tuple(warnings))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _vocabulary(keys: Keys) -> _Vocabulary:
    texts: list[str | None] = [*keys.texts("tokens")]
    types = keys.numbers("token_type", len(texts))
    if types is None:
        raise keys.refuse("token_type", "a type for every token")
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if not text or (
            types[token] == UNUSED and text == f"[PAD{token}]"
        ):  # converters fill gaps with these
            texts[token] = None
        elif text in seen:
            raise TokenizerError(
                keys.path, f"tokens {seen[text]} and {token} are both {text!r:.60}", "", _REMEDY
            )
        else:
            seen[text] = token
    return _Vocabulary(texts, [int(kind) for kind in types])


def _special_tokens(keys: Keys, vocabulary: _Vocabulary) -> dict[str, str]:
    """The texts of the declared special tokens, by tokenizer_config.json's names.

    Padding that is a word of the vocabulary is left out: transformers would cut texts at that word.
    """
    added = {text for _, text in vocabulary.of(CONTROL, USER_DEFINED, UNKNOWN)}
    found = {}
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        text = _text_of(keys, key, vocabulary)
        if text is not None and (name != "pad_token" or text in added):
            found[name] = text
    return found


def _text_of(keys: Keys, key: str, vocabulary: _Vocabulary) -> str | None:
    token = keys.integer(key, len(vocabulary.texts))
    return vocabulary.texts[token] if token < len(vocabulary.texts) else None


def _end_ids(keys: Keys, vocabulary: _Vocabulary) -> tuple[int, ...]:
    ids = vocabulary.ids()
    declared = [_text_of(keys, f"{name}_token_id", vocabulary) for name in ("eos", "eot", "eom")]
    found = [ids[text] for text in declared if text is not None]
    found += [token for token, text in vocabulary.of(CONTROL) if text in _END_TEXTS]
    return tuple(dict.fromkeys(found))


def _added_tokens(vocabulary: _Vocabulary, *, strips: bool) -> list[dict[str, Any]]:
    """Tokens that are found in the text before it is cut: control ones and the user's."""
    added = []
    for token, text in enumerate(vocabulary.texts):
        if text is None:
            continue
        control = vocabulary.types[token] in (CONTROL, UNKNOWN)
        if control or vocabulary.types[token] == USER_DEFINED:
            added.append(
                {
                    "id": token,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and text not in _PHI3_KEEPS,
                    "normalized": False,
                    "special": control,
                }
            )
    return added


def _template(ids: Mapping[str, int], bos: str | None, eos: str | None) -> dict[str, Any] | None:
    """What is put around a text: its beginning and end tokens."""
    if bos is None and eos is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        piece = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        before = [{"SpecialToken": {"id": bos, "type_id": type_id}}] if bos is not None else []
        after = [{"SpecialToken": {"id": eos, "type_id": type_id}}] if eos is not None else []
        return [*before, *piece, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]}
            for text in (bos, eos)
            if text is not None
        },
    }


def _byte_pairs(keys: Keys, vocabulary: _Vocabulary, warnings: list[str]) -> tuple[dict[str, Any], bool]:
    name = keys.text("pre", DEFAULT)
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise TokenizerError(
            keys.path, f"the pre-tokenizer {name[:60]!r}", f"one of {', '.join(PRE_TOKENIZERS)}", _REMEDY
        )
    if name == DEFAULT:
        warnings.append(
            "the file names no pre-tokenizer; llama.cpp's old default is used, which may not be the model's; "
            + _REMEDY
        )
    ids = vocabulary.ids()
    merges = []
    for number, merge in enumerate(keys.texts("merges")):
        first, _, second = merge.partition(" ")
        if first not in ids or second not in ids or first + second not in ids:
            raise TokenizerError(
                keys.path, f"merge {number} is {merge!r:.60}", "tokens of its vocabulary", _REMEDY
            )
        merges.append(merge)
    parts = {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(rule.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(ids, merges, ignore_merges=rule.ignore_merges),
    }
    return parts, rule.add_bos


def _model(
    ids: Mapping[str, int],
    merges: Sequence[str] | Sequence[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _sentence_pieces(keys: Keys, vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = keys.numbers("scores", len(vocabulary.texts))
    if scores is None:
        raise keys.refuse("scores", "a score for every token")
    if not np.isfinite(np.asarray(scores)).all():
        raise keys.refuse("scores", "finite numbers")
    byte_tokens = {text for _, text in vocabulary.of(BYTE)}
    byte_fallback = all(f"<0x{byte:02X}>" in byte_tokens for byte in range(256))
    unknown = next((text for _, text in vocabulary.of(UNKNOWN)), None)
    prefix = keys.boolean("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoder: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": _model(
            vocabulary.ids(), _merges(vocabulary, scores), unknown=unknown, byte_fallback=byte_fallback
        ),
    }


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first. Control and byte tokens are never made."""
    pieces = {text: token for token, text in vocabulary.of(NORMAL, UNUSED)}
    merges = []
    for text in sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece])):
        ways = []
        for middle in range(1, len(text)):
            first, second = pieces.get(text[:middle]), pieces.get(text[middle:])
            if first is not None and second is not None:
                ways.append((first, second, text[:middle], text[middle:]))
        merges += [(first, second) for _, _, first, second in sorted(ways)]
    return merges


def _chat_template(file: GGUFFile, warnings: list[str]) -> str | None:
    keys = Keys(file.path, file.metadata, "tokenizer.")
    others = sorted(key for key in file.metadata if key.startswith("tokenizer.chat_template."))
    if others:
        names = ", ".join(key.removeprefix("tokenizer.chat_template.") for key in others)
        warnings.append(f"it has further chat templates, which are left out: {names}")
    return keys.text("chat_template") if "chat_template" in keys else None
