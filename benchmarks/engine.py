"""Engines on one model, in turns: prefill and decode at several contexts, start to first token, peak memory.

    python benchmarks/engine.py NAME=KIND:PATH [NAME=KIND:PATH ...] [--threads 2] [--rounds 7] [--json OUT]

KIND is `here` (a bundle, this package), `genai` (a folder of onnxruntime-genai's builder) or `llama` (a .gguf,
llama-cpp-python; `--python NAME=EXECUTABLE` names an environment that has it). The first is compared with the others. Each has a
process of its own that lives through all rounds; in each round everybody has a turn, and ratios are of turns in the same
round. THREADS 0 leaves everybody to its defaults. Ids are drawn at random, the same for all; perplexity is what
`benchmarks/precisions.py` and `export_peers.py --quality` tell.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CONTEXTS = (128, 512, 1800)
STEPS = 32
FIRST = 128  # ids of the prompt behind which a new process says its first token


class Engine(Protocol):
    """A model with a cache: what an engine has to do here."""

    version: str

    def begin(self, ids: list[int]) -> int:
        """Forget everything, feed `ids`, and say the greedy id that follows."""

    def step(self, token: int) -> int:
        """Feed `token`, and say the greedy id that follows."""


class Here:
    def __init__(self, path: str, threads: int) -> None:
        from importlib.metadata import version

        from posttrainllm.runtime import load

        self._session = load(path, provider="cpu", threads=threads or None)
        self._cache = self._session.new_cache()
        self.version = f"onnxruntime {version('onnxruntime')}"

    def begin(self, ids: list[int]) -> int:
        self._cache.rewind(0)
        self._ids = list(ids)
        return int(self._session.prefill(self._ids, self._cache).argmax())

    def step(self, token: int) -> int:
        self._ids.append(token)
        return int(self._session.prefill(self._ids, self._cache).argmax())


class GenAI:
    def __init__(self, path: str, threads: int) -> None:
        import onnxruntime_genai as og

        config = og.Config(path)
        if threads:
            options = {"intra_op_num_threads": threads}
            config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._og, self._model = og, og.Model(config)
        self.version = f"onnxruntime-genai {og.__version__}"

    def begin(self, ids: list[int]) -> int:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(max_length=2048, do_sample=False)
        self._generator = self._og.Generator(self._model, params)
        self._generator.append_tokens(ids)
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def step(self, token: int) -> int:
        self._generator.generate_next_token()  # it has sampled `token` itself
        return int(self._generator.get_next_tokens()[0])


class Llama:
    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        given = {"n_threads": threads, "n_threads_batch": threads} if threads else {}
        self._model = llama_cpp.Llama(path, n_ctx=2048, verbose=False, **given)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def begin(self, ids: list[int]) -> int:
        self._model.reset()
        self._model.eval(ids)
        return self._greedy()

    def step(self, token: int) -> int:
        self._model.eval([token])
        return self._greedy()

    def _greedy(self) -> int:
        return int(self._model.sample(temp=0.0))


KINDS = {"here": Here, "genai": GenAI, "llama": Llama}


def work(kind: str, path: str, threads: int) -> None:
    """A worker: reads tasks from standard input, one a line, and answers each with a line of JSON."""
    engine: Engine = KINDS[kind](path, threads)
    ids: list[int] = json.loads(sys.stdin.readline())
    first = engine.begin(ids[:FIRST])
    print(json.dumps({"first": first, "version": engine.version}), flush=True)
    for line in sys.stdin:
        length = int(line)
        began = time.perf_counter()
        token = engine.begin(ids[:length])
        prefill = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(STEPS):
            token = engine.step(token)
        decode = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"prefill": length / prefill, "decode": STEPS / decode, "peak": peak}), flush=True)


@dataclass
class Contestant:
    name: str
    kind: str
    path: str
    python: str

    def start(self, threads: int, ids: list[int]) -> tuple[subprocess.Popen[str], dict[str, Any], float]:
        """A new process, what it said first, and how many seconds that took."""
        began = time.perf_counter()
        command = [self.python, __file__, "--worker", self.kind, self.path, str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        said = ask(process, json.dumps(ids))
        return process, said, time.perf_counter() - began


def ask(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"{process.args} ended")
    found: dict[str, Any] = json.loads(answer)
    return found


def compare(contestants: list[Contestant], threads: int, rounds: int, ids: list[int]) -> dict[str, Any]:
    """Samples of each figure, by contestant: `start`, `peak`, and `prefill 128`, `decode 128`, …"""
    samples: dict[str, dict[str, list[float]]] = {one.name: {} for one in contestants}
    versions: dict[str, str] = {}
    for number in range(rounds + 1):
        for one in contestants:
            process, said, seconds = one.start(threads, ids)
            process.kill()
            process.wait()
            versions[one.name] = said["version"]
            if number:  # the first start warms the disk's cache
                samples[one.name].setdefault("start", []).append(seconds)
    running = {one.name: one.start(threads, ids)[0] for one in contestants}
    for number in range(rounds + 1):
        for length in CONTEXTS:
            for name, process in running.items():
                found = ask(process, str(length))
                if number:
                    samples[name].setdefault(f"prefill {length}", []).append(found["prefill"])
                    samples[name].setdefault(f"decode {length}", []).append(found["decode"])
                samples[name]["peak"] = [found["peak"]]
    for process in running.values():
        process.kill()
        process.wait()
    return {"threads": threads, "rounds": rounds, "versions": versions, "samples": samples}


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def table(result: dict[str, Any]) -> list[str]:
    """Medians of each, and the median ratio of the first to it with the smallest and the largest."""
    samples: dict[str, dict[str, list[float]]] = result["samples"]
    ours, *others = samples
    lines = [f"{'':<14}" + "".join(f"{name:>26}" for name in samples)]
    for figure in ("start", *(f"{what} {n}" for what in ("prefill", "decode") for n in CONTEXTS), "peak"):
        scale, unit = {"start": (1.0, "s"), "peak": (2.0**-20, "MiB")}.get(figure, (1.0, "tok/s"))
        cells = [f"{scale * statistics.median(samples[ours][figure]):.4g} {unit}"]
        for other in others:
            pairs = zip(samples[ours][figure], samples[other][figure], strict=True)
            ratios = [a / b for a, b in pairs]
            median = scale * statistics.median(samples[other][figure])
            cells.append(
                f"{median:.4g} x{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            )
        lines.append(f"{figure:<14}" + "".join(f"{cell:>26}" for cell in cells))
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contestants", nargs="+", metavar="NAME=KIND:PATH")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=EXECUTABLE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons = dict(entry.split("=", 1) for entry in options.python)
    contestants = []
    for entry in options.contestants:
        name, _, rest = entry.partition("=")
        kind, _, path = rest.partition(":")
        contestants.append(Contestant(name, kind, path, pythons.get(name, sys.executable)))
    import random

    ids = [random.Random(number).randrange(1000, 40000) for number in range(max(CONTEXTS))]
    result = compare(contestants, options.threads, options.rounds, ids)
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
