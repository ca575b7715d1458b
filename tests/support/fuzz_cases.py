"""Cases of forged requests: each has a seed, is asked of a fresh engine, and is shortened when it finds a fault."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, NoReturn

from fusefs.core.fuse_protocol import FORGET_IN, Opcode
from fusefs.core.mount_counters import Gauges
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.mount.places.counters import Counters
from fusefs.mount.requests.device_readers import DeviceReaders
from fusefs.mount.requests.fuse_requests import FuseRequests
from fusefs.mount.requests.thread_pool import ThreadPool
from fusefs.mount.tables.tables_lock import TablesLock
from fusefs.mount.tree.vfs import Vfs
from tests.support.fake_dev_fuse import SO_SNDBUFFORCE, options_of, python_command
from tests.support.forged_requests import ForgedCaller, Forger, Message, ServerObjects, parse_reply, plain

_CLONE_NEWNS, _MS_REC_PRIVATE = 0x20000, 0x4000 | 0x40000
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 0x8000, 1
_MESSAGE_BYTES_MAX = 4 << 20
_N_THREADS, _N_FDS, _N_MANY = 16, 400, 3000
_CANARY = b"content"
_TREE_FILES = {"file": b"content", "deep/er/leaf": b"x" * 10_000, "shared/other": b"other"}


class EngineOptions(NamedTuple):
    """How a case's engine is configured."""

    is_slow: bool = False
    is_shared: bool = False
    opens_directories: bool = True
    has_many_names: bool = False
    """A directory whose listing is larger than a reply may be."""


@contextmanager
def running_engine(root: Fd, device: int, options: EngineOptions) -> Iterator[Callable[[], Gauges]]:
    """The engine that reads requests from `device`. All that depends on how an engine is built is in here.

    Yields  what returns its gauges
    """
    lock = TablesLock(is_slow=options.is_slow)
    mount_options = options_of(is_shared=options.is_shared, timeout_s=1000, cache_bytes=1 << 20)
    vfs = Vfs(root, lock, Counters.in_memory(), mount_options, _N_FDS)
    pool = ThreadPool(_N_THREADS)
    vfs.nodes.opens_directories = options.opens_directories
    requests = FuseRequests(vfs, device, pool)
    readers = DeviceReaders(requests, vfs.core, lambda: os._exit(3))
    readers.begin()
    yield vfs.read_gauges
    readers.end(10.0)
    vfs.close()


# The process.


def serve_cases(socket_fd: int) -> None:
    """Fork a child for each case that is asked for on a socket, until that is closed."""
    control = socket.socket(fileno=socket_fd)
    gc.freeze()
    while message := control.recv(1 << 12):
        words = json.loads(message)
        _data, fds, _flags, _address = socket.recv_fds(control, 1, 3)
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve_case(Path(words["scratch"]), EngineOptions(*words["options"]), *fds)
        for fd in fds:
            os.close(fd)
        control.send(b"%d" % pid)
        control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _serve_case(scratch: Path, options: EngineOptions, device: int, control_fd: int, log: int) -> None:
    """Answer requests, and on the control socket what is asked of the process; never returns."""
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 1
    try:
        with (
            Fd(_scratch_tree(scratch, options)) as root,
            socket.socket(fileno=control_fd) as control,
            ExitStack() as stack,
        ):
            gauges = stack.enter_context(running_engine(root, device, options))
            while control.recv(1) == b"g":
                control.send(json.dumps({**gauges()._asdict(), "n_fds": len(os.listdir("/proc/self/fd"))}).encode())
        code = 0
    finally:
        os._exit(code)


def _scratch_tree(scratch: Path, options: EngineOptions) -> int:
    """The backing tree, in a mount namespace in which nothing else can be changed: an fd of its root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None):
        raise OSError(ctypes.get_errno(), "a mount namespace of its own")
    syscalls.mount_setattr(-1, b"/", _AT_RECURSIVE, struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0))
    flags = ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC)
    if libc.mount(b"tests", os.fsencode(scratch), b"tmpfs", flags, b"size=32m,nr_inodes=4096,mode=0777"):
        raise OSError(ctypes.get_errno(), "a tmpfs")
    tree = scratch / "tree"
    tree.mkdir()
    tree.chmod(0o777)
    for name, content in _TREE_FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "shared").chmod(0o1777)
    (tree / "link").symlink_to("file")
    os.mkfifo(tree / "fifo")
    for number in range(_N_MANY if options.has_many_names else 0):
        os.link(tree / "file", tree / "deep" / str(number).ljust(250, "x"))
    return os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


# The fuzzer's side.


class EngineProcess:
    """The process, and the child that serves the present case."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = f"from tests.support.fuzz_cases import serve_cases; serve_cases({theirs.fileno()})"
        self._canary = scratch.with_suffix(".canary")
        self.has_changed_canary()
        with self._canary.open("r+b") as canary:  # a file that no request is about
            self._process = subprocess.Popen(
                python_command(program), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=canary
            )
        theirs.close()

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    @contextmanager
    def case(self, options: EngineOptions, log: Path) -> Iterator[EngineCase]:
        """A child of its own for a case. log: what it prints"""
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        for end in (*ends[0], *ends[1]):
            end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, _MESSAGE_BYTES_MAX)
        with log.open("wb") as file:
            self._control.send(json.dumps({"scratch": str(self._scratch), "options": options}).encode())
            socket.send_fds(self._control, [b"."], [ends[0][1].fileno(), ends[1][1].fileno(), file.fileno()])
        ends[0][1].close()
        ends[1][1].close()
        with ends[0][0] as device, ends[1][0] as control:
            yield EngineCase(int(self._control.recv(20)), device, control, self._exit_code)

    def has_changed_canary(self) -> bool:
        """Whether a file of the process was changed that no request is about; it is as at the start then."""
        is_changed = not self._canary.exists() or self._canary.read_bytes() != _CANARY
        if is_changed:
            self._canary.write_bytes(_CANARY)
        return is_changed

    def _exit_code(self) -> int:
        return int(self._control.recv(20))


class EngineCase(NamedTuple):
    """The child that serves a case: its pid, the other end of its device, and what it is asked by."""

    pid: int
    device: socket.socket
    control: socket.socket
    exit_code: Callable[[], int]

    def open_paths(self) -> list[str]:
        """What it has open."""
        fds = Path(f"/proc/{self.pid}/fd")
        return [os.readlink(fds / fd) for fd in os.listdir(fds)]

    def gauges(self) -> dict[str, Any]:
        """What its engine holds at this moment. Raises  OSError: it has ended"""
        self.control.send(b"g")
        found: dict[str, Any] = json.loads(self.control.recv(1 << 12) or b"{}")
        return found


N_STEPS = 400
_ANOTHER = 4711
_ODDNESS = (0.0, 0.01, 0.05, 0.2)
_N_IN_FLIGHT_MAX = 8
_REPLY_BYTES_MAX = 4 << 20
_LIMIT_S = 60.0 if os.environ.get("TRASHD_TEST_SANITIZED") else 20.0
_SHORTEN_S, _N_SHORTEN_MAX, _LIMIT_AGAIN_S = 60.0, 200, 1.0
_RELEASE_SIZE = 24
_FAULTS = ("Traceback", "Sanitizer", "runtime error", "Fatal Python error", " failed\n")
_LAST_ONES = {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.RELEASE, Opcode.RELEASEDIR}
"""The kernel has no other request under way that is about the node or the handle, and sends none after it."""
_EXPECTED = "sent a truncated request"


class Fault(NamedTuple):
    """What a case has found, after which of its steps, and what was asked until then."""

    seed: int
    steps: Sequence[int]
    why: str
    messages: Sequence[Message]

    def __str__(self) -> str:
        asked = "\n".join(
            f"  {number:>4}  {message}" for number, message in zip(self.steps, self.messages, strict=False)
        )
        return f"{self.why}\nTRASHD_TEST_FUZZ_SEED={self.seed}, {len(self.messages)} requests:\n{asked}"


def fuzz(scratch: Path, seeds: Iterator[int], end_s: float) -> int:
    """Run cases until a moment of time.monotonic(), at least one; how many requests were asked.

    Raises  AssertionError: a case has found a fault
    """
    n_asked = 0
    with _running(scratch) as (process, callers):
        for seed in seeds:
            case = _Case(process, callers, seed, scratch.with_suffix(".log"))
            fault = case.find_fault(range(N_STEPS))
            if fault is not None:
                raise AssertionError(str(_shortened(case, fault)))
            n_asked += N_STEPS
            if time.monotonic() > end_s:
                break
    return n_asked


@contextmanager
def _running(scratch: Path) -> Iterator[tuple[EngineProcess, tuple[ForgedCaller, ...]]]:
    """An engine, and those who ask it: root, and a process of another user."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        _be_another(ours)
    os.close(ours)
    process = EngineProcess(scratch)
    try:
        yield process, (ForgedCaller(0, 0, os.getpid()), ForgedCaller(_ANOTHER, _ANOTHER, pid))
    finally:
        process.close()
        os.close(theirs)
        os.waitpid(pid, 0)


def _be_another(until_closed: int) -> NoReturn:
    try:
        os.setgroups([_ANOTHER + 1])
        os.setgid(_ANOTHER)
        os.setuid(_ANOTHER)
        os.read(until_closed, 1)
    finally:
        os._exit(0)


def _kind(why: str) -> str:
    """By which two faults are taken for the same one."""
    errors = [line for line in why.splitlines() if "Error: " in line or "SUMMARY" in line]
    return errors[-1].partition("; ")[0][:60] if errors else ""


def _shortened(case: _Case, fault: Fault) -> Fault:
    """The shortest that is found in a while of those cases with fewer steps which find a fault, too."""
    end_s = time.monotonic() + _SHORTEN_S
    case.limit_s = _LIMIT_AGAIN_S
    n_left_out = max(1, len(fault.steps) // 2)
    for _ in range(_N_SHORTEN_MAX if fault.steps else 0):
        for at in range(0, len(fault.steps), n_left_out):
            shorter = case.find_fault([*fault.steps[:at], *fault.steps[at + n_left_out :]])
            if shorter is not None and _kind(shorter.why) != _kind(fault.why):
                shorter = None
            if shorter is not None or time.monotonic() > end_s:
                break
        if shorter is not None:
            fault = shorter
        elif n_left_out == 1 or time.monotonic() > end_s:
            break
        n_left_out = max(1, min(n_left_out // (1 if shorter else 2), len(fault.steps) // 2))
    return fault


class _Case:
    """A seed, by which everything in it is drawn."""

    def __init__(self, process: EngineProcess, callers: tuple[ForgedCaller, ...], seed: int, log: Path) -> None:
        dice = Random(seed)
        self._process, self._callers, self._seed, self._log = process, callers, seed, log
        self._options = EngineOptions(*(dice.random() < part for part in (0.2, 0.3, 0.5, 0.1)))
        self._oddness = dice.choice(_ODDNESS)
        self._n_in_flight_max = dice.choice((1, 1, _N_IN_FLIGHT_MAX))
        self.limit_s = _LIMIT_S
        """For which a reply is waited for."""

    def find_fault(self, steps: Sequence[int]) -> Fault | None:
        """Ask those of its steps of a fresh engine."""
        asked: list[Message] = []
        with self._process.case(self._options, self._log) as engine:
            why = ""
            try:
                client = _Client(engine, ServerObjects(), self._n_in_flight_max, self.limit_s)
                forger = Forger(client.objects, self._callers, self._oddness)
                for number in steps:
                    asked.append(forger.draw(Random(f"{self._seed}-{number}"), 2 * number + 2))
                    client.send_request(asked[-1])
                client.end(self._callers[0])
                engine.control.send(b"e")
            except (AssertionError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
                _kill(engine.pid)
            code = engine.exit_code()
        lines = self._log.read_text(errors="replace").splitlines(keepends=True)
        said = "".join(line for line in lines if _EXPECTED not in line)
        if self._process.has_changed_canary():
            why = why or "Error: a file outside of the tree was changed"
        if code and not why:
            why = f"exit code {code}"
        if why or any(word in said for word in _FAULTS):
            why = f"{why or 'a fault is in the log'}; {self._options}, exit code {code}"
            return Fault(self._seed, steps[: len(asked)], f"{why}\n{said[:3000]}", asked)
        return None


def _kill(pid: int) -> None:
    """End a process, which tells first where its threads are."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


class _Client:
    """What asks an engine, and takes its replies as the kernel does."""

    def __init__(self, engine: EngineCase, objects: ServerObjects, n_in_flight_max: int, limit_s: float) -> None:
        self.objects = objects
        self._engine, self._n_in_flight_max = engine, n_in_flight_max
        self._in_flight: dict[int, Message] = {}
        self._may_come: Counter[int] = Counter()
        self._limit_s = limit_s
        engine.device.settimeout(limit_s)
        self._send_plain(Opcode.UNLINK, b"missing\0", 1, ForgedCaller(0, 0, os.getpid()))  # the root's fd stays
        self._at_start = self._held()

    def send_request(self, message: Message) -> None:
        """Send a request, and take the replies that are due.

        Raises  AssertionError: something is wrong with a reply; OSError: no reply arrives
        """
        is_last = message.opcode in _LAST_ONES
        if is_last or message.unique in self._in_flight:
            self._take(0)
        if 1 in message.n_answers and 0 not in message.n_answers:
            self._in_flight[message.unique] = message
        elif 1 in message.n_answers:
            self._may_come[message.unique] += 1
        self.objects.note_request(message)
        self._engine.device.send(message.content)
        self._take(0 if is_last else self._n_in_flight_max - 1)

    def _take(self, n_left: int) -> None:
        """Take replies until so many are still to come."""
        while len(self._in_flight) > n_left:
            reply = self._engine.device.recv(_REPLY_BYTES_MAX)
            assert reply, "the engine has ended"
            self._learn(reply)

    def _learn(self, reply: bytes) -> None:
        unique, error, body = parse_reply(reply)
        message = self._in_flight.pop(unique, None)
        if message is None:
            assert self._may_come[unique], f"nobody waits for a reply to {unique}"
            self._may_come[unique] -= 1
        else:
            self.objects.note_reply(message, error, body)

    def end(self, caller: ForgedCaller) -> None:
        """Let go of all that replies named: the engine holds what it held at the start."""
        self._take(0)
        for opcode, handles in ((Opcode.RELEASE, self.objects.files), (Opcode.RELEASEDIR, self.objects.directories)):
            for fh in tuple(handles):
                self._send_plain(opcode, fh.to_bytes(_RELEASE_SIZE, "little"), 1, caller)
        for nodeid, n in tuple(self.objects.n_lookups.items()):
            self._send_plain(Opcode.FORGET, FORGET_IN.pack(n), nodeid, caller)
        self._send_plain(Opcode.STATFS, b"", 1, caller)
        end_s = time.monotonic() + self._limit_s
        while (left := self._unlike_start()) and time.monotonic() < end_s:
            time.sleep(0.005)
        assert not left, f"left: {left}; {self._engine.open_paths()}"
        self._engine.device.setblocking(False)
        with suppress(BlockingIOError):
            unwanted = self._engine.device.recv(_REPLY_BYTES_MAX)
            raise AssertionError(f"nobody waits for {unwanted[:100].hex()}")

    def _send_plain(self, opcode: Opcode, own: bytes, nodeid: int, caller: ForgedCaller) -> None:
        self.send_request(plain(opcode, own, nodeid, 1 << 62, caller))
        self._take(0)

    def _unlike_start(self) -> dict[str, tuple[int, int]]:
        """What there is more of than at the start, and how much of it then and now.

        A directory that is forgotten may be opened again, as that in which a node has its name; such ones are limited.
        """
        now, at_start = self._held(), self._at_start
        return {name: (at_start[name], n) for name, n in now.items() if n > at_start[name]}

    def _held(self) -> dict[str, int]:
        gauges = self._engine.gauges()
        n_fds = gauges["n_fds"] - gauges["n_directory_fds"]
        return {"nodes": gauges["n_nodes"], "handles": gauges["n_handles"], "fds": n_fds}
