"""A `.tinygpt` file as a checkpoint: its config, its inventory of tensors, and where each one lies.

Converts version 2 files of the base architecture with plain weights. Linear weights are stored input
by output under an output by input shape, so they are read reversed and transposed: for a square
matrix nothing but this knowledge tells the two apart. Files with features that are not converted yet
are refused by name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .architectures import TINYGPT, LinearLayout, ModelConfig, tensor_shapes
from .tinygpt_body import Place, body_layout
from .tinygpt_header import Entry, Header, check_elements, read_header, short

_MAX_SIZE = 2**31 - 1
_NORM_EPS = 1e-5  # no file states it


@dataclass(frozen=True)
class _Feature:
    """A part of an architecture that is refused: the config key that turns it on, its tensors."""

    name: str
    key: str
    tensors: str


_FEATURES = (
    _Feature("mixture of experts", "nExperts", r"^blocks\.\d+\.moe\."),
    _Feature("a sliding window", "slidingWindow", ""),
    _Feature("mixture of depths", "useMoD", r"^blocks\.\d+\.mod_router\."),
    _Feature("differential attention", "useDifferentialAttention", r"^blocks\.\d+\.diff_attn\."),
    _Feature("YOCO", "useYOCO", r"^blocks\.\d+\.cross_attn\."),
    _Feature("DeepNorm", "useDeepNorm", ""),
    _Feature("an embedding RMSNorm", "useEmbeddingRMSNorm", r"^embed_norm\."),
    _Feature("an untied head", "", r"^lm_head\."),
)


class TinyGPTCheckpoint:
    """An open `.tinygpt` file; tensors are read one at a time. Closed by `close` or `with`.

    Reads fail with CheckpointError when the file changes underneath, or holds NaN or infinity.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.linear_layout: LinearLayout = "in_out"
        self._file: BufferedReader = path.open("rb")
        try:
            self._stat = os.fstat(self._file.fileno())
            self._read_description()
        except BaseException:
            self._file.close()
            raise

    def _read_description(self) -> None:
        header = read_header(self._file, self.path, self._stat.st_size)
        _refuse_features(header)
        check_elements(header.manifest, header)
        warnings: list[str] = []
        self.config: ModelConfig = _model_config(header, warnings)
        self.tokenizer_source: str | None = _tokenizer_source(header)
        names = _check_inventory(header, self.config)
        self._dtype, places = body_layout(header, warnings)
        self._places: dict[str, Place] = {ours: places[theirs] for ours, theirs in names.items()}
        self._source_names: Mapping[str, str] = names
        self.warnings: tuple[str, ...] = tuple(warnings)
        self.format: str = f"tinygpt v{header.version} {self.stored_dtype}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every tensor, by our name."""
        return {name: place.shape for name, place in self._places.items()}

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._stat.st_size

    @property
    def stored_dtype(self) -> str:
        """Element type of the weights in the file."""
        return self._dtype.newbyteorder("=").name

    @property
    def weight_nbytes(self) -> int:
        """Size of the weights as stored, without training state."""
        return sum(place.count for place in self._places.values()) * self._dtype.itemsize

    def dtype(self, name: str) -> str:
        """Element type of `name` in the file."""
        return self.stored_dtype

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The tensor `name` in its logical shape, [out, in] for linear weights. A fresh array."""
        place = self._places[name]
        values = self.stored(name)
        if place.transposed:
            return values.reshape(place.shape[::-1]).T
        return values.reshape(place.shape)

    def stored(self, name: str) -> NDArray[np.float32]:
        """The values of `name` one after the other as they lie in the file. A fresh array, [count]."""
        place = self._places[name]
        stored = np.empty(place.count, self._dtype)
        try:
            self._file.seek(place.start)
            got = self._file.readinto(stored.view(np.uint8).data)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error.strerror or error})") from None
        if got != stored.nbytes:
            raise self._changed()
        self._check_unchanged()
        values = stored.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise CheckpointError(
                self.path,
                f"NaN or infinity in tensor {self._source_names[name]}",
                "finite weights",
                "train again",
            )
        return values

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the file."""
        try:
            self._file.seek(0)
            digest = hashlib.file_digest(self._file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error.strerror or error})") from None
        self._check_unchanged()
        return digest

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_unchanged(self) -> None:
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(self.path, "changed while it was read", "a finished file", "export again")


def _refuse_features(header: Header) -> None:
    """Refuse every feature that changes the function and is not converted yet, by name."""
    names = [entry.name for entry in header.manifest]
    if any(name.startswith("router_head.") for name in names):
        raise CheckpointError(
            header.path, "a tool-router classifier, not a language model", "a language model"
        )
    expected, remedy = "the base architecture", "this feature is not converted yet"
    for feature in _FEATURES:
        if feature.key and _is_on(header, feature.key):
            raise CheckpointError(header.path, f"{feature.name} (config.{feature.key})", expected, remedy)
        if not feature.tensors:
            continue
        for name in names:
            if re.match(feature.tensors, name):
                without = f" without config.{feature.key}" if feature.key else ""
                raise CheckpointError(
                    header.path, f"{feature.name}{without} (tensor {name})", expected, remedy
                )


def _is_on(header: Header, key: str) -> bool:
    value = header.config.get(key)
    if key in ("nExperts", "slidingWindow"):
        count = _integer(header, key)
        return count is not None and count > (1 if key == "nExperts" else 0)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(header.path, f"config.{key} is {short(value)}", "true or false")
    return bool(value)


def _integer(header: Header, key: str) -> int | None:
    value = header.config.get(key)
    if value is not None and type(value) is not int:
        raise CheckpointError(header.path, f"config.{key} is {short(value)}", "an integer")
    return value


def _size(header: Header, key: str, seen: int, what: str) -> int:
    """The config's `key`, or `seen` in the manifest where it is absent; they must not disagree."""
    value = _integer(header, key)
    if value is None:
        return seen
    if not 1 <= value <= _MAX_SIZE:
        raise CheckpointError(header.path, f"config.{key} is {short(value)}", f"1 to {_MAX_SIZE}")
    if value != seen:
        raise CheckpointError(
            header.path,
            f"config.{key} is {value}, but the manifest has {seen} {what}",
            "a manifest that fits the config",
        )
    return value


def _model_config(header: Header, warnings: list[str]) -> ModelConfig:
    """The sizes, from the config where it states them, else from the manifest."""
    entries = {entry.name: entry for entry in header.manifest}
    vocab, hidden = _matrix(header, entries, "token_embedding.weight")
    context = _matrix(header, entries, "position_embedding.weight")[0]
    middle = _matrix(header, entries, "blocks.0.mlp.fc_in.weight")[0]
    blocks = {match[1] for name in entries if (match := re.match(r"^blocks\.(\d+)\.", name))}
    heads = _integer(header, "heads")
    hidden = _size(header, "dModel", hidden, "embedding columns")
    if heads is None:
        raise CheckpointError(header.path, "config.heads is missing", "the number of attention heads")
    if not 1 <= heads <= hidden or hidden % heads:
        raise CheckpointError(header.path, f"config.heads is {short(heads)}", f"a divisor of dModel {hidden}")
    if header.config.get("vocabSize") is None and vocab != 256:
        warnings.append(f"config.vocabSize is missing; the token table has {vocab} rows, which is used")
    return ModelConfig(
        architecture=TINYGPT.name,
        vocab_size=_size(header, "vocabSize", vocab, "token rows"),
        hidden_size=hidden,
        intermediate_size=_size(header, "dMlp", middle, "fc_in rows"),
        layers=_size(header, "layers", len(blocks), "blocks"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        context_length=_size(header, "ctx", context, "position rows"),
        norm="layer_norm",
        norm_eps=_NORM_EPS,
        positions="learned",
        activation="gelu_erf",
        attention_scale=(hidden // heads) ** -0.5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_head=True,
        gated_mlp=False,
    )


def _matrix(header: Header, entries: Mapping[str, Entry], name: str) -> tuple[int, int]:
    if name not in entries:
        raise CheckpointError(header.path, f"tensor {name} is missing", "every tensor of the architecture")
    shape = entries[name].shape
    if len(shape) != 2:
        raise CheckpointError(header.path, f"tensor {name} has the shape {list(shape)}", "two dimensions")
    return shape[0], shape[1]


def _tokenizer_source(header: Header) -> str | None:
    value = header.config.get("tokenizerSource")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(header.path, f"config.tokenizerSource is {short(value)}", "a path")
    return value or None


def _check_inventory(header: Header, config: ModelConfig) -> dict[str, str]:
    """Our name to the file's for every tensor, after comparing names and shapes both ways."""
    theirs = TINYGPT.source_names(config)
    names = {ours: theirs[ours] for ours in tensor_shapes(config)}
    shapes = {theirs[ours]: shape for ours, shape in tensor_shapes(config).items()}
    entries = {entry.name: entry for entry in header.manifest}
    for name, shape in shapes.items():
        if name not in entries:
            raise CheckpointError(
                header.path, f"tensor {name} is missing", "every tensor of the architecture"
            )
        if entries[name].shape != shape:
            raise CheckpointError(
                header.path, f"tensor {name} has the shape {list(entries[name].shape)}", f"{list(shape)}"
            )
    for name in entries:
        if name not in shapes:
            raise CheckpointError(
                header.path, f"unknown tensor {name}", "only tensors of the base architecture"
            )
    return names
