"""A volume that Alice and Mallory share with root, whose canary must not be touched; the reaper service on it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fusefs.service.timers import ServiceTimers
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import Dir, EntrySnapshot, File, Spec, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import QUICK, SCALED, Service, places, service
from tests.support.small_orphans import EXPIRED, TREE
from tests.support.store_verbs import folder_of, init, own, recover_all, swap

ALICE, MALLORY = 12001, 12002


class Shared:
    """The volume, and where its service has its files."""

    def __init__(self, volume: Path, base: Path) -> None:
        self.volume = volume
        self.base = base
        init(volume)
        make_tree(volume / "canary", {"job": {"results": "root's"}, "secret": File(b"s", mode=0o600)})
        for uid in (ALICE, MALLORY):
            make_tree(self.home(uid), Dir(owner=(uid, uid)))
            as_user(uid, lambda: make_folder(volume))
        recover_all(volume)
        self._first = self._read_canary()

    def home(self, uid: int) -> Path:
        return self.volume / f"home-{uid}"

    def folder(self, uid: int) -> Path:
        """The user's folder in the store, by its plain name."""
        return folder_of(self.volume, uid)

    def throw(self, uid: int, name: str = "job", options: SwapOptions = EXPIRED, spec: Spec = TREE) -> str:
        """The id of a directory that a user made and swapped, expired unless told otherwise."""

        def act() -> str:
            path = make_tree(self.home(uid) / name, spec)
            identifier = swap(path, options=options).id
            path.rmdir()
            return str(identifier)

        return as_user(uid, act)

    def is_gone(self, identifier: str) -> bool:
        """Whether no folder has that container any more."""
        return not any(identifier in names for names in self._names().values())

    def is_in(self, identifier: str, state: str) -> bool:
        return any(path.name == state and identifier in names for path, names in self._names().items())

    def _names(self) -> dict[Path, list[str]]:
        """What is in the parts of all users' folders; some vanish meanwhile, some are no directories of ours to see."""
        users = [folder for folder in self.volume.glob(".trashd/[un]*/*") if folder.name[0].isdigit()]
        found = {}
        for folder in users:
            with suppress(OSError):
                for part in os.listdir(folder):
                    with suppress(OSError):
                        found[folder / part] = os.listdir(folder / part)
        return found

    @contextmanager
    def served(self, config: str = QUICK, timers: ServiceTimers = SCALED) -> Iterator[Service]:
        """The service on it; it lives to the end of the block, and ends when it is told to."""
        with service(self.base, self.volume, config=config, timers=timers) as running:
            yield running
            assert running.process.poll() is None, running.log.read_text()
            running.stop()
            assert "internal error in trashd" not in running.log.read_text(), running.log.read_text()

    def assert_untouched(self) -> None:
        """Root's canary is what it was, but for other names that users may have given its files."""
        assert self._read_canary() == self._first

    def _read_canary(self) -> list[EntrySnapshot]:
        tree_before = snapshot(self.volume / "canary", with_times=True)
        return [one._replace(n_links=None, first_name=None) for one in tree_before]


def make_folder(volume: Path) -> None:
    """The caller's folder in the store, as the first swap makes it."""
    with own(volume):
        pass


@contextmanager
def shared_volume(*options: str) -> Iterator[Shared]:
    """Such a volume, a tmpfs; more options for its mount."""
    with tmpfs_volume(options=options) as volume, places() as base:
        shared = Shared(volume, base)
        yield shared
        shared.assert_untouched()
