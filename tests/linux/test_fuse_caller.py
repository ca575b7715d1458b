"""What /proc tells of a caller: of its thread, at that moment, and only if it acts as itself."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fusefs.core.fuse_protocol import CallerIds
from fusefs.linux.credentials import Capability, ThreadCredentials, call_as, include_all_ours
from fusefs.linux.fuse_caller import Rights, is_capable, maps_ids, read_rights
from tests.support.other_users import become
from tests.support.privileges import FIRST, HE, as_root_in_there, keep_only

pytestmark = pytest.mark.needs("root")

TEAM = (72_100, 72_101, 72_102)


@contextmanager
def somebody(become_him: Callable[[], None]) -> Iterator[int]:
    """A process that has become another user, and waits."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_him()
            os.close(go[1])
            os.write(ready[1], b".")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(go[0])
    try:
        assert os.read(ready[0], 1)
        yield pid
    finally:
        os.close(go[1])
        os.close(ready[0])
        os.waitpid(pid, 0)


def rights(uid: int, pid: int, gid: int | None = None) -> Rights:
    return read_rights(CallerIds(uid, uid if gid is None else gid, pid))


def test_a_users_groups_are_his() -> None:
    with somebody(lambda: become(HE, groups=TEAM)) as pid:
        assert rights(HE, pid) == Rights(TEAM, 0, is_in_our_namespace=False)


def test_more_groups_than_one_read_brings_are_his() -> None:
    many = tuple(range(100_000, 100_000 + 5_000))
    with somebody(lambda: become(HE, groups=many)) as pid:
        assert rights(HE, pid).groups == many


def test_who_has_one_capability_has_that() -> None:
    with somebody(lambda: keep_only(Capability.FOWNER)) as pid:
        assert rights(HE, pid) == Rights((), 1 << Capability.FOWNER, is_in_our_namespace=True)


def test_root_has_all_and_without_them_none() -> None:
    assert include_all_ours(rights(0, os.getpid()).capabilities)
    with somebody(lambda: become(0)) as pid:
        assert rights(0, pid).capabilities == 0


@pytest.mark.needs("userns")
def test_roots_of_user_namespaces_are_not_ours() -> None:
    with somebody(as_root_in_there) as pid:
        found = rights(FIRST, pid)
        assert (include_all_ours(found.capabilities), found.is_in_our_namespace) == (True, False)
        him = CallerIds(FIRST, FIRST, pid)
        assert not is_capable(him, Capability.FSETID)
        assert maps_ids(him, FIRST + 1, FIRST + 1)
        assert not maps_ids(him, HE, FIRST + 1)
        assert not maps_ids(him, FIRST, HE)


@pytest.mark.parametrize("ids", [(HE + 1, HE), (HE, HE + 1)])
def test_who_acts_as_somebody_else_has_nothing_of_his_own(ids: tuple[int, int]) -> None:
    with somebody(lambda: become(HE, groups=TEAM)) as pid:
        assert rights(ids[0], pid, ids[1]) == Rights()


def test_what_acts_as_root_is_roots() -> None:
    with somebody(lambda: become(HE)) as pid:
        found = rights(0, pid)
        assert (include_all_ours(found.capabilities), found.is_in_our_namespace) == (True, True)


def test_who_is_not_to_be_seen_has_nothing() -> None:
    """In another pid namespace the caller is number 0; or it has ended."""
    with somebody(lambda: become(HE)) as pid:
        pass
    assert [rights(uid, number) for uid in (0, HE) for number in (0, -1, pid)] == [Rights()] * 6


def test_a_threads_groups_are_not_those_of_its_process() -> None:
    told: list[Rights] = []

    def ask() -> None:
        call_as(ThreadCredentials(HE, HE, TEAM), lambda: told.append(rights(HE, threading.get_native_id())))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert told[0].groups == TEAM
