"""`halfstep data`: check a user's data before a run, index shards, make tokens of text, download public data sets."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import Json, print_json, show_result
from halfstep.errors import DATA, BadData, WrongUse, build_unknown_name_error
from halfstep.numbers import format_counted_noun
from halfstep.page import Column, Page, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line
from halfstep.store.address import has_scheme
from halfstep.terminal import create_console, display_progress, print_plain_text

if TYPE_CHECKING:
    from halfstep.data.check.page import DataReport
    from halfstep.data.shard_index import ShardIndex, ShardSet

GROUP = "Run"
RECIPE_SUFFIXES = (".yaml", ".yml")
ACTIONS = ("list", "check", "get", "index", "tokens", "base")
_EXAMPLES = {
    "check": ("FOLDER", "photos"),
    "get": ("NAME", "cifar10"),
    "index": ("SRC", "shards"),
    "base": ("FILE.gguf --out FOLDER", "model.gguf --out base"),
    "tokens": ("FILES --tokenizer FILE --out FOLDER", "*.txt --tokenizer train:4096 --out tokens"),
}


def run(
    action: Annotated[
        str, typer.Argument(help="list, check, get, index, tokens or base.", metavar="[ACTION]")
    ] = "list",
    what: Annotated[
        str | None,
        typer.Argument(
            help="check: a folder. get: the name of a data set. index: a folder of shards, one, or an address. "
            "tokens: files or folders. base: a file."
        ),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="tokens: more files or folders.", metavar="[FILE]...")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="check: segmentation or classification, if the folder does not show it.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="check: the folder of masks, if it is not next to the images.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="check: the number of classes, if the values of the masks do not show it.", min=2)
    ] = None,
    ignore_index: Annotated[
        int | None,
        typer.Option(
            "--ignore_index", "--ignore-index", help="check: the value of pixels without a class.", min=0, max=255
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="tokens: a tokenizer.json, or train:4096 to train one of this size.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="tokens and base: the output folder.", metavar="FOLDER")] = None,
    val: Annotated[float, typer.Option(help="tokens: the share of held-out documents.", min=0.0001, max=0.9)] = 0.05,
    end: Annotated[
        str | None, typer.Option(help="tokens: the end token, if the tokenizer does not name it.", metavar="TOKEN")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="tokens: text between two documents of one file.", metavar="TEXT")
    ] = None,
    json: Json = False,
) -> None:
    """Check your data folder before training on it, tokenize text, or download a data set.

    check FOLDER reads every file and reports on one page the mistakes, how masks are read and how the classes are
    balanced; exit code 65 if a run would fail or its figures would be wrong. get NAME downloads a set; list shows the
    sets. index SRC writes the index of WebDataset shards next to them, so that no run has to read them for it;
    interrupted, it continues where it was. SRC may be s3://BUCKET/PREFIX; the requests that it takes are printed first.
    tokens FILES --tokenizer train:4096 --out FOLDER makes shards of tokens for a language model; a document is a file,
    or a line of a .jsonl file, and whole documents are held out. base FILE.gguf --out FOLDER converts a GGUF file to a
    folder that transformers reads.
    """
    if action not in ACTIONS:
        raise build_unknown_name_error("action", action, ACTIONS)
    if action == "list":
        _list_data_sets(json)
    elif what is None:
        kind, example = _EXAMPLES[action]
        raise WrongUse(
            f"{action} what?", allowed=f"halfstep data {action} {kind}", do=f"halfstep data {action} {example}"
        )
    elif action == "tokens":
        _tokenize_files([what, *(more or ())], tokenizer, out, val, end, separator, json)
    elif action == "base":
        _convert_gguf_base(Path(what), out, json)
    elif action == "check":
        _check_data_folder(what, task, masks, classes, ignore_index, json)
    elif action == "index":
        _index_shards(what, json)
    else:
        _download_data_set(what, json)


def _tokenize_files(
    places: list[str],
    tokenizer: str | None,
    out: Path | None,
    val: float,
    end: str | None,
    separator: str | None,
    json: bool,
) -> None:
    from halfstep.data.tokenizing import write_tokens

    if tokenizer is None or out is None:
        lacks = "--tokenizer" if tokenizer is None else "--out"
        raise WrongUse(
            f"tokens without {lacks}",
            allowed="halfstep data tokens FILES --tokenizer FILE|train:4096 --out FOLDER",
            do="add --tokenizer train:4096" if tokenizer is None else "add --out FOLDER",
        )
    with display_progress("tokenizing", "documents") as on_progress:
        report = write_tokens(places, tokenizer, out, val=val, end=end, separator=separator, on_progress=on_progress)
    is_base = (Path(tokenizer).expanduser() / "config.json").is_file()
    recipe = ["text_lora", "--base", tokenizer] if is_base else ["text_small"]
    following = shlex.join(["halfstep", "train", *recipe, "--data_dir", str(out)])
    more = Paragraph(f"next: {escape_to_one_line(following)}", wrap=False)
    show_result({**report.as_dict(), "next": following}, report.page().followed_by(more), json)


def _convert_gguf_base(file: Path, out: Path | None, json: bool) -> None:
    from halfstep.data.gguf_base import convert_gguf

    if out is None:
        raise WrongUse("base without --out", allowed="halfstep data base FILE.gguf --out FOLDER", do="add --out FOLDER")
    report = convert_gguf(file, out)
    show_result(report, report.page(), json)


def _check_token_folder(folder: Path, json: bool) -> None:
    from halfstep.data.check.tokens import check_tokens

    with display_progress("reading", "tokens") as on_progress:
        report = check_tokens(folder, on_progress)
    show_result(report, report.page(), json)
    if not report.ok:
        raise typer.Exit(DATA)


def _check_data_folder(
    folder: str, task: str | None, masks: Path | None, classes: int | None, ignore_index: int | None, json: bool
) -> None:
    from halfstep.data.check.report import check_dataset
    from halfstep.data.layout import find_layout, is_store_address, resolve_data_path
    from halfstep.data.token_files import has_tokens

    if is_store_address(folder):
        raise _build_address_error(folder)
    if has_tokens(resolve_data_path(folder)):
        _check_token_folder(resolve_data_path(folder), json)
        return
    if _is_recipe(folder):
        raise WrongUse(
            f"{folder} is a recipe, not a folder of data",
            allowed="a folder of images, or of tokens that halfstep data tokens wrote",
            do=f"halfstep recipes explain {shlex.quote(folder)}; then: halfstep data check FOLDER, its data.path",
        )
    layout = find_layout(resolve_data_path(folder), task, masks, for_check=True)
    with display_progress("reading", "files") as on_progress:
        report = check_dataset(layout, on_progress, classes, ignore_index)
    words = ["halfstep", "train", report.recipe, "--data_dir", folder, *(["--masks", str(masks)] if masks else [])]
    if classes is not None or ignore_index is not None:
        words += _list_mask_options(report)
    following = shlex.join(words)
    more = (Paragraph(f"next: {escape_to_one_line(following)}", wrap=False),) if report.ok else ()
    show_result({**report.as_dict(), "next": following}, report.page().followed_by(*more), json)
    if not report.ok:
        raise typer.Exit(DATA)


def _build_address_error(address: str) -> WrongUse:
    from halfstep.store.address import parse_address

    parsed = parse_address(address, "FOLDER", do="download the data, and give its folder: halfstep data check FOLDER")
    return WrongUse(
        f"{parsed} is an address, and data check reads folders",
        allowed="a folder on this machine; .tar shards in a store are read by data index",
        do=shlex.join(["halfstep", "data", "index", str(parsed)]),
    )


def _is_recipe(word: str) -> bool:
    from halfstep.recipe.sources import list_recipe_names

    place = Path(word)
    return not place.is_dir() and (word in list_recipe_names() or (place.is_file() and word.endswith(RECIPE_SUFFIXES)))


def _list_mask_options(report: DataReport) -> list[str]:
    """Return the meaning of the masks as options of a run, which infers nothing if one of them is given."""
    settings = report.masks or {}
    if settings.get("palette") is not None:
        return []
    names = [name for name in ("classes", "ignore_index") if settings.get(name) is not None]
    return [word for name in names for word in (f"--{name}", str(settings[name]))]


def _index_shards(source: str, json: bool) -> None:
    from halfstep.data.layout import resolve_data_path
    from halfstep.data.shard_index import resolve_index_path, write_index
    from halfstep.data.shards import build_shard_set, resolve_training_folder

    if has_scheme(source):
        _index_store_shards(source, json)
        return
    root = resolve_training_folder(resolve_data_path(source))
    shards = build_shard_set(root)
    path = resolve_index_path(root, shards)
    try:
        with display_progress("indexing", "MB") as on_progress:
            index = write_index(root, shards, on_progress)
    except OSError as error:
        raise BadData(
            f"the index {path} cannot be written: {error.strerror or error}",
            allowed="a folder of shards that this user can write to",
            do="ask its owner to index it; until then, each machine keeps an index in its cache",
        ) from error
    _warn_of_unread(shards, str(shards.root))
    _show_index(path, index, path.stat().st_size, json)


def _warn_of_unread(shards: ShardSet, where: str) -> None:
    from halfstep.data.shard_scan import describe_unread_files

    if text := describe_unread_files(shards.unread, where):
        create_console(stderr=True).print(text, soft_wrap=True)


def _index_store_shards(source: str, json: bool) -> None:
    from halfstep.data.shard_index import open_index, scan_and_write_index
    from halfstep.data.store_set import find_shards
    from halfstep.store.address import check_obstore_installed, parse_address
    from halfstep.store.objects import PATIENCE

    address = parse_address(source, "SRC", do="halfstep data index s3://BUCKET/PREFIX")
    check_obstore_installed()
    shards = find_shards(address, PATIENCE)
    reads, size = shards.requests, sum(one.size for one in shards.objects)
    cost = (
        f"{format_counted_noun(len(shards.names), 'shard')} in {shards.store.address}: {reads:,} range reads of "
        f"{size:,} bytes"
    )
    _warn_of_unread(shards, str(shards.store.address))
    create_console(stderr=True).print(f"{cost}, and a write; interrupted, the same command continues", soft_wrap=True)
    with shards.store.probing():  # before everything is read for nothing
        pass
    with tempfile.TemporaryDirectory() as folder, display_progress("indexing", "MB") as on_progress:
        draft = Path(folder) / shards.index_name
        scan_and_write_index(shards, draft, on_progress)
        with draft.open("rb") as file:
            shards.store.put(shards.index_name, file)
        _show_index(f"{shards.store.address}/{shards.index_name}", open_index(draft), draft.stat().st_size, json)


def _show_index(path: str | Path, index: ShardIndex, size: int, json: bool) -> None:
    if json:
        facts = {"samples": len(index), "shards": len(index.names), "bytes": size, "seal": index.seal}
        print_json({"index": path, **facts})
    else:
        counts = (
            f"{len(index):,} samples in {format_counted_noun(len(index.names), 'shard')}, {size / len(index):.2f} "
            "bytes per sample"
        )
        print_plain_text(f"{path}: {counts}, seal {index.seal[:16]}")


def _list_data_sets(json: bool) -> None:
    from halfstep.data.sets.getting import import_known_sets, is_set_cached

    here = {name: is_set_cached(name) for name in import_known_sets()}
    sets = [{"name": name, "about": one.ABOUT, "here": here[name]} for name, one in import_known_sets().items()]
    rows = tuple(
        (Span(name, strong=True), "here" if here[name] else "", one.ABOUT) for name, one in import_known_sets().items()
    )
    more = Paragraph("halfstep data get NAME downloads one; halfstep data check FOLDER checks your own.", gap=True)
    table = Table((Column(), Column(), Column()), rows, indent=0)
    show_result({"sets": sets}, Page("public data sets", (table, more)), json)


def _download_data_set(name: str, json: bool) -> None:
    from halfstep.data.sets.getting import fetch_dataset

    folder, counts = fetch_dataset(name)
    if json:
        print_json({"name": name, "folder": folder, "samples": counts})
    else:
        print_plain_text(f"{name} ok: {', '.join(f'{n} {split}' for split, n in counts.items())} in {folder}")
