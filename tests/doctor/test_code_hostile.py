"""Files that would do harm if they were imported or executed, and files that Python cannot read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.doctor.code import check_code
from halfstep.doctor.code.checking import LARGEST, MOST

# Words without which a file is not even parsed.
READ = "import torch  # autocast GradScaler backward float16\n"
HARM = "open(MARKER, 'w').write('executed')"


def hostile() -> dict[str, bytes]:
    """Name and content; MARKER in the content is replaced by the path of a file that must not appear."""
    texts = {
        "plain.py": f"{READ}{HARM}\n",
        "torch.py": f"{READ}{HARM}\n",
        "conftest.py": f"{READ}{HARM}\n",
        "sitecustomize.py": f"{READ}{HARM}\n",
        "setup.py": f"{READ}from setuptools import setup\n{HARM}\nsetup()\n",
        "__init__.py": f"{READ}{HARM}\n",
        "f_string.py": f"{READ}x = f\"{{__import__('os').system('touch ' + MARKER)}}\"\n",
        "decorator.py": f"{READ}@(lambda f: {HARM})\ndef forward(): pass\n",
        "default.py": f"{READ}def step(x={HARM}): pass\n",
        "metaclass.py": f"{READ}class M(type):\n    {HARM}\nclass A(torch.autograd.Function, metaclass=M): pass\n",
        "annotation.py": f"{READ}scaler: {HARM} = torch.amp.GradScaler({HARM})\n",
        "dtype.py": f"{READ}with torch.autocast('cuda', dtype=[{HARM}]):\n    loss.backward()\n",
        "eval.py": f"{READ}eval(\"{HARM}\")\nexec('import os')\n",
        "coding.py": f"# -*- coding: unicode_escape -*-\n{READ}# \\x0a{HARM}\n",
        "walrus.py": f"{READ}if (scaler := {HARM}): scaler.scale(loss).backward()\n",
        "null.py": f"{READ}x = 1\x00\n",
        "surrogate.py": f"{READ}x = '\\ud800'\n",
        "parentheses.py": f"{READ}x = {'(' * 50_000}1{')' * 50_000}\n",
        "minus.py": f"{READ}x = {'-' * 100_000}1\n",
        "sum.py": f"{READ}x = {'1+' * 100_000}1\n",
        "attributes.py": f"{READ}x = a{'.b' * 100_000}()\n",
        "calls.py": f"{READ}x = a{'()' * 50_000}\n",
        "lambdas.py": f"{READ}x = {'lambda: ' * 20_000}1\n",
        "indents.py": READ + "".join(f"{' ' * n}if x:\n" for n in range(2_000)) + " " * 2_000 + "pass\n",
        "elifs.py": f"{READ}if x: pass\n" + "elif x: pass\n" * 5_000,
        "scalers.py": READ + "s.scale(l).backward()\nclip(p)\ns.unscale_(o)\ns.step(o)\ns.update()\n" * 2_000,
        "names.py": f"{READ}with torch.autocast('cuda'):\n    " + "; ".join(f"f{n}(f{n})" for n in range(20_000)),
        "bindings.py": READ + "torch.autocast('cuda')\nself.x = nn.BCELoss()\nself.x(a)\n" * 20_000,
        "functions.py": READ + "def f(): f()\nwith torch.autocast('cuda'): f()\n" * 140,
        "huge.py": READ + "x = 1\n" * 400_000,
    }
    found = {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
    found["latin.py"] = READ.encode() + b"x = '\xe9\xff'\n"
    found["binary.py"] = READ.encode() + bytes(range(256)) * 10
    found["utf16.py"] = READ.encode("utf-16")
    return found


CHECK = """
import sys, time
from pathlib import Path
from halfstep.doctor.code import check_file
from halfstep.doctor.code.checking import import_rules
import_rules()
FORBIDDEN = ("exec", "import", "subprocess.Popen", "os.system", "os.exec", "os.fork", "socket.connect", "os.remove",
             "os.rename", "os.mkdir", "ctypes.dlopen", "marshal.loads", "pickle.find_class")
def watch(event, given):
    writes = event == "open" and isinstance(given[1], str) and given[1].strip("rb")
    if event in FORBIDDEN or writes:
        print("DID", event, str(given)[:200], flush=True)
folder = Path(sys.argv[1])
names = sorted(path.name for path in folder.iterdir())
sys.addaudithook(watch)
for name in names:
    start = time.perf_counter()
    found = check_file(folder, name)
    print(name, round(time.perf_counter() - start, 2), [finding.id for finding in found], flush=True)
assert "torch" not in sys.modules
"""


def test_nothing_is_imported_or_executed_and_nothing_escapes(tmp_path: Path) -> None:
    marker, folder, outside = tmp_path / "marker", tmp_path / "project", tmp_path / "outside.py"
    folder.mkdir()
    content = hostile()
    for name, text in content.items():
        (folder / name).write_bytes(text.replace(b"MARKER", repr(str(marker)).encode()))
    outside.write_text(f"{READ}scaler = torch.amp.GradScaler('cuda')\n")
    (folder / "link_out.py").symlink_to(outside)
    (folder / "link_to_itself.py").symlink_to(folder / "link_to_itself.py")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(folder)], capture_output=True, text=True, timeout=120, cwd=folder.parent
    )
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr[-2000:]
    assert "DID" not in done.stdout, done.stdout
    lines = {line.split(" ", 1)[0]: line for line in done.stdout.splitlines()}
    assert set(lines) == {path.name for path in folder.iterdir()}
    assert len(lines) >= 25
    assert not marker.exists()
    print(f"{len(lines)} hostile files in {seconds:.1f} s")
    for name in ("null.py", "parentheses.py", "sum.py", "latin.py", "huge.py", "link_out.py", "pipe.py", "folder.py"):
        assert "code.unread" in lines[name], lines[name]


def test_the_watch_can_fail(tmp_path: Path) -> None:
    """The same hook sees a file that is run."""
    (tmp_path / "plain.py").write_text(READ)
    code = CHECK.replace("found = check_file(folder, name)", "found = []; exec((folder / name).read_text()[:0])")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "DID exec" in done.stdout


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{READ}x = (\n", "SyntaxError"),
        (f"{READ}print 'of Python 2'\n", "SyntaxError"),
        (f"{READ}x = 1\x00", "null"),
        (READ + "x = 1\n" * LARGEST, "characters"),
        (READ + "scaler.scale(loss).backward()\n" * (MOST + 1), "calls"),
    ],
)
def test_what_cannot_be_read_is_a_note(text: str, why: str) -> None:
    [note] = check_code("a.py", text)
    assert (note.id, note.severity, note.file) == ("code.unread", "note", "a.py")
    assert why in note.evidence
    assert note.evidence.isprintable()


def test_an_invalid_escape_is_no_concern_here() -> None:
    assert check_code("a.py", READ + "x = '\\d'\n") == []
