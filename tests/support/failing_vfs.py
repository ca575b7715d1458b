"""What stands below a mount's handlers, where all that goes wrong there is the point."""

from __future__ import annotations

from typing import NoReturn

from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.thread_pool import PoolTask, ThreadPool
from fusefs.mount.tables.estale_retries import EstaleRetries
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.validity import AttrTimeouts


class Broken:
    """A vfs of which nothing works, nor of its parts."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.lock, self.stats, self.timeouts = TablesLock(), Counters.in_memory(), AttrTimeouts()
        self.retries = EstaleRetries(self.lock)

    def __getattr__(self, name: str) -> Broken:
        return self

    def __call__(self, *_args: object, **_named: object) -> NoReturn:
        raise self.error


class AtOnce(ThreadPool):
    """No threads."""

    def __init__(self) -> None:
        super().__init__(1)

    def do(self, task: PoolTask) -> bool:
        task.act(False)
        return True


class Later(ThreadPool):
    """No threads: what is to be done is left to the test."""

    def __init__(self) -> None:
        super().__init__(1)
        self.tasks: list[PoolTask] = []

    def do(self, task: PoolTask) -> bool:
        self.tasks.append(task)
        return True
