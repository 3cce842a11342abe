"""MODEL on the command line: a bundle, a checkpoint that is exported once, or the name of a bundled model."""

import sys
from importlib.resources import files
from pathlib import Path

from ..runtime.bundle import is_bundle
from ..runtime.errors import InputError
from ..runtime.session import Session, load
from .progress import progress_bar, spinner

BUNDLED = ("demo",)


def open_model(model: str | None, provider: str) -> Session:
    """A session for MODEL (None: the bundled demo model). Warnings go to stderr."""
    bundle = find_bundle(model)
    with spinner(f"loading {model or BUNDLED[0]}"):
        return load(bundle, provider=provider)


def find_bundle(model: str | None) -> Path:
    """The bundle folder of MODEL, exported into the user's cache if it is a checkpoint. Raises InputError."""
    if model is None:
        return bundled(BUNDLED[0])
    path = Path(model)
    if path.is_dir():
        if is_bundle(path):
            return path
        raise InputError(path, "a folder without bundle.json", "a bundle, or a .tinygpt file to export")
    if not path.exists() and model in BUNDLED:
        return bundled(model)
    if not path.exists():
        raise InputError(path, "no such file", f"a .tinygpt file, a bundle folder, or {' or '.join(BUNDLED)}")
    from ..export.cache import cached_export

    with progress_bar() as progress:
        done = cached_export(path, progress=progress)
    for warning in done.warnings:
        print(f"posttrainllm: warning: {path}: {warning}", file=sys.stderr)
    if done.fresh:
        print(f"agent: exported {path} into {done.bundle}", file=sys.stderr)
    return done.bundle


def bundled(name: str) -> Path:
    """The folder of a model that comes with the package."""
    return Path(str(files("posttrainllm.models"))) / name / "bundle"


def bundled_tools(name: str) -> Path:
    """The tool file `name` that comes with the package."""
    return Path(str(files("posttrainllm.tools_schemas"))) / f"{name}.json"
