"""Apply a plan's rules, or show what they would do: one rule after another, directory by directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from heapq import nlargest, nsmallest
from typing import NamedTuple

from fusefs.core.errors import AcrossUsers, NotFound, OtherFilesystem, Refused, TrashdError, errors_about, from_os
from fusefs.core.human_units import SECOND_NS
from fusefs.core.pacing import UNLIMITED, Speed
from fusefs.core.plan_rules import (
    DeleteAction,
    MoveAction,
    PurgeListsResult,
    Rule,
    RuleOutcome,
    RuleResult,
    SkippedRule,
    TrashAction,
)
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.results import NOT_TAKEN, SHOWN_MATCHES_MAX, Match, ReportedMark, ShouldStop, Spared, SweepSums, Swept
from fusefs.core.selection import KINDS, Matcher, Selection
from fusefs.engine.pace import Pacer, open_pacer
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.plan.keep_protection import Locking, why_spared
from fusefs.plan.purge_lists import CountedPurges, open_lists
from fusefs.plan.units import Judged, Unit, Young, judge_units, open_quietly, time_of
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.stage import SwapOptions
from fusefs.store.victim import scope_of
from fusefs.store.walk import SeenDirectories, load_seen_directories, must_check_owners
from fusefs.sweep.actions import format_rsync_command
from fusefs.sweep.agenda import SliceCounts
from fusefs.sweep.open_directories import MatchedDirectory, SkippedDirectory, find_directories
from fusefs.sweep.request import (
    Action,
    ActionPlace,
    Identified,
    IfExists,
    Request,
    SweepOptions,
    TakingBoundary,
    ToCount,
    ToDelete,
    ToMove,
    ToPrint,
    ToTrash,
    identify,
    refuse_stale,
)
from fusefs.sweep.run_sweep import DEFAULT_SWEEP, run_request

_ALL = Selection(types=frozenset(KINDS))


_Ways = Mapping[bytes, frozenset[Identified]]
"""For each directory of purge lists, that directory and all directories above it."""


class PlanOptions(NamedTuple):
    """Options for applying rules.

    runs    apply the rules; otherwise only report what they would do
    now_ns  the time to which ages are relative
    most    the maximum speed
    report_pace  called with a sentence when the run starts and stops yielding to other users of the disk; None: never
                 yield
    """

    runs: bool
    now_ns: int
    wishes: SweepOptions = DEFAULT_SWEEP
    most: Speed = UNLIMITED
    report_pace: Callable[[str], None] | None = None


def carry_out(kernel: Kernel, rules: Sequence[Rule], how: PlanOptions) -> Iterator[RuleOutcome]:
    """Apply rules in order and yield the result for each directory of each rule.

    If the run is stopped, the purge lists remain as they were. If a directory fails, the lists are still published, but
    marked as incomplete.
    Raises  TrashdError, before anything is changed: a directory for purge lists can't be used
    """
    with ExitStack() as owned:
        paths = dict.fromkeys(rule.purge.directory for rule in rules if rule.purge is not None)
        lists = {path: owned.enter_context(open_lists(kernel, path, writes=how.runs)) for path in paths}
        pacers = _Pacers(kernel, how, owned)
        ways = {path: one.way for path, one in lists.items()}
        with errors_about("can't read the list of directories that earlier runs found"):
            seen_directories = owned.enter_context(load_seen_directories()) if must_check_owners() else None
        for rule in rules:
            listed = CountedPurges() if rule.purge is None else lists[rule.purge.directory]
            for result in _carry_out(kernel, rule, how, pacers, listed, ways, seen_directories):
                # A missing directory contains no files. Any other failed one may contain files that are not listed.
                is_failed = isinstance(result, SkippedRule) and not isinstance(result.error, NotFound | None)
                if rule.purge is not None and is_failed:
                    listed.lack()
                yield result
            if how.wishes.stops():
                return
        for path, one in lists.items():
            yield _publish(path, one)
        if seen_directories is not None and how.runs:
            with errors_about("can't save the list of directories that this run found"):
                seen_directories.save()


def _publish(path: bytes, lists: CountedPurges) -> PurgeListsResult:
    try:
        return PurgeListsResult(path, lists.publish(), lists.n_entries, is_whole=lists.is_whole)
    except (TrashdError, OSError) as error:
        return PurgeListsResult(path, 0, 0, from_os(error, path))


class _Pacers:
    """One pacer for each filesystem, because the load on one does not affect the others."""

    def __init__(self, kernel: Kernel, how: PlanOptions, owned: ExitStack) -> None:
        """owned: closes the pacers at the end"""
        self._kernel = kernel
        self._how = how
        self._owned = owned
        self._pacer: dict[int, Pacer] = {}

    def on(self, directory: Fd) -> Pacer:
        device = self._kernel.fstat(directory).st_dev
        if device not in self._pacer:
            fd = self._owned.enter_context(self._kernel.reopen(directory, os.O_PATH | os.O_DIRECTORY))
            pacer = open_pacer(self._kernel, fd, self._how.most, self._how.report_pace)
            self._pacer[device] = self._owned.enter_context(pacer)
        return self._pacer[device]


def _carry_out(
    kernel: Kernel,
    rule: Rule,
    how: PlanOptions,
    pacers: _Pacers,
    lists: CountedPurges,
    ways: _Ways,
    seen_directories: SeenDirectories | None,
) -> Iterator[RuleResult | SkippedRule]:
    is_any = False
    seen_directories = None if seen_directories is None else seen_directories._replace(rule=rule.directory)
    for found in find_directories(kernel, rule.directory, None, seen_directories):
        if how.wishes.stops():
            return
        is_any = True
        if isinstance(found, SkippedDirectory):
            yield SkippedRule(rule, found.path, found.why)
            continue
        if must_check_owners() and found.whose is None:
            hint = "the next run takes files from this directory; if it does not belong there, move it back before then"
            error = AcrossUsers(found.path, hint)
            yield SkippedRule(rule, found.path, NOT_TAKEN, error)
            continue
        try:
            with scope_of(kernel, found.fd, found.path) as scope:
                _check_holds_none(kernel, scope, ways)
                if not rule.trusts_atime:
                    key = "trusts_atime = true in the rule"
                    refuse_stale(scope, rule.times(), how.now_ns, takes_dirs=rule.uses_directory_times(), key=key)
                there = how._replace(wishes=how.wishes._replace(pacer=pacers.on(found.fd)))
                one = _RuleRun(kernel, rule, there, lists, found, scope, seen_directories)
                yield RuleResult(rule, one.units() if rule.is_unit else one.entries())
                if rule.purge is not None and not rule.is_unit and not how.wishes.stops():
                    one.list_soon()
        except OtherFilesystem as error:
            converted: TrashdError = OtherFilesystem(error.detail, _rsync_line(rule, found.path))
            yield SkippedRule(rule, found.path, converted.message_about(printable(found.path)), converted)
        except (TrashdError, OSError) as error:
            converted = from_os(error, found.path)
            yield SkippedRule(rule, found.path, converted.message_about(printable(found.path)), converted)
    if not is_any:
        yield SkippedRule(rule, rule.directory, "no such directory")


def _check_holds_none(kernel: Kernel, scope: Scope, ways: _Ways) -> None:
    """Refuse a directory that contains purge lists, which the rule would take or list. Raises  Refused"""
    for side in scope.sides:
        here = None if side is None else identify(kernel, side)
        for path, way in ways.items():
            if here in way:
                hint = "put purge lists into a directory that no rule sweeps, such as /var/spool/trashd"
                raise Refused(f"{printable(scope.path())}: contains the purge lists in {printable(path)}", hint)


def _why_unlisted(kernel: Kernel, sides: BackingAndMount, since_ns: int | None) -> str | ReportedMark | None:
    """Return the reason why a directory is spared. Ignore marks that don't count, since the run itself reports them."""
    why = why_spared(kernel, sides, holds=False, since_ns=since_ns)
    return why if not isinstance(why, ReportedMark) or why.is_spared else None


class _RuleRun:
    """Applies one rule in one directory."""

    def __init__(
        self,
        kernel: Kernel,
        rule: Rule,
        how: PlanOptions,
        lists: CountedPurges,
        found: MatchedDirectory,
        scope: Scope,
        seen_directories: SeenDirectories | None,
    ) -> None:
        self._kernel = kernel
        self._rule = rule
        self._how = how
        self._lists = lists
        self._scope = scope
        self._since_ns = None if rule.age is None else rule.age.before_ns
        self._ahead_ns = 0 if rule.purge is None else rule.purge.ahead_s * SECOND_NS
        # The engine opens the path again, and checks that it still leads to this directory.
        here = identify(kernel, scope.sides.names_fd())
        boundary = (
            None if found.whose is None else TakingBoundary(found.whose, seen_directories, is_judged=rule.is_unit)
        )
        self._boundary = boundary if must_check_owners() else None
        self._request = Request(
            found.path, rule.selection, _act(rule), most=rule.most, inode=here, boundary=self._boundary
        )

    def entries(self) -> Swept:
        """Apply the rule to each entry, at any depth."""
        spares = partial(why_spared, holds=self._how.runs, since_ns=self._since_ns)
        request = self._request._replace(spares=spares, wraps=self._locking(is_guarded=True))
        if not self._how.runs:
            request = request._replace(action=ToCount(_act(self._rule)))
        return run_request(self._kernel, request, self._how.wishes)

    def list_soon(self) -> None:
        """Add the entries that will expire soon to the purge lists."""
        listing = self._request._replace(
            selection=self._rule.upcoming_selection(), action=ToPrint(self._list), most=None
        )
        since_ns = None if self._since_ns is None else self._since_ns + self._ahead_ns
        listing = listing._replace(spares=partial(_why_unlisted, since_ns=since_ns))
        swept = run_request(self._kernel, listing, self._how.wishes._replace(progress=lambda _sums: None))
        if swept.sums.n_failed or swept.why:
            self._lists.lack()

    def units(self) -> Swept:
        """Apply the rule to the directory's units, each as a whole."""
        assert self._rule.age is not None
        sides, age, stops = self._scope.sides, self._rule.age, self._how.wishes.stops
        with open_quietly(self._kernel, sides.fd, b".") as fd:
            both, since_ns = BackingAndMount(fd, sides.mounted), self._since_ns
            why = why_spared(self._kernel, both, holds=self._how.runs, since_ns=since_ns)
            if isinstance(why, str):
                return Swept(self._scope.path(), SweepSums(n_spared=1), spared=(Spared(b"", why),))
            sieve = _UnitSorter(self._scope.path(), age.before_ns, self._due_ns, self._lists)
            if why is not None:
                sieve.tally.fail(b"", errno.EPERM, why.why)
                if why.is_spared:
                    return sieve.complete(Swept(self._scope.path(), SweepSums()))
            soon = age._replace(before_ns=age.before_ns + self._ahead_ns)
            judged = judge_units(self._kernel, sides, Matcher(self._rule.selection), soon, stops, self._boundary)
            swept = self._take(sieve, judged) if self._how.runs else sieve.would_take(judged, self._rule.most, stops)
            if swept.is_limited or swept.why:
                self._lists.lack()  # the remaining units were not judged
            return swept

    def _take(self, sieve: _UnitSorter, judged: Iterator[Judged]) -> Swept:
        wraps = self._locking(is_guarded=False)
        request = self._request._replace(
            selection=_ALL, names=(unit.name for unit in sieve.due(judged)), late=True, wraps=wraps
        )
        return sieve.complete(run_request(self._kernel, request, self._how.wishes))

    def _locking(self, *, is_guarded: bool) -> Callable[[Action], Action]:
        since_ns = self._since_ns if is_guarded else None  # judge_units has checked this already
        return partial(Locking, holds=self._how.runs, is_guarded=is_guarded, since_ns=since_ns)

    def _list(self, here: ActionPlace, names: Sequence[str]) -> list[tuple[str, int]]:
        """Add entries that will expire soon to the purge lists; return those that can't be read, each with its errno.

        In a dry run, omit the entries that the rule would take now.
        """
        assert self._rule.age is not None
        fields, before_ns = self._rule.age
        refused: list[tuple[str, int]] = []
        for name in names:
            try:
                with here.kernel.open_beneath(here.sides.fd, os.fsencode(name)) as fd:
                    st = here.kernel.fstat(fd)
                    time_ns = time_of(here.kernel, fields, fd, st)
            except OSError as error:
                refused.append((name, error.errno or errno.EIO))
                continue
            if self._how.runs or time_ns >= before_ns:
                path = os.path.join(self._scope.path(), here.upper, os.fsencode(name))
                self._lists.add(st.st_uid, path, self._due_ns(time_ns))
        return refused

    def _due_ns(self, time_ns: int) -> int:
        """Return when a file with a given time expires: when it reaches the rule's age, or now if that has passed."""
        assert self._rule.age is not None
        return max(time_ns + self._how.now_ns - self._rule.age.before_ns, self._how.now_ns)


def _act(rule: Rule) -> ToTrash | ToDelete | ToMove:
    match rule.action:
        case TrashAction(keep_for_s):
            return ToTrash(SwapOptions(retention_s=keep_for_s, note=f"plan {rule.place}"))
        case DeleteAction():
            return ToDelete(recursive=rule.is_unit)
        case MoveAction(target, if_exists):
            return ToMove(target, IfExists(if_exists))


def _rsync_line(rule: Rule, directory: bytes) -> str:
    """Return the rsync command for a move to another filesystem.

    For units, the user has to fill in NAME, because rsync can't select units by age.
    """
    assert isinstance(rule.action, MoveAction)
    if rule.is_unit:
        source, target = (shell_word(os.path.join(path, b"")) for path in (directory, rule.action.target))
        return f"rsync -aHAX --remove-source-files {source}NAME {target}"
    more = () if rule.most is None else (b"--max-delete", b"%d" % rule.most)
    return format_rsync_command(directory, rule.selection, rule.action.target, IfExists(rule.action.if_exists), more)


class _UnitSorter:
    """Sorts the judged units of one directory into those that are due, listed or spared."""

    def __init__(self, directory: bytes, before_ns: int, due_ns: Callable[[int], int], lists: CountedPurges) -> None:
        """before_ns: a unit is due if its newest file is older than this; the other judged units will expire soon

        due_ns  returns when a file with a given time expires
        """
        self._directory = directory
        self._before_ns = before_ns
        self._due_ns = due_ns
        self._lists = lists
        self.tally = SliceCounts(None)

    def due(self, judged: Iterator[Judged]) -> Iterator[Unit]:
        """Yield the units that are due; add those that will expire soon to the purge lists."""
        for one in judged:
            match one:
                case Unit() if one.newest_ns < self._before_ns:
                    self.tally.count(SweepSums(n_bytes=one.n_bytes))
                    yield one
                case Unit():
                    path = os.path.join(self._directory, one.name)
                    self._lists.add(one.uid, path, self._due_ns(one.newest_ns))
                case Young():
                    pass
                case Spared(name, why):
                    self.tally.spare(name, why)
                case Failure(name, number, call):
                    self._lists.lack()
                    self.tally.fail(name, number, call)

    def complete(self, swept: Swept) -> Swept:
        """Complete a sweep's result with the units that were not passed to the sweep."""
        vanished = swept.sums.n_vanished + swept.sums.n_missing  # each existed when it was judged
        return swept._replace(
            sums=swept.sums._replace(n_bytes=0, n_vanished=vanished, n_missing=0, n_unmatched=0).plus(self.tally.sums),
            failures=(*self.tally.failures, *swept.failures)[:MAX_FAILURES],
            spared=(*self.tally.spared, *swept.spared)[:MAX_FAILURES],
            looks=True,
        )

    def would_take(self, judged: Iterator[Judged], most: int | None, stops: ShouldStop) -> Swept:
        """Return what a sweep of the due units would do. most: maximum number of units"""
        largest, oldest = list[Match](), list[Match]()
        n_matched = n_bytes = 0
        is_stopped = is_limited = False
        for unit in self.due(judged):
            is_stopped, is_limited = stops(), n_matched == most
            if is_stopped or is_limited:
                break
            n_matched += 1
            n_bytes += unit.n_bytes
            match = Match(unit.name, unit.n_bytes, unit.newest_ns)
            largest = nlargest(SHOWN_MATCHES_MAX, [*largest, match], key=lambda one: one.n_bytes)
            oldest = nsmallest(SHOWN_MATCHES_MAX, [*oldest, match], key=lambda one: one.time_ns)
        sums = SweepSums(n_seen=n_matched, n_matched=n_matched, n_done=n_matched)
        would = self.complete(Swept(self._directory, sums, is_stopped=is_stopped or stops(), is_limited=is_limited))
        return would._replace(sums=would.sums._replace(n_bytes=n_bytes), largest=tuple(largest), oldest=tuple(oldest))
