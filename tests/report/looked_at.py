"""What a browser would make of a page: its elements, attributes and text."""

from __future__ import annotations

from html.parser import HTMLParser

EMPTY = {"meta", "img", "br", "hr", "link", "input"}
DRAWN = {"line", "rect", "path", "circle", "polyline"}


class Page(HTMLParser):
    """The parsed page; raises AssertionError for elements that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without its beginning"
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            return
        (self.titles if self._open and self._open[-1] == "title" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of every element with this tag."""
        return [attributes for name, attributes in self.elements if name == tag]
