"""Processes with a right that their ids alone don't give them: a capability, or a user namespace of their own."""

from __future__ import annotations

import os
from collections.abc import Callable

from fusefs.linux.capabilities import Capability
from tests.support.people import HE, Person

FIRST, N_MAPPED = 720_000, 1000


def in_child(act: Callable[[], object], become: Callable[[], None]) -> int:
    """The errno of an act by a process that has become somebody before."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            become()
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def keep_only(capability: Capability) -> None:
    Person(HE, HE, capability=capability).be()


def as_root_in_there() -> None:
    """Root of a user namespace that knows a thousand users, as one of rootless containers."""
    Person(FIRST, FIRST, maps=((0, FIRST, N_MAPPED),)).be()
