"""The container of a `.tinygpt` file: magic, version, JSON header, manifest, and where the body lies.

Checks everything that can be checked without knowing the architecture, and allocates nothing from a
size that was not compared with the length of the file. Knows no tensor by name.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from ..runtime.errors import CheckpointError

MAGIC = b"TGPT"
_PREFIX = struct.Struct("<4sII")
_STEP_NBYTES = 4
# A training corpus may sit in the header, so headers can be large; weights never do.
MAX_HEADER_NBYTES = 32 << 20
MAX_TENSORS = 1 << 16
DTYPES = ("fp32", "fp16", "int4")


@dataclass(frozen=True)
class Entry:
    """One tensor of the manifest. `offset` counts elements; only fp16 bodies use it."""

    name: str
    shape: tuple[int, ...]
    offset: object

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What the file says about itself. `config` has no nulls: null means absent."""

    path: Path
    version: int
    config: Mapping[str, object]
    manifest: tuple[Entry, ...]
    dtype: str
    has_moments: bool
    body_start: int
    body_nbytes: int


def read_header(file: BinaryIO, path: Path, nbytes: int) -> Header:
    """The checked header of the open file `path` of `nbytes` bytes. Raises CheckpointError."""
    file.seek(0)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise _refuse(path, f"truncated: {nbytes} bytes", "at least 16 bytes and a header")
    magic, version, header_nbytes = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise _refuse(path, f"starts with {magic!r}", f"the magic {MAGIC!r}")
    if version == 1:
        raise _refuse(path, "format version 1", "version 2", "version 1 files are not converted yet")
    if version != 2:
        raise _refuse(path, f"format version {version}", "version 2")
    body_start = _PREFIX.size + header_nbytes + _STEP_NBYTES
    if body_start > nbytes:
        raise _refuse(
            path,
            f"header of {header_nbytes} bytes in a file of {nbytes}",
            "a header inside the file",
            "copy it again",
        )
    if header_nbytes > MAX_HEADER_NBYTES:
        raise _refuse(path, f"oversized header: {header_nbytes} bytes", f"at most {MAX_HEADER_NBYTES} bytes")
    head = _parse(file.read(header_nbytes), path)
    config = head.get("config", {})
    if not isinstance(config, dict):
        raise _refuse(path, f"header key config is {_kind(config)}", "an object")
    dtype = _dtype(head, path)
    return Header(
        path=path,
        version=version,
        config={key: value for key, value in config.items() if value is not None},
        manifest=_manifest(head, path),
        dtype=dtype,
        has_moments=_flag(head, "includesOptimizerState", path, default=True),
        body_start=body_start,
        body_nbytes=nbytes - body_start,
    )


def check_elements(entries: tuple[Entry, ...], header: Header) -> None:
    """Refuse shapes that are not 1 or 2 positive sizes, or that hold more elements than the body can."""
    limit = header.body_nbytes // 2
    total = 0
    for entry in entries:
        if not 1 <= len(entry.shape) <= 2:
            raise _refuse(header.path, f"tensor {entry.name} has rank {len(entry.shape)}", "rank 1 or 2")
        for size in entry.shape:
            if size < 1:
                raise _refuse(
                    header.path, f"tensor {entry.name} has the dimension {short(size)}", "a size of 1 or more"
                )
        total += entry.count
        if total > limit:
            raise _refuse(
                header.path,
                f"body of {header.body_nbytes} bytes ends inside tensor {entry.name} of shape {short(list(entry.shape))}",
                "room for every weight of the manifest",
                "the file is truncated or its manifest is wrong",
            )


def _parse(raw: bytes, path: Path) -> dict[str, object]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(path, f"header is not UTF-8 (byte {error.start})", "a JSON object in UTF-8") from None
    try:
        head = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise _refuse(path, "header is nested too deeply", "a JSON object") from None
    except ValueError as error:
        raise _refuse(path, f"header is not JSON ({error})", "a JSON object") from None
    if not isinstance(head, dict):
        raise _refuse(path, f"header is {_kind(head)}", "a JSON object")
    return {key: value for key, value in head.items() if value is not None}


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice in one object")
        found[key] = value
    return found


def _dtype(head: Mapping[str, object], path: Path) -> str:
    value = head.get("weightDtype", "fp32")
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise _refuse(path, f"header key weightDtype is {short(value)}", "fp32 or fp16")
    if value.lower() == "int4":
        raise _refuse(
            path,
            "weightDtype int4",
            "fp32 or fp16",
            "int4 bodies are not converted yet; export the fp16 file",
        )
    return value.lower()


def _flag(head: Mapping[str, object], key: str, path: Path, *, default: bool) -> bool:
    value = head.get(key, default)
    if not isinstance(value, bool):
        raise _refuse(path, f"header key {key} is {short(value)}", "true or false")
    return value


def _manifest(head: Mapping[str, object], path: Path) -> tuple[Entry, ...]:
    if "manifest" not in head:
        raise _refuse(
            path, "header without a manifest", "a list of tensors", "such files are not converted yet"
        )
    items = head["manifest"]
    if not isinstance(items, list):
        raise _refuse(path, f"header key manifest is {_kind(items)}", "a list of tensors")
    if not items:
        raise _refuse(path, "the manifest is empty", "a list of tensors")
    if len(items) > MAX_TENSORS:
        raise _refuse(path, f"a manifest of {len(items)} tensors", f"at most {MAX_TENSORS}")
    entries: dict[str, Entry] = {}
    for index, item in enumerate(items):
        entry = _entry(item, index, path)
        if entry.name in entries:
            raise _refuse(path, f"tensor {entry.name} stands twice in the manifest", "each name once")
        entries[entry.name] = entry
    return tuple(entries.values())


def _entry(item: object, index: int, path: Path) -> Entry:
    where = f"manifest entry {index}"
    if not isinstance(item, dict):
        raise _refuse(path, f"{where} is {_kind(item)}", "an object with name and shape")
    name, shape = item.get("name"), item.get("shape")
    if not isinstance(name, str) or not name:
        raise _refuse(path, f"{where} has the name {short(name)}", "a tensor name")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise _refuse(path, f"tensor {name} has the shape {short(shape)}", "a list of integers")
    return Entry(name, tuple(shape), item.get("floatOffset"))


def _refuse(path: Path, found: str, expected: str, remedy: str = "") -> CheckpointError:
    return CheckpointError(path, found, expected, remedy)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def short(value: object) -> str:
    """`value` for a message, bounded: a hostile number may have millions of digits."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return _kind(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
