"""`swap --for-owner`: root empties a user's directory, and the user gets the orphan into his own folder.

The transaction runs in a process of that user, who could otherwise rename containers under root's hands; root
only does the renames at the victim's name, which the user may have no right to.
"""

from __future__ import annotations

from fusefs.core.names import RelPath
from fusefs.linux.kernel import Kernel
from fusefs.store.authority import as_owner, make_folder_of
from fusefs.store.layout import Store
from fusefs.store.locate import Victim
from fusefs.store.pointers import add_pointer
from fusefs.store.stage import Options
from fusefs.store.swap import Swapped, swap
from fusefs.store.verbs import into_a_store
from fusefs.store.visible import Direct


def swap_for_owner(kernel: Kernel, path: bytes, options: Options) -> Swapped:
    """Swap the directory at a path into its owner's folder; needs root.

    Raises  TrashdError as `swap_path`; AuthorityLost if the owner stopped his process
    """

    def transact(store: Store, victim: Victim, relative: RelPath) -> Swapped:
        with make_folder_of(store, victim.stat.st_uid) as folder:
            visible = Direct(kernel, victim.parent_fd, victim.name, victim.mounted_parent)
            return as_owner(
                folder,
                lambda names: swap(folder, victim, relative, options, names or visible),
                Swapped,
                visible,
            )

    return into_a_store(kernel, path, transact, directory=True, point=_point_his, keep=options.keep)


def _point_his(store: Store, victim: Victim, lower: RelPath) -> None:
    with make_folder_of(store, victim.stat.st_uid) as folder:
        as_owner(folder, lambda _names: add_pointer(folder, lower), None)
