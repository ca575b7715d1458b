"""The fast path of `trashd swap DIR…` without options, which needs neither click nor msgspec."""

from __future__ import annotations

import os

from fusefs.cli.output import exit_code, failed, tell_swapped
from fusefs.core.errors import Exit, TrashdError, Unsettled
from fusefs.core.lean import TYPE_CHECKING, Callable, NamedTuple
from fusefs.linux.invocation import invocation
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped
from fusefs.store.swap_path import swap_path

if TYPE_CHECKING:
    from collections.abc import Iterable

SwapVerb = Callable[[Kernel, bytes, SwapOptions], Swapped]


class SwapBatch(NamedTuple):
    """What to do with many paths.

    kept   whether they can be restored afterwards; if not, no command for it is told
    after  called with each result, to go on with it (look for holders, reap at once); its exit code
    """

    paths: Iterable[bytes]
    options: SwapOptions = SwapOptions()
    verb: SwapVerb = swap_path
    json_lines: bool = False
    kept: bool = True
    after: Callable[[Swapped], int] = lambda _swapped: 0


def plain_swap(arguments: list[str]) -> SwapBatch | None:
    """The batch that a command line without options asks for; None if it is anything else."""
    command, *paths = arguments or [""]
    if command != "swap" or not paths or any(path.startswith("-") or not path for path in paths):
        return None
    return SwapBatch([os.fsencode(path) for path in paths])


def swap_all(batch: SwapBatch) -> int:
    """Swap or remove one path after the other, going on after failures; the exit code.

    A result that carries warnings counts as Unsettled. A signal that stopped what comes after ends it all.
    """
    kernel = Kernel()
    options = batch.options._replace(invocation=invocation())
    codes = []
    for path in batch.paths:
        try:
            swapped = batch.verb(kernel, path, options)
            tell_swapped(swapped, json_lines=batch.json_lines, kept=batch.kept)
            code = batch.after(swapped)
            if code > Exit.SIGNALLED:
                return code
            codes.append(code or (Unsettled.exit_code if swapped.warnings else 0))
        except TrashdError as error:
            codes.append(failed(error, as_json=batch.json_lines))
    return exit_code(codes)
