"""The sizes of orphans, which the service counts and stores while no other process uses the disk, or unknown."""

import json
import os
import stat
import threading
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.pacing import HOLD, UNLIMITED, Speed
from fusefs.core.policy import VolumePolicy
from fusefs.core.service_status import HeldByUser, Status, VolumePhase, VolumeStatus
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.service import timers
from fusefs.service.forker import Child, _WhenIdle
from fusefs.service.messages import Measure
from fusefs.service.open_volume import VolumeSpace
from fusefs.service.state_files import HeldFiles, read_held, read_status, write_status
from fusefs.service.timers import ServiceTimers
from fusefs.service.user_state import _MOST_MEASURED, FolderPart, SizeSums
from fusefs.service.volume_figures import VolumeFigures
from fusefs.store.container import HeldContainer, hold
from tests.support.hostile_volume import ALICE, MALLORY, Shared
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.service_process import QUICK, aged, places, service
from tests.support.small_orphans import orphan_in
from tests.support.store_verbs import assert_silent, entries, own, place, restore
from tests.support.trashd_command import done_well, swapped, trashd

MIB = 1 << 20
STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 99)), max_size=30)


@given(STEPS, STEPS)
def test_the_sum_is_that_of_what_is_known_last(
    before: list[tuple[str, int | None]], seen: list[tuple[str, int | None]]
) -> None:
    sums = SizeSums(10)
    for identifier, size in before:
        sums.note(identifier, size)
    assert (len(sums), sums.n_bytes) == _last(before)
    sums.begin_scan()
    for identifier, size in seen:
        sums.note(identifier, size)
    assert (len(sums), sums.n_bytes) == _last([*before, *seen])
    sums.end_scan()
    assert (len(sums), sums.n_bytes) == _last(seen)
    for identifier in "abcdef":
        sums.forget(identifier)
    assert (len(sums), sums.n_bytes) == (0, 0)


def _last(steps: list[tuple[str, int | None]]) -> tuple[int, int]:
    known = [size for size in dict(steps).values() if size is not None]
    return len(known), sum(known)


def test_what_has_no_room_is_not_known() -> None:
    sums = SizeSums(2)
    for identifier in "abc":
        sums.note(identifier, 5)
    assert (len(sums), sums.n_bytes) == (2, 10)


@pytest.mark.needs("root")
def test_a_users_file_is_that_users_alone_and_goes_with_the_last_orphan(tmp_path: Path) -> None:
    runtime = os.fsencode(tmp_path)
    volume = VolumeStatus(path="/v", held=(HeldByUser(0, 1, 2), HeldByUser(ALICE, 3, 0)))
    status = Status(version="0", pid=1, boot_id="b", started_ns=1, updated_ns=1, volumes=(volume,))
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes/12").write_text("of another service")
    files = HeldFiles(runtime)
    write_status(runtime, status)
    files.publish(status)
    seen = read_status(runtime)
    assert seen is not None
    assert seen.status.volumes[0].held == ()  # everybody may read that
    assert sorted(os.listdir(tmp_path / "sizes")) == [str(ALICE), "all"]
    of_alice, of_all = (os.stat(tmp_path / "sizes" / name) for name in (str(ALICE), "all"))
    assert (stat.S_IMODE(of_alice.st_mode), of_alice.st_uid) == (0o400, ALICE)
    assert (stat.S_IMODE(of_all.st_mode), of_all.st_uid) == (0o400, 0)
    assert read_held(runtime) == {"/v": volume.held}
    files.publish(
        Status(version="0", pid=1, boot_id="b", started_ns=1, updated_ns=1, volumes=(VolumeStatus(path="/v"),))
    )
    assert os.listdir(tmp_path / "sizes") == ["all"]


def _taken(shared: Shared, uid: int, name: str, n_mib: int) -> str:
    home = shared.home(uid)
    make_tree(home / name, {"file": bytes(n_mib * MIB)})
    return str(swapped(home / name)["id"])


def _held(volume: Path) -> list[dict[str, Any]]:
    done = trashd("status", "--json", XDG_RUNTIME_DIR="/nowhere")
    assert done.code == 0, done
    (told,) = done.objects()
    (found,) = [one for one in told["volumes"] if one["path"] == str(volume)]
    held: list[dict[str, Any]] = found["held"]
    return held


@pytest.mark.needs("root")
def test_each_user_is_told_of_his_own_and_root_of_all(shared: Shared) -> None:
    volume = shared.volume
    ids = {uid: as_user(uid, partial(_taken, shared, uid, "job", 2)) for uid in (ALICE, MALLORY)}
    as_user(ALICE, partial(done_well, "du", "--volume", volume))
    (counted,) = done_well("du", "--json", ids[ALICE], "--volume", volume).objects()
    of_alice = {"uid": ALICE, "n_bytes": counted["n_bytes"], "n_unknown": 0}
    with shared.served() as service:
        unknown = {"uid": MALLORY, "n_bytes": 0, "n_unknown": 1}
        service.until(lambda: _held(volume) == [of_alice, unknown])
        assert as_user(ALICE, partial(_held, volume)) == [of_alice]
        assert as_user(MALLORY, partial(_held, volume)) == [unknown]
        assert "at least" in trashd("status").out
        for name in ("all", str(MALLORY)):
            with pytest.raises(PermissionError):
                as_user(ALICE, (Path(os.fsdecode(SYSTEM_RUNTIME)) / "sizes" / name).read_bytes)
        # What is counted while it runs is told without a look at everything.
        as_user(MALLORY, partial(done_well, "du", "--volume", volume))
        service.until(lambda: _held(volume)[1]["n_unknown"] == 0)
        as_user(ALICE, partial(done_well, "restore", ids[ALICE], "--volume", volume))
        service.until(lambda: [one["uid"] for one in _held(volume)] == [MALLORY])
    assert_silent(volume)


@pytest.mark.needs("root")
def test_a_size_that_a_user_wrote_has_no_orphan_of_anothers_go(shared: Shared) -> None:
    volume = shared.volume
    ids = {uid: as_user(uid, partial(_taken, shared, uid, "job", 1)) for uid in (ALICE, MALLORY)}
    as_user(MALLORY, partial(done_well, "du", "--volume", volume))
    (record,) = shared.folder(MALLORY).glob("orphans/*/record.json")
    text = json.loads(record.read_bytes())
    text["size"]["n_bytes"] = 1 << 62
    record.write_text(json.dumps(text))
    with shared.served('[defaults]\npaced = false\nminimum_age = "0s"\nquota = { bytes = "1G" }\n') as service:
        service.until(lambda: {one["n_unknown"] for one in _held(volume)} == {0})  # Alice's is measured
        service.until_phase(volume, VolumePhase.IDLE)
    found = {one["id"]: one["size"]["n_bytes"] for one in done_well("list", "--json", "--volume", volume).objects()}
    assert found.keys() == set(ids.values())
    # Root is told what was counted when it reaps by sizes, whatever a record says.
    asked = trashd("reap", "--free", "1T", "--yes", "--volume", volume)
    assert asked.code == 13, asked
    assert_silent(volume)


@pytest.mark.needs("root")
def test_what_is_counted_for_a_quota_is_noted_for_everybody(shared: Shared) -> None:
    identifier = as_user(ALICE, partial(_taken, shared, ALICE, "job", 2))
    with shared.served('[defaults]\npaced = false\nquota = { bytes = "1G" }\n') as service:

        def size() -> Any:
            (one,) = done_well("list", "--json", "--volume", shared.volume).objects()
            return one["size"]

        service.until(lambda: size() is not None)
        assert size()["n_bytes"] >= 2 * MIB
        service.until(lambda: [one["n_unknown"] for one in _held(shared.volume)] == [0])
    assert done_well("list", "--json", "--volume", shared.volume).objects()[0]["id"] == identifier
    assert_silent(shared.volume)


BESIDE_OTHERS = Speed(is_alone=False, share=0.1)


@pytest.mark.needs("root")
@pytest.mark.timeout(180)
def test_the_service_notes_the_size_of_what_is_a_minute_old(volume: Path) -> None:
    old = aged(volume, "old", 3600, size_mb=1)
    new = orphan_in(volume, "new").id
    with places() as base, service(base, volume, config=QUICK) as running:
        running.until(lambda: "size" in json.loads((place(volume, old) / "record.json").read_text()))
        running.until(lambda: running.volume(volume).n_due == 0)
    sizes = {entry.id: entry.size for entry in entries(volume)}
    noted = sizes[ContainerId(old)]
    assert noted is not None
    assert noted.n_bytes >= 1 << 20
    assert sizes[ContainerId(new)] is None
    assert_silent(volume)


class Told:
    """A child that was told a tempo."""

    def __init__(self, tempo: Speed) -> None:
        self.now = tempo
        self.is_stopped = False

    def tempo(self) -> Speed:
        return self.now

    def should_stop(self) -> bool:
        return self.is_stopped


def test_beside_others_it_holds_and_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(UNLIMITED)
    idle = _WhenIdle(cast(Child, told))
    assert (idle.tempo(), idle.stops()) == (UNLIMITED, False)
    monkeypatch.setattr(timers, "current", ServiceTimers(beside_others_limit_s=0.0))
    told.now = HOLD  # another user's turn: that is waited for
    assert (idle.tempo(), idle.stops()) == (HOLD, False)
    told.now = BESIDE_OTHERS
    assert (idle.tempo(), idle.stops()) == (HOLD, True)
    told.now = UNLIMITED
    assert (idle.tempo(), idle.stops()) == (UNLIMITED, False)
    told.is_stopped = True
    assert idle.stops()


def test_what_could_not_be_measured_is_tried_later_and_not_for_ever() -> None:
    part = FolderPart(b"/v", 10, 0)
    part.note_page("", 0.0, 0)
    part.measure_at("a", 0.0)
    now_s, n, pause_s = 0.0, 0, ServiceTimers().measure_pause_s
    while (order := part.next_order(now_s)) is not None:
        assert order == Measure(b"/v", ["a"], when_idle=True)
        assert part.urgent_at_s() > now_s
        n += 1
        part.put_back(now_s)
        assert part.next_order(now_s + pause_s - 1) is None
        now_s += pause_s
    assert n == _MOST_MEASURED


@pytest.mark.needs("root")
def test_a_restore_waits_for_the_moment_in_which_a_size_is_noted(volume: Path) -> None:
    swapped = orphan_in(volume)
    with own(volume) as folder:
        held = hold(folder, State.ORPHANS, swapped.id)
        assert isinstance(held, HeldContainer)
        threading.Timer(0.1, held.owned.close).start()
        restore(volume, swapped.id, Kernel())
    assert os.listdir(volume / "job") != []


def test_a_trend_begins_anew_after_the_volume_was_gone_and_right_after_a_boot() -> None:
    figures = VolumeFigures()

    def trend(free_mib: int, now_s: float) -> float | None:
        figures.note_space(VolumeSpace(free_mib * MIB, 10 * MIB, None, None), VolumePolicy(b"/v"), now_s)
        return figures.trend_bytes_per_s

    assert trend(8, 20.0) is None
    assert trend(7, 30.0) == -MIB / 10
    figures.forget_space()
    assert trend(2, 40.0) is None
