"""Choosing a provider: named and missing is an error, auto says what it took and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from posttrainllm.runtime import load
from posttrainllm.runtime.errors import ProviderError
from posttrainllm.runtime.providers import CPU, CUDA, candidates
from posttrainllm.runtime.session import Session

CPU_ONLY = ["AzureExecutionProvider", "CPUExecutionProvider"]
BOTH = ["CUDAExecutionProvider", *CPU_ONLY]


def test_named_and_missing_is_an_error_that_lists_what_is_there() -> None:
    with pytest.raises(
        ProviderError, match=r"--provider cuda: .*not in this ONNX Runtime; expected one of auto, cpu"
    ):
        candidates("cuda", CPU_ONLY)
    with pytest.raises(ProviderError, match="unknown provider"):
        candidates("gpu", CPU_ONLY)


def test_auto_takes_cuda_if_listed_and_never_anything_unmeasured() -> None:
    """That CoreML exists is no reason to pick it."""
    assert candidates("auto", BOTH) == [CUDA, CPU]
    assert candidates("auto", ["CoreMLExecutionProvider", *CPU_ONLY]) == [CPU]


def test_auto_falls_back_to_cpu_once_and_says_why(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is listed but broken; the second try is CPU alone."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: BOTH)
    session = load(tiny_bundle, provider="auto")
    assert session.provider is CPU
    assert session.provider_reason.startswith("cuda: ")


def test_named_but_broken_is_an_error(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: BOTH)
    with pytest.raises(ProviderError, match="--provider cuda"):
        load(tiny_bundle, provider="cuda")


def test_a_provider_that_fails_at_its_first_step_is_not_taken(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the graph and fails when it runs."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: BOTH)
    opened = Session._open

    def open_as_cpu(self: Session, provider: Any) -> Any:
        return opened(self, CPU)

    def broken(self: Session, session: Any, provider: Any) -> None:
        raise ProviderError("--provider cuda", "a probe step failed (no kernel)")

    monkeypatch.setattr(Session, "_open", open_as_cpu)
    monkeypatch.setattr(Session, "_probe", broken)
    session = load(tiny_bundle)
    assert session.provider is CPU
    assert "a probe step failed" in session.provider_reason
    with pytest.raises(ProviderError, match="a probe step failed"):
        load(tiny_bundle, provider="cuda")


def test_the_probe_runs_one_step(tiny_bundle: Path) -> None:
    session = load(tiny_bundle, provider="cpu")
    session._probe(session._ort, CPU)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no kernel")

    with pytest.raises((ProviderError, RuntimeError), match="no kernel"):
        session._probe(Broken(), CPU)
