"""Users with homes, and registries of stores: the accounts are the tests' own, for the block."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from fusefs.store.registry_lines import STORES
from tests.support.mount_namespaces import ROOTS
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_over, tmpfs_volume
from tests.support.trashd_command import TRASHD, CommandResult, environment

ALICE, BOB = 1000, 6101
_PASSWD = Path("/etc/passwd")


def forget_stores() -> None:
    """Root's registry is empty again, where it is a test worker's own (tests/conftest.py), and not the machine's."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        (ROOTS / os.fsdecode(STORES)).unlink(missing_ok=True)


@contextlib.contextmanager
def homes(*uids: int, options: tuple[str, ...] = ()) -> Iterator[Mapping[int, Path]]:
    """A directory on a disk of its own for each of these users, which the accounts tell; root's registry is empty."""
    with tmpfs_volume("64m", options) as disk, tmpfs_over(ROOTS):
        made = {uid: disk / "home" / f"user{uid}" for uid in uids}
        for uid, home in made.items():
            home.mkdir(parents=True)
            os.chown(home, uid, uid)
            home.chmod(0o700)
        with accounts(made):
            yield made


@contextlib.contextmanager
def accounts(known: Mapping[int, Path]) -> Iterator[None]:
    """The system lists just these users, and root."""
    lines = [f"user{uid}:x:{uid}:{uid}::{home}:/bin/sh\n" for uid, home in known.items()]
    with tmpfs_volume("1m") as scratch:
        text = scratch / "passwd"
        text.write_text("root:x:0:0::/root:/bin/sh\n" + "".join(lines))
        subprocess.run(["mount", "--bind", text, _PASSWD], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", _PASSWD], check=True)


def registry_of(home: Path) -> Path:
    return home / ".local/state/trashd/stores"


def trashd_as(
    uid: int, home: Path, *words: str | bytes | Path, cwd: Path = Path("/"), **variables: str
) -> CommandResult:
    """`trashd WORDS` as a user who has logged in."""
    env = environment({"HOME": str(home), **variables})
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        if name not in variables:
            env.pop(name, None)
    done = run_as(uid, [TRASHD, *map(_text, words)], cwd=cwd, env=env)
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def _text(word: str | bytes | Path) -> str:
    return os.fsdecode(word)
