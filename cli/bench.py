"""`posttrainllm bench`: how fast a model runs on this machine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Optional

from ..runtime.errors import InputError, UsageError
from ..runtime.providers import NAMES as PROVIDERS
from .bundled import NAMES
from .options import option, parse, positional
from .progress import spinner
from .tool_flags import at_least


@dataclass(frozen=True)
class BenchOptions:
    """Flags of `bench`."""

    model: Optional[str] = positional(
        "model", f"a model folder, a checkpoint, or {NAMES} (default: demo)", optional=True
    )
    provider: str = option("all", f"all that are here (default), or {', '.join(PROVIDERS)}", metavar="NAME")
    threads: Optional[int] = option(
        None, "threads (default: the CPUs that this process may use)", metavar="N"
    )
    rounds: int = option(5, "times that each figure is taken (default 5)", metavar="N")
    json: bool = option(False, "print one JSON object")


def run(argv: list[str]) -> int:
    """Measure, provider by provider, each in a process of its own."""
    options = parse(
        BenchOptions,
        argv,
        command="bench",
        summary="Measure how fast a model runs here: load, first token, prefill and decode, memory.",
        example="  posttrainllm bench model.tinygpt --json > bench.json",
    )
    at_least("--rounds", options.rounds, 1)
    if options.threads is not None:
        at_least("--threads", options.threads, 1)
    if options.provider not in ("all", *PROVIDERS):
        raise UsageError(f"--provider {options.provider}", "unknown provider", "all, " + ", ".join(PROVIDERS))
    from .models import find_bundle, open_model

    if options.provider != "all":
        reports = [_measured(options)]
    else:
        if find_bundle(options.model) is None:
            open_model(options.model, "cpu")  # exports it once, so that no process below has to
        reports = list(_each_provider(options))
    print(json.dumps({"v": 1, "reports": reports}, indent=2) if options.json else "\n".join(_lines(reports)))
    return 0 if any("error" not in report for report in reports) else 1


def _measured(options: BenchOptions) -> dict[str, Any]:
    began = time.perf_counter()
    from ..runtime.benchmark import measure
    from .models import open_model

    session = open_model(options.model, options.provider, threads=options.threads)
    session.tokenizer  # noqa: B018 - opened at first use, and part of the load
    loaded = time.perf_counter() - began
    with spinner("measuring") as tell:
        figures = measure(session, rounds=options.rounds, progress=tell)
    manifest = session.manifest
    return {
        "model": options.model or "demo",
        "precision": manifest.precision,
        "load_s": loaded,
        **asdict(figures),
    }


def _each_provider(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """One report for each provider of this ONNX Runtime; one that fails says why."""
    import onnxruntime

    from ..runtime.providers import available

    for provider in available(onnxruntime.get_available_providers()):
        command = [sys.executable, "-m", "posttrainllm", "bench", *([options.model] if options.model else [])]
        command += ["--provider", provider.name, "--rounds", str(options.rounds), "--json"]
        if options.threads is not None:
            command += ["--threads", str(options.threads)]
        with spinner(f"measuring {provider.name}"):
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
        if done.returncode == 2:
            raise InputError("bench", done.stderr.strip().splitlines()[-1])
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
            yield {"provider": provider.name, "error": last.removeprefix("posttrainllm: ")}
        else:
            yield from json.loads(done.stdout)["reports"]


def _lines(reports: list[dict[str, Any]]) -> Iterator[str]:
    for report in reports:
        if "error" in report:
            yield f"{report['provider']}: {report['error']}"
            continue
        rss = f", {report['peak_rss'] / 2**20:.0f} MiB at its peak" if report["peak_rss"] else ""
        yield (
            f"{report['model']} ({report['precision']}) on {report['provider']}, {report['threads']} threads: "
            f"loaded in {report['load_s']:.2f} s, first token behind {report['prompt']} in {1000 * report['first_token_s']:.0f} ms, "
            f"{report['kv_bytes'] / 2**20:.1f} MiB of keys and values{rss}"
        )
        yield f"{'context':>9}  {'prefill tok/s':>24}  {'decode tok/s':>24}"
        for length, prefill in report["prefill"].items():
            yield f"{length:>9}  {_figure(prefill):>24}  {_figure(report['decode'][length]):>24}"


def _figure(spread: dict[str, float]) -> str:
    return f"{spread['median']:.0f} ({spread['slowest']:.0f} to {spread['fastest']:.0f})"
