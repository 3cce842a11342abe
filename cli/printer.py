"""Prints the events of `agent`, for people or as JSON lines, and keeps the exit code that they mean."""

import json
import sys
import time

from ..agent import events
from .terminal import AnswerStream, printable


class Printer:
    """Shows the events of a run and appends them to a transcript.

    With `json_out` stdout carries events and nothing else. Otherwise answers go to stdout, after `prompt`,
    and everything about them to stderr; with `live` an answer appears while it is decoded.
    """

    def __init__(
        self, transcript: events.Transcript | None, *, json_out: bool, live: bool, prompt: str
    ) -> None:
        self._transcript = transcript
        self._json_out = json_out
        self._live = live
        self._prompt = prompt
        self._stream = AnswerStream()
        self._streamed = False
        self._cut = ""
        self._began = 0.0
        self.exit_code = 0
        self.tokens_per_second = 0.0  # of the last step

    def show(self, event: events.Event) -> None:
        """Record one event, then print it."""
        if self._transcript:
            self._transcript.write(event)
        if isinstance(event, events.Delta):
            self._began = self._began or time.monotonic()
        elif isinstance(event, events.Assistant):
            taken, self._began = time.monotonic() - self._began, 0.0
            count = event.sampled_tokens + event.forced_tokens
            self.tokens_per_second = count / taken if 0 < taken < 3600 else 0.0
        if isinstance(event, events.AnswerEvent):
            self.exit_code = 5 if event.fallback else 0
        elif isinstance(event, events.Stop):
            self.exit_code = 130 if event.reason == "interrupted" else 4
        if self._json_out:
            self._show_json(event)
        else:
            self._show_text(event)

    def _show_json(self, event: events.Event) -> None:
        if not isinstance(event, (events.Delta, events.ToolResultEvent)):
            sys.stdout.flush()
            sys.stdout.buffer.write(events.to_line(event))
            sys.stdout.buffer.flush()

    def _show_text(self, event: events.Event) -> None:
        match event:
            case events.Delta() if self._live:
                self._show_delta(event.text)
            case events.Assistant():
                self._stream = AnswerStream()
                self._cut = ", cut off (--max-tokens raises the limit)" if event.stop == "length" else ""
            case events.ToolCallEvent():
                self._show_call(event)
            case events.ContextEvent():
                self._show_context(event)
            case events.AnswerEvent():
                if not self._end_streamed_line():
                    print(self._prompt + printable(event.text, sys.stdout))
                if event.fallback:
                    _tell(f"agent: no JSON reply{self._cut}; the text stands as it came")
            case events.Stop():
                self._end_streamed_line()
                _tell(f"agent: stopped ({event.reason}): {event.detail}")

    def _show_delta(self, raw: str) -> None:
        text = self._stream.push(raw)
        if text and not self._streamed:
            self._streamed = True
            sys.stdout.write(self._prompt)
        sys.stdout.write(printable(text, sys.stdout))
        sys.stdout.flush()

    def _show_call(self, event: events.ToolCallEvent) -> None:
        arguments = json.dumps(event.arguments, ensure_ascii=False)
        ended = "timed out" if event.timed_out else f"exit {event.exit_code}"
        _tell(f"agent: {event.tool} {arguments} ({ended}, {event.duration_sec:.2f} s)")

    def _show_context(self, event: events.ContextEvent) -> None:
        what = []
        if event.dropped_turns:
            turns = ", ".join(str(turn + 1) for turn in event.dropped_turns)
            what.append(f"{event.dropped_tokens} tokens of user turn {turns} left it")
        if event.shortened:
            what.append(f"{event.shortened} bytes were cut out of the result")
        _tell(f"agent: the context of {event.limit} tokens was full: {', '.join(what)}")

    def _end_streamed_line(self) -> bool:
        """End the line of an answer that was streamed; whether there was one."""
        streamed, self._streamed = self._streamed, False
        if streamed:
            print()
        return streamed


def _tell(line: str) -> None:
    print(printable(line, sys.stderr), file=sys.stderr)
