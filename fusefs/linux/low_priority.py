"""Being the least important process of a machine.

For unlinking it changes nothing that a neighbour on the disk would feel (measured: it waits for the journal): the
pacer does that. It counts where processors are short, and for what is read.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fusefs.linux.syscalls import ioprio_set

_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3 << 13
_NICEST = 19


def be_idle() -> None:
    """Run only when no other process wants a processor or the disk, with all that is forked from now on."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        ioprio_set(_IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE)
