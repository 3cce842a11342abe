"""The public names, so that one appears or vanishes only on purpose."""

from __future__ import annotations

import posttrainllm
from posttrainllm import runtime


def test_public_names_of_the_runtime() -> None:
    assert runtime.__all__ == [
        "Bundle",
        "Grammar",
        "KVCache",
        "Matcher",
        "Sampler",
        "Session",
        "Step",
        "generate",
        "load",
    ]
    for name in runtime.__all__:
        assert getattr(runtime, name).__doc__, f"{name} has no docstring"


def test_submodules_do_not_hide_public_names() -> None:
    """A module called like a function would replace it in the package once imported."""
    assert callable(runtime.generate)
    assert callable(runtime.load)


def test_version() -> None:
    assert posttrainllm.__version__ == "0.1.0"
