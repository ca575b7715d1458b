"""How much space a tree takes, and how much of it a removal frees."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.record import TreeSize

STAT_BLOCK_BYTES = 512
"""What st_blocks counts in, whatever the filesystem's own blocks are."""
INLINE_MAX_BYTES = 2048
"""btrfs keeps a file up to this size (max_inline) in its metadata, and says of it that it has a block."""


class Survey(NamedTuple):
    """What a walk found in a container.

    n_entries     as a reaper counts them
    n_bytes       the blocks of all inodes, each inode once
    linked_bytes  of these: they stay, as hard links outside keep them
    shared_bytes  of these: at most as many stay, as snapshots or reflinks share them; 0 if not asked for. Those
                  that only the tree's own files share with each other are counted too: they can't be told apart.
    n_failed      what could not be looked at: entries, or directories with all that is in them
    is_at_least   there are more hard links than can be remembered: of those beyond, each name counts as its part of
                  the inode, and none as one that stays
    n_spare_names  of the entries: names that take no inode with them, as there are others, here or outside
    """

    n_entries: int
    n_bytes: int
    linked_bytes: int
    shared_bytes: int
    n_failed: int
    is_at_least: bool
    n_spare_names: int = 0

    def goes(self) -> tuple[int, int]:
        """The inodes and the bytes that go with it."""
        return self.n_entries - self.n_spare_names, max(self.n_bytes - self.linked_bytes - self.shared_bytes, 0)


class AskedSize(NamedTuple):
    """What a tree takes, as far as that could be found out.

    size        None: nothing
    n_failed    what could not be looked at
    is_stopped  it was not counted to the end
    """

    size: TreeSize | None
    n_failed: int = 0
    is_stopped: bool = False


def taken_bytes(size: int, n_blocks: int, block_bytes: int, inline_max_bytes: int) -> int:
    """The space that a file takes, by its stat.

    n_blocks          of `STAT_BLOCK_BYTES`
    block_bytes       the filesystem's own
    inline_max_bytes  files up to this size may lie in the metadata; 0 where all have blocks of their own
    """
    taken = n_blocks * STAT_BLOCK_BYTES
    is_inline = 0 < size <= inline_max_bytes and taken <= block_bytes
    return size if is_inline else taken
