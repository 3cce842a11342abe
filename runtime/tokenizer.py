"""Text to ids and back: byte-level models, and Hugging Face tokenizer.json files.

Control ids (turn markers, end of text, every special token) never come out of `encode_content`: they enter
a conversation only through `encode_marker`, which templates call. Where a tokenizer has no id for a marker
(byte-level models), markers are plain text, and content is kept from spelling one: `<|` becomes `<\\|`.

Decoding works on bytes: each id stands for fixed bytes, and the concatenation is read as UTF-8 with
replacement. So any id can be decoded, and streamed text equals the text of all ids.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from .bundle import TOKENIZER, Bundle
from .errors import TokenizerError

MARKERS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Content:
    """Ids of a piece of content, and how often `<|` was broken up in it."""

    ids: list[int]
    escaped: int


class Tokenizer(Protocol):
    """What sessions, grammars and dialects need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids 0..vocab_size-1 have bytes. The model's logits may be wider."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the mapping between text and ids does."""

    @property
    def bos_ids(self) -> list[int]:
        """What the tokenizer's own template puts before a text: at most once, at the very start."""

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, as the tokenizer's own defaults give them (BOS, special tokens)."""

    def encode_content(self, text: str) -> Content:
        """Ids of text from anywhere outside the template; never a control id, never a spelled marker."""

    def encode_marker(self, marker: str) -> list[int]:
        """Ids of one turn marker, for templates only."""

    def spell(self, token: int) -> list[int]:
        """Ids of the characters that spell `token`, without it: for text that looks like a control token."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; empty for an id without any. Never raises."""

    def for_grammar(self, width: int) -> LLTokenizer:
        """The same vocabulary for llguidance, with masks of `width` ids or more."""


class Detokenizer:
    """Ids in, text out, one at a time; holds back an incomplete UTF-8 character until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else empty."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")


def open_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer that bundle.json names. Raises TokenizerError."""
    info = bundle.manifest.tokenizer
    if info.kind == "bytes":
        return ByteTokenizer()
    if info.kind == "tokenizers":
        path = bundle.tokenizer_path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(path, f"cannot be read ({error})", remedy="export the model again") from None
        return HuggingFaceTokenizer(text, str(path))
    if bundle.io is not None:
        raise TokenizerError(
            bundle.path, f"no {TOKENIZER}", "one beside the configuration", "copy it from the model's source"
        )
    raise TokenizerError(
        bundle.path,
        f"the model's tokenizer ({info.source or 'unnamed'}) was not found when it was exported",
        remedy="export the checkpoint again: posttrainllm export-onnx FILE --out DIR --tokenizer DIR",
    )


class ByteTokenizer:
    """Id = byte value, 0..255. No special ids: turn markers are spelled out."""

    vocab_size = 256
    fingerprint = "bytes-256"

    @property
    def bos_ids(self) -> list[int]:
        return []

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_content(self, text: str) -> Content:
        return Content(self.encode(text.replace("<|", "<\\|")), text.count("<|"))

    def encode_marker(self, marker: str) -> list[int]:
        return self.encode(marker)

    def spell(self, token: int) -> list[int]:
        return [token]

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else b""

    def for_grammar(self, width: int) -> LLTokenizer:
        return _byte_vocabulary()


class HuggingFaceTokenizer:
    """A tokenizer.json, byte-level or with byte fallback. Raises TokenizerError if it is neither."""

    def __init__(self, json_text: str, where: str) -> None:
        self._json = json_text
        self._where = where
        try:
            self._plain = tokenizers.Tokenizer.from_str(json_text)
            self._content = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # noqa: BLE001 - the package raises bare Exception
            raise TokenizerError(
                where, f"cannot be read ({error})", "a Hugging Face tokenizer.json"
            ) from None
        for tokenizer in (self._plain, self._content):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        self._content.encode_special_tokens = True  # in content, "<|im_end|>" is ten characters
        self.vocab_size = 1 + max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1)
        self.fingerprint = hashlib.sha256(json_text.encode()).hexdigest()
        self._blind: dict[frozenset[str], tokenizers.Tokenizer] = {}
        added = self._plain.get_added_tokens_decoder()
        self._control = {token for token, entry in added.items() if entry.special or entry.content in MARKERS}
        self._spelled = [marker for marker in MARKERS if self._plain.token_to_id(marker) is None]
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def bos_ids(self) -> list[int]:
        bare = self._plain.encode("a", add_special_tokens=False).ids
        full = self._plain.encode("a", add_special_tokens=True).ids
        return full[: full.index(bare[0])] if bare and bare[0] in full else []

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(_clean(text)).ids)

    @property
    def added_tokens(self) -> dict[str, tuple[int, tokenizers.AddedToken]]:
        """Id and entry of each added token, by its text."""
        added = self._plain.get_added_tokens_decoder()
        return {entry.content: (token, entry) for token, entry in added.items()}

    def is_whole(self, token: int) -> bool:
        """Whether grammars know `token` by its id only, not by the characters that spell it."""
        return bool(self._vocabulary.is_special_token(token))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of rendered template text: added tokens count where they are spelled, nothing is put before."""
        return list(self._plain.encode(_clean(text), add_special_tokens=False).ids)

    def encode_unseeing(self, text: str, unseen: frozenset[str]) -> list[int]:
        """Ids of text in which the added tokens `unseen` are the characters that spell them."""
        tokenizer = self._blind.get(unseen)
        if tokenizer is None:
            tokenizer = tokenizers.Tokenizer.from_str(self._json)
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.add_special_tokens([_special(self.added_tokens[text][1]) for text in unseen])
            tokenizer.encode_special_tokens = True
            self._blind[unseen] = tokenizer
        ids = list(tokenizer.encode(_clean(text), add_special_tokens=False).ids)
        control = {self.added_tokens[text][0] for text in unseen} | self._control
        if control.isdisjoint(ids):
            return ids
        letters = (tokenizer.encode(letter, add_special_tokens=False).ids for letter in _clean(text))
        return [token for some in letters for token in some if token not in control]

    def encode_content(self, text: str) -> Content:
        text = _clean(text)
        escaped = text.count("<|") if self._spelled else 0
        if escaped:
            text = text.replace("<|", "<\\|")
        ids = self._content.encode(text, add_special_tokens=False).ids
        if self._control.isdisjoint(ids):
            return Content(list(ids), escaped)
        return Content(self._without_control(text), escaped)

    def encode_marker(self, marker: str) -> list[int]:
        token = self._plain.token_to_id(marker)
        if token is not None:
            return [token]
        return list(self._content.encode(marker, add_special_tokens=False).ids)

    def spell(self, token: int) -> list[int]:
        return self.encode_unseeing(decode(self, [token]), frozenset(filter(None, self.added_tokens)))

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._vocabulary.decode_bytes([token])
        return known

    def for_grammar(self, width: int) -> LLTokenizer:
        return self._vocabulary if width <= self.vocab_size else self._for_llguidance(width)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return self._for_llguidance(self.vocab_size)

    def _for_llguidance(self, width: int) -> LLTokenizer:
        end = min(self._control, default=0)
        try:
            return LLTokenizer(self._json, n_vocab=width, eos_token=end)
        except ValueError as error:
            raise TokenizerError(
                self._where, f"its ids have no bytes ({error})", "a byte-level or byte-fallback tokenizer"
            ) from None

    def _without_control(self, text: str) -> list[int]:
        """Ids of `text` where the vocabulary itself would give a control id: its characters one by one."""
        ids: list[int] = []
        for character in text:
            ids += self._content.encode(character, add_special_tokens=False).ids
        return [token for token in ids if token not in self._control]


def _special(entry: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        entry.content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized,
        special=True,
    )


class _ByteVocabulary:
    """The 256 bytes as llguidance wants them. It needs an end id: 256, which no model's logits reach."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((value,)) for value in range(256)), b"<|end|>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _byte_vocabulary() -> LLTokenizer:
    # No slices: they speed up masks of large vocabularies and cost start-up time here.
    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()), n_vocab=257, slices=[])


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")


def _clean(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot hold."""
    return _utf8(text).decode("utf-8")
