"""Train the bundled echo model: `python models/recipes/train_echo.py --out models/echo/echo.tinygpt`.

A byte-level decoder of about a million parameters with a context of 2048, trained from scratch on the
synthetic conversations of `echo_conversations.py` (nothing is downloaded), written as an fp16 `.tinygpt`.
Needs torch, and posttrainllm for the writer. One seed gives one stream of data; weights agree from run
to run only as far as the machine's arithmetic does.

With `--checkpoint FILE` the state is saved now and then, and a run that finds the file goes on from it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import echo_conversations as conversations
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from posttrainllm.export.tinygpt_writer import canonical_names, write_tinygpt

LAYERS, HEADS, WIDTH, HIDDEN, CONTEXT, VOCAB = 4, 4, 128, 512, 2048, 256
BATCH_BYTES = 8192  # per step, whatever the window length
SHORT_WINDOW = 512
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
WARMUP, HORIZON, COOLDOWN = 100, 3000, 400  # steps, see `learning_rate`
SLICES_UNTIL, DRILLS_UNTIL = 1000, 1500  # steps, see `batch`
OTHER_WEIGHT = 0.2  # loss weight of bytes that the model never has to write
EMBEDDING_SCALE = 0.05


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            project(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)  # [b, H, t, D]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1/sqrt(D)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(x)))  # the exact (erf) GELU


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    """The `.tinygpt` base model; parameter names are the container's."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_final = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        """Logits [b, t, V] of ids [b, t] whose first positions are `start` [b]."""
        positions = start[:, None] + torch.arange(ids.shape[1])
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.ln_final(x) @ self.token_embedding.weight.T


def initialise(model: Decoder) -> None:
    """Small random weights; sinusoids as the first value of the learned positions.

    Sinusoids make "the byte before" the same relation at every position, which a table of random rows
    would have to discover 2048 times. Residual outputs start smaller, by the number of additions.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "fc_out.weight")):
            nn.init.normal_(parameter, std=WIDTH**-0.5 / math.sqrt(2 * LAYERS))
        elif name.endswith("embedding.weight"):
            nn.init.normal_(parameter, std=EMBEDDING_SCALE)
        elif name.endswith(("_proj.weight", "fc_in.weight")):
            nn.init.normal_(parameter, std=WIDTH**-0.5)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
    rates = torch.exp(-math.log(10000) * torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.arange(CONTEXT)[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    model.position_embedding.weight.data.copy_(EMBEDDING_SCALE * table)


@dataclass(frozen=True)
class Batch:
    """ids [b, t + 1] int64, labels [b, t + 1] (see echo_conversations.py), start [b] position of the first id."""

    ids: Tensor
    labels: Tensor
    start: Tensor


def phase(step: int) -> str:
    """The kind of batch that a step trains on."""
    if step < SLICES_UNTIL:
        return "slices"
    return "drills" if step < DRILLS_UNTIL else "whole"


def batch(name: str, kind: str) -> Batch:
    """A batch that depends on `name` and `kind` only; BATCH_BYTES targets.

    "whole": full windows that begin with a conversation at position 0, as the agent does.
    "slices": short slices of such windows at their own positions; cheaper, and all positions learn the
    short-range structure early.
    "drills": short windows of exchanges at random positions, most of whose bytes are copies.
    """
    rng = Random(name)
    length = CONTEXT if kind == "whole" else SHORT_WINDOW
    ids, labels, starts = [], [], []
    for _ in range(BATCH_BYTES // length):
        if kind == "drills":
            start, first = rng.randint(0, CONTEXT - length), 0
            data, label = conversations.window(rng, length + 1, conversations.drill)
        else:
            data, label = conversations.window(rng, CONTEXT + 1)
            start = first = rng.randint(0, CONTEXT - length)
        ids.append(np.frombuffer(data, np.uint8)[first : first + length + 1])
        labels.append(np.frombuffer(label, np.uint8)[first : first + length + 1])
        starts.append(start)
    return Batch(
        torch.from_numpy(np.stack(ids).astype(np.int64)),
        torch.from_numpy(np.stack(labels).astype(np.int64)),
        torch.tensor(starts),
    )


def byte_losses(model: Decoder, data: Batch) -> tuple[Tensor, Tensor]:
    """(loss in nats [b, t] float32, whether the argmax is right [b, t]) of each next byte."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(data.ids[:, :-1], data.start)
    logits = logits.float()
    targets = data.ids[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return loss, logits.detach().argmax(-1) == targets


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, a cosine towards HORIZON, and over the last COOLDOWN of `steps` a line down to zero."""
    warm = min(1.0, (step + 1) / WARMUP)
    progress = max(0, step - WARMUP) / (HORIZON - WARMUP)
    cosine = 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return LEARNING_RATE * warm * cosine * min(1.0, (steps - step) / COOLDOWN)


def optimiser_for(model: Decoder) -> torch.optim.AdamW:
    """AdamW; only the matrices of linear layers decay."""
    named = list(model.named_parameters())
    decay = [p for name, p in named if p.ndim == 2 and "embedding" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embedding" in name]
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def train(model: Decoder, steps: int, seed: int, checkpoint: Path | None) -> dict[str, float]:
    """Train up to `steps` steps, from `checkpoint` where it exists. Returns the last printed losses."""
    optimiser = optimiser_for(model)
    first = load(checkpoint, model, optimiser)
    began, sums, last = time.monotonic(), np.zeros(4), {"all": math.nan, "assistant": math.nan}
    for step in range(first, steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        data = batch(f"train/{seed}/{step}", phase(step))
        loss, _ = byte_losses(model, data)
        said = data.labels[:, 1:] > 0
        weights = torch.where(said, 1.0, OTHER_WEIGHT)
        optimiser.zero_grad()
        ((loss * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        sums += [loss.sum().item(), loss.numel(), loss[said].sum().item(), said.sum().item()]
        if (step + 1) % 50 == 0 or step + 1 == steps:
            last = {"all": sums[0] / sums[1], "assistant": sums[2] / max(1.0, sums[3])}
            report(step + 1, steps, last, (time.monotonic() - began) / (step + 1 - first))
            sums[:] = 0
        if checkpoint and ((step + 1) % 50 == 0 or step + 1 == steps):
            save(checkpoint, model, optimiser, step + 1)
    return last


def report(step: int, steps: int, losses: dict[str, float], seconds: float) -> None:
    pace = f"{seconds:.2f} s a step, {seconds * (steps - step) / 60:.1f} min left"
    print(f"step {step}/{steps}: nats per byte: {listed(losses)}; {pace}", flush=True)


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def save(path: Path, model: Decoder, optimiser: torch.optim.AdamW, step: int) -> None:
    temporary = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, temporary)
    os.replace(temporary, path)


def load(path: Path | None, model: Decoder, optimiser: torch.optim.AdamW) -> int:
    """Restore `path` where it exists; returns the number of steps already done."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


@torch.no_grad()
def evaluate(model: Decoder, seed: int, batches: int = 64) -> dict[str, float]:
    """Held-out measures over `batches` batches of full windows from a stream that training never sees.

    Losses in nats per byte. An object counts as exact when every one of its bytes is the argmax after
    the right ones before it, that is, when greedy decoding would write it byte for byte.
    """
    totals = {"all": [0.0, 0], "assistant": [0.0, 0], "calls exact": [0.0, 0], "answers exact": [0.0, 0]}

    def add(key: str, amount: float, count: int) -> None:
        totals[key][0] += amount
        totals[key][1] += count

    for index in range(batches):
        data = batch(f"held-out/{seed}/{index}", "whole")
        loss, right = byte_losses(model, data)
        labels = data.labels[:, 1:]
        add("all", loss.sum().item(), loss.numel())
        add("assistant", loss[labels > 0].sum().item(), int((labels > 0).sum()))
        for row_labels, row_right in zip(labels.numpy(), right.numpy(), strict=True):
            for label, exact in objects(row_labels, row_right):
                add("calls exact" if label == conversations.CALL else "answers exact", float(exact), 1)
    return {key: amount / count for key, (amount, count) in totals.items()}


def objects(labels: NDArray[np.int64], right: NDArray[np.bool_]) -> list[tuple[int, bool]]:
    """(label, all bytes right) of each run of equal non-zero labels that ends inside the row."""
    edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist()]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if labels[a] > 0]
    return [(int(labels[a]), bool(right[a:b].all())) for a, b in spans]


@torch.no_grad()
def sample(model: Decoder, prompt: str, limit: int = 160) -> str:
    """Greedy continuation of `prompt` up to the end-of-turn marker; slow, recomputes everything."""
    ids = list(prompt.encode())
    begin = len(ids)
    while len(ids) < min(CONTEXT, begin + limit) and not bytes(ids[begin:]).endswith(b"<|im_end|>"):
        logits = model(torch.tensor([ids]), torch.tensor([0]))
        ids.append(int(logits[0, -1].argmax()))
    return bytes(ids[begin:]).decode(errors="replace").removesuffix("<|im_end|>")


def show_samples(model: Decoder, seed: int) -> None:
    """Print what the model says to a few requests with the echo tool and three others."""
    rng = Random(f"samples/{seed}")
    tools = [skill.tool(rng) for skill in conversations.SKILLS[:4]]
    system = conversations.render_system(tools)
    for text in ("Echo hello world", "Please echo: zibora kemtu 77", "Use the echo tool", "Hello"):
        print(f"  {text!r} -> {sample(model, system + conversations.render_user(text))}", flush=True)


def export(model: Decoder, out: Path, seed: int, steps: int, losses: dict[str, float]) -> None:
    """Write the fp16 container."""
    config = {
        "layers": LAYERS, "dModel": WIDTH, "ctx": CONTEXT, "heads": HEADS, "dMlp": HIDDEN,
        "vocabSize": VOCAB, "backend": "pytorch", "seed": seed, "maxSteps": steps,
        "learningRate": LEARNING_RATE,
    }  # fmt: skip
    state = model.state_dict()
    tensors = {name: state[name].numpy() for name in canonical_names(LAYERS)}
    if tensors.keys() != state.keys():
        raise AssertionError("the model's parameters are not the container's")
    final = {"step": steps, "train": losses["train"], "val": losses["all"]}
    write_tinygpt(out, config, tensors, dtype="fp16", header={"finalLoss": final}, step=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="the .tinygpt file to write")
    parser.add_argument("--checkpoint", type=Path, help="resume from, and save to, this file")
    parser.add_argument("--steps", type=int, default=2750)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = Decoder()
    initialise(model)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    began = time.monotonic()
    last = train(model, options.steps, options.seed, options.checkpoint)
    print(f"trained for {(time.monotonic() - began) / 60:.1f} min", flush=True)
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    losses = evaluate(model, options.seed)
    print(f"held out, fp16 weights: {listed(losses)}", flush=True)
    export(model, options.out, options.seed, options.steps, losses | {"train": last["all"]})
    show_samples(model, options.seed)


if __name__ == "__main__":
    main()
