"""One mount for the tests of a file, on tmpfs and on ext4; each test has a directory of its own in it."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from _pytest.fixtures import SubRequest

from fusefs.mount.places import attach
from tests.support import transports
from tests.support.background_mounts import workbench
from tests.support.covering_sets import MAIN_TRANSPORT
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.fuse_watchdog import device_for_all
from tests.support.mount_and_backing import Sides
from tests.support.oracle import DIRECT, Arena, Oracle, Way, arena_on
from tests.support.passthrough_files import LIMIT_S, stored_volume
from tests.support.privileges import WAYS, mount_and_behind
from tests.support.real_filesystems import bind_mount, loop_volume, tmpfs_volume

LOGINS = Path("/run/user")
_NUMBERS = itertools.count()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out in plain mode the tests of what takes the engine."""
    left_out = [item for item in items if item.get_closest_marker("takes_engine") and is_plain(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def is_plain(item: pytest.Item) -> bool:
    """Whether the mounts of a test are in plain mode."""
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else callspec.params.values()
    return transports.is_plain() or any(transports.PLAIN in (one, getattr(one, "transport", "")) for one in values)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run some modules over each transport, unless this run has one alone."""
    others = transports.values_of(metafunc.module.__name__.rpartition(".")[2])
    if others and transports.VARIABLE not in os.environ:
        metafunc.parametrize("over_transport", [MAIN_TRANSPORT, *others], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def over_transport(request: pytest.FixtureRequest) -> Iterator[None]:
    """Mounts of this module get their requests as its parameter says."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request, "param", MAIN_TRANSPORT) != MAIN_TRANSPORT:
            patch.setenv(transports.VARIABLE, request.param)
        yield


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: SubRequest) -> None:
    """End the fixtures of a module, mounts above all, when its transport changes."""
    if fixturedef.scope == "module" and fixturedef.argname != "over_transport":
        transport = request._get_active_fixturedef("over_transport")
        transport.addfinalizer(partial(fixturedef.finish, request=request))


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem that gives a free inode number to the next file at once."""
    with tmpfs_volume("512m") if request.param == "tmpfs" else loop_volume(request.param, 512) as path:
        yield path


@pytest.fixture(scope="module")
def arena(volume: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The places of the oracle; what their daemon has open at the end, it had at the start.

    Its parameter, if it has one: a Way, as of oracle.EACH_WAY
    """
    options = getattr(request, "param", Way()).options()
    place = Path(tempfile.mkdtemp(prefix="arena-", dir=volume))  # it may be asked for again, in another order
    place.chmod(0o755)
    source = place / "mount"
    source.mkdir()
    with (
        trashd_mount(source, options=("coherence=exclusive", *options), limit_s=SHARED_LIMIT_S) as mounted,
        arena_on(place, mounted, has_players=not options) as arena,
    ):
        yield arena


@pytest.fixture(scope="module", params=[pytest.param(how, marks=marks) for how, marks in DIRECT.items()])
def mounted(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Every user may make files there; the kernel believes attributes for an hour."""
    source = Path(tempfile.mkdtemp(prefix="mounted-", dir=volume))
    source.chmod(0o1777)
    with trashd_mount(source, options=["coherence=exclusive", request.param], limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def own_name() -> str:
    """For what is a test's own in what a module shares: nothing has asked a mount for that name."""
    return f"case-{next(_NUMBERS)}"


@pytest.fixture
def oracle(arena: Arena, own_name: str) -> Iterator[Oracle]:
    """Fresh directories; in the end the vfs knows nothing of what is forgotten."""
    with arena.oracle(os.fsencode(own_name)) as oracle:
        yield oracle


@pytest.fixture(scope="module", params=WAYS)
def users_sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """A directory for all users, in each of the ways, and in "opened" on request."""
    with mount_and_behind(request.param) as both:
        yield Sides(*both)


@pytest.fixture
def source() -> Iterator[Path]:
    """With a store, in a filesystem of its own."""
    with stored_volume() as path:
        yield path


@pytest.fixture(params=["local", "slow"])
def mount(source: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Slow: operations go to threads, and several opens of a file are under way at a time."""
    options = ["coherence=exclusive", f"backing={request.param}"]
    with trashd_mount(source, options=options, limit_s=LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trashd umount --force` kills a daemon that does not end in half a second; users' in five."""
    monkeypatch.setattr(attach, "_DAEMON_TIMEOUT_S", 0.5)


@pytest.fixture
def bench() -> Iterator[Path]:
    """With `source/file` and an empty `target`, for mounts in the background."""
    with workbench() as path:
        yield path


@pytest.fixture
def users_bench() -> Iterator[Path]:
    """A bench, all of it user 1000's, with a runtime directory `run`; /dev/fuse is open to all, as udev makes it."""
    with workbench() as path, device_for_all() as devices, ExitStack() as stack:
        (path / "run").mkdir(mode=0o700)
        for one in (path, path / "source", path / "source/file", path / "target", path / "run"):
            os.chown(one, 1000, 1000)
        if LOGINS.exists():  # a user who is logged in here has a runtime directory without being told of it
            stack.enter_context(bind_mount(devices, LOGINS))
        yield path


@pytest.fixture
def place() -> Iterator[Path]:
    """Beside the mount."""
    with tempfile.TemporaryDirectory(prefix="trashd-loop-") as path:
        yield Path(path)
