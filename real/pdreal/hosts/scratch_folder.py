"""A folder below TMPDIR that is removed at the end of its context, or by `cleanup`. If the process that owns the folder
is killed, the next ScratchFolder that the same user makes below this TMPDIR removes the folder.

The owner holds a lock on a file in the folder. The kernel releases the lock however the owner ends, also if containers
share TMPDIR and do not see each other's processes.
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
