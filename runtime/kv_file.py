"""A file that holds the keys and values of a run of ids: written whole or not at all, mapped when read.

    8 bytes     magic, ends with the version of the format
    8 bytes     length of the header, little-endian
    32 bytes    SHA-256 of the header: ids that were changed would be another prompt
    header      JSON: identity, ids, kv (layers, heads, head_dim, dtype), model, sha256 of what follows, more
    zeros       up to a multiple of 64
    data        layer by layer, key then value: [heads, len(ids), head_dim], C order, little-endian

`identity` names everything that changes the values: weights, graph, tokenizer, provider. Who reads decides whether it fits.
`more` is the writer's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import KVLayout, fsync

MAGIC = b"PTLLMKV\x01"
_ALIGN = 64
_FIXED = 48  # what stands before the header
_MAX_HEADER = 64 << 20


class KVFileError(Exception):
    """A file that cannot be used; the message says why."""


@dataclass(frozen=True)
class KVHeader:
    """What a file says of itself. `start` is where its data begin, `nbytes` how many they are."""

    identity: str
    ids: tuple[int, ...]
    model: str
    layout: tuple[int, int, int, str]
    sha256: str
    start: int
    more: Any = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[keys and values, heads, ids, head_dim]."""
        layers, heads, head_dim, _ = self.layout
        return 2 * layers, heads, len(self.ids), head_dim

    @property
    def nbytes(self) -> int:
        count, heads, ids, head_dim = self.shape
        return count * heads * ids * head_dim * np.dtype(self.layout[3]).itemsize


def layout_of(kv: KVLayout) -> tuple[int, int, int, str]:
    """What of a layout changes the bytes."""
    return kv.layers, kv.heads, kv.head_dim, kv.dtype


def write_kv(
    file: Path,
    values: Sequence[NDArray[Any]],
    *,
    ids: Sequence[int],
    identity: str,
    model: str,
    kv: KVLayout,
    more: Any = None,
) -> None:
    """Write `values` (key and value of each layer, [heads, len(ids), head_dim]) to `file`. Raises OSError."""
    digest = hashlib.sha256()
    for array in values:
        digest.update(np.ascontiguousarray(array).data)
    header = json.dumps(
        {
            "identity": identity,
            "ids": list(ids),
            "model": model,
            "kv": layout_of(kv),
            "sha256": digest.hexdigest(),
            "more": more,
        }
    ).encode()
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(MAGIC + len(header).to_bytes(8, "little"))
            out.write(hashlib.sha256(header).digest() + header)
            out.write(b"\0" * (-out.tell() % _ALIGN))
            for array in values:
                out.write(np.ascontiguousarray(array).data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    fsync(file.parent)


def read_header(file: Path) -> KVHeader:
    """The header of `file`, and whether the file is as long as it says. Raises KVFileError."""
    try:
        with file.open("rb") as source:
            if source.read(8) != MAGIC:
                raise KVFileError("not a file of keys and values, or of another version")
            length = int.from_bytes(source.read(8), "little")
            if length > _MAX_HEADER:
                raise KVFileError("a damaged header")
            digest, text = source.read(32), source.read(length)
            if hashlib.sha256(text).digest() != digest:
                raise KVFileError("a damaged header")
            data = json.loads(text)
            start = -(-(_FIXED + length) // _ALIGN) * _ALIGN
            size = os.fstat(source.fileno()).st_size
        layers, heads, head_dim, dtype = data["kv"]
        ids = tuple(data["ids"])
        whole = all(type(number) is int and number >= 0 for number in (*ids, layers, heads, head_dim))
        if not whole or dtype not in ("float32", "float16") or not ids:
            raise KVFileError("a damaged header")
        header = KVHeader(
            str(data["identity"]),
            ids,
            str(data["model"]),
            (layers, heads, head_dim, dtype),
            str(data["sha256"]),
            start,
            data.get("more"),
        )
    except OSError as error:
        raise KVFileError(error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KVFileError("a damaged header") from None
    if size != start + header.nbytes:
        raise KVFileError(f"{size} bytes, not {start + header.nbytes}")
    return header


def read_values(file: Path, header: KVHeader) -> NDArray[Any]:
    """The data of `file` as a read-only map, `header.shape`, their checksum verified. Raises KVFileError."""
    try:
        with file.open("rb") as source:
            view = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise KVFileError(str(error)) from None
    if len(view) < header.start + header.nbytes:
        raise KVFileError("shorter than its header says")
    data = memoryview(view)[header.start : header.start + header.nbytes]
    if hashlib.sha256(data).hexdigest() != header.sha256:
        raise KVFileError("its data do not have the checksum of its header")
    values: NDArray[Any] = np.frombuffer(data, np.dtype(header.layout[3])).reshape(header.shape)
    return values
