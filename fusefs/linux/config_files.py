"""Configuration and plan files: finds them, checks that their owners and modes can be trusted, and reads them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.config import Config, read_config_with_places
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.plan_rules import PlanContext, Rule, read_plan
from fusefs.core.printable_names import printable
from fusefs.core.toml_reader import TEXT_MAX_BYTES, Settings, Source, decode_source
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE
from fusefs.linux.user_ids import gid_of, uid_of

SYSTEM_DIR = b"/etc/trashd"
_PLANS, _ENDING = b"plan.d", b".toml"


def config_dir() -> bytes | None:
    """Return the directory of this user's configuration: /etc/trashd for root; None for a user without a home."""
    if os.geteuid() == 0:
        return SYSTEM_DIR
    given = os.environb.get(b"XDG_CONFIG_HOME", b"")
    home = given if given.startswith(b"/") else os.path.expanduser(b"~/.config")
    return home + b"/trashd" if home.startswith(b"/") else None


def is_drop_in(name: bytes) -> bool:
    """Return whether a file of this name in a drop-in directory is read."""
    return name.endswith(_ENDING) and not name.startswith(b".")


def plan_dir() -> bytes | None:
    """Return the directory of this user's plans: /etc/trashd/plan.d for root; None for a user without a home."""
    above = config_dir()
    return None if above is None else os.path.join(above, _PLANS)


def are_rules_in_force() -> bool:
    """Return whether root or the caller has any plan files."""
    for place in {os.path.join(SYSTEM_DIR, _PLANS), plan_dir() or b""}:
        with suppress(OSError):
            if any(map(is_drop_in, os.listdir(place))):
                return True
    return False


_FILE, _DROP_INS = b"config.toml", b"config.d"


class LoadedConfig(NamedTuple):
    """A configuration, the files that it was read from, in order, and the place of each setting.

    warnings  problems that don't prevent the use of the configuration, such as keys that no longer have an effect
    """

    config: Config
    files: tuple[bytes, ...]
    settings: Settings
    warnings: tuple[ConfigProblem, ...] = ()


def default_config(*, of_root: bool) -> Config:
    """Return the configuration that applies without any file: only root's service has an audit log by default."""
    return Config() if of_root else Config(audit=None)


def load_config(directory: bytes | None = None) -> LoadedConfig:
    """Load this user's configuration, or the defaults if there is no file.

    directory  the directory with the files; None: `config_dir()`
    Raises     BadConfig with all problems in the files
    """
    files, problems = _find_files(directory or config_dir())
    return _load(files, problems, default_config(of_root=os.geteuid() == 0), is_trusting=False)


def load_system_config() -> LoadedConfig:
    """Load the configuration of root's service, as far as this process can read it. Raises  as for `load_config`"""
    files, problems = _find_files(SYSTEM_DIR)
    return _load(files, problems, default_config(of_root=True), is_trusting=False)


def check_files(files: Sequence[bytes]) -> LoadedConfig:
    """Load a configuration from files of any owner, so that a draft can be checked before it is installed.

    Raises  BadConfig with all problems in the files
    """
    return _load(files, [], default_config(of_root=os.geteuid() == 0), is_trusting=True)


def _load(files: Sequence[bytes], problems: list[ConfigProblem], base: Config, *, is_trusting: bool) -> LoadedConfig:
    sources = read_sources(files, problems, skips_trust_check=is_trusting)
    try:
        config, settings, warnings = read_config_with_places(sources, base)
    except BadConfig as error:
        raise BadConfig(problems=(*problems, *error.problems)) from error
    if problems:
        raise BadConfig(problems=tuple(problems))
    return LoadedConfig(config, tuple(files), settings, warnings)


def _find_files(directory: bytes | None) -> tuple[list[bytes], list[ConfigProblem]]:
    """Find the existing configuration files, and problems with their directories."""
    if directory is None:
        return [], []
    files: list[bytes] = []
    problems: list[ConfigProblem] = []
    drop_ins = os.path.join(directory, _DROP_INS)
    for where in (directory, drop_ins):
        try:
            names = sorted(os.listdir(where))
            st = os.stat(where)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(unreadable_problem(where, error))
            continue
        chosen = [name for name in names if name == _FILE or (where == drop_ins and is_drop_in(name))]
        files += [os.path.join(where, name) for name in chosen]
        if chosen:
            problems += trust_problems(where, st)
    return files, problems


def read_sources(files: Iterable[bytes], problems: list[ConfigProblem], *, skips_trust_check: bool) -> list[Source]:
    """Read files; add a problem for each one that can't be read or trusted.

    skips_trust_check  accept any owner and mode
    """
    sources = []
    for file in files:
        try:
            sources.append(_read_source(file, is_trusting=skips_trust_check))
        except BadConfig as error:
            problems += error.problems
    return sources


def _read_source(file: bytes, *, is_trusting: bool) -> Source:
    """Read a file.

    Raises  BadConfig: the file can't be read, is not regular, or can be changed by a user who must not configure us
    """
    name = printable(file)
    try:
        # O_NONBLOCK, so as not to wait for a writer if it is a FIFO.
        with Fd(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise BadConfig(
                    problems=(ConfigProblem(name, "", "not a regular file", "replace it with a regular file"),)
                )
            if not is_trusting and (problems := tuple(trust_problems(file, st))):
                raise BadConfig(problems=problems)
            return decode_source(name, os.pread(fd, TEXT_MAX_BYTES + 1, 0))
    except OSError as error:
        raise BadConfig(problems=(unreadable_problem(file, error),)) from error


def trust_problems(path: bytes, st: os.stat_result) -> Iterable[ConfigProblem]:
    """Yield the reasons not to trust a file: users other than us and root can change it."""
    name = printable(path)
    owner = "root" if os.geteuid() == 0 else "you or root"
    if st.st_uid not in (0, os.geteuid()):
        yield ConfigProblem(
            name, "", f"it belongs to uid {st.st_uid}, not to {owner}", "change its owner with chown, or remove it"
        )
    shared = st.st_mode & OTHERS_WRITE & ~(stat.S_IWGRP if st.st_gid in (0, os.getegid()) else 0)
    if shared:
        writers = "every user" if shared & stat.S_IWOTH else "its group"
        yield ConfigProblem(name, "", f"{writers} can write to it", "run chmod go-w on it")


def unreadable_problem(path: bytes, error: OSError) -> ConfigProblem:
    """Return a problem that describes the kernel's error for a file that can't be read."""
    fix = {PermissionError: "run the command as root, or chmod the file", FileNotFoundError: "name a file that exists"}
    return ConfigProblem(printable(path), "", f"can't be read: {error.strerror}", fix.get(type(error), ""))


def load_plan(
    paths: Sequence[bytes],
    now_ns: int,
    cutoff_ns: Callable[[int], int],
    warn: Callable[[ConfigProblem], None],
    *,
    is_trusting: bool,
) -> tuple[Rule, ...]:
    """Load the rules from files, and from directories, whose drop-ins are read in the order of their names.

    now_ns       the time from which ages are counted back
    cutoff_ns    converts an age to a time: an entry with an earlier time is at least that old
    warn         called for each key that no longer has an effect
    is_trusting  accept any owner and mode, so that a draft can be checked before it is installed
    Raises       BadConfig with all problems in the files
    """
    sources: list[Source] = []
    problems: list[ConfigProblem] = []
    for path in paths:
        try:
            files = _files(path, is_trusting=is_trusting)
        except OSError as error:
            problems.append(unreadable_problem(path, error))
            continue
        except BadConfig as error:
            problems += error.problems
            continue
        sources += read_sources(files, problems, skips_trust_check=is_trusting)
    rules: tuple[Rule, ...] = ()
    try:
        rules = read_plan(sources, PlanContext(now_ns, time.mktime, uid_of, gid_of, cutoff_ns, warn))
    except BadConfig as error:
        problems += error.problems
    if problems:
        raise BadConfig(problems=tuple(problems))
    return rules


def _files(path: bytes, *, is_trusting: bool) -> list[bytes]:
    """Return the path itself if it is a file, or the drop-ins if it is a directory. Raises  OSError, BadConfig"""
    try:
        names = sorted(os.listdir(path))
    except NotADirectoryError:
        return [path]
    if not is_trusting and (problems := tuple(trust_problems(path, os.stat(path)))):
        raise BadConfig(problems=problems)
    return [os.path.join(path, name) for name in names if is_drop_in(name)]
