"""Writes files completely or not at all, and removes only files that this program wrote.

A symbolic link is never followed when a file is written or removed: the link itself is replaced, or refused.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISREG
from tempfile import gettempdir, mkdtemp

from pdsim.inputs import InputError
from pdsim.signals import signals_deferred

LOCK = "owner.lock"
"""Name of a file in a folder. As long as the file is locked, the program that owns the folder runs."""
NEW = ".new-"
"""Beginning of the names of folders whose files have not been moved to their final places."""


class ForeignFileError(InputError):
    """Raised if there is a file or folder of another program where this program would write or remove one."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it. If the program is killed, either the old or the new file is
    there, and complete.

    Devices such as /dev/stdout are written directly. Missing folders are made.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk fails writes, which know no name
        raise


def require_new(path: Path) -> None:
    """Raises ForeignFileError if the path is taken: by a file, a folder or a link."""
    if path.exists() or path.is_symlink():
        raise ForeignFileError(f"{path}: exists already, and is kept; name another file")


def write_new(path: Path, content: str) -> None:
    """Writes a file as write_whole does. Raises ForeignFileError, and writes nothing, if the path is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)  # nobody can take the path between a look and the write
    except FileExistsError:
        require_new(path)
        raise
    try:
        write_whole(path, content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def require_empty_or_own(folder: Path, what: str, *, is_own: bool) -> None:
    """Raises ForeignFileError if the folder has files or folders, other than pdsim's lock and unfinished new folders.
    is_own: True: this program made the folder, so files in it are allowed.

    what: names what would be written there, for the message.
    """
    if is_own or not folder.is_dir():
        return
    there = sorted(path.name for path in folder.iterdir() if path.name != LOCK and not path.name.startswith(NEW))
    if there:
        raise ForeignFileError(f"{folder}: has {there[0]}, and no {what} of pdsim; name a new folder, or an empty one")


def foreign_files(folder: Path, own: Collection[str]) -> list[str]:
    """Paths of files in a folder, relative to it, that match no pattern in `own`. Links to folders count as files."""
    found = []
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder)
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        names = [(below / name).as_posix() for name in (*files, *links)]
        found += [name for name in names if not any(fnmatchcase(name, pattern) for pattern in own)]
    return sorted(found)


def require_own(folder: Path, own: Collection[str]) -> None:
    """Checks that pdsim may write into a folder, or remove the folder. Raises ForeignFileError if the folder is a link
    or a file, or has a file whose path in the folder matches no pattern in `own`. own: patterns of files that pdsim
    writes there.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ForeignFileError(
            f"{folder}: is {'a link' if folder.is_symlink() else 'a file'}, not a folder; name another"
        )
    if foreign := foreign_files(folder, own):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ForeignFileError(f"{folder}: has {foreign[0]}{more}, which pdsim did not write; move it away")


def remove_own(folder: Path, own: Collection[str]) -> None:
    """Removes a folder. If a file in it matches no pattern in `own`, raises ForeignFileError and removes nothing."""
    require_own(folder, own)
    if folder.exists():
        shutil.rmtree(folder)


def replace_folder(new: Path, folder: Path, own: Collection[str]) -> None:
    """Renames the complete folder `new` to `folder`. A folder that was there before is removed afterwards.

    Raises ForeignFileError, and changes nothing, if a file in the old folder matches no pattern in `own`.
    """
    require_own(folder, own)
    if not folder.exists():
        new.rename(folder)
        return
    aside = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    folder.rename(aside)  # onto an empty folder
    new.rename(folder)
    shutil.rmtree(aside)


@contextmanager
def files_replaced(folder: Path, own: Collection[str], last: str) -> Iterator[Path]:
    """Context with a new, empty folder. At the context's end, each file in the new folder replaces the file of the same
    name in `folder`; the file `last` is moved last. If the context raises, the files in `folder` stay as they were.
    Signals do not interrupt the replacing. Raises ForeignFileError if another process writes into `folder`.

    Also removes old files that `own` names without a wildcard and that were not written again, and new folders that
    killed programs have left. All other files stay.
    """
    try:
        with ExitStack() as stack:
            with signals_deferred():
                new = stack.enter_context(_new_folder(folder, own))
            yield new
            with signals_deferred():
                _replace_files(new, folder, own, last)
    except OSError as error:
        if error.filename is None or NEW in str(error.filename):
            error.filename = str(folder)
        raise


@contextmanager
def _new_folder(folder: Path, own: Collection[str]) -> Iterator[Path]:
    """Context with a new folder inside `folder`. At the end, the context removes the new folder with all files that are
    left in it, and those parents that it had to make, if they are empty. Before it begins, the context removes new
    folders that killed programs have left. own: patterns of the files that this program may remove.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _written_alone(folder):
        _remove_abandoned(folder, NEW, (*own, LOCK, ".*.partial"))
        new = Path(mkdtemp(prefix=NEW, dir=folder))
        try:
            with ExitStack() as stack:
                with suppress(OSError):  # on a file system without locks, the folder of a killed program stays
                    stack.enter_context(_locked(new))
                yield new
        finally:
            with signals_deferred():
                shutil.rmtree(new, ignore_errors=True)
                with suppress(OSError):  # the run's files are there
                    for path in made:
                        path.rmdir()


@contextmanager
def _written_alone(folder: Path) -> Iterator[None]:
    """Context that locks the folder itself, without a lock file. Raises ForeignFileError if another process holds the
    lock. Does nothing on file systems that cannot lock folders.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ForeignFileError(f"{folder}: another command is writing there; wait, or name another folder") from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def _replace_files(new: Path, folder: Path, own: Collection[str], last: str) -> None:
    (folder / last).unlink(missing_ok=True)  # while files of two runs lie there, none is whole
    made = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()} - {LOCK}
    for name in sorted(made, key=lambda name: (name == last, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).replace(folder / name)
    for name in (name for name in own if name not in made and "*" not in name):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Context with a folder below TMPDIR, which is removed at the end. Folders with the same prefix that killed
    programs have left are removed at the beginning. prefix: beginning of the folder's name.
    """
    _remove_abandoned(Path(gettempdir()), prefix, ("*",))
    folder = Path(mkdtemp(prefix=prefix))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Context that holds the lock of a folder that was just made. The lock file gets its final name when it is locked
    already, so no other program can find it unlocked.
    """
    with own_lock(folder, "new.lock"):
        (folder / "new.lock").rename(folder / LOCK)
        yield


@contextmanager
def own_lock(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Context that holds a lock on the file `name` in the folder. The kernel releases the lock even if the program is
    killed.

    Raises BlockingIOError if another process holds the lock.
    """
    descriptor = _opened(folder / name, os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _opened(path: Path, flags: int = 0) -> int:
    """Opens a file for reading and writing, and returns its file descriptor. Refuses links. Does not wait if the file
    is a FIFO without a reader or writer. flags: further flags of os.open.
    """
    return os.open(path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _remove_abandoned(parent: Path, prefix: str, own: Collection[str]) -> None:
    """Removes folders of this user in `parent` whose names begin with the prefix, and whose lock file (LOCK) no program
    has locked: their programs have ended. A folder stays if a file in it matches no pattern in `own`.
    """
    for lock in parent.glob(f"{prefix}*/{LOCK}"):
        if not foreign_files(lock.parent, own):
            _remove_if_abandoned(lock)


def _remove_if_abandoned(lock: Path) -> None:
    try:
        descriptor = _opened(lock)
    except OSError:
        return  # another user's, or just gone
    try:
        found = os.fstat(descriptor)
        is_own = S_ISREG(found.st_mode) and found.st_uid == lock.parent.stat().st_uid == os.getuid()
        if is_own and not lock.parent.is_symlink():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:
        return  # its owner lives
    finally:
        os.close(descriptor)
