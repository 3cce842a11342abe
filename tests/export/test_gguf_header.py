"""The head of a GGUF file, byte by byte: what is read, and how what lies is refused, in little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.export.gguf_file import GGUFFile
from posttrainllm.export.gguf_keys import Keys
from posttrainllm.runtime.errors import CheckpointError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: Any, inner: int = STRING) -> bytes:
    head = text(key) + struct.pack("<I", kind)
    if kind == ARRAY:
        head += struct.pack("<IQ", inner, len(value))
        return head + b"".join(
            text(v) if inner == STRING else struct.pack("<" + FORMATS[inner], v) for v in value
        )
    return head + (text(value) if kind == STRING else struct.pack("<" + FORMATS[kind], value))


def tensor(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf_bytes(
    pairs: list[bytes],
    tensors: list[bytes],
    body: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    total, entries = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, total, entries) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + body


def opened(folder: Path, content: bytes, name: str = "model.gguf") -> GGUFFile:
    (folder / name).write_bytes(content)
    return GGUFFile(folder / name)


def refusal(folder: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(folder, content).close()
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(tmp_path: Path, version: int) -> None:
    numbers = {U8: 200, I8: -3, U16: 60000, I16: -300, U32: 4_000_000_000, I32: -9, U64: 2**63, I64: -(2**40)}
    pairs = [pair(f"n.{kind}", kind, value) for kind, value in numbers.items()]
    pairs += [pair("f", F32, 0.1), pair("d", F64, 0.1), pair("b", BOOL, True), pair("s", STRING, "ü\n")]
    pairs += [
        pair("texts", ARRAY, ["a", "", "🦙"]),
        pair("ints", ARRAY, [1, -2], I32),
        pair("none", ARRAY, [], F32),
    ]
    with opened(tmp_path, gguf_bytes(pairs, [], version=version)) as file:
        meta = file.metadata
    assert {kind: meta[f"n.{kind}"] for kind in numbers} == numbers
    assert (meta["f"], meta["d"], meta["b"], meta["s"]) == (0.1, 0.1, True, "ü\n")
    assert meta["texts"] == ["a", "", "🦙"]
    assert np.asarray(meta["ints"]).tolist() == [1, -2]
    assert np.asarray(meta["none"]).size == 0


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_tensors_are_read_from_their_places(tmp_path: Path, alignment: int) -> None:
    body = struct.pack("<6f", *range(6)) + bytes(-24 % alignment) + struct.pack("<4e", 1, 2, 3, 4)
    infos = [tensor("a", (3, 2), 0, 0), tensor("b", (4,), 1, 24 + -24 % alignment)]
    content = gguf_bytes([pair("general.alignment", U32, alignment)], infos, body, alignment=alignment)
    with opened(tmp_path, content) as file:
        assert {name: info.shape for name, info in file.tensors.items()} == {"a": (2, 3), "b": (4,)}
        assert file.blocks("a").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.blocks("b").view(np.float16).tolist() == [[1, 2, 3, 4]]
        assert file.nbytes == len(content)


F = struct.pack("<8f", *range(8))
ONE = [tensor("a", (8,), 0, 0)]
HUGE = 2**62
LIES: dict[str, tuple[bytes, str]] = {
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf_bytes([], [], version=1), "version 1"),
    "version 4": (gguf_bytes([], [], version=4), "version 4"),
    "only a magic": (b"GGUF", "version"),
    "many tensors": (gguf_bytes([], [], counts=(HUGE, 0)), "tensors, more than the file holds"),
    "many entries": (gguf_bytes([], [], counts=(0, HUGE)), "metadata entries, more than the file holds"),
    "fewer entries than claimed": (
        gguf_bytes([pair("a", U8, 1)], [], counts=(0, 2)),
        "a metadata key of 0 bytes",
    ),
    "long key": (gguf_bytes([struct.pack("<Q", HUGE)], [], bytes(64)), "metadata key of"),
    "long text": (
        gguf_bytes([text("k") + struct.pack("<IQ", STRING, HUGE)], [], bytes(64)),
        "more than the file",
    ),
    "long array": (
        gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, F64, HUGE)], [], bytes(64)),
        "numbers in k",
    ),
    "long list": (
        gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, STRING, HUGE)], [], bytes(64)),
        "strings in k",
    ),
    "array of arrays": (
        gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], [], bytes(64)),
        "array of",
    ),
    "unknown kind": (gguf_bytes([text("k") + struct.pack("<I", 77)], [], bytes(64)), "unknown type 77"),
    "key twice": (gguf_bytes([pair("k", U8, 1), pair("k", U8, 2)], []), "k occurs twice"),
    "key not UTF-8": (gguf_bytes([text(b"\xff") + struct.pack("<IB", U8, 1)], []), "not UTF-8"),
    "token not UTF-8": (
        gguf_bytes([text("tokenizer.x") + struct.pack("<I", STRING) + text(b"\xff")], []),
        "tokenizer.x is not UTF-8",
    ),
    "tensor twice": (gguf_bytes([], [*ONE, tensor("a", (8,), 0, 32)], F + F), "a occurs twice"),
    "overlap": (gguf_bytes([], [*ONE, tensor("b", (8,), 0, 28)], F + F), "a and b overlap"),
    "outside": (gguf_bytes([], [tensor("a", (8,), 0, 32)], F), "ends at byte"),
    "far outside": (gguf_bytes([], [tensor("a", (8,), 0, HUGE)], F), "ends at byte"),
    "huge shape": (gguf_bytes([], [tensor("a", (HUGE, HUGE), 0, 0)], F), "ends at byte"),
    "truncated body": (gguf_bytes([], ONE, F[:-1]), "ends at byte"),
    "no dimension": (gguf_bytes([], [tensor("a", (), 0, 0)], F), "0 dimensions"),
    "many dimensions": (gguf_bytes([], [text("a") + struct.pack("<I", 2**31)], F), "dimensions"),
    "empty dimension": (gguf_bytes([], [tensor("a", (8, 0), 0, 0)], F), "shape [0, 8]"),
    "half a block": (gguf_bytes([], [tensor("a", (8,), 2, 0)], F), "whole Q4_0 blocks"),
    "unread type": (gguf_bytes([], [tensor("a", (256,), 16, 0)], bytes(99)), "IQ2_XXS"),
    "unknown type": (gguf_bytes([], [tensor("a", (8,), 999, 0)], F), "999"),
    "alignment": (gguf_bytes([pair("general.alignment", U32, 24)], ONE, F), "general.alignment is 24"),
    "alignment of text": (gguf_bytes([pair("general.alignment", STRING, "x")], ONE, F), "general.alignment"),
    "escape codes": (gguf_bytes([], [tensor("\x1b[2J", (8,), 999, 0)], F), "999"),
}


@pytest.mark.parametrize(("content", "words"), LIES.values(), ids=LIES)
def test_lies_are_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path, content)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = gguf_bytes([pair("k", STRING, "v"), pair("l", ARRAY, ["a", "b"])], ONE, F)
    for nbytes in range(4, len(whole)):
        refusal(tmp_path, whole[:nbytes])
    opened(tmp_path, whole).close()


def test_memory_is_bounded_by_the_file(tmp_path: Path) -> None:
    claims = [content for content, _ in LIES.values()]
    tracemalloc.start()
    try:
        for content in claims:
            refusal(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    pairs = [pair("general.alignment", U32, 32), pair("t", ARRAY, ["a", "b"]), pair("n", ARRAY, [1, 2], F64)]
    content = bytearray(gguf_bytes(pairs, [*ONE, tensor("b", (2, 4), 0, 32)], F + F))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "model.gguf"
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable()
        return
    with file:
        for name, info in file.tensors.items():
            assert file.blocks(name).nbytes == info.nbytes <= len(content)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path, gguf_bytes([], ONE, F)) as file:
        os.truncate(file.path, 40)
        with pytest.raises(CheckpointError, match="changed"):
            file.blocks("a")


Parts = Callable[..., list[Path]]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    def make(count: int = 3, **said: int) -> list[Path]:
        paths = []
        for number in range(count):
            entries = {"split.no": number, "split.count": count, "split.tensors.count": count} | said
            pairs = [pair(key, U16, value) for key, value in entries.items()]
            pairs += [pair("general.name", STRING, "whole")] if number == 0 else []
            path = tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf"
            path.write_bytes(gguf_bytes(pairs, [tensor(f"t{number}", (8,), 0, 0)], F))
            paths.append(path)
        return paths

    return make


@pytest.mark.parametrize("given_part", [0, 2])
def test_parts_are_read_together_whichever_is_named(parts: Parts, given_part: int) -> None:
    paths = parts()
    with GGUFFile(paths[given_part]) as file:
        assert sorted(file.tensors) == ["t0", "t1", "t2"]
        assert file.metadata["general.name"] == "whole"
        assert file.nbytes == sum(path.stat().st_size for path in paths)
        assert file.blocks("t2").tobytes() == F


def test_parts_that_do_not_fit_are_refused(parts: Parts, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(path)
        return str(caught.value)

    paths = parts()
    assert "3 parts" in refused(paths[0].rename(tmp_path / "other.gguf"))
    assert "is missing" in refused(paths[1])
    paths = parts()
    paths[1].write_bytes(paths[2].read_bytes())
    assert "says part 2 of 3" in refused(paths[0])
    assert "3 tensors in all parts" in refused(parts(**{"split.tensors.count": 4})[0])
    assert "split.count" in refused(parts(2, **{"split.count": 60000})[0])


def test_keys_name_what_is_wrong(tmp_path: Path) -> None:
    pairs = [
        pair("a.same", ARRAY, [4, 4], I32),
        pair("a.mixed", ARRAY, [4, 5], I32),
        pair("a.text", STRING, "x"),
    ]
    with opened(
        tmp_path, gguf_bytes([*pairs, pair("a.nan", F32, float("nan")), pair("a.no", BOOL, False)], [])
    ) as file:
        keys = Keys(file.path, file.metadata, "a.")
    assert keys.integer("same") == 4
    assert keys.integer("absent", 7) == 7
    assert keys.boolean("no", True) is False
    for read, key in (
        (keys.integer, "mixed"),
        (keys.integer, "text"),
        (keys.size, "absent"),
        (keys.number, "nan"),
        (keys.number, "no"),
        (keys.text, "same"),
        (keys.texts, "text"),
    ):
        with pytest.raises(CheckpointError, match=f"a.{key}"):
            read(key)
