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


def repeated(help: str, **metadata: Any) -> Any:
    """A dataclass field that is a flag which may be given several times: a tuple of its texts, in order."""
    return field(default=(), metadata={"help": f"{help}; may be repeated", "type": _each, **metadata})


def positional(name: str, help: str, *, optional: bool = False) -> Any:
    """A dataclass field that is a positional argument; None when `optional` and absent."""
    if optional:
        return field(default=None, metadata={"args": [name], "help": help, "nargs": "?", "type": str})
    return field(metadata={"args": [name], "help": help})


def positionals(name: str, help: str) -> Any:
    """A dataclass field that is any number of positional arguments: a tuple of their texts, in order."""
    return field(default=(), metadata={"args": [name], "help": help, "nargs": "*", "type": str})


def _each(text: str) -> str:
    """Marks a flag of `repeated`: argparse-dataclass passes a `type` through, but no `action`."""
    return text


class _Append(argparse.Action):
    """argparse's own "append" cannot extend a tuple, and a list could not be a default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*(before if isinstance(before, tuple) else ()), values))


class _Parser(ArgumentParser):  # type: ignore[misc] # argparse-dataclass ships no types
    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("type") is _each:
            kwargs["action"] = _Append
        return super().add_argument(*args, **kwargs)

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
