"""What the watches on a user's folder report about orphans whose child ended during its work."""

from pathlib import Path
from typing import cast

import pytest
import trio

from fusefs.linux.kernel import Kernel
from fusefs.service.folder_watch import FolderWatches
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.messages import DueContainer, ReadRecords, Reap
from fusefs.service.open_volume import open_volume
from fusefs.service.shared_context import ServiceContext, boot_s
from fusefs.service.user_state import UserState
from fusefs.store.layout import FOLDERS
from tests.support.read_configs import read_config
from tests.support.small_orphans import orphan_in
from tests.support.store_verbs import folder_of, own, raw

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(60)]


def make_parts(volume: Path) -> None:
    """All directories of root's folder, as a child makes them before anything is watched."""
    with own(volume) as folder:
        for name in FOLDERS:
            folder.open(name).close()


async def deliver(watcher: InotifyWatches) -> None:
    """Deliver all events that the kernel has queued."""
    with trio.move_on_after(0.2):
        await watcher.dispatch_events()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_orphan_claimed_by_a_child_that_died_is_reaped_however_late_the_claim_is_reported(
    volume: Path, is_late: bool
) -> None:
    identifier = str(orphan_in(volume).id)
    make_parts(volume)
    with InotifyWatches() as watcher, open_volume(Kernel(), raw(volume)) as opened:
        base = opened.store.path()
        user = UserState(0, base, lambda: 10, 0)
        context = ServiceContext(
            cast(Forker, None), watcher, read_config([]), b"/nowhere", lambda _: None, lambda: None
        )
        watches = FolderWatches(context, raw(volume), lambda: None)
        watches.watch_users(opened.store, {0: user})
        assert watches.is_complete(0)
        user.tend_at_s = float("inf")
        user.parts[base].upcoming.add(DueContainer(identifier, None), 0.0)
        user.parts[base].note_page("", boot_s(), 0)
        order = user.next_order(boot_s())
        assert isinstance(order, Reap)
        user.note_ordered(order.ids())
        folder = folder_of(volume, 0)
        (folder / "orphans" / identifier).rename(folder / "reaping" / identifier)
        if not is_late:
            trio.run(deliver, watcher)
        user.take_back_order(order)
        user.put_back(boot_s())
        if is_late:
            trio.run(deliver, watcher)
    following = user.next_order(boot_s())
    expected = ReadRecords(base, ids=[identifier]) if is_late else order
    assert following == expected
