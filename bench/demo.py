"""`make demo`: the main job on real input, two hundred thousand files, in less than two minutes.

As root on a fresh ext4 in a loop device, elsewhere in a plain directory. Whatever ends it, nothing stays behind.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.support import TRASHD, compiled, make_chain, make_flat, make_tree, time_command, volume
from tests.support.machine_capabilities import why_missing
from tests.support.make_trees import remove_tree_hard
from tests.support.mount_namespaces import see_own_mounts_only

_console = Console(highlight=False, soft_wrap=True)


class Shape(NamedTuple):
    """One victim: how it is made, and of how many files."""

    name: str
    n_files: int
    make: Callable[[Path, int], int]


SHAPES = (
    Shape("tree", 120_000, make_tree),
    Shape("flat", 70_000, make_flat),
    Shape("chain", 10_000, make_chain),
)
N_MOUNTED = 5_000
GLANCE_S = 0.1
CONFIG = """\
audit = "{base}/audit.log"
grace = "0s"        # what expired before the service came goes at once

[defaults]
retention = "0s"    # on a real machine a day, or as long as its disks allow
minimum_age = "0s"
"""


class Timed(NamedTuple):
    """What one victim took, in seconds."""

    shape: Shape
    rm_s: float
    swap_s: float


@contextlib.contextmanager
def stage() -> Iterator[Path]:
    """A fresh ext4, or a plain directory where this machine or user can't have one."""
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(volume("ext4"))
            _console.print(f"a fresh ext4 in a loop device, at {path}")
        except OSError as error:
            path = stack.enter_context(volume("plain"))
            stack.callback(remove_tree_hard, path / "work")
            _console.print(f"no loop device here ({error}); a plain directory, {path}")
        yield path


def show(*arguments: str | Path) -> None:
    """Run a command of trashd as a person would see it.

    Raises  CalledProcessError if it fails
    """
    _console.print(f"\n[bold]$ trashd {' '.join(map(str, arguments))}[/bold]")
    subprocess.run([TRASHD, *arguments], check=True)


def make_all(work: Path) -> None:
    """Every victim and its twin."""
    for shape in SHAPES:
        for name in (shape.name, f"{shape.name}.twin"):
            began = time.monotonic()
            shape.make(work / name, shape.n_files)
            took = time.monotonic() - began
            _console.print(f"  {name:<11} {shape.n_files:>8,} files made in {took:.1f} s")


def compete(work: Path) -> list[Timed]:
    """trashd swap against rm -rf on a twin, shape by shape."""
    timed = []
    for shape in SHAPES:
        rm_s = time_command(["rm", "-rf", work / f"{shape.name}.twin"])
        began = time.monotonic()
        show("swap", work / shape.name)
        timed.append(Timed(shape, rm_s, time.monotonic() - began))
    return timed


def table(timed: list[Timed]) -> Table:
    """The figures."""
    shown = Table(title="how long until the directory is empty")
    for head in ("victim", "files", "rm -rf", "trashd swap", "times faster"):
        shown.add_column(head, justify="left" if head == "victim" else "right")
    for shape, rm_s, swap_s in timed:
        cells = (f"{shape.n_files:,}", f"{rm_s * 1e3:,.0f} ms", f"{swap_s * 1e3:,.0f} ms", f"{rm_s / swap_s:,.0f}")
        shown.add_row(shape.name, *cells)
    return shown


def restore_one(root: Path, work: Path) -> None:
    """Take the flat directory back, and look that all of it came."""
    listed = subprocess.run([TRASHD, "list", "--json", "--volume", root], stdout=subprocess.PIPE, check=True)
    entries = [json.loads(line) for line in listed.stdout.splitlines()]
    (flat,) = [entry for entry in entries if entry["origin"] == str(work / "flat")]
    show("restore", "--volume", root, flat["id"])
    n_files = sum(1 for _ in (work / "flat").iterdir())
    _console.print(f"  {n_files:,} files are back")
    if n_files != SHAPES[1].n_files:
        raise RuntimeError(f"{SHAPES[1].n_files:,} files went, {n_files:,} came back")


@contextlib.contextmanager
def mounted(root: Path) -> Iterator[Path]:
    """The volume through the mount; elsewhere, so that both can be seen."""
    with tempfile.TemporaryDirectory(prefix="trashd-demo-") as path:
        show("mount", root, path)
        try:
            yield Path(path)
        finally:
            subprocess.run([TRASHD, "umount", "--lazy", path], check=True)


def through_the_mount(root: Path) -> None:
    """A swap under the eyes of a client of the mount, and one by a user without trashd."""
    with mounted(root) as path:
        job, other = path / "job", path / "other"
        make_flat(job, N_MOUNTED)
        make_flat(other, N_MOUNTED)
        n_before = len(os.listdir(job))
        show("swap", job)
        _console.print(f"  a client of the mount saw {n_before:,} files, and sees {len(os.listdir(job)):,} now")
        drop = path / ".trashd" / "drop"
        _console.print(f"\n[bold]$ mv {other} {drop}/[/bold]")
        subprocess.run(["mv", other, f"{drop}/"], check=True)
        show("list", "--volume", path)


@contextlib.contextmanager
def reaper(root: Path) -> Iterator[dict[str, str]]:
    """The service at work on the volume, beside one that this machine may have; what leads `trashd status` to it."""
    with tempfile.TemporaryDirectory(prefix="trashd-demo-") as base:
        Path(base, "config.toml").write_text(CONFIG.format(base=base), encoding="utf-8")
        places = {"RUNTIME_DIRECTORY": f"{base}/run", "STATE_DIRECTORY": f"{base}/state"}
        command = [TRASHD, "service", "run", "--config", base, "--volume", str(root)]
        _console.print(
            f"\n[bold]$ trashd service run --volume {root}[/bold]  (systemd does that: systemctl start trashd-reaper)"
        )
        with subprocess.Popen(command, env=os.environ | places, stderr=subprocess.DEVNULL) as process:
            try:
                yield places
            finally:
                process.terminate()


def serve(root: Path) -> None:
    """Let the service reap everything, and look at its status meanwhile."""
    folder = root / ".trashd" / "u" / str(os.geteuid())
    is_live = sys.stdout.isatty()
    with reaper(root) as places:
        command = [TRASHD, "status", "--watch"] if is_live else [TRASHD, "status"]
        _console.print(f"\n[bold]$ trashd {' '.join(command[1:])}[/bold]")
        while not (Path(places["RUNTIME_DIRECTORY"]) / "status.json").exists():
            time.sleep(GLANCE_S)
        time.sleep(0 if is_live else 2)  # one look has to be in the middle
        with subprocess.Popen(command, env=os.environ | places) as shown:
            while any(any((folder / state).iterdir()) for state in ("orphans", "reaping")):
                time.sleep(GLANCE_S)
            time.sleep(1.5)  # for the last figures
            if is_live:
                shown.send_signal(signal.SIGINT)
        subprocess.run([TRASHD, "status"], env=os.environ | places, check=True)


def run_demo() -> None:
    """Run the whole demo."""
    with compiled(), stage() as root:
        work = root / "work"
        work.mkdir()
        make_all(work)
        show("init", root)
        timed = compete(work)
        show("list", "--volume", root)
        restore_one(root, work)
        if missing := why_missing("root") or why_missing("fuse"):
            _console.print(f"\nno mount here ({missing})")
        else:
            through_the_mount(root)
        serve(root)
        show("doctor", root)
        _console.print()
        _console.print(table(timed))
        _console.print("the space comes back while the reaper works, not before: that is the price of the speed")


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run it; Ctrl-C and SIGTERM end it as cleanly as its own end does."""
    signal.signal(signal.SIGTERM, _stop)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container may forbid it; then this machine remembers the demo's store
            see_own_mounts_only()
    try:
        run_demo()
    except KeyboardInterrupt:
        _console.print("\ninterrupted: everything was cleaned up")
        sys.exit(130)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        _console.print(f"\nthe demo failed: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
