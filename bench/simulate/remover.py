"""What a worker does with a slice, call by call, on the model of a server: reaper/remove_slice.py in simulated time.

The slice, its budget and what comes back are the engine's own; so are how many names are taken between two looks at the
clock, and windows of listings. Here are the calls alone, and no failures.
"""

from typing import NamedTuple

from bench.simulate.clock import Steps
from bench.simulate.server import MetadataServer
from bench.simulate.tree import Directory, Tree
from fusefs.core.names import join_path
from fusefs.core.pacing import NamesPerClockCheck, SliceBudget
from fusefs.core.slices import (
    RemovalSliceResult,
    Slice,
    SliceWork,
    UnfinishedDirectory,
    encode_name,
    pack_names,
    unpack_names,
)


class SimulatedRemover(NamedTuple):
    """Runs slices of one tree (engine.run_slices.SliceRunner, but in steps).

    window  entries of a directory that are listed together
    """

    server: MetadataServer
    tree: Tree
    window: int

    def steps(self, machine: int, work: Slice, budget: SliceBudget) -> Steps:
        """Do a slice on a machine; they return what it did."""
        return _SliceRun(self, machine, work, budget).steps()


class _Frame(NamedTuple):
    name: str
    path: bytes
    directory: Directory
    work: SliceWork


class _SliceRun:
    def __init__(self, remover: SimulatedRemover, machine: int, work: Slice, budget: SliceBudget) -> None:
        self._server, self._tree, self._window = remover
        self._clock = remover.server.clock
        self._machine = machine
        self._slice = work
        self._budget = budget
        self._frames = [_Frame("", work.path, self._tree.at[work.path], work.work)]
        self._names_per_check = NamesPerClockCheck()
        self._names_per_check.begin(budget.seconds)
        self._began_s = self._clock.now_s
        self._removed = 0
        self._hoisted: list[str] = []

    def steps(self) -> Steps:
        while True:
            frame = self._frames[-1]
            work = frame.work
            if work.emptied:
                name, _ = work.emptied.pop()
                path = join_path(frame.path, encode_name(name))
                yield from self._rmdir(frame, name, self._tree.at[path], path)
            elif work.names:
                yield from self._unlink_some(frame)
            elif work.bundles:
                work.names = unpack_names(work.bundles.pop())
            elif work.subdirs:
                yield from self._enter(frame, work.subdirs.pop())
            elif not work.is_listed:
                yield from self._list(frame)
            elif len(self._frames) == 1:
                break
            else:
                above = self._frames[-2]
                yield from self._rmdir(above, frame.name, frame.directory, frame.path)
                self._frames.pop()
            if self._is_over():
                break
        bottom, *above_it = self._frames
        return RemovalSliceResult(
            self._removed,
            0,
            (),
            0,
            bottom.work,
            tuple(UnfinishedDirectory(one.name, -1, one.work) for one in above_it),
            tuple(self._hoisted),
            busy_s=self._clock.now_s - self._began_s,
        )

    def _is_over(self) -> bool:
        most = self._budget.n_entries
        is_spent = most is not None and self._removed >= most
        return is_spent or self._clock.now_s >= self._began_s + self._budget.seconds

    def _unlink_some(self, frame: _Frame) -> Steps:
        model = self._server.model
        if not model.n_slots:
            yield from self._unlink_at_once(frame, model.unlink_s())
            return
        began_s = self._clock.now_s
        n = self._names_per_check.n
        if self._budget.n_entries is not None:
            n = min(n, max(self._budget.n_entries - self._removed, 1))
        names = frame.work.names[: -n - 1 : -1]
        del frame.work.names[-n:]
        is_paced = self._budget.is_paced()
        is_cached = self._slice.is_shared and len(self._frames) == 1 and not is_paced
        if is_paced:
            yield from self._server.request_reads(len(names))
        if is_cached:
            for _ in names:
                yield from self._server.lookup_ahead()
        for name in names:
            yield from self._server.unlink(self._machine, frame.directory.key, is_cached=is_cached)
            self._tree.unlink(frame.directory, name)
        self._removed += len(names)
        self._names_per_check.record(len(names), self._clock.now_s - began_s)

    def _unlink_at_once(self, frame: _Frame, each_s: float) -> Steps:
        """All that has time, as one event: nobody waits for anybody on a server without a limit."""
        left_s = self._began_s + self._budget.seconds - self._clock.now_s
        n = max(min(int(left_s / each_s) + 1, len(frame.work.names)), 1)
        names = frame.work.names[-n:]
        del frame.work.names[-n:]
        yield self._server.pause(n * each_s)
        for name in names:
            self._tree.unlink(frame.directory, name)
        self._removed += n

    def _enter(self, frame: _Frame, name: str) -> Steps:
        if len(self._frames) > self._slice.max_depth:
            yield from self._hoist(frame, name)
            return
        yield from self._server.request_reads(self._server.model.looks_a_directory)
        directory, path = self._tree.enter(frame.directory, name), join_path(frame.path, encode_name(name))
        self._tree.at[path] = directory
        self._frames.append(_Frame(name, path, directory, SliceWork(is_listed=False)))

    def _hoist(self, frame: _Frame, name: str) -> Steps:
        yield from self._server.request_reads(1)
        yield self._server.change(self._machine, self._tree.hoisted.key)
        new = self._tree.hoist(frame.directory, name)
        if self._slice.is_hoisted:
            self._frames[0].work.subdirs.append(new)
        else:
            self._hoisted.append(new)

    def _list(self, frame: _Frame) -> Steps:
        yield from self._server.request_reads(1)
        files, subdirs, is_all = frame.directory.list(self._window)
        work = frame.work
        work.bundles += pack_names(files[::-1])
        work.subdirs += subdirs
        work.n_passes += is_all
        work.is_listed = is_all

    def _rmdir(self, above: _Frame, name: str, directory: Directory, path: bytes) -> Steps:
        if self._server.model.n_slots:
            yield from self._server.unlink(self._machine, above.directory.key, is_cached=True)
        else:
            yield self._server.pause(self._server.model.unlink_s())
        self._tree.rmdir(above.directory, name, directory)
        del self._tree.at[path]
        self._server.forget(directory.key)
        self._removed += 1
