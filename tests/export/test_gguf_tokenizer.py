"""Tokenizers rebuilt from GGUF: ids equal those of the tokenizer that was written, and of llama.cpp.

The references are the `tokenizers` library, sentencepiece and llama.cpp, each on a vocabulary trained here.
"""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from posttrainllm.export.gguf_file import GGUFFile
from posttrainllm.export.gguf_pre_tokenizers import PRE_TOKENIZERS
from posttrainllm.export.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFTokenizer,
    has_tokenizer,
    rebuild_tokenizer,
)
from posttrainllm.runtime.errors import CheckpointError, TokenizerError

gguf = pytest.importorskip("gguf")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 12 345 times 6,789.01 is 2024!",
    "I've said we'll CAN'T it's they'RE 'quoted' O'Neill; WE'LL see.",
    "def read_file(path):\n    return open(path).read()  # comment\n\n\n",
    "naïve café über straße; Привет, мир! 中文字符和日本語のテキスト 한국어 עברית عربي",
    "emoji 🦙👩‍👩‍👧 ✅ … — “quotes” a\u00a0b\u2003c\ttabs\r\nlines",
]
TEXTS = [
    "",
    " ",
    "\n",
    " \n \n\n",
    "Hello world",
    "  two  spaces   three ",
    "tabs\t\t and\r\nlines\n\n\n  end  ",
    "1 12 123 1234 12345 3.14159 1e-9 0x1F ½ ² ٣٤٥",
    "I've can't WE'LL 'Tis it's 's 'RE",
    "camelCase HTTPServer snake_case kebab-case XMLHttpRequest2",
    "Привет мир, naïve café, ÀÉÎ, 中文字符, 日本語, 한국어, עברית",
    "🦙🦙 👩‍👩‍👧 ✅!?...---///\\\\",
    "a\x00b\x1b[0m\u2028\u00a0\ufeffc",
    "<|im_start|>user\nread <tool_call>it</tool_call><|im_end|>\n<|im_start|>",
    "<|im_end|> <|im_end|>\n <|endoftext|>x",
    "x" * 60,
    "for (i = 0; i < 10; ++i) { a[i] *= 2; }  // done\n",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(path: Path, arch: str, **keys: Any) -> Path:
    """A GGUF with metadata only: lists of texts, of numbers, numbers, flags and texts by their type."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rebuilt(path: Path) -> tuple[Tokenizer, GGUFTokenizer]:
    with GGUFFile(path) as file:
        result = rebuild_tokenizer(file)
    return Tokenizer.from_str(result.files["tokenizer.json"].decode()), result


def refused(path: Path) -> str:
    with GGUFFile(path) as file, pytest.raises((TokenizerError, CheckpointError)) as caught:
        rebuild_tokenizer(file)
    return str(caught.value)


def byte_pair_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    content = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = [f"[PAD{i}]" for i in range(max(vocabulary.values()) + 3)]  # as converters fill up
    types = [UNUSED] * len(texts)
    for text, token in vocabulary.items():
        texts[token], types[token] = text, NORMAL
    for added in content["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    return {"model": "gpt2", "tokens": texts, "token_type": types, "merges": merges}


def trained(*steps: Any, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def cut_as(name: str) -> Tokenizer:
    """Trained with the rule of `name`, as the models' own files spell it, in the library's objects."""
    regex = tokenizers.Regex
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    numbers = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
    if name == "gpt-2":
        return trained(plain)
    if name == "smollm":
        return trained(pre_tokenizers.Digits(individual_digits=True), plain)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers[name]
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(regex(pattern), "isolated")
    tokenizer = trained(split, rest, ignore_merges=name == "llama-bpe")
    if name == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_pairs_give_the_ids_of_the_tokenizer_that_was_written(name: str, tmp_path: Path) -> None:
    source = cut_as(name)
    keys = byte_pair_keys(source) | {"pre": name, "add_bos_token": False}
    tokenizer, result = rebuilt(write(tmp_path / "m.gguf", "llama", **keys))
    for text in [*TEXTS, *CORPUS, "e\u0301 decomposed"]:
        expected = source.encode(text).ids
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=False) == source.decode(
            expected, skip_special_tokens=False
        )
    assert result.warnings == ()
    assert tokenizer.get_vocab() == source.get_vocab()


@pytest.fixture(scope="module")
def llama_cpp_ids() -> Callable[[Path, str], list[int]]:
    llama_cpp = pytest.importorskip("llama_cpp")
    known: dict[Path, Any] = {}

    def ids(path: Path, text: str) -> list[int]:
        if path not in known:
            known.clear()
            known[path] = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        found: list[int] = known[path].tokenize(text.encode(), add_bos=True, special=True)
        return found

    return ids


@pytest.mark.peer
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_pairs_give_llama_cpps_ids(
    name: str, tmp_path: Path, llama_cpp_ids: Callable[[Path, str], list[int]]
) -> None:
    """llama.cpp does not normalise, and knows the case of Latin letters only: such texts are left out."""
    rule = PRE_TOKENIZERS[name]
    source = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=rule.ignore_merges)
    keys = byte_pair_keys(source) | {"bos_token_id": 0, "eos_token_id": 2}
    path = write(tmp_path / "m.gguf", "llama", **keys, pre=name)
    tokenizer, _ = rebuilt(path)
    cased = name in ("tekken", "gpt-4o")
    compared = 0
    for text in [*TEXTS, *CORPUS]:
        if unicodedata.normalize("NFC", text) != text or (cased and not text.isascii()):
            continue
        assert tokenizer.encode(text).ids == llama_cpp_ids(path, text), text
        compared += 1
    assert compared >= 14


SENTENCE_KINDS = {"prefix": True, "no prefix": False}


def sentence_pieces(folder: Path, *, prefix: bool) -> tuple[Any, dict[str, Any]]:
    sentencepiece = pytest.importorskip("sentencepiece")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<start_of_turn>", "▁▁", "▁▁▁"],
        control_symbols=["<end_of_turn>"],
        character_coverage=0.99,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
    texts, scores, types = [], [], []
    for token in range(model.get_piece_size()):
        text = model.id_to_piece(token)
        kind = NORMAL
        if model.is_unknown(token):
            kind = UNKNOWN
        elif model.is_control(token):
            kind = CONTROL
        elif model.is_byte(token):
            kind = BYTE
        elif text in ("<start_of_turn>", "▁▁", "▁▁▁"):
            kind, text = USER_DEFINED, text.replace("▁", " ")
        texts.append(text)
        scores.append(float(model.get_score(token)))
        types.append(kind)
    keys = {
        "model": "llama",
        "tokens": texts,
        "scores": scores,
        "token_type": types,
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_space_prefix": prefix,
    }
    return model, keys


SENTENCES = [*TEXTS, *CORPUS, "unseen ŵ ẑ ⵣ 𝔘", "▁ already", "<0x41>", "a<start_of_turn>b <start_of_turn> c"]


@pytest.mark.parametrize("prefix", SENTENCE_KINDS.values(), ids=SENTENCE_KINDS)
def test_sentence_pieces_give_sentencepieces_ids(prefix: bool, tmp_path: Path) -> None:
    """But where llama.cpp, compared below, differs too: it puts a space after each user-defined symbol, and
    looks for these before spaces become ▁."""
    model, keys = sentence_pieces(tmp_path, prefix=prefix)
    tokenizer, _ = rebuilt(write(tmp_path / "m.gguf", "llama", **keys))
    compared = 0
    for text in SENTENCES:
        if "▁" in text or (prefix and ("  " in text or "<start_of_turn>" in text or not text.strip())):
            continue
        expected = [model.bos_id(), *model.encode(text)]
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == model.decode(expected), text
        compared += 1
    assert compared > 14


@pytest.mark.peer
@pytest.mark.parametrize("prefix", SENTENCE_KINDS.values(), ids=SENTENCE_KINDS)
def test_sentence_pieces_give_llama_cpps_ids(
    prefix: bool, tmp_path: Path, llama_cpp_ids: Callable[[Path, str], list[int]]
) -> None:
    _, keys = sentence_pieces(tmp_path, prefix=prefix)
    path = write(tmp_path / "m.gguf", "llama", **keys)
    tokenizer, _ = rebuilt(path)
    for text in [*SENTENCES, "<end_of_turn>\nx", "a<end_of_turn> b"]:
        assert tokenizer.encode(text).ids == llama_cpp_ids(path, text), text


SMALL = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "<s>", "</s>", "<|im_end|>", "<tool>"],
    "token_type": [NORMAL, NORMAL, NORMAL, CONTROL, CONTROL, CONTROL, USER_DEFINED],
    "merges": ["a b"],
    "bos_token_id": 3,
    "eos_token_id": 4,
}


def test_ids_flags_and_template_reach_the_files(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"
    keys = SMALL | {"add_bos_token": True, "add_eos_token": True, "eot_token_id": 6, "padding_token_id": 5}
    tokenizer, result = rebuilt(write(tmp_path / "m.gguf", "llama", **keys, chat_template=template))
    assert tokenizer.encode("abb").ids == [3, 2, 1, 4]
    assert tokenizer.encode("ab", "a").ids == [3, 2, 4, 3, 0, 4]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [2]
    assert result.end_ids == (4, 6, 5)
    config = json.loads(result.files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "<|im_end|>")
    assert config["chat_template"] == template == result.files["chat_template.jinja"].decode()
    added = {entry["content"]: entry["special"] for entry in json.loads(tokenizer.to_str())["added_tokens"]}
    assert added == {"<s>": True, "</s>": True, "<|im_end|>": True, "<tool>": False}


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("llama-bpe", {}, [3, 2]),
        ("llama-bpe", {"add_bos_token": False}, [2]),
        ("gpt-2", {}, [2]),
        ("qwen2", {"add_bos_token": True}, [3, 2]),
    ],
)
def test_the_beginning_is_added_where_the_file_or_its_kind_says(
    name: str, said: dict[str, bool], expected: list[int], tmp_path: Path
) -> None:
    tokenizer, _ = rebuilt(write(tmp_path / "m.gguf", "llama", **(SMALL | said | {"pre": name})))
    assert tokenizer.encode("ab").ids == expected


def test_phi3_drops_space_after_its_markers(tmp_path: Path) -> None:
    _, keys = sentence_pieces(tmp_path, prefix=True)
    for arch, stripped in (("phi3", True), ("llama", False)):
        tokenizer, _ = rebuilt(write(tmp_path / f"{arch}.gguf", arch, **keys))
        spaced, plain = (tokenizer.encode(f"<end_of_turn>{gap}Hello").ids for gap in (" \n", ""))
        assert (spaced == plain) == stripped


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "t5"}, "kind 't5'"),
        ({"pre": "chatglm-bpe"}, "pre-tokenizer 'chatglm-bpe'"),
        ({"merges": ["a c"]}, "merge 0 is 'a c'"),
        ({"merges": ["b a"]}, "merge 0 is 'b a'"),
        ({"merges": ["ab"]}, "merge 0 is 'ab'"),
        ({"tokens": ["a", "b", "ab", "a", "", "", ""]}, "tokens 0 and 3 are both 'a'"),
        ({"token_type": [NORMAL]}, "token_type"),
        ({"tokens": "abc"}, "tokens is 'abc'"),
        ({"eos_token_id": "4"}, "eos_token_id is '4'"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [0.0] * 6 + [float("nan")]}, "scores"),
        ({"chat_template": 3}, "chat_template"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refused(write(tmp_path / "m.gguf", "llama", **(SMALL | changed)))
    assert words in message
    assert "\n" not in message


def test_ids_out_of_range_are_nothing(tmp_path: Path) -> None:
    tokenizer, result = rebuilt(write(tmp_path / "m.gguf", "llama", **(SMALL | {"eos_token_id": 700})))
    assert result.end_ids == (4, 5)  # by their texts
    assert "eos_token" not in json.loads(result.files["tokenizer_config.json"])
    assert tokenizer.encode("ab").ids == [2]


def test_padding_that_is_a_word_stays_a_word(tmp_path: Path) -> None:
    _, result = rebuilt(write(tmp_path / "m.gguf", "llama", **(SMALL | {"padding_token_id": 0})))
    assert "pad_token" not in json.loads(result.files["tokenizer_config.json"])


def test_an_unnamed_rule_is_a_warning(tmp_path: Path) -> None:
    keys = {key: value for key, value in SMALL.items() if key != "pre"}
    _, result = rebuilt(write(tmp_path / "m.gguf", "llama", **keys))
    assert "no pre-tokenizer" in result.warnings[0]


def test_a_model_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    for model, expected in (("no_vocab", False), ("gpt2", True)):
        with GGUFFile(write(tmp_path / f"{model}.gguf", "llama", model=model)) as file:
            assert has_tokenizer(file) is expected
