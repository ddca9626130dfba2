"""A folder below TMPDIR that is gone when its process is: what a killed one left, the next one removes.

The owner holds a lock on a file in it. The kernel takes the lock back however the owner ends, also where TMPDIR is
shared by containers that do not see each other's processes.
"""

from contextlib import ExitStack
from pathlib import Path

from pdsim.files import temporary_folder

_PREFIX = "pdreal-"


class ScratchFolder:
    def __init__(self) -> None:
        self._open = ExitStack()
        self.path = self._open.enter_context(temporary_folder(_PREFIX))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        self._open.close()
