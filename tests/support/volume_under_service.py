"""What tests do to a volume that a running service serves."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusefs.store.stage import SwapOptions
from tests.support.many_files import fill
from tests.support.service_process import QUICK, Service
from tests.support.small_orphans import EXPIRED, orphan_in
from tests.support.store_verbs import forge, place, swap, tree_of

SLOW = QUICK + 'max_rate = "1000/s"\n'
"""What is large takes its time, on the fastest disk too."""


def outwait(running: Service, volume: Path) -> None:
    """Wait until all that is due by now has had its turn: it comes before this one."""
    marker = tree_of(orphan_in(volume, f"marker-{time.monotonic_ns()}", EXPIRED)).parent
    claimed = marker.parents[1] / "reaping" / marker.name
    running.until(lambda: not marker.exists() and not claimed.exists())


def aged(volume: Path, name: str, age_s: int, size_mb: int = 0, options: SwapOptions | None = None) -> str:
    """The id of an orphan that is so old, by its record, and so large."""
    (volume / name).mkdir()
    with (volume / name / "file").open("wb") as file:
        if size_mb:
            os.posix_fallocate(file.fileno(), 0, size_mb << 20)
    identifier = swap(volume / name, options=options or SwapOptions()).id
    record = place(volume, identifier) / "record.json"
    forge(record, created_ns=json.loads(record.read_text())["created_ns"] - age_s * 10**9)
    return identifier


def begin_large(running: Service, volume: Path, n_files: int = 20_000) -> str:
    """The id of an orphan that is being reaped, and with `SLOW` keeps the service busy for a while."""
    fill(volume / "large", n_files)
    identifier = swap(volume / "large", options=EXPIRED).id
    running.until(lambda: is_begun(volume, identifier, n_files))
    return identifier


def is_begun(volume: Path, identifier: str, n_files: int) -> bool:
    if any(volume.glob(f".trashd/u/*/orphans/{identifier}")):
        return False
    for tree in volume.glob(f".trashd/u/*/reaping/{identifier}/tree"):
        with suppress(FileNotFoundError):
            return len(os.listdir(tree)) < n_files
    return True


def objects_in(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one from each line; a line that is being written is none yet."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events_in(base: Path) -> list[dict[str, Any]]:
    """All that the audit log tells."""
    return objects_in(base / "audit")


def audited(base: Path) -> list[dict[str, Any]]:
    """What the audit log tells of orphans."""
    return [event for event in events_in(base) if event["id"]]


def next_due_s(running: Service, volume: Path) -> float:
    """Seconds until something is to be done there, as the service tells it; infinity for never."""
    due_ns = running.volume(volume).next_due_ns
    return float("inf") if due_ns is None else (due_ns - time.time_ns()) / 1e9
