"""The failures of requests by their cause: what the store answers, and what the environment has, is named in words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from halfstep.errors import StoreFailed
from tests.store.conftest import InStore
from tests.support.commands import Command
from tests.support.store_proxy import Planned

PATIENCE = 20.0
IN_CI = ("301 PermanentRedirect", "400 ExpiredToken", "404 NoSuchBucket", "no address", "none")
ANSWERS = {
    "301 PermanentRedirect": ("refused", "another region"),
    "400 AuthorizationHeaderMalformed": ("refused", "another region"),
    "400 InvalidRequest": ("refused", "does not accept"),
    "405 MethodNotAllowed": ("refused", "does not accept"),
    "400 ExpiredToken": ("denied", "token has expired"),
    "403 ExpiredToken": ("denied", "token has expired"),
    "403 RequestTimeTooSkewed": ("denied", "clock"),
    "403 InvalidAccessKeyId": ("denied", "does not know"),
    "403 SignatureDoesNotMatch": ("denied", "does not belong"),
    "403 AccessDenied": ("denied", "lack the permission"),
    "404 NoSuchBucket": ("missing", "no bucket of this name"),
    "403 QuotaExceeded": ("denied", "full"),
}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.full) for name in names]


@pytest.mark.wording
@pytest.mark.parametrize("answer", cases(ANSWERS))
def test_what_does_not_pass_is_named_at_once(in_store: InStore, answer: str) -> None:
    in_store("put", key="data", size=10)
    for call, request in {
        "text": {"key": "data"},
        "keys": {},
        "create": {"key": "new", "text": "mine"},
        "put": {"key": "other", "size": 10},
    }.items():
        in_store.proxy.seen.clear()
        in_store.proxy.plan[:] = [Planned("*", f"{answer}*")]
        with pytest.raises(StoreFailed) as caught:
            in_store(call, patience=PATIENCE, **request)
        in_store.proxy.plan.clear()
        if call == "text" and answer.startswith("404"):
            assert (caught.value.kind, "does not exist" in caught.value.given) == ("missing", True)
            continue  # HEAD, with no body: the object, or its bucket
        kind, words = ANSWERS[answer]
        assert caught.value.kind == kind, call
        assert words in caught.value.given, call
        assert len(in_store.proxy.seen) <= 8, "it is asked for again once, not for all of the patience"


@pytest.mark.full
@pytest.mark.parametrize("answer", ["400 RequestTimeout", "408 RequestTimeout", "409 ConditionalRequestConflict"])
def test_what_passes_is_repeated(in_store: InStore, answer: str) -> None:
    in_store.proxy.plan[:] = [Planned("PUT", answer)] * 3
    assert in_store("create", key="commit", text="mine", patience=PATIENCE)
    assert in_store("text", key="commit") == "mine"
    assert not in_store.proxy.plan


@pytest.mark.parametrize("condition", ["if-none-match", "if-match"])
def test_a_store_that_refuses_conditions_does_not_honor_them(in_store: InStore, condition: str) -> None:
    in_store.proxy.plan[:] = [Planned("PUT", "501 NotImplemented*", condition)]
    assert in_store("conditions", patience=PATIENCE) is False


def without_credentials() -> None:
    from halfstep.store import failures

    failures._ROLE = "127.0.0.1"  # nothing answers at port 80


ENVIRONMENTS = {
    "no address": ({"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "setting", "AWS_ENDPOINT_URL is not an address"),
    "a space": ({"AWS_ENDPOINT_URL": "http://a b:9000"}, "setting", "AWS_ENDPOINT_URL is not an address"),
    "a line break": ({"AWS_SECRET_ACCESS_KEY": "CANARY\n"}, "setting", "AWS_SECRET_ACCESS_KEY starts or ends"),
    "half": ({"AWS_SECRET_ACCESS_KEY": ""}, "setting", "missing or wrong"),
    "none": ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "denied", "no credentials"),
}


@pytest.mark.wording
@pytest.mark.parametrize("name", cases(ENVIRONMENTS))
def test_a_variable_that_is_wrong_is_named(in_store: InStore, name: str) -> None:
    variables, kind, words = ENVIRONMENTS[name]
    code, out, err = Command(
        "doctor", in_store.address, "--json", environment=variables, before=without_credentials
    ).ended()
    assert code == 74, err
    assert (json.loads(out)["kind"], words in json.loads(out)["problem"]) == (kind, True), out
    assert "CANARY" not in out + err


@pytest.mark.full
def test_variables_without_a_value_are_none(in_store: InStore) -> None:
    blank = {"AWS_SESSION_TOKEN": "", "AWS_ENDPOINT_URL_S3": " ", "AWS_DEFAULT_REGION": "", "AWS_PROFILE": ""}
    code, out, err = Command("doctor", in_store.address, "--json", environment=blank).ended()
    assert (code, err) == (0, ""), out
