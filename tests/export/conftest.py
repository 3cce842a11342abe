"""`.tinygpt` files made by hand, byte by byte, and a decoder in plain Python to hold them against.

Independent of the package's writer, reader and NumPy reference: what a test of those is decided by.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]


@dataclass
class HandMade:
    """A file in parts, to be altered before `save`. `tensors` are the logical weights."""

    header: dict[str, Any]
    body: bytes
    tensors: Tensors
    magic: bytes = b"TGPT"
    version: int = 2
    step: int = 7
    header_nbytes: int | None = None  # what the file claims, where it lies

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.header["config"]
        return config

    @property
    def manifest(self) -> list[dict[str, Any]]:
        manifest: list[dict[str, Any]] = self.header["manifest"]
        return manifest

    def to_bytes(self, header: bytes | None = None) -> bytes:
        text = json.dumps(self.header).encode() if header is None else header
        claimed = len(text) if self.header_nbytes is None else self.header_nbytes
        return (
            self.magic
            + struct.pack("<II", self.version, claimed)
            + text
            + struct.pack("<i", self.step)
            + self.body
        )

    def save(self, folder: Path, header: bytes | None = None) -> Path:
        path = folder / "hand.tinygpt"
        path.write_bytes(self.to_bytes(header))
        return path


def weights(vocab: int, width: int, layers: int, middle: int, ctx: int, seed: int) -> Tensors:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.6).astype(np.float16).astype(np.float32)

    tensors = {"token_embedding.weight": draw(vocab, width), "position_embedding.weight": draw(ctx, width)}
    tensors |= {"ln_final.weight": 1 + draw(width), "ln_final.bias": draw(width)}
    for i in range(layers):
        block = f"blocks.{i}"
        for norm in ("ln1", "ln2"):
            tensors |= {f"{block}.{norm}.weight": 1 + draw(width), f"{block}.{norm}.bias": draw(width)}
        for letter in "qkvo":
            tensors[f"{block}.attn.{letter}_proj.weight"] = draw(width, width)
            tensors[f"{block}.attn.{letter}_proj.bias"] = draw(width)
        tensors |= {f"{block}.mlp.fc_in.weight": draw(middle, width), f"{block}.mlp.fc_in.bias": draw(middle)}
        tensors |= {
            f"{block}.mlp.fc_out.weight": draw(width, middle),
            f"{block}.mlp.fc_out.bias": draw(width),
        }
    return {name: tensor.astype(np.float16).astype(np.float32) for name, tensor in tensors.items()}


def stored_bytes(name: str, tensor: NDArray[np.float32], layout: str) -> bytes:
    """One tensor of a body: linear weights column by column, then whatever the moments may be."""
    values = tensor.ravel(order="F") if tensor.ndim == 2 and "embedding" not in name else tensor.ravel()
    if layout == "fp16":
        return struct.pack(f"<{values.size}e", *values.tolist())
    plain = struct.pack(f"<{values.size}f", *values.tolist())
    garbage = struct.pack("<2f", math.nan, -math.inf) * values.size
    return plain + garbage if layout == "fp32" else plain


def hand_made(tensors: Tensors, *, heads: int, layout: str = "fp32", offsets: bool = False) -> HandMade:
    manifest: list[dict[str, Any]] = []
    element = 0
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape)}
        manifest.append(entry | ({"floatOffset": element} if offsets else {}))
        element += tensor.size
    ctx, width = tensors["position_embedding.weight"].shape
    config = {
        "layers": sum(name.endswith("ln1.bias") for name in tensors),
        "dModel": width,
        "ctx": ctx,
        "heads": heads,
        "dMlp": tensors["blocks.0.mlp.fc_in.bias"].size,
        "vocabSize": len(tensors["token_embedding.weight"]),
    }
    header = {
        "config": config,
        "manifest": manifest,
        "weightDtype": "fp16" if layout == "fp16" else "fp32",
        "includesOptimizerState": layout == "fp32",
    }
    body = b"".join(stored_bytes(name, tensor, layout) for name, tensor in tensors.items())
    return HandMade(header, body, tensors)


@pytest.fixture(scope="session")
def make_file() -> Callable[..., HandMade]:
    """make_file(layout=, offsets=, shuffle=, tensors=, vocab=, width=, heads=, layers=, middle=, ctx=, seed=) -> HandMade.

    The defaults avoid every convenient number: 11 ids, 2 heads of 3, an MLP of 5, odd context.
    """

    def make(
        *,
        layout: str = "fp32",
        offsets: bool = False,
        shuffle: bool = False,
        tensors: Tensors | None = None,
        vocab: int = 11,
        width: int = 6,
        heads: int = 2,
        layers: int = 2,
        middle: int = 5,
        ctx: int = 9,
        seed: int = 1,
    ) -> HandMade:
        items = list((tensors or weights(vocab, width, layers, middle, ctx, seed)).items())
        if shuffle:
            random.Random(seed).shuffle(items)
        return hand_made(dict(items), heads=heads, layout=layout, offsets=offsets)

    return make


def plain_logits(
    tensors: Mapping[str, NDArray[np.float32]], heads: int, ids: list[int], first: int = 0
) -> Any:
    """Logits [n][vocab] by the format's own text, in Python floats and lists."""
    lists = {name: tensor.astype(float).tolist() for name, tensor in tensors.items()}
    table, places = lists["token_embedding.weight"], lists["position_embedding.weight"]
    x = [[a + b for a, b in zip(table[token], places[first + t], strict=True)] for t, token in enumerate(ids)]
    for i in range(sum(name.endswith("ln1.bias") for name in tensors)):
        block = {
            name.removeprefix(f"blocks.{i}."): value
            for name, value in lists.items()
            if name.startswith(f"blocks.{i}.")
        }
        x = [
            _plus(row, out)
            for row, out in zip(x, _attention([_norm(r, block, "ln1") for r in x], block, heads), strict=True)
        ]
        x = [_plus(row, _mlp(_norm(row, block, "ln2"), block)) for row in x]
    return [[_dot(_norm(row, lists, "ln_final"), token) for token in table] for row in x]


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _plus(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _linear(x: list[float], weights: dict[str, Any], name: str) -> list[float]:
    return _plus([_dot(row, x) for row in weights[f"{name}.weight"]], weights[f"{name}.bias"])


def _norm(x: list[float], weights: dict[str, Any], name: str) -> list[float]:
    mean = math.fsum(x) / len(x)
    variance = math.fsum((value - mean) ** 2 for value in x) / len(x)
    gains, shifts = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return [(v - mean) / math.sqrt(variance + 1e-5) * g + s for v, g, s in zip(x, gains, shifts, strict=True)]


def _attention(rows: list[list[float]], weights: dict[str, Any], heads: int) -> list[list[float]]:
    size = len(rows[0]) // heads
    q, k, v = ([_linear(row, weights, f"attn.{letter}_proj") for row in rows] for letter in "qkv")
    out = []
    for t in range(len(rows)):
        mixed: list[float] = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            weight = [math.exp(_dot(q[t][part], k[s][part]) / math.sqrt(size)) for s in range(t + 1)]
            mixed += [
                math.fsum(w * v[s][c] for s, w in enumerate(weight)) / math.fsum(weight)
                for c in range(part.start, part.stop)
            ]
        out.append(_linear(mixed, weights, "attn.o_proj"))
    return out


def _mlp(x: list[float], weights: dict[str, Any]) -> list[float]:
    inner = _linear(x, weights, "mlp.fc_in")
    return _linear([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in inner], weights, "mlp.fc_out")


@pytest.fixture(scope="session")
def plain() -> Callable[..., Any]:
    """plain(tensors, heads, ids, first=0) -> logits as lists: the decider."""
    return plain_logits


@pytest.fixture(scope="session")
def tokenizer_files() -> Callable[[Path], None]:
    """Writes a byte-level tokenizer of 260 ids into a folder, as transformers would; 259 ends a turn."""

    def write(folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        markers = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    return write
