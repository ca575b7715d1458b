"""rm: the name disappears by one rename into the store; files too, on every filesystem, restorable."""

from __future__ import annotations

from fusefs.core.errors import TrashdError
from fusefs.core.names import RelPath
from fusefs.core.record import Method
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.locate import Victim
from fusefs.store.permission_loan import lend
from fusefs.store.stage import SwapOptions, stage
from fusefs.store.swap import Swapped, finish, give_back, undo
from fusefs.store.victim_rename import VisibleRename
from fusefs.store.visible_move import VisibleMove


def remove(
    folder: UserFolder, victim: Victim, relative: RelPath, options: SwapOptions, visible: VisibleRename
) -> Swapped:
    """Move the victim into a user's folder of a store; arguments and errors as for `swap`."""
    kernel = folder.store.kernel
    with stage(folder, victim, relative, Method.REMOVED, options) as staged:
        try:
            lend(staged.held, victim.fd, staged.held.record.lent_mode, visible)
            visible.make(VisibleMove.ASIDE, staged.held)
        except (OSError, TrashdError) as error:
            undo(staged, victim, visible, error)
            raise
        if not kernel.is_named(victim.fd, staged.held.fd, TREE):
            give_back(staged, victim, visible)
        return finish(staged, victim, visible, (), None)
