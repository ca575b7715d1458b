"""Filesystems that can't exchange, or say that they can and lie: two renames, nothing lost, the gap stated."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.record import Method, encode
from fusefs.core.record_decoding import decode
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import decode_volume, encode_volume
from tests.support.foreground_mount import forget_all
from tests.support.fuse_bad_rename import lying_volume
from tests.support.fuse_watchdog import ServedVolume
from tests.support.make_trees import Spec, make_tree
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_calls import (
    ENTRIES,
    Before,
    DyingAt,
    InTheGap,
    assert_silent,
    die,
    entries,
    in_child,
    init,
    opened,
    problems,
    reap_now,
    record_of,
    recover_all,
    remove,
    restore,
    swap,
    tmpfs_store,
    tree_of,
)

pytestmark = pytest.mark.needs("root", "fuse")

Serve = Callable[[], AbstractContextManager[ServedVolume]]
TREE: Spec = {"a": "1", "sub": {"b": "2"}}
MODES = ["ignore", "lie", "einval", "enosys"]
LIES = ["ignore", "lie"]
WITHOUT = [
    *(pytest.param(partial(lying_volume, mode), id=mode) for mode in MODES),
    pytest.param(sshfs_volume, id="sshfs", marks=pytest.mark.needs("sshfs")),
]
every_filesystem = pytest.mark.parametrize("serve", WITHOUT)


def victim_in(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


def is_whole(path: Path) -> bool:
    return (path / "a").read_text() == "1" and (path / "sub/b").read_text() == "2"


def claim_exchange(volume: Path) -> None:
    """Have volume.json say that the exchange was seen to work, as before an update that broke the filesystem."""
    path = volume / ".trashd/volume.json"
    said = decode_volume(path.read_bytes())
    assert said is not None
    path.write_bytes(encode_volume(said._replace(exchange=True)))


def swap_gap(job: Path) -> None:
    """A swap killed between its two renames."""
    assert in_child(partial(swap, job, Kernel(InTheGap(job, die)))) == DyingAt.EXIT_CODE


@every_filesystem
def test_probe_says_no(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        with opened(served.path) as store:
            assert not store.volume.exchange
        assert sorted(os.listdir(served.path / ".trashd")) == ENTRIES
        assert_silent(served.path)


def test_probe_says_yes_where_fuse_is_honest() -> None:
    with lying_volume("honest") as served:
        init(served.path)
        with opened(served.path) as store:
            assert store.volume.exchange
        assert_silent(served.path)


@every_filesystem
def test_swap_makes_two_renames_and_keeps_all(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        swapped = swap(victim_in(served.path))
        assert (swapped.method, os.listdir(served.path / "job")) == (Method.TWO_RENAME, [])
        assert swapped.gap_ns is not None
        assert swapped.gap_ns > 0
        assert record_of(swapped).method is Method.TWO_RENAME
        assert is_whole(tree_of(swapped))
        assert_silent(served.path)


def test_output_states_how_long_the_name_was_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with lying_volume("einval") as served:
        init(served.path)
        assert run(["swap", str(victim_in(served.path))]) == 0
        assert "the name was missing for" in capsys.readouterr().out
        assert_silent(served.path)


@every_filesystem
def test_swap_and_restore_leave_everything_as_it_was(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        job = victim_in(served.path)
        restored = restore(served.path, swap(job).id)
        assert is_whole(job)
        assert (restored.rescued, restored.warnings, entries(served.path)) == (None, (), [])
        assert_silent(served.path)


@every_filesystem
def test_rm_restore_and_reap_work(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        job = victim_in(served.path)
        removed = remove(job)
        assert not job.exists()
        restore(served.path, removed.id)
        assert is_whole(job)
        assert reap_now(served.path, remove(job).id).report.n_failed == 0
        assert entries(served.path) == []
        assert_silent(served.path)


@every_filesystem
def test_what_was_written_into_the_fresh_directory_survives_a_restore(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        job = victim_in(served.path)
        swapped = swap(job)
        (job / "late").write_text("x")
        try:
            restore(served.path, swapped.id)
        except TrashdError:
            # Without identities only an empty directory makes way.
            assert (job / "late").read_text() == "x"
            restore(served.path, swapped.id, to=served.path / "other")
            assert is_whole(served.path / "other")
        else:
            (kept,) = entries(served.path)
            assert (Path(os.fsdecode(kept.path)) / "tree/late").read_text() == "x"
            assert is_whole(job)
        assert_silent(served.path)


@every_filesystem
def test_swap_killed_between_its_renames_goes_forward(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        job = victim_in(served.path)
        swap_gap(job)
        assert not job.exists()
        assert recover_all(served.path) == []
        assert os.listdir(job) == []
        (entry,) = entries(served.path)
        assert (entry.state, is_whole(Path(os.fsdecode(entry.path)) / "tree")) == (State.ORPHANS, True)
        assert_silent(served.path)


@every_filesystem
def test_recovery_leaves_alone_what_took_the_name_in_the_gap(serve: Serve) -> None:
    with serve() as served:
        init(served.path)
        job = victim_in(served.path)
        swap_gap(job)
        make_tree(job, {"strange": "x"})
        assert recover_all(served.path) == []
        assert os.listdir(job) == ["strange"]
        assert [entry.state for entry in entries(served.path)] == [State.ORPHANS]
        assert_silent(served.path)


def test_what_takes_the_name_in_the_gap_keeps_it() -> None:
    with lying_volume("einval") as served:
        init(served.path)
        job = victim_in(served.path)
        swapped = swap(job, Kernel(InTheGap(job, lambda: make_tree(job, {"strange": "x"}))))
        assert os.listdir(job) == ["strange"]
        assert is_whole(tree_of(swapped))
        assert_silent(served.path)


def test_restore_killed_between_its_renames_goes_forward() -> None:
    with lying_volume("einval") as served:
        init(served.path)
        job = victim_in(served.path)
        swapped = swap(job)

        class AfterAside(Before):
            def __call__(self, call: str) -> None:
                if call == "rename" and not job.exists():
                    die()
                if call == "renameat2" and not job.exists():
                    die()

        assert in_child(partial(restore, served.path, swapped.id, Kernel(AfterAside("", die)))) == DyingAt.EXIT_CODE
        assert not job.exists()
        assert recover_all(served.path) == []
        assert is_whole(job)
        assert entries(served.path) == []
        assert_silent(served.path)


@pytest.mark.parametrize("mode", [*LIES, "einval", "enosys"])
def test_swap_on_a_filesystem_that_lost_the_exchange_after_the_probe_loses_nothing(mode: str) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        claim_exchange(served.path)
        job = victim_in(served.path)
        swapped = swap(job)
        assert (swapped.method, os.listdir(job)) == (Method.TWO_RENAME, [])
        assert is_whole(tree_of(swapped))
        assert_silent(served.path)


@pytest.mark.parametrize("mode", LIES)
def test_liar_that_the_kernel_believes_for_a_while_loses_nothing(mode: str) -> None:
    with lying_volume(mode, timeout_s=60) as served:
        init(served.path)
        with opened(served.path) as store:
            assert not store.volume.exchange
        claim_exchange(served.path)
        job = victim_in(served.path)
        with suppress(TrashdError):
            swap(job)
        found = [path for path in served.backing.rglob("sub/b") if path.read_text() == "2"]
        assert len(found) == 1
        assert (found[0].parent.parent / "a").read_text() == "1"


@pytest.mark.parametrize("mode", LIES)
def test_swap_of_an_empty_directory_on_a_liar_leaves_an_empty_directory(mode: str) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        claim_exchange(served.path)
        job = make_tree(served.path / "job", {})
        with suppress(TrashdError):
            swap(job)
        assert os.listdir(job) == []
        assert recover_all(served.path) == []
        assert_silent(served.path)


@pytest.mark.parametrize("mode", [*LIES, "einval", "enosys"])
def test_restore_on_a_filesystem_that_lost_the_exchange_after_the_probe_loses_nothing(mode: str) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        job = victim_in(served.path)
        swapped = swap(job)
        claim_exchange(served.path)
        restore(served.path, swapped.id)
        assert is_whole(job)
        assert entries(served.path) == []
        assert_silent(served.path)


@pytest.mark.needs("sshfs")
def test_orphan_is_still_known_after_the_filesystem_was_mounted_anew() -> None:
    with sshfs_volume() as served:
        init(served.path)
        swapped = swap(victim_in(served.path))
        # A new mount numbers its inodes anew: so does a look at many others first, and a cache that forgot.
        forget_all(served.path)
        make_tree(served.path / "others", {str(i): {} for i in range(20)})
        assert problems(served.path) == []
        restore(served.path, swapped.id)
        assert is_whole(served.path / "job")
        assert_silent(served.path)


def make_foreign(volume: Path) -> None:
    """Have the one staged record say that another host, in another boot, made it."""
    (path,) = volume.glob(".trashd/u/0/stage/*/record.json")
    path.write_bytes(encode(decode(path.read_bytes())._replace(host="another", boot="another")))


@pytest.mark.needs("sshfs")
def test_what_another_host_may_be_at_work_on_is_left_alone() -> None:
    with sshfs_volume() as served:
        init(served.path)
        job = victim_in(served.path)
        swap_gap(job)
        make_foreign(served.path)
        (told,) = recover_all(served.path)
        assert "host another, in boot another, may still be working on it" in told
        assert not job.exists()
        assert [entry.state for entry in entries(served.path)] == [State.STAGE]


def test_what_another_host_left_on_a_local_filesystem_is_settled() -> None:
    with tmpfs_store() as volume:
        job = victim_in(volume)
        in_child(partial(swap, job, Kernel(Before("exchange", die))))
        make_foreign(volume)
        assert recover_all(volume) == []
        assert is_whole(job)
        assert entries(volume) == []
