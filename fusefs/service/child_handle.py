"""The service's end of the connection to a child: orders out, answers in, and whether it still runs."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from fusefs.core.slice_budget import HOLD, Speed
from fusefs.service.forker import Born
from fusefs.service.messages import (
    MESSAGE_MAX,
    Answer,
    Heartbeat,
    Order,
    OrderDone,
    Page,
    Park,
    SetTempo,
    Tended,
    ToChild,
    decode_answer,
    encode,
    fits,
)

SILENT_S = 5.0
"""A child that says nothing for so long is looked at."""
LOST_S = 60.0
"""So long a single system call may take (a file of terabytes); after that a child is given up."""
_ANSWERS = 64


class ChildGone(Exception):
    """The child ended, was stopped, hung, or said what makes no sense."""


class ChildHandle:
    """One user's hands on one volume."""

    def __init__(self, uid: int, born: Born) -> None:
        self.uid = uid
        self.pid = born.pid
        self.sums = Heartbeat(0, 0, 0.0)
        self.is_busy = False
        self._pidfd = born.pidfd
        self._socket = born.channel
        self._channel = trio.socket.from_stdlib_socket(born.channel)
        self._tempo = HOLD
        self._heard_at = trio.current_time()
        self._why_lost = ""
        self._inbox_end, self._inbox = trio.open_memory_channel[Answer](_ANSWERS)

    def close(self) -> None:
        """Kill it, if it has not ended, and let go of it."""
        self.kill("no longer needed")
        self._channel.close()
        self._inbox_end.close()
        self._pidfd.close()

    def kill(self, why: str) -> None:
        """End it at once; what it was doing is found by the next."""
        self._why_lost = self._why_lost or why
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for the end of its process, which lets go of the volume. Checkpoint"""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def listen(self) -> None:
        """Take in what it says until it ends. Checkpoint"""
        try:
            while packet := await self._channel.recv(MESSAGE_MAX):
                message = decode_answer(packet)
                self._heard_at = trio.current_time()
                if isinstance(message, Heartbeat):
                    self.sums = message
                else:
                    await self._inbox_end.send(message)
        except msgspec.MsgspecError:
            self.kill("it said what makes no sense")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is gone; or we closed it (EBADF, if it had just said something)
        finally:
            self._inbox_end.close()

    def lead(self, tempo: Speed) -> None:
        """Set how fast it goes. While it is in one long system call it is told no more than it can hear."""
        if tempo != self._tempo:
            with suppress(BlockingIOError):
                self._send(SetTempo(tempo))
                self._tempo = tempo

    def park(self, *, now: bool = False) -> None:
        """Have it leave what it does where it is; its answers come soon. now: whatever that is"""
        self._say(Park(now))

    async def answers(self, order: Order) -> AsyncGenerator[Answer]:
        """What it answers to an order; the last is no OrderDone that went well.

        Raises  ChildGone; OSError with the errno of what went wrong with the folder or the volume
        Checkpoint  yes
        """
        self.is_busy = True
        try:
            self._heard_at = trio.current_time()
            self._say(order)
            async for answer in self._inbox:
                if isinstance(answer, OrderDone):
                    if answer.errno:
                        raise OSError(answer.errno, answer.error)
                    return
                if not fits(answer, order):
                    self.kill("it answered what nobody asked")
                    continue
                yield answer
                if isinstance(answer, Tended | Page):
                    return
            raise ChildGone(self._why_lost or "its process ended")
        finally:
            self.is_busy = False

    def look_after(self) -> None:
        """Kill it if it was stopped or hangs."""
        silent_s = trio.current_time() - self._heard_at
        if not self.is_busy or silent_s < SILENT_S:
            return
        if self._is_stopped():
            self.kill("it was stopped")
        elif silent_s > LOST_S:
            self.kill(f"it said nothing for {silent_s:.0f} s")

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def _say(self, message: ToChild) -> None:
        try:
            self._send(message)
        except BlockingIOError:
            self.kill("it does not listen")

    def _send(self, message: ToChild) -> None:
        """Raises  BlockingIOError if it has heard nothing for long"""
        try:
            self._socket.send(encode(message))
        except BlockingIOError:
            raise
        except OSError:
            self.kill("its process ended")
