"""The ways out and copies where there is no room, no right to write, no end of depth, or a second user."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import Incomplete, KernelRefused, Untrusted
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.stage import SwapOptions
from tests.support.covering_sets import runs_every_case
from tests.support.make_trees import Dir, deep_chain, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, full, loop_volume, tmpfs_volume
from tests.support.small_orphans import EXPIRED, command, orphan_of
from tests.support.store_verbs import ActingBefore as At
from tests.support.store_verbs import (
    die,
    entries,
    in_child,
    init,
    place,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.team_trees import tick

pytestmark = pytest.mark.needs("root")

UID = 1001


@contextmanager
def read_only(volume: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", volume], check=True)


# What a reaper had begun


@pytest.mark.parametrize("uid", [0, UID], ids=["root", "user"])
def test_restore_says_which_directories_the_reaper_has_closed_and_how_to_find_them(
    volume: Path, uid: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of others in root's orphan; in a user's, an own one that others may write in."""
    home = make_tree(volume / "home", Dir(owner=(uid, uid)))
    shared = Dir({"file": "x", "more": Dir({"leaf": "y"}, owner=(UID, UID))}, mode=0o2775, owner=(UID, UID))
    make_tree(home / "job", Dir({"shared": shared}, owner=(uid, uid)))
    tick(volume)
    identifier = as_user(uid, lambda: str(swap(home / "job").id)) if uid else swap(home / "job").id
    in_child(lambda: reap_now(volume, identifier, Kernel(At("rmdir", die))))
    assert command(volume, "restore", identifier) == 0
    (line,) = [one for one in capfd.readouterr().out.splitlines() if "mode 0700" in one]
    assert ("belong to root" in line) is (uid == 0)
    found = subprocess.run(["bash", "-c", line.partition(": ")[2]], capture_output=True, text=True, check=True)
    assert str(home / "job/shared") in found.stdout.splitlines()


def test_json_says_whose_the_closed_directories_are(volume: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for half, expected in ((True, 0), (False, None)):
        make_tree(volume / "job", {"sub": {"file": "x"}})
        identifier = swap(volume / "job").id
        if half:
            in_child(lambda: reap_now(volume, identifier, Kernel(At("rmdir", die))))  # noqa: B023  at once
        capfd.readouterr()
        assert command(volume, "restore", "--json", identifier, "--to", str(volume / f"back-{half}")) == 0
        assert json.loads(capfd.readouterr().out)["closed_uid"] == expected
        (volume / "job").rmdir()


# No room


class Full(NamedTuple):
    """A volume with what a full one could harm: a user's orphan, and root's with a store in it."""

    volume: Path
    whole: str
    outer: str


FULL_TYPES = ["tmpfs", pytest.param("ext4", marks=pytest.mark.needs("loop"))]


@contextmanager
def prepared_for_fullness(fs_type: str) -> Iterator[Full]:
    """Not full yet."""
    made = tmpfs_volume("4m", ("nr_inodes=300",)) if fs_type == "tmpfs" else loop_volume("ext4", 16)
    with made as volume:
        init(volume)
        make_tree(volume / "roots", {})
        make_tree(volume / "alice", Dir(owner=(UID, UID)))
        whole = her_orphan(volume, "whole")
        recover_all(volume)  # root registers her folder
        yield Full(volume, whole, with_a_store(volume))


def her_orphan(volume: Path, name: str) -> str:
    her_tree(volume, name)
    return as_user(UID, lambda: str(swap(volume / "alice" / name).id))


def her_tree(volume: Path, name: str) -> Path:
    path = make_tree(volume / "alice" / name, Dir({"leaf": name}, owner=(UID, UID)))
    os.chown(path / "leaf", UID, UID)
    return path


def with_a_store(volume: Path) -> str:
    """Root swaps a directory with a store in it that holds something, which root did not know of."""
    team = make_tree(volume / "roots/team", {"in": {"leaf": "in it"}})
    (volume / ".trashd").rename(volume / "aside")
    init(team)
    swap(team / "in")
    (volume / "aside").rename(volume / ".trashd")
    make_tree(volume / "roots/outer", {})
    team.rename(volume / "roots/outer/team")
    return str(swap(volume / "roots/outer").id)


def leaves(volume: Path) -> list[str]:
    """What every file says that a user would miss, wherever it is."""
    return sorted(path.read_text() for path in volume.rglob("leaf"))


@pytest.mark.parametrize("fs_type", FULL_TYPES)
def test_on_a_full_volume_the_ways_out_work_or_say_what_helps_and_nothing_is_lost(
    fs_type: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with prepared_for_fullness(fs_type) as full_one:
        volume, whole, outer = full_one
        her_tree(volume, "given")
        shutil.copytree(volume / ".trashd", volume / "roots/copy/.trashd", symlinks=True)
        before = leaves(volume)

        def says(words: str, *more: str | Path) -> int:
            code = run([*words.split(), *map(str, more)])
            assert code == 0 or "trashd reap --free" in capfd.readouterr().err, words
            assert leaves(volume) == before, words
            return code

        no_room = KernelRefused.exit_code
        with full(volume):
            assert says("list --volume", volume) == 0
            assert says("init", volume) == 0
            assert says("init", volume / "roots/copy") == no_room
            assert says("init", volume / "alice") == no_room
            assert says("swap --for-owner", volume / "alice/given") == 0  # by her reserve, and root's
            assert says("restore", whole, "--to", volume / "roots/back", "--volume", volume) == 0
            assert run(["reap", "--now", outer, "--volume", str(volume)]) == Incomplete.exit_code
            assert leaves(volume) == before
            before.remove("in it")
            assert says("reap --now --with-stores", outer, "--volume", volume) == 0
        assert says("init", volume / "roots/copy") == 0
        recover_all(volume)
        assert problems(volume) == []


# No end of depth


N_DEEP = 10_000 if runs_every_case() else 2_000


def test_what_is_as_deep_as_it_likes_is_given_and_restored_by_root() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        make_tree(volume / "alice", Dir(owner=(UID, UID)))
        deep_chain(volume / "alice/deep", N_DEEP)
        os.chown(volume / "alice/deep", UID, UID)
        before = snapshot(volume / "alice/deep")
        given = swap_for_owner(Kernel(), raw(volume / "alice/deep"), SwapOptions()).id
        restore(volume, given, to=volume / "back")
        assert snapshot(volume / "back") == before


# In the way


@contextmanager
def hers(mode: int = 0o755) -> Iterator[tuple[Path, str, str]]:
    """A volume with Alice's home, and two orphans of hers, the second with a cut record, in a registered folder."""
    with tmpfs_volume() as volume:
        init(volume)
        volume.chmod(mode)
        whole, cut = her_two(volume)
        init(volume)
        yield volume, whole, cut


def her_two(volume: Path) -> tuple[str, str]:
    make_tree(volume / "alice", Dir(owner=(UID, UID)))
    make_tree(volume / "roots", {"mounted": {}})
    whole, cut = (her_orphan(volume, name) for name in ("whole", "cut"))
    recover_all(volume)
    os.truncate(place(volume, cut) / "record.json", 40)
    return whole, cut


IN_THE_WAY = {
    "its areas": ["u", "new", "folders"],
    "her folder": [f"u/{UID}", f"u/{UID}/orphans", f"u/{UID}/reserve"],
    "a container": [f"u/{UID}/orphans/CUT", f"u/{UID}/orphans/WHOLE"],
}


@pytest.mark.parametrize("where", [one for several in IN_THE_WAY.values() for one in several])
def test_a_mount_in_the_stores_way_is_told_with_what_helps_and_changes_nothing(
    where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with hers() as (volume, whole, cut):
        before = snapshot(volume / ".trashd")
        at = volume / ".trashd" / where.replace("CUT", cut).replace("WHOLE", whole)
        with bind_mount(volume / "roots/mounted", at):
            run(["init", str(volume)])
            assert run(["doctor", str(volume)]) != 0
            assert run(["restore", whole, "--to", str(volume / "roots/back"), "--volume", str(volume)]) != 0 or (
                where.endswith("CUT")
            )
        captured = capfd.readouterr()
        assert "unmount the filesystem that covers the store" in captured.out + captured.err
        if (volume / "roots/back").exists():
            return
        assert snapshot(volume / ".trashd") == before


@pytest.mark.parametrize("verb", [["list"], ["reap"]])
def test_a_store_in_the_named_volume_that_can_not_be_used_is_no_empty_one(verb: list[str]) -> None:
    with hers() as (volume, _whole, _cut):
        with bind_mount(volume / "roots/mounted", volume / ".trashd/u"):
            assert run([*verb, "--volume", str(volume)]) == Untrusted.exit_code
        assert run([*verb, "--volume", str(volume)]) == 0


def test_on_a_read_only_volume_each_verb_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with hers() as (volume, whole, _cut):
        given, to = her_tree(volume, "given"), str(volume / "roots/to")
        before = snapshot(volume)
        with read_only(volume):
            for words in (
                ["init", str(volume / "alice")], ["swap", "--for-owner", str(given)], ["check", str(given)],
                ["restore", whole, "--to", to], ["reap", "--now", "--with-stores", whole],
            ):  # fmt: skip
                assert run(words) == KernelRefused.exit_code, words
                captured = capfd.readouterr()
                assert "read-only" in captured.out + captured.err, words
            for words in (["init"], ["list", "--volume"], ["reap", "--dry-run", "--now", "--all", "--volume"]):
                assert run([*words, str(volume)]) == 0, words
        assert snapshot(volume) == before


def test_who_may_not_list_a_volumes_root_has_all_his_ways_there() -> None:
    with hers(0o711) as (volume, whole, _cut):

        def act() -> list[int]:
            return [
                run(["doctor", str(volume)]),
                run(["restore", whole, "--volume", str(volume)]),
                run(["reap", "--dry-run", "--volume", str(volume)]),
                run(["init", str(volume)]),
            ]

        assert as_user(UID, act) == [1, 0, 0, 0]


def test_a_bare_reap_says_of_a_copy_what_it_leaves_and_what_helps(capfd: pytest.CaptureFixture[str]) -> None:
    with tmpfs_volume() as volume:
        init(volume)
        orphan = orphan_of(UID, volume, EXPIRED).id
        recover_all(volume)
        subprocess.run(["cp", "-a", volume / ".trashd", volume / "copy"], check=True)
        shutil.rmtree(volume / ".trashd")
        (volume / "copy").rename(volume / ".trashd")
        assert run(["reap", "--volume", str(volume)]) == 0
        assert f"{volume}/.trashd: 1 orphan not deleted: other users" in capfd.readouterr().err
        run(["doctor", str(volume)])
        assert f"trashd init {volume}" in capfd.readouterr().out
        run(["reap", "--now", orphan, "--volume", str(volume)])
        assert f"trashd init {volume}" in capfd.readouterr().err
        assert [entry.id for entry in entries(volume)] == [orphan]
        init(volume)
        assert run(["reap", "--volume", str(volume)]) == 0
        assert entries(volume) == []
