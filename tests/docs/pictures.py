"""Draw the pictures of docs/concepts as SVG, from `halfstep.formats`; `python -m tests.docs.made` writes them.

Each has a background of its own and follows the system's light or dark scheme, so that it can be read on
either kind of page.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from halfstep.formats import FORMATS, FP16

WIDTH = 760
FORMATS_SHOWN = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
_STYLE = """\
.back{fill:#f7f8fa}.text{fill:#1f2328}.soft{fill:#59636e}.line{stroke:#59636e;fill:none}
.sign{fill:#8250df}.exponent{fill:#0969da}.fraction{fill:#1a7f37}.wide{fill:#0969da}.narrow{fill:#bc4c00}.bad{fill:#cf222e}
.on{fill:#fff}text{font:14px system-ui,sans-serif}.small{font-size:12px}.mid{text-anchor:middle}
@media(prefers-color-scheme:dark){.back{fill:#161b22}.text{fill:#e6edf3}.soft{fill:#9198a1}.line{stroke:#9198a1}
text.sign{fill:#d2a8ff}text.exponent{fill:#79c0ff}text.fraction{fill:#7ee787}text.narrow{fill:#ffa657}}"""


def pictures() -> dict[str, str]:
    """Return every picture by its file name."""
    drawn: dict[str, Callable[[], str]] = {
        "formats.svg": _formats,
        "ranges.svg": _ranges,
        "flow.svg": _flow,
        "scaling.svg": _scaling,
        "transaction.svg": _transaction,
    }
    return {name: draw() for name, draw in drawn.items()}


def _formats() -> str:
    """A square for each bit: sign, exponent, fraction."""
    parts = [
        _text(116, 28, "sign", "sign mid small"),
        _text(136, 28, "exponent", "exponent small"),
        _text(270, 28, "fraction", "fraction small"),
    ]
    for row, name in enumerate(FORMATS_SHOWN):
        found, top = FORMATS[name], 44 + 34 * row
        parts.append(_text(20, top + 16, name))
        kinds = ["sign"] + ["exponent"] * found.exponent_bits + ["fraction"] * found.fraction_bits
        parts += [_box(108 + 18 * bit, top, 15, 22, kind) for bit, kind in enumerate(kinds)]
        parts.append(_text(108 + 18 * len(kinds) + 6, top + 16, f"{found.bits} bits", "soft small"))
    return _svg("Number formats, bit by bit", 260, parts)


def _ranges() -> str:
    """What each format holds, on one axis of powers of two."""
    low, high = -152, 130

    def at(exponent: float) -> float:
        return 108 + (exponent - low) / (high - low) * 620

    parts = []
    for row, name in enumerate(FORMATS_SHOWN):
        found, top = FORMATS[name], 40 + 34 * row
        least, normal, most = (math.log2(x) for x in (found.smallest, found.smallest_normal, found.largest))
        parts.append(_text(20, top + 15, name))
        parts.append(_box(at(least), top, at(normal) - at(least), 20, "narrow"))
        parts.append(_box(at(normal), top, at(most) - at(normal), 20, "exponent"))
    foot = 40 + 34 * len(FORMATS_SHOWN)
    for exponent in (-149, -126, -24, 0, 16, 128):
        # Two ends of fp32 lie side by side: the label of one is drawn lower.
        lower = 16 if exponent == -126 else 0
        parts.append(_line(at(exponent), 32, at(exponent), foot + lower))
        parts.append(_text(at(exponent), foot + 14 + lower, _power(exponent), "soft small mid"))
    parts.append(_text(108, 22, "full digits", "exponent small"))
    parts.append(_text(190, 22, "subnormal: fewer and fewer digits", "narrow small"))
    return _svg("The range of each format, in powers of two", foot + 42, parts)


def _flow() -> str:
    """The two rows of the guide: numbers in fp32, and in mixed precision."""
    steps = ("input", "forward", "loss", "backward", "update")
    rows = {
        "fp32": ("32", "32", "32", "32", "32"),
        "mixed": ("32", "16", "32", "16", "32"),
    }
    parts = [_text(184 + 120 * i, 28, name, "soft small mid") for i, name in enumerate(steps)]
    for row, (name, bits) in enumerate(rows.items()):
        top = 44 + 96 * row
        parts.append(_text(20, top + 27, name))
        for i, bit in enumerate(bits):
            parts.append(_box(140 + 120 * i, top, 88, 42, "wide" if bit == "32" else "narrow", radius=6))
            parts.append(_text(184 + 120 * i, top + 26, f"{bit} bits", "on mid"))
            if i:
                parts.append(_arrow(140 + 120 * i - 30, top + 21, 140 + 120 * i - 3, top + 21))
        parts.append(_path(f"M 664 {top + 42} v 18 H 304 v -15"))
        parts.append(
            _text(484, top + 75, f"weights, in fp32{', cast to 16 bits for each product' * row}", "soft small mid")
        )
    return _svg("How numbers flow in fp32 and in mixed precision", 246, parts)


def _scaling() -> str:
    """Gradients below fp16's smallest number, and the same times 2^16."""
    low, high = -44, 20

    def at(exponent: float) -> float:
        return 40 + (exponent - low) / (high - low) * 680

    least, normal = math.log2(FP16.smallest), math.log2(FP16.smallest_normal)
    zero, most = least - 1, math.log2(FP16.largest)
    parts = [
        _box(at(low), 40, at(zero) - at(low), 26, "bad"),
        _box(at(zero), 40, at(normal) - at(zero), 26, "narrow"),
        _box(at(normal), 40, at(most) - at(normal), 26, "fraction"),
        _box(at(most), 40, at(high) - at(most), 26, "bad"),
        _text((at(low) + at(zero)) / 2, 58, "rounds to 0", "on mid small"),
        _text((at(zero) + at(normal)) / 2, 58, "subnormal", "on mid small"),
        _text((at(normal) + at(most)) / 2, 58, "fp16 with all its digits", "on mid small"),
        _text((at(most) + at(high)) / 2, 58, "∞", "on mid small"),
    ]
    for exponent in (zero, normal, most):
        parts.append(_text(at(exponent), 82, _power(round(exponent)), "soft small mid"))
    band, shift = (-38, -20), 16
    for top, offset, words in ((100, 0, "gradients g"), (158, shift, "s·g with s = 2¹⁶")):
        left, right = at(band[0] + offset), at(band[1] + offset)
        parts.append(_box(left, top, right - left, 26, "wide"))
        parts.append(_text((left + right) / 2, top + 18, words, "on mid small"))
    parts.append(_arrow(at(-29), 128, at(-29 + shift), 155))
    return _svg("Loss scaling moves gradients into fp16's range", 204, parts)


def _transaction() -> str:
    """A step: remember, compute, judge; then everything is applied, or everything is taken back."""
    names = ("remember", "forward,\nbackward", "agree", "judge")
    parts = []
    for i, name in enumerate(names):
        parts += _stage(20 + 130 * i, 75, name, "wide")
        if i:
            parts.append(_arrow(20 + 130 * i - 30, 101, 20 + 130 * i - 3, 101))
    parts += _stage(560, 24, "apply all", "fraction")
    parts += _stage(560, 126, "take back all", "narrow")
    parts += [_arrow(510, 92, 557, 56), _arrow(510, 110, 557, 146)]
    parts.append(_text(20, 162, "all: weights, optimizer state, schedule, average,", "soft small"))
    parts.append(_text(20, 178, "buffers, loss scale and counters, on every rank", "soft small"))
    parts += [_arrow(660, 50, 702, 84), _arrow(660, 152, 702, 118), _text(708, 106, "report", "text")]
    return _svg("A step is a transaction", 202, parts)


def _stage(left: float, top: float, words: str, kind: str) -> list[str]:
    lines = words.split("\n")
    first = top + 31 - 8 * (len(lines) - 1)
    return [
        _box(left, top, 100, 52, kind, radius=6),
        *(_text(left + 50, first + 17 * i, line, "on mid small") for i, line in enumerate(lines)),
    ]


def _svg(title: str, height: int, parts: list[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" class="soft"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" class="back"/>\n{inside}\n</svg>\n'
    )


def _box(left: float, top: float, width: float, height: float, kind: str, radius: int = 2) -> str:
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="{radius}" class="{kind}"/>'
    )


def _text(left: float, top: float, words: str, kind: str = "text") -> str:
    return f'<text x="{left:.0f}" y="{top:.0f}" class="{kind}">{words}</text>'


def _line(left: float, top: float, right: float, bottom: float) -> str:
    return f'<path d="M{left:.0f} {top:.0f} L{right:.0f} {bottom:.0f}" class="line" stroke-dasharray="2 3"/>'


def _arrow(left: float, top: float, right: float, bottom: float) -> str:
    return _path(f"M{left:.0f} {top:.0f} L{right:.0f} {bottom:.0f}")


def _path(drawn: str) -> str:
    return f'<path d="{drawn}" class="line" marker-end="url(#tip)"/>'


def _power(exponent: int) -> str:
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
