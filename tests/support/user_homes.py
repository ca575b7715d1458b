"""Users with homes, registries of stores, and what users throw away there: the accounts last for the block."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fusefs.core.identity import Identity
from fusefs.core.names import STORE, Name, VolumeId, parse_user_store_name
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import Volume, encode_volume
from fusefs.store.registry_lines import STORES, RegistryLine, encode_line
from tests.support.make_trees import Dir, make_tree
from tests.support.mount_namespaces import ROOTS
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_over, tmpfs_volume
from tests.support.service_process import Service
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
def accounts(homes: Mapping[int, Path]) -> Iterator[None]:
    """Have the system list only these users, by their homes, and root."""
    lines = [f"user{uid}:x:{uid}:{uid}::{home}:/bin/sh\n" for uid, home in homes.items()]
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
    done = run_as(uid, [TRASHD, *map(os.fsdecode, words)], cwd=cwd, env=env)
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


SOON = ("--keep-for", "0s")


def thrown(uid: int, home: Path, *words: str, where: str = "work") -> Path:
    """The container of what a user swapped in a directory of the home, and logged out."""
    work = home / where
    if not work.exists():
        make_tree(work, Dir(owner=(uid, uid)))
    job = make_tree(work / f"job-{time.monotonic_ns()}", Dir({"file": "x"}, owner=(uid, uid)))
    os.chown(job / "file", uid, uid)
    done = trashd_as(uid, home, "swap", "--json", *words, job)
    assert done.code == 0, done
    (told,) = done.objects()
    return Path(str(told["store"])) / "orphans" / str(told["id"])


def own_stores(running: Service) -> list[VolumeStatus]:
    observed_status = running.read_status()
    assert observed_status is not None
    return [one for one in observed_status.status.volumes if one.owner is not None]


def phases(running: Service) -> list[VolumePhase]:
    return [one.phase for one in own_stores(running)]


def outlasts(running: Service, uid: int, home: Path, kept: Path) -> None:
    """What is kept is still there when something else, which a user throws away later, has gone."""
    last = thrown(uid, home, *SOON)
    running.until(lambda: not last.exists())
    assert kept.exists()


def line_of(base: Path, volume: str | None = None) -> RegistryLine:
    """What a registry says of a directory with a store, whichever user made it."""
    kernel = Kernel()
    name = next(
        (Name(one) for one in sorted(os.listdir(os.fsencode(base))) if parse_user_store_name(one) is not None), STORE
    )
    with kernel.open_path(os.path.join(os.fsencode(base), name)) as fd:
        identity = kernel.identify(fd)
    identifier = volume or os.urandom(16).hex()
    return RegistryLine(Identity(*identity), VolumeId(identifier), os.statvfs(base).f_fsid, os.fsencode(base), name)


def register(uid: int, home: Path, lines: Iterable[RegistryLine]) -> None:
    path = registry_of(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, lines)))
    for one in (path, *path.parents[:3]):
        os.chown(one, uid, uid)


def bare_stores(uid: int, home: Path, n: int) -> list[RegistryLine]:
    """So many stores of a user's, each with nothing but what makes it one."""
    lines = []
    for number in range(n):
        store = home / f"bare-{number}" / ".trashd"
        (store / "u" / str(uid)).mkdir(parents=True)
        (store / "u" / str(uid)).chmod(0o700)
        line = line_of(store.parent)
        (store / "volume.json").write_bytes(encode_volume(Volume(line.volume, True, 0)))
        for one in (store.parent, store, *store.rglob("*")):
            os.chown(one, uid, uid)
        lines.append(line)
    return lines
