"""A mate: who may rename another user's directory, since their group may write to it, and may delete nothing in it.

With it the mate plants a folder for a user in a store: the directory's owner did not put it there.
"""

from __future__ import annotations

import os
from pathlib import Path

from fusefs.core.names import VolumeId, make_id
from fusefs.core.record import Method, Record, encode
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDERS, decode_volume
from tests.support.make_trees import Dir, File, Spec, make_tree
from tests.support.other_users import as_user
from tests.support.store_verbs import raw

TEAM = 5000
THESIS = b"years of work"
FORGED = str(make_id("20200101T000000", 0, b"data", bytes(6)))
"""The id of what the mate has prepared to be reaped."""


def share_project(volume: Path, owner: int) -> Path:
    """A project of the team's, as setgid directories and umask 002 make it, with two directories of one owner's."""
    his = (owner, TEAM)
    results = Dir({"thesis.txt": File(THESIS, mode=0o644, owner=his)}, mode=0o755, owner=his)
    shared = Dir({"results": results}, mode=0o2775, owner=his)
    notes = File(b"{}", mode=0o664, owner=his)
    entries: Spec = {"planted": shared, "data": shared, "notes": notes}
    return make_tree(volume / "project", Dir(entries, mode=0o2775, owner=(0, TEAM)))


def expired_record(volume: Path, tree: Path) -> bytes:
    """What a mate forges: an orphan that is to be reaped at once, and whose tree that is."""
    described = decode_volume((volume / ".trashd/volume.json").read_bytes())
    assert described is not None
    return record_of(described.id, tree)


def record_of(volume: VolumeId, tree: Path) -> bytes:
    kernel = Kernel()
    with kernel.open_path(raw(tree)) as fd, kernel.open_path(raw(tree.parent)) as up:
        record = Record(
            id=make_id("20200101T000000", 0, b"data", bytes(6)),
            volume=volume,
            method=Method.REMOVED,
            origin=None,
            parent=kernel.identify(up),
            fresh=None,
            victim=kernel.identify(fd),
            host="",
            boot="",
            created_ns=1_577_836_800_000_000_000,
            retention_s=1,
            note="",
            lent_mode=None,
        )
    return encode(record)


def plant(volume: Path, mate: int, owner: int, name: str) -> Path:
    """What a mate makes of an owner's directories: a folder of that name, with a forged orphan in it and in `drop/`."""
    project, store = share_project(volume, owner), volume / ".trashd"
    planted = (store / "new" if (store / "new").exists() else store / "u") / name
    record = expired_record(volume, project / "data")

    def act() -> None:
        folder = project / "planted"
        for part in FOLDERS:
            (folder / os.fsdecode(part)).mkdir()
            (folder / os.fsdecode(part)).chmod(0o777)
        container = folder / "orphans" / FORGED
        container.mkdir()
        container.chmod(0o777)
        (project / "notes").write_bytes(record)
        (project / "notes").rename(container / "record.json")
        (project / "data").rename(container / "tree")
        (folder / "drop" / "his").mkdir()
        folder.rename(planted)

    as_user(mate, act, groups=[TEAM])
    return planted
