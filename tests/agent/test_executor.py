"""The command back end against real processes: what bash sees, what comes back, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.agent.executor import CommandBackend, command_text, shell_value
from posttrainllm.agent.limits import ResourceLimits
from posttrainllm.agent.tools import Tool, ToolResult
from posttrainllm.runtime.errors import UsageError

if os.name != "posix":  # Windows has test_windows.py
    pytest.skip("command tools need /bin/bash", allow_module_level=True)

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


# A program that runs one tool, for what can only be seen from outside.
AGENT = """
    import sys
    from posttrainllm.agent.executor import CommandBackend
    from posttrainllm.agent.tools import Tool
    tool = Tool("t", exec=sys.argv[1])
    try:
        print(CommandBackend().call(tool, {}))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def run(template: str, backend: CommandBackend | None = None, /, **arguments: Any) -> ToolResult:
    tool = Tool("t", exec=template, exec_args=tuple(arguments))
    return (backend or CommandBackend()).call(tool, arguments)


def gone(pid: int) -> bool:
    """Whether the process ended (a zombie has), within a generous time."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if _state(pid) in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> str:
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:1]


def pids_of(result: ToolResult) -> list[int]:
    return [int(word) for word in result.stdout.split()]


# What bash sees


@settings(deadline=None, max_examples=50)
@given(st.lists(TEXT, min_size=1, max_size=8))
def test_every_string_arrives_byte_for_byte(texts: list[str]) -> None:
    arguments = {f"x{index}": text for index, text in enumerate(texts)}
    template = "".join(f"printf %s \"${name}\"; printf '\\0'; " for name in arguments)
    result = run(template, CommandBackend(limit=1 << 20), **arguments)
    assert (result.stdout.split("\0")[:-1], result.stderr, result.exit_code) == (texts, "", 0)


@settings(deadline=None, max_examples=20)
@given(TEXT, st.lists(st.integers() | TEXT, max_size=3))
def test_the_shown_command_is_what_runs(text: str, values: list[Any]) -> None:
    tool = Tool("t", exec='printf "%s|%s" "$a" "$b"', exec_args=("b", "a"))
    arguments = {"a": text, "b": values}
    shown = command_text(tool, arguments)
    done = subprocess.run(
        ["/bin/bash", "-c", shown], capture_output=True, check=True, env={"LANG": "C.UTF-8"}
    )
    assert CommandBackend(limit=1 << 20).call(tool, arguments).stdout == done.stdout.decode()


def test_the_shown_command_is_single_quote_escaped() -> None:
    tool = Tool("t", exec='cat "$path"', exec_args=("path", "n"))
    assert command_text(tool, {"path": "it's"}) == "path='it'\\''s'\nn=''\ncat \"$path\""


@pytest.mark.parametrize(
    "text", ["'; touch pwned; '", "$(touch pwned)", "`touch pwned`", "\n touch pwned\n", "\\"]
)
def test_argument_text_is_never_run(text: str, tmp_path: Path) -> None:
    result = run('printf %s "$x"', CommandBackend(cwd=tmp_path), x=text)
    assert result.stdout == text
    assert list(tmp_path.iterdir()) == []


def test_p79_large_arguments_arrive() -> None:
    for text in ("a" * 200_000, "'" * 300_000, "é😀\n" * 100_000):
        result = run('printf %s "$x" | cksum; printf %s "$x" | wc -c', x=text)
        reference = subprocess.run(["cksum"], input=text.encode(), capture_output=True, check=True).stdout
        checksum, size = result.stdout.strip().splitlines()
        assert (checksum.strip(), int(size)) == (reference.decode().strip(), len(text.encode()))


def test_arguments_stand_on_no_command_line_and_in_no_environment() -> None:
    for secret in run(
        "ps -ww -e -o args= || cat /proc/[0-9]*/cmdline; env", x="s3cr3t-value"
    ).stdout.splitlines():
        assert "s3cr3t-value" not in secret


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a b", "a b"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (-2.5, "-2.5"),
        (10**30, "1" + "0" * 30),
        (None, ""),
        (["é", 1, None], '["é",1,null]'),
        ({"k": {"n": False}}, '{"k":{"n":false}}'),
    ],
)
def test_the_text_of_each_kind_of_value(value: Any, text: str) -> None:
    assert shell_value(value) == text
    assert run('printf %s "$x"', x=value).stdout == text


def test_an_absent_argument_is_the_empty_string_even_under_set_u() -> None:
    tool = Tool("t", exec='set -u; echo "[$x]" "${x:-30}"', exec_args=("x",))
    assert CommandBackend().call(tool, {}).stdout == "[] 30\n"


def test_only_declared_arguments_become_variables() -> None:
    tool = Tool("t", exec='echo "${x-unset}" "${y-unset}"', exec_args=("x",))
    assert CommandBackend().call(tool, {"x": "1", "y": "2"}).stdout == "1 unset\n"


def test_the_template_runs_as_bash_c_would_run_it() -> None:
    probe = 'echo "$0" $# $LINENO "${REPLY-unset}" "$-" {a,b}; nope; false; echo $?; return 1; echo; exit 7'
    ours = run(probe)
    done = subprocess.run(["/bin/bash", "-c", probe], capture_output=True, text=True, check=False)
    assert (ours.stdout, ours.stderr, ours.exit_code) == (done.stdout, done.stderr, 7)


@pytest.mark.parametrize(
    "template", ["# only a comment", "#!/bin/bash\necho a", "\n\necho a # b", "cat <<E\n$x\nE", "echo a \\"]
)
def test_templates_of_any_form(template: str) -> None:
    done = subprocess.run(["/bin/bash", "-c", template], capture_output=True, text=True, check=False)
    assert run(template).stdout == done.stdout


def test_a_syntax_error_is_exit_code_2_with_the_words_of_bash() -> None:
    code = subprocess.run(["/bin/bash", "-c", "eval if"], capture_output=True, check=False).returncode
    assert code == 2 or sys.platform == "darwin"  # bash 3.2 there says 1
    for template in ("if", "echo a; )", 'echo "', "echo ok\n)"):
        result = run(template, x="1")
        assert result.exit_code == code
        assert "syntax error" in result.stderr or "unexpected EOF" in result.stderr


def test_p77_the_environment_is_path_home_and_lang_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("BASH_ENV", "/dev/null")
    monkeypatch.setenv("LC_ALL", "C")
    backend = CommandBackend()
    for _ in range(2):
        names = {line.partition("=")[0] for line in run("env", backend, x="1").stdout.splitlines()}
        assert {"PATH", "HOME", "LANG"} <= names
        assert names <= {"PATH", "HOME", "LANG", "PWD", "SHLVL", "_", "OLDPWD"}  # the rest is bash's own
    values = run('printf "%s\\n" "$PATH" "$HOME" "$LANG"').stdout.splitlines()
    assert values == [
        os.environ["PATH"],
        os.environ["HOME"],
        "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8",
    ]


def test_path_and_home_are_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert run('echo "${HOME-unset}"').stdout == "unset\n"


def test_the_locale_counts_characters() -> None:
    assert run("echo ${#x}", x="é😀").stdout == "2\n"


def test_p76_standard_input_is_empty_and_ours_is_not_touched() -> None:
    program = textwrap.dedent(AGENT) + "print(sys.stdin.read())"
    done = subprocess.run(
        [sys.executable, "-c", program, "cat; read -r line; echo end"],
        input="typed by the user",
        capture_output=True,
        check=True,
        text=True,
    )
    assert "stdout='end\\n'" in done.stdout
    assert done.stdout.endswith("typed by the user\n")


def test_no_descriptor_but_the_standard_three_is_open_in_a_tool() -> None:
    probe = "import os; print([n for n in range(256) if not _closed(n)])"
    closed = "def _closed(n):\n try: os.fstat(n)\n except OSError: return True\n return False\n"
    script = "import os\n" + closed + probe
    with open(os.devnull) as ours:
        os.set_inheritable(ours.fileno(), True)
        assert run(f'{sys.executable} -c "$x"', x=script).stdout == "[0, 1, 2]\n"


def test_the_tool_has_no_terminal_and_a_group_of_its_own() -> None:
    group = run(f"{sys.executable} -c 'import os; print(os.getpgrp(), os.getsid(0))'").stdout.split()
    assert str(os.getpgrp()) not in group
    assert str(os.getsid(0)) not in group
    assert run("echo x >/dev/tty").exit_code != 0


def test_the_working_directory_is_ours_or_the_one_given(tmp_path: Path) -> None:
    assert run("pwd -P").stdout.strip() == os.path.realpath(os.getcwd())
    assert run("pwd -P", CommandBackend(cwd=tmp_path)).stdout.strip() == os.path.realpath(tmp_path)


# What comes back


def test_both_streams_the_exit_code_and_the_time() -> None:
    result = run("echo out; echo err >&2; exit 3")
    assert (result.tool, result.stdout, result.stderr, result.exit_code) == ("t", "out\n", "err\n", 3)
    assert 0 < result.duration_sec < 30
    assert (result.timed_out, result.truncated, result.replaced) == (False, 0, False)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("kill 0", 143),
        ("sh -c 'kill -KILL $$'", 137),
        ("nope", 127),
        ("exec false", 1),
        ("exit 256", 0),
    ],
)
def test_exit_codes_are_those_of_bash(template: str, code: int) -> None:
    assert run(template).exit_code == code


def test_output_is_capped_at_8_kilobytes_a_stream_on_a_character_boundary() -> None:
    result = run("printf %s \"$x\"; printf '%09000d' 0 >&2", x="a" * 8191 + "é")
    assert result.stdout == "a" * 4096 + "…[truncated 1 bytes]" + "a" * 4094 + "é"
    assert result.stderr == "0" * 4096 + "…[truncated 808 bytes]" + "0" * 4096
    assert result.truncated == 809


def test_output_at_the_cap_is_whole() -> None:
    result = run('printf %s "$x"', x="é" * 4096)
    assert (result.stdout, result.truncated) == ("é" * 4096, 0)


def test_p81_bytes_that_are_not_utf8_are_replaced_and_flagged() -> None:
    result = run("printf 'caf\\xe9\\n'; printf '\\xf0\\x9f' >&2")
    assert (result.stdout, result.stderr, result.replaced) == ("caf\ufffd\n", "\ufffd", True)
    assert not run("printf 'caf\\xc3\\xa9'").replaced


def test_nul_bytes_and_control_characters_come_through() -> None:
    assert run(r"printf 'a\0b\33[1m\r\n'").stdout == "a\0b\33[1m\r\n"


def test_much_on_both_streams_at_once_neither_blocks_nor_fills_memory() -> None:
    command = "head -c 30000000 /dev/zero | tr '\\0' x"
    tracemalloc.start()
    result = run(f"{command} >&2 & {command}; wait")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.truncated == 2 * (30_000_000 - 8192)
    assert peak < 5_000_000


def test_a_flood_ends_at_the_deadline_with_its_first_bytes() -> None:
    result = run("yes", CommandBackend(timeout_s=0.3))
    assert result.timed_out
    assert result.stdout.startswith("y\ny\n")
    assert result.truncated > 100_000


def test_streams_closed_early_do_not_end_the_call() -> None:
    result = run("exec >&- 2>&-; sleep 0.2; exit 4")
    assert (result.exit_code, result.stdout) == (4, "")


def test_a_tool_that_prints_nothing() -> None:
    assert run(":").stdout == run(":").stderr == ""


# Bounds


def test_a_file_that_grows_too_large_is_named_in_the_result(tmp_path: Path) -> None:
    backend = CommandBackend(cwd=tmp_path, limits=ResourceLimits(file_mib=1))
    result = run("exec head -c 3000000 /dev/zero >big", backend)
    assert result.exit_code == 153
    assert result.stderr == "a file may have 1 MiB (--tool-file-size)"
    assert (tmp_path / "big").stat().st_size == 1 << 20
    assert "--tool-file-size" in run("head -c 3000000 /dev/zero >big; exit $?", backend).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not bound address space")
def test_a_process_that_wants_too_much_memory_is_told_the_bound() -> None:
    backend = CommandBackend(limits=ResourceLimits(memory_mib=512))
    result = run(f"{sys.executable} -c 'print(len(bytes(1 << 30)))'", backend)
    assert result.exit_code == 1
    assert result.stderr.endswith("a process may use 512 MiB of address space (--tool-memory)")
    free = CommandBackend(limits=ResourceLimits(memory_mib=0))
    assert run(f"{sys.executable} -c 'print(len(bytes(1 << 30)))'", free).stdout == "1073741824\n"


def test_a_process_that_burns_cpu_time_is_told_the_bound() -> None:
    result = run("while :; do :; done", CommandBackend(limits=ResourceLimits(cpu_s=1)))
    assert result.exit_code == 152
    assert result.stderr == "killed: more than 1 s of CPU time"


def test_no_core_file_is_written(tmp_path: Path) -> None:
    assert run("ulimit -c").stdout == "0\n"


# Without a shell


def argv(*items: str, **arguments: Any) -> ToolResult:
    return CommandBackend().call(Tool("t", exec_argv=items), arguments)


@settings(deadline=None, max_examples=25)
@given(TEXT)
def test_argv_every_string_arrives_byte_for_byte(text: str) -> None:
    tool = Tool("t", exec_argv=("printf", "%s", "{x}"))
    assert CommandBackend(limit=1 << 20).call(tool, {"x": text}).stdout == text


def test_argv_placeholders_are_whole_arguments_and_absent_ones_leave_none() -> None:
    result = argv("printf", "<%s>", "{a}", "{b}", "x{y", "{c}", a="1 2; $(id)", c=["é", 1])
    assert result.stdout == '<1 2; $(id)><x{y><["é",1]>'


def test_argv_has_the_same_environment_limits_and_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert {line.partition("=")[0] for line in argv("env").stdout.splitlines()} <= {"PATH", "HOME", "LANG"}
    assert argv("cat").stdout == ""
    result = CommandBackend(timeout_s=0.3).call(Tool("t", exec_argv=("sleep", "600")), {})
    assert (result.exit_code, result.timed_out) == (124, True)


def test_argv_needs_no_shell_and_exec_comes_first_where_there_is_one(tmp_path: Path) -> None:
    tool = Tool("t", exec="echo shell", exec_argv=("echo", "plain"))
    assert CommandBackend().call(tool, {}).stdout == "shell\n"
    assert CommandBackend(shell=str(tmp_path / "none")).call(tool, {}).stdout == "plain\n"


def test_argv_never_runs_a_program_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thing").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "thing").chmod(0o755)
    monkeypatch.setenv("PATH", f":.:{os.environ['PATH']}")
    tool = Tool("t", exec_argv=("thing",))
    result = CommandBackend(cwd=tmp_path).call(tool, {})
    assert (result.exit_code, result.stdout) == (126, "")
    assert "no program 'thing'" in result.stderr


def test_argv_shows_its_command_quoted_and_refuses_nul() -> None:
    tool = Tool("t", exec_argv=("cat", "--", "{path}"))
    assert command_text(tool, {"path": "a b"}) == "cat -- 'a b'"
    assert CommandBackend().call(tool, {"path": "a\0b"}).exit_code == 2
    assert CommandBackend().call(tool, {"path": "a" * 3_000_000}).exit_code == 126


# Settings of one tool


def test_a_tool_may_have_its_own_time_and_output() -> None:
    tool = Tool("t", exec="printf '%0100d' 1; sleep 600", timeout_s=0.4, max_output=10)
    result = CommandBackend(timeout_s=600).call(tool, {})
    assert result.timed_out
    assert result.stdout == "00000…[truncated 90 bytes]00001"


def test_a_tool_may_have_a_folder_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "out").symlink_to("/")
    backend = CommandBackend(cwd=tmp_path)
    assert (
        backend.call(Tool("t", exec="pwd -P", cwd="sub"), {}).stdout == f"{os.path.realpath(tmp_path)}/sub\n"
    )
    for folder in ("out", "..", "/"):
        result = backend.call(Tool("t", exec="echo ran", cwd=folder), {})
        assert (result.exit_code, result.stdout) == (126, "")
        assert "leads out" in result.stderr


def test_a_tool_that_wants_a_sandbox_does_not_run_outside_one() -> None:
    result = CommandBackend().call(Tool("t", exec="echo ran", sandbox=True), {})
    assert (result.exit_code, result.stdout) == (126, "")
    assert "only in a sandbox" in result.stderr


def test_a_variable_that_the_user_names_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_6", "it's")
    assert run('printf %s "$TOKEN_6"', CommandBackend(environment=["TOKEN_6"])).stdout == "it's"
    for name in ("NOT_SET_6", "A=B", ""):
        with pytest.raises(UsageError, match="--tool-env"):
            CommandBackend(environment=[name])


# Ends


def test_a_timeout_returns_what_was_printed_and_says_so() -> None:
    result = run("echo partial; echo e >&2; sleep 60", CommandBackend(timeout_s=0.5))
    assert result.timed_out
    assert result.exit_code == 124
    assert result.stdout == "partial\n"
    assert result.stderr == "e\ntimed out after 0.5 s and was killed"
    assert result.duration_sec < 30


def test_a_timeout_is_sigterm_first_and_sigkill_after() -> None:
    polite = run("trap 'echo bye; exit' TERM; while :; do sleep 0.05; done", CommandBackend(timeout_s=2))
    assert polite.stdout == "bye\n"
    stubborn = run("trap '' TERM; echo $$; while :; do sleep 0.05; done", CommandBackend(timeout_s=2))
    assert stubborn.timed_out
    assert gone(pids_of(stubborn)[0])


def test_a_timeout_kills_the_whole_group() -> None:
    result = run("sleep 61 & echo $!; (sleep 62) & echo $!; wait", CommandBackend(timeout_s=0.3))
    assert result.timed_out
    assert all(gone(pid) for pid in pids_of(result))


@pytest.mark.parametrize(
    "template",
    ["sleep 600 & echo $!", "(while :; do sleep 0.1; echo >&2; done) & echo $!", "nohup sleep 600 & echo $!"],
)
def test_p75_a_grandchild_that_holds_the_pipe_cannot_hold_the_agent(template: str) -> None:
    result = run(template)
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.duration_sec < 20
    assert gone(pids_of(result)[0])


LEAVE = (
    "import os, time\n"
    "for _ in range(2):\n    if os.fork(): os._exit(0)\n    os.setsid()\n"  # as a daemon does
    "print(os.getpid(), flush=True)\ntime.sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere what leaves the process group outlives it")
def test_p75_not_even_one_that_left_the_group_and_became_a_daemon() -> None:
    result = run(f'{sys.executable} -c "$x" & sleep 1', x=LEAVE)
    assert gone(pids_of(result)[0])
    assert result.duration_sec < 20


def test_without_a_keeper_the_group_is_killed_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen application has no interpreter for it."""
    monkeypatch.setattr("posttrainllm.agent.process.keeper_command", lambda: None)
    result = run("sleep 600 & echo $!; sleep 600", CommandBackend(timeout_s=0.5))
    assert result.timed_out
    assert gone(pids_of(result)[0])
    assert (run("exit 3").exit_code, run("kill -9 $$").exit_code) == (3, 137)
    plain = CommandBackend().call(Tool("t", exec_argv=("echo", "{x}"), parameters={}), {"x": "hi"})
    assert (plain.stdout, plain.exit_code) == ("hi\n", 0)


def test_signals_that_the_program_ignores_or_blocks_do_not_reach_a_tool() -> None:
    program = (
        "import signal\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
    ) + textwrap.dedent(AGENT)
    template = "trap 'echo trapped' USR1; kill -USR1 $$; (exit 3); echo $?; yes | head -1; exit 5"
    done = subprocess.run(
        [sys.executable, "-c", program, template], capture_output=True, check=True, text=True
    )
    assert "stdout='trapped\\n3\\ny\\n'" in done.stdout
    assert "exit_code=5" in done.stdout


def test_other_children_of_the_program_are_left_alone() -> None:
    """An embedding program has children of its own; a call neither kills nor reaps them."""
    with subprocess.Popen(["sleep", "600"]) as ours, subprocess.Popen(["sh", "-c", "exit 5"]) as ended:
        time.sleep(0.2)
        run("setsid sleep 600 & sleep 0.2")
        assert ours.poll() is None
        assert ended.wait() == 5
        ours.kill()


def test_a_tool_that_kills_its_keeper_ends_the_call_and_its_group() -> None:
    result = run("echo $$; kill -9 $PPID; sleep 600", CommandBackend(timeout_s=20))
    assert (result.exit_code, result.timed_out) == (137, False)
    assert gone(pids_of(result)[0])


def test_what_a_background_child_prints_at_once_is_kept() -> None:
    assert "late" in run("(sleep 0.1; echo late) & echo now").stdout


def test_no_process_and_no_descriptor_is_left_behind() -> None:
    def descriptors() -> int:
        return sum(1 for number in range(256) if _is_open(number))

    before = descriptors()
    for template in (":", "sleep 600 &", "kill -9 0", "exit 3", "if"):
        run(template)
    assert descriptors() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[str], list[int]]]:
    """Starts a program that runs a tool; returns it and the tool's processes, once they run."""

    def start(before: str = "") -> tuple[subprocess.Popen[str], list[int]]:
        pids = tmp_path / "pids"
        template = f"{before} sleep 601 & echo $! $$ >'{pids}.new'; mv '{pids}.new' '{pids}'; sleep 602"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(AGENT), template], stdout=subprocess.PIPE, text=True
        )
        for _ in range(400):
            if pids.exists():
                break
            time.sleep(0.05)
        return process, [int(word) for word in pids.read_text().split()]

    return start


def test_ctrl_c_during_a_call_kills_the_group_and_is_raised(agent: Any) -> None:
    process, pids = agent()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "interrupted\n"
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_p82_tools_do_not_outlive_an_agent_that_is_killed(agent: Any, number: int) -> None:
    process, pids = agent()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert all(gone(pid) for pid in pids)


def test_p82_not_even_tools_that_ignore_the_signals_of_their_group(agent: Any) -> None:
    process, pids = agent("trap '' TERM; kill -TERM 0;")
    process.kill()
    process.communicate(timeout=30)
    assert all(gone(pid) for pid in pids)


DYING_AGENT = """
    import os, sys
    from posttrainllm.agent.executor import CommandBackend
    from posttrainllm.agent.tools import Tool
    whole = os.write
    def half(fd, data):
        whole(fd, bytes(data)[:int(sys.argv[1])])
        os._exit(9)
    os.write = half
    CommandBackend().call(Tool("t", exec="echo ran >ran; :", exec_args=("x",)), {"x": "1"})
"""


@pytest.mark.parametrize("written", [1, 2, 16, 18])
def test_a_script_cut_short_never_runs(written: int, tmp_path: Path) -> None:
    """The agent dies while it writes: half a command must not be taken for a whole one."""
    command = [sys.executable, "-c", textwrap.dedent(DYING_AGENT), str(written)]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 9
    time.sleep(0.3)
    assert list(tmp_path.iterdir()) == []


def test_calls_in_threads_are_independent() -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = run('sleep 0.1; printf %s "$x"', x=str(number) * 50_000).stdout[:9]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number) * 9 for number in range(4)}


# Refusals


def test_no_bash_is_a_result_that_says_so(tmp_path: Path) -> None:
    result = run("echo", CommandBackend(shell=str(tmp_path / "bash")))
    assert result.exit_code == 127
    assert "bash is missing" in result.stderr


def test_a_shell_or_folder_that_cannot_be_used_is_a_result(tmp_path: Path) -> None:
    shell = tmp_path / "bash"
    shell.write_text("not a program")
    assert run("echo", CommandBackend(shell=str(shell))).exit_code == 126
    assert run("echo", CommandBackend(cwd=tmp_path / "absent")).exit_code == 126


def test_a_tool_without_a_command_is_a_result() -> None:
    assert CommandBackend().call(Tool("t", handler="h"), {}).exit_code == 127


@pytest.mark.parametrize("value", ["a\0b", "\ud800", ["\ud800"], float("nan"), {"k": (1,)}])
def test_values_that_bash_cannot_hold_are_results_even_unchecked(value: Any) -> None:
    result = run("echo ran", x=value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "x" in result.stderr


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_is_above_zero(seconds: float) -> None:
    with pytest.raises(UsageError, match="--tool-timeout"):
        CommandBackend(timeout_s=seconds)


def test_p83_a_result_prints_on_any_console() -> None:
    result = run("printf 'π\\xff'")
    program = (
        "import sys, json; sys.stdout.buffer.write(json.dumps(sys.argv[1], ensure_ascii=False).encode())"
    )
    done = subprocess.run([sys.executable, "-c", program, result.stdout], capture_output=True, check=True)
    assert json.loads(done.stdout.decode()) == "π\ufffd"
