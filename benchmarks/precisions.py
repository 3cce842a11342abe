"""What each precision of a model weighs, costs in quality, and how fast it decodes: for docs/decisions/0010.

    python benchmarks/precisions.py MODEL TEXT [PRECISION ...]

MODEL is anything that export-onnx takes; without precisions all of them. Speeds are ratios to the first one: the best
of interleaved rounds of single steps after PAST ids, and of a prefill of as many.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from posttrainllm.export.exporter import export
from posttrainllm.runtime import Session, load

PRECISIONS = ("fp32", "fp16", "int8", "int8:64", "int4", "int4,all=int4", "keep")
PAST, STEPS, ROUNDS = 256, 24, 4


def decode_seconds(session: Session, ids: list[int]) -> tuple[float, float]:
    """Seconds of a prefill of `ids`, and of a step after it."""
    cache = session.new_cache(max_length=PAST + STEPS)
    start = time.perf_counter()
    session.prefill(ids, cache)
    middle = time.perf_counter()
    for _ in range(STEPS):
        session.forward(ids[:1], cache)
    return middle - start, (time.perf_counter() - middle) / STEPS


def main() -> None:
    model, text, *asked = sys.argv[1:]
    sessions: dict[str, Session] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, precision in enumerate(asked or PRECISIONS):
            start = time.perf_counter()
            report = export(Path(model), Path(folder) / str(number), precision=precision, quality=Path(text))
            seconds = time.perf_counter() - start
            parity = report.manifest.parity
            quality = parity["quality"]
            print(
                f"{precision:<16} {report.sizes['model.onnx.data'] / 1e6:7.1f} MB, parity {parity['worst']:.1e}, "
                f"activations {parity.get('activation_rounding', 0):.1e}, perplexity {quality['perplexity']:.4g} "
                f"({quality['perplexity'] / quality['perplexity_fp32'] - 1:+.2%}), agreement {quality['agreement']:.1%} "
                f"of {quality['predicted']}, exported and measured in {seconds:.0f} s",
                flush=True,
            )
            sessions[precision] = load(report.bundle, provider="cpu")
        ids = next(iter(sessions.values())).tokenizer.encode(Path(text).read_text())[:PAST]
        best = dict.fromkeys(sessions, (float("inf"), float("inf")))
        for _ in range(ROUNDS):
            for precision, session in sessions.items():
                prefill, step = decode_seconds(session, ids)
                best[precision] = min(best[precision][0], prefill), min(best[precision][1], step)
        first = next(iter(best.values()))
        for precision, (prefill, step) in best.items():
            print(f"{precision:<16} prefill x{first[0] / prefill:.2f}, decode x{first[1] / step:.2f}")


if __name__ == "__main__":
    main()
