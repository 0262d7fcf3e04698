"""Write matplotlib's figures as PNG files, and the texts in them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from halfstep.files import replacing
from halfstep.printable import shortened


def write_figure(figure: Any, path: Path) -> None:
    """Draw the figure and write it as a PNG file; a file that is there is replaced when the new one is whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    with replacing(path) as draft:
        draft.write_bytes(picture.getvalue())


def as_label(text: str, longest: int = 80) -> str:
    """Return the text without mathtext markup, shortened to its place."""
    # matplotlib parses text between dollar signs as a formula, and raises for an invalid one.
    plain = "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")
    return shortened(plain, longest)
