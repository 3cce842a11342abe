"""The table of subcommands. Imports only the chosen one; errors become one line and an exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass

from ..runtime.errors import InputError, PosttrainError, UsageError

_REPORT = "run it again with --debug, and report what it prints"


@dataclass(frozen=True)
class Command:
    """One row of `posttrainllm --help`; `module` has `run(argv: list[str]) -> int`."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("agent", "agent", "chat with a model that calls your tools"),
    Command("sample", "sample", "generate plain text from a prompt"),
    Command("export-onnx", "export_onnx", "turn a checkpoint into an ONNX bundle"),
    Command("inspect", "inspect", "print what a checkpoint or a bundle holds"),
    Command("models", "model_list", "list the models that are here; remove exported ones"),
    Command("cache", "prompt_cache", "list, verify, explain or remove stored system prompts"),
    Command("eval", "eval", "run tasks through an agent and count what is right"),
    Command("bench", "bench", "measure how fast a model runs here"),
    Command("trajectory", "trajectory", "check a recorded conversation against its model, or print it"),
    Command("traces-to-data", "traces_to_data", "turn recorded conversations into training data"),
    Command("doctor", "doctor", "try out on this machine what is promised"),
)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code (the table is in docs/agent.md)."""
    _open_streams()
    _end_on_signals()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except PosttrainError as error:
        return _told(error, debug)
    except BrokenPipeError:
        _drop_stdout()  # the reader of our output left (`| head`)
        return 0
    except OSError as error:
        if error.filename is None:
            _drop_stdout()
        where = "input or output" if error.filename is None else error.filename
        return _told(InputError(where, error.strerror or str(error)), debug)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user gets one line
        found = f"unexpected {type(error).__name__} ({error})"
        return _told(InputError("this command", found, remedy=_REPORT), debug)
    except KeyboardInterrupt:
        print("posttrainllm: interrupted", file=sys.stderr)
        return 130


def _told(error: PosttrainError, debug: bool) -> int:
    """Print one line; returns the exit code."""
    if debug:
        traceback.print_exc()
    print(f"posttrainllm: {error}", file=sys.stderr)
    return error.exit_code


def _drop_stdout() -> None:
    """What is still buffered for a stdout that takes nothing must not make the interpreter complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_on_signals() -> None:
    """Being asked to end runs the same clean-up as an error: no half folders, no tool left running."""
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        from .. import __version__

        print(f"posttrainllm {__version__}")
        return 0
    for command in COMMANDS:
        if command.name == args[0]:
            module = importlib.import_module(f".{command.module}", __package__)
            return int(module.run(args[1:]))
    names = ", ".join(command.name for command in COMMANDS)
    raise UsageError(args[0], "no such command", f"one of {names}", "see posttrainllm --help")


def _help() -> str:
    rows = "\n".join(f"  {command.name:<15}{command.summary}" for command in COMMANDS)
    return (
        "usage: posttrainllm COMMAND [...]\n\n"
        "Run a small language model that uses tools on your own machine.\n\n"
        f"commands:\n{rows}\n\n"
        "example:\n"
        "  posttrainllm agent --tools tools.json --single 'Use the echo tool'\n\n"
        "posttrainllm COMMAND --help explains a command; --debug shows tracebacks; --version the version."
    )


def _open_streams() -> None:
    """Our own streams are UTF-8 with `\\n`, whatever the console's code page is; a closed one is no stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
