"""How many threads this process may really use: its CPU affinity and its cgroup's quota.

`os.cpu_count()` counts the host's CPUs; a container with `--cpus=2` on 32 cores that starts 32
threads is throttled by the kernel and runs many times slower.
"""

from __future__ import annotations

import os
from pathlib import Path


def usable_threads(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int:
    """Threads for one compute pool, at least 1: the smaller of affinity and quota (rounded down)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(cgroup_root, proc)
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def cgroup_quota(root: Path, proc: Path) -> float | None:
    """CPUs granted by the tightest cgroup above this process (v2 `cpu.max`, v1 `cpu.cfs_quota_us`).

    None where there is no limit, or no cgroup at all (macOS, Windows).
    """
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / controllers, _quota_v1
            if not base.is_dir():
                base = root / "cpu"
        else:
            continue
        folder = base / group.lstrip("/")
        # A limit of any ancestor binds. Inside a container the path may not exist: then the root is ours.
        for level in (folder, *folder.parents):
            if level != base and base not in level.parents:
                break
            quota = read(level)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
