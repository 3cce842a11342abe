"""The `.tinygpt` base model in PyTorch, and weights to begin with that can already copy."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HEADS, WIDTH, HIDDEN, CONTEXT, VOCAB = 6, 4, 256, 1024, 1024, 1536
HEAD_DIM = WIDTH // HEADS
EMBEDDING_SCALE, POSITION_DIMS = 0.05, 80


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            project(x).view(b, t, HEADS, HEAD_DIM).transpose(1, 2)
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

    def hidden(self, ids: Tensor, start: Tensor) -> Tensor:
        """States [b, t, C] before the head, of ids [b, t] whose first positions are `start` [b]."""
        positions = start[:, None] + torch.arange(ids.shape[1])
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.ln_final(x)

    def head(self, states: Tensor) -> Tensor:
        return states @ self.token_embedding.weight.T


def initialise(model: Decoder, *, copying: bool = True) -> None:
    """Random weights; sinusoids as the first value of the learned positions; a first idea of copying.

    Positions begin in the first POSITION_DIMS dimensions and tokens in the others, so that "the token
    before" is a rotation that a head can hold from the start. `copying` gives layer 0 two heads that look
    one and two tokens back, and layer 1 two that look behind earlier occurrences of the current token.
    Nothing keeps these weights from changing; they only save the time that it takes to find them.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "fc_out.weight")):
            nn.init.normal_(parameter, std=0.5 * WIDTH**-0.5 / math.sqrt(2 * LAYERS))
        elif name.endswith("embedding.weight"):
            nn.init.normal_(parameter, std=EMBEDDING_SCALE)
        elif name.endswith(("_proj.weight", "fc_in.weight")):
            nn.init.normal_(parameter, std=0.5 * WIDTH**-0.5)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
    pairs = POSITION_DIMS // 2
    rates = torch.cat(
        [0.05 + 3.05 * torch.rand(HEAD_DIM // 2), torch.logspace(-3, -1, pairs - HEAD_DIM // 2)]
    )
    angles = torch.arange(CONTEXT)[:, None] * rates
    table = torch.zeros(CONTEXT, WIDTH)
    table[:, :POSITION_DIMS:2], table[:, 1:POSITION_DIMS:2] = angles.sin(), angles.cos()
    model.position_embedding.weight.data.copy_(2 * EMBEDDING_SCALE * table)
    model.token_embedding.weight.data[:, :POSITION_DIMS] = 0
    if copying:
        begin_with_copying(model, rates)


@torch.no_grad()
def begin_with_copying(model: Decoder, rates: Tensor) -> None:
    """Set some heads of the first two layers as `initialise` says."""
    first, second = model.blocks[0].attn, model.blocks[1].attn
    tokens = WIDTH - POSITION_DIMS
    reads = [orthogonal(HEAD_DIM, tokens) for _ in range(2)]
    writes = [orthogonal(HEAD_DIM, WIDTH) for _ in range(2)]
    for head, lag in enumerate((1, 2)):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        query, key = torch.zeros(HEAD_DIM, WIDTH), torch.zeros(HEAD_DIM, WIDTH)
        for index in range(HEAD_DIM // 2):
            angle, at = rates[index] * lag, 2 * index
            key[at, at] = key[at + 1, at + 1] = 1
            query[at, at], query[at, at + 1] = angle.cos(), -angle.sin()  # the rotation back by `lag`
            query[at + 1, at], query[at + 1, at + 1] = angle.sin(), angle.cos()
        first.q_proj.weight[rows], first.k_proj.weight[rows] = 1.2 * query, 1.2 * key
        first.v_proj.weight[rows] = F.pad(reads[head], (POSITION_DIMS, 0))
        first.o_proj.weight[:, rows] = 0.08 * writes[head].T
    for head in range(2):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        second.q_proj.weight[rows] = 1.5 * F.pad(reads[0], (POSITION_DIMS, 0))
        second.k_proj.weight[rows] = 1.5 * writes[0]
        copied = F.pad(orthogonal(HEAD_DIM, tokens), (POSITION_DIMS, 0))
        second.v_proj.weight[rows], second.o_proj.weight[:, rows] = copied, 0.1 * copied.T


def orthogonal(rows: int, columns: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(rows, columns))
