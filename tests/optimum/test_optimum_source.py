"""Architectures that go through optimum: in an environment of their own, since optimum pins an older transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm.export import optimum_source
from posttrainllm.export.exporter import export
from posttrainllm.runtime import generate, load
from posttrainllm.runtime.errors import CheckFailedError, CheckpointError, MissingExtraError, UsageError

SIZES: dict[str, dict[str, Any]] = {
    "OPTConfig": {
        "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32,
    },
    "GPTBigCodeConfig": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "StableLmConfig": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
}  # fmt: skip
# transformers and torch warn of what they themselves do.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
needs_optimum = pytest.mark.skipif(find_spec("optimum") is None, reason="needs the optimum extra, on its own")


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    if find_spec("optimum") is not None:
        pytest.skip("the extra is installed")
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "bloom"}')
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(MissingExtraError) as caught:
        export(source, tmp_path / "out")
    assert "model_type 'bloom' is not known" in str(caught.value)
    assert "pip install 'posttrainllm-onnx[optimum]'" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def make_source(
    tmp_path_factory: pytest.TempPathFactory, family_tokenizer: Callable[[str], str]
) -> Callable[[str], tuple[Path, Any]]:
    """make_source("OPTConfig") -> the folder of a model with random weights, and the model."""

    def make(name: str) -> tuple[Path, Any]:
        import torch
        import transformers

        tokenizer = family_tokenizer("chatml")
        content = json.loads(tokenizer)
        ids = [*content["model"]["vocab"].values(), *(entry["id"] for entry in content["added_tokens"])]
        config = getattr(transformers, name)(vocab_size=max(ids) + 1, **SIZES[name])
        torch.manual_seed(1)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # spread the logits: fresh weights are nearly equal
                if parameter.dim() > 1:
                    parameter.mul_(4)
        folder = tmp_path_factory.mktemp("optimum") / name
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tokenizer)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
        return folder, model

    return make


def tables(bundle: Path, vocab_size: int) -> int:
    """How many matrices of the graph have a row or a column for every id."""
    import onnx

    model = onnx.load(str(bundle / "model.onnx"), load_external_data=False)
    assert (bundle / "model.onnx.data").is_file()
    return sum(vocab_size in tensor.dims and len(tensor.dims) == 2 for tensor in model.graph.initializer)


@needs_optimum
@pytest.mark.parametrize("name", ["OPTConfig", "GPTBigCodeConfig", "StableLmConfig"])
def test_logits_and_greedy_ids_are_those_of_transformers(
    make_source: Callable[[str], tuple[Path, Any]], tmp_path: Path, name: str
) -> None:
    import torch

    source, model = make_source(name)
    report = export(source, tmp_path / "out")
    assert report.manifest.flavour == "optimum"
    assert report.manifest.parity["worst"] <= 1e-4
    assert tables(report.bundle, model.config.vocab_size) == (1 if model.config.tie_word_embeddings else 2)
    session = load(report.bundle, provider="cpu")
    ids = np.random.default_rng(5).integers(0, session.vocab_size, 40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for split in ([40], [1, 7, 32], [39, 1]):
        cache, found, start = session.new_cache(), [], 0
        for size in split:
            found.append(session.forward(ids[start : start + size], cache))
            start += size
        assert np.abs(np.concatenate(found) - expected).max() < 1e-4 * np.ptp(expected)
    greedy = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[
        0, 40:
    ]
    ours = [step.id for step in generate(session, ids, cache=session.new_cache(), max_tokens=12)]
    assert ours == greedy.tolist()


@needs_optimum
def test_flags_that_cannot_be_honoured_and_models_that_optimum_refuses(
    make_source: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    source, _ = make_source("OPTConfig")
    with pytest.raises(UsageError, match="--precision: given for a model that goes through optimum"):
        export(source, tmp_path / "out", precision="int8")
    with pytest.raises(UsageError, match="--graph"):
        export(source, tmp_path / "out", flavour="standard")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "nobody_knows"}))
    with pytest.raises(CheckpointError, match="optimum cannot export it"):
        export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@needs_optimum
def test_a_graph_that_is_wrong_from_the_second_run_on_is_refused(
    make_source: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Custom architectures export and pass with an empty past; only later runs tell."""
    import onnx

    traced = optimum_source._traced

    def spoilt(source: Path, folder: Path, staging: Path) -> Any:
        facts = traced(source, folder, staging)
        model = onnx.load(str(staging / "model.onnx"))
        past = "past_key_values.1.key"
        for node in model.graph.node:
            node.input[:] = ["faded" if name == past else name for name in node.input]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.5, np.float32), "half"))
        model.graph.node.insert(0, onnx.helper.make_node("Mul", [past, "half"], ["faded"]))
        onnx.save(model, str(staging / "model.onnx"))
        return facts

    monkeypatch.setattr(optimum_source, "_traced", spoilt)
    source, _ = make_source("StableLmConfig")
    with pytest.raises(CheckFailedError, match="differs from the model") as caught:
        export(source, tmp_path / "out")
    assert "one chunk" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
