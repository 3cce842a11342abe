"""Equal calls with equal results, again and again: small models get caught in them."""

from __future__ import annotations

import json

from .tools import ToolResult


class Repetition:
    """Counts equal calls with equal results in a row."""

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._count = 0

    def count(self, result: ToolResult, arguments: object) -> int:
        """How often this call and its result came in a row by now."""
        written = json.dumps(arguments, sort_keys=True, default=str)
        call = (result.tool, written, result.stdout, result.stderr, result.exit_code)
        self._count = self._count + 1 if call == self._last else 1
        self._last = call
        return self._count
