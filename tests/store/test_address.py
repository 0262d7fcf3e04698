"""Addresses of object stores: what is one, what is refused, and that plain paths load nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.errors import MissingExtra, WrongUse
from halfstep.store import address
from halfstep.store.address import StoreAddress, has_scheme, parse_address


def test_an_address_has_a_scheme_a_bucket_and_a_prefix() -> None:
    assert parse_address("s3://bkt/a/b/", "x") == StoreAddress("s3", "bkt", "a/b")
    assert str(parse_address("gs://bkt", "x")) == "gs://bkt"
    assert [has_scheme(text) for text in ("s3://b", "file:///a", "data/images", "C:\\data", "a:b", "/s3://b")] == [
        *(True, True),
        *(False, False, False, False),
    ]


@pytest.mark.parametrize(
    "text",
    ["http://bkt/a", "s3://", "s3:///a", "s3://b", "s3://bkt/../a", "s3://bkt/a//b", "s3://bkt/a\nb", "bkt/a", ""],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(WrongUse):
        parse_address(text, "checkpoint.remote")


@pytest.mark.parametrize("text", ["s3://KEY:CANARY@bkt/a", "s3://bkt/a?X-Amz-Signature=CANARY", "s3://bkt/a#CANARY"])
def test_credentials_in_an_address_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(WrongUse) as caught:
        parse_address(text, "checkpoint.remote")
    assert "CANARY" not in str(caught.value)
    assert "KEY" not in str(caught.value).replace("AWS_ACCESS_KEY_ID", "").replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.wording
def test_without_the_package_the_line_to_type_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        address.check_obstore_installed()
    assert caught.value.do == "pip install 'halfstep[store]'"


def test_a_plain_path_loads_neither_obstore_nor_the_modules_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, halfstep.runs.fit, halfstep.cli.doctor\n"
        "print([name for name in sys.modules if name.startswith(('obstore', 'halfstep.train.remote', "
        "'halfstep.store.objects', 'halfstep.store.process'))])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.strip() == "[]"
