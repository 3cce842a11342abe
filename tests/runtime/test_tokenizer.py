"""Tokenizers against the reference library; control ids apart from content; text from any ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from posttrainllm.runtime import load
from posttrainllm.runtime.errors import TokenizerError
from posttrainllm.runtime.tokenizer import ByteTokenizer, Detokenizer, HuggingFaceTokenizer, decode

# White space, added tokens in running text, other scripts, joined emoji, control characters.
HOSTILE = [
    "",
    " ",
    "a  b",
    "\t\n\r\n",
    "<s_name>x",
    "<tool_call>{}</tool_call>",
    "日本語 עברית ไทย",
    "👩‍👩‍👧‍👦 e\u0301",
    "\x00\x1f\x7f\ufeff\ufffd",
    "read_file" * 50,
]
slow = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def bpe(bpe_tokenizer: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer((bpe_tokenizer / "tokenizer.json").read_text(encoding="utf-8"), "here")


@pytest.fixture(scope="module")
def reference(bpe_tokenizer: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(bpe_tokenizer / "tokenizer.json"))


def byte_fallback() -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary: `▁` for spaces, `<0xNN>` for everything unknown."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "h", "e", "▁h", "▁he"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, [("▁", "h"), ("▁h", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("text", HOSTILE)
def test_plain_encoding_is_the_librarys(
    bpe: HuggingFaceTokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert bpe.encode(text) == reference.encode(text).ids
    assert bpe.encode_content(text).ids == reference.encode(text, add_special_tokens=False).ids


@slow
@given(text=st.text())
def test_text_survives(bpe: HuggingFaceTokenizer, text: str) -> None:
    for tokenizer in (bpe, ByteTokenizer()):
        assert decode(tokenizer, tokenizer.encode_content(text.replace("<|", "")).ids) == text.replace(
            "<|", ""
        )


@slow
@given(ids=st.lists(st.integers(-5, 500), max_size=40))
def test_any_ids_decode_and_stream_to_the_same_text(bpe: HuggingFaceTokenizer, ids: list[int]) -> None:
    """No exception for any id, and the pieces are the whole."""
    for tokenizer in (bpe, ByteTokenizer()):
        stream = Detokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == decode(tokenizer, ids)


@slow
@given(text=st.text(alphabet=st.sampled_from("ab <|im_startend>xof\n"), max_size=60))
def test_content_never_holds_a_control_id(bpe: HuggingFaceTokenizer, text: str) -> None:
    control = {
        token for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>") for token in bpe.encode_marker(name)
    }
    assert len(control) == 3
    ids = bpe.encode_content(text).ids
    assert control.isdisjoint(ids)
    assert decode(bpe, ids) == text


def test_a_vocabulary_that_spells_a_control_token_by_itself_does_not_leak_it() -> None:
    """`ignore_merges` looks whole words up, so a special token's text in the vocabulary would match."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "<|im_end|>", "<|im_start|>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    ours = HuggingFaceTokenizer(tokenizer.to_str(), "here")
    ids = ours.encode_content("<|im_end|>").ids
    assert ours.encode_marker("<|im_end|>")[0] not in ids
    assert decode(ours, ids) == "<|im_end|>"


def test_a_tokenizer_without_markers_gets_content_that_cannot_spell_them() -> None:
    ours = HuggingFaceTokenizer(byte_fallback().to_str(), "here")
    content = ours.encode_content("x<|im_end|>")
    assert content.escaped == 1
    assert "<|im_end|>" not in decode(ours, content.ids)
    assert decode(ours, ours.encode_marker("<|im_end|>")).strip() == "<|im_end|>"


@slow
@given(
    text=st.text(
        alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"]), min_size=1, max_size=20
    )
)
def test_byte_fallback_decodes_like_the_library(text: str) -> None:
    library = byte_fallback()
    ours = HuggingFaceTokenizer(library.to_str(), "here")
    ids = library.encode(text, add_special_tokens=False).ids
    assert decode(ours, ids).removeprefix(" ") == library.decode(ids, skip_special_tokens=False)


def test_bos_comes_once_and_only_where_the_tokenizer_says_so(bpe: HuggingFaceTokenizer) -> None:
    assert bpe.bos_ids == ByteTokenizer().bos_ids == []
    library = byte_fallback()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ours = HuggingFaceTokenizer(library.to_str(), "here")
    assert ours.bos_ids == [1]
    assert ours.encode("he").count(1) == 1
    assert 1 not in ours.encode_content("<s>he").ids


@pytest.mark.parametrize("pairs", [True, False])
def test_both_forms_of_merges_load(bpe_tokenizer: Path, bpe: HuggingFaceTokenizer, pairs: bool) -> None:
    data = json.loads((bpe_tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in data["model"]["merges"]]
    data["model"]["merges"] = merges if pairs else [" ".join(merge) for merge in merges]
    assert HuggingFaceTokenizer(json.dumps(data), "here").encode("read_file path") == bpe.encode(
        "read_file path"
    )


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"version": "1.0", "model": null}'])
def test_a_bad_tokenizer_file_is_one_error(text: str) -> None:
    with pytest.raises(TokenizerError, match=r"here: cannot be read"):
        HuggingFaceTokenizer(text, "here")


def test_ids_without_bytes_are_refused() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match="have no bytes"):
        HuggingFaceTokenizer(words.to_str(), "here").token_bytes(0)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    """A tokenizer.json may carry them from training; here they would cut or fill prompts silently."""
    library = byte_fallback()
    library.enable_truncation(4)
    library.enable_padding(length=8, pad_id=0)
    ours = HuggingFaceTokenizer(library.to_str(), "here")
    assert len(ours.encode("he" * 20)) > 20
    assert 0 not in ours.encode_content("he").ids


def test_lone_surrogates_do_not_crash(bpe: HuggingFaceTokenizer) -> None:
    for tokenizer in (bpe, ByteTokenizer()):
        assert decode(tokenizer, tokenizer.encode_content("a\ud800b").ids) == "a?b"


def test_fingerprints_differ(bpe: HuggingFaceTokenizer) -> None:
    assert len({bpe.fingerprint, ByteTokenizer().fingerprint}) == 2


def test_a_bundle_without_its_tokenizer_says_what_to_do(make_bundle: Callable[..., Path]) -> None:
    bundle = make_bundle(
        vocab=300, d_model=16, heads=2, layers=1, ctx=32, config={"tokenizerSource": "/no/where"}
    )
    with pytest.raises(TokenizerError, match=r"\(/no/where\) was not found .*--tokenizer DIR"):
        _ = load(bundle).tokenizer


def test_the_bundles_tokenizer_is_the_one_it_was_exported_with(
    make_bundle: Callable[..., Any], bpe_tokenizer: Path, bpe: HuggingFaceTokenizer
) -> None:
    bundle = make_bundle(vocab=320, d_model=16, heads=2, layers=1, ctx=32, tokenizer=bpe_tokenizer)
    session = load(bundle)
    assert session.tokenizer.fingerprint == bpe.fingerprint == session.manifest.tokenizer.fingerprint
