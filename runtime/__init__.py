"""A bundle in, tokens out.

    from posttrainllm.runtime import generate, load

    session = load("my-model")
    cache = session.new_cache()
    for step in generate(session, session.tokenizer.encode("Once upon"), cache=cache, max_tokens=40):
        print(step.text, end="", flush=True)

Names are imported at first use: `import posttrainllm.runtime` alone loads neither numpy nor onnxruntime.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import Bundle as Bundle
    from .generation import Step as Step
    from .generation import generate as generate
    from .grammar import Grammar as Grammar
    from .grammar import Matcher as Matcher
    from .kv_cache import KVCache as KVCache
    from .sampler import Sampler as Sampler
    from .session import Session as Session
    from .session import load as load

# ONNX Runtime's wheels keep a device id and queue usage events on the user's disk unless told not to before
# they are loaded. Nothing that runs here reports anywhere.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "Bundle": "bundle",
    "Grammar": "grammar",
    "KVCache": "kv_cache",
    "Matcher": "grammar",
    "Sampler": "sampler",
    "Session": "session",
    "Step": "generation",
    "generate": "generation",
    "load": "session",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
