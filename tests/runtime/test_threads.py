"""Threads come from affinity and cgroup quota, not from the host's CPU count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrainllm.runtime.threads import cgroup_quota, usable_threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def host_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)


@pytest.mark.usefixtures("host_of_32")
@pytest.mark.parametrize(
    ("limit", "threads"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 32)],
)
def test_quota_of_cgroup_v2(tmp_path: Path, limit: str, threads: int) -> None:
    write(tmp_path / "proc", "0::/docker/abc\n")
    write(tmp_path / "fs/docker/abc/cpu.max", limit + "\n")
    assert usable_threads(tmp_path / "fs", tmp_path / "proc") == threads


@pytest.mark.usefixtures("host_of_32")
def test_the_tightest_ancestor_binds(tmp_path: Path) -> None:
    write(tmp_path / "proc", "0::/slice/scope/leaf\n")
    write(tmp_path / "fs/slice/cpu.max", "300000 100000")
    write(tmp_path / "fs/slice/scope/cpu.max", "max 100000")
    assert usable_threads(tmp_path / "fs", tmp_path / "proc") == 3


@pytest.mark.usefixtures("host_of_32")
def test_inside_a_container_the_root_of_the_mount_is_ours(tmp_path: Path) -> None:
    write(tmp_path / "proc", "0::/path/of/the/host\n")
    write(tmp_path / "fs/cpu.max", "400000 100000")
    assert usable_threads(tmp_path / "fs", tmp_path / "proc") == 4


@pytest.mark.usefixtures("host_of_32")
def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc", "5:memory:/x\n4:cpu,cpuacct:/x\n")
    write(tmp_path / "fs/cpu,cpuacct/x/cpu.cfs_quota_us", "250000")
    write(tmp_path / "fs/cpu,cpuacct/x/cpu.cfs_period_us", "100000")
    assert usable_threads(tmp_path / "fs", tmp_path / "proc") == 2
    write(tmp_path / "fs/cpu,cpuacct/x/cpu.cfs_quota_us", "-1")
    assert usable_threads(tmp_path / "fs", tmp_path / "proc") == 32


def test_affinity_of_one_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert usable_threads(tmp_path, tmp_path / "none") == 1


@pytest.mark.parametrize("text", ["", "garbage", "0::", "0::/a\n", "1:cpu:/a"])
def test_unreadable_cgroups_are_no_limit(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc", text)
    assert cgroup_quota(tmp_path / "fs", tmp_path / "proc") is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_a_pinned_process_uses_one_thread_without_noise(tiny_bundle: Path) -> None:
    """ONNX Runtime prints nothing about affinities."""
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from posttrainllm.runtime import load\n"
        "print(load(sys.argv[1]).threads)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_bundle)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert done.stderr == ""
