"""Show results in a notebook, and as readable text with `print`."""

from __future__ import annotations

from halfstep.page import Page


class ShownAsPage:
    """A result with a page: HTML as the value of a notebook's cell, plain text for `print` and terminals."""

    def page(self) -> Page:
        """Return the page about this result."""
        raise NotImplementedError

    def __str__(self) -> str:
        from halfstep.draw.terminal import text_of

        return text_of(self.page())

    def _repr_html_(self) -> str:
        from halfstep.draw.html import html_fragment

        return html_fragment(self.page())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return mimebundle(self.page(), str(self))


def mimebundle(page: Page, text: str) -> dict[str, str]:
    """Return the HTML of a page, and its text, which a terminal's IPython shows instead of the dataclass."""
    from halfstep.draw.html import html_fragment

    return {"text/html": html_fragment(page), "text/plain": text}
