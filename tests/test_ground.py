import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from halfstep import clock, errors, files
from halfstep.data.sets.downloads import DownloadFailed
from halfstep.finding import Finding


@pytest.mark.wording
def test_an_error_has_three_parts() -> None:
    error = errors.WrongUse("given", allowed="this", do="type that")
    assert str(error) == "given\n  allowed: this\n  do: type that"
    assert (error.given, error.allowed, error.do) == ("given", "this", "type that")
    assert str(errors.WrongUse("alone")) == "alone"


def test_every_error_is_in_the_tree_and_in_its_picture_and_has_an_id() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HalfstepError)
    ]
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind.__name__ in (errors.__doc__ or "")
        if kind is not errors.HalfstepError:
            assert len(kind.__mro__) > len(errors.HalfstepError.__mro__) + 1, "it is also a builtin error"
    assert len({kind.id for kind in kinds}) == len(kinds)
    assert DownloadFailed.id not in {one.id for one in kinds}


def test_ipython_shows_the_callers_lines_and_the_message() -> None:
    import halfstep

    with pytest.raises(errors.HalfstepError) as raised:
        halfstep.choose_precision("bf61")
    lines = raised.value._render_traceback_()
    assert len(lines) == 2
    assert 'halfstep.choose_precision("bf61")' in lines[0]
    assert lines[1] == f"{type(raised.value).__name__}: {raised.value}"


def test_the_id_of_an_error_is_its_classs_or_its_own_and_survives_pickling() -> None:
    assert errors.OtherForm("given").id == errors.OtherForm.id == "other-form"
    own = pickle.loads(pickle.dumps(errors.StateMismatch("given", id="recipe-changed", line=3)))
    assert (own.id, own.line, errors.StateMismatch.id) == ("recipe-changed", 3, "state-mismatch")


def test_without_words_errors_and_findings_say_their_id() -> None:
    code = (
        "from halfstep.doctor.located import LocatedFinding\n"
        "from halfstep.errors import BadRecipe, FolderLost\n"
        "from halfstep.finding import Finding\n"
        "one = BadRecipe('a', allowed='b', do='c', id='own', line=3)\n"
        "print(one, one.do, one.line, FolderLost('a', exit_code=3).exit_code, FolderLost('a'))\n"
        "print(Finding('x', 'note', 'a', 'b'), LocatedFinding('y', 'note', evidence='a', fix='b').evidence)"
    )
    folder = Path(__file__).parent / "support" / "without_words"
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.stdout.decode() == "own  3 3 folder-lost\nnote x: x (x) y\n"


@pytest.mark.wording
def test_an_unknown_name_offers_the_nearest() -> None:
    error = errors.build_unknown_name_error("precision", "fp61", ["fp16", "fp32", "fp16"])
    assert error.allowed == "fp16, fp32"
    assert error.do == "did you mean 'fp16'?"
    assert "did you mean" not in errors.build_unknown_name_error("precision", "zzz", ["fp16"]).do


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"b": [1, 2.5, "x"], "a": None})
    assert files.read_json(path) == {"b": [1, 2.5, "x"], "a": None}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def fail_at(where: str) -> Any:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt(where)

    return fail


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_interrupted_half_way_leaves_the_old_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, "old")
    monkeypatch.setattr(os, where, fail_at(where))
    with pytest.raises(KeyboardInterrupt):
        files.write_json(path, "new" * 100_000)
    assert files.read_json(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_with_the_same_id_write_drafts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers that share a volume
    path = tmp_path / "shared.json"
    with files.replace_file(path) as one, files.replace_file(path) as other:
        one.write_text("one")
        other.write_text("other")
        assert {files.find_draft_target(one.name), files.find_draft_target(other.name)} == {"shared.json"}
    assert path.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["shared.json"]


def test_content_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, "old")
    with pytest.raises(TypeError):
        files.write_json(path, ["written before the object", object()])
    assert files.read_json(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00"])
def test_a_file_that_is_not_json_reads_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert files.read_json(path) is None
    path.write_bytes(content)
    assert files.read_json(path) is None
    assert files.read_json(tmp_path) is None


def test_a_file_too_large_to_be_ours_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps("x" * 100))
    monkeypatch.setattr(files, "LARGEST_JSON", 50)
    assert files.read_json(path) is None


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.find_cache_folder() == tmp_path / "halfstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.find_cache_folder() == Path.home() / ".cache" / "halfstep"


def test_a_ratio_finds_a_known_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's own: real sleeps of milliseconds say nothing on a busy machine."""
    now = [0.0]

    def taking(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    arms = {"one": lambda: taking(0.002), "three": lambda: taking(0.006)}
    ratio = clock.measure_time_ratios(arms, baseline="one", pairs=9)["three"]
    assert ratio.median == pytest.approx(3.0)
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.pairs == 9
    assert ratio.added_seconds == pytest.approx(0.004)


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_arms_are_interleaved_and_each_is_as_often_first_as_last(names: str) -> None:
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name)) for name in names}  # type: ignore[misc]
    seen: list[tuple[int, int]] = []
    pairs = 2 * len(names)
    clock.measure_time_ratios(arms, baseline="a", pairs=pairs, progress=lambda done, all_: seen.append((done, all_)))
    rounds = [order[start : start + len(names)] for start in range(0, len(order), len(names))]
    assert all(sorted(turn) == list(names) for turn in rounds)
    assert Counter(turn[0] for turn in rounds) == Counter(turn[-1] for turn in rounds) == dict.fromkeys(names, 2)
    assert seen[-1] == (pairs, pairs)


def test_seconds_is_an_average() -> None:
    calls: list[int] = []
    assert clock.measure_call_seconds(lambda: calls.append(1), 10) < 0.01
    assert len(calls) == 10


@pytest.mark.wording
def test_a_finding_reads_as_a_sentence_and_as_data() -> None:
    finding = Finding("precision.slow", "warning", "it was slow", "ask for auto")
    assert str(finding) == "warning precision.slow: it was slow (ask for auto)"
    assert finding.as_dict() == {
        "id": "precision.slow",
        "severity": "warning",
        "evidence": "it was slow",
        "fix": "ask for auto",
    }
    with pytest.raises(AttributeError):
        finding.id = "other"  # type: ignore[misc]
