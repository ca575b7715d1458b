"""A removal whose workers find everything by its path, as the ranks of an MPI job do: by the laws of one machine."""

import errno
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.pacing import SliceBudget, Speed
from fusefs.core.results import LATE_ARRIVAL, Reaped
from fusefs.engine.mpi_ranks import (
    DirectoriesByPath,
    MpiJob,
    OpensRunner,
    RankCrew,
    RankRunner,
    SentSlice,
)
from fusefs.engine.pace import ConstantSpeed
from fusefs.engine.run_slices import WorkerThreads, worker_threads
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.reaper.remove_by_ranks import RemovalByRanks
from tests.support.make_trees import bulky_tree, deep_chain, make_chain, make_tree
from tests.support.real_filesystems import bind_mount
from tests.support.reap_process import state_of
from tests.support.store_verbs import own, place, swap
from tests.support.team_trees import (
    ALICE,
    DEEP,
    MATE,
    TEAM,
    THESIS,
    make_project,
    reap_as,
    reap_with_thesis,
    swap_as,
    team_volume,
)


class JobHere(MpiJob):
    """All ranks in this process, and no MPI. sees: whether the others see any directory"""

    def __init__(self, n_ranks: int = 3, *, sees: bool = True) -> None:
        self.n_ranks = n_ranks
        self._sees = sees
        self._ranks: dict[int, WorkerThreads[SentSlice[Any], Any]] = {}
        self._owned = ExitStack()

    def prepare(self, opens: OpensRunner) -> list[int]:
        sent = pickle.dumps(opens)
        self._owned.close()
        self._ranks.clear()
        for rank in range(1, self.n_ranks):
            runner = self._owned.enter_context(pickle.loads(sent)(Kernel(), self.n_ranks))
            if isinstance(runner, RankRunner):
                run = runner.run_sent if self._sees else self._see_nothing
                workers = worker_threads(runner.strategy.n_workers, run)
                self._ranks[rank] = self._owned.enter_context(workers)
        return [one.n_workers for one in self._ranks.values()]

    def _see_nothing(self, _sent: SentSlice[Any], _budget: SliceBudget) -> None:
        """See RankRunner.run."""

    @contextmanager
    def crew(self, ours: RankRunner[Any, Any], opens: OpensRunner) -> Iterator[RankCrew[Any, Any]]:
        with self._owned, super().crew(ours, opens) as crew:
            yield crew

    def send(self, message: Any, rank: int) -> None:
        sent = pickle.loads(pickle.dumps(message))
        self._ranks[rank].submit(sent, sent.budget)

    def receive(self) -> tuple[int, Any] | None:
        for rank, threads in self._ranks.items():
            if ended := threads.collect_ended(0.0):
                return rank, pickle.loads(pickle.dumps([(one.work.number, one.outcome) for one in ended]))
        return None


def job_here(n_ranks: int = 3) -> RemovalByRanks:
    """As a wish has it."""
    return RemovalByRanks(JobHere(n_ranks))


pytestmark = pytest.mark.needs("root")

SMALL_SLICES = ConstantSpeed(Speed(entries_per_s=1000))
"""Of fifty entries at most, so that much is left begun."""
WISHES = (
    RemovalOptions(job=job_here()),
    RemovalOptions(job=job_here(), n_workers=4),
    RemovalOptions(job=job_here(), pace=SMALL_SLICES),
)


@pytest.fixture
def team() -> Iterator[Path]:
    with team_volume() as path:
        yield path


@pytest.fixture(params=WISHES, ids=["fast", "by threads", "in small slices"])
def wishes(request: pytest.FixtureRequest) -> RemovalOptions:
    given: RemovalOptions = request.param
    return given


def reap_by_paths(volume: Path, identifier: str, wishes: RemovalOptions) -> Reaped:
    with own(volume) as folder:
        return reap(folder, ContainerId(identifier), wishes)


def test_a_tree_of_every_shape_goes_and_each_entry_counts_once(volume: Path, wishes: RemovalOptions) -> None:
    tree = bulky_tree(volume / "job", 4, 40, 400)
    n = 1 + sum(len(names) + len(files) for _path, names, files in os.walk(tree))
    identifier = swap(tree).id
    reaped = reap_by_paths(volume, identifier, wishes)
    assert (reaped.report.removed, reaped.report.failures) == (n, ())
    assert state_of(volume, identifier) is None


def test_a_chain_longer_than_any_path_goes(volume: Path) -> None:
    (volume / "job").mkdir()
    for n in range(3):
        make_chain(volume / f"job/{n}", 2000)
    identifier = swap(volume / "job").id
    reaped = reap_by_paths(volume, identifier, RemovalOptions(job=job_here()))
    assert reaped.report.removed == 6001


def test_what_the_other_ranks_do_not_see_the_first_removes(volume: Path) -> None:
    identifier = swap(bulky_tree(volume / "job", 4, 40, 400)).id
    job = RemovalByRanks(JobHere(sees=False))
    reaped = reap_by_paths(volume, identifier, RemovalOptions(job=job, n_workers=4))
    assert reaped.report.failures == ()
    assert state_of(volume, identifier) is None


# What others can do meanwhile


def test_what_a_mate_moved_into_an_orphan_is_kept(team: Path, wishes: RemovalOptions) -> None:
    identifier, reaped = reap_with_thesis(team, wishes=wishes)
    assert (place(team, identifier) / "tree/in" / DEEP).read_bytes() == THESIS
    assert [failure.name for failure in reaped.report.failures if failure.call == LATE_ARRIVAL] == [b"tree/in"]
    assert state_of(team, identifier) is State.QUARANTINE


def test_what_was_there_goes_although_a_mate_owns_it(team: Path, wishes: RemovalOptions) -> None:
    """The reap itself changes a directory of another's: nobody else could tell that it was there before."""
    project = make_project(team)
    deep_chain(project / "job/a/b/chain", 30)
    for path, names, files in os.walk(project / "job/a/b/chain"):
        os.chown(path, MATE, TEAM)
        os.chmod(path, 0o2775)
        make_tree(Path(path) / "more", {f"{n}": "" for n in range(60)})
        os.chown(Path(path) / "more", MATE, TEAM)
        os.chmod(Path(path) / "more", 0o2775)
        assert names or files
    identifier = swap_as(ALICE, project / "job")
    reaped = reap_as(ALICE, team, identifier, wishes)
    assert (reaped.report.failures, state_of(team, identifier)) == ((), None)


def test_a_directory_that_takes_the_place_of_one_on_the_way_is_not_gone_through(tmp_path: Path) -> None:
    """What lies in it may be beyond doubt itself: it is its being there that is in doubt."""
    make_tree(tmp_path / "top", {"a": {"b": {"c": {}}}})
    kernel, given = Kernel(), {(tmp_path / "top/a").stat().st_ino, (tmp_path / "top/a/b").stat().st_ino}
    with kernel.open_path(os.fsencode(tmp_path / "top")) as top:
        asked: list[bytes] = []

        def takes(fd: Fd, path: bytes) -> bool:
            asked.append(path)
            return kernel.fstat(fd).st_ino in given

        directories = DirectoriesByPath(kernel, top, takes)
        directories.open(b"a/b").close()
        with pytest.raises(PermissionError) as refused:
            directories.open(b"a/b/c")
        assert refused.value.filename == b"a/b/c"
        assert asked == [b"a", b"a/b", b"a/b/c"]
        directories.close()
        (tmp_path / "top/a").rename(tmp_path / "away")
        make_tree(tmp_path / "top/a", {"b": {}})
        with pytest.raises(PermissionError) as refused:
            directories.open(b"a/b")
        assert refused.value.filename == b"a"


@pytest.mark.parametrize("what", ["link", "file", "mount"])
def test_no_link_file_or_mount_is_gone_through(tmp_path: Path, what: str) -> None:
    make_tree(tmp_path / "outside", {"b": {}})
    make_tree(tmp_path / "top", {"a": {}, "file": ""})
    (tmp_path / "top/link").symlink_to("../outside")
    kernel = Kernel()
    with bind_mount(tmp_path / "outside", tmp_path / "top/a"), kernel.open_path(os.fsencode(tmp_path / "top")) as top:
        directories = DirectoriesByPath(kernel, top, lambda _fd, _path: True)
        name = b"a" if what == "mount" else what.encode()
        with pytest.raises(OSError) as refused:  # noqa: PT011 - the errno says which
            directories.open(name + b"/b")
        assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV)


def test_as_many_directories_stay_open_as_are_allowed(tmp_path: Path) -> None:
    make_tree(tmp_path / "top", {f"{n}": {} for n in range(50)})
    kernel = Kernel()
    before = len(os.listdir("/proc/self/fd"))
    with kernel.open_path(os.fsencode(tmp_path / "top")) as top:
        directories = DirectoriesByPath(kernel, top, lambda _fd, _path: True, 10)
        for n in range(50):
            directories.open(b"%d" % n).close()
        assert len(os.listdir("/proc/self/fd")) == before + 1 + 10
        directories.close()
    assert len(os.listdir("/proc/self/fd")) == before
