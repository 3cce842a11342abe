"""Which tokenizer belongs to a checkpoint: found, checked against the vocabulary, ready to be copied.

A checkpoint names a folder as it was typed on the training machine, so it is often not there: that is
a warning, never a silent fall back to bytes. Models of Hugging Face bring their files along.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.bundle import TOKENIZER, TokenizerInfo
from ..runtime.errors import TokenizerError
from .checkpoint import Checkpoint
from .tokenizer_files import (
    TOKENIZER_CONFIG,
    ResolvedTokenizer,
    check_ids,
    eos_token,
    least_config,
    load_tokenizer,
    read_files,
    resolve_files,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TURN = "<|im_end|>"
BYTES_FINGERPRINT = "bytes-256"
_BYTE_VOCABULARY = 256


def resolve_tokenizer(checkpoint: Checkpoint, given: Path | None) -> ResolvedTokenizer:
    """The tokenizer `given` by the user, else that of the checkpoint's own files, else the one that it names, else bytes.

    Raises TokenizerError when `given` has none, or when a tokenizer has ids beyond the vocabulary.
    """
    vocab_size = checkpoint.config.vocab_size
    if given is not None:
        file = given if given.is_file() else given / TOKENIZER
        if not file.is_file():
            raise TokenizerError(given, f"no {TOKENIZER}", f"a folder with {TOKENIZER}")
        if checkpoint.tokenizer_files:
            files = {**checkpoint.tokenizer_files, **read_files(file.parent)}
            return resolve_files(files, vocab_size, given, source=str(given))
        return _load(file, vocab_size, str(given))
    if checkpoint.tokenizer_files:
        return resolve_files(checkpoint.tokenizer_files, vocab_size, checkpoint.path)
    declared = checkpoint.tokenizer_source
    if declared is None:
        if vocab_size == _BYTE_VOCABULARY:
            info = TokenizerInfo("bytes", BYTES_FINGERPRINT)
            return ResolvedTokenizer(info, list(END_OF_TURN.encode()), {}, ())
        return _missing("", f"names no tokenizer, and its {vocab_size} ids are not the 256 bytes")
    for file in _candidates(declared, checkpoint.path):
        if _is_there(file):
            return _load(file, vocab_size, declared)
    shown = declared if len(declared) <= 200 else declared[:200] + "…"
    return _missing(declared, f"names the tokenizer {shown!r}, which is not on this machine")


def _missing(source: str, reason: str) -> ResolvedTokenizer:
    warning = f"the checkpoint {reason}; the bundle has no tokenizer; export again with --tokenizer DIR"
    return ResolvedTokenizer(TokenizerInfo("missing", "", source), [], {}, (warning,))


def _is_there(file: Path) -> bool:
    """Whether `file` can be used; a folder of somebody else, or a name that no system allows, is not there."""
    try:
        return file.is_file() and os.access(file, os.R_OK)
    except (OSError, ValueError):
        return False


def _candidates(declared: str, checkpoint: Path) -> list[Path]:
    """Where `declared` may be: as it is or under the home folder, beside the checkpoint, here."""
    try:
        folder = Path(declared).expanduser()
    except RuntimeError:  # a home folder of nobody
        folder = Path(declared)
    if "\0" in declared or len(declared) > 4096 or not declared.isprintable():
        return []
    if folder.is_absolute():
        return [folder / TOKENIZER]
    return [checkpoint.parent / folder / TOKENIZER, folder / TOKENIZER]


def _load(file: Path, vocab_size: int, source: str) -> ResolvedTokenizer:
    """A tokenizer of the posttrainllm dialect."""
    tokenizer, content = load_tokenizer(file)
    check_ids(tokenizer, vocab_size, file)
    info = TokenizerInfo("tokenizers", hashlib.sha256(content).hexdigest(), source)
    config = least_config(read_files(file.parent).get(TOKENIZER_CONFIG))
    ids = _end_of_turn(tokenizer, eos_token(config))
    return ResolvedTokenizer(info, ids, {TOKENIZER: content, TOKENIZER_CONFIG: config}, ())


def _end_of_turn(tokenizer: Tokenizer, eos: str | None) -> list[int]:
    """The marker's own id, else the id of the end-of-text token, else the marker spelled out."""
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    if END_OF_TURN in added:
        return [added[END_OF_TURN]]
    number = tokenizer.token_to_id(eos) if eos else None
    if number is not None:
        return [number]
    return list(tokenizer.encode(END_OF_TURN, add_special_tokens=False).ids)
