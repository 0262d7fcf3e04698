"""The zoo on paper: its README, and the table for those who want five rows."""

from __future__ import annotations

from zoo import Pain, pains

SIDE_BY_SIDE = {
    "p02": "clean batches after several NaN batches in a row",
    "p05": "learning rate after skipped steps",
    "p09": "BatchNorm after a skipped step",
    "p12": "one NaN gradient in bf16",
    "d07": "two optimizers with clipping",
}
INTRODUCTION = """\
# The pain zoo

Known failures of mixed precision training. Each has two scripts: `plain.py` is common code that fails, `held.py` does
the same with halfstep. Both run on any CPU in seconds and print their measurements. `plain.py` is plain PyTorch, or
accelerate, Lightning or transformers if the defect is theirs.

```
python -m zoo            # all of them; exit code 1 unless every plain one breaks and every halfstep one holds
python -m zoo -v         # with their output
python -m zoo --table    # five of them side by side: torch, accelerate, halfstep
python -m zoo --json     # for machines
python -m zoo --readme   # this page
```

`p` is a failure that many people reported; `d` is a defect of one library. A CPU verifies the logic of a step, not the
numbers of a GPU: if the two differ, the folder's README says so.
"""


def readme() -> str:
    rows = [
        f"| {pain.title} | {_capital(pain.sentence('**You see**'))} | {_capital(pain.sentence('**halfstep**'))} "
        f"| [{pain.number}]({pain.folder}) |"
        for pain in pains()
    ]
    header = ["| failure | without halfstep | with halfstep | folder |", "|---|---|---|---|"]
    return "\n".join([INTRODUCTION, *header, *rows, ""])


def table() -> str:
    by_number = {pain.number: pain for pain in pains()}
    rows = [f"| {words} | {' | '.join(_cells(by_number[number]))} |" for number, words in SIDE_BY_SIDE.items()]
    return "\n".join(["| | torch | accelerate | halfstep |", "|---|---|---|---|", *rows])


def _cells(pain: Pain) -> list[str]:
    arms = [("by_hand", "plain"), ("accelerated", "plain"), ("held",)]
    return [pain.run(*arm).cell for arm in arms]


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
