"""trashd service: run it, and install, remove or show its systemd units and what they need.

Installing puts nothing over what others put there; removing takes away what is still as it was written.
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
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.group import OrderedGroup
from fusefs.cli.options import PathBytes, json_option
from fusefs.core.errors import Busy, Incomplete, NotADirectory, NotFound, NotPermitted, Refused, TrashdError, UsageError
from fusefs.core.printable_names import printable
from fusefs.core.uring_choice import SWITCH, why_not, why_not_trusted
from fusefs.linux import systemd
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.runtime_directories import replace_file
from fusefs.linux.systemd import make_handler, send_to
from fusefs.linux.uring_offer import enable, read_facts

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


class InstallPlace:
    """Where an installation belongs, the machine's or a user's, and its files there."""

    def __init__(self, for_user: bool, root: str, prefix: str, *, is_dry: bool = False) -> None:
        """root: "/", or where a package is being put together; is_dry: nothing is changed."""
        if not prefix.startswith("/"):
            raise UsageError(f"--prefix {prefix}", "it is an absolute path")
        self._for_user = for_user
        self._root = os.path.abspath(root)
        self._prefix = prefix.rstrip("/")
        self._is_dry = is_dry
        given = os.environ.get("XDG_DATA_HOME", "")
        self._data = given if given.startswith("/") else os.path.expanduser("~/.local/share")
        self._share = self._data if for_user else f"{self._prefix}/share"

    def is_live(self) -> bool:
        """Whether the running systemd sees these files."""
        return self._root == "/" and systemd.is_running(for_user=self._for_user)

    def is_this_machine(self) -> bool:
        """Whether it is the machine's own, and not a package's."""
        return self._root == "/" and not self._for_user

    def check_permitted(self) -> None:
        """Raises  NotPermitted, before anything is half done"""
        if not self._for_user and self._root == "/" and os.geteuid():
            raise NotPermitted("the machine's services are root's", "sudo trashd service …, or --user for your own")

    def check_sensible(self) -> None:
        """Raises  Refused: users could not run what would be installed for them, or a package has it in place"""
        if self._prefix == PACKAGES:
            raise Refused(f"{PACKAGES} is for packages", "leave --prefix out; with --root DIR it makes a package")
        packaged = brought_by_package()
        if packaged is not None:
            hint = "it needs nothing but: systemctl enable --now trashd-reaper"
            raise Refused(f"a package brought {printable(os.fsencode(packaged))}", hint)
        closed = out_of_reach(find_command())
        if closed is not None:
            hint = "install it by pipx with PIPX_HOME=/opt/pipx PIPX_BIN_DIR=/usr/local/bin, and run that one"
            raise Refused(f"{printable(os.fsencode(closed))} is closed to users, who could not run this trashd", hint)

    def is_installed(self) -> bool:
        """Whether the reaper's unit is there."""
        above = f"{self._data}/systemd/user" if self._for_user else f"{self._prefix}/lib/systemd/system"
        return os.path.lexists(self._at(f"{above}/{REAPER}"))

    def has_uring(self) -> bool:
        """Whether what sets the switch for FUSE over io_uring was installed."""
        return not self._for_user and any(os.path.lexists(self._at(piece.path)) for piece in self.uring_pieces())

    def uring_pieces(self) -> list[InstalledFile]:
        """What sets the machine's switch for FUSE over io_uring at each boot."""
        return [InstalledFile(f"{self._prefix}/lib/{name}", _read(f"systemd/{name}")) for name in _URING]

    def pieces(self, *, has_uring: bool) -> list[InstalledFile]:
        """What belongs there."""
        if self._for_user:
            unit = _unit("systemd/user/trashd-reaper.service", find_command())
            unit_path = f"{self._data}/systemd/user/trashd-reaper.service"
            return [InstalledFile(unit_path, unit), *_man_pages(self._data)]
        return pieces_for_all(self._prefix) + (self.uring_pieces() if has_uring else [])

    def install(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """Put all in place; beside a file that differs, as FILE.new."""
        return [FileReport(self._at(piece.path), self._install(piece)) for piece in pieces]

    def uninstall(self, pieces: Sequence[InstalledFile]) -> list[FileReport]:
        """Remove what is as `install` writes it."""
        reports = [FileReport(self._at(piece.path), self._remove(piece)) for piece in pieces]
        for piece in pieces:
            self._remove(piece._replace(path=piece.path + _NEW))
        return reports

    def remove_directories(self) -> None:
        """Remove those that only trashd has files in, if they are empty."""
        own = (f"{self._share}/doc/trashd/examples", f"{self._share}/doc/trashd", "/etc/trashd")
        for directory in () if self._for_user or self._is_dry else own:
            with suppress(OSError):  # others have something in it
                os.rmdir(self._at(directory))

    def compare(self, pieces: Iterable[InstalledFile]) -> list[FileReport]:
        """What the files are like now: UNCHANGED, KEPT (they differ) or GONE."""
        return [FileReport(self._at(piece.path), self._compare(piece)) for piece in pieces]

    def remove_earlier(self) -> list[FileReport]:
        """Remove what 0.3.0 wrote and this version does not: its list of files, and the page of a removed command."""
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


PREFIX = "/usr/local"
"""Where install puts what it brings, if nothing else is said."""
REAPER, MOUNTS = "trashd-reaper.service", "trashd-mount@*.service"
SWEEP, TIMER = "trashd-sweep.service", "trashd-sweep.timer"
_PROPERTIES = (
    "Id", "LoadState", "UnitFileState", "ActiveState", "SubState", "MainPID", "NRestarts", "StatusText", "FragmentPath",
)  # fmt: skip
for_user_option = click.option("--user", "for_user", is_flag=True, help="Your own service, not the machine's.")
root_option = click.option(
    "--root", default="/", metavar="DIR", help="Below DIR, as if that were /: to make a package (DESTDIR)."
)
prefix_option = click.option(
    "--prefix", default=PREFIX, show_default=True, metavar="DIR", help="Where units and man pages belong."
)
dry_run_option = click.option("-n", "--dry-run", is_flag=True, help="Only say what would be done.")


@click.group("service", cls=OrderedGroup, short_help="Run the service that reaps; install it for systemd.")
def command() -> None:
    """Run the service that reaps in the background; install it and the mounts for systemd, look at them, and take
    them away.

    \b
    Examples:
      trashd service install && systemctl enable --now trashd-reaper
      trashd service install --user && systemctl --user enable --now trashd-reaper
      trashd service run --volume /scratch
      trashd service status
      trashd service uninstall
    """


@command.command("run", short_help="Be the service that reaps in the background.")
@click.option(
    "--config",
    "directory",
    type=PathBytes(),
    metavar="DIR",
    help="Read DIR/config.toml and DIR/config.d/; default: /etc/trashd, or ~/.config/trashd for a user.",
)
@click.option(
    "--volume",
    "volumes",
    type=PathBytes(),
    multiple=True,
    metavar="DIR",
    help="Serve the store in DIR only (may be repeated); default: every one, mounted now or later.",
)
def run_command(directory: bytes | None, volumes: tuple[bytes, ...]) -> int:
    """Reap what is due on all volumes, in the background, and make way for whoever uses the disk.

    Run by systemd (trashd service install); in a terminal it logs there, and Ctrl-C ends it. As root it serves all
    users, each with his own rights; as anybody else what is his own. SIGHUP reads the configuration again, SIGTERM
    ends it within a second. What it was doing then, or when it was killed, the next one goes on with.

    \b
    Examples:
      systemctl start trashd-reaper
      trashd service run --volume /scratch
      trashd status --watch
    """
    from fusefs.linux.config_files import load_config
    from fusefs.service.service import serve

    if directory is not None and os.path.isfile(directory):
        raise NotADirectory(directory, "--config takes the directory in which config.toml is")
    send_to(make_handler("trashd"))
    # By the path that policies and pauses know it by.
    serve(lambda: load_config(directory), tuple(map(os.path.realpath, volumes)))
    return 0


@command.command("install", short_help="Put units, configuration and man pages in place.")
@for_user_option
@root_option
@prefix_option
@click.option(
    "--uring/--no-uring",
    default=None,
    help="Switch on FUSE over io_uring at each boot, for every user's FUSE mount of the machine; default: as it was.",
)
@dry_run_option
@json_option
def install_command(for_user: bool, root: str, prefix: str, uring: bool | None, dry_run: bool, as_json: bool) -> int:
    """Put in place what the services need, with the path of this very trashd in it; nothing is started.

    Units, sysusers.d, tmpfiles.d, man pages, the helper of mount(8), and an example of the configuration. Doing it
    again changes nothing. A unit or setting that is there and differs stays as it is, whether you edited it or an
    earlier version wrote it: the new text is put beside it as FILE.new. Man pages, completions and examples are
    replaced. Where users could not run this trashd, or a package has put the
    units in place, nothing is done.

    With --uring mounts use FUSE over io_uring (Linux 6.14) where the kernel has no known faults in it. A mount with
    uring=on by root sets that switch itself. It is a switch of the whole machine. It stays with each later install,
    until --no-uring or uninstall.

    \b
    Examples:
      trashd service install
      trashd service install --uring
      trashd service install --root "$DESTDIR" --prefix /usr
    """
    home = InstallPlace(for_user, root, prefix, is_dry=dry_run)
    home.check_permitted()
    if for_user and uring is not None:
        raise UsageError("--uring with --user", "the switch is the machine's: sudo trashd service install --uring")
    if home.is_this_machine():
        home.check_sensible()
    if uring and home.is_this_machine() and not dry_run:
        set_switch()
    has_uring = home.has_uring() if uring is None else uring
    reports = home.install(home.pieces(has_uring=has_uring)) + home.remove_earlier()
    if uring is False and home.has_uring():
        reports += home.uninstall(home.uring_pieces())
    _tell(reports, as_json=as_json)
    kept = [printable(os.fsencode(one.path)) for one in reports if one.outcome is FileOutcome.KEPT]
    for path in kept:
        output.warn(f"{path} differs from what this trashd writes, which is in {path}.new")
    if home.is_live() and not dry_run:
        _apply(for_user=for_user, prefix=prefix, has_uring=has_uring)
    if home.is_this_machine() and not dry_run:
        tell_what_stays(reports)
    if not for_user and prefix != PACKAGES and (risk := who_else_may_change(find_command())) is not None:
        output.warn(
            f"{printable(os.fsencode(risk))}: others than root can write there, and root will run what is in it"
        )
    if not as_json and not dry_run and home.is_live():
        what = "--user " if for_user else ""
        click.echo(f"start it: systemctl {what}enable --now trashd-reaper", err=True)
    return Incomplete.exit_code if kept else 0


@command.command("status", short_help="Say what is installed, and how it is.")
@for_user_option
@prefix_option
@json_option
def status_command(for_user: bool, prefix: str, as_json: bool) -> int:
    """Say which files are installed, whether they are as this trashd writes them, and how the services are.

    \b
    Examples:
      trashd service status
      trashd service status --json | jq .units
    """
    home = InstallPlace(for_user, "/", prefix)
    if not home.is_installed():
        raise NotFound("the service", f"nothing is installed: trashd service install{' --user' if for_user else ''}")
    files = home.compare(home.pieces(has_uring=home.has_uring()))
    names = (REAPER,) if for_user else (REAPER, TIMER, SWEEP, MOUNTS)
    units = tuple(unit for name in names for unit in _shown(name, for_user=for_user)) if home.is_live() else None
    if as_json:
        output.as_json(ServiceInstalled(version("trashd"), find_command(), tuple(files), units))
        return 0
    click.echo(f"version  {version('trashd')}\ncommand  {find_command()}")
    likeness = {FileOutcome.UNCHANGED: "as installed", FileOutcome.KEPT: "differs", FileOutcome.GONE: "missing"}
    rows = [(printable(os.fsencode(one.path)), likeness[one.outcome]) for one in files]
    click.echo("\n".join(output.aligned(rows)))
    if units is None:
        click.echo("systemd isn't running here")
    for unit in units or ():
        state = f"{unit['ActiveState']} ({unit['SubState']}), {unit['UnitFileState'] or unit['LoadState']}"
        said = f": {printable(os.fsencode(unit['StatusText']))}" if unit["StatusText"] else ""
        click.echo(f"{unit['Id']}  {state}{said}")
    return 0


@command.command("uninstall", short_help="Stop the reaper, and take away what install put there.")
@for_user_option
@root_option
@prefix_option
@dry_run_option
@json_option
def uninstall_command(for_user: bool, root: str, prefix: str, dry_run: bool, as_json: bool) -> int:
    """Stop reaper and timer and take away the files that install put there; one that differs from what this trashd
    writes stays, and is named.

    Stores and what is in them are not touched. Refused while a trashd-mount@ service is active: stop those first.

    \b
    Example:
      trashd service uninstall --dry-run
    """
    home = InstallPlace(for_user, root, prefix, is_dry=dry_run)
    home.check_permitted()
    if not home.is_installed():
        raise NotFound("the service", "nothing is installed")
    if home.is_live() and not dry_run:
        _stop(for_user=for_user)
    reports = home.remove_earlier() + home.uninstall(home.pieces(has_uring=home.has_uring()))
    home.remove_directories()
    _tell(reports, as_json=as_json)
    if home.is_live() and not dry_run:
        _run("systemctl", "daemon-reload", for_user=for_user)
    if home.is_this_machine() and not dry_run:
        tell_what_stays(reports)
    return 0


def _tell(told: list[FileReport], *, as_json: bool) -> None:
    for one in told:
        if as_json:
            output.as_json(one)
        elif one.outcome is not FileOutcome.UNCHANGED:
            click.echo(f"{printable(os.fsencode(one.path))}: {one.outcome.value}")


def _apply(*, for_user: bool, prefix: str, has_uring: bool) -> None:
    """Make what the files say true: the group, the directories, the switch, the units."""
    if not for_user:
        _run("systemd-sysusers", f"{prefix}/lib/sysusers.d/trashd.conf")
        settings = ("trashd.conf", "trashd-uring.conf") if has_uring else ("trashd.conf",)
        _run("systemd-tmpfiles", "--create", *(f"{prefix}/lib/tmpfiles.d/{name}" for name in settings))
    _run("systemctl", "daemon-reload", for_user=for_user)


def _stop(*, for_user: bool) -> None:
    """Raises  Busy: a mount service is active, so that what uses it would lose it"""
    mounts = [] if for_user else [unit for unit in _shown(MOUNTS) if unit["ActiveState"] != "inactive"]
    if mounts:
        names = " ".join(f"'{unit['Id']}'" for unit in mounts)
        raise Busy(f"{len(mounts)} mounts are served", f"systemctl disable --now {names}")
    for name in (REAPER,) if for_user else (REAPER, TIMER, SWEEP):
        if any(unit["LoadState"] == "loaded" for unit in _shown(name, for_user=for_user)):
            _run("systemctl", "disable", "--now", name, for_user=for_user)


def _shown(unit: str, *, for_user: bool = False) -> list[dict[str, str]]:
    try:
        return systemd.properties(_PROPERTIES, (unit,), for_user=for_user)
    except systemd.SystemdFailed as error:
        raise TrashdError(f"systemctl: {error}") from error


def _run(program: str, *words: str, for_user: bool = False) -> None:
    try:
        systemd.run(program, *words, for_user=for_user)
    except systemd.SystemdFailed as error:
        raise TrashdError(f"{program}: {error}", "the files are in place; run that by hand") from error


def set_switch() -> None:
    """Set it, and warn where no mount can use it, or where this kernel may have faults in it."""
    try:
        enable()
        facts = read_facts()
        why, faults = why_not(facts), why_not_trusted(facts.release)
    except OSError as error:
        why, faults = f"{SWITCH}: {error.strerror}", None
    if why is not None:
        output.warn(f"no mount of this machine can use io_uring: {why}")
    elif faults is not None:
        output.warn(faults)


def tell_what_stays(told: Iterable[FileReport]) -> None:
    """Say that the switch outlives what sets it at boot, if that has gone."""
    gone = any(one.outcome is FileOutcome.REMOVED and one.path.endswith("/trashd-uring.conf") for one in told)
    if gone and read_facts().is_enabled:
        click.echo(f"FUSE over io_uring stays on until the machine restarts; now: echo N >{SWITCH}", err=True)
