"""Start, load, export and replay runs: what the commands and the Python API call."""

from halfstep.callable_package import make_package_callable

make_package_callable(__name__, "halfstep.runs.listing")
