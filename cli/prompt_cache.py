"""`--prompt-cache-dir` of `agent` and `eval`, and `posttrainllm cache`, which looks after such a folder."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import InputError, UsageError
from .bundled import BUNDLED, DEMO, NAMES, bundled_tools
from .options import option, parse, positional, positionals
from .terminal import printable

if TYPE_CHECKING:
    from ..agent.loop import Agent
    from ..runtime.prompt_cache import Entry, PromptCache, Restored
    from ..runtime.session import Session

ACTIONS = ("ls", "verify", "explain", "rm")


def preparing(session: "Session", folder: Path, command: str) -> "Callable[[Agent], None]":
    """Restores the system prompt of an agent from `folder`, or feeds it and stores it there.

    Tells stderr what happened, a line that was told before excepted. Raises UsageError if the folder cannot be used.
    """
    from ..runtime.prompt_cache import PromptCache

    store = PromptCache(folder, session)
    told: set[str] = set()

    def tell(line: str) -> None:
        if line not in told:
            told.add(line)
            _tell(f"{command}: {line}")

    def prepare(agent: "Agent") -> None:
        ids = agent.conversation.ids
        if agent.cache.common_prefix(ids) < len(ids):
            _prepare(store, agent, tell)

    return prepare


def _prepare(store: "PromptCache", agent: "Agent", tell: "Callable[[str], None]") -> None:
    ids = agent.conversation.ids
    found = store.restore(ids, agent.cache)
    for name, why in found.damaged:
        tell(f"system-prompt cache: {name} is ignored ({why})")
    if found.length == len(ids):
        tell(f"loaded system-prompt cache ({found.length} tokens) — skipping prefill")
        return
    if found.nearest is not None:
        tell(f"system-prompt cache: {_difference(agent.session, found, ids)}")
    elif found.foreign is not None and found.foreign.header is not None:
        other = found.foreign.header
        tell(
            f"system-prompt cache: nothing loaded; {found.foreign.path.name} is of {other.model} "
            f"({other.identity[:12]}), this is {agent.session.bundle.path} ({store.identity[:12]}): "
            "another model, provider, thread count or version"
        )
    agent.prepare()
    try:
        store.save(ids, agent.cache)
    except UsageError as error:  # a full disk must not cost the answer
        tell(f"system-prompt cache: not stored: {error}")
    else:
        tell(f"stored system-prompt cache ({len(ids)} tokens)")


def _difference(session: "Session", found: "Restored", ids: Sequence[int]) -> str:
    """Which token broke the match."""
    assert found.nearest is not None
    assert found.nearest.header is not None
    there = found.nearest.header.ids[found.differs : found.differs + 1]
    here = ids[found.differs : found.differs + 1]
    loaded = f"{found.length} of {len(ids)} tokens loaded" if found.length else "nothing loaded"
    return (
        f"{loaded}; the nearest entry ({found.nearest.path.name}) has {_word(session, there)} "
        f"where this prompt has {_word(session, here)}, at token {found.differs}"
    )


def _word(session: "Session", ids: Sequence[int]) -> str:
    from ..runtime.tokenizer import decode

    return repr(decode(session.tokenizer, list(ids))) if ids else "its end"


@dataclass(frozen=True)
class CacheOptions:
    """Flags of `cache`."""

    action: str = positional("action", ", ".join(ACTIONS))
    folder: str = positional("folder", "the folder of --prompt-cache-dir")
    names: tuple[str, ...] = positionals("names", "rm: files to delete (none: all); explain: the model")
    tools: Optional[str] = option(
        None, f"explain: tool file (default, with {NAMES}: the model's own)", metavar="FILE"
    )
    system: Optional[str] = option(
        None, "explain: replaces the first line of the system prompt", metavar="TEXT"
    )
    dialect: Optional[str] = option(None, "explain: another dialect than the model's own", metavar="NAME")
    json: bool = option(False, "ls, verify: print one JSON object")


def run(argv: list[str]) -> int:
    """Returns 0, or 1 if `verify` finds a damaged file or `explain` no entry that serves."""
    options = parse(
        CacheOptions,
        argv,
        command="cache",
        summary="List, verify, explain or remove the files of a prompt cache.",
        example="  posttrainllm cache ls ~/.prompts\n  posttrainllm cache explain ~/.prompts demo",
    )
    if options.action not in ACTIONS:
        raise UsageError(f"cache {options.action}", "no such action", ", ".join(ACTIONS))
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(folder, "no such folder", "the folder of --prompt-cache-dir")
    if options.action == "explain":
        return _explain(folder, options)
    if options.action == "rm":
        return _remove(folder, options.names)
    if options.names:
        raise UsageError(
            f"cache {options.action}", f"{options.names[0]} is one word too many", "a folder alone"
        )
    return _list(folder, verify=options.action == "verify", as_json=options.json)


def _list(folder: Path, *, verify: bool, as_json: bool) -> int:
    from ..runtime.kv_file import KVFileError, read_values
    from ..runtime.prompt_cache import list_entries

    rows: list[dict[str, Any]] = []
    for entry in list_entries(folder):
        problem = entry.problem
        if verify and entry.header is not None:
            try:
                read_values(entry.path, entry.header)
            except KVFileError as error:
                problem = str(error)
        header = entry.header
        rows.append(
            {
                "name": entry.path.name,
                "nbytes": entry.nbytes,
                "used": round(entry.used, 3),
                "tokens": len(header.ids) if header else None,
                "model": header.model if header else None,
                "problem": problem,
            }
        )
    if as_json:
        print(json.dumps({"v": 1, "entries": rows}, indent=2))
    else:
        print(printable("\n".join(_lines(rows, verify=verify)), sys.stdout))
    return int(verify and any(row["problem"] for row in rows))


def _lines(rows: Sequence[dict[str, Any]], *, verify: bool) -> Iterator[str]:
    for row in rows:
        state = row["problem"] or ("good" if verify else "")
        tokens = "" if row["tokens"] is None else f"{row['tokens']} tokens"
        age = f"used {_age(time.time() - row['used'])} ago"
        cells = (row["name"], f"{row['nbytes'] / 1e6:.1f} MB", tokens, age, row["model"] or "", state)
        yield "  ".join(cell for cell in cells if cell)
    total = sum(row["nbytes"] for row in rows)
    yield f"{len(rows)} file{'' if len(rows) == 1 else 's'}, {total / 1e6:.1f} MB"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _explain(folder: Path, options: CacheOptions) -> int:
    """What a start with this model, these tools and this system prompt would find."""
    from ..agent.chat_format import DEFAULT_HEADER
    from ..agent.dialect import open_dialect
    from ..agent.tool_file import load_tools
    from ..runtime.prompt_cache import identity, list_entries
    from .models import open_model

    if len(options.names) > 1:
        raise UsageError("cache explain", f"{options.names[1]} is one word too many", "a folder and a model")
    name = options.names[0] if options.names else DEMO
    if options.tools is None and name not in BUNDLED:
        raise UsageError("--tools", "missing", "a tool file")
    tools = load_tools(bundled_tools(name) if options.tools is None else Path(options.tools))
    session = open_model(name, "auto")
    header = DEFAULT_HEADER if options.system is None else options.system
    ids = [
        token
        for span in open_dialect(session, header, tools, options.dialect).opening()
        for token in span.ids
    ]
    mine, best = identity(session), 0
    print(f"this prompt has {len(ids)} tokens")
    for entry in list_entries(folder):
        best = max(best, _explained(session, entry, ids, mine))
    print(f"{best} of {len(ids)} tokens would be loaded")
    return 0 if best == len(ids) else 1


def _explained(session: "Session", entry: "Entry", ids: list[int], mine: str) -> int:
    """Print what `entry` is to the prompt `ids`; how many tokens of it would be loaded."""
    from ..runtime.prompt_cache import agreement, usable

    if entry.header is None:
        _say(f"{entry.path.name}: damaged ({entry.problem})")
        return 0
    if entry.header.identity != mine:
        _say(f"{entry.path.name}: of another model, provider, thread count or version ({entry.header.model})")
        return 0
    length, same = usable(entry.header.ids, ids), agreement(entry.header.ids, ids)
    if length == len(ids):
        _say(f"{entry.path.name}: the whole prompt")
    else:
        there, here = entry.header.ids[same : same + 1], ids[same : same + 1]
        words = f"{_word(session, there)} there, {_word(session, here)} here"
        _say(f"{entry.path.name}: the same up to token {same} ({words}); {length} usable")
    return length


def _remove(folder: Path, names: Sequence[str]) -> int:
    """Delete the named files, or all; every name is looked up before the first one goes."""
    from ..runtime.prompt_cache import list_entries

    entries = {entry.path.name: entry for entry in list_entries(folder)}
    for name in names:
        if name not in entries:
            raise UsageError(f"cache rm {name}", f"no such file in {folder}", "a name as `cache ls` shows it")
    gone = [entries[name] for name in dict.fromkeys(names)] if names else list(entries.values())
    for entry in gone:
        entry.path.unlink(missing_ok=True)
        _say(f"removed {entry.path.name} ({entry.nbytes / 1e6:.1f} MB)")
    return 0


def _say(line: str) -> None:
    print(printable(line, sys.stdout))


def _tell(line: str) -> None:
    print(printable(line, sys.stderr), file=sys.stderr)
