"""What femtoqueue promises, by test: `python test.py [-v] [Class[.test]]`.

Classes run side by side, in a process for each processor; `python -m unittest test` runs them in
one. The seed of what is random is printed; FEMTOQUEUE_SEED=that gives it again. Tests that
promise nothing about the disk run in /dev/shm. If TMPDIR is set, all of them run in that
directory: `TMPDIR=/var/tmp python test.py` proves everything on its file system.

Classes are promises, tests are outcomes. Proved here, with real processes: order, leases and
their fencing, liveness, exactly one delivery while nobody dies, no loss when workers are killed,
what is corrupt or foreign in the directories, every failing system call of an operation, editing
by hand. Death before every system call of every operation: a copy of the directory as it is then
is what is left, and at every fifth call a process is killed. Clocks are faked, never slept on.

Not proved here: power loss, full disks and file systems other than the one that holds the
temporary directory (.ci/ has what needs root), and what needs fork() where there is none.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import dataclasses
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
import json
import linecache
import logging
import os
import pickle
import py_compile
import random
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import unittest
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn
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

HERE = os.path.dirname(os.path.abspath(__file__))
# Hooks hear of every call by which femtoqueue leaves its process: all callables of os but these,
# which touch neither a disk nor another process.
IN_PROCESS = re.compile(
    r"""_.*|W[A-Z]+|abort|confstr|cpu_count|ctermid|device_encoding|fdopen|fs(de|en)code|fspath
    |get(?!xattr).*|isatty|major|makedev|minor|nice|putenv|register_at_fork|sched_.*
    |set_(blocking|inheritable)|strerror|sysconf|times|ttyname|umask|uname|unsetenv|urandom
    |waitstatus_to_exitcode""",
    re.VERBOSE,
)
# The event by which they do, where that is not the function's name: which of several calls takes
# a step is the library's affair.
EVENTS = {
    **dict.fromkeys(("write", "writev", "pwrite", "pwritev"), "write"),
    **dict.fromkeys(("read", "readv", "pread", "preadv"), "read"),
    **dict.fromkeys(("rename", "replace", "renames"), "move"),
    **dict.fromkeys(("listdir", "scandir", "walk", "fwalk"), "list"),
    **dict.fromkeys(("unlink", "remove"), "unlink"),
    **dict.fromkeys(("mkdir", "makedirs"), "mkdir"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
    **dict.fromkeys(("exists", "lexists", "isdir", "isfile", "islink", "ismount"), "stat"),
    **dict.fromkeys(("getsize", "getmtime", "getatime", "getctime", "samefile"), "stat"),
    **dict.fromkeys(("flock", "lockf"), "lock"),
    **dict.fromkeys(("inotify_init1", "inotify_add_watch"), "inotify"),
}
# These ask the disk, and take each error for "no".
ASKING = ("access", "exists", "lexists", "isdir", "isfile", "islink", "ismount")
EXT4, NFS, FUSE = 0xEF53, 0x6969, 0x65735546  # f_type of statfs(2)
FORK = unittest.skipUnless(hasattr(os, "fork"), "needs fork()")
PATIENCE_S = 60  # until what a test waits for is taken to be lost
LOG = logging.getLogger("femtoqueue")
SEED = int(os.environ.get("FEMTOQUEUE_SEED") or time.time_ns() // 1000 % 10**6)
SUITE_S = 900  # until a class of tests is taken to hang: the longest one takes half a minute
MEMORY_BYTES = 1 << 28  # that must be free in /dev/shm: twenty thousand tasks take a third


def memory_dir() -> str | None:
    """Return where files stand in memory; None, the temporary directory, if TMPDIR is set."""
    if "TMPDIR" in os.environ or not os.access("/dev/shm", os.W_OK):
        return None
    space = os.statvfs("/dev/shm")
    return "/dev/shm" if space.f_bavail * space.f_frsize >= MEMORY_BYTES else None


class Clock:
    """Stands in for the time module in femtoqueue: real time, shifted by hand; or only so, from two
    times of the wall clock and the monotonic one, by which a seed does the same in every run."""

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


def fake_os(*missing: str, **functions: Any) -> types.ModuleType:
    """Return a stand-in for os: without some functions, and with others in their places."""
    fake = types.ModuleType("os")
    fake.__dict__.update({name: it for name, it in vars(os).items() if name not in missing})
    fake.__dict__.update(functions)
    return fake


# Seams: all that the tests replace inside femtoqueue. Each name of its inside stands here once, so
# that a redesign that renames it edits this block.

SEAMS = {
    "file system type": "_fs_type",
    "exchange": "_exchange",
    "C library": "_libc",
    "sync of a batch": "_batch_sync",
    "fork lock": "_fork_lock",
}
CONSTANTS = {
    "one signal": "_ONE_SIGNAL_S",
    "grace": "_GRACE_S",
    "trouble": "_TROUBLE_S",
    "report": "_REPORT_S",
    "base interval": "_BASE_INTERVAL_S",
    "longest pause": "_LONGEST_PAUSE_S",
    "renewal": "_RENEWAL",
    "stale": "_STALE_S",
    "shrink": "_SHRINK_BYTES",
    "purge slice": "_PURGE_SLICE_S",
    "most in a batch": "_MAX_BATCH",
    "chunk": "_CHUNK",
}
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def seam(name: str, function: Callable[..., Any]) -> Any:
    return mock.patch.object(femtoqueue, SEAMS[name], function)


def through_seam(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(femtoqueue, SEAMS[name])
    return function


def constant(name: str) -> float:
    value: float = getattr(femtoqueue, CONSTANTS[name])
    return value


def with_constant(name: str, value: float) -> Any:
    return mock.patch.object(femtoqueue, CONSTANTS[name], value)


def on_file_system(fs_type: int) -> Any:
    """Let femtoqueue take every directory to be on a file system of that f_type."""
    return seam("file system type", mock.Mock(return_value=fs_type))


def without_exchange() -> Any:
    """Let the kernel refuse to exchange two names."""
    refused = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return seam("exchange", mock.Mock(side_effect=refused))


def without_libc() -> Any:
    """Let there be no inotify, statfs, syncfs and renameat2."""
    return seam("C library", lambda: None)


def on_boot(boot_id: str | None) -> Any:
    """Let the kernel have been booted under that id; None: it has none, as on other systems."""

    def opens(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path != BOOT_ID:
            return open(path, *args, **kwargs)
        if boot_id is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return io.StringIO(f"{boot_id}\n")

    return mock.patch.object(femtoqueue, "open", opens, create=True)


def lease_dir(q: FemtoQueue) -> str:
    return os.path.join(os.path.abspath(q.data_dir), f"inflight-{q.node_id}")


def descriptors_of(path: str) -> list[int]:
    """Return this process's descriptors of a file or directory."""
    wanted, found = os.stat(path), []
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            if os.path.samestat(os.fstat(fd), wanted):
                found.append(fd)
    return found


def dies(q: FemtoQueue) -> None:
    """Let a worker die, as far as others can see: no descriptor leads to its lease directory any
    more, so its lock is gone. The object is not to be used again."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for fd in descriptors_of(lease_dir(q)):
        os.dup2(nowhere, fd, inheritable=False)  # its number stays the object's
    os.close(nowhere)


Hook = Callable[[str, tuple[Any, ...]], object]


def with_hook(
    hook: Hook, after: bool, event: str, call: Callable[..., Any], asks: bool = False
) -> Any:
    """Return a call of which the hook hears before or after it. asks: an error is a "no"."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is str and args[0][:6] == "/proc/":  # no disk: which boot it is
            return call(*args, **kwargs)
        try:
            if not after:
                hook(event, args)
            result = call(*args, **kwargs)
            if after:
                hook(event, args)
            return result
        except OSError:
            if not asks:
                raise
            return False

    return function


class HookedModule(types.ModuleType):
    """Stands in for os, os.path or fcntl, whose calls are heard of."""

    def __init__(self, module: Any, hear: Callable[..., Any]) -> None:
        super().__init__(module.__name__)
        self._module, self._hear = module, hear

    def __getattr__(self, name: str) -> Any:
        it = getattr(self._module, name)
        is_heard = not IN_PROCESS.fullmatch(name) if self._module is os else name in EVENTS
        if is_heard and callable(it) and not isinstance(it, type):
            it = self._hear(EVENTS.get(name, name), it, name in ASKING)
        setattr(self, name, it)  # once
        return it


class HeardLibrary:
    """Stands in for the C library, whose functions return -1 and set errno."""

    def __init__(self, library: Any, hear: Callable[..., Any]) -> None:
        self._library, self._hear = library, hear

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import ctypes

        function: Callable[..., Any] = getattr(self._library, name)
        if name == "renameat2":
            return function  # hooks hear of it at its seam, where the paths are

        def call(*args: Any) -> Any:
            paths = [os.fsdecode(arg) for arg in args if isinstance(arg, bytes)]
            heard = self._hear(EVENTS.get(name, name), lambda *_: function(*args))
            try:
                return heard(*(paths or args))
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1

        return call


@contextlib.contextmanager
def hooked(hook: Hook, *, after: bool = False) -> Iterator[None]:
    """Call hook(event, arguments) before each call by which femtoqueue leaves its process, or after
    each of them; see EVENTS. What other tests left in cycles of garbage stays there meanwhile: its
    finalizers would be heard, too."""
    hear = functools.partial(with_hook, hook, after)
    library = through_seam("C library")()
    opens = hear("open", getattr(femtoqueue, "open", open))
    with contextlib.ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        fake = HookedModule(os, hear)
        fake.__dict__["path"] = HookedModule(os.path, hear)
        stack.enter_context(mock.patch.object(femtoqueue, "os", fake))
        stack.enter_context(mock.patch.object(femtoqueue, "open", opens, create=True))
        if library is not None:
            stack.enter_context(seam("C library", lambda: HeardLibrary(library, hear)))
        stack.enter_context(seam("exchange", hear("move", through_seam("exchange"))))
        if locks := sys.modules.get("fcntl"):
            stack.enter_context(mock.patch.object(femtoqueue, "fcntl", HookedModule(locks, hear)))
        yield


def interrupt() -> NoReturn:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def at_line(
    number: int, happen: Callable[[], object], within: tuple[str, ...] = ()
) -> Iterator[list[str]]:
    """Let something happen before the n-th line of femtoqueue that the block runs, in any thread;
    within: of the lines of these functions. Yields a list that is not empty once it did."""
    came = list[str]()
    left, source = itertools.count(number, -1), linecache.getlines(femtoqueue.__file__)
    last: dict[int, int] = {}  # line of a frame, by its id()

    def trace(frame: types.FrameType, event: str, arg: object) -> Any:
        name, caller = frame.f_code.co_name, frame.f_back
        if frame.f_code.co_filename != femtoqueue.__file__ or (within and name not in within):
            return None
        if "__del__" in (name, caller.f_code.co_name if caller else ""):
            return None  # what a finalizer raises is printed, and ends nothing
        line, before = frame.f_lineno, last.get(id(frame), 0)
        last[id(frame)] = 0 if event == "call" else line
        # A block of `with` ends there; no signal comes before __exit__() is called.
        is_end = event == "line" and line < before and source[line - 1].lstrip().startswith("with ")
        if event == "line" and not is_end and next(left) == 0:
            sys.settrace(None)
            came.append(f"{name}:{line}")
            happen()
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield came
    finally:
        sys.settrace(None)
        threading.settrace(None)


# What a name is, and what a record: told here by other code than femtoqueue's.

NUMBER, TAG = "0[0-8][0-9]{18}", "[0-9a-f]{8}"  # a nanosecond before the year 2255; random
ID, KEYED_ID, STAMP = f"{NUMBER}-{TAG}", f"{NUMBER}-[89a-f][0-9a-f]{{7}}", f"{NUMBER}~[0-9]{{1,6}}~"
TASKS = {  # the names of tasks, as the docstring has them
    **dict.fromkeys(("pending", "done", "failed"), f"({STAMP}({TAG}~)?)?{ID}"),  # moved by hand
    "scheduled": STAMP + ID,
    "inflight": f"{STAMP}{TAG}~{ID}",
    "keys": f"({STAMP})?{KEYED_ID}",
}
COMPANIONS = {"creating": rf"{ID}(\.(clock|error|pending))?", "failed": rf"{ID}\.error"}
COMPANIONS["keys"] = "[89a-f][0-9a-f]{7}"
Record = tuple[bytes, "str | None"]


def is_id(text: str) -> bool:
    return re.fullmatch(ID, text) is not None


def is_task(state: str, name: str) -> bool:
    """Whether that is the name of a task in that state."""
    return re.fullmatch(TASKS.get(state, "(?!)"), name) is not None


def is_ours(state: str, name: str) -> bool:
    """Whether the queue may do with that file what it likes: a task, or a companion of one."""
    return is_task(state, name) or re.fullmatch(COMPANIONS.get(state, "(?!)"), name) is not None


def read_record(content: bytes) -> Record | None:
    """Return payload and key, None if that is no whole record."""
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
    header = b"FQ1 %08x %d" % (binascii.crc32(name + payload), len(payload))
    return header + (b" " + name if name else b"") + b"\n" + payload


FOREVER_NS = 4 * 10**18  # how long a lease without an end lasts


def key_tag(key: str) -> str:
    """Return the hash of a key, as the ids of its tasks end and keys/<hash> is named."""
    return f"{binascii.crc32(key.encode()) | 1 << 31:08x}"


class Child:
    """A forked process that runs work(child): it says lines to us, and waits for our go()."""

    def __init__(self, work: Callable[[Child], object], number: int = 0) -> None:
        self.chance = random.Random(f"{SEED} {number}")
        said, says = os.pipe()
        waits, goes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(said)
            os.close(goes)
            self._says, self._waits = says, waits
            self._run(work)
        os.close(says)
        os.close(waits)
        self._said, self._goes = os.fdopen(said, encoding="ascii"), goes
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
        os.write(self._says, f"{text}\n".encode("ascii"))

    def wait_for_go(self) -> None:
        if not os.read(self._waits, 1):
            os._exit(0)  # our parent is gone

    def line(self) -> str:
        return self._said.readline().rstrip("\n")

    def go(self) -> None:
        os.write(self._goes, b"g")

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[list[str], int]:
        """Return what it said since, and its exit status, when it has ended."""
        lines = [line.rstrip("\n") for line in self._said]
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._said.close()
            os.close(self._goes)
        return lines, self._status

    def end(self) -> None:
        if self._status is None:
            self.kill()
            self.finish()


class QueueCase(unittest.TestCase):
    """A test with a queue directory, whose invariants are checked when it ends."""

    foreign: tuple[str, ...] = ()
    in_memory = True  # False: the tests promise something about the disk
    memory = memory_dir()
    fs_type: int | None = None  # of which femtoqueue takes every directory to be; None: its own
    exchanges = True  # False: the kernel refuses to exchange two names

    def setUp(self) -> None:
        self.path = self.new_dir(self.memory if self.in_memory else None)
        self.chance, self.children = random.Random(SEED), itertools.count()
        LOG.disabled = True  # corrupt tasks are logged, and are many here
        if self.fs_type is not None:
            self.patched(on_file_system(self.fs_type))
        if not self.exchanges:
            self.patched(without_exchange())

    def patched(self, patch: Any) -> None:
        """Apply a patch until the test ends."""
        patch.start()
        self.addCleanup(patch.stop)

    def new_dir(self, place: str | None = None) -> str:
        """Make a directory in that one, or in the temporary directory; it goes with the test."""
        path = tempfile.mkdtemp(prefix="femtoqueue-test-", dir=place)
        self.addCleanup(shutil.rmtree, path, ignore_errors=True)
        return path

    def queue(self, node_id: str | None = "n1", **settings: Any) -> FemtoQueue:
        q = FemtoQueue(self.path, node_id, **settings)
        self.addCleanup(q.close)
        return q

    def anew(self, **settings: Any) -> FemtoQueue:
        """Open a queue in a new directory."""
        self.path = self.new_dir(self.memory if self.in_memory else None)
        return self.queue(**settings)

    def child(self, work: Callable[[Child], object]) -> Child:
        child = Child(work, next(self.children))
        self.addCleanup(child.end)
        return child

    def clock(self) -> Clock:
        """Set the clock by hand. A job that took long, on a busy machine, then rests no longer."""
        clock = Clock()
        self.patched(mock.patch.object(femtoqueue, "time", clock))
        self.hasten("longest pause", 0)
        return clock

    def pop(self, q: FemtoQueue) -> FemtoTask:
        task = q.pop()
        assert task is not None, "a task was there to be popped"
        self.check_invariants()
        return task

    def take(self, q: FemtoQueue, key: str | None = None, id: str | None = None) -> FemtoTask:
        return q.take(key, id=id) or self.fail("a task was there to be taken")

    def drain(self, q: FemtoQueue) -> list[bytes]:
        """Pop and finish everything; return the payloads in their order."""
        payloads = []
        while task := q.pop():
            payloads.append(task.data)
            q.done(task)
        self.check_invariants()
        return payloads

    def hasten(self, name: str, value: float) -> None:
        """Let femtoqueue wait for that long, not for as long as its constant says."""
        self.patched(with_constant(name, value))

    def can_exchange(self) -> bool:
        """Whether two names can be: here those of two empty directories."""
        try:
            through_seam("exchange")(self.file("done"), self.file("failed"))
        except OSError:
            return False
        return True

    def boot(self) -> str:
        """Return <boot>, by which leases of this kernel are known: there is one clock-<boot>."""
        names = [name for name in os.listdir(self.path) if name.startswith("clock-")]
        self.assertEqual(len(names), 1)
        return names[0][len("clock-") :]

    def check_one_clock(self, *queues: FemtoQueue) -> None:
        """Fail if one of them is an hour before another: what they push now has one order."""
        orders = [int(q.push(b"")[:20]) for q in queues]
        self.assertLess(max(orders) - min(orders), 3600 * 10**9)

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(os.path.join(self.path, directory)))

    def file(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def locked(self, key: str, wait: bool = True) -> io.FileIO:
        """Hold the lock of a key until the file is closed, as a process does that is at work on
        it. Raises BlockingIOError if it is not free and wait is False."""
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
        """Fail if somebody has the lock of a file or directory."""
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

    def check_invariants(self, *, leftovers: bool = False) -> dict[str, str]:
        """Every task stands in one state, under a name of its form; return id -> directory."""
        where: dict[str, str] = {}
        for directory in sorted(os.listdir(self.path)):
            state = "inflight" if directory.startswith("inflight-") else directory
            if state not in (*femtoqueue.STATES, "keys") or os.path.isfile(self.file(directory)):
                continue
            for name in self.names(directory):
                if not is_task(state, name):
                    known = is_ours(state, name) or name in self.foreign
                    self.assertTrue(known, f"{directory}/{name} is of no form")
                    continue
                self.assertNotIn(name[-29:], where, f"in {directory} too")
                where[name[-29:]] = directory
        if not leftovers:
            self.assertEqual(set(self.names("creating")) - set(self.foreign), set())
        return where

    def states(self) -> Counter[str]:
        return Counter(self.check_invariants().values())


# A task's life


def at_call(event: str, of: Any, happen: Callable[[], object], times: int = 10**9) -> Hook:
    """Return a hook by which something happens before calls of a kind (or of several: "open move"),
    or before the first ones: of all, or of those that have that argument, or a path of which that
    is a part."""
    left, events = itertools.count(times, -1), event.split()

    def hook(name: str, args: tuple[Any, ...]) -> None:
        in_path = any(isinstance(it, str) and str(of) in it for it in args)
        if name in events and (of is None or of in args or in_path) and next(left) > 0:
            happen()

    return hook


def fail_with(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))


def raising(code: int) -> Callable[[], NoReturn]:
    """Return a function that raises the OSError of an errno."""
    return functools.partial(fail_with, code)


def calls_of(event: str, work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a kind that a piece of work makes."""
    calls: list[tuple[Any, ...]] = []

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name == event:
            calls.append(args)

    with hooked(note):
        work()
    return calls


@contextlib.contextmanager
def beside(*works: Callable[[], object]) -> Iterator[None]:
    """Let each of them run in a thread; they end with the block."""
    threads = [threading.Thread(target=it, daemon=True) for it in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(PATIENCE_S)


def reason_of(q: FemtoQueue, ident: str) -> str:
    """Return what stands beside a dead letter."""
    with open(os.path.join(q.data_dir, "failed", f"{ident}.error"), encoding="utf-8") as file:
        return file.read()


def _taken(q: FemtoQueue, timeout: float = 0) -> FemtoTask:
    task = q.pop(timeout)
    assert task is not None
    return task


def leased(q: FemtoQueue, data: bytes = b"x", key: str | None = None) -> FemtoTask:
    """Push a task, and lease the oldest."""
    q.push(data, key=key)
    return _taken(q)


# Wrong arguments: a call, of a queue that has leased a task; what it raises, and what that says;
# and what is wrong. In what it says, {it} is what is wrong; for None, the task.
Refusal = tuple[Callable[[Any, Any, Any], object], type[Exception], str, tuple[Any, ...]]
NAN, INFINITE = float("nan"), float("inf")
NO_BYTES = 7, None, memoryview(b"abcd")[::2], ["x"]
NO_TIMES = NAN, INFINITE, 9e15, 1e300, 1e308, 10**400
NO_AGES = -1, NAN, INFINITE


class Lazy:
    """What nothing of runs when it is called as a handler."""

    async def __call__(self, task: FemtoTask) -> None:
        raise AssertionError

    async def each(self, task: FemtoTask) -> AsyncIterator[FemtoTask]:
        yield task


NO_HANDLERS = 7, asyncio.sleep, lambda task: (yield task), Lazy(), Lazy().each
NO_KEYS = "", "k" * 201, "\u00e9" * 101, "\udc80"
NO_TEXTS = 7, b"k", ("k",)
NO_TASK: tuple[dict[str, str], ...] = {}, {"key": "k", "id": f"{0:020d}-00000000"}
NO_RELEASE = {"front": True, "delay_s": 1}, {"delay_s": -1}, {"delay_s": NAN}
FIXED = "sync_after_write", "max_attempts", "keep_done", "timeout_stale_ms", "node_id"
NO_SETTINGS: tuple[tuple[str, type[Exception], tuple[Any, ...]], ...] = (
    ("node_id", ValueError, ("", "..", "a/b", "a" * 101, "größe", "a\n", 7)),
    ("timeout_stale_ms", ValueError, (0, NAN, 10**400)),
    ("timeout_stale_ms", TypeError, ("1",)),
    ("max_attempts", ValueError, (0, True, 10**6)),
    ("data_dir", TypeError, (b"jobs",)),
    ("data_dir", ValueError, ("",)),
    ("keep_done", TypeError, ("1d",)),
    ("keep_done", ValueError, NO_AGES),
    ("retry_delay_s", ValueError, (-1,)),
    ("poll_interval_s", ValueError, (-1,)),
)
NO_SECONDS: tuple[Any, ...] = ("1", True, [])
NO_TIMEOUTS = -1, NAN, INFINITE
NO_MEMBERS = "pending", "../x", None
REFUSALS: tuple[Refusal, ...] = (
    (lambda q, task, it: q.push(it), TypeError, "encode it", ("text",)),
    (lambda q, task, it: q.push(it), TypeError, "bytes-like", NO_BYTES),
    (lambda q, task, it: q.push_many(it), TypeError, "for one payload use push", (b"123",)),
    (lambda q, task, it: q.schedule(it, 0), TypeError, "bytes-like", NO_BYTES),
    (lambda q, task, it: q.schedule(b"x", it), TypeError, "time_us", ("1", None, True)),
    (lambda q, task, it: q.schedule(b"x", it), ValueError, "time_us", NO_TIMES),
    (lambda q, task, it: q.pop(lease_ms=it), ValueError, "lease_ms", (0, -1, NAN)),
    (lambda q, task, it: q.take(**it), TypeError, "a key or an id", NO_TASK),
    (lambda q, task, it: q.push(it, key="k"), TypeError, "encode it", ("text",)),
    (lambda q, task, it: q.push(b"x", key=it), ValueError, "", NO_KEYS),
    (lambda q, task, it: q.push(b"x", key=it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.push(b"x", if_in_flight=it), TypeError, "key", ("update",)),
    (lambda q, task, it: q.push(b"x", key="k", if_in_flight=it), ValueError, "or reject", ("x",)),
    (lambda q, task, it: q.schedule(b"x", 1, key=it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.take(it), ValueError, "", NO_KEYS),
    (lambda q, task, it: q.contains(it), TypeError, "key must be", NO_TEXTS),
    (lambda q, task, it: q.keys(it), ValueError, "state", ("buffered",)),
    (lambda q, task, it: q.peek(**it), TypeError, "an id or a key", NO_TASK),
    (lambda q, task, it: q.take(id=it), ValueError, "not the id", ("../x",)),
    (lambda q, task, it: q.done(it), TypeError, "FemtoTask", (None,)),
    (lambda q, task, it: q.done(q.peek(task.id)), LeaseLost, "only pop", (None,)),
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
    (lambda q, task, it: setattr(q, it, 1), AttributeError, "{it}", FIXED),
    (lambda q, task, it: q.pop(it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.pop(it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.drain(it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.drain(it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.take("key", it), TypeError, "timeout must be", NO_SECONDS),
    (lambda q, task, it: q.take("key", it), ValueError, "timeout must be", NO_TIMEOUTS),
    (lambda q, task, it: q.work(it), TypeError, "does the work", NO_HANDLERS),
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


class Lifecycle(QueueCase):
    in_memory = False

    def test_payloads_come_out_as_they_went_in(self) -> None:
        """From nothing to 64 MB, and around the sizes at which reading changes its way; bytearray
        and any contiguous memoryview, whatever the size of its items."""
        q, sizes = self.queue(), (0, 1, 100, 4079, 4080, 4081, 4082, 4096, 10**6, 64 * 10**6)
        payloads: list[Any] = [random.Random(size).randbytes(size) for size in sizes]
        payloads += [bytearray(b"ab"), memoryview(b"abcd")[1:3], memoryview(b"abcdefgh").cast("I")]
        for payload in payloads:
            q.push(payload)
            task = self.pop(q)
            self.assertTrue(task.data == bytes(payload), f"{len(task.data)} bytes")
            q.done(task)

    def test_wrong_arguments_are_refused_and_change_nothing(self) -> None:
        q = self.queue()
        task, new = leased(q), self.file("new")
        for call, error, text, those in REFUSALS:
            for it in those:
                said = text.format(it=task if it is None else it)
                with self.subTest(text, it=it), self.assertRaisesRegex(error, said):
                    call(q, task, it)
        for name, error, those in NO_SETTINGS:
            for it in those:
                with self.subTest(name, it=it), self.assertRaisesRegex(error, name):
                    FemtoQueue(**{"data_dir": new, name: it})
        self.assertEqual(self.states(), {"inflight-n1": 1})
        self.assertFalse(os.path.exists(self.file("keys")) or os.path.exists(new))
        q.done(task)

    def test_an_enum_is_the_text_that_it_stands_for(self) -> None:
        """As a key, a state, an id, a node, a directory or a reason: in names and in what is looked
        for, though its format() is another text (Python 3.11)."""
        ident = self.queue().push(b"x", key="k")

        class Word(str, enum.Enum):
            DIRECTORY, NODE, ID, KEY, WHY = self.path, "n2", ident, "k", "why"
            PENDING, FAILED = "pending", "failed"

        q = self.queue(Word.NODE)
        self.assertEqual(q.push(b"y", key=Word.KEY), ident)
        self.assertEqual(([*q.keys(Word.PENDING)], len([*q.tasks(Word.PENDING)])), (["k"], 1))
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

    def test_a_task_is_a_value(self) -> None:
        """What was leased equals what is looked at; but only the delivery ends it, and what is
        assigned to it changes nothing in the queue."""
        q = self.queue()
        ident = q.push(b"x")
        task = self.pop(q)
        seen, copy = q.peek(ident), FemtoTask(ident, b"x", 1)
        self.assertEqual(({task, seen, copy}, task == ident), ({task}, False))
        self.assertNotEqual(task, FemtoTask(ident, b"x", 2))
        self.assertEqual(repr(task), f"FemtoTask(id='{ident}', data=b'x', attempts=1, key=None)")
        self.assertAlmostEqual(task.created.timestamp(), time.time(), delta=60)
        self.assertEqual(str(task.created.tzinfo), "UTC")
        self.assertRaises(LeaseLost, q.done, copy)
        task.id = "../x"
        q.done(pickle.loads(pickle.dumps(task)))
        self.assertEqual(self.names("done"), [ident])
        with self.assertRaisesRegex(LeaseLost, f"{ident}.*finished") as caught:
            q.done(task)
        self.assertEqual((caught.exception.id, caught.exception.expired), (ident, False))

    def test_attach_says_whether_the_lease_is_over(self) -> None:
        q, clock = self.queue(), self.clock()
        path, waiting = leased(q).path, f"pending/{q.push(b'waits')}"
        q.done(q.attach(path))
        for expired in (False, True):
            for lease in (path, path.rpartition("/")[2]):
                with self.assertRaises(LeaseLost) as caught:
                    q.attach(lease)
                self.assertEqual(caught.exception.expired, expired)
            clock.advance(31)
        for no_lease in ("what~is~this", waiting):
            self.assertRaises(LeaseLost, q.attach, no_lease)

    def test_a_tasks_other_id_is_in_no_name(self) -> None:
        """A program may keep a number of its own there."""
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

    def test_what_comes_back_to_the_front_has_the_order_of_its_push(self) -> None:
        """Also of several, which come back before and behind the first name that was listed."""
        q, payloads = self.queue(), [b"%d" % number for number in range(8)]
        q.push_many(payloads)
        for task in [self.pop(q) for _ in range(3)]:
            q.release(task, front=True)
        self.assertEqual(self.drain(q), payloads)

    def test_fail_keeps_an_exception_with_its_traceback(self) -> None:
        """Whatever characters are in it."""
        q = self.queue()
        ident = q.push(b"1")
        try:
            raise ValueError("größe \udc80")  # not KeyError, whose text is quoted
        except ValueError as error:
            q.fail(self.pop(q), error)
        self.assertRegex(reason_of(q, ident), r"\ATraceback[^$]*in test_fail_keeps_an_exception")

    def test_a_time_for_which_there_are_no_names_is_the_first_or_the_last_of_them(self) -> None:
        """And a lease shorter than a nanosecond is one: who is not too late can still settle it."""
        q = self.queue(timeout_stale_ms=1e-7)
        for lease_ms in (None, 1e-7):
            q.push(b"x")
            task = q.pop(lease_ms=lease_ms) or self.fail("a task was there to be popped")
            q.extend(task, 1e-7)
            q.extend(task, 1e300)
            q.release(task, delay_s=1e300)
        q.schedule(b"before 1970", -5e15)
        self.assertEqual((self.drain(q), len(self.names("scheduled"))), ([b"before 1970"], 2))

    def test_push_many_that_fails_half_way_says_how_many_were_pushed(self) -> None:
        """The first ones are in, whole; the error is as it came."""
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

    # Scheduled

    def test_very_many_that_are_due_do_not_keep_the_lock_until_all_have_been_moved(self) -> None:
        """Else no lease of the worker were renewed meanwhile."""
        q, clock, wanted = self.queue(), self.clock(), [b"%d" % number for number in range(20)]
        for due_us, data in enumerate(wanted):
            q.schedule(data, due_us)
        with hooked(at_call("move", "/scheduled/", lambda: clock.advance(0.1))):
            first = self.pop(q)
            self.assertGreater(len(self.names("scheduled")), 10)
            self.assertEqual([first.data, *self.drain(q)], wanted)
        q.done(first)

    def test_what_another_schedules_is_seen_at_once_if_nothing_waits(self) -> None:
        """Unless a person cancels it as it is taken."""
        self.clock().stand_still()  # no job comes due
        q, other = self.queue(), self.queue("n2")
        self.assertIsNone(q.pop())
        other.schedule(b"1", 0)
        self.assertEqual(self.pop(q).data, b"1")
        other.schedule(b"2", 0, key="k")
        path = self.file("scheduled", *self.names("scheduled"))
        with hooked(at_call("move", "/scheduled/", lambda: os.unlink(path))):
            self.assertIsNone(q.take("k"))

    def test_a_task_taken_early_that_can_not_be_read_keeps_its_time(self) -> None:
        q = self.queue()
        ident = q.schedule(b"later", (time.time() + 1000) * 1e6)
        with hooked(at_call("read", None, raising(errno.EIO))):
            self.assertRaises(OSError, q.take, id=ident)
        self.assertEqual((q.pop(), self.states()), (None, {"scheduled": 1}))

    # Ended, and operated

    def test_a_task_that_moves_against_each_look_is_work_that_is_left(self) -> None:
        """As of a worker that releases it and takes it again, and is in step."""
        q, other = self.queue(), self.queue("n2")
        lease = self.file(leased(q).path)
        waits = self.file("pending", lease[-29:])

        def move(source: str, target: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                os.rename(source, target)

        take = at_call("list", "/pending", lambda: move(waits, lease))
        give = at_call("list", "/inflight-n1", lambda: move(lease, waits))
        with hooked(lambda *call: (take(*call), give(*call))):
            self.assertFalse(other.join(0))
        self.drain(q)

    def test_what_is_done_is_kept_for_as_many_seconds_as_wanted(self) -> None:
        """pop() deletes it, in slices: no listing of done/ is taken in one piece."""
        q, clock = self.queue(keep_done=60), self.clock()
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
        self.assertLessEqual(max(a - b for a, b in itertools.pairwise([12, *counts])), 4)

    def test_while_there_is_what_is_to_go_the_slices_of_done_follow_each_other_soon(self) -> None:
        """Else the directory of a fast worker grew for ever."""
        q, clock = self.queue(keep_done=1), self.clock()
        with with_constant("purge slice", 0):
            for _ in range(5):
                q.done(leased(q))
            clock.advance(2)
            for left in (4, 3, 2, 1, 0):
                self.assertEqual((q.pop(), len(self.names("done"))), (None, left))
                clock.advance(0.02)

    def test_nothing_is_handed_out_while_the_queue_is_paused(self) -> None:
        """From the call of pause() on in its object, where paused said so, and everywhere else a
        second later, though the last listing took long; what was listed before is not either."""
        clock, q, other = self.clock(), self.queue(), self.queue("n2")
        clock.stand_still()  # no job comes due
        ways: tuple[tuple[FemtoQueue, float, Callable[[], object]], ...] = (
            (q, 0, lambda: None),
            (other, 0, lambda: self.assertTrue(q.paused)),
            (other, 9, lambda: clock.advance(1)),
        )
        for (pauser, listing_s, notice), listed in itertools.product(ways, (1, 3)):
            with self.subTest(listed=listed, pauser=pauser.node_id, listing_s=listing_s):
                ids = q.push_many([b"x"] * listed)
                slow = at_call("list", "pending", functools.partial(clock.advance, listing_s))
                with hooked(slow):
                    q.done(self.pop(q))
                pauser.pause()
                ids.append(q.push(b"y"))
                notice()
                self.assertEqual((q.pop(), q.take(id=ids[-1])), (None, None))
                pauser.resume()
                self.assertEqual(len(self.drain(q)), listed)

    def test_a_task_that_is_done_and_waits_comes_to_its_end(self) -> None:
        """One file, which a file system that healed after a cut shows in two states: rename() of
        one name to the other does nothing, and says that it did."""
        q, clock = self.queue(), self.clock()
        for state, end in (("done", q.done), ("failed", q.fail)):
            ident = q.push(b"x")
            os.link(self.file("pending", ident), self.file(state, ident))
            for _ in range(2):
                end(_taken(q))
                clock.advance(31)
            self.assertIsNone(q.pop())
            self.assertEqual((self.states(), self.names(state)), ({state: 1}, [ident]))
            os.unlink(self.file(state, ident))

    def test_looking_without_data_reads_headers_only(self) -> None:
        """A file without a valid header is shown, not left out, as with data; peek() says what is
        wrong with it. A payload is not read."""
        q, tasks = self.queue(), list[FemtoTask]()
        q.push(b"x" * 100_000, key="k")
        self.put(f"{1:020d}-00000000", b"rubbish")
        os.mkdir(self.file("pending", f"{2:020d}-00000000"))
        reads = calls_of("read", lambda: tasks.extend(q.tasks("pending", data=False)))
        self.assertEqual(
            [(task.size_bytes, task.key, task.data) for task in tasks],
            [(None, None, b""), (None, None, b""), (100_000, "k", b"")],
        )
        self.assertLess(max(size for _, size in reads), 5000)
        self.assertEqual([task.key for task in q.tasks("pending")], ["k"])
        with self.assertRaisesRegex(CorruptTask, f"{tasks[0].id}.*header"):
            q.peek(tasks[0].id)


# Order


class Ordering(QueueCase):
    in_memory = False

    def test_order_survives_restarts_whatever_the_clocks_do(self) -> None:
        """A reboot sets the monotonic clock back, and a dead battery the wall clock. Without a boot
        id, as on Windows and macOS, each process anchors itself."""
        year_s, one_s = 365 * 86400.0, 1.0 - time.monotonic()
        lives: dict[str, list[tuple[str | None, float, float]]] = {
            "the date is set": [("1", 0, 0), ("1", -year_s, 0), ("1", year_s, 0), ("1", 0, 0)],
            "a reboot": [("1", 0, 0), ("2", -year_s, one_s)],
            "no boot id": [(None, 0, 0), (None, -1000, 0)],
        }
        clock = self.clock()
        for name, life in lives.items():
            self.path = self.new_dir()
            for number, (boot, clock.wall_shift_s, clock.monotonic_shift_s) in enumerate(life):
                for directory in os.listdir(self.path):  # by the wall clock, which tells nothing
                    os.utime(self.file(directory), (0, 0))
                with on_boot(boot):
                    q = self.queue()
                    q.push(b"%d" % number)
            with self.subTest(name):
                self.assertEqual(self.drain(q), [b"%d" % n for n in range(len(life))])
                clocks = [name for name in os.listdir(self.path) if "clock-" in name]
                self.assertEqual(len(clocks), len({boot for boot, *_ in life if boot}))

    def test_unreadable_clock_file_is_made_again_after_the_newest_task(self) -> None:
        """Rubbish, or a number no clock can have, in clock-<boot> does not move the order; nor do a
        directory and a FIFO of that name, of which only the FIFO is replaced."""
        q = self.queue()
        q.push(b"0")
        clock = f"clock-{self.boot()}"
        rubbish = (b"", b"x" * 50, b"\0\n", b"8" * 19 + b"\n", b"-" + b"9" * 19 + b"\n", b"12")
        for number, content in enumerate(rubbish, 1):
            self.put(clock, content, "")
            self.queue().push(b"%d" % number)
        for number, make in enumerate((os.mkfifo, os.mkdir), len(rubbish) + 1):
            os.unlink(self.file(clock))
            make(self.file(clock))
            self.queue().push(b"%d" % number)
        self.assertEqual(self.drain(self.queue()), [b"%d" % n for n in range(len(rubbish) + 3)])

    def test_an_anchor_that_another_set_meanwhile_is_not_overwritten(self) -> None:
        """By another wall clock; nor later, when ours says something else again."""
        clock, others = self.clock(), list[FemtoQueue]()

        def be_quicker() -> None:
            clock.wall_shift_s = 5000.0
            others.append(self.queue("quick"))

        with hooked(at_call("open", ".clock", be_quicker, times=1)):
            slow = self.queue("slow")
        clock.wall_shift_s = 10_000.0
        self.check_one_clock(slow, *others, self.queue("later"))
        self.assertEqual(len(others), 1)
        self.boot()  # there is one clock-<boot>

    def test_a_wall_clock_of_the_far_future_starts_no_clock(self) -> None:
        """Once it is set right, another one would begin."""
        clock = self.clock()
        clock.wall_shift_s = 80 * 365 * 86400.0
        q = self.queue()
        clock.wall_shift_s = 0.0
        self.check_one_clock(q, self.queue())

    def test_a_huge_backlog_is_taken_in_order_though_only_part_of_it_is_kept(self) -> None:
        """The cut that keeps a sixteenth in memory drops the youngest, and foreign names first."""
        q = self.queue()
        ids = q.push_many([b""] * 300)
        self.foreign = tuple(f"00-{n:03d}.swp" for n in range(40))
        for name in self.foreign:
            self.put(name, b"")
        with with_constant("most in a batch", 20), with_constant("chunk", 7):
            self.assertEqual([task.id for task in iter(q.pop, None)], ids)


# Leases


class ReplacedClock(QueueCase):
    """A program under test puts its own functions into the time module."""

    def both_clocks(self, seconds: float) -> Any:
        return mock.patch.multiple(time, time=lambda: seconds, monotonic=lambda: seconds)

    def test_lease_ends_by_the_clock_that_stands_in_time(self) -> None:
        with self.both_clocks(0):
            holder = self.queue("n1", timeout_stale_ms=100)
            holder.push(b"x")
            other = self.queue("n2", timeout_stale_ms=100)
            self.pop(holder)
        with self.both_clocks(10):
            self.assertEqual(self.pop(other).data, b"x")

    def test_scheduled_task_is_due_by_the_clock_that_stands_in_time(self) -> None:
        now_s = time.time()
        for has_looked in (False, True):
            with self.subTest(has_looked=has_looked), self.both_clocks(now_s):
                q = self.anew()
                q.schedule(b"x", (now_s + 60) * 1e6)
                if has_looked:
                    self.assertIsNone(q.pop())
                with self.both_clocks(now_s + 60):
                    self.assertEqual(self.pop(q).data, b"x")

    def test_task_is_due_when_the_clock_shows_the_float_of_its_due_time(self) -> None:
        """The due time is in microseconds, as time.time() * 1e6; both products are rounded."""
        q = self.queue()
        for number in range(200):
            now_s = 1_800_000_000 + number * 0.01234567
            with self.both_clocks(now_s):
                q.schedule(b"x", (now_s + 0.001) * 1e6)
            with self.both_clocks(now_s + 0.001):
                q.done(self.pop(q))

    def test_due_task_is_found_at_once_when_the_date_alone_is_set_forward(self) -> None:
        now_s, q = time.time(), self.queue()
        q.schedule(b"x", (now_s + 60) * 1e6)
        self.assertIsNone(q.pop())
        with mock.patch.object(time, "time", return_value=now_s + 60):
            self.assertEqual(self.pop(q).data, b"x")

    def test_due_task_is_found_after_the_clock_went_back(self) -> None:
        now_s = time.time()
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

    def test_monotonic_clock_that_began_anew_under_one_boot_id_keeps_the_order(self) -> None:
        """A restored machine has the boot id of before, and a monotonic clock near zero."""
        clock = self.clock()
        clock.monotonic_shift_s = 40 * 86400.0
        q = self.queue("n1", detached=True)
        older, leased = q.push(b"older"), q.push(b"leased")
        q.take(id=leased, lease_ms=1500)
        clock.monotonic_shift_s = 0.0
        clock.wall_shift_s = 60.0
        restarted = self.queue("n2")
        younger = restarted.push(b"younger")
        clock.advance(2)
        found = {self.pop(restarted).id: None for _ in range(3)}
        self.assertEqual([*found], [older, leased, younger])


@FORK
class Liveness(QueueCase):
    def test_an_empty_directory_of_unknown_boot_is_left_alone_for_a_minute(self) -> None:
        """It may be an idle worker's on another host, whose lock is not seen here (FUSE). If it is
        another user's, in a directory that is sticky, it stays."""
        q, clock = self.queue(), self.clock()
        os.mkdir(self.file("inflight-other"))
        sticky = hooked(at_call("rmdir", "-other", raising(errno.EPERM), times=1))
        for advance_s, there in ((1, True), (61, True), (1, False)):
            clock.advance(advance_s)
            with sticky if advance_s == 61 else contextlib.nullcontext():
                self.assertIsNone(q.pop())
            self.assertEqual(os.path.exists(self.file("inflight-other")), there)

    def test_the_end_of_a_lease_ends_a_wait(self) -> None:
        """Between two rounds of housekeeping."""
        self.hasten("base interval", 10)
        task, other = leased(self.queue(timeout_stale_ms=100)), self.queue("n2")
        self.assertEqual(_taken(other, 4).id, task.id)

    def test_of_a_dead_worker_only_leases_of_this_boot_end_before_their_deadline(self) -> None:
        """Its directory may be another host's too, by the same node_id; that one may live. When the
        wall clock went back, st_ctime tells nothing."""
        clock = self.clock()
        for back_s in (0, 1e8):
            q, dead = self.anew(), self.queue("dead")
            q.push_many([b"1", b"2"])
            mine = os.path.basename(self.pop(q).path)
            self.pop(dead)
            theirs = mine.replace(f"~{self.boot()}~", "~12345678~")
            os.rename(self.file("inflight-n1", mine), self.file("inflight-dead", theirs))
            dies(dead)
            clock.advance(1)
            self.assertEqual((self.pop(q).data, q.pop()), (b"2", None))
            self.assertEqual(self.names("inflight-dead"), [theirs])
            clock.advance(31)
            clock.wall_shift_s -= back_s
            self.assertEqual(self.pop(q).attempts, 2)

    def test_leases_end_after_a_reboot_that_set_the_wall_clock_far_back(self) -> None:
        """A dead battery; and no task is as new as the lease. Its directory was changed then."""
        clock = self.clock()
        with on_boot("1"):
            q = self.queue("dead")
            q.push(b"")
            clock.advance(5 * 3600)
            self.pop(q)
            os.utime(lease_dir(q), (clock.time(), clock.time()))
            dies(q)
        with on_boot("2"):
            clock.wall_shift_s = clock.monotonic_shift_s = 0.0
            q = self.queue()
            clock.advance(31)
            self.assertEqual(self.pop(q).attempts, 2)

    def test_what_can_not_be_moved_keeps_no_other_waiting(self) -> None:
        """A task that is due, or the lease of a dead worker; nor in the rounds after the one in
        which it was met. Its error surfaces when nothing else waits."""
        q, clock = self.queue(), self.clock()

        def die(node_id: str) -> str:
            dead = self.queue(node_id)
            ident = leased(dead).id
            dies(dead)
            return ident

        for come in (lambda node_id: q.schedule(b"x", 1), die):
            stuck = come("dead")
            with hooked(at_call("move", stuck, raising(errno.EACCES))):
                for node_id in ("dead2", "dead3"):
                    ident = come(node_id)
                    clock.advance(1)
                    self.assertEqual(self.pop(q).id, ident)
                for _ in range(2):
                    self.assertRaises(PermissionError, q.pop)
            clock.advance(1)
            self.assertEqual(self.pop(q).id, stuck)

    def test_a_directory_that_another_removes_while_it_is_taken_is_made_again(self) -> None:
        """Before it is opened, or between that and the lock: an observer saw nobody in it."""
        place = self.file("inflight-n1")

        def is_there(name: str, args: tuple[Any, ...]) -> bool:
            return args[0] == place and os.path.isdir(place)

        for step in Meanwhile.each(lambda: os.rmdir(place), is_there, at_least=2):
            with self.queue() as q:
                q.push(b"x")
                with hooked(step):
                    q.done(self.pop(q))
                self.assertEqual(self.names("inflight-n1"), [])

    def test_a_starting_worker_leaves_the_lease_of_one_that_was_quicker(self) -> None:
        """The directory is removed as it opens it; a namesake makes it anew, and claims there."""
        starting, quicker, taken = self.queue("same"), self.queue("same"), list[FemtoTask]()
        self.queue("producer").push(b"x")
        os.mkdir(lease_dir(starting))

        def be_quicker() -> None:
            os.rmdir(lease_dir(starting))
            taken.append(_taken(quicker))

        with hooked(at_call("lock", fcntl.LOCK_SH, be_quicker, times=1)):
            self.assertIsNone(starting.pop())
        quicker.done(taken[0])
        self.assertEqual(self.states(), {"done": 1})

    def test_ctrl_c_at_any_call_of_a_pop_costs_no_lease_of_the_dead(self) -> None:
        """Neither what it left itself, nor what one leaves that dies later. The clock is a call."""
        clock = self.clock()
        monotonic = clock.monotonic
        for step in Step.each(interrupt, at_least=20):
            q, again, dead = (self.queue(it, timeout_stale_ms=None) for it in ("a", "a", "b"))
            q.push_many([b"1", b"2"])
            self.assertEqual(len([*iter(q.pop, None)]), 2)
            dies(q)

            def look(step: Step = step) -> float:
                step("clock", ())
                return monotonic()

            looks = mock.patch.object(clock, "monotonic", look)
            with hooked(step), looks, contextlib.suppress(KeyboardInterrupt):
                again.pop()
            if not step.reached:
                again.close()
            self.assertIsNotNone(dead.take(id=dead.push(b"3")))
            dies(dead)
            clock.advance(60)
            self.assertEqual(sorted(self.drain(again)), [b"1", b"2", b"3"], step.at)
            again.close()

    def test_a_restart_takes_back_even_while_an_observer_looks_at_its_directory(self) -> None:
        """The observer's lock is waited out; a lease of an earlier boot is nobody else's to end."""
        q, again = self.queue(), self.queue()
        leased(q)
        dies(q)
        observer = os.open(lease_dir(q), os.O_RDONLY)
        self.addCleanup(os.close, observer)
        fcntl.flock(observer, fcntl.LOCK_EX)
        unlock = functools.partial(fcntl.flock, observer, fcntl.LOCK_UN)
        with hooked(at_call("lock", fcntl.LOCK_SH, unlock)):
            self.assertEqual(self.pop(again).attempts, 2)

    def test_dropping_a_queue_leaves_no_descriptor_no_warning_and_no_directory(self) -> None:
        """At once, as a file is closed: no cycle keeps it for the garbage collector."""
        before = len(os.listdir("/dev/fd"))
        gc.disable()
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

    def outlive(self, call: str) -> None:
        """Let a worker fork at a call of its pop(), and die before its child does."""

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
        self.addCleanup(child.go)  # the one that it forked
        self.assertEqual(child.line(), "forked")
        child.kill()
        q.done(_taken(q, 10))

    def test_a_forked_child_that_outlives_its_parent_keeps_no_task_of_its_leased(self) -> None:
        """Nor if another thread forked as the lock was taken."""
        for call in ("read", "lock"):
            with self.subTest(call):
                self.outlive(call)

    def test_ctrl_c_as_a_fork_begins_leaves_the_child_none_of_its_parents_leases(self) -> None:
        """Python goes on with such a fork."""
        q = self.queue()
        task = leased(q)
        lock = mock.Mock(acquire=interrupt)
        lock.release.side_effect = RuntimeError
        with seam("fork lock", lock), mock.patch.object(sys, "unraisablehook"):
            child = self.child(lambda child: q.close())
        self.assertEqual(child.finish(), ([], 0))
        q.done(task)

    def test_a_forked_child_is_a_worker_of_its_own(self) -> None:
        q = self.queue(None)
        ids = q.push_many([b"1", b"2"])
        mine = self.pop(q)

        def work(child: Child) -> None:
            task = _taken(q)
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


class PlaceLost(QueueCase):
    """A worker whose own lease directory was removed while it lives."""

    def settled(self, count: int) -> FemtoQueue:
        """Return a worker that has its place, in a new queue, and has listed as many tasks."""
        q = self.anew()
        q.push_many([b"%d" % n for n in range(count)])
        q.done(self.pop(q))
        return q

    def test_a_claim_goes_only_into_a_directory_that_is_locked(self) -> None:
        """Not into another of its name, which an observer may take for a dead worker's, nor where a
        directory was moved; whether the task was listed before or not."""
        self.clock().stand_still()  # no job comes due
        losses: dict[str, Callable[[str], object]] = {
            "removed": os.rmdir,
            "made again": lambda place: os.rename(self.file("spare"), place),
            "moved away": lambda place: os.rename(place, self.file("elsewhere")),
        }
        for (name, lose), call in itertools.product(losses.items(), ("next", "pop", "take")):
            with self.subTest(name, call=call):
                q, observer = self.settled(3 if call == "next" else 1), self.queue("n2")
                lose(lease_dir(q))
                if call != "next":
                    q.push(b"1", key="k")
                    q.push(b"2")
                mine = self.take(q, "k") if call == "take" else _taken(q)
                theirs = _taken(observer)
                self.assertEqual((mine.data, theirs.data, observer.pop()), (b"1", b"2", None))
                q.done(mine)
                observer.done(theirs)
                self.assertEqual(self.states(), {"done": 3})

    def test_a_place_that_another_host_removed_is_made_again(self) -> None:
        """There its descriptor does not lead to an empty directory, but gives ESTALE."""
        q = self.settled(5)
        place, [gone] = lease_dir(q), descriptors_of(lease_dir(q))
        os.rmdir(place)

        def stale(name: str, args: tuple[Any, ...]) -> None:
            into_it = name == "move" and not args[1].startswith("/")
            is_gone = not os.path.exists(place) or gone in descriptors_of(place)
            if is_gone and (into_it or (name == "fstat" and args[0] == gone)):
                fail_with(errno.ESTALE)

        with hooked(stale):
            self.assertEqual(self.drain(q), [b"1", b"2", b"3", b"4"])
        self.assertNotIn(gone, descriptors_of(place))

    def test_nothing_is_claimed_while_the_place_can_not_be_taken(self) -> None:
        """Names that were listed before must not go to a directory that nobody has locked. One that
        stays stale is an error, not a loop without end."""
        clock = self.clock()
        for code in (errno.EMFILE, errno.ESTALE):
            q = self.settled(3)
            os.rmdir(lease_dir(q))
            clock.advance(2)
            with hooked(at_call("open", lease_dir(q), raising(code))):
                for _ in range(3):
                    with self.assertRaisesRegex(OSError, rf"\[Errno {code}\]"):
                        q.pop()
            tasks = self.pop(q), self.pop(self.queue("n2"))
            self.assertEqual([task.data for task in tasks], [b"1", b"2"])

    def test_a_long_batch_is_not_tried_without_a_lease_directory(self) -> None:
        """On NFS each would ask the server; the next listing makes the directory again."""
        for fs_type, most in ((EXT4, 99), (NFS, 2)):
            with on_file_system(fs_type):
                q = self.settled(300)
                shutil.rmtree(lease_dir(q))
                claims = calls_of("move", functools.partial(_taken, q))
            self.assertEqual([task.data for task in q.tasks("inflight")], [b"1"])
            self.assertLessEqual(len([it for it in claims if "/pending/" in it[0]]), most)

    def test_a_lease_whose_directory_is_gone_is_lost(self) -> None:
        q = self.queue(sync_after_write=True, keep_done=False)
        for call in (q.extend, q.done, q.release, q.fail):
            for lose in (functools.partial(shutil.rmtree, lease_dir(q)), q.close):
                task = leased(q)
                lose()
                self.assertRaises(LeaseLost, call, task)


class Row(NamedTuple):
    """Every call of a step, and, of a queue with sync, its moves and what it syncs."""

    calls: str
    synced: str
    settings: dict[str, Any] = {}  # noqa: RUF012


# What each step asks of the system: nothing beside what its promise needs. By words of Life: what
# comes before the bar makes it ready, in an empty queue. An intended change of the library's edits
# these tables.
STEPS = {
    "push x": Row("open write close move", "move file directory"),
    "schedule x 4e15": Row("open write close move", "move file directory"),
    "none": Row("list stat", ""),
    "push x | take": Row("list move open read close", "move"),
    "push x, push y, take | take": Row("move open read close", "move"),
    "schedule x | take": Row(
        "stat list move stat list move open read close stat", "move file directory move"
    ),
    "push x, take, release | take": Row("list move open read close stat", "move"),
    "push x, take | done": Row("move", "move file directory"),
    "push unkept, take | done": Row(
        "unlink", "file directory unlink directory", {"keep_done": False}
    ),
    "push x, take | fail": Row("move unlink", "move unlink file directory"),
    "push x, take | fail why": Row(
        "open write close move unlink move", "file move unlink move file directory"
    ),
    "push x, take, fail | retry": Row("stat unlink move", "unlink move file directory"),
    "push x, take | release": Row("move", "move file directory"),
    "push x, take | release later": Row("move", "move file directory"),
    "push x, take | extend": Row("move", "move"),
    "litter | none": Row(
        "list move open read fstat close stat move unlink open write close move unlink stat fstat"
        " stat list stat",
        "move move unlink file move file directory unlink",
    ),
    "push x, take | save 1": Row(
        "open stat fstat fchown fchmod write close "
        "stat mkdir open stat fstat fchown fchmod close move move",
        "file directory move move directory",
    ),
}
KEY_STEPS = {
    "push x | take": Row("list move open read fstat close open fstat read close stat", "move"),
    "push x, take | done": Row(
        "open lock open fstat read close lock move unlink lock close", "move unlink file directory"
    ),
    "push x, take, done | push y": Row(
        "open lock open open write close "
        "open open stat fstat fchown fchmod write close move lock close",
        "file file directory move directory",
    ),
    "push x | push y": Row(
        "open lock open fstat read close stat open write close move unlink lock close",
        "file move file directory unlink",
    ),
    "push x, take, fail | retry": Row(
        "stat open lock open open read fstat close "
        "open open stat fstat fchown fchmod write close unlink lock move lock close",
        "file directory unlink move file directory",
    ),
    "push x, take, release | push y": Row(
        "open lock open fstat read close stat open write close unlink move move unlink open write"
        " close lock close",
        "file unlink move file directory move file directory unlink",
    ),
    "push x, take | push y": Row(
        "open lock open fstat read close stat stat list stat list open write close open write close"
        " move lock close",
        "file file directory move directory",
    ),
    "push x, take | push y update": Row(
        "open lock open fstat read close stat stat list stat list open write close move unlink"
        " open write close lock close",
        "file move file directory unlink",
    ),
}


class StepCase(QueueCase):
    """A test that counts the calls of steps. A sync is noted by what is synced."""

    def calls(self, work: Callable[[], object]) -> list[str]:
        """Return the calls that a piece of work makes, in their order."""
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
        shown = "move", "unlink", "file", "directory"
        return [name for name in self.calls(work) if name in shown]

    def ready(
        self, words: str, row: Row, key: str | None = None, **settings: Any
    ) -> Callable[[], object]:
        """Make a step ready, in a queue of its own."""
        q = self.anew(**row.settings, **settings)
        self.assertIsNone(q.pop())
        life, (*before, step) = Life(q, lambda _: None, key), words.split(" | ")
        for part in before:
            life.live(part)
        return functools.partial(life.live, step)

    def check_each(self, found: Callable[[Any], list[str]], column: str, **settings: Any) -> None:
        """Fail where a step does not do what stands in that column."""
        for key, steps in ((None, STEPS), ("k", KEY_STEPS)):
            for words, row in steps.items():
                step = self.ready(words, row, key, **settings)
                with self.subTest(words, key=key):
                    self.assertEqual(" ".join(found(step)), getattr(row, column))


class Cost(StepCase):
    """What a step asks of the system. How long that takes is the benchmark's to show."""

    def setUp(self) -> None:
        super().setUp()
        self.clock().stand_still()  # no job comes due

    def test_a_step_makes_these_calls_and_no_others(self) -> None:
        self.check_each(self.calls, "calls")

    def test_tasks_without_a_key_pay_no_more_on_a_shared_file_system(self) -> None:
        """But for stat(), which its client answers, mostly."""
        self.patched(on_file_system(NFS))
        for words in ("push x", "push x, push y, take | take", "push x, take | done"):
            calls = self.calls(self.ready(words, STEPS[words]))
            self.assertEqual(" ".join(it for it in calls if it != "stat"), STEPS[words].calls)


class LostReply(QueueCase):
    """A server of NFS that reboots after a rename, and before it has answered, is asked again, and
    answers that there is no such file. The step was taken: it must not look as if it were not."""

    fs_type = NFS
    exchanges = False  # as there

    @contextlib.contextmanager
    def lost(self, then: Callable[[], object] = int) -> Iterator[None]:
        """The reply to the first rename of the block is lost, while something happens."""
        lost = list[str]()

        def lose() -> None:
            lost.append("reply")
            then()
            fail_with(errno.ENOENT)

        with hooked(at_call("move", None, lose, times=1), after=True):
            yield
        self.assertEqual(lost, ["reply"])
        self.check_invariants()

    def test_a_server_that_is_away_for_longer_than_the_lease_makes_no_difference(self) -> None:
        q, clock = self.queue(), self.clock()
        for end in (q.done, lambda it: q.fail(it, "why")):
            task = leased(q)
            with self.lost(then=lambda: clock.advance(90)):
                end(task)
        self.assertEqual(self.states(), {"done": 1, "failed": 1})

    def test_what_others_took_on_before_the_server_answered_was_pushed(self) -> None:
        """Before we ask again, the task is delivered elsewhere; or, as we have lost the key's lock
        with the server, the payload behind a lease that ended."""
        q, other = self.queue(), self.queue("n2")
        with self.lost(then=lambda: other.done(self.pop(other))):
            q.push(b"1")
        task = leased(other, b"2", "k")

        def promote() -> None:
            os.rename(self.file(task.path), self.file("done", task.id))
            [name] = self.names("keys")
            os.rename(self.file("keys", name), self.file("pending", name))

        with self.lost(then=promote):
            q.push(b"3", key="k")
        self.assertEqual(self.pop(q).data, b"3")

    def test_a_lease_that_was_over_is_lost_though_its_name_is_still_seen(self) -> None:
        """As its host saw it half a minute ago; and another delivery made done/<id>."""
        q, other, clock = self.queue(timeout_stale_ms=1000), self.queue("n2"), self.clock()
        late, seen = leased(q), list[str]()
        clock.advance(3)
        other.done(self.pop(other))

        def lstat(path: str) -> os.stat_result:
            if path.endswith(late.path) and not seen:
                seen.append(path)
                return os.lstat(self.file("done", late.id))
            return os.lstat(path)

        with mock.patch.object(femtoqueue, "os", fake_os(lstat=lstat)):
            for _ in range(2):
                self.assertRaises(LeaseLost, q.done, late)
        self.assertEqual(len(seen), 1)

    def test_a_delivery_that_was_given_up_or_ended_is_lost(self) -> None:
        """Its lease has not run out, and the task is where done() would have brought it."""
        q, other = self.queue(), self.queue("n2")
        task = leased(q)
        q.close()
        other.fail(self.pop(other), "the other's reason")
        self.assertRaises(LeaseLost, q.fail, task, "our reason")
        self.assertEqual(reason_of(q, task.id), "the other's reason\n")
        task = leased(q, b"2")
        q.done(task)
        self.assertRaises(LeaseLost, q.done, task)

    def test_a_payload_that_was_swept_away_is_not_taken_for_the_old_one(self) -> None:
        """A file of that name is there, and ours is gone; but it is another. Its host was suspended
        meanwhile: its monotonic clock stood still, but not time."""
        q, clock = self.queue(), self.clock()
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

    def test_a_host_whose_queue_clock_is_ahead_does_not_sweep_what_is_written(self) -> None:
        """Its writer's host was suspended once: its clock is behind. Wall clocks agree."""
        for fs_type in (EXT4, NFS):
            self.patched(on_file_system(fs_type))
            q, looks = self.anew(), list[list[str]]()
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

    def test_on_glusterfs_a_file_that_is_gone_is_gone(self) -> None:
        """It never asks twice: after a network was cut, one of its replicas may show as carried out
        what another host was faster at."""
        self.patched(on_file_system(FUSE))
        q = self.queue()
        with self.lost(), self.assertRaises(FileNotFoundError):
            q.push(b"1")
        ident = q.push(b"2")
        with self.lost():
            self.assertIsNone(q.pop())
        lease = self.file("inflight-n1", *self.names("inflight-n1"))
        os.rename(lease, self.file("pending", ident))
        task = self.pop(q)
        with self.lost(), self.assertRaises(LeaseLost):
            q.done(task)


def wait_until_it_stands(thread: threading.Thread) -> None:
    """Wait until a thread waits for a lock: it is where it was a moment ago."""
    end_s, before = time.monotonic() + PATIENCE_S, None
    while time.monotonic() < end_s:
        frame = sys._current_frames().get(thread.ident or 0)
        place = frame and (frame.f_code, frame.f_lasti)
        if place is not None and place == before:
            return
        before = place
        time.sleep(0.02)


class Sharing(QueueCase):
    def test_a_thread_that_lost_a_race_leaves_the_batch_to_the_others(self) -> None:
        """It looks at names without the interpreter's lock; others may use up the batch then."""
        q, thief = self.queue(), self.queue("n2")
        q.push_many([b"0", b"1", b"2"])
        self.pop(q)
        self.pop(thief), self.pop(thief)
        thread = threading.Thread(target=lambda: [*iter(q.pop, None)])

        def empty() -> None:
            thread.start()
            thread.join(0.1)  # it ends, or it waits for us

        with hooked(at_call("access", None, empty, times=1)):
            q.pop()
        thread.join()
        self.assertEqual((self.names("pending"), q._worker.lease_dir.unread), ([], {}))

    def test_a_lease_begins_when_it_is_taken_however_long_that_waited(self) -> None:
        """Another thread of the object may be in a system call for longer than a short lease."""
        q, clock = self.queue(), self.clock()
        q.push_many([b"1", b"2"])
        mine, theirs = self.pop(q), list[FemtoTask]()
        popper = threading.Thread(target=lambda: theirs.append(_taken(q)))

        def hang() -> None:
            popper.start()
            wait_until_it_stands(popper)
            clock.advance(40)

        with hooked(at_call("move", None, hang, times=1)):
            q.extend(mine, 100_000)
            popper.join()
        until = theirs[0].until
        assert until is not None
        self.assertGreater(until.timestamp(), clock.time())

    def test_progress_is_kept_when_another_process_saves_it(self) -> None:
        """The payload that it belongs to is read, which attach() did not."""
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
        """Neither a death, nor a restart or another end of the node ends it; so it has one, though
        a queue renews it whose own leases have none."""
        q, clock = self.queue(detached=True), self.clock()
        endless = self.queue("n2", timeout_stale_ms=None)
        endless.extend(endless.attach(leased(q).id))
        q.close()
        for node_id in ("n1", "other"):
            with self.queue(node_id) as other:
                self.assertIsNone(other.pop())
        clock.advance(31)
        self.pop(self.queue("other"))

    def test_errors_survive_pickling(self) -> None:
        for error in (LeaseLost("i", True, "why"), CorruptTask("i", "why"), TaskNotFound("why")):
            copy = pickle.loads(pickle.dumps(error))
            self.assertEqual((str(copy), vars(copy)), (str(error), vars(error)))
            self.assertIsInstance(error, FemtoQueueError)


class LeftBehind(QueueCase):
    """What is given up while it is held, or read, is as if it had not been taken."""

    DELIVERS = (
        *("pop", "take_oldest", "claim", "_deliver"),
        *("_look", "_look_for_all", "_answer", "wait_for_async", "accept"),
    )

    def test_a_queue_object_in_a_cycle_of_garbage_leaves_in_silence(self) -> None:
        """Also if the finalizer of its lock ran first: its place is gone, its task back."""
        for lock_first in (False, True):
            with (
                self.subTest(lock_first=lock_first),
                mock.patch.object(sys, "unraisablehook") as complaint,
            ):
                self.drop(lock_first)
                complaint.assert_not_called()
            self.assertFalse(os.path.exists(self.file("inflight-n1")))
            self.assertEqual(self.drain(self.queue("n2")), [b"x"])

    def test_the_interpreter_ends_whatever_its_threads_have_locked(self) -> None:
        """It ends them wherever they are. What nobody has locked meanwhile is given back."""
        code = """if True:
            import sys, threading
            import femtoqueue
            q = femtoqueue.FemtoQueue(sys.argv[1], "gone")
            for key in "ab":
                q.push(b"x", key=key)
            with q.processing(q.pop()):  # starts the thread that renews
                assert q.pop()
            worker = q._worker
            places = [vars(it) for it in (femtoqueue, q._clock, worker, *vars(worker).values())
                      if hasattr(it, "__dict__")]
            found = {id(it): it for place in places for it in place.values()}.values()
            locks = [getattr(it, "_cond", it).acquire for it in found
                     if hasattr(it, "acquire") or isinstance(it, threading.Event)]
            assert worker.lock.acquire in locks and len(locks) > 3
            if sys.argv[2] == "free":
                locks.remove(worker.lock.acquire)
            thread = threading.Thread(target=list, args=(map(lambda it: it(False), locks),))
            thread.start()
            thread.join()
            """
        for lock in ("free", "locked"):
            words = sys.executable, "-W", "error", "-c", code, self.path, lock
            ended = run_guarded(*words, env={"PYTHONPATH": os.path.dirname(femtoqueue.__file__)})
            self.assertEqual(ended, (0, "", ""), lock)
            if lock == "free":
                self.assertFalse(os.path.exists(self.file("inflight-gone")))
            self.assertEqual(self.drain(self.queue("n2")), [b"x"])

    def drop(self, lock_first: bool) -> None:
        """Drop a queue object that has a lease, in a cycle."""
        q: Any = FemtoQueue(self.path, "n1")
        leased(q, b"x")
        if lock_first:  # the finalizers of a cycle run in the order in which they were made
            younger = FemtoQueue.__new__(FemtoQueue)
            younger.__dict__.update(q.__dict__)
            q.__dict__.clear()
            q = younger
            del younger
        q.__dict__["itself"] = q
        del q
        gc.collect()

    def test_close_at_any_line_of_a_delivery_takes_it_or_leaves_it(self) -> None:
        """Either its caller has it, and it is counted, or nobody has, and it is not: with
        max_attempts=1 that would be a dead letter that nobody ever got."""
        ways: dict[str, Callable[[FemtoQueue], FemtoTask | None]] = {
            "pop": FemtoQueue.pop,
            "wait": lambda q: q.pop(PATIENCE_S),
            "take": lambda q: q.take(id=self.names("pending")[0]),
            "coroutine": lambda q: asyncio.run(q.pop_async(PATIENCE_S)),
        }
        for way, deliver in ways.items():
            with self.subTest(way):
                lines = next(it for it in itertools.count() if not self.close_at_line(it, deliver))
                self.assertGreater(lines, 25)

    def test_ctrl_c_at_any_line_of_a_pop_leaves_no_lease(self) -> None:
        """The task is at its place, and the delivery was not counted; also one that comes back with
        a newer payload behind it, whose first delivery it is."""
        for key in (None, "k"):
            numbers = itertools.count()
            lines = next(it for it in numbers if not self.interrupt_at_line(it, key))
            self.assertGreater(lines, 50)

    def interrupt_at_line(self, number: int, key: str | None) -> bool:
        """Return whether there is such a line."""
        q = self.anew()
        task = leased(q, b"x", key)
        if key:
            q.push(b"newer", key=key)
        name = f"{task.id[:20]}~1~{task.id}" if key else task.id
        os.rename(self.file(task.path), self.file("pending", name))
        try:
            with at_line(number, interrupt) as came:
                q.pop()
        except KeyboardInterrupt:
            self.assertEqual(self.names("inflight-n1"), [], number)
            self.assertEqual(self.pop(q), FemtoTask(task.id, b"newer" if key else b"x", 1, key))
        return bool(came)

    def close_at_line(self, number: int, deliver: Callable[[FemtoQueue], FemtoTask | None]) -> bool:
        """Return whether there is such a line."""
        q = self.anew(max_attempts=1)
        q.push(b"x")
        self.assertIsNone(q.take(key="none"))
        closer = threading.Thread(target=q.close)

        def close() -> None:
            closer.start()
            closer.join(0.01)  # it waits for us if we are at a claim

        with at_line(number, close, self.DELIVERS) as came:
            task = deliver(q)
        if not came:
            return False
        until(lambda: closer.ident is not None)
        closer.join()
        while task is None:  # a thread that looks for coroutines may have it yet
            self.assertEqual(q.stats().failed, 0)
            task = q.pop()
        # Else it was taken back, and is a dead letter, unless the pop() went on and took it again.
        is_lost = not os.path.exists(self.file(task.path))
        self.assertEqual((q.pop(), q.stats().failed, task.attempts), (None, is_lost, 1))
        q.close()
        return True


# Keyed tasks


class Keyed(QueueCase):
    """At most one task of a key waits or is in flight, and what was pushed last is not missed."""

    STATES = "waits", "is back", "is scheduled", "is due", "is leased", "is leased with one behind"
    in_memory = False

    has_states = True  # keys/<hash> says where the task of a key is

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(self.check_keys)

    def check_keys(self) -> None:
        if os.path.isdir(self.path):
            q = FemtoQueue(self.path, "checker")
            found = [*q.keys("pending"), *q.keys("scheduled"), *q.keys("inflight")]
            self.assertEqual(len(found), len({*found}), "two tasks of one key")
            self.assertTrue(all(map(q.contains, found)))

    def test_a_queue_that_is_gone_is_disk_trouble_for_who_looks_for_a_key_or_work(self) -> None:
        q = self.queue()
        shutil.rmtree(self.path)
        os.mkdir(self.path)  # as where nothing is mounted
        self.assertRaises(FileNotFoundError, q.contains, "k")
        self.assertRaises(FileNotFoundError, q.peek, key="k")
        self.assertRaises(FileNotFoundError, q.join, 0)

    def one_behind(self, q: FemtoQueue) -> FemtoTask:
        """Lease a task, and push a newer payload behind it."""
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        return task

    # What is a key, and what a push of one does

    def test_any_text_is_a_key_and_can_be_read_back(self) -> None:
        """Up to 200 bytes. By task and header."""
        q = self.queue()
        keys = ["k" * 200, "a b", "\n", "%41", "A", "-", "größe", "\U0001f40d" * 50, "\0", "../x"]
        ids = [q.push(key.encode(), key=key) for key in keys]
        for key in reversed(keys):
            task = self.take(q, key)
            self.assertEqual((task.key, task.data), (key, key.encode()))
            q.done(task)
        self.assertEqual(self.names("keys"), [])
        # A lock outlives its key: who waits for one may, on a network, be shown its old path.
        self.assertEqual(self.names("locks"), sorted({it[-2:] for it in ids}))
        with open(self.file("pending", q.push(b"x", key="user:42 ü")), "rb") as file:
            self.assertTrue(file.read().endswith(b" 1 user:42%20%C3%BC\nx"))

    def test_a_task_waits_in_sight_while_its_payload_is_replaced(self) -> None:
        """At each system call of the push a pop() gets the old payload, or the new one, which is
        not charged with old deliveries."""
        q, other = self.queue(max_attempts=3), self.queue("n2", max_attempts=3)
        if not self.can_exchange():
            self.skipTest("names can't be exchanged here")
        taken: list[FemtoTask] = []
        for step in Meanwhile.each():
            key = f"{step.number}"
            q.push(b"old", key=key)
            for _ in range(2):
                q.release(self.take(q, key), front=True)
            step.happen = lambda: taken.append(_taken(other))
            with hooked(step):
                q.push(b"new", key=key)
            if step.reached:
                other.done(taken[-1])
            payloads = self.drain(q) or [taken[-1].data]
            self.assertEqual(payloads[-1], b"new")
        seen = {(task.data, task.attempts) for task in taken}
        self.assertEqual(seen, {(b"old", 3), (b"old", 1), (b"new", 1)})

    def test_a_new_payload_keeps_its_place_for_workers_that_listed_it_before(self) -> None:
        """Though its name changes, for its attempts begin anew."""
        q = self.queue(max_attempts=3)
        for attempts in (1, 3):
            q.push_many([b"first"] * 3)
            q.push(b"old", key="k")
            for _ in range(attempts):
                q.release(self.take(q, "k"), front=True)
            q.push_many([b"y", b"z"])
            workers = [self.queue(f"w{n}", max_attempts=3) for n in range(3)]
            for worker in workers:
                worker.done(self.pop(worker))  # and lists what waits
            q.push(b"new", key="k")
            payloads = []
            for worker in workers:
                task = self.pop(worker)
                payloads.append(task.data)
                self.assertEqual(task.attempts, 1)
                worker.done(task)
            self.assertEqual(payloads, [b"new", b"y", b"z"])

    def bring(self, q: FemtoQueue, state: str, now_s: float) -> None:
        """Push the first payload of a key, and bring it into a state."""
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

    def seen(self, q: FemtoQueue) -> list[object]:
        """Return the task of the key, its place, and what is behind it."""
        task = q.peek(key="k")
        behind = [name for name in self.names("keys") if len(name) > 8]
        return [task, task and task.path, *behind, *(q.peek(name[-29:]) for name in behind)]

    def test_a_push_that_raises_leaves_all_as_it_was(self) -> None:
        """Whichever call fails; a sync, too, but for what was renamed over the old record."""
        self.in_memory = True  # there are many syncs
        clock, _ = self.clock(), self.queue()
        can_exchange = self.can_exchange()
        behind = {
            **dict.fromkeys(("waits", "is back"), "buffer update"),
            "is leased": "buffer schedule",
        }
        for state, way in itertools.product(self.STATES, ("buffer", "update", "schedule")):
            is_synced = can_exchange or way in behind.get(state, "").split()
            for step in Step.each(raising(errno.EIO)):
                with self.anew(sync_after_write=is_synced) as q:
                    self.bring(q, state, clock.time())
                    before = self.seen(q)
                    push = functools.partial(q.push, b"new", key="k", if_in_flight=way)
                    if way == "schedule":
                        due_us = (clock.time() + 50) * 1e6
                        push = functools.partial(q.schedule, b"new", due_us, key="k")
                    with self.subTest(state=state, way=way, call=step.number):
                        try:
                            with hooked(step):
                                push()
                        except OSError:
                            self.assertEqual(self.seen(q), before, step.at)

    # What is behind a task

    def test_a_claim_that_is_undone_does_not_deliver_an_outdated_payload_later(self) -> None:
        """A newer payload came behind the lease before its task was read, and the claim was undone:
        its file was not there (which is looked for again where other hosts write), no descriptor
        was left, Ctrl-C."""
        gone, interrupted = FileNotFoundError(errno.ENOENT, "gone"), KeyboardInterrupt()
        for error in (gone, OSError(errno.EMFILE, "too many"), OSError(errno.EIO, ""), interrupted):
            q, other, key, newer = self.queue(), self.queue("n2"), repr(error), list[str]()
            self.assertEqual((q.pop(), other.pop()), (None, None))  # their repair of keys is over
            ident, task = q.push(b"old", key=key), None

            def undo(key: str = key, newer: list[str] = newer, error: Any = error) -> None:
                if not newer:
                    newer.append("")  # that is not yet pushed
                    newer[0] = self.queue("n2").push(b"new", key=key)
                if newer[0]:
                    raise error

            hook = at_call("open", "/inflight-n1/", undo, times=99 if error is gone else 1)
            ended, slept = contextlib.suppress(OSError, KeyboardInterrupt), mock.patch("time.sleep")
            with ended, slept, hooked(hook):
                task = q.pop()
            with self.subTest(error=error):
                task = task or other.pop() or _taken(q)
                self.assertEqual((task.id, task.data, task.attempts), (ident, b"new", 1))
                (q if task.node == "n1" else other).done(task)
                self.assertEqual((self.drain(q), q.stats().buffered), ([], 0))

    def test_a_newer_payload_whose_hint_was_lost_is_let_in(self) -> None:
        """Unless another was pushed since: that has replaced it."""
        q, clock = self.queue(), self.clock()
        for newest in (b"2", b"3"):
            task = self.one_behind(q)
            if self.has_states:
                os.unlink(self.file("keys", key_tag("k")))
            q.done(task)
            if newest == b"3":
                q.push(b"3", key="k")
            clock.advance(601)
            self.assertEqual(self.drain(q), [newest])
            self.assertEqual(self.names("keys"), [])

    def test_a_payload_behind_one_whose_worker_died_at_its_end_comes_at_once(self) -> None:
        """Not at the next round of housekeeping: a dead worker is a reason to look."""
        q, victim, clock = self.queue(), self.queue("victim"), self.clock()
        self.assertIsNone(q.pop())
        task = self.one_behind(victim)
        dead = hooked(at_call("move", "/keys/", raising(errno.EIO)))
        with dead, self.assertRaises(OSError):
            victim.done(task)
        dies(victim)
        clock.advance(1)
        self.assertEqual(self.drain(q), [b"2"])

    def test_a_newer_payload_that_is_corrupt_is_set_aside(self) -> None:
        """Removed just then, keys/ with an empty name is not renamed over an empty pending/."""
        q, name = self.queue(), f"{1:020d}-80000000"
        os.mkdir(self.file("keys"))
        path = self.put(name, b"rubbish", "keys")
        remove = hooked(at_call("open", path, lambda: os.unlink(path), times=1))
        with remove, contextlib.suppress(FileNotFoundError):
            q.pop()
        self.assertEqual((self.names("keys"), self.names("pending")), ([], []))
        self.put(name, b"rubbish", "keys")
        self.assertIsNone(self.queue("n2").pop())
        self.assertEqual(self.states(), {"failed": 1})

    # Dead letters, and what people move

    def put_back(self, ident: str) -> None:
        """`mv failed/ID pending/`, as a person does it, who knows nothing of keys."""
        os.rename(self.file("failed", ident), self.file("pending", ident))

    def test_a_dead_letter_does_not_come_back_beside_a_newer_task(self) -> None:
        """Nor over it, though what keys/ said before may still be in the file. Alone, it comes."""
        q = self.queue("a-node-with-a-name-that-is-longer-than-pending")
        old = self.one_behind(q)
        q.fail(old, "why")
        newer = self.pop(q)
        self.put_back(old.id)
        self.assertIsNone(q.pop())
        self.assertEqual(newer.data, b"2")
        self.assertEqual(self.names("failed"), [old.id, f"{old.id}.error"])
        q.done(newer)
        q.retry(old.id)
        self.assertEqual((q.push(b"3", key="k"), q.contains("k")), (old.id, True))
        q.fail(self.pop(q))
        self.put_back(old.id)
        q.push(b"4", key="k")  # beside it where keys/ tells of tasks; else it gets that
        self.assertEqual(self.drain(q), [b"4"])
        self.assertEqual(self.names("failed") != [], self.has_states)
        if self.has_states:
            self.put_back(old.id)
            self.assertEqual(self.drain(q), [b"3"])
        self.assertEqual(self.names("keys"), [])

    def unnoted(self) -> Any:
        """Let a state that is not in keys/ yet find no room there."""

        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and "/keys/" in str(args[0]) and args[1] & os.O_CREAT:
                fail_with(errno.ENOSPC)

        return hooked(refuse)

    def test_a_task_that_came_back_and_can_not_be_noted_is_not_delivered(self) -> None:
        """A push would know nothing of it, and make another."""
        q, other = self.queue(), self.queue("n2")
        task = leased(q, b"1", "k")
        q.fail(task)
        self.put_back(task.id)
        with self.unnoted(), contextlib.suppress(OSError):
            q.pop()
        other.push(b"2", key="k")
        other.pop()
        q.pop()
        self.assertEqual(q.stats().inflight, 1)

    def test_a_payload_that_came_up_counts_though_that_was_not_noted(self) -> None:
        """More than the older one, which a person put back."""
        q = self.queue()
        old = self.one_behind(q)
        with self.unnoted():
            q.fail(old)
        self.put_back(old.id)
        self.assertEqual(self.drain(q), [b"2"])

    def test_a_hint_that_is_wrong_or_rubbish_does_no_harm(self) -> None:
        """Nobody's push() wrote it, nor that another task is the key's."""
        q = self.queue()
        os.mkdir(self.file("keys"))
        self.put(key_tag("k"), b"k ../../etc/passwd -\nrub bish\n\xff\n\n", "keys")
        q.push(b"4", key="k")
        self.assertEqual(self.drain(q), [b"4"])
        self.assertTrue(not self.has_states or self.names("keys") == [])
        self.put(key_tag("k"), f"k pending/{q.push(b'plain')} -\n\n".encode(), "keys")
        q.push(b"5", key="k")
        self.assertEqual(self.drain(q), [b"plain", b"5"])

    # Locks

    def test_to_wait_for_a_key_does_not_hold_up_the_other_threads(self) -> None:
        """Nor their renewals: a process that is stopped may have that key's lock."""
        q, waits = self.queue(), threading.Semaphore(0)
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

    def test_what_a_busy_key_keeps_from_being_put_back_is_put_back_later(self) -> None:
        """A stopped process that holds a key's lock stalls that key, not the queue."""
        q, clock, other = self.queue(), self.clock(), self.queue("n2")
        leased(other, b"1", "k")
        q.push(b"2")
        q.schedule(b"3", 1, key="busy")
        clock.advance(31)
        with self.locked("k"), self.locked("busy"):
            self.assertEqual(self.drain(q), [b"2"])
        clock.advance(1)
        self.assertEqual(sorted(self.drain(q)), [b"1", b"3"])

    def test_a_delivery_that_could_not_be_ended_ends_when_its_key_is_free(self) -> None:
        """Its lease has no deadline that would."""
        q = self.queue(timeout_stale_ms=10**15)
        task = leased(q, key="k")
        with (
            contextlib.suppress(OSError),
            hooked(at_call("move", "/inflight-", raising(errno.EIO))),
            q.processing(task),
        ):
            raise ZeroDivisionError
        with self.locked("k"):
            self.assertIsNone(q.pop())
        self.assertEqual(q.pop(10), FemtoTask(task.id, b"x", 2, "k"))

    def test_what_was_scheduled_behind_a_task_is_taken_by_the_id_of_that(self) -> None:
        q = self.queue()
        task = leased(q, b"1", "k")
        q.schedule(b"2", (time.time() + 9000) * 1e6, key="k")
        q.release(task)
        self.assertEqual(q.take(id=task.id), FemtoTask(task.id, b"2", 1, "k"))

    def test_a_newer_payload_begins_anew_though_its_bytes_are_the_same(self) -> None:
        """What was saved was not its progress."""
        q = self.queue()
        task = leased(q, b"", "k")
        q.checkpoint(task, b"half")
        q.push(b"", key="k")
        q.release(task)
        task = self.pop(q)
        self.assertEqual((task.attempts, task.checkpoint), (1, None))


# Durability, crashes, faults


class KeyedByRename(Keyed):
    """The same where names can't be exchanged: NFS, FUSE, not Linux."""

    in_memory, exchanges = True, False

    def test_a_payload_for_later_whose_sync_failed_is_not_delivered_before_its_time(self) -> None:
        """It is in the place of the old one, or of one behind a task, and can't be taken back."""
        clock, moves = self.clock(), list[str]()

        def fail(name: str, args: tuple[Any, ...]) -> None:
            moves.extend(args[:1] if name == "move" else ())
            if name == "fsync" and moves and "/creating/" in moves[-1]:
                fail_with(errno.EIO)

        for is_leased in (False, True):
            q = self.anew(sync_after_write=True)
            task = leased(q, key="k") if is_leased else None
            q.push(b"1", key="k")
            moves.clear()
            with hooked(fail), self.assertRaises(OSError):
                q.schedule(b"2", (clock.time() + 99) * 1e6, key="k")
            if task is not None:
                q.done(task)
            self.assertIsNone(q.pop())
            clock.advance(100)
            self.assertEqual(self.drain(q), [b"2"])


class Healed(QueueCase):
    """GlusterFS, after a network was cut, brings renamed names back, as second links."""

    fs_type = FUSE

    def test_a_finished_task_that_is_brought_back_is_not_delivered_again(self) -> None:
        """Under any name that it had; nor is it in its key's way, or a dead letter at its end."""
        front = "pending/{id:.20}~1~{id}"
        for key, name in itertools.product((None, "k"), ("pending/{id}", front, "{path}")):
            q, clock = self.anew(max_attempts=1), self.clock()
            task = leased(q, b"1", key)
            path = self.file(name.format(id=task.id, path=task.path))
            q.done(task)
            os.link(self.file("done", task.id), path)
            with self.subTest(name, key=key):
                self.assertFalse(key and q.contains(key))
                self.assertNotEqual(q.push(b"2", key=key), task.id)
                newer = self.take(q, key) if key else _taken(q)
                self.assertEqual(newer.data, b"2")
                q.done(newer)
                clock.advance(3600)
                self.assertIsNone(q.pop())
                self.assertEqual(self.states(), {"done": 2})

    def test_a_name_that_can_not_be_removed_then_is_in_flight_for_nobody_for_long(self) -> None:
        q, clock = self.queue(timeout_stale_ms=None), self.clock()
        task = leased(q)
        q.done(task)
        os.link(self.file("done", task.id), self.file("pending", task.id))
        with hooked(at_call("unlink", None, raising(errno.ENOTCONN))):
            self.assertIsNone(q.pop())
        self.assertEqual(len(self.names("inflight-n1")), 1)
        clock.advance(60)
        self.assertEqual((q.pop(), q.pop()), (None, None))
        self.assertEqual(self.states(), {"done": 1})

    def test_a_replaced_record_that_is_brought_back_does_not_stand_for_its_key(self) -> None:
        """Its task ended with a newer payload, which is another file: nothing shows that it has
        ended. A younger task of the key keeps what is pushed behind it, and is delivered."""
        for name in ("pending/{id}", "{path}"):
            q, other, clock = self.anew(), self.queue("n2"), self.clock()
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

    def test_a_replaced_payload_that_is_brought_back_is_behind_no_younger_task(self) -> None:
        """It would be renamed over that."""
        q = self.queue()
        first = leased(q, b"1", "k")
        ident = q.push(b"2", key="k")
        q.done(first)
        q.push(b"3", key="k")
        q.done(self.pop(q))
        newest = q.push(b"4", key="k")
        for behind in (ident, newest):
            ghost = self.put(behind, record(b"2", b"k"), "keys")
            task = _taken(q)
            self.assertEqual((task.id, task.data), (newest, b"4"))
            q.release(task) if behind == ident else q.done(task)
            self.assertEqual(self.names("keys"), [behind])
            os.unlink(ghost)

    def test_a_lease_that_is_brought_back_does_not_end_over_its_task(self) -> None:
        """With as many attempts it gets the name that the task has; both are delivered."""
        q, other, clock = self.queue(), self.queue("n2"), self.clock()
        old = leased(other, b"1", "k")
        q.push(b"2", key="k")
        other.release(old, front=True)
        newer = self.pop(q)
        self.assertEqual((newer.id, newer.data), (old.id, b"2"))
        q.release(newer, front=True)
        self.put(old.path, record(b"1", b"k"), "")
        clock.advance(60)
        taken = [task.data for task in (q.pop(), q.pop()) if task]
        self.assertEqual(sorted(taken), [b"1", b"2"])

    def test_a_retried_task_whose_dead_letter_is_brought_back_is_delivered(self) -> None:
        """Of its two names nothing tells which is the older one."""
        q = self.queue()
        for key in (None, "k"):
            dead = leased(q, b"1", key)
            q.fail(dead)
            q.retry(dead.id)
            (name,) = self.names("pending")
            os.link(self.file("pending", name), self.file("failed", dead.id))
            self.assertTrue(key is None or q.contains(key))
            self.assertEqual(_taken(q).id, dead.id)
            os.unlink(self.file("failed", dead.id))

    def test_a_failed_statfs_is_an_error_and_no_local_file_system(self) -> None:
        """The lock of another host's would not be seen. A wait that it ends leaves nothing."""
        q, line = self.queue(), self.new_dir()
        self.assertIsNone(q.pop())  # its directory is open from now on
        opened = len(os.listdir("/dev/fd"))
        cut = seam("file system type", lambda _: fail_with(errno.ENOTCONN))
        with cut, mock.patch("sys.unraisablehook") as complaint:
            for call in (
                functools.partial(q.pop, PATIENCE_S),
                lambda: TicketQueue(line).register(),
            ):
                self.assertRaises(OSError, call)
        complaint.assert_not_called()
        self.assertLessEqual(len(os.listdir("/dev/fd")), opened)
        self.assertEqual({*os.listdir(line)} - {"last"}, set())

    @contextlib.contextmanager
    def phantom(self, directory: str, name: str, listing_s: float = 0) -> Iterator[list[float]]:
        """List a name that leads to nothing, within listing_s; yield what femtoqueue sleeps."""
        clock = self.clock()
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.advance(seconds)

        def listdir(path: str) -> list[str]:
            clock.advance(listing_s)
            return os.listdir(path) + [name] * (os.path.basename(path.rstrip("/")) == directory)

        self.patched(mock.patch.object(clock, "sleep", sleep, create=True))
        with mock.patch.object(femtoqueue, "os", fake_os(listdir=listdir)):
            yield slept

    def test_a_phantom_is_told_in_time_where_listings_are_slow(self) -> None:
        q = self.queue()
        ident, seconds = f"{1:020d}-{q.push(b'1', key='k')[-8:]}", constant("stale")
        with self.phantom("pending", ident, listing_s=seconds) as slept:
            q.push(b"2", key="k")
        self.assertLess(len(slept), 40)

    def test_a_phantom_that_comes_to_life_is_found(self) -> None:
        """And a mount that hangs makes none."""
        q = self.queue()
        ident = q.push(b"1", key="k")
        os.rename(self.file("pending", ident), self.file("aside"))
        with self.phantom("pending", ident):
            self.assertFalse(q.contains("k"))
            self.assertIsNone(q.take(id=ident))
        os.rename(self.file("aside"), self.file("pending", ident))
        clock = self.clock()
        self.patched(mock.patch.object(clock, "sleep", clock.advance, create=True))
        for worker, hangs_s in ((q, 0), (self.queue("n2"), constant("stale"))):

            def miss(hangs_s: float = hangs_s) -> None:
                clock.advance(hangs_s)
                fail_with(errno.ENOENT)

            with hooked(at_call("open", ident, miss, times=8)):
                self.assertEqual(worker.push(b"2", key="k"), ident)

    def test_a_lease_of_another_host_that_was_just_renewed_is_left_alone(self) -> None:
        """Its deadline has passed by this host's clock only."""
        with on_boot("another host's"):
            q = self.queue(timeout_stale_ms=1000)
            task = leased(q)
        other = self.queue("n2")
        self.clock().advance(2)
        with hooked(at_call("lstat", task.path, raising(errno.ESTALE), times=1)):
            self.assertIsNone(other.pop())
        q.done(task)
        self.assertEqual(self.states(), {"done": 1})

    def test_what_another_host_took_just_then_is_no_error(self) -> None:
        """done() with sync has ended the task; and there is nothing left to purge."""
        q = self.queue(sync_after_write=True)
        task = leased(q)
        with hooked(at_call("open", f"done/{task.id}", raising(errno.ESTALE))):
            q.done(task)
        for event in ("lstat", "unlink"):
            with hooked(at_call(event, f"done/{task.id}", raising(errno.ESTALE))):
                self.assertEqual(q.purge(0), 0)

    def test_a_failed_task_that_can_not_be_read_is_not_retried(self) -> None:
        """Its key may have another task."""
        q = self.queue()
        ident = q.push(b"1", key="k")
        q.fail(self.pop(q))
        gone = hooked(at_call("open", f"failed/{ident}", raising(errno.ENOENT)))
        with gone, mock.patch("time.sleep"):
            for _ in range(2):
                self.assertRaises(TaskNotFound, q.retry, ident)
        self.assertEqual(self.names("failed"), [ident])
        q.retry(ident)

    def test_pending_is_not_replaced_where_others_may_look_into_the_old_one(self) -> None:
        q = self.queue()
        before = os.stat(self.file("pending")).st_ino
        with with_constant("shrink", -1):
            self.assertIsNone(q.pop())
        self.assertEqual(os.stat(self.file("pending")).st_ino, before)

    def test_a_checkpoint_is_looked_up_anew(self) -> None:
        q, seen = self.queue(), list[str]()
        task = leased(q)
        q.checkpoint(task, b"half")
        q.release(task)
        with hooked(lambda name, args: seen.append(f"{name} {os.path.basename(str(args[0]))}")):
            task = self.pop(q)
        self.assertEqual(task.checkpoint, b"half")
        self.assertLess(seen.index("list checkpoints"), seen.index(f"open {task.id}"))

    def test_a_claim_that_can_be_neither_used_nor_undone_is_given_back_later(self) -> None:
        """As it is carried out, or its file is looked at: of no worker, the lease does not last."""
        renames: list[str] = []

        def rename(*args: Any, **where: Any) -> None:
            renames.append(args[1])
            if len(renames) == 1:
                os.rename(*args, **where)
            if len(renames) > is_answered:
                fail_with(errno.ENOTCONN)

        def lstat(path: str) -> os.stat_result:
            return fail_with(errno.ENOTCONN) if "/inflight-n1/" in path else os.lstat(path)

        for is_answered in (False, True):
            q = self.anew(timeout_stale_ms=None)
            q.push(b"1")
            renames.clear()
            fake = fake_os(rename=rename, replace=rename, lstat=lstat)
            with self.subTest(is_answered), mock.patch.object(femtoqueue, "os", fake):
                self.assertRaises(OSError, q.pop)
            self.assertEqual(self.states(), {"inflight-n1": 1})
            task = q.pop(60)
            self.assertEqual(task and (task.data, task.attempts), (b"1", 1))


class KeyedOnSharedFileSystem(KeyedByRename):
    """The same where other hosts may write: only listings and renames tell the truth, keys/<hash>
    is not used, and names can't be exchanged."""

    has_states = False
    fs_type = NFS

    def test_of_two_tasks_of_a_key_that_are_claimed_at_once_one_is_delivered(self) -> None:
        """Each host listed the other's, and set its own aside."""
        q, other, ident = self.queue(), self.queue("n2"), f"{1:020d}-{key_tag('k')}"
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

    def test_what_is_pushed_behind_a_task_of_a_host_whose_clock_is_fast_is_younger(self) -> None:
        q = self.queue()
        self.put(f"{time.time_ns() + 10**9:020d}-{key_tag('k')}", record(b"1", b"k"))
        q.push(b"2", key="k")
        self.assertEqual(self.drain(q), [b"2"])

    def test_of_two_payloads_behind_a_task_the_older_one_is_never_delivered(self) -> None:
        """A host that was cut off lost the lock of the key, and does not know it: each put one."""
        q = self.queue()
        task = leased(q, b"1", "k")
        q.push(b"2", key="k")
        [behind] = self.names("keys")
        self.put(f"{int(behind[:20]) + 1:020d}{behind[20:]}", record(b"3", b"k"), "keys")
        q.release(task)
        self.assertEqual(self.drain(q), [b"3"])
        self.assertEqual((self.names("keys"), self.names("failed")), ([], []))

    def test_a_younger_task_of_a_key_put_there_by_hand_waits_while_the_older_one_runs(self) -> None:
        """Then it is delivered; that was no attempt."""
        q, other, clock = self.queue(), self.queue("n2"), self.clock()
        for data in (b"1", b"2"):
            q.fail(leased(q, data, "k"))
        older, younger = self.names("failed")
        q.retry(older)
        task = self.pop(q)
        os.rename(self.file("failed", younger), self.file("pending", younger))
        self.assertIsNone(other.pop())
        self.assertEqual((len(self.names("scheduled")), len(self.names("failed"))), (1, 0))
        q.done(task)
        clock.advance(2 * constant("stale"))
        self.assertEqual((task := self.pop(other)).data, b"2")
        self.assertEqual(task.attempts, 1)


class Durability(StepCase):
    """What is synced, and when; that it survives power loss is for .ci/ to show."""

    in_memory = False

    def test_a_step_is_on_disk_when_it_returns(self) -> None:
        """The record where it is now, then its directory; before an unlink, where it was: or its
        older place is all that the disk knows of it. A reason comes before its task, and the state
        of a new key: or after power loss no later push knew of it."""
        self.clock().stand_still()
        self.check_each(self.moves_and_syncs, "synced", sync_after_write=True)

    def test_what_is_synced_where_a_file_system_can_do_less(self) -> None:
        """What can't be exchanged goes behind its task after the state says so. What another host
        sees is on the server, or it reads a torn record, and makes a dead letter of what is then
        acknowledged."""
        for system, words, key, synced in (
            (without_exchange(), "push x | push y", "k", "file move file directory move directory"),
            (on_file_system(NFS), "push x", None, "file move directory"),
            (on_file_system(NFS), "schedule x 4e15", None, "file move directory"),
        ):
            with self.subTest(words, key=key), system:
                step = self.ready(words, Row("", ""), key, sync_after_write=True)
                self.assertEqual(" ".join(self.moves_and_syncs(step)), synced)

    def test_no_renewal_comes_between_the_sync_of_a_lease_and_its_removal(self) -> None:
        """Under its new name the file would not be synced."""
        q = self.queue(sync_after_write=True, keep_done=False)
        task = leased(q)
        lease = task.path

        def renew() -> None:
            renewal = threading.Thread(target=extend)
            renewal.start()
            renewal.join(0.1)
            self.addCleanup(renewal.join)
            self.assertEqual(task.path, lease)

        def extend() -> None:
            self.assertRaises(LeaseLost, q.extend, task)

        with hooked(at_call("lstat", "/inflight-", renew, times=1)):
            q.done(task)
        self.assertEqual(self.states(), {})

    def test_links_to_directories_can_be_synced(self) -> None:
        """data_dir, the directory above it, and one inside it."""
        os.mkdir(self.file("real"))
        os.symlink("real", self.file("link"))
        for path in ("link", "link/jobs"):
            with FemtoQueue(self.file(path), sync_after_write=True) as q:
                os.rename(self.file(path, "done"), self.file(f"done-{len(path)}"))
                os.symlink(self.file(f"done-{len(path)}"), self.file(path, "done"))
                q.push(b"x")
                q.done(_taken(q))
                self.assertEqual(q.stats().done, 1)

    def test_each_directory_is_synced_into_its_parent_whoever_made_it(self) -> None:
        """What was made; and a data_dir that another made without sync."""
        synced = set[int]()

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.add(os.fstat(args[0]).st_ino)

        with hooked(note):
            FemtoQueue(self.file("a", "b", "c"), sync_after_write=True).close()
        made = {os.stat(self.file(it)).st_ino for it in (".", "a", "a/b", "a/b/c")}
        self.assertLessEqual(made, synced)
        self.queue()
        calls = self.moves_and_syncs(lambda: FemtoQueue(self.path, sync_after_write=True))
        self.assertEqual(calls, ["directory"] * 2)

    def test_push_many_syncs_the_batch_once(self) -> None:
        """With syncfs no fsync; without, one a file and one of pending/. Without sync, neither."""
        q, other, synced = self.queue(sync_after_write=True), self.queue("n2"), list[int]()
        with on_file_system(0):
            calls = self.moves_and_syncs(lambda: q.push_many([b"1", b"2", b"3"]))
        self.assertEqual(Counter(calls), {"move": 3, "file": 3, "directory": 1})
        self.assertEqual(calls[-1], "directory")
        with seam("sync of a batch", lambda _: (functools.partial(synced.append, 1), False)):
            for pushing in (q, other):
                calls = self.moves_and_syncs(functools.partial(pushing.push_many, [b"4", b"5"]))
                self.assertEqual((calls, len(synced)), (["move"] * 2, 1))
        self.assertEqual(self.drain(q), [b"1", b"2", b"3", *[b"4", b"5"] * 2])

    def test_push_many_whose_sync_fails_takes_the_batch_back(self) -> None:
        q = self.queue(sync_after_write=True)
        batch = functools.partial(fail_with, errno.EIO), False
        sync = seam("sync of a batch", lambda _: batch)
        with sync, self.assertRaisesRegex(OSError, rf"\[Errno {errno.EIO}\].*\(0 tasks of"):
            q.push_many([b"1", b"2"])
        self.assertEqual(self.states(), {})

    @unittest.skipUnless(sys.platform == "linux", "syncfs is Linux's")
    def test_syncfs_is_found_and_called(self) -> None:
        """The real one, on the file system of the temporary directory if it is a known one."""
        sync, syncs_each = through_seam("sync of a batch")(self.path)
        if syncs_each:
            self.skipTest(f"not known whether the file system of {self.path} obeys syncfs")
        sync()
        with self.assertRaisesRegex(OSError, rf"\[Errno {errno.EBADF}\]"):
            sync()  # it has closed the directory


# After these a directory is as it was before: a process that dies then leaves the same.
UNCHANGING = (
    *("access", "close", "fstat", "fsync", "getxattr", "inotify", "list", "listxattr", "lock"),
    *("lseek", "lstat", "read", "readlink", "stat", "statfs", "statvfs", "syncfs"),
)


def may_change(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a directory may be another one after that call."""
    if name != "open":
        return name not in UNCHANGING
    how = args[1] if len(args) > 1 else "r"
    return bool(how & (os.O_CREAT | os.O_TRUNC)) if isinstance(how, int) else how[0] != "r"


def takes_effect(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a directory, a lock or a descriptor may be another one after that call."""
    return name in ("open", "close", "lock") or may_change(name, args)


def errors_of(name: str, args: tuple[Any, ...]) -> list[int]:
    """Return which errors a system may have for such a call."""
    frees_space = name in ("unlink", "rmdir", "chmod", "fchmod", "fchown")
    takes_space = name in ("fsync", "syncfs") or (may_change(name, args) and not frees_space)
    has = {
        errno.EIO: True,
        errno.ENOSPC: takes_space,
        errno.EMFILE: name in ("open", "list", "pipe", "pipe2", "dup", "inotify"),
        errno.EACCES: bool(args) and isinstance(args[0], str),
    }
    return [code for code, may_be in has.items() if may_be]


class Step:
    """Does something before (for close: after) the n-th of the system calls that count."""

    def __init__(
        self,
        number: int,
        happen: Callable[[], object] = int,
        counts: Callable[[str, tuple[Any, ...]], bool] | None = None,
    ) -> None:
        self.number, self.left, self.happen, self.counts = number, number, happen, counts
        self.at = ""  # the call before which it happened
        self.args: tuple[Any, ...] = ()

    @classmethod
    def each(
        cls,
        happen: Callable[[], object] = int,
        counts: Callable[[str, tuple[Any, ...]], bool] | None = None,
        at_least: int = 8,
    ) -> Iterator[Step]:
        """Yield a step for each system call of what is then done, and one that is not reached."""
        for number in itertools.count():
            step = cls(number, happen, counts)
            yield step
            if not step.reached:
                demand(number >= at_least, f"only {number} system calls")
                return

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.counts and not self.counts(name, args):
            return
        self.left -= 1
        if self.left == -1:
            self.at, self.args = name, args
            self.begin()

    def begin(self) -> None:
        if self.at == "close":
            os.close(self.args[0])  # a close() that fails has closed all the same
        self.happen()

    @property
    def reached(self) -> bool:
        return self.left < 0


class Meanwhile(Step):
    """Something else happens before the n-th system call, which then goes on; or after it."""

    def begin(self) -> None:
        self.happen()


class Astray(Step):
    """The n-th look at a task's file, and the next two, lead to one that another host replaced."""

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
        raise OSError(errno.ESTALE if self.misses else errno.ENOENT, "replaced", self.args[0])


def meets_names(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call sees or changes names. Between two others, who moves a task makes no odds."""
    return name in ("open", "list", "lstat", "stat", "move", "unlink", "mkdir", "rmdir")


def is_look(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call looks at a task's file, or at the reason beside it."""
    if name not in ("open", "lstat", "close") or may_change(name, args):
        return False
    path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "close" else args[0]
    return is_id(path.removesuffix(".error")[-29:]) and "/creating/" not in path


Say = Callable[[str], None]
# Runs a scenario on a queue of its own in self.path, whose system calls the hook gets.
Living = Callable[[Hook, Say], object]
# When a life ended, who goes on with its queue, and what it had said.
Ending = tuple[str, FemtoQueue, list[str]]


class Life:
    """Does what a scenario's words say. What is tried is said, and what has returned."""

    def __init__(self, q: FemtoQueue, say: Say, key: str | None) -> None:
        self.q, self.say, self.key = q, say, key
        self.beside: FemtoQueue | None = None
        self.held: list[FemtoTask] = []  # the one to be ended first
        self.failed: FemtoTask | None = None

    def live(self, words: str) -> None:
        try:
            for operation in words.split(", "):
                word, *arguments = operation.split()
                getattr(self, word)(*arguments)
        except BaseException:
            if self.beside is not None:
                self.beside.close()
            raise

    def said(self, what: str, call: Callable[..., object], *args: Any) -> None:
        self.say(f"try {what}")
        call(*args)
        self.say(what)

    def push(self, name: str, how: str = "buffer") -> None:
        put = functools.partial(self.q.push, key=self.key, if_in_flight=how)
        self.said(f"push {name}", put, name.encode())

    def schedule(self, name: str, time_us: str = "1") -> None:
        put = functools.partial(self.q.schedule, key=self.key)
        self.said(f"push {name}", put, name.encode(), float(time_us))

    def push_many(self, *names: str) -> None:
        self.q.push_many([name.encode() for name in names])
        for name in names:
            self.say(f"push {name}")

    def none(self) -> None:
        assert self.q.pop() is None

    def wait(self) -> None:
        assert self.q.pop(0.001) is None

    def take(self, what: str = "0") -> None:
        """Of the key, or within so many seconds."""
        task = self.q.take(what) if what == self.key else self.q.pop(float(what))
        assert task is not None
        self.say(f"got {task.id}")
        self.say(f"took {task.data.decode()}")
        self.held.append(task)

    def done(self) -> None:
        task = self.held.pop(0)
        self.said(f"done {task.data.decode()}", self.q.done, task)

    def fail(self, *reason: str) -> None:
        task = self.held.pop(0)
        self.failed = task
        error = ValueError(*reason) if reason else None
        self.said(f"fail {task.data.decode()}", self.q.fail, task, error)

    def retry(self) -> None:
        task = self.failed
        assert task is not None
        with contextlib.suppress(KeyInFlight):
            self.said(f"retry {task.data.decode()}", self.q.retry, task.id)

    def release(self, to: str = "") -> None:
        delay_s = 1e-6 if to == "later" else 0
        self.q.release(self.held.pop(0), front=to == "front", delay_s=delay_s)

    def extend(self) -> None:
        """By Ctrl-C meanwhile, the lease is not lost."""
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
        self.q.stats()
        for state in femtoqueue.STATES:
            list(self.q.tasks(state))
            list(self.q.tasks(state, data=False))
        self.q.peek(self.held[0].id)
        self.q.check(repair=True)
        self.q.purge(1e9)

    # Others

    def litter(self) -> None:
        with open(os.path.join(self.q.data_dir, "pending", f"{1:020d}-00000000"), "wb") as file:
            file.write(b"FQ1 00000000 9\ntorn")

    def mv(self) -> None:
        """A person puts a task back that was delivered."""
        task = self.held.pop(0)
        source, name = os.path.join(self.q.data_dir, task.path), f"{task.id[:20]}~1~{task.id}"
        os.rename(source, os.path.join(self.q.data_dir, "pending", name))

    def turn(self) -> None:
        """What follows is of the other worker."""
        other = self.beside or FemtoQueue(self.q.data_dir, "beside")
        self.q, self.beside = other, self.q

    def leave(self) -> None:
        assert self.beside is not None
        self.beside.close()
        self.held.clear()

    def die(self) -> None:
        assert self.beside is not None
        dies(self.beside)
        self.q.__dict__["dead"] = self.beside  # it is dropped with q, where no hook hears of it
        self.beside = None
        self.held.clear()


class Scenario:
    """A life, in words of Life. What comes before the bar is of another life, too: that one is
    interrupted there; and so is what would come after the last word."""

    def __init__(self, words: str, key: str | None = None) -> None:
        self.__name__, self.key = words, key

    def __call__(self, q: FemtoQueue, say: Say, hook: Hook | None = None) -> None:
        """Live it; the hook hears of what comes after the bar."""
        life, (*before, words) = Life(q, say, self.key), self.__name__.split(" | ")
        for part in before:
            life.live(part)
        with hooked(hook, after=type(hook) is Meanwhile) if hook else contextlib.nullcontext():
            life.live(words)


FINISHING = Scenario("push a, push b, take, extend, done, take, extend, done")
FAILING = Scenario("push a, push b, take | take, fail why, fail, retry, take, fail again")
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
    Scenario("push a, push b | turn, push c, take, done, take, turn, leave, take, done"),
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
    """Copy a directory, as shutil does, but in a third of the time: no modes, no dates."""
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


def those(word: str, said: list[str]) -> list[str]:
    """Return what was said in lines that begin so, without that."""
    return [line.removeprefix(f"{word} ") for line in said if line.startswith(f"{word} ")]


class Interrupted(QueueCase):
    """Each life, ended at each of its system calls in turn, by death, an error or Ctrl-C; then it
    is checked what is left, and that it goes on."""

    KILL_EVERY = 5  # calls that change something
    ERRORS = 4  # that a call gives in turn, of those that it may
    PUSHES: tuple[bool, ...] = (False,)  # whether the first thing then is a push
    lives: tuple[tuple[Scenario, dict[str, Any]], ...]
    counts: Callable[[str, tuple[Any, ...]], bool] | None = None  # which calls; None: all

    def setUp(self) -> None:
        super().setUp()
        self.base, self.serial = self.path, itertools.count()
        self.first_kill = itertools.cycle(range(self.KILL_EVERY))
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)  # Ctrl-C as a listing just began

    def new_path(self, number: int) -> None:
        """Go on in a directory of its own."""
        self.path = os.path.join(self.base, f"{next(self.serial)}-{number}")

    def born(self, number: int, settings: dict[str, Any]) -> tuple[FemtoQueue, list[str]]:
        """Begin a life; return its queue, and what is yet to be said."""
        self.new_path(number)
        return FemtoQueue(self.path, "n1", **settings), []

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """Fail unless what is left is what was said."""
        raise NotImplementedError

    def check_all(
        self, end: Callable[[Scenario, dict[str, Any]], Iterator[Ending]], **settings: Any
    ) -> None:
        self.now = self.clock()
        for scenario, own in self.lives:
            for when, q, said in end(scenario, {**own, **settings}):
                with self.subTest(f"{scenario.__name__}, {own}: {when}"), q:
                    self.check(q, said)
                shutil.rmtree(self.path)

    def deaths(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """A copy of the directory, made before a call, is what a process leaves that dies there:
        its locks are gone, and nothing of it runs any more. Before calls between which the
        directory stays as it is, that is one copy. SIGKILL ends a real process at every fifth call
        that changes something, in each life from another one on. (.ci/faults.py kills at every
        call.)"""

        def live(hook: Hook, say: Say) -> None:
            is_whole = "|" not in scenario.__name__
            with hooked(hook) if is_whole else contextlib.nullcontext():  # from birth
                q = FemtoQueue(self.path, "victim", **settings)
            scenario(q, say, hook)

        for death, lines in itertools.chain(self.kills(live), self.copies(live)):
            paths = [f"{self.path}{'+' * number}" for number in range(len(self.PUSHES))]
            for path in paths[1:] if os.path.exists(self.path) else ():
                copy_tree(self.path, path)
            for path, pushes in zip(paths, self.PUSHES, strict=True):
                self.path = path
                q, said = FemtoQueue(path, "survivor", **settings), [*lines]
                if pushes:
                    Life(q, said.append, scenario.key).push("after")
                yield f"{death}, pushes: {pushes}", q, said

    def kills(self, live: Living) -> Iterator[tuple[str, list[str]]]:
        """Kill processes at every fifth change; the last one lives to its end."""
        for number in itertools.count(next(self.first_kill), self.KILL_EVERY):
            self.new_path(number)
            step = Step(number, lambda: os.kill(os.getpid(), signal.SIGKILL), may_change)

            def work(child: Child, step: Step = step) -> None:
                live(step, child.say)

            said, status = self.child(work).finish()
            yield f"killed at change {number}", said
            if status == 0:
                self.assertGreater(number, 2)
                return
            self.assertEqual(status, -signal.SIGKILL)

    def copies(self, live: Living) -> Iterator[tuple[str, list[str]]]:
        """Copy the directory before each call, and at the end, if it or what was said changed."""
        self.new_path(0)
        original, said = self.path, list[str]()
        said_before: list[list[str]] = []
        changed = [True]  # since the last copy

        def copy(name: str, args: tuple[Any, ...]) -> None:
            if changed[0] or said != said_before[-1]:
                if os.path.exists(original):
                    copy_tree(original, f"{original}.{len(said_before)}")
                said_before.append([*said])
            changed[0] = may_change(name, args)

        live(copy, said.append)
        copy("", ())
        self.assertGreater(len(said_before), 2)
        for number, lines in enumerate(said_before):
            self.path = f"{original}.{number}"
            yield f"copied before change {number}", lines

    def failing_steps(self, turn: int) -> Iterator[Step]:
        """Yield hooks that let each call have its n-th error, or one for each of PUSHES."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            is_counted = self.counts is None or self.counts(name, args)
            return is_counted and (turn < len(self.PUSHES) or turn < len(errors_of(name, args)))

        for step in Step.each(counts=counts, at_least=1 - bool(turn)):
            step.happen = lambda step=step: fail_with(self.code_of(step, turn))  # type: ignore[misc]
            yield step

    def code_of(self, step: Step, turn: int) -> int:
        codes = errors_of(step.at, step.args)
        return codes[turn % len(codes)]

    def errors(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """The object works on. What raised is taken back, and leaves nothing in creating/."""
        for turn in range(self.ERRORS):
            for step in self.failing_steps(turn):
                q, said = self.born(step.number, settings)
                try:
                    scenario(q, said.append, step)
                    is_chore = scenario.key is not None  # raised when there is nothing else to do
                    self.assertTrue(is_chore or step.at not in ("fsync", "syncfs"), step.args)
                except OSError as error:
                    self.assertEqual(error.errno, self.code_of(step, turn))
                    said[-1:] = [it.replace("try push", "raised push") for it in said[-1:]]
                self.assertTrue(step.at == "unlink" or not self.names("creating"), step.args)
                pushes = self.PUSHES[(step.number + turn) % len(self.PUSHES)]
                if pushes:
                    Life(q, said.append, scenario.key).push("after")
                self.now.advance(60)
                yield f"error {turn} of call {step.number} {step.at}, pushes: {pushes}", q, said

    def unnoticed(
        self, steps: Callable[[], Iterator[Step]], scenario: Scenario, settings: dict[str, Any]
    ) -> Iterator[Ending]:
        """With each of these steps, a life goes on as without one."""
        wanted: list[Any] = []
        for step in itertools.chain([Step(-1)], steps()):
            q, said = self.born(step.number, settings)
            scenario(q, said.append, step)
            tasks = itertools.chain(*map(q.tasks, femtoqueue.STATES))
            found: list[Any] = [(it.state, it.data, it.attempts, it.key, it.error) for it in tasks]
            found += [it for it in said if not it.startswith("got ")]
            wanted = wanted or found
            self.assertEqual(found, wanted, step.args)
            self.now.advance(60)
            yield f"call {step.number} {step.at}", q, said

    def intruders(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """After each call another worker takes what is next, and finishes it: in turn soon, and so
        late that the leases are over. Not while a key is locked: here it would wait for ever."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            return meets_names(name, args) and self.is_free("k")

        for step in Meanwhile.each(counts=counts, at_least=1):
            q, said = self.born(step.number, settings)
            other, finished = FemtoQueue(self.path, "intruder", **settings), list[str]()
            self.assertIsNone(other.pop())
            late_s = (0.5, 31)[step.number % 2]
            step.happen = functools.partial(self.finish_one, other, said, finished, late_s)
            with contextlib.suppress(AssertionError, LeaseLost):  # there was no other task
                scenario(q, said.append, step)
            other.close()
            self.now.advance(60)
            yield f"{late_s} s after {step.number} {step.at}", q, said + finished

    def finish_one(
        self, q: FemtoQueue, said: list[str], finished: list[str], late_s: float
    ) -> None:
        self.now.advance(late_s)  # it moves what is due, and reclaims what a dead one had
        if (task := q.pop()) is not None:
            said.append(f"took {task.data.decode()}")
            q.done(task)
            finished.append(f"done {task.data.decode()}")

    def moved_by_hand(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """After each call a person gives back what is in flight, by `mv inflight-X/* pending/`, or
        gives all the names of their pushes, by `mv */*ID pending/ID`. Nothing can be done about one
        who comes between the last look at a lease and the rename over it."""

        def counts(name: str, args: tuple[Any, ...]) -> bool:
            return meets_names(name, args) and (name != "lstat" or "/inflight-" not in args[0])

        for step in Meanwhile.each(counts=counts, at_least=1):
            q, said = self.born(step.number, settings)
            step.happen = functools.partial(self.move_by_hand, is_bare=step.number % 2 == 1)
            with contextlib.suppress(LeaseLost, AssertionError):
                scenario(q, said.append, step)
            q.close()
            self.now.advance(60)
            yield f"moved after {step.number} {step.at}", q, said

    def move_by_hand(self, is_bare: bool) -> None:
        for directory in os.listdir(self.path):
            for name in self.names(directory) if directory[:3] in ("inf", "pen") else ():
                target = self.file("pending", name[-29:] if is_bare else name)
                os.rename(self.file(directory, name), target)

    def ctrl_c(self, scenario: Scenario, settings: dict[str, Any]) -> Iterator[Ending]:
        """Before each call, and after each that took effect. What pop() did not return is no lease
        then, and was no delivery; and no lock is held: that of the lease directory not even while
        the exception is kept, with all the frames that it came through."""
        for kind, counts in ((Step, self.counts), (Meanwhile, self.counts or takes_effect)):
            for step in kind.each(interrupt, counts, at_least=1):
                q, said = self.born(step.number, {"timeout_stale_ms": None, **settings})
                kept: BaseException | None = None
                try:
                    scenario(q, said.append, step)
                except KeyboardInterrupt as error:
                    kept = error
                for task in (*q.tasks("pending", data=False), *q.tasks("inflight", data=False)):
                    self.assertLessEqual(task.attempts or 0, said.count(f"got {task.id}"), step.at)
                q.close()
                if os.path.exists(lease_dir(q)):
                    self.check_unlocked(lease_dir(q))
                del kept
                gc.collect(1)  # its frames
                self.assertTrue(self.is_free("k"), step.at)
                self.now.advance(1)
                yield f"Ctrl-C at {kind.__name__} {step.number} {step.at}", q, said


class PlainLives(Interrupted):
    lives = (
        *((scenario, {}) for scenario in SCENARIOS),
        (Scenario("push a, push b, take | done, take, done"), {"keep_done": False}),
        *((it, {"sync_after_write": True}) for it in (FINISHING, FAILING, BATCH)),
    )

    def payloads(self, q: FemtoQueue, *states: str) -> list[str]:
        return sorted(task.data.decode() for state in states for task in q.tasks(state))

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """What is acknowledged is as it was acknowledged; the rest is whole or not there. What is
        not finished is delivered, once, and nothing that is finished is."""
        self.check_invariants(leftovers=True)
        last = {name: word for word, _, name in (line.rpartition(" ") for line in said)}
        waiting = self.payloads(q, "pending", "scheduled", "inflight")
        failed = self.payloads(q, "failed")
        done = self.payloads(q, "done") if q.keep_done else those("done", said)
        present = waiting + failed + done
        self.assertEqual(len(present), len({*present}))
        where = {"push": waiting, "took": waiting, "retry": waiting, "done": done, "fail": failed}
        for name, word in last.items():
            self.assertIn(name, where.get(word, [name]), said)
        self.assertEqual({*those("raised push", said)} & {*present}, set())
        drained = []
        while task := q.pop():
            drained.append(task.data.decode())
            q.done(task)
        self.assertEqual(sorted(drained), waiting)
        self.assertEqual(self.payloads(q, "inflight"), [])


class Crash(PlainLives):
    @FORK
    def test_a_kill_at_any_system_call_loses_and_doubles_nothing(self) -> None:
        self.check_all(self.deaths)

    def test_leftovers_of_a_killed_push_are_removed_after_an_hour(self) -> None:
        """And not before: the push may be under way. What is not ours stays."""
        q, clock = self.queue(), self.clock()
        old = f"{time.time_ns():020d}-0000aaaa"
        self.foreign = ("notes.txt", f"{1:020d}-0000bbbb")
        self.put(old, b"torn", "creating")
        self.put(self.foreign[0], b"", "creating")
        for name in (self.foreign[1], f"{old}.pending"):
            os.mkdir(self.file("creating", name))
        q.pop()
        self.assertIn(old, self.names("creating"))
        clock.advance(3700)
        q.pop()
        self.assertEqual(self.names("creating"), sorted(self.foreign))


class Faults(PlainLives):
    def test_the_file_system_is_that_of_the_place_where_the_queue_is_made(self) -> None:
        """Not of the one that the kernel finds by a ".." behind a symbolic link."""
        os.makedirs(self.file("far", "away"))
        os.symlink(self.file("far", "away"), self.file("link"))
        FemtoQueue(self.file("link", "..", "q"))
        self.assertTrue(os.path.isdir(self.file("q", "pending")))
        environment = mock.patch.dict(os.environ, FEMTOQUEUE_DIR=self.file("link", "..", "q"))
        with environment, contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(femtoqueue.main(["ls"]), 0)

    def test_an_error_of_any_system_call_surfaces_and_loses_nothing(self) -> None:
        self.check_all(self.errors)

    def test_ctrl_c_at_any_system_call_loses_and_doubles_nothing(self) -> None:
        self.check_all(self.ctrl_c)

    def test_another_worker_after_any_system_call_makes_no_task_lost_or_done_twice(self) -> None:
        self.check_all(self.intruders)

    def test_an_error_of_any_system_call_of_a_constructor_is_none_of_the_next(self) -> None:
        """A file system that can't be told is not taken for a local one."""
        for turn in range(self.ERRORS):
            for step in self.failing_steps(turn):
                self.new_path(step.number)
                with hooked(step), contextlib.suppress(OSError):
                    FemtoQueue(self.path, "n1", sync_after_write=True)
                    self.assertNotEqual(step.at, "statfs")
                ident = self.queue().push(b"x")
                self.assertEqual(_taken(self.queue("n2")).id, ident, step.at)
                self.check_invariants(leftovers=step.at == "unlink")

    def test_a_worker_starts_on_a_full_disk(self) -> None:
        """In the directory that was spared for it; the next one, when that is made again."""
        q = self.queue()
        q.push_many([b"1", b"2"])

        def full(name: str, args: tuple[Any, ...]) -> None:
            if name == "mkdir" and not os.path.exists(args[0]):
                fail_with(errno.ENOSPC)

        with hooked(full):
            self.assertEqual(self.drain(self.queue("n2")), [b"1", b"2"])
            q.push(b"3")
            with self.assertRaisesRegex(OSError, "No space"):
                self.queue("n3").pop()
        self.assertEqual(self.drain(self.queue("n3")), [b"3"])
        self.put("notes.txt", b"", "spare")
        with hooked(full):
            self.assertRaises(OSError, self.queue("n4").pop)
        self.assertEqual(self.names("spare"), ["notes.txt"])

    def test_a_task_that_can_not_be_read_waits_again_at_once(self) -> None:
        """After a shortage of this process the task is the next again, uncounted. A task that makes
        trouble itself is at the back, counted, and its error surfaces when nothing else waits."""
        for event, error, is_next, attempts in (
            ("open", OSError(errno.EMFILE, "no descriptors"), True, 1),
            ("open", OSError(errno.EACCES, "not ours"), False, 3),
            ("read", MemoryError(), False, 3),
            ("open", TimeoutError("raised by a signal handler"), True, 1),
        ):
            q, other = self.anew(), self.queue("n2")
            ident = q.push_many([b"large" * 10_000, b"small"])[0]

            def refuse(name: str, args: tuple[Any, ...], row: Any = (event, error, ident)) -> None:
                is_it = args[1] > 10_000 if name == "read" else str(args[0]).endswith(row[2])
                if name == row[0] and is_it:
                    raise row[1]

            with self.subTest(error=error), hooked(refuse):
                self.assertRaises(type(error), q.pop)
                self.assertEqual(self.states(), {"pending": 2})
                if not is_next:
                    self.assertEqual(self.pop(other).data, b"small")
                    self.assertRaises(type(error), other.pop)
            task = self.pop(other)
            self.assertEqual((task.id, task.attempts), (ident, attempts))

    def test_what_a_signal_handler_raises_in_a_job_is_not_taken_for_disk_trouble(self) -> None:
        """TimeoutError is an OSError; one that the system raises has an errno. It is raised at
        once, though the job has met disk trouble before."""
        ident, rung = self.queue().push(b"x"), set[str]()
        for name in ("inflight-n2", "inflight-n3"):
            os.mkdir(self.file(name))
        for event, part in (("list", "scheduled"), ("open", "inflight-n3"), ("close", "")):

            def ring(name: str, args: tuple[Any, ...], row: Any = (event, part)) -> None:
                if name == "open" and str(args[0]).endswith("inflight-n2"):
                    fail_with(errno.EIO)
                if name == row[0] and str(args[0]).endswith(row[1]) and name not in rung:
                    rung.add(name)
                    raise TimeoutError("raised by a signal handler")

            q = self.queue(event)
            with self.subTest(event), hooked(ring):
                self.assertRaisesRegex(TimeoutError, "signal handler", q.pop)
            task = self.pop(q)
            self.assertEqual((task.id, task.attempts), (ident, 1))
            q.release(task, counted=False)

    def test_a_claim_that_can_be_neither_read_nor_undone_is_put_back_later(self) -> None:
        """Uncounted. No descriptor is left: a key's lock takes one, too; and pending/ is full."""
        q, clock = self.queue(timeout_stale_ms=None, max_attempts=1), self.clock()
        self.assertIsNone(q.pop())  # its directory is open from now on
        q.push(b"x", key="k")

        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and re.search("/locks/|/inflight-n1/", str(args[0])):
                fail_with(errno.EMFILE)
            if name == "move" and "/pending/" in str(args[1]):
                fail_with(errno.ENOSPC)

        with hooked(refuse):
            for _ in range(3):
                self.assertRaises(OSError, q.pop)
                clock.advance(1)
            self.assertEqual(self.states(), {"inflight-n1": 1})
        self.assertEqual(self.pop(q).attempts, 1)

    def test_a_chore_that_hung_once_is_not_put_off_for_long(self) -> None:
        """Twenty times what it cost, but not of an hour."""
        longest_s, q, clock = constant("longest pause"), self.queue(), self.clock()
        self.hasten("longest pause", longest_s)  # as it is
        with hooked(at_call("list", "scheduled", lambda: clock.advance(3600))):
            q.pop()
        self.queue("n2").schedule(b"x", 1)
        clock.advance(19)
        self.assertIsNone(q.pop())
        clock.advance(2)
        self.assertEqual(self.pop(q).data, b"x")

    def test_dead_letters_that_find_no_room_are_no_obstacle(self) -> None:
        """Without its reason; and if failed/ takes nothing at all, from the back of the queue."""
        for refused in ("creating/", "failed/"):
            q = self.anew()
            self.put(q.push(b"corrupt"), b"rubbish")
            worn = q.push(b"worn out")
            os.rename(self.file("pending", worn), self.file("pending", f"{1:020d}~5~{worn}"))
            q.push(b"good")
            full = at_call("open move", refused, raising(errno.ENOSPC))
            got: list[FemtoTask | None] = []
            for number in range(4):
                worker = self.queue(f"w{number}", max_attempts=5)
                with hooked(full), contextlib.suppress(OSError):
                    got.append(worker.pop())
                worker.close()
            self.assertIn(b"good", [task and task.data for task in got])

    def test_a_task_that_is_taken_while_it_can_not_be_set_aside_is_no_error_of_its_own(
        self,
    ) -> None:
        """What surfaces is the full disk; and if there is room, nothing."""
        q, aside = self.queue(), self.file("aside")
        for code, ends in (
            (errno.ENOSPC, self.assertRaisesRegex(OSError, os.strerror(errno.ENOSPC))),
            (errno.ENOENT, contextlib.nullcontext()),
        ):
            ident = self.put(f"{1:020d}-00000000", b"rubbish")[-29:]

            def take(code: int = code) -> None:
                for lease in self.names("inflight-n1"):
                    os.rename(self.file("inflight-n1", lease), aside)
                fail_with(code)

            with hooked(at_call("move", f"/failed/{ident}", take)), ends:
                self.assertIsNone(q.pop())
            self.assertEqual((self.states(), os.path.exists(aside)), ({}, True))

    def test_after_a_reboot_a_worker_starts_with_what_it_can_read_and_write(self) -> None:
        """On a full disk, or one that may only be read, it looks, and purges. Of a directory that
        is another user's, say, its clock knows nothing."""
        q = self.queue()
        q.done(leased(q))
        ident = q.push(b"x")
        os.mkdir(self.file("inflight-others"))
        with on_boot("the next boot"):
            with hooked(at_call("open", ".clock", raising(errno.EROFS))):
                other = self.queue("n2")
                self.assertEqual((other.stats().done, other.purge(0)), (1, 1))
            self.clock().wall_shift_s = -1e8
            with hooked(at_call("list", "others", raising(errno.EACCES))):
                self.assertGreater(self.queue("n3").push(b"y"), ident)

    def test_a_new_queue_is_its_users_alone_but_its_clock_whatever_the_umask(self) -> None:
        for umask in (0o022, 0o077):
            self.addCleanup(os.umask, os.umask(umask))
            self.path = os.path.join(self.base, f"{umask}")
            self.queue()
            paths = ".", f"clock-{self.boot()}"
            modes = [stat.S_IMODE(os.stat(self.file(it)).st_mode) for it in paths]
            self.assertEqual(modes, [0o700, 0o644])

    def test_a_directory_that_is_gone_is_disk_trouble(self) -> None:
        """Told by its name, however often; it is not made again in secret, nor is a lease lost by
        it. Old objects use it when it is back."""
        q, clock = self.queue(), self.clock()
        task = leased(q, b"1")
        q.push(b"2", key="waits")
        calls: tuple[tuple[str, Callable[[], object]], ...] = (
            (".", lambda: q.push(b"3")),
            (".", q.pop),
            (".", lambda: q.done(task)),
            ("done", lambda: q.done(task)),
            ("pending", lambda: q.push(b"3")),
            ("scheduled", lambda: q.schedule(b"3", (clock.time() + 99) * 1e6, key="waits")),
        )
        for directory, call in calls:
            path, away = os.path.normpath(self.file(directory)), f"{self.path}.away"
            os.rename(path, away)
            with self.subTest(directory):
                for _ in range(10):
                    with self.assertRaises(FileNotFoundError) as caught:
                        call()
                    self.assertIn(path, caught.exception.filename)
                    clock.advance(0.5)
                self.assertFalse(os.path.exists(path))
            os.rename(away, path)
        q.extend(task)
        q.done(task)
        self.assertEqual((self.drain(q), self.names("creating")), ([b"2"], []))

    def test_a_constructor_that_meets_a_file_or_a_dangling_link_makes_nothing(self) -> None:
        """It says so. (Durability has links to directories.)"""
        occupied, dangling = self.put("occupied", b"", ""), self.file("none")
        os.symlink("nowhere", dangling)
        for error, path in (
            (NotADirectoryError, occupied),
            (NotADirectoryError, os.path.join(occupied, "below")),
            (FileNotFoundError, dangling),
        ):
            self.assertRaises(error, FemtoQueue, path)


class KeyedInterrupted(Interrupted):
    """There is the old payload or the new one, never both; what was pushed last comes last."""

    ERRORS = 2
    PUSHES = (False, True)  # what the dead one noted down is all that a push has
    lives = tuple((scenario, {}) for scenario in KEY_SCENARIOS)

    def check(self, q: FemtoQueue, said: list[str]) -> None:
        """By its end: q pops all there is, what was behind a task, too, and not only at
        the next round of housekeeping; and what it may be follows from what was said."""
        self.check_invariants(leftovers=True)
        states = ("pending", "scheduled", "inflight")
        self.assertLessEqual(sum(len([*q.tasks(state)]) for state in states), 1)
        self.assertLessEqual(q.stats().buffered, 1)
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
        self.assertTrue(those("try fail", said) or q.stats().failed == 0, "a second task")
        taken, retried = those("took", said), those("retry", said)
        self.assertTrue(retried or taken == sorted(taken), said)
        [newest], tried = those("push", said)[-1:] or ["nothing"], those("try push", said)[-1:]
        allowed = {newest, *tried, *retried}
        if newest in those("done", said):
            allowed = {"nothing", *tried, *retried} - {newest}
        elif said and said[-1] == f"try done {newest}":
            allowed.add("nothing")
        elif not delivered and q.retry_failed():
            delivered.append(_taken(q).data.decode())
            q.close()
            q.done(_taken(q))
        self.assertIn(delivered[-1] if delivered else "nothing", allowed, said)
        if os.path.exists(self.file("keys")):
            self.now.advance(601)  # until what an error left there is looked for
            self.assertIsNone(q.pop())
            self.assertEqual(self.names("keys"), [])

    @FORK
    def test_a_kill_at_any_system_call(self) -> None:
        self.check_all(self.deaths, sync_after_write=True)

    def test_an_error_of_any_system_call(self) -> None:
        self.check_all(self.errors, sync_after_write=True)

    def test_ctrl_c_at_any_system_call(self) -> None:
        self.check_all(self.ctrl_c)

    def test_another_worker_after_any_system_call(self) -> None:
        self.check_all(self.intruders)

    def test_a_person_who_moves_what_is_in_flight_makes_no_second_task(self) -> None:
        self.check_all(self.moved_by_hand)


class KeyedInterruptedByRename(KeyedInterrupted):
    """The same where names can't be exchanged, at each call that changes something."""

    counts = staticmethod(may_change)
    exchanges = False


class InterruptedOnSharedFileSystem(PlainLives):
    counts = staticmethod(may_change)
    fs_type = NFS

    @FORK
    def test_a_kill_at_any_system_call(self) -> None:
        self.check_all(self.deaths)

    def test_an_error_of_any_system_call(self) -> None:
        self.check_all(self.errors)

    def test_what_another_host_has_replaced_is_looked_for_again(self) -> None:
        self.patched(on_file_system(FUSE))
        steps = functools.partial(Astray.each, counts=is_look, at_least=0)
        self.check_all(functools.partial(self.unnoticed, steps), sync_after_write=False)

    def test_what_a_server_has_done_and_denies_has_been_done(self) -> None:
        """A rename, or an unlink."""
        self.patched(without_exchange())  # as there
        steps = functools.partial(
            Meanwhile.each, raising(errno.ENOENT), lambda name, _: name in ("move", "unlink"), 1
        )
        for keep_done in (True, False):
            self.check_all(functools.partial(self.unnoticed, steps), keep_done=keep_done)


class KeyedInterruptedOnSharedFileSystem(KeyedInterrupted, InterruptedOnSharedFileSystem):
    """The same where other hosts may write."""


# Random lives against a model in memory


def demand(holds: object, why: str) -> None:
    if not holds:
        raise AssertionError(why)


@dataclasses.dataclass
class Known:
    """A task as the model has it. `at_ns` is what its name begins with, whatever the state: its
    place, due time or deadline; the order of its id in done/ and failed/."""

    id: str
    data: bytes = dataclasses.field(repr=False)
    key: str | None
    state: str  # one of STATES; "keys": a newer payload behind a task in flight
    at_ns: int
    attempts: int = 0
    node: str = ""
    boot: int = 0
    held_by: FemtoTask | None = None
    behind: Known | None = None
    due_ns: int | None = None  # of a newer payload in keys/
    step: int = 0  # of its coming where it is
    since_ns: int = 0
    by: int = 0  # the worker who put it there
    told: set[int] = dataclasses.field(default_factory=set)  # workers who need no listing for it
    ready_ns: int | None = None  # since when any pop() should bring it back
    is_bare: bool = True  # its name is its id

    @property
    def seen(self) -> FemtoTask:
        """What looking at it gives: while it waits, the newest payload."""
        ended = self.state in ("done", "failed") and self.is_bare
        data = self.data
        if self.behind is not None and self.state in ("pending", "scheduled"):
            data = self.behind.data
        return FemtoTask(self.id, data, None if ended else self.attempts, self.key)

    @property
    def directory(self) -> str:
        return f"inflight-{self.node}" if self.state == "inflight" else self.state

    @property
    def order_ns(self) -> int:
        return int(self.id[:20])

    @property
    def is_new(self) -> bool:
        """Whether its name is its id, which comes before another name of that instant."""
        return (self.at_ns, self.attempts) == (self.order_ns, 0)


Place = tuple[str, int, int, bool]  # directory, number in front, attempts, whether it is an id


class Twin:
    """A queue in memory: what has to be in the directory after each operation.

    What pop() does besides (due tasks, ended leases, those delivered too often) may be late by a
    quarter of a second, so it is told from the directory, and must be allowed.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tasks: dict[str, Known] = {}
        self.reasons: set[str] = set()
        self.saved: dict[str, tuple[bytes, bytes]] = {}  # checkpoints: of which payload, and it
        self.entered: dict[tuple[int, int, str], int] = {}  # each name's first step in pending/
        self.places: Counter[str] = Counter()  # by node: how many living objects are in it
        self.step = self.worker = self.boot = self.looked_ns = 0
        self.pushing = False
        self.start_clock()

    def start_clock(self) -> None:
        newest_ns = max((task.order_ns for task in self.tasks.values()), default=0)
        self.anchor_ns = max(self.clock.wall_ns(), newest_ns + 1) - self.clock.steady_ns()
        self.looked_ns = self.now_ns()

    def now_ns(self) -> int:
        return self.clock.steady_ns() + self.anchor_ns

    def of_key(self, key: str | None) -> Known | None:
        live = ("pending", "scheduled", "inflight")
        same = (task for task in self.tasks.values() if task.key == key and task.state in live)
        return None if key is None else next(same, None)

    def of_lease(self, lease: FemtoTask) -> Known | None:
        task = self.tasks.get(lease.id)
        return task if task and task.state == "inflight" and task.held_by is lease else None

    def those(self, *states: str) -> list[Known]:
        """Return the tasks of these states in the order of their names. Not of their directories:
        the node_ids that are drawn must not make a seed another one."""
        known = [task for task in self.tasks.values() if task.state in states]
        return sorted(known, key=lambda it: (it.at_ns, not it.is_new, it.attempts, it.id))

    # Moves

    def move(self, task: Known, state: str, at_ns: int) -> None:
        task.state, task.at_ns, task.held_by, task.ready_ns = state, at_ns, None, None
        task.step, task.since_ns, task.by = self.step, self.now_ns(), self.worker
        task.told = set() if self.pushing else {self.worker}
        if state in ("done", "failed"):
            task.attempts = 0
        task.is_bare = state in ("done", "failed")
        if state == "pending":
            self.entered.setdefault((at_ns, task.attempts, task.id), self.step)

    def add(self, ident: str, data: bytes, key: str | None, due_ns: int | None) -> None:
        demand(ident not in self.tasks, "an id was given twice")
        task = self.tasks[ident] = Known(ident, data, key, "", 0)
        late_ns = task.order_ns - self.now_ns()
        demand(0 <= late_ns < 10_000, f"an id's order is {late_ns} ns from its push")
        self.join(task, due_ns)

    def join(self, task: Known, due_ns: int | None) -> None:
        if due_ns is None:
            self.move(task, "pending", task.order_ns)
        else:
            self.move(task, "scheduled", due_ns)

    def replace(self, task: Known, data: bytes, due_ns: int | None) -> None:
        """A push for a key that waits. Without a new time its place is kept."""
        if not task.is_bare:
            self.saved.pop(task.id, None)
        task.attempts = 0
        if task.behind is None:
            task.data = data
        else:
            self.put_behind(task, task.behind.id, data, due_ns)
        if due_ns is not None:
            self.move(task, "scheduled", due_ns)
        else:
            self.entered.setdefault((task.at_ns, 0, task.id), self.step)
            task.told = task.told | {self.worker}

    def listed_step(self, task: Known) -> int:
        """Return the first step of which a listing may have given this name of a task. A new
        payload keeps the place and begins anew, so its name is tried by workers too who listed one
        that counts deliveries."""
        is_new = task.key is not None and not task.attempts
        steps = [
            step
            for (at_ns, attempts, ident), step in self.entered.items()
            if (at_ns, ident) == (task.at_ns, task.id) and (is_new or attempts == task.attempts)
        ]
        return min(steps, default=0)

    def put_behind(self, task: Known, ident: str, data: bytes, due_ns: int | None) -> None:
        newer = task.behind
        if newer is None:
            newer = Known(ident, data, task.key, "", 0)
            demand(ident not in self.tasks, "an id was given twice")
            self.tasks[ident] = task.behind = newer
        demand(newer.id == ident, "there are two payloads behind one task")
        newer.data, newer.due_ns = data, due_ns
        self.move(newer, "keys", newer.order_ns if due_ns is None else due_ns)

    def lease(self, task: Known, lease: FemtoTask, node: str, lasts_ns: int) -> None:
        expected = FemtoTask(task.id, task.data, task.attempts + 1, task.key)
        demand(lease == expected, f"delivered was {lease}, not {expected}")
        if not task.is_bare:
            of_data, saved = self.saved.get(task.id, (b"", None))
            demand(lease.checkpoint == (saved if of_data == task.data else None), f"not {saved!r}")
            if of_data != task.data:
                self.saved.pop(task.id, None)
        task.attempts += 1
        self.move(task, "inflight", self.now_ns() + lasts_ns)
        task.held_by, task.node, task.boot = lease, node, self.boot

    def end(self, task: Known, state: str, reason: bool = False) -> None:
        newer, task.behind = task.behind, None
        self.move(task, state, task.order_ns)
        if state == "failed":
            (self.reasons.add if reason else self.reasons.discard)(task.id)
        if state == "gone":
            del self.tasks[task.id]
        if newer is not None:
            self.join(newer, newer.due_ns)

    def come_back(self, task: Known, state: str, at_ns: int) -> None:
        """Release and reclaim, and what comes due. The newer payload behind a task stays there;
        its time, if that is later, is the task's from now on."""
        if task.behind is not None:
            task.attempts = 0
            if self.is_later(task.behind):
                state, at_ns = "scheduled", task.behind.at_ns
        self.move(task, state, at_ns)

    def is_later(self, newer: Known) -> bool:
        return newer.due_ns is not None and newer.due_ns > self.clock.wall_ns()

    def take_along(self, task: Known) -> None:
        """A claim: the newer payload behind a task is delivered, or is for later."""
        newer, task.behind = task.behind, None
        if newer is None:
            return
        del self.tasks[newer.id]
        self.saved.pop(task.id, None)
        task.data, task.attempts = newer.data, 0
        if newer.due_ns is not None and self.is_later(newer):
            self.move(task, "scheduled", newer.due_ns)

    def vacate(self, node: str) -> None:
        """The last of a node's objects closed, or the first one came: its leases end."""
        for task in self.those("inflight"):
            if task.node == node and not self.places[node]:
                self.come_back(task, "pending", task.order_ns)

    # What pop() does besides

    def is_over(self, task: Known) -> bool:
        """Whether a lease may be ended by anybody."""
        dead = task.boot == self.boot and not self.places[task.node]
        return dead or task.at_ns <= self.now_ns()

    def see_time_pass(self) -> None:
        """Note since when what is to come back is ready to."""
        now_ns, before_ns = self.now_ns(), self.looked_ns
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

    def go_on(self, task: Known, max_attempts: int | None) -> bool:
        """Do with a task what a pop() may do besides; say whether there was anything."""
        if task.state == "scheduled" and task.at_ns <= self.clock.wall_ns():
            self.come_back(task, "pending", self.now_ns())
        elif task.state == "inflight" and self.is_over(task):
            self.come_back(task, "pending", task.order_ns)
        elif task.state == "pending" and max_attempts and task.attempts >= max_attempts:
            self.saved.pop(task.id, None)
            self.end(task, "failed", True)
        elif task.state == "pending" and task.behind is not None and self.is_later(task.behind):
            self.take_along(task)
        else:
            return False
        return True

    def catch_up(self, found: dict[str, Place], max_attempts: int | None) -> None:
        """Let the model go on where the directory shows that the queue did."""
        woken: list[tuple[int, str]] = []
        for task in self.those("inflight", "pending", "scheduled"):
            due = task.state == "scheduled" and task.step < self.step
            if due and found.get(task.id, ("",))[0] == "pending":
                woken.append((found[task.id][1], task.id))
            while found.get(task.id, ("gone",))[0] != task.directory:
                if not self.go_on(task, max_attempts):
                    break
        demand(woken == sorted(woken), "what came due did not join in the order of its due times")

    def compare(self, found: dict[str, Place], reasons: set[str]) -> None:
        """Each task has to stand where the model has it. Places drawn in this step are learnt."""
        for task in self.tasks.values():
            there = found.get(task.id)
            placed_now = task.step == self.step and task.state == "pending"
            if placed_now and there is not None and 0 < there[1] - task.at_ns < 10_000:
                task.at_ns = there[1]
                self.entered.setdefault((task.at_ns, task.attempts, task.id), self.step)
            should = (task.directory, task.at_ns, task.attempts)
            if there is None or there[:3] != should:
                raise AssertionError(f"{task.id} is {there} on disk, and should be {should}")
            task.is_bare = there[3]
        demand(len(found) == len(self.tasks), f"too many: {found.keys() - self.tasks.keys()}")
        demand(reasons == self.reasons, f"reasons of {reasons}, and should be of {self.reasons}")

    def compare_checkpoints(self, found: set[str]) -> None:
        """What has no task that is alive may be gone: it is old, by the clock on the wall."""
        live = {task.id for task in self.those("pending", "scheduled", "inflight")}
        self.saved = {it: saved for it, saved in self.saved.items() if it in found | live}
        demand(found == self.saved.keys(), f"checkpoints of {found}, not of {[*self.saved]}")


Pushed = tuple[str, bytes, "str | None", "int | None"]  # id, payload, key, due time


@dataclasses.dataclass
class Held:
    task: FemtoTask
    end_ns: int
    lasts_ns: int  # what extend() makes it last again, whoever calls it


@dataclasses.dataclass
class Worker:
    q: FemtoQueue
    number: int
    given_node: str | None
    lock_fd: int | None = None  # by which it holds its lease directory

    @property
    def lasts_ns(self) -> int:
        ms = self.q.timeout_stale_ms
        return FOREVER_NS if ms is None else int(ms * 1e6)

    @property
    def in_place(self) -> bool:
        return self.lock_fd is not None


class Fuzz:
    """Random operations of several objects on one queue. After each of them, the directory and
    what was returned have to be as in the model."""

    KEYS = ("a", "b", "größe %/\n", "plumless", "buckeroo")  # the last two have one hash
    NODES = ("a", "b", "b", "c", None)

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.seed, self.chance = path, seed, random.Random(seed)
        self.clock = Clock(2e9, 1000)
        self.model = Twin(self.clock)
        self.said: deque[str] = deque(maxlen=12)
        self.held: list[Held] = []
        self.paths: dict[str, str] = {}  # of the tasks, when they were looked at last
        self.paused_ns: int | None = None
        self.date_set_ns = 0  # when the date was set last
        self.shared_fd: int | None = None  # the last one that was locked as a lease directory
        self.while_running = contextlib.ExitStack()
        self.numbers = itertools.count(1)
        self.settings: dict[str, Any] = {
            "timeout_stale_ms": self.chance.choice((30_000, 30_000, 700, None)),
            "max_attempts": self.chance.choice((None, None, 1, 3)),
            "sync_after_write": path.startswith("/dev/shm/") and self.chance.random() < 0.1,
        }
        self.ops = [
            *[self.push] * 28 + [self.push_many] * 4 + [self.pop] * 48 + [self.take] * 12,
            *[self.settle] * 48 + [self.wait] * 16 + [self.retry] * 8,
            *[self.look_at_stats, self.look_at_tasks, self.look_at_one] * 4,
            *[self.close, self.reopen, self.kill, self.set_date, self.by_hand, self.pause] * 4,
            *[self.reboot, self.retry_failed, self.purge, self.purge],
        ]

    def run(self, steps: int) -> None:
        """Raise AssertionError, with the seed and the last operations, where they differ."""
        with self.while_running:
            self.while_running.enter_context(mock.patch.object(femtoqueue, "time", self.clock))
            self.while_running.enter_context(mock.patch("fcntl.flock", self.note_locks()))
            self.while_running.enter_context(on_boot("boot 0"))
            self.workers = [self.open(node) for node in self.NODES]
            try:
                for _ in range(steps):
                    w = self.chance.choice(self.workers)
                    self.do(self.chance.choice(self.ops), w)
                self.finish()
            except Exception as error:
                said = "\n  ".join(self.said)
                raise AssertionError(f"seed {self.seed}: {error!r} after:\n  {said}") from error
            finally:
                for w in self.workers:
                    w.q.close()

    def note_locks(self) -> Callable[[int, int], None]:
        """Return an flock() that notes a shared lock: a worker has its place from then on."""
        flock = fcntl.flock

        def call(fd: int, how: int) -> None:
            flock(fd, how)
            if how == fcntl.LOCK_SH:
                self.shared_fd = fd

        return call

    def do(self, op: Callable[[Worker], None], w: Worker) -> None:
        self.clock.advance(1e-5)  # longer than any step draws orders
        model = self.model
        model.step, model.worker, model.pushing = model.step + 1, w.number, False
        model.see_time_pass()
        self.said.append(f"{model.step} {op.__name__} by {w.number} ({w.q.node_id})")
        op(w)
        if op != self.wait:
            self.compare(w)

    def say(self, text: object) -> None:
        self.said[-1] += f": {text}"

    def open(self, node: str | None) -> Worker:
        settings = dict(self.settings)
        if self.chance.random() < 0.2:  # each object has its own
            settings["timeout_stale_ms"] = self.chance.choice((30_000, 700, None))
            settings["max_attempts"] = self.chance.choice((None, 2))
        settings["keep_done"] = self.chance.random() < 0.7
        return Worker(FemtoQueue(self.path, node, **settings), next(self.numbers), node)

    def payload(self) -> bytes:
        size = self.chance.choice((0, 3, 3, 50, 5000))
        return b"%d\n" % next(self.numbers) + b"x" * size

    # The directory

    def on_disk(self) -> tuple[dict[str, Place], set[str]]:
        """Return of each task its directory, the number in front of its name and its attempts;
        and of which tasks there is a reason."""
        found: dict[str, Place] = {}
        reasons = set()
        for directory in os.listdir(self.path):
            if directory.startswith(("clock-", "PAUSED", "checkpoints")):
                continue
            for name in os.listdir(f"{self.path}/{directory}"):
                if name.endswith(".error"):
                    reasons.add(name[:-6])
                elif len(name) > 8:
                    ident, parts = name[-29:], name.split("~")
                    demand(ident not in found, "a task stands in two places")
                    attempts = int(parts[1]) if len(parts) > 1 else 0
                    found[ident] = directory, int(parts[0][:20]), attempts, "~" not in name
                    self.paths[ident] = f"{self.path}/{directory}/{name}"
        return found, reasons

    def compare(self, w: Worker) -> None:
        found, reasons = self.on_disk()
        self.model.catch_up(found, w.q.max_attempts)
        self.model.compare(found, reasons)
        with contextlib.suppress(FileNotFoundError):
            self.model.compare_checkpoints({*os.listdir(f"{self.path}/checkpoints")})

    # Places

    def settle_in(self, w: Worker) -> None:
        """After a call that may have taken a place: what was left there is back first."""
        if self.shared_fd is None:
            return
        if not w.in_place:
            self.model.vacate(w.q.node_id)
            self.model.places[w.q.node_id] += 1
            found, _ = self.on_disk()
            for task in self.model.those("inflight"):  # who finds such looks at all leases
                if self.model.is_over(task) and found[task.id][0] != task.directory:
                    self.model.go_on(task, None)
        w.lock_fd, self.shared_fd = self.shared_fd, None

    def leave(self, w: Worker) -> None:
        if w.in_place:
            w.lock_fd = None
            self.model.places[w.q.node_id] -= 1
            self.model.vacate(w.q.node_id)

    def close(self, w: Worker) -> None:
        w.q.close()
        is_last = w.in_place and self.model.places[w.q.node_id] == 1
        is_there = os.path.exists(f"{self.path}/inflight-{w.q.node_id}")
        demand(not is_last or not is_there, "close() left its directory")
        self.leave(w)

    def reopen(self, w: Worker) -> None:
        """Another object in its place: made anew, or from a pickle while the old one lives."""
        new = self.open(self.chance.choice((w.q.node_id, w.given_node)))
        if self.chance.random() < 0.5:
            self.say("pickled")
            new.q = pickle.loads(pickle.dumps(w.q))
            names = *self.settings, "keep_done", "data_dir"
            is_same = all(getattr(new.q, it) == getattr(w.q, it) for it in names)
            demand(is_same, "a pickle lost a setting")
            is_same = new.q.node_id == w.q.node_id
            demand(is_same == (w.given_node is not None), f"its node is {new.q.node_id}")
            new.given_node = w.given_node
        self.workers[self.workers.index(w)] = new
        self.leave(w)
        w.q = new.q  # the old one is dropped, which closes it

    def kill(self, w: Worker) -> None:
        """As SIGKILL does: its lock goes, and nothing else happens."""
        if w.lock_fd is not None:
            nowhere = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nowhere, w.lock_fd, inheritable=False)
            os.close(nowhere)
            self.model.places[w.q.node_id] -= 1
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
        data, refused = self.payload(), False
        self.say(f"{data[:8]!r} {key!r} {policy} {due_ns}")
        more: dict[str, Any] = {} if key is None else {"key": key, "if_in_flight": policy}
        try:
            ident = w.q.push(data, **more) if due_us is None else w.q.schedule(data, due_us, **more)
        except KeyInFlight as error:
            ident, refused = error.id, error.key == key
        self.settle_in(w)
        self.pushed(self.model.of_key(key), (ident, data, key, due_ns), policy, refused)

    def pushed(self, task: Known | None, new: Pushed, policy: str, refused: bool) -> None:
        """Do in the model what a push did; `task` is the one that its key had."""
        ident, data, key, due_ns = new
        leased = task is not None and task.state == "inflight"
        demand(refused == (leased and policy == "reject"), f"refused: {refused}")
        if task is None:
            self.model.pushing = key is None  # of a keyed one, its object knows
            self.model.add(ident, data, key, due_ns)
        elif leased and (policy == "buffer" or (policy == "update" and task.behind)):
            self.model.put_behind(task, ident, data, due_ns)
        else:
            demand(ident == task.id, f"returned was {ident}, not {task.id}")
            if not leased:
                self.model.replace(task, data, due_ns)
            elif not refused:
                task.data = data

    def push_many(self, w: Worker) -> None:
        batch = [self.payload() for _ in range(self.chance.randrange(4))]
        ids = w.q.push_many(iter(batch))
        demand(ids == sorted(ids), "ids are not in the order of a batch")
        self.model.pushing = True
        for ident, data in zip(ids, batch, strict=True):
            self.model.add(ident, data, None, None)

    # Deliveries

    def pop(self, w: Worker) -> None:
        was = self.delivered(w, w.q.pop)
        if was is not None:
            self.check_order(w, was)
        elif self.paused_ns is None:
            demand(not self.model.those("pending"), "pop() overlooked what is pending")
            date_is_old = self.model.now_ns() - self.date_set_ns >= 0.41e9
            for task in self.model.those("scheduled") if date_is_old else ():
                due = task.by == w.number and task.at_ns <= self.clock.wall_ns()
                demand(not due, f"pop() overlooked {task}, which its object scheduled")

    def delivered(self, w: Worker, call: Callable[..., FemtoTask | None]) -> Known | None:
        """Lease in the model what is delivered, now and then for a length of its own; return it as
        it was before."""
        lease_ms = self.chance.choice((*[None] * 9, 90_000))
        lease = call(lease_ms=lease_ms)
        self.say(lease and lease.id)
        self.settle_in(w)
        was = None if lease is None else self.leased(w, lease, lease_ms)
        self.compare(w)
        self.check_chores(w)
        return was

    def leased(self, w: Worker, lease: FemtoTask, lease_ms: int | None) -> Known:
        task = self.model.tasks.get(lease.id)
        if task is None or task.state not in ("pending", "scheduled", "inflight"):
            raise AssertionError(f"{task} was delivered")
        while task.state != "pending" and self.model.go_on(task, w.q.max_attempts):
            pass
        demand(task.state == "pending", f"{task} was delivered")
        self.model.take_along(task)
        demand(task.attempts < (w.q.max_attempts or 10**9), "delivered too often")
        was = dataclasses.replace(task)  # its `told` is its own: move() makes a new one
        lasts_ns = lease_ms * 1_000_000 if lease_ms else w.lasts_ns
        self.model.lease(task, lease, w.q.node_id, lasts_ns)
        self.check_told(task, lease)
        self.held.append(Held(lease, task.at_ns, lasts_ns))
        return was

    def check_chores(self, w: Worker) -> None:
        """Each object looks for what is due, expired or of the dead 2.5 times a second."""
        for task in self.model.those("scheduled", "inflight"):
            ready_ns = self.model.now_ns() if task.ready_ns is None else task.ready_ns
            demand(self.model.now_ns() - ready_ns < 0.41e9, f"{task} was not brought back")

    def check_order(self, w: Worker, was: Known) -> None:
        """Nothing older waits, but what came after the listing that the batch is from: it is
        younger than a second, and has what was delivered in it (unless its object put it there)."""
        model = self.model
        if self.paused_ns is not None:
            demand(model.now_ns() - self.paused_ns < 1.01e9, "PAUSED, and delivered")
        listed = w.number not in was.told
        step = model.listed_step(was)
        for task in model.those("pending"):
            if task.at_ns >= was.at_ns:
                break
            known = listed and task.step <= step
            late = model.now_ns() - task.since_ns > 1.01e9
            demand(not known and not late, f"{was} was delivered before {task}")

    def take(self, w: Worker) -> None:
        key = self.chance.choice(self.KEYS)
        self.say(repr(key))
        was, task = self.delivered(w, functools.partial(w.q.take, key)), self.model.of_key(key)
        demand(was is None or was.key == key, "take() gave another key's task")
        demand(was is None or self.paused_ns is None, "PAUSED, and taken")
        if was is None and task is not None and self.paused_ns is None:
            due = task.state == "scheduled" and task.at_ns <= self.clock.wall_ns()
            demand(task.state != "pending" and not due, f"take() overlooked {task}")

    def settle(self, w: Worker) -> None:
        """End a delivery, or make it last longer, by whichever object; late ones must not."""
        if not self.held:
            return
        held = self.held[self.chance.randrange(-min(len(self.held), 8), 0)]
        ways = (self.done, self.done, self.fail, self.release, self.extend, self.checkpoint)
        way = self.chance.choice(ways)
        self.say(f"{way.__name__} {held.task.id}")
        task = self.model.of_lease(held.task)
        try:
            way(w, held, task)
        except LeaseLost as error:
            demand(task is None, f"the lease of {task} was lost before its time")
            demand(error.expired == (held.end_ns <= self.model.now_ns()), f"expired: {error}")
            if self.chance.random() < 0.7:
                self.held.remove(held)
        else:
            demand(task is not None, "a lease that was lost could be used")

    def done(self, w: Worker, held: Held, task: Known | None) -> None:
        w.q.done(held.task)
        self.ended(held, task, "done" if w.q.keep_done else "gone")

    def ended(self, held: Held, task: Known | None, state: str, reason: bool = False) -> None:
        if held.task.checkpoint is not None:  # and with it goes what was saved
            self.model.saved.pop(held.task.id, None)
        if task is not None:
            self.model.end(task, state, reason)

    def fail(self, w: Worker, held: Held, task: Known | None) -> None:
        reason = self.chance.choice((None, "why", ValueError("why")))
        w.q.fail(held.task, reason)
        self.ended(held, task, "failed", reason is not None)

    def release(self, w: Worker, held: Held, task: Known | None) -> None:
        front, delay_s = self.chance.choice(((False, 0), (True, 0), (False, 0.1), (False, 9.5)))
        w.q.release(held.task, front=front, delay_s=delay_s)
        if task is not None and delay_s:
            due_ns = self.clock.wall_ns() + int(delay_s * 1e9)
            self.model.come_back(task, "scheduled", due_ns)
        elif task is not None:
            at_ns = task.order_ns if front else self.model.now_ns()
            self.model.come_back(task, "pending", at_ns)

    def extend(self, w: Worker, held: Held, task: Known | None) -> None:
        ms = self.chance.choice((None, 1, 60_000))
        w.q.extend(held.task, ms)
        held.end_ns = self.model.now_ns() + (held.lasts_ns if ms is None else ms * 1_000_000)
        if task is not None:
            task.at_ns, task.ready_ns = held.end_ns, None

    def checkpoint(self, w: Worker, held: Held, task: Known | None) -> None:
        """Which renews the lease, too, and never shortens it."""
        w.q.checkpoint(held.task, saved := self.payload())
        demand(held.task.checkpoint == saved, "a holder sees another checkpoint")
        held.end_ns = max(held.end_ns, self.model.now_ns() + held.lasts_ns)
        if task is not None:
            self.model.saved[task.id] = held.task.data, saved
            task.at_ns, task.ready_ns = held.end_ns, None

    # Dead letters and housekeeping

    def retry(self, w: Worker) -> None:
        failed = self.model.those("failed")
        ident = self.chance.choice([task.id for task in failed] or ["0" * 20 + "-00000000"])
        task = self.model.tasks.get(ident)
        other = self.model.of_key(task.key) if task else None
        try:
            w.q.retry(ident)
        except TaskNotFound:
            demand(task is None, f"{task} was not found")
        except KeyInFlight as error:
            demand(other and error.id == other.id, f"{error}, but the key has {other}")
        else:
            demand(task and other is None, f"{task} retried; its key has {other}")
            self.retried(self.model.tasks[ident])

    def retried(self, task: Known) -> None:
        task.attempts = 0
        self.model.reasons.discard(task.id)
        self.model.move(task, "pending", self.model.now_ns())

    def retry_failed(self, w: Worker) -> None:
        free = []
        for task in self.model.those("failed"):
            if self.model.of_key(task.key) is None:
                self.retried(task)
                free.append(task.id)
        demand(w.q.retry_failed() == len(free), "retry_failed() said another number")
        found, _ = self.on_disk()
        demand([*free] == sorted(free, key=lambda ident: found[ident][1]), "out of order")

    def purge(self, w: Worker) -> None:
        """Age is by st_ctime, which no clock of ours moves: all are as old as ours is ahead. When
        they were pushed does not count."""
        ahead_s, all_of_them = self.clock.time() - time.time(), self.chance.random() < 0.7
        states = self.chance.choice((("done",), ("failed",), ("done", "failed"), "done"))
        for task in self.model.those("done", "failed"):
            os.utime(self.paths[task.id], (1, 1))
        count = w.q.purge(max(0, ahead_s + (-1000 if all_of_them else 1000)), states)
        gone = self.model.those(*([states] if isinstance(states, str) else states))
        demand(count == (len(gone) if all_of_them else 0), f"purge() said {count} of {gone}")
        if all_of_them:
            for task in gone:
                del self.model.tasks[task.id]
            if "failed" in states:
                self.model.reasons.clear()

    # Time, and people

    def wait(self, w: Worker) -> None:
        self.clock.advance(self.chance.choice((0.01, 0.01, 0.3, 1.1, 1.1, 5, 31, 700)))

    def set_date(self, w: Worker) -> None:
        """A step of the wall clock, which matters to scheduled/ only; the next look for due tasks
        sees it."""
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
        """mv and rm, as the README names them."""
        known = self.model.those("pending", "failed", "inflight")
        movable = [
            it for it in known if it.key is None or (it.state == "pending" and not it.behind)
        ]
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
        stats, model = w.q.stats(), self.model
        states = ("pending", "scheduled", "inflight", "keys", "done", "failed")
        counts = [len(model.those(state)) for state in states]
        said = [stats.pending, stats.scheduled, stats.inflight, stats.buffered]
        demand([*said, stats.done, stats.failed] == counts, f"{stats} where there are {counts}")
        ages_ns = [max(0, model.now_ns() - task.at_ns) for task in model.those("pending")]
        late_ns = [self.clock.wall_ns() - task.at_ns for task in model.those("scheduled")]
        ages_ns += [it for it in late_ns if it >= 0]
        age_s = max(ages_ns) / 1e9 if ages_ns else None
        demand(stats.oldest_pending_age_s == age_s, f"{stats.oldest_pending_age_s} != {age_s}")
        for node in stats.nodes:
            leases = [task for task in model.those("inflight") if task.node == node.node]
            late = sum(task.at_ns <= model.now_ns() for task in leases)
            ours = any(task.boot == model.boot for task in leases)
            living = "dead" if ours else "unknown"
            living = "alive" if model.places[node.node] else living
            expected = NodeStats(node.node, len(leases), late, living)
            demand(node == expected, f"{node}, not {expected}")
        ended = sum(node.expired for node in stats.nodes)
        demand(stats.expired == ended, f"{stats.expired} have ended, not {ended}")

    def look_at_tasks(self, w: Worker) -> None:
        for state in femtoqueue.STATES:
            known = sorted(self.model.those(state), key=lambda task: task.directory)
            expected = [task.seen for task in known]
            found = [*w.q.tasks(state)]
            demand(found == expected, f"{state} has {found}, not {expected}")
            for task, seen in zip(known, found, strict=True):
                self.check_told(task, seen)
            sizes = [task.size_bytes for task in w.q.tasks(state, data=False)]
            demand(sizes == [len(task.data) for task in expected], f"sizes are {sizes}")
            keys = [task.key for task in known if task.key is not None]
            demand([*w.q.keys(state)] == keys, f"keys({state}) are not {keys}")

    def check_told(self, task: Known, told: FemtoTask) -> None:
        """Fail unless it tells where the task is, whose it is, until when, and whether that was its
        failure with a reason."""
        is_leased = task.state == "inflight"
        node = task.node if is_leased else None
        demand((told.state, told.node) == (task.state, node), f"{told.path} of {task}")
        until_ns = task.at_ns if is_leased or task.state == "scheduled" else 0
        if is_leased:  # by the wall clock of now
            until_ns += self.clock.wall_ns() - self.model.now_ns()
        told_ns = told.until.timestamp() * 1e9 if told.until else 0
        demand(abs(told_ns - until_ns) < 2000, f"until {told.until}: {task}")
        has_reason = task.state == "failed" and task.id in self.model.reasons
        demand((told.error is not None) == has_reason, f"failed for {told.error!r}: {task}")

    def look_at_one(self, w: Worker) -> None:
        task = self.chance.choice([*self.model.tasks.values(), None])
        found = w.q.peek(task.id if task else "0" * 20 + "-00000000")
        expected = task and task.seen
        demand(found == expected, f"peek() gave {found}, not {expected}")
        key = self.chance.choice(self.KEYS)
        task = self.model.of_key(key)
        demand(w.q.contains(key) == (task is not None), f"contains({key}) of {task}")
        expected = task and task.seen
        demand(w.q.peek(key=key) == expected, f"peek() did not give {expected}")

    def finish(self) -> None:
        """When all have stopped and time has passed, one who comes gets all that waits."""
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
                if task := self.model.of_lease(held.task):
                    self.done(w, held, task)
        live = self.model.those("pending", "scheduled", "inflight")
        # Leases without an end of an earlier boot's workers wait for their node_id.
        left = [task for task in live if task.state != "inflight" or self.model.is_over(task)]
        demand(not left, f"never delivered: {left}")
        self.look_at_tasks(w)


class Model(QueueCase):
    def test_random_lives_are_as_in_a_model(self) -> None:
        """Order, attempts, keys, leases, due times, dead letters, by several objects at once, while
        clocks step, objects die and come back, and people move files (.ci/fuzz.py goes on). No
        descriptor stays open."""
        before = os.listdir("/dev/fd")
        for seed in range(16):
            Fuzz(self.new_dir(self.memory), seed).run(300)
        gc.collect()
        self.assertEqual(os.listdir("/dev/fd"), before)


# What else stands in the directories


class Corruption(QueueCase):
    WHOLE, LARGE = b"FQ1 352441c2 3\nabc", record(b"x" * 100_000)
    DAMAGED = (
        (b"", "no FQ1 header"),
        (b"FQ1 352441c2 3", "no FQ1 header"),
        (b"\0" * 5000, "no FQ1 header"),
        (b"hello\n", "no FQ1 header"),
        (WHOLE[:-1], "2 bytes, where the header says 3"),
        (WHOLE + b"d", "4 bytes, where the header says 3"),
        (WHOLE[:-1] + b"d", "wrong checksum"),
        (b"FQ1 352441c2 " + b"9" * 19 + b"\nabc", "3 bytes, where the header says 9999"),
        (b"FQ1 352441c2 " + b"9" * 30 + b"\nabc", "no FQ1 header"),
        (b"FQ1 352441C2 3\nabc", "no FQ1 header"),
        (b"FQ2 352441c2 3\nabc", "no FQ1 header"),
        (LARGE[:50_000], "bytes, where the header says 100000"),
        (LARGE[:-1] + b"y", "wrong checksum over 100000 bytes"),
    )

    def test_a_key_that_is_none_or_not_its_ids_is_a_dead_letter(self) -> None:
        """Nobody's push() wrote it. It must not be an error of pop() for ever, nor lead to the
        locks of two keys."""
        q = self.queue()
        for number, key in enumerate(("a" * 201, "%61", "a,b", "%")):
            self.put(f"{number:020d}-{key_tag(key)}", record(b"x", key.encode()))
        self.put(f"{4:020d}-80000000", record(b"x", b"other"))
        q.push(b"good")
        self.assertEqual(self.drain(q), [b"good"])
        self.assertEqual(self.states(), {"failed": 5, "done": 1})

    def test_what_is_written_or_read_in_parts_is_whole(self) -> None:
        """FUSE may give less than it is asked for."""
        q, read, write = self.queue(), os.read, os.write
        sizes = (50, 1), (50, 40), (20_000, 7), (20_000, 16_000)
        for (size, most), key in itertools.product(sizes, (None, "k")):

            def short(fd: int, data: bytes, most: int = most) -> int:
                return write(fd, data[:most])

            with mock.patch.object(os, "write", short):
                q.push(b"y" * size, key=key)
            with mock.patch.object(os, "read", lambda fd, size: read(fd, min(size, 512))):
                self.assertEqual(self.drain(q), [b"y" * size])

    def test_damaged_files_are_set_aside_with_their_reason_and_pop_continues(self) -> None:
        """And are logged as errors."""
        LOG.disabled, q = False, self.queue()
        idents = [f"{number:020d}-0000aaaa" for number in range(len(self.DAMAGED))]
        for ident, (content, _) in zip(idents, self.DAMAGED, strict=True):
            self.put(ident, content)
        q.push(b"good")
        with self.assertLogs("femtoqueue", "ERROR") as logs:
            self.assertEqual(self.drain(q), [b"good"])
        self.assertEqual(len(logs.output), len(idents))
        for ident, (content, reason), line in zip(idents, self.DAMAGED, logs.output, strict=True):
            with self.subTest(content[:40]), open(self.file("failed", ident), "rb") as file:
                self.assertEqual(file.read(), content)
                self.assertIn(reason, reason_of(q, ident))
                self.assertIn(reason, line)


class TroubleOfOneTask(QueueCase):
    """A task that this worker can't read, or may not move, does not stop the others."""

    def unreadable(self, *idents: str) -> Any:
        def refuse(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and str(args[0]).endswith(idents):
                fail_with(errno.EACCES)

        return hooked(refuse)

    def test_pop_raises_for_an_unreadable_task_and_the_next_pop_takes_the_next(self) -> None:
        q, other = self.queue(), self.queue("n2")
        bad, *_ = q.push_many([b"bad", b"good", b"better"])
        with self.unreadable(bad):
            with self.assertRaises(PermissionError) as caught:
                q.pop()
            self.assertEqual(getattr(caught.exception, "task_id", None), bad)
            self.assertEqual(self.pop(q).data, b"good")
            self.assertEqual(self.pop(other).data, b"better")
        task = self.pop(other)
        self.assertEqual((task.id, task.attempts), (bad, 2))

    def test_task_that_makes_trouble_again_is_passed_over_for_up_to_an_hour(self) -> None:
        q, clock = self.queue(), self.clock()
        clock.stand_still()
        bad, pauses = q.push(b"bad"), list[float]()
        with self.unreadable(bad):
            for _ in range(16):
                began_s = clock.monotonic()
                with contextlib.suppress(PermissionError):
                    while q.pop() is None:
                        clock.advance(0.5 if clock.monotonic() - began_s < 30 else 30)
                pauses.append(clock.monotonic() - began_s)
        self.assertEqual(pauses[:6], [0, 0, 1, 2, 4, 8])
        self.assertTrue(3600 <= pauses[-1] <= 3660, pauses)
        self.assertEqual(self.pop(self.queue("n2")).data, b"bad")

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
        (dead,) = q.tasks("failed")
        self.assertEqual((dead.id, "MemoryError" in str(dead.error)), (bad, True))

    def test_keyed_task_that_can_not_be_read_keeps_its_key_to_itself(self) -> None:
        q, other = self.queue(), self.queue("n2")
        bad = q.push(b"bad", key="k")
        with self.unreadable(bad):
            self.assertRaises(PermissionError, q.pop)
        self.assertEqual(q.push(b"newer", key="k"), bad)
        task = self.pop(other)
        self.assertEqual((task.id, task.data), (bad, b"newer"))

    def test_work_logs_an_unreadable_task_and_goes_on(self) -> None:
        for concurrency in (1, 2):
            q, handled = self.anew(max_attempts=3), list[bytes]()
            bad, *_ = q.push_many([b"bad", b"0", b"1", b"2"])
            with self.subTest(concurrency), self.unreadable(bad):
                counts = q.work(
                    lambda task, to=handled: to.append(task.data),  # type: ignore[misc]
                    drain=True,
                    concurrency=concurrency,
                )
            self.assertEqual((sorted(handled), counts.done), ([b"0", b"1", b"2"], 3))
            (dead,) = q.tasks("failed")
            self.assertEqual(dead.id, bad)

    def test_work_ends_when_nothing_but_unreadable_tasks_comes(self) -> None:
        q = self.queue()
        idents = q.push_many([b"bad"] * 3)
        with (
            with_constant("trouble", -1.0),
            self.unreadable(*idents),
            self.assertRaises(PermissionError),
        ):
            q.work(lambda task: None, drain=True)

    def test_task_that_may_not_be_moved_is_passed_over(self) -> None:
        """As in a sticky pending/, where the tasks of other users may not be renamed."""
        q, clock = self.queue(), self.clock()
        bad, *_ = q.push_many([b"bad", b"good", b"better"])
        with hooked(at_call("move", bad, raising(errno.EPERM))):
            with self.assertRaises(PermissionError) as caught:
                q.pop()
            self.assertEqual(getattr(caught.exception, "task_id", None), bad)
            self.assertEqual(self.pop(q).data, b"good")
            clock.advance(2)
            self.assertRaises(PermissionError, q.pop)
            self.assertEqual(self.pop(q).data, b"better")
            clock.advance(0.5)
            self.assertIsNone(q.pop())
        clock.advance(100)
        task = self.pop(q)
        self.assertEqual((task.id, task.attempts), (bad, 1))

    def test_directory_that_may_not_be_written_to_is_no_trouble_of_a_task(self) -> None:
        q = self.queue()
        bad = q.push(b"x")
        with (
            hooked(at_call("move", bad, raising(errno.EACCES))),
            mock.patch.object(os, "access", return_value=False),
            self.assertRaises(PermissionError) as caught,
        ):
            q.pop()
        self.assertFalse(hasattr(caught.exception, "task_id"))


class ForeignFiles(QueueCase):
    NAMES = (
        ".DS_Store",
        "README",
        "0" * 20,
        "0" * 20 + "-0000aaaa.swp",
        "0" * 20 + "-0000AAAA",
        "9" * 20 + "-0000aaaa",
        "0" * 20 + "~1~" + "0" * 20 + "-xxxxxxxx",
        "0" * 20 + "~1234567~" + "0" * 20 + "-0000aaaa",
        *("0" * 19 + "-0000aaaa", "0" * 19 + "~1~" + "0" * 20 + "-0000aaaa"),
        *("0" * 21 + "-0000aaaa", "0" * 21 + "~1~" + "0" * 20 + "-0000aaaa"),
        "\u0660" * 20 + "-0000aaaa",  # digits of another alphabet
        "zzz",
        "-rf",
        "new\nline",
    )

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

    def test_what_is_not_ours_is_never_delivered_moved_removed_or_a_crash(self) -> None:
        """Files, folders, links and names of any bytes, in every directory; and what only looks
        like a lease directory. On file systems of several hosts, too. However much of it there is,
        an empty pop() lists pending/ once."""
        clock = self.clock()
        for fs_type in (EXT4, NFS):
            self.path = self.new_dir(self.memory)
            self.patched(on_file_system(fs_type))
            self.check_what_is_foreign_stays(clock)

    def check_what_is_foreign_stays(self, clock: Clock) -> None:
        q = self.queue("n1")
        q.push(b"1")
        q.close()
        self.queue("n2").pop()
        foreign: set[str] = set()
        os.mkdir(self.file("keys"))
        states = "pending", "scheduled", "done", "failed", "inflight-n2"
        for directory in (".", "keys", "creating", *states):
            foreign |= self.litter(directory)
        # As a lock and a payload are named, and the place of a worker.
        for name in ("keys/80000000", "keys/" + "0" * 20 + "-80000000", "inflight-bad name"):
            os.mkdir(self.file(name))
            foreign.add(self.file(name))
        task = f"{1:020d}-0000aaaa"
        for name in ("keys/0000aaaa", f"keys/{task}", f"done/{task}.error", "inflight-file"):
            foreign.add(os.path.normpath(self.put(name, b"", "")))
        os.symlink(self.file("pending"), self.file("inflight-link"))
        foreign.add(self.file("inflight-link"))
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

    def test_links_folders_and_fifos_with_a_tasks_name_are_set_aside_unread(self) -> None:
        """O_NOFOLLOW: a link is not followed. O_NONBLOCK: a FIFO does not hang pop(). Nor are they
        what another host replaced, or took first."""
        secret = self.put("secret", record(b"abc"), "")
        make: tuple[Callable[[str], object], ...] = (
            lambda path: os.symlink(secret, path),
            lambda path: os.symlink("nowhere", path),
            os.mkdir,
            os.mkfifo,
        )
        idents = [f"{number:020d}-0000aaaa" for number in range(1, 5)]
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
    """What one user made does not shut out, or hold up, the others."""

    def test_reason_that_is_no_file_does_not_block(self) -> None:
        q = self.queue()
        q.push(b"x")
        task = self.pop(q)
        q.fail(task)
        os.mkfifo(self.file("failed", f"{task.id}.error"))
        (dead,) = q.tasks("failed")
        self.assertEqual(dead.error, "")

    def test_files_for_all_users_follow_the_rights_of_data_dir(self) -> None:
        """As root, or a user with another umask, may be the first to use a key, or a line."""
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
            self.assertEqual(stat.S_IMODE(os.stat(self.file(name)).st_mode), 0o770, name)
        files = [*glob.glob(self.file("locks", "*")), *glob.glob(self.file("checkpoints", "*"))]
        states = [self.file("keys", name) for name in self.names("keys") if "-" not in name]
        self.assertEqual((len(clocks), len(files), len(states)), (1, 2, 1))
        for path in (*files, *states, self.file("last")):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o660, path)

    def test_file_outside_keeps_its_mode_when_a_link_takes_the_place_of_a_new_lock(self) -> None:
        """root may work in a directory of another user, who puts a link to any file there."""
        outside = os.path.join(self.new_dir(os.path.dirname(self.path)), "shadow")
        for link in (os.symlink, os.link):
            with open(outside, "w", encoding="ascii"):
                os.chmod(outside, 0o600)
            q = self.anew()
            os.chmod(self.path, 0o777)
            place = self.file("locks", key_tag("k")[-2:])

            def swap(link: Any = link, place: str = place) -> None:
                if os.path.isfile(place) and not os.path.samefile(place, outside):
                    os.unlink(place)
                    link(outside, place)

            with hooked(at_call("stat fstat chmod fchmod", None, swap)):
                q.push(b"x", key="k")
            self.assertTrue(os.path.lexists(place))
            self.assertEqual(stat.S_IMODE(os.stat(outside).st_mode), 0o600)

    def test_file_outside_keeps_its_mode_when_a_link_comes_before_the_lock(self) -> None:
        q = self.queue()
        outside = os.path.join(self.new_dir(os.path.dirname(self.path)), "shadow")
        with open(outside, "w", encoding="ascii"):
            os.chmod(outside, 0o600)
        os.chmod(self.path, 0o777)
        os.mkdir(self.file("locks"))
        place, opened = self.file("locks", key_tag("k")[-2:]), os.open

        def plant(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if path == place and flags & os.O_CREAT and not os.path.lexists(place):
                os.link(outside, place)
            return opened(path, flags, *rest, **more)

        with mock.patch.object(femtoqueue, "os", fake_os(open=plant)):
            q.push(b"x", key="k")
        self.assertEqual(stat.S_IMODE(os.stat(outside).st_mode), 0o600)

    def test_looks_at_keys_work_where_nothing_can_be_written(self) -> None:
        """As on a snapshot, also if its locks/ was never made."""
        q, opened = self.queue(), os.open
        q.push(b"x", key="k")
        shutil.rmtree(self.file("locks"))

        def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                fail_with(errno.EROFS)
            return opened(path, flags, *rest, **more)

        read_only = fake_os(open=refuse, mkdir=lambda *_: fail_with(errno.EROFS))
        with mock.patch.object(femtoqueue, "os", read_only):
            task = q.peek(key="k")
            self.assertEqual((q.contains("k"), q.contains("j")), (True, False))
        self.assertEqual(task and task.data, b"x")

    def test_ticket_in_a_line_that_may_only_be_read_raises_why(self) -> None:
        line, opened = TicketQueue(self.path), os.open
        line.remove(line.register()[1])

        def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if flags & (os.O_RDWR | os.O_CREAT):
                fail_with(errno.EROFS)
            return opened(path, flags, *rest, **more)

        with (
            mock.patch.object(femtoqueue, "os", fake_os(open=refuse)),
            self.assertRaises(OSError) as caught,
        ):
            line.register()
        self.assertEqual(caught.exception.errno, errno.EROFS)

    def test_file_outside_keeps_its_mode_when_a_link_replaces_a_clock_file(self) -> None:
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

    def test_lock_that_may_only_be_read_is_taken(self) -> None:
        """An earlier version made it as root, with mode 0644; flock needs no right to write."""
        q = self.queue()
        q.push(b"x", key="k")
        opened = os.open

        def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
            if "/locks/" in str(path) and flags & (os.O_RDWR | os.O_CREAT):
                fail_with(errno.EACCES)
            return opened(path, flags, *rest, **more)

        with mock.patch.object(femtoqueue, "os", fake_os(open=refuse)):
            q.done(self.pop(q))
        self.assertEqual(len(self.names("done")), 1)


@FORK
class ByHand(QueueCase):
    """Each command of a person or a shell script that the README names, while workers run."""

    # What a person does while 1 is in flight, and 2 and 3 wait, and are listed already; whether the
    # lease is lost then; and what is delivered, with its attempts.
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
        env = {**os.environ, **names}
        status, out, err = run_guarded("sh", "-ec", command, env=env, path=self.path)
        self.assertEqual((status, err), (0, ""), command)
        return out

    def test_mv_rm_and_touch_do_what_they_say(self) -> None:
        """For the worker that has a lease without an end, or its tasks' names, and for others."""
        clock = self.clock()
        for (command, is_lost, wanted), node in itertools.product(self.COMMANDS, ("n1", "n2")):
            q = self.anew(timeout_stale_ms=None)
            ids = q.push_many([b"1", b"2", b"3"])
            task = self.pop(q)
            self.sh(command, LEASED=ids[0], ID=ids[1])
            clock.advance(2 if "PAUSED" in command else 0)
            with self.subTest(command, node=node):
                other = q if node == "n1" else self.queue(node)
                delivered = {it.data: it.attempts for it in iter(other.pop, None)}
                self.assertEqual(delivered, wanted)
                with self.assertRaises(LeaseLost) if is_lost else contextlib.nullcontext():
                    q.done(task)
                self.check_invariants()

    def test_mv_under_any_name_that_a_task_ever_had_is_seen(self) -> None:
        """A lease's name in pending/, and a waiting one's in failed/ and done/: stats, peek, retry
        and purge know a task by its id. Many are retried with one listing."""
        q = self.queue()
        ids = q.push_many([b"1", b"2"])
        self.pop(q), self.pop(q)
        self.sh("mv inflight-n1/* pending/")
        self.assertEqual([task.id for task in q.tasks("pending")], ids)
        for task in [self.pop(q), self.pop(q)]:
            q.release(task)
        self.sh("mv pending/* failed/")
        self.assertEqual((q.stats().failed, q.peek(ids[0])), (2, FemtoTask(ids[0], b"1", 2)))
        q.retry(ids[1])
        listings = calls_of("list", lambda: self.assertEqual(q.retry_failed(), 1))
        self.assertEqual(len(listings), 1)
        for data in (b"2", b"1"):
            task = self.pop(q)
            self.assertEqual((task.data, task.attempts), (data, 1))
            q.release(task)
        self.sh("mv pending/* done/")
        self.assertEqual((q.stats().done, q.peek(ids[1])), (2, FemtoTask(ids[1], b"2", 1)))

    def test_ls_cat_tail_wc_and_du_tell_the_truth_and_a_copy_is_a_queue(self) -> None:
        """What was in flight comes back in the copy: nobody holds its lease."""
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
            self.assertEqual([task.data for task in iter(copy.pop, None)], [b"one\n", b"two\n"])


# Many processes


@FORK
class Concurrency(QueueCase):
    COUNT = 20_000

    def pop_and_finish(self, q: FemtoQueue) -> list[str]:
        task = q.pop()
        if task is None:
            return []
        q.done(task)
        return [task.data.decode()]

    def push_and_drain(self, child: Child, first: int) -> None:
        """Drain until all is done; the first two push half of the tasks each, meanwhile."""
        q, ends = FemtoQueue(self.path), [self.file("pushed-0"), self.file("pushed-1")]
        child.say("ready")
        child.wait_for_go()
        popped: list[str] = []
        for number in range(first, self.COUNT, 2) if first < 2 else ():
            q.push(b"%d" % number)
            popped += self.pop_and_finish(q) if number % 5 == 0 else []
        if first < 2:
            self.put(f"pushed-{first}", b"", "")
        while (finished := self.pop_and_finish(q)) or not all(map(os.path.exists, ends)):
            popped += finished
        child.say(" ".join(popped))
        q.close()

    def test_eight_workers_deliver_twenty_thousand_tasks_exactly_once(self) -> None:
        """While nobody dies."""
        workers = [self.child(functools.partial(self.push_and_drain, first=n)) for n in range(8)]
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
    """Four producers and four consumers on fifty keys, all of them killed now and then."""

    KEYS, KILLS = 50, 130
    SECONDS = 2.0 if QueueCase.memory else 4.0  # for as many deliveries

    def log(self, *words: object) -> None:
        """Append a line. Who is killed as it crosses a page leaves half of one: without its end."""
        os.write(self.log_fd, " ".join(map(str, ("\n", time.monotonic_ns(), *words, "."))).encode())

    def logged(self, what: str) -> list[tuple[int, str, str]]:
        with open(self.file("log"), encoding="ascii") as file:
            whole = [words[:4] for line in file if (words := line.split())[4:] == ["."]]
        return sorted((int(t), key, value) for t, word, key, value in whole if word == what)

    def produce(self, child: Child) -> None:
        q, chance = FemtoQueue(self.path), child.chance
        for number in itertools.count():
            key, value = f"k{chance.randrange(self.KEYS)}", f"{os.getpid()}-{number}"
            self.log("pushing", key, value)
            if chance.random() < 0.8:
                q.push(value.encode(), key=key)
            else:
                q.schedule(value.encode(), time.time() * 1e6 + chance.choice((-1, 5000)), key=key)
            self.log("pushed", key, value)

    def consume(self, child: Child) -> None:
        q, chance = FemtoQueue(self.path), child.chance
        while True:
            task = q.pop() if chance.random() < 0.7 else q.take(f"k{chance.randrange(self.KEYS)}")
            if task is None:
                time.sleep(0.001)
                continue
            self.handle(q, task, chance)

    def handle(self, q: FemtoQueue, task: FemtoTask, chance: random.Random) -> None:
        fd = os.open(self.file(f"busy-{task.key}"), os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(100):  # a killed one's descriptors close one after the other
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.001)
        else:
            self.log("overlap", task.key, task.data.decode())
        self.log("got", task.key, task.data.decode())
        time.sleep(chance.random() / 1000)
        os.close(fd)
        if chance.random() < 0.8:
            q.done(task)
        else:
            q.release(task, front=chance.random() < 0.5)

    def test_the_last_value_is_delivered_last_and_no_two_at_once(self) -> None:
        self.log_fd = os.open(self.file("log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.addCleanup(os.close, self.log_fd)
        workers = [self.child(work) for work in (self.produce, self.consume) * 4]
        for _ in range(self.KILLS):
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
        self.assertEqual(self.logged("overlap"), [])
        self.check_last_values()

    def check_last_values(self) -> None:
        """No value whose push began after the push of the last one delivered had ended."""
        began = {value: t for t, _, value in self.logged("pushing")}
        pushed = self.logged("pushed")
        ended = {value: t for t, _, value in pushed}
        last = {key: value for _, key, value in self.logged("got")}
        self.assertGreater(len(pushed), 500)
        for _, key, value in pushed:
            delivered = last[key]
            late = delivered in ended and began[value] > ended[delivered]
            self.assertFalse(late, f"{key}: {value} is missed, {delivered} came last")


class TicketCase(QueueCase):
    def line(self, stale_timeout: float | None = None) -> TicketQueue:
        return TicketQueue(self.file("line"), stale_timeout)

    def members(self) -> list[str]:
        """Return the files of the tickets in line, in order."""
        return [name for name in self.names("line") if name[0].isdigit()]


class Tickets(TicketCase):
    """First come, first served: one at a time, in the order of the numbers, over the dead."""

    def test_numbers_begin_at_one_and_the_lowest_is_at_the_head(self) -> None:
        line, other = self.line(), self.line()
        tickets = [queue.register() for queue in (line, other, line)]
        self.assertEqual([number for number, _ in tickets], [1, 2, 3])
        self.assertEqual([line.is_head(n) for n in (0, 1, 2, 3)], [False, True, False, False])
        self.assertTrue(other.remove(tickets[1][1]))
        self.assertTrue(line.remove(tickets[0][1]))
        self.assertFalse(line.remove(tickets[0][1]))
        self.assertEqual((line.is_head(1), line.is_head(3), line.is_empty()), (False, True, False))
        line.remove(tickets[2][1])
        self.assertEqual((line.is_head(0), line.is_empty()), (False, True))
        self.assertEqual((other.register()[0], line.is_empty()), (4, False))
        del other  # and with the object, its tickets
        self.assertEqual(self.names("line"), ["last"])
        for content in (b"", bytes(20), b"hello"):  # after power loss, or of a person
            self.put("last", content, "line")
            number, member = line.register()
            self.assertEqual((number, line.remove(member)), (1, True))

    def test_a_ticket_appears_locked(self) -> None:
        """Or whoever looks just then takes it for that of a dead process."""
        line, other, swept = self.line(), self.line(), list[int]()

        def look() -> None:
            swept.append(other.cleanup_stale())

        with hooked(at_call("move", "/.", look, times=1), after=True):
            ticket, _ = line.register()
        self.assertEqual((swept, line.is_head(ticket)), ([0], True))

    def test_who_was_removed_has_no_turn_though_its_number_is_given_again(self) -> None:
        """By a person, say, who gave up on a process that is stopped; or as it looks."""
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
        with line.turn(timeout=1) as ticket:
            self.assertEqual(ticket, 1)
            with self.assertRaises(TimeoutError), line.turn(timeout=0.01):
                self.fail("two at once")
            self.assertTrue(line.is_head(1))
        self.assertTrue(line.is_empty())

    def test_a_copy_holds_no_ticket(self) -> None:
        """As of an object that multiprocessing gives to a process that it spawns."""
        line = self.line(7.5)
        ticket, _ = line.register()
        twin = pickle.loads(pickle.dumps(line))
        self.assertEqual((twin.is_head(ticket), twin.stale_timeout), (True, 7.5))
        del twin
        self.assertTrue(line.is_head(ticket))

    def test_a_directory_that_can_not_be_made_again_is_an_error(self) -> None:
        """The link to it leads nowhere any more."""
        os.mkdir(self.file("there"))
        os.symlink("there", self.file("line"))
        line = self.line()
        os.rmdir(self.file("there"))
        self.assertRaises(FileNotFoundError, line.register)

    def test_who_died_is_passed_over_at_once(self) -> None:
        """While waiting, and at the head; no stale_timeout is needed."""
        lines = [self.line() for _ in range(4)]
        members = [line.register()[1] for line in lines]
        self.assertFalse(lines[1].is_head(2))
        nowhere = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, nowhere)
        for at in (0, 2):  # no descriptor leads to its ticket any more, as when it was killed
            (fd,) = descriptors_of(self.file("line", members[at]))
            os.dup2(nowhere, fd, inheritable=False)
        self.assertTrue(lines[1].is_head(2))
        self.assertEqual((lines[1].cleanup_stale(), lines[3].is_head(4)), (1, False))

    @FORK
    def test_a_forked_child_holds_none_of_its_parents_tickets(self) -> None:
        """That it ends, drops its copy, or leaves the block gives up nothing."""
        lines, stack = [self.line()], contextlib.ExitStack()
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

    def test_a_register_that_fails_or_is_interrupted_leaves_no_ticket(self) -> None:
        """All others would wait behind it. At each of its system calls the network is cut, or
        Ctrl-C comes before or after it. If it returns, the ticket is in line; and an error of
        close() undoes nothing."""
        cut = raising(errno.ENOTCONN)
        ways = (Step, cut), (Step, interrupt), (Meanwhile, interrupt)
        for fs_type, (kind, happen) in itertools.product((EXT4, NFS), ways):
            for step in kind.each(happen):
                line, members = self.line(), list[str]()
                with on_file_system(fs_type), self.subTest(fs_type, number=step.number):
                    ended = contextlib.suppress(OSError, KeyboardInterrupt)
                    with ended, hooked(step, after=kind is Meanwhile):
                        members.append(line.register()[1])
                    self.assertEqual(self.line().is_empty(), not members)
                    if happen is cut:
                        self.assertEqual(self.members(), members)
                        self.assertTrue(members or step.at != "close")
                    for member in members:
                        self.assertTrue(line.remove(member))

    def test_on_another_host_only_the_time_tells(self) -> None:
        """A ticket of another boot lives until nobody has touched it for stale_timeout."""
        with on_boot("another host"):
            other = self.line(stale_timeout=60)
        line, patient, clock = self.line(stale_timeout=60), self.line(), self.clock()
        theirs, member = other.register()
        mine, _ = line.register()
        clock.advance(50)
        self.assertTrue(other.is_head(theirs))  # touches it, but by the clock of the disk
        stats = calls_of("stat", lambda: self.assertFalse(line.is_head(mine)))
        # Of its open file: a host may remember for a minute when a path was last touched.
        self.assertNotIn((self.file("line", member),), stats)
        clock.advance(20)
        self.assertEqual((patient.is_head(mine), line.is_head(mine)), (False, True))
        self.assertFalse(other.is_head(theirs))

    def test_the_directory_is_removed_when_nobody_is_there_and_only_then(self) -> None:
        line = self.line()
        _, member = line.register()
        self.assertEqual((line.maybe_cleanup(), line.remove(member)), (False, True))
        self.put(".notes.txt", b"", "line")
        self.assertFalse(line.maybe_cleanup())
        self.assertEqual(self.names("line"), [".notes.txt", "last"])
        os.unlink(self.file("line", ".notes.txt"))
        self.put(f".{1:020d}~00000000~{'0' * 16}", b"", "line")  # of one killed in register()
        self.assertEqual((line.maybe_cleanup(), line.maybe_cleanup()), (True, False))
        self.assertFalse(os.path.exists(self.file("line")))
        self.assertEqual((line.is_empty(), line.is_head(1), line.register()[0]), (True, False, 1))

    def test_a_directory_that_is_removed_before_any_call_is_made_again(self) -> None:
        """As another process does that finds nobody in line, and not who holds the lock."""

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
            with hooked(lambda *_, n=number, at=calls: clean() if next(at) == n else None):
                line = self.line()
                ticket, member = line.register()
                self.assertEqual((ticket, line.is_head(1), line.remove(member)), (1, True, True))
                self.assertEqual((line.cleanup_stale(), line.is_empty()), (0, True))
                self.assertTrue(line.maybe_cleanup() or not os.path.exists(self.file("line")))
            if next(calls) < number:
                break

    def test_a_ticket_that_can_not_be_removed_is_not_held_any_longer(self) -> None:
        """As when the network is cut. The line goes on without it once it is reached again."""
        line = self.line()
        _, member = line.register()
        with hooked(at_call("unlink", member, raising(errno.ENOTCONN))):
            try:
                line.remove(member)
            except OSError as error:
                kept = error  # and with it the frame of remove(), and the lock
        self.assertTrue(line.is_empty(), kept)

    def take_turns(self, child: Child) -> None:
        """In each turn, say the ticket and the number that a file has, which is one more then."""
        line = self.line()
        for _ in range(100):
            with line.turn() as ticket, open(self.file("inside"), "r+b", 0) as inside:
                fcntl.flock(inside, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else is inside
                number = int(inside.read())
                child.say(f"{ticket} {number}")
                if child.chance.random() < 0.1:
                    time.sleep(0.001)
                os.pwrite(inside.fileno(), b"%d" % (number + 1), 0)

    @FORK
    def test_eight_processes_take_a_hundred_turns_each(self) -> None:
        """One at a time, in the order of their tickets; a directory that is removed in between,
        when it is empty, does no harm."""
        self.put("inside", b"0", "")
        line, children = self.line(), [self.child(self.take_turns) for _ in range(8)]
        has_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while line.maybe_cleanup() or not os.waitid(os.P_PID, children[0].pid, has_ended):
            pass
        lines = [child.finish() for child in children]
        self.assertEqual([status for _, status in lines], [0] * 8)
        turns = sorted((int(at), int(n)) for said, _ in lines for n, at in map(str.split, said))
        self.assertEqual([at for at, _ in turns], [*range(800)])
        grants = [ticket for _, ticket in turns]
        starts = [at for at, ticket in enumerate(grants) if at == 0 or ticket == 1]
        for begin, end in itertools.pairwise([*starts, len(grants)]):
            self.assertEqual(grants[begin:end], sorted(grants[begin:end]))


class SharedTickets(TicketCase):
    """The same between hosts. One that was cut off has lost its locks, and is not told (NFS)."""

    fs_type = NFS

    def lasting(self) -> tuple[TicketQueue, Clock]:
        """Return a line with a stale_timeout of 40 s, and the clock."""
        return self.line(stale_timeout=40), self.clock()

    def test_a_stale_timeout_may_be_longer_than_a_thread_can_wait(self) -> None:
        before = {*threading.enumerate()}
        with self.line(stale_timeout=1e11).turn():
            (thread,) = {*threading.enumerate()} - before
            wait_until_it_stands(thread)
            self.assertTrue(thread.is_alive())

    def test_numbers_are_names(self) -> None:
        """A host may read as it was what another has written to "last". The directory stays: a host
        may hold the lock of a "last" that was removed."""
        for number in (1, 2, 3):
            line = self.line()
            ticket, member = line.register()
            line.remove(member)
            self.assertEqual((ticket, line.maybe_cleanup()), (number, False))
        self.assertEqual(self.names("line"), ["last", f"last~{3:020d}"])
        self.assertEqual(os.stat(self.file("line", "last")).st_size, 0)

    def test_a_ticket_that_another_host_comes_between_is_made_again(self) -> None:
        """That host draws a number as ours is being noted, or is noted and not in line yet: a lower
        one would take its place. Or it takes ours for that of a dead process. Or GlusterFS lists a
        name which it does not find, perhaps for minutes, until it has healed: at last an error."""
        line = self.line()

        def draw(theirs: int) -> None:
            for name in self.names("line"):
                if name.startswith("last~"):
                    os.unlink(self.file("line", name))
            self.put(f"last~{theirs:020d}", b"", "line")

        def sweep() -> None:
            (name,) = (name for name in self.names("line") if name.startswith("."))
            os.unlink(self.file("line", name))

        missing, stale = raising(errno.ENOENT), raising(errno.ESTALE)
        for call, part, happens, times, ours in (
            ("open", "/last~", lambda: draw(1), 1, 2),
            ("move", "/last~", lambda: draw(5), 1, 6),
            ("move", "/.", lambda: draw(8), 1, 9),
            ("move", "/.", sweep, 1, 11),
            ("move", "/last~", missing, 2, 12),
            ("move", "/last~", stale, 2, 13),
        ):
            with self.subTest(ours=ours), hooked(at_call(call, part, happens, times)):
                ticket, member = line.register()
                self.assertEqual((ticket, self.members()), (ours, [member]))
                self.assertTrue(line.is_head(ticket))
                self.assertTrue(line.remove(member))
        for error in (missing, stale):
            with hooked(at_call("move", "/last~", error)):
                self.assertRaises(OSError, line.turn(60).__enter__)
            self.assertTrue(line.is_empty())
        ticket, member = line.register()
        with hooked(at_call("utime", None, stale)):  # removed; its list of names may be an old one
            self.assertFalse(line.is_head(ticket))
        self.assertFalse(line.remove(member))

    def test_a_touch_that_came_late_does_not_make_up_for_it(self) -> None:
        """The thread of turn() touches the ticket, and tells nobody that it was late."""
        clock, touches = self.clock(), threading.Semaphore(0)
        clock.stand_still()
        line = self.line(stale_timeout=0.04)
        with hooked(at_call("utime", None, touches.release), after=True), line.turn() as ticket:
            clock.advance(0.032)
            for _ in range(4):  # by is_head(); that just begins; that is late; and one after it
                self.assertTrue(touches.acquire(timeout=PATIENCE_S))
            self.assertFalse(line.is_head(ticket))

    def test_who_is_late_in_its_turn_is_told_and_keeps_others_out_until_it_stops(self) -> None:
        line, clock = self.lasting()
        with on_boot("another host's"):
            other = self.line(stale_timeout=40)
        ticket, member = line.register()
        clock.advance(28)
        self.assertTrue(line.is_head(ticket))
        clock.advance(32)

        def touch(fd: int) -> None:
            os.utime(fd, (clock.time(), clock.time()))

        with mock.patch.object(femtoqueue, "os", fake_os(utime=touch)):
            self.assertEqual((line.is_head(ticket), line.is_head(ticket)), (False, False))
        waiting, _ = other.register()
        clock.advance(20)
        self.assertFalse(other.is_head(waiting))  # touched 20 s ago
        self.assertTrue(line.remove(member))
        self.assertTrue(other.is_head(waiting))

    def test_a_call_that_hangs_counts_from_its_beginning(self) -> None:
        """Nobody knows when the server carried it out. turn() says so."""
        line, clock = self.lasting()
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
        with mock.patch.object(femtoqueue, "os", fake_os(utime=lambda fd: clock.advance(25))):
            self.assertTrue(line.is_head(ticket))
        clock.advance(29)
        self.assertFalse(line.is_head(ticket))


class Shrinking(QueueCase):
    in_memory = False

    def look(self, q: FemtoQueue, hook: Hook = lambda *_: None) -> FemtoTask | None:
        """Pop, of a queue that takes any pending/ for a large one."""
        with with_constant("shrink", -1), hooked(hook):
            return q.pop()

    def test_an_empty_pending_that_was_large_is_replaced_with_its_mode(self) -> None:
        """And synced into data_dir: what is pushed later would be durable in a directory that has
        no name after power loss."""
        q, clock, synced = self.queue(), self.clock(), list[bool]()
        os.chmod(self.file("pending"), 0o751)
        before = os.open(self.file("pending"), os.O_RDONLY)
        self.addCleanup(os.close, before)

        def note(name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync":
                synced.append(os.path.samestat(os.fstat(args[0]), os.stat(self.path)))

        self.look(q, note)
        self.assertEqual({*synced}, {True})
        self.assertEqual(os.fstat(before).st_nlink, 0)
        self.assertEqual(stat.S_IMODE(os.stat(self.file("pending")).st_mode), 0o751)
        q.push(b"x")
        clock.advance(2)
        task = self.look(q)
        self.assertEqual((task and task.data, self.names("creating")), (b"x", []))

    def test_a_rename_into_the_directory_that_was_replaced_is_done_again(self) -> None:
        """ENOENT though the source is there: the target's directory was the one to go, twice."""
        q = self.queue()
        with hooked(at_call("move", None, raising(errno.ENOENT), times=2)):
            q.push(b"x")
        self.assertEqual(self.drain(q), [b"x"])

    def test_one_that_can_not_be_replaced_will_do(self) -> None:
        """A full disk, a mount point: an empty queue is still None, and nothing is left over."""
        clock = self.clock()
        for call, of in (("mkdir", ".pending"), ("fchmod", None), ("move", ".pending")):
            q, full = self.queue(), mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
            q.pop()  # its lease directory is there
            clock.advance(1)
            self.assertIsNone(self.look(q, at_call(call, of, full)))
            self.assertEqual((full.call_count, self.names("creating")), (1, []))


# Where things are missing


class Lacking(QueueCase):
    """A Python or a file system that lacks something; without flock, leases end by deadlines."""

    def test_waiting_pop_is_woken_where_poll_is_missing(self) -> None:
        """Programs that eventlet has patched have select.select() only."""
        q = self.queue()
        with mock.patch.object(select, "poll", create=True):
            del select.poll
            self.assertIsNone(q.pop(0.01))
            threading.Timer(0.05, q.push, [b"x"]).start()
            task = q.pop(60)
        self.assertEqual(task and task.data, b"x")

    def test_wait_with_a_high_descriptor_ends_where_poll_is_missing(self) -> None:
        """select.select() refuses descriptors of 1024 and more."""
        q, refused = self.queue(), ValueError("filedescriptor out of range in select()")
        with (
            mock.patch.object(select, "poll", create=True),
            mock.patch.object(select, "select", side_effect=refused),
        ):
            del select.poll
            self.assertIsNone(q.pop(0.01))

    def check_deadlines(self, module: Any) -> None:
        clock = Clock()
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
            self.assertEqual({node.liveness for node in second.stats().nodes}, {"unknown"})
        self.assertEqual(self.states()["done"], 1)
        self.assertEqual([name for name in os.listdir(self.path) if "inflight" in name], [])

    def test_without_fcntl_leases_end_by_their_deadlines(self) -> None:
        with mock.patch.dict(sys.modules, {"fcntl": None}):
            del sys.modules["femtoqueue"]
            bare = importlib.import_module("femtoqueue")
        self.assertIsNone(vars(bare)["fcntl"])
        self.queue().push(b"could not be finished", key="k")
        self.check_deadlines(bare)
        self.assertEqual(self.states(), {"done": 1, "pending": 1})

    def test_without_flock_leases_end_by_their_deadlines(self) -> None:
        """As on file systems that answer ENOLCK, EOPNOTSUPP or, NFS to an exclusive one, EBADF."""
        for code in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF):
            self.path = self.new_dir(self.memory)
            with mock.patch("fcntl.flock", side_effect=OSError(code, os.strerror(code))):
                self.check_deadlines(femtoqueue)
                task = leased(q := self.queue())
            self.assertIsNone(self.queue("n2").pop())  # which has locks again
            q.done(task)

    def test_without_hard_links_the_clock_is_still_made_once(self) -> None:
        with hooked(at_call("link", None, raising(errno.EPERM))):
            first, clock = self.queue("a"), self.clock()
            clock.wall_shift_s = 5000.0
            self.check_one_clock(first, self.queue("b"))
        self.assertEqual(self.names("creating"), [])

    def test_finishing_a_task_that_was_finished_before_works(self) -> None:
        """Where rename() fails if the target is there, as on Windows. A person ran it again by `cp
        done/ID pending/`, or failed it twice."""
        real = os.rename

        def rename(source: str, target: str, **dir_fds: int) -> None:
            if not dir_fds and os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "there already", target)
            real(source, target, **dir_fds)

        q = self.queue()
        ident = q.push(b"x")
        with mock.patch("os.rename", rename):
            for _ in range(2):
                q.done(_taken(q))
                shutil.copy(self.file("done", ident), self.file("pending", ident))
            os.unlink(self.file("done", ident))
            for reason in ("first", "second"):
                q.fail(_taken(q), reason)
                os.replace(self.file("failed", ident), self.file("pending", ident))
        self.assertEqual(reason_of(q, ident), "second\n")


def an_old_life(path: str) -> None:
    """Make what stands in AN_OLD_QUEUE: something of everything."""
    dead = FemtoQueue(path, "dead")
    dead.push(b"of a dead worker")
    dead.checkpoint(_taken(dead), b"half way")
    for key in ("b", "d"):
        dead.push(b"of a key in flight", key=key)
        _taken(dead)
    with FemtoQueue(path, "n1", detached=True) as q:
        q.push(b"newer", key="b")
        q.schedule(b"newer, and later", 4e15, key="d")
        q.push(b"detached")
        _taken(q)
        q.push(b"done")
        q.done(_taken(q))
        q.push(b"failed")
        q.fail(_taken(q), "why\nso")
        q.push_many([b"back", b"front"])
        back, front = _taken(q), _taken(q)
        q.checkpoint(front, b"far")
        q.release(front, front=True)
        q.release(back)
        q.push(b"waiting")
        q.push(b"keyed", key="a")
        q.push(b"keyed, in UTF-8", key="\u00e4")
        q.schedule(b"later", 4e15)
        q.schedule(b"keyed, later", 4e15, key="c")
    dies(dead)


# What an_old_life() left on 22 November 2026, before the inside of femtoqueue was turned around;
# <boot> is made up. What stands here is what other versions read and write: it is not changed.
AN_OLD_QUEUE: dict[str, bytes] = {
    "checkpoints/01795389972166194058-7447a2b0": b"FQ1 9aacd35a 24\nFQ1 1453a677 16\nhalf way",
    "checkpoints/01795389972194869204-7d81427b": b"FQ1 568099f2 18\nFQ1 fefb62f6 5\nfar",
    "clock-b0075eed": b"1795386282304985286\n",
    "done/01795389972194201178-7d81427b": b"FQ1 102de0ab 4\ndone",
    "failed/01795389972194487081-7d81427b": b"FQ1 9e8ba377 6\nfailed",
    "failed/01795389972194487081-7d81427b.error": b"why\nso\n",
    "inflight-dead/01795390002174693772~1~b0075eed~01795389972166194058-7447a2b0": (
        b"FQ1 1453a677 16\nof a dead worker"
    ),
    "inflight-dead/01795390002175222658~1~b0075eed~01795389972174965679-f1beeff9": (
        b"FQ1 3bbbae36 18 b\nof a key in flight"
    ),
    "inflight-dead/01795390002175875987~1~b0075eed~01795389972175702062-98dd4acc": (
        b"FQ1 a667a525 18 d\nof a key in flight"
    ),
    "inflight-n1/01795390002194112112~1~00000000~01795389972192662909-7d81427b": (
        b"FQ1 e1eefb96 8\ndetached"
    ),
    "keys/01795389972176802345-f1beeff9": b"FQ1 293b30c8 5 b\nnewer",
    "keys/04000000000000000000~0~01795389972192471662-98dd4acc": (
        b"FQ1 eaa17fa1 16 d\nnewer, and later"
    ),
    "keys/86b9df6f": b"c scheduled/04000000000000000000~0~01795389972196041330-86b9df6f -\n\n",
    "keys/98dd4acc": (
        b"d inflight-dead/01795390002175875987~1~b0075eed~01795389972175702062-98dd4acc"
        b" 04000000000000000000~0~01795389972192471662-98dd4acc\n\n"
    ),
    "keys/e8b7be43": b"a pending/01795389972195579118-e8b7be43 -\n\n",
    "keys/ed3e4e0a": b"%C3%A4 pending/01795389972195777207-ed3e4e0a -\n\n",
    "keys/f1beeff9": (
        b"b inflight-dead/01795390002175222658~1~b0075eed~01795389972174965679-f1beeff9"
        b" 01795389972176802345-f1beeff9\n\n"
    ),
    **dict.fromkeys(("locks/0a", "locks/43", "locks/6f", "locks/cc", "locks/f9"), b""),
    "pending/01795389972194869204~1~01795389972194869204-7d81427b": b"FQ1 fefb62f6 5\nfront",
    "pending/01795389972195334081~1~01795389972194816696-7d81427b": b"FQ1 6dcec137 4\nback",
    "pending/01795389972195364688-7d81427b": b"FQ1 68da8dae 7\nwaiting",
    "pending/01795389972195579118-e8b7be43": b"FQ1 9905554d 5 a\nkeyed",
    "pending/01795389972195777207-ed3e4e0a": b"FQ1 e4c09620 15 %C3%A4\nkeyed, in UTF-8",
    "scheduled/04000000000000000000~0~01795389972195894566-7d81427b": b"FQ1 ec03b249 5\nlater",
    "scheduled/04000000000000000000~0~01795389972196041330-86b9df6f": (
        b"FQ1 a997d51c 12 c\nkeyed, later"
    ),
}


class Compatibility(QueueCase):
    """What worked with femtoqueue 0.4.2, and what earlier versions left on disk."""

    def test_what_an_earlier_version_left_is_understood_and_delivered(self) -> None:
        for path, content in AN_OLD_QUEUE.items():
            os.makedirs(os.path.dirname(self.file(path)), exist_ok=True)
            self.put(path, content, "")
        q, clock = self.queue("n2"), self.clock()
        stats = q.stats()
        live = stats.pending, stats.scheduled, stats.inflight, stats.buffered
        self.assertEqual((*live, stats.done, stats.failed), (5, 2, 4, 2, 1, 1))
        self.assertEqual({finding.kind for finding in q.check()}, {"expired"})
        (failed,), (done,) = q.tasks("failed"), q.tasks("done")
        self.assertEqual((failed.data, failed.error, done.data), (b"failed", "why\nso", b"done"))
        clock.advance(31)  # its boot is another's
        got = []
        while task := q.pop():
            got.append((task.data, task.key, task.attempts, task.checkpoint))
            q.done(task)
        wanted: list[tuple[object, ...]] = [
            (b"of a dead worker", None, 2, b"half way"),  # this and two more were in flight
            (b"newer", "b", 1, None),
            (b"detached", None, 2, None),
            (b"front", None, 2, b"far"),
            (b"back", None, 2, None),
            (b"waiting", None, 1, None),
            (b"keyed", "a", 1, None),
            (b"keyed, in UTF-8", "\u00e4", 1, None),
        ]
        self.assertEqual(got, wanted)
        later = {task.data: task.key for task in q.tasks("scheduled")}
        self.assertEqual(later, {b"later": None, b"keyed, later": "c", b"newer, and later": "d"})
        # "newer, and later" is behind its task, which waits for that time.
        self.assertEqual(self.states(), {"done": 9, "failed": 1, "scheduled": 3, "keys": 1})

    def test_what_is_written_is_what_earlier_versions_read(self) -> None:
        """The same life leaves the same names and contents, but for what the clock, the boot and
        chance give."""
        an_old_life(self.path)
        written: dict[str, bytes] = {}
        for directory, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    written[os.path.relpath(path, self.path)] = file.read()
        self.assertEqual(self.shapes(written), self.shapes(AN_OLD_QUEUE))

    def shapes(self, files: dict[str, bytes]) -> list[bytes]:
        """Return names and contents, without what differs from life to life."""
        shapes = []
        for path, content in files.items():
            shape = os.fsencode(path) + b"\n" + content
            shape = re.sub(rb"\b[01][0-9]{18,19}\b", b"<ns>", shape)
            shape = re.sub(rb">-[0-7][0-9a-f]{7}\b", b">-<tag>", shape)
            shape = re.sub(rb"(~\d~|clock-)(?!00000000)[0-9a-f]{8}\b", rb"\1<boot>", shape)
            shapes.append(shape)
        return sorted(shapes)

    def test_its_arguments_keep_their_places_and_names(self) -> None:
        with FemtoQueue(self.path, "node1", 100, True) as q:
            given = q.data_dir, q.node_id, q.timeout_stale_ms, q.sync_after_write
            self.assertEqual(given, (self.path, "node1", 100, True))
        with FemtoQueue(data_dir=self.path, node_id="node1", timeout_stale_ms=100) as q:
            q.schedule(data=b"x", time_us=0)
            q.fail(task=_taken(q))
            q.push(data=b"x")
            q.done(task=_taken(q))
        self.assertEqual(self.states(), {"failed": 1, "done": 1})


# Waiting and running


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError("it did not happen")
        time.sleep(0.001)


Poll = Callable[[int], "list[Any]"]  # select.poll().poll


def hooked_poll(wait: Callable[[Poll, int], list[Any]]) -> Any:
    """Let femtoqueue wait at its descriptors by wait(poll, ms): poll(ms) is the system's call."""
    system_poll = select.poll

    def hooked() -> Any:
        poll = system_poll()
        return types.SimpleNamespace(
            register=poll.register, poll=functools.partial(wait, poll.poll)
        )

    return mock.patch("select.poll", hooked)


@contextlib.contextmanager
def sleepers(polling: bool = False) -> Iterator[set[int]]:
    """Gather the identifiers of the threads that sleep in a wait; polling: of those that look."""
    found: set[int] = set()

    def note(poll: Poll, ms: int) -> list[Any]:
        found.add(threading.get_ident())
        return poll(ms)

    with hooked(lambda *_: found.add(threading.get_ident())) if polling else hooked_poll(note):
        yield found


class Waiting(QueueCase):
    """Who waits is woken; that it was soon is the benchmark's to show."""

    polling = False  # class Polling: without inotify

    def setUp(self) -> None:
        super().setUp()
        if self.polling:
            self.patched(without_libc())

    def waiting(self, *works: Callable[[], object]) -> list[threading.Thread]:
        """Start each of them in a thread, and return when all of them wait."""
        threads = [threading.Thread(target=it, daemon=True) for it in works]
        with sleepers(self.polling) as asleep:
            for thread in threads:
                thread.start()
                self.addCleanup(thread.join, 60)
            until(lambda: all(it.ident in asleep or not it.is_alive() for it in threads))
        self.assertTrue(all(it.is_alive() for it in threads), "it did not wait")
        return threads

    def woken(self, wait: Callable[[], Any], happens: Callable[[], object]) -> Any:
        """Return what a wait returns that something ends, which happens while it waits."""
        got = list[Any]()
        (thread,) = self.waiting(lambda: got.append(wait()))
        happens()
        thread.join(60)
        (it,) = got
        return it

    @unittest.skipUnless(os.path.isdir("/proc/self/fd"), "no list of descriptors")
    def test_a_closed_queue_holds_no_descriptor_of_its_waits(self) -> None:
        """A user has 128 instances of inotify by default."""
        before = len(os.listdir("/proc/self/fd"))
        q: Any = self.queue()
        self.assertIsNone(q.pop(0.01))
        idle = list(q._worker.waits._idle)  # none where it polls

        def write(fd: int, value: int) -> None:
            q.close()
            os.fstat(fd)  # it may be another file's number otherwise

        with mock.patch("os.eventfd_write", write, create=True):
            while idle:
                idle.pop().wake()  # as another thread does, when that wait has just ended
        q.close()
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        self.assertIsNone(self.woken(lambda: q.pop(60), q.close))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)

    def test_what_another_does_wakes_who_waits(self) -> None:
        """A task that comes due, though it was scheduled meanwhile, before all others; resume(),
        and twice is no error; of a key, a first task, and one that its holder gives back; the death
        of a worker whose lease lasts for as long as it lives; and the end of another's lease.
        drain() and join() wait for what others have, and end as that does; join() takes nothing."""
        self.hasten("base interval", 0.05)

        def schedule(other: Any, at_s: float = 4e9) -> None:
            other.schedule(b"x", at_s * 1e6)

        def pause(other: Any) -> None:
            other.push(b"x")
            other.pause()

        def resume(other: Any, _: object) -> None:
            other.resume()
            other.resume()

        def drain(q: FemtoQueue, timeout: float | None) -> FemtoTask | None:
            return next(q.drain(timeout), None)

        def finish(other: Any, held: Any) -> None:
            other.push(b"behind", key="k")
            other.done(held)
            self.assertFalse(other.join(0))
            other.done(_taken(other))

        pop, join = FemtoQueue.pop, FemtoQueue.join
        take, keyed = (functools.partial(it, key="k") for it in (FemtoQueue.take, leased))
        rows: tuple[tuple[Any, Any, Callable[[Any, Any], Any], object], ...] = (
            (schedule, pop, lambda other, _: schedule(other, time.time() + 0.05), b"x"),
            (pause, pop, resume, b"x"),
            (lambda it: leased(it, key="y"), take, lambda it, _: it.push(b"x", key="k"), b"x"),
            (keyed, take, FemtoQueue.release, b"x"),
            (leased, pop, lambda other, _: dies(other), b"x"),
            (leased, pop, lambda other, held: other.extend(held, 50), b"x"),
            (leased, drain, lambda other, held: other.release(held, delay_s=0.05), b"x"),
            (leased, drain, FemtoQueue.done, None),
            (keyed, join, finish, True),
        )
        for before, wait, happens, result in rows:
            q, other = self.anew(), self.queue("n2", timeout_stale_ms=None)
            it = before(other)
            self.assertFalse(wait(q, timeout=0.01))
            happens_now = functools.partial(happens, other, it)
            got = self.woken(functools.partial(wait, q, timeout=None), happens_now)
            self.assertEqual(getattr(got, "data", got), result)
            self.assertEqual("inflight-n1" in os.listdir(self.path), wait != join)

    def test_it_gives_up_when_the_time_is_over_and_not_before(self) -> None:
        q = self.queue()
        started_s = time.monotonic()
        self.assertEqual((q.pop(0.05), q.take("key", 0.05), [*q.drain(0.05)]), (None, None, []))
        self.assertGreaterEqual(time.monotonic() - started_s, 0.1)

    def test_ctrl_c_gets_through_to_who_waits(self) -> None:
        q, waiter = self.queue(), threading.get_ident()
        with sleepers(self.polling) as asleep:

            def press() -> None:
                until(lambda: waiter in asleep)
                os.kill(os.getpid(), signal.SIGINT)

            with beside(press):
                self.assertRaises(KeyboardInterrupt, q.pop, None)

    def test_close_ends_all_waits_and_the_object_works_again(self) -> None:
        """Also of those who had just looked; none of them takes a place, or a task, afterwards."""
        if not self.polling:  # nothing but an event ends a sleep, nor that a directory goes
            self.patched(hooked_poll(lambda poll, ms: poll(2 * PATIENCE_S * 1000)))
        q, namesake, got = self.queue(), self.queue(), list[str]()
        self.assertIsNone(namesake.pop())
        q.push(b"held", key="k")
        held = self.pop(self.queue("n2"))
        wanted: dict[Callable[[], object], object] = {
            lambda: q.pop(None): None,
            lambda: q.take("k", None): None,
            lambda: q.take(id=held.id, timeout=60): None,
            lambda: [*q.drain()]: [],
            q.join: False,
            lambda: q.work(self.fail): femtoqueue.WorkCounts(),
        }
        threads = self.waiting(*(lambda it=it: got.append(str(it())) for it in wanted))
        q.close()
        for thread in threads:
            thread.join(60)
        self.assertEqual(sorted(got), sorted(map(str, wanted.values())))
        namesake.close()
        self.assertFalse(os.path.exists(self.file("inflight-n1")))
        q.push(b"again")
        self.assertEqual(self.pop(q).data, b"again")


class Polling(Waiting):
    """The same where there is no inotify."""

    polling = True


class Hearing(QueueCase):
    """What inotify must not miss."""

    def setUp(self) -> None:
        super().setUp()
        if through_seam("C library")() is None:
            self.skipTest("no inotify here: Polling covers what there is")

    def popped_after(self, *steps: Callable[[FemtoQueue], object]) -> bytes:
        """Pop, and do a step, with another queue object, each time that it goes to sleep, between
        its last look and the call. What it sleeps for is an event: its time is never over."""
        q, other, left = self.queue(), self.queue("n2"), deque(steps)

        def sleep(poll: Poll, ms: int) -> list[Any]:
            if threading.current_thread() is not threading.main_thread():
                return poll(ms)  # that of an earlier test, which waits for coroutines
            if left and not poll(0):
                left.popleft()(other)
            return poll(PATIENCE_S * 1000) or self.fail("it heard nothing")

        with hooked_poll(sleep):
            return _taken(q, 60).data

    def replace(self, directory: str, fresh: str = "fresh", old: str | None = "old") -> None:
        """Put an empty directory in the place of one of the queue's, as a person does; old: None,
        in that of an empty one, as the queue does."""
        os.mkdir(self.file(fresh))
        if old:
            os.rename(self.file(directory), self.file(old))
        os.rename(self.file(fresh), self.file(directory))

    def most_events(self) -> int:
        with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
            return int(file.read())

    def test_what_comes_before_the_wait_is_not_slept_over(self) -> None:
        """Nor is a push into a directory that took the place of a watched one just then."""

        def push(other: FemtoQueue) -> None:
            other.push(b"x")

        def push_and_replace(other: FemtoQueue) -> None:
            other.push(b"old")  # one read() has both events; the old watch would hear nothing more
            self.replace("pending")

        def flood_and_replace(other: FemtoQueue) -> None:
            names = self.put("a", b"foreign"), self.file("pending", "b")
            for _ in range(self.most_events() // 2 + 1):  # events are lost
                os.rename(names[0], names[1])
                os.rename(names[1], names[0])
            self.replace("pending")

        befores: list[tuple[Callable[[FemtoQueue], object], ...]] = [
            (),
            (push_and_replace,),
            (lambda other: self.replace("pending", "creating/fresh", None),),
            # It may list scheduled/ only later, which must be paid for; but it has heard.
            (lambda other: self.replace("scheduled"), lambda other: other.schedule(b"due", 0)),
        ]
        if self.most_events() <= 50_000:
            befores.append((flood_and_replace,))
        for before in befores:
            self.path = self.new_dir(self.memory)
            self.assertIn(self.popped_after(*before, push), (b"x", b"due"))

    def test_a_push_into_a_new_directory_that_is_not_watched_yet_is_not_slept_over(self) -> None:
        """It comes after the look that the replacement ended a sleep for."""
        pushes: list[Callable[[bytes], str]] = []

        def replace(other: FemtoQueue) -> None:
            self.replace("pending")
            pushes.append(other.push)

        def hear(event: str, args: tuple[Any, ...]) -> None:
            if event == "inotify" and pushes:
                pushes.pop()(b"x")

        with hooked(hear):
            self.assertEqual(self.popped_after(replace), b"x")

    def test_where_nothing_or_not_everything_is_heard_it_polls(self) -> None:
        """On a file system of several hosts, without inotify, and with no instance of it, or no
        watch, left."""
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
                q = self.queue(poll_interval_s=0.01)
                looks = calls_of("list", functools.partial(q.pop, 0.5))
            count = sum(path.endswith("pending") for path, *_ in looks)
            self.assertEqual(count > 6, polls)


class Coroutines(QueueCase, unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        """End a test that hangs: what it awaits is cancelled then."""
        loop = asyncio.get_running_loop()
        loop.set_debug(False)  # as users have it
        loop.call_later(PATIENCE_S, lambda: [it.cancel() for it in asyncio.all_tasks(loop)])

    async def test_close_just_before_a_wait_is_in_line_ends_it(self) -> None:
        """Else each look of it would take a task, and give it back, for ever."""
        q, loop = self.queue(), asyncio.get_running_loop()
        q.push(b"x")
        call_later = loop.call_later

        def close_first(*args: Any) -> Any:
            q.close()
            return call_later(*args)

        with mock.patch.object(loop, "call_later", close_first):
            waiter = asyncio.ensure_future(q.pop_async())
            await asyncio.sleep(0)
        self.assertIsNone(await asyncio.wait_for(waiter, 10))
        self.assertEqual(self.states(), {"pending": 1})

    async def test_a_wait_that_begins_as_the_thread_ends_has_one_thread(self) -> None:
        """Not two, each of which ends the other's."""
        q, clock = self.queue(), self.clock()
        monotonic, before = clock.monotonic, threading.enumerate()
        is_ending, go = threading.Event(), threading.Event()

        def reading() -> float:
            # The thread reads the clock to know that it is to end, and once more.
            if clock.monotonic_shift_s and threading.current_thread() not in before:
                is_ending.set()
                go.wait(0.1)
            return monotonic()

        def serving() -> int:
            return sum(it.daemon and it not in before for it in threading.enumerate())

        await q.pop_async(0)
        clock.monotonic = reading  # type: ignore[method-assign]
        clock.advance(60)
        self.assertTrue(await asyncio.to_thread(is_ending.wait, 60))
        waiter = asyncio.ensure_future(q.pop_async())
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.to_thread(until, lambda: serving() == 1)
        q.push(b"x")
        self.assertIsNotNone(await waiter)

    async def test_a_hundred_wait_half_are_cancelled_and_a_thousand_tasks_come(self) -> None:
        """Each who still waits gets one, the rest is there, nothing is leased to nobody."""
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
        self.assertEqual(attempts, {1}, "no delivery to nobody was counted")

    @FORK
    async def test_a_forked_child_does_not_give_back_what_its_parent_gets(self) -> None:
        """Its copy of the wait is cancelled as the child ends."""
        q, answered, loop = self.queue(), threading.Event(), asyncio.get_running_loop()
        q.push(b"x")
        tell = loop.call_soon_threadsafe

        def told(*args: Any) -> Any:
            answered.set()
            return tell(*args)

        with mock.patch.object(loop, "call_soon_threadsafe", told):
            waiter = asyncio.ensure_future(q.pop_async())
            await asyncio.sleep(0)
            answered.wait(PATIENCE_S)  # the loop does not run meanwhile
        pid = os.fork()
        if pid == 0:
            waiter.cancel()
            with contextlib.suppress(BaseException):
                await waiter
            os._exit(0)
        os.waitpid(pid, 0)
        self.assertIsNotNone(await waiter)
        self.assertEqual(self.states(), {"inflight-n1": 1})

    def test_ctrl_c_as_a_coroutine_gets_its_task_leaves_it_where_it_was(self) -> None:
        q = self.queue(max_attempts=1)
        later = q.schedule(b"x", time.time() * 1e6 + 3.6e9)
        before = self.names("scheduled")
        for number in itertools.count():
            loop = asyncio.new_event_loop()
            self.addCleanup(loop.close)
            interrupted = contextlib.suppress(KeyboardInterrupt)
            with at_line(number, interrupt, ("accept",)) as came, interrupted:
                loop.run_until_complete(q.take_async(id=later))
            if not came:
                break
            self.assertEqual(self.names("scheduled"), before, came)
        self.assertGreater(number, 1)

    async def test_what_is_found_for_a_wait_that_is_over_is_back_at_its_place(self) -> None:
        """Uncounted; also behind others, or in scheduled/: it must not come before its time. The
        loop runs on while a look takes long."""
        q = self.queue()
        retried, later = q.push(b"old"), q.schedule(b"later", time.time() * 1e6 + 3.6e9)
        q.fail(self.pop(q))
        q.push(b"1")
        q.retry(retried)
        looks: list[Any] = [functools.partial(q.take_async, id=it) for it in (retried, later)]

        def waiting() -> list[list[str]]:
            return [self.names(state) for state in ("pending", "scheduled")]

        before = waiting()
        for look, is_cancelled in itertools.product([q.pop_async, *looks], (True, False)):
            got, go = threading.Event(), threading.Event()

            def read_slowly(got: Any = got, go: Any = go) -> None:
                got.set()
                go.wait(2 * PATIENCE_S)

            reading = hooked(at_call("open", "inflight-n1/", read_slowly))
            with self.subTest(look, is_cancelled=is_cancelled), reading:
                waiter = asyncio.ensure_future(look())
                await asyncio.to_thread(got.wait, PATIENCE_S)
                if is_cancelled:
                    waiter.cancel()
                else:
                    await asyncio.to_thread(q.close)
                go.set()
                await asyncio.wait([waiter])
                self.assertEqual(waiter.cancelled(), is_cancelled)
                # A look that close() robbed of it may claim it again, and gives it back, too.
                await asyncio.to_thread(until, lambda: waiting() == before)
        self.assertEqual(self.pop(q).attempts, 1)

    async def test_first_come_first_served_and_each_key_has_a_line_of_its_own(self) -> None:
        q, order = self.queue(), list[bytes]()

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

    async def test_an_error_of_a_look_is_that_of_the_wait(self) -> None:
        q = self.queue()
        q.push(b"x", key="k")
        with hooked(at_call("move", "/pending/", raising(errno.EIO))):
            for look in (q.pop_async(), q.take_async("k")):
                with self.assertRaisesRegex(OSError, r"\[Errno 5\]"):
                    await look
        self.assertIsNotNone(await q.pop_async())

    async def test_time_out_also_of_those_who_were_never_first(self) -> None:
        """They look at least once: nobody leaves what is there."""
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

    def test_several_loops_and_threads_wait_at_one_object(self) -> None:
        q, got = self.queue(), list[bytes]()

        async def wait() -> None:
            tasks = await asyncio.gather(*(q.pop_async(60) for _ in range(5)))
            got.extend(task.data for task in tasks if task)

        loops = [lambda: asyncio.run(wait())] * 2
        with beside(*loops, lambda: got.append(_taken(q, 60).data)):
            q.push_many(b"%d" % number for number in range(11))
        self.assertEqual(sorted(got, key=int), [b"%d" % number for number in range(11)])


class PollingCoroutines(Coroutines):
    """The same where there is no inotify."""

    def setUp(self) -> None:
        super().setUp()
        self.patched(without_libc())


def no_more_threads() -> Any:
    """Let no thread be started."""
    return mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more"))


class Processing(QueueCase):
    def setUp(self) -> None:
        super().setUp()
        self.threads = {*threading.enumerate()}

    def new_threads(self) -> set[threading.Thread]:
        return {*threading.enumerate()} - self.threads

    def test_a_block_that_is_garbage_with_its_queue_ends_nothing(self) -> None:
        """As in a generator that nobody ends; the queue may be finalized first."""
        q = FemtoQueue(self.path)
        with q.processing(leased(q)):
            q.__del__()
        del q._worker  # and no other time
        self.assertEqual(self.states(), {"pending": 1})

    def test_how_the_block_ends_is_what_becomes_of_the_task(self) -> None:
        """Who is told to go gives it back to its place, uncounted, also at max_attempts. A lost
        lease of another task is an error as others."""
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
            q, raised = self.queue(max_attempts=max_attempts), None
            task = leased(q)
            q.push(b"next")
            try:
                with q.processing(task) as given:
                    self.assertIs(given, task)
                    if error is not None:
                        raise error
            except BaseException as it:
                raised = it
            self.assertIs(raised, error)
            self.assertEqual(self.check_invariants()[task.id], state)
            if state == "pending":
                again = self.pop(q)
                self.assertEqual((again.id, again.attempts), (task.id, 1))
                q.done(again)
            if state == "failed":
                self.assertRegex(reason_of(q, task.id), r"(?s)Traceback.*ValueError: no such image")
            q.done(self.pop(q))

    def test_an_exception_is_tried_again_after_a_delay_that_doubles(self) -> None:
        """A half of it at least, an hour at most."""
        q, clock = self.queue(retry_delay_s=100), self.clock()
        clock.stand_still()
        for attempts, longest_s in ((1, 100), (2, 200), (5, 1600), (7, 3600), (99_999, 3600)):
            delays_s = [self.delay_s(q, clock, attempts) for _ in range(50)]
            self.assertLessEqual(max(delays_s), longest_s)
            self.assertGreaterEqual(min(delays_s), longest_s / 2)
            self.assertGreater(len({*delays_s}), 10, "they come apart")

    def delay_s(self, q: FemtoQueue, clock: Clock, attempts: int) -> float:
        """Return for how long a task is put off when that delivery of it fails."""
        ident = q.push(b"x")
        name = f"{ident[:20]}~{attempts - 1}~{ident}"
        os.rename(self.file("pending", ident), self.file("pending", name))
        with contextlib.suppress(ValueError), q.processing(_taken(q)) as task:
            self.assertEqual((task.id, task.attempts), (ident, attempts))
            raise ValueError
        (name,) = self.names("scheduled")
        os.unlink(self.file("scheduled", name))
        return int(name[:20]) / 1e9 - clock.time()

    # Renewal

    def renewing_queue(self) -> FemtoQueue:
        """Return a queue that renews its leases every 20 ms, long before they end."""
        self.hasten("renewal", 0.01)
        return self.queue(timeout_stale_ms=2000)

    def until_renewed(self, *tasks: FemtoTask) -> None:
        """Wait until their leases have other names."""
        before = [task.path for task in tasks]
        until(lambda: all(a != b.path for a, b in zip(before, tasks, strict=True)))

    def left_s(self, task: FemtoTask, shift_s: float = 0) -> float:
        """Return for how long the lease of a task still lasts."""
        assert task.until is not None
        return task.until.timestamp() - time.time() - shift_s

    def test_a_handler_that_outlives_three_leases_keeps_its_own(self) -> None:
        q, other = self.queue(timeout_stale_ms=300), self.queue("n2", timeout_stale_ms=300)
        with q.processing(leased(q)):
            self.assertIsNone(other.pop(1))
        self.assertEqual(self.states(), {"done": 1})

    def test_one_thread_renews_for_all_and_ends_when_nothing_is_left(self) -> None:
        """A lease without an end needs none. An extension in a block lasts until the next renewal.
        (That no renewal shortens a lease is asserted by Model.)"""
        q, endless = self.renewing_queue(), self.queue("n2", timeout_stale_ms=None)
        with endless.processing(leased(endless)):
            self.assertEqual(self.new_threads(), set())
        first, second = leased(q), leased(q)
        with q.processing(first), q.processing(second):
            self.assertEqual(len(self.new_threads()), 1)
            q.extend(first, 10)
            self.assertGreater(self.left_s(first), 1)
            self.until_renewed(first, second)
        until(lambda: not self.new_threads())
        with q.processing(leased(q)) as task:
            self.until_renewed(task)

    def test_an_object_that_is_dropped_leaves_its_place_at_once_and_no_thread(self) -> None:
        """Though it took no lease, and only renewed that of another."""
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

    def test_a_lease_of_its_own_length_is_renewed_by_that(self) -> None:
        """A shorter one than those that are renewed already, too; one that is nearly over, as the
        block begins."""
        q, clock = self.queue(timeout_stale_ms=60_000), self.clock()
        q.push_many([b"old", b"long", b"short"])
        old = self.pop(q)
        clock.advance(59)
        long, short = self.pop(q), q.pop(lease_ms=60)
        assert short is not None
        lease = long.path
        with q.processing(old), q.processing(long), q.processing(short):
            self.assertGreater(self.left_s(old, clock.wall_shift_s), 59)
            self.until_renewed(short)
            self.assertEqual(long.path, lease)
        self.assertEqual(self.states(), {"done": 3})

    def test_a_renewal_that_fails_is_not_the_last(self) -> None:
        """Though its warning can't be written either, or its key is held up, by a process that is
        stopped. Nor does it keep others from theirs."""
        q, handler = self.renewing_queue(), logging.Handler()
        LOG.disabled = False
        LOG.addHandler(handler)
        self.addCleanup(LOG.removeHandler, handler)
        keyed = leased(q, key="k")
        with q.processing(leased(q)) as task, q.processing(leased(q)) as other, q.processing(keyed):
            with (
                self.locked("k"),
                hooked(at_call("move", task.id, raising(errno.EIO))),
                mock.patch.object(handler, "handle", side_effect=SystemExit) as handle,
            ):
                before = keyed.path
                until(lambda: handle.call_count > 3)
                self.until_renewed(other)
                self.assertEqual(keyed.path, before)
            self.until_renewed(task, keyed)
        self.assertEqual(self.states(), {"done": 3})

    def test_what_begins_in_vain_leaves_nothing_that_is_renewed_for_nobody(self) -> None:
        """A thread that can't be started is an error, and the next one is. Ctrl-C may come before
        the block is entered, or after, and before the `with` has noted it."""
        q = self.renewing_queue()
        task, start = leased(q), threading.Thread.start

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

    def test_a_lost_lease_is_told_at_either_end_and_nothing_is_changed(self) -> None:
        """With what the block raised as its cause; but who is told to exit does. What was never
        leased is no lease either."""
        for cause in (None, ValueError("the cause"), SystemExit("told")):
            q, other, clock = self.queue(), self.queue("n2"), self.clock()
            task = leased(q)
            with self.assertRaises((LeaseLost, SystemExit)) as caught, q.processing(task):
                clock.advance(31)
                newer = self.pop(other)
                if cause is not None:
                    raise cause
            error = caught.exception
            self.assertIs(error if isinstance(cause, SystemExit) else error.__cause__, cause)
            for it in (task, FemtoTask("0" * 20, b"")):
                with self.assertRaises(LeaseLost), q.processing(it):
                    self.fail("the block must not begin")
            self.assertEqual((newer.attempts, self.states()["inflight-n2"]), (2, 1))
            other.done(newer)

    @FORK
    def test_a_child_that_leaves_the_block_does_not_end_the_task(self) -> None:
        q = self.queue()
        block = q.processing(leased(q))
        with block:
            child = self.child(lambda _: block.__exit__(SystemExit, SystemExit(), None))
            self.assertEqual(child.finish()[1], 0)
            self.assertEqual(self.states(), {"inflight-n1": 1})

    # Checkpoints: what becomes of one as its task goes on, and of the lease, is asserted by Model

    def test_what_can_not_be_saved_leaves_the_former_and_what_is_torn_is_none(self) -> None:
        q = self.queue()
        task = leased(q)
        q.checkpoint(task, b"former")
        with hooked(at_call("move", f"checkpoints/{task.id}", raising(errno.EIO))):
            self.assertRaises(OSError, q.checkpoint, task, b"newer")
        self.check_invariants()
        q.release(task)
        task = self.pop(q)
        self.assertEqual(task.checkpoint, b"former")
        os.truncate(self.file("checkpoints", task.id), 20)
        q.release(task)
        self.assertIsNone(self.pop(q).checkpoint)

    def test_one_without_its_task_goes_after_an_hour(self) -> None:
        """Its task was ended by hand. One whose task waits stays for as long."""
        q, clock = self.queue(), self.clock()
        gone, kept = leased(q), leased(q)
        for task in (gone, kept):
            q.checkpoint(task, b"x")
            q.release(task)
        (name,) = (name for name in self.names("pending") if name.endswith(gone.id))
        os.unlink(self.file("pending", name))
        q.pause()
        for seconds, left in ((0, 2), (1000, 2), (3000, 1)):
            clock.advance(seconds)
            q.pop()
            self.assertEqual(len(self.names("checkpoints")), left)
        self.assertEqual(self.names("checkpoints"), [kept.id])


class Work(QueueCase):
    def test_it_counts_what_became_of_each_and_goes_on_after_a_failure(self) -> None:
        """Whatever the handler raised: also what can't be told. A lost lease is no failure."""
        q = self.queue(max_attempts=2, retry_delay_s=0)
        other, clock = self.queue("n2"), self.clock()
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
        with self.assertLogs("femtoqueue", "ERROR") as logs:
            counts = q.work(handle, drain=True)
        self.assertEqual(counts, femtoqueue.WorkCounts(done=3, retried=1, failed=1, lost=1))
        self.assertEqual(len(logs.output), 2)
        self.assertRegex(logs.output[1], r"(?s)dead letter.*Traceback.*Unspeakable")
        self.assertEqual(self.states(), {"done": 3, "failed": 1})

    def test_drain_waits_for_what_comes_later_and_for_others(self) -> None:
        """For longer than it waits for a task at a time."""
        self.hasten("base interval", 0.02)
        q, other = self.queue(), self.queue("n2", timeout_stale_ms=100)
        for concurrency in (1, 3):
            q.schedule(b"later", (time.time() + 0.1) * 1e6)
            counts = [q.work(lambda _: None, concurrency=concurrency, drain=True)]
            leased(other)
            counts += [q.work(lambda _: None, concurrency=concurrency, drain=True)]
            self.assertEqual([it.done for it in counts], [1, 1])

    def test_what_ends_it_is_heard_before_it_takes_more(self) -> None:
        """What runs is finished. What was not begun goes back uncounted, and so does the task of a
        handler that exits; one that can't be ended would be a dead letter in the end."""
        clock, stop = self.clock(), threading.Event()
        as_usual, claimed, ends = contextlib.nullcontext, "inflight-n1/", "/done/"
        rows: tuple[tuple[Callable[[], object], Callable[[], Any], Any, bool], ...] = (
            (stop.set, as_usual, None, True),
            (lambda: clock.advance(61), as_usual, None, True),
            (sys.exit, as_usual, SystemExit, False),
            (int, lambda: hooked(at_call("open", claimed, stop.set)), None, False),
            (int, lambda: hooked(at_call("move", ends, raising(errno.EIO))), OSError, False),
            (int, lambda: hooked(at_call("move", ends, interrupt)), KeyboardInterrupt, False),
            (int, no_more_threads, RuntimeError, False),
        )
        for concurrency, (happens, broken, error, is_done) in itertools.product((1, 2), rows):
            q, handled = self.anew(max_attempts=2), list[object]()
            q.push_many([b"x"] * 9)
            stop.clear()

            def handle(task: FemtoTask, handled: Any = handled, happens: Any = happens) -> None:
                handled.append(task)
                happens()

            raises = self.assertRaises(error) if error else contextlib.nullcontext()
            with self.subTest(error, concurrency=concurrency, is_done=is_done), raises, broken():
                q.work(handle, concurrency=concurrency, drain=True, stop=stop, time_limit_s=60)
            self.assertLessEqual(len(handled), concurrency)
            done = self.states()["done"]
            self.assertEqual(done, len(handled) if is_done else 0)
            again = Counter(task.attempts for task in iter(q.pop, None))
            failed = len(handled) if error in (OSError, KeyboardInterrupt) else 0
            self.assertEqual(again, Counter({1: 9 - done - failed, 2: failed}))

    def test_disk_trouble_of_pop_ends_it_when_what_runs_is_finished(self) -> None:
        """Unless a signal does, as it waits for that: a caller that goes on after an OSError would
        never hear it."""
        for number, is_signal in enumerate((False, True), 1):
            q, broken, counts = self.queue(), threading.Event(), None
            q.push(b"x")

            def fail(name: str, args: tuple[Any, ...], broken: threading.Event = broken) -> None:
                if name == "list" and args[0].endswith("pending") and not self.names("pending"):
                    broken.set()
                    fail_with(errno.ENOSPC)

            def handle(_: object, event: Any = broken, is_signal: bool = is_signal) -> None:
                event.wait(60)
                if is_signal:
                    os.kill(os.getpid(), signal.SIGTERM)

            with hooked(fail), contextlib.suppress(OSError):
                counts = q.work(handle, concurrency=2)
            self.assertEqual((counts is not None, self.states()), (is_signal, {"done": number}))

    def test_an_idle_worker_leaves_but_not_while_it_runs_a_task(self) -> None:
        """And whatever others have in flight."""
        q, other, second = self.queue(), self.queue("n2"), threading.Event()
        q.push_many([b"theirs", b"first"])
        self.assertEqual(self.pop(other).data, b"theirs")
        vain, pop = threading.Semaphore(0), FemtoQueue.pop

        def listened(q: FemtoQueue, timeout: float) -> FemtoTask | None:
            task = pop(q, timeout)
            if task is None:
                vain.release()
            return task

        def handle(task: FemtoTask) -> None:
            if task.data == b"first":
                for _ in range(2):  # the other thread finds nothing, and has not left
                    self.assertTrue(vain.acquire(timeout=30))
                q.push(b"second")
                self.assertTrue(second.wait(60))
            else:
                second.set()

        with mock.patch.object(FemtoQueue, "pop", listened):
            self.assertEqual(q.work(handle, concurrency=2, idle_timeout_s=0).done, 2)
            self.assertEqual(q.work(handle, idle_timeout_s=0).done, 0)

    def test_a_handler_of_signals_is_what_it_was_before(self) -> None:
        """And what is ignored, as by nohup, is ignored meanwhile, too."""
        q, numbers = self.queue(), (signal.SIGINT, signal.SIGTERM)
        q.push_many([b"x", b"x"])
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        before = [signal.getsignal(number) for number in numbers]
        counts = q.work(lambda _: os.kill(os.getpid(), signal.SIGINT), drain=True)
        after = [signal.getsignal(number) for number in numbers]
        self.assertEqual((counts.done, after), (2, before))

    @FORK
    def test_children_of_a_handler_are_ended_by_a_signal_as_ever(self) -> None:
        def terminate(_: Child) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_S)

        q, ends = self.queue(), list[int]()
        q.push(b"x")
        counts = q.work(lambda _: ends.append(self.child(terminate).finish()[1]), drain=True)
        self.assertEqual((ends, counts.done), ([-signal.SIGTERM], 1))

    def test_a_signal_finishes_what_runs_and_a_second_one_gives_it_back(self) -> None:
        """To its place, and uncounted; no more is taken. Two at once are one, as timeout(1) sends
        them, to a process and to its group. (CommandLine has the signals of another process.) As
        many run at a time as were asked for: they meet at a barrier."""
        for concurrency, end, one_signal_s in (
            (1, "done", PATIENCE_S),
            (1, "released", 0),
            (2, "released", 0),
        ):
            q, begun, is_over = self.anew(), threading.Barrier(concurrency), threading.Event()
            q.push_many([b"0", b"1", b"2"])

            def handle(_: object, end: str = end, begun: Any = begun, over: Any = is_over) -> None:
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


class Checking(QueueCase):
    def kinds(self, q: FemtoQueue, repair: bool = False) -> list[tuple[str, str, bool]]:
        return [(it.kind, it.path, it.repaired) for it in q.check(repair)]

    def test_what_is_safe_to_mend_is_mended_and_the_rest_is_told_and_left_alone(self) -> None:
        """What was mended is found no more."""
        q, clock, dead = self.queue(), self.clock(), self.queue("dead")
        self.foreign = ("notes.txt", "x.tmp")
        order = q.push(b"x")[:20]
        self.pop(dead)
        dies(dead)
        q.push(b"k", key="k")
        os.unlink(self.file("pending", self.names("pending")[-1]))
        ident = q.push(b"x")
        rubbish = {
            f"pending/{order}-0000bbbb": b"torn",
            f"creating/{order}-0000aaaa": b"torn",
            "notes.txt": b"",
            "failed/x.tmp": b"",
            f"done/{ident}": b"FQ1 00000000 1\nx",
        }
        for path, content in rubbish.items():
            self.put(path, content, "")
        clock.advance(3700)
        wanted = (
            ("foreign", "notes.txt", False),
            ("foreign", "failed/x.tmp", False),
            ("corrupt", f"pending/{order}-0000bbbb", True),
            ("twice", f"done/{ident}", False),
            ("corrupt", f"done/{ident}", False),
            ("dead worker", "inflight-dead", True),
            ("key without a task", f"keys/{self.names('keys')[0]}", True),
            ("leftover", f"creating/{order}-0000aaaa", True),
        )
        self.assertEqual(self.kinds(q), [(kind, path, False) for kind, path, _ in wanted])
        self.assertEqual(self.kinds(q, repair=True), [*wanted])
        for repair in (False, True):
            self.assertEqual(self.kinds(q, repair), [it for it in wanted if not it[2]])
        os.unlink(self.file("done", ident))
        self.assertEqual(self.states(), {"pending": 2, "failed": 1})

    def test_workers_that_come_and_go_meanwhile_are_no_findings(self) -> None:
        q, gone, fresh = self.queue(), self.file("inflight-gone"), self.file("inflight-fresh")

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

    def test_a_torn_copy_never_takes_the_place_of_a_whole_dead_letter(self) -> None:
        """Neither by repair nor by pop()."""
        q = self.queue()
        for mend in (lambda: q.check(repair=True), q.pop):
            task = leased(q)
            q.fail(task, "why")
            self.put(task.id, b"torn")
            mend()
            letters = [name for name in self.names("failed") if name.endswith(task.id)]
            self.assertEqual((len(letters), reason_of(q, task.id)), (2, "why\n"))
            self.assertEqual(q.peek(task.id), FemtoTask(task.id, b"x", None))
            for name in self.names("failed"):
                os.unlink(self.file("failed", name))

    def test_an_error_of_a_signal_handler_ends_it(self) -> None:
        """A TimeoutError is an OSError, and has no errno."""
        q = self.queue()
        q.push(b"x")
        for event, of in (("open", "/pending/"), ("list", "/failed")):
            with hooked(at_call(event, of, mock.Mock(side_effect=TimeoutError))):
                self.assertRaises(TimeoutError, q.check)

    def test_what_can_not_be_read_is_told_and_the_rest_is_looked_at(self) -> None:
        q = self.queue()
        self.put(f"{1:020d}-0000aaaa", b"torn")
        with hooked(at_call("list", "/failed", raising(errno.EACCES))):
            kinds = {it.kind for it in q.check()}
        self.assertEqual(kinds, {"unreadable", "corrupt"})
        with hooked(at_call("move", "/failed", raising(errno.EACCES))):
            self.assertEqual({*q.check(repair=True)}, {*q.check()})
        q.pop()

    def test_clocks_and_file_systems_that_are_odd_are_told(self) -> None:
        with on_file_system(NFS):
            q, clock = self.queue(), self.clock()
        clock.wall_shift_s -= 3600
        found = q.check()
        self.assertEqual([it.kind for it in found], ["network file system", "clock"])
        self.assertIn("NFS", found[0].text)
        self.assertIn("3600 s ahead", found[1].text)


# Under what they show: commands, and after -> or in lines of their own what each says, on standard
# output, then, after !, on standard error, and last its status, if not 0. After ->, white space is
# one space; in lines, spaces are. ... is anything, alone any lines. <name> is an id, or, as
# <lease...>, the path of a lease; from there on it is that one, also as $name in a command. Two
# names are two values. Besides the shell's commands: `states` counts the tasks in each directory,
# `payloads STATE` prints payloads.
LEASE = rf"inflight-\w+/[0-9]{{20}}~[0-9]+~0{{8}}~{ID}"
TRANSCRIPTS = r"""
# push takes arguments, standard input, its lines and its pieces, and prints ids
$ femtoqueue push jobs 'a b' x -> <a> <b>
$ femtoqueue push jobs -- --not-an-option -> <c>
$ printf 'whole\ninput\n' | femtoqueue push jobs -> <d>
$ printf '1\n\n2' | femtoqueue push jobs --lines --sync -> <e> <f> <g>
$ printf 'p\nq\0r' | femtoqueue push jobs -0 -> <h> <i>
$ payloads pending -> a b, x, --not-an-option, whole\ninput\n, 1, , 2, p\nq, r
$ ls jobs/pending -> <a> <b> <c> <d> <e> <f> <g> <h> <i>
# of a key one task waits, also behind the one in flight; --if-in-flight reject is an error
$ femtoqueue push jobs 1 --key 'user 42' -> <first>
$ femtoqueue push jobs 2 --key 'user 42' -> <first>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue push jobs 3 --key 'user 42' --if-in-flight reject -> ! femtoqueue: ... [1]
$ states -> inflight-cli 1
$ femtoqueue push jobs 3 4 --key 'user 42' -> <new> ...
$ femtoqueue show jobs $new -> state buffered ... key user%2042 node - 4
# push --delay, and --at a local time or another
$ femtoqueue push jobs later --delay 1h -> <later>
$ TZ=EET-2 femtoqueue push jobs local --at 2050-12-01T08:00 -> <local>
$ TZ=EET-2 femtoqueue push jobs utc --at 2050-12-01T08:00:00Z -> <utc>
$ ls jobs/scheduled -> ...~0~<later> 02553487200000000000~0~<local> 02553494400000000000~0~<utc>
$ femtoqueue ls jobs scheduled -> ... scheduled <later> ...s 0 5 ...m - - ...
# FEMTOQUEUE_DIR is DIR, and then no word is
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
$ femtoqueue --help -> ... If FEMTOQUEUE_DIR is set, no word is DIR. ...
# a lease outlives pop, until done, fail or release; the path that it prints is the fence
$ printf '1\n2\n3' | femtoqueue push jobs --lines -> <a> <b> <c>
$ femtoqueue pop jobs | cat -> <lease_a>
$ tail -n +2 jobs/$lease_a -> 1
$ femtoqueue pop jobs | cat -> <lease_b>
$ femtoqueue pop jobs --payload --node me && echo ' is all' -> 3 is all ! <lease_c>
$ femtoqueue pop jobs -> [1]
$ states -> inflight-cli 2, inflight-me 1
$ femtoqueue extend jobs $lease_b --timeout 1h -> <lease_longer>
$ femtoqueue done jobs $lease_b -> ! ...task <b>: it is not in flight by that name (any more) [1]
$ femtoqueue ls jobs -> ... inflight <b> ...s 1 1 ...m - cli ...
$ femtoqueue done jobs $lease_a
$ femtoqueue fail jobs $c --reason 'no such image'
$ femtoqueue release jobs $(basename $lease_longer)
$ states -> done 1, failed 1, pending 1
$ femtoqueue done jobs $lease_a $lease_longer -> ! ...task <a>: ... ! ...task <b>: ... [1]
$ femtoqueue fail jobs $lease_c -> ! ...task <c>: it is not in flight by that name (any more) [1]
$ femtoqueue ls jobs | cut -d' ' -f 1 -> STATE pending failed
$ femtoqueue ls jobs --all | cut -d' ' -f 1 -> STATE pending done failed
$ femtoqueue ls jobs failed pending -> ... failed <c> ...s - 1 - - - pending <b> ...
$ femtoqueue show jobs $c -> state failed ... attempts - ... reason no such image 3
# pop takes a task by its id, due or not, or waits for a key
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
# release gives back all that is in flight, or all that a worker has
$ femtoqueue push jobs 1 2 3 4 -> <a> <b> <c> <d>
$ femtoqueue pop jobs --node n1 -> <lease_a>
$ femtoqueue pop jobs --node n2 -> <lease_b>
$ femtoqueue pop jobs --node n2 -> <lease_c>
$ femtoqueue release jobs --node nobody -> released 0
$ femtoqueue release jobs --node n2 --front -> released 2
$ femtoqueue release jobs --all -> released 1
$ femtoqueue done jobs $lease_a $lease_c -> ! ...task <a>: ... ! ...task <c>: ... [1]
$ payloads pending -> 2, 3, 4, 1
# cancel deletes what waits, due or not, and says what does not
$ femtoqueue push jobs held again waiting -> <held> <again> <waiting>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue release jobs $(femtoqueue pop jobs)
$ femtoqueue push jobs later --delay 1h -> <later>
$ femtoqueue cancel jobs $waiting $held 00000000000000000001-0000aaaa $later
! femtoqueue: task <held> is not waiting, or the queue is paused
! femtoqueue: task 00000000000000000001-0000aaaa is not waiting, or the queue is paused
[1]
$ states -> inflight-cli 1, pending 1
$ femtoqueue pause jobs
$ femtoqueue cancel jobs $again -> ! ...task <again> is not waiting, or the queue is paused [1]
$ femtoqueue resume jobs
$ femtoqueue cancel jobs $again
$ states -> inflight-cli 1
# ls and show tell of each task; a key of any form is one word, what is not known a dash
$ femtoqueue push jobs 12345 --key "$(printf 'a b\n/\303\251:@-._~')" -> <keyed>
$ femtoqueue push jobs x -> <x>
$ femtoqueue push jobs later --delay 2h -> <later>
$ femtoqueue release jobs --front $(femtoqueue pop jobs)
$ femtoqueue pop jobs --timeout 1h -> <lease>
$ echo torn > jobs/pending/00000000000000000001-0000aaaa
$ femtoqueue ls jobs
STATE ID AGE TRY BYTES LEFT KEY NODE
pending 00000000000000000001-0000aaaa ... 0 - - - -
pending <x> ...s 0 1 - - -
scheduled <later> ...s 0 5 2.0h - -
inflight <keyed> ...s 2 5 ...m a%20b%0A/%C3%A9:@-._~ cli
$ femtoqueue ls jobs inflight --json
{"state": "inflight", "id": "<keyed>", ... "key": "a b\n/\u00e9:@-._~", "node": "cli"}
$ femtoqueue show jobs $keyed -> state inflight id <keyed> ... a%20b%0A/%C3%A9:@-._~ node cli 12345
$ femtoqueue show jobs $keyed --payload && echo ' is all' -> 12345 is all
$ femtoqueue show jobs 00000000000000000002-0000aaaa -> ! ...no task 0...2-0000aaaa [1]
$ printf 'FQ1 00000000 0 %0300d\n' 0 > jobs/pending/00000000000000000001-f000aaaa
$ femtoqueue ls jobs pending | awk '{ print NF, length($7) }' -> 8 3 8 1 8 300 8 1
# stat counts, and is a monitor; where there is no terminal, top prints blocks
$ femtoqueue push jobs x x -> <a> <b>
$ femtoqueue pop jobs -> <lease>
$ femtoqueue stat jobs -> pending 1 scheduled 0 inflight 1 ... workers_unknown 1 paused False
$ femtoqueue stat jobs --json --max-pending 1 --max-age 1h -> {"pending": 1, "scheduled": 0, ...}
$ femtoqueue stat jobs --max-pending 0 -> pending 1 ... [1]
$ femtoqueue stat jobs --max-age 0s -> ... [1]
$ femtoqueue push late x --at 2026-01-01T00:00 -> <late>
$ femtoqueue stat late --max-age 1h -> pending 0 scheduled 1 ... [1]
$ femtoqueue top jobs --interval 10ms | grep -e cli -e ^pending | head -n 4
pending 1
inflight <a> ...s 1 1 ...s - cli
pending 1
inflight <a> ...s 1 1 ...s - cli
# pause, resume, retry, check and purge
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
$ echo torn > jobs/pending/00000000000000000001-0000aaaa
$ femtoqueue check jobs -> corrupt pending/00000000000000000001-0000aaaa ... odd [1]
$ femtoqueue check jobs --repair -> corrupt pending/00000000000000000001-0000aaaa ... mended ! ...
$ femtoqueue check jobs
$ femtoqueue done jobs $(femtoqueue pop jobs)
$ states -> done 1, failed 1
$ femtoqueue purge jobs --older-than 0 -> 1
$ femtoqueue purge jobs --older-than 0 --failed -> 1
# a pipe that closes, a full disk and closed descriptors are no tracebacks, and lose no task
$ seq 5000 | femtoqueue push large --lines > ids; femtoqueue ls large | head -n 1 -> STATE ...NODE
$ { until [ -e gone ]; do :; done; seq 2; } | femtoqueue push jobs --lines | { exec <&-; >gone; }
$ femtoqueue push jobs x >&- 2>&- <&-
$ femtoqueue pop jobs > /dev/full -> ! femtoqueue: ... No space left on device [2]
$ { until [ -e read ]; do :; done; femtoqueue pop jobs; echo $? > status; } | { exec <&-; >read; }
! femtoqueue: task ... is given back: nobody reads
$ cat status -> 1
$ femtoqueue pop jobs --payload > /dev/full -> ! femtoqueue: ... No space left on device [2]
$ femtoqueue top jobs > /dev/full -> ! femtoqueue: ... No space left on device [2]
$ femtoqueue work jobs --drain -- echo x > /dev/full -> ! ... No space left on device ! ... [2]
$ femtoqueue ls jobs | grep -c ' 0  *1 ' -> 3
$ payloads pending -> 1, 2, x
# work runs a command for each task, its payload as standard input, and passes its lines on
$ femtoqueue push jobs 1 2 -> ...
$ femtoqueue push jobs keyed --key ü -> ...
$ head -c 100000 /dev/zero | femtoqueue push jobs -> ...
$ PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C femtoqueue work jobs -q -j 2 --drain -- sh -c \
 'wc -c; echo "$FEMTOQUEUE_KEY $FEMTOQUEUE_ATTEMPT" >&2; printf end' > out 2> err
$ sort out -> 1 1 100000 5 end end end end
$ sort err -> 1 1 1 ü 1
$ states -> done 4
# {} in an argument is the payload, bytes as they are; standard input has them too
$ printf ' $HOME {} \377\n' | femtoqueue push jobs -> ...
$ femtoqueue push jobs '' -> ...
$ femtoqueue work jobs -q --drain -- sh -c 'printf "<%s|%s|%s>" "$@"; cat' {} {} 'a{}b{}' c
< $HOME {} \xff
|a $HOME {} \xff
b $HOME {} \xff
|c> $HOME {} \xff
<|ab|c>
# a payload that can't be an argument is a dead letter at once, and the worker goes on
$ printf 'a\0b' | femtoqueue push jobs -> <null>
$ head -c 10000000 /dev/zero | tr '\0' x | femtoqueue push jobs -> <large>
$ femtoqueue push jobs good -> <good>
$ femtoqueue work jobs -q --drain -- echo {}
good
! ... <null>: try 1 failed, a dead letter: the payload can't be an argument...: embedded null byte
! ... <large>: try 1 failed, a dead letter: the payload can't be an argument... too long: ...
[1]
$ cat jobs/failed/$null.error -> the payload can't be an argument ...: embedded null byte
$ femtoqueue retry jobs --all -> 2
$ femtoqueue work jobs -q --drain -- sh -c 'wc -c' -> 3 10000000
# a command that fails is tried again, and then its task is a dead letter
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --max-attempts 2 --retry-delay 1ms --sync -- sh -c \
 'echo try $FEMTOQUEUE_ATTEMPT; echo no such image >&2; exit 3'
try 1
try 2
! no such image
! ... <x>: try 1 failed, to be retried: exit status 3
! no such image
! ... <x>: try 2 failed, a dead letter: exit status 3
[1]
$ cat jobs/failed/$x.error -> exit status 3 no such image
# its output goes to files, if so wanted; where they are deleted, the reason is kept
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --output-dir logs -- sh -c 'echo out; echo err >&2'
$ tail logs/* -> ==> logs/<x>.err <== err ==> logs/<x>.out <== out
$ femtoqueue push jobs y -> <y>
$ femtoqueue work jobs -q --drain --output-dir logs --max-attempts 1 -- sh -c \
 'echo why >&2; rm logs/*; exit 3' -> ! ... [1]
$ cat jobs/failed/$y.error -> exit status 3 why
# a command that can't be run is no fault of the task's; one that ends as a shell then does, is
$ femtoqueue push jobs x -> <x>
$ echo '#!/no/interpreter' > script; chmod +x script
$ femtoqueue work jobs -q --drain -- ./script -> ! ... ! femtoqueue: ./script can't be run [2]
$ femtoqueue work jobs -q --drain -j 2 -- ./script -> ! ... ! femtoqueue: ./script can't be run [2]
$ femtoqueue ls jobs -> ... pending <x> ...s 0 1 - - -
$ femtoqueue work jobs -q --drain --max-attempts 1 -- sh -c no-such-command -> ! ... [1]
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain --max-attempts 1 -- \
 sh -c 'echo femtoqueue: no queue >&2; exit 127' -> ! ... [1]
$ states -> failed 2
# a signal finishes what runs, though nobody hears of it: a terminal that is gone, a full disk
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -- sh -c 'kill -HUP $PPID' 2> /dev/full
$ states -> done 1
$ femtoqueue push jobs x -> ...
$ { femtoqueue work jobs -q -- sh -c 'echo 1; kill -INT $PPID; sleep 0.5; echo 2; echo 3'; \
 echo $? > status; } | head -n 1 -> 1 ! ! femtoqueue: finishing what runs; ...
$ cat status -> 0
$ states -> done 2
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q -- sh -c 'kill -INT $PPID; sleep 0.1; echo' > /dev/full
...
! femtoqueue: [Errno 28] No space left on device
[2]
$ states -> done 2, pending 1
# work ends when a payload is too large for TMPDIR; the next one takes others first
$ head -c 100000 /dev/zero | femtoqueue push jobs -> <large>
$ femtoqueue push jobs y -> <y>
$ ulimit -f 60; femtoqueue work jobs -q -- true -> ! ... File too large [2]
$ femtoqueue ls jobs -> ... <y> ... <large> ...
# what a command leaves running does not hold up work, though it has the pipes, or writes on
$ femtoqueue push jobs x y -> ...
$ femtoqueue work jobs -q --drain -- sh -c '(sleep 1000) & echo $!' > pids
$ kill $(cat pids)
$ femtoqueue push jobs x -> ...
$ femtoqueue work jobs -q --drain -- sh -c '(while :; do echo; sleep 0.01; done) & echo $!' > pids
$ kill $(cat pids)
$ states -> done 3
# work --drain that ends sooner says so by its status; it keeps what is done for as long as asked
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --time-limit 0s -- true -> [1]
$ femtoqueue pop jobs -> <lease>
$ femtoqueue work jobs -q --drain --idle-timeout 0s -- true -> [1]
$ femtoqueue release jobs --all -> released 1
$ touch jobs/pending/.not-ours
$ femtoqueue work jobs --drain --time-limit 1h --keep-done 1h -- true
! femtoqueue: done 1, waiting 0
$ rm jobs/pending/.not-ours
$ states -> done 1
$ femtoqueue push jobs y -> <y>
$ femtoqueue work jobs -q --drain --keep-done 0s -- true
$ states -> none
# a command that takes too long is killed, with all its group
$ femtoqueue push jobs x -> <x>
$ femtoqueue work jobs -q --drain --max-attempts 1 --task-timeout 100ms --time-limit 5s -- sh -c \
 'sleep 1000 & echo $! $$; wait' > pids -> ! ... [1]
$ gone pids
$ cat jobs/failed/$x.error -> killed after 0.1s
$ femtoqueue push jobs y -> ...
$ femtoqueue work jobs -q --task-timeout 100ms -- sh -c \
 'sleep 1000 & echo $!; kill -INT $PPID; exit 130' > pids -> ! ...
$ gone pids
$ states -> failed 1, pending 1
# what work --drain can not hand out has failed for good; its DIR is where a link's .. is not
$ femtoqueue push jobs x -> <x>
$ echo torn > jobs/pending/$x
$ mkdir elsewhere elsewhere/inside; ln -s elsewhere/inside link
$ femtoqueue work link/../jobs --drain -- true
! ... task <x> is in failed/: ...
! femtoqueue: waiting 0
[1]
$ femtoqueue push jobs 'touch jobs/failed/.note.swp' -> ...
$ femtoqueue work jobs -q --drain -- sh -c {}
# a command that a signal ends alone has failed, also if a parent ignores its children
$ femtoqueue push jobs TERM KILL -> ...
$ env --ignore-signal=CHLD femtoqueue work jobs -q --drain --max-attempts 1 --time-limit 20s -- \
 sh -c 'kill -{} $$'
! ... try 1 failed, a dead letter: killed by signal 15
! ... try 1 failed, a dead letter: killed by signal 9
[1]
# a reader of work that leaves fails no task: what it had not read, the next worker tells of
$ femtoqueue push jobs 1 2 3 4 5 6 7 8 9 -> ...
$ echo 'echo $1; test $1 = 1 || head -c 100000 /dev/zero' > more-than-a-pipe-holds
$ { femtoqueue work jobs --max-attempts 1 -- sh more-than-a-pipe-holds {}; echo $? > status; } | \
 head -n 1 -> 1 ! ...
$ cat status -> 2
$ states -> done ..., pending ...
$ femtoqueue release jobs --all -> released 0
# lines of two commands are not mixed, though they come in pieces; those of one are, as they come
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
        """Wait until it ends, unless the block failed: it may never do so then."""
        if error[0] is not None:
            self.kill()
        super().__exit__(*error)

    def begun(self, count: int) -> list[str]:
        """Return the first lines of that many commands."""
        return [self.stdout.readline().decode().strip() for _ in range(count)]

    def stop(self, number: int, second: int | None = None) -> None:
        """Signal it, and, when it has heard of that, by a second signal, once more."""
        self.send_signal(number)
        heard = self.stderr.readline(), self.stderr.readline()
        demand(b"finishing what runs" in heard[1], f"it said {heard}")
        if second is not None:
            time.sleep(2 * constant("one signal"))  # what comes too soon is no second one
            self.send_signal(second)
            self.communicate(timeout=120)


def until_gone(*pids: int | str) -> None:
    """Wait until processes have ended, though perhaps nobody has waited for them."""

    def is_gone(pid: int | str) -> bool:
        with (
            contextlib.suppress(ProcessLookupError, FileNotFoundError),
            open(f"/proc/{pid}/stat", encoding="ascii") as file,
        ):
            return file.read().rpartition(")")[2].split()[0] == "Z"
        return True

    until(lambda: all(map(is_gone, pids)))


def run_guarded(*words: str, env: Mapping[str, str], path: str = ".") -> tuple[int, str, str]:
    """Return a command's status, and what it says. If it hangs, it is ended, and says where."""
    env, pipe = {**env, "PYTHONFAULTHANDLER": "1"}, subprocess.PIPE
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    settings |= {"env": env, "cwd": path, "stdout": pipe, "stderr": pipe, "encoding": "utf-8"}
    with subprocess.Popen(words, errors="backslashreplace", **settings) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            out, err = process.communicate(timeout=PATIENCE_S)  # else a pipe is all that is open
    return process.returncode, out, err


class CommandLine(QueueCase):
    """Each command through main(). In this process, unless the test is about processes: those run
    what the compiler makes of femtoqueue.py, in a directory that holds nothing else."""

    bin: str  # a directory that holds femtoqueue.pyc, and the command

    @classmethod
    def setUpClass(cls) -> None:
        cls.bin = tempfile.mkdtemp(prefix="femtoqueue-test-")
        cls.addClassCleanup(shutil.rmtree, cls.bin, ignore_errors=True)
        source, compiled = (os.path.join(it, "femtoqueue.py") for it in (HERE, cls.bin))
        py_compile.compile(source, f"{compiled}c", doraise=True)
        command = os.path.join(cls.bin, "femtoqueue")
        with open(command, "w", encoding="utf-8") as file:
            file.write(f"#!{sys.executable} -SWerror\n{cls.python({})[-1]}\n")
        os.chmod(command, 0o755)

    @classmethod
    def python(cls, waits: dict[str, float]) -> list[str]:
        """Return the words that run femtoqueue.pyc, with some of CONSTANTS."""
        constants = {CONSTANTS[name]: seconds for name, seconds in waits.items()}
        code = f"import sys; sys.path[0] = {cls.bin!r}; import femtoqueue; "
        code += f"vars(femtoqueue).update({constants}); sys.exit(femtoqueue.main())"
        return [sys.executable, "-S", "-W", "error", "-c", code]

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.path)
        self.path = os.path.join(self.path, "jobs")
        others = "FEMTOQUEUE_DIR", "PYTHONUNBUFFERED"  # users have it buffered
        ours = {name: it for name, it in os.environ.items() if name not in others}
        ours |= {"PATH": f"{self.bin}:{ours['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env = {**ours, "COLUMNS": "80"}

    def patient(self) -> list[str]:
        """Return the words that run femtoqueue.pyc, which waits for as long as we would."""
        return self.python({it: constant(it) for it in ("one signal", "grace")})

    def run_it(self, *words: str) -> tuple[int, str, str]:
        """Run a command in this process; what may start others, alone."""
        if words[:1] == ("work",) and "--" in words and hasattr(vars(femtoqueue)["os"], "fork"):
            return run_guarded(*self.patient(), *words, env=self.env)
        outputs = io.BytesIO(), io.BytesIO()
        out, err = (io.TextIOWrapper(it, "utf-8", write_through=True) for it in outputs)
        with (
            mock.patch.dict(os.environ, self.env, clear=True),
            mock.patch.multiple(sys, stdin=io.TextIOWrapper(io.BytesIO()), stdout=out, stderr=err),
            mock.patch.object(LOG, "disabled", False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            try:
                status = femtoqueue.main([*words])
            except SystemExit as end:
                status = int(end.code or 0)
        return status, outputs[0].getvalue().decode(), outputs[1].getvalue().decode()

    def ok(self, *words: str) -> str:
        """Run it, and return what it prints: nothing went wrong."""
        status, out, err = self.run_it(*words)
        self.assertEqual((status, err), (0, ""), words)
        return out

    def test_transcripts(self) -> None:
        """Each of TRANSCRIPTS comes out as it stands there, in a directory of its own."""
        for transcript in TRANSCRIPTS.split("\n# ")[1:]:
            claim, *steps = transcript.rstrip().split("\n$ ")
            with self.subTest(claim):
                os.chdir(self.new_dir(self.memory))
                self.path, names = os.path.abspath("jobs"), dict[str, str]()
                for step in steps:
                    self.follow(step, names)

    def follow(self, step: str, names: dict[str, str]) -> None:
        """Run the command of a step; what it says must be as wanted. names: what stands for what,
        from now on with those of this step."""
        parts = re.fullmatch(r"((?:.*\\\n)*.*?)(?: -> (.*)|\n((?s:.*))|)", step)
        assert parts is not None
        said = self.said(re.sub(r"\$(\w+)", lambda it: names.get(it[1], it[0]), parts[1]))
        if parts[2]:
            said, wanted = " ".join(said.split()), self.pattern(parts[2], names)
        else:
            said, lines = re.sub(" {2,}", " ", said), parts[3].split("\n") if parts[3] else []
            any_lines = {"...": "(?:.*\n)*", "! ...": "(?:! .*\n)*"}
            wanted = "".join(any_lines.get(it) or self.pattern(it, names) + "\n" for it in lines)
        found = re.fullmatch(wanted, said)
        self.assertIsNotNone(found, f"{step}\n\nsaid, with {names}:\n{said}")
        names.update(found.groupdict() if found else {})
        self.assertEqual(len({*names.values()}), len(names), names)

    def pattern(self, text: str, names: dict[str, str]) -> str:
        """Return the regular expression of what is wanted."""

        def named(name: re.Match[str]) -> str:
            form = LEASE if name[1].startswith("lease") else ID
            return re.escape(names[name[1]]) if name[1] in names else f"(?P<{name[1]}>{form})"

        return re.sub(r"<(\w+)>", named, re.escape(text).replace(r"\.\.\.", ".*"))

    def said(self, command: str) -> str:
        """Return what a command says, and its status. One of femtoqueue that needs no shell runs in
        this process, and so does one whose output is a part of a command."""
        part = r"\$\((femtoqueue [^()]*)\)"
        command = re.sub(part, lambda it: self.ok(*shlex.split(it[1])[1:]).strip(), command)
        words = shlex.split(command)
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
            status, out, err = self.run_it(*words[1:])
        else:
            status, out, err = run_guarded("sh", "-c", command, env=self.env)
        lines = [*out.removesuffix("\n").split("\n")] if out else []
        lines += [f"! {line}" for line in err.splitlines()]
        lines += [f"[{status}]"] if status else []
        return "".join(f"{line}\n" for line in lines)

    def test_push_with_sync_syncs(self) -> None:
        for words in ((), ("--sync",)):
            synced = calls_of("fsync", functools.partial(self.ok, "push", "jobs", "x", *words))
            self.assertEqual(bool(synced), bool(words))

    # A part of what is said, and what is typed, TASK being a task's id.
    WRONG_USES: tuple[tuple[str, ...], ...] = (
        ("required: COMMAND; see femtoqueue --help", ""),
        ("invalid choice: 'nonsense' (choose from", "nonsense"),
        ("invalid choice: 'jobs' (choose from", "jobs push x"),
        ("; see femtoqueue --help", "--wait 1s pop jobs", "-- push jobs"),
        ("required: DIR; see femtoqueue push --help", "push"),
        ("required: ID; see femtoqueue", "done TASK", "cancel jobs", "show jobs"),
        ("required: --older-than; see femtoqueue purge --help", "purge jobs"),
        ("expected one argument; see femtoqueue pop --help", "pop jobs --wait"),
        ("unrecognized arguments: -x; see femtoqueue push --help", "push jobs -x"),
        ("unrecognized arguments: -l; see femtoqueue work --help", "work jobs ls -l"),
        ("unrecognized arguments: --until=1s; see femtoqueue pop --help", "pop jobs --until=1s"),
        ("unrecognized arguments: x; see", "pop jobs x", "stat jobs x", "show jobs TASK x"),
        ("argument ID: invalid 'why'", "fail jobs TASK why", "cancel jobs why"),
        ("argument --id: invalid '7'; an ID is the end of a task's name", "pop jobs --id 7"),
        ("the end of a task's name, or the path that `pop` printed", "cancel jobs TASK~1"),
        ("a TIME is 500ms, 30s", "push jobs --delay 3weeks x"),
        ("2026-12-01T08:00", "push jobs --at noon x"),
        ("invalid int value: 'many'", "stat jobs --max-pending many"),
        ("not allowed with", "push jobs --at 2050-12-01 --delay 1 x", "pop jobs --id TASK --key k"),
        ("not allowed with", "release jobs TASK --front --delay 1", "release jobs --all --node n"),
        ("for an empty task, give '' as PAYLOAD", "push jobs"),
        ("leave PAYLOAD out", "push jobs --lines x"),
        ("--if-in-flight goes with --key", "push jobs --if-in-flight update 1"),
        ("put the command after --", "work jobs", "work jobs echo hi", "work jobs echo -- hi"),
        ("command not found", "work jobs -- no-such-command"),
        ("must be 1 or more", "work jobs -j 0 -- true", "work jobs -j -1 -- true"),
        ("must be greater than 0", "work jobs --timeout 0 -- true"),
        ("A-Z a-z 0-9 . _ -", "work jobs --node a/b -- true"),
        ("give IDs, --all or --node; see", "release jobs", "release jobs TASK --all"),
        ("give each ID, or --all", "retry jobs", "retry jobs --all TASK"),
        ("pending: there is no queue; push makes one", "ls pending"),
    )
    WRONG_USES_OF_A_QUEUE = (
        ("must be greater than 0", "pop jobs --timeout 0s"),
        ("key must be 1 to 200 bytes", f"push jobs --key {'k' * 201} 1"),
        ("if_in_flight must be buffer or update", "push jobs --key k --if-in-flight never 1"),
        ("state must be one of pending, scheduled", "ls jobs pendng"),
        ("jobs/file: there is no queue", "ls jobs/file"),
        ("jobs/file", "push jobs/file x"),
    )

    def test_wrong_use_is_one_line_that_says_what_to_type(self) -> None:
        """With status 2, and nothing is made or changed."""
        for text, *lines in self.WRONG_USES:
            for line in lines:
                self.check_wrong(line.replace("TASK", f"{1:020d}-0000aaaa"), text)
        with mock.patch.object(femtoqueue, "os", fake_os("fork")):
            self.check_wrong("work jobs -- true", "use FemtoQueue.work()")
        isdir, words = os.path.isdir, ["work", "jobs", "--drain", "--", "true"]
        no_fds = mock.patch("os.path.isdir", lambda path: path != "/dev/fd" and isdir(path))
        with no_fds, mock.patch.object(sys, "stderr", io.StringIO()) as said:
            self.assertRaises(SystemExit, femtoqueue.main, words)
        self.assertIn("no fork() or /dev/fd here", said.getvalue())
        self.assertFalse(os.path.exists(self.path))
        self.queue().push(b"x")
        self.put("file", b"", "")
        for text, line in self.WRONG_USES_OF_A_QUEUE:
            self.check_wrong(line, text)
        with hooked(at_call("stat", "jobs/pending", raising(errno.EACCES))):
            self.check_wrong("ls jobs", "Permission denied")
        self.assertEqual(self.states(), {"pending": 1})

    def check_wrong(self, line: str, text: str) -> None:
        status, out, err = self.run_it(*line.split())
        self.assertEqual((status, out, err.count("\n")), (2, "", 1), f"{line}\n{err}")
        self.assertIn(text, err)

    def test_help_fits_a_terminal_of_80_columns_and_has_an_example_for_each_command(self) -> None:
        overview = self.ok("--help")
        names = re.findall(r"(?m)^    ([a-z]+) ", overview)
        self.assertEqual(len(names), 17)
        texts = {name: self.ok(name, "--help") for name in names}
        for name, text in texts.items():
            self.assertTrue(text.count("\n") <= 24 or name == "work", name)
            self.assertRegex(text, f"Example: .*femtoqueue {name} jobs")
            self.assertIn(f"\n    {name:9} {text.split(chr(10) * 2)[1]}\n", overview)
        for line in "\n".join([overview, *texts.values()]).split("\n"):
            self.assertLessEqual(len(line), 80, line)
        self.assertEqual(self.ok("--version"), f"femtoqueue {femtoqueue.__version__}\n")

    def test_release_gives_back_what_is_renewed_as_it_looks(self) -> None:
        q = self.queue(detached=True)
        q.push_many([b"1", b"2"])
        self.pop(q), self.pop(q)

        def renew() -> None:
            *_, last = self.names("inflight-n1")
            renewed = f"{int(last[:20]) + 10**9:020}{last[20:]}"
            os.rename(self.file("inflight-n1", last), self.file("inflight-n1", renewed))

        with hooked(at_call("move", None, renew, times=1)):
            self.assertEqual(self.ok("release", "jobs", "--all"), "released 2\n")
        self.assertEqual(self.states(), {"pending": 2})

    def test_pop_that_is_interrupted_before_it_prints_leaves_nothing_leased(self) -> None:
        self.queue().push(b"x")
        with mock.patch("builtins.print", side_effect=KeyboardInterrupt):
            self.assertEqual(femtoqueue.main(["pop", self.path]), 128 + signal.SIGINT)
        self.assertEqual(self.pop(self.queue()).attempts, 1)

    def test_top_draws_what_fits_on_its_terminal_anew_until_ctrl_c(self) -> None:
        """In whatever size that has now, to the last line and column."""
        q, terminal = self.queue(), io.BytesIO()
        sizes = deque(map(os.terminal_size, [(100, 24), (12, 7), (60, 30)]))
        task = leased(q, key="user:42")

        def sleep(_: object) -> None:
            sizes.popleft()
            if len(sizes) == 1:
                q.done(task)
                q.push(b"y")
            elif not sizes:
                interrupt()

        with (
            mock.patch.dict(os.environ, COLUMNS="0", LINES="0"),  # as if they were not set
            mock.patch("os.get_terminal_size", side_effect=lambda _: sizes[0]),
            mock.patch("time.sleep", sleep),
            mock.patch.object(sys, "stdout", io.TextIOWrapper(terminal, "utf-8")) as out,
            mock.patch.object(out, "isatty", return_value=True),
        ):
            self.assertEqual(femtoqueue.main(["top", "jobs"]), 128 + signal.SIGINT)
        _, *looks = terminal.getvalue().decode().split("\x1b[H\x1b[2J")
        large, small, later = (look.splitlines() for look in looks)
        self.assertEqual([large[1].split()[1], large[3].split()], ["0", ["inflight", "1"]])
        self.assertRegex("\n".join(large), r"\Ajobs (?s:.*)\nworkers_alive +1\n")
        self.assertRegex(large[14], rf"^inflight +{task.id} .* user:42 n1$")
        self.assertEqual((len(small), len(small[0]), small[3].strip()), (6, 12, "inflight"))
        self.assertEqual((len(later), later[1].split()), (14, ["pending", "1"]))

    # work

    def test_work_tells_of_its_progress_as_tasks_end(self) -> None:
        """The next one waits where looking takes long: of what ends just then it may say nothing.
        (TRANSCRIPTS: at the end alone if that comes within 10 s, and nothing with --quiet.)"""
        self.queue(None).push_many([b"x"] * 3)
        command = (*self.python({"report": 0.0}), "work", "jobs", "--drain", "--", "true")
        said = run_guarded(*command, env=self.env)[2].splitlines()
        lines = [f"femtoqueue: done {done}, waiting {3 - done}" for done in (1, 2, 3)]
        self.assertEqual((said[0], said[-1]), (lines[0], lines[-1]))
        self.assertLessEqual({*said}, {*lines})

    def working(self, script: str, *words: str) -> Command:
        """Work by a shell's script, in a process of its own."""
        command = [*self.patient(), "work", "jobs", "-q", *words, "--", "sh", "-c", script]
        pipe = subprocess.PIPE
        process = Command(command, env=self.env, stdin=pipe, stdout=pipe, stderr=pipe)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def let_go_on(self, process: Command, count: int = 1) -> tuple[bytes, bytes]:
        """Let as many commands go on that read the fifo; return what the process then says."""
        with open("fifo", "wb", buffering=0) as fifo:
            fifo.write(b"\n" * count)
            return process.communicate(timeout=120)

    def end_all(self, states: dict[str, int]) -> None:
        """Check the states, and that no try was counted of what waits; end that."""
        self.assertEqual(self.states(), states)
        q = self.queue()
        for task in iter(q.pop, None):
            self.assertEqual(task.attempts, 1)
            q.done(task)
        for name in self.names("done"):
            os.unlink(self.file("done", name))

    def test_a_stop_that_no_wait_hears_of_is_known_before_what_it_ended_is_judged(self) -> None:
        """A signal that comes just before a wait does not end that."""
        code = "from signal import *; from threading import Thread; join = Thread.join\n"
        code += "def deaf_join(thread, timeout):\n    old = pthread_sigmask(SIG_BLOCK, {SIGINT})\n"
        code += "    join(thread, timeout), pthread_sigmask(SIG_SETMASK, old)\n"
        code += "Thread.join = deaf_join\n"
        *words, main = self.patient()
        self.queue(None).push(b"x")
        script = "work", "jobs", "-q", "--", "sh", "-c", "kill -INT $PPID; exit 130"
        self.assertEqual(run_guarded(*words, code + main, *script, env=self.env)[0], 0)
        self.end_all({"pending": 1})

    def test_what_ends_of_the_second_signal_is_given_back_when_all_of_it_has_ended(self) -> None:
        """It goes to each command's group. Not when a shell has ended is its task given back, but
        when its program has; and what ended well is done."""
        self.hasten("one signal", 0.05)
        self.hasten("grace", 0.3)
        see = "while sleep 0.01; do ls jobs/pending | grep $FEMTOQUEUE_ID >> seen; done"
        script = f"""read x; case $x in
            group) sleep 1000 & echo $!; wait ;;
            hangs) trap '' TERM; echo $$; {see} ;;
            program) sh -c "trap '' TERM; echo \\$\\$; {see}" & wait ;;
            well) trap 'exit 0' TERM; echo $$; while sleep 0.01; do :; done ;;
        esac"""
        for names in ("group", "group group group", "hangs program well"):
            self.queue().push_many(map(str.encode, names.split()))
            count, well = len(names.split()), names.count("well")
            with self.working(script, "-j", str(count)) as process:
                pids = process.begun(count)
                process.stop(signal.SIGINT, signal.SIGTERM)
            self.assertEqual(process.returncode, 128 + signal.SIGTERM)
            until_gone(*pids)
            self.end_all({"pending": count - well} | ({"done": well} if well else {}))
        self.assertEqual(os.path.getsize("seen"), 0)

    def test_a_stop_finishes_what_runs_and_a_try_that_it_ended_is_no_failure(self) -> None:
        """And no more is taken. A scheduler signals the worker and CMD, in either order. A CMD that
        does not die of it has then heard of the stop; one that ends well has done its task. If a
        program outlives its shell, to save its state, the task is not another's until it ends."""
        waits, dies = "echo $$; read x < fifo", "echo $$; exec sleep 1000"
        saves = "(read x < fifo; ls jobs/pending | grep $FEMTOQUEUE_ID >> seen) & echo $$; wait"
        exits = "trap 'exit %d' TERM HUP USR1; echo $$; while sleep 0.01; do :; done"
        orders = (  # what CMD does, which signal, who hears it first, and what becomes of the task
            (waits, signal.SIGTERM, "worker", "done"),
            (dies, signal.SIGTERM, "worker", "pending"),
            (dies, signal.SIGTERM, "CMD", "pending"),
            (dies, signal.SIGUSR1, "worker", "pending"),
            (dies, signal.SIGHUP, "CMD", "pending"),
            (exits % 143, signal.SIGTERM, "CMD", "pending"),
            (exits % 143, signal.SIGHUP, "worker", "pending"),
            (exits % 1, signal.SIGTERM, "worker", "pending"),
            (exits % 1, signal.SIGTERM, "CMD", "pending"),
            (exits % 0, signal.SIGTERM, "worker", "done"),
            (saves, signal.SIGTERM, "worker", "pending"),
            (saves, signal.SIGTERM, "CMD", "pending"),
        )
        self.hasten("one signal", 60)  # CMD's end is slow to be seen, and so is a worker's signal
        os.mkfifo("fifo")
        for jobs, (script, number, first, state) in zip((2, 1) * 6, orders, strict=True):
            with self.subTest(script, number=number, first=first):
                more = 2 if first == "worker" else 0
                self.queue().push_many([b"x"] * (jobs + more))
                with self.working(script, "-j", str(jobs), "--max-attempts", "1") as process:
                    pids = [int(pid) for pid in process.begun(jobs)]
                    if first == "worker":
                        process.stop(number)
                    for pid in pids if script != waits else ():
                        os.kill(pid, number)
                    if first == "CMD":
                        until_gone(*pids)
                        process.send_signal(number)
                    if script == saves:
                        self.assertRaises(subprocess.TimeoutExpired, process.wait, 0.2)
                    if "fifo" in script:
                        self.let_go_on(process, jobs)
                    process.wait(PATIENCE_S)
                self.assertEqual(process.returncode, 0)
                self.end_all(Counter({state: jobs}) + Counter(pending=more))
        self.assertEqual(os.path.getsize("seen"), 0)

    @unittest.skipUnless(os.path.exists("/proc/thread-self/children"), "needs /proc")
    def test_a_worker_whose_watchdog_is_killed_finishes_what_runs_and_leaves(self) -> None:
        """A signal to all processes of a job does not end the watchdog."""
        self.queue().push_many([b"x"] * 4)
        os.mkfifo("fifo")
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            with self.working("echo $$; read x < fifo", "--max-attempts", "1") as process:
                (command,) = map(int, process.begun(1))
                with open(f"/proc/{process.pid}/task/{process.pid}/children", "rb") as file:
                    (watchdog,) = {*map(int, file.read().split())} - {command}
                os.kill(watchdog, number)
                if number != signal.SIGKILL:
                    process.kill()
                    until_gone(command)
                    continue
                until_gone(watchdog)
                _, err = self.let_go_on(process)
        self.assertEqual(process.returncode, 2)
        self.assertIn(b"watchdog", err)
        self.end_all({"done": 1, "failed": 2, "pending": 1})

    def test_signals_end_work_though_nobody_reads_what_it_says(self) -> None:
        """They find output that is stuck; and if it is standard error, a log line that is, too."""
        self.hasten("one signal", 0.1)
        self.hasten("grace", 0.3)
        for output, to in (("stdout", ""), ("stderr", ">&2")):
            self.queue().push_many([b"fails", b"writes"])
            script = f"read x; if test $x = fails; then sleep 0.2; exit 1; fi; yes {to}"
            words = ("-j", "2", "--max-attempts", "1")
            with self.subTest(output), self.working(script, *words) as process:
                select.select([getattr(process, output)], [], [], 120)
                until(lambda: len(self.names("failed")) == 2)  # it is full by then
                process.send_signal(signal.SIGTERM)
                time.sleep(2 * constant("one signal"))
                for _ in range(6):  # two may be heard as one
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(20)
                        break
                self.assertEqual(process.returncode, 128 + signal.SIGTERM)
            self.end_all({"pending": 1, "failed": 1})
            self.queue().purge(0, "failed")

    def test_a_killed_worker_leaves_no_command_and_its_tasks_are_anothers_at_once(self) -> None:
        """Whatever it had told the watchdog by then: each command tells of itself first."""
        self.queue().push_many([b"x"] * 30)
        for begun in (1, 5, 20):
            words = ("-j", "30", "--max-attempts", "9", "--timeout", "1000s")
            with self.working("echo $$; exec sleep 1000", *words) as process:
                pids = process.begun(begun)
                process.kill()
                pids += process.stdout.read().decode().split()  # until nobody has it any more
            until_gone(*pids)
        self.assertEqual(len(self.drain(self.queue(None))), 30)


# Words and weight


class Documents(QueueCase):
    """What the README and the docstring say runs as it stands, in a directory that holds
    femtoqueue.py and nothing else. (.ci/lint.py has what reads their text.)"""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())
        self.go_to(self.path)

    def go_to(self, path: str) -> None:
        """Work in a directory from here on, beside a copy of femtoqueue.py."""
        os.chdir(path)
        shutil.copy(os.path.join(HERE, "femtoqueue.py"), ".")

    def run_it(self, *command: str) -> str:
        """Run a command, and return what it prints: nothing goes wrong."""
        status, out, err = run_guarded(*command, env=os.environ)
        self.assertEqual((status, err), (0, ""), command[-1])
        return out

    def run_python(self, code: str) -> str:
        return self.run_it(sys.executable, "-S", "-W", "error", "-c", code)

    def blocks(self, language: str = "") -> list[tuple[str, str]]:
        """Return the README's blocks of code, each with its language; or those of one language."""
        with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
            found = re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", file.read())
        return [it for it in found if language in ("", it[0])]

    def block(self, start: str, language: str = "python") -> str:
        """Return the only block that has this text."""
        (found,) = (code for _, code in self.blocks(language) if start in code)
        return found

    def plain(self, text: str) -> list[str]:
        """Return lines without what differs each time: ids, deadlines, times, and widths."""
        for pattern, plain in (
            (r"\d{20}~(?=\d+~)", "DEADLINE~"),
            (r"\d{20}-[0-9a-f]{8}", "ID"),
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

    def test_each_program_of_the_readme_prints_what_it_says(self) -> None:
        """What stands in the block of text after it, or in comments behind its print()s. One whose
        first line is the name of a file is part of a service, which has a test of its own."""
        blocks, count = [*self.blocks(), ("", "")], 0
        for (language, code), (next_language, text) in itertools.pairwise(blocks):
            if language != "python" or re.match(r"# \w+\.py\n|import os, time|.*\bhashlib", code):
                continue
            said = re.findall(r"(?m)^ *print\(.*\)  # (.*)$", code)
            wanted = text.splitlines() if next_language == "text" else said
            count += 1
            self.go_to(self.new_dir(self.memory))
            with self.subTest(code):
                self.assertEqual(self.run_python(code).splitlines(), wanted)
        self.assertGreater(count, 10)

    def test_the_import_brings_no_heavy_modules(self) -> None:
        heavy = {
            *("argparse", "asyncio", "concurrent.futures", "ctypes", "datetime", "json"),
            *("logging", "queue", "select", "selectors", "shutil", "signal", "subprocess"),
            *("tempfile", "traceback"),
        }
        code = f"import femtoqueue, sys; print({heavy} & {{*sys.modules}})"
        self.assertEqual(self.run_python(code).strip(), "set()")

    def sh(self, script: str) -> str:
        """Run a script, in which `femtoqueue` is the command; return all that it prints."""
        python = f"{sys.executable} -W error"
        begin = f'python3() {{ {python} "$@"; }}; femtoqueue() {{ python3 -m femtoqueue "$@"; }}'
        env = {**os.environ, "LC_ALL": "C"}
        return run_guarded("sh", "-uc", f"{begin}\nexec 2>&1\n{script}", env=env)[1]

    @FORK
    def test_each_transcript_shows_what_its_commands_print(self) -> None:
        """But ids, times and the widths of columns."""
        transcripts = [text for _, text in self.blocks("console") if "curl" not in text]
        self.assertGreater(len(transcripts), 3)
        for text in transcripts:
            self.go_to(self.new_dir(self.memory))
            commands = re.findall(r"(?m)^\$ (.*)$", text)
            said = self.sh("\n".join(f"echo {shlex.quote(f'$ {it}')}\n{it}" for it in commands))
            with self.subTest(text):
                self.assertEqual(self.plain(said), self.plain(text))

    @FORK
    def test_the_script_of_files_works_on_each_name(self) -> None:
        said = self.sh(self.block("photos", "sh"))
        for text in ("photos/a b.jpg", "photos/c.jpg", '"pending": 0, "scheduled": 0, "inflight"'):
            self.assertIn(text, said)
        self.assertNotIn("waits too long", said)

    @FORK
    def test_the_web_service_takes_tasks_that_the_worker_beside_it_does(self) -> None:
        """It says what its transcript says. Its port is another one, which is free."""
        import http.client
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process: Any = None
        parts = [code for _, code in self.blocks("python") if re.match(r"# \w+\.py\n", code)]
        for code in parts:
            self.put(code[2 : code.index("\n")], code.replace("8000", str(port)).encode(), "")
            worker = [sys.executable, code[2 : code.index("\n")]]
            process = subprocess.Popen(worker, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self.addCleanup(process.communicate)
            self.addCleanup(process.kill)
        worked = process.stdout  # of worker.py, the last of them

        def ask(method: str, path: str, body: str | None = None) -> str:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request(method, path, body)
                return connection.getresponse().read().decode()

        def has_answered() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                return bool(ask("GET", "/"))
            return False

        until(has_answered)
        (transcript,) = (text for _, text in self.blocks("console") if "curl" in text)
        said = [ask("POST", "/", "42.png")]
        self.assertEqual(worked.readline(), b"resizing 42.png\n")
        path = "/" + json.loads(said[0])["id"]
        until(lambda: "done" in ask("GET", path))
        said += [ask("GET", path), ask("GET", "/unknown")]
        shown = [it for it in transcript.splitlines() if not it.startswith("$")]
        self.assertEqual(
            self.plain("".join(said)), [*self.plain("\n".join(shown)), '{"state": null}']
        )

    def test_the_long_work_resumes_where_a_killed_worker_stopped(self) -> None:
        """Its worker is killed after seven rows; the next one saves the last three only."""
        work = self.block('q.push(b"10 rows")')
        dying = f"import os\n{work}\n            if row == 6: os.kill(os.getpid(), 9)\n"
        died = subprocess.run([sys.executable, "-c", dying], check=False)
        self.assertEqual(died.returncode, -signal.SIGKILL)
        again = re.sub(r'q\.push\(b"10 rows"\).*\n', "", work) + "\n            print(row, end=' ')"
        self.assertEqual(self.run_python(again), "7 8 9 ")

    def test_a_second_delivery_changes_nothing(self) -> None:
        """As after a death between the commit of the database and done()."""
        import sqlite3

        for _ in range(2):
            self.run_python(self.block("db = "))
            for name in self.names("jobs/done"):
                os.rename(f"jobs/done/{name}", f"jobs/pending/{name}")
        with contextlib.closing(sqlite3.connect("app.db")) as db:
            rows = db.execute("SELECT data FROM invoices").fetchall()
        self.assertEqual(rows, [(b"invoice 7",)] * 2)  # of three deliveries

    @FORK
    def test_the_nightly_job_is_there_once_after_two_starts(self) -> None:
        nightly = self.block("if not q.contains")
        due = "at_s = q.peek(key='backup').until.timestamp(); "
        due += "print(q.stats().scheduled, at_s % 86400, 0 < at_s - time.time() <= 86400)"
        self.assertEqual(self.run_python(f"{nightly}\n{nightly}\n{due}"), "1 0.0 True\n")

    @FORK
    def test_the_pool_of_the_unit_file_works_and_stops_when_systemd_says_so(self) -> None:
        ((_, unit),) = self.blocks("ini")
        settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
        command = settings["ExecStart"].replace("/srv/jobs", "jobs")
        command = command.replace("/usr/local/bin/femtoqueue", f"{sys.executable} -m femtoqueue")
        command = command.replace("/usr/local/bin/resize", "cat")
        FemtoQueue("jobs").push_many([b"a\n", b"b\n"])
        drained = f"{sys.executable} -c 'from femtoqueue import *; FemtoQueue(\"jobs\").join()'"
        said = self.run_it("sh", "-c", f"{command} 2> err & {drained}; kill $!; wait $!")
        self.assertEqual((sorted(said.split()), settings["Restart"]), (["a", "b"], "always"))

    @FORK
    def test_the_commands_of_cron_and_of_the_image_work_on_what_is_pushed(self) -> None:
        """A job of yesterday that was not done does not wait twice; the last is that of PID 1."""
        push, work = (it.split(None, 5)[5] for it in self.block("--key", "crontab").splitlines())
        words = json.loads(self.block("CMD", "dockerfile").partition("CMD ")[2])
        self.assertEqual(words.pop(0), "python")
        image = f"python3 {shlex.join(words).replace(' work ', ' work -q --drain ')}"
        for name in ("report", "resize"):
            os.chmod(self.put(name, b"#!/bin/sh\ncat; echo\n", ""), 0o755)
        script = "\n".join((push, push, work.replace("10s", "0s"), push, image))
        for place, here in (("/usr/local/bin/femtoqueue", "femtoqueue"), ("/usr/local/bin", ".")):
            script = script.replace(place, here)
        said = self.sh(re.sub("(/srv)?/jobs", "jobs", script)).splitlines()
        self.assertEqual((said[0], said[2]), (said[1], "nightly report"))
        self.assertNotEqual(said[0], said[3])
        self.assertEqual(said[4:], ["nightly report"])

    @FORK
    def test_an_element_of_the_slurm_array_gives_back_what_it_can_not_finish(self) -> None:
        """And one with nothing to do leaves. The scheduler signals the shell only."""
        script = self.block("#SBATCH", "bash")
        for here, there in (("sleep 45", "sleep 1"), ("5m", "0s"), ("python3", sys.executable)):
            self.assertIn(here, script)
            script = script.replace(here, there)
        self.put("element", script.encode(), "")
        os.chmod(self.put("task.sh", b"#!/bin/sh\necho begun\nexec sleep 1000\n", ""), 0o755)
        said = self.run_it(
            *("sh", "-c"),
            f"""export SLURM_CPUS_PER_TASK=2 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=1
            exec 2> err; sh element && {sys.executable} -m femtoqueue push jobs x
            sh element > out & until [ -s out ]; do sleep 0.01; done
            ls -d jobs/inflight-7-1; kill $!; wait $!; echo $?""",
        )
        self.assertRegex(said, r"\A.*\njobs/inflight-7-1\n143\n\Z")
        task = FemtoQueue("jobs").pop()
        self.assertEqual(task and (task.data, task.attempts), (b"x", 1))

    def test_the_idea_of_it_works_on_bare_system_calls(self) -> None:
        """In at most 25 lines, and from a second process as from the first."""
        code = self.block("import os, time")
        self.assertLessEqual(len(code.splitlines()), 25)
        for state in ("creating", "pending", "inflight", "done"):
            os.mkdir(state)
        for number in (1, 2):
            self.assertRegex(self.run_python(code), r"\Aworking on \d{20}-[0-9a-f]{8}\n\Z")
            self.assertEqual(len(os.listdir("done")), number)

    # The program that drains a queue of femtoqueue 0.4.2 into a new one

    def write_old(
        self, state: str, time_us: int, payload: bytes, digest: bytes | None = None
    ) -> str:
        """Write a task as 0.4.2 does: a version, 7 zero bytes, the md5 of the payload, and it. Its
        name is the time in microseconds, and the text of a method that it forgets to call."""
        name = f"{time_us}_<built-in method hex of bytes object at 0x7f{time_us % 997:010x}>"
        os.makedirs(os.path.join("old", state), exist_ok=True)
        content = b"\1" + bytes(7) + (digest or hashlib.md5(payload).digest()) + payload
        return self.put(name, content, f"old/{state}")

    def test_what_waits_or_was_in_progress_comes_over_in_its_order_and_at_its_time(self) -> None:
        """What is corrupt or finished stays, and a second run adds nothing."""
        now_us = int(time.time() * 1e6)
        due_us = now_us + 3600 * 10**6
        payloads = [b"0", b"1", b"2", b"3", b""]
        states = "node2", "node1", "pending", "pending", "pending"
        for number, (state, payload) in enumerate(zip(states, payloads, strict=True)):
            self.write_old(state, now_us - 9000 + number, payload)
        self.write_old("scheduled", due_us, b"later")
        stay = [self.write_old("pending", 10**15, b"torn", bytes(16))]
        stay += [self.write_old(state, 10**15, b"x") for state in ("creating", "done", "failed")]
        q, code = FemtoQueue("new"), self.block("import hashlib")
        for _ in range(2):
            self.assertEqual(self.run_python(code), "")
            self.assertEqual([task.data for task in q.tasks("pending")], payloads)
            (task,) = q.tasks("scheduled")
            assert task.until is not None
            due = task.data, round(task.until.timestamp() * 1e6)
            self.assertEqual(due, (b"later", due_us))
        self.assertTrue(all(map(os.path.exists, stay)))
        self.assertEqual(len(os.listdir("old/done")), 1 + 6)


# What two that meet may do to each other


class Meeting(QueueCase):
    """Orders of two operations, or of one and a signal, that the enumerations do not reach."""

    def test_of_two_pushes_during_a_listing_the_younger_does_not_come_first(self) -> None:
        """The listing may have passed the place of the older one; that of foreign files, too."""
        for before, foreign, meanwhile in ((0, 0, 300), (300, 0, 300), (0, 300, 2)):
            q, pushed = self.anew(), list[str]()
            self.assertIsNone(q.pop())
            q.push_many([b"x"] * before)
            self.foreign = tuple(self.put(f"foreign{n}", b"") for n in range(foreign))

            def listdir(path: str, row: Any = (q, pushed, meanwhile)) -> list[str]:
                names, (q, pushed, meanwhile) = os.listdir(path), row
                if path.endswith("pending") and not pushed:
                    pushed.extend(q.push_many([b"x"] * meanwhile))
                    names += pushed[1:]
                return names

            with mock.patch.object(femtoqueue, "os", fake_os(listdir=listdir)):
                ids = [_taken(q).id for _ in range(before + meanwhile)]
            self.assertEqual(ids, sorted(ids))

    def test_a_signal_handler_that_pushes_as_an_id_is_made_gets_another(self) -> None:
        """At any line of it, as under a debugger."""
        q, ids = self.queue(), list[str]()
        for number in itertools.count():
            with at_line(number, lambda: ids.append(q.push(b"handler")), ("new_id",)) as came:
                ids.append(q.push(b"x"))
            if not came:
                break
        self.assertGreater(number, 1)
        self.assertEqual(len(self.names("pending")), len(ids))

    def test_a_claim_that_is_lost_takes_no_notice_of_one_that_is_read(self) -> None:
        """Of the same task, in another thread of one object."""
        q, got = self.queue(), list[FemtoTask | None]()
        _, wanted, last = q.push_many([b"1", b"2", b"3"])
        self.pop(q)
        reads, may_go_on = threading.Event(), threading.Event()

        def meet(name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and args[0].endswith(wanted) and "/inflight-" in args[0]:
                reads.set()
                may_go_on.wait(PATIENCE_S)

        with hooked(meet), beside(lambda: got.append(q.take(id=wanted))):
            reads.wait(PATIENCE_S)
            task = q.pop()
            may_go_on.set()
        self.assertEqual((task and task.id, got[0] and got[0].id), (last, wanted))

    @FORK
    def test_a_mount_that_hangs_holds_up_no_queue_on_another(self) -> None:
        """A thread hangs there as it opens a lock, or closes it: also a fork waits but a moment."""
        for event in ("open", "close"):
            with self.subTest(event):
                self.hang_at(event)

    def hang_at(self, event: str) -> None:
        q, other = self.anew(), FemtoQueue(self.new_dir(self.memory))
        self.addCleanup(other.close)
        os.mkdir(self.file("inflight-n2"))
        hangs, goes_on = threading.Event(), threading.Event()
        pushed, children = list[str](), list[Child]()
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

        with hooked(hang), beside(q.stats):
            self.assertTrue(hangs.wait(PATIENCE_S))
            for works in ((push,), (fork, push)):
                with beside(*works):
                    pass
            said = [child.line() for child in children]
            self.assertEqual((len(pushed), said), (2, ["forked"]))
            goes_on.set()

    @FORK
    def test_a_fork_as_another_thread_opens_a_lock_copies_none(self) -> None:
        q, children = self.queue(), list[Child]()

        def work(child: Child) -> None:
            child.say("forked")
            child.wait_for_go()

        fork = threading.Thread(target=lambda: children.append(self.child(work)))

        def opened() -> None:
            fork.start()
            fork.join(0.2)  # it has forked, or waits for us

        with hooked(at_call("open", lease_dir(q), opened, times=1), after=True):
            self.assertIsNone(q.pop())
        fork.join(PATIENCE_S)
        self.assertEqual(children[0].line(), "forked")
        dies(q)
        self.check_unlocked(lease_dir(q))

    @FORK
    def test_a_lease_is_renewed_though_its_key_is_pushed_all_the_time(self) -> None:
        """Its lock is free for a moment now and then."""
        q, tries, flock = self.queue(timeout_stale_ms=1500), itertools.count(), fcntl.flock
        task = leased(q, key="k")
        assert task.until is not None
        end_s, before = task.until.timestamp(), task.path

        def busy(fd: int, how: int) -> None:
            if how == fcntl.LOCK_EX | fcntl.LOCK_NB and next(tries) % 40 != 39:
                raise BlockingIOError
            flock(fd, how)

        with q.processing(task), mock.patch("fcntl.flock", busy):
            until(lambda: task.path != before)
        self.assertLess(time.time(), end_s)

    @FORK
    def test_ctrl_c_as_a_turn_ends_leaves_the_line_to_others(self) -> None:
        for stale_timeout in (None, 20.0):
            line = TicketQueue(self.file("line"), stale_timeout)
            with self.assertRaises(KeyboardInterrupt), line.turn():
                stopped = mock.patch.object(threading.Event, "set", side_effect=interrupt)
                stopped.start()
            stopped.stop()
            gc.collect()
            self.assertTrue(TicketQueue(self.file("line"), stale_timeout).is_empty())

    def test_a_repair_that_meets_a_busy_key_comes_again_soon(self) -> None:
        q, clock = self.queue(), self.clock()
        task = leased(q, b"1", key="k")
        q.push(b"2", key="k")
        os.rename(self.file(task.path), self.file("done", task.id))  # and then its worker died
        with self.locked("k"):
            clock.advance(601)
            self.assertIsNone(q.pop())
        clock.advance(2)
        self.assertEqual(self.pop(q).data, b"2")

    @FORK
    def test_a_coroutine_that_finds_its_key_busy_looks_again_soon(self) -> None:
        """The event of the push has come; no other comes when that has ended."""
        q, pauses_ms = self.queue(), list[int]()

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
        self.assertLess(max(pauses_ms[:3]), 200)  # that of a wait whose job is late: 51

    @FORK
    def test_close_in_another_thread_as_pop_reads_a_task_leaves_no_delivery(self) -> None:
        """The lease of what pop() has just read can't be ended, as its key is busy: pop() does it,
        and has no task. Nor is one left if that can't be read, which counts, though close() left it
        alone: a detached one, or beside a living namesake."""
        for key, is_detached in (("k", False), (None, True), (None, False)):
            q = self.anew(timeout_stale_ms=None, max_attempts=2, detached=is_detached)
            namesake = None if key else self.queue(timeout_stale_ms=None)
            self.assertIsNone(q.pop())
            self.assertIsNone(namesake and namesake.pop())
            q.push(b"x", key=key)

            def close(q: FemtoQueue = q, key: str | None = key) -> None:
                with self.locked(key) if key else contextlib.nullcontext(), beside(q.close):
                    pass
                if key is None:
                    fail_with(errno.EIO)

            raises = contextlib.nullcontext() if key else self.assertRaises(OSError)
            closes = hooked(at_call("open", "inflight-n1/", close, times=1))
            with self.subTest(key, is_detached=is_detached), raises, closes:
                self.assertIsNone(q.pop())
            self.assertEqual(self.states(), {"pending": 1})
            self.assertEqual(self.pop(q).attempts, 1 if key else 2)


# Classes side by side


# These begin first, so that the last one is short.
LONGEST = (
    *("CommandLine", "KeyedInterrupted", "KeyedInterruptedOnSharedFileSystem"),
    *("KeyedInterruptedByRename", "Faults"),
)


def run_forked(words: list[str], output: Any) -> int:
    """Run tests in a process, the leader of a group, which prints to that file; return its pid."""
    if pid := os.fork():
        os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        for fd, source in enumerate((os.open(os.devnull, os.O_RDONLY), *[output.fileno()] * 2)):
            os.dup2(source, fd)
        faulthandler.dump_traceback_later(SUITE_S, exit=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = run_here(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def tell_end(name: str, output: Any, status: int, is_verbose: bool) -> None:
    """Print what the process of a class said, or, if all is well, its end."""
    with output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        text += f"exit status {os.waitstatus_to_exitcode(status)}"
    elif not is_verbose:
        text = " ".join(text.rpartition("-" * 70)[2].split())
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def run_side_by_side(names: list[str], switches: list[str], processes: int) -> list[str]:
    """Run as many classes at a time; return those that failed, with -f until one does. A process's
    group is killed when it has ended, or the run has, also by Ctrl-C or SIGTERM."""
    left, failed = deque(sorted(names, key=[*LONGEST, *names].index)), list[str]()
    running: dict[int, tuple[str, Any]] = {}  # by pid: a class, and where it prints
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while (left or running) and not (failed and "-f" in switches):
            while left and len(running) < processes:
                name, output = left.popleft(), tempfile.TemporaryFile()  # noqa: SIM115
                running[run_forked([*switches, name], output)] = name, output
            pid, status = os.wait()
            name, output = running.pop(pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it left running
            failed += [name] * bool(status)
            tell_end(name, output, status, "-v" in switches)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return failed


def run_here(words: list[str]) -> int:
    """Run tests in this process. What nohup(1) and a shell's `&` do to signals is undone: commands
    under test inherit it."""
    handlers: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)  # there is no SIGHUP on Windows
        if number and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    faulthandler.enable()
    return int(not unittest.main(argv=[sys.argv[0], *words], exit=False).result.wasSuccessful())


def main() -> int:
    """Run classes side by side; a single one, or by other switches of unittest, in this process."""
    print(f"seed {SEED}", file=sys.stderr, flush=True)
    switches = [it for it in sys.argv[1:] if it in ("-v", "-f")]
    names = [it for it in sys.argv[1:] if it not in switches]
    tests_of = unittest.defaultTestLoader.getTestCaseNames
    cases = {name: it for name, it in globals().items() if isinstance(it, type)}
    classes = names or [
        name for name, it in cases.items() if issubclass(it, unittest.TestCase) and tests_of(it)
    ]
    if len(classes) < 2 or any(it.startswith("-") for it in names) or not hasattr(os, "fork"):
        return run_here(sys.argv[1:])
    affinity = getattr(os, "sched_getaffinity", None)
    processes = 1 + (len(affinity(0)) if affinity else os.cpu_count() or 1)
    began_s = time.monotonic()
    # Tests that were killed remove none of their directories.
    made = functools.partial(
        tempfile.TemporaryDirectory, prefix="femtoqueue-tests-", ignore_cleanup_errors=True
    )
    with made(dir=None) as tempfile.tempdir, made(dir=QueueCase.memory) as QueueCase.memory:
        failed = run_side_by_side(classes, switches, processes)
    end = "FAILED" if failed else "OK"
    print(f"{time.monotonic() - began_s:.1f} s:", *failed, end, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
