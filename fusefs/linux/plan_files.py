"""The files of a plan, those that are named and those in directories, read by this machine's clock and users."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.plan_rules import PlanContext, Rule, read_plan
from fusefs.core.toml_reader import Source
from fusefs.linux.config_dirs import is_drop_in
from fusefs.linux.config_files import distrust, read_sources, unreadable
from fusefs.linux.user_names import gid_of, uid_of


def load_plan(
    paths: Sequence[bytes],
    now_ns: int,
    cutoff_ns: Callable[[int], int],
    warn: Callable[[ConfigProblem], None],
    *,
    is_trusting: bool,
) -> tuple[Rule, ...]:
    """The rules in files, and in the drop-ins in directories, sorted by name.

    now_ns       from when ages are counted
    cutoff_ns    the moment before which all is so many nanoseconds old
    warn         called with each key that has no effect any more
    is_trusting  whatever owns the files: a draft is looked at before it is installed
    Raises       BadConfig with all that is wrong in any of them
    """
    sources: list[Source] = []
    problems: list[ConfigProblem] = []
    for path in paths:
        try:
            files = _files(path, is_trusting=is_trusting)
        except OSError as error:
            problems.append(unreadable(path, error))
            continue
        except BadConfig as error:
            problems += error.problems
            continue
        sources += read_sources(files, problems, is_trusting=is_trusting)
    rules: tuple[Rule, ...] = ()
    try:
        rules = read_plan(sources, PlanContext(now_ns, time.mktime, uid_of, gid_of, cutoff_ns, warn))
    except BadConfig as error:
        problems += error.problems
    if problems:
        raise BadConfig(problems=tuple(problems))
    return rules


def _files(path: bytes, *, is_trusting: bool) -> list[bytes]:
    """A file itself, or the drop-ins in a directory. Raises  OSError, BadConfig"""
    try:
        names = sorted(os.listdir(path))
    except NotADirectoryError:
        return [path]
    if not is_trusting and (problems := tuple(distrust(path, os.stat(path)))):
        raise BadConfig(problems=problems)
    return [os.path.join(path, name) for name in names if is_drop_in(name)]
