"""The plan of a removal: whatever slices do, in whatever order they end, nothing is left, done twice or leaked."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.names import join_path
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.results import STORE, is_kept_for_owner
from fusefs.core.slices import (
    MAX_FAILED_NAMES,
    MAX_FDS,
    MIN_DEPTH,
    RemovalSliceResult,
    Slice,
    SlicePlan,
    SliceWork,
    UnfinishedDirectory,
    encode_name,
    pack_names,
    unpack_names,
)

STUCK = "stuck"
"""A name that the model's kernel refuses to unlink."""
ROOT_FD = 0


@dataclass
class Model:
    """A tree as slices meet it: fds for directories, one entry a tick."""

    tree: dict[str, object]
    window: int
    unlinked: list[tuple[str, ...]] = field(default_factory=list)
    open: dict[int, tuple[str, ...]] = field(default_factory=lambda: {ROOT_FD: ()})
    fds: count[int] = field(default_factory=lambda: count(1))

    def at(self, path: tuple[str, ...]) -> dict[str, object]:
        here = self.tree
        for name in path:
            below = here[name]
            assert isinstance(below, dict)
            here = below
        return here

    def run(self, job: Slice, ticks: int) -> RemovalSliceResult:
        """Do a slice for some ticks."""
        frames: list[tuple[str, int, SliceWork]] = [("", job.fd, job.work)]
        removed, failures = 0, []
        for _ in range(ticks):
            name, fd, work = frames[-1]
            path = self.open[fd]
            here = self.at(path)
            if work.emptied:
                one, n_passes = work.emptied.pop()
                assert here.pop(one) == {}, "a directory is removed before it is empty"
                assert n_passes > 0
                removed += 1
                work.is_productive = True
            elif work.names:
                one = work.names.pop()
                if isinstance(here[one], dict):
                    work.subdirs.append(one)
                elif one.startswith(STUCK):
                    failures.append(Failure(one.encode(), 1, "unlink"))
                    work.skip_failed(one)
                else:
                    del here[one]
                    self.unlinked.append((*path, one))
                    removed += 1
                    work.is_productive = True
            elif work.bundles:
                work.names = unpack_names(work.bundles.pop())
            elif work.subdirs:
                one = work.subdirs.pop()
                inner = next(self.fds)
                self.open[inner] = (*path, one)
                frames.append((one, inner, SliceWork(is_listed=False)))
            elif not work.is_listed:
                work.is_productive = False
                new = [n for n in here if n not in work.failed]
                work.bundles += pack_names(new[: self.window])
                work.is_listed = len(new) <= self.window
                work.n_passes += work.is_listed
            else:
                if len(frames) == 1:
                    break
                work.relist_if_needed()
                if work.has_rest():
                    continue
                frames.pop()
                del self.open[fd]
                above, over = frames[-1][2], self.at(self.open[frames[-1][1]])
                if work.n_failed:
                    above.skip_failed(name)
                else:
                    assert not over[name], "a directory is removed before it is empty"
                    del over[name]
                    removed += 1
                    above.is_productive = True
        left = tuple(UnfinishedDirectory(name, fd, work) for name, fd, work in frames[1:])
        return RemovalSliceResult(removed, 0, tuple(failures), len(failures), frames[0][2], left)


def leaves(tree: dict[str, object]) -> int:
    """Entries of a tree, directories too."""
    return sum(1 + (leaves(below) if isinstance(below, dict) else 0) for below in tree.values())


def only_stuck(tree: dict[str, object]) -> bool:
    """Whether nothing is left but what can't be removed and what holds it."""
    return all(
        bool(below) and only_stuck(below) if isinstance(below, dict) else name.startswith(STUCK)
        for name, below in tree.items()
    )


def n_stuck(tree: dict[str, object]) -> int:
    """How many entries can't be removed."""
    return sum(n_stuck(below) if isinstance(below, dict) else name.startswith(STUCK) for name, below in tree.items())


names = st.sampled_from(["a", "b", "c", "d", "e", STUCK, STUCK + "2"])
trees: st.SearchStrategy[dict[str, object]] = st.recursive(
    st.dictionaries(names, st.none(), max_size=6),
    lambda below: st.dictionaries(st.sampled_from("abcdefgh"), st.none() | below, max_size=8),
    max_leaves=25,
)


@given(st.integers(0, 2**32), trees, st.integers(1, 4), st.booleans(), st.integers(1, 4))
def test_whatever_order_slices_end_in_all_goes_but_what_is_stuck(
    seed: int, tree: dict[str, object], n_workers: int, splits: bool, window: int
) -> None:
    chance = random.Random(seed)
    most = chance.choice((1, 2, 30))  # steps in a slice: one is enough to come to an end
    tree = {"tree": tree}
    stuck, total = n_stuck(tree), leaves(tree)
    model = Model(tree, window)
    plan = SlicePlan(n_workers, splits_names=splits)
    plan.add(ROOT_FD, b"", SliceWork(names=["tree"]))
    running: list[Slice] = []
    while True:
        while len(running) < n_workers and (job := plan.next()) is not None:
            running.append(job)
        if not running:
            break
        job = running.pop(chance.randrange(len(running)))
        # A lost worker did nothing that it told of; here it did nothing at all.
        if chance.random() < 0.1:
            plan.lost(job)
            continue
        for finished in plan.finish_slice(job, model.run(job, chance.randint(1, most))):
            del model.open[finished.fd]
    assert plan.is_dry()
    assert only_stuck(tree)
    assert set(model.open) == {ROOT_FD}, "an fd is leaked"
    assert plan.unfinished_fds() == []
    assert len(set(model.unlinked)) == len(model.unlinked)
    report = plan.report(paced=False, stopped=False)
    assert (report.n_failed > 0) == (stuck > 0)
    assert report.n_failed == stuck
    assert report.removed == total - leaves(tree)


@given(st.integers(0, 3000), st.integers(1, 8), st.booleans())
def test_two_slices_of_one_directory_share_no_name(n_names: int, n_workers: int, splits: bool) -> None:
    plan = SlicePlan(n_workers, splits_names=splits)
    plan.add(ROOT_FD, b"", SliceWork(names=[str(n) for n in range(n_names)]))
    given_out = []
    for _ in range(n_workers):
        job = plan.next()
        given_out += job.work.names if job is not None else []
    assert len(set(given_out)) == len(given_out)
    assert splits or len(given_out) <= 4096


@pytest.mark.parametrize("n_workers", [2, 4, 8])
def test_every_worker_gets_names_of_one_flat_directory(n_workers: int) -> None:
    plan = SlicePlan(n_workers, splits_names=True)
    plan.add(ROOT_FD, b"", SliceWork(bundles=pack_names([str(number) for number in range(3000)])))
    shares = [slice_.work.names for _ in range(n_workers) if (slice_ := plan.next()) and slice_.is_shared]
    assert len(shares) == n_workers
    assert max(map(len, shares)) <= -(-3000 // n_workers)
    assert min(map(len, shares)) >= 3000 // n_workers // 3


def test_the_rest_of_a_small_directory_is_one_workers() -> None:
    plan = SlicePlan(2, splits_names=True, least_share=1000)
    plan.add(ROOT_FD, b"", SliceWork(names=[str(number) for number in range(1000)]))
    first = plan.next()
    assert first is not None
    assert (len(first.work.names), first.is_shared) == (1000, False)
    assert plan.next() is None


def test_names_are_shared_only_where_there_is_nothing_else_to_do() -> None:
    plan = SlicePlan(4, splits_names=True)
    plan.add(ROOT_FD, b"", SliceWork(subdirs=["a", "b"]))
    plan.add(ROOT_FD, b"", SliceWork(names=[str(number) for number in range(3000)]))
    slices = [plan.next() for _ in range(4)]
    assert [bool(one and one.work.subdirs) for one in slices] == [False, True, True, False]


@pytest.mark.parametrize("splits", [True, False])
def test_one_is_at_a_directorys_names_while_others_are_below_it(splits: bool) -> None:
    plan = SlicePlan(4, splits_names=splits)
    work = SliceWork(names=[str(number) for number in range(3000)], subdirs=["a", "b", "c", "d", "e"])
    plan.add(ROOT_FD, b"", work)
    slices = [slice_ for _ in range(4) if (slice_ := plan.next())]
    assert [slice_.work.subdirs for slice_ in slices] == [[], ["d", "e"], ["c"], ["b"]]
    assert slices[0].work.names
    plan.finish_slice(slices[0], RemovalSliceResult(0, 0, (), 0, slices[0].work))
    again = plan.next()
    assert again is not None
    assert (again.work.names, again.work.subdirs) == (slices[0].work.names, [])


@pytest.mark.parametrize("n_workers", [1, 2, 16])
def test_names_are_waiting_in_few_directories_however_many_below_each_other_have_some(n_workers: int) -> None:
    """Each slice ends in a directory that it has just listed, or with half of its names."""
    plan = SlicePlan(n_workers, splits_names=False)
    plan.add(ROOT_FD, b"", SliceWork(subdirs=["top"]))
    waiting = set[bytes]()
    for _ in range(300):
        for slice_ in [slice_ for _ in range(n_workers) if (slice_ := plan.next())]:
            rest = SliceWork(names=slice_.work.names[1:])
            if slice_.work.names and not rest.names:
                waiting.remove(slice_.path)
            left = tuple(
                UnfinishedDirectory(name, 7, SliceWork(names=["x", "y"], subdirs=["d"])) for name in slice_.work.subdirs
            )
            plan.finish_slice(slice_, RemovalSliceResult(0, 0, (), 0, rest, left))
            waiting |= {join_path(slice_.path, encode_name(one.name)) for one in left}
            assert len(waiting) <= 2 * n_workers


@pytest.mark.parametrize(("n_machines", "most"), [(0, 8), (2, 8), (8, 32)])
def test_few_are_at_one_directory_whose_lock_lets_one_unlink_on_each_machine(n_machines: int, most: int) -> None:
    plan = SlicePlan(64, splits_names=True, n_machines=n_machines)
    plan.add(ROOT_FD, b"", SliceWork(names=[str(number) for number in range(3000)]))
    n_begun = 0
    while plan.next():
        n_begun += 1
    assert n_begun == most


def test_of_a_container_goes_what_was_named_and_its_record_stays() -> None:
    plan = SlicePlan(1, splits_names=True)
    plan.add(ROOT_FD, b"", SliceWork(names=["tree", "hoisted"]))
    part = plan.next()
    assert part is not None
    rest = SliceWork(is_productive=True)
    rest.skip_failed("tree")
    plan.finish_slice(part, RemovalSliceResult(1, 0, (), 1, rest))
    assert plan.is_dry()


def test_directory_is_not_listed_while_others_are_at_its_entries() -> None:
    plan = SlicePlan(2, splits_names=True)
    plan.add(ROOT_FD, b"", SliceWork(names=["a"], is_listed=False))
    first = plan.next()
    assert first is not None
    assert first.work.names == ["a"]
    assert plan.next() is None
    plan.finish_slice(first, RemovalSliceResult(1, 0, (), 0, SliceWork()))
    again = plan.next()
    assert again is not None
    assert not again.work.is_listed


@pytest.mark.parametrize("n_workers", [8, 2000])
def test_a_slice_of_very_many_takes_no_more_calls_than_one_of_few(n_workers: int) -> None:
    plan = SlicePlan(n_workers, splits_names=True, n_machines=n_workers)
    plan.add(ROOT_FD, b"", SliceWork(subdirs=[str(number) for number in range(3 * n_workers)]))
    running = [slice_ for _ in range(n_workers) if (slice_ := plan.next())]
    for begun in running:
        left = UnfinishedDirectory(begun.work.subdirs.pop(), 7, SliceWork(names=["x", "y"]))
        plan.finish_slice(begun, RemovalSliceResult(0, 0, (), 0, begun.work, (left,)))
    running = [slice_ for _ in range(n_workers) if (slice_ := plan.next())]
    calls: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        for one in running[:20]:
            plan.finish_slice(one, RemovalSliceResult(2, 0, (), 0, SliceWork()))
            assert plan.next()
    finally:
        sys.setprofile(None)
    assert len(calls) < 20 * 200


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda name: b"/" not in name), max_size=30))
def test_names_of_any_kind_are_the_same_when_unpacked(names: list[bytes]) -> None:
    told = [name.decode("utf-8", "surrogateescape") for name in names]
    assert [name for bundle in pack_names(told) for name in unpack_names(bundle)] == told


def test_lost_slice_is_done_again() -> None:
    plan = SlicePlan(2, splits_names=True)
    plan.add(ROOT_FD, b"", SliceWork(names=["a", "b"]))
    first = plan.next()
    assert first is not None
    plan.lost(first)
    again = plan.next()
    assert again is not None
    assert sorted(again.work.names) == ["a", "b"]


def test_last_begun_directory_comes_first_so_that_few_are_open() -> None:
    plan = SlicePlan(1, splits_names=False)
    plan.add(ROOT_FD, b"", SliceWork(subdirs=["a", "b"]))
    first = plan.next()
    assert first is not None
    left = UnfinishedDirectory("a", 7, SliceWork(names=["x"], is_listed=False))
    plan.finish_slice(first, RemovalSliceResult(0, 0, (), 0, SliceWork(subdirs=["b"]), (left,)))
    following = plan.next()
    assert following is not None
    assert (following.fd, following.path) == (7, b"a")


@pytest.mark.parametrize("n_workers", [1, 2, 16])
def test_few_are_open_however_soon_slices_end(n_workers: int) -> None:
    """Each is over when it has gone down as far as it may, with something left to do in all that it has entered."""
    plan = SlicePlan(n_workers, splits_names=False)
    plan.add(ROOT_FD, b"", SliceWork(subdirs=["top"]))
    most = 0
    for _ in range(2000):
        running = [slice_ for _ in range(n_workers) if (slice_ := plan.next())]
        for slice_ in running:
            rest = SliceWork(subdirs=["other"])
            left = tuple(UnfinishedDirectory("d", 7, SliceWork(subdirs=["e", "f"])) for _ in range(slice_.max_depth))
            plan.finish_slice(slice_, RemovalSliceResult(0, 0, (), 0, rest if left else SliceWork(), left))
        most = max(most, len(plan.unfinished_fds()))
    assert most <= MAX_FDS + n_workers * MIN_DEPTH


@pytest.mark.parametrize("n_failed", [MAX_FAILED_NAMES, MAX_FAILED_NAMES + 1, 10 * MAX_FAILED_NAMES])
def test_names_of_failed_entries_take_bounded_memory(n_failed: int) -> None:
    work = SliceWork()
    for number in range(n_failed):
        work.skip_failed(str(number))
    assert (work.n_failed, len(work.failed)) == (n_failed, MAX_FAILED_NAMES)


def test_a_reason_of_ours_that_a_later_slice_meets_is_not_missed_among_thousands() -> None:
    plan = SlicePlan(1, splits_names=False)
    plan.add(ROOT_FD, b"", SliceWork(names=["a"]))
    first = plan.next()
    assert first is not None
    refused = tuple(Failure(b"%d" % n, 13, "unlink") for n in range(MAX_FAILURES))
    plan.finish_slice(first, RemovalSliceResult(0, 0, refused, len(refused), SliceWork(names=["b"])))
    later = plan.next()
    assert later is not None
    plan.finish_slice(later, RemovalSliceResult(0, 0, (Failure(b"b", 1, STORE),), 1, SliceWork()))
    report = plan.report(paced=False, stopped=False)
    assert (len(report.failures), report.n_failed) == (MAX_FAILURES, MAX_FAILURES + 1)
    assert is_kept_for_owner(report.failures)
