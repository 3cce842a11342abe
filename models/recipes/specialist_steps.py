"""Exchanges of more than one call, and ones that lean on the exchange before; None where the offer lacks a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import specialist_arithmetic as arithmetic
import specialist_names as names
import specialist_phrases as phrases
from specialist_names import chance
from specialist_phrases import expand
from specialist_requests import ABOUT_A_FILE
from specialist_results import Outcome, answer, fact
from specialist_scene import NO_TOOL_ANSWER, Exchange, Scene
from specialist_wording import fill, mood_text, quoted, quoted_pattern, styled, surrounded

ASK_IT = {
    "count_lines": ("how many lines does it have", "how many lines are in it"),
    "count_words": ("how many words does it have", "how many words are in it"),
    "file_size": ("how big is it", "how large is it", "what is its size"),
    "file_date": ("when was it last changed", "when was it edited", "how old is it"),
}


def _steps(
    scene: Scene,
    request: str,
    wanted: Sequence[tuple[str, Mapping[str, str]]],
    said: Callable[[list[str]], str],
) -> Exchange:
    """Call after call; the first failure ends it."""
    steps, outs = [], []
    for tool, given in wanted:
        outcome = scene.run(tool, given, 0.06)
        steps.append(scene.call(tool, given, outcome))
        if outcome.exit_code:
            return Exchange(request, tuple(steps), answer(tool, given, outcome))
        outs.append(outcome.stdout)
    return Exchange(request, tuple(steps), said(outs))


def pair(scene: Scene) -> Exchange | None:
    """Two properties of one file."""
    rng = scene.rng
    present = [tool for tool in phrases.PROPERTY if scene.has(tool)]
    if len(present) < 2:
        return None
    one, two = rng.sample(present, 2)
    counts = {one, two} == {"count_lines", "count_words"}
    kind = rng.random()
    if counts and kind < 0.5:
        text, table = (
            rng.choice(phrases.STEPS["lines_and_words"]),
            {tool: (tool.removeprefix("count_"),) for tool in (one, two)},
        )
        text = text + " have" if "|does)" in text else text
        text = text.replace("(are in|does) {F} have", "(are in {F}|does {F} have)")
    elif kind < 0.7:
        text, table = rng.choice(phrases.STEPS["pair"]), phrases.PROPERTY
    else:
        text, table = rng.choice(phrases.STEPS["pair_clauses"]), phrases.CLAUSE
    text = text.replace("{one}", rng.choice(table[one])).replace("{two}", rng.choice(table[two]))
    path = names.file_path(rng)
    text = styled(rng, expand(text, rng) + rng.choice(("", ".", "?", ", please.", " please")))
    request = surrounded(rng, fill(rng, text, {"path": quoted(rng, path, 0.25)}))
    scene.last = (two, path)

    def said(outs: list[str]) -> str:
        first, second = fact(one, outs[0]), fact(two, outs[1])
        return f"{path} {first} and {second.removeprefix('has ') if counts else second}."

    return _steps(scene, request, [(one, {"path": path}), (two, {"path": path})], said)


def _two_files(scene: Scene, table: Mapping[str, tuple[str, ...]]) -> tuple[str, str, list[str]] | None:
    """(request, tool, both paths) from a table of templates with {A} and {B}."""
    rng = scene.rng
    present = [tool for tool in table if scene.has(tool)]
    if not present:
        return None
    tool = rng.choice(present)
    paths = [names.file_path(rng), names.file_path(rng)]
    slots = {key: quoted(rng, path, 0.2) for key, path in zip("AB", paths, strict=True)}
    text = styled(
        rng,
        rng.choice(("", "", "please ", "now "))
        + expand(rng.choice(table[tool]), rng)
        + rng.choice(("", ".", "?", " please")),
    )
    return surrounded(rng, fill(rng, text, slots)), tool, paths


def both(scene: Scene) -> Exchange | None:
    """The same property of two files."""
    made = _two_files(scene, phrases.BOTH)
    if made is None:
        return None
    request, tool, paths = made
    wanted = [(tool, {"path": path}) for path in paths]

    def said(outs: list[str]) -> str:
        if tool == "read_file":
            return " ".join(
                answer(tool, {"path": path}, Outcome(out)) for path, out in zip(paths, outs, strict=True)
            )
        return f"{paths[0]} {fact(tool, outs[0])} and {paths[1]} {fact(tool, outs[1])}."

    return _steps(scene, request, wanted, said)


def together(scene: Scene) -> Exchange | None:
    """Two counts and their sum."""
    if not scene.has("calculate"):
        return None
    made = _two_files(scene, phrases.TOGETHER)
    if made is None:
        return None
    request, tool, paths = made
    counts = [names.number(scene.rng) for _ in paths]
    total = str(sum(map(int, counts)))
    calls = [
        scene.call(tool, {"path": path}, Outcome(count)) for path, count in zip(paths, counts, strict=True)
    ]
    expression = " + ".join(counts)
    calls.append(scene.call("calculate", {"expression": expression}, Outcome(total)))
    return Exchange(request, tuple(calls), f"Together they have {total} {tool.removeprefix('count_')}.")


def list_then_read(scene: Scene) -> Exchange | None:
    if not scene.has("list_files", "read_file"):
        return None
    rng = scene.rng
    folder, path = names.folder(rng), names.file_path(rng)
    if chance(rng, 0.65):
        path = f"{folder.rstrip('/')}/{names.file_name(rng)}"
    text = styled(
        rng, expand(rng.choice(phrases.STEPS["list_then_read"]), rng) + rng.choice(("", ".", "?", " please"))
    )
    request = fill(rng, text, {"folder": quoted(rng, folder, 0.2), "path": quoted(rng, path, 0.2)})
    wanted = [("list_files", {"folder": folder}), ("read_file", {"path": path})]
    return _steps(
        scene,
        request,
        wanted,
        lambda outs: " ".join(
            answer(tool, given, Outcome(out)) for (tool, given), out in zip(wanted, outs, strict=True)
        ),
    )


def list_then_first(scene: Scene) -> Exchange | None:
    if not scene.has("list_files", "read_file"):
        return None
    rng = scene.rng
    folder = names.folder(rng)
    text = styled(
        rng, expand(rng.choice(phrases.STEPS["list_then_first"]), rng) + rng.choice(("", ".", "?", " please"))
    )
    request = fill(rng, text, {"folder": quoted(rng, folder, 0.2)})
    entries = [names.file_name(rng) for _ in range(rng.choice((1, 2, 2, 3, 4, 5)))]
    first = scene.call("list_files", {"folder": folder}, Outcome("\n".join(entries)))
    given = {"path": f"{folder.rstrip('/')}/{entries[0]}"}
    outcome = scene.run("read_file", given, 0.05)
    return Exchange(
        request, (first, scene.call("read_file", given, outcome)), answer("read_file", given, outcome)
    )


def search_then(scene: Scene) -> Exchange | None:
    """Find a file by a text in it, then look at that file."""
    rng = scene.rng
    present = [tool for tool in phrases.SEARCH_THEN if scene.has(tool)]
    if not present or not scene.has("search_text"):
        return None
    tool = rng.choice(present)
    folder, pattern = names.folder(rng), names.pattern(rng)
    text = styled(
        rng, expand(rng.choice(phrases.SEARCH_THEN[tool]), rng) + rng.choice(("", ".", "?", " please"))
    )
    request = fill(rng, text, {"folder": quoted(rng, folder, 0.2), "pattern": quoted_pattern(rng, pattern)})
    given = {"pattern": pattern, "path": folder, "kind": "folder"}
    found = scene.run("search_text", given, 0.06)
    first = scene.call("search_text", given, found)
    if found.exit_code or found.stdout == "0 matches":
        return Exchange(request, (first,), answer("search_text", given, found))
    path = found.stdout.split("\n")[1].split(":", 1)[0]
    outcome = scene.run(tool, {"path": path}, 0.04)
    said = answer("search_text", given, found) + " " + answer(tool, {"path": path}, outcome)
    return Exchange(request, (first, scene.call(tool, {"path": path}, outcome)), said)


def with_search(scene: Scene) -> Exchange | None:
    """A search in one file, and a property of it."""
    return _with(scene, "search_text", "search_and", "and_search")


def with_reading(scene: Scene) -> Exchange | None:
    """The text of a file, and a property of it."""
    return _with(scene, "read_file", "read_and", "and_read")


def _with(scene: Scene, other: str, first: str, second: str) -> Exchange | None:
    """`other` and a property of the same file: in this order by the templates `first`, the other way by `second`."""
    rng = scene.rng
    present = [tool for tool in phrases.PROPERTY if scene.has(tool)]
    if not present or not scene.has(other):
        return None
    tool, path, pattern = rng.choice(present), names.file_path(rng), names.pattern(rng)
    kind = first if chance(rng, 0.6) else second
    text = rng.choice(phrases.STEPS[kind])
    for slot, table in (("clause", phrases.CLAUSE), ("noun_of", phrases.PROPERTY), ("ask", ASK_IT)):
        text = text.replace(f"{{{slot}}}", rng.choice(table[tool]))
    text = styled(rng, expand(text, rng) + rng.choice(("", ".", "?", " please")))
    slots = {"path": quoted(rng, path, 0.2), "pattern": quoted_pattern(rng, pattern)}
    given = {"pattern": pattern, "path": path, "kind": "file"} if other == "search_text" else {"path": path}
    wanted = [(other, given), (tool, {"path": path})]
    if kind == second:
        wanted.reverse()
    scene.last = (tool, path)
    return _steps(scene, surrounded(rng, fill(rng, text, slots)), wanted, _each(wanted))


def two_sums(scene: Scene) -> Exchange | None:
    rng = scene.rng
    if not scene.has("calculate"):
        return None
    pairs = [
        arithmetic.spoken(rng) if chance(rng, 0.25) else (arithmetic.expression(rng),) * 2 for _ in range(2)
    ]
    text = expand(rng.choice(phrases.STEPS["two_sums"]), rng) + rng.choice(("", ".", "?", " please"))
    request = fill(rng, styled(rng, text), {"E": pairs[0][0], "E2": pairs[1][0]})
    wanted = [("calculate", {"expression": meant}) for _, meant in pairs]
    return _steps(scene, request, wanted, _each(wanted, " and "))


def _each(wanted: Sequence[tuple[str, Mapping[str, str]]], between: str = " ") -> Callable[[list[str]], str]:
    """What is said about each result, one after the other."""
    return lambda outs: between.join(
        answer(tool, given, Outcome(out)) for (tool, given), out in zip(wanted, outs, strict=True)
    )


def time_and(scene: Scene) -> Exchange | None:
    """The time, and something about a file."""
    rng = scene.rng
    present = [tool for tool in ABOUT_A_FILE if scene.has(tool)]
    if not present or not scene.has("current_time"):
        return None
    tool = rng.choice(present)
    moods = phrases.REQUESTS[tool]
    template = rng.choice(phrases.STEPS["time_and"])
    text = (
        expand(template, rng)
        .replace("{ask}", expand(rng.choice(moods["ask"]), rng))
        .replace("{do}", expand(rng.choice(moods["do"]), rng))
    )
    path = names.file_path(rng)
    request = fill(rng, styled(rng, text + rng.choice(("", ".", "?"))), {"path": quoted(rng, path, 0.2)})
    wanted = [("current_time", {}), (tool, {"path": path})]
    if template.startswith("{"):
        wanted.reverse()
    return _steps(
        scene,
        request,
        wanted,
        lambda outs: " ".join(
            answer(name, given, Outcome(out)) for (name, given), out in zip(wanted, outs, strict=True)
        ),
    )


def follow_up(scene: Scene) -> Exchange | None:
    """Another question about the same file."""
    rng = scene.rng
    if scene.last is None:
        return None
    path = scene.last[1]
    tool = rng.choice([name for name in phrases.FOLLOW_UPS if name != scene.last[0]])
    if chance(rng, 0.5):
        text = expand(rng.choice(phrases.FOLLOW_UPS[tool]), rng) + rng.choice(("", "?", "?", "."))
    else:
        text = mood_text(
            rng, {key: value for key, value in phrases.REQUESTS[tool].items() if key not in ("bare", "whole")}
        )
        text = text.replace("{F}'s", "its").replace(
            "{F}", rng.choice(("it", "it", "that file", "the same file", "this file"))
        )
    request = styled(rng, text)
    if not scene.has(tool):
        return Exchange(request, (), NO_TOOL_ANSWER)
    return scene.answered(request, tool, {"path": path})


def again(scene: Scene) -> Exchange | None:
    """The same question about another file."""
    rng = scene.rng
    if scene.last is None or not scene.has(scene.last[0]):
        return None
    path = names.file_path(rng)
    text = styled(rng, expand(rng.choice(phrases.STEPS["same_again"]), rng) + rng.choice(("", "?", "?", ".")))
    return scene.answered(fill(rng, text, {"path": quoted(rng, path, 0.2)}), scene.last[0], {"path": path})
