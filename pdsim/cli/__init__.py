"""The command line."""

from pdsim.cli.app import main

__all__ = ["main"]
