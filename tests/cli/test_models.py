"""`posttrainllm models`: the list, and the removal of exactly what was named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cached(run: Run, make_checkpoint: Callable[..., Path], cache_dir: Path) -> str:
    """The name of a cache entry, made by using a checkpoint."""
    done = run(
        "sample", make_checkpoint(d_model=16, heads=2, layers=1, ctx=32), "--prompt", "a", "--tokens", 1
    )
    assert done.returncode == 0, done.stderr
    (entry,) = [folder.name for folder in (cache_dir / "bundles").iterdir() if folder.is_dir()]
    return entry


def listed(run: Run, *arguments: object) -> dict[str, dict[str, Any]]:
    done = run("models", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["models"]}


def test_bundled_cached_and_given_models_are_listed(run: Run, cached: str, tiny_bundle: Path) -> None:
    rows = listed(run, tiny_bundle)
    assert [row["where"] for row in rows.values()] == ["bundled", "bundled", "cached", "given"]
    assert rows[cached]["context_length"] == 32
    assert rows[cached]["precision"] == "fp32"
    given = rows[str(tiny_bundle)]
    files = [file for file in tiny_bundle.iterdir() if file.name != "bundle.json"]
    assert given["nbytes"] == sum(file.stat().st_size for file in files)
    text = run("models", tiny_bundle).stdout.splitlines()
    assert text[0].split() == ["name", "where", "architecture", "precision", "size", "context", "source"]
    assert text[3].split()[:4] == [cached, "cached", "tinygpt", "fp32"]
    assert text[4].split()[6] == "512"


def test_without_a_cache_the_bundled_models_are_listed(run: Run, cache_dir: Path) -> None:
    assert set(listed(run)) == {"demo", "echo"}
    assert not cache_dir.exists()


def test_a_folder_of_another_program_is_listed(run: Run, tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "genai")
    (tmp_path / "genai" / "bundle.json").unlink()
    row = listed(run, "genai")["genai"]
    assert (row["architecture"], row["precision"], row["context_length"]) == ("decoder", "fp32", 512)


def test_what_cannot_be_opened_is_listed_with_the_reason(
    run: Run, cached: str, cache_dir: Path, error_line: Callable[[str], str]
) -> None:
    (cache_dir / "bundles" / cached / "model.onnx").unlink()
    assert "model.onnx is missing" in listed(run)[cached]["problem"]
    done = run("models", "nowhere")
    assert done.returncode == 3
    assert "nowhere" in done.stdout
    assert error_line(done.stderr).startswith("posttrainllm: nowhere: not a model that can be run")


def test_rm_removes_what_is_named_and_nothing_else(run: Run, cached: str, cache_dir: Path) -> None:
    folder = cache_dir / "bundles"
    shutil.copytree(folder / cached, folder / ("f" * 40))
    done = run("models", "rm", cached)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"removed {cached} (")
    assert sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) == ["f" * 40]
    assert set(listed(run)) == {"demo", "echo", "f" * 40}


@pytest.mark.parametrize("name", ["demo", "", ".", "..", "../bundles", "prefix", "folder"])
def test_rm_takes_whole_names_of_the_cache_only(
    run: Run, cached: str, cache_dir: Path, tmp_path: Path, tiny_bundle: Path, name: str, error_line: Any
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "folder")
    given = cached[:12] if name == "prefix" else name
    done = run("models", "rm", cached, given)
    assert done.returncode == 2
    assert "not in the cache" in error_line(done.stderr)
    assert (cache_dir / "bundles" / cached / "bundle.json").exists(), "all or nothing"
    assert (tmp_path / "folder" / "bundle.json").exists()


def test_rm_without_a_name_is_a_usage_error(run: Run, error_line: Any) -> None:
    done = run("models", "rm")
    assert done.returncode == 2
    assert "no name" in error_line(done.stderr)


@pytest.mark.parametrize("kind", ["genai", "standard"])
def test_the_demo_model_works_in_every_dress(run: Run, tmp_path: Path, kind: str) -> None:
    """As onnxruntime-genai's folder (no manifest of ours), and in ai.onnx operators with growing keys and values."""
    folder = tmp_path / "model"
    if kind == "genai":
        shutil.copytree(ROOT / "models" / "demo" / "bundle", folder)
        (folder / "bundle.json").unlink()
    else:
        source = ROOT / "models" / "demo" / "demo.tinygpt"
        made = run("export-onnx", source, "--graph", "standard", "--out", folder, cwd=ROOT)
        assert made.returncode == 0, made.stderr
    tools = ROOT / "tools_schemas" / "demo.json"
    flags = ["--dialect", "posttrainllm"] if kind == "genai" else []  # which nothing in such a folder says
    question = "How many lines does LICENSE have?"
    done = run("agent", folder, "--tools", tools, "--single", question, *flags, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "LICENSE has 21 lines.\n"), done.stderr
