"""Get a data set of the benchmarks into the cache: `python -m benchmarks.sets NAME`."""

from __future__ import annotations

import argparse

from benchmarks.sets import aerial_buildings, dsprites, groceries, smollm2, sotu
from halfstep.data.sets.getting import fetch_dataset

SETS = {
    "aerial_buildings": aerial_buildings,
    "dsprites": dsprites,
    "groceries": groceries,
    "smollm2": smollm2,
    "sotu": sotu,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SETS)
    name = parser.parse_args().name
    folder, counts = fetch_dataset(name, SETS)
    print(f"{name} ok: {', '.join(f'{count} {split}' for split, count in counts.items())} in {folder}")
