"""A GGUF model in Hugging Face's vocabulary: config, tensor names, values, and the quantised blocks themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .gguf_blocks import BlockType, dequantise
from .gguf_config import huggingface_config
from .gguf_file import GGUFFile
from .gguf_tensors import check_rows, origins, row_order

_LOSSLESS = {"F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class QuantisedTensor:
    """A linear weight or a table as the file holds it: `blocks` [rows, bytes of a row], `shape` [rows, columns].

    Rows are outputs (or ids), in our order. `transposed` when our tensor of that name is [columns, rows].
    """

    type: BlockType
    blocks: NDArray[np.uint8]
    shape: tuple[int, int]
    transposed: bool


class GGUFModel:
    """An open GGUF model; one tensor at a time is read and dequantised. Closed by `close` or `with`.

    `config` is what a config.json would hold; names are those of the safetensors of the same model.
    Raises CheckpointError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = GGUFFile(path)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror or error})") from None
        try:
            self.config: Mapping[str, Any] = huggingface_config(self.file)
            self._origins = origins(self.file, self.config)
            self._infos = self.file.tensors
            for origin in self._origins.values():
                if not check_rows(origin, self._infos[origin.name].shape[0], self.config):
                    raise CheckpointError(
                        path,
                        f"tensor {origin.name} has {self._infos[origin.name].shape[0]} rows",
                        f"a multiple of the heads, {self.config['num_attention_heads']}",
                    )
        except BaseException:
            self.file.close()
            raise

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face's name."""
        return {name: self._shape(name) for name in self._origins}

    def _shape(self, name: str) -> tuple[int, ...]:
        origin = self._origins[name]
        shape = self._infos[origin.name].shape
        return shape[::-1] if origin.transposed else shape

    @property
    def nbytes(self) -> int:
        """Size of the file, or of all its parts."""
        return self.file.nbytes

    @property
    def types(self) -> tuple[str, ...]:
        """The types that weights are stored in, the one with most bytes first."""
        sizes: dict[str, int] = {}
        for origin in self._origins.values():
            info = self._infos[origin.name]
            sizes[info.type.name] = sizes.get(info.type.name, 0) + info.nbytes
        return tuple(sorted(sizes, key=lambda name: -sizes[name]))

    def stored_type(self, name: str) -> BlockType:
        """How tensor `name` is stored."""
        return self._infos[self._origins[name].name].type

    def stored_nbytes(self, name: str) -> int:
        """Size of `name` in the file."""
        return self._infos[self._origins[name].name].nbytes

    def dtype(self, name: str) -> str:
        """What holds the values of `name` without loss: float32, float16 or bfloat16."""
        return _LOSSLESS.get(self.stored_type(name).name, "float32")

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values."""
        return np.array_equal(self.tensor(one), self.tensor(other))

    def hashes(self) -> list[str]:
        """Hexadecimal SHA-256 of the file, or of its parts one after the other."""
        return [self.file.sha256()]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The values of `name` in its Hugging Face shape. Raises CheckpointError for NaN or infinity."""
        origin = self._origins[name]
        info = self._infos[origin.name]
        values = dequantise(self._rows(name), info.type).reshape(info.shape)
        if len(info.shape) == 1:
            order = row_order(origin, info.shape[0], self.config)
            values = values if order is None else values[order]
        if not np.isfinite(values).all():
            raise CheckpointError(
                self.path, f"NaN or infinity in tensor {origin.name}", "finite weights", "quantise it again"
            )
        if origin.added:
            values -= np.float32(origin.added)
        return values.T if origin.transposed else values

    def block_type(self, name: str) -> BlockType | None:
        """How `name` is quantised; None where it is plain floats, or where its values are not the stored ones."""
        origin = self._origins[name]
        info = self._infos[origin.name]
        return None if info.type.unpack is None or len(info.shape) != 2 or origin.added else info.type

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The blocks of `name`, [outputs, bytes of a row], which has a `block_type`."""
        return self._rows(name)

    def quantised(self, name: str) -> QuantisedTensor | None:
        """The blocks of `name`, their rows in our order; None where it is stored as plain floats."""
        origin = self._origins[name]
        info = self._infos[origin.name]
        if info.type.unpack is None or len(info.shape) != 2 or origin.added:
            return None
        shape = (info.shape[0], info.shape[1])
        return QuantisedTensor(info.type, self._rows(name), shape, origin.transposed)

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """The blocks of `name`, the rows of a matrix in our order."""
        origin = self._origins[name]
        info = self._infos[origin.name]
        blocks = self.file.blocks(origin.name)
        order = row_order(origin, info.shape[0], self.config) if len(info.shape) == 2 else None
        return blocks if order is None else blocks[order]

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
