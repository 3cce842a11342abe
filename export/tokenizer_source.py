"""Which tokenizer belongs to a checkpoint: found, checked against the vocabulary, ready to be copied.

A checkpoint names a folder as it was typed on the training machine, so it is often not there: that is
a warning, never a silent fall back to bytes. Of such a folder tokenizer.json and tokenizer_config.json
are read, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.bundle import TOKENIZER, TokenizerInfo
from ..runtime.errors import TokenizerError
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TURN = "<|im_end|>"
BYTES_FINGERPRINT = "bytes-256"
TOKENIZER_CONFIG = "tokenizer_config.json"
_BYTE_VOCABULARY = 256
_MAX_NBYTES = 256 << 20


@dataclass(frozen=True)
class ResolvedTokenizer:
    """`files` are what a bundle copies, byte for byte: none for bytes or where it is missing."""

    info: TokenizerInfo
    end_of_turn_ids: list[int]
    files: Mapping[str, bytes]
    warnings: tuple[str, ...]
    dialect: str = "posttrainllm"


def resolve_tokenizer(checkpoint: Checkpoint, given: Path | None) -> ResolvedTokenizer:
    """The tokenizer `given` by the user, else the one that the checkpoint declares, else bytes.

    Raises TokenizerError when `given` has none, or when a tokenizer has ids beyond the vocabulary.
    """
    vocab_size = checkpoint.config.vocab_size
    if given is not None:
        file = given if given.is_file() else given / TOKENIZER
        if not file.is_file():
            raise TokenizerError(given, f"no {TOKENIZER}", f"a folder with {TOKENIZER}")
        return _load(file, vocab_size, str(given))
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
    from tokenizers import Tokenizer

    try:
        nbytes = file.stat().st_size
        if nbytes > _MAX_NBYTES:
            raise TokenizerError(file, f"{nbytes} bytes", f"at most {_MAX_NBYTES} bytes")
        content = file.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except (TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the library raises bare Exception, and Rust panics pass through
        raise TokenizerError(file, f"cannot be loaded ({error})", "a Hugging Face tokenizer.json") from None
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= vocab_size:
        raise TokenizerError(
            file,
            f"ids up to {last}",
            f"ids below the model's vocabulary of {vocab_size}",
            "give the model's own tokenizer",
        )
    info = TokenizerInfo("tokenizers", hashlib.sha256(content).hexdigest(), source)
    config = _config(file.with_name(TOKENIZER_CONFIG))
    ids = _end_of_turn(tokenizer, _eos_token(config))
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


def _config(file: Path) -> bytes:
    """tokenizer_config.json as it is, or the least that onnxruntime-genai asks for beside tokenizer.json."""
    try:
        if file.is_file() and file.stat().st_size <= _MAX_NBYTES:
            content = file.read_bytes()
            if isinstance(json.loads(content), dict):
                return content
    except (OSError, ValueError, RecursionError):
        pass  # absent or damaged, and not needed for the ids
    return b'{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


def _eos_token(config: bytes) -> str | None:
    """`eos_token` of tokenizer_config.json: a string, or an object with its content."""
    eos = json.loads(config).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None
