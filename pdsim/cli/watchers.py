"""Processes that watch the pace of a machine's cores while something else is run on it."""

import subprocess
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

_ROUND_S = 10
"""What `pdreal measure` takes at least for a round; three times that where it watches by forwards, too."""


class Watchers:
    def __init__(self, number: int, flags: Sequence[str], at_most_s: float) -> None:
        """flags: of `pdreal measure`. at_most_s: how long they are needed. If we are killed and cannot end them, they
        end by themselves after a few times that.
        """
        self._folder = TemporaryDirectory()
        self._parts = [Path(self._folder.name) / f"{i}.csv" for i in range(number)]
        rounds = str(ceil(at_most_s / _ROUND_S))
        self._command = [sys.executable, "-m", "pdreal", "measure", *flags, "--only", "pace", "--rounds", rounds]
        self._header, self._rows = "", list[str]()

    def __enter__(self) -> Self:
        self._processes = [self._watch(part) for part in self._parts]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        for part in self._parts:
            if part.is_file():
                self._header, *rows = part.read_text(encoding="utf-8").splitlines(keepends=True)
                self._rows += rows
        self._folder.cleanup()

    def write(self, path: Path) -> bool:
        """All that they have seen; no file if that is nothing, and False."""
        if self._rows:
            path.write_text("".join([self._header, *self._rows]), encoding="utf-8")
        return bool(self._rows)

    def _watch(self, out: Path) -> "subprocess.Popen[bytes]":
        """Not of the terminal's group: an interrupt is for the command that started it, which ends it. Rows tell their
        command, and a folder's name is nobody's matter.
        """
        return subprocess.Popen(  # noqa: S603  ours
            [*self._command, "--out", out.name],
            cwd=out.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
