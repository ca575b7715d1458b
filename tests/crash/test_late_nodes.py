"""Off local filesystems: killed, frozen and cut off at any call, taken over by another node, and awake again after it.

Here one tmpfs has both nodes: it is taken for a shared one, and the node that takes over for one of another boot, which
needs no time to find that the first is silent.
"""

import errno
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import TakenOver, TrashdError
from fusefs.linux import kernel as kernel_module
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from fusefs.store import recover as recover_module
from fusefs.store import silent_nodes
from fusefs.store.orphans import RetentionFromNow, change_retention, find_container
from tests.support.covering_sets import share_of
from tests.support.crash_invariants import hold_when_failing, hold_when_killed, hold_when_stopped, spread
from tests.support.crash_scenarios import (
    BROKEN,
    VolumeContents,
    assert_nothing_half_done,
    changing,
    forbid_exchange,
    home,
    settle_without_loss,
    write_volume,
)
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import ActingBefore as StoreHook
from tests.support.store_verbs import (
    DyingAt,
    assert_silent,
    die,
    entries,
    in_child,
    init,
    numbered_calls,
    own,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.verb_scenarios import SCENES

pytestmark = pytest.mark.needs("root")

VERBS = (
    "swap", "swap-lent", "swap-two-rename", "swap-two-rename-lent", "rm", "rm-file", "restore", "restore-late",
    "restore-free", "restore-to", "restore-inside", "restore-lent", "restore-two-rename", "restore-two-rename-late",
    "restore-by-root", "keep", "reap", "adopt", "adopt-lent", "rm-lent", "swap-for-owner", "swap-for-owner-two-rename",
    "recover-swap", "recover-restore", "recover-swap-in-the-gap",
)  # fmt: skip
TAKEN_OVER = (
    "swap",
    "swap-lent",
    "swap-two-rename",
    "rm",
    "restore",
    "restore-late",
    "restore-two-rename-late",
    "keep",
)
BY_ROOT = [name for name in TAKEN_OVER if not SCENES[name].uid]
ERRNOS = (errno.EIO, errno.ENOENT, errno.ENOSPC)
OTHER_BOOT = str(uuid.UUID(int=7))


@pytest.fixture(autouse=True)
def is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "_LOCAL", frozenset())
    monkeypatch.setattr(silent_nodes, "takeover_s", lambda _volume: 0.0)


def recover_elsewhere(volume: Path, kernel: Kernel | None = None) -> list[str]:
    """Recover as a node of another boot does that has watched for long enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recover_module, "boot_id", lambda: OTHER_BOOT)
        return recover_all(volume, kernel)


@pytest.mark.parametrize("name", VERBS)
def test_nothing_is_lost_by_a_kill_before_any_call(volume: Path, name: str) -> None:
    hold_when_killed(SCENES[name], volume, partial(settle_without_loss, SCENES[name], volume))


@pytest.mark.parametrize("name", TAKEN_OVER)
def test_what_a_dead_node_left_is_taken_over(volume: Path, name: str) -> None:
    scene = SCENES[name]

    def law(before: VolumeContents) -> None:
        recover_elsewhere(volume)
        assert_nothing_half_done(volume)
        settle_without_loss(scene, volume, before)

    hold_when_killed(scene, volume, law)


@pytest.mark.parametrize("name", TAKEN_OVER)
def test_a_takeover_that_was_killed_is_taken_over_in_turn(volume: Path, name: str) -> None:
    scene = SCENES[name]
    scene.set_up(volume)
    numbers = changing(scene.calls(volume))
    for i, n in enumerate(numbers):
        scene.set_up(volume)
        code_of_child(partial(scene.run, volume, DyingAt(n)))
        for m in share_of(changing(numbered_calls(partial(recover_elsewhere, volume))), i, len(numbers)):
            before = scene.set_up(volume)
            code_of_child(partial(scene.run, volume, DyingAt(n)))
            code_of_child(partial(recover_elsewhere, volume, Kernel(DyingAt(m))))
            recover_elsewhere(volume)
            settle_without_loss(scene, volume, before)


@pytest.mark.long
@pytest.mark.parametrize("name", TAKEN_OVER)
def test_nothing_is_lost_when_a_frozen_node_wakes_after_it_was_taken_over(
    volume: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kernel, "lock", lambda _kernel, _fd: True)  # its lock was lost, or never seen
    scene = SCENES[name]

    def law(before: VolumeContents, code: int, _told: list[str]) -> None:
        assert code != BROKEN
        recover_elsewhere(volume)
        settle_without_loss(scene, volume, before)

    hold_when_stopped(scene, volume, partial(recover_elsewhere, volume), law)


FAULTS = spread(product(TAKEN_OVER, ERRNOS))


@pytest.mark.parametrize(("name", "number"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    settle = partial(settle_without_loss, SCENES[name], volume)
    hold_when_failing(SCENES[name], volume, number, settle, FAULTS[name, number])


class LosesAnAnswer(Kernel):
    """Says of the n-th rename that it failed, though it was done, as a server that started again meanwhile."""

    def __init__(self, n: int, number: int) -> None:
        super().__init__()
        self.left, self.number = n, number

    def _told(self, rename: Callable[[int, bytes, int, bytes], None], *words: int | bytes) -> None:
        rename(*words)  # type: ignore[arg-type]
        self.left -= 1
        if self.left == -1:
            raise OSError(self.number, os.strerror(self.number))

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        self._told(super().rename, old_dir, old, new_dir, new)

    def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        self._told(super().rename_free, old_dir, old, new_dir, new)

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        self._told(super().exchange, old_dir, old, new_dir, new)


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", BY_ROOT)
def test_nothing_is_lost_by_the_lost_answer_of_any_rename(volume: Path, name: str, number: int) -> None:
    scene = SCENES[name]
    n, left = 0, -1
    while left < 0:
        before = scene.set_up(volume)
        kernel = LosesAnAnswer(n, number)
        with suppress(TrashdError, OSError):
            scene.act(volume, kernel)
        settle_without_loss(scene, volume, before)
        left, n = kernel.left, n + 1
    assert n > 3


class SaysExists(Kernel):
    """Makes a directory whose name is unique, and says that it was there, as a server that started again meanwhile."""

    def mkdir(self, dir_fd: int, name: bytes, mode: int = 0o700) -> None:
        super().mkdir(dir_fd, name, mode)
        if re.search(rb"[0-9a-f]{12}$", name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


@pytest.mark.parametrize("name", BY_ROOT)
def test_a_directory_that_a_restarted_server_made_is_ours_whatever_it_says(volume: Path, name: str) -> None:
    scene = SCENES[name]
    before = scene.set_up(volume)
    scene.act(volume, SaysExists())
    settle_without_loss(scene, volume, before)
    assert_nothing_half_done(volume)


@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["swap", "restore"])
def test_a_name_that_an_empty_directory_got_stays_taken_whatever_is_said_of_it(
    volume: Path, verb: str, number: int
) -> None:
    """By a swap its fresh directory, by a restore the tree itself."""
    SCENES["swap-two-rename"].set_up(volume)
    write_volume(volume, lambda found: found._replace(noreplace=False, exchange=False))
    n, left = 0, -1
    while left < 0:
        (victim := volume / f"empty{n}").mkdir()
        kernel = LosesAnAnswer(n, number)
        swapped = None if verb == "swap" else swap(victim)
        with suppress(TrashdError, OSError):
            if swapped is None:
                swap(victim, kernel)
            else:
                victim.rmdir()
                restore(volume, swapped.id, kernel)
        recover_all(volume)
        if swapped is None or not entries(volume):
            assert victim.is_dir(), n
        for entry in entries(volume):
            reap_now(volume, entry.id)
        left, n = kernel.left, n + 1
    assert n > 3


@pytest.fixture
def job(volume: Path) -> Iterator[Path]:
    scene = SCENES["swap"]
    scene.set_up(volume)
    yield home(volume)
    assert_silent(volume)


def staged(volume: Path) -> Path:
    (path,) = volume.glob(".trashd/u/0/stage/*")
    return path


def test_a_live_owner_who_sees_that_it_is_announced_withdraws(volume: Path, job: Path) -> None:
    class Announced(Kernel):
        def exchange(self, *_words: object) -> None:
            raise AssertionError("it went on")

        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            for path in volume.glob(".trashd/u/0/stage/*"):
                (path / f"announced.{OTHER_BOOT}").touch()

    inside = sorted(path.name for path in job.iterdir())
    with pytest.raises(TakenOver):
        swap(job, Announced())
    assert sorted(path.name for path in job.iterdir()) == inside
    assert_nothing_half_done(volume)


def test_a_late_rename_finds_no_transfer_directory(volume: Path, job: Path) -> None:
    transfer_fds: list[int] = []

    class Keeping(Kernel):
        def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
            transfer_fds.append(os.dup(old_dir))
            super().exchange(old_dir, old, new_dir, new)

    swapped = swap(job, Keeping())
    (job / "mine").write_text("live")
    (transfer_fd,) = transfer_fds
    parent = os.open(job.parent, os.O_RDONLY | os.O_DIRECTORY)
    for act in (Kernel().exchange, Kernel().rename):
        with pytest.raises(FileNotFoundError):
            act(transfer_fd, b"tree", parent, b"job")
        with pytest.raises(FileNotFoundError):
            act(parent, b"job", transfer_fd, b"tree")
    os.close(transfer_fd)
    os.close(parent)
    assert (job / "mine").read_text() == "live"
    restored = restore(volume, swapped.id)
    assert restored.rescued is not None


def test_what_came_a_second_time_is_an_orphan_of_its_own(volume: Path, job: Path) -> None:
    class Twice(Kernel):
        """The server does the rename aside once more, of what has the name by then."""

        def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
            super().rename(old_dir, old, new_dir, new)
            if old == b"job":
                super().rename(new_dir, new, new_dir, b"moved out")
                job.mkdir()
                (job / "mine").write_text("live")
                super().rename(new_dir, b"moved out", self.container(new_dir), b"tree")
                super().rename(old_dir, old, new_dir, new)

        def container(self, _transfer_fd: int) -> int:
            return os.open(staged(volume), os.O_RDONLY | os.O_DIRECTORY)

    forbid_exchange(volume)
    swap(job, Twice())
    kept = [entry for entry in entries(volume) if entry.state is State.ORPHANS]
    assert len(kept) == 2
    assert sorted(path.read_text() for path in volume.glob(".trashd/u/0/orphans/*/tree/mine")) == ["live"]
    assert list(job.iterdir()) == []
    init(volume)


def test_a_claim_that_comes_late_is_asked_about_once_more(volume: Path, job: Path) -> None:
    swapped = swap(job)
    orphan = volume / ".trashd/u/0/orphans" / swapped.id
    entry = find_container(Kernel(), [os.fsencode(volume)], swapped.id)
    change_retention(Kernel(), [os.fsencode(volume)], entry, RetentionFromNow(None))
    orphan.rename(orphan.parent.parent / "reaping" / swapped.id)
    with own(volume) as folder:
        assert reap(folder, swapped.id, is_still_due=lambda record: record.retention_s is not None).lost == "changed"
    assert [one.state for one in entries(volume)] == [State.ORPHANS]


def test_what_a_reaper_has_begun_is_ended_by_the_next_whatever_its_term(volume: Path, job: Path) -> None:
    swapped = swap(job)
    assert in_child(lambda: reap_now(volume, swapped.id, Kernel(StoreHook("unlink", die)))) == DyingAt.EXIT_CODE
    with own(volume) as folder:
        assert reap(folder, swapped.id, is_still_due=lambda _record: False).lost is None
    assert entries(volume) == []
