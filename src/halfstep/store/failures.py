"""Tell the failures of requests to a store apart, by the status and the code of the answer. Imports no obstore."""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

UNREACHABLE, DENIED, MISSING, CHANGED, REFUSED = "unreachable", "denied", "missing", "changed", "refused"
SHORT, NO_RANGES, ODD_KEY, SETTING = "short", "no-ranges", "odd-key", "setting"
PASSING = (UNREACHABLE, SHORT)
"""The kinds of failure that another request may not have."""
ONCE = (DENIED, REFUSED)
"""The kinds of failure that are requested again once: a store may refuse by mistake while it changes servers."""


class Failure(NamedTuple):
    """A failure of a request."""

    kind: str
    words: str
    """What the object does or what happens to it, after its address."""
    do: str = ""


_EXPORT = 'eval "$(aws configure export-credentials --format env)"'
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or attach a role with Get, Put, Delete and List"
_BUCKET = "check the bucket and the prefix, and AWS_ENDPOINT_URL for a store that is not Amazon's"
KINDS = {
    UNREACHABLE: Failure(
        UNREACHABLE,
        "cannot be reached: the store does not answer, or answers with errors",
        "check the name of the bucket, the network, AWS_ENDPOINT_URL and proxy variables such as HTTPS_PROXY",
    ),
    DENIED: Failure(DENIED, "is refused: the credentials are missing, expired or lack the permission", _KEYS),
    MISSING: Failure(MISSING, "does not exist", _BUCKET),
    CHANGED: Failure(CHANGED, "was replaced while it was read or written"),
    REFUSED: Failure(
        REFUSED,
        "is refused: the store does not accept the request",
        "check AWS_REGION, AWS_ENDPOINT_URL and the name of the bucket",
    ),
    SHORT: Failure(SHORT, "was answered with a different number of bytes than requested"),
    ODD_KEY: Failure(
        ODD_KEY,
        "holds an object that cannot be listed: its key has an empty part, such as a//b",
        "rename the object, or use an address below which there is none",
    ),
    NO_RANGES: Failure(
        NO_RANGES,
        "was answered with the whole object instead of a range: this store does not answer ranges with 206",
        "use a store that answers ranges; halfstep doctor ADDRESS checks it",
    ),
    SETTING: Failure(
        SETTING,
        "cannot be opened: a variable of the store is missing or wrong",
        "set AWS_ACCESS_KEY_ID together with AWS_SECRET_ACCESS_KEY, and check the other variables that start with AWS_",
    ),
}
NO_CREDENTIALS = Failure(
    DENIED,
    "is refused: there are no credentials in the environment, and no role on this machine answers",
    f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles of ~/.aws are not read: {_EXPORT}; for a public "
    "bucket, set AWS_SKIP_SIGNATURE=true",
)
_REGION = Failure(REFUSED, "is refused: the bucket is in another region", "set AWS_REGION to the region of the bucket")
_FULL = Failure(DENIED, "is refused: the store is full, or a quota is used up", "make room there")
_CODES = {
    "ExpiredToken": Failure(
        DENIED,
        "is refused: the token has expired",
        f"set new credentials and repeat the command: {_EXPORT}; those of a role are renewed",
    ),
    "RequestTimeTooSkewed": Failure(
        DENIED,
        "is refused: the clock of this machine differs from that of the store by more than 15 minutes",
        "set the clock, such as with timedatectl set-ntp true",
    ),
    "InvalidAccessKeyId": Failure(
        DENIED,
        "is refused: the store does not know AWS_ACCESS_KEY_ID",
        "check it, and AWS_ENDPOINT_URL for a store that is not Amazon's",
    ),
    "SignatureDoesNotMatch": Failure(
        DENIED,
        "is refused: AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID",
        "set both again",
    ),
    "AccessDenied": Failure(
        DENIED,
        "is refused: the credentials lack the permission",
        "give them Get, Put, Delete and List for the bucket; for samples, Get and List",
    ),
    "NoSuchBucket": Failure(MISSING, "does not exist: the store has no bucket of this name", _BUCKET),
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": _FULL,
    "InsufficientStorage": _FULL,
    "XMinioStorageFull": _FULL,
    "RequestTimeout": KINDS[UNREACHABLE],
}
"""Codes in answers of S3: the texts of answers are not passed on."""
_NETWORK = "check AWS_ENDPOINT_URL, the network and proxy variables such as HTTPS_PROXY, and try again"
_CONNECTIONS = {
    "dns error": Failure(UNREACHABLE, "cannot be reached: the name of its server is not known", _NETWORK),
    "ConnectionRefused": Failure(UNREACHABLE, "cannot be reached: nothing listens at the port of its server", _NETWORK),
    "InvalidCertificate": Failure(
        REFUSED,
        "cannot be reached: the certificate of its server is not trusted",
        "name the file of the authority that signed it in SSL_CERT_FILE",
    ),
    "InvalidContentType": Failure(
        REFUSED,
        "cannot be reached: its server does not speak TLS at this port",
        "write http:// in AWS_ENDPOINT_URL, or give the port for https://",
    ),
}
"""Failures of a connection, by a word in the error of the library."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
# 409: another request for the key is in progress, perhaps an earlier one of ours; 501: a header that it does not know.
_STATUSES = {401: DENIED, 403: DENIED, 404: MISSING, 408: UNREACHABLE, 409: UNREACHABLE, 412: CHANGED, 429: UNREACHABLE}
_ROLE = "169.254.169.254"
"""The address at which a machine in a cloud has the credentials of its role."""
_SOURCES = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    *("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_METADATA_ENDPOINT", "AWS_SKIP_SIGNATURE"),
)
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_IN_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")


def classify_store_error(error: Exception) -> Failure:
    """Return the failure that an error of obstore stands for."""
    text = str(error)
    if "redirect without LOCATION" in text:
        return _REGION
    if _ROLE in text:
        return NO_CREDENTIALS
    if type(error).__name__ == "InvalidPathError":
        return KINDS[ODD_KEY]
    found = _STATUS.search(text)
    if found is None:
        for word, failure in _CONNECTIONS.items():
            if word in text:
                return failure
        return KINDS[MISSING if isinstance(error, FileNotFoundError) else UNREACHABLE]
    code, status = _CODE.search(text), int(found[1])
    if code is not None and code[1] in _CODES:
        return _CODES[code[1]]
    return KINDS[_STATUSES.get(status, UNREACHABLE if status >= 500 and status != 501 else REFUSED)]


def find_environment_failure(scheme: str) -> Failure | None:
    """Return why the variables of the environment cannot lead to a store; None if they may.

    Variables without a value are removed: for obstore, they are values.
    """
    for name in [name for name, value in os.environ.items() if name.startswith("AWS_") and not value.strip()]:
        del os.environ[name]
    if scheme != "s3":
        return None
    for name in ENDPOINTS:
        value = os.environ.get(name, "http://")
        if not value.startswith(("http://", "https://")) or not value.isprintable() or " " in value:
            return Failure(SETTING, f"cannot be opened: {name} is not an address", f"write {name}=https://HOST:PORT")
    for name in _IN_HEADERS:
        value = os.environ.get(name, "")
        if not value.isprintable() or value != value.strip():
            return Failure(
                SETTING,
                f"cannot be opened: {name} starts or ends with a space or a line break",
                f"set {name} without it",
            )
    if not any(name in os.environ for name in _SOURCES):
        try:
            socket.create_connection((_ROLE, 80), 2.0).close()
        except OSError:
            return NO_CREDENTIALS
    return None
