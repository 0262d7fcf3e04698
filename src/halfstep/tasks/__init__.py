"""The jobs: each file is a task. Files that begin with an underscore are not."""
