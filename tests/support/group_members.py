"""A mate: who may rename another user's directory, since their group may write to it, and may delete nothing in it.

With it the mate plants a folder for a user in a store: the directory's owner did not put it there.
"""

import json
import os
from pathlib import Path

from fusefs.core.names import VolumeId, make_id
from fusefs.core.record import Method, Record, encode_record
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import FOLDERS, Volume, decode_volume, encode_volume
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
    described = decode_volume((volume / ".trashd/volume.json").read_bytes(), b"")
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
    return encode_record(record)


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


LIVE = b"in use, and nobody's to delete"
ID = VolumeId("5" * 32)
N_LIVE = 4


def shared_directories(volume: Path, alice: int) -> Path:
    """A project of the team's with directories and files of root's and of hers, as umask 002 makes them."""

    def of(uid: int, content: Spec) -> Dir:
        return Dir(content, mode=0o2775, owner=(uid, TEAM))

    def tree(uid: int) -> Dir:
        return of(uid, {"live": File(LIVE, mode=0o664, owner=(uid, TEAM))})

    def notes(uid: int) -> File:
        return File(b"{}", mode=0o664, owner=(uid, TEAM))

    def folder(uid: int) -> Dir:
        parts = {os.fsdecode(part): of(uid, {}) for part in FOLDERS}
        more: Spec = {"container": of(uid, {}), "tree": tree(uid), "dropped": tree(uid), "notes": notes(uid)}
        return of(uid, {**parts, **more})

    areas = {name: of(0, {}) for name in ("u", "new", "folders")}
    files = {name: notes(0) for name in ("volume.json", "note-0", f"note-{alice}")}
    spec: Spec = {"roots": of(0, {**areas, **files}), "of-0": folder(0), f"of-{alice}": folder(alice)}
    return make_tree(volume / "project", of(0, spec))


def forge_store(volume: Path, mate: int, alice: int) -> Path:
    """The project of such a volume with a `.trashd` that root never made: by all that can be read in it root did.

    The mate makes plain calls only. The last of it is root's: modes as a backup says that they were, or as a careful
    administrator sets them. From then on all of it is as trashd makes it.
    """
    project, kernel = shared_directories(volume, alice), Kernel()
    roots = project / "roots"
    with kernel.open_path(raw(roots)) as fd:
        described = Volume(ID, True, kernel.filesystem(fd), True, True, store=kernel.identify(fd))

    def fill(uid: int) -> None:
        folder, note = project / f"of-{uid}", roots / f"note-{uid}"
        with kernel.open_path(raw(folder)) as fd:
            found = kernel.identify(fd)._asdict()
        container = folder / "orphans" / FORGED
        (folder / "container").rename(container)
        (folder / "notes").write_bytes(record_of(ID, folder / "tree"))
        (folder / "notes").rename(container / "record.json")
        (folder / "tree").rename(container / "tree")
        (folder / "dropped").rename(folder / "drop/dropped")
        folder.rename(roots / "u" / str(uid))
        note.write_text(json.dumps({"uid": uid, "name": str(uid), "folder": found, "refused": []}))
        note.rename(roots / "folders" / str(uid))

    def act() -> None:
        (roots / "volume.json").write_bytes(encode_volume(described))
        fill(0)
        fill(alice)
        roots.rename(project / ".trashd")

    as_user(mate, act, groups=[TEAM])
    restore_modes(project / ".trashd")
    return project


def restore_modes(store: Path) -> None:
    """Give all of a store the modes that it has where root made it."""
    modes = {store: 0o755, store / "u": 0o755, store / "folders": 0o755, store / "new": 0o1777}
    for path in (store, *store.rglob("*")):
        if path.is_file():
            path.chmod(0o644 if path.parent in (store, store / "folders") else 0o600)
        else:
            path.chmod(modes.get(path, 0o700))


def live(volume: Path) -> int:
    """In how many places of a volume there is what is in use."""
    return sum(path.read_bytes() == LIVE for path in volume.rglob("live"))
