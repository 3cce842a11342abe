"""Made-up names, patterns, expressions and file contents. Everything is drawn from the given `Random`.

Invented words matter most: they cannot be learnt by heart, so that copying is the only way to be right.
"""

from __future__ import annotations

from random import Random

from specialist_phrases import table

_LISTS = {name: tuple(text.split()) for name, text in table("words").items()}
WORDS, SMALL_WORDS, FOREIGN, SYMBOLS = (
    _LISTS[name] for name in ("words", "small_words", "foreign", "symbols")
)
EXTENSIONS, COMMON_EXTENSIONS = _LISTS["extensions"], _LISTS["common_extensions"]
PLAIN, FOLDERS, NOUNS = _LISTS["plain"], _LISTS["folders"], _LISTS["nouns"]
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiouaeiouy"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chance(rng: Random, probability: float) -> bool:
    return rng.random() < probability


def invented(rng: Random) -> str:
    """A word that nobody has seen: mostly speakable, now and then just letters."""
    kind = rng.random()
    if kind < 0.15:
        return "".join(rng.choices(LETTERS, k=rng.randint(1, 5)))
    if kind > 0.6:  # halves of known words: the pieces that real words are made of
        one, other = rng.choice(WORDS), rng.choice(WORDS)
        return one[: rng.randint(1, len(one))] + other[rng.randint(0, len(other) - 1) :]
    text = ""
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))):
        text += rng.choice(CONSONANTS) + rng.choice(VOWELS)
        if chance(rng, 0.35):
            text += rng.choice("nrstlmkdpxbg")
    return rng.choice(VOWELS) + text if kind < 0.3 else text


def foreign(rng: Random) -> str:
    """A word with letters beyond ASCII: a known one, or an invented one with some letters exchanged."""
    if chance(rng, 0.5):
        return rng.choice(FOREIGN)
    letters = list(invented(rng))
    letters[rng.randrange(len(letters))] = rng.choice(
        "áàâäãåæçéèêëíîïñóòôöõøúùûüýßşščžłđğőűабвгдежзиклмноαβγδλπσω日本文字数"
    )
    return "".join(letters)


def word(rng: Random) -> str:
    """One word of a name."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(WORDS)
    return invented(rng) if kind < 0.94 else foreign(rng)


def number(rng: Random) -> str:
    """A whole number of one to six digits, short ones more often; some round or repetitive, which is hard to copy."""
    kind = rng.random()
    if kind < 0.12:
        return f"{rng.randint(1, 99)}{'0' * rng.randint(1, 4)}"
    if kind < 0.18:
        digits = rng.sample("0123456789", 2)
        return rng.choice("123456789") + "".join(rng.choices(digits, k=rng.randint(1, 5)))
    return str(rng.randint(0, 10 ** rng.choice((1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6))))


def day(rng: Random) -> str:
    return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 31):02d}"


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def stem(rng: Random) -> str:
    """The name of a file without its extension."""
    if chance(rng, 0.05):
        return _with_small_words(rng)
    kind = rng.random()
    if kind < 0.34:
        text = word(rng)
    elif kind < 0.84:
        words = [word(rng) for _ in range(rng.choice((2, 2, 2, 3)))]
        if chance(rng, 0.2):
            words.insert(
                rng.randrange(len(words) + 1),
                rng.choice(
                    (
                        number(rng),
                        day(rng),
                        f"v{rng.randint(1, 20)}",
                        str(rng.randint(1, 9)),
                        f"{rng.randint(1, 199):04d}",
                    )
                ),
            )
        style = rng.random()
        if style < 0.2:
            text = words[0] + "".join(part.capitalize() for part in words[1:])
            text = text[:1].upper() + text[1:] if chance(rng, 0.4) else text
        else:
            text = rng.choice("__---.  ").join(words) if style < 0.9 else "".join(words)
    elif kind < 0.94:
        text = (
            word(rng)
            + rng.choice(("", "", "_", "-"))
            + rng.choice(
                (
                    number(rng),
                    day(rng),
                    f"v{rng.randint(1, 9)}.{rng.randint(0, 20)}",
                    f"{rng.randint(1, 99):03d}",
                )
            )
        )
    else:
        text = rng.choice((number(rng), day(rng), rng.choice(LETTERS), f"~{word(rng)}",
            f"{word(rng)} ({rng.randint(1, 9)})", f"{word(rng)}+{word(rng)}", f"{word(rng)}@{number(rng)}",
            f"-{word(rng)}", f"#{word(rng)}#", f"{word(rng)}'s {word(rng)}", f"{word(rng)}, {word(rng)}",
            f"{word(rng)} & {word(rng)}", f"[{word(rng)}]", f"{word(rng)}={number(rng)}",
            f"_{word(rng)}"))  # fmt: skip
    shape = rng.random()
    return text.upper() if shape < 0.05 else text.capitalize() if shape < 0.15 else text


def _with_small_words(rng: Random) -> str:
    """A name of words that could also belong to the request around it."""
    separator = rng.choice("   _-")
    first = rng.choice(
        ("my", "the", "our", "file", "folder", "this", "new", "old", "a", "all", "first", "last", "your")
    )
    forms = (
        (first, word(rng)), (first, word(rng)), (first, word(rng), word(rng)), (word(rng), "of", word(rng)),
        (word(rng), f"v{rng.randint(1, 9)}"), (word(rng), word(rng), f"(v{rng.randint(1, 9)})"), (word(rng), str(rng.randint(1, 99))),
        (word(rng), "and", word(rng)), (word(rng), "for", word(rng)), (word(rng), f"({word(rng)})"), (word(rng), "copy"),
        (word(rng), "in", word(rng)), ("to", word(rng)), (word(rng), "lines"), (word(rng), "words"), (word(rng), "size"), ("how", "to", word(rng)),
        ("read", "me"), (word(rng), "final", "final"), ("copy", "of", word(rng)),
    )  # fmt: skip
    text = separator.join(rng.choice(forms))
    return text.capitalize() if chance(rng, 0.2) else text


def file_name(rng: Random) -> str:
    """The last part of a path."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(PLAIN)
    if kind < 0.12:
        return stem(rng)
    if kind < 0.14:
        return "." + word(rng) + rng.choice(("", "rc", "_history"))
    extension = rng.choice(COMMON_EXTENSIONS) if chance(rng, 0.45) else rng.choice(EXTENSIONS)
    if chance(rng, 0.06):
        extension = invented(rng)[:4]
    return f"{stem(rng)}.{extension}"


def family(rng: Random, count: int) -> list[str]:
    """Names that have much in common, as the files of one folder often do."""
    base, extension, separator = word(rng), rng.choice(EXTENSIONS), rng.choice("_-. ")
    first = rng.randint(1, 90)
    kind = rng.random()
    if kind < 0.4:
        return [f"{base}{separator}{first + index:02d}.{extension}" for index in range(count)]
    if kind < 0.7:
        return [f"{base}{separator}{word(rng)}.{extension}" for _ in range(count)]
    return [f"{first + index:04d}{separator}{word(rng)}.{extension}" for index in range(count)]


def folder_name(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.32:
        return rng.choice(FOLDERS)
    if kind < 0.42:
        return f"{word(rng)} {rng.choice((word(rng), str(rng.randint(1, 30)), f'v{rng.randint(1, 9)}'))}"
    return word(rng) if kind < 0.8 else stem(rng)


def folder(rng: Random) -> str:
    """A folder's path, sometimes with a slash at its end."""
    parts = [folder_name(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3)))]
    return _root(rng) + "/".join(parts) + ("/" if chance(rng, 0.2) else "")


def file_path(rng: Random) -> str:
    """A file's path of up to three folders."""
    parts = [folder_name(rng) for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 1, 2, 2, 3)))]
    return _root(rng) + "/".join([*parts, file_name(rng)])


def _root(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.84:
        return ""
    return rng.choice(
        (
            "./",
            "./",
            "../",
            "../",
            "../../",
            "/",
            "/",
            "/etc/",
            "/tmp/",
            "/home/" + word(rng) + "/",
            "~/",
            "~/",
            "/var/log/",
        )
    )


def identifier(rng: Random) -> str:
    words = [word(rng) for _ in range(rng.choice((1, 2, 2)))]
    return rng.choice(
        (
            "_".join(words),
            words[0] + "".join(part.capitalize() for part in words[1:]),
            "".join(part.capitalize() for part in words),
            "_".join(words).upper(),
        )
    )


def pattern(rng: Random) -> str:
    """What one searches for."""
    kind = rng.random()
    if kind < 0.34:
        text = word(rng)
        return text.capitalize() if chance(rng, 0.25) else text
    if kind < 0.42:
        return rng.choice(
            (
                "TODO",
                "FIXME",
                "XXX",
                "HACK",
                "BUG",
                "NOTE",
                "ERROR",
                "WARNING",
                "DEBUG",
                "None",
                "null",
                "true",
                "NaN",
                "main",
                "import",
                "return",
                "def",
                "class",
            )
        )
    if kind < 0.62:
        return identifier(rng)
    if kind < 0.80:
        return phrase(rng, rng.choice((2, 2, 2, 3, 3, 4)))
    if kind < 0.87:
        return rng.choice(
            (
                number(rng),
                day(rng),
                clock(rng),
                f"{number(rng)}.{number(rng)}",
                f"v{rng.randint(1, 9)}.{rng.randint(0, 30)}",
                f"#{number(rng)}",
            )
        )
    name = identifier(rng)
    return rng.choice((f"def {name}", f"class {name}", f"import {name}", f"{name}()", f"{name}(",
        f"{name} = {number(rng)}", f"{name}=", f"{name}:", f"self.{name}", f"{word(rng)}.{name}",
        f"<{word(rng)}>", f"--{word(rng)}", f"${name}", f"@{word(rng)}", f"{word(rng)}@{word(rng)}.com",
        f"{word(rng)}-{word(rng)}", f"// {word(rng)}", f"[{word(rng)}]", f"{word(rng)}'s", f"{name};",
        f"#include <{word(rng)}.h>", f"{word(rng)} -> {word(rng)}", f"{word(rng)}*", f"{number(rng)}%",
        f"{word(rng)}/{word(rng)}", f"return {name}", f"{word(rng)}\\{word(rng)}",
        f'{word(rng)} "{word(rng)}"'))  # fmt: skip


def phrase(rng: Random, count: int) -> str:
    """Some words of a text."""
    words = [rng.choice(SMALL_WORDS) if chance(rng, 0.3) else word(rng) for _ in range(count)]
    return " ".join(words)


def sentence(rng: Random) -> str:
    text = phrase(rng, rng.randint(2, 11) if chance(rng, 0.75) else rng.randint(9, 20))
    if chance(rng, 0.15):
        text = text.replace(" ", ", ", 1)
    if chance(rng, 0.06):
        text += rng.choice(
            (f" from {clock(rng)} to {clock(rng)}", f" on {day(rng)} and {day(rng)}", f", {text}")
        )
    if chance(rng, 0.1):
        text += " " + rng.choice((number(rng), day(rng), clock(rng), rng.choice(SYMBOLS)))
    return (text[:1].upper() + text[1:] if chance(rng, 0.75) else text) + rng.choice(
        ("", ".", ".", ".", "!", "?", ":")
    )


def line(rng: Random) -> str:
    """A line as it stands in some file."""
    kind = rng.random()
    if kind < 0.5:
        return sentence(rng)
    name, other = identifier(rng), word(rng)
    return rng.choice((f"- {phrase(rng, rng.randint(1, 4))}",
        f"{rng.randint(1, 12)}. {phrase(rng, rng.randint(1, 5))}", f"* {phrase(rng, 2)}",
        f"[ ] {phrase(rng, 3)}", f"# {phrase(rng, rng.randint(1, 4))}", f"## {word(rng).capitalize()}",
        f"{name} = {number(rng)}", f"{name}: {other}", f"{name}={other}", f'{name} = "{other}"',
        f"{other},{number(rng)},{word(rng)}", f"{other};{number(rng)}", f"import {other}",
        f"from {other} import {name}", f"def {name}({other}):", f"    return {name}",
        f"# {rng.choice(('TODO', 'FIXME'))}: {phrase(rng, 3)}",
        f"{day(rng)} {clock(rng)} {rng.choice(('INFO', 'ERROR', 'WARN'))} {phrase(rng, 3)}",
        f'{{"{other}": {number(rng)}}}', f'{{"{other}": "{word(rng)}"}}', f"<{other}>{word(rng)}</{other}>",
        f"{other}\t{number(rng)}", f"{other} -> {word(rng)}", f"{name}();", f"let {name} = {number(rng)};",
        f"{word(rng)}@{other}.org", f"{number(rng)}", f"{other}", f"$ {other} --{word(rng)}",
        f"{other} {rng.choice(SYMBOLS)}", f"127.0.0.1 {other}",
        f"{other}:x:{number(rng)}:{number(rng)}::/home/{other}:/bin/sh",
        f"C:\\{other}\\{word(rng)}"))  # fmt: skip


def text(rng: Random, lines: int) -> str:
    """The beginning of some file, without a newline at its end."""
    return "\n".join(
        "" if chance(rng, 0.06) and 0 < index < lines - 1 else line(rng) for index in range(lines)
    )
