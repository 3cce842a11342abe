"""Folders that we did not write: each style of KV gives the reference's logits, however the ids are split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from posttrainllm.runtime import Grammar, KVCache, Sampler, Session, generate, load
from posttrainllm.runtime.errors import BundleError, ContextFullError, TokenizerError
from posttrainllm.runtime.foreign import open_model_folder

Logits = Callable[[Sequence[int]], NDArray[Any]]
IDS = np.random.default_rng(3).integers(0, 420, 128).tolist()
EXACT, HALF = 1e-4, 5e-3
# Every way in which an exporter may have written the same decoder, and how near it stays to the reference.
STYLES: dict[str, tuple[dict[str, Any], float]] = {
    "as optimum writes it": ({}, EXACT),
    "int32 ids, mask and positions": ({"ids": "INT32", "mask": "INT32"}, EXACT),
    "no positions": ({"positions": False}, EXACT),
    "no positions and no mask": ({"positions": False, "mask": None}, EXACT),
    "fp16 keys and values": ({"kv": "FLOAT16"}, HALF),
    "fp16 logits": ({"logits": "FLOAT16"}, HALF),
    "all fp16 at the edges": ({"kv": "FLOAT16", "logits": "FLOAT16"}, HALF),
    "logits of the last position only": ({"one_row": True}, EXACT),
    "num_logits_to_keep, a scalar": ({"row_count": 0}, EXACT),
    "num_logits_to_keep, a vector": ({"row_count": 1}, EXACT),
    "a batch of one": ({"batch": 1}, EXACT),
    "an input with a default": ({"default_input": True}, EXACT),
    "sizes only in config.json": ({"free_sizes": True}, EXACT),
}


def split(session: Session, ids: list[int], lengths: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
    rows, start = [], cache.length
    for length in lengths:
        rows.append(session.forward(ids[start : start + length], cache))
        start += length
    return np.concatenate(rows)


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Largest difference in units of the logit range."""
    return float(np.abs(expected - found).max() / np.ptp(expected))


def check_all(session: Session, expected: NDArray[Any], tolerance: float, ids: list[int] = IDS[:60]) -> None:
    """Splits, rewinding, prefill and both ends of the capacity against `expected`, the logits of `ids`."""
    for lengths in ([60], [1] * 60, [1, 30, 29], [59, 1]):
        cache = session.new_cache()
        assert difference(expected, split(session, ids, lengths, cache)) < tolerance, lengths
        assert cache.ids == ids
    for length in (59, 1, 0, 33):
        cache.rewind(length)
        assert difference(expected[length:], session.forward(ids[length:], cache)) < tolerance, length
    cache.rewind(20)
    session.forward([1, 2, 3], cache)  # another branch
    assert difference(expected[-1:], session.prefill(ids, cache)[None]) < tolerance
    assert difference(expected[-1:], session.prefill(ids, cache)[None]) < tolerance, "all of it known"
    full = session.new_cache(max_length=60)
    assert difference(expected, split(session, ids, [59, 1], full)) < tolerance
    with pytest.raises(ContextFullError):
        session.forward([1], full)
    full.rewind(10)
    assert difference(expected[10:], session.forward(ids[10:], full)) < tolerance


@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_logits_of_numpy(
    make_folder: Callable[..., Path], numpy_logits: Logits, style: str
) -> None:
    arguments, tolerance = STYLES[style]
    session = load(make_folder(**arguments), provider="cpu")
    assert session.manifest.kv.style == "growing"
    check_all(session, numpy_logits(IDS[:60]), tolerance)


def test_the_reference_is_transformers_own(numpy_logits: Logits, transformers_logits: Logits) -> None:
    assert difference(numpy_logits(IDS), transformers_logits(IDS)) < 1e-5


@pytest.fixture(scope="module")
def growing(make_folder: Callable[..., Path]) -> Session:
    return load(make_folder(), provider="cpu")


def test_generation_runs_unchanged(growing: Session) -> None:
    """Sampler, stop ids and grammar, against a decode without any cache."""
    prompt = growing.tokenizer.encode("hello tool")
    steps = list(generate(growing, prompt, cache=growing.new_cache(), max_tokens=12))
    ids = list(prompt)
    for step in steps:
        row = growing.forward(ids, growing.new_cache())[-1]
        assert step.id == int(row[: growing.tokenizer.vocab_size].argmax())
        ids.append(step.id)
    first = steps[0].id
    stopped = list(generate(growing, prompt, cache=growing.new_cache(), max_tokens=12, stop_ids=[first, 999]))
    assert [(step.id, step.text, step.finish_reason) for step in stopped] == [(first, "", "stop")]
    seeded = [
        [
            step.id
            for step in generate(growing, prompt, cache=growing.new_cache(), sampler=Sampler(0.9, seed=4))
        ]
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]
    schema = {"type": "object", "properties": {"text": {"enum": ["hello", "world"]}}, "required": ["text"]}
    grammar = Grammar(
        schema | {"additionalProperties": False}, growing.tokenizer, vocab_size=growing.vocab_size
    )
    matcher = grammar.matcher()
    text = "".join(
        step.text for step in generate(growing, prompt, cache=growing.new_cache(), matcher=matcher)
    )
    assert json.loads(text)["text"] in ("hello", "world")


def test_what_the_manifest_says(make_folder: Callable[..., Path]) -> None:
    manifest = open_model_folder(make_folder()).manifest
    assert (manifest.architecture, manifest.precision, manifest.flavour) == ("llama", "fp32", "optimum")
    assert (manifest.context_length, manifest.vocab_size) == (128, 420)
    assert manifest.stop_ids == [2, 0], "the tokenizer's own end first, then generation_config's others"
    assert manifest.end_of_turn_ids == [2]
    assert set(manifest.files) == {"onnx/model.onnx", "tokenizer.json"}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": 5}, {}, {}, [5]),
        ({"eos_token_id": [5, 2, 5]}, {}, {"eos_token": {"content": "<|im_end|>"}}, [2, 5]),
        ({}, {"eos_token_id": [1, 0]}, {}, [1, 0]),
        (None, {"eos_token_id": 0}, {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {}}}, [0]),
        ({"eos_token_id": None}, {"eos_token_id": None}, {}, []),
        ({"eos_token_id": [True, "x", -4, 10**9, 3]}, {}, {}, [3]),
    ],
)
def test_end_of_turn_ids(
    make_folder: Callable[..., Path], generation: Any, config: Any, tokenizer: Any, expected: list[int]
) -> None:
    folder = make_folder()
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert open_model_folder(folder).manifest.stop_ids == expected


def test_which_graph_is_meant_must_be_clear(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(["onnx/model.onnx", "onnx/model_q4.onnx"])
    with pytest.raises(BundleError, match=r"2 graphs \(onnx/model.onnx, onnx/model_q4.onnx\); expected one"):
        load(folder)
    session = load(folder / "onnx" / "model_q4.onnx", provider="cpu")
    assert session.bundle.graph == "onnx/model_q4.onnx"
    assert session.tokenizer.encode("hello")
    beside = make_folder(["model.onnx"])
    assert load(beside, provider="cpu").bundle.graph == "model.onnx"


def test_several_graphs_of_an_encoder_decoder_are_called_that(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(["onnx/decoder_model.onnx", "onnx/encoder_model.onnx"])
    (folder / "config.json").write_text('{"is_encoder_decoder": true}')
    with pytest.raises(BundleError, match="an encoder-decoder; expected a decoder of text alone"):
        load(folder)


@pytest.mark.parametrize("looked_at", [False, True])
def test_group_query_attention_without_genai_config(
    tiny_bundle: Path, tmp_path: Path, looked_at: bool
) -> None:
    """The graph alone decides: appended in place, unless something asks how long the past is."""
    import onnx

    folder = tmp_path / "model"
    shutil.copytree(tiny_bundle, folder / "onnx")
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_positions": 512}')
    for name in ("bundle.json", "genai_config.json"):
        (folder / "onnx" / name).unlink()
    if looked_at:
        model = onnx.load(folder / "onnx" / "model.onnx", load_external_data=False)
        model.graph.node.append(onnx.helper.make_node("Shape", ["past_key_values.0.key"], ["past_shape"]))
        model.graph.output.append(onnx.helper.make_tensor_value_info("past_shape", 7, [4]))
        onnx.save(model, folder / "onnx" / "model.onnx")
    session, ours = load(folder, provider="cpu"), load(tiny_bundle, provider="cpu")
    assert session.manifest.kv.style == ("growing" if looked_at else "shared")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; expected one beside the configuration"):
        _ = session.tokenizer
    ids = [token % 256 for token in IDS[:60]]
    check_all(session, ours.forward(ids, ours.new_cache()), EXACT, ids)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a merged decoder": ({"extra_input": "use_cache_branch"}, "a merged decoder with a switch"),
    "an encoder-decoder": ({"extra_input": "encoder_attention_mask"}, "the decoder of an encoder-decoder"),
    "an input nobody knows": ({"extra_input": "beam_width"}, "it wants beam_width"),
    "a hole in the layers": ({"layers": [0, 2]}, r"past keys of layers \[0, 2\]"),
    "a mask that is no integer": ({"mask": "FLOAT"}, r"attention_mask \[batch, total\] float32"),
    "one id a run": ({"new": 1}, r"input_ids \[batch, 1\] int64 of a fixed length"),
    "a batch of four": ({"batch": 4}, r"input_ids \[4, new\] int64; expected \[1, n\]"),
    "a cache of a fixed length": ({"past": 64}, r"past_key_values.0.key \[batch, 2, 64, 16\] float32"),
    "keys in double": ({"kv": "DOUBLE"}, r"past_key_values.0.key \[.*\] float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_driven_is_one_line_with_the_reason(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    style, message = REFUSED[case]
    monkeypatch.setattr(ort, "InferenceSession", None)  # known before anything is loaded
    import onnx

    monkeypatch.setattr(onnx.checker, "check_model", lambda model: None)
    with pytest.raises(BundleError, match=message) as error:
        load(make_folder(**style))
    assert "\n" not in str(error.value)


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    import onnx

    model = onnx.load(folder / "onnx" / "model.onnx")
    change(model)
    onnx.save(model, folder / "onnx" / "model.onnx")


def test_a_graph_without_a_cache_is_refused(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()

    def without_past(model: Any) -> None:
        kept = [port for port in model.graph.input if "past" not in port.name]
        del model.graph.input[:]
        model.graph.input.extend(kept)

    edit(folder, without_past)
    with pytest.raises(BundleError, match="expected past keys and values as inputs"):
        load(folder)


def test_a_missing_present_is_refused(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    edit(folder, lambda model: model.graph.output.pop())
    with pytest.raises(BundleError, match=r"no present.1.value"):
        load(folder)


def test_missing_weights_are_named(make_folder: Callable[..., Path]) -> None:
    import onnx

    folder = make_folder()
    model = onnx.load(folder / "onnx" / "model.onnx")
    onnx.save(model, folder / "onnx" / "model.onnx", save_as_external_data=True, location="weights.bin")
    assert open_model_folder(folder).manifest.files["onnx/weights.bin"].nbytes > 10_000
    (folder / "onnx" / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights\.bin, which holds its weights, is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            lambda data: data[:-1],
            r"truncated: \d+ bytes; expected at least \d+ bytes of weights; copy it again",
        ),
        (lambda data: b"", "truncated: 0 bytes"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    ],
)
def test_weights_that_are_not_whole_are_named(
    make_folder: Callable[..., Path], cut: Callable[[bytes], bytes], message: str
) -> None:
    import onnx

    folder = make_folder()
    model = onnx.load(folder / "onnx" / "model.onnx")
    onnx.save(model, folder / "onnx" / "model.onnx", save_as_external_data=True, location="weights.bin")
    data = folder / "onnx" / "weights.bin"
    open_model_folder(folder)
    data.write_bytes(cut(data.read_bytes()))
    with pytest.raises(BundleError, match=rf"weights\.bin: {message}"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "found list; expected an object"),
        ("config.json", b'{"is_encoder_decoder": true}', "an encoder-decoder"),
        ("config.json", b'{"vocab_size": 420}', "states the context length"),
        ("onnx/model.onnx", b"", "not a whole ONNX model"),
        ("onnx/model.onnx", b"\x08\x09\x3a\xff\x01", "not a whole ONNX model"),
        ("onnx/model.onnx", b"version https://git-lfs.github.com/spec/v1\n", "not a whole ONNX model"),
        ("genai_config.json", b"{}", "without model"),
        ("genai_config.json", b'{"model": {"decoder": {"filename": "../x"}}}', "expected a file name inside"),
        (
            "genai_config.json",
            b'{"model": {"decoder": {"filename": "gone.onnx"}}}',
            "states the context length",
        ),
    ],
)
def test_damaged_folders_are_one_line(
    make_folder: Callable[..., Path], file: str, content: bytes, message: str
) -> None:
    folder = make_folder()
    (folder / file).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "neither"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(BundleError, match=r"no readable bundle\.json"):
        load(tmp_path)


def test_our_manifest_wins_over_genai_config(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = open_model_folder(tiny_bundle)
    assert bundle.io is None
    assert bundle.manifest.source.format.startswith("tinygpt")
    ours = tmp_path / "copy"
    shutil.copytree(tiny_bundle, ours)
    (ours / "bundle.json").unlink()
    alone = load(ours, provider="cpu")  # what onnxruntime-genai would make of it
    assert alone.manifest.kv.style == "shared"
    ids = [72, 101, 108]
    expected = load(tiny_bundle, provider="cpu")
    np.testing.assert_array_equal(
        alone.forward(ids, alone.new_cache()), expected.forward(ids, expected.new_cache())
    )


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [("fp32", "fp32", EXACT), ("one_row", "fp32", EXACT), ("fp16", "fp16", 2e-2), ("int4", "int4", None)],
)
def test_what_onnxruntime_genai_builds(
    genai_folders: dict[str, Path],
    transformers_logits: Logits,
    name: str,
    precision: str,
    tolerance: float | None,
) -> None:
    """Against transformers; int4, which is another model, against one plain run of the same graph."""
    session = load(genai_folders[name], provider="cpu")
    kv = session.manifest.kv
    assert (kv.style, kv.heads, kv.head_dim) == ("shared", 2, 16)
    assert session.manifest.precision == precision
    assert session.manifest.stop_ids == [2, 0]
    assert session.io.one_row == (name == "one_row")
    if tolerance is not None:
        check_all(session, transformers_logits(IDS[:60]), tolerance)
        return
    plain = ort.InferenceSession(session.bundle.graph_path, providers=["CPUExecutionProvider"])
    feeds = {entry: np.zeros((1, 2, 0, 16), np.float32) for entry in session.io.past}
    feeds |= {"input_ids": np.array([IDS[:60]]), "attention_mask": np.ones((1, 60), np.int64)}
    # Activations are rounded to int8: what moves a row by a rounding error may move a logit by more.
    check_all(session, plain.run(["logits"], feeds)[0][0], 2e-2)


@pytest.mark.peer
def test_the_greedy_ids_are_those_of_onnxruntime_genai(genai_folders: dict[str, Path]) -> None:
    og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    folder = genai_folders["fp32"]
    session = load(folder, provider="cpu")
    params = og.GeneratorParams(model := og.Model(str(folder)))
    params.set_search_options(max_length=60, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([IDS[:10]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    expected = generator.get_sequence(0).tolist()
    cache = session.new_cache()
    ids = IDS[:10]
    while len(ids) < len(expected):
        ids = [*ids, int(session.prefill(ids, cache).argmax())]
    assert ids == expected


@pytest.mark.peer
def test_a_llama_of_onnxruntime_genai_in_ai_onnx_operators(
    genai_folders: dict[str, Path], transformers_logits: Logits, tmp_path: Path
) -> None:
    """The exporter's rewriting on a graph that we did not build: rotary positions, groups, RMS norms, SiLU."""
    import onnx_ir as ir

    from posttrainllm.export.standard import to_standard

    shutil.copytree(genai_folders["fp32"], folder := tmp_path / "model")
    model = ir.load(folder / "model.onnx")
    for port in (*model.graph.inputs, *model.graph.outputs):
        if port.shape is not None and len(port.shape) == 4:  # the builder leaves the head size open
            port.shape = ir.Shape([*port.shape[:3], 16])
    to_standard(model)
    ir.save(model, folder / "standard.onnx")
    session = load(folder / "standard.onnx", provider="cpu")
    assert session.manifest.kv.style == "growing"
    assert session.manifest.config["opsets"] == {"ai.onnx": 18}
    check_all(session, transformers_logits(IDS[:60]), EXACT)


@pytest.mark.peer
def test_windows_get_buffers_for_every_id(genai_folders: dict[str, Path]) -> None:
    """genai's cache for a sliding window forgets when it is full: ours never is, so it can be rewound."""
    torch = pytest.importorskip("torch", reason="transformers' logits need torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        genai_folders["gemma"], attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor([IDS[:60]])).logits[0].numpy()
    session = load(genai_folders["windows"], provider="cpu")
    assert session.manifest.kv.style == "shared"
    assert b"sliding_window_cache" in session.bundle.graph_path.read_bytes()
    # FastGelu's tanh is approximate, which these weights amplify; a window of one more or less moves them by 0.17.
    check_all(session, expected, 2e-3)
