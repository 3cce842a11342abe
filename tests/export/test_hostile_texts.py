"""Ids of hostile texts in exported bundles: those of transformers on the source folder, and of a GGUF's own tokenizer.

White space of every kind, added tokens in running text and with rules about the space around them, control markers,
joined emoji, NUL, long runs, right-to-left scripts, what looks like an id or an escape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from posttrainllm.export.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED
from posttrainllm.export.tokenizer_files import ResolvedTokenizer, read_files, resolve_files
from posttrainllm.runtime.errors import TokenizerError
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer

transformers = pytest.importorskip("transformers")

SPACES = " \t\n\r\u00a0\u2003\u2028\u200b\ufeff"
TEXTS = [
    *("", *SPACES, *(space * 2 for space in SPACES), *(f"a{space}b{space}{space} c" for space in SPACES)),
    *(" a", "a ", "  a  b  ", "\n\n \n\t a\r\n", "def f(x):\n\treturn x  # c\n"),
    *(
        "<s_name>x",
        "x<s_name>",
        "x <s_name> y",
        "<s_name><s_name>",
        "<S_NAME>",
        "<s_name",
        "<extra>x <extra>",
    ),
    *(
        "a<l> b",
        "a <l>b",
        "a  <l> b",
        "a<r> b",
        "a <r>  b\n",
        "a<w>b",
        "a <w> b",
        "<w>.",
        "<n>é",
        "<n>e\u0301",
    ),
    *("<tool_call>{}</tool_call>", "<|im_start|>user\nx<|im_end|>\n", "<|im_end|><|im_end|> <|im_end|>\n"),
    *("<s>a</s>", "<unk>", "<0x41><0x0A>", "[UNK] ##ing", "▁", "a▁b", "Ġ aĠb", "\\n \\u0000 %20 &amp;"),
    *("🦙", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "✅️ 👍🏽", "e\u0301", "\u0301", "é", "Å \u212b", "ﬁ ½²"),
    *("\x00", "a\x00b", "\x00" * 9, "\x1b[0m\x07\x7f\x80\x85", "\ufffd\uffff\U0010ffff\U00020000"),
    *("x" * 3000, " " * 3000, "\n" * 500, "ab" * 2000, "1" * 400, "<s_name>" * 50, "🦙" * 200),
    *("שלום עולם", "مرحبا بالعالم", "abc \u202eשלום\u202c def \u200fא\u200e", "हिन्दी ไทย 한국어 日本語 中文"),
    *("I've can't WE'LL İ ı ß", "12 123 12345 ٣٤٥ 1e-9", "https://a.b/c?d=e&f=%20"),
]
CORPUS = [
    "The quick brown fox, 12 345! I've naïve café über Привет мир 中文 🦙 a b  c\n\n\tdef f(x): return x",
    "e\u0301 שלום read_file <tool> text text text",
] * 4
CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
ADDED = [
    AddedToken("<s_name>", normalized=False),
    AddedToken("<l>", lstrip=True, normalized=False),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("<w>", single_word=True, normalized=False),
    AddedToken("<n>é", normalized=True),
]


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def byte_level(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_added(tokenizer)


def byte_fallback(*, metaspace: bool) -> Tokenizer:
    """Llama's and Gemma's kind: ▁ for spaces, put in by a normaliser or by the pre-tokenizer; `<s>` before a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    fallback = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(fallback)
    controls = ["<unk>", "<s>", "</s>"]
    pieces = [*controls, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=pieces, show_progress=False)
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"] in controls]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return with_added(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(normalizers.NFC()),
    "byte fallback, by a normaliser": lambda: byte_fallback(metaspace=False),
    "byte fallback, by the pre-tokenizer": lambda: byte_fallback(metaspace=True),
}


def folder_of(tokenizer: Tokenizer, folder: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config": config or CONFIG, **more}.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def resolved(folder: Path, vocab_size: int = 1000) -> tuple[HuggingFaceTokenizer, ResolvedTokenizer]:
    """The tokenizer that a bundle of a model in `folder` gets."""
    found = resolve_files(read_files(folder), vocab_size, folder)
    return HuggingFaceTokenizer(found.files["tokenizer.json"].decode(), "here"), found


def assert_ids_are_transformers(ours: HuggingFaceTokenizer, folder: Path) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == reference(text)["input_ids"], text[:60]
        bare = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_rendered(text) == bare, text[:60]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folders_ids_are_transformers(kind: str, tmp_path: Path) -> None:
    folder = folder_of(KINDS[kind](), tmp_path / "model")
    ours, found = resolved(folder)
    assert found.warnings == ()
    assert found.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert_ids_are_transformers(ours, folder)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_of_merges_give_the_same_ids(kind: str, pairs: bool, tmp_path: Path) -> None:
    folder = folder_of(KINDS[kind](), tmp_path / "model")
    expected, _ = resolved(folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]]
    assert len(merges) > 50
    content["model"]["merges"] = merges if pairs else [" ".join(merge) for merge in merges]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    found, _ = resolved(folder)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)


def entry(text: str, **flags: bool) -> dict[str, Any]:
    return (
        {"content": text}
        | dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
        | flags
    )


def declarations(tokenizer: Tokenizer) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Changes of tokenizer_config.json and files beside it that declare more than tokenizer.json has."""
    new, name = str(tokenizer.get_vocab_size()), str(tokenizer.token_to_id("<s_name>"))
    return {
        "additional": ({"additional_special_tokens": ["<extra>"]}, {}),
        "additional with flags": (
            {"additional_special_tokens": [entry("<extra>", rstrip=True) | {"__type": "AddedToken"}]},
            {},
        ),
        "extra": ({"extra_special_tokens": {"image_token": "<extra>"}}, {}),
        "padding": ({"pad_token": "<extra>"}, {}),
        "decoder": ({"added_tokens_decoder": {new: entry("<extra>")}}, {}),
        "decoder with flags": ({"added_tokens_decoder": {new: entry("<extra>", lstrip=True, special=True)}}, {}),
        "decoder, other flags": (
            {"added_tokens_decoder": {name: entry("<s_name>", lstrip=True, rstrip=True, special=True)}},
            {},
        ),
        "added_tokens.json": ({}, {"added_tokens": {"<extra>": int(new)}}),
        "special_tokens_map.json": ({}, {"special_tokens_map": {"additional_special_tokens": ["<extra>"]}}),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["byte level, NFC", "byte fallback, by the pre-tokenizer"])
@pytest.mark.parametrize("case", declarations(byte_level()))
def test_tokens_declared_beside_the_tokenizer_are_added_as_transformers_does(
    case: str, kind: str, tmp_path: Path
) -> None:
    tokenizer = KINDS[kind]()
    change, files = declarations(tokenizer)[case]
    folder = folder_of(tokenizer, tmp_path / "model", CONFIG | change, **files)
    ours, found = resolved(folder)
    assert found.warnings == ()
    plain = HuggingFaceTokenizer(tokenizer.to_str(), "plain")
    assert any(ours.encode(text) != plain.encode(text) for text in TEXTS), "the declaration matters"
    assert_ids_are_transformers(ours, folder)


def test_what_is_declared_for_control_cannot_come_from_content(tmp_path: Path) -> None:
    change = {"additional_special_tokens": ["<extra>"]}
    ours, _ = resolved(folder_of(byte_level(), tmp_path / "model", CONFIG | change))
    (token,) = ours.encode_rendered("<extra>")
    assert token not in ours.encode_content("a <extra> b").ids


def test_ids_that_cannot_be_are_left_out_with_a_warning(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    for number, (at, vocab_size, words) in enumerate(
        [
            (size + 7, 1000, f"at id {size + 7}, where tokenizer.json has room at {size}"),
            (size, size, "the model knows"),
        ]
    ):
        change = {"added_tokens_decoder": {str(at): entry("<extra>")}}
        ours, found = resolved(folder_of(tokenizer, tmp_path / str(number), CONFIG | change), vocab_size)
        assert words in found.warnings[0]
        assert ours.encode("<extra>") == tokenizer.encode("<extra>").ids


@pytest.mark.parametrize(
    ("change", "files"),
    [
        ({"added_tokens_decoder": [1]}, {}),
        ({"added_tokens_decoder": {"x": entry("<extra>")}}, {}),
        ({"added_tokens_decoder": {"7": "text"} | {"8": 3}}, {}),
        ({"added_tokens_decoder": {"7": {"content": "a", "lstrip": "no"}}}, {}),
        ({"additional_special_tokens": [3]}, {}),
        ({}, {"added_tokens": {"<extra>": "7"}}),
        ({}, {"special_tokens_map": {"pad_token": 3}}),
    ],
)
def test_a_damaged_declaration_is_one_line(
    change: dict[str, Any], files: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(byte_level(), tmp_path / "model", CONFIG | change, **files)
    with pytest.raises(TokenizerError) as caught:
        resolved(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_a_ggufs_ids_are_transformers_of_the_folder_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    """And of the files that were rebuilt. GGUF knows no flags of added tokens, so those with flags stay out."""
    gguf = pytest.importorskip("gguf")
    from posttrainllm.export.gguf_file import GGUFFile
    from posttrainllm.export.gguf_tokenizer import rebuild_tokenizer

    source = byte_level()
    content = json.loads(source.to_str())
    keep = ("<|im_start|>", "<|im_end|>", "<s_name>")
    if name == "qwen2":
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        rest = content["pre_tokenizer"] | {"use_regex": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, rest]}
        content["normalizer"] = {"type": "NFC"}
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] in keep]
    source = Tokenizer.from_str(json.dumps(content))
    folder = folder_of(source, tmp_path / "source")
    vocabulary = sorted(source.get_vocab().items(), key=lambda item: item[1])
    kinds = {
        added["content"]: CONTROL if added["special"] else USER_DEFINED for added in content["added_tokens"]
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([kinds.get(text, NORMAL) for text, _ in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(source.to_str())["model"]["merges"]])
    writer.add_eos_token_id(source.token_to_id("<|im_end|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "m.gguf") as file:
        files = rebuild_tokenizer(file).files
    rebuilt = tmp_path / "rebuilt"
    rebuilt.mkdir()
    for written, data in files.items():
        (rebuilt / written).write_bytes(data)
    ours, found = resolved(rebuilt)
    assert found.files["tokenizer.json"] == files["tokenizer.json"]
    assert_ids_are_transformers(ours, rebuilt)
    assert_ids_are_transformers(ours, folder)
