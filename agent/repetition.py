"""Equal calls with equal results, again and again: small models get caught in them."""

from __future__ import annotations

import json

from .reply import Call
from .tools import ToolResult

REPEATS = 3  # the same call with the same result, so often in a row, is not made again
NOT_RUN = f"not run: the same call gave the same result {REPEATS} times in a row"


class Repetition:
    """Counts equal calls with equal results in a row."""

    def __init__(self) -> None:
        self._last: tuple[str, object] | None = None
        self._count = 0

    def exhausted(self, call: Call) -> bool:
        """Whether `call` is the one that came REPEATS times in a row with the same result."""
        return self._count >= REPEATS and self._last is not None and self._last[0] == _written(call)

    def count(self, call: Call, result: ToolResult) -> None:
        """`call` gave `result`."""
        made = (_written(call), (result.stdout, result.stderr, result.exit_code))
        self._count = self._count + 1 if made == self._last else 1
        self._last = made


def _written(call: Call) -> str:
    return json.dumps([call.tool, call.arguments], sort_keys=True, default=str)
