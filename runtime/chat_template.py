"""A model's own chat template: Jinja in a sandbox, with what transformers gives to templates and nothing more.

Messages in, text out. `template_ids.py` turns that text into ids. A template that fails is an error that
names its line; there is no second template to fall back to. The environment follows transformers'
`apply_chat_template` (trimmed blocks, `tojson` without HTML escapes, `raise_exception`, `strftime_now`,
loop controls, `generation` blocks), because templates are written against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .bundle import CHAT_TEMPLATE
from .errors import ChatTemplateError

if TYPE_CHECKING:
    from jinja2 import Template

_CONFIG = "tokenizer_config.json"
_OLD_TEMPLATE = "chat_template.json"
_SPECIAL_MAP = "special_tokens_map.json"
_NAMED = "additional_chat_templates"
_WITH_TOOLS = "tool_use"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILENAME = "<template>"  # what Jinja calls a template that has no file
_MAX_NBYTES = 16 << 20
# Not plane 16: `template_ids` has stand-ins there, which must come through.
_BEYOND_ASCII = re.compile("[\x80-\U000fffff]")

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """A compiled template. `where` names its file in errors; `special` are the texts of special tokens.

    Raises ChatTemplateError if `source` is not a template.
    """

    def __init__(self, source: str, where: object, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.where = where
        self.special = dict(special or {})
        self._template = self._guarded(lambda: _compile(source))

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation; with `add_generation_prompt` the assistant's turn is opened.

        Raises ChatTemplateError with the line that failed, or with what the template itself refused.
        """
        values = {
            **self.special,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text: str = self._guarded(lambda: self._template.render(**values))
        return text

    def literals(self) -> list[str]:
        """The texts that the template itself writes or looks for."""
        from jinja2 import nodes

        tree = _environment().parse(self.source)
        found = [node.data for node in tree.find_all(nodes.TemplateData)]
        return found + [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]

    def _guarded(self, work: Any) -> Any:
        """What `work` returns; whatever a template raises becomes a ChatTemplateError."""
        from jinja2 import TemplateError

        try:
            return work()
        except TemplateError as error:
            found = str(error.message or type(error).__name__)
            raise ChatTemplateError(self._place(error), found, remedy=_REMEDY) from None
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(self._place(error), found, remedy=_REMEDY) from None

    def _place(self, error: BaseException) -> str:
        line = getattr(error, "lineno", None)
        trace = error.__traceback__
        while trace is not None:  # Jinja puts the template's lines into the traceback
            if trace.tb_frame.f_code.co_filename == _FILENAME:
                line = trace.tb_lineno
            trace = trace.tb_next
        return f"{self.where}" if line is None else f"{self.where}, line {line}"


_REMEDY = "mend the template, or use --dialect posttrainllm"


def find_template(folder: Path, *, tools: bool = True) -> ChatTemplate | None:
    """The chat template of a model folder; None if it has none. Raises ChatTemplateError."""
    found = find_source(folder, tools=tools)
    if found is None:
        return None
    special = special_tokens({**_object(folder / _SPECIAL_MAP), **_object(folder / _CONFIG)})
    return ChatTemplate(*found, special)


def find_source(folder: Path, *, tools: bool = True) -> tuple[str, str] | None:
    """The text of a folder's chat template and where it stands; None if there is none.

    A file of its own counts more than what tokenizer_config.json holds. Of several named ones `tool_use` is
    taken where there are `tools`, as transformers does, else the default. Raises ChatTemplateError.
    """
    listed = _object(folder / _CONFIG).get("chat_template")
    by_name = _by_name(listed)
    if tools:
        named = folder / _NAMED / f"{_WITH_TOOLS}.jinja"
        if named.is_file():
            return _text(named), str(named)
        if _WITH_TOOLS in by_name:
            return by_name[_WITH_TOOLS], f"{folder / _CONFIG} ({_WITH_TOOLS})"
    own = folder / CHAT_TEMPLATE
    if own.is_file():
        return _text(own), str(own)
    where = folder / _CONFIG
    if isinstance(listed, list):
        listed = by_name.get("default")
    if listed is None:
        where = folder / _OLD_TEMPLATE
        listed = _object(where).get("chat_template")
    if listed is None:
        return None
    if not isinstance(listed, str):
        raise ChatTemplateError(where, "chat_template is not a text", "a template")
    return listed, str(where)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like by name; the ones that `config` does not state are left out, never invented."""
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _by_name(listed: object) -> dict[str, str]:
    """Named templates: `[{"name": …, "template": …}]`."""
    entries = listed if isinstance(listed, list) else []
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, Mapping)]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_NBYTES:
            raise ChatTemplateError(file, f"{file.stat().st_size:,} bytes", f"at most {_MAX_NBYTES:,}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ChatTemplateError(file, f"cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise ChatTemplateError(file, "not UTF-8", "a chat template") from None


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(file, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ChatTemplateError(file, f"holds {type(value).__name__}", "a JSON object")
    return value


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    template: Template = _environment().from_string(source)
    return template


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks what training learns from; here it is just its body."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: object) -> NoReturn:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _BEYOND_ASCII.sub(_escape, text) if ensure_ascii else text


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
