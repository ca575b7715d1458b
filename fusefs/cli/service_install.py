"""Putting files in place so that they can be taken away again, and never over what others put there.

A manifest says what is ours: the digest of each file as it was written. A file that has another digest now was edited.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from fusefs.core.errors import BadRecord
from fusefs.linux.atomic_files import replace_file

_FORMAT = 1
_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
_NEW = ".new"


class InstalledFile(NamedTuple):
    """A file, or a symbolic link.

    path         absolute, as the installed system sees it
    content      of a file; None: it is a link
    link         where that points
    is_example   for its administrator to change: never touched once it is there
    """

    path: str
    content: bytes | None = None
    link: str = ""
    is_example: bool = False


class FileOutcome(Enum):
    """What became of a file, or would."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    KEPT = "kept: it was edited, or is not ours"
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


class Manifest(NamedTuple):
    """What an installation put there.

    files        the digest of each as it was written, by path without the --root
    directories  those that it made, a parent before what is in it
    """

    version: str
    files: dict[str, str]
    directories: list[str]


class Installation:
    """The files of one installation, below a root."""

    def __init__(self, root: str, manifest_path: str, *, is_dry: bool = False) -> None:
        """root: "/", or where a package is being put together; is_dry: nothing is changed.

        Raises  BadRecord: the manifest can't be understood
        """
        self._root = root
        self._manifest_path = manifest_path
        self._is_dry = is_dry
        self.manifest = self._load()

    def install(self, pieces: Sequence[InstalledFile], version: str) -> list[FileReport]:
        """Put all in place, and take away what an older version put there and this one does not."""
        old = self.manifest or Manifest(version, {}, [])
        self.manifest = Manifest(version, dict(old.files), old.directories)
        told = [FileReport(piece.path, self._install(piece)) for piece in pieces]
        wanted = {piece.path for piece in pieces}
        wanted |= {one.path + _NEW for one in told if one.outcome is FileOutcome.KEPT}
        told += [self._remove(path) for path in sorted(set(self.manifest.files) - wanted)]
        self._save()
        return told

    def uninstall(self) -> list[FileReport]:
        """Take away what is as we wrote it; what was edited stays."""
        if self.manifest is None:
            return []
        told = [self._remove(path) for path in sorted(self.manifest.files)]
        if not self._is_dry:
            os.unlink(self._at(self._manifest_path))
            for directory in reversed(self.manifest.directories):
                with suppress(OSError):  # others have something in it
                    os.rmdir(self._at(directory))
        return told

    def look(self) -> list[FileReport]:
        """What our files are like now: UNCHANGED, KEPT (edited) or GONE."""
        told = []
        for path, digest in sorted(self.manifest.files.items() if self.manifest else ()):
            found = self._digest(path)
            like = FileOutcome.GONE if found is None else FileOutcome.UNCHANGED if found == digest else FileOutcome.KEPT
            told.append(FileReport(path, like))
        return told

    def _install(self, piece: InstalledFile) -> FileOutcome:
        assert self.manifest is not None
        outcome = decide(self._digest(piece.path), _wanted(piece), self.manifest.files.get(piece.path), piece)
        if outcome is FileOutcome.WRITTEN:
            self._write(piece)
        elif outcome is FileOutcome.KEPT:
            self._write(piece._replace(path=piece.path + _NEW))
        elif self._digest(piece.path) == _wanted(piece):
            self.manifest.files[piece.path] = _wanted(piece)
        return outcome

    def _write(self, piece: InstalledFile) -> None:
        assert self.manifest is not None
        if self._is_dry:
            return
        self._make_directory(os.path.dirname(piece.path))
        path = self._at(piece.path)
        # Beside it and renamed: a reader finds the old text or the new one.
        with tempfile.TemporaryDirectory(prefix=".trashd-", dir=os.path.dirname(path)) as scratch:
            made = os.path.join(scratch, "made")
            if piece.content is None:
                os.symlink(piece.link, made)
            else:
                _write_file(made, piece.content)
            os.rename(made, path)
        self.manifest.files[piece.path] = _wanted(piece)
        self._save()

    def _remove(self, path: str) -> FileReport:
        assert self.manifest is not None
        found = self._digest(path)
        if found is None:
            outcome = FileOutcome.GONE
        elif found != self.manifest.files[path]:
            outcome = FileOutcome.KEPT
        else:
            outcome = FileOutcome.REMOVED
        if not self._is_dry:
            if outcome is FileOutcome.REMOVED:
                os.unlink(self._at(path))
            del self.manifest.files[path]
        return FileReport(path, outcome)

    def _make_directory(self, path: str) -> None:
        assert self.manifest is not None
        if os.path.isdir(self._at(path)):
            return
        if path == "/":
            os.makedirs(self._root, _DIRECTORY_MODE)
            return
        self._make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(self._at(path))
            os.chmod(self._at(path), _DIRECTORY_MODE)
            self.manifest.directories.append(path)

    def _digest(self, path: str) -> str | None:
        """What stands at a path, in a word; None: nothing."""
        try:
            return "link " + os.readlink(self._at(path))
        except FileNotFoundError:
            return None
        except OSError:
            pass  # not a link
        try:
            with open(self._at(path), "rb") as file:
                return "sha256 " + hashlib.sha256(file.read()).hexdigest()
        except IsADirectoryError:
            return "directory"

    def _at(self, path: str) -> str:
        return self._root.rstrip("/") + path

    def _load(self) -> Manifest | None:
        try:
            with open(self._at(self._manifest_path), encoding="utf-8") as file:
                read: dict[str, Any] = json.load(file)
            if read["format"] != _FORMAT:
                raise ValueError(f"format {read['format']}")
            return Manifest(read["version"], dict(read["files"]), list(read["directories"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            hint = "it lists what trashd service install put where; move it away, and install again"
            raise BadRecord(f"{self._at(self._manifest_path)} ({error})", hint) from error

    def _save(self) -> None:
        if self._is_dry or self.manifest is None:
            return
        self._make_directory(os.path.dirname(self._manifest_path))
        text = json.dumps({"format": _FORMAT, **self.manifest._asdict()}, indent=1) + "\n"
        _write_file(self._at(self._manifest_path), text.encode())


def decide(found: str | None, wanted: str, ours: str | None, piece: InstalledFile) -> FileOutcome:
    """Say what to do with one file.

    found   the digest of what stands there; None: nothing
    wanted  the digest of what should
    ours    the digest of what we put there last; None: nothing
    """
    if found is None:
        return FileOutcome.WRITTEN
    if found == wanted or piece.is_example:
        return FileOutcome.UNCHANGED
    return FileOutcome.WRITTEN if found == ours else FileOutcome.KEPT


def _wanted(piece: InstalledFile) -> str:
    return f"link {piece.link}" if piece.content is None else "sha256 " + hashlib.sha256(piece.content).hexdigest()


def _write_file(path: str, content: bytes) -> None:
    replace_file(os.fsencode(path), content, _FILE_MODE, whatever_umask=True, is_durable=True)
