"""The flags that several commands share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import UsageError
from ..runtime.providers import NAMES
from .options import option
from .tool_flags import ToolOptions, at_least

if TYPE_CHECKING:
    from ..agent.context_plan import Policy
    from ..agent.loop import Limits
    from ..agent.recorder import TrajectoryRecorder
    from ..runtime.sampler import Sampler
    from ..runtime.session import Session

DIALECTS = ("posttrainllm", "chat_template")
POLICIES = ("evict", "stop")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next id is chosen, and on what it runs."""

    temperature: float = option(0.0, "0 is greedy (default); 0.7 varies", metavar="F")
    top_k: int = option(0, "sample among the N likeliest ids only (0: off)", metavar="N")
    top_p: float = option(1.0, "sample within this much probability mass (1: off)", metavar="F")
    min_p: float = option(0.0, "drop ids less likely than F times the likeliest (0: off)", metavar="F")
    seed: Optional[int] = option(None, "makes sampling repeatable", metavar="N")
    provider: str = option("auto", f"execution provider: {', '.join(NAMES)}", metavar="NAME")

    def sampler(self) -> "Sampler":
        """The sampler of these flags. Raises UsageError naming the flag."""
        from ..runtime.sampler import Sampler

        return Sampler(self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class LoopOptions(SamplingOptions, ToolOptions):
    """A model, its tools, and the bounds of the conversation loop: for `agent` and `eval`."""

    system: Optional[str] = option(None, "replaces the first line of the system prompt", metavar="TEXT")
    dialect: Optional[str] = option(
        None, f"{' or '.join(DIALECTS)} (default: the model's own)", metavar="NAME"
    )
    max_steps: int = option(8, "tool calls per user turn (default 8)", metavar="N")
    max_tokens: int = option(256, "sampled ids per assistant step (default 256)", metavar="N")
    context_policy: str = option(
        "evict",
        "when the context is full: evict (old exchanges leave, and an event says so; default) or stop",
        metavar="NAME",
    )
    prompt_cache_dir: Optional[str] = option(
        None, "keep the system prompt's keys and values in this folder (docs/prompt-cache.md)", metavar="DIR"
    )
    no_constrain: bool = option(False, "decode without the grammar of calls and answers")
    no_kv_preallocate: bool = option(
        False, "grow the KV buffers on demand instead of allocating the context at once"
    )

    trajectory_dir: Optional[str] = option(
        None, "write each conversation into this folder, token by token (.atraj)", metavar="DIR"
    )
    trajectory_task: Optional[str] = option(
        None, "the task that the trajectories are labelled with", metavar="TEXT"
    )

    def check(self) -> None:
        """Refuse what can be refused before anything is loaded. Raises UsageError."""
        if self.trajectory_task is not None and self.trajectory_dir is None:
            raise UsageError("--trajectory-task", "without --trajectory-dir", "both")
        at_least("--max-steps", self.max_steps, 0)
        at_least("--max-tokens", self.max_tokens, 1)
        if self.dialect not in (None, *DIALECTS):
            raise UsageError(f"--dialect {self.dialect}", "no such dialect", " or ".join(DIALECTS))
        if self.context_policy not in POLICIES:
            raise UsageError(
                f"--context-policy {self.context_policy}", "no such policy", " or ".join(POLICIES)
            )
        self.check_tools()

    def recording(self, session: "Session") -> "Optional[Callable[[str], TrajectoryRecorder]]":
        """Makes the recorder of a conversation, given the task it is about where no flag says it. None: none is wanted.

        Raises UsageError if the folder cannot be made.
        """
        if self.trajectory_dir is None:
            return None
        from ..agent.model_facts import ModelFacts
        from ..agent.recorder import TrajectoryRecorder, make_folder

        folder = Path(self.trajectory_dir)
        make_folder(folder)
        model = Path(self.model_name)
        facts = ModelFacts.of(session, str(model.absolute()) if model.exists() else self.model_name)
        label = self.trajectory_task
        return lambda task: TrajectoryRecorder(folder, facts, task=task if label is None else label)

    @property
    def header(self) -> str:
        """First line of the system prompt."""
        from ..agent.chat_format import DEFAULT_HEADER

        return DEFAULT_HEADER if self.system is None else self.system

    @property
    def policy(self) -> "Policy":
        """What happens when the context is full."""
        return "stop" if self.context_policy == "stop" else "evict"

    @property
    def limits(self) -> "Limits":
        from ..agent.loop import Limits

        return Limits(self.max_steps, self.max_tokens)
