"""A machine of a Debian release, booted, on which the packages that were built for it are installed by apt."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.booted_systemd import REPO, System, booted

VOLUME = "/srv/volume"
USER = "alice"
_BUILT = REPO / "build/packages"
_APT_S, _LIMIT_S = 400.0, 1000.0


@dataclass(frozen=True, slots=True)
class DebianMachine:
    """It has a volume at VOLUME with a store of root's, and a user."""

    system: System
    packages: tuple[Path, ...]
    scratch: Path

    def apt(self, *words: str | Path) -> str:
        """What apt-get says; it has no network."""
        command = ("env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
        done = subprocess.run(
            self.system.argv(*command, "apt-get", "--quiet", "--yes", "--no-install-recommends", *words),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_APT_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def trashd(self, *words: str) -> str:
        """What root's command says."""
        return self.system.run("trashd", *words).stdout

    def as_user(self, *words: str) -> str:
        """What a command of the user's says."""
        return self.system.run("runuser", "-u", USER, "--", *words).stdout

    def fill(self, directory: str) -> None:
        """Make a directory of root's with a file in it."""
        path = self.system.path(directory)
        path.mkdir(parents=True)
        (path / "file").write_text("content")

    def upgrade(self) -> str:
        """Install the next version: the same files."""
        return self.apt("install", *(_next_version(path, self.scratch) for path in self.packages))

    def orphans(self) -> list[str]:
        """The origins of what can be restored, for root."""
        return [json.loads(line)["origin"] for line in self.trashd("list", "--json").splitlines()]


@contextlib.contextmanager
def booted_with_packages(release: str) -> Iterator[DebianMachine]:
    """Installed while it runs, as by an administrator."""
    packages = tuple(sorted(path for path in (_BUILT / release).glob("trashd*.deb") if "dbgsym" not in path.name))
    with booted(limit_s=_LIMIT_S, lower=_BUILT / f"{release}-try") as system:
        copies = system.path("root/packages")
        copies.mkdir()
        machine = DebianMachine(system, packages, copies)
        machine.apt("install", *packages)
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
