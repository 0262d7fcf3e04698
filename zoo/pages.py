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

What goes wrong in mixed precision training, each case twice: `plain.py` as people write it, which goes wrong, and
`held.py` with halfstep. Both run on any CPU in seconds, and both say what they measured. `plain.py` is plain PyTorch,
or accelerate, Lightning or transformers themselves where the fault is theirs.

```
python -m zoo            # all of them; exit code 1 unless every plain one breaks and every halfstep one holds
python -m zoo -v         # with what was seen
python -m zoo --table    # five of them side by side: torch, accelerate, halfstep
python -m zoo --json     # for machines
python -m zoo --readme   # this page
```

`p` is a pain that many people reported, by its place in our list; `d` is a defect of one library. A CPU proves the
logic of a step, not the numbers of a GPU: where the two differ, the folder's README says so.
"""


def readme() -> str:
    rows = [
        f"| {pain.title} | {_capital(pain.sentence('**You see**'))} | {_capital(pain.sentence('**halfstep**'))} "
        f"| [{pain.number}]({pain.folder}) |"
        for pain in pains()
    ]
    header = ["| pain | what one sees without halfstep | what halfstep does | folder |", "|---|---|---|---|"]
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
