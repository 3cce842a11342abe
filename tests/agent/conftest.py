"""A session that says what a test tells it to, at the seam that the loop really uses: ids in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.runtime import KVCache
from posttrainllm.runtime.bundle import KVLayout
from posttrainllm.runtime.tokenizer import ByteTokenizer, decode

TURN = "<|im_start|>assistant\n"
END = "<|im_end|>"


class ScriptedSession:
    """Byte-level. The n-th assistant turn is `replies[n]`, then the end of turn. Records the prompts."""

    vocab_size = 256

    def __init__(self, replies: Sequence[str | bytes], context_length: int = 4096) -> None:
        self.replies = [reply if isinstance(reply, bytes) else reply.encode() for reply in replies]
        self.context_length = context_length
        self.tokenizer = ByteTokenizer()
        self.manifest = SimpleNamespace(
            end_of_turn_ids=list(END.encode()), stop_ids=[], dialect="posttrainllm"
        )
        self.seen = ""

    def new_cache(self, *, preallocate: bool = True) -> KVCache:
        layout = KVLayout(layers=1, heads=1, head_dim=8, dtype="float32")
        return KVCache(
            layout, max_length=self.context_length, device="cpu", preallocate=preallocate, owner=self
        )

    def new_drafter(self) -> None:
        return None

    def prefill(self, ids: list[int], cache: KVCache) -> NDArray[np.float32]:
        cache.reserve(len(ids))
        cache.ids[:] = ids
        self.seen = decode(self.tokenizer, ids)
        turns = bytes(ids).split(TURN.encode())[1:]
        if not turns:  # the system prompt by itself
            return np.zeros(self.vocab_size, np.float32)
        script = self.replies[len(turns) - 1] + END.encode()
        logits = np.zeros(self.vocab_size, np.float32)
        logits[script[len(turns[-1])]] = 9
        return logits


@pytest.fixture
def scripted() -> Callable[..., Any]:
    """scripted(replies, context_length=) -> a session for Agent."""
    return ScriptedSession
