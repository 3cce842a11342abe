"""What identifies a model in a trajectory: hashes of its weights and of its tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, sha256_file
from ..runtime.errors import BundleError
from ..runtime.session import Session

_TEXT = (".json", ".jinja", ".txt", ".md")


@dataclass(frozen=True)
class ModelFacts:
    """`weights`, `tokenizer` and `source` are SHA-256 (source: of the file that was exported; may be empty)."""

    checkpoint: str
    weights: str
    tokenizer: str
    source: str = ""
    precision: str = ""
    flavour: str = ""
    provider: str = ""

    @classmethod
    def of(cls, session: Session, checkpoint: str) -> ModelFacts:
        """The facts of `session`'s model, which the user called `checkpoint`. Raises BundleError."""
        manifest = session.manifest
        return cls(
            checkpoint,
            weights_fingerprint(session.bundle),
            session.tokenizer.fingerprint,
            manifest.source.sha256,
            manifest.precision,
            manifest.flavour,
            session.provider.name,
        )

    def to_json(self) -> dict[str, Any]:
        """What no other key of a trajectory holds."""
        facts = asdict(self)
        return {name: facts[name] for name in ("source", "precision", "flavour", "provider")}


def weights_fingerprint(bundle: Bundle) -> str:
    """SHA-256 of the file of weights; of several, of the list of their hashes.

    Where the manifest has the hash it is taken from there; else (other programs' folders) the file is read.
    """
    files = bundle.manifest.files
    names = [name for name in files if not name.endswith(_TEXT) and name not in (TOKENIZER, CHAT_TEMPLATE)]
    data = [name for name in names if not name.endswith(".onnx")] or names
    hashes = {name: files[name].sha256 or _hash(bundle, name) for name in data}
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("".join(f"{hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def _hash(bundle: Bundle, name: str) -> str:
    try:
        return sha256_file(bundle.path / name)
    except OSError as error:
        raise BundleError(bundle.path / name, f"cannot be read ({error.strerror or error})") from None
