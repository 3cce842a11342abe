"""Architectures that our own builder does not know: exported by optimum, checked here, sealed as one of our bundles.

optimum traces transformers' own model, so it takes torch and as much memory as both need. It runs in a process of its
own. The graph is as it comes: fp32, keys and values grow by concatenation. It is compared with
the model in torch, fed in several splits, before the bundle is declared good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.bundle import (
    GRAPH,
    WEIGHTS,
    KVLayout,
    Manifest,
    SourceInfo,
    read_manifest,
    seal,
    sha256_file,
    staged_bundle,
)
from ..runtime.errors import (
    BundleError,
    CheckFailedError,
    CheckpointError,
    MissingExtraError,
    UnknownArchitectureError,
    UsageError,
)
from ..runtime.foreign import open_model_folder
from ..runtime.graph_io import bundle_io
from . import genai_config
from .tokenizer_files import read_files, resolve_files

TASK = "text-generation-with-past"
_IDS = 64


def export_with_optimum(
    source: Path,
    out: Path,
    unknown: UnknownArchitectureError,
    refused: Sequence[str],
    *,
    force: bool,
    progress: Callable[[str, int, int], None],
) -> Manifest:
    """Make the bundle `out` of the Hugging Face folder `source`, or leave nothing behind.

    `unknown` says why it comes here, `refused` are flags that were given and cannot be honoured. Raises
    MissingExtraError where optimum is not installed, UsageError, CheckpointError, CheckFailedError, TokenizerError.
    """
    if find_spec("optimum") is None or find_spec("torch") is None:
        raise MissingExtraError(
            unknown.subject,
            unknown.found,
            unknown.expected,
            "other architectures take optimum: pip install 'posttrainllm-onnx[optimum]'",
        )
    if refused:
        raise UsageError(
            refused[0],
            f"given for a model that goes through optimum ({unknown.found})",
            "its graph as it comes",
        )
    try:
        with staged_bundle(out, force=force) as staging:
            progress("exporting with optimum", 0, 1)
            with tempfile.TemporaryDirectory(prefix="optimum.", dir=staging.parent) as name:
                kv, config = _traced(source, Path(name), staging)
            progress("exporting with optimum", 1, 1)
            _fill(source, staging, kv, config, progress)
            return read_manifest(staging)
    except OSError as error:
        raise UsageError(out, f"cannot be written ({error.strerror or 'the disk is full'})") from error


def _traced(source: Path, folder: Path, staging: Path) -> tuple[KVLayout, dict[str, Any]]:
    """Let optimum export into `folder`; what is ours to keep moves to `staging`. The KV layout and some facts."""
    command = [
        sys.executable,
        "-m",
        "optimum.exporters.onnx",
        "--model",
        str(source.resolve()),
        "--task",
        TASK,
    ]
    command += ["--library-name", "transformers", "--framework", "pt", str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    if done.returncode or not (folder / GRAPH).is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CheckpointError(
            source, f"optimum cannot export it ({lines[-1] if lines else f'exit {done.returncode}'})"
        )
    try:
        bundle = open_model_folder(folder)
    except BundleError as error:
        raise CheckpointError(
            source, f"optimum's graph cannot be driven: {error.found}", error.expected
        ) from None
    manifest = bundle.manifest
    ours = bundle_io(manifest.kv.layers)
    assert bundle.io is not None
    same = (bundle.io.ids, bundle.io.past, bundle.io.present, bundle.io.logits)
    if same != (ours.ids, ours.past, ours.present, ours.logits) or manifest.kv.style != "growing":
        raise CheckpointError(source, "optimum's graph has other inputs and outputs than usual")
    _save_with_shared_tables(folder / GRAPH, staging)
    facts = {
        "architecture": manifest.architecture,
        "context_length": manifest.context_length,
        "vocab_size": manifest.vocab_size,
        "precision": manifest.precision,
        "positions": "learned" if bundle.io.positions else "counted",
    }
    return manifest.kv, facts


def _save_with_shared_tables(graph: Path, staging: Path) -> None:
    """`graph` with a tied table held once, its weights in a file beside it however large they are."""
    import onnx_ir as ir

    from .graph import INLINE_NBYTES
    from .tied_tables import share_tables

    model = ir.load(graph)
    share_tables(model)
    ir.save(model, staging / GRAPH, external_data=WEIGHTS, size_threshold_bytes=INLINE_NBYTES)


def _fill(
    source: Path,
    staging: Path,
    kv: KVLayout,
    facts: dict[str, Any],
    progress: Callable[[str, int, int], None],
) -> None:
    words = resolve_files(read_files(source), facts["vocab_size"], source)
    parity = _compare(source, staging / GRAPH, kv, facts, progress)
    config = _config(source)
    manifest = Manifest(
        architecture=facts["architecture"],
        flavour="optimum",
        precision=facts["precision"],
        context_length=facts["context_length"],
        vocab_size=facts["vocab_size"],
        kv=kv,
        tokenizer=words.info,
        end_of_turn_ids=words.end_of_turn_ids,
        dialect=words.dialect,
        source=SourceInfo(source.name, "safetensors, by optimum", _sha256(source)),
        config={
            "hidden_size": config.get("hidden_size") or config.get("n_embd") or kv.heads * kv.head_dim,
            "heads": config.get("num_attention_heads") or config.get("n_head") or kv.heads,
            "positions": facts["positions"],
        },
        parity=parity,
        stop_ids=list(words.stop_ids),
    )
    for name, content in words.files.items():
        (staging / name).write_bytes(content)
    (staging / genai_config.FILE).write_text(genai_config.to_text(manifest), encoding="utf-8", newline="\n")
    progress("hashing files", 0, 1)
    seal(staging, manifest)
    progress("hashing files", 1, 1)


def _compare(
    source: Path, graph: Path, kv: KVLayout, facts: dict[str, Any], progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """The graph against transformers' model in torch, over the same ids. The parity record; raises CheckFailedError."""
    import onnxruntime as ort
    import torch
    from transformers import AutoModelForCausalLM

    from .parity import TOLERANCE, parity_cases, run_case

    count = min(_IDS, facts["context_length"])
    ids = np.random.default_rng(0).integers(0, facts["vocab_size"], count)
    cases = [case for case in parity_cases(count, facts["context_length"]) if case.first_position == 0]
    progress("checking parity", 0, len(cases))
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    model.eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(ids[None])).logits[0].numpy()
    del model
    spread = float(np.ptp(expected))
    session = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
    figures = {}
    for done, case in enumerate(cases, start=1):
        worst = 0.0
        for rows, logits in run_case(session, kv, facts["vocab_size"], ids, case):
            worst = max(worst, float(np.abs(logits - expected[rows]).max()) / spread)
        figures[case.name] = worst
        progress("checking parity", done, len(cases))
    tolerance, worst = TOLERANCE["fp32"], max(figures.values())
    if not worst <= tolerance:
        name = max(figures, key=lambda name: figures[name])
        raise CheckFailedError(
            source,
            f"optimum's graph differs from the model by {worst:.2g} of the logit range ({name})",
            f"at most {tolerance:g}",
            "no bundle was written",
        )
    return {
        "reference": "transformers' float32 forward of the source",
        "tolerance": tolerance,
        "worst": worst,
        "logit_range": spread,
        "ids": count,
        "seed": 0,
        "cases": figures,
        "unsteady": 0,
    }


def _config(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((source / "config.json").read_bytes())
    return found


def _sha256(source: Path) -> str:
    """Of the hashes of the weights' files, by name."""
    import hashlib

    files = sorted([*source.glob("*.safetensors"), *source.glob("*.bin")])
    listed = "".join(f"{file.name} {sha256_file(file)}\n" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()
