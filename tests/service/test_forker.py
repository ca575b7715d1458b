"""The service's children: processes that have one user's rights and no more, do as they are told, and end with it."""

import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from fusefs.core.pacing import HOLD, UNLIMITED
from fusefs.linux.children import user_credentials
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.service import timers
from fusefs.service.forker import ChildGone, ChildHandle, Forker
from fusefs.service.messages import (
    Answer,
    ContainerEntry,
    DueContainer,
    Order,
    OrderDone,
    OrphanEnded,
    Page,
    ReadRecords,
    Reap,
    Tend,
    Tended,
)
from fusefs.service.open_volume import open_volume
from tests.support.make_trees import fill
from tests.support.other_users import as_user
from tests.support.proc_stat import status_of
from tests.support.service_process import is_begun
from tests.support.small_orphans import EXPIRED, OTHER, ids, orphan_in, orphan_of
from tests.support.store_verbs import place, swap

pytestmark = pytest.mark.needs("root")

LIMIT_S = 60.0
IDLE_POLICY = 5  # SCHED_IDLE


@asynccontextmanager
async def deputy_of(uid: int, volume: Path, limit_s: float = LIMIT_S) -> AsyncIterator[ChildHandle]:
    """A user's child on a volume, listened to and led at full speed."""
    with trio.fail_after(limit_s), Forker() as forker, open_volume(Kernel(), os.fsencode(volume)) as opened:
        folder = opened.folder(uid)
        assert folder is not None
        with folder:
            child_handle = await forker.fork(folder, user_credentials(uid))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child_handle.listen)
            child_handle.set_speed(UNLIMITED)
            try:
                yield child_handle
            finally:
                child_handle.close()


async def all_answers(child_handle: ChildHandle, order: Order) -> list[Answer]:
    return [answer async for answer in child_handle.answers(order)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what is not announced."""
    while not condition():
        await trio.sleep(0.005)


def store_of(volume: Path) -> bytes:
    """How orders and answers name root's store there."""
    return os.fsencode(volume / ".trashd")


def reap(volume: Path, *identifiers: str) -> Reap:
    """The order to reap these, which have expired."""
    return Reap(store_of(volume), [DueContainer(identifier, 0) for identifier in identifiers])


def answers_to(volume: Path, *orders: Order) -> list[Answer]:
    """What root's child on a volume answers to these, one after the other."""

    async def body() -> list[Answer]:
        async with deputy_of(0, volume) as child_handle:
            return [answer for order in orders for answer in await all_answers(child_handle, order)]

    return trio.run(body)


def test_child_has_one_users_rights_and_no_more(volume: Path) -> None:
    """Its user can neither read nor write its memory."""
    orphan_of(OTHER, volume, EXPIRED)

    async def body() -> dict[str, list[str]]:
        async with deputy_of(OTHER, volume) as child_handle:
            await all_answers(child_handle, Tend())
            assert os.sched_getscheduler(child_handle.pid) == IDLE_POLICY
            # A process that is not dumpable has files in /proc that belong to root.
            assert Path(f"/proc/{child_handle.pid}/environ").stat().st_uid == 0
            trace = [sys.executable, "-c", f"open('/proc/{child_handle.pid}/mem', 'rb')"]
            assert as_user(OTHER, lambda: subprocess.run(trace, stderr=subprocess.DEVNULL, check=False).returncode)
            return status_of(child_handle.pid)

    told = trio.run(body)
    assert told["Uid"] == [str(OTHER)] * 4
    assert {*told["Gid"], *told["Groups"]}.isdisjoint({"0"})
    assert {told[key][0] for key in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert told["NoNewPrivs"] == ["1"]


def test_orders_are_answered_one_after_the_other(volume: Path) -> None:
    orphan = orphan_in(volume, options=EXPIRED)
    orders = Tend(), ReadRecords(store_of(volume)), reap(volume, orphan.id)
    tended, page, ended = answers_to(volume, *orders)
    assert isinstance(tended, Tended)
    assert (tended.bases, tended.problems) == ([store_of(volume)], [])
    assert isinstance(page, Page)
    assert (page.n_orphans, page.last, page.n_quarantined) == (1, "", 0)
    (seen,) = page.entries
    assert seen == ContainerEntry(
        orphan.id, False, seen.created_ns, 0, os.fsencode(volume / "job"), orphan.method, boot_ns=seen.boot_ns
    )
    assert isinstance(ended, OrphanEnded)
    assert (ended.id, ended.lost, ended.n_removed, ended.n_failed, ended.stopped) == (orphan.id, "", 5, 0, False)
    assert ids(volume) == set()


def test_what_is_gone_by_now_is_told(volume: Path) -> None:
    orphan = orphan_in(volume, options=EXPIRED)
    here = place(volume, orphan.id)
    aside = here.rename(volume / "aside")
    (ended,) = answers_to(volume, reap(volume, orphan.id))
    aside.rename(here)
    assert isinstance(ended, OrphanEnded)
    assert ended.lost == "gone"


def test_another_term_than_the_service_knows_is_respected(volume: Path) -> None:
    orphan = orphan_in(volume)
    (ended,) = answers_to(volume, reap(volume, orphan.id))
    assert isinstance(ended, OrphanEnded)
    assert ended.lost == "changed"
    assert ids(volume) == {orphan.id}


def test_error_of_a_store_is_an_error_of_the_order_alone(volume: Path) -> None:
    async def body() -> list[Answer]:
        async with deputy_of(0, volume) as child_handle:
            with pytest.raises(OSError, match="No such file"):
                await all_answers(child_handle, ReadRecords(b"/elsewhere/.trashd"))
            return await all_answers(child_handle, ReadRecords(store_of(volume)))

    assert len(trio.run(body)) == 1


def test_held_it_does_nothing_and_goes_on_where_it_was(volume: Path) -> None:
    large = str(swap(fill(volume / "large", 5000), options=EXPIRED).id)

    async def body() -> list[Answer]:
        async with deputy_of(0, volume) as child_handle, trio.open_nursery() as nursery:
            answers: list[Answer] = []

            async def do() -> None:
                answers.extend(await all_answers(child_handle, reap(volume, large)))

            child_handle.set_speed(HOLD)
            nursery.start_soon(do)
            await until(lambda: any(volume.glob(f".trashd/u/*/reaping/{large}/tree")))
            beats = child_handle.sums
            await until(lambda: child_handle.sums is not beats)  # it lives, and has looked at its tempo
            assert not is_begun(volume, large, 5000)
            child_handle.set_speed(UNLIMITED)
        return answers

    (ended,) = trio.run(body)
    assert isinstance(ended, OrphanEnded)
    assert ended.n_removed == 5001


def lost_with(order: Order, *, says: bytes = b"", looks_after: bool = False) -> str:
    """Why a child is lost that only says this; it does not survive it. Time passes quickly."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)

    async def body(child: subprocess.Popen[bytes]) -> str:
        child_handle = ChildHandle(OTHER, child.pid, Fd(os.pidfd_open(child.pid)), ours)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child_handle.listen)
            if looks_after:
                nursery.start_soon(look_after, child_handle, theirs)
            if says:
                theirs.send(says)
                theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ChildGone) as caught:
                await all_answers(child_handle, order)
            nursery.cancel_scope.cancel()
        child_handle.close()
        return str(caught.value)

    with theirs, subprocess.Popen(["sleep", "60"]) as child:
        why = trio.run(body, child, clock=trio.testing.MockClock(rate=200.0))
        assert child.wait(LIMIT_S) == -signal.SIGKILL
    return why


async def look_after(child_handle: ChildHandle, theirs: socket.socket) -> None:
    """What the service does every now and then; a process that is gone says nothing more."""
    while True:
        await trio.sleep(timers.current.silent_limit_s)
        child_handle.check_alive()
        if status_of(child_handle.pid)["State"][0] == "Z":
            theirs.shutdown(socket.SHUT_WR)
            return


LESS_THAN_NOTHING = b'{"type":"Beat","n_entries":-1,"n_bytes":0,"busy_s":0}'


@pytest.mark.parametrize("packet", [b"nonsense", b"{}", b'{"type":"Park"}', LESS_THAN_NOTHING, b"\xff"])
def test_child_that_says_nonsense_is_killed(packet: bytes) -> None:
    assert lost_with(Tend(), says=packet) == "the process sent an invalid message"


def test_child_that_answers_what_nobody_asked_is_killed() -> None:
    other = msgspec.json.encode(OrphanEnded("20260101T000000.000Z-other-0123456789ab"))
    assert lost_with(Tend(), says=other) == "the process sent an unexpected answer"


def test_error_number_that_there_is_not_is_no_fault_of_ours() -> None:
    packet = msgspec.json.encode(OrderDone("?", (1 << 63) - 1))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)

    async def body(pid: int) -> None:
        child_handle = ChildHandle(OTHER, pid, Fd(os.pidfd_open(pid)), ours)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child_handle.listen)
                theirs.send(packet)
                with pytest.raises(OSError, match=r"\?"):
                    await all_answers(child_handle, Tend())
                child_handle.close()

    with theirs, subprocess.Popen(["sleep", "60"]) as child:
        trio.run(body, child.pid)


def test_child_that_says_nothing_for_very_long_is_killed() -> None:
    why = lost_with(Tend(), looks_after=True)
    assert why.startswith("the process was silent for")
    assert int(why.split()[-2]) >= timers.current.lost_limit_s


def test_children_die_with_the_service(volume: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)

        async def body() -> None:
            async with deputy_of(0, volume) as child_handle:
                await all_answers(child_handle, Tend())
                os.write(writer, b"%d %d" % (child_handle.pid, os.getppid()))
                await trio.sleep(math.inf)

        try:
            trio.run(body)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        child = int(pipe.read(64).split()[0])
    child_fd = os.pidfd_open(child)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert select.select([child_fd], [], [], LIMIT_S)[0]
    os.close(child_fd)
