"""Rules about precision in Python code. Each module here is a rule: the folder is the registry.

A module has `look(facts)`, which yields findings, each with its id, its line, its fix, and the edits that remove it
where a program can make them.
"""
