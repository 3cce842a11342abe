"""Outcomes as JUnit XML, for CI servers. Well-formed whatever a model, a tool or a task said."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from ..agent.evaluation import Outcome


def junit_xml(outcomes: "Sequence[Outcome]", *, name: str) -> bytes:
    """One test suite `name`, one test case a task; what went wrong is the failure's text."""
    from ..agent.evaluation import group

    counts = {
        "tests": str(len(outcomes)),
        "failures": str(sum(not outcome.right for outcome in outcomes)),
        "errors": "0",
        "time": f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": xml_text(name), "skipped": "0", **counts})
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=xml_text(group(outcome.task)),
            name=xml_text(outcome.task.id),
            time=f"{outcome.seconds:.3f}",
        )
        if not outcome.right:
            failure = ElementTree.SubElement(case, "failure", message=xml_text(outcome.problems[0]))
            failure.text = xml_text("\n".join([f"prompt: {outcome.task.prompt}", *outcome.problems]))
    ElementTree.indent(root)
    xml: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return xml + b"\n"


def xml_text(text: str) -> str:
    """`text` with what XML 1.0 cannot hold (most control characters, half surrogate pairs) spelled out."""
    return "".join(c if _is_xml(ord(c)) else f"\\u{ord(c):04x}" for c in text)


def _is_xml(code: int) -> bool:
    return (
        code in (0x9, 0xA, 0xD)
        or 0x20 <= code <= 0xD7FF
        or 0xE000 <= code <= 0xFFFD
        or 0x10000 <= code <= 0x10FFFF
    )
