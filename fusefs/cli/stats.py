"""trashd stats."""

from __future__ import annotations

import os
from typing import Any

import click

from fusefs.cli import output, statstext
from fusefs.cli.options import PathBytes, json_option
from fusefs.core.errors import DaemonGone, NotFound, TrashdError, UsageError, from_os
from fusefs.core.mountstats import Seen


@click.command("stats", short_help="Show what a mount does, and how fast.")
@click.argument("mount_point", type=PathBytes(), required=False, metavar="[MNT]")
@click.option("--prometheus", is_flag=True, help="Print metrics in Prometheus' text format.")
@json_option
def command(mount_point: bytes | None, prometheus: bool, as_json: bool) -> int:
    """Show what was asked of the mount MNT and how long the answers took, what its daemon remembers, and what it holds.

    Without MNT: of each mount of trashd that is seen here. It reads a file that the daemon keeps, and never asks the
    mount, so it is quick even if that hangs. Everybody may look at root's mounts. Counters begin anew with the daemon.
    Exit code 5: nothing is mounted there, or the daemon is gone; its last numbers are shown then.

    \b
    Examples:
      trashd stats /scratch
      trashd stats --json | jq '.operations.lookup.p99_ns'
      trashd stats --prometheus
    """
    if prometheus and as_json:
        raise UsageError("--prometheus with --json", "it is one or the other")
    seen, errors = _look(mount_point)
    if prometheus:
        from fusefs.mount.metrics import prometheus_text

        print(prometheus_text(seen), end="")
    elif as_json:
        for one in seen:
            output.as_json(_object(one))
    else:
        print("\n\n".join("\n".join(statstext.lines(one)) for one in seen))
    gone: list[TrashdError] = [DaemonGone(one.point) for one in seen if not one.is_running]
    codes = [output.failed(error, as_json=as_json) for error in errors + gone]
    return output.exit_code(codes + [0] * (len(seen) - len(gone)))


def _look(mount_point: bytes | None) -> tuple[list[Seen], list[TrashdError]]:
    """What there is to show, and of which mounts nothing is known.

    Raises  what keeps all of it from being shown
    """
    from fusefs.mount.seen import all_mounts, look, mount_at

    mounts = all_mounts() if mount_point is None else [mount_at(mount_point)]
    if not mounts:
        raise NotFound("a mount of trashd", "make one: trashd mount SRC MNT")
    seen: list[Seen] = []
    errors: list[TrashdError] = []
    for mount in mounts:
        try:
            seen.append(look(mount))
        except TrashdError as error:
            errors.append(error)
        except OSError as error:
            errors.append(from_os(error, mount.point))
    if not seen and len(errors) == 1:
        raise errors[0]
    return seen, errors


def _object(seen: Seen) -> dict[str, Any]:
    """A mount for programs: what the file has, and what follows from it."""
    point, source, stats, is_running, fast_paths = seen
    remembered = {
        name: {**one._asdict(), "hit_rate": one.rate()}
        for name, one in stats.remembered.items()
    }  # fmt: skip
    operations = {
        name: {
            "n": one.n(), "n_failed": one.n_failed, "mean_ns": one.mean_ns(), "p50_ns": one.percentile_ns(0.5),
            "p99_ns": one.percentile_ns(0.99), "max_ns": one.max_ns, "total_ns": one.total_ns, "counts": one.counts,
        }
        for name, one in stats.operations.items()
    }  # fmt: skip
    return {
        "mount_point": os.fsdecode(point), "source": os.fsdecode(source), "is_running": is_running,
        "version": stats.table.version, "pid": stats.table.pid, "started_ns": stats.table.started_ns,
        "updated_ns": stats.updated_ns or None, "gauges": stats.gauges, "remembered": remembered,
        "bounds_ns": stats.table.bounds_ns, "operations": operations,
        "fast_paths": {one.name: one.is_on for one in fast_paths},
    }  # fmt: skip
