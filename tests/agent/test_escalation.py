"""The escalate tool against a real HTTP server: the answer, every failure as a result, and the key in the header alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.escalation import TOOL, EscalationError, escalation
from posttrainllm.agent.loop import Agent
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry
from posttrainllm.runtime.errors import UsageError

SECRET = "sk-very-secret-0815"


class Server(ThreadingHTTPServer):
    """Answers every POST with `status` and `body`, after `wait` seconds, and remembers what it was sent."""

    daemon_threads = True
    status, body, wait, location = 200, b"", 0.0, ""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), data))
        time.sleep(self.server.wait)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        running.body = json.dumps({"choices": [{"message": {"content": "Forty-two."}}]}).encode()
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_the_question_goes_out_and_the_answer_comes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert escalation(server.url + "/", "big", 5)("Why? é🙂") == "Forty-two."
    assert escalation(server.url + "/chat/completions", "big", 5)("again") == "Forty-two."
    path, headers, body = server.seen[0]
    assert path == server.seen[1][0] == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert body == {"model": "big", "messages": [{"role": "user", "content": "Why? é🙂"}]}
    monkeypatch.delenv("OPENAI_API_KEY")
    escalation(server.url, "big", 5)("without a key")
    assert "Authorization" not in server.seen[2][1]


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"status": 401}, "the endpoint said 401 Unauthorized"),
    "its own fault": ({"status": 500, "body": b"x" * 100}, "the endpoint said 500 Internal Server Error"),
    "no JSON": ({"body": b"<html>"}, "no chat completion"),
    "no choices": ({"body": b'{"choices": []}'}, "no chat completion"),
    "no text": ({"body": b'{"choices": [{"message": {"content": null}}]}'}, "no chat completion"),
    "deep": ({"body": b"[" * 100_000}, "no chat completion"),
    "endless": ({"body": b" " * (1 << 20) + b"x"}, "more than 1,048,576 bytes"),
    "slow": ({"wait": 1.5}, "no answer within 0.5 s"),
    "elsewhere": ({"status": 302, "location": "http://127.0.0.1:9/steal"}, "the endpoint said 302 Found"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_results_without_secrets(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    settings, said = FAILURES[name]
    for key, value in settings.items():
        setattr(server, key, value)
    handlers = HandlerRegistry()
    handlers.register("escalate", escalation(server.url, "big", 0.5))
    result = FunctionBackend(handlers).call(TOOL, {"question": "q"})
    assert result.exit_code == 1
    assert said in result.stderr
    assert SECRET not in result.stderr + result.stdout


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(EscalationError, match="cannot be reached"):
            escalation(url, "big", 2)("q")


@pytest.mark.parametrize(
    "url", ["localhost:8080", "file:///etc/passwd", "http://", "http://[", "http://u:p@host/v1", ""]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="--escalate") as caught:
        escalation(url, "big", 1)
    assert "u:p" not in str(caught.value)


def test_the_model_sees_the_tool_and_its_answer(scripted: Callable[..., Any], server: Server) -> None:
    replies = ['{"tool": "escalate", "arguments": {"question": "why"}}', '{"answer": "ok"}']
    session = scripted(replies)
    handlers = HandlerRegistry()
    handlers.register("escalate", escalation(server.url, "big", 5))
    agent = Agent(session, (TOOL,), backend=FunctionBackend(handlers))
    assert [event.type for event in agent.run("hm")][-1] == "answer"
    assert "- escalate(question: string)  Ask a larger model" in session.seen
    assert '"stdout":"Forty-two."' in session.seen


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "posttrainllm",
        "agent",
        *map(str, arguments),
        "--single",
        "What is 2*3?",
    ]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)


def test_the_flags(server: Server, tmp_path: Path) -> None:
    done = start("demo", "--escalate", server.url, "--escalate-model", "big")
    assert done.returncode == 0, done.stderr
    assert "10 tools" in done.stderr
    assert "--escalate-model: missing" in start("demo", "--escalate", server.url).stderr
    assert "--escalate: missing" in start("demo", "--escalate-model", "big").stderr
    own = tmp_path / "tools.json"
    own.write_text(json.dumps([{"name": "escalate", "description": "mine", "_exec": "echo mine"}]))
    done = start(
        "demo", "--tools", own, "--escalate", server.url, "--escalate-model", "big", "--max-tokens", 30
    )
    assert "has a tool escalate of its own, which is used" in done.stderr
    assert "1 tool," in done.stderr
