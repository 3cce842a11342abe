"""Checks of the engine that are proven here and now: `posttrainllm doctor` prints them.

A check never raises. `failed` is for something that this project promises and that does not hold; `absent`
for something that this machine just does not have.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import PosttrainError
from .providers import CPU, available
from .threads import usable_threads

State = Literal["ok", "absent", "failed"]
# Wheels that install the same `onnxruntime` folder: two of them overwrite each other's files.
_WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
)


@dataclass(frozen=True)
class Check:
    """One line of the table: what was looked at, what came of it, and in which words."""

    name: str
    state: State
    detail: str


def engine_checks(bundle: Path, version: str) -> Iterator[Check]:
    """Versions (ours is `version`), wheels, threads, and one step of the model in `bundle` on every provider."""
    yield Check("versions", "ok", _versions(version))
    yield check_wheels(installed_wheels())
    yield Check("threads", "ok", f"{usable_threads()} usable of {os.cpu_count()} CPUs")
    yield from _providers(bundle)


def installed_wheels() -> list[str]:
    """Which distributions of ONNX Runtime are installed, with their versions."""
    found = []
    for name in _WHEELS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_wheels(found: list[str]) -> Check:
    """Whether at most one distribution of ONNX Runtime is installed."""
    if len(found) > 1:
        remedy = "pip uninstall all of them, then install one"
        return Check("one ONNX Runtime", "failed", f"{' and '.join(found)} overwrite each other; {remedy}")
    return Check("one ONNX Runtime", "ok", found[0] if found else "a build of its own")


def check_folder(name: str, folder: Path) -> Check:
    """Whether `folder` can be made and written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return Check(name, "failed", f"{folder} cannot be written: {error.strerror or error}")
    return Check(name, "ok", f"{folder} can be written")


def _versions(version: str) -> str:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"posttrainllm {version}, Python {platform.python_version()}, {system}"


def _providers(bundle: Path) -> Iterator[Check]:
    try:
        import onnxruntime as ort
    except ImportError as error:  # two wheels in one folder, or none
        yield Check("providers", "failed", f"ONNX Runtime cannot be imported: {error}")
        return
    for provider in available(ort.get_available_providers()):
        yield _step(bundle, provider.name)
    if CPU.ort_name not in ort.get_available_providers():
        yield Check("provider cpu", "failed", "this ONNX Runtime has no CPU provider")


def _step(bundle: Path, provider: str) -> Check:
    import numpy as np

    from .session import load

    name = f"provider {provider}"
    try:
        session = load(bundle, provider=provider)
        logits = session.prefill([1, 2, 3], session.new_cache())
        if not np.isfinite(logits).all():
            return Check(name, "failed", "one step of the demo model gave numbers that are not finite")
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own exceptions have no common base
        # Listed by the wheel, but there may be no such device: only the CPU is promised.
        words = str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {error}"
        return Check(name, "failed" if provider == CPU.name else "absent", words)
    return Check(name, "ok", "one step of the demo model gave finite numbers")
