"""MODEL on the command line: a bundle, a checkpoint that is exported once, or the name of a bundled model."""

import sys
from pathlib import Path

from ..runtime.bundle import is_bundle
from ..runtime.errors import InputError
from ..runtime.session import Session, load
from .bundled import DEMO, bundled_model
from .progress import progress_bar, spinner


def open_model(model: str | None, provider: str) -> Session:
    """A session for MODEL (None: the bundled demo model). Warnings go to stderr."""
    bundle = find_bundle(model)
    with spinner(f"loading {model or DEMO}"):
        return load(bundle, provider=provider)


def find_bundle(model: str | None) -> Path:
    """The bundle folder of MODEL, exported into the user's cache if it is a checkpoint. Raises InputError."""
    if model is None:
        return bundled_model(DEMO)
    path = Path(model)
    if path.is_dir():
        if is_bundle(path):
            return path
        raise InputError(path, "a folder without bundle.json", "a bundle, or a .tinygpt file to export")
    if not path.exists():
        if model == DEMO:
            return bundled_model(DEMO)
        raise InputError(path, "no such file", f"a .tinygpt file, a bundle folder, or {DEMO}")
    from ..export.cache import cached_export

    with progress_bar() as progress:
        done = cached_export(path, progress=progress)
    for warning in done.warnings:
        print(f"posttrainllm: warning: {path}: {warning}", file=sys.stderr)
    if done.fresh:
        print(f"agent: exported {path} into {done.bundle}", file=sys.stderr)
    return done.bundle
