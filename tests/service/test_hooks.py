"""Hooks with real processes: what they are given, as which user they run, and that none can hold up the service."""

import json
import logging
import os
import pwd
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.core.config import HooksConfig
from fusefs.core.events import Event, EventKind
from fusefs.core.service_status import HookCounts
from fusefs.linux.user_ids import Subordinates, SubuidRange
from fusefs.service.event_outlets import HookRunner

REAPED = Event(EventKind.REAPED, 1, b"/v", 1000, "an-id", b"/v/\n\xff job", 7, 4096, 1.5)
PATIENCE_S = 30


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


class _Told(logging.Handler):
    """Keeps what hooks' ends are logged as, and says when there are enough."""

    def __init__(self, n_wanted: int) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.enough = trio.Event()
        self._n_wanted = n_wanted

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if len(self.records) == self._n_wanted:
            self.enough.set()


@contextmanager
def listening(n_wanted: int) -> Iterator[_Told]:
    logger, told = logging.getLogger("fusefs.service.event_outlets"), _Told(n_wanted)
    before = logger.level
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    try:
        yield told
    finally:
        logger.removeHandler(told)
        logger.setLevel(before)


def run(hooks: HooksConfig, *events: Event) -> tuple[list[str], HookCounts]:
    """What is logged of these events' hooks, and their tally, when all have ended."""

    async def main() -> tuple[list[str], HookCounts]:
        runner = HookRunner(hooks)
        with listening(len(events)) as told, trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runner.run_hooks)
                for event in events:
                    runner(event)
                await told.enough.wait()
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            return [record.getMessage() for record in told.records], runner.tally

    return trio.run(main)


def output(script: str, event: Event = REAPED, user: str = "nobody") -> str:
    """What a hook that ends well prints."""
    (text,), tally = run(HooksConfig(on_reaped=shell(script), user=user), event)
    assert tally == HookCounts(1, 0, 0), text
    return text.partition(" succeeded")[2].removeprefix(": ")


def is_gone(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE_S)[0])
    finally:
        os.close(fd)


def test_a_hook_has_the_event_in_its_environment() -> None:
    told = output("env | grep -a ^TRASHD_ | grep -av ORIGIN | sort")
    assert told.split(r"\x0a") == [
        "TRASHD_BYTES=4096", "TRASHD_ENTRIES=7", "TRASHD_EVENT=reaped", "TRASHD_ID=an-id", "TRASHD_SECONDS=1.500",
        "TRASHD_UID=1000", "TRASHD_VOLUME=/v",
    ]  # fmt: skip


def test_a_hook_gets_the_origins_own_bytes() -> None:
    assert output('printf %s "$TRASHD_ORIGIN" | od -An -tx1 | tr -d " \\n"') == b"/v/\n\xff job".hex()


def test_a_hook_reads_the_event_as_json() -> None:
    fields = json.loads(output("cat"))
    assert (fields["event"], os.fsencode(fields["origin"])) == ("reaped", REAPED.origin)


def test_no_word_of_an_event_is_read_by_a_shell() -> None:
    hooks = HooksConfig(on_reaped=("/bin/echo", "$TRASHD_ID", ";", "id"))
    (text,), _tally = run(hooks, REAPED)
    assert text.endswith("succeeded: $TRASHD_ID ; id")


@pytest.mark.needs("root")
def test_a_hook_of_roots_service_runs_as_nobody_without_capabilities() -> None:
    told = output("id -u; id -G; grep CapEff /proc/self/status | cut -f2; umask; echo $HOME")
    nobody = pwd.getpwnam("nobody")
    uid, groups, capabilities, umask, home = told.split(r"\x0a")
    assert (uid, groups) == (str(nobody.pw_uid), str(nobody.pw_gid))
    assert int(capabilities, 16) == 0
    assert (umask, home) == ("0022", nobody.pw_dir)


@pytest.mark.needs("root")
def test_a_hook_runs_as_root_only_where_that_is_said() -> None:
    assert output("id -u", user="root") == "0"


def test_a_hook_has_no_fd_of_ours_and_keeps_no_directory() -> None:
    fd = os.open("/", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert output("pwd; ls /proc/self/fd | tr '\\n' ' '").split() == [r"/\x0a0", "1", "2", "3"]
    finally:
        os.close(fd)


def test_a_hook_has_a_session_of_its_own() -> None:
    group, session, pid = output("cut -d' ' -f5,6 /proc/$$/stat; echo $$").replace(r"\x0a", " ").split()
    assert group == session == pid


@pytest.mark.allows_warnings
def test_a_hook_is_killed_with_all_it_started_at_its_time_limit(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    os.mkfifo(lives)
    fd = os.open(lives, os.O_RDONLY | os.O_NONBLOCK)
    try:
        hooks = HooksConfig(on_reaped=shell(f"exec 3> {lives}; sleep 1000 & wait"), timeout_s=1, user="root")
        (text,), tally = run(hooks, REAPED)
        assert text.endswith("was killed after 1 s")
        assert nobody_writes_to(fd)
    finally:
        os.close(fd)
    assert tally == HookCounts(1, 1, 0)


def nobody_writes_to(fd: int) -> bool:
    """Whether all who had a FIFO open end, or have."""
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return bool(select.select([fd], [], [], PATIENCE_S)[0])


def test_what_a_hook_leaves_running_keeps_nobody_waiting() -> None:
    hooks = HooksConfig(on_reaped=shell("sleep 1000 & echo $!"), timeout_s=1000)
    (text,), _tally = run(hooks, REAPED)
    os.kill(int(text.rpartition(" ")[2]), 9)


def test_a_hook_that_reads_nothing_and_talks_for_ever_ends_all_the_same() -> None:
    assert len(output("head -c 20000000 /dev/zero | tr '\\0' x")) <= 2000


def test_a_hooks_words_move_no_cursor() -> None:
    assert output(r"printf '\033[2J\377'") == r"\x1b[2J\xff"


@pytest.mark.allows_warnings
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (shell("echo why >&2; exit 3"), "hook /bin/sh for reaped ended with exit code 3: why"),
        (shell("kill -TERM $$"), "hook /bin/sh for reaped was terminated by signal 15 (Terminated)"),
        (
            ("/missing",),
            "hook /missing for reaped could not be started: [Errno 2] No such file or directory: '/missing'",
        ),
        (("/",), "hook / for reaped could not be started: [Errno 13] Permission denied: '/'"),
    ],
    ids=["exit code", "signal", "missing", "a directory"],
)
def test_a_failure_is_logged_with_its_reason(argv: tuple[str, ...], told: str) -> None:
    texts, tally = run(HooksConfig(on_reaped=argv), REAPED)
    assert texts == [told]
    assert tally == HookCounts(1, 1, 0)


@pytest.mark.needs("root")
@pytest.mark.allows_warnings
def test_a_user_who_is_not_there_runs_nothing() -> None:
    (text,), _tally = run(HooksConfig(on_reaped=shell("id"), user="no-such-user"), REAPED)
    assert "could not be started" in text


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        (EventKind.SWAPPED, "on_swap"),
        (EventKind.REMOVED, "on_swap"),
        (EventKind.DROPPED, "on_swap"),
        (EventKind.SWEPT, "on_swap"),
        (EventKind.REAPED, "on_reaped"),
        (EventKind.QUARANTINED, "on_quarantine"),
        (EventKind.LOW_SPACE, "on_low_space"),
        (EventKind.EXPIRES_SOON, "on_expires_soon"),
    ],
)
def test_a_kind_has_its_hook(kind: EventKind, hook: str) -> None:
    first, second, third, fourth, fifth = (shell(f"echo {name} $TRASHD_EVENT") for name in HooksConfig._fields[:5])
    hooks = HooksConfig(first, second, third, fourth, fifth)
    (text,), _tally = run(hooks, Event(kind, 0))
    assert text.endswith(f": {hook} {kind.value}")


@pytest.mark.parametrize("kind", [EventKind.FOUND, EventKind.STARTED, EventKind.RESTORED])
def test_an_event_without_a_hook_is_not_even_queued(kind: EventKind) -> None:
    runner = HookRunner(HooksConfig(on_reaped=shell("id")))
    for _ in range(2000):
        runner(Event(kind, 0))
    assert runner.tally == HookCounts()


@pytest.mark.allows_warnings
def test_hooks_that_are_far_behind_cost_events_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = HookRunner(HooksConfig(on_reaped=shell("id")))
    for _ in range(1003):
        runner(REAPED)
    assert runner.tally == HookCounts(0, 0, 3)
    (record,) = caplog.records
    assert "new events are dropped" in record.getMessage()


def ran_of(monkeypatch: pytest.MonkeyPatch, *uids: int | None) -> list[int | None]:
    """Whose events of many had hooks, in the order in which these ran, one at a time."""
    monkeypatch.setattr("fusefs.service.event_outlets._HOOKS_AT_ONCE", 1)

    async def main() -> list[logging.LogRecord]:
        runner = HookRunner(HooksConfig(on_reaped=("/bin/true",)))
        with listening(len(uids)) as told, trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for uid in uids:
                    runner(REAPED._replace(uid=uid))
                nursery.start_soon(runner.run_hooks)
                await told.enough.wait()
                nursery.cancel_scope.cancel()
        return told.records

    fields = [vars(record)["fields"] for record in trio.run(main)]
    return [int(one["TRASHD_UID"]) if one.get("TRASHD_UID") else None for one in fields]


def test_each_users_events_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = [1002] * 12
    ran = ran_of(monkeypatch, *flood, 1001, 1001, None)
    assert ran[:6] == [1002, 1001, None, 1002, 1001, 1002]


def test_subordinate_uids_have_one_turn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    subordinates = Subordinates([SubuidRange(200_000, 65_536, 1002)])
    monkeypatch.setattr("fusefs.service.event_outlets.read_subordinates", lambda: subordinates)
    ran = ran_of(monkeypatch, *range(200_000, 200_012), 1001, 1001)
    assert ran[:4] == [200_000, 1001, 200_001, 1001]


@pytest.mark.allows_warnings
def test_one_users_flood_drops_no_others_event() -> None:
    runner = HookRunner(HooksConfig(on_reaped=shell("id")))
    for _ in range(1003):
        runner(REAPED)
    for _ in range(1000):
        runner(REAPED._replace(uid=1001))
    assert runner.tally == HookCounts(0, 0, 3)


def test_a_reload_changes_the_hooks_of_what_waits() -> None:
    async def main() -> list[str]:
        runner = HookRunner(HooksConfig(on_reaped=shell("echo old")))
        with listening(1) as told, trio.fail_after(PATIENCE_S):
            runner(REAPED)
            runner.hooks = HooksConfig(on_reaped=shell("echo new"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runner.run_hooks)
                await told.enough.wait()
                nursery.cancel_scope.cancel()
        return [record.getMessage() for record in told.records]

    (text,) = trio.run(main)
    assert text.endswith(": new")


def started(tmp_path: Path, script: str, then: Callable[[trio.CancelScope, Path], None]) -> str:
    """Run 8 hooks that say `s` when they start and `e` when they end; `then`, once four did; all they said."""
    spoken, gate = tmp_path / "spoken", tmp_path / "gate"
    os.mkfifo(spoken)
    os.mkfifo(gate)
    script = script.replace("SPOKEN", str(spoken)).replace("GATE", str(gate))

    async def main() -> str:
        runner = HookRunner(HooksConfig(on_reaped=shell(script), user="root"))
        said = b""
        fd = os.open(spoken, os.O_RDWR | os.O_NONBLOCK)
        with listening(8) as told, trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(runner.run_hooks)
                for _ in range(8):
                    runner(REAPED)
                while len(said) < 4:
                    await trio.lowlevel.wait_readable(fd)
                    said += os.read(fd, 100)
                then(nursery.cancel_scope, gate)
                await told.enough.wait()
                nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint()
        with suppress(BlockingIOError):
            said += os.read(fd, 100)
        os.close(fd)
        return said.decode()

    return trio.run(main)


@pytest.mark.needs("root")
def test_no_more_than_four_run_at_a_time(tmp_path: Path) -> None:
    opened: list[int] = []
    script = "printf s > SPOKEN; : < GATE; printf e > SPOKEN"
    said = started(tmp_path, script, lambda _scope, gate: opened.append(os.open(gate, os.O_RDWR)))
    os.close(*opened)
    assert said.count("s") == said.count("e") == 8
    running = [said[:end].count("s") - said[:end].count("e") for end in range(len(said) + 1)]
    assert max(running) == 4


@pytest.mark.needs("root")
def test_the_end_of_the_service_ends_its_hooks(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; printf s > SPOKEN; : < GATE"
    started(tmp_path, script, lambda scope, _gate: scope.cancel())
    running = [int(word) for word in pids.read_text().split()]
    assert len(running) == 4
    assert all(is_gone(pid) for pid in running)
