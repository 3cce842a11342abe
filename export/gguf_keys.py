"""Typed access to the metadata of one GGUF model: a key that is absent, or is not what it should be, is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from ..runtime.errors import CheckpointError
from .gguf_header import Value


class Keys:
    """Metadata under `prefix` (`llama.`, `tokenizer.ggml.`). Without a default an absent key is refused."""

    def __init__(self, path: Path, metadata: Mapping[str, Value], prefix: str) -> None:
        self.path, self.prefix = path, prefix
        self._metadata = metadata

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self._metadata

    def value(self, key: str) -> Value | None:
        return self._metadata.get(self.prefix + key)

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error about `key`, for the caller to raise."""
        value = self.value(key)
        found = "missing" if value is None else f"{value!r:.60}"
        return CheckpointError(self.path, f"metadata {self.prefix}{key} is {found}", expected)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0. Where the file has one for each layer, they must be equal."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise self.refuse(key, "the same for every layer")
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refuse(key, "a whole number")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.refuse(key, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            raise self.refuse(key, "a number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.value(key)
        if not isinstance(value, list):
            raise self.refuse(key, "a list of texts")
        return value

    def numbers(self, key: str, count: int) -> Sequence[float] | None:
        """`count` numbers, or None where the key is absent."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.size != count:
            raise self.refuse(key, f"{count} numbers")
        numbers: list[float] = value.tolist()
        return numbers
