"""A sweep from the request to what it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import assert_never

from fusefs.core.errors import from_os
from fusefs.core.swept import Swept
from fusefs.linux.kernel import Kernel
from fusefs.sweep.choosing import Dirs
from fusefs.sweep.delete import Deleting
from fusefs.sweep.engine import walk
from fusefs.sweep.request import (
    Act,
    Action,
    Identified,
    Request,
    ToCount,
    ToDelete,
    ToMove,
    Top,
    ToPrint,
    ToTrash,
    Wishes,
)
from fusefs.sweep.tell import Counting, Telling, Untellable
from fusefs.sweep.top import open_top

NOTHING_SPECIAL = Wishes()


def run(kernel: Kernel, request: Request, wishes: Wishes = NOTHING_SPECIAL) -> Swept:
    """Sweep.

    Raises  TrashdError, before anything is touched; what its `act.tell` raises. An entry's failure is in the result
    """
    with ExitStack() as owned:
        top = owned.enter_context(open_top(kernel, request.directory, request.inode))
        action = owned.enter_context(_open(kernel, top, request))
        try:
            walked = walk(kernel, top, request, request.wraps(action), _dirs(request.act), wishes)
        except Untellable as untellable:
            raise untellable.error from None
        except OSError as error:
            raise from_os(error, top.path) from error
        ended = action.end(walked.sums)
        swept = Swept(top.path, **walked._asdict(), **ended._asdict(), looks=walked.sums.n_bytes > 0)
        if not isinstance(action, Counting):
            return swept
        sums = walked.sums._replace(n_bytes=action.n_bytes)
        return swept._replace(sums=sums, looks=True, largest=action.largest(), oldest=action.oldest())


@contextmanager
def _open(kernel: Kernel, top: Top, request: Request) -> Iterator[Action]:
    """The action of a request; what it needs more than a walk is imported for it alone."""
    with ExitStack() as owned:
        match request.act:
            case ToTrash() as to:
                from fusefs.sweep.trash import open_trash

                yield owned.enter_context(open_trash(kernel, top, to))
            case ToDelete():
                yield Deleting()
            case ToMove() as to:
                from fusefs.sweep.move import open_move

                yield owned.enter_context(open_move(kernel, top, to))
            case ToPrint() as to:
                yield Telling(to)
            case ToCount(instead):
                avoided: frozenset[Identified] = frozenset()
                if isinstance(instead, ToMove):
                    from fusefs.sweep.move import avoided_by

                    avoided = owned.enter_context(avoided_by(kernel, top, instead))
                yield Counting(request.selection, avoided, takes_dirs=_dirs(instead) is Dirs.WHOLE)
            case _:
                assert_never(request.act)


def _dirs(act: Act | None) -> Dirs:
    """What becomes of directories that are chosen."""
    match act:
        case ToTrash() | ToMove():
            return Dirs.WHOLE
        case ToDelete(recursive):
            return Dirs.STRIPPED if recursive else Dirs.LAST
        case ToPrint() | None:
            return Dirs.FIRST
        case ToCount(instead):
            # What goes with a directory is no match itself.
            return Dirs.FIRST if _dirs(instead) in (Dirs.FIRST, Dirs.LAST) else Dirs.WHOLE
        case _:
            assert_never(act)
