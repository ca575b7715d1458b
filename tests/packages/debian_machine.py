"""A booted machine on which trashd is installed: of a Debian release, with the packages that were built for it."""

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.booted_systemd import REPO, System, booted

VOLUME = "/srv/volume"
USER = "alice"
BUILT = REPO / "build/packages"
_LONG_S, _LIMIT_S = 400.0, 1000.0
_PATH = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class DebianMachine:
    """It has a volume at VOLUME with a store of root's, and a user."""

    system: System
    packages: tuple[Path, ...]
    scratch: Path

    def apt(self, *words: str | Path) -> str:
        """What apt-get says; it has no network."""
        apt = ("apt-get", "--quiet", "--yes", "--no-install-recommends", *words)
        return self.in_minutes("env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8", _PATH, *apt)

    def in_minutes(self, *words: str | Path) -> str:
        """What a command says that may take minutes."""
        done = subprocess.run(
            self.system.argv(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=_LONG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def trashd(self, *words: str, code: int | None = 0, killed_at: str = "") -> str:
        """What root's command says. killed_at: the call at which it is killed, for strace"""
        if not killed_at:
            return self.system.run("env", _PATH, "trashd", *words, code=code).stdout
        strace = ("strace", "-f", "-o", "/dev/null", "-e", f"inject={killed_at}:signal=KILL")
        return self.system.run("env", _PATH, *strace, "trashd", *words, code=-9).stdout

    def in_background(self, *words: str) -> None:
        """Start a command that stays, without systemd."""
        self.system.run("env", _PATH, "sh", "-c", '"$@" </dev/null >/dev/null 2>&1 &', "sh", *words)

    def as_user(self, *words: str) -> str:
        """What a command of the user's says."""
        return self.system.run("runuser", "-u", USER, "--", "env", _PATH, *words).stdout

    def fill(self, directory: str) -> None:
        """Make a directory of root's with a file in it."""
        path = self.system.path(directory)
        path.mkdir(parents=True)
        (path / "file").write_text("content")

    def upgrade(self, *options: str) -> str:
        """Install the next version: the same files."""
        return self.apt(*options, "install", *(_next_version(path, self.scratch) for path in self.packages))

    def orphans(self) -> list[str]:
        """The origins of what can be restored, for root."""
        return [json.loads(line)["origin"] for line in self.trashd("list", "--json").splitlines()]


@contextlib.contextmanager
def booted_with_packages(release: str) -> Iterator[DebianMachine]:
    """Installed while it runs, as by an administrator."""
    with booted_machine(
        BUILT / f"{release}-try", release, lambda machine: machine.apt("install", *machine.packages)
    ) as machine:
        yield machine


@contextlib.contextmanager
def booted_machine(root: Path, release: str, install: Callable[[DebianMachine], object]) -> Iterator[DebianMachine]:
    """A machine with a root directory, and what was built for a release; "": nothing."""
    packages = tuple(sorted(path for path in (BUILT / release).glob("trashd*.deb") if "dbgsym" not in path.name))
    with booted(limit_s=_LIMIT_S, lower=root) as system:
        copies = system.path("root/packages")
        copies.mkdir()
        machine = DebianMachine(system, packages, copies)
        install(machine)
        system.run("useradd", "--create-home", USER)
        system.path(VOLUME).mkdir()
        system.run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", VOLUME)
        machine.trashd("init", VOLUME)
        yield machine


def _next_version(package: Path, scratch: Path) -> Path:
    """A package as it would be after a release, for who is inside."""
    tree = scratch / package.stem
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN/control"
    version = re.search(r"^Version: (.+)$", control.read_text(), re.MULTILINE)
    assert version is not None
    control.write_text(control.read_text().replace(version[1], f"{version[1]}+next"))
    made = scratch / package.name
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "-Znone", tree, made], check=True)
    return Path("/root/packages") / package.name
