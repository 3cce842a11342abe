"""Model folders that we did not write: onnxruntime-genai's, and the one of optimum and transformers.js.

    genai_config.json, model.onnx            onnxruntime-genai's builder; the file names the graph's inputs
    config.json, onnx/model.onnx, …          `onnx-community`: a graph for each precision, or one beside config.json

Everything comes from these files and from the graph: what neither says is an error, never a guess. Where there
are several graphs, the path of one of them is the name of the model. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .bundle import MANIFEST, TOKENIZER, Bundle, FileInfo, KVLayout, Manifest, SourceInfo, TokenizerInfo
from .chat_template import find_source
from .errors import BundleError
from .graph_io import Foreign, Names, precision
from .onnx_file import OnnxGraph, read_graph

GENAI = "genai_config.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length")
_MAX_NBYTES = 256 << 20


@dataclass(frozen=True)
class _Facts:
    """What a folder's configuration files say; None is for what they do not."""

    writer: str
    architecture: str
    context_length: int | None
    vocab_size: int | None
    kv_heads: int | None
    head_dim: int | None
    end_ids: list[int]
    names: Names


def open_model_folder(path: Path, *, verify: bool = False) -> Bundle:
    """The bundle in `path`, ours or a foreign one; `path` may also be an .onnx file of a foreign one.

    With `verify` the hashes of our own are checked; a foreign one has none. Raises BundleError.
    """
    if path.is_dir() and (path / MANIFEST).exists():
        return Bundle.open(path, verify=verify)
    found = find_foreign(path)
    if found is None:
        return Bundle.open(path)  # which says what is missing
    return _open(*found)


def find_foreign(path: Path) -> tuple[Path, Path] | None:
    """Folder and graph of a foreign model; None if `path` is no such thing.

    Raises BundleError if it is one, and it is not clear which of its graphs is meant.
    """
    if path.is_file():
        if path.suffix != ".onnx":
            return None
        for folder in (path.parent, path.parent.parent):
            if (folder / MANIFEST).exists():
                return None
            if (folder / GENAI).is_file() or (folder / CONFIG).is_file():
                return folder, path
        return None
    if (path / GENAI).is_file():
        return path, path / _decoder(_read(path / GENAI), path / GENAI)
    if not (path / CONFIG).is_file():
        return None
    graphs = [*sorted(path.glob("*.onnx")), *sorted((path / "onnx").glob("*.onnx"))]
    if not graphs:
        return None
    if len(graphs) > 1 and not _read(path / CONFIG).get("is_encoder_decoder"):  # which `_open` refuses
        names = ", ".join(graph.relative_to(path).as_posix() for graph in graphs)
        raise BundleError(path, f"{len(graphs)} graphs ({names})", "one", f"give its path: {graphs[0]}")
    return path, graphs[0]


def _open(folder: Path, file: Path) -> Bundle:
    facts = _genai(folder) if (folder / GENAI).is_file() else _community(folder)
    if facts.context_length is None:
        raise BundleError(
            folder, "no configuration file states the context length", f"one of {', '.join(_CONTEXT)}"
        )
    graph = read_graph(file)
    sizes = {"kv_heads": facts.kv_heads, "head_dim": facts.head_dim, "vocab_size": facts.vocab_size}
    io, kv, vocab_size = Foreign(graph, facts.names, **sizes).describe()
    manifest = _manifest(folder, graph, facts, facts.context_length, kv, vocab_size)
    return Bundle(folder, manifest, graph=file.relative_to(folder).as_posix(), io=io)


def _manifest(
    folder: Path, graph: OnnxGraph, facts: _Facts, context_length: int, kv: KVLayout, vocab_size: int
) -> Manifest:
    ends = [token for token in facts.end_ids if 0 <= token < vocab_size]
    return Manifest(
        architecture=facts.architecture,
        flavour=facts.writer,
        precision=precision(graph),
        context_length=context_length,
        vocab_size=vocab_size,
        kv=kv,
        tokenizer=_tokenizer(folder),
        end_of_turn_ids=ends[:1],
        stop_ids=ends,
        dialect="plain" if find_source(folder) is None else "chat_template",
        source=SourceInfo(graph.path.name, graph.producer or facts.writer, ""),
        config={
            "opsets": {name or "ai.onnx": version for name, version in graph.opsets.items()},
            "nodes": len(graph.nodes),
            "tensors": _tensors(graph),
        },
        parity={},
        files=_files(folder, graph),
    )


def _files(folder: Path, graph: OnnxGraph) -> dict[str, FileInfo]:
    """Sizes of what makes up the model. Nobody wrote down hashes that could be checked."""
    files = [graph.path, *(graph.path.parent / name for name in graph.external_files), folder / TOKENIZER]
    return {
        file.relative_to(folder).as_posix(): FileInfo(file.stat().st_size, "")
        for file in files
        if file.is_file()
    }


def _tensors(graph: OnnxGraph) -> dict[str, str]:
    return {tensor.name: f"{tensor.dtype}{list(tensor.shape)}" for tensor in graph.tensors}


def _genai(folder: Path) -> _Facts:
    """onnxruntime-genai's own configuration."""
    file = folder / GENAI
    config = _read(file)
    model = _section(config, "model", file)
    decoder = _section(model, "decoder", file)
    for part in ("encoder", "vision", "speech", "embedding"):
        if model.get(part):
            raise BundleError(file, f"a model with a part called {part}", "a decoder of text alone")
    if decoder.get("pipeline"):
        raise BundleError(file, "a decoder cut into a pipeline", "a single graph")
    inputs, outputs = decoder.get("inputs") or {}, decoder.get("outputs") or {}
    given = {
        "ids": inputs.get("input_ids"),
        "mask": inputs.get("attention_mask"),
        "positions": inputs.get("position_ids"),
        "past_key": inputs.get("past_key_names"),
        "past_value": inputs.get("past_value_names"),
        "present_key": outputs.get("present_key_names"),
        "present_value": outputs.get("present_value_names"),
        "logits": outputs.get("logits"),
    }
    assert set(given) == {entry.name for entry in fields(Names)}
    return _Facts(
        writer="genai",
        architecture=str(model.get("type", "unknown")),
        context_length=_integer(model, "context_length"),
        vocab_size=_integer(model, "vocab_size"),
        kv_heads=_integer(decoder, "num_key_value_heads"),
        head_dim=_integer(decoder, "head_size"),
        end_ids=_end_ids(folder, _ids(model.get("eos_token_id"))),
        names=Names(**{name: value for name, value in given.items() if isinstance(value, str)}),
    )


def _community(folder: Path) -> _Facts:
    """config.json and generation_config.json as transformers writes them."""
    file = folder / CONFIG
    config = _read(file)
    if config.get("is_encoder_decoder"):
        raise BundleError(file, "an encoder-decoder", "a decoder of text alone")
    heads = _integer(config, "num_attention_heads") or _integer(config, "n_head")
    hidden = _integer(config, "hidden_size") or _integer(config, "n_embd")
    generation = _read(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return _Facts(
        writer="optimum",
        architecture=str(config.get("model_type", "unknown")),
        context_length=next((size for key in _CONTEXT if (size := _integer(config, key))), None),
        vocab_size=_integer(config, "vocab_size"),
        kv_heads=_integer(config, "num_key_value_heads") or heads,
        head_dim=_integer(config, "head_dim") or (hidden // heads if hidden and heads else None),
        end_ids=_end_ids(folder, ends),
        names=Names(),
    )


def _end_ids(folder: Path, listed: list[int]) -> list[int]:
    """Once each, the tokenizer's own end first: it is what ends a turn where a list has several."""
    return list(dict.fromkeys([*_tokenizer_end(folder), *listed]))


def _tokenizer_end(folder: Path) -> list[int]:
    """The id of tokenizer_config.json's `eos_token`; empty if there is none, or no way to know."""
    file = folder / TOKENIZER_CONFIG
    config = _read(file) if file.is_file() else {}
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if not isinstance(text, str):
        return []
    return [token for token, content in _added(folder, config) if content == text][:1]


def _added(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Id and text of the added tokens: tokenizer_config.json has them in most folders, tokenizer.json in all."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for number, entry in listed.items():
            if isinstance(entry, dict) and number.isdecimal():
                yield int(number), str(entry.get("content"))
    elif (folder / TOKENIZER).is_file():
        for entry in _read(folder / TOKENIZER).get("added_tokens") or ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), int):
                yield entry["id"], str(entry.get("content"))


def _tokenizer(folder: Path) -> TokenizerInfo:
    file = folder / TOKENIZER
    if not file.is_file():
        return TokenizerInfo("missing", "", str(file))
    return TokenizerInfo("tokenizers", hashlib.sha256(file.read_bytes()).hexdigest(), TOKENIZER)


def _decoder(config: Mapping[str, Any], file: Path) -> str:
    name = _section(_section(config, "model", file), "decoder", file).get("filename")
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise BundleError(file, f"decoder file {name!r}", "a file name inside the folder")
    return name


def _section(config: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise BundleError(file, f"without {name}", "a configuration that onnxruntime-genai can read")
    return section


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_NBYTES:
            raise BundleError(file, f"{file.stat().st_size:,} bytes", f"at most {_MAX_NBYTES:,}")
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise BundleError(file, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(file, f"not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BundleError(file, f"found {type(data).__name__}", "an object")
    return data


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value > 0 else None


def _ids(value: object) -> list[int]:
    """`eos_token_id`: an id, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int and token >= 0]
