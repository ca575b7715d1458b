"""`trashd status`: what it tells of services that live, rest, hang and are dead, and that it is quick and fits."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from fusefs.cli.status_watch import StatusView
from fusefs.core.service_status import (
    CurrentReap,
    ObservedStatus,
    PassedOver,
    SeenNode,
    Status,
    StatusFault,
    VolumePhase,
    VolumeStatus,
)
from fusefs.linux import file_locks
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, make_dir
from fusefs.service.state_files import write_status
from tests.support.golden_files import compare
from tests.support.other_users import passable_directory, run_as
from tests.support.real_filesystems import bind_mount
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, trashd

SOMEBODY = 54321
EVIL = "\x1b[2J\x07\u202e"
NOW_NS = time.time_ns()
VOLUME = VolumeStatus(
    path="/scratch", filesystem="ext4", phase=VolumePhase.YIELDING, why="others wait 31 % of the time for the disk",
    n_users=3, n_orphans=12, n_due=4, n_quarantined=1, entries_per_s=12345.0, bytes_per_s=float(120 << 20),
    tempo_entries_per_s=20_000, io=0.31, memory=0.0, cpu=0.05, probe_ms=1.23, unlink_us=14.2, eta_s=720.0,
    oldest_overdue_s=7300.0, free_bytes=412 << 30, total_bytes=1800 << 30, free_inodes=98, total_inodes=100,
    free_trend_bytes_per_s=400_000.0, removed_entries=1_234_567, freed_bytes=45 << 30, n_reaped=12,
    current=(CurrentReap(1000, "2fe7e4cb8ba8", 5),),
    faults=(StatusFault(NOW_NS, "EIO at a claim"), StatusFault(NOW_NS, "EIO again")),
)  # fmt: skip

NODES = (
    SeenNode(
        host="alpha", boot_id="b", is_here=True, is_alive=True, unchanged_s=0.0, version="0.1", phase="yielding",
        probe_ms=1.23,
    ),
    SeenNode(
        host="beta", boot_id="c", is_here=False, is_alive=True, unchanged_s=12.0, version="0.1", phase="idle",
        probe_ms=None,
    ),
    SeenNode(
        host="gamma\x1b", boot_id="d", is_here=False, is_alive=False, unchanged_s=7500.0, version="", phase="",
        probe_ms=None,
    ),
    SeenNode(
        host="delta", boot_id="e", is_here=False, is_alive=None, unchanged_s=3.0, version="0.1", phase="idle",
        probe_ms=None,
    ),
)  # fmt: skip


def status_of(*volumes: VolumeStatus, pid: int = os.getpid(), age_s: float = 0) -> Status:
    return Status(
        version="0.1", pid=pid, boot_id="b", started_ns=NOW_NS - 10**13, updated_ns=time.time_ns() - int(age_s * 1e9),
        volumes=volumes,
    )  # fmt: skip


@pytest.fixture
def directory() -> Iterator[bytes]:
    """The directory of root's service, empty."""
    with passable_directory(0o711) as home, bind_mount(home, Path("/run/trashd")):
        yield make_dir(SYSTEM_RUNTIME)


@pytest.fixture
def alive(directory: bytes) -> Iterator[bytes]:
    """The directory of root's service, empty but for its lock: we are the service."""
    lock = file_locks.take_lock(directory)
    assert isinstance(lock, Fd)
    with lock:
        yield directory


pytestmark = pytest.mark.needs("root")


@pytest.mark.quick("status")
def test_a_service_that_serves_is_told_with_all_its_volumes(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME, VolumeStatus(path="/idle")))
    done = trashd("status")
    assert done.code == 0
    assert done.err == ""
    for words in (
        "/scratch (ext4)", "yielding: others wait 31 %", "12 orphans, 3 users, 4 expired (oldest 2h1m ago)",
        "1 in quarantine", "12,345 entries/s, 120 MiB/s, max 20,000/s", "about 12m", "io 31%, memory 0%, cpu 5%",
        "write 1.23 ms, unlink 14.2 µs", "412 GiB of 1.76 TiB (23%) and 98% of inodes free, +1.34 GiB/h",
        "12 orphans, 1,234,567 entries, 45.0 GiB", "EIO again", "2fe7e4cb8ba8 of uid 1000 (5 removed)", "/idle\n  idle",
    ):  # fmt: skip
        assert words in done.out


def test_the_nodes_of_a_shared_volume_are_told_as_the_service_has_seen_them(alive: bytes) -> None:
    write_status(alive, status_of(msgspec.structs.replace(VOLUME, nodes=NODES)))
    told = "alpha (here), beta (idle, heartbeat 12s ago), gamma\\x1b (no heartbeat for 2h5m), delta (no heartbeat yet)"
    assert told in trashd("status").out


def test_a_dead_service_is_5_and_its_last_words_are_told_as_such(directory: bytes) -> None:
    write_status(directory, status_of(VOLUME, age_s=3661))
    done = trashd("status")
    assert done.code == 5
    assert "not running; its last status is 1h1m old" in done.out
    assert "no reaper service is running" in done.err


def test_a_service_that_says_nothing_is_14(alive: bytes) -> None:
    write_status(alive, msgspec.structs.replace(status_of(VOLUME, age_s=60), refreshes_s=30))
    done = trashd("status")
    assert done.code == 14
    assert "no status from the service for 1m" in done.out
    assert "journalctl" in done.err


@pytest.mark.parametrize("phase", VolumePhase)
def test_only_a_broken_volume_is_14(alive: bytes, phase: VolumePhase) -> None:
    write_status(alive, status_of(VOLUME, msgspec.structs.replace(VOLUME, phase=phase)))
    assert trashd("status").code == (14 if phase is VolumePhase.BROKEN else 0)


def test_json_is_one_object_with_the_volumes_own_name(alive: bytes) -> None:
    write_status(alive, status_of(VolumeStatus(path="/v%FF%0A")))
    (status_result,) = trashd("status", "--json").objects()
    assert os.fsencode(status_result["volumes"][0]["path"]) == b"/v\xff\n"
    assert (status_result["is_running"], status_result["is_stale"], status_result["directory"]) == (
        True,
        False,
        os.fsdecode(SYSTEM_RUNTIME),
    )


def test_json_is_as_promised(alive: bytes) -> None:
    odd = PassedOver("/scratch/.trashd/u/1000", "not used as uid 1000's directory: it belongs to uid 1001", "look")
    volume = msgspec.structs.replace(VOLUME, faults=(StatusFault(1, "EIO at a claim"),), refused=(odd,), nodes=NODES)
    write_status(alive, status_of(volume))
    (status_result,) = trashd("status", "--json").objects()
    for key in ("pid", "started_ns", "updated_ns", "updated_boot_ns", "age_s"):
        status_result[key] = f"<{key}>"
    compare("json-status.json", json.dumps([status_result], indent=1) + "\n")


def test_json_of_a_dead_service_comes_with_an_error_object(directory: bytes) -> None:
    write_status(directory, status_of())
    done = trashd("status", "--json")
    (told,) = done.objects()
    assert told["is_running"] is False
    assert json.loads(done.err)["exit_code"] == done.code == 5


def test_everybody_may_ask(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME))
    done = run_as(SOMEBODY, [TRASHD, "status"], env={"HOME": "/missing", "LC_ALL": "C.UTF-8"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/scratch" in done.stdout


def test_a_users_own_service_is_shown_beside_roots_and_a_dead_one_is_not(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME))
    with passable_directory() as home:
        own = make_dir(os.fsencode(home / "trashd"))
        write_status(own, status_of(VolumeStatus(path="/own")))
        ask = partial(run_as, SOMEBODY, [TRASHD, "status"], env={"XDG_RUNTIME_DIR": str(home), "LC_ALL": "C.UTF-8"})
        assert b"/own" not in ask().stdout
        lock = file_locks.take_lock(own)
        assert lock is not None
        with lock:
            told = ask().stdout
    assert told.index(b"/scratch") < told.index(b"/own")


def test_a_status_that_is_none_is_an_error_without_a_traceback(alive: bytes) -> None:
    (Path(os.fsdecode(alive)) / "status.json").write_bytes(b"\xff")
    done = trashd("status")
    assert done.code == 1
    assert "restart" in done.err
    assert "Traceback" not in done.err


HEAVY = "{'rich', 'trio', 'prometheus_client', 'asyncio', 'http', 'pyfuse3'}"


def test_it_starts_without_heavy_modules(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME))
    program = f"import sys; from fusefs.cli.main import run; run(['status']); sys.exit(str({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stderr == b"set()\n"


@pytest.mark.parametrize("words", [("--watch",), ("--watch", "--json")])
def test_watch_is_for_a_terminal(alive: bytes, words: tuple[str, ...]) -> None:
    write_status(alive, status_of())
    assert trashd("status", *words).code == 2


def drawn(*volumes: VolumeStatus, n_lines: int = 24, is_ascii: bool = False, is_running: bool = True) -> list[str]:
    """The lines of the live view on 80 columns, without colours."""
    console = Console(width=80, height=n_lines, color_system=None, force_terminal=True)
    view = StatusView(is_ascii=is_ascii)
    services = [(b"/run", ObservedStatus(status_of(*volumes), is_running))]
    with console.capture() as capture:
        console.print(view.draw(services, time.time_ns(), n_lines))
    return capture.get().splitlines()


@pytest.mark.parametrize("n_lines", [4, 11, 12, 24, 60])
@pytest.mark.parametrize("n_volumes", [0, 1, 2, 5, 40])
def test_the_view_fits_the_terminal(n_lines: int, n_volumes: int) -> None:
    volumes = [msgspec.structs.replace(VOLUME, path=f"/{n}" + "x" * 100) for n in range(n_volumes)]
    lines = drawn(*volumes, n_lines=n_lines)
    assert len(lines) <= n_lines
    assert max(map(len, lines)) <= 80


def test_the_view_of_a_volume_is_whole_on_80_columns() -> None:
    text = "\n".join(drawn(VOLUME))
    for words in (
        "io █░░░ 31%",
        "write 1.23 ms",
        "+1.34 GiB/h",
        "max 20,000/s",
        "1 in quarantine",
        "(and 1 earlier)",
    ):
        assert words in text
    assert "…" not in text


def test_the_view_shows_first_what_needs_somebody() -> None:
    volumes = [msgspec.structs.replace(VOLUME, path=f"/{phase.value}", phase=phase) for phase in VolumePhase]
    text = "\n".join(drawn(*volumes))
    shown = sorted(VolumePhase, key=lambda phase: text.find(f"/{phase.value}") % 10_000)
    assert shown[:2] == [VolumePhase.BROKEN, VolumePhase.HURRYING]
    assert all(f"/{phase.value}" in text for phase in (VolumePhase.REAPING, VolumePhase.YIELDING))


def test_the_view_of_an_idle_volume_tells_no_rate() -> None:
    text = "\n".join(drawn(VolumeStatus(path="/idle")))
    assert "entries/s" not in text


def test_the_view_of_a_poor_terminal_is_ascii_inside_its_frames() -> None:
    text = "".join(drawn(VOLUME, msgspec.structs.replace(VOLUME, path="/" + "x" * 100), is_ascii=True))
    assert {character for character in text if not character.isascii()} <= set("╭─╮│╰╯")


def test_the_view_of_hostile_words_moves_no_cursor() -> None:
    volume = msgspec.structs.replace(
        VOLUME, path="/%1B[2J", why=f"{EVIL}[bold]", filesystem=EVIL, faults=(StatusFault(0, EVIL),)
    )
    lines = drawn(volume)
    assert all(line.isprintable() for line in lines)
    assert "[bold]" in "\n".join(lines)


def test_the_view_tells_that_the_service_died() -> None:
    assert "not running" in "\n".join(drawn(VOLUME, is_running=False))


def test_a_terminal_sees_the_service_work_and_gets_its_screen_back(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME))
    terminal = Terminal("status", "--watch")
    terminal.wait_for("12,345 entries/s")
    write_status(alive, status_of(msgspec.structs.replace(VOLUME, entries_per_s=54321.0)))
    terminal.wait_for("54,321 entries/s")
    assert terminal.interrupt() == 0
    assert terminal.output.count("\x1b[?1049h") == terminal.output.count("\x1b[?1049l") == 1
    assert terminal.output.endswith("\x1b[?25h\x1b[?1049l")


def test_a_terminal_sees_a_service_come_and_go(directory: bytes) -> None:
    terminal = Terminal("status", "--watch")
    terminal.wait_for("No reaper service is running")
    lock = file_locks.take_lock(directory)
    assert lock is not None
    with lock:
        write_status(directory, status_of(VOLUME))
        terminal.wait_for("yielding")
    terminal.wait_for("not running")
    assert terminal.interrupt() == 0


def test_a_terminal_without_utf_8_shows_it_too(alive: bytes) -> None:
    write_status(alive, status_of(VOLUME))
    terminal = Terminal(
        "status", "--watch", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii"
    )
    terminal.wait_for("12,345 entries/s")
    assert terminal.interrupt() == 0
