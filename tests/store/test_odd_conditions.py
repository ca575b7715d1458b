"""The ways out, upgrades and copies where there is no room, no right to write, no end of depth, or somebody besides."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.errors import NotProven
from fusefs.linux.kernel import Kernel
from fusefs.store.find import act_on
from tests.support.given import tick
from tests.support.orphans import command
from tests.support.store import Before as At
from tests.support.store import (
    die,
    entries,
    in_child,
    init,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.tree import Dir, make_tree
from tests.support.users import as_user
from tests.support.volumes import full, tmpfs_volume

pytestmark = pytest.mark.needs("root")

UID = 1001
SAMPLE = Path(__file__).parent / "samples/store-1.tar.xz"


# A store of the first format that can't be brought up to date now


@contextmanager
def first_format() -> Iterator[Path]:
    """A small volume with a store as the version before made it: root's orphan and a user's."""
    with tmpfs_volume("2m", ("nr_inodes=200",)) as path:
        subprocess.run(["tar", "--numeric-owner", "-pxJf", SAMPLE, "-C", path], check=True)
        yield path


@contextmanager
def read_only(volume: Path) -> Iterator[None]:
    """It is mounted so in the block."""
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", volume], check=True)


@pytest.mark.parametrize("state", [full, read_only], ids=["full", "read-only"])
def test_roots_own_orphan_is_listed_where_the_first_format_must_stay(state: object) -> None:
    assert callable(state)
    with first_format() as volume, state(volume):
        recover_all(volume)
        assert sorted(entry.uid for entry in entries(volume)) == [0, 1001]
        assert "first format" in problems(volume)[0].what
        assert f"trashd init {volume}" in problems(volume)[0].hint


def test_on_a_full_volume_it_is_restored() -> None:
    with first_format() as volume, full(volume):
        recover_all(volume)
        [roots] = [entry for entry in entries(volume) if entry.uid == 0]
        restore(volume, roots.id, to=volume / "back")
        assert (volume / "back/results").is_file()


def test_on_a_full_volume_it_is_not_reaped_before_it_is_proven() -> None:
    with first_format() as volume:
        [roots] = [entry for entry in entries(volume) if entry.uid == 0]
        with full(volume):
            recover_all(volume)
            with pytest.raises(NotProven) as refused:
                act_on(Kernel(), [raw(volume)], roots, lambda *_: None, object, needs_proof=True)
            assert f"trashd init {volume}" in refused.value.hint
        init(volume)
        assert next(one for one in entries(volume) if one.id == roots.id).is_proven


# What a reaper had begun


@pytest.mark.parametrize("uid", [0, UID], ids=["root", "user"])
def test_restore_says_which_directories_the_reaper_has_closed_and_how_to_find_them(
    volume: Path, uid: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of others in root's orphan, one of his own that others may write in in a user's."""
    home = make_tree(volume / "home", Dir(owner=(uid, uid)))
    shared = Dir({"file": "x", "more": Dir({"leaf": "y"}, owner=(UID, UID))}, mode=0o2775, owner=(UID, UID))
    make_tree(home / "job", Dir({"shared": shared}, owner=(uid, uid)))
    tick(volume)
    identifier = as_user(uid, lambda: str(swap(home / "job").id)) if uid else swap(home / "job").id
    in_child(lambda: reap_now(volume, identifier, Kernel(At("rmdir", die))))
    assert command(volume, "restore", identifier) == 0
    (line,) = [one for one in capfd.readouterr().out.splitlines() if "closed (0700)" in one]
    assert ("root's and" in line) is (uid == 0)
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
