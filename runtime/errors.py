"""Every error that a user can meet, as one tree. Imports nothing.

    PosttrainError             anything we refuse, with an exit code
    ├── UsageError             2  a flag or its value
    │   └── ProviderError      2  an execution provider that is named and not there
    ├── InputError             3  an input file that cannot be used
    │   ├── CheckpointError    3  weights to export
    │   │   └── UnknownArchitectureError  of an architecture that our own builder does not know
    │   ├── BundleError        3  an exported model folder
    │   ├── TokenizerError     3  a tokenizer folder or file
    │   ├── ChatTemplateError  3  a chat template, or what it refuses to render
    │   ├── ToolFileError      3  a tools.json
    │   └── GrammarError       3  a JSON Schema that no grammar can hold
    ├── MissingExtraError      3  an optional package that this command needs
    ├── CheckFailedError       1  parity, evaluation, verification
    └── ContextFullError       4  more ids than the context holds

The message is one line: subject, what was found, what was expected, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class PosttrainError(Exception):
    """Base of all refusals.

    `subject` is the file, flag or field that the error is about. Control characters in any part are
    escaped, so that the message stays one line whatever a hostile file holds.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, subject: object, found: str, expected: str = "", remedy: str = "") -> None:
        self.subject = str(subject)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        parts = [f"{self.subject}: {found}"]
        if expected:
            parts.append(f"expected {expected}")
        if remedy:
            parts.append(remedy)
        super().__init__(_one_line("; ".join(parts)))


def _one_line(text: str, limit: int = 600) -> str:
    """`text` with control characters escaped and its middle elided beyond `limit` characters."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(clean) <= limit:
        return clean
    half = limit // 2
    return f"{clean[:half]} … {clean[-half:]}"


class UsageError(PosttrainError):
    """A flag, or a value that a flag does not take."""

    exit_code = 2


class ProviderError(UsageError):
    """A named execution provider is not in this build of ONNX Runtime, or does not work."""


class InputError(PosttrainError):
    """An input file that cannot be used."""


class CheckpointError(InputError):
    """Weights that cannot be exported: damaged, foreign, inconsistent, unsupported."""


class UnknownArchitectureError(CheckpointError):
    """A model of an architecture that our own builder does not know."""


class BundleError(InputError):
    """A model folder that is not a complete bundle of a known format version."""


class TokenizerError(InputError):
    """A tokenizer that is missing or does not fit the model."""


class ChatTemplateError(InputError):
    """A chat template that does not compile, fails, or refuses a conversation; the subject has its line."""


class ToolFileError(InputError):
    """A tool file with a fault; the subject holds the file and the entry."""


class GrammarError(InputError):
    """A JSON Schema that cannot be compiled; the subject holds the JSON pointer of the keyword."""


class MissingExtraError(PosttrainError):
    """A package of an optional extra is not installed; the remedy is the pip command."""


class CheckFailedError(PosttrainError):
    """A check ran and did not hold (parity, evaluation, verification)."""

    exit_code = 1


class ContextFullError(PosttrainError):
    """More ids than the KV cache or the model's context can hold. Nothing was fed."""

    exit_code = 4
