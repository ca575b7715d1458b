"""Putting files in place, never over what others put there, and taking away again what is as it was written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from fusefs.linux.atomic_files import replace_file

_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
_NEW = ".new"


class InstalledFile(NamedTuple):
    """A file, or a symbolic link.

    path         absolute, as the installed system sees it
    content      of a file; None: it is a link
    link         where that points
    is_example   for its administrator to change: never touched once it is there
    is_document  nobody edits it: one of another version is replaced
    """

    path: str
    content: bytes | None = None
    link: str = ""
    is_example: bool = False
    is_document: bool = False


class FileOutcome(Enum):
    """What became of a file, or would."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    KEPT = "kept: it differs from what this trashd writes"
    REMOVED = "removed"
    GONE = "was gone already"


class FileReport(NamedTuple):
    """One file's outcome. path: without the --root"""

    path: str
    outcome: FileOutcome


class ServiceInstalled(NamedTuple):
    """An installation: its files, and what systemd says of its units (None where it isn't running)."""

    version: str
    command: str
    files: tuple[FileReport, ...]
    units: tuple[dict[str, str], ...] | None


class Installation:
    """The files of one installation, below a root."""

    def __init__(self, root: str, *, is_dry: bool = False) -> None:
        """root: "/", or where a package is being put together; is_dry: nothing is changed."""
        self._root = root
        self._is_dry = is_dry

    def install(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """Put all in place; beside a file that differs, as FILE.new."""
        return [FileReport(piece.path, self._install(piece)) for piece in pieces]

    def uninstall(self, pieces: Sequence[InstalledFile], directories: Iterable[str]) -> list[FileReport]:
        """Remove what is as `install` writes it, and such directories if they are empty then."""
        reports = [FileReport(piece.path, self._remove(piece)) for piece in pieces]
        for piece in pieces:
            self._remove(piece._replace(path=piece.path + _NEW))
        if not self._is_dry:
            for directory in directories:
                with suppress(OSError):  # others have something in it
                    os.rmdir(self._at(directory))
        return reports

    def compare(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """What the files are like now: UNCHANGED, KEPT (they differ) or GONE."""
        return [FileReport(piece.path, self._compare(piece)) for piece in pieces]

    def remove(self, paths: Iterable[str]) -> list[FileReport]:
        """Remove what earlier releases wrote, where it is there, and its directory if it is empty then."""
        present = [path for path in paths if os.path.lexists(self._at(path))]
        for path in () if self._is_dry else present:
            os.unlink(self._at(path))
            with suppress(OSError):
                os.rmdir(os.path.dirname(self._at(path)))
        return [FileReport(path, FileOutcome.REMOVED) for path in present]

    def has(self, pieces: Iterable[InstalledFile]) -> bool:
        """Whether there is any of these files."""
        return any(os.path.lexists(self._at(piece.path)) for piece in pieces)

    def _install(self, piece: InstalledFile) -> FileOutcome:
        outcome = self._compare(piece)
        if outcome is FileOutcome.GONE or (outcome is FileOutcome.KEPT and piece.is_document):
            self._write(piece)
            return FileOutcome.WRITTEN
        if outcome is FileOutcome.KEPT and piece.is_example:
            return FileOutcome.UNCHANGED
        if outcome is FileOutcome.KEPT:
            self._write(piece._replace(path=piece.path + _NEW))
        return outcome

    def _remove(self, piece: InstalledFile) -> FileOutcome:
        outcome = self._compare(piece)
        if outcome is FileOutcome.UNCHANGED or (outcome is FileOutcome.KEPT and piece.is_document):
            if not self._is_dry:
                os.unlink(self._at(piece.path))
            return FileOutcome.REMOVED
        return outcome

    def _compare(self, piece: InstalledFile) -> FileOutcome:
        path = self._at(piece.path)
        if not os.path.lexists(path):
            return FileOutcome.GONE
        try:
            if piece.content is None:
                is_same = os.readlink(path) == piece.link
            else:
                with open(path, "rb") as file:
                    is_same = not os.path.islink(path) and file.read() == piece.content
        except OSError:  # no link, a directory, or a link that leads nowhere
            is_same = False
        return FileOutcome.UNCHANGED if is_same else FileOutcome.KEPT

    def _write(self, piece: InstalledFile) -> None:
        if self._is_dry:
            return
        path = self._at(piece.path)
        self._make_directory(os.path.dirname(path))
        # Beside it and renamed: a reader finds the old text or the new one.
        with tempfile.TemporaryDirectory(prefix=".trashd-", dir=os.path.dirname(path)) as scratch:
            made = os.path.join(scratch, "made")
            if piece.content is None:
                os.symlink(piece.link, made)
            else:
                replace_file(os.fsencode(made), piece.content, _FILE_MODE, whatever_umask=True, is_durable=True)
            os.rename(made, path)

    def _make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        self._make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path)
            os.chmod(path, _DIRECTORY_MODE)

    def _at(self, path: str) -> str:
        return self._root.rstrip("/") + path
