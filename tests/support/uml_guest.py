"""What runs in a User-Mode Linux kernel as its first process: it sets the machine up, and does what the test asks.

Requests and answers are lines on a serial line, each a pickle in base64: (number, action, arguments) comes,
(number, what, value) goes, see tests/support/uml_machine.py.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import sys
import termios
import tty
import uuid
from pathlib import Path
from typing import Any

_NR_FINIT_MODULE, _NR_PIVOT_ROOT = 313, 155
_MNT_DETACH = 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8913, 0x8914, 0x8916, 0x891C, 1
_MODULES = Path("/usr/lib/uml/modules")
_SERIAL = "/dev/ttyS0"
_LIBC = ctypes.CDLL(None, use_errno=True)

REPORTED, DONE, RAISED, DIED = "reported", "done", "raised", "died"


class Line:
    """An action's connection to the test, for messages in both directions."""

    def __init__(self, report_fd: int, hears: int) -> None:
        self._report_fd, self._hears = report_fd, hears

    def report(self, word: str) -> None:
        """Report to the test how far the action is."""
        self._say(REPORTED, word)

    def wait(self) -> None:
        """Wait for the test's next message."""
        os.read(self._hears, 1)

    def run_action(self, action: str, arguments: tuple[object, ...]) -> None:
        """Run an action (MODULE:NAME), and send its result or its error to the test."""
        try:
            module, _, name = action.partition(":")
            self._say(DONE, getattr(importlib.import_module(module), name)(self, *arguments))
        except BaseException as error:
            self._say(RAISED, _portable(error))

    def _say(self, what: str, value: object) -> None:
        os.write(self._report_fd, base64.b64encode(pickle.dumps((what, value))) + b"\n")


def _portable(error: BaseException) -> BaseException:
    """As it can be sent: with its own class if that can be made anew."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Served:
    """A request under way: its process and the pipes to it."""

    def __init__(self, number: int, action: str, arguments: tuple[object, ...], others: list[_Served]) -> None:
        self.number = number
        self.hears, report_fd = os.pipe()
        hears, self.go_fd = os.pipe()
        self.buffer = b""
        self.is_done = False
        self.pid = os.fork()
        if self.pid == 0:
            for other in [self, *others]:
                os.close(other.hears)
                os.close(other.go_fd)
            _act(action, arguments, Line(report_fd, hears))
        os.close(report_fd)
        os.close(hears)


def _act(action: str, arguments: tuple[object, ...], line: Line) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        line.run_action(action, arguments)
    finally:
        os._exit(0)


class _Server:
    """Reads requests, forks for each, and sends on what their processes say."""

    def __init__(self, serial: int) -> None:
        self._serial = serial
        self._served: list[_Served] = []
        self._buffer = b""
        self._woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def send(self, number: int, what: str, value: object) -> None:
        """Answer."""
        data = base64.b64encode(pickle.dumps((number, what, value))) + b"\n"
        while data:
            data = data[os.write(self._serial, data) :]

    def serve(self) -> None:
        """For ever."""
        while True:
            ready, _, _ = select.select([self._serial, self._woken, *(one.hears for one in self._served)], [], [])
            for one in [one for one in self._served if one.hears in ready]:
                self._hear(one)
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._serial in ready:
                self._read_requests()

    def _read_requests(self) -> None:
        """Read the requests that have arrived; start a process for each, or let the process of a started one go on."""
        self._buffer += os.read(self._serial, 4096)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            number, action, arguments = pickle.loads(base64.b64decode(line))
            if action is None:
                for one in self._served:
                    if one.number == number:
                        os.write(one.go_fd, b".")
                continue
            self._served.append(_Served(number, action, arguments, self._served))

    def _hear(self, one: _Served) -> None:
        data = os.read(one.hears, 65536)
        self._take(one, data)
        if not data and not one.is_done:
            self.send(one.number, DIED, os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]))
        if one.is_done or not data:
            self._end(one)

    def _take(self, one: _Served, data: bytes) -> None:
        one.buffer += data
        *lines, one.buffer = one.buffer.split(b"\n")
        for line in lines:
            what, value = pickle.loads(base64.b64decode(line))
            self.send(one.number, what, value)
            one.is_done = one.is_done or what != REPORTED

    def _hear_out(self, one: _Served) -> None:
        """What an ended process said before; a child of its may have the pipe still."""
        while not one.is_done and select.select([one.hears], [], [], 0)[0]:
            if not (data := os.read(one.hears, 65536)):
                return
            self._take(one, data)
        if one.is_done:
            self._end(one)

    def _end(self, one: _Served) -> None:
        if one in self._served:
            self._served.remove(one)
            os.close(one.hears)
            os.close(one.go_fd)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for one in [one for one in self._served if one.pid == ended[0]]:
                    self._hear_out(one)
                    if one in self._served:
                        self.send(one.number, DIED, os.waitstatus_to_exitcode(ended[1]))
                        self._end(one)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str | Path, fs_type: str, data: str = "", flags: int = 0) -> None:
    """mount(2); the target is made."""
    os.makedirs(target, exist_ok=True)
    words = [os.fsencode(word) for word in (source, target, fs_type)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {source} {target} {data}")


def unmount(target: str | Path, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_LIBC.umount2(os.fsencode(target), flags), f"umount {target}")


def load(*names: str) -> None:
    """Load modules, and what they need."""
    folder = _MODULES / os.uname().release
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        module, _, needed = line.partition(":")
        needs[Path(module).name.removesuffix(".ko").replace("-", "_")] = [*reversed(needed.split()), module]
    for module in dict.fromkeys(module for name in names for module in needs[name]):
        with open(folder / module, "rb") as file:
            if _LIBC.syscall(_NR_FINIT_MODULE, file.fileno(), b"", 0) and ctypes.get_errno() != errno.EEXIST:
                _check(-1, module)


def _up(interface: str, address: str | None = None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inet_socket:
        name = interface.encode()
        for call, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, address and "255.255.255.0")):
            if value is not None:
                request = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(inet_socket, call, request)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(inet_socket, _SIOCGIFFLAGS, struct.pack("16s16x", name)), 16)
        fcntl.ioctl(inet_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | _IFF_UP))


def _own_root() -> None:
    """The machine's root that started us, below a filesystem in memory of our own that takes what is written."""
    mount("proc", "/proc", "proc")
    mount("memory", "/mnt", "tmpfs", "mode=755")
    load("overlay")
    for name in ("upper", "work", "root"):
        os.mkdir(f"/mnt/{name}")
    root = "/mnt/root"
    mount("root", root, "overlay", "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work")
    mount("proc", f"{root}/proc", "proc")
    mount("sys", f"{root}/sys", "sysfs")
    mount("dev", f"{root}/dev", "devtmpfs")
    mount("shm", f"{root}/dev/shm", "tmpfs")
    for name in ("run", "tmp", "var/tmp", "var/lib/nfs", "mnt"):
        mount(name, f"{root}/{name}", "tmpfs", "mode=755")
    os.mkdir(f"{root}/.old")
    _check(_LIBC.syscall(_NR_PIVOT_ROOT, root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    unmount("/.old", _MNT_DETACH)


def _be(name: str, address: str) -> None:
    socket.sethostname(name)
    contents = {
        "passwd": "root:x:0:0::/root:/bin/sh\n_rpc:x:100:65534::/run:/bin/false\nnobody:x:65534:65534::/:/bin/false",
        "group": "root:x:0:\nnogroup:x:65534:",
        "machine-id": uuid.uuid4().hex,
        "hostname": name,
        "hosts": f"127.0.0.1 localhost\n{os.environ['HOSTS']}",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files",  # nobody is there to be asked
    }
    for file, text in contents.items():
        (path := Path("/etc", file)).unlink(missing_ok=True)
        path.write_text(f"{text}\n")
    _up("lo")
    _up("vec0", address)


def _import(name: str) -> None:
    """A module, or all of a package: each action is a fork of us, and would import them anew."""
    for module in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", [])):
        importlib.import_module(f"{name}.{module.name}")


def main() -> None:
    """Set the machine up and serve.

    In the environment: NAME, ADDRESS, HOSTS, LOAD (the kernel's modules), IMPORT (Python's)
    """
    _own_root()
    os.environ["HOSTS"] = os.environ["HOSTS"].replace(",", "\n").replace("=", " ")
    _be(os.environ["NAME"], os.environ["ADDRESS"])
    load(*filter(None, os.environ["LOAD"].split(",")))
    os.environ.update(PATH="/usr/sbin:/usr/bin:/sbin:/bin", HOME="/root", LC_ALL="C.UTF-8", COLUMNS="80", NO_COLOR="1")
    serial = os.open(_SERIAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    tty.setraw(serial, termios.TCSANOW)
    for name in os.environ["IMPORT"].split(","):
        _import(name)
    gc.freeze()
    server = _Server(serial)
    server.send(0, REPORTED, "up")
    server.serve()


def _started() -> Any:
    sys.modules["tests.support.uml_guest"] = sys.modules["__main__"]  # one Line for us and the actions
    main()


if __name__ == "__main__":
    _started()
