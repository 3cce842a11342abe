"""The NumPy reference against a decoder in plain Python, and against logits worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm.export import reference
from posttrainllm.export.checkpoint import open_checkpoint

IDS = [3, 10, 0, 7, 7, 2, 9]


@pytest.mark.parametrize("sizes", [{}, {"heads": 6}, {"heads": 1, "middle": 6}, {"width": 1, "heads": 1}])
@pytest.mark.parametrize("first", [0, 2])
def test_reference_is_the_formats_forward_pass(
    make_file: Callable[..., Any],
    plain: Callable[..., Any],
    tmp_path: Path,
    sizes: dict[str, int],
    first: int,
) -> None:
    sample = make_file(**sizes)
    expected = plain(sample.tensors, sample.config["heads"], IDS, first)
    positions = np.arange(first, first + len(IDS))[None]
    with open_checkpoint(sample.save(tmp_path)) as checkpoint:
        exact = reference.logits(checkpoint, np.array([IDS]), positions, np.float64)
        single = reference.logits(checkpoint, np.array([IDS]), positions)
    np.testing.assert_allclose(exact[0], expected, rtol=1e-12, atol=1e-12)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single[0], expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_batch_do_not_see_each_other(make_file: Callable[..., Any], tmp_path: Path) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    positions = np.array([[0, 1, 2], [3, 4, 5]])
    with open_checkpoint(make_file().save(tmp_path)) as checkpoint:
        both = reference.logits(checkpoint, ids, positions)
        for row in range(2):
            alone = reference.logits(checkpoint, ids[row : row + 1], positions[row : row + 1])
            np.testing.assert_allclose(both[row], alone[0], rtol=1e-5, atol=1e-5)


BY_HAND = {
    "token_embedding.weight": [[1, 0], [0, 1]],
    "ln_final.weight": [1, 1],
    "blocks.0.ln1.bias": [1, 2],
    "blocks.0.attn.v_proj.weight": [[20, -5], [7, -1]],
    "blocks.0.attn.o_proj.weight": [[0, 1], [0, 0]],
    "blocks.0.ln2.bias": [1, 0],
    "blocks.0.mlp.fc_in.weight": [[0, 9], [1, 0]],
    "blocks.0.mlp.fc_out.weight": [[0, -1], [-8, 0]],
}


def logits_of(make_file: Callable[..., Any], folder: Path, values: dict[str, Any]) -> Any:
    """Logits [2] of id 0 in a model of width 2, MLP 2, one head, one layer; what is not given is zero."""
    shapes = make_file(vocab=2, width=2, heads=1, layers=1, middle=2, ctx=1).tensors
    tensors = {name: np.array(values.get(name, np.zeros(t.shape)), np.float32) for name, t in shapes.items()}
    with open_checkpoint(make_file(tensors=tensors, heads=1).save(folder)) as checkpoint:
        return reference.logits(checkpoint, np.array([[0]]), np.array([[0]]), np.float64)[0, 0]


def test_logits_worked_out_by_hand(make_file: Callable[..., Any], tmp_path: Path) -> None:
    """ln1 and ln2 have gain 0, so their outputs are their biases, (1, 2) and (1, 0), whatever comes in.

    v = (20 - 10, 7 - 2) = (10, 5), attention passes it on, o = (5, 0);
    fc_in gives (0, 1), GELU(1) = 0.84134475, fc_out gives (-0.84134475, 0).
    The stream of e0 = (1, 0) ends at (5.15865525, 0); half of that is d, and the last norm gives
    ±d / sqrt(d² + 1e-5).
    """
    d = (1 + 5 - 0.8413447460685429) / 2
    logit = d / math.sqrt(d * d + 1e-5)
    np.testing.assert_allclose(logits_of(make_file, tmp_path, BY_HAND), [logit, -logit], rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in BY_HAND if "proj" in name or "fc_" in name])
def test_a_transposed_square_matrix_is_another_model(
    make_file: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """The trap itself: any one of the matrices read the wrong way round makes the other id win."""
    turned = BY_HAND | {name: np.array(BY_HAND[name]).T}
    first, second = logits_of(make_file, tmp_path, turned)
    assert first < second
