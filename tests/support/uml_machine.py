"""A second, third… kernel on this machine: User-Mode Linux, Debian's 6.1, over an overlay of our own root.

Each has a boot id, a machine id, a host name, page and dentry caches, a clock and a network interface of its own. All
that it writes is in its own memory, but for the disk that it is given.

Source    https://docs.kernel.org/virt/uml/user_mode_linux_howto_v2.html
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tests.support import uml_guest
from tests.support.uml_guest import DIED, DONE, RAISED, REPORTED, Line
from tests.support.uml_switch import Port

REPO = Path(__file__).parents[2]
UML = "linux.uml"
BOOT_S, CALL_S = 60.0, 40.0
_GLANCE_S = 0.005
P = ParamSpec("P")
T = TypeVar("T")


class MachineEnded(Exception):
    """The virtual machine is no more; the message is what its kernel said last."""


class ActionDied(Exception):
    """A process in a virtual machine ended without a word; the message is its exit code."""


class RunningAction(Generic[T]):
    """An action under way in a virtual machine."""

    def __init__(self, machine: Machine, number: int) -> None:
        self._machine, self._number = machine, number
        self.messages: queue.Queue[tuple[str, Any]] = queue.Queue()

    def wait_report(self, limit_s: float = CALL_S) -> str:
        """Wait for the action's next report.

        Raises  the error that it raised; AssertionError: it ended instead; TimeoutError
        """
        what, value = self._next(limit_s)
        assert what == REPORTED, value
        return str(value)

    def wait_report_or_end(self, limit_s: float = CALL_S) -> str | None:
        """Wait for the action's next report; None: it has ended without one, and `result` returns its result."""
        what, value = self._next(limit_s)
        if what == REPORTED:
            return str(value)
        self.messages.put((what, value))
        return None

    def go(self) -> None:
        """Let it go on from where it waits."""
        self._machine.send(self._number, None, ())

    def result(self, limit_s: float = CALL_S) -> T:
        """Wait for the action's end; return its result. Reports are ignored.

        Raises  the error that it raised; TimeoutError
        """
        end = time.monotonic() + limit_s
        while True:
            what, value = self._next(end - time.monotonic())
            if what == DONE:
                result: T = value
                return result

    def _next(self, limit_s: float) -> tuple[str, Any]:
        try:
            what, value = self.messages.get(timeout=max(limit_s, 0))
        except queue.Empty:
            raise TimeoutError(f"{self._machine.name} said nothing\n{self._machine.log()[-2000:]}") from None
        if what == RAISED:
            raise value
        if what == DIED:
            raise ActionDied(value)
        if what not in (REPORTED, DONE):
            raise MachineEnded(self._machine.log()[-2000:])
        return what, value


class Machine:
    """One virtual machine, from its start to its end."""

    def __init__(
        self,
        folder: Path,
        name: str,
        address: str,
        port: Port,
        *,
        modules: Sequence[str],
        disk: Path | None,
        memory: str,
        hosts: Sequence[str],
        imports: Sequence[str],
    ) -> None:
        """Start it; `boot` waits until it is up."""
        self.name, self.address, self.port = name, address, port
        self._log = folder / f"{name}.log"
        self._lock = threading.Lock()
        self._running: dict[int, RunningAction[Any]] = {}
        self._number = 0
        self._has_ended = False
        ours, theirs = socket.socketpair()
        (own := folder / f"{name}.link").unlink(missing_ok=True)
        number = address.rpartition(".")[2]
        serial = f"ssl0=fd:{theirs.fileno()},fd:{theirs.fileno()}"
        argv = [
            UML, f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", "quiet",
            f"umid={name}", f"uml_dir={folder}/", "con=null", "con0=null,fd:1", serial, "ssl=null",
            f"vec0:transport=bess,dst={port.path},src={own},mac=02:00:00:00:00:{int(number):02x}",
            *([f"ubda={disk}"] if disk else []),
            f"NAME={name}", f"ADDRESS={address}", f"LOAD={','.join(modules)}", f"HOSTS={','.join(hosts)}",
            f"IMPORT={','.join(imports)}", f"PYTHONPATH={REPO}",
            f"init={sys.executable}", "--", uml_guest.__file__,
        ]  # fmt: skip
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                env={"PATH": os.environ["PATH"], "TMPDIR": str(folder)}, start_new_session=True,
            )  # fmt: skip
        self._link = ours
        self._up: RunningAction[None] = self._register(0)
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def boot(self) -> None:
        """Wait until it serves. Raises  MachineEnded, TimeoutError"""
        assert self._up.wait_report(BOOT_S) == "up"

    def log(self) -> str:
        """What its kernel and its first process said."""
        return self._log.read_text(errors="replace")

    def start(self, action: Callable[Concatenate[Line, P], T], *args: P.args, **kwargs: P.kwargs) -> RunningAction[T]:
        """Have a process of its own in there do something; arguments and result can be pickled."""
        assert not kwargs, "by position only"
        with self._lock:
            self._number += 1
            number = self._number
        running: RunningAction[T] = self._register(number)
        self.send(number, f"{action.__module__}:{action.__qualname__}", args)
        return running

    def call(self, action: Callable[Concatenate[Line, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What an action there returns."""
        return self.start(action, *args, **kwargs).result()

    def freeze(self) -> None:
        """Stop the machine, all its processors and its clock's ticks; its cable stays."""
        self._signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] not in "Tt":
            time.sleep(_GLANCE_S)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """As if its plug were pulled."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(BOOT_S)
        self._link.close()

    def send(self, number: int, action: str | None, arguments: tuple[object, ...]) -> None:
        """Ask. Raises  MachineEnded"""
        try:
            self._link.sendall(base64.b64encode(pickle.dumps((number, action, arguments))) + b"\n")
        except OSError as error:
            raise MachineEnded(self.log()[-2000:]) from error

    def _signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def _register(self, number: int) -> RunningAction[Any]:
        running: RunningAction[Any] = RunningAction(self, number)
        with self._lock:
            self._running[number] = running
            if self._has_ended:
                running.messages.put(("ended", None))
        return running

    def _read(self) -> None:
        buffer = b""
        while data := self._receive():
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                number, what, value = pickle.loads(base64.b64decode(line))
                with self._lock:
                    self._running[number].messages.put((what, value))
        with self._lock:
            self._has_ended = True
            for running in self._running.values():
                running.messages.put(("ended", None))

    def _receive(self) -> bytes:
        try:
            return self._link.recv(1 << 16)
        except OSError:
            return b""


@contextlib.contextmanager
def started(
    folder: Path,
    name: str,
    address: str,
    port: Port,
    *,
    modules: Sequence[str] = (),
    disk: Path | None = None,
    memory: str = "192M",
    hosts: Sequence[str] = (),
    imports: Sequence[str] = (),
) -> Iterator[Machine]:
    """A virtual machine that ends with the block.

    address   of its one network interface
    port      where that is plugged in
    disk      an image that it has as /dev/ubda
    hosts     whom it knows, as ADDRESS=NAME
    imports   Python's modules, and packages of them, that its actions want
    """
    machine = Machine(
        folder, name, address, port, modules=modules, disk=disk, memory=memory, hosts=hosts, imports=imports
    )
    try:
        yield machine
    finally:
        machine.kill()
