"""What a name or a nodeid means."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.core.attributes import Attributes
from fusefs.core.inodes import ROOTS, NodeId
from fusefs.mount.memory import Proof

NOTHING = Attributes(*[0] * len(Attributes._fields))
"""Of a name that nothing has."""


class Known(NamedTuple):
    """What a name or a nodeid means now.

    nodeid     0: nothing has this name
    timeout_s  for how long the kernel may believe it; 0: not at all
    proof      what tells, when the answer goes out, whether it is still so
    is_steady  False: the attributes change without a message, and may not be believed; the name may
    is_fickle  True: the name may not be believed; what a directory is may be, for as long as one system call takes
    """

    nodeid: NodeId
    attributes: Attributes
    timeout_s: float
    proof: Proof | None = None
    is_steady: bool = True
    is_fickle: bool = False


def shown_number(known: Known) -> int:
    """The inode number that people see: the nodeid, as pyfuse3 has one field for both."""
    return known.attributes.ino if known.nodeid in ROOTS else known.nodeid
