"""Hostile tools through the real agent and a scripted model: nothing hangs, nothing survives, nothing leaks.

Each runs in the open and, where bubblewrap works, inside it. A marker in the command line finds survivors.
"""

from __future__ import annotations

import json
import os
import random
import re
import string
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.events import AnswerEvent, ToolCallEvent
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.sandbox import choose_sandbox
from posttrainllm.agent.tools import Tool
from posttrainllm.runtime.errors import UsageError
from posttrainllm.runtime.tokenizer import ByteTokenizer

if os.name != "posix":
    pytest.skip("command tools need /bin/bash", allow_module_level=True)

ANSWER = '{"answer": "done"}'
TIMEOUT_S = 1.5
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can hold what leaves its group")


@pytest.fixture(params=["open", "sandboxed"])
def backend(request: Any, tmp_path: Path) -> CommandBackend:
    """A back end whose tools have `TIMEOUT_S`, in a folder of their own."""
    sandbox = None
    if request.param == "sandboxed":
        try:
            sandbox = choose_sandbox("auto")
        except UsageError as error:
            pytest.skip(str(error))
    return CommandBackend(timeout_s=TIMEOUT_S, cwd=tmp_path, sandbox=sandbox)


@pytest.fixture
def marker() -> Iterator[str]:
    """Seconds to sleep that no other process sleeps. Afterwards none may be left that does."""
    seconds = str(random.randrange(10**9, 2 * 10**9))
    yield seconds
    for _ in range(100):
        if seconds not in processes():
            return
        time.sleep(0.05)
    pytest.fail(f"survivors: {[line for line in processes().splitlines() if seconds in line]}")


def processes() -> str:
    """The command lines of all that runs; a zombie has none."""
    if not Path("/proc/self/cmdline").exists():
        return subprocess.run(["ps", "-ax", "-o", "args="], capture_output=True, text=True, check=True).stdout
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return "\n".join(lines)


@pytest.fixture
def play(scripted: Callable[..., Any], backend: CommandBackend) -> Callable[..., ToolCallEvent]:
    """play(template, x=...) -> the event of the call that a model made, after the turn ended with an answer."""

    def run(template: str, /, tool: Tool | None = None, **arguments: Any) -> ToolCallEvent:
        tool = tool or Tool("t", exec=template, exec_args=tuple(arguments))
        call = json.dumps({"tool": "t", "arguments": arguments})
        agent = Agent(
            scripted([call, ANSWER], 60_000),
            [tool],
            backend=backend,
            constrain=False,
            limits=Limits(max_tokens=4000),
        )
        events = list(agent.run("go"))
        (event,) = [event for event in events if isinstance(event, ToolCallEvent)]
        assert event.duration_sec < TIMEOUT_S + 2
        assert isinstance(events[-1], AnswerEvent)
        return event

    return run


Play = Callable[..., ToolCallEvent]


def test_p75_a_grandchild_that_holds_the_pipes(play: Play, marker: str) -> None:
    event = play(f"sleep {marker} & echo hi")
    assert (event.stdout, event.exit_code, event.timed_out) == ("hi\n", 0, None)
    play(f"(while :; do echo x; sleep 0.1; done; sleep {marker}) & (nohup sleep {marker} >/dev/null 2>&1 &)")


@linux_only
def test_p75_a_daemon(play: Play, marker: str) -> None:
    assert play(f"setsid sleep {marker} & (setsid setsid sleep {marker} &) & echo hi").stdout == "hi\n"


def test_a_tool_that_ignores_sigterm(play: Play, marker: str) -> None:
    event = play(f"trap '' TERM HUP INT; echo first; sleep {marker}; sleep {marker}")
    assert (event.stdout, event.exit_code, event.timed_out) == ("first\n", 124, True)
    assert "timed out after 1.5 s" in event.stderr


def test_a_fork_storm(play: Play, marker: str) -> None:
    assert play(f"while :; do sleep {marker} & done 2>/dev/null").timed_out


@linux_only
def test_a_fork_storm_that_leaves_its_group(play: Play, marker: str) -> None:
    storm = f"for i in 1 2 3 4 5 6; do (setsid bash -c 'for j in $(seq 20); do setsid sleep {marker} & done' &) & done"
    assert play(f"{storm}; sleep {marker}").timed_out


def test_ten_gigabytes_of_output(play: Play) -> None:
    event = play("head -c 10737418240 /dev/zero | tr '\\0' x")
    assert event.truncated is not None
    assert event.truncated > 10_000_000
    assert event.stdout.startswith("xxxx")
    assert len(event.stdout) < 9000


def test_a_megabyte_on_stderr_first(play: Play) -> None:
    event = play("head -c 1000000 /dev/zero | tr '\\0' e >&2; echo out; echo last >&2")
    assert (event.stdout, event.exit_code) == ("out\n", 0)
    assert event.stderr.endswith("eeee" + "last\n")
    assert event.truncated == 1_000_005 - 8192


def test_p81_output_that_is_not_utf8(play: Play) -> None:
    event = play("printf 'a\\xff\\xc3'; printf '\\xe9' >&2")
    assert (event.stdout, event.stderr, event.replaced) == ("a\ufffd\ufffd", "\ufffd", True)


def test_p76_reading_standard_input(play: Play) -> None:
    assert play("cat; read -r line; head -c 5 /dev/stdin; echo end").stdout == "end\n"


class OneBigWord(ByteTokenizer):
    """Id 0 is a whole text, so that a model need not be asked once a byte."""

    text = "it's é " * 25_000

    def token_bytes(self, token: int) -> bytes:
        return self.text.encode() if token == 0 else super().token_bytes(token)


def test_p79_200_kilobytes_of_arguments(scripted: Callable[..., Any], backend: CommandBackend) -> None:
    template = 'printf %s "$x" | wc -c; printf %s "$x" | tail -c 6'
    tool = Tool("t", exec=template, exec_args=("x",))
    session = scripted(['{"tool": "t", "arguments": {"x": "\0"}}', ANSWER], 60_000)
    session.tokenizer = OneBigWord()
    agent = Agent(session, [tool], backend=backend, constrain=False)
    (event,) = [event for event in agent.run("go") if isinstance(event, ToolCallEvent)]
    assert event.stdout.split() == ["200000", "'s", "é"]


def test_every_shell_metacharacter(play: Play, tmp_path: Path) -> None:
    text = (
        "".join(map(chr, range(1, 32)))
        + string.punctuation
        + "$(touch pwned)`touch pwned`';touch pwned;' é😀"
    )
    before = sorted(tmp_path.iterdir())
    assert play('printf %s "$x"', x=text).stdout == text
    plain = Tool("t", exec_argv=("printf", "%s", "{x}"))
    assert play("", tool=plain, x=text).stdout == text
    assert sorted(tmp_path.iterdir()) == before


def test_p77_environment_theft(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "s3cr3t-of-the-user")
    for _ in range(2):
        event = play("env; set; export; tr '\\0' '\\n' </proc/self/environ; cat /proc/$PPID/environ")
        assert "PATH=" in event.stdout
        assert "s3cr3t" not in event.stdout + event.stderr


def test_path_escape(play: Play, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/")
    for folder in ("..", "out", "out/etc"):
        event = play("", tool=Tool("t", exec="echo ran", cwd=folder))
        assert (event.stdout, event.exit_code) == ("", 126)


# Only in the sandbox


in_the_sandbox = pytest.mark.parametrize("backend", ["sandboxed"], indirect=True)


@in_the_sandbox
@pytest.mark.parametrize("place", ["here", "/etc/here", "/var/here", "$HOME/here", "/dev/shm/../../here"])
def test_the_sandbox_refuses_writes(play: Play, place: str, tmp_path: Path) -> None:
    event = play(f"echo x >{place}")
    assert event.exit_code != 0
    assert re.search("Read-only|Permission denied|not permitted", event.stderr)
    assert list(tmp_path.iterdir()) == []


@in_the_sandbox
def test_the_sandbox_has_a_tmp_of_its_own(play: Play) -> None:
    name = f"hostile-{os.getpid()}"
    event = play(f"echo x >/tmp/{name} && cat /tmp/{name}")
    if sys.platform == "linux":
        assert event.stdout == "x\n"
    assert not Path(f"/tmp/{name}").exists()


@in_the_sandbox
def test_the_sandbox_refuses_connections(play: Play) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        event = play(f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    assert event.exit_code != 0


@in_the_sandbox
def test_the_sandbox_hides_keys(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("s3cr3t")
    (home / ".netrc").write_text("s3cr3t")
    (home / "notes").write_text("readable")
    monkeypatch.setenv("HOME", str(home))
    event = play("cat ~/notes ~/.netrc ~/.ssh/id")
    assert event.stdout == "readable"


@in_the_sandbox
@linux_only
def test_the_sandbox_shows_no_other_process(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"], env={"KEY": "s3cr3t"}) as other:
        event = play(f"cat /proc/[0-9]*/environ; kill -9 {other.pid}; kill -9 -1")
        assert other.poll() is None
        other.kill()
    assert "s3cr3t" not in event.stdout


# The agent dies


AGENT = """
    import importlib.util, json, sys
    from posttrainllm.agent.executor import CommandBackend
    from posttrainllm.agent.loop import Agent
    from posttrainllm.agent.sandbox import choose_sandbox
    from posttrainllm.agent.tools import Tool
    spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)

    def play(template, timeout_s=60.0):
        replies = ['{"tool": "t", "arguments": {}}', '{"answer": "done"}']
        backend = CommandBackend(timeout_s, sandbox=choose_sandbox(sys.argv[2]))
        session = conftest.ScriptedSession(replies, 60_000)
        agent = Agent(session, [Tool("t", exec=template)], backend=backend, constrain=False)
        return [event.to_json() for event in agent.run("go")]
"""


def start(program: str, backend: CommandBackend, *arguments: str) -> subprocess.Popen[str]:
    text = textwrap.dedent(AGENT) + textwrap.dedent(program)
    conftest = Path(__file__).with_name("conftest.py")
    sandbox = "off" if backend.sandbox is None else "auto"
    command = [sys.executable, "-c", text, str(conftest), sandbox, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("leave", ["", pytest.param("setsid ", marks=linux_only)])
def test_p82_kill_9_of_the_agent_with_a_running_tool(
    backend: CommandBackend, marker: str, leave: str
) -> None:
    with start("play(sys.argv[3])", backend, f"{leave}sleep {marker} & {leave}sleep {marker}") as process:
        for _ in range(400):
            if len(re.findall(f"(?m)^sleep {marker}", processes())) == 2:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the tool never ran")
        process.kill()


def test_memory_grows_by_less_than_64_megabytes(backend: CommandBackend) -> None:
    program = """
        import re, resource
        def peak():  # in KiB; Linux's ru_maxrss begins with that of the program that started us
            if sys.platform == "linux":
                return int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        play("head -c 100000 /dev/zero")
        before = peak()
        play("head -c 10737418240 /dev/zero", 1.5)
        play("head -c 10737418240 /dev/zero >&2 & head -c 10737418240 /dev/zero", 1.5)
        play("while :; do sleep 60 & done 2>/dev/null", 1.0)
        print(peak() - before)
    """
    with start(program, backend) as process:
        out, _ = process.communicate(timeout=120)
    assert 0 <= int(out) < 64 << 10, f"grew by {out} KiB"
    print(f"grew by {int(out)} KiB")
