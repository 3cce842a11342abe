"""`posttrainllm sample`: plain text over the same session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrainllm.runtime import generate, load

Run = Callable[..., Any]


def test_sample_prints_what_generate_yields(run: Run, tiny_bundle: Path) -> None:
    done = run("sample", tiny_bundle, "--prompt", "Once", "--tokens", 25)
    session = load(tiny_bundle)
    steps = generate(session, list(b"Once"), cache=session.new_cache(), max_tokens=25)
    assert done.returncode == 0
    assert done.stdout == "".join(step.text for step in steps) + "\n"


def test_seeded_sampling_repeats(run: Run, tiny_bundle: Path) -> None:
    flags = [
        "--prompt",
        "a",
        "--tokens",
        30,
        "--temperature",
        1.2,
        "--top-k",
        50,
        "--top-p",
        0.9,
        "--min-p",
        0.01,
    ]
    first, second, other = (run("sample", tiny_bundle, *flags, "--seed", seed).stdout for seed in (5, 5, 6))
    assert first == second != other


def test_a_full_context_is_said(run: Run, make_bundle: Callable[..., Path]) -> None:
    bundle = make_bundle(d_model=16, heads=2, layers=1, ctx=16)
    done = run("sample", bundle, "--prompt", "abcd", "--tokens", 100)
    assert done.returncode == 0
    assert "the context of 16 ids is full" in done.stderr


def test_prompts_that_cannot_be_fed_are_refused(
    run: Run, error_line: Callable[[str], str], make_bundle: Callable[..., Path]
) -> None:
    bundle = make_bundle(d_model=16, heads=2, layers=1, ctx=16)
    empty = run("sample", bundle, "--prompt", "")
    assert (empty.returncode, "--prompt: empty" in error_line(empty.stderr)) == (2, True)
    long = run("sample", bundle, "--prompt", "x" * 16)
    assert (long.returncode, "fewer than the context length of 16" in error_line(long.stderr)) == (2, True)


def test_a_reader_that_leaves_is_no_error(tiny_bundle: Path) -> None:
    command = f"'{sys.executable}' -m posttrainllm sample '{tiny_bundle}' --prompt a --tokens 200 | head -c 5 >/dev/null"
    done = subprocess.run(
        ["/bin/bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_a_folder_of_another_program_is_sampled_from(
    run: Run, make_bundle: Callable[..., Path], bpe_tokenizer: Path
) -> None:
    """Our own folder as onnxruntime-genai would see it: the ids are those of the bundle."""
    bundle = make_bundle(vocab=450, d_model=16, heads=2, layers=1, ctx=64, tokenizer=bpe_tokenizer)
    flags = ("--prompt", "hello tool", "--tokens", 20)
    expected = run("sample", bundle, *flags)
    (bundle / "bundle.json").unlink()
    for model in (bundle, bundle / "model.onnx"):
        done = run("sample", model, *flags)
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
