"""Printing text that a model or a tool wrote: safely, and answers as they come."""

import json
import re
from typing import TextIO


def printable(text: str, stream: TextIO) -> str:
    """`text` for `stream`: on a terminal, control characters (escape sequences) are shown, not obeyed."""
    if not stream.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
# One whole unit of a JSON string: characters, a surrogate pair, a lone high surrogate, \uXXXX, \n.
_UNIT = re.compile(
    rf'[^"\\]+|{_HIGH}\\u[0-9a-fA-F]{{4}}|{_HIGH}(?=[^\\]|\\[^u])|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\[^u]'
)


class AnswerStream:
    """Picks the answer's text out of `{"answer": "..."}` while it is being decoded.

    `push` takes raw pieces and returns what the answer gained. Anything else than such an object yields
    nothing.
    """

    PREFIX = '{"answer": "'

    def __init__(self) -> None:
        self._raw = ""
        self._inside = False

    def push(self, raw: str) -> str:
        """The new part of the answer's text; half an escape sequence waits for its rest."""
        self._raw += raw
        if not self._inside:
            if not self._raw.startswith(self.PREFIX):
                return ""
            self._inside, self._raw = True, self._raw.removeprefix(self.PREFIX)
        text = ""
        position = 0
        while unit := _UNIT.match(self._raw, position):
            text += json.loads(f'"{unit[0]}"', strict=False)
            position = unit.end()
        self._raw = self._raw[position:]
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
