"""Check precision settings before a run: the source of each, and which of them conflict."""

from halfstep.callable_package import make_package_callable

make_package_callable(__name__, "halfstep.doctor.report")
