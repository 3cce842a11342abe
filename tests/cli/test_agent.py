"""`posttrainllm agent` end to end, on small random models: every step is a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
ECHO = ROOT / "tools_schemas" / "echo.json"


@pytest.fixture(scope="module")
def bundle(make_bundle: Callable[..., Path]) -> Path:
    """Random weights, context 2,048."""
    return make_bundle(d_model=32, heads=4, layers=2, ctx=2048)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(d_model=32, heads=4, layers=2, ctx=2048)


@pytest.fixture
def short_tools(tmp_path: Path) -> Path:
    """A tool that a random model can call: its argument ends by itself, and so does its answer's budget."""
    tool = {
        "name": "echo",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 3}},
            "required": ["text"],
        },
        "_exec": "printf '%s' \"$text\"",
    }
    path = tmp_path / "short.json"
    path.write_text(json.dumps([tool]))
    return path


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_out_has_events_and_nothing_else(run: Run, bundle: Path, short_tools: Path) -> None:
    done = run("agent", bundle, "--tools", short_tools, "--single", "hi 🙂", "--json-out", "--max-tokens", 20)
    found = events(done.stdout)
    assert [event["type"] for event in found][:2] == ["user", "assistant"]
    assert found[0]["text"] == "hi 🙂"
    assert all(event["v"] == 1 and event["turn"] == 0 for event in found)
    assert done.returncode == (0 if found[-1]["type"] == "answer" else 4)
    assert found[-1]["type"] in ("answer", "stop")


def test_seeds_make_runs_equal(run: Run, bundle: Path, short_tools: Path) -> None:
    def texts(seed: int) -> list[Any]:
        flags = ["--json-out", "--temperature", 1, "--seed", seed, "--max-tokens", 30, "--max-steps", 2]
        done = run("agent", bundle, "--tools", short_tools, "--single", "hi", *flags)
        return [event.get("raw") for event in events(done.stdout)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_transcript_is_appended_and_follows_the_schema(
    run: Run, bundle: Path, short_tools: Path, tmp_path: Path
) -> None:
    transcript = tmp_path / "new folder" / "t.jsonl"
    transcript.parent.mkdir()
    transcript.write_bytes(b'{"v": 1, "type": "torn')  # a killed run's last line
    calls = 0
    for seed in range(4):
        flags = ["--temperature", 1, "--seed", seed, "--max-tokens", 20, "--transcript", transcript]
        run("agent", bundle, "--tools", short_tools, "--single", "hi", *flags)
    torn, *lines = transcript.read_text(encoding="utf-8").splitlines()
    assert torn == '{"v": 1, "type": "torn'
    schema = json.loads((ROOT / "tools_schemas" / "events.schema.json").read_text())
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(json.loads(line))
    found = events("\n".join(lines))
    assert sum(event["type"] == "user" for event in found) == 4
    calls = sum(event["type"] == "tool_call" for event in found)
    assert calls == sum(event["type"] == "tool_result" for event in found) > 0


def test_no_constrain_falls_back_to_raw_text(run: Run, bundle: Path) -> None:
    done = run(
        "agent",
        bundle,
        "--tools",
        ECHO,
        "--single",
        "Use the echo tool",
        "--no-constrain",
        "--max-tokens",
        30,
    )
    assert done.returncode == 5
    assert done.stdout.strip()
    assert "no JSON reply" in done.stderr


def test_a_checkpoint_is_exported_once(run: Run, checkpoint: Path, cache_dir: Path) -> None:
    flags = ["--tools", ECHO, "--single", "x", "--max-tokens", 5]
    first = run("agent", checkpoint, *flags)
    assert first.returncode == 4
    assert "agent: exported" in first.stderr
    bundles = sorted(path for path in (cache_dir / "bundles").iterdir() if path.is_dir())
    assert len(bundles) == 1
    stamp = (bundles[0] / "bundle.json").stat().st_mtime_ns
    second = run("agent", checkpoint, *flags)
    assert second.returncode == 4
    assert "exported" not in second.stderr
    assert (bundles[0] / "bundle.json").stat().st_mtime_ns == stamp
    (bundles[0] / "model.onnx.data").unlink()
    assert "agent: exported" in run("agent", checkpoint, *flags).stderr, "a damaged cache heals itself"


def test_another_content_under_the_same_name_is_noticed(
    run: Run, make_checkpoint: Callable[..., Path], tmp_path: Path, cache_dir: Path
) -> None:
    model = tmp_path / "model.tinygpt"
    for seed in (1, 2):
        model.write_bytes(make_checkpoint(d_model=16, heads=2, layers=1, ctx=1024, seed=seed).read_bytes())
        assert "exported" in run("agent", model, "--tools", ECHO, "--single", "x", "--max-tokens", 1).stderr
    assert len([path for path in (cache_dir / "bundles").iterdir() if path.is_dir()]) == 2


def test_eight_first_starts_export_once(run: Run, checkpoint: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        starts = [
            pool.submit(run, "agent", checkpoint, "--tools", ECHO, "--single", "x", "--max-tokens", 2)
            for _ in range(8)
        ]
        done = [start.result() for start in starts]
    assert [process.returncode for process in done] == [4] * 8
    assert sum("agent: exported" in process.stderr for process in done) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"hello world, this is no model", "expected a .tinygpt file"),
        (b"TGPT\x02\0\0\0\xff\xff\xff\x7f{}", "header"),
        (None, "no such file"),
    ],
)
def test_an_unusable_model_is_one_line_and_code_3(
    run: Run,
    error_line: Callable[[str], str],
    tmp_path: Path,
    cache_dir: Path,
    content: bytes | None,
    expected: str,
) -> None:
    model = tmp_path / "model.tinygpt"
    if content is not None:
        model.write_bytes(content)
    done = run("agent", model, "--tools", ECHO, "--single", "x")
    assert done.returncode == 3
    assert expected in error_line(done.stderr)
    assert str(model) in done.stderr
    assert not list(cache_dir.rglob("bundle.json"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "line 1"),
        ('{"tools": 3}', "/tools"),
        ('[{"name": "a b", "_exec": "true"}]', "name"),
        ('[{"name": "a", "_exec": "true", "_exec_args": ["PATH"]}]', "PATH"),
        (
            '[{"name": "a", "_exec": "x", "parameters": {"type": "object", "properties": {"p": {"not": {}}}}}]',
            "not",
        ),
    ],
)
def test_a_bad_tool_file_is_one_line_and_code_3(
    run: Run, error_line: Callable[[str], str], bundle: Path, tmp_path: Path, content: str, expected: str
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(content)
    done = run("agent", bundle, "--tools", tools, "--single", "x")
    assert done.returncode == 3
    line = error_line(done.stderr)
    assert str(tools) in line
    assert expected in line


def test_a_named_provider_that_is_missing_is_an_error(
    run: Run, error_line: Callable[[str], str], bundle: Path
) -> None:
    """Never a silent CPU."""
    done = run("agent", bundle, "--tools", ECHO, "--single", "x", "--provider", "cuda")
    assert done.returncode == 2
    assert "--provider cuda" in error_line(done.stderr)


def test_the_repl_reads_lines_until_quit(run: Run, bundle: Path, short_tools: Path) -> None:
    done = run(
        "agent",
        bundle,
        "--tools",
        short_tools,
        "--max-tokens",
        8,
        "--json-out",
        stdin="one\n\ntwo\n:quit\nthree\n",
    )
    assert done.returncode == 4, "the last turn's"
    assert [event["text"] for event in events(done.stdout) if event["type"] == "user"] == ["one", "two"]
    assert {event["turn"] for event in events(done.stdout)} == {0, 1}


def test_the_console_may_have_any_encoding(run: Run, bundle: Path, short_tools: Path) -> None:
    done = run(
        "agent", bundle, "--tools", short_tools, "--single", "π🙂", "--json-out", "--max-tokens", 5,
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )  # fmt: skip
    assert events(done.stdout)[0]["text"] == "π🙂"
    assert "\r" not in done.stdout


def test_confirm_tools_asks_and_no_is_told_to_the_model(run: Run, bundle: Path, short_tools: Path) -> None:
    for seed in range(10):
        flags = [
            "--confirm-tools",
            "--json-out",
            "--temperature",
            1,
            "--seed",
            seed,
            "--max-tokens",
            20,
            "--max-steps",
            1,
        ]
        done = run("agent", bundle, "--tools", short_tools, "--single", "x", *flags, stdin="n\n")
        calls = [event for event in events(done.stdout) if event["type"] == "tool_call"]
        if calls:
            assert "run it? [y/n/always]" in done.stderr
            assert "printf" in done.stderr
            assert calls[0]["exit_code"] == 126
            assert "declined" in calls[0]["stderr"]
            return
    pytest.fail("no seed made a call")


def test_a_full_context_ends_with_code_4(
    run: Run, make_bundle: Callable[..., Path], short_tools: Path
) -> None:
    small = make_bundle(d_model=16, heads=2, layers=1, ctx=900)
    done = run("agent", small, "--tools", short_tools, "--single", "x" * 200, "--json-out")
    assert done.returncode == 4
    assert events(done.stdout)[-1]["reason"] == "context"
    tiny = make_bundle(d_model=16, heads=2, layers=1, ctx=128)
    refused = run("agent", tiny, "--tools", short_tools, "--single", "x")
    assert refused.returncode == 4
    assert "at most 128" in refused.stderr


def ends(pid: int) -> bool:
    """Whether the process is gone within five seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_stops_the_turn_and_leaves_no_tool_running(bundle: Path, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    tool = {
        "name": "hang",
        "parameters": {"type": "object", "properties": {}},
        "_exec": f"echo $$ > '{marker}'; sleep 600",
    }
    tools = tmp_path / "hang.json"
    tools.write_text(json.dumps([tool]))
    for seed in range(12):
        command = [
            sys.executable,
            "-m",
            "posttrainllm",
            "agent",
            str(bundle),
            "--tools",
            str(tools),
            "--single",
            "x",
        ]
        flags = ["--json-out", "--temperature", "1", "--seed", str(seed), "--max-tokens", "10"]
        process = subprocess.Popen(command + flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not (marker.exists() and marker.read_text().strip()):
            time.sleep(0.02)
        if process.poll() is not None:  # this seed did not call
            process.communicate()
            continue
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert events(out)[-1]["reason"] == "interrupted"
        assert "Traceback" not in err
        assert ends(int(marker.read_text()))
        return
    pytest.fail("no seed made a call")


def test_a_damaged_cache_is_mended(run: Run, checkpoint: Path, cache_dir: Path) -> None:
    flags = ["--tools", ECHO, "--single", "x", "--max-tokens", 2]
    run("agent", checkpoint, *flags)
    (graph,) = cache_dir.rglob("model.onnx")
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    mended = run("agent", checkpoint, *flags)
    assert mended.returncode == 4, mended.stderr
    assert "agent: exported" in mended.stderr


def test_nobody_there_to_confirm_counts_as_no(run: Run, bundle: Path, short_tools: Path) -> None:
    """The turn still ends with an answer or a stop."""
    for seed in range(10):
        flags = [
            "--confirm-tools",
            "--json-out",
            "--temperature",
            1,
            "--seed",
            seed,
            "--max-tokens",
            20,
            "--max-steps",
            1,
        ]
        done = run("agent", bundle, "--tools", short_tools, "--single", "x", *flags, stdin="")
        assert events(done.stdout)[-1]["type"] in ("answer", "stop")
        if any(event["type"] == "tool_call" for event in events(done.stdout)):
            assert "counts as no" in done.stderr
            return
    pytest.fail("no seed made a call")


def test_a_script_gets_the_code_of_the_last_turn(run: Run, bundle: Path, short_tools: Path) -> None:
    done = run("agent", bundle, "--tools", short_tools, "--max-tokens", 1, stdin="one\n")
    assert done.returncode == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("where", ["transcript", "stdout"])
def test_a_full_disk_is_one_line(bundle: Path, where: str) -> None:
    command = [
        sys.executable,
        "-m",
        "posttrainllm",
        "agent",
        str(bundle),
        "--tools",
        str(ECHO),
        "--single",
        "x",
    ]
    command += [
        "--max-tokens",
        "2",
        "--json-out",
        *(["--transcript", "/dev/full"] if where == "transcript" else []),
    ]
    with open("/dev/full", "w") as full:
        stdout = full if where == "stdout" else subprocess.DEVNULL
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "unexpected" not in done.stderr
    assert (where == "transcript") == ("--transcript /dev/full" in done.stderr)


@pytest.mark.skipif(os.name != "posix", reason="closing streams is spelled for a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams_are_no_error(bundle: Path, closed: str) -> None:
    command = f"'{sys.executable}' -m posttrainllm agent '{bundle}' --tools '{ECHO}' --single x --max-tokens 2 {closed}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


def test_a_name_that_no_system_allows_is_one_line(run: Run, error_line: Callable[[str], str]) -> None:
    done = run("agent", "x" * 300, "--tools", ECHO, "--single", "x")
    assert done.returncode == 3
    assert "unexpected" not in error_line(done.stderr)
