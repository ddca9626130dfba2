"""Runs pdreal's command line, for `python -m pdreal`."""

from pdreal.cli import main

main()
