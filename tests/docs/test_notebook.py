"""A notebook, executed and converted to HTML as Jupyter does it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Chromium

pytestmark = pytest.mark.full
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
nbconvert = pytest.importorskip("nbconvert")

SHORT = '{"train.epochs": 1, "data.samples": 16, "train.batch_size": 4, "run.dir": "runs/first"}'
CELLS = {
    "import": f"import torch\nimport halfstep\n\nshort = {SHORT}",
    "estimate": 'halfstep.estimate("segmentation_tiny", device="24GB")',
    "bench": 'halfstep.bench("segmentation_tiny", seeds=1, settings=["train.steps=2", "data.samples=16"])',
    "doctor": """
from pathlib import Path

Path("project").mkdir(exist_ok=True)
Path("project/train.py").write_text('''import lightning as L
trainer = L.Trainer(precision="16-mixed")
''')
Path("project/config.yaml").write_text("precision: bf16\\nlearning_rate: 0.1\\n")
halfstep.doctor("project")
""",
    "skip": """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stepper = halfstep.Stepper(model, optimizer, precision="fp32")
stepper.step(lambda model, batch: model(batch).square().mean(), torch.full((2, 4), float("nan")))
""",
    "fit": 'halfstep.fit("segmentation_tiny", settings=short)',
    "fit again": 'halfstep.fit("segmentation_tiny", settings=short)',
    "other settings": """
try:
    halfstep.fit("segmentation_tiny", settings={**short, "optimizer.lr": 0.5})
except halfstep.HalfstepError as error:
    print(error)
""",
    "mistake": 'halfstep.fit("segmentation_tiny", settings={**short, "optimizer.lr": 0.5})',
    "runs": 'halfstep.runs("runs")',
    "verify": 'halfstep.verify("runs/first", resume_steps=1)',
    "export": 'halfstep.export("runs/first", overwrite=True)',
    "failed steps": 'halfstep.failed_steps("runs/first")',
    "report": 'halfstep.report("runs/first")',
    "load": 'halfstep.load("runs/first")',
    "choice": "halfstep.choose_precision()",
    "command": "!halfstep train segmentation_tiny train.epochs=1 data.samples=16 run.dir=runs/second",
    "names": "print(*dir(halfstep))",
}
PAGES = (
    "estimate",
    "bench",
    "doctor",
    "skip",
    "fit",
    "fit again",
    "verify",
    "export",
    "failed steps",
    "report",
    "runs",
)


def executed(folder: Path) -> Any:
    """Return the notebook with its outputs, executed in the folder."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS.values()]
    notebook.cells[list(CELLS).index("mistake")].metadata["tags"] = ["raises-exception"]
    client = nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def as_html(notebook: Any, theme: str) -> str:
    """Return the notebook as `jupyter nbconvert --to html --theme THEME` writes it."""
    exporter = nbconvert.HTMLExporter(theme=theme)
    # Its scripts come from the network, and nothing of this notebook needs them.
    exporter.require_js_url = exporter.mathjax_url = exporter.jquery_url = exporter.mermaid_js_url = ""
    html: str = exporter.from_notebook_node(notebook)[0]
    return html


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("notebook")
    found = executed(folder)
    for theme in ("light", "dark"):
        (folder / f"{theme}.html").write_text(as_html(found, theme))
    found.metadata["folder"] = str(folder)
    return found


def outputs(notebook: Any, name: str) -> list[Any]:
    found: list[Any] = notebook.cells[list(CELLS).index(name)].outputs
    return found


def printed(notebook: Any, name: str) -> str:
    return "".join(one.get("text", "") for one in outputs(notebook, name))


@pytest.mark.parametrize("name", PAGES)
def test_a_result_is_shown_once_as_html_and_as_text(notebook: Any, name: str) -> None:
    shown = [one for one in outputs(notebook, name) if one.output_type == "execute_result"]
    assert len(shown) == 1
    assert '<div class="halfstep">' in shown[0].data["text/html"]
    assert "<svg" in shown[0].data["text/html"] or name not in ("bench", "estimate", "fit")
    # A dataclass would be shown by its fields; a StepReport is a tuple, for which IPython has its own text.
    assert name == "skip" or not re.match(r"\w+\(\w+=", shown[0].data["text/plain"])


def test_the_same_fit_again_trains_nothing(notebook: Any) -> None:
    assert "nothing was trained" in printed(notebook, "fit again")
    texts = [outputs(notebook, name)[-1].data["text/plain"] for name in ("fit", "fit again")]
    assert texts[0] == texts[1]


def test_advice_is_for_python(notebook: Any) -> None:
    assert "new=True" in printed(notebook, "other settings")
    assert "--" not in printed(notebook, "other settings")


def test_an_error_shows_the_cell_and_the_message_alone(notebook: Any) -> None:
    error = outputs(notebook, "mistake")[-1]
    assert error.ename == "FolderTaken"
    assert len(error.traceback) == 2
    assert "halfstep.fit(" in error.traceback[0]


def test_a_command_prints_plain_lines(notebook: Any) -> None:
    text = printed(notebook, "command")
    assert "\x1b" not in text
    assert "\r" not in text.replace("\r\n", "\n")
    assert "Finished after" in text
    assert len(text.splitlines()) < 60


def test_public_names_only(notebook: Any) -> None:
    names = printed(notebook, "names").split()
    assert {"export", "replay", "verify"} <= set(names)
    assert [name for name in names if name.startswith("_")] == ["__version__"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_the_notebook_and_colors_follow_its_theme(
    notebook: Any, theme: str, browser: Chromium
) -> None:
    # The system's theme is the other one.
    with browser.open(Path(notebook.metadata["folder"]) / f"{theme}.html", dark=theme == "light") as page:
        wider = "[...document.querySelectorAll('.halfstep')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert page.evaluate(wider) == 0
        colors = page.evaluate("getComputedStyle(document.querySelector('.halfstep')).getPropertyValue('--page')")
        assert colors.strip() == {"light": "#fbfbfa", "dark": "#111418"}[theme]
