"""One page to look at: reports of runs, benches and plans, from plain data."""

from halfstep.callable_package import make_package_callable

make_package_callable(__name__, "halfstep.report.written")
