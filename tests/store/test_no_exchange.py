"""Filesystems that can't exchange, or say that they can and lie: two renames, nothing lost, the gap stated."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.record import Method
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import decode_volume, encode_volume
from tests.support.foreground_mount import forget_all
from tests.support.fuse_bad_rename import lying_volume
from tests.support.fuse_watchdog import FuseVolume
from tests.support.make_trees import Spec, make_tree
from tests.support.sshfs_volumes import sshfs_volume
from tests.support.store_verbs import (
    ENTRIES,
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
    tree_of,
)

pytestmark = pytest.mark.needs("root", "fuse")

TREE: Spec = {"a": "1", "sub": {"b": "2"}}
LIES = ["ignore", "lie"]
MODES = [*LIES, "einval", "enosys"]
LIMIT_S = 3600
"""A mount is all tests'."""
SSHFS = pytest.param("sshfs", marks=pytest.mark.needs("sshfs"))
liars = pytest.mark.parametrize("served", LIES, indirect=True)
all_liars = pytest.mark.parametrize("served", MODES, indirect=True)
by_einval = pytest.mark.parametrize("served", ["einval"], indirect=True)
on_sshfs = pytest.mark.parametrize("served", [SSHFS], indirect=True)


@pytest.fixture(scope="module")
def filesystems() -> Iterator[Callable[[str], FuseVolume]]:
    """Each filesystem that a test asks for, mounted until the last test has run."""
    with ExitStack() as owned:

        def mount(name: str) -> FuseVolume:
            made = sshfs_volume(limit_s=LIMIT_S) if name == "sshfs" else lying_volume(name, limit_s=LIMIT_S)
            return owned.enter_context(made)

        yield cache(mount)


@pytest.fixture(params=[*MODES, SSHFS])
def served(request: pytest.FixtureRequest, filesystems: Callable[[str], FuseVolume]) -> Iterator[FuseVolume]:
    """A filesystem with nothing but a new store; in the end the checker has nothing to say."""
    served = filesystems(request.param)
    for path in served.path.iterdir():
        shutil.rmtree(path)
    init(served.path)
    yield served
    assert_silent(served.path)


@pytest.fixture
def job(served: FuseVolume) -> Path:
    return victim_in(served.path)


def victim_in(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


def is_whole(path: Path) -> bool:
    return (path / "a").read_text() == "1" and (path / "sub/b").read_text() == "2"


def claim_exchange(volume: Path) -> None:
    """Have volume.json say that the exchange was seen to work, as before an update that broke the filesystem."""
    path = volume / ".trashd/volume.json"
    said = decode_volume(path.read_bytes(), b"")
    assert said is not None
    path.write_bytes(encode_volume(said._replace(exchange=True)))


def swap_gap(job: Path) -> None:
    assert in_child(partial(swap, job, Kernel(InTheGap(job, die)))) == DyingAt.EXIT_CODE


def test_probe_says_no(served: FuseVolume) -> None:
    with opened(served.path) as store:
        assert not store.volume.exchange
    assert sorted(os.listdir(served.path / ".trashd")) == ENTRIES


@pytest.mark.parametrize("served", ["honest"], indirect=True)
def test_probe_says_yes_where_fuse_is_honest(served: FuseVolume) -> None:
    with opened(served.path) as store:
        assert store.volume.exchange


def test_swap_makes_two_renames_and_keeps_all(job: Path) -> None:
    swapped = swap(job)
    assert (swapped.method, os.listdir(job)) == (Method.TWO_RENAME, [])
    assert swapped.gap_ns is not None
    assert swapped.gap_ns > 0
    assert record_of(swapped).method is Method.TWO_RENAME
    assert is_whole(tree_of(swapped))


@by_einval
def test_output_states_how_long_the_name_was_missing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["swap", str(job)]) == 0
    assert "the name was missing for" in capsys.readouterr().out


def test_swap_and_restore_leave_everything_as_it_was(served: FuseVolume, job: Path) -> None:
    restored = restore(served.path, swap(job).id)
    assert is_whole(job)
    assert (restored.rescued, restored.warnings, entries(served.path)) == (None, (), [])


def test_rm_restore_and_reap_work(served: FuseVolume, job: Path) -> None:
    removed = remove(job)
    assert not job.exists()
    restore(served.path, removed.id)
    assert is_whole(job)
    assert reap_now(served.path, remove(job).id).report.n_failed == 0
    assert entries(served.path) == []


def test_what_was_written_into_the_fresh_directory_survives_a_restore(served: FuseVolume, job: Path) -> None:
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


def test_swap_killed_between_its_renames_goes_forward(served: FuseVolume, job: Path) -> None:
    swap_gap(job)
    assert not job.exists()
    assert recover_all(served.path) == []
    assert os.listdir(job) == []
    (entry,) = entries(served.path)
    assert (entry.state, is_whole(Path(os.fsdecode(entry.path)) / "tree")) == (State.ORPHANS, True)


def test_recovery_leaves_alone_what_took_the_name_in_the_gap(served: FuseVolume, job: Path) -> None:
    swap_gap(job)
    make_tree(job, {"strange": "x"})
    assert recover_all(served.path) == []
    assert os.listdir(job) == ["strange"]
    assert [entry.state for entry in entries(served.path)] == [State.ORPHANS]


@by_einval
def test_what_takes_the_name_in_the_gap_keeps_it(job: Path) -> None:
    swapped = swap(job, Kernel(InTheGap(job, lambda: make_tree(job, {"strange": "x"}))))
    assert os.listdir(job) == ["strange"]
    assert is_whole(tree_of(swapped))


@all_liars
def test_swap_on_a_filesystem_that_lost_the_exchange_after_the_probe_loses_nothing(
    served: FuseVolume, job: Path
) -> None:
    claim_exchange(served.path)
    swapped = swap(job)
    assert (swapped.method, os.listdir(job)) == (Method.TWO_RENAME, [])
    assert is_whole(tree_of(swapped))


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


@liars
def test_swap_of_an_empty_directory_on_a_liar_leaves_an_empty_directory(served: FuseVolume) -> None:
    claim_exchange(served.path)
    job = make_tree(served.path / "job", {})
    with suppress(TrashdError):
        swap(job)
    assert os.listdir(job) == []
    assert recover_all(served.path) == []


@all_liars
def test_restore_on_a_filesystem_that_lost_the_exchange_after_the_probe_loses_nothing(
    served: FuseVolume, job: Path
) -> None:
    swapped = swap(job)
    claim_exchange(served.path)
    restore(served.path, swapped.id)
    assert is_whole(job)
    assert entries(served.path) == []


@on_sshfs
def test_orphan_is_still_known_after_the_filesystem_was_mounted_anew(served: FuseVolume, job: Path) -> None:
    swapped = swap(job)
    # A new mount numbers its inodes anew: so does a look at many others first, and a cache that forgot.
    forget_all(served.path)
    make_tree(served.path / "others", {str(i): {} for i in range(20)})
    assert problems(served.path) == []
    restore(served.path, swapped.id)
    assert is_whole(job)
