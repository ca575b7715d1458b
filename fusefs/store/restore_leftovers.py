"""What is left in a container when its tree is back: what somebody wrote there becomes an orphan of its own."""

from __future__ import annotations

import errno

from fusefs.core.identity import Likelihood, compare
from fusefs.core.names import ContainerId, Name, RelPath
from fusefs.store.adopt import take_in
from fusefs.store.container import HeldContainer, dissolve
from fusefs.store.gate import late_name
from fusefs.store.layout import FRESH, HOISTED, LATE_PREFIX, TREE
from fusefs.store.stage import identify_at

RESCUED_RETENTION_S = 7 * 24 * 3600
"""How long what a restore found in its way can be restored: it was not asked for, and need not stay for ever."""


def retire_restored(held: HeldContainer) -> ContainerId | None:
    """Remove a container whose tree is back at its name; what was written into the fresh directory is kept.

    Returns  the id of the orphan that holds it, if there is any
    """
    rescued = rescue_fresh(held, TREE) or rescue_fresh(held, FRESH)
    rescue_hoisted(held)
    dissolve(held)
    return rescued


def rescue_fresh(held: HeldContainer, name: Name) -> ContainerId | None:
    """Remove a fresh directory that came back into a container; if anything is in it, it becomes an orphan.

    That orphan has a week: it was not asked for, and perhaps its user does not know of it yet.
    """
    note = f"written into the fresh directory before {held.id} was restored"
    return keep_as_orphan(held, name, held.record.origin, note, held.record.lent_fresh)


def rescue_hoisted(held: HeldContainer) -> ContainerId | None:
    """Make an orphan of the directories that a reaper had moved up from deep inside: where they were is unknown."""
    note = f"directories from deep inside {held.id}, moved up when it was half-reaped"
    return keep_as_orphan(held, HOISTED, None, note)


def settle_late(held: HeldContainer) -> None:
    """Sort out what came into a container late, or a second time, off local filesystems: it may be somebody's.

    The victim is its tree, whatever has that name; all else becomes an orphan of its own. Raises  OSError
    """
    kernel, victim = held.folder.store.kernel, held.record.victim
    late = [Name(name) for name in kernel.list_anew(held.fd) if name.startswith(LATE_PREFIX)]
    for name in late:
        tree, came = identify_at(kernel, held.fd, TREE), identify_at(kernel, held.fd, name)
        if compare(came, victim) is Likelihood.SAME and compare(tree, victim) is not Likelihood.SAME:
            aside = late_name()
            kernel.rename_free(held.fd, TREE, held.fd, aside)
            kernel.rename_free(held.fd, name, held.fd, TREE)
            name = aside
        note = f"it came to {held.id} late, as a call that a server did once more"
        origin = held.record.origin
        take_in(held.folder, held.fd, name, origin=origin, retention_s=RESCUED_RETENTION_S, note=note)


def keep_hoisted(held: HeldContainer) -> list[str]:
    """Keep what a reaper had moved up from deep inside; what is told of it, if there was any. Raises  OSError"""
    deep = rescue_hoisted(held)
    told = f"what the reaper had moved up from deep down lost its structure; it is kept as {deep}"
    return [] if deep is None else [told]


def keep_as_orphan(
    held: HeldContainer, name: Name, origin: RelPath | None, note: str, lent: int | None = None
) -> ContainerId | None:
    """Remove a directory that should be empty; if anything is in it, it becomes an orphan that is kept for a week."""
    try:
        held.folder.store.kernel.rmdir(held.fd, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return None
    return take_in(held.folder, held.fd, name, origin=origin, retention_s=RESCUED_RETENTION_S, note=note, lent=lent)
