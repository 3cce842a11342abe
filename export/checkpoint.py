"""Weights as found on disk: what every reader offers, and the choice of a reader: a folder, or magic bytes.

File names and extensions decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .architectures import LinearLayout, ModelConfig
from .gguf_blocks import BlockType
from .huggingface import CONFIG, open_folder
from .tinygpt import TinyGPTCheckpoint


class Checkpoint(Protocol):
    """An open source of weights; tensors are read lazily, one at a time.

    Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`). `format` is for people:
    container, version, stored precision. `tokenizer_files` are those that came with the weights, by name;
    `tokenizer_source` names a folder of them instead. `warnings` are sentences about what was tolerated.
    """

    path: Path
    format: str
    config: ModelConfig
    linear_layout: LinearLayout
    tokenizer_source: str | None
    tokenizer_files: Mapping[str, bytes]
    warnings: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every tensor; linear weights are [out, in]."""

    @property
    def nbytes(self) -> int:
        """Size of the source on disk."""

    @property
    def stored_dtype(self) -> str:
        """Element type of the weights in the file: float32 or float16."""

    @property
    def weight_nbytes(self) -> int:
        """Size of the weights as stored."""

    def dtype(self, name: str) -> str:
        """What holds the values of `name` without loss: float32, float16 or bfloat16."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh array in the logical shape. Raises CheckpointError for NaN, infinity, a changed file."""

    def stored(self, name: str) -> NDArray[np.float32]:
        """The values of `name` [count] in the order in which the source holds them; raises as `tensor`.

        For linear weights `linear_layout` says what that order is: input by output, or output by input.
        """

    def block_type(self, name: str) -> BlockType | None:
        """How tensor `name` is quantised in the source; None where it holds plain floats."""

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The blocks of `name`, [out, bytes of a row], rows in our order; for tensors that have a `block_type`."""

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the source."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


EXPECTED = "a .tinygpt file, or the folder of a Hugging Face model"

# Files that people pass by mistake, by their first bytes.
_FOREIGN = (
    (b"TGLA", "a LoRA adapter"),
    (b"TGMH", "a file of draft heads"),
    (b"TGTL", "a file of tuned-lens probes"),
    (b"TGSA", "a sparse autoencoder"),
    (b"TGLP", "a linear probe"),
    (b"TGFQ", "a text classifier"),
    (b"TGFR", "a text classifier"),
    (b"GGUF", "a GGUF model"),
    (b"PK\x03\x04", "a zip archive (PyTorch or NumPy weights?)"),
    (b"\x80\x02", "a Python pickle (PyTorch weights?)"),
    (b"\x80\x03", "a Python pickle (PyTorch weights?)"),
    (b"\x80\x04", "a Python pickle (PyTorch weights?)"),
    (b"\x80\x05", "a Python pickle (PyTorch weights?)"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x08", "a protocol buffer (an ONNX model?)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"<", "an HTML or XML page (a failed download?)"),
)


def open_checkpoint(path: Path, *, context: int | None = None) -> Checkpoint:
    """The checkpoint in `path`, checked, its weights not yet read. Raises CheckpointError.

    `context` is the longest text that it shall be exported for, instead of its own. The caller closes the
    checkpoint (`with open_checkpoint(path) as checkpoint`).
    """
    if _is_folder(path):
        if not (path / CONFIG).is_file():
            raise CheckpointError(path, f"a folder without {CONFIG}", EXPECTED)
        return open_folder(path, context=context)
    magic = _first_bytes(path)
    if magic.startswith(b"TGPT"):
        try:
            checkpoint = TinyGPTCheckpoint(path)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror or error})") from None
        own = checkpoint.config.context_length
        if context not in (None, own):
            checkpoint.close()
            raise CheckpointError(path, f"a context of {context} ids", f"{own}, its learned positions")
        return checkpoint
    if magic.startswith(b"GGUF"):
        from .gguf_checkpoint import open_gguf

        return open_gguf(path, context=context)
    raise CheckpointError(path, _foreign_name(magic), EXPECTED)


def _is_folder(path: Path) -> bool:
    """Whether `path` is a folder; a name that no system allows is not one."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _first_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(path, "not a regular file", EXPECTED)
        with path.open("rb") as file:
            return file.read(64)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, f"cannot be opened ({reason})", EXPECTED) from None


def _foreign_name(magic: bytes) -> str:
    if not magic:
        return "an empty file"
    for start, name in _FOREIGN:
        if magic.startswith(start):
            return name
    if magic[8:9] == b"{":
        return "a safetensors file (give the folder that it is in)"
    if len(magic) < 16:
        return f"truncated: {len(magic)} bytes"
    return f"an unknown file that starts with {magic[:4]!r}"
