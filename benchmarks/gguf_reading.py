"""Reading a GGUF here and with the gguf package, in turns: time as ratios, and the peak memory of each.

    python benchmarks/gguf_reading.py model.gguf [--rounds 5]

Needs the dev extra. Each measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

OPEN = {
    "here": "from pathlib import Path\nfrom posttrainllm.export.gguf_file import GGUFFile\n"
    "file = GGUFFile(Path({path!r}))\ntensors = list(file.tensors)",
    "package": "import gguf\nfile = gguf.GGUFReader({path!r})\ntensors = file.tensors",
}
VALUES = {
    "here": "from posttrainllm.export.gguf_blocks import dequantise\n"
    "for name in tensors:\n    dequantise(file.blocks(name), file.tensors[name].type)",
    "package": "for tensor in tensors:\n    gguf.quants.dequantize(tensor.data, tensor.tensor_type)",
}
PROGRAM = """
import json, resource, time
{imports}
started = time.perf_counter()
{open}
opened = time.perf_counter()
{values}
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([opened - started, done - opened, peak]))
"""


def measure(who: str, path: str) -> list[float]:
    """Seconds to open, seconds for all values, peak resident KiB."""
    imports, opening = OPEN[who].format(path=path).rsplit("file =", 1)
    program = PROGRAM.format(imports=imports, open=f"file ={opening}", values=VALUES[who])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    figures: list[float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runs: dict[str, list[list[float]]] = {"here": [], "package": []}
    for _ in range(options.rounds):
        for who, figures in runs.items():
            figures.append(measure(who, options.model))
    for column, name in enumerate(("open", "values", "peak memory")):
        here, package = (statistics.median(run[column] for run in runs[who]) for who in ("here", "package"))
        unit = "MiB" if name == "peak memory" else "s"
        scale = 1 / 1024 if unit == "MiB" else 1.0
        print(
            f"{name:<12} here {here * scale:8.3f} {unit}, package {package * scale:8.3f} {unit}: {here / package:.2f}x"
        )


if __name__ == "__main__":
    main()
