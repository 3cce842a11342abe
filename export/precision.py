"""What a graph stores its weights as: the words after --precision, and the recipe that they stand for.

int8                          8 bits, blocks of 64
int4                          4 bits, blocks of 32; what loses most by that gets 8, blocks of 64 (DEFAULT_PARTS)
int4:64,all=int4              4 bits everywhere, blocks of 64
int8,embed_tokens=fp32        a part by itself: the last word of its module's name, or `all`
keep                          a GGUF's own blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..runtime.errors import UsageError
from .checkpoint import Checkpoint
from .kept import Kept, OnceRounded
from .quantised import BlockSource, Rounded, oriented
from .quantize import Scheme

PRECISIONS = ("fp32", "fp16", "int8", "int4", "keep")
_BLOCKS = (32, 64, 128)
_SCHEMES: Mapping[str, Scheme | None] = {
    "fp32": None,
    "int8": Scheme(8, 32, symmetric=True, search=False),
    "int4": Scheme(4, 32),
}
# Measured on SmolLM2-135M (docs/decisions/0010): the table and what writes to the residual stream or is shared by many heads.
_EIGHT = ("embed_tokens", "lm_head", "k_proj", "v_proj", "o_proj", "down_proj")
DEFAULT_PARTS: Mapping[str, Mapping[str, Scheme | None]] = {
    "int4": dict.fromkeys(_EIGHT, Scheme(8, 64, symmetric=True, search=False)),
}
PARTS = (
    "embed_tokens",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True)
class Recipe:
    """A precision with its exceptions: `text` as it was asked for, `parts` by the last word of a module's name."""

    precision: str
    text: str
    scheme: Scheme | None = None
    parts: Mapping[str, Scheme | None] = field(default_factory=dict)

    @property
    def quantises(self) -> bool:
        """Whether any weight is rounded or kept in blocks."""
        return self.precision == "keep" or any([self.scheme, *self.parts.values()])

    def of(self, tensor: str) -> Scheme | None:
        """How `tensor` is rounded; None where it is not."""
        module, _, kind = tensor.rpartition(".")
        part = module.rpartition(".")[2]
        if kind != "weight" or part not in PARTS:
            return None
        return self.parts.get(part, self.scheme)


def parse_precision(text: str) -> Recipe:
    """The recipe of `text`, the value of --precision. Raises UsageError."""
    first, *exceptions = text.split(",")
    name, scheme = _scheme(first, text)
    parts = dict(DEFAULT_PARTS.get(name, {}))
    for exception in exceptions:
        part, equals, wanted = exception.partition("=")
        if not equals or part not in (*PARTS, "all"):
            raise _refuse(text, f"{exception!r}", f"PART=PRECISION, with PART one of all, {', '.join(PARTS)}")
        if name in ("fp16", "keep"):
            raise _refuse(text, f"{name} has no parts", "fp32, int8 or int4 before the parts")
        kind, other = _scheme(wanted, text)
        if kind not in _SCHEMES:
            raise _refuse(text, f"{wanted!r} of a part", f"one of {', '.join(_SCHEMES)}")
        parts |= dict.fromkeys(PARTS, other) if part == "all" else {part: other}
    return Recipe(name, text, scheme, parts)


def default_precision(checkpoint: Checkpoint) -> str:
    """What is written when nobody asks: a `.tinygpt` and a source in blocks as they are, others in 8 bits."""
    if checkpoint.format.startswith("tinygpt"):
        return "fp32"
    return "keep" if any(checkpoint.block_type(name) for name in checkpoint.shapes) else "int8"


def block_source(recipe: Recipe, checkpoint: Checkpoint, *, independent: bool = False) -> BlockSource | None:
    """Where the quantised weights of `recipe` come from; None when there are none.

    `independent` ones orient linear weights from their stored order, as the reference does. Raises UsageError where
    the recipe asks for what the checkpoint lacks.
    """
    if not recipe.quantises:
        return None
    subject = f"--precision {recipe.text}"
    if recipe.precision == "keep":
        if not any(checkpoint.block_type(name) for name in checkpoint.shapes):
            raise UsageError(subject, f"{checkpoint.path} holds plain floats", "fp32, fp16, int8 or int4")
        return Kept(checkpoint)
    if checkpoint.config.tied_head and "lm_head=" in recipe.text:
        raise UsageError(subject, "the head of this model is its token table", "embed_tokens=PRECISION")
    read = (lambda name: oriented(checkpoint, name)) if independent else checkpoint.tensor
    return OnceRounded(Kept(checkpoint), Rounded(checkpoint, recipe.of, read))


def _scheme(text: str, whole: str) -> tuple[str, Scheme | None]:
    """The precision that `text` names, and its scheme with the block that it names."""
    name, colon, block = text.partition(":")
    if name not in PRECISIONS:
        raise _refuse(whole, repr(name), f"one of {', '.join(PRECISIONS)}")
    scheme = _SCHEMES.get(name)
    if not colon:
        return name, scheme
    if scheme is None or block not in map(str, _BLOCKS):
        raise _refuse(whole, repr(text), f"int8 or int4 with a block of {', '.join(map(str, _BLOCKS))}")
    return name, Scheme(scheme.bits, int(block), scheme.symmetric, scheme.search)


def _refuse(text: str, found: str, expected: str) -> UsageError:
    return UsageError(f"--precision {text}", found, expected)
