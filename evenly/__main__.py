"""`python -m evenly`: the command line."""

from evenly.cli.main import process

process()
