"""KVCache: the keys and values of one conversation, allocated once, written in place.

Layout: per layer one key and one value OrtValue, [1, kv_heads, capacity, head_dim], on the provider's
device. The same OrtValue is bound as past and as present, so GroupQueryAttention appends in place.
Valid length and capacity are different numbers: what lies beyond the length is never read.

A cache also holds the ids it was fed, so `length == len(ids)` always and a caller can ask which prefix of
a new prompt is already there. One cache belongs to one session, and to one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from .bundle import KVLayout
from .errors import ContextFullError, PosttrainError

FIRST_CAPACITY = 256


class KVCache:
    """Made by `Session.new_cache`; fed by `Session.forward`.

    `max_length` is the most ids it will ever hold; `capacity` is what is allocated now (equal when
    preallocated, doubled on demand when not).
    """

    def __init__(
        self, layout: KVLayout, *, max_length: int, device: str, preallocate: bool, owner: object
    ) -> None:
        self.layout = layout
        self.max_length = max_length
        self.owner = owner
        self.device = device
        self.ids: list[int] = []
        self.capacity = 0
        self.buffers: dict[str, Any] = {}
        self.binding: Any = None
        self._allocate(max_length if preallocate else min(FIRST_CAPACITY, max_length))

    @property
    def length(self) -> int:
        """Number of ids whose keys and values are valid."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        row = self.layout.heads * self.layout.head_dim * np.dtype(self.layout.dtype).itemsize
        return 2 * self.layout.layers * row * self.capacity

    def rewind(self, length: int) -> None:
        """Forget all ids beyond the first `length`. Costs nothing. Raises ValueError outside 0..length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"rewind to {length}: the cache holds {self.length} ids")
        del self.ids[length:]

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many leading ids of `ids` the cache already holds."""
        if list(ids[: self.length]) == self.ids:  # the common case, every decoding step
            return self.length
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, ids, strict=False)))

    def reserve(self, length: int) -> None:
        """Make room for `length` ids in all. Raises ContextFullError beyond `max_length`."""
        if length > self.max_length:
            raise ContextFullError(
                "context", f"{length} ids", f"at most {self.max_length}", "shorten the prompt or start anew"
            )
        if length > self.capacity:
            self._allocate(min(max(length, 2 * self.capacity), self.max_length))

    def _allocate(self, capacity: int) -> None:
        """Buffers of `capacity` ids; the valid part of the old ones is carried over."""
        shape = [1, self.layout.heads, capacity, self.layout.head_dim]
        dtype = np.dtype(self.layout.dtype).type
        buffers: dict[str, Any] = {}
        for layer in range(self.layout.layers):
            for part in ("key", "value"):
                name = f"{layer}.{part}"
                try:
                    buffers[name] = self._buffer(shape, dtype, self.buffers.get(name))
                except Exception as error:  # noqa: BLE001 - ONNX Runtime's and NumPy's share no other base
                    nbytes = 2 * self.layout.layers * math.prod(shape) * np.dtype(dtype).itemsize
                    raise PosttrainError(
                        "KV cache",
                        f"{nbytes:,} bytes for {capacity} ids cannot be allocated ({error})",
                        remedy="let it grow on demand (--no-kv-preallocate), or use a shorter context",
                    ) from None
        self.buffers, self.capacity, self.binding = buffers, capacity, None

    def _buffer(self, shape: list[int], dtype: type, old: Any) -> Any:
        if old is None or not self.ids:
            return ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self.device, 0)
        grown: NDArray[Any] = np.zeros(shape, dtype)
        grown[:, :, : self.length] = old.numpy()[:, :, : self.length]
        return ort.OrtValue.ortvalue_from_numpy(grown, self.device, 0)
