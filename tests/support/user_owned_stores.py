"""What users throw away in their homes, and what root's service says of their own stores there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from fusefs.core.identity import Identity
from fusefs.core.names import STORE, Name, VolumeId, whose_store
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import Volume, encode_volume
from fusefs.store.registry_lines import RegistryLine, encode
from tests.support.make_trees import Dir, make_tree
from tests.support.service_process import Service
from tests.support.user_homes import registry_of, trashd_as

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
    seen = running.seen()
    assert seen is not None
    return [one for one in seen.status.volumes if one.owner is not None]


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
    name = next((Name(one) for one in sorted(os.listdir(os.fsencode(base))) if whose_store(one) is not None), STORE)
    with kernel.open_path(os.path.join(os.fsencode(base), name)) as fd:
        identity = kernel.identify(fd)
    identifier = volume or os.urandom(16).hex()
    return RegistryLine(Identity(*identity), VolumeId(identifier), os.statvfs(base).f_fsid, os.fsencode(base), name)


def register(uid: int, home: Path, lines: Iterable[RegistryLine]) -> None:
    path = registry_of(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode, lines)))
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
