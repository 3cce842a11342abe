"""The check itself: it passes right graphs, and nothing but right graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from posttrainllm.export import parity
from posttrainllm.export.attention import padded_head_dim
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.decoder import build_decoder
from posttrainllm.export.exporter import export
from posttrainllm.export.parity import ParityReport, measure, parity_cases
from posttrainllm.export.tinygpt import TinyGPTCheckpoint
from posttrainllm.runtime.bundle import KVLayout
from posttrainllm.runtime.errors import CheckFailedError

MakeFile = Callable[..., Any]
Change = Callable[[dict[str, Any], onnx.ModelProto], None]


def measured(path: Path, folder: Path, change: Change | None = None) -> ParityReport:
    """The figures of the graph of `path`, after `change` has altered its arrays or its nodes."""
    with open_checkpoint(path) as checkpoint:
        graph = folder / "model.onnx"
        ir.save(build_decoder(checkpoint), graph)
        if change is not None:
            model = onnx.load(str(graph))
            arrays = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer}
            change(arrays, model)
            del model.graph.initializer[:]
            model.graph.initializer.extend(
                onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()
            )
            onnx.save(model, str(graph))
        config = checkpoint.config
        kv = KVLayout(config.layers, config.kv_heads, padded_head_dim(config), "float32")
        return measure(checkpoint, graph, kv)


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 128])
def test_every_case_feeds_all_ids_within_the_context(n: int) -> None:
    for case in parity_cases(n, 1000):
        assert sum(case.chunks) == n
        assert all(size > 0 for size in case.chunks)
        assert n <= case.capacity
        assert 0 <= case.first_position <= 1000 - n


def test_the_cases_cover_lengths_and_ends() -> None:
    cases = parity_cases(128, 1000)
    assert {1, 128} <= {size for case in cases for size in case.chunks}
    assert any(case.capacity == 128 for case in cases)
    assert any(case.first_position + 128 == 1000 for case in cases)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"ctx": 1},
        {"ctx": 300, "layers": 1},
        {"vocab": 1},
        {"vocab": 1, "ctx": 1},
        {"width": 20, "heads": 1},
    ],
)
def test_a_right_graph_passes(make_file: MakeFile, tmp_path: Path, sizes: dict[str, int]) -> None:
    report = measured(make_file(**sizes).save(tmp_path), tmp_path)
    assert report.passed
    assert report.worst < 5e-6
    assert len(report.cases) == 5


def test_parity_holds_over_a_long_context(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export checks 128 ids to stay quick; kernels may work in blocks longer than that."""
    monkeypatch.setattr(parity, "MAX_IDS", 1500)
    monkeypatch.setattr(parity, "MIN_IDS", 1500)
    report = measured(make_file(width=32, heads=2, layers=1, middle=8, ctx=1600).save(tmp_path), tmp_path)
    assert report.ids == 1500
    assert report.worst < 1e-5


def _transpose(name: str) -> Change:
    def change(arrays: dict[str, Any], _: onnx.ModelProto) -> None:
        arrays[name] = np.ascontiguousarray(arrays[name].T)

    return change


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_transposed_square_matrix_fails(make_file: MakeFile, tmp_path: Path, part: str) -> None:
    """Shapes agree, only the numbers can tell."""
    path = make_file(width=8, heads=1, middle=8).save(tmp_path)
    report = measured(path, tmp_path, _transpose(f"model.layers.0.{part}.weight"))
    assert not report.passed
    assert report.worst > 1e-2


def _set_attribute(kind: str, name: str, value: float) -> Change:
    def change(_: dict[str, Any], model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == kind and attribute.name == name:
                    attribute.f = value

    return change


def _add(name: str, where: Any, value: float) -> Change:
    def change(arrays: dict[str, Any], _: onnx.ModelProto) -> None:
        arrays[name][where] += value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set_attribute("GroupQueryAttention", "scale", 0.9),
        _set_attribute("SkipLayerNormalization", "epsilon", 1e-2),
        _add("model.embed_positions.weight", (-1, 0), 0.1),  # one number in the last row of the table
        _add("model.layers.1.self_attn.qkv_proj.bias", 0, 0.3),
        _add("model.norm.bias", 2, float("nan")),
    ],
)
def test_a_wrong_graph_fails(make_file: MakeFile, tmp_path: Path, change: Change) -> None:
    assert not measured(make_file(ctx=301).save(tmp_path), tmp_path, change).passed


def test_a_graph_that_forgets_the_past_fails_where_chunks_are_cut(
    make_file: MakeFile, tmp_path: Path
) -> None:
    """Past length 0 agrees, every later one does not."""

    def change(_: dict[str, Any], model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Gather" and "position_ids" in node.input:
                node.input[1] = "no_positions"
        zeros = onnx.helper.make_node("Sub", ["position_ids", "first"], ["no_positions"])
        first = onnx.helper.make_node("ReduceMin", ["position_ids"], ["first"], keepdims=1)
        model.graph.node.insert(0, zeros)
        model.graph.node.insert(0, first)

    report = measured(make_file().save(tmp_path), tmp_path, change)
    assert report.cases["one chunk"] < 1e-5
    assert report.cases["uneven chunks"] > 1e-3
    assert not report.passed


def nearly_constant(make_file: MakeFile, ids: list[int]) -> Any:
    """A model whose first norm divides by next to nothing for `ids`: their logits are rounding errors, blown up."""
    vocab, width = 64, 16
    sample = make_file(vocab=vocab, width=width, heads=2, layers=1, middle=8, ctx=300)
    tensors = {name: tensor.copy() for name, tensor in sample.tensors.items()}
    tensors["position_embedding.weight"][:] = 0
    tensors["ln_final.weight"][:], tensors["ln_final.bias"][:] = (
        1,
        0,
    )  # so that large rows make no large logits
    for part in ("weight", "bias"):
        tensors[f"blocks.0.attn.o_proj.{part}"][:] = 0  # so that later ids do not see them
    rows = 100 + np.arange(width, dtype=np.float32) * np.float32(2**-17)
    tensors["token_embedding.weight"][ids] = rows * np.linspace(1, 1.7, len(ids))[:, None]
    return make_file(tensors=tensors, heads=2)


def test_ids_that_float32_cannot_hold_do_not_stop_an_export(make_file: MakeFile, tmp_path: Path) -> None:
    path = nearly_constant(make_file, [19, 54]).save(tmp_path)
    report = measured(path, tmp_path)
    assert report.passed
    assert 0 < report.unsteady <= report.ids // 8
    assert export(path, tmp_path / "out").manifest.parity["unsteady"] == report.unsteady


def test_unsteady_ids_hide_no_fault_in_the_others(make_file: MakeFile, tmp_path: Path) -> None:
    path = nearly_constant(make_file, [19, 54]).save(tmp_path)
    report = measured(path, tmp_path, _set_attribute("SkipLayerNormalization", "epsilon", 1e-2))
    assert report.unsteady > 0
    assert not report.passed


def test_a_model_of_unsteady_ids_is_not_declared_good(make_file: MakeFile, tmp_path: Path) -> None:
    report = measured(nearly_constant(make_file, list(range(0, 64, 2))).save(tmp_path), tmp_path)
    assert not report.passed
    assert report.unsteady == 0


def test_weights_whose_logits_overflow_are_refused(make_file: MakeFile, tmp_path: Path) -> None:
    sample = make_file()
    tensors = sample.tensors | {"ln_final.weight": np.full(6, 3e38, np.float32)}
    with pytest.raises(CheckFailedError, match="overflow"):
        measured(make_file(tensors=tensors).save(tmp_path), tmp_path)


def test_a_graph_that_does_not_run_is_a_failed_check(make_file: MakeFile, tmp_path: Path) -> None:
    def change(arrays: dict[str, Any], _: onnx.ModelProto) -> None:
        arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)

    with pytest.raises(CheckFailedError, match="cannot run the exported graph"):
        measured(make_file().save(tmp_path), tmp_path, change)


def test_the_record_is_plain_json_data() -> None:
    record = ParityReport(1e-4, 2e-7, 20.0, 64, 0, {"one chunk": 2e-7}).to_json()
    assert record["worst"] == 2e-7
    assert record["cases"] == {"one chunk": 2e-7}
    assert "numpy" in str(record["reference"])


def test_a_reader_that_forgets_the_orientation_is_found_out(
    make_file: MakeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square matrices fit both ways. The reference orients them by itself, from the stored order."""
    source = make_file(width=16, middle=16, heads=2).save(tmp_path)
    right = TinyGPTCheckpoint.tensor

    def forgetful(self: TinyGPTCheckpoint, name: str) -> NDArray[np.float32]:
        values = right(self, name)
        return values.T if name.endswith("_proj.weight") and values.shape[0] == values.shape[1] else values

    monkeypatch.setattr(TinyGPTCheckpoint, "tensor", forgetful)
    with pytest.raises(CheckFailedError, match="differs from the source"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
