"""The prompt cache: keys and values of system prompts, kept in a folder from one start to the next.

A stored prompt serves every later one that begins alike. For outputs to be equal bit for bit with and without the
cache, what is restored must have been computed as it would be now: the prompt is fed in chunks of PREFILL_CHUNK ids from
its beginning, so a stored prompt is taken whole where it is the whole prompt, and up to a multiple of
PREFILL_CHUNK where only its beginning is the same.

Files are named by identity and ids, so that writers of the same prompt write the same; they are renamed into place. A
damaged one is passed over, and written again under its name. The folder is bounded: what was not used for the longest time goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import onnxruntime as ort

from .errors import UsageError
from .kv_cache import KVCache
from .kv_file import KVFileError, KVHeader, layout_of, read_header, read_values, write_kv
from .session import PREFILL_CHUNK, Session

SUFFIX = ".kv"
MAX_NBYTES = 1 << 30
_LEFTOVER_S = 3600  # a temporary file of a writer that was killed is this old


@dataclass(frozen=True)
class Entry:
    """One file of the folder: its header, or the problem that it has."""

    path: Path
    nbytes: int
    used: float
    header: KVHeader | None
    problem: str | None = None


@dataclass(frozen=True)
class Restored:
    """What `PromptCache.restore` found.

    `length` ids are in the cache now. `damaged` files were passed over, with the reason. Where not all ids were found,
    `nearest` is the file that agrees longest, up to id `differs`; `foreign` is one of another model or setting, where
    there is no other.
    """

    length: int
    damaged: tuple[tuple[str, str], ...] = ()
    nearest: Entry | None = None
    differs: int = 0
    foreign: Entry | None = None


class PromptCache:
    """The folder `folder`, made on demand, for one session. Raises UsageError if it cannot be used."""

    def __init__(self, folder: Path, session: Session, *, max_nbytes: int = MAX_NBYTES) -> None:
        self.folder = folder
        self._session = session
        self._max_nbytes = max_nbytes
        self.identity = identity(session)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise UsageError(
                f"--prompt-cache-dir {folder}", f"cannot be used ({error.strerror or error})", "a folder"
            ) from None

    def restore(self, ids: Sequence[int], cache: KVCache) -> Restored:
        """Fill the empty `cache` with the longest stored beginning of the prompt `ids`."""
        entries, damaged, foreign = [], [], None
        for entry in list_entries(self.folder):
            if entry.header is None:
                damaged.append((entry.path.name, entry.problem or ""))
            elif entry.header.identity == self.identity:
                entries.append((usable(entry.header.ids, ids), entry))
            else:
                foreign = foreign or entry
        for length, entry in sorted(entries, key=lambda found: -found[0]):
            assert entry.header is not None
            if not length:
                break
            try:
                values = read_values(entry.path, entry.header)
            except KVFileError as error:
                damaged.append((entry.path.name, str(error)))
                continue
            cache.restore(ids[:length], list(values[:, :, :length]))
            with contextlib.suppress(OSError):
                os.utime(entry.path)
            if length == len(ids):
                return Restored(length, tuple(damaged))
            return Restored(length, tuple(damaged), entry, agreement(entry.header.ids, ids))
        nearest = max(
            (entry for _, entry in entries),
            key=lambda entry: agreement(entry.header.ids if entry.header else (), ids),
            default=None,
        )
        if nearest is None or nearest.header is None:
            return Restored(0, tuple(damaged), foreign=foreign)
        return Restored(0, tuple(damaged), nearest, agreement(nearest.header.ids, ids))

    def save(self, ids: Sequence[int], cache: KVCache) -> Path:
        """Store the prompt `ids`, which `cache` holds. Raises UsageError if that fails."""
        file = self.folder / f"{self.identity[:16]}-{_digest(ids)[:24]}{SUFFIX}"
        try:
            write_kv(
                file,
                cache.snapshot(len(ids)),
                ids=ids,
                identity=self.identity,
                model=str(self._session.bundle.path),
                kv=self._session.manifest.kv,
            )
            self._prune(keep=file)
        except OSError as error:
            raise UsageError(
                f"--prompt-cache-dir {self.folder}", f"cannot be written ({error.strerror or error})"
            ) from None
        return file

    def _prune(self, keep: Path) -> None:
        """Delete what was not used for the longest time until the rest fits, and leftovers of killed writers."""
        for left in self.folder.glob(f".*{SUFFIX}.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFTOVER_S:
                    left.unlink()
        files = []
        for file in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                stat = file.stat()
                files.append((file != keep, stat.st_mtime, stat.st_size, file))
        total = sum(size for _, _, size, _ in files)
        for other, _, size, file in sorted(files, key=lambda found: found[1]):
            if total <= self._max_nbytes:
                break
            if other:
                with contextlib.suppress(OSError):
                    file.unlink()
                total -= size


def identity(session: Session) -> str:
    """SHA-256 over everything that changes keys and values: files, tokenizer, layout, provider, threads, versions."""
    manifest, bundle = session.manifest, session.bundle
    files = []
    for name, info in sorted(manifest.files.items()):
        # Hashes that were written down say nothing of a file that was replaced since; to read it would cost
        # more than a prefill. Of a foreign model nobody wrote them down.
        stat = (bundle.path / name).stat()
        stamp: list[object] = [name, info.sha256, stat.st_size, stat.st_mtime_ns]
        files.append(stamp if info.sha256 else [*stamp, stat.st_ino, str((bundle.path / name).resolve())])
    parts: list[object] = [files, manifest.tokenizer.fingerprint, layout_of(manifest.kv), manifest.kv.style]
    parts += [session.provider.name, session.threads, ort.__version__, PREFILL_CHUNK]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def list_entries(folder: Path) -> list[Entry]:
    """The files of a prompt cache, the last used first. What vanishes meanwhile is left out."""
    entries = []
    for file in folder.glob(f"*{SUFFIX}"):
        try:
            stat = file.stat()
        except OSError:
            continue
        try:
            entries.append(Entry(file, stat.st_size, stat.st_mtime, read_header(file)))
        except KVFileError as error:
            entries.append(Entry(file, stat.st_size, stat.st_mtime, None, str(error)))
    return sorted(entries, key=lambda entry: -entry.used)


def agreement(stored: Sequence[int], ids: Sequence[int]) -> int:
    """How many ids both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stored, ids, strict=False)))


def usable(stored: Sequence[int], ids: Sequence[int]) -> int:
    """How many ids of the prompt `ids` may be taken from `stored`; see above."""
    same = agreement(stored, ids)
    if same == len(stored) == len(ids):
        return same
    return same // PREFILL_CHUNK * PREFILL_CHUNK


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()
