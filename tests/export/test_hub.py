"""Model ids: a path wins, and what cannot be fetched is told in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from posttrainllm.export.hub import local_source
from posttrainllm.runtime.errors import CheckpointError, MissingExtraError


@pytest.mark.parametrize("model", ["model.gguf", "/tmp/a/b", "./org/name", "a/b/c", "folder/", "org/na me"])
def test_what_cannot_be_an_id_is_a_path(model: str) -> None:
    assert local_source(model) == Path(model)


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_source("org/name") == Path("org/name")
    assert local_source("org/typo") == Path("org/typo")  # a folder of mine, not somebody's on the hub


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as caught:
        local_source("nobody-here/no-model")
    assert "posttrainllm-onnx[hub]" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_network_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        local_source("nobody-here/no-model")
    assert "nobody-here/no-model" in str(caught.value)
    assert "\n" not in str(caught.value)
