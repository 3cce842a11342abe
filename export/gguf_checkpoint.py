"""A GGUF file as a checkpoint: its config, tensors and tokenizer go the way of a Hugging Face folder's."""

from __future__ import annotations

import json
from pathlib import Path

from ..runtime.errors import TokenizerError
from .gguf_model import GGUFModel
from .gguf_tokenizer import has_tokenizer, rebuild_tokenizer
from .huggingface import HuggingFaceCheckpoint


def open_gguf(path: Path, *, context: int | None = None) -> HuggingFaceCheckpoint:
    """The model in `path`, or in the parts it is one of. Raises CheckpointError.

    A tokenizer that cannot be rebuilt is a warning: the user may give another.
    """
    model = GGUFModel(path)
    try:
        files, warnings = _tokenizer(model)
        checkpoint = HuggingFaceCheckpoint(
            path, model.config, model, files, container=f"gguf v{model.file.version}", context=context
        )
    except BaseException:
        model.close()
        raise
    checkpoint.warnings += warnings
    return checkpoint


def _tokenizer(model: GGUFModel) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of the tokenizer, its end ids among them, and sentences about it."""
    if not has_tokenizer(model.file):
        return {}, ()
    try:
        rebuilt = rebuild_tokenizer(model.file)
    except TokenizerError as error:
        return {}, (str(error),)
    generation = {key: model.config[key] for key in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = list(rebuilt.end_ids)
    return {**rebuilt.files, "generation_config.json": json.dumps(generation).encode()}, rebuilt.warnings
