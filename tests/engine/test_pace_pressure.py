"""The pacer on a real block device, whose neighbour is the test; the time between the looks is the test's too."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.core.pacing import Backlog, RateCaps, Speed, WorkTotals, rest_at
from fusefs.engine.pace import PressurePacer
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.pressure import Psi
from tests.support.open_fds import open_fds
from tests.support.real_filesystems import loop_volume, sync, tmpfs_volume

NO_CAPS = RateCaps()

pytestmark = pytest.mark.needs("root")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    """A pacer at work: `run` lets time go by, from one look to the next."""

    def __init__(
        self, root: Path, fd: Fd, psi: Psi, caps: RateCaps, *, may_write: bool = True, is_remote: bool = False
    ) -> None:
        self.root = root
        self.clock = Clock()
        write = self.write_there if is_remote else None
        self.pacer = PressurePacer(Kernel(), fd, caps, self.clock, psi, may_write=may_write, write=write)
        self.write_s, self.write_at_work_s = 0.002, 0.002
        self.tempo = Speed()

    def write_there(self) -> None:
        """What a server needs for a small write, while we rest and while we work."""
        begins_s, ends_s = rest_at(self.clock.now_s, is_alone=self.tempo.is_alone, is_remote=True)
        self.clock.now_s += self.write_s if begins_s <= self.clock.now_s < ends_s else self.write_at_work_s

    def run_probing(self, seconds: float) -> None:
        for _ in self.run(seconds):
            if self.pacer.is_probe_due():
                self.pacer.probe()

    def run(self, seconds: float, neighbour: Callable[[], None] = lambda: None) -> Iterator[float]:
        """What time it is, after each look."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += max(self.pacer.next_tick_s(), 0.001)
            neighbour()
            self.tempo = self.pacer.tick(WorkTotals(), Backlog())
            yield self.clock.now_s

    def until(self, is_alone: bool, neighbour: Callable[[], None] = lambda: None) -> float:
        """Seconds until it is at full speed, or no longer; ten at most."""
        began_s = self.clock.now_s
        return next((at_s for at_s in self.run(10.0, neighbour) if self.tempo.is_alone == is_alone), 1e9) - began_s

    def fsyncs(self) -> None:
        fd = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for _ in range(3):
            os.write(fd, bytes(4096))
            os.fsync(fd)
        os.close(fd)


@contextmanager
def on_a_disk(
    nowhere: Path, caps: RateCaps = NO_CAPS, *, may_write: bool = True, is_remote: bool = False
) -> Iterator[Scene]:
    """A pacer that goes by the device alone: others work on this machine while tests run.

    Its journal writes nothing by itself, however long the test is kept waiting.
    """
    with loop_volume("ext4", mount_options=["commit=3600"]) as root:
        sync(root)
        with Kernel().open_path(bytes(root), os.O_RDONLY) as fd:
            scene = Scene(root, fd, Psi(str(nowhere)), caps, may_write=may_write, is_remote=is_remote)
            yield scene
            scene.pacer.close()


def test_with_nobody_there_it_is_soon_at_full_speed(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        assert scene.until(is_alone=True) <= 0.5
        assert all(scene.tempo.is_alone for _ in scene.run(5.0))
        assert scene.pacer.why() == "no other process uses the disk"


def test_it_steps_back_within_a_second_and_comes_again_within_five(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        assert scene.until(is_alone=False, neighbour=scene.fsyncs) <= 1.0
        assert scene.pacer.is_yielding()
        assert scene.pacer.why().startswith("yielding: ")
        assert not any(scene.tempo.is_alone for _ in scene.run(5.0, scene.fsyncs))
        assert scene.until(is_alone=True) <= 5.0
        assert not scene.pacer.is_yielding()


def test_somebody_who_is_there_already_never_meets_it_at_full_speed(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        assert not any(scene.tempo.is_alone for _ in scene.run(5.0, scene.fsyncs))


def test_its_own_probes_are_nobody(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        for _ in scene.run(5.0):
            scene.pacer.probe()
            assert scene.tempo.is_alone


def test_a_probe_tells_how_long_it_took_and_leaves_nothing(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        before = os.listdir(scene.root)
        scene.pacer.probe()
        assert scene.pacer.pressure().probe_ms is not None
        assert os.listdir(scene.root) == before


def test_on_a_server_that_feels_nothing_it_stays_at_full_speed(tmp_path: Path) -> None:
    with on_a_disk(tmp_path, is_remote=True) as scene:
        scene.until(is_alone=True)
        scene.run_probing(60.0)
        assert scene.tempo.is_alone


def test_on_a_server_whose_writes_take_longer_while_it_works_it_steps_back_and_stays_so(tmp_path: Path) -> None:
    with on_a_disk(tmp_path, is_remote=True) as scene:
        scene.until(is_alone=True)
        scene.write_at_work_s = 0.008
        scene.run_probing(60.0)
        assert not scene.tempo.is_alone
        assert scene.tempo.share < 0.3
        scene.run_probing(60.0)
        assert not scene.tempo.is_alone
        share = scene.tempo.share
        scene.write_at_work_s = scene.write_s
        scene.run_probing(60.0)
        assert scene.tempo.share > share


def test_what_it_left_to_be_written_is_begun_beside_others(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        assert not any(scene.pacer.is_write_back_due() for _ in scene.run(5.0))
        scene.until(is_alone=False, neighbour=scene.fsyncs)
        assert any(scene.pacer.is_write_back_due() for _ in scene.run(1.0, scene.fsyncs))


def test_what_is_begun_is_over_before_a_rest(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        scene.until(is_alone=False, neighbour=scene.fsyncs)
        for at_s in scene.run(5.0, scene.fsyncs):
            if scene.pacer.is_write_back_due():
                begins_s, _ = rest_at(at_s, is_alone=False)
                assert at_s < begins_s
                scene.pacer.write_back()
                assert not scene.pacer.is_write_back_due()


def test_a_probe_is_wanted_now_and_then_and_not_again_at_once(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        scene.pacer.probe()
        assert not any(scene.pacer.is_probe_due() for _ in scene.run(5.0))
        assert any(scene.pacer.is_probe_due() for _ in scene.run(10.0))


def test_a_look_that_comes_too_late_is_no_rest(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
        for _ in range(100):
            scene.clock.now_s += 0.26  # never where a rest ends: what is seen may be our own work
            scene.fsyncs()
            assert scene.pacer.tick(WorkTotals(), Backlog()).is_alone


def test_who_hurries_does_not_listen_and_yields_to_nobody(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        tempo = scene.pacer.tick(WorkTotals(), Backlog(hurries=True))
        assert (tempo.is_alone, tempo.rests) == (True, False)
        assert scene.pacer.why().startswith("hurrying")


def test_caps_are_kept(tmp_path: Path) -> None:
    with on_a_disk(tmp_path, RateCaps(entries_per_s=70, bytes_per_s=7000)) as scene:
        scene.until(is_alone=True)
        assert (scene.tempo.entries_per_s, scene.tempo.bytes_per_s) == (70, 7000)


def test_it_tells_what_an_unlink_takes(tmp_path: Path) -> None:
    with on_a_disk(tmp_path) as scene:
        scene.pacer.tick(WorkTotals(1000, 0, 0.02), Backlog())
        assert scene.pacer.pressure().unlink_us == pytest.approx(20.0)


def test_where_nothing_is_told_it_goes_by_latency(tmp_path: Path) -> None:
    with tmpfs_volume() as root, Kernel().open_path(bytes(root), os.O_RDONLY) as fd:
        scene = Scene(root, fd, Psi(str(tmp_path)), RateCaps())
        for _ in scene.run(3.0):
            pass
        assert not scene.tempo.is_alone
        assert "so latency sets the pace" in scene.pacer.why()
        assert scene.pacer.is_probe_due() or any(scene.pacer.is_probe_due() for _ in scene.run(2.0))
        scene.pacer.close()


def test_the_pressure_of_this_machine_is_shares_of_time() -> None:
    with tmpfs_volume() as root, Kernel().open_path(bytes(root), os.O_RDONLY) as fd:
        scene = Scene(root, fd, Psi(), RateCaps())
        for _ in scene.run(2.0):
            pass
        felt = scene.pacer.pressure()
        assert all(share is None or 0.0 <= share <= 1.0 for share in felt[:3])
        scene.pacer.close()


def test_where_it_may_not_write_it_goes_by_the_device_and_wants_no_probe(tmp_path: Path) -> None:
    """A user's own store, in which root's service makes nothing; longer than two probes are apart."""
    with on_a_disk(tmp_path, may_write=False) as scene:
        assert scene.until(is_alone=True) <= 0.5
        assert not any(scene.pacer.is_probe_due() for _ in scene.run(25.0))
        assert scene.tempo.is_alone
        assert scene.until(is_alone=False, neighbour=scene.fsyncs) <= 1.0


def test_where_it_may_not_write_and_nothing_is_told_it_goes_as_if_somebody_were_there(tmp_path: Path) -> None:
    with tmpfs_volume() as root, Kernel().open_path(bytes(root), os.O_RDONLY) as fd:
        scene = Scene(root, fd, Psi(str(tmp_path)), RateCaps(), may_write=False)
        assert not any(scene.pacer.is_probe_due() or scene.tempo.is_alone for _ in scene.run(25.0))
        assert scene.pacer.pressure().probe_ms is None
        scene.pacer.close()


def test_closed_it_holds_nothing(tmp_path: Path) -> None:
    before = set(open_fds())
    with on_a_disk(tmp_path) as scene:
        scene.until(is_alone=True)
    assert set(open_fds()) <= before
