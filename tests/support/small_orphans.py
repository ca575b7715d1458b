"""Victims and orphans with little in them, one or very many, and the commands on them."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.core.names import Name, RelPath
from fusefs.core.record import Method, Record
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.store import layout
from fusefs.store.container import HeldContainer, create_record, make_container_directory, move_to_state, new_id
from fusefs.store.stage import SwapOptions, identify_at
from fusefs.store.swap import Swapped
from tests.support.make_trees import Dir, Spec, Symlink, make_tree
from tests.support.other_users import as_user
from tests.support.store_verbs import entries, own, swap

OTHER = 12001
"""A user that the system does not know."""
TREE: Spec = {"a": "1", "sub": {"b": "2", "link": Symlink("../a")}}
EXPIRED = SwapOptions(retention_s=0)
PINNED = SwapOptions(retention_s=None)


def victim_in(volume: Path, name: str = "job") -> Path:
    return make_tree(volume / name, TREE)


def orphan_in(volume: Path, name: str = "job", options: SwapOptions | None = None, spec: Spec = TREE) -> Swapped:
    return swap(make_tree(volume / name, spec), options=options or SwapOptions())


def orphan_of(uid: int, volume: Path, options: SwapOptions) -> Swapped:
    make_tree(volume / f"home-{uid}", Dir({"job": Dir({"a": "1"}, owner=(uid, uid))}, owner=(uid, uid)))
    return as_user(uid, partial(swap, volume / f"home-{uid}/job", None, options))


def command(volume: Path, verb: str, *arguments: str) -> int:
    """The exit code of a command that is told the volume."""
    return run([verb, *arguments, "--volume", str(volume)])


def ids(volume: Path) -> set[str]:
    return {entry.id for entry in entries(volume)}


def many_orphans(volume: Path, n: int, retention_s: int | None = 0) -> None:
    """So many orphans of the caller's, each an empty directory that was swapped or so its record says."""
    with own(volume) as folder:
        kernel = folder.store.kernel
        host, boot = host_id(), boot_id()
        for number in range(n):
            name = Name(b"job%d" % number)
            container = new_id(kernel, name)
            with ExitStack() as owned:
                fd = owned.enter_context(make_container_directory(folder, State.STAGE, container))
                kernel.mkdir(fd, layout.TREE)
                record = Record(
                    id=container,
                    volume=folder.store.volume.id,
                    method=Method.REMOVED,
                    origin=RelPath(name),
                    parent=None,
                    fresh=None,
                    victim=identify_at(kernel, fd, layout.TREE),
                    host=host,
                    boot=boot,
                    created_ns=kernel.now_ns(),
                    retention_s=retention_s,
                )
                owned.enter_context(create_record(folder.store, fd, record))
                move_to_state(HeldContainer(folder, container, State.STAGE, fd, record, owned), State.ORPHANS)
