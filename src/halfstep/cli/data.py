"""`halfstep data`: check a user's data before a run, index shards, and download public data sets."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import Json, print_json, show_result
from halfstep.errors import DATA, BadData, WrongUse, unknown_name
from halfstep.numbers import several
from halfstep.page import Column, Page, Paragraph, Span, Table
from halfstep.printable import in_line
from halfstep.terminal import progress, say

GROUP = "Run"
ACTIONS = ("list", "check", "get", "index")
_EXAMPLES = {"check": ("FOLDER", "photos"), "get": ("NAME", "cifar10"), "index": ("SRC", "shards")}


def run(
    action: Annotated[str, typer.Argument(help="list, check, get or index.", metavar="[ACTION]")] = "list",
    what: Annotated[
        str | None,
        typer.Argument(help="check: a folder. get: the name of a data set. index: a folder of shards, or one."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="check: segmentation or classification, where the folder does not tell.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="check: the folder of masks, if it is not next to the images.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="check: how many classes masks have, where their values do not tell.", min=2)
    ] = None,
    json: Json = False,
) -> None:
    """Check your data folder before training on it, or get a real data set.

    check FOLDER reads every file and reports on one page the mistakes, how masks are read and how the classes are
    balanced; exit code 65 if a run would fail or its figures would be wrong. get NAME downloads a set; list shows the
    sets. index SRC writes the index of WebDataset shards next to them, so that no run has to read them for it;
    interrupted, it continues where it was.
    """
    if action not in ACTIONS:
        raise unknown_name("action", action, ACTIONS)
    if action == "list":
        _list(json)
    elif what is None:
        kind, example = _EXAMPLES[action]
        raise WrongUse(
            f"{action} what?", allowed=f"halfstep data {action} {kind}", do=f"halfstep data {action} {example}"
        )
    elif action == "check":
        _check(what, task, masks, classes, json)
    elif action == "index":
        _index(what, json)
    else:
        _get(what, json)


def _check(folder: str, task: str | None, masks: Path | None, classes: int | None, json: bool) -> None:
    from halfstep.data.check.report import check
    from halfstep.data.layout import data_place, find_layout

    layout = find_layout(data_place(folder), task, masks)
    with progress("reading", "files") as on_progress:
        report = check(layout, on_progress, classes)
    words = ["halfstep", "train", report.recipe, "--data_dir", folder, *(["--masks", str(masks)] if masks else [])]
    following = shlex.join(words)
    more = (Paragraph(f"next: {in_line(following)}", wrap=False),) if report.ok else ()
    show_result({**report.as_dict(), "next": following}, report.page().followed_by(*more), json)
    if not report.ok:
        raise typer.Exit(DATA)


def _index(source: str, json: bool) -> None:
    from halfstep.data.layout import data_place
    from halfstep.data.shard_index import beside, write_index
    from halfstep.data.shards import shards_at

    root = data_place(source)
    shards = shards_at(root)
    path = beside(root, shards)
    try:
        with progress("indexing", "MB") as on_progress:
            index = write_index(root, shards, on_progress)
    except OSError as error:
        raise BadData(
            f"the index {path} cannot be written: {error.strerror or error}",
            allowed="a folder of shards that this user can write to",
            do="ask its owner to index it; until then, each machine keeps an index in its cache",
        ) from error
    size = path.stat().st_size
    if json:
        facts = {"samples": len(index), "shards": len(index.names), "bytes": size, "seal": index.seal}
        print_json({"index": path, **facts})
    else:
        counts = (
            f"{len(index):,} samples in {several(len(index.names), 'shard')}, {size / len(index):.2f} bytes per sample"
        )
        say(f"{path}: {counts}, seal {index.seal[:16]}")


def _list(json: bool) -> None:
    from halfstep.data.sets.getting import is_here, known_sets

    here = {name: is_here(name) for name in known_sets()}
    sets = [{"name": name, "about": one.ABOUT, "here": here[name]} for name, one in known_sets().items()]
    rows = tuple(
        (Span(name, strong=True), "here" if here[name] else "", one.ABOUT) for name, one in known_sets().items()
    )
    more = Paragraph("halfstep data get NAME gets one; halfstep data check FOLDER looks over your own.", gap=True)
    table = Table((Column(), Column(), Column()), rows, indent=0)
    show_result({"sets": sets}, Page("public data sets", (table, more)), json)


def _get(name: str, json: bool) -> None:
    from halfstep.data.sets.getting import get

    folder, counts = get(name)
    if json:
        print_json({"name": name, "folder": folder, "samples": counts})
    else:
        say(f"{name} ok: {', '.join(f'{n} {split}' for split, n in counts.items())} in {folder}")
