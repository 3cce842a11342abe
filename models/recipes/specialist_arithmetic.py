"""Expressions to calculate, in symbols and in words."""

from __future__ import annotations

from random import Random

from specialist_names import chance, number
from specialist_phrases import expand, table

_SPOKEN = {kind: tuple(map(tuple, pairs)) for kind, pairs in table("calculate")["spoken"].items()}


def operand(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.8:
        return number(rng)
    if kind < 0.82:
        return f".{rng.randint(1, 999)}"
    if kind < 0.86:
        return f"{rng.randint(1, 999)}.{rng.randint(0, 99):02d}"
    return f"{rng.randint(0, 10 ** rng.randint(1, 3))}.{rng.randint(0, 10 ** rng.randint(1, 3))}"


def expression(rng: Random) -> str:
    """An expression in symbols, mostly spaced one way throughout."""
    space = rng.choice((" ", " ", "", "", "mixed") if chance(rng, 0.4) else (" ", " ", ""))
    signs = 0.25 if chance(rng, 0.15) else 0.03
    text = _sum(rng, space, signs, rng.choice((2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7)))
    if chance(rng, 0.05):
        text = (
            f"({text})"
            if chance(rng, 0.5)
            else f"({text}){_space(rng, space)}{rng.choice('+-*/')}{_space(rng, space)}{operand(rng)}"
        )
    return text


def _space(rng: Random, space: str) -> str:
    return rng.choice(("", " ")) if space == "mixed" else space


def _sum(rng: Random, space: str, signs: float, count: int) -> str:
    text = ""
    for index in range(count):
        if index:
            operator = rng.choice("++++----****////" if chance(rng, 0.95) else "×÷−")
            text += _space(rng, space) + operator + _space(rng, space)
        if count < 5 and chance(rng, 0.14):
            inner = _sum(rng, space, signs, rng.choice((2, 2, 2, 3)))
            padding = " " if chance(rng, 0.06) else ""
            text += ("-" if chance(rng, signs) else "") + f"({padding}{inner}{padding})"
        else:
            text += ("-" if chance(rng, signs) else "") + operand(rng)
    return text


def spoken(rng: Random, kind: str = "phrases") -> tuple[str, str]:
    """(in words, the expression it means): `phrases` fit after "what is", `orders` after "please", `whole` stand alone."""
    said, meant = rng.choice(_SPOKEN[kind])
    values = {letter: operand(rng) for letter in "abc"}
    return expand(said, rng).format(**values), meant.format(**values)
