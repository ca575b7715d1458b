"""`--dry-run` and `trashd check`: a swap's preflight, printed."""

from __future__ import annotations

from collections.abc import Iterable

from fusefs.cli import output
from fusefs.cli.swepttext import counted
from fusefs.core.errors import TrashdError
from fusefs.core.names import printable
from fusefs.linux.kernel import Kernel
from fusefs.store.preflight import Preflight, preflight


def tell(paths: Iterable[bytes], *, as_json: bool, keep: tuple[str, ...] = (), unlike: bool = False) -> int:
    """Look at each directory and print it; the exit code that a swap of them would have."""
    kernel = Kernel()
    codes = []
    for path in paths:
        try:
            found = preflight(kernel, path, keep, unlike=unlike)
        except TrashdError as error:
            codes.append(output.failed(error, as_json=as_json))
            continue
        if as_json:
            output.as_json(found)
        else:
            _tell(found)
        codes.append(found.exit_code)
    return output.exit_code(codes)


def _tell(found: Preflight) -> None:
    print(f"{printable(found.path)}: {'can NOT be swapped' if found.refusals else 'can be swapped'}")
    print(f"  volume   {printable(found.mount_point)} ({found.filesystem})")
    if found.store is not None:
        print(f"  store    {printable(found.store)}{'' if found.exists else ' (would be made)'}")
    how = {"exchange": "one atomic exchange", "two-rename": "two renames: the name is missing for a moment"}
    if found.method in how:
        print(f"  method   {how[found.method]}")
    if found.project:
        print(f"  project  {found.project}: its quota counts the orphan until it is reaped")
    if found.unlike:
        print(f"  unlike   the fresh directory would have {', '.join(found.unlike)}")
    if found.kept:
        print(f"  keep     {output.names(found.kept)}")
    if found.n_holders:
        print(f"  holders  {counted(found.n_holders, 'process', 'processes')} (trashd holders {printable(found.path)})")
    for message, hint in found.refusals:
        print(f"  against  {message}\n           {hint}")
