"""Seeded synthetic conversations in the posttrainllm dialect, byte for byte as the agent renders them.

    tools, header           -> system block            render_system
    user text               -> user block              render_user
    tool result             -> tool block              render_result
    call or answer          -> one JSON object         render_call, render_answer

`conversation` puts them together, `drill` makes single exchanges, and `window` packs either back to back
into a fixed number of bytes. Every byte carries a label: 0 for what the agent writes, CALL and ANSWER for what the model
has to say. The same `random.Random` state always gives the same bytes.

What it is not: real conversations. Requests come from a few templates, tool output is made up, and
the only ability it teaches is to pick the named tool, to copy its arguments, and to report its output.
Content never holds `<|`, which the agent escapes; the renderers refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Arguments = dict[str, str | int]
Segment = tuple[str, int]

OTHER, CALL, ANSWER = 0, 1, 2
HEADER = "You are a specialized on-device agent."
HEADERS = (
    "You are a helpful assistant with tools.",
    "You answer questions about a repository.",
    "You are a careful assistant on a laptop.",
)
MAX_EXCHANGES = 7


@dataclass(frozen=True)
class Tool:
    """A tool as the system prompt shows it; parameters are (name, JSON type) pairs."""

    name: str
    description: str
    required: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        """`- name(arg: type, opt?: type)`, then two spaces and the description where there is one."""
        arguments = [f"{name}: {kind}" for name, kind in self.required]
        arguments += [f"{name}?: {kind}" for name, kind in sorted(self.optional)]
        signature = f"- {self.name}({', '.join(arguments)})"
        return f"{signature}  {self.description}" if self.description else signature


@dataclass(frozen=True)
class Skill:
    """What the generator knows about one tool: how it is asked for, what it prints, what to say then."""

    name: str
    descriptions: tuple[str, ...]
    requests: tuple[str, ...]
    answer: str
    output: Callable[[Random, Arguments], str]
    required: tuple[tuple[str, str], ...] = ()
    optional: tuple[tuple[str, str], ...] = ()

    def tool(self, rng: Random) -> Tool:
        description = rng.choice(self.descriptions) if rng.random() < 0.95 else ""
        return Tool(self.name, description, self.required, self.optional)


# --- rendering -------------------------------------------------------------------------------------


def render_system(tools: Sequence[Tool], header: str = HEADER) -> str:
    """The system block, up to and including the newline behind its end marker."""
    lines = "\n".join(tool.line() for tool in tools)
    text = f"""{header}

You have access to these tools:
<tools>
{lines}
</tools>

When you need to use a tool, respond with a SINGLE valid JSON object on its own line:
{{ "tool": "<name>", "arguments": {{ ... }} }}

After the tool runs you will receive its output between <tool_result>...</tool_result>.
Use as many tool calls as you need.

When you have the final answer, respond with a SINGLE valid JSON object:
{{ "answer": "..." }}

Do not include any other text outside the JSON object."""
    return _block("system", text)


def render_user(text: str) -> str:
    """A user turn and the opening of the assistant's."""
    return _block("user", text) + "<|im_start|>assistant\n"


def render_result(tool: str, stdout: str, stderr: str, exit_code: int) -> str:
    """A tool's result (compact JSON, keys in the agent's order) and the opening of the assistant's turn."""
    result = {"tool": tool, "stdout": stdout, "stderr": stderr, "exit_code": exit_code}
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    return _block("tool", text) + "<|im_start|>assistant\n"


def render_call(tool: str, arguments: Mapping[str, str | int]) -> str:
    """The object that calls a tool, in the dialect's one JSON style."""
    return json.dumps({"tool": tool, "arguments": dict(arguments)}, ensure_ascii=False)


def render_answer(text: str) -> str:
    """The object that ends a turn."""
    return json.dumps({"answer": text}, ensure_ascii=False)


def _block(role: str, text: str) -> str:
    if "<|" in text:
        raise ValueError(f"{role} text holds a control marker: {text!r}")
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


# --- made-up content -------------------------------------------------------------------------------

COMMON = """
apple river stone green window paper silver morning table garden winter yellow bridge cloud engine
forest hammer island jacket kitchen lemon market needle ocean pencil quiet rabbit summer tiger uncle
valley wagon zebra hello world good day please thank you the a small big red blue old new fast slow
run read write test file model train tool agent data code light dark cold warm open close first last
north south east west music dance bread water sugar salt coffee train ship plane road house door key
one two three four five six seven eight nine ten we they he she it is was can will not and or but for
"""
WORDS = tuple(COMMON.split())
ACCENTED = ("café", "naïve", "Zürich", "smörgås", "über", "niño", "Привет", "日本", "€5", "π", "→", "😀")
STEMS = (
    "main", "notes", "config", "utils", "loss", "model", "readme", "index", "setup", "report", "data", "todo",
)  # fmt: skip
SUFFIXES = (".py", ".txt", ".md", ".json", ".toml", ".csv", ".log", ".rs", ".c", "")
FOLDERS = ("src", "tests", "docs", "lib", "app", "build", "data", "scripts", "tmp", "etc")
SYLLABLES = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou")
ERRORS = ("No such file or directory", "Permission denied", "not found", "timed out", "is a directory")


def word(rng: Random) -> str:
    """A common word, an invented one, a number, a capitalised or a non-ASCII one.

    Invented words matter most: they cannot be memorised, so that copying is the only way to be right.
    """
    kind = rng.random()
    if kind < 0.40:
        return rng.choice(WORDS)
    if kind < 0.80:
        return _syllables(rng, rng.randint(1, 4)) + rng.choice(("", "n", "s", "x"))
    if kind < 0.88:
        return str(rng.randint(0, 10 ** rng.randint(1, 5)))
    if kind < 0.97:
        return rng.choice(WORDS).capitalize()
    return rng.choice(ACCENTED)


def phrase(rng: Random) -> str:
    return " ".join(word(rng) for _ in range(rng.randint(1, 5)))


def invented(rng: Random) -> str:
    return _syllables(rng, rng.randint(2, 3))


def _syllables(rng: Random, count: int) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(count))


def path(rng: Random) -> str:
    """A file path of up to two folders."""
    folders = [rng.choice(FOLDERS) if rng.random() < 0.7 else invented(rng) for _ in range(rng.randint(0, 2))]
    stem = rng.choice(STEMS) if rng.random() < 0.6 else invented(rng)
    return "/".join([*folders, stem + rng.choice(SUFFIXES)])


def folder(rng: Random) -> str:
    names = [rng.choice(FOLDERS) if rng.random() < 0.6 else invented(rng) for _ in range(rng.randint(1, 2))]
    return "/".join(names)


def value(rng: Random, name: str, kind: str) -> str | int:
    """An argument value that fits the parameter's name and type."""
    if kind == "integer":
        return rng.randint(0, 10 ** rng.randint(1, 3))
    makers: dict[str, Callable[[Random], str]] = {
        "path": path, "folder": folder, "name": invented, "pattern": invented, "city": _city,
    }  # fmt: skip
    return makers.get(name, phrase)(rng)


def _city(rng: Random) -> str:
    return rng.choice(("Paris", "Lima", "Oslo", "Cairo", "Zürich", invented(rng).capitalize()))


# --- tools -----------------------------------------------------------------------------------------


def _echo(rng: Random, arguments: Arguments) -> str:
    return str(arguments["text"])


def _upper(rng: Random, arguments: Arguments) -> str:
    return str(arguments["text"]).upper()


def _phrase(rng: Random, arguments: Arguments) -> str:
    return phrase(rng)


def _number(rng: Random, arguments: Arguments) -> str:
    return str(rng.randint(0, 10 ** rng.randint(1, 5)))


def _names(rng: Random, arguments: Arguments) -> str:
    return "\n".join(path(rng).rsplit("/", 1)[-1] for _ in range(rng.randint(1, 3)))


def _match(rng: Random, arguments: Arguments) -> str:
    return f"{path(rng)}:{rng.randint(1, 400)}: {arguments['pattern']}"


def _passed(rng: Random, arguments: Arguments) -> str:
    return rng.choice(("PASS", "1 passed", "ok", "FAIL", "1 failed"))


def _sum(rng: Random, arguments: Arguments) -> str:
    return str(int(arguments["a"]) + int(arguments["b"]))


def _date(rng: Random, arguments: Arguments) -> str:
    return f"{rng.randint(1990, 2040)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


TEXT = (("text", "string"),)
PATH = (("path", "string"),)
SKILLS = (
    Skill("echo", ("Echo input", "Echo the text back", "Return the given text"),
          ("Echo {text}", "Please echo: {text}", "Say {text}", "Repeat this: {text}", 'Echo "{text}"',
           "echo {text}", "Use the echo tool to say {text}"),
          "{stdout}", _echo, TEXT),
    Skill("read_file", ("Read a file from disk", "Read file contents from disk", "Show a file"),
          ("Read {path}", "What does {path} say?", "Show me {path}", "What is in the file {path}?"),
          "{path} says: {stdout}", _phrase, PATH),
    Skill("run_test", ("Run a single test", "Run one test by name"),
          ("Run the test {name}", "Does {name} pass?", "Run test {name} with timeout {timeout}"),
          "{name}: {stdout}", _passed, (("name", "string"),), (("timeout", "integer"),)),
    Skill("grep_repo", ("Search the repository", "Find a pattern in the repository"),
          ("Where is {pattern} used?", "Search for {pattern}", "Grep {pattern} in {path}"),
          "Found {stdout}", _match, (("pattern", "string"),), (("path", "string"),)),
    Skill("list_dir", ("List a folder", "List the files of a folder"),
          ("List {folder}", "Which files are in {folder}?", "What is in the folder {folder}?"),
          "{folder} holds {stdout}", _names, (("folder", "string"),)),
    Skill("count_lines", ("Count the lines of a file", "Number of lines in a file"),
          ("How many lines does {path} have?", "Count the lines in {path}", "Count lines of {path}"),
          "{path} has {stdout} lines.", _number, PATH),
    Skill("file_size", ("Size of a file in bytes", "Tell how big a file is"),
          ("How big is {path}?", "What is the size of {path}?", "Size of {path}"),
          "{path} has {stdout} bytes.", _number, PATH),
    Skill("word_count", ("Count words", "Count the words of a text"),
          ("Count the words in: {text}", "How many words are in {text}?"),
          "{stdout} words.", lambda rng, arguments: str(len(str(arguments["text"]).split())), TEXT),
    Skill("uppercase", ("Make text upper case", "Convert to capitals"),
          ("Make this upper case: {text}", "Shout {text}", "Uppercase {text}"), "{stdout}", _upper, TEXT),
    Skill("add", ("Add two integers", "Sum of two numbers"),
          ("What is {a} plus {b}?", "Add {a} and {b}", "{a} + {b}"),
          "The sum is {stdout}.", _sum, (("a", "integer"), ("b", "integer"))),
    Skill("today", ("Today's date", "Tell the date"),
          ("What day is it?", "What is the date?", "Tell me today's date"), "Today is {stdout}.", _date),
    Skill("find_file", ("Find a file by name", "Locate a file"),
          ("Find the file {name}", "Where is the file {name}?", "Locate {name}"),
          "It is at {stdout}", lambda rng, arguments: f"{folder(rng)}/{arguments['name']}", (("name", "string"),)),
    Skill("head_file", ("First lines of a file", "Show the top of a file"),
          ("Show the top of {path}", "First {lines} lines of {path}", "Show the first {lines} lines of {path}"),
          "{path} begins: {stdout}", _phrase, PATH, (("lines", "integer"),)),
    Skill("weather", ("Weather of a city", "Look up the weather"),
          ("How is the weather in {city}?", "Weather in {city}", "Is it warm in {city}?"),
          "In {city}: {stdout}", lambda rng, arguments: f"{rng.choice(('sunny', 'rain', 'snow', 'fog'))} {rng.randint(-9, 35)}",
          (("city", "string"),)),
)  # fmt: skip
SMALL_TALK = (
    ("Hello", "Hello! What can I do?"),
    ("Hi", "Hello! What can I do?"),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a small on-device agent."),
    ("Bye", "Goodbye!"),
)
NO_TOOL = "I have no tool for that."
BARE = (
    "Use the echo tool",
    "Use the echo tool.",
    "use echo",
    "Call the echo tool",
    "Try the echo tool",
    "Echo something",
)
BARE_TEXT = "hello"  # what to echo when the request does not say


def invented_skill(rng: Random) -> Skill:
    """A tool that nobody has seen: its names can only be copied from the system prompt and the request."""
    kinds = rng.choice((("string",), ("string",), ("integer",), ("string", "integer")))
    required = tuple((invented(rng), kind) for kind in kinds)
    name = "_".join(invented(rng) for _ in range(rng.randint(1, 2)))
    return Skill(name, (phrase(rng).capitalize(),), (), "{stdout}", _phrase, required)


# --- conversations ---------------------------------------------------------------------------------


def conversation(rng: Random) -> list[Segment]:
    """One conversation as (text, label) pieces: system block, then one to MAX_EXCHANGES exchanges."""
    skills = rng.sample(SKILLS, rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 14)))
    if rng.random() < 0.35:
        skills.append(invented_skill(rng))
    if rng.random() < 0.5 and SKILLS[0] not in skills:  # echo is what people try first
        skills.append(SKILLS[0])
    rng.shuffle(skills)
    header = HEADER if rng.random() < 0.9 else rng.choice(HEADERS)
    segments: list[Segment] = [(render_system([skill.tool(rng) for skill in skills], header), OTHER)]
    for _ in range(rng.randint(1, MAX_EXCHANGES)):
        segments += exchange(rng, skills)
    return segments


def exchange(rng: Random, skills: Sequence[Skill]) -> list[Segment]:
    """One user turn with its calls, results and answer."""
    kind = rng.random()
    if kind < 0.05:
        return _talk(*rng.choice(SMALL_TALK))
    absent = [skill for skill in SKILLS if skill not in skills]
    if kind < 0.09 and absent:
        return _talk(ask(rng, rng.choice(absent))[0], NO_TOOL)
    wanted = [rng.choice(skills) for _ in range(2 if kind > 0.92 else 1)]
    asked = [ask(rng, skill) for skill in wanted]
    segments: list[Segment] = [(render_user("\nThen ".join(request for request, _ in asked)), OTHER)]
    answers = []
    for skill, (_, arguments) in zip(wanted, asked, strict=True):
        stdout, stderr, exit_code = run(rng, skill, arguments)
        segments.append((render_call(skill.name, arguments), CALL))
        segments.append(("<|im_end|>\n" + render_result(skill.name, stdout, stderr, exit_code), OTHER))
        answers.append(report(skill, arguments, stdout, stderr))
    segments.append((render_answer(" ".join(answers)), ANSWER))
    segments.append(("<|im_end|>\n", OTHER))
    return segments


def ask(rng: Random, skill: Skill) -> tuple[str, Arguments]:
    """A request and the arguments that it asks for, in the order of the tool's line."""
    if skill.name == "echo" and rng.random() < 0.12:
        return rng.choice(BARE), {"text": BARE_TEXT}
    template = rng.choice(skill.requests) if skill.requests and rng.random() < 0.8 else _generic(rng, skill)
    parameters = [*skill.required, *(p for p in sorted(skill.optional) if f"{{{p[0]}}}" in template)]
    arguments = {name: value(rng, name, kind) for name, kind in parameters}
    return template.format(**arguments), arguments


def _generic(rng: Random, skill: Skill) -> str:
    """A request template that names the tool and its arguments."""
    pairs = ", ".join(f"{name} {{{name}}}" for name, _ in skill.required)
    if not pairs:
        return f"Use the {skill.name} tool"
    return rng.choice((f"Use the {skill.name} tool with {pairs}", f"Call {skill.name} with {pairs}"))


def run(rng: Random, skill: Skill, arguments: Arguments) -> tuple[str, str, int]:
    """A made-up (stdout, stderr, exit_code); one run in twelve fails."""
    if rng.random() < 1 / 12:
        return "", f"{skill.name}: {rng.choice(ERRORS)}\n", rng.randint(1, 2)
    return skill.output(rng, arguments) + rng.choice(("", "\n")), "", 0


def report(skill: Skill, arguments: Arguments, stdout: str, stderr: str) -> str:
    """The answer's text: what went wrong, or the tool's output in the skill's one phrasing."""
    if stderr:
        return f"It failed: {stderr.strip()}"
    return skill.answer.format(stdout=", ".join(stdout.split("\n")).removesuffix(", "), **arguments)


def _talk(text: str, answer: str) -> list[Segment]:
    return [(render_user(text), OTHER), (render_answer(answer), ANSWER), ("<|im_end|>\n", OTHER)]


def drill(rng: Random) -> list[Segment]:
    """One exchange without a system block, mostly an echo of a long text: practice in copying."""
    if rng.random() < 0.3:
        return exchange(rng, [*SKILLS, invented_skill(rng)])
    text = " ".join(word(rng) for _ in range(rng.randint(2, 12)))
    request = rng.choice(SKILLS[0].requests).format(text=text)
    return [
        (render_user(request), OTHER),
        (render_call("echo", {"text": text}), CALL),
        ("<|im_end|>\n" + render_result("echo", text, "", 0), OTHER),
        (render_answer(text), ANSWER),
        ("<|im_end|>\n", OTHER),
    ]


def window(
    rng: Random, length: int, source: Callable[[Random], list[Segment]] = conversation
) -> tuple[bytes, bytes]:
    """(ids, labels), `length` bytes each: whole pieces of `source` back to back, the last one cut off."""
    ids, labels = bytearray(), bytearray()
    while len(ids) < length:
        for text, label in source(rng):
            data = text.encode()
            ids += data
            labels += bytes([label]) * len(data)
    return bytes(ids[:length]), bytes(labels[:length])
