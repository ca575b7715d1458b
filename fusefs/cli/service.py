"""trashd service: run the reaper service; install, remove or show its systemd units and the files that they need.

Installing never overwrites a unit or setting that differs. Uninstalling removes only files that are unchanged.
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

import click

from fusefs.cli import output
from fusefs.cli.group import OrderedGroup
from fusefs.cli.options import PathBytes, json_option
from fusefs.core.errors import Busy, Incomplete, NotADirectory, NotFound, NotPermitted, Refused, TrashdError, UsageError
from fusefs.core.printable_names import printable
from fusefs.core.uring_choice import SWITCH, find_obstacle, known_faults
from fusefs.core.version import VERSION
from fusefs.linux import systemd
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.runtime_directories import replace_file, runtime_dir
from fusefs.linux.systemd import make_handler, set_log_handler
from fusefs.linux.uring_facts import enable_uring, read_facts

_PACKAGE = Path(__file__).parents[1]
_HOMES = (_PACKAGE / "share", _PACKAGE.parent, _PACKAGE.parent / "build")
"""Where the files to install are: in a wheel, or in a checkout, where `make man` creates the manual pages."""
_IN_UNITS = "/usr/bin/trashd"
"""The path of the command in the distributed units, which is the path that distribution packages need."""
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
"""The prefix of distribution packages. Their modules and scripts are in lib/trashd; no other program imports them."""
_PACKAGED = tuple(f"{place}/systemd/system/trashd-reaper.service" for place in ("/usr/lib", "/lib"))
_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
_NEW = ".new"


class InstalledFile(NamedTuple):
    """A file or symbolic link to install.

    path         the absolute path on the installed system
    content      the content of a file; None for a link
    link         the target of a link
    is_example   administrators edit the file, so it is never touched once it exists
    is_document  nobody edits the file, so a file from another version is replaced
    """

    path: str
    content: bytes | None = None
    link: str = ""
    is_example: bool = False
    is_document: bool = False


class FileOutcome(Enum):
    """The outcome of installing or removing a file."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    KEPT = "kept: it differs from what this trashd writes"
    REMOVED = "removed"
    GONE = "was gone already"


class FileReport(NamedTuple):
    """The outcome for one file. path: its actual path, below --root"""

    path: str
    outcome: FileOutcome


class ServiceInstalled(NamedTuple):
    """An installation: its files, and the systemd properties of its units; units is null if systemd isn't running."""

    version: str
    command: str
    files: tuple[FileReport, ...]
    units: tuple[dict[str, str], ...] | None


class InstallPlace:
    """An installation, system-wide or for one user, and the files that belong to it."""

    def __init__(self, for_user: bool, root: str, prefix: str, *, is_dry: bool = False) -> None:
        """root: "/", or the directory in which a package is built; is_dry: change nothing."""
        if not prefix.startswith("/"):
            raise UsageError(f"--prefix {prefix}: not an absolute path")
        self._for_user = for_user
        self._root = os.path.abspath(root)
        self._prefix = prefix.rstrip("/")
        self._is_dry = is_dry
        given = os.environ.get("XDG_DATA_HOME", "")
        self._data = given if given.startswith("/") else os.path.expanduser("~/.local/share")
        self._share = self._data if for_user else f"{self._prefix}/share"

    def is_live(self) -> bool:
        """Return whether the running systemd reads the files of this installation."""
        return self._root == "/" and systemd.is_manager_running(for_user=self._for_user)

    def is_this_machine(self) -> bool:
        """Return whether this is the system-wide installation of this machine, and not one for a user or a package."""
        return self._root == "/" and not self._for_user

    def check_permitted(self) -> None:
        """Raise NotPermitted if this is the system-wide installation and the caller is not root."""
        if not self._for_user and self._root == "/" and os.geteuid():
            raise NotPermitted("the system-wide service", "use sudo, or --user for your own service")

    def check_sensible(self) -> None:
        """Raise Refused if users could not run this trashd, or if a package has installed the service."""
        if self._prefix == PACKAGES:
            raise Refused(f"--prefix {PACKAGES} is only for building packages and needs --root DIR", "omit --prefix")
        packaged = brought_by_package()
        if packaged is not None:
            hint = "systemctl enable --now trashd-reaper"
            raise Refused(f"{printable(os.fsencode(packaged))}: already installed by a package", hint)
        closed = out_of_reach(find_command())
        if closed is not None:
            hint = "PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin pipx install trashd"
            raise Refused(
                f"{printable(os.fsencode(closed))}: users can't access this path, so they can't run this trashd", hint
            )

    def is_installed(self) -> bool:
        """Return whether the reaper's unit exists."""
        above = f"{self._data}/systemd/user" if self._for_user else f"{self._prefix}/lib/systemd/system"
        return os.path.lexists(self._at(f"{above}/{REAPER}"))

    def has_uring(self) -> bool:
        """Return whether the files that switch on FUSE over io_uring are installed."""
        return not self._for_user and any(os.path.lexists(self._at(piece.path)) for piece in self.uring_pieces())

    def uring_pieces(self) -> list[InstalledFile]:
        """Return the files that switch on FUSE over io_uring at each boot."""
        return [InstalledFile(f"{self._prefix}/lib/{name}", _read(f"systemd/{name}")) for name in _URING]

    def pieces(self, *, has_uring: bool) -> list[InstalledFile]:
        if self._for_user:
            unit = _unit("systemd/user/trashd-reaper.service", find_command())
            unit_path = f"{self._data}/systemd/user/trashd-reaper.service"
            return [InstalledFile(unit_path, unit), *_man_pages(self._data)]
        return pieces_for_all(self._prefix) + (self.uring_pieces() if has_uring else [])

    def install(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """Install files; if a file exists with different content, write FILE.new beside it."""
        return [FileReport(self._at(piece.path), self._install(piece)) for piece in pieces]

    def uninstall(self, pieces: Sequence[InstalledFile]) -> list[FileReport]:
        """Remove the files that still have the content that `install` writes."""
        reports = [FileReport(self._at(piece.path), self._remove(piece)) for piece in pieces]
        for piece in pieces:
            self._remove(piece._replace(path=piece.path + _NEW))
        return reports

    def enabling_links(self, pieces: Iterable[InstalledFile]) -> list[InstalledFile]:
        """Return the links of `systemctl enable`, with which a target starts these units."""
        given = os.environ.get("XDG_CONFIG_HOME", "")
        config = given if given.startswith("/") else os.path.expanduser("~/.config")
        places = (f"{config}/systemd/user",) if self._for_user else ("/etc/systemd/system", "/etc/systemd/user")
        units = {piece.path for piece in pieces}
        links = [
            InstalledFile(f"{place}/{path.parent.name}/{path.name}", link=os.readlink(path))
            for place in places
            for path in sorted(Path(self._at(place)).glob("*.wants/trashd-*"))
            if path.is_symlink()
        ]
        return [link for link in links if link.link in units]

    def remove_directories(self) -> None:
        """Remove trashd's own directories if they are empty."""
        own = (f"{self._share}/doc/trashd/examples", f"{self._share}/doc/trashd", "/etc/trashd")
        for directory in () if self._for_user or self._is_dry else own:
            with suppress(OSError):  # the directory contains other files
                os.rmdir(self._at(directory))

    def compare(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """Compare the files with their content in this version: UNCHANGED, KEPT (different) or GONE."""
        return [FileReport(self._at(piece.path), self._compare(piece)) for piece in pieces]

    def remove_earlier(self) -> list[FileReport]:
        """Remove files that only release 0.3.0 installed: its list of files, and the page of a removed command."""
        wrote = (f"{self._share}/trashd/installed.json", f"{self._share}/man/man1/trashd-stats.1")
        present = [path for path in map(self._at, wrote) if os.path.lexists(path)]
        for path in () if self._is_dry else present:
            os.unlink(path)
            with suppress(OSError):
                os.rmdir(os.path.dirname(path))
        return [FileReport(path, FileOutcome.REMOVED) for path in present]

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
        except OSError:  # not a link, a directory, or a dangling link
            is_same = False
        return FileOutcome.UNCHANGED if is_same else FileOutcome.KEPT

    def _write(self, piece: InstalledFile) -> None:
        if self._is_dry:
            return
        path = self._at(piece.path)
        self._make_directory(os.path.dirname(path))
        # Written beside the old file and renamed, so that a reader finds either the old content or the new one.
        with tempfile.TemporaryDirectory(prefix=".trashd-", dir=os.path.dirname(path)) as scratch:
            made = os.path.join(scratch, "made")
            if piece.content is None:
                os.symlink(piece.link, made)
            else:
                replace_file(os.fsencode(made), piece.content, _FILE_MODE, ignores_umask=True, is_durable=True)
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
    """Return the absolute path of a command of this installation. Raises  NotFound"""
    places = (*(tree / "bin" for tree in _PACKAGE.parents[2:3]), Path(sys.executable).parent)
    beside = (str(place / name) for place in places if os.access(place / name, os.X_OK))
    found = next(beside, None) or shutil.which(name)
    if found is None:
        raise NotFound(name, "install trashd as a command first, as docs/howto/install.md describes")
    return os.path.abspath(found)


def pieces_for_all(prefix: str) -> list[InstalledFile]:
    """Return the files of a system-wide installation. prefix: /usr/local, or PACKAGES for a package"""
    units, share = f"{prefix}/lib/systemd", f"{prefix}/share"
    examples = f"{share}/doc/trashd/examples"
    is_package = prefix == PACKAGES
    trashd = _IN_UNITS if is_package else find_command()
    if is_package:
        commands = [  # Python follows these links and finds the modules beside their targets
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
    """Return the completion script for a shell, as click generates it."""
    import click
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    return completion(click.Command("trashd"), {}, "trashd", "_TRASHD_COMPLETE").source().encode()


def _man_pages(share: str) -> list[InstalledFile]:
    """Return the manual pages that the build generated (build_docs/man_pages.py). Raises  NotFound"""
    pages = sorted(path for home in _HOMES for path in home.glob("man/man[15]/*.[15]"))
    if not pages:
        raise _missing("man/man1")
    return [
        InstalledFile(f"{share}/man/{page.parent.name}/{page.name}", page.read_bytes(), is_document=True)
        for page in pages
    ]


def _read(name: str) -> bytes:
    for home in _HOMES:
        if (home / name).is_file():
            return (home / name).read_bytes()
    raise _missing(name)


def _missing(name: str) -> NotFound:
    return NotFound(name, "this installation of trashd is incomplete: install the wheel, or run make man in a checkout")


def _unit(name: str, command: str) -> bytes:
    return _read(name).replace(_IN_UNITS.encode(), unit_word(command).encode())


def unit_word(path: str) -> str:
    """Quote a path as a word of ExecStart=. Source  systemd.service(5), COMMAND LINES"""
    word = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if word != path or set(path) & set(" \t;'") else word


def who_else_may_change(command: str) -> str | None:
    """Return the first path that root uses to run a command and that other users can change; None if there is none.

    Check the command, its modules, each directory in which Python searches for modules, and all parent directories.
    Follow links, since the command of a virtual environment runs the system's interpreter.
    """
    is_fine = set[str]()
    for path in (*_run_by(command), *_imported_from()):
        for part in (path, *map(str, Path(path).parents)):
            if part in is_fine:
                continue
            with suppress(FileNotFoundError, NotADirectoryError):  # a missing path is as safe as its parents
                st = os.stat(part)
                is_sticky_dir = stat.S_ISDIR(st.st_mode) and bool(st.st_mode & stat.S_ISVTX)
                if st.st_uid != 0 or (st.st_mode & OTHERS_WRITE and not is_sticky_dir):
                    return part
            is_fine.add(part)
    return None


def _imported_from() -> Iterator[str]:
    """Yield the files of this package, those of other loaded modules, and the directories in Python's search path."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    for path in (*filter(os.path.isabs, sys.path), *filter(None, loaded)):
        yield from (path, os.path.realpath(path))
    for directory, _names, files in os.walk(_PACKAGE):
        yield directory
        yield from (os.path.join(directory, name) for name in files)


def out_of_reach(command: str) -> str | None:
    """Return the first part of a command's path that users can't search or read; None if all users can run it."""
    for path in (*_run_by(command), str(_PACKAGE)):
        for part in (*map(str, reversed(Path(path).parents)), path):
            needed = stat.S_IXOTH if os.path.isdir(part) else stat.S_IROTH
            if not os.stat(part).st_mode & needed:
                return part
    return None


def _run_by(command: str) -> list[str]:
    """Return the files that are executed when a command is run, and the targets of links among them."""
    return list(dict.fromkeys((command, os.path.realpath(command), os.path.realpath(sys.executable))))


def brought_by_package() -> str | None:
    """Return the path of the reaper's unit from a distribution package; None if no package has installed it."""
    return next((unit for unit in _PACKAGED if os.path.lexists(unit)), None)


PREFIX = "/usr/local"
REAPER, MOUNTS = "trashd-reaper.service", "trashd-mount@*.service"
SWEEP, TIMER = "trashd-sweep.service", "trashd-sweep.timer"
_PROPERTIES = (
    "Id", "LoadState", "UnitFileState", "ActiveState", "SubState", "MainPID", "NRestarts", "StatusText", "FragmentPath",
)  # fmt: skip
for_user_option = click.option(
    "--user", "for_user", is_flag=True, help="Act on your own service, not on the system-wide one."
)
root_option = click.option(
    "--root", default="/", metavar="DIR", help="Use DIR as the root directory, for building packages. [default: /]"
)
prefix_option = click.option(
    "--prefix",
    default=PREFIX,
    metavar="DIR",
    help=f"Use DIR as the prefix of units and manual pages. [default: {PREFIX}]",
)
dry_run_option = click.option("-n", "--dry-run", is_flag=True, help="Only print what would be done.")


@click.group("service", cls=OrderedGroup, short_help="Run the reaper service, or install it for systemd.")
def command() -> None:
    """Run the reaper service, or install, show and remove the systemd units for the service and for mounts.

    \b
    Examples:
      trashd service install && systemctl enable --now trashd-reaper
      trashd service install --user && systemctl --user enable --now trashd-reaper
      trashd service run --volume /scratch
      trashd service status
      trashd service uninstall
    """


@command.command("run", short_help="Run the reaper service in the foreground.")
@click.option(
    "--config",
    "directory",
    type=PathBytes(),
    metavar="DIR",
    help="Read DIR/config.toml and DIR/config.d/. [default: /etc/trashd, or ~/.config/trashd/ if not root]",
)
@click.option(
    "--volume",
    "volumes",
    type=PathBytes(),
    multiple=True,
    metavar="DIR",
    help="Serve only the store in DIR (repeatable). [default: all stores, mounted now or later]",
)
def run_command(directory: bytes | None, volumes: tuple[bytes, ...]) -> int:
    """Run the reaper service: delete expired orphans on all volumes, yielding to other users of the disk.

    Normally systemd runs the service (trashd service install). In a terminal, it logs to the terminal, and Ctrl-C stops
    it. When root runs the service, it serves all users, each with that user's rights; otherwise it serves only the
    caller. SIGHUP reloads the configuration. SIGTERM stops the service within a second. The next run continues the
    work, even after a crash.

    \b
    Examples:
      systemctl start trashd-reaper
      trashd service run --volume /scratch
      trashd status --watch
    """
    from fusefs.linux.config_files import load_config
    from fusefs.service.service import serve

    if directory is not None and os.path.isfile(directory):
        raise NotADirectory(directory, "--config takes the directory that contains config.toml")
    set_log_handler(make_handler("trashd"))
    # Policies and pauses use real paths.
    serve(lambda: load_config(directory), tuple(map(os.path.realpath, volumes)))
    return 0


@command.command("install", short_help="Install units, an example configuration and manual pages.")
@for_user_option
@root_option
@prefix_option
@click.option(
    "--uring/--no-uring",
    default=None,
    help="Switch on FUSE over io_uring at each boot, for all FUSE mounts; --no-uring undoes this. [default: unchanged]",
)
@dry_run_option
@json_option
def install_command(for_user: bool, root: str, prefix: str, uring: bool | None, dry_run: bool, as_json: bool) -> int:
    """Install the systemd units and the other files that the services need. The units run this copy of trashd. Nothing
    is started.

    An existing unit or setting whose content differs is kept, and the new version is written beside it as FILE.new.
    Manual pages, completions and examples are replaced. Running the command again changes nothing. The command is
    refused if users can't run this trashd, or if a package has installed the units.

    \b
    Examples:
      trashd service install
      trashd service install --uring
      trashd service install --root "$DESTDIR" --prefix /usr
    """
    home = InstallPlace(for_user, root, prefix, is_dry=dry_run)
    home.check_permitted()
    if for_user and uring is not None:
        raise UsageError("--uring can't be combined with --user", "sudo trashd service install --uring")
    if home.is_this_machine():
        home.check_sensible()
    if uring and home.is_this_machine() and not dry_run:
        set_switch()
    has_uring = home.has_uring() if uring is None else uring
    reports = home.install(home.pieces(has_uring=has_uring)) + home.remove_earlier()
    if uring is False and home.has_uring():
        reports += home.uninstall(home.uring_pieces())
    _print_reports(reports, as_json=as_json, is_dry=dry_run)
    kept = [printable(os.fsencode(one.path)) for one in reports if one.outcome is FileOutcome.KEPT]
    for path in kept:
        output.warn(f"{path}: kept, since it differs from this version; the new version is in {path}.new")
    if home.is_live() and not dry_run:
        _apply(for_user=for_user, prefix=prefix, has_uring=has_uring)
    if home.is_this_machine() and not dry_run:
        print_what_stays(reports)
    if not for_user and prefix != PACKAGES and (risk := who_else_may_change(find_command())) is not None:
        output.warn(
            f"{printable(os.fsencode(risk))}: root's service runs this, but users other than root can change it"
        )
    if not as_json and not dry_run and home.is_live():
        what = "--user " if for_user else ""
        click.echo(f"to start the service, run: systemctl {what}enable --now trashd-reaper", err=True)
    return Incomplete.exit_code if kept else 0


@command.command("status", short_help="Show the installed files and the state of the units.")
@for_user_option
@prefix_option
@json_option
def status_command(for_user: bool, prefix: str, as_json: bool) -> int:
    """Show the installed files, whether they match this version, and the state of the units.

    \b
    Examples:
      trashd service status
      trashd service status --json | jq .units
    """
    home = InstallPlace(for_user, "/", prefix)
    if not home.is_installed():
        raise NotFound(REAPER, f"trashd service install{' --user' if for_user else ''}")
    files = home.compare(home.pieces(has_uring=home.has_uring()))
    names = (REAPER,) if for_user else (REAPER, TIMER, SWEEP, MOUNTS)
    units = tuple(unit for name in names for unit in _shown(name, for_user=for_user)) if home.is_live() else None
    if as_json:
        output.as_json(ServiceInstalled(VERSION, find_command(), tuple(files), units))
        return 0
    click.echo(f"version  {VERSION}\ncommand  {find_command()}")
    likeness = {FileOutcome.UNCHANGED: "as installed", FileOutcome.KEPT: "differs", FileOutcome.GONE: "missing"}
    rows = [(printable(os.fsencode(one.path)), likeness[one.outcome]) for one in files]
    click.echo("\n".join(output.aligned(rows)))
    if units is None:
        click.echo("systemd is not running here")
    for unit in units or ():
        state = f"{unit['ActiveState']} ({unit['SubState']}), {unit['UnitFileState'] or unit['LoadState']}"
        said = f": {printable(os.fsencode(unit['StatusText']))}" if unit["StatusText"] else ""
        click.echo(f"{unit['Id']}  {state}{said}")
    return 0


@command.command("uninstall", short_help="Stop the services and remove the installed files.")
@for_user_option
@root_option
@prefix_option
@dry_run_option
@json_option
def uninstall_command(for_user: bool, root: str, prefix: str, dry_run: bool, as_json: bool) -> int:
    """Stop the reaper service and the timer, and remove the installed files.

    A unit or setting that differs from the one that this version installs is kept and reported. Trash stores are not
    touched. If systemd did not start the service, it is left running, and the command prints how to stop it. The
    command is refused while a trashd-mount@ service is active.

    \b
    Example:
      trashd service uninstall --dry-run
    """
    home = InstallPlace(for_user, root, prefix, is_dry=dry_run)
    home.check_permitted()
    if not home.is_installed():
        raise NotFound(REAPER, "the service is not installed, so there is nothing to remove")
    if home.is_live() and not dry_run:
        _stop(for_user=for_user)
    pieces = home.pieces(has_uring=home.has_uring())
    reports = home.remove_earlier() + home.uninstall([*home.enabling_links(pieces), *pieces])
    home.remove_directories()
    _print_reports(reports, as_json=as_json, is_dry=dry_run)
    if home.is_live() and not dry_run:
        _run_tool("systemctl", "daemon-reload", for_user=for_user)
    if home.is_this_machine() and not dry_run:
        print_what_stays(reports)
    if not dry_run and (home.is_this_machine() or (for_user and os.geteuid())):
        _warn_if_running()
    return 0


def _warn_if_running() -> None:
    """Warn about a service that this systemd did not start, and so has not stopped."""
    from fusefs.service.state_files import read_status

    with suppress(TrashdError, OSError):  # no status, or that of another version
        observed = read_status(runtime_dir())
        if observed is not None and observed.is_running:
            pid = observed.status.pid
            output.warn(f"the reaper service that runs as process {pid} was not stopped; to stop it: kill {pid}")


def _print_reports(reports: list[FileReport], *, as_json: bool, is_dry: bool) -> None:
    for one in reports:
        if as_json:
            output.as_json(one)
        elif one.outcome is not FileOutcome.UNCHANGED:
            would = "would be " if is_dry and one.outcome in (FileOutcome.WRITTEN, FileOutcome.REMOVED) else ""
            click.echo(f"{printable(os.fsencode(one.path))}: {would}{one.outcome.value}")


def _apply(*, for_user: bool, prefix: str, has_uring: bool) -> None:
    """Apply the installed files: create the group and directories, switch on io_uring if chosen, reload the units."""
    if not for_user:
        _run_tool("systemd-sysusers", f"{prefix}/lib/sysusers.d/trashd.conf")
        settings = ("trashd.conf", "trashd-uring.conf") if has_uring else ("trashd.conf",)
        _run_tool("systemd-tmpfiles", "--create", *(f"{prefix}/lib/tmpfiles.d/{name}" for name in settings))
    _run_tool("systemctl", "daemon-reload", for_user=for_user)


def _stop(*, for_user: bool) -> None:
    """Stop and disable the units. Raises  Busy if a mount service is active, since programs may be using the mount"""
    mounts = [] if for_user else [unit for unit in _shown(MOUNTS) if unit["ActiveState"] != "inactive"]
    if mounts:
        names = " ".join(f"'{unit['Id']}'" for unit in mounts)
        raise Busy(" ".join(unit["Id"] for unit in mounts), f"stop the mounts first: systemctl disable --now {names}")
    for name in (REAPER,) if for_user else (REAPER, TIMER, SWEEP):
        if any(unit["LoadState"] == "loaded" for unit in _shown(name, for_user=for_user)):
            _run_tool("systemctl", "disable", "--now", name, for_user=for_user)


def _shown(unit: str, *, for_user: bool = False) -> list[dict[str, str]]:
    try:
        return systemd.unit_properties(_PROPERTIES, (unit,), for_user=for_user)
    except systemd.SystemdFailed as error:
        raise TrashdError(f"systemctl: {error}") from error


def _run_tool(program: str, *words: str, for_user: bool = False) -> None:
    try:
        systemd.run_tool(program, *words, for_user=for_user)
    except systemd.SystemdFailed as error:
        raise TrashdError(f"{program}: {error}", "the files are installed; run the failed command by hand") from error


def set_switch() -> None:
    """Switch on FUSE over io_uring; warn if no mount can use it, or if this kernel's io_uring may be faulty."""
    try:
        enable_uring()
        facts = read_facts()
        why, faults = find_obstacle(facts), known_faults(facts.release)
    except OSError as error:
        why, faults = f"{SWITCH}: {error.strerror}", None
    if why is not None:
        output.warn(f"mounts on this machine can't use io_uring: {why}")
    elif faults is not None:
        output.warn(faults)


def print_what_stays(reports: Iterable[FileReport]) -> None:
    """Print how to switch off FUSE over io_uring, if the file that switches it on at boot was removed."""
    gone = any(one.outcome is FileOutcome.REMOVED and one.path.endswith("/trashd-uring.conf") for one in reports)
    if gone and read_facts().is_enabled:
        click.echo(f"FUSE over io_uring stays on until the next boot; to switch it off: echo N >{SWITCH}", err=True)
