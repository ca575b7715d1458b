"""Cases of forged requests: each has a seed, is asked of a fresh engine, and is shortened when it finds a fault."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

from fusefs.core.fuse_protocol import FORGET_IN, Opcode
from tests.support.forged_requests import ForgedCaller, Forger, Known, Message, parse_reply, plain
from tests.support.fuzzed_engine import EngineCase, EngineOptions, EngineProcess

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
_EXPECTED = "that is cut off\n"


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
                client = _Client(engine, Known(), self._n_in_flight_max, self.limit_s)
                forger = Forger(client.known, self._callers, self._oddness)
                for number in steps:
                    asked.append(forger.draw(Random(f"{self._seed}-{number}"), 2 * number + 2))
                    client.ask(asked[-1])
                client.end(self._callers[0])
                engine.control.send(b"e")
            except (AssertionError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
                _kill(engine.pid)
            code = engine.exit_code()
        lines = self._log.read_text(errors="replace").splitlines(keepends=True)
        said = "".join(line for line in lines if not line.endswith(_EXPECTED))
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

    def __init__(self, engine: EngineCase, known: Known, n_in_flight_max: int, limit_s: float) -> None:
        self.known = known
        self._engine, self._n_in_flight_max = engine, n_in_flight_max
        self._in_flight: dict[int, Message] = {}
        self._may_come: Counter[int] = Counter()
        self._limit_s = limit_s
        engine.device.settimeout(limit_s)
        self._ask_plainly(Opcode.UNLINK, b"missing\0", 1, ForgedCaller(0, 0, os.getpid()))  # the root's fd stays
        self._at_start = self._held()

    def ask(self, message: Message) -> None:
        """Raises  AssertionError: something is wrong with a reply; OSError: none comes"""
        is_last = message.opcode in _LAST_ONES
        if is_last or message.unique in self._in_flight:
            self._take(0)
        if 1 in message.n_answers and 0 not in message.n_answers:
            self._in_flight[message.unique] = message
        elif 1 in message.n_answers:
            self._may_come[message.unique] += 1
        self.known.asked(message)
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
            self.known.replied(message, error, body)

    def end(self, caller: ForgedCaller) -> None:
        """Let go of all that replies named: the engine holds what it held at the start."""
        self._take(0)
        for opcode, handles in ((Opcode.RELEASE, self.known.files), (Opcode.RELEASEDIR, self.known.directories)):
            for fh in tuple(handles):
                self._ask_plainly(opcode, fh.to_bytes(_RELEASE_SIZE, "little"), 1, caller)
        for nodeid, n in tuple(self.known.n_lookups.items()):
            self._ask_plainly(Opcode.FORGET, FORGET_IN.pack(n), nodeid, caller)
        self._ask_plainly(Opcode.STATFS, b"", 1, caller)
        end_s = time.monotonic() + self._limit_s
        while (left := self._unlike_start()) and time.monotonic() < end_s:
            time.sleep(0.005)
        assert not left, f"left: {left}; {self._engine.open_paths()}"
        self._engine.device.setblocking(False)
        with suppress(BlockingIOError):
            unwanted = self._engine.device.recv(_REPLY_BYTES_MAX)
            raise AssertionError(f"nobody waits for {unwanted[:100].hex()}")

    def _ask_plainly(self, opcode: Opcode, own: bytes, nodeid: int, caller: ForgedCaller) -> None:
        self.ask(plain(opcode, own, nodeid, 1 << 62, caller))
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
