"""The ONNX reader against the onnx package itself, and against files that are cut or mangled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.runtime.errors import BundleError
from posttrainllm.runtime.graph_io import precision
from posttrainllm.runtime.onnx_file import OnnxGraph, Port, read_graph


def as_onnx_reads_it(port: onnx.ValueInfoProto) -> Port:
    kind = port.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return Port(port.name, dtype, tuple(dims))


def check(graph: OnnxGraph, path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    assert graph.producer == model.producer_name
    assert graph.opsets == {entry.domain: entry.version for entry in model.opset_import}
    given = [port for port in model.graph.input if port.name not in tensors]
    assert list(graph.inputs) == [as_onnx_reads_it(port) for port in given]
    assert list(graph.outputs) == [as_onnx_reads_it(port) for port in model.graph.output]
    assert len(graph.nodes) == len(model.graph.node)
    for node, expected in zip(graph.nodes, model.graph.node, strict=True):
        assert (node.name, node.op, node.domain) == (expected.name, expected.op_type, expected.domain)
        assert node.inputs == tuple(expected.input)
        assert node.outputs == tuple(expected.output)
        for attribute in expected.attribute:
            if attribute.type == onnx.AttributeProto.INT:
                assert node.integer(attribute.name) == attribute.i
    assert [tensor.name for tensor in graph.tensors] == list(tensors)
    for tensor in graph.tensors:
        proto = tensors[tensor.name]
        assert tensor.shape == tuple(proto.dims)
        assert tensor.dtype == onnx.helper.tensor_dtype_to_np_dtype(proto.data_type).name
        if proto.HasField("raw_data"):
            assert tensor.nbytes == len(proto.raw_data)
        where = {entry.key: entry.value for entry in proto.external_data}
        assert tensor.file == where.get("location", "")
        if where:
            assert tensor.end == int(where["offset"]) + int(where["length"])


def test_a_hand_made_graph(make_folder: Callable[..., Path]) -> None:
    path = make_folder(default_input=True, kv="FLOAT16") / "onnx" / "model.onnx"
    check(read_graph(path), path)
    assert precision(read_graph(path)) == "fp32"


def test_our_own_graph_with_weights_beside_it(tiny_bundle: Path) -> None:
    check(graph := read_graph(tiny_bundle / "model.onnx"), tiny_bundle / "model.onnx")
    assert graph.external_files == ("model.onnx.data",)


@pytest.mark.peer
def test_onnxruntime_genais_graphs(genai_folders: dict[str, Path]) -> None:
    for name in ("fp32", "fp16", "int4", "one_row"):
        folder = genai_folders[name]
        check(graph := read_graph(folder / "model.onnx"), folder / "model.onnx")
        assert precision(graph) == {"one_row": "fp32"}.get(name, name)


@pytest.fixture(scope="module")
def content(make_folder: Callable[..., Path]) -> bytes:
    return (make_folder() / "onnx" / "model.onnx").read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(content: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, with any byte changed: never another exception, never more than the file."""
    end = data.draw(st.integers(0, len(content)))
    mangled = bytearray(content[:end])
    for _ in range(data.draw(st.integers(0, 3)) if mangled else 0):
        mangled[data.draw(st.integers(0, min(len(mangled), 4000) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(mangled))
    try:
        read_graph(path)
    except BundleError as error:
        assert "model.onnx" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("location", ["../outside", "/etc/passwd"])
def test_weights_outside_the_folder_are_refused(
    make_folder: Callable[..., Path], tmp_path: Path, location: str
) -> None:
    model = onnx.load(make_folder() / "onnx" / "model.onnx")
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="expected a file beside the graph"):
        read_graph(tmp_path / "model.onnx")
