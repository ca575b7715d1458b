"""Laws of a scene: it holds to them killed, killed twice, failing or stopped at every call that matters."""

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from fusefs.core.errors import TrashdError, from_os
from fusefs.linux.kernel import Kernel
from tests.support.covering_sets import runs_every_case, share_of
from tests.support.crash_scenarios import CrashScenario, VolumeContents, changing, deaths, stop_meanwhile
from tests.support.make_trees import snapshot
from tests.support.other_users import as_user
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt, FailingAt, NumberedCall, numbered_calls, recover_all

N_CALLS = 100_000
"""More than any act makes."""
T = TypeVar("T")
Law = Callable[[VolumeContents], object]
"""What must hold afterwards; it gets what was there before."""

_ALONE = frozenset({"fsync", "syncfs", "statfs", "listxattr", "ioctl"})
"""Calls in the middle of which nothing can be changed, or noticed: before and after them is one moment."""


def hold_when_killed(scene: CrashScenario, volume: Path, law: Law) -> None:
    """The act was killed before a call, or not at all."""
    for n, before in deaths(scene, volume):
        with _noting(partial(_describe_kill, scene, volume, n)):
            law(before)


def _describe_kill(scene: CrashScenario, volume: Path, n: int) -> str:
    scene.set_up(volume)
    calls = [call.name for call in scene.calls(volume)]
    return f"killed before call {n}: {' '.join([*calls[max(n - 6, 0) : n], '†', *calls[n : n + 3]])}"


def hold_when_killed_twice(scene: CrashScenario, volume: Path, law: Law) -> None:
    scene.set_up(volume)
    for i, n in enumerate(changing(scene.calls(volume))):
        scene.set_up(volume)
        code_of_child(partial(scene.run, volume, DyingAt(n)))
        # Recoveries after deaths that follow each other are much alike: they share their calls.
        for m in share_of(changing(numbered_calls(partial(recover_all, volume))), i, 6):
            before = scene.set_up(volume)
            code_of_child(partial(scene.run, volume, DyingAt(n)))
            code_of_child(partial(recover_all, volume, Kernel(DyingAt(m))))
            with _noting(f"killed before call {n}, its recovery before call {m}".format):
                law(before)


def spread(cases: Iterable[tuple[str, int]]) -> dict[tuple[str, int], range]:
    """Return which calls of a scene fail with an errno: each call with one of those that its scene comes with.

    With `make every` each call fails with each of them.

    Args:
        cases: a scene's name, an errno.
    """
    errnos: dict[str, list[int]] = defaultdict(list)
    for name, number in cases:
        errnos[name].append(number)
    return {
        (name, number): range(N_CALLS) if runs_every_case() else range(i, N_CALLS, len(numbers))
        for name, numbers in errnos.items()
        for i, number in enumerate(numbers)
    }


def hold_when_failing(scene: CrashScenario, volume: Path, number: int, law: Law, calls: range) -> None:
    """A call failed with that errno, or none; the act succeeded or told a clear error, and left no fd open.

    Args:
        calls: which of the act's calls fail; after the last one of them that it makes, none does.
    """
    before, made = scene.set_up(volume), snapshot(volume)
    for n in calls:
        fail = partial(_fail, scene, volume, n, number)
        with _noting(f"{os.strerror(number)} at call {n}".format):
            failed = as_user(scene.uid, fail) if scene.uid and scene.by is None else fail()
        # An act that came to nothing has left everything as it was: no need to look at that, or to make it again.
        if failed is not None and snapshot(volume) == made:
            continue
        with _noting(f"{os.strerror(number)} at call {n}, {failed}".format):
            law(before)
        if failed is None:
            return
        before, made = scene.set_up(volume), snapshot(volume)
    raise AssertionError(f"it makes more than {N_CALLS} calls")


def _fail(scene: CrashScenario, volume: Path, n: int, number: int) -> str | None:
    """The call that failed, None if the act makes fewer."""
    hook = FailingAt(n, number)
    gc.disable()  # a collection closes fds of earlier tests, and those that a leak would keep
    try:
        n_fds = len(os.listdir("/proc/self/fd"))
        message = "it succeeded"
        try:
            scene.run(volume, hook)
        except TrashdError as error:
            message = error.message()
        except OSError as error:
            message = from_os(error, volume.name).message()
        assert message
        assert len(os.listdir("/proc/self/fd")) == n_fds, "fds leaked"
    finally:
        gc.enable()
    return hook.failed


def telling(calls: Sequence[NumberedCall], case: int = 0) -> list[int]:
    """The numbers of the calls before which another process may change what comes next, and of the end.

    Every third one of them, others for each of three cases; with `make every` all.
    """
    found = [number for number, name in calls if name not in _ALONE]
    return [*share_of(found, case, 3), 1 + calls[-1].number]


def hold_when_stopped(
    scene: CrashScenario,
    volume: Path,
    meanwhile: Callable[[], T],
    law: Callable[[VolumeContents, int, T], object],
    *,
    within: Callable[[Path], AbstractContextManager[object]] = nullcontext,
    moments: Callable[[Sequence[NumberedCall]], list[int]] = telling,
) -> None:
    """The act was stopped before a call while something else ran, or that ran when it had ended.

    law      gets what was there before, the act's outcome, and what came of the other
    within   the state of the volume in which both run
    moments  the numbers of the calls before which it stops, and of the end
    """
    scene.set_up(volume)
    with within(volume):
        calls = scene.calls(volume)
    for n in moments(calls):
        before = scene.set_up(volume)
        with _noting(f"stopped before call {n}".format):
            with within(volume):
                code, other = stop_meanwhile(scene, volume, n, meanwhile)
            law(before, code, other)


@contextmanager
def _noting(describe: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(describe())
        raise
