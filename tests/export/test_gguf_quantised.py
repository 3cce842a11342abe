"""Quantised blocks in our row order, refusals of a model as a whole, and memory: no torch needed."""

from __future__ import annotations

import contextlib
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrainllm.export.gguf_blocks import TYPES, dequantise
from posttrainllm.export.gguf_model import GGUFModel
from posttrainllm.export.gguf_tokenizer import has_tokenizer, rebuild_tokenizer
from posttrainllm.runtime.errors import CheckpointError, TokenizerError

gguf = pytest.importorskip("gguf")

Weights = dict[str, NDArray[Any]]
HEADS, KV_HEADS, HIDDEN, MIDDLE, VOCAB = 4, 2, 256, 512, 50


def weights(layers: int = 1, vocab: int = VOCAB) -> Weights:
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(layers):
        block = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (MIDDLE, HIDDEN),
            "ffn_up": (MIDDLE, HIDDEN),
            "ffn_down": (HIDDEN, MIDDLE),
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


KEYS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": MIDDLE,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def save(
    folder: Path,
    tensors: Weights,
    *,
    arch: str = "llama",
    quantised: Any = None,
    keys: dict[str, Any] | None = None,
) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (KEYS | (keys or {})).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            int: writer.add_uint32,
        }
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif value is not None:
            add[type(value)](f"{arch}.{key}", value)
    for name, value in tensors.items():
        if quantised is not None and value.ndim == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_moving_rows_of_blocks_is_moving_rows_of_values(name: str, tmp_path: Path) -> None:
    tensors = weights()
    kind = gguf.GGMLQuantizationType[name]
    with GGUFModel(save(tmp_path, tensors, quantised=kind)) as model:
        for theirs, ours, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
            stored = gguf.quants.dequantize(
                gguf.quants.quantize(tensors[f"blk.0.{theirs}.weight"], kind), kind
            )
            half_first = stored.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(stored.shape)
            full = f"model.layers.0.self_attn.{ours}.weight"
            np.testing.assert_array_equal(model.tensor(full), half_first)
            found = model.quantised(full)
            if name == "BF16":
                assert found is None
                continue
            assert found is not None
            assert (found.type.name, found.shape, found.transposed) == (name, stored.shape, False)
            np.testing.assert_array_equal(dequantise(found.blocks, found.type), half_first)
        assert model.quantised("model.norm.weight") is None
        assert model.stored_type("model.embed_tokens.weight").name == name


def test_gpt2_says_that_its_blocks_are_turned(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    up = rng.standard_normal((96, 32)).astype(np.float32)
    tensors = {
        "token_embd.weight": rng.standard_normal((9, 32)).astype(np.float32),
        "position_embd.weight": rng.standard_normal((128, 32)).astype(np.float32),
        "blk.0.ffn_up.weight": up,
        "blk.0.ffn_up.bias": up[:, 0].copy(),
    }
    keys = {"embedding_length": 32, "feed_forward_length": 96, "attention.layer_norm_epsilon": 1e-5}
    kind = gguf.GGMLQuantizationType.Q8_0
    with GGUFModel(save(tmp_path, tensors, arch="gpt2", quantised=kind, keys=keys)) as model:
        name = "transformer.h.0.mlp.c_fc.weight"
        found = model.quantised(name)
        assert found is not None
        assert found.transposed
        assert found.shape == (96, 32)
        assert model.shapes[name] == (32, 96)
        np.testing.assert_array_equal(dequantise(found.blocks, found.type).T, model.tensor(name))
        np.testing.assert_array_equal(model.tensor("transformer.h.0.mlp.c_fc.bias"), up[:, 0])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"attention.head_count": 7}, "a multiple of the heads"),
        ({"attention.head_count_kv": [2, 1]}, "the same for every layer"),
        ({"attention.value_length": 8}, "attention.value_length is 8"),
        ({"attention.causal": False}, "both directions"),
        ({"rope.dimension_count": 32}, "rope.dimension_count is 32"),
        ({"rope.scaling.type": "magic"}, "rope.scaling.type is 'magic'"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.factor"),
        ({"rope.scaling.type": "longrope"}, "rope_factors_long.weight is missing"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"block_count": "one"}, "block_count is 'one'"),
        (
            {"context_length": 2**31, "block_count": 2**31},
            "",
        ),  # more layers than tensors: nothing is made of them
    ],
)
def test_metadata_that_does_not_add_up_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = save(tmp_path, weights(), keys=keys)
    if not words:
        with GGUFModel(path) as model:
            assert len(model.shapes) == 11
        return
    with pytest.raises(CheckpointError) as caught:
        GGUFModel(path)
    assert words in str(caught.value)


FACTORS = np.array([1, 2] * 16, np.float32)


@pytest.mark.parametrize(
    ("keys", "extra", "expected"),
    [
        ({}, {}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, None),
        ({"rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25},
            {"rope_factors_long.weight": FACTORS, "rope_factors_short.weight": FACTORS},
            {
                "rope_type": "longrope",
                "short_factor": FACTORS.tolist(),
                "long_factor": FACTORS.tolist(),
                "original_max_position_embeddings": 64,
                "attention_factor": 1.25,
            },
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_attn_factor": 0.5,
            },
            {},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.5,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rotary_scaling_as_the_config_has_it(
    keys: dict[str, Any], extra: Weights, expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    with GGUFModel(save(tmp_path, weights() | extra, keys=keys)) as model:
        assert model.config["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("keys", "extra", "words"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_freqs.weight": FACTORS}, "one of them"),
        ({}, {"rope_freqs.weight": -FACTORS}, "not positive"),
        ({}, {"rope_freqs.weight": FACTORS[1:]}, "rope_freqs.weight has the shape"),
        ({"rope.scaling.original_context_length": 1}, {"rope_factors_long.weight": FACTORS}, "at least 2"),
        (
            {"rope.scaling.original_context_length": 9},
            {"rope_factors_long.weight": FACTORS},
            "rope_factors_short.weight is missing",
        ),
    ],
)
def test_rotary_factors_that_do_not_add_up(
    keys: dict[str, Any], extra: Weights, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        GGUFModel(save(tmp_path, weights() | extra, keys=keys))


def test_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture 'mamba'"):
        GGUFModel(save(tmp_path, weights(), arch="mamba"))


def test_tensors_that_are_not_the_architectures_are_refused(tmp_path: Path) -> None:
    cases = {
        "blk.0.ssm_in.weight": np.ones((4, 4), np.float32),
        "blk.1.attn_q.weight": np.ones((HIDDEN, HIDDEN), np.float32),  # beyond the layers
        "blk.0.attn_q.bias": np.ones((1, 4, 4), np.float32),
    }
    for name, value in cases.items():
        with pytest.raises(CheckpointError, match=re.escape(name)):
            GGUFModel(save(tmp_path, weights() | {name: value}))
    tensors = weights()
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        GGUFModel(save(tmp_path, tensors))


def test_a_nan_is_refused_when_its_tensor_is_read(tmp_path: Path) -> None:
    tensors = weights()
    tensors["blk.0.ffn_up.weight"][3, 5] = np.nan
    with GGUFModel(save(tmp_path, tensors)) as model:
        model.tensor("model.layers.0.mlp.down_proj.weight")
        with pytest.raises(CheckpointError, match=r"NaN or infinity in tensor blk\.0\.ffn_up"):
            model.tensor("model.layers.0.mlp.up_proj.weight")


def test_reading_a_tensor_takes_little_more_than_its_values(tmp_path: Path) -> None:
    tensors = weights(layers=2, vocab=16384)
    path = save(tmp_path, tensors, quantised=gguf.GGMLQuantizationType.Q8_0, keys={"block_count": 2})
    largest = tensors["token_embd.weight"].nbytes
    tracemalloc.start()
    try:
        with GGUFModel(path) as model:
            for name in model.shapes:
                model.tensor(name)
        # The values, their blocks (9/32 of that), one chunk, and the mask of what is finite.
        assert tracemalloc.get_traced_memory()[1] < 1.75 * largest + (8 << 20)
    finally:
        tracemalloc.stop()


def test_every_type_has_a_table_row() -> None:
    assert {kind.name for kind in TYPES.values()} >= {"F32", "F16", "BF16", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole small model with a tokenizer: 3 kB of head, small weights."""
    vocabulary = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": ["a", "b", "ab", "<s>", "</s>"],
        "ggml.token_type": [1, 1, 1, 3, 3],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 3,
        "ggml.eos_token_id": 4,
        "ggml.add_bos_token": True,
        "chat_template": "{{ messages }}",
    }
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    adds = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
    keys = {f"llama.{key}": value for key, value in KEYS.items()}
    keys |= {"llama.embedding_length": 8, "llama.feed_forward_length": 8, "llama.rope.scaling.type": "linear"}
    for key, value in (keys | {f"tokenizer.{key}": value for key, value in vocabulary.items()}).items():
        adds.get(type(value), writer.add_array)(key, value)
    for name, tensor in weights().items():
        writer.add_tensor(name, np.resize(tensor, tuple(min(size, 8) for size in tensor.shape)))
    writer.add_tensor("rope_freqs.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_all(path: Path) -> int:
    """Bytes of everything in a model: config, values, tokenizer."""
    with GGUFModel(path) as model:
        total = sum(model.tensor(name).nbytes for name in model.shapes)
        json.dumps(dict(model.config), allow_nan=False)
        if has_tokenizer(model.file):
            total += sum(map(len, rebuild_tokenizer(model.file).files.values()))
        return total


def test_the_small_file_is_whole(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_file)
    assert read_all(path) > 1000


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_model_is_refused_or_read(small_file: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small_file)
    head = small_file.index(b"output_norm") + 200
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, head))
        content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])))
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError, TokenizerError):
        assert read_all(path) < 100 * len(content)
