"""`swap --for-owner`: root empties a user's directory, and the orphan goes to that user's own folder.

Root swaps into root's folder, where only root can put anything in the fresh directory's place. Only then the old
tree goes over, by one rename into a container that a process of its owner staged: of what that user could choose
nothing ever has the name. Until it is handed over, it is root's, which the record says, and is not reaped unasked.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import partial

from fusefs.core.errors import TrashdError, from_os
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, RelPath, is_container_id, join
from fusefs.core.record import Method, Record
from fusefs.core.recovery_rules import StageAction, decide_stage
from fusefs.linux.act_as_user import Ask, user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.as_owner import as_owner, ask_owner, make_folder_of
from fusefs.store.backing_and_mount import with_mounted
from fusefs.store.claim import hold
from fusefs.store.container import HeldContainer, dissolve, move
from fusefs.store.layout import FRESH, TREE, Store, UserFolder
from fusefs.store.locate import Victim
from fusefs.store.pointers import add_pointer
from fusefs.store.stage import SwapOptions, identify_at, stage_as
from fusefs.store.swap import Adopted, Swapped, swap
from fusefs.store.swap_path import into_a_store, own_folder, point_own
from fusefs.store.victim_rename import DirectRename, VisibleMove


def swap_for_owner(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Swap the directory at a path into its owner's folder; needs root.

    Raises  TrashdError as `swap_path`; where its owner does not take it, that is a warning: root keeps it
    """

    def transact(store: Store, victim: Victim, relative: RelPath) -> Swapped:
        uid = victim.stat.st_uid
        visible = DirectRename(kernel, victim.parent.sides, victim.name)
        with own_folder(store) as own:
            if uid == own.uid:
                return swap(own, victim, relative, options, visible)
            return swap(own, victim, relative, options._replace(heir=uid), visible, give)

    return into_a_store(kernel, path, transact, directory=True, point=_point_both, keep=options.keep)


def _point_both(store: Store, victim: Victim, lower: RelPath) -> None:
    point_own(store, victim, lower)  # what we hold when we are killed must be found
    with make_folder_of(store, victim.stat.st_uid) as folder:
        as_owner(folder, lambda _names: add_pointer(folder, lower), None)


def give_what_is_left(folder: UserFolder) -> list[str]:
    """Hand over what a killed `swap --for-owner` left in root's folder, once it is recovered; what failed, in words."""
    if folder.uid or os.geteuid():
        return []
    told: list[str] = []
    for name in folder.list(State.STAGE):
        text = name.decode("ascii", "replace")
        if is_container_id(text):
            try:
                held = hold(folder, State.STAGE, ContainerId(text))
                if isinstance(held, HeldContainer):
                    with held:
                        if _is_to_be_given(held):
                            told += give(held).warnings
            except (FileNotFoundError, TrashdError):
                continue  # recovery has told it
            except OSError as error:
                told.append(from_os(error, folder.path_to(State.STAGE, name)).message())
    return told


def _is_to_be_given(held: HeldContainer) -> bool:
    kernel, record = held.folder.store.kernel, held.record
    if record.heir is None or FRESH in kernel.list(held.fd):
        return False
    return decide_stage(record, identify_at(kernel, held.fd, TREE), None, None) is StageAction.FORWARD


def give(held: HeldContainer) -> Adopted:
    """Let the heir of a container of root's have its tree; if that user does not take it, it is an orphan of root's.

    Raises  OSError; it is where it was then, or the heir's
    """
    heir, kernel = held.record.heir, held.folder.store.kernel
    assert heir is not None
    try:
        with make_folder_of(held.folder.store, heir.uid) as his, kernel.open_beneath(held.fd, TREE) as tree:
            giver = _RenameToOwner(held, his, tree)
            take = partial(_take, his, held.record._replace(heir=None, retention_s=heir.retention_s))
            try:
                ask_owner(heir.uid, take, None, giver.answer)
            except (OSError, TrashdError):
                if giver.taken is None:
                    raise  # else the heir's next command goes on
    except (OSError, TrashdError) as error:
        why = error.message() if isinstance(error, TrashdError) else str(error.strerror)
        move(held, State.ORPHANS)
        told = f"{user_name(heir.uid)} did not get it ({why}): it is root's orphan {held.id}, kept until you ask for it"
        return Adopted(held.id, held.folder.path(), (f"{told}: trashd restore {held.id} --to PATH",))
    assert giver.taken is not None
    dissolve(held)
    return Adopted(giver.taken, his.path())


def _take(his: UserFolder, record: Record, ask: Ask) -> None:
    """Take a tree from root: a container with its durable record first, then root's rename; to be run as its owner.

    Raises  OSError
    """
    name = os.path.basename(record.origin or b"")

    def draft(container: ContainerId, _fresh: Fd | None) -> Record:
        return record._replace(id=container)

    with stage_as(his, name, Method.REMOVED, draft) as staged:
        held = staged.held
        number = int(ask(held.id.encode()))
        if number:
            dissolve(held)
            raise OSError(number, os.strerror(number))
        move(held, State.ORPHANS)
        his.store.kernel.fsync(held.fd)


class _RenameToOwner:
    """Root's side: one rename, from a container of root's into one of the heir's.

    taken  the container that has the tree; None if none has
    """

    def __init__(self, held: HeldContainer, his: UserFolder, tree: Fd) -> None:
        self._held = held
        self._his = his
        self._tree = tree
        self.taken: ContainerId | None = None

    def answer(self, message: bytes) -> bytes:
        """An errno for a container's id; 0 if it has the tree now."""
        try:
            text = message.decode("ascii", "replace")
            if not is_container_id(text):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._give(ContainerId(text))
        except OSError as error:
            return b"%d" % (error.errno or errno.EIO)
        return b"0"

    def _give(self, container: ContainerId) -> None:
        kernel, held, his = self._held.folder.store.kernel, self._held, self._his
        name = container.encode()
        with kernel.open_dir(his.fd, join(State.STAGE.value.encode(), name)) as there:
            st = kernel.fstat(there)
            is_his_alone = st.st_uid == his.uid and not st.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if not is_his_alone or kernel.fstat(self._tree).st_uid != his.uid:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            with with_mounted(kernel, there, his.store.base.mounted, his.way_to(State.STAGE, name)) as inside:
                DirectRename(kernel, inside, TREE).make(VisibleMove.BACK, held)
            if kernel.is_named(self._tree, held.fd, TREE):
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # this filesystem says 0 and does nothing
        self.taken = container
        # Where it came from: btrfs then writes both sides of a plain rename, before its owner's container moves.
        kernel.fsync(held.fd)
