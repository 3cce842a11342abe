"""Added tokens that a folder declares beside tokenizer.json, put into it.

tokenizer_config.json (`added_tokens_decoder`, `extra_special_tokens`, `additional_special_tokens`, the named ones
such as `pad_token`) and, in folders of older transformers, added_tokens.json and special_tokens_map.json may name
tokens that tokenizer.json lacks, or give other rules of white space for one. transformers adds them when it loads the folder, so the
model was trained with them: without them a marker would be spelled in letters. What is read, and in which order, is
transformers' (github.com/huggingface/transformers, `PreTrainedTokenizerBase._from_pretrained`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runtime.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class _Declared:
    """A token that `file` declares, with its id where the file states one."""

    file: str
    token: AddedToken
    id: int | None = None


def add_declared_tokens(
    tokenizer: Tokenizer, files: Mapping[str, bytes], vocab_size: int, where: object
) -> tuple[bool, tuple[str, ...]]:
    """Add to `tokenizer` what `files` declare beyond it: whether anything changed, and warnings.

    A token whose id would not be the declared one, or not below `vocab_size`, is left out with a warning.
    Raises TokenizerError for a declaration that cannot be read.
    """
    changed, warnings = False, []
    for declared in _declarations(files, where):
        text, entry = declared.token.content, declared.token
        known = tokenizer.token_to_id(text)
        present = tokenizer.get_added_tokens_decoder().get(known) if known is not None else None
        if present is not None and (declared.id is None or _same(present, entry)):
            continue
        token = _next_id(tokenizer) if known is None else known
        if declared.id not in (None, token):
            warnings.append(f"{declared.file} puts {text!r:.60} at id {declared.id}, where tokenizer.json "
                            f"has room at {token}: it is left out")  # fmt: skip
        elif token >= vocab_size:
            if declared.id is not None or declared.file == ADDED_TOKENS:
                warnings.append(f"{declared.file} puts {text!r:.60} at id {token}; the model knows {vocab_size}: "
                                "it is left out")  # fmt: skip
        else:
            tokenizer.add_tokens([entry])
            changed = True
    return changed, tuple(warnings)


def _declarations(files: Mapping[str, bytes], where: object) -> Iterator[_Declared]:
    from tokenizers import AddedToken

    config = _object(files.get(CONFIG))
    stated = config.get("added_tokens_decoder")
    older = stated is None
    if isinstance(stated, dict) and all(key.isdecimal() for key in stated):
        for key in sorted(stated, key=int):
            yield _Declared(CONFIG, _token(stated[key], CONFIG, where, special=False), int(key))
    elif stated is not None:
        raise TokenizerError(where, f"{CONFIG}: added_tokens_decoder has no ids", "entries by their ids")
    texts = _object(files.get(ADDED_TOKENS)) if older else {}
    for text, token in sorted(texts.items(), key=lambda item: str(item[1])):
        if type(token) is not int or token < 0 or not text:
            raise TokenizerError(where, f"{ADDED_TOKENS}: {text!r:.60} has no id", "ids by text")
        yield _Declared(ADDED_TOKENS, AddedToken(text, normalized=True), token)
    sources = {CONFIG: config} | (
        {SPECIAL_TOKENS_MAP: _object(files.get(SPECIAL_TOKENS_MAP))} if older else {}
    )
    for name, source in sources.items():
        for key in (*_NAMED, *_LISTED):
            value = source.get(key)
            if isinstance(value, dict) and "content" not in value:
                value = list(value.values())
            for entry in value if isinstance(value, list) else [value] if value else []:
                yield _Declared(name, _token(entry, name, where, special=True))


def _token(entry: Any, name: str, where: object, *, special: bool) -> AddedToken:
    """An entry as the files have it: a text, or an object of `content` and flags."""
    from tokenizers import AddedToken

    fields = {"content": entry} if isinstance(entry, str) else entry
    if isinstance(fields, dict):
        text = fields.get("content")
        flags = {flag: fields[flag] for flag in _FLAGS if flag in fields}
        if isinstance(text, str) and text and all(isinstance(value, bool) for value in flags.values()):
            return AddedToken(text, **({"special": special} | flags | ({"special": True} if special else {})))
    raise TokenizerError(where, f"{name}: {json.dumps(entry):.60} is no added token", "a text and its flags")


def _next_id(tokenizer: Tokenizer) -> int:
    """The id that the library gives to the next new token."""
    last = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(tokenizer.get_vocab_size(with_added_tokens=False), last + 1)


def _same(one: AddedToken, other: AddedToken) -> bool:
    return all(getattr(one, flag) == getattr(other, flag) for flag in _FLAGS)


def _object(content: bytes | None) -> dict[str, Any]:
    """The JSON object `content`; empty where it is missing or damaged."""
    try:
        value = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
