"""The pain zoo: what goes wrong in mixed precision training, each case as code that breaks and code that holds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from zoo.outcome import Outcome

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pain:
    """One folder: `plain.py` goes wrong, `held.py` does the same with halfstep, `README.md` says why.

    Some have more arms: `accelerated.py` with accelerate, and, where `plain.py` is accelerate's, `by_hand.py` in torch.
    """

    folder: str

    @property
    def number(self) -> str:
        return self.folder.split("_")[0]

    @property
    def words(self) -> str:
        return self.folder.split("_", 1)[1].replace("_", " ")

    @property
    def readme(self) -> str:
        return (HERE / self.folder / "README.md").read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        return self.readme.splitlines()[0].removeprefix("# ")

    def has(self, arm: str) -> bool:
        return (HERE / self.folder / f"{arm}.py").is_file()

    def run(self, *arms: str) -> Outcome:
        """The first of the arms that the folder has."""
        arm = next(arm for arm in arms if self.has(arm))
        outcome: Outcome = importlib.import_module(f"zoo.{self.folder}.{arm}").run()
        return outcome

    def sentence(self, beginning: str) -> str:
        """The first line of the README's paragraph that begins so, without its beginning."""
        line = next(line for line in self.readme.splitlines() if line.startswith(beginning))
        return line.removeprefix(beginning).strip()


def pains() -> list[Pain]:
    """The folders are the registry."""
    found = [Pain(path.name) for path in sorted(HERE.iterdir(), key=_order) if path.is_dir() and path.name[0] != "_"]
    for pain in found:
        missing = [name for name in ("plain.py", "held.py", "README.md") if not (HERE / pain.folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"zoo/{pain.folder} has no {' and no '.join(missing)}")
    return found


def _order(path: Path) -> tuple[bool, str]:
    """Pains (p) before defects of one library (d), each by number."""
    return not path.name.startswith("p"), path.name
