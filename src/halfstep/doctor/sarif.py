"""Findings as SARIF 2.1.0, which GitHub's code scanning and editors read. Imports no torch."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from urllib.parse import quote

from halfstep._version import __version__
from halfstep.doctor.located import LocatedFinding

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def convert_to_sarif(findings: Sequence[LocatedFinding], otherwise: str, folder: str = "") -> dict[str, object]:
    """Return the findings as one run of a tool.

    `otherwise` is the file of those that have none, as a variable's; `folder` is the project's place in the repository.
    """
    ids = list(dict.fromkeys(finding.id for finding in findings))
    driver = {
        "name": "halfstep doctor",
        "semanticVersion": __version__,
        "rules": [_build_sarif_rule(name, next(f for f in findings if f.id == name)) for name in ids],
    }
    results = [_build_sarif_result(finding, ids.index(finding.id), otherwise, folder) for finding in findings]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _build_sarif_rule(name: str, example: LocatedFinding) -> dict[str, object]:
    words = name.replace(".", ": ").replace("_", " ")
    return {
        "id": name,
        "name": "".join(part.capitalize() for part in name.replace(".", "_").split("_")),
        "shortDescription": {"text": words},
        "fullDescription": {"text": words},
        "help": {"text": "docs/doctor.md lists every finding, its evidence and its fix."},
        "defaultConfiguration": {"level": example.severity},
    }


def _build_sarif_result(finding: LocatedFinding, rule: int, otherwise: str, folder: str) -> dict[str, object]:
    inside = bool(finding.line) or "/" in finding.file or "." in finding.file
    file = posixpath.normpath(posixpath.join(folder, finding.file if inside else otherwise))
    place = {
        "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": finding.line or 1},
    }
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": f"{finding.evidence}\n{finding.fix}"},
        "locations": [{"physicalLocation": place}],
        # Code scanning follows a finding through commits by this: the line may move.
        "partialFingerprints": {"findingAndFile/v1": f"{finding.id}:{file}"},
    }
