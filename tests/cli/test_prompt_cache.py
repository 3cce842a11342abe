"""`agent --prompt-cache-dir` and `posttrainllm cache`."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.cli.bundled import bundled_model, bundled_tools

Run = Callable[..., Any]
ASK = ("agent", "demo", "--single", "What is 6*7?", "--json-out")
LOADED = "loaded system-prompt cache ({} tokens) — skipping prefill"


def events(done: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for event in found:
        event.pop("time")
        event.pop("duration_sec", None)
    return found


def cached_tokens(done: Any) -> list[int]:
    """Of each step, the ids that were not computed."""
    return [event["cached_tokens"] for event in events(done) if event["type"] == "assistant"]


def said(done: Any) -> list[dict[str, Any]]:
    """The events without their counts of cached tokens."""
    return [{key: value for key, value in event.items() if key != "cached_tokens"} for event in events(done)]


def test_the_second_start_skips_the_prefill_and_says_the_same(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    first, second, without = (
        run(*ASK, "--prompt-cache-dir", folder),
        run(*ASK, "--prompt-cache-dir", folder),
        run(*ASK),
    )
    tokens = json.loads(run("cache", "ls", folder, "--json").stdout)["entries"][0]["tokens"]
    assert f"stored system-prompt cache ({tokens} tokens)" in first.stderr
    assert LOADED.format(tokens) in second.stderr
    cached = [cached_tokens(done) for done in (first, second, without)]
    assert [counts[0] for counts in cached] == [0, tokens, 0], "a hit is proven by what was not computed"
    assert cached[0][1:] == cached[1][1:] == cached[2][1:]
    assert said(first) == said(second) == said(without)


def test_weights_that_were_replaced_in_place_are_noticed(run: Run, tmp_path: Path) -> None:
    bundle, folder = tmp_path / "bundle", tmp_path / "prompts"
    shutil.copytree(bundled_model("demo"), bundle)
    ask = ("agent", bundle, "--tools", bundled_tools("demo"), *ASK[2:], "--prompt-cache-dir", folder)
    run(*ask)
    weights = bundle / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[-4000:] = data[-8000:-4000]
    weights.write_bytes(data)
    done = run(*ask)
    assert "skipping prefill" not in done.stderr
    assert cached_tokens(done)[0] == 0


def test_a_cache_of_another_model_is_refused_with_both_names(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    run(*ASK, "--prompt-cache-dir", folder)
    (file,) = folder.iterdir()
    done = run("agent", "echo", "--single", "x", "--prompt-cache-dir", folder)
    (line,) = [line for line in done.stderr.splitlines() if file.name in line]
    assert str(bundled_model("demo")) in line
    assert str(bundled_model("echo")) in line
    assert file.name[:12] in line


def test_eval_feeds_a_system_prompt_once_for_all_its_runs(run: Run, tmp_path: Path) -> None:
    folder, tasks = tmp_path / "prompts", tmp_path / "tasks.jsonl"
    rows = [
        {"id": f"t{number}", "prompt": f"What is {number}*7?", "tool": "calculate"} for number in range(3)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("eval", tasks, "demo", "--json-report")
    runs = [
        run(*flags, tmp_path / "1.json", "--prompt-cache-dir", folder),
        run(*flags, tmp_path / "2.json", "--prompt-cache-dir", folder),
        run(*flags, tmp_path / "3.json"),
    ]
    assert [done.returncode for done in runs] == [0, 0, 0], runs[0].stderr
    assert runs[0].stderr.count("eval: stored system-prompt cache") == 1
    assert runs[1].stderr.count("eval: loaded system-prompt cache") == 1
    one, two, three = (
        [
            (task["calls"], task["answer"])
            for task in json.loads((tmp_path / f"{n}.json").read_text())["tasks"]
        ]
        for n in (1, 2, 3)
    )
    assert one == two == three


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
def test_a_full_disk_costs_the_entry_and_not_the_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "posttrainllm", *ASK, "--prompt-cache-dir", str(tmp_path / "prompts")]
    limited = f"ulimit -f 16; exec {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not stored: --prompt-cache-dir") == 1
    assert json.loads(done.stdout.splitlines()[-1])["type"] == "answer"
    assert list((tmp_path / "prompts").iterdir()) == [], "nor is half a file left"


def test_another_prompt_says_which_token_differs(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    run(*ASK, "--prompt-cache-dir", folder)
    done = run(*ASK, "--prompt-cache-dir", folder, "--system", "You are a clock.")
    assert "nothing loaded; the nearest entry" in done.stderr
    assert "at token" in done.stderr
    assert len(json.loads(run("cache", "ls", folder, "--json").stdout)["entries"]) == 2


def test_eight_starts_at_once(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    with ThreadPoolExecutor(8) as pool:
        done = [
            start.result()
            for start in [pool.submit(run, *ASK, "--prompt-cache-dir", folder) for _ in range(8)]
        ]
    assert [process.returncode for process in done] == [0] * 8
    assert all(said(process) == said(done[0]) for process in done)
    assert len(list(folder.iterdir())) == 1


def test_ls_verify_explain_and_rm(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    run(*ASK, "--prompt-cache-dir", folder)
    (file,) = folder.iterdir()
    listed = run("cache", "ls", folder)
    assert file.name in listed.stdout
    assert listed.stdout.splitlines()[-1].startswith("1 file, ")
    assert run("cache", "verify", folder).returncode == 0
    explained = run("cache", "explain", folder, "demo")
    assert explained.returncode == 0
    assert f"{file.name}: the whole prompt" in explained.stdout
    other = run("cache", "explain", folder, "demo", "--system", "You are a clock.")
    assert other.returncode == 1
    assert "the same up to token" in other.stdout
    assert "of another model" in run("cache", "explain", folder, "echo").stdout
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    broken = run("cache", "verify", folder)
    assert broken.returncode == 1
    assert "checksum" in broken.stdout
    mended = run(*ASK, "--prompt-cache-dir", folder)
    assert f"{file.name} is ignored" in mended.stderr
    assert run("cache", "verify", folder).returncode == 0
    missing = run("cache", "rm", folder, file.name, "nope")
    assert missing.returncode == 2
    assert file.exists(), "all or none"
    assert run("cache", "rm", folder).returncode == 0
    assert list(folder.iterdir()) == []


def test_mistakes_are_one_line(run: Run, error_line: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, code, said in (
        (("cache", "list", tmp_path), 2, "cache list: no such action"),
        (("cache", "ls", tmp_path / "none"), 3, "no such folder"),
        (("cache", "ls", tmp_path, "x"), 2, "one word too many"),
        (("cache", "explain", tmp_path, "demo", "x"), 2, "one word too many"),
        ((*ASK, "--prompt-cache-dir", tmp_path / "file"), 2, "--prompt-cache-dir"),
    ):
        done = run(*arguments)
        assert done.returncode == code, done.stderr
        assert said in error_line(done.stderr.splitlines()[-1])
