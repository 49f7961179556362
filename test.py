"""The tests of femtoqueue: `python test.py [-v] [--all] [Class[.test]]`.

The classes run side by side, in one process for each processor. `python -m unittest test` runs all
of them in one process. The seed of the random numbers is printed; set FEMTOQUEUE_SEED to that
number to repeat a run. The tests that interrupt an operation at each system call try only a part of
the calls. The seed chooses this part. With --all, they try every call. Tests whose promise does not
depend on the disk use /dev/shm. If TMPDIR is set, all tests use that directory: `TMPDIR=/var/tmp
python test.py` tests the file system of /var/tmp.

A class stands for a promise, a test for one outcome. These are tested, with real processes:

- the order of tasks; leases, their fencing, and the liveness of workers;
- exactly one delivery while no worker dies, and no lost task when workers are killed;
- corrupt and foreign files in the directories, and editing by hand;
- an error from each system call of each operation;
- death before each system call of each operation. This is tested in two ways. The directory is
  copied before each call: the copy has the files that a death at this call leaves. And a real
  process is killed at every fifth call that changes something.

Most tests advance a fake clock. Tests of real processes and signals sleep where nothing else can
tell that time has passed.

These are not tested: power loss, full disks, and other file systems than the one of the temporary
directory. The programs in .ci/ test these; some programs need root. Tests that need fork() are
skipped where fork() is missing.
"""

from __future__ import annotations

import asyncio
import binascii
import concurrent.futures
import contextlib
import dataclasses
import datetime
import enum
import errno
import faulthandler
import functools
import gc
import glob
import hashlib
import importlib
import io
import itertools
import linecache
import logging
import os
import pickle
import py_compile
import random
import re
import select
import selectors
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import typing
import unittest
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn
from unittest import mock

import femtoqueue
from femtoqueue import (
    CorruptTask,
    FemtoQueue,
    FemtoQueueError,
    FemtoTask,
    KeyInFlight,
    LeaseLost,
    NodeStats,
    TaskNotFound,
    TicketQueue,
)

with contextlib.suppress(ImportError):  # not on Windows
    import fcntl
    import termios


class FirstSteps(unittest.TestCase):
    """What femtoqueue does. The other classes test it in every detail."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "jobs")

    def test_task_goes_from_push_through_pop_to_done(self) -> None:
        """A task waits in pending/, is leased to a worker, and ends in done/."""
        q = FemtoQueue(self.path, "n1")
        ident = q.push(b"resize 42.png")
        self.assertEqual(os.listdir(f"{self.path}/pending"), [ident])
        task = q.pop()
        assert task is not None
        self.assertEqual((task.id, task.data), (ident, b"resize 42.png"))
        self.assertEqual(len(os.listdir(f"{self.path}/inflight-n1")), 1)
        q.done(task)
        self.assertEqual(os.listdir(f"{self.path}/done"), [ident])
        self.assertIsNone(q.pop())

    def test_task_of_a_killed_worker_goes_to_another_one(self) -> None:
        """If kill -9 ends a worker, the next pop() of another worker gets its task."""
        q = FemtoQueue(self.path, timeout_stale_ms=None)
        q.push(b"resize 42.png")
        code = "import sys, femtoqueue as f; q = f.FemtoQueue(sys.argv[1]); "
        code += "task = q.pop(); print(task.id, flush=True); sys.stdin.read()"
        words = sys.executable, "-c", code, self.path
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=HERE) as worker:
            assert worker.stdout is not None
            ident = worker.stdout.readline().decode().strip()  # the worker has the task
            self.assertIsNone(q.pop())
            worker.kill()
        task = q.pop(60)
        assert task is not None
        self.assertEqual((task.id, task.attempts), (ident, 2))


# The small languages of the tests. Each has one place, where its texts and its reader stand.
#
# Words of Life: what a worker does, for tests that interrupt it. Each word is a method of the class
# Life. The words after the bar are interrupted:
#
#     Scenario("push a, push b, take | fail why, retry")
#
# Rows: the system calls of a step, in the tables STEPS and KEY_STEPS. The step is in words of Life.
# A Row has all calls of the step, and the moves and syncs of a durable queue:
#
#     "push x, take | done": Row("move", "move file directory")
#
# Transcripts: sessions of a shell, in TRANSCRIPTS. Each begins with "# " and its claim.
#
#     # a task that waits can be canceled
#     $ femtoqueue push jobs x -> <a>
#     $ femtoqueue cancel jobs $a
#     $ states -> none
#
#   A line that begins with "$ " is a command. If the line ends with "\", the command goes on in the
#   next line. The expected output follows: after " -> " in the same line, or in lines of its own.
#   Standard output comes first. Standard error follows, each line of it after a "! ". The exit
#   status comes last, in brackets, unless it is 0.
#   After " -> ", any white space counts as one space. In lines of output, a run of spaces counts as
#   one space. "..." stands for any text; alone in a line, for any lines. <name> stands for an id,
#   or for the path of a lease if the name begins with "lease". Where <name> occurs again in the
#   transcript, it stands for the same value, and so does $name in a command. Two names never have
#   the same value.
#   Besides the commands of the shell, there are three others. `states` counts the tasks in each
#   directory. `payloads STATE` prints the payloads of a state. `gone FILE` reads process ids from a
#   file, and waits until these processes have ended.
#
# FAULTS, in .ci/broken.py: faults that the tests must catch. A row has the promise, the class of
# test.py that catches the fault, and a change of femtoqueue.py in the form of a diff:
#
#     a task is delivered after the tasks that were pushed before | Ordering
#     -        names.sort()
#     +        names.sort(reverse=True)
#
# The log of the storms, in .ci/verdict.py: what many processes did with one queue. Each line has
# the time, the process, a word, and its values. The class Events has a method for each word. Here
# w3 was killed while it had a task, and w5 got the task in its second attempt:
#
#     12.501 w3 got 01795243500123456789-0a1b2c3d4e5f6071 12.500 17.500 1 p4-17
#     13.020 main killed w3
#     13.412 w5 got 01795243500123456789-0a1b2c3d4e5f6071 13.409 18.410 2 p4-17

HERE = os.path.dirname(os.path.abspath(__file__))
# A hook is called for each call that touches a disk or another process. All callables of os count
# as such calls, except those whose names match this pattern.
IN_PROCESS = re.compile(
    r"""_.*|W[A-Z]+|abort|confstr|cpu_count|ctermid|device_encoding|fdopen|fs(de|en)code|fspath
    |get(?!xattr).*|isatty|major|makedev|minor|nice|putenv|register_at_fork|sched_.*
    |set_(blocking|inheritable)|strerror|sysconf|times|ttyname|umask|uname|unsetenv|urandom
    |waitstatus_to_exitcode""",
    re.VERBOSE,
)
# The name of the event that a hook gets, by the name of the function. The event of a function that
# is not listed here has the name of the function. Equivalent functions share an event, because
# femtoqueue may use any of them.
EVENTS = {
    **dict.fromkeys(("write", "writev", "pwrite", "pwritev"), "write"),
    **dict.fromkeys(("read", "readv", "pread", "preadv"), "read"),
    **dict.fromkeys(("rename", "replace", "renames"), "move"),
    **dict.fromkeys(("listdir", "scandir", "walk", "fwalk"), "list"),
    **dict.fromkeys(("unlink", "remove"), "unlink"),
    **dict.fromkeys(("mkdir", "makedirs"), "mkdir"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
    **dict.fromkeys(
        ("exists", "lexists", "isdir", "isfile", "islink", "ismount"), "stat"
    ),
    **dict.fromkeys(
        ("getsize", "getmtime", "getatime", "getctime", "samefile"), "stat"
    ),
    **dict.fromkeys(("flock", "lockf"), "lock"),
    **dict.fromkeys(("inotify_init1", "inotify_add_watch"), "inotify"),
}
# These functions answer a question about a path with True or False. After any OSError, they return
# False.
ASKING = ("access", "exists", "lexists", "isdir", "isfile", "islink", "ismount")
EXT4, NFS, FUSE = 0xEF53, 0x6969, 0x65735546  # f_type of statfs(2)
FORK = unittest.skipUnless(hasattr(os, "fork"), "needs fork()")
PATIENCE_S = 60  # a test that has waited this long gives up
LOG = logging.getLogger("femtoqueue")
SEED = int(os.environ.get("FEMTOQUEUE_SEED") or time.time_ns() // 1000 % 10**6)
# the tests that interrupt an operation at each call try one call of so many
SAMPLED = 1 if "--all" in sys.argv else 3
# a class that has run this long hangs: the slowest class takes half a minute
SUITE_S = 900
# free space needed in /dev/shm: 20,000 tasks take a third of this
MEMORY_BYTES = 1 << 28


def memory_dir() -> str | None:
    """Return a directory whose files are in memory: /dev/shm. Return None, which stands for the
    temporary directory, if TMPDIR is set or /dev/shm can't be used."""
    if "TMPDIR" in os.environ or not os.access("/dev/shm", os.W_OK):
        return None
    space = os.statvfs("/dev/shm")
    return "/dev/shm" if space.f_bavail * space.f_frsize >= MEMORY_BYTES else None


class Clock:
    """Stands in for the time module in femtoqueue. It shows real time, shifted by the test.

    The arguments are the times that the wall clock and the monotonic clock show. With arguments,
    the clocks stand still until the test moves them, so that a run depends on its seed alone."""

    def __init__(self, *stands_at_s: float) -> None:
        self.wall_shift_s = self.monotonic_shift_s = 0.0
        self._stands_at_s = stands_at_s

    def time(self) -> float:
        return (self._stands_at_s or (time.time(), 0))[0] + self.wall_shift_s

    def monotonic(self) -> float:
        return (self._stands_at_s or (0, time.monotonic()))[1] + self.monotonic_shift_s

    def wall_ns(self) -> int:
        return int(self.time() * 1e9)

    def steady_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def stand_still(self) -> None:
        self._stands_at_s = time.time(), time.monotonic()

    def advance(self, seconds: float) -> None:
        self.wall_shift_s += seconds
        self.monotonic_shift_s += seconds

    def go_on_in_sleeps(self, goes_on: Callable[[], bool]) -> None:
        """Stand still, but in each sleep, such as those of the thread that renews leases, advance
        by its length while goes_on() is true."""
        self.stand_still()

        def sleep(seconds: float) -> None:
            if goes_on():
                self.advance(seconds)
            time.sleep(0.001)

        self.sleep = sleep  # type: ignore[method-assign]


def fake_os(*missing: str, **functions: Any) -> types.ModuleType:
    """Return a stand-in for os, without the functions `missing` and with `functions` replaced."""
    fake = types.ModuleType("os")
    fake.__dict__.update(
        {name: it for name, it in vars(os).items() if name not in missing}
    )
    fake.__dict__.update(functions)
    return fake


# Seams: the private names of femtoqueue that the tests replace. Each of these names is written only
# here, so that a redesign of femtoqueue changes only this block.

SEAMS = {
    "file system type": "_fs_type",
    "C library": "_libc",
    "groups of a session": "_groups_of",
    "progress": "_Progress",
    "lines of top": "_top_lines",
    "stop line": "_write_stop_line",
    "write to a stream": "_put",
}
CONSTANTS = {
    "one signal": "_ONE_SIGNAL_S",
    "grace": "_GRACE_S",
    "trouble": "_TROUBLE_S",
    "report": "_REPORT_S",
    "base interval": "_BASE_INTERVAL_S",
    "longest pause": "_LONGEST_PAUSE_S",
    "long wait": "_LONG_WAIT_S",
    "old checkpoint": "_OLD_CHECKPOINT_NS",
    "renewal": "_RENEWAL",
    "shrink": "_SHRINK_BYTES",
    "purge slice": "_PURGE_SLICE_S",
    "most in a batch": "_MAX_BATCH",
    "chunk": "_CHUNK",
}
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def seam(name: str, function: Callable[..., Any]) -> Any:
    """Return a patch that replaces a function of SEAMS."""
    return mock.patch.object(femtoqueue, SEAMS[name], function)


def through_seam(name: str) -> Callable[..., Any]:
    """Return femtoqueue's own function behind a name of SEAMS."""
    function: Callable[..., Any] = getattr(femtoqueue, SEAMS[name])
    return function


def constant(name: str) -> float:
    value: float = getattr(femtoqueue, CONSTANTS[name])
    return value


def with_constant(name: str, value: float) -> Any:
    return mock.patch.object(femtoqueue, CONSTANTS[name], value)


def on_file_system(fs_type: int) -> Any:
    """Return a patch: femtoqueue sees each directory on a file system of this f_type."""
    return seam("file system type", mock.Mock(return_value=fs_type))


def without_libc() -> Any:
    """Return a patch: inotify, fstatfs and syncfs do not exist."""
    return seam("C library", lambda: None)


def on_boot(boot_id: str | None) -> Any:
    """Return a patch: the kernel has this boot id. None: it has no boot id, as on systems other
    than Linux."""

    def opens(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path != BOOT_ID:
            return open(path, *args, **kwargs)
        if boot_id is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return io.StringIO(f"{boot_id}\n")

    return mock.patch.object(femtoqueue, "open", opens, create=True)


def lease_dir(q: FemtoQueue) -> str:
    # After an error, a worker may use a directory of another name than its node_id.
    return os.path.join(os.path.abspath(q.data_dir), q._worker.lease_dir.directory)


def descriptors_of(path: str) -> list[int]:
    wanted = os.stat(path)
    found = []
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            # listdir() used a descriptor that is now closed
            if os.path.samestat(os.fstat(fd), wanted):
                found.append(fd)
    return found


def simulate_death(q: FemtoQueue) -> None:
    """Make a worker look dead to other workers: close all descriptors of the lease directory. This
    drops the lock. The queue object must not be used afterwards."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for fd in descriptors_of(lease_dir(q)):
        # fd stays open: the object will close fd later
        os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


Hook = Callable[[str, tuple[Any, ...]], object]


def path_at(fd: int | None, name: Any) -> Any:
    """Return the full path of a name in the directory that the descriptor is open on."""
    if fd is None or not isinstance(name, str) or os.path.isabs(name):
        return name
    return os.path.normpath(os.path.join(os.readlink(f"/proc/self/fd/{fd}"), name))


def with_full_paths(
    event: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call, with full paths in place of names that are relative to a
    descriptor, and in place of the descriptor that is listed."""
    names = [*args]
    if event == "list" and names and type(names[0]) is int:
        names[0] = path_at(names[0], ".")
    if event == "symlink":
        names[1] = path_at(kwargs.get("dir_fd"), names[1])
    elif "dir_fd" in kwargs:
        names[0] = path_at(kwargs["dir_fd"], names[0])
    for place, key in enumerate(("src_dir_fd", "dst_dir_fd")):
        if key in kwargs:
            names[place] = path_at(kwargs[key], names[place])
    return tuple(names)


def hooked_call(
    hook: Hook, after: bool, event: str, call: Callable[..., Any], asks: bool = False
) -> Any:
    """Return `call`, wrapped so that the hook is called before it, or after it. With `asks`, the
    wrapped function returns False instead of raising OSError."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is str and args[0][:6] == "/proc/":
            # the boot id: not on a disk
            return call(*args, **kwargs)
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code.co_name == "__del__":
            # Python ignores an exception that a hook raises in a finalizer.
            return call(*args, **kwargs)
        named = with_full_paths(event, args, kwargs)
        try:
            if not after:
                hook(event, named)
            result = call(*args, **kwargs)
            if after:
                hook(event, named)
            return result
        except OSError:
            if not asks:
                raise
            return False

    return function


class HookedModule(types.ModuleType):
    """Stands in for os, os.path or fcntl, and wraps their functions for a hook."""

    def __init__(self, module: Any, wrap: Callable[..., Any]) -> None:
        super().__init__(module.__name__)
        self._module = module
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        it = getattr(self._module, name)
        is_wrapped = (
            not IN_PROCESS.fullmatch(name) if self._module is os else name in EVENTS
        )
        if is_wrapped and callable(it) and not isinstance(it, type):
            it = self._wrap(EVENTS.get(name, name), it, name in ASKING)
        setattr(self, name, it)  # __getattr__() is not called for this name again
        return it


class HookedLibrary:
    """Stands in for the C library, and wraps its functions for a hook. An OSError that the hook
    raises becomes a result of -1 and an errno."""

    def __init__(self, library: Any, wrap: Callable[..., Any]) -> None:
        self._library = library
        self._wrap = wrap

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import ctypes

        function: Callable[..., Any] = getattr(self._library, name)

        def call(*args: Any) -> Any:
            paths = [os.fsdecode(arg) for arg in args if isinstance(arg, bytes)]
            wrapped = self._wrap(EVENTS.get(name, name), lambda *_: function(*args))
            try:
                return wrapped(*(paths or args))
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1

        return call


@contextlib.contextmanager
def hooked(hook: Hook, *, after: bool = False) -> Iterator[None]:
    """Call hook(event, arguments) before each call of femtoqueue that touches a disk or another
    process. With `after`, call the hook after each such call. EVENTS has the names of the events.

    The garbage collector is off in the block. Otherwise finalizers of objects from earlier tests
    would also call the hook."""
    wrap = functools.partial(hooked_call, hook, after)
    library = through_seam("C library")()
    opens = wrap("open", getattr(femtoqueue, "open", open))
    with contextlib.ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        fake = HookedModule(os, wrap)
        fake.__dict__["path"] = HookedModule(os.path, wrap)
        stack.enter_context(mock.patch.object(femtoqueue, "os", fake))
        stack.enter_context(mock.patch.object(femtoqueue, "open", opens, create=True))
        if library is not None:
            stack.enter_context(seam("C library", lambda: HookedLibrary(library, wrap)))
        if locks := sys.modules.get("fcntl"):
            stack.enter_context(
                mock.patch.object(femtoqueue, "fcntl", HookedModule(locks, wrap))
            )
        yield


def interrupt() -> NoReturn:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


def do_nothing() -> None:
    pass


def is_counted(frame: types.FrameType, within: tuple[str, ...]) -> bool:
    """Return whether at_line() counts the lines of a frame. The lines of a finalizer do not count:
    Python only prints the exception of a finalizer, and the interrupted call goes on."""
    name = frame.f_code.co_name
    caller = frame.f_back
    if frame.f_code.co_filename != femtoqueue.__file__ or (
        within and name not in within
    ):
        return False
    return "__del__" not in (name, caller.f_code.co_name if caller else "")


def is_end_of_with(line: int, before: int) -> bool:
    """Return whether the trace shows the line of a `with` once more, at the end of the block.
    Python handles no signal between the block and __exit__()."""
    text = linecache.getline(femtoqueue.__file__, line)
    return line < before and text.lstrip().startswith("with ")


@contextlib.contextmanager
def at_line(
    number: int, action: Callable[[], object], within: tuple[str, ...] = ()
) -> Iterator[list[str]]:
    """Call action() once, after `number` lines of femtoqueue have run in the block, in any thread,
    and before the next line runs. A line counts each time it runs. With `within`, only the lines of
    these functions count. Yield a list, which is empty until action() is called. Then the list has
    a text: the function, and the number in the source of the line that was about to run."""
    reached = list[str]()
    left = itertools.count(number, -1)
    last: dict[int, int] = {}  # the last line of each frame, by the id() of the frame

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        if not is_counted(frame, within):
            return None
        line = frame.f_lineno
        before = last.get(id(frame), 0)
        last[id(frame)] = 0 if event == "call" else line
        is_reached = event == "line" and not is_end_of_with(line, before)
        if is_reached and next(left) == 0:
            sys.settrace(None)
            reached.append(f"{frame.f_code.co_name}:{line}")
            action()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(None)
        threading.settrace(None)


# The forms of names and records. This code is independent of femtoqueue's, so that an error there
# is not repeated here.

# nanoseconds, up to the year 2255; random digits
NUMBER, BOOT = "0[0-8][0-9]{18}", "[0-9a-f]{8}"
ID, KEYED_ID = f"{NUMBER}-[0-9a-f]{{16}}", f"{NUMBER}-[89a-f][0-9a-f]{{15}}"
STAMP = f"{NUMBER}~[0-9]{{1,6}}~"
TASKS = {  # the names of tasks in each state, as in femtoqueue's docstring
    # A file in these three directories may still have the name of a lease, with a boot id, because
    # a person has moved the file.
    **dict.fromkeys(("pending", "done", "failed"), f"({STAMP}({BOOT}~)?)?{ID}"),
    "scheduled": STAMP + ID,
    "inflight": f"{STAMP}{BOOT}~{ID}",
    "keys": f"({NUMBER}~0~|update~)?{KEYED_ID}",
}
COMPANIONS = {"creating": rf"{ID}(\.(clock|error|pending))?", "failed": rf"{ID}\.error"}
COMPANIONS["keys"] = "[89a-f][0-9a-f]{15}"
Record = tuple[bytes, "str | None"]


def is_id(text: str) -> bool:
    return re.fullmatch(ID, text) is not None


def is_task(state: str, name: str) -> bool:
    """Return whether a file of this name is a task, in the directory of this state."""
    return re.fullmatch(TASKS.get(state, "(?!)"), name) is not None


def is_ours(state: str, name: str) -> bool:
    """Return whether a file of this name is a task, or a companion of a task. Such a file belongs
    to the queue, which may move or remove the file."""
    return (
        is_task(state, name)
        or re.fullmatch(COMPANIONS.get(state, "(?!)"), name) is not None
    )


def read_record(content: bytes) -> Record | None:
    """Return the payload and the key of a record, or None if the record is invalid."""
    header, newline, payload = content.partition(b"\n")
    magic, _, rest = header.partition(b" ")
    fields = rest.split(b" ")
    if magic != b"FQ1" or not newline or not 2 <= len(fields) <= 3:
        return None
    name = fields[2] if len(fields) > 2 else b""
    sound = len(fields) == 2 or (name and all(32 < byte < 127 for byte in name))
    right = b"%08x" % binascii.crc32(name + payload) == fields[0]
    length = fields[1].lstrip(b"0") or fields[1][-1:]
    if not sound or not right or length != b"%d" % len(payload):
        return None
    raw = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name)
    return payload, raw.decode("utf-8", "replace") if name else None


def record(payload: bytes, name: bytes = b"") -> bytes:
    """Return a record of this payload. `name`: the key, as it is quoted in the header."""
    header = b"FQ1 %08x %d" % (binascii.crc32(name + payload), len(payload))
    return header + (b" " + name if name else b"") + b"\n" + payload


FOREVER_NS = 4 * 10**18  # the length of a lease without an end


def key_tag(key: str) -> str:
    """Return the hash of a key: the end of the ids of its tasks, and the name of keys/<hash>."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return f"{int.from_bytes(digest, 'big') | 1 << 63:016x}"


class Child:
    """A forked process that runs work(child). The process sends a line with say(), and the parent
    reads the line with line(). wait_for_go() in the process waits for go() in the parent."""

    def __init__(self, work: Callable[[Child], object], number: int = 0) -> None:
        self.chance = random.Random(f"{SEED} {number}")
        lines_in, lines_out = os.pipe()
        go_in, go_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(lines_in)
            os.close(go_out)
            self._lines_out = lines_out
            self._go_in = go_in
            self._run(work)
        os.close(lines_out)
        os.close(go_in)
        self._lines_in = os.fdopen(lines_in, encoding="ascii")
        self._go_out = go_out
        self._status: int | None = None

    def _run(self, work: Callable[[Child], object]) -> None:
        code = 1
        try:
            work(self)
            code = 0
        except BaseException as error:
            traceback.print_exception(error)
        finally:
            os._exit(code)

    def say(self, text: str) -> None:
        os.write(self._lines_out, f"{text}\n".encode("ascii"))

    def wait_for_go(self) -> None:
        if not os.read(self._go_in, 1):
            os._exit(0)  # the parent has ended

    def line(self) -> str:
        return self._lines_in.readline().rstrip("\n")

    def go(self) -> None:
        os.write(self._go_out, b"g")

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[list[str], int]:
        """Wait until the process ends. Return its unread lines and its exit status."""
        lines = [line.rstrip("\n") for line in self._lines_in]
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._lines_in.close()
            os.close(self._go_out)
        return lines, self._status

    def end(self) -> None:
        if self._status is None:
            self.kill()
            self.finish()


class QueueCase(unittest.TestCase):
    """A test with a queue directory, `path`, and helpers that check the queue's invariants."""

    foreign: tuple[str, ...] = ()  # names of files that are not the queue's
    in_memory = True  # False: the tests promise something about the disk
    memory = memory_dir()
    fs_type: int | None = None  # the f_type that femtoqueue sees; None: the real one

    def setUp(self) -> None:
        self.path = self.new_dir(self.memory if self.in_memory else None)
        self.chance = random.Random(SEED)
        self.children = itertools.count()
        LOG.disabled = True  # corrupt tasks are logged, and many tests make some
        if self.fs_type is not None:
            self.patched(on_file_system(self.fs_type))

    def patched(self, patch: Any) -> None:
        """Apply a patch, until the test ends."""
        patch.start()
        self.addCleanup(patch.stop)

    def new_dir(self, place: str | None = None) -> str:
        """Make a directory in `place`, or in the temporary directory. It is removed after the
        test."""
        path = tempfile.mkdtemp(prefix="femtoqueue-test-", dir=place)
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return path

    def queue(self, node_id: str | None = "n1", **settings: Any) -> FemtoQueue:
        """Open the queue in `path`. It is closed after the test."""
        q = FemtoQueue(self.path, node_id, **settings)
        self.addCleanup(q.close)
        return q

    def new_queue(self, **settings: Any) -> FemtoQueue:
        """Set `path` to a new directory, and open a queue there."""
        self.path = self.new_dir(self.memory if self.in_memory else None)
        return self.queue(**settings)

    def child(self, work: Callable[[Child], object]) -> Child:
        """Start a forked process. It is killed after the test, if it still runs."""
        child = Child(work, next(self.children))
        self.addCleanup(child.end)
        return child

    def clock(self) -> Clock:
        """Replace femtoqueue's clock by a Clock, which the test advances, and return the Clock.

        After a call of clock(), a part of the maintenance that took long makes no longer pause. On
        a busy machine, such a pause could be longer than the time by which a test advances the
        Clock."""
        clock = Clock()
        self.patched(mock.patch.object(femtoqueue, "time", clock))
        self.set_constant("longest pause", 0)
        return clock

    def pop(self, q: FemtoQueue) -> FemtoTask:
        """Pop a task, which must be there, and check the invariants."""
        task = q.pop()
        assert task is not None, "a task was there to be popped"
        self.check_invariants()
        return task

    def take(
        self, q: FemtoQueue, key: str | None = None, id: str | None = None
    ) -> FemtoTask:
        """Take a task by its key or id; the task must be there."""
        return q.take(key, id=id) or self.fail("a task was there to be taken")

    def drain(self, q: FemtoQueue) -> list[bytes]:
        """Pop and finish all tasks. Return their payloads, in the order of delivery."""
        payloads = []
        while task := q.pop():
            payloads.append(task.data)
            q.done(task)
        self.check_invariants()
        return payloads

    def set_constant(self, name: str, value: float) -> None:
        """Replace a constant of femtoqueue, mostly a duration, until the test ends."""
        self.patched(with_constant(name, value))

    def boot(self) -> str:
        """Return <boot>, the part of a lease's name that stands for this boot of the kernel. Fail
        unless there is exactly one file clock-<boot>."""
        names = [name for name in os.listdir(self.path) if name.startswith("clock-")]
        self.assertEqual(len(names), 1)
        return names[0][len("clock-") :]

    def check_one_clock(self, *queues: FemtoQueue) -> None:
        """Push a task with each queue object. Fail if the orders of the tasks differ by an hour:
        then the queue objects have different queue clocks."""
        orders = [int(q.push(b"")[:20]) for q in queues]
        self.assertLess(max(orders) - min(orders), 3600 * 10**9)

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(os.path.join(self.path, directory)))

    def file(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def locked(self, key: str, wait: bool = True) -> io.FileIO:
        """Lock a key, as a process does while it moves the key's task. Return a file: closing the
        file unlocks the key. Raises BlockingIOError if `wait` is False and the key is locked."""
        path = self.file("locks", key_tag(key)[-2:])
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT), "r+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            file.close()
            raise
        return file

    def is_free(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            try:
                self.locked(key, wait=False).close()
            except BlockingIOError:
                return False
        return True

    def check_unlocked(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)

    def put(self, name: str, content: bytes, directory: str = "pending") -> str:
        path = self.file(directory, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def forked_unseen(self, work: Callable[[], object]) -> int:
        """Run work() in a child that a C library forks, so that no hook of Python is called. Return
        the pid of the child. check_exit() waits for it."""
        import ctypes

        pid: int = ctypes.PyDLL(None).fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def check_exit(self, pid: int) -> None:
        self.assertEqual(os.waitpid(pid, 0)[1], 0)

    def check_invariants(self, *, leftovers: bool = False) -> dict[str, str]:
        """Fail unless each task is in exactly one directory and each name has a valid form. Without
        `leftovers`, also fail unless creating/ is empty. Return the directory of each task, by id.
        """
        where: dict[str, str] = {}
        for directory in sorted(os.listdir(self.path)):
            state = "inflight" if directory.startswith("inflight-") else directory
            if state not in (*femtoqueue.STATES, "keys") or os.path.isfile(
                self.file(directory)
            ):
                continue
            for name in self.names(directory):
                if not is_task(state, name):
                    known = is_ours(state, name) or name in self.foreign
                    self.assertTrue(known, f"{directory}/{name} has no valid form")
                    continue
                self.assertNotIn(name[-37:], where, f"in {directory} too")
                where[name[-37:]] = directory
        if not leftovers:
            self.assertEqual(set(self.names("creating")) - set(self.foreign), set())
        return where

    def states(self) -> Counter[str]:
        """Check the invariants. Return the number of tasks in each directory."""
        return Counter(self.check_invariants().values())


# A task's life


def at_call(
    event: str, of: Any, action: Callable[[], object], times: int = 10**9
) -> Hook:
    """Return a hook that calls action() before each call of an event, at most `times` times.

    `event` may name several events: "open move". If `of` is not None, a call counts only if an
    argument equals `of`, or is a path that contains `of`."""
    left = itertools.count(times, -1)
    events = event.split()

    def hook(name: str, args: tuple[Any, ...]) -> None:
        in_path = any(isinstance(it, str) and str(of) in it for it in args)
        if name in events and (of is None or of in args or in_path) and next(left) > 0:
            action()

    return hook


def raise_errno(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


def errno_raiser(code: int) -> Callable[[], NoReturn]:
    return functools.partial(raise_errno, code)


def calls_of(event: str, work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Run work(). Return the arguments of each call of this event."""
    calls: list[tuple[Any, ...]] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name == event:
            calls.append(args)

    with hooked(note):
        work()
    return calls


@contextlib.contextmanager
def in_threads(*works: Callable[[], object]) -> Iterator[None]:
    """Run each function in a thread during the block. At the end of the block, wait for the
    threads."""
    threads = [threading.Thread(target=it, daemon=True) for it in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE_S)


def reason_of(q: FemtoQueue, ident: str) -> str:
    with open(
        os.path.join(q.data_dir, "failed", f"{ident}.error"), encoding="utf-8"
    ) as file:
        return file.read()


def popped(q: FemtoQueue, timeout: float = 0) -> FemtoTask:
    """Pop a task, which must be there, without a check of the invariants."""
    task = q.pop(timeout)
    assert task is not None
    return task


def leased(q: FemtoQueue, data: bytes = b"x", key: str | None = None) -> FemtoTask:
    """Push a task, and return a lease of the oldest task."""
    q.push(data, key=key)
    return popped(q)


# Calls with a wrong argument, which must be refused. A Refusal has four parts:
# - a function that makes the call; it gets a queue, a task that the queue has leased, and a wrong
#   argument;
# - the type of the exception;
# - a pattern of the message; in the pattern, {it} stands for the wrong argument, or, if that is
#   None, for the task;
# - the wrong arguments. NO_BYTES are values that are not accepted as bytes, and so on.
Refusal = tuple[
    Callable[[Any, Any, Any], object], type[Exception], str, tuple[Any, ...]
]
NAN, INFINITE = float("nan"), float("inf")
NO_BYTES = 7, None, memoryview(b"abcd")[::2], ["x"]
NO_TIMES = NAN, INFINITE, 9e15, 1e300, 1e308, 10**400
NO_AGES = -1, NAN, INFINITE


class AsyncHandlers:
    """Handlers that are async functions. A call of such a handler only makes a coroutine or an
    async generator, so the code of the handler would never run."""

    async def __call__(self, task: FemtoTask) -> None:
        raise AssertionError

    async def each(self, task: FemtoTask) -> AsyncIterator[FemtoTask]:
        yield task


NO_HANDLERS = (
    7,
    asyncio.sleep,
    lambda task: (yield task),
    AsyncHandlers(),
    AsyncHandlers().each,
)
NO_KEYS = "", "k" * 201, "\u00e9" * 101, "\udc80"
NO_TEXTS = 7, b"k", ("k",)
NO_TASK: tuple[dict[str, str], ...] = (
    {},
    {"key": "k", "id": f"{0:020d}-0000000000000000"},
)
NO_RELEASE = {"front": True, "delay_s": 1}, {"delay_s": -1}, {"delay_s": NAN}
NO_SETTINGS: tuple[tuple[str, type[Exception], tuple[Any, ...]], ...] = (
    ("node_id", ValueError, ("", "a/b", "a" * 101, "größe", "a\n")),
    ("node_id", TypeError, (7,)),
    ("timeout_stale_ms", ValueError, (0, NAN, 10**400)),
    ("timeout_stale_ms", TypeError, ("1",)),
    ("max_attempts", ValueError, (0, True, 10**6)),
    ("data_dir must be a str or a path", TypeError, (b"jobs", 3, None, ["jobs"])),
    ("data_dir", ValueError, ("",)),
    ("keep_done", TypeError, ("1d",)),
    ("keep_done", ValueError, NO_AGES),
    ("retry_delay_s", ValueError, (-1,)),
    ("poll_interval_s", ValueError, (-1,)),
)
NO_SECONDS: tuple[Any, ...] = ("1", True, [])
NO_TIMEOUTS = -1, NAN, INFINITE
NO_MEMBERS = "pending", "../x", None
# fmt: off
REFUSALS: tuple[Refusal, ...] = (
    (lambda q, task, it: q.push(it), TypeError, "encode it", ("text",)),
    (lambda q, task, it: q.push(it), TypeError, "bytes-like", NO_BYTES),
    (lambda q, task, it: q.push(b"x", delay_s=it), ValueError, "delay_s", NO_AGES),
    (lambda q, task, it: q.push(b"x", delay_s=it), TypeError, "delay_s", ("1", None, [])),
    (lambda q, task, it: q.push_many(it), TypeError, "for one payload use push", (b"123",)),
    (lambda q, task, it: q.schedule(it, 0), TypeError, "bytes-like", NO_BYTES),
    (lambda q, task, it: q.schedule(b"x", it), TypeError, "time_us", ("1", None, True)),
    (lambda q, task, it: q.schedule(b"x", it), ValueError, "time_us", NO_TIMES),
    (lambda q, task, it: q.pop(lease_ms=it), ValueError, "lease_ms", (0, -1, NAN)),
    (lambda q, task, it: q.take(**it), TypeError, "either a key or an id", NO_TASK),
    (lambda q, task, it: q.push(it, key="k"), TypeError, "encode it", ("text",)),
    (lambda q, task, it: q.push(b"x", key=it), ValueError, "", NO_KEYS),
    (lambda q, task, it: q.push(b"x", key=it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.push(b"x", if_in_flight=it), TypeError, "needs a key", ("update",)),
    (lambda q, task, it: q.push(b"x", key="k", if_in_flight=it), ValueError, "or reject", ("x",)),
    (lambda q, task, it: q.schedule(b"x", 0, key=it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.take(it), ValueError, "", NO_KEYS),
    (lambda q, task, it: q.contains(it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.keys(it), ValueError, "state", ("buffered",)),
    (lambda q, task, it: q.peek(**it), TypeError, "either an id or a key", NO_TASK),
    (lambda q, task, it: q.take(id=it), ValueError, "not the id", ("../x",)),
    (lambda q, task, it: q.done(it), TypeError, "FemtoTask", (None,)),
    (lambda q, task, it: q.checkpoint(it, b""), TypeError, "FemtoTask", (None, "id")),
    (lambda q, task, it: q.done(q.peek(task.id)), LeaseLost, "or take.. gives one", (None,)),
    (lambda q, task, it: q.fail(task, it), TypeError, "text or an exception", (7,)),
    (lambda q, task, it: q.release(task, **it), ValueError, "delay_s", NO_RELEASE),
    (lambda q, task, it: q.release(task, delay_s=it), TypeError, "delay_s", ("1",)),
    (lambda q, task, it: q.extend(task, it), ValueError, "ms", (0, -1, NAN, INFINITE)),
    (lambda q, task, it: q.retry(it), TypeError, "id", (None,)),
    (lambda q, task, it: q.retry(it), ValueError, "not the id", ("", "../pending/x", "x" * 29)),
    (lambda q, task, it: q.retry(task.id), TaskNotFound, "{it.id}", (None,)),
    (lambda q, task, it: q.purge(it), ValueError, "older_than_s", (-1, NAN)),
    (lambda q, task, it: q.purge(0, states=("done", it)), ValueError, "{it}", ("pending", 7)),
    (lambda q, task, it: q.peek(it), ValueError, "not the id", ("../secrets",)),
    (lambda q, task, it: q.attach(it), TypeError, "lease must be a str", (None, 5, b"x")),
    (lambda q, task, it: q.tasks(it), ValueError, "state must be one of", ("waiting",)),
    (lambda q, task, it: q.pop(it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.pop(it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.drain(it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.drain(it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.take("key", it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.take("key", it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.work(it), TypeError, "neither async nor a generator", NO_HANDLERS),
    (lambda q, task, it: q.work(print, concurrency=it), ValueError, "concurrency", (0, 1.5)),
    (lambda q, task, it: q.work(print, stop=it), TypeError, "stop", (True,)),
    (lambda q, task, it: q.work(print, idle_timeout_s=it), ValueError, "idle_timeout_s", (-1,)),
    (lambda q, task, it: q.work(print, time_limit_s=it), ValueError, "time_limit_s", (NAN,)),
    (lambda q, task, it: q.work(print, time_limit_s=it), TypeError, "time_limit_s", ("1",)),
    (lambda q, task, it: q.processing(it), TypeError, "", (b"x",)),
    (lambda q, task, it: q.checkpoint(task, it), TypeError, "", ("text",)),
    (lambda q, task, it: TicketQueue(it), ValueError, "queue_dir", ("",)),
    (lambda q, task, it: TicketQueue(it), TypeError, "queue_dir", (b"line",)),
    (lambda q, task, it: TicketQueue(q.data_dir, it), ValueError, "stale_timeout", (0,)),
    (lambda q, task, it: TicketQueue(q.data_dir, it), TypeError, "stale_timeout", ("1",)),
    (lambda q, task, it: TicketQueue(q.data_dir).turn(it).__enter__(), TypeError, "", ("1",)),
    (lambda q, task, it: TicketQueue(q.data_dir).remove(it), ValueError, "member", NO_MEMBERS),
)
# fmt: on


class Lifecycle(QueueCase):
    """A task's way from push() to done() or fail(); the calls that look at tasks or operate a
    queue."""

    in_memory = False

    def test_schedule_takes_a_datetime_with_a_time_zone_and_refuses_seconds(
        self,
    ) -> None:
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        utc = datetime.timezone.utc
        due = datetime.datetime.fromtimestamp(time.time(), utc) + datetime.timedelta(
            hours=1
        )
        ident = q.schedule(b"x", due)
        self.assertEqual(next(q.tasks("scheduled")).until, due)
        clock.advance(3599)
        self.assertIsNone(q.pop())
        clock.advance(2)
        self.assertEqual(self.pop(q).id, ident)
        with self.assertRaisesRegex(ValueError, "time zone"):
            q.schedule(b"x", due.replace(tzinfo=None))
        for seconds in (time.time(), time.time() * 1e3, 1e6, 94_694_399.0):
            with self.assertRaisesRegex(ValueError, "microseconds, as time.time"):
                q.schedule(b"x", seconds)
        # Programs for version 0.4 pass such times for a task that is due at once.
        for past_us in (-1e13, 0, 1, 300_000):
            self.assertEqual(q.schedule(b"now", past_us), self.pop(q).id)

    def test_delayed_push_is_delivered_after_its_delay(self) -> None:
        """push(delay_s=) hides a task for that time, also if the wall clock is near 1970."""
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        for shift_s in (0, 60 - time.time()):
            clock.wall_shift_s = shift_s
            idents = q.push(b"x", delay_s=60), q.push(b"y", delay_s=60, key="k")
            clock.advance(59)
            self.assertIsNone(q.pop())
            clock.advance(2)
            for ident in idents:
                task = self.pop(q)
                q.done(task)
                self.assertEqual(task.id, ident)

    def test_delayed_push_before_1970_has_a_valid_name(self) -> None:
        q = self.queue()
        self.clock().wall_shift_s = -3600 - time.time()
        q.push(b"x", delay_s=60)
        self.assertEqual(self.states(), {"scheduled": 1})

    def test_done_removes_the_task_if_done_can_not_take_it(self) -> None:
        """On a full disk, or if done/ can't be used, done() removes the task. On another error, the
        task stays leased."""
        for code, key in (
            (errno.ENOSPC, None),
            (errno.EDQUOT, "k"),
            (errno.EACCES, None),
            (errno.ENOTDIR, "k"),
            (errno.EXDEV, None),
        ):
            q = self.new_queue()
            task = leased(q, key=key)
            full = at_call("move", "/done/", errno_raiser(code))
            said = self.assertLogs("femtoqueue", "WARNING")
            with hooked(full), mock.patch.object(LOG, "disabled", False), said as logs:
                q.done(task)
            self.assertIn("is done, and removed: done/ can't take it", logs.output[0])
            self.assertEqual(self.states(), {})
            self.assertIsNone(q.pop())
            task = leased(q, key=key)
            with (
                hooked(at_call("move", "/done/", errno_raiser(errno.EIO))),
                self.assertRaises(OSError),
            ):
                q.done(task)
            self.assertEqual(self.states(), {"inflight-n1": 1})

    @unittest.skipUnless(sys.platform == "linux", "PATH_MAX of Linux")
    def test_a_data_dir_that_is_too_long_for_a_lease_is_refused(self) -> None:
        """If the constructor accepts a data_dir with a long path, a pushed task is delivered."""
        opened = 0
        for length in range(3990, 4060):
            path = self.path + f"/{'d' * 199}" * ((length - len(self.path)) // 200 - 1)
            path += "/" + "d" * ((length - len(path) - 2) // 2)
            path += "/" + "d" * (length - len(path) - 1)
            try:
                q = FemtoQueue(path, "node" * (length % 4) or None)
            except OSError as error:
                self.assertEqual(error.errno, errno.ENAMETOOLONG)
            else:
                opened += 1
                q.push(b"x")
                self.assertIsNotNone(q.pop())
                q.close()
        self.assertGreater(opened, 0)

    def test_messages_say_what_happened(self) -> None:
        q = self.queue()
        self.assertEqual(repr(q), f"FemtoQueue({self.path!r}, node_id='n1')")
        self.assertEqual(
            repr(TicketQueue(self.file("line"))), f"TicketQueue({self.file('line')!r})"
        )
        with self.assertRaisesRegex(TypeError, "not dict: encode it, .*json.dumps"):
            q.push({"a": 1})  # type: ignore[arg-type]

    def test_message_of_a_lost_lease_says_how_it_ended(self) -> None:
        q = self.queue(timeout_stale_ms=1000)
        task = leased(q)
        q.done(task)
        with self.assertRaisesRegex(
            LeaseLost, "has ended before; its outcome was: done"
        ):
            q.done(task)
        task = leased(q)
        clock = self.clock()
        clock.advance(2)
        os.unlink(self.file(task.path))
        with self.assertRaisesRegex(
            LeaseLost, r"its lease of 1 s ran out [1-9]\d*\.\d+ s ago"
        ):
            q.done(task)
        q.push(b"x")
        task = q.pop(lease_ms=30) or self.fail("a task was there")
        clock.advance(2)
        os.unlink(self.file(task.path))
        with self.assertRaisesRegex(LeaseLost, r"its lease of 0\.03 s ran out"):
            q.done(task)

    def test_payload_is_delivered_unchanged(self) -> None:
        """A payload of any size and of any bytes-like type is delivered as it was pushed."""
        # Files of more than 4096 bytes are read in another way. A memoryview must be contiguous,
        # but its items may have any size.
        q = self.queue()
        sizes = (0, 1, 100, 4079, 4080, 4081, 4082, 4096, 10**6, 64 * 10**6)
        payloads: list[Any] = [random.Random(size).randbytes(size) for size in sizes]
        payloads += [
            bytearray(b"ab"),
            memoryview(b"abcd")[1:3],
            memoryview(b"abcdefgh").cast("I"),
        ]
        for payload in payloads:
            q.push(payload)
            task = self.pop(q)
            self.assertTrue(task.data == bytes(payload), f"{len(task.data)} bytes")
            q.done(task)

    def test_wrong_arguments_are_refused_and_change_nothing(self) -> None:
        q = self.queue()
        task = leased(q)
        new = self.file("new")
        for call, error, text, wrong_arguments in REFUSALS:
            for it in wrong_arguments:
                pattern = text.format(it=task if it is None else it)
                with self.subTest(text, it=it), self.assertRaisesRegex(error, pattern):
                    call(q, task, it)
        for name, error, wrong_arguments in NO_SETTINGS:
            for it in wrong_arguments:
                with self.subTest(name, it=it), self.assertRaisesRegex(error, name):
                    FemtoQueue(**{"data_dir": new, name.partition(" ")[0]: it})
        self.assertEqual(self.states(), {"inflight-n1": 1})
        self.assertFalse(os.path.exists(self.file("keys")) or os.path.exists(new))
        q.done(task)

    def test_member_of_a_str_enum_counts_as_its_value(self) -> None:
        """A member of a str enum works like its value as key, state, id, node_id, directory or
        reason."""
        # From Python 3.11 on, format() of a member gives another text than the value.
        ident = self.queue().push(b"x", key="k")

        class Word(str, enum.Enum):
            DIRECTORY = self.path
            NODE = "n2"
            ID = ident
            KEY, WHY = "k", "why"
            PENDING, FAILED = "pending", "failed"

        q: Any = self.queue(Word.NODE)  # a type checker wants the literals
        self.assertEqual(q.push(b"y", key=Word.KEY), ident)
        self.assertEqual(
            ([*q.keys(Word.PENDING)], len([*q.tasks(Word.PENDING)])), (["k"], 1)
        )
        with FemtoQueue(Word.DIRECTORY, Word.NODE) as other:
            task = self.take(other, id=Word.ID)
            self.assertEqual((task.node, type(other.node_id)), ("n2", str))
            self.assertEqual(q.attach(Word.ID).path, task.path)
            other.fail(task, Word.WHY)
        for found in (q.peek(Word.ID), *q.tasks(Word.FAILED)):
            assert found is not None
            self.assertEqual((found.path, found.error), (f"failed/{ident}", "why"))
        q.retry(Word.ID)
        q.fail(self.pop(q))
        self.assertEqual(q.purge(0, Word.FAILED), 1)

    def test_task_objects_compare_by_value_but_only_a_lease_can_be_settled(
        self,
    ) -> None:
        """A leased task equals the task that peek() returns, but only the leased object can end the
        delivery."""
        # If the caller changes an attribute of the object, nothing changes in the queue.
        q = self.queue()
        ident = q.push(b"x")
        task = self.pop(q)
        seen = q.peek(ident)
        copy = FemtoTask(ident, b"x", 1)
        self.assertEqual(({task, seen, copy}, task == ident), ({task}, False))
        self.assertNotEqual(task, FemtoTask(ident, b"x", 2))
        self.assertEqual(
            repr(task), f"FemtoTask(id='{ident}', data=b'x', attempts=1, key=None)"
        )
        self.assertAlmostEqual(task.created.timestamp(), time.time(), delta=60)
        self.assertEqual(str(task.created.tzinfo), "UTC")
        self.assertRaises(LeaseLost, q.done, copy)
        task.id = "../x"
        q.done(pickle.loads(pickle.dumps(task)))
        self.assertEqual(self.names("done"), [ident])
        with self.assertRaisesRegex(LeaseLost, f"{ident}.*finished") as caught:
            q.done(task)
        self.assertEqual(
            (caught.exception.id, caught.exception.expired), (ident, False)
        )

    def test_task_of_another_queue_is_refused_and_the_error_says_so(self) -> None:
        task = leased(self.queue())
        self.path = self.new_dir(self.memory)
        with self.assertRaisesRegex(LeaseLost, "or of another queue"):
            self.queue().done(task)

    def test_attach_to_an_ended_lease_says_whether_it_expired(self) -> None:
        q = self.queue()
        clock = self.clock()
        path = leased(q).path
        waiting = f"pending/{q.push(b'waits')}"
        q.done(q.attach(path))
        for expired in (False, True):
            for lease in (path, path.rpartition("/")[2]):
                with self.assertRaises(LeaseLost) as caught:
                    q.attach(lease)
                self.assertEqual(caught.exception.expired, expired)
            clock.advance(31)
        for no_lease in ("what~is~this", waiting, waiting[-4:]):
            with self.assertRaises(LeaseLost) as caught:
                q.attach(no_lease)
            found = f"now it is {waiting}" in str(caught.exception)
            self.assertEqual(found, no_lease == waiting)

    def test_done_of_a_lost_lease_says_so_although_done_is_another_mount(self) -> None:
        # The system compares the mounts first, and does not look for the lease.
        q = self.queue()
        task = leased(q)
        os.rename(self.file(task.path), self.file("pending", task.id))
        with hooked(at_call("move", "/done/", errno_raiser(errno.EXDEV))):
            self.assertRaises(LeaseLost, q.done, task)
        self.assertEqual(self.states(), {"pending": 1})

    def test_id_with_a_shorter_tag_is_of_no_task(self) -> None:
        q = self.queue()
        ident = q.push(b"x")
        for known in (ident[:-8], "0" * 20 + "-00000000"):
            self.assertIsNone(q.take(id=known))
            self.assertIsNone(q.peek(known))
            self.assertRaises(TaskNotFound, q.retry, known)
        self.assertRaises(ValueError, q.peek, ident[:-9])

    def test_changed_id_of_a_task_object_is_not_used_in_file_names(self) -> None:
        q = self.queue(keep_done=False, retry_delay_s=0)
        ident = q.push(b"x")

        def assigned() -> FemtoTask:
            task = self.take(q, id=ident)
            task.id = "order-17"
            return task

        q.release(assigned())
        q.release(assigned(), front=True)
        q.release(assigned(), delay_s=1e-9)
        with self.assertRaises(ValueError), q.processing(assigned()) as task:
            q.extend(task)
            q.checkpoint(task, b"half")
            raise ValueError
        task = assigned()
        self.assertEqual((task.attempts, task.checkpoint), (5, b"half"))
        q.done(task)
        self.assertEqual(self.states(), {})

    def test_tasks_released_to_the_front_are_delivered_in_the_order_of_push(
        self,
    ) -> None:
        q = self.queue()
        payloads = [b"%d" % number for number in range(8)]
        q.push_many(payloads)
        for task in [self.pop(q) for _ in range(3)]:
            q.release(task, front=True)
        self.assertEqual(self.drain(q), payloads)

    def test_fail_keeps_an_exception_with_its_traceback(self) -> None:
        """fail() stores the traceback of an exception, even if its text is not valid Unicode."""
        q = self.queue()
        ident = q.push(b"1")
        try:
            raise ValueError("größe \udc80")  # not KeyError, whose text is quoted
        except ValueError as error:
            q.fail(self.pop(q), error)
        self.assertRegex(
            reason_of(q, ident), r"\ATraceback[^$]*in test_fail_keeps_an_exception"
        )

    def test_times_that_names_can_not_hold_become_the_earliest_or_the_latest(
        self,
    ) -> None:
        """A time outside the range of file names becomes the first or last time of the range."""
        # A lease of a nanosecond can still be settled while no other worker reclaims it.
        q = self.queue(timeout_stale_ms=1e-6)
        for lease_ms in (None, 1e-6):
            q.push(b"x")
            task = q.pop(lease_ms=lease_ms) or self.fail(
                "a task was there to be popped"
            )
            q.extend(task, 1e-6)
            q.extend(task, 1e300)
            q.release(task, delay_s=1e300)
        q.schedule(b"before 1970", -5e15)
        self.assertEqual(
            (self.drain(q), len(self.names("scheduled"))), ([b"before 1970"], 2)
        )

    def test_push_many_that_fails_half_way_says_how_many_were_pushed(self) -> None:
        """If push_many() fails half way, the payloads before the error are pushed, and the
        exception has their ids."""
        # If the attribute `pushed_ids` can't be set, the exception is raised without it.
        q = self.queue()
        with self.assertRaisesRegex(TypeError, "encode it") as caught:
            q.push_many([b"1", b"2", "3", b"4"])  # type: ignore[list-item]
        self.assertEqual(len(caught.exception.pushed_ids), 2)  # type: ignore[attr-defined]

        class Frozen(Exception):
            def __setattr__(self, name: str, value: object) -> None:
                if name == "pushed_ids":
                    raise AttributeError(name)

        def payloads() -> Iterator[bytes]:
            yield b"3"
            raise Frozen

        self.assertRaises(Frozen, q.push_many, payloads())
        self.assertEqual(self.drain(q), [b"1", b"2", b"3"])

    # Scheduled tasks

    def test_many_due_tasks_are_enqueued_in_several_rounds(self) -> None:
        """If very many tasks are due, one pop() moves only some of them to pending/."""
        # During these moves, pop() holds the worker's lock: no lease of the worker can be renewed.
        q = self.queue()
        clock = self.clock()
        wanted = [b"%d" % number for number in range(20)]
        for due_us, data in enumerate(wanted, 10**14):
            q.schedule(data, due_us)
        with hooked(at_call("move", "/scheduled/", lambda: clock.advance(0.1))):
            first = self.pop(q)
            self.assertGreater(len(self.names("scheduled")), 10)
            self.assertEqual([first.data, *self.drain(q)], wanted)
        q.done(first)

    def test_due_task_scheduled_by_another_process_is_seen_at_once_if_none_waits(
        self,
    ) -> None:
        self.clock().stand_still()  # no job comes due
        q, other = self.queue(), self.queue("n2")
        self.assertIsNone(q.pop())
        other.schedule(b"1", 0)
        self.assertEqual(self.pop(q).data, b"1")

    def test_due_task_that_a_person_removes_while_take_moves_it_is_not_taken(
        self,
    ) -> None:
        self.clock().stand_still()  # no job comes due
        q = self.queue()
        self.assertIsNone(q.pop())
        self.queue("n2").schedule(b"2", 0, key="k")
        path = self.file("scheduled", *self.names("scheduled"))
        with hooked(at_call("move", "/scheduled/", lambda: os.unlink(path))):
            self.assertIsNone(q.take("k"))

    def test_scheduled_task_whose_early_take_fails_keeps_its_due_time(self) -> None:
        q = self.queue()
        ident = q.schedule(b"later", (time.time() + 1000) * 1e6)
        with hooked(at_call("read", None, errno_raiser(errno.EIO))):
            self.assertRaises(OSError, q.take, id=ident)
        self.assertEqual((q.pop(), self.states()), (None, {"scheduled": 1}))

    # Finished tasks, and operating a queue

    def test_join_does_not_miss_a_task_that_moves_while_it_looks(self) -> None:
        self.check_join_sees_a_task_that_moves()

    def test_join_does_not_miss_a_moving_task_where_times_have_whole_seconds(
        self,
    ) -> None:
        # If two moves come in the same second, the second one does not change the time. The clock
        # of these times advances only in sleep().
        now_s = 1e9
        seen: dict[Any, tuple[int, int]] = {}
        real = os.lstat

        def lstat(name: Any, **options: Any) -> Any:
            found = real(name, **options)
            if name not in ("pending", "scheduled"):
                return found
            if seen.get(name, (0, 0))[0] != found.st_ctime_ns:
                seen[name] = found.st_ctime_ns, int(now_s) * 10**9
            return types.SimpleNamespace(st_ctime_ns=seen[name][1], st_mode=0)

        def sleep(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        self.check_join_sees_a_task_that_moves(
            mock.patch("os.lstat", lstat), mock.patch("time.sleep", sleep)
        )

    def check_join_sees_a_task_that_moves(self, *patches: Any) -> None:
        # Another worker releases and takes the task, in turn. The task is always in the directory
        # that join() does not list at that moment.
        q, other = self.queue(), self.queue("n2")
        lease = self.file(leased(q).path)
        waits = self.file("pending", lease[-37:])

        def move(source: str, target: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                os.rename(source, target)

        take = at_call("list", "/pending", lambda: move(waits, lease))
        give = at_call("list", "/inflight-n1", lambda: move(lease, waits))
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(hooked(lambda *call: (take(*call), give(*call))))
            self.assertFalse(other.join(0))

    def test_long_reason_is_shown_whole(self) -> None:
        """A reason of a hundred thousand letters is shown whole."""
        q = self.queue()
        task = leased(q)
        q.fail(task, "x" * 100_000)
        failed = q.peek(task.id)
        assert failed is not None
        self.assertEqual(failed.error, "x" * 100_000)

    def test_finished_tasks_are_deleted_after_keep_done_seconds(self) -> None:
        # Each pop() lists only a slice of done/, so that no single pop() lists all of it.
        q = self.queue(keep_done=60)
        clock = self.clock()
        with with_constant("purge slice", 0):
            for _ in range(10):
                q.done(leased(q))
            self.put("notes.txt", b"", "done")
            self.foreign = ("notes.txt",)
            clock.advance(30)
            q.done(leased(q))
            os.utime(self.file("done"))
            self.assertEqual(len(self.names("done")), 12)
            clock.advance(61)
            counts = []
            for _ in range(40):
                clock.advance(0.5)
                self.assertIsNone(q.pop())
                counts.append(len(self.names("done")))
        self.assertEqual(self.names("done"), ["notes.txt"])
        self.assertLessEqual(
            max(a - b for a, b in itertools.pairwise([12, *counts])), 4
        )

    def test_slices_of_done_follow_quickly_while_old_tasks_are_found(self) -> None:
        q = self.queue(keep_done=1)
        clock = self.clock()
        clock.stand_still()  # the pause depends on the time that a slice takes
        with with_constant("purge slice", 0):
            for _ in range(5):
                q.done(leased(q))
            clock.advance(2)
            for left in (4, 3, 2, 1, 0):
                self.assertEqual((q.pop(), len(self.names("done"))), (None, left))
                clock.advance(0.02)

    def test_paused_queue_hands_out_no_task(self) -> None:
        """While the queue is paused, no task is handed out, even if it was listed before."""
        # A queue object stops at once if its own pause() was called. Other objects stop within a
        # second, even if their last listing took long.
        clock = self.clock()
        q, other = self.queue(), self.queue("n2")
        clock.stand_still()  # no job comes due
        ways: tuple[tuple[FemtoQueue, float, Callable[[], object]], ...] = (
            (q, 0, lambda: None),
            (other, 9, lambda: clock.advance(1)),
        )
        for (pauser, listing_s, notice), listed in itertools.product(ways, (1, 3)):
            with self.subTest(
                listed=listed, pauser=pauser.node_id, listing_s=listing_s
            ):
                ids = q.push_many([b"x"] * listed)
                slow = at_call(
                    "list", "pending", functools.partial(clock.advance, listing_s)
                )
                with hooked(slow):
                    q.done(self.pop(q))
                pauser.pause()
                ids.append(q.push(b"y"))
                notice()
                self.assertEqual((q.pop(), q.take(id=ids[-1])), (None, None))
                pauser.resume()
                self.assertEqual(len(self.drain(q)), listed)

    def test_task_with_a_second_name_in_an_end_state_can_be_finished(self) -> None:
        """A task whose file has a name in pending/ and one in done/ or failed/ can be settled."""
        # A file system that has healed after a network failure may show two names of one file. Then
        # rename() of one name to the other does nothing, and reports success.
        q = self.queue()
        clock = self.clock()
        for state, end in (("done", q.done), ("failed", q.fail)):
            ident = q.push(b"x")
            os.link(self.file("pending", ident), self.file(state, ident))
            for _ in range(2):
                end(popped(q))
                clock.advance(31)
            self.assertIsNone(q.pop())
            self.assertEqual((self.states(), self.names(state)), ({state: 1}, [ident]))
            os.unlink(self.file(state, ident))

    def test_since_is_the_time_when_a_task_came_to_its_state(self) -> None:
        q = self.queue(max_attempts=1)

        def check(state: Any, begin_s: float) -> None:
            (task,) = q.tasks(state)
            for it in task, q.peek(task.id):
                assert it is not None
                since = it.since
                assert since is not None
                # The clock of a file system advances in ticks of 10 ms, late on a busy machine.
                self.assertTrue(begin_s - 0.15 <= since.timestamp() <= time.time())

        ident = q.push(b"x")
        check("pending", 0)
        moves: tuple[tuple[str, Callable[[], object]], ...] = (
            ("inflight", lambda: self.assertIsNone(popped(q).since)),
            ("inflight", lambda: q.extend(q.attach(ident))),
            ("failed", lambda: q.fail(q.attach(ident))),
        )
        for state, move in moves:
            time.sleep(0.2)
            begin_s = time.time()
            move()
            check(state, begin_s)

    def test_search_for_an_unknown_id_does_not_list_ended_tasks(self) -> None:
        q = self.queue(keep_done=True)
        for end in (q.done, q.fail):
            end(leased(q))
        unknown = f"{1:020d}-0000aaaa00000000"
        listings = calls_of("list", lambda: self.assertIsNone(q.peek(unknown)))
        names = {str(path).rstrip("/").rpartition("/")[2] for path, *_ in listings}
        self.assertEqual(names & {"done", "failed"}, set())

    def test_stats_and_peek_spend_no_call_on_another_task(self) -> None:
        """stats(), and peek() of an unknown id, make as many calls of Python functions for 50 tasks
        of each state as for one."""
        q = self.queue()
        unknown = f"{1:020d}-0000aaaa00000000"
        gc.disable()  # finalizers of objects from earlier tests are Python functions, too
        self.addCleanup(gc.enable)

        def add_and_count(number: int) -> int:
            for end in (q.done, q.fail) * number:
                end(leased(q))
            for delay_s in (0, 60) * number:
                q.push(b"waits", delay_s=delay_s)
            calls = []
            sys.setprofile(lambda *args: calls.append(args[1]))
            try:
                stats = q.stats()
                found = q.peek(unknown)
            finally:
                sys.setprofile(None)
            self.assertIsNone(found)
            self.assertEqual(
                (stats.pending, stats.scheduled), (stats.done, stats.failed)
            )
            return calls.count("call")

        self.assertEqual(add_and_count(1), add_and_count(49))

    def test_tasks_without_data_reads_headers_only(self) -> None:
        # tasks(data=False) also yields a file without a valid header; tasks() leaves such a file
        # out. For such a file, peek() raises CorruptTask, and the error says what is wrong.
        q = self.queue()
        tasks = list[FemtoTask]()
        q.push(b"x" * 100_000, key="k")
        self.put(f"{1:020d}-0000000000000000", b"rubbish")
        os.mkdir(self.file("pending", f"{2:020d}-0000000000000000"))
        reads = calls_of("read", lambda: tasks.extend(q.tasks("pending", data=False)))
        self.assertEqual(
            [(task.size_bytes, task.key, task.data) for task in tasks],
            [(None, None, b""), (None, None, b""), (100_000, "k", b"")],
        )
        self.assertLess(max(size for _, size in reads), 5000)
        self.assertEqual([task.key for task in q.tasks("pending")], ["k"])
        with self.assertRaisesRegex(CorruptTask, f"{tasks[0].id}.*header"):
            q.peek(tasks[0].id)

    def test_tasks_reads_the_last_tasks_only(self) -> None:
        q = self.queue()
        for number in range(9):
            q.push(b"%d" % number)
        tasks = list[FemtoTask]()
        reads = calls_of("read", lambda: tasks.extend(q.tasks("pending", last=2)))
        self.assertEqual([task.data for task in tasks], [b"7", b"8"])
        self.assertLess(len(reads), 9)
        self.assertEqual(len([*q.tasks("pending", last=10)]), 9)
        self.assertEqual([*q.tasks("pending", last=0)], [])
        with self.assertRaisesRegex(ValueError, "^last must be .* 0 or more, not -1$"):
            q.tasks("pending", last=-1)

    # Order

    def test_close_leaves_no_directory_of_the_queue_open(self) -> None:
        """After close(), a file system with the queue can be unmounted."""
        q = self.queue()
        q.done(leased(q, key="k"))
        q.close()
        for directory in (".", "creating", "pending", "done", "keys", "locks"):
            self.assertEqual(descriptors_of(self.file(directory)), [], directory)


class Ordering(QueueCase):
    """Tasks are delivered in the order of their pushes."""

    in_memory = False

    def test_order_survives_restarts_and_set_clocks(self) -> None:
        # A reboot sets the monotonic clock back, and with a dead battery the wall clock, too.
        # Without a boot id, as on Windows and macOS, each process computes an anchor of its own.
        year_s = 365 * 86400.0
        one_s = 1.0 - time.monotonic()
        # The boot id and the shifts of both clocks, in seconds, for each process of a case.
        # fmt: off
        cases: dict[str, list[tuple[str | None, float, float]]] = {
            "the date is set": [("1", 0, 0), ("1", -year_s, 0), ("1", year_s, 0), ("1", 0, 0)],
            "a reboot": [("1", 0, 0), ("2", -year_s, one_s)],
            "a reboot decades in the past": [("1", 0, 0), ("2", -30 * year_s, one_s)],
            "no boot id": [(None, 0, 0), (None, -1000, 0)],
            "a reboot, no boot id": [(None, 0, 0), (None, -year_s, one_s)],
        }
        # fmt: on
        clock = self.clock()
        for name, rows in cases.items():
            self.path = self.new_dir()
            for number, (boot, wall_s, monotonic_s) in enumerate(rows):
                clock.wall_shift_s = wall_s
                clock.monotonic_shift_s = monotonic_s
                # The kernel gives the directories real dates, even if the clocks are shifted. Such
                # a date could help to keep the order; a date of 1970 can't.
                for directory in os.listdir(self.path):
                    os.utime(self.file(directory), (0, 0))
                with on_boot(boot):
                    q = self.queue()
                    q.push(b"%d" % number)
            with self.subTest(name):
                self.assertEqual(self.drain(q), [b"%d" % n for n in range(len(rows))])
                # Processes without a boot id have no clock file.
                self.assertEqual(
                    len(self.clocks()), len({boot for boot, *_ in rows} - {None})
                )

    def clocks(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self.path) if name.startswith("clock-")
        )

    def test_clock_files_of_other_boots_stay(self) -> None:
        """A clock file stays when another boot begins. Its worker may be in a container, and goes
        on with this clock."""
        clock = self.clock()
        with on_boot("container"):
            q = self.queue("container")
        theirs = self.clocks()
        for number in range(3):
            with on_boot(f"boot {number}"):
                self.queue()
        self.assertEqual((len(self.clocks()), {*theirs} - {*self.clocks()}), (4, set()))
        clock.wall_shift_s += 3600
        with on_boot("container"):
            self.check_one_clock(q, self.queue("second"))

    def test_service_that_can_not_see_the_boot_id_keeps_the_order_after_a_reboot(
        self,
    ) -> None:
        """A service that can't see the boot id does not use the clock file of an earlier boot."""
        # The queue is empty, so no id shows that the clock of that file is behind.
        clock = self.clock()
        with on_boot("1"):
            self.queue().close()
        clock.wall_shift_s += 3600
        clock.monotonic_shift_s = 1.0 - time.monotonic()
        with on_boot(None):
            service = self.queue("service")
        with on_boot("2"):
            self.queue().push(b"first")
        clock.advance(1)  # the clocks of two processes differ a little
        service.push(b"second")
        self.assertEqual(self.drain(service), [b"first", b"second"])

    def test_process_that_can_not_read_the_clock_file_has_a_clock_of_its_own(
        self,
    ) -> None:
        """A process that may not read clock-<boot> delivers tasks, and its leases have another
        <boot>."""
        self.queue().push(b"x")
        (theirs,) = self.clocks()
        with hooked(at_call("stat lstat open", theirs, errno_raiser(errno.EACCES))):
            task = self.pop(self.queue())
        self.assertNotIn(theirs.removeprefix("clock-"), task.path)
        self.assertEqual(self.clocks(), [theirs])

    def test_clock_files_of_other_hosts_stay(self) -> None:
        """No host removes the clock files of other hosts, not even a host that has data_dir on its
        own disk."""
        # The last host is an NFS server; the other two are its clients.
        for number, fs_type in enumerate((NFS, NFS, EXT4)):
            with on_boot(f"host {number}"), on_file_system(fs_type):
                self.queue().push(b"x")
        self.assertEqual(len(self.clocks()), 3)

    def test_queue_clock_starts_at_the_wall_clock_however_long_the_listings_take(
        self,
    ) -> None:
        clock = self.clock()
        clock.stand_still()
        q = self.queue(None)
        os.unlink(self.file(f"clock-{self.boot()}"))
        with hooked(at_call("list", "/done", lambda: clock.advance(5), times=1)):
            q = self.queue(None)
        self.assertLess(abs(int(q.push(b"x")[:20]) - clock.wall_ns()), 10**9)

    def test_invalid_clock_file_is_made_again_and_the_order_is_kept(self) -> None:
        # The file may hold rubbish, or a number that no clock can have. A FIFO of that name is
        # replaced; a directory stays.
        q = self.queue()
        q.push(b"0")
        clock = f"clock-{self.boot()}"
        rubbish = (
            b"",
            b"x" * 50,
            b"\0\n",
            b"8" * 19 + b"\n",
            b"-" + b"9" * 19 + b"\n",
            b"12",
        )
        for number, content in enumerate(rubbish, 1):
            self.put(clock, content, "")
            self.queue().push(b"%d" % number)
        for number, make in enumerate((os.mkfifo, os.mkdir), len(rubbish) + 1):
            os.unlink(self.file(clock))
            make(self.file(clock))
            self.queue().push(b"%d" % number)
        self.assertEqual(
            self.drain(self.queue()), [b"%d" % n for n in range(len(rubbish) + 3)]
        )

    def test_anchor_set_by_a_faster_process_is_not_overwritten(self) -> None:
        # A different date in the slower process, or in a later process, does not change the anchor.
        clock = self.clock()
        others = list[FemtoQueue]()

        def be_quicker() -> None:
            clock.wall_shift_s = 5000.0
            others.append(self.queue("quick"))

        with hooked(at_call("open", ".clock", be_quicker, times=1)):
            slow = self.queue("slow")
        clock.wall_shift_s = 10_000.0
        self.check_one_clock(slow, *others, self.queue("later"))
        self.assertEqual(len(others), 1)
        self.boot()  # fails unless there is exactly one clock-<boot>

    def test_wall_clock_of_the_far_future_is_not_used_for_the_anchor(self) -> None:
        clock = self.clock()
        # It starts at the date of the release, and not a decade after it.
        clock.wall_shift_s = 80 * 365 * 86400.0
        q = self.queue()
        self.assertLess(int(q.push(b"")[:20]), 4 * 10**18)
        clock.wall_shift_s = 0.0
        self.check_one_clock(q, self.queue())

    def test_huge_backlog_is_delivered_in_order_though_only_part_is_in_memory(
        self,
    ) -> None:
        # A listing drops foreign names, and the names of the youngest tasks. It keeps 20 names
        # here, or a sixteenth of the backlog if that is more.
        q = self.queue()
        ids = q.push_many([b""] * 300)
        self.foreign = tuple(f"00-{n:03d}.swp" for n in range(40))
        for name in self.foreign:
            self.put(name, b"")
        with with_constant("most in a batch", 20), with_constant("chunk", 7):
            self.assertEqual([task.id for task in iter(q.pop, None)], ids)


# Leases


class ReplacedClock(QueueCase):
    """If a program replaces time.time() and time.monotonic(), as tests of programs do, a queue uses
    the replaced functions."""

    def both_clocks(self, seconds: float) -> Any:
        return mock.patch.multiple(
            time, time=lambda: seconds, monotonic=lambda: seconds
        )

    def test_program_that_leaves_its_own_clock_in_the_time_module_ends_quietly(
        self,
    ) -> None:
        """A program that leaves its own function in the time module ends without an error."""
        # That function refers to the program's variables, and so to its queue. So the time module
        # keeps the queue alive. The queue is finalized when the interpreter has already cleared
        # other modules, such as fcntl.
        program = (
            "import sys, time; from femtoqueue import FemtoQueue, TicketQueue\n"
            "q, line = FemtoQueue(sys.argv[1]), TicketQueue(sys.argv[1]); q.push(b'x')\n"
            "task, ticket, time.time = q.pop(0.01), line.register(), lambda: 10.0"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program, self.path],
            cwd=os.path.dirname(femtoqueue.__file__),
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_lease_ends_by_the_replaced_clock(self) -> None:
        with self.both_clocks(0):
            holder = self.queue("n1", timeout_stale_ms=100)
            holder.push(b"x")
            other = self.queue("n2", timeout_stale_ms=100)
            self.pop(holder)
        with self.both_clocks(10):
            self.assertEqual(self.pop(other).data, b"x")

    def test_scheduled_task_is_due_by_the_replaced_clock(self) -> None:
        """A scheduled task is due when the replaced clock shows its time, whether or not a pop()
        looked for tasks before."""
        now_s = time.time()
        for has_looked in (False, True):
            with self.subTest(has_looked=has_looked), self.both_clocks(now_s):
                q = self.new_queue()
                q.schedule(b"x", (now_s + 60) * 1e6)
                if has_looked:
                    self.assertIsNone(q.pop())
                with self.both_clocks(now_s + 60):
                    self.assertEqual(self.pop(q).data, b"x")

    def test_task_is_due_when_the_clock_shows_the_float_of_its_due_time(self) -> None:
        """A task scheduled for t * 1e6, where t is a float, is due when time.time() returns t."""
        q = self.queue()
        for number in range(200):
            now_s = 1_800_000_000 + number * 0.01234567
            with self.both_clocks(now_s):
                q.schedule(b"x", (now_s + 0.001) * 1e6)
            with self.both_clocks(now_s + 0.001):
                q.done(self.pop(q))

    def test_many_due_tasks_are_delivered_one_after_the_other(self) -> None:
        """While due tasks are left, no pop() returns None, though each run moves only some."""
        clock = self.clock()
        self.set_constant("longest pause", 20)
        q = self.queue()
        for _ in range(20):
            q.schedule(b"x", 0)
        move = at_call("move", "/scheduled/", lambda: clock.advance(0.3))
        with hooked(move):
            self.assertEqual(len(self.drain(q)), 20)

    def test_due_task_is_found_at_once_when_the_date_alone_is_set_forward(self) -> None:
        """If only the wall clock is set forward, the next pop() finds the tasks that are due."""
        clock = self.clock()
        q = self.queue()
        clock.stand_still()
        q.schedule(b"x", (clock.time() + 60) * 1e6)
        self.assertIsNone(q.pop())
        clock.wall_shift_s += 61
        self.assertEqual(self.pop(q).data, b"x")

    def test_due_task_is_found_after_the_clock_went_back(self) -> None:
        """After both clocks went back by an hour, pop() still finds tasks when they are due."""
        # now_s + 60 is rounded down by a fraction of a microsecond
        now_s = 1_795_851_611.2259564
        with self.both_clocks(now_s + 3600):
            q = self.queue()
            self.assertIsNone(q.pop())
        with self.both_clocks(now_s):
            q.push(b"first")
            first = self.pop(q)
            self.assertEqual(first.data, b"first")
            q.done(first)
            q.schedule(b"second", (now_s + 60) * 1e6)
            self.assertIsNone(q.pop())
        with self.both_clocks(now_s + 60):
            self.assertEqual(self.pop(q).data, b"second")

    def test_order_holds_while_the_clock_stands_still(self) -> None:
        with self.both_clocks(time.time()):
            q = self.queue()
            wanted = [q.push(b"%d" % number) for number in range(100)]
            self.assertEqual([self.pop(q).id for _ in wanted], wanted)

    def test_no_task_is_lost_when_a_monotonic_clock_begins_anew_under_one_boot_id(
        self,
    ) -> None:
        """A restored virtual machine delivers all its tasks."""
        # Such a machine has the same boot id as before, and a monotonic clock near zero. The tasks
        # may come in another order, and a lease may end late unless its worker is dead.
        clock = self.clock()
        clock.monotonic_shift_s = 40 * 86400.0
        q = self.queue("n1")
        older, leased = q.push(b"older"), q.push(b"leased")
        self.take(q, id=leased)
        simulate_death(q)
        clock.monotonic_shift_s = 0.0
        clock.wall_shift_s = 60.0
        restarted = self.queue("n2")
        younger = restarted.push(b"younger")
        found = {self.pop(restarted).id for _ in range(3)}
        self.assertEqual(found, {older, leased, younger})


@FORK
class Liveness(QueueCase):
    """Leases of dead workers end at once, and those of living workers at their deadlines."""

    def test_empty_lease_directory_that_other_hosts_may_use_is_kept_for_a_minute(
        self,
    ) -> None:
        """Where other hosts may write, an empty lease directory is removed after a minute."""
        # The directory may belong to an idle worker on another host: with FUSE, a lock is not seen
        # on other hosts. If rmdir() fails, pop() raises no error, and the directory stays. rmdir()
        # fails for a lease directory of another user if data_dir is sticky.
        self.patched(on_file_system(FUSE))
        q = self.queue()
        clock = self.clock()
        os.mkdir(self.file("inflight-other"))
        sticky = hooked(at_call("rmdir", "-other", errno_raiser(errno.EPERM), times=1))
        for advance_s, there in ((1, True), (61, True), (1, False)):
            clock.advance(advance_s)
            with sticky if advance_s == 61 else contextlib.nullcontext():
                self.assertIsNone(q.pop())
            self.assertEqual(os.path.exists(self.file("inflight-other")), there)

    def test_end_of_a_lease_wakes_a_waiting_pop(self) -> None:
        """A pop() that waits gets a task whose lease ends, without waiting for the next
        maintenance."""
        self.set_constant("base interval", 4 * PATIENCE_S)
        task = leased(self.queue(timeout_stale_ms=100))
        other = self.queue("n2")
        self.assertEqual(popped(other, PATIENCE_S).id, task.id)

    def test_dead_workers_leases_of_another_boot_end_at_their_deadlines(self) -> None:
        """In a dead worker's directory, only leases of this boot end before their deadlines."""
        # A worker on another host may use the same node_id, and thus the same directory, and may
        # still live. The lease of that worker ends when the deadline has passed and st_ctime shows
        # that the lease is old enough. If the wall clock went back, st_ctime is in the future, and
        # does not show the age of the lease. Then the lease ends at its deadline.
        clock = self.clock()
        for back_s in (0, 1e8):
            q = self.new_queue()
            dead = self.queue("dead")
            q.push_many([b"1", b"2"])
            mine = os.path.basename(self.pop(q).path)
            self.pop(dead)
            theirs = mine.replace(f"~{self.boot()}~", "~12345678~")
            os.rename(
                self.file("inflight-n1", mine), self.file("inflight-dead", theirs)
            )
            simulate_death(dead)
            clock.advance(1)
            self.assertEqual((self.pop(q).data, q.pop()), (b"2", None))
            self.assertEqual(self.names("inflight-dead"), [theirs])
            clock.advance(31)
            clock.wall_shift_s -= back_s
            self.assertEqual(self.pop(q).attempts, 2)

    def test_leases_of_a_dead_worker_that_can_not_see_the_boot_id_end_at_their_deadlines(
        self,
    ) -> None:
        """If one of the two workers can't see the boot id, the lease of the dead worker ends at its
        deadline."""
        # A service of systemd with ProcSubset=pid can't see the boot id. It has a random boot of
        # its own. A worker that starts under the same node_id takes the lease back at once.
        clock = self.clock()
        for first, second in ((None, "1"), ("1", None), (None, None)):
            self.path = self.new_dir(self.memory)
            for node_id in ("other", "dead"):
                with self.subTest(first=first, second=second, node_id=node_id):
                    with on_boot(first):
                        dead = self.queue("dead")
                        leased(dead)
                    simulate_death(dead)
                    with on_boot(second), self.queue(node_id) as q:
                        self.assertEqual(
                            [it.liveness for it in q.stats().nodes], ["unknown"]
                        )
                        if node_id == "other":
                            self.assertIsNone(q.pop())
                            clock.advance(31)
                        q.done(self.pop(q))

    def test_lease_of_an_earlier_boot_is_not_of_this_boot_where_the_boot_id_is_not_seen(
        self,
    ) -> None:
        """If one of the two workers can't see the boot id, a lease ends at its deadline. It ends at
        once when a worker starts under the same node_id."""
        # A service of systemd with ProcSubset=pid can't see the boot id.
        for first, second in ((None, "1"), ("1", None), (None, None)):
            with self.subTest(first=first, second=second):
                self.path = self.new_dir()
                clock = self.clock()
                with on_boot(first):
                    dead = self.queue("dead")
                    dead.push_many([b"1", b"2"])
                    self.assertEqual(len([*iter(dead.pop, None)]), 2)
                simulate_death(dead)
                with on_boot(second):
                    q = self.queue("other")
                    self.assertEqual(
                        [it.liveness for it in q.stats().nodes], ["unknown"]
                    )
                    self.assertIsNone(q.pop())
                    again = self.pop(self.queue("dead"))
                    self.assertEqual((again.data, again.attempts), (b"1", 2))
                    clock.advance(31)
                    self.assertEqual(
                        [it.data for it in iter(q.pop, None)], [b"1", b"2"]
                    )

    def test_lease_of_another_boot_is_not_of_this_boot_where_the_boot_id_is_not_seen(
        self,
    ) -> None:
        for fs_type in (EXT4, NFS):
            self.path = self.new_dir()
            with on_boot("1"), on_file_system(fs_type):
                living = self.queue("living", timeout_stale_ms=None)
                leased(living)
            # as on another host, no lock shows that this worker lives
            simulate_death(living)
            with on_boot(None):
                self.assertIsNone(self.queue("other").pop())

    def test_living_worker_keeps_its_lease_beside_tasks_that_are_ahead_of_the_queue_clock(
        self,
    ) -> None:
        self.patched(on_file_system(NFS))
        clock = self.clock()
        clock.wall_shift_s = -3600.0
        living = self.queue("living")
        living.push(b"1")
        clock.wall_shift_s = 0.0  # the date is set forward, or the host was suspended
        task = popped(living)
        with on_boot("other host"):
            self.queue("other").push(b"2")
        # A new worker reads the clock file of this boot, and does not make it anew.
        q = self.queue("new")
        q.done(popped(q))
        self.assertIsNone(q.pop())
        clock.advance(31)
        self.assertEqual(popped(q).id, task.id)

    def test_leases_end_after_a_reboot_that_set_the_wall_clock_far_back(self) -> None:
        """After a reboot with a dead battery, a lease ends late by the time from the newest push to
        the claim at most."""
        # The new queue clock starts after the newest id. So in a queue with pushes, leases end in
        # time.
        clock = self.clock()
        for is_idle in (False, True):
            self.path = self.new_dir(self.memory)
            with on_boot("1"):
                q = self.queue("dead")
                q.push(b"")
                clock.advance(5 * 3600)
                if not is_idle:
                    q.schedule(b"", 4e15)
                self.pop(q)
                simulate_death(q)
            with on_boot("2"):
                clock.wall_shift_s = clock.monotonic_shift_s = 0.0
                q = self.queue()
                clock.advance(31)
                if is_idle:
                    self.assertIsNone(q.pop())
                    clock.advance(5 * 3600)
                self.assertEqual(self.pop(q).attempts, 2)

    def test_task_that_can_not_be_moved_does_not_delay_other_tasks(self) -> None:
        """If a due task or the lease of a dead worker can't be moved, pop() still delivers other
        tasks."""
        # The pop() whose maintenance fails first delivers a task, and so do later calls. When no
        # other task waits, pop() raises the error, unless it concerns that file alone.
        q = self.queue()
        clock = self.clock()

        def lease_and_die(node_id: str) -> str:
            dead = self.queue(node_id)
            ident = leased(dead).id
            simulate_death(dead)
            return ident

        makers = (lambda node_id: q.schedule(b"x", 0), lease_and_die)
        for make_task, code in itertools.product(makers, (errno.EACCES, errno.EIO)):
            stuck = make_task("dead")
            with hooked(at_call("move", stuck, errno_raiser(code))):
                for node_id in ("dead2", "dead3"):
                    ident = make_task(node_id)
                    clock.advance(1)
                    self.assertEqual(self.pop(q).id, ident)
                for _ in range(2):
                    if code == errno.EIO:
                        self.assertRaises(OSError, q.pop)
                    else:
                        self.assertIsNone(q.pop())
            clock.advance(1)
            self.assertEqual(self.pop(q).id, stuck)

    def test_lease_directory_removed_by_an_observer_is_made_again(self) -> None:
        """If an observer removes the lease directory of a starting worker, the worker makes a new
        directory."""
        # The removal comes before the worker opens the directory, or after that and before the
        # worker locks it.
        place = self.file("inflight-n1")

        def is_there(name: str, args: tuple[Any, ...]) -> bool:
            return args[0] == place and os.path.isdir(place)

        for step in Meanwhile.each(lambda: os.rmdir(place), is_there, at_least=2):
            with self.queue() as q:
                q.push(b"x")
                with hooked(step):
                    q.done(self.pop(q))
                self.assertEqual(self.names("inflight-n1"), [])

    def test_starting_worker_leaves_the_lease_of_a_quicker_worker_of_its_node_id(
        self,
    ) -> None:
        # The starting worker opens the lease directory, which is removed before the worker locks
        # it. Then the quicker worker makes the directory again, and claims a task there.
        starting, quicker = self.queue("same"), self.queue("same")
        taken = list[FemtoTask]()
        self.queue("producer").push(b"x")
        os.mkdir(lease_dir(starting))

        def be_quicker() -> None:
            os.rmdir(lease_dir(starting))
            taken.append(popped(quicker))

        with hooked(
            at_call("lock", fcntl.LOCK_SH | fcntl.LOCK_NB, be_quicker, times=1)
        ):
            self.assertIsNone(starting.pop())
        quicker.done(taken[0])
        # The starting worker has locked the new directory, too.
        task = leased(starting)
        quicker.close()
        starting.done(task)
        self.assertEqual(self.states(), {"done": 2})

    def test_ctrl_c_in_a_pop_loses_no_lease_of_a_dead_worker(self) -> None:
        """After Ctrl-C at any system call of pop(), the leases of dead workers come back."""
        # One worker with the same node_id died before the pop(); another worker dies later. Ctrl-C
        # also comes at each reading of the monotonic clock.
        clock = self.clock()
        monotonic = clock.monotonic
        for step in Step.each(interrupt, at_least=20):
            q, again, later = (
                self.queue(it, timeout_stale_ms=None) for it in ("a", "a", "b")
            )
            q.push_many([b"1", b"2"])
            self.assertEqual(len([*iter(q.pop, None)]), 2)
            simulate_death(q)

            def look(step: Step = step) -> float:
                step("clock", ())
                return monotonic()

            looks = mock.patch.object(clock, "monotonic", look)
            with hooked(step), looks, contextlib.suppress(KeyboardInterrupt):
                again.pop()
            if not step.reached:
                again.close()
            self.assertIsNotNone(later.take(id=later.push(b"3")))
            simulate_death(later)
            clock.advance(60)
            self.assertEqual(sorted(self.drain(again)), [b"1", b"2", b"3"], step.at)
            again.close()

    def test_restarted_worker_takes_its_leases_back_once_an_observer_has_unlocked_its_directory(
        self,
    ) -> None:
        """A restarted worker waits until an observer unlocks the worker's lease directory, and then
        takes back its leases."""
        q, again = self.queue(), self.queue()
        leased(q)
        simulate_death(q)
        observer = os.open(lease_dir(q), os.O_RDONLY)
        self.addCleanup(os.close, observer)
        fcntl.flock(observer, fcntl.LOCK_EX)
        tries = itertools.count()

        def unlock() -> None:
            if next(tries) == 2:
                fcntl.flock(observer, fcntl.LOCK_UN)

        with hooked(at_call("lock", fcntl.LOCK_SH | fcntl.LOCK_NB, unlock)):
            self.assertEqual(self.pop(again).attempts, 2)

    def test_worker_whose_lease_directory_is_locked_for_long_uses_another(self) -> None:
        """If another process locks the lease directory of a worker for seconds, the worker warns,
        and uses a directory of another name."""
        # Anybody who may read the directory can lock it. Tasks in it are not taken back meanwhile.
        self.set_constant("long wait", 0.05)
        q = self.queue()
        ident = ""
        os.mkdir(lease_dir(q))
        stranger = os.open(lease_dir(q), os.O_RDONLY)
        self.addCleanup(os.close, stranger)
        fcntl.flock(stranger, fcntl.LOCK_EX)
        ident = q.push(b"x")
        LOG.disabled = False
        with self.assertLogs(LOG, "WARNING") as logged:
            task = self.pop(q)
        self.assertIn("inflight-n1 can't be used", logged.output[0])
        self.assertRegex(task.path, rf"inflight-{os.getpid()}-[0-9a-f]{{16}}/.*{ident}")
        q.done(task)
        q.close()
        self.assertEqual(
            [it for it in self.names(".") if it.startswith("inf")], ["inflight-n1"]
        )

    def test_dropped_queue_object_leaves_no_descriptor_warning_or_directory(
        self,
    ) -> None:
        """A queue object is closed at once when its last reference goes, like a file."""
        before = len(os.listdir("/dev/fd"))
        gc.disable()  # no reference cycle may keep the object until a collection
        self.addCleanup(gc.enable)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            q = FemtoQueue(self.path, "dropped")
            q.push(b"x")
            q.pop()
            q.pop(0.01)
            del q
        self.assertEqual(len(os.listdir("/dev/fd")), before)
        self.assertEqual(self.states(), {"pending": 1})

    def check_child_outlives_parent(self, call: str) -> None:
        """Let a worker fork at a call of its pop(), and kill the worker before its child ends. Fail
        unless the worker's task is delivered again."""

        def parent(child: Child) -> None:
            def fork() -> None:
                if os.fork() == 0:
                    child.wait_for_go()
                    os._exit(0)

            mine = FemtoQueue(self.path, "parent", timeout_stale_ms=None)
            with hooked(at_call(call, None, fork, times=1)):
                mine.pop()
            child.say("forked")
            child.wait_for_go()

        q = self.queue("observer")
        q.push(b"x")
        child = self.child(parent)
        self.addCleanup(child.go)  # ends the process that `child` has forked
        self.assertEqual(child.line(), "forked")
        child.kill()
        q.done(popped(q, PATIENCE_S))

    def test_forked_child_that_outlives_its_parent_keeps_none_of_its_leases(
        self,
    ) -> None:
        # At "lock", the worker forks while it locks its lease directory, as another thread may do.
        for call in ("read", "lock"):
            with self.subTest(call):
                self.check_child_outlives_parent(call)

    def test_forked_child_has_no_leases_of_its_parent_after_ctrl_c_in_the_fork(
        self,
    ) -> None:
        """Ctrl-C at the start of a forked child does not give the parent's leases to the child."""
        # The Ctrl-C interrupts the function that Python calls in the child. Python then prints the
        # exception, and the child goes on.
        q = self.queue()
        task = leased(q)
        inner = ("_after_fork_in_child", "_after_fork", "init_worker", "__init__")
        hook = mock.patch.object(sys, "unraisablehook")
        lines = [list[str]()]

        def work(child: Child) -> None:
            sys.settrace(None)
            child.say(f"{len(lines[0])} {q.push(b'')[21:]}")
            q.close()

        for number in itertools.count():
            with hook, at_line(number, interrupt, within=inner) as lines[0]:
                child = self.child(work)
            [said], status = child.finish()
            self.assertEqual(status, 0)
            self.assertNotIn(task.id[21:], said)
            if said[0] == "0":
                break
        self.assertGreater(number, 9)
        q.done(task)

    def test_forked_child_is_a_worker_of_its_own(self) -> None:
        """In a forked child, a queue object gets its own node_id, lease directory and id tag."""
        # After close() in the child, the parent still has its lease.
        q = self.queue(None)
        ids = q.push_many([b"1", b"2"])
        mine = self.pop(q)

        def work(child: Child) -> None:
            task = popped(q)
            child.say(f"{task.data.decode()} {q.node_id} {q.push(b'3')}")
            q.done(task)
            q.close()

        child = self.child(work)
        data, node_id, ident = child.line().split()
        self.assertEqual((data, child.finish()), ("2", ([], 0)))
        self.assertNotIn(q.node_id, node_id)
        self.assertNotIn(ids[0][20:], ident)
        q.done(mine)
        self.assertEqual(self.states(), {"done": 2, "pending": 1})

    # A C library, such as uWSGI's, forks without a call of Python's hooks.

    @FORK
    def test_child_that_closes_all_descriptors_pushes_into_its_own_queue(self) -> None:
        """A child that closes all descriptors after the fork, as a daemon does, opens the
        directories of the queue anew."""
        q = self.queue()
        place = self.new_dir(self.memory)
        q.push(b"1")
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.closerange(3, 256)
                while os.open(place, os.O_RDONLY) < 64:
                    pass
                q.push(b"2")
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertEqual(self.states(), {"pending": 2})

    @FORK
    def test_child_of_an_unseen_fork_takes_tasks_under_a_name_of_its_own(self) -> None:
        calls: tuple[Callable[[FemtoQueue], object], ...] = (
            popped,
            lambda q: self.take(q, "k"),
        )
        for call in calls:
            q = self.new_queue(node_id=None)
            task = leased(q)
            q.push(b"2", key="k")
            self.check_exit(self.forked_unseen(functools.partial(call, q)))
            held = [*self.states().items()]
            self.assertEqual([number for _, number in held], [1, 1], held)
            q.done(task)

    @FORK
    def test_close_in_a_child_of_an_unseen_fork_leaves_the_parents_leases(self) -> None:
        q = self.queue()
        task = leased(q)
        self.check_exit(self.forked_unseen(q.close))
        self.assertEqual(self.states(), {"inflight-n1": 1})
        q.done(task)

    @FORK
    def test_keyed_push_in_a_child_of_an_unseen_fork_waits_for_the_parents_lock(
        self,
    ) -> None:
        """The child was forked while its parent has the lock of a key. It waits for the lock, and
        then pushes its payload."""
        q = self.queue()
        pids = list[int]()

        def fork() -> None:
            pids.append(self.forked_unseen(lambda: q.push(b"of the child", key="k")))

        with hooked(at_call("symlink", None, fork, times=1)):
            q.push(b"of the parent", key="k")
        self.check_exit(pids[0])
        self.assertEqual(self.drain(q), [b"of the child"])

    @FORK
    def test_end_of_a_call_in_a_child_of_an_unseen_fork_leaves_the_parents_lock(
        self,
    ) -> None:
        """If an exception ends the call in the child, the parent keeps the lock."""
        import ctypes

        q = self.queue()
        pids = list[int]()
        free = list[bool]()
        q.push(b"1", key="k")

        def fork() -> None:
            pids.append(ctypes.PyDLL(None).fork())
            if pids == [0]:
                interrupt()
            self.check_exit(pids[0])
            free.append(self.is_free("k"))

        try:
            with hooked(at_call("readlink", None, fork, times=1)):
                q.push(b"2", key="k")
        except KeyboardInterrupt:
            os._exit(0)  # the child
        finally:
            if pids == [0]:
                os._exit(1)
        self.assertEqual(free, [False])


class LeaseDirectoryLost(QueueCase):
    """A worker whose lease directory was removed while the worker lives."""

    def worker_that_listed(self, count: int) -> FemtoQueue:
        """Return a worker in a new queue. The worker has a lease directory, has listed `count`
        tasks, and has finished the first of them."""
        q = self.new_queue()
        q.push_many([b"%d" % n for n in range(count)])
        q.done(self.pop(q))
        return q

    def test_claim_goes_only_into_a_locked_lease_directory(self) -> None:
        """A worker claims only into a directory that the worker has locked and that has the right
        path."""
        # The claimed task was listed before the loss of the directory ("next"), or was pushed after
        # the loss.
        self.clock().stand_still()  # no job comes due
        losses: dict[str, Callable[[str], object]] = {
            "removed": os.rmdir,
            "made again": lambda place: os.rename(self.new_dir(self.path), place),
            "moved away": lambda place: os.rename(place, self.file("elsewhere")),
        }
        calls = ("next", "pop", "take")
        for (name, lose), call in itertools.product(losses.items(), calls):
            with self.subTest(name, call=call):
                q = self.worker_that_listed(3 if call == "next" else 1)
                observer = self.queue("n2")
                lose(lease_dir(q))
                if call != "next":
                    q.push(b"1", key="k")
                    q.push(b"2")
                mine = self.take(q, "k") if call == "take" else popped(q)
                theirs = popped(observer)
                self.assertEqual(
                    (mine.data, theirs.data, observer.pop()), (b"1", b"2", None)
                )
                q.done(mine)
                observer.done(theirs)
                self.assertEqual(self.states(), {"done": 3})

    def test_claim_goes_into_no_directory_that_takes_the_place_of_the_locked_one(
        self,
    ) -> None:
        """If another directory takes the place of the lease directory just before a claim, the task
        does not go there: other workers would take it away."""
        self.clock().stand_still()  # no job comes due, nor a look at the directory
        q = self.worker_that_listed(2)
        replaced = list[str]()
        place = lease_dir(q)

        def replace_or_look(name: str, args: tuple[Any, ...]) -> None:
            if name == "move" and not replaced:
                replaced.append(place)
                os.rename(self.new_dir(self.path), place)
            elif os.path.isdir(place) and os.listdir(place):
                self.assertRaises(BlockingIOError, self.check_unlocked, place)

        with hooked(replace_or_look):
            self.assertEqual(popped(q).data, b"1")
        self.assertEqual((replaced, len(os.listdir(place))), ([place], 1))

    def test_lease_directory_that_is_removed_during_its_listing_is_empty(self) -> None:
        q, other = self.queue("n1"), self.queue("n2")
        other.release(leased(other))

        def remove() -> None:
            other.close()
            raise OSError(errno.ESTALE, "stale")  # as NFS and GlusterFS do

        with hooked(at_call("list", "/inflight-n2", remove, times=1)):
            self.assertEqual([*q.tasks("inflight")], [])
        self.assertNotIn("inflight-n2", os.listdir(self.path))

    def test_directories_that_the_garbage_collector_closed_lead_to_no_other(
        self,
    ) -> None:
        """The garbage collector may close the directories of a queue object before the object. Then
        close() moves no task into the working directory."""
        q = self.queue()
        task = leased(q)
        outside = self.new_dir(self.memory)
        before = os.getcwd()
        os.chdir(outside)
        try:
            for it in gc.get_objects():
                if type(it).__name__ == "_OpenFile" and it.path.endswith("/pending"):
                    it.__del__()
            q.close()
        finally:
            os.chdir(before)
        self.assertEqual(os.listdir(outside), [])
        self.assertEqual(self.pop(self.queue("n1")).id, task.id)

    def test_lease_directory_removed_by_another_host_is_made_again(self) -> None:
        # After that removal, calls with the worker's descriptor of the directory raise ESTALE.
        q = self.worker_that_listed(5)
        os.rmdir(lease_dir(q))

        def stale(name: str, args: tuple[Any, ...]) -> None:
            into_it = name == "move" and "(deleted)" in args[1]
            by_fd = "stat" in name and type(args[0]) is int
            if into_it or (by_fd and "(deleted)" in path_at(args[0], "x")):
                raise_errno(errno.ESTALE)

        with hooked(stale):
            self.assertEqual(self.drain(q), [b"1", b"2", b"3", b"4"])

    def test_nothing_is_claimed_while_the_lease_directory_can_not_be_opened(
        self,
    ) -> None:
        """While a lease directory can't be opened, pop() raises the error and claims nothing."""
        # If open() raises ESTALE each time, pop() raises it, and does not try again for ever.
        clock = self.clock()
        for code in (errno.EMFILE, errno.ESTALE):
            q = self.worker_that_listed(3)
            os.rmdir(lease_dir(q))
            clock.advance(2)
            with hooked(at_call("open", lease_dir(q), errno_raiser(code))):
                for _ in range(3):
                    with self.assertRaisesRegex(OSError, rf"\[Errno {code}\]"):
                        q.pop()
            tasks = self.pop(q), self.pop(self.queue("n2"))
            self.assertEqual([task.data for task in tasks], [b"1", b"2"])

    def test_worker_without_a_lease_directory_makes_it_again(self) -> None:
        """A worker whose lease directory is gone makes it again, at the end of its batch at the
        latest."""
        for fs_type in (EXT4, NFS):
            with on_file_system(fs_type):
                q = self.worker_that_listed(300)
                shutil.rmtree(lease_dir(q))
                claims = calls_of("move", functools.partial(popped, q))
            self.assertEqual([task.data for task in q.tasks("inflight")], [b"1"])
            self.assertLess(len([it for it in claims if "/pending/" in it[0]]), 600)

    def test_lease_whose_directory_is_gone_is_lost(self) -> None:
        q = self.queue(sync_after_write=True, keep_done=False)
        for call in (q.extend, q.done, q.release, q.fail):
            for lose in (functools.partial(shutil.rmtree, lease_dir(q)), q.close):
                task = leased(q)
                lose()
                self.assertRaises(LeaseLost, call, task)


class Row(NamedTuple):
    """The effects of a step. A sync is written as "file" or "directory", by what is synced."""

    calls: str  # all system calls
    synced: str  # the moves, unlinks and syncs in a queue with sync_after_write
    settings: dict[str, Any] = {}  # noqa: RUF012


# The system calls of each step: no more than the promise of the step needs. After an intended
# change of the system calls, edit these tables.
# at the directories and PAUSED, every 0.1 s
LOOK = "stat stat " * 6 + "stat"
STEPS = {
    "push x": Row("open write move close", "move file directory"),
    "schedule x 4e15": Row("open write move close", "move file directory"),
    "none": Row("open list close stat stat", ""),
    "push x | take": Row("open list close move open read close", "move"),
    "push x, push y, take | take": Row("move open read close", "move"),
    "schedule x | take": Row(
        "stat open list close move open list close move open read close open",
        "move file directory move",
    ),
    "push x, take, release | take": Row(
        "open list close move open read close open", "move"
    ),
    "push x, take | done": Row("move", "move file directory"),
    "push unkept, take | done": Row(
        "unlink", "file directory unlink directory", {"keep_done": False}
    ),
    "push x, take | fail": Row("stat move unlink", "move unlink file directory"),
    "push x, take | fail why": Row(
        "open write close stat move unlink move", "file move unlink move file directory"
    ),
    "push x, take, fail | retry": Row("stat unlink move", "unlink move file directory"),
    "push x, take | release": Row("move", "move file directory"),
    "push x, take | release later": Row("move", "move file directory"),
    "push x, take | extend": Row("move", "move"),
    "litter | none": Row(
        "open list close move open read fstat close stat move open write close unlink move open"
        f" stat {LOOK} open list close stat stat",
        "move move file unlink move file directory",
    ),
    "push x, take | save 1": Row(
        "open stat fstat fchown fchmod write close "
        "mkdir open stat fstat list fchown fchmod close move open move",
        "file directory move move directory",
    ),
}
KEY_STEPS = {
    "push x | take": Row(
        "open list close move open read fstat close readlink stat", "move"
    ),
    "push x, take | done": Row(
        "open lock readlink move unlink lock close", "move unlink file directory"
    ),
    "push x, take, done | push y": Row(
        "open lock readlink open write close readlink symlink move move lock close",
        "file move directory move directory",
    ),
    "push x | push y": Row(
        "open lock readlink stat open write close move move move readlink lock close",
        "file move move move file directory",
    ),
    "push x, take, fail | retry": Row(
        "stat open lock stat open read close readlink readlink symlink move"
        " unlink readlink move readlink lock close",
        "move directory unlink move file directory",
    ),
    "push x, take, release | push y": Row(
        "open lock readlink stat open write close move move open move"
        " readlink symlink move lock close",
        "file move move move move directory file directory",
    ),
    "push x, take | push y": Row(
        "open lock readlink stat stat stat open list close stat open list close"
        " readlink symlink"
        " move open write close readlink symlink move move lock close",
        "move file move directory move directory",
    ),
    "push x, take | push y update": Row(
        "open lock readlink stat stat stat open list close stat open list close"
        " readlink symlink"
        " move open write close readlink symlink move move lock close",
        "move file move directory move directory",
    ),
}


class StepCase(QueueCase):
    """A test that checks the system calls of steps."""

    def calls(self, work: Callable[[], object]) -> list[str]:
        """Run work(), and return its system calls in order, as in a Row; lstat counts as "stat"."""
        calls: list[str] = []

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                is_dir = stat.S_ISDIR(os.fstat(args[0]).st_mode)
                name = "directory" if is_dir else "file"
            calls.append("stat" if name == "lstat" else name)

        with hooked(note):
            work()
        return calls

    def moves_and_syncs(self, work: Callable[[], object]) -> list[str]:
        """Do as calls(), but return only moves, unlinks and syncs."""
        shown = "move", "unlink", "file", "directory"
        return [name for name in self.calls(work) if name in shown]

    def prepare_step(
        self, words: str, row: Row, key: str | None = None, **settings: Any
    ) -> Callable[[], object]:
        """Prepare a step in a new queue. Return a function that does the step."""
        q = self.new_queue(**row.settings, **settings)
        self.assertIsNone(q.pop())
        life = Life(q, lambda _: None, key)
        (*before, step) = words.split(" | ")
        for part in before:
            life.do(part)
        return functools.partial(life.do, step)

    def check_steps(
        self, found: Callable[[Any], list[str]], column: str, **settings: Any
    ) -> None:
        """Fail unless found(step) is, for each step, what this column of the tables says."""
        for key, steps in ((None, STEPS), ("k", KEY_STEPS)):
            for words, row in steps.items():
                step = self.prepare_step(words, row, key, **settings)
                with self.subTest(words, key=key):
                    self.assertEqual(" ".join(found(step)), getattr(row, column))


class Cost(StepCase):
    """The system calls that each step makes."""

    def setUp(self) -> None:
        super().setUp()
        self.clock().stand_still()  # no job comes due

    def test_step_makes_the_calls_of_its_row_and_no_others(self) -> None:
        self.check_steps(self.calls, "calls")

    def test_unkeyed_tasks_need_no_more_calls_on_a_shared_file_system(self) -> None:
        # Calls of stat() are not counted: the NFS client answers most of these calls itself.
        self.patched(on_file_system(NFS))
        for words in ("push x", "push x, push y, take | take", "push x, take | done"):
            calls = self.calls(self.prepare_step(words, STEPS[words]))
            self.assertEqual(
                sorted(it for it in calls if it != "stat"),
                sorted(STEPS[words].calls.split()),
            )


class LostReply(QueueCase):
    """A rename that an NFS server has carried out counts, even if the client gets an error.

    The server reboots after the rename, before it answers. The client then sends the request again,
    and the server answers that the file does not exist (ENOENT)."""

    fs_type = NFS

    @contextlib.contextmanager
    def lost_reply(self, then: Callable[[], object] = do_nothing) -> Iterator[None]:
        """Lose the reply to the first rename of the block: call then(), and raise ENOENT."""
        lost = list[str]()

        def lose() -> None:
            lost.append("reply")
            then()
            raise_errno(errno.ENOENT)

        with hooked(at_call("move", None, lose, times=1), after=True):
            yield
        self.assertEqual(lost, ["reply"])
        self.check_invariants()

    def test_task_is_settled_though_the_server_was_away_for_longer_than_the_lease(
        self,
    ) -> None:
        """done() and fail() succeed even if the lease expires while the server is away."""
        q = self.queue()
        clock = self.clock()
        # Only the monotonic clock is advanced: the times of files are by the real clock.
        for end in (q.done, lambda it: q.fail(it, "why")):
            task = leased(q)
            with self.lost_reply(then=lambda: setattr(clock, "monotonic_shift_s", 90)):
                end(task)
            clock.monotonic_shift_s = 0.0
        self.assertEqual(self.states(), {"done": 1, "failed": 1})

    def test_push_succeeds_though_another_worker_has_moved_the_task_on(self) -> None:
        """push() succeeds after a lost reply, even if another worker has already moved the file on
        from the target of the rename."""
        # In the first case, another worker finishes the task before the request is sent again. In
        # the second case, the push buffers a payload behind a lease; the lease ends, and another
        # worker promotes the payload. That worker can lock the key, because the reboot of the
        # server dropped this client's lock.
        q, other = self.queue(), self.queue("n2")
        with self.lost_reply(then=lambda: other.done(self.pop(other))):
            q.push(b"1")
        task = leased(other, b"2", "k")

        def promote() -> None:
            os.rename(self.file(task.path), self.file("done", task.id))
            [name] = self.names("keys")
            os.rename(self.file("keys", name), self.file("pending", name))

        with self.lost_reply(then=promote):
            q.push(b"3", key="k")
        self.assertEqual(self.pop(q).data, b"3")

    def cache_still_shows(self, late: FemtoTask, seen: list[str]) -> Any:
        """Return a patch: the first look at the lease of a task that has moved to done/ shows the
        lease, and adds its path to `seen`."""

        def lstat(name: str, *, dir_fd: int | None = None) -> os.stat_result:
            path = path_at(dir_fd, name)
            if path.endswith(late.path) and not seen:
                seen.append(path)
                return os.lstat(self.file("done", late.id))
            return os.lstat(path)

        return mock.patch.object(femtoqueue, "os", fake_os(lstat=lstat))

    def test_expired_lease_is_lost_though_a_stale_cache_still_shows_it(self) -> None:
        """done() raises LeaseLost if the lease expired and another delivery made done/<id>."""
        # The client's cache still shows the lease, as it was half a minute ago.
        q, other = self.queue(timeout_stale_ms=1000), self.queue("n2")
        clock = self.clock()
        late = leased(q)
        seen = list[str]()
        # Only the monotonic clock is advanced: the other delivery has ended within this second.
        clock.monotonic_shift_s += 3
        other.done(self.pop(other))

        with self.cache_still_shows(late, seen):
            for _ in range(2):
                self.assertRaises(LeaseLost, q.done, late)

    def test_task_that_another_host_has_finished_is_lost_before_the_deadline_here(
        self,
    ) -> None:
        """done() raises LeaseLost if another host has taken the task back and made done/<id>."""
        # The deadline has not passed by the queue clock of this host, which is behind. The client's
        # cache still shows the lease. The rename of the other host is two seconds old: done() takes
        # only a younger rename for its own.
        q = self.queue()
        clock = self.clock()
        seen = list[str]()
        late = leased(q)
        os.rename(self.file(late.path), self.file("done", late.id))
        clock.wall_shift_s = 2.0

        with self.cache_still_shows(late, seen):
            self.assertRaises(LeaseLost, q.done, late)
        self.assertEqual(len(seen), 1)

    def test_delivery_that_was_given_up_or_settled_is_lost(self) -> None:
        # The task is already where fail() or done() would move it, and the deadline has not passed.
        # But it was an earlier call that moved the task.
        q, other = self.queue(), self.queue("n2")
        task = leased(q)
        q.close()
        other.fail(self.pop(other), "the other's reason")
        self.assertRaises(LeaseLost, q.fail, task, "our reason")
        self.assertEqual(reason_of(q, task.id), "the other's reason\n")
        task = leased(q, b"2")
        q.done(task)
        self.assertRaises(LeaseLost, q.done, task)

    def test_write_fails_if_its_file_was_removed_although_the_target_exists(
        self,
    ) -> None:
        """If another host removed the written file from creating/ before the rename, the write
        fails, even if the target exists."""
        # The target has the older content. The host of the writer was suspended for an hour: its
        # wall clock went on, and its monotonic clock stood still.
        q = self.queue()
        clock = self.clock()
        task = leased(q, b"old", "k")

        def sweep() -> None:
            clock.wall_shift_s += 3600
            os.unlink(self.file("creating", *self.names("creating")))

        q.checkpoint(task, b"half")
        for write in (functools.partial(q.checkpoint, task), q.push):
            with hooked(at_call("move", "/creating/", sweep, times=1)):
                self.assertRaises(FileNotFoundError, write, b"all")
        q.release(task)
        self.assertEqual(self.pop(q).checkpoint, b"half")

    def test_host_whose_queue_clock_is_ahead_leaves_files_that_are_being_written(
        self,
    ) -> None:
        # The queue clock of the writer is behind because its host was suspended. The wall clocks of
        # both hosts agree, and only the wall clocks count.
        for fs_type in (EXT4, NFS):
            self.patched(on_file_system(fs_type))
            q = self.new_queue()
            looks = list[list[str]]()
            anchor = self.file(f"clock-{self.boot()}")
            with open(anchor, "r+", encoding="ascii") as file:
                ahead_ns = int(file.read()) + 7200 * 10**9
                file.seek(0)
                file.write(f"{ahead_ns}\n")
            other = self.queue("n2")

            def meet(other: FemtoQueue = other, looks: list[list[str]] = looks) -> None:
                looks.append([it.kind for it in other.check(repair=True)])
                other.pop()

            with hooked(at_call("move", "/creating/", meet, times=1)):
                q.push(b"1")
            self.assertEqual(self.pop(other).data, b"1")
            self.assertNotIn("leftover", looks[0])

    def test_missing_file_is_an_error_on_glusterfs(self) -> None:
        # GlusterFS never sends a request twice, so the error is true: another host was faster.
        # The files on the disk do not count: after a network failure, a replica may show the
        # failed rename as carried out.
        self.patched(on_file_system(FUSE))
        q = self.queue()
        with self.lost_reply(), self.assertRaises(FileNotFoundError):
            q.push(b"1")
        ident = q.push(b"2")
        with self.lost_reply():
            self.assertIsNone(q.pop())
        lease = self.file("inflight-n1", *self.names("inflight-n1"))
        os.rename(lease, self.file("pending", ident))
        task = self.pop(q)
        with self.lost_reply(), self.assertRaises(LeaseLost):
            q.done(task)


def wait_until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread stays at one place in its code, because the thread waits for a lock."""
    end_s = time.monotonic() + PATIENCE_S
    before = None
    while time.monotonic() < end_s:
        frame = sys._current_frames().get(thread.ident or 0)
        place = frame and (frame.f_code, frame.f_lasti)
        if place is not None and place == before:
            return
        before = place
        time.sleep(0.02)


class Sharing(QueueCase):
    """Threads share a queue object, and processes share a lease."""

    def test_thread_copes_with_a_batch_that_another_thread_uses_up(self) -> None:
        """A thread whose claims fail goes on even if another thread empties the batch of names."""
        q, thief = self.queue(), self.queue("n2")
        q.push_many([b"0", b"1", b"2"])
        self.pop(q)
        self.pop(thief), self.pop(thief)
        thread = threading.Thread(target=lambda: [*iter(q.pop, None)])

        def empty() -> None:
            thread.start()
            # the thread ends, or waits for a lock that this thread holds
            thread.join(0.1)

        with hooked(at_call("access", None, empty, times=1)):
            q.pop()
        thread.join()
        self.assertEqual((self.names("pending"), q._worker.lease_dir.orphans), ([], {}))

    def test_lease_begins_when_the_task_is_claimed_however_long_the_pop_waited(
        self,
    ) -> None:
        """The deadline of a lease counts from the claim."""
        # Before the claim, pop() waits for another thread of the queue object. A system call of
        # that thread takes longer than a lease lasts.
        q = self.queue()
        clock = self.clock()
        q.push_many([b"1", b"2"])
        mine = self.pop(q)
        theirs = list[FemtoTask]()
        popper = threading.Thread(target=lambda: theirs.append(popped(q)))

        def hang() -> None:
            popper.start()
            wait_until_blocked(popper)
            clock.advance(40)

        with hooked(at_call("move", None, hang, times=1)):
            q.extend(mine, 100_000)
            popper.join()
        until = theirs[0].until
        assert until is not None
        self.assertGreater(until.timestamp(), clock.time())

    def test_checkpoint_saved_by_another_process_is_kept(self) -> None:
        # A checkpoint belongs to one payload. attach() does not read the payload: checkpoint()
        # does.
        q, other = self.queue(), self.queue("n2")
        q.checkpoint(leased(q), b"1")
        attached = other.attach(self.names("inflight-n1")[0])
        other.checkpoint(attached, b"2")
        other.release(attached)
        task = self.pop(q)
        self.assertEqual(task.checkpoint, b"2")
        attached = other.attach(task.id)
        q.done(task)
        self.assertRaises(LeaseLost, other.checkpoint, attached, b"3")

    def test_detached_leases_end_by_their_deadline_only(self) -> None:
        """A detached lease ends at its deadline only: not when its worker closes or dies, and not
        when a worker with the same node_id starts or closes."""
        q = self.queue(detached=True)
        clock = self.clock()
        other = self.queue("n2")
        other.extend(other.attach(leased(q).id))
        q.close()
        for node_id in ("n1", "other"):
            with self.queue(node_id) as other:
                self.assertIsNone(other.pop())
        clock.advance(31)
        self.pop(self.queue("other"))

    def test_task_is_done_though_the_directory_of_its_lease_is_removed_meanwhile(
        self,
    ) -> None:
        """done() of an attached lease succeeds if another worker then removes its directory."""
        other = self.queue("n2", sync_after_write=True, keep_done=False)
        task = other.attach(leased(self.queue(detached=True)).path)
        place = self.file("inflight-n1")
        removed = at_call("unlink", "inflight-n1", lambda: os.rmdir(place), times=1)
        with hooked(removed, after=True):
            other.done(task)
        self.assertEqual(self.states(), {})

    def test_errors_survive_pickling(self) -> None:
        for error in (
            LeaseLost("i", True, "why"),
            CorruptTask("i", "why"),
            TaskNotFound("why"),
        ):
            copy = pickle.loads(pickle.dumps(error))
            self.assertEqual((str(copy), vars(copy)), (str(error), vars(error)))
            self.assertIsInstance(error, FemtoQueueError)


class InterruptedDelivery(QueueCase):
    """A task whose delivery is interrupted waits again, as if it had not been taken."""

    DELIVERS = (  # the functions of femtoqueue that take part in a delivery
        *("pop", "take_oldest", "claim", "_deliver"),
        *("_look_for", "_serve", "wait_for_async"),
    )

    def test_queue_object_in_a_reference_cycle_gives_its_task_back_silently(
        self,
    ) -> None:
        # The finalizer of the object's lock may run before that of the object itself.
        with mock.patch.object(sys, "unraisablehook") as complaint:
            q: Any = FemtoQueue(self.path, "n1")
            leased(q, b"x")
            q.__dict__["itself"] = q
            del q
            gc.collect()
        complaint.assert_not_called()
        self.assertEqual(self.drain(self.queue("n2")), [b"x"])
        self.assertEqual(os.listdir(self.path).count("inflight-n1"), 0)

    def test_interpreter_exits_while_an_ended_thread_holds_the_lock_of_a_queue_object(
        self,
    ) -> None:
        """The interpreter exits without an error even if a thread that has ended holds the lock of
        a queue object. If the lock is free, the worker's tasks are given back at exit."""
        code = """if True:
            import sys, threading
            import femtoqueue
            q = femtoqueue.FemtoQueue(sys.argv[1], "gone")
            for key in "ab":
                q.push(b"x", key=key)
            with q.processing(q.pop()):  # starts the thread that renews
                assert q.pop()
            if sys.argv[2] == "locked":
                thread = threading.Thread(target=q._worker.lock.acquire)
                thread.start()
                thread.join()
            """
        for lock in ("free", "locked"):
            words = sys.executable, "-W", "error", "-c", code, self.path, lock
            ended = run_guarded(
                *words, env={"PYTHONPATH": os.path.dirname(femtoqueue.__file__)}
            )
            self.assertEqual(ended, (0, "", ""), lock)
            if lock == "free":
                self.assertFalse(os.path.exists(self.file("inflight-gone")))
            self.assertEqual(self.drain(self.queue("n2")), [b"x"])

    def test_close_at_any_line_of_a_delivery_loses_no_task(self) -> None:
        """If close() comes at any line of a delivery, the caller gets a task or None. The caller
        can finish the task, or its next call raises LeaseLost. After None, the task is delivered
        later."""
        ways: dict[str, Callable[[FemtoQueue], FemtoTask | None]] = {
            "pop": FemtoQueue.pop,
            "wait": lambda q: q.pop(PATIENCE_S),
            "take": lambda q: q.take(id=self.names("pending")[0]),
            "coroutine": lambda q: asyncio.run(q.pop_async(PATIENCE_S)),
        }
        for way, deliver in ways.items():
            with self.subTest(way):
                lines = next(
                    it
                    for it in itertools.count()
                    if not self.close_at_line(it, deliver)
                )
                self.assertGreater(lines, 20)

    def test_ctrl_c_at_any_line_of_a_pop_leaves_no_lease(self) -> None:
        """After Ctrl-C at any line of pop(), the task waits at its place, and the delivery was not
        counted."""
        # With the key, a newer payload is buffered behind the task. Then the next delivery has the
        # newer payload, and is attempt 1. The interrupted pop() may have left the task in keys/,
        # from where it comes back a second later.
        clock = self.clock()
        for key in (None, "k"):
            lines = next(
                it
                for it in itertools.count()
                if not self.interrupt_at_line(it, key, clock)
            )
            self.assertGreater(lines, 50)

    def test_pop_that_close_meets_returns_none_and_opens_no_lease_directory(
        self,
    ) -> None:
        """If close() comes during the maintenance of a pop(), this pop() takes no task."""
        q = self.queue()
        clock = self.clock()
        self.assertIsNone(q.pop())
        q.push(b"x")
        clock.advance(61)
        with hooked(at_call("list", "/scheduled", q.close, times=1)):
            self.assertIsNone(q.pop())
        self.assertFalse(os.path.exists(self.file("inflight-n1")))
        self.assertEqual(self.drain(self.queue("n2")), [b"x"])

    def interrupt_at_line(self, number: int, key: str | None, clock: Clock) -> bool:
        """Raise KeyboardInterrupt at a line of pop(), and check what is left. Return False if pop()
        has fewer lines."""
        q = self.new_queue()
        task = leased(q, b"x", key)
        if key:
            q.push(b"newer", key=key)
        name = f"{task.id[:20]}~1~{task.id}" if key else task.id
        os.rename(self.file(task.path), self.file("pending", name))
        try:
            with at_line(number, interrupt) as reached:
                q.pop()
        except KeyboardInterrupt:
            self.assertEqual(self.names("inflight-n1"), [], number)
            clock.advance(2)
            self.assertEqual(
                self.pop(q), FemtoTask(task.id, b"newer" if key else b"x", 1, key)
            )
        return bool(reached)

    def close_at_line(
        self, number: int, deliver: Callable[[FemtoQueue], FemtoTask | None]
    ) -> bool:
        """Call close() in another thread at a line of a delivery, and check what is left. Return
        False if the delivery has fewer lines."""
        q = self.new_queue()
        q.push(b"x")
        self.assertIsNone(q.take(key="none"))
        closer = threading.Thread(target=q.close)

        def close() -> None:
            closer.start()
            closer.join(0.01)  # close() waits for this thread if a claim is under way

        with at_line(number, close, self.DELIVERS) as reached:
            task = deliver(q)
        if not reached:
            return False
        until(lambda: closer.ident is not None)
        closer.join()
        self.finish_after_close(q, task)
        self.assertEqual(self.states(), {"done": 1})
        q.close()
        return True

    def finish_after_close(self, q: FemtoQueue, task: FemtoTask | None) -> None:
        if task is not None:
            with contextlib.suppress(LeaseLost):
                q.done(task)
        if self.names("done"):
            return
        # close() may have taken back the task after a delivery that was counted.
        again = q.pop(PATIENCE_S) or self.fail("the task is lost")
        self.assertIn(again.attempts, (1, 2, 3))
        q.done(again)


# Keyed tasks


class Keyed(QueueCase):
    """At most one task of a key waits or is in flight, and the last payload is delivered."""

    STATES = (
        "waits",
        "is back",
        "is scheduled",
        "is due",
        "is leased",
        "is leased with one behind",
    )
    in_memory = False

    # there are state files: keys/<hash> says where the task of a key is
    has_states = True

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(self.check_keys)

    def check_keys(self) -> None:
        """Fail if a key has two tasks, or a task that contains() does not see."""
        if os.path.isdir(self.path):
            q = FemtoQueue(self.path, "checker")
            found = [*q.keys("pending"), *q.keys("scheduled"), *q.keys("inflight")]
            self.assertEqual(len(found), len({*found}), "two tasks of one key")
            self.assertTrue(all(map(q.contains, found)))

    def test_looking_for_a_key_or_work_in_a_missing_queue_raises(self) -> None:
        """If the queue's directories are gone, contains(), peek() and join() raise
        FileNotFoundError."""
        q = self.queue()
        shutil.rmtree(self.path)
        os.mkdir(self.path)  # the mount point of a file system that is not mounted
        self.assertRaises(FileNotFoundError, q.contains, "k")
        self.assertRaises(FileNotFoundError, q.peek, key="k")
        self.assertRaises(FileNotFoundError, q.join, 0)

    def leased_with_buffered(self, q: FemtoQueue) -> FemtoTask:
        """Lease a task of a key, and push a newer payload, which is buffered behind the task."""
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        return task

    def test_directory_of_locks_that_another_host_replaced_is_opened_anew(self) -> None:
        """If another host has removed locks/, push() opens the directory anew. Calls with the old
        descriptor raise ESTALE."""
        with on_file_system(NFS):
            q = self.queue()
            q.push(b"1", key="k")
            shutil.rmtree(self.file("locks"))

            def stale(name: str, args: tuple[Any, ...]) -> None:
                if name == "open" and "(deleted)" in args[0]:
                    raise_errno(errno.ESTALE)

            with hooked(stale):
                q.push(b"2", key="k")
        self.assertEqual(self.drain(q), [b"2"])

    def test_promoted_payload_is_delivered_on_a_full_disk(self) -> None:
        """If no link can be made when a payload becomes a task, the task is delivered all the
        same, and a later push goes behind it."""
        q = self.queue()
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        with hooked(at_call("symlink", None, errno_raiser(errno.ENOSPC))):
            q.done(task)
            task = self.pop(q)
        self.assertEqual(task.data, b"2")
        q.push(b"3", key="k")
        self.assertEqual(self.states(), {"keys": 1, "done": 1, "inflight-n1": 1})

    def test_reader_finds_a_promoted_payload_by_an_older_link(self) -> None:
        """A user who may only read finds the task of a key, even if the link still names an earlier
        task, which has ended."""
        q = self.queue()
        task = self.leased_with_buffered(q)
        with hooked(at_call("symlink", None, errno_raiser(errno.EROFS))):
            q.done(task)
        with hooked(at_call("open", "/locks/", errno_raiser(errno.EROFS))):
            found = q.peek(key="k")
            self.assertTrue(q.contains("k"))
        self.assertEqual(found and found.data, b"2")

    # Which texts are keys, and what push() does with a key

    def test_any_text_is_a_key_and_can_be_read_back(self) -> None:
        """Any text of 1 to 200 bytes can be a key, and is read back from the task and its file."""
        q = self.queue()
        keys = [
            "k" * 200,
            "a b",
            "\n",
            "%41",
            "A",
            "-",
            "größe",
            "\U0001f40d" * 50,
            "\0",
            "../x",
        ]
        ids = [q.push(key.encode(), key=key) for key in keys]
        for key in reversed(keys):
            task = self.take(q, key)
            self.assertEqual((task.key, task.data), (key, key.encode()))
            q.done(task)
        self.assertEqual(self.names("keys"), [])
        # Lock files are never removed.
        self.assertEqual(self.names("locks"), sorted({it[-2:] for it in ids}))
        with open(self.file("pending", q.push(b"x", key="user:42 ü")), "rb") as file:
            self.assertTrue(file.read().endswith(b" 1 user:42%20%C3%BC\nx"))

    def test_waiting_task_can_be_taken_while_its_payload_is_replaced(self) -> None:
        """A pop() at any system call of the push gets the task, with the old payload or the new
        one."""
        # The attempts of the new payload do not include deliveries of the old payload.
        # While the pusher has the task in keys/, pop() finds no task.
        q, other = self.queue(max_attempts=3), self.queue("n2", max_attempts=3)
        taken: list[FemtoTask | None] = []
        for step in Meanwhile.each():
            key = f"{step.number}"
            q.push(b"old", key=key)
            for _ in range(2):
                q.release(self.take(q, key), front=True)
            step.action = lambda: taken.append(other.pop())
            with hooked(step):
                q.push(b"new", key=key)
            task = taken[-1] if step.reached else None
            if task:
                other.done(task)
            payloads = self.drain(q) or [task.data if task else b""]
            self.assertEqual(payloads[-1], b"new")
        seen = {task and (task.data, task.attempts) for task in taken}
        self.assertEqual(seen, {(b"old", 3), (b"new", 1), None})

    def test_replaced_payload_keeps_its_place_for_workers_that_have_listed_the_task(
        self,
    ) -> None:
        q = self.queue(max_attempts=3)
        for attempts in (1, 3):
            q.push_many([b"first"] * 3)
            q.push(b"old", key="k")
            for _ in range(attempts):
                q.release(self.take(q, "k"), front=True)
            q.push_many([b"y", b"z"])
            workers = [self.queue(f"w{n}", max_attempts=3) for n in range(3)]
            for worker in workers:
                worker.done(self.pop(worker))  # the pop() also lists the waiting tasks
            q.push(b"new", key="k")
            payloads = []
            for worker in workers:
                task = self.pop(worker)
                payloads.append(task.data)
                self.assertEqual(task.attempts, 1)
                worker.done(task)
            self.assertEqual(payloads, [b"new", b"y", b"z"])

    def bring_to_state(self, q: FemtoQueue, state: str, now_s: float) -> None:
        """Push the first payload of a key, and bring its task into one of STATES."""
        if state in ("is scheduled", "is due"):
            due_s = now_s + (50 if state == "is scheduled" else -1)
            q.schedule(b"0", due_s * 1e6, key="k")
            return
        q.push(b"0", key="k")
        if state != "waits":
            task = self.take(q, "k")
            if state == "is back":
                q.release(task, front=True)
        if state == "is leased with one behind":
            q.push(b"1", key="k")

    def task_and_buffered(self, q: FemtoQueue) -> list[object]:
        """Return the task of the key, the path of the task, and the names and tasks of the
        buffered payloads."""
        task = q.peek(key="k")
        behind = [name for name in self.names("keys") if len(name) > 16]
        return [
            task,
            task and task.path,
            *behind,
            *(q.peek(name[-37:]) for name in behind),
        ]

    def test_keyed_push_that_raises_changes_nothing(self) -> None:
        # This includes a failed sync, except the sync after a payload has replaced another one.
        self.in_memory = True  # syncs to a disk would take too long
        clock, _ = self.clock(), self.queue()
        way: Any
        for state, way in itertools.product(
            self.STATES, ("buffer", "update", "schedule")
        ):
            is_synced = state == "is leased"
            for step in Step.each(errno_raiser(errno.EIO)):
                with self.new_queue(sync_after_write=is_synced) as q:
                    self.bring_to_state(q, state, clock.time())
                    before = self.task_and_buffered(q)
                    push = functools.partial(q.push, b"new", key="k", if_in_flight=way)
                    if way == "schedule":
                        due_us = (clock.time() + 50) * 1e6
                        push = functools.partial(q.schedule, b"new", due_us, key="k")
                    with self.subTest(state=state, way=way, call=step.number):
                        try:
                            with hooked(step):
                                push()
                        except OSError:
                            self.assertEqual(self.task_and_buffered(q), before, step.at)

    # Buffered payloads

    def pop_undone(
        self, q: FemtoQueue, error: BaseException, times: int
    ) -> FemtoTask | None:
        """Call pop(). A newer payload is pushed when the file of the claimed task is opened; this
        open, and the next ones up to `times`, raise the error."""
        newer = list[str]()

        def undo() -> None:
            if not newer:
                # "" until the newer payload is pushed: no error is raised
                newer.append("")
                newer[0] = self.queue("n2").push(b"new", key=repr(error))
            if newer[0]:
                raise error

        ended = contextlib.suppress(OSError, KeyboardInterrupt)
        slept = mock.patch("time.sleep")
        hook = at_call("open", "/inflight-n1/", undo, times=times)
        with ended, slept, hooked(hook):
            return q.pop()
        return None

    def test_undone_claim_does_not_lead_to_the_delivery_of_an_outdated_payload(
        self,
    ) -> None:
        # On a shared file system, the worker looks for a missing file several times.
        for error, times in (
            (FileNotFoundError(errno.ENOENT, "gone"), 99),
            (OSError(errno.EMFILE, "too many"), 1),
            (OSError(errno.EIO, ""), 1),
            (KeyboardInterrupt(), 1),
        ):
            q, other = self.queue(), self.queue("n2")
            # Both workers repair keys now, and not during the rest of the test.
            self.assertEqual((q.pop(), other.pop()), (None, None))
            ident = q.push(b"old", key=repr(error))
            with self.subTest(error=error):
                task = self.pop_undone(q, error, times) or other.pop() or popped(q)
                self.assertEqual(
                    (task.id, task.data, task.attempts), (ident, b"new", 1)
                )
                (q if task.node == "n1" else other).done(task)
                self.assertEqual((self.drain(q), q.stats().buffered), ([], 0))

    def test_claim_whose_lease_ends_meanwhile_delivers_no_older_payload(self) -> None:
        """If the lease of a claim ends, and a push replaces the payload, before pop() has looked
        for a newer payload, the newer payload is delivered."""
        q, other = self.queue(), self.queue("n2")
        self.assertIsNone(q.pop())  # locks the lease directory
        ident = q.push(b"1", key="k")

        def end() -> None:
            [name] = self.names("inflight-n1")
            os.rename(self.file("inflight-n1", name), self.file("pending", ident))
            other.push(b"2", key="k")

        call = "readlink" if self.has_states else "lock"
        with hooked(at_call(call, None, end, times=1)):
            task = q.pop()
        self.assertEqual((task or popped(q)).data, b"2")

    def test_buffered_payload_whose_state_file_was_lost_is_promoted(self) -> None:
        # If a newer payload is pushed after the loss, only the newer payload is delivered.
        q = self.queue()
        clock = self.clock()
        for newest in (b"2", b"3"):
            task = self.leased_with_buffered(q)
            if self.has_states:
                os.unlink(self.file("keys", key_tag("k")))
            q.done(task)
            if newest == b"3":
                q.push(b"3", key="k")
            clock.advance(601)
            self.assertEqual(self.drain(q), [newest])
            self.assertEqual(self.names("keys"), [])

    def test_payload_buffered_behind_a_dead_workers_finished_task_comes_soon(
        self,
    ) -> None:
        """If a worker dies between finishing a task and promoting the payload behind the task,
        another worker promotes the payload soon."""
        q, victim = self.queue(), self.queue("victim")
        clock = self.clock()
        self.assertIsNone(q.pop())
        task = self.leased_with_buffered(victim)
        dead = hooked(at_call("move", "/keys/", errno_raiser(errno.EIO)))
        with dead:
            victim.done(task)
        simulate_death(victim)
        clock.advance(31)
        self.assertEqual(self.drain(q), [b"2"])

    def test_corrupt_buffered_payload_is_quarantined(self) -> None:
        # If a person removes the file before its rename, nothing is renamed.
        q = self.queue()
        name = f"{1:020d}-8000000000000000"
        os.mkdir(self.file("keys"))
        path = self.put(name, b"rubbish", "keys")
        with hooked(at_call("move", path, lambda: os.unlink(path), times=1)):
            self.assertIsNone(q.pop())
        self.assertEqual((self.names("keys"), self.names("pending")), ([], []))
        self.put(name, b"rubbish", "keys")
        self.assertIsNone(self.queue("n2").pop())
        self.assertEqual(self.states(), {"failed": 1})

    # Dead letters, and files that people move

    def move_back_by_hand(self, ident: str) -> None:
        """Do `mv failed/ID pending/`, like a person who knows nothing of keys."""
        os.rename(self.file("failed", ident), self.file("pending", ident))

    def test_dead_letter_moved_back_does_not_join_or_replace_a_newer_task(self) -> None:
        """A dead letter that a person moves to pending/ is not delivered while its key has a newer
        task, and does not replace that task."""
        # This holds even if the state file still names the dead letter. But if the key has no other
        # task, the dead letter is delivered.
        q = self.queue("a-node-with-a-name-that-is-longer-than-pending")
        old = self.leased_with_buffered(q)
        q.fail(old, "why")
        newer = self.pop(q)
        self.move_back_by_hand(old.id)
        self.assertIsNone(q.pop())
        self.assertEqual(newer.data, b"2")
        self.assertEqual(self.names("failed"), [old.id, f"{old.id}.error"])
        q.done(newer)
        q.retry(old.id)
        self.assertEqual((q.push(b"3", key="k"), q.contains("k")), (old.id, True))
        q.fail(self.pop(q))
        self.move_back_by_hand(old.id)
        # With state files, this push() makes a second task, and then pop() quarantines the dead
        # letter. Without state files, push() finds the dead letter in pending/ by a listing, and
        # replaces its payload.
        q.push(b"4", key="k")
        self.assertEqual(self.drain(q), [b"4"])
        self.assertEqual(self.names("failed") != [], self.has_states)
        if self.has_states:
            self.move_back_by_hand(old.id)
            self.assertEqual(self.drain(q), [b"3"])
        self.assertEqual(self.names("keys"), [])

    def no_room_for_states(self) -> Any:
        """Return a context in which no link can be made: ENOSPC."""
        return hooked(at_call("symlink", None, errno_raiser(errno.ENOSPC)))

    def test_task_moved_back_by_hand_is_not_delivered_before_its_state_is_saved(
        self,
    ) -> None:
        """A keyed task that a person moved to pending/ is not delivered while the state file of its
        key can't be written."""
        q, other = self.queue(), self.queue("n2")
        task = leased(q, b"1", "k")
        q.fail(task)
        self.move_back_by_hand(task.id)
        with self.no_room_for_states(), contextlib.suppress(OSError):
            q.pop()
        other.push(b"2", key="k")
        other.pop()
        q.pop()
        self.assertEqual(q.stats().inflight, 1)

    def test_promoted_payload_wins_though_its_state_was_not_saved(self) -> None:
        """A promoted payload is delivered instead of an older one that a person moved back, even if
        the promotion was not saved in the state file."""
        q = self.queue()
        old = self.leased_with_buffered(q)
        with self.no_room_for_states():
            q.fail(old)
        self.move_back_by_hand(old.id)
        self.assertEqual(self.drain(q), [b"2"])

    def test_wrong_or_invalid_state_file_does_no_harm(self) -> None:
        """A key works although its state file is invalid, or names a task without a key."""
        # No push() writes such a file.
        q = self.queue()
        os.mkdir(self.file("keys"))
        self.put(key_tag("k"), b"k ../../etc/passwd -\nrub bish\n\xff\n\n", "keys")
        q.push(b"4", key="k")
        self.assertEqual(self.drain(q), [b"4"])
        self.assertTrue(not self.has_states or self.names("keys") == [])
        self.put(key_tag("k"), f"k pending/{q.push(b'plain')} -\n\n".encode(), "keys")
        q.push(b"5", key="k")
        self.assertEqual(self.drain(q), [b"plain", b"5"])

    def test_link_to_another_keys_task_or_payload_is_not_trusted(self) -> None:
        """A push or take of a key uses no task and no payload of another key, whatever the link of
        the key says."""
        q = self.queue()
        os.mkdir(self.file("keys"))
        link = self.file("keys", key_tag("k"))
        task = self.take(q, id=q.push(b"1", key="leased"))
        behind = f"keys/{q.push(b'2', key='leased')}"
        waiting = f"pending/{q.push(b'3', key='waits')}"
        for text in ("rubbish", waiting, f"{waiting} {behind}", task.path):
            os.symlink(text, link)
            q.push(b"4", key="k")
            q.done(mine := self.take(q, "k"))
            self.assertEqual((mine.key, mine.data), ("k", b"4"), text)
            if not self.has_states:
                os.unlink(link)
        ident = q.push(b"5", key="k")
        if self.has_states:
            os.unlink(link)
        os.symlink(f"pending/{ident} {behind}", link)
        q.done(mine := self.take(q, id=ident))
        self.assertEqual(mine.data, b"5")
        q.done(task)
        self.assertEqual(self.drain(q), [b"2", b"3"])

    def test_stray_payload_does_not_replace_a_payload_that_was_written_later(
        self,
    ) -> None:
        """A payload in keys/ that no link names, and that was written first, is not delivered."""
        q = self.queue()
        task = self.leased_with_buffered(q)
        stray = self.put(
            f"{10**18:020d}-{key_tag('k')}", record(b"stray", b"k"), "keys"
        )
        os.utime(stray, (1, 1))
        self.assertIsNone(self.queue("n2").pop())
        q.done(task)
        self.assertEqual(self.drain(q), [b"2"])

    def test_of_two_stray_payloads_the_one_written_last_is_delivered(self) -> None:
        """If no link names either of two payloads in keys/, the payload that was written last
        becomes the task, even if its id is lower."""
        # On a shared file system, the times of files are not reliable, and the ids decide.
        q = self.queue()
        last_s = time.time()
        os.mkdir(self.file("keys"))
        for number, written_s in ((1, last_s), (2, last_s - 9)):
            name = f"{number:020d}-{key_tag('k')}"
            path = self.put(name, record(b"%d" % number, b"k"), "keys")
            os.utime(path, (written_s, written_s))
        self.assertEqual(self.drain(q), [b"1"] if self.has_states else [b"2"])

    def test_payload_scheduled_behind_an_undone_claim_is_not_delivered_early(
        self,
    ) -> None:
        q, other = self.queue(), self.queue("n2")
        ident = q.push(b"1", key="k")

        def undo() -> None:
            other.schedule(b"2", (time.time() + 9000) * 1e6, key="k")
            raise_errno(errno.EMFILE)

        with (
            self.assertRaises(OSError),
            hooked(at_call("open", "/inflight-n1/", undo, times=1)),
        ):
            q.pop()
        self.assertEqual((other.pop(), q.pop()), (None, None))
        self.assertEqual(self.take(q, id=ident).data, b"2")

    def test_push_also_replaces_a_payload_behind_an_undone_claim(self) -> None:
        """If a payload is pushed behind a claim that is then undone, the next push replaces both
        payloads."""
        q, other = self.queue(), self.queue("n2")
        q.push(b"1", key="k")

        def undo() -> None:
            other.push(b"2", key="k")
            raise_errno(errno.EMFILE)

        with (
            self.assertRaises(OSError),
            hooked(at_call("open", "/inflight-n1/", undo, times=1)),
        ):
            q.pop()
        q.push(b"3", key="k")
        self.assertEqual((self.drain(q), q.stats().buffered), ([b"3"], 0))

    def test_payload_that_another_process_left_in_keys_is_delivered(self) -> None:
        """A payload that came to keys/, and whose task has ended, is soon delivered."""
        q, other = self.queue(), self.queue("n2")
        clock = self.clock()
        self.assertIsNone(q.pop())
        task = self.leased_with_buffered(other)
        with hooked(at_call("move", "/keys/", errno_raiser(errno.EIO))):
            other.done(task)
        clock.advance(31)
        self.assertEqual(self.drain(q), [b"2"])

    def test_payload_that_can_not_be_moved_does_not_cost_a_repair_each_pop(
        self,
    ) -> None:
        """If a payload can't leave keys/, the repair is not tried again at each pop()."""
        self.clock().stand_still()
        q = self.queue()
        task = self.leased_with_buffered(q)
        q.push_many([b"x"] * 20)
        os.rename(self.file(task.path), self.file("done", task.id))
        tries = []

        def fail() -> NoReturn:
            tries.append(1)
            raise_errno(errno.EPERM)

        other = self.queue("n2")
        with hooked(at_call("move", "/keys/", fail)):
            for _ in range(20):
                other.done(popped(other))
        self.assertLess(len(tries), 5)

    def test_task_that_a_failed_push_left_in_keys_comes_back(self) -> None:
        """If a push fails while it has the task in keys/, and can't put it back, the next repair of
        keys does."""
        q = self.queue()
        clock = self.clock()
        self.assertIsNone(q.pop())
        q.push(b"1", key="k")
        q.push_many([b"2", b"3"])
        moves = itertools.count()

        def fail(name: str, args: tuple[Any, ...]) -> None:
            if name == "move" and "/keys/0" in f"{args}" and next(moves):
                raise_errno(errno.EIO)

        with self.assertRaises(OSError), hooked(fail):
            q.push(b"new", key="k")
        self.assertEqual(self.states(), {"pending": 2, "keys": 1})
        clock.advance(31)
        self.assertEqual(sorted(self.drain(q)), [b"1", b"2", b"3"])

    # Locks

    def test_thread_that_waits_for_a_key_does_not_block_other_threads(self) -> None:
        """While threads wait for the lock of a key, another thread of the queue object can deliver
        and finish tasks."""
        q = self.queue()
        waits = threading.Semaphore(0)
        task = leased(q, b"1", "k")
        q.push(b"2")
        q.push(b"4", key="another")
        push = functools.partial(q.push, b"3", key="k")
        done = functools.partial(q.done, task)
        waiters = [threading.Thread(target=it, daemon=True) for it in (push, done)]
        worker = threading.Thread(target=self.drain, args=(q,), daemon=True)
        with self.locked("k"):
            with hooked(at_call("lock", None, waits.release)):
                for waiter in waiters:
                    waiter.start()
                    waits.acquire(timeout=PATIENCE_S)
            worker.start()
            worker.join(10)
            self.assertFalse(worker.is_alive())
        for waiter in waiters:
            waiter.join()
        self.assertEqual(self.drain(q), [b"3"])

    def test_task_of_a_locked_key_is_reclaimed_or_enqueued_later(self) -> None:
        # Meanwhile, other tasks are delivered.
        q = self.queue()
        clock = self.clock()
        other = self.queue("n2")
        leased(other, b"1", "k")
        q.push(b"2")
        q.schedule(b"3", 0, key="busy")
        clock.advance(31)
        with self.locked("k"), self.locked("busy"):
            self.assertEqual(self.drain(q), [b"2"])
        clock.advance(1)
        self.assertEqual(sorted(self.drain(q)), [b"1", b"3"])

    def test_task_that_processing_could_not_give_back_comes_back_when_its_key_is_free(
        self,
    ) -> None:
        """A task that processing() could not give back, because of an I/O error, is delivered again
        as soon as the lock of its key is free."""
        # the lease does not end by its deadline
        q = self.queue(timeout_stale_ms=10**15)
        task = leased(q, key="k")
        with (
            contextlib.suppress(OSError),
            hooked(at_call("move", "/inflight-", errno_raiser(errno.EIO))),
            q.processing(task),
        ):
            raise ZeroDivisionError
        with self.locked("k"):
            self.assertIsNone(q.pop())
        self.assertEqual(q.pop(PATIENCE_S), FemtoTask(task.id, b"x", 2, "k"))

    def test_take_without_a_timeout_waits_a_little_for_the_lock_of_the_key(
        self,
    ) -> None:
        self.clock().stand_still()  # no job comes due: only take() locks something
        q = self.queue()
        tries = itertools.count()
        self.assertIsNone(q.pop())
        q.push(b"x", key="k")
        lock = self.locked("k")

        def unlock() -> None:
            if next(tries) == 1:
                lock.close()

        with lock, hooked(at_call("lock", None, unlock)):
            self.assertEqual(self.take(q, "k").data, b"x")

    def test_payload_scheduled_behind_a_task_can_be_taken_by_the_tasks_id(self) -> None:
        """A payload that was scheduled behind a leased task can be taken early, by the id of the
        task, after the task was released."""
        q = self.queue()
        task = leased(q, b"1", "k")
        q.schedule(b"2", (time.time() + 9000) * 1e6, key="k")
        q.release(task)
        self.assertEqual(self.states(), {"scheduled": 1})
        self.assertEqual(q.take(id=task.id), FemtoTask(task.id, b"2", 1, "k"))

    def test_newer_payload_with_equal_bytes_begins_without_attempts_and_checkpoint(
        self,
    ) -> None:
        q = self.queue()
        task = leased(q, b"", "k")
        q.checkpoint(task, b"half")  # belongs to the older payload
        q.push(b"", key="k")
        q.release(task)
        task = self.pop(q)
        self.assertEqual((task.attempts, task.checkpoint), (1, None))


class Healed(QueueCase):
    """On a file system that hosts share, old names of renamed files come back, as second links,
    when GlusterFS has healed after a network failure. Other hosts move and remove files."""

    fs_type = FUSE

    def test_finished_task_whose_old_name_comes_back_comes_twice_more_at_most(
        self,
    ) -> None:
        """If an old name of a finished task comes back, the task is delivered twice more at most,
        and its key's newer task is delivered."""
        # The first end renames the lease to another link of the same file, which does nothing. The
        # second end removes the lease.
        front = "pending/{id:.20}~1~{id}"
        for key, name in itertools.product(
            (None, "k"), ("pending/{id}", front, "{path}")
        ):
            q = self.new_queue()
            clock = self.clock()
            task = leased(q, b"1", key)
            path = self.file(name.format(id=task.id, path=task.path))
            q.done(task)
            newer = q.push(b"2", key=key)
            os.link(self.file("done", task.id), path)
            delivered = list[str]()
            for _ in range(4):
                clock.advance(60)
                for it in iter(q.pop, None):
                    delivered.append(it.id)
                    q.done(it)
            with self.subTest(name, key=key):
                self.assertIn(newer, delivered)
                self.assertLessEqual({*Counter(delivered).values()}, {1, 2})
                self.assertLessEqual({*delivered}, {newer, task.id})

    def test_replaced_record_that_comes_back_does_not_become_the_task_of_its_key(
        self,
    ) -> None:
        """A replaced record that comes back ends in failed/, and the key's younger task is
        delivered."""
        # Payloads that are buffered behind the younger task are delivered, too. The file of a newer
        # payload replaced the old record, and then the task was finished with the newer file. So
        # the old record has no link in done/, which would show that it is outdated.
        for name in ("pending/{id}", "{path}"):
            q = self.new_queue()
            other = self.queue("n2")
            clock = self.clock()
            ended = leased(other, b"1", "k")
            ident = q.push(b"2", key="k")
            other.done(ended)
            self.put(name.format(id=ended.id, path=ended.path), record(b"1", b"k"), "")
            with self.subTest(name):
                self.assertEqual(q.push(b"3", key="k"), ident)
                clock.advance(60)
                task = self.take(q, "k")
                self.assertEqual((task.id, task.data), (ident, b"3"))
                q.push(b"4", key="k")
                q.done(task)
                self.assertEqual((self.names("keys"), q.stats().buffered), ([], 0))
                self.assertEqual([it.data for it in iter(q.pop, None)], [b"4"])
                self.assertEqual(self.names("failed"), [ended.id, f"{ended.id}.error"])

    def test_buffered_payload_that_comes_back_does_not_replace_a_younger_task(
        self,
    ) -> None:
        q = self.queue()
        first = leased(q, b"1", "k")
        ident = q.push(b"2", key="k")
        q.done(first)
        q.push(b"3", key="k")
        q.done(self.pop(q))
        newest = q.push(b"4", key="k")
        for behind in (ident, newest):
            ghost = self.put(behind, record(b"2", b"k"), "keys")
            task = popped(q)
            self.assertEqual((task.id, task.data), (newest, b"4"))
            q.release(task) if behind == ident else q.done(task)
            self.assertEqual(self.names("keys"), [behind])
            os.unlink(ghost)

    def test_retried_task_whose_dead_letter_comes_back_is_delivered(self) -> None:
        # Nothing shows which of the two names is the older name.
        q = self.queue()
        for key in (None, "k"):
            dead = leased(q, b"1", key)
            q.fail(dead)
            q.retry(dead.id)
            (name,) = self.names("pending")
            os.link(self.file("pending", name), self.file("failed", dead.id))
            self.assertTrue(key is None or q.contains(key))
            self.assertEqual(popped(q).id, dead.id)
            os.unlink(self.file("failed", dead.id))

    def test_late_worker_that_still_has_its_task_ends_the_delivery_despite_other_links(
        self,
    ) -> None:
        """A worker ends a delivery after the deadline, if no other worker has got the task, even if
        the task's file has other links."""
        # A person may have made the link, or an older name of the file has come back.
        for key, name in itertools.product(
            (None, "k"), ("pending/{}", "failed/{}", "{}.copy")
        ):
            q = self.new_queue()
            clock = self.clock()
            task = leased(q, b"1", key)
            os.link(self.file(task.path), self.file(name.format(task.id)))
            clock.advance(60)
            with self.subTest(name, key=key):
                q.done(task)
                self.assertIn(task.id, self.names("done"))

    def test_failed_statfs_is_raised_and_does_not_mean_a_local_file_system(
        self,
    ) -> None:
        """If statfs() fails, a waiting pop() and register() raise the error."""
        # The calls that raised leave no descriptor and no ticket.
        q = self.queue()
        line = self.new_dir()
        self.assertIsNone(q.pop())  # opens the lease directory, which stays open
        opened = len(os.listdir("/dev/fd"))
        cut = seam("file system type", lambda _: raise_errno(errno.ENOTCONN))
        with cut, mock.patch("sys.unraisablehook") as complaint:
            for call in (
                functools.partial(q.pop, PATIENCE_S),
                lambda: TicketQueue(line).register(),
            ):
                self.assertRaises(OSError, call)
        complaint.assert_not_called()
        self.assertLessEqual(len(os.listdir("/dev/fd")), opened)
        self.assertEqual({*os.listdir(line)} - {"last"}, set())

    def test_lease_of_another_host_that_was_just_renewed_is_not_reclaimed(self) -> None:
        # By this host's queue clock, the deadline has passed, because the clocks of hosts drift
        # apart. But the st_ctime of the file shows the renewal.
        with on_boot("another host's"):
            q = self.queue(timeout_stale_ms=1000)
            task = leased(q)
        other = self.queue("n2")
        self.clock().advance(2)
        with hooked(
            at_call("stat lstat", task.path, errno_raiser(errno.ESTALE), times=1)
        ):
            self.assertIsNone(other.pop())
        q.done(task)
        self.assertEqual(self.states(), {"done": 1})

    def test_finished_task_that_another_host_removes_is_no_error(self) -> None:
        """done() with sync and purge() raise no error if another host removes the finished task
        meanwhile."""
        q = self.queue(sync_after_write=True)
        task = leased(q)
        with hooked(at_call("open", f"done/{task.id}", errno_raiser(errno.ESTALE))):
            q.done(task)
        for event in ("stat lstat", "unlink"):
            with hooked(at_call(event, f"done/{task.id}", errno_raiser(errno.ESTALE))):
                self.assertEqual(q.purge(0), 0)

    def test_dead_letter_whose_file_can_not_be_found_is_not_retried(self) -> None:
        """retry() raises TaskNotFound, and moves nothing, if the file of a keyed dead letter can't
        be found."""
        # Only the file tells the key, and the key may have another task.
        q = self.queue()
        ident = q.push(b"1", key="k")
        q.fail(self.pop(q))
        gone = hooked(at_call("open", f"failed/{ident}", errno_raiser(errno.ENOENT)))
        with gone, mock.patch("time.sleep"):
            for _ in range(2):
                self.assertRaises(TaskNotFound, q.retry, ident)
        self.assertEqual(self.names("failed"), [ident])
        q.retry(ident)

    def test_large_empty_pending_is_not_replaced_on_a_shared_file_system(self) -> None:
        # Other hosts may look into the old directory for a long time.
        q = self.queue()
        before = os.stat(self.file("pending")).st_ino
        with with_constant("shrink", -1):
            self.assertIsNone(q.pop())
        self.assertEqual(os.stat(self.file("pending")).st_ino, before)

    def test_checkpoints_are_listed_before_one_is_read(self) -> None:
        # Without the listing, pop() might read an old file that another host has replaced.
        q = self.queue()
        seen = list[str]()
        task = leased(q)
        q.checkpoint(task, b"half")
        q.release(task)
        with hooked(
            lambda name, args: seen.append(f"{name} {os.path.basename(str(args[0]))}")
        ):
            task = self.pop(q)
        self.assertEqual(task.checkpoint, b"half")
        self.assertLess(seen.index("list checkpoints"), seen.index(f"open {task.id}"))

    def test_claim_that_can_be_neither_used_nor_undone_is_given_back_later(
        self,
    ) -> None:
        # First, the claim is carried out, but reported as failed. Second (is_answered), the claim
        # is reported as carried out, but the worker can't read the file of the lease. In both
        # cases the undoing fails, too, and no caller has the lease. The lease has no deadline, but
        # does not last for ever.
        renames: list[str] = []
        no_server = errno_raiser(errno.ENOTCONN)

        def rename(*args: Any, **where: Any) -> None:
            renames.append(args[1])
            if len(renames) == 1:
                os.rename(*args, **where)
            if len(renames) > is_answered:
                no_server()

        def open_file(path: str, *args: Any, **where: Any) -> int:
            is_lease = path.count("~") == 3
            return no_server() if is_lease else os.open(path, *args, **where)

        for is_answered in (False, True):
            q = self.new_queue(timeout_stale_ms=None)
            q.push(b"1")
            renames.clear()
            fake = fake_os(rename=rename, replace=rename, open=open_file)
            with self.subTest(is_answered), mock.patch.object(femtoqueue, "os", fake):
                self.assertRaises(OSError, q.pop)
            self.assertEqual(self.states(), {"inflight-n1": 1})
            task = q.pop(60)
            # A task that can't be read counts the delivery.
            self.assertEqual(
                task and (task.data, task.attempts), (b"1", 1 + is_answered)
            )


class KeyedOnSharedFileSystem(Keyed):
    """The tests of Keyed where other hosts may write. Only listings and renames are reliable there.
    The links keys/<hash> are not used."""

    in_memory = True
    has_states = False
    fs_type = NFS

    def test_two_tasks_of_a_key_claimed_at_once_lead_to_one_delivery(self) -> None:
        """If two hosts claim two tasks of one key at once, the newer task is delivered, and the
        older task ends in failed/."""
        # Each host sees the lease of the other in a listing, but only one host may give way.
        q, other = self.queue(), self.queue("n2")
        ident = f"{1:020d}-{key_tag('k')}"
        newer = q.push(b"2", key="k")
        self.put(ident, record(b"1", b"k"))
        taken: list[FemtoTask | None] = []
        thread = threading.Thread(target=lambda: taken.append(other.pop()))

        def meet(name: str, args: tuple[Any, ...]) -> None:
            if name == "move" and "/failed/" in args[1] and not thread.ident:
                thread.start()
                thread.join(0.3)

        with hooked(meet):
            taken.append(q.pop())
        thread.join(PATIENCE_S)
        self.assertEqual([task.id for task in taken if task], [newer])
        self.assertIn(ident, self.names("failed"))

    def test_rename_into_keys_that_did_nothing_is_made_again(self) -> None:
        """If the kernel takes keys/<id> for the file that is renamed, and does nothing, the rename
        is made again."""
        q = self.queue()
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        real = os.replace
        renamed: list[Any] = []

        def replace(source: str, target: str, **dirs: Any) -> None:
            path = path_at(dirs["dst_dir_fd"], target)
            if not path.endswith(f"/keys/{task.id}") or path in renamed:
                real(source, target, **dirs)
            renamed.append(path)

        with mock.patch("os.replace", replace):
            q.release(task)
        self.assertEqual(self.states(), {"pending": 1})
        self.assertEqual(self.drain(q), [b"2"])

    def test_push_goes_behind_a_lease_that_its_host_does_not_see(self) -> None:
        """If the renames of a waiting task into keys/ do nothing, because another worker has
        claimed it, the payload goes behind the lease."""
        q, other = self.queue(), self.queue("n2")
        self.clock()
        ident = q.push(b"1", key="k")
        real = os.replace
        claimed = list[FemtoTask]()

        def replace(source: str, target: str, **dirs: Any) -> None:
            if not path_at(dirs["dst_dir_fd"], target).endswith(f"/keys/{ident}"):
                real(source, target, **dirs)
            elif not claimed:
                claimed.append(popped(other))

        with mock.patch("os.replace", replace):
            q.push(b"2", key="k")
        self.assertEqual((claimed[0].id, claimed[0].data), (ident, b"1"))
        other.done(claimed[0])
        self.assertEqual(self.drain(q), [b"2"])
        self.assertEqual(self.states(), {"done": 2})

    def test_push_replaces_the_payload_of_a_task_from_a_host_whose_clock_is_fast(
        self,
    ) -> None:
        """A push replaces the payload of a waiting task, even if the task's id has a time in the
        future."""
        q = self.queue()
        self.put(f"{time.time_ns() + 10**9:020d}-{key_tag('k')}", record(b"1", b"k"))
        q.push(b"2", key="k")
        self.assertEqual(self.drain(q), [b"2"])

    def test_payload_pushed_behind_a_task_from_a_host_whose_clock_is_fast_is_delivered(
        self,
    ) -> None:
        q = self.queue()
        self.put(
            f"{time.time_ns() + 60 * 10**9:020d}-{key_tag('k')}", record(b"1", b"k")
        )
        task = self.pop(q)
        q.push(b"2", key="k")
        q.done(task)
        self.assertEqual(self.drain(q), [b"2"])

    def test_older_of_two_buffered_payloads_is_never_delivered(self) -> None:
        # This happens if a host loses the lock of the key, because it is cut off from the network,
        # and pushes a payload at the same time as another host.
        q = self.queue()
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        [behind] = self.names("keys")
        self.put(
            f"{int(behind[:20]) + 1:020d}{behind[20:]}", record(b"3", b"k"), "keys"
        )
        q.release(task)
        self.assertEqual(self.drain(q), [b"3"])
        self.assertEqual((self.names("keys"), self.names("failed")), ([], []))

    def test_younger_task_of_a_key_moved_to_pending_by_hand_waits_for_the_older_one(
        self,
    ) -> None:
        """If a person moves a second task of a key to pending/, the task waits while the older task
        of the key is leased."""
        # Then the second task is delivered. The delay does not count as an attempt.
        q, other = self.queue(), self.queue("n2")
        clock = self.clock()
        for data in (b"1", b"2"):
            q.fail(leased(q, data, "k"))
        older, younger = self.names("failed")
        q.retry(older)
        task = self.pop(q)
        os.rename(self.file("failed", younger), self.file("pending", younger))
        self.assertIsNone(other.pop())
        self.assertEqual(
            (len(self.names("scheduled")), len(self.names("failed"))), (1, 0)
        )
        q.done(task)
        clock.advance(24)
        self.assertEqual((task := self.pop(other)).data, b"2")
        self.assertEqual(task.attempts, 1)


# Durability, crashes, faults


class Durability(StepCase):
    """Each step syncs the right files in the right order."""

    in_memory = False

    def test_step_is_on_disk_when_it_returns(self) -> None:
        # Before the unlink of a lease, its file and directory are synced, because the claim was not
        # synced. Otherwise, after power loss, the disk may show the record where it waited. The
        # reason of a failure is synced before the record. The link of a new key is synced before
        # the record is moved. Otherwise, after power loss, no later push would know of the task.
        self.clock().stand_still()
        self.check_steps(self.moves_and_syncs, "synced", sync_after_write=True)

    def test_step_is_on_disk_when_it_returns_on_other_file_systems(self) -> None:
        """On NFS, a record is synced before the rename."""
        # Otherwise another host could read a torn record before the sync, and quarantine the task.
        self.patched(on_file_system(NFS))
        for words in ("push x", "schedule x 4e15"):
            step = self.prepare_step(words, Row("", ""), sync_after_write=True)
            self.assertEqual(self.moves_and_syncs(step), ["file", "move", "directory"])

    def test_no_renewal_comes_between_the_sync_of_a_lease_and_its_removal(self) -> None:
        # A renewal would give the file a new name, which would not have been synced.
        q = self.queue(sync_after_write=True, keep_done=False)
        task = leased(q)
        lease = task.path

        def begin_renewal() -> None:
            renewal.start()
            renewal.join(0.1)
            self.assertEqual(task.path, lease)

        def extend() -> None:
            with self.assertRaises(LeaseLost):
                q.extend(task)
            refused.append(task)

        refused: list[FemtoTask] = []
        renewal = threading.Thread(target=extend)
        with hooked(at_call("open", "/inflight-", begin_renewal, times=1)):
            q.done(task)
        renewal.join()
        self.assertEqual((self.states(), refused), ({}, [task]))

    def test_task_that_is_moved_on_before_its_sync_is_no_error(self) -> None:
        """If another process removes a finished task before done() syncs the file, done()
        returns."""
        q = self.queue(sync_after_write=True)
        task = leased(q)
        path = self.file("done", task.id)
        with hooked(at_call("open", path, lambda: os.unlink(path), times=1)):
            q.done(task)
        self.assertEqual(self.states(), {})

    def test_queue_with_a_symbolic_link_in_its_path_can_be_synced(self) -> None:
        """Syncs work if data_dir or its parent is a symbolic link."""
        os.mkdir(self.file("real"))
        os.symlink("real", self.file("link"))
        for path in ("link", "link/jobs"):
            with FemtoQueue(self.file(path), sync_after_write=True) as q:
                q.push(b"x")
                q.done(popped(q))
                self.assertEqual(q.stats().done, 1)

    def test_directory_of_the_queue_that_is_a_link_is_refused_and_named(self) -> None:
        outside = self.new_dir()
        for name in ("pending", "done", "creating"):
            q = self.new_queue()
            q.push(b"x")
            task = popped(q)
            os.rename(self.file(name), self.file("aside"))
            os.symlink(outside, self.file(name))
            q._files.dirs.refresh()
            refused = []
            calls: tuple[Callable[[], object], ...] = (
                functools.partial(FemtoQueue, self.path),
                functools.partial(q.push, b"y"),
                functools.partial(q.done, task),
            )
            for call in calls:
                with contextlib.suppress(LeaseLost):
                    try:
                        call()
                    except OSError as error:
                        refused.append(f"{error}")
            self.assertEqual(os.listdir(outside), [])
            self.assertRegex(refused[0], rf"must not be a link or a file: '.*/{name}'")

    def test_entry_of_each_directory_is_synced_whoever_made_it(self) -> None:
        """A queue object with sync syncs the entries of the queue's directories, whoever made the
        directories."""
        synced = set[int]()

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.add(os.fstat(args[0]).st_ino)

        with hooked(note):
            FemtoQueue(self.file("a", "b", "c"), sync_after_write=True).close()
        made = {os.stat(self.file(it)).st_ino for it in (".", "a", "a/b", "a/b/c")}
        self.assertLessEqual(made, synced)
        self.queue()
        calls = self.moves_and_syncs(
            lambda: FemtoQueue(self.path, sync_after_write=True)
        )
        self.assertEqual(calls, ["directory"] * 2)

    def test_payload_that_becomes_a_task_is_synced_in_pending(self) -> None:
        """After done() with sync, the payload that was behind the task is synced in its new place,
        and so is pending/."""
        q = self.queue(sync_after_write=True)
        synced = set[int]()
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.add(os.fstat(args[0]).st_ino)

        with hooked(note):
            q.done(task)
        [name] = self.names("pending")
        places = self.file("pending"), self.file("pending", name)
        self.assertLessEqual({os.stat(it).st_ino for it in places}, synced)

    def test_push_many_syncs_the_batch_once(self) -> None:
        """push_many() with sync calls syncfs() once for the whole batch."""
        # Without syncfs(), it syncs each task. Without sync_after_write, it syncs nothing.
        q, other = self.queue(sync_after_write=True), self.queue("n2")
        synced = list[str]()
        with on_file_system(0):
            calls = self.moves_and_syncs(lambda: q.push_many([b"1", b"2", b"3"]))
        self.assertEqual(calls, ["move", "file", "directory"] * 3)
        with (
            on_file_system(EXT4),
            hooked(at_call("syncfs", None, lambda: synced.append("."))),
        ):
            for pushing in (q, other):
                calls = self.moves_and_syncs(
                    functools.partial(pushing.push_many, [b"4", b"5"])
                )
                self.assertEqual((calls, len(synced)), (["move"] * 2, 1))
        self.assertEqual(self.drain(q), [b"1", b"2", b"3", *[b"4", b"5"] * 2])

    def test_push_many_whose_sync_fails_says_which_tasks_are_in_the_queue(self) -> None:
        """If the sync of a batch fails, push_many() raises the error. Its `pushed_ids` are the
        tasks, which wait, but which power loss may still undo."""
        q = self.queue(sync_after_write=True)
        failing = hooked(at_call("syncfs", None, errno_raiser(errno.EIO)))
        with on_file_system(EXT4), failing, self.assertRaises(OSError) as caught:
            q.push_many([b"1", b"2"])
        self.assertEqual(caught.exception.errno, errno.EIO)
        self.assertEqual(caught.exception.pushed_ids, self.names("pending"))  # type: ignore[attr-defined]
        self.assertEqual(self.drain(q), [b"1", b"2"])

    @unittest.skipUnless(sys.platform == "linux", "syncfs is Linux's")
    def test_syncfs_is_found_and_called(self) -> None:
        q = self.queue(sync_after_write=True)
        seen = list[bool]()

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "syncfs":
                seen.append(
                    os.path.samestat(os.fstat(args[0]), os.stat(self.file("pending")))
                )

        with on_file_system(EXT4), hooked(note):
            q.push_many([b"x"])
        self.assertEqual(seen, [True])


# Calls that change no directory and no file. A process that dies just before such a call leaves the
# same files as a process that dies just after the call.
# fmt: off
UNCHANGING = (
    "access", "close", "fstat", "fsync", "getxattr", "inotify", "list", "listxattr", "lock",
    "lseek", "lstat", "read", "readlink", "stat", "fstatfs", "statvfs", "syncfs",
)
# fmt: on


def may_change(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call may change the contents of a directory or of a file."""
    if name != "open":
        return name not in UNCHANGING
    how = args[1] if len(args) > 1 else "r"
    return (
        bool(how & (os.O_CREAT | os.O_TRUNC)) if isinstance(how, int) else how[0] != "r"
    )


def takes_effect(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call may change a directory, a file, a lock or a descriptor."""
    return name in ("open", "close", "lock") or may_change(name, args)


# After these errors of the rename into done/, done() removes the task.
REFUSED_BY_DONE = (errno.ENOSPC, errno.EACCES)


def possible_errors(name: str, args: tuple[Any, ...]) -> list[int]:
    """Return the errors that a system may report for a call."""
    frees_space = name in ("unlink", "rmdir", "chmod", "fchmod", "fchown")
    takes_space = name in ("fsync", "syncfs") or (
        may_change(name, args) and not frees_space
    )
    has = {
        errno.EIO: True,
        errno.ENOSPC: takes_space,
        errno.EMFILE: name in ("open", "list", "pipe", "pipe2", "dup", "inotify"),
        errno.EACCES: bool(args) and isinstance(args[0], str),
    }
    return [code for code, may_be in has.items() if may_be]


class Step:
    """A hook that counts system calls and calls action() before call `number`. The first call is
    call 0. With `counts`, only calls for which counts() returns True count.

    action() must raise, so that the system call is not made. Only a close() is made all the same,
    before action()."""

    def __init__(
        self,
        number: int,
        action: Callable[[], object] = do_nothing,
        counts: Callable[[str, tuple[Any, ...]], bool] | None = None,
    ) -> None:
        self.number = self.left = number
        self.action = action
        self.counts = counts
        self.at = ""  # the event of the call before which action() was called
        self.args: tuple[Any, ...] = ()

    @classmethod
    def each(
        cls,
        action: Callable[[], object] = do_nothing,
        counts: Callable[[str, tuple[Any, ...]], bool] | None = None,
        at_least: int = 8,
        numbers: Iterable[int] | None = None,
    ) -> Iterator[Step]:
        """Yield steps, numbered from 0, or with these numbers. The caller repeats its work, and
        each time sets the next step as the hook. The first step that the work does not reach is the
        last one."""
        for number in numbers or itertools.count():
            step = cls(number, action, counts)
            yield step
            if not step.reached:
                demand(number >= at_least, f"only {number} system calls")
                return

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.counts and not self.counts(name, args):
            return
        self.left -= 1
        if self.left == -1:
            self.at = name
            self.args = args
            self.begin()

    def begin(self) -> None:
        if self.at == "close":
            os.close(self.args[0])  # close() closes the descriptor even if it fails
        self.action()

    @property
    def reached(self) -> bool:
        return self.left < 0


class Meanwhile(Step):
    """A step at which the system call is made, too. So action() can do what another process does in
    the meantime. The call is made after action(). But under hooked(after=True), as in a Scenario,
    the call is made before action()."""

    def begin(self) -> None:
        self.action()


class StaleLook(Step):
    """A step at which a look at a task's file fails, because another host has replaced the file.
    The same call fails twice with ESTALE, then once with ENOENT, and then succeeds."""

    misses = 3

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        is_same = self.reached and (name, args[:1]) == (self.at, self.args[:1])
        super().__call__(name, args)
        if is_same and self.misses:
            self.begin()

    def begin(self) -> None:
        self.misses -= 1
        if self.at == "close":
            os.close(self.args[0])
        raise OSError(
            errno.ESTALE if self.misses else errno.ENOENT, "replaced", self.args[0]
        )


def sees_or_changes_names(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call sees or changes names."""
    return name in ("open", "list", "lstat", "stat", "move", "unlink", "mkdir", "rmdir")


def is_look_at_task(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call looks at a task's file, or at the reason beside a dead letter."""
    if name not in ("open", "lstat", "close") or may_change(name, args):
        return False
    path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "close" else args[0]
    return is_id(path.removesuffix(".error")[-37:]) and "/creating/" not in path


Say = Callable[[str], None]
# A function that runs a scenario in a new queue in self.path, with a hook for its system calls.
RunScenario = Callable[[Hook, Say], object]
# The outcome of an interrupted Life (the next class): a text that says how it was interrupted, a
# queue object that goes on with the queue, and the lines that the life has passed to say().
Ending = tuple[str, FemtoQueue, list[str]]


class Life:
    """Carries out the words of a scenario. Each word is a method, which does one operation.

    The life calls say("try OPERATION") before an operation, and say("OPERATION") after the
    operation has returned. OPERATION is a word and a payload, such as "done a"."""

    def __init__(self, q: FemtoQueue, say: Say, key: str | None) -> None:
        self.q = q
        self.say = say
        self.key = key
        # after turn(): the worker that does nothing now
        self.other: FemtoQueue | None = None
        self.held: list[FemtoTask] = []  # leased tasks; the first one is settled first
        self.failed: FemtoTask | None = None  # the task that failed last

    def do(self, words: str) -> None:
        try:
            for operation in words.split(", "):
                word, *arguments = operation.split()
                getattr(self, word)(*arguments)
        except BaseException:
            if self.other is not None:
                self.other.close()
            raise

    def say_and_call(self, what: str, call: Callable[..., object], *args: Any) -> None:
        self.say(f"try {what}")
        call(*args)
        self.say(what)

    def push(self, name: str, how: Any = "buffer") -> None:
        put = functools.partial(self.q.push, key=self.key, if_in_flight=how)
        self.say_and_call(f"push {name}", put, name.encode())

    def schedule(self, name: str, time_us: str = "0") -> None:
        put = functools.partial(self.q.schedule, key=self.key)
        self.say_and_call(f"push {name}", put, name.encode(), float(time_us))

    def push_many(self, *names: str) -> None:
        self.q.push_many([name.encode() for name in names])
        for name in names:
            self.say(f"push {name}")

    def none(self) -> None:
        assert self.q.pop() is None

    def wait(self) -> None:
        assert self.q.pop(0.001) is None

    def take(self, what: str = "0") -> None:
        """Take a task. `what`: the key of the task, or the seconds to wait for any task."""
        task = self.q.take(what) if what == self.key else self.q.pop(float(what))
        assert task is not None
        self.say(f"got {task.id}")
        self.say(f"took {task.data.decode()}")
        self.held.append(task)

    def done(self) -> None:
        task = self.held.pop(0)
        self.say_and_call(f"done {task.data.decode()}", self.q.done, task)

    def fail(self, *reason: str) -> None:
        task = self.held.pop(0)
        self.failed = task
        error = ValueError(*reason) if reason else None
        self.say_and_call(f"fail {task.data.decode()}", self.q.fail, task, error)

    def retry(self) -> None:
        task = self.failed
        assert task is not None
        with contextlib.suppress(KeyInFlight):
            self.say_and_call(f"retry {task.data.decode()}", self.q.retry, task.id)

    def release(self, to: str = "") -> None:
        delay_s = 1e-6 if to == "later" else 0
        self.q.release(self.held.pop(0), front=to == "front", delay_s=delay_s)

    def extend(self) -> None:
        """Renew the lease. After Ctrl-C in the renewal, done() must still succeed."""
        try:
            self.q.extend(self.held[0])
        except KeyboardInterrupt:
            self.done()
            raise

    def save(self, progress: str) -> None:
        self.q.checkpoint(self.held[0], progress.encode())

    def process(self, progress: str) -> None:
        self.take()
        with self.q.processing(self.held.pop()) as task:
            assert task.checkpoint == progress.encode(), task.checkpoint
            self.say(f"try done {task.data.decode()}")
        self.say(f"done {task.data.decode()}")

    def close(self) -> None:
        self.held.clear()
        self.q.close()

    def look(self) -> None:
        """Call the methods that only look; also check() and purge(), which find nothing to do."""
        self.q.stats()
        for state in femtoqueue.STATES:
            list(self.q.tasks(state))
            list(self.q.tasks(state, data=False))
        self.q.peek(self.held[0].id)
        self.q.check(repair=True)
        self.q.purge(1e9)

    # Other workers, and persons

    def litter(self) -> None:
        """Put a torn task into pending/."""
        with open(
            os.path.join(self.q.data_dir, "pending", f"{1:020d}-0000000000000000"), "wb"
        ) as file:
            file.write(b"FQ1 00000000 9\ntorn")

    def mv(self) -> None:
        task = self.held.pop(0)
        source = os.path.join(self.q.data_dir, task.path)
        name = f"{task.id[:20]}~1~{task.id}"
        os.rename(source, os.path.join(self.q.data_dir, "pending", name))

    def turn(self) -> None:
        other = self.other or FemtoQueue(self.q.data_dir, "other")
        self.q, self.other = other, self.q

    def leave(self) -> None:
        assert self.other is not None
        self.other.close()
        self.held.clear()

    def die(self) -> None:
        assert self.other is not None
        simulate_death(self.other)
        # freed together with q: no hook sees its finalizer
        self.q.__dict__["dead"] = self.other
        self.other = None
        self.held.clear()


class Scenario:
    """A sequence of operations, in words of Life.

    Without a bar, all words are interrupted."""

    def __init__(self, words: str, key: str | None = None) -> None:
        self.__name__ = words
        self.key = key

    def __call__(self, q: FemtoQueue, say: Say, hook: Hook | None = None) -> None:
        """Do the operations. The hook is called for the operations after the bar."""
        life = Life(q, say, self.key)
        (*before, words) = self.__name__.split(" | ")
        for part in before:
            life.do(part)
        with (
            hooked(hook, after=type(hook) is Meanwhile)
            if hook
            else contextlib.nullcontext()
        ):
            life.do(words)


FINISHING = Scenario("push a, push b, take, extend, done, take, extend, done")
FAILING = Scenario(
    "push a, push b, take | take, fail why, fail, retry, take, fail again"
)
BATCH = Scenario("push_many a b c")
SCENARIOS = (
    FINISHING,
    FAILING,
    BATCH,
    Scenario("push a, push b, take | save 1, save 2, release front, process 2"),
    Scenario("schedule a, take, done"),
    Scenario(
        "push a, push b, take | release, take, release front, take, release later, take, done"
    ),
    Scenario("push a, push b | litter, take, done"),
    Scenario("push a, push b, take | close, take, done"),
    Scenario("wait, push a, push b, take 60, done"),
    Scenario("push a, push b, take, take | fail why, look, done"),
    Scenario(
        "push a, push b | turn, push c, take, done, take, turn, leave, take, done"
    ),
    Scenario("push a, push b | turn, take, take, turn, die, take, done"),
)
KEY_SCENARIOS = tuple(
    Scenario(words, "k")
    for words in (
        "push 1, push 2, schedule 3, push 4, take, done",
        "push 1 | take, push 2, push 3, extend, done, take, done",
        "push 1, take, push 2 | fail why, retry",
        "push 1 | take k, push 2, release front, push 3, take k, push 4, release later, take, done",
        "push 1, take, push 2 | schedule 3, done",
        "push 1 | schedule later 4e15, schedule later-still 4e15",
        "push 1, take, push 2 | mv, take, done",
        "push 1, take, push 2 | push 3 update, done, take, done",
        "push 1, take, schedule later 4e15 | mv, none",
        "push 1, take | push 2 update, release",
        "push 1, take | fail, retry",
        "push 1, take, push 2 | close, take, done",
        "push 1, turn, take, turn | push 2, die, take, done",
    )
)


def copy_tree(source: str, target: str) -> None:
    """Copy a directory without modes and dates, in a third of the time that shutil needs."""
    os.mkdir(target)
    for entry in os.scandir(source):
        path = os.path.join(target, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), path)
        elif entry.is_dir():
            copy_tree(entry.path, path)
        else:
            with open(entry.path, "rb") as file, open(path, "xb") as copy:
                copy.write(file.read())


def names_after(word: str, said: list[str]) -> list[str]:
    """Return the rest of each line that begins with this word: the name of a payload."""
    return [
        line.removeprefix(f"{word} ") for line in said if line.startswith(f"{word} ")
    ]


class Interrupted(QueueCase):
    """Each scenario is interrupted at each of its system calls in turn, or at a sample of them: by
    death, an error, Ctrl-C or another worker. Then a queue object goes on, and check() looks at
    what is left."""

    KILL_EVERY = 5  # a process is killed at every fifth call that changes something
    ERRORS = 4  # for each call, at most this many of its possible errors are tried
    # Whether a push is the first step after an interruption; with two values, each is tried.
    PUSHES: tuple[bool, ...] = (False,)
    # each with the settings of its queue
    scenarios: tuple[tuple[Scenario, dict[str, Any]], ...]
    # Whether an error or Ctrl-C comes at a call; None: at each call.
    counts: Callable[[str, tuple[Any, ...]], bool] | None = None

    def setUp(self) -> None:
        super().setUp()
        self.base = self.path
        self.serial = itertools.count()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(warnings.catch_warnings())
        # Ctrl-C at the start of a listing leaves the iterator of scandir() open.
        warnings.simplefilter("ignore", ResourceWarning)

    def sampled(self, every: int = 1) -> Iterator[int]:
        """Return the numbers of the calls to try: every SAMPLED-th of each `every`-th number. The
        seed chooses the first one."""
        return itertools.count(self.chance.randrange(every * SAMPLED), every * SAMPLED)

    def new_path(self, number: int) -> None:
        self.path = os.path.join(self.base, f"{next(self.serial)}-{number}")

    def new_life(
        self, number: int, settings: dict[str, Any]
    ) -> tuple[FemtoQueue, list[str]]:
        """Open a new queue. Return the queue object, and an empty list for the lines of a life."""
        self.new_path(number)
        return FemtoQueue(self.path, "n1", **settings), []

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """Fail unless the tasks in the queue agree with the lines that the life has said."""
        raise NotImplementedError

    def check_all(
        self,
        end: Callable[[Scenario, dict[str, Any]], Iterator[Ending]],
        **settings: Any,
    ) -> None:
        """Run each scenario with each ending that `end` yields. After each ending, call check()."""
        self.now = self.clock()
        for scenario, own in self.scenarios:
            for when, q, said in end(scenario, {**own, **settings}):
                with self.subTest(f"{scenario.__name__}, {own}: {when}"), q:
                    self.check(q, said)
                shutil.rmtree(self.path)

    def deaths(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """Yield the endings by death, before each system call.

        First, a real process is killed by SIGKILL at every fifth call that changes something. The
        seed chooses the first of these calls. Then the directory is copied before each call of
        another run. The copy has the files that a process leaves if it dies before that call, and
        no locks. Successive calls that change nothing share a copy."""

        def run(hook: Hook, say: Say) -> None:
            # If the scenario has no bar, the calls of the constructor are interrupted, too.
            is_whole = "|" not in scenario.__name__
            with hooked(hook) if is_whole else contextlib.nullcontext():
                q = FemtoQueue(self.path, "victim", **settings)
            scenario(q, say, hook)

        for death, lines in itertools.chain(self.kills(run), self.copies(run)):
            paths = [f"{self.path}{'+' * number}" for number in range(len(self.PUSHES))]
            for path in paths[1:] if os.path.exists(self.path) else ():
                copy_tree(self.path, path)
            for path, pushes in zip(paths, self.PUSHES, strict=True):
                self.path = path
                q = FemtoQueue(path, "survivor", **settings)
                said = [*lines]
                if pushes:
                    Life(q, said.append, scenario.key).push("after")
                yield f"{death}, pushes: {pushes}", q, said

    def kills(self, run: RunScenario) -> Iterator[tuple[str, list[str]]]:
        """Run a scenario in one process after another. Kill each process five changes later than
        the process before, until a process reaches its end. Yield the kind of death and the lines
        of each process."""
        for number in self.sampled(self.KILL_EVERY):
            self.new_path(number)
            step = Step(
                number, lambda: os.kill(os.getpid(), signal.SIGKILL), may_change
            )

            def work(child: Child, step: Step = step) -> None:
                run(step, child.say)

            said, status = self.child(work).finish()
            yield f"killed at change {number}", said
            if status == 0:
                self.assertGreater(number, 2)
                return
            self.assertEqual(status, -signal.SIGKILL)

    def copies(self, run: RunScenario) -> Iterator[tuple[str, list[str]]]:
        """Run a scenario, and copy the directory before each call and at the end. If neither the
        directory nor the lines have changed since the last copy, make no copy. After the run, yield
        the kind of death and the lines for each copy."""
        self.new_path(0)
        original = self.path
        said = list[str]()
        said_before: list[list[str]] = []
        changed = [True]  # since the last copy
        first = self.chance.randrange(SAMPLED)

        def copy(name: str, args: tuple[Any, ...]) -> None:
            if changed[0] or said != said_before[-1]:
                is_sampled = len(said_before) % SAMPLED == first
                if is_sampled and os.path.exists(original):
                    copy_tree(original, f"{original}.{len(said_before)}")
                said_before.append([*said])
            changed[0] = may_change(name, args)

        run(copy, said.append)
        copy("", ())
        self.assertGreater(len(said_before), 2)
        for number in range(first, len(said_before), SAMPLED):
            self.path = f"{original}.{number}"
            yield f"copied before change {number}", said_before[number]

    def failing_steps(self, turn: int) -> Iterator[Step]:
        """Yield a step for each call that has more than `turn` possible errors. The call fails with
        the error at this index.

        The first turns, one for each value of PUSHES, have a step for every call, so that each
        value is tried at each call. A call with too few errors fails with one of them again."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            is_counted = self.counts is None or self.counts(name, args)
            return is_counted and (
                turn < len(self.PUSHES) or turn < len(possible_errors(name, args))
            )

        for step in Step.each(
            counts=counts, at_least=1 - bool(turn), numbers=self.sampled()
        ):
            step.action = lambda step=step: raise_errno(self.errno_of(step, turn))  # type: ignore[misc]
            yield step

    def errno_of(self, step: Step, turn: int) -> int:
        """Return the errno with which the call of a step fails in this turn."""
        codes = possible_errors(step.at, step.args)
        return codes[turn % len(codes)]

    def errors(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """Yield the endings by an error of each call. The queue object that met the error goes on
        afterwards. An operation that raised must be undone; check() tests this for a push only. No
        file may be left in creating/, except after a failed unlink."""
        for turn in range(self.ERRORS):
            for step in self.failing_steps(turn):
                q, said = self.new_life(step.number, settings)
                self.run_with_error(scenario, q, said, step, turn)
                self.assertTrue(
                    step.at == "unlink" or not self.names("creating"), step.args
                )
                pushes = self.PUSHES[(step.number + turn) % len(self.PUSHES)]
                if pushes:
                    Life(q, said.append, scenario.key).push("after")
                self.now.advance(60)
                where = f"error {turn} of call {step.number} {step.at}"
                yield f"{where}, pushes: {pushes}", q, said

    def run_with_error(
        self, scenario: Scenario, q: FemtoQueue, said: list[str], step: Step, turn: int
    ) -> None:
        """Run the scenario with an error of a call. Fail if the error of a sync is not raised."""
        try:
            scenario(q, said.append, step)
            to_done = step.at in ("move", "open") and "/done" in str(step.args)
            self.is_refused = to_done and self.errno_of(step, turn) in REFUSED_BY_DONE
            # An error of a repair of keys is raised later, when no other task waits.
            is_keyed = scenario.key is not None
            self.assertTrue(is_keyed or step.at not in ("fsync", "syncfs"), step.args)
        except OSError as error:
            self.assertEqual(error.errno, self.errno_of(step, turn))
        except AssertionError:
            # Maintenance that this user may not do with a file is passed over, so that
            # pop() finds no task.
            if self.errno_of(step, turn) != errno.EACCES:
                raise
            said[-1:] = [it.replace("try push", "raised push") for it in said[-1:]]

    def unnoticed(
        self,
        steps: Callable[[], Iterator[Step]],
        scenario: Scenario,
        settings: dict[str, Any],
    ) -> Iterator[Ending]:
        """Run a scenario with each of the steps. Fail unless the tasks and lines of the scenario
        are the same as without a step. Yield the endings."""
        wanted: list[Any] = []
        for step in itertools.chain([Step(-1)], steps()):
            self.now.wall_shift_s = 0.0  # the times of files are by the real clock
            q, said = self.new_life(step.number, settings)
            scenario(q, said.append, step)
            tasks = itertools.chain(*map(q.tasks, femtoqueue.STATES))
            found: list[Any] = [
                (it.state, it.data, it.attempts, it.key, it.error) for it in tasks
            ]
            found += [it for it in said if not it.startswith("got ")]
            wanted = wanted or found
            self.assertEqual(found, wanted, step.args)
            self.now.advance(60)
            yield f"call {step.number} {step.at}", q, said

    def intruders(
        self, scenario: Scenario, settings: dict[str, Any]
    ) -> Iterator[Ending]:
        """Yield the endings where another worker takes and finishes the next task, after each call.

        In turn, the other worker comes half a second later, or so late that the leases have ended.
        It does not come while the key is locked."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            return sees_or_changes_names(name, args) and self.is_free("k")

        for step in Meanwhile.each(counts=counts, at_least=1, numbers=self.sampled()):
            q, said = self.new_life(step.number, settings)
            other = FemtoQueue(self.path, "intruder", **settings)
            finished = list[str]()
            self.assertIsNone(other.pop())
            late_s = (0.5, 31)[step.number % 2]
            step.action = functools.partial(
                self.finish_one, other, said, finished, late_s
            )
            with contextlib.suppress(AssertionError, LeaseLost):
                # the other worker took the task
                scenario(q, said.append, step)
            other.close()
            self.now.advance(60)
            yield f"{late_s} s after {step.number} {step.at}", q, said + finished

    def finish_one(
        self, q: FemtoQueue, said: list[str], finished: list[str], late_s: float
    ) -> None:
        # now pop() enqueues due tasks and reclaims ended leases
        self.now.advance(late_s)
        if (task := q.pop()) is not None:
            said.append(f"took {task.data.decode()}")
            q.done(task)
            finished.append(f"done {task.data.decode()}")

    def moved_by_hand(
        self, scenario: Scenario, settings: dict[str, Any]
    ) -> Iterator[Ending]:
        """Yield the endings where a person moves files to pending/, after each call.

        In turn, the person keeps the names of leases (`mv inflight-X/* pending/`), or gives each
        task its first name (`mv */*ID pending/ID`). One case is left out, because there is no
        defence: the person comes after the last look at a lease (lstat), and before a newer payload
        is renamed to the path of this lease."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            return sees_or_changes_names(name, args) and (
                name != "lstat" or "/inflight-" not in args[0]
            )

        for step in Meanwhile.each(counts=counts, at_least=1, numbers=self.sampled()):
            q, said = self.new_life(step.number, settings)
            step.action = functools.partial(
                self.move_by_hand, is_bare=step.number % 2 == 1
            )
            with contextlib.suppress(LeaseLost, AssertionError):
                scenario(q, said.append, step)
            q.close()
            self.now.advance(60)
            yield f"moved after {step.number} {step.at}", q, said

    def move_by_hand(self, is_bare: bool) -> None:
        """Move all tasks in flight or in pending/ to pending/; with `is_bare`, under their ids."""
        for directory in os.listdir(self.path):
            for name in (
                self.names(directory) if directory[:3] in ("inf", "pen") else ()
            ):
                target = self.file("pending", name[-37:] if is_bare else name)
                os.rename(self.file(directory, name), target)

    def ctrl_c(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """Yield the endings by Ctrl-C before each call, and after each call that took effect.

        Fail if a task is leased, or if its attempts count a delivery, though pop() did not return
        the task. Fail unless close() unlocks the lease directory although the frames of the
        exception still exist. Fail if a key is still locked after these frames are freed."""
        for kind, counts in (
            (Step, self.counts),
            (Meanwhile, self.counts or takes_effect),
        ):
            for step in kind.each(interrupt, counts, 1, self.sampled()):
                q, said = self.new_life(
                    step.number, {"timeout_stale_ms": None, **settings}
                )
                kept: BaseException | None = None
                try:
                    scenario(q, said.append, step)
                except KeyboardInterrupt as error:
                    kept = error
                self.check_deliveries(q, said, step)
                q.close()
                if os.path.exists(lease_dir(q)):
                    self.check_unlocked(lease_dir(q))
                del kept
                gc.collect(1)  # frees the frames of the exception
                self.assertTrue(self.is_free("k"), step.at)
                self.now.advance(1)
                yield f"Ctrl-C at {kind.__name__} {step.number} {step.at}", q, said

    def check_deliveries(self, q: FemtoQueue, said: list[str], step: Step) -> None:
        """Fail if a task that is not settled counts a delivery that pop() did not return."""
        listed = (q.tasks(state, data=False) for state in ("pending", "inflight"))
        for task in itertools.chain(*listed):
            got = said.count(f"got {task.id}")
            self.assertLessEqual(task.attempts or 0, got, step.at)


class PlainInterrupted(Interrupted):
    """Scenarios of tasks without a key."""

    scenarios = (
        *((scenario, {}) for scenario in SCENARIOS),
        (Scenario("push a, push b, take | done, take, done"), {"keep_done": False}),
        *((it, {"sync_after_write": True}) for it in (FINISHING, FAILING, BATCH)),
    )

    # whether done/ refused a task, so that done() removed the task
    is_refused = False

    def payloads(self, q: FemtoQueue, *states: Any) -> list[str]:
        return sorted(task.data.decode() for state in states for task in q.tasks(state))

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """Fail unless each operation that returned has its effect. Any other operation may have its
        whole effect, or none. Fail unless each task that is not finished is delivered once, and no
        finished task is delivered."""
        self.check_invariants(leftovers=True)
        last = {name: word for word, _, name in (line.rpartition(" ") for line in said)}
        waiting = self.payloads(q, "pending", "scheduled", "inflight")
        failed = self.payloads(q, "failed")
        is_kept = q.keep_done and not self.is_refused
        done = self.payloads(q, "done") if is_kept else names_after("done", said)
        present = waiting + failed + done
        self.assertEqual(len(present), len({*present}))
        where = {
            "push": waiting,
            "took": waiting,
            "retry": waiting,
            "done": done,
            "fail": failed,
        }
        for name, word in last.items():
            self.assertIn(name, where.get(word, [name]), said)
        self.assertEqual({*names_after("raised push", said)} & {*present}, set())
        drained = []
        while task := q.pop():
            drained.append(task.data.decode())
            q.done(task)
        self.assertEqual(sorted(drained), waiting)
        self.assertEqual(self.payloads(q, "inflight"), [])


class Crash(PlainInterrupted):
    """The death of a process at any system call loses and duplicates no task."""

    @FORK
    def test_sigkill_at_any_system_call_loses_and_duplicates_no_task(self) -> None:
        """A process that is killed at any system call loses no task, and duplicates none."""
        self.check_all(self.deaths)

    def test_leftovers_of_a_killed_push_are_removed_after_an_hour(self) -> None:
        # A younger file stays, because its push may be under way. Foreign files stay.
        q = self.queue()
        clock = self.clock()
        old = f"{time.time_ns():020d}-0000aaaa00000000"
        self.foreign = ("notes.txt", f"{1:020d}-0000bbbb00000000")
        self.put(old, b"torn", "creating")
        self.put(self.foreign[0], b"", "creating")
        # the second one is of a process that was killed while it replaced pending/
        for name in (self.foreign[1], f"{old}.pending"):
            os.mkdir(self.file("creating", name))
        q.pop()
        self.assertIn(old, self.names("creating"))
        clock.advance(3700)
        q.pop()
        self.assertEqual(self.names("creating"), sorted(self.foreign))

    def test_files_that_others_remove_during_check_are_no_findings(self) -> None:
        """check() reports no file that another process removes meanwhile: an old file in creating/,
        or a lease of another boot."""
        q = self.queue()
        ident = f"{10**18:020d}-{'0' * 16}"
        for name in (
            f"creating/{ident}",
            f"inflight-n2/{10**18:020d}~1~ffffffff~{ident}",
        ):
            path = self.file(name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb"):
                pass
            gone = at_call("lstat", path, functools.partial(os.unlink, path), times=1)
            with self.subTest(name), hooked(gone):
                self.assertEqual(q.check(repair=True), [])
            self.assertFalse(os.path.exists(path))


class Faults(PlainInterrupted):
    """Errors of system calls, and Ctrl-C, lose and duplicate no task."""

    def test_dead_letter_without_a_place_does_not_block_other_tasks(self) -> None:
        """While failed/ is missing, a corrupt task does not keep other tasks from delivery."""
        q = self.queue()
        self.put(f"{1:020d}-0000000000000000", b"rubbish")
        q.push(b"1")
        os.rmdir(self.file("failed"))
        found = []
        for _ in range(5):
            with contextlib.suppress(FileNotFoundError):
                found.append(q.pop())
        self.assertEqual([task.data for task in found if task], [b"1"])

    def test_exception_of_a_signal_handler_ends_a_push(self) -> None:
        """A TimeoutError that a signal handler raises during a push is raised by push()."""

        def alarm() -> None:
            raise TimeoutError("alarm")

        q = self.queue()
        with (
            self.assertRaisesRegex(TimeoutError, "alarm"),
            hooked(at_call("open", "/creating/", alarm, times=1)),
        ):
            q.push(b"x")
        self.assertEqual(self.states(), {})

    def test_dot_dot_after_a_symbolic_link_leads_where_the_kernel_leads(self) -> None:
        """The queue "link/../q" is made beside the target of the link, as mkdir(1) would do."""
        os.makedirs(self.file("far", "away"))
        os.symlink(self.file("far", "away"), self.file("link"))
        FemtoQueue(self.file("link", "..", "q"))
        self.assertTrue(os.path.isdir(self.file("far", "q", "pending")))
        environment = mock.patch.dict(
            os.environ, FEMTOQUEUE_DIR=self.file("link", "..", "q")
        )
        with environment, captured():
            self.assertEqual(femtoqueue.main(["ls"]), 0)

    def test_error_of_any_system_call_is_raised_and_loses_no_task(self) -> None:
        """If any system call fails, no task is lost or duplicated."""
        # An operation that raises the error is undone. An error of a sync is always raised.
        self.check_all(self.errors)

    def test_ctrl_c_at_any_system_call_loses_and_duplicates_no_task(self) -> None:
        """Ctrl-C at any system call loses no task, and duplicates none."""
        self.check_all(self.ctrl_c)

    def test_another_worker_after_any_system_call_loses_and_duplicates_no_task(
        self,
    ) -> None:
        self.check_all(self.intruders)

    def test_push_that_raises_leaves_no_task(self) -> None:
        """If push() raises because of a system call, also of the last sync, there is no task."""
        raised = 0
        for step in Step.each(errno_raiser(errno.EIO)):
            q = self.new_queue(sync_after_write=True)
            try:
                with hooked(step):
                    q.push(b"x")
            except OSError:
                raised += 1
                self.assertEqual(self.states(), {}, step.at)
        self.assertGreater(raised, 3)

    def test_constructor_works_after_another_one_failed_at_any_system_call(
        self,
    ) -> None:
        # A constructor whose statfs() fails raises an error: it does not assume a local file
        # system.
        for turn in range(self.ERRORS):
            for step in self.failing_steps(turn):
                self.new_path(step.number)
                with hooked(step), contextlib.suppress(OSError):
                    FemtoQueue(self.path, "n1", sync_after_write=True)
                    self.assertNotEqual(step.at, "statfs")
                ident = self.queue().push(b"x")
                self.assertEqual(popped(self.queue("n2")).id, ident, step.at)
                self.check_invariants(leftovers=step.at == "unlink")

    def test_error_of_statfs_is_raised(self) -> None:
        """If the type of the file system can't be read, a waiting pop() and register() raise the
        error."""
        q = self.queue()
        line = self.new_dir()
        for call in (lambda: q.pop(0.1), lambda: TicketQueue(line).register()):
            calls = at_call("fstatfs", None, errno_raiser(errno.ENOTCONN))
            with hooked(calls), self.assertRaises(OSError) as caught:
                call()
            self.assertEqual(caught.exception.errno, errno.ENOTCONN)

    def test_claim_that_failed_by_an_error_of_the_disk_is_not_counted(self) -> None:
        """If the rename of a claim raises an error though it took effect, the task goes to the
        back, and its delivery is not counted."""
        q = self.queue()
        ident, _ = q.push_many([b"1", b"2"])
        fails = at_call("move", f"pending/{ident}", errno_raiser(errno.EIO), times=1)
        with hooked(fails, after=True), self.assertRaises(OSError):
            q.pop()
        delivered = [(task.data, task.attempts) for task in iter(q.pop, None)]
        self.assertEqual(delivered, [(b"2", 1), (b"1", 1)])

    def test_task_whose_place_in_failed_is_a_directory_is_a_dead_letter(self) -> None:
        """If a directory has the name of a task in failed/, fail() gives the task another name
        there."""
        q = self.queue()
        task = leased(q)
        os.mkdir(self.file("failed", task.id))
        q.fail(task, "why")
        self.assertEqual([it.data for it in q.tasks("failed") if it.data], [b"x"])
        self.assertEqual(reason_of(q, task.id), "why\n")
        self.assertIsNone(q.pop())

    def test_task_that_can_not_be_read_waits_again_at_once(self) -> None:
        # After a lack of descriptors, or an exception of a signal handler, the task is the next
        # task again, and the delivery is not counted. A task whose file is not readable, or whose
        # payload does not fit into memory, goes to the back of the queue, and the delivery is
        # counted. When no other task waits, pop() raises the error again.
        for event, error, is_next, attempts in (
            ("open", OSError(errno.EMFILE, "no descriptors"), True, 1),
            ("open", OSError(errno.EACCES, "not ours"), False, 3),
            ("read", MemoryError(), False, 3),
            ("open", TimeoutError("raised by a signal handler"), True, 1),
        ):
            q = self.new_queue()
            other = self.queue("n2")
            ident = q.push_many([b"large" * 10_000, b"small"])[0]

            refuse = self.refusing(event, ident, error)
            with self.subTest(error=error), hooked(refuse):
                self.assertRaises(type(error), q.pop)
                self.assertEqual(self.states(), {"pending": 2})
                if not is_next:
                    self.assertEqual(self.pop(other).data, b"small")
                    self.assertRaises(type(error), other.pop)
            task = self.pop(other)
            self.assertEqual((task.id, task.attempts), (ident, attempts))

    def refusing(self, event: str, ident: str, error: BaseException) -> Hook:
        """Return a hook that raises an error at the open of a task, or at each large read."""

        def hook(name: str, args: tuple[Any, ...]) -> None:
            is_large = name == "read" and args[1] > 10_000
            if name == event and (is_large or str(args[0]).endswith(ident)):
                raise error

        return hook

    def test_exception_of_a_signal_handler_while_a_lock_is_closed_is_raised(
        self,
    ) -> None:
        """A TimeoutError that a signal handler raises is not taken for an error of close(). After
        an error of close() itself, the push succeeds: its work is done."""
        q = self.queue()
        for error in (
            TimeoutError("of a signal handler"),
            OSError(errno.EIO, "of the disk"),
        ):

            def fail(name: str, args: tuple[Any, ...], error: OSError = error) -> None:
                if name == "close" and "/locks/" in path_at(args[0], "."):
                    os.close(args[0])
                    raise error

            is_of_disk = error.errno is not None
            raises = (
                contextlib.nullcontext()
                if is_of_disk
                else self.assertRaises(TimeoutError)
            )
            with self.subTest(error), hooked(fail), raises:
                q.push(b"x", key="k")
        self.assertEqual(self.drain(q), [b"x"])

    def test_exception_of_a_signal_handler_during_maintenance_is_raised_at_once(
        self,
    ) -> None:
        """pop() raises a signal handler's TimeoutError at once, even if the interrupted part of the
        maintenance has met an error of the disk before."""
        ident = self.queue().push(b"x")
        for at in (("list", "scheduled"), ("open", "inflight-n3"), ("close", "")):
            rung = set[str]()

            def ring(name: str, args: Any, at: Any = at, rung: set[str] = rung) -> None:
                if name == "open" and str(args[0]).endswith("inflight-n2"):
                    raise_errno(errno.EIO)
                is_it = name == at[0] and str(args[0]).endswith(at[1])
                if is_it and not rung:
                    rung.add(name)
                    raise TimeoutError("raised by a signal handler")

            for name in ("inflight-n2", "inflight-n3"):
                os.makedirs(self.file(name), exist_ok=True)
            q = self.queue(at[0])
            with self.subTest(at), hooked(ring):
                self.assertRaisesRegex(TimeoutError, "signal handler", q.pop)
            task = self.pop(q)
            self.assertEqual((task.id, task.attempts), (ident, 1))
            q.release(task, counted=False)

    def test_claim_that_can_be_neither_read_nor_undone_is_put_back_later(self) -> None:
        # Here no descriptor is left, for the task or for the lock of its key, and the disk is full.
        q = self.queue(timeout_stale_ms=None, max_attempts=1)
        clock = self.clock()
        self.assertIsNone(q.pop())  # opens the lease directory, which stays open
        q.push(b"x", key="k")

        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and re.search("/locks/|/inflight-n1/", str(args[0])):
                raise_errno(errno.EMFILE)
            if name == "move" and "/pending/" in str(args[1]):
                raise_errno(errno.ENOSPC)

        with hooked(refuse):
            for _ in range(3):
                self.assertRaises(OSError, q.pop)
                clock.advance(1)
            self.assertEqual(self.states(), {"inflight-n1": 1})
        self.assertEqual(self.pop(q).attempts, 1)

    def test_maintenance_that_hung_once_runs_again_soon(self) -> None:
        # The pause is 20 times the duration of the run, but at most 20 seconds.
        longest_s = constant("longest pause")
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        self.set_constant("longest pause", longest_s)  # clock() has set it to 0
        with hooked(at_call("list", "scheduled", lambda: clock.advance(3600))):
            q.pop()
        self.queue("n2").schedule(b"x", 0)
        clock.advance(19)
        self.assertIsNone(q.pop())
        clock.advance(2)
        self.assertEqual(self.pop(q).data, b"x")

    def test_dead_letters_on_a_full_disk_do_not_block_other_tasks(self) -> None:
        """Other tasks are delivered even if a full disk refuses a dead letter or its reason."""
        # If there is no room for the reason of a dead letter, the task goes to failed/ without the
        # reason. If failed/ accepts no file at all, the task goes to the back of the queue.
        for refused in ("creating/", "failed/"):
            q = self.new_queue()
            self.put(q.push(b"corrupt"), b"rubbish")
            worn = q.push(b"worn out")
            os.rename(
                self.file("pending", worn), self.file("pending", f"{1:020d}~5~{worn}")
            )
            q.push(b"good")
            full = at_call("open move", refused, errno_raiser(errno.ENOSPC))
            got: list[FemtoTask | None] = []
            for number in range(4):
                worker = self.queue(f"w{number}", max_attempts=5)
                with hooked(full), contextlib.suppress(OSError):
                    got.append(worker.pop())
                worker.close()
            self.assertIn(b"good", [task and task.data for task in got])

    def test_corrupt_task_taken_away_during_its_quarantine_is_no_error(self) -> None:
        """If a person moves a corrupt task away while pop() moves it to failed/, pop() raises no
        error for the missing task."""
        # On a full disk, pop() raises the ENOSPC.
        q = self.queue()
        aside = self.file("aside")
        for code, ends in (
            (errno.ENOSPC, self.assertRaisesRegex(OSError, os.strerror(errno.ENOSPC))),
            (errno.ENOENT, contextlib.nullcontext()),
        ):
            ident = self.put(f"{1:020d}-0000000000000000", b"rubbish")[-37:]

            def take(code: int = code) -> None:
                for lease in self.names("inflight-n1"):
                    os.rename(self.file("inflight-n1", lease), aside)
                raise_errno(code)

            with hooked(at_call("move", f"/failed/{ident}", take)), ends:
                self.assertIsNone(q.pop())
            self.assertEqual((self.states(), os.path.exists(aside)), ({}, True))

    def test_queue_object_works_after_a_reboot_though_it_can_not_use_all_files(
        self,
    ) -> None:
        """After a reboot, a queue object works even if it can't write a clock file, or can't read
        the lease directory of another user."""
        # Meanwhile the object can look at tasks and purge them.
        q = self.queue()
        q.done(leased(q))
        ident = q.push(b"x")
        os.mkdir(self.file("inflight-others"))
        with on_boot("the next boot"):
            with hooked(at_call("open", ".clock", errno_raiser(errno.EROFS))):
                other = self.queue("n2")
                self.assertEqual((other.stats().done, other.purge(0)), (1, 1))
            self.clock().wall_shift_s = -1e8
            with hooked(at_call("list", "others", errno_raiser(errno.EACCES))):
                self.assertGreater(self.queue("n3").push(b"y"), ident)

    def test_new_queue_is_private_except_its_clock_file(self) -> None:
        for umask in (0o022, 0o077):
            self.addCleanup(os.umask, os.umask(umask))
            self.path = os.path.join(self.base, f"{umask}")
            self.queue()
            paths = ".", f"clock-{self.boot()}"
            modes = [stat.S_IMODE(os.stat(self.file(it)).st_mode) for it in paths]
            self.assertEqual(modes, [0o700, 0o644])

    def test_missing_directory_raises_until_it_is_back(self) -> None:
        # The directory is not made again, and no lease is lost. When the directory is back, the
        # same queue object and its lease work again. A directory that was moved is noticed at the
        # next look, a tenth of a second later.
        q = self.queue()
        clock = self.clock()
        task = leased(q, b"1")
        q.push(b"2", key="waits")
        calls: dict[str, Callable[[], object]] = {
            "done": lambda: q.done(task),
            "pending": lambda: q.push(b"3"),
            "scheduled": lambda: q.schedule(b"3", (clock.time() + 99) * 1e6),
        }
        for directory, call in calls.items():
            path = os.path.normpath(self.file(directory))
            away = f"{self.path}.away"
            os.rename(path, away)
            clock.advance(1)
            q.resume() if directory == "done" else None  # looks at the directories
            with self.subTest(directory):
                for _ in range(10):
                    self.check_is_missing(path, call)
                    clock.advance(0.5)
                self.assertFalse(os.path.exists(path))
            os.rename(away, path)
        q.extend(task)
        q.done(task)
        self.assertEqual((self.drain(q), self.names("creating")), ([b"2"], []))

    def check_is_missing(self, path: str, call: Callable[[], object]) -> None:
        with self.assertRaises(FileNotFoundError) as caught:
            call()
        self.assertIn(path, caught.exception.filename)

    def test_data_dir_that_was_moved_stays_the_queue_of_its_objects(self) -> None:
        q = self.queue()
        task = leased(q, b"1")
        moved = f"{self.path}.moved"
        self.addCleanup(shutil.rmtree, moved)
        os.rename(self.path, moved)
        with FemtoQueue(self.path) as other:
            q.done(task)
            ident = q.push(b"2")
            self.assertIsNone(other.pop())
        self.assertEqual(os.listdir(os.path.join(moved, "done")), [task.id])
        self.assertEqual(popped(q).id, ident)

    def test_files_are_made_and_removed_only_in_the_directory_that_was_opened(
        self,
    ) -> None:
        """A queue object makes and removes files only in the directory that it has opened, even if
        another queue is now at the path."""
        q = self.queue(keep_done=False)
        place = self.path
        task = leased(q, key="k")
        self.path = os.path.join(self.new_dir(self.memory), "moved")
        os.rename(place, self.path)
        self.addCleanup(shutil.rmtree, place, True)
        q.push(b"2", key="k")
        q.checkpoint(task, b"half")
        self.assertEqual(len(self.names("checkpoints")), 1)
        q.done(task)
        task = popped(q)
        q.fail(task, "why")
        q.pause()
        self.assertEqual(self.names("failed"), [task.id, f"{task.id}.error"])
        self.assertTrue(os.path.exists(self.file("PAUSED")))
        self.assertEqual(
            (self.states(), self.names("checkpoints")), ({"failed": 1}, [])
        )
        self.assertFalse(os.path.exists(place))

    def test_data_dir_that_was_removed_raises_until_it_is_made_again(self) -> None:
        """While data_dir is removed, each call raises FileNotFoundError; then all work again."""
        q = self.queue()
        clock = self.clock()
        watcher = self.queue("watcher")
        self.assertIsNone(q.pop())
        shutil.rmtree(self.path)
        for call in (
            lambda: q.push(b"1"),
            q.pop,
            q.stats,
            lambda: [*q.tasks("pending")],
        ):
            with self.assertRaises(FileNotFoundError) as caught:
                call()
            self.assertIn(self.path, caught.exception.filename)
        ident = FemtoQueue(self.path).push(b"2")
        self.assertEqual(watcher.stats().pending, 1)
        clock.advance(1)
        self.assertEqual(self.pop(q).id, ident)

    def test_constructor_raises_if_data_dir_is_a_file_or_a_dangling_link(self) -> None:
        occupied = self.put("occupied", b"", "")
        dangling = self.file("none")
        os.symlink("nowhere", dangling)
        for error, path in (
            (NotADirectoryError, occupied),
            (NotADirectoryError, os.path.join(occupied, "below")),
            (FileNotFoundError, dangling),
        ):
            self.assertRaises(error, FemtoQueue, path)


class KeyedInterrupted(Interrupted):
    """Scenarios of a task with a key. The payload that was pushed last is delivered last. If a push
    that replaces a waiting payload is interrupted, the old payload or the new one is delivered,
    never both."""

    ERRORS = 2
    # a push has to rely on the state file that the dead process has left
    PUSHES = (False, True)
    scenarios = tuple((scenario, {}) for scenario in KEY_SCENARIOS)

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """Fail unless the queue object `q` can pop all tasks, and the buffered payload, before the
        next repair of keys. Fail unless the lines allow the payload that is delivered last."""
        self.check_invariants(leftovers=True)
        states: tuple[Any, ...] = ("pending", "scheduled", "inflight")
        self.assertLessEqual(sum(len([*q.tasks(state)]) for state in states), 1)
        # A push that replaces a payload, and that was interrupted, may leave the task in keys/.
        self.assertLessEqual(q.stats().buffered, 2)
        delivered = self.delivered_by(q)
        self.assertTrue(
            names_after("try fail", said) or q.stats().failed == 0, "a second task"
        )
        taken, retried = names_after("took", said), names_after("retry", said)
        self.assertTrue(retried or taken == sorted(taken), said)
        [newest] = names_after("push", said)[-1:] or ["nothing"]
        tried = names_after("try push", said)[-1:]
        # If only the sync has failed, a push that replaces a payload raises, but is not undone.
        tried += names_after("raised push", said)[-1:]
        allowed = {newest, *tried, *retried}
        if newest in names_after("done", said):
            allowed = {"nothing", *tried, *retried} - {newest}
        elif said and said[-1] == f"try done {newest}":
            allowed.add("nothing")
        elif not delivered and q.retry_failed():
            delivered.append(popped(q).data.decode())
            q.close()
            q.done(popped(q))
        self.assertIn(delivered[-1] if delivered else "nothing", allowed, said)
        if os.path.exists(self.file("keys")):
            self.check_keys_are_repaired(q)

    def check_keys_are_repaired(self, q: FemtoQueue) -> None:
        """Fail unless a repair removes what an error has left."""
        self.now.advance(601)
        self.assertIsNone(q.pop())
        self.assertEqual(self.names("keys"), [])

    def delivered_by(self, q: FemtoQueue) -> list[str]:
        """Pop all tasks, then take those that are due later. Return the payloads."""
        delivered = []
        for _ in range(2):
            while task := q.pop():
                delivered.append(task.data.decode())
                q.done(task)
            self.now.advance(1)
        self.assertFalse([it for it in delivered if it.startswith("later")])
        for later in [*q.tasks("scheduled")]:
            task = self.take(q, id=later.id)
            delivered.append(task.data.decode())
            q.done(task)
        return delivered

    @FORK
    def test_sigkill_at_any_system_call_leaves_a_sound_queue(self) -> None:
        """After SIGKILL at any system call, a key has one task, and its last payload comes last."""
        self.check_all(self.deaths, sync_after_write=True)

    def test_error_of_any_system_call_leaves_a_sound_queue(self) -> None:
        """After an error of any call, a key has one task, and its last payload comes last."""
        self.check_all(self.errors, sync_after_write=True)

    def test_ctrl_c_at_any_system_call_leaves_a_sound_queue(self) -> None:
        """After Ctrl-C at any system call, a key has one task, and its last payload comes last."""
        self.check_all(self.ctrl_c)

    def test_another_worker_after_any_system_call_leaves_a_sound_queue(self) -> None:
        """If another worker takes the task after any system call, the key has no second task."""
        self.check_all(self.intruders)

    def test_person_who_moves_files_after_any_system_call_makes_no_second_task(
        self,
    ) -> None:
        self.check_all(self.moved_by_hand)


class InterruptedOnSharedFileSystem(PlainInterrupted):
    """Scenarios on a shared file system. Errors and Ctrl-C come only at calls that change
    something."""

    counts = staticmethod(may_change)
    fs_type = NFS

    @FORK
    def test_checkpoint_that_another_host_replaces_meanwhile_is_read_again(
        self,
    ) -> None:
        """If a file is not found because another host has replaced it, it is looked for again."""
        q = self.queue()
        q.checkpoint(task := leased(q), b"half")
        q.release(task)
        replaced = at_call(
            "open", f"/checkpoints/{task.id}", errno_raiser(errno.ENOENT), times=3
        )
        with hooked(replaced):
            self.assertEqual(popped(q).checkpoint, b"half")

    def test_sigkill_at_any_system_call_leaves_a_sound_queue(self) -> None:
        """A process that is killed at any system call loses no task, and duplicates none."""
        self.check_all(self.deaths)

    def test_error_of_any_system_call_leaves_a_sound_queue(self) -> None:
        """If any system call fails, no task is lost or duplicated."""
        # An operation that raises the error is undone. An error of a sync is always raised.
        self.check_all(self.errors)

    def test_file_that_another_host_has_replaced_is_looked_for_again(self) -> None:
        """If a look at a task's file fails because another host has replaced the file, the
        operation looks again, and has the same result as without that failure."""
        self.patched(on_file_system(FUSE))
        steps = functools.partial(StaleLook.each, counts=is_look_at_task, at_least=0)
        self.check_all(functools.partial(self.unnoticed, steps), sync_after_write=False)

    def test_rename_or_unlink_that_was_done_but_reported_as_failed_has_its_effect(
        self,
    ) -> None:
        """A rename or unlink that the server has carried out, but reports as failed (ENOENT), has
        the same result as one without an error."""
        steps = functools.partial(
            Meanwhile.each,
            errno_raiser(errno.ENOENT),
            lambda name, _: name in ("move", "unlink"),
            1,
        )
        for keep_done in (True, False):
            self.check_all(
                functools.partial(self.unnoticed, steps), keep_done=keep_done
            )


class KeyedInterruptedOnSharedFileSystem(
    KeyedInterrupted, InterruptedOnSharedFileSystem
):
    """The tests of KeyedInterrupted and InterruptedOnSharedFileSystem, for tasks with a key."""


# Random lives against a model in memory


def demand(holds: object, why: str) -> None:
    """Raise AssertionError with the reason, unless a condition holds."""
    if not holds:
        raise AssertionError(why)


@dataclasses.dataclass
class ModelTask:
    """A task in the model.

    `at_ns` is the number that begins the name of the file. In pending/ this is the order, in
    scheduled/ the due time, in inflight-<node>/ the deadline. In done/ and failed/ it is the order
    in the id.
    """

    id: str
    data: bytes = dataclasses.field(repr=False)
    key: str | None
    state: str  # one of STATES; "keys": a newer payload, buffered behind another task
    at_ns: int
    attempts: int = 0
    node: str = ""
    boot: int = 0
    held_by: FemtoTask | None = None
    behind: ModelTask | None = None
    due_ns: int | None = None  # of a newer payload in keys/
    # of a newer payload in keys/: it is dropped if the task ends
    is_update: bool = False
    step: int = 0  # the step of the last move; a step is one operation of Fuzz
    since_ns: int = 0  # the time of the last move
    by: int = 0  # the worker that moved the task last; 0: a person
    # The workers that know the task without a listing, because they moved it themselves.
    known_to: set[int] = dataclasses.field(default_factory=set)
    ready_ns: int | None = None  # since when any pop() should move it back to pending/
    is_bare: bool = True  # the name of its file is its id

    @property
    def as_task(self) -> FemtoTask:
        """Return the task as peek() and tasks() should return it."""
        ended = self.state in ("done", "failed") and self.is_bare
        attempts = None if ended else self.attempts
        return FemtoTask(self.id, self.data, attempts, self.key)

    @property
    def directory(self) -> str:
        return f"inflight-{self.node}" if self.state == "inflight" else self.state

    @property
    def order_ns(self) -> int:
        return int(self.id[:20])


# The place of a file: the directory, the number in front of the name, the attempts, and whether the
# whole name is an id.
Place = tuple[str, int, int, bool]


class QueueModel:
    """A queue in memory: the model, which says what the directory must hold after each operation.

    The maintenance by pop() (due tasks, ended leases, tasks delivered too often) may be late by
    0.4 s. So the model reads from the directory whether it has moved a task, and checks that the
    move was allowed.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tasks: dict[str, ModelTask] = {}
        self.reasons: set[str] = set()
        # by id: the payload, and its checkpoint
        self.saved: dict[str, tuple[bytes, bytes]] = {}
        # each name's first step in pending/
        self.entered: dict[tuple[int, int, str], int] = {}
        # how many living objects hold inflight-<node>/
        self.living: Counter[str] = Counter()
        self.step = self.worker = self.boot = self.looked_ns = 0
        self.known_to_nobody = False
        self.start_clock()

    def start_clock(self) -> None:
        newest_ns = max((task.order_ns for task in self.tasks.values()), default=0)
        self.anchor_ns = (
            max(self.clock.wall_ns(), newest_ns + 1) - self.clock.steady_ns()
        )
        self.looked_ns = self.now_ns()

    def now_ns(self) -> int:
        return self.clock.steady_ns() + self.anchor_ns

    def task_of_key(self, key: str | None) -> ModelTask | None:
        live = ("pending", "scheduled", "inflight")
        same = (
            task
            for task in self.tasks.values()
            if task.key == key and task.state in live
        )
        return None if key is None else next(same, None)

    def task_of_lease(self, lease: FemtoTask) -> ModelTask | None:
        task = self.tasks.get(lease.id)
        return (
            task
            if task and task.state == "inflight" and task.held_by is lease
            else None
        )

    def in_states(self, *states: str) -> list[ModelTask]:
        known = [task for task in self.tasks.values() if task.state in states]
        # An id sorts before every other name that begins with the same number.
        return sorted(
            known, key=lambda it: (it.at_ns, not it.is_bare, it.attempts, it.id)
        )

    # Moves

    def move(self, task: ModelTask, state: str, at_ns: int) -> None:
        task.state = state
        task.at_ns = at_ns
        task.held_by = None
        task.ready_ns = None
        task.step = self.step
        task.since_ns = self.now_ns()
        task.by = self.worker
        task.known_to = set() if self.known_to_nobody else {self.worker}
        if state in ("done", "failed"):
            task.attempts = 0
        task.is_bare = state in ("done", "failed")
        if state == "pending":
            self.entered.setdefault((at_ns, task.attempts, task.id), self.step)

    def add(self, ident: str, data: bytes, key: str | None, due_ns: int | None) -> None:
        demand(ident not in self.tasks, "an id was given twice")
        task = self.tasks[ident] = ModelTask(ident, data, key, "", 0)
        late_ns = task.order_ns - self.now_ns()
        demand(0 <= late_ns < 10_000, f"an id's order is {late_ns} ns from its push")
        self.enqueue(task, due_ns)

    def enqueue(self, task: ModelTask, due_ns: int | None) -> None:
        if due_ns is None:
            self.move(task, "pending", task.order_ns)
        else:
            self.move(task, "scheduled", due_ns)

    def replace(self, task: ModelTask, data: bytes, due_ns: int | None) -> None:
        """Replace the payload of a task that waits, as a push with its key does. The task keeps
        its place unless the push gives a due time."""
        if not task.is_bare:
            self.saved.pop(task.id, None)
        task.attempts = 0
        task.data = data
        self.drop_behind(task)
        if due_ns is not None:
            self.move(task, "scheduled", due_ns)
        else:
            self.entered.setdefault((task.at_ns, 0, task.id), self.step)
            task.known_to = task.known_to | {self.worker}

    def first_listed_step(self, task: ModelTask) -> int:
        """Return the first step whose listing of pending/ can have led a worker to this task.

        If a push replaces the payload of a task, the task keeps its place, and its attempts begin
        at 0 again. A worker that listed the earlier name, with attempts, also tries the new name.
        So for such a task the listing of any of its names counts.
        """
        is_new = task.key is not None and not task.attempts
        steps = [
            step
            for (at_ns, attempts, ident), step in self.entered.items()
            if (at_ns, ident) == (task.at_ns, task.id)
            and (is_new or attempts == task.attempts)
        ]
        return min(steps, default=0)

    def drop_behind(self, task: ModelTask) -> ModelTask | None:
        newer = task.behind
        task.behind = None
        if newer is not None:
            del self.tasks[newer.id]
        return newer

    def put_behind(
        self,
        task: ModelTask,
        ident: str,
        data: bytes,
        due_ns: int | None,
        is_update: bool = False,
    ) -> None:
        newer = task.behind
        if newer is None:
            newer = ModelTask(ident, data, task.key, "", 0)
            demand(ident not in self.tasks, "an id was given twice")
            self.tasks[ident] = task.behind = newer
        demand(newer.id == ident, "there are two payloads behind one task")
        newer.data = data
        newer.due_ns = due_ns
        newer.is_update = is_update
        self.move(newer, "keys", newer.order_ns if due_ns is None else due_ns)

    def lease(
        self, task: ModelTask, lease: FemtoTask, node: str, lasts_ns: int
    ) -> None:
        expected = FemtoTask(task.id, task.data, task.attempts + 1, task.key)
        demand(lease == expected, f"{lease} was delivered, not {expected}")
        if not task.is_bare:
            of_data, saved = self.saved.get(task.id, (b"", None))
            demand(
                lease.checkpoint == (saved if of_data == task.data else None),
                f"not {saved!r}",
            )
            if of_data != task.data:
                self.saved.pop(task.id, None)
        task.attempts += 1
        self.move(task, "inflight", self.now_ns() + lasts_ns)
        task.held_by = lease
        task.node = node
        task.boot = self.boot

    def end(self, task: ModelTask, state: str, reason: bool = False) -> None:
        newer = task.behind
        if newer is not None and newer.is_update:
            newer = self.drop_behind(task) and None
        task.behind = None
        self.move(task, state, task.order_ns)
        if state == "failed":
            (self.reasons.add if reason else self.reasons.discard)(task.id)
        if state == "gone":
            del self.tasks[task.id]
        if newer is not None:
            self.enqueue(newer, newer.due_ns)

    def move_back(self, task: ModelTask, state: str, at_ns: int) -> None:
        """Move a task to where it waits next, because it is released, reclaimed or due.

        A newer payload behind the task replaces its payload. If the newer one is due later, the
        task waits for that time. A payload of "update" leaves the attempts as they are.
        """
        newer = self.drop_behind(task)
        if newer is not None:
            self.saved.pop(task.id, None)
            task.data = newer.data
            if not newer.is_update:
                task.attempts = 0
                if newer.due_ns is not None:
                    state = "scheduled"
                    at_ns = newer.due_ns
        self.move(task, state, at_ns)

    def end_leases_of_node(self, node: str) -> None:
        """End all leases of a node if no object holds its lease directory: the last object has
        closed, or the first one is about to take the directory."""
        for task in self.in_states("inflight"):
            if task.node == node and not self.living[node]:
                self.move_back(task, "pending", task.order_ns)

    # Maintenance

    def is_over(self, task: ModelTask) -> bool:
        dead = task.boot == self.boot and not self.living[task.node]
        return dead or task.at_ns <= self.now_ns()

    def note_ready_times(self) -> None:
        """Note for each due task and each ended lease since when maintenance could move it."""
        now_ns = self.now_ns()
        before_ns = self.looked_ns
        for task in self.tasks.values():
            late_ns = -1
            if task.state == "scheduled":
                late_ns = self.clock.wall_ns() - task.at_ns
            elif task.state == "inflight":
                late_ns = max(now_ns - task.at_ns, 0 if self.is_over(task) else -1)
            if late_ns < 0:
                task.ready_ns = None
            elif task.ready_ns is None:
                task.ready_ns = max(before_ns, now_ns - late_ns)
        self.looked_ns = now_ns

    def do_maintenance(self, task: ModelTask, max_attempts: int | None) -> bool:
        """Do one step of maintenance with a task, as any pop() may. Return False if there was
        nothing to do."""
        if task.state == "scheduled" and task.at_ns <= self.clock.wall_ns():
            self.move_back(task, "pending", self.now_ns())
        elif task.state == "inflight" and self.is_over(task):
            self.move_back(task, "pending", task.order_ns)
        elif task.state == "pending" and max_attempts and task.attempts >= max_attempts:
            self.saved.pop(task.id, None)
            self.end(task, "failed", True)
        else:
            return False
        return True

    def catch_up(self, found: dict[str, Place], max_attempts: int | None) -> None:
        """Repeat in the model the maintenance by which the queue has moved tasks to their places
        in `found`."""
        woken: list[tuple[int, str]] = []
        for task in self.in_states("inflight", "pending", "scheduled"):
            due = task.state == "scheduled" and task.step < self.step
            if due and found.get(task.id, ("",))[0] == "pending":
                woken.append((found[task.id][1], task.id))
            while found.get(task.id, ("gone",))[0] != task.directory:
                if not self.do_maintenance(task, max_attempts):
                    break
        demand(
            woken == sorted(woken),
            "due tasks joined pending/ out of the order of due times",
        )

    def compare(self, found: dict[str, Place], reasons: set[str]) -> None:
        """Fail unless each task is where the model has it. If a task joined pending/ in this step,
        the model takes the exact order from the directory."""
        for task in self.tasks.values():
            there = found.get(task.id)
            placed_now = task.step == self.step and task.state == "pending"
            if placed_now and there is not None and 0 < there[1] - task.at_ns < 10_000:
                task.at_ns = there[1]
                self.entered.setdefault((task.at_ns, task.attempts, task.id), self.step)
            should = (task.directory, task.at_ns, task.attempts)
            if there is None or there[:3] != should:
                raise AssertionError(
                    f"{task.id} is {there} on disk, and should be {should}"
                )
            task.is_bare = there[3]
        demand(
            len(found) == len(self.tasks),
            f"unknown on disk: {found.keys() - self.tasks.keys()}",
        )
        demand(
            reasons == self.reasons,
            f"reasons of {reasons}, and should be of {self.reasons}",
        )

    def compare_checkpoints(self, found: set[str]) -> None:
        """Fail unless the checkpoints on disk are those of the model."""
        demand(
            found == self.saved.keys(),
            f"checkpoints of {found}, not of {[*self.saved]}",
        )


Pushed = tuple[str, bytes, "str | None", "int | None"]  # id, payload, key, due time


@dataclasses.dataclass
class Held:
    """A lease that was delivered and not yet settled. It may have been lost."""

    task: FemtoTask
    end_ns: int
    # extend() renews the lease for so long, whichever object calls extend()
    lasts_ns: int


@dataclasses.dataclass
class Worker:
    q: FemtoQueue
    number: int
    given_node: str | None
    lock_fd: int | None = None  # the descriptor whose lock holds its lease directory

    @property
    def lasts_ns(self) -> int:
        ms = self.q.timeout_stale_ms
        return FOREVER_NS if ms is None else int(ms * 1e6)

    @property
    def holds_lease_dir(self) -> bool:
        return self.lock_fd is not None


class Fuzz:
    """Random operations of several queue objects on one directory. After each operation, the
    directory and the returned value must be those of the model."""

    KEYS = ("a", "b", "größe %/\n", "k9", "k17")  # the last two have the same lock
    NODES = ("a", "b", "b", "c", None)

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.seed = seed
        self.chance = random.Random(seed)
        self.clock = Clock(2e9, 1000)
        self.model = QueueModel(self.clock)
        self.said: deque[str] = deque(maxlen=12)
        self.held: list[Held] = []
        # by id: the path of each task when it was last listed
        self.paths: dict[str, str] = {}
        self.paused_ns: int | None = None  # since when PAUSED exists
        self.date_set_ns = 0  # when the wall clock was last set
        # the last descriptor locked as a lease directory
        self.shared_fd: int | None = None
        self.while_running = contextlib.ExitStack()
        self.numbers = itertools.count(1)
        in_memory = path.startswith("/dev/shm/")
        self.settings: dict[str, Any] = {
            "timeout_stale_ms": self.chance.choice((30_000, 30_000, 700, None)),
            "max_attempts": self.chance.choice((None, None, 1, 3)),
            "sync_after_write": in_memory and self.chance.random() < 0.1,
        }
        self.ops = self.weighted_operations()

    def weighted_operations(self) -> list[Callable[[Worker], None]]:
        """Return each operation as often as it is to come up."""
        # fmt: off
        return [
            *[self.push] * 28 + [self.push_many] * 4 + [self.pop] * 48 + [self.take] * 12,
            *[self.settle] * 48 + [self.wait] * 16 + [self.retry] * 8,
            *[self.look_at_stats, self.look_at_tasks, self.look_at_one] * 4,
            *[self.close, self.reopen, self.kill, self.set_date, self.by_hand, self.pause] * 4,
            *[self.reboot, self.retry_failed, self.purge, self.purge],
        ]
        # fmt: on

    def run(self, steps: int) -> None:
        """Do `steps` random operations. Raise AssertionError, with the seed and the last
        operations, if the queue and the model differ."""
        with self.while_running:
            self.while_running.enter_context(
                mock.patch.object(femtoqueue, "time", self.clock)
            )
            self.while_running.enter_context(
                mock.patch("fcntl.flock", self.note_locks())
            )
            self.while_running.enter_context(on_boot("boot 0"))
            # By the faked clock, each file is years old.
            self.while_running.enter_context(with_constant("old checkpoint", 10**18))
            self.workers = [self.open(node) for node in self.NODES]
            try:
                for _ in range(steps):
                    w = self.chance.choice(self.workers)
                    self.do(self.chance.choice(self.ops), w)
                self.finish()
            except Exception as error:
                said = "\n  ".join(self.said)
                raise AssertionError(
                    f"seed {self.seed}: {error!r} after:\n  {said}"
                ) from error
            finally:
                for w in self.workers:
                    w.q.close()

    def note_locks(self) -> Callable[[int, int], None]:
        """Return an flock() that notes the descriptor of each shared lock. A worker takes a shared
        lock when it opens its lease directory."""
        flock = fcntl.flock

        def call(fd: int, how: int) -> None:
            flock(fd, how)
            if how == fcntl.LOCK_SH | fcntl.LOCK_NB:
                self.shared_fd = fd

        return call

    def do(self, op: Callable[[Worker], None], w: Worker) -> None:
        # orders drawn in a step are ahead of the clock by less than this
        self.clock.advance(1e-5)
        model = self.model
        model.step = model.step + 1
        model.worker = w.number
        model.known_to_nobody = False
        model.note_ready_times()
        self.said.append(f"{model.step} {op.__name__} by {w.number} ({w.q.node_id})")
        op(w)
        if op != self.wait:
            self.compare(w)

    def say(self, text: object) -> None:
        self.said[-1] += f": {text}"

    def open(self, node: str | None) -> Worker:
        settings = dict(self.settings)
        if self.chance.random() < 0.2:
            # objects of one queue may have different settings
            settings["timeout_stale_ms"] = self.chance.choice((30_000, 700, None))
            settings["max_attempts"] = self.chance.choice((None, 2))
        settings["keep_done"] = self.chance.random() < 0.7
        return Worker(FemtoQueue(self.path, node, **settings), next(self.numbers), node)

    def payload(self) -> bytes:
        size = self.chance.choice((0, 3, 3, 50, 5000))
        return b"%d\n" % next(self.numbers) + b"x" * size

    # The directory

    def on_disk(self) -> tuple[dict[str, Place], set[str]]:
        found: dict[str, Place] = {}
        reasons = set()
        for directory in os.listdir(self.path):
            if directory.startswith(("clock-", "PAUSED", "checkpoints")):
                continue
            for name in os.listdir(f"{self.path}/{directory}"):
                if name.endswith(".error"):
                    reasons.add(name[:-6])
                elif len(name) > 16:  # not the link of a key
                    ident = name[-37:]
                    parts = name.removeprefix("update~").split("~")
                    demand(ident not in found, "a task is in two places")
                    attempts = int(parts[1]) if len(parts) > 1 else 0
                    found[ident] = (
                        directory,
                        int(parts[0][:20]),
                        attempts,
                        "~" not in name,
                    )
                    self.paths[ident] = f"{self.path}/{directory}/{name}"
        return found, reasons

    def compare(self, w: Worker) -> None:
        found, reasons = self.on_disk()
        self.model.catch_up(found, w.q.max_attempts)
        self.model.compare(found, reasons)
        with contextlib.suppress(FileNotFoundError):
            self.model.compare_checkpoints({*os.listdir(f"{self.path}/checkpoints")})

    # Lease directories

    def note_lease_dir_taken(self, w: Worker) -> None:
        """If the last call of a worker took the lease directory, note this in the model. The worker
        has then moved back the leases that were left in the directory."""
        if self.shared_fd is None:
            return
        if not w.holds_lease_dir:
            self.model.end_leases_of_node(w.q.node_id)
            self.model.living[w.q.node_id] += 1
            found, _ = self.on_disk()
            # If leases were left in the directory, the worker also runs its reclaim job, which
            # takes back the ended leases of all nodes. Repeat in the model the moves that were
            # made.
            for task in self.model.in_states("inflight"):
                if self.model.is_over(task) and found[task.id][0] != task.directory:
                    self.model.do_maintenance(task, None)
        w.lock_fd = self.shared_fd
        self.shared_fd = None

    def note_lease_dir_left(self, w: Worker) -> None:
        if w.holds_lease_dir:
            w.lock_fd = None
            self.model.living[w.q.node_id] -= 1
            self.model.end_leases_of_node(w.q.node_id)

    def close(self, w: Worker) -> None:
        w.q.close()
        is_last = w.holds_lease_dir and self.model.living[w.q.node_id] == 1
        is_there = os.path.exists(f"{self.path}/inflight-{w.q.node_id}")
        demand(not is_last or not is_there, "close() left its directory")
        self.note_lease_dir_left(w)

    def reopen(self, w: Worker) -> None:
        new = self.open(self.chance.choice((w.q.node_id, w.given_node)))
        if self.chance.random() < 0.5:
            self.say("pickled")
            new.q = pickle.loads(pickle.dumps(w.q))
            names = *self.settings, "keep_done", "data_dir"
            is_same = all(getattr(new.q, it) == getattr(w.q, it) for it in names)
            demand(is_same, "a pickle lost a setting")
            is_same = new.q.node_id == w.q.node_id
            demand(
                is_same == (w.given_node is not None), f"its node is {new.q.node_id}"
            )
            new.given_node = w.given_node
        self.workers[self.workers.index(w)] = new
        self.note_lease_dir_left(w)
        w.q = new.q  # drops the last reference to the old object, which closes it

    def kill(self, w: Worker) -> None:
        if w.lock_fd is not None:
            nowhere = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nowhere, w.lock_fd, inheritable=False)
            os.close(nowhere)
            self.model.living[w.q.node_id] -= 1
        self.workers[self.workers.index(w)] = self.open(w.given_node)

    def reboot(self, w: Worker) -> None:
        for worker in [*self.workers]:
            self.kill(worker)
        self.clock.monotonic_shift_s = self.chance.uniform(0, 500)
        self.clock.wall_shift_s += self.chance.choice((60, 0, -86400))
        self.model.boot += 1
        self.while_running.enter_context(on_boot(f"boot {self.model.boot}"))
        self.model.start_clock()
        for task in self.model.tasks.values():
            task.ready_ns = None
        self.workers = [self.open(worker.given_node) for worker in self.workers]

    # Pushes

    def push(self, w: Worker) -> None:
        key = self.chance.choice((None, None, None, *self.KEYS))
        policy = self.chance.choice((*["buffer", "buffer", "update"] * 2, "reject"))
        due_us = due_ns = None
        if self.chance.random() < 0.3:
            due_us = (self.clock.time() + self.chance.choice((-1, 0, 0.2, 3, 40))) * 1e6
            due_ns = int(due_us * 1000)
        data = self.payload()
        refused = False
        self.say(f"{data[:8]!r} {key!r} {policy} {due_ns}")
        more: dict[str, Any] = (
            {} if key is None else {"key": key, "if_in_flight": policy}
        )
        try:
            ident = (
                w.q.push(data, **more)
                if due_us is None
                else w.q.schedule(data, due_us, **more)
            )
        except KeyInFlight as error:
            ident = error.id
            refused = error.key == key
        self.note_lease_dir_taken(w)
        self.model_push(
            self.model.task_of_key(key), (ident, data, key, due_ns), policy, refused
        )

    def model_push(
        self, task: ModelTask | None, new: Pushed, policy: str, refused: bool
    ) -> None:
        """Do in the model what a push did. `task` is the live task that the key had before."""
        ident, data, key, due_ns = new
        leased = task is not None and task.state == "inflight"
        demand(refused == (leased and policy == "reject"), f"refused: {refused}")
        if task is None:
            # A push with a key reports the task to the pusher's own batch (note_arrival). After a
            # push without a key, even the pusher needs a listing to know the task.
            self.model.known_to_nobody = key is None
            self.model.add(ident, data, key, due_ns)
        elif leased and not refused and not self.is_update(task, policy):
            self.model.put_behind(task, ident, data, due_ns)
        else:
            demand(ident == task.id, f"push returned {ident}, not {task.id}")
            if not leased:
                self.model.replace(task, data, due_ns)
            elif not refused:
                # The push does not return the id of the payload.
                (newer,) = {*self.on_disk()[0], *self.model.tasks} - {
                    *self.model.tasks
                } or {task.behind.id if task.behind else ""}
                self.model.put_behind(task, newer, data, None, is_update=True)

    def is_update(self, task: ModelTask, policy: str) -> bool:
        """Say whether a payload is put behind a leased task as one of "update". It is not if a
        payload behind the task would then be lost with the end of the task."""
        return policy == "update" and (task.behind is None or task.behind.is_update)

    def push_many(self, w: Worker) -> None:
        batch = [self.payload() for _ in range(self.chance.randrange(4))]
        ids = w.q.push_many(iter(batch))
        demand(ids == sorted(ids), "ids are not in the order of a batch")
        self.model.known_to_nobody = True
        for ident, data in zip(ids, batch, strict=True):
            self.model.add(ident, data, None, None)

    # Deliveries

    def pop(self, w: Worker) -> None:
        was = self.call_and_lease(w, w.q.pop)
        if was is not None:
            self.check_order(w, was)
        elif self.paused_ns is None:
            demand(
                not self.model.in_states("pending"), "pop() overlooked what is pending"
            )
            # The object notices a new date within 0.4 s.
            date_is_noticed = self.model.now_ns() - self.date_set_ns >= 0.41e9
            for task in self.model.in_states("scheduled") if date_is_noticed else ():
                due = task.by == w.number and task.at_ns <= self.clock.wall_ns()
                demand(
                    not due, f"pop() overlooked {task}, which the same object scheduled"
                )

    def call_and_lease(
        self, w: Worker, call: Callable[..., FemtoTask | None]
    ) -> ModelTask | None:
        """Call pop() or take(), sometimes with a lease_ms, and lease the delivered task in the
        model. Return the task as it was just before its lease; None if no task was
        delivered."""
        lease_ms = self.chance.choice((*[None] * 9, 90_000))
        lease = call(lease_ms=lease_ms)
        self.say(lease and lease.id)
        self.note_lease_dir_taken(w)
        was = None if lease is None else self.model_lease(w, lease, lease_ms)
        self.compare(w)
        self.check_maintenance(w)
        return was

    def model_lease(
        self, w: Worker, lease: FemtoTask, lease_ms: int | None
    ) -> ModelTask:
        task = self.model.tasks.get(lease.id)
        if task is None or task.state not in ("pending", "scheduled", "inflight"):
            raise AssertionError(f"{task} was delivered")
        while task.state != "pending" and self.model.do_maintenance(
            task, w.q.max_attempts
        ):
            pass
        demand(task.state == "pending", f"{task} was delivered")
        demand(task.attempts < (w.q.max_attempts or 10**9), "delivered too often")
        # the set `known_to` is shared, but move() makes a new one
        was = dataclasses.replace(task)
        lasts_ns = lease_ms * 1_000_000 if lease_ms else w.lasts_ns
        self.model.lease(task, lease, w.q.node_id, lasts_ns)
        self.check_fields(task, lease)
        self.held.append(Held(lease, task.at_ns, lasts_ns))
        return was

    def check_maintenance(self, w: Worker) -> None:
        """Fail if a task is overdue: each object looks for due tasks, ended leases and leases of
        dead workers 2.5 times a second."""
        for task in self.model.in_states("scheduled", "inflight"):
            ready_ns = self.model.now_ns() if task.ready_ns is None else task.ready_ns
            demand(
                self.model.now_ns() - ready_ns < 0.41e9, f"{task} was not brought back"
            )

    def check_order(self, w: Worker, was: ModelTask) -> None:
        """Fail if the delivered task (`was`) overtook an older one.

        An older task may still wait only if it came to pending/ after the listing from which the
        batch of the worker was made. The listing was made at most a second ago, and contains the
        delivered task, unless the worker put that task into pending/ itself.
        """
        model = self.model
        if self.paused_ns is not None:
            demand(
                model.now_ns() - self.paused_ns < 1.01e9,
                "a task was delivered while PAUSED existed",
            )
        listed = w.number not in was.known_to
        step = model.first_listed_step(was)
        for task in model.in_states("pending"):
            if task.at_ns >= was.at_ns:
                break
            known = listed and task.step <= step
            late = model.now_ns() - task.since_ns > 1.01e9
            demand(not known and not late, f"{was} was delivered before {task}")

    def take(self, w: Worker) -> None:
        key = self.chance.choice(self.KEYS)
        self.say(repr(key))
        was = self.call_and_lease(w, functools.partial(w.q.take, key))
        task = self.model.task_of_key(key)
        demand(was is None or was.key == key, "take() gave another key's task")
        demand(
            was is None or self.paused_ns is None,
            "a task was taken while PAUSED existed",
        )
        if was is None and task is not None and self.paused_ns is None:
            due = task.state == "scheduled" and task.at_ns <= self.clock.wall_ns()
            demand(task.state != "pending" and not due, f"take() overlooked {task}")

    def settle(self, w: Worker) -> None:
        """End a delivery, or renew its lease, through any of the objects. The call must raise
        LeaseLost if, and only if, the lease was lost."""
        if not self.held:
            return
        held = self.held[self.chance.randrange(-min(len(self.held), 8), 0)]
        renewals = (self.extend, self.checkpoint)
        way = self.chance.choice(
            (self.done, self.done, self.fail, self.release, *renewals)
        )
        self.say(f"{way.__name__} {held.task.id}")
        task = self.model.task_of_lease(held.task)
        try:
            way(w, held, task)
        except LeaseLost as error:
            demand(task is None, f"the lease of {task} was lost before its time")
            demand(
                error.expired == (held.end_ns <= self.model.now_ns()),
                f"expired: {error}",
            )
            if self.chance.random() < 0.7:
                self.held.remove(held)
        else:
            demand(task is not None, "a lease that was lost could be used")

    def done(self, w: Worker, held: Held, task: ModelTask | None) -> None:
        w.q.done(held.task)
        self.model_end(held, task, "done" if w.q.keep_done else "gone")

    def model_end(
        self, held: Held, task: ModelTask | None, state: str, reason: bool = False
    ) -> None:
        if held.task.checkpoint is not None:
            # its file is deleted with the end of the task
            self.model.saved.pop(held.task.id, None)
        if task is not None:
            self.model.end(task, state, reason)

    def fail(self, w: Worker, held: Held, task: ModelTask | None) -> None:
        reason = self.chance.choice((None, "why", ValueError("why")))
        w.q.fail(held.task, reason)
        self.model_end(held, task, "failed", reason is not None)

    def release(self, w: Worker, held: Held, task: ModelTask | None) -> None:
        front, delay_s = self.chance.choice(
            ((False, 0), (True, 0), (False, 0.1), (False, 9.5))
        )
        w.q.release(held.task, front=front, delay_s=delay_s)
        if task is not None and delay_s:
            due_ns = self.clock.wall_ns() + int(delay_s * 1e9)
            self.model.move_back(task, "scheduled", due_ns)
        elif task is not None:
            at_ns = task.order_ns if front else self.model.now_ns()
            self.model.move_back(task, "pending", at_ns)

    def extend(self, w: Worker, held: Held, task: ModelTask | None) -> None:
        ms = self.chance.choice((None, 1, 60_000))
        w.q.extend(held.task, ms)
        held.end_ns = self.model.now_ns() + (
            held.lasts_ns if ms is None else ms * 1_000_000
        )
        if task is not None:
            task.at_ns = held.end_ns
            task.ready_ns = None

    def checkpoint(self, w: Worker, held: Held, task: ModelTask | None) -> None:
        """Save a checkpoint. That also renews the lease, and never shortens it."""
        w.q.checkpoint(held.task, saved := self.payload())
        demand(held.task.checkpoint == saved, "a holder sees another checkpoint")
        held.end_ns = max(held.end_ns, self.model.now_ns() + held.lasts_ns)
        if task is not None:
            self.model.saved[task.id] = held.task.data, saved
            task.at_ns = held.end_ns
            task.ready_ns = None

    # Dead letters and maintenance

    def retry(self, w: Worker) -> None:
        failed = self.model.in_states("failed")
        ident = self.chance.choice(
            [task.id for task in failed] or ["0" * 20 + "-0000000000000000"]
        )
        task = self.model.tasks.get(ident)
        other = self.model.task_of_key(task.key) if task else None
        try:
            w.q.retry(ident)
        except TaskNotFound:
            demand(task is None, f"{task} was not found")
        except KeyInFlight as error:
            demand(other and error.id == other.id, f"{error}, but the key has {other}")
        else:
            demand(task and other is None, f"{task} retried; its key has {other}")
            self.model_retry(self.model.tasks[ident])

    def model_retry(self, task: ModelTask) -> None:
        task.attempts = 0
        self.model.reasons.discard(task.id)
        self.model.move(task, "pending", self.model.now_ns())

    def retry_failed(self, w: Worker) -> None:
        free = []
        for task in self.model.in_states("failed"):
            if self.model.task_of_key(task.key) is None:
                self.model_retry(task)
                free.append(task.id)
        demand(w.q.retry_failed() == len(free), "retry_failed() said another number")
        found, _ = self.on_disk()
        demand(
            [*free] == sorted(free, key=lambda ident: found[ident][1]), "out of order"
        )

    def purge(self, w: Worker) -> None:
        """Call purge() for some states, with an age that all of their tasks have reached, or none.

        purge() compares its clock with st_ctime, which the faked clock does not move. So every file
        is as old as the faked clock is ahead of the real one. purge() must not use st_mtime, the
        time of the push. To notice such a use, the test first sets each st_mtime to 1970, which is
        old enough for any age.
        """
        ahead_s = self.clock.time() - time.time()
        all_of_them = self.chance.random() < 0.7
        some: Any = ("done",), ("failed",), ("done", "failed"), "done"
        states = self.chance.choice(some)
        for task in self.model.in_states("done", "failed"):
            os.utime(self.paths[task.id], (1, 1))
        count = w.q.purge(max(0, ahead_s + (-1000 if all_of_them else 1000)), states)
        gone = self.model.in_states(*([states] if isinstance(states, str) else states))
        demand(
            count == (len(gone) if all_of_them else 0),
            f"purge() said {count} of {gone}",
        )
        if all_of_them:
            for task in gone:
                del self.model.tasks[task.id]
            if "failed" in states:
                self.model.reasons.clear()

    # Time, and people

    def wait(self, w: Worker) -> None:
        self.clock.advance(self.chance.choice((0.01, 0.01, 0.3, 1.1, 1.1, 5, 31, 700)))

    def set_date(self, w: Worker) -> None:
        """Set the wall clock forward or back. Only the due times in scheduled/ depend on the wall
        clock. Each object notices the change at its next maintenance."""
        self.clock.wall_shift_s += self.chance.choice((-4000, -0.5, 0.5, 4000))
        self.date_set_ns = self.model.now_ns()

    def pause(self, w: Worker) -> None:
        if self.paused_ns is None and self.chance.random() < 0.3:
            with open(f"{self.path}/PAUSED", "wb"):
                self.paused_ns = self.model.now_ns()
        elif self.paused_ns is not None:
            os.unlink(f"{self.path}/PAUSED")
            self.paused_ns = None

    def by_hand(self, w: Worker) -> None:
        """Move or remove the file of a task by hand, in a way that the README allows."""
        known = self.model.in_states("pending", "failed", "inflight")
        movable = [it for it in known if it.key is None or it.state == "pending"]
        if not movable:
            return
        task = self.chance.choice(movable)
        path = self.paths[task.id]
        name = task.id if task.state == "inflight" else os.path.basename(path)
        if task.state == "pending" and self.chance.random() < 0.5:
            os.unlink(path)
            del self.model.tasks[task.id]
            return
        state = "failed" if task.state == "pending" else "pending"
        self.say(f"mv {path} {state}/{name}")
        os.rename(path, f"{self.path}/{state}/{name}")
        attempts = task.attempts if "~" in name else 0
        self.model.worker = 0
        self.model.move(task, state, int(name[:20]))
        task.attempts = attempts
        self.model.entered.setdefault((task.at_ns, attempts, task.id), self.model.step)

    # Looking

    def look_at_stats(self, w: Worker) -> None:
        stats = w.q.stats()
        model = self.model
        states = ("pending", "scheduled", "inflight", "keys", "done", "failed")
        counts = [len(model.in_states(state)) for state in states]
        said = [stats.pending, stats.scheduled, stats.inflight, stats.buffered]
        said += [stats.done, stats.failed]
        demand(said == counts, f"{stats} where there are {counts}")
        age_s = self.oldest_age_s()
        demand(stats.oldest_pending_age_s == age_s, f"{stats}, not {age_s} s")
        for node in stats.nodes:
            expected = self.expected_stats(node.node)
            demand(node == expected, f"{node}, not {expected}")
        ended = sum(node.expired for node in stats.nodes)
        demand(stats.expired == ended, f"{stats.expired} have ended, not {ended}")

    def oldest_age_s(self) -> float | None:
        now_ns = self.model.now_ns()
        wall_ns = self.clock.wall_ns()
        ages_ns = [max(0, now_ns - it.at_ns) for it in self.model.in_states("pending")]
        late_ns = [wall_ns - it.at_ns for it in self.model.in_states("scheduled")]
        ages_ns += [it for it in late_ns if it >= 0]
        return max(ages_ns) / 1e9 if ages_ns else None

    def expected_stats(self, node: str) -> NodeStats:
        model = self.model
        leases = [it for it in model.in_states("inflight") if it.node == node]
        late = sum(task.at_ns <= model.now_ns() for task in leases)
        ours = any(task.boot == model.boot for task in leases)
        liveness = "dead" if ours else "unknown"
        liveness = "alive" if model.living[node] else liveness
        return NodeStats(node, len(leases), late, liveness)

    def look_at_tasks(self, w: Worker) -> None:
        for state in femtoqueue.STATES:
            known = sorted(self.model.in_states(state), key=lambda task: task.directory)
            expected = [task.as_task for task in known]
            found = [*w.q.tasks(state)]
            demand(found == expected, f"{state} has {found}, not {expected}")
            for task, seen in zip(known, found, strict=True):
                self.check_fields(task, seen)
            sizes = [task.size_bytes for task in w.q.tasks(state, data=False)]
            demand(sizes == [len(task.data) for task in expected], f"sizes are {sizes}")
            keys = [task.key for task in known if task.key is not None]
            demand([*w.q.keys(state)] == keys, f"keys({state}) are not {keys}")

    def check_fields(self, task: ModelTask, told: FemtoTask) -> None:
        """Fail unless `told` has the state, node and deadline or due time of the task, and a reason
        exactly if the task failed with one."""
        is_leased = task.state == "inflight"
        node = task.node if is_leased else None
        demand((told.state, told.node) == (task.state, node), f"{told.path} of {task}")
        until_ns = task.at_ns if is_leased or task.state == "scheduled" else 0
        if is_leased:
            # `until` is by the wall clock as it is now; at_ns is by the queue clock
            until_ns += self.clock.wall_ns() - self.model.now_ns()
        told_ns = told.until.timestamp() * 1e9 if told.until else 0
        demand(abs(told_ns - until_ns) < 2000, f"until {told.until}: {task}")
        has_reason = task.state == "failed" and task.id in self.model.reasons
        demand(
            (told.error is not None) == has_reason, f"failed for {told.error!r}: {task}"
        )

    def look_at_one(self, w: Worker) -> None:
        task = self.chance.choice([*self.model.tasks.values(), None])
        found = w.q.peek(task.id if task else "0" * 20 + "-0000000000000000")
        # In done/ and failed/, peek() finds a task only by the name that the queue gives.
        is_hidden = task and task.state in ("done", "failed") and not task.is_bare
        expected = None if is_hidden else task and task.as_task
        demand(found == expected, f"peek() gave {found}, not {expected}")
        key = self.chance.choice(self.KEYS)
        task = self.model.task_of_key(key)
        demand(w.q.contains(key) == (task is not None), f"contains({key}) of {task}")
        expected = task and task.as_task
        demand(w.q.peek(key=key) == expected, f"peek() did not give {expected}")

    def finish(self) -> None:
        """Close all objects and let time pass: then a single object must be given every live
        task."""
        for w in [*self.workers]:
            self.do(self.close, w)
        if self.paused_ns is not None:
            self.do(self.pause, w)
        self.clock.advance(100_000 - min(0, self.clock.wall_shift_s))
        for _ in range(2 * len(self.model.tasks) + 2):
            self.do(self.pop, w)
            if self.held:
                held = self.held[-1]
                self.held.clear()
                if task := self.model.task_of_lease(held.task):
                    self.done(w, held, task)
        live = self.model.in_states("pending", "scheduled", "inflight")
        # A lease without a deadline, from an earlier boot, ends only when an object opens under the
        # node_id of the lease.
        left = [
            task
            for task in live
            if task.state != "inflight" or self.model.is_over(task)
        ]
        demand(not left, f"never delivered: {left}")
        self.look_at_tasks(w)


class Model(QueueCase):
    def test_random_operations_of_several_objects_agree_with_a_model(self) -> None:
        # The model covers order, attempts, keys, leases, due times and dead letters. Meanwhile the
        # clock is set, objects die and are opened again, and people move files. Afterwards no
        # descriptor is left open.
        before = os.listdir("/dev/fd")
        for seed in range(16):
            Fuzz(self.new_dir(self.memory), seed).run(300)
        gc.collect()
        self.assertEqual(os.listdir("/dev/fd"), before)


# Damaged and foreign files


class Corruption(QueueCase):
    """A damaged task becomes a dead letter, and the other tasks are delivered."""

    WHOLE = b"FQ1 352441c2 3\nabc"
    LARGE = record(b"x" * 100_000)
    DAMAGED = (
        (b"", "no FQ1 header"),
        (b"FQ1 352441c2 3", "no FQ1 header"),
        (b"\0" * 5000, "no FQ1 header"),
        (b"hello\n", "no FQ1 header"),
        (WHOLE[:-1], "2 bytes, where the header says 3"),
        (WHOLE + b"d", "4 bytes, where the header says 3"),
        (WHOLE[:-1] + b"d", "wrong checksum"),
        (
            b"FQ1 352441c2 " + b"9" * 19 + b"\nabc",
            "3 bytes, where the header says 9999",
        ),
        (b"FQ1 352441c2 " + b"9" * 30 + b"\nabc", "no FQ1 header"),
        (b"FQ1 352441C2 3\nabc", "no FQ1 header"),
        (b"FQ2 352441c2 3\nabc", "no FQ1 header"),
        (LARGE[:50_000], "bytes, where the header says 100000"),
        (LARGE[:-1] + b"y", "wrong checksum over 100000 bytes"),
    )

    def test_task_whose_key_is_misquoted_or_of_another_id_is_a_dead_letter(
        self,
    ) -> None:
        """A task becomes a dead letter if its key is not quoted as push() does, or does not match
        its id."""
        q = self.queue()
        for number, key in enumerate(("%ff", "%61", "a,b", "%")):
            self.put(f"{number:020d}-{key_tag(key)}", record(b"x", key.encode()))
        self.put(f"{4:020d}-8000000000000000", record(b"x", b"other"))
        q.push(b"good")
        self.assertEqual(self.drain(q), [b"good"])
        self.assertEqual(self.states(), {"failed": 5, "done": 1})

    def test_payload_is_whole_when_reads_and_writes_are_partial(self) -> None:
        # With FUSE, each call may transfer only a part of the bytes.
        q = self.queue()
        read = os.read
        write = os.write
        sizes = (50, 1), (50, 40), (20_000, 7), (20_000, 16_000)
        for (size, most), key in itertools.product(sizes, (None, "k")):

            def short(fd: int, data: bytes, most: int = most) -> int:
                return write(fd, data[:most])

            with mock.patch.object(os, "write", short):
                q.push(b"y" * size, key=key)
            with mock.patch.object(
                os, "read", lambda fd, size: read(fd, min(size, 512))
            ):
                self.assertEqual(self.drain(q), [b"y" * size])

    def test_damaged_files_are_quarantined_with_their_reason_and_pop_continues(
        self,
    ) -> None:
        """Each damaged file moves to failed/ unchanged, its reason is written and logged as an
        error, and the same pop() delivers the next task."""
        LOG.disabled = False
        q = self.queue()
        idents = [
            f"{number:020d}-0000aaaa00000000" for number in range(len(self.DAMAGED))
        ]
        for ident, (content, _) in zip(idents, self.DAMAGED, strict=True):
            self.put(ident, content)
        q.push(b"good")
        with self.assertLogs("femtoqueue", "ERROR") as logs:
            self.assertEqual(self.drain(q), [b"good"])
        self.assertEqual(len(logs.output), len(idents))
        for ident, (content, reason), line in zip(
            idents, self.DAMAGED, logs.output, strict=True
        ):
            with (
                self.subTest(content[:40]),
                open(self.file("failed", ident), "rb") as file,
            ):
                self.assertEqual(file.read(), content)
                self.assertIn(reason, reason_of(q, ident))
                self.assertIn(reason, line)

    def test_tasks_leaves_out_a_damaged_file_and_says_so(self) -> None:
        LOG.disabled = False
        q = self.queue()
        self.put(f"{1:020d}-0000aaaa00000000", b"torn")
        q.push(b"good")
        with self.assertLogs("femtoqueue", "WARNING") as logs:
            self.assertEqual([task.data for task in q.tasks("pending")], [b"good"])
        self.assertRegex(
            logs.output[0], "left out: task 0+1-0000aaaa00000000 is corrupt: "
        )


class TroubleOfOneTask(QueueCase):
    """A task that a worker can't read, or may not move, does not stop the other tasks."""

    def with_unreadable(self, *idents: str) -> Any:
        """Let open() fail with EACCES for the files of these tasks, while the block runs."""

        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and str(args[0]).endswith(idents):
                raise_errno(errno.EACCES)

        return hooked(refuse)

    def test_pop_raises_for_an_unreadable_task_and_the_next_pop_takes_the_next(
        self,
    ) -> None:
        q, other = self.queue(), self.queue("n2")
        bad, *_ = q.push_many([b"bad", b"good", b"better"])
        with self.with_unreadable(bad):
            with self.assertRaises(PermissionError) as caught:
                q.pop()
            self.assertEqual(getattr(caught.exception, "task_id", None), bad)
            self.assertEqual(self.pop(q).data, b"good")
            self.assertEqual(self.pop(other).data, b"better")
        task = self.pop(other)
        self.assertEqual((task.id, task.attempts), (bad, 2))

    def test_task_that_stays_unreadable_goes_to_the_back_counted_each_time(
        self,
    ) -> None:
        """Each pop() that meets an unreadable task raises, and counts an attempt. Other tasks go
        first."""
        q = self.queue(max_attempts=3)
        bad = q.push(b"bad")
        with self.with_unreadable(bad):
            for number in range(3):
                q.push(b"%d" % number)
                with self.assertRaises(PermissionError):
                    q.pop()
                self.assertEqual(self.pop(q).data, b"%d" % number)
                (name,) = self.names("pending")
                self.assertEqual(name.split("~")[1:], [f"{number + 1}", bad])
            self.assertIsNone(q.pop())
        self.assertEqual([task.id for task in q.tasks("failed")], [bad])

    def test_file_beside_the_payload_does_not_stop_other_tasks(self) -> None:
        """If the checkpoint of a task can't be read, the lock of its key can't be opened, or no
        dead letter can be made of it, the task goes to the back."""
        for event, of, error in (
            ("open", "/checkpoints/", MemoryError()),
            ("open", "/checkpoints/", OSError(errno.ENXIO, "a socket")),
            ("open", "/locks/", OSError(errno.ENXIO, "a socket")),
            ("move", "/failed/", OSError(errno.EISDIR, "a directory")),
        ):
            q = self.new_queue(max_attempts=1 if of == "/failed/" else None)
            task = leased(q, b"1", "k")
            q.checkpoint(task, b"half")
            q.release(task, front=True)
            os.unlink(self.file("keys", key_tag("k")))  # so the delivery needs the lock
            q.push(b"good")
            fail = mock.Mock(side_effect=error)
            with self.subTest(of, error=error), hooked(at_call(event, of, fail)):
                with self.assertRaises(type(error)) as caught:
                    q.pop()
                self.assertEqual(getattr(caught.exception, "task_id", None), task.id)
                self.assertEqual(popped(q).data, b"good")

    def test_link_in_the_place_of_a_directory_costs_no_task_its_attempts(self) -> None:
        """If keys/ is a link, pop() raises an error that names no task, and no attempt counts. If
        checkpoints/ is one, the task is delivered without its checkpoint."""
        for name in ("keys", "checkpoints"):
            q = self.new_queue(max_attempts=3)
            task = leased(q, b"1", "k")
            q.checkpoint(task, b"half")
            q.release(task)
            shutil.rmtree(self.file(name))
            os.symlink("elsewhere", self.file(name))
            self.clock().advance(1)
            if name == "keys":
                for _ in range(4):
                    with self.assertRaises(NotADirectoryError) as caught:
                        q.pop()
                    self.assertFalse(hasattr(caught.exception, "task_id"))
                self.assertEqual(len(os.listdir(self.file("pending"))), 1)
            else:
                task = popped(q)
                self.assertEqual((task.attempts, task.checkpoint), (2, None))

    def test_task_that_was_given_back_is_not_renewed(self) -> None:
        """If a task is given back while its key is locked, it is not renewed until a reclaim takes
        it back."""
        q = self.queue()
        task = leased(q, b"1", "k")
        with self.locked("k"):
            q.close()
            self.assertEqual(self.states(), {"inflight-n1": 1})
        with self.assertRaises(LeaseLost):
            q.extend(task)
        self.clock().advance(1)
        self.assertEqual(self.pop(q).data, b"1")

    def test_payload_that_does_not_fit_into_memory_is_a_dead_letter_after_max_attempts(
        self,
    ) -> None:
        q = self.queue(max_attempts=2)
        bad, _ = q.push_many([b"bad", b"good"])
        memory_out = mock.Mock(side_effect=MemoryError)
        with hooked(at_call("open", bad, memory_out)):
            self.assertRaises(MemoryError, q.pop)
            self.assertEqual(self.pop(q).data, b"good")
            self.assertRaises(MemoryError, q.pop)
            self.assertIsNone(q.pop())
        (dead,) = q.tasks("failed")
        self.assertEqual(
            (dead.id, "max_attempts reached" in str(dead.error)), (bad, True)
        )

    def test_push_replaces_the_payload_of_a_keyed_task_that_could_not_be_read(
        self,
    ) -> None:
        """The unreadable task waits again. So the push finds it, and adds no second task."""
        q, other = self.queue(), self.queue("n2")
        bad = q.push(b"bad", key="k")
        with self.with_unreadable(bad):
            self.assertRaises(PermissionError, q.pop)
        self.assertEqual(q.push(b"newer", key="k"), bad)
        task = self.pop(other)
        self.assertEqual((task.id, task.data), (bad, b"newer"))

    def test_work_logs_an_unreadable_task_and_goes_on(self) -> None:
        for concurrency in (1, 2):
            q = self.new_queue(max_attempts=3)
            handled = list[bytes]()
            bad, *_ = q.push_many([b"bad", b"0", b"1", b"2"])
            with self.subTest(concurrency), self.with_unreadable(bad):
                counts = q.work(
                    lambda task, to=handled: to.append(task.data),  # type: ignore[misc]
                    drain=True,
                    concurrency=concurrency,
                )
            self.assertEqual((sorted(handled), counts.done), ([b"0", b"1", b"2"], 3))
            (dead,) = q.tasks("failed")
            self.assertEqual(dead.id, bad)

    def test_work_raises_when_every_task_is_unreadable_for_too_long(self) -> None:
        q = self.queue()
        idents = q.push_many([b"bad"] * 3)
        with (
            with_constant("trouble", -1.0),
            self.with_unreadable(*idents),
            self.assertRaises(PermissionError),
        ):
            q.work(lambda task: None, drain=True)

    def test_work_pauses_after_a_task_that_it_passes_over(self) -> None:
        """Without a pause, the errors of an only task would fill the log."""
        self.set_constant("base interval", 0.0625)
        q = self.queue(max_attempts=3)
        clock = self.clock()
        ident = q.push(b"bad")
        with self.with_unreadable(ident), mock.patch.object(clock, "sleep") as sleep:
            q.work(lambda _: None, drain=True)
        self.assertEqual(sleep.mock_calls.count(mock.call(0.0625)), 3)

    def test_locked_task_goes_to_the_back_uncounted(self) -> None:
        # The lock is of the key, or another program has a lease of the kernel on the file.
        self.set_constant("base interval", 0.02)
        for key in ("k", None):
            q = self.new_queue(max_attempts=1)
            held = contextlib.ExitStack()
            ident = q.push(b"1", key=key)
            q.push(b"2")
            if key:
                # so the delivery needs the lock
                os.unlink(self.file("keys", key_tag(key)))
                held.enter_context(self.locked(key))
            else:
                held.enter_context(mock.patch.object(self.clock(), "sleep"))
                held.enter_context(
                    hooked(at_call("open", ident, errno_raiser(errno.EAGAIN)))
                )
            with self.subTest(key), held:
                with self.assertRaises(BlockingIOError) as caught:
                    q.pop()
                self.assertEqual(getattr(caught.exception, "task_id", None), ident)
                self.assertEqual(popped(q).data, b"2")
            task = self.pop(q)
            self.assertEqual((task.id, task.attempts), (ident, 1))

    def test_file_is_opened_when_a_lease_of_the_kernel_ends(self) -> None:
        """While another program has a lease of the kernel on a file, such as the lock of a key, the
        call tries again."""
        q = self.queue()
        clock = self.clock()
        ident = q.push(b"x", key="k")
        for of in (ident, "/locks/"):
            refused = hooked(at_call("open", of, errno_raiser(errno.EAGAIN), times=3))
            with refused, mock.patch.object(clock, "sleep"):
                q.push(b"y", key="k")
                task = popped(q)
                self.assertEqual(task.attempts, 1)
                q.release(task)

    def test_task_that_may_not_be_renamed_is_passed_over_for_a_minute(self) -> None:
        """A task that the kernel protects from this user is logged once. It is no trouble of the
        worker: work() goes on, however long nothing else comes, and drain() ends."""
        # The task belongs to another user, and pending/ has the sticky bit; or it is immutable.
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        bad, *_ = q.push_many([b"bad", b"good", b"better"])
        LOG.disabled = False
        refuse = mock.Mock(side_effect=errno_raiser(errno.EPERM))
        refused = hooked(at_call("move", f"/pending/{bad}", refuse))
        with refused, self.assertLogs(LOG, "WARNING") as logged:
            q.done(self.pop(q))
            clock.advance(59)
            self.assertEqual((task := self.pop(q)).data, b"better")
            q.done(task)
            self.assertEqual((q.pop(), refuse.call_count), (None, 1))
            clock.advance(2)
            self.assertEqual((q.pop(), refuse.call_count), (None, 2))
            self.assertRaises(PermissionError, q.take, id=bad)
            self.assertTrue(q.join(0))
            self.assertEqual([*q.drain()], [])
            clock.advance(61)
            with with_constant("trouble", -1.0):
                q.work(lambda _: None, drain=True)
        self.assertEqual(len(logged.output), 1)
        self.assertIn(bad, logged.output[0])
        clock.advance(61)
        task = self.pop(q)
        self.assertEqual((task.id, task.attempts), (bad, 1))
        self.assertFalse(q.join(0))

    def test_task_that_was_passed_over_and_is_leased_counts_as_work(self) -> None:
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        bad = q.push(b"bad")
        with hooked(at_call("move", f"/pending/{bad}", errno_raiser(errno.EPERM))):
            self.assertIsNone(q.pop())
            self.assertTrue(q.join(0))
        task = self.queue("n2").pop()
        assert task is not None
        self.assertEqual(task.id, bad)
        self.assertFalse(q.join(0))

    def test_tasks_that_are_passed_over_hide_no_task_behind_them(self) -> None:
        q = self.queue()
        clock = self.clock()
        clock.stand_still()
        bad = set(q.push_many([b"bad"] * 5))
        q.push(b"good")

        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "move" and os.path.basename(args[0]) in bad:
                raise_errno(errno.EPERM)

        with with_constant("most in a batch", 3), hooked(refuse):
            self.assertEqual(self.pop(q).data, b"good")

    def test_directory_that_this_user_may_not_write_to_is_trouble_with_the_disk(
        self,
    ) -> None:
        """If no task can be claimed because the directory can't be written to, that is no reason
        to find the queue empty."""
        for code in (errno.EACCES, errno.EPERM):
            q = self.new_queue()
            q.push_many([b"1", b"2", b"3"])
            q.done(self.pop(q))
            with (
                hooked(at_call("move", "/pending/", errno_raiser(code))),
                mock.patch.object(os, "access", return_value=False),
            ):
                self.assertRaises(PermissionError, q.pop)
                self.assertRaises(PermissionError, q.pop)
                self.assertFalse(q.join(0))

    def test_claim_that_is_refused_for_one_task_raises_once_a_minute(self) -> None:
        """On EACCES although this user may write to the directory, as on Windows for a file that
        another program has open, pop() raises, and does not try that task for a minute."""
        q = self.queue()
        clock = self.clock()
        bad, *_ = q.push_many([b"bad", b"good"])
        with hooked(at_call("move", bad, errno_raiser(errno.EACCES))):
            with self.assertRaises(PermissionError) as caught:
                q.pop()
            self.assertEqual(getattr(caught.exception, "task_id", None), bad)
            q.done(self.pop(q))
            clock.advance(59)
            self.assertIsNone(q.pop())
            clock.advance(2)
            self.assertRaises(PermissionError, q.pop)
            self.assertIsNone(q.pop())


class ForeignFiles(QueueCase):
    """Files whose names are not the queue's are left alone."""

    NAMES = (
        ".DS_Store",
        "README",
        "0" * 20,
        "0" * 20 + "-0000aaaa00000000.swp",
        "0" * 20 + "-0000AAAA",
        *("0" * 20 + "-0000aaaa0000000g", "0" * 20 + "-0000AAAA00000000"),
        "9" * 20 + "-0000aaaa00000000",
        "0" * 20 + "~1~" + "0" * 20 + "-xxxxxxxx",
        "0" * 20 + "~1234567~" + "0" * 20 + "-0000aaaa00000000",
        *(
            "0" * 19 + "-0000aaaa00000000",
            "0" * 19 + "~1~" + "0" * 20 + "-0000aaaa00000000",
        ),
        *(
            "0" * 21 + "-0000aaaa00000000",
            "0" * 21 + "~1~" + "0" * 20 + "-0000aaaa00000000",
        ),
        "\u0660" * 20 + "-0000aaaa00000000",  # digits of another alphabet
        "zzz",
        "-rf",
        "new\nline",
    )

    def test_lease_directory_that_is_a_link_is_left_alone(self) -> None:
        outside = self.new_dir(self.memory)
        name = f"{1:020d}~1~00000000~{1:020d}-{'0' * 16}"
        with open(os.path.join(outside, name), "wb") as file:
            file.write(record(b"x"))
        q = self.queue()
        os.symlink(outside, self.file("inflight-x"))
        self.assertIsNone(q.pop())
        stats = q.stats()
        self.assertEqual((stats.inflight, [it.node for it in stats.nodes]), (0, ["n1"]))
        self.assertEqual((os.listdir(outside), len(q.check())), ([name], 1))

    def litter(self, directory: str) -> set[str]:
        """Put every kind of foreign thing into a directory; return the paths."""
        for name in self.NAMES:
            self.put(name, b"FQ1 352441c2 3\nabc", directory)
        os.mkdir(self.file(directory, "folder"))
        os.symlink("/etc/passwd", self.file(directory, "link"))
        os.mkfifo(self.file(directory, "fifo"))
        not_unicode = os.fsdecode(b"\xff\xfe")
        self.put(not_unicode, b"", directory)
        names = (*self.NAMES, "folder", "link", "fifo", not_unicode)
        return {os.path.normpath(self.file(directory, name)) for name in names}

    def test_foreign_files_are_never_delivered_moved_or_removed(self) -> None:
        # This holds in every directory of the queue, for names that resemble a lease directory, and
        # on shared file systems. A pop() that finds no task lists pending/ only once, however many
        # foreign files there are.
        clock = self.clock()
        for fs_type in (EXT4, NFS):
            self.path = self.new_dir(self.memory)
            self.patched(on_file_system(fs_type))
            self.check_foreign_files_stay(clock)

    def check_foreign_files_stay(self, clock: Clock) -> None:
        q = self.queue("n1")
        q.push(b"1")
        q.close()
        self.queue("n2").pop()
        foreign = self.foreign_files()
        q = self.queue("n3")
        q.push(b"2")
        clock.advance(3700)
        self.assertEqual([task.data for task in iter(q.pop, None)], [b"1", b"2"])
        listed = calls_of("list", lambda: self.assertIsNone(q.pop()))
        self.assertLessEqual(sum(path.endswith("pending") for path, *_ in listed), 1)
        q.stats()
        q.purge(0)
        q.retry_failed()
        q.close()
        self.assertEqual([path for path in foreign if not os.path.lexists(path)], [])

    def foreign_files(self) -> set[str]:
        foreign: set[str] = set()
        os.mkdir(self.file("keys"))
        states = "pending", "scheduled", "done", "failed", "inflight-n2"
        for directory in (".", "keys", "creating", *states):
            foreign |= self.litter(directory)
        # Two directories: one has the name of a link of a key, and one has almost the name of a
        # lease directory.
        for name in ("keys/8000000000000000", "inflight-bad name"):
            os.mkdir(self.file(name))
            foreign.add(self.file(name))
        task = f"{1:020d}-0000aaaa00000000"
        files = ("keys/0000aaaa", f"keys/{task}", f"done/{task}.error", "inflight-file")
        for name in files:
            foreign.add(os.path.normpath(self.put(name, b"", "")))
        os.symlink(self.file("pending"), self.file("inflight-link"))
        foreign.add(self.file("inflight-link"))
        return foreign

    def test_links_directories_and_fifos_named_like_tasks_are_quarantined_unread(
        self,
    ) -> None:
        # On a file system that hosts share, such an entry is not mistaken for a file that another
        # host has replaced or claimed.
        secret = self.put("secret", record(b"abc"), "")
        make: tuple[Callable[[str], object], ...] = (
            lambda path: os.symlink(secret, path),
            lambda path: os.symlink("nowhere", path),
            os.mkdir,
            os.mkfifo,
        )
        idents = [f"{number:020d}-0000aaaa00000000" for number in range(1, 5)]
        for fs_type in (EXT4, FUSE):
            self.path = self.new_dir(self.memory)
            self.patched(on_file_system(fs_type))
            q = self.queue(timeout_stale_ms=None)
            for ident, function in zip(idents, make, strict=True):
                function(self.file("pending", ident))
            q.push(b"good")
            self.assertEqual(self.drain(q), [b"good"])
            self.assertEqual(self.states(), {"failed": 4, "done": 1})
            for ident in idents:
                self.assertEqual(reason_of(q, ident), "not a regular file\n")


class ManyUsers(QueueCase):
    """The files of one user neither exclude nor block the other users of a queue."""

    def test_push_raises_the_first_error_when_a_lock_file_can_not_be_opened(
        self,
    ) -> None:
        """If the first open() of a lock file is refused, push() raises its error, and adds no
        task."""
        q = self.queue()
        q.push(b"x", key="other")
        with hooked(at_call("open", "/locks/", errno_raiser(errno.EACCES), times=1)):
            self.assertRaises(PermissionError, q.push, b"x", key="k")
        self.assertEqual(self.states(), {"pending": 1})

    def test_fifo_in_the_place_of_a_reason_does_not_block(self) -> None:
        q = self.queue()
        q.push(b"x")
        task = self.pop(q)
        q.fail(task)
        os.mkfifo(self.file("failed", f"{task.id}.error"))
        (dead,) = q.tasks("failed")
        self.assertEqual(dead.error, "")

    def test_files_for_all_users_follow_the_rights_of_data_dir(self) -> None:
        """Files and directories for all users have the permissions of data_dir, whatever the
        umask."""
        os.chmod(self.path, 0o770)
        before = os.umask(0o077)
        try:
            q = self.queue()
            q.push(b"x", key="k")
            q.push(b"y")
            q.checkpoint(self.pop(q), b"half")
            TicketQueue(self.path).register()
        finally:
            os.umask(before)
        clocks = [name for name in os.listdir(self.path) if name.startswith("clock-")]
        for name in ("pending", "inflight-n1", "keys", "locks", "checkpoints"):
            self.assertEqual(
                stat.S_IMODE(os.stat(self.file(name)).st_mode), 0o770, name
            )
        locks, saved = (
            glob.glob(self.file("locks", "*")),
            glob.glob(self.file("checkpoints", "*")),
        )
        self.assertEqual((len(clocks), len(locks), len(saved)), (1, 1, 1))
        modes = [(locks[0], 0o660), (self.file("last"), 0o660), (saved[0], 0o640)]
        for path, mode in (*modes, (self.file(clocks[0]), 0o644)):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), mode, path)

    def test_file_outside_keeps_its_mode_when_a_link_replaces_a_new_lock(self) -> None:
        """The queue sets the mode of a new lock file through its descriptor, never by its path."""
        # RACE: root works in a directory of another user. That user replaces the new lock file by a
        # link to a file elsewhere, before root sets the mode. The mode of the linked file stays.
        outside = os.path.join(self.new_dir(os.path.dirname(self.path)), "shadow")
        for link in (os.symlink, os.link):
            with open(outside, "w", encoding="ascii"):
                os.chmod(outside, 0o600)
            self.path = self.new_dir(self.memory)
            os.chmod(self.path, 0o777)
            q = self.queue()
            place = self.file("locks", key_tag("k")[-2:])

            def swap(link: Any = link, place: str = place) -> None:
                if os.path.isfile(place) and not os.path.samefile(place, outside):
                    os.unlink(place)
                    link(outside, place)

            with hooked(at_call("stat fstat chmod fchmod", None, swap)):
                q.push(b"x", key="k")
            self.assertTrue(os.path.lexists(place))
            self.assertEqual(stat.S_IMODE(os.stat(outside).st_mode), 0o600)

    def test_file_outside_keeps_its_mode_when_a_link_is_there_before_the_lock(
        self,
    ) -> None:
        # RACE: another user puts a link at the path of a lock file just before the queue creates
        # the lock file. The mode of the linked file stays.
        outside = os.path.join(self.new_dir(os.path.dirname(self.path)), "shadow")
        with open(outside, "w", encoding="ascii"):
            os.chmod(outside, 0o600)
        os.chmod(self.path, 0o777)
        q = self.queue()
        os.mkdir(self.file("locks"))
        place = self.file("locks", key_tag("k")[-2:])
        opened = os.open

        def plant(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_CREAT and path_at(more.get("dir_fd"), path) == place:
                with contextlib.suppress(FileExistsError):
                    os.link(outside, place)
            return opened(path, flags, *rest, **more)

        with mock.patch.object(femtoqueue, "os", fake_os(open=plant)):
            q.push(b"x", key="k")
        self.assertTrue(os.path.samefile(place, outside))
        self.assertEqual(stat.S_IMODE(os.stat(outside).st_mode), 0o600)

    def test_peek_and_contains_by_key_work_on_a_read_only_queue(self) -> None:
        # The queue may be a snapshot, and may have no locks/.
        q = self.queue()
        opened = os.open
        q.push(b"x", key="k")
        shutil.rmtree(self.file("locks"))

        def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise_errno(errno.EROFS)
            return opened(path, flags, *rest, **more)

        read_only = fake_os(open=refuse, mkdir=lambda *_: raise_errno(errno.EROFS))
        with mock.patch.object(femtoqueue, "os", read_only):
            task = q.peek(key="k")
            self.assertEqual((q.contains("k"), q.contains("j")), (True, False))
        self.assertEqual(task and task.data, b"x")

    def test_register_in_a_read_only_directory_raises_erofs(self) -> None:
        line = TicketQueue(self.path)
        opened = os.open
        line.remove(line.register()[1])

        def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_RDWR | os.O_CREAT):
                raise_errno(errno.EROFS)
            return opened(path, flags, *rest, **more)

        with (
            mock.patch.object(femtoqueue, "os", fake_os(open=refuse)),
            self.assertRaises(OSError) as caught,
        ):
            line.register()
        self.assertEqual(caught.exception.errno, errno.EROFS)

    def test_file_outside_keeps_its_mode_when_a_link_replaces_a_clock_file(
        self,
    ) -> None:
        outside = os.path.join(self.new_dir(os.path.dirname(self.path)), "shadow")
        with open(outside, "w", encoding="ascii"):
            os.chmod(outside, 0o600)

        def swap() -> None:
            for path in glob.glob(self.file("creating", "*.clock")):
                if not os.path.islink(path):
                    os.unlink(path)
                    os.symlink(outside, path)

        with hooked(at_call("chmod fchmod", None, swap)):
            self.queue()
        self.assertEqual(stat.S_IMODE(os.stat(outside).st_mode), 0o600)

    def test_worker_that_may_not_use_its_lease_directory_uses_another(self) -> None:
        """If the lease directory of this node_id belongs to another user, and this user may not
        open it or write to it, the worker uses a directory of another name."""
        refuse = errno_raiser(errno.EACCES)
        for event, of in (("open", "inflight-n1"), ("access", None)):
            q = self.new_queue()
            q.push(b"x")
            os.mkdir(self.file("inflight-n1"))
            with self.subTest(event), hooked(at_call(event, of, refuse, times=1)):
                task = self.pop(q)
                self.assertRegex(task.path, rf"^inflight-{os.getpid()}-[0-9a-f]{{16}}/")
                q.done(task)

    def test_queue_that_others_decide_on_is_logged_for_root(self) -> None:
        """If root opens a queue that belongs to another user, or to which others may write, the log
        says so once."""
        for owner, mode, text in (
            (1000, 0o755, "of user 1000"),
            (0, 0o775, "may write to"),
        ):
            self.path = self.new_dir(self.memory)
            os.chmod(self.path, mode)

            def owned(*args: Any, owner: int = owner, **more: Any) -> os.stat_result:
                fields = [*os.stat(*args, **more)]
                return os.stat_result([*fields[:4], owner, *fields[5:]])

            as_root = fake_os(geteuid=lambda: 0, stat=owned)
            LOG.disabled = False
            with self.assertLogs(LOG, "WARNING") as logged:
                for _ in range(2):
                    with mock.patch.object(femtoqueue, "os", as_root):
                        self.queue()
            self.assertEqual(len(logged.output), 1)
            self.assertIn(text, logged.output[0])

    def test_reason_of_a_huge_file_is_cut(self) -> None:
        """A reason that another user wrote does not fill the memory of the one who looks."""
        q = self.queue()
        q.fail(task := leased(q))
        with open(self.file("failed", f"{task.id}.error"), "wb") as file:
            file.truncate(1 << 24)
        (dead,) = q.tasks("failed")
        self.assertLessEqual(len(dead.error or ""), 1 << 20)

    def test_checkpoint_that_may_not_be_read_does_not_stop_the_delivery(self) -> None:
        q = self.queue()
        q.checkpoint(task := leased(q), b"half")
        q.release(task)
        refused = at_call("open", f"/checkpoints/{task.id}", errno_raiser(errno.EACCES))
        with hooked(refused):
            task = self.pop(q)
        self.assertEqual((task.data, task.checkpoint), (b"x", None))


@FORK
class ByHand(QueueCase):
    """Each shell command that the README allows on a queue in use has the effect that the README
    describes."""

    # Before each command, task 1 is in flight; tasks 2 and 3 wait, and worker n1 has listed them.
    # A row: the command, whether the lease ends, and the tasks delivered afterwards, with attempts.
    COMMANDS: tuple[tuple[str, bool, dict[bytes, int]], ...] = (
        ("mv pending/$ID failed/", False, {b"3": 1}),
        ("mv pending/$ID failed/; mv failed/$ID pending/", False, {b"2": 1, b"3": 1}),
        ("rm pending/$ID", False, {b"3": 1}),
        ("rm inflight-n1/*", True, {b"2": 1, b"3": 1}),
        ("mv inflight-n1/* pending/", True, {b"1": 2, b"2": 1, b"3": 1}),
        ("mv inflight-n1/* pending/$LEASED", True, {b"1": 1, b"2": 1, b"3": 1}),
        ("touch PAUSED", False, {}),
        ("touch PAUSED; rm PAUSED", False, {b"2": 1, b"3": 1}),
    )

    def sh(self, command: str, **names: str) -> str:
        """Run a shell command in data_dir, with these variables; return its output."""
        env = {**os.environ, **names}
        status, out, err = run_guarded("sh", "-ec", command, env=env, path=self.path)
        self.assertEqual((status, err), (0, ""), command)
        return out

    def test_checkpoint_of_another_payload_is_not_delivered(self) -> None:
        """If a person writes another payload into the file of a task, the checkpoint of the older
        one is removed."""
        q = self.queue()
        task = leased(q, b"old")
        q.checkpoint(task, b"half")
        q.release(task)
        (name,) = self.names("pending")
        self.put(name, record(b"new"))
        self.assertEqual(((task := self.pop(q)).data, task.checkpoint), (b"new", None))
        self.assertEqual(self.names("checkpoints"), [])

    def test_mv_rm_and_touch_change_what_is_delivered(self) -> None:
        """A command has the same effect on a worker that has listed the tasks as on another one."""
        clock = self.clock()
        for (command, is_lost, wanted), node in itertools.product(
            self.COMMANDS, ("n1", "n2")
        ):
            q = self.new_queue(timeout_stale_ms=None)
            ids = q.push_many([b"1", b"2", b"3"])
            task = self.pop(q)
            self.sh(command, LEASED=ids[0], ID=ids[1])
            clock.advance(2 if "PAUSED" in command else 0)
            with self.subTest(command, node=node):
                other = q if node == "n1" else self.queue(node)
                delivered = {it.data: it.attempts for it in iter(other.pop, None)}
                self.assertEqual(delivered, wanted)
                with (
                    self.assertRaises(LeaseLost)
                    if is_lost
                    else contextlib.nullcontext()
                ):
                    q.done(task)
                self.check_invariants()

    def test_task_moved_by_hand_under_any_of_its_names_is_found_by_its_id(self) -> None:
        # A file in pending/ may have the name of a lease. A file in failed/ or done/ may have the
        # name of a waiting task. stats(), retry() and tasks() understand such names. peek() does
        # not find them in done/ and failed/, because it lists neither. retry_failed() lists failed/
        # only once, and not again for each such name.
        q = self.queue()
        ids = q.push_many([b"1", b"2"])
        self.pop(q), self.pop(q)
        self.sh("mv inflight-n1/* pending/")
        self.assertEqual([task.id for task in q.tasks("pending")], ids)
        for task in [self.pop(q), self.pop(q)]:
            q.release(task)
        self.sh("mv pending/* failed/")
        found = {task.id: task for task in q.tasks("failed")}
        self.assertEqual(
            (q.stats().failed, found[ids[0]]), (2, FemtoTask(ids[0], b"1", 2))
        )
        q.retry(ids[1])
        listings = calls_of("list", lambda: self.assertEqual(q.retry_failed(), 1))
        self.assertEqual(len(listings), 1)
        for data in (b"2", b"1"):
            task = self.pop(q)
            self.assertEqual((task.data, task.attempts), (data, 1))
            q.release(task)
        self.sh("mv pending/* done/")
        found = {task.id: task for task in q.tasks("done")}
        self.assertEqual(
            (q.stats().done, found[ids[1]]), (2, FemtoTask(ids[1], b"2", 1))
        )

    def test_shell_tools_can_read_a_queue_and_a_copy_of_it_is_a_queue(self) -> None:
        # The copy delivers the task in flight again, because no worker holds the lease in the copy.
        q = self.queue(timeout_stale_ms=None)
        ids = q.push_many([b"one\n", b"two\n"])
        self.assertEqual(self.sh("ls pending").split(), ids)
        self.assertEqual(self.sh("ls pending | wc -l").strip(), "2")
        self.assertTrue(self.sh("cat pending/$ID", ID=ids[0]).endswith("4\none\n"))
        self.assertEqual(self.sh("tail -q -n +2 pending/*"), "one\ntwo\n")
        self.assertEqual(self.sh("grep -l two pending/*").strip(), f"pending/{ids[1]}")
        self.assertGreater(int(self.sh("du -s .").split()[0]), 0)
        self.pop(q)
        backup = self.new_dir(self.memory)
        self.sh("cp -a . $BACKUP/jobs", BACKUP=backup)
        with FemtoQueue(os.path.join(backup, "jobs")) as copy:
            self.assertEqual(
                [task.data for task in iter(copy.pop, None)], [b"one\n", b"two\n"]
            )


# Many processes


@FORK
class Concurrency(QueueCase):
    """Many processes on one queue deliver each task exactly once while none of them dies."""

    COUNT = 20_000

    def pop_and_finish(self, q: FemtoQueue) -> list[str]:
        task = q.pop()
        if task is None:
            return []
        q.done(task)
        return [task.data.decode()]

    def push_and_drain(self, child: Child, first: int) -> None:
        """Pop and finish tasks until all are done. The children 0 and 1 also push half of the tasks
        each, meanwhile."""
        q = FemtoQueue(self.path)
        ends = [self.file("pushed-0"), self.file("pushed-1")]
        child.say("ready")
        child.wait_for_go()
        popped: list[str] = []
        for number in range(first, self.COUNT, 2) if first < 2 else ():
            q.push(b"%d" % number)
            popped += self.pop_and_finish(q) if number % 5 == 0 else []
        if first < 2:
            self.put(f"pushed-{first}", b"", "")
        while (finished := self.pop_and_finish(q)) or not all(
            map(os.path.exists, ends)
        ):
            popped += finished
        child.say(" ".join(popped))
        q.close()

    def test_eight_workers_deliver_twenty_thousand_tasks_exactly_once(self) -> None:
        workers = [
            self.child(functools.partial(self.push_and_drain, first=n))
            for n in range(8)
        ]
        for worker in workers:
            worker.line()
        for worker in workers:
            worker.go()
        lines = [worker.finish() for worker in workers]
        self.assertEqual([status for _, status in lines], [0] * 8)
        popped = [int(number) for said, _ in lines for number in said[0].split()]
        self.assertEqual(sorted(popped), list(range(self.COUNT)))
        self.assertEqual(self.states(), {"done": self.COUNT})


@FORK
class KeyedConcurrency(QueueCase):
    """Four producers and four consumers share fifty keys, and are killed again and again."""

    KEYS, KILLS = 50, 130
    # a disk takes longer for as many deliveries
    SECONDS = 2.0 if QueueCase.memory else 4.0

    def log(self, *words: object) -> None:
        """Append a line to the log. The kernel writes a line that crosses a page boundary in two
        parts. If the process is killed in between, the line has no "." at the end."""
        os.write(
            self.log_fd,
            " ".join(map(str, ("\n", time.monotonic_ns(), *words, "."))).encode(),
        )

    def logged(self, what: str) -> list[tuple[int, str, str]]:
        """Return time, key and value of each whole line in the log that has this word."""
        with open(self.file("log"), encoding="ascii") as file:
            whole = [words[:4] for line in file if (words := line.split())[4:] == ["."]]
        return sorted(
            (int(t), key, value) for t, word, key, value in whole if word == what
        )

    def produce(self, child: Child) -> None:
        q = FemtoQueue(self.path)
        chance = child.chance
        for number in itertools.count():
            key, value = f"k{chance.randrange(self.KEYS)}", f"{os.getpid()}-{number}"
            self.log("pushing", key, value)
            if chance.random() < 0.8:
                q.push(value.encode(), key=key)
            else:
                q.schedule(
                    value.encode(),
                    time.time() * 1e6 + chance.choice((-1, 5000)),
                    key=key,
                )
            self.log("pushed", key, value)

    def consume(self, child: Child) -> None:
        q = FemtoQueue(self.path)
        chance = child.chance
        while True:
            task = (
                q.pop()
                if chance.random() < 0.7
                else q.take(f"k{chance.randrange(self.KEYS)}")
            )
            if task is None:
                time.sleep(0.001)
                continue
            self.handle(q, task, chance)

    def handle(self, q: FemtoQueue, task: FemtoTask, chance: random.Random) -> None:
        """Log the delivery of a task, and settle it. Log whom it has met: the delivery that another
        process has under way for the same key."""
        fd = os.open(self.file(f"busy-{task.key}"), os.O_RDWR | os.O_CREAT, 0o600)
        delivery = f"{os.getpid()}-{time.monotonic_ns()}"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The kernel closes the descriptors of a killed process one after the other. The lease
            # may end before this lock is free. A killed process does not log that it has left.
            if met := os.pread(fd, 99, 0).decode():
                self.log("met", task.key, met)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, 0)
        os.pwrite(fd, delivery.encode(), 0)
        self.log("got", task.key, task.data.decode())
        time.sleep(chance.random() / 1000)
        os.ftruncate(fd, 0)
        os.close(fd)
        self.log("left", task.key, delivery)
        if chance.random() < 0.8:
            q.done(task)
        else:
            q.release(task, front=chance.random() < 0.5)

    def test_last_payload_of_a_key_is_delivered_last_and_no_two_at_once(self) -> None:
        self.log_fd = os.open(
            self.file("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        self.addCleanup(os.close, self.log_fd)
        workers = [self.child(work) for work in (self.produce, self.consume) * 4]
        # A busy machine needs more time for so many pushes.
        for number in itertools.count():
            if number >= self.KILLS and len(self.logged("pushed")) > 500:
                break
            time.sleep(self.SECONDS / self.KILLS)
            at = self.chance.randrange(8)
            workers[at].end()
            workers[at] = self.child((self.produce, self.consume)[at % 2])
        for worker in workers:
            worker.end()
        q = self.queue(None)
        clock = self.clock()
        for _ in range(2):
            while task := q.pop():
                self.log("got", task.key, task.data.decode())
                q.done(task)
            clock.advance(601)
        self.check_invariants(leftovers=True)
        self.assertEqual((self.names("keys"), q.stats().buffered), ([], 0))
        left = {delivery for _, _, delivery in self.logged("left")}
        self.assertEqual([it for it in self.logged("met") if it[2] in left], [])
        self.check_last_values()

    def check_last_values(self) -> None:
        """Fail if a key has a payload whose push began after the push of the last delivered payload
        had returned."""
        began = {value: t for t, _, value in self.logged("pushing")}
        pushed = self.logged("pushed")
        ended = {value: t for t, _, value in pushed}
        last = {key: value for _, key, value in self.logged("got")}
        for _, key, value in pushed:
            delivered = last[key]
            late = delivered in ended and began[value] > ended[delivered]
            self.assertFalse(late, f"{key}: {value} is missed, {delivered} came last")


class TicketCase(QueueCase):
    """A test with a line: the directory of a TicketQueue."""

    def line(self, stale_timeout: float | None = None) -> TicketQueue:
        return TicketQueue(self.file("line"), stale_timeout)

    def members(self) -> list[str]:
        return [name for name in self.names("line") if name[0].isdigit()]


class Tickets(TicketCase):
    """First come, first served: members have turns one at a time, in the order of the tickets. Dead
    members are passed over."""

    def test_numbers_begin_at_one_and_the_lowest_is_at_the_head(self) -> None:
        line, other = self.line(), self.line()
        tickets = [queue.register() for queue in (line, other, line)]
        self.assertEqual([number for number, _ in tickets], [1, 2, 3])
        self.assertEqual(
            [line.is_head(n) for n in (0, 1, 2, 3)], [False, True, False, False]
        )
        self.assertTrue(other.remove(tickets[1][1]))
        self.assertTrue(line.remove(tickets[0][1]))
        self.assertFalse(line.remove(tickets[0][1]))
        self.assertEqual(
            (line.is_head(1), line.is_head(3), line.is_empty()), (False, True, False)
        )
        line.remove(tickets[2][1])
        self.assertEqual((line.is_head(0), line.is_empty()), (False, True))
        self.assertEqual((other.register()[0], line.is_empty()), (4, False))
        del other  # dropping the object removes its tickets
        self.assertEqual(self.names("line"), ["last"])
        for content in (b"", bytes(20), b"hello", b"9" * 20):
            # left by power loss, or written by a person
            self.put("last", content, "line")
            number, member = line.register()
            self.assertEqual((number, line.remove(member)), (1, True))

    def test_what_is_no_ticket_but_has_the_name_of_one_is_passed_over(self) -> None:
        """A directory, a socket, or a file with a number that no ticket can follow does not stop
        the line."""
        line = self.line()
        rest = f"~00000000~{'0' * 16}"
        os.makedirs(self.file("line", f"{1:020d}{rest}", "x"))
        os.makedirs(self.file("line", f".{2:020d}{rest}", "x"))
        for name in (f"{3:020d}{rest}", f".{4:020d}{rest}"):
            with contextlib.suppress(OSError):  # macOS can't make one so
                os.mknod(self.file("line", name), stat.S_IFSOCK | 0o600)
        self.put(f"{'9' * 20}{rest}", b"", "line")
        for number in (4, 5):
            with line.turn(timeout=PATIENCE_S) as ticket:
                self.assertEqual(ticket, number)
            self.assertTrue(line.is_empty())

    def test_error_of_the_file_last_names_the_file(self) -> None:
        """An error of a read or write of "last", as on a full disk, has the path of the file."""
        line = self.line()
        os.mkfifo(self.file("line", "last"))
        with self.assertRaises(OSError) as caught:
            line.register()
        self.assertEqual(caught.exception.filename, self.file("line", "last"))

    def test_new_ticket_is_locked_before_others_can_see_it(self) -> None:
        # RACE: another process looks at the line as soon as the ticket appears. An unlocked ticket
        # would look like that of a dead process, and would be removed.
        line, other = self.line(), self.line()
        swept = list[int]()

        def look() -> None:
            swept.append(other.cleanup_stale())

        with hooked(at_call("move", "/.", look, times=1), after=True):
            ticket, _ = line.register()
        self.assertEqual((swept, line.is_head(ticket)), ([0], True))

    def test_removed_ticket_has_no_turn_even_if_its_number_is_given_again(self) -> None:
        # A person may remove the ticket of a process that is stopped. The ticket may also be
        # removed while the is_head() of its own process runs.
        line, other = self.line(), self.line()
        ticket, member = line.register()
        self.assertTrue(other.remove(member))
        self.assertTrue(other.maybe_cleanup())
        self.assertEqual(other.register()[0], ticket)
        self.assertEqual((line.is_head(ticket), other.is_head(ticket)), (False, True))
        with hooked(at_call("utime", None, lambda: line.remove(member), times=1)):
            self.assertFalse(line.is_head(ticket))

    def test_turn_times_out_and_leaves_the_line(self) -> None:
        line = self.line()
        with line.turn(timeout=PATIENCE_S) as ticket:
            self.assertEqual(ticket, 1)
            with self.assertRaises(TimeoutError), line.turn(timeout=0.01):
                self.fail("two at once")
            self.assertTrue(line.is_head(1))
        self.assertTrue(line.is_empty())

    def test_pickled_copy_holds_no_ticket(self) -> None:
        """Dropping the copy removes no ticket of the original."""
        # multiprocessing gives such a copy to a process that it spawns.
        line = self.line(7.5)
        ticket, _ = line.register()
        copy = pickle.loads(pickle.dumps(line))
        self.assertEqual((copy.is_head(ticket), copy.stale_timeout), (True, 7.5))
        del copy
        self.assertTrue(line.is_head(ticket))

    def test_register_raises_if_its_directory_can_not_be_made_again(self) -> None:
        # Here queue_dir is a symbolic link, and the directory that the link leads to was removed.
        os.mkdir(self.file("there"))
        os.symlink("there", self.file("line"))
        line = self.line()
        os.rmdir(self.file("there"))
        self.assertRaises(FileNotFoundError, line.register)

    def test_ticket_of_a_dead_process_is_passed_over_at_once(self) -> None:
        lines = [self.line() for _ in range(4)]
        members = [line.register()[1] for line in lines]
        self.assertFalse(lines[1].is_head(2))
        nowhere = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, nowhere)
        for at in (0, 2):
            # close the descriptor of the ticket, as the kernel does after SIGKILL
            (fd,) = descriptors_of(self.file("line", members[at]))
            os.dup2(nowhere, fd, inheritable=False)
        self.assertTrue(lines[1].is_head(2))
        self.assertEqual((lines[1].cleanup_stale(), lines[3].is_head(4)), (1, False))

    @FORK
    def test_forked_child_holds_none_of_its_parents_tickets(self) -> None:
        """The parent keeps its ticket when the child ends, drops its copy of the object, or leaves
        the block of turn()."""
        lines = [self.line()]
        stack = contextlib.ExitStack()
        first, _ = lines[0].register()
        self.assertEqual(self.child(lambda child: lines.clear()).finish(), ([], 0))
        self.assertTrue(lines[0].is_head(first))
        lines.clear()
        line = self.line()
        ticket = stack.enter_context(line.turn())
        self.assertEqual(self.child(lambda child: stack.close()).finish(), ([], 0))
        self.assertTrue(line.is_head(ticket))
        stack.close()
        self.assertTrue(line.is_empty())

    @FORK
    def test_child_of_an_unseen_fork_has_tickets_of_its_own(self) -> None:
        """The child keeps the ticket that it draws, and takes no ticket of its parent away, also
        when it leaves the parent's block of turn()."""
        lines = [self.line()]
        stack = contextlib.ExitStack()
        first, _ = lines[0].register()

        def draw() -> None:
            second, _ = lines[0].register()
            assert not lines[0].is_head(second)
            assert self.line().cleanup_stale() == 0

        self.check_exit(self.forked_unseen(draw))
        self.check_exit(self.forked_unseen(lines.clear))
        self.assertTrue(self.line().is_head(first))
        self.assertTrue(lines[0].is_head(first))
        lines.clear()
        line = self.line()
        ticket = stack.enter_context(line.turn())
        self.check_exit(self.forked_unseen(stack.close))
        self.assertTrue(line.is_head(ticket))
        stack.close()

    def test_register_that_fails_or_is_interrupted_leaves_no_ticket(self) -> None:
        """If register() raises, it leaves no ticket in line, for which all others would wait."""
        # At each system call of register() the network is cut, or Ctrl-C comes before or after the
        # call. If register() returns, the ticket is in line.
        cut = errno_raiser(errno.ENOTCONN)
        ways = (Step, cut), (Step, interrupt), (Meanwhile, interrupt)
        for fs_type, (kind, action) in itertools.product((EXT4, NFS), ways):
            for step in kind.each(action):
                line = self.line()
                with on_file_system(fs_type), self.subTest(fs_type, number=step.number):
                    members, closed_file = self.try_to_register(line, step)
                    self.assertEqual(self.line().is_empty(), not members)
                    if action is cut:
                        self.assertEqual(self.members(), members)
                        # An error at the closing of a lock is ignored.
                        self.assertTrue(members or not closed_file)
                    for member in members:
                        self.assertTrue(line.remove(member))

    def try_to_register(self, line: TicketQueue, step: Step) -> tuple[list[str], bool]:
        """Return the member, if register() returns, and whether the step was reached when a file,
        not a directory, was about to be closed."""
        members = list[str]()
        closed = [False]
        after = isinstance(step, Meanwhile)

        def hook(name: str, args: tuple[Any, ...]) -> None:
            if name == "close" and not after and not step.reached:
                closed.append(stat.S_ISREG(os.fstat(args[0]).st_mode))
            step(name, args)

        ended = contextlib.suppress(OSError, KeyboardInterrupt)
        with ended, hooked(hook, after=after):
            members.append(line.register()[1])
        return members, step.at == "close" and closed[-1]

    def test_ticket_of_another_host_lives_until_it_is_stale(self) -> None:
        """A ticket of another host, or of an earlier boot, is passed over after stale_timeout
        seconds without a touch."""
        # A member whose stale_timeout is None never passes such a ticket over.
        self.patched(on_file_system(NFS))
        with on_boot("another host"):
            other = self.line(stale_timeout=60)
        line, patient = self.line(stale_timeout=60), self.line()
        clock = self.clock()
        clock.stand_still()
        theirs, member = other.register()
        mine, _ = line.register()
        clock.advance(40)
        # is_head() touches the ticket, but by the clock of the disk, which the test does not
        # advance. So the ticket is still 40 s old.
        self.assertTrue(other.is_head(theirs))
        stats = calls_of("stat", lambda: self.assertFalse(line.is_head(mine)))
        # The age must come from fstat() of the open ticket: for up to a minute, stat() of the path
        # may return an earlier time from the host's cache.
        self.assertNotIn((self.file("line", member),), stats)
        clock.advance(30)
        self.assertEqual((patient.is_head(mine), line.is_head(mine)), (False, True))
        self.assertFalse(other.is_head(theirs))

    def test_dead_member_that_could_not_see_the_boot_id_is_passed_over_at_once(
        self,
    ) -> None:
        """On a local file system, a free lock shows that a member is dead, whatever boot id the
        member could see."""
        for theirs, ours in ((None, "1"), ("1", None), ("1", "2")):
            with on_boot(theirs):
                dead = self.line()
                dead.register()
            with on_boot(ours):
                line = self.line()
            ticket, member = line.register()
            self.assertFalse(line.is_head(ticket))
            # closes the lock, as the death of the process does
            dead._held_tickets.clear()
            self.assertTrue(line.is_head(ticket))
            line.remove(member)

    def test_maybe_cleanup_removes_the_directory_only_if_nobody_is_in_line(
        self,
    ) -> None:
        line = self.line()
        _, member = line.register()
        self.assertEqual((line.maybe_cleanup(), line.remove(member)), (False, True))
        self.put(".notes.txt", b"", "line")
        self.assertFalse(line.maybe_cleanup())
        self.assertEqual(self.names("line"), [".notes.txt", "last"])
        os.unlink(self.file("line", ".notes.txt"))
        # A process that was killed in register() left this file.
        self.put(f".{1:020d}~00000000~{'0' * 16}", b"", "line")
        self.assertEqual((line.maybe_cleanup(), line.maybe_cleanup()), (True, False))
        self.assertFalse(os.path.exists(self.file("line")))
        self.assertEqual(
            (line.is_empty(), line.is_head(1), line.register()[0]), (True, False, 1)
        )

    def test_maybe_cleanup_at_a_mount_point_removes_nothing(self) -> None:
        line = self.line()
        line.remove(line.register()[1])
        with hooked(at_call("rmdir", None, errno_raiser(errno.EBUSY))):
            self.assertFalse(line.maybe_cleanup())
        with line.turn(timeout=PATIENCE_S):
            self.assertFalse(line.maybe_cleanup())

    def test_line_that_was_removed_and_made_anew_is_seen_by_others(self) -> None:
        idle, line, other = (self.line() for _ in range(3))
        line.remove(line.register()[1])
        self.assertTrue(idle.is_empty() and other.maybe_cleanup() and idle.is_empty())
        ticket, _ = line.register()
        self.assertEqual((idle.is_empty(), idle.is_head(ticket)), (False, True))

    def test_directory_is_made_again_if_it_is_removed_before_any_system_call(
        self,
    ) -> None:
        # RACE: another process finds no ticket in line and removes the directory, just before a
        # system call of this object. The object makes the directory again. The test tries each
        # system call in turn.

        def clean() -> None:
            last = self.file("line", "last")
            with contextlib.suppress(OSError), open(last, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.names("line") == ["last"]:
                    os.unlink(last)
            with contextlib.suppress(OSError):
                os.rmdir(self.file("line"))

        for number in itertools.count():
            calls = itertools.count()
            with hooked(
                lambda *_, n=number, at=calls: clean() if next(at) == n else None
            ):
                line = self.line()
                ticket, member = line.register()
                self.assertEqual(
                    (ticket, line.is_head(1), line.remove(member)), (1, True, True)
                )
                self.assertEqual((line.cleanup_stale(), line.is_empty()), (0, True))
                self.assertTrue(
                    line.maybe_cleanup() or not os.path.exists(self.file("line"))
                )
            if next(calls) < number:
                break

    def test_lock_of_a_removed_file_does_not_count(self) -> None:
        """A ticket is taken under the lock of the file that is now at the path of "last"."""
        line = self.line()
        last = self.file("line", "last")
        is_free = list[bool]()
        line.remove(line.register()[1])

        def hook(name: str, args: tuple[Any, ...]) -> None:
            if name == "lock" and not is_free:
                os.unlink(last)
                self.put("last", b"", "line")
                is_free.append(False)
            if name == "move":
                with open(last, "rb") as file, contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_free.append(True)

        with hooked(hook):
            line.register()
        self.assertEqual(is_free, [False])

    def test_ticket_whose_removal_fails_is_no_longer_locked(self) -> None:
        line = self.line()
        _, member = line.register()
        with hooked(at_call("unlink", member, errno_raiser(errno.ENOTCONN))):
            try:
                line.remove(member)
            except OSError as error:
                # keeps the frame of remove(), and so a reference to the lock
                kept = error
        self.assertTrue(line.is_empty(), kept)

    def take_turns(self, child: Child) -> None:
        """Take 100 turns. In each turn, print the ticket and the number in the file "inside", and
        then add 1 to that number."""
        line = self.line()
        for _ in range(100):
            with line.turn() as ticket, open(self.file("inside"), "r+b", 0) as inside:
                # raises if two have a turn
                fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)
                number = int(inside.read())
                child.say(f"{ticket} {number}")
                if child.chance.random() < 0.1:
                    time.sleep(0.001)
                os.pwrite(inside.fileno(), b"%d" % (number + 1), 0)

    @FORK
    def test_eight_processes_take_a_hundred_turns_each(self) -> None:
        # Meanwhile maybe_cleanup() removes the directory whenever the line is empty. Tickets then
        # begin at 1 again.
        self.put("inside", b"0", "")
        line = self.line()
        children = [self.child(self.take_turns) for _ in range(8)]
        has_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while line.maybe_cleanup() or not os.waitid(
            os.P_PID, children[0].pid, has_ended
        ):
            pass
        lines = [child.finish() for child in children]
        self.assertEqual([status for _, status in lines], [0] * 8)
        turns = sorted(
            (int(at), int(n)) for said, _ in lines for n, at in map(str.split, said)
        )
        self.assertEqual([at for at, _ in turns], [*range(800)])
        grants = [ticket for _, ticket in turns]
        starts = [at for at, ticket in enumerate(grants) if at == 0 or ticket == 1]
        for begin, end in itertools.pairwise([*starts, len(grants)]):
            self.assertEqual(grants[begin:end], sorted(grants[begin:end]))


class SharedTickets(TicketCase):
    """The promises of Tickets between hosts, on NFS. A host that is cut off from the server loses
    all locks, and is not told."""

    fs_type = NFS

    def line_and_clock(self) -> tuple[TicketQueue, Clock]:
        """Return a line with a stale_timeout of 40 s, and the clock, which stands still."""
        clock = self.clock()
        clock.stand_still()
        return self.line(stale_timeout=40), clock

    def test_stale_timeout_may_be_longer_than_a_thread_can_wait(self) -> None:
        before = {*threading.enumerate()}
        with self.line(stale_timeout=1e11).turn():
            (thread,) = {*threading.enumerate()} - before
            wait_until_blocked(thread)
            self.assertTrue(thread.is_alive())

    def test_directory_that_other_hosts_use_stays(self) -> None:
        """On NFS maybe_cleanup() removes nothing."""
        # If the directory were removed, one host might lock the removed "last" while another host
        # locks the new "last".
        line = self.line()
        line.remove(line.register()[1])
        self.assertFalse(line.maybe_cleanup())
        self.assertEqual(self.names("line"), ["last"])

    def check_registered(self, line: TicketQueue, hook: Hook) -> None:
        """Fail unless register() takes a ticket while the hook interferes, and the ticket is the
        only one in line. Then remove the ticket."""
        with hooked(hook):
            ticket, member = line.register()
            self.assertEqual(self.members(), [member])
            self.assertTrue(line.is_head(ticket))
            self.assertTrue(line.remove(member))

    def test_register_draws_again_if_another_host_draws_meanwhile(self) -> None:
        # RACE: this host was cut off and has lost the lock of "last". Another host takes a ticket
        # just before the ticket of this host is in line. This host must draw again: its number is
        # not higher than the number of the other host, and could put its ticket in front of the
        # other host's ticket, which may have its turn.
        line = self.line()
        for theirs in (1, 5):
            other = f"{theirs:020d}~{'f' * 8}~{'0' * 16}"

            def join(other: str = other) -> None:
                self.put(other, b"", "line")

            with hooked(at_call("move", "/.", join, times=1)):
                ticket, member = line.register()
            self.assertEqual((ticket, self.members()), (theirs + 1, [other, member]))
            os.unlink(self.file("line", other))
            self.assertTrue(line.remove(member))

    def test_register_draws_again_if_another_host_removes_the_new_file(self) -> None:
        # RACE: the new file is not in line yet. Another host mistakes it for the file of a dead
        # process, and removes it. On NFS, flock() of the removed file raises EBADF.
        line = self.line()
        removed = list[bool]()

        def remove_new_file() -> None:
            (name,) = (name for name in self.names("line") if name.startswith("."))
            os.unlink(self.file("line", name))

        def remove_open_file() -> None:
            # The first call of flock() locks "last". The new file does not exist yet: do nothing.
            if not removed and any(name.startswith(".") for name in self.names("line")):
                removed.append(True)
                remove_new_file()
                raise_errno(errno.EBADF)

        self.check_registered(line, at_call("move", "/.", remove_new_file, times=1))
        self.check_registered(line, at_call("lock", None, remove_open_file))

    def test_register_that_can_not_find_its_new_file_raises_after_some_attempts(
        self,
    ) -> None:
        # GlusterFS may list a name but not find the file, perhaps for minutes, until it has healed.
        line = self.line()
        for code in (errno.ENOENT, errno.ESTALE):
            missing = at_call("move", "/.", errno_raiser(code), times=2)
            self.check_registered(line, missing)
            with hooked(at_call("move", "/.", errno_raiser(code))):
                self.assertRaises(OSError, line.turn(60).__enter__)
            self.assertTrue(line.is_empty())

    def test_ticket_that_another_host_removed_is_not_at_the_head(self) -> None:
        # ESTALE: the ticket was removed, though the cached list of names may still have it.
        line = self.line()
        ticket, member = line.register()
        with hooked(at_call("utime", None, errno_raiser(errno.ESTALE))):
            self.assertFalse(line.is_head(ticket))
        self.assertFalse(line.remove(member))

    def test_late_touch_does_not_renew_a_ticket(self) -> None:
        """If the thread of turn() touches the ticket too late, is_head() returns False."""
        # The thread itself reports nothing. After a touch that was too late, further touches do not
        # help, even if they follow one another quickly.
        clock = self.clock()
        touches = threading.Semaphore(0)
        clock.stand_still()
        line = self.line(stale_timeout=0.04)
        with (
            hooked(at_call("utime", None, touches.release), after=True),
            line.turn() as ticket,
        ):
            clock.advance(0.032)
            # Four touches: one by is_head(); one by the thread, perhaps just before the clock was
            # advanced; one that is too late; and one more.
            for _ in range(4):
                self.assertTrue(touches.acquire(timeout=PATIENCE_S))
            self.assertFalse(line.is_head(ticket))

    def test_member_that_is_late_in_its_turn_is_told_and_keeps_its_ticket_until_it_stops(
        self,
    ) -> None:
        """If a member touches its ticket too late in its turn, is_head() returns False. No other
        member has a turn until the late member calls remove()."""
        # The ticket stays in line: is_head() has touched it all the same.
        line, clock = self.line_and_clock()
        with on_boot("another host's"):
            other = self.line(stale_timeout=40)
        ticket, member = line.register()
        clock.advance(28)
        self.assertTrue(line.is_head(ticket))
        clock.advance(32)

        def touch(fd: int) -> None:
            os.utime(fd, (clock.time(), clock.time()))

        with mock.patch.object(femtoqueue, "os", fake_os(utime=touch)):
            self.assertEqual(
                (line.is_head(ticket), line.is_head(ticket)), (False, False)
            )
        waiting, _ = other.register()
        clock.advance(20)
        self.assertFalse(other.is_head(waiting))  # touched 20 s ago
        self.assertTrue(line.remove(member))
        self.assertTrue(other.is_head(waiting))

    def test_touch_counts_from_the_beginning_of_a_call_that_hangs(self) -> None:
        # The call may hang after the server has carried it out. If another host may have passed the
        # ticket over meanwhile, turn() raises an error.
        line, clock = self.line_and_clock()
        hang = functools.partial(clock.advance, 32)
        with hooked(at_call("move", "/.", hang, times=2)):
            ticket, _ = line.register()
            with self.assertRaisesRegex(FemtoQueueError, "passed over"):
                line.turn(60).__enter__()
        self.assertFalse(line.is_head(ticket))
        ticket, _ = line.register()
        with hooked(at_call("list", None, hang, times=1)):
            self.assertFalse(line.is_head(ticket))
        ticket, _ = line.register()
        with mock.patch.object(
            femtoqueue, "os", fake_os(utime=lambda fd: clock.advance(25))
        ):
            self.assertTrue(line.is_head(ticket))
        clock.advance(29)
        self.assertFalse(line.is_head(ticket))


class Shrinking(QueueCase):
    """A pending/ that was large is replaced by a new directory when it is empty."""

    in_memory = False

    def pop_as_if_large(
        self, q: FemtoQueue, hook: Hook = lambda *_: None
    ) -> FemtoTask | None:
        """Pop, while femtoqueue takes every directory for a large one."""
        with with_constant("shrink", -1), hooked(hook):
            return q.pop()

    def opened(self, *directories: str) -> list[int]:
        fds = [os.open(self.file(it), os.O_RDONLY) for it in directories]
        for fd in fds:
            self.addCleanup(os.close, fd)
        return fds

    def are_replaced(self, fds: list[int]) -> list[bool]:
        return [os.fstat(fd).st_nlink == 0 for fd in fds]

    def test_empty_pending_that_was_large_is_replaced_and_keeps_its_mode(self) -> None:
        """The rename of the new pending/ is synced into data_dir, and the mode is that of the old
        directory."""
        # Without the sync, power loss could leave later tasks, though synced themselves, in a
        # directory that has no name.
        q = self.queue(sync_after_write=True)
        clock = self.clock()
        synced = list[bool]()
        os.chmod(self.file("pending"), 0o751)
        before = self.opened("pending")

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.append(os.path.samestat(os.fstat(args[0]), os.stat(self.path)))

        self.pop_as_if_large(q, note)
        self.assertEqual({*synced}, {True})
        self.assertEqual(self.are_replaced(before), [True])
        self.assertEqual(stat.S_IMODE(os.stat(self.file("pending")).st_mode), 0o751)
        q.push(b"x")
        clock.advance(2)
        task = self.pop_as_if_large(q)
        self.assertEqual((task and task.data, self.names("creating")), (b"x", []))

    def test_replacement_keeps_the_group_and_is_not_tried_if_another_user_owns_it(
        self,
    ) -> None:
        # A directory of another user can't be made again with the same owner, so an attempt would
        # fail.
        q = self.queue()
        clock = self.clock()
        place = self.file("pending")
        made = list[str]()
        q.pop()
        with contextlib.suppress(PermissionError):  # only root may choose any group
            os.chown(place, -1, os.getegid() + 1)
        before = os.stat(place)
        user = os.geteuid()
        opened = self.opened("pending")
        note = at_call("mkdir", ".pending", lambda: made.append("."))
        with mock.patch("os.geteuid", return_value=user + 1):
            clock.advance(1)
            self.pop_as_if_large(q, note)
        self.assertEqual((made, self.are_replaced(opened)), ([], [False]))
        clock.advance(1)
        self.pop_as_if_large(q, note)
        self.assertEqual(
            (self.are_replaced(opened), os.stat(place).st_gid), ([True], before.st_gid)
        )

    def test_directory_with_tasks_is_not_replaced(self) -> None:
        q = self.queue()
        clock = self.clock()
        before = self.opened("pending", "scheduled")
        q.schedule(b"later", (time.time() + 60) * 1e6)
        q.pause()
        q.push(b"waits")
        for _ in range(2):
            self.pop_as_if_large(q)
            clock.advance(2)
        # RACE: another process pushes just before the new directory is renamed onto the old one.
        q.resume()
        q.done(popped(q))
        clock.advance(2)
        push = at_call(
            "move", ".pending", lambda: self.queue("n2").push(b"late"), times=1
        )
        late = self.pop_as_if_large(q, push)
        self.assertEqual((late and late.data, self.names("creating")), (b"late", []))
        self.assertEqual(self.are_replaced(before), [False, False])

    def test_push_into_a_directory_that_was_just_replaced_is_repeated(self) -> None:
        # RACE: another worker replaces pending/ just before the rename of push(). The rename fails
        # with ENOENT, though its source exists. push() opens the new directory, and repeats it.
        q, other = self.queue(), self.queue("n2")
        clock = self.clock()

        def replace() -> None:
            clock.advance(2)
            with with_constant("shrink", -1):
                other.pop()

        before = self.opened("pending")
        with hooked(at_call("move", "/creating/", replace, times=1)):
            q.push(b"x")
        self.assertEqual((self.are_replaced(before), self.drain(q)), ([True], [b"x"]))

    def moved_aside(self, directory: str) -> None:
        os.rename(self.file(directory), self.new_dir(self.path))
        os.mkdir(self.file(directory))

    def test_process_that_only_pushes_notices_a_replaced_directory(self) -> None:
        q = self.queue()
        clock = self.clock()
        q.push(b"1")
        self.moved_aside("pending")
        clock.advance(2)
        ident = q.push(b"2")
        self.assertEqual(self.names("pending"), [ident])

    def test_worker_notices_a_replaced_directory(self) -> None:
        q = self.queue()
        clock = self.clock()
        self.assertIsNone(q.pop())
        self.moved_aside("pending")
        self.queue("n2").push(b"x")
        clock.advance(2)
        self.assertEqual(popped(q).data, b"x")

    def test_push_succeeds_though_creating_was_just_replaced(self) -> None:
        self.clock().stand_still()
        q = self.queue()
        q.push(b"1")
        for push in (q.push, functools.partial(q.push, key="k")):
            os.rmdir(self.file("creating"))
            os.mkdir(self.file("creating"))
            push(b"2")
        self.assertEqual(self.drain(q), [b"1", b"2", b"2"])

    def test_join_does_not_miss_a_task_that_moves_while_pending_is_replaced(
        self,
    ) -> None:
        # RACE: another worker makes the new directory in the tick of the clock in which pending/
        # was last changed. So both directories have the same time of change. During join(), a
        # worker releases and pops the only task in such a way that no listing of join() finds the
        # task. Then the new directory replaces pending/, and the time of change is the same as when
        # join() began.
        q = self.queue()
        task = leased(q)
        fresh, pending = self.file("creating", "fresh"), self.file("pending")
        os.mkdir(fresh)
        changed_ns = os.stat(pending).st_mtime_ns
        os.utime(fresh, ns=(changed_ns, changed_ns))

        def release() -> None:
            q.release(task)

        def pop() -> None:
            nonlocal task
            task = popped(q)

        def replace() -> None:
            pop()
            os.rename(fresh, pending)

        steps: Any = deque()
        steps.append(("list", "inflight-n1", release))
        steps.append(("list", "pending", pop))
        steps.append(("list", "inflight-n1", release))
        steps.append(("lstat", "pending", replace))
        with hooked(self.in_turn(steps)):
            is_empty = self.queue("observer").join(timeout=0)
        self.assertEqual((is_empty, self.states()), (False, {"inflight-n1": 1}))
        self.assertEqual(len(steps), 0)

    def in_turn(self, steps: deque[tuple[str, str, Callable[[], object]]]) -> Hook:
        """Return a hook that does each step before a call of the event for the directory, and takes
        it from `steps`. The calls of a step itself don't count."""
        is_step = False

        def hook(name: str, args: tuple[Any, ...]) -> None:
            nonlocal is_step
            if is_step or not steps:
                return
            event, directory, happen = steps[0]
            if name == event and str(args[0]).endswith(directory):
                is_step = True
                happen()
                steps.popleft()
                is_step = False

        return hook

    def test_directory_that_can_not_be_replaced_stays_in_use(self) -> None:
        # The replacement fails on a full disk, or if the directory is a mount point.
        clock = self.clock()
        clock.stand_still()
        for call, of in (("mkdir", ".pending"), ("move", ".pending")):
            q = self.queue()
            full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
            q.pop()  # makes its lease directory
            clock.advance(1)
            before = self.opened("pending")
            self.assertIsNone(self.pop_as_if_large(q, at_call(call, of, full)))
            self.assertEqual((full.call_count > 0, self.names("creating")), (True, []))
            self.assertEqual(self.are_replaced(before), [False])


# Functions that a system may lack


class MissingFunctions(QueueCase):
    """The queue works where Python or the file system lacks a function. Without flock, a lease ends
    by its deadline only."""

    def test_waiting_pop_is_woken_where_poll_is_missing(self) -> None:
        # In a program that eventlet has patched, only select.select() exists.
        q = self.queue()
        with mock.patch.object(selectors, "PollSelector"):
            del selectors.PollSelector
            self.assertIsNone(q.pop(0.01))
            threading.Timer(0.05, q.push, [b"x"]).start()
            task = q.pop(60)
        self.assertEqual(task and task.data, b"x")

    def test_open_that_another_library_replaced_is_called_all_the_same(self) -> None:
        # As eventlet.monkey_patch() does before the program imports this module.
        real = os.open

        def replaced(
            file: str, flags: int, mode: int = 0o777, dir_fd: int | None = None
        ) -> int:
            return real(file, flags, mode, dir_fd=dir_fd)

        with mock.patch.dict(sys.modules), mock.patch("os.open", replaced):
            del sys.modules["femtoqueue"]
            green = importlib.import_module("femtoqueue")
            with green.FemtoQueue(self.path) as q:
                q.push(b"x", key="k")
                self.assertEqual(q.take("k").data, b"x")

    def check_lease_ends_by_deadline(self, module: Any) -> None:
        """Fail unless, in this module, a lease ends at its deadline and no worker is taken for
        alive or dead."""
        clock = Clock()
        clock.stand_still()
        with (
            mock.patch.object(module, "time", clock),
            module.FemtoQueue(self.path, "a") as first,
            module.FemtoQueue(self.path, "b") as second,
        ):
            first.push(b"x")
            task = first.pop()
            clock.advance(29)
            self.assertIsNone(second.pop())
            clock.advance(2)
            again = second.pop()
            self.assertEqual((again.id, again.attempts), (task.id, 2))
            self.assertRaises(module.LeaseLost, first.done, task)
            second.done(again)
            self.assertEqual(
                {node.liveness for node in second.stats().nodes}, {"unknown"}
            )
        self.assertEqual(self.states()["done"], 1)
        self.assertEqual(
            [name for name in os.listdir(self.path) if "inflight" in name], []
        )

    def test_without_fcntl_leases_end_by_their_deadlines(self) -> None:
        with mock.patch.dict(sys.modules, {"fcntl": None}):
            del sys.modules["femtoqueue"]
            bare = importlib.import_module("femtoqueue")
        self.assertIsNone(vars(bare)["fcntl"])
        self.check_lease_ends_by_deadline(bare)
        q = bare.FemtoQueue(self.path)
        line = bare.TicketQueue(self.new_dir())
        for call in (functools.partial(q.push, b"x", key="k"), line.register):
            with self.assertRaisesRegex(OSError, "need flock"):
                call()
        q.close()
        self.assertEqual(self.states(), {"done": 1})

    def test_without_flock_leases_end_by_their_deadlines(self) -> None:
        # On some file systems, flock() fails with ENOLCK or EOPNOTSUPP. On NFS, an exclusive
        # flock() may fail with EBADF.
        for code in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
            self.path = self.new_dir(self.memory)
            with mock.patch(
                "fcntl.flock", side_effect=OSError(code, os.strerror(code))
            ):
                self.check_lease_ends_by_deadline(femtoqueue)
                task = leased(q := self.queue())
            # Now flock() works again. The other worker must not end a lease that was made without a
            # lock.
            self.assertIsNone(self.queue("n2").pop())
            q.done(task)

    def test_without_hard_links_all_workers_still_share_one_clock(self) -> None:
        with hooked(at_call("link", None, errno_raiser(errno.EPERM))):
            first = self.queue("a")
            clock = self.clock()
            clock.wall_shift_s = 5000.0
            self.check_one_clock(first, self.queue("b"))
        self.assertEqual(self.names("creating"), [])

    def test_task_that_ended_before_can_end_again_where_rename_does_not_replace(
        self,
    ) -> None:
        # On Windows, rename() fails if its target exists. A person may run a task again by
        # `cp done/ID pending/`, and a task may fail twice.
        real = os.rename

        def rename(source: str, target: str, **dir_fds: int) -> None:
            if not dir_fds and os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "there already", target)
            real(source, target, **dir_fds)

        q = self.queue()
        ident = q.push(b"x")
        with mock.patch("os.rename", rename):
            for _ in range(2):
                q.done(popped(q))
                shutil.copy(self.file("done", ident), self.file("pending", ident))
            os.unlink(self.file("done", ident))
            for reason in ("first", "second"):
                q.fail(popped(q), reason)
                os.replace(self.file("failed", ident), self.file("pending", ident))
        self.assertEqual(reason_of(q, ident), "second\n")


def leave_leases(dead: FemtoQueue) -> None:
    dead.push(b"of a dead worker")
    dead.checkpoint(popped(dead), b"half way")
    for key in ("b", "d", "e"):
        dead.push(b"of a key in flight", key=key)
        popped(dead)


def make_queue_like_the_old_one(path: str) -> None:
    """Do the operations that made AN_OLD_QUEUE: they leave tasks in every state, of every kind."""
    dead = FemtoQueue(path, "dead")
    leave_leases(dead)
    with FemtoQueue(path, "n1", detached=True) as q:
        q.push(b"newer", key="b")
        q.schedule(b"newer, and later", 4e15, key="d")
        q.push(b"update", key="e", if_in_flight="update")
        q.push(b"detached")
        popped(q)
        q.push(b"done")
        q.done(popped(q))
        q.push(b"failed")
        q.fail(popped(q), "why\nso")
        q.push_many([b"back", b"front"])
        back, front = popped(q), popped(q)
        q.checkpoint(front, b"far")
        q.release(front, front=True)
        q.release(back)
        q.push(b"waiting")
        q.push(b"keyed", key="a")
        q.push(b"keyed, in UTF-8", key="\u00e4")
        q.schedule(b"later", 4e15)
        q.schedule(b"keyed, later", 4e15, key="c")
    simulate_death(dead)


# The files that make_queue_like_the_old_one() left on 28 November 2026; a str is the text of a
# symbolic link. Only the boot b0075eed is invented. Never change these files: other versions read
# and write these names and contents.
AN_OLD_QUEUE: dict[str, bytes | str] = {
    "checkpoints/01795845896573947992-63b8dc21c0463cac": (
        b"FQ1 9aacd35a 24\nFQ1 1453a677 16\nhalf way"
    ),
    "checkpoints/01795845896576896952-0ec98cc754b01d4f": b"FQ1 568099f2 18\nFQ1 fefb62f6 5\nfar",
    "clock-b0075eed": b"1795840823124645046\n",
    "done/01795845896576711906-0ec98cc754b01d4f": b"FQ1 102de0ab 4\ndone",
    "failed/01795845896576781370-0ec98cc754b01d4f": b"FQ1 9e8ba377 6\nfailed",
    "failed/01795845896576781370-0ec98cc754b01d4f.error": b"why\nso\n",
    "inflight-dead/01795845926574484492~1~b0075eed~01795845896573947992-63b8dc21c0463cac": (
        b"FQ1 1453a677 16\nof a dead worker"
    ),
    "inflight-dead/01795845926574875786~1~b0075eed~01795845896574763188-8472c2e34d854f75": (
        b"FQ1 3bbbae36 18 b\nof a key in flight"
    ),
    "inflight-dead/01795845926575065990~1~b0075eed~01795845896575006181-b5a5e556bca88c7b": (
        b"FQ1 a667a525 18 d\nof a key in flight"
    ),
    "inflight-dead/01795845926575219739~1~b0075eed~01795845896575164287-90d8a524b02f1d4f": (
        b"FQ1 7185257d 18 e\nof a key in flight"
    ),
    "inflight-n1/01795845926576685196~1~00000000~01795845896576070339-0ec98cc754b01d4f": (
        b"FQ1 e1eefb96 8\ndetached"
    ),
    "keys/01795845896575709901-8472c2e34d854f75": b"FQ1 293b30c8 5 b\nnewer",
    "keys/04000000000000000000~0~01795845896575887786-b5a5e556bca88c7b": (
        b"FQ1 eaa17fa1 16 d\nnewer, and later"
    ),
    "keys/8472c2e34d854f75": (
        "inflight-dead/01795845926574875786~1~b0075eed~01795845896574763188-8472c2e34d854f75"
        " keys/01795845896575709901-8472c2e34d854f75"
    ),
    "keys/90d8a524b02f1d4f": (
        "inflight-dead/01795845926575219739~1~b0075eed~01795845896575164287-90d8a524b02f1d4f"
        " keys/update~01795845896576034465-90d8a524b02f1d4f"
    ),
    "keys/b54a58153eb58805": "pending/01795845896577294135-b54a58153eb58805",
    "keys/b5a5e556bca88c7b": (
        "inflight-dead/01795845926575065990~1~b0075eed~01795845896575006181-b5a5e556bca88c7b"
        " keys/04000000000000000000~0~01795845896575887786-b5a5e556bca88c7b"
    ),
    "keys/b73f6364cd072c1b": (
        "scheduled/04000000000000000000~0~01795845896577402547-b73f6364cd072c1b"
    ),
    "keys/c0f89e395b66422f": "pending/01795845896577175868-c0f89e395b66422f",
    "keys/update~01795845896576034465-90d8a524b02f1d4f": b"FQ1 6d0528e7 6 e\nupdate",
    **dict.fromkeys(
        ("locks/05", "locks/1b", "locks/2f", "locks/4f", "locks/75", "locks/7b"), b""
    ),
    "pending/01795845896576896952~1~01795845896576896952-0ec98cc754b01d4f": (
        b"FQ1 fefb62f6 5\nfront"
    ),
    "pending/01795845896577079675~1~01795845896576882050-0ec98cc754b01d4f": b"FQ1 6dcec137 4\nback",
    "pending/01795845896577090721-0ec98cc754b01d4f": b"FQ1 68da8dae 7\nwaiting",
    "pending/01795845896577175868-c0f89e395b66422f": b"FQ1 9905554d 5 a\nkeyed",
    "pending/01795845896577294135-b54a58153eb58805": b"FQ1 e4c09620 15 %C3%A4\nkeyed, in UTF-8",
    "scheduled/04000000000000000000~0~01795845896577330710-0ec98cc754b01d4f": (
        b"FQ1 ec03b249 5\nlater"
    ),
    "scheduled/04000000000000000000~0~01795845896577402547-b73f6364cd072c1b": (
        b"FQ1 a997d51c 12 c\nkeyed, later"
    ),
}


class Compatibility(QueueCase):
    """Calls that worked with femtoqueue 0.4.2 still work. Files of earlier versions are still
    understood."""

    # Payload, key, attempts and checkpoint of the tasks of AN_OLD_QUEUE, in their order. The first
    # four were in flight; two of them had a newer payload behind them.
    DELIVERED: ClassVar[list[tuple[object, ...]]] = [
        (b"of a dead worker", None, 2, b"half way"),
        (b"newer", "b", 1, None),
        (b"update", "e", 2, None),
        (b"detached", None, 2, None),
        (b"front", None, 2, b"far"),
        (b"back", None, 2, None),
        (b"waiting", None, 1, None),
        (b"keyed", "a", 1, None),
        (b"keyed, in UTF-8", "\u00e4", 1, None),
    ]

    def test_queue_of_an_earlier_version_is_understood_and_delivered(self) -> None:
        self.put_old_queue()
        q = self.queue("n2")
        clock = self.clock()
        self.check_old_queue(q)
        # The leases are of another boot: the death of their worker does not end them. When the
        # deadlines have passed, such a lease runs for 30 s after the last change of the file, and
        # this test has just made the files.
        clock.advance(31)
        got = []
        while task := q.pop():
            got.append((task.data, task.key, task.attempts, task.checkpoint))
            q.done(task)
        self.assertEqual(got, self.DELIVERED)
        later = {task.data: task.key for task in q.tasks("scheduled")}
        self.assertEqual(
            later, {b"later": None, b"keyed, later": "c", b"newer, and later": "d"}
        )
        # The reclaimed task of key "d" is in scheduled/, too. It has the payload that was behind
        # it, "newer, and later", and waits for the time of this payload.
        self.assertEqual(self.states(), {"done": 10, "failed": 1, "scheduled": 3})

    def put_old_queue(self) -> None:
        for path, content in AN_OLD_QUEUE.items():
            os.makedirs(os.path.dirname(self.file(path)), exist_ok=True)
            if isinstance(content, str):
                os.symlink(content, self.file(path))
            else:
                self.put(path, content, "")

    def check_old_queue(self, q: FemtoQueue) -> None:
        stats = q.stats()
        live = stats.pending, stats.scheduled, stats.inflight, stats.buffered
        self.assertEqual((*live, stats.done, stats.failed), (5, 2, 5, 3, 1, 1))
        self.assertLessEqual({finding.kind for finding in q.check()}, {"expired"})
        (failed,), (done,) = q.tasks("failed"), q.tasks("done")
        self.assertEqual(
            (failed.data, failed.error, done.data), (b"failed", "why\nso", b"done")
        )

    def test_files_have_the_form_that_earlier_versions_read(self) -> None:
        """The operations that made AN_OLD_QUEUE still leave the same names and contents, except for
        the parts that depend on the clock, the boot or random numbers."""
        make_queue_like_the_old_one(self.path)
        written: dict[str, bytes | str] = {}
        for directory, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(directory, name)
                inside = os.path.relpath(path, self.path)
                if os.path.islink(path):
                    written[inside] = os.readlink(path)
                    continue
                with open(path, "rb") as file:
                    written[inside] = file.read()
        self.assertEqual(self.shapes(written), self.shapes(AN_OLD_QUEUE))

    def shapes(self, files: dict[str, bytes | str]) -> list[bytes]:
        """Return names and contents, with placeholders for the parts that differ in each run."""
        shapes = []
        for path, content in files.items():
            text = (
                b"-> " + os.fsencode(content) if isinstance(content, str) else content
            )
            shape = os.fsencode(path) + b"\n" + text
            shape = re.sub(rb"\b[01][0-9]{18,19}\b", b"<ns>", shape)
            shape = re.sub(rb">-[0-7][0-9a-f]{15}\b", b">-<tag>", shape)
            shape = re.sub(
                rb"(~\d~|clock-)(?!00000000)[0-9a-f]{8}\b", rb"\1<boot>", shape
            )
            shapes.append(shape)
        return sorted(shapes)

    def test_directory_of_0_4_is_not_taken_for_an_empty_queue_in_silence(self) -> None:
        """The first object that opens tasks of 0.4 logs a warning, once. Similar names get none."""
        LOG.disabled = False
        self.queue()
        for states in (["pending"], ["scheduled"], ["pending", "scheduled"]):
            self.path = self.new_dir(self.memory)
            for state in states:
                os.mkdir(self.file(state))
                self.put("2026_report.txt", b"", state)
                self.put(
                    "1795776223005118_<built-in method hex of bytes object at 0x7f00>",
                    b"",
                    state,
                )
            with self.assertLogs("femtoqueue", "WARNING") as logs:
                q, _ = self.queue(), self.queue("n2")
            self.assertEqual(len(logs.output), 1)
            self.assertIn("femtoqueue 0.4", logs.output[0])
            self.assertIn('README, "Changes"', logs.output[0])
            self.assertIsNone(q.pop())
        self.path = self.new_dir(self.memory)
        os.mkdir(self.file("pending"))
        self.put("2026_report.txt", b"")
        with self.assertNoLogs("femtoqueue"):
            self.queue()

    def test_arguments_keep_their_positions_and_names(self) -> None:
        with FemtoQueue(self.path, "node1", 100, True) as q:
            given = q.data_dir, q.node_id, q.timeout_stale_ms, q.sync_after_write
            self.assertEqual(given, (self.path, "node1", 100, True))
        with FemtoQueue(data_dir=self.path, node_id="node1", timeout_stale_ms=100) as q:
            q.schedule(data=b"x", time_us=0)
            q.fail(task=popped(q))
            q.push(data=b"x")
            q.done(task=popped(q))
        self.assertEqual(self.states(), {"failed": 1, "done": 1})


# Waiting and running


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises AssertionError if that takes longer than PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError("it did not happen")
        time.sleep(0.001)


Poll = Callable[[int], "list[Any]"]


def hooked_poll(wait: Callable[[Poll, int], list[Any]]) -> Any:
    """Let femtoqueue call wait(poll, ms) where it would wait for its descriptors for `ms`. poll(ms)
    does so."""
    system_select = selectors.PollSelector.select

    def hooked(selector: selectors.PollSelector, timeout: float) -> list[Any]:
        def poll(ms: int) -> list[Any]:
            return system_select(selector, ms / 1000)

        return wait(poll, int(timeout * 1000) + 1)

    return mock.patch.object(selectors.PollSelector, "select", hooked)


@contextlib.contextmanager
def sleepers(polling: bool = False) -> Iterator[set[int]]:
    """Yield a set, to which the identifier of each thread that sleeps in a wait is added. With
    `polling`, no sleep can be seen. Instead, the identifier of each thread that looks at the
    directories is added."""
    found: set[int] = set()

    def note(poll: Poll, ms: int) -> list[Any]:
        found.add(threading.get_ident())
        return poll(ms)

    with (
        hooked(lambda *_: found.add(threading.get_ident()))
        if polling
        else hooked_poll(note)
    ):
        yield found


class Waiting(QueueCase):
    """A wait ends when its event happens."""

    polling = False  # True in class Polling: there is no inotify

    def setUp(self) -> None:
        super().setUp()
        if self.polling:
            self.patched(without_libc())

    def start_waiting(self, *works: Callable[[], object]) -> list[threading.Thread]:
        threads = [threading.Thread(target=it, daemon=True) for it in works]
        with sleepers(self.polling) as asleep:
            for thread in threads:
                thread.start()
                self.addCleanup(thread.join, 60)
            until(
                lambda: all(it.ident in asleep or not it.is_alive() for it in threads)
            )
        self.assertTrue(all(it.is_alive() for it in threads), "it did not wait")
        return threads

    def result_of_wait(
        self, wait: Callable[[], Any], event: Callable[[], object]
    ) -> Any:
        """Start a wait in a thread, call event() when the thread sleeps, and return the result of
        the wait."""
        got = list[Any]()
        (thread,) = self.start_waiting(lambda: got.append(wait()))
        event()
        thread.join(60)
        (it,) = got
        return it

    @unittest.skipUnless(os.path.isdir("/proc/self/fd"), "no list of descriptors")
    def test_closed_queue_holds_no_descriptor_of_its_waits(self) -> None:
        """After close(), every descriptor of a wait is closed, even if another thread wakes a wait
        during close()."""
        # A look that close() meets may open directories of the queue again, so they are not
        # counted.

        def count() -> int:
            paths = [f"/proc/self/fd/{it}" for it in os.listdir("/proc/self/fd")]
            return sum(not os.path.isdir(it) for it in paths)

        before = count()
        q: Any = self.queue()
        self.assertIsNone(q.pop(0.01))
        idle = list(q._worker.waits._idle)  # empty where femtoqueue polls

        def remove(fd: int, _: int) -> None:
            q.close()
            # raises if `fd` is closed: its number may then be another file's
            os.fstat(fd)

        library = mock.Mock(inotify_rm_watch=remove)
        with seam("C library", mock.Mock(return_value=library)):
            while idle:
                # RACE: another thread wakes a wait that has just ended
                idle.pop().wake()
        q.close()
        self.assertEqual(count(), before)
        self.assertIsNone(self.result_of_wait(lambda: q.pop(60), q.close))
        self.assertEqual(count(), before)

    def two_workers(self) -> tuple[FemtoQueue, FemtoQueue]:
        """Return two queue objects on a new queue, with frequent maintenance. The leases of the
        second object have no deadline."""
        self.set_constant("base interval", 0.05)
        return self.new_queue(), self.queue("n2", timeout_stale_ms=None)

    def check_ended(
        self,
        wait: Callable[..., Any],
        event: Callable[[], object],
        result: object,
        *,
        may_lease: bool = True,
    ) -> None:
        """Fail unless a wait of the first worker ends by an event, and not before. `result` is what
        the wait must return, or the payload of the task that it must return. The worker has a lease
        directory afterwards, unless the wait may lease no task."""
        self.assertFalse(wait(timeout=0.01))
        got = self.result_of_wait(functools.partial(wait, timeout=None), event)
        self.assertEqual(getattr(got, "data", got), result)
        self.assertEqual("inflight-n1" in os.listdir(self.path), may_lease)

    def test_pop_ends_when_a_task_comes_due_or_the_queue_is_resumed(self) -> None:
        q, other = self.two_workers()
        other.schedule(b"later", 4e15)
        self.check_ended(
            q.pop, lambda: other.schedule(b"x", (time.time() + 0.05) * 1e6), b"x"
        )

        def resume() -> None:
            other.resume()
            other.resume()  # no error

        q, other = self.two_workers()
        other.push(b"x")
        other.pause()
        self.check_ended(q.pop, resume, b"x")

    def test_pop_ends_when_a_worker_dies_or_its_lease_ends(self) -> None:
        q, other = self.two_workers()
        leased(other)
        self.check_ended(q.pop, lambda: simulate_death(other), b"x")
        q, other = self.two_workers()
        task = leased(other)
        self.check_ended(q.pop, lambda: other.extend(task, 50), b"x")

    def test_take_ends_when_another_worker_pushes_or_releases_a_task_of_the_key(
        self,
    ) -> None:
        q, other = self.two_workers()
        leased(other, key="other key")
        take = functools.partial(q.take, "k")
        self.check_ended(take, lambda: other.push(b"x", key="k"), b"x")
        q, other = self.two_workers()
        task = leased(other, key="k")
        take = functools.partial(q.take, "k")
        self.check_ended(take, lambda: other.release(task), b"x")

    def test_drain_waits_for_the_leases_of_others_and_delivers_what_comes_back(
        self,
    ) -> None:
        def drain(timeout: float | None) -> FemtoTask | None:
            return next(q.drain(timeout), None)

        q, other = self.two_workers()
        task = leased(other)
        self.check_ended(drain, lambda: other.release(task, delay_s=0.05), b"x")
        q, other = self.two_workers()
        task = leased(other)
        self.check_ended(drain, lambda: other.done(task), None)

    def test_join_ends_when_all_tasks_have_ended_and_leases_none(self) -> None:
        q, other = self.two_workers()
        task = leased(other, key="k")

        def finish() -> None:
            other.push(b"buffered", key="k")
            other.done(task)
            self.assertFalse(other.join(0))
            other.done(popped(other))

        self.check_ended(q.join, finish, True, may_lease=False)

    def test_wait_ends_at_its_timeout_and_not_before(self) -> None:
        q = self.queue()
        started_s = time.monotonic()
        self.assertEqual(
            (q.pop(0.05), q.take("key", 0.05), [*q.drain(0.05)]), (None, None, [])
        )
        self.assertGreaterEqual(time.monotonic() - started_s, 0.1)

    def test_ctrl_c_ends_a_wait_with_keyboard_interrupt(self) -> None:
        q = self.queue()
        waiter = threading.get_ident()
        with sleepers(self.polling) as asleep:

            def press() -> None:
                until(lambda: waiter in asleep)
                os.kill(os.getpid(), signal.SIGINT)

            with in_threads(press):
                self.assertRaises(KeyboardInterrupt, q.pop, None)

    def test_close_ends_all_waits_and_the_object_can_be_used_again(self) -> None:
        """close() ends every kind of wait, even one that has just looked for a task."""
        # Afterwards no wait makes the lease directory again or leases a task.
        if not self.polling:
            # the sleep must end by the event of close(), not by its timeout
            self.patched(hooked_poll(lambda poll, ms: poll(2 * PATIENCE_S * 1000)))
        q, namesake = self.queue(), self.queue()
        got = list[str]()
        self.assertIsNone(namesake.pop())
        held = leased(self.queue("n2"), b"held", "k")
        wanted: dict[Callable[[], object], object] = {
            lambda: q.pop(None): None,
            lambda: q.take("k", None): None,
            lambda: q.take(id=held.id, timeout=60): None,
            lambda: [*q.drain()]: [],
            q.join: False,
            lambda: q.work(self.fail): femtoqueue.WorkCounts(),
        }
        waits = (lambda it=it: got.append(str(it())) for it in wanted)
        threads = self.start_waiting(*waits)
        q.close()
        for thread in threads:
            thread.join(60)
        self.assertEqual(sorted(got), sorted(map(str, wanted.values())))
        namesake.close()
        self.assertFalse(os.path.exists(self.file("inflight-n1")))
        q.push(b"again")
        self.assertEqual(self.pop(q).data, b"again")


class Polling(Waiting):
    """The promises of Waiting hold where there is no inotify."""

    polling = True


class WaitingWithInotify(QueueCase):
    """A wait with inotify misses no event."""

    def setUp(self) -> None:
        super().setUp()
        if through_seam("C library")() is None:
            self.skipTest("no inotify here: class Polling has the tests for that")

    def popped_after(self, *steps: Callable[[FemtoQueue], object]) -> bytes:
        """Pop a task and return its payload.

        Each time the pop() is about to sleep, after its last look, do the next step with another
        queue object. Only an event ends such a sleep, never a timeout.
        """
        q = self.queue()
        left = deque(steps)

        def sleep(poll: Poll, ms: int) -> list[Any]:
            if threading.current_thread() is not threading.main_thread():
                return poll(ms)  # a thread of an earlier test, which serves coroutines
            if left and not poll(0):
                # An object that has looked at the directories in the last 0.1 s may still push
                # into a replaced one.
                left.popleft()(self.queue("n2"))
            return poll(PATIENCE_S * 1000) or self.fail("no event came")

        with hooked_poll(sleep):
            return popped(q, 60).data

    def replace(
        self, directory: str, fresh: str = "fresh", old: str | None = "old"
    ) -> None:
        """Replace a directory of the queue by an empty one.

        The new directory is made at the path `fresh`. The replaced directory is moved to the path
        `old`, as a person does it. If `old` is None, the replaced directory must be empty, and the
        rename of the new one removes it, as the queue does it.
        """
        os.mkdir(self.file(fresh))
        if old:
            os.rename(self.file(directory), self.file(old))
        os.rename(self.file(fresh), self.file(directory))

    def max_queued_events(self) -> int:
        with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
            return int(file.read())

    def test_push_between_the_last_look_and_the_sleep_ends_the_sleep(self) -> None:
        # This also holds if a new directory has just replaced the watched one.
        def replace_scheduled(other: FemtoQueue) -> None:
            self.replace("scheduled")

        befores: list[tuple[Callable[[FemtoQueue], object], ...]] = [
            (),
            (self.push_and_replace,),
            (lambda other: self.replace("pending", "creating/fresh", None),),
            # The schedule() into the new directory must end the sleep. But pop() may list
            # scheduled/ later, to limit the cost of the wait. Then pop() sleeps again, and the next
            # step pushes b"x".
            (replace_scheduled, lambda other: other.schedule(b"due", 0)),
        ]
        if self.max_queued_events() <= 50_000:
            befores.append((self.flood_and_replace,))
        for before in befores:
            self.path = self.new_dir(self.memory)
            data = self.popped_after(*before, lambda other: other.push(b"x"))
            self.assertIn(data, (b"x", b"due"))

    def push_and_replace(self, other: FemtoQueue) -> None:
        # One read() returns the events of the push and of the replacement. After this read(), pop()
        # must watch the new directory.
        other.push(b"old")
        self.replace("pending")

    def flood_and_replace(self, other: FemtoQueue) -> None:
        """Cause so many events that the kernel drops some, then replace pending/."""
        names = self.put("a", b"foreign"), self.file("pending", "b")
        for _ in range(self.max_queued_events() // 2 + 1):
            os.rename(names[0], names[1])
            os.rename(names[1], names[0])
        self.replace("pending")

    def test_push_into_a_new_directory_before_it_is_watched_ends_the_wait(self) -> None:
        # RACE: a person replaces pending/, which ends a sleep, and pop() looks again. Another
        # worker pushes into the new directory after that look, but before pop() watches the new
        # directory. pop() must look once more instead of sleeping.
        pushes: list[Callable[[bytes], str]] = []

        def replace(other: FemtoQueue) -> None:
            self.replace("pending")
            pushes.append(other.push)

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event == "inotify" and pushes:
                pushes.pop()(b"x")

        with hooked(hear):
            self.assertEqual(self.popped_after(replace), b"x")

    def test_wait_polls_where_inotify_does_not_report_every_event(self) -> None:
        """A wait polls in three cases: hosts share the file system, inotify is missing, or the user
        has no inotify instance or watch left."""
        rows: list[tuple[Any, bool]] = [
            (contextlib.nullcontext(), False),
            (on_file_system(NFS), True),
            (without_libc(), True),
        ]
        for name in ("inotify_init1", "inotify_add_watch"):
            library = mock.Mock(wraps=through_seam("C library")())
            setattr(library, name, mock.Mock(return_value=-1))
            rows.append((seam("C library", mock.Mock(return_value=library)), True))
        for patch, polls in rows:
            with patch:
                count = self.count_looks(7, PATIENCE_S if polls else 0.5)
            self.assertEqual(count == 7, polls)

    def count_looks(self, most: int, timeout: float) -> int:
        """Let a pop() wait. Return how often it lists pending/: at most so often."""
        q = self.queue(poll_interval_s=0.01)
        looks = list[str]()

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "list" and args[0].endswith("pending"):
                looks.append(args[0])
                if len(looks) == most:
                    interrupt()

        with hooked(note), contextlib.suppress(KeyboardInterrupt):
            self.assertIsNone(q.pop(timeout))
        return len(looks)


class Coroutines(QueueCase, unittest.IsolatedAsyncioTestCase):
    """Coroutines wait without blocking the event loop. If the wait of a coroutine was cancelled, a
    task that was found for the wait goes back."""

    async def asyncSetUp(self) -> None:
        """Let a test that hangs fail: after PATIENCE_S, cancel everything that the test awaits."""
        loop = asyncio.get_running_loop()
        loop.set_debug(False)  # the default outside of tests
        loop.call_later(
            PATIENCE_S, lambda: [it.cancel() for it in asyncio.all_tasks(loop)]
        )

    async def test_close_ends_all_waits_even_while_the_thread_looks_for_them(
        self,
    ) -> None:
        """close() ends all waits of coroutines, also while a task is found for one of them."""
        q = self.queue()
        waits = asyncio.gather(q.pop_async(), q.take_async("k"), q.pop_async(60))
        await asyncio.sleep(0)
        with hooked(at_call("open", "inflight-n1/", q.close, times=1)):
            q.push(b"x")
            self.assertEqual(await waits, [None] * 3)

        def is_back() -> bool:
            leases = glob.glob(self.file("inflight-n1", "*"))
            return not leases and len(self.names("pending")) == 1

        # The thread may take the task once more. Then it gives the task back.
        await asyncio.to_thread(until, is_back)

    async def test_wait_that_begins_while_the_thread_ends_is_served_by_one_thread(
        self,
    ) -> None:
        # RACE: the thread that serves coroutines is ending because no coroutine waits, and a new
        # wait begins. Exactly one thread must serve the new wait.
        q = self.queue()
        clock = self.clock()
        monotonic = clock.monotonic
        before = threading.enumerate()
        is_ending, go = threading.Event(), threading.Event()

        def reading() -> float:
            # The thread reads the clock when it decides to end. This read takes until the new wait
            # has begun, but at most 0.1 s.
            if clock.monotonic_shift_s and threading.current_thread() not in before:
                is_ending.set()
                go.wait(0.1)
            return monotonic()

        def serving() -> int:
            return sum(it.daemon and it not in before for it in threading.enumerate())

        q.push(b"x")
        await q.pop_async()
        clock.monotonic = reading  # type: ignore[method-assign]
        clock.advance(60)
        self.assertTrue(await asyncio.to_thread(is_ending.wait, 60))
        waiter = asyncio.ensure_future(q.pop_async())
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.to_thread(until, lambda: serving() == 1)
        q.push(b"x")
        self.assertIsNotNone(await waiter)

    async def test_queue_is_collected_after_a_wait(self) -> None:
        """A queue object that is dropped after a wait gives its lease back, and leaves no open
        file."""
        opened = len(os.listdir("/dev/fd"))
        q = FemtoQueue(self.path)
        q.push(b"x")
        self.assertIsNotNone(await q.pop_async())
        del q
        other = self.queue()
        await asyncio.to_thread(until, lambda: bool(other.pop()))
        other.close()
        self.assertLess(len(os.listdir("/dev/fd")), opened + 14)

    def test_wait_of_a_loop_that_does_not_run_takes_no_task(self) -> None:
        """A coroutine whose event loop was stopped or closed takes no task."""
        q = self.queue()
        loop = asyncio.new_event_loop()
        waiter = loop.create_task(q.pop_async())
        loop.run_until_complete(asyncio.sleep(0.05))
        q.push(b"1")
        time.sleep(0.1)
        self.assertEqual(self.states(), {"pending": 1})
        self.assertEqual(self.drain(q), [b"1"])
        waiter.cancel()
        loop.run_until_complete(asyncio.gather(waiter, return_exceptions=True))
        loop.close()

    async def test_each_of_fifty_waits_gets_a_task_while_fifty_others_are_cancelled(
        self,
    ) -> None:
        """Each wait that is not cancelled gets one of 1000 tasks, and the other 950 stay in
        pending/."""
        # No task stays leased to a cancelled wait, and no delivery to a cancelled wait is counted.
        q, other = self.queue(), self.queue("n2")
        waiters = [asyncio.ensure_future(q.pop_async()) for _ in range(100)]
        await asyncio.sleep(0.01)
        for number in range(1000):
            other.push(b"%d" % number)
            if number < 50:
                waiters[2 * number].cancel()
                await asyncio.sleep(0)
        results = await asyncio.gather(*waiters, return_exceptions=True)
        tasks = [it for it in results[1::2] if isinstance(it, FemtoTask)]
        self.assertEqual(len({task.id for task in tasks}), 50)
        for task in tasks:
            q.done(task)
        until(lambda: not self.names("inflight-n1"))
        q.close()
        self.assertEqual(self.states(), {"done": 50, "pending": 950})
        attempts = {task.attempts for task in iter(other.pop, None)}
        self.assertEqual(attempts, {1}, "a delivery to a cancelled wait was counted")

    async def answered(self, wait: Any) -> asyncio.Future[Any]:
        """Start a wait for a task that is there. Return the future of the wait when the task was
        found, but not yet returned."""
        answered = threading.Event()
        loop = asyncio.get_running_loop()
        tell = loop.call_soon_threadsafe

        def told(*args: Any) -> Any:
            answered.set()
            return tell(*args)

        with mock.patch.object(loop, "call_soon_threadsafe", told):
            waiter: asyncio.Future[Any] = asyncio.ensure_future(wait)
            await asyncio.sleep(0)
            answered.wait(PATIENCE_S)  # the loop does not run meanwhile
        return waiter

    async def test_cancelled_wait_does_not_block_the_loop_while_the_key_is_locked(
        self,
    ) -> None:
        """If a wait is cancelled just after its task was found, and another process holds the lock
        of the key, the event loop runs on. When the lock is free, the next pop() puts the task
        back, uncounted."""
        q = self.queue(timeout_stale_ms=None)
        q.push(b"x", key="k")
        waiter = await self.answered(q.take_async("k"))
        locked = self.locked("k")
        unlocking = threading.Timer(PATIENCE_S, locked.close)
        unlocking.start()
        waiter.cancel()
        await asyncio.wait([waiter])
        self.assertEqual((waiter.cancelled(), locked.closed), (True, False))
        unlocking.cancel()
        locked.close()
        task = popped(q)
        self.assertEqual((task.data, task.attempts), (b"x", 1))

    @FORK
    async def test_forked_child_does_not_give_back_the_task_of_its_parents_wait(
        self,
    ) -> None:
        # RACE: the process forks when a task was found for a wait, but not yet returned. The child
        # cancels its copy of the wait when the child ends. The parent keeps the lease.
        q = self.queue()
        q.push(b"x")
        waiter = await self.answered(q.pop_async())
        pid = os.fork()
        if pid == 0:
            waiter.cancel()
            with contextlib.suppress(BaseException):
                await waiter
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertIsNotNone(await waiter)
        self.assertEqual(self.states(), {"inflight-n1": 1})

    async def test_task_found_for_a_wait_that_was_cancelled_goes_back_to_its_place(
        self,
    ) -> None:
        # A task of scheduled/ must not be delivered before its time, and a task of pending/ must
        # not overtake others.
        q = self.queue()
        retried = q.push(b"old")
        later = q.schedule(b"later", time.time() * 1e6 + 3.6e9)
        q.fail(self.pop(q))
        q.push(b"1")
        q.retry(retried)
        take_retried = functools.partial(q.take_async, id=retried)
        take_later = functools.partial(q.take_async, id=later)
        for look in (q.pop_async, take_retried, take_later):
            with self.subTest(look):
                await self.cancel_while_reading(look)
        self.assertEqual(self.pop(q).attempts, 1)

    async def cancel_while_reading(self, look: Any) -> None:
        """Cancel a wait while the thread that found the task is still reading the file. The event
        loop runs on meanwhile. Fail unless the task goes back."""
        before = self.names("pending"), self.names("scheduled")
        got, go = threading.Event(), threading.Event()

        def read_slowly() -> None:
            got.set()
            go.wait(2 * PATIENCE_S)

        def is_back() -> bool:
            return (self.names("pending"), self.names("scheduled")) == before

        with hooked(at_call("open", "inflight-n1/", read_slowly)):
            waiter = asyncio.ensure_future(look())
            await asyncio.to_thread(got.wait, PATIENCE_S)
            waiter.cancel()
            go.set()
            await asyncio.wait([waiter])
            self.assertTrue(waiter.cancelled())
            await asyncio.to_thread(until, is_back)

    async def test_waits_are_served_in_their_order_and_each_key_has_its_own_line(
        self,
    ) -> None:
        q = self.queue()
        order = list[bytes]()

        async def wait(look: Any) -> None:
            order.append((await look).data)

        looks = [q.pop_async(), q.take_async("key"), q.pop_async(), q.take_async("key")]
        waiters = [asyncio.create_task(wait(look)) for look in looks]
        await asyncio.sleep(0.01)
        for data, key, served in ((b"1", None, 0), (b"2", None, 2), (b"3", "key", 1)):
            q.push(data, key=key)
            await waiters[served]
        self.assertFalse(waiters[3].done())
        waiters[3].cancel()
        self.assertEqual(order, [b"1", b"2", b"3"])

    async def test_wait_raises_the_error_of_its_look(self) -> None:
        q = self.queue()
        q.push(b"x", key="k")
        with hooked(at_call("move", "/pending/", errno_raiser(errno.EIO))):
            for look in (q.pop_async(), q.take_async("k")):
                with self.assertRaisesRegex(OSError, r"\[Errno 5\]"):
                    await look
        self.assertIsNotNone(await q.pop_async())

    async def test_wait_that_was_never_first_in_line_times_out_after_a_look(
        self,
    ) -> None:
        """Each wait looks at least once, so that even with a timeout of 0 it finds a task that is
        there."""
        q = self.queue()
        first = asyncio.create_task(q.pop_async())
        await asyncio.sleep(0)
        self.assertIsNone(await q.pop_async(0.01))
        q.pause()
        q.push_many([b"1", b"2"])
        self.assertIsNone(await q.pop_async(0))
        q.resume()
        got = await asyncio.gather(first, q.pop_async(60))
        self.assertEqual({task.data for task in got if task}, {b"1", b"2"})

    def test_several_event_loops_and_threads_can_wait_on_one_object(self) -> None:
        q = self.queue()
        got = list[bytes]()

        async def wait() -> None:
            tasks = await asyncio.gather(*(q.pop_async(60) for _ in range(5)))
            got.extend(task.data for task in tasks if task)

        loops = [lambda: asyncio.run(wait())] * 2
        with in_threads(*loops, lambda: got.append(popped(q, 60).data)):
            q.push_many(b"%d" % number for number in range(11))
        self.assertEqual(sorted(got, key=int), [b"%d" % number for number in range(11)])


class AsyncProcessing(QueueCase, unittest.IsolatedAsyncioTestCase):
    """`async with q.processing(task)` ends a delivery as `with` does, without blocking the loop."""

    async def run_block(
        self, q: FemtoQueue, error: BaseException | None = None
    ) -> None:
        async with q.processing(leased(q)):
            if error is not None:
                raise error

    async def test_task_is_settled_by_the_way_its_block_ends(self) -> None:
        q = self.queue(retry_delay_s=100)
        await self.run_block(q)
        with self.assertRaisesRegex(ValueError, "no such image"):
            await self.run_block(q, ValueError("no such image"))
        with self.assertRaises(asyncio.CancelledError):
            await self.run_block(q, asyncio.CancelledError())
        self.assertEqual(self.states(), {"done": 1, "scheduled": 1, "pending": 1})

    async def test_lost_lease_is_told_at_the_end_of_the_block(self) -> None:
        q = self.queue()
        task = leased(q)
        with self.assertRaises(LeaseLost):
            async with q.processing(task):
                q.close()

    async def test_loop_goes_on_while_the_end_waits_for_the_lock_of_the_key(
        self,
    ) -> None:
        q = self.queue()
        task = leased(q, key="k")
        lock = self.locked("k")

        async def work() -> None:
            async with q.processing(task):
                pass

        worker = asyncio.ensure_future(work())
        for _ in range(100):
            await asyncio.sleep(0.001)
        self.assertFalse(worker.done())
        lock.close()
        await worker
        self.assertEqual(self.states(), {"done": 1})

    async def test_cancelled_end_settles_the_task_though_all_threads_are_busy(
        self,
    ) -> None:
        q = self.queue()
        go = threading.Event()
        executor = concurrent.futures.ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        busy = asyncio.ensure_future(asyncio.to_thread(go.wait, PATIENCE_S))
        worker = asyncio.ensure_future(self.run_block(q))
        await asyncio.sleep(0.01)  # the end of the block is in line behind go.wait()
        self.assertEqual(self.states(), {"inflight-n1": 1})
        worker.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await worker
        go.set()
        await busy
        await asyncio.to_thread(int)  # in line behind the end of the block
        self.assertEqual(self.states(), {"done": 1})

    async def test_coroutine_that_is_closed_in_its_block_gives_the_task_back(
        self,
    ) -> None:
        q = self.queue()

        async def work() -> None:
            async with q.processing(leased(q)):
                await asyncio.sleep(PATIENCE_S)

        coroutine = work()
        coroutine.send(None)
        coroutine.close()
        self.assertEqual(self.states(), {"pending": 1})


class PollingCoroutines(Coroutines):
    """The promises of Coroutines hold where there is no inotify."""

    def setUp(self) -> None:
        super().setUp()
        self.patched(without_libc())


def no_more_threads() -> Any:
    return mock.patch.object(
        threading.Thread, "start", side_effect=RuntimeError("no more")
    )


class Processing(QueueCase):
    """processing() renews the lease of a task and ends its delivery, and a checkpoint is kept for
    the next delivery."""

    def setUp(self) -> None:
        super().setUp()
        self.threads = {*threading.enumerate()}

    def new_threads(self) -> set[threading.Thread]:
        return {*threading.enumerate()} - self.threads

    def test_block_that_ends_after_its_queue_was_closed_settles_nothing(self) -> None:
        # A block of processing() may be in a generator that is never finished. The garbage
        # collector may then finalize the queue before the block.
        q = self.queue()
        with self.assertRaises(LeaseLost), q.processing(leased(q)):
            q.__del__()
        self.assertEqual(self.states(), {"pending": 1})

    def test_task_is_settled_by_the_way_its_block_ends(self) -> None:
        """A block that ends normally finishes its task. An exception puts the task back, or makes a
        dead letter of it at max_attempts."""
        # KeyboardInterrupt, SystemExit and CancelledError put the task back to its place,
        # uncounted, even at max_attempts. Other exceptions put the task back for later. LeaseLost
        # of another task counts as an ordinary exception.
        for error, max_attempts, state in (
            (None, 1, "done"),
            (ValueError("no such image"), 2, "scheduled"),
            (ValueError("no such image"), None, "scheduled"),
            (ValueError("no such image"), 1, "failed"),
            (LeaseLost("0" * 20, True, "of another task"), None, "scheduled"),
            (KeyboardInterrupt(), 1, "pending"),
            (SystemExit(1), 1, "pending"),
            (asyncio.CancelledError(), 1, "pending"),
        ):
            q = self.queue(max_attempts=max_attempts)
            task = leased(q)
            q.push(b"next")
            self.run_block(q, task, error)
            self.assertEqual(self.check_invariants()[task.id], state)
            if state == "pending":
                again = self.pop(q)
                self.assertEqual((again.id, again.attempts), (task.id, 1))
                q.done(again)
            if state == "failed":
                self.assertRegex(
                    reason_of(q, task.id), r"(?s)Traceback.*ValueError: no such image"
                )
            q.done(self.pop(q))

    def run_block(
        self, q: FemtoQueue, task: FemtoTask, error: BaseException | None
    ) -> None:
        """Raise an error in the block of processing(). Fail unless the block raises it."""
        raised = None
        try:
            with q.processing(task) as given:
                self.assertIs(given, task)
                if error is not None:
                    raise error
        except BaseException as it:
            raised = it
        self.assertIs(raised, error)

    def test_task_is_tried_again_after_a_random_delay_that_doubles(self) -> None:
        # The longest delay doubles with each attempt, up to an hour. A random part of up to half of
        # the longest delay is subtracted.
        q = self.queue(retry_delay_s=100)
        clock = self.clock()
        clock.stand_still()
        for attempts, longest_s in (
            (1, 100),
            (2, 200),
            (5, 1600),
            (7, 3600),
            (99_999, 3600),
        ):
            delays_s = [self.delay_s(q, clock, attempts) for _ in range(50)]
            self.assertLessEqual(max(delays_s), longest_s)
            self.assertGreaterEqual(min(delays_s), longest_s / 2)
            self.assertGreater(len({*delays_s}), 10, "the delays are not random")

    def delay_s(self, q: FemtoQueue, clock: Clock, attempts: int) -> float:
        """Let the given attempt of a task fail; return the delay, in seconds, until the task is due
        again."""
        ident = q.push(b"x")
        name = f"{ident[:20]}~{attempts - 1}~{ident}"
        os.rename(self.file("pending", ident), self.file("pending", name))
        with contextlib.suppress(ValueError), q.processing(popped(q)) as task:
            self.assertEqual((task.id, task.attempts), (ident, attempts))
            raise ValueError
        (name,) = self.names("scheduled")
        os.unlink(self.file("scheduled", name))
        return int(name[:20]) / 1e9 - clock.time()

    # Renewal

    def renewing_queue(self) -> FemtoQueue:
        """Return a queue object that renews its leases of a minute every 0.02 s."""
        self.set_constant("renewal", 0.001)
        return self.queue(timeout_stale_ms=60_000)

    def until_renewed(self, *tasks: FemtoTask) -> None:
        before = [task.path for task in tasks]
        until(lambda: all(a != b.path for a, b in zip(before, tasks, strict=True)))

    def left_s(self, task: FemtoTask, shift_s: float = 0) -> float:
        """Return for how many seconds the lease of a task still lasts. shift_s: by how much the
        clock of the test is ahead."""
        assert task.until is not None
        return task.until.timestamp() - time.time() - shift_s

    def test_block_longer_than_three_leases_keeps_its_lease(self) -> None:
        q, other = self.queue(timeout_stale_ms=300), self.queue("n2")
        clock = self.clock()
        end_s = clock.time() + 3 * 0.3
        clock.go_on_in_sleeps(lambda: clock.time() < end_s)
        with q.processing(leased(q)):
            until(lambda: bool(other.pop()) or clock.time() >= end_s)
        self.assertEqual(self.states(), {"done": 1})

    def test_one_thread_renews_all_leases_and_ends_with_the_last_block(self) -> None:
        # A lease without a deadline needs no thread.
        q = self.renewing_queue()
        endless = self.queue("n2", timeout_stale_ms=None)
        with endless.processing(leased(endless)):
            self.assertEqual(self.new_threads(), set())
        first, second = leased(q), leased(q)
        with q.processing(first), q.processing(second):
            self.assertEqual(len(self.new_threads()), 1)
            self.until_renewed(first, second)
        until(lambda: not self.new_threads())
        with q.processing(leased(q)) as task:
            self.until_renewed(task)

    def test_task_is_finished_while_another_thread_renews_its_lease(self) -> None:
        for key in (None, "k"):
            q = self.new_queue()
            task = leased(q, b"x", key)
            thread = threading.Thread(target=q.done, args=(task,))

            def begin(thread: threading.Thread = thread) -> None:
                thread.start()
                thread.join(0.1)  # it waits for the lock of the renewal

            with hooked(at_call("move", "/inflight-", begin, times=1)):
                q.extend(task)
            thread.join(PATIENCE_S)
            self.assertEqual(self.states(), {"done": 1})

    def test_dropped_object_gives_up_its_lease_directory_at_once_and_leaves_no_thread(
        self,
    ) -> None:
        # This also holds for an object that leased no task, and only renewed the lease of another
        # object through attach().
        holder = self.queue("n2")
        for is_attached in (False, True):
            q = FemtoQueue(self.path, "gone", timeout_stale_ms=3_600_000)
            task = leased(holder if is_attached else q)
            with q.processing(q.attach(task.path) if is_attached else task):
                pass
            del q, task
            self.assertNotIn("inflight-gone", os.listdir(self.path))
            gc.collect()
            until(lambda: not self.new_threads())

    def test_lease_with_its_own_length_is_renewed_for_that_length(self) -> None:
        # A short lease is renewed in time even if the thread already renews longer leases at longer
        # intervals. A lease that has almost ended is renewed when its block begins.
        self.set_constant("renewal", 0.01)
        q = self.queue(timeout_stale_ms=36_000_000)
        clock = self.clock()
        q.push_many([b"old", b"long", b"short"])
        old = self.pop(q)
        clock.advance(35_900)
        long = self.pop(q)
        short = q.pop(lease_ms=20_000)
        assert short is not None
        lease = long.path
        with q.processing(old), q.processing(long), q.processing(short):
            self.assertGreater(self.left_s(old, clock.wall_shift_s), 35_900)
            self.until_renewed(short)
            self.assertEqual(long.path, lease)
        self.assertEqual(self.states(), {"done": 3})

    def test_renewal_that_fails_is_tried_again_and_does_not_stop_other_renewals(
        self,
    ) -> None:
        # A renewal may fail because of a disk error, or because a stopped process holds the lock of
        # the key. The renewal is tried again even if the warning can't be logged.
        q = self.renewing_queue()
        handler = logging.Handler()
        LOG.disabled = False
        LOG.addHandler(handler)
        self.addCleanup(LOG.removeHandler, handler)
        keyed = leased(q, key="k")
        with (
            q.processing(leased(q)) as task,
            q.processing(leased(q)) as other,
            q.processing(keyed),
        ):
            with (
                self.locked("k"),
                hooked(at_call("move", task.id, errno_raiser(errno.EIO))),
                mock.patch.object(handler, "handle", side_effect=SystemExit) as handle,
            ):
                before = keyed.path
                until(lambda: handle.call_count > 3)
                self.until_renewed(other)
                self.assertEqual(keyed.path, before)
            self.until_renewed(task, keyed)
        self.assertEqual(self.states(), {"done": 3})

    def test_block_that_fails_to_begin_leaves_no_lease_that_is_renewed(self) -> None:
        """If a block does not begin, no thread goes on to renew its lease, and the next block
        works."""
        # __enter__() raises if its thread can't be started, or if Ctrl-C comes. Ctrl-C may also
        # come when __enter__() has returned, but before the `with` statement has noted that.
        q = self.renewing_queue()
        task = leased(q)
        start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            raise KeyboardInterrupt

        def enter() -> None:
            q.processing(task).__enter__()

        with no_more_threads():
            self.assertRaises(RuntimeError, enter)
        with mock.patch("threading.Thread.start", interrupted):
            self.assertRaises(KeyboardInterrupt, enter)
        for _ in range(2):
            gc.collect()
            until(lambda: not self.new_threads())
            enter()
        with q.processing(task):
            self.until_renewed(task)

    # Lost leases

    def test_lost_lease_raises_at_either_end_of_the_block_and_changes_nothing(
        self,
    ) -> None:
        # An exception of the block is the cause of LeaseLost; but SystemExit is raised as it is. A
        # block with a task that was never leased raises LeaseLost as well.
        for cause in (None, ValueError("the cause"), SystemExit("told")):
            q, other = self.queue(), self.queue("n2")
            clock = self.clock()
            task = leased(q)
            with (
                self.assertRaises((LeaseLost, SystemExit)) as caught,
                q.processing(task),
            ):
                clock.advance(31)
                newer = self.pop(other)
                if cause is not None:
                    raise cause
            error = caught.exception
            self.assertIs(
                error if isinstance(cause, SystemExit) else error.__cause__, cause
            )
            for it in (task, FemtoTask("0" * 20, b"")):
                with self.assertRaises(LeaseLost), q.processing(it):
                    self.fail("the block must not begin")
            self.assertEqual((newer.attempts, self.states()["inflight-n2"]), (2, 1))
            other.done(newer)

    @FORK
    def test_forked_child_that_leaves_the_block_does_not_settle_the_task(self) -> None:
        q = self.queue()
        block = q.processing(leased(q))
        with block:
            child = self.child(lambda _: block.__exit__(SystemExit, SystemExit(), None))
            self.assertEqual(child.finish()[1], 0)
            self.assertEqual(self.states(), {"inflight-n1": 1})

    # Checkpoints

    def test_failed_checkpoint_leaves_the_former_one_and_a_torn_one_is_ignored(
        self,
    ) -> None:
        q = self.queue()
        task = leased(q)
        q.checkpoint(task, b"former")
        with hooked(at_call("move", f"checkpoints/{task.id}", errno_raiser(errno.EIO))):
            self.assertRaises(OSError, q.checkpoint, task, b"newer")
        self.check_invariants()
        q.release(task)
        task = self.pop(q)
        self.assertEqual(task.checkpoint, b"former")
        os.truncate(self.file("checkpoints", task.id), 20)
        q.release(task)
        self.assertIsNone(self.pop(q).checkpoint)

    def test_checkpoint_that_was_saved_more_than_a_month_ago_is_deleted(self) -> None:
        # A person may have removed its task. The checkpoint of a task that waits goes, too: the
        # work on the task begins anew.
        q = self.queue()
        clock = self.clock()
        for _ in range(2):
            task = leased(q)
            q.checkpoint(task, b"x")
            q.release(task, delay_s=86400)
        os.unlink(self.file("scheduled", self.names("scheduled")[0]))
        for days, left in ((29, 2), (2, 0)):
            clock.advance(days * 86400)
            q.pause()
            self.assertIsNone(q.pop())
            self.assertEqual(len(self.names("checkpoints")), left)
            q.resume()
        task = self.pop(q)
        self.assertEqual((task.checkpoint, task.attempts), (None, 2))


class End(NamedTuple):
    """What ends work()."""

    handle: Callable[[], object]  # what each handler does
    patch: Callable[[], Any]  # in effect while work() runs
    error: Any  # what work() raises
    is_done: bool  # whether the handled tasks are done


class Work(QueueCase):
    """work() calls a handler for each task, until something ends it, and returns the counts."""

    def test_work_counts_the_outcomes_and_goes_on_after_a_failure(self) -> None:
        """work() goes on whatever exception the handler raises, even one whose str() raises."""
        # A lost lease does not count as a failure.
        q = self.queue(max_attempts=2, retry_delay_s=0)
        other = self.queue("n2")
        clock = self.clock()
        q.push_many([b"lost", b"good", b"bad", b"good"])

        class Unspeakable(ValueError):
            def __str__(self) -> str:
                raise RuntimeError

        def handle(task: FemtoTask) -> None:
            if task.data == b"bad":
                raise Unspeakable
            if task.data == b"lost" and task.attempts == 1:
                clock.advance(31)
                other.release(self.pop(other), counted=False)

        LOG.disabled = False
        with self.assertLogs("femtoqueue", "WARNING") as logs:
            counts = q.work(handle, drain=True)
        self.assertEqual(
            counts, femtoqueue.WorkCounts(done=3, retried=1, failed=1, lost=1)
        )
        # A retry is a warning, a dead letter an error.
        levels = [it.levelname for it in logs.records if " failed, " in it.getMessage()]
        self.assertEqual(levels, ["WARNING", "ERROR"])
        self.check_tracebacks(next(it for it in logs.output if "dead letter" in it))
        self.assertEqual(self.states(), {"done": 3, "failed": 1})

    def test_work_goes_on_if_a_failure_can_not_be_logged(self) -> None:
        """A log handler may raise, and so may an odd exception of the handler."""

        class Odd(Exception):
            def with_traceback(self, traceback: Any) -> Any:
                raise ValueError

        class Broken(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise RuntimeError

        LOG.disabled = False
        for error, handler in ((Odd, logging.NullHandler), (ValueError, Broken)):
            for concurrency in (1, 2):
                q = self.new_queue(max_attempts=1)
                bad, *_ = q.push_many([b"bad", b"1", b"2"])

                def handle(task: FemtoTask, bad: str = bad, error: Any = error) -> None:
                    if task.id == bad:
                        raise error

                with mock.patch.object(LOG, "handlers", [handler()]):
                    counts = q.work(handle, concurrency=concurrency, drain=True)
                self.assertEqual((counts.done, counts.failed), (2, 1))

    def check_tracebacks(self, message: str) -> None:
        """Fail unless the tracebacks of the dead letter, in the logged message and in failed/,
        begin with the handler."""
        wanted = r"(?s)dead letter.*Traceback.*in handle\n.*Unspeakable"
        self.assertRegex(message, wanted)
        (reason,) = [name for name in self.names("failed") if name.endswith(".error")]
        with open(self.file("failed", reason), encoding="utf-8") as file:
            for traceback in message, file.read():
                self.assertNotIn(f'File "{femtoqueue.__file__}"', traceback)

    def test_work_with_drain_waits_for_scheduled_tasks_and_for_leases_of_others(
        self,
    ) -> None:
        # With drain=True, work() calls drain() repeatedly. Each call has the base interval as its
        # timeout. Here a task comes only after several such calls.
        self.set_constant("base interval", 0.02)
        q, other = self.queue(), self.queue("n2", timeout_stale_ms=100)
        for concurrency in (1, 3):
            q.schedule(b"later", (time.time() + 0.1) * 1e6)
            counts = [q.work(lambda _: None, concurrency=concurrency, drain=True)]
            leased(other)
            counts += [q.work(lambda _: None, concurrency=concurrency, drain=True)]
            self.assertEqual([it.done for it in counts], [1, 1])

    def test_work_takes_no_more_tasks_after_anything_that_ends_it(self) -> None:
        """When work() is stopped, reaches its time limit or meets an error, it finishes the running
        tasks and takes no more."""
        # A task whose handler was not begun goes back uncounted. So does the task of a handler that
        # raises SystemExit. If done() fails or is interrupted, the delivery counts, so that the
        # task becomes a dead letter after max_attempts.
        clock = self.clock()
        stop = threading.Event()
        unpatched = contextlib.nullcontext
        at_done = functools.partial(at_call, "move", "/done/")
        # fmt: off
        ends = (
            End(stop.set, unpatched, None, True),
            End(lambda: clock.advance(61), unpatched, None, True),
            End(sys.exit, unpatched, SystemExit, False),
            End(int, lambda: hooked(at_call("open", "inflight-n1/", stop.set)), None, False),
            End(int, lambda: hooked(at_done(errno_raiser(errno.EIO))), OSError, False),
            End(int, lambda: hooked(at_done(interrupt)), KeyboardInterrupt, False),
            End(int, no_more_threads, RuntimeError, False),
        )
        # fmt: on
        for concurrency, end in itertools.product((1, 2), ends):
            with self.subTest(end.error, concurrency=concurrency, is_done=end.is_done):
                stop.clear()
                self.check_end(end, stop, concurrency)

    def check_end(self, end: End, stop: threading.Event, concurrency: int) -> None:
        q = self.new_queue(max_attempts=2)
        handled = list[FemtoTask]()
        q.push_many([b"x"] * 9)

        def handle(task: FemtoTask) -> None:
            handled.append(task)
            end.handle()

        error = end.error
        raises = self.assertRaises(error) if error else contextlib.nullcontext()
        with raises, end.patch():
            q.work(
                handle, concurrency=concurrency, drain=True, stop=stop, time_limit_s=60
            )
        self.assertLessEqual(len(handled), concurrency)
        done = self.states()["done"]
        self.assertEqual(done, len(handled) if end.is_done else 0)
        again = Counter(task.attempts for task in iter(q.pop, None))
        failed = len(handled) if error in (OSError, KeyboardInterrupt) else 0
        self.assertEqual(again, Counter({1: 9 - done - failed, 2: failed}))

    def test_work_goes_on_if_the_end_of_a_task_fails_because_of_its_file(self) -> None:
        """If the file of one task may be neither moved nor removed, work() logs it, and handles the
        other tasks. The task is delivered again."""
        self.set_constant("base interval", 0.02)
        for concurrency in (1, 2):
            q = self.new_queue()
            bad, *_ = q.push_many([b"bad", b"1", b"2"])
            refuse = errno_raiser(errno.EACCES)
            moved = at_call("move", f"/done/{bad}", refuse, times=1)
            removed = at_call("unlink", bad, refuse, times=1)

            def fails(
                name: str, args: tuple[Any, ...], of: Any = (moved, removed)
            ) -> None:
                for hook in of:
                    hook(name, args)

            with self.subTest(concurrency), hooked(fails):
                counts = q.work(lambda _: None, concurrency=concurrency, drain=True)
            self.assertEqual((counts.done, counts.lost), (3, 1))

    def test_disk_error_after_a_signal_is_only_logged(self) -> None:
        """If a signal stops work(), an error of the disk at the end of a task is logged, in one
        line."""
        q = self.queue()
        q.push(b"x")

        def handle(task: FemtoTask) -> None:
            signal.raise_signal(signal.SIGTERM)

        fail = at_call("move", "/done/", errno_raiser(errno.EIO))
        LOG.disabled = False
        logs = self.assertLogs("femtoqueue", "WARNING")
        with hooked(fail), seam("stop line", mock.Mock()), logs as logged:
            self.assertEqual(q.work(handle).lost, 1)
        [said] = logged.output
        self.assertNotIn("\n", said)

    def test_work_raises_a_disk_error_of_pop_when_running_tasks_are_finished(
        self,
    ) -> None:
        q = self.queue()
        broken = threading.Event()
        q.push(b"x")

        def fail(name: str, args: tuple[Any, ...]) -> None:
            is_listing = name == "list" and args[0].endswith("pending")
            if is_listing and not self.names("pending"):
                broken.set()
                raise_errno(errno.ENOSPC)

        with hooked(fail), self.assertRaises(OSError):
            q.work(lambda _: broken.wait(60), concurrency=2)
        self.assertEqual(self.states(), {"done": 1})

    def test_work_returns_when_idle_but_not_while_it_runs_a_task(self) -> None:
        """An idle work() returns even if other workers hold leases, but not while a task of its own
        runs."""
        q, other = self.queue(), self.queue("n2")
        second = threading.Event()
        q.push_many([b"theirs", b"first"])
        self.assertEqual(self.pop(other).data, b"theirs")
        found_nothing = threading.Semaphore(0)
        pop = FemtoQueue.pop

        def noting_pop(q: FemtoQueue, timeout: float) -> FemtoTask | None:
            task = pop(q, timeout)
            if task is None:
                found_nothing.release()
            return task

        def handle(task: FemtoTask) -> None:
            if task.data == b"first":
                for _ in range(2):
                    # the other thread finds no task, and goes on to wait
                    self.assertTrue(found_nothing.acquire(timeout=30))
                q.push(b"second")
                self.assertTrue(second.wait(60))
            else:
                second.set()

        with mock.patch.object(FemtoQueue, "pop", noting_pop):
            self.assertEqual(q.work(handle, concurrency=2, idle_timeout_s=0).done, 2)
            self.assertEqual(q.work(handle, idle_timeout_s=0).done, 0)

    def test_work_restores_the_signal_handlers(self) -> None:
        """work() restores the handlers of signals when it returns. A signal that was ignored
        before, as under nohup, stays ignored while work() runs."""
        q = self.queue()
        numbers = (signal.SIGINT, signal.SIGTERM)
        q.push_many([b"x", b"x"])
        self.addCleanup(
            signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN)
        )
        before = [signal.getsignal(number) for number in numbers]
        counts = q.work(lambda _: os.kill(os.getpid(), signal.SIGINT), drain=True)
        after = [signal.getsignal(number) for number in numbers]
        self.assertEqual((counts.done, after), (2, before))

    @FORK
    def test_first_signal_is_answered_by_a_line(self) -> None:
        """work() writes the line that the command `work` writes, unless that would block."""
        self.queue().push(b"x")
        code = "from femtoqueue import FemtoQueue; import os, sys; q = FemtoQueue(sys.argv[1])\n"
        code += "print(q.work(lambda _: os.kill(os.getpid(), 2)).done)"
        run = functools.partial(run_guarded, sys.executable, "-c", code, self.path)
        wanted = (
            "\nfemtoqueue: the running tasks may finish; a second signal ends them\n"
        )
        self.assertEqual(run(env=os.environ), (0, "1\n", wanted))

    @FORK
    def test_signal_ends_a_child_process_that_a_handler_forked(self) -> None:
        def terminate(_: Child) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_S)

        q = self.queue()
        ends = list[int]()
        q.push(b"x")
        counts = q.work(
            lambda _: ends.append(self.child(terminate).finish()[1]), drain=True
        )
        self.assertEqual((ends, counts.done), ([-signal.SIGTERM], 1))

    def test_running_tasks_are_finished_after_a_signal_and_given_back_after_a_second_one(
        self,
    ) -> None:
        """After a signal, work() takes no more tasks, and after a second one it gives back the
        running tasks to their places, uncounted."""
        # Two signals within the time "one signal" count as one, because timeout(1) sends one to the
        # process and one to its process group. If this time is 0, they count as two. The barrier
        # shows that `concurrency` handlers run at a time.
        for concurrency, end, one_signal_s in (
            (1, "done", PATIENCE_S),
            (1, "released", 0),
            (2, "released", 0),
        ):
            q = self.new_queue()
            begun = threading.Barrier(concurrency)
            is_over = threading.Event()
            q.push_many([b"0", b"1", b"2"])

            def handle(
                _: object, end: str = end, begun: Any = begun, over: Any = is_over
            ) -> None:
                if begun.wait(PATIENCE_S) == 0:
                    for number in (signal.SIGTERM, signal.SIGINT):
                        os.kill(os.getpid(), number)
                until(lambda: end == "done" or over.is_set())

            with with_constant("one signal", one_signal_s):
                counts = q.work(handle, concurrency=concurrency)
            is_over.set()
            self.assertEqual(counts, femtoqueue.WorkCounts(**{end: concurrency}))
            left = [(it.data, it.attempts) for it in iter(self.queue("n2").pop, None)]
            self.assertEqual(left, [(b"%d" % it, 1) for it in range(end == "done", 3)])

    def test_second_signal_ends_work_while_the_lock_of_a_key_is_held(self) -> None:
        """A task that can't be given back stays leased, and is delivered again, uncounted."""
        self.set_constant("one signal", 0)
        q = self.queue()
        q.push(b"x", key="k")
        is_over = threading.Event()

        def handle(_: object) -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            is_over.wait(2 * PATIENCE_S)

        locked = self.locked("k")
        unlocking = threading.Timer(PATIENCE_S, locked.close)
        unlocking.start()
        with seam("stop line", mock.Mock()):
            counts = q.work(handle, concurrency=2)
        self.assertEqual((counts.lost, locked.closed), (1, False))
        unlocking.cancel()
        locked.close()
        # The other thread may have run the maintenance a moment ago.
        self.assertEqual(popped(q, PATIENCE_S).attempts, 1)
        is_over.set()

    @FORK
    def test_third_signal_acts_as_before_work(self) -> None:
        """If the end of a task waits for ever in the calling thread, a third signal ends it."""
        self.set_constant("one signal", 0)
        self.queue().push(b"x", key="k")
        numbers = iter((signal.SIGTERM, signal.SIGINT, signal.SIGTERM))

        def send() -> None:
            for number in itertools.islice(numbers, 1):
                os.kill(os.getpid(), number)

        def work(child: Child) -> None:
            def handle(_: object) -> None:
                signal.alarm(int(PATIENCE_S))
                stack.enter_context(hooked(at_call("lock", None, send)))
                child.say("begun")
                child.wait_for_go()

            with contextlib.ExitStack() as stack, seam("stop line", mock.Mock()):
                self.queue().work(handle)

        child = self.child(work)
        self.assertEqual(child.line(), "begun")
        with self.locked("k"):
            child.go()
            self.assertEqual(child.finish(), ([], -signal.SIGTERM))


class Checking(QueueCase):
    """check() reports what is wrong in the directory, and repairs only what is safe to repair."""

    def found(self, q: FemtoQueue, repair: bool = False) -> list[tuple[str, str, bool]]:
        return [(it.kind, it.path, it.repaired) for it in q.check(repair)]

    def test_repair_mends_safe_findings_and_only_reports_the_rest(self) -> None:
        # The next check() no longer reports a finding that was mended.
        q = self.queue()
        clock = self.clock()
        order, ident = self.damage(q)
        clock.advance(3700)
        wanted = (
            ("foreign", "notes.txt", False),
            ("foreign", "failed/x.tmp", False),
            ("corrupt", f"pending/{order}-0000bbbb00000000", True),
            ("twice", f"done/{ident}", False),
            ("corrupt", f"done/{ident}", False),
            ("dead worker", "inflight-dead", True),
            ("key without a task", f"keys/{self.names('keys')[0]}", True),
            ("leftover", f"creating/{order}-0000aaaa00000000", True),
        )
        self.assertEqual(
            self.found(q), [(kind, path, False) for kind, path, _ in wanted]
        )
        # The maintenance mends these before the check, so they are no findings.
        by_maintenance = "dead worker", "key without a task", "leftover"
        left = [it for it in wanted if it[0] not in by_maintenance]
        self.assertEqual(self.found(q, repair=True), left)
        for repair in (False, True):
            self.assertEqual(self.found(q, repair), [it for it in wanted if not it[2]])
        os.unlink(self.file("done", ident))
        self.assertEqual(self.states(), {"pending": 2, "failed": 1})

    def damage(self, q: FemtoQueue) -> tuple[str, str]:
        """Leave what check() reports. Return the order of a dead worker's task, and the id of a
        task that is in two directories."""
        dead = self.queue("dead")
        self.foreign = ("notes.txt", "x.tmp")
        order = q.push(b"x")[:20]
        self.pop(dead)
        simulate_death(dead)
        q.push(b"k", key="k")
        os.unlink(self.file("pending", self.names("pending")[-1]))
        ident = q.push(b"x")
        rubbish = {
            f"pending/{order}-0000bbbb00000000": b"torn",
            f"creating/{order}-0000aaaa00000000": b"torn",
            "notes.txt": b"",
            "failed/x.tmp": b"",
            f"done/{ident}": b"FQ1 00000000 1\nx",
        }
        for path, content in rubbish.items():
            self.put(path, content, "")
        return order, ident

    def test_lease_directories_made_or_removed_during_a_check_are_no_findings(
        self,
    ) -> None:
        # RACE: before any system call of check(), one worker makes a lease directory and another
        # worker removes one.
        q = self.queue()
        gone, fresh = self.file("inflight-gone"), self.file("inflight-fresh")

        def come_and_go() -> None:
            os.mkdir(fresh)
            os.rmdir(gone)

        for step in Meanwhile.each(come_and_go):
            os.mkdir(gone)
            with hooked(step):
                findings = q.check()
            self.assertEqual(findings, [], step.at)
            for path in (gone, fresh):
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(path)

    def test_exception_of_a_signal_handler_ends_the_check(self) -> None:
        # A TimeoutError of a signal handler is an OSError without an errno. check() raises it, and
        # does not take it for the error of an unreadable file.
        q = self.queue()
        q.push(b"x")
        for event, of in (("open", "/pending/"), ("list", "/failed")):
            with hooked(at_call(event, of, mock.Mock(side_effect=TimeoutError))):
                self.assertRaises(TimeoutError, q.check)

    def test_unreadable_directory_is_reported_and_the_check_goes_on(self) -> None:
        q = self.queue()
        self.put(f"{1:020d}-0000aaaa00000000", b"torn")
        with hooked(at_call("list", "/failed", errno_raiser(errno.EACCES))):
            kinds = {it.kind for it in q.check()}
        self.assertEqual(kinds, {"unreadable", "corrupt"})
        with hooked(at_call("move", "/failed", errno_raiser(errno.EACCES))):
            self.assertEqual({*q.check(repair=True)}, {*q.check()})
        q.pop()

    def test_queue_that_others_than_root_may_write_to_is_reported_to_root(self) -> None:
        os.chmod(self.path, 0o770)
        said = self.assertLogs("femtoqueue", "WARNING")
        as_root = mock.patch("os.geteuid", return_value=0)
        with as_root, mock.patch.object(LOG, "disabled", False), said as logs:
            q, _ = self.queue(), self.queue()
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], "root works on .*; better: runuser -u OWNER")
        with as_root:
            self.assertEqual(self.found(q), [("trust", ".", False)])
        with mock.patch("os.geteuid", return_value=1000):
            self.assertEqual(self.found(q), [])

    def test_file_that_does_not_fit_into_memory_does_not_stop_a_check_or_a_listing(
        self,
    ) -> None:
        # such as a sparse file, whose header has its length
        q = self.queue()
        ident, _ = q.push_many([b"huge", b"good"])
        with hooked(at_call("open", ident, mock.Mock(side_effect=MemoryError))):
            self.assertEqual(self.found(q), [("unreadable", f"pending/{ident}", False)])
            self.assertEqual([task.data for task in q.tasks("pending")], [b"good"])

    def test_lost_and_found_of_a_mount_point_is_no_finding(self) -> None:
        os.mkdir(self.file("lost+found"))
        self.assertEqual(self.found(self.queue()), [])


LEASE = rf"inflight-\w+/[0-9]{{20}}~[0-9]+~0{{8}}~{ID}"
TRANSCRIPTS = r"""
# push takes payloads from arguments, standard input, its lines or its pieces, and prints the ids
$ femtoqueue push jobs 'a b' x -> <a> <b>
$ femtoqueue push jobs -- --not-an-option -> <c>
$ printf 'whole\ninput\n' | femtoqueue push jobs -> <d>
$ printf '1\n\n2' | femtoqueue push jobs --lines --sync -> <e> <f> <g>
$ printf 'p\nq\0r' | femtoqueue push jobs -0 -> <h> <i>
$ payloads pending -> a b, x, --not-an-option, whole\ninput\n, 1, , 2, p\nq, r
$ ls jobs/pending -> <a> <b> <c> <d> <e> <f> <g> <h> <i>
# a key and a reason are UTF-8, whatever the locale is
$ femtoqueue push jobs 1 --key ü -> <first>
$ PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C femtoqueue push jobs 2 --key ü -> <first>
$ femtoqueue pop jobs -> <lease>
$ PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C femtoqueue fail jobs $lease --reason über
$ cat jobs/failed/$first.error -> über
# only one task of a key waits, also while another is in flight; --if-in-flight reject is an error
$ femtoqueue push jobs 1 --key 'user 42' -> <first>
$ femtoqueue push jobs 2 --key 'user 42' -> <first>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue push jobs 3 --key 'user 42' --if-in-flight reject -> ! femtoqueue: ... [1]
$ states -> inflight-cli 1
$ femtoqueue push jobs 4 --key 'user 42' -> <new>
$ femtoqueue show jobs $new -> state buffered ... key user%2042 node - 4
$ femtoqueue push jobs 5 6 --key k -> ! femtoqueue: --key goes with one PAYLOAD: ... [2]
$ seq 2 | femtoqueue push jobs --lines --key k -> ! femtoqueue: --key goes with one PAYLOAD: ... [2]
# push --delay and --at schedule a task, at a local time or in another time zone
$ femtoqueue push jobs later --delay 1h -> <later>
$ TZ=EET-2 femtoqueue push jobs local --at 2050-12-01T08:00 -> <local>
$ TZ=EET-2 femtoqueue push jobs utc --at 2050-12-01T08:00:00Z -> <utc>
$ ls jobs/scheduled -> ...~0~<later> 02553487200000000000~0~<local> 02553494400000000000~0~<utc>
$ femtoqueue ls jobs scheduled -> ... scheduled <later> ...s 0 5 ...m - - ...
# if FEMTOQUEUE_DIR is set, it is DIR, and no argument is DIR
$ FEMTOQUEUE_DIR=jobs femtoqueue push hello -> <a>
$ FEMTOQUEUE_DIR=jobs femtoqueue push jobs -> <b>
$ payloads pending -> hello, jobs
$ FEMTOQUEUE_DIR=jobs femtoqueue ls pending -> ... pending <a> ... pending <b> ...
$ FEMTOQUEUE_DIR=jobs femtoqueue pop -> <lease>
$ FEMTOQUEUE_DIR=jobs femtoqueue done $lease
$ states -> done 1, pending 1
$ FEMTOQUEUE_DIR=jobs femtoqueue ls --help
usage: femtoqueue ls [-h] [--all] [--json] [STATE ...]
...
$ femtoqueue ls --help -> usage: femtoqueue ls [-h] [--all] [--json] DIR [STATE ...] ...
$ femtoqueue --help -> ... If FEMTOQUEUE_DIR is set, leave DIR out. ...
$ FEMTOQUEUE_DIR=jobs femtoqueue stat jobs
! femtoqueue: unrecognized arguments: jobs (DIR is jobs, from FEMTOQUEUE_DIR); see ...
[2]
# a lease outlives the process of pop, until done, fail or release; its printed path is the fence
$ printf '1\n2\n3' | femtoqueue push jobs --lines -> <a> <b> <c>
$ femtoqueue pop jobs | cat -> <lease_a>
$ tail -n +2 jobs/$lease_a -> 1
$ femtoqueue pop jobs | cat -> <lease_b>
$ femtoqueue pop jobs --payload --node me && echo ' is all' -> 3 is all ! <lease_c>
$ femtoqueue pop jobs -> [1]
$ states -> inflight-cli 2, inflight-me 1
$ femtoqueue extend jobs $lease_b --timeout 1h -> <lease_longer>
$ femtoqueue done jobs $lease_b -> ! ...task <b>: ...; now it is <lease_longer> [1]
$ femtoqueue ls jobs -> ... inflight <b> ...s 1 1 ...m - cli ...
$ femtoqueue done jobs $lease_a
$ femtoqueue fail jobs $c --reason 'no such image'
$ femtoqueue release jobs $(basename $lease_longer)
$ states -> done 1, failed 1, pending 1
$ femtoqueue done jobs $lease_a $lease_longer -> ! ...task <a>: ... ! ...task <b>: ... [1]
$ femtoqueue done jobs $a -> ! ...task <a>: it is not in flight...; now it is done/<a> [1]
$ femtoqueue fail jobs $lease_c -> ! ...: it is not in flight...; now it is failed/<c> [1]
$ femtoqueue ls jobs | cut -d' ' -f 1 -> STATE pending failed
$ femtoqueue ls jobs --all | cut -d' ' -f 1 -> STATE pending done failed
$ femtoqueue ls jobs failed pending -> ... failed <c> ...s - 1 - - - 3 pending <b> ...
$ femtoqueue show jobs $c -> state failed ... attempts - ... reason no such image 3
# pop leases a task by its id, due or not, or waits for a task of a key
$ femtoqueue push jobs first second -> <first> <second>
$ femtoqueue push jobs later --delay 1h -> <later>
$ femtoqueue pop jobs --id $second -> ...~<second>
$ femtoqueue pop jobs --id $later -> ...~<later>
$ femtoqueue pop jobs --id $second -> [1]
$ femtoqueue pop jobs --wait 60s --node w --key k --payload & until [ -e jobs/inflight-w ]; do :; \
 done; femtoqueue push jobs mine --key k > id; wait
mine
! ...
$ payloads pending -> first
# release gives back all tasks in flight, or all tasks of a worker
$ femtoqueue push jobs 1 2 3 4 -> <a> <b> <c> <d>
$ femtoqueue pop jobs --node n1 -> <lease_a>
$ femtoqueue pop jobs --node n2 -> <lease_b>
$ femtoqueue pop jobs --node n2 -> <lease_c>
$ femtoqueue release jobs --node nobody -> released 0
$ femtoqueue release jobs --node n2 --front -> released 2
$ femtoqueue release jobs --all -> released 1
$ femtoqueue done jobs $lease_a $lease_c -> ! ...task <a>: ... ! ...task <c>: ... [1]
$ payloads pending -> 2, 3, 4, 1
# cancel deletes tasks that wait, due or not, and names those that do not wait
$ femtoqueue push jobs held again waiting -> <held> <again> <waiting>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue release jobs $(femtoqueue pop jobs)
$ femtoqueue push jobs later --delay 1h -> <later>
$ femtoqueue cancel jobs $waiting $held 00000000000000000001-0000aaaa00000000 $later
! femtoqueue: task <held> is not waiting
! femtoqueue: task 00000000000000000001-0000aaaa00000000 is not waiting
[1]
$ states -> inflight-cli 1, pending 1
$ femtoqueue pause jobs
$ femtoqueue cancel jobs $again
$ femtoqueue resume jobs
$ states -> inflight-cli 1
# ls and show print the fields of tasks; any key is one word, and an unknown value is a dash
$ femtoqueue push jobs 12345 --key "$(printf 'a b\n/\303\251:@-._~')" -> <keyed>
$ femtoqueue push jobs x -> <x>
$ femtoqueue push jobs later --delay 2h -> <later>
$ femtoqueue release jobs --front $(femtoqueue pop jobs)
$ femtoqueue pop jobs --timeout 1h -> <lease>
$ echo torn > jobs/pending/00000000000000000001-0000aaaa00000000
$ femtoqueue ls jobs
STATE ID AGE SINCE TRY BYTES LEFT KEY NODE DATA
pending 00000000000000000001-0000aaaa00000000 ... ...s 0 - - - - -
pending <x> ...s ...s 0 1 - - - x
scheduled <later> ...s ...s 0 5 2.0h - - later
inflight <keyed> ...s ...s 2 5 ...m a%20b%0A/%C3%A9:@-._~ cli 12345
$ femtoqueue ls jobs inflight --json
{"state": "inflight", ... "key": "a b\n/\u00e9:@-._~", "node": "cli", "data_preview": "12345"}
$ femtoqueue show jobs $keyed -> state inflight id <keyed> ... a%20b%0A/%C3%A9:@-._~ node cli 12345
$ femtoqueue show jobs $keyed --payload && echo ' is all' -> 12345 is all
$ femtoqueue show jobs 00000000000000000002-0000aaaa00000000 -> ! ...no task 0... [1]
$ printf 'FQ1 00000000 0 %0300d\n' 0 > jobs/pending/00000000000000000001-f000aaaa00000000
$ femtoqueue ls jobs pending | awk '{ print NF, length($8) }' -> 10 3 10 1 10 300 10 1
# stat counts tasks, and its status can alert a monitor; without a terminal, top prints blocks
$ femtoqueue push jobs x x -> <a> <b>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue stat jobs -> pending 1 scheduled 0 inflight 1 ... workers_unknown 1 paused False
$ femtoqueue stat jobs --json --max-pending 1 --max-age 1h -> {"pending": 1, "scheduled": 0, ...}
$ femtoqueue stat jobs --max-pending 0 -> pending 1 ... [1]
$ femtoqueue stat jobs --max-age 0s -> ... [1]
$ femtoqueue push late x --at 2026-01-01T00:00 -> <late> ! femtoqueue: late: a new queue is made
$ femtoqueue stat late --max-age 1h -> pending 0 scheduled 1 ... [1]
$ femtoqueue top jobs --interval 10ms | grep -e cli -e ^pending | head -n 4
pending 1
inflight <a> ...s 1 1 ...s - cli x
pending 1
inflight <a> ...s 1 1 ...s - cli x
# pause, resume, retry, check and purge do what their names say
$ femtoqueue push jobs x -> <x>
$ femtoqueue pause jobs
$ femtoqueue pop jobs -> [1]
$ femtoqueue resume jobs
$ femtoqueue fail jobs $(femtoqueue pop jobs)
$ femtoqueue retry jobs $x
$ femtoqueue fail jobs $(femtoqueue pop jobs)
$ femtoqueue retry jobs --all -> 1
$ femtoqueue retry jobs $x -> ! femtoqueue: ... [1]
$ femtoqueue check jobs
$ echo torn > jobs/pending/00000000000000000001-0000aaaa00000000
$ femtoqueue check jobs -> corrupt pending/00000000000000000001-0000aaaa00000000 ... odd [1]
$ femtoqueue check jobs --repair -> corrupt pending/0...1-0000aaaa00000000 ... mended ! ...
$ femtoqueue check jobs
$ femtoqueue done jobs $(femtoqueue pop jobs)
$ states -> done 1, failed 1
$ femtoqueue purge jobs --older-than 0 -> 1
$ femtoqueue purge jobs --older-than 0 --failed -> 1
# closed pipes, a full disk and closed descriptors cause no traceback, and lose no task
$ seq 5000 | femtoqueue push large --lines > ids -> ! femtoqueue: large: a new queue is made
$ femtoqueue ls large | head -n 1 -> STATE ...DATA
$ { until [ -e gone ]; do :; done; seq 2; } | femtoqueue push jobs --lines | { exec <&-; >gone; }
$ femtoqueue push jobs x >&- 2>&- <&-
$ femtoqueue pop jobs > /dev/full -> ! ... No space left on device: 'standard output' [2]
$ femtoqueue --version > /dev/full -> ! femtoqueue: ... No space left on device: ... [2]
$ { until [ -e read ]; do :; done; femtoqueue pop jobs; echo $? > status; } | { exec <&-; >read; }
! femtoqueue: task ... is given back: nobody reads
$ cat status -> 1
$ femtoqueue pop jobs --payload > /dev/full -> ! femtoqueue: ... No space left on device: ... [2]
$ femtoqueue top jobs > /dev/full -> ! femtoqueue: ... No space left on device: ... [2]
$ femtoqueue work jobs --drain -- echo x > /dev/full -> ! ... ! ... No space left on device: ... [2]
$ femtoqueue ls jobs | grep -c ' 0  *1 ' -> 3
$ payloads pending -> 1, 2, x
# work runs a command for each task, with the payload as standard input, and prints its output
$ femtoqueue push jobs 1 2 -> ...
$ femtoqueue push jobs keyed --key ü -> ...
$ head -c 100000 /dev/zero | femtoqueue push jobs -> ...
$ PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C femtoqueue work jobs -q -j 2 --drain -- sh -c \
 'wc -c; echo "$FEMTOQUEUE_KEY $FEMTOQUEUE_ATTEMPT" >&2; printf end' > out 2> err
$ sort out -> 1 1 100000 5 end end end end
$ sort err -> 1 1 1 ü 1
$ states -> done 4
# {} in an argument is replaced by the unchanged payload, which is standard input as well
$ printf ' $HOME {} \377\n' | femtoqueue push jobs -> ...
$ femtoqueue push jobs '' -> ...
$ femtoqueue work jobs -q --drain -- sh -c 'printf "<%s|%s|%s>" "$@"; cat' {} {} 'a{}b{}' c
< $HOME {} \xff
|a $HOME {} \xff
b $HOME {} \xff
|c> $HOME {} \xff
<|ab|c>
# a task whose payload can't be an argument is a dead letter at once, and the worker goes on
$ printf 'a\0b' | femtoqueue push jobs -> <null>
$ head -c 10000000 /dev/zero | tr '\0' x | femtoqueue push jobs -> <large>
$ femtoqueue push jobs good -> <good>
$ femtoqueue work jobs -q --drain -- echo {}
good
! ... <null>: try 1 failed, a dead letter: the payload can't be an ...: [Errno 22] ...
! ... <large>: try 1 failed, a dead letter: the payload can't be an argument... too long; ...
[1]
$ cat jobs/failed/$null.error -> the payload can't be an argument ... (try 1): [Errno 22] ...
$ femtoqueue retry jobs --all -> 2
$ femtoqueue work jobs -q --drain -- sh -c 'wc -c' -> 3 10000000
# so is one whose payload makes an argument for which there is no memory
$ head -c 4000000 /dev/zero | tr '\0' x | femtoqueue push jobs -> <large>
$ femtoqueue push jobs good -> <good>
$ ulimit -v 600000; femtoqueue work jobs -q --drain -- echo $(printf '{}%.0s' $(seq 200)) | wc -c
801
! ... <large>: try 1 failed, a dead letter: the payload can't be an argument ...
# a task whose command fails is tried again, and becomes a dead letter at --max-attempts
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --max-attempts 2 --retry-delay 1ms --sync -- sh -c \
 'echo try $FEMTOQUEUE_ATTEMPT; echo no such image >&2; exit 3'
try 1
try 2
! no such image
! ... <x>: try 1 failed, to be retried: exit status 3; data: x
! no such image
! ... <x>: try 2 failed, a dead letter: exit status 3; data: x
[1]
$ cat jobs/failed/$x.error -> exit status 3 (try 2) no such image
$ femtoqueue ls jobs failed -> ... failed <x> ...s 2 1 - - - x
# --output-dir keeps the output of a command in files; if they are deleted, the reason is kept
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --output-dir logs -- sh -c 'echo out; echo err >&2'
$ tail logs/* -> ==> logs/<x>.err <== err ==> logs/<x>.out <== out
$ femtoqueue push jobs y -> <y>
$ femtoqueue work jobs -q --drain --output-dir logs --max-attempts 1 -- sh -c \
 'echo why >&2; rm logs/*; exit 3' -> ! ... [1]
$ cat jobs/failed/$y.error -> exit status 3 (try 1) why
# a command that can't be run ends work, and fails no task; a shell's status 127 fails its task
$ femtoqueue push jobs x -> <x>
$ echo '#!/no/interpreter' > script; chmod +x script
$ femtoqueue work jobs -q --drain -- ./script -> ! ... can't be run: [Errno 2] ... [2]
$ femtoqueue work jobs -q --drain -j 2 -- ./script -> ! femtoqueue: ./script can't be run: ... [2]
$ echo true > script
$ femtoqueue work jobs -q --drain -- ./script -> ! ... can't be run: [Errno 8] ... [2]
$ femtoqueue ls jobs -> ... pending <x> ...s 0 1 - - - x
$ femtoqueue work jobs -q --drain --max-attempts 1 -- sh -c no-such-command -> ! ... [1]
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --max-attempts 1 -- \
 sh -c 'echo femtoqueue: no queue >&2; exit 127' -> ! ... [1]
$ states -> failed 2
# after a signal, work finishes its commands, even if the terminal is gone or the disk is full
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -- sh -c 'kill -HUP $(worker)' 2> /dev/full
$ states -> done 1
$ femtoqueue push jobs x -> ...
$ { femtoqueue work jobs -q -- sh -c 'echo 1; kill -INT $(worker); sleep 0.5; echo 2; echo 3'; \
 echo $? > status; } | head -n 1 -> 1 ! femtoqueue: the running tasks may finish; ...
$ cat status -> 0
$ states -> done 2
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q -- sh -c 'kill -INT $(worker); sleep 0.1; echo' > /dev/full
...
! femtoqueue: [Errno 28] No space left on device: 'standard output'
[2]
$ states -> done 2, pending 1
# a payload that is too large for TMPDIR fails the tries of its task only
$ head -c 100000 /dev/zero | femtoqueue push jobs -> <large>
$ femtoqueue push jobs y -> <y>
$ ulimit -f 60; femtoqueue work jobs -q --drain --max-attempts 2 --retry-delay 1ms -- true
! ... <large>: try 1 failed, to be retried: the payload can't be written to /...: ... too large; ...
! ... <large>: try 2 failed, a dead letter: the payload can't be written to /...: ... too large; ...
[1]
$ femtoqueue ls jobs failed -> ... failed <large> ...s 2 100000 - - - ...
$ states -> done 1, failed 1
# processes that a command leaves running do not hold up work, even if they write to its pipes
$ femtoqueue push jobs x y -> ...
$ femtoqueue work jobs -q --drain -- sh -c '(sleep 1000) & echo $!' > pids
$ kill $(cat pids)
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain -- sh -c '(while :; do echo; sleep 0.01; done) & echo $!' > pids
$ gone pids
$ states -> done 3
# work --drain has status 1 if it ends early; --keep-done says how long finished tasks are kept
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --time-limit 0s -- true -> [1]
$ femtoqueue pop jobs -> <lease>
$ femtoqueue work jobs -q --drain --idle-timeout 0s -- true -> [1]
$ femtoqueue release jobs --all -> released 1
$ touch jobs/pending/.not-ours
$ femtoqueue work jobs --drain --time-limit 1h --keep-done 1h -- true
! femtoqueue 1 done | 0 running 0 waiting
$ rm jobs/pending/.not-ours
$ states -> done 1
$ femtoqueue push jobs y -> <y>
$ femtoqueue work jobs -q --drain --keep-done 0s -- true
$ states -> none
# a command that exceeds --task-timeout is killed with its whole process group
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --max-attempts 1 --task-timeout 100ms --time-limit 5s -- sh -c \
 'sleep 1000 & echo $! $$; wait' > pids -> ! ... [1]
$ gone pids
$ cat jobs/failed/$x.error -> killed after 0.1s (try 1)
$ femtoqueue push jobs y -> ...
$ femtoqueue work jobs -q --task-timeout 1s -- sh -c \
 'sleep 1000 & echo $!; kill -INT $(worker); exit 130' > pids -> ! ...
$ gone pids
$ states -> failed 1, pending 1
# work --drain has status 1 if a task is corrupt; "link/.." in DIR is resolved by the kernel
$ mkdir elsewhere elsewhere/inside; ln -s elsewhere/inside link
$ femtoqueue push link/../jobs x -> <x> ! femtoqueue: link/../jobs: a new queue is made
$ echo torn > elsewhere/jobs/pending/$x
$ femtoqueue work link/../jobs --drain -- true
! ... task <x> is in failed/: ...
! femtoqueue 0 done | 0 running 0 waiting
[1]
$ femtoqueue push jobs 'touch jobs/failed/.note.swp' -> ...
$ femtoqueue work jobs -q --drain -- sh -c '$1' - {}
# a command gets the whole environment, even variables that a shell can't name
$ femtoqueue push jobs x -> ...
$ env 'BASH_FUNC_f%%=() { echo called; }' a.b=1 BASH_ENV=/no-such-file femtoqueue work jobs -q \
 --drain -- env | grep -e ^a.b= -e ^BASH_FUNC_f | sort -> BASH_FUNC_f%%=() { echo called; } a.b=1
# a command that is killed by a signal has failed, even if work was started with SIGCHLD ignored
$ femtoqueue push jobs TERM KILL -> ...
$ env --ignore-signal=CHLD femtoqueue work jobs -q --drain --max-attempts 1 --time-limit 20s -- \
 sh -c 'kill -$1 $$' - {}
! ... try 1 failed, a dead letter: killed by signal 15; data: TERM
! ... try 1 failed, a dead letter: killed by signal 9; data: KILL
[1]
# if the reader of work's output exits, no task fails; tasks whose output was not read wait again
$ femtoqueue push jobs 1 2 3 4 5 6 7 8 9 -> ...
$ echo 'echo $1; test $1 = 1 || head -c 100000 /dev/zero' > more-than-a-pipe-holds
$ { femtoqueue work jobs --max-attempts 1 -- sh more-than-a-pipe-holds {}; echo $? > status; } | \
 head -n 1 -> 1 ! ...
$ cat status -> 2
$ states -> done ..., pending ...
$ femtoqueue release jobs --all -> released 0
# at its time limit a job, even a stopped one, can clean up, and its last output is passed on
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --max-attempts 1 --task-timeout 2s -- sh -c \
 'trap "head -c 200000 /dev/zero; echo > cleaned; exit" TERM; kill -STOP $$; sleep 1000' > out
! ...
[1]
$ wc -c < out -> 200000
$ rm cleaned
# a time limit ends every process of a job, in whatever group it is; setsid leaves the job
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --max-attempts 1 --task-timeout 300ms -- bash -c \
 'set -m; sleep 1000 & echo $! $$; wait' > pids -> ! ... [1]
$ gone pids
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --max-attempts 1 --task-timeout 2s -- sh -c \
 'setsid sleep 1000 > left & echo $!; exec sleep 1000' > pids -> ! ... [1]
$ kill $(cat pids)
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --task-timeout 0 -- sleep 0.01
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --task-timeout 999999d -- sleep 0.01
# with --output-dir a job writes its files itself: even after CMD, and up to its own size limit
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --output-dir logs -- sh -c '(sleep 0.5; echo late) &'
$ until grep late logs/*.out; do :; done -> late
$ femtoqueue push jobs big small -> ...
$ ulimit -f 60; femtoqueue work jobs -q --drain --max-attempts 1 --output-dir logs -- sh -c \
 'test $1 != big || head -c 1000000 /dev/zero' - {} -> ! ... [1]
$ states -> done 2, failed 1
# a file in --output-dir that can't be written fails the tries of its task only
$ femtoqueue push jobs x y -> <x> <y>
$ mkdir logs logs/$x.err
$ femtoqueue work jobs -q --drain --max-attempts 1 --output-dir logs -- true
! ... <x>: try 1 failed, a dead letter: the output can't be written: ...; data: x
[1]
$ femtoqueue ls jobs failed -> ... failed <x> ...s 1 1 - - - x
$ states -> done 1, failed 1
# if --output-dir can't be a directory, work ends, and fails no task
$ femtoqueue push jobs x -> <x>
$ touch file
$ femtoqueue work jobs -q --drain --output-dir file -- true
! femtoqueue: the output can't be written (try 1): [Errno 20] Not a directory: 'file/<x>.out'
[2]
$ ln -s /no/disk dangling
$ femtoqueue work jobs -q --drain --output-dir dangling -- true -> ! ... 'dangling/<x>.out' [2]
$ femtoqueue work jobs -q --drain --output-dir file/logs -- true
! femtoqueue: the output can't be written (try 1): [Errno 20] Not a directory: 'file/logs'
[2]
$ femtoqueue ls jobs -> ... pending <x> ...s 0 1 - - - x
# only a regular file of this user with one link takes output; a removed directory is made again
$ femtoqueue push jobs a b c d e -> <a> <b> <c> <d> <e>
$ mkdir -m 755 logs; touch other; ln -s ../other logs/$a.out; ln other logs/$b.out
$ mkfifo logs/$c.err
$ python3 -c 'import socket, sys; socket.socket(1).bind(sys.argv[1])' logs/$d.out
$ femtoqueue work jobs -q --drain --max-attempts 1 --output-dir logs -- echo text -> ! ... [1]
$ states -> done 1, failed 4
$ wc -c < other -> 0
$ cat logs/$e.out -> text
$ femtoqueue push jobs a b -> <f> <g>
$ femtoqueue work jobs -q --drain --output-dir new/logs -- sh -c \
 'test $1 = b || rm -rf new; echo text' - {}
$ stat -c %a new/logs -> 700
$ ls new/logs -> <g>.err <g>.out
# with -j 1, lines that go to the same file stay in order, and the reason has the end of both
$ femtoqueue push jobs x -> <x>
$ echo 'for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo $i >&2; done; exit 1' > turns
$ femtoqueue work jobs -q --drain --max-attempts 1 -- sh turns 2>&1 | head -n 18 | uniq -c
 2 1
 2 2
 2 3
 2 4
 2 5
 2 6
 2 7
 2 8
 2 9
$ tail -n 2 jobs/failed/$x.error -> 9 9
# a monitor tells of a task whose lease has ended and that no worker takes back
$ femtoqueue push jobs x -> ...
$ femtoqueue pop jobs --timeout 10ms -> ...
$ femtoqueue stat jobs --max-age 1h -> ... oldest_pending_age - ...
$ sleep 0.3; femtoqueue stat jobs --max-age 200ms -> ... expired 1 ... [1]
# a command has descriptors 0, 1 and 2 only; if exec() finds its arguments too long, its task fails
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain -- sh -c 'ls /proc/$$/fd; :' -> 0 1 2
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain -- sh -c \
 'echo "femtoqueue work: 1: exec: ./x: Argument list too long" >&2; exit 126' - {} -> ! ... [1]
$ states -> done 1, failed 1
# no input or output is lost in a pipe that is non-blocking
$ printf 'import os, sys; os.set_blocking(int(sys.argv[1]), False)' > set
$ { sleep 0.3; echo half; sleep 0.3; echo other; } | { python3 set 0; femtoqueue push jobs; } -> <x>
$ femtoqueue show jobs $x --payload -> half other
$ { sleep 0.3; echo 1; sleep 0.3; echo 2; } | { python3 set 0; femtoqueue push lines --lines; }
...
! femtoqueue: lines: a new queue is made
$ femtoqueue stat lines -> pending 2 ...
$ femtoqueue work lines -q --drain -- head -c 300000 /dev/zero > zeros
$ femtoqueue push large --lines < zeros -> <large> ! femtoqueue: large: a new queue is made
$ { python3 set 1; PYTHONUNBUFFERED=1 femtoqueue show large $large --payload; } | \
 { sleep 0.3; wc -c; } -> 600000
$ femtoqueue push jobs y -> ...
$ { python3 set 1; femtoqueue work jobs -q --drain -- head -c 300000 /dev/zero; } | \
 { sleep 0.3; wc -c; } -> 600000
$ states -> done 2
# if push fails, it says how many tasks it has pushed
$ ulimit -f 60; { echo small; head -c 100000 /dev/zero; } | femtoqueue push limited --lines
<small>
! femtoqueue: limited: a new queue is made
! femtoqueue: the first 1 tasks are pushed, the others are not
! femtoqueue: [Errno 27] File too large: ...limited/creating/...
[2]
# if an id can't be printed, push says that its task is pushed; unprintable letters are escaped
$ femtoqueue push jobs x > /dev/full -> ! femtoqueue: a task is pushed, but ...: <x>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue extend jobs $lease > /dev/full -> ! femtoqueue: a lease is renewed, ...: <lease2>
$ femtoqueue fail jobs $lease2 --reason 'über'
$ PYTHONIOENCODING=ascii femtoqueue show jobs $(ls jobs/failed | head -n 1) | tail -n 3
reason \xfcber

x
# join waits until no work is left; for a misspelt command, the right one is suggested
$ femtoqueue push jobs x -> ...
$ femtoqueue join jobs --timeout 10ms -> [1]
$ { sleep 0.3; femtoqueue work jobs -q --drain -- true; } & femtoqueue join jobs --timeout 60s
$ femtoqueue joni jobs -> ! femtoqueue: there is no command 'joni'; did you mean join?... [2]
$ femtoqueue work new --drain -- true
! femtoqueue: new: a new queue is made
! femtoqueue 0 done | 0 running 0 waiting
# a line that is too long to be kept is mixed neither with another job's nor with standard error
$ femtoqueue push jobs a b -> ...
$ echo 'for i in 1 2 3; do head -c 70000 /dev/zero | tr "\\0" $1; sleep 0.1; done; echo' > long
$ femtoqueue work jobs -q --drain -j 2 -- sh long {} > out
$ grep -c -e '^a*$' -e '^b*$' out -> 2
$ wc -c < out -> 420002
$ femtoqueue push jobs a b -> ...
$ sed 's/sleep/echo >\&2; sleep/' long > also-to-stderr
$ femtoqueue work jobs -q --drain -j 2 -- sh also-to-stderr {} > out 2>&1
$ grep -c -e '^aa*$' -e '^bb*$' out -> 2
$ wc -c < out -> 420008
# the directory in which work was started may be removed
$ mkdir here
$ femtoqueue push jobs x y -> ...
$ cd here; femtoqueue work ../jobs -q --drain -- sh -c 'rmdir ../here 2>&-; exit 0'
! ...
$ states -> done 2
# messages of the worker are lines of their own, even after a command's last line without newline
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs --drain --max-attempts 1 -- sh -c 'printf half >&2; exit 1'
! half
! ... <x>: try 1 failed, a dead letter: exit status 1; data: x
! femtoqueue 1 failed | 0 running 0 waiting
[1]
$ femtoqueue push jobs y -> ...
$ femtoqueue work jobs --drain -- printf half 2>&1
half
femtoqueue 1 done | 0 running 0 waiting
# with -j 2, lines written in pieces stay whole; with one command at a time, output is not buffered
$ femtoqueue push jobs a b c d -> ...
$ echo 'for i in 1 2; do printf "$1"; sleep 0.01; printf "$1\n"; done; printf end' > pieces
$ femtoqueue work jobs -q --drain -j 2 -- sh pieces {} > out
$ sort out | uniq -c -> 2 aa 2 bb 2 cc 2 dd 4 end
$ femtoqueue push jobs a b -> ...
$ femtoqueue work jobs -q --drain -- sh pieces {} && echo -> aa aa endbb bb end
"""


class Command(subprocess.Popen[bytes]):
    """A process of femtoqueue, whose streams are pipes."""

    stdout: Any
    stderr: Any

    def __exit__(self, *error: Any) -> None:
        """Wait until the process ends. If the block failed, kill the process first, because it
        might never end."""
        if error[0] is not None:
            self.kill()
        super().__exit__(*error)

    def first_lines(self, count: int) -> list[str]:
        return [self.stdout.readline().decode().strip() for _ in range(count)]

    def send_signals(self, number: int, second: int | None = None) -> None:
        """Send a signal, and wait until the process reports it. Then send the second signal, if one
        is given, and wait until the process ends."""
        self.send_signal(number)
        heard = self.stderr.readline()
        demand(b"the running tasks may finish" in heard, f"it said {heard}")
        if second is not None:
            time.sleep(2 * constant("one signal"))  # two signals at once count as one
            self.send_signal(second)
            self.communicate(timeout=120)


def until_gone(*pids: int | str) -> None:
    """Wait until processes have ended. A zombie, which its parent has not waited for, counts as
    ended."""

    def is_gone(pid: int | str) -> bool:
        with (
            contextlib.suppress(ProcessLookupError, FileNotFoundError),
            open(f"/proc/{pid}/stat", encoding="ascii") as file,
        ):
            return file.read().rpartition(")")[2].split()[0] == "Z"
        return True

    until(lambda: all(map(is_gone, pids)))


def run_guarded(
    *words: str, env: Mapping[str, str], path: str = "."
) -> tuple[int, str, str]:
    """Run a command; return its exit status, standard output and standard error. A command that
    runs for longer than PATIENCE_S is aborted, and then prints where it was."""
    env = {**env, "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    settings |= {
        "env": env,
        "cwd": path,
        "stdout": pipe,
        "stderr": pipe,
        "encoding": "utf-8",
    }
    with subprocess.Popen(words, errors="backslashreplace", **settings) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            # A process that left the group may keep the pipes open. So this call has a timeout,
            # too.
            out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """While the block runs, standard input is empty. After the block, the list has the text of
    standard output, and that of standard error."""
    texts: list[str] = []
    kept = [os.dup(fd) for fd in range(3)]
    with contextlib.ExitStack() as files:
        null = files.enter_context(open(os.devnull, encoding="utf-8"))
        out, err = (
            files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            for _ in range(2)
        )
        try:
            for fd, file in enumerate((null, out, err)):
                os.dup2(file.fileno(), fd)
            with mock.patch.multiple(sys, stdout=out, stderr=err):
                yield texts
        finally:
            for fd, it in enumerate(kept):
                os.dup2(it, fd)
                os.close(it)
            for file in (out, err):
                file.flush()
                texts.append(os.pread(file.fileno(), 1 << 24, 0).decode())


class CommandCase(QueueCase):
    """A test of the command line. Most commands run in this process, through main(). Those that
    start processes run femtoqueue.pyc, the compiled femtoqueue.py, without its source."""

    # a directory that holds femtoqueue.pyc, and a script `femtoqueue` that runs it
    bin: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.bin = tempfile.mkdtemp(prefix="femtoqueue-test-")
        cls.addClassCleanup(shutil.rmtree, cls.bin, ignore_errors=True)
        source, compiled = (os.path.join(it, "femtoqueue.py") for it in (HERE, cls.bin))
        py_compile.compile(source, f"{compiled}c", doraise=True)
        command = os.path.join(cls.bin, "femtoqueue")
        with open(command, "w", encoding="utf-8") as file:
            file.write(f"#!{sys.executable} -SWerror\n{cls.program_with({})[-1]}\n")
        # prints the pid of the worker of its shell
        worker = os.path.join(cls.bin, "worker")
        with open(worker, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\nlauncher=$(cut -d ' ' -f 4 /proc/$PPID/stat)\n")
            file.write("exec cut -d ' ' -f 4 /proc/$launcher/stat\n")
        for path in (command, worker):
            os.chmod(path, 0o755)

    @classmethod
    def program_with(cls, waits: dict[str, float]) -> list[str]:
        """Return the words that run femtoqueue.pyc with other values of some of CONSTANTS."""
        constants = {CONSTANTS[name]: seconds for name, seconds in waits.items()}
        code = f"import sys; sys.path[0] = {cls.bin!r}; import femtoqueue; "
        code += f"vars(femtoqueue).update({constants}); sys.exit(femtoqueue.main())"
        return [sys.executable, "-S", "-W", "error", "-c", code]

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.path)
        self.path = os.path.join(self.path, "jobs")
        # left out: output is buffered, as usual
        others = "FEMTOQUEUE_DIR", "PYTHONUNBUFFERED"
        ours = {name: it for name, it in os.environ.items() if name not in others}
        ours |= {"PATH": f"{self.bin}:{ours['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env = {**ours, "COLUMNS": "80"}

    def program(self) -> list[str]:
        """Return the words that run femtoqueue.pyc with the constants of this process, which
        set_constant() may have changed."""
        return self.program_with({it: constant(it) for it in ("one signal", "grace")})

    def run_command(self, *words: str) -> tuple[int, str, str]:
        """Run a command; return its exit status, standard output and standard error. The
        command runs in this process. Only `work` runs in a process of its own, because `work`
        starts others."""
        if (
            words[:1] == ("work",)
            and "--" in words
            and hasattr(vars(femtoqueue)["os"], "fork")
        ):
            return run_guarded(*self.program(), *words, env=self.env)
        with (
            mock.patch.dict(os.environ, self.env, clear=True),
            captured() as outputs,
            mock.patch.object(LOG, "disabled", False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            try:
                status = femtoqueue.main([*words])
            except SystemExit as end:
                status = int(end.code or 0)
        out, err = outputs
        return status, out, err

    def output_of(self, *words: str) -> str:
        status, out, err = self.run_command(*words)
        self.assertEqual((status, err), (0, ""), words)
        return out


class Transcripts(CommandCase):
    """Each command in TRANSCRIPTS prints what stands there. A test for each transcript is made from
    its claim, so that one runs alone: `python test.py Transcripts -k canceled`."""

    def check_step(self, step: str, names: dict[str, str]) -> None:
        """Run the command of a step, and fail unless it prints the expected output. `names` has the
        value of each name such as <lease>. The names that first occur in this step are added."""
        parts = re.fullmatch(r"((?:.*\\\n)*.*?)(?: -> (.*)|\n((?s:.*))|)", step)
        assert parts is not None
        said = self.transcript_of(
            re.sub(r"\$(\w+)", lambda it: names.get(it[1], it[0]), parts[1])
        )
        if parts[2]:
            said = " ".join(said.split())
            wanted = self.pattern(parts[2], names)
        else:
            said = re.sub(" {2,}", " ", said)
            lines = parts[3].split("\n") if parts[3] else []
            any_lines = {"...": "(?:.*\n)*", "! ...": "(?:! .*\n)*"}
            wanted = "".join(
                any_lines.get(it) or self.pattern(it, names) + "\n" for it in lines
            )
        found = re.fullmatch(wanted, said)
        self.assertIsNotNone(found, f"{step}\n\nsaid, with {names}:\n{said}")
        names.update(found.groupdict() if found else {})
        self.assertEqual(len({*names.values()}), len(names), names)

    def pattern(self, text: str, names: dict[str, str]) -> str:

        def named(name: re.Match[str]) -> str:
            form = LEASE if name[1].startswith("lease") else ID
            return (
                re.escape(names[name[1]])
                if name[1] in names
                else f"(?P<{name[1]}>{form})"
            )

        return re.sub(r"<(\w+)>", named, re.escape(text).replace(r"\.\.\.", ".*"))

    def transcript_of(self, command: str) -> str:
        """Run a command, and return its output and exit status in the form of a transcript.

        A command of femtoqueue runs in this process if it needs no shell and is not `work`. A
        command of femtoqueue in $(...) also runs in this process, and the output becomes a part of
        the command around the $(...)."""
        part = r"\$\((femtoqueue [^()]*)\)"
        command = re.sub(
            part, lambda it: self.output_of(*shlex.split(it[1])[1:]).strip(), command
        )
        words: Any = shlex.split(command)
        if words[0] == "states":
            states = sorted(self.states().items())
            return ", ".join(f"{state} {count}" for state, count in states) or "none"
        if words[0] == "payloads":
            return ", ".join(repr(it.data)[2:-1] for it in self.queue().tasks(words[1]))
        if words[0] == "gone":
            with open(words[1], encoding="ascii") as file:
                until_gone(*file.read().split())
            return ""
        if re.match(r"femtoqueue (?!work )[^|;&<>$]*$", command):
            status, out, err = self.run_command(*words[1:])
        else:
            status, out, err = run_guarded("sh", "-c", command, env=self.env)
        lines = [*out.removesuffix("\n").split("\n")] if out else []
        lines += [f"! {line}" for line in err.splitlines()]
        lines += [f"[{status}]"] if status else []
        return "".join(f"{line}\n" for line in lines)

    def check_transcript(self, steps: list[str]) -> None:
        # otherwise the first push says that it makes a queue
        FemtoQueue("jobs").close()
        names: dict[str, str] = {}
        for step in steps:
            self.check_step(step, names)


def make_tests_of_transcripts() -> None:
    for transcript in TRANSCRIPTS.split("\n# ")[1:]:
        claim, *steps = transcript.rstrip().split("\n$ ")

        def test(self: Transcripts, steps: list[str] = steps) -> None:
            self.check_transcript(steps)

        test.__doc__ = claim
        words = re.sub(r"[^a-z0-9]+", "_", claim.lower()).strip("_")
        demand(not hasattr(Transcripts, f"test_{words}"), f"a second {claim!r}")
        setattr(Transcripts, f"test_{words}", test)


make_tests_of_transcripts()


class CommandLine(CommandCase):
    """The commands of the command line, in what a transcript can't show."""

    def test_push_with_sync_syncs(self) -> None:
        self.queue()
        for words in ((), ("--sync",)):
            push = functools.partial(self.output_of, "push", "jobs", "x", *words)
            synced = calls_of("fsync", push)
            self.assertEqual(bool(synced), bool(words))

    # A row: a part of the error message, and the wrong uses that cause it. TASK stands for an id.
    # fmt: off
    WRONG_USES: tuple[tuple[str, ...], ...] = (
        ("no command ''; the command comes first, as in: push DIR", ""),
        ("no command 'nonsense'; the command comes first, as in: push DIR", "nonsense"),
        ("no command 'jobs'; the command comes first, as in: push DIR", "jobs push x", "jobs"),
        ("; see femtoqueue --help", "--wait 1s pop jobs", "-- push jobs"),
        ("required: DIR; see femtoqueue push --help", "push"),
        ("required: ID; see femtoqueue", "done TASK", "cancel jobs", "show jobs"),
        ("required: --older-than; see femtoqueue purge --help", "purge jobs"),
        ("expected one argument; see femtoqueue pop --help", "pop jobs --wait"),
        ("unrecognized arguments: -x; put a PAYLOAD that begins with - after --", "push jobs -x"),
        ("as an argument: sh -c", "work jobs -- sh -c echo_{}"),
        ("as an argument: sh -c", "work jobs -- nice /bin/bash -ec {}"),
        ("as an argument: sh -c", "work jobs -- bash -o pipefail -c {}"),
        ("as an argument: sh -c", "work jobs -- sh -c -e {}"),
        ("--max-attempts must be None or an int", "work jobs --max-attempts -1 -- true"),
        ("--node must be 1 to 100", "work jobs --node a/b -- true"),
        ("unrecognized arguments: -l; put the command after --, as in: work", "work jobs ls -l"),
        ("unrecognized arguments: -x; see femtoqueue", "work jobs -x -- ls", "push jobs -x -- y"),
        ("unrecognized arguments: --until=1s; see femtoqueue pop --help", "pop jobs --until=1s"),
        ("unrecognized arguments: x; see", "pop jobs x", "stat jobs x", "show jobs TASK x"),
        ("argument ID: invalid 'why'", "fail jobs TASK why", "cancel jobs why"),
        ("argument --id: invalid '7'; an ID is the last 37 characters of a", "pop jobs --id 7"),
        ("last 37 characters of a task's name, or the path that `pop`", "cancel jobs TASK~1"),
        ("a TIME is 500ms, 30s", "push jobs --delay 3weeks x"),
        ("2026-12-01T08:00", "push jobs --at noon x"),
        ("invalid int value: 'many'", "stat jobs --max-pending many"),
        ("not allowed with", "push jobs --at 2050-12-01 --delay 1 x", "pop jobs --id TASK --key k"),
        ("not allowed with", "release jobs TASK --front --delay 1", "release jobs --all --node n"),
        ("for an empty task, give '' as PAYLOAD", "push jobs"),
        ("leave PAYLOAD out", "push jobs --lines x"),
        ("--if-in-flight goes with --key", "push jobs --if-in-flight update 1"),
        ("put the command after --", "work jobs", "work jobs echo hi", "work jobs echo -- hi"),
        ("unexpected 'echo'; put the command", "work jobs echo hi", "work jobs echo -- hi"),
        ("command not found, or not executable", "work jobs -- no-such-command", "work jobs -- /"),
        ("must be 1 or more", "work jobs -j 0 -- true", "work jobs -j -1 -- true"),
        ("--timeout must be finite, and greater than 0", "work jobs --timeout 0 -- true"),
        ("A-Z a-z 0-9 . _ -", "work jobs --node a/b -- true"),
        ("give IDs, --all or --node; see", "release jobs", "release jobs TASK --all"),
        ("give each ID, or --all", "retry jobs", "retry jobs --all TASK"),
        ("pending: there is no queue; push makes one", "ls pending"),
    )
    WRONG_USES_OF_A_QUEUE = (
        ("argument --key: invalid", "push jobs --key \udcff x", "pop jobs --key \udcff"),
        ("key must be 1 to 200 bytes", f"push jobs --key {'k' * 201} 1"),
        ("--if-in-flight must be buffer or update", "push jobs --key k --if-in-flight never 1"),
        ("state must be one of pending, scheduled", "ls jobs pendng"),
        ("jobs/file: there is no queue", "ls jobs/file"),
        ("--timeout must be finite, and greater than 0", "pop jobs --timeout 0s"),
        ("jobs/file", "push jobs/file x"),
    )
    # fmt: on

    def test_progress_is_left_out_if_the_system_allows_no_thread(self) -> None:
        error = RuntimeError("can't start new thread")
        with (
            mock.patch("os.isatty", return_value=True),
            mock.patch.dict(self.env, TERM="xterm"),
            mock.patch("threading.Thread.start", side_effect=error),
        ):
            status, _, err = self.run_command("push", "jobs", "x")
        self.assertEqual((status, "thread" in err), (0, False), err)
        self.assertEqual(self.states(), {"pending": 1})

    def test_commands_need_no_docstrings(self) -> None:
        program = [sys.executable, "-OO", "-B", os.path.join(HERE, "femtoqueue.py")]
        for words in (["push", "jobs", "x"], ["--help"], ["work", "--help"]):
            self.assertEqual(run_guarded(*program, *words, env=self.env)[0], 0)

    def test_reason_with_a_huge_number_is_shown(self) -> None:
        q = self.queue()
        q.fail(leased(q), f"x (try {'9' * 5000})")
        self.assertRegex(self.output_of("ls", "jobs"), r"\nfailed .* -  +1 ")

    def test_wrong_use_is_one_line_that_says_what_to_type(self) -> None:
        """A wrong use ends with exit status 2 and a message of one line, and changes nothing."""
        for text, *lines in self.WRONG_USES:
            for line in lines:
                self.check_wrong(
                    line.replace("TASK", f"{1:020d}-0000aaaa00000000"), text
                )
        with mock.patch.object(femtoqueue, "os", fake_os("fork")):
            self.check_wrong("work jobs -- true", "use FemtoQueue.work()")
        self.assertFalse(os.path.exists(self.path))
        self.queue().push(b"x")
        self.put("file", b"", "")
        for text, *lines in self.WRONG_USES_OF_A_QUEUE:
            for line in lines:
                self.check_wrong(line, text)
        with hooked(at_call("stat", "jobs/pending", errno_raiser(errno.EACCES))):
            self.check_wrong("ls jobs", "Permission denied")
        self.assertEqual(self.states(), {"pending": 1})

    def check_wrong(self, line: str, text: str) -> None:
        status, out, err = self.run_command(*line.split())
        self.assertEqual((status, out, err.count("\n")), (2, "", 1), f"{line}\n{err}")
        self.assertIn(text, err)

    def test_help_fits_a_terminal_of_80_columns_and_has_an_example_for_each_command(
        self,
    ) -> None:
        overview = self.output_of("--help")
        names = re.findall(r"(?m)^    ([a-z]+) ", overview)
        self.assertEqual(len(names), 18)
        texts = {name: self.output_of(name, "--help") for name in names}
        for name, text in texts.items():
            self.assertTrue(text.count("\n") <= 24 or name == "work", name)
            self.assertRegex(text, f"Example: .*femtoqueue {name} jobs")
            self.assertIn(f"\n    {name:9} {text.split(chr(10) * 2)[1]}\n", overview)
        for line in "\n".join([overview, *texts.values()]).split("\n"):
            self.assertLessEqual(len(line), 80, line)
        self.assertEqual(
            self.output_of("--version"), f"femtoqueue {femtoqueue.__version__}\n"
        )

    def test_release_all_names_a_lease_that_is_renewed_meanwhile_and_goes_on(
        self,
    ) -> None:
        q = self.queue(detached=True)
        q.push_many([b"1", b"2"])
        first, second = self.pop(q), self.pop(q)
        with hooked(at_call("move", None, lambda: q.extend(second), times=1)):
            status, out, err = self.run_command("release", "jobs", "--all")
        self.assertEqual((status, out, err.count("\n")), (1, "released 1\n", 1))
        self.assertIn(f"now it is {second.path}", err)
        self.assertEqual(self.names("pending")[0][-37:], first.id)

    def test_pop_that_is_interrupted_before_it_prints_leaves_nothing_leased(
        self,
    ) -> None:
        self.queue().push(b"x")
        with seam("write to a stream", lambda *_: interrupt()):
            self.assertEqual(femtoqueue.main(["pop", self.path]), 128 + signal.SIGINT)
        self.assertEqual(self.pop(self.queue()).attempts, 1)

    def looks_of_top(
        self, sizes: deque[os.terminal_size], after: Callable[[], object]
    ) -> Any:
        """Run `top` until Ctrl-C. Call after() each time a look has been drawn. The terminal always
        has the size sizes[0]: after() may change it, and imitates Ctrl-C at the end. Return the
        lines of each look."""
        with (
            captured() as outputs,
            # an old size, to be ignored
            mock.patch.dict(os.environ, COLUMNS="80", LINES="24"),
            mock.patch("os.get_terminal_size", side_effect=lambda _: sizes[0]),
            mock.patch("time.sleep", side_effect=lambda _: after()),
            mock.patch.dict(sys.modules, termios=None),  # as on Windows
            mock.patch("os.isatty", return_value=True),
        ):
            self.assertEqual(femtoqueue.main(["top", "jobs"]), 128 + signal.SIGINT)
        drawn = re.sub(r"\x1b\[[KJ]", "", outputs[0])
        _, *looks = drawn.split("\x1b[H")
        return [look.splitlines() for look in looks]

    def test_top_redraws_what_fits_on_the_terminal_until_ctrl_c(self) -> None:
        # Each look has the present size of the terminal, to the last line and column.
        q = self.queue()
        sizes = deque(map(os.terminal_size, [(100, 24), (12, 7), (60, 30)]))
        task = leased(q, key="user:42")

        def change() -> None:
            sizes.popleft()
            if len(sizes) == 1:
                q.done(task)
                q.push(b"y")
            elif not sizes:
                interrupt()

        large, small, later = self.looks_of_top(sizes, change)
        self.assertEqual(
            [large[1].split()[1], large[3].split()], ["0", ["inflight", "1"]]
        )
        self.assertRegex("\n".join(large), r"\Ajobs (?s:.*)\nworkers_alive +1\n")
        (row,) = [line for line in large if task.id in line]
        self.assertRegex(row, rf"^inflight +{task.id} .* user:42 n1 x$")
        self.assertEqual(
            (len(small), len(small[0]), small[3].strip()), (6, 12, "inflight")
        )
        self.assertEqual(later[1].split(), ["pending", "1"])
        self.assertNotIn(task.id, "".join(later))

    def test_pause_of_centuries_is_refused_in_one_line(self) -> None:
        self.queue()
        status, _, err = self.run_command("top", "jobs", "--interval", "999999999d")
        self.assertEqual((status, err.count("\n")), (2, 1), err)

    def test_top_says_once_that_it_waits_for_a_queue(self) -> None:
        command = [*self.program(), "top", "jobs", "--interval", "1ms"]
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        with Command(command, env=self.env, **streams) as process:
            line = process.stdout.readline()
            self.assertEqual(line, b"jobs: waiting for a queue\n")
            self.queue()
            self.assertEqual(process.stdout.readline()[:5], b"jobs ")
            process.send_signal(signal.SIGINT)

    def test_top_shows_one_line_in_a_terminal_of_one_row(self) -> None:
        self.queue()
        sizes = deque([os.terminal_size((80, 1))])
        (look,) = self.looks_of_top(sizes, interrupt)
        self.assertEqual((len(look), look[0][:5]), (1, "jobs "))

    # work

    def test_work_reports_its_progress_now_and_then_and_at_the_end(self) -> None:
        # Without a terminal, the progress is a plain line.
        self.queue(None).push_many([b"x"] * 3)
        program = self.program_with({"report": 0.05})
        words = "work", "jobs", "--drain", "--", "sh", "-c", self.GOES_ON
        form = r"femtoqueue  (\d) done \| (\d) running  (\d) waiting( \| .*)?\n"
        said = []
        with Command(
            [*program, *words], env=self.env, stderr=subprocess.PIPE
        ) as process:
            for line in io.TextIOWrapper(process.stderr):
                said.append(re.fullmatch(form, line))
                if said[-1] and said[-1].groups()[:3] == ("0", "1", "2"):
                    self.let_go()
        self.assertNotIn(None, said)
        # A rate is shown if the machine was slow.
        self.assertRegex(
            line, r"^femtoqueue  3 done \| 0 running  0 waiting( \| [0-9.]+/s)?\n$"
        )

    def test_unchanged_line_of_progress_is_not_repeated(self) -> None:
        self.queue(None).push(b"x")
        program = self.program_with({"report": 0.05})
        words = "work", "jobs", "--drain", "--", "sleep", "0.6"
        said = run_guarded(*program, *words, env=self.env)[2].splitlines()
        self.assertEqual(len(said), len({*said}), said)

    def test_last_line_of_progress_is_not_repeated_at_the_end(self) -> None:
        self.queue(None)
        program = self.program_with({"report": 0.05})
        with Command(
            [*program, "work", "jobs", "--", "true"],
            env=self.env,
            stderr=subprocess.PIPE,
        ) as process:
            line = process.stderr.readline()
            process.send_signals(signal.SIGTERM)
            self.assertEqual(
                (line, process.stderr.read()),
                (b"femtoqueue  0 done | 0 running  0 waiting\n", b""),
            )

    def test_command_that_ends_before_its_limit_is_done_even_if_the_worker_is_stopped(
        self,
    ) -> None:
        self.queue().push_many([b"x"] * 4)
        limits = "--task-timeout", "4s", "--max-attempts", "1", "--timeout", "60s"
        with self.start_work(
            "echo $$; sleep 0.3", "-j", "4", "--drain", *limits
        ) as process:
            pids = process.first_lines(4)
            process.send_signal(signal.SIGSTOP)
            until_gone(*pids)
            time.sleep(4.1)  # now the limit is over
            process.send_signal(signal.SIGCONT)
            self.assertEqual(process.wait(PATIENCE_S), 0)
        self.assertEqual(self.states(), {"done": 4})

    def test_worker_waits_while_the_system_has_no_process_or_descriptor_left(
        self,
    ) -> None:
        # In the launcher, the first starts fail as if a limit of processes was reached. In the
        # worker, the first pipe fails for want of descriptors.
        code = "import errno, os, subprocess\nfails = [errno.EAGAIN, errno.ENOMEM, 0]\n"
        code += (
            "class Popen(subprocess.Popen):\n    def __init__(self, *words, **how):\n"
        )
        code += "        if number := fails.pop(0) if fails else 0: raise OSError(number, '')\n"
        code += "        super().__init__(*words, **how)\nsubprocess.Popen = Popen\n"
        code += "pipe, pid, short = os.pipe, os.getpid(), [errno.EMFILE]\ndef fail():\n"
        code += "    if os.getpid() == pid and short: raise OSError(short.pop(), '')\n"
        code += "    return pipe()\nos.pipe = fail\n"
        *words, main = self.program()
        self.queue(None).push_many([b"x"] * 2)
        command = "work", "jobs", "-q", "--max-attempts", "1", "--drain", "--", "true"
        status, _, err = run_guarded(*words, code + main, *command, env=self.env)
        self.assertEqual((status, err.count(" waits: true can't be run")), (0, 3), err)
        self.assertEqual(self.states(), {"done": 2})

    def test_time_limit_ends_a_worker_that_waits_for_a_process(self) -> None:
        # In the launcher, each start fails as if a limit of processes was reached.
        code = "import errno, subprocess\nclass Popen(subprocess.Popen):\n"
        code += (
            "    def __init__(self, *words, **how): raise OSError(errno.EAGAIN, '')\n"
        )
        code += "    def __del__(self): pass\nsubprocess.Popen = Popen\n"
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--time-limit", "500ms", "--", "true"
        self.assertEqual(run_guarded(*words, code + main, *command, env=self.env)[0], 0)
        self.assertEqual([it.attempts for it in self.queue(None).tasks("pending")], [0])

    def test_worker_that_has_no_memory_says_so_and_goes_on(self) -> None:
        code = "drain, errors = femtoqueue.FemtoQueue.drain, [MemoryError()]\n"
        code += "def fail(*words):\n    if errors: raise errors.pop()\n"
        code += "    return drain(*words)\nfemtoqueue.FemtoQueue.drain = fail\n"
        *words, main = self.program()
        begin, _, run = main.partition("sys.exit")
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--drain", "--", "true"
        program = *words, f"{begin}\n{code}sys.exit{run}"
        status, _, err = run_guarded(*program, *command, env=self.env)
        self.assertRegex(err, r"^\S+ no memory; trying again\n$")
        self.assertEqual((status, self.states()), (0, {"done": 1}))

    def test_worker_whose_python_is_removed_still_takes_a_keyed_task(self) -> None:
        # From the first command on, each import fails.
        code = "import os\nclass Finder:\n    def find_spec(name, *_):\n"
        code += "        if os.path.exists('removed'): raise ImportError(name)\n"
        code += "sys.meta_path.insert(0, Finder)\n"
        script = "test -e removed || femtoqueue push jobs --key k x && touch removed"
        *words, main = self.program()
        begin, _, run = main.partition("sys.exit")
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--drain", "--", "sh", "-c", script
        program = *words, f"{begin}\n{code}sys.exit{run}"
        status, _, err = run_guarded(*program, *command, env=self.env)
        self.assertEqual((status, err, self.states()), (0, "", {"done": 2}))

    def test_error_of_the_worker_is_no_failed_try_of_its_task(self) -> None:
        # In the first worker, TemporaryFile() raises an error, as it may if the worker's Python is
        # removed. The second worker is started in a directory with
        # a user's random.py, which raises an error when it is imported. The worker must import
        # Python's own random.py instead.
        code = "import tempfile; tempfile.TemporaryFile = None\n"
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--max-attempts", "1", "--drain", "--", "true"
        self.assertEqual(run_guarded(*words, code + main, *command, env=self.env)[0], 2)
        self.check_and_finish({"pending": 1})
        self.queue(None).push(b"x")
        with open("random.py", "w", encoding="ascii") as file:
            file.write("raise RuntimeError")
        env = self.env | {"PYTHONPATH": self.bin}
        program = sys.executable, "-S", "-m", "femtoqueue"
        self.assertEqual(run_guarded(*program, *command, env=env), (0, "", ""))
        self.assertEqual(self.states(), {"done": 1})

    @unittest.skipUnless(sys.platform == "linux", "the limit depends on the stack")
    def test_too_large_an_environment_is_no_failed_try(self) -> None:
        code = "import resource; resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))\n"
        env = self.env | dict.fromkeys("abcd", "x" * 100_000)
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--max-attempts", "1", "--drain", "--", "true"
        status, _, err = run_guarded(*words, code + main, *command, env=env)
        self.assertEqual(status, 2)
        self.assertIn("femtoqueue: true can't be run: [Errno 7]", err)
        self.check_and_finish({"pending": 1})

    def test_a_command_that_cannot_be_killed_does_not_run_beside_its_next_try(
        self,
    ) -> None:
        # The processes of the command belong to another user, for example after sudo.
        code = (
            "import os\ndef killpg(group, number):\n"
            "    raise PermissionError\nos.killpg = killpg\n"
        )
        self.set_constant("grace", 0.1)
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = (
            "work",
            "jobs",
            "-q",
            "--task-timeout",
            "100ms",
            "--max-attempts",
            "2",
            "--drain",
        )
        script = "--", "sh", "-c", "echo begin; sleep 1.5; echo end"
        status, out, err = run_guarded(
            *words, code + main, *command, *script, env=self.env
        )
        self.assertEqual((status, out), (1, "begin\nend\n" * 2))
        self.assertIn("its command can't be killed", err)

    def test_time_limit_is_kept_even_if_nobody_reads_the_output_of_jobs(self) -> None:
        self.set_constant("grace", 0.3)
        self.queue().push_many([b"x"] * 2)
        limits = "--task-timeout", "300ms", "--max-attempts", "1"
        with self.start_work("exec yes", "-j", "2", "--drain", *limits) as process:
            self.assertEqual(process.wait(PATIENCE_S), 1)
        self.assertEqual(self.states(), {"failed": 2})

    @unittest.skipUnless(sys.platform == "linux", "pipes have a size on Linux")
    def test_output_left_in_a_large_pipe_when_a_job_ends_is_passed_on(self) -> None:
        self.queue().push(b"x")
        code = "import fcntl, os; fcntl.fcntl(1, 1031, 1 << 20); os.write(1, bytes(1000000))"
        command = (
            *self.program(),
            "work",
            "jobs",
            "-q",
            "--drain",
            "--",
            sys.executable,
            "-c",
            code,
        )
        with Command(command, env=self.env, stdout=subprocess.PIPE) as process:
            time.sleep(0.5)  # by then the pipe from the worker to this process is full
            self.assertEqual(len(process.stdout.read()), 1000000)
        self.assertEqual(self.states(), {"done": 1})

    def test_log_that_nobody_reads_keeps_no_task_from_its_end(self) -> None:
        self.set_constant("grace", 0.2)
        self.queue().push(b"x")
        limits = "--task-timeout", "300ms", "--max-attempts", "1"
        command = *self.program(), "work", "jobs", "--drain", *limits, "--", "yes"
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        with Command(command, env=self.env, stdout=writer, stderr=writer) as process:
            os.close(writer)
            self.assertEqual(process.wait(PATIENCE_S), 1)
        (task,) = self.queue("other").tasks("failed")
        self.assertRegex(str(task.error), r"\Akilled ")

    @unittest.skipUnless(sys.platform == "linux", "pipes have a size on Linux")
    def test_slow_reader_gets_all_output_even_after_the_time_limit(self) -> None:
        # The worker gives up only a reader that reads nothing for the time of grace.
        self.set_constant("grace", 5)
        self.queue().push(b"x")
        code = "import fcntl, os; fcntl.fcntl(1, 1031, 1 << 20); os.write(1, bytes(1000000))"
        limits = "--task-timeout", "3s", "--max-attempts", "1"
        words = (
            *self.program(),
            "work",
            "jobs",
            "-q",
            "--drain",
            *limits,
            "--",
            sys.executable,
            "-c",
        )
        with Command([*words, code], env=self.env, stdout=subprocess.PIPE) as process:
            size = 0
            while data := os.read(process.stdout.fileno(), 1 << 16):
                size += len(data)
                time.sleep(0.25)
        self.assertEqual((size, process.returncode), (1000000, 0))

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_a_zombie_does_not_keep_a_job_alive(self) -> None:
        # The first process of a container may never reap a zombie.
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.addCleanup(process.wait)
        groups = through_seam("groups of a session")
        self.assertEqual(groups({process.pid}), {process.pid})
        process.kill()
        until_gone(process.pid)
        self.assertEqual(groups({process.pid}), set())

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_a_process_whose_first_thread_has_ended_is_not_taken_for_a_zombie(
        self,
    ) -> None:
        # In /proc, the state of such a process is that of a zombie.
        code = "import ctypes, threading, time\n"
        code += "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        code += "ctypes.CDLL(None).pthread_exit(None)"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], start_new_session=True
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        until_gone(process.pid)  # returns when the state is that of a zombie
        self.assertEqual(
            through_seam("groups of a session")({process.pid}), {process.pid}
        )

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_proc_directory_of_another_pid_namespace_is_not_used_to_find_processes(
        self,
    ) -> None:
        # In such a /proc, the pid of a job belongs to a process of the host, for example to a
        # thread of the kernel. The process group of such a thread is 0, and killpg(0) would signal
        # the worker's own group.
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        groups = through_seam("groups of a session")
        calls = mock.Mock()
        with mock.patch("os.getpid", return_value=1), mock.patch("os.listdir", calls):
            self.assertEqual(groups({process.pid}), {process.pid})
        calls.assert_not_called()

    def progress(self) -> Any:
        return through_seam("progress")(self.path)

    def pace_text(self, *samples: tuple[float, int, int]) -> str:
        """Return the text that shows the rate and the time left. A sample has three parts: a time
        in seconds, the number of tasks left, and the number of tasks that this worker has ended."""
        progress = self.progress()
        for sample in samples:
            progress.add_sample(*sample)
        text: str = progress.pace_text()
        return text

    def test_rate_is_of_the_queue_or_of_this_worker_and_time_left_is_of_the_queue(
        self,
    ) -> None:
        others_work = [(s, 50_000 - 500 * s, 10 * s) for s in range(31)]
        grows = [(s, 1000 + 90 * s, 10 * s) for s in range(31)]
        pushed_as_fast_as_done = [(s, 14 + s % 2, 13 * s) for s in range(31)]
        slower_now = [
            *others_work,
            *((s, 35_000 - 10 * (s - 30), 10 * s) for s in range(31, 60)),
        ]
        minutes = [(60.0 * s, 9 - s, s) for s in range(5)]
        for samples, text in (
            (others_work, "500/s  about 70 s left"),
            (grows, "10/s"),
            (pushed_as_fast_as_done, "13/s"),
            (slower_now, "10/s  about 58 min left"),
            (minutes, "1/min  about 5 min left"),
            ([(0.0, 5, 0)], ""),
            ([(0.0, 5, 0), (0.5, 4, 1)], ""),
            ([(0.0, 5, 0), (900.0, 5, 0)], ""),
            ([(s / 2, 100_000 - s, 0) for s in range(5000)], "2/s  about 13 h left"),
        ):
            self.assertEqual(self.pace_text(*samples), text)

    def test_no_rate_and_no_time_left_are_shown_while_nothing_ends(self) -> None:
        ends = [(s / 20, 1000 - s, s) for s in range(200)]
        self.assertEqual(self.pace_text(*ends), "20/s  about 40 s left")
        stalled = [(10 + s, 801, 199) for s in range(30)]
        self.assertEqual(self.pace_text(*ends, *stalled), "")
        again = [(39 + s / 20, 801 - s, 199 + s) for s in range(1, 60)]
        self.assertEqual(
            self.pace_text(*ends, *stalled, *again), "20/s  about 37 s left"
        )
        self.queue().schedule(b"x", (time.time() + 7000) * 1e6)
        progress = self.progress()
        progress.count_left(0)
        began_s = time.monotonic()
        for now_s, *counts in ends:
            progress.add_sample(began_s + now_s, *counts)
        self.assertEqual(progress.pace_text(), "20/s  about 2 h left  1 due in 2 h")

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_line_of_progress_is_drawn_only_in_the_foreground(self) -> None:
        # The shell of this script leads the session of the terminal, and is in its foreground.
        work = [*self.program(), "work", "jobs", "--drain", "--"]
        script = "import pty, sys; pty.spawn(['bash', *sys.argv[1:]])"
        for shell, command, is_drawn in (
            ("%s; echo end", ("sh", "-c", self.GOES_ON), True),
            ("set -m; %s & wait; echo end", ("sleep", "1.5"), False),
        ):
            self.queue().push(b"x")
            words = (
                sys.executable,
                "-c",
                script,
                "-c",
                shell % shlex.join((*work, *command)),
            )
            env = self.env | {"TERM": "xterm"}
            null, pipe = subprocess.DEVNULL, subprocess.PIPE
            with Command(words, env=env, stdin=null, stdout=pipe) as process:
                awaited = b"1 running" if is_drawn else b""
                said = self.read_until(awaited, process.stdout.fileno())
                self.let_go()
                said += process.stdout.read()
            self.assertEqual(b"1 running" in said, is_drawn, said)
            self.assertIn(b"1 done", said)

    def test_line_of_progress_is_not_cleared_in_the_background(self) -> None:
        self.queue().push(b"x")
        script = "sleep 1; kill -TSTP $(worker); sleep 2"
        work = shlex.join(
            [*self.program(), "work", "jobs", "--drain", "--", "sh", "-c", script]
        )
        shell = f"set -m; {work}; echo stopped; bg; wait; echo end"
        words = "import pty, sys; pty.spawn(['bash', '-c', sys.argv[1]])", shell
        said = run_guarded(
            sys.executable, "-c", *words, env=self.env | {"TERM": "xterm"}
        )[1]
        before, _, after = said.partition("stopped")
        self.assertIn("1 running", before)
        self.assertRegex(after, r"(?s)1 done.*end")
        self.assertNotIn("\x1b[J", after)

    def test_progress_shows_that_the_queue_is_paused(self) -> None:
        q = self.queue()
        progress = self.progress()
        for change, end in ((q.pause, "0 waiting  paused"), (q.resume, "0 waiting")):
            change()
            progress.count_left(0)
            self.assertEqual(
                progress.text(Counter()), f"femtoqueue  0 done | 0 running  {end}"
            )

    def test_progress_counts_scheduled_tasks(self) -> None:
        q = self.queue()
        q.push_many([b"x"] * 3)
        q.schedule(b"x", (time.time() + 60) * 1e6)
        self.pop(q)
        progress = self.progress()
        progress.count_left(0)
        self.assertEqual((progress.waiting, progress.running), (3, 1))

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_on_a_dumb_terminal_the_progress_is_a_plain_line(self) -> None:
        self.queue().push(b"x")
        script = "--drain", "--", "sh", "-c", "sleep 1.2; echo word"
        said = self.run_on_terminal(80, "work", "jobs", *script, TERM="dumb")
        self.assertRegex(said, r"\Aword\r\nfemtoqueue  1 done [^\r]*\r\n\Z")

    # a command that waits for let_go(), but not for ever
    GOES_ON = "n=0; until [ -e go ] || [ $((n += 1)) -gt 2000 ]; do sleep 0.01; done"

    def let_go(self) -> None:
        with open("go", "wb"):
            pass

    def read_until(self, text: bytes, fd: int) -> bytes:
        """Read until a text has come. Return all that came."""
        said = b""
        while text not in said:
            data = os.read(fd, 1 << 16)
            self.assertTrue(data, said)
            said += data
        return said

    def run_on_terminal(
        self, columns: int, *words: str, awaited: bytes = b"", **env: str
    ) -> str:
        """Return what a command prints to a terminal with so many columns. Call let_go() when it
        has printed `awaited`."""
        master, slave = os.openpty()
        with open(master, "r+b", buffering=0) as terminal:
            # TIOCSWINSZ
            fcntl.ioctl(master, 0x5414, struct.pack("HHHH", 24, columns, 0, 0))
            env = self.env | {"TERM": "xterm"} | env
            command = [*self.program(), *words]
            streams: dict[str, Any] = dict.fromkeys(
                ("stdin", "stdout", "stderr"), slave
            )
            with Command(command, env=env, **streams, start_new_session=True):
                os.close(slave)
                said = self.read_until(awaited, master)
                self.let_go()
                with contextlib.suppress(OSError):
                    # EIO: no process has the terminal any longer
                    while data := terminal.read(1 << 16):
                        said += data
        return said.decode()

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_line_of_progress_on_a_terminal_is_cleared_before_other_output(
        self,
    ) -> None:
        command = "work", "jobs", "--drain", "--max-attempts", "1", "--", "sh", "-c"
        script = f"read x; test $x = bad && exit 1; {self.GOES_ON}; echo word"
        cases: tuple[tuple[int, dict[str, Any], str], ...] = (
            (80, {}, "\x1b[31m1 failed\x1b[0m"),
            (40, {"NO_COLOR": "1"}, "1 failed"),
        )
        for columns, env, failed in cases:
            os.chdir(self.new_dir(self.memory))
            FemtoQueue("jobs").push_many([b"bad", b"good"])
            line = f"femtoqueue  {failed} | 1 running  0 waiting"
            line = line[: columns if "NO_COLOR" in env else 99]
            awaited = line.encode()
            said = self.run_on_terminal(
                columns, *command, script, awaited=awaited, **env
            )
            self.assertRegex(said, r"wait[^\n]*\r\x1b\[Jword\r\n")
            rows = (
                re.sub(r"\x1b\[\d*[a-zA-Z]", "", said).replace("\n", "\r").split("\r")
            )
            *shown, _ = [row for row in rows if row.startswith("femtoqueue  ")]
            self.assertLessEqual(max(map(len, shown)), columns)
            *_, last, rest = said.split("\n")
            self.assertRegex(
                last, r"femtoqueue  1 done  1 failed \| 0 running  0 waiting[^\r]*\r\Z"
            )
            self.assertEqual(rest, "")

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_line_of_progress_is_cleared_before_an_error_of_the_queue_is_printed(
        self,
    ) -> None:
        self.queue().push(b"x")
        script = f"{self.GOES_ON}; rmdir jobs/pending; touch jobs/pending"
        command = "work", "jobs", "--drain", "--", "sh", "-c", script
        said = self.run_on_terminal(80, *command, awaited=b" waiting")
        self.assertRegex(
            said, r"waiting[^\n]*\r\x1b\[Jfemtoqueue: \[Errno 20\] [^\n]*\r\n\Z"
        )

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_views_on_a_terminal_pass_no_control_character_of_a_job_on(self) -> None:
        q = self.queue()
        task = leased(q, data=b"pay\x1b[Hload \xe6\x97\xa5")
        q.fail(task, "no such\timage \u65e5\r\x1b[Hx\nstate                done")
        reason = r"no such\\timage \u65e5\\r\\x1b\[Hx"
        said = self.run_on_terminal(80, "show", "jobs", task.id)
        self.assertRegex(said, rf"reason +{reason}\r\n {{21}}state +done\r\n")
        self.assertTrue(said.endswith("\r\npay\\x1b[Hload \u65e5"), said)
        said = self.run_on_terminal(120, "ls", "jobs")
        self.assertRegex(said, r"- - pay\\x1b\[Hload \u65e5\r\n")
        *_, last = through_seam("lines of top")(q, self.progress())
        self.assertRegex(
            last, rf"^failed +{task.id} .* pay\\x1b\[Hload \u65e5  no such "
        )

    @unittest.skipUnless(sys.platform == "linux", "needs a terminal of Linux")
    def test_top_waits_for_a_queue_and_changes_no_mode_of_the_terminal(self) -> None:
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        self.addCleanup(os.close, slave)
        before = termios.tcgetattr(slave)
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        with Command(
            [*self.program(), "top", "jobs"], env=self.env, **streams
        ) as process:
            self.read_until(b"waiting for a queue\r\n", master)
            self.queue()
            self.read_until(b"\x1b[H\x1b[Jjobs ", master)
            self.assertEqual(termios.tcgetattr(slave), before)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(PATIENCE_S), 128 + signal.SIGINT)

    def test_top_shows_a_dead_letter_that_a_person_moved_to_failed_under_the_name_of_its_lease(
        self,
    ) -> None:
        q = self.queue()
        task = leased(q)
        os.rename(
            self.file(task.path), self.file("failed", os.path.basename(task.path))
        )
        *_, last = through_seam("lines of top")(q, self.progress())
        self.assertRegex(last, rf"^failed +{task.id} ")

    def test_top_reads_only_the_dead_letters_that_it_shows(self) -> None:
        q = self.queue()
        for number in range(30):
            q.fail(leased(q, data=b"%d" % number))
        lines = list[str]()
        look = through_seam("lines of top")
        reads = calls_of("read", lambda: lines.extend(look(q, self.progress())))
        payloads = [line.split()[-1] for line in lines if line.startswith("failed  ")]
        self.assertEqual(payloads[1:], [str(29 - number) for number in range(20)])
        self.assertEqual(len(reads), 20)

    def start_work(self, script: str, *words: str) -> Command:
        """Start a process of `femtoqueue work`, which runs a shell script for each task."""
        command = [
            *self.program(),
            "work",
            "jobs",
            "-q",
            *words,
            "--",
            "sh",
            "-c",
            script,
        ]
        pipe = subprocess.PIPE
        process = Command(command, env=self.env, stdin=pipe, stdout=pipe, stderr=pipe)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def unblock(self, process: Command, count: int = 1) -> tuple[bytes, bytes]:
        """Let `count` commands go on: each waits for a line of the fifo. Wait until the worker
        ends, and return its standard output and standard error."""
        with open("fifo", "wb", buffering=0) as fifo:
            fifo.write(b"\n" * count)
            return process.communicate(timeout=120)

    def check_and_finish(self, states: dict[str, int]) -> None:
        """Fail unless the tasks are in these states, and no attempt of a waiting task was counted.
        Then finish the waiting tasks, and remove all finished tasks."""
        self.assertEqual(self.states(), states)
        q = self.queue()
        for task in iter(q.pop, None):
            self.assertEqual(task.attempts, 1)
            q.done(task)
        for name in self.names("done"):
            os.unlink(self.file("done", name))

    def test_signal_just_before_a_wait_is_noticed_before_an_ended_command_is_judged(
        self,
    ) -> None:
        # RACE: a signal comes just before a wait, and so does not end the wait. To imitate this,
        # each join() blocks the signal here: the worker handles the signal only after the wait.
        code = (
            "from signal import *; from threading import Thread; join = Thread.join\n"
        )
        code += "def deaf_join(thread, timeout):\n    old = pthread_sigmask(SIG_BLOCK, {SIGINT})\n"
        code += "    join(thread, timeout), pthread_sigmask(SIG_SETMASK, old)\n"
        code += "Thread.join = deaf_join\n"
        *words, main = self.program()
        self.queue(None).push(b"x")
        script = (
            "work",
            "jobs",
            "-q",
            "--",
            "sh",
            "-c",
            "kill -INT $(worker); exit 130",
        )
        self.assertEqual(run_guarded(*words, code + main, *script, env=self.env)[0], 0)
        self.check_and_finish({"pending": 1})

    def test_task_that_a_second_signal_ends_is_given_back_when_its_whole_job_has_ended(
        self,
    ) -> None:
        """The second signal ends all commands, and a task is given back when all processes of its
        command have ended."""
        # The signal goes to the process group of each command. The end of a shell is not enough:
        # the program that the shell started must have ended, too. If a command exits with status 0,
        # its task is done.
        self.set_constant("one signal", 0.05)
        self.set_constant("grace", 3)
        see = "while sleep 0.01; do ls jobs/pending | grep $FEMTOQUEUE_ID >> seen; done"
        script = f"""read x; case $x in
            group) sleep 1000 & echo $!; wait ;;
            hangs) trap '' TERM; echo $$; {see} ;;
            program) sh -c "trap '' TERM; echo \\$\\$; {see}" & wait ;;
            well) trap 'exit 0' TERM; echo $$; while sleep 0.01; do :; done ;;
        esac"""
        for names in ("group", "group group group", "hangs program well"):
            self.queue().push_many(map(str.encode, names.split()))
            count = len(names.split())
            well = names.count("well")
            with self.start_work(script, "-j", str(count)) as process:
                pids = process.first_lines(count)
                process.send_signals(signal.SIGINT, signal.SIGTERM)
            self.assertEqual(process.returncode, 128 + signal.SIGTERM)
            until_gone(*pids)
            self.check_and_finish(
                {"pending": count - well} | ({"done": well} if well else {})
            )
        self.assertEqual(os.path.getsize("seen"), 0)

    def stop_at_work(self, script: str, jobs: int, number: int, first: str) -> None:
        """Let a worker run `jobs` commands, and send a signal to the worker and the commands. The
        worker must end with status 0. `first` says who gets the signal first: "CMD", "worker", or
        "worker alone" if the commands get none."""
        with self.start_work(script, "-j", str(jobs), "--max-attempts", "1") as process:
            pids = [int(pid) for pid in process.first_lines(jobs)]
            if first != "CMD":
                process.send_signals(number)
            for pid in pids if first != "worker alone" else ():
                os.kill(pid, number)
            if first == "CMD":
                until_gone(*pids)
                process.send_signal(number)
            if script == self.SAVES:
                self.assertRaises(subprocess.TimeoutExpired, process.wait, 0.2)
            if "fifo" in script:
                self.unblock(process, jobs)
            process.wait(PATIENCE_S)
        self.assertEqual(process.returncode, 0)

    # Commands that print the pid of their first process. SAVES: the shell starts a program that
    # outlives it, and that notes whether its task waits already.
    WAITS, DIES = "echo $$; read x < fifo", "echo $$; exec sleep 1000"
    EXITS = "trap 'exit %d' TERM HUP USR1; echo $$; while sleep 0.01; do :; done"
    SAVES = (
        "(read x < fifo; ls jobs/pending | grep $FEMTOQUEUE_ID >> seen) & echo $$; wait"
    )
    # the command; the signal; who gets it first; the state of the task afterwards
    STOPS = (
        (WAITS, "SIGTERM", "worker alone", "done"),
        (DIES, "SIGTERM", "worker", "pending"),
        (DIES, "SIGTERM", "CMD", "pending"),
        (DIES, "SIGUSR1", "worker", "pending"),
        (DIES, "SIGHUP", "CMD", "pending"),
        (EXITS % 143, "SIGTERM", "CMD", "pending"),
        (EXITS % 143, "SIGHUP", "worker", "pending"),
        (EXITS % 1, "SIGTERM", "worker", "pending"),
        (EXITS % 1, "SIGTERM", "CMD", "pending"),
        (EXITS % 0, "SIGTERM", "worker", "done"),
        (SAVES, "SIGTERM", "worker", "pending"),
        (SAVES, "SIGTERM", "CMD", "pending"),
    )

    def test_stop_lets_commands_finish_and_an_attempt_that_its_signal_ends_is_not_counted(
        self,
    ) -> None:
        """After a signal, the worker finishes its commands and takes no more tasks, and an attempt
        that the signal ended is not counted."""
        # A scheduler signals the worker and CMD, in either order. CMD may handle the signal. If CMD
        # then exits with a status other than 0, the attempt does not count; if it exits with 0, its
        # task is done. If a program outlives its shell, to save its state, no other worker gets the
        # task until the program ends.
        #
        # After CMD has failed, the worker waits for its own signal, here for up to 60 s. On a
        # slow machine, this test may notice the end of CMD late, and the worker may notice the
        # signal late.
        self.set_constant("one signal", 60)
        os.mkfifo("fifo")
        for jobs, (script, name, first, state) in zip(
            (2, 1) * 6, self.STOPS, strict=True
        ):
            more = 0 if first == "CMD" else 2
            self.queue().push_many([b"x"] * (jobs + more))
            with self.subTest(script, name=name, first=first):
                self.stop_at_work(script, jobs, signal.Signals[name], first)
                self.check_and_finish(Counter({state: jobs}) + Counter(pending=more))
        self.assertEqual(os.path.getsize("seen"), 0)

    @unittest.skipUnless(os.path.exists("/proc/thread-self/children"), "needs /proc")
    def test_worker_whose_launcher_is_killed_ends_its_jobs_and_gives_the_tasks_back(
        self,
    ) -> None:
        # A scheduler may signal all processes that it has started. SIGUSR1 and SIGTERM do not end
        # the launcher. If the worker is killed afterwards, the launcher still kills the command.
        # Only SIGKILL ends the launcher.
        self.queue().push_many([b"x"] * 3)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            with self.start_work(
                "echo $$; exec sleep 1000", "--max-attempts", "1"
            ) as process:
                (command,) = map(int, process.first_lines(1))
                os.kill(self.launcher_of(process), number)
                if number != signal.SIGKILL:
                    process.kill()
                until_gone(command)
                err = process.communicate(timeout=120)[1]
        self.assertEqual(process.returncode, 2)
        self.assertIn(b"launcher", err)
        self.check_and_finish({"failed": 2, "pending": 1})

    def launcher_of(self, process: Command) -> int:
        children: list[str] = []
        while not children:
            with open(
                f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii"
            ) as file:
                children = file.read().split()
        return int(*children)

    def test_job_that_starts_during_the_second_signal_gets_the_signal(self) -> None:
        # RACE: both signals come before the start of a command is requested.
        self.set_constant("one signal", 0.05)
        self.set_constant("grace", 30)
        code = "import os, signal, socket, time\nsend = socket.send_fds\ndef late(*words):\n"
        code += (
            "    for _ in 1, 2: os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.5)\n"
        )
        code += "    send(*words)\nsocket.send_fds = late\n"
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--", "sleep", "1000"
        began_s = time.monotonic()
        status = run_guarded(*words, code + main, *command, env=self.env)[0]
        self.assertEqual(status, 128 + signal.SIGTERM)
        self.assertLess(time.monotonic() - began_s, constant("grace"))
        self.check_and_finish({"pending": 1})

    def test_output_is_dropped_if_its_reader_ends_just_before_the_signal_comes(
        self,
    ) -> None:
        # RACE: Ctrl-C ends the reader of the output first. Here, the command itself sends the
        # signal, after its output could not be passed on.
        self.set_constant("one signal", 60)
        self.queue().push(b"x")
        with self.start_work(
            "echo 1; sleep 0.3; kill -INT $(worker); echo 2"
        ) as process:
            process.stdout.close()
            self.assertEqual(process.wait(PATIENCE_S), 0)
        self.assertEqual(self.states(), {"done": 1})

    def test_signals_end_work_even_if_nobody_reads_its_output(self) -> None:
        # The signals come while the output of a command is stuck. If this output is standard error,
        # a line of the log is stuck, too.
        self.set_constant("one signal", 0.1)
        self.set_constant("grace", 0.3)
        for output, to in (("stdout", ""), ("stderr", ">&2")):
            self.queue().push_many([b"fails", b"writes"])
            script = f"read x; if test $x = fails; then sleep 0.2; exit 1; fi; yes {to}"
            words = ("-j", "2", "--max-attempts", "1")
            with self.subTest(output), self.start_work(script, *words) as process:
                select.select([getattr(process, output)], [], [], 120)
                # Wait for the failed task and its reason, 0.2 s or more. By then the pipe is full.
                until(lambda: len(self.names("failed")) == 2)
                process.send_signal(signal.SIGTERM)
                time.sleep(2 * constant("one signal"))
                for _ in range(6):  # two of these signals may count as one
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(20)
                        break
                self.assertEqual(process.returncode, 128 + signal.SIGTERM)
            self.check_and_finish({"pending": 1, "failed": 1})
            self.queue().purge(0, "failed")

    def test_second_signal_ends_work_while_a_line_of_the_log_is_stuck(self) -> None:
        """If the write of a line to the log never returns, the second signal ends the worker."""
        # RACE: another process fills the pipe just after the worker has found it writable. Here the
        # pipe is full from the beginning, and the worker finds it writable all the same.
        self.set_constant("one signal", 0.05)
        self.set_constant("grace", 0.3)
        code = "import select\nwait = select.select\ndef find(reads, writes, odd, seconds):\n"
        code += "    if writes and seconds: return [], writes, []\n"
        code += "    return wait(reads, writes, odd, seconds)\nselect.select = find\n"
        *words, main = self.program()
        self.queue(None).push(b"x")
        command = "work", "jobs", "-q", "--max-attempts", "1", "--", "false"
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, bytes(4096)):
                pass
        os.set_blocking(writer, True)
        program = *words, code + main
        with Command([*program, *command], env=self.env, stderr=writer) as process:
            os.close(writer)
            until(lambda: len(self.names("failed")) == 2)
            process.send_signal(signal.SIGTERM)
            time.sleep(4 * constant("one signal"))
            # The first of these signals may count as one with the former.
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                    break
            self.assertEqual(process.wait(PATIENCE_S), 128 + signal.SIGTERM)
        self.check_and_finish({"failed": 1})

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_worker_that_is_killed_while_a_job_ends_leaves_no_process_of_the_job(
        self,
    ) -> None:
        # When the worker is killed, the shell of the job has already been ended by the time limit,
        # by a scheduler's signal, or by a second signal.
        for words, signals in ((("--task-timeout", "3s"), 0), ((), 1), ((), 2)):
            with self.subTest(signals=signals):
                self.queue().push(b"x")
                self.kill_as_a_job_ends(signals, *words)

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_program_that_outlives_its_shell_in_a_stop_can_still_write(self) -> None:
        # The output is passed on until the whole job has ended, however long ago the shell ended.
        self.queue().push(b"x")
        with self.start_work(
            "(sleep 1.5; echo saving; echo ok > saved) & echo $$; wait"
        ) as process:
            shell = int(process.first_lines(1)[0])
            process.send_signals(signal.SIGTERM)
            os.kill(shell, signal.SIGTERM)
            said = process.stdout.read()
            process.wait(PATIENCE_S)
        self.assertEqual((said, os.path.exists("saved")), (b"saving\n", True))
        self.check_and_finish({"pending": 1})

    @unittest.skipUnless(os.path.exists("/proc/self/stat"), "needs /proc")
    def test_the_second_signal_goes_to_a_program_that_has_outlived_its_shell(
        self,
    ) -> None:
        self.queue().push(b"x")
        program = (
            "trap 'echo >> saved; exit' TERM; echo $$; while sleep 0.01; do :; done"
        )
        with self.start_work(
            f"echo $$; sh -c {shlex.quote(program)} & wait"
        ) as process:
            shell, child = map(int, process.first_lines(2))
            process.send_signals(signal.SIGTERM)
            os.kill(shell, signal.SIGTERM)
            until_gone(shell)
            time.sleep(2 * constant("one signal"))
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
            until_gone(child)
        self.assertTrue(os.path.exists("saved"))
        self.check_and_finish({"pending": 1})

    def kill_as_a_job_ends(self, signals: int, *words: str) -> None:
        """Kill a worker when the shell of its job has ended, and wait until the program ends that
        the shell has started.

        signals: 0: the time limit ends the shell. 1: a signal to the worker and to the shell ends
        it. 2: a second signal to the worker ends it.
        """
        program = "trap '' TERM; echo $$; while sleep 0.01 && test -d jobs; do :; done"
        with self.start_work(
            f"echo $$; sh -c {shlex.quote(program)} & wait", *words
        ) as process:
            shell, child = map(int, process.first_lines(2))
            if signals:
                process.send_signals(signal.SIGTERM)
                time.sleep(2 * constant("one signal"))
                os.kill(shell if signals == 1 else process.pid, signal.SIGTERM)
            until_gone(shell)
            process.kill()
            until_gone(child)

    def test_killed_worker_leaves_neither_command_nor_launcher_without_proc(
        self,
    ) -> None:
        *words, main = self.program()
        begin, _, run = main.partition("sys.exit")
        code = f"{begin}femtoqueue._processes = list; sys.exit{run}"
        self.queue(None).push(b"x")
        script = "echo $$ $PPID; exec sleep 1000"
        command = [*words, code, "work", "jobs", "-q", "--", "sh", "-c", script]
        with Command(command, env=self.env, stdout=subprocess.PIPE) as process:
            pids = process.first_lines(1)[0].split()
            process.kill()
            until_gone(*pids)

    @unittest.skipUnless(os.path.exists("/proc/thread-self/children"), "needs /proc")
    def test_killed_worker_or_launcher_leaves_no_command(self) -> None:
        """If a worker or its launcher is killed, no process of a job is left, and others get the
        tasks at once."""
        # The commands are looked for in /proc, because a command that was not yet told to anybody
        # prints no pid. They sleep for a time that no other process has.
        for number, (of_launcher, begun) in enumerate(
            itertools.product((False, True), (0, 1, 9))
        ):
            self.queue().push_many([b"x"] * 30)
            seconds = f"{1000 + number}.{os.getpid()}"
            words = ("-j", "30", "--max-attempts", "9", "--timeout", "1000s")
            script = f"echo $$; sleep {seconds} & wait"
            with self.start_work(script, *words) as process:
                process.first_lines(begun)
                launcher = self.launcher_of(process)
                os.kill(launcher if of_launcher else process.pid, signal.SIGKILL)
                # ends when the launcher and all commands have ended
                process.stdout.read()
                process.wait(PATIENCE_S)
            until(lambda: not self.processes_of(seconds))  # noqa: B023
            q = self.queue(None)
            self.assertEqual(len(self.drain(q)), 30)

    def processes_of(self, word: str) -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/cmdline", "rb") as file,
            ):
                if word.encode() in file.read():
                    found.append(pid)
        return found


# The README, and the docstring of the module


class Documents(QueueCase):
    """The programs and commands of the README and of the module's docstring run as they are
    printed, in a directory that holds nothing but femtoqueue.py."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())
        self.go_to(self.path)

    def go_to(self, path: str) -> None:
        os.chdir(path)
        shutil.copy(os.path.join(HERE, "femtoqueue.py"), ".")

    def run_command(self, *command: str) -> str:
        """Run a command, which must succeed without a message, and return its output."""
        status, out, err = run_guarded(*command, env=os.environ)
        self.assertEqual((status, err), (0, ""), command[-1])
        return out

    def run_python(self, code: str) -> str:
        return self.run_command(sys.executable, "-S", "-W", "error", "-c", code)

    def blocks(self, language: str = "") -> list[tuple[str, str]]:
        """Return the language and the text of each code block of the README. With `language`, only
        blocks in this language are returned."""
        with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
            found = re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", file.read())
        return [it for it in found if language in ("", it[0])]

    def block(self, text: str, language: str = "python") -> str:
        (found,) = (code for _, code in self.blocks(language) if text in code)
        return found

    def without_variable_parts(self, text: str) -> list[str]:
        """Return the lines of a text, with placeholders for the parts that differ in each run: ids,
        deadlines, times and the widths of columns."""
        for pattern, plain in (
            (r"\d{20}~(?=\d+~)", "DEADLINE~"),
            (r"\d{20}-[0-9a-f]{16}", "ID"),
            (r"\d\d:\d\d:\d\d", "CLOCK"),
            (r"\b\d+s\b", "AGE"),
            (r" +", " "),
        ):
            text = re.sub(pattern, plain, text)
        return text.splitlines()

    def test_the_example_of_the_docstring_works_on_its_task(self) -> None:
        match = re.search(r"\n\n((?:    .*\n|\n)+)", femtoqueue.__doc__ or "")
        assert match is not None
        code = "\n".join(line[4:] for line in match[1].splitlines())
        self.assertIn("resize 42.png", self.run_python(code))

    def test_each_program_of_the_readme_prints_what_the_readme_says(self) -> None:
        """Each program prints what stands in the comments behind its print()s."""
        # Two programs have tests of their own: the idea of the queue with bare system calls, and
        # the move from femtoqueue 0.4.2.
        count = 0
        for _, code in self.blocks("python"):
            if re.match(r"import os, time|import hashlib", code):
                continue
            said = re.findall(r"(?m)^ *print\(.*\)  # (.*)$", code)
            count += 1
            self.go_to(self.new_dir(self.memory))
            with self.subTest(code):
                self.assertEqual(self.run_python(code).splitlines(), said)
        self.assertGreaterEqual(count, 10)

    def test_help_shows_the_public_interface_only(self) -> None:
        import pydoc

        text = pydoc.plain(pydoc.render_doc(femtoqueue))
        classes = re.findall(r"(?m)^    class (\w+)\(", text)
        self.assertIn("FemtoQueue", classes)
        self.assertLessEqual({*classes}, {*femtoqueue.__all__})

    def test_an_old_python_is_told_which_one_is_needed(self) -> None:
        """With an old Python, the import raises ImportError, and a command prints one line."""
        old = (
            "import sys; sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'; "
        )
        wanted = "femtoqueue needs Python 3.10 or later, not 3.9.18\n"
        for code, error in (
            ("import femtoqueue", f"ImportError: {wanted}"),
            (
                "import runpy; runpy.run_path('femtoqueue.py', run_name='__main__')",
                wanted,
            ),
        ):
            status, out, err = run_guarded(
                sys.executable, "-S", "-c", old + code, env=os.environ
            )
            self.assertEqual((status, out), (1, ""))
            self.assertEqual(
                err.splitlines(True)[-1 if "Error" in error else 0 :], [error]
            )

    def test_the_import_brings_no_heavy_modules(self) -> None:
        heavy = {
            *("argparse", "asyncio", "concurrent.futures", "ctypes", "json"),
            *(
                "logging",
                "queue",
                "select",
                "selectors",
                "shutil",
                "signal",
                "subprocess",
            ),
            *("tempfile", "traceback"),
        }
        code = f"import femtoqueue, sys; print({heavy} & {{*sys.modules}})"
        self.assertEqual(self.run_python(code).strip(), "set()")

    def sh(self, script: str) -> str:
        """Run a shell script, in which `femtoqueue` is a command. Return all that is printed."""
        python = f"{sys.executable} -W error"
        begin = f'python3() {{ {python} "$@"; }}; femtoqueue() {{ python3 -m femtoqueue "$@"; }}'
        env = {**os.environ, "LC_ALL": "C"}
        return run_guarded("sh", "-uc", f"{begin}\nexec 2>&1\n{script}", env=env)[1]

    @FORK
    def test_each_transcript_shows_what_its_commands_print(self) -> None:
        # Ids, times and the widths of columns may differ.
        transcripts = [text for _, text in self.blocks("console")]
        self.assertGreater(len(transcripts), 1)
        for text in transcripts:
            self.go_to(self.new_dir(self.memory))
            # otherwise the first push says that it makes a queue
            FemtoQueue("jobs").close()
            commands = re.findall(r"(?m)^\$ (.*)$", text)
            said = self.sh(
                "\n".join(f"echo {shlex.quote(f'$ {it}')}\n{it}" for it in commands)
            )
            with self.subTest(text):
                self.assertEqual(
                    self.without_variable_parts(said), self.without_variable_parts(text)
                )

    def test_second_delivery_to_the_database_of_the_readme_changes_nothing(
        self,
    ) -> None:
        # A worker that dies between the commit of the database and done() causes a second delivery.
        import sqlite3

        for _ in range(2):
            self.run_python(self.block("db = "))
            for name in self.names("jobs/done"):
                os.rename(f"jobs/done/{name}", f"jobs/pending/{name}")
        with contextlib.closing(sqlite3.connect("app.db")) as db:
            rows = db.execute("SELECT data FROM invoices").fetchall()
        # two tasks, of which one came twice
        self.assertEqual(rows, [(b"invoice 7",)] * 2)

    @FORK
    def test_the_pool_of_the_unit_file_works_and_stops_when_systemd_says_so(
        self,
    ) -> None:
        ((_, unit),) = self.blocks("ini")
        settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
        command = settings["ExecStart"].replace("/srv/jobs", "jobs")
        command = command.replace("/usr/bin/python3 /opt/", f"{sys.executable} ")
        command = command.replace("/usr/local/bin/resize", "cat")
        FemtoQueue("jobs").push_many([b"a\n", b"b\n"])
        drained = f"{sys.executable} -c 'from femtoqueue import *; FemtoQueue(\"jobs\").join()'"
        said = self.run_command(
            "sh", "-c", f"{command} 2> err & {drained}; kill $!; wait $!"
        )
        self.assertEqual(
            (sorted(said.split()), settings["Restart"]), (["a", "b"], "always")
        )

    @FORK
    def test_commands_of_the_crontab_run_the_pushed_tasks(self) -> None:
        # The second push adds no task, because the task of yesterday still waits.
        push, work = (
            it.split(None, 5)[5] for it in self.block("--key", "crontab").splitlines()
        )
        os.chmod(self.put("report", b"#!/bin/sh\ncat; echo\n", ""), 0o755)
        script = "\n".join((push, push, work.replace("10s", "0s")))
        script = script.replace("/opt/report", "./report").replace("/opt/", "")
        _, *said = self.sh(script.replace("/srv/jobs", "jobs")).splitlines()
        self.assertEqual(said[0], said[1])
        self.assertEqual(said[2:], ["nightly report"])

    @FORK
    def test_an_element_of_the_slurm_array_gives_back_what_it_can_not_finish(
        self,
    ) -> None:
        """An element of the array gives back a task that it can't finish, and ends if there is
        nothing to do."""
        # The scheduler signals only the shell.
        script = self.block("#SBATCH", "bash")
        for old, new in (
            ("sleep 45", "sleep 1"),
            ("5m", "0s"),
            ("python3", sys.executable),
        ):
            self.assertIn(old, script)
            script = script.replace(old, new)
        self.put("element", script.encode(), "")
        os.chmod(
            self.put("task.sh", b"#!/bin/sh\necho begun\nexec sleep 1000\n", ""), 0o755
        )
        said = self.run_command(
            *("sh", "-c"),
            f"""export SLURM_CPUS_PER_TASK=2 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=1
            exec 2> err; sh element && {sys.executable} -m femtoqueue push jobs x
            sh element > out & until [ -s out ]; do sleep 0.01; done
            ls -d jobs/inflight-7-1; kill $!; wait $!; echo $?""",
        )
        self.assertRegex(said, r"\A.*\njobs/inflight-7-1\n143\n\Z")
        task = FemtoQueue("jobs").pop()
        self.assertEqual(task and (task.data, task.attempts), (b"x", 1))

    def test_idea_of_the_queue_works_with_bare_system_calls(self) -> None:
        code = self.block("import os, time")
        self.assertLessEqual(len(code.splitlines()), 25)
        for state in ("creating", "pending", "inflight", "done"):
            os.mkdir(state)
        for number in (1, 2):
            self.assertRegex(
                self.run_python(code), r"\Aworking on \d{20}-[0-9a-f]{16}\n\Z"
            )
            self.assertEqual(len(os.listdir("done")), number)

    # The program that drains a queue of femtoqueue 0.4.2 into a new one

    def write_old(
        self, state: str, time_us: int, payload: bytes, digest: bytes | None = None
    ) -> str:
        """Write the file of a task as femtoqueue 0.4.2 did, and return its path.

        The file has a version byte, 7 zero bytes, the md5 of the payload, and the payload. The name
        has the time in microseconds, and the repr() of a method, which 0.4.2 forgot to call.
        """
        name = f"{time_us}_<built-in method hex of bytes object at 0x7f{time_us % 997:010x}>"
        os.makedirs(os.path.join("old", state), exist_ok=True)
        content = b"\1" + bytes(7) + (digest or hashlib.md5(payload).digest()) + payload
        return self.put(name, content, f"old/{state}")

    def test_unfinished_tasks_of_0_4_2_come_over_in_their_order_and_at_their_time(
        self,
    ) -> None:
        """Tasks that waited or were in progress come over, in order, and a second run adds none."""
        # Corrupt and finished tasks stay in the old queue.
        now_us = int(time.time() * 1e6)
        due_us = now_us + 3600 * 10**6
        payloads = [b"0", b"1", b"2", b"3", b""]
        states = "node2", "node1", "pending", "pending", "pending"
        for number, (state, payload) in enumerate(zip(states, payloads, strict=True)):
            self.write_old(state, now_us - 9000 + number, payload)
        self.write_old("scheduled", due_us, b"later")
        stay = [self.write_old("pending", 10**15, b"torn", bytes(16))]
        stay += [
            self.write_old(state, 10**15, b"x")
            for state in ("creating", "done", "failed")
        ]
        q = FemtoQueue("new")
        code = self.block("import hashlib")
        for _ in range(2):
            self.assertEqual(self.run_python(code), "")
            self.assertEqual([task.data for task in q.tasks("pending")], payloads)
            (task,) = q.tasks("scheduled")
            assert task.until is not None
            due = task.data, round(task.until.timestamp() * 1e6)
            self.assertEqual(due, (b"later", due_us))
        self.assertTrue(all(map(os.path.exists, stay)))
        self.assertEqual(len(os.listdir("old/done")), 1 + 6)


# Races that need a test of their own


class Races(QueueCase):
    """Races of two operations, or of an operation and a signal, that the tests which try every
    system call do not reach."""

    def test_retry_failed_and_purge_pass_over_a_file_that_can_not_be_moved(
        self,
    ) -> None:
        """One task that may not be moved or removed, such as an immutable file, does not keep the
        others from being retried and purged."""
        q = self.queue()
        for n in (b"1", b"2", b"3"):
            q.fail(leased(q, n))
        first = next(q.tasks("failed")).id
        with hooked(
            at_call("move unlink", f"failed/{first}", errno_raiser(errno.EPERM))
        ):
            self.assertEqual(q.retry_failed(), 2)
            for task in iter(q.pop, None):
                q.fail(task)
            self.assertEqual(q.purge(0, "failed"), 2)
        self.assertEqual(self.states(), {"failed": 1})

    def test_purge_passes_over_a_task_that_another_process_removes(self) -> None:
        """A task that is gone when purge() removes it does not count, and is no error."""
        q = self.queue()
        q.done(leased(q))
        path = self.file("done", *self.names("done"))
        with hooked(at_call("unlink", path, lambda: os.unlink(path), times=1)):
            self.assertEqual(q.purge(0), 0)

    def test_tasks_pushed_during_a_listing_are_delivered_in_order(self) -> None:
        # RACE: another worker pushes tasks while pop() lists pending/. The listing returns only the
        # younger ones of these tasks. The oldest one is still delivered before them. This also
        # holds if most of the listed names are foreign.
        for before, foreign, meanwhile in ((0, 0, 300), (300, 0, 300), (0, 300, 2)):
            q = self.new_queue()
            pushed = list[str]()
            self.assertIsNone(q.pop())
            q.push_many([b"x"] * before)
            self.foreign = tuple(self.put(f"foreign{n}", b"") for n in range(foreign))

            def listdir(fd: int, row: Any = (q, pushed, meanwhile)) -> list[str]:
                names = os.listdir(fd)
                (q, pushed, meanwhile) = row
                if path_at(fd, ".").endswith("pending") and not pushed:
                    pushed.extend(q.push_many([b"x"] * meanwhile))
                    names += pushed[1:]
                return names

            with mock.patch.object(femtoqueue, "os", fake_os(listdir=listdir)):
                ids = [popped(q).id for _ in range(before + meanwhile)]
            self.assertEqual(ids, sorted(ids))

    def test_push_of_a_signal_handler_while_an_id_is_made_gets_another_id(self) -> None:
        # The signal may come before any line of new_id().
        q = self.queue()
        ids = list[str]()
        for number in itertools.count():
            with at_line(
                number, lambda: ids.append(q.push(b"handler")), ("new_id",)
            ) as came:
                ids.append(q.push(b"x"))
            if not came:
                break
        self.assertGreater(number, 1)
        self.assertEqual(len(self.names("pending")), len(ids))

    def test_claim_that_loses_a_race_does_not_disturb_the_winner_in_another_thread(
        self,
    ) -> None:
        # RACE: a thread has claimed a task by take() and is reading the payload. In another thread
        # of the same object, pop() fails to claim the same task. pop() must deliver the next task.
        q = self.queue()
        got = list[FemtoTask | None]()
        _, wanted, last = q.push_many([b"1", b"2", b"3"])
        self.pop(q)
        reads, may_go_on = threading.Event(), threading.Event()

        def meet(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and args[0].endswith(wanted) and "/inflight-" in args[0]:
                reads.set()
                may_go_on.wait(PATIENCE_S)

        with hooked(meet), in_threads(lambda: got.append(q.take(id=wanted))):
            reads.wait(PATIENCE_S)
            task = q.pop()
            may_go_on.set()
        self.assertEqual((task and task.id, got[0] and got[0].id), (last, wanted))

    @FORK
    def test_mount_that_hangs_does_not_block_a_queue_on_another_mount(self) -> None:
        """While a thread hangs in the open or close of a lock file, push() to a queue on another
        mount does not wait, and a fork waits only for a moment."""
        for event in ("open", "close"):
            with self.subTest(event):
                self.check_push_and_fork_while_hanging(event)

    def check_push_and_fork_while_hanging(self, event: str) -> None:
        q = self.new_queue()
        other = FemtoQueue(self.new_dir(self.memory))
        self.addCleanup(other.close)
        os.mkdir(self.file("inflight-n2"))
        hangs, goes_on = threading.Event(), threading.Event()
        pushed = list[str]()
        children = list[Child]()
        self.addCleanup(goes_on.set)

        def hang(name: str, args: tuple[Any, ...]) -> None:
            if name == event and not hangs.is_set():
                hangs.set()
                goes_on.wait()
                other.push(b"x", key="k")

        def push() -> None:
            pushed.append(other.push(b"x", key="k"))

        def fork() -> None:
            children.append(self.child(lambda child: child.say("forked")))

        with hooked(hang), in_threads(q.stats):
            self.assertTrue(hangs.wait(PATIENCE_S))
            for works in ((push,), (fork, push)):
                with in_threads(*works):
                    pass
            said = [child.line() for child in children]
            self.assertEqual((len(pushed), said), (2, ["forked"]))
            goes_on.set()

    @FORK
    def test_fork_while_another_thread_opens_a_lock_gives_the_child_no_copy(
        self,
    ) -> None:
        # RACE: a thread forks just after another thread has opened its lease directory. The child
        # must have no copy of that descriptor, which holds the lock.
        q = self.queue()
        children = list[Child]()

        def work(child: Child) -> None:
            child.say("forked")
            child.wait_for_go()

        fork = threading.Thread(target=lambda: children.append(self.child(work)))

        def opened() -> None:
            fork.start()
            fork.join(0.2)  # the fork has happened, or waits until this call is over

        with hooked(at_call("open", lease_dir(q), opened, times=1), after=True):
            self.assertIsNone(q.pop())
        fork.join(PATIENCE_S)
        self.assertEqual(children[0].line(), "forked")
        simulate_death(q)
        self.check_unlocked(lease_dir(q))

    @FORK
    def test_lease_is_renewed_although_its_key_is_pushed_all_the_time(self) -> None:
        # The lock of the key is free only for moments: here for one of 40 attempts to get it.
        q = self.queue(timeout_stale_ms=1500)
        clock = self.clock()
        tries = itertools.count()
        flock = fcntl.flock
        task = leased(q, key="k")
        assert task.until is not None
        end_s = task.until.timestamp()
        before = task.path
        clock.go_on_in_sleeps(lambda: task.path == before)

        def busy(fd: int, how: int) -> None:
            if how == fcntl.LOCK_EX | fcntl.LOCK_NB and next(tries) % 40 != 39:
                raise BlockingIOError
            flock(fd, how)

        with q.processing(task), mock.patch("fcntl.flock", busy):
            until(lambda: task.path != before or clock.time() > end_s)
        self.assertLess(clock.time(), end_s)

    @FORK
    def test_ctrl_c_while_a_turn_ends_leaves_no_ticket_in_line(self) -> None:
        for stale_timeout in (None, 20.0):
            line = TicketQueue(self.file("line"), stale_timeout)
            with self.assertRaises(KeyboardInterrupt), line.turn():
                stopped = mock.patch.object(
                    threading.Event, "set", side_effect=interrupt
                )
                stopped.start()
            stopped.stop()
            gc.collect()
            self.assertTrue(TicketQueue(self.file("line"), stale_timeout).is_empty())

    def test_due_task_that_another_worker_takes_first_is_no_error(self) -> None:
        q, other = self.queue(), self.queue("n2")
        self.clock().stand_still()  # no job comes due
        self.assertIsNone(q.pop())
        other.schedule(b"x", 0)
        taken = at_call("move", "/scheduled/", lambda: self.pop(other), times=1)
        with hooked(taken):
            self.assertIsNone(q.pop())
        self.assertEqual(self.states(), {"inflight-n2": 1})

    def test_repair_of_keys_that_finds_a_key_locked_is_repeated_soon(self) -> None:
        q = self.queue()
        clock = self.clock()
        task = leased(q, b"1", key="k")
        q.push(b"2", key="k")
        # CRASH: the worker died after it had renamed the task to done/, and before it promoted the
        # buffered payload.
        os.rename(self.file(task.path), self.file("done", task.id))
        with self.locked("k"):
            clock.advance(601)
            self.assertIsNone(q.pop())
        clock.advance(2)
        self.assertEqual(self.pop(q).data, b"2")

    @FORK
    def test_coroutine_that_finds_its_key_locked_looks_again_soon(self) -> None:
        # RACE: a push still holds the lock of the key when its event has woken the coroutine. No
        # other event comes when the push has released the lock, so that the coroutine must poll.
        q = self.queue()
        pauses_ms = list[int]()

        def note(poll: Poll, ms: int) -> list[Any]:
            pauses_ms.append(ms)
            return poll(ms)

        async def take() -> FemtoTask | None:
            taking = asyncio.create_task(q.take_async("k"))
            await asyncio.to_thread(until, lambda: len(pauses_ms) > 2)
            lock.close()
            return await taking

        q.push(b"x", key="k")
        with self.locked("k") as lock, hooked_poll(note):
            task = asyncio.run(take())
        self.assertEqual(task and task.data, b"x")
        # if a job is overdue, a pause is at most 51 ms
        self.assertLess(max(pauses_ms[:3]), 200)

    @FORK
    def test_close_in_another_thread_while_pop_reads_a_task_leaves_no_lease(
        self,
    ) -> None:
        # RACE: the other thread calls close() after pop() has claimed the task. If the key of the
        # task is locked, close() can't end the lease. Then pop() returns the task, any worker takes
        # it back, and the next call for the task says so.
        #
        # If the task can't be read, pop() puts it back and raises, and the delivery counts. The
        # same happens if close() leaves the lease alone, because the queue is detached, or because
        # another object with the same node_id lives.
        for key, is_detached in (("k", False), (None, True), (None, False)):
            q = self.new_queue(
                timeout_stale_ms=None, max_attempts=2, detached=is_detached
            )
            namesake = None if key else self.queue(timeout_stale_ms=None)
            self.assertIsNone(q.pop())
            self.assertIsNone(namesake and namesake.pop())
            q.push(b"x", key=key)

            def close(q: FemtoQueue = q, key: str | None = key) -> None:
                lock: Any = self.locked(key) if key else contextlib.nullcontext()
                with lock, in_threads(q.close):
                    pass
                if key is None:
                    raise_errno(errno.EIO)

            raises = contextlib.nullcontext() if key else self.assertRaises(OSError)
            closes = hooked(at_call("open", "inflight-n1/", close, times=1))
            task = None
            with self.subTest(key, is_detached=is_detached), raises, closes:
                task = q.pop()
            self.assertEqual(self.pop(self.queue("other")).attempts, 2)
            if task is not None:
                self.assertRaises(LeaseLost, q.done, task)


class Trust(QueueCase):
    """Those who may write to data_dir may add, take and remove tasks. They can lead no call out of
    the queue, and no file of theirs ends another user's worker."""

    def test_state_directory_that_is_a_link_is_refused(self) -> None:
        outside = self.new_dir(self.memory)
        directories = (
            "creating",
            "pending",
            "scheduled",
            "done",
            "failed",
            "keys",
            "locks",
        )
        for name in (*directories, "checkpoints"):
            self.new_queue()
            shutil.rmtree(self.file(name), ignore_errors=True)
            os.symlink(outside, self.file(name))
            refused = self.assertRaisesRegex(
                NotADirectoryError, re.escape(self.file(name))
            )
            with self.subTest(name), refused, FemtoQueue(self.path) as q:
                task = leased(q, key="k")
                q.checkpoint(task, b"half")
            self.assertEqual(os.listdir(outside), [])

    def test_pause_follows_no_link_and_does_not_wait_for_a_fifo(self) -> None:
        outside = os.path.join(self.new_dir(self.memory), "target")
        for make in (functools.partial(os.symlink, outside), os.mkfifo):
            q = self.new_queue()
            q.push(b"x")
            make(self.file("PAUSED"))
            q.pause()
            self.assertEqual((q.paused, q.pop()), (True, None))
            q.resume()
            self.assertFalse(
                os.path.lexists(outside) or os.path.lexists(self.file("PAUSED"))
            )
            q.done(self.pop(q))

    def test_lock_file_that_is_a_link_is_not_followed(self) -> None:
        """A call that needs the lock of a key raises an error if its file is a link."""
        outside = os.path.join(self.new_dir(self.memory), "target")
        with open(outside, "wb"):
            pass
        q = self.queue()
        os.mkdir(self.file("locks"))
        os.symlink(outside, self.file("locks", key_tag("k")[-2:]))
        with self.assertRaises(OSError):
            q.push(b"x", key="k")
        self.assertEqual(self.states(), {})

    def test_lease_directory_that_may_not_be_read_ends_no_other_worker(self) -> None:
        q = self.queue()
        clock = self.clock()
        os.mkdir(self.file("inflight-x"))
        LOG.disabled = False
        refused = hooked(at_call("open list", "inflight-x", errno_raiser(errno.EACCES)))
        with refused, self.assertLogs(LOG, "WARNING") as logged:
            for _ in range(3):
                clock.advance(61)
                self.assertIsNone(q.pop())
            self.assertEqual((q.stats().inflight, [*q.tasks("inflight")]), (0, []))
            self.assertEqual(
                (q.peek(f"{0:020d}-{'0' * 16}"), q.contains("k")), (None, False)
            )
            self.assertTrue(q.join(0))
            q.done(leased(q, key="k"))
        self.assertEqual(len(logged.output), 1, logged.output)

    def test_task_whose_place_in_done_is_a_directory_is_removed(self) -> None:
        """If a directory has the name of a finished task in done/, the task is removed, and the log
        says so."""
        for key in (None, "k"):
            q = self.new_queue()
            task = leased(q, key=key)
            os.mkdir(self.file("done", task.id))
            LOG.disabled = False
            with self.assertLogs(LOG, "WARNING") as logged:
                q.done(task)
            self.assertIn("is done, and removed", logged.output[0])
            q.close()
            self.assertIsNone(self.queue("n2").pop())
            self.assertEqual(self.states(), {"done": 1})  # the directory

    def test_payload_behind_a_forged_id_of_the_year_2255_is_delivered(self) -> None:
        """A push behind a task with the latest possible id gets an id of the present."""
        q = self.queue()
        ident = f"0{8_999_999_999_999_999_999}-{key_tag('k')}"
        self.put(ident, record(b"forged", b"k"))
        task = self.pop(q)
        self.assertEqual((task.id, task.key), (ident, "k"))
        self.assertLess(q.push(b"mine", key="k"), ident)
        q.done(task)
        self.assertEqual(self.drain(q), [b"mine"])

    def test_forged_id_of_the_year_2096_moves_no_clock(self) -> None:
        """An id that no honest clock can have made moves no queue clock, and its task is
        delivered."""
        q = self.queue()
        task = leased(q)
        os.unlink(self.file(f"clock-{self.boot()}"))
        self.put(f"0{3_976_214_400 * 10**9}-{'0' * 16}", record(b"forged"))
        other = self.queue("n2")
        self.assertEqual(self.drain(other), [b"forged"])
        self.check_one_clock(q, other)
        q.done(task)

    def test_what_others_may_not_write_they_can_not_change_or_lock(self) -> None:
        """Nothing in the queue may be written by those who may not write to data_dir. They may not
        read the locks, either."""
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        for mode, of_lock in (
            (0o755, 0o600),
            (0o775, 0o660),
            (0o777, 0o666),
            (0o750, 0o600),
        ):
            self.path = self.new_dir(self.memory)
            os.chmod(self.path, mode)
            q = self.queue()
            q.checkpoint(leased(q, key="k"), b"half")
            TicketQueue(self.path).register()
            for directory, _, names in os.walk(self.path):
                for path in (os.path.join(directory, it) for it in names):
                    found = stat.S_IMODE(os.lstat(path).st_mode)
                    is_lock = "/locks/" in path or path.endswith("/last")
                    if is_lock:
                        self.assertEqual(found, of_lock, path)
                    elif not os.path.islink(path):
                        self.assertEqual(found & 0o022 & ~mode, 0, path)
            found = stat.S_IMODE(os.stat(lease_dir(q)).st_mode)
            self.assertEqual(found & 0o066, of_lock & 0o066)  # a lock, too
            (clock,) = glob.glob(self.file("clock-*"))
            self.assertEqual(stat.S_IMODE(os.stat(clock).st_mode), 0o644)


class LockWaits(TicketCase):
    """A call that waits for the lock of a key or of a line ends at its timeout, and does not wait
    for itself."""

    def test_take_ends_at_its_timeout_while_the_key_is_locked(self) -> None:
        # Without a timeout, it waits for the lock for some seconds: see "long wait".
        self.set_constant("long wait", 0.2)
        q = self.queue()
        q.push(b"x", key="k")
        with self.locked("k"):
            self.assertEqual((q.take("k"), q.take("k", 0.2)), (None, None))
        self.assertIsNotNone(q.take("k"))

    def test_take_async_of_a_locked_key_does_not_delay_another_coroutine(self) -> None:
        q = self.queue()
        q.push(b"locked", key="k")
        ident = q.push(b"free")

        async def take(lock: io.FileIO) -> list[FemtoTask | None]:
            first = asyncio.ensure_future(q.take_async("k", PATIENCE_S))
            await asyncio.sleep(0)  # the first coroutine begins to wait
            second = await q.take_async(id=ident, timeout=PATIENCE_S)
            lock.close()
            return [second, await first]

        with self.locked("k") as lock:
            tasks = asyncio.run(take(lock))
        self.assertEqual([task and task.data for task in tasks], [b"free", b"locked"])

    def test_pop_waits_for_the_lock_of_a_key_only_for_a_moment(self) -> None:
        self.set_constant("base interval", 0.02)
        q = self.queue()
        q.push(b"x", key="k")
        os.unlink(self.file("keys", key_tag("k")))  # so the delivery needs the lock
        with self.locked("k"):
            self.assertRaises(BlockingIOError, q.pop)
        self.assertEqual(popped(q).attempts, 1)

    def test_take_without_a_timeout_waits_for_a_lock_that_is_held_for_a_moment(
        self,
    ) -> None:
        q = self.queue()
        clock = self.clock()
        ident = q.push(b"x", key="k")
        lock = self.locked("k")
        with (
            lock,
            mock.patch.object(clock, "sleep", side_effect=lambda _: lock.close()),
        ):
            self.assertEqual(self.take(q, "k").id, ident)

    def test_pauses_between_two_attempts_at_a_lock_stay_short(self) -> None:
        q = self.queue()
        clock = self.clock()
        q.push(b"x", key="k")
        lock = self.locked("k")
        with lock, mock.patch.object(clock, "sleep") as sleep:
            sleep.side_effect = lambda _: (
                lock.close() if sleep.call_count > 99 else None
            )
            q.push(b"x", key="k")
        self.assertEqual(sleep.call_count, 100)
        self.assertLessEqual(
            max(seconds for (seconds,), _ in sleep.call_args_list), 0.05
        )

    def test_turn_ends_at_its_timeout_while_the_line_is_locked(self) -> None:
        line = self.line()
        line.remove(line.register()[1])
        with open(self.file("line", "last"), "rb") as last:
            fcntl.flock(last, fcntl.LOCK_EX)
            with self.assertRaises(TimeoutError), line.turn(timeout=0.2):
                self.fail("the line is locked")
        with line.turn(timeout=PATIENCE_S):
            pass

    def test_wait_for_a_lock_is_logged_after_seconds(self) -> None:
        """A call that waits for a lock for 5 s logs once which lock it is, and goes on waiting."""
        self.set_constant("long wait", 0.05)
        q = self.queue()
        q.push(b"1", key="k")
        LOG.disabled = False
        logs = self.assertLogs(LOG, "WARNING")
        lock = self.locked("k")
        with lock, logs as logged, in_threads(lambda: q.push(b"2", key="k")):
            until(lambda: bool(logged.records))
            time.sleep(0.1)
            lock.close()
        [said] = logged.output
        self.assertIn(self.file("locks", key_tag("k")[-2:]), said)
        self.assertEqual(self.drain(q), [b"2"])

    def test_call_that_interrupts_the_holder_of_its_lock_raises(self) -> None:
        """A push with a key, in a signal handler or a finalizer, raises EDEADLK if it interrupts a
        call that has the lock, even through another object."""
        q, other = self.queue(), self.queue("n2")
        for number, nested in enumerate((q, other)):
            key = f"k{number}"
            codes = list[int | None]()

            def handle(
                nested: FemtoQueue = nested, key: str = key, codes: Any = codes
            ) -> None:
                with self.assertRaises(OSError) as caught:
                    nested.push(b"nested", key=key)
                codes.append(caught.exception.errno)

            with hooked(at_call("symlink", None, handle, times=1)):
                q.push(b"x", key=key)
            self.assertEqual(codes, [errno.EDEADLK])
            nested.push(b"later", key=key)
            self.assertEqual(self.drain(q), [b"later"])


class Reported(QueueCase):
    """Situations in which other programs have failed, by public reports."""

    @FORK
    def test_child_of_a_fork_that_python_does_not_see_is_a_worker_of_its_own(
        self,
    ) -> None:
        """After a fork by a C library, the child makes other ids, and its close() ends no lease of
        the parent."""
        # uWSGI forks so. Both push while the clock stands still.
        import ctypes

        def parent(child: Child) -> None:
            self.clock().stand_still()
            q = self.queue()
            task = leased(q)
            pid = ctypes.PyDLL(None).fork()
            if pid == 0:
                try:
                    q.push(b"of the child")
                    q.close()
                finally:
                    os._exit(0)
            q.push(b"of the parent")
            os.waitpid(pid, 0)
            q.done(task)
            child.say("done")

        self.assertEqual(self.child(parent).finish(), (["done"], 0))
        self.assertEqual(self.states(), {"done": 1, "pending": 2})

    @FORK
    def test_lease_of_the_kernel_on_a_file_only_delays_its_task(self) -> None:
        """While another process has a lease of the kernel on the file of a task (F_SETLEASE), pop()
        waits. Then it delivers the task at its first attempt."""
        # Samba and virus scanners take such leases. With O_NONBLOCK, open() fails with EAGAIN
        # meanwhile.
        q = self.queue(max_attempts=1)
        path = self.file("pending", q.push(b"x"))

        def hold(child: Child) -> None:
            fd = os.open(path, os.O_RDWR)
            signal.signal(signal.SIGIO, lambda *_: child.say("told"))
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            child.say("held")
            child.wait_for_go()
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

        def let_go() -> None:
            self.assertEqual(holder.line(), "told")
            holder.go()

        holder = self.child(hold)
        if holder.line() != "held":
            self.skipTest("no leases of the kernel here")
        with in_threads(let_go):
            self.assertEqual(self.pop(q).attempts, 1)

    def test_file_that_may_not_be_removed_does_not_end_an_idle_worker(self) -> None:
        """If the maintenance may not remove a file, pop() logs this once, and goes on."""
        # The file is immutable, or another user's in a sticky directory: a finished task, a file
        # that a killed process left in creating/, or an old checkpoint.
        q = self.queue(keep_done=0.1)
        clock = self.clock()
        q.checkpoint(leased(q), b"half")
        q.done(leased(q))
        self.put(f"{10**18:020d}-{'0' * 16}", b"", "creating")
        clock.advance(32 * 86400)
        LOG.disabled = False
        refused = hooked(at_call("unlink", self.path, errno_raiser(errno.EPERM)))
        with refused, self.assertLogs(LOG, "WARNING") as logged:
            for _ in range(3):
                clock.advance(700)
                while task := q.pop():
                    self.assertEqual(task.data, b"x")
        self.assertEqual(len(logged.output), 3, logged.output)
        for directory in ("creating", "checkpoints", "done"):
            self.assertEqual(len(self.names(directory)), 1)

    def test_each_due_task_that_may_not_be_moved_is_logged_once(self) -> None:
        """However many tasks of other users the maintenance finds in a sticky directory, the log
        has one line for each of them."""
        q = self.queue()
        clock = self.clock()
        count = 200
        for _ in range(count):
            q.push(b"x", delay_s=1)
        LOG.disabled = False
        refused = hooked(at_call("move", "scheduled/", errno_raiser(errno.EPERM)))
        with refused, self.assertLogs(LOG, "WARNING") as logged:
            for _ in range(4):
                clock.advance(61)
                self.assertIsNone(q.pop())
        self.assertEqual(len(logged.output), count)

    def test_exception_that_can_not_be_formatted_is_a_reason_by_its_name(self) -> None:
        class BadText(Exception):
            def __str__(self) -> str:
                raise ValueError

        class BadNotes(Exception):
            __notes__ = 5

        class BadModule(Exception):
            __module__ = None  # type: ignore[assignment]

        odd: list[Any] = [("odd", "pqrs"), ("odd", ("a template", 3, 1, b"its text"))]
        q = self.queue()
        odd = [SyntaxError(*it) for it in odd]
        for error in (*odd, BadText(), BadNotes(), BadModule(), ValueError("\udcff")):
            task = leased(q)
            q.fail(task, error)
            self.assertIn(type(error).__name__, reason_of(q, task.id))

    def test_hints_of_the_interface_can_be_read_at_run_time(self) -> None:
        """typing.get_type_hints() works for each public class, method and property."""
        for name in femtoqueue.__all__:
            members = {"": getattr(femtoqueue, name)}
            if isinstance(members[""], type):
                members |= {
                    it: value for it, value in vars(members[""]).items() if it[0] != "_"
                }
            for member in members.values():
                function = member.fget if isinstance(member, property) else member
                if callable(function):
                    self.assertIsNotNone(typing.get_type_hints(function))
        hints = typing.get_type_hints(FemtoQueue.schedule)
        self.assertEqual(hints["time_us"], float | datetime.datetime)

    def test_snapshot_by_hard_links_is_a_queue_of_its_own(self) -> None:
        """After `cp -al`, neither of the two queues changes the other, and in each the newest
        payload of a key comes last."""
        live = self.path
        snapshot = self.new_dir(self.memory)
        with self.queue() as q:
            q.push(b"plain")
            task = (q.push(b"A1", key="A"), self.take(q, "A"))[1]
            q.push(b"A2", key="A")
            q.release(task)
            q.push(b"B1", key="B")
        link = functools.partial(os.link, follow_symlinks=False)
        shutil.copytree(live, snapshot, copy_function=link, dirs_exist_ok=True)
        q = self.queue()
        self.assertEqual(self.drain(q), [b"plain", b"A2", b"B1"])
        q.push(b"A9", key="A")
        self.path = snapshot
        copy = self.queue()
        copy.push(b"A3", key="A")
        copy.push(b"B2", key="B")
        self.assertEqual(
            (self.drain(copy), copy.check()), ([b"plain", b"A3", b"B2"], [])
        )
        self.path = live
        self.assertEqual(self.drain(q), [b"A9"])

    def test_payload_that_was_pushed_last_is_delivered_last_after_the_loss_of_a_link(
        self,
    ) -> None:
        q = self.queue()
        task = leased(q, b"A1", "A")
        link = self.file("keys", key_tag("A"))
        before = os.readlink(link)
        q.push(b"A2", key="A")
        q.release(task)
        os.unlink(link)
        os.symlink(before, link)
        q.push(b"A3", key="A")
        self.assertEqual(self.drain(self.queue("n2"))[-1:], [b"A3"])

    def test_lost_and_found_is_no_finding(self) -> None:
        """lost+found, at the mount point of a file system of its own, is not reported."""
        q = self.queue()
        os.mkdir(self.file("lost+found"))
        self.assertEqual(q.check(), [])


# Classes side by side


# The classes that take longest. They start first, so that none of them runs alone at the end.
LONGEST = (
    *("CommandLine", "Transcripts", "KeyedInterrupted"),
    *("KeyedInterruptedOnSharedFileSystem", "Faults"),
)


def run_forked(words: list[str], output: Any) -> int:
    """Run tests in a forked process, which leads a process group and prints to a file. Return its
    pid."""
    if pid := os.fork():
        os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        for fd, source in enumerate(
            (os.open(os.devnull, os.O_RDONLY), *[output.fileno()] * 2)
        ):
            os.dup2(source, fd)
        faulthandler.dump_traceback_later(SUITE_S, exit=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = run_here(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def print_result(name: str, output: Any, status: int, is_verbose: bool) -> None:
    """Print the output of the process of a class. If the class has passed, print only the summary,
    unless `is_verbose`."""
    with output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        text += f"exit status {os.waitstatus_to_exitcode(status)}"
    elif not is_verbose:
        text = " ".join(text.rpartition("-" * 70)[2].split())
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def run_side_by_side(
    names: list[str], switches: list[str], processes: int
) -> list[str]:
    """Run each class in a process of its own, at most `processes` at a time. Return the names of
    the classes that failed. With -f, the first failure ends the run.

    The process group of a class is killed when its process has ended. When the run ends, by Ctrl-C
    or SIGTERM too, the groups of all running classes are killed.
    """
    left = deque(sorted(names, key=[*LONGEST, *names].index))
    failed = list[str]()
    # by pid: the class, and the file of its output
    running: dict[int, tuple[str, Any]] = {}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while (left or running) and not (failed and "-f" in switches):
            while left and len(running) < processes:
                name, output = left.popleft(), tempfile.TemporaryFile()  # noqa: SIM115
                running[run_forked([*switches, name], output)] = name, output
            pid, status = os.wait()
            name, output = running.pop(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # processes that the class left running
            failed += [name] * bool(status)
            print_result(name, output, status, "-v" in switches)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return failed


def run_here(words: list[str]) -> int:
    """Run tests in this process; return the exit status.

    nohup(1) and `&` in a shell script make a process ignore SIGHUP or SIGINT. The default handlers
    are set again, since the commands under test would inherit the ignored signals.
    """
    handlers: dict[str, Any] = {
        "SIGINT": signal.default_int_handler,
        "SIGHUP": signal.SIG_DFL,
    }
    for name, handler in handlers.items():
        number = getattr(signal, name, None)  # there is no SIGHUP on Windows
        if number and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    faulthandler.enable()
    return int(
        not unittest.main(argv=[sys.argv[0], *words], exit=False).result.wasSuccessful()
    )


def classes_with_tests() -> list[str]:
    cases = {name: it for name, it in globals().items() if isinstance(it, type)}
    tests_of = unittest.defaultTestLoader.getTestCaseNames
    return [
        name
        for name, it in cases.items()
        if issubclass(it, unittest.TestCase) and tests_of(it)
    ]


def main() -> int:
    """Run the classes of tests side by side. A single class, or a run with other switches of
    unittest than -v and -f, runs in this process. Return the exit status."""
    print(f"seed {SEED}", file=sys.stderr, flush=True)
    words = [it for it in sys.argv[1:] if it != "--all"]
    switches = [it for it in words if it in ("-v", "-f")]
    names = [it for it in words if it not in switches]
    classes = names or classes_with_tests()
    has_other_switches = any(it.startswith("-") for it in names)
    if len(classes) < 2 or has_other_switches or not hasattr(os, "fork"):
        return run_here(words)
    affinity = getattr(os, "sched_getaffinity", None)
    processes = 1 + (len(affinity(0)) if affinity else os.cpu_count() or 1)
    began_s = time.monotonic()
    # A killed test leaves directories behind, all of them inside these two.
    made = functools.partial(
        tempfile.TemporaryDirectory,
        prefix="femtoqueue-tests-",
        ignore_cleanup_errors=True,
    )
    with (
        made(dir=None) as tempfile.tempdir,
        made(dir=QueueCase.memory) as QueueCase.memory,
    ):
        failed = run_side_by_side(classes, switches, processes)
    end = "FAILED" if failed else "OK"
    print(f"{time.monotonic() - began_s:.1f} s:", *failed, end, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
