"""Credentials: one call as another user, and root that is less than root."""

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fusefs.linux.credentials import Capability, ThreadCredentials, call_as, in_no_group
from tests.support.other_users import as_user

pytestmark = pytest.mark.needs("root")

ALICE, TEAM = 70_001, 70_100
WHOLE = ThreadCredentials(ALICE, TEAM, (71_001, 71_002), 1 << Capability.FOWNER, 0o027)
_FIELDS = ("Uid:", "Gid:", "Groups:", "CapEff:", "CapPrm:", "Umask:")


@pytest.fixture(autouse=True)
def in_no_other_group() -> Iterator[None]:
    """As a thread is that acts as others."""
    before = os.getgroups()
    os.setgroups(())
    yield
    os.setgroups(before)


def identity() -> dict[str, str]:
    """This thread's."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {field: line.partition("\t")[2] for line in lines for field in _FIELDS if line.startswith(field)}


def fail(error: BaseException) -> None:
    """A call that fails."""
    raise error


def test_all_of_an_identity_is_there_for_the_call() -> None:
    here = call_as(WHOLE, identity)
    assert here["Uid:"].split() == ["0", "0", "0", str(ALICE)]
    assert here["Gid:"].split() == ["0", "0", "0", str(TEAM)]
    assert here["Groups:"].split() == ["71001", "71002"]
    assert int(here["CapEff:"], 16) == 1 << Capability.FOWNER
    assert here["Umask:"] == "0027"


def test_who_has_another_uid_has_no_capability_over_files(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(0o700)
    with pytest.raises(PermissionError):
        call_as(ThreadCredentials(ALICE), os.listdir, tmp_path / "closed")
    assert os.listdir(tmp_path / "closed") == []


def test_root_without_capabilities_is_an_owner_like_others(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    assert call_as(ThreadCredentials(capabilities=0), os.listdir, closed) == []
    os.chown(closed, ALICE, ALICE)
    with pytest.raises(PermissionError):
        call_as(ThreadCredentials(capabilities=0), os.listdir, closed)


def test_a_bit_of_roots_group_goes_with_a_change_by_who_is_in_no_group(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.chown(file, ALICE, 0)
    file.chmod(0o2666)
    with file.open("wb", buffering=0) as opened:
        # CAP_FSETID would keep it.
        who = in_no_group()._replace(capabilities=0)
        call_as(who, os.pwrite, opened.fileno(), b"content", 0)
    assert file.stat().st_mode & 0o7777 == 0o666


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_a_call_that_fails_leaves_us_ourselves(error: BaseException) -> None:
    before = identity()
    with pytest.raises(type(error)):
        call_as(WHOLE, fail, error)
    assert identity() == before


def test_an_identity_that_can_not_be_taken_up_leaves_us_ourselves() -> None:
    before = identity()
    with pytest.raises(OverflowError):
        call_as(WHOLE._replace(umask=(1 << 32) - 1), identity)
    assert identity() == before


def test_a_thread_acts_alone() -> None:
    seen: list[dict[str, str]] = []
    before = identity()

    acting, looks = threading.Event(), threading.Event()

    def act() -> None:
        acting.set()
        assert looks.wait(60)

    thread = threading.Thread(target=call_as, args=(ThreadCredentials(ALICE, TEAM), act))
    thread.start()
    assert acting.wait(60)
    seen.append(identity())
    looks.set()
    thread.join()
    assert seen == [before]


def test_who_can_not_be_had_does_not_act() -> None:
    """A user may not be another: the calls that say so say nothing."""

    def act() -> str:
        with pytest.raises(PermissionError):
            call_as(ThreadCredentials(ALICE + 1), os.getcwd)
        return identity()["Uid:"]

    assert as_user(ALICE, act).split() == [str(ALICE)] * 4


@pytest.mark.needs("userns")
def test_groups_that_a_user_namespace_forbids_end_nobody() -> None:
    """As `unshare --map-root-user` does: there a caller's groups can't be had, nor be given back."""
    script = (
        "import os; from fusefs.linux.credentials import ThreadCredentials, call_as\n"
        "try: call_as(ThreadCredentials(groups=(0,)), os.getcwd)\n"
        "except PermissionError: print('refused')"
    )
    words = ["unshare", "--user", "--map-root-user", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def at_line(line: int, do: Callable[[], object]) -> Callable[[FrameType, str, Any], Any]:
    """A tracer that does something before a line of call_as is run, once."""
    done = False

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal done
        if frame.f_code is not call_as.__code__:
            return None
        if event == "line" and frame.f_lineno == line and not done:
            done = True
            do()
        return trace

    return trace


LINES = sorted({line for _start, _end, line in call_as.__code__.co_lines() if line})[1:]


class Struck(BaseException):
    """What ends a thread from outside."""


@pytest.mark.parametrize("line", LINES)
def test_whatever_strikes_at_whatever_point_we_are_ourselves_or_have_ended(line: int) -> None:
    def strike() -> None:
        raise Struck

    def run() -> None:
        before = identity()
        sys.settrace(at_line(line, strike))
        try:
            call_as(WHOLE, os.getcwd)
        except Struck:
            pass
        finally:
            sys.settrace(None)
        os._exit(0 if identity() == before else 1)

    child = os.fork()
    if not child:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        run()
    _pid, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, os.EX_SOFTWARE)


@pytest.mark.parametrize("line", LINES)
def test_a_collection_at_whatever_point_is_none_of_ours(line: int) -> None:
    before = identity()
    sys.settrace(at_line(line, partial(gc.collect, 0)))  # of what is young, as one that comes by itself
    try:
        assert call_as(WHOLE, os.getcwd)
    finally:
        sys.settrace(None)
    assert identity() == before


DROP = """
from fusefs.linux.credentials import Capability, drop_capabilities, prepare_to_act_as_others
drop_capabilities(Capability.FSETID, Capability.SYS_RESOURCE)
"""
AS_OTHER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.setfsuid(1000)
"""
BOTH = sum(1 << capability for capability in (Capability.FSETID, Capability.SYS_RESOURCE))


def python(code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: capabilities don't come back."""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def sets_of(status: str) -> dict[str, int]:
    return {name: int(value, 16) for name, value in re.findall(r"^Cap(\w+):\s+([0-9a-f]+)$", status, re.MULTILINE)}


def test_what_is_dropped_is_in_no_set_and_nothing_else_is_lost() -> None:
    before = sets_of(Path("/proc/self/status").read_text())
    after = sets_of(python(DROP + "print(open('/proc/self/status').read())").stdout)
    assert after == {name: value & ~BOTH for name, value in before.items()}
    assert before["Eff"] & BOTH


def test_no_exec_brings_it_back() -> None:
    done = python(DROP + "import os; os.execvp('cat', ['cat', '/proc/self/status'])")
    assert all(not value & BOTH for value in sets_of(done.stdout).values())


def test_dropping_twice_is_no_error() -> None:
    assert python(DROP + DROP).returncode == 0


def test_a_write_clears_set_user_id_without_fsetid(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.touch()
    os.chown(program, 1000, 1000)
    program.chmod(0o4755)
    done = python(DROP + "import sys; open(sys.argv[1], 'w').write('other')", program)
    assert done.returncode == 0, done.stderr
    assert program.stat().st_mode & 0o7777 == 0o755


KEEPS = """
import ctypes
ctypes.CDLL(None).prctl(28, 1 << 2, 0, 0, 0)
"""


@pytest.mark.parametrize("acts", [True, False])
def test_who_acts_as_another_is_judged_as_him_though_it_was_started_to_keep_its_capabilities(
    tmp_path: Path, acts: bool
) -> None:
    (tmp_path / "closed").mkdir(0o700)
    request = "act_as_others_can(); act_as_others_can()" if acts else ""
    done = python(KEEPS + DROP + request + AS_OTHER + "os.listdir(sys.argv[1])", tmp_path / "closed")
    assert (done.returncode == 0) != acts, done.stderr
