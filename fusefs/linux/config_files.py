"""The configuration's files: found, checked for owners and modes that can't be trusted, read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fusefs.core.config import Config, read_with_places
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.printable_names import printable
from fusefs.core.toml_reader import TEXT_MAX_BYTES, Settings, Source, decode_source
from fusefs.linux import config_dirs
from fusefs.linux.config_dirs import config_dir, is_drop_in
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE

_FILE, _DROP_INS = b"config.toml", b"config.d"


class Loaded(NamedTuple):
    """A configuration, the files that it came from, in the order in which they were read, and what each of them set.

    warnings  keys that have no effect any more
    """

    config: Config
    files: tuple[bytes, ...]
    settings: Settings
    warnings: tuple[ConfigProblem, ...] = ()


def base_config(*, of_root: bool) -> Config:
    """What holds where no file says anything: only root's service has an audit log by itself."""
    return Config() if of_root else Config(audit=None)


def load_config(directory: bytes | None = None) -> Loaded:
    """The configuration in force for this user; without any file the defaults.

    directory  instead of `config_dir`
    Raises     BadConfig with all that is wrong in any of the files
    """
    found, problems = _find(directory or config_dir())
    return _load(found, problems, base_config(of_root=os.geteuid() == 0), is_trusting=False)


def load_system_config() -> Loaded:
    """The configuration in force for root's service, as far as this process may read it; errors as `load_config`."""
    found, problems = _find(config_dirs.SYSTEM_DIR)
    return _load(found, problems, base_config(of_root=True), is_trusting=False)


def check_files(files: Sequence[bytes]) -> Loaded:
    """The configuration in these files alone, whoever owns them: a draft is checked before it is installed.

    Raises  BadConfig
    """
    return _load(files, [], base_config(of_root=os.geteuid() == 0), is_trusting=True)


def _load(files: Sequence[bytes], problems: list[ConfigProblem], base: Config, *, is_trusting: bool) -> Loaded:
    sources = read_sources(files, problems, is_trusting=is_trusting)
    try:
        config, settings, warnings = read_with_places(sources, base)
    except BadConfig as error:
        raise BadConfig(problems=(*problems, *error.problems)) from error
    if problems:
        raise BadConfig(problems=tuple(problems))
    return Loaded(config, tuple(files), settings, warnings)


def _find(directory: bytes | None) -> tuple[list[bytes], list[ConfigProblem]]:
    """The files that there are, and what is wrong with their directories."""
    if directory is None:
        return [], []
    found: list[bytes] = []
    problems: list[ConfigProblem] = []
    drop_ins = os.path.join(directory, _DROP_INS)
    for where in (directory, drop_ins):
        try:
            names = sorted(os.listdir(where))
            st = os.stat(where)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problems.append(unreadable(where, error))
            continue
        chosen = [name for name in names if name == _FILE or (where == drop_ins and is_drop_in(name))]
        found += [os.path.join(where, name) for name in chosen]
        if chosen:
            problems += distrust(where, st)
    return found, problems


def read_sources(files: Iterable[bytes], problems: list[ConfigProblem], *, is_trusting: bool) -> list[Source]:
    """The texts of files; of one that can't be read or believed a problem more.

    is_trusting  whatever owns them
    """
    sources = []
    for file in files:
        try:
            sources.append(_read_source(file, is_trusting=is_trusting))
        except BadConfig as error:
            problems += error.problems
    return sources


def _read_source(file: bytes, *, is_trusting: bool) -> Source:
    """A file's text.

    Raises  BadConfig: it can't be read, is no file, or belongs to a user who may not configure this one
    """
    name = printable(file)
    try:
        # Not to wait for a writer of a FIFO of that name.
        with Fd(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise BadConfig(problems=(ConfigProblem(name, "", "not an ordinary file", "put a file there"),))
            if not is_trusting and (problems := tuple(distrust(file, st))):
                raise BadConfig(problems=problems)
            return decode_source(name, os.pread(fd, TEXT_MAX_BYTES + 1, 0))
    except OSError as error:
        raise BadConfig(problems=(unreadable(file, error),)) from error


def distrust(path: bytes, st: os.stat_result) -> Iterable[ConfigProblem]:
    """Why we do not believe it: another user than ourselves or root can change it."""
    name = printable(path)
    owner = "root" if os.geteuid() == 0 else "you or root"
    if st.st_uid not in (0, os.geteuid()):
        yield ConfigProblem(name, "", f"it belongs to uid {st.st_uid}, not to {owner}", "chown it, or take it away")
    shared = st.st_mode & OTHERS_WRITE & ~(stat.S_IWGRP if st.st_gid in (0, os.getegid()) else 0)
    if shared:
        who = "everybody" if shared & stat.S_IWOTH else "its group"
        yield ConfigProblem(name, "", f"{who} may write it", "chmod go-w")


def unreadable(path: bytes, error: OSError) -> ConfigProblem:
    """What the kernel said, as a problem of that file."""
    fix = {PermissionError: "run it as root, or chmod it", FileNotFoundError: "name a file that exists"}
    return ConfigProblem(printable(path), "", f"can't be read: {error.strerror}", fix.get(type(error), ""))
