"""femtoqueue: a durable task queue in one file, on the standard library alone.

    from femtoqueue import FemtoQueue

    q = FemtoQueue("jobs")                  # any number of processes, one directory
    q.push(b"resize 42.png")
    while task := q.pop():
        print(task.id, task.data)           # the work; then:
        q.done(task)                        # or q.fail(task, "why"), q.release(task)

A queue is a directory, a task is a file, and the directory it stands in is its state:

    data_dir/
      creating/           being written; never read as tasks
      pending/            waiting             <id>  or  <order>~<attempts>~<id>
      scheduled/          waiting for a time  <due>~<attempts>~<id>
      inflight-<node>/    leased to a worker  <deadline>~<attempts>~<boot>~<id>
      done/  failed/      finished            <id>, and failed/<id>.error says why
      keys/               of keyed tasks      <hash>, where they are; <id>, a newer payload
      locks/              of keys             <last two digits of the hash>; these stay
      checkpoints/        how far work came   <id>
      spare/              empty: becomes inflight-<node>/ when the disk is full
      clock-<boot>        the anchor of this boot's queue clock
      PAUSED              `touch` it, and nothing is handed out while it is there

An id is <order>-<tag>: 20 digits of nanoseconds on the queue clock, then 8 random hex digits of
the process that pushed, or of a key's hash (8 to f in front). Names are fixed in width, so that
sorting them is first in, first out. A file is one line, `FQ1 <crc32> <length>` and the key if it
has one, and then the payload as given.

Every change of state is one system call, and the task has changed hands when it returns (where
two methods stand, the second makes it; _transfer by _rename):

    step     method                     from              to                            by
    publish  _publish                   creating/<id>     pending/, scheduled/, keys/   rename
    due      _wake_due, _transfer       scheduled/        pending/<now>~<n>~<id>        rename
    claim    _claim, _seize             pending/          inflight-<node>/              rename
    undo     _hand_back, _unseize       inflight-<node>/  pending/                      rename
    finish   _settle, _transfer         inflight-<node>/  done/<id>                     rename
    or         without keep_done        inflight-<node>/  nowhere                       unlink
    fail     _bury, _transfer           inflight-<node>/  failed/<id>; then its .error  rename
    release  _settle, _transfer         inflight-<node>/  pending/ or scheduled/        rename
    extend   extend, _transfer          inflight-<node>/  the same, with a new deadline rename
    put back _put_back, _transfer       a dead's lease    pending/<order of id>~<n>~    rename
    give up  _give_up, _transfer        pending/          failed/<id>, at max_attempts  rename
    retry    _retried, _transfer        failed/<id>       pending/<now>~0~<id>          rename
    purge    purge                      done/, failed/    nowhere                       unlink
    replace  _replace_pending, _swap    creating/<id>     for a waiting task's file     renameat2
               where names can't be exchanged: _take_over, _renew, over its file        rename
    update   _push_to_leased, _swap     creating/<id>     for a leased task's file      renameat2
    later    _replace_scheduled         pending/          scheduled/<due>~0~<id>        rename
    buffer   _push_behind               creating/<id>     keys/<id>                     rename
    let in   _let_in, _come_back        keys/<id>         pending/; over what came back rename
    save     checkpoint                 creating/         checkpoints/<id>              rename

Two workers that want one task both call rename(); one succeeds, the other gets ENOENT and takes
the next. The lease is in the name which that rename writes, and that exact name is the fencing
token: when the lease was lost, the name is gone, and done(), fail(), release() and extend() raise
LeaseLost and change nothing. A lease ends at its deadline or when its holder is dead, whichever
comes first. A living worker keeps a shared flock on its inflight-<node>/; the kernel drops it
with the process; whoever gets the exclusive lock knows that nobody is left. pop() looks after
that, after due tasks and after leftovers; there is no other process, and no thread but those that
processing() renews leases by, work() works by, and coroutines look by.

Guaranteed: at least once. A task whose push() returned is delivered until a done() or fail()
returned, whatever is killed at whichever instant. Order is that of push() across the processes
of a host, restarts, reboots and steps of the wall clock. What is torn or corrupt is never
delivered; it ends in failed/ with the reason. With sync_after_write=True what returned also
survives power loss; without, a task not yet on disk may be missing after one.

Not guaranteed: exactly once. A task runs twice when its worker died, or was later than its
deadline, or (without sync) when power was lost after done(): make handlers idempotent.

Assumed: data_dir is on one file system, whose rename() is atomic (POSIX). Hosts that share it
have wall clocks within a second of each other, one timeout_stale_ms, and node_ids of their own; a
lease of another host ends by its deadline only, as do all without flock or boot id (not Linux).
Names that are not of the forms above are other people's files: never delivered, moved, removed.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import functools
import itertools
import os
import re
import stat
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

try:
    import fcntl
except ImportError:  # not POSIX: leases end by their deadlines
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import asyncio
    import logging
    from concurrent.futures import Future, ThreadPoolExecutor
    from datetime import datetime

__all__ = [
    "CorruptTask",
    "FemtoQueue",
    "FemtoQueueError",
    "FemtoTask",
    "Finding",
    "KeyInFlight",
    "LeaseLost",
    "NodeStats",
    "Stats",
    "TaskNotFound",
    "TicketQueue",
    "WorkCounts",
]
__version__ = "1.0.0.dev0"

STATES = ("pending", "scheduled", "inflight", "done", "failed")

_DIRS = ("creating", "pending", "scheduled", "done", "failed")
_NEVER_NS = 8_999_999_999_999_999_999  # the year 2255; the largest number that a name may carry
_FOREVER_NS = 4 * 10**18  # 126 years: the longest lease
_FARTHEST_NS = 4 * 10**18  # the year 2096: no queue clock starts later, whatever a name says
_MOST = 10**302  # of anything that is given as a number
_MOST_ATTEMPTS = 999_999  # a name has room for six digits
_DETACHED = "00000000"  # the <boot> of a lease that only its deadline ends
_KEY_BYTES = 200
_BORROWED_NS = 30 * 10**9  # the lease under which the payload of a waiting task is replaced
_UNQUOTED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@")
_POLICIES = ("buffer", "update", "reject")
# Where a delivery's task goes, as a field of WorkCounts.
_OUTCOMES = {"done": "done", "": "done", "failed": "failed"} | dict.fromkeys(
    ("pending", "scheduled"), "released"
)
# Directories of data_dir, and the forms of the names in them.
_OUR_DIRS: dict[str, tuple[str, ...]] = {
    name: (name,) for name in ("creating", "pending", "scheduled", "done", "checkpoints")
}
_OUR_DIRS |= {"failed": ("failed", "reason"), "keys": ("keys", "tag"), "locks": ("lock",)}
_OUR_DIRS |= {"spare": ()}
_BATCH = 1 << 17  # pending names to keep in memory: up to 11 MB of them
_CHUNK = 1 << 16  # directory entries to read between two cuts of the batch
_MAX_LISTINGS = 8  # by one pop() that loses every claim to others
_MAX_REPLACED = 1000  # times that a target directory may be replaced during one move
_READ_BYTES = 4096  # a record of this size or less is read with one call
_PURGE_SLICE = 1000  # entries of done/ that one look at them takes, at least
_SHRINK_BYTES = 1 << 20  # a pending/ that is larger than this when empty is replaced
_LEFTOVER_NS = 3600 * 10**9
_IDLE_NS = 60 * 10**9
_LONGEST_PAUSE_S = 20.0
_BASE_INTERVAL_S = 0.4  # between two looks for due tasks and dead workers
_FIRST_PAUSE_S = 0.001  # between two polls; it doubles up to poll_interval_s
_RENEWAL = 1 / 3  # of its length, after which a lease is renewed
_ONE_SIGNAL_S = 0.3  # two signals to work() within that are one
_LONGEST_RETRY_S = 3600.0  # after an exception in processing()
_PIPE_BYTES = 4096  # a pipe holds that much without a reader
_TAIL_BYTES = 4096  # of a command's standard error, as the reason of its failure

# ext2 to ext4, xfs, btrfs, f2fs, tmpfs: f_type of statfs(2)
_SYNCFS_TYPES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
# Those, overlay, zfs, bcachefs, ramfs: nobody but this kernel writes to them, and inotify hears it.
_LOCAL_TYPES = _SYNCFS_TYPES | {0x794C7630, 0x2FC12FC1, 0xCA451A4E, 0x858458F6}
_NETWORK_TYPES = {
    **{0x6969: "NFS", 0x65735546: "FUSE", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB"},
    **{0x00C36400: "Ceph", 0x01021997: "9p", 0x0BD00BD0: "Lustre", 0x01161970: "GFS2"},
    **{0x7461636F: "OCFS2", 0x47504653: "GPFS", 0x5346414F: "AFS", 0x19830326: "BeeGFS"},
}
# inotify(7): created or moved here; for data_dir also deleted or moved away; directories only.
_IN_COMES, _IN_GOES, _IN_ONLYDIR = 0x100 | 0x80, 0x200 | 0x40, 0x01000000
_RENAMES_OPEN_FILES = os.name == "posix"
# EBADF: NFS, for an exclusive lock on what is open for reading; EINVAL: others, for directories.
_NO_LOCKS = (
    *(errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EBADF, errno.EINVAL),
)
_NO_ROOM = (
    *(errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EISDIR),
)
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# ESTALE: what a descriptor of ours leads to was removed by another host (NFS, GlusterFS).
_GONE = (errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT))
_NO_FLOCK = "keyed tasks and tickets need flock, which there is none of here"
_RENAME_EXCHANGE = 2  # of renameat2(2)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)  # POSIX leaves the choice to the file system
_Found = TypeVar("_Found")  # by a wait

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# O_NOFOLLOW: a link is no task. O_NONBLOCK: a FIFO in pending/ must not hang pop().
_WARY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_FLAGS = os.O_RDONLY | _WARY | getattr(os, "O_BINARY", 0)
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | _WARY
_DIR_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)

_NS = "0[0-8][0-9]{18}"
_ID = f"(?P<id>{_NS}-[0-9a-f]{{8}})"
_ATTEMPTS = "(?P<attempts>[0-9]{1,6})"
# Written without <boot>, and in done/ and failed/ only as an id; but by hand, a task may come from
# anywhere, under the name that it had there.
_WAITING = f"(?:{_NS}~{_ATTEMPTS}~(?:[0-9a-f]{{8}}~)?)?{_ID}"
_PARSE = {
    state: re.compile(form).fullmatch
    for state, form in {
        "creating": rf"{_ID}(?:\.(?:clock|error|pending))?",
        "pending": _WAITING,
        "scheduled": f"{_NS}~{_ATTEMPTS}~{_ID}",
        "inflight": f"{_NS}~{_ATTEMPTS}~(?P<boot>[0-9a-f]{{8}})~{_ID}",
        # A newer payload behind what is in flight; its tag is a key's.
        "keys": f"(?:{_NS}~{_ATTEMPTS}~)?(?P<id>{_NS}-[89a-f][0-9a-f]{{7}})",
        "checkpoints": _ID,
        "done": _WAITING,
        "failed": _WAITING,
        "reason": rf"{_ID}\.error",
        "tag": "[89a-f][0-9a-f]{7}",  # of a key; a process has 0 to 7 in front
        "lock": "[0-9a-f]{2}",
    }.items()
}
_parse_pending = _PARSE["pending"]
_parse_id = re.compile(_ID).fullmatch
_parse_ticket = re.compile(r"\.?([0-9]{20})~([0-9a-f]{8})~([0-9a-f]{16})").fullmatch
_parse_node_dir = re.compile(r"inflight-([A-Za-z0-9._-]{1,100})").fullmatch
_match_header = re.compile(rb"FQ1 ([0-9a-f]{8}) ([0-9]{1,19})(?: ([!-~]+))?\n").match
_parse_tag = _PARSE["tag"]
_parse_hint = re.compile(
    r"([!-~]+) ((?:pending|scheduled|inflight-[A-Za-z0-9._-]{1,100})/"
    rf"(?:[0-9a-f~]+~)?{_ID}) ((?:[0-9~]+~)?{_NS}-[0-9a-f]{{8}}|-)"
).fullmatch


class FemtoQueueError(Exception):
    """The base of this module's own errors. Disk trouble is not one: it stays an OSError."""


class LeaseLost(FemtoQueueError):
    """The task is no longer in this worker's hands; nothing was changed.

    `id` is the task's. `expired` is True when the lease's deadline has passed (another worker may
    have the task now), False when it ended otherwise: finished before, moved by hand, or given up
    with close().
    """

    def __init__(self, id: str, expired: bool, why: str) -> None:
        super().__init__(id, expired, why)
        self.id, self.expired, self.why = id, expired, why

    def __str__(self) -> str:
        return f"task {self.id}: {self.why}"


class KeyInFlight(FemtoQueueError):
    """The key has a task already: `id`, which is in flight (or waiting, when retry() says so)."""

    def __init__(self, key: str, id: str) -> None:
        super().__init__(key, id)
        self.key, self.id = key, id

    def __str__(self) -> str:
        return f"key {self.key!r} has a task already: {self.id}"


class TaskNotFound(FemtoQueueError):
    """No task of that id is where the call needs it to be."""


class CorruptTask(FemtoQueueError):
    """The file is not a whole record: `id` names the task, `reason` says what is wrong."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(id, reason)
        self.id, self.reason = id, reason

    def __str__(self) -> str:
        return f"task {self.id} is corrupt: {self.reason}"


@dataclass(frozen=True, init=False)
class FemtoTask:
    """One task, as it was when it was read.

    id: for life, through retries and delays.
    data: the payload as pushed.
    attempts: deliveries so far, this one counted. None: not known (done/ and failed/ do not keep
    it).
    key: of a keyed task, else None.
    checkpoint: what checkpoint() saved last, in this delivery or one before; None: nothing, or
    the task was not leased but looked at.
    path: of its file, relative to data_dir; while the task is leased, also its fencing token.
    error: the reason of a failed task; None: it has none, or is in another state.
    size_bytes: length of the payload. None: the file has no valid header (tasks(data=False) only).
    """

    id: str
    data: bytes
    attempts: int | None = 0
    key: str | None = None
    checkpoint: bytes | None = field(default=None, repr=False, compare=False)
    path: str = field(default="", repr=False, compare=False)
    error: str | None = field(default=None, repr=False, compare=False)
    size_bytes: int | None = field(default=None, repr=False, compare=False)
    # How long this delivery's lease is when it is renewed; 0: it is not ours.
    _lease_ns: int = field(default=0, repr=False, compare=False)
    _anchor_ns: int = field(default=0, repr=False, compare=False)  # of the queue clock

    def __init__(
        self,
        id: str,
        data: bytes,
        attempts: int | None = 0,
        key: str | None = None,
        checkpoint: bytes | None = None,
        *,
        path: str = "",
        _lease_ns: int = 0,
        _anchor_ns: int = 0,
    ) -> None:
        # As the generated one does, but for its detour by object.__setattr__: pop() is 1 % faster.
        fields = self.__dict__
        fields["id"], fields["data"], fields["attempts"] = id, data, attempts
        fields["key"], fields["checkpoint"], fields["path"] = key, checkpoint, path
        fields["size_bytes"] = len(data)
        fields["_lease_ns"], fields["_anchor_ns"] = _lease_ns, _anchor_ns

    @property
    def state(self) -> str:
        """Where it was: one of STATES, or "buffered" (a newer payload of a key in flight)."""
        directory = self.path.partition("/")[0]
        if directory.startswith("inflight-"):
            return "inflight"
        return "buffered" if directory == "keys" else directory

    @property
    def node(self) -> str | None:
        """The node_id of the worker that has it in flight, else None."""
        return self.path[9:].partition("/")[0] if self.path.startswith("inflight-") else None

    @property
    def created(self) -> datetime:
        """When it was pushed: UTC, read from the id, by the queue clock (see FemtoQueue)."""
        return _utc(int(self.id[:20]))

    @property
    def until(self) -> datetime | None:
        """When its lease ends, or when it is due: UTC, by the wall clock of now; else None."""
        stamp = os.path.basename(self.path)[:20]
        if self.state == "inflight":
            return _utc(int(stamp) - _monotonic_ns() - self._anchor_ns + _wall_ns())
        return _utc(int(stamp)) if self.state == "scheduled" else None


_NO_TASK = FemtoTask("", b"")


@dataclass(frozen=True)
class NodeStats:
    """One worker's leases: how many, how many of them past their deadline, and who holds them.

    liveness: "alive" (its lock is held), "dead" (it is not, on this host), or "unknown" (another
    host's or an earlier boot's, or no flock here: only deadlines count).
    """

    node: str
    inflight: int
    expired: int
    liveness: str


@dataclass(frozen=True)
class Stats:
    """How many tasks stand in which state; see FemtoQueue.stats()."""

    pending: int
    scheduled: int
    inflight: int
    buffered: int  # newer payloads of keys that are in flight
    done: int
    failed: int
    oldest_pending_age_s: float | None  # None: nothing is pending
    nodes: tuple[NodeStats, ...]
    expired: int = 0  # of those in flight: the lease has ended, and is not yet taken back


@dataclass(frozen=True)
class WorkCounts:
    """What became of the deliveries that one work() took.

    retried: the handler raised, and the task waits for another try. released: given back at the
    second signal, or because the handler was told to exit. lost: the lease was lost meanwhile, or
    its end could not be written (the log says which).
    """

    done: int = 0
    failed: int = 0
    retried: int = 0
    released: int = 0
    lost: int = 0


@dataclass(frozen=True)
class Finding:
    """One thing that check() found: its kind, the path relative to data_dir, what is odd about
    it, and whether it was mended."""

    kind: str
    path: str
    text: str
    repaired: bool = False


class _Closed(Exception):
    """close() was called while this thread waited for a task: its wait is over."""


class FemtoQueue:
    """A queue in `data_dir`, which is made (mode 0700) if it is missing.

    node_id names this worker: 1 to 100 of A-Z a-z 0-9 . _ - (None: a fresh name). A worker that
    comes back under its old node_id takes back at once what it held. Objects that live at the
    same time may share one: they don't steal from each other, but what one of them held when it
    was killed then waits for its deadline, or until the last of them ends.
    timeout_stale_ms is the lease (visibility timeout) that pop() takes, in milliseconds. None:
    as long as the holder lives; after a reboot, and where there is no flock, only a restart of
    its own node_id or release by hand brings such a task back.
    sync_after_write: True makes what returned survive power loss (push, push_many, schedule,
    done, fail, release, retry); False survives the death of processes.
    max_attempts: a task that was delivered so often without done() or fail() goes to failed/ by
    itself. None: no limit.
    keep_done: False deletes what is done instead of keeping it in done/. A number: what is done is
    kept for that many seconds; then pop() deletes it, some at a time.
    detached: True makes leases that outlive this object and its process: only their deadlines end
    them, and attach() finds them again.
    retry_delay_s: what processing() and work() wait, in seconds, before a second delivery; twice
    as long before each further one, up to an hour, and up to half of it less, by chance.
    poll_interval_s: the longest pause, in seconds, between two looks of who waits, where inotify
    does not tell (not Linux, or a file system that other hosts write to).

    Order and deadlines are by the queue clock: the monotonic clock plus an anchor that all
    processes of one boot share, so that nobody who sets the date moves it. Where there is no boot
    id (not Linux) each process anchors itself to the wall clock or the newest task.

    Threads may share an object. After fork() the child's copy is a worker of its own, and a
    pickled object is made anew from its settings.

    Raises TypeError or ValueError for an argument that is none, OSError when a directory cannot
    be made.
    """

    # Invariant: _lock is held while the batch is used, while chores run, and while a task moves
    # into our directory or out of it (so that a renewal and a done() in two threads don't cross,
    # and close() does not close the directory under a claim). Not while a task is read or written.

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        node_id: str | None = None,
        timeout_stale_ms: float | None = 30_000,
        sync_after_write: bool = False,
        *,
        max_attempts: int | None = None,
        keep_done: bool | float = True,
        retry_delay_s: float = 1.0,
        poll_interval_s: float = 0.05,
        detached: bool = False,
    ) -> None:
        self._lease_fd: _LockFd | None = None  # first: __del__ reads it even when we raise
        _check_places(data_dir, node_id)
        if timeout_stale_ms is not None:
            _positive("timeout_stale_ms", timeout_stale_ms)
        _not_negative("retry_delay_s", retry_delay_s)
        _positive("poll_interval_s", poll_interval_s)
        if not isinstance(keep_done, bool):
            _not_negative("keep_done", keep_done)
        if max_attempts is not None and (
            type(max_attempts) is not int or not 1 <= max_attempts <= _MOST_ATTEMPTS
        ):
            raise ValueError(
                f"max_attempts must be None or an int, 1 to {_MOST_ATTEMPTS}, not {max_attempts!r}"
            )
        self.data_dir = data_dir
        self.timeout_stale_ms = timeout_stale_ms
        self.sync_after_write = bool(sync_after_write)
        self.max_attempts = max_attempts
        self.keep_done = keep_done
        self.retry_delay_s = retry_delay_s
        self.poll_interval_s = poll_interval_s
        self.detached = bool(detached)
        self._given_node_id = node_id
        self._root = os.path.join(os.path.abspath(os.fspath(data_dir)), "")
        self._lookers: ThreadPoolExecutor | None = None  # threads that look for coroutines
        self._next_due_ns = 0  # the earliest due time that is known, wall clock
        self._next_end_ns = 0  # the earliest end of a lease that is known, queue clock
        self._make_dirs()
        self._become_somebody()
        self._boot, self._anchor_ns = self._join_clock()
        self._order = 0
        _live_queues.add(self)

    # A task's life

    def push(
        self,
        data: bytes | bytearray | memoryview,
        *,
        key: str | None = None,
        if_in_flight: str = "buffer",
    ) -> str:
        """Add a task to the back of the queue and return its id.

        When it returns, the task is in pending/. If it raises, nothing is. TypeError if data is
        a str or not bytes-like; OSError, as it came, if the disk did not take it.

        key: 1 to 200 bytes of text. At most one task of a key waits: data replaces its payload,
        and it keeps its place (and its time, in scheduled/) and its id, which is returned.
        if_in_flight, for a key whose task is leased: "buffer": data waits in keys/ until that
        delivery ends (a newer one replaces it), then joins the queue by its own id, or takes the
        place of the task if that came back; "update": a redelivery carries data, and done() ends
        it with the task; "reject": raises KeyInFlight. Keyed tasks need flock: OSError without.
        """
        if key is not None or if_in_flight != "buffer":
            return self._push_keyed(data, key, if_in_flight, None)
        ident = self._new_id()
        self._publish(ident, data, f"{self._root}pending/{ident}")
        return ident

    def push_many(self, iterable: Iterable[bytes | bytearray | memoryview]) -> list[str]:
        """Add tasks in order and return their ids; with sync_after_write, sync once for all.

        An error on the way is raised as it came, with the number of tasks that were pushed added
        to its message, and their ids as its attribute pushed_ids: the first ones of the iterable,
        each whole.
        """
        if isinstance(iterable, (bytes, bytearray, memoryview, str)):
            raise TypeError("push_many takes an iterable of payloads; for one payload use push")
        ids: list[str] = []
        pending = f"{self._root}pending"
        sync = _BatchSync(pending, self.sync_after_write)
        try:
            with sync:
                for data in iterable:
                    ident = self._new_id()
                    path = f"{pending}/{ident}"
                    self._publish(ident, data, path, sync_file=sync.each_file, sync_dir=False)
                    ids.append(ident)
        except Exception as error:
            if sync.failed:
                ids = [name for name in ids if not _unlinked(f"{pending}/{name}", or_fail=False)]
            _add_to_message(error, f" ({len(ids)} tasks of the batch were pushed)")
            error.pushed_ids = ids  # type: ignore[attr-defined]
            raise
        return ids

    def schedule(
        self,
        data: bytes | bytearray | memoryview,
        time_us: float,
        *,
        key: str | None = None,
        if_in_flight: str = "buffer",
    ) -> str:
        """Add a task that joins the back of the queue at a wall-clock time, and return its id.

        time_us: microseconds since the epoch, as time.time() * 1e6; a past time is due at once.
        Raises as push() does, and ValueError for a time after the year 2254. A task of the key
        that is waiting, due or not, gets the new time with the new payload ("update" does not).
        """
        due_ns = max(0, int(_finite("time_us", time_us) * 1000))
        if due_ns >= _NEVER_NS:
            raise ValueError(f"time_us must be before the year 2255, not {time_us!r}")
        if key is not None or if_in_flight != "buffer":
            return self._push_keyed(data, key, if_in_flight, due_ns)
        ident = self._new_id()
        self._publish(ident, data, f"{self._root}scheduled/{_stamped(due_ns, 0, ident)}")
        self._next_due_ns = min(self._next_due_ns, due_ns)
        return ident

    def pop(self, timeout: float | None = 0, *, lease_ms: float | None = None) -> FemtoTask | None:
        """Lease the oldest task, or return None when there is none to be had.

        timeout: seconds to wait for one; 0: don't; None: for ever. inotify wakes who waits, or
        else a look every poll_interval_s does; so does a task that comes due, a lease that ends
        and, within half a second, a worker that died. Signals get through at once. close() in
        another thread ends the wait: None.
        lease_ms: this delivery's own lease in milliseconds, for extend() and processing() too;
        None: timeout_stale_ms.


        The task is in inflight-<node>/ until done(), fail() or release(), or until the lease
        ends. A corrupt task is moved to failed/, logged, and passed over. OSError, as it came,
        for disk trouble: a task that could not be read is at the back of pending/ then; trouble
        with other workers' directories, scheduled/ or creating/ surfaces when nothing is waiting.
        """
        lasts_ns = self._lasts_ns(lease_ms)
        if timeout == 0:
            return self._take_oldest(lasts_ns)
        return self._wait_for(lambda: self._take_oldest(lasts_ns), _end_s(timeout))

    async def pop_async(
        self, timeout: float | None = None, *, lease_ms: float | None = None
    ) -> FemtoTask | None:
        """Do as pop() does, without blocking the event loop. First come, first served.

        Cancelling it leaves no task leased: one that it had just got is back at its place, and
        that delivery is not counted.
        """
        lasts_ns = self._lasts_ns(lease_ms)
        return await self._wait_for_async(lambda: self._take_oldest(lasts_ns), _end_s(timeout), "")

    def take(
        self,
        key: str | None = None,
        timeout: float | None = 0,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Lease one task out of turn: that of a key, or that of an id.

        key: None is returned if its task is absent, in flight or not yet due. What it costs does
        not depend on how many tasks wait, but for pop()'s chores, which it does too.
        id: the task may wait in pending/, or in scheduled/, due or not; else None is returned.
        done() then cancels it. pending/ is listed if the task was delivered before.
        timeout and lease_ms: as in pop(). Raises as pop() does, ValueError for an invalid key or
        id, TypeError unless one of the two is given.
        """
        look, _ = self._taker(key, id, lease_ms, wait=True)
        return self._wait_for(look, _end_s(timeout))

    async def take_async(
        self,
        key: str | None = None,
        timeout: float | None = None,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Do as take() does, without blocking the event loop; see pop_async()."""
        look, line = self._taker(key, id, lease_ms, wait=False)
        return await self._wait_for_async(look, _end_s(timeout), line)

    def _taker(
        self, key: str | None, id: str | None, lease_ms: float | None, wait: bool
    ) -> tuple[Callable[[], FemtoTask | None], str]:
        """Check the arguments of take(); return what looks, and the line to wait in."""
        lasts_ns = self._lasts_ns(lease_ms)
        if (key is None) == (id is None):
            raise TypeError("take needs a key or an id")
        if id is not None:
            _check_id(id)
            ident = id
            return lambda: self._take_id(ident, lasts_ns, wait), f"#{id}"  # no key has that form
        name = _quoted(key)
        return lambda: self._take_key(name, lasts_ns, wait), name

    def drain(self, timeout: float | None = None) -> Iterator[FemtoTask]:
        """Iterate over tasks, leased as by pop(), until none is pending, scheduled or in flight.

        Unlike a loop over pop() it goes on while others hold work that may come back. So does
        what it yielded: end each task before asking for the next. timeout: seconds to wait for a
        task before it ends all the same; None: no limit.
        """
        _end_s(timeout)  # a wrong one is an error now, not at the first task

        def tasks() -> Iterator[FemtoTask]:
            while (task := self._take_or_drained(_end_s(timeout))) not in (None, _NO_TASK):
                yield task

        return tasks()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no task is pending, scheduled or in flight anywhere; take none.

        timeout: seconds to wait; None: no limit. Returns False when the time is over, or when
        close() in another thread ends the wait.
        """
        return self._wait_for(lambda: self._is_drained() or None, _end_s(timeout), False) is True

    def attach(self, lease: str) -> FemtoTask:
        """Return the task of a lease that another process took, to settle or extend it here.

        lease: the path that task.path had there, its last part, or the task's id. The payload is
        not read: data is b"". Raises LeaseLost if there is no such lease (any more).
        """
        name = lease.rpartition("/")[2]
        for path, attempts, ident in self._find("inflight"):
            found = path[len(self._root) :]
            if lease == found or name in (os.path.basename(found), ident):
                # It may have a checkpoint, which has to go with it.
                return FemtoTask(
                    ident,
                    b"",
                    attempts,
                    None,
                    b"",
                    path=found,
                    _lease_ns=self._timeout_ns,
                    _anchor_ns=self._anchor_ns,
                )
        raise LeaseLost(_id_in(name), True, "it is not in flight by that name (any more)")

    def done(self, task: FemtoTask) -> None:
        """End the task's life: it moves to done/, or is deleted with keep_done=False.

        Raises LeaseLost if the task is not this delivery's any more.
        """
        _check_lease(task)
        if self.keep_done:
            self._finished += 1
            self._sync_task(self._settle(task, f"done/{task.id}"))
            return
        with contextlib.suppress(FileNotFoundError):  # the lease was lost, and its directory
            self._sync_task(task.path)  # the place that it goes from, or it is back where it was
        self._settle(task, "")
        if self.sync_after_write:
            _sync_dir(self._root + os.path.dirname(task.path))

    def fail(self, task: FemtoTask, error: str | BaseException | None = None) -> None:
        """Set the task aside as a dead letter in failed/, where retry() finds it.

        error is the reason, kept in failed/<id>.error: a text, or an exception with its
        traceback. Raises LeaseLost if the task is not this delivery's any more.
        """
        if not isinstance(error, (str, BaseException, type(None))):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        _check_lease(task)
        self._bury(task.id, error, lambda: self._settle(task, f"failed/{task.id}"))

    def release(
        self, task: FemtoTask, *, front: bool = False, delay_s: float = 0, counted: bool = True
    ) -> None:
        """Give the task back: to the back of the queue, to its front, or after a delay.

        front: to the place of its push, before everything younger. delay_s: seconds to wait in
        scheduled/ first, by the wall clock. counted: whether its attempts count this delivery.
        Raises LeaseLost as done() does.
        """
        _check_lease(task)
        if _finite("delay_s", delay_s) < 0 or (front and delay_s):
            raise ValueError(f"delay_s must be 0 or more, and 0 with front, not {delay_s!r}")
        attempts = _attempts_in(task.path) - (not counted)
        if delay_s:
            due_ns = _wall_ns() + int(min(delay_s * 1e9, _FOREVER_NS))
            target = f"scheduled/{_stamped(due_ns, attempts, task.id)}"
        else:
            order = int(task.id[:20]) if front else self._next_order()
            target = f"pending/{_stamped(order, attempts, task.id)}"
        self._give_up_lease(task, target)

    def extend(self, task: FemtoTask, ms: float | None = None) -> None:
        """Renew the lease: it ends `ms` milliseconds from now (None: as long as it was taken for).

        The task object carries the new lease from then on. Raises LeaseLost as done() does.
        """
        _check_lease(task)
        self._extend(task, task._lease_ns if ms is None else _lease_ns(_positive("ms", ms)))

    # Running

    def processing(self, task: FemtoTask) -> _Processing:
        """Return a context manager that holds the task's lease for its block, and then ends it.

        The lease is renewed in the background, by one thread per queue object. A block that ends
        well is done(task). An exception: the task waits in scheduled/ for another try (see
        retry_delay_s) while task.attempts is below max_attempts, else fail(task, exception).
        KeyboardInterrupt, SystemExit and asyncio.CancelledError: back to the front, and the
        delivery is not counted. The exception propagates. A task that the block itself ended, by
        done(), fail() or release(), stays so. Raises LeaseLost, at either end of the block, if
        the lease was lost.
        """
        _check_lease(task)
        return _Processing(self, task)

    def checkpoint(self, task: FemtoTask, data: bytes | bytearray | memoryview) -> None:
        """Save how far the work has come, and renew the lease: checkpoints/<id> holds data.

        Whoever gets the task next, after release(), a retry or our death, finds it in
        task.checkpoint; but not with a newer payload of its key. It is gone with done() and
        fail(). Atomic: there is the old one or the new one; with sync_after_write it is on disk
        when this returns. Raises LeaseLost, with nothing saved, if the task is not this delivery's
        any more; else as push() does.
        """
        _check_lease(task)
        payload = _header(task.data) + _as_bytes(data)
        directory, aside = f"{self._root}checkpoints", f"{self._root}creating/{self._new_id()}"
        _write_aside(aside, _header(payload), payload, self.sync_after_write)
        try:
            if not os.path.isdir(directory):
                _make_dir(directory, 0o777, self.sync_after_write)
            with self._locks_of(task.id), self._lock:
                self._renew_lease(task)  # the fence; it holds for far longer than the next line
                _move(aside, f"{directory}/{task.id}")
        except BaseException:
            _unlinked(aside, or_fail=False)
            raise
        if self.sync_after_write:
            _sync_dir(directory)
        object.__setattr__(task, "checkpoint", bytes(data))

    def work(
        self,
        handler: Callable[[FemtoTask], object],
        *,
        concurrency: int = 1,
        drain: bool = False,
        stop: threading.Event | None = None,
    ) -> WorkCounts:
        """Call handler(task) for each task, within processing(), until told to stop.

        concurrency: how many at a time, in threads if more than 1. drain: return when nothing is
        pending, scheduled or in flight any more. stop: an Event; when it is set, what runs is
        finished, and work() returns. In the main thread SIGTERM and SIGINT do the same, and a
        second one gives back what runs and returns at once; threads that are at it then can
        change nothing any more. A handler that fails is logged (logger "femtoqueue"), and the
        loop goes on; one that raises SystemExit or the like ends it. Disk trouble of pop() ends
        it too, as the OSError that it is, when what runs is finished.
        """
        if not callable(handler):
            raise TypeError(f"handler must be callable, not {handler!r}")
        if type(concurrency) is not int or concurrency < 1:
            raise ValueError(f"concurrency must be an int of 1 or more, not {concurrency!r}")
        if stop is not None and not callable(getattr(stop, "is_set", None)):
            raise TypeError(f"stop must be a threading.Event or None, not {stop!r}")
        closes = self._closes

        def is_stopped() -> bool:
            return self._closes != closes or (stop is not None and stop.is_set())

        return _WorkerPool(self, handler, concurrency, drain, is_stopped).run()

    def pause(self) -> None:
        """Hand nothing out, in any process, until resume(): make data_dir/PAUSED.

        Other workers see it when they list pending/ next, within a second or so.
        """
        os.close(os.open(f"{self._root}PAUSED", os.O_WRONLY | os.O_CREAT, 0o666))
        with self._lock:
            self._batch.clear()

    def resume(self) -> None:
        """Undo pause(), or a person's `touch PAUSED`. Whoever waits is woken."""
        _unlinked(f"{self._root}PAUSED")

    @property
    def paused(self) -> bool:
        """Whether data_dir/PAUSED is there."""
        return _is_there(f"{self._root}PAUSED")

    # Dead letters and housekeeping

    def retry(self, id: str) -> None:
        """Put a failed task at the back of the queue, its attempts at 0 again.

        Raises TaskNotFound if no such task is in failed/, KeyInFlight if its key has another task
        by now, ValueError if id is none.
        """
        _check_id(id)
        path = f"{self._root}failed/{id}"
        if not os.path.lexists(path):
            path = next((path for path, _, ident in self._find("failed") if ident == id), "")
        if not path or not self._retried(path, id):
            raise TaskNotFound(f"no task {id} in failed/")

    def retry_failed(self) -> int:
        """Put every failed task at the back of the queue, oldest first; return how many.

        Those whose key has another task by now stay.
        """
        count = 0
        for path, _, ident in self._find("failed"):
            with contextlib.suppress(KeyInFlight):
                count += self._retried(path, ident)
        return count

    def purge(self, older_than_s: float, states: Iterable[str] = ("done",)) -> int:
        """Delete tasks that were finished more than older_than_s seconds ago; return how many.

        states: "done", "failed" or both. Age counts from the move there (st_ctime, which every
        common file system sets on rename(); wall clock).
        """
        _not_negative("older_than_s", older_than_s)
        wanted = {states} if isinstance(states, str) else set(states)
        if not wanted <= {"done", "failed"}:
            raise ValueError(f"states must be of 'done' and 'failed', not {wanted!r}")
        before_s = time.time() - older_than_s
        count = 0
        for state in sorted(wanted):
            for name, _ in self._listed(state):
                count += _purged(f"{self._root}{state}/{name}", before_s)
        for name, form in self._listed("failed", "reason") if "failed" in wanted else ():
            if not os.path.lexists(f"{self._root}failed/{form['id']}"):
                _purged(f"{self._root}failed/{name}", before_s)
        return count

    def check(self, repair: bool = False) -> list[Finding]:
        """Look for what is odd in data_dir, and with repair=True mend what is safe to mend.

        Found: directories on another file system or on a network file system; a queue clock ahead
        of the wall clock; names that are not the queue's; records that are not whole, or can't be
        read; an id in two places; dead workers and leases that have ended; keys without a task;
        leftovers in creating/ and checkpoints/, more than an hour old. Mended: corrupt tasks that
        wait go to failed/, what the dead held back to pending/, keys and leftovers go. Reads every
        task; while others work, what just moves may be found odd.
        """
        return [*_Inspection(self, repair).findings()]

    # Looking

    def stats(self) -> Stats:
        """Count the tasks in each state. Reads names only; while others work, it is a snapshot
        that no instant ever quite was."""
        pending = self._listed("pending")
        oldest_ns = min((int(name[:20]) for name, _ in pending), default=None)
        nodes = tuple(map(self._node_stats, self._node_dirs()))
        return Stats(
            pending=len(pending),
            scheduled=len(self._listed("scheduled")),
            inflight=sum(node.inflight for node in nodes),
            buffered=len(self._listed("keys")),
            done=len(self._listed("done")),
            failed=len(self._listed("failed")),
            oldest_pending_age_s=(
                None if oldest_ns is None else max(0, self._now_ns() - oldest_ns) / 1e9
            ),
            nodes=nodes,
            expired=sum(node.expired for node in nodes),
        )

    def tasks(self, state: str, *, data: bool = True) -> Iterator[FemtoTask]:
        """Iterate over the tasks of a state in name order, without leasing them.

        state: one of STATES. data: False reads headers only, so that large payloads cost
        nothing: data is b"" then. A task that moves on meanwhile is left out. A corrupt one is
        logged and left out, and peek() says what is wrong with it; with data=False it has
        size_bytes None, if its header shows it.
        """
        _check_state(state)
        return self._read_tasks(self._find(state), data)

    def peek(self, id: str | None = None, *, key: str | None = None) -> FemtoTask | None:
        """Return the task of that id, in any state, or the one of that key that waits or is in
        flight, without leasing it.

        None if there is none (or if it moved just then). Looking for an id through pending/ and
        scheduled/ lists them. Raises CorruptTask if its file is not a whole record, ValueError if
        id or key is none, TypeError unless one of the two is given.
        """
        if (id is None) == (key is None):
            raise TypeError("peek takes an id or a key")
        if id is None:
            path = self._path_of_key(key)
            return None if path is None else self._look_at(self._root + path)
        _check_id(id)
        for directory in ("done", "failed", "pending"):
            task = self._look_at(f"{self._root}{directory}/{id}")
            if task is not None:
                return task
        for state in ("keys", "scheduled", "pending", "inflight", "done", "failed"):  # as it moves
            for path, _, ident in self._find(state):
                if ident == id:
                    return self._look_at(path)
        return None

    def contains(self, key: str) -> bool:
        """Say whether a task of that key waits or is in flight."""
        return self._path_of_key(key) is not None

    def keys(self, state: str) -> Iterator[str]:
        """Iterate over the keys of a state's tasks: STATES, as for tasks()."""
        _check_state(state)
        keyed = (found for found in self._find(state) if _is_keyed(found[2]))
        return (task.key for task in self._read_tasks(keyed, True) if task.key is not None)

    def close(self) -> None:
        """Give up this worker's place. What it still held is anybody's at once.

        Where there is no flock, and while another object lives under the same node_id, that is
        only so at the deadline. Other threads and coroutines that wait in a method of this object
        return at once: pop() and take() None, drain() and work() as if stopped, join() False. The
        object may be used again; its next pop() takes a new place. Dropping the object, or
        leaving its `with` block, does the same as close().
        """
        with self._lock:
            self._closes += 1
            self._renewer.set()
            lookers, self._lookers = self._lookers, None
            if lookers is not None:
                lookers.shutdown(wait=False)
            self._end_waits()
            self._close_done_scan()
            self._batch.clear()
            self._newcomer = True
            fd, self._lease_fd = self._lease_fd, None
            if fd is None and fcntl is not None:
                return
            try:
                alone = None if fd is None else _flock(fd, "exclusive")
                if alone and _leads_to(self._lease_dir, fd):
                    self._put_back_all(self._lease_dir, None)
                if alone is None or (alone and _leads_to(self._lease_dir, fd)):
                    _remove_empty_dir(self._lease_dir)
            except OSError as error:  # no lease is lost by it: pop() of another ends them
                _log().warning("%s could not be cleared: %s", self._lease_dir, error)
            finally:
                if fd is not None:
                    _let_go(fd)

    def __enter__(self) -> FemtoQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._lease_fd is not None and _let_go is not None:  # None: the interpreter ends
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "data_dir": os.path.dirname(self._root),
            "node_id": self._given_node_id,
            "timeout_stale_ms": self.timeout_stale_ms,
            "sync_after_write": self.sync_after_write,
            "max_attempts": self.max_attempts,
            "keep_done": self.keep_done,
            "retry_delay_s": self.retry_delay_s,
            "poll_interval_s": self.poll_interval_s,
            "detached": self.detached,
        }

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]

    # Becoming a worker

    def _become_somebody(self) -> None:
        """Draw what is one object's own: tag, node, lock, batch. Again in a forked child."""
        self._lock = threading.RLock()
        self._tag = f"{int.from_bytes(os.urandom(4), 'big') >> 1:08x}"
        self.node_id = self._given_node_id or f"{os.getpid()}-{self._tag}"
        self._node_dir = f"inflight-{self.node_id}/"
        self._lease_dir = f"{self._root}inflight-{self.node_id}"
        self._batch: list[str] = []  # names in pending/, the oldest last
        self._timeout_ns = _lease_ns(self.timeout_stale_ms)
        self._in_hand = threading.local()  # .bucket: what this thread holds; .closes: see _Closed
        self._closes = 0  # how often close() was called
        self._shared: bool | None = None  # whether other hosts may write here; None: not asked yet
        self._finished = 0  # by done(), since what is done was purged last
        self._done_scan: Any = None  # an os.scandir() of done/ that is purged
        self._leftovers: set[str] = set()  # leases of a former holder of our place, still there
        self._newcomer = True  # has had no place yet: what stands in its directory is a dead one's
        self._seen = 0  # how many names pending/ had when it was listed last
        self._next_due_ns = self._next_end_ns = 0
        interval_s = min(_BASE_INTERVAL_S, self._timeout_ns / 4e9)
        self._listing = _Chore(FemtoQueue._list_pending, every_s=1.0)
        self._waking = _Chore(FemtoQueue._wake_due, every_s=_BASE_INTERVAL_S)
        self._reclaiming = _Chore(FemtoQueue._reclaim, every_s=interval_s)
        self._mending = _Chore(FemtoQueue._mend_keys, every_s=600.0)
        sweeping = _Chore(FemtoQueue._sweep, every_s=600.0)
        self._purging = _Chore(FemtoQueue._purge_done, every_s=_BASE_INTERVAL_S)
        self._housekeeping: tuple[_Chore, ...]
        self._housekeeping = (self._waking, self._reclaiming, self._mending, sweeping)
        if not isinstance(self.keep_done, bool):
            self._housekeeping += (self._purging,)
        self._attend_at_ns = 0
        self._due_seen_ns = 0  # st_mtime of scheduled/ when it was listed last
        self._bell: _Bell | None = None
        self._halls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Hall]
        self._halls = weakref.WeakKeyDictionary()
        self._lookers = None
        # By the id() of the task. Weak: the `with` holds it, for as long as there is one.
        self._under_way: weakref.WeakValueDictionary[int, _Processing]
        self._under_way = weakref.WeakValueDictionary()
        self._renewer: threading.Event = threading.Event()  # set: no thread renews leases
        self._renewer.set()
        self._renewal_s = 0.0  # how often that thread comes by

    def _after_fork(self) -> None:
        self._lease_fd = None
        self._close_done_scan()
        self._become_somebody()

    def _make_dirs(self) -> None:
        root = os.path.dirname(self._root)
        _make_dir(root, 0o700, self.sync_after_write)
        for name in _DIRS:
            _make_dir(self._root + name, 0o777, sync=False)
        if self.sync_after_write:
            _sync_dir(root)
            # Another may just have made it, without sync. One that we may not read was there.
            with contextlib.suppress(PermissionError):
                _sync_dir(os.path.dirname(root))
        with contextlib.suppress(FileExistsError):
            try:
                os.mkdir(f"{self._root}spare")
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise

    def _make_lease_dir(self) -> None:
        """Make inflight-<node>/; on a full disk, of the spare directory that was made before.

        A full queue can only be drained by a worker that can start.
        """
        try:
            os.mkdir(self._lease_dir)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
                raise
            try:
                os.utime(f"{self._root}spare")  # an observer removes what is empty and old
                os.rename(f"{self._root}spare", self._lease_dir)
            except OSError:
                raise error from None

    def _take_place(self) -> None:
        """Open and lock inflight-<node>/, and take back what an earlier holder left in it."""
        self._batch.clear()  # nothing is claimed until there is a place, also when we raise
        while True:
            self._make_lease_dir()
            if fcntl is None:
                return
            try:
                fd = _open_to_lock(self._lease_dir)
            except FileNotFoundError:
                continue  # RACE: an observer saw nobody in it, and removed it
            to_close: _LockFd | None = fd
            try:
                # Waits while an observer looks in: it must not pass for a second worker.
                if _flock(fd, "shared") is None:
                    self._boot = os.urandom(4).hex()  # no locks here: nobody can see us live
                # Alone here: whoever held these leases is dead, on this boot or an earlier one.
                # Only a newcomer: later, another thread may have claimed into it just now.
                # RACE: an observer removed the directory that we opened, and a worker of our
                # node_id made it anew: those leases are running, and our lock says nothing of them.
                elif self._newcomer and _flock(fd, "exclusive") and _leads_to(self._lease_dir, fd):
                    with contextlib.suppress(OSError):  # it surfaces when _reclaim() tries again
                        self._put_back_all(self._lease_dir, None)
                _flock(fd, "shared")
                # RACE: an observer may have removed the directory before our lock was on it.
                if _leads_to(self._lease_dir, fd):
                    # The old place goes last: it may come back, with what we hold in it.
                    self._lease_fd, to_close = fd, self._lease_fd
                    self._newcomer = False
                    return
            finally:
                if to_close is not None:
                    _let_go(to_close)

    def _be_in_place(self) -> None:
        with self._lock:
            self._check_wait()
            if not self._in_place():
                self._take_place()

    def _in_place(self) -> bool:
        if fcntl is None:
            return os.path.isdir(self._lease_dir)
        return _leads_to(self._lease_dir, self._lease_fd)

    # The queue clock

    def _now_ns(self) -> int:
        return int(time.monotonic() * 1e9) + self._anchor_ns

    def _next_order(self) -> int:
        with self._lock:
            self._order = max(self._order + 1, self._now_ns())
            return self._order

    def _new_id(self) -> str:
        return f"{self._next_order():020d}-{self._tag}"

    def _join_clock(self) -> tuple[str, int]:
        """Return this boot's tag and its clock's anchor, and set the anchor if we are first."""
        boot_id = _read_boot_id()
        if boot_id is None:
            return os.urandom(4).hex(), self._draw_anchor()
        boot = _boot_tag(boot_id, self._root)
        path = f"{self._root}clock-{boot}"
        anchor_ns = _read_anchor(path)
        if anchor_ns is None:
            anchor_ns = self._draw_anchor()
            aside = f"{self._root}creating/{_wall_ns():020d}-{self._tag}.clock"
            try:
                _write_aside(aside, b"%d\n" % anchor_ns)
                try:
                    os.chmod(aside, 0o644)  # for all users of this boot, whatever our umask
                    _put_first(aside, path)
                finally:
                    _unlinked(aside)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                # To look, to drain and to purge, a clock of our own is good enough.
                _log().warning("no shared clock for this process: %s", error)
                return os.urandom(4).hex(), anchor_ns
            in_place_ns = _read_anchor(path)
            anchor_ns = anchor_ns if in_place_ns is None else in_place_ns
        return boot, anchor_ns

    def _draw_anchor(self) -> int:
        """Start the clock at the wall clock, or after the newest task if that has gone back.

        The newest by id: what stands first in a name of pending/ may be a due time of next year,
        moved there by hand, and must not carry the clock along.
        """
        newest_ns = 0
        places = [(self._root + state, state) for state in (*STATES, "keys") if state != "inflight"]
        for directory, state in (*places, *((path, "inflight") for path in self._node_dirs())):
            with contextlib.suppress(PermissionError):  # another user's: no reason not to start
                for _, form in self._listed(directory, state):
                    if (order := int(form["id"][:20])) < _FARTHEST_NS:
                        newest_ns = max(newest_ns, order)
        return max(_wall_ns(), newest_ns + 1) - _monotonic_ns()

    # Taking, and waiting for what is to be taken

    def _lasts_ns(self, lease_ms: float | None) -> int:
        return self._timeout_ns if lease_ms is None else _lease_ns(_positive("lease_ms", lease_ms))

    def _take_oldest(self, lasts_ns: int) -> FemtoTask | None:
        listings = 0
        while True:
            if self._now_ns() >= self._attend_at_ns:
                self._attend()
            with self._lock:
                name = self._batch.pop() if self._batch else ""
            if not name:
                listings += 1
                if listings > _MAX_LISTINGS or not self._refill():
                    return None
                continue
            task = self._claim(f"pending/{name}", lasts_ns)
            if task is not None:
                return task

    def _take_key(self, name: str, lasts_ns: int, wait: bool) -> FemtoTask | None:
        """wait=False: None too if somebody is at work on the key, who may be stopped."""
        if self._now_ns() >= self._attend_at_ns:
            self._attend()
        if not self._may_have_task(name) or self.paused:
            return None
        with self._lock:
            self._catch_up()
        while True:
            self._be_in_place()
            try:
                with self._bucket(_key_tag(name), wait) as bucket:
                    waiting = self._waiting_of(bucket, name)
                    task = self._claim(f"pending/{waiting}", lasts_ns) if waiting else None
            except BlockingIOError:
                return None
            if task is not None or not waiting:
                return task  # RACE: else a pop() was quicker, and we see it in flight now

    def _take_id(self, ident: str, lasts_ns: int, wait: bool) -> FemtoTask | None:
        """Lease a waiting task by its id; wait=False: as for a key."""
        if self._now_ns() >= self._attend_at_ns:
            self._attend()
        if self.paused:
            return None
        while True:
            self._be_in_place()
            try:
                with self._locks_of(ident, wait):
                    path = self._waiting_path(ident)
                    task = self._claim(path, lasts_ns) if path else None
            except BlockingIOError:
                return None
            if task is not None or not path:
                return task  # RACE: else another was quicker, and we see it in flight now

    def _waiting_path(self, ident: str) -> str:
        """Return where a task of that id waits, "" if it does not."""
        if _is_there(f"{self._root}pending/{ident}"):  # never delivered
            return f"pending/{ident}"
        for state in ("scheduled", "pending"):  # as it moves
            for path, _, found in self._find(state):
                if found == ident:
                    return path[len(self._root) :]
        return ""

    def _take_or_drained(self, end_s: float) -> FemtoTask | None:
        """Wait for a task; _NO_TASK: none is left anywhere, None: the time is over."""

        def look() -> FemtoTask | None:
            task = self._take_oldest(self._timeout_ns)
            return _NO_TASK if task is None and self._is_drained() else task

        return self._wait_for(look, end_s, False)

    def _waiting_of(self, bucket: _Bucket, name: str) -> str:
        """Return the name in pending/ of a key's task; "" if it is not to be had."""
        state, _, waiting = (self._find_key(bucket, name) or "").partition("/")
        if state == "scheduled":
            return "" if int(waiting[:20]) > _wall_ns() else self._woken(waiting)
        return waiting if state == "pending" else ""

    def _wait_for(
        self, look: Callable[[], _Found | None], end_s: float, hears_all: bool = True
    ) -> _Found | None:
        """Look until something is found, the time has come, or close() was called: None.

        hears_all=False: it may be found without an event, as when others finish a task.
        """
        closes = self._closes
        found = self._look(look, closes)
        if found is not None or time.monotonic() >= end_s:
            return found
        with self._lock:
            bell = self._bell = self._bell or _Bell(self._root)
        rests_s = self._rests_s(bell, end_s)
        while True:
            rings = bell.rings  # what comes from now on is either seen or heard
            found = self._look(look, closes)
            if found is not None or self._closes != closes:
                return found
            rest_s = next(rests_s, None)
            if rest_s is None:
                return None
            bell.wait(rings, rest_s if hears_all else min(rest_s, self.poll_interval_s))

    def _look(self, look: Callable[[], _Found | None], closes: int) -> _Found | None:
        """Look once, for a wait that began when close() had been called `closes` times."""
        self._in_hand.closes = closes
        try:
            return look()
        except _Closed:
            return None
        finally:
            self._in_hand.closes = None

    def _check_wait(self) -> None:
        """Raise _Closed in a thread whose wait close() has ended. Call it with _lock held."""
        if getattr(self._in_hand, "closes", None) not in (None, self._closes):
            raise _Closed

    def _end_waits(self) -> None:
        """Wake all who wait, after the number of close() calls has grown."""
        if self._bell is not None:
            self._bell.interrupt()
        for loop, hall in list(self._halls.items()):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(hall.ring)

    def _rests_s(self, bell: _Bell, end_s: float) -> Iterator[float]:
        """Yield how long to wait before each further look, until the time has come."""
        pause_s = min(_FIRST_PAUSE_S, self.poll_interval_s)
        while (left_s := end_s - time.monotonic()) > 0:
            rest_s = self._rest_s()
            if rest_s <= 0:  # something is stuck, or somebody else is at it
                rest_s = pause_s
            yield min(left_s, rest_s if bell.hears_all else min(rest_s, pause_s))
            pause_s = min(2 * pause_s, self.poll_interval_s)

    def _rest_s(self) -> float:
        """Return the time until a task comes due, a lease ends or a chore is to be done."""
        next_ns = min(self._attend_at_ns, self._next_end_ns)
        return min(next_ns - self._now_ns(), self._next_due_ns - _wall_ns()) / 1e9

    async def _wait_for_async(
        self, look: Callable[[], FemtoTask | None], end_s: float, line: str
    ) -> FemtoTask | None:
        import asyncio

        loop = asyncio.get_running_loop()
        hall = self._halls.get(loop)
        if hall is None:
            hall = self._halls[loop] = _Hall(self._root)
        rests_s = self._rests_s(hall.bell, end_s)
        closes = self._closes
        async with hall.turn(line, end_s):
            while self._closes == closes:
                rings = hall.bell.rings
                task = await self._look_async(look, closes)
                if task is not None:
                    return task
                rest_s = next(rests_s, None)
                if rest_s is None:
                    return None
                await hall.wait(rings, rest_s)
        return None

    async def _look_async(
        self, look: Callable[[], FemtoTask | None], closes: int
    ) -> FemtoTask | None:
        import asyncio

        lookers = self._lookers
        if lookers is None:
            from concurrent.futures import ThreadPoolExecutor

            lookers = self._lookers = ThreadPoolExecutor(32, "femtoqueue")
        try:
            looking = lookers.submit(self._look, look, closes)
        except RuntimeError:
            if self._closes == closes:
                raise
            return None  # RACE: close() in another thread
        try:
            return await asyncio.wrap_future(looking)
        except BaseException:  # cancelled: the thread may have, or may yet get, a task for nobody
            looking.add_done_callback(self._give_back_found)
            raise

    def _give_back_found(self, looking: Future[FemtoTask | None]) -> None:
        if looking.cancelled() or looking.exception() is not None:
            return
        task = looking.result()
        if task is None:
            return
        try:
            self._give_back(task)
        except (LeaseLost, OSError) as error:
            _log().warning("task %s waits for the end of its lease: %s", task.id, error)

    def _is_drained(self) -> bool:
        """Whether nothing waits or is leased. Looked at four times: meanwhile tasks move both ways,
        and one that moves against us each time is not to be believed in."""
        return not any(
            self._has_tasks(directory, state)
            for _ in range(4)
            for directory, state in (
                *((self._root + state, state) for state in ("keys", "scheduled", "pending")),
                *((directory, "inflight") for directory in self._node_dirs()),
            )
        )

    def _has_tasks(self, directory: str, state: str) -> bool:
        try:
            with os.scandir(directory) as entries:
                return any(_PARSE[state](entry.name) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return False  # no keys yet; RACE: removed with its worker just now

    # Keeping a lease while its task is worked on

    def _keep_lease(self, processing: _Processing) -> None:
        """Renew the lease, at once if much of it is over, and now and then from now on."""
        task = processing.task
        if self._left_ns(task) < task._lease_ns * 2 / 3:
            self._renew_lease(task)
        elif not _is_there(self._root + task.path):
            raise self._lease_lost(task)
        with self._lock:
            self._under_way[id(task)] = processing
            pause_s = task._lease_ns / 1e9 * _RENEWAL
            if task._lease_ns < _FOREVER_NS and (
                self._renewer.is_set() or pause_s < self._renewal_s
            ):
                self._renewer.set()  # one that comes by more seldom ends
                self._renewer, self._renewal_s = threading.Event(), pause_s
                # Not a bound method: the thread must not keep a dropped queue in its place.
                renewing = (weakref.ref(self), self._renewer, pause_s)
                try:
                    threading.Thread(target=_renew_leases, args=renewing, daemon=True).start()
                except BaseException:
                    self._renewer.set()
                    raise

    def _renew_all(self, renewer: threading.Event) -> float:
        """Renew what is under way. Return in how many seconds to do so again; 0, and the thread
        ends, if nothing is."""
        with self._lock:
            under_way = [it for it in self._under_way.values() if it.task._lease_ns < _FOREVER_NS]
            if not under_way or renewer.is_set():
                renewer.set()
                return 0
            self._renewal_s = min(it.task._lease_ns for it in under_way) / 1e9 * _RENEWAL
        pause_s = self._renewal_s
        for processing in under_way:
            task = processing.task
            if self._left_ns(task) - self._renewal_s * 1e9 >= task._lease_ns * (1 - _RENEWAL):
                continue  # the next time will do: shorter leases make us come by more often
            try:
                if id(task) in self._under_way:
                    # Not waiting for the lock of its key: somebody may be stopped while he has it.
                    self._renew_lease(task, wait=False)
            except LeaseLost:
                self._under_way.pop(id(task), None)  # its block will see
            except BlockingIOError:
                pause_s = self._renewal_s / 10
            except OSError as error:
                pause_s = self._renewal_s / 10
                _log().warning("task %s: its lease is not renewed: %s", task.id, error)
        return pause_s

    def _renew_lease(self, task: FemtoTask, wait: bool = True) -> None:
        """extend(), but never to less than is left."""
        with self._locks_of(task.id, wait), self._lock:
            self._extend(task, max(task._lease_ns, self._left_ns(task)))

    def _extend(self, task: FemtoTask, timeout_ns: int) -> None:
        with self._locks_of(task.id), self._lock:
            if id(task) in self._under_way:  # what renews it comes by no sooner
                timeout_ns = max(timeout_ns, task._lease_ns)
            deadline_ns = self._now_ns() + timeout_ns
            node_dir, _, name = task.path.rpartition("/")
            lease = f"{node_dir}/{deadline_ns:020d}{name[20:]}"
            renewed = False
            try:
                self._settle(task, lease)
                renewed = True
            finally:  # also when Ctrl-C came between the rename and here
                if renewed or os.path.lexists(self._root + lease):
                    object.__setattr__(task, "path", lease)
            self._next_end_ns = min(self._next_end_ns, deadline_ns)

    def _left_ns(self, task: FemtoTask) -> int:
        return int(os.path.basename(task.path)[:20]) - self._now_ns()

    def _retry_delay_s(self, attempts: int) -> float:
        delay_s = min(self.retry_delay_s * 2.0 ** min(attempts - 1, 64), _LONGEST_RETRY_S)
        return delay_s * (1 - os.urandom(1)[0] / 512)  # what failed together comes apart

    # Moves

    def _publish(
        self,
        ident: str,
        data: bytes | bytearray | memoryview,
        path: str,
        *,
        sync_file: bool | None = None,
        sync_dir: bool | None = None,
        key: str = "",
    ) -> None:
        """Write a record aside and rename it to `path`: the task exists from then on.

        To be durable it is synced after the rename (one journal commit instead of two), the file
        first: the checksum tells what a power cut tore before we returned.
        """
        payload = data if type(data) is bytes else _as_bytes(data)
        header = _header(payload, key)
        aside = f"{self._root}creating/{ident}"
        if sync_file is None:
            sync_file = sync_dir = self.sync_after_write
        fd = os.open(aside, _CREATE_FLAGS, 0o666)
        try:
            try:
                _write_all(fd, header, payload)
                if sync_file and _RENAMES_OPEN_FILES:
                    _move(aside, path)
                if sync_file:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not (sync_file and _RENAMES_OPEN_FILES):
                _move(aside, path)
            if sync_dir:
                _sync_dir(os.path.dirname(path))
        except BaseException:
            # Not acknowledged, so not there; a consumer that was quicker keeps what it has.
            for leftover in (aside, path):
                _unlinked(leftover, or_fail=False)
            raise

    def _claim(self, waiting: str, lasts_ns: int) -> FemtoTask | None:
        """Rename one waiting task into our lease directory; None if it is not to be had."""
        name = waiting.partition("/")[2]
        form = _parse_pending(name)
        if form is None:
            return None  # not ours
        attempts, ident = int(form[1] or 0), form[2]
        if fcntl is None and _is_keyed(ident):
            return None  # it could be leased, but never finished
        if self.max_attempts is not None and attempts >= self.max_attempts:
            self._give_up(waiting, ident, attempts)
        else:
            lease_name = self._seize(waiting, min(attempts + 1, _MOST_ATTEMPTS), ident, lasts_ns)
            if lease_name:
                return self._read_leased(lease_name, waiting, form, lasts_ns)
        if attempts and _may_be_renamed(name):
            # RACE: its payload was replaced after we listed it; its place is still this one.
            return self._claim(_renewed(waiting, None), lasts_ns)
        self._pass_over_the_taken()
        return None

    def _read_leased(
        self, lease_name: str, waiting: str, form: re.Match[str], lasts_ns: int
    ) -> FemtoTask | None:
        """Read what we claimed; None, and undo the claim or set it aside, if that is no use."""
        ident, lease = form[2], self._node_dir + lease_name
        try:
            data, key = _read_record(self._root + lease, ident)
            if key is not None and not self._may_have(key, ident, lease):
                return None
            # What was pushed and never delivered bears its id as its name, and has none.
            checkpoint = None if form[0] == ident else self._read_checkpoint(ident, data)
        except CorruptTask as error:
            self._set_aside(lease, ident, error.reason)
            return None
        except FileNotFoundError:
            self._unseize(lease_name, waiting)
            return None
        except BaseException as error:
            self._hand_back(lease, waiting, form, error)
            raise
        attempts = _attempts_in(lease_name)
        return FemtoTask(
            ident,
            data,
            attempts,
            key,
            checkpoint,
            path=lease,
            _lease_ns=lasts_ns,
            _anchor_ns=self._anchor_ns,
        )

    def _forget_checkpoint(self, ident: str) -> None:
        _unlinked(f"{self._root}checkpoints/{ident}", or_fail=False)

    def _read_checkpoint(self, ident: str, data: bytes) -> bytes | None:
        """Return how far the work on that payload had come: of a key, another may be here now."""
        try:
            saved, _ = _read_record(f"{self._root}checkpoints/{ident}", ident)
        except FileNotFoundError:
            return None
        except CorruptTask as error:  # power loss: the work begins anew
            _log().warning("checkpoints/%s: %s", ident, error.reason)
            return None
        of_data = _header(data)
        if saved.startswith(of_data):
            return saved[len(of_data) :]
        self._forget_checkpoint(ident)
        return None

    def _seize(self, waiting: str, attempts: int, ident: str, lasts_ns: int) -> str:
        """Rename a task into the directory that we hold locked, whatever has its name by now.
        Return its name there; "" if another worker was first, or if we have no place (any more)."""
        with self._lock:  # so that close() in another thread does not close the descriptor
            self._check_wait()
            deadline_ns = self._now_ns() + lasts_ns  # now: we may have waited for the lock
            boot = _DETACHED if self.detached else self._boot
            lease_name = _stamped(deadline_ns, attempts, f"{boot}~{ident}")
            try:
                if fcntl is None:
                    os.rename(self._root + waiting, self._root + self._node_dir + lease_name)
                elif self._lease_fd is None:
                    return ""  # RACE: closed by another thread
                else:
                    os.rename(self._root + waiting, lease_name, dst_dir_fd=self._lease_fd)
            except BaseException as error:
                if getattr(error, "errno", None) not in _GONE:
                    self._unseize(lease_name, waiting)  # Ctrl-C may come when it is done
                    raise
                if not isinstance(error, FileNotFoundError):
                    self._batch.clear()  # our place is gone: the next listing makes it again
                return ""
        return lease_name

    def _unseize(self, lease_name: str, waiting: str) -> None:
        """Undo a claim that was interrupted, or whose file is not at its path: a person took it
        out, or moved our whole directory away, where it must not be lost."""
        with self._lock:
            self._batch.clear()  # look again, at our place too
            with contextlib.suppress(FileNotFoundError):
                if self._lease_fd is not None:
                    os.rename(lease_name, self._root + waiting, src_dir_fd=self._lease_fd)
                elif fcntl is None:
                    os.rename(self._root + self._node_dir + lease_name, self._root + waiting)

    def _hand_back(
        self, lease: str, waiting: str, form: re.Match[str], error: BaseException
    ) -> None:
        """Undo a claim that was interrupted, or whose file could not be read.

        It goes back to its place if that is no fault of the file's, else to the back: a file
        that can't be read, or is too large for our memory, must not keep out of work all who
        start with the oldest task.
        """
        if isinstance(error, Exception) and getattr(error, "errno", None) not in _SHORTAGES:
            attempts = int(form["attempts"] or 0)
            waiting = f"pending/{_stamped(self._next_order(), attempts, form['id'])}"
        with contextlib.suppress(FileNotFoundError):  # it had not been claimed yet
            # CRASH: before it, a lease like any
            try:
                self._remember(self._transfer(lease, form["id"], waiting))
            except OSError:
                self._abandon(lease)
                raise

    def _abandon(self, lease: str) -> None:
        """Have a lease put back, by the next look at leases, that nobody works under any more."""
        self._leftovers.add(os.path.basename(lease))
        self._next_end_ns = 0

    def _pass_over_the_taken(self) -> None:
        """After a lost race, drop what else of our batch is gone.

        To look costs a third of a rename() that fails, and holds up nobody. Not the race but our
        own directory may be what is gone: the next listing makes it again.
        """
        pending = f"{self._root}pending/"
        with self._lock:
            while (
                self._batch
                and not os.access(pending + self._batch[-1], os.F_OK)
                and not _may_be_renamed(self._batch[-1])
            ):
                self._batch.pop()

    def _settle(self, task: FemtoTask, target: str) -> str:
        """Move a leased task out of its lease: every end of a delivery is here. Return where to."""
        with self._locks_of(task.id), self._lock:
            try:
                gone_to = self._transfer(task.path, task.id, target)
            except FileNotFoundError:
                place = os.path.dirname(target)
                os.stat(self._root + (place if place in _DIRS else ""))  # gone: disk trouble
                raise self._lease_lost(task) from None
            if self._under_way and not target.startswith("inflight-"):
                processing = self._under_way.pop(id(task), None)
                if processing is not None:
                    processing.outcome = _OUTCOMES[target.partition("/")[0]]
        if task.checkpoint is not None and _is_end(target):
            self._forget_checkpoint(task.id)
        return gone_to

    def _give_up_lease(self, task: FemtoTask, target: str) -> None:
        target = self._settle(task, target)
        self._remember(target)
        self._sync_task(target)

    def _give_back(self, task: FemtoTask) -> None:
        """End a delivery that does not count: the task is at its place again, the front."""
        self.release(task, front=True, counted=False)

    def _transfer(self, source: str, ident: str, target: str, wait: bool = True) -> str:
        """Move a task that is in one state to another; "": remove it. Return where it went.

        A keyed one moves under the lock of its key, and lets in the newer payload behind it.
        wait=False: BlockingIOError if somebody else has that lock.
        """
        if _is_keyed(ident):
            with self._bucket(ident[-8:], wait) as bucket:
                return self._transfer_keyed(bucket, source, ident, target)
        self._rename(source, target)
        return target

    def _rename(self, source: str, target: str) -> None:
        if not target:
            os.unlink(self._root + source)
            return
        _move(self._root + source, self._root + target)
        # POSIX: rename() does nothing, and succeeds, if both names are links to one file. So stands
        # a finished task whose lease came back, when GlusterFS healed a host that had been cut off:
        # it would be delivered for ever. Its first delivery, of all others, pays nothing for that.
        first = source.startswith("inflight-") and _attempts_in(source) < 2
        if target.startswith(("done/", "failed/")) and not first:
            _unlinked(self._root + source)

    def _sync_task(self, path: str) -> None:
        """Make durable where a task stands, with sync_after_write: the file first, then the
        directory. The directory alone is not enough: after power loss btrfs had the task in the
        one that it came from as well, and what was done was delivered again."""
        if not self.sync_after_write:
            return
        with contextlib.suppress(FileNotFoundError):  # RACE: it moved on, by another's hand
            if stat.S_ISREG(os.lstat(self._root + path).st_mode):
                _sync_path(self._root + path, _READ_FLAGS)
        _sync_dir(self._root + os.path.dirname(path))

    def _lease_lost(self, task: FemtoTask) -> LeaseLost:
        late_ns = self._now_ns() - int(os.path.basename(task.path)[:20])
        if late_ns >= 0:
            why = f"its lease ran out {late_ns / 1e9:.3f} s ago; it was taken back, or has ended"
        else:
            why = "it is not in this worker's hands any more: finished, moved, or given up before"
        return LeaseLost(task.id, late_ns >= 0, why)

    def _bury(
        self, ident: str, error: str | BaseException | None, move: Callable[[], object]
    ) -> None:
        """Move a task to failed/ with its reason.

        The move is the commit and the fence, so it comes first: one who lost the lease must not
        leave a word about another's delivery. CRASH: between the two the reason is lost.
        """
        aside = f"{self._root}creating/{self._new_id()}.error"
        if error is not None:
            _write_aside(aside, _reason(error).encode("utf-8", "backslashreplace"))
        reason_path = f"{self._root}failed/{ident}.error"
        try:
            move()
            if error is None:
                _unlinked(reason_path)  # of an earlier failure, retried by hand
            else:
                _move(aside, reason_path, self.sync_after_write)
        except BaseException:
            _unlinked(aside, or_fail=False)
            raise
        self._sync_task(f"failed/{ident}")

    def _give_up(self, waiting: str, ident: str, attempts: int) -> None:
        reason = f"delivered {attempts} times without done() or fail(): max_attempts reached"
        with contextlib.suppress(BlockingIOError):  # RACE: its payload is being replaced
            self._set_aside(waiting, ident, reason, wait=False)

    def _set_aside(self, source: str, ident: str, reason: str, wait: bool = True) -> None:
        """Make a dead letter of a task that can't be delivered, and say so in the log.

        Without its reason if there is no room for that, or else it goes to the back: it must not
        stand before what could be worked on, and would make room.
        """
        back = _stamped(self._next_order(), _attempts_in(source), ident)

        def bury(why: str | None) -> None:
            if os.path.lexists(f"{self._root}failed/{ident}"):
                # By hand. It stays as it is, and so does its reason.
                self._transfer(source, ident, f"failed/{back}", wait)
            else:
                move = functools.partial(self._transfer, source, ident, f"failed/{ident}", wait)
                self._bury(ident, why, move)

        try:
            bury(reason)
        except FileNotFoundError:
            return  # RACE: another worker took it, or set it aside first
        except BlockingIOError:
            raise
        except OSError:
            try:
                bury(None)
            except FileNotFoundError:
                pass  # it has moved: what failed was its reason
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    # RACE: another worker took it. Or it has moved, and what failed was the sync.
                    self._transfer(source, ident, f"pending/{back}", wait)
                raise
        self._forget_checkpoint(ident)
        _log().error("task %s is in failed/: %s", ident, reason)

    def _retried(self, path: str, ident: str) -> bool:
        target = f"pending/{_stamped(self._next_order(), 0, ident)}"
        source = path[len(self._root) :]
        try:
            with self._locks_of(ident) as bucket:
                if bucket is not None:
                    self._make_room(bucket, source, target)
                # The reason goes first: after the rename, a new one may be written at any time.
                _unlinked(f"{self._root}failed/{ident}.error")
                self._transfer(source, ident, target)
        except FileNotFoundError:
            os.stat(f"{self._root}pending")  # gone: disk trouble
            return False  # RACE: somebody else retried or removed it
        self._remember(target)
        self._sync_task(target)
        return True

    def _put_back(self, directory: str, name: str, form: re.Match[str]) -> None:
        """End somebody's lease: the task goes back to the place of its push, the front."""
        ident, lease = form["id"], f"{os.path.basename(directory)}/{name}"
        waiting = _stamped(int(ident[:20]), int(form["attempts"]), ident)
        try:
            target = self._transfer(lease, ident, f"pending/{waiting}", wait=False)
        except FileNotFoundError:
            return  # RACE: its holder settled it, or another observer was first
        except OSError as error:
            if directory == self._lease_dir:
                self._leftovers.add(name)  # it does not look like one: we live
            if isinstance(error, BlockingIOError):
                return  # RACE: somebody works on its key; next time
            raise
        self._remember(target)

    def _put_back_all(self, directory: str, boot: str | None) -> None:
        """Put back the leases of a directory whose lock we hold; None: whatever their boot."""
        trouble = _Trouble()
        for name, form in self._listed(directory, "inflight"):
            if form["boot"] != _DETACHED and boot in (None, form["boot"]):
                with trouble:
                    self._put_back(directory, name, form)
        trouble.surface()

    def _remember(self, path: str) -> None:
        """What was put in front of our batch is next; all else is found by the next listing."""
        state, _, name = path.partition("/")
        with self._lock:
            if state == "scheduled":
                self._next_due_ns = min(self._next_due_ns, int(name[:20]))
            elif self._batch and name < self._batch[-1]:
                self._batch.append(name)

    # Keyed tasks

    # Invariant: of each key at most one task is in pending/, scheduled/ or inflight-*/, and at most
    # one newer payload in keys/, behind a task in flight. Whoever moves a keyed task or its payload
    # holds the lock of its key, but for pop() and people: a task that waits may be gone any time.

    @contextlib.contextmanager
    def _bucket(self, tag: str, wait: bool = True) -> Iterator[_Bucket]:
        """Hold the lock of the keys of one hash. Blocks, so not with _lock held: somebody, another
        thread too, may be stopped while he has it. wait=False: BlockingIOError. It may be asked
        for again inside."""
        outer: _Bucket | None = getattr(self._in_hand, "bucket", None)
        if outer is not None and outer.tag == tag:
            yield outer
            return
        # In a signal handler, say, the same lock may be needed for another hash.
        holds_lock = outer is not None and outer.tag[-2:] == tag[-2:]
        bucket = _Bucket(self._root, tag, wait, holds_lock)
        self._in_hand.bucket = bucket
        try:
            if self._is_shared():
                bucket.hints = self._listed_hints(bucket)
            yield bucket
        finally:
            self._in_hand.bucket = outer
            bucket.close()

    def _locks_of(
        self, ident: str, wait: bool = True
    ) -> contextlib.AbstractContextManager[_Bucket | None]:
        return self._bucket(ident[-8:], wait) if _is_keyed(ident) else _NO_LOCK

    def _push_keyed(
        self,
        data: bytes | bytearray | memoryview,
        key: str | None,
        if_in_flight: str,
        due_ns: int | None,
    ) -> str:
        if if_in_flight not in _POLICIES:
            raise ValueError(f"if_in_flight must be {' or '.join(_POLICIES)}, not {if_in_flight!r}")
        name = _quoted(key)
        payload = data if type(data) is bytes else _as_bytes(data)
        while True:
            self._be_in_place()
            with self._bucket(_key_tag(name)) as bucket:
                path = self._find_key(bucket, name)
                if path is None:
                    return self._push_first(bucket, name, payload, due_ns)
                if path.startswith("inflight-"):
                    ident = self._push_to_leased(bucket, name, payload, if_in_flight, due_ns)
                else:
                    ident = _id_in(path) if self._replaced(bucket, name, payload, due_ns) else ""
            if ident:
                return ident  # RACE: else a pop() was quicker, and we see it in flight now

    def _push_first(
        self, bucket: _Bucket, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> str:
        ident = f"{self._next_order():020d}-{bucket.tag}"
        path = f"pending/{ident}" if due_ns is None else f"scheduled/{_stamped(due_ns, 0, ident)}"
        bucket.hints[name] = _Hint(path)
        try:
            # The hint is there first: a task that it does not know would be one too many.
            bucket.save(self.sync_after_write)
            self._publish(ident, payload, self._root + path, key=name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._find_key(bucket, name)  # a consumer that was quicker keeps what it has
            raise
        self._remember(path)
        return ident

    def _replaced(
        self, bucket: _Bucket, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> bool:
        """Replace the payload of a waiting task; False if a pop(), or a person, was quicker."""
        hint = bucket.hints[name]
        with self._written(name, payload) as aside:
            target = _renewed(hint.path, due_ns)
            if target.startswith("scheduled/"):
                replaced = self._replace_scheduled(hint, aside, target)
            else:
                replaced = self._replace_pending(hint, aside, target)
            if replaced:
                self._sync_task(hint.path)
        return replaced

    def _replace_scheduled(self, hint: _Hint, aside: str, target: str) -> bool:
        """Move a waiting task to scheduled/, or to another time there, and swap its record.

        CRASH: after the rename the task has the new time and the old payload. The other order
        could deliver the new payload before its time.
        """
        if target != hint.path:
            try:
                _move(self._root + hint.path, self._root + target)
            except FileNotFoundError:
                return False  # RACE: a pop() took it from pending/, or a person moved it
            hint.path = target
            self._remember(target)
        return self._swap(aside, target) is not False

    def _replace_pending(self, hint: _Hint, aside: str, target: str) -> bool:
        """Swap the record of a task in pending/: pop() sees the old one or the new one there, at
        each instant, and at its old place.

        CRASH: after the swap the new payload counts the deliveries of the old one, and the old
        record is a leftover in creating/.
        """
        swapped = self._swap(aside, hint.path, under_lease=True)
        if swapped is None:
            return self._take_over(hint, aside, None)
        if swapped and target != hint.path:
            with contextlib.suppress(FileNotFoundError):  # RACE: a pop() took the new payload
                # Its attempts begin anew. Whoever listed the old name tries this one too (_claim).
                _move(self._root + hint.path, self._root + target)
                hint.path = target
        return swapped

    def _swap(self, aside: str, path: str, under_lease: bool = False) -> bool | None:
        """Put the record `aside` in the place of the one at `path`, which goes aside, by one call.
        False: there is none at `path` (any more).

        Where renameat2(2) can't exchange names (NFS, FUSE; not Linux) the new record is renamed
        over the old one, and a person who moves that one at the same instant makes two tasks. With
        under_lease nothing is done there, and None is returned: a pop() may be quicker.
        """
        try:
            _exchange(aside, self._root + path)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
        if under_lease:
            return None
        if not _is_there(self._root + path):
            return False
        _move(aside, self._root + path)
        return True

    def _take_over(self, hint: _Hint, record: str, due_ns: int | None) -> bool:
        """Give a waiting task a new payload, where names can't be exchanged, or where the record
        must not be anywhere else afterwards: it is renamed over the task's.

        Under a lease of our own, so that the task is nobody else's meanwhile; a pop() finds no
        task then. False if a pop() was quicker, or a person moved the lease. CRASH: the lease ends
        and the task is back at its place, with the old payload or the new one.
        """
        source, target = hint.path, _renewed(hint.path, due_ns)
        if source.startswith("scheduled/"):  # no pop() takes it from there
            self._renew(record, source, target)
        else:
            lease_name = self._seize(source, _attempts_in(source), _id_in(source), _BORROWED_NS)
            if not lease_name:
                return False
            try:
                self._renew(record, self._node_dir + lease_name, target)
            except BaseException as error:
                self._unseize(lease_name, source)
                if isinstance(error, FileNotFoundError):
                    return not os.path.lexists(record)  # by hand, before or after the new payload
                raise
        hint.path = target
        self._remember(target)
        return True

    def _renew(self, record: str, source: str, target: str) -> None:
        """Move a task that nobody else may take to its place, with a new payload.

        CRASH: between the two renames it has the old payload or the new one; but the new one is
        never anywhere where it may be had before its time.
        """
        if target.startswith("scheduled/"):
            _move(self._root + source, self._root + target)
            _move(record, self._root + target)
        else:
            os.lstat(self._root + source)  # a person may have moved it: the rename would make two
            _move(record, self._root + source)
            _move(self._root + source, self._root + target)

    def _push_to_leased(
        self,
        bucket: _Bucket,
        name: str,
        payload: bytes | memoryview,
        if_in_flight: str,
        due_ns: int | None,
    ) -> str:
        path = bucket.hints[name].path
        if if_in_flight == "reject":
            raise KeyInFlight(_unquoted(name), _id_in(path))
        if if_in_flight == "buffer":
            return self._push_behind(bucket, name, payload, due_ns)
        with self._written(name, payload) as aside:
            if not self._swap(aside, path):
                return ""  # by hand, while we wrote
        self._sync_task(path)
        return _id_in(path)

    def _push_behind(
        self, bucket: _Bucket, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> str:
        """Put a newer payload behind the task in flight, or in the place of the one behind it."""
        hint, before = bucket.hints[name], self._newer(bucket.hints[name])
        ident = _id_in(before) or f"{self._next_order():020d}-{bucket.tag}"
        hint.newer = ident if due_ns is None else _stamped(due_ns, 0, ident)
        keys = f"{self._root}keys/"
        try:
            bucket.save(self.sync_after_write)
            if not before:
                self._publish(ident, payload, keys + hint.newer, key=name)
                return ident
            with self._written(name, payload) as aside:
                if before != hint.newer:  # CRASH: after it, the old payload at the new time
                    _move(keys + before, keys + hint.newer)
                _move(aside, keys + hint.newer)
        except BaseException:
            hint.newer = before
            raise
        self._sync_task(f"keys/{hint.newer}")
        return ident

    @contextlib.contextmanager
    def _written(self, name: str, payload: bytes | memoryview) -> Iterator[str]:
        """Write a record aside that is to replace another. It is synced before: power loss must
        leave one of them whole."""
        aside = f"{self._root}creating/{self._new_id()}"
        _write_aside(aside, _header(payload, name), payload, self.sync_after_write)
        try:
            yield aside
        finally:
            _unlinked(aside, or_fail=False)

    def _may_have(self, key: str, ident: str, lease: str) -> bool:
        """Whether a keyed task that we just leased is the one of its key; set it aside if not.

        A hint that was lost with power, or `mv failed/ID pending/`, makes two of them.
        """
        name = _quoted(key)
        hint = _read_hints(self._root, _key_tag(name)).get(name)
        if hint is not None and _id_in(hint.path) == ident:
            return True
        with self._bucket(_key_tag(name)) as bucket:
            if self._is_shared():
                bucket.hints = self._listed_hints(bucket, but=lease)
            path = self._find_key(bucket, name)
            if path is None:
                bucket.hints[name] = _Hint(lease)
            elif _id_in(path) != ident:
                self._set_aside(lease, ident, str(KeyInFlight(key, _id_in(path))))
                return False
        return True

    def _find_key(self, bucket: _Bucket, name: str, thorough: bool = True) -> str | None:
        """Return where the task of a key stands, None if it has none; mend what is known of it.

        thorough=False: the caller has listed all that waits, and it was not there.
        """
        hint = bucket.hints.get(name)
        if hint is None:
            return None
        path = self._whereabouts(hint.path, thorough)
        if path is None and hint.newer:
            # CRASH: who ended the task before it died here, or after letting it in. Or by hand.
            newer = f"pending/{_id_in(hint.newer)}"
            path = self._let_in(hint) if self._newer(hint) else self._whereabouts(newer)
        if path is None:
            del bucket.hints[name]
            return None
        hint.path, hint.newer = path, self._newer(hint)
        if hint.newer and not path.startswith("inflight-"):
            # CRASH: when it came back and before the newer one took its place. Or by hand. If that
            # fails now, a pop() has just taken it, or we have no place: then the newer comes after.
            record = f"{self._root}keys/{hint.newer}"
            if self._take_over(hint, record, _due_ns_in(hint.newer)):
                hint.newer = ""
            return self._whereabouts(hint.path)
        return path

    def _is_shared(self) -> bool:
        """Whether other hosts may write to data_dir's file system, so that what one host reads of a
        file or a name may be old: Linux knows; elsewhere it is taken to be local."""
        if self._shared is None:
            self._shared = _fs_type(self._root) not in (0, *_LOCAL_TYPES)
        return self._shared

    def _listed_hints(self, bucket: _Bucket, but: str = "") -> dict[str, _Hint]:
        """Return the hints of a hash as the directories tell them, without the file at `but`.

        For file systems of several hosts. Contents and single names that another host changed may
        be read as they were for a second (GlusterFS) or thirty (NFS); listings and renames are
        answered by the server.
        """
        known = bucket.hints.items()
        keys = {_id_in(path): name for name, it in known for path in (it.path, it.newer)}
        hints: dict[str, _Hint] = {}
        # In this order a pop(), which moves from pending/ to in flight, is not missed.
        for state in ("keys", "scheduled", "pending", "inflight"):
            for path, _, ident in self._find(state):
                if ident[-8:] != bucket.tag or path.endswith(but or "\0"):
                    continue
                name = keys.get(ident) or self._key_at(path)
                if name and state == "keys":
                    hints[name] = _Hint(f"pending/{ident}", os.path.basename(path))
                elif name:
                    hints.setdefault(name, _Hint("")).path = path[len(self._root) :]
        return hints

    def _key_at(self, path: str) -> str:
        """Return the key of a record as it stands in names, "" if it has none or is not whole."""
        try:
            key = _read_record(path, _id_in(path))[1]
        except (CorruptTask, FileNotFoundError):
            return ""
        return "" if key is None else _quoted(key)

    def _may_have_task(self, name: str) -> bool:
        """Whether a key may have a task; False is cheap to know, on a file system of this host."""
        return self._is_shared() or _is_there(f"{self._root}keys/{_key_tag(name)}")

    def _whereabouts(self, path: str, thorough: bool = True) -> str | None:
        """Return where a task is that was at `path`, None if it does not wait and is not leased.

        Lists pending/ only if it is not where a pop(), and nobody else, would have brought it.
        """
        if not path.startswith("inflight-") and os.path.lexists(self._root + path):
            return path
        elsewhere = ("pending", "scheduled", "inflight") if thorough else ()
        for state in ("inflight", *elsewhere):
            for found, _, ident in self._find(state):
                if ident == _id_in(path):
                    return found[len(self._root) :]
        return None

    def _newer(self, hint: _Hint) -> str:
        """Return the name in keys/ of the newer payload behind a task, "" if there is none."""
        if not hint.newer or os.path.lexists(f"{self._root}keys/{hint.newer}"):
            return hint.newer
        # CRASH: before it came there, before it got that name, or after it was let in.
        names = (name for name, form in self._listed("keys") if form["id"] == _id_in(hint.newer))
        return next(names, "")

    def _let_in(self, hint: _Hint) -> str:
        """Move a newer payload into the queue: the task before it has come to its end."""
        newer = self._newer(hint)
        path = f"{'scheduled' if '~' in newer else 'pending'}/{newer}"
        _move(f"{self._root}keys/{newer}", self._root + path)
        hint.path, hint.newer = path, ""
        self._remember(path)
        self._sync_task(path)
        return path

    def _transfer_keyed(self, bucket: _Bucket, source: str, ident: str, target: str) -> str:
        name = next((key for key, hint in bucket.hints.items() if _id_in(hint.path) == ident), "")
        hint = bucket.hints[name] if name else _Hint(source)
        ends = _is_end(target)
        comes_back = not ends and not target.startswith("inflight-")
        # In pending/ it is a pop()'s at any time; whoever finds it there mends that (_find_key).
        if comes_back and not source.startswith("pending/") and (newer := self._newer(hint)):
            return self._come_back(hint, newer, source, target)
        try:
            self._rename(source, target)
            if not ends:
                hint.path = target
            elif self._newer(hint):
                self._let_in(hint)
            elif name:
                del bucket.hints[name]
        except BaseException:
            self._mending.at_s = 0.0  # the next pop() lets in what stands behind it
            raise
        return target

    def _come_back(self, hint: _Hint, newer: str, source: str, target: str) -> str:
        """Put a task back with the newer payload in its place, by the rename over it.

        The fence first, if it was leased: a late holder must not end what it never saw.
        """
        if source.startswith("inflight-"):
            node_dir, _, name = source.partition("/")
            fenced = f"{node_dir}/{self._now_ns():020d}{name[20:]}"
            _move(self._root + source, self._root + fenced)  # gone: the lease is lost
            source = fenced
        else:
            # RACE: another woke it before we had the lock, and it may be in flight by now: then
            # the rename over it would make a second one.
            os.lstat(self._root + source)
        target = _renewed(target, _due_ns_in(newer))
        self._renew(f"{self._root}keys/{newer}", source, target)
        hint.path, hint.newer = target, ""
        return target

    def _make_room(self, bucket: _Bucket, source: str, target: str) -> None:
        """Make sure that the key of a failed task has no other, and say that it will be there."""
        with contextlib.suppress(CorruptTask):  # it has no key then; pop() will set it aside
            task = self._look_at(self._root + source)
            if task is not None and task.key is not None:
                path = self._find_key(bucket, _quoted(task.key))
                if path is not None:
                    raise KeyInFlight(task.key, _id_in(path))
                bucket.hints[_quoted(task.key)] = _Hint(target)
                bucket.save(self.sync_after_write)

    def _path_of_key(self, key: str | None) -> str | None:
        name = _quoted(key)
        if not self._may_have_task(name):
            return None
        with self._bucket(_key_tag(name)) as bucket:
            return self._find_key(bucket, name)

    def _mend_keys(self) -> None:
        """Let in the payloads whose task is gone, and remove the locks of keys that have none."""
        newer = {name[-8:] for name in self._files_of_keys("keys")}
        for tag in sorted(newer.union(name[-8:] for name in self._idle_keys())):
            with contextlib.suppress(BlockingIOError), self._bucket(tag, wait=False) as bucket:
                for key in [*bucket.hints]:
                    self._find_key(bucket, key, thorough=False)
                if tag in newer:
                    self._adopt(bucket)

    def _idle_keys(self) -> list[str]:
        """Return the hashes of keys, and the newer payloads, that have no task."""
        files = self._files_of_keys("tag") + self._files_of_keys("keys")
        if not files:
            return []
        found = itertools.chain(*map(self._find, ("scheduled", "pending", "inflight")))
        busy = {ident[-8:] for _, _, ident in found}
        return [name for name in files if name[-8:] not in busy]

    def _files_of_keys(self, form: str) -> list[str]:
        try:
            with os.scandir(f"{self._root}keys") as entries:
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []  # none yet
        return sorted(filter(_PARSE[form], names))

    def _adopt(self, bucket: _Bucket) -> None:
        """Let in newer payloads that no hint knows: power loss, or a person, took the hint."""
        known = {hint.newer for hint in bucket.hints.values()}
        for name, form in self._listed("keys"):
            if form["id"][-8:] != bucket.tag or name in known:
                continue
            hint = _Hint("", name)
            with contextlib.suppress(CorruptTask):  # let it in all the same: pop() sets it aside
                task = self._look_at(f"{self._root}keys/{name}")
                if task is not None and task.key is not None:
                    if _quoted(task.key) in bucket.hints:
                        continue  # when that one has ended
                    bucket.hints[_quoted(task.key)] = hint
            self._let_in(hint)

    # Chores of pop()

    def _attend(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it
        try:
            # What is nearly due too: who waits is woken once for all of them.
            soon_s = time.monotonic() + _BASE_INTERVAL_S / 5
            for chore in self._housekeeping:
                if soon_s >= chore.at_s:
                    self._keep_house(chore)
            if time.monotonic() >= self._listing.at_s:
                self._listing(self)
            at_s = min(chore.at_s for chore in (*self._housekeeping, self._listing))
            self._attend_at_ns = self._anchor_ns + int(at_s * 1e9)
        finally:
            self._lock.release()

    def _refill(self) -> bool:
        """List pending/ when the batch is used up, and what is known to be due by now."""
        with self._lock:
            if self._batch:
                return True  # another thread did
            self._catch_up()
            self._listing(self)
            if self._batch:
                return True
            failed = [chore for chore in self._housekeeping if chore.failed]
            for chore in failed:
                chore(self)
            return bool(failed)  # it passed: what they moved is to be listed

    def _catch_up(self) -> None:
        """Do the chores whose time is known to have come, and look at what was scheduled since."""
        if _wall_ns() >= self._next_due_ns or (
            time.monotonic() >= self._waking.rested_s
            and os.stat(f"{self._root}scheduled").st_mtime_ns != self._due_seen_ns
        ):
            self._keep_house(self._waking)
        if self._now_ns() >= self._next_end_ns:
            self._keep_house(self._reclaiming)

    def _keep_house(self, chore: _Chore) -> None:
        """Do a chore. Disk trouble in it does not keep pop() from what there is to do: one
        unreadable directory would stop all work. It surfaces when pop() finds nothing else."""
        try:
            chore(self)
        except OSError:
            self._next_due_ns = self._next_end_ns = 0  # at the next listing, all again

    def _list_pending(self) -> None:
        self._be_in_place()
        if self.paused:
            self._batch = []
            return
        self._batch, self._seen = _oldest_names(f"{self._root}pending", self._seen)
        if not self._seen:
            self._shrink_pending()

    def _shrink_pending(self) -> None:
        """Replace an empty pending/ that was large once: ext4 never shrinks a directory.

        rename() succeeds only on an empty directory, so nothing can be lost; a push that comes
        between finds out in _move().
        """
        pending = f"{self._root}pending"
        old = os.lstat(pending)
        if old.st_size <= _SHRINK_BYTES or not stat.S_ISDIR(old.st_mode):
            return
        if hasattr(os, "listxattr") and any("acl" in name for name in os.listxattr(pending)):
            return  # rights that we don't know how to copy
        fresh = f"{self._root}creating/{self._new_id()}.pending"
        # RACE: a push was quicker. Or it can't be replaced (a mount point, a full disk): fine too.
        with contextlib.suppress(OSError):
            os.mkdir(fresh)
            os.chmod(fresh, stat.S_IMODE(old.st_mode))
            new = os.stat(fresh)
            if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
                os.rename(fresh, pending)
                _sync_dir(self._root)  # what is synced into it later must not hang in the air
        with contextlib.suppress(OSError):
            os.rmdir(fresh)

    def _wake_due(self) -> None:
        """Move what is due to the back of pending/, in the order in which it came due."""
        now_ns = _wall_ns()
        self._next_due_ns = _NEVER_NS
        self._due_seen_ns = os.stat(f"{self._root}scheduled").st_mtime_ns
        trouble = _Trouble()
        for name, _ in self._listed("scheduled"):
            due_ns = int(name[:20])
            if due_ns > now_ns:
                self._next_due_ns = due_ns
                break
            with trouble:
                try:
                    self._woken(name, wait=False)
                except FileNotFoundError:
                    continue  # RACE: another worker moved it
                except BlockingIOError:
                    self._next_due_ns = due_ns  # RACE: somebody works on its key; next time
        trouble.surface()

    def _woken(self, name: str, wait: bool = True) -> str:
        """Move one task that is due, and return its name in pending/."""
        ident = _id_in(name)
        waiting = _stamped(self._next_order(), _attempts_in(name), ident)
        target = self._transfer(f"scheduled/{name}", ident, f"pending/{waiting}", wait)
        return target.partition("/")[2]

    def _reclaim(self) -> None:
        """Put back what is past its deadline or held by the dead.

        A directory that can't be read is no reason to leave the others: its error comes last.
        """
        self._next_end_ns = _NEVER_NS
        trouble = _Trouble()
        for directory in self._node_dirs():
            with trouble:
                self._reclaim_from(directory, trouble)
        trouble.surface()

    def _reclaim_from(self, directory: str, trouble: _Trouble) -> None:
        now_ns = self._now_ns()
        leases = self._listed(directory, "inflight")
        running: list[tuple[str, re.Match[str]]] = []
        ended: list[tuple[str, re.Match[str]]] = []
        for name, form in leases:
            left = directory == self._lease_dir and name in self._leftovers
            (ended if left or int(name[:20]) <= now_ns else running).append((name, form))
        for name, form in ended:
            ours = form["boot"] in (self._boot, _DETACHED) or name in self._leftovers
            if ours or not self._is_young(f"{directory}/{name}"):
                with trouble:
                    self._put_back(directory, name, form)
        if running:
            self._next_end_ns = min(self._next_end_ns, int(running[0][0][:20]))
        ours = any(form["boot"] == self._boot for _, form in leases)
        if directory != self._lease_dir and (ours or not running):
            self._clear_out(directory, ours)

    def _is_young(self, path: str) -> bool:
        """Whether a lease was taken or renewed less than our own lease length ago.

        Asked of other hosts' that have passed their deadlines: by our clock, and the queue clocks
        of hosts drift apart (a suspend, an NTP step after the boot). The wall clocks agree, and
        st_ctime is set by rename(). One in the future tells nothing: then the deadline counts.
        """
        if self.timeout_stale_ms is None:
            return False
        try:
            age_ns = _wall_ns() - os.lstat(path).st_ctime_ns
        except FileNotFoundError:
            return False  # RACE: settled or put back meanwhile
        return 0 <= age_ns < self._timeout_ns

    def _clear_out(self, directory: str, ours: bool) -> None:
        """Put back a dead worker's leases and remove its directory; leave a living one alone.

        RACE: where flock on a directory is a mount's own affair (FUSE: GlusterFS, sshfs), another
        host's idle worker looks dead. He would make his place again each second: so a directory
        that was never seen with leases of this boot is removed only when it is a minute old.
        """
        fd = _open_if_there(directory)
        if fd is None:
            return
        try:
            if _flock(fd, "exclusive") and _leads_to(directory, fd):
                self._put_back_all(directory, self._boot)
                self._mending.at_s = 0.0  # it may have died between a task and the one behind it
                if ours or not 0 <= _wall_ns() - os.fstat(fd).st_mtime_ns < _IDLE_NS:
                    _remove_empty_dir(directory)  # not with another boot's leases, foreign files
        finally:
            _let_go(fd)

    def _purge_done(self) -> None:
        """Delete a slice of what was done more than keep_done seconds ago.

        Bounded, whatever is in done/: at most twice as many entries are looked at as this object
        has finished since, or _PURGE_SLICE. The next slice goes on in the same listing.
        """
        most = max(_PURGE_SLICE, 2 * self._finished)
        self._finished = 0
        if self._done_scan is None:
            self._done_scan = os.scandir(f"{self._root}done")
        names = [entry.name for entry in itertools.islice(self._done_scan, most)]
        before_s = time.time() - self.keep_done
        for name in filter(_PARSE["done"], names):
            _purged(f"{self._root}done/{name}", before_s)
        self._purging.every_s = _BASE_INTERVAL_S
        if len(names) < most:
            self._close_done_scan()
            self._purging.every_s = min(max(_BASE_INTERVAL_S, self.keep_done / 10), 600.0)

    def _close_done_scan(self) -> None:
        scan, self._done_scan = self._done_scan, None
        if scan is not None:
            scan.close()

    def _sweep(self) -> None:
        """Remove what a killed process left in creating/: it was never acknowledged."""
        for name in self._old_creations():
            path = f"{self._root}creating/{name}"
            if name.endswith(".pending"):
                _remove_empty_dir(path)
            elif not os.path.isdir(path):  # a folder is somebody else's, whatever its name
                _unlinked(path)
        for ident in self._lost_checkpoints():
            _unlinked(f"{self._root}checkpoints/{ident}")

    def _old_creations(self) -> list[str]:
        before_ns = self._now_ns() - _LEFTOVER_NS
        return [name for name, form in self._listed("creating") if int(form["id"][:20]) < before_ns]

    def _lost_checkpoints(self) -> list[str]:
        """Return the ids of checkpoints, an hour old, whose task is not there (any more): its
        worker was killed between the two, or it was ended by hand."""
        before_ns = _wall_ns() - _LEFTOVER_NS
        old = set()
        for path, _, ident in self._find("checkpoints"):
            with contextlib.suppress(FileNotFoundError):  # RACE: its task has just ended
                if os.lstat(path).st_mtime_ns < before_ns:
                    old.add(ident)
        for _ in range(2):  # while we look, tasks move both ways
            if old:
                found = itertools.chain(*map(self._find, ("scheduled", "pending", "inflight")))
                old -= {ident for _, _, ident in found}
        return sorted(old)

    # Listings

    def _listed(self, directory: str, state: str | None = None) -> list[tuple[str, re.Match[str]]]:
        """Return our names in a directory, sorted, with their parts; others' are left out."""
        parse = _PARSE[state or directory]
        try:
            names = os.listdir(os.path.join(self._root, directory))
        except (FileNotFoundError, NotADirectoryError):
            if os.path.basename(directory) in _DIRS:
                raise
            return []  # removed with its worker just now, a stray file of such a name; none yet
        return [(name, form) for name in sorted(names) if (form := parse(name))]

    def _node_dirs(self) -> list[str]:
        names = sorted(filter(_parse_node_dir, os.listdir(self._root)))
        return [self._root + name for name in names if not os.path.islink(self._root + name)]

    def _find(self, state: str) -> Iterator[tuple[str, int, str]]:
        """Yield the path, attempts and id of every task in a state."""
        directories = self._node_dirs() if state == "inflight" else [self._root + state]
        for directory in directories:
            for name, form in self._listed(directory, state):
                attempts = form.groupdict().get("attempts")
                yield f"{directory}/{name}", int(attempts or 0), form["id"]

    def _read_tasks(self, found: Iterable[tuple[str, int, str]], data: bool) -> Iterator[FemtoTask]:
        for path, _, _ in found:
            try:
                task = self._look_at(path, data)
            except CorruptTask as error:
                _log().warning("%s", error)
                continue
            if task is not None:
                yield task

    def _look_at(self, path: str, data: bool = True) -> FemtoTask | None:
        """Return the task whose file is at a path, without a lease; None if it is not there.

        data=False: by the first line of its file alone; size_bytes is None if that is not valid.
        """
        name, relative = os.path.basename(path), path[len(self._root) :]
        ident = _id_in(name)
        attempts = None if len(name) == 29 and _is_end(relative) else _attempts_in(name)
        try:
            if data:
                payload, key = _read_record(path, ident)
                size_bytes: int | None = len(payload)
            else:
                payload = b""
                key, size_bytes = _read_head(path)
        except FileNotFoundError:
            return None  # RACE: it moved on
        task = FemtoTask(ident, payload, attempts, key, path=relative, _anchor_ns=self._anchor_ns)
        object.__setattr__(task, "size_bytes", size_bytes)
        if relative.startswith("failed/"):
            object.__setattr__(task, "error", self._reason_of(ident))
        return task

    def _reason_of(self, ident: str) -> str | None:
        """Return what failed/<id>.error says, None if there is none."""
        try:
            with open(f"{self._root}failed/{ident}.error", "rb") as file:
                return file.read().decode("utf-8", "replace").removesuffix("\n")
        except FileNotFoundError:
            return None

    def _node_stats(self, directory: str) -> NodeStats:
        leases = self._listed(directory, "inflight")
        now_ns = self._now_ns()
        return NodeStats(
            node=directory.rpartition("/inflight-")[2],
            inflight=len(leases),
            expired=sum(int(name[:20]) <= now_ns for name, _ in leases),
            liveness=_liveness(directory, any(form["boot"] == self._boot for _, form in leases)),
        )


class TicketQueue:
    """First come, first served, between processes: a line of tickets in a directory.

        with TicketQueue("line").turn():
            ...                         # one process at a time, in the order in which they came

    A ticket is a file, <ticket>~<boot>~<member>, which its member keeps locked. Who died is passed
    over at once on its own host, and who lives never is. On other hosts, and after a reboot, a
    ticket is passed over when its file was not touched for stale_timeout seconds (wall clock; None:
    never); is_head() touches it, and turn() does while it waits and while it is held.

    queue_dir is made if it is missing. Threads may share an object; a forked child holds none of
    its parent's tickets. A lock by tickets is as good as flock is: on one host. Raises OSError
    where there is no flock, ValueError or TypeError for a stale_timeout that is none.
    """

    # Invariant: a ticket's file appears locked, and in the order of the numbers: both are done by
    # who has the lock of the file "last", in which the last number stands. A lock that is gone
    # never comes back, so that a ticket found dead may be removed by anybody.

    def __init__(
        self, queue_dir: str | os.PathLike[str], stale_timeout: float | None = None
    ) -> None:
        # member -> its ticket and locked descriptor
        self._held: dict[str, tuple[int, _LockFd]] = {}
        if stale_timeout is not None:
            _positive("stale_timeout", stale_timeout)
        self.queue_dir = queue_dir
        self.stale_timeout = stale_timeout
        self._root = os.path.join(os.path.abspath(os.fspath(queue_dir)), "")
        _make_dir(os.path.dirname(self._root), 0o700, sync=False)
        boot_id = _read_boot_id() or (os.uname().nodename if hasattr(os, "uname") else "")
        self._boot = _boot_tag(boot_id, self._root)
        _live_queues.add(self)

    def register(self) -> tuple[int, str]:
        """Draw the next ticket; return its number, from 1, and its member: its file's name in
        queue_dir.

        Blocks only for as long as others draw theirs.
        """
        with self._locked() as last_fd:
            ticket = max([int(os.read(last_fd, 20) or 0), *(t for t, _ in self._tickets())]) + 1
            os.pwrite(last_fd, b"%020d" % ticket, 0)
            name = f"{ticket:020d}~{self._boot}~{os.urandom(8).hex()}"
            fd = _open_locked(f"{self._root}.{name}")  # not a ticket yet: it must appear locked
            try:
                os.rename(f"{self._root}.{name}", self._root + name)
            except BaseException:
                _unlinked(f"{self._root}.{name}", or_fail=False)
                _let_go(fd)
                raise
            self._held[name] = ticket, fd
        return ticket, name

    def is_head(self, ticket: int) -> bool:
        """Say whether that ticket is the first of those whose members live."""
        for held, fd in list(self._held.values()):
            if held == ticket:
                os.utime(fd)
        return ticket == next((t for t, name in self._tickets() if self._lives(name)), None)

    def remove(self, member: str) -> bool:
        """Give up a member's ticket; False if it had none (any more). It may be another's.

        Raises ValueError for what is no member's name.
        """
        if not isinstance(member, str) or not _parse_ticket(member) or member[0] == ".":
            raise ValueError(f"member must be a name that register() returned, not {member!r}")
        removed = _unlinked(self._root + member)
        _, fd = self._held.pop(member, (0, None))
        if fd is not None:
            _let_go(fd)
        return removed

    def cleanup_stale(self) -> int:
        """Remove the tickets of members that died or went stale; return how many."""
        return sum(not self._lives(name) for _, name in self._tickets())

    def is_empty(self) -> bool:
        """Say whether nobody is in line."""
        return not any(self._lives(name) for _, name in self._tickets())

    def maybe_cleanup(self) -> bool:
        """Remove queue_dir if nobody is in line; say whether it went.

        Who registers meanwhile waits, and makes it again. Tickets begin at 1 then.
        """
        if not os.path.isdir(self._root):
            return False
        with self._locked():
            if not self.is_empty() or not {*os.listdir(self._root)} <= {"last"}:
                return False
            os.unlink(f"{self._root}last")
            _remove_empty_dir(self._root)  # RACE: not if somebody opens a new "last" now
        return not os.path.isdir(self._root)

    @contextlib.contextmanager
    def turn(self, timeout: float | None = None) -> Iterator[int]:
        """Wait for our turn, hold it for the block, and give it up. Yields the ticket.

        timeout: seconds to wait, None: for ever. Raises TimeoutError, out of line then; and
        FemtoQueueError if another host passed us over, or a person removed our ticket.
        """
        end_s = float("inf") if timeout is None else time.monotonic() + _finite("timeout", timeout)
        ticket, member = self.register()
        over = threading.Event()
        try:
            if self.stale_timeout is not None:
                threading.Thread(target=self._touch, args=(member, over), daemon=True).start()
            while not self.is_head(ticket):
                line = [t for t, _ in self._tickets()]
                if ticket not in line:
                    raise FemtoQueueError(f"ticket {ticket} was passed over, or removed")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"ticket {ticket}: no turn within {timeout} s")
                # Who is next looks often, the others seldom.
                time.sleep(min(0.002 * line.index(ticket), 0.05, left_s))
            yield ticket
        finally:
            over.set()
            self.remove(member)

    def __del__(self) -> None:
        if self._held and _let_go is not None:  # None: the interpreter ends
            for member in list(self._held):
                self.remove(member)

    def _touch(self, member: str, over: threading.Event) -> None:
        while not over.wait((self.stale_timeout or 0) / 4):
            _, fd = self._held.get(member, (0, None))
            with contextlib.suppress(OSError):  # RACE: given up just now
                if fd is not None:
                    os.utime(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        while True:
            _make_dir(os.path.dirname(self._root), 0o700, sync=False)
            try:
                fd = _open_locked(f"{self._root}last")
            except FileNotFoundError:
                continue  # RACE: maybe_cleanup() removed the directory
            try:
                for name in os.listdir(self._root):
                    if name.startswith(".") and _parse_ticket(name):
                        _unlinked(self._root + name)  # CRASH: of one who died with this lock
                yield fd
            finally:
                _let_go(fd)
            return

    def _tickets(self) -> list[tuple[int, str]]:
        """Return number and file name, which is the member, of all tickets in line, in order."""
        try:
            names = sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []
        forms = [form for name in names if (form := _parse_ticket(name)) and name[0] != "."]
        return [(int(form[1]), form[0]) for form in forms]

    def _lives(self, name: str) -> bool:
        """Say whether a ticket's member lives; remove the ticket if not."""
        path = self._root + name
        try:
            if name[21:29] == self._boot:
                fd = _open_to_lock(path, os.O_RDWR)
                try:
                    dead = _flock(fd, "exclusive")
                finally:
                    _let_go(fd)
            else:
                age_s = time.time() - os.stat(path).st_mtime
                dead = self.stale_timeout is not None and age_s > self.stale_timeout
        except FileNotFoundError:
            return False  # RACE: given up just now
        if dead:
            _unlinked(path)
        return not dead

    def _after_fork(self) -> None:
        self._held = {}


_NO_LOCK = contextlib.nullcontext()
_live_queues: weakref.WeakSet[FemtoQueue | TicketQueue] = weakref.WeakSet()
_lock_fds: set[int] = set()  # open lease directories, those of other threads' calls too


def _become_somebody_else() -> None:
    """In a forked child: the parent's locks must end with the parent, so close them here."""
    while _lock_fds:
        os.close(_lock_fds.pop())
    for queue in list(_live_queues):
        queue._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_somebody_else)


class _Trouble:
    """Keeps the first OSError of the `with` blocks that it stands before, which end there, until
    surface(): one task or directory that can't be had must not keep the others waiting."""

    def __init__(self) -> None:
        self._first: OSError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OSError):
            return False
        self._first = self._first or error
        return True

    def surface(self) -> None:
        if self._first is not None:
            raise self._first


class _Chore:
    """A thing that pop() does now and then: every_s seconds apart, or 20 times what it cost, up
    to _LONGEST_PAUSE_S."""

    def __init__(self, run: Callable[[FemtoQueue], None], every_s: float) -> None:
        # A plain function: a bound method would tie the queue into a cycle, and a dropped queue
        # would keep its lock until the garbage collector comes by.
        self.run, self.every_s, self.at_s = run, every_s, 0.0
        self.rested_s = 0.0  # when it may be done again, if there is a reason to
        self.failed = False

    def __call__(self, queue: FemtoQueue) -> None:
        started_s, self.failed = time.monotonic(), True
        try:
            self.run(queue)
            self.failed = False
        finally:  # also when it failed: pop() has other things to do than to fail at it again
            ended_s = time.monotonic()
            # It may only have hung once.
            pause_s = min(20 * (ended_s - started_s), _LONGEST_PAUSE_S)
            self.rested_s = ended_s + pause_s
            self.at_s = ended_s + max(self.every_s, pause_s)


class _Bell:
    """Rings when something came into pending/ or scheduled/, or PAUSED is gone.

    By inotify(7) on Linux, in a descriptor that one thread at a time reads. hears_all: nobody but
    this kernel writes there; else the wait must be short, as it must without inotify.
    """

    # Invariant: rings grows before anybody is woken. Who read it before he looked, and found
    # nothing, can't miss what came since: wait() returns at once then.

    def __init__(self, root: str) -> None:
        self.rings, self.fd = 0, -1
        self._root, self._libc = root, _libc()
        self._waker: tuple[int, ...] = ()  # the ends of a pipe, by which interrupt() is heard
        self._changed = threading.Condition()
        self._listening = False  # a thread waits at the descriptor, the others for that thread
        if self._libc is not None:
            self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)  # -1: too many
        if self.fd >= 0:
            self._waker = os.pipe()
        self.hears_all = self._watch() and _fs_type(root) in _LOCAL_TYPES

    def _watch(self) -> bool:
        watched = [("pending", _IN_COMES), ("scheduled", _IN_COMES), ("", _IN_COMES | _IN_GOES)]
        return self.fd >= 0 and all(
            self._libc.inotify_add_watch(self.fd, os.fsencode(self._root + name), mask) >= 0
            for name, mask in ((name, mask | _IN_ONLYDIR) for name, mask in watched)
        )

    def wait(self, rings: int, seconds: float) -> None:
        """Return when it has rung more often than `rings`, or when the time is over."""
        listens = False
        try:
            with self._changed:
                if self.fd < 0 or self._listening:
                    deaf = self.fd < 0
                    self._changed.wait_for(
                        lambda: self.rings != rings or not (deaf or self._listening), seconds
                    )
                    return
                if self.rings != rings:
                    return
                listens = self._listening = True
            self._listen(seconds)
        finally:
            if listens:
                with self._changed:
                    self._listening = False
                    self._changed.notify_all()

    def _listen(self, seconds: float) -> None:
        import select

        poll = select.poll()
        for fd in (self.fd, self._waker[0]):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(int(seconds * 1000) + 1)}
        if self.fd in ready:
            self.hear()
        if self._waker[0] in ready:
            os.read(self._waker[0], _PIPE_BYTES)

    def interrupt(self) -> None:
        """Ring, so that all who wait look again, though nothing has changed on the disk."""
        with self._changed:
            self.rings += 1
            if self._listening:
                os.write(self._waker[1], b"!")
            self._changed.notify_all()

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)
        # pending/ may be a new one (_shrink_pending). Before the next look, so nothing is missed.
        self.hears_all = self._watch() and self.hears_all
        self.rings += 1

    def __del__(self) -> None:
        if self.fd >= 0 and os is not None:  # None: the interpreter ends
            for fd in (self.fd, *self._waker):
                os.close(fd)


class _Hall:
    """Where the coroutines of one event loop wait: a line per key, and of each the head looks."""

    def __init__(self, root: str) -> None:
        self.bell = _Bell(root)
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        self._listeners: set[asyncio.Future[None]] = set()

    @contextlib.asynccontextmanager
    async def turn(self, name: str, end_s: float) -> AsyncIterator[None]:
        """Wait to be the first in a line, or for the time to come; leave the line at the end."""
        import asyncio

        line = self._lines.setdefault(name, deque())
        ours: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(ours)
        try:
            if line[0] is not ours:
                left_s = None if end_s == float("inf") else max(0, end_s - time.monotonic())
                await asyncio.wait({ours}, timeout=left_s)
            yield
        finally:
            line.remove(ours)
            if not line:
                self._lines.pop(name, None)
            elif not line[0].done():
                line[0].set_result(None)

    async def wait(self, rings: int, seconds: float) -> None:
        """Do as _Bell.wait() does, for coroutines."""
        import asyncio

        if self.bell.rings != rings:
            return
        loop = asyncio.get_running_loop()
        ring: asyncio.Future[None] = loop.create_future()
        if not self._listeners and self.bell.fd >= 0:
            loop.add_reader(self.bell.fd, self._wake_listeners)
        self._listeners.add(ring)
        try:
            await asyncio.wait({ring}, timeout=seconds)
        finally:
            self._listeners.discard(ring)
            if not self._listeners and self.bell.fd >= 0:
                loop.remove_reader(self.bell.fd)

    def _wake_listeners(self) -> None:
        self.bell.hear()
        self.ring()

    def ring(self) -> None:
        """Wake all coroutines that wait for the bell; in the loop's own thread."""
        self.bell.rings += 1
        for ring in self._listeners:
            if not ring.done():
                ring.set_result(None)


class _Processing:
    """The block of processing(): see there. outcome says how the delivery ended: a field of
    WorkCounts, "" while it runs, or if its end could not be written."""

    def __init__(self, queue: FemtoQueue, task: FemtoTask) -> None:
        self._queue, self.task, self.outcome = queue, task, ""
        self._pid = os.getpid()

    def __enter__(self) -> FemtoTask:
        self._queue._keep_lease(self)
        return self.task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        queue, task = self._queue, self.task
        if os.getpid() != self._pid:
            return  # a child that was forked in the block leaves it: the task is not its own
        try:
            if self.outcome or (isinstance(error, LeaseLost) and error.id == task.id):
                return
            if error is None:
                queue.done(task)
            elif not isinstance(error, Exception):  # we are told to go
                queue._give_back(task)
            elif queue.max_attempts is not None and _attempts_in(task.path) >= queue.max_attempts:
                queue.fail(task, error)
            else:
                queue.release(task, delay_s=queue._retry_delay_s(_attempts_in(task.path)))
                self.outcome = "retried"
        except LeaseLost as lost:
            raise lost from error
        except OSError:
            queue._abandon(task.path)  # whoever can may deliver it again
            raise
        finally:
            with queue._lock:
                queue._under_way.pop(id(task), None)


def _renew_leases(
    queue_ref: weakref.ref[FemtoQueue], renewer: threading.Event, first_pause_s: float
) -> None:
    pause_s = first_pause_s
    while not renewer.wait(pause_s):
        queue = queue_ref()
        try:
            pause_s = 0 if queue is None else queue._renew_all(renewer)
        except BaseException:  # of what logs, say: no reason to lose all leases
            pause_s = first_pause_s / 10
        if not pause_s:
            return
        del queue  # asleep, we hold nobody


class _CommandFailed(Exception):
    """A command that `work` ran did not end well. Its text is the whole reason."""


_AFTER_FAILURE = {
    "retried": "to be retried",
    "failed": "a dead letter",
    "": "delivered again later",
}


def _do_nothing(*arguments: object) -> None:
    """Stand for a hook that is not set."""


class _WorkerPool:
    """The loop of work(): the calling thread takes tasks, and up to `concurrency` threads handle
    them. If concurrency is 1, the calling thread handles them too, unless in_threads is set.

    is_stopped: asked between two tasks. more_signals: stop the pool as SIGINT and SIGTERM do.
    on_stop() is called at the first signal, in its handler, and on_abort(number) at the second.

    Invariant: a task is in _running from before its handler is called until its delivery is
    counted, by the thread that removes it. _changed is held where _running or counts change.
    """

    def __init__(
        self,
        queue: FemtoQueue,
        handler: Callable[[FemtoTask], object],
        concurrency: int,
        drain: bool,
        is_stopped: Callable[[], object] = _do_nothing,
        *,
        in_threads: bool = False,
        more_signals: Iterable[int] = (),
        on_stop: Callable[[], object] = _do_nothing,
        on_abort: Callable[[int], object] = _do_nothing,
    ) -> None:
        from queue import SimpleQueue

        self._pid = os.getpid()
        self._queue, self._handler, self._concurrency = queue, handler, concurrency
        self._drain, self._is_stopped, self._in_threads = drain, is_stopped, in_threads
        self._more_signals, self._on_stop, self._on_abort = more_signals, on_stop, on_abort
        self.signals: list[int] = []  # that came
        self._last_signal_s = 0.0
        self.counts: Counter[str] = Counter()  # by the fields of WorkCounts
        self._running: dict[int, FemtoTask] = {}  # by their id()
        self._changed = threading.Condition()
        self._inbox: SimpleQueue[FemtoTask | None] = SimpleQueue()
        self._threads = 0
        self._is_interruptible = False  # while the handler runs in the thread that gets signals
        self._error: BaseException | None = None  # of a handler that ends the pool

    def run(self) -> WorkCounts:
        """Work until told to stop. Raises what a handler raised to end the pool."""
        with self._signals_handled():
            try:
                self._take_all()
            except KeyboardInterrupt:
                if len(self.signals) < 2:
                    raise  # the handler's own
            finally:
                self._wait_until_idle()
                for _ in range(self._threads):
                    self._inbox.put(None)
            if len(self.signals) > 1:
                self._abort()
            elif self._error is not None:
                raise self._error
        return WorkCounts(**self.counts)

    def _is_stopping(self) -> bool:
        return bool(self.signals or self._error is not None or self._is_stopped())

    def _take_all(self) -> None:
        """Take tasks, and have them handled, until the pool is stopped or the queue is drained."""
        queue = self._queue
        # Not for long: nothing wakes this wait when is_stopped() changes. With drain, others may
        # end the last task at any moment.
        wait_s = min(_BASE_INTERVAL_S, queue.poll_interval_s) if self._drain else _BASE_INTERVAL_S
        while not self._is_stopping():
            if not self._has_free_thread():
                continue
            task = queue.pop(0 if self._drain else wait_s)
            if task is None and self._drain:
                if queue.join(0):
                    return
                task = queue.pop(wait_s)
            if task is None:
                continue
            if self._is_stopping():
                queue.release(task, front=True, counted=False)
            elif self._concurrency > 1 or self._in_threads:
                self._submit(task)
            else:
                self._running[id(task)] = task
                self._process(task)

    def _has_free_thread(self) -> bool:
        """Wait a moment until fewer tasks run than may run; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._running) < self._concurrency, _BASE_INTERVAL_S
            )

    def _submit(self, task: FemtoTask) -> None:
        """Hand a task to a thread; start one more if all are at work."""
        with self._changed:
            self._running[id(task)] = task
            if self._threads < len(self._running):
                try:
                    # A daemon: a handler that does not return must not keep the process alive.
                    threading.Thread(target=self._run_thread, daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:  # else the running ones are enough
                        del self._running[id(task)]
                        self._queue.release(task, front=True, counted=False)
                        raise
        self._inbox.put(task)

    def _run_thread(self) -> None:
        """Process tasks of the inbox until a None comes out of it."""
        while (task := self._inbox.get()) is not None:
            try:
                if id(task) in self._running:  # _abort() has not given it back
                    self._process(task)
            except BaseException as error:
                self._error = error

    def _process(self, task: FemtoTask) -> None:
        """Handle a task; log how its delivery failed, and count how it ended."""
        processing = self._queue.processing(task)
        try:
            with processing:
                self._handle(task)
        except LeaseLost as error:
            _log().warning("%s", error)
        except Exception as error:
            then = _AFTER_FAILURE.get(processing.outcome, processing.outcome)
            cause = None if isinstance(error, _CommandFailed) else error
            why = str(error).partition("\n")[0]
            text = "%s: try %d failed, %s: %s"
            _log().error(text, task.id, task.attempts, then, why, exc_info=cause)
            if not processing.outcome:  # it could not even begin, or not be ended
                self._queue._abandon(task.path)
        finally:
            with self._changed:
                if self._running.pop(id(task), None) is not None:  # else _abort() has counted it
                    self.counts[processing.outcome or "lost"] += 1
                self._changed.notify_all()

    def _handle(self, task: FemtoTask) -> None:
        """Call the handler; in the thread that gets signals, let the second one interrupt it."""
        if self._threads:
            self._handler(task)
            return
        try:
            self._is_interruptible = True
            self._handler(task)
        finally:
            self._is_interruptible = False

    def _wait_until_idle(self) -> None:
        with self._changed:
            while self._running and len(self.signals) < 2:
                self._changed.wait(_BASE_INTERVAL_S)

    def _abort(self) -> None:
        """Give back what runs in other threads; what ran in this one has been given back."""
        self._on_abort(self.signals[-1])
        with self._changed:
            if self._in_threads:  # their commands have ended: they give their tasks back themselves
                self._changed.wait_for(lambda: not self._running, 1.0)
        for task in [*self._running.values()]:
            try:
                self._queue.release(task, front=True, counted=False)
            except LeaseLost:
                continue  # it has just ended, and its thread counts it
            except OSError as error:
                _log().warning("task %s is not given back: %s", task.id, error)
            with self._changed:
                if self._running.pop(id(task), None) is not None:
                    self.counts["released"] += 1

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Handle signals while the block runs, in the main thread; elsewhere do nothing."""
        import signal

        before = {}
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM, *self._more_signals)
            before = {number: signal.getsignal(number) for number in numbers}
        # Not those that are ignored, as by nohup, or have a handler that Python did not set.
        before = {n: it for n, it in before.items() if it not in (signal.SIG_IGN, None)}

        def handle(number: int, frame: object) -> None:
            if os.getpid() == self._pid:
                self._on_signal(number)
            else:  # a child that a handler forked gets its signals as before
                signal.signal(number, before[number])
                os.kill(os.getpid(), number)

        try:
            for number in before:
                signal.signal(number, handle)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int) -> None:
        """Note a signal: the first one stops the pool, the second one aborts what runs."""
        # timeout(1) and a terminal that goes away signal twice: the process, and its group.
        if self.signals and time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
            return
        self._last_signal_s = time.monotonic()
        self.signals.append(number)
        if len(self.signals) == 1:
            self._on_stop()
        elif len(self.signals) == 2 and self._is_interruptible:  # a third one changes nothing
            raise KeyboardInterrupt


class _Inspection:
    """check(): a method for each thing that may be odd."""

    def __init__(self, queue: FemtoQueue, repair: bool) -> None:
        self._queue, self._repair, self._root = queue, repair, queue._root

    def findings(self) -> Iterator[Finding]:
        for look in (
            *(self._file_systems, self._clock, self._strangers, self._tasks, self._twice),
            *(self._workers, self._keys, self._leftovers),
        ):
            try:
                yield from look()
            except OSError as error:
                path = os.path.relpath(error.filename or self._root, self._root)
                yield Finding("unreadable", path, str(error))

    def _file_systems(self) -> Iterator[Finding]:
        kind = _NETWORK_TYPES.get(_fs_type(self._root))
        if kind is not None:
            text = (
                f"{kind}: other hosts' leases end by their deadlines only, and waiting is polling"
            )
            yield Finding("network file system", ".", text)
        device = os.stat(self._root).st_dev
        for name in self._directories():
            if os.stat(self._root + name).st_dev != device:
                yield Finding("file system", name, "another than data_dir's: rename() can't cross")

    def _directories(self) -> list[str]:
        names = [name for name in os.listdir(self._root) if os.path.isdir(self._root + name)]
        return [name for name in sorted(names) if name in _OUR_DIRS or _parse_node_dir(name)]

    def _clock(self) -> Iterator[Finding]:
        ahead_s = (self._queue._now_ns() - _wall_ns()) / 1e9
        if ahead_s > 1:
            text = f"{ahead_s:.0f} s ahead of the wall clock: that was set back, or a task is newer"
            yield Finding("clock", f"clock-{self._queue._boot}", text)

    def _strangers(self) -> Iterator[Finding]:
        directories = self._directories()
        for name in sorted({*os.listdir(self._root)} - {*directories, "PAUSED"}):
            if not re.fullmatch("clock-[0-9a-f]{8}", name):
                yield Finding("foreign", name, "not of the queue's")
        for directory in directories:
            forms = _OUR_DIRS.get(directory, ("inflight",))
            for name in sorted(os.listdir(self._root + directory)):
                if not any(_PARSE[form](name) for form in forms):
                    yield Finding("foreign", f"{directory}/{name}", "no name of a task's")

    def _tasks(self) -> Iterator[Finding]:
        for state in (*STATES, "keys"):
            for full_path, _, ident in self._queue._find(state):
                path = full_path[len(self._root) :]
                try:
                    _read_record(full_path, ident)
                except FileNotFoundError:
                    continue  # it moved on
                except OSError as error:
                    yield Finding("unreadable", path, str(error))
                except CorruptTask as error:
                    if state == "failed" and os.path.lexists(f"{full_path}.error"):
                        continue  # a dead letter for just that
                    mend = self._repair and state in ("pending", "scheduled")
                    if mend:
                        self._queue._set_aside(path, ident, error.reason)
                    yield Finding("corrupt", path, error.reason, mend)

    def _twice(self) -> Iterator[Finding]:
        first: dict[str, str] = {}
        for state in (*STATES, "keys"):
            for path, _, ident in self._queue._find(state):
                if ident in first and os.path.lexists(first[ident]) and os.path.lexists(path):
                    other = first[ident][len(self._root) :]
                    yield Finding("twice", path[len(self._root) :], f"there is {other} too")
                first.setdefault(ident, path)

    def _workers(self) -> Iterator[Finding]:
        found = []
        for directory in self._queue._node_dirs():
            stats = self._queue._node_stats(directory)
            path = f"inflight-{stats.node}"
            if stats.liveness == "dead":
                found.append((directory, "dead worker", path, f"{stats.inflight} tasks leased"))
            elif stats.expired:
                found.append((directory, "expired", path, f"{stats.expired} leases have ended"))
        if found and self._repair:
            self._queue._reclaim()
        for directory, kind, path, text in found:
            stats = self._queue._node_stats(directory)
            ended = stats.expired or (stats.liveness == "dead" and stats.inflight)
            yield Finding(kind, path, text, self._repair and not ended)

    def _keys(self) -> Iterator[Finding]:
        found = self._queue._idle_keys()
        if found and self._repair:
            self._queue._mend_keys()
        for name in found:
            mended = self._repair and not os.path.lexists(f"{self._root}keys/{name}")
            yield Finding("key without a task", f"keys/{name}", "nothing of it waits", mended)

    def _leftovers(self) -> Iterator[Finding]:
        found = [f"checkpoints/{ident}" for ident in self._queue._lost_checkpoints()]
        found += [f"creating/{name}" for name in self._queue._old_creations()]
        if found and self._repair:
            self._queue._sweep()
        for path in found:
            mended = not os.path.lexists(self._root + path)
            yield Finding("leftover", path, "more than an hour old", mended)


@dataclass
class _Hint:
    """Where the task of a key was last, and the name in keys/ of the payload behind it, if any."""

    path: str
    newer: str = ""


class _Bucket:
    """The lock of the keys of one hash, and a hint of where the task of each is.

    The lock is locks/<last two digits of the hash>, shared with the other hashes that end so. It is
    never removed: who waited for the lock of a file that was removed meanwhile would have to see
    that its path leads elsewhere by now, and on NFS or GlusterFS may be shown an old answer.

    The hints stand in keys/<hash>, a line for each key: "<key> <path> <newer, or ->", then an empty
    one; one write() makes the change, and what follows the empty line is of an older, longer one.
    A task that was killed, or moved by a pop() or a person, is not where the hint says: it is
    looked for then. A key without a hint has no task.
    """

    def __init__(self, root: str, tag: str, wait: bool, holds_lock: bool) -> None:
        self.tag, self._path = tag, f"{root}keys/{tag}"
        self._fd = None if holds_lock else _lock_of_keys(root, tag, wait)
        try:
            self.hints = _read_hints(root, tag)
        except BaseException:
            self._unlock()
            raise
        self._saved = self._text()

    def _text(self) -> str:
        lines = (f"{key} {hint.path} {hint.newer or '-'}\n" for key, hint in self.hints.items())
        return "".join(lines) + "\n"

    def save(self, sync: bool) -> None:
        """Write the hints if they have changed."""
        text = self._text()
        if text == self._saved:
            return
        flags = os.O_WRONLY | os.O_CREAT | _WARY
        try:
            fd = os.open(self._path, flags, 0o666)
        except FileNotFoundError:
            directory = os.path.dirname(self._path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)  # the first key of all; if data_dir is gone, it says so
            if sync:
                _sync_dir(os.path.dirname(directory))
            fd = os.open(self._path, flags, 0o666)
        try:
            os.pwrite(fd, text.encode("ascii"), 0)
            self._saved = text
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        if sync:
            _sync_dir(os.path.dirname(self._path))

    def close(self) -> None:
        """Unlock; the hints of no key go."""
        try:
            with contextlib.suppress(OSError):  # of a hint nothing depends on its being right
                if self.hints:
                    self.save(sync=False)
                else:
                    os.unlink(self._path)
        finally:
            with contextlib.suppress(OSError):  # what was done under the lock is done
                self._unlock()

    def _unlock(self) -> None:
        if self._fd is not None:
            _let_go(self._fd)


def _lock_of_keys(root: str, tag: str, wait: bool) -> _LockFd:
    """Open and take the lock of the keys of a hash; BlockingIOError as in _lock_file()."""
    path = f"{root}locks/{tag[-2:]}"
    try:
        fd = _open_to_lock(path, _LOCK_FLAGS)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{root}locks")  # the first key of all; if data_dir is gone, it says so
        fd = _open_to_lock(path, _LOCK_FLAGS)
    try:
        _lock_file(fd, path, wait)
    except BaseException:
        _let_go(fd)
        raise
    return fd


def _read_hints(root: str, tag: str) -> dict[str, _Hint]:
    """Return what keys/<hash> says of each key: nothing, if it is not there."""
    try:
        fd = os.open(f"{root}keys/{tag}", _READ_FLAGS)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return {}
    try:
        text = os.read(fd, os.fstat(fd).st_size).decode("ascii", "replace")
    finally:
        os.close(fd)
    lines = text.partition("\n\n")[0].splitlines()
    # One that leads to a task of no key, or of another hash, would have it overwritten.
    ours = ("-", f"-{tag}")
    return {
        form[1]: _Hint(form[2], form[4].strip("-"))
        for form in map(_parse_hint, lines)
        if form and form[2][-9:] == ours[1] and form[4][-9:] in ours
    }


# Names


def _stamped(ns: int, attempts: int, rest: str) -> str:
    return f"{ns:020d}~{attempts}~{rest}"


def _renewed(path: str, due_ns: int | None) -> str:
    """Return the path of a waiting task for a new payload, which was never delivered: at its place,
    or in scheduled/ for a time."""
    state, _, name = path.partition("/")
    if due_ns is not None:
        return f"scheduled/{_stamped(due_ns, 0, _id_in(name))}"
    return f"{state}/{name if len(name) == 29 else _stamped(int(name[:20]), 0, _id_in(name))}"


def _may_be_renamed(name: str) -> bool:
    """Whether a task of that name in pending/ gets another one there with a new payload."""
    form = _parse_pending(name)
    return form is not None and form[1] is not None and _is_keyed(form[2])


def _is_keyed(ident: str) -> bool:
    """Say whether an id's tag is the hash of a key: the name tells, so that others pay nothing."""
    return ident[21] > "7"


def _key_tag(name: str) -> str:
    return f"{binascii.crc32(name.encode()) | 1 << 31:08x}"


def _quoted(key: object) -> str:
    """Return a key as it stands in a header and in keys/: percent-encoded, as in a URL."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {key!r}")
    raw = key.encode()
    if not 1 <= len(raw) <= _KEY_BYTES:
        raise ValueError(f"key must be 1 to {_KEY_BYTES} bytes in UTF-8, not {len(raw)}: {key!r}")
    return "".join(chr(byte) if chr(byte) in _UNQUOTED else f"%{byte:02X}" for byte in raw)


def _unquoted(name: str) -> str:
    raw = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    return raw.decode("utf-8", "replace")


def _is_end(target: str) -> bool:
    return target.startswith(("done/", "failed/")) or not target


def _id_in(path: str) -> str:
    """Return the id of a task, with which each of its names ends."""
    return path[-29:]


def _due_ns_in(newer: str) -> int | None:
    """Return the time for which a payload in keys/ is scheduled, None if it is for at once."""
    return int(newer[:20]) if "~" in newer else None


def _attempts_in(path: str) -> int:
    """Return the attempts that stand in a task's name, 0 in one that is an id."""
    parts = path.split("~")
    return int(parts[1]) if len(parts) > 1 else 0


def _is_node_id(node_id: object) -> bool:
    return (
        isinstance(node_id, str)
        and node_id not in (".", "..")
        and _parse_node_dir(f"inflight-{node_id}") is not None
    )


def _check_state(state: str) -> None:
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")


def _check_id(id: str) -> None:
    if not isinstance(id, str):
        raise TypeError(f"id must be a str, not {id!r}")
    if not _parse_id(id):
        raise ValueError(f"not the id of a task: {id!r}")


def _oldest_names(
    directory: str, seen_before: int, ours: Callable[[str], object] | None = None
) -> tuple[list[str], int]:
    """Return the first names of a directory, oldest last, and how many entries it has.

    Keeps a sixteenth of a huge directory, so that a listing pays for as many pops as it reads
    entries, times 1/16; below _BATCH names, all. Names are not checked here but by the claim,
    unless nothing but others' were kept: then they are (ours), and it begins again.
    """
    keep = max(_BATCH, seen_before // 16)
    names: list[str] = []
    seen, youngest = 0, ""
    with os.scandir(directory) as entries:
        while chunk := [entry.name for entry in itertools.islice(entries, _CHUNK)]:
            seen += len(chunk)
            names += filter(ours, chunk if not youngest else [n for n in chunk if n < youngest])
            if len(names) > 2 * keep:
                names = sorted(names, reverse=True)[-keep:]
                youngest = names[0]
    names.sort(reverse=True)
    del names[:-keep]
    if ours is None and not any(map(_parse_pending, names)):
        if youngest:
            return _oldest_names(directory, seen_before, _parse_pending)
        names = []
    return names, seen


# Records


def _as_bytes(data: object) -> memoryview:
    if isinstance(data, str):
        raise TypeError("data must be bytes, not str: encode it, as in text.encode()")
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"data must be bytes-like, not {type(data).__name__}: {error}") from None


def _write_all(fd: int, header: bytes, payload: bytes | memoryview) -> None:
    """Write a record without joining its parts; go on after a short write."""
    written = os.writev(fd, (header, payload)) if hasattr(os, "writev") else 0
    size = len(header) + len(payload)
    while written < size:
        part = header if written < len(header) else memoryview(payload)
        done = written if part is header else written - len(header)
        written += os.write(fd, part[done:])


def _header(payload: bytes | memoryview, key: str = "") -> bytes:
    if not key:
        return b"FQ1 %08x %d\n" % (binascii.crc32(payload), len(payload))
    name = key.encode()  # checked with the payload: it must not be taken for another key
    return b"FQ1 %08x %d %b\n" % (
        binascii.crc32(payload, binascii.crc32(name)),
        len(payload),
        name,
    )


def _read_record(path: str, ident: str) -> tuple[bytes, str | None]:
    """Return a file's payload and key. Raises CorruptTask if it is not one whole record."""
    try:
        fd = os.open(path, _READ_FLAGS)
        try:
            head = os.read(fd, _READ_BYTES)
            first, newline, payload = head.partition(b"\n")
            if first + newline == _header(payload):
                return payload, None
            return _read_other(fd, head, ident)
        finally:
            os.close(fd)
    except OSError:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CorruptTask(ident, "not a regular file") from None
        raise


def _read_other(fd: int, head: bytes, ident: str) -> tuple[bytes, str | None]:
    """Read on where the first read did not show a whole record, or say what is wrong with it."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptTask(ident, "not a regular file")
    header = _match_header(head)
    if header is None:
        raise CorruptTask(ident, "no FQ1 header; truncated, or not a task's file")
    length, start = int(header[2]), header.end()
    if status.st_size - start != length:  # before a header that lies makes us allocate
        raise CorruptTask(ident, f"{status.st_size - start} bytes, where the header says {length}")
    payload = _read_rest(fd, start, length)
    name = header[3] or b""
    if b"%08x" % binascii.crc32(payload, binascii.crc32(name)) != header[1]:
        raise CorruptTask(ident, f"wrong checksum over {length} bytes")
    if not name:
        return payload, None
    key = _unquoted(name.decode())
    with contextlib.suppress(ValueError):
        if _quoted(key) == name.decode() and _key_tag(name.decode()) == ident[-8:]:
            return payload, key
    raise CorruptTask(ident, "its key is none, or not quoted as push() does, or not of its id")


def _read_rest(fd: int, start: int, length: int) -> bytes:
    """Read a large payload, in one piece unless the system gives less at a time."""
    os.lseek(fd, start, os.SEEK_SET)
    parts = []
    while length > 0 and (part := os.read(fd, length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _read_head(path: str) -> tuple[str | None, int | None]:
    """Return a task's key and size by its first line; (None, None) if that is not valid."""
    try:
        fd = os.open(path, _READ_FLAGS)
        try:
            header = _match_header(os.read(fd, 1024))
        finally:
            os.close(fd)
    except OSError:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None, None
        raise
    if header is None:
        return None, None
    return (_unquoted(header[3].decode()) if header[3] else None), int(header[2])


# Files


def _move(source: str, target: str, sync: bool = False) -> None:
    """rename(2), by the name that overwrites on Windows too: a task that was run again by hand
    ends where it ended before.

    RACE: a target directory that was replaced just then (_shrink_pending) gives ENOENT as if the
    source were gone; both are there, so again. sync: the file first reaches the disk.
    """
    if sync:
        _sync_path(source)
    for _ in range(_MAX_REPLACED):
        try:
            os.replace(source, target)
            return
        except FileNotFoundError:
            if not os.path.lexists(source) or not os.path.isdir(os.path.dirname(target)):
                raise
    os.replace(source, target)


def _is_there(path: str) -> bool:
    """os.path.lexists() makes "no" of every error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _unlinked(path: str, or_fail: bool = True) -> bool:
    """Remove a file and return whether it was there. or_fail=False: another error is on its way
    to the caller already, and is the one to report."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError:
        if or_fail:
            raise
        return False
    return True


def _write_aside(
    path: str, head: bytes, payload: bytes | memoryview = b"", sync: bool = False
) -> None:
    fd = os.open(path, _CREATE_FLAGS, 0o666)
    try:
        try:
            _write_all(fd, head, payload)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _unlinked(path, or_fail=False)
        raise


def _purged(path: str, before_s: float) -> bool:
    try:
        status = os.lstat(path)
        if status.st_ctime > before_s or stat.S_ISDIR(status.st_mode):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False  # RACE: retried or removed by somebody else
    return True


def _remove_empty_dir(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (*_NOT_EMPTY, errno.ENOENT, errno.ENOTDIR):
            raise


def _sync_path(path: str, flags: int = os.O_RDONLY) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_dir(path: str) -> None:
    if os.name == "posix":  # elsewhere directories can be neither opened nor synced
        _sync_path(path, os.O_RDONLY | os.O_DIRECTORY)  # a link to a directory is one, here


def _make_dir(path: str, mode: int, sync: bool) -> None:
    """mkdir -p, and with sync what was made reaches the disk with its parent."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path or os.path.lexists(parent):  # a link to nowhere is none to be made
            raise
        _make_dir(parent, 0o777, sync)
        _make_dir(path, mode, sync)
        return
    if sync:
        _sync_dir(os.path.dirname(path))


class _BatchSync:
    """Makes what is renamed into a directory durable when the block ends, also by an error.

    On Linux one syncfs() does it. It has to be opened first: from Linux 5.8 on it reports the write
    errors since then. Elsewhere, and on file systems not known to take syncfs() to the disk (FUSE
    does not), `each_file` tells the caller to sync its files, and the directory is synced here.
    """

    def __init__(self, directory: str, wanted: bool) -> None:
        self.wanted = wanted
        self.each_file = False
        self.failed = False
        self._directory = directory
        self._fd = -1

    def __enter__(self) -> None:
        self._syncfs = _find_syncfs(self._directory) if self.wanted else None
        if self._syncfs is not None:
            self._fd = os.open(self._directory, _DIR_FLAGS)
        self.each_file = self.wanted and self._syncfs is None

    def __exit__(self, *exc_info: object) -> None:
        if not self.wanted:
            return
        self.failed = True
        try:
            if self._syncfs is None:
                _sync_dir(self._directory)
            else:
                self._syncfs(self._fd)
        finally:
            if self._fd >= 0:
                os.close(self._fd)
        self.failed = False


def _find_syncfs(directory: str) -> Callable[[int], None] | None:
    """Return syncfs(2) if there is one and the directory's file system is known to obey it."""
    libc = _libc()
    if libc is None or _fs_type(directory) not in _SYNCFS_TYPES:
        return None

    def call(fd: int) -> None:
        if libc.syncfs(fd):
            raise _libc_error(directory)

    return call


def _fs_type(directory: str) -> int:
    """Return f_type of statfs(2); 0 where that is not to be had."""
    libc = _libc()
    if libc is None:
        return 0
    import ctypes

    # struct statfs begins with the type; 256 bytes are enough for any of them.
    status = (ctypes.c_long * 32)()
    failed = libc.statfs(os.fsencode(directory), status)
    return 0 if failed else status[0] & 0xFFFFFFFF


@functools.lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library if it is that of a Linux that has all we want of it, else None."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        has_all = libc.statfs and libc.syncfs and libc.inotify_init1 and libc.inotify_add_watch
        return libc if has_all else None
    except (ImportError, OSError, AttributeError, TypeError):
        return None


def _libc_error(path: str) -> OSError:
    import ctypes

    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def _exchange(first: str, second: str) -> None:
    """Swap what two paths lead to, in one step: renameat2(2) with RENAME_EXCHANGE.

    Raises FileNotFoundError if one is not there, ENOSYS where there is no such call, EINVAL where
    the file system does not offer it, any other OSError as rename() does.
    """
    libc = _libc()
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), second)
    at_cwd = -100  # AT_FDCWD; both paths are absolute
    if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), _RENAME_EXCHANGE):
        raise _libc_error(second)


# Locks: who is alive


def _flock(fd: int, how: str) -> bool | None:
    """Take a lock: "shared" waits for it, "exclusive" doesn't, "exclusive, waiting" does.
    None: there are no locks here."""
    kinds = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX | fcntl.LOCK_NB}
    try:
        fcntl.flock(fd, kinds.get(how, fcntl.LOCK_EX))
    except BlockingIOError:
        return False  # somebody is alive
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _open_locked(path: str) -> _LockFd:
    """Open a file, made if it is missing, and take the exclusive lock on it."""
    while True:
        fd = _open_to_lock(path, _LOCK_FLAGS)
        try:
            _lock_file(fd, path)
            if _leads_to(path, fd):
                return fd
        except BaseException:
            _let_go(fd)
            raise
        _let_go(fd)  # RACE: whoever had it removed the file; not this one, then


def _lock_file(fd: _LockFd, path: str, wait: bool = True) -> None:
    """Take the exclusive lock of an open file.

    Raises BlockingIOError if somebody has it and wait is False, OSError where there is no flock.
    """
    locked = _flock(fd, "exclusive, waiting" if wait else "exclusive")
    if locked is False:
        raise BlockingIOError(errno.EWOULDBLOCK, "somebody has its lock", path)
    if locked is None:
        raise OSError(errno.ENOTSUP, _NO_FLOCK, path)


class _LockFd(int):
    """A descriptor to be locked. It is closed with its last reference at the latest: an exception
    from a signal handler (Ctrl-C) may come between any two lines."""

    pid = 0  # of the process that has to close it

    def __init__(self, _: int) -> None:
        self.pid = os.getpid()  # a forked child closes its copy itself, see _lock_fds

    def __del__(self) -> None:
        if self.pid and self.pid == os.getpid() and _let_go is not None:
            with contextlib.suppress(OSError):  # somebody closed what he did not open
                _let_go(self)


def _open_to_lock(path: str, flags: int = _DIR_FLAGS) -> _LockFd:
    if fcntl is None:
        raise OSError(errno.ENOTSUP, _NO_FLOCK, path)
    fd = _LockFd(os.open(path, flags, 0o666))
    _lock_fds.add(int(fd))
    return fd


def _let_go(fd: _LockFd) -> None:
    """Unlock and close: a child that was forked meanwhile has the descriptor, and the lock, too."""
    with contextlib.suppress(OSError):  # no locks here
        fcntl.flock(fd, fcntl.LOCK_UN)
    _lock_fds.discard(fd)  # first: the number may be another's as soon as it is closed
    fd.pid = 0
    os.close(fd)


def _open_if_there(path: str) -> _LockFd | None:
    """Open a lease directory to lock it; None where there are no locks, or it is gone."""
    if fcntl is None:
        return None
    try:
        return _open_to_lock(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _leads_to(path: str, fd: int | None) -> bool:
    try:
        return fd is not None and os.path.samestat(
            os.stat(path, follow_symlinks=False), os.fstat(fd)
        )
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return False


def _liveness(directory: str, has_leases_of_this_boot: bool) -> str:
    fd = _open_if_there(directory)
    if fd is None:
        return "unknown"
    try:
        free = _flock(fd, "exclusive")
    finally:
        _let_go(fd)
    if free is False:
        return "alive"
    return "dead" if free and has_leases_of_this_boot else "unknown"


# Clocks


def _utc(ns: int) -> datetime:
    """Return nanoseconds since the epoch as a datetime."""
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=ns // 1000)


def _wall_ns() -> int:
    return int(time.time() * 1e9)


def _monotonic_ns() -> int:
    return int(time.monotonic() * 1e9)


def _end_s(timeout: float | None) -> float:
    """Return when a wait ends, on the monotonic clock."""
    if timeout is None:
        return float("inf")
    return time.monotonic() + _not_negative("timeout", timeout)


def _read_boot_id() -> str | None:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        return None  # not Linux, or no /proc
    with contextlib.suppress(OSError):  # Linux 5.6: another one has a monotonic clock of its own
        boot_id += os.readlink("/proc/self/ns/time")
    return boot_id


def _boot_tag(boot_id: str, directory: str) -> str:
    """Return 8 hex digits for a kernel and a mount: among those who share them flock is sound."""
    return f"{binascii.crc32(f'{boot_id} {os.stat(directory).st_dev}'.encode()):08x}"


def _read_anchor(path: str) -> int | None:
    """Return the anchor, None if there is none or it is not one (it is made again then)."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return None
    try:
        content = os.read(fd, 40) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
    if not re.fullmatch(rb"-?[0-9]{1,19}\n", content):
        return None
    anchor_ns = int(content)
    return anchor_ns if 0 <= anchor_ns + _monotonic_ns() < _FARTHEST_NS else None


def _put_first(aside: str, path: str) -> None:
    """Put a clock file in place unless another process was first; then that one counts."""
    try:
        os.link(aside, path)
    except FileExistsError:
        if _read_anchor(path) is None:  # rubbish; looked at now, another may just have been first
            os.replace(aside, path)
    except (AttributeError, OSError):
        # No hard links here. Two who come at once may disagree by the microseconds between them.
        if _read_anchor(path) is None:
            os.replace(aside, path)


# Arguments and messages


def _check_places(data_dir: object, node_id: object) -> None:
    if not isinstance(os.fspath(data_dir), str):  # type: ignore[call-overload]
        raise TypeError(f"data_dir must be a str or a path, not {data_dir!r}")
    if not os.fspath(data_dir):  # type: ignore[call-overload]
        raise ValueError("data_dir must not be empty; for this directory say '.'")
    if node_id is not None and not _is_node_id(node_id):
        raise ValueError(f"node_id must be 1 to 100 of A-Z a-z 0-9 . _ -, not {node_id!r}")


def _check_lease(task: object) -> None:
    if not isinstance(task, FemtoTask):
        kind = type(task).__name__
        raise TypeError(f"task must be a FemtoTask that pop() returned, not of type {kind}")
    if not task._lease_ns:
        raise LeaseLost(task.id, False, "it carries no lease; only pop() gives one")


def _lease_ns(ms: float | None) -> int:
    return _FOREVER_NS if ms is None or ms > _FOREVER_NS / 1e6 else int(ms * 1e6)


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not abs(value) < _MOST:  # NaN neither
        given = value if isinstance(value, float) else "an int of so many digits"
        raise ValueError(f"{name} must be finite, and less than {_MOST:g}, not {given}")
    return value


def _not_negative(name: str, value: float) -> float:
    if _finite(name, value) < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
    return value


def _positive(name: str, value: float) -> float:
    if _finite(name, value) <= 0:
        raise ValueError(f"{name} must be greater than 0, not {value!r}")
    return value


def _reason(error: str | BaseException) -> str:
    if isinstance(error, _CommandFailed):
        error = str(error)
    if isinstance(error, str):
        return error if error.endswith("\n") else error + "\n"
    import traceback

    return "".join(traceback.format_exception(error))


def _add_to_message(error: Exception, text: str) -> None:
    """Add to what an exception says, and leave it the exception that it is."""
    if isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{error.strerror}{text}"
    else:
        error.args = (f"{error}{text}",)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("femtoqueue")


# Command line: a function for each command; its docstring is the help, and its end the example.
# Invariant: it uses the public names of FemtoQueue and FemtoTask only, as any program could.


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0 ok, 1 nothing there or a condition not met,
    2 wrong use or trouble. Errors are one line on standard error. Raises SystemExit, with the
    same statuses, where the command line alone decides: --help, --version, wrong use."""
    try:
        _open_closed_streams()
        status = _run_command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit succeeds
        return 0
    except KeyboardInterrupt:
        import signal

        return 128 + signal.SIGINT
    except (FemtoQueueError, OSError, ValueError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        _write_error(f"femtoqueue: {text}")
        return 1 if isinstance(error, FemtoQueueError) else 2


def _write_error(text: str) -> None:
    """Write one line to standard error; if that fails, there is no other place to report it."""
    with contextlib.suppress(OSError):
        print(" ".join(text.splitlines()), file=sys.stderr, flush=True)


def _open_closed_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed (`>&-`): otherwise the next
    file that is opened, a task's, would get its descriptor and what is printed to it."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _run_command(argv: list[str]) -> int:
    """Parse a command line, run its command, and return the exit status."""
    parser, commands = _build_parser()
    name = argv[0] if argv else ""
    if name not in commands:
        _check_command_name([*argv], parser, commands)
        parser.parse_args(argv)  # exits
    dashes = argv.index("--") if "--" in argv else len(argv)
    options, unknown = commands[name].parse_known_intermixed_args(argv[1:dashes])
    options.after_dashes = argv[dashes + 1 :]
    if name == "work" and dashes == len(argv):
        _check_dashes(argv, options)
    if unknown:
        options.error(f"unknown option {unknown[0]!r}; {options.option_hint}")
    _find_directory(options)
    status: int = options.run(options)
    return status


def _check_command_name(argv: list[str], parser: Any, commands: dict[str, Any]) -> None:
    """Exit with an error unless --help or --version is in the place of the command."""
    import shlex

    found = [word for word in argv if word in commands]
    if not argv:
        parser.error(f"COMMAND is missing: {', '.join(commands)}")
    elif found and argv[0] not in ("-h", "--help", "--version"):
        argv.remove(found[0])
        line = shlex.join([found[0], *argv])
        parser.error(f"the command comes first: femtoqueue {line}")
    elif not argv[0].startswith("-"):
        parser.error(f"unknown command {argv[0]!r}; there are {', '.join(commands)}")


def _check_dashes(argv: list[str], options: Any) -> None:
    """Exit with an error if the command of `work` stands there without -- in front of it."""
    import shlex

    words = options.words
    lacks_dir = os.environ.get("FEMTOQUEUE_DIR") and words and not os.path.isdir(words[0])
    skipped = 0 if lacks_dir else 1  # words in front of CMD
    if len(words) > skipped:
        at = argv.index(words[skipped], argv.index(words[0]) + skipped)
        line = f"{shlex.join(argv[:at])} -- {shlex.join(argv[at:])}"
        options.error(f"put the command after --: femtoqueue {line}")


def _find_directory(options: Any) -> None:
    """Set options.dir: the first word, or $FEMTOQUEUE_DIR if there is none or if it is one of the
    command's own arguments. These stay in options.words."""
    words, default = options.words, os.environ.get("FEMTOQUEUE_DIR")
    is_left_out = not words or options.is_word(words[0])
    options.is_default_dir = bool(default and is_left_out)
    if options.is_default_dir:
        options.dir = default
    elif words and (not is_left_out or options.is_word is _is_any or os.path.isdir(words[0])):
        options.dir = words.pop(0)
    else:
        options.error(f"DIR is missing: {options.usage}, or set FEMTOQUEUE_DIR")
    if options.run is not _work_command:
        words += options.after_dashes
    wrong = [word for word in words if not options.is_word(word)]
    if wrong:
        options.error(f"unexpected argument {wrong[0]!r}; {options.word_hint}")


# Command line: the arguments of each command


def _is_any(word: str) -> bool:
    """Accept every word."""
    return True


def _is_task(word: str) -> bool:
    """Say whether a word is an id, or the path or name of a lease."""
    return bool(_parse_id(word) or _PARSE["inflight"](word.rpartition("/")[2]))


def _build_parser() -> tuple[Any, dict[str, Any]]:
    """Return the parser of the command line, and those of the commands by their names."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage

    parser = Parser(
        prog="femtoqueue",
        description="A durable task queue: a directory. `femtoqueue COMMAND --help` says more.",
        epilog="DIR may come from $FEMTOQUEUE_DIR instead. A TIME is 500ms, 30s, 5m, 2h, 7d, or\n"
        "seconds. Status: 0 ok, 1 nothing there or a condition not met, 2 wrong use or trouble.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"femtoqueue {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    _add_push(commands)
    _add_work(commands)
    _add_leases(commands)
    _add_views(commands)
    _add_maintenance(commands)
    return parser, commands.choices


def _add_command(
    commands: Any,
    run: Callable[[Any], int],
    words: str = "",
    is_word: Callable[[str], bool] = lambda word: False,
    hint: str = "",
) -> Any:
    """Add a command, named and documented as its function, and return its parser.

    words: its arguments after DIR, for the usage. is_word: tells whether an argument can be one of
    them; another one in front is DIR. hint: what to type instead of one that cannot.
    """
    import argparse

    name = run.__name__[1:].removesuffix("_command")
    text, _, example = re.sub("(?m)^ +", "", run.__doc__ or "").partition("Example: ")
    summary = text.partition("\n")[0].rstrip(".")
    usage = f"femtoqueue {name} [options] DIR {words}".rstrip()
    parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:],
        usage=usage,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run, error=parser.error, usage=usage, is_word=is_word)
    parser.set_defaults(word_hint=hint or usage, option_hint=f"see femtoqueue {name} --help")
    return parser


def _invalid(text: str, wanted: str) -> Exception:
    """Return the exception by which argparse rejects the value of an option."""
    import argparse

    return argparse.ArgumentTypeError(f"invalid {text!r}; {wanted}")


def _seconds(text: str) -> float:
    """Return the seconds of a TIME."""
    form = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ms|s|m|h|d|)", text)
    if form is None:
        raise _invalid(text, "a TIME is 500ms, 30s, 5m, 2h, 7d, or 1.5 for seconds")
    return float(form[1]) * {"ms": 0.001, "m": 60, "h": 3600, "d": 86400}.get(form[2], 1)


def _positive_seconds(text: str) -> float:
    """Return the seconds of a TIME that is not 0."""
    seconds = _seconds(text)
    if not seconds:
        raise _invalid(text, "it must be more than 0")
    return seconds


def _timestamp(text: str) -> float:
    """Return seconds since the epoch: local time, unless an offset says otherwise."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()
    except ValueError:
        wanted = "a time is 2026-12-01T08:00, or 2026-12-01T08:00+01:00"
        raise _invalid(text, wanted) from None


def _count(text: str) -> int:
    """Return a number of up to six digits."""
    if not re.fullmatch("[0-9]{1,6}", text):
        raise _invalid(text, "it must be a number from 0 to 999999")
    return int(text)


_TIME: dict[str, Any] = {"metavar": "TIME", "type": _seconds}
_LEASE: dict[str, Any] = {"metavar": "TIME", "type": _positive_seconds, "default": 30.0}
_NUMBER: dict[str, Any] = {"metavar": "N", "type": _count}
_SYNC_HELP = "survive power loss, not only the death of processes"


def _add_push(commands: Any) -> None:
    """Add push and its options."""
    parser = _add_command(commands, _push_command, "[PAYLOAD ...]", _is_any)
    parser.set_defaults(option_hint="put a PAYLOAD that begins with - after --")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--lines", action="store_true", help="a task for each line of standard input")
    add("-0", "--null", action="store_true", help="a task for each piece that a zero byte ends")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--delay", **_TIME, help="not before that much time has gone by")
    add("--at", metavar="WHEN", type=_timestamp, help="not before that time, as 2026-12-01T08:00")
    add = parser.add_argument
    add("--key", metavar="TEXT", help="at most one task of a key waits: replace its payload")
    policies = "if the key's task is in flight: buffer (default), update or reject"
    add("--if-in-flight", choices=_POLICIES, help=policies)
    add("--sync", action="store_true", help=_SYNC_HELP)


def _add_work(commands: Any) -> None:
    """Add work and its options."""
    add = _add_command(commands, _work_command, "-- CMD [ARG ...]").add_argument
    add("-j", "--jobs", **_NUMBER, default=1, help="commands at a time; default 1")
    add("--drain", action="store_true", help="end when nothing waits or runs any more")
    add(
        "--max-attempts",
        **_NUMBER,
        default=3,
        help="tries before it is a dead letter; default 3; 0: no limit",
    )
    add(
        "--retry-delay", **_TIME, default=1.0, help="before a second try, then doubling; default 1s"
    )
    add("--timeout", **_LEASE, help="the lease, renewed while CMD runs; default 30s")
    add("--task-timeout", **_TIME, help="kill CMD after that")
    add("--output-dir", metavar="DIR", help="write CMD's output to ID.out and ID.err in there")
    keep = "delete what is done after that; default: keep it"
    add("--keep-done", **_TIME, default=True, help=keep)
    add("--node", metavar="TEXT", help="this worker's name; default: a fresh one")
    add("--sync", action="store_true", help=_SYNC_HELP)
    add("-q", "--quiet", action="store_true", help="no progress")


def _add_leases(commands: Any) -> None:
    """Add the commands that take tasks, and end or renew what `pop` leased."""
    ids = ("ID ...", _is_task, "an ID is an id, or the path that `pop` printed")
    parser = _add_command(commands, _pop_command, hint="for a task by its id: --id ID")
    add = parser.add_argument
    add("--timeout", **_LEASE, help="the lease (visibility timeout); default 30s")
    add("--wait", **_TIME, default=0.0, help="for a task, if none is there; default 0")
    add("--node", metavar="TEXT", default="cli", help="the worker's name; default cli")
    add("--payload", action="store_true", help="print the payload")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--key", metavar="TEXT", help="the task of that key, out of turn")
    add("--id", metavar="ID", help="the task of that id, out of turn, due or not")
    _add_command(commands, _cancel_command, *ids)
    _add_command(commands, _done_command, *ids)
    _add_command(commands, _fail_command, *ids).add_argument("--reason", metavar="TEXT", help="why")
    add = _add_command(commands, _release_command, *ids).add_mutually_exclusive_group().add_argument
    add("--front", action="store_true", help="to the front, where it was")
    add("--delay", **_TIME, default=0.0, help="to the back, after that time")
    add = _add_command(commands, _extend_command, *ids).add_argument
    add("--timeout", **_LEASE, help="the lease (visibility timeout); default 30s")


def _add_views(commands: Any) -> None:
    """Add the commands that only look."""
    states = ("[STATE ...]", STATES.__contains__, f"a STATE is one of {', '.join(STATES)}")
    add = _add_command(commands, _ls_command, *states).add_argument
    add("--all", action="store_true", help="every state, done too")
    add("--json", action="store_true", help="an object a line")
    add = _add_command(commands, _show_command, "ID", _is_task).add_argument
    add("--payload", action="store_true", help="only the payload")
    add = _add_command(commands, _stat_command).add_argument
    add("--json", action="store_true", help="as an object")
    add("--max-age", **_TIME, help="status 1 if the oldest pending task is older")
    add("--max-pending", **_NUMBER, help="status 1 if more tasks are pending")
    add = _add_command(commands, _top_command).add_argument
    add("--interval", **_LEASE | {"default": 1.0}, help="between two looks; default 1s")
    add("-n", "--count", **_NUMBER, help="end after so many looks; default: no limit")


def _add_maintenance(commands: Any) -> None:
    """Add the commands that operate a queue."""
    _add_command(commands, _pause_command)
    _add_command(commands, _resume_command)
    add = _add_command(commands, _check_command).add_argument
    add("--repair", action="store_true", help="mend what is safe to mend")
    add = _add_command(commands, _retry_command, "[ID ...]", _is_task).add_argument
    add("--all", action="store_true", help="all that failed")
    add = _add_command(commands, _purge_command).add_argument
    add("--older-than", **_TIME, help="finished longer ago than that; required")
    add("--failed", action="store_true", help="dead letters too")


# Command line: what several commands use


def _open_queue(options: Any, create: bool = False, **settings: Any) -> FemtoQueue:
    """Open the queue in DIR. Raises FileNotFoundError if there is none, unless create."""
    if not create and not os.path.isdir(os.path.join(options.dir, "pending")):
        text = "there is no queue; `femtoqueue push` makes one"
        raise FileNotFoundError(errno.ENOENT, text, options.dir)
    return FemtoQueue(options.dir, **settings)


def _for_each_id(options: Any, act: Callable[[str], Any]) -> int:
    """Act on each ID. Report those that are in another state, go on, and return status 1 then."""
    status = 0
    for word in options.words:
        try:
            act(word)
        except FemtoQueueError as error:
            _write_error(f"femtoqueue: {error}")
            status = 1
    return status


def _check_ids(options: Any) -> None:
    """Exit with an error if no ID is given."""
    if not options.words:
        options.error(f"an ID is missing: {options.usage}; {options.word_hint}")


def _time_text(seconds: float | None) -> str:
    """Return a span of time in about six characters: 7s, 3m07s, 2h05m, 4d03h."""
    if seconds is None:
        return "-"
    sign, whole = "-" if seconds <= -1 else "", int(abs(seconds))
    if whole < 60:
        return f"{sign}{whole}s"
    if whole < 3600:
        return f"{sign}{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{sign}{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{sign}{whole // 86400}d{whole % 86400 // 3600:02}h"


# Command line: rows. A row is a dictionary: a task, a worker, or the figures of a queue.

_TASK_COLUMNS = {
    **{"state": ("STATE", "9"), "id": ("ID", "29"), "age_s": ("AGE", ">6")},
    **{"attempts": ("TRY", ">3"), "size_bytes": ("BYTES", ">8"), "left_s": ("LEFT", ">6")},
    **{"key": ("KEY", ""), "node": ("NODE", "")},
}
_NODE_COLUMNS = {
    **{"node": ("NODE", "32"), "liveness": ("IS", "8")},
    **{"inflight": ("IN FLIGHT", ">9"), "expired": ("EXPIRED", ">8")},
}


def _task_row(task: FemtoTask) -> dict[str, Any]:
    """Return what `ls` and `show` tell of a task."""
    until = task.until
    return {
        "id": task.id,
        "state": task.state,
        "age_s": round(time.time() - task.created.timestamp(), 3),
        "attempts": task.attempts,
        "key": task.key,
        "size_bytes": task.size_bytes,
        "node": task.node,
        "left_s": None if until is None else round(until.timestamp() - time.time(), 3),
    }


def _cell(name: str, value: Any) -> str:
    """Return a field of a row as text; a key as one word, percent-encoded as in a header."""
    if value is None:
        return "-"
    if name == "key":
        from urllib.parse import quote

        return quote(value, safe="/:@")
    return str(value)


def _table(rows: Iterable[dict[str, Any]], columns: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table for people: headings, then a row each."""
    yield " ".join(f"{heading:{width}}" for heading, width in columns.values())
    for row in rows:
        cells = []
        for name, (_, width) in columns.items():
            text = _time_text(row[name]) if name.endswith("_s") else _cell(name, row[name])
            cells.append(f"{text:{width}}")
        yield " ".join(cells)


def _fields(row: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each field of a row."""
    width = max(12, *map(len, row))
    for name, value in row.items():
        yield f"{name:{width}} {_cell(name, value)}"


def _print_rows(rows: Iterable[dict[str, Any]], form: str) -> None:
    """Print rows in a form: "table" or "tabs", a task a line; "json", an object a line; "fields",
    a field a line."""
    import json
    import shutil

    lines: Iterable[str]
    if form == "table":
        width = shutil.get_terminal_size().columns
        lines = (line[:width] for line in _table(rows, _TASK_COLUMNS))
    elif form == "tabs":
        lines = ("\t".join(_cell(name, row[name]) for name in _TASK_COLUMNS) for row in rows)
    elif form == "json":
        lines = map(json.dumps, rows)
    else:
        lines = itertools.chain.from_iterable(map(_fields, rows))
    for line in lines:
        print(line)


# Command line: push


def _push_command(options: Any) -> int:
    """Add tasks, and print their ids.

    Each PAYLOAD is a task. Without one, standard input is read: all of it is one task, or each
    line is (--lines), or each piece that ends with a zero byte (--null).
    Example: femtoqueue push jobs 'resize 42.png'
    """
    reads_pieces = options.lines or options.null
    _check_push(options, reads_pieces)
    due_s = options.at if options.delay is None else time.time() + options.delay
    keyed = {}
    if options.key is not None:
        keyed = {"key": options.key, "if_in_flight": options.if_in_flight or "buffer"}
    payloads = map(os.fsencode, options.words) if options.words else _read_payloads(options)
    if not reads_pieces:
        payloads = iter([*payloads])  # an invalid one is an error before anything is made
    with _open_queue(options, create=True, sync_after_write=options.sync) as q:
        for payload in payloads:
            if due_s is None:
                ident = q.push(payload, **keyed)
            else:
                ident = q.schedule(payload, due_s * 1e6, **keyed)
            with contextlib.suppress(BrokenPipeError):  # the other payloads are pushed all the same
                print(ident, flush=True)
    return 0


def _check_push(options: Any, reads_pieces: bool) -> None:
    """Exit with an error for arguments that contradict each other."""
    words = options.words
    before_dashes = len(words) - len(options.after_dashes)
    if options.is_default_dir and before_dashes and os.path.isdir(words[0]):
        options.error(
            f"is {words[0]!r} a queue or a payload? With FEMTOQUEUE_DIR set it is a payload; "
            "unset that, or put payloads that are directories after --"
        )
    if words and reads_pieces:
        options.error("--lines and --null read standard input: leave PAYLOAD out")
    if options.key is not None:
        _quoted(options.key)  # raises for an invalid one, before anything is made
        if len(words) > 1 or reads_pieces:
            options.error("--key goes with one payload: of a key, one task waits")
    if options.if_in_flight is not None and options.key is None:
        options.error("--if-in-flight goes with --key TEXT")


def _read_payloads(options: Any) -> Iterator[bytes]:
    """Yield the payloads on standard input, each as soon as it is complete."""
    stream: Any = sys.stdin.buffer
    if options.null:
        parts: list[bytes] = []
        while chunk := stream.read1(1 << 16):
            first, *more = chunk.split(b"\0")
            parts.append(first)
            for piece in more:
                yield b"".join(parts)
                parts = [piece]
        if any(parts):
            yield b"".join(parts)
    elif options.lines:
        for line in stream:
            yield line.removesuffix(b"\n")
    elif whole := stream.read():
        yield whole
    else:
        options.error("standard input is empty; for an empty task, give '' as PAYLOAD")


# Command line: work


def _work_command(options: Any) -> int:
    """Run CMD for each task, with the payload on its standard input.

    {} in an ARG is replaced by the payload. Give it to `sh -c` as an argument of its own: within
    the script, the payload would be run as code. A payload that cannot be an argument (it has a
    zero byte, or is too long) is a dead letter at once. The environment of CMD has FEMTOQUEUE_ID,
    FEMTOQUEUE_ATTEMPT and FEMTOQUEUE_KEY.
    Exit status 0 means that the task is done. After another one it is tried again later; in the
    end it is a dead letter, with the end of CMD's standard error as the reason.
    SIGTERM or Ctrl-C: the commands that run are finished. A second one: it is passed to their
    process groups, and their tasks are given back. If this worker is killed, its commands are
    killed, too. But a lease that is lost (after a stop for longer than --timeout, or by
    `release`) does not end CMD.
    Status 1: with --drain, a task failed for good, or a signal came before the end.
    Example: femtoqueue work jobs -j 2 --drain -- ./resize --fast
    """
    import logging
    import signal

    _check_work(options)
    if options.output_dir is not None:
        os.makedirs(options.output_dir, exist_ok=True)
    console, is_new = _Console(), not os.path.isdir(options.dir)
    logging.basicConfig(stream=console, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # A parent may have left SIGCHLD ignored; each command would then seem to have ended well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    settings = {
        **{"node_id": options.node, "timeout_stale_ms": options.timeout * 1000},
        **{"sync_after_write": options.sync, "keep_done": options.keep_done},
        **{"max_attempts": options.max_attempts or None, "retry_delay_s": options.retry_delay},
    }
    with _Watchdog() as watchdog, _open_queue(options, create=True, **settings) as q:
        if is_new:
            console.write(f"femtoqueue: {options.dir} was not there: a new queue\n")
        handler = _CommandHandler(q, watchdog, console, options)
        status = _run_pool(q, handler, console, options)
    if status > 128:  # a thread may be stuck in a write, and the interpreter would wait for it
        os._exit(status)
    return status


def _check_work(options: Any) -> None:
    """Exit with an error unless there is a command that can be run."""
    import shutil

    command = options.after_dashes
    if not command:
        options.error(f"the command is missing: femtoqueue work {options.dir} -- CMD ARGS")
    if options.jobs < 1:
        options.error("argument -j/--jobs: it must be 1 or more, not 0")
    if shutil.which(command[0]) is None:
        options.error(f"{command[0]}: command not found")
    if not hasattr(os, "fork"):
        options.error("there is no fork() here; use FemtoQueue.work() in a program of your own")


def _run_pool(q: FemtoQueue, handler: _CommandHandler, console: _Console, options: Any) -> int:
    """Handle tasks until told to stop, and return the exit status."""
    import signal

    pool = _WorkerPool(
        *(q, handler, options.jobs, options.drain),
        in_threads=True,  # a signal must not come between a command's start and its report
        more_signals=(signal.SIGHUP,),  # the terminal is gone
        on_stop=lambda: _announce("finishing what runs; a second signal ends it"),
        on_abort=handler.abort,
    )
    with _Progress(q, pool, console, options.quiet):
        try:
            pool.run()
        except SystemExit as error:
            console.write(f"femtoqueue: {error}\n")
            return 2
    if len(pool.signals) > 1:
        return 128 + pool.signals[-1]
    return 1 if options.drain and (pool.counts["failed"] or pool.signals) else 0


def _announce(text: str) -> None:
    """Write to standard error from a signal handler, unless that would block. Not by the console:
    its lock may be held by the very line that the signal interrupted."""
    import select

    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"\nfemtoqueue: {text}\n".encode())


class _Console:
    """Standard output and error, shared by threads that write lines, and a progress line.

    Invariant: _lock is held while either is written, and the progress line is erased meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress = ""
        self.is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """Write a message to standard error. A failure is ignored: the terminal may be gone, and
        what is in hand is to be finished all the same."""
        with contextlib.suppress(OSError):
            self._write(text.encode("utf-8", "backslashreplace"), sys.stderr.buffer)

    def flush(self) -> None:
        """Do nothing, for the logger: write() leaves nothing to be flushed."""

    def relay(self, lines: bytes, stream: Any) -> None:
        """Write lines of a command. Raises SystemExit if that fails: it is not the task's fault."""
        try:
            self._write(lines, stream)
        except OSError as error:
            raise SystemExit(f"output: {error.strerror}") from None

    def show_progress(self, text: str) -> None:
        """Show a progress line until the next one; where there is no terminal, nothing."""
        with self._lock, contextlib.suppress(OSError):  # no terminal, or it is gone
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            self._progress = text[: columns - 1]
            self._redraw(self._progress)

    def end_progress(self) -> None:
        """Erase the progress line. RACE: one that a thread has just composed is not shown."""
        with self._lock:
            self._redraw("")
            self.is_terminal = False

    def _write(self, lines: bytes, stream: Any) -> None:
        with self._lock:
            self._redraw("")
            stream.write(lines)
            stream.flush()
            self._redraw(self._progress)

    def _redraw(self, text: str) -> None:
        """Replace the progress line on the screen. Call it with _lock held."""
        if self.is_terminal:
            with contextlib.suppress(OSError):  # the terminal is gone
                sys.stderr.write(f"\r\x1b[K{text}")
                sys.stderr.flush()


class _Progress:
    """Shows how far a pool has come, in a thread of its own, and in the end what it has done."""

    def __init__(
        self, queue: FemtoQueue, pool: _WorkerPool, console: _Console, is_quiet: bool
    ) -> None:
        self._queue, self._pool, self._console, self._is_quiet = queue, pool, console, is_quiet
        self._is_over = threading.Event()
        self._started_s = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque(maxlen=20)  # when, and how many had ended

    def __enter__(self) -> None:
        if not self._is_quiet:
            threading.Thread(target=self._run, daemon=True).start()

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        # After two signals, a thread that is stuck in a write may hold the console.
        if not self._is_quiet and len(self._pool.signals) < 2:
            self._console.end_progress()
            counts = ", ".join(f"{name} {count}" for name, count in self._pool.counts.items())
            took = _time_text(time.monotonic() - self._started_s)
            self._console.write(f"femtoqueue: {counts or 'no tasks'} in {took}\n")

    def _run(self) -> None:
        """Report each half second on a terminal, else each 10 s, or 20 times what it costs."""
        pause_s = 0.5 if self._console.is_terminal else 10.0
        cost_s = 0.0
        while not self._is_over.wait(max(pause_s, 20 * cost_s)):
            started_s = time.monotonic()
            try:
                text = self._text()
            except OSError as error:
                text = str(error)
            cost_s = time.monotonic() - started_s
            if self._console.is_terminal:
                self._console.show_progress(text)
            elif not self._is_over.is_set():
                self._console.write(f"femtoqueue: {text}\n")

    def _text(self) -> str:
        """Return counts, the rate over the last samples, and an estimate of the time left."""
        done, failed = self._pool.counts["done"], self._pool.counts["failed"]
        self._samples.append((time.monotonic(), done + failed))
        places = (os.path.join(self._queue.data_dir, it) for it in ("pending", "scheduled"))
        waiting = sum(len(os.listdir(place)) for place in places)
        (first_s, before), (last_s, now) = self._samples[0], self._samples[-1]
        rate = (now - before) / (last_s - first_s) if last_s > first_s else 0.0
        left = f", {_time_text(waiting / rate)} left" if rate else ""
        return f"done {done}, failed {failed}, waiting {waiting}, {rate:.1f}/s{left}"


class _CommandHandler:
    """The handler of the command `work`: runs CMD for a task, and raises _CommandFailed.

    Invariant: a process that may run is in _running and known to the watchdog.
    """

    def __init__(
        self, queue: FemtoQueue, watchdog: _Watchdog, console: _Console, options: Any
    ) -> None:
        self._queue, self._watchdog, self._console = queue, watchdog, console
        self._command, self._output_dir = options.after_dashes, options.output_dir
        self._timeout_s = options.task_timeout
        self._running: set[Any] = set()
        self._is_aborted = False

    def __call__(self, task: FemtoTask) -> None:
        try:
            with self._streams(task) as streams, self._start(task, streams) as process:
                self._run(process, streams["stderr"])
        except OSError as error:  # no descriptors, memory or room: no fault of the task's
            raise SystemExit(f"{error.filename or self._command[0]}: {error.strerror}") from error

    def abort(self, number: int) -> None:
        """Pass a signal to all commands that run, and wait until they have ended."""
        self._is_aborted = True
        self._terminate([*self._running], number)

    @contextlib.contextmanager
    def _streams(self, task: FemtoTask) -> Iterator[dict[str, Any]]:
        """Give the standard streams of a command, as Popen takes them."""
        import subprocess

        with contextlib.ExitStack() as files:
            out: Any = subprocess.PIPE
            err: Any = subprocess.PIPE
            if self._output_dir is not None:
                paths = (f"{self._output_dir}/{task.id}.{name}" for name in ("out", "err"))
                out, err = (files.enter_context(open(path, "a+b")) for path in paths)
            stdin = files.enter_context(_as_stdin(task.data))
            yield {"stdin": stdin, "stdout": out, "stderr": err}

    def _run(self, process: Any, err_file: Any) -> None:
        """Raise _CommandFailed unless a process exits with status 0."""
        import signal

        self._running.add(process)
        try:
            self._watchdog.report("+", process.pid)
            if self._is_aborted:  # RACE: abort() did not see this process
                raise SystemExit
            tail = self._follow(process, err_file)
        except BaseException:
            self._terminate([process], signal.SIGTERM)
            raise
        finally:
            self._running.discard(process)
            self._watchdog.report("-", process.pid)
        if self._is_aborted:
            raise SystemExit  # abort() ended it: no fault of the task's
        if process.returncode:
            status = process.returncode
            what = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
            raise _CommandFailed(f"{what}\n{tail}".rstrip())

    def _start(self, task: FemtoTask, streams: dict[str, Any]) -> Any:
        """Start CMD in a process group of its own: Ctrl-C at the terminal is for the worker only,
        which finishes what runs."""
        import subprocess

        env = {
            **os.environ,
            "FEMTOQUEUE_ID": task.id,
            "FEMTOQUEUE_ATTEMPT": str(task.attempts),
            "FEMTOQUEUE_KEY": (task.key or "").replace("\0", "%00"),
            "FEMTOQUEUE_WORKER": self._watchdog.token,
        }
        command = self._command_for(task)
        try:
            return subprocess.Popen(command, env=env, start_new_session=True, **streams)
        except OSError as error:
            if error.errno == errno.E2BIG and command != self._command:
                self._reject(task, f"it has {len(task.data)} bytes")
            raise

    def _command_for(self, task: FemtoTask) -> list[Any]:
        """Return CMD, with {} in its arguments replaced by the payload."""
        program, *arguments = self._command
        if not any("{}" in it for it in arguments):
            return [program, *arguments]
        if b"\0" in task.data:
            self._reject(task, "it has a zero byte")
        return [program, *(os.fsencode(it).replace(b"{}", task.data) for it in arguments)]

    def _reject(self, task: FemtoTask, why: str) -> NoReturn:
        """Dead-letter a task whose payload cannot be an argument: another try would end so, too."""
        text = f"the payload can't be an argument of the command, in place of {{}}: {why}"
        self._queue.fail(task, text)
        raise _CommandFailed(text)

    def _follow(self, process: Any, err_file: Any) -> str:
        """Relay what a process writes until it has ended, and return the end of its standard
        error. Raises _CommandFailed, with the process terminated, if it takes too long."""
        import signal
        import subprocess

        end_s = _end_s(self._timeout_s)
        err = _LineRelay(sys.stderr.buffer, self._console)
        if self._output_dir is None:
            out = _LineRelay(sys.stdout.buffer, self._console)
            self._relay(process, {process.stdout: out, process.stderr: err}, end_s)
        why = ""
        try:
            process.wait(None if self._timeout_s is None else max(0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._terminate([process], signal.SIGTERM)
            why = f"killed after {_time_text(self._timeout_s)}\n"
        if self._output_dir is not None:
            err_file.seek(max(0, os.fstat(err_file.fileno()).st_size - _TAIL_BYTES))
            err.tail = err_file.read()
        tail = err.tail.decode("utf-8", "replace")
        if why:
            raise _CommandFailed(f"{why}{tail}".rstrip())
        return tail

    def _relay(self, process: Any, relays: dict[Any, _LineRelay], end_s: float) -> None:
        """Relay lines until both pipes end, the process has ended, or it is end_s."""
        import selectors

        with selectors.DefaultSelector() as selector:
            for pipe, relay in relays.items():
                selector.register(pipe, selectors.EVENT_READ, relay)
            while selector.get_map() and time.monotonic() < end_s:
                for key, _ in selector.select(0.1):
                    data = os.read(key.fd, 1 << 16)
                    key.data.feed(data)
                    if not data:
                        selector.unregister(key.fileobj)
                if process.poll() is not None:
                    # What it left running in the background still has the pipes, and may write.
                    end_s = min(end_s, time.monotonic() + 0.1)
        for relay in relays.values():
            relay.feed(b"")

    def _terminate(self, processes: list[Any], number: int) -> None:
        """Signal processes and their groups, wait, and kill what still runs after 5 s."""
        import signal
        import subprocess

        for process in processes:
            self._signal_group(process, number)
        end_s = time.monotonic() + 5
        for process in processes:
            try:
                process.wait(max(0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._signal_group(process, signal.SIGKILL)
                process.wait()
            with contextlib.suppress(OSError):  # those of its group that ignored the signal
                os.killpg(process.pid, signal.SIGKILL)

    def _signal_group(self, process: Any, number: int) -> None:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


class _Watchdog:
    """A process that kills the commands of a worker that was killed: their tasks are delivered
    again at once, and must not be worked on twice.

    The worker reports on a pipe which process groups run. When the pipe ends without a "bye", the
    worker was killed.
    """

    def __init__(self) -> None:
        import signal

        self.token = os.urandom(8).hex()  # in the environment of each command
        reading, self._fd = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(reading)
            return
        try:
            os.close(self._fd)
            os.setsid()
            # Signals to the worker's whole process group are not for the watchdog.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            self._watch(reading)
        finally:
            os._exit(0)

    def __enter__(self) -> _Watchdog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, b"bye\n")
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def report(self, sign: str, group: int) -> None:
        """Report that a process group has begun ("+") or ended ("-")."""
        with contextlib.suppress(BrokenPipeError):  # the watchdog was killed
            os.write(self._fd, f"{sign}{group}\n".encode("ascii"))

    def _watch(self, reading: int) -> None:
        """Read reports; when the worker was killed, kill the groups that run."""
        import signal

        groups: set[int] = set()
        with os.fdopen(reading, encoding="ascii") as lines:
            for line in lines:
                if line == "bye\n":
                    return
                (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
        # Five times: a command that was just started is not reported, and has no token until exec.
        for _ in range(5):
            for group in (*groups, *self._find_by_token()):
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            groups.clear()
            time.sleep(0.05)

    def _find_by_token(self) -> Iterator[int]:
        """Yield the commands that have the token in their environment, where /proc shows it."""
        token = f"FEMTOQUEUE_WORKER={self.token}\0".encode()
        pids = filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ())
        for pid in map(int, pids):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if token in file.read() and os.getsid(pid) == pid:
                    yield pid


class _LineRelay:
    """Writes whole lines of a command to a stream, and keeps the last 4 KiB."""

    def __init__(self, stream: Any, console: _Console) -> None:
        self.tail = b""
        self._stream, self._console, self._rest = stream, console, b""

    def feed(self, data: bytes) -> None:
        """Take what the command wrote; b"" means that it has ended."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if self._rest and (not data or len(self._rest) > 1 << 16):
            lines, newline, self._rest = lines + newline + self._rest, b"\n", b""
        if newline:
            self._console.relay(lines + newline, self._stream)


@contextlib.contextmanager
def _as_stdin(data: bytes) -> Iterator[int]:
    """Yield a descriptor from which a child reads data: a pipe if data fits in one, or a file."""
    if len(data) <= _PIPE_BYTES:
        fd, end = os.pipe()
        try:
            os.write(end, data)
        finally:
            os.close(end)
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            fd = os.dup(file.fileno())
    try:
        yield fd
    finally:
        os.close(fd)


# Command line: leases


def _pop_command(options: Any) -> int:
    """Lease the oldest task, and print the path of its file in DIR.

    The path ends with the id. The lease outlives this process: it lasts until done, fail or
    release, or for --timeout. These commands take the path, which stands for this delivery only,
    or the id. With --payload, the payload is printed, and the path goes to standard error.
    Status 1: there is no task to be had.
    Example: task=$(femtoqueue pop jobs) && tail -n +2 "jobs/$task" && femtoqueue done jobs "$task"
    """
    lease_ms = options.timeout * 1000
    with _open_queue(options, node_id=options.node, timeout_stale_ms=lease_ms, detached=True) as q:
        if options.key is None and options.id is None:
            task = q.pop(options.wait)
        else:
            task = q.take(options.key, options.wait, id=options.id)
        if task is None:
            return 1
        try:
            if options.payload:
                sys.stdout.buffer.write(task.data)
                print(task.path, file=sys.stderr)
            else:
                print(task.path)
            sys.stdout.flush()
        except BaseException:  # a lease that was not printed is known to no one
            q.release(task, front=True, counted=False)
            raise
    return 0


def _cancel_command(options: Any) -> int:
    """Delete tasks that wait, due or not.

    A task in another state stays as it is. Status 1: one of them did not wait, or the queue is
    paused.
    Example: femtoqueue cancel jobs 01795243500123456789-0a1b2c3d
    """
    _check_ids(options)
    with _open_queue(options, keep_done=False) as q:

        def cancel(word: str) -> None:
            ident = _id_in(word)
            task = q.take(id=ident)
            if task is None:
                raise TaskNotFound(_why_not_taken(q, ident))
            q.done(task)

        return _for_each_id(options, cancel)


def _why_not_taken(q: FemtoQueue, ident: str) -> str:
    """Say why take(id=) returned None. Raises CorruptTask if the file is not a whole record."""
    if q.paused:
        return f"task {ident} can't be taken: the queue is paused; `femtoqueue resume` it first"
    task = q.peek(ident)
    return f"task {ident} is not waiting: {'no such task' if task is None else task.state}"


def _settle_each(options: Any, settle: Callable[[FemtoQueue, FemtoTask], Any]) -> int:
    """Settle the lease of each ID, and return the exit status."""
    _check_ids(options)
    with _open_queue(options) as q:
        return _for_each_id(options, lambda word: settle(q, q.attach(word)))


def _done_command(options: Any) -> int:
    """End tasks that `pop` leased: they move to done/.

    Example: femtoqueue done jobs "$task"
    """
    return _settle_each(options, FemtoQueue.done)


def _fail_command(options: Any) -> int:
    """Set tasks that are in flight aside as dead letters, with a reason.

    Example: femtoqueue fail jobs "$task" --reason 'no such image'
    """
    return _settle_each(options, lambda q, task: q.fail(task, options.reason))


def _release_command(options: Any) -> int:
    """Give back tasks that are in flight.

    They go to the back of the queue, to its front, or wait for a delay first. A worker that holds
    such a task loses its lease, and can change nothing any more.
    Example: femtoqueue release jobs "$task" --delay 5m
    """
    front, delay_s = options.front, options.delay
    return _settle_each(options, lambda q, it: q.release(it, front=front, delay_s=delay_s))


def _extend_command(options: Any) -> int:
    """Renew leases, and print their new paths.

    Example: task=$(femtoqueue extend jobs "$task" --timeout 5m)
    """

    def extend(q: FemtoQueue, task: FemtoTask) -> None:
        q.extend(task, options.timeout * 1000)
        print(task.path)

    return _settle_each(options, extend)


# Command line: views


def _ls_command(options: Any) -> int:
    """List the tasks that are alive or failed, or those of each STATE.

    A STATE is pending, scheduled, inflight, done or failed; --all means all of them. Columns:
    state, id, age, attempts (-: not known), size in bytes (-: corrupt), time until the lease ends
    or the task is due, key, node. Where it is not a terminal, they are separated by tabs, and
    times are in seconds.
    Example: femtoqueue ls jobs failed
    """
    if options.words and options.all:
        options.error("give each STATE, or --all, not both")
    states = options.words or [it for it in STATES if options.all or it != "done"]
    form = "json" if options.json else "table" if sys.stdout.isatty() else "tabs"
    with _open_queue(options) as q:
        tasks = (task for state in states for task in q.tasks(state, data=False))
        _print_rows(map(_task_row, tasks), form)
    return 0


def _show_command(options: Any) -> int:
    """Print what there is to know of a task, and its payload.

    Example: femtoqueue show jobs 01795243500123456789-0a1b2c3d
    """
    if len(options.words) != 1:
        options.error(f"give one ID: femtoqueue show {options.dir} ID")
    ident = _id_in(options.words[0])
    with _open_queue(options) as q:
        task = q.peek(ident)
    if task is None:
        raise TaskNotFound(f"no task {ident}")
    if not options.payload:
        reason = {} if task.error is None else {"reason": task.error}
        _print_rows([_task_row(task) | reason], "fields")
        print(flush=True)
    sys.stdout.buffer.write(task.data)
    return 0


def _stat_command(options: Any) -> int:
    """Count the tasks in each state; for monitors, too.

    Status 1: more than --max-pending tasks wait, or the oldest waits for longer than --max-age.
    Example: femtoqueue stat jobs --max-age 10m
    """
    with _open_queue(options) as q:
        stats, paused = q.stats(), q.paused
    live = Counter(node.liveness for node in stats.nodes)
    names = ("pending", "scheduled", "inflight", "expired", "buffered", "done", "failed")
    figures: dict[str, Any] = {
        **{name: getattr(stats, name) for name in names},
        "oldest_pending_age_s": stats.oldest_pending_age_s,
        **{f"workers_{name}": live[name] for name in ("alive", "dead", "unknown")},
        "disk_bytes": _disk_bytes(options.dir),
        "paused": paused,
    }
    _print_rows([figures], "json" if options.json else "fields")
    status, age_s = 0, stats.oldest_pending_age_s or 0
    if options.max_pending is not None and stats.pending > options.max_pending:
        _write_error(f"femtoqueue: {stats.pending} tasks are pending")
        status = 1
    if options.max_age is not None and age_s > options.max_age:
        _write_error(f"femtoqueue: the oldest task waits for {_time_text(age_s)}")
        status = 1
    return status


def _disk_bytes(path: str) -> int:
    """Return the size of the blocks that the files in a directory take on the disk."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # RACE: it has just moved
                status = os.lstat(os.path.join(directory, name))
                total += getattr(status, "st_blocks", status.st_size // 512) * 512
    return total


def _top_command(options: Any) -> int:
    """Show the queue live: counts, rates, workers and what they hold.

    The key q ends it. Where it is not a terminal, it prints a block each --interval, --count times.
    Example: femtoqueue top jobs
    """
    with _open_queue(options) as q, _full_screen() as read_key:
        top = _Top(q, options.dir, read_key is not None)
        for number in itertools.count(1):
            top.draw()
            if options.count is not None and number >= options.count:
                return 0
            if read_key is None:
                time.sleep(options.interval)
            elif read_key(max(options.interval, 20 * top.cost_s)) in ("q", "Q", "\x03", "\x04"):
                return 0
    return 0


@contextlib.contextmanager
def _full_screen() -> Iterator[Callable[[float], str] | None]:
    """Take over the terminal while the block runs, and give a function that waits for a key. Give
    None where there is no terminal."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        import signal
        import termios
        import tty
    except ImportError:  # not POSIX
        is_terminal = False
    if not is_terminal:
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        tty.setcbreak(fd)
        print("\x1b[?1049h\x1b[?25l", end="", flush=True)  # the alternate screen, no cursor
        yield functools.partial(_read_key, fd)
    except OSError as error:
        if error.errno != errno.EIO or error.filename is not None:
            raise  # not the terminal that is gone
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            print("\x1b[?25h\x1b[?1049l", end="", flush=True)
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read_key(fd: int, seconds: float) -> str:
    """Wait for a key and return it: "" if none was pressed, Ctrl-D if the terminal is gone."""
    import select

    if not select.select([fd], [], [], seconds)[0]:
        return ""
    with contextlib.suppress(OSError):
        return os.read(fd, 1).decode("ascii", "replace") or "\x04"
    return "\x04"


class _Top:
    """The display of the command `top`."""

    def __init__(self, queue: FemtoQueue, path: str, is_terminal: bool) -> None:
        self._queue, self._path, self._is_terminal = queue, path, is_terminal
        self._before: tuple[float, int, int] | None = None
        self.cost_s = 0.0  # of the last look at the queue

    def draw(self) -> None:
        """Print the display, or draw it over the one before."""
        import shutil

        started_s = time.monotonic()
        lines = self._lines(self._queue.stats())
        self.cost_s = time.monotonic() - started_s
        if not self._is_terminal:
            print("\n".join(lines), end="\n\n", flush=True)
            return
        columns, rows = shutil.get_terminal_size()
        lines = [line[:columns] for line in lines[:rows]]
        if not os.environ.get("NO_COLOR"):
            lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
        # Each line is erased before it is written: after its last column, that would be erased.
        text = "\n".join(f"\x1b[K{line}" for line in lines)
        rest = "\n\x1b[J" if len(lines) < rows else ""
        print(f"\x1b[H{text}{rest}", end="", flush=True)

    def _lines(self, stats: Stats) -> list[str]:
        """Return the lines of the display: figures, workers, leases."""
        rate_in, rate_out = self._rates(stats)
        paused = "   PAUSED" if self._queue.paused else ""
        leases = itertools.islice(self._queue.tasks("inflight", data=False), 100)
        return [
            f"{self._path}   {time.strftime('%H:%M:%S')}{paused}",
            f"pending {stats.pending}   scheduled {stats.scheduled}   in flight {stats.inflight}"
            f"   buffered {stats.buffered}   done {stats.done}   failed {stats.failed}",
            f"in {rate_in}   out {rate_out}   oldest {_time_text(stats.oldest_pending_age_s)}",
            "",
            *_table(map(vars, stats.nodes), _NODE_COLUMNS),
            "",
            *_table(map(_task_row, leases), _TASK_COLUMNS),
        ]

    def _rates(self, stats: Stats) -> tuple[str, str]:
        """Return how many tasks came in and how many ended, per second, since the last call."""
        ended = stats.done + stats.failed
        total = ended + stats.pending + stats.scheduled + stats.inflight + stats.buffered
        now_s = time.monotonic()
        before, self._before = self._before, (now_s, total, ended)
        if before is None or now_s <= before[0]:
            return "-", "-"
        seconds = now_s - before[0]
        rates = ((total - before[1]) / seconds, (ended - before[2]) / seconds)
        return f"{max(0, rates[0]):.1f}/s", f"{max(0, rates[1]):.1f}/s"


# Command line: maintenance


def _pause_command(options: Any) -> int:
    """Hand nothing out until resume, in any process.

    Example: femtoqueue pause jobs
    """
    with _open_queue(options) as q:
        q.pause()
    return 0


def _resume_command(options: Any) -> int:
    """Hand tasks out again after pause.

    Example: femtoqueue resume jobs
    """
    with _open_queue(options) as q:
        q.resume()
    return 0


def _check_command(options: Any) -> int:
    """Look for what is odd in DIR, and print a line for each finding.

    It reads every task. --repair mends what is safe to mend. Status 1: something is odd, and was
    not mended.
    Example: femtoqueue check jobs --repair
    """
    status = 0
    with _open_queue(options) as q:
        for finding in q.check(options.repair):
            result = "mended" if finding.repaired else "odd"
            print(finding.kind, ascii(finding.path)[1:-1], finding.text, result, sep="\t")
            status = status if finding.repaired else 1
    return status


def _retry_command(options: Any) -> int:
    """Put failed tasks to the back of the queue, their attempts at 0.

    Example: femtoqueue retry jobs --all
    """
    if bool(options.words) == options.all:
        given = f"femtoqueue retry {options.dir}"
        options.error(f"which tasks? {given} ID ..., or all: {given} --all")
    with _open_queue(options) as q:
        if options.all:
            print(q.retry_failed())
        return _for_each_id(options, lambda word: q.retry(_id_in(word)))


def _purge_command(options: Any) -> int:
    """Delete tasks that were done long ago, and print how many.

    With --failed, those that failed long ago, too.
    Example: femtoqueue purge jobs --older-than 7d
    """
    if options.older_than is None:
        options.error(f"how old? femtoqueue purge {options.dir} --older-than 7d")
    with _open_queue(options) as q:
        print(q.purge(options.older_than, ("done", "failed") if options.failed else ("done",)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
