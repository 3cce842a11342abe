"""From a ready session to the first logits of a system prompt: computed, and restored from the prompt cache, in turns.

python benchmarks/prompt_cache.py BUNDLE [--tokens 300] [--rounds 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from posttrainllm.runtime import load
from posttrainllm.runtime.prompt_cache import PromptCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    session = load(options.bundle, provider="cpu", threads=options.threads)
    ids = np.random.default_rng(0).integers(0, session.tokenizer.vocab_size, options.tokens).tolist()
    question = ids[:1]
    with tempfile.TemporaryDirectory() as folder:
        store, cache = PromptCache(Path(folder), session), session.new_cache()
        session.prefill(ids, cache)
        store.save(ids, cache)
        ratios, firsts, seconds = [], [], []
        for _ in range(options.rounds):
            cache.rewind(0)
            began = time.perf_counter()
            session.prefill(ids, cache)
            session.forward(question, cache)
            firsts.append(time.perf_counter() - began)
            cache.rewind(0)
            began = time.perf_counter()
            assert store.restore(ids, cache).length == len(ids)
            session.forward(question, cache)
            seconds.append(time.perf_counter() - began)
            ratios.append(firsts[-1] / seconds[-1])
    print(
        f"{options.tokens} tokens: computed {1e3 * statistics.median(firsts):.1f} ms, restored "
        f"{1e3 * statistics.median(seconds):.1f} ms, x{statistics.median(ratios):.1f} "
        f"({min(ratios):.1f} to {max(ratios):.1f}), one question id included"
    )


if __name__ == "__main__":
    main()
