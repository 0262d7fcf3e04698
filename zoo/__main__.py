"""python -m zoo: run every pain in plain PyTorch and with halfstep, and say what became of each."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import NamedTuple

from zoo import Pain, pages, pains
from zoo.outcome import Outcome


class Result(NamedTuple):
    pain: Pain
    plain: Outcome
    halfstep: Outcome

    @property
    def as_it_should_be(self) -> bool:
        return self.plain.broken and self.halfstep.held


def main() -> int:
    options = _options()
    if options.readme:
        sys.stdout.write(pages.readme())
        return 0
    import torch  # after --readme, which needs none of it

    # Tiny matrices on several threads only wait for one another.
    torch.set_num_threads(1)
    # fp16 on a CPU is slow, which halfstep says each time; here it is on purpose.
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    # A model that is cast by hand, which diffusers remarks on, is what some of these show. It reads this when imported.
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if options.table:
        print(pages.table())
        return 0
    results = _run_all(quiet=options.json, verbose=options.verbose)
    if options.json:
        print(json.dumps([_plain_data(result) for result in results], indent=2))
    else:
        print(f"{sum(result.halfstep.held for result in results)}/{len(results)} held")
    return 0 if all(result.as_it_should_be for result in results) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description="The pains of mixed precision, run.")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was seen")
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--json", action="store_true", help="print the results as JSON")
    page.add_argument("--table", action="store_true", help="print five of them side by side, as Markdown")
    page.add_argument("--readme", action="store_true", help="print zoo/README.md")
    return parser.parse_args()


def _run_all(*, quiet: bool, verbose: bool) -> list[Result]:
    found = pains()
    width = max(len(f"{pain.number} {pain.words}") for pain in found)
    out = sys.stderr if quiet else sys.stdout
    results: list[Result] = []
    for pain in found:
        # What stands here while it runs: the name first, then each verdict as it comes.
        print(f"{pain.number} {pain.words}".ljust(width), end="   ", file=out, flush=True)
        plain = pain.run("plain")
        print(f"plain: {plain.verdict:<6}", end="   ", file=out, flush=True)
        held = pain.run("held")
        print(f"halfstep: {held.verdict}", file=out, flush=True)
        if verbose:
            print(_dim(f"    plain:    {plain.seen}\n    halfstep: {held.seen}"), file=out, flush=True)
        results.append(Result(pain, plain, held))
    return results


def _plain_data(result: Result) -> dict[str, object]:
    arms = {"plain": result.plain, "halfstep": result.halfstep}
    return {
        "folder": result.pain.folder,
        "title": result.pain.title,
        **{name: {"verdict": outcome.verdict, "seen": outcome.seen} for name, outcome in arms.items()},
    }


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


if __name__ == "__main__":
    sys.exit(main())
