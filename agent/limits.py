"""What one process of a tool may use: CPU time, memory, the size of a file.

Each holds for a single process, not for all that a call starts together: the number of processes is not
limited, because the system's own limit counts all processes of a user and does not hold for root. The
deadline of the call ends them all.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

MIB = 1 << 20
FILE_MIB = 1024  # default of `--tool-file-size`
_LEAST_MEMORY_MIB = 4096
_XCPU, _XFSZ = 128 + 24, 128 + 25  # exit codes; Linux and macOS number these two signals alike
_TOO_LARGE = re.compile("File too large|File size limit exceeded")
_NO_MEMORY = re.compile(
    r"cannot allocate|out of memory|memory exhausted|MemoryError|bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True)
class ResourceLimits:
    """Bounds of each process of a tool; 0 is no bound. `memory_mib` counts address space, as systems do.

    The default for memory is the machine's physical memory (at least 4 GiB), so that only a runaway meets
    it; `cpu_s` is by default what all CPUs can give within the deadline, so that only a process that got
    away from its call meets it.
    """

    cpu_s: int | None = None
    memory_mib: int | None = None
    file_mib: int = FILE_MIB

    def cpu_seconds(self, timeout_s: float) -> int:
        """The bound of CPU time for a call with this deadline."""
        if self.cpu_s is not None:
            return self.cpu_s
        return math.ceil(timeout_s + 1) * (os.cpu_count() or 1)

    def memory_bytes(self) -> int:
        """The bound of address space."""
        return (default_memory_mib() if self.memory_mib is None else self.memory_mib) * MIB

    def file_bytes(self) -> int:
        """The bound of a file's size."""
        return self.file_mib * MIB

    def explain(self, exit_code: int, stderr: str, timeout_s: float) -> str:
        """Which bound ended a tool, as far as its exit code and its words tell; empty if none did."""
        if exit_code == _XCPU and self.cpu_seconds(timeout_s):
            return f"killed: more than {self.cpu_seconds(timeout_s)} s of CPU time"
        too_large = exit_code == _XFSZ or (exit_code != 0 and _TOO_LARGE.search(stderr) is not None)
        if too_large and self.file_mib:
            return f"a file may have {self.file_mib} MiB (--tool-file-size)"
        if exit_code != 0 and self.memory_bytes() and _NO_MEMORY.search(stderr):
            return f"a process may use {self.memory_bytes() // MIB} MiB of address space (--tool-memory)"
        return ""


def default_memory_mib() -> int:
    """The machine's physical memory, at least 4 GiB; 4 GiB too where the system does not tell."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    except (AttributeError, ValueError, OSError):
        physical = 0
    return max(physical, _LEAST_MEMORY_MIB)
