"""`agent --prompt-cache-dir` and `posttrainllm cache`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
ASK = ("agent", "demo", "--single", "What is 6*7?", "--json-out")
LOADED = "loaded system-prompt cache ({} tokens) — skipping prefill"


def events(done: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for event in found:
        event.pop("time")
        event.pop("duration_sec", None)
    return found


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
    assert events(first) == events(second) == events(without)
    steps = [event for event in events(second) if event["type"] == "assistant"]
    assert steps[0]["cached_tokens"] == tokens, "the events show the hit too"


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
    assert all(events(process) == events(done[0]) for process in done)
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
