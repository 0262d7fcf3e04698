"""Hooks of MkDocs for this site: pages for files outside docs/, graphs without a script, and tables on a phone.

Links such as `../examples/own_loop.py` are right where the repository is hosted. In the built site their targets are
pages below `repository/`: Markdown unchanged, other text as a listing. `mkdocs.yml` names this file as a hook.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "repository/"
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#:]+)(?P<rest>(?:#[^)\s]*)?\))")
GRAPH = re.compile(r"^```mermaid\ngraph TD\n(?P<edges>.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = r'(?![^>]*\srel="(?:canonical|prev|next)")'
"""Links to pages of the site itself, which a browser does not fetch; a server gives them its address."""
FETCHED = re.compile(rf'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]*)|<link{NAMED}[^>]*\shref="(https?:[^"]*)')
CODE = re.compile(r"(?<!<pre>)(?<!<span></span>)<code>([^<]*)</code>")
CODE_WORD = re.compile(r"(?<!\S)(?=\S{1,32}(?!\S))\S+")
UNBROKEN = r'<span class="word">\g<0></span>'
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROWS = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])\b[^>]*>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SENTENCE = 40
"""Characters; a table with a longer cell is shown as a list on a phone."""
PICTURES = {".png", ".svg", ".jpg"}
WIDTH, HEIGHT, ROW, MARGIN = 116, 34, 78, 24


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside docs/ that a page links to, and for those that these link to."""
    seen: set[str] = set()
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while waiting:
        source = waiting.pop()
        for target in _targets(source):
            if target.startswith("docs/") or target in seen:
                continue
            seen.add(target)
            files.append(_page(target, config))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at the pages of the site, and draw graphs."""
    own = page.file.src_uri
    source = own.removeprefix(ELSEWHERE) if own.startswith(ELSEWHERE) else f"docs/{own}"
    if (ROOT / source).suffix != ".md" or not (ROOT / source).exists():
        return markdown  # a listing

    def pointed(link: re.Match[str]) -> str:
        target = _in_site(_resolved(source, link["target"]))
        return f"{link['before']}{posixpath.relpath(target, posixpath.dirname(own) or '.')}{link['rest']}"

    return GRAPH.sub(
        lambda found: graph(found["edges"]), _outside_fences(markdown, lambda text: LINK.sub(pointed, text))
    )


def on_config(config: Any) -> Any:
    """Link to the repository where its address is known, which is on GitHub's runners."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        # Not `repo_url`: the theme's script would ask GitHub for the number of stars.
        config.extra["social"] = [
            {"icon": "fontawesome/brands/github", "link": f"{server}/{name}", "name": "Repository"}
        ]
    return config


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Keep words of code on one line, and let tables with sentences be read without scrolling on a phone."""
    words = CODE.sub(lambda found: f"<code>{CODE_WORD.sub(UNBROKEN, found[1])}</code>", content)
    return TABLE.sub(lambda found: stacked(found[0]), words)


def stacked(table: str) -> str:
    """Return a table whose cells know their column, so that a phone can show a row as a list; figures stay a table."""
    rows = [[cell for _, cell in CELL.findall(row)] for row in ROWS.findall(table)]
    if not rows or max(len(TAG.sub("", cell)) for row in rows for cell in row) <= SENTENCE:
        return table
    columns = [html.escape(TAG.sub("", name).strip()) for name in rows[0]]

    def labelled(row: re.Match[str]) -> str:
        names = iter(columns)
        return re.sub(r"<td\b", lambda _: f'<td data-column="{next(names, "")}"', row[0])

    return ROWS.sub(labelled, table).replace("<table>", '<table data-stacked="">', 1)


def on_post_build(config: Any) -> None:
    """Refuse a site that would fetch something from a network."""
    for path in Path(config.site_dir).rglob("*.html"):
        fetched = FETCHED.findall(path.read_text(encoding="utf-8"))
        if fetched:
            raise PluginError(f"{path.name} would fetch {fetched[0]}")


def graph(edges: str) -> str:
    """Return `a --> b` lines as an inline SVG: every name stands above those that it points to."""
    pairs = re.findall(r"(\w+) --> (\w+)", edges)
    rows, ways = _rows(pairs)
    widest = max(sum(map(_width, row)) for row in rows)
    middles: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        below = {
            name: [middles[way[at + 1]][0] for way in ways for at in range(len(way) - 1) if way[at] == name]
            for name in row
        }
        row.sort(key=lambda name: sum(below[name]) / max(1, len(below[name])))
        left = (widest - sum(map(_width, row))) / 2
        for name in row:
            middles[name] = (left + _width(name) / 2, (len(rows) - 1 - level) * ROW + ROW / 2)
            left += _width(name)
    names = dict.fromkeys(name for pair in pairs for name in pair)
    label = "Arrows: " + ", ".join(f"{above} to {below}" for above, below in pairs)
    return (
        f'<svg class="layers" viewBox="0 0 {widest} {len(rows) * ROW}" role="img" aria-label="{label}"><defs>'
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" class="head"/></marker></defs>'
        f"{''.join(_arrow([middles[name] for name in way]) for way in ways)}"
        f"{''.join(_box(name, *middles[name]) for name in names)}</svg>\n"
    )


def _rows(pairs: list[tuple[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the names of each row, lowest first, and every arrow as the names that it passes, highest first.

    An arrow over several rows has its own place in those between, so that it runs behind no box.
    """
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for above, below in pairs:
            depth[above] = max(depth[above], depth[below] + 1)
    rows = [[name for name in names if depth[name] == level] for level in range(max(depth.values()) + 1)]
    ways = []
    for above, below in pairs:
        between = {level: f"{above} {below} {level}" for level in range(depth[above] - 1, depth[below], -1)}
        for level, name in between.items():
            rows[level].append(name)
        ways.append([above, *between.values(), below])
    return rows, ways


def _width(name: str) -> int:
    return 40 if " " in name else WIDTH + MARGIN


def _box(name: str, x: float, y: float) -> str:
    corner = f'x="{x - WIDTH / 2}" y="{y - HEIGHT / 2}"'
    return (
        f'<rect {corner} width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>'
    )


def _arrow(way: list[tuple[float, float]]) -> str:
    x, y = way[0]
    drawn = f"M{x} {y + HEIGHT / 2}"
    for index, (to_x, to_y) in enumerate(way[1:], start=1):
        from_y = y + HEIGHT / 2
        end = to_y - HEIGHT / 2 - (1 if index == len(way) - 1 else 0)
        middle = (from_y + end) / 2
        drawn += f"C{x} {middle} {to_x} {middle} {to_x} {end}"
        if index < len(way) - 1:
            drawn += f"L{to_x} {to_y + HEIGHT / 2}"
        x, y = to_x, to_y
    return f'<path marker-end="url(#head)" d="{drawn}"/>'


def _targets(source: str) -> Iterator[str]:
    found: list[str] = []
    _outside_fences((ROOT / source).read_text(encoding="utf-8"), lambda text: str(found.extend(LINK.findall(text))))
    for _, target, _ in found:
        yield _resolved(source, target)


def _resolved(source: str, target: str) -> str:
    """Return the path from the repository's root of what a link in `source` points to; a folder is its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("..") or not (ROOT / path).exists():
        raise PluginError(f"{source}: the link to {target} leads nowhere")
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _in_site(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    listing = Path(path).suffix not in PICTURES | {".md"}
    return f"{ELSEWHERE}{path}{'.md' if listing else ''}"


def _page(path: str, config: Any) -> File:
    place = _in_site(path)
    if Path(path).suffix in PICTURES:
        return File.generated(config, place, abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".md"):
        kind = {".py": "python", ".json": "json", ".yaml": "yaml", ".sh": "bash"}.get(Path(path).suffix, "text")
        text = f"# {path}\n\n````{kind}\n{text}\n````\n"
    return File.generated(config, place, content=text)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Return the text with everything but its code blocks changed."""
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))
