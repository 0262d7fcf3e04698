"""Find a recipe by its name, for recipes that ship with halfstep, or by its path. Imports no torch."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import BadRecipe, Unsafe
from halfstep.recipe.strict_yaml import LARGEST_FILE, build_file_size_error, decode_utf8, parse_yaml

_ENDINGS = (".yaml", ".yml")


class RawRecipe(NamedTuple):
    """A recipe as it is written, before validation against a task."""

    label: str
    """The file's name without its suffix; it names the run's folder."""
    raw: dict[str, object]
    text: str


def list_recipe_names() -> list[str]:
    """Return the names of the recipes that ship with halfstep."""
    return sorted(
        file.name.removesuffix(".yaml") for file in _find_packaged_recipes().iterdir() if file.name.endswith(".yaml")
    )


def read_recipe(name_or_path: str) -> RawRecipe:
    """Read a recipe by name or path; raise BadRecipe if there is none or it is not valid YAML."""
    label, text = read_recipe_text(name_or_path)
    return RawRecipe(
        label, parse_yaml(text, name_or_path if is_recipe_path(name_or_path) else f"recipe {name_or_path}"), text
    )


def build_raw_recipe(content: Mapping[str, object]) -> RawRecipe:
    """Return a recipe that was written in Python, nested or with dotted keys; its task names the run's folder."""
    nested: dict[str, Any] = {}
    # Whole sections first: a dotted key changes one of their settings.
    for key in sorted(content, key=lambda key: str(key).count(".")):
        *sections, name = str(key).split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise BadRecipe(
                    f"{key} next to {section}={place!r}",
                    allowed="a section as a mapping, or its settings with dotted keys",
                    do=f"delete {section} or {key}",
                )
        place[name] = _to_plain(content[key])
    return RawRecipe(str(nested.get("task", "run")), nested, "")


def _to_plain(value: Any) -> Any:
    """Return the value with mappings copied, and paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


def read_recipe_text(name_or_path: str) -> tuple[str, str]:
    """Return the label and the text of a recipe without parsing it."""
    if is_recipe_path(name_or_path):
        path = Path(name_or_path)
        return _choose_label(path), decode_utf8(read_recipe_bytes(path), name_or_path)
    if name_or_path not in list_recipe_names():
        from halfstep.nearest_word import find_nearest_word

        names = list_recipe_names()
        near = find_nearest_word(name_or_path, names)
        hint = f"did you mean {near}?" if near else "give a name from the list, or a path that ends in .yaml"
        raise BadRecipe(f"there is no recipe {name_or_path[:80]!r}", allowed=", ".join(names), do=hint)
    return name_or_path, (_find_packaged_recipes() / f"{name_or_path}.yaml").read_text(encoding="utf-8")


def is_recipe_path(name_or_path: str) -> bool:
    """Return whether the argument is a path, not the name of a recipe."""
    return "/" in name_or_path or "\\" in name_or_path or name_or_path.endswith(_ENDINGS)


def _find_packaged_recipes() -> Any:
    return resources.files("halfstep") / "recipes"


def _choose_label(path: Path) -> str:
    # The label becomes the name of a folder below `runs/`.
    label, folder = path.stem, path.resolve().parent.name
    # A run's own recipe.yaml is named after its folder; otherwise all runs repeated from one would share a name. A
    # folder whose name is not in the locale's encoding has been trained in, and can be opened again.
    if label == "recipe" and folder and folder.isprintable():
        label = folder
    if label in ("", ".", "..") or not label.isprintable():
        raise Unsafe(f"{path} has no name for a folder", allowed="a file such as my_run.yaml", do="rename the file")
    return label


def read_recipe_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most the size of a recipe; raise BadRecipe for anything else."""
    # A pipe or a device would never end. One byte more than allowed is read, so that a file that has grown since is
    # refused by the parser.
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            kind = "a folder" if stat.S_ISDIR(facts.st_mode) else "no regular file"
            raise BadRecipe(f"{path} is {kind}", allowed="a .yaml file", do="give the path of the recipe itself")
        if facts.st_size > LARGEST_FILE:
            raise build_file_size_error(str(path), facts.st_size)
        with path.open("rb") as file:
            return file.read(LARGEST_FILE + 1)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise BadRecipe(
            f"{path}: {reason}", allowed="a .yaml file that can be read", do=f"look for it with ls {path.parent}"
        ) from None
