"""What `trashd service install` puts where: units, and what they need, made to fit this installation."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

from fusefs.cli.service_install import InstalledFile
from fusefs.core.errors import NotFound

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
    return [
        *(_packaged_commands() if is_package else _helper()),
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


def _helper() -> list[InstalledFile]:
    return [InstalledFile("/sbin/mount.fuse.trashd", link=find_command("mount.fuse.trashd"))]


def _packaged_commands() -> list[InstalledFile]:
    """Links: by them Python finds the modules, which are beside what it was called for."""
    return [
        InstalledFile(_IN_UNITS, link=f"{PACKAGES}/lib/trashd/trashd"),
        InstalledFile(f"{PACKAGES}/sbin/mount.fuse.trashd", link=f"{PACKAGES}/lib/trashd/mount.fuse.trashd"),
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
    return [
        InstalledFile(f"{data}/systemd/user/trashd-reaper.service", unit),
        *_man_pages(data),
    ]


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
    """The first part of a command's path that not root alone can change, and so what root will run; None: all is well.

    Links are followed: a virtual environment's command is its interpreter's too.
    """
    for path in _run_by(command):
        for part in (path, *map(str, Path(path).parents)):
            st = os.stat(part)
            is_sticky_dir = os.path.isdir(part) and bool(st.st_mode & 0o1000)
            if st.st_uid != 0 or (st.st_mode & 0o022 and not is_sticky_dir):
                return part
    return None


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
