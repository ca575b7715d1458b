"""Child processes that have this one's memory, not a copy of it: one takes 0.04 ms, a fork with what it copies 3 to 12.

Such a child has a pid, fds, ids, capabilities, a working directory and an environment of its own, which end with it.
What else it changes in memory stays. The calling thread stands still meanwhile, as after vfork(2).
"""

import ctypes
import gc
import mmap
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

R = TypeVar("R")

_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_STACK_BYTES = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_thread_state = ctypes.pythonapi.PyThreadState_Get
_thread_state.restype = ctypes.c_void_p
_Main = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_stacks: list[mmap.mmap] = []
"""Those that no child has."""
_thread = threading.local()
"""stack: the address of the child's stack on which this thread runs at the moment."""
_children: dict[int, int] = {}
"""The threads for which those that live were made, by their pids."""


class _Ended(BaseException):
    """A child has ended: it only has to leave what it was called by."""


def call_in_child(body: Callable[[], R], name: str) -> R:
    """Return what `body` returns, called in a child; what it raises is raised here, the child's traceback as a note.

    `body` may fork. It may not execute a program in its place, nor be killed: its memory is ours, and the lock of the
    interpreter, which it holds, is in there.

    Args:
        name: the child's, in the note.
    Source: clone(2)
    """
    outcome: list[tuple[bool, object]] = []
    timer = signal.getitimer(signal.ITIMER_REAL)  # of pytest-timeout; no child inherits it
    environment = os.environb.copy()

    def main(_argument: object) -> int:
        pid = os.getpid()
        _children[pid] = threading.get_ident()
        _declare_stack(begin)
        try:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            outcome.append((True, body()))
        except BaseException as error:
            outcome.append((False, _without_frames(error, name)))
        finally:
            del _children[pid]
            _collect()
        return 0

    stack = _stacks.pop() if _stacks else mmap.mmap(-1, _STACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(stack))
    callers: int | None = getattr(_thread, "stack", None)
    # What either of us throws away it closes itself: a number is another file's in the other one.
    _collect()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        end = ctypes.c_void_p(begin + _STACK_BYTES)
        pid = _libc.clone(_Main(main), end, _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD, None)
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        os.waitpid(pid, 0)
    finally:
        _declare_stack(callers)
        _stacks.append(stack)
        if is_enabled:
            gc.enable()
        if os.environb != environment:
            os.environb.clear()
            os.environb.update(environment)
    [(is_result, value)] = outcome
    if isinstance(value, BaseException) and not is_result:
        raise value
    result: R = value  # type: ignore[assignment]
    return result


def _declare_stack(begin: int | None) -> None:
    """Declare to Python which stack this thread runs on: a child's, by its address, or its own.

    Python 3.14 compares the stack pointer with the limits of the thread's own stack. On another stack, which looks like
    an overflow, it puts off the deallocation of objects, such as a generator that holds an fd, until the thread is back
    on its own: then this process, not the child, would close the number.

    Source: _Py_Dealloc() and PyUnstable_ThreadState_SetStackProtection() in Python 3.14's ceval.c and object.c
    """
    _thread.stack = begin
    python = ctypes.pythonapi
    if not hasattr(python, "PyUnstable_ThreadState_SetStackProtection"):
        return  # before 3.14
    thread = ctypes.c_void_p(_thread_state())
    if begin is None:
        python.PyUnstable_ThreadState_ResetStackProtection(thread)
    else:
        stack = ctypes.c_void_p(begin), ctypes.c_size_t(_STACK_BYTES)
        python.PyUnstable_ThreadState_SetStackProtection(thread, *stack)


def _collect() -> None:
    """Close what was thrown away since the last time, unless another process may have thrown it away."""
    if {*_children.values()} <= {threading.get_ident()}:
        gc.collect(0)


def _without_frames(error: BaseException, name: str) -> BaseException:
    """A copy of an error, without its traceback, whose frames hold the child's fds."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in the child of {name}:\n{text}")
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        return ChildDied(text)
    return copy


class ChildDied(Exception):
    """The child ended without a result; the message says how."""


def end_process(code: int) -> NoReturn:
    """End this process, as a kill would: in a child with its parent's memory, `code_of_child` returns the code.

    Such a child unwinds its stack. To be as good as killed it calls this again instead of each further system call.
    """
    if os.getpid() in _children:
        raise _Ended(code)
    os._exit(code)


def code_of_child(body: Callable[[], object]) -> int:
    """Return the code that `body`, called in a child, gave to `end_process`; 0 if it returned, 1 if it raised."""

    def main() -> int:
        try:
            body()
        except _Ended as end:
            code: int = end.args[0]
            return code
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    return call_in_child(main, "a test")
