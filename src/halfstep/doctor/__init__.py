"""Check precision settings before a run: the source of each, and which of them conflict."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.doctor.report import DoctorReport


class _CallablePackage(ModuleType):
    """The package is what `halfstep.doctor` names once a part of it is imported; it is the function as well."""

    def __call__(
        self, folder: str | os.PathLike[str] = ".", *, variables: Mapping[str, str] = os.environ
    ) -> DoctorReport:
        from halfstep.doctor.report import doctor

        return doctor(folder, variables=variables)


sys.modules[__name__].__class__ = _CallablePackage
