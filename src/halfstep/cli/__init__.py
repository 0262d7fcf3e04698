"""The command line: one file a command, found by listing this folder."""
