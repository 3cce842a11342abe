"""The flags that `agent` and `sample` share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import UsageError
from ..runtime.providers import NAMES
from .options import option

if TYPE_CHECKING:
    from ..runtime.sampler import Sampler


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


def at_least(flag: str, value: float, least: float) -> None:
    """Raises UsageError if a flag's value is below `least`, or not a number."""
    if not value >= least:
        raise UsageError(flag, f"{value}", f"{least} or more")
