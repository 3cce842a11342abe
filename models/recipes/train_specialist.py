"""Train the bundled demo specialist: `python models/recipes/train_specialist.py --out models/demo`.

A decoder of about 5.4 million parameters with a context of 1024, trained from scratch on the synthetic
conversations of `specialist_data.py` (nothing is downloaded), with a byte-level BPE that is trained first.
Writes `demo.tinygpt` (fp16) and `tokenizer/tokenizer.json`. Needs torch, and posttrainllm for the writer.

The run is given minutes, not steps: the learning rate follows the share of `--minutes` that has passed,
so that a slow machine gives a less trained model at the promised time. One seed gives one stream of data.
With `--checkpoint FILE` the state is saved now and then, and a run that finds the file goes on from it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

import specialist_data as data
import torch
import torch.nn.functional as F
from specialist_model import CONTEXT, HEADS, HIDDEN, LAYERS, VOCAB, WIDTH, Decoder, initialise
from specialist_tokenizer import open_tokenizer, train_tokenizer
from torch import Tensor, distributed, multiprocessing, nn

from posttrainllm.export.tinygpt_writer import canonical_names, write_tinygpt
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer

BATCH_TOKENS = 5120  # per step and process, whatever the row length
LEARNING_RATE, WEIGHT_DECAY, WARMUP = 2e-3, 0.1, 60
DECAY_FROM = 0.3  # share of the time after which the learning rate falls, in a line to zero
EASY_UNTIL = 0.03  # share of the time with short rows and few tools
LENGTHS, LENGTH_WEIGHTS = (384, 640, 1024), (0.40, 0.42, 0.18)
READ_SHARE = 0.12  # share of the tokens that the model only reads whose prediction is trained too
READ_WEIGHT = 0.5  # of those in the loss
SHIFTED = 0.25  # share of short rows that begin at a random position


# --- batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """ids and labels [b, t + 1] int64 (see specialist_data.py), start [b] position of the first id."""

    ids: Tensor
    labels: Tensor
    start: Tensor


def batch(
    name: str, tokenizer: HuggingFaceTokenizer, *, easy: bool, length: int, rows: int | None = None
) -> Batch:
    """A batch that depends on the arguments only."""
    rng = Random(name)
    rows = rows or max(1, BATCH_TOKENS // length)
    made = [data.row(rng, tokenizer, length + 1, 3 if easy else 9) for _ in range(rows)]
    starts = [
        rng.randint(0, CONTEXT - length) if rng.random() < (0.5 if easy else SHIFTED) else 0
        for _ in range(rows)
    ]
    ids, labels = (torch.tensor([row[part] for row in made]) for part in (0, 1))
    return Batch(ids, labels, torch.tensor(starts))


def losses(model: Decoder, rows: Batch, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(nats, whether the argmax is right) of the next ids at the positions where `chosen` [b, t] is true."""
    with torch.autocast("cpu", torch.bfloat16):
        states = model.hidden(rows.ids[:, :-1], rows.start)
        logits = model.head(states[chosen])
    logits = logits.float()
    targets = rows.ids[:, 1:][chosen]
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


# --- training ----------------------------------------------------------------------------------------


def learning_rate(step: int, share: float) -> float:
    """Linear warm-up over steps, then constant, then a line to zero over the rest of the time."""
    return min(1.0, (step + 1) / WARMUP) * min(1.0, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def optimisers_for(model: Decoder, muon: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest (or AdamW for all)."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embedding" in name]
    if muon:
        return [
            torch.optim.Muon(
                matrices, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))]


@dataclass
class Progress:
    """What a checkpoint knows besides weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train(model: Decoder, tokenizer: HuggingFaceTokenizer, options: argparse.Namespace) -> Progress:
    """Train until `--minutes` have passed, from `--checkpoint` where it exists."""
    optimisers = optimisers_for(model, not options.adamw)
    progress = load(options.checkpoint, model, optimisers)
    limit, before = options.minutes * 60, progress.seconds
    began = last_eval = last_save = time.monotonic()
    shown = Shown()
    share = agreed(progress.seconds / limit)
    while share < 1:
        rate = learning_rate(progress.step, share) * options.rate
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        made = time.monotonic()
        easy = share < EASY_UNTIL
        length = 320 if easy else Random(f"length/{progress.step}").choices(LENGTHS, LENGTH_WEIGHTS)[0]
        rows = batch(f"train/{options.seed}/{progress.step}/{rank()}", tokenizer, easy=easy, length=length)
        shown.making += time.monotonic() - made
        step(model, rows, optimisers, Random(f"{progress.step}/{rank()}"), shown)
        progress.step += 1
        progress.tokens += rows.ids[:, 1:].numel() * processes()
        now = time.monotonic()
        progress.seconds = before + now - began
        share = agreed(progress.seconds / limit)
        if rank():
            continue
        if progress.step % 25 == 0:
            shown.report(progress, limit, rate, now - began)
        if now - last_eval > options.eval_every:
            show_dev(model, tokenizer, options.seed, progress)
            last_eval = time.monotonic()
        if options.checkpoint and now - last_save > 120:
            save(options.checkpoint, model, optimisers, progress)
            last_save = time.monotonic()
    if options.checkpoint and not rank():
        save(options.checkpoint, model, optimisers, progress)
    return progress


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def agreed(value: float) -> float:
    """The first process's value."""
    if processes() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    distributed.broadcast(shared, 0)
    return float(shared)


def average_gradients(model: Decoder) -> None:
    """The mean over all processes."""
    if processes() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= processes()
    for gradient, part in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


class Shown:
    """Sums for the next line of progress."""

    def __init__(self) -> None:
        self.said = self.said_count = self.read = self.read_count = self.making = 0.0
        self.tokens = 0

    def report(self, progress: Progress, limit: float, rate: float, seconds: float) -> None:
        left = (limit - progress.seconds) / 60
        print(
            f"step {progress.step} {progress.tokens / 1e6:.2f}M tokens: said {self.said / max(1, self.said_count):.4f} read {self.read / max(1, self.read_count):.3f}"
            f" lr {rate:.1e} {self.tokens * processes() / max(1e-9, seconds):.0f} tokens/s, data {self.making / max(1e-9, seconds):.0%}, {left:.1f} min left",
            flush=True,
        )
        self.said = self.said_count = self.read = self.read_count = 0.0


def trained(said: Tensor, generator: torch.Generator) -> Tensor:
    """Where the loss counts: all that the model says, and some of what it reads.

    The count is a multiple of 512: with few different shapes, memory is used again instead of growing.
    """
    wanted = int(said.sum() + READ_SHARE * (~said).sum())
    count = min(-(-wanted // 512) * 512, said.numel())
    first = (said.float() * 2 + torch.rand(said.shape, generator=generator)).flatten().topk(count).indices
    return torch.zeros(said.numel(), dtype=torch.bool).index_fill_(0, first, True).view_as(said)


def step(
    model: Decoder, rows: Batch, optimisers: list[torch.optim.Optimizer], rng: Random, shown: Shown
) -> None:
    labels = rows.labels[:, 1:]
    said = labels > 0
    chosen = trained(said, torch.Generator().manual_seed(rng.getrandbits(40)))
    loss, _ = losses(model, rows, chosen)
    kept = said[chosen]
    for optimiser in optimisers:
        optimiser.zero_grad()
    weights = torch.where(kept, 1.0, READ_WEIGHT)
    ((loss * weights).sum() / weights.sum()).backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
    values = loss.detach()
    shown.said += values[kept].sum().item()
    shown.said_count += int(kept.sum())
    shown.read += values[~kept].sum().item()
    shown.read_count += int((~kept).sum())
    shown.tokens += labels.numel()


def save(path: Path, model: Decoder, optimisers: list[torch.optim.Optimizer], progress: Progress) -> None:
    temporary = path.with_name(path.name + ".tmp")
    state = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "progress": vars(progress),
    }
    torch.save(state, temporary)
    os.replace(temporary, path)


def load(path: Path | None, model: Decoder, optimisers: list[torch.optim.Optimizer]) -> Progress:
    """Restore `path` where it exists."""
    if path is None or not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return Progress(**state["progress"])


# --- measuring and writing ---------------------------------------------------------------------------


@torch.no_grad()
def dev(
    model: Decoder, tokenizer: HuggingFaceTokenizer, seed: int, batches: int = 6
) -> dict[str, tuple[int, int]]:
    """(exact, all) calls and answers, all together and by what was called, in rows that training never sees.

    An object is exact when each of its ids is the argmax after the right ones before it, that is, when
    greedy decoding would write it without a slip.
    """
    counts: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for index in range(batches):
        rows = batch(f"dev/{seed}/{index}", tokenizer, easy=False, length=448, rows=18)
        labels = rows.labels[:, 1:]
        chosen = torch.ones_like(labels, dtype=torch.bool)
        _, right = losses(model, rows, chosen)
        for row in range(labels.shape[0]):
            last = ""
            for kind, exact, ids in objects(
                labels[row].tolist(), right.view_as(labels)[row].tolist(), rows.ids[row, 1:].tolist()
            ):
                text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
                last = text.split('"')[3] if kind == data.CALL else last
                key = "call" if kind == data.CALL else "answer"
                for name in (key, f"{key} {last or 'none'}"):
                    good, total = counts[name]
                    counts[name] = (good + exact, total + 1)
                last = "" if kind == data.ANSWER else last
    return counts


def objects(labels: list[int], right: list[bool], ids: list[int]) -> list[tuple[int, bool, list[int]]]:
    """(label, all right, ids) of each call and answer that ends inside the row."""
    found, begin = [], 0
    for at in range(1, len(labels)):
        if labels[at] != labels[at - 1]:
            if labels[at - 1] in (data.CALL, data.ANSWER) and begin:
                found.append((labels[at - 1], all(right[begin:at]), ids[begin:at]))
            begin = at
    return found


def show_dev(
    model: Decoder, tokenizer: HuggingFaceTokenizer, seed: int, progress: Progress
) -> dict[str, tuple[int, int]]:
    counts = dev(model, tokenizer, seed)
    known = {tool.name for tool in data.demo_tools()} | {"none"}
    shown = [
        f"{name} {good}/{total}"
        for name, (good, total) in sorted(counts.items())
        if " " in name and name.split(" ")[1] in known
    ]
    rates = ", ".join(
        f"{name}s exact {counts[name][0] / max(1, counts[name][1]):.1%}" for name in ("call", "answer")
    )
    print(
        f"DEV at {progress.tokens / 1e6:.2f}M tokens, {progress.seconds / 60:.1f} min: {rates}; {'; '.join(shown)}",
        flush=True,
    )
    return counts


def export(
    model: Decoder,
    out: Path,
    options: argparse.Namespace,
    progress: Progress,
    counts: dict[str, tuple[int, int]],
) -> None:
    """Write the fp16 container beside its tokenizer."""
    config = {
        "layers": LAYERS, "dModel": WIDTH, "ctx": CONTEXT, "heads": HEADS, "dMlp": HIDDEN, "vocabSize": VOCAB,
        "backend": "pytorch", "seed": options.seed, "maxSteps": progress.step, "learningRate": options.rate,
        "tokenizerSource": "tokenizer",
    }  # fmt: skip
    state = model.state_dict()
    tensors = {name: state[name].numpy() for name in canonical_names(LAYERS)}
    if tensors.keys() != state.keys():
        raise AssertionError("the model's parameters are not the container's")
    measured = {
        name: round(good / max(1, total), 4) for name, (good, total) in counts.items() if " " not in name
    }
    header = {"corpus": "synthetic tool-calling conversations", "generatedDev": measured}
    write_tinygpt(out / "demo.tinygpt", config, tensors, dtype="fp16", header=header, step=progress.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for demo.tinygpt and tokenizer/")
    parser.add_argument("--checkpoint", type=Path, help="resume from, and save to, this file")
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--rate", type=float, default=LEARNING_RATE, help="the highest learning rate")
    parser.add_argument(
        "--adamw", action="store_true", help="AdamW for all weights, not Muon for the matrices"
    )
    parser.add_argument("--plain", action="store_true", help="no heads that begin with copying")
    parser.add_argument("--eval-every", type=float, default=180, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=2, help="one core each; threads wait for each other too often"
    )
    options = parser.parse_args()
    folder = options.out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(folder, options.seed)
    if options.processes == 1:
        run(0, options, "")
        return
    with tempfile.TemporaryDirectory() as meeting:
        multiprocessing.spawn(run, (options, f"file://{meeting}/meeting"), options.processes)


def run(index: int, options: argparse.Namespace, meeting: str) -> None:
    """One of the processes; the first one measures and writes."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if meeting:
        distributed.init_process_group("gloo", init_method=meeting, rank=index, world_size=options.processes)
    tokenizer = open_tokenizer(options.out / "tokenizer")
    model = Decoder()
    initialise(model, copying=not options.plain)
    if not index:
        print(
            f"{sum(p.numel() for p in model.parameters())} parameters, {tokenizer.vocab_size} ids", flush=True
        )
    progress = train(model, tokenizer, options)
    if meeting:
        distributed.destroy_process_group()
    if index:
        return
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    counts = show_dev(model, tokenizer, options.seed, progress)
    export(model, options.out, options, progress, counts)


if __name__ == "__main__":
    main()
