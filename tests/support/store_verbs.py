"""The store as tests use it: the verbs in one line, the checker, and hooks that count, die or fail at call n."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from fusefs.core.names import user_store_name
from fusefs.core.record import Record
from fusefs.core.record_decoding import decode_record
from fusefs.core.results import Finding, Reaped
from fusefs.linux.kernel import Kernel
from fusefs.reaper.reap import reap
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.doctor import check_folder, check_store
from fusefs.store.find_stores import discover_stores
from fusefs.store.init_store import initialise
from fusefs.store.layout import Store, UserFolder, open_own_store, open_store
from fusefs.store.orphans import (
    ListedContainer,
    call_in_each_folder,
    call_in_folder,
    find_container,
    list_all_containers,
    tidy_all_folders,
)
from fusefs.store.registry_lines import makes_root_store
from fusefs.store.restore import Restored, restore_by_id
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, open_own_folder, remove_path, swap_path
from tests.support.other_users import query_without_fork
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_memory_children import end_process

_DEFAULT = SwapOptions()


def raw(path: Path) -> bytes:
    return os.fsencode(path)


def init(volume: Path, kernel: Kernel | None = None, *, is_made_by_root: bool = False) -> None:
    """`trashd init --replace` as root, `trashd init` as a user; with the caller's own folder and reserve."""
    context = nullcontext() if kernel else query_without_fork()
    kernel, replaces = kernel or Kernel(), os.geteuid() == 0 and makes_root_store()
    base = BackingAndMount(kernel.open_path(raw(volume)))
    with context:
        store, _done = initialise(kernel, base, raw(volume), is_made_by_root=is_made_by_root, replaces=replaces)
        with store:
            open_own_folder(store).fd.close()


def users_own(base: Path, uid: int) -> Path:
    """Where a user's own store is in a directory."""
    return base / os.fsdecode(user_store_name(uid))


def init_as_of_old(volume: Path) -> None:
    """The store that 0.3.0 made for the caller, a user: it has the name of root's, as what a user plants may have."""
    init(volume)
    users_own(volume, os.geteuid()).rename(volume / ".trashd")
    (volume / ".trashd").chmod(0o755)


def swap(path: Path, kernel: Kernel | None = None, options: SwapOptions = _DEFAULT) -> Swapped:
    return swap_path(kernel or Kernel(), raw(path), options)


def remove(path: Path, kernel: Kernel | None = None, options: SwapOptions = _DEFAULT) -> Swapped:
    return remove_path(kernel or Kernel(), raw(path), options)


def entries(volume: Path) -> list[ListedContainer]:
    return list_all_containers(Kernel(), [raw(volume)])


def restore(
    volume: Path, identifier: str, kernel: Kernel | None = None, inside: bytes | None = None, to: Path | None = None
) -> Restored:
    kernel = kernel or Kernel()
    entry = find_container(kernel, [raw(volume)], identifier)
    return restore_by_id(kernel, [raw(volume)], entry, inside, None if to is None else raw(to))


def reap_now(volume: Path, identifier: str, kernel: Kernel | None = None) -> Reaped:
    kernel = kernel or Kernel()
    entry = find_container(kernel, [raw(volume)], identifier)
    return call_in_folder(kernel, [raw(volume)], entry, lambda folder, _visible: reap(folder, entry.id), Reaped)


ENTRIES = [".lock", "CACHEDIR.TAG", "folders", "new", "u", "volume.json"]
"""What is in a store of root's, sorted."""


def recover_all(volume: Path, kernel: Kernel | None = None) -> list[str]:
    """Recover, adopt drops and stock reserves of all folders; the problems that were kept."""
    return tidy_all_folders(kernel or Kernel(), [raw(volume)])


def problems(volume: Path) -> list[Finding]:
    """What `trashd doctor` says of a volume that has a store."""
    kernel = Kernel()
    with opened(volume) as store:
        found = list(check_store(store))
    for part in call_in_each_folder(discover_stores(kernel, [raw(volume)]), check_folder, list[Finding]):
        found += part
    return list(dict.fromkeys(found))


def assert_silent(volume: Path) -> None:
    """The checker has nothing to say: how every test that touches a store ends."""
    with query_without_fork():
        found = problems(volume)
    assert found == [], found


@contextmanager
def opened(volume: Path) -> Iterator[Store]:
    """The store of a volume: root's, or else the caller's own."""
    kernel = Kernel()
    store = open_store(kernel, BackingAndMount(kernel.open_path(raw(volume))), raw(volume))
    if store is None:
        store = open_own_store(kernel, BackingAndMount(kernel.open_path(raw(volume))), raw(volume))
    assert store is not None, f"no store in {volume}"
    with store:
        yield store


@contextmanager
def own(volume: Path) -> Iterator[UserFolder]:
    with opened(volume) as store, open_own_folder(store) as folder:
        yield folder


def use(volume: Path) -> None:
    """What any command of the caller does first: the folder is found, or made."""
    with own(volume):
        pass


@contextmanager
def tmpfs_store() -> Iterator[Path]:
    """A tmpfs with a store; in the end the checker has nothing to say."""
    with tmpfs_volume() as path:
        init(path)
        yield path
        assert_silent(path)


def tree_of(swapped: Swapped) -> Path:
    """Where a swapped or removed tree lies as an orphan."""
    return Path(os.fsdecode(swapped.store)) / "orphans" / swapped.id / "tree"


def record_of(swapped: Swapped) -> Record:
    return decode_record((tree_of(swapped).parent / "record.json").read_bytes())


class NumberedCall(NamedTuple):
    """One call of a process, and how many it or those that it was forked from had made before."""

    number: int
    name: str


class Counting:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, call: str) -> None:
        self.calls.append(call)


class FailingAt:
    """A hook that fails the n-th call (from 0) once with an errno."""

    def __init__(self, n: int, number: int) -> None:
        self.left = n
        self.number = number
        self.failed: str | None = None

    def __call__(self, call: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.failed = call
            raise OSError(self.number, os.strerror(self.number))


class DyingAt:
    """A hook that ends the process before its n-th call (from 0), as SIGKILL would: nothing is cleaned up."""

    EXIT_CODE = 77

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, _call: str) -> None:
        self.left -= 1
        if self.left < 0:
            end_process(self.EXIT_CODE)


class ActingAt:
    """A hook that does something before the n-th call (from 0); a child forked from us goes on counting."""

    def __init__(self, n: int, act: Callable[[], object]) -> None:
        self.left = n
        self.act = act

    def __call__(self, _call: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.act()


_BY_FD = frozenset(
    {"identify", "fstat", "statx", "statfs", "read", "listxattr", "getxattr", "flock", "lease", "fsync", "syncfs"}
)


class ActingAtName(ActingAt):
    """Acts before the n-th call that goes by names: one by an fd answers the same before and after a rename."""

    def __call__(self, call: str) -> None:
        if call not in _BY_FD:
            super().__call__(call)


def folder_of(volume: Path, uid: int) -> Path:
    """A user's folder with the plain name: where root has it, or else where the user makes it."""
    proven = volume / ".trashd" / "u" / str(uid)
    return proven if proven.exists() else volume / ".trashd" / "new" / str(uid)


def place(volume: Path, identifier: str) -> Path:
    """A container's directory, in whatever state it is."""
    return next(Path(os.fsdecode(entry.path)) for entry in entries(volume) if entry.id == identifier)


def forge(record: Path, **fields: object) -> None:
    """Change what a record.json says, as its owner could with an editor; its inode stays.

    With another `created_ns` and nothing else told it was made at another time, not by a clock that was set since.
    """
    told = {**json.loads(record.read_text()), **fields}
    if "created_ns" in fields and "boot_ns" not in fields:
        told.pop("boot_ns", None)
    record.write_text(json.dumps(told))


class ActingBefore:
    """A hook that does something once, before the n-th call (from 1) of a name."""

    def __init__(self, call: str, action: Callable[[], object], n: int = 1) -> None:
        self.call = call
        self.action = action
        self.left = n

    def __call__(self, call: str) -> None:
        self.left -= call == self.call
        if call == self.call and self.left == 0:
            self.action()


class InTheGap:
    """A hook that does something once, before the first call at which a name is missing."""

    def __init__(self, name: Path, action: Callable[[], object]) -> None:
        self.name = name
        self.action: Callable[[], object] | None = action

    def __call__(self, _call: str) -> None:
        action = self.action
        if action is not None and not self.name.exists():
            self.action = None
            action()


def die() -> None:
    os._exit(DyingAt.EXIT_CODE)


def in_child(body: Callable[[], object]) -> int:
    """The exit code of a forked child that runs `body`: 0 if it returned, 1 if it raised."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(body), 0)[1])


def forked(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def calls_of(body: Callable[[Kernel], object]) -> Sequence[str]:
    hook = Counting()
    body(Kernel(hook))
    return hook.calls


def numbered_calls(body: Callable[[Kernel], object]) -> list[NumberedCall]:
    """The calls that `body` makes, and its children, which go on counting from where they were forked."""
    numbers = itertools.count()
    with open(os.memfd_create("calls"), "w+", buffering=1) as calls_file:
        body(Kernel(lambda call: print(next(numbers), call, file=calls_file)))
        calls_file.seek(0)
        return [NumberedCall(int(number), name) for number, name in map(str.split, calls_file)]
