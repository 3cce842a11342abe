"""Write a `.tinygpt` checkpoint: the counterpart of the reader in `tinygpt.py`, for recipes and tests.

    b"TGPT" | u32 version 2 | u32 header bytes | JSON header | i32 step | body      (little-endian)

Tensors come in with their logical shapes: a linear layer's weight is [out, in], so that y = x · Wᵀ + b.
The container declares exactly these shapes but holds the values of a rank-2 linear weight as [in, out];
that transposition happens here, so that no caller has to know of it. Embedding tables keep their order.

Bodies: "fp32" is the training layout (weights, first and second moments of each tensor; the moments are
zero), "fp16" is one contiguous block of halves. Int4 and tool-router files, whose linear weights are
stored as declared, are not written here.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

MAGIC = b"TGPT"
VERSION = 2
EMBEDDINGS = frozenset({"token_embedding.weight", "position_embedding.weight"})


def write_tinygpt(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    dtype: Literal["fp32", "fp16"],
    with_offsets: bool = True,
    header: Mapping[str, Any] | None = None,
    step: int = 0,
) -> None:
    """Write `tensors` (float32, logical shapes) to `path` in the order of the mapping.

    `with_offsets` puts `floatOffset` into the manifest of an fp16 file; fp32 files have none. `header`
    adds or overrides top-level keys such as `finalLoss`. An existing file is replaced only by a complete
    new one. Raises ValueError naming a tensor that holds, or becomes in `dtype`, NaN or infinity.
    """
    head = _header(config, tensors, dtype, with_offsets=with_offsets, extra=header or {})
    with _replacing(path) as file:
        file.write(MAGIC + struct.pack("<II", VERSION, len(head)) + head + struct.pack("<i", step))
        for name, tensor in tensors.items():
            file.write(_stored(name, tensor, dtype))
            if dtype == "fp32":
                file.write(bytes(2 * 4 * tensor.size))  # the two moments


def canonical_names(layers: int) -> list[str]:
    """Names of a dense model's tensors, in the order that the format's own writers use."""
    names = ["token_embedding.weight", "position_embedding.weight", "ln_final.weight", "ln_final.bias"]
    modules = ["ln1", *(f"attn.{letter}_proj" for letter in "qkvo"), "ln2", "mlp.fc_in", "mlp.fc_out"]
    for layer in range(layers):
        names += [f"blocks.{layer}.{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    return names


def _header(
    config: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
    dtype: str,
    *,
    with_offsets: bool,
    extra: Mapping[str, Any],
) -> bytes:
    """The JSON header. `stateByteLength` counts the step's four bytes, as most writers do."""
    manifest: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
        if dtype == "fp16" and with_offsets:
            entry["floatOffset"] = offset  # counts elements, not bytes
        manifest.append(entry)
        offset += tensor.size
    header = {
        "version": VERSION,
        "config": dict(config),
        "weightDtype": dtype,
        "includesOptimizerState": dtype == "fp32",
        "stateByteLength": 4 + offset * (12 if dtype == "fp32" else 2),
        "manifest": manifest,
    }
    return json.dumps(header | dict(extra), ensure_ascii=False).encode()


def _stored(name: str, tensor: NDArray[np.float32], dtype: str) -> bytes:
    """The values of one tensor as the body holds them. Raises ValueError."""
    linear = tensor.ndim == 2 and name.endswith(".weight") and name not in EMBEDDINGS
    values = tensor.T if linear else tensor  # [out, in] -> [in, out]
    with np.errstate(over="ignore"):  # an overflow is reported below, with the tensor's name
        values = values.astype("<f4" if dtype == "fp32" else "<f2")
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: holds a value that is not finite in {dtype}")
    return values.tobytes()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its place when the block ends well, else vanishes."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's files are private to their owner
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
