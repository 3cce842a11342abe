"""MODEL on the command line: a model folder, a checkpoint that is exported once, or the name of a bundled model."""

import sys
from pathlib import Path
from typing import Optional

from ..runtime.bundle import is_bundle
from ..runtime.errors import BundleError, InputError
from ..runtime.foreign import find_foreign
from ..runtime.session import Session, load
from .bundled import BUNDLED, DEMO, NAMES, bundled_model
from .progress import progress_bar, spinner


def open_model(model: Optional[str], provider: str) -> Session:
    """A session for MODEL (None: the bundled demo model). Warnings go to stderr."""
    bundle = find_bundle(model)
    if bundle is not None:
        return _load(bundle, model, provider)
    source = Path(str(model))
    try:
        return _load(_exported(source), model, provider)
    except BundleError:
        # What the cache holds has gone bad. It is ours, so it is ours to mend.
        return _load(_exported(source, repair=True), model, provider)


def find_bundle(model: Optional[str]) -> Optional[Path]:
    """The model folder (or .onnx file in one) that MODEL names; None if it is a file to export. Raises InputError."""
    if model is None:
        return bundled_model(DEMO)
    path = Path(model)
    if path.is_dir():
        if is_bundle(path) or find_foreign(path):
            return path
        raise InputError(
            path,
            "a folder without bundle.json",
            "a bundle, a folder of ONNX files, or a .tinygpt file to export",
        )
    if path.exists():
        return path if find_foreign(path) else None
    if model in BUNDLED:
        return bundled_model(model)
    raise InputError(path, "no such file", f"a .tinygpt file, a bundle folder, or {NAMES}")


def _load(bundle: Path, model: Optional[str], provider: str) -> Session:
    with spinner(f"loading {model or DEMO}"):
        return load(bundle, provider=provider)


def _exported(source: Path, *, repair: bool = False) -> Path:
    """The bundle of a checkpoint in the user's cache, exported now if need be."""
    from ..export.cache import cached_export

    with progress_bar() as progress:
        done = cached_export(source, progress=progress, repair=repair)
    for warning in done.warnings:
        print(f"posttrainllm: warning: {source}: {warning}", file=sys.stderr)
    if done.fresh:
        print(f"agent: exported {source} into {done.bundle}", file=sys.stderr)
    return done.bundle
