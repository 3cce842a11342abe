"""The prompt cache: equal bits with and without, the longest beginning wins, damage is passed over, writers do not meet."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.export.exporter import export
from posttrainllm.runtime import Session, generate, load
from posttrainllm.runtime.errors import UsageError
from posttrainllm.runtime.kv_file import KVFileError, read_header, read_values
from posttrainllm.runtime.prompt_cache import PromptCache, list_entries
from posttrainllm.runtime.session import PREFILL_CHUNK

IDS = np.random.default_rng(11).integers(0, 256, 700).tolist()


@pytest.fixture(scope="module")
def sessions(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Session]:
    """One of each kind of cache and of kernel."""
    source, out = make_checkpoint(d_model=64, heads=4, layers=2, ctx=768), tmp_path_factory.mktemp("kinds")
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "fp32"},
        "int8": {"precision": "int8"},
        "int4": {"precision": "int4"},
        "standard": {"flavour": "standard"},
    }
    return {
        name: load(export(source, out / name, **options).bundle, provider="cpu")
        for name, options in kinds.items()
    }


def logits_and_text(session: Session, cache: Any, prompt: list[int]) -> tuple[Any, list[int]]:
    """After the question IDS[600:620] behind `prompt`, which `cache` holds: logits of all its ids, and 12 greedy ones."""
    question = IDS[600:620]
    logits = session.forward(question, cache)
    ids = [step.id for step in generate(session, [*prompt, *question], cache=cache, max_tokens=12)]
    return logits, ids


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "standard"])
@pytest.mark.parametrize("length", [1, 40, PREFILL_CHUNK, PREFILL_CHUNK + 1, 600])
def test_outputs_are_equal_bit_for_bit(
    sessions: dict[str, Session], tmp_path: Path, kind: str, length: int
) -> None:
    session, prompt = sessions[kind], IDS[:length]
    store, plain = PromptCache(tmp_path, session), session.new_cache()
    session.prefill(prompt, plain)
    store.save(prompt, plain)
    expected = logits_and_text(session, plain, prompt)
    again = session.new_cache(preallocate=False)
    found = store.restore(prompt, again)
    assert (found.length, again.ids) == (length, prompt)
    logits, ids = logits_and_text(session, again, prompt)
    np.testing.assert_array_equal(logits, expected[0])
    assert ids == expected[1]


@pytest.mark.parametrize("kind", ["fp32", "int8", "standard"])
def test_a_prompt_that_only_begins_alike_is_taken_in_whole_chunks(
    sessions: dict[str, Session], tmp_path: Path, kind: str
) -> None:
    session = sessions[kind]
    stored, prompt = IDS[:550], [*IDS[:400], 7, *IDS[401:520]]
    store, other = PromptCache(tmp_path, session), session.new_cache()
    session.prefill(stored, other)
    store.save(stored, other)
    cache, plain = session.new_cache(), session.new_cache()
    found = store.restore(prompt, cache)
    assert found.length == PREFILL_CHUNK
    assert found.differs == 400
    np.testing.assert_array_equal(session.prefill(prompt, cache), session.prefill(prompt, plain))
    for one, two in zip(cache.snapshot(len(prompt)), plain.snapshot(len(prompt)), strict=True):
        np.testing.assert_array_equal(one, two)


@given(st.lists(st.integers(0, 600), min_size=1, max_size=5), st.integers(1, 600), st.integers(0, 600))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_longest_usable_beginning_wins(
    sessions: dict[str, Session],
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    length: int,
    change: int,
) -> None:
    session, folder = sessions["fp32"], tmp_path_factory.mktemp("folder")
    store, cache = PromptCache(folder, session), session.new_cache()
    stored = [[*IDS[: max(size, 1)]] for size in lengths]
    for ids in stored:
        session.prefill(ids, cache)
        store.save(ids, cache)
    prompt = IDS[:length]
    if change < length:
        prompt[change] = (prompt[change] + 1) % 256
    fresh = session.new_cache()
    # All stored prompts begin like IDS, and so does this one up to `change`.
    alike = [min(len(ids), length, change) for ids in stored]
    whole = any(ids == prompt for ids in stored)
    assert store.restore(prompt, fresh).length == (length if whole else max(alike) // 256 * 256)
    assert fresh.ids == prompt[: fresh.length]


def damaged(data: bytes, how: str) -> bytes:
    middle = len(data) - 100
    return {
        "torn": data[:middle],
        "empty": b"",
        "a flipped bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "no such format": b"GGUF" + data[4:],
        "a header that lies": data[:8] + (2**62).to_bytes(8, "little") + data[16:],
        "another prompt": data.replace(b'"ids": [', b'"ids": [1', 1).replace(b", ", b",", 1),
        "a header of zeros": data[:16] + b"\0" * 200 + data[216:],
        "longer": data + b"\0",
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        "torn",
        "empty",
        "a flipped bit",
        "another prompt",
        "no such format",
        "a header that lies",
        "a header of zeros",
        "longer",
    ],
)
def test_a_damaged_file_is_told_passed_over_and_written_again(
    sessions: dict[str, Session], tmp_path: Path, how: str
) -> None:
    session, prompt = sessions["fp32"], IDS[:300]
    store, cache = PromptCache(tmp_path, session), session.new_cache()
    session.prefill(prompt, cache)
    file = store.save(prompt, cache)
    shorter = session.new_cache()
    session.prefill(IDS[:PREFILL_CHUNK], shorter)
    store.save(IDS[:PREFILL_CHUNK], shorter)
    file.write_bytes(damaged(file.read_bytes(), how))
    found = store.restore(prompt, session.new_cache())
    assert [name for name, _ in found.damaged] == [file.name]
    assert found.length == PREFILL_CHUNK, "another entry serves"
    assert store.save(prompt, cache) == file
    assert store.restore(prompt, session.new_cache()).length == 300


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_is_restored(
    sessions: dict[str, Session], tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    """Wherever it is, in the header's ids too: what is loaded is what was stored."""
    session, prompt = sessions["fp32"], IDS[:40]
    store, cache = PromptCache(tmp_path_factory.mktemp("bits"), session), session.new_cache()
    session.prefill(prompt, cache)
    file = store.save(prompt, cache)
    data = bytearray(file.read_bytes())
    place = place * 2 % 1 * (len(data) if place < 0.5 else 400)  # half of them near the start
    data[int(place)] ^= 1 << bit
    file.write_bytes(data)
    again = session.new_cache()
    found = store.restore(prompt, again)
    assert found.damaged or found.length == len(prompt), "what does not matter are the zeros between"
    for one, two in zip(again.snapshot(found.length), cache.snapshot(found.length), strict=True):
        np.testing.assert_array_equal(one, two)


def test_other_models_and_settings_do_not_match(sessions: dict[str, Session], tmp_path: Path) -> None:
    prompt = IDS[:300]
    one = sessions["fp32"]
    cache = one.new_cache()
    one.prefill(prompt, cache)
    PromptCache(tmp_path, one).save(prompt, cache)
    for other in (sessions["int8"], sessions["standard"], load(one.bundle.path, provider="cpu", threads=1)):
        found = PromptCache(tmp_path, other).restore(prompt, other.new_cache())
        assert (found.length, found.nearest) == (0, None)
        assert found.foreign is not None


def test_the_folder_is_bounded_and_the_last_used_stays(sessions: dict[str, Session], tmp_path: Path) -> None:
    session, cache = sessions["fp32"], sessions["fp32"].new_cache()
    size = 100 * 2 * 2 * 64 * 4
    store = PromptCache(tmp_path, session, max_nbytes=3 * size + 3 * 2000)
    files = []
    for number in range(3):
        prompt = [number, *IDS[:99]]
        session.prefill(prompt, cache)
        files.append(store.save(prompt, cache))
        os.utime(files[-1], (number, number))
    store.restore([0, *IDS[:99]], session.new_cache())  # the oldest is used again
    session.prefill([9, *IDS[:99]], cache)
    files.append(store.save([9, *IDS[:99]], cache))
    assert {entry.path for entry in list_entries(tmp_path)} == {files[0], files[2], files[3]}


WRITER = """
import sys
from pathlib import Path
from posttrainllm.runtime import load
from posttrainllm.runtime.prompt_cache import PromptCache

session = load(sys.argv[1], provider="cpu", threads=1)
store = PromptCache(Path(sys.argv[2]), session)
ids = list(range(200))
for _ in range(10):
    cache = session.new_cache()
    if store.restore(ids, cache).length != len(ids):
        session.prefill(ids, cache)
    store.save(ids, cache)
"""


def test_eight_writers_of_one_folder(tiny_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tiny_bundle), str(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    assert [writer.communicate()[1] for writer in writers] == [""] * 8
    (entry,) = list_entries(tmp_path)
    assert entry.header is not None
    read_values(entry.path, entry.header)
    assert [file.name for file in tmp_path.iterdir()] == [entry.path.name], "no temporary file is left"


def test_what_cannot_be_a_folder_is_one_error(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--prompt-cache-dir"):
        PromptCache(tmp_path / "file", load(tiny_bundle))


@given(st.binary(max_size=400), st.booleans())
def test_no_file_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, magic: bool
) -> None:
    file = tmp_path_factory.mktemp("any") / "x.kv"
    file.write_bytes((b"PTLLMKV\x01" if magic else b"") + data)
    with pytest.raises(KVFileError):
        read_header(file)


@given(
    st.dictionaries(
        st.sampled_from(["identity", "ids", "model", "kv", "sha256"]),
        st.recursive(
            st.integers() | st.text(max_size=3) | st.none(), lambda inner: st.lists(inner, max_size=4)
        ),
    )
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_header_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("any") / "x.kv"
    text = json.dumps(header).encode()
    head = b"PTLLMKV\x01" + len(text).to_bytes(8, "little")
    file.write_bytes(head + hashlib.sha256(text).digest() + text)
    with pytest.raises(KVFileError):
        read_values(file, read_header(file))
