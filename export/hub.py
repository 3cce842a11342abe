"""Models by their id: fetched from the Hugging Face hub where the argument is no path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from ..runtime.errors import CheckpointError, MissingExtraError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
# All that a reader of folders can use; weights in other formats, pictures and code stay where they are.
_WANTED = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*",
           "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*")  # fmt: skip


def local_source(model: str) -> Path:
    """`model` as a path; an id such as `org/name`, where no such path exists, is fetched into the hub's own cache.

    Raises MissingExtraError without huggingface_hub, CheckpointError when the hub cannot be reached or refuses.
    """
    path = Path(model)
    if not _ID.fullmatch(model) or path.exists() or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError(
            model,
            "no such file or folder, and as the id of a model it needs huggingface_hub",
            remedy="pip install 'posttrainllm-onnx[hub]', or give a path",
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=list(_WANTED)))
    except Exception as error:  # noqa: BLE001 - its errors and its HTTP library's share no base class
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            path,
            f"no such file or folder, and the hub did not give a model of this id ({reason})",
            remedy="check the name and the network, or give a path",
        ) from None
