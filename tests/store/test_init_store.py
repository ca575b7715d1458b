"""`trashd init`: what it makes, what it tries and notes in volume.json, and what a killed one or nodes left."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.node_beats import NodeBeat, beat_name, encode_beat
from fusefs.linux.kernel import Kernel
from tests.support.fuse_bad_rename import lying_volume
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, tmpfs_volume
from tests.support.small_orphans import OTHER
from tests.support.store_verbs import (
    ENTRIES,
    ActingBefore,
    DyingAt,
    assert_silent,
    die,
    in_child,
    init,
)
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root")

BOB = 1002
BEAT = beat_name("beta", str(uuid.UUID(int=7))).decode()


def facts(volume: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((volume / ".trashd/volume.json").read_text())
    return told


def old_facts(volume: Path) -> dict[str, Any]:
    """What it said before there was this key."""
    return {key: one for key, one in facts(volume).items() if key != "noreplace"}


@pytest.mark.parametrize("filesystem", ALL_FILESYSTEMS)
def test_a_local_filesystem_proves_all(filesystem: str) -> None:
    with tmpfs_volume() if filesystem == "tmpfs" else loop_volume(filesystem) as volume:
        init(volume)
        proven = {key for key, value in facts(volume).items() if value is True}
        assert proven >= {"noreplace", "exchange", "strangers_refused", "unnamed"}
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert_silent(volume)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(
    ("mode", "spares"), [("honest", True), ("ignore", False), ("lie", False), ("einval", False), ("enosys", False)]
)
def test_a_filesystem_that_ignores_one_flag_is_not_believed_to_read_the_other(mode: str, spares: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        assert (facts(served.path)["noreplace"], facts(served.path)["exchange"]) == (spares, spares)
        assert_silent(served.path)


def test_a_store_of_before_is_proven_by_its_next_init_and_then_left() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old_facts(volume)))
        init(volume)
        assert facts(volume)["noreplace"] is True
        renewed = path.stat().st_mtime_ns
        init(volume)
        assert path.stat().st_mtime_ns == renewed


def test_a_swap_does_not_prove_anything_in_a_store_of_before() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old := old_facts(volume)))
        done_well("swap", make_tree(volume / "job", {"a": "1"}))
        assert facts(volume) == old


@pytest.mark.parametrize("call", ["exchange", "renameat2", "tmpfile", "strangers"])
def test_what_a_killed_trial_of_one_mount_left_the_next_init_removes(call: str) -> None:
    """None of it is set aside as planted."""
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps({**facts(volume), "noreplace": None}))
        assert in_child(partial(init, volume, Kernel(ActingBefore(call, die)))) == DyingAt.EXIT_CODE
        init(volume)
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert facts(volume)["noreplace"] is True


# What a killed maker left beside a store


def test_init_takes_away_what_a_killed_copy_left() -> None:
    with tmpfs_volume() as volume:
        left = volume / ".trashd.new-copy-0123456789abcdef"
        left.mkdir(0o700)
        (left / "0123456789abcdef").touch()
        (left / "logs").mkdir(0o700)
        init(volume)
        assert not left.exists()


def test_a_directory_of_roots_that_a_user_names_like_a_copy_in_the_making_keeps_what_it_has() -> None:
    with tmpfs_volume() as volume:
        os.chown(volume, BOB, BOB)
        for mode in (0o700, 0o755):
            secret = make_tree(volume / "secret", Dir({"key": b"1", "more": {"key": b"2"}}, mode))
            before = snapshot(secret)
            named = volume / f".trashd.new-copy-{mode}"
            as_user(BOB, partial(os.rename, secret, named))
            init(volume)
            assert snapshot(named) == before


# The beats of nodes in a store


def beats_in(volume: Path) -> Path:
    nodes = volume / ".trashd/nodes"
    nodes.mkdir(0o700)
    (nodes / BEAT).write_bytes(encode_beat(NodeBeat(started_ns=1, n=1, version="0", phase="idle")))
    return nodes


def test_beats_are_left_where_they_are(volume: Path) -> None:
    nodes = beats_in(volume)
    init(volume)
    assert_silent(volume)
    assert [path.name for path in nodes.iterdir()] == [BEAT]


def test_what_is_no_directory_of_roots_alone_makes_way(volume: Path) -> None:
    nodes = volume / ".trashd/nodes"
    nodes.symlink_to("/etc")
    init(volume)
    assert not nodes.is_symlink()
    for mode, owner in ((0o777, 0), (0o700, OTHER)):
        make_tree(nodes, {"theirs": "1"})
        nodes.chmod(mode)
        os.chown(nodes, owner, owner)
        init(volume)
        assert not nodes.exists()
    kept = [path.read_text() for path in (volume / ".trashd").glob("nodes.planted-*/theirs")]
    assert kept == ["1", "1"]


def test_an_old_stores_beats_go_with_it_and_what_else_is_there_stays() -> None:
    for others in ((), ("precious",)):
        with tmpfs_volume() as volume:
            init(volume)
            nodes = beats_in(volume)
            (volume / ".trashd/reaper.lock").touch()
            shutil.rmtree(volume / ".trashd/u/0")
            for name in others:
                (nodes / name).touch()
            (volume / ".trashd").chmod(0o777)
            init(volume)
            init(volume)
            left = [path.name for path in volume.glob(".trashd/old-*/nodes/*")]
            assert left == list(others)
            assert bool(list(volume.glob(".trashd/old-*"))) is bool(others)


# What it makes


@pytest.mark.quick("init")
def test_init_leaves_a_magic_file_with_a_random_id(volume: Path) -> None:
    fields = json.loads((volume / ".trashd/volume.json").read_bytes())
    assert (fields["magic"], fields["format"], fields["exchange"]) == ("trashd", 2, True)
    with tmpfs_volume() as other:
        init(other)
        assert json.loads((other / ".trashd/volume.json").read_bytes())["id"] != fields["id"]
        assert_silent(other)


def test_init_tells_backup_programs_to_stay_out(volume: Path) -> None:
    tag = (volume / ".trashd/CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_store_is_open_to_all_and_each_folder_to_its_user_alone(volume: Path) -> None:
    names = (".trashd", ".trashd/folders", ".trashd/new", ".trashd/u", ".trashd/u/0")
    assert [(volume / name).stat().st_mode & 0o7777 for name in names] == [0o755, 0o755, 0o1777, 0o755, 0o700]
