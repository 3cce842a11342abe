"""What a person at a terminal sees while something takes long. Nothing at all where nobody looks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on stderr, as the callback `(stage, done, total)`; None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the checkpoint", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr for the length of the block, on a terminal; what it gives changes the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update
