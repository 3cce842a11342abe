"""The bundled echo model: the bundle is the checkpoint's, and the first thing a newcomer tries works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.chat_format import (
    DEFAULT_HEADER,
    Piece,
    PosttrainDialect,
    encode,
    reply_schema,
    tool_line,
)
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import Tool, ToolResult
from posttrainllm.export.checkpoint import open_checkpoint
from posttrainllm.export.exporter import export
from posttrainllm.runtime import Grammar
from posttrainllm.runtime.bundle import Bundle, sha256_file
from posttrainllm.runtime.tokenizer import ByteTokenizer, decode

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "echo" / "echo.tinygpt"
BUNDLE = ROOT / "models" / "echo" / "bundle"
ECHO = ROOT / "tools_schemas" / "echo.json"


def agent(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "posttrainllm", "agent", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "POSTTRAINLLM_CACHE_DIR": str(cache)},
        timeout=120,
        check=False,
    )


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_shipped_bundle_is_the_exported_checkpoint(tmp_path: Path) -> None:
    """Exported again: the same weights byte for byte, the same facts, the same parity within its tolerance."""
    fresh = export(CHECKPOINT, tmp_path / "bundle").bundle
    shipped = Bundle.open(BUNDLE, verify=True).manifest
    again = Bundle.open(fresh).manifest
    assert sha256_file(fresh / "model.onnx.data") == sha256_file(BUNDLE / "model.onnx.data")
    assert shipped.source.sha256 == again.source.sha256 == sha256_file(CHECKPOINT)
    assert (shipped.kv, shipped.tokenizer, shipped.context_length) == (
        again.kv,
        again.tokenizer,
        again.context_length,
    )
    assert shipped.parity["worst"] <= 1e-4


def test_the_package_carries_the_bundle_and_not_the_checkpoint() -> None:
    installed = Path(str(files("posttrainllm.models"))) / "echo"
    Bundle.open(installed / "bundle", verify=True)
    if installed.resolve() != CHECKPOINT.parent:  # an ordinary install, not an editable one
        assert not (installed / "echo.tinygpt").exists()


def test_sizes_and_context() -> None:
    """What the issue asks of the shipped model."""
    assert 1e6 < CHECKPOINT.stat().st_size < 4e6
    with open_checkpoint(CHECKPOINT) as checkpoint:
        assert checkpoint.config.context_length == 2048
        assert checkpoint.config.vocab_size == 256
        assert checkpoint.tokenizer_source is None


@pytest.mark.parametrize("model", [CHECKPOINT, "echo"])
def test_the_smoke_test_of_the_first_document(tmp_path: Path, model: object) -> None:
    """Echo tool, one question, a transcript; the second start takes the export from the cache."""
    transcript = tmp_path / "agent.jsonl"
    flags = ["--tools", ECHO, "--single", "Use the echo tool", "--max-tokens", 30, "--max-steps", 1]
    flags += ["--transcript", transcript]
    first = agent(model, *flags, cache=tmp_path / "cache")
    assert first.returncode in (0, 4), first.stderr
    assert ("agent: exported" in first.stderr) == (model is CHECKPOINT)
    found = events(transcript.read_text(encoding="utf-8"))
    call = next(event for event in found if event["type"] == "tool_call")
    assert call["tool"] == "echo"
    assert call["exit_code"] == 0
    assert call["stdout"] == call["arguments"]["text"]
    second = agent(model, *flags, cache=tmp_path / "cache")
    assert second.returncode == first.returncode
    assert "agent: exported" not in second.stderr
    again = events(transcript.read_text(encoding="utf-8"))[len(found) :]
    assert [event.get("raw") for event in again] == [event.get("raw") for event in found], (
        "greedy runs repeat"
    )


@pytest.mark.parametrize("text", ["hello", "good morning", "the answer is 42"])
def test_the_model_echoes_what_it_is_asked_to(tmp_path: Path, text: str) -> None:
    """No tools named: they are the model's own. The argument is a valid one, whatever it is."""
    done = agent("echo", "--single", f"Use the echo tool to say {text}", "--json-out", cache=tmp_path)
    found = events(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [event["type"] for event in found] == ["user", "assistant", "tool_call", "assistant", "answer"]
    assert isinstance(found[2]["arguments"]["text"], str)


def test_the_recipe_renders_what_the_agent_renders(load_recipe: Callable[[str], Any]) -> None:
    """The bytes that the model was trained on are the bytes that it gets to see."""
    recipe = load_recipe("echo_conversations")
    dialect = PosttrainDialect()
    tools = load_tools(ROOT / "tools_schemas" / "debugger.json")
    shown = [
        recipe.Tool(
            tool.name, tool.description, tuple((name, "string") for name in tool.parameters["required"])
        )
        for tool in tools
    ]
    assert text_of(dialect.system(DEFAULT_HEADER, tools)) == recipe.render_system(shown)
    assert text_of(dialect.user("hé {x}")) == recipe.render_user("hé {x}")
    result = ToolResult("t", "é\n", 'a "b"', 3)
    assert text_of(dialect.tool_result(result)) == recipe.render_result("t", "é\n", 'a "b"', 3)
    optional = Tool(
        "f", None, {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    )
    assert tool_line(optional) == recipe.Tool("f", "", (), (("b", "string"), ("a", "integer"))).line()


def test_the_recipes_replies_are_admitted_by_the_grammar(load_recipe: Callable[[str], Any]) -> None:
    recipe = load_recipe("echo_conversations")
    grammar = Grammar(reply_schema(load_tools(ECHO)), ByteTokenizer(), vocab_size=256)
    for reply in (recipe.render_call("echo", {"text": 'é "x"'}), recipe.render_answer("done\n")):
        matcher = grammar.matcher()
        for byte in reply.encode():
            assert matcher.allowed()[byte]
            matcher.accept(byte)
        assert matcher.finished


def text_of(pieces: list[Piece]) -> str:
    spans, _ = encode(pieces, ByteTokenizer())
    return decode(ByteTokenizer(), [token for span in spans for token in span.ids])
