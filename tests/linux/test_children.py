"""Children: how they end, and questions that may never be answered, whose child holds nothing that others wait for."""

import errno
import os
import signal
from collections.abc import Hashable
from pathlib import Path

import pytest

from fusefs.linux.children import UserCredentials, ask_each, fork, is_stopped
from tests.support.fuse_silent import silent_fuse
from tests.support.real_filesystems import tmpfs_volume


def answers(*questions: str, silent: set[Hashable] | None = None) -> list[bytes | None]:
    """What becomes of questions that say what to do; they are put at the place that their first letter names."""

    def ask(question: str) -> bytes:
        match question[1:]:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "die":
                os._exit(1)
            case "fall":
                raise ValueError
        return question.encode()

    asked = ask_each(questions, ask, set() if silent is None else silent, lambda question: question[0])
    return [answer for _question, answer in asked]


def test_each_has_its_answer() -> None:
    assert answers("a1", "b2", "a3") == [b"a1", b"b2", b"a3"]
    assert answers() == []


def test_who_does_not_answer_is_passed_over_and_all_else_that_is_asked_there() -> None:
    silent: set[Hashable] = set()
    assert answers("a1", "bstop", "b3", "c4", silent=silent) == [b"a1", None, None, b"c4"]
    assert silent == {"b"}


def test_who_is_known_to_be_silent_is_not_asked() -> None:
    assert answers("bstop", "c1", silent={"b"}) == [None, b"c1"]


def test_a_place_that_another_finds_silent_meanwhile_shifts_no_answer() -> None:
    silent: set[Hashable] = set()
    asked = ask_each(("a1", "b2", "c3"), str.encode, silent, lambda question: question[0])
    first = next(asked)
    silent.add("b")
    assert [first, *asked] == [("a1", b"a1"), ("b2", None), ("c3", b"c3")]


@pytest.mark.parametrize("end", ["die", "fall"])
def test_a_question_that_ends_its_child_keeps_no_other_from_being_asked(end: str) -> None:
    assert answers("a1", "b" + end, "b2", "c3") == [b"a1", b"", b"b2", b"c3"]


def test_nothing_of_ours_is_open_in_the_child() -> None:
    kept, held = os.pipe()
    try:
        ((_question, told),) = ask_each(
            ("",), lambda _question: " ".join(os.listdir("/proc/self/fd")).encode(), set(), lambda _question: 0
        )
        assert told is not None
        assert not {str(kept), str(held)} & set(told.decode().split())
    finally:
        os.close(kept)
        os.close(held)


@pytest.mark.parametrize("error", [None, PermissionError(errno.EPERM, ""), ValueError()])
def test_a_child_exits_with_the_errno_of_its_error(error: Exception | None) -> None:
    def live() -> None:
        if error is not None:
            raise error

    _pid, status = os.waitpid(fork(live), 0)
    assert os.waitstatus_to_exitcode(status) == (getattr(error, "errno", 255) if error else 0)


def test_a_detached_child_has_the_fds_that_it_is_given_from_3_on() -> None:
    ours, theirs = os.pipe()
    pid = fork(lambda: os.write(3, b"%d" % (os.getsid(0) == os.getpid())), [theirs])
    os.close(theirs)
    with open(ours, "rb") as pipe:
        assert pipe.read() == b"1"
    os.waitpid(pid, 0)


def test_a_stopped_child_is_noticed_and_one_that_goes_on() -> None:
    pid = fork(signal.pause)
    try:
        assert not is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        assert is_stopped(pid)
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, os.WCONTINUED)
        assert not is_stopped(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not is_stopped(pid)


@pytest.mark.needs("root")
def test_it_is_asked_as_whoever_is_named_with_his_home() -> None:
    person = UserCredentials(4711, 4711, [], b"/home/him")
    ((_question, told),) = ask_each(
        ("HOME",), lambda name: f"{os.geteuid()} {os.environ[name]}".encode(), set(), lambda _question: 0, person
    )
    assert told == b"4711 /home/him"


@pytest.mark.needs("root", "fuse")
def test_who_waits_beyond_sigkill_is_left_behind() -> None:
    with tmpfs_volume() as volume:
        places = [volume / "dead", volume / "alive"]
        for place in places:
            place.mkdir()
        with silent_fuse(places[0], 0):
            asked = ask_each(places, _names_in, set(), lambda place: place)
            assert [answer for _place, answer in asked] == [None, b"0"]


def _names_in(place: Path) -> bytes:
    return b"%d" % len(os.listdir(place))
