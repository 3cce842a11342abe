"""Which tokenizer a bundle gets: given, declared, bytes or missing; and what ends a turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.tokenizer_files import ResolvedTokenizer
from posttrainllm.export.tokenizer_source import resolve_tokenizer
from posttrainllm.runtime.errors import TokenizerError

MakeFile = Callable[..., Any]


def word_tokenizer(folder: Path, *specials: str, config: object = None) -> Path:
    """A folder with a tokenizer of one id a byte, then `specials`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def resolved(
    make_file: MakeFile, folder: Path, *, source: object = None, vocab: int = 300, given: Path | None = None
) -> ResolvedTokenizer:
    sample = make_file(vocab=vocab)
    sample.config["tokenizerSource"] = source
    with open_checkpoint(sample.save(folder)) as checkpoint:
        return resolve_tokenizer(checkpoint, given)


def test_without_a_source_a_vocabulary_of_256_is_bytes(make_file: MakeFile, tmp_path: Path) -> None:
    found = resolved(make_file, tmp_path, vocab=256)
    assert (found.info.kind, found.info.fingerprint) == ("bytes", "bytes-256")
    assert bytes(found.end_of_turn_ids) == b"<|im_end|>"
    assert found.files == {}
    assert found.warnings == ()


@pytest.mark.parametrize("vocab", [11, 257, 300])
def test_another_vocabulary_is_never_taken_for_bytes(make_file: MakeFile, tmp_path: Path, vocab: int) -> None:
    found = resolved(make_file, tmp_path, vocab=vocab)
    assert found.info.kind == "missing"
    assert "--tokenizer" in found.warnings[0]


@pytest.mark.parametrize(
    "source",
    [
        "/nowhere/at/all",
        "gone",
        "~nobody-of-this-name/x",
        "~/gone-from-home",
        "a\0b",
        "x" * 5000,
        "\ud800",
        "..",
        "a\nb",
    ],
)
def test_a_tokenizer_that_is_not_here_is_a_warning(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)  # what lies around the working directory is not ours
    found = resolved(make_file, tmp_path, source=source)
    assert found.info.kind == "missing"
    assert found.end_of_turn_ids == []
    assert "which is not on this machine" in found.warnings[0]
    assert found.warnings[0].isprintable()


def test_order_of_places(make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by the user, then beside the checkpoint, then the working folder."""
    beside, here, given = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    word_tokenizer(here / "words", "<here>")
    beside.mkdir()
    monkeypatch.chdir(here)
    contents = [resolved(make_file, beside, source="words").files]
    word_tokenizer(beside / "words", "<beside>")
    contents.append(resolved(make_file, beside, source="words").files)
    contents.append(resolved(make_file, beside, source="words", given=word_tokenizer(given, "<given>")).files)
    for content, marker in zip(contents, ["<here>", "<beside>", "<given>"], strict=True):
        assert marker in content["tokenizer.json"].decode()


def test_absolute_and_home_sources(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    words = word_tokenizer(tmp_path / "home" / "words")
    (tmp_path / "model").mkdir()
    for source in (str(words), "~/words"):
        found = resolved(make_file, tmp_path / "model", source=source)
        content = (words / "tokenizer.json").read_bytes()
        assert found.files["tokenizer.json"] == content
        assert found.info.fingerprint == hashlib.sha256(content).hexdigest()
        assert found.info.source == source


def test_a_given_tokenizer_must_be_there(make_file: MakeFile, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        resolved(make_file, tmp_path, given=tmp_path / "gone")
    words = word_tokenizer(tmp_path / "words")
    assert resolved(make_file, tmp_path, given=words / "tokenizer.json").info.kind == "tokenizers"


def test_more_ids_than_the_vocabulary_are_refused(make_file: MakeFile, tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words", "<|im_end|>")
    assert resolved(make_file, tmp_path, vocab=257, given=words).end_of_turn_ids == [256]
    with pytest.raises(TokenizerError, match="ids up to 256"):
        resolved(make_file, tmp_path, vocab=256, given=words)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff",
        b"[1]",
        b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_tokenizer_is_refused(make_file: MakeFile, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        resolved(make_file, tmp_path, given=tmp_path / "words")


@pytest.mark.parametrize(
    ("specials", "config", "text"),
    [
        (["<|im_end|>", "</s>"], {"eos_token": "</s>"}, "<|im_end|>"),
        (["<|x|>", "</s>"], {"eos_token": "</s>"}, "</s>"),
        (["<|x|>", "</s>"], {"eos_token": {"content": "</s>"}}, "</s>"),
    ],
)
def test_one_id_ends_a_turn_where_there_is_one(
    make_file: MakeFile, tmp_path: Path, specials: list[str], config: object, text: str
) -> None:
    words = word_tokenizer(tmp_path / "words", *specials, config=config)
    assert resolved(make_file, tmp_path, given=words).end_of_turn_ids == [256 + specials.index(text)]


@pytest.mark.parametrize(
    "config", [None, {}, [], {"eos_token": None}, {"eos_token": "<unknown>"}, {"eos_token": [1]}]
)
def test_otherwise_the_marker_is_spelled_out(make_file: MakeFile, tmp_path: Path, config: object) -> None:
    words = word_tokenizer(tmp_path / "words", config=config)
    ids = resolved(make_file, tmp_path, given=words).end_of_turn_ids
    assert len(ids) == len("<|im_end|>")
    assert max(ids) < 256


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff\xfe"])
def test_a_damaged_tokenizer_config_is_replaced(make_file: MakeFile, tmp_path: Path, content: bytes) -> None:
    words = word_tokenizer(tmp_path / "words")
    (words / "tokenizer_config.json").write_bytes(content)
    kept = resolved(make_file, tmp_path, given=words).files["tokenizer_config.json"]
    assert json.loads(kept) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    good = {"chat_template": "é", "eos_token": "</s>"}
    (words / "tokenizer_config.json").write_text(json.dumps(good), encoding="utf-8")
    assert json.loads(resolved(make_file, tmp_path, given=words).files["tokenizer_config.json"]) == good


def test_a_folder_that_nobody_may_read_is_not_there(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's home, or a name too long for the system: the weights are converted all the same."""

    is_file = Path.is_file

    def denied(self: Path) -> bool:
        if "tok" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", denied)
        found = resolved(make_file, tmp_path, source="/home/other/tok")
    assert found.info.kind == "missing"
    found = resolved(make_file, tmp_path, source="x" * 5000)
    assert found.info.kind == "missing"
    assert len(found.warnings[0]) < 500
