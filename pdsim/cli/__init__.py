"""The command line."""

import os

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them costs a tenth of the time to start

from pdsim.cli.app import main

__all__ = ["main"]
