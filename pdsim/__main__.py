"""Runs pdsim's commands as `python -m pdsim`."""

from pdsim.cli import main

main()
