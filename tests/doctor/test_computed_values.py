"""Values that a script computes: what each expression can be, which place wins, and what the doctor says of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import main
from halfstep.doctor.code.script import parse_script
from halfstep.doctor.code.values import find_lookup_key, list_possible_values
from halfstep.doctor.linking import link_project_runs
from halfstep.doctor.precedence import Provenance
from halfstep.doctor.project import read_project
from halfstep.doctor.sources import from_environment


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_MIXED_PRECISION", "PL_TRAINER_PRECISION", "LT_PRECISION"):
        monkeypatch.delenv(name, raising=False)


# -- values of expressions --------------------------------------------------------------------------------------------


def last_value(code: str) -> tuple[Any, ast.expr]:
    """Return a script and the argument of its last call, `f(...)`."""
    script = parse_script("a.py", f"import torch\n{code}\n")
    statement = script.tree.body[-1]
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    return script, statement.value.args[0]


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("f('bf16')", ("bf16",)),
        ("f('fp16' if a else 'no')", ("fp16", "no")),
        ("f(('fp16' if b else 'bf16') if a else 'no')", ("fp16", "bf16", "no")),
        ("f('fp16' if a else 'fp16')", ("fp16",)),
        ("f(a and 'fp16' or 'no')", ("fp16", "no")),
        ("f(a and b and 'fp16' or c and 'bf16' or 'no')", ("fp16", "bf16", "no")),
        ("f('fp16' if a else None)", ("fp16", None)),
        ("f(16 if a else 32)", (16, 32)),
        ("f(torch.float16 if a else torch.bfloat16)", ("fp16", "bf16")),
        ("f({'a': 'fp16', 'b': 'bf16'}[x])", ("fp16", "bf16")),
        ("f({'a': 'fp16', 'b': 'bf16'}['b'])", ("bf16",)),
        ("f({'a': 'fp16', 'a': 'bf16'}['a'])", ("bf16",)),
        ("f({'a': 'fp16'}.get(x, 'no'))", ("fp16", "no")),
        ("f({'a': 'fp16'}.get(x))", ("fp16", None)),
        ("f({'a': 'fp16'}.get('b', 'no'))", ("no",)),
        ("T = {'a': 'fp16', 'b': 'no'}\nk = 'a'\nf(T[k])", ("fp16",)),
        ("m = 'fp16' if a else 'no'\nf(m)", ("fp16", "no")),
        ("m = 'fp16' if a else 'no'\nn = m\nf(n if b else 'bf16')", ("fp16", "no", "bf16")),
        ("T = {'a': 'fp16' if a else 'no'}\nf(T[x])", ("fp16", "no")),
    ],
)
def test_the_values_that_the_source_has(code: str, values: tuple[object, ...]) -> None:
    assert list_possible_values(*last_value(code)) == values


@pytest.mark.parametrize(
    "code",
    [
        "f(choose())",
        "f(a)",
        "f(cfg['mp'])",
        "f(cfg.mp or 'no')",
        "f(a and 'fp16')",
        "f('fp16' if a else choose())",
        "f('f' + 'p16')",
        "f(f'{bits}-mixed')",
        "f(['no', 'fp16'][a])",
        "f({'a': 'fp16', **more}[x])",
        "f({'a': choose()}[x])",
        "T = {'a': 'fp16'}\nT['b'] = 'bf16'\nf(T[x])",
        "T = {'a': 'fp16'}\nT.update(more)\nf(T[x])",
        "m = 'fp16'\nm = 'no'\nf(m)",
        "m = 'fp16'\nm += 'x'\nf(m)",
        "if a:\n    m = 'fp16'\nelse:\n    m = 'no'\nf(m)",
        "for m in ('fp16', 'no'): pass\nf(m)",
        "m = m if a else 'no'\nf(m)",
        "m, n = pair()\nf(m)",
        "f(lambda: 'fp16')",
        "class C:\n    pass\nC.m = 'fp16'\nf(C.m)",
        "exec(open('settings.py').read())\nm = 'fp16'\nf(m if a else 'no')",
        "f(*('fp16',))",
    ],
)
def test_any_other_expression_is_not_evaluated(code: str) -> None:
    assert list_possible_values(*last_value(code)) is None


def test_an_expression_that_doubles_at_every_name_ends() -> None:
    names = "\n".join(f"a{n} = a{n + 1} if x else a{n + 1}" for n in range(40))
    assert list_possible_values(*last_value(f"{names}\na40 = 'no'\nf(a0)")) is None
    deep = "(" * 60 + "'fp16'" + " if a else 'no')" * 60
    assert list_possible_values(*last_value(f"f({deep})")) == ("fp16", "no")


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("f(cfg['trainer']['precision'])", "trainer.precision"),
        ("f(cfg.trainer.precision)", "trainer.precision"),
        ("f(cfg['trainer'].get('precision', 'no'))", "trainer.precision"),
        ("m = args.mixed_precision\nf(m)", "mixed_precision"),
        ("k = 'fp16'\nf(cfg[k])", "fp16"),
        ("f(cfg.precision or 'no')", "precision"),
        ("f(cfg['precision'] if 'precision' in cfg else 'no')", "precision"),
        ("f(str(cfg.trainer.precision))", "trainer.precision"),
        ("f(cfg.precision if fast else 'no')", ""),
        ("f(cfg[name])", ""),
        ("f(cfg['a'] + 'b')", ""),
        ("f(load().precision)", ""),
        ("f('bf16')", ""),
    ],
)
def test_the_key_of_a_lookup(code: str, key: str) -> None:
    assert find_lookup_key(*last_value(code)) == key


def test_the_key_of_a_parameter_is_its_name() -> None:
    script = parse_script("a.py", "def build(a, precision):\n    b = a\n    return f(precision), f(b)\n")
    calls = sorted(script.calls(), key=lambda call: call.col_offset)
    assert [find_lookup_key(script, call.args[0]) for call in calls] == ["precision", "a"]


# -- who wins ---------------------------------------------------------------------------------------------------------

ACCELERATE_FILE = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n"
ACCELERATE_RUN = "accelerate launch --config_file accelerate.yaml train.py\n"


def write(**files: str) -> None:
    for name, text in files.items():
        stem, _, ending = name.rpartition("_")
        Path(f"{stem}.{ending}").write_text(text)


def accelerator(value: str, before: str = "") -> str:
    return f"from accelerate import Accelerator\n{before}\naccelerator = Accelerator(mixed_precision={value})\n"


def row(tool: str) -> Provenance:
    [run] = link_project_runs(read_project("."), from_environment({}))
    return next(one for one in run.provenance() if one.tool == tool)


@pytest.mark.parametrize(
    ("value", "possible", "precision"),
    [
        ("'fp16' if a else 'no'", ["fp16", "fp32"], None),
        ("'bf16' if a else 'bf16'", ["bf16"], "bf16"),
        ("'bf16' if a else None", ["bf16"], "bf16"),
        ("'fp16' if a else None", ["fp16", "bf16"], None),
        ("choose()", [], None),
        ("None", ["bf16"], "bf16"),
    ],
)
def test_a_value_of_none_leaves_the_choice_to_the_file(value: str, possible: list[str], precision: str | None) -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=accelerator(value))
    found = row("accelerate")
    assert (found.possible, found.precision) == (possible, precision)


@pytest.mark.parametrize(
    "call",
    [
        "Accelerator(**{'mixed_precision': 'fp16' if a else 'no'})",
        "Accelerator(**dict(mixed_precision='fp16' if a else 'no'))",
        "options = {'log_with': None, 'mixed_precision': 'fp16' if a else 'no'}\nAccelerator(**options)",
    ],
)
def test_options_that_are_unpacked_from_a_table_are_read(call: str) -> None:
    code = f"from accelerate import Accelerator\n{call}\n"
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=code)
    assert row("accelerate").possible == ["fp16", "fp32"]


@pytest.mark.parametrize(
    ("arguments", "possible"),
    [
        ("fp16=choose()", ["fp16", "bf16"]),
        ("bf16=choose()", ["bf16"]),
        ("fp16=choose(), bf16=choose()", ["fp16", "bf16"]),
        ("fp16=choose(), bf16=True", ["bf16"]),
        ("fp16=choose(), bf16=False", ["fp16", "bf16"]),
        ("fp16=True if a else True", ["fp16"]),
        ("fp16=False if a else False", ["bf16"]),
    ],
)
def test_a_switch_of_transformers_that_is_off_leaves_the_choice_to_the_launcher(
    arguments: str, possible: list[str]
) -> None:
    code = f"from transformers import TrainingArguments\nTrainingArguments('o', {arguments})\n"
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=code)
    assert row("transformers").possible == possible


def test_a_switch_that_the_shell_fills_in_is_on_or_not_given() -> None:
    code = "import transformers\ntransformers.HfArgumentParser(transformers.TrainingArguments)\n"
    write(run_sh="torchrun train.py --bf16 $BF16\n", train_py=code)
    assert row("transformers").possible == ["bf16", "fp32"]


def test_lightnings_word_for_64_bits_is_a_value_of_its_own() -> None:
    code = "from lightning import Trainer\nTrainer(precision='64-true' if a else '32-true')\n"
    write(run_sh="PL_TRAINER_PRECISION=bf16-mixed python train.py\n", train_py=code)
    assert row("lightning").possible == ["fp64", "fp32"]


# -- the command ------------------------------------------------------------------------------------------------------


def doctor(*words: str) -> Result:
    return CliRunner().invoke(main.build(), ["doctor", *words], env={"COLUMNS": "100"}, prog_name="halfstep")


def report(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(doctor(".", "--json", *words).stdout)
    return found


OPEN = accelerator("choose()")
IMPOSSIBLE = accelerator("'fp16' if a else 'no'")


def test_a_file_that_a_computed_value_beats_is_a_warning_and_no_ready_project() -> None:
    import halfstep

    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=OPEN)
    found = report()
    [finding] = found["findings"]
    assert (finding["id"], finding["severity"]) == ("settings.decided_at_run_time", "warning")
    assert (finding["file"], finding["line"], finding["edits"]) == ("train.py", 3, [])
    status = found["status"]
    assert (status["aligned"], status["decided"], status["precision"]) == (True, False, None)
    assert status["at_run_time"] == [
        {"file": "train.py", "line": 3, "possible": [], "beats": ["accelerate.yaml"], "looked_up": []}
    ]
    assert found["runs"][0]["precision"] is None
    # As every other warning, it leaves the exit code at 0.
    assert doctor(".").exit_code == 0
    checked = halfstep.doctor(".", variables={})
    assert not checked.ready
    assert checked.precision is None


@pytest.mark.wording
def test_the_page_of_a_computed_value_names_its_line_what_it_beats_and_what_to_write() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=OPEN, train_yaml="precision: bf16\n")
    write(train_py=OPEN + "settings = 'train.yaml'\n")
    page = [line.rstrip() for line in doctor(".").output.splitlines()]
    assert page[0] == "not decided: train.py:3 decides at run time; it beats accelerate.yaml and train.yaml"
    assert page[2] == "  mixed precision: decided at run time: train.py:3"
    assert "  it beats mixed_precision: bf16  (accelerate.yaml, line 2)" in page
    assert "  it beats precision: bf16  (train.yaml, line 1)" in page
    assert '      Accelerator(mixed_precision="bf16")' in page
    assert "  or: delete the argument, so that accelerate.yaml decides" in page
    assert not any("everything asks" in line for line in page)


@pytest.mark.wording
def test_values_of_which_none_agrees_are_an_error() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=IMPOSSIBLE)
    found = report()
    assert [(f["id"], f["file"], f["line"]) for f in found["findings"]] == [("settings.ignored", "accelerate.yaml", 2)]
    assert "fp16 or fp32" in found["findings"][0]["evidence"]
    assert 'Accelerator(mixed_precision="bf16")' in found["findings"][0]["fix"]
    assert "None" not in found["findings"][0]["fix"]
    assert found["status"]["at_run_time"][0]["possible"] == ["fp16", "fp32"]
    assert doctor(".").exit_code == 78


def test_a_branch_with_a_word_that_the_program_does_not_know_is_an_error() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=accelerator("'fp61' if a else 'bf16'"))
    assert [f["id"] for f in report()["findings"] if f["severity"] == "error"] == ["settings.unreadable"]


def test_a_value_that_does_not_win_changes_nothing() -> None:
    code = "from lightning.fabric import Fabric\nFabric(precision=choose())\n"
    write(run_sh="LT_PRECISION=bf16-mixed python train.py\n", train_py=code)
    found = report()
    assert (found["findings"], found["status"]["precision"], found["status"]["final"]) == ([], "bf16", "ready")
    assert found["status"]["at_run_time"] == []


def test_a_variable_that_the_shell_fills_in_beats_the_code() -> None:
    code = "from lightning.fabric import Fabric\nFabric(precision='bf16-mixed')\n"
    write(run_sh="LT_PRECISION=$P python train.py\n", train_py=code)
    found = report()
    assert [(f["id"], f["file"]) for f in found["findings"]] == [("settings.decided_at_run_time", "run.sh")]
    assert found["status"]["at_run_time"][0]["beats"] == ["train.py"]


def test_a_variable_that_the_script_computes_is_a_computed_setting() -> None:
    code = "import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16' if a else 'no'\n"
    write(train_py=f"{code}from accelerate import Accelerator\nAccelerator()\n")
    found = report()
    assert found["findings"] == []
    assert [(value["file"], value["line"]) for value in found["status"]["at_run_time"]] == [("train.py", 2)]


def test_a_value_that_beats_settings_of_two_runs_is_one_finding() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, train_py=OPEN)
    write(run_sh=f"{ACCELERATE_RUN}accelerate launch --mixed_precision fp16 train.py\n")
    found = report()
    assert [f["id"] for f in found["findings"]] == ["settings.decided_at_run_time"]
    [value] = found["status"]["at_run_time"]
    assert value["beats"] == ["accelerate.yaml", "run.sh"]


@pytest.mark.parametrize(
    ("files", "possible", "place"),
    [
        ({"c_yaml": "fp16: false\nbf16: true\n"}, ["bf16"], "c.yaml:2"),
        ({"c_yaml": "training: {bf16: false, fp16: true}\n"}, ["fp16"], "c.yaml:1"),
        ({"c_yaml": "lr: 1\n"}, ["fp16", "bf16", "fp32"], None),
    ],
)
def test_switches_are_looked_up_by_their_leaf(files: dict[str, str], possible: list[str], place: str | None) -> None:
    code = "from transformers import TrainingArguments\nTrainingArguments('o', fp16=cfg.fp16, bf16=cfg.bf16)\n"
    write(train_py=f"cfg = load('c.yaml')\n{code}", **files)
    [value] = report()["status"]["at_run_time"]
    assert (value["possible"], value["looked_up"]) == (possible, [place] if place else [])


def test_a_flag_of_hydra_replaces_the_file_that_a_value_is_looked_up_in() -> None:
    Path("conf").mkdir()
    Path("conf/config.yaml").write_text("defaults: [_self_]\ntrainer:\n  precision: 16-mixed\n")
    code = "import hydra, lightning\n@hydra.main(config_path='conf', config_name='config')\ndef main(cfg):\n"
    code += "    lightning.Trainer(precision=cfg.trainer.precision)\n"
    write(train_py=code, run_sh="python train.py trainer.precision=bf16-mixed\n")
    status = report()["status"]
    assert (status["precision"], status["at_run_time"][0]["looked_up"]) == ("bf16", ["run.sh:1"])


def test_two_runs_of_which_one_is_computed_are_not_called_one_precision() -> None:
    write(one_py=accelerator("'bf16'"), two_py=accelerator("choose()"))
    status = report()["status"]
    assert (status["precision"], status["decided"]) == (None, True)
    assert [value["file"] for value in status["at_run_time"]] == ["two.py"]


def test_a_run_whose_value_is_computed_has_no_precision_of_its_files() -> None:
    write(c_yaml="precision: bf16-mixed\n")
    write(train_py="from lightning import Trainer\nfile = 'c.yaml'\nTrainer(precision=choose())\n")
    found = report()
    assert found["runs"][0]["precision"] is None
    assert found["status"]["precision"] is None


def test_a_value_that_only_seems_to_come_from_a_file_is_no_error() -> None:
    write(c_yaml="precision: 16-mixed\n", d_yaml="trainer: {amp: false}\n")
    code = "from lightning import Trainer\ncfg = load('c.yaml', 'd.yaml')\nTrainer(precision=cfg.precision)\n"
    write(train_py=code)
    assert [(f["id"], f["severity"]) for f in report()["findings"]] == [("settings.decided_at_run_time", "warning")]


def test_a_script_of_tests_decides_nothing() -> None:
    Path("tests").mkdir()
    write(accelerate_yaml=ACCELERATE_FILE, config_yaml="precision: bf16\n")
    Path("tests/test_launch.py").write_text(OPEN + "settings = 'config.yaml'\n")
    status = report()["status"]
    assert (status["decided"], status["at_run_time"]) == (True, [])


def test_no_edit_is_made_in_a_run_that_replaces_its_files() -> None:
    code = "import torch\nfile = 'c.yaml'\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\n"
    write(c_yaml="amp: false\n", train_py=code)
    assert [f["id"] for f in report("--fix", "--yes")["findings"]] == []
    assert Path("c.yaml").read_text() == "amp: True\n"
    write(c_yaml="amp: false\n", train_py=f"{code}{OPEN}")
    found = report("--fix", "--yes")
    assert {f["id"] for f in found["findings"]} == {"settings.precision_mismatch", "settings.decided_at_run_time"}
    assert Path("c.yaml").read_text() == "amp: false\n"
    assert found["refused"]


def test_a_file_of_tests_is_not_beaten() -> None:
    Path("tests").mkdir()
    Path("tests/config.yaml").write_text("precision: bf16\n")
    write(train_py=OPEN + "settings = 'tests/config.yaml'\n")
    assert report()["findings"] == []


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (OPEN, ("--fix",), 0),
        (OPEN, ("--fix", "--yes"), 0),
        (OPEN, ("--fix", "bf16"), 78),
        (OPEN, ("--fix", "fp32"), 78),
        (IMPOSSIBLE, ("--fix",), 78),
        (IMPOSSIBLE, ("--fix", "--yes"), 78),
        (IMPOSSIBLE, ("--fix", "bf16"), 78),
        (IMPOSSIBLE, ("--fix", "fp32"), 78),
    ],
)
def test_no_form_of_fix_calls_it_ready_or_writes_a_file_that_is_beaten(
    code: str, words: tuple[str, ...], exit_code: int
) -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_yaml="amp: false\n")
    write(train_py=code + "settings = 'train.yaml'\n")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    result = doctor(".", *words)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
    assert not result.output.startswith("ready")
    assert result.exit_code == exit_code


@pytest.mark.wording
def test_fix_with_a_name_says_which_line_to_write() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=OPEN)
    result = doctor(".", "--fix", "fp16")
    assert result.exit_code == 78
    assert "Accelerator(mixed_precision)=choose() (train.py, line 3) decides at run time" in result.stderr
    assert 'do: write there: Accelerator(mixed_precision="fp16")' in result.stderr


def test_fix_with_a_name_writes_the_file_that_the_value_is_looked_up_in() -> None:
    write(config_yaml="precision: 16-mixed\n")
    write(train_py="from lightning import Trainer\ncfg = load('config.yaml')\nTrainer(precision=cfg.precision)\n")
    found = report("--fix", "bf16")
    assert Path("config.yaml").read_text() == "precision: bf16-mixed\n"
    assert (found["status"]["final"], found["status"]["precision"]) == ("ready", "bf16")
    assert found["status"]["at_run_time"][0]["looked_up"] == ["config.yaml:1"]


def test_a_recipe_is_not_written_from_a_precision_that_only_the_run_knows() -> None:
    write(accelerate_yaml=ACCELERATE_FILE, run_sh=ACCELERATE_RUN, train_py=OPEN)
    result = doctor(".", "--write", "new.yaml")
    assert result.exit_code == 78
    assert not Path("new.yaml").exists()


def test_a_format_of_a_switch_that_is_off_is_not_what_the_script_asks_for() -> None:
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--amp', action='store_true')\n"
    write(train_py=f"{parser}p.add_argument('--amp-dtype', default='bfloat16')\n", run_sh="python train.py\n")
    assert report()["status"]["precision"] == "fp32"
    write(run_sh="python train.py --amp\n")
    assert report()["status"]["precision"] == "bf16"
