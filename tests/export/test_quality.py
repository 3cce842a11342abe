"""--quality: perplexity and agreement, decided by the NumPy forward and sums written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.cli.main import main
from posttrainllm.export import quality, reference
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.export.quality import text_windows
from posttrainllm.runtime import load
from posttrainllm.runtime.bundle import TOKENIZER
from posttrainllm.runtime.errors import UsageError

MakeCheckpoint = Callable[..., Path]
TEXT = "One flag, one window after the other: ünïcödé, too. " * 5


def by_hand(checkpoint: Path, ids: list[int], window: int) -> tuple[float, list[int]]:
    """Perplexity, and the best id at every predicted place, from the reference's logits."""
    losses, best = [], []
    with open_checkpoint(checkpoint) as source:
        for at in range(0, len(ids), window):
            part = ids[at : at + window]
            if len(part) < 2:
                continue
            rows: Any = reference.logits(source, np.array([part]), np.arange(len(part))[None], np.float64)[0]
            for row, following in zip(rows[:-1], part[1:], strict=True):
                losses.append(math.log(math.fsum(map(math.exp, row))) - row[following])
                best.append(int(row.argmax()))
    return math.exp(math.fsum(losses) / len(losses)), best


@pytest.mark.parametrize(("ctx", "cut"), [(512, 512), (64, 64), (512, 50)])
def test_the_figures_are_those_of_the_forward(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctx: int, cut: int
) -> None:
    """Chunks smaller than a window, windows smaller than the text, a last one that is short."""
    monkeypatch.setattr(quality, "WINDOW", cut)
    monkeypatch.setattr(quality, "_CHUNK", 37)
    source = make_checkpoint(d_model=32, heads=4, layers=2, ctx=ctx)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    ids = list(TEXT.encode())
    perplexity, best = by_hand(source, ids, cut)
    plain = export(source, tmp_path / "fp32", quality=text).manifest.parity["quality"]
    assert plain["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert plain["agreement"] == 1
    assert plain["predicted"] == len(best)
    report = export(source, tmp_path / "int4", precision="int4,all=int4", quality=text)
    figures = report.manifest.parity["quality"]
    assert figures["perplexity_fp32"] == pytest.approx(perplexity, rel=1e-5)
    session = load(report.bundle, provider="cpu")
    found = []
    for at in range(0, len(ids), cut):
        rows = session.forward(ids[at : at + cut], session.new_cache())
        found += rows[:-1].argmax(axis=1).tolist()
    share = np.mean([one == other for one, other in zip(found, best, strict=True)])
    assert figures["agreement"] == pytest.approx(share, abs=0.02)  # rounded activations: near ties may flip
    assert "fp32." not in " ".join(report.sizes)


@given(st.text(min_size=2, max_size=300), st.integers(2, 40))
def test_windows_hold_the_text_once(text: str, context: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_bytes(text.encode("utf-8", "replace"))
        ids = list(text.encode("utf-8", "replace"))
        windows = [window.tolist() for window in text_windows(file, {}, "bytes", context)]
    joined = [number for window in windows for number in window]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) <= 1  # one id alone predicts nothing
    assert all(2 <= len(window) <= context for window in windows)


def test_each_window_starts_as_the_tokenizer_starts_a_text(bpe_tokenizer: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(bpe_tokenizer / TOKENIZER))
    file = tmp_path / "text"
    file.write_text("hello world " * 30)
    first = tokenizer.token_to_id("<|endoftext|>")
    plain = text_windows(file, {TOKENIZER: tokenizer.to_str().encode()}, "tokenizers", 16)
    assert first not in np.concatenate(plain)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    marked = text_windows(file, {TOKENIZER: tokenizer.to_str().encode()}, "tokenizers", 16)
    assert all(window[0] == first and first not in window[1:] for window in marked)
    assert max(len(window) for window in marked) == 16
    assert [i for window in marked for i in window[1:].tolist()] == [
        i for window in plain for i in window.tolist()
    ]


def test_texts_that_cannot_be_used_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(d_model=32, heads=4, layers=1, ctx=64)
    (tmp_path / "latin").write_bytes(b"caf\xe9 and more")
    (tmp_path / "short").write_bytes(b"x")
    for name, expected in (
        ("latin", "UTF-8"),
        ("short", "at least two"),
        ("none", "cannot be read"),
        (".", "file"),
    ):
        with pytest.raises(UsageError, match=expected):
            export(source, tmp_path / "out", quality=tmp_path / name)
    unknown = make_checkpoint(vocab=300, d_model=32, heads=4, layers=1, ctx=64)
    (tmp_path / "latin").write_text("plain enough")
    with pytest.raises(UsageError, match="--tokenizer"):
        export(unknown, tmp_path / "out", quality=tmp_path / "latin")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_it(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    source = make_checkpoint(d_model=32, heads=4, layers=1, ctx=64)
    argv = [
        "export-onnx",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--precision",
        "int8",
        "--quality",
        str(text),
    ]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "int8" in out
    for line in ("parity     ", "rounding   ", "quality    perplexity "):
        assert line in out
    assert "ids of text.txt, windows of 64" in out
    assert main([*argv[:5], "int3"]) == 2
    assert "int3" in capsys.readouterr().err
