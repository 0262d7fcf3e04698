"""How much trouble a run may have before it is stopped, and how long a remedy stays."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.errors import WrongUse


@dataclass(frozen=True)
class Limits:
    skips_in_a_row: int = 5
    """Without those by which a loss scale finds its place."""
    skip_share: float = 0.25
    """Of the last hundred attempts."""
    rollbacks: int = 2
    """In a run."""
    probation: int = 1000
    """Applied steps without trouble, after which the newest remedy is lifted."""
    keep_every: int = 100
    """Applied steps between two copies of the run in memory, where a rollback may be needed."""
    diagnoses: int = 20
    """In a run: each of them runs the step several times, and looks at every operation."""
    islands: int = 8
    """Modules that may be kept in fp32 before the whole run changes its precision."""
    spikes: bool = True
    """Whether a finite loss far above the usual is refused."""

    def __post_init__(self) -> None:
        least = {name: 0 if name in _MAY_BE_NOTHING else 1 for name in vars(self)} | {"skip_share": 0.0}
        wrong = [name for name, number in vars(self).items() if not number >= least[name]]
        if wrong or not 0.0 < self.skip_share <= 1.0:
            name = wrong[0] if wrong else "skip_share"
            raise WrongUse(
                f"{name}={getattr(self, name)!r} as a limit",
                allowed="a share above 0 and up to 1; rollbacks, diagnoses and islands from 0, the others from 1",
                do=f"leave {name} out, or give a number that is allowed",
            )


_MAY_BE_NOTHING = {"rollbacks", "diagnoses", "islands", "spikes"}
