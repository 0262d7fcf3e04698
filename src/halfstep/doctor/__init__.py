"""Check precision settings before a run: the source of each, and which of them conflict."""

from halfstep.callable_package import make_callable

make_callable(__name__, "halfstep.doctor.report")
