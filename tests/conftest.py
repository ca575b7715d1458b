"""Rules for every test: hypothesis profiles, what the machine must offer, no WARNING but a declared one."""

import gc
import importlib
import logging
import os
import pkgutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import fusefs
from tests.support import machine_capabilities
from tests.support.cheap_forks import Growth, ease_each_fork, ease_forks
from tests.support.covering_sets import EVERY_CASE, choose_pairwise, split_axes
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.store_verbs import tmpfs_store
from tests.support.user_homes import forget_stores

PAGES = Path(__file__).parents[1] / "build/man"
"""The man pages, which `trashd service install` of a checkout puts in place."""
IN_CI = bool(os.environ.get("CI"))
VITAL_GROUPS = ("crash", "mount", "posix", "systemd")
QUICK_GROUPS = ("unit", "linux")
EVERY_CALL_GROUPS = ("crash",)
DEMANDED_GROUPS = os.environ.get("TRASHD_TEST_DEMANDED", "").split()
"""Of these a test fails where the machine lacks what it needs: `make shared`."""

N_LEFT_OUT = pytest.StashKey[int]()
"""Cases that --every would have run as well."""
N_COST = pytest.StashKey[Counter[str]]()
"""Tests skipped, by the capability that they missed and why the process that would have run them misses it."""
_LACKS, _LEFT_OUT, _TOLD = "lacks", "left out", "told"
TOLD = pytest.StashKey[list[str]]()
"""What tests have to say to people though they passed: record_property("told", …)."""
GROWTH = pytest.StashKey[Growth]()
N_RUN = pytest.StashKey[Counter[str]]()
"""Tests that ran to their end, by group: neither skipped on the way nor failed."""

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), print_blob=True, database=None)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=20_000, stateful_step_count=200)
settings.load_profile("ci" if IN_CI else "dev")


class _Warnings(logging.Handler):
    """Collects what a test logs at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        action="store_true",
        help="run every case, not only a covering set of a test with three axes and more",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[N_COST] = Counter()
    config.stash[TOLD] = []
    config.stash[N_LEFT_OUT] = 0
    config.stash[N_RUN] = Counter()
    if config.option.every:
        os.environ[EVERY_CASE] = "1"  # modules of tests ask for it when they are imported
    # Run in the background of a script, all that we start ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _runs_tests(config):
        _hide_machine()
    if hasattr(config, "workerinput"):
        os.setsid()  # sessions share the processors fairly (sched(7), autogroup): else no reap, idle, ran beside it


def _runs_tests(config: pytest.Config) -> bool:
    """Return whether tests run in this process, which controls no workers."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


def _hide_machine() -> None:
    """What one worker mounts would be another's volume to look for stores on, what it registers a store to follow."""
    if machine_capabilities.why_missing("root") is None:
        see_own_mounts_only()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and not PAGES.exists():
        subprocess.run([sys.executable, "-m", "build_docs", "man", PAGES], cwd=PAGES.parents[1], check=True)
    session.config.pluginmanager.register(_Tally(session.config))


class _Tally:
    """Counts by the reports, which come from all workers, what ran and what could not."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._config.stash[TOLD] += [str(what) for name, what in report.user_properties if name == _TOLD]
        if report.when == "call" and report.passed:
            self._config.stash[N_RUN][_group_of(report.nodeid)] += 1
        if report.when == "setup":
            self._config.stash[N_COST].update(str(what) for name, what in report.user_properties if name == _LACKS)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._config.stash[N_LEFT_OUT] = getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0)


def _group_of(nodeid: str) -> str:
    return nodeid.removeprefix("tests/").partition("/")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests without the collector of garbage, which would visit all those before again and again.

    The product is imported before: what commands write to after their fork lies in few pages, not among the tests.
    """
    if _runs_tests(session.config) and not session.config.option.collectonly:
        _import_product()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.every:
        left_out = _find_redundant(items)
        config.stash[N_LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items[:] = _long_first(items, getattr(config, "workerinput", {}).get("workercount", 1))
    for item in items:
        if _group_of(item.nodeid) in QUICK_GROUPS and item.get_closest_marker("long") is None:
            item.add_marker("quick")
        if _group_of(item.nodeid) in EVERY_CALL_GROUPS:
            item.add_marker("no_cover")  # it doubles their time, and they run what others ran
        for marker in item.iter_markers("needs"):
            if unknown := set(marker.args) - set(machine_capabilities.PROBES):
                raise pytest.UsageError(f"{item.nodeid}: no such capability: {', '.join(sorted(unknown))}")


def _find_redundant(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Find what `make every` alone runs; the same in each worker and in each run.

    That is what has its marker, and the cases whose pairs of parameters other cases have as well.
    """
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    redundant = {item for item in items if item.get_closest_marker("every")}
    for cases in tests.values():
        kept = [number for number, item in enumerate(cases) if item.get_closest_marker("always")]
        values = [dict(split_axes(item.callspec.params)) for item in cases]
        chosen = choose_pairwise(values, kept)
        redundant |= {*cases} - {cases[number] for number in chosen}
    return redundant


def _long_first(items: list[pytest.Item], n_workers: int) -> list[pytest.Item]:
    """Alike in each worker: what takes longest is begun first, or one worker would be at it when all others are done.

    Source  xdist's worksteal deals its workers one equal part each, of tests that follow each other
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    dealt: list[pytest.Item] = []
    for worker in range(n_workers):
        n_dealt = (len(items) - len(dealt)) // (n_workers - worker)
        first = long[worker::n_workers]
        dealt += [*first, *islice(others, max(n_dealt - len(first), 0))]
    return [*dealt, *others]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.items and not session.config.option.collectonly:
        ease_forks()
        ease_each_fork()
        session.config.stash[GROWTH] = Growth()


def _import_product() -> None:
    """Import all modules of fusefs, so that no forked command has to."""
    for module in pkgutil.walk_packages(fusefs.__path__, "fusefs."):
        importlib.import_module(module.name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = dict.fromkeys(capability for marker in item.iter_markers("needs") for capability in marker.args)
    missing = {capability: why for capability in needed if (why := machine_capabilities.why_missing(capability))}
    if missing:
        item.user_properties += [(_LACKS, f"{capability}: {why}") for capability, why in missing.items()]
        is_demanded = _group_of(item.nodeid) in DEMANDED_GROUPS
        (pytest.fail if is_demanded else pytest.skip)(f"this machine lacks: {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Where coverage is measured (make coverage), commands and daemons of the sample count; all would take too long.

    Root's registry is each test's own: whoever registers a store looks for all others, of which all are gone.
    """
    if "COVERAGE_FILE" in os.environ and any(marker.args for marker in item.iter_markers("quick")):
        os.environ["COVERAGE_PROCESS_START"] = str(item.config.rootpath / ".ci/coverage")
    try:
        return (yield)
    finally:
        os.environ.pop("COVERAGE_PROCESS_START", None)
        forget_stores()
        if hasattr(item.config, "workerinput") and (nextitem is None or nextitem.path != item.path):
            item.config.stash[GROWTH].undo()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(warnings)
    if warnings.messages and item.get_closest_marker("allows_warnings") is None:
        pytest.fail("logged without being declared:\n" + "\n".join(warnings.messages), pytrace=False)


def _list_idle_groups(config: pytest.Config) -> list[str]:
    """Name the groups that must run in CI and did not."""
    if not IN_CI or config.option.collectonly:
        return []
    there = (group for group in VITAL_GROUPS if Path(__file__).with_name(group).is_dir())
    return [group for group in there if not config.stash[N_RUN][group]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_LEFT_OUT] = session.config.stash[N_LEFT_OUT]
    if _list_idle_groups(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cost = config.stash[N_COST]
    if cost:
        terminalreporter.section("NOT RUN ON THIS MACHINE", sep="!", red=True, bold=True)
    for lacking, n_tests in cost.most_common():
        terminalreporter.line(f"{n_tests:5} without {lacking}")
    if n_left_out := config.stash[N_LEFT_OUT]:
        terminalreporter.line(f"{n_left_out:,} cases were left out, which `make every` has")
    for told in config.stash[TOLD]:
        terminalreporter.line(f"WARNING: {told}", yellow=True, bold=True)
    for group in _list_idle_groups(config):
        terminalreporter.line(f"CI fails: no test of tests/{group} ran", red=True, bold=True)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A tmpfs with a store; in the end the checker has nothing to say. Some directories and files have their own."""
    with tmpfs_store() as path:
        yield path
