"""The model bundle on disk: what export leaves and the runtime opens.

A bundle is a folder:

    model.onnx, model.onnx.data      the graph and its weights
    tokenizer.json                   where the model has a tokenizer (not for byte-level models),
    tokenizer_config.json            and what onnxruntime-genai wants beside it
    genai_config.json                lets onnxruntime-genai open the same folder
    bundle.json                      the manifest below: facts, sizes and SHA-256 of every other file

Standard library only. Knows nothing of ONNX; it neither opens graphs nor guesses from file names.
Input and output names of the graph are the ecosystem's: `input_ids` [1, n] int64, `attention_mask`
[1, past + n] int64, `position_ids` [1, n] int64, `past_key_values.N.key|value` and
`present.N.key|value` [1, kv_heads, capacity, head_dim], `logits` [1, n, vocab_size] float32.
Folders that other programs wrote are `foreign.py`'s; they get a manifest of the same kind, in memory only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

from .errors import BundleError, UsageError

if TYPE_CHECKING:
    from .graph_io import GraphIO

MANIFEST = "bundle.json"
GRAPH = "model.onnx"
WEIGHTS = "model.onnx.data"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
FORMAT = "posttrainllm-bundle"
FORMAT_VERSION = 1
FLAVOURS = ("fused", "standard", "optimum")
KV_STYLES = ("shared", "growing")
DIALECTS = ("posttrainllm", "chat_template", "plain")
TOKENIZER_KINDS = ("bytes", "tokenizers", "missing")


@dataclass(frozen=True)
class KVLayout:
    """Shape of one layer's key (or value) buffer: [1, heads, capacity, head_dim] of `dtype`.

    `head_dim` is the padded size that the graph uses. `style` is "shared" where one buffer serves as past
    and as present and is appended to in place, "growing" where the present is the past and the new
    positions, in a tensor of exactly that length. `padding` positions, which the mask hides, stand before the first id: for
    graphs that must never see a past of length zero.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: str
    style: str = "shared"
    padding: int = 0


@dataclass(frozen=True)
class TokenizerInfo:
    """`kind` is "bytes" (id = byte value), "tokenizers" (tokenizer.json) or "missing"."""

    kind: str
    fingerprint: str
    source: str = ""


@dataclass(frozen=True)
class SourceInfo:
    """Where the weights came from: file name, container format, SHA-256 of the file."""

    name: str
    format: str
    sha256: str


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of one file of the bundle."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of bundle.json.

    `config` holds the architecture's sizes for people (`inspect`); the runtime reads none of it.
    `end_of_turn_ids` is the id sequence that ends an assistant turn: one control id for most
    tokenizers, the bytes of the marker for a byte-level model. Any one of `stop_ids` ends the output too.
    `parity` is the record of the check that the exporter ran.
    """

    architecture: str
    flavour: str
    precision: str
    context_length: int
    vocab_size: int
    kv: KVLayout
    tokenizer: TokenizerInfo
    end_of_turn_ids: list[int]
    dialect: str
    source: SourceInfo
    config: dict[str, Any]
    parity: dict[str, Any]
    files: dict[str, FileInfo] = field(default_factory=dict)
    stop_ids: list[int] = field(default_factory=list)
    format: str = FORMAT
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Bundle:
    """A folder whose manifest was read and whose files are all there with the right sizes.

    `graph` is the graph's file, relative to `path`; `io` says what a foreign one calls its inputs.
    """

    path: Path
    manifest: Manifest
    graph: str = GRAPH
    io: GraphIO | None = None

    @property
    def graph_path(self) -> Path:
        return self.path / self.graph

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Bundle:
        """The bundle in `path`. With `verify`, file contents are hashed too (reads everything).

        Raises BundleError naming the file that is missing, has another size, or another content.
        """
        manifest = read_manifest(path)
        for name, info in manifest.files.items():
            file = path / name
            if not file.is_file():
                raise BundleError(
                    path, f"{name} is missing", "every file of bundle.json", "copy the whole folder"
                )
            nbytes = file.stat().st_size
            if nbytes != info.nbytes:
                raise BundleError(file, f"{nbytes} bytes", f"{info.nbytes} bytes", "export the model again")
            if verify and sha256_file(file) != info.sha256:
                raise BundleError(file, "its SHA-256 is not the one in bundle.json", remedy="export again")
        return cls(path, manifest)


def is_bundle(path: Path) -> bool:
    """Whether `path` is a folder with a posttrainllm manifest, of whatever version."""
    try:
        data = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_manifest(path: Path) -> Manifest:
    """The manifest of the bundle folder `path`. Raises BundleError."""
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BundleError(
            path,
            f"no readable {MANIFEST} ({error.strerror or error})",
            "a folder written by `posttrainllm export-onnx`",
        ) from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(file, f"not JSON ({error})", remedy="export the model again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BundleError(file, "not a posttrainllm manifest", f'"format": "{FORMAT}"')
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise BundleError(
            file,
            f"format version {version!r}",
            f"version {FORMAT_VERSION}",
            "update posttrainllm or export again",
        )
    manifest = _from_json(Manifest, data, f"{file}#")
    _refuse_unknown(manifest, file)
    return manifest


def _refuse_unknown(manifest: Manifest, file: Path) -> None:
    """What another version may write and this one would run wrongly. Raises BundleError."""
    for name, found, known in (
        ("flavour", manifest.flavour, FLAVOURS),
        ("dialect", manifest.dialect, DIALECTS),
        ("kv/style", manifest.kv.style, KV_STYLES),
        ("tokenizer/kind", manifest.tokenizer.kind, TOKENIZER_KINDS),
    ):
        if found not in known:
            raise BundleError(f"{file}#/{name}", repr(found), " or ".join(known), "update posttrainllm")
    kv = manifest.kv
    sizes = (manifest.context_length, manifest.vocab_size, kv.layers, kv.heads, kv.head_dim, kv.padding + 1)
    if min(sizes) < 1:
        raise BundleError(file, "a size below 1", remedy="export the model again")


@contextlib.contextmanager
def staged_bundle(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends well, and vanishes when it does not.
    The block fills the folder and calls `seal`. Files are fsynced before the rename. An existing
    `out` is refused, unless it is a bundle and `force` is set; it then stays in place until the new
    one is complete. Links are followed: what `out` points to is replaced. Raises UsageError.
    """
    refuse_existing(out, force=force)
    out = Path(os.path.realpath(out))  # renaming a folder must not change what a relative path means
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    except OSError as error:
        raise UsageError(out, f"cannot be written ({error.strerror or error})") from None
    try:
        staging.chmod(0o755)
        yield staging
        if not (staging / MANIFEST).is_file():
            raise AssertionError("seal() was not called")
        refuse_existing(out, force=force)
        for file in staging.iterdir():
            fsync(file)
        _swap(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def refuse_existing(out: Path, *, force: bool) -> None:
    """Raises UsageError if `out` exists and may not be replaced."""
    if not os.path.lexists(out):
        return
    if not is_bundle(out):
        raise UsageError(out, "exists and is not a bundle", "a new folder name for --out")
    if not force:
        raise UsageError(out, "exists", "a new folder name for --out", "add --force to replace this bundle")


def seal(staging: Path, manifest: Manifest) -> None:
    """Write bundle.json with the sizes and hashes of the files that stand in `staging`."""
    files = {
        file.name: FileInfo(file.stat().st_size, sha256_file(file))
        for file in sorted(staging.iterdir())
        if file.name != MANIFEST
    }
    data = asdict(manifest) | {"files": {name: asdict(info) for name, info in files.items()}}
    ordered = {"format": data.pop("format"), "format_version": data.pop("format_version")} | data
    text = json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
    (staging / MANIFEST).write_text(text, encoding="utf-8", newline="\n")


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush one file, or (where the system allows) one folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, out: Path) -> None:
    """Put `staging` where `out` is; an old bundle is moved aside first and restored on failure."""
    aside: Path | None = None
    if os.path.lexists(out):
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
        try:
            os.rename(out, aside / out.name)
        except OSError:
            aside.rmdir()
            raise
    try:
        os.rename(staging, out)
    except OSError:
        if aside is not None:
            os.rename(aside / out.name, out)
            aside.rmdir()
        raise
    fsync(out.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


T = TypeVar("T")


def _from_json(kind: type[T], data: object, where: str) -> T:
    """Build the dataclass `kind` from parsed JSON, checking every field's type. Raises BundleError.

    `where` is the file, `#` and the JSON pointer so far.
    """
    if not isinstance(data, Mapping):
        raise BundleError(where, f"found {type(data).__name__}", "an object")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for entry in fields(cast(Any, kind)):
        if entry.name in data:
            values[entry.name] = _value(hints[entry.name], data[entry.name], f"{where}/{entry.name}")
    try:
        return kind(**values)
    except TypeError:
        required = {entry.name for entry in fields(cast(Any, kind))} - values.keys()
        raise BundleError(
            where.removesuffix("#"), f"without {', '.join(sorted(required))}", remedy="export again"
        ) from None


def _value(hint: Any, value: object, where: str) -> object:
    if is_dataclass(hint):
        return _from_json(cast(type[Any], hint), value, where)
    if hint == dict[str, FileInfo]:
        if not isinstance(value, Mapping):
            raise BundleError(where, f"found {type(value).__name__}", "an object")
        for name in value:
            # A manifest must not make us look outside its own folder.
            if not name or Path(name).name != name or name in (".", ".."):
                raise BundleError(where, f"file name {name!r}", "a plain name inside the bundle")
        return {name: _from_json(FileInfo, info, f"{where}/{name}") for name, info in value.items()}
    if hint == list[int]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise BundleError(where, "found something else", "a list of integers")
        return value
    if hint == dict[str, Any]:
        hint = dict
    if type(value) is not hint:
        raise BundleError(where, f"found {type(value).__name__}", cast(type, hint).__name__)
    return value
