"""`traces-to-data` as a user runs it: five files in, counts, one output file or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
FIRST = "Which files changed last week?"
SECOND = "What is the weather in Paris?"


def trajectory(prompt: str, response: str, **more: Any) -> str:
    steps = [
        {"role": "user", "content": prompt, "input_ids": [1], "output_ids": []},
        {"role": "assistant", "content": response, "input_ids": [], "output_ids": [2], **more},
    ]
    return json.dumps({"version": 1, "id": "x", "task": "demo", "summary": {}, "steps": steps})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files: of which an exact duplicate, a near duplicate of a prompt, and a tool echo."""
    folder = tmp_path / "runs"
    folder.mkdir()
    call = '{"tool": "list_files", "arguments": {}}'
    for name, content in {
        "1": trajectory(FIRST, '{"answer": "two"}'),
        "2": trajectory(FIRST, '{"answer": "two"}'),
        "3": trajectory(FIRST.replace("changed ", "changed  "), '{"answer": "three"}'),
        "4": trajectory(SECOND, '{"answer": "rain"}'),
        "5": trajectory("List the folder.", call, tool_call={"name": "list_files", "arguments_json": "{}"}),
    }.items():
        (folder / f"{name}.atraj").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ([], (4, 1, 0, 3)),
        (["--minhash-threshold", "0.6"], (4, 1, 1, 2)),
        (["--no-tool-echo-drop"], (5, 1, 0, 4)),
        (["--task", "demo"], (4, 1, 0, 3)),
        (["--task", "other"], (0, 0, 0, 0)),
    ],
)
def test_what_is_kept(
    run: Run, folder: Path, tmp_path: Path, flags: list[str], counts: tuple[int, ...]
) -> None:
    out = tmp_path / "train.jsonl"
    summary = [
        f"raw (user->assistant) samples harvested: {counts[0]}",
        f"exact-duplicates dropped: {counts[1]}",
        f"minhash near-duplicates dropped: {counts[2]}",
        f"emitted: {counts[3]}",
    ]
    dry = run("traces-to-data", folder, "--out", out, "--dry-run", *flags)
    assert (dry.returncode, dry.stdout.splitlines()) == (0, summary)
    assert not out.exists()
    done = run("traces-to-data", folder, "--out", out, *flags)
    assert (done.returncode, done.stdout.splitlines()) == (0, summary)
    assert b"\r" not in out.read_bytes()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == counts[3]
    assert all(set(row) == {"messages", "source_atraj", "task"} for row in rows)
    assert ("only a tool call" in done.stderr) is (counts[0] == 4)


def test_ids_and_pairs(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "ids.jsonl"
    done = run("traces-to-data", folder, "--out", out, "--format", "ids")
    assert "emitted: 4" in done.stdout
    row = json.loads(out.read_text().splitlines()[0])
    assert (row["input_ids"], row["loss_mask"]) == ([1, 2], [0, 1])
    for name, response, reward in (("6", "good", 1), ("7", "bad", 0)):
        (folder / f"{name}.atraj").write_text(trajectory("Rate this.", response, reward=reward))
    for more in ([], ["--format", "ids"]):
        done = run("traces-to-data", folder, "--out", out, "--mode", "dpo", *more)
        assert done.stdout.splitlines() == [
            "rollouts read: 7",
            "without a reward, or not of one user turn: 5",
            "without a counterpart: 0",
            "emitted: 1",
        ]
        row = json.loads(out.read_text())
        assert (row["chosen_atraj"], row["rejected_atraj"]) == ("6.atraj", "7.atraj")


def test_damaged_files_are_named_and_the_rest_is_kept(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "1.atraj").write_bytes(b"\0" * 100)
    (folder / "4.atraj").write_text('{"version": 3}')
    done = run("traces-to-data", folder, "--out", tmp_path / "o.jsonl")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert "1.atraj: not JSON" in lines[0]
    assert "4.atraj: version 3; expected version 1" in lines[1]
    assert lines[-1] == "traces-to-data: 2 of 5 files cannot be read and were passed over"
    assert "emitted: 2" in done.stdout


def test_nothing_usable_leaves_what_was_there(
    run: Run, error_line: Callable[[str], str], tmp_path: Path
) -> None:
    out = tmp_path / "train.jsonl"
    out.write_text("yesterday's\n")
    (tmp_path / "runs").mkdir()
    done = run("traces-to-data", tmp_path / "runs", "--out", out)
    assert done.returncode == 3
    assert "no .atraj file" in error_line(done.stderr)
    assert out.read_text() == "yesterday's\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.jsonl"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--out: missing"),
        (["--out", "."], "--out .: a folder"),
        (["--out", "no/such/o.jsonl"], "--out no/such/o.jsonl: cannot be written"),
        (["--dry-run", "--mode", "rl"], "--mode rl: unknown"),
        (["--dry-run", "--format", "text"], "--format text: unknown"),
        (["--dry-run", "--minhash-threshold", "0"], "--minhash-threshold: 0.0"),
        (["--dry-run", "--minhash-threshold", "nan"], "--minhash-threshold: nan"),
        (["--dry-run", "--mode", "dpo", "--minhash-threshold", "0.5"], "given with --mode dpo"),
        (["--dry-run", "--format", "ids", "--no-tool-echo-drop"], "kept anyway"),
    ],
)
def test_flags_that_mean_nothing(
    run: Run, error_line: Callable[[str], str], folder: Path, flags: list[str], expected: str
) -> None:
    done = run("traces-to-data", folder, *flags)
    assert done.returncode == (3 if "cannot be written" in expected else 2)
    assert expected in error_line(done.stderr)
