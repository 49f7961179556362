"""femtoqueue: a durable task queue in one file. It needs only the standard library.

    from femtoqueue import FemtoQueue

    q = FemtoQueue("jobs")                  # many processes may use one directory
    q.push(b"resize 42.png")
    while task := q.pop():
        print(task.id, task.data)           # the work; then:
        q.done(task)                        # or q.fail(task, "why"), q.release(task)

A queue is a directory, and a task is a file. The directory of the file is the task's state, and one
rename() is every change of state:

    push ------------> pending/ ---- pop ----> inflight-<node>/ ---- done ----> done/
                        ^  ^  ^                     |     |
    schedule            |  |  +-- release, end -----+     +--------- fail ----> failed/
       |                |  |      of the lease                                    |
       +-> scheduled/ --+  +------------------------ retry ----------------------+
              when due

    data_dir/
      creating/           files being written; not tasks; removed after an hour
      pending/            waiting             <id>  or  <order>~<attempts>~<id>
      scheduled/          waiting for a time  <due>~<attempts>~<id>
      inflight-<node>/    leased to a worker  <deadline>~<attempts>~<boot>~<id>
      done/  failed/      ended               <id>; the reason is in failed/<id>.error
      keys/               a link for each key <hash>, to the key's task: see Keys
                          newer payloads      <id>  or  <due>~0~<id>  or  update~<id>
      locks/              locks of keys       <last two digits of the hash>; never removed
      checkpoints/        saved progress      <id>
      clock-<boot>        the anchor of the queue clock for one boot
      PAUSED              while this file exists, workers take no tasks (`touch` makes it)

An id is <order>-<tag>. <order> has 20 digits: the time of the push on the queue clock, in
nanoseconds. <tag> has 16 hex digits. For a task without a key, it is the random tag of the queue
object that pushed the task, and begins with 0 to 7. For a task with a key, it is the hash of the
key, and begins with 8 to f. <boot> has 8 hex digits, and stands for one boot of a kernel and one
mount. 00000000 marks a detached lease. Every name of a task begins with a number of 20 digits: an
order, a due time or a deadline. So the sorted names of a directory are in the order of these
numbers. A record, the file of a task, begins with one line: `FQ1 <crc32> <length>`, and the key if
the task has one. The payload follows as given.

If two workers rename the same task, one rename succeeds. The other worker gets ENOENT, and takes
the next task. A worker that takes tasks holds a shared flock on its lease directory, which the
kernel drops when the process ends. There is no server.

Guaranteed: a task whose push() returned is delivered, if necessary again and again, until done() or
fail() ends the task, or until it becomes a dead letter otherwise. This holds even if any process is
killed at any time. Tasks that are pushed on one host get their first delivery in the order of their
push(). A corrupt task ends in failed/. With sync_after_write=True, a push, the end of a delivery, a
retry or a checkpoint survives power loss once the call has returned.

Not guaranteed: that a task runs only once. A task may run again if its worker died or missed the
deadline, or (without sync) if power was lost after done(). So make handlers idempotent.

Assumed: data_dir is on one file system, whose rename() is atomic (POSIX). All who may write to
data_dir are trusted with its tasks. Hosts that share data_dir have wall clocks within a second of
each other, the same timeout_stale_ms, and different node_ids.

Terms that are not explained elsewhere:

    Anchor            The number that is added to the monotonic clock. The sum is the queue clock.
    Batch             The oldest names of pending/, which a worker keeps in memory.
    Claim             To rename a waiting task into the worker's lease directory.
    Detached lease    A lease that outlives its process: only its deadline ends it.
    Fence             The path of the lease. Each call that settles a task or renews a lease renames
                      this path. If the path is gone, the call raises LeaseLost.
    Foreign           A file whose name has none of the forms that its directory allows. The queue
                      never delivers, moves or removes a foreign file.
    Order             A time on the queue clock that gives a task its place in pending/.
    Orphan            A lease that no caller holds. The worker's next reclaim takes it back.
    Quarantine        To make a dead letter of a task that can't be delivered.
    Settle            To end a delivery by done(), fail() or release().

The parts of this file, in their order. A part uses the parts above it. The names of later parts
that it uses stand in .ci/lint.py (DOORS).

    core          System · Names · Errors and values · Records · Open files · Files · Queue clock ·
                  Batch · Lease directory · Worker · Delivery · Maintenance
    interface     FemtoQueue
    on top        Keys · Waiting · Processing · Worker pool · Inspection · Tickets ·
                  Other file systems
    command line  Output and progress · Jobs · Command runner · Command line

A subject that concerns several parts has one comment, which tells the whole. To find it, search for
"TOPIC:" and the words: a torn file, fork(), locks, syncs, a full disk, which clock, how a lease
ends, close(), one pop(), what is on disk, the steps of a task with a key, what differs, what a
signal, whose trouble.
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
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

try:
    import fcntl
except ImportError:  # not POSIX: leases end by their deadlines
    fcntl = None  # type: ignore[assignment]

if sys.version_info < (3, 10):  # noqa: UP036
    _wanted = f"femtoqueue needs Python 3.10 or later, not {sys.version.split()[0]}"
    raise (SystemExit if __name__ == "__main__" else ImportError)(_wanted)

if TYPE_CHECKING:
    import logging
    from types import TracebackType

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
# 1. System: system calls and constants that Python lacks, and small helpers.
#    Invariant: time.time() and time.monotonic() are looked up in the module `time` at each call,
#    because a program under test may replace them. A replaced clock may stand still.
# ==================================================================================================

# The f_type of file systems where one syncfs(2) makes all tasks of a push_many() durable: ext2 to
# ext4, xfs, btrfs, f2fs, tmpfs.
_SYNCFS_TYPES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
# Also overlay, zfs, bcachefs and ramfs. Only this kernel writes to these file systems, so inotify
# reports every change.
_OVERLAY_TYPE = 0x794C7630
_LOCAL_TYPES = _SYNCFS_TYPES | {_OVERLAY_TYPE, 0x2FC12FC1, 0xCA451A4E, 0x858458F6}

_OUT_OF_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_REFUSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
# Errors of a call that makes a file. EISDIR: a person made a directory with the name of the file.
_NO_WRITE_ERRNOS = (*_OUT_OF_SPACE_ERRNOS, *_REFUSED_ERRNOS, errno.EISDIR)
# Errors of one file: it belongs to another user or is immutable, or it is a directory, a link or a
# socket where the call needs another kind.
_ONE_FILE_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.ELOOP,
    errno.ENXIO,
)
# no descriptor or no memory is left; the file itself is in order
_TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# ESTALE: another host removed the file that our descriptor refers to (NFS, GlusterFS).
_MISSING_ERRNOS = (errno.ENOENT, errno.ESTALE)

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# O_NOFOLLOW: a symbolic link is not a task. O_NONBLOCK: a FIFO in pending/ must not block pop().
_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_FLAGS = os.O_RDONLY | _NO_FOLLOW_OR_BLOCK | getattr(os, "O_BINARY", 0)
_ROOT_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_DIR_FLAGS = _ROOT_FLAGS | _NO_FOLLOW_OR_BLOCK
# False on Windows. Not os.open: eventlet replaces it.
_HAS_DIR_FDS = os.rename in os.supports_dir_fd
_FOREVER_S = float("inf")


def _wall_ns() -> int:
    return int(time.time() * 1e9)


def _latest_due_ns() -> int:
    # A task is due a microsecond early: a float of time.time() * 1e6 is only exact to about 240 ns.
    return _wall_ns() + 1000


def _monotonic_ns() -> int:
    return int(time.monotonic() * 1e9)


def _utc(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("femtoqueue")


@functools.lru_cache(10_000)  # one text for each file that this user may not use
def _warn_once(text: str) -> None:
    _log().warning("%s", text)


@functools.cache
def _libc() -> Any:
    """Return the C library on Linux; None elsewhere, or if ctypes can't load it."""
    with suppress(ImportError, OSError):
        import ctypes

        if sys.platform == "linux":
            return ctypes.CDLL(None, use_errno=True)
    return None


def _os_error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def _call_libc(name: str, path: str, *args: object) -> None:
    """Make a system call that returns 0 on success. Raises OSError for `path` if the call fails.
    _libc() must not be None."""
    import ctypes

    if getattr(_libc(), name)(*args):
        raise _os_error(ctypes.get_errno(), path)


def _fs_type(directory: _OpenFile) -> int:
    """Return f_type of fstatfs(2), or 0 where _libc() is None."""
    if _libc() is None:
        return 0
    import ctypes

    # struct statfs begins with f_type. 32 longs are enough for this struct on any machine.
    status = (ctypes.c_long * 32)()
    _call_libc("fstatfs", directory.path, directory.fd, status)
    return status[0] & 0xFFFFFFFF


def _read_boot_id() -> str | None:
    path = "/proc/sys/kernel/random/boot_id"
    # OSError: not Linux, or no /proc, or hidden by ProcSubset=pid of systemd.
    with suppress(OSError), open(path, encoding="ascii") as file:
        return file.read().strip()
    return None


def _boot_tag(boot_id: str, directory: _OpenFile) -> str:
    """Return 8 hex digits. Processes that get the same ones see each other's flocks."""
    return f"{binascii.crc32(f'{boot_id} {directory.status().st_dev}'.encode()):08x}"


def _follow_owner(fd: Any, data_dir: os.stat_result, mode: int) -> None:
    """Set the mode of a file that this process has just made, and as far as possible its owner and
    group: those of data_dir."""
    with suppress(OSError, AttributeError):  # AttributeError: not POSIX
        user = os.geteuid()
        made = os.fstat(fd)
        # RACE (Trust): between mkdir() and open(), a member of the queue replaces the new directory
        # by another one, which may be a private directory of this user.
        if made.st_uid != user or (stat.S_ISDIR(made.st_mode) and os.listdir(fd)):
            return
        with suppress(OSError):  # this user is not a member of the group
            os.fchown(fd, -1 if user else data_dir.st_uid, data_dir.st_gid)
        os.fchmod(fd, mode)


class _ignore_missing(AbstractContextManager[None]):
    """Suppress an OSError of a missing file or directory, or with an errno in `others`."""

    # Not a generator: on Python 3.12, the error that it suppresses stays in a reference cycle, and
    # keeps the queue object of a frame alive.

    def __init__(self, *others: int) -> None:
        self._numbers = *_MISSING_ERRNOS, errno.ENOTDIR, *others

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._numbers


def _raise_if_no_errno(error: OSError) -> None:
    # It may be the TimeoutError of a signal handler, which is meant to end the call.
    if error.errno is None:
        raise error


def _is_passing(error: BaseException) -> bool:
    """Say whether an error has nothing to do with the task. One without errno is the exception of a
    signal handler."""
    return getattr(error, "errno", None) in (None, *_TRANSIENT_ERRNOS)


def _for_each(act: Callable[[Any], object], items: Iterable[Any]) -> int:
    """Call act() for each item, and count the results that are true. An error of one file, by its
    errno (_ONE_FILE_ERRNOS), is logged once and passed over. Another OSError is raised after the
    last item."""
    count = 0
    errors = []
    for item in items:
        try:
            count += bool(act(item))
        except OSError as error:
            _raise_if_no_errno(error)
            if error.errno in _ONE_FILE_ERRNOS:
                # without the target of a rename, whose name may have the present time
                _warn_once(f"passed over: {error.strerror}: {error.filename!r}")
            else:
                errors.append(error)
    if errors:
        raise errors[0]
    return count


def _handler_frames(error: BaseException) -> TracebackType | None:
    """Return a traceback without the first frames, those of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames or error.__traceback__


def _traceback_of(error: BaseException) -> str:
    """Return a traceback as text, or the name of an exception that can't be formatted."""
    import traceback

    try:
        frames = _handler_frames(error)
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:
        return f"{type(error).__name__} (its traceback can't be shown)"


def _check_str(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    return value


def _no_op(*args: object) -> None:
    """Do nothing."""


def _backoff_s(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield pauses, each twice as long as the one before, up to longest_s."""
    while True:
        yield min(first_s, longest_s)
        first_s *= 2


# ==================================================================================================
# 2. Names: of tasks, directories and keys, with their parsers and formatters.
#    Invariant: a name matches a form of its directory, or the name is foreign. The name of a task
#    begins with a number of 20 digits and ends with an id of 37 characters.
# ==================================================================================================

_State = Literal["pending", "scheduled", "inflight", "done", "failed"]
_EndState = Literal["done", "failed"]
STATES: tuple[_State, ...] = get_args(_State)
_ENDED: tuple[_EndState, ...] = get_args(_EndState)
# The states of a task that has not ended, in the order of a search. The leases come twice: so a
# search finds a task that is claimed or given back meanwhile, unless both happen.
_LIVE = ("inflight", "scheduled", "pending", "inflight")
_WAITING_DIRS = ("pending", "scheduled")
_STATE_DIRS = ("creating", *_WAITING_DIRS, *_ENDED)  # made when the queue is opened

# the year 2255: the largest number that a name may carry
_MAX_STAMP_NS = 8_999_999_999_999_999_999
_FOREVER_NS = 4 * 10**18  # 126 years: the longest lease
# September 2001. No queue clock starts earlier, so its times have 19 digits, and new_id() and
# claim() put one "0" in front.
_EARLIEST_NS = 10**18
_LATEST_CLOCK_NS = 5_680_281_600 * 10**9  # the year 2150
_RELEASE_NS = 1_795_824_000 * 10**9  # 2026-11-28, the date of this release
_MAX_ATTEMPTS = 999_999  # a name has room for six digits
_DETACHED = "00000000"  # the <boot> of a detached lease
_MAX_KEY_BYTES = 200
# Where the id and its tag begin in a path, counted from the end. For speed, pop() and done() slice
# by these, and do not call _id_of().
_ID_AT = -37
_TAG_AT = -16

_NS = "0[0-8][0-9]{18}"
_ID = f"({_NS}-[0-9a-f]{{16}})"
_ATTEMPTS = "([0-9]{1,6})"
_BOOT = "([0-9a-f]{8})"
# a person may move a task to pending/, done/ or failed/, and keep the name
_TASK_NAME = f"(?:{_NS}~{_ATTEMPTS}~(?:{_BOOT}~)?)?{_ID}"
# The form of the names in data_dir (".") and in each of its directories. The three groups of a
# task's name are attempts, boot and id.
_FORMS = {
    state: re.compile(form).fullmatch
    for state, form in {
        ".": "PAUSED|clock-[0-9a-f]{8}",
        "creating": rf"()(){_ID}(?:\.(?:clock|error|pending))?",
        "pending": _TASK_NAME,
        "scheduled": f"{_NS}~{_ATTEMPTS}~(){_ID}",
        "inflight": f"{_NS}~{_ATTEMPTS}~{_BOOT}~{_ID}",
        "keys": rf"(?:{_NS}~0~|update~)?()()({_NS}-[89a-f][0-9a-f]{{15}})",
        "checkpoints": f"()(){_ID}",
        "done": _TASK_NAME,
        "failed": _TASK_NAME,
        "locks": "[0-9a-f]{2}",
    }.items()
}
# the other form of a name in failed/
_parse_reason = re.compile(rf"{_ID}\.error").fullmatch
# the other form of a name in keys/: the hash of a key
_parse_tag = re.compile("[89a-f][0-9a-f]{15}").fullmatch
# any id that a program may have kept; a shorter tag is of no task of this version
_parse_id = re.compile(f"({_NS}-[0-9a-f]{{8,16}})").fullmatch
_parse_old_task = re.compile("[0-9]+_(?:[0-9a-f]{16}|<built-in .*)").fullmatch  # of 0.4
_parse_ticket = re.compile(r"[0-8][0-9]{19}~[0-9a-f]{8}~[0-9a-f]{16}").fullmatch
_parse_node_dir = re.compile(r"inflight-([A-Za-z0-9._-]{1,100})").fullmatch
# the text of the link keys/<hash>: the paths of the key's task and of the payload behind it
_parse_link = re.compile(
    r"((?:pending|scheduled|inflight-[A-Za-z0-9._-]{1,100})/"
    rf"(?:{_NS}~[0-9]{{1,6}}~(?:[0-9a-f]{{8}}~)?)?{_ID})"
    rf"(?: (keys/(?:{_NS}~0~|update~)?{_ID}))?"
).fullmatch


class _Entry(NamedTuple):
    """The file of a task, and the fields of its name. `attempts` is None and `boot` is "" if the
    name does not have the field."""

    directory: str
    name: str
    id: str
    attempts: int | None
    boot: str

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}"

    @property
    def stamp_ns(self) -> int:
        return int(self.name[:20])


def _parse(directory: str, name: str) -> _Entry | None:
    """Return the entry of a name in a directory of tasks, payloads, checkpoints or new files, or
    None if the name is foreign, or has another form."""
    match = _FORMS[_state_of(directory)](name)
    if match is None:
        return None
    attempts, boot, ident = match.groups()
    return _Entry(
        directory, name, ident, int(attempts) if attempts else None, boot or ""
    )


def _state_of(path: str) -> str:
    """Return the state of a path or directory: "inflight", or the name of the directory."""
    directory = path.partition("/")[0]
    return "inflight" if directory.startswith("inflight-") else directory


def _id_of(path: str) -> str:
    return path[_ID_AT:]


def _tag_of(ident: str) -> str:
    return ident[_TAG_AT:]


def _stamp_of(path: str) -> int:
    """Return the number at the front of a name, with or without its directory: an order, a due time
    or a deadline, in ns, or the number of a ticket."""
    return int(path.rpartition("/")[2][:20])


def _attempts_of(path: str) -> int:
    return int(path.split("~")[1]) if "~" in path else 0


def _ends_at(path: str) -> bool:
    """Say whether a move to `path` ends a task. "" stands for the removal of the file."""
    return not path or path.startswith(_ENDED)


def _is_keyed(path: str) -> bool:
    """Say whether a tag, or the tag at the end of an id or a path, is the hash of a key."""
    return path[_TAG_AT] > "7"


def _date_ns() -> int:
    # A date after 2096 is not believed: orders would get too long a number in the end.
    now_ns = _wall_ns()
    return now_ns if now_ns < 4 * 10**18 else _RELEASE_NS


def _latest_order_ns() -> int:
    """Return the latest time that an id can have honestly. A later id moves no clock: anybody who
    may write to data_dir may have made it."""
    # Years away: a machine without a battery boots years in the past, and new ids must still sort
    # after old ones.
    return max(_date_ns(), _RELEASE_NS) + 3650 * 86400 * 10**9


def _task_name(stamp_ns: int, attempts: int, ident: str) -> str:
    return f"{stamp_ns:020d}~{attempts}~{ident}"


def _push_place(ident: str, attempts: int) -> str:
    """Return the path that puts a task back at the place of its push."""
    return f"pending/{_task_name(_stamp_of(ident), attempts, ident)}"


def _waiting_path(ident: str, due_ns: int | None) -> str:
    """Return the path of a waiting task without attempts."""
    if due_ns is None:
        return f"pending/{ident}"
    return f"scheduled/{_task_name(due_ns, 0, ident)}"


def _fresh_path(path: str, due_ns: int | None) -> str:
    """Return the path of a waiting task with its attempts set to 0, at its place or at due_ns."""
    if due_ns is not None:
        return _waiting_path(_id_of(path), due_ns)
    if "~" not in path:
        return path
    return f"{_state_of(path)}/{_task_name(_stamp_of(path), 0, _id_of(path))}"


def _payload_path(ident: str, due_ns: int | None) -> str:
    """Return the path of a newer payload that becomes the task _waiting_path(ident, due_ns)."""
    return f"keys/{_waiting_path(ident, due_ns).partition('/')[2]}"


def _is_update(payload_path: str) -> bool:
    return payload_path.startswith("keys/update~")


def _payload_due_ns(payload_path: str) -> int | None:
    return _stamp_of(payload_path) if "~0~" in payload_path else None


def _key_tag(name: str) -> str:
    """Return the hash of an encoded key: the tag in the ids of its tasks."""
    # with 63 bits, two of a billion keys have the same hash with a chance of 5 %
    from hashlib import blake2b

    digest = blake2b(name.encode(), digest_size=8).digest()
    return f"{int.from_bytes(digest, 'big') | 1 << 63:016x}"


def _encode_key(key: object) -> str:
    """Return a key, percent-encoded. Raises TypeError or ValueError if it is invalid."""
    # Not str(key): that shows the name of a str Enum's member.
    raw = _check_str("key", key).encode()
    if not 1 <= len(raw) <= _MAX_KEY_BYTES:
        raise ValueError(
            f"key must be 1 to {_MAX_KEY_BYTES} bytes in UTF-8, not {len(raw)}: {key!r}"
        )
    return _quote_key(raw)


def _quote_key(key: str | bytes) -> str:
    # takes 2 ms, so only programs that use keys import it
    from urllib.parse import quote

    return quote(key, "~:/@")


def _decode_key(name: str) -> str:
    from urllib.parse import unquote

    return unquote(name)


# ==================================================================================================
# 3. Errors and values: what the interface raises and returns, and the checks of its arguments.
#    Invariant: a value is a snapshot. Only `_lease` and `checkpoint` of a task change later, by
#    calls that renew or end the lease, or save a checkpoint.
# ==================================================================================================

_BytesLike = bytes | bytearray | memoryview
_MAX_NUMBER = 10**302  # any numeric argument must be smaller
_IfInFlight = Literal["buffer", "update", "reject"]
_IF_IN_FLIGHT = get_args(_IfInFlight)


class FemtoQueueError(Exception):
    """The base class of this module's own errors. Trouble with the disk is raised as an OSError."""


class LeaseLost(FemtoQueueError):
    """The lease of the task is not held by this delivery. Nothing was changed.

    id:  the id of the task.
    expired:  True: the deadline of the lease has passed, so another worker may have the task.
        False: the delivery had ended before, a person had moved the file, close() had given up the
        lease, or the task never had one. Also False after attach(id): an id does not show the
        deadline.
    why:  the reason, as text.

    A lease past its deadline stays valid until a worker takes the task back.
    """

    def __init__(self, id: str, expired: bool, why: str) -> None:
        super().__init__(id, expired, why)
        self.id = id
        self.expired = expired
        self.why = why

    def __str__(self) -> str:
        return f"task {self.id}: {self.why}"


class KeyInFlight(FemtoQueueError):
    """The key already has a task.

    key:  the key.
    id:  the id of the task that has the key. If push() or schedule() raised the error, the task is
        in flight. If retry() raised it, the task may also be waiting.
    """

    def __init__(self, key: str, id: str) -> None:
        super().__init__(key, id)
        self.key = key
        self.id = id

    def __str__(self) -> str:
        return f"key {self.key!r} has a task already: {self.id}"


class TaskNotFound(FemtoQueueError):
    """The task is not in the state that the call requires: retry() requires a task in failed/."""


class CorruptTask(FemtoQueueError):
    """The file of a task is not a whole record.

    id:  the id of the task.
    reason:  what is wrong with the file, as text.

    peek() raises this error. pop() does not, but moves the task to failed/.
    """

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(id, reason)
        self.id = id
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.id} is corrupt: {self.reason}"


class _CommandFailed(Exception):
    """A command that `work` ran has failed. failed/ gets the text alone, without a traceback."""


class _Lease:
    """The path of a task's file, and the facts of one delivery. If the caller has no lease, as
    after peek() and tasks(), length_ns is 0."""

    # path: a renewal writes the new path here.
    # name: the name of the file at its claim.
    # source: the path that the task was claimed from.
    # outcome: the field of WorkCounts that counts the delivery. "": the delivery still runs, the
    # lease was lost, or the end of the delivery could not be written to the disk.
    path = name = source = outcome = ""
    # The time from the claim to the deadline. Each renewal asks for as much. After attach(), it is
    # the lease length of the object that called attach().
    length_ns = 0
    has_checkpoint = False  # True: the task may have a checkpoint


_NO_LEASE = _Lease()


class FemtoTask:
    """A task, as it was when its file was read. Assigning to an attribute changes nothing in the
    queue; checkpoint() needs `data` as it was delivered.

    id:  the id, which stays the same through retries and delays.
    data:  the payload. b"": empty, or not read: attach(), and tasks(data=False).
    attempts:  the deliveries so far, with the current one, without those given back uncounted.
        None: unknown, as in done/ and failed/.
    key:  the key, or None.
    checkpoint:  the bytes that checkpoint() saved last. Only calls that lease a task read them.
    error:  the reason of a task in failed/, or None.
    size_bytes:  the length of the payload. None: unknown, because the header is invalid.
    since:  when the file came to its state (st_ctime), in UTC. None after pop() and take().

    Two tasks are equal if `id`, `data`, `attempts` and `key` are equal.
    """

    checkpoint: bytes | None = None
    error: str | None = None
    since: datetime | None = None

    def __init__(
        self,
        id: str,
        data: bytes,
        attempts: int | None = 0,
        key: str | None = None,
        _lease: _Lease = _NO_LEASE,
        _anchor_ns: int = 0,
    ) -> None:
        self.id = id
        self.data = data
        # An int for each leased task, or None. With `int | None`, a type checker would refuse each
        # comparison in a handler.
        self.attempts: int | Any = attempts
        self.key = key
        self.size_bytes: int | None = len(data)
        self._lease = _lease
        self._anchor_ns = _anchor_ns  # of the queue clock, for `until`

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
        """The path of the task's file, relative to data_dir. For a leased task, the path is the
        fence (a fencing token), and each renewal changes it."""
        return self._lease.path

    @property
    def state(self) -> str:
        """The state when the file was read: one of STATES, or "buffered" for a newer payload of a
        key, which waits in keys/."""
        state = _state_of(self.path)
        return "buffered" if state == "keys" else state

    @property
    def node(self) -> str | None:
        """The node_id of the worker that holds the lease; None if the task is not in flight."""
        return self.path.partition("/")[0].partition("-")[2] or None

    @property
    def created(self) -> datetime:
        """The time of the push, in UTC by the queue clock. The time is part of the id."""
        return _utc(_stamp_of(self.id))

    @property
    def until(self) -> datetime | None:
        """The end of the lease of a task in flight, or the due time of a scheduled task, in UTC;
        else None. A deadline is converted to the wall clock at each access."""
        if self.state == "inflight":
            left_ns = _stamp_of(self.path) - self._anchor_ns - _monotonic_ns()
            return _utc(_wall_ns() + left_ns)
        return _utc(_stamp_of(self.path)) if self.state == "scheduled" else None


def _lease_of(task: object) -> _Lease:
    """Return the lease of a task. Raises TypeError, or LeaseLost if the task carries none."""
    if not isinstance(task, FemtoTask):
        raise TypeError(
            f"task must be a FemtoTask that pop() returned, not of type {type(task).__name__}"
        )
    if not task._lease.length_ns:
        raise LeaseLost(
            task.id, False, "it carries no lease; pop() or take() gives one"
        )
    return task._lease


class NodeStats(NamedTuple):
    """The leases of one worker, counted when stats() was called.

    node:  the node_id of the worker.
    inflight:  the number of its leases.
    expired:  how many of these leases are past their deadline.
    liveness:  "alive": a process holds the lock of the lease directory.
        "dead": no process holds the lock, and the directory has leases of this boot.
        "unknown": no process holds the lock, and no lease is of this boot, for example because each
            is detached or of another host. Or there is no flock(2) here.
    """

    node: str
    inflight: int
    expired: int
    liveness: str


class Stats(NamedTuple):
    """The number of tasks in each state; see FemtoQueue.stats().

    pending, scheduled, inflight, done, failed:  the number of tasks in that state.
    buffered:  the number of newer payloads in keys/, each behind the task of its key.
    oldest_pending_age_s:  the seconds for which the oldest task in pending/ has waited, or the
        first task in scheduled/ since its due time, whichever is more. None: no task waits for its
        turn.
    nodes:  the leases of each worker, sorted by node_id.
    expired:  the number of leases past their deadline that are not taken back yet.
    """

    pending: int
    scheduled: int
    inflight: int
    buffered: int
    done: int
    failed: int
    oldest_pending_age_s: float | None
    nodes: tuple[NodeStats, ...]
    expired: int = 0


class WorkCounts(NamedTuple):
    """The deliveries of one call of work(), counted by how they ended.

    done:  the task was finished.
    failed:  the task is a dead letter in failed/.
    retried:  the handler raised an exception, and the task waits for another attempt.
    released:  the task was given back, by the handler, after an exception that is not an Exception,
        or at the second signal.
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

    kind:  "trust", "foreign", "corrupt", "twice", "unreadable", "dead worker", "expired", "key
        without a task" or "leftover".
    path:  the file or directory, relative to data_dir.
    text:  what is wrong with it.
    repaired:  True: a corrupt task that check(repair=True) has moved to failed/.
    """

    kind: str
    path: str
    text: str
    repaired: bool = False


def _check_number(name: str, value: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not least <= value < _MAX_NUMBER:  # also true for NaN
        bound = "greater than 0" if least > 0 else "0 or more"
        raise ValueError(f"{name} must be finite, and {bound}, not {value!r}")
    return value


def _due_time_ns(time_us: float | datetime) -> int:
    if isinstance(time_us, datetime):
        if time_us.utcoffset() is None:
            raise ValueError(f"the datetime must have a time zone, unlike {time_us!r}")
        time_us = time_us.timestamp() * 1e6
    due_ns = max(0, int(_check_number("time_us", time_us, -_MAX_NUMBER) * 1000))
    if due_ns >= _MAX_STAMP_NS:
        raise ValueError(f"time_us must be before the year 2255, not {time_us!r}")
    # The range begins one second after the epoch, because programs for version 0.4 pass numbers
    # near 0 for a task due at once. It ends with the year 1972: see schedule().
    if 1.0 <= due_ns / 1e9 < 94_694_400.0:
        wanted = "time_us must be in microseconds, as time.time() * 1e6"
        raise ValueError(f"{wanted}: {time_us!r} would be in {_utc(due_ns):%B %Y}")
    return due_ns


def _due_after_ns(delay_s: float) -> int:
    delay_ns = int(min(_check_number("delay_s", delay_s) * 1e9, _FOREVER_NS))
    # whatever the date is, the name of the task has a valid number
    return min(max(0, _wall_ns() + delay_ns), _MAX_STAMP_NS)


def _lease_length_ns(name: str, ms: float | None, if_none_ns: int) -> int:
    if ms is None:
        return if_none_ns
    return min(_FOREVER_NS, int(_check_number(name, ms, 1e-6) * 1e6))


def _end_s(timeout: float | None, name: str = "timeout") -> float:
    if timeout is None:
        return _FOREVER_S
    return time.monotonic() + _check_number(name, timeout)


def _check_dir(name: str, directory: object) -> str:
    try:
        path = os.fspath(directory)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a str or a path, not {directory!r}")
    if not path:
        raise ValueError(f"{name} must not be empty; for this directory say '.'")
    return path


def _check_node_id(node_id: object) -> str | None:
    if node_id is None:
        return None
    match = _parse_node_dir("inflight-" + _check_str("node_id", node_id))
    if match is None:
        raise ValueError(
            f"node_id must be 1 to 100 of A-Z a-z 0-9 . _ -, not {node_id!r}"
        )
    # A plain str. If node_id is a member of a str Enum, an f-string could show the member's name.
    return match[1]


def _check_max_attempts(max_attempts: object) -> None:
    if max_attempts is not None and (
        type(max_attempts) is not int or not 1 <= max_attempts <= _MAX_ATTEMPTS
    ):
        raise ValueError(
            f"max_attempts must be None or an int, 1 to {_MAX_ATTEMPTS}, not {max_attempts!r}"
        )


def _check_id(id: object) -> str:
    match = _parse_id(_check_str("id", id))
    if match is None:
        raise ValueError(f"not the id of a task: {id!r}")
    return match[1]


# ==================================================================================================
# 4. Records: one header line, `FQ1 <crc32> <length> [<key>]`, then the payload.
#    Invariant: a payload that does not match its header is never returned.
#
#    TOPIC: a torn file. After power loss, the disk may have kept a rename and lost a part of the
#    file. With sync_after_write, only a push that did not return can leave a torn file. The death
#    of a process leaves none.
#    _Files.read() raises CorruptTask for a torn file. A pop() that has claimed it, and
#    check(repair=True) if it waits, then make a dead letter of it (_Worker.quarantine). peek()
#    raises CorruptTask, and tasks() logs the error. A torn checkpoint is logged and ignored.
# ==================================================================================================

# a record up to this size is read with one call; any header is shorter
_READ_BYTES = 4096
_JOINED_BYTES = 1 << 14  # a record up to this size is written with one call

_Record = tuple[bytes, "str | None"]  # the payload and the key
_match_header = re.compile(rb"FQ1 ([0-9a-f]{8}) ([0-9]{1,19})(?: ([!-~]+))?\n").match


def _as_bytes(data: object) -> memoryview:
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]
    except TypeError:
        kind = type(data).__name__
        hint = "encode it, as in text.encode() or json.dumps(value).encode()"
        raise TypeError(f"data must be bytes-like, not {kind}: {hint}") from None


def _header(payload: bytes | memoryview, key: str = "") -> bytes:
    """Return the header line of a record. `key` is an encoded key, or ""."""
    if not key:
        return b"FQ1 %08x %d\n" % (binascii.crc32(payload), len(payload))
    # the checksum covers the key: a damaged key must not pass for another
    name = key.encode()
    checksum = binascii.crc32(payload, binascii.crc32(name))
    return b"FQ1 %08x %d %b\n" % (checksum, len(payload), name)


def _write_record(fd: int, header: bytes, payload: bytes | memoryview) -> None:
    # a large record is not joined in memory
    size = len(header) + len(payload)
    if size <= _JOINED_BYTES and os.write(fd, header + payload) == size:
        return
    os.lseek(fd, 0, os.SEEK_SET)  # if the write above was short, begin again
    for part in (header, payload):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]


def _finish_read(fd: int, head: bytes, ident: str) -> _Record:
    """Finish the read of a large record, of a record with a key, or of a corrupt file, from the
    bytes that the first read returned. Raises CorruptTask, with the reason."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptTask(ident, "not a regular file")
    header = _match_header(head)
    if header is None:
        raise CorruptTask(ident, "no FQ1 header; truncated, or not a task's file")
    length = int(header[2])
    start = header.end()
    # This check comes before the read: a wrong length must not make us allocate much memory.
    if status.st_size - start != length:
        raise CorruptTask(
            ident, f"{status.st_size - start} bytes, where the header says {length}"
        )
    payload = head[start:]
    if len(payload) < length:
        # Begin again at the start of the payload, so that one read can return all of it. The loop
        # is for a system that returns less at a time.
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
    if _quote_key(key) != name or _key_tag(name) != _tag_of(ident):
        raise CorruptTask(
            ident, "its key is not quoted as push() does, or not of its id"
        )
    return payload, key


# ==================================================================================================
# 5. Open files: files and directories that are held open, and their locks by flock(2).
#    Invariant: a lock ends with close(), with the last reference to the open file, or with the
#    process. So a lock ends even if Ctrl-C comes between any two lines. A forked child never keeps
#    a lock.
# ==================================================================================================

# TOPIC: fork(), and what a forked child has.
#
# - The child has none of the parent's file locks: _after_fork_in_child() closes its copies.
# - A queue object in the child is another worker: FemtoQueue._after_fork(). It has a new tag for
#   ids, and a new node_id unless the program has given one. No thread of the parent runs there.
# - A task that the parent has leased stays the parent's, as do the tickets of a TicketQueue.
# - A fork that Python does not see (a C extension, uWSGI) calls no hook. _notice_fork() finds out.
#
# TOPIC: locks, and their order. A thread that holds a lock waits only for locks further down in
# this list. It may try to take a lock further up, without waiting.
#
# - _WorkerPool._take_lock is held by the thread of work() that takes a task.
# - locks/NN guards the keys whose hash ends with NN. It is held while a task with such a key is
#   pushed, taken by key or id, settled, renewed or moved, but not by a claim of pop() or its
#   undoing. A stopped process may hold it for ever. So maintenance, coroutines and the thread that
#   renews leases only try to take it. A thread takes no second one, except in a signal handler.
# - _Worker.lock is held while a task is claimed, renewed, settled or reclaimed, and during
#   maintenance. To settle a task with a key, the lock of the key is enough.
# - inflight-<node>/ is locked by its worker, shared. Another process tries to take the exclusive
#   lock, to find out whether the worker is dead, and holds it while it reclaims the leases.
# - The lock of a log handler: a thread may log a message while it holds any of the locks above.
# - _WorkerPool._changed, _Waits._lock and _QueueClock._lock guard a few fields for a moment.
#
# The locks in the directory of a TicketQueue are not in this list. A thread that holds one of them
# takes only other locks in that directory.

_NO_FLOCK = "keyed tasks and tickets need flock(2), which is not available here"
# EBADF: NFS, for an exclusive lock on a directory. EINVAL: other file systems, for one.
_NO_FLOCK_ERRNOS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EBADF,
    errno.EINVAL,
)
_LOCK_FLAGS = os.O_RDWR | _NO_FOLLOW_OR_BLOCK
# The pauses between two attempts to take a lock. Not flock() itself waits: it has no timeout, and a
# cut network leaves the request with the servers of GlusterFS for ever.
_LOCK_PAUSE_S = 0.00005
_LONGEST_LOCK_PAUSE_S = 0.01
_LONG_WAIT_S = 5.0  # a longer wait for a lock is logged
_KERNEL_LEASE_TRIES = 200  # for two seconds

_process_id = os.getpid()


def _open_patiently(name: str, flags: int, mode: int = 0, *, dir_fd: int | None) -> int:
    # RACE (TroubleOfOneTask): another process has a lease of the kernel on the file (F_SETLEASE:
    # Samba, virus scanners). open() tells the holder, and fails with EAGAIN until the holder lets
    # go.
    for _ in range(_KERNEL_LEASE_TRIES):
        with suppress(BlockingIOError):
            return os.open(name, flags, mode, dir_fd=dir_fd)
        time.sleep(_LONGEST_LOCK_PAUSE_S)
    return os.open(name, flags, mode, dir_fd=dir_fd)


class _OpenFile:
    """An open file or directory, which can be locked. It is closed with the last reference at the
    latest."""

    # A call names a file in an open directory by `prefix + name` and `dir_fd=fd`. Where the system
    # has no such calls (Windows), fd is None, and prefix is the path of the directory. After
    # close(), fd is -1: with None, a call would go to the working directory.
    fd: Any = None
    prefix = ""
    _may_be_locked = False
    thread = 0  # set by _Keys.lock(): the thread that holds this lock

    def __init__(
        self,
        parent: _OpenFile | None,
        name: str,
        flags: int = _DIR_FLAGS,
        mode: int = 0,
    ) -> None:
        # data_dir has no parent: its name is a path
        self.parent = parent
        self.name = parent.prefix + name if parent else name
        self.path: str = os.path.join(parent.path, name) if parent else name
        try:
            if _HAS_DIR_FDS:
                dir_fd = parent.fd if parent else None
                self.fd = _open_patiently(self.name, flags, mode, dir_fd=dir_fd)
            else:
                self.prefix = os.path.join(self.path, "")
                os.stat(self.prefix)
        except OSError as error:
            if error.errno:  # else the error of a signal handler
                error.filename = self.path
            raise

    def status(self) -> os.stat_result:
        return os.stat(self.path if self.fd is None else self.fd)

    def is_at_path(self) -> bool:
        with _ignore_missing():
            dir_fd = self.parent.fd if self.parent else None
            return os.path.samestat(os.lstat(self.name, dir_fd=dir_fd), self.status())
        return False

    def try_lock(self, how: str = "LOCK_EX") -> bool | None:
        """Try to take the lock; `how` is "LOCK_EX" or "LOCK_SH". Return None if flock does not work
        here."""
        if fcntl is None:
            return None
        # If another thread forks before this line, and this process dies before that child, the
        # child's copy of the descriptor keeps the lock.
        _fork_hooks[self] = _OpenFile.close
        self._may_be_locked = True
        try:
            fcntl.flock(self.fd, getattr(fcntl, how) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_FLOCK_ERRNOS:
                return None
            raise
        return True

    def acquire_exclusive(self, until_s: float = _FOREVER_S) -> None:
        """Take the exclusive lock. Raises BlockingIOError if it is not free at the time until_s
        (monotonic clock; 0: try once), OSError if flock does not work here."""
        began_s = time.monotonic()
        pause_s = _LOCK_PAUSE_S
        while not (locked := self.try_lock()):
            if locked is None:
                raise OSError(errno.ENOTSUP, _NO_FLOCK, self.path)
            now_s = time.monotonic()
            if now_s >= until_s:
                why = "another process has its lock"
                raise BlockingIOError(errno.EWOULDBLOCK, why, self.path)
            if now_s >= began_s + _LONG_WAIT_S:
                _warn_once(f"waiting for {self.path}, which another process has locked")
            time.sleep(min(pause_s, until_s - now_s))
            pause_s = min(2 * pause_s, _LONGEST_LOCK_PAUSE_S)

    def close(self) -> None:
        """Unlock and close the file. A forked child only closes its copy."""
        if self.fd in (None, -1):
            return
        try:
            try:
                # Closing alone is not enough: the copy of a forked child would keep the lock.
                if self._may_be_locked and os.getpid() == _process_id:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
            finally:
                fd, self.fd = self.fd, -1
                os.close(fd)
        except OSError as error:
            # the work under the lock is done, or flock does not work here
            _raise_if_no_errno(error)

    def __del__(self) -> None:
        with suppress(Exception):
            # the interpreter ends, and has cleared what close() needs
            self.close()


def _make_dir(path: str, mode: int, sync: bool) -> None:
    """Make a directory and its missing parents. With `sync`, they survive power loss."""
    parent = os.path.dirname(path)
    if parent not in ("", path) and not os.path.lexists(parent):
        _make_dir(parent, 0o777, sync)
    with suppress(FileExistsError):
        os.mkdir(path, mode)
        if sync:
            above = _OpenFile(None, parent or ".", _ROOT_FLAGS)
            if above.fd is not None:  # on Windows, directories can't be synced
                os.fsync(above.fd)


# Maps objects to functions. A forked child calls each function with its object.
_fork_hooks: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = (
    weakref.WeakKeyDictionary()
)


def _after_fork_in_child() -> None:
    """Call the functions in _fork_hooks, which also close the child's copies of locks."""
    global _process_id  # noqa: PLW0603
    for owner, hook in [*_fork_hooks.items()]:
        hook(owner)
    # Last: if Ctrl-C ends this function, _notice_fork() calls it again.
    _process_id = os.getpid()


def _notice_fork() -> None:
    """Call _after_fork_in_child() after a fork that Python did not see."""
    if os.getpid() != _process_id:
        _after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ==================================================================================================
# 6. Files: the steps on files of data_dir, and the order in which they are synced.
#    Invariant: other processes see a whole record at its path, or no file. Only power loss can
#    leave a torn file.
#    Each directory of the queue is opened once, and a file is named relative to it. So a link or a
#    directory that another user puts at a name leads no call out of the queue. A data_dir that was
#    moved as a whole stays the queue of its objects.
#
#    TOPIC: syncs. If the queue is durable (sync_after_write), a call makes these steps, in this
#    order, and then returns:
#    - A new task: rename the file, sync the file, sync the directory. So the two syncs cost one
#      journal commit. Without syncs_after_rename, the file is synced and closed first: other hosts
#      would see a torn file, and Windows can't rename an open one.
#    - A batch of new tasks: rename all files; then one syncfs(2), or each as above.
#    - A move, such as done(): rename the file; sync the file; sync the directory. When only the
#      directory was synced, btrfs showed the task in its old directory, too, after power loss.
#    - A replaced payload: sync the new file, then the renames; then as for a move. For a
#      checkpoint, only the directory is synced after the rename.
#    - A finished task that is not kept: sync the lease's file and directory, unlink the file, sync
#      the directory. With the last sync alone, power loss could bring the task back to where it
#      waited, because the claim was not synced.
#    - A new task with a key, or a payload behind a task: sync the new file, link keys/<hash>, sync
#      keys/, rename the new file, sync the directory. If power loss removed the link but not the
#      task, a later push would add a second task of the key.
#    - A new directory, but not a lease directory: make it, then sync data_dir.
#    A claim, a renewal, a reclaim and a purge are not synced.
#
#    TOPIC: a full disk. A worker must be able to empty the queue, so pop(), done() and release()
#    only rename. If done/ can't take another name, the task is removed (_Worker.finish). If
#    the clock file can't be made, the process has a clock of its own. push(), schedule(),
#    checkpoint() and fail() with a reason write a new file first, and raise OSError.
# ==================================================================================================

_MAX_REPLACED = 100  # how often a step makes a directory that others remove
_SHRINK_BYTES = 1 << 20
_CLOCK_BYTES = 64  # the largest size of a clock file
_SHOWN_BYTES = 1 << 20  # how much of a reason is shown
_Result = TypeVar("_Result")


class _OpenDirs(dict[str, _OpenFile]):
    """The open directories of a queue, by name; "" is data_dir. Of the lease directories, only the
    own one is kept open."""

    def __init__(self, root: _OpenFile) -> None:
        super().__init__({"": root})
        self._path = root.path

    def __missing__(self, name: str) -> _OpenFile:
        opened = self.open(name) if name else _OpenFile(None, self._path, _ROOT_FLAGS)
        if not name.startswith(("inflight-", "..")):
            self[name] = opened
        return opened

    def open(self, name: str) -> _OpenFile:
        """Open a directory of the queue anew. Raises OSError if it is missing or a link."""
        try:
            return _OpenFile(self[""], name)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            why = "a directory of a queue must not be a link or a file"
            raise OSError(errno.ENOTDIR, why, error.filename) from None

    def refresh(self) -> bool:
        """Drop the directories that were removed or replaced, so that the next call opens them
        anew. Return whether there was one."""
        found = False
        for name, opened in [*self.items()]:
            with _ignore_missing():  # ESTALE
                # data_dir may have been moved, and stays in use
                if opened.is_at_path() if name else opened.status().st_nlink:
                    continue
            self.pop(name, None)
            found = True
        return found


class _Files:
    """The files of one data_dir. Paths are relative to data_dir, as in "pending/<id>".

    is_durable: the setting sync_after_write.
    parts: the classes of the lease directory and of the keys for this file system.
    clock: the queue clock, which sets this attribute. The _Files of a TicketQueue has no clock.
    """

    parts: Any
    # is_local: it is certain that only this kernel writes to the file system. is_shared: other
    # hosts may write to it.
    is_local = is_shared = False
    clock: _QueueClock
    # True: it is certain that no other host sees a file that is renamed before it is closed
    syncs_after_rename = False

    def __init__(self, root: _OpenFile, is_durable: bool) -> None:
        self.path = root.path
        self.is_durable = is_durable
        self.dirs = _OpenDirs(root)
        status = root.status()
        self.inode = status.st_dev, status.st_ino
        # Those who may not write to data_dir may not write to anything in the queue, and may not
        # read what is locked: flock() needs only reading.
        self.mode = stat.S_IMODE(status.st_mode)
        writable = self.mode & 0o022
        self._file_mode = 0o644 | writable
        self.lock_mode = 0o600 | writable | writable << 1

    # Directories

    def make_dirs(self) -> None:
        for name in _STATE_DIRS:
            self.make_dir(name)
            self.dirs[name]
        if self.is_durable:
            self.sync_dir("")
            # Another process may just have made data_dir without a sync. PermissionError: this
            # process did not make data_dir.
            with suppress(PermissionError):
                self.sync_dir("..")

    def make_dir(self, name: str) -> None:
        """Make a directory in data_dir for all users of the queue, unless it exists."""
        root = self.root
        mode = self.mode
        is_lease_dir = name.startswith("inflight-")
        if is_lease_dir:  # a lock file, too
            mode &= 0o7711 | self.lock_mode
        with suppress(FileExistsError):
            os.mkdir(root.prefix + name, mode & 0o777, dir_fd=root.fd)
            # RACE (Liveness): another process removes a new, empty lease directory before it is
            # opened here. Then _LeaseDir._open() finds that it is missing.
            with (
                _ignore_missing(errno.EACCES, errno.EPERM),
                closing(_OpenFile(root, name)) as made,
            ):
                _follow_owner(made.fd, root.status(), mode)
            if not is_lease_dir:
                self.sync_dir("")

    @property
    def root(self) -> _OpenFile:
        return self.dirs[""]

    def place(self, path: str) -> tuple[_OpenFile, str]:
        """Return the open directory of a file, and the name to use with it."""
        directory, _, name = path.rpartition("/")
        found = self.dirs[directory]
        return found, found.prefix + name

    def call(self, function: Callable[..., _Result], path: str, *args: int) -> _Result:
        """Call a function of os for a file, by its name in its open directory."""
        where, name = self.place(path)
        try:
            return function(name, *args, dir_fd=where.fd)
        except OSError as error:
            raise self.named(error, path) from None

    def named(
        self, error: BaseException, path: str, target: str | None = None
    ) -> BaseException:
        """Put full paths into an OSError of a call that knew only names."""
        # errno is None in the error of a signal handler
        if (
            isinstance(error, OSError)
            and error.errno
            and "/" not in str(error.filename)
        ):
            error.filename = f"{self.path}/{path}"
            if target:
                error.filename2 = f"{self.path}/{target}"
        return error

    # Looking

    def names(self, directory: str) -> list[str]:
        """Return all names in a directory. Raises the OSError that _pass_over() raises."""
        try:
            root = self.root
            if root.fd is None:
                return os.listdir(root.prefix + directory)
            # two listings in one opening would share a position
            fd = os.open(directory or ".", _DIR_FLAGS, dir_fd=root.fd)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        except OSError as error:
            # missing because data_dir was removed and made again?
            if error.errno in _MISSING_ERRNOS and self.dirs.refresh():
                return self.names(directory)
            self._pass_over(error, directory)
        return []

    def scan(self, directory: str) -> Iterator[str]:
        """Yield the names in a directory, while the system reads it."""
        try:
            opened = self.dirs.open(directory)
            with os.scandir(opened.prefix or opened.fd) as entries:
                for entry in entries:
                    yield entry.name
        except OSError as error:
            self._pass_over(error, directory)

    def _pass_over(self, error: OSError, directory: str) -> None:
        """Raise the error of a directory, unless the directory is missing, or (logged once) this
        user may not read it. The error of a directory of _STATE_DIRS is always raised."""
        self.named(error, directory)
        if directory in _STATE_DIRS:
            raise error
        if isinstance(error, PermissionError):
            _warn_once(f"passed over: {error}")
        elif error.errno not in (*_MISSING_ERRNOS, errno.ENOTDIR):
            raise error

    def entries(self, directory: str, ending: str = "") -> list[_Entry]:
        """Return the entries of a directory whose names end with `ending`, sorted by name."""
        names = [it for it in self.names(directory) if it.endswith(ending)]
        return [entry for name in sorted(names) if (entry := _parse(directory, name))]

    def task_names(self, state: str) -> list[str]:
        """Return the names of the tasks in a directory, unsorted."""
        return [*filter(_FORMS[_state_of(state)], self.names(state))]

    def count(self, state: str) -> int:
        return len(self.task_names(state))

    def node_dirs(self) -> list[str]:
        names = sorted(filter(_parse_node_dir, self.names("")))
        return [name for name in names if not stat.S_ISLNK(self.mode_of(name))]

    def find(self, *states: str, ending: str = "") -> Iterator[_Entry]:
        """Yield the entries of these states, in name order within a directory. A state may also be
        "keys" or "checkpoints". Only names with this ending, such as an id or a tag, count."""
        for state in states:
            for directory in self.node_dirs() if state == "inflight" else [state]:
                yield from self.entries(directory, ending)

    def find_id(self, ident: str, *states: str) -> _Entry | None:
        """Return the entry of an id in one of these states, or None. In done/ and failed/, which
        may be huge, only a file with the id as its name is found."""
        for state in states:
            named = _parse(state, ident)
            if named and self.exists(named.path):
                return named
        listed = [state for state in states if state not in _ENDED]
        return next(self.find(*listed, ending=ident), None)

    def exists(self, path: str) -> bool:
        """Say whether a file exists. Raises any other OSError."""
        return self.mode_of(path) != 0

    def mode_of(self, path: str) -> int:
        """Return st_mode of a file, or 0 if it is missing."""
        with _ignore_missing():
            return self.lstat(path).st_mode
        return 0

    def lstat(self, path: str) -> os.stat_result:
        return self.call(os.lstat, path)

    def is_regular(self, path: str) -> bool:
        return stat.S_ISREG(self.lstat(path).st_mode)

    def _open(self, path: str) -> int:
        return self.call(_open_patiently, path, _READ_FLAGS)

    def beginning(self, path: str, most_bytes: int) -> bytes:
        """Return the first bytes of a regular file, or b"" for any other kind of file, such as a
        device."""
        if not self.is_regular(path):
            return b""
        fd = self._open(path)
        try:
            return os.read(fd, most_bytes)
        finally:
            os.close(fd)

    def head(self, path: str) -> tuple[str | None, int | None]:
        """Return the key and the length in the header of a record, or (None, None)."""
        header = _match_header(self.beginning(path, _READ_BYTES))
        if header is None:
            return None, None
        return (_decode_key(header[3].decode()) if header[3] else None), int(header[2])

    def read(self, directory: str, name: str, ident: str) -> _Record:
        """Return the payload and the key of a record. Raises CorruptTask unless the record is
        whole."""
        where = self.dirs[directory]
        try:
            try:
                fd = os.open(where.prefix + name, _READ_FLAGS, dir_fd=where.fd)
            except BlockingIOError:  # a lease of the kernel: see _open_patiently()
                fd = self._open(f"{directory}/{name}")
            try:
                head = os.read(fd, _READ_BYTES)
                first, newline, payload = head.partition(b"\n")
                if first + newline == _header(payload):
                    return payload, None
                return _finish_read(fd, head, ident)
            finally:
                os.close(fd)  # its error is raised: the file may have been replaced
        except OSError as error:
            path = f"{directory}/{name}"
            if not self.is_regular(path):
                raise CorruptTask(ident, "not a regular file") from None
            if not _is_passing(error):
                error.task_id = ident  # type: ignore[attr-defined]
            raise self.named(error, path) from None

    def read_path(self, path: str) -> _Record:
        """Call read() for a path that ends with an id."""
        directory, _, name = path.partition("/")
        return self.read(directory, name, _id_of(path))

    # Locking

    def open_lock(self, path: str, makes: bool = True) -> _OpenFile:
        """Open a file to lock it. With `makes`, the file is made if it is missing."""
        if fcntl is None:
            raise OSError(errno.ENOTSUP, _NO_FLOCK, f"{self.path}/{path}")
        directory, _, name = path.rpartition("/")
        where = self.dirs[directory]
        # First without O_CREAT: in a sticky directory, the kernel refuses O_CREAT for another
        # user's file (fs.protected_regular).
        try:
            return _OpenFile(where, name, _LOCK_FLAGS)
        except FileNotFoundError:
            if not makes:
                raise
        # RACE (ManyUsers): another process makes the file between our two calls of open(). O_EXCL
        # keeps us from giving a mode to that file, which may be a link to a file elsewhere.
        with suppress(FileExistsError):
            flags = _LOCK_FLAGS | os.O_CREAT | os.O_EXCL
            made = _OpenFile(where, name, flags, self.lock_mode)
            _follow_owner(made.fd, self.root.status(), self.lock_mode)
            return made
        return _OpenFile(where, name, _LOCK_FLAGS)

    def open_dir(self, directory: str) -> _OpenFile | None:
        """Open the lease directory of another worker, to lock it. Return None if it is passed
        over."""
        try:
            return self.dirs.open(directory)
        except OSError as error:
            self._pass_over(error, directory)
        return None

    # Moving

    def publish(
        self,
        new_name: str,
        data: _BytesLike,
        directory: str,
        name: str,
        is_synced: bool,
    ) -> None:
        """Write a record to creating/<new_name>, and rename the file to directory/name. If
        publish() raises, it removes the file."""
        payload = data if type(data) is bytes else _as_bytes(data)
        # The bodies of create() and move() are inlined: the calls would be 15 % of push().
        old = self.dirs["creating"]
        new = self.dirs[directory]
        source = old.prefix + new_name
        target = new.prefix + name
        try:
            fd = os.open(source, _CREATE_FLAGS, self._file_mode, dir_fd=old.fd)
        except OSError as error:
            _raise_if_no_errno(error)
            fd = self.create(f"creating/{new_name}")
        try:
            try:
                # CRASH (Crash): before the rename, the file in creating/ is no task, and is removed
                # after an hour. After the rename, the task exists, although push() did not return.
                _write_record(fd, _header(payload), payload)
                if self.syncs_after_rename:
                    try:
                        os.replace(source, target, src_dir_fd=old.fd, dst_dir_fd=new.fd)
                    except FileNotFoundError:
                        # RACE (Shrinking): another worker replaces pending/.
                        self.move(f"creating/{new_name}", f"{directory}/{name}")
                if is_synced:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not self.syncs_after_rename:
                self.move(f"creating/{new_name}", f"{directory}/{name}")
            if is_synced:
                self.sync_dir(directory)
        except BaseException as error:
            # RACE (Faults): a worker claims the task before this line. Then no file is at its path,
            # and the worker keeps the task.
            for leftover in (f"creating/{new_name}", f"{directory}/{name}"):
                self.remove(leftover)
                self.named(error, leftover)
            raise

    def create(self, path: str) -> int:
        with suppress(FileNotFoundError):
            return self.call(os.open, path, _CREATE_FLAGS, self._file_mode)
        self.dirs.refresh()  # the directory was replaced
        return self.call(os.open, path, _CREATE_FLAGS, self._file_mode)

    @contextmanager
    def replacement(
        self,
        name: str,
        header: bytes,
        payload: bytes | memoryview = b"",
        mode: int | None = None,
    ) -> Iterator[str]:
        """Write a file creating/<name>, and yield its path. The block moves the file to its final
        path, over an older file. If the block raises, the new file is removed. `mode`: see
        _follow_owner()."""
        path = f"creating/{name}"
        fd = self.create(path)
        try:
            try:
                if mode is not None:
                    _follow_owner(fd, self.root.status(), mode)
                _write_record(fd, header, payload)
                if self.is_durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        except BaseException as error:
            self.remove(path)
            self.named(error, path)
            raise

    def move(self, source: str, target: str) -> str:
        """Rename a file, and return the target. A file at the target is replaced. The target ""
        removes the file. If several processes move a task at the same time, one rename succeeds,
        and the others raise FileNotFoundError."""
        if not target:
            self.unlink(source)
            return target
        directory, _, name = source.rpartition("/")
        new_directory, _, new_name = target.rpartition("/")
        dirs = self.dirs
        old = dirs[directory]
        new = dirs[new_directory]
        try:
            os.replace(
                old.prefix + name,
                new.prefix + new_name,
                src_dir_fd=old.fd,
                dst_dir_fd=new.fd,
            )
        except OSError as error:
            # RACE (Shrinking): another thread has refreshed the directories.
            if error.errno not in _MISSING_ERRNOS or not (
                dirs.refresh()
                or dirs.get(directory, old) is not old
                or dirs.get(new_directory, new) is not new
            ):
                raise self.named(error, source, target) from None
            return self.move(source, target)
        # By POSIX, rename() succeeds and does nothing if both names are links to one file. Then the
        # source would stay, and the finished task would be delivered again for ever. So the source
        # is removed here. To save time, this is not done after a first delivery: if the source
        # stays then, the end of the next delivery removes the source.
        if "~1~" not in source and directory != "creating" and _ends_at(target):
            self.unlink_if_exists(source)
        return target

    def unlink(self, path: str) -> None:
        self.call(os.unlink, path)

    def unlink_if_exists(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            self.unlink(path)
            return True
        return False

    def unlink_if_older(self, path: str, before_s: float) -> bool:
        """Remove a file whose st_ctime is `before_s` or earlier. Return whether it was removed."""
        # RACE (Races): another process removes the file, or retries the failed task.
        with _ignore_missing():
            if self.lstat(path).st_ctime <= before_s:
                self.unlink(path)
                return True
        return False

    def remove(self, path: str) -> None:
        with suppress(OSError):
            self.unlink(path)

    def remove_empty_dir(self, path: str) -> None:
        """Remove a directory if it is empty, and if this user may remove it."""
        with suppress(OSError):
            self.call(os.rmdir, path)

    def shrink(self, new_name: str) -> None:
        """Replace an empty pending/ that is large: ext4 never shrinks a directory, and each listing
        reads all of it."""
        old = self.lstat("pending")
        if old.st_size <= _SHRINK_BYTES or old.st_uid != os.geteuid():
            return
        name = f"{new_name}.pending"
        mode = stat.S_IMODE(old.st_mode)
        # RACE (Shrinking): another process renames a file into the old directory first. rename()
        # replaces no directory that is not empty, so the old directory stays.
        with suppress(OSError):
            self.call(os.mkdir, f"creating/{name}", mode & 0o777)
            made = _OpenFile(self.dirs["creating"], name)
            _follow_owner(made.fd, old, mode)
            if made.status().st_gid == old.st_gid:
                self.move(f"creating/{name}", "pending")
                # else power loss could undo the rename, and with it the later tasks
                self.sync_dir("")
        self.remove_empty_dir(f"creating/{name}")
        self.dirs.refresh()

    # Syncing

    def sync_with_dir(self, path: str) -> None:
        """If the queue is durable, sync a file, then its directory."""
        if not self.is_durable:
            return
        # RACE (Durability): another process moves the task on. Then only the directory is synced.
        with suppress(FileNotFoundError):
            self.sync_file(path)
        self.sync_dir(os.path.dirname(path))

    def sync_file(self, path: str) -> None:
        fd = self._open(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_dir(self, directory: str) -> None:
        """If the queue is durable, sync a directory."""
        opened = self.dirs[directory]
        if self.is_durable and opened.fd is not None:
            try:
                os.fsync(opened.fd)
            except OSError as error:
                raise self.named(error, directory) from None

    @contextmanager
    def batch(self) -> Iterator[bool]:
        """Make durable what is published into pending/ in the block, if the queue is durable. Yield
        True if each task must be synced for this."""
        if not self.is_durable or _fs_type(self.root) not in _SYNCFS_TYPES:
            yield self.is_durable
            return
        # opened before the block: syncfs() reports the write errors since then (Linux 5.8)
        opened = _OpenFile(self.root, "pending")
        try:
            yield False
        finally:
            _call_libc("syncfs", opened.path, opened.fd)


# ==================================================================================================
# 7. Queue clock: the source of orders and deadlines. The queue clock is the monotonic clock plus an
#    anchor, in nanoseconds. All processes of one boot read the anchor from the file clock-<boot>. A
#    process that can't use this file has an anchor and a random <boot> of its own.
#    Invariant: the orders of one object strictly increase. Setting the date does not change the
#    queue clock of an object.
# ==================================================================================================

# between two looks whether the directories are still at their names
_LOOK_INTERVAL_S = 0.1

# TOPIC: which clock is used for what.
#
# - The queue clock gives the orders, and therefore the ids, and the deadlines of leases.
# - The monotonic clock is used for timeouts, pauses, and the times of maintenance.
# - The wall clock is used for due times, and for the ages of files.
#
# So if the date is set, the ids of a boot stay in order, and its leases end as before.
#
# If clock-<boot> is removed, the objects that have read it go on with its anchor, and the next
# process makes a new file. If the date was set meanwhile, some leases end early or late.


def _compute_anchor(files: _Files) -> int:
    """Return the anchor for a clock that starts at the time of the wall clock, or after the newest
    id if the date was set back."""
    latest_ns = _latest_order_ns()
    started_ns = _monotonic_ns()
    times_ns = [_EARLIEST_NS, _date_ns()]
    for directory in (*_STATE_DIRS[1:], "keys", *files.node_dirs()):
        # a directory of another user, such as the worker's pending/ for a producer
        with suppress(PermissionError):
            orders = (_stamp_of(entry.id) for entry in files.entries(directory))
            times_ns += [order_ns + 1 for order_ns in orders if order_ns < latest_ns]
    return max(times_ns) - started_ns


class _QueueClock:
    """The clock of one queue object. `tag` is the end of the ids that new_id() makes."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        files.clock = self
        self.init_worker()
        self.boot, self.anchor_ns = self._boot_and_anchor()

    def init_worker(self) -> None:
        """Set the values that belong to one process, also in a forked child."""
        self.tag = f"{int.from_bytes(os.urandom(8), 'big') >> 1:016x}"
        # Guards _order. An RLock, because a signal handler may push while its thread pushes.
        self._lock = threading.RLock()
        self._order = 0
        self._next_look_ns = 0

    def now_ns(self) -> int:
        return _monotonic_ns() + self.anchor_ns

    def new_id(self) -> str:
        if os.getpid() != _process_id:  # inlined: a call would be 5 % of push()
            _after_fork_in_child()
        with self._lock:
            now_ns = int(time.monotonic() * 1e9) + self.anchor_ns
            order_ns = self._order = now_ns if now_ns > self._order else self._order + 1
            if now_ns >= self._next_look_ns:
                # A process that only pushes runs no maintenance. It notices here that a directory
                # was replaced.
                self._next_look_ns = now_ns + int(_LOOK_INTERVAL_S * 1e9)
                self._files.dirs.refresh()
            return f"0{order_ns}-{self.tag}"

    def _boot_and_anchor(self) -> tuple[str, int]:
        """Return the <boot> of our leases, and the anchor."""
        boot_id = _read_boot_id()
        if boot_id is not None:
            boot = _boot_tag(boot_id, self._files.root)
            name = f"clock-{boot}"
            try:
                return boot, self._read(name) or self._create(name)
            except OSError as error:
                if error.errno not in _NO_WRITE_ERRNOS:
                    raise
                # Without the shared clock, this process can look at tasks and drain the queue.
                _log().warning("no shared clock for this process: %s", error)
        return os.urandom(4).hex(), _compute_anchor(self._files)

    def _read(self, name: str) -> int:
        """Return the anchor in a clock file, or 0 if the file is missing or invalid."""
        with suppress(FileNotFoundError):
            text = self._files.beginning(name, _CLOCK_BYTES)
            if re.fullmatch(b"[0-9]{1,19}\n", text):
                now_ns = int(text) + _monotonic_ns()
                return int(text) if _EARLIEST_NS <= now_ns < _LATEST_CLOCK_NS else 0
        return 0

    def _create(self, name: str) -> int:
        """Put a clock file in place, unless a valid one is there. Return its anchor."""
        files = self._files
        anchor_ns = _compute_anchor(files)
        new_name = f"{_wall_ns():020d}-{self.tag}.clock"
        # 0644: a wrong anchor would end living leases, so only the owner writes the file.
        with files.replacement(new_name, b"%d\n" % anchor_ns, mode=0o644) as new_path:
            try:
                where, source = files.place(new_path)
                root, target = files.place(name)
                os.link(
                    source,
                    target,
                    src_dir_fd=where.fd,
                    dst_dir_fd=root.fd,
                    follow_symlinks=False,
                )
            except (AttributeError, NotImplementedError, OSError):
                # A file exists, valid or not, or the file system has no hard links. Then two
                # processes that start at the same time may have anchors that differ a little.
                if not self._read(name):
                    files.move(new_path, name)
            files.remove(new_path)
        # RACE (Ordering): another process links its clock file before ours.
        return self._read(name) or anchor_ns


# ==================================================================================================
# 8. Batch: the oldest names of pending/, sorted, in memory. A pop() takes the oldest of them.
#    Invariant: each name has the form of a task's name. The name is a hint: only the claim tells
#    whether the task still waits. Four rules keep the order of delivery, and keep pop() from
#    reporting an empty queue while tasks wait:
#    - All names may be dropped at any time. A pop() finds the queue empty only if its own listing
#      adds no name.
#    - A single name may be dropped only if the task is claimed, is missing, or can't be claimed.
#    - A name may be added only if it sorts before the youngest name of the batch: other tasks
#      between them may be missing.
#    - A listing must keep the oldest names, and leave out what was pushed during it.
# ==================================================================================================

_MAX_BATCH = 1 << 17  # names to keep in memory; they take up to 12 MB
_CHUNK = 1 << 16  # directory entries to read at a time
_FEW = 1000  # a directory that had fewer names is listed by one os.listdir()
_AT_ONCE = 256  # the system lists so many names in one call: no push comes in between
_TROUBLE_PAUSE_S = 60.0  # how long a task that this worker can't claim is passed over
_is_task_name = _FORMS["pending"]


class _Batch:
    """The batch of one worker. The worker's lock guards it."""

    def __init__(self, worker: _Worker) -> None:
        self._files = worker.files
        self._lock = worker.lock
        self._clock = worker.clock
        self.names: list[str] = []  # the oldest last
        self.seen = _FEW  # the number of names at the last listing; many at first
        # the paths of tasks that this user may not claim, and until when (monotonic clock)
        self.barred: dict[str, float] = {}

    def relist(self, now_s: float, is_second: bool = False) -> None:
        """List pending/, and replace the batch. `now_s` is the time on the monotonic clock."""
        is_large = self.seen >= _FEW
        names: list[str] = []
        seen = 0
        for listed in self._chunks() if is_large else [self._files.names("pending")]:
            seen += len(listed)
            chunk = listed
            if self.barred:
                self.barred = {
                    path: end_s for path, end_s in self.barred.items() if end_s >= now_s
                }
                chunk = [it for it in chunk if f"pending/{it}" not in self.barred]
            names += filter(_is_task_name, chunk)
            names.sort(reverse=True)
            del names[:-_MAX_BATCH]
        self.names = names
        self.seen = seen
        if seen <= _AT_ONCE:
            return
        # RACE (Races): another process pushes two tasks during the listing, which shows only the
        # younger one. So the batch gets only the tasks from before the listing. If a second listing
        # also shows only later tasks, the batch gets all of them: an empty one would mean that no
        # task waits.
        began = f"{int(now_s * 1e9) + self._clock.anchor_ns:020d}"
        if older := [name for name in names if name < began]:
            self.names = older
        elif not is_second:
            self.relist(time.monotonic(), is_second=True)

    def _chunks(self) -> Iterator[list[str]]:
        """Yield the names in pending/. A million at a time would take 100 MB."""
        listing = self._files.scan("pending")
        while chunk := [*itertools.islice(listing, _CHUNK)]:
            yield chunk

    def add(self, path: str) -> None:
        """Add a task that came to `path` in pending/, unless a later listing will show it."""
        with self._lock:
            names = self.names
            name = path.rpartition("/")[2]
            if names and name < names[0]:
                names.insert(bisect.bisect(names, False, key=name.__gt__), name)

    def correct_after_loss(self, lost: str) -> None:
        """After a lost claim at the path `lost`, drop the oldest names up to one whose file exists:
        a look costs a third of a failed rename()."""
        # RACE (Keyed): another process pushes a newer payload for the key of a task. The task keeps
        # its place, and its name has 0 attempts. Only a lost claim puts this name into the batch,
        # so the loop stops at a task with a key.
        with self._lock:
            names = self.names
            renamed = _fresh_path(lost, None)
            if renamed != lost:
                names.append(renamed.partition("/")[2])
            pending = self._files.dirs["pending"]
            while names and not _is_keyed(names[-1]):
                if os.access(pending.prefix + names[-1], os.F_OK, dir_fd=pending.fd):
                    break
                names.pop()


# ==================================================================================================
# 9. Lease directory: this worker's inflight-<node>/. A shared flock on the directory shows that the
#    worker lives.
#    Invariant: a claim moves a task into the directory whose lock this worker holds. So the rename
#    uses its descriptor: another directory may now be at the path.
# ==================================================================================================


class _LeaseDir:
    """The lease directory of one worker. It is open while `_Files.dirs` has it."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._files = worker.files
        self._clock = worker.clock
        self.directory = f"inflight-{worker.node_id}"
        self._boot = ""  # the <boot> of the leases
        # The leases to reclaim, and the paths to move the tasks to. None: the place of the push.
        self.orphans: dict[str, str | None] = {}
        self.close_count = 0
        self._held: _OpenFile | None = None  # the lock of the directory

    # Opening

    def ensure_open(self) -> None:
        """Open anew the directories that were replaced, and this worker's if it is not open."""
        with self._worker.lock:
            self._files.dirs.refresh()
            if self.directory not in self._files.dirs:
                self._open()

    def _open(self) -> None:
        # A pop() must raise what is raised here, before it loses the names.
        self._worker.batch.names = []
        for _ in range(_MAX_REPLACED):
            self._files.make_dir(self.directory)
            try:
                if self._hold():
                    return
            except FileNotFoundError:
                # RACE (KeyedInterrupted): another process removes the directory after make_dir()
                continue
            except (PermissionError, NotADirectoryError):
                other = f"inflight-{os.getpid()}-{os.urandom(8).hex()}"
                text = "%s can't be used by this user, or is locked by another process; using %s"
                _log().warning(text, self.directory, other)
                self.directory = other
        raise _os_error(_MISSING_ERRNOS[-1], f"{self._files.path}/{self.directory}")

    def _hold(self) -> bool:
        """Lock the directory, and keep it open. Return False if it was replaced meanwhile. Raises
        PermissionError if this user can't use it, or another process keeps it locked."""
        lock = self._files.dirs.open(self.directory)
        end_s = time.monotonic() + _LONG_WAIT_S
        try:
            # RACE (Liveness): another process has the exclusive lock, to find out whether we live.
            while (is_shared := lock.try_lock("LOCK_SH")) is False:
                if time.monotonic() >= end_s:
                    raise PermissionError
                time.sleep(_LOCK_PAUSE_S)
            if not os.access(lock.prefix + ".", os.W_OK, dir_fd=lock.fd):
                raise PermissionError
            if is_shared is None:
                # With a random <boot>, no process whose flock works takes this worker for dead.
                self._clock.boot = os.urandom(4).hex()
            elif self._held is None and lock.try_lock() and lock.is_at_path():
                # The leases of an earlier process. If this object has held another directory, a
                # person may have moved its leases here.
                with suppress(OSError):
                    self._worker.reclaim_all(self.directory)
            self._boot = _DETACHED if self._worker.detached else self._clock.boot
            # Not the descriptor of the lock: close() in another thread closes it during a read.
            opened = self._files.dirs.open(self.directory)
            # RACE (Liveness): the attempt to take the exclusive lock has dropped the shared one,
            # and another process takes the exclusive lock. Or it removed the directory before our
            # lock.
            if lock.try_lock("LOCK_SH") is not False and lock.is_at_path():
                self._held = lock
                self._files.dirs[self.directory] = opened
        finally:
            if lock is not self._held:
                lock.close()
        return lock is self._held

    # Claiming

    def claim(self, directory: str, name: str, lease: _Lease) -> bool:
        """Rename a waiting task into the lease directory. Return False if the task has gone or may
        not be moved, or the directory is not open. The caller holds the worker's lock. It undoes
        the claim after any exception, which may come after the rename."""
        attempts = min(_attempts_of(name) + 1, _MAX_ATTEMPTS) if "~" in name else 1
        deadline_ns = (
            int(time.monotonic() * 1e9) + self._clock.anchor_ns + lease.length_ns
        )
        new_name = f"0{deadline_ns}~{attempts}~{self._boot}~{name[_ID_AT:]}"
        lease.name = new_name
        lease.path = f"{self.directory}/{new_name}"
        lease.source = f"{directory}/{name}"
        dirs = self._files.dirs
        held = dirs.get(self.directory)
        if held is None:
            # RACE (LeaseDirectoryLost): another process has moved or removed the directory.
            return False
        try:
            old = dirs[directory]
            # CRASH (Crash, faults.py): after the rename, the task is leased, and the name counts
            # this attempt.
            os.rename(
                old.prefix + name,
                held.prefix + new_name,
                src_dir_fd=old.fd,
                dst_dir_fd=held.fd,
            )
        except OSError as error:
            # RACE (Concurrency, LeaseDirectoryLost): another process moves the task first, or
            # removes our lease directory.
            if error.errno in _MISSING_ERRNOS:
                return False
            self._files.named(error, lease.source, lease.path)
            # If this user may not write to the directory, no task can be claimed. To pass over all
            # of them would end drain().
            if isinstance(error, PermissionError) and os.access(
                f"{self._files.path}/{directory}", os.W_OK
            ):
                until_s = time.monotonic() + _TROUBLE_PAUSE_S
                self._worker.batch.barred[lease.source] = until_s
                if error.errno == errno.EPERM:
                    # Another user's task in a sticky directory, or an immutable file. It is no
                    # trouble of this worker: to raise would end an idle one after a while.
                    _warn_once(f"passed over: {error.strerror}: {error.filename!r}")
                    return False
            raise
        return True

    # Closing

    def give_up(self) -> None:
        """Close the directory. If no other object holds its lock, reclaim its leases, except
        detached ones, and remove it if it is empty."""
        self._worker.maintenance.drop_batch()
        self._files.dirs.pop(self.directory, None)
        lock, self._held = self._held, None
        if lock is None:
            return
        with closing(lock):
            try:
                is_alone = lock.try_lock()
                if is_alone is None or (is_alone and lock.is_at_path()):
                    if is_alone:
                        self._worker.reclaim_all(self.directory)
                    self._files.remove_empty_dir(self.directory)
            except OSError as error:
                # no task is lost: any worker may reclaim the leases
                _log().warning("%s could not be cleared: %s", self.directory, error)


# ==================================================================================================
# 10. Worker: the state machine. It makes each change of a task's state, except pushes and purges.
#    A rename or an unlink commits each step:
#
#    step         method                       from              to
#    publish      _Files.publish               creating/<id>     pending/, scheduled/
#    due          _Worker.enqueue_scheduled    scheduled/        pending/<now>~<n>~<id>
#    claim        _LeaseDir.claim              where it waits    inflight-<node>/
#    undo         _Consumer._undo_claim        inflight-<node>/  where it waited, or the back
#    finish       _Worker.finish               inflight-<node>/  done/<id>, or removed
#    fail         _Worker.end_failed           inflight-<node>/  failed/<id>
#    release      _Worker.requeue              inflight-<node>/  pending/ or scheduled/
#    extend       _Worker.renew                inflight-<node>/  the same, a new deadline
#    reclaim      _Worker.reclaim              inflight-<node>/  pending/<order>~<n>~<id>
#    quarantine   _Worker.quarantine           leased, waiting   failed/<id>
#    retry        _Worker.requeue_failed       failed/<id>       pending/<now>~0~<id>
#    purge        _Files.unlink_if_older       done/, failed/    removed
#    replace      _Keys._replace               creating/<id>     keys/<id>, then the task's place
#    put behind   _Keys._add                   creating/<id>     keys/<id>
#    take along   _Keys._swap_aside            a lease, keys/    keys/<id>, then where it waits
#    promote      _Keys._promote               keys/<id>         pending/, scheduled/
#    save         _save_checkpoint             creating/<id>     checkpoints/<id>
#
#    <now>: the back of the queue. <order>: the place of the push. <n>: the attempts so far.
#
#    Invariant: the rename (or unlink) commits the change, and for the holder of a lease it also
#    tests the fence. The reason in failed/ and the file in checkpoints/ are changed only after it.
#    Lock: a thread holds the worker's lock while it claims, renews, settles or reclaims a task, but
#    not while it reads or writes a payload for a caller. See TOPIC: locks.
# ==================================================================================================


class _Worker:
    """The worker of one queue object in one process: its parts, and the moves of tasks."""

    def __init__(self, queue: FemtoQueue, files: _Files, clock: _QueueClock) -> None:
        self.files = files
        self.clock = clock
        self.lock = threading.RLock()
        self.node_id = queue.node_id
        self.detached = queue.detached
        self.max_attempts = queue.max_attempts
        self.keep_done = queue.keep_done
        self.length_ns = queue._length_ns
        self.poll_interval_s = queue.poll_interval_s
        self.batch = _Batch(self)
        lease_dir_class, keys_class = files.parts
        self.lease_dir: _LeaseDir = lease_dir_class(self)
        self.keys: _Keys = keys_class(self)
        self.maintenance = _Maintenance(self)
        self.waits = _Waits(self)
        self.renewer = _LeaseRenewer(self)

    def note_arrival(self, path: str) -> None:
        """Take notice that this process has put a task at `path`."""
        if path.startswith("pending/"):
            self.batch.add(path)
        elif path.startswith("scheduled/"):
            self.maintenance.note_due(_stamp_of(path))

    def move_task(self, source: str, target: str, until_s: float = _FOREVER_S) -> str:
        """Move a task's file, and return its path, which may be another for a task with a key.
        target "": remove the file. until_s: as in _Keys.lock()."""
        if _is_keyed(source):
            return self.keys.move_keyed(source, target, until_s)
        return self.files.move(source, target)

    def back_path(self, path: str, attempts: int) -> str:
        return f"pending/{_task_name(_stamp_of(self.clock.new_id()), attempts, _id_of(path))}"

    # From in flight, by the holder of the lease

    def move_leased(self, lease: _Lease, target: str, outcome: str = "") -> str:
        """Rename the file of a leased task, for its holder, and return the new path. outcome: the
        field of WorkCounts that counts the delivery, or "" if it goes on. Raises LeaseLost. After
        an OSError of a later step, the task has moved."""
        tag = lease.path[_TAG_AT:]
        is_keyed = tag >= "8"  # _is_keyed(), inlined: a call would be 3 % of done()
        with self.keys.lock(tag) if is_keyed else self.lock:
            try:
                # RACE (Model): another worker moves the file first
                if is_keyed:
                    gone_to = self.keys.move_keyed(lease.path, target)
                else:
                    gone_to = self.files.move(lease.path, target)
            except FileNotFoundError:
                # a missing data_dir or state directory is disk trouble, and raises here
                directory = os.path.dirname(target)
                self.files.dirs[directory if directory in _STATE_DIRS else "pending"]
                raise self.lease_lost(lease) from None
            lease.outcome = outcome
        if lease.has_checkpoint and _ends_at(target):
            self.files.remove(f"checkpoints/{_id_of(lease.path)}")
        return gone_to

    def lease_lost(self, lease: _Lease) -> LeaseLost:
        late_ns = -self.left_ns(lease.path)
        if lease.outcome:
            why = f"this delivery has ended before; its outcome was: {lease.outcome}"
        elif late_ns >= 0:
            why = f"its lease of {lease.length_ns / 1e9:g} s ran out {late_ns / 1e9:.3f} s ago"
        else:
            why = "this queue has no such lease: finished, moved, given up, or of another queue"
        return LeaseLost(_id_of(lease.path), late_ns >= 0, why)

    def finish(self, task: FemtoTask) -> None:
        """Move a leased task to done/. With keep_done=False, or if done/ can't take it, remove it:
        it would run again and again. Raises LeaseLost."""
        lease = _lease_of(task)
        if self.keep_done:
            try:
                gone_to = self.move_leased(lease, f"done/{lease.path[_ID_AT:]}", "done")
            except OSError as error:
                is_refused = error.errno in _OUT_OF_SPACE_ERRNOS
                if "/done" in str(error.filename2 or error.filename):
                    # EXDEV: done/ is a mount of its own
                    is_refused |= error.errno in (
                        *_ONE_FILE_ERRNOS,
                        errno.ENOTDIR,
                        errno.EXDEV,
                    )
                # If the lease is gone, only a step after the rename has failed. But EXDEV comes
                # before the system looks for the lease: below, LeaseLost is raised.
                is_there = error.errno == errno.EXDEV or self.files.exists(lease.path)
                if not is_refused or not is_there:
                    raise
                text = "task %s is done, and removed: done/ can't take it: %s"
                _log().warning(text, _id_of(lease.path), error)
            else:
                if self.files.is_durable:
                    self.files.sync_with_dir(gone_to)
                return
        # TOPIC: syncs. No renewal renames the file between the two steps.
        with self.keys.lock_of(lease.path), self.lock:
            with suppress(FileNotFoundError):  # then move_leased() raises LeaseLost
                self.files.sync_with_dir(lease.path)
            self.move_leased(lease, "", "done")
        with suppress(FileNotFoundError):
            # RACE (Sharing): another worker removes the directory of a lease that was attached
            self.files.sync_dir(os.path.dirname(lease.path))

    def end_failed(self, task: FemtoTask, error: str | BaseException | None) -> None:
        lease = _lease_of(task)
        ident = _id_of(lease.path)
        with nullcontext("") if error is None else self._new_reason(error) as path:
            target = self._failed_path(lease.path)
            self.move_leased(lease, target, "failed")
            # CRASH (faults.py): the task is in failed/, without a reason, or with an older one.
            self._put_reason(ident, path)
        self.files.sync_with_dir(target)

    def _failed_path(self, source: str) -> str:
        """Return failed/<id>, or a name with the order in front if that one is taken."""
        ident = _id_of(source)
        short = f"failed/{ident}"
        with _ignore_missing():
            if not os.path.samestat(self.files.lstat(short), self.files.lstat(source)):
                return f"failed/{_task_name(_stamp_of(ident), _attempts_of(source), ident)}"
        return short

    def _put_reason(self, ident: str, path: str) -> None:
        """Put a reason into failed/. If its path is "", remove an older one."""
        self.files.unlink_if_exists(f"failed/{ident}.error")
        if path:
            self.files.move(path, f"failed/{ident}.error")

    def _new_reason(self, error: str | BaseException) -> AbstractContextManager[str]:
        if isinstance(error, str):
            text = error
        elif isinstance(error, _CommandFailed):
            text = str(error)
        else:
            text = _traceback_of(error)
        content = (text.removesuffix("\n") + "\n").encode("utf-8", "backslashreplace")
        return self.files.replacement(f"{self.clock.new_id()}.error", content)

    def requeue(self, task: FemtoTask, target: str) -> None:
        gone_to = self.move_leased(_lease_of(task), target, "released")
        self.note_arrival(gone_to)
        self.files.sync_with_dir(gone_to)

    def renew(
        self, task: FemtoTask, length_ns: int | None = None, until_s: float = _FOREVER_S
    ) -> None:
        """Give a lease a new deadline, after length_ns. None: its own length, or the time to the
        old deadline if that is longer. until_s: as in _Keys.lock(). Raises LeaseLost."""
        lease = _lease_of(task)
        with self.keys.lock_of(lease.path, until_s), self.lock:
            # it was given back, and waits for a lock
            if lease.path in self.lease_dir.orphans:
                raise self.lease_lost(lease)
            if length_ns is None:
                length_ns = max(lease.length_ns, self.left_ns(lease.path))
            deadline_ns = self.clock.now_ns() + length_ns
            path = re.sub("/[0-9]{20}", f"/{deadline_ns:020d}", lease.path)
            try:
                lease.path = self.move_leased(lease, path)
            except BaseException:
                # Ctrl-C may have come after the rename.
                with suppress(OSError):
                    if self.files.exists(path):
                        lease.path = path
                raise

    def left_ns(self, lease: str) -> int:
        return _stamp_of(lease) - self.clock.now_ns()

    # From in flight, by others

    def reclaim(self, lease: str) -> None:
        """Put a task back: to the path in `orphans`, or else to the place of its push. If the move
        fails, the lease stays in `orphans`."""
        orphans = self.lease_dir.orphans
        orphans[lease] = source = orphans.get(lease)
        target = source or _push_place(_id_of(lease), _attempts_of(lease))
        try:
            self.note_arrival(self.move_task(lease, target, 0))
        except BlockingIOError:
            return  # RACE (Keyed): another process holds the key's lock
        except FileNotFoundError:
            # RACE (Liveness, storm.py): the holder settled the task first, or another worker
            # reclaimed it. But if the lease still exists, the directory of the target is missing.
            if self.files.exists(lease):
                return
        orphans.pop(lease, None)

    def reclaim_all(self, directory: str, boot: str = "") -> None:
        """Reclaim the leases in a directory (those of one boot), except detached ones. The caller
        holds the exclusive lock of the directory."""
        leases = [it for it in self.files.entries(directory) if it.boot != _DETACHED]
        _for_each(self.reclaim, [it.path for it in leases if boot in ("", it.boot)])

    # To failed/, and back

    def quarantine(self, source: str, reason: str) -> None:
        """Make a dead letter of a task, and log the reason. Raises OSError if it can't be moved."""
        ident = _id_of(source)
        target = self._failed_path(source)
        try:
            self.move_task(source, target)
        except FileNotFoundError:
            if self.files.exists(source):
                raise
            return  # RACE (Faults): another worker or a person moved it first
        with suppress(OSError):
            with self._new_reason(reason) as path:
                self._put_reason(ident, path)
            self.files.sync_with_dir(target)
        self.files.remove(f"checkpoints/{ident}")
        _log().error("task %s is in failed/: %s", ident, reason)

    def requeue_failed(self, source: str) -> bool:
        """Put a failed task at the back of pending/, for a first attempt. Return False if it is
        gone. Raises KeyInFlight if its key has another task."""
        ident = _id_of(source)
        target = self.back_path(source, 0)
        try:
            with self.keys.lock_of(ident):
                if _is_keyed(ident):
                    self.keys.reserve(source, target)
                # RACE (storm.py): after the rename, another worker may write a new reason. CRASH
                # (faults.py): the task is in failed/ without a reason.
                self.files.unlink_if_exists(f"failed/{ident}.error")
                self.move_task(source, target)
        except FileNotFoundError:
            # a missing pending/ is disk trouble, and raises here
            self.files.dirs["pending"]
            return False  # RACE (Healed): another process retried or removed it
        self.files.sync_with_dir(target)
        return True

    # From scheduled/

    def enqueue_scheduled(self, source: str) -> None:
        """Move a due task to the back of pending/."""
        target = self.back_path(source, _attempts_of(source))
        # RACE (Races, Keyed): another worker moves the task first, or holds the lock of its key.
        with suppress(FileNotFoundError, BlockingIOError):
            # Without the sync, a later push may sync pending/ alone. After power loss, btrfs then
            # showed the task in scheduled/, too.
            self.files.sync_with_dir(self.move_task(source, target, 0))


# ==================================================================================================
# 11. Delivery: from a waiting task to a task in the caller's hands.
#
#    TOPIC: one pop(). The system calls stand in brackets.
#    1. _Maintenance.run_due(), if some maintenance is due.
#    2. The oldest name of the batch; if it is empty, _Maintenance.refill() lists pending/ [open,
#       getdents, close], and every 0.1 s looks at PAUSED and at the directories [stat].
#    3. _LeaseDir.claim() [rename]. If another worker was first, begin again.
#    4. _deliver(): read the record [open, read, close]. For a task with a key: _Keys.to_deliver()
#       [readlink, stat]. For a second delivery: the checkpoint [open].
#
#    TOPIC: close() while another thread of this object waits for a task. Under the worker's lock,
#    close() adds 1 to `close_count`, which ends all waits, and ends all leases. A pop() that has
#    just claimed a task returns it, and the next call for this task says LeaseLost.
# ==================================================================================================

# the listings of one call, if the claims of all that were found fail
_MAX_LISTINGS = 8


class _Consumer(_Worker):
    """A worker that takes tasks."""

    def take_oldest(self, length_ns: int) -> FemtoTask | None:
        """Run the maintenance that is due, and lease the oldest task. Return None if none waits, or
        if the queue is paused. Raises the OSError of the maintenance if no task waits."""
        batch = self.batch
        close_count = self.lease_dir.close_count
        listings = 0
        while True:
            if time.monotonic() >= self.maintenance.wake_s:
                self.maintenance.run_due()
            lease = _Lease()
            lease.length_ns = length_ns
            try:
                with self.lock:
                    if not batch.names:
                        if listings:
                            # other workers won all claims, or our lease directory is gone
                            self.maintenance.drop_batch()
                        listings += 1
                        # RACE (InterruptedDelivery): another thread calls close() during run_due().
                        is_closed = self.lease_dir.close_count != close_count
                        if is_closed or listings > _MAX_LISTINGS:
                            return None
                        if not self.maintenance.refill():
                            return None
                    name = batch.names.pop()
                    is_claimed = self.lease_dir.claim("pending", name, lease)
                if not is_claimed:
                    batch.correct_after_loss(f"pending/{name}")
                elif task := self._deliver(lease):
                    return task
            except BaseException as error:
                self._undo_claim(lease, error)
                raise

    def take_named(
        self,
        tag: str,
        ident: str,
        length_ns: int,
        until_s: float = 0,
        even_paused: bool = False,
    ) -> FemtoTask | None:
        """Run the maintenance that is due, and lease the waiting task of an id, or of a key with
        this tag. Return None if no such task can be claimed by the time until_s (see
        _Keys.lock()), or if the queue is paused."""
        if time.monotonic() >= self.maintenance.wake_s:
            self.maintenance.run_due()
        if tag and not self.keys.may_have_task(tag):
            return None
        if not even_paused and self.files.exists("PAUSED"):
            return None
        for _ in range(_MAX_LISTINGS):
            lease = _Lease()
            lease.length_ns = length_ns
            try:
                with self.keys.lock_of(ident or tag, until_s):
                    path = self._path_to_take(tag, ident)
                    if not path:
                        return None
                    directory, _, name = path.partition("/")
                    # RACE (Lifecycle): another worker's pop() claims the task here, and the next
                    # round sees the task in flight.
                    with self.lock:
                        is_claimed = self.lease_dir.claim(directory, name, lease)
                    if is_claimed:
                        if task := self._deliver(lease):
                            return task
                    elif path in self.batch.barred:
                        raise _os_error(errno.EPERM, f"{self.files.path}/{path}")
            except BaseException as error:
                self._undo_claim(lease, error)
                if not isinstance(error, BlockingIOError):
                    raise
                # RACE (Races): another process holds the lock of the key, such as the push() that
                # has woken this take_async(). The release of the lock wakes nobody.
                self.maintenance.sooner("look", _LONGEST_LOCK_PAUSE_S)
                return None
            # perhaps our lease directory is gone, or was never opened
            self.lease_dir.ensure_open()
        return None

    def _path_to_take(self, tag: str, ident: str) -> str:
        """Return the path of the waiting task, or "". By key, a task that is not due is none."""
        if ident:
            entry = self.files.find_id(ident, "scheduled", "pending")
            return entry.path if entry else ""
        path, _ = self.keys.find(tag)
        is_later = path.startswith("scheduled/") and _stamp_of(path) > _latest_due_ns()
        return "" if is_later or path.startswith("inflight-") else path

    def _deliver(self, lease: _Lease) -> FemtoTask | None:
        """Read a claimed task, and return it. Return None if it became a dead letter, waits again,
        or is gone."""
        waiting = lease.source
        ident = waiting[_ID_AT:]
        before = _attempts_of(waiting) if "~" in waiting else 0
        if self.max_attempts is not None and before >= self.max_attempts:
            why = f"delivered {before} times without done() or fail(): max_attempts reached"
            self.quarantine(lease.path, why)
            return None
        try:
            data, key = self.files.read(self.lease_dir.directory, lease.name, ident)
            payload = data if key is None else self.keys.to_deliver(lease, data)
        except CorruptTask as error:
            self.quarantine(lease.path, error.reason)
            return None
        except FileNotFoundError as error:
            # a person moved the lease, or the lease directory
            self.maintenance.drop_batch()
            self._undo_claim(lease, error)
            return None
        if payload is None:
            return None
        task = FemtoTask(ident, payload, before + 1, key, lease, self.clock.anchor_ns)
        if "~" in waiting:  # only such a task may have been delivered before
            task.checkpoint = _read_checkpoint(self, ident, payload)
            lease.has_checkpoint = task.checkpoint is not None
        return task

    def _undo_claim(self, lease: _Lease, error: BaseException) -> None:
        """Undo a claim after an error."""
        # error                                   where the task goes   counted
        # of this task alone (is_its_own)         the back of pending/  yes, unless it is locked
        # another OSError, but not a passing one  the back of pending/  no
        # any other, such as Ctrl-C               where it was          no
        #
        # A task from scheduled/ goes where it was.
        if not lease.path:
            return
        place = lease.source
        # A file or key is locked, the payload is too large, or a file of the task can't be used.
        # For other errors of the record, read() sets `task_id`.
        is_its_own = (
            isinstance(error, (BlockingIOError, MemoryError))
            or getattr(error, "errno", None) in _ONE_FILE_ERRNOS
            or hasattr(error, "task_id")
        )
        if is_its_own:
            error.task_id = _id_of(place)  # type: ignore[attr-defined]
        if place.startswith("pending/") and (is_its_own or not _is_passing(error)):
            is_counted = is_its_own and not isinstance(error, BlockingIOError)
            counted = _attempts_of(lease.path if is_counted else place)
            place = self.back_path(place, counted)
        with self.lock:
            try:
                # CRASH (faults.py): before the rename, the task is leased, and counted.
                self.files.move(lease.path, place)
            except OSError:
                # The claim was not done, close() was first, or the disk failed.
                self.lease_dir.orphans[lease.path] = place
        self.note_arrival(place)


# ==================================================================================================
# 12. Maintenance: what pop() and take() do periodically beside taking a task. One schedule says
#    what is done when: `next_s`.
#
#    look       look for PAUSED, and for directories that were replaced
#    enqueue    move due tasks from scheduled/ to pending/
#    reclaim    take back the leases that have ended
#    repair     promote the payloads in keys/ whose task is gone
#    sweep      remove the files that killed processes left behind
#    purge      if keep_done is a number: delete old tasks in done/
#    list       list pending/ again, although the batch is not empty: another process may have put
#               an older task there
#
#    If no process calls pop() or take(), nothing is done.
#    Invariant: an OSError of the maintenance never stops deliveries. If no task waits, pop()
#    repeats what failed, and raises the OSError if it fails again. An error of one file or
#    directory that this user may not use is only logged.
#
#    TOPIC: how a lease ends without its holder. _Worker.reclaim() moves the task back to the place
#    of its push, and the delivery counts as an attempt, in these cases:
#    - The deadline has passed: _reclaim_from() of any worker.
#    - The process of the worker is dead. Another worker of the same boot gets the lock of its
#      directory: _reclaim_if_dead().
#    - A worker starts under the same node_id, and no other object lives under it:
#      _LeaseDir._hold().
#    - The queue object is closed, and no other object lives under its node_id: _LeaseDir.give_up().
#    - The lease is an orphan. The next reclaim of the same worker moves the task.
#    A detached lease ends by its deadline only. So does every lease where there is no flock, and
#    for the workers of other hosts. A person can end any lease, by moving the file.
# ==================================================================================================

_BASE_INTERVAL_S = 0.4  # between two looks for due tasks and dead workers
_REPAIR_INTERVAL_S = 30.0
_LONGEST_PAUSE_S = 20.0
_LEFTOVER_NS = 3600 * 10**9  # a file in creating/ is stale after this time
_OLD_CHECKPOINT_NS = 30 * 86400 * 10**9
# an empty lease directory whose lock is free is kept for this time
_IDLE_NS = 60 * 10**9
_PURGE_SLICE_S = 0.02  # how long one purge lasts


class _Maintenance:
    """The maintenance of one worker. A thread holds the worker's lock while it runs.

    next_s: when each is run next, on the monotonic clock. wake_s: the first of these times."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._files = worker.files
        self._batch = worker.batch
        self._lease_dir = worker.lease_dir
        self._lock = worker.lock
        # The function, and the pause after it. A function that returns True has stopped before
        # its end.
        self._acts: dict[str, tuple[Callable[[], object], float]] = {
            "look": (self._look, _BASE_INTERVAL_S),
            "enqueue": (self._enqueue_due, _BASE_INTERVAL_S),
            "reclaim": (self.reclaim_ended, _BASE_INTERVAL_S),
            "repair": (worker.keys.repair, _REPAIR_INTERVAL_S),
            "sweep": (self.remove_stale_files, _REPAIR_INTERVAL_S),
            "list": (self._list, 1.0),
        }
        if not isinstance(worker.keep_done, bool):
            every_s = max(_BASE_INTERVAL_S, worker.keep_done / 10)
            self._acts["purge"] = (self._purge_done, every_s)
        self.next_s = dict.fromkeys(self._acts, 0.0)
        self.wake_s = 0.0
        # what raised OSError at its last run, or returned True
        self._unfinished: set[str] = set()
        # When refill() is to look again. 0: nothing is listed before a look that finds no PAUSED.
        self._next_look_s = 0.0
        # the time of scheduled/ before its last listing, and the first due time seen there
        self._changed_ns = 0
        self._first_due_ns = _MAX_STAMP_NS
        # the listing of done/, while a purge goes on
        self.done_scan: Iterator[str] | None = None

    # What runs when

    def sooner(self, what: str, seconds: float) -> None:
        self.next_s[what] = min(self.next_s[what], time.monotonic() + seconds)
        self.wake_s = min(self.wake_s, self.next_s[what])

    def note_due(self, due_ns: int) -> None:
        self.sooner("enqueue", (due_ns - _wall_ns()) / 1e9)

    def run_due(self) -> None:
        with self._lock:
            # Run what is nearly due, too, so that a wait wakes less often.
            soon_s = time.monotonic() + _BASE_INTERVAL_S / 5
            due = [what for what, at_s in self.next_s.items() if at_s <= soon_s]
            try:
                _for_each(self._run, due)
            except OSError as error:
                _raise_if_no_errno(error)  # else refill() runs it again
            self.wake_s = min(self.next_s.values())

    def _run(self, what: str) -> None:
        """Run one part now, and set the time of its next run. Raises its OSError."""
        act, every_s = self._acts[what]
        began_s = time.monotonic()
        # Set before the run, because Ctrl-C may end it. The run, or another thread, may call
        # sooner().
        self.next_s[what] = began_s + every_s
        self._unfinished.add(what)
        try:
            if not act():
                self._unfinished.discard(what)
        finally:
            ended_s = time.monotonic()
            # A slow part rests for 20 times as long as it took, so it takes 5 % of the time. The
            # rest has a limit, because the disk may have hung only once.
            rest_s = min(20 * (ended_s - began_s), _LONGEST_PAUSE_S)
            if self.next_s[what] >= began_s + every_s:
                self.next_s[what] = ended_s + max(every_s, rest_s)

    def refill(self) -> bool:
        """List pending/. If no task waits there, run what may find one, and list again. Return
        whether a task waits. Raises the OSError of what failed twice in a row. The caller holds the
        worker's lock."""
        if time.monotonic() >= self._next_look_s:
            self._run("look")
        self._list()
        if self._batch.names:
            return True
        wanted = [*self._unfinished]
        # A task came to scheduled/, or the date was set. But a slow run rests (see _run()).
        is_changed = self._changed_ns != self._files.lstat("scheduled").st_mtime_ns
        is_rested = self.next_s["enqueue"] <= time.monotonic() + _BASE_INTERVAL_S
        if is_rested and (is_changed or _latest_due_ns() >= self._first_due_ns):
            wanted.append("enqueue")
        if self._lease_dir.orphans:
            wanted.append("reclaim")
        if self.next_s["repair"] <= time.monotonic() + _BASE_INTERVAL_S:
            wanted.append("repair")
        _for_each(self._run, wanted)
        if wanted:
            self._list()
        return bool(self._batch.names)

    def drop_batch(self) -> None:
        """Make the next pop() look before it takes a task."""
        with self._lock:
            self._batch.names = []
            self._next_look_s = 0.0

    # What is done

    def _look(self) -> None:
        self._lease_dir.ensure_open()
        if self._files.exists("PAUSED"):
            self.drop_batch()
        else:
            self._next_look_s = time.monotonic() + _LOOK_INTERVAL_S

    def _list(self) -> None:
        if self._next_look_s:
            self._batch.relist(time.monotonic())
            if not self._batch.seen:
                self._files.shrink(self._worker.clock.new_id())

    def _enqueue_due(self) -> bool:
        """Move the due tasks to the back of pending/. Stop after _BASE_INTERVAL_S, because other
        threads must be able to renew their leases, and return True: go on when no task waits."""
        self._changed_ns = self._files.lstat("scheduled").st_mtime_ns
        names = sorted(self._files.task_names("scheduled"))
        count = bisect.bisect(names, _latest_due_ns(), key=_stamp_of)
        self._first_due_ns = _MAX_STAMP_NS
        if count < len(names):
            self._first_due_ns = _stamp_of(names[count])
            self.note_due(self._first_due_ns)
        due = [f"scheduled/{name}" for name in names[:count]]
        end_s = time.monotonic() + _BASE_INTERVAL_S
        in_time = itertools.takewhile(lambda _: time.monotonic() < end_s, due)
        _for_each(self._worker.enqueue_scheduled, in_time)
        return time.monotonic() >= end_s

    def reclaim_ended(self) -> None:
        with self._lock:  # check(repair=True) calls this method without the lock
            try:
                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
            finally:
                _for_each(self._reclaim_from, self._files.node_dirs())

    def _reclaim_from(self, directory: str) -> None:
        now_ns = self._worker.clock.now_ns()
        leases = self._files.entries(directory)  # in the order of their deadlines
        late = [it for it in leases if it.stamp_ns <= now_ns]
        if len(late) < len(leases):
            self.sooner("reclaim", (leases[len(late)].stamp_ns - now_ns) / 1e9)
        ended = [it.path for it in late if not self._renewed_recently(it)]
        try:
            _for_each(self._worker.reclaim, ended)
        finally:
            if directory != self._lease_dir.directory:
                self._reclaim_if_dead(directory)

    def _renewed_recently(self, entry: _Entry) -> bool:
        """Say whether a lease of another clock still runs, although its deadline has passed here.
        The queue clocks of hosts drift apart, but their wall clocks agree: see st_ctime."""
        length_ns = self._worker.length_ns
        own = (self._worker.clock.boot, _DETACHED)
        if length_ns < _FOREVER_NS and entry.boot not in own:
            # RACE (Crash): another process settles or reclaims the task.
            with suppress(FileNotFoundError):
                changed_ns = self._files.lstat(entry.path).st_ctime_ns
                return 0 <= _wall_ns() - changed_ns < length_ns
        return False

    def _reclaim_if_dead(self, directory: str) -> None:
        lock = self._files.open_dir(directory)
        if lock is None:
            return
        with closing(lock):
            if not lock.try_lock() or not lock.is_at_path():
                return
            self._worker.reclaim_all(directory, self._worker.clock.boot)
            # On some mounts (FUSE), other hosts do not see a flock on a directory. An idle worker
            # looks dead there.
            age_ns = _wall_ns() - lock.status().st_mtime_ns
            if self._files.is_local or not 0 <= age_ns < _IDLE_NS:
                self._files.remove_empty_dir(directory)

    def _purge_done(self) -> None:
        """Delete old tasks in done/. Stop after _PURGE_SLICE_S, and go on in the next run."""
        before_s = time.time() - self._worker.keep_done
        end_s = time.monotonic() + _PURGE_SLICE_S
        self.done_scan = self.done_scan or self._files.scan("done")

        def purge(name: str) -> None:
            self._files.unlink_if_older(f"done/{name}", before_s)

        for name in filter(_FORMS["done"], self.done_scan):
            _for_each(purge, [name])
            if time.monotonic() >= end_s:
                self.sooner("purge", 5 * _PURGE_SLICE_S)
                return
        self.done_scan = None

    def remove_stale_files(self) -> None:
        def remove(path: str) -> None:
            if path.endswith(".pending"):  # a directory that shrink() made
                self._files.remove_empty_dir(path)
            else:
                self._files.unlink_if_exists(path)

        _for_each(remove, self.stale_files())

    def stale_files(self) -> list[str]:
        """Return the files in creating/ of more than an hour, and the checkpoints of more than a
        month. Both the time in the name and st_ctime count: clocks can be set, and differ."""
        stale = []
        before_ns = self._worker.clock.now_ns() - _LEFTOVER_NS
        for entry in self._files.find("creating", "checkpoints"):
            is_new = entry.directory == "creating"
            age_ns = _LEFTOVER_NS if is_new else _OLD_CHECKPOINT_NS
            # RACE (Crash): another process ends the push or the task.
            with suppress(FileNotFoundError):
                changed_ns = self._files.lstat(entry.path).st_ctime_ns
                if entry.stamp_ns < before_ns and changed_ns < _wall_ns() - age_ns:
                    stale.append(entry.path)
        return stale


# ==================================================================================================
# 13. FemtoQueue: the public interface. The methods stand in the order of a task's life.
#    Invariant: a method checks its arguments before it changes anything. Only push_many() checks
#    each payload just before its push.
# ==================================================================================================

# TOPIC: what is on disk when a call returns. One rename or unlink commits each call. The rename is
# atomic (POSIX), so no process sees half a task. If a lease is gone, the rename fails with ENOENT,
# and the call raises LeaseLost.
#
# Each effect survives the death of any process. If the queue is durable (sync_after_write), the
# calls marked with * also survive power loss. Then a claim or a renewal may be undone, and purged
# tasks may be back. If the queue is not durable, power loss may undo any call, and tear files.
#
# *  push, push_many       the record is in pending/
# *  push with a key       the same; or in keys/, or in the file of the key's task in scheduled/
# *  schedule              the record is in scheduled/, under its due time; or as with a key
#    pop, take, extend     the file is in inflight-<node>/, under its deadline
# *  checkpoint            the new bytes are in checkpoints/<id>
# *  done                  the file is in done/; or removed (keep_done, or done/ can't take it)
# *  fail                  the file is in failed/, and a reason is in failed/<id>.error
# *  release               the file is in pending/ or scheduled/
# *  retry, retry_failed   the file is in pending/, and its reason is removed
#    purge                 the files are removed
#    pause, resume         the file PAUSED exists; is removed
#    close                 the files of the leases are in pending/; an empty lease directory is
#                          removed


class FemtoQueue:
    """A queue in the directory `data_dir`. Each object is one worker of the queue.

    If a worker dies, other workers of its host take its tasks back. On other hosts, after a reboot,
    and where there is no flock(2), they wait for the deadlines. Objects may share a node_id. After
    a restart under the same node_id, the first pop() takes back the leases of the earlier process.
    But while another object of this name lives, these leases end by their deadlines only.

    The order of tasks and the deadlines do not change when the date is set. Threads may share an
    object. A forked child's copy is another worker. An unpickled object is made anew from the
    settings. A signal handler may call push() and schedule(), without a key, and no other method.
    For anything else, let it set a flag, or the Event of work(stop=...).

    Raises TypeError or ValueError if an argument is invalid, OSError if a directory can't be made.
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
        """Open the queue, and make data_dir (mode 0700) if it is missing.

        node_id:  1 to 100 of A-Z a-z 0-9 . _ -. None: a new name.
        timeout_stale_ms:  the milliseconds of a lease. None: no deadline. After a reboot, only a
            restart under the same node_id or the command `release` ends such a lease.
        sync_after_write:  True: what a call did survives power loss, too, not only the death of
            processes.
        max_attempts:  1 to 999,999: a task that was delivered so often is failed. None: no limit.
        keep_done:  False or 0: done() deletes the task. A number: pop() deletes it after so many
            seconds.
        retry_delay_s:  the seconds before a second attempt in processing() and work(). They double
            with each attempt, up to an hour. A random part of up to half is subtracted.
        poll_interval_s:  the longest pause, in seconds, of drain() and join(). Other waits need it
            only where inotify(7) is missing, or where other hosts write.
        detached:  True: leases outlive this process, until their deadlines, for attach().
        """
        self._given_node_id = _check_node_id(node_id)
        self._length_ns = _lease_length_ns(
            "timeout_stale_ms", timeout_stale_ms, _FOREVER_NS
        )
        _check_number("retry_delay_s", retry_delay_s)
        _check_number("poll_interval_s", poll_interval_s, 1e-6)
        if not isinstance(keep_done, bool):
            _check_number("keep_done", keep_done)
        _check_max_attempts(max_attempts)
        self.data_dir = data_dir
        self.timeout_stale_ms = timeout_stale_ms
        self.sync_after_write = sync_after_write
        self.max_attempts = max_attempts
        self.keep_done = keep_done
        self.retry_delay_s = retry_delay_s
        self.poll_interval_s = poll_interval_s
        self.detached = detached
        path = _check_dir("data_dir", data_dir)
        self._files = _open_files(path, sync_after_write)
        self._files.make_dirs()
        if text := _trust_problem(self._files):
            _warn_once(f"{self._files.path}: {text}")
        _warn_of_old_tasks(self._files)
        self._clock = _QueueClock(self._files)
        self._init_worker()
        _fork_hooks[self] = FemtoQueue._after_fork

    def _init_worker(self) -> None:
        # In a forked child, the node_id is new, unless the program has given one.
        self.node_id = self._given_node_id or f"{os.getpid()}-{self._clock.tag}"
        self._worker = _Consumer(self, self._files, self._clock)

    def _after_fork(self) -> None:
        # The child opens all directories itself: it may close the descriptors of its parent.
        self._files.dirs.clear()
        self._clock.init_worker()
        self._init_worker()

    # Producing

    def push(
        self,
        data: _BytesLike,
        *,
        delay_s: float = 0,
        key: str | None = None,
        if_in_flight: _IfInFlight = "buffer",
    ) -> str:
        """Add a task to the back of the queue, and return its id.

        data:  the payload: bytes, bytearray or memoryview.
        delay_s:  the seconds (wall clock) for which the task waits in scheduled/ first.
        key:  1 to 200 bytes in UTF-8. A task of the key that waits gets `data` as its payload, for
            a first attempt. The task keeps its id, and its place unless delay_s is given.
        if_in_flight:  if the task is leased, "buffer" puts `data` behind it, in place of an earlier
            one. When the task ends, `data` becomes a task, with the returned id. If it comes back,
            `data` is its payload. "update" does the same, but returns the id of the task, and drops
            `data` when it ends, unless "buffer" came first. "reject" raises KeyInFlight.

        Raises TypeError or ValueError if an argument is invalid, and OSError. A key needs flock(2).
        After an OSError, `data` may be in the queue only if a worker took it before the sync
        failed, if it had replaced a payload, or if the disk refused to undo the push.
        """
        if delay_s != 0 or key is not None or if_in_flight != "buffer":
            due_ns = _due_after_ns(delay_s) if delay_s != 0 else None
            return self._push_at(due_ns, data, key, if_in_flight)
        ident = self._clock.new_id()
        self._files.publish(ident, data, "pending", ident, self.sync_after_write)
        return ident

    def push_many(self, iterable: Iterable[_BytesLike]) -> list[str]:
        """Add tasks to the back of the queue, in order, and return their ids as a list.

        The tasks appear one by one: a worker may take the first task before the last is pushed.

        iterable:  the payloads, each bytes, bytearray or memoryview. The tasks have no keys.

        Raises TypeError if `iterable` is a single payload, or if one of the payloads is not
        bytes-like. Raises OSError if the disk did not take a task, and any exception that
        `iterable` raises. The tasks before the error are in the queue, and the attribute
        `pushed_ids` of the exception has their ids. If the sync at the end failed, power loss may
        still undo them.
        """
        if isinstance(iterable, _BytesLike | str):
            raise TypeError(
                "push_many takes an iterable of payloads; for one payload use push"
            )
        ids: list[str] = []
        try:
            with self._files.batch() as syncs_each:
                for data in iterable:
                    ident = self._clock.new_id()
                    self._files.publish(ident, data, "pending", ident, syncs_each)
                    ids.append(ident)
        except BaseException as error:
            with suppress(Exception):
                # an exception class of the caller may refuse the attribute
                error.pushed_ids = ids  # type: ignore[attr-defined]
            raise
        return ids

    def schedule(
        self,
        data: _BytesLike,
        time_us: float | datetime,
        *,
        key: str | None = None,
        if_in_flight: _IfInFlight = "buffer",
    ) -> str:
        """Add a task that joins the back of the queue at a given time, and return its id.

        data, key, if_in_flight:  as in push(). A task of the key that waits gets the new time, too.
        time_us:  the due time by the wall clock. Microseconds since the epoch, as in time.time() *
            1e6, or a datetime with a time zone. 0 or a time in the past means at once.

        Raises ValueError if the time is not before the year 2255, or if a datetime has no time
        zone. Also raises ValueError for a time from one second after the epoch to the end of 1972,
        because such a number is most likely in seconds or milliseconds. Raises TypeError if
        `time_us` is neither a number nor a datetime, and any error that push() raises.

        The maintenance of pop() looks for due tasks every 0.4 s. A pop() that waits does at once.
        """
        return self._push_at(_due_time_ns(time_us), data, key, if_in_flight)

    def _push_at(
        self, due_ns: int | None, data: _BytesLike, key: str | None, if_in_flight: str
    ) -> str:
        """Push a task that has a due time or a key, or both."""
        if if_in_flight not in _IF_IN_FLIGHT:
            raise ValueError(
                f"if_in_flight must be {' or '.join(_IF_IN_FLIGHT)}, not {if_in_flight!r}"
            )
        if key is None:
            if due_ns is None or if_in_flight != "buffer":
                raise TypeError(f"if_in_flight={if_in_flight!r} needs a key")
            ident = self._clock.new_id()
            name = _task_name(due_ns, 0, ident)
            self._files.publish(ident, data, "scheduled", name, self.sync_after_write)
            self._worker.note_arrival(f"scheduled/{name}")
            return ident
        _notice_fork()
        # RACE (Keyed): another worker's pop() claims the waiting task before put() replaces the
        # payload, or a person moves the file. Then put() returns "", and the next round finds the
        # task where it is now: in flight, for example.
        put = self._worker.keys.put
        while True:
            if ident := put(_encode_key(key), _as_bytes(data), if_in_flight, due_ns):
                return ident

    # Consuming

    def pop(
        self, timeout: float | None = 0, *, lease_ms: float | None = None
    ) -> FemtoTask | None:
        """Lease the oldest task, and return it. Return None if there is no task to deliver.

        done(), fail() or release() ends the lease. If it ends otherwise, the task is delivered
        again. A corrupt task moves to failed/ and is logged, and pop() takes the next.

        timeout:  the seconds to wait. 0: do not wait. None: no limit.
        lease_ms:  the milliseconds of the lease and of its renewals. None: timeout_stale_ms.

        Also returns None if the queue stays paused, or if close() in another thread ended the call.

        Raises ValueError or TypeError if an argument is invalid, and OSError. An OSError of the
        maintenance is raised only when no task waits, and only logged if this user may not use a
        file or directory. If an OSError or MemoryError has the attribute `task_id`, this task is at
        the back of the queue. The attempt counts, unless a file or key was locked.

        A task in pending/ that this user may not move, such as another user's in a sticky
        directory, is passed over and logged once. drain() and join() do not wait for it.
        """
        if os.getpid() != _process_id:  # inlined: a call would be 2 % of pop()
            _after_fork_in_child()
        if timeout == 0 and lease_ms is None:
            return self._worker.take_oldest(self._length_ns)
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        return self._worker.waits.wait_for(
            lambda: self._worker.take_oldest(length_ns), _end_s(timeout)
        )

    async def pop_async(
        self, timeout: float | None = None, *, lease_ms: float | None = None
    ) -> FemtoTask | None:
        """Do what pop() does, without blocking the event loop: the call waits in a thread.

        timeout, lease_ms:  as in pop(), but the default timeout is None: wait without a limit.

        Cancelling the call leaves no task leased. A task that the call has just taken returns to
        its place, uncounted.
        """
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        _notice_fork()
        # without a reference to this object, which a thread would keep alive for a while
        look = functools.partial(self._worker.take_oldest, length_ns)
        return await self._worker.waits.wait_for_async(look, _end_s(timeout), "")

    def take(
        self,
        key: str | None = None,
        timeout: float | None = 0,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
        even_paused: bool = False,
    ) -> FemtoTask | None:
        """Lease the task of a key, or the task with an id, out of turn, and return it.

        key:  the key of a task in pending/, or in scheduled/ and due.
        timeout:  the seconds to wait for the task, as in pop().
        id:  the id of a task in pending/ or scheduled/, due or not. If the task comes back, its old
            due time no longer counts. To cancel a task, take it by its id and call done().
        lease_ms:  the milliseconds of the lease, as in pop().
        even_paused:  True: take the task even if the queue is paused.

        Returns None if the task could not be leased in time, and in the cases of pop(). Raises
        TypeError unless exactly one of `key` and `id` is given, ValueError if the key or the id is
        invalid, and any error that pop() raises. A task with a key needs flock(2).
        """
        # Without a timeout, a lock that is held for a moment must not hide the task.
        until_s = _end_s(timeout if timeout != 0 else _LONG_WAIT_S)
        look = self._finder_of(key, id, lease_ms)
        return self._worker.waits.wait_for(
            lambda: look(until_s, even_paused), _end_s(timeout)
        )

    async def take_async(
        self,
        key: str | None = None,
        timeout: float | None = None,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Do what take() does, without blocking the event loop.

        The parameters are as in take(), but the default timeout is None: wait without a limit.
        Cancelling works as in pop_async(). While another process holds the lock of the key, the
        call tries again and again, until the timeout.
        """
        look = self._finder_of(key, id, lease_ms)
        return await self._worker.waits.wait_for_async(
            look, _end_s(timeout), f"{key} {id}"
        )

    def _finder_of(
        self, key: str | None, id: str | None, lease_ms: float | None
    ) -> Callable[..., FemtoTask | None]:
        """Check the arguments of take(), and return take_named() with these arguments. The caller
        passes until_s and even_paused."""
        length_ns = _lease_length_ns("lease_ms", lease_ms, self._length_ns)
        if (key is None) == (id is None):
            raise TypeError("take needs either a key or an id")
        ident = "" if id is None else _check_id(id)
        tag = "" if key is None else _key_tag(_encode_key(key))
        _notice_fork()
        return functools.partial(self._worker.take_named, tag, ident, length_ns)

    def drain(self, timeout: float | None = None) -> Iterator[FemtoTask]:
        """Iterate over tasks until no task is pending, scheduled or in flight.

        Each task is leased as by pop(). Tasks of other workers count, too: drain() waits for them.
        End each task before asking for the next: drain() also waits for what this worker holds.

        timeout:  the seconds to wait for each task. If none comes in that time, the iteration ends.
            None: no limit.

        Raises ValueError or TypeError at once if `timeout` is invalid. The iteration raises the
        errors of pop(). close() in another thread ends it.
        """
        _end_s(timeout)

        def look() -> Any:  # returns False if no work is left, which ends the wait
            return self.pop() or (None if self._worker.waits.has_work() else False)

        def wait() -> FemtoTask | None:
            _notice_fork()
            return self._worker.waits.wait_for(look, _end_s(timeout), False) or None

        return iter(wait, None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no task is pending, scheduled or in flight, and return True. join() moves no
        task. Due tasks, and the tasks of dead workers, need a worker that calls pop() or take().

        timeout:  the seconds to wait. None: no limit.

        Returns False if the timeout has passed, or if close() in another thread ended the wait.
        """
        ended = self._worker.waits.wait_for(
            lambda: not self._worker.waits.has_work() or None, _end_s(timeout), False
        )
        return ended is True

    # Ending a delivery

    def done(self, task: FemtoTask) -> None:
        """Finish the task: it moves to done/, or is deleted with keep_done=False.

        task:  the task that pop() or another method leased.

        If done/ can't take the file (a full disk, no right to write there, a link in its place),
        the task is deleted, and a warning is logged. Otherwise it would run again.

        The checkpoint of the task is removed. A payload behind the task (see push()) becomes a
        task.

        Raises LeaseLost if this delivery no longer holds the lease; then nothing is changed. Raises
        TypeError if `task` is not a FemtoTask, and the OSError of the system call. After an
        OSError, done() may be called again. It raises LeaseLost if the task had moved, and only a
        later step, such as the sync, had failed.
        """
        self._worker.finish(task)

    def fail(self, task: FemtoTask, error: str | BaseException | None = None) -> None:
        """Move the task to failed/ as a dead letter. retry() can put the task back.

        task:  the task that pop() or another method leased.
        error:  the reason: a text, or an exception, whose traceback is kept. None: no reason.

        The checkpoint and a payload behind the task are treated as in done(). Raises LeaseLost,
        TypeError and OSError as done() does. Also raises TypeError if `error` is of another type.
        """
        if not isinstance(error, str | BaseException | None):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        self._worker.end_failed(task, error)

    def release(
        self,
        task: FemtoTask,
        *,
        front: bool = False,
        delay_s: float = 0,
        counted: bool = True,
    ) -> None:
        """Give the task back, to the back of the queue, so that it is delivered again.

        task:  the task that pop() or another method leased.
        front:  True: the task returns to the place of its push.
        delay_s:  the seconds, by the wall clock, for which the task waits in scheduled/.
        counted:  False: the attempts of the task do not count this delivery.

        The next delivery gets the checkpoint. If a payload is behind the task (see push()), the
        next delivery carries that payload instead, as a first attempt without the checkpoint. If
        that payload is due later, the task waits until then, whatever `front` and `delay_s` say.

        Raises ValueError if `delay_s` is negative, or if both `front` and `delay_s` are given.
        Raises LeaseLost, TypeError and OSError as done() does.
        """
        path = _lease_of(task).path
        ident = _id_of(path)
        attempts = _attempts_of(path) - (not counted)
        due_ns = _due_after_ns(delay_s)
        if front and delay_s:
            raise ValueError(f"delay_s must be 0 with front, not {delay_s!r}")
        if delay_s:
            target = f"scheduled/{_task_name(due_ns, attempts, ident)}"
        elif front:
            target = _push_place(ident, attempts)
        else:
            target = self._worker.back_path(ident, attempts)
        self._worker.requeue(task, target)

    def extend(self, task: FemtoTask, ms: float | None = None) -> None:
        """Renew the lease of the task: give it a new deadline, and `task.path` the new path.

        task:  the task that pop() or another method leased.
        ms:  the milliseconds from now until the lease ends. None: the length for which the lease
            was taken. In a block of processing(), a smaller `ms` holds only until the next renewal.

        Raises ValueError if `ms` is not greater than 0. Raises LeaseLost, TypeError and OSError as
        done() does.
        """
        length_ns = _lease_length_ns("ms", ms, _lease_of(task).length_ns)
        self._worker.renew(task, length_ns)

    def attach(self, lease: str) -> FemtoTask:
        """Return the task of a lease that another process took, to end or extend the lease here.

        lease:  `task.path` in the other process, the last part of that path, or the id of the task.

        The payload and the checkpoint are not read: `data` is b"", `checkpoint` is None. The method
        checkpoint() reads the payload, and raises CorruptTask if it is not whole.

        A lease that is not detached still ends with the worker that took it. Without `ms`, extend()
        renews the lease for timeout_stale_ms of this object.

        Raises LeaseLost if no lease has this path or id: the lease has ended, or a renewal has
        changed the path. Raises TypeError if `lease` is not a str, and the OSError of the system
        call.
        """
        name = _check_str("lease", lease).rpartition("/")[2]
        found = (it for it in self._files.find("inflight") if name in (it.name, it.id))
        entry = next(found, None)
        task = entry and self._read_entry(entry, False, self._length_ns)
        if task is None:
            ident = _id_of(name)
            why = "it is not in flight by that name (any more)"
            now = _parse_id(ident) and self._files.find_id(ident, *_LIVE, *_ENDED)
            if now:
                why += f"; now it is {now.path}"
            # A name with "~" begins with the deadline, as 20 digits.
            has_expired = "~" in name and name < f"{self._clock.now_ns():020d}"
            raise LeaseLost(ident, has_expired, why)
        return task

    # Working

    def processing(self, task: FemtoTask) -> _Processing:
        """Return a context manager that renews the lease during its block, then ends the delivery.
        The end of an `async with` runs in a thread, and does not block the event loop.

        task:  the task that pop() or another method leased, and that the `as` clause gets.

        Without an exception, the task is finished, unless the block itself has ended the delivery.
        An exception propagates, and the task waits for another attempt (see retry_delay_s). If it
        has had max_attempts, it moves to failed/ instead, with the traceback. After an exception
        that is not an Exception, such as KeyboardInterrupt or asyncio.CancelledError, the task
        returns to the place of its push, uncounted.

        Raises TypeError if `task` is not a FemtoTask, and LeaseLost if the lease is lost at the
        beginning or the end. Raises OSError if the lease can't be renewed at the beginning, or if
        the end can't be written. The task is then delivered again, unless it has moved.
        """
        return _Processing(self, task, self._worker)

    def checkpoint(self, task: FemtoTask, data: _BytesLike) -> None:
        """Save how far the work on the task has come, and renew the lease.

        The next delivery gets the bytes as `task.checkpoint`, after release(), after an exception
        in processing(), and after the lease was taken back. A delivery with a newer payload of the
        key gets none. done() and fail() remove the checkpoint.

        task:  the task that pop() or another method leased.
        data:  the progress: bytes, bytearray or memoryview, of any meaning.

        Raises LeaseLost, and saves nothing, if this delivery no longer holds the lease. Raises
        TypeError if `data` is not bytes-like, and the OSError of the system call.
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
        """Call handler(task) for each task, within processing(), and return WorkCounts.

        handler:  a plain function, neither async nor a generator. Its exceptions are logged.
        concurrency:  the number of tasks handled at a time. More than 1: in threads.
        drain:  True: return when no task is pending, scheduled or in flight.
        stop:  a threading.Event. When it is set, the running handlers finish, and work() returns.
        idle_timeout_s:  return when this worker has been idle for so many seconds. None: never.
        time_limit_s:  take no more tasks after so many seconds. None: no limit.

        In the main thread, SIGTERM and SIGINT act as `stop`. A second one, at least 0.3 s later,
        gives the running tasks back, and work() returns. It ends a handler in this thread by
        KeyboardInterrupt; in other threads, the tasks raise LeaseLost. A third one acts as before
        work(). Raises the exception of a handler that is not an Exception, and the OSError of pop()
        or of the end of a delivery. An OSError with a `task_id` (see pop()) is only logged.
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
            wanted = "a plain function, neither async nor a generator"
            raise TypeError(f"handler must be {wanted}, not {handler!r}")
        if type(concurrency) is not int or concurrency < 1:
            raise ValueError(
                f"concurrency must be an int of 1 or more, not {concurrency!r}"
            )
        is_set = _no_op if stop is None else getattr(stop, "is_set", None)
        if not callable(is_set):
            raise TypeError(f"stop must be a threading.Event or None, not {stop!r}")
        lease_dir = self._worker.lease_dir
        close_count = lease_dir.close_count
        return _WorkerPool(
            self,
            handler,
            concurrency,
            drain,
            lambda: lease_dir.close_count != close_count or is_set(),
            idle_timeout_s=idle_timeout_s,
            time_limit_s=time_limit_s,
        ).run()

    def pause(self) -> None:
        """Stop handing out tasks, in all processes, until resume(). Tasks in flight are not
        affected, and push() still adds tasks. Other workers notice the pause at their next
        maintenance, within about a second. Raises OSError if the file data_dir/PAUSED can't be
        made."""
        with suppress(FileExistsError):  # O_EXCL: neither a link nor a FIFO is opened
            os.close(self._files.create("PAUSED"))
        self._worker.maintenance.drop_batch()

    def resume(self) -> None:
        """Hand out tasks again, no matter which process paused the queue. Calls that wait look for
        tasks at once, or after poll_interval_s. Raises OSError if data_dir/PAUSED can't be
        removed."""
        self._files.dirs.refresh()
        self._files.unlink_if_exists("PAUSED")

    @property
    def paused(self) -> bool:
        """True if the queue is paused: the file data_dir/PAUSED exists."""
        return self._files.exists("PAUSED")

    # Dead letters and upkeep

    def retry(self, id: str) -> None:
        """Put a failed task at the back of the queue, with its attempts at 0.

        id:  the id of the task.

        Raises TaskNotFound if the task is not in failed/, and KeyInFlight if its key has another
        task. Raises ValueError or TypeError if `id` is invalid, and the OSError of the system call.
        """
        ident = _check_id(id)
        # a person may have moved the task there, and kept another name
        others = self._files.find("failed", ending=ident)
        entry = self._files.find_id(ident, "failed") or next(others, None)
        if entry is None or not self._worker.requeue_failed(entry.path):
            raise TaskNotFound(f"no task {id} in failed/")

    def retry_failed(self) -> int:
        """Put every failed task at the back of the queue, oldest first, and return their number.

        A task whose key has another task now stays in failed/, and does not count. A task that may
        not be moved, such as an immutable file, is logged and stays, without its reason. Any other
        OSError is raised after the last task was tried.
        """

        def retry(entry: _Entry) -> bool:
            with suppress(KeyInFlight):
                return self._worker.requeue_failed(entry.path)
            return False

        return _for_each(retry, self._files.find("failed"))

    def purge(
        self, older_than_s: float, states: _EndState | Iterable[_EndState] = ("done",)
    ) -> int:
        """Delete tasks that ended more than older_than_s seconds ago, and return their number.

        older_than_s:  the least age in seconds, by the wall clock, since the move to done/ or
            failed/ (st_ctime).
        states:  "done" or "failed", or an iterable of them. With "failed", old reasons whose task
            is gone are deleted, too.

        A task that may not be removed is logged, and does not count. Raises ValueError or TypeError
        if an argument is invalid, and the OSError of the system call.
        """
        before_s = time.time() - _check_number("older_than_s", older_than_s)
        given = {states} if isinstance(states, str) else set(states)
        if not given <= {*_ENDED}:
            raise ValueError(
                f"states must be of {' and '.join(map(repr, _ENDED))}, not {given!r}"
            )
        # plain strings: `given` may have members of a str Enum
        wanted = [state for state in _ENDED if state in given]
        files = self._files

        def purge(path: str) -> bool:
            return files.unlink_if_older(path, before_s)

        count = _for_each(purge, [it.path for it in files.find(*wanted)])
        if "failed" in wanted:
            for name in filter(_parse_reason, files.names("failed")):
                if not files.exists(f"failed/{name.removesuffix('.error')}"):
                    _for_each(purge, [f"failed/{name}"])
        return count

    def check(self, repair: bool = False) -> list[Finding]:
        """Return what is wrong in data_dir, as a list of Finding. Every task is read. A task that
        moves meanwhile may be reported wrongly.

        repair:  True: make the repairs that are safe while workers run. The tasks of ended leases
            and of dead workers return to pending/. Payloads in keys/ whose task is gone become
            tasks. Links of keys without a task, and leftovers, are removed. These repairs are no
            findings. Corrupt tasks that wait go to failed/. False: change nothing.

        The kinds: "trust": this is root, and others own data_dir or may write to it. "foreign": a
        name that is not of the queue. "corrupt": a record that is not whole. "twice": an id in two
        places. "unreadable": a file or directory. "dead worker", "expired": leases have ended. "key
        without a task". "leftover": an old file in creating/ or checkpoints/ (an hour, 30 days).
        """
        return [*_Inspector(self._worker, repair).findings()]

    # Looking

    def stats(self) -> Stats:
        """Count the tasks in each state, and return the numbers as Stats. Only names are read:
        100,000 tasks that wait or have ended take about 60 ms. A task that moves meanwhile may be
        missed or counted twice."""
        files = self._files
        pending, scheduled = map(files.task_names, _WAITING_DIRS)
        age_ns = -1
        if pending:
            age_ns = max(0, self._clock.now_ns() - _stamp_of(min(pending)))
        if scheduled:  # the age of a task that is not due is negative
            age_ns = max(age_ns, _wall_ns() - _stamp_of(min(scheduled)))
        nodes = tuple(_node_stats(self._worker, it) for it in files.node_dirs())
        return Stats(
            pending=len(pending),
            scheduled=len(scheduled),
            inflight=sum(node.inflight for node in nodes),
            buffered=files.count("keys"),
            **{state: files.count(state) for state in _ENDED},
            oldest_pending_age_s=age_ns / 1e9 if age_ns >= 0 else None,
            nodes=nodes,
            expired=sum(node.expired for node in nodes),
        )

    def tasks(
        self, state: _State, *, data: bool = True, last: int | None = None
    ) -> Iterator[FemtoTask]:
        """Iterate over the tasks in a state, in the order of their names, without leasing them. The
        tasks in flight come worker by worker. A task that waits has the newest payload of its key,
        unless its last claim was undone.

        state:  one of STATES.
        data:  False: read only the headers. `data` is then b"", and a corrupt task is not noticed.
        last:  look only at so many tasks, the last ones. None: at all tasks.

        Tasks that move meanwhile are left out. Corrupt tasks, and tasks that this user may not
        read, are left out and logged. Raises ValueError if `state` is invalid, or `last` negative.
        """
        if state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")
        _check_number("last", last or 0)
        # a plain str: `state` may be a member of a str Enum
        entries = self._files.find(STATES[STATES.index(state)])

        def read() -> Iterator[FemtoTask]:
            for entry in deque(entries, last):
                try:
                    if task := self._read_entry(entry, data):
                        yield task
                except (CorruptTask, PermissionError, MemoryError) as error:
                    why = str(error) or f"{entry.path}: {error!r}"
                    _log().warning("left out: %s", why)

        return read()

    def peek(
        self, id: str | None = None, *, key: str | None = None
    ) -> FemtoTask | None:
        """Return the task with an id, or the task of a key, without leasing it. A task that waits
        has the newest payload of its key.

        id:  the id of a task in any state, or of a payload behind a task. In done/ and failed/, the
            file must have the id as its name, as the queue gives it.
        key:  the key of a task that waits or is in flight.

        Returns None if there is no such task, or if the task moved while peek() looked. Raises
        CorruptTask if the file is not a whole record, and the OSError of the system call. Raises
        ValueError if the id or key is invalid, and TypeError unless exactly one is given.
        """
        if (id is None) == (key is None):
            raise TypeError("peek needs either an id or a key")
        if id is None:
            path = self._worker.keys.path_of(key)
            entry = _parse(*path.split("/")) if path else None
        else:
            # The order is the one in which tasks move: see _LIVE. A push to the key of the task may
            # have it in keys/ for a moment, so look there twice.
            entry = self._files.find_id(_check_id(id), "keys", *_LIVE, "keys", *_ENDED)
        return entry and self._read_entry(entry)

    def contains(self, key: str) -> bool:
        """Return True if a task of the key waits or is in flight. Raises TypeError if the key is
        not a str, and ValueError if it is too long or empty."""
        return self._worker.keys.path_of(key) != ""

    def keys(self, state: _State) -> Iterator[str]:
        """Iterate over the keys of the tasks in a state. Tasks without a key are left out, and so
        are those that tasks() leaves out.

        state:  one of STATES. Raises ValueError if it is invalid.
        """
        return (
            task.key for task in self.tasks(state, data=False) if task.key is not None
        )

    def _read_entry(
        self, entry: _Entry, data: bool = True, length_ns: int = 0
    ) -> FemtoTask | None:
        """Return the task of an entry, or None if its file has moved.

        data=False: read only the header. length_ns: for attach(), which makes the caller a holder
        of the lease."""
        payload = b""
        try:
            if data:
                payload, key = self._files.read_path(entry.path)
            else:
                key, size_bytes = self._files.head(entry.path)
            since_ns = self._files.lstat(entry.path).st_ctime_ns
        except FileNotFoundError:
            return None  # RACE (Lifecycle): another process moves the task
        # A name that is only the id stands for 0 attempts if the task waits. In done/ and failed/,
        # such a name does not tell the attempts.
        attempts = entry.attempts if _ends_at(entry.path) else entry.attempts or 0
        lease = _Lease()
        lease.path = entry.path
        lease.length_ns = length_ns
        lease.has_checkpoint = True  # perhaps
        task = FemtoTask(entry.id, payload, attempts, key, lease, self._clock.anchor_ns)
        task.since = _utc(since_ns)
        if not data:
            task.size_bytes = size_bytes
        if entry.directory == "failed":
            # Show the task even if the reason is missing, or if this user may not read the reason.
            with suppress(FileNotFoundError, PermissionError):
                text = self._files.beginning(f"failed/{entry.id}.error", _SHOWN_BYTES)
                task.error = text.decode("utf-8", "replace").removesuffix("\n")
        return task

    # Closing

    def close(self) -> None:
        """Give up the leases of this worker: their tasks return to pending/ at once.

        Detached leases stay, and so do all leases where there is no flock(2), and while another
        object lives under the same node_id. If another process holds the lock of a task's key, the
        task stays leased until a worker reclaims it.

        In other threads and coroutines, pop() and take() return None, join() returns False, drain()
        ends, and work() takes no more tasks.

        The object may be used again after close(). Dropping the last reference to the object, or
        leaving its `with` block, does what close() does.
        """
        _notice_fork()
        worker = self._worker
        # While the interpreter ends, do not wait for worker.lock: a thread that has ended may hold
        # it. When the process ends, the kernel drops the flock, and other workers reclaim the
        # leases.
        if not worker.lock.acquire(blocking=not sys.is_finalizing()):
            return
        try:
            worker.lease_dir.close_count += 1
            worker.waits.end_all()
            worker.maintenance.done_scan = None
            worker.lease_dir.give_up()
            self._files.dirs.clear()
        finally:
            worker.lock.release()

    def __repr__(self) -> str:
        return f"FemtoQueue({os.fspath(self.data_dir)!r}, node_id={self.node_id!r})"

    def __enter__(self) -> FemtoQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # as in _OpenFile
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        names = FemtoQueue.__init__.__annotations__.keys() - {"return"}
        settings = {name: getattr(self, name) for name in names}
        settings["data_dir"] = self._files.path
        settings["node_id"] = self._given_node_id
        return functools.partial(type(self), **settings), ()


def _warn_of_old_tasks(files: _Files) -> None:
    """Log a warning if tasks of femtoqueue 0.4 wait in data_dir. Only the first names are read."""
    for directory in _WAITING_DIRS:
        # A producer may have no right to read the directory.
        with suppress(PermissionError):
            if any(map(_parse_old_task, itertools.islice(files.scan(directory), 100))):
                _warn_once(
                    f"{files.path}/{directory} has tasks of femtoqueue 0.4, which are not read;"
                    ' the README, "Changes", has the program that moves them'
                )
                return


# ==================================================================================================
# 14. Keys: one task for each key, and newer payloads behind it, in keys/.
#    The hash of the key is the tag in the ids of the key's tasks, and stands for the key. A thread
#    that moves such a task holds the lock of the hash. But a claim by pop() and its undoing move a
#    task without this lock, and so does a person.
#    Invariant: a key has at most one task in pending/, scheduled/ and inflight-*/ together, and at
#    most one newer payload behind it, in keys/. If the task waits again, the payload replaces the
#    task's own. If the task ends, the payload becomes a task; one of "update" is removed instead.
#    The text of the symbolic link keys/<hash> is the path of the task, and of the payload behind
#    it. It is a hint, which find() corrects. A key without a link has no task, unless power loss
#    removed the link, or a person moved a task: then the claim of the task makes the link.
#
#    TOPIC: the steps of a task with a key. The third column says what is on disk after a step, the
#    last what follows if the process is killed then. "Old" and "new" are payloads, C is the file
#    creating/<new id>, L a lease, T and U are paths of a waiting task. A and K are files in keys/:
#    A has the id of the task, K one of its own.
#
#    Push onto the waiting task T: _replace()
#      1. write new to C               T old, C new   old is delivered; C is stale
#      2. rename T to A                A old, C new   find() promotes A
#      3. rename C over A              A new          find() promotes A
#      4. rename A to U, link U        U new
#    The leased task L waits again, with K behind it: move_keyed()
#      2 to 4, with L for T, K for C   A old, K new   find() promotes A, and a claim finds K
#    Push behind the leased task L, or of a key without a task (then K is U): _add()
#      1. write new to C               C new          C is stale
#      2. link L and K                 C new          find() corrects the link
#      3. rename C to K                K new          new is delivered after L
#    End of L with K behind it: move_keyed()
#      1. rename L to done/, failed/   K new          find() or repair() does step 2
#      2. rename K to U, link U        U new
# ==================================================================================================

# The locks of keys that are held. Weak: if Ctrl-C comes between any two lines of lock(), the lock
# ends with the frame.
_key_locks = weakref.WeakValueDictionary[tuple[object, ...], _OpenFile]()


class _Keys:
    """The tasks with a key, for one worker."""

    # How long a pop() waits for the lock of a task that it has claimed. Then the task goes to the
    # back: a process that was stopped with the lock must not stop the other workers.
    claim_wait_s = _LONG_WAIT_S
    has_links = True

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._files = worker.files
        self._clock = worker.clock

    # Locks and links

    @contextmanager
    def lock(self, tag: str, until_s: float = _FOREVER_S) -> Iterator[None]:
        """Hold the lock of a hash. Raises BlockingIOError if it is not free at the time until_s
        (monotonic clock; 0: try once). A nested call uses the lock of its thread."""
        if self._has_lock(tag):
            yield
            return
        # The file is never removed. A process that waits for a removed file would get its lock
        # while another process locks a new file.
        path = f"locks/{tag[-2:]}"
        try:
            lock = self._files.open_lock(path)
        except FileNotFoundError:
            self._files.dirs.refresh()
            self._files.make_dir("locks")
            lock = self._files.open_lock(path)
        with closing(lock):
            lock.acquire_exclusive(until_s)
            lock.thread = threading.get_ident()
            _key_locks[self._files.inode, tag[-2:]] = lock
            yield

    @contextmanager
    def _repaired_after_error(self) -> Iterator[None]:
        """Run a repair soon if the block raises: it may have left a task in keys/."""
        try:
            yield
        except FileNotFoundError:
            raise
        except BaseException:
            self._worker.maintenance.sooner("repair", 0)
            raise

    def _has_lock(self, tag: str) -> bool:
        held = _key_locks.get((self._files.inode, tag[-2:]))
        # fd is -1: Ctrl-C came while the lock was being closed, or this is a forked child.
        thread = held.thread if held and held.fd != -1 else 0
        return thread == threading.get_ident()

    def lock_of(
        self, path: str, until_s: float = _FOREVER_S
    ) -> AbstractContextManager[Any]:
        """Return lock() for the path, id or tag of a task with a key, else a nullcontext()."""
        return self.lock(_tag_of(path), until_s) if _is_keyed(path) else nullcontext()

    def _linked(self, tag: str) -> tuple[str, str]:
        """Return the last known path of a key's task, and of the payload behind it, or ""."""
        with _ignore_missing(errno.EINVAL):  # EINVAL: not a link
            match = _parse_link(self._files.call(os.readlink, f"keys/{tag}"))
            # A path whose id is not of this hash would let a push overwrite another key's file.
            if match and {_tag_of(match[2]), _tag_of(match[4] or match[2])} == {tag}:
                return match[1], match[3] or ""
        return "", ""

    def _link(self, tag: str, path: str, behind: str = "", sync: bool = False) -> None:
        """Make the link of a key, if it would change; remove it if there is no task."""
        link = f"keys/{tag}"
        if not path:
            self._files.remove(link)
            return
        if (path, behind) == self._linked(tag):
            return
        new_path = f"creating/{self._clock.new_id()}"
        where, name = self._files.place(new_path)
        try:
            os.symlink(f"{path} {behind}".rstrip(), name, dir_fd=where.fd)
            self._files.move(new_path, link)
        except BaseException as error:
            self._files.remove(new_path)
            # keys/ is made for the first key of a queue
            if not isinstance(error, FileNotFoundError) or self._files.exists("keys"):
                raise
            self._files.make_dir("keys")
            self._link(tag, path, behind, sync)
            return
        if sync:
            self._files.sync_dir("keys")

    # Finding

    def find(self, tag: str) -> tuple[str, str]:
        """Return the paths of a key's task and of the payload behind it, or "". Promote a payload
        without a task. The caller holds the lock."""
        task, behind = self._linked(tag)
        # CRASH (KeyedInterrupted): a process dies between a link and the rename before or after it,
        # and no file is at a path of the link. Or it dies in _swap_aside(): the task is in keys/.
        path = self._locate(task, *_LIVE, "keys")
        payload = self._locate(behind, "keys", *_LIVE)
        # CRASH (Keyed, KeyedInterrupted): a process dies after the task ended, before it promotes
        # the payload, or before it links the promoted one. Then the payload is the task, even if a
        # person has moved the older task back to pending/.
        if payload and not (path and payload.startswith("keys/")):
            path = payload
            payload = ""
        if path.startswith("keys/"):
            path = self._promote(path)
        with suppress(OSError):  # a wrong link is corrected later
            if (path, payload) != (task, behind):
                self._link(tag, path, payload)
        return path, payload

    def _locate(self, path: str, *where: str) -> str:
        """Return `path` if it exists, else the path of its id in the directories `where`, or ""."""
        if not path or self._files.exists(path):
            return path
        entry = self._files.find_id(_id_of(path), *where)
        return entry.path if entry else ""

    def may_have_task(self, tag: str) -> bool:
        """Say, without the lock, whether a key may have a task."""
        return not self.has_links or self._linked(tag)[0] != ""

    def path_of(self, key: object) -> str:
        """Return the path of a key's task, or ""."""
        tag = _key_tag(_encode_key(key))
        if not self.may_have_task(tag):
            self._files.lstat("pending")  # a missing pending/ is disk trouble
            return ""
        try:
            with self.lock(tag):
                return self.find(tag)[0]
        except OSError as error:
            if error.errno not in _REFUSED_ERRNOS:
                raise
        # this user may only read the queue
        task, behind = self._linked(tag)
        return self._locate(task, *_LIVE) or self._locate(behind, *_LIVE)

    # Pushing

    def put(
        self,
        name: str,
        payload: bytes | memoryview,
        if_in_flight: str,
        due_ns: int | None,
    ) -> str:
        """Push a payload. Return the id that push() returns, or "" if the task has moved: then the
        caller must try again. Raises KeyInFlight."""
        tag = _key_tag(name)
        if self._has_lock(tag):
            # A signal handler or a finalizer has interrupted a call between two of its steps.
            why = "a call that this one interrupted has its lock"
            raise OSError(errno.EDEADLK, why, f"{self._files.path}/locks/{tag[-2:]}")
        with self.lock(tag):
            path, behind = self.find(tag)
            is_leased = path.startswith("inflight-")
            if is_leased and if_in_flight == "reject":
                raise KeyInFlight(_decode_key(name), _id_of(path))
            new_id = self._clock.new_id()
            new = self._files.replacement(new_id, _header(payload, name), payload)
            with self._repaired_after_error(), new as new_path:
                if path and not is_leased:
                    return self._replace(new_path, path, behind, due_ns)
                ident = new_id[:_TAG_AT] + tag
                target = _waiting_path(ident, due_ns)
                if is_leased:
                    is_update = if_in_flight == "update"
                    target = self._path_behind(path, behind, ident, due_ns, is_update)
                    ident = _id_of(path if _is_update(target) else target)
                self._add(new_path, path, behind, target)
                return ident

    def _swap(self, new_path: str, older: str, target: str) -> None:
        """Rename the older payload to `target`, then the new one over it; or neither."""
        try:
            if older not in ("", target):
                self._files.move(older, target)
            self._files.move(new_path, target)  # the push is committed
        except BaseException:
            # Ctrl-C may have come after the second rename
            with suppress(OSError):
                if self._files.exists(new_path):
                    self._files.move(target, older)
            raise

    def _swap_aside(self, new_path: str, path: str, target: str) -> str:
        """Move a task that will wait at `target` into keys/, where no pop() claims it, and replace
        its payload. Return its path there. Raises FileNotFoundError if the task is gone."""
        # The name has the new time: the new payload must not be delivered before it.
        is_scheduled = target.startswith("scheduled/")
        ident = _id_of(path)
        aside = _payload_path(ident, _stamp_of(target) if is_scheduled else None)
        self._swap(new_path, path, aside)
        if "~" in path:  # only such a task may have been delivered before
            self._files.remove(f"checkpoints/{ident}")
        return aside

    def _replace(
        self, new_path: str, path: str, behind: str, due_ns: int | None
    ) -> str:
        """Replace the payload of a waiting task. Return its id, or "" if the task has moved."""
        target = _fresh_path(path, due_ns)
        try:
            aside = self._swap_aside(new_path, path, target)
        except FileNotFoundError:
            # RACE (Keyed): a pop() claims the task after find(), or a person moves it. Or keys/ is
            # missing.
            self._files.make_dir("keys")
            self._files.remove(new_path)
            return ""
        if behind:
            # If this fails, the older payload is delivered, so the push must raise.
            self._files.unlink_if_exists(behind)
        # The new payload is in the queue: after an error, find() or repair() makes the task of it.
        with suppress(OSError), self._repaired_after_error():
            self._files.move(aside, target)
            self._link(_tag_of(path), target)
        self._worker.note_arrival(target)
        if target != path:
            # else btrfs could show both names after the sync of the file alone
            self._files.sync_dir(os.path.dirname(path))
        self._files.sync_with_dir(target)
        return _id_of(path)

    def _path_behind(
        self, path: str, behind: str, ident: str, due_ns: int | None, is_update: bool
    ) -> str:
        """Return the path for a payload behind the leased task at `path`: in place of the payload
        `behind`, or for a payload with the id `ident`."""
        # The payload is younger than the task, even if the clock of this host is behind. But a
        # forged id of the far future is not followed.
        order_ns = _stamp_of(_id_of(path))
        if ident <= _id_of(path) and order_ns < _latest_order_ns():
            ident = f"{order_ns + 1:020d}-{_tag_of(ident)}"
        if is_update and (not behind or _is_update(behind)):
            return behind or f"keys/update~{ident}"
        return _payload_path(_id_of(behind) or ident, due_ns)

    def _add(self, new_path: str, path: str, behind: str, target: str) -> None:
        """Rename a new file to `target`: as a task, or behind the leased task at `path`."""
        try:
            # Link first. Without a link, a later push would add a second task of the key, or a
            # claim would miss the payload.
            tag = _tag_of(target)
            self._link(tag, path or target, target if path else "", sync=True)
            self._swap(new_path, behind, target)
            self._files.sync_dir(os.path.dirname(target))
        except BaseException:
            if not behind:
                self._files.remove(target)
            raise
        self._worker.note_arrival(target)

    # Claiming

    def to_deliver(self, lease: _Lease, data: bytes) -> bytes | None:
        """Return the payload of a claimed task, which is `data`, or None if the task became a dead
        letter or waits again. Raises FileNotFoundError if the lease is gone."""
        tag = _tag_of(lease.path)
        path, behind = self._linked(tag) if self.has_links else ("", "")
        # RACE (Keyed): the lease ends before the link is read, and `data` is an older payload. So
        # the lease must exist after the link was read.
        self._files.lstat(lease.path)
        if _id_of(path) == _id_of(lease.path) and not behind:
            return data
        with self.lock(tag, time.monotonic() + self.claim_wait_s):
            newer = self._link_or_give_way(tag, lease.path)
            if newer:
                # The claim before was undone. The task waits again, with the newer payload.
                self._worker.note_arrival(self.move_keyed(lease.path, lease.source))
            return data if newer == "" else None

    def _link_or_give_way(self, tag: str, lease: str) -> str | None:
        """Return the path of the payload behind a leased task, or "". If the key has another task,
        make a dead letter of the leased one, and return None."""
        self._files.lstat(lease)  # raises if the lease is gone
        path, behind = self.find(tag)
        if path and _id_of(path) != _id_of(lease):
            self._quarantine_second(path, lease)
            return None
        # Without a link, a push would add a second task. So an error undoes the claim. If find()
        # has found the task, a link exists. An older link leads to the task by its id.
        if not path:
            self._link(tag, lease, behind)
        return behind

    def _quarantine_second(self, other: str, path: str) -> None:
        self._worker.quarantine(path, f"its key has another task: {_id_of(other)}")

    # Moving

    def move_keyed(self, source: str, target: str, until_s: float = _FOREVER_S) -> str:
        """Move a task, and return its new path. Raises FileNotFoundError if the task is gone,
        BlockingIOError as lock() does."""
        tag = _tag_of(source)
        with self.lock(tag, until_s), self._repaired_after_error():
            path, behind = self._linked(tag)
            is_linked = _id_of(path) == _id_of(source)
            behind = self._locate(behind, "keys") if is_linked else ""
            if behind and _state_of(target) in _WAITING_DIRS:
                if not _is_update(behind):
                    target = _fresh_path(target, _payload_due_ns(behind))
                source = self._swap_aside(behind, source, target)
                behind = ""
            target = self._files.move(source, target)
            # The task has moved. After an error, find() or repair() does the rest.
            with suppress(OSError), self._repaired_after_error():
                if is_linked and _ends_at(target):
                    self._link(tag, self._promote(behind))
                elif is_linked:
                    self._link(tag, target, behind)
        return target

    def _promote(self, payload: str) -> str:
        """Make a task of a payload in keys/, and return its path. Return "" if it is missing, or
        of "update": then it is removed."""
        if not payload:
            return ""
        if _is_update(payload):
            self._files.remove(payload)
            return ""
        try:
            target = _waiting_path(_id_of(payload), _payload_due_ns(payload))
            path = self._files.move(payload, target)
        except FileNotFoundError:
            return ""
        self._worker.note_arrival(path)
        self._files.sync_with_dir(path)
        return path

    def reserve(self, source: str, target: str) -> None:
        """Link the path that a failed task will have. Raises KeyInFlight, FileNotFoundError."""
        key, _ = self._files.head(source)
        path, _ = self.find(_tag_of(source))
        if path:
            raise KeyInFlight(key or "", _id_of(path))
        self._link(_tag_of(source), target, sync=True)

    # Repair

    def repair(self) -> None:
        """Promote payloads without a task, link those that no link names, and remove links without
        a task."""
        payloads = defaultdict[str, list[str]](list)
        for entry in self._files.entries("keys"):
            payloads[_tag_of(entry.id)].append(entry.path)

        def repair(tag: str) -> None:
            try:
                with self.lock(tag, 0):
                    self._repair(tag, payloads[tag])
            except BlockingIOError:
                # RACE (Races): another process pushes or moves a task under the lock.
                self._worker.maintenance.sooner("repair", 1)

        _for_each(repair, sorted({*map(_tag_of, self.paths_without_task()), *payloads}))

    def _repair(self, tag: str, payloads: list[str]) -> None:
        """Keep the payload that was written last, if it is younger than the task."""
        path, behind = self.find(tag)
        left = [it for it in payloads if it != behind and self._files.exists(it)]
        for stray in sorted(left, key=self._written_ns, reverse=True):
            known = behind or path
            if known and self._written_ns(stray) <= self._written_ns(known):
                self._files.remove(stray)
            elif path:
                self._files.remove(behind)
                behind = stray
            else:
                path = self._promote(stray)
        self._link(tag, path, behind)

    def _written_ns(self, path: str) -> int:
        with _ignore_missing():  # RACE (Keyed): another worker claims the task
            return self._files.lstat(path).st_mtime_ns
        return _MAX_STAMP_NS

    def paths_without_task(self) -> list[str]:
        """Return the paths in keys/ whose hash has no task."""
        names = sorted(self._files.names("keys"))
        names = [it for it in names if _parse_tag(it) or _FORMS["keys"](it)]
        busy = {_tag_of(it.id) for it in (self._files.find(*_LIVE) if names else ())}
        return [f"keys/{it}" for it in names if _tag_of(it) not in busy]


# ==================================================================================================
# 15. Waiting: for a task, in threads and in coroutines.
#    A wait repeats a look until something is found, and sleeps between two looks. A look is a
#    function that returns what it found, or None.
#    Invariant: a wait gets its watcher, then looks once more, and only then sleeps. If a task comes
#    after this look, the task ends the sleep. A sleep ends in these cases:
#    - inotify reports a new file in pending/ or scheduled/, or a new or removed name in data_dir.
#    - The time of the next maintenance has come, or the timeout of the wait is over.
#    - _Watcher.wake() is called, for example by close() in another thread.
#    - A short time is over, if no event may come: inotify is missing, other hosts write to the file
#      system, or drain() or join() waits until the queue is empty.
#    One thread of the queue object looks for all its coroutines.
# ==================================================================================================

# Masks of inotify(7): IN_ONLYDIR, IN_CREATE and IN_MOVED_TO; IN_DELETE and IN_MOVED_FROM.
_IN_COMES = 0x01000000 | 0x100 | 0x80
_IN_GOES = 0x200 | 0x40
_WATCHED = (
    ("", _IN_COMES | _IN_GOES),
    ("pending", _IN_COMES),
    ("scheduled", _IN_COMES),
)
# a little longer than a tick of the clock that sets the times of files
_FILE_TICK_S = 0.011
# the same where these times have whole seconds, such as on ext4 with inodes of 128 bytes
_COARSE_TICK_S = 2.02
# the thread that serves coroutines ends this time after the last request
_SERVER_LINGER_S = 1.0
# unused watchers to keep: by default a user may have 128 instances of inotify
_MAX_IDLE = 4
_Found = TypeVar("_Found")  # what a look finds
_Look = Callable[[], "_Found | None"]


def _readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Wait for at most `seconds`, and return the descriptors that can be read."""
    import selectors

    # poll(2) needs no descriptor of its own. eventlet removes it.
    selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
    for fd in fds:
        selector.register(fd, selectors.EVENT_READ)
    return [key.fd for key, _ in selector.select(seconds)]


class _Watcher:
    """Sleeps until an event comes, or wake() is called. Used by one wait at a time.

    sees_all: no event is missed. If it is False, each sleep must be short."""

    def __init__(self, files: _Files) -> None:
        self._path = files.path
        self._watches: list[int] = []
        # If inotify is missing, a sleep waits for this lock, and wake() releases it.
        self._wake_lock = threading.Lock()
        self._wake_lock.acquire()
        self.sees_all = _fs_type(files.root) in _LOCAL_TYPES
        self._fd = -1
        if _libc():
            # -1 if this user has too many instances; then no watch can be added
            self._fd = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._watch()

    def _watch(self) -> bool:
        """Watch the directories. Return True if one was replaced, or wake() was called."""
        before = self._watches
        self._watches = [
            _libc().inotify_add_watch(
                self._fd, os.fsencode(f"{self._path}/{name}"), events
            )
            for name, events in _WATCHED
        ]
        self.sees_all &= min(self._watches) >= 0
        return self._watches != before

    def sleep(self, seconds: float) -> None:
        if self._fd < 0:
            self._wake_lock.acquire(timeout=seconds)
        # RACE (WaitingWithInotify): another process pushes into a new directory before it is
        # watched. So after a new watch, do not sleep: the caller looks again.
        elif not self._watch() and _readable([self._fd], seconds):
            os.read(self._fd, 1 << 16)

    def wake(self) -> None:
        """End the sleep, or else the next one. May be called in a signal handler."""
        if self._fd >= 0:
            # The kernel reports the removal (IN_IGNORED), and the next sleep() watches again.
            _libc().inotify_rm_watch(self._fd, self._watches[-1])
            return
        with suppress(RuntimeError):  # the lock is free: wake() was called before
            self._wake_lock.release()

    def __del__(self) -> None:
        with suppress(Exception):  # it is not open; or as in _OpenFile
            os.close(self._fd)


class _Request(NamedTuple):
    """The wait of a coroutine. Requests with the same `line` look for the same task."""

    look: _Look[FemtoTask]
    end_s: float
    line: str
    loop: Any
    answer: Any  # a concurrent.futures.Future


class _Waits:
    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._lease_dir = worker.lease_dir
        self._pid = os.getpid()
        self._watchers: set[_Watcher] = set()  # the watchers of the current waits
        self._idle: list[_Watcher] = []  # the watchers for the next waits
        # In the order of their arrival. While there are any, a thread runs _serve().
        self._requests: list[_Request] = []
        self._lock = threading.Lock()  # held while `_requests` changes

    def wait_for(
        self, look: _Look[_Found], end_s: float, has_events: bool = True
    ) -> _Found | None:
        """Repeat the look until it finds something, and return that. Return None at the time end_s,
        or after a close(). has_events: events report what the wait is for."""
        close_count = self._lease_dir.close_count
        pauses_s = _backoff_s(0.001, self._worker.poll_interval_s)
        found = look()
        if found is not None or time.monotonic() >= end_s:
            return found
        with self._watcher() as watcher:
            while self._lease_dir.close_count == close_count:
                found = look()
                left_s = end_s - time.monotonic()
                if found is not None or left_s <= 0:
                    return found
                rest_s = self._worker.maintenance.wake_s - time.monotonic()
                # The maintenance may be overdue: another thread runs it, or this look runs none.
                if rest_s <= 0 or not (watcher.sees_all and has_events):
                    rest_s = next(pauses_s)
                watcher.sleep(min(left_s, rest_s))
        return None

    @contextmanager
    def _watcher(self) -> Iterator[_Watcher]:
        idle = self._idle
        try:
            watcher = idle.pop()
        except IndexError:
            watcher = _Watcher(self._worker.files)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            # After a close(), nothing else refers to this list.
            if watcher.sees_all and len(idle) < _MAX_IDLE:
                idle.append(watcher)

    def has_work(self) -> bool:
        """Say whether a task waits or is leased, except those that this user may not move. A
        directory is read only up to the first task."""
        # RACE (Lifecycle): other processes move a task from directory to directory, and it is never
        # in the one that is read. Each such move sets the time of pending/ or scheduled/. A move in
        # the first tick of the clock may not change the time, so all is read again a tick later.
        files = self._worker.files
        barred = self._worker.batch.barred
        before = self._waiting_ctimes_ns()
        is_fine = any(time_ns % 10**9 for time_ns in before)
        for pause_s in (_FILE_TICK_S if is_fine else _COARSE_TICK_S, 0):
            for directory in ("keys", *_WAITING_DIRS, *files.node_dirs()):
                for name in files.scan(directory):
                    if f"{directory}/{name}" not in barred and _parse(directory, name):
                        return True
            time.sleep(pause_s)
        return self._waiting_ctimes_ns() != before

    def _waiting_ctimes_ns(self) -> list[int]:
        # RACE (Shrinking): a directory that shrink() puts in place may have the same st_mtime.
        return [self._worker.files.lstat(it).st_ctime_ns for it in _WAITING_DIRS]

    def end_all(self) -> None:
        """End all waits. The caller has added 1 to `close_count`."""
        for request in self._requests:
            with suppress(Exception):  # InvalidStateError: it has an answer
                request.answer.set_result(None)
        self._wake()
        # RACE (Waiting): another thread is in _wake(), and calls wake() of a watcher whose wait has
        # ended, after the list is dropped here. So a watcher is closed with its last reference.
        self._idle = []

    def _wake(self) -> None:
        for watcher in [*self._watchers]:
            watcher.wake()

    # Coroutines

    async def wait_for_async(
        self, look: _Look[FemtoTask], end_s: float, line: str
    ) -> FemtoTask | None:
        """Do what wait_for() does. line: see _Request."""
        import asyncio
        from concurrent.futures import Future

        answer: Future[FemtoTask | None] = Future()
        request = _Request(look, end_s, line, asyncio.get_running_loop(), answer)
        try:
            with self._lock:
                if not self._requests:
                    threading.Thread(target=self._serve, daemon=True).start()
                self._requests = [*self._requests, request]
            self._wake()
            return await asyncio.wrap_future(answer)
        except BaseException:
            # RACE (Coroutines): the coroutine was cancelled, and the thread answers with a task
            # before the cancel() here. A thread puts the task back: the worker's lock may be held.
            if not answer.cancel() and answer.exception() is None:
                # RuntimeError: the interpreter ends, and with it the lease
                with suppress(RuntimeError):
                    threading.Thread(
                        target=self.put_back, args=[answer.result()], daemon=True
                    ).start()
            raise

    def _serve(self) -> None:
        """Look for tasks for all coroutines, until none has waited for _SERVER_LINGER_S."""
        while True:
            # RACE (Coroutines): a coroutine adds its request now. If this thread does not see the
            # request, the coroutine sees an empty list, and starts another thread.
            with self._lock:
                requests = [
                    it
                    for it in self._requests
                    if not it.answer.done() and not it.loop.is_closed()
                ]
                self._requests = requests
            if not requests:
                return
            linger_s = time.monotonic() + _SERVER_LINGER_S
            end_s = min(linger_s, *(it.end_s for it in requests))
            try:
                self.wait_for(functools.partial(self._look_for, requests), end_s)
            except BaseException as error:
                for request in requests:
                    with suppress(Exception):  # InvalidStateError: it has an answer
                        request.answer.set_exception(error)

    def _look_for(self, requests: list[_Request]) -> bool | None:
        """Look for the first request of each line; after an answer, for the next of the same line.
        Return True if a request was added, to end the wait."""
        empty_lines = set[str]()
        for request in requests:
            # read before the look, so that the last look comes after the timeout
            is_late = time.monotonic() >= request.end_s
            if request.answer.done() or (request.line in empty_lines and not is_late):
                continue
            if not request.loop.is_running():  # it could not take the task
                continue
            try:
                task = request.look()
            except BaseException as error:
                with suppress(Exception):  # InvalidStateError: cancelled
                    request.answer.set_exception(error)
                continue
            if task is None:
                empty_lines.add(request.line)
            if task is not None or is_late:
                try:
                    request.answer.set_result(task)
                except Exception:  # InvalidStateError: it has an answer
                    # RACE (Coroutines): the coroutine was cancelled, or close() was called.
                    self.put_back(task)
        return self._requests is not requests or None

    def put_back(self, task: FemtoTask | None) -> None:
        """Put a task back where it was, uncounted. After an error, and if the lock of its key is
        not free, the next reclaim does it."""
        # In a forked child the task belongs to the parent.
        if task is None or os.getpid() != self._pid:
            return
        orphans = self._lease_dir.orphans
        lease = _lease_of(task)
        with suppress(OSError), self._worker.lock:  # so no renewal changes the path
            if not self._worker.files.exists(lease.path):
                return
            orphans.setdefault(lease.path, lease.source)
            self._worker.reclaim(lease.path)
        if lease.path not in orphans:
            lease.outcome = lease.outcome or "released"


# ==================================================================================================
# 16. Processing: the block of processing(), which keeps a lease and ends the delivery; checkpoints.
#    A lease is renewed about every third of its length. The thread that renews leases makes ten
#    rounds or more in that time, so a renewal that failed is soon tried again. A checkpoint is
#    removed when the task ends, when a newer payload replaces the task's, when it is read for
#    another payload, and by the sweep after 30 days.
#    Invariant: one thread per queue object renews the leases of all blocks that run.
# ==================================================================================================

_RENEWAL = 1 / 3  # the time between two renewals of a lease, as a part of its length
# the longest delay before a retry, after an exception in processing()
_LONGEST_RETRY_S = 3600.0


def _read_checkpoint(worker: _Worker, ident: str, data: bytes) -> bytes | None:
    """Return the checkpoint that was saved for the payload `data` of a task, or None. Remove a
    checkpoint that was saved for another payload."""
    # The file is a record. Its payload begins with the header line of the task's payload, made
    # without a key. The checkpoint as it was given follows.
    files, path = worker.files, f"checkpoints/{ident}"
    try:
        saved, _ = files.read_path(path)
    except FileNotFoundError:
        return None
    except (CorruptTask, PermissionError, NotADirectoryError) as error:
        _log().warning("%s: no checkpoint: %s", path, error)
        return None
    of_data = _header(data)
    if saved.startswith(of_data):
        return saved[len(of_data) :]
    files.remove(path)
    return None


def _save_checkpoint(worker: _Worker, task: FemtoTask, payload: bytes) -> None:
    """Save the checkpoint of a leased task, in place of an older one, and renew the lease. Raises
    LeaseLost, and saves nothing, if the lease is lost."""
    lease = _lease_of(task)
    files = worker.files
    data = task.data
    ident = _id_of(lease.path)
    if not lease.source:  # attach() made the task, and did not read the payload
        worker.renew(task)  # raises LeaseLost
        data, _ = files.read_path(lease.path)
    record = _header(data) + payload
    # The worker of the next delivery may run under another user, so the file can be read by those
    # who may read data_dir.
    mode = 0o600 | files.mode & 0o044
    new_id = worker.clock.new_id()
    with files.replacement(new_id, _header(record), record, mode) as path:
        files.make_dir("checkpoints")
        with worker.keys.lock_of(ident), worker.lock:
            # The renewal comes first, because it tests the fence. No other thread of this queue
            # object ends the delivery between the two renames. RACE (storm.py): this process is
            # stopped between them for longer than the renewed lease, and another worker takes the
            # task.
            worker.renew(task)
            # CRASH (Crash): the older checkpoint, if any, is still in place.
            files.move(path, f"checkpoints/{ident}")
    files.sync_dir("checkpoints")
    task.checkpoint = payload
    lease.has_checkpoint = True


class _LeaseRenewer:
    """Renews the leases of all blocks of processing(), in one thread. Between two rounds, it does
    not refer to the queue object: an object that the program drops is finalized at once."""

    def __init__(self, worker: _Worker) -> None:
        self._lock = worker.lock
        # weak: a block lives as long as its `with` statement holds it
        self._blocks: weakref.WeakSet[_Processing] = weakref.WeakSet()
        self._thread: threading.Thread | None = None  # the one started last
        # the shortest lease when the thread last looked; _FOREVER_NS: none needs a thread
        self._shortest_ns = _FOREVER_NS

    def begin(self, block: _Processing) -> None:
        """Renew the lease of a block from now on. A thread whose pauses are too long for this lease
        is replaced."""
        with self._lock:
            self._blocks.add(block)
            length_ns = block.lease.length_ns
            if length_ns < self._shortest_ns:
                thread = threading.Thread(
                    target=self._run, args=[length_ns], daemon=True
                )
                thread.start()
                self._thread = thread
                self._shortest_ns = length_ns

    def end(self, block: _Processing) -> None:
        with self._lock:
            self._blocks.discard(block)

    def _run(self, shortest_ns: int) -> None:
        while shortest_ns < _FOREVER_NS:
            pause_s = min(shortest_ns / 1e9 * _RENEWAL / 10, 1)
            # Without the worker's lock: at the end of the interpreter, close() needs the lock.
            time.sleep(pause_s)
            shortest_ns = self._renew_all(pause_s)

    def _renew_all(self, wait_s: float) -> int:
        """Renew the leases that need it, and return the length of the shortest one. _FOREVER_NS
        ends this thread."""
        with self._lock:
            # begin() has started another thread, or Ctrl-C has interrupted begin() just after the
            # start of this thread.
            if self._thread is not threading.current_thread():
                return _FOREVER_NS
            blocks = [*self._blocks]
            lengths_ns = [it.lease.length_ns for it in blocks]
            self._shortest_ns = min(lengths_ns, default=_FOREVER_NS)
        for block in blocks:
            block.try_to_keep_lease(wait_s)
        return self._shortest_ns


class _Processing:
    """The context manager that FemtoQueue.processing() returns."""

    def __init__(self, queue: Any, task: FemtoTask, worker: _Worker) -> None:
        self._queue = queue
        self._task = task
        self.worker = worker
        self.lease = _lease_of(task)
        self._pid = os.getpid()

    def __enter__(self) -> FemtoTask:
        """Hand the lease to the renewer, and return the task. Raises LeaseLost."""
        self._keep_lease(_FOREVER_S)
        if not self.worker.files.exists(self.lease.path):
            raise self.worker.lease_lost(self.lease)
        self.worker.renewer.begin(self)
        return self._task

    def _keep_lease(self, until_s: float) -> None:
        """Renew the lease, unless two thirds are left. until_s: as in _Keys.lock()."""
        if self.worker.left_ns(self.lease.path) < self.lease.length_ns * (1 - _RENEWAL):
            self.worker.renew(self._task, until_s=until_s)

    def try_to_keep_lease(self, wait_s: float) -> None:
        """Do what _keep_lease() does, but raise nothing, so that the other leases are renewed.
        wait_s: how long to wait for the lock of the key."""
        try:
            self._keep_lease(time.monotonic() + wait_s)
        except LeaseLost:
            # Do not log this: the end of the block raises LeaseLost, or the block itself has just
            # ended the delivery.
            self.worker.renewer.end(self)
        except BaseException as error:
            with suppress(BaseException):  # a log handler may raise any exception
                _log().warning(
                    "task %s: its lease is not renewed: %s", self._task.id, error
                )

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        """End the delivery, unless the block has ended it. Raises LeaseLost. After another
        exception, a task that is still leased is reclaimed soon."""
        # Do nothing in a child that was forked in the block: the child does not own the task.
        if os.getpid() != self._pid:
            return
        try:
            if not self.lease.outcome:
                self._end(error)
        except LeaseLost as lost:
            # KeyboardInterrupt, SystemExit and the like propagate unchanged: they are to end more
            # than this block.
            if error is None or isinstance(error, Exception):
                raise lost from error
        except BaseException:  # trouble with the disk; str() of `error` raises; Ctrl-C
            self.leave_to_reclaim()
            raise
        finally:
            self.worker.renewer.end(self)

    async def __aenter__(self) -> FemtoTask:
        # Nothing is awaited here: a cancellation would leave the task leased, without a block.
        return self.__enter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        """Do what __exit__() does, in a thread, so that syncs and locks do not block the loop."""
        import asyncio

        if exc_info[0] is GeneratorExit:  # a coroutine that is closed can't await
            self.__exit__(*exc_info)
        else:
            loop = asyncio.get_running_loop()
            # RACE (AsyncProcessing): the coroutine is cancelled before a thread has begun. The
            # shield keeps the end of the delivery in the line for the threads.
            try:
                ended = loop.run_in_executor(None, self.__exit__, *exc_info)
            except RuntimeError:  # the executor is shut down
                self.__exit__(*exc_info)
            else:
                await asyncio.shield(ended)

    def _end(self, error: BaseException | None) -> None:
        """Finish the task. After an Exception, give it another attempt, or fail it after
        max_attempts. After any other exception, return it to the place of its push, uncounted."""
        queue = self._queue
        task = self._task
        attempts = _attempts_of(self.lease.path)
        if error is None:
            queue.done(task)
        elif not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
            queue.release(task, front=True, counted=False)
        elif queue.max_attempts is not None and attempts >= queue.max_attempts:
            queue.fail(task, error)
        else:
            delay_s = min(
                queue.retry_delay_s * 2.0 ** min(attempts - 1, 64), _LONGEST_RETRY_S
            )
            # Subtract a random part, up to half, to spread out tasks that failed together.
            queue.release(task, delay_s=delay_s * (1 - os.urandom(1)[0] / 512))
            self.lease.outcome = "retried"

    def leave_to_reclaim(self) -> None:
        """Let the next reclaim take the task back, because the delivery could not be ended."""
        self.worker.lease_dir.orphans[self.lease.path] = None
        self.worker.maintenance.sooner("reclaim", 0)


# ==================================================================================================
# 17. Worker pool: the loop behind work() and the command `work`.
#    Invariant: each task that the pool takes is settled or reclaimed, unless its lease is lost,
#    whatever step of the pool a signal interrupts.
# ==================================================================================================

# Two signals within so many seconds count as one. timeout(1) sends one to the process, and one to
# the process group.
_ONE_SIGNAL_S = 0.3
# the pause between two looks at `signals`, while handlers run in threads
_SIGNAL_POLL_S = 0.15
_TROUBLE_S = 30.0  # work() ends if nothing but errors of single tasks comes for so long
_AFTER_FAILURE = {"retried": "to be retried", "failed": "a dead letter"}


def _write_stop_line(begin: bytes) -> None:
    """Write `begin` and a line about the first signal, unless the write would block."""
    import select

    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            text = (
                b"femtoqueue: the running tasks may finish; a second signal ends them\n"
            )
            os.write(2, begin + text)


class _WorkerPool:
    """Takes tasks and calls the handler for each: in the calling thread, or in `concurrency`
    threads of its own (`_is_threaded`)."""

    stops: tuple[str, ...] = ("SIGINT", "SIGTERM")  # the signals that stop the pool

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
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._is_threaded = concurrency > 1
        self._drain = drain
        self._is_stopped = is_stopped
        self._idle_timeout_s = idle_timeout_s
        self._idle_end_s = _end_s(idle_timeout_s, "idle_timeout_s")
        # when the pool stops taking tasks; 0: it is idle, or the queue is drained
        self._end_s = _end_s(time_limit_s, "time_limit_s")
        self.signals: list[int] = []  # those that count
        self._last_signal_s = -_FOREVER_S
        self.counts: Counter[str] = Counter()  # by the fields of WorkCounts
        # by the id() of the task, until its delivery is counted
        self._running: dict[int, FemtoTask] = {}
        # held while `_running` or `counts` changes
        self._changed = threading.Lock()
        self._take_lock = threading.Lock()  # held by the thread that takes a task
        self._is_interruptible = False  # True: the second signal interrupts the handler
        self._error: BaseException | None = None  # the exception that ends the pool
        # when the present series of errors of single tasks has lasted for too long
        self._trouble_end_s = _FOREVER_S

    def run(self) -> WorkCounts:
        """Work, and return the counts. Raises the exception that ended the pool."""
        with self._signals_handled():
            if self._is_threaded:
                self._work_in_threads()
            else:
                self._work()
            if len(self.signals) > 1:
                self._abort()
            elif isinstance(self._error, OSError) and self.signals:
                _log().error("work ends by a signal; before it: %s", self._error)
            elif self._error:
                raise self._error
        return WorkCounts(**self.counts)

    def _work_in_threads(self) -> None:
        # Daemon threads, so that a handler that never returns does not keep the process alive.
        threads = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(self._concurrency)
        ]
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:  # the system allows no more threads; one thread is enough
            if threads[0].ident is None:
                raise
        for thread in threads:
            while thread.is_alive() and len(self.signals) < 2:
                # A signal does not end join(), so wait for a moment only.
                thread.join(_SIGNAL_POLL_S)

    def _work(self) -> None:
        try:
            while True:
                with self._take_lock:
                    if self._is_stopping():
                        return
                    task = self._take()
                if task is not None:
                    self._process(task)
        except BaseException as error:
            self._error = self._error or error

    def _is_stopping(self) -> bool:
        is_late = time.monotonic() >= self._end_s
        return bool(is_late or self.signals or self._error or self._is_stopped())

    def _take(self) -> FemtoTask | None:
        """Take a task, put it into `_running`, and return it. Return None if none comes soon."""
        queue = self._queue
        task: FemtoTask | None = None
        try:
            if self._drain:
                task = next(queue.drain(_BASE_INTERVAL_S), None)
                # drain() may have ended because its timeout is over, so ask join().
                if task is None and queue.join(0):
                    self._end_s = 0.0
            else:
                task = queue.pop(_BASE_INTERVAL_S)
        except (OSError, MemoryError) as error:
            if not self._may_go_on(error):
                raise
        if task is None:
            if not self._running and time.monotonic() >= self._idle_end_s:
                self._end_s = 0.0
        elif self._is_stopping():
            self._give_back(task)
            task = None
        else:
            self._trouble_end_s = _FOREVER_S
            self._running[id(task)] = task
        return task

    def _process(self, task: FemtoTask) -> None:
        """Call the handler, and count how the delivery ended. Log an exception of the handler."""
        lease = _lease_of(task)
        has_begun = False
        try:
            with self._queue.processing(task):
                has_begun = True
                self._handle(task)
        except LeaseLost as error:
            with suppress(Exception):  # a log handler may raise
                _log().warning("%s", error)
        except Exception as error:
            if not lease.outcome:
                # The delivery has not ended: the disk failed, or there is no thread to renew the
                # lease.
                if getattr(error, "errno", None) in _ONE_FILE_ERRNOS:
                    error.task_id = task.id  # type: ignore[attr-defined]
                if not self._may_go_on(error):
                    self._error = self._error or error
                if not has_begun:
                    self._give_back(task)
                return
            log = _log().warning if lease.outcome == "retried" else _log().error
            # a log handler, or a method of the exception itself, may raise
            with suppress(Exception):
                cause = None
                if not isinstance(error, _CommandFailed):
                    cause = error.with_traceback(_handler_frames(error))
                text = self._failure_text(task, lease.outcome, error)
                log("%s", text, exc_info=cause)
        finally:
            self._count(task)

    def _failure_text(self, task: FemtoTask, outcome: str, error: Exception) -> str:
        why = type(error).__name__
        with suppress(Exception):  # str() of the handler's exception may raise
            why = str(error).partition("\n")[0]
        then = _AFTER_FAILURE.get(outcome, outcome)
        return f"{task.id}: try {task.attempts} failed, {then}: {why}"

    def _may_go_on(self, error: BaseException) -> bool:
        """Return True, after a pause, if the pool can go on after an error of its own."""
        ident = getattr(error, "task_id", "")
        now_s = time.monotonic()
        self._trouble_end_s = min(self._trouble_end_s, now_s + _TROUBLE_S)
        if not ident or (now_s >= self._trouble_end_s and not self._running):
            return False
        with suppress(Exception):  # a log handler may raise
            _log().error("task %s is passed over: %s", ident, str(error) or repr(error))
        time.sleep(_BASE_INTERVAL_S)  # it may be the only task
        return True

    def _count(self, task: FemtoTask) -> None:
        with self._changed:
            # before `_running` changes: another thread in _take() reads `_running` first
            self._idle_end_s = _end_s(self._idle_timeout_s)
            # _process() and _abort() may end the same delivery, in two threads: count it once.
            if self._running.pop(id(task), None) is not None:
                self.counts[_lease_of(task).outcome or "lost"] += 1

    def _handle(self, task: FemtoTask) -> None:
        try:
            self._is_interruptible = not self._is_threaded
            self._handler(task)
        finally:
            self._is_interruptible = False

    def _abort(self) -> None:
        for task in [*self._running.values()]:
            self._give_back(task)
            self._count(task)

    def _give_back(self, task: FemtoTask) -> None:
        # No log: after the second signal, another thread may be stuck in the write of one.
        self._queue.processing(task).worker.waits.put_back(task)

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """In the main thread, pass the signals in `stops` to _on_signal()."""
        import signal

        is_main = threading.current_thread() is threading.main_thread()
        # Keep what nohup ignores, and handlers of C code (None).
        kept = (signal.SIG_IGN, None)
        numbers = [signal.Signals[it] for it in self.stops if is_main]
        before = {n: it for n in numbers if (it := signal.getsignal(n)) not in kept}

        def restore(_: object) -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        # a child that a task's handler forks acts on signals as before work()
        _fork_hooks[self] = restore
        try:
            for number in before:
                signal.signal(number, lambda number, _: self._on_signal(number))
            yield
        finally:
            _fork_hooks.pop(self)(self)

    def _tell_stop(self) -> None:
        """Runs in the signal handler."""
        _write_stop_line(b"\n")  # a terminal may show "^C" in front

    def _on_signal(self, number: int) -> None:
        """Note a signal. The first one stops the pool. After the second one, run() gives the
        running tasks back. The third one acts as before work()."""
        if time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
            return
        self._last_signal_s = time.monotonic()
        self.signals.append(number)
        if len(self.signals) == 1:
            self._tell_stop()
        elif len(self.signals) > 2:
            _fork_hooks[self](self)  # restores the handlers
            os.kill(os.getpid(), number)
        elif self._is_interruptible:
            raise KeyboardInterrupt


# ==================================================================================================
# 18. Inspection: stats() of one worker, and check(), which reports what is wrong.
#    Invariant: without `repair` nothing is changed. With `repair`, a change must be safe while
#    other processes work on the queue.
# ==================================================================================================


def _node_stats(worker: _Worker, directory: str) -> NodeStats:
    """Count the leases of one worker, and find out whether it is alive."""
    leases = worker.files.entries(directory)
    is_free = None
    if lock := worker.files.open_dir(directory):
        with closing(lock):
            is_free = lock.try_lock()
    liveness = "alive" if is_free is False else "unknown"
    if is_free and any(entry.boot == worker.clock.boot for entry in leases):
        liveness = "dead"
    expired = sum(entry.stamp_ns <= worker.clock.now_ns() for entry in leases)
    return NodeStats(
        directory.removeprefix("inflight-"), len(leases), expired, liveness
    )


class _Inspector:
    """Looks for the findings of check(), and repairs some of them if `repair` is set."""

    def __init__(self, worker: _Worker, repair: bool) -> None:
        self._worker = worker
        self._files = worker.files
        self._repair = repair

    def findings(self) -> Iterator[Finding]:
        """Yield the findings. With `repair`, the maintenance runs first. If a step raises OSError,
        the error is a finding, and the other steps still run."""
        steps: list[Callable[[], Any]] = [self._names, self._records, self._left]
        if self._repair:
            maintenance = self._worker.maintenance
            steps = [
                maintenance.reclaim_ended,
                self._worker.keys.repair,
                maintenance.remove_stale_files,
                *steps,
            ]
        for step in steps:
            try:
                yield from step() or ()
            except OSError as error:
                _raise_if_no_errno(error)
                root = self._files.path
                path = os.path.relpath(error.filename or root, root)
                yield Finding("unreadable", path, str(error))

    def _names(self) -> Iterator[Finding]:
        """Yield a finding for each foreign name, and for the owner of data_dir."""
        if text := _trust_problem(self._files):
            yield Finding("trust", ".", text)
        directories = []
        for name in sorted(self._files.names("")):
            mode = self._files.mode_of(name)
            if stat.S_ISDIR(mode) and (name in _FORMS or _parse_node_dir(name)):
                directories.append(name)
            # RACE (Checking): a worker ends, and its lease directory is removed after it was
            # listed. Then the mode is 0. A mount point has a lost+found.
            elif mode and name != "lost+found" and not _FORMS["."](name):
                yield Finding("foreign", name, "does not belong to the queue")
        others = {"failed": _parse_reason, "keys": _parse_tag}
        for directory in directories:
            is_known = _FORMS[_state_of(directory)]
            is_other = others.get(directory, _no_op)
            for name in sorted(self._files.names(directory)):
                if not (is_known(name) or is_other(name)):
                    path = f"{directory}/{name}"
                    yield Finding("foreign", path, "does not belong to the queue")

    def _records(self) -> Iterator[Finding]:
        """Read each record. With `repair`, move a corrupt task that waits to failed/."""
        seen: dict[str, str] = {}
        for entry in self._files.find(*STATES, "keys"):
            record = entry.path
            other = seen.setdefault(entry.id, record)
            if other != record and all(map(self._files.exists, (other, record))):
                yield Finding("twice", record, f"there is {other} too")
            try:
                self._files.read_path(record)
            except FileNotFoundError:
                # RACE (Checking): another process moves or removes the task after it was listed
                continue
            except MemoryError:
                yield Finding("unreadable", record, "larger than the free memory")
            except OSError as error:
                _raise_if_no_errno(error)
                yield Finding("unreadable", record, str(error))
            except CorruptTask as error:
                if self._files.exists(f"{record}.error"):
                    continue  # a dead letter, whose reason tells why it failed
                is_mended = False
                if self._repair and entry.directory in _WAITING_DIRS:
                    with suppress(OSError):
                        self._worker.quarantine(record, error.reason)
                        is_mended = True
                yield Finding("corrupt", record, error.reason, is_mended)

    def _left(self) -> Iterator[Finding]:
        for directory in self._files.node_dirs():
            stats = _node_stats(self._worker, directory)
            if stats.liveness == "dead":
                yield Finding(
                    "dead worker", directory, f"{stats.inflight} tasks leased"
                )
            elif stats.expired:
                yield Finding(
                    "expired", directory, f"{stats.expired} leases have ended"
                )
        for path in self._worker.keys.paths_without_task():
            yield Finding("key without a task", path, "no task of the key is left")
        for path in self._worker.maintenance.stale_files():
            yield Finding(
                "leftover", path, "of a killed process, or of a task ended by hand"
            )


# ==================================================================================================
# 19. Tickets: first come, first served, between processes.
#    A line is a directory. A member is a participant in the line; its ticket is a file, which the
#    member keeps locked.
#    Invariant: a file is locked before it gets the name of a ticket. A lock that has ended is never
#    taken again. So any process may remove the ticket of a dead member.
# ==================================================================================================

# how often a member tries again to take a ticket, and a TicketQueue to open its directory
_MAX_REDRAWS = 100
_REDRAW_PAUSE_S = 0.01
_REDRAW_ERRNOS = (*_MISSING_ERRNOS, errno.EEXIST, errno.ENOTSUP)


class _HeldTicket:
    """A ticket that a TicketQueue object holds: the name of its file, the locked file, and the
    start of the last touch that came in time (wall clock)."""

    had_turn = False  # True: is_head() has found this ticket to be the first in line

    def __init__(self, member: str, lock: _OpenFile, touched_s: float) -> None:
        self.member = member
        self.lock = lock
        self.touched_s = touched_s


def _open_line(path: str) -> _Files:
    for _ in range(_MAX_REDRAWS):
        # RACE (Tickets): another process's maybe_cleanup() removes it before it is opened here.
        with suppress(FileNotFoundError):
            return _open_files(path, is_durable=False)
    raise _os_error(errno.ENOENT, path)  # most likely a broken link


class TicketQueue:
    """A line of tickets in a directory, in which processes take turns: first come, first served.

        with TicketQueue("line").turn():
            ...  # one process at a time

    queue_dir:  the directory of the line. It is made if it is missing.
    stale_timeout:  the seconds (wall clock, more than 10) after which an untouched ticket of
        another host or an earlier boot is passed over. None: never. Hosts need the same value. On
        Linux, it has no effect on a local file system.

    A member keeps the file of its ticket locked. So processes of one host pass over a dead member
    at once, and never a living one. is_head() and turn() touch the file. Threads may share an
    object. A forked child, a copy and an unpickled object hold no ticket. Raises OSError,
    ValueError or TypeError. register(), turn() and maybe_cleanup() need flock(2).
    """

    def __init__(
        self, queue_dir: str | os.PathLike[str], stale_timeout: float | None = None
    ) -> None:
        self._held_tickets: dict[str, _HeldTicket] = {}  # by member
        self._stale_s = _FOREVER_S
        if stale_timeout is not None:
            self._stale_s = _check_number("stale_timeout", stale_timeout, 1e-6)
        self.queue_dir = queue_dir
        self.stale_timeout = stale_timeout
        self._files = _open_line(_check_dir("queue_dir", queue_dir))
        self._boot = _boot_tag(_read_boot_id() or "", self._files.root)
        # RACE (SharedTickets): another host finds a ticket stale, and is about to take the turn.
        # Then the member touches the ticket, too late, and finds it first in line. So the member
        # gives up a ticket that was not touched for so long. A quarter is left for clocks that
        # differ.
        self._late_s = 0.75 * self._stale_s if self._files.is_shared else _FOREVER_S
        _fork_hooks[self] = TicketQueue._after_fork

    def _after_fork(self) -> None:
        self._held_tickets.clear()
        self._files.dirs.clear()

    def __repr__(self) -> str:
        return f"TicketQueue({os.fspath(self.queue_dir)!r})"

    def register(self) -> tuple[int, str]:
        """Take the next ticket, and return its number, and the name of its file in queue_dir. The
        number is 1 or more. Where other hosts write, it begins at 1 again when nobody is in line.
        The name stands for the member: pass it to remove(). The call blocks only while another
        process or thread takes a ticket, or runs maybe_cleanup(). Raises OSError, also if this host
        was cut off from the network again and again."""
        held = self._join_line(_FOREVER_S)
        # If Ctrl-C comes before this line, the lock ends with the last reference to `held`.
        self._held_tickets[held.member] = held
        return _stamp_of(held.member), held.member

    def _join_line(self, until_s: float) -> _HeldTicket:
        """Take the next ticket. Raises BlockingIOError as acquire_exclusive() does."""
        _notice_fork()
        redraws = 0
        while True:
            try:
                _make_dir(self._files.path, 0o700, sync=False)
                with self._locked(until_s) as last:
                    return self._join_locked(last)
            except OSError as error:
                redraws += 1
                if redraws > _MAX_REDRAWS or error.errno not in _REDRAW_ERRNOS:
                    raise self._files.named(error, "last") from None
            time.sleep(_REDRAW_PAUSE_S)

    def _join_locked(self, last: _OpenFile) -> _HeldTicket:
        """Take the next ticket. The caller has locked the file "last"."""
        # on a shared file system, what is read may be old
        noted = b"" if self._files.is_shared else os.pread(last.fd, 20, 0)
        # A number that begins with 9 is damaged or forged, and no name of a ticket has it.
        numbers = [
            int(noted) if noted.isdigit() and noted < b"9" else 0,
            *map(_stamp_of, self._tickets()),
        ]
        number = max(numbers) + 1
        os.pwrite(last.fd, b"%020d" % number, 0)
        began_s = time.time()
        name = f"{number:020d}~{self._boot}~{os.urandom(8).hex()}"
        lock = self._files.open_lock(f".{name}")
        # RACE (SharedTickets): this host is cut off from the network, and loses the lock of "last"
        # without notice. Another host then removes the new file as a leftover. Or it draws the same
        # number or a higher one, and may have its turn now: our ticket would give this member a
        # turn at the same time. In both cases an error of _REDRAW_ERRNOS is raised. ENOTSUP: on
        # NFS, flock() of a removed file raises EBADF.
        try:
            lock.acquire_exclusive()
            self._files.move(f".{name}", name)
            if sum(_stamp_of(it) >= number for it in self._tickets()) > 1:
                raise FileExistsError(
                    errno.EEXIST, "another host was faster", self._files.path
                )
        except BaseException:
            # if the file was not renamed, the next _locked(), in any process, removes it
            self._files.remove(name)
            lock.close()
            raise
        return _HeldTicket(name, lock, began_s)

    def is_head(self, ticket: int) -> bool:
        """Return True if a ticket is the first one in line whose member lives. Tickets of dead
        members in front are removed.

        ticket:  a number that register() returned, in this process or another. If this object holds
            the ticket, the call touches its file.

        Where other hosts write, also returns False if the file was not touched for three quarters
        of stale_timeout, because another host may have passed the ticket over. If the ticket had
        its turn, the caller must stop the work, and call remove(). Else the ticket is removed.
        """
        _notice_fork()
        first = next(filter(self._lives, self._tickets()), "")
        is_first = first.startswith(f"{ticket:020d}~")
        for member, held in list(self._held_tickets.items()):
            if _stamp_of(member) != ticket:
                continue
            # Touch the ticket after the look at the line. If the look took too long, the touch
            # comes too late, and is_head() returns False.
            if not self._touch(held):
                if not held.had_turn:
                    self.remove(member)
                return False
            # Compare the whole name. If our ticket was removed, another ticket may have the same
            # number.
            is_first = member == first
            held.had_turn |= is_first
        return is_first

    def remove(self, member: str) -> bool:
        """Remove the ticket of a member, and return whether the member had one.

        member:  a name that register() returned, in this process or another. Raises ValueError if
            it is not of that form.
        """
        if not isinstance(member, str) or not _parse_ticket(member):
            raise ValueError(
                f"member must be a name that register() returned, not {member!r}"
            )
        _notice_fork()
        held = self._held_tickets.pop(member, None)
        try:
            return self._files.unlink_if_exists(member)
        finally:
            # even if the file can't be removed, the member must no longer hold the lock
            if held is not None:
                held.lock.close()

    def cleanup_stale(self) -> int:
        """Remove the tickets of dead members, and return their number. It includes tickets that
        other calls removed meanwhile."""
        return sum(not self._lives(member) for member in self._tickets())

    def is_empty(self) -> bool:
        """Return True if no living member is in line. The tickets of dead members in front of the
        first living member are removed."""
        return not any(map(self._lives, self._tickets()))

    def maybe_cleanup(self) -> bool:
        """Remove queue_dir if no living member is in line, and return whether it was removed.

        Returns False if queue_dir does not exist, has other files, or is on a file system that
        other hosts write to.
        """
        # Another host could open and lock a removed "last" for a while, and two hosts would hold
        # the lock of one line.
        if self._files.is_shared:
            return False
        with suppress(FileNotFoundError), self._locked():
            if self.is_empty() and self._files.names("") == ["last"]:
                self._files.unlink("last")
                # RACE (Tickets): another process makes a new "last" now. Then the directory stays.
                # It also stays if it is a mount point.
                with suppress(OSError):
                    os.rmdir(self._files.path)
                    return True
        return False

    @contextmanager
    def turn(self, timeout: float | None = None) -> Iterator[int]:
        """Take a ticket, wait for its turn, and hold the turn for the block of `with`. Yield the
        number of the ticket. The ticket is given up at the end.

        timeout:  the seconds to wait for the turn. None: no limit.

        Raises TimeoutError if the turn did not come in time. Raises FemtoQueueError if the ticket
        was removed during the wait, or if another host may have passed it over. In the block,
        is_head() tells this: turn() does not interrupt the block. Raises OSError as register()
        does, and ValueError or TypeError for an invalid timeout.
        """
        end_s = _end_s(timeout)
        late = TimeoutError(f"no turn within {timeout} s")
        try:
            held = self._join_line(end_s)
        except BlockingIOError as error:
            raise late from error
        over = threading.Event()
        member = held.member
        ticket = _stamp_of(member)
        try:
            self._held_tickets[member] = held
            if self.stale_timeout is not None:
                threading.Thread(
                    target=self._touch_until, args=(member, over), daemon=True
                ).start()
            while not self.is_head(ticket):
                line = self._tickets()
                if member not in line:
                    raise FemtoQueueError(
                        f"ticket {ticket} was passed over, or removed"
                    )
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise late
                # The next in line looks often, the others seldom.
                time.sleep(min(0.002 * line.index(member), 0.05, left_s))
            yield ticket
        finally:
            try:
                over.set()
                _notice_fork()
                if member in self._held_tickets:  # not in a forked child
                    self.remove(member)
            finally:
                # Even if Ctrl-C ends remove(): the lock ends with the last reference to `held`.
                self._held_tickets.pop(member, None)

    def __del__(self) -> None:
        with suppress(Exception):  # as in _OpenFile
            _notice_fork()
            for member in list(self._held_tickets):
                self.remove(member)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds no ticket
        return type(self), (self._files.path, self.stale_timeout)

    def _touch_until(self, member: str, over: threading.Event) -> None:
        # By its name: a reference to the ticket would keep its lock, if Ctrl-C ends turn().
        pause_s = min(self._stale_s / 4, threading.TIMEOUT_MAX)
        while not over.wait(pause_s) and (held := self._held_tickets.get(member)):
            with suppress(OSError):  # the next round tries again
                self._touch(held)

    def _touch(self, held: _HeldTicket) -> bool:
        """Touch the file of a ticket. Return False if the touch came too late, or if the ticket was
        given up."""
        began_s = time.time()
        # RACE (Tickets): another thread gives the ticket up, and closes its file. Then os.utime()
        # raises EBADF or EINVAL.
        with _ignore_missing(errno.EBADF, errno.EINVAL):
            os.utime(held.lock.fd)  # this may take long, so the time is read again
            if time.time() - held.touched_s <= self._late_s:
                held.touched_s = began_s
                return True
        return False

    @contextmanager
    def _locked(self, until_s: float = _FOREVER_S) -> Iterator[_OpenFile]:
        """Hold the lock of the file "last" for the block, and yield the file. Raises as
        acquire_exclusive() does, and FileNotFoundError if queue_dir is missing."""
        self._files.dirs.refresh()
        with closing(self._files.open_lock("last")) as lock:
            lock.acquire_exclusive(until_s)
            if not lock.is_at_path():
                # RACE (Tickets): maybe_cleanup() removed the file while we waited.
                raise _os_error(errno.ENOENT, lock.path)
            # CRASH (Tickets): a process dies in _join_locked(), after open_lock() and before the
            # rename. Its file is needed only under the lock of "last", so it is a leftover here.
            for name in self._files.names(""):
                if name[0] == "." and _parse_ticket(name[1:]):
                    self._files.remove(name)
            yield lock

    def _tickets(self) -> list[str]:
        self._files.dirs.refresh()  # another process may have made the directory anew
        return sorted(filter(_parse_ticket, self._files.names("")))

    def _lives(self, member: str) -> bool:
        """Return whether a member lives. If not, remove its ticket."""
        # a directory, a socket or a link is no ticket
        with _ignore_missing(errno.EISDIR, errno.ENXIO, errno.ELOOP):
            # RACE (Tickets): the member or another process removed the ticket
            with closing(self._files.open_lock(member, False)) as lock:
                if f"~{self._boot}~" in member or self._files.is_local:
                    is_dead = lock.try_lock()
                else:
                    # Not by the path: a network file system may return a time of a minute ago.
                    is_dead = time.time() - lock.status().st_mtime > self._stale_s
            if not is_dead:
                return True
            self._files.unlink(member)
        return False


# ==================================================================================================
# 20. Other file systems: those that other hosts may write to, and systems without flock.
#    _open_files() chooses the classes.
#
#    TOPIC: what differs on other file systems. Five facts have names, which stand in parentheses in
#    the comments of this part.
#
#      stale     A host may see another host's change late: names and contents after 30 s on NFS,
#                contents after a second on GlusterFS. A listing, a rename, and a read after a
#                listing are never stale. So the tasks of a key are found by listings.
#      replaced  If another file was renamed over a file, open(), read() or close() may raise ESTALE
#                or ENOENT (GlusterFS). The next attempt looks the name up again.
#      healed    The old name of a file that was renamed during an outage may come back (GlusterFS).
#                Then a finished task or an older payload may come once more, and a late worker may
#                not be told.
#      replies   A rename that was carried out may raise ENOENT (NFS): the server reboots before its
#                answer, and the client asks again. GlusterFS loses no replies, but a replica may
#                show a failed rename as carried out. So nothing is checked on FUSE (*).
#      flock     A host that is cut off may lose its locks, and is not told (both).
#
#    The overrides, the facts that make them necessary, and the file systems ("both": NFS and
#    GlusterFS):
#
#      _SharedFiles.beginning, sync_file     replaced (GlusterFS)
#      _SharedFiles.open_lock                replaced (GlusterFS), stale (NFS)
#      _SharedFiles.lstat                    stale (NFS), replaced (GlusterFS)
#      _SharedFiles.names                    stale (NFS)
#      _SharedFiles.read                     stale (both), replaced (GlusterFS)
#      _SharedFiles.move *                   replies (NFS), stale (both)
#      _SharedFiles.shrink                   stale (both)
#      _SharedLeaseDir.claim *               replies (NFS)
#      _SharedKeys.has_links, _link          stale (both)
#      _SharedKeys._linked                   stale, flock (both), healed (GlusterFS)
#      _SharedKeys._link_or_give_way         flock (both), healed (GlusterFS)
#      _SharedKeys.claim_wait_s              an outage lasts for seconds (both)
#
#    A TicketQueue asks is_shared for the same reasons.
#
#    Without flock (Python has no module fcntl), the leases of a worker that died or was closed end
#    at their deadlines only. Tasks with a key and tickets are not available.
# ==================================================================================================

_FUSE_TYPE = 0x65735546  # f_type of every FUSE mount, not of GlusterFS alone
# The attempts to look at a file that may have been replaced. More than three were never needed.
_LOOKS = 4
# how long a task of a key waits if an older task of the key may run
_STALE_NS = 12 * 10**9
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _open_files(data_dir: str, is_durable: bool) -> _Files:
    """Make data_dir if it is missing, open it, and return the _Files object for its file system.
    Where statfs(2) does not exist (not Linux), every file system counts as local."""
    data_dir = data_dir.rstrip(os.sep) or os.sep
    _make_dir(data_dir, 0o700, is_durable)
    root = _OpenFile(None, data_dir, _ROOT_FLAGS)
    with suppress(FileNotFoundError):  # the working directory was removed
        # For messages, for inotify, and for a data_dir that is removed and made anew. Not
        # a normalized path: it would lack both parts of "link/..".
        root.path = os.path.join(os.getcwd(), data_dir)
    fs_type = _fs_type(root)
    if fs_type not in (0, *_LOCAL_TYPES):
        return _SharedFiles(root, is_durable, fs_type)
    files = _Files(root, is_durable)
    files.parts = _LeaseDir, _Keys
    files.syncs_after_rename = fs_type in _LOCAL_TYPES
    # An overlay is not certainly local: its upper directory may also be used by its own path, and
    # locks taken there do not exclude locks taken through the overlay.
    files.is_local = fs_type in _LOCAL_TYPES - {_OVERLAY_TYPE}
    return files


def _trust_problem(files: _Files) -> str:
    """Say who else decides what this process works on, if it runs as root; else return ""."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return ""
    owner = files.root.status().st_uid
    if not owner and not files.mode & 0o022:
        return ""
    whose = (
        f"the queue of user {owner}" if owner else "a queue that others may write to"
    )
    return f"root works on {whose}; better: runuser -u OWNER"


def _afresh(look: _Method) -> _Method:
    """Return a method that calls `look` up to _LOOKS times after ENOENT or ESTALE (replaced), and
    then raises FileNotFoundError."""

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


class _SharedFiles(_Files):
    """The steps on files that other hosts use, too. is_fuse: the file system counts as
    GlusterFS."""

    is_shared = True

    def __init__(self, root: _OpenFile, is_durable: bool, fs_type: int) -> None:
        super().__init__(root, is_durable)
        self.is_fuse = fs_type == _FUSE_TYPE
        self.parts = _SharedLeaseDir, _SharedKeys

    # Looking

    beginning = _afresh(_Files.beginning)
    _read_once = _afresh(_Files.read)
    sync_file = _afresh(_Files.sync_file)
    open_lock = _afresh(_Files.open_lock)

    def _refresh(self, directory: str) -> None:
        """Have the names in a directory looked up anew (close-to-open, see nfs(5))."""
        with suppress(OSError):  # the look that follows raises the error
            _OpenFile(self.root, directory or ".").close()

    @_afresh
    def lstat(self, path: str) -> os.stat_result:
        self._refresh(os.path.dirname(path))
        return super().lstat(path)

    def names(self, directory: str) -> list[str]:
        if directory not in _STATE_DIRS:
            self._refresh("")  # another host may just have made the directory
        return super().names(directory)

    def read(self, directory: str, name: str, ident: str) -> _Record:
        if directory == "checkpoints" or _is_keyed(ident):
            # another host may have replaced the file (stale)
            self.names(directory)
        return self._read_once(directory, name, ident)

    # Moving

    def move(self, source: str, target: str) -> str:
        began_ns = _wall_ns()
        # RACE (LostReply): the deadline of a lease has passed, and another worker has reclaimed the
        # task and ended it in the same way. Then the error is raised.
        is_lease = _state_of(source) == "inflight"
        is_late = is_lease and _stamp_of(source) <= self.clock.now_ns()
        before = None if self.is_fuse or is_late else _Files.lstat(self, source)
        try:
            super().move(source, target)
        except FileNotFoundError:
            if before is None or not self._was_moved(before, began_ns, source, target):
                raise
        if not target.startswith("keys/") or _state_of(source) not in _LIVE:
            return target
        # RACE (KeyedOnSharedFileSystem, hosts.py): another host has moved this file out of keys/.
        # This host still takes the target for the same file, and rename() does nothing (stale).
        for pause_s in itertools.islice(_backoff_s(0.01, 1.0), 10):
            if target[5:] in self.names("keys"):
                return target
            time.sleep(pause_s)
            super().move(source, target)
        # then another worker has moved the task, and this host does not see it
        raise _os_error(errno.ENOENT, source)

    def _was_moved(
        self, before: os.stat_result, began_ns: int, source: str, target: str
    ) -> bool:
        """Say whether a rename that raised ENOENT was carried out (replies). before: the result of
        lstat() at the time began_ns (wall clock)."""
        if self.exists(source):
            return False
        is_ours = _state_of(source) == "creating"
        # Others remove a file in creating/ only after an hour, so this call has moved it.
        # RACE (LostReply): another worker moves the file on from the target.
        if not target or (
            is_ours and _wall_ns() < before.st_mtime_ns + _LEFTOVER_NS // 2
        ):
            return True
        with suppress(FileNotFoundError):
            after = self.lstat(target)
            # RACE (LostReply): another host moved the file before the call. The clocks of hosts
            # agree to a second.
            is_new = after.st_ctime_ns > began_ns - 10**9
            return is_new and os.path.samestat(before, after)
        return False

    def shrink(self, new_name: str) -> None:
        """Do nothing: other hosts might look into the old directory for long (stale)."""


class _SharedLeaseDir(_LeaseDir):
    _files: _SharedFiles

    def claim(self, directory: str, name: str, lease: _Lease) -> bool:
        if super().claim(directory, name, lease):
            return True
        # If the listing raises an error, the caller undoes the claim.
        files = self._files
        return not files.is_fuse and lease.name in files.names(self.directory)


class _SharedKeys(_Keys):
    """Finds the tasks of a key by listings."""

    claim_wait_s = 60.0
    has_links = False

    def _listed(self, tag: str) -> tuple[list[str], str]:
        """Return the paths of a key's tasks, the oldest first, and of the newest payload behind
        them, or ""."""
        found = sorted(
            self._files.find("keys", *_LIVE, ending=tag), key=lambda it: it.id
        )
        tasks = [it.path for it in found if it.directory != "keys"]
        payloads = [it.path for it in found if it.directory == "keys"]
        behind = payloads[-1] if payloads else ""
        if not tasks:
            # CRASH (KeyedInterruptedOnSharedFileSystem): a process dies in _swap_aside(). The older
            # payload is that of the task.
            tasks = payloads[:-1]
        elif self._has_lock(tag):
            # RACE (KeyedOnSharedFileSystem): a host is cut off while it pushes a payload, and loses
            # the lock (flock). Another host pushes a payload, too.
            for older in payloads:
                if _id_of(older) != _id_of(behind):
                    self._files.remove(older)
        # The name of an older payload, or of an older task, may have come back (healed).
        is_newer = not tasks or _id_of(behind) > _id_of(tasks[-1])
        return tasks, behind if is_newer else ""

    def _linked(self, tag: str) -> tuple[str, str]:
        tasks, behind = self._listed(tag)
        return tasks[-1] if tasks else "", behind

    def _link(self, tag: str, path: str, behind: str = "", sync: bool = False) -> None:
        # with `sync`, the caller may put a payload into keys/ next
        if sync:
            self._files.make_dir("keys")

    def _link_or_give_way(self, tag: str, lease: str) -> str | None:
        # RACE (KeyedOnSharedFileSystem): two workers claim the two tasks of a key at once. Each
        # lists the directories after its own claim, and the older task gives way.
        tasks, behind = self._listed(tag)
        if lease not in tasks:
            raise _os_error(errno.ENOENT, lease)
        if _id_of(tasks[-1]) != _id_of(lease):
            self._quarantine_second(tasks[-1], lease)
            return None
        older = tasks[0]
        if _id_of(older) == _id_of(lease):
            return behind
        if _state_of(older) == "inflight" and self._worker.left_ns(older) > 0:
            # The older task may run, or its lease has come back (healed). The claimed one waits.
            target = _fresh_path(lease, _wall_ns() + _STALE_NS)
            self._worker.note_arrival(self._files.move(lease, target))
            return None
        self._quarantine_second(lease, older)
        return behind


# ==================================================================================================
# 21. Output and progress: the standard streams of the command line, and what is shown on them.
#     Invariant: data is written to a stream as a whole, or an error is raised.
# ==================================================================================================

# the shortest pause between two drawings of the progress line on a terminal
_REDRAW_S = 0.5
# the time for a reader of the output, and for a job after a signal
_GRACE_S = 5.0
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_PREVIEW_BYTES = 200
_STREAM_NAMES = ("standard input", "standard output", "standard error")


def _write_all(fd: int, data: bytes) -> None:
    """Write all of the data, also if another process has set O_NONBLOCK."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            os.set_blocking(fd, True)


def _printable(text: str) -> str:
    """Escape all characters that may move the cursor, but line ends."""
    return "".join(
        it if it.isprintable() or it == "\n" else ascii(it)[1:-1] for it in text
    )


def _preview(data: bytes) -> str:
    """Return the beginning of a payload as one line."""
    return _printable(
        " ".join(data[:_PREVIEW_BYTES].decode("utf-8", "replace").split())
    )


class _Progress:
    """A task is left if it waits or is leased. The rate is the decrease of the tasks left, or the
    tasks that this worker ends if these are more, per second."""

    is_paused = False
    _last = 0.0, _FOREVER_S, 0  # the latest sample

    def __init__(self, data_dir: str) -> None:
        self.files = _open_files(data_dir, False)
        # A sample: the time, the number of tasks left, and how many this worker has ended. The rate
        # is measured over the first sample, and those that saw a task end.
        self._ends = deque[tuple[float, float, int]](maxlen=30)
        self._scheduled: list[_Entry] = []

    def count_left(self, ended: int) -> None:
        """Add a sample. ended: how many tasks this worker has ended."""
        self._scheduled = self.files.entries("scheduled")
        self.waiting = self.files.count("pending") + len(self._scheduled)
        self.running = sum(map(self.files.count, self.files.node_dirs()))
        self.is_paused = self.files.exists("PAUSED")
        self.add_sample(time.monotonic(), self.waiting + self.running, ended)

    def add_sample(self, now_s: float, left: int, ended: int) -> None:
        if left < self._last[1] or ended > self._last[2]:
            self._ends.append((now_s, left, ended))
        self._last = now_s, left, ended

    def pace_text(self) -> str:
        begin_s, before, earlier = self._ends[0]
        end_s, left, ended = self._ends[-1]
        span_s = max(end_s - begin_s, 0.001)
        shrinks = (before - left) / span_s
        rate = max(shrinks, (ended - earlier) / span_s)
        rest_s = self._last[0] - end_s
        # Nothing has ended for the time of five tasks.
        is_stalled = rest_s > 2 and rest_s * rate > 5
        due_s = 0.0
        if self._scheduled:  # the last one is due last
            due_s = (self._scheduled[-1].stamp_ns - _wall_ns()) / 1e9
        texts = []
        if span_s >= 1 and not (self.is_paused or is_stalled):
            rates = [
                f"{round(rate * size, 1):g}/{unit}"
                for unit, size in _UNITS
                if rate * size >= 1
            ]
            texts += rates[-1:]
            if shrinks > rate / 20 and left:  # else it is noise
                left_s = max(left / shrinks, due_s)
                texts.append(f"about {_rough_time(left_s)} left")
        if due_s > 0:
            texts.append(f"{len(self._scheduled)} due in {_rough_time(due_s)}")
        return "  ".join(texts)

    def text(self, counts: Counter[str]) -> str:
        ended = [
            f"{counts[it]} {it}" for it in WorkCounts.__annotations__ if counts[it]
        ]
        paused = "  paused" if self.is_paused else ""
        left = f"{self.running} running  {self.waiting} waiting{paused}"
        parts = ["  ".join(ended) or "0 done", left, self.pace_text()]
        return "femtoqueue  " + " | ".join(filter(None, parts))


def _rough_time(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds >= 1.5 * size:
            return f"{round(seconds / size)} {unit}"
    return "1 s"


def _terminal_size(fd: int) -> tuple[int, int]:
    """Return columns and rows; 0: not known."""
    with suppress(OSError):
        return os.get_terminal_size(fd)
    return 0, 0


def _is_in_foreground() -> bool:
    with suppress(OSError):  # the terminal is not the one of this session
        return os.tcgetpgrp(2) == os.getpgrp()
    return True


class _Output:
    """A standard stream, for several threads. On a terminal, a progress line is below the output
    while this process group is in the foreground."""

    _ends_line = True  # no line is unfinished
    _moved_s = 0.0  # when bytes were last written
    _line = ""  # the latest progress
    _is_shown = False

    def __init__(self, fd: int = 2) -> None:
        self.fd = fd
        self._has_terminal = os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb"
        self._lock = threading.Lock()  # held during a write

    def put(self, data: bytes, end_s: float, begins_line: bool) -> None:
        """Write bytes; begins_line: on a new line. Raises OSError, and TimeoutError if nobody has
        read for _GRACE_S, and the time end_s is over."""
        while not self._lock.acquire(timeout=0.1):
            self._check_reader(end_s)
        try:
            if data:
                if begins_line and not self._ends_line:
                    data = b"\n" + data
                self._ends_line = data.endswith(b"\n")
            self._moved_s = time.monotonic()
            self._write(self.clearing() + data + self._drawing(), end_s)
        finally:
            self._lock.release()

    def _write(self, data: bytes, end_s: float) -> None:
        import select

        left = memoryview(data)
        while left:
            self._check_reader(end_s)
            # A pipe that select() finds writable takes 4096 bytes without blocking.
            if select.select([], [self.fd], [], 0.1)[1]:
                with suppress(BlockingIOError):  # another process has set O_NONBLOCK
                    left = left[os.write(self.fd, left[:4096]) :]
                    self._moved_s = time.monotonic()

    def _check_reader(self, end_s: float) -> None:
        if time.monotonic() >= max(end_s, self._moved_s + _GRACE_S):
            raise TimeoutError

    def write(self, text: str) -> None:
        """Write a text as lines of its own. If nobody reads for _GRACE_S, the text is lost."""
        # Raise nothing: if the terminal is gone, the running jobs must still finish.
        with suppress(OSError):
            self.put(text.encode("utf-8", "backslashreplace"), 0.0, True)

    @contextmanager
    def reporting(
        self, text: Callable[[], str], plain_s: float = 0.0
    ) -> Iterator[None]:
        """Show what text() returns on a terminal. plain_s: the seconds between two lines without a
        terminal; 0: no lines. An unchanged text is not written again."""
        least_s = _REDRAW_S if self._has_terminal else plain_s
        has_ended = threading.Event()

        def report() -> None:
            pause_s = least_s
            while not has_ended.wait(pause_s):
                began_s = time.monotonic()
                with suppress(OSError):
                    line = text()
                    # text() may list large directories: it gets at most 1 % of the time.
                    pause_s = least_s + 100 * (time.monotonic() - began_s)
                    if not has_ended.is_set():
                        self._show(line)

        if least_s:
            with suppress(RuntimeError):  # the system allows no more threads
                threading.Thread(target=report, daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()
            if self._has_terminal:
                self._show("")
                self._has_terminal = False
            if plain_s:
                self._show(text())

    def _show(self, line: str) -> None:
        before = self._line
        self._line = line
        if self._has_terminal or line == before:
            line = ""  # put() draws `_line`
        self.write(line)

    def _drawing(self) -> bytes:
        line = self._line.rstrip()[: _terminal_size(2)[0] or 80]
        may_draw = self._has_terminal and self._ends_line and bool(line)
        self._is_shown = may_draw and _is_in_foreground()
        if not self._is_shown:
            return b""
        if not os.environ.get("NO_COLOR"):
            line = re.sub(r"\b\d+ failed\b", "\x1b[31m\\g<0>\x1b[0m", line)
        return line.encode()

    def clearing(self) -> bytes:
        # a signal handler calls this, too
        return b"\r\x1b[J" if self._is_shown and _is_in_foreground() else b""


# ==================================================================================================
# 22. Jobs: the processes of a command, CMD, that `femtoqueue work` runs for a task.
#     A job is the session that CMD leads. The launcher, a process without threads, starts each CMD.
#     It keeps the ended CMD as a zombie until the job is over, so that no other session or process
#     group can get the number of the job.
#     Invariant: each job has a link, a pair of sockets between worker and launcher. If one of the
#     two dies, the links end, and the other kills the jobs.
# ==================================================================================================

# The system sends HUP when the terminal is gone. Schedulers send USR1 and USR2 as a warning.
_STOPS = (*_WorkerPool.stops, "SIGHUP", "SIGUSR1", "SIGUSR2")
_VARIABLES = (b"FEMTOQUEUE_ID", b"FEMTOQUEUE_ATTEMPT", b"FEMTOQUEUE_KEY")
# a request to let live on what CMD has left; the others are numbers of signals, and 0
_FORGET = 255
_TICK_S = 0.05  # the pause between two looks at a job


def _processes() -> list[str]:
    """List /proc; return nothing if it is the /proc of another container."""
    with suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return [*filter(str.isdigit, os.listdir("/proc"))]
    return []


def _is_signalled(group: int, number: int) -> bool:
    """Return False if no process got the signal, as after sudo."""
    with suppress(OSError):
        os.killpg(group, number)
        return True
    return False


def _groups_of(leaders: set[int]) -> set[int]:
    """Return the running process groups in some sessions; without a /proc, those of leaders."""
    groups = set[int]()
    names = _processes()
    if not names:
        return {it for it in leaders if _is_signalled(it, 0)}
    for name in names:
        # RACE (CommandLine): a process of the list has just ended
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, group, session, *more = file.read().rpartition(b")")[2].split()
            # A process whose first thread has ended has the state Z, too: more[13] is num_threads.
            if int(session) in leaders and (state != b"Z" or int(more[13]) > 1):
                groups.add(int(group))
    return groups


def _signal(leaders: set[int], *numbers: int) -> bool:
    """Return whether a process of the sessions got a signal."""
    return True in [
        _is_signalled(it, number) for it in _groups_of(leaders) for number in numbers
    ]


def _kill(leaders: set[int]) -> None:
    """Kill some sessions, and wait for the end of their processes. Without a /proc, wait for
    nothing: the zombie of CMD, which is kept, would count as running for ever."""
    import signal

    while _signal(leaders, signal.SIGKILL) and _processes():
        # RACE (CommandLine): a process may have forked just before the signal, so look again
        time.sleep(0.01)


# Jobs: in the launcher


class _Session:
    """A job, as the launcher knows it."""

    keeps_zombie = True  # False without a /proc: there, a zombie counts as running
    pid = 0  # 0: CMD can't be started
    _status: int | None = None
    # the signal that ends the job; 0: only wait for its end; None: no end was asked for
    _number: int | None = None

    def __init__(self, requests: Any, words: list[str], limit_s: float) -> None:
        """Start the job of a request. Raises EOFError if the worker has ended."""
        import socket
        import subprocess

        # A message with descriptors is read alone. No message is longer.
        values, fds, _, _ = socket.recv_fds(requests, 4096, 4)
        if not fds:
            raise EOFError
        self.link = socket.socket(fileno=fds.pop())
        # when the next signal is due: SIGTERM at the time limit, or SIGKILL after `_number`
        self._signal_s = time.monotonic() + limit_s
        os.environb.update(zip(_VARIABLES, values.split(b"\0"), strict=False))
        try:
            # An argument of more than 4 MB fails in each system.
            data = os.pread(fds[0], 1 << 22, 0)
            command = [os.fsencode(it).replace(b"{}", data) for it in words]
            self.popen = subprocess.Popen(  # type: ignore[call-overload]
                command, 0, None, *fds, start_new_session=True
            )
            self.pid = self.popen.pid
            self._report("pid", self.pid)
        # ValueError: a zero byte in the payload. MemoryError: many {}, and a large payload.
        except (OSError, ValueError, MemoryError) as error:
            self._report("errno", getattr(error, "errno", errno.EINVAL))
            self.link.close()
        for fd in fds:
            os.close(fd)

    def _report(self, name: str, value: int) -> None:
        # There are so few reports that the call never blocks.
        with suppress(OSError):  # the worker has ended; is_forgotten() sees it, too
            self.link.send(f"{name:8}{value:8}".encode())

    def is_forgotten(self) -> bool:
        """Obey the worker. Return True if the job is no longer to be cared for."""
        request = b""
        with suppress(ConnectionResetError):
            request = self.link.recv(1)
        if not request:  # the worker has ended, or its thread has
            _kill({self.pid})
        elif request[0] != _FORGET:
            self._end(request[0])
            return False
        return True

    def _end(self, number: int) -> None:
        import signal

        if self._number:
            return
        self._number = number
        if number:
            self._signal_s = time.monotonic() + _GRACE_S
            # a stopped process can't handle the signal, so continue it
            _signal({self.pid}, number, signal.SIGCONT)

    def is_over(self) -> bool:
        """Do what is due. Return True if an end was asked for, and no process is left."""
        import signal

        # CMD that has ended before its limit is not late, so look at CMD first.
        if self._status is None and (status := self._ended()) is not None:
            self._status = status
            self._report("status", status)
        if self._status is not None and self._number is None:
            return False  # until the next request, the worker judges how CMD ended
        if time.monotonic() >= self._signal_s:
            if self._number:
                _signal({self.pid}, signal.SIGKILL)
            else:
                self._report("is_late", 1)
                self._end(signal.SIGTERM)
        if self._status is None or _groups_of({self.pid}):
            return False
        self._report("is_over", 1)
        return True

    def _ended(self) -> Any:
        """Return CMD's exit status, or -N if signal N has ended it; None while it runs."""
        if not self.keeps_zombie:
            return self.popen.poll()
        it = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return it and (it.si_status if it.si_code == os.CLD_EXITED else -it.si_status)


def _handle_signals() -> int:
    """Let no signal end the launcher. Return a descriptor that gets readable."""
    import signal

    # CMD gets the default action, because a handler, unlike SIG_IGN, does not survive exec().
    for name in _STOPS:
        number = signal.Signals[name]
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _no_op)
    signal.signal(signal.SIGCHLD, _no_op)
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    return waking


def _launch(requests: Any, words: list[str], limit_s: float) -> None:
    """Start jobs, and end them, until the worker has ended (EOFError)."""
    waking = _handle_signals()
    _Session.keeps_zombie = bool(_processes())
    sessions: dict[int, _Session] = {}  # by the descriptor of the link
    try:
        while True:
            ready = _readable(
                [requests.fileno(), waking, *sessions], _TICK_S if sessions else 3600.0
            )
            if waking in ready:  # a child has ended
                os.read(waking, 4096)
            if requests.fileno() in ready:
                it = _Session(requests, words, limit_s)
                if it.pid:
                    sessions[it.link.fileno()] = it
            for fd, it in [*sessions.items()]:
                if (fd in ready and it.is_forgotten()) or it.is_over():
                    it.popen.poll()  # reap CMD
                    it.link.close()
                    del sessions[fd]
    finally:
        _kill({it.pid for it in sessions.values()})


# Jobs: in the worker


class _Launcher:
    """Forks the launcher, before any thread starts and the queue is opened: the launcher has no
    lock, and no descriptor of the queue."""

    def __init__(self, words: list[str], limit_s: float) -> None:
        import socket

        self.limit_s = limit_s
        self.requests, requests = socket.socketpair()
        if os.fork() == 0:
            try:
                self.requests.close()
                # SIGKILL to the worker's process group must not reach the launcher
                os.setsid()
                _launch(requests, words, limit_s)
            finally:
                os._exit(0)
        requests.close()


class _CommandJob:
    """A job, as the worker knows it."""

    pid = 0
    is_over = is_stopped = False
    errno = 0  # why CMD could not be started
    is_late = 0  # 1: the time limit was over before CMD had ended
    is_ending = 0  # 1: the worker has asked for the end
    # CMD's exit status, or -N if signal N has ended it; None: not known
    status: int | None = None

    def __init__(
        self, launcher: _Launcher, task: FemtoTask, streams: list[int]
    ) -> None:
        import socket

        self.task = task
        self._stdin = streams[0]
        self.end_s = time.monotonic() + launcher.limit_s
        # the key: in UTF-8, whatever the locale is, and up to a zero byte
        values = f"{task.id}\0{task.attempts}\0{task.key or ''}".encode()
        self.link, theirs = socket.socketpair()
        # CRASH (CommandLine): the launcher may be killed after it has started CMD. So there may be
        # a job, and the first note() learns of the end.
        with theirs, suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(launcher.requests, [values], [*streams, theirs.fileno()])

    def note(self) -> Any:
        """Read a report into the attribute of its name, and return the name; None: the launcher
        has ended."""
        with suppress(ConnectionResetError):
            if report := self.link.recv(16).decode():
                name, value = report.split()
                setattr(self, name, int(value))
                return name
        # CRASH (CommandLine): the launcher has died, and its child has executed CMD or has ended.
        # If it died before it reported the pid, CMD is known by its standard input, a file that
        # only this job has.
        if self.pid:
            _kill({self.pid})
        else:
            self._kill_by_stdin()
        self.is_over = True
        return None

    def end(self, number: int) -> None:
        """Have the job ended by a signal. It is over when no process is left. 0: only wait for
        that; _FORGET: the job is over now."""
        self.is_ending = 1
        with suppress(OSError):  # the launcher has ended; note() sees it, too
            self.link.send(bytes([number]))

    def _kill_by_stdin(self) -> None:
        for name in _processes():
            # RACE (CommandLine): it has just ended; or it belongs to another user
            with suppress(OSError):
                if os.path.samefile(f"/proc/{name}/fd/0", self._stdin):
                    _kill({os.getsid(int(name))})


# ==================================================================================================
# 23. Command runner: the pool of `femtoqueue work`, which runs CMD for each task.
#     Each thread of the pool runs a job at a time: it passes on the output, and judges how CMD
#     ended. The launcher ends a job at --task-timeout, even if nobody reads the output.
#     Invariant: the pool uses only public methods of the queue.
# ==================================================================================================

# TOPIC: what a signal to `work` does.
#
# First: the threads take no further task. CMD, in a session of its own, runs on. If CMD fails, its
# task is given back to the front, uncounted, when all processes of the job have ended. But if
# --task-timeout has ended CMD, the attempt has failed as usual.
#
# Second, at least 0.3 s later: the launcher passes the signal, and then SIGCONT, to all jobs, and
# SIGKILL after 5 s. The threads settle their tasks as after the first signal. _abort() gives back
# the tasks that are left. The process ends with the status 128 + the signal.
#
# Third: it acts as before work(). A step after the second one may wait for ever, as for a disk.
#
# TOPIC: whose trouble an error is (_judged).
#
#   step                errno or event                           what follows
#   any                 EAGAIN, EMFILE, ENFILE, ENOMEM,          the worker waits, and tries again
#                       ETXTBSY, no thread
#   payload, output     ENOSPC, EDQUOT, EFBIG                    this try fails, and is counted
#   output              OUT/ID.out is there, but can't be used   this try fails, and is counted
#   output              OUT was removed                          OUT is made again
#   command             E2BIG, or a zero byte, by the payload    the task is a dead letter
#   any                 all others, such as ENOENT of CMD        the worker ends; the task goes back

_REPORT_S = 10.0  # the pause between two lines of progress
_REASON_BYTES = 4096  # the end of CMD's standard error
# with -j 2 or more, a line is kept until its end, but not if it is longer
_LINE_BYTES = 1 << 24
_PIPE_BYTES = 1 << 20  # a pipe holds at most so many bytes (Linux: pipe-max-size)
_SHORT_ERRNOS = (*_TRANSIENT_ERRNOS, errno.EAGAIN, errno.ETXTBSY)
_FULL_ERRNOS = (*_OUT_OF_SPACE_ERRNOS, errno.EFBIG)


class _Shortage(Exception):
    """The system is short of something, such as processes."""


class _Trouble(BaseException):
    """Trouble that ends the worker. It is no Exception, so its task is given back, uncounted."""


def _is_shortage(error: BaseException) -> bool:
    return (
        getattr(error, "errno", 0) in _SHORT_ERRNOS
        or str(error) == "can't start new thread"
        or isinstance(error, MemoryError)
    )


@contextmanager
def _judged(step: str) -> Iterator[None]:
    """Raise what an OSError becomes, by the table above."""
    try:
        yield
    except OSError as error:
        text = f"{step}: {error}"
        if _is_shortage(error):
            raise _Shortage(text) from None
        if os.path.lexists(error.filename or "") or error.errno in _FULL_ERRNOS:
            raise _CommandFailed(text) from None
        raise _Trouble(text) from None


class _OutputFile:
    """A file in --output-dir. tail: its last bytes, but none that stood there before."""

    def __init__(self, path: str, files: ExitStack) -> None:
        # Others may write to the directory, too.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_FOLLOW_OR_BLOCK
        self.fd = os.open(path, flags, 0o666)
        files.callback(os.close, self.fd)
        it = os.fstat(self.fd)
        if not (
            stat.S_ISREG(it.st_mode) and it.st_uid == os.geteuid() and it.st_nlink == 1
        ):
            raise OSError(
                errno.EPERM, "not a regular file of this user, with one link", path
            )
        self._begin = it.st_size

    @property
    def tail(self) -> bytes:
        start = max(self._begin, os.fstat(self.fd).st_size - _REASON_BYTES)
        return os.pread(self.fd, _REASON_BYTES, start)


class _Relay:
    """A pipe, and the stream that its bytes are for. tail: the last bytes that came."""

    tail = b""
    _rest = b""  # an unfinished line

    def __init__(self, stream: _Output, is_by_lines: bool, files: ExitStack) -> None:
        self.stream = stream
        self._is_by_lines = is_by_lines
        # The end of the pipe has no meaning, because a program that the job has left may hold the
        # pipe for ever. So the writing end stays open here.
        self.pipe, self.fd = os.pipe()
        os.set_blocking(self.pipe, False)
        files.callback(os.close, self.pipe)
        files.callback(os.close, self.fd)

    def due(self, is_last: bool) -> bytes:
        """Return what has come and is to be passed on. is_last: also an unfinished line."""
        data = b""
        with suppress(BlockingIOError):  # nothing has come
            data = os.read(self.pipe, _PIPE_BYTES)
        self.tail = (self.tail + data)[-_REASON_BYTES:]
        if not self._is_by_lines:
            return data
        text = self._rest + data
        if is_last and text:
            text = text.removesuffix(b"\n") + b"\n"
        end = len(text) if len(text) > _LINE_BYTES else text.rfind(b"\n") + 1
        self._rest = text[end:]
        return text[:end]


class _CommandPool(_WorkerPool):
    """The pool whose handler runs CMD for a task."""

    stops = _STOPS

    def __init__(self, queue: FemtoQueue, launcher: _Launcher, options: Any) -> None:
        super().__init__(
            queue,
            self._run_command,
            options.jobs,
            options.drain,
            idle_timeout_s=options.idle_timeout,
            time_limit_s=options.time_limit,
        )
        # In the main thread, the second signal would raise KeyboardInterrupt within a start of CMD.
        self._is_threaded = True
        self._options = options
        self._launcher = launcher
        self._cannot_run = f"{options.after_dashes[0]} can't be run"
        self.output = _Output()
        # A write to standard output that waits for a reader must not delay the log.
        self._stdout = self.output if os.path.sameopenfile(1, 2) else _Output(1)
        self._progress = _Progress(options.dir)
        self._jobs = set[_CommandJob]()
        self._is_told = threading.Event()  # set when the first signal has come

    def run_reported(self) -> int:
        import signal

        failed = self._progress.files.count("failed")
        if os.getpid() == 1:  # the system reaps what this process inherits
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with self.output.reporting(self._progress_text, _REPORT_S):
            self.run()
        if len(self.signals) > 1:
            return 128 + self.signals[-1]
        has_failed = self._progress.files.count("failed") > failed
        return self._drain and (has_failed or any(self._queue.stats()[:3]))

    def _progress_text(self) -> str:
        with suppress(OSError):  # pop() meets the same trouble, and raises the error
            if not self._options.quiet:
                self._progress.count_left(sum(self.counts[it] for it in _ENDED))
                return self._progress.text(self.counts) + "\n"
        return ""

    def _failure_text(self, task: FemtoTask, outcome: str, error: Exception) -> str:
        text = super()._failure_text(task, outcome, error)
        return f"{text.replace(_try_text(task), '')}; data: {_preview(task.data)}"

    # Signals

    def _tell_stop(self) -> None:
        self._is_told.set()
        # On a terminal, the system has echoed ^C.
        _write_stop_line(self.output.clearing() or b"\n" * os.isatty(2))

    def _abort(self) -> None:
        """End all jobs by the second signal, and give back the tasks of those that do not end."""
        end_s = time.monotonic() + _GRACE_S + 1
        while self._running and time.monotonic() < end_s:
            # RACE (CommandLine): a thread starts a job after the signal, so look again
            for job in [*self._jobs]:
                job.end(self.signals[-1])
            time.sleep(_TICK_S)
        super()._abort()

    def _may_go_on(self, error: BaseException) -> bool:
        if not _is_shortage(error):
            return super()._may_go_on(error)
        _warn_once(f"{str(error) or 'no memory'}; trying again")
        self._is_told.wait(_BASE_INTERVAL_S)
        return True

    # A task

    def _run_command(self, task: FemtoTask) -> None:
        """Raises _CommandFailed if the try fails, and _Trouble."""
        while True:
            try:
                with ExitStack() as files:
                    self._try(task, files)
                return
            except _Shortage as error:
                _warn_once(f"task {task.id} waits: {error}")
            except (_CommandFailed, LeaseLost):
                raise
            except Exception as error:  # a missing module, no reader of the output, ...
                raise _Trouble(error) from error
            self._is_told.wait(_BASE_INTERVAL_S)
            if self._is_stopping():
                self._queue.release(task, front=True, counted=False)
                return

    def _try(self, task: FemtoTask, files: ExitStack) -> None:
        import tempfile

        with _judged(
            f"the payload can't be written to {tempfile.gettempdir()}{_try_text(task)}"
        ):
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            payload = files.enter_context(file).fileno()
            _write_all(payload, task.data)
            file.seek(0)
        with _judged(self._cannot_run):
            outputs = self._outputs(task, files)
            streams = [payload, outputs[0].fd, outputs[-1].fd]
            job = _CommandJob(self._launcher, task, streams)
        files.callback(job.link.close)
        self._jobs.add(job)
        files.callback(self._jobs.discard, job)
        try:
            self._follow(job, [] if self._options.output_dir else outputs)
        except TimeoutError:
            _log().warning("%s: output is lost: nobody reads it", task.id)
        if job.is_stopped:
            self._queue.release(task, front=True, counted=False)
        elif job.is_late or job.status:
            raise _CommandFailed(self._reason(job, outputs[-1].tail))
        elif job.errno:
            self._refuse(job)
        elif job.status is None:
            raise _Trouble("the launcher of this worker has ended; its jobs are killed")

    def _outputs(self, task: FemtoTask, files: ExitStack) -> list[Any]:
        """Return where CMD's output leads to: one for both streams, or two."""
        if directory := self._options.output_dir:
            with _judged(f"the output can't be written{_try_text(task)}"):
                # If another kind of file is there, open() says so: trouble for all tasks.
                with suppress(FileExistsError):
                    os.makedirs(directory, 0o700)
                return [
                    _OutputFile(f"{directory}/{task.id}{it}", files)
                    for it in (".out", ".err")
                ]
        is_alone = self._options.jobs == 1
        streams = [self._stdout, self.output]
        if is_alone and self._stdout is self.output:
            del streams[1:]  # with one pipe for both streams, their lines stay in order
        return [_Relay(it, not is_alone, files) for it in streams]

    def _follow(self, job: _CommandJob, relays: list[_Relay]) -> None:
        """Pass on the output until the job is over. After OSError, end the job."""
        import signal

        fds = [job.link.fileno(), *(it.pipe for it in relays)]
        try:
            while not job.is_over:
                ready = _readable(fds, _GRACE_S + 1)
                if not ready and (job.is_late or job.is_ending):
                    _warn_once(
                        f"task {job.task.id}: its command can't be killed; waiting"
                    )
                if fds[0] in ready and job.note() == "status" and not job.is_late:
                    # The signal may have ended only a shell, while a program of the shell still
                    # saves its state. So wait for the whole job.
                    job.is_stopped = self._ended_by_stop(job)
                    job.is_over = not (job.is_stopped or job.is_ending)
                    # CRASH (CommandLine): if the worker dies before this line, the launcher kills
                    # what CMD has left.
                    job.end(_FORGET if job.is_over else 0)
                for relay in relays:
                    self._pass_on(job, relay)
        except OSError:
            job.end(signal.SIGTERM)
            self._follow(job, [])
            raise

    def _pass_on(self, job: _CommandJob, relay: _Relay) -> None:
        """After a stop, drop output whose reader is gone: the running jobs must still finish."""
        try:
            if due := relay.due(job.is_over):
                relay.stream.put(due, job.end_s, False)
        except OSError as error:
            # RACE (CommandLine): Ctrl-C ends `tee` in `femtoqueue work ... | tee log`, and the
            # write fails before the signal has come to this worker. So wait for it.
            is_gone = error.errno in (errno.EPIPE, errno.EIO)
            if not (is_gone and self._is_told.wait(_ONE_SIGNAL_S)):
                error.filename = _STREAM_NAMES[relay.stream.fd]
                raise

    def _refuse(self, job: _CommandJob) -> None:
        error = OSError(job.errno, os.strerror(job.errno))
        is_argument = "{}" in " ".join(self._options.after_dashes)
        if is_argument and error.errno in (errno.E2BIG, errno.EINVAL):
            text = (
                "the payload can't be an argument of the command, in place of {}"
                f"{_try_text(job.task)}: {error}"
            )
            self._queue.fail(job.task, text)
            raise _CommandFailed(text)
        with _judged(self._cannot_run):
            raise error

    def _reason(self, job: _CommandJob, tail: bytes) -> str:
        status = job.status or 0
        what = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        if job.is_late:
            what = f"killed after {self._launcher.limit_s:.9g}s"
        return f"{what}{_try_text(job.task)}\n{tail.decode(errors='replace')}".rstrip()

    def _ended_by_stop(self, job: _CommandJob) -> bool:
        """Return True if CMD failed, perhaps by the signal that stops this worker."""
        # RACE (CommandLine): a scheduler signals both, and CMD ends before the signal has come to
        # this worker. So if a signal may have ended CMD, wait for it. Before the last attempt
        # fails, wait always: CMD may have caught the signal.
        status = job.status or 0
        is_last = job.task.attempts == self._options.max_attempts
        may_be = is_last or not 0 < status <= 128
        return status != 0 and self._is_told.wait(_ONE_SIGNAL_S if may_be else 0)


def _try_text(task: FemtoTask) -> str:
    """Return what the first line of a reason has, for _task_row()."""
    return f" (try {task.attempts})"


# ==================================================================================================
# 24. Command line: a function for each command. The docstring of the function is the help text.
#     Invariant: a command calls only public methods of FemtoQueue and FemtoTask.
#     TOPIC: a new command is a function _NAME_command(options), below the decorator @_command. A
#     new kind of value needs a parser in _TYPES. The class CommandLine has the number of commands.
#     It wants an example and, except for `work`, at most 24 lines of help.
# ==================================================================================================


def main(argv: list[str] | None = None) -> Any:
    """Run a command, and return the exit status: see _NOTES. An error is written to standard error,
    as one line. Raises SystemExit for --help and --version."""
    try:
        _open_closed_streams()
        options = _parse_arguments(sys.argv[1:] if argv is None else argv)
        return int(options.run(options) or 0)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        return 0
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    # RuntimeError: the system allows no more threads. OverflowError: a TIME of centuries.
    except (
        FemtoQueueError,
        OSError,
        ValueError,
        MemoryError,
        RuntimeError,
        OverflowError,
        _Trouble,
    ) as error:
        text = str(error) or type(error.__cause__ or error).__name__
        name, must, wanted = text.partition(" must ")
        _write_error(_OPTIONS.get(name, name) + must + wanted)
        return 1 if isinstance(error, FemtoQueueError) else 2


# Parameters at the beginning of messages of FemtoQueue, and their options.
_OPTIONS = {
    "max_attempts": "--max-attempts",
    "node_id": "--node",
    "key": "--key",
    "if_in_flight": "--if-in-flight",
    "time_us": "--at",
    "timeout_stale_ms": "--timeout",
    "ms": "--timeout",
}


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`), so that no task's file gets
    its descriptor."""
    fd = 0
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
    os.close(fd)


def _write_error(text: str) -> None:
    """Write an error to standard error, as one line."""
    with suppress(OSError):  # there is no other place to report it
        _put(2, f"femtoqueue: {' '.join(text.splitlines())}\n")


def _put(fd: int, data: str | bytes) -> None:
    """Write all of a text or of bytes to standard output (1) or standard error (2). A character
    that the encoding lacks is escaped. Raises OSError."""
    if isinstance(data, str):
        encoding = getattr(sys.stdout, "encoding", "utf-8")
        data = data.encode(encoding, "backslashreplace")
    try:
        _write_all(fd, data)
    except OSError as error:
        error.filename = _STREAM_NAMES[fd]
        raise


def _print(*texts: object) -> None:
    """Print each text as a line."""
    _put(1, "".join(f"{it}\n" for it in texts))


# Command line: how commands are declared, and parsed

_COMMANDS: dict[str, Any] = {}


def _command(*arguments: Any) -> Callable[[Any], Any]:
    """Declare a function _NAME_command as the command NAME, with its arguments after DIR. The
    function takes options, and returns the exit status; None: 0."""

    def declare(run: Any) -> Any:
        run.arguments = arguments
        run.help = run.__doc__ or "\n"  # `python -OO` keeps no docstrings
        _COMMANDS[run.__name__.split("_")[1]] = run
        return run

    return declare


def _argument(words: str, text: str, group: str = "", **settings: Any) -> Any:
    """Declare an argument of a command. words: the names, then the value in capitals and its
    default; a flag has none. group: only one argument of a group may be given. settings: for
    add_argument(). Returns the group, the names, and all settings."""
    *names, value = words.split()
    if value.startswith("-"):
        return group, [*names, value], {"help": text, "action": "store_true"}
    value, _, default = value.partition("=")
    if default:
        text += " (default: %(default)s)"
    # nargs="*" counts as required if it has no default
    general = {"type": _TYPES.get(value), "metavar": value, "default": default or None}
    return group, names, {"help": text, **general, **settings}


def _parse_arguments(argv: list[str]) -> Any:
    """Return the options of a command line. `run`: the function of the command. `after_dashes`: the
    words after `--` of push and work. Raises ValueError for a wrong command line."""
    name, *words = argv or [""]
    if name in ("--version", "-h", "--help"):
        titles = [
            f"    {it:9} {run.help.splitlines()[0]}" for it, run in _COMMANDS.items()
        ]
        version = [f"femtoqueue {__version__}"]
        _print(*version if name == "--version" else [_SUMMARY, *titles, _NOTES])
        sys.exit(0)
    if name not in _COMMANDS:
        import difflib

        hint = "the command comes first, as in: push DIR PAYLOAD"
        for meant in difflib.get_close_matches(name, _COMMANDS, 1):
            hint = f"did you mean {meant}?"
        raise ValueError(f"there is no command {name!r}; {hint}; see femtoqueue --help")
    dashes = len(words)
    hint = _HINTS.get(name, "")
    if hint and "--" in words:
        dashes = words.index("--")
        hint = ""
    options = _parser_of(name, hint).parse_intermixed_args(words[:dashes])
    options.after_dashes = words[dashes + 1 :]
    return options


def _parser_of(name: str, hint: str) -> Any:
    """Return the parser of a command. The hint is for words that it does not know."""
    import argparse
    import textwrap

    run = _COMMANDS[name]
    default_dir = os.environ.get("FEMTOQUEUE_DIR")

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            if default_dir:
                message += f" (DIR is {default_dir}, from FEMTOQUEUE_DIR)"
            if hint and "unrecognized" in message:
                message += f"; {hint}"
            raise ValueError(f"{message}; see {self.prog} --help")

        def print_help(self, file: object = None) -> None:
            _put(1, self.format_help())  # raises OSError, on a full disk

    summary, _, notes = run.help.partition("\n\n")
    parser = Parser(
        f"femtoqueue {name}",
        description=summary,
        epilog=textwrap.dedent(notes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, error=parser.error, dir=default_dir)
    if not default_dir:
        parser.add_argument(
            "dir", metavar="DIR", help="the queue; or set FEMTOQUEUE_DIR"
        )
    groups = defaultdict[str, Any](parser.add_mutually_exclusive_group, {"": parser})
    for group, names, settings in run.arguments:
        groups[group].add_argument(*names, **settings)
    return parser


def _seconds(text: str) -> float:
    import argparse

    form = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ms|s|m|h|d|)", text)
    if form is None:
        raise argparse.ArgumentTypeError(
            f"invalid {text!r}; a TIME is 500ms, 30s, 5m, 2h, 7d, or 1.5 for seconds"
        )
    sizes_s = {"ms": 0.001, "m": 60, "h": 3600, "d": 86400}
    return float(form[1]) * sizes_s.get(form[2], 1)


def _timestamp(text: str) -> float:
    """Return the seconds since the epoch. A text without an offset from UTC is in local time."""
    import argparse

    with suppress(ValueError):
        # the Z: for Python 3.10
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    raise argparse.ArgumentTypeError(f"invalid {text!r}; WHEN is {_TIMES}")


def _id_argument(text: str) -> str:
    import argparse

    if _parse_id(_id_of(text)):
        return text
    raise argparse.ArgumentTypeError(
        f"invalid {text!r}; an ID is the last 37 characters of a task's name,"
        " or the path that `pop` printed"
    )


def _utf8_text(text: str) -> str:
    """Decode an argument as UTF-8: a key must be the same in every locale."""
    return os.fsencode(text).decode()


_SUMMARY = """\
usage: femtoqueue COMMAND DIR ...

Keep tasks in a durable queue, the directory DIR. COMMAND --help says more.
"""
_NOTES = """
If FEMTOQUEUE_DIR is set, leave DIR out. A TIME is 500ms, 30s, 5m, 2h, 7d, or
seconds. Status: 0 ok, 1 nothing there or a condition not met, 2 wrong use or
trouble, 128 + a signal's number.

Example: femtoqueue push jobs 'resize 42.png'
         femtoqueue work jobs --drain -- echo working on {}"""
_HINTS = {  # for the commands that have words after `--`
    "push": "put a PAYLOAD that begins with - after --",
    "work": "put the command after --, as in: work DIR -- CMD ARGS",
}
_TIMES = "2026-12-01T08:00 or 2026-12-01T08:00+01:00"
_TYPES: dict[str, Callable[[str], Any]] = {
    "TIME": _seconds,
    "WHEN": _timestamp,
    "ID": _id_argument,
    "KEY": _utf8_text,
    # A reason may have been cut in the middle of a character.
    "TEXT": lambda it: os.fsencode(it).decode(errors="backslashreplace"),
    "N": int,
}
_ID_HELP = "id of a task, or the path that `pop` printed"
_IDS = _argument("ids ID", _ID_HELP, nargs="+")
_SOME_IDS = _argument("ids ID", _ID_HELP, nargs="*")
_LEASE = _argument("--timeout TIME=30s", "length of the lease")
_SYNC = _argument("--sync", "survive power loss, not only the death of processes")


# Command line: what several commands use


def _has_queue(directory: str) -> bool:
    with _ignore_missing():
        os.stat(f"{directory}/pending/")
        return True
    return False


def _open_queue(options: Any, makes: bool = False, **settings: Any) -> FemtoQueue:
    """Open the queue in DIR. If there is none, make it and say so, or raise ValueError."""
    is_new = not _has_queue(options.dir)
    if is_new and not makes:
        raise ValueError(f"{options.dir}: there is no queue; push makes one")
    q = FemtoQueue(options.dir, **settings)
    if is_new:
        _write_error(f"{options.dir}: a new queue is made")
    return q


def _for_each_id(
    options: Any, act: Callable[[FemtoQueue, str], object], **settings: Any
) -> int:
    """Call act() for each ID. Return how often it raised FemtoQueueError."""
    refused = 0
    q = _open_queue(options, **settings)
    for name in options.ids:
        try:
            act(q, name)
        except FemtoQueueError as error:
            _write_error(str(error))
            refused += 1
    return refused


def _print_result(text: str, event: str) -> None:
    """Print an id or a path after an event. If that fails, write both to standard error, and raise
    nothing: otherwise the caller would try again what has happened."""
    try:
        _print(text)
    except BrokenPipeError:  # nobody wants to know
        pass
    except OSError as error:
        _write_error(f"{event}: {error}: {text}")


def _since_s(at: Any) -> Any:
    return round(time.time() - at.timestamp(), 3)


def _task_row(q: FemtoQueue, task: FemtoTask) -> dict[str, Any]:
    """Return the fields of a task that the commands ls and show print, in this order."""
    preview = ""
    if task.size_bytes:  # otherwise the file may be a FIFO
        with suppress(OSError), open(f"{q.data_dir}/{task.path}", "rb") as file:
            file.readline()  # the header
            preview = _preview(file.read(_PREVIEW_BYTES))
    # the attempts of a dead letter of `work`: see _try_text()
    told = re.match(r".*\(try (\d{1,6})\)", task.error or "")
    return {
        "state": task.state,
        "id": task.id,
        "age_s": _since_s(task.created),
        "since_s": _since_s(task.since),
        "attempts": int(told[1]) if told else task.attempts,
        "size_bytes": task.size_bytes,
        "left_s": task.until and -_since_s(task.until),
        "key": task.key,
        "node": task.node,
        "data_preview": preview,
    }


def _cell(name: str, value: Any) -> str:
    """Return a field of a row as text, for example a time as 7s, 3.1m, 2.1h or 4.1d."""
    if value in (None, ""):
        return "-"
    if name == "key":
        return _quote_key(value)  # one word
    if not name.endswith("_s"):
        return str(value)
    for unit, size in _UNITS[:3]:
        if abs(value) >= size:
            return f"{value / size:.1f}{unit[0]}"
    return f"{value:.0f}s"


def _task_table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    form = "{:9} {:37} {:>6} {:>6} {:>3} {:>8} {:>6} {} {} {}"
    yield """\
STATE     ID                                       AGE  SINCE TRY    BYTES   LEFT KEY NODE DATA"""
    for row in rows:
        yield form.format(*map(_cell, row, row.values()))


def _field_lines(row: dict[str, Any]) -> list[str]:
    return [
        f"{name.removesuffix('_s'):20} {_cell(name, value)}"
        for name, value in row.items()
    ]


def _fitting(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines. On a terminal, cut off what may not fit: in UTF-8, no character takes more
    columns than bytes."""
    columns = _terminal_size(1)[0] or None
    for line in lines:
        yield line.encode(errors="replace")[:columns].decode(errors="ignore")


# Command line: push


@_command(
    _argument("payloads PAYLOAD", "a task", nargs="*"),
    _argument("--lines", "push each line of standard input"),
    _argument("-0 --null", "push each piece of standard input, split at zero bytes"),
    _argument("--delay TIME=0s", "the task is due after TIME", "when"),
    _argument("--at WHEN", f"due at {_TIMES}", "when"),
    _argument("--key KEY", "replace the payload of this key's task, if one waits"),
    _argument("--if-in-flight HOW=buffer", "if leased: buffer, update or reject"),
    _SYNC,
)
def _push_command(options: Any) -> None:
    """Add tasks, and print their ids.

    Without PAYLOAD, push standard input. If PAYLOAD begins with -, put it after --.
    If KEY's task is leased: buffer PAYLOAD behind it, update it, or reject PAYLOAD.

    Example: femtoqueue push jobs 'resize 42.png'
    """
    if options.key is None and options.if_in_flight != "buffer":
        options.error("--if-in-flight goes with --key")
    payloads = _payloads(options)
    of_key = {"key": options.key, "if_in_flight": options.if_in_flight}
    count = 0
    with (
        _open_queue(options, makes=True, sync_after_write=options.sync) as q,
        # On a terminal, the ids show the progress.
        _Output().reporting(lambda: "" if os.isatty(1) else f"{count} pushed"),
    ):
        for payload in payloads:
            try:
                if options.at is None:
                    ident = q.push(payload, delay_s=options.delay, **of_key)
                else:
                    ident = q.schedule(payload, options.at * 1e6, **of_key)
            except Exception:
                if count:
                    _write_error(
                        f"the first {count} tasks are pushed, the others are not"
                    )
                raise
            count += 1
            _print_result(ident, "a task is pushed, but its id can't be printed")


def _payloads(options: Any) -> Iterable[bytes]:
    """Return the payloads: the arguments, or pieces of standard input, or the whole of it."""
    words = [*options.payloads, *options.after_dashes]
    end = b"\0" if options.null else b"\n" if options.lines else b""
    if words and end:
        options.error("--lines and --null read standard input: leave PAYLOAD out")
    if options.key is not None and (end or len(words) > 1):
        options.error("--key goes with one PAYLOAD: each would replace the one before")
    if words:
        return map(os.fsencode, words)
    if end:
        return _pieces(end)
    return [*_pieces(end)] or options.error(
        "standard input is empty; for an empty task, give '' as PAYLOAD"
    )


def _pieces(end: bytes) -> Iterator[bytes]:
    """Yield the pieces of standard input, each as soon as its `end` has come. The last needs none.
    end=b"": yield the whole, unless it is empty."""
    rest = bytearray()
    if os.name == "posix":
        os.set_blocking(0, True)  # another process may have set O_NONBLOCK
    while chunk := os.read(0, 1 << 16):
        rest += chunk
        if end and end in chunk:
            *pieces, rest = rest.split(end)
            yield from map(bytes, pieces)
    if rest:
        yield bytes(rest)


# Command line: work


@_command(
    _argument("words CMD", "what to run for each task", nargs="*", metavar="-- CMD"),
    _argument("-j --jobs N=1", "run N at a time"),
    _LEASE,
    _argument("--node NODE", "name of this worker (default: a fresh one)"),
    _argument(
        "--keep-done TIME",
        "delete finished tasks after TIME (default: keep)",
        default=True,
    ),
    _SYNC,
    _argument("--drain", "exit when no task is in flight or waits, due or not"),
    _argument("--idle-timeout TIME", "exit when this worker got nothing for TIME"),
    _argument("--time-limit TIME", "take nothing more after TIME, and exit"),
    _argument("--max-attempts N=3", "give up after N tries; 0: never"),
    _argument("--retry-delay TIME=1s", "wait up to TIME before try 2; then double"),
    _argument("--task-timeout TIME", "end CMD after TIME; 0: never (default: 0)"),
    _argument("--output-dir DIR", "write output to DIR/ID.out and .err"),
    _argument("-q --quiet", "report no progress"),
)
def _work_command(options: Any) -> int:
    """Run CMD for each task, with the payload on its standard input.

    Each {} in CMD stands for the payload. If payloads may begin with -, write
    `CMD -- {}`. A payload that has a zero byte, or is too long for an argument, is
    a dead letter at once. {} in the script of `sh -c` is refused, because the
    payload would run as code: use sh -c 'convert "$1"' sh {}. CMD's environment has
    FEMTOQUEUE_ID, FEMTOQUEUE_ATTEMPT and FEMTOQUEUE_KEY. CMD gets only descriptors
    0, 1 and 2, so `make` can't use a jobserver of its parent.

    If CMD exits with 0, the task is done. If CMD fails, the task is tried again.
    After --max-attempts tries, it becomes a dead letter, with a reason: how CMD
    ended, and the end of its standard error. CMD's output is passed on at once;
    with -j 2 or more, in whole lines.

    After SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or Ctrl-C, the running commands finish,
    and no other starts. If a command then fails, its task is given back, and the
    try is not counted: a scheduler may have sent the signal to the command, too. A
    second signal, at least 0.3 s later, is passed to the running commands. Those
    that still run 5 s later are killed.

    --task-timeout ends all processes of CMD's session. If a scheduler limits the
    time of this worker, make --task-timeout shorter, or a task that takes too long
    is given back at each limit, and comes first in the next worker.

    If this worker is killed, its commands are killed. A program that calls setsid()
    has left its command, and nothing ends it: to end such programs, too, run the
    command in a container, or with `systemd-run --scope`. A program that CMD
    leaves running ends at its next write, unless its output is redirected or goes
    to --output-dir. If a lease is lost, CMD goes on.

    Status 1 (only with --drain): a task became a dead letter, or tasks are left.

    Example: femtoqueue work jobs -j 2 --drain -- ./resize --fast -- {}
    """
    import logging

    _prepare_work(options)
    launcher = _Launcher(options.after_dashes, options.task_timeout or _FOREVER_S)
    with (
        launcher.requests,
        _open_queue(
            options,
            makes=True,
            node_id=options.node,
            timeout_stale_ms=options.timeout * 1000,
            sync_after_write=options.sync,
            keep_done=options.keep_done,
            max_attempts=options.max_attempts or None,
            retry_delay_s=options.retry_delay,
        ) as q,
    ):
        pool = _CommandPool(q, launcher, options)
        logging.basicConfig(
            stream=pool.output, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
        )
        status = pool.run_reported()
    # A normal exit would wait for a thread that is stuck in a write, and holds the log's lock.
    if status > 128:
        os._exit(status)
    return status


def _prepare_work(options: Any) -> None:
    """Check the options of `work` and CMD before a task is taken."""
    # Import all that a job needs: Python may be replaced or removed while the worker runs. These
    # modules, and logging, import the others that a job needs.
    import hashlib  # noqa: F401
    import shutil
    import subprocess  # noqa: F401
    import tempfile  # noqa: F401
    import urllib.parse  # noqa: F401

    command = options.after_dashes
    if options.words or not command:
        unexpected = f"unexpected {options.words[0]!r}; " if options.words else ""
        options.error(unexpected + _HINTS["work"])
    if options.jobs < 1:
        options.error("-j must be 1 or more")
    if shutil.which(command[0]) is None:
        options.error(f"{command[0]}: command not found, or not executable")
    if _SCRIPT_WITH_PAYLOAD.match("\0".join(command)):
        wanted = "sh -c 'convert \"$1\"' sh {}"
        options.error(
            f"{{}} in the script of sh -c would run as code; as an argument: {wanted}"
        )
    if not hasattr(os, "fork"):
        options.error("no fork() here; use FemtoQueue.work() in a program of your own")


_SHELL_OPTION = (
    r"(?:[-+][A-Za-z]*[oO]\0[^\0]*\0|--(?:rcfile|init-file)\0[^\0]*\0|[-+][^\0]*\0)"
)
# A command line, joined by zero bytes, with {} in the script of a shell.
_SCRIPT_WITH_PAYLOAD = re.compile(
    rf"(?s)(?:.*[\0/])?(?:ba|da|z|k|a|mk)?sh\0{_SHELL_OPTION}*"
    rf"-[A-Za-z]*c[A-Za-z]*\0{_SHELL_OPTION}*(?![-+])[^\0]*\{{\}}"
)


# Command line: leases


@_command(
    _LEASE,
    _argument("--wait TIME=0s", "wait for TIME if there is no task"),
    _argument("--node NODE=cli", "name of the worker"),
    _argument("--payload", "print the payload, not the path"),
    _argument("--key KEY", "lease the task of this key, out of turn", "which"),
    _argument("--id ID", "lease this task, due or not", "which"),
)
def _pop_command(options: Any) -> int:
    """Lease the oldest task, and print the path of its file in DIR.

    The lease lasts for --timeout, or until done, fail or release gets the path. The
    path is valid for this delivery only, the id in the path for later ones, too.
    With --payload, the path goes to standard error. Status 1: no task, or paused.

    Example: task=$(femtoqueue pop jobs) && tail -n +2 "jobs/$task"
             femtoqueue done jobs "$task"
    """
    q = _open_queue(
        options,
        node_id=options.node,
        timeout_stale_ms=options.timeout * 1000,
        detached=True,
    )
    if options.key is None and options.id is None:
        task = q.pop(options.wait)
    else:
        task = q.take(options.key, options.wait, id=options.id)
    if task is None:
        return 1
    try:
        if options.payload:
            _put(1, task.data)
        _put(2 if options.payload else 1, f"{task.path}\n")
    except BaseException as error:
        # without the path, the caller can't settle the task
        q.release(task, front=True, counted=False)
        if isinstance(error, BrokenPipeError):
            # main() would take this error for a success
            raise FemtoQueueError(
                f"task {task.id} is given back: nobody reads"
            ) from None
        raise
    return 0


@_command(_IDS)
def _cancel_command(options: Any) -> int:
    """Delete tasks that wait, due or not.

    A task in another state stays as it is. Status 1: one of the tasks did not wait.

    Example: femtoqueue cancel jobs 01795243500123456789-0a1b2c3d4e5f6071
    """

    def cancel(q: FemtoQueue, name: str) -> None:
        task = q.take(id=_id_of(name), even_paused=True)
        if task is None:
            raise TaskNotFound(f"task {_id_of(name)} is not waiting")
        q.done(task)

    return _for_each_id(options, cancel, keep_done=False) > 0


@_command(_IDS)
def _done_command(options: Any) -> int:
    """End tasks that `pop` leased: they move to done/.

    Example: femtoqueue done jobs "$task"
    """
    return _for_each_id(options, lambda q, name: q.done(q.attach(name))) > 0


@_command(_IDS, _argument("--reason TEXT", "why it failed"))
def _fail_command(options: Any) -> int:
    """Make dead letters of tasks that are in flight, with a reason.

    Example: femtoqueue fail jobs "$task" --reason 'no such image'
    """
    return (
        _for_each_id(options, lambda q, name: q.fail(q.attach(name), options.reason))
        > 0
    )


@_command(
    _SOME_IDS,
    _argument("--all", "all that are in flight", "which"),
    _argument("--node NODE", "all that the worker of that name has in flight", "which"),
    _argument("--front", "to the front of the queue", "where"),
    _argument("--delay TIME=0s", "to the back, after TIME", "where"),
)
def _release_command(options: Any) -> int:
    """Give back tasks that are in flight.

    A worker that holds such a task loses its lease, and can't change the task any
    more. With --all or --node, the number of released tasks is printed.

    Example: femtoqueue release jobs "$task" --delay 5m
    """
    is_for_all = bool(options.all or options.node)
    if bool(options.ids) == is_for_all:
        options.error("give IDs, --all or --node")
    options.ids = options.ids or [
        it.path
        for it in _open_queue(options).tasks("inflight", data=False)
        if options.node in (None, it.node)
    ]
    refused = _for_each_id(
        options,
        lambda q, name: q.release(
            q.attach(name), front=options.front, delay_s=options.delay
        ),
    )
    if is_for_all:
        _print(f"released {len(options.ids) - refused}")
    return refused > 0


@_command(_IDS, _LEASE)
def _extend_command(options: Any) -> int:
    """Renew leases that `pop` took, and print their new paths.

    If a running worker holds the task instead, the worker loses its lease.

    Example: task=$(femtoqueue extend jobs "$task" --timeout 5m)
    """

    def renew(q: FemtoQueue, name: str) -> None:
        task = q.attach(name)
        q.extend(task, options.timeout * 1000)
        _print_result(task.path, "a lease is renewed, but its path can't be printed")

    return _for_each_id(options, renew) > 0


# Command line: views


@_command(
    _argument("states STATE", "list only these states", nargs="*"),
    _argument("--all", "list every state, done too"),
    _argument("--json", "print a JSON object on each line"),
)
def _ls_command(options: Any) -> None:
    """List the tasks in each STATE, or all tasks that are not done.

    A STATE is pending, scheduled, inflight, done or failed; --all means all five.
    Columns: state, id, age, time since it came to its state, attempts (-: not
    known), size in bytes (-: corrupt), time until the lease ends or the task is
    due, key, node, begin of the payload.

    Example: femtoqueue ls jobs failed
    """
    import json

    states = options.states or [it for it in STATES if options.all or it != "done"]
    q = _open_queue(options)
    # a wrong state raises ValueError before the head is printed
    tasks = [q.tasks(state, data=False) for state in states]
    rows = (_task_row(q, task) for task in itertools.chain(*tasks))
    for line in map(json.dumps, rows) if options.json else _fitting(_task_table(rows)):
        _print(line)


@_command(
    _argument("id ID", _ID_HELP), _argument("--payload", "print the payload only")
)
def _show_command(options: Any) -> None:
    """Print the fields of a task, and its payload.

    Example: femtoqueue show jobs 01795243500123456789-0a1b2c3d4e5f6071
    """
    q = _open_queue(options)
    task = q.peek(_id_of(options.id))
    if task is None:
        raise TaskNotFound(f"no task {options.id}")
    if not options.payload:
        row = _task_row(q, task)
        del row["data_preview"]
        if task.error:  # no line of the reason may look like a field
            row["reason"] = _printable(task.error).replace("\n", f"\n{'':21}")
        _print(*_field_lines(row), "")
    _put(
        1,
        _printable(task.data.decode("utf-8", "replace")) if os.isatty(1) else task.data,
    )


@_command(
    _argument("--json", "print a JSON object"),
    _argument(
        "--max-age TIME",
        "status 1 if a task has been due for longer",
        default=_FOREVER_S,
    ),
    _argument(
        "--max-pending N", "status 1 if more tasks are pending", default=_FOREVER_S
    ),
)
def _stat_command(options: Any) -> Any:
    """Count the tasks in each state, for people and for monitors.

    A task that moves from one state to another meanwhile may be missed, or counted
    twice. For --max-age, a task is due, too, when its lease has ended.

    Example: femtoqueue stat jobs --max-age 10m
    """
    import json

    q = _open_queue(options)
    figures = _figures(q)
    _print(*[json.dumps(figures)] if options.json else _field_lines(figures))
    ages_s = [figures["oldest_pending_age_s"] or 0]
    ages_s += [_since_s(it.until) for it in q.tasks("inflight", data=False)]
    return max(ages_s) > options.max_age or figures["pending"] > options.max_pending


def _figures(q: FemtoQueue) -> dict[str, Any]:
    figures = q.stats()._asdict()
    live = Counter(node.liveness for node in figures.pop("nodes"))
    figures |= {f"workers_{it}": live[it] for it in ("alive", "dead", "unknown")}
    figures["paused"] = q.paused
    return figures


@_command(
    _argument("--timeout TIME", "wait for TIME at most (default: as long as it takes)")
)
def _join_command(options: Any) -> bool:
    """Wait until no task is left. The command itself runs no task.

    A task is left if it waits, due or not, or is in flight. Status 1: the TIME
    is over, and tasks are left.

    Example: femtoqueue join jobs --timeout 1h && echo all done
    """
    return not _open_queue(options).join(options.timeout)


@_command(_argument("--interval TIME=2s", "pause between two looks"))
def _top_command(options: Any) -> None:
    """Show the queue live: rate, workers, what runs, dead letters.

    Ctrl-C ends the command. On a terminal, the view is redrawn in place, and lines
    that do not fit are cut off. If there is no queue in DIR, wait for one.

    Example: femtoqueue top jobs
    """
    while not _has_queue(options.dir):
        _warn_once(f"{options.dir}: waiting for a queue")
        time.sleep(options.interval)
    q = _open_queue(options)
    progress = _Progress(options.dir)
    begin = "\x1b[H\x1b[J" if os.isatty(1) else ""
    while True:
        rows = _terminal_size(1)[1] or 999
        lines = itertools.islice(_fitting(_top_lines(q, progress)), rows - 1 or 1)
        _print(begin + next(lines), *lines)
        time.sleep(options.interval)


def _top_lines(q: FemtoQueue, progress: _Progress) -> Iterator[str]:
    """Yield the lines that `top` shows, the most important lines first."""
    progress.count_left(0)
    yield f"{q.data_dir} {time.strftime('%H:%M:%S')}  {progress.pace_text()}"
    yield from _field_lines(_figures(q))
    yield ""
    rows = [_task_row(q, task) for task in q.tasks("inflight", data=False)]
    for task in reversed([*q.tasks("failed", data=False, last=20)]):
        row = _task_row(q, task)
        row["data_preview"] += f"  {_preview((task.error or '').encode())}"
        rows.append(row)
    yield from _task_table(rows)


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
def _check_command(options: Any) -> bool:
    """Look for problems in DIR, and print a line for each.

    The command reads every task. A line ends with `mended` if the problem was
    repaired, else with `odd`. Status 1: a problem was not repaired. A file that the
    queue did not make is a problem, too, and is never repaired.

    Example: femtoqueue check jobs --repair
    """
    q = _open_queue(options)
    began_s = time.monotonic()
    with _Output().reporting(
        lambda: f"checking for {time.monotonic() - began_s:.0f} s"
    ):
        findings = q.check(options.repair)
    for it in findings:
        state = "mended" if it.repaired else "odd"
        path = _printable(it.path).replace("\n", "\\n")
        _print(f"{it.kind}\t{path}\t{it.text}\t{state}")
    return not all(it.repaired for it in findings)


@_command(_SOME_IDS, _argument("--all", "retry all that failed"))
def _retry_command(options: Any) -> int:
    """Put failed tasks at the back of the queue, as if they were new.

    Example: femtoqueue retry jobs --all
    """
    if bool(options.ids) == options.all:
        options.error("which tasks? give each ID, or --all")
    if options.ids:
        return _for_each_id(options, lambda q, name: q.retry(_id_of(name))) > 0
    q = _open_queue(options)
    with _Output().reporting(lambda: f"{q.stats().failed} dead letters are left"):
        count = q.retry_failed()
    _print(count)
    return 0


@_command(
    _argument(
        "--older-than TIME", "delete what ended more than TIME ago", required=True
    ),
    _argument("--failed", "delete dead letters, too"),
)
def _purge_command(options: Any) -> None:
    """Delete tasks that were done long ago, and print how many.

    Example: femtoqueue purge jobs --older-than 7d
    """
    q = _open_queue(options)
    with _Output().reporting(lambda: f"{q.stats().done} finished tasks are left"):
        count = q.purge(options.older_than, _ENDED if options.failed else "done")
    _print(count)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        # A user's random.py beside this file, or with `python -m` in the current directory, must
        # not hide Python's own.
        del sys.path[0]
    sys.exit(main())
