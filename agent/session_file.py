"""A conversation on disk: its turns, and the keys and values of all its ids.

The file is a `runtime/kv_file.py` whose `more` holds the turns: what users said, what the model said as the ids that it
said it in, what tools gave. A conversation is resumed by an agent with the same model, system prompt and tools.
Its turns are put into ids again; they have to be the stored ones, so nothing is resumed that the model had not seen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from numpy.typing import NDArray

from ..runtime.errors import InputError, UsageError
from ..runtime.kv_file import MAGIC, KVFileError, KVHeader, layout_of, read_header, read_values, write_kv
from ..runtime.prompt_cache import identity
from .chat_format import IdSpan, Origin
from .context_plan import ReplyTurn, ResultTurn, Turn, UserTurn
from .model_facts import weights_fingerprint
from .tools import ToolResult

if TYPE_CHECKING:
    from .loop import Agent

VERSION = 1
_FIELDS = {entry.name for entry in fields(ToolResult)}


def save_session(agent: Agent, file: Path) -> int:
    """Write the conversation of `agent` to `file`; the number of its ids. Raises UsageError."""
    session = agent.session
    ids = agent.conversation.ids
    if not ids:
        raise UsageError(file, "nothing was said, so there is nothing to save")
    agent.prepare()
    if not agent.cache.common_prefix(ids):  # another agent has used its cache since
        session.prefill(ids, agent.cache)
    # What was sampled last is not fed yet. To feed it alone would change the bits of what follows.
    held = agent.cache.common_prefix(ids)
    file = Path(os.path.realpath(file))
    _refuse_other(file)
    more = {
        "pending": ids[held:],
        "seed": agent.sampler.seed,
        "random": agent.sampler.state,
        "drafts": agent.drafter.state if agent.drafter else None,
        "session": VERSION,
        "weights": weights_fingerprint(session.bundle),
        "dialect": agent.dialect.name,
        "opening": len(agent.opening),
        "number": agent.turn,
        "turns": [_to_json(turn) for turn in agent.turns],
    }
    try:
        write_kv(
            file,
            agent.cache.snapshot(held),
            ids=ids[:held],
            identity=identity(session),
            model=str(session.bundle.path),
            kv=session.manifest.kv,
            more=more,
        )
    except OSError as error:
        raise UsageError(file, f"cannot be written ({error.strerror or error})") from None
    return len(ids)


def load_session(agent: Agent, file: Path) -> int:
    """Make the conversation in `file` that of `agent`, which keeps its own if it cannot be; the number of ids restored.

    0 means that the keys and values were made on another provider, or with other threads, and are computed again.
    Raises InputError, naming the turn that is at fault.
    """
    try:
        header = read_header(file)
    except KVFileError as error:
        raise InputError(file, f"{error}", "a file that :save wrote") from None
    more = header.more
    if not isinstance(more, dict) or more.get("session") != VERSION:
        raise InputError(file, "no saved session, or of another version", "a file that :save wrote")
    weights = weights_fingerprint(agent.session.bundle)
    if more.get("weights") != weights:
        raise InputError(
            file, f"saved with the weights {more.get('weights')}", f"those of this model: {weights}"
        )
    opening = agent.opening
    pending = more.get("pending")
    if not isinstance(pending, list) or not all(type(token) is int for token in pending):
        raise InputError(file, "no pending ids", "a file that :save wrote")
    ids = [*header.ids, *pending]
    if ids[: len(opening)] != opening or more.get("dialect") != agent.dialect.name:
        raise InputError(
            file, "saved with another system prompt, other tools or another dialect", "the same as here"
        )
    turns = _turns(file, more.get("turns"), agent.session.vocab_size)
    number = more.get("number")
    if type(number) is not int:
        raise InputError(file, "no turn number", "a file that :save wrote")
    values = _values(agent, file, header)
    state = agent.sampler.state, agent.drafter.state if agent.drafter else None
    _resume_state(agent, file, more)
    if not agent.resume(turns, number, ids):
        agent.sampler.state = state[0]
        if agent.drafter and state[1] is not None:
            agent.drafter.state = state[1]
        raise InputError(file, "its turns do not give its ids", "a conversation as it was held")
    if values is None:
        return 0
    agent.restore(header.ids, list(values))
    return len(ids)


def _resume_state(agent: Agent, file: Path, more: Mapping[str, Any]) -> None:
    """Drafts as long as they would have been; with the seed of then, the random numbers that would have come."""
    before = agent.sampler.state
    try:
        if more.get("seed") == agent.sampler.seed:
            agent.sampler.state = more["random"]
        if agent.drafter and more.get("drafts") is not None:
            agent.drafter.state = more["drafts"]
    except (ValueError, TypeError, KeyError, AttributeError):
        agent.sampler.state = before
        raise InputError(file, "a state of sampling that is none", "a file that :save wrote") from None


def _refuse_other(file: Path) -> None:
    """Raises UsageError if `file` is there and is not one of ours: it may be dear to somebody."""
    if not file.exists():
        return
    try:
        with file.open("rb") as source:
            ours = source.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UsageError(file, f"cannot be written ({error.strerror or error})") from None
    if not ours:
        raise UsageError(file, "exists and is no saved session", "another name")


def _values(agent: Agent, file: Path, header: KVHeader) -> NDArray[Any] | None:
    """Keys and values, if they are what this session would compute. Raises InputError."""
    session = agent.session
    if header.identity != identity(session) or header.layout != layout_of(session.manifest.kv):
        return None
    try:
        return read_values(file, header)
    except KVFileError as error:
        raise InputError(file, f"{error}", "a file that :save wrote") from None


def _to_json(turn: Turn) -> dict[str, Any]:
    if isinstance(turn, UserTurn):
        return {"user": turn.text, "number": turn.number}
    if isinstance(turn, ReplyTurn):
        spans = [[span.origin, span.ids] for span in turn.spans]
        return {"reply": turn.text, "spans": spans, "number": turn.number}
    return {"result": asdict(turn.result), "number": turn.number}


def _turns(file: Path, data: object, vocab_size: int) -> list[Turn]:
    """The turns in a file. Raises InputError with the index of one that is none."""
    if not isinstance(data, list):
        raise InputError(file, "no turns", "a file that :save wrote")
    turns: list[Turn] = []
    for place, entry in enumerate(data):
        turn = _turn(entry, vocab_size) if isinstance(entry, dict) else None
        if turn is None:
            raise InputError(f"{file}, turn {place}", "malformed", "what a user, the model or a tool said")
        turns.append(turn)
    return turns


def _turn(entry: Mapping[str, Any], vocab_size: int) -> Turn | None:
    number, user, reply, result = (entry.get(name) for name in ("number", "user", "reply", "result"))
    if type(number) is not int:
        return None
    if isinstance(user, str):
        return UserTurn(number, user)
    if isinstance(reply, str):
        spans = _spans(entry.get("spans"), vocab_size)
        return None if spans is None else ReplyTurn(number, tuple(spans), reply)
    if isinstance(result, dict) and set(result) == _FIELDS:
        try:
            found = ToolResult(**result)
        except TypeError:
            return None
        texts = (
            isinstance(found.tool, str) and isinstance(found.stdout, str) and isinstance(found.stderr, str)
        )
        return ResultTurn(number, found) if texts and type(found.exit_code) is int else None
    return None


def _spans(data: object, vocab_size: int) -> Sequence[IdSpan] | None:
    if not isinstance(data, list):
        return None
    spans = []
    for entry in data:
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in get_args(Origin):
            return None
        origin, ids = entry
        if not isinstance(ids, list) or not all(
            type(token) is int and 0 <= token < vocab_size for token in ids
        ):
            return None
        spans.append(IdSpan(origin, ids))
    return spans
