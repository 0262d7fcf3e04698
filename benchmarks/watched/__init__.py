"""Loops as people write them, without halfstep, for benchmarks/watch.py. The folder is the registry: `NAME.txt`.

A file is a complete script of a few steps. A line `#@TAG code` becomes `code`, in the same line, where TAG is chosen:
`watch` (the line of halfstep), `half` and others of `# variants:` (the loop in another precision), and names of plants.
`#@TAG -> OPERATION: code` is the line and the operation that a plant must be named with; `data NAME` in place of an
operation is a variable that holds bad values. `# result: NAMES` lists what is compared with and without the watch.
"""
