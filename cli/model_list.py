"""`posttrainllm models`: what there is to run, how large, how precise; `models rm` for what the cache holds."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from ..runtime.errors import InputError, PosttrainError, UsageError
from .bundled import BUNDLED, bundled_model
from .options import option, parse, positionals
from .terminal import printable

if TYPE_CHECKING:
    from ..runtime.bundle import Manifest

REMOVE = "rm"
COLUMNS = ("name", "where", "architecture", "precision", "size", "context", "source")


@dataclass(frozen=True)
class ModelsOptions:
    """Flags of `models`."""

    model: tuple[str, ...] = positionals(
        "model", f"also list these folders; after the word {REMOVE}: names of cached models to delete"
    )
    json: bool = option(False, "print one JSON object")


@dataclass(frozen=True)
class Row:
    """One model. `name` is what a command takes as MODEL, or the entry of the cache; `problem` is why it
    cannot be opened, and then the rest is unknown."""

    name: str
    where: str
    path: str
    nbytes: int
    architecture: str = ""
    precision: str = ""
    context_length: Optional[int] = None
    source: str = ""
    problem: Optional[str] = None


def run(argv: list[str]) -> int:
    """Returns 0. Raises InputError (3) when all is printed, if a given folder is no model."""
    options = parse(
        ModelsOptions,
        argv,
        command="models",
        summary="List the models that come with the package, the exported ones in the cache, and given folders.",
        example="  posttrainllm models my-bundle other/onnx/model_q4.onnx\n"
        f"  posttrainllm models {REMOVE} 3f1c0b…  # the whole name, as the list shows it",
    )
    words = tuple(options.model)
    if words[:1] == (REMOVE,):
        return _remove(words[1:])
    rows = [*_bundled(), *_cached(), *(_row(name, "given", Path(name)) for name in words)]
    if options.json:
        print(json.dumps({"v": 1, "models": [asdict(row) for row in rows]}, indent=2))
    else:
        print(printable("\n".join(_table(rows)), sys.stdout))
    for row in rows:
        if row.where == "given" and row.problem:
            raise InputError(row.name, "not a model that can be run", remedy="the list says why")
    return 0


def _bundled() -> Iterator[Row]:
    for name in BUNDLED:
        yield _row(name, "bundled", bundled_model(name))


def _cached() -> Iterator[Row]:
    from ..export.cache import cached_bundles

    for folder in cached_bundles():
        yield _row(folder.name, "cached", folder)


def _row(name: str, where: str, path: Path) -> Row:
    from ..runtime.foreign import open_model_folder

    try:
        manifest = open_model_folder(path).manifest
    except PosttrainError as error:
        return Row(name, where, str(path), _disk_usage(path), problem=str(error))
    return Row(
        name,
        where,
        str(path),
        _nbytes(manifest),
        manifest.architecture,
        manifest.precision,
        manifest.context_length,
        manifest.source.name,
    )


def _nbytes(manifest: "Manifest") -> int:
    return sum(info.nbytes for info in manifest.files.values())


def _disk_usage(path: Path) -> int:
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def _table(rows: Sequence[Row]) -> Iterator[str]:
    table = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line, row in zip(table, [None, *rows], strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        yield text if row is None or row.problem is None else f"{text}  {row.problem}"


def _cells(row: Row) -> tuple[str, ...]:
    context = "" if row.context_length is None else f"{row.context_length:,}"
    size = f"{row.nbytes / 1e6:,.1f} MB"
    return (row.name, row.where, row.architecture, row.precision, size, context, row.source)


def _remove(names: Sequence[str]) -> int:
    """Delete entries of the cache, all or none: every name is looked up before the first one goes."""
    from ..export.cache import cache_folder, cached_bundles, remove_cached

    entries = {entry.name: entry for entry in cached_bundles()}
    if not names:
        raise UsageError(
            f"models {REMOVE}", "no name", "the name of a cached model", "see posttrainllm models"
        )
    for name in names:
        if name not in entries:
            raise UsageError(
                f"models {REMOVE} {name}",
                f"not in the cache ({cache_folder()})",
                "the whole name of a cached model",
                "other folders are yours to delete",
            )
    for name in dict.fromkeys(names):
        nbytes = _disk_usage(entries[name])
        remove_cached(entries[name])
        print(f"removed {name} ({nbytes / 1e6:,.1f} MB)")
    return 0
