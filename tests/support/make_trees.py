"""Trees of every kind: made, compared and removed, by directory fds, however deep, whatever the names."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import RESTORED_XATTRS, Kernel
from tests.support.real_filesystems import loop_volume, mounts, tmpfs_volume, unmount
from tests.support.store_verbs import init

IMMUTABLE = 0x10
APPEND_ONLY = 0x20
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
# Those that people set; the rest (extents, hashed directory) is the filesystem's own business.
_FLAGS_SET_BY_PEOPLE = 0x0000_00FF | 0x0001_4000 | 0x0002_0000 | 0x0080_0000 | 0x2000_0000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 18
_REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class File:
    """A regular file to make."""

    content: bytes = b""
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dir:
    """A directory to make; its mode is set after all below is made."""

    entries: "Spec" = field(default_factory=dict)
    mode: int = 0o755
    owner: tuple[int, int] | None = None
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link to make."""

    target: bytes | str
    owner: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SpecialFile:
    """A FIFO, socket or device to make: mode as in st_mode, such as S_IFIFO | 0o600."""

    mode: int
    rdev: int = 0
    owner: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HardLink:
    """One more name for what is already made at a path from the tree's root."""

    path: bytes | str


Entry = File | Dir | Symlink | SpecialFile | HardLink
# bytes and str stand for a File with that content, a mapping for a Dir with those entries.
# Keys are bytes or str; a union says so only to who mixes both, for a Mapping's key type is invariant.
Spec = Mapping[Any, "Entry | bytes | str | Spec"]


class EntrySnapshot(NamedTuple):
    """One name of a tree. With the entries before it, depth and name say where it is."""

    depth: int
    name: bytes
    mode: int
    uid: int
    gid: int
    rdev: int
    size_bytes: int | None  # None where it means nothing: all but regular files
    n_links: int | None  # None for directories, where filesystems differ
    first_name: int | None  # of several hard links: which entry of the snapshot was the first
    content: str | None  # hash of a file, target of a link
    xattrs: tuple[tuple[str, bytes], ...]  # ACLs too
    flags: int
    mtime_ns: int | None


def make_tree(path: Path, spec: Spec | Dir) -> Path:
    """Make a directory and what is in it; the path must be free. Returns it."""
    root = spec if isinstance(spec, Dir) else Dir(spec)
    path.mkdir()
    root_fd = os.open(path, _DIRECTORY)
    # A directory is finished after its entries: hence the second visit.
    stack: list[tuple[int, Dir, Iterator[tuple[bytes | str, object]]]]
    stack = [(root_fd, root, iter(root.entries.items()))]
    try:
        while stack:
            fd, directory, entries = stack[-1]
            item = next(entries, None)
            if item is None:
                _finish(fd, directory)
                stack.pop()
                if stack:
                    os.close(fd)
                continue
            name, entry = os.fsencode(item[0]), _entry(item[1])
            if isinstance(entry, Dir):
                os.mkdir(name, 0o700, dir_fd=fd)
                stack.append((os.open(name, _DIRECTORY, dir_fd=fd), entry, iter(entry.entries.items())))
            else:
                _make(fd, name, entry, root_fd)
    finally:
        for fd, _, _ in stack[1:]:
            os.close(fd)
        os.close(root_fd)
    return path


def owned(path: Path, uid: int) -> Path:
    """Give a tree, and all in it, to a user and the group of that number. Returns it."""
    for one in (path, *path.rglob("*")):
        os.chown(one, uid, uid)
    return path


def _entry(value: object) -> Entry:
    match value:
        case File() | Dir() | Symlink() | SpecialFile() | HardLink():
            return value
        case bytes() | str():
            return File(os.fsencode(value))
        case Mapping():
            return Dir(value)
    raise TypeError(f"no entry of a tree: {value!r}")


def _make(fd: int, name: bytes, entry: File | Symlink | SpecialFile | HardLink, root_fd: int) -> None:
    match entry:
        case File():
            file_fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
            with os.fdopen(file_fd, "wb") as file:
                file.write(entry.content)
                file.flush()
                _finish(file_fd, entry)
            return
        case HardLink():
            os.link(entry.path, name, src_dir_fd=root_fd, dst_dir_fd=fd, follow_symlinks=False)
            return
        case Symlink():
            os.symlink(os.fsencode(entry.target), name, dir_fd=fd)
        case SpecialFile():
            os.mknod(name, entry.mode, entry.rdev, dir_fd=fd)
    if entry.owner is not None:
        os.chown(name, *entry.owner, dir_fd=fd, follow_symlinks=False)
    if isinstance(entry, SpecialFile):
        os.chmod(name, stat.S_IMODE(entry.mode), dir_fd=fd)


def _finish(fd: int, entry: File | Dir) -> None:
    if entry.owner is not None:
        os.fchown(fd, *entry.owner)
    for name, value in entry.xattrs.items():
        os.setxattr(fd, name, value)
    os.fchmod(fd, entry.mode)


def deep_chain(path: Path, n_levels: int, name: bytes = b"d", leaf: bytes | None = b"leaf") -> Path:
    """Make a directory and a chain of n_levels below it, a file at its end; paths may pass PATH_MAX."""
    path.mkdir()
    fd = os.open(path, _DIRECTORY)
    try:
        for _ in range(n_levels):
            os.mkdir(name, dir_fd=fd)
            above, fd = fd, os.open(name, _DIRECTORY, dir_fd=fd)
            os.close(above)
        if leaf is not None:
            os.close(os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd))
    finally:
        os.close(fd)
    return path


def weird_names() -> list[bytes]:
    """Names that break shells, parsers, terminals and decoders; each is a valid one on Linux."""
    lines = [b"new\nline", b"\n", b"tab\tand\rreturn", b"\x1b[31mred\x07", b"\x01\x7f"]
    undecodable = [b"\xff\xfe not UTF-8", b"cut \xe2\x82", b"\xff" * 255]
    long = [b"n" * 255, "ä".encode() * 127 + b"x"]  # 255 bytes each
    options = [b"-rf", b"--help", b"-", b"--"]
    blanks = [b" ", b"end ", b" start", b"...", b".hidden", b"~"]
    shell = [b"*?[a]", b"$(reboot) `id` ${HOME}", b"quote' double\" back\\slash", b"#;&|<>", b"%s%n{0}"]
    unicode = ["é".encode(), "e\u0301".encode(), "\u202etxt.exe".encode()]  # the first two look the same
    ours = [b"record.json", b"tree"]
    return lines + undecodable + long + options + blanks + shell + unicode + ours


def snapshot(path: Path, *, with_times: bool = False) -> tuple[EntrySnapshot, ...]:
    """All there is to compare of a tree: `path` itself first, its name b"", each directory's names in order.

    with_times  mtimes too
    Raises      OSError: something can't be read; RuntimeError: the tree was moved meanwhile
    """
    seen: list[EntrySnapshot] = []
    first_names: dict[tuple[int, int], int] = {}
    top = os.fsencode(path.name)
    with _opened(path.parent, _DIRECTORY) as parent_fd:
        seen.append(_see(parent_fd, top, 0, first_names, 0, with_times)._replace(name=b""))
        if not stat.S_ISDIR(seen[0].mode):
            return tuple(seen)
        with contextlib.closing(_Walk(parent_fd, top)) as walk:
            for depth, name in walk:
                seen.append(_see(walk.fd, name, depth, first_names, len(seen), with_times))
                if stat.S_ISDIR(seen[-1].mode):
                    walk.descend(name)
    return tuple(seen)


@contextlib.contextmanager
def _opened(name: bytes | Path, how: int, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(name, how, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


class _Walk:
    """Names of a tree with an fd for their directory, one directory open at a time.

    It goes up by `..`, and looks that it is where it came from: a test's tree stands still.
    """

    def __init__(self, parent_fd: int, name: bytes, on_leave: Callable[[int, bytes], None] | None = None) -> None:
        """Start in a directory; on_leave(fd of its parent, name) follows each directory below it."""
        self.fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
        self._on_leave = on_leave
        self._levels = [(name, self._identity(), iter(self._names()))]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(depth, name): depth 1 is in the directory itself."""
        while True:
            entry = next(self._levels[-1][2], None)
            if entry is not None:
                yield len(self._levels), entry
            elif len(self._levels) == 1:
                return
            else:
                self._ascend()

    def descend(self, name: bytes) -> None:
        """Go on with what is in this directory."""
        self._move(name)
        self._levels.append((name, self._identity(), iter(self._names())))

    def _ascend(self) -> None:
        left, _, _ = self._levels.pop()
        self._move(b"..")
        if self._identity() != self._levels[-1][1]:
            raise RuntimeError("the tree was moved during the walk")
        if self._on_leave is not None:
            self._on_leave(self.fd, left)

    def close(self) -> None:
        os.close(self.fd)

    def _move(self, name: bytes) -> None:
        fd = os.open(name, _DIRECTORY, dir_fd=self.fd)
        os.close(self.fd)
        self.fd = fd

    def _identity(self) -> tuple[int, int]:
        st = os.fstat(self.fd)
        return st.st_dev, st.st_ino

    def _names(self) -> list[bytes]:
        return sorted(os.fsencode(name) for name in os.listdir(self.fd))


def _see(
    dir_fd: int, name: bytes, depth: int, first_names: dict[tuple[int, int], int], position: int, times: bool
) -> EntrySnapshot:
    st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    is_regular, is_directory = stat.S_ISREG(st.st_mode), stat.S_ISDIR(st.st_mode)
    first, content, flags = None, None, 0
    if not is_directory and st.st_nlink > 1:
        first = first_names.setdefault((st.st_dev, st.st_ino), position)
    if stat.S_ISLNK(st.st_mode):
        content = repr(os.readlink(name, dir_fd=dir_fd))
    elif is_directory:
        with _opened(name, _DIRECTORY, dir_fd) as fd:
            flags = _flags(fd) & _FLAGS_SET_BY_PEOPLE
    elif is_regular:
        with _opened(name, _REGULAR, dir_fd) as fd:
            flags = _flags(fd) & _FLAGS_SET_BY_PEOPLE
            digest = hashlib.sha256()
            while piece := os.read(fd, _PIECE_BYTES):
                digest.update(piece)
            content = digest.hexdigest()
    return EntrySnapshot(
        depth,
        name,
        st.st_mode,
        st.st_uid,
        st.st_gid,
        st.st_rdev,
        st.st_size if is_regular else None,
        None if is_directory else st.st_nlink,
        first,
        content,
        _xattrs(dir_fd, name),
        flags,
        st.st_mtime_ns if times else None,
    )


def _xattrs(dir_fd: int, name: bytes) -> tuple[tuple[str, bytes], ...]:
    path = b"/proc/self/fd/%d/" % dir_fd + name  # no *at calls for xattrs, and links have some too
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return ()
        raise
    told = [name for name in names if name not in RESTORED_XATTRS]  # what was restored is as it was, but for that
    return tuple((xattr, os.getxattr(path, xattr, follow_symlinks=False)) for xattr in told)


def _flags(fd: int) -> int:
    """Inode flags, as lsattr shows them; 0 where the filesystem has none."""
    try:
        answer = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        return 0
    return int.from_bytes(answer[:4], "little")


def flags_of(path: Path) -> int:
    with _opened(path, _REGULAR) as fd:
        return _flags(fd)


def set_flags(path: Path, flags: int, *, on: bool = True) -> None:
    """Add inode flags, such as IMMUTABLE, or take them away; remove_tree_hard does that too."""
    with _opened(path, _REGULAR) as fd:
        _put_flags(fd, _flags(fd) | flags if on else _flags(fd) & ~flags)


def _put_flags(fd: int, flags: int) -> None:
    fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags.to_bytes(8, "little"))


def remove_tree_hard(path: Path) -> None:
    """Remove anything: immutable, without permissions, deep, with mounts below (detached, not emptied).

    A path that isn't there is fine.
    Raises    OSError: what even that can't remove
    """
    path = path.parent.resolve() / path.name
    at, below = os.fsencode(path), os.fsencode(path) + b"/"
    for mount in reversed(mounts()):
        if mount.mount_point == at or mount.mount_point.startswith(below):
            unmount(mount.mount_point)
    with _opened(path.parent, _DIRECTORY) as parent_fd, contextlib.suppress(FileNotFoundError):
        _remove(parent_fd, os.fsencode(path.name))


def _remove(parent_fd: int, top: bytes) -> None:
    if _is_removed(parent_fd, top):
        return
    with contextlib.closing(_Walk(parent_fd, top, lambda fd, name: os.rmdir(name, dir_fd=fd))) as walk:
        for _, name in walk:
            if not _is_removed(walk.fd, name):
                walk.descend(name)
    os.rmdir(top, dir_fd=parent_fd)


def _is_removed(dir_fd: int, name: bytes) -> bool:
    """Remove what is no directory; a directory is made ready for its removal instead."""
    mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode):
        with contextlib.suppress(OSError):  # immutable: root needs no permission then
            os.chmod(name, 0o700, dir_fd=dir_fd)
        _clear_flags(dir_fd, name, _DIRECTORY)
        return False
    try:
        os.unlink(name, dir_fd=dir_fd)
    except PermissionError:
        if not stat.S_ISREG(mode):
            raise
        _clear_flags(dir_fd, name, _REGULAR)
        os.unlink(name, dir_fd=dir_fd)
    return True


def _clear_flags(dir_fd: int, name: bytes, how: int) -> None:
    with _opened(name, how, dir_fd) as fd:
        flags = _flags(fd)
        if flags & (IMMUTABLE | APPEND_ONLY):
            _put_flags(fd, flags & ~(IMMUTABLE | APPEND_ONLY))


def make_chain(top: Path, n: int) -> None:
    """So many directories, each in the one before, as `mkdir d; cd d` does it."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(n - 1):
        os.mkdir("d", dir_fd=fd)
        fd = _below(fd)
    os.close(fd)


def _below(fd: int) -> int:
    """The next level, in place of this one."""
    deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    return deeper


def walk_chain(top: Path) -> int:
    """How many levels a process finds that lists and looks at all, as find does."""
    fd, n = os.open(top, os.O_RDONLY), 1
    while os.listdir(fd):
        os.stat("d", dir_fd=fd)
        fd, n = _below(fd), n + 1
    os.close(fd)
    return n


class CountedPathBytes(Kernel):
    """`n_bytes` is their sum."""

    n_bytes = 0

    def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
        """See Kernel; a path that goes in chunks is counted twice."""
        self.n_bytes += len(path)
        return super().open_beneath(dir_fd, path, flags)


@contextmanager
def roomy_volume(fs_type: str, n_inodes: int = 100_000) -> Iterator[Path]:
    """A volume of that type with a store and room for so many entries."""
    size_mb = 64 + n_inodes // 1000
    match fs_type:
        case "tmpfs":
            volume = tmpfs_volume(f"{size_mb}m", [f"nr_inodes={n_inodes + 1000}"])
        case "ext4":
            volume = loop_volume("ext4", size_mb, ["-b", "4096", "-N", str(n_inodes + 1000)])
        case "btrfs":
            volume = loop_volume("btrfs", size_mb + 400)  # or its metadata have no room, and it says that nothing has
        case _:
            volume = loop_volume(fs_type, size_mb)
    with volume as path:
        init(path)
        yield path


def fill(directory: Path, n_files: int, start: int = 0) -> Path:
    """Make empty files `f0`, `f1` and so on in a directory, which is made if missing, with those above it."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for i in range(start, start + n_files):
            os.mknod(b"f%d" % i, stat.S_IFREG | 0o644, dir_fd=fd)
    finally:
        os.close(fd)
    return directory


def bulky_tree(path: Path, n_directories: int = 20, n_files: int = 300, n_flat: int = 8000) -> Path:
    """A tree that keeps a reaper busy: `d0`… with `sub/` each, one directory `flat`, and one `chain`."""
    for i in range(n_directories):
        fill(fill(path / f"d{i}", n_files) / "sub", n_files)
    fill(path / "flat", n_flat)
    deep_chain(path / "chain", 150)
    return path
