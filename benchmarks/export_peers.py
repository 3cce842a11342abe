"""Our exporter and onnxruntime-genai's builder on one Hugging Face folder, in turns: time, peak memory, size.

    python benchmarks/export_peers.py FOLDER [--precisions fp32 int8 int4] [--rounds 3] [--quality TEXT]

Needs the dev extra: the builder wants torch and transformers. FOLDER may also be a .gguf, which is then turned into a
folder of float32 first. Every export is a process of its own, the caches warmed by one that does not count. Ours checks
what it wrote, the builder does not. With a text, the perplexity of what each wrote last, by the runtime of this package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posttrainllm.export.gguf_checkpoint import open_gguf
from posttrainllm.runtime import load

OURS, BUILDER, SHARED = "here", "builder", "builder, shared_embeddings"
COMMANDS = {
    OURS: "-m posttrainllm export-onnx {folder} --out {out} --precision {precision}",
    BUILDER: "-m onnxruntime_genai.models.builder -i {folder} -o {out} -p {precision} -e cpu -c {cache}",
    SHARED: "-m onnxruntime_genai.models.builder -i {folder} -o {out} -p {precision} -e cpu -c {cache} "
    "--extra_options shared_embeddings=true",
}
WINDOW = 2048


@dataclass(frozen=True)
class Export:
    """Seconds on the clock and of the processors, peak resident bytes, bytes of graph and weights."""

    wall: float
    cpu: float
    peak: int
    size: int


def export(who: str, folder: Path, out: Path, precision: str) -> Export:
    shutil.rmtree(out, ignore_errors=True)
    names = {"folder": folder, "out": out, "precision": precision, "cache": out.with_name("cache")}
    words = [word.format(**names) for word in COMMANDS[who].split()]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    log = out.with_name("log")
    with log.open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=output, cwd=out.parent, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(words)} failed:\n{log.read_text()[-3000:]}")
    size = sum(file.stat().st_size for file in out.glob("model.onnx*"))
    return Export(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, size)


def perplexity(model: Path, text: str) -> float:
    """Per id, in windows of WINDOW ids that are fed in pieces."""
    session = load(model, provider="cpu")
    ids = session.tokenizer.encode(text)
    losses = []
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start : start + WINDOW]
        cache = session.new_cache(max_length=WINDOW)
        for at in range(0, len(window), 256):
            piece, following = window[at : at + 256], np.array(window[at + 1 : at + 257])
            logits = session.forward(piece, cache)[: len(following)].astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            right = logits[np.arange(len(following)), following]
            losses.append(np.log(np.exp(logits).sum(axis=1)) - right)
    return float(np.exp(np.concatenate(losses).mean()))


def write_folder(file: Path, folder: Path) -> None:
    """The model in the GGUF `file` as a Hugging Face folder, in float32."""
    from safetensors.numpy import save_file

    folder.mkdir()
    with open_gguf(file) as checkpoint:
        for name, content in checkpoint.tokenizer_files.items():
            (folder / name).write_bytes(content)
        (folder / "config.json").write_text(json.dumps(dict(checkpoint.values)), encoding="utf-8")
        source = checkpoint.source
        tensors = {name: source.tensor(name) for name in source.shapes}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compare(folder: Path, work: Path, precision: str, rounds: int, text: str | None) -> None:
    runs: dict[str, list[Export]] = {who: [] for who in COMMANDS}
    for number in range(rounds + 1):
        for place, who in enumerate(COMMANDS):
            done = export(who, folder, work / str(place), precision)
            if number:  # the first one warms the caches
                runs[who].append(done)
    for place, (who, done) in enumerate(runs.items()):
        line = f"{precision:<5} {who:<27} {done[0].size / 1e6:7.1f} MB, peak {max(run.peak for run in done) >> 20} MiB"
        if text is not None:
            line += f", perplexity {perplexity(work / str(place), text):.2f}"
        print(line, flush=True)
        if who == OURS:
            continue
        for name in ("wall", "cpu", "peak"):
            ratios = [getattr(a, name) / getattr(b, name) for a, b in zip(runs[OURS], done, strict=True)]
            print(
                f"      here to it, {name:<5} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quality", type=Path, metavar="TEXT")
    options = parser.parse_args()
    text = options.quality.read_text(encoding="utf-8") if options.quality else None
    with tempfile.TemporaryDirectory() as name:
        folder = options.model.resolve()
        if folder.is_file():
            write_folder(folder, Path(name) / "model")
            folder = Path(name) / "model"
        for precision in options.precisions:
            compare(folder, Path(name), precision, options.rounds, text)


if __name__ == "__main__":
    main()
