"""`--dry-run` and `trashd check`: a swap's preflight, printed."""

from __future__ import annotations

from collections.abc import Iterable

from fusefs.cli import output
from fusefs.cli.swepttext import counted
from fusefs.core.errors import Refused, TrashdError
from fusefs.core.names import printable
from fusefs.linux.kernel import Kernel
from fusefs.store.preflight import Preflight, preflight


def tell(paths: Iterable[bytes], *, as_json: bool, keep: tuple[str, ...] = ()) -> int:
    """Look at each directory and print it; the exit code of the first thing that stands against a swap."""
    kernel = Kernel()
    code = 0
    for path in paths:
        try:
            found = preflight(kernel, path, keep)
        except TrashdError as error:
            code = code or output.failed(error, as_json=as_json)
            continue
        if as_json:
            output.as_json(found)
        else:
            _tell(found)
        if found.refusals:
            code = code or Refused.exit_code
    return code


def _tell(found: Preflight) -> None:
    print(f"{printable(found.path)}: {'can NOT be swapped' if found.refusals else 'can be swapped'}")
    print(f"  volume   {printable(found.mount_point)} ({found.filesystem})")
    if found.store is not None:
        print(f"  store    {printable(found.store)}{'' if found.exists else ' (would be made)'}")
    how = {"exchange": "one atomic exchange", "two-rename": "two renames: the name is missing for a moment"}
    print(f"  method   {how.get(found.method, 'exchange if the filesystem can (tried when the store is made)')}")
    if found.project:
        print(f"  project  {found.project}: its quota counts the orphan until it is reaped")
    if found.unlike:
        print(f"  unlike   {', '.join(found.unlike)} can't be given to the fresh directory (--unlike accepts it)")
    if found.kept:
        print(f"  keep     {output.names(found.kept)}")
    if found.n_holders:
        print(f"  holders  {counted(found.n_holders, 'process', 'processes')} (trashd holders {printable(found.path)})")
    for message, hint in found.refusals:
        print(f"  against  {message}\n           {hint}")
