"""Files made without a name (O_TMPFILE): used where they were seen to last, never on FUSE, where some lose them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.filesystem_probes import keeps_unnamed
from fusefs.linux.kernel import TMPFS_MAGIC, Kernel
from fusefs.store.layout import decode_volume
from tests.support.fuse_losing_tmpfiles import LosingVolume, losing_volume
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, calls_of, init, raw, remove, swap
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root")

OLD = {
    "magic": "trashd",
    "format": 2,
    "id": "0123456789abcdef0123456789abcdef",
    "exchange": True,
    "filesystem": TMPFS_MAGIC,
}
"""volume.json of a store made before files without a name were proven, on a tmpfs."""


class Trusting(Kernel):
    """Makes them on FUSE, too."""

    def create_unnamed(self, dir_fd: int) -> Fd:
        return Fd(os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, dir_fd=dir_fd))


@pytest.fixture
def losing() -> Iterator[LosingVolume]:
    with losing_volume() as volume:
        yield volume


def unnamed_of(volume: Path) -> object:
    return json.loads((volume / ".trashd/volume.json").read_text()).get("unnamed")


@pytest.mark.needs("fuse")
def test_a_trial_to_the_end_shows_that_they_are_lost(losing: LosingVolume) -> None:
    with Fd(os.open(losing.path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        assert not keeps_unnamed(Trusting(), fd, b"trial")
    assert losing.n_unnamed() == 1
    assert list(losing.path.iterdir()) == []


@pytest.mark.needs("fuse")
def test_a_swap_and_a_removal_leave_their_records_there_and_ask_for_no_such_file(losing: LosingVolume) -> None:
    done_well("init", losing.path)
    victims = [make_tree(losing.path / name, {"file": "content"}) for name in ("job", "old")]
    swap_result = swapped(victims[0])
    done_well("rm", victims[1])
    assert [entry["origin"] for entry in done_well("list", "--json", "--volume", losing.path).objects()] == [
        str(victim) for victim in victims
    ]
    victims[0].rmdir()
    done_well("restore", swap_result["id"])
    assert (victims[0] / "file").read_text() == "content"
    done_well("reap", "--all", "--now", "--volume", losing.path)
    assert losing.n_unnamed() == 0
    assert_silent(losing.path)


@pytest.mark.needs("fuse")
def test_what_a_sweep_takes_is_there_afterwards(losing: LosingVolume) -> None:
    done_well("init", losing.path)
    make_tree(losing.path / "logs", {"below": {"a.log": "content", "b": "stays"}})
    done_well("sweep", "--name", "*.log", losing.path / "logs")
    (orphan,) = done_well("list", "--json", "--volume", losing.path).objects()
    assert (Path(orphan["path"]) / "tree/below/a.log").read_text() == "content"
    assert losing.n_unnamed() == 0
    assert_silent(losing.path)


def test_a_record_is_made_without_a_name_where_that_was_seen_to_last(volume: Path) -> None:
    calls = calls_of(lambda kernel: swap(make_tree(volume / "job", {"a": "1"}), kernel))
    assert unnamed_of(volume) is True
    assert ("tmpfile" in calls, "create" in calls) == (True, False)


def test_a_store_of_before_is_read_and_uses_none_until_an_init_has_tried_it(volume: Path) -> None:
    (volume / ".trashd/volume.json").write_text(json.dumps(OLD))
    calls = calls_of(lambda kernel: remove(make_tree(volume / "job", {"a": "1"}), kernel))
    assert ("tmpfile" in calls, "create" in calls) == (False, True)
    assert_silent(volume)
    init(volume)
    assert (unnamed_of(volume), decode_volume((volume / ".trashd/volume.json").read_bytes(), b"")) != (None, None)
    calls = calls_of(lambda kernel: swap(make_tree(volume / "job", {"a": "1"}), kernel))
    assert "tmpfile" in calls


def test_what_was_seen_on_another_filesystem_proves_nothing(volume: Path) -> None:
    with tmpfs_volume() as other:
        init(other)
        fields = json.loads((other / ".trashd/volume.json").read_text())
    (volume / ".trashd/volume.json").write_text(json.dumps({**fields, "filesystem": 1}))
    calls = calls_of(lambda kernel: remove(make_tree(volume / "job", {"a": "1"}), kernel))
    assert "tmpfile" not in calls


def test_a_trial_that_was_killed_is_in_nobodys_way(volume: Path) -> None:
    (volume / "trial").write_text("left")
    with Fd(os.open(raw(volume), os.O_RDONLY | os.O_DIRECTORY)) as fd:
        assert keeps_unnamed(Kernel(), fd, b"trial")
    assert not (volume / "trial").exists()
