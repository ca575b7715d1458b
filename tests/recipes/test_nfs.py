"""docs/howto/recipes/nfs.md: a server and a client, each a kernel of its own."""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import nfs_actions, nfs_server, uml_actions
from tests.support.nfs_machines import COMMANDS, VERSIONS
from tests.support.recipe_pages import RecipePage, Step
from tests.support.trashd_command import CommandResult
from tests.support.uml_machine import Machine, started
from tests.support.uml_switch import Switch

pytestmark = [pytest.mark.needs("root", "uml", "minutes"), pytest.mark.timeout(400)]

RECIPE = RecipePage("nfs")
ALICE = 4711
ADDRESSES = {"server": "10.9.0.3", "client": "10.9.0.1"}
HOSTS = [f"{address}={name}" for name, address in ADDRESSES.items()]
MODULES = {"server": ("nfsd",), "client": ("nfsv4",)}
_AS_ALICE = ("setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups")
_DISK_BYTES = 128 << 20


class Pair(NamedTuple):
    """The two machines that the page names."""

    server: Machine
    client: Machine

    def run(self, step: Step) -> CommandResult:
        """What a step of the page comes to."""
        machine = {"server": self.server, "client": self.client}[step.machine]
        program, *words = shlex.split(step.command)
        if program == "trashd":
            return machine.call(uml_actions.trashd, words, 0 if step.is_root else ALICE)
        user = () if step.is_root else _AS_ALICE
        return machine.call(uml_actions.run_command, [*user, "bash", "-c", step.command])

    def root(self, machine: str, command: str) -> str:
        """What root's command says there, which has to succeed."""
        done = self.run(Step(machine, True, command, ""))
        assert done.code == 0, (command, done)
        return done.out


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The server exports its disk as the page says, with directories of alice's, and the client has it mounted."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="uml.", dir="/dev/shm")))
        switch = Switch(folder)
        stack.callback(switch.close)
        disk = folder / "disk"
        with disk.open("wb") as file:
            file.truncate(_DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-qF", disk], check=True)
        both = [
            stack.enter_context(
                started(
                    folder, name, ADDRESSES[name], switch.port(name), modules=MODULES[name],
                    disk=disk if name == "server" else None, hosts=HOSTS,
                    imports=("tests.support.nfs_actions", "tests.support.nfs_server", *COMMANDS),
                )
            )
            for name in ADDRESSES
        ]  # fmt: skip
        for machine in both:
            machine.boot()
        made = Pair(*both)
        made.root("server", "mkdir /mnt/export && mount /dev/ubda /mnt/export && chmod 1777 /mnt/export")
        made.root("server", "mount -t nfsd nfsd /proc/fs/nfsd")
        made.server.call(nfs_server.start_locks)
        (exports,) = RECIPE.files()
        made.root(
            "server", f"mkdir -p /etc/exports.d && echo '{exports.text.strip()}' >{exports.path} && : >/etc/exports"
        )
        for name in ("project", "old"):
            there = f"/mnt/export/{name}"
            made.root("server", f"mkdir {there} && echo old >{there}/file && chown -R {ALICE}:{ALICE} {there}")
        RECIPE.follow("On the server", made.run)
        made.root("server", "rpc.mountd")
        made.server.call(nfs_server.start)
        made.server.call(nfs_server.end_grace)
        made.client.call(nfs_server.mount, ADDRESSES["server"], ADDRESSES["client"], VERSIONS["v4.2"], "/mnt/export")
        yield made
        made.root("server", "trashd doctor /mnt/export")


def test_an_export_whose_directories_are_emptied_on_either_side(pair: Pair) -> None:
    reading = pair.client.start(nfs_actions.read_late, "/mnt/export/project/file")
    assert reading.wait_report() == "open"
    RECIPE.follow("A directory is emptied on the server", pair.run)
    reading.go()
    assert reading.wait_report() == "read"
    RECIPE.follow("What clients see", pair.run)
    (orphan,) = pair.root("server", "trashd list --json --volume /mnt/export").splitlines()
    pair.root("server", f"trashd reap --now {json.loads(orphan)['id']}")
    reading.go()
    assert reading.result() == ["old\n", "old\n"]
    RECIPE.follow("From a client", pair.run)
