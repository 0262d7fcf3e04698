"""Remove the guards of object stores one at a time, and run the tests of the faults that each one is for.

    python -m benchmarks.store_guards [NAME ...] [--record]

A copy of `src` gets one guard less, and the tests run on it: `red` where one of them fails, as it should, `GREEN` where
none does. The same tests run on the unchanged copy first, all at once. `--record` with names keeps the other rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from halfstep.files import write_json

ROOT, RECORD = Path(__file__).parents[1], Path(__file__).with_suffix(".json")
CAUSES = "tests/store/test_failures.py"
REQUESTS, UPLOADS = "tests/store/test_objects_faults.py", "tests/store/test_generations_faults.py"
SAMPLES, RUNS = "tests/store/test_samples.py", "tests/store/test_remote.py"
OBJECTS, FAILURES, GENERATIONS = "store/objects.py", "store/failures.py", "train/remote_generations.py"
SETS, SHARDS = "data/store_set.py", "data/store_shards.py"


class Guard(NamedTuple):
    """A guard, the file and the text that it is, what stands there without it, and the tests that need it."""

    name: str
    file: str
    text: str
    without: str
    tests: str
    names: str


GUARDS = [
    Guard("length", OBJECTS, "if len(found) != size:", "if False:", REQUESTS, "length-lies"),
    Guard("if-match", OBJECTS, '{"if_match": tag} if tag else {}', "{}", REQUESTS, "object-replaced"),
    Guard(
        *("read-back-create", OBJECTS, "not in ONCE and self._holds(key, io.BytesIO(content)):", "is None:"),
        *(REQUESTS, "put-done"),
    ),
    Guard("read-back-multipart", OBJECTS, "or not self._holds(key, file)", "or True", REQUESTS, "multipart"),
    Guard(
        *("size-after-create", OBJECTS, "self._check_written(key, len(content))", "pass"),
        *(UPLOADS, "commit-answered-and-not-done"),
    ),
    Guard(
        *("size-after-put", OBJECTS, "self._check_written(key, size)", "pass"),
        *(UPLOADS, "file-answered-and-not-done"),
    ),
    Guard("repeated", FAILURES, "PASSING = (UNREACHABLE, SHORT)", "PASSING = ()", REQUESTS, "length-lies-once"),
    Guard(
        *(
            "deadline",
            OBJECTS,
            '"timeout": timedelta(seconds=min(REQUEST, self.patience / 4))',
            '"timeout": timedelta(1)',
        ),
        *(REQUESTS, "drip-for-ever"),
    ),
    Guard("patience", OBJECTS, "is_over = time.monotonic() + pause > until", "is_over = False", REQUESTS, "503-for"),
    Guard(
        "asked-again",
        OBJECTS,
        "ask_again = FIRST_PAUSE, (*ONCE, *once)",
        "ask_again = FIRST_PAUSE, ()",
        REQUESTS,
        "404-once or 403-once",
    ),
    Guard("refusals", FAILURES, "and status != 501 else REFUSED", "else UNREACHABLE", CAUSES, "InvalidRequest"),
    Guard("own-request-in-progress", FAILURES, "409: UNREACHABLE", "409: CHANGED", CAUSES, "Conflict"),
    Guard("cause", FAILURES, "code is not None and", "False and", CAUSES, "RequestTimeTooSkewed"),
    Guard("no-conditions", OBJECTS, "if failure.kind != REFUSED:", "if True:", CAUSES, "refuses_conditions"),
    Guard("variables", FAILURES, "for name in ENDPOINTS:", "for name in ():", CAUSES, "wrong_is_named"),
    Guard("no-ranges", OBJECTS, "if self._answers_whole(key):", "if False:", REQUESTS, "range-ignored"),
    Guard("digest-of-restore", GENERATIONS, "!= seal.sha256:", "is None:", UPLOADS, "restore and wrong-bytes"),
    Guard("size-of-restore", GENERATIONS, "facts.size != seal.size:", "False:", RUNS, "damaged_checkpoint"),
    Guard(
        *(
            "seal-asked-again",
            GENERATIONS,
            "with contextlib.suppress(Damaged):\n        text, tag",
            "if True:\n        text, tag",
        ),
        *(UPLOADS, "wrong-bytes and not ever"),
    ),
    Guard(
        *("newest-in-owner", GENERATIONS, "if owner is not None and owner.newest is not None:", "if False:"),
        *(f"{REQUESTS} {UPLOADS}", "listing"),
    ),
    Guard(
        *("older-launch", GENERATIONS, "if owner is None or owner.launch != lease.launch:", "if False:"),
        *(RUNS, "older_launch"),
    ),
    Guard(
        *("recipe-in-owner", GENERATIONS, "    if owner.recipe:", "    if False:"),
        *(RUNS, "before_its_first_commit"),
    ),
    Guard("another-run", GENERATIONS, "if known.run != owner.run:", "if False:", RUNS, "place_of_another_run"),
    Guard(
        *("behind-its-store", GENERATIONS, "newest.launch_number > known.number:", "False:"),
        *(RUNS, "behind_its_store"),
    ),
    Guard(
        *("commit-last", GENERATIONS, "        for file, content in files.items():\n            _send_once"),
        '        _write_commit(store, target, Commit(lease.run, name, seals, {"recipe.yaml": []}), lease)\n'
        "        for file, content in files.items():\n            _send_once",
        *(UPLOADS, "one-file"),
    ),
    Guard(
        *(
            "commit-removed-first",
            GENERATIONS,
            "            store.delete(key)\n    for key in objects:\n        if key.rpartition",
        ),
        "            pass\n    for key in objects:\n        if key.rpartition",
        *(UPLOADS, "cannot_be_removed"),
    ),
    Guard(
        "samples-digest",
        SETS,
        "is_right = not verify or _is_right",
        "is_right = True or _is_right",
        SAMPLES,
        "read and wrong-bytes",
    ),
    Guard(
        "samples-doubt",
        SHARDS,
        "doubts += [OTHER_BYTES] * name.endswith(UNSURE)",
        "pass",
        SAMPLES,
        "read and wrong-bytes-for",
    ),
    Guard("samples-again", SETS, "range(TRIES if verify else 1)", "range(1)", SAMPLES, "read and wrong-bytes-once"),
    Guard("samples-if-match", SETS, "chunk.size, chunk.tag)", "chunk.size)", SAMPLES, "read and replaced"),
    Guard(
        "samples-index",
        SETS,
        "    if usable(kept, shards) is None:\n        kept",
        "    if False:\n        kept",
        SAMPLES,
        "lags",
    ),
    Guard("index-in-use", SETS, "os.utime(", "str(", SAMPLES, "in_use"),
]


def is_green(source: Path, tests: str, names: str) -> bool:
    """Run tests on a copy of `src`."""
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-p", "no:cacheprovider", "--timeout", "60"]
    done = subprocess.run(
        [*words, *tests.split(), "-k", names], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true")
    given, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "src"
        shutil.copytree(ROOT / "src", source)
        chosen = [guard for guard in GUARDS if not given.names or guard.name in given.names]
        for tests in dict.fromkeys(guard.tests for guard in chosen):
            names = " or ".join(f"({guard.names})" for guard in chosen if guard.tests == tests)
            assert is_green(source, tests, names), f"{tests} -k '{names}' fails with all guards"
        for guard in chosen:
            path = source / "halfstep" / guard.file
            before = path.read_text()
            assert guard.text in before, guard.name
            path.write_text(before.replace(guard.text, guard.without))
            found[guard.name] = "red" if not is_green(source, guard.tests, guard.names) else "GREEN"
            path.write_text(before)
            print(f"{guard.name}: {found[guard.name]}", flush=True)
    print(f"{sum(one == 'red' for one in found.values())} of {len(found)} guards are red when they are removed")
    if given.record:
        before = json.loads(RECORD.read_text())["guards"] if given.names and RECORD.exists() else {}
        write_json(RECORD, {"command": "python -m benchmarks.store_guards --record", "guards": {**before, **found}})
    sys.exit(any(one != "red" for one in found.values()))


if __name__ == "__main__":
    main()
