"""The reaper's work whose power is cut, the service's own operations among it; and all scenarios."""

from contextlib import closing, suppress

from fusefs.core.names import ContainerId
from fusefs.core.pacing import RateCaps
from fusefs.engine.pace import PressurePacer
from fusefs.linux.kernel import CallHook, Kernel
from fusefs.service.open_volume import open_volume
from fusefs.service.orphan_schedule import RootTakeover
from fusefs.service.work_session import take_over
from fusefs.store.orphans import RetentionFromNow, change_retention, find_container
from tests.crash.powerfail_invariants import Shape
from tests.crash.powerfail_work import KEEPING, USER, VERBS, Cut, Scenario
from tests.support.store_verbs import folder_of, raw, reap_now, restore, swap


class _Stopped(BaseException):
    """The end of a reaper in the middle of its work."""


def _stop_at(n: int, call: str) -> CallHook:
    left = n

    def hook(name: str) -> None:
        nonlocal left
        left -= name == call
        if left < 0:
            raise _Stopped

    return hook


def reap_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.REAPED)
    assert reap_now(cut.base, identifier, cut.kernel).report.n_failed == 0


def service_reap_round(cut: Cut, k: int) -> None:
    """A reap as the service does it: behind its lock, beside its probe, in two parts."""
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.REAPED)
    with open_volume(cut.kernel, raw(cut.base)) as volume:
        with suppress(_Stopped):
            reap_now(cut.base, identifier, Kernel(_stop_at(2, "unlink")))
        with closing(PressurePacer(cut.kernel, volume.hold, RateCaps())) as pacer:
            pacer.probe()
        assert reap_now(cut.base, identifier, cut.kernel).report.n_failed == 0


def keep_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    entry = find_container(cut.kernel, [raw(cut.base)], identifier)
    change_retention(cut.kernel, [raw(cut.base)], entry, RetentionFromNow(None))
    cut.volume.mark(f"pinned {k}")


def take_over_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    cut.may(k, Shape.SWAPPED)
    identifier = cut.as_its_user(lambda: str(swap(cut.name(k), cut.kernel).id))
    folder = folder_of(cut.base, cut.uid)
    (folder / "orphans" / identifier).rename(folder / "quarantine" / identifier)
    cut.stands(k, Shape.SWAPPED, sync=True)
    cut.may(k, Shape.TAKEN)
    with open_volume(cut.kernel, raw(cut.base)) as volume:
        volume.users()  # root registers the folder, as the service does before it has anything done
        assert take_over(
            volume, RootTakeover(cut.uid, raw(cut.base / ".trashd"), ContainerId(identifier), by_force=False)
        )
    cut.stands(k, Shape.TAKEN)


def restore_half_reaped_round(cut: Cut, k: int) -> None:
    cut.begin(k)
    identifier = cut.swapped(k)
    cut.may(k, Shape.REAPED)
    with suppress(_Stopped):
        reap_now(cut.base, identifier, Kernel(_stop_at(2, "unlink")))  # the first one asks what the tree is
    cut.stands(k, Shape.HALF, sync=True)
    cut.may(k, Shape.HALF_HOME)
    assert restore(cut.base, identifier, cut.kernel).partial
    cut.stands(k, Shape.HALF_HOME)


SCENARIOS = {
    **VERBS,
    **KEEPING,
    "restore of half": Scenario(restore_half_reaped_round, n_rounds=1),
    "reap": Scenario(reap_round),
    "reap by the service": Scenario(service_reap_round),
    "keep": Scenario(keep_round),
    "take over": Scenario(take_over_round, n_rounds=1, uid=USER),
}
