"""The flags about tools, for `agent` and `eval`: which there are, and what they may do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import ToolFileError, UsageError
from .bundled import BUNDLED, DEMO, NAMES, bundled_tools
from .options import option, positional, repeated

if TYPE_CHECKING:
    from ..agent.executor import CommandBackend
    from ..agent.sandbox import Sandbox
    from ..agent.tools import Tool


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The model and its tools, and what these may do."""

    model: Optional[str] = positional(
        "model", f"a model folder, a .tinygpt file, or {NAMES} (default: {DEMO})", optional=True
    )
    tools: Optional[str] = option(
        None, f"tool file (default, with {NAMES} only: the model's own)", metavar="FILE"
    )
    allow_tool: tuple[str, ...] = repeated("offer only this tool of the file", metavar="NAME")
    deny_tool: tuple[str, ...] = repeated("do not offer this tool", metavar="NAME")
    tool_timeout: float = option(
        30.0, "seconds per tool call (default 30); a tool's own _timeout wins", metavar="F"
    )
    tool_env: tuple[str, ...] = repeated("tools also get this variable of your environment", metavar="NAME")
    tool_memory: Optional[int] = option(
        None,
        "MiB of address space for each process of a tool (default: physical memory; 0: no limit)",
        metavar="N",
    )
    tool_file_size: int = option(
        1024, "MiB that a file written by a tool may have (default 1024; 0: no limit)", metavar="N"
    )
    shell: Optional[str] = option(None, "the bash that runs _exec (default: the system's)", metavar="FILE")
    sandbox: str = option(
        "off", "off (default), auto, bwrap or seatbelt: run tools inside it", metavar="NAME"
    )
    allow_write: tuple[str, ...] = repeated("tools in the sandbox may write below this folder", metavar="DIR")
    allow_net: bool = option(False, "tools in the sandbox may use the network")

    def check_tools(self) -> None:
        """Refuse what can be refused without reading anything. Raises UsageError."""
        if not 0 < self.tool_timeout < float("inf"):
            raise UsageError("--tool-timeout", f"{self.tool_timeout}", "more than 0 seconds")
        if self.tools is None and self.model_name not in BUNDLED:
            raise UsageError(
                "--tools",
                "missing",
                "a tool file",
                f"only the bundled models ({NAMES}) have tools of their own",
            )
        at_least("--tool-memory", self.tool_memory or 0, 0)
        at_least("--tool-file-size", self.tool_file_size, 0)

    @property
    def model_name(self) -> str:
        """MODEL as it was given, or the bundled one."""
        return DEMO if self.model is None else self.model

    @property
    def tool_file(self) -> Path:
        """The file of `--tools`, or the bundled model's own."""
        return bundled_tools(self.model_name) if self.tools is None else Path(self.tools)

    def load_tools(self) -> "tuple[Tool, ...]":
        """The tools that are offered. Raises UsageError for a name that is not in the file."""
        from ..agent.tool_file import load_tools

        tools = load_tools(self.tool_file)
        names = [tool.name for tool in tools]
        for flag, given in (("--allow-tool", self.allow_tool), ("--deny-tool", self.deny_tool)):
            for name in given:
                if name not in names:
                    found = f"{self.tool_file} has no such tool"
                    raise UsageError(f"{flag} {name}", found, f"one of {', '.join(names)}")
        allowed = [name for name in self.allow_tool or names if name not in self.deny_tool]
        return tuple(tool for tool in tools if tool.name in allowed)

    def choose_sandbox(self, tools: "Sequence[Tool]") -> "Optional[Sandbox]":
        """The sandbox of the flags, proven to start; None for off. Raises UsageError, never runs open."""
        from ..agent.sandbox import choose_sandbox

        chosen = choose_sandbox(
            self.sandbox, writable=[Path(name) for name in self.allow_write], network=self.allow_net
        )
        if chosen is None:
            for tool in tools:
                if tool.sandbox:
                    found = f"tool {tool.name} runs only in a sandbox (_sandbox)"
                    raise UsageError("--sandbox off", found, "--sandbox auto", f"or --deny-tool {tool.name}")
        return chosen

    def backend(
        self, sandbox: "Optional[Sandbox]", folder: Optional[Path] = None, writable: Sequence[Path] = ()
    ) -> "CommandBackend":
        """What runs the tools, in `folder`. Raises UsageError naming the flag."""
        from ..agent.executor import CommandBackend
        from ..agent.limits import ResourceLimits
        from ..agent.shells import find_shell

        return CommandBackend(
            timeout_s=self.tool_timeout,
            cwd=folder,
            shell=find_shell(self.shell),
            environment=self.tool_env,
            limits=ResourceLimits(memory_mib=self.tool_memory, file_mib=self.tool_file_size),
            sandbox=sandbox,
            writable=writable,
        )

    @contextmanager
    def naming_tool_file(self) -> Iterator[None]:
        """A fault that only shows when the tools' grammar is compiled names the file too."""
        try:
            yield
        except ToolFileError as error:
            subject = f"{self.tool_file}, {error.subject}"
            raise ToolFileError(subject, error.found, error.expected, error.remedy) from None


def sandbox_words(sandbox: "Optional[Sandbox]") -> str:
    """For the start line, so that an open run is never a surprise."""
    return "no sandbox" if sandbox is None else sandbox.describe()


def at_least(flag: str, value: float, least: float) -> None:
    """Raises UsageError if a flag's value is below `least`, or not a number."""
    if not value >= least:
        raise UsageError(flag, f"{value}", f"{least} or more")
