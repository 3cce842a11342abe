"""A GGUF model as it lies on disk, in one file or in parts: metadata, and tensors read one at a time.

Parts (`name-00001-of-00003.gguf`) are opened together, whichever of them is named. Nothing is mapped into
memory: a file that shrinks under us is an error, not a bus fault.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .gguf_header import GGUFHeader, TensorInfo, Value, read_header

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1000
_HASH_NBYTES = 1 << 20


@dataclass(frozen=True)
class _Part:
    path: Path
    file: BufferedReader
    stat: os.stat_result
    header: GGUFHeader


class GGUFFile:
    """An open GGUF model. Closed by `close` or `with`. Raises CheckpointError, and OSError on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        try:
            first = self._open(path)
            self._parts = self._open_parts(first)
            self._tensors = self._inventory()
        except BaseException:
            self._stack.close()
            raise
        self.metadata: Mapping[str, Value] = self._parts[0].header.metadata
        self.version = first.header.version

    def _open(self, path: Path) -> _Part:
        file = self._stack.enter_context(path.open("rb"))
        stat = os.fstat(file.fileno())
        return _Part(path, file, stat, read_header(file, path, stat.st_size))

    def _open_parts(self, given: _Part) -> list[_Part]:
        """All parts in order; `given` is one of them."""
        count = given.header.metadata.get("split.count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MAX_PARTS:
            raise CheckpointError(given.path, f"split.count is {count!r:.40}", f"at most {_MAX_PARTS}")
        if count <= 1:
            return [given]
        match = _PART.fullmatch(given.path.name)
        if match is None or int(match[3]) != count:
            raise CheckpointError(
                given.path, f"is one of {count} parts", f"names that end in -00001-of-{count:05}.gguf"
            )
        parts = []
        for number in range(count):
            path = given.path.with_name(f"{match[1]}-{number + 1:05}-of-{count:05}.gguf")
            if path.name == given.path.name:
                part = given
            elif path.is_file():
                part = self._open(path)
            else:
                raise CheckpointError(path, "is missing", f"all {count} parts beside one another")
            found = [part.header.metadata.get(key) for key in ("split.no", "split.count")]
            if found != [number, count]:
                raise CheckpointError(path, f"says part {found[0]} of {found[1]}", f"{number} of {count}")
            parts.append(part)
        return parts

    def _inventory(self) -> dict[str, tuple[_Part, TensorInfo]]:
        tensors: dict[str, tuple[_Part, TensorInfo]] = {}
        for part in self._parts:
            for info in part.header.tensors:
                if info.name in tensors:
                    raise CheckpointError(part.path, f"tensor {info.name} is in two parts", "unique names")
                tensors[info.name] = part, info
        claimed = self._parts[0].header.metadata.get("split.tensors.count")
        if len(self._parts) > 1 and claimed is not None and claimed != len(tensors):
            raise CheckpointError(self.path, f"{len(tensors)} tensors in all parts", f"{claimed}")
        return tensors

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its name in the file."""
        return {name: info for name, (_, info) in self._tensors.items()}

    @property
    def nbytes(self) -> int:
        """Size of all parts."""
        return sum(part.stat.st_size for part in self._parts)

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name` as [rows, bytes of a row]. A fresh array."""
        part, info = self._tensors[name]
        data = np.empty((info.nbytes // info.row_nbytes, info.row_nbytes), np.uint8)
        try:
            part.file.seek(info.start)
            got = part.file.readinto(data.reshape(-1).data)
        except OSError as error:
            raise _unreadable(part.path, error) from None
        if got != info.nbytes:
            raise _changed(part.path)
        _check_unchanged(part)
        return data

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the file, or of its parts one after the other."""
        digest = hashlib.sha256()
        for part in self._parts:
            try:
                part.file.seek(0)
                while data := part.file.read(_HASH_NBYTES):
                    digest.update(data)
            except OSError as error:
                raise _unreadable(part.path, error) from None
            _check_unchanged(part)
        return digest.hexdigest()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(path, f"cannot be read ({error.strerror or error})")


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(path, "changed while it was read", "an unchanging file", "try again")


def _check_unchanged(part: _Part) -> None:
    stat = os.fstat(part.file.fileno())
    if (stat.st_size, stat.st_mtime_ns) != (part.stat.st_size, part.stat.st_mtime_ns):
        raise _changed(part.path)
