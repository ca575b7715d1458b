"""The network between virtual machines: a switch that cuts cables, swallows and holds back frames as a test wants.

Each machine has a socket (SOCK_SEQPACKET, what User-Mode Linux calls `bess`) over which its frames come and go, one
in each message. No namespace, no device and no right is needed.
"""

import contextlib
import os
import re
import selectors
import socket
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

_MAX_FRAME = 1 << 17
_PATIENCE_S = 30.0


class Cable(Enum):
    """What becomes of the frames of one direction of a cable."""

    PASS = "pass"
    DROP = "drop"
    HOLD = "hold"


class Port:
    """One machine's place at the switch. All fields are guarded by the switch's lock.

    out, back   what becomes of frames from the machine, and to it
    trap        what a frame from the machine has in it that is waited for; then `then` becomes `out`, and
                `then_back` becomes `back`
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen()
        self.link: socket.socket | None = None
        self.out = self.back = Cable.PASS
        self.held: list[bytes] = []
        self.trap: re.Pattern[bytes] | None = None
        self.then = self.then_back = Cable.PASS
        self.passes_first = False
        self.sprung = threading.Event()


class Switch:
    """Carries frames between its ports in a thread of its own; each frame goes to all other ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ports: list[Port] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._carry, name="switch", daemon=True)
        self._thread.start()

    def port(self, name: str) -> Port:
        """A new place; a machine that is started again may have its old one."""
        port = Port(self._folder / f"{name}.switch")
        with self._lock:
            self._ports.append(port)
        self._selector.register(port.listener, selectors.EVENT_READ, port)
        os.write(self._wakes, b".")
        return port

    def close(self) -> None:
        """End the thread and close all sockets."""
        os.close(self._wakes)
        self._thread.join(_PATIENCE_S)
        for port in self._ports:
            port.listener.close()
            if port.link is not None:
                port.link.close()
        self._selector.close()
        os.close(self._woken)

    def set(self, port: Port, out: Cable | None = None, back: Cable | None = None) -> None:
        """Let frames of a direction pass, be dropped or be held; what was held comes out when they may pass again."""
        with self._lock:
            port.back = port.back if back is None else back
            if out is not None:
                port.out, port.trap = out, None
                if out is not Cable.HOLD:
                    held, port.held = port.held, []
                    for frame in held if out is Cable.PASS else ():
                        self._deliver(port, frame)

    def when(
        self,
        port: Port,
        pattern: re.Pattern[bytes],
        then: Cable,
        then_back: Cable = Cable.PASS,
        *,
        passes_first: bool = False,
    ) -> threading.Event:
        """Set both directions at the machine's first frame that matches a pattern. passes_first: that frame passes

        Returns   an event that is set when that has happened
        """
        with self._lock:
            port.trap, port.then, port.then_back, port.passes_first = pattern, then, then_back, passes_first
            port.sprung = threading.Event()
            return port.sprung

    def mend(self, port: Port) -> None:
        """Have all frames pass, those that were held too."""
        self.set(port, Cable.PASS, Cable.PASS)

    @contextlib.contextmanager
    def cut(self, port: Port) -> Iterator[None]:
        """No frame passes in either direction."""
        self.set(port, Cable.DROP, Cable.DROP)
        try:
            yield
        finally:
            self.set(port, Cable.PASS, Cable.PASS)

    def _carry(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._woken:
                    if not os.read(self._woken, 64):
                        return
                    continue
                port = key.data
                assert isinstance(port, Port)
                if key.fileobj is port.listener:
                    self._plug(port)
                else:
                    self._receive(port)

    def _plug(self, port: Port) -> None:
        link, _ = port.listener.accept()
        link.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            link.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        with self._lock:
            self._unplug(port)
            port.link = link
        self._selector.register(link, selectors.EVENT_READ, port)

    def _unplug(self, port: Port) -> None:
        if port.link is not None:
            self._selector.unregister(port.link)
            port.link.close()
            port.link = None

    def _receive(self, port: Port) -> None:
        assert port.link is not None
        try:
            frame = port.link.recv(_MAX_FRAME)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        with self._lock:
            if not frame:
                self._unplug(port)
                return
            if port.trap is not None and port.trap.search(frame):
                port.trap = None
                if port.passes_first:
                    self._deliver(port, frame)
                port.out, port.back = port.then, port.then_back
                port.sprung.set()
                if port.passes_first:
                    return
            if port.out is Cable.HOLD:
                port.held.append(frame)
            elif port.out is Cable.PASS:
                self._deliver(port, frame)

    def _deliver(self, origin: Port, frame: bytes) -> None:
        for port in self._ports:
            if port is not origin and port.link is not None and port.back is Cable.PASS:
                with contextlib.suppress(OSError):  # its machine is gone or is frozen and its queue full: a lost frame
                    port.link.send(frame)
