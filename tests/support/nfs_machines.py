"""Two NFS clients and their server, each a kernel of its own (uml_machine), on a network that a test can cut."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import nfs_server, uml_actions
from tests.support.trashd_command import CommandResult
from tests.support.uml_machine import Machine, started
from tests.support.uml_switch import Switch

_ADDRESSES = {"a": "10.9.0.1", "b": "10.9.0.2", "server": "10.9.0.3"}
_HOSTS = [f"{address}={name}" for name, address in _ADDRESSES.items()]
_DISK_BYTES = 128 << 20
COMMANDS = tuple(f"fusefs.{part}" for part in ("core", "linux", "store", "engine", "reaper", "cli"))
"""What commands import, for `imports` of a machine: it takes long there."""
_CLIENT_MODULES = ("nfsv3", "nfsv4")
_IN_MEMORY = Path("/dev/shm")
VERSIONS = {"v3": "vers=3,proto=tcp,mountproto=tcp,hard", "v4.2": "vers=4.2,hard"}
"""Mount options by version; `hard` is the default, said because all rests on it."""
UNLOCKED = "vers=3,proto=tcp,mountproto=tcp,hard,nolock"
"""No node sees another's locks: what a silent one has can be taken over at any step."""


class NfsClient(NamedTuple):
    """A client, and where it has the volume mounted."""

    machine: Machine
    volume: str

    def trashd(self, *words: str) -> CommandResult:
        """Run `trashd WORDS` there; `{}` in a word is the volume."""
        return self.machine.call(uml_actions.trashd, [word.format(self.volume) for word in words])

    def run(self, *words: str) -> CommandResult:
        return self.machine.call(uml_actions.run_command, [word.format(self.volume) for word in words])

    def path(self, name: str) -> str:
        return f"{self.volume}/{name}"


class NfsVolume(NamedTuple):
    """A directory of the server's that both clients have mounted.

    below       as the server itself has it
    has_leases  a client that was silent for long loses its locks; else only when it, or the server, starts again
    """

    a: NfsClient
    b: NfsClient
    site: Site
    below: str
    has_leases: bool

    @property
    def server(self) -> Machine:
        return self.site.machine("server")

    @property
    def switch(self) -> Switch:
        """What their cables are plugged into."""
        return self.site.switch


class Site:
    """The three machines; what ended is started again when it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.switch = Switch(folder)
        self._stack = contextlib.ExitStack()
        self._ports = {name: self.switch.port(name) for name in _ADDRESSES}
        self._machines: dict[str, Machine] = {}
        self._disk = folder / "disk"
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._stack.close()
        self.switch.close()

    def boot(self, *names: str) -> None:
        """Start what does not run, of these or of all."""
        missing = [name for name in names or _ADDRESSES if name not in self._machines]
        for name in missing:
            self._machines[name] = self._start(name)
        for name in missing:
            self._machines[name].boot()
        for name in sorted(missing, reverse=True):  # the server first
            machine = self._machines[name]
            if name == "server":
                machine.call(nfs_server.serve, True)
            else:
                machine.call(nfs_server.start_locks)

    def lose(self, machine: Machine) -> None:
        """Kill a machine; the next `boot` starts it again."""
        machine.kill()
        del self._machines[machine.name]

    def crash_server(self) -> None:
        """Kill the server and start it anew: it has its disk and has forgotten all else."""
        self.lose(self.machine("server"))
        self.boot("server")

    def machine(self, name: str) -> Machine:
        return self._machines[name]

    @contextlib.contextmanager
    def volume(self, options: str) -> Iterator[NfsVolume]:
        """A new directory, mounted on both clients; all cables are whole and all machines awake before and after."""
        self.boot()
        name = f"volume{next(self._numbers)}"
        below = f"{nfs_server.EXPORT}/{name}"
        self.machine("server").call(uml_actions.make_directory, below)
        target = f"/mnt/{name}"
        for machine in (self.machine("a"), self.machine("b")):
            self.mount(machine, options, target, name)
        try:
            yield NfsVolume(
                NfsClient(self.machine("a"), target),
                NfsClient(self.machine("b"), target),
                self,
                below,
                "vers=4" in options,
            )
        finally:
            for port in self._ports.values():
                self.switch.mend(port)

    def mount(self, machine: Machine, options: str, target: str, name: str) -> None:
        """Mount a directory of the export on a client."""
        source = f"{nfs_server.EXPORT}/{name}" if "vers=3" in options else f"/{name}"
        machine.call(nfs_server.mount, _ADDRESSES["server"], machine.address, options, target, source)

    def _start(self, name: str) -> Machine:
        if name == "server" and not self._disk.exists():
            with self._disk.open("wb") as disk:
                disk.truncate(_DISK_BYTES)
            subprocess.run(["mkfs.ext4", "-qF", self._disk], check=True)
        is_server = name == "server"
        return self._stack.enter_context(
            started(
                self.folder, name, _ADDRESSES[name], self._ports[name],
                modules=("nfsd",) if is_server else _CLIENT_MODULES,
                disk=self._disk if is_server else None, hosts=_HOSTS,
                imports=("tests.support.nfs_server", *(() if is_server else ("tests.support.nfs_actions", *COMMANDS))),
            )
        )  # fmt: skip


@contextlib.contextmanager
def site() -> Iterator[Site]:
    """Three machines that run, and end with the block."""
    with tempfile.TemporaryDirectory(prefix="uml.", dir=_IN_MEMORY) as folder:
        made = Site(Path(folder))
        try:
            made.boot()
            yield made
        finally:
            made.close()
