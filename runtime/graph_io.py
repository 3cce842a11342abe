"""What a decoder's graph calls its inputs and outputs, and how its keys and values grow.

Our own bundles use one set of names. Of a graph that somebody else exported this is read from the graph:
what it wants and cannot be given is refused with its name, before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .bundle import KVLayout
from .errors import BundleError
from .onnx_file import Node, OnnxGraph, Port

_INTEGERS = ("int64", "int32")
_FLOATS = ("float32", "float16")
# How many of the last positions get logits: transformers.js' exports call it so, and 0 means all of them.
ROW_COUNTS = ("num_logits_to_keep", "logits_to_keep")
# Inputs that no decoder of plain text has, and what their presence means.
_MEANINGS = {
    "use_cache_branch": "a merged decoder with a switch between two graphs",
    "encoder_hidden_states": "the decoder of an encoder-decoder",
    "encoder_attention_mask": "the decoder of an encoder-decoder",
    "pixel_values": "a model of images",
    "inputs_embeds": "a decoder without its token table",
    "block_table": "a decoder for paged attention",
}


@dataclass(frozen=True)
class Names:
    """What a configuration file says the graph calls things; `%d` is the layer. The defaults are optimum's."""

    ids: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"
    logits: str = "logits"


@dataclass(frozen=True)
class Scalar:
    """An input that takes one integer: of rank 0 or 1."""

    name: str
    rank: int


@dataclass(frozen=True)
class GraphIO:
    """Inputs and outputs by name, with their NumPy types; `past` and `present` go key, value, layer by layer.

    `rows` is the input that says how many of the last positions get logits. A graph with `one_row` has them
    for the last position only.
    """

    past: tuple[str, ...]
    present: tuple[str, ...]
    ids: tuple[str, str] = ("input_ids", "int64")
    mask: tuple[str, str] | None = ("attention_mask", "int64")
    positions: tuple[str, str] | None = ("position_ids", "int64")
    logits: tuple[str, str] = ("logits", "float32")
    rows: Scalar | None = None
    one_row: bool = False


def bundle_io(layers: int) -> GraphIO:
    """The names of our own bundles."""
    names = Names()
    return GraphIO(*_kv_names(names, layers))


@dataclass
class Foreign:
    """A graph that we did not write, and the sizes that its configuration states for dimensions it leaves open."""

    graph: OnnxGraph
    names: Names
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    _inputs: dict[str, Port] = field(init=False)
    _outputs: dict[str, Port] = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = {port.name: port for port in self.graph.inputs}
        self._outputs = {port.name: port for port in self.graph.outputs}

    def describe(self) -> tuple[GraphIO, KVLayout, int]:
        """Names, KV layout and width of the logits. Raises BundleError with the reason if it cannot be driven."""
        for name, meaning in _MEANINGS.items():
            if name in self._inputs and name != self.names.ids:
                raise self._refusal(f"{meaning} (its input {name})", "a decoder with past keys and values")
        layers = self._layers()
        past, present = _kv_names(self.names, layers)
        ids, mask = self._integers(self.names.ids), self._integers(self.names.mask)
        if ids is None:
            raise self._refusal(f"no input {self.names.ids}", "token ids as input")
        rows = next((self._scalar(name) for name in ROW_COUNTS if name in self._inputs), None)
        known = {ids[0], self.names.mask, self.names.positions, *past, *([rows.name] if rows else [])}
        unknown = [name for name in self._inputs if name not in known]
        if unknown:
            raise self._refusal(
                f"it wants {', '.join(unknown)}", "ids, mask, positions, past keys and values only"
            )
        logits, vocab_size, one_row = self._logits()
        io = GraphIO(past, present, ids, mask, self._integers(self.names.positions), logits, rows, one_row)
        return io, self._kv(past, present, layers), vocab_size

    def _layers(self) -> int:
        pattern = re.compile(re.escape(self.names.past_key).replace("%d", r"(\d+)"))
        numbers = sorted(int(match[1]) for name in self._inputs if (match := pattern.fullmatch(name)))
        if not numbers:
            raise self._refusal(
                f"no input like {self.names.past_key.replace('%d', '0')}", "past keys and values as inputs"
            )
        if numbers != list(range(len(numbers))):
            raise self._refusal(f"past keys of layers {numbers}", f"of layers 0 to {len(numbers) - 1}")
        return len(numbers)

    def _integers(self, name: str) -> tuple[str, str] | None:
        """Name and type of an input [batch, n] of integers; None if the graph has no such input."""
        port = self._inputs.get(name)
        if port is None:
            return None
        shape = ("batch", "n") if port.shape is None else port.shape
        if port.dtype not in _INTEGERS or len(shape) != 2 or not _one(shape[0]):
            raise self._refusal(f"input {_shown(port)}", "[1, n] of int64 or int32")
        if isinstance(shape[1], int):
            raise self._refusal(f"input {_shown(port)} of a fixed length", "any number of ids a run")
        return port.name, port.dtype

    def _scalar(self, name: str) -> Scalar:
        port = self._inputs[name]
        if port.dtype != "int64" or port.shape is None or len(port.shape) > 1:
            raise self._refusal(f"input {_shown(port)}", "one int64")
        return Scalar(name, len(port.shape))

    def _logits(self) -> tuple[tuple[str, str], int, bool]:
        port = self._outputs.get(self.names.logits)
        if port is None:
            raise self._refusal(f"no output {self.names.logits}", f"one of {', '.join(self._outputs)}")
        if port.dtype not in _FLOATS or port.shape is None or len(port.shape) != 3:
            raise self._refusal(f"output {_shown(port)}", "[batch, n, vocabulary] of float32 or float16")
        width = _size(port.shape[2], self.vocab_size)
        if width is None:
            raise self._refusal(f"output {_shown(port)} without a width", "a vocab_size in its configuration")
        return (port.name, port.dtype), width, port.shape[1] == 1

    def _kv(self, past: Sequence[str], present: Sequence[str], layers: int) -> KVLayout:
        ports = []
        for names, ours in ((past, self._inputs), (present, self._outputs)):
            for name in names:
                if name not in ours:
                    raise self._refusal(f"no {name}", "a key and a value of each layer, past and present")
                ports.append(ours[name])
        found = {self._shape(port) for port in ports[: len(past)]}
        if len(found) > 1 or {port.dtype for port in ports} != {ports[0].dtype}:
            raise self._refusal("keys and values of several shapes or types", "the same for all layers")
        heads, head_dim = found.pop()
        return KVLayout(layers, heads, head_dim, ports[0].dtype, self._style(past, present))

    def _shape(self, port: Port) -> tuple[int, int]:
        """Heads and head size of one past input [batch, heads, past, head size]."""
        shape = port.shape or ()
        free = len(shape) == 4 and _one(shape[0]) and not isinstance(shape[2], int)
        if port.dtype not in _FLOATS or not free:
            raise self._refusal(f"input {_shown(port)}", "[1, heads, past, head size] of float32 or float16")
        heads, head_dim = _size(shape[1], self.kv_heads), _size(shape[3], self.head_dim)
        if heads is None or head_dim is None:
            raise self._refusal(f"input {_shown(port)} without sizes", "them in its configuration")
        return heads, head_dim

    def _style(self, past: Sequence[str], present: Sequence[str]) -> str:
        """ "shared" if every past goes into GroupQueryAttention, whose output is the present, and nowhere else.

        That operator appends in place where both are one buffer. A graph that looks at the shape of its past
        (for positions, for a mask) would take the capacity of such a buffer for its length. A cache for a sliding window
        (`sliding_window_cache`) forgets only when its buffer is full, and ours always holds every id.
        """
        uses: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            for name in node.inputs:
                uses.setdefault(name, []).append(node)
        if all(_appended(uses.get(old, []), old, new) for old, new in zip(past, present, strict=True)):
            return "shared"
        if any(node.integer("sliding_window_cache") for node in self.graph.nodes):
            raise self._refusal("a cache that forgets (sliding_window_cache)", "one that keeps all ids")
        return "growing"

    def _refusal(self, found: str, expected: str) -> BundleError:
        return BundleError(self.graph.path, found, expected)


def _appended(uses: list[Node], past: str, present: str) -> bool:
    """Whether all that happens to `past` is that GroupQueryAttention makes `present` of it."""
    if len(uses) != 1 or uses[0].op != "GroupQueryAttention":
        return False
    place = uses[0].inputs.index(past)
    return place in (3, 4) and uses[0].outputs[place - 2 : place - 1] == (present,)


def _kv_names(names: Names, layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    def spelled(*patterns: str) -> tuple[str, ...]:
        return tuple(pattern.replace("%d", str(i)) for i in range(layers) for pattern in patterns)

    return spelled(names.past_key, names.past_value), spelled(names.present_key, names.present_value)


def _size(found: int | str, stated: int | None) -> int | None:
    """A dimension: what the graph says, else what the configuration says."""
    size = found if isinstance(found, int) else stated
    return size if size is not None and size > 0 else None


def _shown(port: Port) -> str:
    shape = "of unknown shape" if port.shape is None else f"[{', '.join(map(str, port.shape))}]"
    return f"{port.name} {shape} {port.dtype}"


def precision(graph: OnnxGraph) -> str:
    """How the weights are stored: fp32, fp16, int8, int4, …; several are joined by a plus sign."""
    bits = sorted({node.integer("bits", 4) for node in graph.nodes if node.op == "MatMulNBits"})
    if bits:
        return "+".join(f"int{count}" for count in bits)
    sizes: dict[str, int] = {}
    for tensor in graph.tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    names: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "int8"}
    largest = max(sizes, key=lambda dtype: sizes[dtype], default="unknown")
    return names.get(largest, largest)


def _one(batch: int | str) -> bool:
    """Whether a batch of one fits: the dimension is free, or 1."""
    return batch == 1 or isinstance(batch, str)
