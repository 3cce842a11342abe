"""`posttrainllm bench`: figures of each provider, in one process each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from posttrainllm.runtime import load
from posttrainllm.runtime.benchmark import measure
from posttrainllm.runtime.providers import available

Run = Callable[..., Any]


def test_figures_of_every_provider_that_is_here(run: Run, tiny_bundle: Path) -> None:
    done = run("bench", tiny_bundle, "--rounds", 1, "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["reports"]
    names = [provider.name for provider in available(ort.get_available_providers())]
    assert [report["provider"] for report in reports] == names
    cpu = reports[names.index("cpu")]
    assert cpu["threads"] == 1
    assert list(cpu["prefill"]) == list(cpu["decode"]) == ["128"], "512 ids and the steps do not fit in 512"
    assert all(
        0 < figure["slowest"] <= figure["median"] <= figure["fastest"] for figure in cpu["decode"].values()
    )
    assert cpu["first_token_s"] > 0
    assert cpu["load_s"] > 0
    assert cpu["prompt"] == 128
    cache = load(tiny_bundle).new_cache()
    assert cpu["kv_bytes"] == cache.nbytes
    assert cpu["peak_rss"] is None or cpu["peak_rss"] > 2**20


def test_a_table_for_people(run: Run, tiny_bundle: Path) -> None:
    done = run("bench", tiny_bundle, "--provider", "cpu", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    head, columns, row = done.stdout.splitlines()
    assert head.startswith(f"{tiny_bundle} (fp32) on cpu, ")
    assert columns.split() == ["context", "prefill", "tok/s", "decode", "tok/s"]
    assert row.split()[0] == "128"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--provider", "abacus"], "--provider abacus: unknown provider; expected all, auto, cpu"),
        (["--rounds", "0"], "--rounds: 0; expected 1 or more"),
        (["--threads", "0"], "--threads: 0; expected 1 or more"),
    ],
)
def test_bad_flags(run: Run, tiny_bundle: Path, flags: list[str], said: str) -> None:
    done = run("bench", tiny_bundle, *flags)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_provider_that_is_not_here_is_an_error_by_name_and_a_line_among_others(
    run: Run, tiny_bundle: Path, tmp_path: Path
) -> None:
    named = run("bench", tiny_bundle, "--provider", "xnnpack")
    assert named.returncode == 2
    assert "--provider xnnpack" in named.stderr
    missing = run("bench", tmp_path / "none")
    assert missing.returncode == 3
    assert "no such file" in missing.stderr


def test_the_ids_fit_a_short_context(make_bundle: Callable[..., Path]) -> None:
    session = load(make_bundle(d_model=16, heads=2, layers=1, ctx=40))
    figures = measure(session, rounds=1)
    assert figures.prefill == {}
    assert figures.first_token_s > 0
    assert figures.prompt == 39, "as long as the context allows"
    told: list[str] = []
    figures = measure(session, contexts=(8,), rounds=2, progress=told.append)
    assert list(figures.decode) == [8]
    assert told == ["first token", "context 8, round 1 of 2", "context 8, round 2 of 2"]
