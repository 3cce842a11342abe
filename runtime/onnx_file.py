"""What an ONNX file says about its graph, read without the onnx package and without its weights.

ONNX Runtime tells the inputs and outputs of a graph only after it has loaded all of it, and never which
operators it holds. A folder that somebody else wrote has to be understood before that: how its keys and
values grow, which files its weights lie in, how precise they are. Field numbers are those of onnx.proto3
(https://github.com/onnx/onnx). Weights are stepped over, subgraphs and functions are not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from .errors import BundleError

# TensorProto.DataType: its name as NumPy has it, and bits per element.
_TYPES = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    8: ("string", 0),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    16: ("bfloat16", 16),
    17: ("float8e4m3fn", 8),
    21: ("uint4", 4),
    22: ("int4", 4),
}
_LFS = b"version https://git-lfs"
Dim = int | str  # a size, or the name of one that is free


@dataclass(frozen=True)
class Port:
    """An input or output of the graph; `shape` is None where the file states none."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True)
class Tensor:
    """An initialiser: `file` is the external file that holds it up to byte `end`, empty if the graph does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    end: int = 0


@dataclass(frozen=True)
class Node:
    """One operator; the empty `domain` is ai.onnx. An empty name in `inputs` or `outputs` is one left out."""

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    raw_attributes: tuple[bytes, ...]

    def integer(self, name: str, default: int = 0) -> int:
        """The integer attribute `name`."""
        for raw in self.raw_attributes:
            fields = dict(_fields(memoryview(raw)))
            if _text(fields.get(1)) == name:
                value = fields.get(3, default)
                return _signed(value) if isinstance(value, int) else default
        return default


@dataclass(frozen=True)
class OnnxGraph:
    """The top-level graph of a file. `inputs` leaves out what has a default (an initialiser of that name).

    `defaulted` are inputs with a default that a caller may replace; before IR version 4 nobody could.
    """

    path: Path
    producer: str
    opsets: dict[str, int]
    inputs: tuple[Port, ...]
    defaulted: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]

    @cached_property
    def external_files(self) -> tuple[str, ...]:
        """Names of the files beside the graph that hold its weights."""
        return tuple(sorted({tensor.file for tensor in self.tensors if tensor.file}))


def read_graph(path: Path) -> OnnxGraph:
    """The graph in `path`. Raises BundleError if it is no ONNX model, or a file of its weights is missing."""
    try:
        with path.open("rb") as file:
            # Not closed by hand: that is an error while slices of it live, and they end with this call.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        graph = _model(path, memoryview(content))
    except OSError as error:
        raise BundleError(path, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, TypeError, IndexError) as error:
        raise BundleError(path, f"not a whole ONNX model ({error})", "an .onnx file") from None
    for name in graph.external_files:
        # A graph must not make us look outside its own folder.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleError(path, f"its weights lie in {name!r}", "a file beside the graph")
        if not (path.parent / name).is_file():
            raise BundleError(path, f"{name}, which holds its weights, is missing", remedy="copy it too")
        _check_length(path.parent / name, max(tensor.end for tensor in graph.tensors if tensor.file == name))
    return graph


def _check_length(file: Path, nbytes: int) -> None:
    """Raises BundleError for a file of weights that ends before the last of them does: ONNX Runtime's words are long."""
    found = file.stat().st_size
    if found < nbytes:
        with file.open("rb") as opened:
            pointer = opened.read(len(_LFS)) == _LFS
        what = "a Git LFS pointer, not the file itself" if pointer else f"truncated: {found} bytes"
        raise BundleError(file, what, f"at least {nbytes} bytes of weights", "copy it again")


def _model(path: Path, view: memoryview) -> OnnxGraph:
    producer, graph, ir_version = "", None, 0
    opsets: dict[str, int] = {}
    for number, value in _fields(view):
        if number == 1 and isinstance(value, int):
            ir_version = value
        elif number == 2:
            producer = _text(value)
        elif number == 7:
            graph = _bytes(value)
        elif number == 8:
            entry = dict(_fields(_bytes(value)))
            version = entry.get(2, 0)
            opsets[_domain(_text(entry.get(1)))] = version if isinstance(version, int) else 0
    if graph is None:
        raise ValueError("it holds no graph")
    return _graph(path, producer, opsets, graph, replaceable=ir_version >= 4)


def _graph(
    path: Path, producer: str, opsets: dict[str, int], view: memoryview, *, replaceable: bool
) -> OnnxGraph:
    inputs, outputs, nodes, tensors = [], [], [], []
    for number, value in _fields(view):
        if number == 1:
            nodes.append(_node(_bytes(value)))
        elif number == 5:
            tensors.append(_tensor(_bytes(value)))
        elif number == 11:
            inputs.append(_port(_bytes(value)))
        elif number == 12:
            outputs.append(_port(_bytes(value)))
    defaults = {tensor.name for tensor in tensors}
    given = tuple(port for port in inputs if port.name not in defaults)
    defaulted = tuple(port for port in inputs if port.name in defaults) if replaceable else ()
    return OnnxGraph(path, producer, opsets, given, defaulted, tuple(outputs), tuple(nodes), tuple(tensors))


def _node(view: memoryview) -> Node:
    inputs, outputs, attributes = [], [], []
    name = op = domain = ""
    for number, value in _fields(view):
        if number == 1:
            inputs.append(_text(value))
        elif number == 2:
            outputs.append(_text(value))
        elif number == 3:
            name = _text(value)
        elif number == 4:
            op = _text(value)
        elif number == 5:
            attribute = _bytes(value)
            if len(attribute) < 256:  # constants and subgraphs: nobody asks for those
                attributes.append(bytes(attribute))
        elif number == 7:
            domain = _text(value)
    return Node(name, op, _domain(domain), tuple(inputs), tuple(outputs), tuple(attributes))


def _tensor(view: memoryview) -> Tensor:
    shape: list[int] = []
    name, external, kind = "", False, 0
    place: dict[str, str] = {}
    for number, value in _fields(view):
        if number == 1:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8:
            name = _text(value)
        elif number == 13:
            entry = dict(_fields(_bytes(value)))
            place[_text(entry.get(1))] = _text(entry.get(2))
        elif number == 14:
            external = value == 1
    dtype, bits = _TYPES.get(kind, (f"type {kind}", 0))
    nbytes = (prod(shape) * bits + 7) // 8
    if not external:
        return Tensor(name, dtype, tuple(shape), nbytes, "")
    end = int(place.get("offset", 0)) + int(place.get("length", nbytes))
    return Tensor(name, dtype, tuple(shape), nbytes, place.get("location", ""), end)


def _port(view: memoryview) -> Port:
    fields = dict(_fields(view))
    kind = dict(_fields(_bytes(fields.get(2, b""))))
    tensor = dict(_fields(_bytes(kind.get(1, b""))))
    element = tensor.get(1)
    dtype, _ = _TYPES.get(element if isinstance(element, int) else 0, ("unknown", 0))
    shape: tuple[Dim, ...] | None = None
    if 2 in tensor:
        dims = [dict(_fields(_bytes(value))) for _, value in _fields(_bytes(tensor[2]))]
        shape = tuple(_dim(fields) for fields in dims)
    return Port(_text(fields.get(1)), dtype, shape)


def _dim(fields: dict[int, int | memoryview]) -> Dim:
    size = fields.get(1)
    return size if isinstance(size, int) else _text(fields.get(2)) or "?"


# Protocol buffers: a message is a sequence of (field number and wire type, value).


def _fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values: integers, or the bytes of a length-delimited field. Raises ValueError."""
    position, end = 0, len(view)
    while position < end:
        tag, position = _varint(view, position)
        wire = tag & 7
        value: int | memoryview
        if wire == 0:
            value, position = _varint(view, position)
        else:
            if wire == 2:
                size, position = _varint(view, position)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise ValueError(f"wire type {wire}")
            if size > end - position:
                raise ValueError("it ends too early")
            value = view[position : position + size]
            position += size
        yield tag >> 3, value


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and where it ends."""
    result = shift = 0
    while True:
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")


def _varints(packed: memoryview) -> Sequence[int]:
    values, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        values.append(value)
    return values


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | bytes | memoryview) -> memoryview:
    if isinstance(value, int):
        raise TypeError("a number where a message belongs")
    return memoryview(value)


def _text(value: int | memoryview | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        raise TypeError("a number where a text belongs")
    return bytes(value).decode("utf-8")
