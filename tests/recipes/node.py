"""A machine that recipes are followed on."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.booted_systemd import TRASHD, System, booted
from tests.support.foreground_mount import SHARED_LIMIT_S
from tests.support.recipe_pages import Step
from tests.support.trashd_command import CommandResult
from tests.systemd.machine import REAPER, booted_with_trashd

ALICE = 4711
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMIT_S = 300.0


class Node:
    """A booted systemd, and the volumes of a test."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._volumes: list[str] = []

    def volume(self, path: str, options: str = "mode=755") -> Path:
        """Mount a new tmpfs; where we see it. It has no store yet."""
        self.system.path(path).mkdir(parents=True, exist_ok=True)
        self.system.run("mount", "-t", "tmpfs", "-o", f"size=256m,{options}", "tmpfs", path)
        self._volumes.append(path)
        return self.system.path(path)

    def run(self, step: Step) -> CommandResult:
        """What a step of a recipe comes to here, typed into bash by root, or by alice in her home."""
        user = () if step.is_root else ("runuser", "--user=alice", "--")
        home = "/root" if step.is_root else "/home/alice"
        clean = ("env", "--ignore-environment", f"--chdir={home}", f"HOME={home}", PATH, "LC_ALL=C.UTF-8")
        argv = self.system.argv(*user, *clean, "bash", "-c", step.command)
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        return CommandResult(done.returncode, done.stdout, "")

    def root(self, command: str) -> str:
        """What root's command says, which has to succeed."""
        done = self.run(Step("", True, command, ""))
        assert done.code == 0, (command, done)
        return done.out

    def alice(self, command: str) -> str:
        """What alice's command says, which has to succeed."""
        done = self.run(Step("", False, command, ""))
        assert done.code == 0, (command, done)
        return done.out

    def leave(self) -> None:
        """Stop the service, look at each volume's store, and unmount them. Raises  AssertionError"""
        self.system.systemctl("stop", REAPER)
        for path in reversed(self._volumes):
            if self.system.path(path).joinpath(".trashd").exists():
                assert self.system.trashd("doctor", path) == ""
            self.system.run("umount", "--recursive", path)
        self._volumes.clear()


@contextlib.contextmanager
def booted_node(*, has_trashd: bool = True) -> Iterator[Node]:
    """A machine that has booted; people there type `trashd`, unless it is yet to be installed."""
    with booted_with_trashd() if has_trashd else booted(limit_s=SHARED_LIMIT_S) as system:
        if has_trashd:
            system.path("usr/local/bin/trashd").symlink_to(TRASHD)
        system.run("useradd", "--create-home", "--shell=/bin/bash", f"--uid={ALICE}", "alice")
        yield Node(system)


def only_orphan(node: Node, volume: str) -> str:
    """The id of the one orphan that is there."""
    (told,) = node.system.trashd("list", "--json", "--volume", volume).splitlines()
    return str(json.loads(told)["id"])
