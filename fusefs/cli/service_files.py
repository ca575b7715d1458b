"""What `trashd service install` puts where: units, and what they need, made to fit this installation.

It puts nothing over what others put there, and takes away again what is as it was written.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from fusefs.core.errors import NotFound
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.kernel import OTHERS_WRITE

_PACKAGE = Path(__file__).parents[1]
_HOMES = (_PACKAGE / "share", _PACKAGE.parent, _PACKAGE.parent / "build")
"""Of the files: in a wheel, and in a checkout, where `make man` makes the man pages."""
_IN_UNITS = "/usr/bin/trashd"
"""Where the units have the command as they come, so that they are good for a distribution's package."""
_SYSTEM_UNITS = (
    "trashd-reaper.service", "trashd-mount@.service", "trashd-sweep.service", "trashd-sweep.timer", "trashd.slice",
)  # fmt: skip
_COMPLETIONS = {
    "bash": "bash-completion/completions/trashd", "zsh": "zsh/site-functions/_trashd",
    "fish": "fish/vendor_completions.d/trashd.fish",
}  # fmt: skip
_EXAMPLES = ("grafana-dashboard.json", "alert-rules.yml")
_SECTION_8 = b".so man1/trashd-mount.1\n"
_URING = ("tmpfiles.d/trashd-uring.conf", "modprobe.d/trashd-uring.conf")
PACKAGES = "/usr"
"""Where packages have their files. Their modules and scripts are in its lib/trashd, where nothing else imports them."""
_PACKAGED = tuple(f"{place}/systemd/system/trashd-reaper.service" for place in ("/usr/lib", "/lib"))
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
    """One file's outcome. path: that it has now, below --root"""

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
        return [FileReport(self._at(piece.path), self._install(piece)) for piece in pieces]

    def uninstall(self, pieces: Sequence[InstalledFile], directories: Iterable[str]) -> list[FileReport]:
        """Remove what is as `install` writes it, and such directories if they are empty then."""
        reports = [FileReport(self._at(piece.path), self._remove(piece)) for piece in pieces]
        for piece in pieces:
            self._remove(piece._replace(path=piece.path + _NEW))
        if not self._is_dry:
            for directory in directories:
                with suppress(OSError):  # others have something in it
                    os.rmdir(self._at(directory))
        return reports

    def compare(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """What the files are like now: UNCHANGED, KEPT (they differ) or GONE."""
        return [FileReport(self._at(piece.path), self._compare(piece)) for piece in pieces]

    def remove(self, paths: Iterable[str]) -> list[FileReport]:
        """Remove what earlier releases wrote, where it is there, and its directory if it is empty then."""
        present = [path for path in paths if os.path.lexists(self._at(path))]
        for path in () if self._is_dry else present:
            os.unlink(self._at(path))
            with suppress(OSError):
                os.rmdir(os.path.dirname(self._at(path)))
        return [FileReport(self._at(path), FileOutcome.REMOVED) for path in present]

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


def find_command(name: str = "trashd") -> str:
    """The absolute path of a command of this installation. Raises  NotFound"""
    places = (*(tree / "bin" for tree in _PACKAGE.parents[2:3]), Path(sys.executable).parent)
    beside = (str(place / name) for place in places if os.access(place / name, os.X_OK))
    found = next(beside, None) or shutil.which(name)
    if found is None:
        raise NotFound(name, "install trashd as a command first (docs/install.md)")
    return os.path.abspath(found)


def pieces_for_all(prefix: str) -> list[InstalledFile]:
    """What root's service and mounts need, and all users. prefix: /usr/local, or PACKAGES for one"""
    units, share = f"{prefix}/lib/systemd", f"{prefix}/share"
    examples = f"{share}/doc/trashd/examples"
    is_package = prefix == PACKAGES
    trashd = _IN_UNITS if is_package else find_command()
    if is_package:
        commands = [  # by these links Python finds the modules, which are beside what it was called for
            InstalledFile(_IN_UNITS, link=f"{PACKAGES}/lib/trashd/trashd"),
            InstalledFile(f"{PACKAGES}/sbin/mount.fuse.trashd", link=f"{PACKAGES}/lib/trashd/mount.fuse.trashd"),
        ]
    else:
        commands = [InstalledFile("/sbin/mount.fuse.trashd", link=find_command("mount.fuse.trashd"))]
    return [
        *commands,
        *(InstalledFile(f"{units}/system/{name}", _unit(f"systemd/{name}", trashd)) for name in _SYSTEM_UNITS),
        InstalledFile(f"{units}/user/trashd-reaper.service", _unit("systemd/user/trashd-reaper.service", trashd)),
        InstalledFile(f"{prefix}/lib/sysusers.d/trashd.conf", _read("systemd/sysusers.d/trashd.conf")),
        InstalledFile(f"{prefix}/lib/tmpfiles.d/trashd.conf", _read("systemd/tmpfiles.d/trashd.conf")),
        *_man_pages(share),
        InstalledFile(f"{share}/man/man8/mount.fuse.trashd.8", _SECTION_8, is_document=True),
        *(InstalledFile(f"{share}/{path}", _completion(one), is_document=True) for one, path in _COMPLETIONS.items()),
        *(InstalledFile(f"{examples}/{name}", _read(f"docs/{name}"), is_document=True) for name in _EXAMPLES),
        InstalledFile("/etc/trashd/config.toml", _read("docs/config.example.toml"), is_example=True),
    ]


def _completion(shell: str) -> bytes:
    """What has a shell ask trashd what could follow: click's own."""
    import click
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    return completion(click.Command("trashd"), {}, "trashd", "_TRASHD_COMPLETE").source().encode()


def _man_pages(share: str) -> list[InstalledFile]:
    """Those that the build made of the commands (build_docs/man_pages.py). Raises  NotFound"""
    pages = sorted(path for home in _HOMES for path in home.glob("man/man1/*.1"))
    if not pages:
        raise _missing("man/man1")
    return [InstalledFile(f"{share}/man/man1/{page.name}", page.read_bytes(), is_document=True) for page in pages]


def pieces_for_uring(prefix: str) -> list[InstalledFile]:
    """What sets the machine's switch for FUSE over io_uring at each boot. prefix: as above"""
    return [InstalledFile(f"{prefix}/lib/{name}", _read(f"systemd/{name}")) for name in _URING]


def pieces_for_user(data: str) -> list[InstalledFile]:
    """What a user's own service needs. data: $XDG_DATA_HOME"""
    unit = _unit("systemd/user/trashd-reaper.service", find_command())
    return [InstalledFile(f"{data}/systemd/user/trashd-reaper.service", unit), *_man_pages(data)]


def _read(name: str) -> bytes:
    for home in _HOMES:
        if (home / name).is_file():
            return (home / name).read_bytes()
    raise _missing(name)


def _missing(name: str) -> NotFound:
    return NotFound(name, "this installation of trashd lacks it: install the wheel, or make man in a checkout")


def _unit(name: str, command: str) -> bytes:
    return _read(name).replace(_IN_UNITS.encode(), unit_word(command).encode())


def unit_word(path: str) -> str:
    """A path as a word of ExecStart=. Source  systemd.service(5), COMMAND LINES"""
    word = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if word != path or set(path) & set(" \t;'") else word


def who_else_may_change(command: str) -> str | None:
    """The first path that not root alone can change, of what root will run with a command; None: all is well.

    That is the command, its modules, each directory that modules are searched for in, and each directory above these.
    Links are followed: a virtual environment's command is its interpreter's too.
    """
    is_fine = set[str]()
    for path in (*_run_by(command), *_imported_from()):
        for part in (path, *map(str, Path(path).parents)):
            if part in is_fine:
                continue
            with suppress(FileNotFoundError, NotADirectoryError):  # what is missing belongs to who can make it
                st = os.stat(part)
                is_sticky_dir = stat.S_ISDIR(st.st_mode) and bool(st.st_mode & stat.S_ISVTX)
                if st.st_uid != 0 or (st.st_mode & OTHERS_WRITE and not is_sticky_dir):
                    return part
            is_fine.add(part)
    return None


def _imported_from() -> Iterator[str]:
    """All of this package, the files of other modules that are loaded, and the directories that Python looks in."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for path in (*filter(os.path.isabs, sys.path), *filter(None, loaded)):
        yield from (path, os.path.realpath(path))
    for directory, _names, files in os.walk(_PACKAGE):
        yield directory
        yield from (os.path.join(directory, name) for name in files)


def out_of_reach(command: str) -> str | None:
    """The first part of a command's path that not everybody may pass or read, so that users can't run it; None: all is
    well.
    """
    for path in (*_run_by(command), str(_PACKAGE)):
        for part in (*map(str, reversed(Path(path).parents)), path):
            needed = stat.S_IXOTH if os.path.isdir(part) else stat.S_IROTH
            if not os.stat(part).st_mode & needed:
                return part
    return None


def _run_by(command: str) -> list[str]:
    """The files that are run when a command is: links are followed."""
    return list(dict.fromkeys((command, os.path.realpath(command), os.path.realpath(sys.executable))))


def brought_by_package() -> str | None:
    """The reaper's unit where a distribution's package puts it, if there is one."""
    return next((unit for unit in _PACKAGED if os.path.lexists(unit)), None)
