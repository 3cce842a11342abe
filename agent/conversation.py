"""Conversation: the ids that a model has seen or is about to see, as spans that know their origin.

Ids are the truth; text is derived from them. The KV cache is brought up to these ids by `prefill`, so a
conversation that was cut back needs no other bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .chat_format import IdSpan


@dataclass
class Conversation:
    """Append-only spans, except for what `cut` and `replace` do.

    `segment` counts how often ids that stood here made way for others: within one segment ids are only appended.
    """

    spans: list[IdSpan] = field(default_factory=list)
    segment: int = 0

    @property
    def ids(self) -> list[int]:
        """All ids in order."""
        return [token for span in self.spans for token in span.ids]

    def __len__(self) -> int:
        return sum(len(span.ids) for span in self.spans)

    def extend(self, spans: Iterable[IdSpan]) -> None:
        """Append spans; empty ones are left out."""
        self.spans.extend(span for span in spans if span.ids)

    def cut(self, length: int) -> None:
        """Forget all ids behind the first `length`. A span that is cut is replaced, not changed."""
        if length >= len(self):
            return
        self.segment += 1
        kept: list[IdSpan] = []
        for span in self.spans:
            ids = span.ids[: max(length, 0)]
            if ids:
                kept.append(span if len(ids) == len(span.ids) else IdSpan(span.origin, ids))
            length -= len(span.ids)
        self.spans[:] = kept

    def replace(self, spans: Iterable[IdSpan]) -> None:
        """Forget all ids, and begin a segment with `spans`."""
        self.spans[:] = [span for span in spans if span.ids]
        self.segment += 1
