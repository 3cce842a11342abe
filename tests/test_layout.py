"""The mapping of the repository's rooms into one package stays whole (see pyproject.toml)."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("export", "runtime", "agent", "cli", "models", "tools_schemas")
CODE = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "recipes" not in path.parts]


def setuptools() -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return settings


def test_every_folder_of_code_is_installed() -> None:
    """A forgotten folder imports fine in an editable install and is silently absent from the wheel."""
    listed = setuptools()["packages"]
    assert isinstance(listed, list)
    folders = {path.parent for path in CODE}
    names = {"posttrainllm." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert names | {"posttrainllm"} == set(listed)
    for folder in folders:
        assert (folder / "__init__.py").is_file(), f"{folder} is not a package"


def test_nothing_at_the_root_shadows_the_installed_package() -> None:
    assert not (ROOT / "posttrainllm").exists()
    assert not (ROOT / "posttrainllm.py").exists()


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_import_of_a_room(path: Path) -> None:
    """`import runtime` works from the root by accident, and makes a second copy of every class."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & {*ROOMS, "package"}


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_two_rooms(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
