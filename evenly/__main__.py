"""`python -m evenly`: the command line."""

from evenly.cli.main import main

main()
