"""`trashd init` proves what it relies on; with a second mount of the volume beside it also what the two share."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusefs.core.errors import Refused
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.init_store import Initialised, initialise
from fusefs.store.prove_beside import open_second
from tests.support.fuse_bad_rename import lying_volume
from tests.support.fuse_watchdog import fuse_mount
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.sshfs_volumes import sshfs_of
from tests.support.store_calls import (
    ENTRIES,
    ActingAt,
    Before,
    DyingAt,
    assert_silent,
    calls_of,
    die,
    in_child,
    init,
    raw,
)
from tests.support.trashd_command import done_well, trashd

pytestmark = pytest.mark.needs("root")

UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
ALICE = 4711
SHARED = ("shared_locks", "handles", "birth_times", "cache_s")


class Pair(NamedTuple):
    """Two mounts of one directory."""

    a: Path
    b: Path


@pytest.fixture
def pair() -> Iterator[Pair]:
    with two_sshfs(UNCACHED) as mounts:
        yield mounts


@contextmanager
def two_sshfs(options: Sequence[str]) -> Iterator[Pair]:
    with tmpfs_volume() as base, ExitStack() as owned:
        (backing := base / "backing").mkdir()
        a, b = (owned.enter_context(sshfs_of(backing, base / name, options)) for name in "ab")
        yield Pair(a.path, b.path)


def facts(volume: Path) -> dict[str, Any]:
    """What volume.json says."""
    told: dict[str, Any] = json.loads((volume / ".trashd/volume.json").read_text())
    return told


def old_facts(volume: Path) -> dict[str, Any]:
    """What it said before there were these keys."""
    return {key: one for key, one in facts(volume).items() if key not in ("noreplace", *SHARED)}


def init_beside(volume: Path, second: Path, kernel: Kernel | None = None, limit_s: float = 20) -> Initialised:
    kernel = kernel or Kernel()
    base = BackingAndMount(kernel.open_path(raw(volume)))
    with open_second(kernel, base.fd, raw(second), limit_s) as beside:
        store, done = initialise(kernel, base, raw(volume), is_known=True, beside=beside)
        store.__exit__()
    return done


def refusal(volume: Path, second: Path, limit_s: float = 0.5) -> str:
    with pytest.raises(Refused) as told:
        init_beside(volume, second, limit_s=limit_s)
    return told.value.message()


def test_one_mount_of_a_local_filesystem_proves_that_a_taken_name_is_spared() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        assert facts(volume)["noreplace"] is True


@pytest.mark.needs("loop")
def test_ext4_spares_one_too() -> None:
    with loop_volume("ext4") as volume:
        init(volume)
        assert facts(volume)["noreplace"] is True


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(
    ("mode", "spares"), [("honest", True), ("ignore", False), ("lie", False), ("einval", False), ("enosys", False)]
)
def test_a_filesystem_that_ignores_one_flag_is_not_believed_to_read_the_other(mode: str, spares: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        assert (facts(served.path)["noreplace"], facts(served.path)["exchange"]) == (spares, spares)
        assert_silent(served.path)


def test_without_a_second_mount_nothing_is_said_of_what_takes_one() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        assert [facts(volume)[name] for name in SHARED] == [None] * 4


@pytest.mark.needs("fuse", "sshfs")
def test_with_one_it_is_written_down(pair: Pair) -> None:
    init_beside(pair.a, pair.b)
    found = facts(pair.a)
    assert [found[name] for name in SHARED[:3]] == [False] * 3
    assert 0 <= found["cache_s"] < 5
    assert sorted(os.listdir(pair.a / ".trashd")) == ENTRIES


@pytest.mark.needs("fuse", "sshfs")
def test_the_next_init_leaves_what_was_found(pair: Pair) -> None:
    init_beside(pair.a, pair.b)
    found = facts(pair.a)
    init(pair.a, is_known=True)
    assert facts(pair.a) == found


@pytest.mark.needs("fuse", "sshfs")
def test_a_store_is_proven_anew_when_that_is_asked_for(pair: Pair) -> None:
    init(pair.a)
    before = facts(pair.a)
    init_beside(pair.a, pair.b)
    after = facts(pair.a)
    assert (before["id"], before["shared_locks"]) == (after["id"], None)
    assert after["shared_locks"] is False


def test_a_store_of_before_is_proven_by_its_next_init_and_then_left() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(
            json.dumps({key: one for key, one in facts(volume).items() if key not in ("noreplace", *SHARED)})
        )
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


def test_another_mount_of_the_same_client_is_refused() -> None:
    with tmpfs_volume() as volume, tmpfs_volume() as there:
        subprocess.run(["mount", "--bind", volume, there], check=True)
        try:
            assert "by the same client" in refusal(volume, there)
            assert list(volume.iterdir()) == []
        finally:
            subprocess.run(["umount", there], check=True)


def test_another_filesystem_is_refused_when_it_shows_nothing_of_it() -> None:
    with tmpfs_volume() as volume, tmpfs_volume() as other:
        init(other)
        assert "does not show what VOLUME does" in refusal(volume, other)
        assert [facts(volume)[name] for name in SHARED] == [None] * 4
        assert [sorted(os.listdir(path / ".trashd")) for path in (volume, other)] == [ENTRIES] * 2


@pytest.mark.needs("fuse", "sshfs")
def test_another_directory_of_it_is_refused(pair: Pair) -> None:
    (pair.b / "inside").mkdir()
    assert "does not show what VOLUME does" in refusal(pair.a, pair.b / "inside")
    assert os.listdir(pair.b / "inside") == []


@pytest.mark.needs("fuse", "sshfs")
def test_a_read_only_mount_is_refused_before_anything_is_made() -> None:
    with tmpfs_volume() as base:
        (backing := base / "backing").mkdir()
        with sshfs_of(backing, base / "a", UNCACHED) as a, sshfs_of(backing, base / "b", (*UNCACHED, "ro")) as b:
            assert "read-only" in refusal(a.path, b.path)
            assert os.listdir(backing) == []


@pytest.mark.needs("fuse", "sshfs")
def test_a_path_that_is_not_there_makes_no_store(pair: Pair) -> None:
    done = trashd("init", "--beside", pair.b / "missing", pair.a)
    assert (done.code, os.listdir(pair.a)) == (5, [])
    assert str(pair.b / "missing") in done.err


@pytest.mark.needs("fuse", "sshfs")
def test_it_may_be_the_mount_of_another_namespace(pair: Pair) -> None:
    script = 'umount "$1" && echo ready && read -r _'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(pair.a)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as elsewhere:
        assert elsewhere.stdout is not None
        assert elsewhere.stdout.readline() == b"ready\n"
        done_well("init", "--known", "--beside", f"/proc/{elsewhere.pid}/root{pair.b}", pair.a)
        elsewhere.communicate(b"\n")
    assert facts(pair.a)["shared_locks"] is False


@pytest.mark.needs("fuse", "sshfs")
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_what_a_killed_one_left_the_next_init_removes(pair: Pair, share: float) -> None:
    init(pair.a)
    n_calls = len(calls_of(lambda kernel: init_beside(pair.a, pair.b, kernel)))
    dying = Kernel(DyingAt(int(n_calls * share)))
    assert in_child(partial(init_beside, pair.a, pair.b, dying)) == DyingAt.EXIT_CODE
    init(pair.a, is_known=True)
    assert sorted(os.listdir(pair.a / ".trashd")) == ENTRIES
    assert_silent(pair.a)


@pytest.mark.needs("fuse", "sshfs")
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_what_one_left_that_failed_the_next_init_removes(pair: Pair, share: float) -> None:
    init(pair.a)
    n_calls = len(calls_of(lambda kernel: init_beside(pair.a, pair.b, kernel)))

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with suppress(OSError):
        init_beside(pair.a, pair.b, Kernel(ActingAt(int(n_calls * share), fail)))
    init(pair.a, is_known=True)
    assert sorted(os.listdir(pair.a / ".trashd")) == ENTRIES
    assert_silent(pair.a)


@pytest.mark.parametrize("call", ["exchange", "renameat2", "tmpfile", "strangers"])
def test_what_a_killed_trial_of_one_mount_left_the_next_init_removes(call: str) -> None:
    """None of it is set aside as planted."""
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps({**facts(volume), "noreplace": None}))
        assert in_child(partial(init, volume, Kernel(Before(call, die)))) == DyingAt.EXIT_CODE
        init(volume)
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert facts(volume)["noreplace"] is True


@pytest.mark.needs("fuse", "sshfs")
def test_ctrl_c_leaves_nothing(pair: Pair) -> None:
    init(pair.a)
    n_calls = len(calls_of(lambda kernel: init_beside(pair.a, pair.b, kernel)))
    with pytest.raises(KeyboardInterrupt):
        init_beside(pair.a, pair.b, Kernel(ActingAt(n_calls // 2, partial(signal.raise_signal, signal.SIGINT))))
    assert sorted(os.listdir(pair.a / ".trashd")) == ENTRIES


@pytest.mark.needs("fuse")
def test_a_user_proves_an_own_store() -> None:
    with tmpfs_volume() as base, ExitStack() as owned:
        for name in ("backing", "a", "b"):
            (base / name).mkdir()
        for name in "ab":
            argv = ["bindfs", "-f", str(base / "backing"), str(base / name)]
            owned.enter_context(fuse_mount(argv, base / name))
        own = base / "a/alice"
        own.mkdir()
        os.chown(own, ALICE, ALICE)
        as_user(ALICE, partial(init_beside, own, base / "b/alice"))
        found = facts(own)
        assert (found["shared_locks"], found["handles"]) == (False, None)


@pytest.mark.needs("fuse", "sshfs")
def test_check_tells_what_follows(pair: Pair) -> None:
    init_beside(pair.a, pair.b)
    done = done_well("check", make_tree(pair.a / "job", {"a": "1"}))
    for text in ("the name is missing, ", "don't see each other's locks", "for 90 s of silence", "mkdir takes it"):
        assert text in done.out
    assert f"for up to {facts(pair.a)['cache_s']:.3g} s after a swap" in done.out


@pytest.mark.needs("fuse", "sshfs")
def test_check_says_what_is_not_known_and_how_to_know_it(pair: Pair) -> None:
    init(pair.a)
    done = done_well("check", make_tree(pair.a / "job", {"a": "1"}))
    assert "is not known" in done.out
    assert "trashd init --beside" in done.out


@pytest.mark.needs("fuse", "sshfs")
def test_check_has_it_for_programs_too(pair: Pair) -> None:
    init_beside(pair.a, pair.b)
    (told,) = done_well("check", "--json", make_tree(pair.a / "job", {"a": "1"})).objects()
    assert (told["is_shared"], told["noreplace"], told["shared_locks"], told["takeover_s"]) == (True, False, False, 90)
    assert told["gap_ns"] > 0
    assert {one["about"] for one in told["follows"]} == {"gap", "taken", "caches", "locks", "reaping", "identity"}


def test_check_of_a_local_filesystem_has_nothing_to_add() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        (told,) = done_well("check", "--json", make_tree(volume / "job", {"a": "1"})).objects()
        assert (told["is_shared"], told["gap_ns"], told["takeover_s"], told["follows"]) == (False, None, None, [])
