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


def open_model(model: Optional[str], provider: str, *, threads: Optional[int] = None) -> Session:
    """A session for MODEL (None: the bundled demo model). Warnings go to stderr."""
    bundle = find_bundle(model)
    if bundle is not None:
        return _load(bundle, model, provider, threads)
    source = Path(str(model))
    flavour = "standard" if provider == "coreml" else "fused"
    try:
        return _load(_exported(source, flavour), model, provider, threads)
    except BundleError:
        # What the cache holds has gone bad. It is ours, so it is ours to mend.
        return _load(_exported(source, flavour, repair=True), model, provider, threads)


def find_bundle(model: Optional[str]) -> Optional[Path]:
    """The model folder (or .onnx file in one) that MODEL names; None if it is to be exported. Raises InputError."""
    if model is None:
        return bundled_model(DEMO)
    path = Path(model)
    if path.is_dir():
        if is_bundle(path) or find_foreign(path):
            return path
        if (path / "config.json").is_file():
            return None
        raise InputError(
            path,
            "a folder without bundle.json or config.json",
            "a bundle, a folder of ONNX files, a Hugging Face folder, or a file to export",
        )
    if path.exists():
        return path if find_foreign(path) else None
    if model in BUNDLED:
        return bundled_model(model)
    raise InputError(
        path,
        "no such file",
        f"a checkpoint (.tinygpt, .gguf, Hugging Face folder), a bundle folder, or {NAMES}",
    )


def _load(bundle: Path, model: Optional[str], provider: str, threads: Optional[int]) -> Session:
    with spinner(f"loading {model or DEMO}"):
        return load(bundle, provider=provider, threads=threads)


def _exported(source: Path, flavour: str, *, repair: bool = False) -> Path:
    """The bundle of a checkpoint in the user's cache, exported now if need be."""
    from ..export.cache import cached_export

    with progress_bar() as progress:
        done = cached_export(source, flavour=flavour, progress=progress, repair=repair)
    for warning in done.warnings:
        print(f"posttrainllm: warning: {source}: {warning}", file=sys.stderr)
    if done.fresh:
        print(f"agent: exported {source} into {done.bundle}", file=sys.stderr)
    return done.bundle
