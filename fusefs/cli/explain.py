"""trashd mount --explain: what makes a mount fast, and why it lacks the rest."""

from __future__ import annotations

import os
from typing import Any

from fusefs.cli import output
from fusefs.core.errors import DaemonGone, NotFound
from fusefs.core.events import show
from fusefs.core.mountstats import Seen
from fusefs.core.names import printable


def explain(path: bytes, *, as_json: bool) -> int:
    """Tell of the mounts that a path belongs to; the exit code. No mount is asked: it may hang.

    Raises  NotFound: there is none, or nothing tells of it; NotPermitted: another user's
    """
    from fusefs.mount.seen import look, mounts_of

    seen = [look(mount) for mount in mounts_of(path)]
    for one in seen:
        if not one.fast_paths:
            raise NotFound(f"the fast paths of {printable(one.point)}", "its daemon is of an older version")
    if as_json:
        for one in seen:
            output.as_json(_object(one))
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in seen))
    return output.exit_code(
        [0 if one.is_running else output.failed(DaemonGone(one.point), as_json=as_json) for one in seen]
    )


def _lines(seen: Seen) -> list[str]:
    rows = [(f"  {show(one.name)}", "on" if one.is_on else "off", show(one.why)) for one in seen.fast_paths]
    return [f"{printable(seen.point)} serves {printable(seen.source)}", *output.aligned(rows)]


def _object(seen: Seen) -> dict[str, Any]:
    return {
        "mount_point": os.fsdecode(seen.point), "source": os.fsdecode(seen.source), "is_running": seen.is_running,
        "fast_paths": {one.name: {"is_on": one.is_on, "why": one.why} for one in seen.fast_paths},
    }  # fmt: skip
