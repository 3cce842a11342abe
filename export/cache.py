"""A checkpoint exported once per content, in the user's cache folder.

    <cache>/hashes/<hash of the path>.json    content hash of a source's file, by path, size, mtime and inode
    <cache>/bundles/<key>/                    the bundle; the key covers the source, its tokenizer, our version

So a start never re-reads gigabytes, a changed file is noticed, and eight first starts at once export once.
The folder is the system's usual one; the environment variable POSTTRAINLLM_CACHE_DIR overrides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..runtime.bundle import FORMAT_VERSION, Bundle, is_bundle, sha256_file
from ..runtime.errors import BundleError, CheckpointError, UsageError
from .checkpoint import open_checkpoint
from .exporter import FLAVOUR, Progress, export
from .precision import default_precision
from .tokenizer_source import resolve_tokenizer

# Raise it when the same source would give another bundle.
EXPORTER_VERSION = 2
_SOURCE_FILES = (".json", ".jinja", ".model", ".safetensors")  # of a Hugging Face folder


@dataclass(frozen=True)
class CachedExport:
    """Where the bundle is; `warnings` of the checkpoint and its tokenizer; whether it was made just now."""

    bundle: Path
    warnings: tuple[str, ...]
    fresh: bool


def cache_folder() -> Path:
    """The folder of this user's exported models. Made on demand, and safe to delete."""
    given = os.environ.get("POSTTRAINLLM_CACHE_DIR")
    if given:
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("posttrainllm", appauthor=False)


def cached_export(
    source: Path, *, flavour: str = FLAVOUR, progress: Progress | None = None, repair: bool = False
) -> CachedExport:
    """The bundle of checkpoint `source`, exported now unless it was before. Raises as `export` does.

    With `repair` the bundle's files are hashed, and a damaged one is exported again: for a caller whom it
    failed. A start does not hash, since that would read all weights.
    """
    folder = cache_folder()
    with open_checkpoint(source) as checkpoint:
        words = resolve_tokenizer(checkpoint, None)
        warnings = checkpoint.warnings + words.warnings
        precision = default_precision(checkpoint) if flavour == FLAVOUR else "fp32"
    try:
        for part in ("hashes", "bundles"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        identity = [
            content_hash(source, folder / "hashes"),
            words.info.kind,
            words.info.fingerprint,
            words.end_of_turn_ids,
            flavour,
            precision,
            FORMAT_VERSION,
            EXPORTER_VERSION,
        ]
        key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:40]
        out = folder / "bundles" / key
        if not repair and _is_good(out):
            return CachedExport(out, warnings, fresh=False)
        made = _export_once(source, out, flavour, progress, verify=repair)
        return CachedExport(out, warnings, fresh=made)
    except OSError as error:
        raise UsageError(
            folder,
            f"the cache folder cannot be used ({error.strerror or error})",
            "a writable folder in POSTTRAINLLM_CACHE_DIR",
        ) from None


def cached_bundles() -> list[Path]:
    """The folders of the cache, the newest first; some may be damaged. What is being written is left out."""
    folder = cache_folder() / "bundles"
    try:
        found = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        return sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)
    except FileNotFoundError:
        return []


def remove_cached(bundle: Path) -> None:
    """Delete one folder of `cached_bundles`; it is out of sight before its files go. Raises UsageError."""
    from filelock import FileLock

    try:
        with FileLock(bundle.with_suffix(".lock")):
            aside = Path(tempfile.mkdtemp(prefix=f".{bundle.name}.", suffix=".old", dir=bundle.parent))
            try:
                os.rename(bundle, aside / bundle.name)
            finally:
                shutil.rmtree(aside)
    except OSError as error:
        raise UsageError(bundle, f"cannot be removed ({error.strerror or error})") from None


def content_hash(source: Path, memory: Path) -> str:
    """SHA-256 of `source`, remembered in the folder `memory` for as long as the file's stat is the same.

    Of a folder: of the names and hashes of its files that an export may read.
    """
    if source.is_dir():
        files = [file for file in sorted(source.iterdir()) if file.suffix in _SOURCE_FILES and file.is_file()]
        found = [(file.name, content_hash(file, memory)) for file in files]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()
    try:
        stat = source.stat()
    except OSError as error:
        raise CheckpointError(source, f"cannot be read ({error.strerror})") from None
    resolved = str(source.resolve())
    stamp = [resolved, stat.st_size, stat.st_mtime_ns, stat.st_ino]
    note = memory / f"{hashlib.sha256(os.fsencode(resolved)).hexdigest()}.json"
    try:
        known = json.loads(note.read_bytes())
        if known["stamp"] == stamp and isinstance(known["sha256"], str):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never seen, or damaged: hash again
    digest = sha256_file(source)
    handle, name = tempfile.mkstemp(dir=memory, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="ascii") as file:
        json.dump({"stamp": stamp, "sha256": digest}, file)
    os.replace(name, note)
    return digest


def _is_good(out: Path, *, verify: bool = False) -> bool:
    try:
        Bundle.open(out, verify=verify)
    except BundleError:
        return False
    return True


def _export_once(source: Path, out: Path, flavour: str, progress: Progress | None, *, verify: bool) -> bool:
    """Export unless another process does so first; whether it was us."""
    from filelock import FileLock

    with FileLock(out.with_suffix(".lock")):
        if _is_good(out, verify=verify):
            return False
        for leftover in out.parent.glob(f".{out.name}.*"):  # of an export that was killed; we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        if out.exists() and not is_bundle(out):
            shutil.rmtree(out)  # what stands there is damaged, and it was ours
        export(source, out, flavour=flavour, force=True, progress=progress)
        return True
