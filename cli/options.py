"""One dataclass per subcommand becomes its flags; a bad flag is one line and exit code 2.

`from __future__ import annotations` and `float | None` must not appear where options dataclasses are
defined: argparse-dataclass 2.0.0 reads the annotations as objects and knows only `Optional`.
"""

import argparse
from dataclasses import field
from typing import Any, NoReturn, TypeVar

from argparse_dataclass import ArgumentParser

from ..runtime.errors import UsageError

T = TypeVar("T")


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is the flag `--field-name`."""
    return field(default=default, metadata={"help": help, **metadata})


def positional(name: str, help: str, *, optional: bool = False) -> Any:
    """A dataclass field that is a positional argument; None when `optional` and absent."""
    if optional:
        return field(default=None, metadata={"args": [name], "help": help, "nargs": "?", "type": str})
    return field(metadata={"args": [name], "help": help})


class _Parser(ArgumentParser):  # type: ignore[misc] # argparse-dataclass ships no types
    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog.removeprefix("posttrainllm "), message, remedy=f"see {self.prog} --help")


def parse(options: type[T], argv: list[str], *, command: str, summary: str, example: str) -> T:
    """`argv` as an instance of the dataclass `options`. Raises UsageError; --help exits with 0."""
    parser = _Parser(
        options,
        prog=f"posttrainllm {command}",
        description=summary,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parsed: T = parser.parse_args(argv)
    return parsed
