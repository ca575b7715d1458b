"""Version 0.3.0, upgraded to this one on a machine that uses it, and removed: no orphan is lost, in any package."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fusefs.core.version import VERSION
from tests.packages.debian_machine import BUILT, USER, VOLUME, DebianMachine, booted_machine
from tests.support.booted_systemd import REPO
from tests.support.make_trees import IMMUTABLE, set_flags

pytestmark = [pytest.mark.needs("systemd"), pytest.mark.timeout(900)]

OLD = BUILT / "0.3.0"
CONFIG, SERVED, BY_FSTAB = "/etc/trashd/config.toml", "/srv/served", "/srv/by-fstab"
REAPER, MOUNT = "trashd-reaper.service", "trashd-mount@srv-served.service"
STATES = {
    f"{VOLUME}/restorable": "orphans",
    f"{VOLUME}/pinned": "orphans",
    f"{VOLUME}/set-aside": "quarantine",
    f"{VOLUME}/begun": "reaping",
    f"{VOLUME}/unfinished": "orphans",
    f"{VOLUME}/alices": "orphans",
    f"/home/{USER}/own": "orphans",
}
"""What is restorable, and from where: the command of the new version completes the unfinished swap."""
KEPT = f"{VOLUME}/kept"


@dataclass(frozen=True, slots=True)
class Deb:
    """The packages for a release of Debian, by apt."""

    release: str
    has_units: ClassVar = True

    @property
    def root(self) -> Path:
        return BUILT / f"{self.release}-try"

    def install(self, machine: DebianMachine) -> None:
        machine.apt("install", *self._packages(OLD / "build/packages"))

    def upgrade(self, machine: DebianMachine) -> None:
        machine.upgrade("-o", "DPkg::Options::=--force-confold")

    def remove(self, machine: DebianMachine) -> str:
        names = [path.name.partition("_")[0] for path in machine.packages]
        return machine.apt("remove", *names) + machine.apt("purge", *names)

    def _packages(self, built: Path) -> list[Path]:
        return [path for path in (built / self.release).glob("trashd*.deb") if "dbgsym" not in path.name]


class Rpm:
    """The packages of trashd.spec, by rpm on Debian 13, which has the libraries."""

    has_units = True
    root = BUILT / "trixie-try"

    def install(self, machine: DebianMachine) -> None:
        libraries = ("click", "msgspec", "prometheus-client", "pyfuse3", "rich", "trio")
        machine.apt("install", "fuse3", *(f"python3-{name}" for name in libraries))
        self._rpm(machine, "--install", *(OLD / "build/packages/rpm").glob("*64.rpm"))

    def upgrade(self, machine: DebianMachine) -> None:
        self._rpm(machine, "--upgrade", "--force", *(BUILT / "rpm").glob("*64.rpm"))

    def remove(self, machine: DebianMachine) -> str:
        printed = machine.system.run("rpm", "--erase", "trashd", "trashd-mount").stdout
        assert machine.system.path(f"{CONFIG}.rpmsave").exists()
        return printed

    def _rpm(self, machine: DebianMachine, *words: str | Path) -> None:
        machine.system.run("rpm", "--nodeps", *words)
        machine.system.run("systemd-sysusers")  # on a system of RPM, triggers of systemd's package do this
        machine.system.run("systemd-tmpfiles", "--create")
        machine.system.systemctl("daemon-reload")


class Pipx:
    """pipx on this machine's own system, as howto/install.md has it; nothing is a unit."""

    has_units = False
    root = Path("/")

    def install(self, machine: DebianMachine) -> None:
        self._pipx(machine, OLD, "install")

    def upgrade(self, machine: DebianMachine) -> None:
        self._pipx(machine, REPO, "install --force")

    def remove(self, machine: DebianMachine) -> str:
        printed = machine.trashd("service", "uninstall")
        machine.in_minutes(*self._ENV, "pipx", "uninstall", "trashd")
        return printed

    _ENV = (
        "env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "PIPX_HOME=/opt/pipx",
        "PIPX_BIN_DIR=/usr/local/bin", "PIP_NO_INDEX=1", f"PIP_FIND_LINKS={BUILT}/wheels",
    )  # fmt: skip

    def _pipx(self, machine: DebianMachine, clone: Path, command: str) -> None:
        script = f'umask 022; cd "$1"; pipx {command} "$PWD[mount]" && {{ trashd service install || [ $? = 13 ]; }}'
        machine.in_minutes(*self._ENV, "sh", "-ec", script, "sh", clone)


FORMS: dict[str, Deb | Rpm | Pipx] = {
    "trixie": Deb("trixie"),
    "bookworm": Deb("bookworm"),
    "rpm": Rpm(),
    "pipx": Pipx(),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Deb | Rpm | Pipx:
    return FORMS[request.param]


@pytest.fixture
def machine(form: Deb | Rpm | Pipx) -> Iterator[DebianMachine]:
    """A machine with 0.3.0."""
    release = form.release if isinstance(form, Deb) else ""
    with booted_machine(form.root, release, form.install) as installed:
        yield installed


def swap(machine: DebianMachine, directory: str) -> str:
    """Returns  the orphan's id"""
    machine.fill(directory)
    return machine.trashd("swap", "--print-id", directory).strip()


def make_orphans(machine: DebianMachine) -> None:
    """Make an orphan in each state, some by commands that are killed."""
    system = machine.system
    swap(machine, f"{VOLUME}/restorable")
    swap(machine, KEPT)
    machine.trashd("keep", swap(machine, f"{VOLUME}/pinned"))
    machine.fill(f"{VOLUME}/set-aside")
    set_flags(system.path(f"{VOLUME}/set-aside/file"), IMMUTABLE)
    aside = machine.trashd("swap", "--print-id", f"{VOLUME}/set-aside").strip()
    machine.trashd("reap", "--now", aside, code=13)
    machine.fill(f"{VOLUME}/begun")
    for i in range(50):
        system.path(f"{VOLUME}/begun/{i}").touch()
    begun = machine.trashd("swap", "--print-id", f"{VOLUME}/begun").strip()
    machine.trashd("reap", "--now", begun, killed_at="unlinkat:when=20")
    machine.fill(f"{VOLUME}/unfinished")
    machine.trashd("swap", f"{VOLUME}/unfinished", killed_at="renameat:when=1")
    for directory in (f"{VOLUME}/alices", f"/home/{USER}/own"):
        machine.as_user("sh", "-ec", 'mkdir "$1" && echo content >"$1/file"', "sh", directory)
        machine.as_user("trashd", "swap", directory)


def test_an_upgrade_from_0_3_0_keeps_mounts_service_configuration_and_orphans(
    machine: DebianMachine, form: Deb | Rpm | Pipx
) -> None:
    system = machine.system
    config = system.path(CONFIG)
    config.write_text(config.read_text().replace('poll = "10m"', 'poll = "9m"'))
    mine = config.read_text()
    start_service(machine, form)
    machine.trashd("pause", VOLUME)
    for directory in (SERVED, BY_FSTAB):
        machine.fill(directory)
    mount(machine, form)
    make_orphans(machine)
    before = daemons(machine)
    assert len(before) >= 3
    held = os.open(system.path(f"{SERVED}/file"), os.O_RDONLY)
    try:
        form.upgrade(machine)
        assert daemons(machine) >= before, "the old daemons still run"
        assert os.read(held, 10) == b"content"
    finally:
        os.close(held)
    assert machine.trashd("--version") == f"trashd, version {VERSION}\n"
    for directory in (SERVED, BY_FSTAB):
        assert system.path(f"{directory}/file").read_text() == "content"
        swap(machine, f"{directory}/late")
        assert os.listdir(system.path(f"{directory}/late")) == []
        machine.trashd("restore", f"{directory}/late")
        assert system.path(f"{directory}/late/file").read_text() == "content"
    assert config.read_text() == mine

    listed = {entry["origin"]: entry for entry in map(json.loads, machine.trashd("list", "--json").splitlines())}
    assert {origin: entry["state"] for origin, entry in listed.items() if origin != KEPT} == STATES
    assert listed[f"{VOLUME}/pinned"]["expires_ns"] is None
    restart(machine, form)
    assert daemons(machine).isdisjoint(before)
    for directory in (SERVED, BY_FSTAB):
        assert system.path(f"{directory}/file").read_text() == "content"
    for origin in STATES:
        if origin.endswith("set-aside"):
            (immutable,) = system.path(f"{VOLUME}/.trashd/u/0/quarantine").glob("*/tree/file")
            set_flags(immutable, IMMUTABLE, on=False)
        machine.trashd("restore", listed[origin]["id"])
        if origin.endswith("begun"):
            assert 0 < len(os.listdir(system.path(origin))) < 51
        else:
            assert system.path(f"{origin}/file").read_text().strip() == "content"
    machine.trashd("resume", VOLUME)
    # An orphan that expires before the new service has begun is kept for an hour (grace).
    system.wait_for(lambda: phase(machine) == "idle", "the new service has begun")
    machine.fill(f"{VOLUME}/due")
    machine.trashd("swap", "--keep-for", "0s", f"{VOLUME}/due")
    system.wait_for(lambda: machine.orphans() == [KEPT], "the new service reaps what is due")

    printed = form.remove(machine)
    if form.has_units:
        assert f"  {VOLUME}\n" in printed
        assert system.state(REAPER) == "inactive"
    assert system.path(f"{SERVED}/file").read_text() == "content"
    for place in ("/usr/bin/trashd", "/usr/local/bin/trashd", "/opt/pipx/venvs/trashd", "/usr/lib/trashd/trashd"):
        assert not system.path(place).exists()
    (file,) = system.path(VOLUME).glob(".trashd/u/0/orphans/*-kept-*/tree/file")
    assert file.read_text() == "content"
    assert system.path("/var/lib/trashd/stores").exists()


def start_service(machine: DebianMachine, form: Deb | Rpm | Pipx) -> None:
    if form.has_units:
        machine.system.systemctl("enable", "--now", REAPER)
    else:
        machine.in_background("trashd", "service", "run")
        machine.system.wait_for(lambda: ", pid " in machine.trashd("status", code=None), "it serves")


def phase(machine: DebianMachine) -> str:
    """What the service does with VOLUME."""
    for line in machine.trashd("status", "--json", code=None).splitlines():
        for volume in json.loads(line).get("volumes", ()):
            if volume["path"] == VOLUME:
                return str(volume["phase"])
    return ""


def mount(machine: DebianMachine, form: Deb | Rpm | Pipx) -> None:
    if form.has_units:
        machine.system.systemctl("start", MOUNT)
        machine.system.run("mount", "-t", "fuse.trashd", BY_FSTAB, BY_FSTAB)
    else:
        for directory in (SERVED, BY_FSTAB):
            machine.trashd("mount", directory, directory)


def restart(machine: DebianMachine, form: Deb | Rpm | Pipx) -> None:
    """As howto/install.md has it."""
    if form.has_units:
        machine.system.systemctl("restart", REAPER, MOUNT)
        machine.trashd("umount", BY_FSTAB)
        machine.system.run("mount", "-t", "fuse.trashd", BY_FSTAB, BY_FSTAB)
    else:
        machine.system.run("pkill", "--full", "trashd service run")
        machine.system.wait_for(lambda: not pids(machine, "trashd service run"), "the old service ends")
        for directory in (SERVED, BY_FSTAB):
            machine.trashd("umount", directory)
        start_service(machine, form)
        mount(machine, form)


def daemons(machine: DebianMachine) -> set[str]:
    """The processes of the service and of mounts."""
    return pids(machine, "trashd (service|mount)|mount.fuse.trashd")


def pids(machine: DebianMachine, pattern: str) -> set[str]:
    return set(machine.system.run("pgrep", "--full", pattern, code=None).stdout.split())
