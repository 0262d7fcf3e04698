"""Packages that are called as the function of the API that has their name."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """What `halfstep.doctor` names once a part of the package is imported: the package, and the function as well."""

    home: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(import_module(self.home), self.__name__.rpartition(".")[2])(*args, **options)


def make_package_callable(package: str, home: str) -> None:
    """Let calls of a package call the function of its name in the module `home`."""
    module = sys.modules[package]
    module.__class__ = _CallablePackage
    module.home = home  # type: ignore[attr-defined]
