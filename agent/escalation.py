"""The tool `escalate(question)`: asks a larger model behind any OpenAI-compatible endpoint.

What the small model cannot do it may hand on. The key comes from OPENAI_API_KEY and goes nowhere but into the request's header:
not into arguments, events or errors. Redirects are refused, since they would carry it to another host.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ..runtime.errors import UsageError
from .tools import Tool

NAME = "escalate"
KEY = "OPENAI_API_KEY"
_MAX_NBYTES = 1 << 20
TOOL = Tool(
    NAME,
    "Ask a larger model a question that you cannot answer with the other tools",
    {
        "type": "object",
        "properties": {"question": {"type": "string", "minLength": 1}},
        "required": ["question"],
    },
    handler=NAME,
)


class EscalationError(Exception):
    """The endpoint gave no answer; the message says why, and holds no secret."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def escalation(url: str, model: str, timeout_s: float) -> Callable[[str], str]:
    """The handler of the tool: `model` at `url` (".../v1"; "/chat/completions" is appended). Raises UsageError for the URL."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.username or parts.password:
        raise UsageError("--escalate", f"{_without_secrets(url)}", "a URL such as http://localhost:8080/v1")
    endpoint = url.rstrip("/")
    if not endpoint.endswith("/chat/completions"):
        endpoint += "/chat/completions"
    opener = urllib.request.build_opener(_NoRedirects)

    def ask(question: str) -> str:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
        request = urllib.request.Request(endpoint, body.encode("utf-8", "replace"), method="POST")
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get(KEY, "").strip():
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return _answer(response.read(_MAX_NBYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                _fail(f"the endpoint said {error.code} {http.client.responses.get(error.code, '')}".strip())
        except TimeoutError:
            _fail(f"no answer within {timeout_s:g} s")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None)
            if isinstance(reason, TimeoutError):
                _fail(f"no answer within {timeout_s:g} s")
            _fail(f"the endpoint cannot be reached ({type(reason or error).__name__})")

    return ask


def _answer(data: bytes) -> str:
    if len(data) > _MAX_NBYTES:
        _fail(f"an answer of more than {_MAX_NBYTES:,} bytes")
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str) or not text.strip():
        _fail("what the endpoint sent is no chat completion")
    return text


def _fail(reason: str) -> NoReturn:
    raise EscalationError(reason)


def _without_secrets(url: str) -> str:
    """`url` without what stands before an @, for an error message."""
    before, at, rest = url.rpartition("@")
    return f"{before.partition('//')[0]}//…@{rest}" if at else url
