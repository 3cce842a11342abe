"""Beyond 2 GiB: sparse files stand in for the weights, so nothing of that size is written or held.

A protobuf ends at 2^31 bytes, offsets in 32 bits there or at 2^32. The graph itself holds next to nothing, whatever the model.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from posttrainllm.export import decoder
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.gguf_file import GGUFFile
from posttrainllm.export.graph import INLINE_NBYTES
from posttrainllm.export.half import to_half
from posttrainllm.export.precision import block_source, parse_precision
from posttrainllm.export.safetensors_file import SafetensorsFolder
from posttrainllm.export.standard import to_standard
from posttrainllm.runtime import load

LIMIT = 2**31
SPARSE = pytest.mark.skipif("sys.platform == 'win32'", reason="files have no holes unless told so")
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    vocab, width, middle = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size"))
    shapes = {"model.embed_tokens.weight": [vocab, width], "lm_head.weight": [vocab, width]}
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{letter}_proj.weight": [width, width] for letter in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": [middle, width] for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": [width, middle]}
        shapes |= {f"{block}.{name}_layernorm.weight": [width] for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": [width]}


def sparse_safetensors(path: Path, shapes: dict[str, list[int]]) -> int:
    """Zeros in bfloat16, none of them stored; the size of the file."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path.stat().st_size


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_7B))
    assert sparse_safetensors(folder / "model.safetensors", llama_shapes(LLAMA_7B)) > 6 * LIMIT
    return folder


@SPARSE
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4", "standard"])
def test_the_graph_of_a_large_model_is_small(seven_billion: Path, precision: str) -> None:
    """Its weights lie outside whatever they add up to, so no limit on their sum has to be known."""
    with open_checkpoint(seven_billion) as checkpoint:
        recipe = parse_precision("fp32" if precision == "standard" else precision)
        model = decoder.build_decoder(checkpoint, block_source(recipe, checkpoint))
        if precision == "fp16":
            to_half(model, seven_billion)
        if precision == "standard":
            to_standard(model)
        offset = 0
        for value in model.graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes <= INLINE_NBYTES:
                continue
            assert isinstance(tensor, ir.LazyTensor), f"{tensor.name} would be held in memory"
            value.const_value = ir.ExternalTensor(
                "model.onnx.data",
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name or "",
            )
            offset += tensor.nbytes
        assert offset > LIMIT
        assert ir.to_proto(model).ByteSize() < 1 << 20


class Hole(ir.Tensor[Any]):
    """Zeros that are stepped over, not written."""

    def __init__(self, nbytes: int, name: str) -> None:
        super().__init__(np.broadcast_to(np.uint8(0), nbytes), name=name)

    def tofile(self, file: Any) -> None:
        file.seek(self.nbytes, 1)


@SPARSE
def test_a_bundle_beyond_the_limit_is_exported_and_runs(
    make_file: Callable[..., Any],
    plain: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hole before the first weight puts all of them beyond 2 GiB: written, checked, hashed, opened, run."""
    build = decoder.build_decoder

    def with_hole(*arguments: Any, **options: Any) -> ir.Model:
        model = build(*arguments, **options)
        weights = list(model.graph.initializers.values())
        hole = ir.Value(name="hole", const_value=Hole(LIMIT + 4096, "hole"))
        model.graph.initializers.clear()
        for value in (hole, *weights):
            model.graph.initializers.add(value)
        return model

    sample = make_file(vocab=40, width=16)
    monkeypatch.setattr(decoder, "build_decoder", with_hole)
    bundle = export(sample.save(tmp_path), tmp_path / "out").bundle
    data = bundle / "model.onnx.data"
    try:
        assert (bundle / "model.onnx").stat().st_size < 1 << 20
        assert data.stat().st_size > LIMIT
        assert data.stat().st_blocks * 512 < 1 << 24, "the hole is none"
        proto = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
        places = [
            {e.key: e.value for e in t.external_data} for t in proto.graph.initializer if t.external_data
        ]
        assert {place["location"] for place in places} == {"model.onnx.data"}
        assert sum(int(place["offset"]) > LIMIT for place in places) == len(places) - 1 > 0
        session, ids = load(bundle, provider="cpu"), [3, 1, 4, 1, 5]
        found, expected = session.forward(ids, session.new_cache()), np.array(plain(sample.tensors, 2, ids))
        assert np.abs(found - expected).max() < 1e-4 * np.ptp(expected)
    finally:
        shutil.rmtree(bundle)


@SPARSE
@pytest.mark.parametrize("start", [LIMIT - 8, LIMIT, 2 * LIMIT])
def test_a_safetensors_tensor_beyond_the_limit_is_read(start: int, tmp_path: Path) -> None:
    """Offsets in a safetensors file take more than 32 bits."""
    values = np.arange(1, 9, dtype=np.float32)
    header = {
        "before": {"dtype": "U8", "shape": [start], "data_offsets": [0, start]},
        "after": {"dtype": "F32", "shape": [8], "data_offsets": [start, start + 32]},
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(start, 1)
        file.write(values.tobytes())
    with SafetensorsFolder(tmp_path) as weights:
        np.testing.assert_array_equal(weights.tensor("after"), values)


@SPARSE
@pytest.mark.parametrize("start", [LIMIT, 2 * LIMIT])
def test_a_gguf_tensor_beyond_the_limit_is_read(start: int, tmp_path: Path) -> None:
    values = np.arange(1, 9, dtype=np.float32)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    for name, count, at in (("before", start // 4, 0), ("after", 8, start)):
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, count, 0, at)
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        file.seek(start, 1)
        file.write(values.tobytes())
    with GGUFFile(tmp_path / "model.gguf") as weights:
        np.testing.assert_array_equal(weights.blocks("after").view(np.float32)[0], values)
