"""femtoqueue: a durable task queue in one file, on the standard library alone.

    from femtoqueue import FemtoQueue

    q = FemtoQueue("jobs")                  # any number of processes, one directory
    q.push(b"resize 42.png")
    while task := q.pop():
        print(task.id, task.data)           # the work; then:
        q.done(task)                        # or q.fail(task, "why"), q.release(task)

A queue is a directory, a task is a file, and the directory it is in is its state:

    data_dir/
      creating/           being written; never read as tasks
      pending/            waiting             <id>  or  <order>~<attempts>~<id>
      scheduled/          waiting for a time  <due>~<attempts>~<id>
      inflight-<node>/    leased to a worker  <deadline>~<attempts>~<boot>~<id>
      done/  failed/      finished            <id>, and failed/<id>.error says why
      keys/               of keyed tasks      <hash>: states; <id>, <due>~0~<id>: buffered
      locks/              of keys             <last two digits of the hash>; these stay
      checkpoints/        how far work came   <id>
      spare/              empty: becomes inflight-<node>/ when the disk is full
      clock-<boot>        the anchor of this boot's queue clock
      PAUSED              `touch` it, and nothing is handed out while it is there

An id is <order>-<tag>. <order>: 20 digits, nanoseconds on the queue clock. <tag>: 8 hex digits,
random for each queue object (0 to 7 in front), or a key's hash (8 to f in front). Each name begins
with 20 digits, so that sorting the names of a directory gives its order. A file is one line,
`FQ1 <crc32> <length>` and the key if it has one, and then the payload as given.

Each move is one system call, and takes effect when that call returns:

    step       room and method                from              to                       by
    publish    _Files.publish                 creating/<id>     pending/, scheduled/     rename
    due        _Worker.enqueue_scheduled      scheduled/        pending/<now>~<n>~<id>   rename
    claim      _LeaseDir.claim                where it waits    inflight-<node>/         rename
    undo       _LeaseDir.undo_claim           inflight-<node>/  where it waited          rename
    finish     _Worker.finish                 inflight-<node>/  done/<id>                rename
                 without keep_done            inflight-<node>/  nowhere                  unlink
    fail       _Worker.end_failed             inflight-<node>/  failed/<id>; its .error  rename
    release    _Worker.requeue                inflight-<node>/  pending/ or scheduled/   rename
    extend     _Worker.renew                  inflight-<node>/  the same, a new deadline rename
    reclaim    _Worker.reclaim                an ended lease    pending/, as pushed      rename
    quarantine _Worker.quarantine             inflight, waiting failed/<id>; its .error  rename
    retry      _Worker.requeue_failed         failed/<id>       pending/<now>~0~<id>     rename
    purge      FemtoQueue.purge, _purge_done  done/, failed/    nowhere                  unlink
    replace    _Keys.put, _Files.swap         creating/<id>     a waiting, leased record renameat2
    buffer     _Keys.put                      creating/<id>     keys/<id>                rename
    take along _KeyedTasks.claimed            keys/<id>         over the leased record   rename
    promote    _KeyedTasks.move_keyed         keys/<id>         pending/, scheduled/     rename
    save       _save_checkpoint               creating/         checkpoints/<id>         rename

A *task* has a payload and, for life, an *id*. A *worker* is a queue object. It *claims* a task: the
rename gives it a *lease*, which ends at its *deadline* or with the worker. The name of the lease is
the *fence*: when it is gone, what would end or extend it raises LeaseLost, and changes nothing. A
task is *settled* by done(), fail() or release(), or *reclaimed* from a worker that died or is late.
A *dead letter* is in failed/; what can't be delivered is *quarantined* there (or, if failed/ can't
be written to, moved to the back). *Housekeeping* is what else pop() does. A newer payload of a key
is *buffered* behind a task; tasks with a key move under its lock (move_keyed).

Of two workers that rename one task, one succeeds; the other gets ENOENT and takes the next. A
living worker holds a shared flock on its inflight-<node>/, which the kernel drops with the process:
who gets the exclusive one knows that the worker is dead. There is no server, and no thread but of
processing(), work(), the async methods and TicketQueue.turn(). The command `work` forks a watchdog.

Guaranteed: a task whose push() returned is delivered until a done() or fail() returned, whatever is
killed when. Order is that of push(), on a host, over restarts, reboots and set clocks. What is
corrupt ends in failed/. With sync_after_write=True, what returned survives power loss.

Not guaranteed: exactly once. A task runs twice when its worker died or was late, or (without sync)
when power was lost after done(): make handlers idempotent. Between hosts, a cut network may do the
same, and give a key two tasks. A process stopped at work on a key holds up 1 key in 256, and who
takes a task of one; one stopped as it looks at a dead worker, a restart under that node_id.

Assumed: data_dir is on one file system, whose rename() is atomic (POSIX). Hosts that share it have
wall clocks within a second of each other, one timeout_stale_ms, and node_ids of their own; a lease
of another host ends by its deadline only, as do all without flock or boot id (not Linux). Files
whose names have none of these forms are foreign: never delivered, moved or removed.

Rooms: the core, where each uses only those above it; the face; annexes, each with one door.

     1. System              constants and system calls that Python lacks
     2. Names               of tasks, directories and keys
     3. Errors and values   what the interface raises, returns and checks
     4. Records             the header line and the payload
     5. File locks          flock, and fork
     6. Files               the steps on files, and the order in which they are synced
     7. Queue clock         orders and deadlines
     8. Backlog             the batch of names in pending/
     9. Lease directory     claiming into it, and the lock that shows life
    10. Worker              each change of a task's state
    11. Housekeeping        the jobs of pop(): listing, due tasks, dead workers
    12. FemtoQueue          the public face
    13. Key states          where the task of each key is, under locks
    14. Keys                one task a key, and what is pushed behind it: worker.keys
    15. Waiting             inotify, threads, coroutines: worker.waits
    16. Processing          renewal of leases, checkpoints: processing(), checkpoint()
    17. Worker pool         the loop of work()
    18. Inspection          check()
    19. Tickets             TicketQueue
    20. Other file systems  NFS, GlusterFS and the like; systems without flock: _open_files()
    21. Command line        `femtoqueue COMMAND`: main()
"""

from __future__ import annotations

import binascii
import bisect
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

try:
    import fcntl
except ImportError:  # not POSIX: leases end by their deadlines
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import logging
    from contextlib import AbstractContextManager
    from datetime import datetime

__all__ = [
    "STATES",
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
__version__ = "1.0.0"

# ==================================================================================================
# 1. System: system calls and constants that Python lacks, and small helpers of all rooms.
#    Invariant: libc is loaded once. Dates in names come from time.time() or the queue clock;
#    time.monotonic() measures pauses and timeouts. Both are looked up in the module at each call:
#    a program under test may put its own functions there, also ones that stand still or go back.
# ==================================================================================================

# f_type of statfs(2): ext2 to ext4, xfs, btrfs, f2fs, tmpfs.
_SYNCFS_TYPES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
# Those, overlay, zfs, bcachefs, ramfs: only this kernel writes to them, and inotify reports it all.
_LOCAL_TYPES = _SYNCFS_TYPES | {0x794C7630, 0x2FC12FC1, 0xCA451A4E, 0x858458F6}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)

_OUT_OF_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_NO_WRITE_ERRNOS = (*_OUT_OF_SPACE_ERRNOS, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)
_TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# ESTALE: another host removed what our descriptor refers to (NFS, GlusterFS).
_MISSING_ERRNOS = (errno.ENOENT, errno.ESTALE)
_NO_EXCHANGE_ERRNOS = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# O_NOFOLLOW: a link is no task. O_NONBLOCK: a FIFO in pending/ must not block pop().
_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_FLAGS = os.O_RDONLY | _NO_FOLLOW_OR_BLOCK | getattr(os, "O_BINARY", 0)
_DIR_FLAGS = _NO_FOLLOW_OR_BLOCK | getattr(os, "O_DIRECTORY", 0)


def _wall_ns() -> int:
    return int(time.time() * 1e9)


def _due_ns() -> int:
    """Return the newest time that is due: a microsecond ahead of the wall clock. A float of today's
    date has a step of 240 ns, and a due time is the result of two multiplications with it."""
    return int(time.time() * 1e9) + 1000


def _monotonic_ns() -> int:
    return int(time.monotonic() * 1e9)


def _utc(ns: int) -> datetime:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(ns / 1e9, timezone.utc)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("femtoqueue")


@functools.lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library of a Linux, else None."""
    with suppress(ImportError, OSError):
        import ctypes

        if sys.platform == "linux":
            return ctypes.CDLL(None, use_errno=True)
    return None


def _os_error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def _call_libc(name: str, path: str, *args: object) -> None:
    """Make a system call that returns 0. Raises OSError, of `path`, if it does not; ENOSYS where
    there is no such call."""
    call = getattr(_libc(), name, None)
    if call is None:
        raise _os_error(errno.ENOSYS, path)
    import ctypes

    if call(*args):
        raise _os_error(ctypes.get_errno(), path)


def _fs_type(path: str) -> int:
    """Return f_type of statfs(2), 0 where there is no such call. Raises OSError if it fails."""
    if _libc() is None:
        return 0
    import ctypes

    # struct statfs begins with the type; 256 bytes are enough for any of them.
    status = (ctypes.c_long * 32)()
    _call_libc("statfs", path, os.fsencode(path), status)
    return status[0] & 0xFFFFFFFF


def _exchange(first: str, second: str) -> None:
    """Swap what two absolute paths lead to: renameat2(2) with RENAME_EXCHANGE. Raises ENOSYS where
    there is no such call, EINVAL where the file system has none, else as rename() does."""
    places = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    _call_libc("renameat2", second, *places, _RENAME_EXCHANGE)


def _read_boot_id() -> str | None:
    """Return what names this boot of this kernel; None where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        return None  # not Linux, or no /proc
    with suppress(OSError):  # Linux 5.6: a time namespace has its own monotonic clock
        boot_id += os.readlink("/proc/self/ns/time")
    return boot_id


def _boot_tag(boot_id: str, directory: str) -> str:
    """Return 8 hex digits for a kernel and a mount: flock is coherent where both are shared."""
    return f"{binascii.crc32(f'{boot_id} {os.stat(directory).st_dev}'.encode()):08x}"


def _follow_owner(fd: int, data_dir: str, and_mode: int = 0) -> None:
    """Give a new file or directory, which all users of the queue need, the owner, the group and the
    rights of data_dir, as far as this user may. Else root, which ran one command, or a user with
    another umask, would shut out the others for good. and_mode: rights that it gets besides.

    `fd` is of a file that this call's process has just made. It is never changed by its path: root
    may work in a data_dir of another user, who could put a link to any file there meanwhile."""
    with suppress(OSError, AttributeError):  # AttributeError: not POSIX
        wanted, made = os.stat(data_dir), os.fstat(fd)
        if made.st_uid != os.geteuid():
            return  # somebody put another directory into the place of ours
        with suppress(OSError):  # not a group of this user's
            os.fchown(fd, wanted.st_uid if os.geteuid() == 0 else -1, wanted.st_gid)
        is_dir = stat.S_ISDIR(made.st_mode)
        os.fchmod(fd, stat.S_IMODE(wanted.st_mode) & (0o7777 if is_dir else 0o666) | and_mode)


def _make_dir(path: str, mode: int, sync: bool) -> None:
    """mkdir -p; with sync, what was made reaches the disk with its parent."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.lexists(parent):
        _make_dir(parent, 0o777, sync)
    with suppress(FileExistsError):
        os.mkdir(path, mode)
        if sync:
            _sync_dir(parent)


def _unlink_if_exists(path: str) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False


class _ignore_missing:
    """End the block, without an error, if its file, or the directory of that, is not there (any
    more), or at an OSError of these other numbers. Not a generator: the error that it ends stays in
    a cycle with the frames of all callers (Python 3.12), and a dropped queue would live on."""

    def __init__(self, *others: int) -> None:
        self._numbers = *_MISSING_ERRNOS, errno.ENOTDIR, *others

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._numbers


def _unlink_if_older(path: str, before_s: float) -> bool:
    """Remove a file that was renamed or changed before a time (st_ctime); return whether it did."""
    with _ignore_missing():  # RACE: another process retried or removed it
        status = os.lstat(path)
        if status.st_ctime <= before_s and not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
            return True
    return False


def _remove_empty_dir(path: str) -> None:
    # EEXIST: not empty, as ENOTEMPTY; POSIX leaves the choice to the file system. Nor if it is
    # another user's (sticky).
    with _ignore_missing(errno.ENOTEMPTY, errno.EEXIST, *_NO_WRITE_ERRNOS):
        os.rmdir(path)


def _open_plain(path: str, flags: int) -> int:
    """Open a file, but no link; a FIFO that takes its place just now must not block."""
    return os.open(path, flags | _NO_FOLLOW_OR_BLOCK)


def _sync_path(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_dir(path: str) -> None:
    if os.name == "posix":  # elsewhere directories can be neither opened nor synced
        _sync_path(path, os.O_DIRECTORY)  # a link to a directory is one, here


def _raise_if_foreign(error: OSError) -> None:
    """Raise an OSError without errno: it is no disk trouble, but a signal handler's TimeoutError,
    say, which means to end the call."""
    if error.errno is None:
        raise error


def _for_each(act: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Act on each: one task or directory with an OSError must not keep the others waiting. The
    first such error is raised last."""
    errors = []
    for item in items:
        try:
            act(item)
        except OSError as error:
            _raise_if_foreign(error)
            errors.append(error)
    if errors:
        raise errors[0]


def _check_str(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    return value


def _no_op(*args: object) -> None:
    """The default of a callback."""


def _backoff_s(longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds: from a millisecond, doubling, up to longest_s."""
    pause_s = 0.001
    while True:
        yield min(pause_s, longest_s)
        pause_s *= 2


# ==================================================================================================
# 2. Names: of tasks, directories and keys; parsers and formatters. Other rooms only join a
#    directory and a name, or split them at "/".
#    Invariant: a name matches a form of its directory (_FORMS), or it is foreign. The number in
#    front has 20 digits, the id at the end 29 characters.
# ==================================================================================================

# A new state goes in here and into _FORMS; then into Stats (3), _Worker (10), purge() (12).
STATES = ("pending", "scheduled", "inflight", "done", "failed")
_ENDED = ("done", "failed")
# Of tasks that have not ended. A claim needs no lock, nor does its undoing: in this order a task
# that does one of them meanwhile is not missed; one that does both is.
_LIVE = ("inflight", "scheduled", "pending", "inflight")
_WAITING_DIRS = ("pending", "scheduled")
_STATE_DIRS = ("creating", *_WAITING_DIRS, *_ENDED)  # that a queue makes at once

_NEVER_NS = 8_999_999_999_999_999_999  # the year 2255; the largest number that a name may carry
_FOREVER_NS = 4 * 10**18  # 126 years: the longest lease
_EARLIEST_NS = 10**18  # September 2001: no queue clock starts sooner, so its times have 19 digits
_FARTHEST_NS = 4 * 10**18  # the year 2096: no queue clock starts later, whatever a name says
_MAX_ATTEMPTS = 999_999  # a name has room for six digits
_DETACHED = "00000000"  # the <boot> of a lease that only its deadline ends
_MAX_KEY_BYTES = 200
_ID_LENGTH = 29

_NS = "0[0-8][0-9]{18}"
_ID = f"({_NS}-[0-9a-f]{{8}})"
_ATTEMPTS = "([0-9]{1,6})"
_BOOT = "([0-9a-f]{8})"
# Written without <boot>, and in done/ and failed/ only as an id; but a person may move a task here
# from anywhere, under the name that it had there.
_WAITING = f"(?:{_NS}~{_ATTEMPTS}~(?:{_BOOT}~)?)?{_ID}"
# Of each directory of data_dir the form of its names: of tasks, with the groups attempts, boot, id.
_FORMS = {
    state: re.compile(form).fullmatch
    for state, form in {
        ".": "PAUSED|clock-[0-9a-f]{8}",
        "creating": rf"()(){_ID}(?:\.(?:clock|error|pending))?",
        "pending": _WAITING,
        "scheduled": f"{_NS}~{_ATTEMPTS}~(){_ID}",
        "inflight": f"{_NS}~{_ATTEMPTS}~{_BOOT}~{_ID}",
        # A newer payload behind a task; its tag is a key's.
        "keys": f"(?:{_NS}~{_ATTEMPTS}~)?()({_NS}-[89a-f][0-9a-f]{{7}})",
        "checkpoints": f"()(){_ID}",
        "done": _WAITING,
        "failed": _WAITING,
        "locks": "[0-9a-f]{2}",
        "spare": "(?!)",  # of ours there is none in it
    }.items()
}
_parse_reason = re.compile(rf"{_ID}\.error").fullmatch  # in failed/, too
_parse_tag = re.compile("[89a-f][0-9a-f]{7}").fullmatch  # of a key; a process has 0 to 7 in front
_parse_id = re.compile(_ID).fullmatch
_parse_ticket = re.compile(r"[0-9]{20}~[0-9a-f]{8}~[0-9a-f]{16}").fullmatch
_parse_node_dir = re.compile(r"inflight-([A-Za-z0-9._-]{1,100})").fullmatch
_parse_key_state = re.compile(
    r"([!-~]+) ((?:pending|scheduled|inflight-[A-Za-z0-9._-]{1,100})/"
    rf"(?:[0-9a-f~]+~)?{_ID}) ((?:[0-9~]+~)?{_NS}-[0-9a-f]{{8}}|-)"
).fullmatch


class _Entry(NamedTuple):
    """A task's file: its directory, its name there, and what that says. attempts, boot: None and ""
    if the name does not carry them."""

    directory: str
    name: str
    id: str
    attempts: int | None
    boot: str

    @property
    def path(self) -> str:
        """Relative to data_dir."""
        return f"{self.directory}/{self.name}"

    @property
    def stamp_ns(self) -> int:
        return int(self.name[:20])


def _parse(directory: str, name: str) -> _Entry | None:
    """Return the entry of a name; None if it is not that of a task, or what belongs to one."""
    match = _FORMS[_state_of(directory)](name)
    if match is None:
        return None
    attempts, boot, ident = match.groups()
    return _Entry(directory, name, ident, int(attempts) if attempts else None, boot or "")


def _state_of(path: str) -> str:
    """Return the state that a directory, or a path in it, stands for; "keys" and the like too."""
    directory = path.partition("/")[0]
    return "inflight" if directory.startswith("inflight-") else directory


def _id_of(path: str) -> str:
    return path[-_ID_LENGTH:]


def _tag_of(ident: str) -> str:
    return ident[-8:]


def _stamp_of(path: str) -> int:
    """Return the number in front of a name, or of the last part of a path: in ns, the order of an
    id, a due time or a deadline; of a ticket, its number."""
    return int(path.rpartition("/")[2][:20])


def _attempts_of(path: str) -> int:
    return int(path.split("~")[1]) if "~" in path else 0


def _is_end(path: str) -> bool:
    """Whether a task that moves there, or nowhere (""), has come to its end."""
    return not path or path.startswith(_ENDED)


def _is_keyed(ident: str) -> bool:
    """Whether an id's tag is the hash of a key: the name tells, so that other tasks pay nothing."""
    return ident[21] > "7"


def _new_name(order_ns: int, tag: str) -> str:
    return f"{order_ns:020d}-{tag}"


def _task_name(stamp_ns: int, attempts: int, ident: str) -> str:
    return f"{stamp_ns:020d}~{attempts}~{ident}"


def _front_path(ident: str, attempts: int) -> str:
    """Return the path in pending/ of a task at the place of its push."""
    return f"pending/{_task_name(_stamp_of(ident), attempts, ident)}"


def _waiting_path(newer: str) -> str:
    """Return the path that a payload in keys/ gets as a task."""
    return newer.replace("keys", "scheduled" if "~" in newer else "pending")


def _reset_path(path: str, due_ns: int | None) -> str:
    """Return the path of a waiting task with its attempts at 0: at its place, or at due_ns."""
    if due_ns is not None:
        return f"scheduled/{_task_name(due_ns, 0, _id_of(path))}"
    if "~" not in path:
        return path
    return f"{_state_of(path)}/{_task_name(_stamp_of(path), 0, _id_of(path))}"


def _key_tag(name: str) -> str:
    """Return the hash of an encoded key, as 8 hex digits: the tag of its tasks' ids."""
    return f"{binascii.crc32(name.encode()) | 1 << 31:08x}"


def _encode_key(key: object) -> str:
    """Return a key as it stands in a header and in keys/: percent-encoded, as in a URL."""
    raw = _check_str("key", key).encode()
    if not 1 <= len(raw) <= _MAX_KEY_BYTES:
        wanted = f"1 to {_MAX_KEY_BYTES} bytes in UTF-8"
        raise ValueError(f"key must be {wanted}, not {len(raw)}: {key!r}")
    return _quote_key(raw)  # not the key itself: that may be an Enum, whose text is another


def _quote_key(key: str | bytes) -> str:
    """Percent-encode a key, of any length: an earlier version may have pushed it."""
    from urllib.parse import quote  # 2 ms, which no program needs that has no keys

    return quote(key, "~:/@")


def _decode_key(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name)


# ==================================================================================================
# 3. Errors and values: what the interface raises and returns, and the checks of its arguments.
#    Invariant: a value is a snapshot. Of a task, calls on the queue that leased it change `_lease`
#    and `checkpoint`.
# ==================================================================================================

_BytesLike = bytes | bytearray | memoryview
_MAX_NUMBER = 10**302  # of any argument
_IF_IN_FLIGHT = ("buffer", "update", "reject")


class FemtoQueueError(Exception):
    """The base class of this module's own errors. Trouble with the disk is raised as an OSError."""


class LeaseLost(FemtoQueueError):
    """The lease of the task is not held by this delivery. Nothing was changed.

    id:  the id of the task.
    expired:  True if the deadline of the lease has passed; another worker may have the task now.
        False otherwise: the delivery had ended, or a person had moved the file, or close() had
        given up the lease. Also False for a task that never had a lease.
    why:  the reason, as text.

    A lease past its deadline stays valid until a worker takes the task back. Only then is the lease
    lost.
    """

    def __init__(self, id: str, expired: bool, why: str) -> None:
        super().__init__(id, expired, why)
        self.id, self.expired, self.why = id, expired, why

    def __str__(self) -> str:
        return f"task {self.id}: {self.why}"


class KeyInFlight(FemtoQueueError):
    """The key already has a task.

    key:  the key.
    id:  the id of the task that has the key. That task is in flight if push() or schedule() raised
        the error. If retry() raised it, the task may also be waiting.
    """

    def __init__(self, key: str, id: str) -> None:
        super().__init__(key, id)
        self.key, self.id = key, id

    def __str__(self) -> str:
        return f"key {self.key!r} has a task already: {self.id}"


class TaskNotFound(FemtoQueueError):
    """The task is not in the state that the call requires: retry() requires a task in failed/."""


class CorruptTask(FemtoQueueError):
    """The file of a task is not a whole record.

    id:  the id of the task.
    reason:  what is wrong with the file, as text.

    peek() raises it. pop() does not: it moves such a task to failed/.
    """

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(id, reason)
        self.id, self.reason = id, reason

    def __str__(self) -> str:
        return f"task {self.id} is corrupt: {self.reason}"


class _CommandFailed(Exception):
    """A command that `work` ran did not end well. Its text is the whole reason."""


class _Lease:
    """Where the file of a task was, and its delivery if it is leased (length_ns is not 0).

    `path` is the fencing token; a renewal writes the new one here. `source`: where it was claimed
    from. `length_ns`: of a renewal. `outcome`: a field of WorkCounts; "" while the delivery runs,
    or if its end could not be written. `has_checkpoint`: it may have one.
    """

    path = source = outcome = ""
    length_ns = 0
    has_checkpoint = False


_NO_LEASE = _Lease()


class FemtoTask:
    """A task, as it was when its file was read.

    id:  the id. The task keeps it for life, through retries and delays.
    data:  the payload as pushed.
    attempts:  the number of deliveries so far, including the current one. None: unknown, because
        done/ and failed/ do not record the number.
    key:  the key, or None for a task without a key.
    checkpoint:  the last bytes that checkpoint() saved, in this delivery or before. Only pop() and
        take() read the saved bytes. None: nothing was saved, or another method returned the task.
    error:  the reason of a task in failed/, else None.
    size_bytes:  the length of the payload in bytes. None: the file was not read (attach()), or its
        header is invalid (tasks(data=False) only).

    Assigning to an attribute changes nothing in the queue, with one exception: checkpoint() records
    for which `data` the checkpoint is valid. Calls of the queue that leased the task update `path`
    and `checkpoint`. Two tasks are equal if `id`, `data`, `attempts` and `key` are equal.
    """

    # _anchor_ns: of the queue clock.
    __slots__ = (
        *("id", "data", "attempts", "key", "checkpoint", "error", "size_bytes"),
        *("_anchor_ns", "_lease"),
    )

    def __init__(
        self,
        id: str,
        data: bytes,
        attempts: int | None = 0,
        key: str | None = None,
        _lease: _Lease = _NO_LEASE,
        _anchor_ns: int = 0,
    ) -> None:
        self.id, self.data, self.attempts, self.key = id, data, attempts, key
        self.checkpoint: bytes | None = None
        self.error: str | None = None
        self.size_bytes: int | None = len(data)
        self._lease, self._anchor_ns = _lease, _anchor_ns

    def _compared(self) -> tuple[object, ...]:
        return self.id, self.data, self.attempts, self.key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FemtoTask):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def __repr__(self) -> str:
        values = f"id={self.id!r}, data={self.data!r}, attempts={self.attempts}, key={self.key!r}"
        return f"FemtoTask({values})"

    @property
    def path(self) -> str:
        """The path of the task's file, relative to data_dir, when the file was read. For a leased
        task the path is the fencing token, and each renewal of the lease changes it."""
        return self._lease.path

    @property
    def state(self) -> str:
        """The state when the file was read, one of STATES. "buffered" means a newer payload of a
        key, which waits in keys/ behind the task of the key."""
        state = _state_of(self.path)
        return "buffered" if state == "keys" else state

    @property
    def node(self) -> str | None:
        """The node_id of the worker that holds the lease; None if the task is not in flight."""
        match = _parse_node_dir(self.path.partition("/")[0])
        return match and match[1]

    @property
    def created(self) -> datetime:
        """The time of the push, in UTC by the queue clock (see FemtoQueue). The time is part of the
        id: a later push that replaces the payload of a key does not change it."""
        return _utc(_stamp_of(self.id))

    @property
    def until(self) -> datetime | None:
        """The end of the lease of a task in flight, or the due time of a scheduled task; else None.
        The time is in UTC. A deadline is converted from the queue clock to the wall clock at each
        access."""
        if self.state == "inflight":
            left_ns = _stamp_of(self.path) - self._anchor_ns - _monotonic_ns()
            return _utc(_wall_ns() + left_ns)
        return _utc(_stamp_of(self.path)) if self.state == "scheduled" else None


def _lease_of(task: object) -> _Lease:
    """Return the lease of a task. Raises TypeError or LeaseLost if it has none."""
    if not isinstance(task, FemtoTask):
        kind = type(task).__name__
        raise TypeError(f"task must be a FemtoTask that pop() returned, not of type {kind}")
    if not task._lease.length_ns:
        raise LeaseLost(task.id, False, "it carries no lease; only pop() gives one")
    return task._lease


class NodeStats(NamedTuple):
    """The leases of one worker, counted when stats() was called.

    node:  the node_id of the worker.
    inflight:  the number of its leases.
    expired:  how many of these leases are past their deadline.
    liveness:  "alive": a process holds the lock of the worker's lease directory.
        "dead": no process holds the lock, and the directory has leases of this boot.
        "unknown": anything else. The directory is empty, all its leases are detached or of another
            host or an earlier boot, or there is no flock(2) here. Only deadlines end such leases.
    """

    node: str
    inflight: int
    expired: int
    liveness: str


class Stats(NamedTuple):
    """The number of tasks in each state; see FemtoQueue.stats().

    pending, scheduled, inflight, done, failed:  the number of tasks in that state.
    buffered:  the number of newer payloads in keys/, each behind the task of its key.
    oldest_pending_age_s:  for how many seconds a task has waited its turn: the first task in
        pending/, or in scheduled/ the first task that is due; the larger number counts. None:
        pending/ is empty, and no scheduled task is due.
    nodes:  the leases of each worker, by node_id.
    expired:  the number of leases past their deadline whose tasks no worker has taken back.
    """

    pending: int
    scheduled: int
    inflight: int
    buffered: int  # newer payloads of keys, behind their tasks
    done: int
    failed: int
    oldest_pending_age_s: float | None  # or due in scheduled/; None: nothing is
    nodes: tuple[NodeStats, ...]
    expired: int = 0  # of those in flight: the lease has ended, and is not yet taken back


class WorkCounts(NamedTuple):
    """The deliveries of one call of work(), counted by how they ended.

    done:  the task was finished.
    failed:  the task is a dead letter in failed/.
    retried:  the handler raised an exception, and the task waits for another attempt.
    released:  the handler gave the task back, or the second signal did. Or the handler raised
        SystemExit or another exception that is not an Exception.
    lost:  the lease was lost, or the end of the delivery could not be written to the disk. The log
        says which of the two.
    """

    done: int = 0
    failed: int = 0
    retried: int = 0
    released: int = 0
    lost: int = 0


class Finding(NamedTuple):
    """One thing that check() found.

    kind:  the kind of the finding, such as "corrupt" or "leftover".
    path:  the file or directory, relative to data_dir.
    text:  what is wrong with it.
    repaired:  True if check(repair=True) repaired it.
    """

    kind: str
    path: str
    text: str
    repaired: bool = False


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not abs(value) < _MAX_NUMBER:  # NaN neither
        raise ValueError(f"{name} must be finite, and less than {_MAX_NUMBER:g}, not {value!r}")
    return value


def _not_negative(name: str, value: float) -> float:
    if _finite(name, value) < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
    return value


def _positive(name: str, value: float) -> float:
    if _finite(name, value) <= 0:
        raise ValueError(f"{name} must be greater than 0, not {value!r}")
    return value


def _lease_length_ns(name: str, ms: float | None, if_none_ns: int) -> int:
    return if_none_ns if ms is None else max(1, min(_FOREVER_NS, int(_positive(name, ms) * 1e6)))


def _end_s(timeout: float | None, name: str = "timeout") -> float:
    if timeout is None:
        return float("inf")
    return time.monotonic() + _not_negative(name, timeout)


def _check_dir(name: str, directory: object) -> str:
    path = os.fspath(directory)  # type: ignore[call-overload]
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a str or a path, not {directory!r}")
    if not path:
        raise ValueError(f"{name} must not be empty; for this directory say '.'")
    return path


def _check_node_id(node_id: object) -> str | None:
    if node_id is None:
        return None
    match = _parse_node_dir("inflight-" + node_id) if isinstance(node_id, str) else None
    if match is None or match[1] in (".", ".."):
        raise ValueError(f"node_id must be 1 to 100 of A-Z a-z 0-9 . _ -, not {node_id!r}")
    return match[1]  # not node_id: that may be an Enum, whose format() is another text


def _check_max_attempts(max_attempts: object) -> None:
    if max_attempts is not None and (
        type(max_attempts) is not int or not 1 <= max_attempts <= _MAX_ATTEMPTS
    ):
        wanted = f"None or an int, 1 to {_MAX_ATTEMPTS}"
        raise ValueError(f"max_attempts must be {wanted}, not {max_attempts!r}")


def _check_state(state: str) -> str:
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")
    return STATES[STATES.index(state)]  # see _check_node_id


def _check_id(id: object) -> str:
    match = _parse_id(_check_str("id", id))
    if match is None:
        raise ValueError(f"not the id of a task: {id!r}")
    return match[1]


# ==================================================================================================
# 4. Records: one header line, `FQ1 <crc32> <length> [<key>]`, then the payload.
#    Invariant: a payload that does not match its header is never returned.
# ==================================================================================================

_READ_BYTES = 4096  # a record of this size or less is read with one call; holds any header
_JOINED_BYTES = 1 << 14  # a record of this size or less is written with one call

_Record = tuple[bytes, "str | None"]  # payload and key
_match_header = re.compile(rb"FQ1 ([0-9a-f]{8}) ([0-9]{1,19})(?: ([!-~]+))?\n").match


def _as_bytes(data: object) -> memoryview:
    if isinstance(data, str):
        raise TypeError("data must be bytes, not str: encode it, as in text.encode()")
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"data must be bytes-like, not {type(data).__name__}: {error}") from None


def _header(payload: bytes | memoryview, key: str = "") -> bytes:
    """Return the first line of a record; key: encoded, "" for none."""
    if not key:
        return b"FQ1 %08x %d\n" % (binascii.crc32(payload), len(payload))
    name = key.encode()  # checked with the payload: it must not be taken for another key
    checksum = binascii.crc32(payload, binascii.crc32(name))
    return b"FQ1 %08x %d %b\n" % (checksum, len(payload), name)


def _write_record(fd: int, header: bytes, payload: bytes | memoryview) -> None:
    """Write a record: a small one with one call, a large one without joining its parts."""
    size = len(header) + len(payload)
    if size <= _JOINED_BYTES and os.write(fd, header + payload) == size:
        return
    os.lseek(fd, 0, os.SEEK_SET)  # after a short write, too
    for part in (header, payload):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]


def _read_other(fd: int, head: bytes, ident: str) -> _Record:
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
    payload = head[start:]
    if len(payload) < length:  # a large one: in one piece, unless the system gives less at a time
        os.lseek(fd, start, os.SEEK_SET)
        payload = b""
    while len(payload) < length and (part := os.read(fd, length - len(payload))):
        payload += part
    name = (header[3] or b"").decode()
    if _header(payload, name) != header[0]:
        raise CorruptTask(ident, f"wrong checksum over {length} bytes")
    if not name:
        return payload, None
    key = _decode_key(name)
    with suppress(ValueError):
        if _encode_key(key) == name and _key_tag(name) == _tag_of(ident):
            return payload, key
    raise CorruptTask(ident, "its key is invalid, or not quoted as push() does, or not of its id")


# ==================================================================================================
# 5. File locks: flock(2) on files and directories, held by this process alone.
#    Invariant: a lock ends with its close(), its last reference or its process, whichever is
#    first; a forked child never keeps one.
# ==================================================================================================

_NO_FLOCK = "keyed tasks and tickets need flock(2), which is not available here"
# EBADF: NFS, for an exclusive lock on what is open for reading; EINVAL: others, for directories.
_NO_FLOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL)
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | _NO_FOLLOW_OR_BLOCK
_MAX_OPENINGS = 100  # of a lock's file that others make and remove meanwhile
_FORK_WAIT_S, _FORK_POLL_S = 0.5, 0.001

_open_lock_fds: set[int] = set()  # those of all threads; closed in a forked child
_no_fork_threads: set[int] = set()  # in _no_fork()
_fork_lock = threading.RLock()  # held by fork(), and while a thread comes into that set


@contextmanager
def _no_fork() -> Iterator[None]:
    """Hold up fork() in other threads while the block opens or closes a descriptor: the child would
    not know of it. Two such blocks don't exclude each other: on a mount that hangs, one takes long.
    As the interpreter ends there is no fork, and other threads have ended with their locks."""
    thread = threading.get_ident()
    if sys.is_finalizing() or thread in _no_fork_threads:  # nested, in a handler or a finalizer
        yield
        return
    try:
        with _fork_lock:
            _no_fork_threads.add(thread)
        yield
    finally:
        _no_fork_threads.discard(thread)


def _flock(fd: int, how: int) -> bool | None:
    """Take a lock by flags of flock(). False: another process has it; None: there are no locks."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK_ERRNOS:
            return None
        raise
    return True


class _FileLock:
    """An open file or directory that can be locked. It is closed with its last reference at the
    latest: an exception from a signal handler (Ctrl-C) may come between any two lines. `states`: of
    the keys that it guards (13)."""

    fd = -1  # until it is open
    reading_is_enough = True  # for flock(), to open the file for
    refused: OSError | None = None  # why it is open for reading only
    prefix = ""  # of a name in a directory, for calls that take its descriptor

    def __init__(self, path: str, flags: int = _LOCK_FLAGS, data_dir: str = "") -> None:
        self.path, self._pid = path, os.getpid()
        self.states: dict[str, Any] = {}
        with _no_fork():
            self.fd = self._open(path, flags, data_dir)
            _open_lock_fds.add(self.fd)

    def _open(self, path: str, flags: int, data_dir: str) -> int:
        """Open a file without O_CREAT if it is there, which a sticky directory forbids for another
        user's file (fs.protected_regular); for reading only if that is all that we may."""
        for _ in range(_MAX_OPENINGS):
            try:
                return os.open(path, flags & ~os.O_CREAT)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
            except OSError as error:
                is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
                if not (is_refused and self.reading_is_enough and flags & os.O_RDWR):
                    raise
                self.refused = error
                return os.open(path, os.O_RDONLY | _NO_FOLLOW_OR_BLOCK)
            # RACE: another process makes the file first. Then the next round opens that one.
            with suppress(FileExistsError):
                fd = os.open(path, flags | os.O_EXCL, 0o666)
                if data_dir:
                    _follow_owner(fd, data_dir)
                return fd
        raise _os_error(errno.ENOENT, path)

    def acquire_shared(self) -> bool | None:
        return _flock(self.fd, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool | None:
        return _flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire_exclusive(self, wait: bool = True) -> None:
        """Take the exclusive lock. Raises BlockingIOError if wait is False and it is not free."""
        locked = _flock(self.fd, fcntl.LOCK_EX) if wait else self.try_exclusive()
        if locked is False:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has its lock", self.path)
        if locked is None:
            raise OSError(errno.ENOTSUP, _NO_FLOCK, self.path)

    def is_at_path(self) -> bool:
        with _ignore_missing():
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        return False

    def close(self) -> None:
        """Unlock and close: a child that was forked meanwhile has the descriptor, and the lock."""
        fd = self.fd
        if fd < 0:
            return
        with suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_UN)
        with _no_fork():
            _open_lock_fds.discard(fd)  # first: the number may be another's as soon as it is closed
            self.fd = -1  # not sooner: what Ctrl-C leaves open is closed with the last reference
            try:
                os.close(fd)
            except OSError as error:  # what was done under the lock is done
                _raise_if_foreign(error)

    def __del__(self) -> None:
        # os is None when the interpreter ends. In a forked child the descriptor is closed already
        # (_after_fork_in_child), and its number may be another's.
        if self.fd >= 0 and os is not None and self._pid == os.getpid():
            self.close()


# What is to be called in a forked child, with the object that it belongs to.
_fork_hooks: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def _before_fork() -> None:
    """Take the lock, and wait until no other thread is in _no_fork(). Not for long: if its mount
    hangs, there is no descriptor yet; and one that Ctrl-C ended stays while that exception lives.
    Ctrl-C ends the wait, and not the fork."""
    _fork_lock.acquire()
    end_s = time.monotonic() + _FORK_WAIT_S
    while _no_fork_threads - {threading.get_ident()} and time.monotonic() < end_s:
        time.sleep(_FORK_POLL_S)


def _after_fork_in_child() -> None:
    """In a forked child: the parent's locks must end with the parent, so close them here."""
    with suppress(RuntimeError):  # it is not ours if Ctrl-C ended _before_fork()
        _fork_lock.release()
    _no_fork_threads.clear()  # after Ctrl-C, threads are in it that the child does not have
    while _open_lock_fds:
        os.close(_open_lock_fds.pop())
    for owner, hook in list(_fork_hooks.items()):
        hook(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_fork_lock.release,
        after_in_child=_after_fork_in_child,
    )


# ==================================================================================================
# 6. Files: the steps on files of data_dir, and the order in which they are synced.
#    Invariant: a file appears whole under its name, or not at all; after power loss the checksum
#    shows a torn one. If the queue is durable, a call returns when these have reached the disk:
#      a new task    rename, file, directory: of a torn one nobody was told (publish, push_many)
#      a move        rename; then commit(): file, directory
#      in the place  file, rename; then commit(): no whole record gives way to a torn one
#      done, unkept  file, directory, unlink, directory: it is not in its older place again
#      of a key      its state, as file and directory; then the task: file, rename, directory
# ==================================================================================================

_MAX_REPLACED = 100  # times that a directory may be replaced during one move, or step into a line
_TICK_S = 0.011  # of the times of files there are a hundred ticks in a second, or more
_SHRINK_BYTES = 1 << 20  # a pending/ that is larger than this when empty is replaced


def _batch_sync(directory: str) -> tuple[Callable[[], None], bool]:
    """Return what makes durable what is renamed into a directory from now on; and whether its files
    are to be synced before: where syncfs() is not known to take them to the disk (FUSE; not Linux).
    The directory is opened now: syncfs() reports the write errors since (Linux 5.8)."""
    if _fs_type(directory) not in _SYNCFS_TYPES:
        return functools.partial(_sync_dir, directory), True
    fd = os.open(directory, _DIR_FLAGS)

    def sync() -> None:
        try:
            _call_libc("syncfs", directory, fd)
        finally:
            os.close(fd)

    return sync, False


class _Files:
    """The files of one data_dir. Paths are relative to it, as in "pending/<id>"; `root` ends with
    a separator. `is_durable`: what is acknowledged survives power loss. `parts`: the classes of
    the lease directory, the keys and the numbers of tickets for this file system. `clock`: the
    queue's, which sets it; tickets have none."""

    caveat = ""  # what check() is to say of the file system
    parts: Any
    clock: _QueueClock

    # A new file is synced after its rename; before it where an open file can't be renamed.
    syncs_after_rename = os.name == "posix"

    def __init__(self, data_dir: str, is_durable: bool) -> None:
        self.root = os.path.join(data_dir, "")
        self.is_durable = is_durable

    def make_dirs(self) -> None:
        """Make the directories of the states where they are missing, and the spare one."""
        for name in _STATE_DIRS:
            self.make_dir(name)
        if self.is_durable:
            _sync_dir(self.root)
            # Another may just have made it, without sync. One that we may not read was there.
            with suppress(PermissionError):
                _sync_dir(f"{self.root}..")
        with _ignore_missing(errno.EEXIST, *_NO_WRITE_ERRNOS):
            os.mkdir(f"{self.root}spare")

    def make_dir(self, name: str) -> None:
        """Make a directory of data_dir that is missing, for all users of the queue."""
        with suppress(FileExistsError):
            os.mkdir(self.root + name)
            with suppress(OSError):  # not POSIX; or removed with its worker just now
                fd = os.open(self.root + name, _DIR_FLAGS)
                try:
                    _follow_owner(fd, self.root)
                finally:
                    os.close(fd)

    # Looking

    def exists(self, path: str) -> bool:
        """Whether a file is there. os.path.lexists() takes every error for "no"."""
        try:
            self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def entries(self, directory: str) -> list[_Entry]:
        """Return our names in a directory, sorted; others' are left out."""
        names = sorted(self.names(directory))
        return [entry for name in names if (entry := _parse(directory, name))]

    def names(self, directory: str) -> list[str]:
        """Return all names in a directory; none if it was removed with its worker, is not there yet
        or is a foreign file. Raises FileNotFoundError or the like for one that must be there."""
        try:
            return os.listdir(self.root + directory)
        except (FileNotFoundError, NotADirectoryError):
            if directory in _STATE_DIRS:
                raise
        return []

    def node_dirs(self) -> list[str]:
        names = sorted(filter(_parse_node_dir, os.listdir(self.root)))
        return [name for name in names if not os.path.islink(self.root + name)]

    def find(self, *states: str) -> Iterator[_Entry]:
        """Yield the tasks in these states ("keys" and "checkpoints" too), each in name order."""
        for state in states:
            for directory in self.node_dirs() if state == "inflight" else [state]:
                yield from self.entries(directory)

    def find_id(self, ident: str, *states: str) -> _Entry | None:
        """Return the entry of an id in these states, None if it is in none of them. RACE: a task
        that moves meanwhile from a later state to an earlier one is missed."""
        for state in states:
            if state in ("pending", *_ENDED) and self.exists(f"{state}/{ident}"):
                return _parse(state, ident)
        return next((entry for entry in self.find(*states) if entry.id == ident), None)

    def has_entries(self, directory: str) -> bool:
        """Whether a task is in a directory; it is read only up to the first one."""
        # No keys yet; RACE: removed with its worker just now.
        with _ignore_missing(), os.scandir(self.root + directory) as entries:
            return any(_parse(directory, entry.name) for entry in entries)
        return False

    def has_work(self) -> bool:
        """Whether a task waits or is leased. RACE: tasks move both ways meanwhile. One that a look
        missed has changed a directory; the second look is in another tick of the files' times."""
        before = self._changed_ns()
        for pause_s in (_TICK_S, 0):
            if any(map(self.has_entries, ("keys", *_WAITING_DIRS, *self.node_dirs()))):
                return True
            time.sleep(pause_s)
        return self._changed_ns() != before

    def _changed_ns(self) -> list[int]:
        return [os.stat(self.root + it).st_mtime_ns for it in _WAITING_DIRS]

    def text(self, path: str) -> str:
        """Return the text of a file, "" if something else stands there: a FIFO, a link, a device
        would block, or never end."""
        if not self.is_regular(path):
            return ""
        with open(self.root + path, "rb", opener=_open_plain) as file:
            return file.read().decode("utf-8", "replace")

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(self.root + path)

    def read(self, path: str, ident: str) -> _Record:
        """Return payload and key of a record. Raises CorruptTask unless it is a whole one."""
        try:
            fd = os.open(self.root + path, _READ_FLAGS)
            try:
                head = os.read(fd, _READ_BYTES)
                first, newline, payload = head.partition(b"\n")
                if first + newline == _header(payload):
                    return payload, None
                return _read_other(fd, head, ident)
            finally:
                os.close(fd)  # must raise what it raises: that the file was replaced, say
        except OSError:
            if not self.is_regular(path):
                raise CorruptTask(ident, "not a regular file") from None
            raise

    read_listed = read  # of a name that was listed just now

    def head(self, path: str) -> tuple[str | None, int | None]:
        """Return key and length of a payload by its header; (None, None) if that is invalid."""
        header = None
        if self.is_regular(path):
            fd = os.open(self.root + path, _READ_FLAGS)
            try:
                header = _match_header(os.read(fd, _READ_BYTES))
            finally:
                os.close(fd)
        if header is None:
            return None, None
        return (_decode_key(header[3].decode()) if header[3] else None), int(header[2])

    def is_regular(self, path: str) -> bool:
        return stat.S_ISREG(os.lstat(self.root + path).st_mode)

    # Locking

    def open_lock(self, path: str, flags: int = _LOCK_FLAGS) -> _FileLock:
        return _FileLock(self.root + path, flags, self.root)

    def open_dir(self, directory: str) -> _FileLock | None:
        """Open a lease directory to lock it; None if it is gone, or a foreign file."""
        with _ignore_missing():
            return _FileLock(self.root + directory, _DIR_FLAGS)
        return None

    # Moving

    def publish(
        self,
        aside: str,
        data: _BytesLike,
        path: str,
        *,
        sync: bool | None = None,
    ) -> None:
        """Write a record to creating/<aside> and rename it to `path`: the task exists from then on.
        It is synced after that: one journal commit instead of two. sync: None, or, for one of a
        batch, whose directory is synced later, whether to sync the file."""
        payload = data if type(data) is bytes else _as_bytes(data)
        header = _header(payload)
        source, sync_dir = f"creating/{aside}", False
        if sync is None:
            sync = sync_dir = self.is_durable
        fd = os.open(self.root + source, _CREATE_FLAGS, 0o666)
        try:
            try:
                _write_record(fd, header, payload)
                if sync and self.syncs_after_rename:
                    self.move_over(source, path)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not (sync and self.syncs_after_rename):
                self.move_over(source, path)
            if sync_dir:
                self.commit_dir(os.path.dirname(path))
        except BaseException:
            # Not acknowledged, so not there; a consumer that was quicker keeps what it has.
            for leftover in (source, path):
                self.remove(leftover)
            raise

    @contextmanager
    def replacement(
        self,
        name: str,
        header: bytes,
        payload: bytes | memoryview = b"",
        for_all: int | None = None,
    ) -> Iterator[str]:
        """Write a file creating/<name> that the block puts in the place of another; if the block
        fails, it goes. It is synced first: power loss must leave one of the two whole. for_all:
        rights that the file gets besides those of data_dir; None: the umask decides alone."""
        path = f"creating/{name}"
        fd = os.open(self.root + path, _CREATE_FLAGS, 0o666)
        try:
            try:
                if for_all is not None:
                    _follow_owner(fd, self.root, for_all)
                _write_record(fd, header, payload)
                if self.is_durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        except BaseException:
            self.remove(path)
            raise

    def swap(self, aside: str, path: str) -> bool:
        """Exchange a file with the one at `path`, in one step; False where names can't be exchanged
        (NFS, FUSE; not Linux). Raises FileNotFoundError if there is none at `path`."""
        try:
            _exchange(self.root + aside, self.root + path)
            return True
        except OSError as error:
            if error.errno not in _NO_EXCHANGE_ERRNOS:
                raise
        return False

    def move(self, source: str, target: str) -> str:
        """Rename a task's file, over one that is there; target "": remove it. Return target."""
        try:
            if target:
                os.replace(self.root + source, self.root + target)
            else:
                os.unlink(self.root + source)
        except FileNotFoundError:
            self._move_again(source, target)
        # POSIX: rename() does nothing, and succeeds, if both names are links to one file. Such a
        # finished task would be delivered for ever. A first delivery does not pay for that.
        if "~1~" not in source and _is_end(target):
            _unlink_if_exists(self.root + source)
        return target

    def _move_again(self, source: str, target: str) -> None:
        """Do as move(), after a FileNotFoundError. RACE: another process replaces the target
        directory just then (shrink_pending): ENOENT, though both are there."""
        for _ in range(_MAX_REPLACED):
            if not (target and self.exists(source)):
                raise _os_error(errno.ENOENT, self.root + source)
            with suppress(FileNotFoundError):
                os.replace(self.root + source, self.root + target)
                return
        raise _os_error(errno.ENOENT, self.root + target)

    def move_over(self, source: str, target: str, must_exist: bool = False) -> None:
        """Rename a file that only we move. must_exist: FileNotFoundError unless target is there."""
        if must_exist:  # last: a person may just have moved it, and the rename would make two
            self.lstat(target)
        try:
            os.replace(self.root + source, self.root + target)
        except FileNotFoundError:
            self._move_again(source, target)

    def remove(self, path: str) -> bool:
        """Remove a file, if that can be done; return whether it was."""
        with suppress(OSError):
            os.unlink(self.root + path)
            return True
        return False

    def commit(self, path: str) -> None:
        """If the queue is durable, sync a task's file, then its directory. That alone is not
        enough: after power loss btrfs showed a finished task in its old directory too."""
        if not self.is_durable:
            return
        with suppress(FileNotFoundError):  # RACE: another process moved it on
            self.sync_file(path)
        self.commit_dir(os.path.dirname(path))

    def sync_file(self, path: str) -> None:
        if self.is_regular(path):
            _sync_path(self.root + path, _READ_FLAGS)

    def commit_dir(self, directory: str) -> None:
        if self.is_durable:
            _sync_dir(self.root + directory)

    def shrink_pending(self, aside: str) -> None:
        """Replace an empty pending/ that was large once: ext4 never shrinks a directory. rename()
        succeeds only on an empty one; a push that comes between finds out in _move_again()."""
        pending = f"{self.root}pending"
        old = os.lstat(pending)
        if old.st_size <= _SHRINK_BYTES:
            return
        if hasattr(os, "listxattr") and any("acl" in name for name in os.listxattr(pending)):
            return  # rights that we don't know how to copy
        fresh = f"{self.root}creating/{aside}.pending"
        # RACE: a push was quicker. Or it can't be replaced (a mount point, a full disk): fine too.
        with suppress(OSError):
            os.mkdir(fresh)
            fd = os.open(fresh, _DIR_FLAGS)  # never by its path: see _follow_owner()
            try:
                os.fchmod(fd, stat.S_IMODE(old.st_mode))
                new = os.fstat(fd)
            finally:
                os.close(fd)
            if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
                os.rename(fresh, pending)
                _sync_dir(self.root)  # else files synced into it later could be lost with it
        with suppress(OSError):
            os.rmdir(fresh)


# ==================================================================================================
# 7. Queue clock: orders and deadlines, by the monotonic clock and an anchor that all processes of
#    one boot share. Invariant: orders of one object strictly increase; setting the date does not
#    change them.
# ==================================================================================================


_BEHIND_NS = 10**9  # by which a clock that began anew is behind, at least


def _compute_anchor(files: _Files) -> int:
    """Return the anchor that starts the clock at the wall clock; if that was set back, after the
    newest id (a name may begin with a due time of next year) and the newest lease's directory."""
    times_ns = [_EARLIEST_NS, _wall_ns()]
    for directory in (*_STATE_DIRS[1:], "keys", *files.node_dirs()):
        # Another user's, which is no reason not to start. Or it is not there (any more).
        with suppress(PermissionError, FileNotFoundError):
            entries = files.entries(directory)
            times_ns += [_stamp_of(entry.id) + 1 for entry in entries]
            if entries and _state_of(directory) == "inflight":  # min(): the date was wrong then
                times_ns.append(min(files.lstat(directory).st_mtime_ns, entries[-1].stamp_ns))
    return max(it for it in times_ns if it < _FARTHEST_NS) - _monotonic_ns()


class _QueueClock:
    """The clock of one queue object. `tag` is the object's own, in the ids that it gives."""

    def __init__(self, files: _Files) -> None:
        self._files, files.clock = files, self
        self.init_worker()
        self.boot, self.anchor_ns = self._open()

    def init_worker(self) -> None:
        """Create what belongs to one process. A forked child does so again."""
        self.tag = f"{int.from_bytes(os.urandom(4), 'big') >> 1:08x}"
        self._lock = threading.RLock()  # of _order; a signal handler may push, too
        self._order = 0

    def now_ns(self) -> int:
        return _monotonic_ns() + self.anchor_ns

    def new_id(self) -> str:
        """Return an id, for a task or for a file in creating/."""
        with self._lock:
            now_ns = int(time.monotonic() * 1e9) + self.anchor_ns
            order_ns = self._order = now_ns if now_ns > self._order else self._order + 1
            return f"0{order_ns}-{self.tag}"

    def next_order(self) -> int:
        return _stamp_of(self.new_id())

    def _open(self) -> tuple[str, int]:
        """Return this boot's tag and its clock's anchor; set the anchor if we are the first."""
        boot_id = _read_boot_id()
        if boot_id is not None:
            boot = _boot_tag(boot_id, self._files.root)
            anchor_ns = self._read(f"clock-{boot}")
            if anchor_ns is not None and self._went_back(anchor_ns):
                _log().warning("clock-%s is of an earlier start of this machine: made anew", boot)
                _unlink_if_exists(f"{self._files.root}clock-{boot}")
                anchor_ns = None
            try:
                return boot, anchor_ns or self._create(f"clock-{boot}")
            except OSError as error:
                if error.errno not in _NO_WRITE_ERRNOS:
                    raise
                # To look, to drain and to purge, a clock of our own is good enough.
                _log().warning("no shared clock for this process: %s", error)
        return os.urandom(4).hex(), _compute_anchor(self._files)

    def _went_back(self, anchor_ns: int) -> bool:
        """Say whether the monotonic clock began anew under the same boot id: a restored virtual
        machine, some containers, a board without entropy. Then the clock is behind the wall clock,
        and behind a task that waits or is leased. A clock that is only behind the wall clock is
        valid: the machine was suspended, or its date was set forward."""
        now_ns = anchor_ns + _monotonic_ns()
        if _wall_ns() - now_ns < _BEHIND_NS:
            return False
        newest_ns = 0
        for directory in ("pending", "scheduled", "keys", *self._files.node_dirs()):
            with suppress(PermissionError, FileNotFoundError):
                orders = [_stamp_of(entry.id) for entry in self._files.entries(directory)]
                newest_ns = max([newest_ns, *(it for it in orders if it < _FARTHEST_NS)])
        return newest_ns > now_ns + _BEHIND_NS

    def _read(self, name: str) -> int | None:
        """Return the anchor; None if there is none, or the file is invalid (it is made again)."""
        anchor_ns = 0
        with suppress(FileNotFoundError):
            text = self._files.text(name)
            anchor_ns = int(text) if re.fullmatch("[0-9]{1,19}\n", text) else 0
        now_ns = anchor_ns + _monotonic_ns()
        return anchor_ns if _EARLIEST_NS <= now_ns < _FARTHEST_NS else None

    def _create(self, name: str) -> int:
        """Write the clock file aside and put it in place, unless a valid one is there. Return the
        anchor that counts."""
        root, anchor_ns = self._files.root, _compute_anchor(self._files)
        aside_name = f"{_new_name(_wall_ns(), self.tag)}.clock"
        # 0644: for all users of this boot, also if data_dir is opened to them only later.
        with self._files.replacement(aside_name, b"%d\n" % anchor_ns, for_all=0o644) as aside:
            try:
                os.link(root + aside, root + name)
            except (AttributeError, OSError):
                # One is there. Or there are no hard links: then two processes that come at once
                # may disagree by the microseconds between them.
                if self._read(name) is None:
                    os.replace(root + aside, root + name)
            self._files.remove(aside)
        return self._read(name) or anchor_ns  # RACE: another process was first


# ==================================================================================================
# 8. Backlog: what this object remembers of pending/: a sorted batch of its names.
#    Invariant: a name in it is of a task's form, and a hint: only the claim tells whether its task
#    still waits.
# ==================================================================================================

_MAX_BATCH = 1 << 17  # names to keep in memory: up to 11 MB of them
_CHUNK = 1 << 16  # directory entries to read between two cuts of the batch
_FEW = 1000  # names that are listed in one piece
_AT_ONCE = 256  # names that the system lists in one call: no push comes meanwhile
_LONGEST_TROUBLE_S = 3600.0  # for which a task that made trouble is passed over
_MAX_TROUBLES = 10_000  # tasks that made trouble, to remember
_LOSSES = 64  # of claims in one pop(), after which it looks at its lease directory
_MAX_LISTINGS = 8  # for one task: by a pop() that loses every claim, by a key whose task moves on
_is_waiting = _FORMS["pending"]


def _oldest_names(directory: str, seen_before: int) -> tuple[list[str], int]:
    """Return the first names of ours in a directory, oldest last, and how many entries it has: all
    names below _MAX_BATCH, a sixteenth of a huge directory."""
    keep = max(_MAX_BATCH, seen_before // 16)
    names: list[str] = []
    seen, youngest = 0, "~"  # behind all of ours
    with os.scandir(directory) as entries:
        while chunk := [entry.name for entry in itertools.islice(entries, _CHUNK)]:
            seen += len(chunk)
            names += [name for name in chunk if name < youngest and _is_waiting(name)]
            if len(names) > 2 * keep:
                names = sorted(names, reverse=True)[-keep:]
                youngest = names[0]
    return sorted(names, reverse=True)[-keep:], seen


class _Backlog:
    """Guarded by the worker's lock."""

    def __init__(self, worker: _Worker) -> None:
        self._pending, self._lock = f"{worker.files.root}pending", worker.lock
        self._clock = worker.clock
        self.names: list[str] = []  # the oldest last
        self.seen = 0  # how many names pending/ had when it was listed last
        # By id, tasks that this worker could not read or move: how often, and until when each is
        # passed over. In memory only: another worker may be luckier.
        self._troubles: dict[str, tuple[int, float]] = {}
        self._listed_s = 0.0
        self.refill_s = 0.0  # when it is to be listed again, though names are left

    def relist(self, now_s: float) -> None:
        """List pending/; now_s: the monotonic clock. RACE: of two tasks that are pushed as it is
        listed, only the younger one may be seen. So what is younger than the listing is left to the
        next one; if nothing else is there, that is now."""
        for _ in range(2):
            self._list(now_s)
            if self.seen <= _AT_ONCE:
                return
            began = f"{int(now_s * 1e9) + self._clock.anchor_ns:020d}"
            if older := [name for name in self.names if name < began]:
                self.names = older
                return
            now_s = time.monotonic()

    def _list(self, now_s: float) -> None:
        if self.seen < _FEW and now_s - self._listed_s < 1:  # it can't be huge by now
            names = os.listdir(self._pending)
            self.names, self.seen = sorted(filter(_is_waiting, names), reverse=True), len(names)
            self.refill_s = now_s + 1
        else:
            self.names, self.seen = _oldest_names(self._pending, self.seen)
            self.refill_s = now_s + max(1, 20 * (time.monotonic() - now_s))
        if self._troubles:
            self.names = [name for name in self.names if not self._is_passed_over(name, now_s)]
        self._listed_s = now_s

    def _is_passed_over(self, name: str, now_s: float) -> bool:
        return self._troubles.get(_id_of(name), (0, 0.0))[1] > now_s

    def pass_over(self, ident: str) -> None:
        """Leave a task that made trouble out of the next listings: the first time not at all, as
        the trouble may be over; then for 1 s, 2 s and so on up to an hour."""
        with self._lock:
            now_s, (times, _) = time.monotonic(), self._troubles.get(ident, (0, 0.0))
            pause_s = min(2.0 ** min(times - 1, 12), _LONGEST_TROUBLE_S) if times else 0.0
            if len(self._troubles) >= _MAX_TROUBLES:
                self._troubles.pop(next(iter(self._troubles)))
            self._troubles[ident] = times + 1, now_s + pause_s

    def add(self, path: str) -> None:
        """A task came to `path` in pending/: it is one of the batch unless it stands behind it."""
        with self._lock:
            names, name = self.names, path.rpartition("/")[2]
            if names and name < names[0]:
                names.insert(bisect.bisect(names, False, key=name.__gt__), name)

    def drop_taken(self, lost: str) -> None:
        """After a lost claim, drop what else of the batch is gone: a look costs a third of a failed
        rename(). RACE: a newer payload renamed a keyed task after the listing; its place is the
        same, so that name is next."""
        with self._lock:
            names, renamed = self.names, _reset_path(lost, None)
            if renamed != lost:
                names.append(renamed.partition("/")[2])
            while names and not _is_keyed(_id_of(names[-1])):
                if os.access(f"{self._pending}/{names[-1]}", os.F_OK):
                    break
                names.pop()


# ==================================================================================================
# 9. Lease directory: this worker's inflight-<node>/, and the shared flock on it that shows that the
#    worker lives. Invariant: a claim goes into the locked directory, by its descriptor.
# ==================================================================================================


class _LeaseDir:
    """Opened by the first listing, and again when it was removed or given up.

    close() in another thread: a claim holds the worker's lock, so that its descriptor stays open.
    What is claimed is in `unread` until the caller gets it: whoever takes it out, the caller or the
    reclaim, has the delivery, which is not counted if that was the reclaim. `closes` counts the
    calls, for waits, which compare it after each look."""

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._files, self._clock = worker, worker.files, worker.clock
        self._lock = worker.lock
        self.directory = f"inflight-{worker.node_id}"
        self._root, self.path = self._files.root, self._files.root + self.directory
        self.unread: dict[str, str] = {}  # by lease, the place that it was claimed from
        # Leases that no worker holds: by path, the place to go back to. None: at that of the push.
        self.orphans: dict[str, str | None] = {}
        self.closes = 0
        self._held: _FileLock | None = None  # None: leases found in it are an earlier process's

    # Opening

    def ensure_open(self) -> None:
        """Open and lock it unless it is held; reclaim the leases that an earlier process left."""
        with self._lock:
            if self._held is None or not self._held.is_at_path():
                self._open()
                if self.orphans:
                    self._worker.house.reclaiming.run()

    def _open(self) -> None:
        self._worker.backlog.names = []  # nothing is claimed until it is open, also when we raise
        for _ in range(_MAX_REPLACED):
            self._make()
            lock = self._files.open_dir(self.directory)
            if lock is None:
                continue  # RACE: an observer saw no worker in it, and removed it
            try:
                # Waits while an observer looks in: it must not be taken for a second worker.
                if lock.acquire_shared() is None:
                    # Without locks only deadlines count: leases are of a boot that no other shares.
                    self._clock.boot = os.urandom(4).hex()
                # Only the first time: later, another thread may have claimed into it just now.
                # RACE: with the exclusive lock no namesake is at work in the directory that we
                # opened; but an observer may have removed that, and a namesake made it anew: then
                # its leases run.
                elif self._held is None and lock.try_exclusive() and lock.is_at_path():
                    with suppress(OSError):  # the next look at leases raises it
                        leases = self._files.entries(self.directory)
                        for path in (it.path for it in leases if it.boot != _DETACHED):
                            self.orphans.setdefault(path)
                lock.acquire_shared()
                # RACE: an observer may have removed the directory before our lock was on it.
                if lock.is_at_path():
                    # With its last reference, the old one goes now, and not sooner: it may come
                    # back, with what we hold in it.
                    self._held = lock
                    return
            finally:  # not with the last reference: a kept exception has this frame, and the lock
                if lock is not self._held:
                    lock.close()
        raise _os_error(_MISSING_ERRNOS[-1], self.path)

    def _make(self) -> None:
        """Make the directory; on a full disk, of the spare one: a worker must be able to start."""
        try:
            self._files.make_dir(self.directory)
        except OSError as error:
            spare = f"{self._root}spare"
            with suppress(OSError):  # the first error says why it was needed
                # Foreign files stay where they are.
                if error.errno in _OUT_OF_SPACE_ERRNOS and not os.listdir(spare):
                    os.utime(spare)  # an observer removes what is empty and old
                    os.rename(spare, self.path)
                    return
            raise

    # Claiming

    def claim(self, source: str, lease: _Lease) -> bool:
        """Rename a waiting task into the directory that we hold locked; `lease` has its path from
        before that. False: another worker was first, or the directory is not open (any more). Call
        it with the worker's lock held; undo_claim() follows if it raises."""
        attempts = min(_attempts_of(source) + 1, _MAX_ATTEMPTS) if "~" in source else 1
        boot = _DETACHED if self._worker.detached else self._clock.boot
        deadline_ns = int(time.monotonic() * 1e9) + self._clock.anchor_ns + lease.length_ns
        name = f"0{deadline_ns}~{attempts}~{boot}~{source[-_ID_LENGTH:]}"
        lease.path = path = f"{self.directory}/{name}"
        self.unread[path] = lease.source = source
        held = self._held
        try:
            if held is None:
                raise FileNotFoundError  # RACE: closed by another thread
            os.rename(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
        except FileNotFoundError:
            pass  # RACE: another worker won; or our directory was removed
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES) and self._may_move(source):
                error.task_id = _id_of(source)  # type: ignore[attr-defined]
            if error.errno not in _MISSING_ERRNOS:
                raise
            self._worker.house.look_again()  # ESTALE: our directory is gone
        else:
            return True
        self.unread.pop(path, None)
        return False

    def _may_move(self, source: str) -> bool:
        """Say whether this user may move tasks from there to here, though not this one: it is
        another user's, in a sticky directory."""
        directories = self._root + os.path.dirname(source), self.path
        return all(os.access(path, os.W_OK | os.X_OK) for path in directories)

    def undo_claim(self, lease: _Lease, target: str) -> None:
        """Move a task that was claimed for nobody to `target`, uncounted; if it can't be moved, the
        reclaim job does it. By the descriptor: a person may have moved the whole directory away,
        where the task must not be lost. CRASH: before it, a lease like any."""
        with self._lock:
            try:
                if (held := self._held) is None:  # closed; if that ended the lease, it is gone
                    os.rename(self._root + lease.path, self._root + target)
                else:
                    name = lease.path.partition("/")[2]
                    os.rename(held.prefix + name, self._root + target, src_dir_fd=held.fd)
            except OSError:  # it had not been claimed yet, or a person has it; or disk trouble
                self.orphans[lease.path] = target
            self.unread.pop(lease.path, None)

    # Closing

    def give_up(self) -> None:
        """Close it. If no other object holds it, its leases end."""
        self._worker.house.look_again()
        lock, self._held = self._held, None
        if lock is not None and lock.fd == -1:  # in a cycle of garbage its finalizer may be first
            lock = self._files.open_dir(self.directory)
        if lock is None:
            return
        with closing(lock):
            try:
                is_alone = lock.try_exclusive()
                if is_alone is None or (is_alone and lock.is_at_path()):
                    if is_alone:
                        self._worker.reclaim_all(self.directory, None)
                    _remove_empty_dir(self.path)
            except OSError as error:  # no lease is lost by it: pop() of another worker ends them
                _log().warning("%s could not be cleared: %s", self.path, error)


# ==================================================================================================
# 10. Worker: the state machine: each change of a task's state, except pushes (6, 14) and purges
#     (11, 12).
#     Invariant: the rename is the commit and the fence; what is written beside it comes after it.
#     The lock is held while a task moves into our lease directory or out of it, so that a renewal
#     and a done() in two threads don't cross; not while a caller's payload is read or written.
#     Order of locks: that of a key first, then the worker's. With the worker's lock held, a key's
#     is only tried (wait=False).
# ==================================================================================================

_LOOK_INTERVAL_S = 0.1  # between two looks at PAUSED, at our lease directory, at a busy key


class _Worker:
    """What one queue object has in one process: its parts, and what they do with tasks."""

    def __init__(self, queue: FemtoQueue, files: _Files, clock: _QueueClock) -> None:
        self.files, self.clock, self.lock = files, clock, threading.RLock()
        self.node_id, self.detached = queue.node_id, queue.detached
        self.max_attempts, self.keep_done = queue.max_attempts, queue.keep_done
        self.length_ns, self.poll_interval_s = queue._length_ns, queue.poll_interval_s
        self.backlog = _Backlog(self)
        lease_dir_class, keys_class, _ = files.parts
        self.lease_dir: _LeaseDir = lease_dir_class(self)
        self.keys: _Keys = keys_class(self)
        self.house = _Housekeeper(self)
        self.waits = _Waits(self)
        self.renewer = _LeaseRenewer(self)

    def note(self, path: str) -> None:
        if path.startswith("pending/"):
            self.backlog.add(path)
        elif path.startswith("scheduled/"):
            self.house.enqueuing.sooner((_stamp_of(path) - _wall_ns()) / 1e9)

    def move_task(self, source: str, target: str, wait: bool = True) -> str:
        """Move a task to another state; "": remove it. Return where it went. wait: as in lock()."""
        if _is_keyed(_id_of(source)):
            return self.keys.move_keyed(source, target, wait)
        return self.files.move(source, target)

    def back_path(self, path: str, attempts: int) -> str:
        return f"pending/{_task_name(self.clock.next_order(), attempts, _id_of(path))}"

    # From in flight, by the holder of the lease

    def move_leased(self, lease: _Lease, target: str, outcome: str = "") -> str:
        """Rename the file of a leased task, by its holder: to where it ends or waits, to a new
        deadline, or to "" (remove it). Return the path that it got. That the lease is there is the
        fence: else LeaseLost. outcome: of the delivery, a field of WorkCounts; "": it goes on."""
        ident = lease.path[-_ID_LENGTH:]
        is_keyed = ident[21] > "7"
        with self.keys.lock_of(ident) if is_keyed else self.lock, self.lock:
            try:
                if is_keyed:
                    gone_to = self.keys.move_keyed(lease.path, target)
                else:
                    gone_to = self.files.move(lease.path, target)
            except FileNotFoundError:
                directory = os.path.dirname(target)
                # A directory that is gone is disk trouble.
                os.stat(self.files.root + (directory if directory in _STATE_DIRS else ""))
                raise self.lease_lost(lease) from None
            lease.outcome = outcome
        if lease.has_checkpoint and _is_end(target):
            self.files.remove(f"checkpoints/{ident}")
        return gone_to

    def lease_lost(self, lease: _Lease) -> LeaseLost:
        """Return the error that says how long ago a lease ended, or why else."""
        late_ns = -self.left_ns(lease.path)
        if late_ns >= 0:
            why = f"its lease ran out {late_ns / 1e9:.3f} s ago; it was taken back, or has ended"
        else:
            why = "it is not leased by this delivery any more: finished, moved, or given up before"
        return LeaseLost(_id_of(lease.path), late_ns >= 0, why)

    def finish(self, task: FemtoTask) -> None:
        """Move a leased task to done/, or remove it."""
        lease = _lease_of(task)
        if self.keep_done:
            gone_to = self.move_leased(lease, f"done/{lease.path[-_ID_LENGTH:]}", "done")
            if self.files.is_durable:
                self.files.commit(gone_to)
            return
        # Sync the lease first: after power loss the task must not be in pending/ again.
        with self.keys.lock_of(lease.path), self.lock:  # no renewal comes between
            with suppress(FileNotFoundError):  # the lease directory is gone: LeaseLost below
                self.files.commit(lease.path)
            self.move_leased(lease, "", "done")
        self.files.commit_dir(os.path.dirname(lease.path))

    def end_failed(self, task: FemtoTask, error: str | BaseException | None) -> None:
        """Move a leased task to failed/ with its reason. The rename comes first, and checks the
        lease: a worker that lost it never writes a reason for another delivery. CRASH: after the
        rename, the task is in failed/ without a reason."""
        lease = _lease_of(task)
        target = f"failed/{_id_of(lease.path)}"
        with nullcontext("") if error is None else self._new_reason(error) as path:
            self.move_leased(lease, target, "failed")
            _unlink_if_exists(f"{self.files.root}{target}.error")  # of a failure retried by hand
            if path:
                self.files.move_over(path, f"{target}.error")
        self.files.commit(target)

    def _new_reason(self, error: str | BaseException) -> AbstractContextManager[str]:
        """Write a text, or an exception with its traceback, aside, to move it: replacement()."""
        if isinstance(error, str):
            text = error
        elif isinstance(error, _CommandFailed):
            text = str(error)
        else:
            import traceback

            text = "".join(traceback.format_exception(error))
        content = (text.removesuffix("\n") + "\n").encode("utf-8", "backslashreplace")
        return self.files.replacement(f"{self.clock.new_id()}.error", content)

    def requeue(self, task: FemtoTask, target: str) -> None:
        gone_to = self.move_leased(_lease_of(task), target, "released")
        self.note(gone_to)
        self.files.commit(gone_to)

    def renew(self, task: FemtoTask, length_ns: int | None = None, wait: bool = True) -> None:
        """Rename a lease to another deadline: length_ns from now; None: its own length, but never
        less than is left. wait: as in lock()."""
        lease = _lease_of(task)
        with self.keys.lock_of(lease.path, wait), self.lock:
            if length_ns is None:
                length_ns = max(lease.length_ns, self.left_ns(lease.path))
            elif id(task) in self.renewer.blocks:  # the next renewal is due only then
                length_ns = max(length_ns, lease.length_ns)
            deadline_ns = self.clock.now_ns() + length_ns
            path = re.sub("/[0-9]{20}", f"/{deadline_ns:020d}", lease.path)
            try:
                lease.path = self.move_leased(lease, path)
            except BaseException:  # Ctrl-C may have come after the rename
                if os.path.lexists(self.files.root + path):
                    lease.path = path
                raise

    def left_ns(self, lease: str) -> int:
        return _stamp_of(lease) - self.clock.now_ns()

    # From in flight, by others

    def reclaim(self, lease: str) -> None:
        """Return a task whose lease is over, orphaned or of a dead worker to its push's place; one
        that its caller has not got yet to where it was, uncounted. What can't be moved is an orphan
        from then on: of our own leases, only that mark ends one."""
        orphans = self.lease_dir.orphans
        orphans[lease] = source = self.lease_dir.unread.pop(lease, None) or orphans.get(lease)
        target = source or _front_path(_id_of(lease), _attempts_of(lease))
        try:
            self.note(self.move_task(lease, target, wait=False))
        except BlockingIOError:
            return  # RACE: another process is at work on its key; next time
        except FileNotFoundError:
            if self.files.exists(lease):  # RACE: else its holder settled it, or another was first
                return  # pending/ is gone just now
        orphans.pop(lease, None)

    def reclaim_all(self, directory: str, boot: str | None) -> None:
        """Reclaim the leases of a directory whose lock we hold; None: whatever their boot."""
        leases = [it for it in self.files.entries(directory) if it.boot != _DETACHED]
        _for_each(self.reclaim, [it.path for it in leases if boot in (None, it.boot)])

    # To failed/, and back

    def quarantine(self, source: str, reason: str) -> None:
        """Make a dead letter of a task that can't be delivered, and say so in the log. If it can't
        be moved, _take_back() does that. A reason that can't be written must not block it."""
        ident = _id_of(source)
        target = f"failed/{ident}"
        is_taken = self.files.exists(target)  # by hand: it stays, and so does its reason
        if is_taken:
            target = self.back_path(source, _attempts_of(source)).replace("pending", "failed")
        try:
            self.move_task(source, target)
        except FileNotFoundError:
            if self.files.exists(source):
                raise
            return  # RACE: another worker took it, or quarantined it first
        with suppress(OSError):  # the log has the reason
            if not is_taken:
                self.files.remove(f"{target}.error")  # of a failure retried by hand
                with self._new_reason(reason) as path:
                    self.files.move_over(path, f"{target}.error")
            self.files.commit(target)
        self.files.remove(f"checkpoints/{ident}")
        _log().error("task %s is in failed/: %s", ident, reason)

    def requeue_failed(self, source: str) -> bool:
        """Put a failed task at the back, its attempts at 0; False if it is not there any more."""
        ident, target = _id_of(source), self.back_path(source, 0)
        try:
            with self.keys.lock_of(ident) as held:
                if held is not None:
                    self.keys.reserve(held, source, target)
                # The reason goes first: after the rename, a new one may be written at any time.
                _unlink_if_exists(f"{self.files.root}failed/{ident}.error")
                self.move_task(source, target)
        except FileNotFoundError:
            os.stat(f"{self.files.root}pending")  # gone: disk trouble
            return False  # RACE: another process retried or removed it
        self.files.commit(target)
        return True

    # From scheduled/

    def enqueue_scheduled(self, source: str) -> None:
        """Move one task that is due to the back of pending/. It is synced: on btrfs, a later push's
        sync of pending/ alone left it in scheduled/ as well."""
        target = self.back_path(source, _attempts_of(source))
        try:
            self.files.commit(self.move_task(source, target, wait=False))
        except FileNotFoundError:
            pass  # RACE: another worker moved it
        except BlockingIOError:  # RACE: another process is at work on its key; soon
            self.house.enqueuing.sooner(_LOOK_INTERVAL_S)

    # From pending/ to in flight

    def take_oldest(self, length_ns: int, in_wait: bool = False) -> FemtoTask | None:
        """Run the jobs that are due, and lease the oldest task. None: no task waits, the queue is
        paused, or other workers won all claims of _MAX_LISTINGS listings. Raises the OSError of a
        job if no task waits. in_wait: the wait is to accept the task."""
        backlog, listings, losses = self.backlog, 0, 0
        while True:
            if time.monotonic() >= self.house.wake_s:
                self.house.run_due()
            lease, waiting, is_claimed = _Lease(), "", False
            lease.length_ns = length_ns
            try:
                with self.lock:
                    if backlog.names:
                        waiting = f"pending/{backlog.names.pop()}"
                        is_claimed = self.lease_dir.claim(waiting, lease)
                task = self._deliver(waiting, lease) if is_claimed else None
                if task is not None:
                    if in_wait or self.lease_dir.unread.pop(lease.path, ""):
                        return task
                    return self.waits.accept(task)
            except BaseException as error:
                self._take_back(lease, waiting, error)
                raise
            if not waiting:
                if listings:  # all claims were lost: to other workers, or our directory is gone
                    self.house.look_again()
                listings += 1
                if listings > _MAX_LISTINGS or not self.house.refill():
                    return None
            elif not is_claimed:
                losses += 1
                if losses % _LOSSES == 0:
                    self.lease_dir.ensure_open()
                backlog.drop_taken(waiting)

    def take_named(self, key: str, ident: str, length_ns: int, wait: bool) -> FemtoTask | None:
        """Run the jobs that are due, and lease the task of an encoded key, or ("") of an id, if it
        waits. wait=False: None if another process, which may be stopped, holds the key's lock."""
        if time.monotonic() >= self.house.wake_s:
            self.house.run_due()
        if (key and not self.keys.may_have_task(key)) or self.files.exists("PAUSED"):
            return None
        for number in range(_MAX_LISTINGS):
            if number:  # our directory may be gone, or is not open yet
                self.lease_dir.ensure_open()
            lease, path = _Lease(), ""
            lease.length_ns = length_ns
            try:
                with self.keys.lock_of(ident or _new_name(0, _key_tag(key)), wait) as held:
                    path = self._path_to_take(held, key, ident)
                    with self.lock:
                        is_claimed = path != "" and self.lease_dir.claim(path, lease)
                    task = self._deliver(path, lease) if is_claimed else None
                if task is not None or not path:
                    return task  # RACE: else a pop() was quicker, and we see it in flight now
            except BaseException as error:
                self._take_back(lease, path, error)
                if not isinstance(error, BlockingIOError):
                    raise
                # A push came to pending/, and has the lock yet: its end is no event.
                self.house.wake_s = min(self.house.wake_s, time.monotonic() + 0.01)
                return None
        return None

    def _path_to_take(self, held: Any, key: str, ident: str) -> str:
        """Return where the task of a key or an id is to be had, "" if it is not."""
        if ident:
            entry = self.files.find_id(ident, "scheduled", "pending")
            return entry.path if entry else ""
        path, _ = self.keys.find_task(held, key)
        is_later = path.startswith("scheduled/") and _stamp_of(path) > _due_ns()
        return "" if is_later or path.startswith("inflight-") else path

    def _deliver(self, waiting: str, lease: _Lease) -> FemtoTask | None:
        """Read a claimed task, unless it has had its attempts (_Processing looks at that, too); it
        is in `unread` yet. None: it is gone (undo the claim), a dead letter now, or waits again.
        CRASH: it is in flight, and counted, until a reclaim()."""
        path = lease.path
        ident = path[-_ID_LENGTH:]
        before = _attempts_of(waiting) if "~" in waiting else 0
        data = None
        try:
            if self.max_attempts is not None and before >= self.max_attempts:
                why = f"delivered {before} times without done() or fail(): max_attempts reached"
                raise CorruptTask(ident, why)  # it goes where a corrupt one does
            data, key = self.files.read(path, ident)
            payload = data if key is None else self.keys.claimed(path, key, data, waiting)
        except CorruptTask as error:
            payload = None
            self.quarantine(path, error.reason)
        except FileNotFoundError:
            self.house.look_again()
            self.lease_dir.undo_claim(lease, waiting)
            return None
        except (OSError, MemoryError) as error:
            if data is None:
                self._blame(ident, error)
            raise
        if payload is None:
            self.lease_dir.unread.pop(path, None)
            return None
        task = FemtoTask(ident, payload, before + 1, key, lease, self.clock.anchor_ns)
        if "~" in waiting:  # it may have been delivered before
            task.checkpoint = _read_checkpoint(self, ident, payload)
            lease.has_checkpoint = task.checkpoint is not None
        return task

    def _blame(self, ident: str, error: OSError | MemoryError) -> None:
        """Note in the error of a read that it is the task's own: the file may not be read, or does
        not fit into memory. The error's attribute task_id has the id then."""
        code = getattr(error, "errno", errno.EFBIG)  # None: raised by a signal handler
        if code not in (None, errno.EINTR, *_MISSING_ERRNOS, *_TRANSIENT_ERRNOS):
            error.task_id = ident  # type: ignore[union-attr]

    def _take_back(self, lease: _Lease, waiting: str, error: BaseException) -> None:
        """Undo a claim that was interrupted: the task returns to its place, uncounted.

        A task that made trouble itself (task_id) goes to the back instead, counted, or with
        max_attempts reached to failed/: it must not block the tasks behind it. If it could not even
        be moved, it stays, and this worker passes it over. A task of which something else could not
        be read, such as the state of its key, goes to the back, uncounted.
        """
        place = waiting if lease.path else ""
        code = getattr(error, "errno", None)  # None: raised by a signal handler
        if place and hasattr(error, "task_id"):
            self.backlog.pass_over(_id_of(place))
            with suppress(OSError):
                if not self.files.exists(lease.path):  # it was not claimed, or close() ended that
                    self.lease_dir.unread.pop(lease.path, None)
                    return
                if self._set_aside(lease, error):
                    return
            if place.startswith("pending/"):
                place = self.back_path(place, _attempts_of(lease.path))
        elif code not in (None, *_TRANSIENT_ERRNOS) and place.startswith("pending/"):
            place = self.back_path(place, _attempts_of(place))
        if place:
            self.lease_dir.undo_claim(lease, place)
        if not hasattr(error, "task_id"):
            self.note(place)

    def _set_aside(self, lease: _Lease, error: BaseException) -> bool:
        """Make a dead letter of a leased task that can't be read, if it has had its attempts.
        Return whether it had."""
        attempts = _attempts_of(lease.path)
        if self.max_attempts is None or attempts < self.max_attempts:
            return False
        why = str(error) or type(error).__name__
        self.quarantine(lease.path, f"it could not be read, at attempt {attempts}: {why}")
        self.lease_dir.unread.pop(lease.path, None)
        return True


# ==================================================================================================
# 11. Housekeeping: the periodic jobs of pop(): list pending/, enqueue due tasks, reclaim leases of
#     late and dead workers, repair keys, purge done/, remove stale files. Only pop(), take() and
#     what waits through them run jobs: where nobody does, nothing is taken back.
#     Invariant: an OSError of a job never stops deliveries; pop() raises it when no task waits.
# ==================================================================================================

_BASE_INTERVAL_S = 0.4  # between two looks for due tasks and dead workers
_REPAIR_INTERVAL_S = 600.0
_LONGEST_PAUSE_S = 20.0
_STEP_S = 0.01  # by which the wall clock moved against the monotonic one if somebody set it
_LEFTOVER_NS = 3600 * 10**9
_IDLE_NS = 60 * 10**9
_PURGE_SLICE_S = 0.02  # for which done/ is purged at a time


class _Job:
    """A job that pop() repeats: every_s seconds apart, or 20 times its last duration if that is
    longer (at most _LONGEST_PAUSE_S). What comes sooner (a due time, the end of a lease) pulls its
    next time forward. `error`: with which it ended last."""

    # When it is to run next, and sooner, for a reason; all times are of the monotonic clock.
    _next_s = _sooner_s = 0.0
    rested_s = 0.0  # when it may, if there is a reason to
    error: OSError | None = None

    def __init__(self, house: _Housekeeper, run: Callable[[], None], every_s: float) -> None:
        self._house, self._run, self.every_s = house, run, every_s

    @property
    def at_s(self) -> float:
        return min(self._next_s, self._sooner_s)

    def sooner(self, seconds: float) -> None:
        """Run within so many seconds: there is a reason to."""
        self._sooner_s = min(self._sooner_s, time.monotonic() + seconds)
        self._house.wake_s = min(self._house.wake_s, self._sooner_s)

    def reset(self) -> None:
        self._next_s = self._sooner_s = self.rested_s = 0.0

    def run(self) -> None:
        """Run it now, set its next time, and keep its OSError."""
        started_s, self.error = time.monotonic(), None
        self._next_s = started_s + _BASE_INTERVAL_S  # if Ctrl-C ends it
        self._sooner_s = float("inf")  # RACE: who calls sooner() from now on is heard next time
        try:
            self._run()
        except OSError as error:
            _raise_if_foreign(error)
            self.error = error
        ended_s = time.monotonic()
        # It may only have hung once.
        self.rested_s = ended_s + min(20 * (ended_s - started_s), _LONGEST_PAUSE_S)
        # A failed job waits too: it must not run at each pop().
        self._next_s = max(ended_s + self.every_s, self.rested_s)


class _Housekeeper:
    """The worker's lock is held while a job runs."""

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock, self._backlog = worker.files, worker.clock, worker.backlog
        self._lease_dir, self._worker = worker.lease_dir, worker
        self._lock = worker.lock
        self._due_seen_ns = 0  # st_mtime of scheduled/ when it was listed last
        self._done_scan: Any = None  # an os.scandir() of done/ that is being purged
        self.wake_s = 0.0  # when a job is to run next
        # The wall clock less the monotonic one, when both were read last.
        self._date_s = time.time() - time.monotonic()
        self._looked_s = self._look_s = 0.0  # when PAUSED was looked at, and is next
        reclaim_s = min(_BASE_INTERVAL_S, worker.length_ns / 4e9)
        self.enqueuing = _Job(self, self._enqueue_due, _BASE_INTERVAL_S)
        self.reclaiming = _Job(self, self.reclaim_ended, reclaim_s)
        self.repairing = _Job(self, worker.keys.repair, _REPAIR_INTERVAL_S)
        self._purging = _Job(self, self._purge_done, _BASE_INTERVAL_S)
        sweeping = _Job(self, self.remove_stale_files, _REPAIR_INTERVAL_S)
        self._jobs = [self.enqueuing, self.reclaiming, self.repairing, sweeping]
        if not isinstance(worker.keep_done, bool):
            self._jobs.append(self._purging)

    # What runs when

    def run_due(self) -> None:
        """Run the jobs that are due, unless another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for job in self._jobs:
                # What is nearly due too: a waiting worker is woken once for all of them.
                if job.at_s <= time.monotonic() + _BASE_INTERVAL_S / 5:
                    job.run()
            if time.monotonic() >= self._backlog.refill_s or self._files.exists("PAUSED"):
                self._list_pending()
            self.wake_s = min(self._backlog.refill_s, *(job.at_s for job in self._jobs))
        finally:
            self._lock.release()

    def refill(self) -> bool:
        """When the batch is used up, list pending/, then look for what else there is to deliver.
        False: there is nothing. Raises the OSError of a job then."""
        with self._lock:
            if not self._backlog.names:  # else another thread did
                self._list_pending()
            if self._backlog.names:
                return True
            jobs = [job for job in self._jobs if job.error is not None]
            # Whether a task came to scheduled/, or left it, since it was listed.
            is_changed = self._scheduled_mtime_ns() != self._due_seen_ns
            is_changed = is_changed and time.monotonic() >= self.enqueuing.rested_s
            if self._date_was_set() or is_changed:
                jobs.append(self.enqueuing)
            for job in jobs:
                job.run()
                if job.error is not None:
                    raise job.error
            return bool(jobs)  # what they moved is to be listed

    def _date_was_set(self) -> bool:
        """Say whether the wall clock was set since the last call: other tasks may be due now."""
        before_s, self._date_s = self._date_s, time.time() - time.monotonic()
        return abs(self._date_s - before_s) > _STEP_S

    def _scheduled_mtime_ns(self) -> int:
        return os.stat(f"{self._files.root}scheduled").st_mtime_ns

    def _list_pending(self) -> None:
        """List the oldest names, unless the queue is paused. PAUSED and our lease directory are
        looked at each _LOOK_INTERVAL_S: each pop() of an almost empty queue comes here."""
        now_s, is_paused = time.monotonic(), False
        if not self._looked_s <= now_s < self._look_s:
            if now_s < self._looked_s:  # a program replaced the clock by one that is behind
                self._begin_anew()
            self._lease_dir.ensure_open()
            is_paused = self._files.exists("PAUSED")
            if not self._backlog.seen:
                self._files.shrink_pending(self._clock.new_id())
            self._looked_s = now_s
            if not is_paused:  # else it is looked at each time
                self._look_s = now_s + _LOOK_INTERVAL_S
        if is_paused:
            self._backlog.names = []
            self._backlog.refill_s = now_s + 1
        else:
            self._backlog.relist(now_s)

    def _begin_anew(self) -> None:
        """Run all jobs now: the times that they wait for are far ahead of the clock."""
        for job in self._jobs:
            job.reset()
            job.run()

    def look_again(self) -> None:
        """Have the next pop() look at PAUSED and at our lease directory before it takes a task."""
        with self._lock:
            self._backlog.names = []
            self._look_s = 0.0

    def end_scan(self) -> None:
        scan, self._done_scan = self._done_scan, None
        if scan is not None:
            scan.close()

    # The jobs

    def _enqueue_due(self) -> None:
        """Move what is due to the back of pending/, in the order in which it came due; of very many
        a part, as no lease of ours is renewed meanwhile."""
        now_ns = _due_ns()
        self._due_seen_ns = self._scheduled_mtime_ns()
        due = []
        for name in filter(_FORMS["scheduled"], sorted(self._files.names("scheduled"))):
            due_ns = _stamp_of(name)
            if due_ns > now_ns:
                self.enqueuing.sooner((due_ns - now_ns) / 1e9)
                break
            due.append(f"scheduled/{name}")
        end_s = time.monotonic() + _BASE_INTERVAL_S
        try:
            in_time = itertools.takewhile(lambda _: time.monotonic() < end_s, due)
            _for_each(self._worker.enqueue_scheduled, in_time)
        finally:
            if due and time.monotonic() >= end_s:
                self.enqueuing.sooner(0)

    def reclaim_ended(self) -> None:
        """Reclaim leases that are past their deadline or held by dead workers."""
        with self._lock:  # check(repair=True) calls this too
            try:
                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
            finally:
                _for_each(self._reclaim_from, self._files.node_dirs())

    def _reclaim_from(self, directory: str) -> None:
        """Reclaim the ended leases of one worker, and all of them if it is dead."""
        now_ns, leases = self._clock.now_ns(), self._files.entries(directory)
        ended, running = [], []
        for entry in leases:
            if entry.stamp_ns > now_ns:
                running.append(entry.stamp_ns)
            elif not self._renewed_recently(entry):
                ended.append(entry.path)
        if running:
            self.reclaiming.sooner((running[0] - now_ns) / 1e9)
        has_ours = any(entry.boot == self._clock.boot for entry in leases)
        try:
            _for_each(self._worker.reclaim, ended)
        finally:
            if directory != self._lease_dir.directory and (has_ours or not running):
                self._reclaim_dead_worker(directory, has_ours)

    def _renewed_recently(self, entry: _Entry) -> bool:
        """Whether another host's lease was taken or renewed less than our own lease length ago,
        though its deadline has passed by our clock: queue clocks of hosts drift apart (a suspend,
        an NTP step after the boot). Wall clocks agree, and rename() sets st_ctime. If that is in
        the future, the lease is of this boot, or it is detached, the deadline counts."""
        length_ns = self._worker.length_ns
        if length_ns < _FOREVER_NS and entry.boot not in (self._clock.boot, _DETACHED):
            with suppress(FileNotFoundError):  # RACE: settled or reclaimed meanwhile
                renewed_ns = self._files.lstat(entry.path).st_ctime_ns
                return 0 <= _wall_ns() - renewed_ns < length_ns
        return False

    def _reclaim_dead_worker(self, directory: str, has_ours: bool) -> None:
        """Reclaim a dead worker's leases and remove its directory; leave a living one alone. RACE:
        where flock on a directory is a mount's own affair (FUSE), another host's idle worker looks
        dead, and would make its directory again each second: so one without leases of this boot is
        removed only when it is a minute old."""
        lock = self._files.open_dir(directory)
        if lock is None:
            return
        with closing(lock):
            if lock.try_exclusive() and lock.is_at_path():
                self._worker.reclaim_all(directory, self._clock.boot)
                if time.monotonic() >= self.repairing.rested_s:  # a foreign file may keep it here
                    self.repairing.sooner(0)  # it may have died before it promoted a payload
                if has_ours or not 0 <= _wall_ns() - os.fstat(lock.fd).st_mtime_ns < _IDLE_NS:
                    # Not with another boot's leases, foreign files.
                    _remove_empty_dir(self._files.root + directory)

    def node_stats(self, directory: str) -> NodeStats:
        """Count the leases of one worker, and say whether it lives."""
        leases, now_ns, is_free = self._files.entries(directory), self._clock.now_ns(), None
        lock = self._files.open_dir(directory)
        if lock is not None:
            with closing(lock):
                is_free = lock.try_exclusive()
        liveness = "alive" if is_free is False else "unknown"
        if is_free and any(entry.boot == self._clock.boot for entry in leases):
            liveness = "dead"
        expired = sum(entry.stamp_ns <= now_ns for entry in leases)
        node = directory.removeprefix("inflight-")
        return NodeStats(node, len(leases), expired, liveness)

    def _purge_done(self) -> None:
        """Delete what was done more than keep_done seconds ago: of its listing, the next slice."""
        keep_s, began_s = self._worker.keep_done, time.monotonic()
        end_s, before_s = began_s + _PURGE_SLICE_S, time.time() - keep_s
        if self._done_scan is None:
            self._done_scan = os.scandir(f"{self._files.root}done")
        was_old = False
        for entry in self._done_scan:
            if _FORMS["done"](entry.name):
                was_old |= _unlink_if_older(entry.path, before_s)
            if time.monotonic() >= end_s:
                # If it was, more may come than a slice every _BASE_INTERVAL_S can take.
                took_s = time.monotonic() - began_s
                self._purging.sooner(5 * took_s if was_old else _BASE_INTERVAL_S)
                return
        self.end_scan()
        self._purging.every_s = min(max(_BASE_INTERVAL_S, keep_s / 10), 600.0)

    def remove_stale_files(self) -> None:
        """Remove what a killed process left: it was never acknowledged."""
        before_s = time.time() - _LEFTOVER_NS / 1e9
        for path in self.stale_files():
            if path.endswith(".pending"):
                _remove_empty_dir(self._files.root + path)
            else:  # any other directory is foreign, whatever its name
                _unlink_if_older(self._files.root + path, before_s)

    def stale_files(self) -> list[str]:
        """Return the files in creating/ that are an hour old, and checkpoints, an hour old, whose
        task is gone: its worker was killed between the two, or a person ended it. In creating/ the
        names must be as old, too: wall clocks can be set, queue clocks of hosts drift apart."""
        old = {it.id for it in self._files.entries("checkpoints") if self._is_stale(it)}
        for _ in range(2 if old else 0):  # while we look, tasks move both ways
            old -= {it.id for it in self._files.find(*_LIVE)}
        before_ns = self._clock.now_ns() - _LEFTOVER_NS
        aside = self._files.entries("creating")
        creating = [it.path for it in aside if it.stamp_ns < before_ns and self._is_stale(it)]
        return creating + [f"checkpoints/{ident}" for ident in sorted(old)]

    def _is_stale(self, entry: _Entry) -> bool:
        with suppress(FileNotFoundError):  # RACE: its push, or its task, has just ended
            return self._files.lstat(entry.path).st_ctime_ns < _wall_ns() - _LEFTOVER_NS
        return False


# ==================================================================================================
# 12. FemtoQueue: the public face. Its methods stand in the order of a task's life.
#     Invariant: a method checks its arguments before it changes anything. Room 10 says which locks
#     are held, and in what order they are taken.
# ==================================================================================================


class FemtoQueue:
    """A queue in the directory `data_dir`. Each object is one worker of the queue.

    data_dir:  the directory. It is made with mode 0700 if it is missing.
    node_id:  the name of this worker: 1 to 100 of the characters A-Z a-z 0-9 . _ -. None: a new
        name. A worker that restarts under an old name takes back, at the first pop(), the tasks of
        the earlier process. Where there is no flock(2), a restart takes nothing back. Living
        objects may share a name, and do not take each other's leases. If a process is killed while
        others live under its name, the leases of that process end at their deadlines, or with the
        last object of that name.
    timeout_stale_ms:  the length of the lease (visibility timeout) that pop() takes, in
        milliseconds. None: the lease lasts as long as its worker lives. After a reboot such a lease
        ends only when a worker starts under the same node_id. A person can end the lease, too, by
        the command `release` or by moving the file. Where there is no flock(2), only a person can
        end such a lease.
    sync_after_write:  True: the effect of a call that returned survives power loss, by fsync(2).
        This holds for push, push_many, schedule, done, fail, release, retry, retry_failed and
        checkpoint. False: the effect survives the death of processes, but not power loss.
    max_attempts:  after this number of deliveries without done() or fail(), the task goes to
        failed/. From 1 to 999,999. None: no limit.
    keep_done:  True: done() keeps the task in done/. False: done() deletes the task. A number:
        pop() deletes tasks from done/ after that many seconds, a few at a time.
    retry_delay_s:  the seconds that processing() and work() wait before the second attempt of a
        task. The pause doubles before each further attempt, up to an hour. A random part of up to
        half is subtracted.
    poll_interval_s:  the longest pause, in seconds, between two looks at the directories in a call
        that waits. The pause matters only where inotify(7) does not report all changes: not on
        Linux, or on a file system that other hosts write to.
    detached:  True: the leases outlive this object and its process. Only the deadlines end the
        leases, and attach() finds the tasks again. False: a lease also ends with its worker.

    These settings are fixed: assigning to one raises AttributeError.

    Raises TypeError or ValueError if an argument is invalid, and OSError if a directory of the
    queue can't be made or read.

    The order of tasks and the deadlines of leases follow the queue clock. The queue clock is the
    monotonic clock plus an anchor that all processes of one boot share. Setting the date therefore
    does not move the queue clock. Where there is no boot id (not on Linux), each process sets its
    own anchor: to the wall clock, or to the newest task if that is later.

    Threads may share an object. A forked child's copy of the object is another worker. An unpickled
    object is made anew from the settings. A signal handler may call push() and schedule(), without
    a key, and no other method. For anything else, let the handler set a flag, or the Event that was
    passed as work(stop=...).
    """

    node_id: str

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
        path = _check_dir("data_dir", data_dir)
        self._given_node_id = _check_node_id(node_id)
        self._length_ns = _lease_length_ns("timeout_stale_ms", timeout_stale_ms, _FOREVER_NS)
        _not_negative("retry_delay_s", retry_delay_s)
        _positive("poll_interval_s", poll_interval_s)
        if not isinstance(keep_done, bool):
            _not_negative("keep_done", keep_done)
        _check_max_attempts(max_attempts)
        self.data_dir = data_dir
        self.timeout_stale_ms = timeout_stale_ms
        self.sync_after_write = bool(sync_after_write)
        self.max_attempts = max_attempts
        self.keep_done = keep_done
        self.retry_delay_s = retry_delay_s
        self.poll_interval_s = poll_interval_s
        self.detached = bool(detached)
        self._files = _open_files(path, self.sync_after_write)
        self._files.make_dirs()
        self._clock = _QueueClock(self._files)
        self._init_worker()
        _fork_hooks[self] = FemtoQueue._after_fork

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS and name in self.__dict__:
            raise AttributeError(f"{name} is fixed when the object is made; make another object")
        object.__setattr__(self, name, value)

    def _init_worker(self) -> None:
        # Bypass __setattr__(): a forked child gets a node_id of its own.
        self.__dict__["node_id"] = self._given_node_id or f"{os.getpid()}-{self._clock.tag}"
        self._worker = _Worker(self, self._files, self._clock)

    def _after_fork(self) -> None:
        self._worker.house.end_scan()
        self._clock.init_worker()
        self._init_worker()

    # Producing

    def push(
        self, data: _BytesLike, *, key: str | None = None, if_in_flight: str = "buffer"
    ) -> str:
        """Add a task to the back of the queue and return the id of the task.

        A task with a key follows other rules. At most one task of a key waits in the queue. If
        there is such a task, `data` replaces its payload. The task keeps its place or its due time.
        The id of that task is returned. The task counts as never attempted, and its checkpoint is
        removed. If a worker has leased the task of the key, `if_in_flight` says what happens. If
        the key has no task, push() adds one.

        data:  the payload: bytes, bytearray or memoryview.
        key:  a text of 1 to 200 bytes in UTF-8. None: a task without a key.
        if_in_flight:  what to do if the task of the key is leased. Only with a key.
            "buffer": `data` waits in keys/, and a later push replaces it there. When the delivery
                ends, `data` becomes a task with an id of its own, which is returned. If the leased
                task comes back instead, its next delivery carries `data`, as a first attempt.
            "update": `data` replaces the payload of the leased task. The running delivery keeps the
                old payload, and only a later delivery carries `data`. The id of the leased task is
                returned. done() ends the task together with `data`. If a payload already waits
                behind the task, `data` replaces that payload instead.
            "reject": raise KeyInFlight.

        Raises TypeError if `data` is not bytes-like, if `key` is not a str, or if `if_in_flight` is
        given without a key. Raises ValueError if the key is too long or empty, or if `if_in_flight`
        is not one of the three. Raises KeyInFlight for "reject". Raises the OSError of the system
        call if the disk did not take the task. With a key, also raises OSError where there is no
        flock(2).

        If push() raises, `data` is not in the queue. There are two exceptions: a worker took the
        task before its sync failed, or the last paragraph below applies.

        On disk: when push() returns, the file of the task is in pending/, or a buffered payload is
        in keys/. The file is written in creating/, and then moved by rename(2). A rename is atomic
        (POSIX): no worker sees half a task. With sync_after_write, fsync(2) of the file and of the
        directory follows.

        A payload is replaced by renameat2(2) with RENAME_EXCHANGE. Names can't be exchanged on NFS,
        on FUSE, and where the system is not Linux. There, the new payload of a task in pending/
        waits in keys/, and the claim of the task takes the payload along. Other payloads are
        replaced by rename(2). A push that raised because only its sync failed may then have
        replaced the payload.
        """
        if key is not None or if_in_flight != "buffer":
            return self._push_keyed(data, key, if_in_flight, None)
        ident = self._clock.new_id()
        self._files.publish(ident, data, f"pending/{ident}")
        return ident

    def push_many(self, iterable: Iterable[_BytesLike]) -> list[str]:
        """Add tasks to the back of the queue, in order, and return their ids as a list.

        The tasks appear one by one: a worker may take the first task before the last is pushed.

        iterable:  the payloads, each bytes, bytearray or memoryview. The tasks have no keys.

        Raises TypeError if `iterable` is a single payload, or if one of the payloads is not
        bytes-like. Raises OSError if the disk did not take a task, and any exception that
        `iterable` raises. The tasks before the error are in the queue. The attribute `pushed_ids`
        of the exception has their ids, and the message of an OSError says how many they are. If the
        sync failed, the tasks are removed again: then `pushed_ids` has the ids of the tasks that
        could not be removed, because a worker took them before.

        On disk: when push_many() returns, the files of the tasks are in pending/. With
        sync_after_write, one syncfs(2) makes the whole batch durable. Where syncfs(2) can't be
        relied on (FUSE, or not Linux), each file is synced by fsync(2), and then pending/ once.
        """
        if isinstance(iterable, (_BytesLike, str)):
            raise TypeError("push_many takes an iterable of payloads; for one payload use push")
        ids: list[str] = []
        pending, is_synced = f"{self._files.root}pending", False
        try:
            sync, each = _batch_sync(pending) if self.sync_after_write else (_no_op, False)
            try:
                for data in iterable:
                    ident = self._clock.new_id()
                    self._files.publish(ident, data, f"pending/{ident}", sync=each)
                    ids.append(ident)
            finally:
                sync()
                is_synced = True
        except BaseException as error:
            if not is_synced:
                ids = [it for it in ids if not self._files.remove(f"pending/{it}")]
            if isinstance(error, OSError) and error.strerror:
                error.strerror = f"{error.strerror} ({len(ids)} tasks of the batch were pushed)"
            with suppress(Exception):  # a class of the caller's may refuse the attribute
                error.pushed_ids = ids  # type: ignore[attr-defined]
            raise
        return ids

    def schedule(
        self,
        data: _BytesLike,
        time_us: float,
        *,
        key: str | None = None,
        if_in_flight: str = "buffer",
    ) -> str:
        """Add a task that joins the queue at a given time, and return the id of the task.

        At that time the task goes to the back of the queue.

        data:  the payload, as in push().
        time_us:  the due time by the wall clock, in microseconds since the epoch: time.time() *
            1e6. If the time is past, the task is due at once.
        key:  as in push(). If a task of the key waits, due or not, the task gets the new time
            together with the new payload.
        if_in_flight:  as in push(). A payload that is buffered waits for its time, too. A payload
            that updates the leased task itself ("update") has no due time: time_us is ignored.

        Raises ValueError if the time is not before the year 2255, and any error that push() raises.

        On disk: when schedule() returns, the file of the task is in scheduled/, under a name that
        begins with the due time. After that time, the next pop() of any worker moves the task to
        pending/, by rename(2).
        """
        due_ns = max(0, int(_finite("time_us", time_us) * 1000))
        if due_ns >= _NEVER_NS:
            raise ValueError(f"time_us must be before the year 2255, not {time_us!r}")
        if key is not None or if_in_flight != "buffer":
            return self._push_keyed(data, key, if_in_flight, due_ns)
        ident = self._clock.new_id()
        path = f"scheduled/{_task_name(due_ns, 0, ident)}"
        self._files.publish(ident, data, path)
        self._worker.note(path)
        return ident

    def _push_keyed(
        self, data: _BytesLike, key: str | None, if_in_flight: str, due_ns: int | None
    ) -> str:
        """Check the arguments, and repeat put() until no pop() or person is quicker at the waiting
        task."""
        if if_in_flight not in _IF_IN_FLIGHT:
            wanted = " or ".join(_IF_IN_FLIGHT)
            raise ValueError(f"if_in_flight must be {wanted}, not {if_in_flight!r}")
        name, payload = _encode_key(key), _as_bytes(data)
        # RACE: another worker's pop() claims the waiting task before put() replaces the payload, or
        # a person moves the file. Then "" is returned, and the next round finds the task where it
        # is now: in flight, for example.
        while True:
            if ident := self._worker.keys.put(name, payload, if_in_flight, due_ns):
                return ident

    # Consuming

    def pop(self, timeout: float | None = 0, *, lease_ms: float | None = None) -> FemtoTask | None:
        """Lease the oldest task and return the task, or return None if there is no task to deliver.

        The worker holds the lease until it calls done(), fail() or release(), or until the lease
        ends. After the lease has ended, another worker may deliver the task again. A corrupt task
        is moved to failed/, logged and passed over.

        timeout:  the seconds to wait for a task. 0: do not wait. None: wait without a limit. During
            the wait, signal handlers run at once.
        lease_ms:  the length of this lease, in milliseconds. extend() and processing() renew the
            lease for the same length. None: timeout_stale_ms.

        Returns None if no task came in time, the queue is paused, or close() was called in another
        thread. With timeout=0, pop() also returns None if other workers won every claim.

        Raises ValueError or TypeError if an argument is invalid. Raises the OSError of the system
        call if there is trouble with the disk. If the trouble is with scheduled/, creating/ or the
        directories of other workers, the error is raised only when no task waits.

        If the trouble is with one task, the attribute `task_id` of the OSError or MemoryError has
        the id of the task. This happens if this user may not read or move the file, or if the
        payload does not fit into memory. The next pop(), in this process or another, takes the next
        task. A task that can't be read goes to the back of the queue. The attempts of the task
        count this delivery, so that max_attempts ends the task in failed/. A task that can't be
        moved stays in its place. If the same task makes trouble again, this object passes the task
        over for a pause that grows from a second to an hour.

        A wait ends when inotify(7) reports a task, or else at the next look, at most
        poll_interval_s later. A wait also ends when a task comes due, when a lease ends, and within
        half a second after a worker died.

        On disk: when pop() returns, the file of the task is in inflight-<node>/. Its name begins
        with the deadline. If several workers call rename(2) for the same file, one succeeds and the
        others get ENOENT (POSIX). The rename is not synced: after power loss the task may wait in
        its old place.
        """
        if timeout == 0 and lease_ms is None:
            return self._worker.take_oldest(self._length_ns)
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        return self._worker.waits.wait_for(
            lambda: self._worker.take_oldest(length_ns, True), _end_s(timeout)
        )

    async def pop_async(
        self, timeout: float | None = None, *, lease_ms: float | None = None
    ) -> FemtoTask | None:
        """Do what pop() does, without blocking the event loop.

        timeout, lease_ms:  as in pop(), but the default timeout is None: wait without a limit.

        Coroutines that wait on the same queue object get tasks in the order of their calls.

        Cancelling the call leaves no task leased. A task that was just taken returns to its place,
        and the delivery is not counted.
        """
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        return await self._worker.waits.wait_for_async(
            lambda: self._worker.take_oldest(length_ns, True), _end_s(timeout), ""
        )

    def take(
        self,
        key: str | None = None,
        timeout: float | None = 0,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Lease the task of a key, or the task with an id, out of turn, and return the task.

        key:  the key of the task. None is returned if the key has no task, or if the task is in
            flight or not yet due, or if the queue is paused. The cost does not depend on the number
            of waiting tasks (on file systems that other hosts write to, it does). But take() also
            runs the housekeeping jobs of pop().
        timeout:  the seconds to wait for the task, as in pop().
        id:  the id of the task. The task may be in pending/ or in scheduled/, due or not; else None
            is returned. done() then cancels the task. If the task comes back instead, it is due at
            once.
        lease_ms:  the length of the lease in milliseconds, as in pop().

        Raises TypeError unless either `key` or `id` is given. Raises ValueError if the key or the
        id is invalid, and any error that pop() raises.

        On disk: as after pop().
        """
        look = self._finder_of(key, id, lease_ms, wait=True)
        return self._worker.waits.wait_for(look, _end_s(timeout))

    async def take_async(
        self,
        key: str | None = None,
        timeout: float | None = None,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Do what take() does, without blocking the event loop.

        The parameters are as in take(), but the default timeout is None: wait without a limit. The
        order of coroutines and the effect of cancelling are as in pop_async(). Only the coroutines
        that wait for the same key or id stand in one line.
        """
        look = self._finder_of(key, id, lease_ms, wait=False)
        return await self._worker.waits.wait_for_async(look, _end_s(timeout), repr((key, id)))

    def _finder_of(
        self, key: str | None, id: str | None, lease_ms: float | None, wait: bool
    ) -> _Look[FemtoTask]:
        """Check the arguments of take(), and return the function that looks for the task once."""
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        if (key is None) == (id is None):
            raise TypeError("take needs a key or an id")
        ident = "" if id is None else _check_id(id)
        name = "" if key is None else _encode_key(key)
        return functools.partial(self._worker.take_named, name, ident, length_ns, wait)

    def drain(self, timeout: float | None = None) -> Iterator[FemtoTask]:
        """Iterate over tasks until no task is pending, scheduled or in flight.

        Each task is leased as by pop(). Tasks of other workers count too: drain() waits for them to
        end or to come back. End each task before asking for the next: a task that this worker holds
        is in flight, too.

        timeout:  the seconds to wait for each task; the iteration ends if no task came. None: no
            limit.

        Raises ValueError or TypeError at once if `timeout` is invalid. The iteration raises the
        errors of pop(). close() in another thread ends the iteration.

        On disk: as after pop(), for each task.
        """
        _end_s(timeout)  # raise for an invalid timeout now, not at the first task

        def look() -> Any:  # returns False if no work is left, which ends the wait
            task = self._worker.take_oldest(self._length_ns, True)
            return task if task or self._files.has_work() else False

        def wait() -> FemtoTask | None:
            return self._worker.waits.wait_for(look, _end_s(timeout), False) or None

        return iter(wait, None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no task is pending, scheduled or in flight, and return True.

        join() only looks: due tasks and the tasks of dead workers move when some worker calls
        pop().

        timeout:  the seconds to wait. None: no limit.

        Returns False if the timeout has passed, or if close() in another thread ended the wait.
        """
        ended = self._worker.waits.wait_for(
            lambda: not self._files.has_work() or None, _end_s(timeout), False
        )
        return ended is True

    # Ending a delivery

    def done(self, task: FemtoTask) -> None:
        """Finish the task: it moves to done/, or is deleted with keep_done=False.

        task:  the task that pop() or another method leased.

        Raises LeaseLost if this delivery no longer holds the lease; then nothing is changed. Raises
        TypeError if `task` is not a FemtoTask, and the OSError of the system call if there is
        trouble with the disk. If only the sync failed, the task has moved all the same.

        On disk: when done() returns, the file of the task is in done/, or is deleted. The rename(2)
        or unlink(2) is the commit. The system call fails with ENOENT if the lease is gone (POSIX),
        and then LeaseLost is raised. The checkpoint of the task is removed. With sync_after_write,
        fsync(2) of the file and of the directory follows. A task to be deleted is also synced
        before: power loss must not bring it back to pending/. A payload that is buffered behind the
        task becomes a task.
        """
        self._worker.finish(task)

    def fail(self, task: FemtoTask, error: str | BaseException | None = None) -> None:
        """Move the task to failed/ as a dead letter. retry() can put the task back.

        task:  the task that pop() or another method leased.
        error:  the reason: a text, or an exception, whose traceback is kept. None: no reason.

        Raises LeaseLost, TypeError and OSError as done() does. Also raises TypeError if `error` is
        of another type.

        On disk: when fail() returns, the file of the task is in failed/, and the reason is in
        failed/<id>.error. The rename(2) of the task comes first: a worker that lost its lease never
        writes a reason for another delivery. If the process dies between the two, the task has no
        reason. The rest is as in done().
        """
        if not isinstance(error, (str, BaseException, type(None))):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        self._worker.end_failed(task, error)

    def release(
        self, task: FemtoTask, *, front: bool = False, delay_s: float = 0, counted: bool = True
    ) -> None:
        """Give the task back, so that it is delivered again.

        Without further arguments the task goes to the back of the queue.

        task:  the task that pop() or another method leased.
        front:  True: the task returns to the front of the queue, to the place of its push.
        delay_s:  the seconds, by the wall clock, for which the task waits in scheduled/.
        counted:  False: the attempts of the task do not count this delivery.

        Raises ValueError if `delay_s` is negative, or if both `front` and `delay_s` are given.
        Raises LeaseLost, TypeError and OSError as done() does.

        On disk: when release() returns, the file of the task is in pending/ or scheduled/, moved by
        rename(2). With sync_after_write, fsync(2) of the file and of the directory follows. The
        checkpoint stays for the next delivery. If a newer payload of the key is buffered, the task
        comes back with that payload and its due time, and as never attempted.
        """
        path = _lease_of(task).path
        ident, attempts = _id_of(path), _attempts_of(path) - (not counted)
        if _finite("delay_s", delay_s) < 0 or (front and delay_s):
            raise ValueError(f"delay_s must be 0 or more, and 0 with front, not {delay_s!r}")
        if delay_s:
            due_ns = _wall_ns() + int(min(delay_s * 1e9, _FOREVER_NS))
            target = f"scheduled/{_task_name(due_ns, attempts, ident)}"
        elif front:
            target = _front_path(ident, attempts)
        else:
            target = self._worker.back_path(ident, attempts)
        self._worker.requeue(task, target)

    def extend(self, task: FemtoTask, ms: float | None = None) -> None:
        """Renew the lease of the task.

        task:  the task that pop() or another method leased. `task.path` gets the new name of the
            lease.
        ms:  the milliseconds from now until the lease ends. None: the length for which the lease
            was taken. In a block of processing(), the lease is never renewed for less than that
            length.

        Raises ValueError if `ms` is not greater than 0. Raises LeaseLost, TypeError and OSError as
        done() does.

        On disk: when extend() returns, the file of the task has a new name, with the new deadline,
        in the same directory. The rename(2) fails with ENOENT if the lease is gone (POSIX), and
        then LeaseLost is raised. The rename is not synced.
        """
        lease = _lease_of(task)
        self._worker.renew(task, _lease_length_ns("ms", ms, lease.length_ns))

    def attach(self, lease: str) -> FemtoTask:
        """Return the task of a lease that another process took, to end or extend the lease here.

        lease:  `task.path` in the other process, the last part of that path, or the id of the task.

        The payload is not read: `data` is b"". `size_bytes`, `key` and `checkpoint` are None. The
        method checkpoint() reads the payload when it is called, and saves the checkpoint for that
        payload.

        Raises LeaseLost if there is no such lease, and TypeError if `lease` is not a str.

        A lease that is not detached still ends with the worker that took the lease. Without another
        length, extend() renews the lease for timeout_stale_ms of this object. If timeout_stale_ms
        is None, extend() renews a detached lease for the time that is left now, and at least a
        second.

        On disk: nothing changes.
        """
        directory, _, name = _check_str("lease", lease).rpartition("/")
        is_path = _parse_node_dir(directory) and self._files.exists(lease)  # needs no listing
        entries = [_parse(directory, name)] if is_path else self._files.find("inflight")
        entry = next((it for it in entries if it and name in (it.name, it.id)), None)
        if entry is None:
            is_over = "~" in name and name < f"{self._clock.now_ns():020d}"
            raise LeaseLost(_id_of(name), is_over, "it is not in flight by that name (any more)")
        length_ns = self._length_ns
        if entry.boot == _DETACHED and length_ns >= _FOREVER_NS:
            length_ns = max(self._worker.left_ns(entry.path), 10**9)
        held = _Lease()
        held.path, held.length_ns = entry.path, length_ns
        held.has_checkpoint = True  # not known: so done() and fail() remove one if it exists
        task = FemtoTask(entry.id, b"", entry.attempts, None, held, self._clock.anchor_ns)
        task.size_bytes = None
        return task

    # Working

    def processing(self, task: FemtoTask) -> _Processing:
        """Return a context manager that keeps the lease in its block, and then ends the delivery.

        task:  the task that pop() or another method leased. The `as` clause of the `with` statement
            gets the same object.

        A thread in the background renews the lease; each queue object has at most one such thread.
        When the block ends without an exception, the task is finished, as by done(). If the block
        itself ended the delivery by done(), fail() or release(), nothing more is done.

        An exception propagates, and the task waits in scheduled/ for another attempt (see
        retry_delay_s). If task.attempts has reached max_attempts, the task moves to failed/
        instead, as by fail(task, exception). KeyboardInterrupt, SystemExit, asyncio.CancelledError
        and other exceptions that are not an Exception return the task to the front of the queue.
        The delivery is not counted then.

        Raises LeaseLost at the beginning or the end of the block if the lease is lost. Raises
        OSError if the end can't be written to the disk; then the task is delivered again soon.

        On disk: after the block, as after done(), release() or fail().
        """
        return _Processing(self, task, self._worker)

    def checkpoint(self, task: FemtoTask, data: _BytesLike) -> None:
        """Save how far the work on the task has come, and renew the lease.

        The next delivery gets the bytes as `task.checkpoint`. This holds after release(), after a
        failed attempt, and after the death of this worker. A delivery with a newer payload of the
        key gets no checkpoint. done() and fail() remove the checkpoint.

        task:  the task that pop() or another method leased.
        data:  the progress: bytes, bytearray or memoryview, of any meaning.

        Raises LeaseLost, and saves nothing, if this delivery no longer holds the lease. Raises
        TypeError if `data` is not bytes-like, and the OSError of the system call if the disk did
        not take it.

        On disk: when checkpoint() returns, checkpoints/<id> has the new bytes. One rename(2)
        replaces the old file. After a crash, the old or the new file is there, and whole. With
        sync_after_write, fsync(2) of the file comes before the rename, and of the directory after
        it.
        """
        _save_checkpoint(self._worker, task, bytes(_as_bytes(data)))

    def work(
        self,
        handler: Callable[[FemtoTask], object],
        *,
        concurrency: int = 1,
        drain: bool = False,
        stop: threading.Event | None = None,
        idle_timeout_s: float | None = None,
        time_limit_s: float | None = None,
    ) -> WorkCounts:
        """Call handler(task) for each task, within processing(), until told to stop.

        handler:  the function that does the work. If the handler raises an exception, the exception
            is logged (logger "femtoqueue"), and the next task follows.
        concurrency:  the number of tasks handled at a time. More than 1: in threads.
        drain:  True: return when no task is pending, scheduled or in flight.
        stop:  a threading.Event. When the event is set, the running handlers finish, and work()
            returns.
        idle_timeout_s:  return when this worker has been idle for that many seconds. None: never.
        time_limit_s:  take no more tasks when that many seconds have passed. None: no limit.

        Returns the number of deliveries by outcome, as WorkCounts.

        In the main thread, SIGTERM and SIGINT stop the loop as `stop` does. A second signal gives
        back the tasks that are running, and work() returns at once. Handlers that still run in
        other threads then get LeaseLost. Two signals within 0.3 seconds count as one. close() in
        another thread stops the loop, too.

        Raises TypeError or ValueError if an argument is invalid. SystemExit, KeyboardInterrupt and
        the like, raised by a handler, end the loop and propagate. The handler's task is given back,
        and the delivery is not counted. An OSError of pop() or of the end of a delivery also ends
        the loop, and is raised when the running handlers have finished. If a signal came, too, the
        OSError is only logged.

        Trouble with a single task (see pop()) is logged, and the other tasks go on. An error of
        this kind is raised only if nothing but such trouble came for 30 seconds.

        On disk: each task is where done(), fail() or release() put it.
        """
        import inspect

        is_lazy = (
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        if not callable(handler) or any(
            it(handler) or it(type(handler).__call__) for it in is_lazy
        ):
            raise TypeError(f"handler must be a function that does the work, not {handler!r}")
        if type(concurrency) is not int or concurrency < 1:
            raise ValueError(f"concurrency must be an int of 1 or more, not {concurrency!r}")
        if stop is not None and not callable(getattr(stop, "is_set", None)):
            raise TypeError(f"stop must be a threading.Event or None, not {stop!r}")
        lease_dir = self._worker.lease_dir
        closes = lease_dir.closes

        def is_stopped() -> bool:
            return lease_dir.closes != closes or (stop is not None and stop.is_set())

        return _WorkerPool(
            *(self, handler, concurrency, drain, is_stopped),
            idle_timeout_s=idle_timeout_s,
            time_limit_s=time_limit_s,
        ).run()

    def pause(self) -> None:
        """Stop handing out tasks, in all processes, until resume().

        Tasks in flight are not affected, and push() still adds tasks. Other workers notice the
        pause when they list pending/ again, within about a second.

        On disk: when pause() returns, the file data_dir/PAUSED is there.
        """
        open(f"{self._files.root}PAUSED", "ab").close()
        self._worker.house.look_again()

    def resume(self) -> None:
        """Hand out tasks again, whoever paused the queue. Calls that wait look for tasks at once.

        On disk: when resume() returns, the file data_dir/PAUSED is gone.
        """
        _unlink_if_exists(f"{self._files.root}PAUSED")

    @property
    def paused(self) -> bool:
        """True if the queue is paused: the file data_dir/PAUSED exists."""
        is_paused = self._files.exists("PAUSED")
        if is_paused:  # from now on, pop() must not hand out tasks that were listed before
            self._worker.house.look_again()
        return is_paused

    # Dead letters and upkeep

    def retry(self, id: str) -> None:
        """Put a failed task at the back of the queue, with its attempts at 0.

        id:  the id of the task.

        Raises TaskNotFound if the task is not in failed/. Raises KeyInFlight if its key has another
        task now. Raises ValueError if `id` is not a valid id, and the OSError of the system call if
        there is trouble with the disk.

        On disk: when retry() returns, the file of the task is in pending/, and the reason in
        failed/ is removed. The file is moved by rename(2). With sync_after_write, fsync(2) of the
        file and of the directory follows.
        """
        entry = self._files.find_id(_check_id(id), "failed")
        if entry is None or not self._worker.requeue_failed(entry.path):
            raise TaskNotFound(f"no task {id} in failed/")

    def retry_failed(self) -> int:
        """Put every failed task at the back of the queue, oldest first, and return their number.

        A task stays in failed/, uncounted, if its key has another task now. On disk: as after
        retry(), for each task.
        """
        count = 0
        for entry in self._files.find("failed"):
            with suppress(KeyInFlight):
                count += self._worker.requeue_failed(entry.path)
        return count

    def purge(self, older_than_s: float, states: Iterable[str] = ("done",)) -> int:
        """Delete tasks that ended more than older_than_s seconds ago, and return their number.

        older_than_s:  the least age in seconds, by the wall clock. The age counts from the move to
            the directory: every common file system sets st_ctime on rename(2).
        states:  "done", "failed" or both, as a text or an iterable. With "failed", a reason whose
            task is gone is deleted, too.

        Raises ValueError or TypeError if an argument is invalid, and OSError if there is trouble
        with the disk.

        On disk: when purge() returns, the files are gone. The deletion is not synced.
        """
        _not_negative("older_than_s", older_than_s)
        given = {states} if isinstance(states, str) else set(states)
        if not given <= {*_ENDED}:
            raise ValueError(f"states must be of {' and '.join(map(repr, _ENDED))}, not {given!r}")
        wanted = [state for state in _ENDED if state in given]
        root, before_s = self._files.root, time.time() - older_than_s
        entries = self._files.find(*wanted)
        count = sum(_unlink_if_older(root + entry.path, before_s) for entry in entries)
        reasons = filter(_parse_reason, self._files.names("failed") if "failed" in wanted else ())
        for name in reasons:
            if not self._files.exists(f"failed/{name[:_ID_LENGTH]}"):
                _unlink_if_older(f"{root}failed/{name}", before_s)
        return count

    def check(self, repair: bool = False) -> list[Finding]:
        """Return what is wrong in data_dir, as a list; with repair=True, also repair it.

        Every task is read. A task that moves meanwhile may be reported wrongly.

        repair:  True: repair what can be repaired safely while workers run. Corrupt tasks that wait
            go to failed/. The tasks of dead workers and ended leases return to pending/. Payloads
            that wait behind a task that is gone become tasks. Records of keys without a task, and
            leftovers, are removed. False: change nothing.

        The findings are:
        - a network file system, or a directory on another file system than data_dir
        - a queue clock ahead of the wall clock
        - foreign names
        - records that are not whole, and files or directories that can't be read
        - an id in two places
        - dead workers and ended leases
        - keys without a task
        - leftovers in creating/ and checkpoints/ that are more than an hour old
        """
        return [*_Inspector(self._worker, repair).findings()]

    # Looking

    def stats(self) -> Stats:
        """Count the tasks in each state, and return the numbers as Stats.

        Only names are read. A task that moves meanwhile may be missed or counted twice.
        """
        files = self._files
        pending, scheduled = map(files.entries, _WAITING_DIRS)
        ages_ns = [max(0, self._clock.now_ns() - it.stamp_ns) for it in pending[:1]]
        # Negative if the task is not due.
        ages_ns += [_wall_ns() - it.stamp_ns for it in scheduled[:1]]
        age_ns = max(ages_ns, default=-1)
        nodes = tuple(map(self._worker.house.node_stats, files.node_dirs()))
        return Stats(
            pending=len(pending),
            scheduled=len(scheduled),
            inflight=sum(node.inflight for node in nodes),
            buffered=len(files.entries("keys")),
            **{state: len(files.entries(state)) for state in _ENDED},
            oldest_pending_age_s=age_ns / 1e9 if age_ns >= 0 else None,
            nodes=nodes,
            expired=sum(node.expired for node in nodes),
        )

    def tasks(self, state: str, *, data: bool = True) -> Iterator[FemtoTask]:
        """Iterate over the tasks in a state, in the order of their names, without leasing them.

        A task that waits is shown with the newest payload of its key.

        state:  one of STATES.
        data:  False: read only the headers. The attribute `data` is then b"". If the header is
            invalid, `size_bytes` is None.

        A task that moves meanwhile is left out. A corrupt task, or a task that this user may not
        read, is left out and logged. peek() raises the error of such a task.

        Raises ValueError if `state` is invalid.
        """
        return self._read_all(self._files.find(_check_state(state)), data)

    def peek(self, id: str | None = None, *, key: str | None = None) -> FemtoTask | None:
        """Return the task with an id, or the task of a key, without leasing it.

        A task that waits is shown with the newest payload of its key.

        id:  the id of the task, in any state. The id of a buffered payload is valid, too.
        key:  the key of a task that waits or is in flight.

        Returns None if there is no such task, or if it moved while peek() looked.

        Raises CorruptTask if the file is not a whole record, and the OSError of the system call if
        the file can't be read. Raises ValueError if the id or key is invalid, and TypeError unless
        one of the two is given.
        """
        if (id is None) == (key is None):
            raise TypeError("peek takes an id or a key")
        if id is None:
            path = self._worker.keys.path_of(_encode_key(key))
            entry = _parse(*path.split("/")) if path else None
        else:
            # Search in the order in which tasks move: a task that moves on meanwhile is found.
            entry = self._files.find_id(_check_id(id), "keys", *_LIVE, *_ENDED)
        return entry and self._read_entry(entry)

    def contains(self, key: str) -> bool:
        """Return True if a task of the key waits or is in flight.

        key:  a text of 1 to 200 bytes in UTF-8, as in push(). Raises ValueError or TypeError if it
            is not.
        """
        return self._worker.keys.path_of(_encode_key(key)) != ""

    def keys(self, state: str) -> Iterator[str]:
        """Iterate over the keys of the tasks in a state. Tasks without a key are left out.

        state:  one of STATES, as in tasks(). Raises ValueError if `state` is invalid.
        """
        entries = self._files.find(_check_state(state))
        keyed = (entry for entry in entries if _is_keyed(entry.id))
        return (task.key for task in self._read_all(keyed, True) if task.key is not None)

    def _read_entry(self, entry: _Entry, data: bool = True) -> FemtoTask | None:
        """Return the task of an entry, or None if its file has moved. A task that waits is read
        with the newest payload of its key. data=False: read only the header of that payload."""
        newest, payload = self._worker.keys.newest_of(entry), b""
        # RACE: another worker's claim takes the newer payload out of keys/ before this read. Then
        # read the task's own record. If the task has moved as well, return None.
        for record in dict.fromkeys((newest, entry.path)):
            with suppress(FileNotFoundError):
                if data:
                    payload, key = self._files.read(record, entry.id)
                    size_bytes: int | None = len(payload)
                else:
                    key, size_bytes = self._files.head(record)
                break
        else:
            return None
        attempts = entry.attempts if _is_end(entry.path) else _attempts_of(entry.path)
        lease = _Lease()
        lease.path = entry.path
        task = FemtoTask(entry.id, payload, attempts, key, lease, self._clock.anchor_ns)
        task.size_bytes = size_bytes
        if entry.directory == "failed":
            # Show the task even if the reason is missing or may not be read (another user's).
            with suppress(FileNotFoundError, PermissionError):
                task.error = self._files.text(f"failed/{entry.id}.error").removesuffix("\n")
        return task

    def _read_all(self, entries: Iterable[_Entry], data: bool) -> Iterator[FemtoTask]:
        """Yield the tasks of the entries. Leave out tasks that moved, and log those that can't be
        read."""
        for entry in entries:
            try:
                task = self._read_entry(entry, data)
            except (CorruptTask, PermissionError) as error:
                _log().warning("%s", error)
                continue
            if task is not None:
                yield task

    # Closing

    def close(self) -> None:
        """Give up the lease directory of this worker. Its tasks return to pending/ at once.

        Some leases stay, and end at their deadlines. These are detached leases, all leases where
        there is no flock(2), and all leases while another object lives under the same node_id.

        Calls of this object that wait in other threads and coroutines return at once. pop() and
        take() return None, join() returns False, and drain() and work() stop.

        The object may be used again after close(). Dropping the last reference to the object, or
        leaving its `with` block, does what close() does.
        """
        worker, lease_dir = self._worker, self._worker.lease_dir
        # While the interpreter ends, do not wait for the lock: a thread that has ended may hold it.
        # The kernel closes the files then.
        if not worker.lock.acquire(blocking=not sys.is_finalizing()):
            return
        try:
            lease_dir.closes += 1
            worker.renewer.stop()
            worker.waits.end_all()
            worker.house.end_scan()
            lease_dir.give_up()
        finally:
            worker.lock.release()

    def __enter__(self) -> FemtoQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # `_worker` is missing if the constructor raised. While the interpreter ends, _FileLock may
        # already be None.
        if "_worker" in self.__dict__ and _FileLock is not None:
            self.close()
            # The worker and its parts refer to each other: free what they hold now.
            self._worker.__dict__.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        settings["data_dir"] = os.path.dirname(self._files.root)
        settings["node_id"] = self._given_node_id
        return functools.partial(type(self), **settings), ()


# They are fixed when an object is made. An unpickled object is made anew from them.
_SETTINGS = FemtoQueue.__init__.__annotations__.keys() - {"return"}


# ==================================================================================================
# 13. Key states: where the task of each key is, under the locks of keys.
#     Invariant: keys/<hash> has a line for each key, "<key> <path> <newer payload, or ->", then an
#     empty line; what follows is of an older, longer text. One write() makes a change. It is a
#     hint, which room 14 checks and corrects. A key without a line has no task, except after power
#     loss: then repair() finds what is in keys/. Order of locks: see room 10.
# ==================================================================================================


class _States(dict[str, "tuple[str, str]"]):
    """By encoded key: where its task was last, and the path in keys/ of the newer payload behind it
    ("": none, as of a key that is not in here). `saved`: what keys/<hash> says; "": there is no
    such file. `outdated`: the paths of payloads that a younger one has replaced."""

    saved = ""
    outdated: tuple[str, ...] = ()

    def __missing__(self, key: str) -> tuple[str, str]:
        return "", ""

    def text(self) -> str:
        known = ((key, path, newer[5:]) for key, (path, newer) in self.items() if path)
        return "".join(f"{key} {path} {newer or '-'}\n" for key, path, newer in known)


def _parse_key_states(content: bytes, tag: str) -> _States:
    states, text = _States(), content.decode("ascii", "replace").partition("\n\n")[0]
    for match in map(_parse_key_state, text.splitlines()):
        # One that leads to a task of no key, or of another hash, would have it overwritten.
        if match and _tag_of(match[2]) == tag and match[4][-9:] in ("-", f"-{tag}"):
            states[match[1]] = match[2], "" if match[4] == "-" else f"keys/{match[4]}"
    states.saved = f"{text}\n"
    return states


class _KeyStates:
    """The states of keys, in files that are read and written under their locks. `_held`: the locks,
    by thread and name; each has the states of its hashes, by tag. Weak: what Ctrl-C leaves locked,
    between any two lines, ends with its frame."""

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._files, self._clock = worker, worker.files, worker.clock
        self._held = weakref.WeakValueDictionary[tuple[int, str], _FileLock]()

    @contextmanager
    def lock(self, tag: str, wait: bool = True) -> Iterator[_States]:
        """Hold the lock of the keys of one hash, and save what the block changes of their states.
        Raises BlockingIOError if the lock is not free and wait is False.

        The lock's file is never removed: who waits for it would have to see that. A nested call
        takes the same lock, and shares the states.
        """
        name = tag[-2:]
        holder = threading.get_ident(), name
        lock = outer = self._held.get(holder)
        if lock is None or lock.fd < 0:  # Ctrl-C came while it was closed
            lock = self._open_lock(name)
        try:
            lock.acquire_exclusive(wait)
            self._held[holder] = lock
            states = lock.states.get(tag) or lock.states.setdefault(tag, self._load(tag))
            try:
                yield states
            finally:
                with suppress(OSError):  # nothing depends on a hint
                    self._save(tag, states)
        finally:
            if lock is not outer:
                lock.close()

    def _open_lock(self, name: str) -> _FileLock:
        try:
            return self._files.open_lock(f"locks/{name}")
        except FileNotFoundError:
            self._make_dir("locks")
            return self._files.open_lock(f"locks/{name}")

    def _make_dir(self, name: str) -> None:
        """Make a directory that is missing. Raises FileNotFoundError if data_dir is."""
        self._files.make_dir(name)
        self._files.commit_dir("")

    def lock_of(self, path: str, wait: bool = True) -> AbstractContextManager[Any]:
        """Hold the lock of a task's key, if it has one; path: its id is the end of it."""
        return self.lock(_tag_of(path), wait) if _is_keyed(_id_of(path)) else nullcontext()

    def _load(self, tag: str) -> _States:
        try:
            fd = os.open(f"{self._files.root}keys/{tag}", _READ_FLAGS)
        except FileNotFoundError:
            return _States()
        try:
            return _parse_key_states(os.read(fd, os.fstat(fd).st_size), tag)
        finally:
            os.close(fd)

    def _save(self, tag: str, states: _States, sync: bool = False) -> None:
        """Write keys/<hash> if the states have changed; remove it if there are none."""
        path = f"keys/{tag}"
        if (text := states.text()) != states.saved:
            if text:
                self._write(path, f"{text}\n".encode("ascii"))
            else:
                self._files.remove(path)
            states.saved = text
            if sync:
                self._files.commit(path)

    def _create(self, path: str) -> int:
        """Make a file in keys/, which the workers of all users read and write."""
        root, flags = self._files.root, _CREATE_FLAGS | _NO_FOLLOW_OR_BLOCK
        try:
            fd = os.open(root + path, flags, 0o666)
        except FileNotFoundError:
            self._make_dir("keys")
            fd = os.open(root + path, flags, 0o666)
        _follow_owner(fd, root)
        return fd

    def _write(self, path: str, content: bytes) -> None:
        """Write over the beginning of a file in keys/."""
        try:
            fd = os.open(self._files.root + path, os.O_WRONLY | _NO_FOLLOW_OR_BLOCK)
        except FileNotFoundError:
            fd = self._create(path)
        except PermissionError:  # of a user whose umask shuts us out; the lock is ours
            self._files.remove(path)
            fd = self._create(path)
        try:
            os.pwrite(fd, content, 0)
        finally:
            os.close(fd)


# ==================================================================================================
# 14. Keys: finds, claims, moves and pushes the tasks with a key. Doors: claimed(), move_keyed() and
#     lock_of(), for ids with a key's tag; put(), find_task() and path_of(), for keys.
#     Invariant: of each key at most one task is in pending/, scheduled/ or inflight-*/, and at most
#     one newer payload in keys/, behind it. The claim that delivers a task takes the payload behind
#     it along; a task that ends lets that become a task. What moves does so under the lock of its
#     key; but a claim, the undoing of one and people move a task without it.
# ==================================================================================================


def _later(newer: str) -> int | None:
    """Return the time for which a payload in keys/ is scheduled, if that is yet to come."""
    due_ns = _stamp_of(newer) if "~" in newer else 0
    return due_ns if due_ns > _due_ns() else None


class _KeyedTasks(_KeyStates):
    """The tasks with a key, once they are pushed."""

    # Finding

    def find_task(self, states: _States, name: str) -> tuple[str, str]:
        """Return where the task of an encoded key is ("": it has none), and the payload behind it;
        correct its state."""
        task, behind = states[name]
        # CRASH: before a payload came to keys/, before it got that name, or after it left.
        path, newer = self._locate(task, *_LIVE), self._locate(behind, "keys")
        if behind and not newer:
            # CRASH: it came up, and that was not noted. A person may have put the older one back.
            path = self._locate(behind, *_LIVE) or path
        elif not path:
            # CRASH: the task before it ended, and it did not come up. Or a person removed that.
            path, newer = self._promote(newer), ""
        states[name] = path, newer
        return path, newer

    def _locate(self, path: str, *where: str) -> str:
        """Return the path that a record has by now, "" if it is in none of these states."""
        if not path or self._files.exists(path):
            return path
        entry = self._files.find_id(_id_of(path), *where)
        return entry.path if entry else ""

    def may_have_task(self, name: str) -> bool:
        """Whether an encoded key may have a task: "no" is cheap to know."""
        return self._files.exists(f"keys/{_key_tag(name)}")

    def path_of(self, name: str) -> str:
        """Return where the task of an encoded key is, "" if it has none."""
        if not self.may_have_task(name):
            os.stat(f"{self._files.root}pending")  # gone: disk trouble
            return ""
        try:
            with self.lock(_key_tag(name)) as states:
                return self.find_task(states, name)[0]
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
        return self._seen(name)  # on a snapshot, or in a queue that this user may only read

    def _seen(self, name: str) -> str:
        """Do as path_of() without the lock, and correct nothing. A task that moves just then may be
        missed."""
        task, behind = self._load(_key_tag(name))[name]
        return self._locate(task, *_LIVE) or self._locate(behind, "keys", *_LIVE)

    def newest_of(self, entry: _Entry) -> str:
        """Return the path of the payload that a task's next delivery carries; it may go now."""
        if _is_keyed(entry.id) and entry.directory in _WAITING_DIRS:
            for path, newer in self._load(_tag_of(entry.id)).values():
                if newer and _id_of(path) == entry.id:
                    return newer
        return entry.path

    # Claiming

    def claimed(self, lease: str, key: str, data: bytes, waiting: str) -> bytes | None:
        """Return the payload to deliver of a task that was just claimed at `waiting`, and read;
        None: it is not to be delivered now. Raises FileNotFoundError if the lease has ended.

        The state, read without the lock, names a payload that was put behind the task before the
        claim. RACE: unless this lease has ended, and another worker took that along; so the lease
        is looked at afterwards. `mv failed/ID pending/`, or a state lost with power, makes two
        tasks of one key.
        """
        name = _encode_key(key)
        if self._is_alone(name, lease):
            return data
        with self.lock(_tag_of(lease)) as states:
            if self._gave_way(states, name, lease):
                return None
            if not states[name][1]:
                return data
            return self._take_along(states, name, waiting)

    def _is_alone(self, name: str, lease: str) -> bool:
        path, newer = self._load(_tag_of(lease))[name]
        self._files.lstat(lease)
        return _id_of(path) == _id_of(lease) and not newer

    def _gave_way(self, states: _States, name: str, lease: str) -> bool:
        """Note a task that was just leased as that of its key. If the key has another, return True:
        the one that was leased is a dead letter now."""
        self._files.lstat(lease)
        path, newer = self.find_task(states, name)
        if path and _id_of(path) != _id_of(lease):
            self._end_second(name, lease, path)
            return True
        states[name] = lease, newer
        self._save(_tag_of(lease), states)  # or the claim fails: no other place tells of this task
        return False

    def _end_second(self, name: str, path: str, other: str) -> None:
        self._worker.quarantine(path, str(KeyInFlight(_decode_key(name), _id_of(other))))

    def _take_along(self, states: _States, name: str, waiting: str) -> bytes | None:
        """Put the payload behind a leased task into its place, and return it. None: the task waits
        again, for that is for later; or for a claim that is its first: an undone claim, or a
        person, brought it back with the attempts of its old payload. If a person moves it
        meanwhile, the payload stays behind. CRASH: between two renames it is behind a task that
        waits; after them, find_task() sees that it is not in keys/ any more."""
        lease, newer = states[name]
        due_ns = _later(newer)
        self._files.remove(f"checkpoints/{_id_of(lease)}")  # of the older one
        if due_ns is None and _attempts_of(lease) == 1:
            self._files.move_over(newer, lease, must_exist=True)
            states[name] = lease, ""
            return self._files.read(lease, _id_of(lease))[0]
        target = self._files.move(lease, _reset_path(waiting, due_ns))
        states[name] = target, newer
        if due_ns is not None:  # no pop() takes it from scheduled/
            self._files.move_over(newer, target, must_exist=True)
            states[name] = target, ""
        self._worker.note(target)
        return None

    # Moving

    def move_keyed(self, source: str, target: str, wait: bool = True) -> str:
        """Move a task with a key, as move_task() does, under the lock of the key. If it ends, the
        payload behind it becomes a task. If it comes back, that stays behind, and its attempts and
        its time, if that is later, count from now on."""
        ident = _id_of(source)
        with self.lock(_tag_of(ident), wait) as states:
            name = next((key for key, it in states.items() if _id_of(it[0]) == ident), "")
            newer = self._locate(states[name][1], "keys") if name else ""
            if newer and _state_of(target) in _WAITING_DIRS:
                target = _reset_path(target, _later(newer))
            try:
                target = self._files.move(source, target)
                if name and _is_end(target):
                    states[name] = self._promote(newer), ""
                elif name:
                    states[name] = target, newer
            except BaseException:
                self._worker.house.repairing.sooner(_BASE_INTERVAL_S)  # of what is behind it
                raise
        return target

    def _promote(self, newer: str) -> str:
        """Make a task of a payload in keys/; return its path, "" if there is none (any more)."""
        if not newer:
            return ""
        try:
            path = self._files.move(newer, _waiting_path(newer))
        except FileNotFoundError:
            return ""
        self._worker.note(path)
        self._files.commit(path)
        return path

    def reserve(self, states: _States, source: str, target: str) -> None:
        """Make sure that the key of a failed task has no other, and say that it will be there.
        Raises KeyInFlight if it has, FileNotFoundError if the task is gone."""
        name = self._key_in(source)
        if not name:
            return
        path, _ = self.find_task(states, name)
        if path:
            raise KeyInFlight(_decode_key(name), _id_of(path))
        states[name] = target, ""
        self._save(_tag_of(source), states, sync=True)

    def _key_in(self, path: str) -> str:
        """Return the encoded key of a record; "": it has none, or pop() will quarantine it."""
        try:
            _, key = self._files.read_listed(path, _id_of(path))
        except CorruptTask:
            return ""
        return "" if key is None else _encode_key(key)

    # Repair

    def repair(self) -> None:
        """Promote the payloads whose task is gone, and remove the states of keys without a task."""
        payloads = {path for path in self._found() if "-" in path}

        def repair(tag: str) -> None:
            try:
                with self.lock(tag, wait=False) as states:
                    for name in [*states]:
                        self.find_task(states, name)
                    self._adopt(states, {it for it in payloads if _tag_of(it) == tag})
            except BlockingIOError:  # RACE: another process is at work on a key of its hash
                self._worker.house.repairing.sooner(1)

        _for_each(repair, sorted({*map(_tag_of, [*self.idle(), *payloads])}))

    def _adopt(self, states: _States, payloads: set[str]) -> None:
        """Note the payloads in keys/ that no state knows: power loss, or a person, took it. What
        was pushed since has replaced them."""
        for newer in sorted(payloads.difference(it for _, it in states.values())):
            with suppress(FileNotFoundError):  # promoted just now, or a person has it
                name = self._key_in(newer) or "?"  # of no key: pop() will set it aside
                path, before = states[name]
                if _id_of(newer) < max(_id_of(path), _id_of(before)):
                    self._files.remove(newer)
                else:
                    states[name] = path, newer
                    self.find_task(states, name)

    def idle(self) -> list[str]:
        """Return the paths in keys/, states and newer payloads, of keys that have no task."""
        found = self._found()
        busy = {_tag_of(entry.id) for entry in self._files.find(*_LIVE)} if found else set()
        return [path for path in found if _tag_of(path) not in busy]

    def _found(self) -> list[str]:
        none_yet = suppress(FileNotFoundError, NotADirectoryError)
        with none_yet, os.scandir(f"{self._files.root}keys") as entries:
            files = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
            return [f"keys/{it}" for it in files if _parse_tag(it) or _FORMS["keys"](it)]
        return []


class _Keys(_KeyedTasks):
    """How tasks with a key are pushed."""

    def put(
        self, name: str, payload: bytes | memoryview, if_in_flight: str, due_ns: int | None
    ) -> str:
        """Push a payload for an encoded key; return its task's id. Returns "" if a pop() or a
        person was quicker at the task that waited: again, then."""
        with self.lock(_key_tag(name)) as states:
            path, newer = self.find_task(states, name)
            is_leased = _state_of(path) == "inflight"
            if is_leased and if_in_flight == "reject":
                raise KeyInFlight(_decode_key(name), _id_of(path))
            header = _header(payload, name)
            with self._files.replacement(self._clock.new_id(), header, payload) as aside:
                if not path:
                    return self._add(states, name, aside, due_ns)
                with suppress(FileNotFoundError):
                    if not is_leased:
                        self._replace(states, name, aside, due_ns)
                    elif if_in_flight == "update" and not newer:
                        self._put_over(aside, path)
                    else:
                        return self._add(states, name, aside, due_ns)
                    return _id_of(path)
                for directory in _WAITING_DIRS:
                    self._files.lstat(directory)  # one that is gone is disk trouble
                self._files.remove(aside)  # RACE: a pop() took the task, or a person moved it
                return ""

    def _add(self, states: _States, name: str, aside: str, due_ns: int | None) -> str:
        """Make a payload the task of a key that has none; or put it behind the task, where it takes
        the place of one that is there. Return its id."""
        path, before = states[name]
        younger = _stamp_of(_id_of(path)) + 1 if path else 0  # hosts' clocks differ
        order = max(self._clock.next_order(), younger)
        ident = _id_of(before) or _new_name(order, _key_tag(name))
        newer = f"keys/{ident if due_ns is None else _task_name(due_ns, 0, ident)}"
        target = newer if path else _waiting_path(newer)
        states[name] = (path, newer) if path else (target, "")
        try:
            # The state is there first: a task that it does not know would be one too many.
            self._save(_key_tag(name), states, sync=True)
            if before:
                with self._renamed(before, target, aside):
                    self._put_over(aside, target)
            else:
                self._files.move_over(aside, target)
                self._files.commit_dir(os.path.dirname(target))
        except BaseException:
            if not before:
                with suppress(OSError):  # _renamed() sees that it took no place
                    self._files.move_over(target, aside)
                self._files.remove(target)
            with suppress(OSError):
                self.find_task(states, name)  # a consumer that was quicker keeps what it has
            raise
        self._worker.note(target)
        return ident

    def _replace(self, states: _States, name: str, aside: str, due_ns: int | None) -> None:
        """Replace the payload of a task that waits, as a first attempt. It keeps its place, or gets
        the new time. Raises FileNotFoundError if another was quicker.

        Where names can't be exchanged, the payload goes behind a task in pending/. RACE: a claim
        reads the state after its rename. Before our save it delivers the old payload, and the new
        one is behind a lease; after it, it waits for our lock, and takes the new one along.
        """
        path, newer = states[name]
        if "~" in path:  # it may have been delivered before
            self._files.remove(f"checkpoints/{_id_of(path)}")
        with self._renamed(path, _reset_path(path, due_ns), aside) as target:
            states[name] = target, newer
            is_safe = _state_of(target) == "scheduled"  # no pop() takes it from there
            if newer or not self._put_over(aside, target, or_rename=is_safe):
                self._add(states, name, aside, due_ns)
        self._worker.note(target)

    @contextmanager
    def _renamed(self, path: str, target: str, aside: str) -> Iterator[str]:
        """Give a record another name before its payload is replaced by the one aside; if that
        fails, the old one: a push that raised changed nothing. CRASH: the old payload at the new
        time, or begun anew; the other order could deliver the new one before its time."""
        if target == path:
            yield path
            return
        target = self._files.move(path, target)
        try:
            self._files.commit(target)  # else btrfs, after power loss, has the old name, too
            yield target
        except OSError:
            if self._files.exists(aside):  # else it is in the place of the old one, for good
                self._files.move(target, path)
            raise

    def _put_over(self, aside: str, path: str, or_rename: bool = True) -> bool:
        """Put a payload into the place of one; False where names can't be exchanged. or_rename: it
        goes over that one then; a person who moves that just now makes two of one. Raises
        FileNotFoundError if that is gone. CRASH: the old one is a leftover in creating/."""
        is_swapped = self._files.swap(aside, path)
        if not is_swapped:
            if not or_rename:
                return False
            self._files.move_over(aside, path, must_exist=True)
        try:
            self._files.commit(path)
        except BaseException:
            if is_swapped:
                with suppress(OSError):
                    self._files.swap(aside, path)
            raise
        self._files.remove(aside)  # until now the disk may know only that
        return True


# ==================================================================================================
# 15. Waiting: for an event in the directories, in threads and in coroutines.
#     Invariant: a wait has its watcher before its last look, so that what comes after that look
#     ends the sleep. Coroutines only wait: one thread looks for them.
# ==================================================================================================

# inotify(7): in directories only, created or moved here; in data_dir also deleted or moved away.
_IN_COMES, _IN_GOES = 0x01000000 | 0x100 | 0x80, 0x200 | 0x40
# data_dir first: pending/ may be replaced between two calls.
_WATCHED = (("", _IN_COMES | _IN_GOES), ("pending", _IN_COMES), ("scheduled", _IN_COMES))
_LINGER_S = 1.0  # after which the thread of coroutines ends, if none waits
_MAX_IDLE = 4  # watchers that are kept: a user has 128 instances of inotify by default
_Found = TypeVar("_Found")  # by a wait
_Look = Callable[[], "_Found | None"]


def _readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Wait until a descriptor can be read, and return those that can.

    select.poll() may be missing: eventlet removes it. Then select.select() does the same for
    descriptors below 1024; for others the caller looks again after 50 ms."""
    import select

    if not hasattr(select, "poll"):
        try:
            return select.select([*fds], [], [], seconds)[0]
        except ValueError:
            time.sleep(min(seconds, 0.05))
            return []
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(int(seconds * 1000) + 1)]


class _Watcher:
    """Sleeps until a file comes to pending/ or scheduled/, PAUSED is gone, or wake() is called; one
    for each wait. sees_all: no event is missed, as there is inotify, and only this kernel writes
    there; else a wait must be short."""

    def __init__(self, root: str) -> None:
        self._fds: list[int] = []  # of inotify, and of an eventfd for wake()
        self._watches: list[int] = []  # of the directories, as they were at the last look
        self._root = root
        self._no_wake = threading.Lock()  # the same where there is no inotify: wake() unlocks it
        self._no_wake.acquire()
        is_local = _fs_type(root) in _LOCAL_TYPES  # it may raise: before there is a descriptor
        fd = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if _libc() else -1
        self.sees_all = is_local and fd >= 0  # -1: too many
        if fd >= 0:
            self._fds.append(fd)
            self._fds.append(os.eventfd(0, os.O_NONBLOCK | os.O_CLOEXEC))
            self._watch()
        _fork_hooks[self] = _Watcher.close  # what a child reads, its parent never hears

    def _watch(self) -> bool:
        """Watch the directories; return whether another is in the place of one (shrink_pending)."""
        fd, add_watch = self._fds[0], _libc().inotify_add_watch
        before = self._watches
        self._watches = [add_watch(fd, os.fsencode(self._root + it), to) for it, to in _WATCHED]
        self.sees_all &= min(self._watches) >= 0
        return self._watches != before

    def sleep(self, seconds: float) -> None:
        """Sleep; but not if a directory was replaced since the last look, which did not see it."""
        if not self._fds:
            self._no_wake.acquire(timeout=seconds)
            return
        if self._watch():
            return
        for fd in _readable(self._fds, seconds):
            os.read(fd, 1 << 16)

    def wake(self) -> None:
        """End the sleep, or the next one; in any thread, or in a signal handler."""
        if not self._fds:
            with suppress(RuntimeError):  # it was woken before
                self._no_wake.release()
            return
        os.eventfd_write(self._fds[1], 1)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        if os is not None:  # None: the interpreter ends
            self.close()


class _Request:
    """A coroutine that waits: how to look for it, and the answer."""

    is_over = False

    def __init__(self, look: _Look[FemtoTask], line: str, closes: int) -> None:
        import asyncio
        from concurrent.futures import Future

        self.look, self.line, self.closes = look, line, closes
        self.loop = asyncio.get_running_loop()
        self.answer: Future[FemtoTask | None] = Future()


class _Waits:
    """The waits on one queue object. A look is a function that returns what it found, or None."""

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._lease_dir, self._pid = worker, worker.lease_dir, os.getpid()
        self._watchers: set[_Watcher] = set()  # of the waits that go on
        self._idle: list[_Watcher] = []  # for the next ones; an old event wakes them for nothing
        # Of coroutines, in their order, by their id(). Weak: their loops and frames hold them.
        self._requests: weakref.WeakValueDictionary[int, _Request] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # held as the thread that serves them starts and ends
        self._is_serving = False

    def wait_for(self, look: _Look[_Found], end_s: float, has_events: bool = True) -> _Found | None:
        """Look until something is found, the time has come, or the queue is closed: None. A sleep
        between two looks ends with an event, close(), the time, or the next job (a due time, the
        end of a lease); where events are missed, after 1 ms, 2 ms and so on. has_events=False: it
        comes without an event (the queue is empty, for drain() and join())."""
        closes, pauses_s = self._lease_dir.closes, _backoff_s(self._worker.poll_interval_s)
        found = self._look(look, closes)
        if found is not None or time.monotonic() >= end_s:
            return self.accept(found)
        with self._watcher(closes) as watcher:
            while True:
                found = self._look(look, closes)
                left_s = end_s - time.monotonic()
                if found is not None or left_s <= 0 or self._lease_dir.closes != closes:
                    return self.accept(found)
                rest_s = self._worker.house.wake_s - time.monotonic()
                pause_s = next(pauses_s)
                if rest_s <= 0:  # a job failed, or another thread runs it
                    rest_s = pause_s
                elif not (watcher.sees_all and has_events):
                    rest_s = min(rest_s, pause_s)
                watcher.sleep(min(left_s, rest_s))

    def _look(self, look: _Look[_Found], closes: int) -> _Found | None:
        """Look once, for a wait that began when the queue had been closed `closes` times."""
        found = look()
        if self._lease_dir.closes == closes:
            return found
        # RACE: closed as we looked. The task goes back, and the lease directory is given up again
        # if we opened it; if it is in use again, it has leases, or will be opened for the next.
        self._give_back(found)
        with self._worker.lock, suppress(OSError):  # gone; or the next look sees it
            if not os.listdir(self._lease_dir.path):
                self._lease_dir.give_up()
        return None

    def accept(self, found: _Found | None) -> _Found | None:
        """Return what was found to the caller, who has its delivery from now on; None: close() in
        another thread took it back, or could not, as its key was busy."""
        if isinstance(found, FemtoTask) and not self._lease_dir.unread.pop(found.path, ""):
            self._give_back(found)
            return None
        return found

    def _give_back(self, found: object) -> None:
        """Return a task that was found for a wait that is over to its place, uncounted."""
        # A child that was forked as it was found has it from its parent.
        if not isinstance(found, FemtoTask) or os.getpid() != self._pid:
            return
        self._lease_dir.orphans.setdefault(found.path, _lease_of(found).source)
        try:
            with self._worker.keys.lock_of(found.id), self._worker.lock:
                self._worker.reclaim(found.path)
        except OSError as error:
            _log().warning("task %s is given back later: %s", found.id, error)

    @contextmanager
    def _watcher(self, closes: int) -> Iterator[_Watcher]:
        try:
            watcher = self._idle.pop()
        except IndexError:
            watcher = _Watcher(self._worker.files.root)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            is_open = self._lease_dir.closes == closes  # else it ends with its last reference
            if is_open and watcher.sees_all and len(self._idle) < _MAX_IDLE:
                self._idle.append(watcher)

    def end_all(self) -> None:
        """End all waits, as close() has been counted, and close the watchers that no wait has."""
        self._wake()
        self._idle.clear()  # with its last reference: another thread may be about to wake one

    def _wake(self) -> None:
        for watcher in [*self._watchers]:
            watcher.wake()

    # Coroutines

    async def wait_for_async(
        self, look: _Look[FemtoTask], end_s: float, line: str
    ) -> FemtoTask | None:
        """Do as wait_for() does, without blocking the event loop; first come, first served in a
        line. A look that takes long holds up the others, not their loops."""
        import asyncio

        request = _Request(look, line, self._lease_dir.closes)
        left_s = min(end_s - time.monotonic(), _FOREVER_NS / 1e9)
        # The loop holds the request by its timer; the thread does not.
        timer = request.loop.call_later(left_s, self._end, request)
        try:
            with self._lock:  # from now on, the thread looks for it
                self._requests[id(request)] = request
                if self._is_serving:
                    self._wake()  # unless it is yet to look
                else:
                    threading.Thread(target=self._serve, daemon=True).start()
                    self._is_serving = True
            return self.accept(await asyncio.wrap_future(request.answer))
        except BaseException:  # cancelled
            if not request.answer.cancel() and request.answer.exception() is None:
                self._give_back(request.answer.result())  # RACE: the thread was quicker
            raise
        finally:
            timer.cancel()
            self._requests.pop(id(request), None)

    def _end(self, request: _Request) -> None:
        request.is_over = True
        self._wake()

    def _serve(self) -> None:
        """Look for the coroutines until none waits: the thread."""
        try:
            while True:
                self.wait_for(self._look_for_all, time.monotonic() + _LINGER_S)
                with self._lock:  # RACE: a coroutine may come just now
                    if not self._requests:
                        self._is_serving = False
                        return
        except BaseException as error:
            with self._lock:
                self._is_serving = False
            for ref in self._requests.valuerefs():
                request = ref()
                if request is not None:
                    self._answer(request, None, error)

    def _look_for_all(self) -> None:
        """Look once for the first of each line, and for those whose time is over. Answer those for
        whom something was found, and those whose time was over."""
        empty_lines = set()
        for ref in self._requests.valuerefs():
            request = ref()
            # A loop that does not run could not take its task.
            if request is None or not request.loop.is_running():
                continue
            is_over = request.is_over
            if request.line in empty_lines and not is_over:
                continue
            try:
                task = self._look(request.look, request.closes)
            except BaseException as error:
                self._answer(request, None, error)
                continue
            is_over |= self._lease_dir.closes != request.closes  # perhaps before it was in line
            if task is not None or is_over:
                self._answer(request, task)
            if task is None:
                empty_lines.add(request.line)

    def _answer(
        self, request: _Request, task: FemtoTask | None, error: BaseException | None = None
    ) -> None:
        """End the wait of a coroutine; give back the task if the wait has ended."""
        from concurrent.futures import InvalidStateError

        self._requests.pop(id(request), None)
        try:
            if error is None:
                request.answer.set_result(task)
            else:
                request.answer.set_exception(error)
        except InvalidStateError:  # RACE: cancelled, or the queue was closed
            self._give_back(task)


# ==================================================================================================
# 16. Processing: keeping a lease while its task is worked on, and ending it.
#     Invariant: while blocks of processing() run, at most one thread per queue object renews their
#     leases; none does if their leases have no deadline.
# ==================================================================================================

_RENEWAL = 1 / 3  # of its length, after which a lease is renewed
_LOCK_PAUSE_S = 0.0005  # between two tries of a renewal to get the lock of a key
_LONGEST_RETRY_S = 3600.0  # after an exception in processing()


def _read_checkpoint(worker: _Worker, ident: str, data: bytes) -> bytes | None:
    """Return how far the work on that payload had come: of a key, another may be here now."""
    files, path = worker.files, f"checkpoints/{ident}"
    if not files.exists(path):
        return None
    try:
        saved, _ = files.read(path, ident)
    except FileNotFoundError:
        return None  # RACE: a person removed it
    except CorruptTask as error:  # power loss: the work begins anew
        _log().warning("checkpoints/%s: %s", ident, error.reason)
        return None
    of_data = _header(data)
    if saved.startswith(of_data):
        return saved[len(of_data) :]
    files.remove(path)
    return None


def _save_checkpoint(worker: _Worker, task: FemtoTask, payload: bytes) -> None:
    """Put a checkpoint in place, and renew the lease, which is the fence."""
    files, data, lease = worker.files, task.data, _lease_of(task)
    ident = _id_of(lease.path)
    if task.size_bytes is None:  # of attach(): the payload was not read
        try:
            data, _ = files.read(lease.path, ident)
        except FileNotFoundError:
            os.stat(files.root)  # gone: disk trouble
            raise worker.lease_lost(lease) from None
    record = _header(data) + payload
    # For all users: the next worker may be another one's.
    with files.replacement(worker.clock.new_id(), _header(record), record, for_all=0) as aside:
        if not os.path.isdir(f"{files.root}checkpoints"):
            files.make_dir("checkpoints")
            files.commit_dir("")
        with worker.keys.lock_of(ident), worker.lock:
            worker.renew(task)  # it holds for far longer than the next line
            files.move_over(aside, f"checkpoints/{ident}")
    files.commit_dir("checkpoints")
    task.checkpoint, lease.has_checkpoint = payload, True


class _LeaseRenewer:
    """Renews the leases of the tasks that are being processed, in one thread. It holds the worker,
    not the queue: a dropped queue object gives up its lease directory at once."""

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._lock = worker, worker.lock
        # By the id() of the task. Weak: the `with` holds the block, for as long as there is one.
        self.blocks: weakref.WeakValueDictionary[int, _Processing] = weakref.WeakValueDictionary()
        self._runs: threading.Lock | None = None  # held while a thread renews: its own
        self._pause_s = 0.0  # seconds between two rounds of the thread

    def add(self, block: _Processing) -> None:
        """Renew a lease from now on; start a thread if none runs, or if its rounds are too rare."""
        lease = _lease_of(block.task)
        pause_s = lease.length_ns / 1e9 * _RENEWAL
        with self._lock:
            has_thread = self._runs is not None and pause_s >= self._pause_s
            if lease.length_ns < _FOREVER_NS and not has_thread:
                runs = threading.Lock()
                runs.acquire()
                threading.Thread(target=self._run, args=(runs, pause_s), daemon=True).start()
                self.stop()
                self._runs, self._pause_s = runs, pause_s
            self.blocks[id(block.task)] = block

    def remove(self, task: FemtoTask) -> None:
        with self._lock:
            self.blocks.pop(id(task), None)

    def stop(self) -> None:
        """End the thread. It never waits: not for a lock that a thread has, in whose midst it may
        be called by a finalizer, or with which that has ended as the interpreter ends."""
        runs, self._runs = self._runs, None
        if runs is not None:
            runs.release()

    def _run(self, runs: threading.Lock, pause_s: float) -> None:
        longest_s = threading.TIMEOUT_MAX
        while not runs.acquire(timeout=min(pause_s, longest_s)) and (tasks := self._tasks(runs)):
            pause_s = self._pause_s
            for task in tasks:
                try:
                    self._renew(task)
                except BaseException:  # of a log handler, too: the other leases must go on
                    pause_s = self._pause_s / 10

    def _tasks(self, runs: threading.Lock) -> list[FemtoTask]:
        """Return what is to be renewed; nothing, if another thread does it by now (or none: Ctrl-C
        came as this one was started)."""
        with self._lock:
            tasks = [block.task for block in self.blocks.values()]
            length_ns = min((_lease_of(it).length_ns for it in tasks), default=_FOREVER_NS)
            if self._runs is not runs:
                return []
            # Of no lease that ends, so long that the next block starts a thread.
            self._pause_s = length_ns / 1e9 * _RENEWAL
            return tasks

    def _renew(self, task: FemtoTask) -> None:
        """Renew a lease, unless the next round will do. Raises an error if it is to come soon."""
        lease = _lease_of(task)
        next_left_ns = self._worker.left_ns(task.path) - self._pause_s * 1e9
        if id(task) not in self.blocks or next_left_ns >= lease.length_ns * (1 - _RENEWAL):
            return
        end_s = time.monotonic() + self._pause_s / 10
        while not lease.outcome:
            try:
                # Not waiting for the lock of its key: a process may be stopped while it has it.
                self._worker.renew(task, wait=False)
                return
            except LeaseLost:
                self.remove(task)  # its block will see
                return
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise
                # One that pushes the key all the time leaves the lock free for moments only.
                time.sleep(_LOCK_PAUSE_S)
            except OSError as error:
                _log().warning("task %s: its lease is not renewed: %s", task.id, error)
                raise


class _Processing:
    """The block of FemtoQueue.processing(). Of queue, only public methods are used."""

    def __init__(self, queue: Any, task: FemtoTask, worker: _Worker) -> None:
        self._queue, self.task = queue, task
        self._worker, self._lease, self._pid = worker, _lease_of(task), os.getpid()

    def __enter__(self) -> FemtoTask:
        """Check or renew the lease, and have it renewed. Raises LeaseLost."""
        task = self.task
        if self._worker.left_ns(task.path) < self._lease.length_ns * 2 / 3:
            self._worker.renew(task)
        elif not self._worker.files.exists(task.path):
            raise self._worker.lease_lost(self._lease)
        self._worker.renewer.add(self)
        return task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        """End the delivery by what the block raised, unless the block ended it itself."""
        task = self.task
        # A child that was forked in the block does not own the task; nor does a block that is
        # garbage with its queue, if that was the first to be finalized.
        if os.getpid() != self._pid or not vars(self._worker):
            return
        try:
            is_lost = isinstance(error, LeaseLost) and error.id == _id_of(self._lease.path)
            if not (self._lease.outcome or is_lost):
                self._end(error)
        except LeaseLost as lost:
            if error is None or isinstance(error, Exception):  # else who is told to exit does
                raise lost from error
        except BaseException:  # trouble with the disk, or of the error's text; Ctrl-C
            self.abandon()
            raise
        finally:
            self._worker.renewer.remove(task)

    def _end(self, error: BaseException | None) -> None:
        queue, task, attempts = self._queue, self.task, _attempts_of(self.task.path)
        if error is None:
            queue.done(task)
        elif not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
            queue.release(task, front=True, counted=False)
        elif queue.max_attempts is not None and attempts >= queue.max_attempts:
            queue.fail(task, error)
        else:
            delay_s = min(queue.retry_delay_s * 2.0 ** min(attempts - 1, 64), _LONGEST_RETRY_S)
            # Less a random part of up to half: tasks that failed together spread out.
            queue.release(task, delay_s=delay_s * (1 - os.urandom(1)[0] / 512))
            self._lease.outcome = "retried"

    def abandon(self) -> None:
        """Have the task delivered again soon: its delivery can't be ended."""
        self._worker.lease_dir.orphans[self.task.path] = None
        self._worker.house.reclaiming.sooner(0)


# ==================================================================================================
# 17. Worker pool: the loop behind work() and the command `work`.
#     Invariant: each task that it takes is settled, given back or counted as lost, and no signal
#     comes between two of its steps that would leave a task in flight.
# ==================================================================================================

_TROUBLE_S = 30.0  # of nothing but trouble with single tasks, after which work() ends
_ONE_SIGNAL_S = 0.3  # two signals within that are one
_AFTER_FAILURE = {
    "retried": "to be retried",
    "failed": "a dead letter",
    "": "delivered again later",
}


class _WorkerPool:
    """The loop of work(): `concurrency` threads take tasks, one thread at a time, and handle them.
    If concurrency is 1, the calling thread does. is_stopped: asked between two tasks. Invariant: a
    task is in _running from before its handler is called until its delivery is counted, by the
    thread that removes it. _changed is held where these change."""

    stops: tuple[str, ...] = ("SIGINT", "SIGTERM")  # the signals that stop it

    def __init__(
        self,
        queue: Any,
        handler: Callable[[FemtoTask], object],
        concurrency: int,
        drain: bool,
        is_stopped: Callable[[], object] = _no_op,
        *,
        idle_timeout_s: float | None,
        time_limit_s: float | None,
    ) -> None:
        import signal

        self._queue, self._handler, self._concurrency = queue, handler, concurrency
        self._drain, self._is_stopped = drain, is_stopped
        self._is_threaded = concurrency > 1
        self._idle_timeout_s = idle_timeout_s
        self._idle_end_s = _end_s(idle_timeout_s, "idle_timeout_s")
        # 0 when the queue is drained, or this worker idle.
        self._end_s = _end_s(time_limit_s, "time_limit_s")
        self.stop_numbers = [int(signal.Signals[name]) for name in self.stops]
        self.signals: list[int] = []  # that came
        self._last_signal_s = 0.0
        self.counts: Counter[str] = Counter()  # by the fields of WorkCounts
        self._running: dict[int, FemtoTask] = {}  # by their id()
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that takes a task
        self._trouble_s = float("inf")  # since when there was nothing but trouble with tasks
        self._is_interruptible = False  # a handler runs that signals interrupt
        self._error: BaseException | None = None  # that ends the pool: of a handler, or of pop()

    def run(self) -> WorkCounts:
        """Work until told to stop. Raises what a handler raised to end the pool, and the OSError of
        a pop() or of a task's end, unless a signal came before what ran had finished."""
        with self._signals_handled():
            if self._is_threaded:
                self._work_in_threads()
            else:
                self._work()
            if len(self.signals) > 1:
                self._abort()
            elif isinstance(self._error, OSError) and self.signals:
                _log().error("work ends by a signal; before it: %s", self._error)
            elif self._error is not None:
                raise self._error
        return WorkCounts(**self.counts)

    def _work_in_threads(self) -> None:
        """Work in threads until they end, or until the second signal."""
        # Daemons: a handler that does not return must not keep the process alive.
        threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(self._concurrency)
        ]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:  # no more threads: those that run are enough
            if threads[0].ident is None:
                raise
        for thread in threads:
            while thread.is_alive() and len(self.signals) < 2:
                thread.join(_ONE_SIGNAL_S / 2)  # RACE: a signal just before it does not end it

    def _work(self) -> None:
        """Take tasks, and handle them, until the pool is stopped or the queue is drained."""
        try:
            while True:
                with self._turn:
                    if self._is_stopping():
                        return
                    task = self._take_untroubled()
                if task is not None:
                    self._process(task)
        except BaseException as error:
            self._error = self._error or error

    def _is_stopping(self) -> bool:
        is_over = self.signals or self._error is not None or time.monotonic() >= self._end_s
        return bool(is_over or self._is_stopped())

    def _take_untroubled(self) -> FemtoTask | None:
        """Do as _take(), but log the trouble with a single task, and return None: the others go on.
        Raise it if there was nothing but such trouble for _TROUBLE_S. A wait is none, unless this
        worker waits for just these tasks to end (drain)."""
        try:
            task = self._take()
        except (OSError, MemoryError) as error:
            ident, now_s = getattr(error, "task_id", ""), time.monotonic()
            self._trouble_s = min(self._trouble_s, now_s)
            if not ident or (now_s - self._trouble_s > _TROUBLE_S and not self._running):
                raise
            why = str(error) or type(error).__name__
            _log().error("task %s is passed over: %s", ident, why)
            return None
        if task is not None or not self._drain:
            self._trouble_s = float("inf")
        return task

    def _take(self) -> FemtoTask | None:
        """Take a task, or wait for one a moment: no event says that is_stopped() has changed."""
        queue, wait_s = self._queue, _BASE_INTERVAL_S
        task: FemtoTask | None = (
            next(queue.drain(wait_s), None) if self._drain else queue.pop(wait_s)
        )
        is_drained = self._drain and task is None and queue.join(0)
        with self._changed:
            if task is None:
                is_idle = not self._running and time.monotonic() >= self._idle_end_s
                if is_drained or is_idle:
                    self._end_s = 0.0
                return None
            if not self._is_stopping():
                self._running[id(task)] = task
                return task
        self._give_back(task)
        return None

    def _process(self, task: FemtoTask) -> None:
        """Handle a task; log how its delivery failed, and count how it ended."""
        processing, lease, has_begun = self._queue.processing(task), _lease_of(task), False
        try:
            with processing:
                has_begun = True
                self._handle(task)
        except LeaseLost as error:
            _log().warning("%s", error)
        except Exception as error:
            then = _AFTER_FAILURE.get(lease.outcome, lease.outcome)
            cause = None if isinstance(error, _CommandFailed) else error
            why = type(error).__name__
            with suppress(Exception):  # of a str() that raises
                why = str(error).partition("\n")[0]
            text = "%s: try %d failed, %s: %s"
            _log().error(text, task.id, task.attempts, then, why, exc_info=cause)
            if not lease.outcome:  # trouble with the disk, or no more threads: as of pop()
                self._error = self._error or error
                if not has_begun:
                    self._give_back(task)
        finally:
            self._count(task, lease.outcome or "lost")

    def _count(self, task: FemtoTask, outcome: str) -> None:
        with self._changed:
            self._idle_end_s = _end_s(self._idle_timeout_s)
            if self._running.pop(id(task), None) is not None:  # else _abort(), or its thread, has
                self.counts[outcome] += 1
            self._changed.notify_all()

    def _handle(self, task: FemtoTask) -> None:
        """Call the handler. In the thread that gets signals, the second one interrupts it."""
        try:
            self._is_interruptible = not self._is_threaded
            self._handler(task)
        finally:
            self._is_interruptible = False

    def _abort(self) -> None:
        """Give back what runs in other threads; what ran in this one has been given back."""
        for task in [*self._running.values()]:
            if self._give_back(task):
                self._count(task, "released")

    def _give_back(self, task: FemtoTask) -> bool:
        """Return a task to the front, uncounted; False if it has just ended, or can't be moved."""
        try:
            self._queue.release(task, front=True, counted=False)
            return True
        except LeaseLost:
            pass
        except OSError as error:
            _log().warning("task %s is not given back: %s", task.id, error)
            self._queue.processing(task).abandon()
        return False

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Handle signals while the block runs, in the main thread; elsewhere do nothing."""
        import signal

        is_main = threading.current_thread() is threading.main_thread()
        # Not those that are ignored, as by nohup, or have a handler that Python did not set.
        kept, pid = (signal.SIG_IGN, None), os.getpid()
        numbers = self.stop_numbers if is_main else []
        before = {n: it for n in numbers if (it := signal.getsignal(n)) not in kept}

        def handle(number: int, frame: object) -> None:
            if os.getpid() == pid:
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

    def _tell_stop(self) -> None:
        """Called at the first signal, in its handler."""

    def _on_signal(self, number: int) -> None:
        """Note a signal: the first one stops the pool, the second one aborts what runs."""
        # timeout(1) and a terminal that goes away signal twice: the process, and its group.
        if self.signals and time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
            return
        self._last_signal_s = time.monotonic()
        self.signals.append(number)
        if len(self.signals) == 1:
            self._tell_stop()
        elif len(self.signals) == 2 and self._is_interruptible:  # a third one changes nothing
            raise KeyboardInterrupt


# ==================================================================================================
# 18. Inspection: check(), a method for each thing that may be odd.
#     Invariant: without repair nothing is changed; with it, only what is safe while others work.
# ==================================================================================================


class _Inspector:
    """What check() finds, and mends with `repair`."""

    def __init__(self, worker: _Worker, repair: bool) -> None:
        self._worker, self._files, self._repair = worker, worker.files, repair

    def findings(self) -> Iterator[Finding]:
        """Yield what is odd; a directory that can't be read is a finding too."""
        keys, house, root = self._worker.keys, self._worker.house, self._files.root
        for look in (
            self._system(),
            self._names(),
            self._records(),
            self._mended(self._ended_leases, house.reclaim_ended),
            self._mended(
                lambda: dict.fromkeys(keys.idle(), ("key without a task", "nothing of it waits")),
                keys.repair,
            ),
            self._mended(
                lambda: dict.fromkeys(house.stale_files(), ("leftover", "more than an hour old")),
                house.remove_stale_files,
            ),
        ):
            try:
                yield from look
            except OSError as error:
                _raise_if_foreign(error)
                path = os.path.relpath(error.filename or root, root)
                yield Finding("unreadable", path, str(error))

    def _system(self) -> Iterator[Finding]:
        if self._files.caveat:
            yield Finding("network file system", ".", self._files.caveat)
        clock = self._worker.clock
        ahead_s = (clock.now_ns() - _wall_ns()) / 1e9
        if ahead_s > 1:
            text = f"{ahead_s:.0f} s ahead of the wall clock: that was set back, or a task is newer"
            yield Finding("clock", f"clock-{clock.boot}", text)

    def _names(self) -> Iterator[Finding]:
        """Directories on other file systems, and foreign names."""
        root, device = self._files.root, os.stat(self._files.root).st_dev
        names = [it for it in sorted(_FORMS) if it not in (".", "inflight")]
        directories = [it for it in names + self._files.node_dirs() if os.path.isdir(root + it)]
        for name in directories:
            with _ignore_missing():
                if os.stat(root + name).st_dev != device:
                    text = "another than data_dir's: rename() can't cross"
                    yield Finding("file system", name, text)

        def is_dir(name: str) -> bool:  # RACE: a worker comes, or goes
            is_other = os.path.isfile(root + name) or os.path.islink(root + name)
            return name in directories or (_parse_node_dir(name) is not None and not is_other)

        others: dict[str, Callable[[str], object]]
        others = {".": is_dir, "failed": _parse_reason, "keys": _parse_tag}
        for directory in (".", *directories):
            is_known, is_other = _FORMS[_state_of(directory)], others.get(directory, _no_op)
            for name in sorted(self._files.names(directory)):
                if not (is_known(name) or is_other(name)):
                    path = os.path.normpath(f"{directory}/{name}")
                    yield Finding("foreign", path, "not of the queue's")

    def _records(self) -> Iterator[Finding]:
        """Ids in two places, and records that are not whole."""
        seen: dict[str, str] = {}
        for entry in self._files.find(*STATES, "keys"):
            other, seen[entry.id] = seen.get(entry.id, ""), entry.path
            if other and all(map(self._files.exists, (other, entry.path))):
                yield Finding("twice", entry.path, f"there is {other} too")
            try:
                self._files.read(entry.path, entry.id)
            except FileNotFoundError:
                continue  # it moved on
            except OSError as error:
                _raise_if_foreign(error)
                yield Finding("unreadable", entry.path, str(error))
            except CorruptTask as error:
                if entry.directory == "failed" and self._files.exists(f"{entry.path}.error"):
                    continue  # a dead letter for just that
                is_mended = False
                if self._repair and entry.directory in _WAITING_DIRS:
                    with suppress(OSError):
                        self._worker.quarantine(entry.path, error.reason)
                        is_mended = True
                yield Finding("corrupt", entry.path, error.reason, is_mended)

    def _ended_leases(self) -> dict[str, tuple[str, str]]:
        found = {}
        for directory in self._files.node_dirs():
            stats = self._worker.house.node_stats(directory)
            if stats.liveness == "dead":
                found[directory] = "dead worker", f"{stats.inflight} tasks leased"
            elif stats.expired:
                found[directory] = "expired", f"{stats.expired} leases have ended"
        return found

    def _mended(
        self, look: Callable[[], dict[str, tuple[str, str]]], mend: Callable[[], None]
    ) -> Iterator[Finding]:
        """What look() finds: kind and text, by path. Another look tells what mend() left."""
        found = left = look()
        if found and self._repair:
            mend()
            left = look()
        for path, (kind, text) in found.items():
            yield Finding(kind, path, text, path not in left)


# ==================================================================================================
# 19. Tickets: first come, first served, between processes.
#     Invariant: a ticket's file appears locked, and in the order of the numbers: both under the
#     lock of the file "last"; who lost that lock takes its ticket back. A lock that ended never
#     comes back, so that any process may remove the ticket of a dead member.
# ==================================================================================================

_MAX_REDRAWS = 8  # of a ticket's number
_REDRAW_PAUSE_S = 0.01


class _Numbers:
    """The numbers of a line's tickets. The last one stands in the file "last", whose lock is held.
    Another file system may have another class; see _open_files(). late: the part of stale_timeout
    after which a member that was not touched may have been passed over."""

    late = float("inf")

    def __init__(self, files: _Files) -> None:
        self._files, self._root = files, files.root

    def draw(self, last: _FileLock, highest: int) -> int:
        """Return the next number, and note it. highest: of those in line. Raises the OSError of an
        open() that let us only read the note."""
        if last.refused is not None:
            raise last.refused
        text = os.read(last.fd, 20)  # after power loss it may be empty, or rubbish
        number = max(int(text) if text.isdigit() else 0, highest) + 1
        os.pwrite(last.fd, b"%020d" % number, 0)
        return number

    def check(self, number: int) -> None:
        """Raise FileExistsError if a higher one was drawn before ours was in line."""

    def remove_dir(self) -> None:
        os.unlink(f"{self._root}last")
        _remove_empty_dir(self._root)  # RACE: not if another process opens a new "last" now


class _HeldTicket:
    """A ticket of this object: its name, its locked file, when the last touch that was in time
    began (wall clock), and whether it ever was the first in line."""

    had_turn = False

    def __init__(self, member: str, lock: _FileLock, touched_s: float) -> None:
        self.member, self.lock, self.touched_s = member, lock, touched_s


def _despite_cleanup(step: Callable[[], _Found], path: str) -> _Found:
    """Repeat a step as long as maybe_cleanup(), in another process, removes its directory."""
    for _ in range(_MAX_REPLACED):
        with suppress(FileNotFoundError):
            return step()
    raise _os_error(errno.ENOENT, path)  # a link that leads nowhere


class TicketQueue:
    """First come, first served, between processes: a line of tickets in a directory.

        with TicketQueue("line").turn():
            ...                         # one process at a time, in the order in which they came

    A ticket is a file, <ticket>~<boot>~<random>, which its member keeps locked. On its own host a
    dead member is passed over at once, and a living one never. On other hosts, and after a reboot,
    a ticket is passed over when its file was not touched for stale_timeout seconds (wall clock;
    None: never); is_head() touches it, and turn() does as long as it runs. Hosts that share a line
    need the same stale_timeout, of 10 s or more. There, a waiting member that could not touch its
    ticket for three quarters of that time gives it up: another host may be about to pass it over.
    One that is cut off in its turn is passed over: is_head() tells, turn() does not.

    queue_dir is made if missing. Threads may share an object; a forked child or a copy holds no
    ticket. Raises OSError without flock, ValueError or TypeError for an invalid stale_timeout.
    """

    def __init__(
        self, queue_dir: str | os.PathLike[str], stale_timeout: float | None = None
    ) -> None:
        self._held: dict[str, _HeldTicket] = {}  # by member
        if stale_timeout is not None:
            _positive("stale_timeout", stale_timeout)
        self.queue_dir = queue_dir
        self.stale_timeout = stale_timeout
        path = _check_dir("queue_dir", queue_dir)
        boot_id = _read_boot_id() or (os.uname().nodename if hasattr(os, "uname") else "")

        def open_dir() -> tuple[_Files, str]:
            files = _open_files(path, is_durable=False)
            return files, _boot_tag(boot_id, files.root)

        self._files, self._boot = _despite_cleanup(open_dir, path)
        self._root = self._files.root
        self._numbers: _Numbers = self._files.parts[-1](self._files)
        _fork_hooks[self] = lambda line: line._held.clear()

    def register(self) -> tuple[int, str]:
        """Take the next ticket; return its number, from 1, and its member: its file's name in
        queue_dir. Blocks only while other processes register. Raises OSError if this host was cut
        off, and others registered, again and again meanwhile."""
        held = self._join_line()
        self._held[held.member] = held  # not before: if Ctrl-C comes, its lock ends with `held`
        return _stamp_of(held.member), held.member

    def _join_line(self) -> _HeldTicket:
        redraws = 0
        while True:
            try:
                with self._locked() as last:
                    return self._join_with(last)
            except OSError as error:
                redraws += 1
                if redraws > _MAX_REDRAWS or error.errno not in (*_MISSING_ERRNOS, errno.EEXIST):
                    raise
            time.sleep(_REDRAW_PAUSE_S)

    def _join_with(self, last: _FileLock) -> _HeldTicket:
        """Take the next ticket, with the lock of "last" held. RACE: a host that was cut off has
        lost that lock (replies). If another one registered meanwhile, or took our file for that of
        a dead process, raises OSError: ENOENT, ESTALE or EEXIST."""
        number = self._numbers.draw(last, max(map(_stamp_of, self._tickets()), default=0))
        began_s = time.time()
        name = f"{number:020d}~{self._boot}~{os.urandom(8).hex()}"
        lock = self._files.open_lock(f".{name}")  # not a ticket yet: it must appear locked
        try:
            lock.acquire_exclusive()
            self._files.move(f".{name}", name)
            self._numbers.check(number)
        except BaseException:
            self._files.remove(name)  # what is not a ticket yet goes with the next _locked()
            lock.close()
            raise
        return _HeldTicket(name, lock, began_s)

    def is_head(self, ticket: int) -> bool:
        """Say whether that ticket is the first whose member lives; touch it if it is ours. False,
        too, if ours was untouched for so long that another host may have passed it over. It is
        removed then, unless it ever was first: its turn may be another's; stop, and remove() it."""
        first = next(filter(self._lives, self._tickets()), "")
        is_first = first != "" and _stamp_of(first) == ticket
        for member, held in list(self._held.items()):
            if _stamp_of(member) != ticket:
                continue
            if not self._touch(held):  # after the look: that may have taken long
                if not held.had_turn:
                    self.remove(member)
                return False
            is_first = member == first  # not so if it was removed, and another has its number
            held.had_turn |= is_first
        return is_first

    def remove(self, member: str) -> bool:
        """Give up a member's ticket; False if it had none (any more). It may be another's. Raises
        ValueError for a name that register() does not return."""
        if not isinstance(member, str) or not _parse_ticket(member):
            raise ValueError(f"member must be a name that register() returned, not {member!r}")
        held = self._held.pop(member, None)
        try:
            return _unlink_if_exists(self._root + member)
        finally:  # if it can't be removed, it must at least not be held any more
            if held is not None:
                held.lock.close()

    def cleanup_stale(self) -> int:
        """Remove the tickets of members that died or went stale; return how many."""
        return sum(not self._lives(member) for member in self._tickets())

    def is_empty(self) -> bool:
        """Say whether no living member is in line."""
        return not any(map(self._lives, self._tickets()))

    def maybe_cleanup(self) -> bool:
        """Remove queue_dir if no living member is in line; say whether it went. A register()
        meanwhile waits, and makes it again; tickets begin at 1 then. On a file system of several
        hosts it stays: another host may take a lock that was removed for the one there."""
        if not os.path.isdir(self._root):
            return False
        with self._locked():
            if self.is_empty() and os.listdir(self._root) == ["last"]:
                self._numbers.remove_dir()
        return not os.path.isdir(self._root)

    @contextmanager
    def turn(self, timeout: float | None = None) -> Iterator[int]:
        """Wait for our turn, hold it for the block, and give it up. Yields the ticket. timeout:
        seconds to wait, None: for ever. Raises TimeoutError, out of line then; FemtoQueueError if,
        while it waits, another host may have passed its ticket over, or a person removed it."""
        end_s = float("inf") if timeout is None else time.monotonic() + _finite("timeout", timeout)
        held, over = self._join_line(), threading.Event()
        member, ticket = held.member, _stamp_of(held.member)
        try:
            self._held[member] = held
            if self.stale_timeout is not None:
                threading.Thread(target=self._touch_until, args=(member, over), daemon=True).start()
            while not self.is_head(ticket):
                line = self._tickets()
                if member not in line:
                    raise FemtoQueueError(f"ticket {ticket} was passed over, or removed")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"ticket {ticket}: no turn within {timeout} s")
                # The next in line looks often, the others seldom.
                time.sleep(min(0.002 * line.index(member), 0.05, left_s))
            yield ticket
        finally:
            try:
                over.set()
                if member in self._held:  # not in a forked child; nor if is_head() has removed it
                    self.remove(member)
            finally:  # also if Ctrl-C came: the lock ends with its last reference
                self._held.pop(member, None)

    def __del__(self) -> None:
        # The constructor may have raised. _FileLock is None when the interpreter ends.
        if _FileLock is not None:
            for member in list(self.__dict__.get("_held", ())):
                self.remove(member)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds no ticket
        return type(self), (os.path.dirname(self._root), self.stale_timeout)

    def _touch_until(self, member: str, over: threading.Event) -> None:
        pause_s = min(self._stale_s / 4, threading.TIMEOUT_MAX)
        while not over.wait(pause_s) and (held := self._held.get(member)):
            with suppress(OSError):  # RACE: given up just now
                self._touch(held)

    def _touch(self, held: _HeldTicket) -> bool:
        """Touch a ticket; False if it may have been passed over, also just now."""
        began_s = time.time()
        with _ignore_missing(errno.EBADF, errno.EINVAL):  # RACE: another thread gave it up
            os.utime(held.lock.fd)
            if time.time() - held.touched_s <= self._numbers.late * self._stale_s:
                held.touched_s = began_s
                return True
        return False

    @property
    def _stale_s(self) -> float:
        return float("inf") if self.stale_timeout is None else self.stale_timeout

    @contextmanager
    def _locked(self) -> Iterator[_FileLock]:
        """Hold the lock of "last", in which the last number stands."""
        lock = _despite_cleanup(self._lock_last, self._root)
        try:
            for name in self._files.names(""):
                if name[0] == "." and _parse_ticket(name[1:]):
                    _unlink_if_exists(self._root + name)  # CRASH: of one that died with this lock
            yield lock
        finally:
            lock.close()

    def _lock_last(self) -> _FileLock:
        _make_dir(os.path.dirname(self._root), 0o700, sync=False)
        lock = self._files.open_lock("last")
        lock.acquire_exclusive()
        if not lock.is_at_path():  # RACE: it was removed while we waited
            raise _os_error(errno.ENOENT, lock.path)
        return lock

    def _tickets(self) -> list[str]:
        return sorted(filter(_parse_ticket, self._files.names("")))

    def _lives(self, member: str) -> bool:
        """Say whether a member lives; remove its ticket if not."""
        with _ignore_missing():  # RACE: given up just now
            with closing(self._files.open_lock(member, os.O_RDWR)) as lock:
                if member.split("~")[1] == self._boot:
                    is_dead = lock.try_exclusive()
                else:  # by its open file: what is said of the path may be a minute old
                    is_dead = time.time() - os.fstat(lock.fd).st_mtime > self._stale_s
            if not is_dead:
                return True
            os.unlink(self._root + member)
        return False


# ==================================================================================================
# 20. Other file systems: those that other hosts write to, and systems without flock. The door is
#     _open_files(), which chooses the classes of an object once. What is true on NFS and GlusterFS:
#       stale     What another host changed may be seen as it was: names and contents for 30 s
#                 (NFS), contents for a second (GlusterFS). The server answers listings and renames,
#                 and what is read after a listing. So keys are listed, and have no states in files.
#       replaced  After a listing, a name may lead to the file that was replaced: ESTALE or ENOENT
#                 from open(), read() or close(); then the name is looked up (GlusterFS): _afresh().
#       phantom   A name that is yet to be healed is listed for minutes and leads to nothing
#                 (GlusterFS): read_listed().
#       healed    A name that was renamed during a network cut may come back as a second link to the
#                 file, or with the record that was replaced meanwhile (GlusterFS): is_done(); and
#                 of a key the youngest task counts, as far as the clocks of hosts agree.
#       replies   A rename that was carried out may raise ENOENT: a server that rebooted before it
#                 answered is asked again (NFS; perhaps others, but not GlusterFS): _found_moved(),
#                 _was_claimed(). On GlusterFS a replica may show as done a rename that failed.
#       flock     A waiting flock() asks the server only after 1, 2, 4 … seconds (NFS). If the
#                 network is cut meanwhile, it keeps the bricks busy for ever (GlusterFS): it is
#                 polled.
#     Elsewhere: what can't be exchanged or watched (_put_over(), _Watcher), and the leases of
#     other hosts (_renewed_recently()), are dealt with where they are met.
# ==================================================================================================

_GLUSTERFS_TYPE = 0x65735546  # of all that is mounted through FUSE
_NETWORK_TYPES = {
    **{0x6969: "NFS", _GLUSTERFS_TYPE: "FUSE", 0xFF534D42: "CIFS", 0xFE534D42: "SMB"},
    **{0x517B: "SMB", 0x00C36400: "Ceph", 0x01021997: "9p", 0x0BD00BD0: "Lustre"},
    **{0x01161970: "GFS2", 0x7461636F: "OCFS2", 0x47504653: "GPFS", 0x5346414F: "AFS"},
    **{0x19830326: "BeeGFS"},
}
_LOOKS = 4  # for a file that was replaced; three were needed
_STALE_S = 12.0  # until a name that leads to nothing is a phantom: the pauses of so many looks
_LISTED_LOOKS = 33
_LOCK_POLL_S = 0.01
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _open_files(data_dir: str, is_durable: bool) -> _Files:
    """Make data_dir if it is missing; return the steps on files for its file system. Raises OSError
    if statfs(2) fails: what other hosts write to must not be taken for local."""
    data_dir = os.path.abspath(data_dir)  # else the kernel takes ".." behind a link elsewhere
    _make_dir(data_dir, 0o700, is_durable)
    fs_type = _fs_type(data_dir)
    if fs_type not in (0, *_LOCAL_TYPES):
        files: _Files = _SharedFiles(data_dir, is_durable, fs_type)
        files.parts = _SharedLeaseDir, _SharedKeys, _SharedNumbers
    elif fcntl is None:
        files = _UnlockedFiles(data_dir, is_durable)
        files.parts = _UnlockedLeaseDir, _Keys, _Numbers
    else:
        files = _Files(data_dir, is_durable)
        files.parts = _LeaseDir, _Keys, _Numbers
    return files


class _Unlocked(_FileLock):
    """Stands for the lock of a directory where there is no flock: claims go by its path."""

    fd: Any = None

    def __init__(self, path: str) -> None:
        self.path, self.prefix = path, f"{path}/"

    def acquire_shared(self) -> bool | None:
        return None

    try_exclusive = acquire_shared

    def is_at_path(self) -> bool:
        return os.path.isdir(self.path)

    def close(self) -> None:
        pass

    __del__ = close


class _UnlockedFiles(_Files):
    def open_lock(self, path: str, flags: int = _LOCK_FLAGS) -> _FileLock:
        raise OSError(errno.ENOTSUP, _NO_FLOCK, path)

    def open_dir(self, directory: str) -> _FileLock | None:
        return _Unlocked(self.root + directory)


class _UnlockedLeaseDir(_LeaseDir):
    def claim(self, source: str, lease: _Lease) -> bool:
        # A keyed task could be leased, but never finished.
        return not _is_keyed(_id_of(source)) and super().claim(source, lease)


def _afresh(look: _Method) -> _Method:
    """Repeat a look, without a listing in between (replaced). ESTALE is a FileNotFoundError."""

    @functools.wraps(look)
    def call(*args: Any) -> Any:
        for _ in range(_LOOKS):
            try:
                return look(*args)
            except OSError as error:
                if error.errno not in _MISSING_ERRNOS:
                    raise
                path = error.filename
        raise _os_error(errno.ENOENT, path)

    return call  # type: ignore[return-value]


class _SharedLock(_FileLock):
    """A lock that is polled, always at one pace (flock)."""

    reading_is_enough = False  # NFS makes a lock of bytes of it, which a writer alone may have

    def acquire_exclusive(self, wait: bool = True) -> None:
        while True:
            try:
                return super().acquire_exclusive(wait=False)
            except BlockingIOError:
                if not wait:
                    raise
            time.sleep(_LOCK_POLL_S)


class _SharedFiles(_Files):
    """`heals`: it is GlusterFS, which loses no replies. `phantoms`: the paths of those that were
    met."""

    syncs_after_rename = False  # until then, another host could read a torn file

    def __init__(self, data_dir: str, is_durable: bool, fs_type: int) -> None:
        super().__init__(data_dir, is_durable)
        self.heals = fs_type == _GLUSTERFS_TYPE
        self.phantoms: set[str] = set()
        if kind := _NETWORK_TYPES.get(fs_type):
            ends = "other hosts' leases end by their deadlines only"
            self.caveat = f"{kind}: {ends}, and waiting is polling"

    # Looking

    head = _afresh(_Files.head)
    lstat = _afresh(_Files.lstat)
    text = _afresh(_Files.text)
    _read_once = _afresh(_Files.read)
    sync_file = _afresh(_Files.sync_file)

    def _refresh(self, directory: str) -> None:
        """Have the names of a directory looked up anew: opening it does (close-to-open, nfs(5))."""
        with suppress(OSError):  # the look that follows gets it too
            os.close(os.open(self.root + directory, os.O_RDONLY | os.O_DIRECTORY))

    def exists(self, path: str) -> bool:
        self._refresh(os.path.dirname(path))
        return super().exists(path)

    def names(self, directory: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return _afresh(os.listdir)(self.root + directory)
        self._refresh("")  # the directory may be new
        return super().names(directory)

    def has_work(self) -> bool:
        self._refresh("")  # keys/ may be new
        return super().has_work()

    def read(self, path: str, ident: str) -> _Record:
        """Read a record; after a listing what another host may have replaced before it was here."""
        state = _state_of(path)
        if state == "checkpoints" or (state == "inflight" and _is_keyed(ident)):
            self.names(os.path.dirname(path))
            return self.read_listed(path, ident)
        return self._read_once(path, ident)

    def read_listed(self, path: str, ident: str) -> _Record:
        """Read a record that was listed just now, and again while its name is listed: it may be
        replaced, or a phantom. A phantom takes so many looks, not so much time: a mount that hung
        knows no more than before. Raises FileNotFoundError."""
        directory, name = os.path.split(path)
        looks = 5 if path in self.phantoms else _LISTED_LOOKS
        for pause_s in itertools.islice(_backoff_s(_STALE_S / 24), looks):
            try:
                record = self._read_once(path, ident)
                self.phantoms.discard(path)
                return record
            except FileNotFoundError:
                if name not in self.names(directory):
                    raise
            time.sleep(pause_s)
        self.phantoms.add(path)
        raise _os_error(errno.ENOENT, path)

    def is_done(self, path: str) -> bool:
        """Whether a task's file is in done/ too (healed); not a copy, by which a person runs it
        again. In failed/ the second link may be the outdated name, of a task retried since."""
        if not self.heals:
            return False
        try:
            ours = self.lstat(path)
            return ours.st_nlink > 1 and os.path.samestat(ours, self.lstat(f"done/{_id_of(path)}"))
        except FileNotFoundError:
            return False  # not done; if its file is gone, whoever reads it will see

    # Moving

    def move(self, source: str, target: str) -> str:
        target = self._free_path(target)
        with self._found_moved(source, target):
            return super().move(source, target)
        return target

    def _free_path(self, path: str) -> str:
        """Return the path of a keyed task that is to wait, with more attempts if another record is
        there (healed): it may be the newer one, and may be lost."""
        is_at_risk = self.heals and _state_of(path) in _WAITING_DIRS and _is_keyed(_id_of(path))
        while is_at_risk and self.exists(path):
            name = _task_name(_stamp_of(path), _attempts_of(path) + 1, _id_of(path))
            path = f"{_state_of(path)}/{name}"
        return path

    def move_over(self, source: str, target: str, must_exist: bool = False) -> None:
        with self._found_moved(source, target):
            super().move_over(source, target, must_exist)

    @contextmanager
    def _found_moved(self, source: str, target: str) -> Iterator[None]:
        """Suppress a FileNotFoundError of the block if its rename was carried out (replies); but of
        a lease that was over before, another delivery may have ended the task."""
        before = None
        is_lease = _state_of(source) == "inflight"
        if not (self.heals or (is_lease and _stamp_of(source) <= self.clock.now_ns())):
            before = os.lstat(self.root + source)
        try:
            yield
        except FileNotFoundError:
            if before is None or not self._was_moved(before, source, target):
                raise

    def _was_moved(self, before: os.stat_result, source: str, target: str) -> bool:
        """Whether a file is where it was to go, and not where it was any more. It may have been
        taken on from there; but from creating/ others only sweep what is old by the wall clock: our
        monotonic clock stands still while this host is suspended."""
        if self.exists(source):
            return False
        is_ours = _state_of(source) == "creating"
        if not target or (is_ours and _wall_ns() < before.st_mtime_ns + _LEFTOVER_NS // 2):
            return True
        return self.exists(target) and self.lstat(target).st_ino == before.st_ino

    def shrink_pending(self, aside: str) -> None:
        """Do nothing: other hosts may look into the old directory for long (stale)."""

    @_afresh
    def open_lock(self, path: str, flags: int = _LOCK_FLAGS) -> _FileLock:
        return _SharedLock(self.root + path, flags, self.root)


class _SharedLeaseDir(_LeaseDir):
    """Does not claim what is done (healed), nor miss what it has claimed (replies)."""

    _files: _SharedFiles

    def claim(self, source: str, lease: _Lease) -> bool:
        if not super().claim(source, lease):
            if not self._was_claimed(lease.path):
                return False
            self.unread[lease.path] = source
        if not self._files.is_done(lease.path):
            return True
        _log().warning("%s, which came back, is removed: its task is done", lease.path)
        self._files.remove(lease.path)
        self.unread.pop(lease.path, None)
        self.orphans[lease.path] = None  # should it stay
        return False

    def _was_claimed(self, lease: str) -> bool:
        """Whether a claim that failed was carried out all the same."""
        if self._files.heals:
            return False
        try:
            return os.path.basename(lease) in os.listdir(self.path)
        except OSError:
            self.orphans[lease] = None  # should it be there after all
            self._worker.house.look_again()  # our directory is gone
            return False


def _younger(newer: str, path: str) -> str:
    """Return a payload in keys/ if it is behind the task at `path`; "": it came back (healed)."""
    return newer if _id_of(newer) > _id_of(path) else ""


class _SharedKeys(_Keys):
    """Finds keyed tasks by listings, under the locks of their keys: there are no files of states
    (stale). A phantom has no key."""

    _files: _SharedFiles

    @contextmanager
    def lock(self, tag: str, wait: bool = True) -> Iterator[_States]:
        """RACE: a host that was cut off lost the lock, and put a payload beside that of another."""
        with super().lock(tag, wait) as states:
            for path in states.outdated:
                self._files.remove(path)
            yield states

    def _load(self, tag: str, but: str = "") -> _States:
        """Return the states of a hash as the directories tell them, without the file at `but`."""
        for _ in range(_MAX_LISTINGS):
            with suppress(FileNotFoundError):  # RACE: it moved after it was listed
                return self._listed(tag, but)
        return self._listed(tag, but)

    def _listed(self, tag: str, but: str) -> _States:
        """Do as _load(). Raises FileNotFoundError if a task moves meanwhile."""
        states = _States()
        for entry in self._files.find("keys", *_LIVE):
            if _tag_of(entry.id) != tag or entry.path == but or self._files.is_done(entry.path):
                continue
            if name := self._key_at(entry):
                path, newer = states[name]
                if entry.directory == "keys":
                    older, newer = sorted((newer, entry.path), key=_id_of)
                    states[name] = path, newer
                    if older and _id_of(older) != _id_of(newer):
                        states.outdated += (older,)
                elif entry.id >= _id_of(path):  # an older one has come back (healed)
                    states[name] = entry.path, _younger(newer, entry.path)
        return states

    def _key_at(self, entry: _Entry) -> str:
        """Do as _key_in(). Raises FileNotFoundError for a new phantom: its task may have moved to
        what was listed before."""
        was_phantom = entry.path in self._files.phantoms
        try:
            return self._key_in(entry.path)
        except FileNotFoundError:
            if not was_phantom:
                raise
            return ""

    def _save(self, tag: str, states: _States, sync: bool = False) -> None:
        if sync:
            self._make_dir("keys")

    def may_have_task(self, name: str) -> bool:
        return True

    def newest_of(self, entry: _Entry) -> str:
        tag = _tag_of(entry.id)
        is_behind = any(_tag_of(newer.id) == tag for newer in self._files.entries("keys"))
        return super().newest_of(entry) if is_behind else entry.path

    def _is_alone(self, name: str, lease: str) -> bool:
        return False

    def _gave_way(self, states: _States, name: str, lease: str) -> bool:
        """Do as on a local file system; but wait, uncounted, for an older task that runs, or whose
        lease came back, and make a dead letter of one that does not (healed). Of two that were
        claimed at once, each lists the other."""
        directory, ident = os.path.dirname(lease), _id_of(lease)
        if os.path.basename(lease) not in self._files.names(directory):
            raise _os_error(errno.ENOENT, lease)
        path, newer = self._load(_tag_of(lease), but=lease)[name]
        other = _id_of(path)
        if other > ident:
            self._end_second(name, lease, path)
            return True
        if path and other < ident:
            left_ns = self._worker.left_ns(path) if _state_of(path) == "inflight" else 0
            if left_ns > 0:
                due_ns = _wall_ns() + min(left_ns, int(_STALE_S * 1e9))
                target = f"scheduled/{_task_name(due_ns, _attempts_of(lease) - 1, ident)}"
                self._worker.note(self._files.move(lease, target))
                return True
            self._end_second(name, path, lease)
        states[name] = lease, _younger(newer, lease)
        return False


class _SharedNumbers(_Numbers):
    """The name of an empty file has the last number: it is listed though contents are stale, and of
    two hosts that rename it, one fails."""

    # RACE: a host that saw the ticket stale may remove it only now, and take its turn. So ours must
    # not be the next, though it is there, and young again. A quarter less: clocks differ.
    late = 0.75
    _parse = re.compile(r"last~[0-9]{20}").fullmatch

    def draw(self, last: _FileLock, highest: int) -> int:
        noted = self._noted()
        number = max(int(noted[5:] or 0), highest) + 1
        if noted:
            os.rename(self._root + noted, f"{self._root}last~{number:020d}")
        else:
            os.close(os.open(f"{self._root}last~{number:020d}", _CREATE_FLAGS, 0o666))
        return number

    def _noted(self) -> str:
        return max(filter(self._parse, self._files.names("")), default="")

    def check(self, number: int) -> None:
        """RACE: another host drew a higher one, was first in line, and may have its turn."""
        if self._noted() > f"last~{number:020d}":
            raise FileExistsError(errno.EEXIST, "another host was faster", self._root)

    def remove_dir(self) -> None:
        """Leave the directory: another host may take a lock that was removed for the one there."""


# ==================================================================================================
# 21. Command line: a function for each command, with its arguments. Its docstring is the help.
#     Invariant: it calls public methods of FemtoQueue and FemtoTask only. Of the other rooms it
#     uses _WorkerPool (17), _readable (15), _CommandFailed, _end_s (3), and parsers of names (2).
# ==================================================================================================


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0 ok, 1 nothing there or a condition not met,
    2 wrong use or trouble. Errors are one line on standard error. Raises SystemExit, with the
    same statuses, where the command line alone decides: --help, --version, wrong use."""
    try:
        _open_closed_streams()
        options = _parse_arguments(sys.argv[1:] if argv is None else argv)
        status: int | None = options.run(options)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # the reader, as `head`, has ended
        return 0
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    except (FemtoQueueError, OSError, ValueError, MemoryError) as error:
        _write_error(str(error) or type(error).__name__)
        return 1 if isinstance(error, FemtoQueueError) else 2
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # it was reported, or nobody reads it; the flush at exit must succeed
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed (`>&-`): otherwise the next
    file that is opened, a task's, would get its descriptor and what is printed to it."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # then its descriptor is the lowest free one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+", closefd=False))


def _write_error(text: str) -> None:
    """Write one line to standard error; if that fails, there is no other place to report it."""
    with suppress(OSError):
        print("femtoqueue:", *text.splitlines(), file=sys.stderr, flush=True)


# Command line: how commands are declared, and parsed

_Run = Callable[[Any], "int | None"]  # a command: takes options, and returns the exit status
_Argument = tuple[str, list[str], dict[str, Any]]  # its group, and what add_argument() takes
_COMMANDS: dict[str, tuple[_Run, tuple[_Argument, ...]]] = {}


def _command(*arguments: _Argument) -> Callable[[_Run], _Run]:
    """Declare a function _NAME_command as the command NAME, and the arguments that follow DIR."""

    def declare(run: _Run) -> _Run:
        _COMMANDS[run.__name__[1:].removesuffix("_command")] = run, arguments
        return run

    return declare


def _argument(words: str, text: str = "", group: str = "", **settings: Any) -> _Argument:
    """Declare an argument by its names and, in capitals, what it takes: a flag takes nothing. One
    of a group may be given."""
    *names, value = words.split()
    if isinstance(settings.get("default"), str):
        text += " (default: %(default)s)"
    if value.startswith("-"):
        return group, [*names, value], {"action": "store_true", "help": text}
    return group, names, {"type": _TYPES.get(value), "metavar": value, "help": text, **settings}


def _parse_arguments(argv: list[str]) -> Any:
    """Return the options of a command line; `run` is its command. Exits if the line is wrong."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            _write_error(f"{message}; see {self.prog} --help")  # one line, without the usage
            sys.exit(2)

    parser = Parser("femtoqueue", description=_SUMMARY, epilog=_NOTES)
    parser.add_argument("--version", action="version", version=f"femtoqueue {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    default_dir = os.environ.get("FEMTOQUEUE_DIR")
    for name, (run, arguments) in _COMMANDS.items():
        text = re.sub("(?m)^    ", "", run.__doc__ or "")
        command = commands.add_parser(name, help=text.split("\n")[0], description=text)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.set_defaults(run=run, error=command.error, dir=default_dir)
        if not default_dir:
            command.add_argument("dir", metavar="DIR", help="the queue; or set FEMTOQUEUE_DIR")
        groups: dict[str, Any] = defaultdict(command.add_mutually_exclusive_group, {"": command})
        for group, names, settings in arguments:
            groups[group].add_argument(*names, **settings)
    if not argv or argv[0] not in commands.choices:
        parser.parse_args(argv[:1])  # exits
    dashes = argv.index("--") if argv[0] in ("push", "work") and "--" in argv else len(argv)
    options = argparse.Namespace(after_dashes=argv[dashes + 1 :])
    return commands.choices[argv[0]].parse_intermixed_args(argv[1:dashes], options)


def _invalid(text: str, wanted: str) -> Exception:
    import argparse

    return argparse.ArgumentTypeError(f"invalid {text!r}; {wanted}")


def _seconds(text: str) -> float:
    form = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ms|s|m|h|d|)", text)
    if form is None:
        raise _invalid(text, "a TIME is 500ms, 30s, 5m, 2h, 7d, or 1.5 for seconds")
    return float(form[1]) * {"ms": 0.001, "m": 60, "h": 3600, "d": 86400}.get(form[2], 1)


def _timestamp(text: str) -> float:
    """Return seconds since the epoch: local time, unless an offset says otherwise."""
    from datetime import datetime

    with suppress(ValueError):
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    raise _invalid(text, f"WHEN is {_TIMES}")


def _id_argument(text: str) -> str:
    if _parse_id(_id_of(text)):
        return text
    raise _invalid(text, "an ID is the end of a task's name, or the path that `pop` printed")


_SUMMARY = "A durable task queue in a directory, DIR. COMMAND --help says more."
_NOTES = """If FEMTOQUEUE_DIR is set, no word is DIR. A TIME is 500ms, 30s, 5m, 2h, 7d, or seconds.
Status: 0 ok, 1 nothing there or a condition not met, 2 wrong use or trouble, 128 + a
signal's number."""
_TIMES = "2026-12-01T08:00 (local), or T08:00+01:00"
_TYPES = {"TIME": _seconds, "WHEN": _timestamp, "ID": _id_argument, "N": int}
_IDS = _argument("ids ID", nargs="+")
_LEASE = _argument("--timeout TIME", "length of the lease", default="30s")
_SYNC = _argument("--sync", "survive power loss, not only the death of processes")


# Command line: what several commands use


def _open_queue(options: Any, **settings: Any) -> FemtoQueue:
    """Open the queue in DIR. Raises ValueError if there is none."""
    try:
        os.stat(os.path.join(os.path.abspath(options.dir), "pending", ""))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{options.dir}: there is no queue; push makes one") from None
    return FemtoQueue(options.dir, **settings)


def _for_each_id(options: Any, act: Callable[[FemtoQueue, str], object], **settings: Any) -> int:
    """Act on each ID. Report those that are in another state, go on, and return status 1 then."""
    status = 0
    with _open_queue(options, **settings) as q:
        for name in options.ids:
            try:
                act(q, name)
            except FemtoQueueError as error:
                _write_error(str(error))
                status = 1
    return status


def _time_text(seconds: float | None) -> str:
    """Return a span of time as a TIME: 7s, 3.1m, 2.1h, 4.1d."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if abs(seconds) >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def _task_row(task: FemtoTask) -> dict[str, Any]:
    """Return what `ls` and `show` tell of a task, in the order of the table."""
    until = task.until
    return {
        "state": task.state,
        "id": task.id,
        "age_s": round(time.time() - task.created.timestamp(), 3),
        "attempts": task.attempts,
        "size_bytes": task.size_bytes,
        "left_s": None if until is None else round(until.timestamp() - time.time(), 3),
        "key": task.key,
        "node": task.node,
    }


def _cell(name: str, value: Any) -> str:
    """Return a field of a row as text; a key as one word, percent-encoded as in a header."""
    if value is None:
        return "-"
    return _quote_key(value) if name == "key" else str(value)


def _task_table(tasks: Iterable[FemtoTask]) -> Iterator[str]:
    form = "{:9} {:29} {:>6} {:>3} {:>8} {:>6} {} {}"
    yield form.format("STATE", "ID", "AGE", "TRY", "BYTES", "LEFT", "KEY", "NODE")
    for task in tasks:
        row = _task_row(task)
        cells = (_time_text(row[it]) if it.endswith("_s") else _cell(it, row[it]) for it in row)
        yield form.format(*cells)


def _fields(row: dict[str, Any]) -> list[str]:
    return [f"{name:20} {_cell(name, value)}" for name, value in row.items()]


# Command line: push


@_command(
    _argument("payloads PAYLOAD", "a task", nargs="*", default=()),
    _argument("--lines", "push each line of standard input"),
    _argument("-0 --null", "push each piece that a zero byte ends"),
    _argument("--delay TIME", "wait for TIME before it joins the queue", "when"),
    _argument("--at WHEN", f"wait until {_TIMES}", "when"),
    _argument("--key KEY", "replace the payload of this key's task, if one waits"),
    _argument("--if-in-flight HOW", "buffer, update or reject", default="buffer"),
    _SYNC,
)
def _push_command(options: Any) -> None:
    """Add tasks, and print their ids.

    Put a PAYLOAD that begins with - after --; without any, standard input is one.
    While KEY's task is leased, PAYLOAD waits behind it, or updates it (see HOW).

    Example: femtoqueue push jobs 'resize 42.png'
    """
    words = [*options.payloads, *options.after_dashes]
    end = b"\0" if options.null else b"\n" if options.lines else b""
    if words and end:
        options.error("--lines and --null read standard input: leave PAYLOAD out")
    if options.key is None and options.if_in_flight != "buffer":
        options.error("--if-in-flight goes with --key")
    payloads: Iterable[bytes] = map(os.fsencode, words)
    if end:
        payloads = _read_pieces(sys.stdin.buffer, end)
    elif not words:
        payloads = [sys.stdin.buffer.read()]
        if payloads == [b""]:
            options.error("standard input is empty; for an empty task, give '' as PAYLOAD")
    due_s = options.at if options.delay is None else time.time() + options.delay
    with FemtoQueue(options.dir, sync_after_write=options.sync) as q:
        push = q.push if due_s is None else functools.partial(q.schedule, time_us=due_s * 1e6)
        for payload in payloads:
            ident = push(payload, key=options.key, if_in_flight=options.if_in_flight)
            with suppress(BrokenPipeError):  # the other payloads are pushed all the same
                print(ident, flush=True)


def _read_pieces(stream: Any, end: bytes) -> Iterator[bytes]:
    """Yield the pieces of a stream, each as soon as the byte that ends it is there."""
    rest = bytearray()
    while chunk := stream.read1(1 << 16):
        rest += chunk
        if end in chunk:
            *pieces, rest = rest.split(end)
            yield from map(bytes, pieces)
    if rest:
        yield bytes(rest)


# Command line: work

_GRACE_S = 5.0  # between a signal to a command's group and SIGKILL
_REPORT_S = 10.0  # between two lines of progress
_SH_NAME = "femtoqueue work"  # what sh calls itself in messages; CMD may be a femtoqueue
# Run by sh, in the process that becomes CMD: standard input is the watchdog's pipe at first, and
# then the payload. CRASH: if the worker dies after its fork(), the pipe has a writer until CMD is
# known: the watchdog kills it. Not a preexec_fn: that would run Python in a fork with threads.
_START = 'echo $$ >&0; payload=$1; shift; exec "$@" <"$payload"'


@_command(
    _argument("words CMD", "what to run for each task", nargs="*", default=(), metavar="-- CMD"),
    _argument("-j --jobs N", "run N at a time", default="1"),
    _argument("--drain", "exit when no task waits, due or not, or is in flight"),
    _argument("--idle-timeout TIME", "exit when this worker got nothing for TIME"),
    _argument("--time-limit TIME", "take nothing more after TIME, and exit"),
    _argument("--max-attempts N", "give up after N tries; 0: never", default="3"),
    _argument("--retry-delay TIME", "at most, before a second try; doubles", default="1s"),
    _LEASE,
    _argument("--task-timeout TIME", "kill CMD after TIME (default: never)"),
    _argument("--output-dir DIR", "write output to DIR/ID.out and .err"),
    _argument("--keep-done TIME", "delete what is done after TIME", default=True),
    _argument("--node NODE", "name of this worker (default: a fresh one)"),
    _SYNC,
    _argument("-q --quiet", "report no progress"),
)
def _work_command(options: Any) -> int:
    """Run CMD for each task, with the payload on its standard input.

    {} in an argument of CMD is replaced by the payload. Give it to `sh -c` as an
    argument of its own: within the script, it would be run as code. A payload that
    can't be an argument (a zero byte, or too long) is a dead letter at once. The
    environment has FEMTOQUEUE_ID, FEMTOQUEUE_ATTEMPT and FEMTOQUEUE_KEY.

    If CMD exits with 0, the task is done. Else it is tried again later, and in the
    end a dead letter, whose reason is the end of CMD's standard error. Output comes
    by whole lines with -j 2 or more, else at once. Progress is a line on standard
    error at the end, and when a task ends 10 s or more after the last such line.

    SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or Ctrl-C: the commands that run are finished.
    A second one (at least 0.3 s later) goes to their process groups, which are
    killed 5 s later; tasks are given back. A scheduler may signal the commands,
    too: what fails then, or dies of such a signal, is given back to the front as no
    failed try. Let --task-timeout be less than a job may take: else its task comes
    first in the next one.

    If this worker is killed, its commands are, too. A lost lease (by a stop longer
    than --timeout, or by `release`) does not end CMD.

    Status 1: with --drain, a task of DIR failed for good, or work is left.

    Example: femtoqueue work jobs -j 2 --drain -- ./resize --fast
    """
    import logging
    import shutil

    command = options.after_dashes
    if options.words or not command:
        options.error("put the command after --, as in: work DIR -- CMD ARGS")
    if options.jobs < 1:
        options.error("-j must be 1 or more")
    if shutil.which(command[0]) is None:
        options.error(f"{command[0]}: command not found")
    if not (hasattr(os, "fork") and os.path.isdir("/dev/fd")):
        options.error("no fork() or /dev/fd here; use FemtoQueue.work() in a program of your own")
    if options.output_dir is not None:
        os.makedirs(options.output_dir, exist_ok=True)
    watchdog = _start_watchdog()  # before there is a thread
    with FemtoQueue(
        *(options.dir, options.node, options.timeout * 1000, options.sync),
        keep_done=options.keep_done,
        max_attempts=options.max_attempts or None,
        retry_delay_s=options.retry_delay,
    ) as q:
        pool = _CommandPool(q, watchdog, options)
        logging.basicConfig(stream=pool, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        status = pool.run_reported()
    if status > 128:  # a thread that is stuck in a write may hold the log, which an exit flushes
        os._exit(status)
    return status


class _CommandPool(_WorkerPool):
    """The pool of `work`: its handler runs CMD for a task. At the second signal commands are ended;
    threads give the tasks back. Invariant: a process that may run is in _processes. _output is held
    while standard output or error is written, so that lines are not mixed."""

    # HUP: the terminal is gone. Schedulers send USR1 and USR2 as a warning.
    stops = (*_WorkerPool.stops, "SIGHUP", "SIGUSR1", "SIGUSR2")

    def __init__(self, queue: FemtoQueue, watchdog: int, options: Any) -> None:
        limits = {"idle_timeout_s": options.idle_timeout, "time_limit_s": options.time_limit}
        super().__init__(queue, self._run_command, options.jobs, options.drain, **limits)
        self._is_threaded = True  # no signal must come between a command's start and its report
        self._watchdog, self._options = watchdog, options
        self._processes: set[Any] = set()
        self._output = threading.Lock()
        self._is_told = threading.Event()  # that the first signal came

    def run_reported(self) -> int:
        """Work until told to stop, report what was done, and return the exit status."""
        before = self._dead_letters()
        self._next_report_s = time.monotonic() + _REPORT_S
        try:
            self.run()
        except (SystemExit, RuntimeError) as error:  # RuntimeError: no more threads
            self.write(f"femtoqueue: {error}\n")
            self._report()
            return 2
        if len(self.signals) > 1:  # a thread that is stuck in a write may hold _output
            return 128 + self.signals[-1]
        self._report()
        has_failed = bool(self.counts["failed"] or self._dead_letters() - before)
        return int(self._drain and (has_failed or not self._queue.join(0)))

    def _count(self, task: FemtoTask, outcome: str) -> None:
        super()._count(task, outcome)
        if time.monotonic() >= self._next_report_s and len(self.signals) < 2:
            self._report()

    def _report(self) -> None:
        """Write how many tasks ended how, and how many wait."""
        if self._options.quiet:
            return
        began_s, self._next_report_s = time.monotonic(), float("inf")  # not two threads at once
        with suppress(OSError):  # pop() meets it, too
            waiting = sum(map(len, map(self._names, _WAITING_DIRS)))
            counts = [f"{name} {count}, " for name, count in self.counts.items()]
            self.write(f"femtoqueue: {''.join(counts)}waiting {waiting}\n")
        now_s = time.monotonic()
        self._next_report_s = now_s + max(_REPORT_S, 20 * (now_s - began_s))

    def _names(self, directory: str) -> set[str]:
        path = os.path.join(os.path.abspath(self._queue.data_dir), directory)
        return {*filter(_FORMS[directory], os.listdir(path))}

    def _dead_letters(self) -> set[str]:
        """Return the names in failed/, if the exit status is to tell of those that pop() sets aside
        there, and they may be seen."""
        if self._drain:
            with suppress(PermissionError):
                return self._names("failed")
        return set()

    def write(self, text: str) -> None:
        """Write to standard error, also for the log."""
        with suppress(OSError):  # the terminal is gone; what runs is finished
            self._write(2, text.encode("utf-8", "backslashreplace"))

    def _write(self, fd: int, data: bytes) -> None:
        if data:
            with self._output:
                while data:
                    data = data[os.write(fd, data) :]

    def _pass_on(self, fd: int, data: bytes) -> None:
        """Write what a command wrote. Ctrl-C ends `| tee log`, too, and a terminal may be gone:
        what runs is finished then, and nobody hears of it."""
        try:
            self._write(fd, data)
        except OSError as error:
            is_gone = fd <= 2 and error.errno in (errno.EPIPE, errno.EIO)
            if not (is_gone and self._is_told.wait(_ONE_SIGNAL_S)):
                raise

    def _run_command(self, task: FemtoTask) -> None:
        """Run CMD for a task. Raises _CommandFailed unless that ends with status 0, and SystemExit
        if it can't be run: that is no fault of the task's."""
        import tempfile

        fds, output_dir = [1, 2], self._options.output_dir  # where its output goes
        try:
            with ExitStack() as files:
                payload = files.enter_context(tempfile.TemporaryFile())
                try:
                    payload.write(task.data)
                    payload.seek(0)  # and it is flushed; /dev/fd may share the position with us
                except OSError:  # perhaps it alone is too large: others' turn comes first
                    self._queue.release(task, counted=False)
                    raise
                if output_dir is not None:
                    paths = [f"{output_dir}/{task.id}.{it}" for it in ("out", "err")]
                    fds = [files.enter_context(open(it, "ab")).fileno() for it in paths]
                process = files.enter_context(self._start(task, payload.fileno()))
                self._follow(task, process, fds)
        except OSError as error:  # no descriptors, memory or room; nobody reads what it wrote
            raise SystemExit(error) from error

    def _tell_stop(self) -> None:
        """Tell of the first signal, in its handler, unless that would block."""
        import select

        self._is_told.set()
        with suppress(OSError, ValueError):
            if select.select([], [2], [], 0)[1]:
                os.write(2, b"\nfemtoqueue: finishing what runs; a second signal ends it\n")

    def _abort(self) -> None:
        """Pass the second signal to all commands that run, and wait until they have ended."""
        self._terminate([*self._processes], self.signals[-1])
        with self._changed:
            self._changed.wait_for(lambda: not self._running, 1.0)
        super()._abort()

    def _start(self, task: FemtoTask, payload: int) -> Any:
        """Start CMD in a process group of its own: a Ctrl-C is for the worker, which finishes."""
        import subprocess

        words = [os.fsencode(it).replace(b"{}", task.data) for it in self._options.after_dashes]
        env = {**os.environ, "FEMTOQUEUE_ID": task.id, "FEMTOQUEUE_ATTEMPT": str(task.attempts)}
        # As UTF-8, whatever the locale is.
        env["FEMTOQUEUE_KEY"] = os.fsdecode((task.key or "").replace("\0", "%00").encode())
        try:
            return subprocess.Popen(
                ["/bin/sh", "-c", _START, _SH_NAME, f"/dev/fd/{payload}", *words],
                env=env,
                stdin=self._watchdog,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[payload],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a zero byte
            if getattr(error, "errno", errno.E2BIG) != errno.E2BIG:
                raise
            text = f"the payload can't be an argument of the command, in place of {{}}: {error}"
            self._queue.fail(task, text)  # now: another try would end so, too
            raise _CommandFailed(text) from None

    def _follow(self, task: FemtoTask, process: Any, fds: list[int]) -> None:
        """Wait until the process of a task has ended, or its time is over, and judge that; see
        _run_command(). If it fails as this worker is told to stop, the task is given back."""
        self._processes.add(process)
        try:
            if len(self.signals) > 1:  # RACE: _abort() may not have seen this process
                raise SystemExit
            end_s = _end_s(self._options.task_timeout)
            status, tail = self._relay(process, fds, end_s)
            is_stopped = self._ended_by_stop(status, task)
            # CMD may be a shell whose program still saves its state: not twice at once.
            while is_stopped and self._is_alive(process):
                if time.monotonic() >= end_s:
                    self._terminate([process])
                time.sleep(0.05)
                self._relay(process, fds, time.monotonic() + 0.1)
        finally:
            self._forget(process)
        if status in (126, 127) and tail.startswith(f"{_SH_NAME}: "):  # says sh
            raise SystemExit(f"{self._options.after_dashes[0]} can't be run")
        if is_stopped:
            self._queue.release(task, front=True, counted=False)
        elif status != 0:
            if status is None:
                what = f"killed after {self._options.task_timeout:.9g}s"
            else:
                what = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
            raise _CommandFailed(f"{what}\n{tail}".rstrip())

    def _ended_by_stop(self, status: int | None, task: FemtoTask) -> bool:
        """Whether CMD failed as this worker is told to stop. RACE: a scheduler signals CMD and us;
        CMD may end of it before ours has come. So that is waited for, where it may be so."""
        if not status:
            return False
        may_be = not {-status, status - 128}.isdisjoint(self.stop_numbers)
        may_be |= task.attempts == self._options.max_attempts
        return self._is_told.wait(_ONE_SIGNAL_S * may_be)

    def _forget(self, process: Any) -> None:
        """Let a process be over, for us and for the watchdog."""
        if process.returncode is None:
            self._terminate([process])
        self._processes.discard(process)
        try:
            os.write(self._watchdog, b"-%d\n" % process.pid)
        except BrokenPipeError:
            if process.returncode:
                raise SystemExit("the watchdog of this worker was killed") from None

    def _relay(self, process: Any, fds: list[int], end_s: float) -> tuple[int | None, str]:
        """Relay what a process writes until it ends, or end_s. Return its exit status (None: it
        runs), and the end of its standard error."""
        import subprocess

        tail, rests = b"", dict.fromkeys(fds, b"")  # rests: of lines
        pipes = {process.stdout.fileno(): fds[0], process.stderr.fileno(): fds[1]}
        relay_end_s = end_s
        while pipes and time.monotonic() < relay_end_s:
            for pipe in _readable(pipes, 0.1):
                data, fd = os.read(pipe, 1 << 16), pipes[pipe]
                if fd == fds[1]:
                    tail = (tail + data)[-4096:]  # enough for a reason
                if not data:
                    del pipes[pipe]
                rests[fd] = self._write_lines(fd, rests[fd] + data)
            if process.poll() is not None:
                # What it left running in the background still has the pipes, and may write.
                relay_end_s = min(relay_end_s, time.monotonic() + 0.1)
        for fd, rest in rests.items():
            self._pass_on(fd, rest and rest + b"\n")
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._options.task_timeout and end_s - time.monotonic())
        return process.returncode, tail.decode("utf-8", "replace")

    def _write_lines(self, fd: int, data: bytes) -> bytes:
        """Write whole lines, and return the rest; where no others come between, write all."""
        end = data.rfind(b"\n") + 1
        if self._options.jobs == 1 or fd > 2 or len(data) - end > 1 << 16:  # too long to wait for
            end = len(data)
        self._pass_on(fd, data[:end])
        return data[end:]

    def _terminate(self, processes: list[Any], number: int = 15) -> None:  # SIGTERM
        """Signal the groups of processes, wait, and kill after _GRACE_S what still runs in them."""
        import signal

        end_s = time.monotonic() + _GRACE_S
        for process in processes:
            _signal_group(process.pid, number)
        while any(map(self._is_alive, processes)) and time.monotonic() < end_s:
            time.sleep(0.01)
        for process in processes:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def _is_alive(self, process: Any) -> bool:
        """Whether anything of a process's group still runs."""
        if process.poll() is not None:  # one that has ended is in it until then
            with suppress(ChildProcessError):  # it has others, if we are not init
                os.waitpid(-process.pid, os.WNOHANG)
        return _signal_group(process.pid, 0)


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; 0: only look. False: all of it has ended."""
    with suppress(OSError):
        os.killpg(group, number)
        return True
    return False


def _start_watchdog() -> int:
    """Fork a process that kills the commands of a worker that was killed: their tasks are delivered
    again at once, and must not be worked on twice. Return the pipe that it reads.

    A command writes its process group to the pipe itself, before it begins (see _START), and the
    worker writes when it has ended. The pipe ends when the worker is gone, and each command that
    was about to begin has either written or died: there is none that the watchdog doesn't know.
    """
    import signal

    # A parent may have left SIGCHLD ignored; each command would then seem to have ended well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading, writing = os.pipe()
    # Signals to all processes of a group, or of a scheduler's job, are not for the watchdog.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        return writing
    try:
        os.close(writing)
        os.setsid()
        groups: set[int] = set()
        for report in map(int, os.fdopen(reading, closefd=False)):
            (groups.add if report > 0 else groups.discard)(abs(report))
        for group in groups:
            _signal_group(group, signal.SIGKILL)
    finally:
        os._exit(0)


# Command line: leases


@_command(
    _LEASE,
    _argument("--wait TIME", "wait for TIME if there is no task", default="0s"),
    _argument("--node NODE", "name of the worker", default="cli"),
    _argument("--payload", "print the payload"),
    _argument("--key KEY", "lease the task of this key, out of turn", "which"),
    _argument("--id ID", "lease this task, due or not", "which"),
)
def _pop_command(options: Any) -> int:
    """Lease the oldest task, and print the path of its file in DIR.

    The lease lasts until done, fail or release, or for --timeout. These take the
    path, which stands for this delivery only, or the id, its end. With --payload,
    the path goes to standard error. Status 1: there is no task.

    Example: task=$(femtoqueue pop jobs) && tail -n +2 "jobs/$task"
             femtoqueue done jobs "$task"
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
                sys.stdout.flush()
            print(task.path, file=sys.stderr if options.payload else sys.stdout, flush=True)
        except BaseException as error:  # a lease that was not printed can not be settled
            q.release(task, front=True, counted=False)
            if isinstance(error, BrokenPipeError):  # elsewhere that is no failure
                raise FemtoQueueError(f"task {task.id} is given back: nobody reads") from None
            raise
    return 0


@_command(_IDS)
def _cancel_command(options: Any) -> int:
    """Delete tasks that wait, due or not.

    A task in another state stays as it is. Status 1: one of them did not wait,
    or the queue is paused.

    Example: femtoqueue cancel jobs 01795243500123456789-0a1b2c3d
    """

    def cancel(q: FemtoQueue, name: str) -> None:
        task = q.take(id=_id_of(name))
        if task is None:
            raise TaskNotFound(f"task {_id_of(name)} is not waiting, or the queue is paused")
        q.done(task)

    return _for_each_id(options, cancel, keep_done=False)


@_command(_IDS)
def _done_command(options: Any) -> int:
    """End tasks that `pop` leased: they move to done/.

    Example: femtoqueue done jobs "$task"
    """
    return _for_each_id(options, lambda q, name: q.done(q.attach(name)))


@_command(_IDS, _argument("--reason TEXT", "why it failed"))
def _fail_command(options: Any) -> int:
    """Make dead letters of tasks that are in flight, with a reason.

    Example: femtoqueue fail jobs "$task" --reason 'no such image'
    """
    return _for_each_id(options, lambda q, name: q.fail(q.attach(name), options.reason))


@_command(
    _argument("ids ID", nargs="*"),
    _argument("--all", "all that are in flight", "which"),
    _argument("--node NODE", "all that the worker of that name has in flight", "which"),
    _argument("--front", "to the front of the queue", "where"),
    _argument("--delay TIME", "to the back, after TIME", "where", default="0s"),
)
def _release_command(options: Any) -> int:
    """Give back tasks that are in flight.

    A worker that holds such a task loses its lease, and can change nothing any
    more. With --all or --node, a line says how many they were.

    Example: femtoqueue release jobs "$task" --delay 5m
    """
    if bool(options.ids) == (options.all or options.node is not None):
        options.error("give IDs, --all or --node")
    to = {"front": options.front, "delay_s": options.delay}
    if options.ids:
        return _for_each_id(options, lambda q, name: q.release(q.attach(name), **to))
    with _open_queue(options) as q:
        tasks = [it for it in q.tasks("inflight", data=False) if options.node in (None, it.node)]
        print(f"released {sum(_release(q, it, to) for it in tasks)}")
    return 0


def _release(q: FemtoQueue, task: FemtoTask, to: dict[str, Any]) -> bool:
    """Give back one that was seen in flight; False if that delivery has ended."""
    for _ in range(3):  # RACE: renewed just now, it has another path
        with suppress(LeaseLost):
            held = q.attach(task.id)
            if held.attempts == task.attempts:
                q.release(held, **to)
                return True
    return False


@_command(_IDS, _LEASE)
def _extend_command(options: Any) -> int:
    """Renew leases that `pop` took, and print their new paths.

    A worker that is at work on such a task would lose its lease by it.

    Example: task=$(femtoqueue extend jobs "$task" --timeout 5m)
    """

    def renew(q: FemtoQueue, name: str) -> None:
        task = q.attach(name)
        q.extend(task, options.timeout * 1000)
        print(task.path)

    return _for_each_id(options, renew)


# Command line: views


@_command(
    _argument("states STATE", nargs="*", default=()),
    _argument("--all", "list every state, done too"),
    _argument("--json", "print a JSON object on each line"),
)
def _ls_command(options: Any) -> None:
    """List the tasks that are alive or failed, or those of each STATE.

    A STATE is pending, scheduled, inflight, done or failed; --all means all of
    them. Columns: state, id, age, attempts (-: not known), size in bytes
    (-: corrupt), time until the lease ends or the task is due, key, node.

    Example: femtoqueue ls jobs failed
    """
    import json

    states = options.states or [it for it in STATES if options.all or it != "done"]
    q = _open_queue(options)
    tasks = itertools.chain(*[q.tasks(state, data=False) for state in states])
    rows = map(json.dumps, map(_task_row, tasks))
    for line in rows if options.json else _task_table(tasks):
        print(line)


@_command(_argument("id ID"), _argument("--payload", "print the payload only"))
def _show_command(options: Any) -> None:
    """Print the fields of a task, and its payload.

    Example: femtoqueue show jobs 01795243500123456789-0a1b2c3d
    """
    ident = _id_of(options.id)
    task = _open_queue(options).peek(ident)
    if task is None:
        raise TaskNotFound(f"no task {ident}")
    if not options.payload:
        reason = {} if task.error is None else {"reason": task.error}
        print(*_fields(_task_row(task) | reason), "\n", sep="\n", end="", flush=True)
    sys.stdout.buffer.write(task.data)


@_command(
    _argument("--json", "print a JSON object"),
    _argument("--max-age TIME", "status 1 if a task is due for longer", default=float("inf")),
    _argument("--max-pending N", "status 1 if more tasks are pending", default=float("inf")),
)
def _stat_command(options: Any) -> int:
    """Count the tasks in each state; for monitors, too.

    Example: femtoqueue stat jobs --max-age 10m
    """
    import json

    figures = _figures(_open_queue(options))
    print(*[json.dumps(figures)] if options.json else _fields(figures), sep="\n")
    age_s = figures["oldest_pending_age_s"] or 0
    return int(figures["pending"] > options.max_pending or age_s > options.max_age)


def _figures(q: FemtoQueue) -> dict[str, Any]:
    stats = q.stats()
    live = Counter(node.liveness for node in stats.nodes)
    names = (*STATES, "expired", "buffered", "oldest_pending_age_s")
    figures = {name: getattr(stats, name) for name in names}
    figures |= {f"workers_{it}": live[it] for it in ("alive", "dead", "unknown")}
    return {**figures, "paused": q.paused}


@_command(_argument("--interval TIME", "between two looks", default="1s"))
def _top_command(options: Any) -> None:
    """Show the queue live: what `stat` and `ls DIR inflight` say.

    Ctrl-C ends it. On a terminal it clears the screen for each look.

    Example: femtoqueue top jobs
    """
    import shutil

    q = _open_queue(options)
    while True:
        columns, rows = shutil.get_terminal_size((999, 999))  # no terminal: it all fits
        table = _task_table(q.tasks("inflight", data=False))
        title = f"{options.dir} {time.strftime('%H:%M:%S')}"
        lines = itertools.chain([title], _fields(_figures(q)), table)
        text = "\n".join(line[:columns] for line in itertools.islice(lines, rows - 1))
        print("\x1b[H\x1b[2J" * sys.stdout.isatty() + text, flush=True)
        time.sleep(min(options.interval, 86400))


# Command line: maintenance


@_command()
def _pause_command(options: Any) -> None:
    """Hand out no task in any process, until resume.

    Example: femtoqueue pause jobs
    """
    _open_queue(options).pause()


@_command()
def _resume_command(options: Any) -> None:
    """Hand tasks out again after pause.

    Example: femtoqueue resume jobs
    """
    _open_queue(options).resume()


@_command(_argument("--repair", "repair what is safe to repair"))
def _check_command(options: Any) -> int:
    """Look for what is odd in DIR, and print a line for each finding.

    It reads every task. Status 1: something is odd, and was not repaired.

    Example: femtoqueue check jobs --repair
    """
    findings = _open_queue(options).check(options.repair)
    for kind, path, text, repaired in findings:
        print(kind, ascii(path)[1:-1], text, "mended" if repaired else "odd", sep="\t")
    return int(not all(it.repaired for it in findings))


@_command(_argument("ids ID", nargs="*"), _argument("--all", "retry all that failed"))
def _retry_command(options: Any) -> int:
    """Put failed tasks at the back of the queue, as if they were new.

    Example: femtoqueue retry jobs --all
    """
    if bool(options.ids) == options.all:
        options.error("which tasks? give each ID, or --all")
    if options.ids:
        return _for_each_id(options, lambda q, name: q.retry(_id_of(name)))
    print(_open_queue(options).retry_failed())
    return 0


@_command(
    _argument("--older-than TIME", "delete what ended more than TIME ago", required=True),
    _argument("--failed", "delete dead letters, too"),
)
def _purge_command(options: Any) -> None:
    """Delete tasks that were done long ago, and print how many.

    Example: femtoqueue purge jobs --older-than 7d
    """
    print(_open_queue(options).purge(options.older_than, _ENDED if options.failed else "done"))


if __name__ == "__main__":
    sys.exit(main())
