"""People who swap, drop, write and restore on a volume for as long as a test wants, and know what must be left."""

import os
import pickle
import select
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from random import Random
from typing import NoReturn

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.record import Method
from fusefs.store.stage import SwapOptions
from tests.support.other_users import become
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import entries, own, remove, restore, swap

Content = Mapping[str, str]
"""The files of a tree: path in it and text."""
_LARGE, _EACH = 1500, 40
"""Files of a large tree, and which ones are large."""
_MOST_KEPT, _MOST_HOMES, _MOST_DROPPED = 20, 10, 10
_LIMIT_S = 60.0
_ROOM = 0.3
"""Of blocks and inodes, that stays free."""
_BREATH_S = 0.01
"""Between two acts: a service with idle priority would never have its turn beside people who compute all the time."""


@dataclass
class Ledger:
    """What one person expects: the orphans by id, the trees at their names, and the trees that were dropped."""

    orphans: dict[str, Content] = field(default_factory=dict)
    homes: dict[Path, Content] = field(default_factory=dict)
    dropped: list[Content] = field(default_factory=list)


def content_of(n: int) -> Content:
    """The files of tree number n: each tells the number, so that one in another's tree is noticed."""
    n_files = _LARGE if n % _EACH == 0 else n % 20
    return {"number": str(n), **{f"sub/f{i}": str(n) for i in range(n_files)}}


def make(path: Path, content: Content) -> Path:
    (path / "sub").mkdir(parents=True)
    for name, text in content.items():
        (path / name).write_text(text)
    return path


def read(path: Path) -> Content:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


class BusyUser:
    """One of them, in a process of its own."""

    def __init__(self, volume: Path, uid: int, seed: str) -> None:
        self.ledger = Ledger()
        self._volume = volume
        self._home = volume / f"home-{uid}"
        self._random = Random(seed)
        self._n = uid * 1_000_000
        self._acts = (self._throw, self._throw, self._remove, self._keep, self._keep, self._drop_one, self._race)

    def act(self) -> None:
        """Do something, and first what there is too much of."""
        ledger = self.ledger
        if len(ledger.homes) > _MOST_HOMES:
            path = self._random.choice(list(ledger.homes))
            del ledger.homes[path]
            self._swap_for_good(path)
        elif len(ledger.orphans) > _MOST_KEPT or (ledger.orphans and self._random.random() < 0.2):
            self._restore(self._random.choice(list(ledger.orphans)))
        elif len(ledger.dropped) > _MOST_DROPPED:
            self._restore_dropped()
        else:
            self._random.choice(self._acts)()

    def has_room(self) -> bool:
        """Whether to go on: no user fills a volume up because the reaper is slow."""
        st = os.statvfs(self._home)
        return st.f_bavail > _ROOM * st.f_blocks and st.f_favail >= _ROOM * st.f_files

    def _make(self) -> tuple[Path, Content]:
        self._n += 1
        content = content_of(self._n)
        return make(self._home / f"t{self._n}", content), content

    def _throw(self) -> None:
        self._swap_for_good(self._make()[0])

    def _swap_for_good(self, path: Path) -> None:
        swap(path, options=EXPIRED)
        path.rmdir()

    def _remove(self) -> None:
        remove(self._make()[0], options=EXPIRED)

    def _keep(self) -> None:
        path, content = self._make()
        self.ledger.orphans[swap(path, options=SwapOptions(self._random.choice([None, 3600]))).id] = content

    def _drop_one(self) -> None:
        path, content = self._make()
        with own(self._volume) as folder:  # by its fd: root's service moves it when it is registered
            path.rename(f"/proc/self/fd/{int(folder.fd)}/drop/{path.name}")
        self.ledger.dropped.append(content)

    def _race(self) -> None:
        """Throw one away and want it back at once: whole, or what the reaper left and says so, or not at all."""
        path, content = self._make()
        identifier = swap(path, options=EXPIRED).id
        try:
            restored = restore(self._volume, identifier)
        except TrashdError:
            path.rmdir()
            return
        there = read(path)
        assert there == content or (restored.partial and there.items() <= content.items()), restored
        self._swap_for_good(path)

    def _restore(self, identifier: str) -> None:
        """Have one back that must not have been reaped; sometimes something was written to its name meanwhile."""
        content = self.ledger.orphans[identifier]
        path = self._home / f"t{content['number']}"
        late = {"number": content["number"], "late": "late"}
        is_late = "late" not in content and path.exists() and self._random.random() < 0.5
        if is_late:
            for name, text in late.items():
                (path / name).write_text(text)
        restored = restore(self._volume, identifier)
        assert (Path(os.fsdecode(restored.path)), restored.partial) == (path, False), restored
        del self.ledger.orphans[identifier]
        assert read(path) == content
        assert (restored.rescued is not None) == is_late
        if restored.rescued is not None:
            self.ledger.orphans[restored.rescued] = late
            path.rename(path.with_name(f"{path.name}-back"))  # the name is free for what was written late
            path = path.with_name(f"{path.name}-back")
        self.ledger.homes[path] = content

    def _restore_dropped(self) -> None:
        """Have back what was dropped, if it has been taken in; what has no origin needs to be told one."""
        self._n += 1
        path = self._home / f"t{self._n}"
        mine = [one for one in entries(self._volume) if one.uid == os.geteuid() and one.method is Method.DROPPED]
        adopted = next((one.id for one in mine if one.state is State.ORPHANS), None)
        if adopted is None:
            return
        restored = restore(self._volume, adopted, to=path)
        content = read(path)
        assert not restored.partial
        self.ledger.dropped.remove(content)
        self._swap_for_good(path)


class Traffic:
    def __init__(self, volume: Path, uids: Sequence[int], seed: str) -> None:
        self._volume = volume
        self._shared = memoryview(mmap(-1, 8 * (1 + len(uids)))).cast("Q")  # whether to stop; acts of each
        self._people = [self._begin(n, uid, f"{seed} {uid}") for n, uid in enumerate(uids, 1)]
        self._ledgers: list[Ledger] = []

    def n_acts(self) -> int:
        return sum(self._shared[1:])

    def stop(self) -> list[Ledger]:
        """Have them finish what they are at, and tell. Raises  AssertionError if something went wrong for one"""
        self._shared[0] = 1
        while self._people:
            pid, pipe_fd = self._people.pop()
            with open(pipe_fd, "rb") as pipe:
                assert select.select([pipe], [], [], _LIMIT_S)[0], "somebody hangs"
                told = pipe.read()
            os.waitpid(pid, 0)
            assert told, "something went wrong for somebody: see stderr"
            self._ledgers.append(pickle.loads(told))
        return self._ledgers

    def is_settled(self) -> bool:
        """Whether all that was thrown away is gone, and nothing waits in a drop folder. They have stopped."""
        users = self._volume / ".trashd" / "u"
        n_containers = sum(1 for state in ("orphans", "reaping") for _ in users.glob(f"*/{state}/*"))
        n_left = sum(len(ledger.orphans) + len(ledger.dropped) for ledger in self._ledgers)
        return n_containers == n_left and not any(users.glob("*/drop/*"))

    def assert_nothing_lost(self, but: Sequence[str] = ()) -> None:
        """Everything is where they expect it, whole, and nothing else is there; but: not theirs."""
        listed = {str(entry.id): entry for entry in entries(self._volume) if entry.id not in but}
        dropped = []
        for ledger in self._ledgers:
            for identifier, content in ledger.orphans.items():
                entry = listed.pop(identifier)
                assert (entry.state, entry.partial, entry.problem) == (State.ORPHANS, False, ""), entry
                assert read(Path(os.fsdecode(entry.path), "tree")) == content
            for path, content in ledger.homes.items():
                assert read(path) == content, path
            dropped += ledger.dropped
        assert {entry.method for entry in listed.values()} <= {Method.DROPPED}, listed
        found = [read(Path(os.fsdecode(entry.path), "tree")) for entry in listed.values()]
        assert sorted(map(_number, found)) == sorted(map(_number, dropped))
        assert all(content in dropped for content in found)

    def close(self) -> None:
        """End those that are still at it."""
        self._shared[0] = 1
        with suppress(AssertionError):
            self.stop()

    def _begin(self, n: int, uid: int, seed: str) -> tuple[int, int]:
        (self._volume / f"home-{uid}").mkdir()
        os.chown(self._volume / f"home-{uid}", uid, uid)
        read_fd, write_fd = os.pipe()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            self._live(n, uid, seed, write_fd)
        os.close(write_fd)
        return pid, read_fd

    def _live(self, n: int, uid: int, seed: str, write_fd: int) -> NoReturn:
        try:
            if uid:
                become(uid)
            person = BusyUser(self._volume, uid, seed)
            while not self._shared[0]:
                if person.has_room():
                    person.act()
                    self._shared[n] += 1
                select.select([], [], [], _BREATH_S)
            with open(write_fd, "wb") as pipe:
                pipe.write(pickle.dumps(person.ledger))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)


def _number(content: Content) -> int:
    return int(content["number"])


@contextmanager
def traffic(volume: Path, uids: Sequence[int], seed: str) -> Iterator[Traffic]:
    """People at work on a volume with a store, until they are told to stop, or the block ends."""
    people = Traffic(volume, uids, seed)
    try:
        yield people
    finally:
        people.close()
