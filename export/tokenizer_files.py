"""The files of a Hugging Face tokenizer: read, checked against the vocabulary, ready to be copied into a bundle.

Independent of where they come from. What ends a turn is the model's own: generation_config.json's ids, else those of config.json,
and the tokenizer's end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.bundle import CHAT_TEMPLATE, TOKENIZER, TokenizerInfo
from ..runtime.errors import TokenizerError
from .added_tokens import ADDED_TOKENS, SPECIAL_TOKENS_MAP, add_declared_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
_OLD_TEMPLATE = "chat_template.json"
_VOCABULARIES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)  # found where tokenizer.json is not
_NAMES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    CONFIG,
    CHAT_TEMPLATE,
    _OLD_TEMPLATE,
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    *_VOCABULARIES,
)
_MAX_NBYTES = 256 << 20


@dataclass(frozen=True)
class ResolvedTokenizer:
    """`files` are what a bundle holds of it: none for bytes or where it is missing.

    `end_of_turn_ids` is the sequence that ends an assistant's turn; any one of `stop_ids` ends the output too.
    """

    info: TokenizerInfo
    end_of_turn_ids: list[int]
    files: Mapping[str, bytes]
    warnings: tuple[str, ...]
    stop_ids: tuple[int, ...] = ()
    dialect: str = "posttrainllm"


def read_files(folder: Path) -> dict[str, bytes]:
    """What `folder` has of a tokenizer's files, by name. Raises TokenizerError for one that cannot be read."""
    files = {}
    for name in _NAMES:
        file = folder / name
        try:
            if file.is_file():
                files[name] = _read(file)
        except OSError as error:
            raise TokenizerError(file, f"cannot be read ({error.strerror})") from None
    return files


def resolve_files(
    files: Mapping[str, bytes], vocab_size: int, where: Path, *, source: str = ""
) -> ResolvedTokenizer:
    """The tokenizer in `files` (of the model or folder `where`), for logits of width `vocab_size`. Raises TokenizerError."""
    content = files.get(TOKENIZER)
    if content is None:
        raise _no_tokenizer(files, where)
    tokenizer = parse_tokenizer(content, where / TOKENIZER if where.is_dir() else where)
    warnings = check_ids(tokenizer, vocab_size, where, added_may_exceed=True)
    changed, left_out = add_declared_tokens(tokenizer, files, vocab_size, where)
    if changed:
        content = tokenizer.to_str().encode()
    config = least_config(files.get(TOKENIZER_CONFIG))
    template, more = _chat_template(files, config, where)
    eos = eos_token(config)
    stops = _stop_ids(files, tokenizer, eos, vocab_size, where)
    end = _end_of_turn(stops, tokenizer, eos, template)
    kept = {TOKENIZER: content, TOKENIZER_CONFIG: config}
    if template is not None:
        kept[CHAT_TEMPLATE] = template.encode()
    info = TokenizerInfo("tokenizers", hashlib.sha256(content).hexdigest(), source)
    dialect = "plain" if template is None else "chat_template"
    return ResolvedTokenizer(info, end, kept, warnings + left_out + more, stops, dialect)


def load_tokenizer(file: Path) -> tuple[Tokenizer, bytes]:
    """The tokenizer.json `file` and its bytes. Raises TokenizerError."""
    try:
        content = _read(file)
    except OSError as error:
        raise TokenizerError(
            file, f"cannot be loaded ({error.strerror})", "a Hugging Face tokenizer.json"
        ) from None
    return parse_tokenizer(content, file), content


def parse_tokenizer(content: bytes, where: object) -> Tokenizer:
    """The tokenizer.json `content`. Raises TokenizerError naming `where`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the library raises bare Exception, and Rust panics pass through
        raise TokenizerError(where, f"cannot be loaded ({error})", "a Hugging Face tokenizer.json") from None


def check_ids(
    tokenizer: Tokenizer, vocab_size: int, where: object, *, added_may_exceed: bool = False
) -> tuple[str, ...]:
    """Raises TokenizerError for ids of `vocab_size` and above; for added tokens it may be a warning instead."""
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last < vocab_size:
        return ()
    added = tokenizer.get_added_tokens_decoder()
    plain = max(
        (number for number in tokenizer.get_vocab(with_added_tokens=False).values() if number not in added),
        default=-1,
    )
    if added_may_exceed and plain < vocab_size:
        return (
            f"the tokenizer has ids up to {last}; the model knows {vocab_size}, so the added tokens above cannot be used",
        )
    raise TokenizerError(
        where,
        f"ids up to {last}",
        f"ids below the model's vocabulary of {vocab_size}",
        "give the model's own tokenizer",
    )


def least_config(content: bytes | None) -> bytes:
    """tokenizer_config.json as it is, or the least that onnxruntime-genai asks for beside tokenizer.json."""
    try:
        if content is not None and isinstance(json.loads(content), dict):
            return content
    except (ValueError, RecursionError):
        pass  # damaged, and not needed for the ids
    return b'{"tokenizer_class": "PreTrainedTokenizerFast"}\n'


def eos_token(config: bytes) -> str | None:
    """`eos_token` of tokenizer_config.json: a string, or an object with its content."""
    eos = json.loads(config).get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None


def _read(file: Path) -> bytes:
    nbytes = file.stat().st_size
    if nbytes > _MAX_NBYTES:
        raise TokenizerError(file, f"{nbytes} bytes", f"at most {_MAX_NBYTES} bytes")
    return file.read_bytes()


def _no_tokenizer(files: Mapping[str, bytes], where: Path) -> TokenizerError:
    found = next((name for name in _VOCABULARIES if name in files), None)
    return TokenizerError(
        where,
        f"no {TOKENIZER}" + (f", only {found}" if found else ""),
        f"a folder with {TOKENIZER}, or --tokenizer DIR",
        "where transformers is installed, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it"
        if found
        else "",
    )


def _object(files: Mapping[str, bytes], name: str, where: Path) -> dict[str, Any]:
    """The JSON object `name`, empty where there is none. Raises TokenizerError."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise TokenizerError(where / name, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise TokenizerError(where / name, f"holds {type(value).__name__}", "a JSON object")
    return value


def _chat_template(
    files: Mapping[str, bytes], config: bytes, where: Path
) -> tuple[str | None, tuple[str, ...]]:
    """The chat template and warnings about others; a file of its own counts more than tokenizer_config.json."""
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode(), ()
        except UnicodeDecodeError:
            raise TokenizerError(where / CHAT_TEMPLATE, "not UTF-8", "a chat template") from None
    found = json.loads(config).get("chat_template")
    if found is None:
        found = _object(files, _OLD_TEMPLATE, where).get("chat_template")
    if isinstance(found, list):  # named ones
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.pop("default", None)
        others = ", ".join(sorted(map(str, named)))
        warning = f"of its chat templates the default is kept; not used: {others}"
        return (found, (warning,)) if isinstance(found, str) else (None, (warning,))
    if found is not None and not isinstance(found, str):
        raise TokenizerError(where / TOKENIZER_CONFIG, "chat_template is not a text", "a template")
    return found, ()


def _stop_ids(
    files: Mapping[str, bytes], tokenizer: Tokenizer, eos: str | None, vocab_size: int, where: Path
) -> tuple[int, ...]:
    """Ids any one of which ends the output: generation_config.json's or config.json's, then the tokenizer's own."""
    ids: list[int] = []
    for name in (GENERATION_CONFIG, CONFIG):
        value = _object(files, name, where).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(number) is not int or number < 0 for number in listed):
            raise TokenizerError(where / name, f"eos_token_id is {json.dumps(value)[:80]}", "ids")
        if listed:
            ids = [number for number in listed if number < vocab_size]
            break
    own = tokenizer.token_to_id(eos) if eos else None
    if own is not None and own < vocab_size:
        ids.append(own)
    return tuple(dict.fromkeys(ids))


def _end_of_turn(
    stops: tuple[int, ...], tokenizer: Tokenizer, eos: str | None, template: str | None
) -> list[int]:
    """The one of `stops` that the template writes: by its text, or by the name of the end-of-text token."""
    if template:
        for number in stops:
            text = tokenizer.id_to_token(number)
            if text and text in template:
                return [number]
    own = tokenizer.token_to_id(eos) if eos else None
    return [own] if own is not None and own in stops else list(stops[:1])
