"""The command line."""

import os

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them costs a tenth of the time to start

from pdsim.garbage import search_seldom

search_seldom()  # imports make much, and no garbage

from pdsim.cli.app import main  # noqa: E402

__all__ = ["main"]
