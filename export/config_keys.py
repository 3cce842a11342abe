"""The keys of a config.json, read with checks; it remembers which were read, so that none is ignored silently."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.errors import CheckpointError

MAX_SIZE = 2**31 - 1


class ConfigKeys:
    """`values` of the file `where`. Keys that are absent or null have the default; a key without one is required.

    Every getter raises CheckpointError naming the key, what was found and what was expected.
    """

    def __init__(self, where: object, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """Whatever `key` holds; None if it is absent."""
        self._read.add(key)
        return self._values.get(key)

    def refuse(self, key: str, expected: str) -> CheckpointError:
        """The error about the value of `key`."""
        return CheckpointError(self.where, f"{key} is {_short(self._values.get(key))}", expected)

    def size(self, key: str, default: int | None = None) -> int:
        """An integer of 1 to 2**31 - 1."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise self.refuse(key, f"an integer of 1 to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refuse(key, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refuse(key, "a number above 0")
        return value

    def optional(self, key: str, default: float | None = None) -> float | None:
        """As `positive`, or None where the key is null; `default` where it is absent."""
        if key in self._values and self.raw(key) is None:
            return None
        return self.positive(key, default) if key in self._values or default is not None else None

    def optional_size(self, key: str, default: int | None = None) -> int | None:
        """As `size`, or None where the key is null; `default` where it is absent."""
        if self.raw(key) is None:
            return None if key in self._values else default
        return self.size(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a text")
        return value

    def texts(self, key: str, count: int) -> list[str] | None:
        """A list of `count` texts or more, cut to `count`; None if there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or not all(type(v) is str for v in value):
            raise self.refuse(key, f"a list of {count} texts")
        return value[:count]

    def positives(self, key: str, count: int) -> tuple[float, ...]:
        """`count` finite numbers above 0."""
        value = self.raw(key)
        good = isinstance(value, list) and len(value) == count
        if not good or not all(type(v) in (int, float) and 0 < v < math.inf for v in value):
            raise self.refuse(key, f"a list of {count} numbers above 0")
        return tuple(map(float, value))

    def section(self, key: str) -> ConfigKeys | None:
        """The keys of the object `key`; None if there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return ConfigKeys(f"{self.where}#/{key}", value)

    def only(self, key: str, *allowed: object, why: str) -> None:
        """Refuse any value of `key` but `allowed` and null; `why` names the feature."""
        value = self.raw(key)
        if value is not None and not any(type(value) is type(good) and value == good for good in allowed):
            names = " or ".join(_short(good) for good in allowed)
            raise CheckpointError(
                self.where, f"{why} ({key} is {_short(value)})", names or "no such key", "it is not converted"
            )

    def unread(self, known: Sequence[str] = ()) -> list[str]:
        """Keys that nobody asked for, less `known` ones and those that are off: null, false, empty."""
        names = self._values.keys() - self._read - set(known)
        return sorted(name for name in names if self._values[name] not in (None, False, [], {}, ""))

    def _value(self, key: str, default: object) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(self.where, f"{key} is missing", "a complete config.json")
        return default


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
