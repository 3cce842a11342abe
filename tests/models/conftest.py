"""Recipes are not installed: they are loaded from the checkout."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[2] / "models" / "recipes"


@pytest.fixture
def load_recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """load_recipe("echo_conversations") -> the module models/recipes/echo_conversations.py."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load
