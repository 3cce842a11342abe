"""Session and KVCache: any split of the ids gives the same logits, rewinding forgets, full is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrainllm.runtime import KVCache, Session, load
from posttrainllm.runtime.bundle import KVLayout
from posttrainllm.runtime.errors import BundleError, ContextFullError, PosttrainError
from posttrainllm.runtime.providers import available

RANDOM = np.random.default_rng(7)
IDS = RANDOM.integers(0, 256, 512).tolist()
PROVIDERS = [provider.name for provider in available(ort.get_available_providers())]


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Session:
    return load(tiny_bundle, provider="cpu", threads=2)


def feed(
    session: Session, ids: list[int], lengths: list[int], cache: KVCache | None = None
) -> NDArray[np.float32]:
    """Logits [len(ids), V] when `ids` are fed in chunks of `lengths`."""
    cache = cache or session.new_cache()
    rows = []
    position = 0
    for length in lengths:
        rows.append(session.forward(ids[position : position + length], cache))
        position += length
    assert position == len(ids) == cache.length
    return np.concatenate(rows)


def difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Largest difference in units of the logit range."""
    return float(np.abs(a - b).max() / (a.max() - a.min()))


def test_300_ids_as_one_chunk_as_single_steps_and_as_random_splits(session: Session) -> None:
    whole = feed(session, IDS[:300], [300])
    assert difference(whole, feed(session, IDS[:300], [1] * 300)) < 1e-4
    for _ in range(10):
        cuts = np.sort(RANDOM.choice(np.arange(1, 300), 7, replace=False)).tolist()
        lengths = np.diff([0, *cuts, 300]).tolist()
        assert difference(whole, feed(session, IDS[:300], lengths)) < 1e-4


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_any_split_gives_the_logits_of_one_chunk(session: Session, lengths: list[int]) -> None:
    ids = IDS[: sum(lengths)]
    assert difference(feed(session, ids, [len(ids)]), feed(session, ids, lengths)) < 1e-4


@pytest.mark.parametrize("past", [1, 256, 511, 512])
def test_valid_length_and_capacity_are_separate_numbers(session: Session, past: int) -> None:
    """The last id at length 1, in the middle, at capacity - 1 and at capacity."""
    cache = session.new_cache(max_length=past)
    exact = feed(session, IDS[:past], [past - 1, 1] if past > 1 else [1], cache)
    roomy = feed(session, IDS[:past], [past])
    assert difference(roomy, exact) < 1e-4
    assert cache.length == cache.capacity == past
    with pytest.raises(ContextFullError):
        session.forward([1], cache)
    assert cache.length == past


def test_what_does_not_fit_is_refused_whole(session: Session) -> None:
    cache = session.new_cache(max_length=20)
    session.forward(IDS[:15], cache)
    with pytest.raises(ContextFullError, match=r"21 ids; expected at most 20"):
        session.forward(IDS[15:21], cache)
    assert cache.ids == IDS[:15]


def test_a_cache_cannot_be_longer_than_the_context(session: Session) -> None:
    assert session.new_cache(max_length=10_000).max_length == session.context_length == 512


def test_rewound_and_fed_again_equals_fresh(session: Session) -> None:
    cache = session.new_cache()
    feed(session, IDS[:200], [150, 50], cache)
    cache.rewind(40)
    again = session.forward(IDS[300:330], cache)
    fresh = feed(session, IDS[:40] + IDS[300:330], [40, 30])[40:]
    assert difference(fresh, again) < 1e-4
    assert cache.ids == IDS[:40] + IDS[300:330]


def test_the_same_chunks_give_the_same_bits(session: Session) -> None:
    np.testing.assert_array_equal(feed(session, IDS[:90], [50, 1, 39]), feed(session, IDS[:90], [50, 1, 39]))


@pytest.mark.parametrize("length", [-1, 6])
def test_rewind_outside_the_length_is_an_error(session: Session, length: int) -> None:
    cache = session.new_cache()
    session.forward(IDS[:5], cache)
    with pytest.raises(ValueError, match="the cache holds 5 ids"):
        cache.rewind(length)


def test_a_growing_cache_gives_the_same_logits(session: Session) -> None:
    grown = session.new_cache(preallocate=False)
    assert grown.capacity == 256 < session.context_length
    logits = feed(session, IDS[:400], [200, 100, 1, 99], grown)
    assert grown.capacity == 512
    assert difference(feed(session, IDS[:400], [400]), logits) < 1e-4


@pytest.mark.parametrize("known", [0, 3, 290, 300])
@pytest.mark.parametrize("rows", [1, 2, 9, 60])
def test_the_last_rows_are_those_of_a_forward(session: Session, known: int, rows: int) -> None:
    """Also where they begin in one chunk and end in the next, and where the cache holds more than may be kept."""
    whole = feed(session, IDS[:300], [300])
    cache = session.new_cache()
    if known:
        session.prefill(IDS[:known], cache)
    found = session.prefill_rows(IDS[:300], cache, rows)
    assert found.shape == (rows, 256)
    assert cache.ids == IDS[:300]
    assert difference(whole[-rows:], found) < 1e-4


@pytest.mark.parametrize("rows", [0, 6])
def test_rows_that_cannot_be_are_refused(session: Session, rows: int) -> None:
    cache = session.new_cache()
    with pytest.raises(ValueError, match=rf"prefill of 5 ids cannot give logits for {rows}"):
        session.prefill_rows(IDS[:5], cache, rows)
    assert cache.ids == []


def test_preallocated_buffers_never_move(session: Session) -> None:
    cache = session.new_cache()
    before = dict(cache.buffers)
    feed(session, IDS[:300], [100] * 3, cache)
    assert all(cache.buffers[name] is value for name, value in before.items())
    assert (
        cache.nbytes == 2 * 2 * 4 * 8 * 512 * 4
    )  # key and value, layers, heads, head_dim, capacity, float32


def test_prefill_feeds_only_what_is_new(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    cache = session.new_cache()
    keep = cache.keep

    def recorded(ids: Sequence[int]) -> None:
        fed.append(len(ids))
        keep(ids)

    monkeypatch.setattr(cache, "keep", recorded)
    first = session.prefill(IDS[:300], cache)
    assert sum(fed) == 300
    assert max(fed) <= 256, "a long prompt goes in chunks"
    fed.clear()
    repeated = session.prefill(IDS[:300], cache)
    assert fed == [1], "logits are not stored: one id runs again"
    assert difference(first[None], repeated[None]) < 1e-4
    fed.clear()
    session.prefill([*IDS[:100], 5, 6], cache)
    assert fed == [2]
    assert cache.ids == [*IDS[:100], 5, 6]


def test_prefill_of_too_much_leaves_the_cache_alone(session: Session) -> None:
    cache = session.new_cache(max_length=50)
    session.prefill(IDS[:10], cache)
    with pytest.raises(ContextFullError):
        session.prefill(IDS[100:160], cache)
    assert cache.ids == IDS[:10]


@pytest.mark.parametrize("ids", [[], [-1], [256], [3, 10**12]])
def test_ids_outside_the_vocabulary_are_refused(session: Session, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="id"):
        session.forward(ids, session.new_cache())


def test_a_cache_of_another_session_is_refused(session: Session, tiny_bundle: Path) -> None:
    with pytest.raises(ValueError, match="belongs to"):
        session.forward([1], load(tiny_bundle).new_cache())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_available_provider_computes_what_run_computes(tiny_bundle: Path, provider: str) -> None:
    """IOBinding on each provider against a plain `run` of the CPU's session with a fresh past."""
    session = load(tiny_bundle, provider=provider)
    assert session.provider.name == provider
    kv = session.manifest.kv
    plain = ort.InferenceSession(str(session.bundle.graph_path), providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.array([IDS[:64]], np.int64),
        "attention_mask": np.ones((1, 64), np.int64),
        "position_ids": np.arange(64, dtype=np.int64)[None],
    }
    for layer in range(kv.layers):
        for part in ("key", "value"):
            feeds[f"past_key_values.{layer}.{part}"] = np.zeros((1, kv.heads, 0, kv.head_dim), np.float32)
    expected = plain.run(["logits"], feeds)[0][0]
    assert difference(expected, feed(session, IDS[:64], [30, 1, 33])) < 1e-4


def test_sessions_share_nothing_between_threads(session: Session) -> None:
    """One session, one cache per thread."""
    expected = feed(session, IDS[:120], [40] * 3)
    results: list[NDArray[np.float32]] = []
    threads = [
        threading.Thread(target=lambda: results.append(feed(session, IDS[:120], [40] * 3))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_a_graph_that_is_not_the_manifests_is_refused(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = make_bundle(d_model=16, heads=2, layers=1, ctx=32)
    text = (bundle / "bundle.json").read_text()
    (bundle / "bundle.json").write_text(text.replace('"layers": 1', '"layers": 2', 2))
    with pytest.raises(BundleError, match="are not those of bundle"):
        load(bundle)


def test_a_damaged_graph_is_one_error(make_bundle: Callable[..., Path]) -> None:
    bundle = make_bundle(d_model=16, heads=2, layers=1, ctx=32)
    graph = bundle / "model.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    with pytest.raises(BundleError, match="ONNX Runtime cannot load it"):
        load(bundle)


def test_memory_is_flat_over_many_turns(session: Session) -> None:
    """Nothing grows with the number of steps."""
    resource = pytest.importorskip("resource", reason="no getrusage here")
    cache = session.new_cache()

    def turns(count: int) -> int:
        for _ in range(count):
            cache.rewind(0)
            session.prefill(IDS[:60], cache)
            for token in IDS[60:90]:
                session.forward([token], cache)
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    before = turns(20)
    assert turns(60) - before < 4096, "KiB (bytes on macOS) of growth over 1,800 steps"


def test_buffers_that_cannot_be_allocated_are_one_error() -> None:
    layout = KVLayout(layers=1, heads=1, head_dim=8, dtype="float32")
    with pytest.raises(PosttrainError, match=r"KV cache: 64,000,000,000,000,000 bytes .*--no-kv-preallocate"):
        KVCache(layout, max_length=10**15, device="cpu", preallocate=True, owner=None)
    lazy = KVCache(layout, max_length=10**15, device="cpu", preallocate=False, owner=None)
    assert lazy.nbytes == 256 * 64


def test_logits_are_the_callers(session: Session) -> None:
    """Later steps do not overwrite what was returned."""
    cache = session.new_cache()
    first = session.forward(IDS[:3], cache)
    kept = first.copy()
    for token in IDS[3:40]:
        session.forward([token], cache)
    np.testing.assert_array_equal(first, kept)


def test_a_graph_that_fails_while_it_runs_is_one_error(make_bundle: Callable[..., Path]) -> None:
    """The manifest claims a longer context than the position table has."""
    bundle = make_bundle(d_model=16, heads=2, layers=1, ctx=8)
    text = (bundle / "bundle.json").read_text()
    (bundle / "bundle.json").write_text(text.replace('"context_length": 8', '"context_length": 16'))
    session = load(bundle)
    with pytest.raises(BundleError, match="failed at ids 0 to 15"):
        session.forward(IDS[:16], session.new_cache())


def test_nothing_is_written_or_reported_outside(tiny_bundle: Path, tmp_path: Path) -> None:
    """ONNX Runtime's own telemetry keeps a device id and a queue of events under the home folder."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    code = "import sys; from posttrainllm.runtime import load; s = load(sys.argv[1]); s.forward([1], s.new_cache())"
    subprocess.run([sys.executable, "-c", code, str(tiny_bundle)], env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
