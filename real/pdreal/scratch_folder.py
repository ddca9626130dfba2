"""A folder below TMPDIR that is gone when its process is: what a killed one left, the next one removes.

The owner holds a lock on a file in it. The kernel takes the lock back however the owner ends, also where TMPDIR is
shared by containers that do not see each other's processes.
"""

import fcntl
import os
import shutil
from pathlib import Path
from tempfile import gettempdir, mkdtemp

_PREFIX = "pdreal-"
_LOCK = "owner.lock"


class ScratchFolder:
    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(mkdtemp(prefix=_PREFIX))
        unlocked = self.path / "new.lock"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # nobody ever sees it unlocked while its owner lives

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Folders whose owner is certainly gone; others, and what is no such folder, stay as they are."""
    for lock in Path(gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue  # its owner lives, or it is another user's, or just gone
