"""Session: a bundle opened on an execution provider; `forward` turns ids into logits.

Knows ids, not text. One `run` a call, through IOBinding: keys, values and logits live on the provider's
device, and only the logits are copied to the host. A session may serve several caches, one thread per cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from .bundle import Bundle
from .drafts import PromptLookup
from .errors import BundleError, ProviderError
from .foreign import open_model_folder
from .graph_io import ROW_COUNTS, GraphIO, Scalar, bundle_io
from .kv_cache import KVCache
from .providers import CPU, Provider, candidates
from .threads import usable_threads
from .tokenizer import Tokenizer, open_tokenizer

PREFILL_CHUNK = 256
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class Session:
    """`Session(Bundle.open(path), provider="auto")`, or `load(path)` for short.

    `threads` defaults to the CPUs that affinity and cgroup quota leave to this process. `provider` and
    `provider_reason` say what was chosen and why. Raises ProviderError, BundleError.
    """

    def __init__(self, bundle: Bundle, *, provider: str = "auto", threads: int | None = None) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.io = bundle.io or bundle_io(bundle.manifest.kv.layers)
        self.threads = threads or usable_threads()
        self._ort, self.provider, self.provider_reason = self._choose(provider)

    @property
    def context_length(self) -> int:
        """The most ids the model can attend to, prompt and output together."""
        return self.manifest.context_length

    @property
    def vocab_size(self) -> int:
        """Width of the logits, V. A tokenizer may know fewer ids."""
        return self.manifest.vocab_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer, opened at first use. Raises TokenizerError."""
        return open_tokenizer(self.bundle)

    def new_cache(self, *, max_length: int | None = None, preallocate: bool = True) -> KVCache:
        """An empty cache for up to `max_length` ids (default: the context length)."""
        limit = self.context_length if max_length is None else min(max_length, self.context_length)
        return KVCache(
            self.manifest.kv,
            max_length=limit,
            device=self.provider.device,
            preallocate=preallocate,
            owner=self,
        )

    def new_drafter(self) -> PromptLookup | None:
        """Guesses for `generate`; None where checking them does not pay.

        It takes logits of several rows from one run, and a cache that forgets wrong guesses for nothing.
        """
        if self.io.one_row or self.manifest.kv.style != "shared":
            return None
        return PromptLookup(self.manifest.precision)

    def forward(self, ids: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        """Append `ids` to `cache`; logits [len(ids), V] float32, row i predicting what follows ids[i].

        The array is the caller's. Any split of the same ids gives the same logits within float32
        rounding. Raises ContextFullError (nothing is fed) if the ids do not fit, ValueError for no
        ids, an id outside 0..V-1 or another session's cache.
        """
        return self._feed(ids, cache, rows=max(1, len(ids)))

    def _feed(self, ids: Sequence[int], cache: KVCache, *, rows: int) -> NDArray[np.float32]:
        """Append `ids` to `cache`; logits [at least `rows`, V] that end with the last id's. Raises as `forward`."""
        if cache.owner is not self:
            raise ValueError(f"the cache belongs to {cache.owner!r}, not to {self!r}")
        tokens = np.asarray(ids, dtype=np.int64).reshape(1, -1)
        count = tokens.size
        if count == 0:
            raise ValueError("forward needs at least one id")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(f"an id is outside 0..{self.vocab_size - 1}")
        cache.reserve(cache.length + count)
        if self.io.one_row and rows > 1:
            # The graph has logits for one position a run: what stands before the rows goes in one, then each alone.
            edges = [0, *range(count - rows + 1, count + 1)]
            runs = [self._run(tokens[:, a:b], cache, 1) for a, b in itertools.pairwise(edges)]
            return np.concatenate(runs)
        return self._run(tokens, cache, rows)

    def prefill(self, ids: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        """Make `cache` hold exactly `ids`; logits [V] float32 after the last one.

        Feeds only what the cache does not hold yet, in chunks, after rewinding to the common prefix
        (less one if all is known: the cache stores no logits, so one id must run).
        """
        row: NDArray[np.float32] = self.prefill_rows(ids, cache, 1)[0]
        return row

    def prefill_rows(self, ids: Sequence[int], cache: KVCache, rows: int) -> NDArray[np.float32]:
        """As `prefill`; logits [rows, V], row i predicting what follows `ids[len(ids) - rows + i]`.

        Raises ValueError unless there are as many ids as rows, and at least one.
        """
        if not 1 <= rows <= len(ids):
            raise ValueError(f"prefill of {len(ids)} ids cannot give logits for {rows}")
        if len(ids) > cache.max_length:
            cache.reserve(len(ids))  # raises before anything is rewound or fed
        known = min(cache.common_prefix(ids), len(ids) - rows)
        cache.rewind(known)
        found: list[NDArray[np.float32]] = []
        for start in range(known, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            wanted = len(chunk) - max(0, len(ids) - rows - start)
            logits = self._feed(chunk, cache, rows=max(1, wanted))
            if wanted > 0:
                found.append(logits[-wanted:])
        return found[0] if len(found) == 1 else np.concatenate(found)

    @property
    def _chooses_rows(self) -> bool:
        return self.io.one_row or self.io.rows is not None

    def _run(self, tokens: NDArray[np.int64], cache: KVCache, rows: int) -> NDArray[np.float32]:
        """One run of the graph: `tokens` [1, n] into `cache`; logits of the last `rows` positions, or of all n."""
        io, past, count = self.io, cache.length, tokens.shape[1]
        total = past + count
        binding = cache.bind(self._ort, io.past, io.present, count)
        # ONNX Runtime reads these by address: the names keep them alive until run returns.
        feeds = self._feeds(tokens, past, rows)
        for name, array in feeds.items():
            if name in self._inputs:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        name, dtype = io.logits
        given = min(rows, count) if self._chooses_rows else count
        logits = ort.OrtValue.ortvalue_from_shape_and_type(
            [1, given, self.vocab_size], np.dtype(dtype).type, self.provider.device, 0
        )
        binding.bind_ortvalue_output(name, logits)
        try:
            self._ort.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base
            found = f"ONNX Runtime failed at ids {past} to {total - 1} ({error})"
            raise BundleError(self.bundle.graph_path, found, remedy="export the model again") from None
        cache.keep(tokens[0].tolist())
        values: NDArray[np.float32] = logits.numpy()[0].astype(np.float32, copy=False)
        return values

    def _feeds(self, tokens: NDArray[np.int64], past: int, rows: int) -> dict[str, NDArray[Any]]:
        """Ids, mask and positions by the graph's names and in its types."""
        io, padding, total = self.io, self.manifest.kv.padding, past + tokens.shape[1]
        feeds: dict[str, NDArray[Any]] = {io.ids[0]: np.ascontiguousarray(tokens, io.ids[1])}
        if io.mask is not None:
            mask = np.ones((1, padding + total), io.mask[1])
            mask[:, :padding] = 0
            feeds[io.mask[0]] = mask
        if io.positions is not None:
            feeds[io.positions[0]] = np.arange(past, total, dtype=io.positions[1]).reshape(1, -1)
        if io.rows is not None:
            feeds[io.rows.name] = np.full((1,) * io.rows.rank, rows, np.int64)
        return feeds

    def _choose(self, name: str) -> tuple[Any, Provider, str]:
        """The ONNX Runtime session, its provider, and why it was chosen."""
        tried: list[str] = []
        for provider in candidates(name, ort.get_available_providers()):
            try:
                session = self._open(provider)
                if provider is not CPU:
                    self._probe(session, provider)
            except ProviderError as error:
                if name != "auto":
                    raise
                tried.append(f"{provider.name}: {error.found}")
                continue
            reason = "named" if name != "auto" else "; ".join(tried) or "the best this ONNX Runtime offers"
            return session, provider, reason
        raise ProviderError(f"--provider {name}", "; ".join(tried) or "none is usable", "a working provider")

    def _open(self, provider: Provider) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is raised; the rest is noise on the user's terminal
        chain = [provider.ort_name] if provider is CPU else [provider.ort_name, CPU.ort_name]
        try:
            session = ort.InferenceSession(str(self.bundle.graph_path), options, providers=chain)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base
            if provider is CPU:
                raise BundleError(
                    self.bundle.graph_path, f"ONNX Runtime cannot load it ({error})", remedy="export again"
                ) from None
            raise ProviderError(f"--provider {provider.name}", f"cannot load the model ({error})") from None
        if provider.ort_name not in session.get_providers():
            raise ProviderError(
                f"--provider {provider.name}", "ONNX Runtime fell back to the CPU", "its libraries installed"
            )
        self._check_graph(session)
        defaulted = session.get_overridable_initializers()
        self._inputs = {entry.name for entry in (*session.get_inputs(), *defaulted)}
        self.io = _with_row_count(self.io, defaulted)
        return session

    def _check_graph(self, session: Any) -> None:
        """The graph has the inputs and outputs that the manifest promises. Raises BundleError."""
        if self.bundle.io is not None:
            return  # a foreign one: its description was read from the graph
        kv = self.manifest.kv
        expected = {
            f"past_key_values.{layer}.{part}": (kv.heads, kv.head_dim)
            for layer in range(kv.layers)
            for part in ("key", "value")
        }
        found = {
            entry.name: (entry.shape[1], entry.shape[3])
            for entry in session.get_inputs()
            if entry.name.startswith("past_key_values.") and _TYPES.get(entry.type) == kv.dtype
        }
        vocab = next((out.shape[2] for out in session.get_outputs() if out.name == "logits"), None)
        if found != expected or vocab != self.vocab_size:
            raise BundleError(
                self.bundle.graph_path,
                "its inputs and outputs are not those of bundle.json",
                f"{kv.layers} layers of {kv.dtype} keys and values [1, {kv.heads}, n, {kv.head_dim}], "
                f"logits of width {self.vocab_size}",
                "export the model again",
            )

    def _probe(self, session: Any, provider: Provider) -> None:
        """One decode step, since a provider can accept a graph and fail when it runs. Raises ProviderError."""
        self._ort, self.provider = session, provider
        try:
            logits = self.forward([0], self.new_cache(max_length=8))
        except Exception as error:  # noqa: BLE001 - as above
            raise ProviderError(f"--provider {provider.name}", f"a probe step failed ({error})") from None
        if not np.isfinite(logits).all():
            raise ProviderError(f"--provider {provider.name}", "a probe step gave logits that are not finite")


def _with_row_count(io: GraphIO, defaulted: Sequence[Any]) -> GraphIO:
    """`io` with the input that counts rows of logits, if it is among the graph's inputs with a default."""
    for entry in defaulted:
        if entry.name in ROW_COUNTS:
            return replace(io, rows=Scalar(entry.name, len(entry.shape)))
    return io


def load(path: str | Path, *, provider: str = "auto", threads: int | None = None) -> Session:
    """Open the model folder `path`, ours or a foreign one (`foreign.py`). Raises BundleError, ProviderError."""
    return Session(open_model_folder(Path(path)), provider=provider, threads=threads)
