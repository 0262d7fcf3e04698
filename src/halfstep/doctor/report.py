"""`halfstep.doctor(folder)`: the check of a project. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from halfstep.doctor.project_check import check_project
from halfstep.doctor.project_page import ProjectReport


def doctor(folder: str | os.PathLike[str] = ".", *, variables: Mapping[str, str] = os.environ) -> ProjectReport:
    """Check a project's settings, scripts, notebooks and checkpoints; nothing in the folder is imported or run.

    Args:
        folder: The folder of a project.
        variables: The environment that a run would have.

    Returns:
        The verdict (`ready`, `precision`), the findings with their places and fixes, and all settings.

    Raises:
        WrongUse: There is no such folder.
    """
    return check_project(os.path.expanduser(folder), variables)
