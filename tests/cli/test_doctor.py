"""`posttrainllm doctor`: every line is proven, and a promise that does not hold is an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent import doctor
from posttrainllm.runtime.doctor import Check, check_folder, check_wheels, engine_checks

Run = Callable[..., Any]
needs_bash = pytest.mark.skipif(os.name != "posix", reason="command tools need /bin/bash")


def states(checks: Any) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_everything_promised_holds_here(run: Run) -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for name in ("versions", "one ONNX Runtime", "threads", "provider cpu", "cache folder", "sandbox"):
        assert name in done.stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert found["v"] == 1
    assert {check["state"] for check in found["checks"]} <= {"ok", "absent"}


def test_a_cache_folder_that_cannot_be_written_is_exit_code_1(
    run: Run, tmp_path: Path, error_line: Any
) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = run("doctor", env={"POSTTRAINLLM_CACHE_DIR": str(tmp_path / "file" / "cache")})
    assert done.returncode == 1
    assert "FAILED  cache folder" in done.stdout
    assert error_line(done.stderr) == "posttrainllm: doctor: does not hold: cache folder"
    assert check_folder("f", tmp_path / "file" / "x").state == "failed"


def test_two_wheels_of_onnx_runtime_are_named() -> None:
    assert check_wheels(["onnxruntime 1", "onnxruntime-gpu 1"]).state == "failed"
    assert check_wheels(["onnxruntime 1"]) == Check("one ONNX Runtime", "ok", "onnxruntime 1")


def test_a_bundle_that_cannot_be_loaded_is_a_failed_check(tmp_path: Path) -> None:
    assert states(engine_checks(tmp_path, "1"))["provider cpu"] == "failed"


@needs_bash
def test_a_sandbox_that_lets_things_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are worth something only if an open run fails them."""

    class Open:
        kind = program = "open"
        relays_sigterm = True

        def __init__(self, *_: Any) -> None:
            return

        def wrap(self, command: Any, *_: Any) -> Any:
            return command

    monkeypatch.setattr(doctor, "choose_sandbox", lambda name: Open())
    monkeypatch.setattr(doctor, "Sandbox", Open)
    monkeypatch.setattr(doctor, "secret_paths", lambda: [Path(__file__)])
    found = states(doctor.tool_checks())
    assert found["sandbox: writes"] == "failed"
    assert found["sandbox: network"] in ("failed", "absent")
    assert found["sandbox: keys"] == "failed"


@pytest.mark.skipif(sys.platform != "linux", reason="setsid(1) is Linux's")
def test_a_tool_that_outlives_its_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_STUBBORN", "(setsid sleep 600 >/dev/null 2>&1 & echo $!); sleep 600{leave:.0}"
    )
    monkeypatch.setattr(doctor, "_GONE_S", 0.2)
    monkeypatch.setattr("posttrainllm.agent.process.keeper_command", lambda: None)
    check = doctor._timeout()
    assert check.state == "failed"
    assert "still running" in check.detail
