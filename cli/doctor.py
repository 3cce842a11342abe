"""`posttrainllm doctor`: what this project promises, tried out on this machine."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..runtime.errors import CheckFailedError
from .bundled import DEMO, bundled_model
from .options import option, parse
from .terminal import printable

if TYPE_CHECKING:
    from ..runtime.doctor import Check

MARKS = {"ok": "ok", "absent": "-", "failed": "FAILED"}


@dataclass(frozen=True)
class DoctorOptions:
    """Flags of `doctor`."""

    json: bool = option(False, "print one JSON object")


def run(argv: list[str]) -> int:
    """Returns 0. Raises CheckFailedError (1), when all is printed, if something promised does not hold."""
    options = parse(
        DoctorOptions,
        argv,
        command="doctor",
        summary="Try out here what is promised: engine, tools, sandbox. A few processes are started and killed.",
        example="  posttrainllm doctor --json",
    )
    found: list[Check] = []
    for check in _checks():
        found.append(check)
        if not options.json:
            line = f"{MARKS[check.state]:<7} {check.name:<18} {check.detail}"
            print(printable(line, sys.stdout), flush=True)
    if options.json:
        print(json.dumps({"v": 1, "checks": [asdict(check) for check in found]}, indent=2))
    failed = [check.name for check in found if check.state == "failed"]
    if failed:
        raise CheckFailedError("doctor", f"does not hold: {', '.join(failed)}")
    return 0


def _checks() -> "Iterator[Check]":
    from .. import __version__
    from ..agent.doctor import tool_checks
    from ..export.cache import cache_folder
    from ..runtime.doctor import check_folder, engine_checks

    yield from engine_checks(bundled_model(DEMO), __version__)
    yield check_folder("cache folder", cache_folder())
    yield from tool_checks()
