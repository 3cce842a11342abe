"""A model in Hugging Face's vocabulary as a checkpoint: from its folder, or from any other source of such tensors.

A folder: config.json, the safetensors files, and the tokenizer's files. Tensors are read one at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .architectures import LinearLayout, ModelConfig, tensor_shapes
from .gguf_blocks import BlockType
from .huggingface_names import Origin, Row, describe_model, origins, slices, stored_shape
from .safetensors_file import SafetensorsFolder
from .tokenizer_files import read_files

CONFIG = "config.json"
_MAX_NBYTES = 256 << 20
# Buffers that old versions saved: masks and frequencies, which follow from the config.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)

T = TypeVar("T", bound=np.generic)


class TensorSource(Protocol):
    """Tensors under Hugging Face's names, wherever they come from."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the source on disk."""

    def dtype(self, name: str) -> str:
        """What holds the values of `name` without loss: float32, float16 or bfloat16."""

    def stored_nbytes(self, name: str) -> int:
        """Size of `name` in the source."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh array. Raises CheckpointError for NaN, infinity, a changed file."""

    def block_type(self, name: str) -> BlockType | None:
        """How `name` is quantised; None where it is plain floats."""

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The blocks of `name`, [outputs, bytes of a row], which has a `block_type`."""

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values."""

    def hashes(self) -> Any:
        """Hexadecimal SHA-256 of each file."""

    def close(self) -> None: ...


class HuggingFaceCheckpoint:
    """Weights `source` and the `values` of a config.json as a checkpoint, which owns `source`.

    `tokenizer_files` are the files that belong to the tokenizer, by name. `context` overrides the length of
    context. Raises CheckpointError for what is missing, unknown, of another shape, or not converted.
    """

    tokenizer_source: str | None = None

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        source: TensorSource,
        tokenizer_files: Mapping[str, bytes],
        *,
        container: str = "safetensors",
        context: int | None = None,
    ) -> None:
        self.path = path
        self.values = values
        self.tokenizer_files = tokenizer_files
        self._source = source
        row, description = describe_model(values, path / CONFIG if path.is_dir() else path, context)
        self.config: ModelConfig = description.config
        self.longest_context = description.longest
        self._origins = _present(origins(row, self.config), row, source)
        self.linear_layout: LinearLayout = (
            "in_out" if any(origin.transposed for origin in self._origins.values()) else "out_in"
        )
        self.warnings = description.warnings + _check_inventory(self, row)
        self.format = f"{container} {self.stored_dtype}, {self.config.architecture}"

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where each tensor comes from, by our name."""
        return self._origins

    @property
    def source(self) -> TensorSource:
        return self._source

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every tensor, by our name."""
        return tensor_shapes(self.config)

    @property
    def nbytes(self) -> int:
        """Size of the weights' files."""
        return self._source.nbytes

    @property
    def stored_dtype(self) -> str:
        """Element type of the token table."""
        return self.dtype("model.embed_tokens.weight")

    @property
    def weight_nbytes(self) -> int:
        """Size of the weights as stored."""
        return sum(map(self._source.stored_nbytes, {origin.name for origin in self._origins.values()}))

    def dtype(self, name: str) -> str:
        """What holds the values of `name` without loss."""
        return self._source.dtype(self._origins[name].name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor `name` in its logical shape, [out, in] for linear weights. A fresh array."""
        origin = self._origins[name]
        values = self._source.tensor(origin.name)
        return self._piece(values.T if origin.transposed else values, origin)

    def block_type(self, name: str) -> BlockType | None:
        """How the source quantised `name`; None where it holds plain floats."""
        return self._source.block_type(self._origins[name].name)

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The blocks of `name`, [out, bytes of a row]: pieces of a packed tensor are whole rows."""
        origin = self._origins[name]
        return self._piece(self._source.blocks(origin.name), origin)

    def _piece(self, values: NDArray[T], origin: Origin) -> NDArray[T]:
        """The rows of `values` that `origin` means."""
        rows = slices(origin, self.config)
        if rows is None:
            return values
        runs = values.reshape(rows.groups, rows.period, *values.shape[1:])
        return runs[:, rows.start : rows.start + rows.count].reshape(-1, *values.shape[1:])

    def stored(self, name: str) -> NDArray[np.float32]:
        """The values of `name` in the order in which the source holds them: read anew, not by `tensor`, which is checked by it."""
        origin = self._origins[name]
        values = self._source.tensor(origin.name)
        if origin.transposed and values.ndim == 2:
            return self._piece(values.T, origin).T.reshape(-1)
        return self._piece(values, origin).reshape(-1)

    def sha256(self) -> str:
        """SHA-256 over the hashes of the weights' files and the config."""
        digest = hashlib.sha256(json.dumps(self.values, sort_keys=True, default=str).encode())
        for part in self._source.hashes():
            digest.update(part.encode())
        return digest.hexdigest()

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_folder(folder: Path, *, context: int | None = None) -> HuggingFaceCheckpoint:
    """The model in `folder`. Raises CheckpointError."""
    values = read_json(folder / CONFIG)
    describe_model(values, folder / CONFIG, context)  # an unknown model needs no weights to be refused
    source = SafetensorsFolder(folder)
    try:
        return HuggingFaceCheckpoint(folder, values, source, read_files(folder), context=context)
    except BaseException:
        source.close()
        raise


def is_huggingface_folder(path: Path) -> bool:
    """Whether `path` is a folder with a config.json that names a model type."""
    try:
        return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)
    except CheckpointError:
        return True  # it will be refused with the reason


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError."""
    try:
        if file.stat().st_size > _MAX_NBYTES:
            raise CheckpointError(file, f"{file.stat().st_size} bytes", f"at most {_MAX_NBYTES}")
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, f"holds {type(value).__name__}", "a JSON object")
    return value


def _present(wanted: dict[str, Origin], row: Row, source: TensorSource) -> dict[str, Origin]:
    """`wanted` by the names that `source` has: some save the model without its head, so without its prefix."""
    names = source.shapes.keys()
    bare = not any(name.startswith(row.prefix) for name in names)
    found = {}
    for ours, origin in wanted.items():
        name = origin.name.removeprefix(row.prefix) if bare else origin.name
        if ours == "lm_head.weight" and name not in names and "lm_head.weight" in names:
            name = "lm_head.weight"
        found[ours] = Origin(name, origin.piece, origin.by_head, origin.transposed)
    return found


def _check_inventory(checkpoint: HuggingFaceCheckpoint, row: Row) -> tuple[str, ...]:
    """Warnings about tensors that are not needed. Raises CheckpointError for missing and unknown ones."""
    path, config, found = checkpoint.path, checkpoint.config, checkpoint.source.shapes
    needed = set()
    for name, shape in tensor_shapes(config).items():
        origin = checkpoint.origins[name]
        needed.add(origin.name)
        wanted = stored_shape(origin, shape, config)
        if origin.name not in found:
            raise CheckpointError(
                path,
                f"tensor {origin.name} is missing",
                "every tensor of the architecture",
                "download it again",
            )
        if found[origin.name] != wanted:
            raise CheckpointError(
                path, f"tensor {origin.name} has the shape {list(found[origin.name])}", f"{list(wanted)}"
            )
        checkpoint.dtype(name)
    heads = {"lm_head.weight", row.modules["lm_head"].name + ".weight"} if config.tied_head else set()
    warnings = []
    for name in sorted(found.keys() - needed):
        if name in heads:
            table = checkpoint.origins["model.embed_tokens.weight"].name
            if not checkpoint.source.same(name, table):
                warnings.append(f"{name} differs from {table}, which config.json ties it to, and is not used")
        elif not _BUFFERS.search(name):
            raise CheckpointError(path, f"unknown tensor {name}", "only tensors of the architecture")
    return tuple(warnings)
