"""`halfstep report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import report as command
from halfstep.cli.main import build
from halfstep.errors import CONFIGURATION, DATA, INTERRUPTED, STORAGE
from tests.report.looked_at import Page
from tests.report.written import start, step, whole, write_run


def report(*words: object) -> Result:
    return CliRunner().invoke(build(["report"]), ["report", *map(str, words)])


def test_the_page_is_written_beside_the_run_and_the_last_line_names_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    done = report(folder)
    assert done.exit_code == 0, done.output
    first, last = done.output.splitlines()
    assert first.startswith("Finished: best IoU 0.7500")
    size = (folder / "report.html").stat().st_size
    assert last == f"{folder / 'report.html'} ({size / 1000:,.0f} kB)"
    assert first in Page((folder / "report.html").read_text()).text


def test_markdown_and_another_file(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, whole(precision=name)) for name in ("fp32", "bf16")]
    done = report(*runs, "--format", "md", "--output", tmp_path / "out" / "pr.md")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "out" / "pr.md").read_text()
    assert "\n2 runs side by side: against fp32, bf16:" in text
    assert "| precision | fp32 | bf16 |" in text


def test_json_is_one_object(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    found = json.loads(report(folder, "--json").output)
    assert found["file"] == str(folder / "report.html")
    assert found["bytes"] == (folder / "report.html").stat().st_size
    assert found["reports"][0]["verdict"].startswith("Finished")
    assert found["reports"][0]["recipe"]["train.seed"] == "1"
    assert found["comparison"] is None


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [start(), step(1)]
    running = {"state": "running", "host": socket.gethostname(), "pid": os.getpid()}
    folder = write_run(tmp_path / "run", events, **running)
    pages = []

    def later(seconds: float) -> None:
        pages.append((folder / "report.html").read_text())
        if len(pages) == 1:
            write_run(folder, [*events, step(2)], **running)
        else:
            write_run(folder, whole(), **{**running, "state": "ended", "code": 0})

    monkeypatch.setattr(command.time, "sleep", later)
    done = report(folder, "--watch")
    assert done.exit_code == 0, done.output
    assert [f"at step {n} of 40" in page for n, page in enumerate(pages, start=1)] == [True, True]
    assert all('http-equiv="refresh" content="60"' in page for page in pages)
    last = (folder / "report.html").read_text()
    assert "Finished" in last
    assert 'http-equiv="refresh"' not in last


@pytest.mark.wording
@pytest.mark.parametrize(("minutes", "code"), [(command.MOST_FAILURES - 1, 0), (command.MOST_FAILURES, 65)])
def test_watching_outlives_a_folder_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int, code: int
) -> None:
    running = {"state": "running", "host": socket.gethostname(), "pid": os.getpid()}
    folder = write_run(tmp_path / "run", [start(), step(1)], **running)
    page, waited = tmp_path / "page.html", []

    def later(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 1:
            folder.rename(tmp_path / "away")
        elif len(waited) == 1 + minutes:
            (tmp_path / "away").rename(folder)
            write_run(folder, whole(), **{**running, "state": "ended", "code": 0})

    monkeypatch.setattr(command.time, "sleep", later)
    done = report(folder, "--watch", "--output", page, "--json")
    assert done.exit_code == code, done.output
    assert done.stderr.count("does not exist; trying again in 60 s") == command.MOST_FAILURES - 1
    assert ("Finished" in page.read_text()) == (code == 0)
    assert done.stdout.count('"bytes"') == (2 if code == 0 else 1)


def test_watching_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = {"state": "running", "host": socket.gethostname(), "pid": os.getpid()}
    folder = write_run(tmp_path / "run", [start(), step(1)], **running)

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", stop)
    assert report(folder, "--watch").exit_code == INTERRUPTED
    assert (folder / "report.html").exists()
    assert "--watch" in report(folder).output


@pytest.mark.wording
def test_errors_say_what_was_given_what_is_allowed_and_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole())
    (tmp_path / "file").write_text("")
    for words, code, said in [
        ((tmp_path / "no",), DATA, "does not exist"),
        ((tmp_path,), DATA, "is a folder of runs (run)"),
        ((run, "--format", "pdf"), CONFIGURATION, "html, md"),
        ((run, "--output", tmp_path), CONFIGURATION, "is a folder"),
        ((run, "--output", tmp_path / "file" / "x.html"), STORAGE, "cannot be written"),
    ]:
        done = report(*words)
        assert done.exit_code == code, done.output
        assert said in done.output
        assert "allowed:" in done.output
        assert "do:" in done.output


def test_a_report_of_a_run_loads_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole())
    code = (
        "import sys; from halfstep.cli.main import main; sys.argv = ['halfstep', 'report', sys.argv[1]]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr


@pytest.mark.full
def test_examining_a_run_adds_formats_headroom_memory_and_survival(tmp_path: Path) -> None:
    from halfstep.recipe.sources import read_recipe_text

    folder = write_run(tmp_path / "run", whole())
    (folder / "recipe.yaml").write_text(read_recipe_text("segmentation_tiny")[1])
    done = report(folder, "--examine")
    assert done.exit_code == 0, done.output
    page = Page((folder / "report.html").read_text())
    assert "of the work in bf16 as asked" in page.text
    assert {"fp32, predicted", "bf16, predicted"} <= set(page.texts)
    assert "One step in fp16, emulated" in page.text
