"""Following orphans: to their end, or until it is known what keeps them; by a clock that only pauses move."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path

import msgspec
import pytest

from fusefs.cli import wait
from fusefs.cli.wait import FollowedOrphan, VolumeWait
from fusefs.core.record import quote_path
from fusefs.core.results import Waited, WaitReason, WaitReasonKind
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.file_locks import take_lock
from fusefs.linux.kernel import Kernel
from fusefs.store.make_folder import inspect_new_folders
from fusefs.store.swap import Swapped
from tests.support.make_trees import make_tree
from tests.support.minimal_reaper import own_runtime_dir, write_volume_status
from tests.support.mount_and_backing import ALICE
from tests.support.other_users import as_user
from tests.support.store_verbs import own, place, raw, reap_now, restore, swap, tree_of

pytestmark = pytest.mark.needs("root")


class Following:
    """One orphan, and a reaper that does what the test says at a time of its clock; it stands in for `time`."""

    def __init__(self, volume_wait: VolumeWait, acts: Mapping[float, Callable[[], object]]) -> None:
        self.volume_wait = volume_wait
        self.acts = dict(acts)
        self.now_s = 0.0
        self.shown: list[str] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for at_s in [at_s for at_s in self.acts if at_s <= self.now_s]:
            self.acts.pop(at_s)()

    def follow(self, *, keeps: bool = False) -> Waited:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wait, "time", self)
            return self.volume_wait.follow(self.shown.append, lambda: False, keeps=keeps)


@contextmanager
def served(volume: Path, phase: VolumePhase = VolumePhase.REAPING) -> Iterator[Callable[[VolumePhase | None], None]]:
    """This process is the service; how it says something else, or is away (None)."""
    with own_runtime_dir() as directory:
        lock = take_lock(directory)
        assert lock is not None
        with own(volume) as folder, lock:
            status = VolumeStatus(path=quote_path(raw(volume)), id=folder.store.volume.id)

            def say(phase: VolumePhase | None) -> None:
                if phase is None:
                    Path(os.fsdecode(directory), "status.json").unlink()
                else:
                    write_volume_status(directory, msgspec.structs.replace(status, phase=phase))

            say(phase)
            yield say


@contextmanager
def followed(volume: Path, **acts: Callable[[Swapped], object]) -> Iterator[tuple[Following, Swapped]]:
    """An orphan to be left to the reaper; `at_5=...` does something after 5 seconds."""
    swapped = swap(make_tree(volume / "victim", {"file": b"x" * 100_000}))
    with ExitStack() as owned:
        volume_wait = VolumeWait(Kernel(), raw(volume), owned)
        volume_wait.add_swapped(swapped)
        timed = {float(name.removeprefix("at_")): partial(act, swapped) for name, act in acts.items()}
        yield Following(volume_wait, timed), swapped


def give_up(volume: Path, swapped: Swapped) -> None:
    with own(volume) as folder:
        FollowedOrphan(folder, swapped.id).give_up()


def kinds(waited: Waited) -> list[WaitReasonKind]:
    return [reason.kind for reason in waited.reasons]


def test_it_ends_with_the_orphan(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: reap_now(volume, one.id)) as (following, _):
        waited = following.follow()
    assert (waited.is_reached, waited.reasons) == (True, ())
    assert 3 <= following.now_s < 4


@pytest.mark.parametrize("keeps", [False, True])
def test_an_orphan_is_given_up_or_keeps_its_retention(volume: Path, keeps: bool) -> None:
    with served(volume, VolumePhase.PAUSED), followed(volume) as (following, swapped):
        following.follow(keeps=keeps)
    assert tree_of(swapped).exists() is keeps


def test_an_orphan_that_another_process_has_locked_stays_where_it_is(volume: Path) -> None:
    swapped = swap(make_tree(volume / "victim", {"file": ""}))
    with (tree_of(swapped).parent / "record.json").open() as record:
        flock(record, LOCK_EX)
        give_up(volume, swapped)
    assert tree_of(swapped).exists()


def test_an_orphan_is_found_in_a_folder_that_root_has_registered_since(volume: Path) -> None:
    volume.chmod(0o777)
    swapped = as_user(ALICE, lambda: swap(make_tree(volume / "victim", {"file": ""})))
    with own(volume) as folder:
        inspect_new_folders(folder.store)
    assert not Path(os.fsdecode(swapped.store)).exists(), "the folder has another path"

    def follow() -> None:
        with ExitStack() as owned:
            VolumeWait(Kernel(), raw(volume), owned).add_swapped(swapped)

    follow()
    as_user(ALICE, follow)


def test_after_a_stop_the_orphan_stays_where_it_is(volume: Path) -> None:
    with served(volume), followed(volume) as (following, swapped):
        following.volume_wait.follow(following.shown.append, lambda: True, keeps=False)
    assert tree_of(swapped).exists()


def test_a_service_that_is_started_anew_is_waited_for(volume: Path) -> None:
    with (
        served(volume) as say,
        followed(volume, at_1=lambda _one: say(None), at_4=lambda one: reap_now(volume, one.id)) as (following, _),
    ):
        assert following.follow().is_reached


def test_a_service_that_stays_away_is_gone(volume: Path) -> None:
    with served(volume) as say, followed(volume, at_1=lambda _one: say(None)) as (following, _):
        waited = following.follow()
    assert (kinds(waited), waited.is_reached) == ([WaitReasonKind.NOBODY], False)
    assert 5 < following.now_s < 7


def test_a_pause_ends_it_at_once(volume: Path) -> None:
    with served(volume) as say, followed(volume, at_3=lambda _one: say(VolumePhase.PAUSED)) as (following, _):
        waited = following.follow()
    assert (kinds(waited), waited.is_reached) == ([WaitReasonKind.PAUSED], False)
    assert following.now_s < 5


def test_a_window_is_waited_for_and_shown(volume: Path) -> None:
    with (
        served(volume, VolumePhase.WINDOW),
        followed(volume, at_50=lambda one: reap_now(volume, one.id)) as (following, _),
    ):
        assert following.follow().is_reached
    assert {shown.partition("; ")[2] for shown in following.shown} == {"reaper: window"}


def test_a_restore_ends_it_with_a_reason(volume: Path) -> None:
    with served(volume), followed(volume, at_3=lambda one: restore(volume, one.id)) as (following, swapped):
        waited = following.follow()
    assert waited.reasons == (WaitReason(WaitReasonKind.RESTORED, f"{swapped.id} was restored"),)


def test_quarantine_ends_it_with_a_reason(volume: Path) -> None:
    def quarantine(swapped: Swapped) -> None:
        container = place(volume, swapped.id)
        container.rename(container.parent.with_name("quarantine") / container.name)

    with served(volume), followed(volume, at_3=quarantine) as (following, swapped):
        waited = following.follow()
    detail = f"{swapped.id} could not be deleted completely: the rest is in quarantine"
    assert waited.reasons == (WaitReason(WaitReasonKind.LEFT, detail),)


def test_an_orphan_that_another_process_has_locked_is_named_and_the_others_are_followed(volume: Path) -> None:
    with (
        served(volume),
        followed(volume, at_1=lambda one: reap_now(volume, one.id)) as (following, free),
        (tree_of(locked := swap(make_tree(volume / "locked", {"file": ""}))).parent / "record.json").open() as record,
    ):
        following.volume_wait.add_swapped(locked)
        flock(record, LOCK_EX)
        waited = following.follow()
    assert waited.reasons == (WaitReason(WaitReasonKind.PINNED, f"another process has locked {locked.id}"),)
    assert tree_of(locked).exists()
    assert not list(volume.glob(f".trashd/u/*/*/{free.id}"))
