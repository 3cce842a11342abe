"""KVCache: the keys and values of one conversation, allocated once.

Layout: per layer one key and one value OrtValue, [1, kv_heads, capacity, head_dim], on the provider's
device. Where the graph appends in place ("shared"), the same OrtValue is bound as past and as present. Where
it concatenates ("growing"), there are two such sets that take turns: one holds the past, the other gets the
present. A growing tensor is as long as its content, so it lies at the start of its buffer, without gaps
between the heads, and forgetting ids means moving the heads together. Valid length and capacity are
different numbers: what lies beyond the length is never read.

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
        self._spare: dict[str, Any] = {}  # the other set of growing buffers
        self._held = layout.padding  # positions that `buffers` holds, if they are growing
        self._binding: Any = None
        self._allocate(max_length if preallocate else min(FIRST_CAPACITY, max_length))

    @property
    def length(self) -> int:
        """Number of ids whose keys and values are valid."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        row = self.layout.heads * self.layout.head_dim * np.dtype(self.layout.dtype).itemsize
        sets = 2 if self._growing else 1
        return sets * 2 * self.layout.layers * row * (self.capacity + self.layout.padding)

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

    def snapshot(self, length: int) -> list[NDArray[Any]]:
        """Copies of key and value of each layer for the first `length` ids, [heads, length, head_dim]."""
        if not 0 <= length <= self.length:
            raise ValueError(f"snapshot of {length}: the cache holds {self.length} ids")
        first = self.layout.padding
        return [
            self._valid(value.numpy())[:, first : first + length].copy() for value in self.buffers.values()
        ]

    def restore(self, ids: Sequence[int], values: Sequence[NDArray[Any]]) -> None:
        """Hold `ids` and nothing else, with the `values` of a `snapshot`."""
        self.ids.clear()
        self.reserve(len(ids))
        first = self.layout.padding
        self._held = first + len(ids)
        for value, stored in zip(self.buffers.values(), values, strict=True):
            whole: NDArray[Any] = value.numpy()
            valid = self._valid(whole)
            valid[:, :first] = 0
            valid[:, first : first + len(ids)] = stored
            if whole.ctypes.data != value.data_ptr():  # it was a copy, of a device's memory for example
                value.update_inplace(whole)
        self.ids.extend(ids)

    def _valid(self, whole: NDArray[Any]) -> NDArray[Any]:
        """A view [heads, positions, head_dim] of a buffer: all of it, or the part that a growing one has filled."""
        if not self._growing:
            view: NDArray[Any] = whole[0]
            return view
        heads, size = self.layout.heads, self.layout.head_dim
        filled: NDArray[Any] = whole.reshape(-1)[: heads * self._held * size].reshape(heads, self._held, size)
        return filled

    def bind(self, session: Any, past: Sequence[str], present: Sequence[str], count: int) -> Any:
        """An IOBinding of `session` for `count` new ids: the inputs `past` and the outputs `present`, by name.

        Names go key, value, layer by layer. Once the step has run, `keep` takes over its ids.
        """
        if self._growing:
            self._binding = self._binding or session.io_binding()
            self._bind_growing(past, present, count)
        elif self._binding is None:
            self._binding = session.io_binding()
            for before, after, value in zip(past, present, self.buffers.values(), strict=True):
                self._binding.bind_ortvalue_input(before, value)
                self._binding.bind_ortvalue_output(after, value)
        return self._binding

    def keep(self, ids: Sequence[int]) -> None:
        """`ids` were fed: what the last step bound as present is the past of the next."""
        self.ids.extend(ids)
        if self._growing:
            self.buffers, self._spare = self._spare, self.buffers
            self._held = self.layout.padding + self.length

    @property
    def _growing(self) -> bool:
        return self.layout.style == "growing"

    def _bind_growing(self, past: Sequence[str], present: Sequence[str], count: int) -> None:
        length = self.layout.padding + self.length
        if length < self._held:
            for value in self.buffers.values():
                self._move_together(value, length)
            self._held = length
        dtype = np.dtype(self.layout.dtype).type
        for names, values, positions, bind in (
            (past, self.buffers, length, self._binding.bind_input),
            (present, self._spare, length + count, self._binding.bind_output),
        ):
            shape = [1, self.layout.heads, positions, self.layout.head_dim]
            for name, value in zip(names, values.values(), strict=True):
                bind(name, self.device, 0, dtype, shape, value.data_ptr())

    def _move_together(self, value: Any, length: int) -> None:
        """Cut every head of a growing buffer to its first `length` positions."""
        heads, size = self.layout.heads, self.layout.head_dim
        whole: NDArray[Any] = value.numpy()
        flat = whole.reshape(-1)
        heads_now = flat[: heads * self._held * size].reshape(heads, self._held, size)
        flat[: heads * length * size] = heads_now[:, :length].copy().reshape(-1)
        if whole.ctypes.data != value.data_ptr():  # it was a copy, of a device's memory for example
            value.update_inplace(whole)

    def _allocate(self, capacity: int) -> None:
        """Buffers of `capacity` ids; the valid part of the old ones is carried over."""
        shape = [1, self.layout.heads, capacity + self.layout.padding, self.layout.head_dim]
        dtype = np.dtype(self.layout.dtype).type
        buffers: dict[str, Any] = {}
        spare: dict[str, Any] = {}
        for layer in range(self.layout.layers):
            for part in ("key", "value"):
                name = f"{layer}.{part}"
                try:
                    buffers[name] = self._buffer(shape, dtype, self.buffers.get(name))
                    if self._growing:
                        spare[name] = self._buffer(shape, dtype, None)
                except Exception as error:  # noqa: BLE001 - ONNX Runtime's and NumPy's share no other base
                    nbytes = 2 * self.layout.layers * math.prod(shape) * np.dtype(dtype).itemsize
                    raise PosttrainError(
                        "KV cache",
                        f"{nbytes:,} bytes for {capacity} ids cannot be allocated ({error})",
                        remedy="let it grow on demand (--no-kv-preallocate), or use a shorter context",
                    ) from None
        self.buffers, self._spare, self.capacity, self._binding = buffers, spare, capacity, None

    def _buffer(self, shape: list[int], dtype: type, old: Any) -> Any:
        if self._growing:
            # Zeros: masked positions count zero times, and zero times NaN is NaN.
            fresh: NDArray[Any] = np.zeros(shape, dtype)
            if old is not None:
                valid = self.layout.heads * self._held * self.layout.head_dim
                fresh.reshape(-1)[:valid] = old.numpy().reshape(-1)[:valid]
            return ort.OrtValue.ortvalue_from_numpy(fresh, self.device, 0)
        if old is None or not self.ids:
            return ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self.device, 0)
        grown: NDArray[Any] = np.zeros(shape, dtype)
        grown[:, :, : self.length] = old.numpy()[:, :, : self.length]
        return ort.OrtValue.ortvalue_from_numpy(grown, self.device, 0)
