"""`posttrainllm sample`: plain streamed text, no tools, no turns."""

import sys
from dataclasses import dataclass, field

from .bundled import NAMES
from .flags import SamplingOptions
from .options import option, parse, positional
from .terminal import printable
from .tool_flags import at_least


@dataclass(frozen=True, kw_only=True)
class SampleOptions(SamplingOptions):
    """Flags of `sample`."""

    model: str = positional("model", f"a model folder, a .tinygpt file, or {NAMES}")
    prompt: str = field(metadata={"help": "the text to go on from", "metavar": "TEXT"})
    tokens: int = option(128, "ids to sample at most", metavar="N")


def run(argv: list[str]) -> int:
    """Generate and print as it comes."""
    options = parse(
        SampleOptions,
        argv,
        command="sample",
        summary="Generate plain text from a prompt.",
        example="  posttrainllm sample demo --prompt 'Once upon a time' --tokens 60 --temperature 0.8 --seed 1",
    )
    at_least("--tokens", options.tokens, 1)
    sampler = options.sampler()
    from ..runtime.errors import UsageError
    from ..runtime.generation import generate
    from .models import open_model

    session = open_model(options.model, options.provider)
    prompt = session.tokenizer.encode(options.prompt)
    if not prompt:
        raise UsageError("--prompt", "empty", "some text")
    if len(prompt) >= session.context_length:
        raise UsageError(
            "--prompt", f"{len(prompt)} ids", f"fewer than the context length of {session.context_length}"
        )
    reason = None
    steps = generate(
        session,
        prompt,
        cache=session.new_cache(max_length=len(prompt) + options.tokens),
        sampler=sampler,
        max_tokens=options.tokens,
        stop=session.manifest.end_of_turn_ids,
        stop_ids=session.manifest.stop_ids,
    )
    for step in steps:
        sys.stdout.write(printable(step.text, sys.stdout))
        sys.stdout.flush()
        reason = step.finish_reason
    print()
    if reason == "context":
        print(f"sample: stopped: the context of {session.context_length} ids is full", file=sys.stderr)
    return 0
