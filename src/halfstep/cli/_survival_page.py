"""Whether a model survives a format, as a page for a terminal: verdicts first, evidence after, then what to type."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli._doctor_page import heading, pairs
from halfstep.cli._printable import printable

_MOST_MODULES = 10
_WORTH_A_LINE = 0.01


def show(found: list[dict[str, Any]], subject: str = "CASE") -> None:
    """Print all of them; the advice at the end is that of the first one that needs any."""
    console = Console(highlight=False)
    console.print()
    for survival in found:
        console.print(_verdict(survival))
    for survival in found:
        _print_evidence(console, survival)
    if not found:
        console.print("No format was tried to its end.")
    console.print()
    for note in dict.fromkeys(note for survival in found for note in survival["notes"]):
        console.print(Text(printable(note), style="dim"))
    _print_advice(console, found, subject)


def _verdict(survival: dict[str, Any]) -> Text:
    name, _, words = survival["verdict"].partition(": ")
    colour = "green" if survival["survives"] else "red"
    if colour == "red" and (survival["scaled"] or {}).get("survives", False):
        colour = "yellow"
    return Text(name, style=f"bold {colour}").append(f": {printable(words)}", style="not bold")


def _print_evidence(console: Console, survival: dict[str, Any]) -> None:
    heading(console, survival["format"], _which_modules(survival["modules"]))
    console.print(_modules(survival["modules"][:_MOST_MODULES], console))
    console.print()
    console.print(pairs(_step_facts(survival)))


def _which_modules(modules: list[dict[str, Any]]) -> str:
    if len(modules) > _MOST_MODULES:
        return f"the {_MOST_MODULES} modules nearest to its end, of {len(modules)}"
    return "modules, those nearest to its end first"


def _modules(rows: list[dict[str, Any]], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    table.add_column("module", overflow="fold")
    for title in ("largest", "headroom", "overflows", "vanish", "gradients\nvanish"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        overflows = Text(f"{row['overflows']}", style="red") if row["overflows"] else Text("-")
        table.add_row(
            Text(printable(row["module"])),
            f"{row['largest']:.3g}",
            "-" if row["headroom_bits"] is None else f"{row['headroom_bits'] + 0.0:.1f} bits",
            overflows,
            _share(row["underflow_forward"]),
            _share(row["underflow_backward"]),
        )
    return table


def _step_facts(survival: dict[str, Any]) -> dict[str, str]:
    facts = {"loss": f"{_number(survival['loss'])}, in fp32 {_number(survival['loss_fp32'])}"}
    if survival["format"] == "fp16":
        facts["loss scale"] = _scale(survival)
        facts["gradients vanish"] = (
            f"{_share(survival['gradient_underflow'])}, without a loss scale "
            f"{_share(survival['gradient_underflow_unscaled'])}"
        )
    else:
        facts["gradients vanish"] = _share(survival["gradient_underflow"])
    facts["gradient error"] = _error(survival)
    if survival["scaled"] is not None:
        facts["with a scale for each tensor"] = f"gradient error {_error(survival['scaled'])}"
    # A few zeros are those of units that rounding switched off; they are not worth a line.
    for lost in [lost for lost in survival["lost"] if lost["share"] >= _WORTH_A_LINE][:3]:
        facts[printable(f"lost in {lost['parameter']}")] = (
            f"{_share(lost['share'])} of its gradients, up to {lost['largest']:.2g}"
        )
    return facts


def _scale(survival: dict[str, Any]) -> str:
    if survival["loss_scale"] is not None:
        return f"{survival['loss_scale']:.0f}"
    return "none helps: the loss itself is not finite" if survival["loss"] is None else "gradients overflow at any"


def _error(survival: dict[str, Any]) -> str:
    error = survival["gradient_error"]
    return "not finite" if error is None else f"{error:.2%} of their norm in fp32"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _share(share: float) -> str:
    if not share:
        return "-"
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _print_advice(console: Console, found: list[dict[str, Any]], subject: str) -> None:
    advice = [line for survival in found if not survival["survives"] for line in survival["do"]]
    if not advice and found and all(survival["survives"] for survival in found):
        advice = [f"halfstep plan {subject}    measures which of them is the fastest here"]
    if not advice:
        return
    heading(console, "Do")
    for line in dict.fromkeys(advice):
        console.print(Padding(Text(printable(line), style="bold"), (0, 0, 0, 2), expand=False))
