"""Users who share nodes: one has a huge tree, the others have small ones."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

from bench.simulate.clock import SimulatedClock
from bench.simulate.ranks import Crew, SimulatedReap
from bench.simulate.server import MetadataServer, Model
from bench.simulate.tree import Tree, project_tree
from fusefs.service.fair_turns import FairTurns, order_of_node

SMALL = 300
"""Entries of a small tree."""
_HUGE = 10**9
_TURN_S = 0.5
"""As long is a turn in service/work_session.py."""
_IDLE_S = 0.1
_BACKLOG_S = 60.0
"""For so long it is looked at who has how much, where nobody comes to an end."""


class Fairness(NamedTuple):
    """Of so many users on so many nodes.

    small_s       until a small user's tree is gone, in the middle and of the last one; of the service, by turns
    array_s       the same by an array of as many tasks (reap --one), where the huge tree is the oldest
    without_s     by the service, if nobody had a huge one
    jain          of what users with endless trees had each in the end: 1 is the same for all, 1 / n_users all for one
    """

    n_nodes: int
    n_users: int
    small_s: tuple[float, float]
    array_s: tuple[float, float]
    without_s: tuple[float, float]
    jain: float


class _Volume:
    """A server with an orphan for each user; the time at which each was gone."""

    def __init__(self, model: Model, n_threads: int, sizes: list[int], seed: int, most_s: float) -> None:
        self.clock = SimulatedClock()
        self.n_threads = n_threads
        self.most_s = most_s
        self.server = MetadataServer(self.clock, model, seed)
        self.unclaimed = {user: Tree(project_tree, size, seed + user) for user, size in enumerate(sizes)}
        self.trees = dict(self.unclaimed)
        self.ended_s: dict[int, float] = {}
        self._turn_ends_s: dict[int, float] = {}
        self._small = {user for user, size in enumerate(sizes) if size < _HUGE}

    def is_over(self) -> bool:
        """Whether nobody waits for anything any more."""
        return self.clock.now_s >= self.most_s or (bool(self._small) and self._small <= self.ended_s.keys())

    def claim(self, node: int, user: int, is_stopped: Callable[[], bool]) -> SimulatedReap:
        """A node has a user's orphan to itself."""
        tree = self.unclaimed.pop(user)
        return SimulatedReap(self.server, tree, Crew((node,), self.n_threads, is_job=False), is_stopped=is_stopped)

    def note(self, user: int, reap: SimulatedReap) -> bool:
        """Whether a user's tree is gone."""
        if reap.tree.is_gone():
            self.ended_s[user] = self.clock.now_s
        return user in self.ended_s

    def serve(self, node: int) -> None:
        """What a node's service does: the users' turns, as they are the service's own."""
        turns = FairTurns(order=order_of_node(b"node%d" % node))
        ours: dict[int, SimulatedReap] = {}
        while not self.is_over():
            wanting = [*ours, *self.unclaimed]
            if not wanting:
                self.clock.sleep(_IDLE_S)
                continue
            user, began_s = turns.next(wanting), self.clock.now_s
            self._turn_ends_s[node] = began_s + _TURN_S
            if user not in ours:
                ours[user] = self.claim(node, user, partial(self._is_turn_over, node))
            ours[user].drive()
            if self.note(user, ours[user]):
                del ours[user]
            turns.charge(user, self.clock.now_s - began_s)

    def _is_turn_over(self, node: int) -> bool:
        return self.clock.now_s >= self._turn_ends_s[node] or self.is_over()

    def take_one(self, node: int) -> None:
        """A task of an array, and the one that is started in its place when it ends."""
        while self.unclaimed and not self.is_over():
            user = min(self.unclaimed)
            reap = self.claim(node, user, self.is_over)
            reap.drive()
            self.note(user, reap)

    def simulate(self, n_nodes: int, work: Callable[[int], None]) -> tuple[float, float]:
        """Simulate the work of all nodes. Returns  when the middle and the last of the small trees were gone"""
        for node in range(n_nodes):
            self.clock.act(partial(work, node))
        self.clock.run()
        times = [self.ended_s.get(user, self.most_s) for user in self._small]
        return (median(times), max(times)) if times else (0.0, 0.0)


def fairness(model: Model, n_nodes: int, n_threads: int, n_users: int, seed: int = 0) -> Fairness:
    """One user's huge tree beside those of all the others; and users each of whom has one that does not end."""
    small_s = n_users * SMALL / model.most_unlinks_per_s()
    most_s = 20 * small_s + 600.0

    def volume(sizes: list[int], most_s: float = most_s) -> _Volume:
        return _Volume(model, n_threads, sizes, seed, most_s)

    mixed = [_HUGE] + [SMALL] * (n_users - 1)
    by_turns, by_array, without = volume(mixed), volume(mixed), volume(mixed[1:])
    endless = volume([_HUGE] * n_users, _BACKLOG_S)
    endless.simulate(n_nodes, endless.serve)
    return Fairness(
        n_nodes,
        n_users,
        by_turns.simulate(n_nodes, by_turns.serve),
        by_array.simulate(n_nodes, by_array.take_one),
        without.simulate(n_nodes, without.serve),
        jain([tree.n_gone for tree in endless.trees.values()]),
    )


def jain(amounts: list[int]) -> float:
    """Source  Jain, Chiu, Hawe: A quantitative measure of fairness (1984)"""
    squares = sum(one * one for one in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0
