"""Show results in a notebook, and as readable text with `print`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.page import Page


class PageResult:
    """A result with a page: HTML as the value of a notebook's cell, plain text for `print` and terminals."""

    def page(self) -> Page:
        """Return the page about this result."""
        raise NotImplementedError

    def __str__(self) -> str:
        from halfstep.draw.terminal import render_plain_text

        return render_plain_text(self.page())

    def _repr_html_(self) -> str:
        from halfstep.draw.html import render_html_fragment

        return render_html_fragment(self.page())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return build_mimebundle(self.page(), str(self))


def build_mimebundle(page: Page, text: str) -> dict[str, str]:
    """Return the HTML of a page, and its text, which a terminal's IPython shows instead of the dataclass."""
    from halfstep.draw.html import render_html_fragment

    return {"text/html": render_html_fragment(page), "text/plain": text}
