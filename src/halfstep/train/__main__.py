"""`python -m halfstep.train RECIPE` is `halfstep train RECIPE`."""

import runpy
import sys

# By name, as a shell would start it: this layer imports nothing above it.
sys.argv[1:1] = ["train"]
runpy.run_module("halfstep", run_name="__main__", alter_sys=True)
