"""`python -m halfstep` is the `halfstep` command."""

from halfstep.cli.main import main

main()
