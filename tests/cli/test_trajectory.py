"""Recording and checking by the command, with the bundled echo model: real processes, also killed ones."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from posttrainllm.agent.trajectory import Trajectory, read_trajectory

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
ASK = "Use the echo tool to say hello"


def only(folder: Path) -> Trajectory:
    (path,) = folder.iterdir()
    return read_trajectory(path)


def test_record_verify_show(run: Run, error_line: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "runs"
    flags = ["--trajectory-dir", folder, "--trajectory-task", "greet"]
    done = run("agent", "echo", "--single", ASK, *flags)
    assert done.returncode == 0
    found = only(folder)
    assert (found.task, found.checkpoint_path, found.summary["ended"]) == ("greet", "echo", "answer")
    (path,) = folder.iterdir()
    assert path.stem == found.id
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()

    checked = run("trajectory", "verify", path, "echo")
    assert checked.returncode == 0, checked.stdout
    assert "wrong: 0" in checked.stdout.splitlines()

    other = run("trajectory", "verify", path, "demo")
    assert other.returncode == 3
    assert found.model_fingerprint in error_line(other.stderr)

    shown = run("trajectory", "show", path)
    assert shown.returncode == 0
    assert "calls echo" in shown.stdout
    assert f"{ASK}\n" in shown.stdout
    assert "\x1b" not in shown.stdout

    body = json.loads(path.read_text(encoding="utf-8"))
    last = body["steps"][-1]
    last["output_ids"][last["output_forced"].index(0)] ^= 1
    path.write_text(json.dumps(body))
    tampered = run("trajectory", "verify", path, "echo")
    assert tampered.returncode == 1
    assert "did not come out again" in error_line(tampered.stderr)
    assert "  wrong: step" in tampered.stdout


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_chat_is_one_file(run: Run, tmp_path: Path) -> None:
    lines = f"{ASK}\nUse the echo tool to say é 🙂\n"
    for encoding in ("ascii", "latin-1", "utf-16"):
        folder = tmp_path / encoding
        done = run(
            "agent", "echo", "--trajectory-dir", folder, "--json-out", stdin=lines, env={"PYTHONIOENCODING": encoding}
        )  # fmt: skip
        users = [json.loads(line)["text"] for line in done.stdout.splitlines() if '"user"' in line]
        assert users == lines.splitlines()
        found = only(folder)
        assert [step.content for step in found.steps if step.role == "user"] == lines.splitlines()
        (path,) = folder.iterdir()
        assert "é 🙂".encode() in path.read_bytes()
        assert b"\r" not in path.read_bytes()


def test_eval_scores_what_it_records(run: Run, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    task: dict[str, Any] = {"id": "one", "prompt": ASK, "calls": [{"tool": "echo"}], "answer": "hello"}
    tasks.write_text("\n".join(map(json.dumps, [task, {**task, "id": "two", "answer": "goodbye"}])))
    folder = tmp_path / "runs"
    assert run("eval", tasks, "echo", "--trajectory-dir", folder).returncode == 0
    found = {item.task: item.reward for item in map(read_trajectory, folder.iterdir())}
    assert found == {"one": 1.0, "two": 0.0}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["agent", "echo", "--single", "x", "--trajectory-task", "t"], 2, "--trajectory-task: without"),
        (
            ["agent", "echo", "--single", "x", "--trajectory-dir", "file/d"],
            2,
            "--trajectory-dir file/d: cannot",
        ),
        (["trajectory", "verify", "file"], 2, "no model"),
        (["trajectory", "look", "file"], 2, "trajectory look: no such action"),
        (["trajectory", "show", "file", "echo"], 2, "a second argument"),
        (["trajectory", "show", "file"], 3, "file: empty"),
        (["trajectory", "verify", "none", "echo"], 3, "none: cannot be read"),
    ],
)
def test_errors_are_one_line(
    run: Run,
    error_line: Callable[[str], str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    expected: str,
) -> None:
    (tmp_path / "file").write_text("")
    done = run(*arguments)
    assert done.returncode == code
    assert expected in error_line(done.stderr)


def test_eight_runs_share_a_folder_and_a_transcript(run: Run, tmp_path: Path) -> None:
    folder, transcript = tmp_path / "runs", tmp_path / "t.jsonl"
    flags = ["--single", ASK, "--trajectory-dir", folder, "--transcript", transcript]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: run("agent", "echo", *flags), range(8)))
    assert [process.returncode for process in done] == [0] * 8, done[0].stderr
    assert len(list(folder.iterdir())) == 8
    assert {read_trajectory(path).summary["ended"] for path in folder.iterdir()} == {"answer"}
    found = [json.loads(line) for line in transcript.read_bytes().split(b"\n")[:-1]]
    assert sum(event["type"] == "answer" for event in found) == 8


def test_zero_bytes_in_a_transcript_hide_nothing_around_them(run: Run, tmp_path: Path) -> None:
    """As a power cut leaves them: what stood before and what comes after are lines of their own."""
    transcript = tmp_path / "t.jsonl"
    before = b'{"v": 1, "type": "user", "turn": 0, "time": 1, "text": "x"}\n'
    transcript.write_bytes(before + b"\0" * 64)
    assert run("agent", "echo", "--single", ASK, "--transcript", transcript).returncode == 0
    first, damaged, *lines = transcript.read_bytes().split(b"\n")[:-1]
    assert first + b"\n" == before
    assert damaged == b"\0" * 64
    schema = json.loads((ROOT / "tools_schemas" / "events.schema.json").read_text())
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(json.loads(line))
    assert json.loads(lines[-1])["type"] == "answer"


def chat(
    folder: Path, cache_dir: Path, *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "posttrainllm", "agent", "echo", "--trajectory-dir", str(folder), *flags]
    environment = {**os.environ, "POSTTRAINLLM_CACHE_DIR": str(cache_dir), **(env or {})}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)


def wait_for(folder: Path, turns: int) -> Trajectory:
    """The conversation in `folder` once it has so many user turns."""
    for _ in range(1200):
        for path in folder.glob("*.atraj") if folder.is_dir() else ():
            found = read_trajectory(path)
            if int(found.summary["turns"]) >= turns:
                return found
        time.sleep(0.05)
    pytest.fail("no trajectory came")


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_killed_chat_leaves_whole_files(run: Run, cache_dir: Path, tmp_path: Path) -> None:
    """Killed at different moments: what can be read is a conversation up to a step, and it verifies."""
    for turns in (1, 2, 3):
        folder = tmp_path / f"runs{turns}"
        process = chat(folder, cache_dir)
        assert process.stdin is not None
        process.stdin.write(f"{ASK}\n".encode() * 3)
        process.stdin.flush()
        seen = wait_for(folder, turns)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (path,) = folder.glob("*.atraj")
        found = read_trajectory(path)
        assert len(found.steps) >= len(seen.steps)
        assert [step.ids for step in found.steps[: len(seen.steps) - 1]] == [
            step.ids if step.role != "assistant" else step.output_ids for step in seen.steps[:-1]
        ]
        assert run("trajectory", "verify", path, "echo").returncode == 0
        assert run("traces-to-data", folder, "--dry-run", "--no-tool-echo-drop").returncode == 0


def test_ctrl_c_takes_the_turn_back_in_the_file_too(cache_dir: Path, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    tools = tmp_path / "tools.json"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    command = f"echo $$ > '{marker}'; sleep 600"
    tools.write_text(json.dumps([{"name": "echo", "parameters": parameters, "_exec": command}]))
    folder = tmp_path / "runs"
    process = chat(folder, cache_dir, "--tools", str(tools), "--single", ASK)
    for _ in range(1200):
        if marker.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    found = only(folder)
    assert [step.role for step in found.steps] == ["system"]
    assert found.summary["taken_back"] == "1"


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals")
def test_show_has_colours_on_a_terminal_and_obeys_no_escape(run: Run, tmp_path: Path) -> None:
    steps = [{"role": "user", "content": "red \x1b[31m [bold]alert[/bold]"}]
    path = tmp_path / "a.atraj"
    path.write_text(json.dumps({"version": 1, "id": "x", "steps": steps}))
    first, second = pty.openpty()
    command = [sys.executable, "-m", "posttrainllm", "trajectory", "show", str(path)]
    subprocess.run(command, stdout=second, check=True, env={**os.environ, "TERM": "xterm", "NO_COLOR": ""})
    os.close(second)
    text = os.read(first, 65536).decode()
    os.close(first)
    assert "\\x1b[31m [bold]alert[/bold]" in text
    assert "\x1b[1;36m" in text, "the role's colour"
