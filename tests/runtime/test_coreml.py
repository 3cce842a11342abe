"""The CoreML report against the words of the lists that ONNX Runtime ships."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from posttrainllm.export.exporter import export
from posttrainllm.runtime import coreml
from posttrainllm.runtime.coreml import FORMATS, coreml_report
from posttrainllm.runtime.errors import InputError
from posttrainllm.runtime.onnx_file import OnnxGraph, read_graph

LISTS = Path(onnxruntime.__file__).parent / "tools" / "mobile_helpers"


def words(name: str) -> str:
    """A list as it lies in the package, in lower case, with its misspelt separators mended."""
    text = (LISTS / f"coreml_supported_{name.lower()}_ops.md").read_text(encoding="utf-8").lower()
    return text.replace("ai.onnx.", "ai.onnx:").replace("ai:onnx:", "ai.onnx:")


@pytest.fixture(scope="module")
def graphs(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, OnnxGraph]:
    source, out = make_checkpoint(d_model=32, heads=4, layers=2, ctx=64), tmp_path_factory.mktemp("coreml")
    flavours = ("fused", "standard")
    return {
        name: read_graph(export(source, out / name, flavour=name).bundle / "model.onnx") for name in flavours
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flavour", ["fused", "standard"])
def test_what_is_taken_is_in_the_list(graphs: dict[str, OnnxGraph], flavour: str, name: str) -> None:
    graph = graphs[flavour]
    report = coreml_report(graph)[name]
    assert report.source == f"onnxruntime {onnxruntime.__version__}"
    left = {node for _, names in report.refused.values() for node in names}
    assert report.nodes == report.taken + len(left)
    for node in graph.nodes:
        row = f"|{node.domain or 'ai.onnx'}:{node.op}|".lower()
        if node.name not in left:
            assert row in words(name), node.op
        elif report.refused.get(node.op, ("",))[0] == "not in the list":
            assert row not in words(name), node.op


def test_the_standard_flavour_leaves_no_node_of_a_layer_to_the_cpu(graphs: dict[str, OnnxGraph]) -> None:
    """In the MLProgram format: only the mask and the token tables stay outside. The older format has no
    product of two activations, so it loses attention."""
    program = coreml_report(graphs["standard"])["MLProgram"]
    assert set(program.refused) == {"Gather", "CumSum", "Neg", "Slice", "LessOrEqual"}
    assert not any("layers." in node for _, names in program.refused.values() for node in names)
    network = coreml_report(graphs["standard"])["NeuralNetwork"]
    reason, names = network.refused["MatMul"]
    assert reason == "its input 2 is not constant"
    assert len(names) == 4
    fused = coreml_report(graphs["fused"])["MLProgram"]
    assert "com.microsoft:GroupQueryAttention" in fused.refused


def test_constants_are_folded_before_they_are_judged(tmp_path: Path) -> None:
    """A weight that is cast first is a constant; a slice whose bounds are computed from the input is not taken."""
    weight = helper.make_tensor("half", TensorProto.FLOAT16, [2, 2], [1.0, 2.0, 3.0, 4.0])
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Cast", ["half"], ["weight"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "weight"], ["y"], name="times"),
        helper.make_node("Shape", ["y"], ["end"], name="shape", end=1),
        helper.make_node("Slice", ["y", "one", "end"], ["z"], name="cut"),
        helper.make_node("MatMul", ["z", "y"], ["out"], name="both"),
    ]
    x, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "out"))
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [out], [weight, one]))
    onnx.save(model, tmp_path / "model.onnx")
    report = coreml_report(read_graph(tmp_path / "model.onnx"))["NeuralNetwork"]
    assert (report.nodes, report.taken) == (4, 2)
    assert report.refused == {
        "Slice": ("its input 3 is not constant", ("cut",)),
        "MatMul": ("its input 2 is not constant", ("both",)),
    }
    assert "start" in report.conditions["Shape"]


def test_an_onnxruntime_without_lists_is_said_plainly(
    graphs: dict[str, OnnxGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = lambda name: None
    monkeypatch.setattr(coreml, "find_spec", nothing)
    with pytest.raises(InputError, match="has no list of operators for NeuralNetwork"):
        coreml_report(graphs["fused"])
