"""Keys and values that grow: two sets of buffers, whatever is fed, forgotten and fed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrainllm.runtime import KVCache, Session, load
from posttrainllm.runtime.errors import BundleError

Logits = Callable[[Sequence[int]], NDArray[Any]]
IDS = np.random.default_rng(3).integers(0, 420, 128).tolist()
EXACT = 1e-4


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Largest difference in units of the logit range."""
    return float(np.abs(expected - found).max() / np.ptp(expected))


@pytest.fixture(scope="module")
def growing(make_folder: Callable[..., Path]) -> Session:
    return load(make_folder(), provider="cpu")


@settings(max_examples=40, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 128), st.lists(st.integers(1, 25), max_size=4)), min_size=1, max_size=5
    ),
    preallocate=st.booleans(),
)
def test_any_walk_of_feeding_and_rewinding_ends_where_a_fresh_cache_does(
    growing: Session, moves: list[tuple[int, list[int]]], preallocate: bool
) -> None:
    """Rewind to any length, go on with other ids: what counts is only which ids the cache holds."""
    cache = growing.new_cache(preallocate=preallocate)
    rng = np.random.default_rng(len(moves))
    for target, lengths in moves:
        cache.rewind(min(target, cache.length))
        for length in lengths:
            if cache.length + length < cache.max_length:
                growing.forward(rng.integers(0, 420, length).tolist(), cache)
    last = growing.forward([7], cache)
    fresh = growing.new_cache()
    assert difference(growing.forward(list(cache.ids), fresh)[-1:], last) < EXACT


def test_a_growing_cache_doubles_on_demand(make_folder: Callable[..., Path], numpy_logits: Logits) -> None:
    session = load(make_folder(), provider="cpu")
    cache = session.new_cache()
    assert cache.capacity == 128
    assert (
        cache.nbytes == 2 * 2 * 2 * 2 * 16 * 128 * 4
    )  # sets, key and value, layers, heads, size, capacity, fp32
    small = KVCache(session.manifest.kv, max_length=128, device="cpu", preallocate=True, owner=session)
    small.capacity = 0
    small._allocate(4)
    expected = numpy_logits(IDS[:60])
    small_rows = [session.forward(IDS[:3], small)]
    small.rewind(2)
    small_rows = [
        small_rows[0][:2],
        session.forward(IDS[2:60], small),
    ]  # grows while it holds one id too many
    assert small.capacity == 60
    assert difference(expected, np.concatenate(small_rows)) < EXACT


def test_two_sets_of_buffers_take_turns_and_never_move(growing: Session) -> None:
    cache = growing.new_cache()
    addresses = [value.data_ptr() for value in cache.buffers.values()]
    growing.forward(IDS[:5], cache)
    others = [value.data_ptr() for value in cache.buffers.values()]
    assert not set(addresses) & set(others)
    growing.forward(IDS[5:6], cache)
    assert [value.data_ptr() for value in cache.buffers.values()] == addresses


def test_memory_is_flat_over_many_turns(growing: Session) -> None:
    resource = pytest.importorskip("resource", reason="no getrusage here")
    cache = growing.new_cache()

    def turns(count: int) -> int:
        for _ in range(count):
            cache.rewind(20 if cache.length else 0)
            for token in IDS[cache.length : 100]:
                growing.forward([token], cache)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    before = turns(10)
    assert turns(30) - before < 4096, "KiB (bytes on macOS) of growth over 2,400 steps"


def test_a_step_that_fails_leaves_the_cache_as_it_was(growing: Session, numpy_logits: Logits) -> None:
    cache = growing.new_cache()
    growing.forward(IDS[:20], cache)

    class Failing:
        io_binding = growing._ort.io_binding

        def run_with_iobinding(self, binding: object) -> None:
            raise RuntimeError("out of memory")

    working = growing._ort
    growing._ort = Failing()
    try:
        with pytest.raises(BundleError, match="failed at ids 20 to 29"):
            growing.forward(IDS[20:30], cache)
    finally:
        growing._ort = working
    assert cache.ids == IDS[:20]
    assert difference(numpy_logits(IDS[:30])[20:], growing.forward(IDS[20:30], cache)) < EXACT
