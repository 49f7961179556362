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

    step       room and method                 from              to                       by
    publish    _Files.publish                  creating/<id>     pending/, scheduled/     rename
    due        _Worker.enqueue_scheduled      scheduled/        pending/<now>~<n>~<id>   rename
    claim      _LeaseDir.claim                 pending/          inflight-<node>/         rename
    undo       _LeaseDir.undo_claim            inflight-<node>/  pending/                 rename
    finish     _Worker.finish                 inflight-<node>/  done/<id>                rename
                 without keep_done             inflight-<node>/  nowhere                  unlink
    fail       _Worker.fail                   inflight-<node>/  failed/<id>; its .error  rename
    release    _Worker.requeue                inflight-<node>/  pending/ or scheduled/   rename
    extend     _Worker.extend                 inflight-<node>/  the same, a new deadline rename
    reclaim    _Worker.reclaim                an ended lease    pending/, its old place  rename
    quarantine _Worker.quarantine             inflight, pending failed/<id>; its .error  rename
    retry      _Worker.requeue_failed         failed/<id>       pending/<now>~0~<id>     rename
    purge      FemtoQueue.purge, _purge_done   done/, failed/    nowhere                  unlink
    replace    _KeyPusher.push, _Files.swap    creating/<id>     for a waiting record     renameat2
    update     _KeyPusher.push, _Files.swap    creating/<id>     for a leased record      renameat2
    buffer     _KeyPusher.push                 creating/<id>     keys/<id>                rename
    promote    _KeyIndex._promote_buffered     keys/<id>         pending/, scheduled/     rename
    save       _Worker.save_checkpoint        creating/         checkpoints/<id>         rename

_KeyIndex.move moves a task with a key, under the lock of the key; _Files.move moves any other.
Four steps do more. Claim removes the name of a task that is in done/ too (_Files.is_done). Replace
may first rename the task to a new time. Release and reclaim take along the payload buffered behind
it (_KeyIndex._return_with_buffered). A quarantine that can't write to failed/ moves it to the back.

Words: a *task* has a payload and, for life, an *id*. A *worker* is a queue object. It *claims* a
task: the rename gives it a *lease*, which ends at its *deadline* or with the worker; the lease's
exact name is the *fence*: when it is gone, done(), fail(), release() and extend() raise LeaseLost
and change nothing. A task is *settled* (acknowledged) by done(), fail() or release(), or
*reclaimed* from a worker that died or was late. A *dead letter* is in failed/; a task that can't
be delivered is *quarantined* there. *Housekeeping* is what pop() does besides. A newer payload of
a key is *buffered* while its task is in flight.

Two workers that want one task both call rename(); one succeeds, the other gets ENOENT and takes
the next. A living worker holds a shared flock on its inflight-<node>/. The kernel drops it with
the process, so a process that gets the exclusive lock knows that the worker is dead. There is no
server. Threads are started only by processing(), work(), the async methods and
TicketQueue.turn(); the command `work` forks one watchdog process.

Guaranteed: at least once. A task whose push() returned is delivered until a done() or fail()
returned, whatever is killed at whichever instant. Order is that of push() across the processes
of a host, restarts, reboots and steps of the wall clock. What is torn or corrupt is never
delivered; it ends in failed/ with the reason. With sync_after_write=True what returned also
survives power loss; without, a task not yet on disk may be missing after one.

Not guaranteed: exactly once. A task runs twice when its worker died or was late, or (without
sync) when power was lost after done(): make handlers idempotent. Between hosts, a cut network may
do the same, and give a key two tasks. A process stopped at work on a key holds up 1 key in 256.

Assumed: data_dir is on one file system, whose rename() is atomic (POSIX). Hosts that share it
have wall clocks within a second of each other, one timeout_stale_ms, and node_ids of their own; a
lease of another host ends by its deadline only, as do all without flock or boot id (not Linux).
Files whose names have none of these forms are foreign: never delivered, moved or removed.

Rooms of this file; each uses only those above it:

     1. System             system calls and constants that Python lacks
     2. Names              of tasks, directories and keys
     3. Errors and values  what the interface raises, returns and checks
     4. Records            the header line and the payload
     5. File locks         flock, and fork
     6. Files              the steps on files; durability is decided here
     7. Queue clock        orders and deadlines
     8. Backlog            the batch of names in pending/, and the next times
     9. Lease directory    claiming into it, and the lock that shows life
    10. Key states         where the task of each key is: keys/<hash>, or listings
    11. Keys               their locks; finding and moving tasks with a key
    12. Keyed pushes       replacing, updating and buffering their payloads
    13. Transitions        each change of a task's state
    14. Housekeeping       the jobs of pop(): listing, due tasks, dead workers
    15. Taking             one look for a task, with a lease or without
    16. Waiting            inotify, threads, coroutines
    17. Processing         renewal of leases
    18. Worker pool        the loop of work()
    19. Inspection         check()
    20. FemtoQueue         the public face
    21. Tickets            TicketQueue
    22. Command line       `femtoqueue COMMAND`
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
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

try:
    import fcntl
except ImportError:  # not POSIX: leases end by their deadlines
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import logging
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

# ==================================================================================================
# 1. System: system calls and constants that Python lacks, and small helpers of all rooms.
#    Invariant: libc is loaded once. Dates in names come from _wall_ns() or the queue clock only;
#    time.monotonic() elsewhere measures pauses and timeouts.
# ==================================================================================================

# f_type of statfs(2): ext2 to ext4, xfs, btrfs, f2fs, tmpfs.
_SYNCFS_TYPES = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})
# Those, overlay, zfs, bcachefs, ramfs: only this kernel writes to them, and inotify reports it all.
_LOCAL_TYPES = _SYNCFS_TYPES | {0x794C7630, 0x2FC12FC1, 0xCA451A4E, 0x858458F6}
_FUSE_TYPE = 0x65735546  # GlusterFS is mounted through FUSE
_NETWORK_TYPES = {
    **{0x6969: "NFS", _FUSE_TYPE: "FUSE", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB"},
    **{0x00C36400: "Ceph", 0x01021997: "9p", 0x0BD00BD0: "Lustre", 0x01161970: "GFS2"},
    **{0x7461636F: "OCFS2", 0x47504653: "GPFS", 0x5346414F: "AFS", 0x19830326: "BeeGFS"},
}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)

_OUT_OF_SPACE_ERRNOS = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_NO_WRITE_ERRNOS = (
    *(*_OUT_OF_SPACE_ERRNOS, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EISDIR),
)
_TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# ESTALE: another host removed what our descriptor refers to (NFS, GlusterFS).
_MISSING_ERRNOS = (errno.ENOENT, getattr(errno, "ESTALE", errno.ENOENT))
_NOT_EMPTY_ERRNOS = (errno.ENOTEMPTY, errno.EEXIST)  # POSIX leaves the choice to the file system
_NO_EXCHANGE_ERRNOS = (
    *(errno.ENOSYS, errno.EINVAL, errno.EPERM),
    *(errno.ENOTSUP, errno.EOPNOTSUPP),
)

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
# O_NOFOLLOW: a link is no task. O_NONBLOCK: a FIFO in pending/ must not block pop().
_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_FLAGS = os.O_RDONLY | _NO_FOLLOW_OR_BLOCK | getattr(os, "O_BINARY", 0)
_DIR_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)

_FIRST_PAUSE_S = 0.001  # of a backoff between two polls
_PIPE_BYTES = 4096  # a pipe holds that much without a reader
_LOOKS = 4  # for a file that another host may have replaced; three were needed
_Seen = TypeVar("_Seen")


def _wall_ns() -> int:
    return int(time.time() * 1e9)


def _monotonic_ns() -> int:
    return int(time.monotonic() * 1e9)


def _utc(ns: int) -> datetime:
    """Return nanoseconds since the epoch as a datetime."""
    from datetime import datetime, timedelta, timezone

    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=ns // 1000)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("femtoqueue")


@functools.lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library if it is that of a Linux with every call used here, else None."""
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


def _fs_type(path: str) -> int:
    """Return f_type of statfs(2), 0 where there is no such call. Raises OSError if it fails: what
    another host may write to must not be taken for local."""
    libc = _libc()
    if libc is None:
        return 0
    import ctypes

    # struct statfs begins with the type; 256 bytes are enough for any of them.
    status = (ctypes.c_long * 32)()
    if libc.statfs(os.fsencode(path), status):
        raise _libc_error(path)
    return status[0] & 0xFFFFFFFF


def _is_shared(fs_type: int) -> bool:
    """Whether other hosts may write to a file system. Where statfs(2) is missing: no."""
    return fs_type not in (0, *_LOCAL_TYPES)


def _may_lose_replies(fs_type: int) -> bool:
    """Whether ENOENT may mean that a call was carried out. An NFS client repeats a call if the
    server rebooted before it answered. Clients of other network file systems may, too; that of
    GlusterFS (FUSE) does not."""
    return _is_shared(fs_type) and fs_type != _FUSE_TYPE


def _find_syncfs(directory: str) -> Callable[[int], None] | None:
    """Return syncfs(2) if it exists and the directory's file system is known to obey it."""
    libc = _libc()
    if libc is None or _fs_type(directory) not in _SYNCFS_TYPES:
        return None

    def call(fd: int) -> None:
        if libc.syncfs(fd):
            raise _libc_error(directory)

    return call


def _exchange(first: str, second: str) -> None:
    """Swap what two absolute paths lead to, in one step: renameat2(2) with RENAME_EXCHANGE.

    Raises FileNotFoundError if one is missing, ENOSYS where there is no such call, EINVAL where
    the file system does not offer it, any other OSError as rename() does.
    """
    renameat2 = getattr(_libc(), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), second)
    paths = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        raise _libc_error(second)


def _read_boot_id() -> str | None:
    """Return a text that names this boot of this kernel; None where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        return None  # not Linux, or no /proc
    with contextlib.suppress(OSError):  # Linux 5.6: a time namespace has its own monotonic clock
        boot_id += os.readlink("/proc/self/ns/time")
    return boot_id


def _boot_tag(boot_id: str, directory: str) -> str:
    """Return 8 hex digits for a kernel and a mount: flock is coherent where both are shared."""
    return f"{binascii.crc32(f'{boot_id} {os.stat(directory).st_dev}'.encode()):08x}"


def _refresh(directory: str) -> None:
    """Make this host ask the server what is in a directory, if there is a server.

    An NFS client remembers for up to a minute that a name was not there, unless it sees, as it
    opens the directory, that that has changed (nfs(5): close-to-open consistency).
    """
    if os.name == "posix":
        with contextlib.suppress(OSError):  # the look that follows gets it too
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _read_text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")


def _look_afresh(look: Callable[..., _Seen], path: str, *rest: str) -> _Seen:
    """Call look() for a file that another host may have replaced.

    Raises FileNotFoundError if it is not there, also for ESTALE. After each listing, GlusterFS may
    lead a name to the file that was replaced; that is gone, as read() or close() tells, and then
    the name is looked up. So try again, without a listing in between.
    """
    for _ in range(_LOOKS):
        try:
            return look(path, *rest)
        except OSError as error:
            if error.errno not in _MISSING_ERRNOS:
                raise
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _exists_afresh(path: str) -> bool:
    """Whether a file is there, also if another host made it just now."""
    _refresh(os.path.dirname(path))
    return _exists(path)


def _exists(path: str) -> bool:
    """Whether a file is there. os.path.lexists() takes every error for "no"."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _make_dir(path: str, mode: int, sync: bool) -> None:
    """mkdir -p; with sync, what was made reaches the disk with its parent."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent == path or os.path.lexists(parent):  # a dangling link: mkdir can not help
            raise
        _make_dir(parent, 0o777, sync)
        _make_dir(path, mode, sync)
        return
    if sync:
        _sync_dir(os.path.dirname(path))


def _unlink_if_exists(path: str, or_fail: bool = True) -> bool:
    """Remove a file and return whether it was removed. or_fail=False: ignore an OSError, because
    the caller already handles or reports another one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError:
        if or_fail:
            raise
        return False
    return True


def _unlink_if_older(path: str, before_s: float) -> bool:
    """Remove a file that was renamed or changed before a time (st_ctime); return whether it did."""
    try:
        status = os.lstat(path)
        if status.st_ctime > before_s or stat.S_ISDIR(status.st_mode):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False  # RACE: another process retried or removed it
    return True


def _remove_empty_dir(path: str) -> None:
    """Remove a directory unless something is in it, or it is gone."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (*_NOT_EMPTY_ERRNOS, errno.ENOENT, errno.ENOTDIR):
            raise


def _sync_path(path: str, flags: int = os.O_RDONLY) -> None:
    """fsync(2) the file or directory at a path."""
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_dir(path: str) -> None:
    if os.name == "posix":  # elsewhere directories can be neither opened nor synced
        _sync_path(path, os.O_RDONLY | os.O_DIRECTORY)  # a link to a directory is one, here


class _FirstError:
    """Keeps the first OSError of the `with` blocks that it guards, which end there, until
    raise_if_any(): one task or directory with an error must not keep the others waiting."""

    def __init__(self) -> None:
        self._error: OSError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OSError):
            return False
        self._error = self._error or error
        return True

    def raise_if_any(self) -> None:
        if self._error is not None:
            raise self._error


def _no_op(*args: object) -> None:
    """Do nothing: the default of a callback."""


def _backoff_s(longest_s: float) -> Iterator[float]:
    """Yield pauses in seconds: from a millisecond, doubling, up to longest_s."""
    pause_s = min(_FIRST_PAUSE_S, longest_s)
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


# ==================================================================================================
# 2. Names: of tasks, directories and keys; parsers and formatters. Other rooms only join a
#    directory and a name, or split them at "/".
#    Invariant: a name matches a form of its directory (_FORMS), or it is foreign. The number in
#    front has 20 digits, the id at the end 29 characters.
# ==================================================================================================

STATES = ("pending", "scheduled", "inflight", "done", "failed")

_NEVER_NS = 8_999_999_999_999_999_999  # the year 2255; the largest number that a name may carry
_FOREVER_NS = 4 * 10**18  # 126 years: the longest lease
_FARTHEST_NS = 4 * 10**18  # the year 2096: no queue clock starts later, whatever a name says
_MAX_ATTEMPTS = 999_999  # a name has room for six digits
_DETACHED = "00000000"  # the <boot> of a lease that only its deadline ends
_MAX_KEY_BYTES = 200
_KEY_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:/@")
_ID_LENGTH = 29

_NS = "0[0-8][0-9]{18}"
_ID = f"({_NS}-[0-9a-f]{{8}})"
_ATTEMPTS = "([0-9]{1,6})"
_BOOT = "([0-9a-f]{8})"
# Written without <boot>, and in done/ and failed/ only as an id; but a person may move a task here
# from anywhere, under the name that it had there.
_WAITING = f"(?:{_NS}~{_ATTEMPTS}~(?:{_BOOT}~)?)?{_ID}"
# Each form has the groups attempts, boot, id.
_FORMS = {
    state: re.compile(form).fullmatch
    for state, form in {
        "creating": rf"()(){_ID}(?:\.(?:clock|error|pending))?",
        "pending": _WAITING,
        "scheduled": f"{_NS}~{_ATTEMPTS}~(){_ID}",
        "inflight": f"{_NS}~{_ATTEMPTS}~{_BOOT}~{_ID}",
        # A newer payload behind a task in flight; its tag is a key's.
        "keys": f"(?:{_NS}~{_ATTEMPTS}~)?()({_NS}-[89a-f][0-9a-f]{{7}})",
        "checkpoints": f"()(){_ID}",
        "done": _WAITING,
        "failed": _WAITING,
        "reason": rf"()(){_ID}\.error",
    }.items()
}
_parse_waiting_path = re.compile(f"(?:pending|scheduled)/{_WAITING}").fullmatch
_parse_tag = re.compile("[89a-f][0-9a-f]{7}").fullmatch  # of a key; a process has 0 to 7 in front
_parse_lock = re.compile("[0-9a-f]{2}").fullmatch
_parse_clock = re.compile("clock-[0-9a-f]{8}").fullmatch
_parse_id = re.compile(_ID).fullmatch
_parse_ticket = re.compile(r"\.?([0-9]{20})~([0-9a-f]{8})~([0-9a-f]{16})").fullmatch
_parse_last_number = re.compile(r"last~[0-9]{20}").fullmatch
_parse_node_dir = re.compile(r"inflight-([A-Za-z0-9._-]{1,100})").fullmatch
_parse_key_state = re.compile(
    r"([!-~]+) ((?:pending|scheduled|inflight-[A-Za-z0-9._-]{1,100})/"
    rf"(?:[0-9a-f~]+~)?{_ID}) ((?:[0-9~]+~)?{_NS}-[0-9a-f]{{8}}|-)"
).fullmatch

# The directories that a queue makes at once, and for each of data_dir the forms of its names.
_STATE_DIRS = ("creating", "pending", "scheduled", "done", "failed")
_NAMES_IN: dict[str, tuple[Callable[[str], object], ...]] = {
    **{name: (_FORMS[name],) for name in (*_STATE_DIRS, "checkpoints")},
    "failed": (_FORMS["failed"], _FORMS["reason"]),
    "keys": (_FORMS["keys"], _parse_tag),
    "locks": (_parse_lock,),
    "spare": (),
}


class _Entry(NamedTuple):
    """A task's file: the directory and the name that it has there, and what the name says.

    attempts: None if the name does not carry it. boot: "" likewise.
    """

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
        """The number in front: order, due time or deadline."""
        return int(self.name[:20])


def _parse(directory: str, name: str, form: str = "") -> _Entry | None:
    """Return the entry of a name in a directory of data_dir; None if the name is not ours.

    form: of _FORMS, if it is not that of the directory.
    """
    match = _FORMS[form or _state_of(directory)](name)
    if match is None:
        return None
    attempts, boot, ident = match.groups()
    return _Entry(directory, name, ident, int(attempts) if attempts else None, boot or "")


def _entry_of(path: str) -> _Entry:
    """Return the entry of a path whose name is known to be ours."""
    directory, _, name = path.partition("/")
    entry = _parse(directory, name)
    if entry is None:
        raise ValueError(f"not the path of a task: {path!r}")
    return entry


def _state_of(path: str) -> str:
    """Return the state that a directory, or a path in it, stands for; "keys" and the like too."""
    directory = path.partition("/")[0]
    return "inflight" if directory.startswith("inflight-") else directory


def _node_of(path: str) -> str:
    """Return the node_id in the path of a lease or of its directory."""
    return path.partition("/")[0][len("inflight-") :]


def _id_of(path: str) -> str:
    """Return the id of a task, with which each of its names ends."""
    return path[-_ID_LENGTH:]


def _tag_of(ident: str) -> str:
    return ident[-8:]


def _order_of(ident: str) -> int:
    return int(ident[:20])


def _stamp_of(path: str) -> int:
    """Return the number in front of a task's name: order, due time or deadline, in ns."""
    return int(path.rpartition("/")[2][:20])


def _attempts_of(path: str) -> int:
    """Return the attempts that a task's name carries, 0 if it carries none."""
    parts = path.split("~")
    return int(parts[1]) if len(parts) > 1 else 0


def _is_first_lease(path: str) -> bool:
    """Whether a path is that of a lease, and its task had not been delivered before."""
    return path.startswith("inflight-") and "~1~" in path


def _match_waiting(path: str) -> tuple[str, int | None] | None:
    """Return id and attempts of a path in pending/ or scheduled/; None if its name is not ours."""
    match = _parse_waiting_path(path)
    if match is None:
        return None
    return match[3], int(match[1]) if match[1] else None


def _due_of(buffered: str) -> int | None:
    """Return the time for which a payload in keys/ is scheduled, None if it is for at once."""
    return _stamp_of(buffered) if "~" in buffered else None


def _is_end(path: str) -> bool:
    """Whether a task that moves there, or nowhere (""), has come to its end."""
    return path.startswith(("done/", "failed/")) or not path


def _is_bare(path: str) -> bool:
    """Whether a task's name is its id."""
    return len(path.rpartition("/")[2]) == _ID_LENGTH


def _is_keyed(ident: str) -> bool:
    """Whether an id's tag is the hash of a key: the name tells, so that other tasks pay nothing."""
    return ident[21] > "7"


def _may_be_renamed(name: str) -> bool:
    """Whether a new payload would rename the task of that name in pending/ (attempts back to 0)."""
    match = _FORMS["pending"](name)
    return match is not None and match[1] is not None and _is_keyed(match[3])


def _new_name(order_ns: int, tag: str) -> str:
    """Return an id."""
    return f"{order_ns:020d}-{tag}"


def _task_name(stamp_ns: int, attempts: int, ident: str) -> str:
    return f"{stamp_ns:020d}~{attempts}~{ident}"


def _front_path(ident: str, attempts: int) -> str:
    """Return the path in pending/ of a task at the place of its push: the front."""
    return f"pending/{_task_name(_order_of(ident), attempts, ident)}"


def _lease_name(deadline_ns: int, attempts: int, boot: str, ident: str) -> str:
    return f"{deadline_ns:020d}~{attempts}~{boot}~{ident}"


def _with_stamp(path: str, stamp_ns: int) -> str:
    """Return the path of a lease with another deadline."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/{stamp_ns:020d}{name[20:]}"


def _reset_path(path: str, due_ns: int | None) -> str:
    """Return the path of a waiting task with its attempts at 0: at its place in the queue, or in
    scheduled/ if due_ns is given."""
    if due_ns is not None:
        return f"scheduled/{_task_name(due_ns, 0, _id_of(path))}"
    if _is_bare(path):
        return path
    return f"{_state_of(path)}/{_task_name(_stamp_of(path), 0, _id_of(path))}"


def _ticket_name(number: int, boot: str, member: str) -> str:
    return f"{number:020d}~{boot}~{member}"


def _last_number_name(number: int) -> str:
    return f"last~{number:020d}"


def _boot_of_ticket(name: str) -> str:
    return name.split("~")[1]


def _key_tag(name: str) -> str:
    """Return the hash of an encoded key, as 8 hex digits: the tag of its tasks' ids."""
    return f"{binascii.crc32(name.encode()) | 1 << 31:08x}"


def _lock_name(tag: str) -> str:
    """Return the name in locks/ of the lock for the keys of a hash."""
    return tag[-2:]


def _encode_key(key: object) -> str:
    """Return a key as it stands in a header and in keys/: percent-encoded, as in a URL."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {key!r}")
    raw = key.encode()
    if not 1 <= len(raw) <= _MAX_KEY_BYTES:
        wanted = f"1 to {_MAX_KEY_BYTES} bytes in UTF-8"
        raise ValueError(f"key must be {wanted}, not {len(raw)}: {key!r}")
    if _KEY_CHARACTERS.issuperset(key):
        return raw.decode()  # not the key itself: that may be an Enum, whose text is another
    return "".join(chr(byte) if chr(byte) in _KEY_CHARACTERS else f"%{byte:02X}" for byte in raw)


def _decode_key(name: str) -> str:
    raw = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    return raw.decode("utf-8", "replace")


# ==================================================================================================
# 3. Errors and values: what the interface raises and returns, and the checks of its arguments.
#    Invariant: a value is a snapshot. Only `_lease` and `checkpoint` of a task change, by calls on
#    the queue that leased it.
# ==================================================================================================

_MAX_NUMBER = 10**302  # of any argument
_IF_IN_FLIGHT = ("buffer", "update", "reject")
# How a delivery ended, as a field of WorkCounts, by the state that its task went to.
_OUTCOMES = {"done": "done", "": "done", "failed": "failed"} | dict.fromkeys(
    ("pending", "scheduled"), "released"
)


class FemtoQueueError(Exception):
    """The base of this module's own errors. Disk trouble is not one: it stays an OSError."""


class LeaseLost(FemtoQueueError):
    """The task is no longer leased by this delivery; nothing was changed.

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


class _CommandFailed(Exception):
    """A command that `work` ran did not end well. Its text is the whole reason."""


class _Lease:
    """One delivery. `path` (inflight-<node>/<exact name>) is its fencing token; a renewal writes
    the new one here. `length_ns`: how long a renewal makes it last. `closes`: how often its queue
    had been closed when it began. `is_renewed`: whether a thread renews it. `outcome`: how it
    ended, a field of WorkCounts; "" while it runs."""

    __slots__ = ("closes", "is_renewed", "length_ns", "outcome", "path")

    def __init__(self, path: str, length_ns: int, closes: int) -> None:
        self.path, self.length_ns, self.closes = path, length_ns, closes
        self.is_renewed, self.outcome = False, ""


class FemtoTask:
    """One task, as it was when it was read. Its attributes can't be assigned; two tasks are equal
    if id, data, attempts and key are.

    id: for life, through retries and delays.
    data: the payload as pushed.
    attempts: deliveries so far, this one counted. None: not known (done/ and failed/ do not keep
    it).
    key: of a keyed task, else None.
    checkpoint: what checkpoint() saved last, in this delivery or one before; None: nothing, or
    the task was not leased but looked at.
    error: the reason of a failed task; None: it has none, or is in another state.
    size_bytes: length of the payload. None: the file has no valid header (tasks(data=False)
    only), or was not read (attach()).
    """

    id: str
    data: bytes
    attempts: int | None
    key: str | None
    checkpoint: bytes | None
    error: str | None
    size_bytes: int | None
    # Of a task that was looked at, or the lease of one that was popped; and the queue clock's.
    _path: str
    _lease: _Lease | None
    _anchor_ns: int

    def __init__(
        self,
        id: str,
        data: bytes,
        attempts: int | None = 0,
        key: str | None = None,
        checkpoint: bytes | None = None,
        *,
        error: str | None = None,
        size_bytes: int | None = -1,
        _path: str = "",
        _lease: _Lease | None = None,
        _anchor_ns: int = 0,
    ) -> None:
        fields = self.__dict__  # past __setattr__
        fields["id"], fields["data"], fields["attempts"] = id, data, attempts
        fields["key"], fields["checkpoint"], fields["error"] = key, checkpoint, error
        fields["size_bytes"] = len(data) if size_bytes == -1 else size_bytes
        fields["_path"], fields["_lease"], fields["_anchor_ns"] = _path, _lease, _anchor_ns

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a FemtoTask can't be changed: {name}")

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
        """Where its file was, relative to data_dir; while it is leased, also its fencing token."""
        return self._path if self._lease is None else self._lease.path

    @property
    def state(self) -> str:
        """Where it was: one of STATES, or "buffered" (a newer payload of a key in flight)."""
        state = _state_of(self.path)
        return "buffered" if state == "keys" else state

    @property
    def node(self) -> str | None:
        """The node_id of the worker that has it in flight, else None."""
        return _node_of(self.path) if self.state == "inflight" else None

    @property
    def created(self) -> datetime:
        """When it was pushed: UTC, read from the id, by the queue clock (see FemtoQueue)."""
        return _utc(_order_of(self.id))

    @property
    def until(self) -> datetime | None:
        """When its lease ends, or when it is due: UTC, by the wall clock of now; else None."""
        if self.state == "inflight":
            left_ns = _stamp_of(self.path) - self._anchor_ns - _monotonic_ns()
            return _utc(_wall_ns() + left_ns)
        return _utc(_stamp_of(self.path)) if self.state == "scheduled" else None


def _lease_of(task: object) -> _Lease:
    """Return the lease of a task that pop() returned. Raises TypeError or LeaseLost for others."""
    if not isinstance(task, FemtoTask):
        kind = type(task).__name__
        raise TypeError(f"task must be a FemtoTask that pop() returned, not of type {kind}")
    if task._lease is None:
        raise LeaseLost(task.id, False, "it carries no lease; only pop() gives one")
    return task._lease


def _set_checkpoint(task: FemtoTask, data: bytes) -> None:
    """Note in a task what was saved for it."""
    task.__dict__["checkpoint"] = data


_NO_TASK = FemtoTask("", b"")


class NodeStats(NamedTuple):
    """One worker's leases: how many, how many of them past their deadline, and its liveness.

    liveness: "alive" (its lock is held), "dead" (it is not, on this host), or "unknown" (another
    host's or an earlier boot's, or no flock here: only deadlines count).
    """

    node: str
    inflight: int
    expired: int
    liveness: str


class Stats(NamedTuple):
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


class WorkCounts(NamedTuple):
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


class Finding(NamedTuple):
    """One thing that check() found: its kind, the path relative to data_dir, what is odd about
    it, and whether it was mended."""

    kind: str
    path: str
    text: str
    repaired: bool = False


def _finite(name: str, value: float) -> float:
    """Return a number that was given as an argument. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not abs(value) < _MAX_NUMBER:  # NaN neither
        given = value if isinstance(value, float) else "an int of so many digits"
        raise ValueError(f"{name} must be finite, and less than {_MAX_NUMBER:g}, not {given}")
    return value


def _not_negative(name: str, value: float) -> float:
    if _finite(name, value) < 0:
        raise ValueError(f"{name} must be 0 or more, not {value!r}")
    return value


def _positive(name: str, value: float) -> float:
    if _finite(name, value) <= 0:
        raise ValueError(f"{name} must be greater than 0, not {value!r}")
    return value


def _lease_length_ns(ms: float | None) -> int:
    """Return the length of a lease in nanoseconds; None: as long as the holder lives."""
    return _FOREVER_NS if ms is None or ms > _FOREVER_NS / 1e6 else int(ms * 1e6)


def _end_s(timeout: float | None) -> float:
    """Return when a wait ends, on the monotonic clock."""
    if timeout is None:
        return float("inf")
    return time.monotonic() + _not_negative("timeout", timeout)


def _check_places(data_dir: object, node_id: object) -> None:
    """Raise TypeError or ValueError for an invalid data_dir or node_id."""
    if not isinstance(os.fspath(data_dir), str):  # type: ignore[call-overload]
        raise TypeError(f"data_dir must be a str or a path, not {data_dir!r}")
    if not os.fspath(data_dir):  # type: ignore[call-overload]
        raise ValueError("data_dir must not be empty; for this directory say '.'")
    if node_id is not None and not (
        isinstance(node_id, str)
        and node_id not in (".", "..")
        and _parse_node_dir(f"inflight-{node_id}")
    ):
        raise ValueError(f"node_id must be 1 to 100 of A-Z a-z 0-9 . _ -, not {node_id!r}")


def _check_max_attempts(max_attempts: object) -> None:
    """Raise ValueError unless it is None or a whole number that a name has room for."""
    if max_attempts is not None and (
        type(max_attempts) is not int or not 1 <= max_attempts <= _MAX_ATTEMPTS
    ):
        raise ValueError(
            f"max_attempts must be None or an int, 1 to {_MAX_ATTEMPTS}, not {max_attempts!r}"
        )


def _check_state(state: str) -> None:
    if state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, not {state!r}")


def _check_id(id: str) -> None:
    if not isinstance(id, str):
        raise TypeError(f"id must be a str, not {id!r}")
    if not _parse_id(id):
        raise ValueError(f"not the id of a task: {id!r}")


def _add_to_message(error: Exception, text: str) -> None:
    """Add to what an exception says, and leave it the exception that it is."""
    if isinstance(error, OSError) and error.strerror is not None:
        error.strerror = f"{error.strerror}{text}"
    else:
        error.args = (f"{error}{text}",)


# ==================================================================================================
# 4. Records: one header line, `FQ1 <crc32> <length> [<key>]`, then the payload.
#    Invariant: a payload that does not match its header is never returned.
# ==================================================================================================

_READ_BYTES = 4096  # a record of this size or less is read with one call
_HEAD_BYTES = 1024  # holds any header

_match_header = re.compile(rb"FQ1 ([0-9a-f]{8}) ([0-9]{1,19})(?: ([!-~]+))?\n").match


def _as_bytes(data: object) -> memoryview:
    """Return a view of a payload. Raises TypeError if it is not bytes-like."""
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
    return b"FQ1 %08x %d %b\n" % (
        binascii.crc32(payload, binascii.crc32(name)),
        len(payload),
        name,
    )


def _write_all(fd: int, header: bytes, payload: bytes | memoryview) -> None:
    """Write a record without joining its parts; go on after a short write."""
    count = os.writev(fd, (header, payload)) if hasattr(os, "writev") else 0
    size = len(header) + len(payload)
    while count < size:
        part = header if count < len(header) else memoryview(payload)
        offset = count if part is header else count - len(header)
        count += os.write(fd, part[offset:])


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
            os.close(fd)  # must raise what it raises; see _look_afresh()
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
    is_whole = len(head) == status.st_size  # one read() may give less
    payload = head[start:] if is_whole else _read_rest(fd, start, length)
    name = header[3] or b""
    if b"%08x" % binascii.crc32(payload, binascii.crc32(name)) != header[1]:
        raise CorruptTask(ident, f"wrong checksum over {length} bytes")
    if not name:
        return payload, None
    key = _decode_key(name.decode())
    with contextlib.suppress(ValueError):
        if _encode_key(key) == name.decode() and _key_tag(name.decode()) == _tag_of(ident):
            return payload, key
    raise CorruptTask(ident, "its key is invalid, or not quoted as push() does, or not of its id")


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
            header = _match_header(os.read(fd, _HEAD_BYTES))
        finally:
            os.close(fd)
    except OSError:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None, None
        raise
    if header is None:
        return None, None
    return (_decode_key(header[3].decode()) if header[3] else None), int(header[2])


# ==================================================================================================
# 5. File locks: flock(2) on files and directories, held by this process alone.
#    Invariant: a lock ends with its close(), its last reference or its process, whichever is
#    first; a forked child never keeps one.
# ==================================================================================================

_NO_FLOCK = "keyed tasks and tickets need flock(2), which is not available here"
# EBADF: NFS, for an exclusive lock on what is open for reading; EINVAL: others, for directories.
_NO_FLOCK_ERRNOS = (
    *(errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP),
    *(errno.EBADF, errno.EINVAL),
)
_SHARED_LOCK_POLL_S = 0.01
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | _NO_FOLLOW_OR_BLOCK

_open_lock_fds: set[int] = set()  # those of all threads; closed in a forked child


def _flock(fd: int, how: int) -> bool | None:
    """Take a lock: fcntl.LOCK_SH or LOCK_EX, which wait for it unless LOCK_NB is added.

    Returns False if another process has it, None if there are no locks here.
    """
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
    latest: an exception from a signal handler (Ctrl-C) may come between any two lines."""

    fd = -1  # until it is open

    def __init__(self, path: str, flags: int = _LOCK_FLAGS) -> None:
        if fcntl is None:
            raise OSError(errno.ENOTSUP, _NO_FLOCK, path)
        self.path, self._pid = path, os.getpid()
        self.fd = os.open(path, flags, 0o666)
        _open_lock_fds.add(self.fd)

    def acquire_shared(self) -> bool | None:
        """Wait while another process has the exclusive lock; None: there are no locks here."""
        return _flock(self.fd, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool | None:
        """Take the exclusive lock if it is free; None: there are no locks here."""
        return _flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire_exclusive(self, wait: bool = True) -> None:
        """Take the exclusive lock.

        Raises BlockingIOError if it is not free and wait is False, OSError where there is no flock.
        """
        locked = self.try_exclusive()
        if locked is False and wait:
            locked = self._wait_exclusive()
        if locked is False:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has its lock", self.path)
        if locked is None:
            raise OSError(errno.ENOTSUP, _NO_FLOCK, self.path)

    def _wait_exclusive(self) -> bool | None:
        """Wait for the exclusive lock; None: there are no locks here.

        Where another host may have it, poll, always at one pace. In a waiting flock() an NFS client
        asks the server only after 1, 2, 4 … seconds, and GlusterFS, if the network was cut
        meanwhile, keeps its bricks busy for ever.
        """
        if not _is_shared(_fs_type(os.path.dirname(self.path))):
            return _flock(self.fd, fcntl.LOCK_EX)
        while (locked := self.try_exclusive()) is False:
            time.sleep(_SHARED_LOCK_POLL_S)
        return locked

    def is_at_path(self) -> bool:
        """Whether the path still leads to what was opened."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.fd))
        except OSError as error:
            if error.errno not in _MISSING_ERRNOS:
                raise
            return False

    def close(self) -> None:
        """Unlock and close: a child that was forked meanwhile has the descriptor, and the lock."""
        fd = self.fd
        if fd < 0:
            return
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_UN)
        _open_lock_fds.discard(fd)  # first: the number may be another's as soon as it is closed
        self.fd = -1  # not sooner: what Ctrl-C leaves open is closed with the last reference
        os.close(fd)

    def __del__(self) -> None:
        # os is None when the interpreter ends. In a forked child the descriptor is closed already
        # (_after_fork_in_child), and its number may be another's.
        if self.fd >= 0 and os is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):  # closed by code that did not open it
                self.close()


def _open_if_there(path: str, flags: int = _LOCK_FLAGS) -> _FileLock | None:
    """Open a file or directory to lock it; None if it, or the directory that it is in, is gone."""
    try:
        return _FileLock(path, flags)
    except OSError as error:
        if error.errno not in _MISSING_ERRNOS:
            raise
        return None


def _open_locked(path: str) -> _FileLock:
    """Open a file, made if it is missing, and wait for the exclusive lock on it."""
    while True:
        lock = _FileLock(path)
        try:
            lock.acquire_exclusive()
            if lock.is_at_path():
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()  # RACE: the one that had it removed the file, so this is not the lock


def _open_lease_lock(path: str) -> _FileLock | None:
    """Open a lease directory to lock it; None where there are no locks, or it is gone."""
    if fcntl is None:
        return None
    try:
        return _open_if_there(path, _DIR_FLAGS)
    except NotADirectoryError:
        return None


def _liveness(path: str, has_leases_of_this_boot: bool) -> str:
    """Say whether the worker of a lease directory lives; see NodeStats."""
    lock = _open_lease_lock(path)
    if lock is None:
        return "unknown"
    try:
        is_free = lock.try_exclusive()
    finally:
        lock.close()
    if is_free is False:
        return "alive"
    return "dead" if is_free and has_leases_of_this_boot else "unknown"


# What is to be called in a forked child, with the object that it belongs to.
_fork_hooks: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def _after_fork_in_child() -> None:
    """In a forked child: the parent's locks must end with the parent, so close them here."""
    while _open_lock_fds:
        os.close(_open_lock_fds.pop())
    for owner, hook in list(_fork_hooks.items()):
        hook(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ==================================================================================================
# 6. Files: the steps on files of data_dir, and the one place where durability is decided.
#    Invariant: a file appears whole under its name, or not at all; after power loss the checksum
#    shows a torn one. commit() decides durability: if the queue is durable, it syncs the file, then
#    its directory. publish() and _BatchSync do so for new tasks, _KeyStates.save() for key states.
# ==================================================================================================

_MAX_REPLACED = 1000  # times that a target directory may be replaced during one move
_RENAMES_OPEN_FILES = os.name == "posix"
_SHRINK_BYTES = 1 << 20  # a pending/ that is larger than this when empty is replaced

_Check = Callable[[], bool] | None


def _always() -> bool:
    return True


def _move(source: str, target: str, is_ours: _Check = None) -> None:
    """Rename a file over the target, on Windows too (os.replace). A finished task that a person
    ran again replaces its older file.

    RACE: a target directory that another process replaces just then (shrink_pending) gives ENOENT
    as if the source were gone; both are there, so the rename is done again. is_ours: whether what
    is at the target then is what we moved (None: that can't be known); see _was_moved().
    """
    tries = 0
    while True:
        try:
            os.replace(source, target)
            return
        except FileNotFoundError:
            if is_ours is not None and _was_moved(source, target) and is_ours():
                return
            tries += 1
            both = os.path.lexists(source) and os.path.isdir(os.path.dirname(target))
            if not both or tries > _MAX_REPLACED:
                raise


def _move_over(source: str, target: str, must_exist: bool = False) -> None:
    """Rename a file that only we move over one that may be there; must_exist: that is there, or
    FileNotFoundError is raised."""
    number = os.stat(source).st_ino
    if must_exist:  # last: a person may just have moved it, and the rename would make two
        _look_afresh(os.lstat, target)
    _move(source, target, lambda: os.stat(target).st_ino == number)


def _was_moved(source: str, target: str) -> bool:
    """Whether a rename that raised FileNotFoundError was carried out all the same.

    A target that GlusterFS shows proves nothing: one of its replicas may have carried out a rename
    that failed, because another host was first.
    """
    may_be = _may_lose_replies(_fs_type(os.path.dirname(target)))
    return may_be and _exists_afresh(target) and not _exists_afresh(source)


def _write_new(
    path: str, head: bytes, payload: bytes | memoryview = b"", sync: bool = False
) -> None:
    """Create a file and write it; remove it if that fails. Raises FileExistsError."""
    fd = os.open(path, _CREATE_FLAGS, 0o666)
    try:
        try:
            _write_all(fd, head, payload)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _unlink_if_exists(path, or_fail=False)
        raise


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
        """Sync. `failed` stays True if that raises."""
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


class _Files:
    """The files of one data_dir. Paths are relative to it, as in "pending/<id>"; `root` ends with
    a separator. `is_durable`: what is acknowledged must survive power loss."""

    def __init__(self, data_dir: str, is_durable: bool) -> None:
        self.root = os.path.join(os.path.abspath(data_dir), "")
        self.is_durable = is_durable

    def make_dirs(self) -> None:
        """Make data_dir and its directories where they are missing, and the spare one."""
        data_dir = os.path.dirname(self.root)
        _make_dir(data_dir, 0o700, self.is_durable)
        for name in _STATE_DIRS:
            _make_dir(self.root + name, 0o777, sync=False)
        if self.is_durable:
            _sync_dir(data_dir)
            # Another may just have made it, without sync. One that we may not read was there.
            with contextlib.suppress(PermissionError):
                _sync_dir(os.path.dirname(data_dir))
        try:
            os.mkdir(f"{self.root}spare")
        except OSError as error:
            if error.errno not in (errno.EEXIST, *_NO_WRITE_ERRNOS):
                raise

    @functools.cached_property
    def is_shared(self) -> bool:
        """Whether what this host reads of a file or a name may be old: another host changed it."""
        return _is_shared(self.fs_type)

    @functools.cached_property
    def fs_type(self) -> int:
        return _fs_type(self.root)

    # Looking

    def is_done(self, path: str) -> bool:
        """Whether a task's file is in done/, too.

        Healing after a network cut, GlusterFS brings back a name that had been renamed, as a second
        link to the file. A copy, by which a person runs a task again, is another file. failed/ is
        not looked at: there the second link may be the outdated name, of a task retried since.
        """
        if self.fs_type != _FUSE_TYPE:
            return False
        try:
            ours = os.lstat(self.root + path)
            return ours.st_nlink > 1 and os.path.samestat(
                ours, os.lstat(f"{self.root}done/{_id_of(path)}")
            )
        except OSError as error:
            if error.errno not in _MISSING_ERRNOS:
                raise
            return False  # not done; if its file is gone, whoever reads it will see

    def drop_done(self, path: str) -> bool:
        """Remove the second name of a task that is in done/, too; False if it is not."""
        if not self.is_done(path):
            return False
        _log().warning("task %s is done; %s, which came back, is removed", _id_of(path), path)
        self.remove(path)
        return True

    def exists(self, path: str) -> bool:
        return _exists(self.root + path)

    @property
    def is_paused(self) -> bool:
        """Whether data_dir/PAUSED is there."""
        return _exists_afresh(f"{self.root}PAUSED")

    def entries(self, directory: str, form: str = "") -> list[_Entry]:
        """Return our names in a directory, sorted; others' are left out. form: as in _parse()."""
        try:
            names = self._names(directory)
        except NotADirectoryError:
            if directory in _STATE_DIRS:
                raise
            return []  # a foreign file of such a name
        return [entry for name in sorted(names) if (entry := _parse(directory, name, form))]

    def _names(self, directory: str) -> list[str]:
        """Return all names in a directory; none if it was removed with its worker just now, or is
        not there yet. Raises FileNotFoundError for one that must be there."""
        for is_last in (False, True):
            try:
                return os.listdir(self.root + directory)
            except OSError as error:
                if error.errno not in _MISSING_ERRNOS or (is_last and directory in _STATE_DIRS):
                    raise
            _refresh(self.root)
        return []

    def node_dirs(self) -> list[str]:
        """Return the lease directories of all workers, sorted."""
        names = sorted(filter(_parse_node_dir, os.listdir(self.root)))
        return [name for name in names if not os.path.islink(self.root + name)]

    def find(self, *states: str) -> Iterator[_Entry]:
        """Yield the tasks in these states ("keys" and "checkpoints" too), each in name order."""
        for state in states:
            for directory in self.node_dirs() if state == "inflight" else [state]:
                yield from self.entries(directory)

    def find_id(self, ident: str, *states: str) -> _Entry | None:
        """Return the entry of an id in these states, None if it is in none of them.

        RACE: a task that moves meanwhile from a later state to an earlier one is missed.
        """
        return next((entry for entry in self.find(*states) if entry.id == ident), None)

    def has_entries(self, directory: str) -> bool:
        """Whether a task is in a directory; it is read only up to the first one."""
        try:
            with os.scandir(self.root + directory) as entries:
                return any(_parse(directory, entry.name) for entry in entries)
        except OSError as error:
            if error.errno not in (*_MISSING_ERRNOS, errno.ENOTDIR):
                raise
            return False  # no keys yet; RACE: removed with its worker just now

    def has_work(self) -> bool:
        """Whether a task waits or is leased. Looked at four times: tasks move both ways meanwhile,
        and one that moves against the look each time is not plausible."""
        _refresh(self.root)  # keys/ may be new
        return any(
            self.has_entries(directory)
            for _ in range(4)
            for directory in ("keys", "scheduled", "pending", *self.node_dirs())
        )

    def reason_of(self, ident: str) -> str | None:
        """Return what failed/<id>.error says, None if there is none."""
        try:
            return _look_afresh(_read_text, f"{self.root}failed/{ident}.error").removesuffix("\n")
        except FileNotFoundError:
            return None

    # Moving

    def publish(
        self,
        aside: str,
        data: bytes | bytearray | memoryview,
        path: str,
        *,
        key: str = "",
        sync: bool | None = None,
        sync_dir: bool | None = None,
    ) -> None:
        """Write a record to creating/<aside> and rename it to `path`: the task exists from then on.

        To be durable it is synced after the rename (one journal commit instead of two), the file
        first: the checksum tells what a power cut tore before we returned.
        """
        payload = data if type(data) is bytes else _as_bytes(data)
        header = _header(payload, key)
        source, target = f"{self.root}creating/{aside}", self.root + path
        if sync is None:
            sync = sync_dir = self.is_durable
        fd = os.open(source, _CREATE_FLAGS, 0o666)
        try:
            try:
                _write_all(fd, header, payload)
                if sync and _RENAMES_OPEN_FILES:
                    _move(source, target, _always)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            if not (sync and _RENAMES_OPEN_FILES):
                _move(source, target, _always)
            if sync_dir:
                _sync_dir(os.path.dirname(target))
        except BaseException:
            # Not acknowledged, so not there; a consumer that was quicker keeps what it has.
            for leftover in (source, target):
                _unlink_if_exists(leftover, or_fail=False)
            raise

    @contextlib.contextmanager
    def replacement(self, name: str, header: bytes, payload: bytes | memoryview) -> Iterator[str]:
        """Write a file creating/<name> that the block puts in the place of another; if the block
        fails, it goes. It is synced first: power loss must leave one of the two whole."""
        path = f"creating/{name}"
        _write_new(self.root + path, header, payload, self.is_durable)
        try:
            yield path
        except BaseException:
            self.remove(path)
            raise

    def swap(self, aside: str, path: str) -> bool | None:
        """Exchange a file with the one at `path`, in one step. False: there is none at `path`.
        None: names can't be exchanged here (NFS, FUSE; not Linux), and nothing was done."""
        try:
            _exchange(self.root + aside, self.root + path)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NO_EXCHANGE_ERRNOS:
                raise
        return None

    def swap_or_replace(self, aside: str, path: str) -> bool:
        """Put a file in the place of the one at `path`; False: there is none at `path`.

        Where names can't be exchanged it is renamed over the other one, and a person who moves
        that one in the same instant makes two tasks of one.
        """
        swapped = self.swap(aside, path)
        if swapped is not None:
            return swapped
        try:
            _move_over(self.root + aside, self.root + path, must_exist=True)
        except FileNotFoundError:
            return False
        return True

    def move(self, source: str, target: str, is_ours: _Check = None) -> str:
        """Rename a task's file, over one that is there; target "": remove it. Return target.
        is_ours: as in _move()."""
        if not target:
            try:
                os.unlink(self.root + source)
            except FileNotFoundError:
                if is_ours is None or not _may_lose_replies(self.fs_type) or not is_ours():
                    raise
            return target
        _move(self.root + source, self.root + target, is_ours)
        # POSIX: rename() does nothing, and succeeds, if both names are links to one file. Such a
        # finished task, whose lease came back when GlusterFS healed a host that had been cut off,
        # would be delivered for ever. A first delivery, as most are, does not pay for that.
        if not _is_first_lease(source) and _is_end(target):
            _unlink_if_exists(self.root + source)
        return target

    def remove(self, path: str) -> None:
        """Remove a file if it is there; ignore any OSError."""
        _unlink_if_exists(self.root + path, or_fail=False)

    def commit(self, path: str) -> None:
        """If the queue is durable, sync a task's file, then its directory.

        Syncing the directory alone is not enough. After power loss btrfs showed the task in its
        old directory too, and a finished task was delivered again.
        """
        if not self.is_durable:
            return
        with contextlib.suppress(FileNotFoundError):  # RACE: another process moved it on
            if stat.S_ISREG(os.lstat(self.root + path).st_mode):
                _sync_path(self.root + path, _READ_FLAGS)
        self.commit_dir(os.path.dirname(path))

    def commit_dir(self, directory: str) -> None:
        """If the queue is durable, sync a directory: its names survive power loss."""
        if self.is_durable:
            _sync_dir(self.root + directory)

    def shrink_pending(self, new_id: Callable[[], str]) -> None:
        """Replace an empty pending/ that was large once by a new directory: ext4 never shrinks one.

        rename() succeeds only on an empty directory, so nothing can be lost; a push that comes
        between finds out in _move(). Not for other hosts, which may look into the old one for long.
        """
        pending = f"{self.root}pending"
        old = os.lstat(pending)
        if old.st_size <= _SHRINK_BYTES or not stat.S_ISDIR(old.st_mode):
            return
        if hasattr(os, "listxattr") and any("acl" in name for name in os.listxattr(pending)):
            return  # rights that we don't know how to copy
        fresh = f"{self.root}creating/{new_id()}.pending"
        # RACE: a push was quicker. Or it can't be replaced (a mount point, a full disk): fine too.
        with contextlib.suppress(OSError):
            os.mkdir(fresh)
            os.chmod(fresh, stat.S_IMODE(old.st_mode))
            new = os.stat(fresh)
            if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
                os.rename(fresh, pending)
                _sync_dir(self.root)  # else files synced into it later could be lost with it
        with contextlib.suppress(OSError):
            os.rmdir(fresh)


# ==================================================================================================
# 7. Queue clock: orders and deadlines, by the monotonic clock and an anchor that all processes of
#    one boot share. Invariant: orders of one object strictly increase; setting the date does not
#    change them.
# ==================================================================================================


def _read_anchor(path: str) -> int | None:
    """Return the anchor; None if there is none, or the file is invalid (it is made again then)."""
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


def _create_once(aside: str, path: str) -> None:
    """Put a clock file in place, unless another process has already put a valid one there."""
    try:
        os.link(aside, path)
    except FileExistsError:
        if _read_anchor(path) is None:  # invalid; read again now, another may just have been first
            os.replace(aside, path)
    except (AttributeError, OSError):
        # No hard links here. Two that come at once may disagree by the microseconds between them.
        if _read_anchor(path) is None:
            os.replace(aside, path)


def _compute_anchor(files: _Files) -> int:
    """Return the anchor that starts the clock at the wall clock, or after the newest task if later.

    The newest by id: what stands first in a name of pending/ may be a due time of next year,
    moved there by hand, and must not carry the clock along.
    """
    newest_ns = 0
    for state in ("pending", "scheduled", "done", "failed", "keys"):
        newest_ns = max(newest_ns, _newest_order(files, state))
    for directory in files.node_dirs():
        newest_ns = max(newest_ns, _newest_order(files, directory))
    return max(_wall_ns(), newest_ns + 1) - _monotonic_ns()


def _newest_order(files: _Files, directory: str) -> int:
    """Return the newest order in a directory that a clock may start from, 0 if there is none."""
    try:
        orders = [_order_of(entry.id) for entry in files.entries(directory)]
    except PermissionError:  # another user's: no reason not to start
        return 0
    return max((order for order in orders if order < _FARTHEST_NS), default=0)


class _QueueClock:
    """The clock of one queue object. `tag` is the object's own, in the ids that it gives."""

    def __init__(self, files: _Files) -> None:
        self._files = files
        self.init_worker()
        self.boot, self.anchor_ns = self._open()

    def init_worker(self) -> None:
        """Create the tag, the lock and the order of one process. Called again in a forked child."""
        self.tag = f"{int.from_bytes(os.urandom(4), 'big') >> 1:08x}"
        self._lock = threading.RLock()  # of _order; a signal handler may push, too
        self._order = 0

    def now_ns(self) -> int:
        return int(time.monotonic() * 1e9) + self.anchor_ns

    def next_order(self) -> int:
        with self._lock:
            now_ns = self.now_ns()
            self._order = now_ns if now_ns > self._order else self._order + 1
            return self._order

    def new_id(self) -> str:
        """Return an id, for a task or for a file in creating/."""
        return _new_name(self.next_order(), self.tag)

    def leave_boot(self) -> None:
        """Date leases by a boot that no observer shares: there are no locks, so no observer can
        tell whether this worker lives."""
        self.boot = os.urandom(4).hex()

    def _open(self) -> tuple[str, int]:
        """Return this boot's tag and its clock's anchor; set the anchor if we are the first."""
        boot_id = _read_boot_id()
        if boot_id is None:
            return os.urandom(4).hex(), _compute_anchor(self._files)
        boot = _boot_tag(boot_id, self._files.root)
        path = f"{self._files.root}clock-{boot}"
        anchor_ns = _read_anchor(path)
        if anchor_ns is not None:
            return boot, anchor_ns
        anchor_ns = _compute_anchor(self._files)
        try:
            self._create(path, anchor_ns)
        except OSError as error:
            if error.errno not in _NO_WRITE_ERRNOS:
                raise
            # To look, to drain and to purge, a clock of our own is good enough.
            _log().warning("no shared clock for this process: %s", error)
            return os.urandom(4).hex(), anchor_ns
        in_place_ns = _read_anchor(path)
        return boot, anchor_ns if in_place_ns is None else in_place_ns

    def _create(self, path: str, anchor_ns: int) -> None:
        """Write the clock file aside and put it in place, unless another process was first."""
        aside = f"{self._files.root}creating/{_new_name(_wall_ns(), self.tag)}.clock"
        _write_new(aside, b"%d\n" % anchor_ns)
        try:
            os.chmod(aside, 0o644)  # for all users of this boot, whatever our umask
            _create_once(aside, path)
        finally:
            _unlink_if_exists(aside)


# ==================================================================================================
# 8. Backlog: what this object remembers of pending/: a sorted batch of its names; and the next
#    times at which a task is due or a lease ends.
#    Invariant: a name in it is a hint; only the claim tells whether its task still waits.
# ==================================================================================================

_MAX_BATCH = 1 << 17  # names to keep in memory: up to 11 MB of them
_CHUNK = 1 << 16  # directory entries to read between two cuts of the batch


def _oldest_names(
    directory: str, seen_before: int, ours: Callable[[str], object] | None = None
) -> tuple[list[str], int]:
    """Return the first names of a directory, oldest last, and how many entries it has.

    Keeps a sixteenth of a huge directory, so that a listing pays for as many pops as it reads
    entries, times 1/16; below _MAX_BATCH names, all. Names are not checked here but by the claim,
    unless nothing but foreign ones were kept: then they are (ours), and it begins again.
    """
    keep = max(_MAX_BATCH, seen_before // 16)
    names: list[str] = []
    seen, youngest = 0, ""
    with os.scandir(directory) as entries:
        while True:
            chunk = [entry.name for entry in itertools.islice(entries, _CHUNK)]
            seen += len(chunk)
            names += filter(ours, chunk if not youngest else [n for n in chunk if n < youngest])
            if len(names) > 2 * keep:
                names = sorted(names, reverse=True)[-keep:]
                youngest = names[0]
            if len(chunk) < _CHUNK:
                break
    names.sort(reverse=True)
    del names[:-keep]
    if ours is None and not any(map(_FORMS["pending"], names)):
        if youngest:
            return _oldest_names(directory, seen_before, _FORMS["pending"])
        names = []
    return names, seen


class _Backlog:
    """Guarded by the queue's lock, as a task moves: see FemtoQueue."""

    def __init__(self, worker: _Worker) -> None:
        self._pending, self._lock = f"{worker.files.root}pending", worker.lock
        self.names: list[str] = []  # the oldest last
        self._seen = 0  # how many names pending/ had when it was listed last
        self.next_due_ns = 0  # the earliest due time that is known, wall clock
        self.next_end_ns = 0  # the earliest end of a lease that is known, queue clock

    def next(self) -> str:
        """Return the oldest name and drop it; "" if none is left."""
        with self._lock:
            return self.names.pop() if self.names else ""

    def refill(self) -> bool:
        """List pending/; False if it is empty."""
        self.names, self._seen = _oldest_names(self._pending, self._seen)
        return self._seen > 0

    def clear(self) -> None:
        """Forget the batch, so that the next pop() lists pending/."""
        self.names = []

    def forget_times(self) -> None:
        """Forget the known times, so that the next listing looks for due tasks and ended leases."""
        self.next_due_ns = self.next_end_ns = 0

    def note_enqueued(self, path: str) -> None:
        """A task came to `path`. One in front of the batch is next; one in pending/ behind it is
        found by the next listing."""
        with self._lock:
            if _state_of(path) == "scheduled":
                self.next_due_ns = min(self.next_due_ns, _stamp_of(path))
            elif self.names and (name := path.partition("/")[2]) < self.names[-1]:
                self.names.append(name)

    def drop_taken(self) -> None:
        """After a lost claim, drop what else of the batch is gone.

        To look costs a third of a rename() that fails, and holds up no other worker. A task whose
        payload was replaced may be there under another name, which its claim tries.
        """
        with self._lock:
            while (
                self.names
                and not os.access(f"{self._pending}/{self.names[-1]}", os.F_OK)
                and not _may_be_renamed(self.names[-1])
            ):
                self.names.pop()


# ==================================================================================================
# 9. Lease directory: this worker's inflight-<node>/, and the shared flock on it that shows that the
#    worker lives. Invariant: a claim goes into the locked directory, by its descriptor (without
#    fcntl: by its path).
# ==================================================================================================


class _LeaseDir:
    """Opened by the first listing, and again when it was removed or given up.

    `lock` is the queue's: a claim holds it, so that close() in another thread does not close the
    descriptor meanwhile. `closes` counts the calls of close().
    """

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock = worker.files, worker.clock
        self._backlog, self._lock = worker.backlog, worker.lock
        self._detached = worker.detached
        self.directory = f"inflight-{worker.node_id}"
        self.path = self._files.root + self.directory
        self.orphans: set[str] = set()  # names of leases in it that no living worker holds
        self.unread: set[str] = set()  # of those that were claimed, and not yet delivered
        self.closes = 0
        self.is_suspect = True  # it may be gone: to be looked at before the next claim
        self._held: _FileLock | None = None
        self._first_open = True  # leases found in it belong to an earlier process

    # Opening

    @property
    def is_open(self) -> bool:
        return self._held is not None

    def is_held(self) -> bool:
        """Whether it is open, and the path still leads to it."""
        if fcntl is None:
            return os.path.isdir(self.path)
        return self._held is not None and self._held.is_at_path()

    def ensure_open(self) -> list[_Entry]:
        """Open and lock it if it is not held; return the leases that an earlier process left."""
        with self._lock:
            orphans = [] if self.is_held() else self._open()
            self.is_suspect = False
            return orphans

    def _open(self) -> list[_Entry]:
        """Open and lock it, and make it if it is missing; see ensure_open()."""
        self._backlog.clear()  # nothing is claimed until it is open, also when we raise
        tries = 0
        while True:
            self._make()
            if fcntl is None:
                return []
            lock, tries = _open_if_there(self.path, _DIR_FLAGS), tries + 1
            if lock is None:
                if tries > _MAX_REPLACED:
                    code = _MISSING_ERRNOS[-1]
                    raise OSError(code, os.strerror(code), self.path)
                continue  # RACE: an observer saw no worker in it, and removed it
            to_close: _FileLock | None = lock
            try:
                orphans = self._lock_shared(lock)
                # RACE: an observer may have removed the directory before our lock was on it.
                if lock.is_at_path():
                    # The old one goes last: it may come back, with what we hold in it.
                    self._held, to_close = lock, self._held
                    self._first_open = False
                    return orphans
            finally:
                if to_close is not None:
                    to_close.close()

    def _lock_shared(self, lock: _FileLock) -> list[_Entry]:
        """Take the shared lock; return what a former holder left, if it is dead.

        RACE: with the exclusive lock no namesake is at work in the directory that we opened; but
        an observer may have removed that, and a namesake made it anew: then its leases run.
        """
        # Waits while an observer looks in: it must not be taken for a second worker.
        if lock.acquire_shared() is None:
            self._clock.leave_boot()
            return []
        orphans: list[_Entry] = []
        # Only the first time: later, another thread may have claimed into it just now.
        if self._first_open and lock.try_exclusive() and lock.is_at_path():
            with contextlib.suppress(OSError):  # the next look at leases raises it
                orphans = [it for it in self._files.entries(self.directory) if it.boot != _DETACHED]
                # Also if Ctrl-C ends their reclaim: the next look at leases goes on.
                self.orphans.update(entry.name for entry in orphans)
        lock.acquire_shared()
        return orphans

    def _make(self) -> None:
        """Make the directory; on a full disk, of the spare one that was made before.

        A full queue can only be drained by a worker that can start.
        """
        try:
            os.mkdir(self.path)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _OUT_OF_SPACE_ERRNOS:
                raise
            if not self._take_spare():
                raise

    def _take_spare(self) -> bool:
        """Rename the spare directory to ours; False if it is gone, or not empty."""
        spare = f"{self._files.root}spare"
        try:
            if os.listdir(spare):
                return False  # foreign files stay where they are
            os.utime(spare)  # an observer removes what is empty and old
            os.rename(spare, self.path)
        except OSError:
            return False  # the caller reports why it needed one
        return True

    # Claiming

    def claim(self, source: str, attempts: int, ident: str, length_ns: int) -> str:
        """Rename a waiting task into the directory that we hold locked; return the lease's path.

        Returns "" if another worker was first, if the directory is not open (any more), or if the
        task had ended: then its second name is removed, see _Files.is_done().
        """
        with self._lock:
            deadline_ns = self._clock.now_ns() + length_ns  # now: we may have waited for the lock
            boot = _DETACHED if self._detached else self._clock.boot
            name = _lease_name(deadline_ns, attempts, boot, ident)
            lease = f"{self.directory}/{name}"
            try:
                if not self._rename_in(source, name):
                    return ""  # RACE: closed by another thread
                if self._files.drop_done(lease):
                    self.orphans.add(name)  # should it stay
                    return ""
            except FileNotFoundError:
                self.is_suspect = True
                # RACE: another worker won; or our directory was removed
                if not self._was_claimed(name):
                    return ""
            except BaseException as error:
                if getattr(error, "errno", None) not in _MISSING_ERRNOS:
                    self.undo_claim(lease, source)  # Ctrl-C may come when it is done
                    raise
                self.is_suspect = True
                self._backlog.clear()  # ESTALE: our directory is gone; the next listing makes it
                return ""
            self.unread.add(name)
            return lease

    def _rename_in(self, source: str, name: str) -> bool:
        """Rename a task into our directory; False if that is not open."""
        if fcntl is None:
            os.rename(self._files.root + source, f"{self.path}/{name}")
        elif self._held is None:
            return False
        else:
            os.rename(self._files.root + source, name, dst_dir_fd=self._held.fd)
        return True

    def _was_claimed(self, name: str) -> bool:
        """Whether a claim that raised FileNotFoundError was carried out; see _was_moved()."""
        if not _may_lose_replies(self._files.fs_type):
            return False
        try:
            return name in os.listdir(self.path)
        except OSError:
            self.orphans.add(name)  # should it be there after all
            self._backlog.clear()  # our directory is gone: the next listing makes it
            return False

    def undo_claim(self, lease: str, source: str) -> None:
        """Undo a claim that was interrupted, or whose file is not at its path: a person took it
        out, or moved the whole directory away, where the task must not be lost."""
        with self._lock:
            self._backlog.clear()
            self.is_suspect = True
            name = lease.partition("/")[2]
            try:
                if self._held is not None:
                    os.rename(name, self._files.root + source, src_dir_fd=self._held.fd)
                elif fcntl is None:
                    os.rename(self._files.root + lease, self._files.root + source)
            except FileNotFoundError:
                pass  # it had not been claimed yet, or a person has it
            except OSError:
                self.orphans.add(name)
                raise

    def deadline_is_final(self, entry: _Entry) -> bool:
        """Whether our clock alone decides if a lease is over: taken on this boot, or detached."""
        return entry.boot in (self._clock.boot, _DETACHED)

    # Closing

    def close(self, reclaim: Callable[[], None]) -> None:
        """Give it up. reclaim() is called if no other object holds it, to end what it holds."""
        self._first_open = self.is_suspect = True
        lock, self._held = self._held, None
        if lock is not None and lock.fd < 0:  # in a cycle of garbage its finalizer may be first
            lock = _open_if_there(self.path, _DIR_FLAGS)
        if lock is None and fcntl is not None:
            return
        try:
            is_alone = None if lock is None else lock.try_exclusive()
            if lock is not None and is_alone and lock.is_at_path():
                reclaim()
            if lock is None or is_alone is None or (is_alone and lock.is_at_path()):
                _remove_empty_dir(self.path)
        except OSError as error:  # no lease is lost by it: pop() of another worker ends them
            _log().warning("%s could not be cleared: %s", self.path, error)
        finally:
            if lock is not None:
                lock.close()


# ==================================================================================================
# 10. Key states: where the task of each key is, by the file keys/<hash>, or by listings where other
#     hosts write. The lock itself is taken in room 11, _KeyIndex.lock().
#     Invariant: the path in a state is a hint, which find() checks and corrects. A key without a
#     state has no task, except after power loss: then repair() finds what is in keys/.
# ==================================================================================================

_STALE_S = 12.0  # until a name that leads to nothing is a phantom
_MAX_LISTINGS = 8  # for one task: by a pop() that loses every claim, by a key whose task moves on
# A claim needs no lock, nor does its undoing. In this order, one is not missed; both at once are.
_LIVE = ("inflight", "scheduled", "pending", "inflight")


class _KeyState:
    """Where the task of a key was last, and the name in keys/ of the payload behind it, if any.

    A hint: a task that was killed, or moved by a pop() or a person, is looked for.
    """

    __slots__ = ("buffered", "path")

    def __init__(self, path: str, buffered: str = "") -> None:
        self.path, self.buffered = path, buffered


def _parse_key_states(text: bytes, tag: str) -> dict[str, _KeyState]:
    """Return what the contents of keys/<hash> say of each key."""
    lines = text.decode("ascii", "replace").partition("\n\n")[0].splitlines()
    # One that leads to a task of no key, or of another hash, would have it overwritten.
    return {
        match[1]: _KeyState(match[2], match[4].strip("-"))
        for match in map(_parse_key_state, lines)
        if match and _tag_of(match[2]) == tag and match[4][-9:] in ("-", f"-{tag}")
    }


def _read_key_states(root: str, tag: str) -> dict[str, _KeyState]:
    """Return what keys/<hash> says of each key, without its lock: nothing, if it is not there."""
    try:
        fd = os.open(f"{root}keys/{tag}", _READ_FLAGS)
    except FileNotFoundError:
        return {}
    try:
        return _parse_key_states(os.read(fd, os.fstat(fd).st_size), tag)
    finally:
        os.close(fd)


class _Listings:
    """Keyed tasks as the directories tell them, for file systems of several hosts.

    Contents and single names that another host changed may be read as they were for a second
    (GlusterFS) or thirty (NFS); listings and renames are answered by the server, and so is what
    _look_afresh() reads after a listing. A name that GlusterFS has yet to heal is listed for
    minutes, and leads to nothing: a phantom, which has no key.
    """

    def __init__(self, files: _Files) -> None:
        self._files = files
        self._phantoms: set[str] = set()

    def states(self, tag: str, but: str = "") -> dict[str, _KeyState]:
        """Return the states of a hash, without the file at `but`."""
        for _ in range(_MAX_LISTINGS):
            try:
                return self._states_once(tag, but)
            except OSError as error:  # RACE: a task moved after its directory was listed
                if error.errno not in _MISSING_ERRNOS:
                    raise
        return self._states_once(tag, but)

    def _states_once(self, tag: str, but: str) -> dict[str, _KeyState]:
        """Do as states(). Raises FileNotFoundError, or ESTALE, if a task moves meanwhile."""
        states: dict[str, _KeyState] = {}
        for entry in self._files.find("keys", *_LIVE):
            if _tag_of(entry.id) != tag or entry.path == but or self._files.is_done(entry.path):
                continue
            name = self.key_at(entry)
            state = states.setdefault(name, _KeyState("")) if name else _KeyState("")
            if entry.directory == "keys":
                state.buffered = entry.name
            else:
                state.path = entry.path
        return states

    def key_at(self, entry: _Entry) -> str:
        """Return the encoded key of a record, "" if it has none or is not whole.

        Raises FileNotFoundError for a new phantom: its task may have moved to what was listed
        before it, so that only another listing can do without it.
        """
        was_phantom = entry.path in self._phantoms
        try:
            _, key = self.read(entry.path, entry.id)
        except CorruptTask:
            return ""
        except FileNotFoundError:
            if not was_phantom:
                raise
            return ""
        return "" if key is None else _encode_key(key)

    def read(self, path: str, ident: str) -> tuple[bytes, str | None]:
        """Do as _read_record() with a record that a listing has just shown.

        As long as its name is listed, try again. The time alone says nothing: a mount that hung
        knows no more than before.
        """
        directory, name = os.path.split(self._files.root + path)
        is_known = path in self._phantoms or not self._files.is_shared
        tries, end_s = (5, 0.0) if is_known else (20, time.monotonic() + _STALE_S)
        for count, pause_s in enumerate(_backoff_s(_STALE_S / 60), 1):
            try:
                record = _look_afresh(_read_record, self._files.root + path, ident)
                self._phantoms.discard(path)
                return record
            except FileNotFoundError:
                if name not in os.listdir(directory):
                    raise
                if count >= tries and time.monotonic() > end_s:
                    self._phantoms.add(path)
                    raise
            time.sleep(pause_s)
        raise AssertionError("pauses never end")


class _KeyStates:
    """The states of the keys of one hash, while this thread holds their lock (_KeyIndex.lock()).

    The lock is locks/<last two digits of the hash>, shared with the other hashes that end so. It is
    never removed: a process that waited for the lock of a removed file would have to see that its
    path leads elsewhere by now, and NFS or GlusterFS may show it an old answer.

    The states stand in keys/<hash>, a line for each key: "<key> <path> <buffered, or ->", then an
    empty one. One write() makes the change; what follows the empty line is of an older, longer
    text. A key without a state has no task. On a file system that other hosts write to there is no
    such file.
    """

    def __init__(self, files: _Files, listings: _Listings, tag: str) -> None:
        self.tag, self._files, self._listings = tag, files, listings
        self._path = f"{files.root}keys/{tag}"
        self.states: dict[str, _KeyState] = {}
        self._saved: str | None = None  # None: the states have not been read
        self._fd = -1  # of keys/<hash>, if it is there

    def read(self, create: bool) -> None:
        """Read the states, unless a signal handler did it meanwhile. Call it with the lock held.

        create: make keys/<hash>, for it will be written.
        """
        if self._saved is not None:
            return
        states: dict[str, _KeyState] = {}
        saved = b""
        if self._files.is_shared:
            states = self._listings.states(self.tag)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._open(create)
                text, end, _ = os.read(self._fd, os.fstat(self._fd).st_size).partition(b"\n\n")
                states, saved = _parse_key_states(text, self.tag), text + end
        if self._saved is None:  # again: a handler may have come while we read
            self.states = states
            # As it is there: what was invalid in it is written anew.
            self._saved = saved.decode("ascii", "replace") or self._text()

    def _open(self, create: bool) -> None:
        """Open keys/<hash>. Raises FileNotFoundError if it, or keys/, is not there."""
        flags = os.O_RDWR | _NO_FOLLOW_OR_BLOCK | (os.O_CREAT if create else 0)
        self._fd = os.open(self._path, flags, 0o666)

    def _text(self) -> str:
        """Return what keys/<hash> is to say."""
        lines = (f"{key} {it.path} {it.buffered or '-'}\n" for key, it in self.states.items())
        return "".join(lines) + "\n"

    def save(self, sync: bool) -> None:
        """Write the states if they have changed; again, if a signal handler does so meanwhile."""
        while (text := self._text()) != self._saved:
            if self._files.is_shared:
                self._make_dir(sync)
                return
            if self._fd < 0:
                self._make_dir(sync)
                self._open(create=True)
            os.pwrite(self._fd, text.encode("ascii"), 0)
            self._saved = text
            if sync:
                os.fsync(self._fd)
                _sync_dir(os.path.dirname(self._path))

    def _make_dir(self, sync: bool) -> None:
        """Make keys/ if it is missing. Raises FileNotFoundError if data_dir is."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(self._path))
        if sync:
            _sync_dir(self._files.root)

    def close(self) -> None:
        """Write the states; remove keys/<hash> if no key of the hash has one."""
        try:
            with contextlib.suppress(OSError):  # nothing depends on a hint
                if not self.states and self._fd >= 0 and self._saved is not None:
                    os.unlink(self._path)
                    self._saved = ""  # what a signal handler wrote meanwhile is gone: again
                    self._close_file()
                if self.states:
                    self.save(sync=False)
        finally:
            with contextlib.suppress(OSError):
                self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# ==================================================================================================
# 11. Keys: takes the locks of keys; finds, moves and repairs tasks with a key. Besides it only
#     room 9 (claim, undo_claim) and room 12 (a new time, a new payload) rename such a task.
#     Invariant: of each key at most one task is in pending/, scheduled/ or inflight-*/, and at most
#     one newer payload in keys/, behind a task in flight. What moves does so under the lock of its
#     key; but pop() and people may take a task that waits at any time.
#     Order of locks: that of a key first, then the queue's lock. With the queue's lock held, a
#     key's lock is only tried (wait=False).
# ==================================================================================================

_REPLACE_LEASE_NS = 30 * 10**9  # under which a payload is replaced where names can't be exchanged


class _KeyIndex:
    """Finds, replaces, buffers and moves keyed tasks. `needs_repair` is set when a keyed task may
    have ended without the payload behind it: repair() is due."""

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock, self._backlog = worker.files, worker.clock, worker.backlog
        self._lease_dir, self._listings = worker.lease_dir, _Listings(worker.files)
        self._held = threading.local()  # .lock: the last one that this thread took; .files: all
        self.needs_repair = False

    # Locks

    @contextlib.contextmanager
    def lock(self, tag: str, wait: bool = True, create: bool = False) -> Iterator[_KeyStates]:
        """Hold the lock of the keys of one hash. Inside, this thread may ask for it again.

        Blocks, so the queue's lock must not be held: a process, or another thread, may be stopped
        while it has this one. wait=False: raises BlockingIOError if it is not free. create: as in
        _KeyStates.read().
        """
        outer: _KeyStates | None = getattr(self._held, "lock", None)
        if outer is not None and outer.tag == tag:
            outer.read(create)
            yield outer
            return
        # A signal handler that needs the same file, while this thread takes it or has it for
        # another hash, shares the descriptor: it must not wait for itself.
        name, files = _lock_name(tag), self._held.__dict__.setdefault("files", {})
        shared: _FileLock | None = files.get(name)
        if shared is not None and shared.fd < 0:
            shared = None  # it is just being closed
        file_lock = files[name] = shared or self._open_lock(name)
        try:
            file_lock.acquire_exclusive(wait)
            held = self._held.lock = _KeyStates(self._files, self._listings, tag)
            try:
                held.read(create)
                yield held
            finally:
                try:
                    held.close()
                finally:  # after it: a handler must see the states that are being written
                    self._held.lock = outer
        finally:
            if shared is None:
                self._give_up_file(files, name, file_lock)

    def _give_up_file(self, files: dict[str, _FileLock], name: str, file_lock: _FileLock) -> None:
        """Unlock a file that this thread took, and forget it, also when Ctrl-C comes meanwhile."""
        try:
            with contextlib.suppress(OSError):  # what was done under the lock is done
                file_lock.close()
        finally:
            if files.get(name) is file_lock:
                del files[name]

    def _open_lock(self, name: str) -> _FileLock:
        """Open a file in locks/; make the directory for the first key."""
        path = f"{self._files.root}locks/{name}"
        lock = _open_if_there(path)
        if lock is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))  # FileNotFoundError if data_dir is gone
            lock = _FileLock(path)
        return lock

    def lock_of(
        self, ident: str, wait: bool = True
    ) -> contextlib.AbstractContextManager[_KeyStates | None]:
        """Hold the lock of a task's key, if it has one; see lock()."""
        return self.lock(_tag_of(ident), wait) if _is_keyed(ident) else _NO_LOCK

    def lock_if_shared(self, ident: str) -> contextlib.AbstractContextManager[_KeyStates | None]:
        """Hold the lock of a task's key between a look at another task and what follows from it.

        Only where other hosts write: of two that were claimed at once, each lists the other.
        """
        return self.lock_of(ident) if self._files.is_shared else _NO_LOCK

    # Finding

    def may_have_task(self, name: str) -> bool:
        """Whether an encoded key may have a task; on a local file system, "no" is cheap to know."""
        return self._files.is_shared or self._files.exists(f"keys/{_key_tag(name)}")

    def path_of(self, key: str | None) -> str | None:
        """Return where the task of a key is, None if it has none."""
        name = _encode_key(key)
        if not self.may_have_task(name):
            return None
        with self.lock(_key_tag(name)) as held:
            return self.find(held, name)

    def find(self, held: _KeyStates, name: str, thorough: bool = True) -> str | None:
        """Return where the task of an encoded key is, None if it has none; mend its state.

        thorough=False: the caller has listed all that waits, and it was not there.
        """
        state = held.states.get(name)
        if state is None:
            return None
        path = self.locate(state.path, thorough) if state.path else None
        if path is None and state.buffered:
            path = self._promote_lost(state)
        if path is None:
            del held.states[name]
            return None
        state.path, state.buffered = path, self.buffered_name(state)
        if state.buffered and _state_of(path) != "inflight":
            # CRASH: after the task returned to pending/ and before its newer payload replaced it;
            # or a person moved it. If the replacement fails, another pop() has leased the task, or
            # our directory is not open: the payload stays buffered behind it.
            record = f"keys/{state.buffered}"
            if self.replace_under_lease(state, record, _due_of(state.buffered)):
                state.buffered = ""
            return self.locate(state.path)
        return path

    def _promote_lost(self, state: _KeyState) -> str | None:
        """CRASH: the process that ended a task died before it promoted the payload behind it, or
        after that. Or a person removed the task. Return where that payload is now."""
        if buffered := self.buffered_name(state):
            return self._promote_buffered(state, buffered)
        return self.locate(f"pending/{_id_of(state.buffered)}")

    def locate(self, path: str, thorough: bool = True) -> str | None:
        """Return where a task is that was at `path`, None if it does not wait and is not leased.

        Lists pending/ only if it is not where a pop() would have brought it. Where other hosts
        write, the lease is the one that was found under the lock; another may be a phantom.
        """
        is_fresh = _state_of(path) != "inflight" or self._files.is_shared
        if is_fresh and os.path.lexists(self._files.root + path):
            return path
        elsewhere = ("pending", "scheduled", "inflight") if thorough else ()
        entry = self._files.find_id(_id_of(path), "inflight", *elsewhere)
        return entry.path if entry else None

    def buffered_name(self, state: _KeyState) -> str:
        """Return the name in keys/ of the newer payload behind a task, "" if there is none."""
        if not state.buffered or os.path.lexists(f"{self._files.root}keys/{state.buffered}"):
            return state.buffered
        # CRASH: before it came there, before it got that name, or after it was promoted.
        entry = self._files.find_id(_id_of(state.buffered), "keys")
        return entry.name if entry else ""

    def other_task(self, key: str, lease: str) -> str | None:
        """Return the id of the key's task if that is not the one just leased, else None.

        `mv failed/ID pending/`, or a state lost with power, makes two tasks of one key.
        """
        name, ident = _encode_key(key), _id_of(lease)
        tag = _key_tag(name)
        if not self._files.is_shared:
            held: _KeyStates | None = getattr(self._held, "lock", None)
            if held is not None and held.tag == tag:
                states = held.states
            else:
                states = _read_key_states(self._files.root, tag)
            if name in states and _id_of(states[name].path) == ident:
                return None
        with self.lock(tag) as held:
            if self._files.is_shared:
                state = self._listings.states(tag, but=lease).get(name)
                path = state.path if state is not None else None
            else:
                path = self.find(held, name)
            if path and _id_of(path) != ident:
                return _id_of(path)
            if not path and name not in held.states:
                held.states[name] = _KeyState(lease)
        return None

    def read_afresh(self, path: str, ident: str) -> tuple[bytes, str | None]:
        """Read a record that another host may have replaced: without a listing, the old one would
        be read for a second (GlusterFS)."""
        if self._files.is_shared:
            os.listdir(os.path.dirname(self._files.root + path))
        return self._listings.read(path, ident)

    # Moving

    def move(self, source: str, target: str, wait: bool = True, is_ours: _Check = None) -> str:
        """Move a task from one state to another; "": remove it. Return where it went.

        A keyed one moves under the lock of its key, and promotes the newer payload behind it.
        Raises BlockingIOError if that lock is not free and wait is False.
        """
        ident = _id_of(source)
        if not _is_keyed(ident):
            return self._files.move(source, target, is_ours)
        with self.lock(_tag_of(ident), wait) as held:
            return self._move_keyed(held.states, source, target, is_ours)

    def _move_keyed(
        self, states: dict[str, _KeyState], source: str, target: str, is_ours: _Check
    ) -> str:
        """Move a keyed task under the lock of its key; see move()."""
        ident = _id_of(source)
        name = next((key for key, it in states.items() if _id_of(it.path) == ident), "")
        state = states[name] if name else _KeyState(source)
        ends, waits = _is_end(target), _state_of(source) == "pending"
        comes_back = not ends and _state_of(target) != "inflight"
        # A task in pending/ is not merged here: a pop() may lease it at any time. find() does that.
        if comes_back and not waits and (buffered := self.buffered_name(state)):
            return self._return_with_buffered(state, buffered, source, target)
        try:
            self._files.move(source, target, is_ours)
            if not ends:
                state.path = target
            elif buffered := self.buffered_name(state):
                self._promote_buffered(state, buffered)
            elif name:
                del states[name]
        except BaseException:
            self.needs_repair = True  # the next pop() promotes what stands behind it
            raise
        return target

    def _promote_buffered(self, state: _KeyState, buffered: str) -> str:
        """Move a newer payload, by its name in keys/, into the queue: the task before it has come
        to its end. Raises FileNotFoundError if a person removed it meanwhile."""
        path = f"{'pending' if _due_of(buffered) is None else 'scheduled'}/{buffered}"
        _move(f"{self._files.root}keys/{buffered}", self._files.root + path, _always)
        state.path, state.buffered = path, ""
        self._backlog.note_enqueued(path)
        self._files.commit(path)
        return path

    def replace_under_lease(self, state: _KeyState, record: str, due_ns: int | None) -> bool:
        """Rename a record over that of a waiting task: where names can't be exchanged, or where
        the record must not be anywhere else afterwards.

        Under a lease of our own, so that no other worker has the task meanwhile; a pop() finds no
        task then. False if a pop() was quicker, or a person moved the lease. CRASH: the lease ends
        and the task is back at its place, with the old payload or the new one.
        """
        source, target = state.path, _reset_path(state.path, due_ns)
        if _state_of(source) == "scheduled":  # no pop() takes it from there
            self._replace_and_move(record, source, target)
        else:
            attempts, ident = _attempts_of(source), _id_of(source)
            lease = self._lease_dir.claim(source, attempts, ident, _REPLACE_LEASE_NS)
            if not lease:
                return False
            try:
                self._replace_and_move(record, lease, target)
            except BaseException as error:
                self._lease_dir.undo_claim(lease, source)
                if isinstance(error, FileNotFoundError):  # by hand, before or after the replacement
                    return not os.path.lexists(self._files.root + record)
                raise
        state.path = target
        self._backlog.note_enqueued(target)
        return True

    def _replace_and_move(self, record: str, source: str, target: str) -> None:
        """Move a task that no other worker may take to its place, with a new payload.

        CRASH: between the two renames it has the old payload or the new one; but the new one is
        never anywhere where it may be had before its time.
        """
        root = self._files.root
        if _state_of(target) == "scheduled":
            _move(root + source, root + target, _always)
            _move_over(root + record, root + target)
        else:
            _move_over(root + record, root + source, must_exist=True)
            _move(root + source, root + target, _always)

    def _return_with_buffered(
        self, state: _KeyState, buffered: str, source: str, target: str
    ) -> str:
        """Put a task back with the newer payload in its place, by the rename over it.

        The fence first, if it was leased: a late holder must not end what it never saw.
        """
        root = self._files.root
        if _state_of(source) == "inflight":
            fenced = _with_stamp(source, self._clock.now_ns())
            _move(root + source, root + fenced, _always)  # gone: the lease is lost
            source = fenced
        elif self._files.is_shared and state.path != source:
            raise FileNotFoundError(errno.ENOENT, "it is elsewhere by now", root + source)
        else:
            # RACE: another worker enqueued it before we had the lock, and it may be in flight by
            # now: then the rename over it would make a second one.
            os.lstat(root + source)
        target = _reset_path(target, _due_of(buffered))
        self._replace_and_move(f"keys/{buffered}", source, target)
        state.path, state.buffered = target, ""
        return target

    def reserve(self, held: _KeyStates, source: str, target: str) -> None:
        """Make sure that the key of a failed task has no other, and say that it will be there.

        Raises KeyInFlight if it has, FileNotFoundError if the task is gone.
        """
        try:
            _, key = _look_afresh(_read_record, self._files.root + source, _id_of(source))
        except CorruptTask:
            return  # it has no key, and pop() will quarantine it
        if key is None:
            return
        path = self.find(held, _encode_key(key))
        if path is not None:
            raise KeyInFlight(key, _id_of(path))
        held.states[_encode_key(key)] = _KeyState(target)
        held.save(self._files.is_durable)

    # Repair

    def repair(self) -> None:
        """Promote the payloads whose task is gone, and remove the states of keys without a task."""
        self.needs_repair = False
        errors = _FirstError()
        buffered = {_tag_of(name) for name in self._names(_FORMS["keys"])}
        idle = {*map(_tag_of, self.idle())}
        for tag in sorted(buffered | idle):
            busy = contextlib.suppress(BlockingIOError)
            with errors, busy, self.lock(tag, wait=False) as held:
                for name in [*held.states]:
                    self.find(held, name, thorough=tag not in idle)
                if tag in buffered:
                    self._index_unlisted(held)
        errors.raise_if_any()

    def idle(self) -> list[str]:
        """Return the paths in keys/, states and newer payloads, of keys that have no task."""
        names = self._names(_parse_tag) + self._names(_FORMS["keys"])
        if not names:
            return []
        busy = {_tag_of(entry.id) for entry in self._files.find(*_LIVE)}
        return [f"keys/{name}" for name in names if _tag_of(name) not in busy]

    def _names(self, parse: Callable[[str], object]) -> list[str]:
        """Return the names of one form in keys/, sorted."""
        _refresh(self._files.root)
        none_yet = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with none_yet, os.scandir(f"{self._files.root}keys") as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
            return sorted(filter(parse, files))
        return []

    def _index_unlisted(self, held: _KeyStates) -> None:
        """Promote newer payloads that no state knows: power loss, or a person, took the state."""
        known = {state.buffered for state in held.states.values()}
        for entry in self._files.entries("keys"):
            if _tag_of(entry.id) != held.tag or entry.name in known:
                continue
            state, name = _KeyState("", entry.name), ""
            with contextlib.suppress(FileNotFoundError):
                name = self._listings.key_at(entry)
            if name in held.states:
                continue  # when that one has ended
            if name:
                held.states[name] = state
            # A corrupt one too: pop() quarantines it.
            self._promote_buffered(state, entry.name)


_NO_LOCK = contextlib.nullcontext()


# ==================================================================================================
# 12. Keyed pushes: a payload for a key comes first, replaces, updates or is buffered.
#     Invariant: that of Keys; a task that waits stays in sight while its payload is replaced.
# ==================================================================================================


class _KeyPusher:
    """Pushes payloads for keys."""

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock = worker.files, worker.clock
        self._backlog, self._keys = worker.backlog, worker.keys

    def push(
        self, name: str, payload: bytes | memoryview, if_in_flight: str, due_ns: int | None
    ) -> str:
        """Push a payload for an encoded key; return its task's id.

        Returns "" if a pop() or a person was quicker at the task that waited: again, then.
        """
        with self._keys.lock(_key_tag(name), create=True) as held:
            path = self._keys.find(held, name)
            if path is None:
                return self._push_first(held, name, payload, due_ns)
            if _state_of(path) != "inflight":
                if held.states[name].buffered:
                    return ""  # RACE: it would come after this payload: its turn first
                return self._replace(held, name, payload, due_ns)
            if if_in_flight == "reject":
                raise KeyInFlight(_decode_key(name), _id_of(path))
            if if_in_flight == "update" and not held.states[name].buffered:
                return self._update(path, name, payload)
            return self._buffer(held, name, payload, due_ns)

    def _push_first(
        self, held: _KeyStates, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> str:
        """Push the only task of a key."""
        ident = _new_name(self._clock.next_order(), held.tag)
        path = f"pending/{ident}" if due_ns is None else f"scheduled/{_task_name(due_ns, 0, ident)}"
        held.states[name] = _KeyState(path)
        try:
            # The state is there first: a task that it does not know would be one too many.
            held.save(self._files.is_durable)
            self._files.publish(ident, payload, path, key=name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._keys.find(held, name)  # a consumer that was quicker keeps what it has
            raise
        self._backlog.note_enqueued(path)
        return ident

    def _replacement(
        self, name: str, payload: bytes | memoryview
    ) -> contextlib.AbstractContextManager[str]:
        """Write a record aside, for a block that puts it in the place of another."""
        return self._files.replacement(self._clock.new_id(), _header(payload, name), payload)

    def _replace(
        self, held: _KeyStates, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> str:
        """Replace the payload of a waiting task; return its id, "" if another was quicker."""
        state = held.states[name]
        with self._replacement(name, payload) as aside:
            target = _reset_path(state.path, due_ns)
            if _state_of(target) == "scheduled":
                replaced = self._replace_scheduled(state, aside, target)
            else:
                replaced = self._replace_pending(state, aside, target)
            if replaced:
                self._files.commit(state.path)
            self._files.remove(aside)  # the old record, or this one
        return _id_of(state.path) if replaced else ""

    def _replace_scheduled(self, state: _KeyState, aside: str, target: str) -> bool:
        """Move a waiting task to scheduled/, or to another time there, and swap its record.

        CRASH: after the rename the task has the new time and the old payload. The other order
        could deliver the new payload before its time.
        """
        root, source = self._files.root, state.path
        try:
            _move(root + source, root + target, _always)
        except FileNotFoundError:
            return False  # RACE: a pop() took it from pending/, or a person moved it
        try:
            replaced = self._files.swap_or_replace(aside, target)
        except OSError:
            with contextlib.suppress(OSError):
                _move(root + target, root + source)  # a push that raised changed nothing
            raise
        state.path = target
        self._backlog.note_enqueued(target)
        return replaced

    def _replace_pending(self, state: _KeyState, aside: str, target: str) -> bool:
        """Swap the record of a task in pending/: pop() sees the old one or the new one there, at
        each instant, and at its old place.

        Its attempts begin anew, so its name may change; a worker that listed the old name tries
        the new one too. CRASH: after the rename the old payload begins anew; after the swap the
        old record is a leftover in creating/.
        """
        root, source = self._files.root, state.path
        if target != source:
            try:
                _move(root + source, root + target, _always)
            except FileNotFoundError:
                return False  # RACE: a pop() took it, or a person moved it
            state.path = target
        try:
            swapped = self._files.swap(aside, target)
        except OSError:
            with contextlib.suppress(OSError):
                _move(root + target, root + source)  # a push that raised changed nothing
                state.path = source
            raise
        return self._keys.replace_under_lease(state, aside, None) if swapped is None else swapped

    def _update(self, path: str, name: str, payload: bytes | memoryview) -> str:
        """Replace the payload of a task in flight; "" if a person moved the task meanwhile."""
        with self._replacement(name, payload) as aside:
            replaced = self._files.swap_or_replace(aside, path)
            self._files.remove(aside)
        if replaced:
            self._files.commit(path)
        return _id_of(path) if replaced else ""

    def _buffer(
        self, held: _KeyStates, name: str, payload: bytes | memoryview, due_ns: int | None
    ) -> str:
        """Put a newer payload behind the task in flight, or in the place of the one behind it."""
        state, before = held.states[name], self._keys.buffered_name(held.states[name])
        ident = _id_of(before) or _new_name(self._clock.next_order(), held.tag)
        state.buffered = ident if due_ns is None else _task_name(due_ns, 0, ident)
        root, path = self._files.root, f"keys/{state.buffered}"
        try:
            held.save(self._files.is_durable)
            if not before:
                self._files.publish(ident, payload, path, key=name)
                return ident
            with self._replacement(name, payload) as aside:
                if before != state.buffered:  # CRASH: after it, the old payload at the new time
                    _move(f"{root}keys/{before}", root + path, _always)
                _move_over(root + aside, root + path)
        except BaseException:
            state.buffered = before
            raise
        self._files.commit(path)
        return ident


# ==================================================================================================
# 13. Transitions: each change of a task's state, except pushes (6, 12) and purges (14, 20).
#     Invariant: the rename is the commit and the fence; what is written beside it comes after it.
# ==================================================================================================


def _reason(error: str | BaseException) -> str:
    """Return the text of failed/<id>.error: a text, or an exception with its traceback."""
    if isinstance(error, _CommandFailed):
        error = str(error)
    if isinstance(error, str):
        return error if error.endswith("\n") else error + "\n"
    import traceback

    return "".join(traceback.format_exception(error))


class _Worker:
    """What belongs to one process on one queue, and what happens to tasks. `lock` is held while a
    task moves into our lease directory or out of it, so that a renewal and a done() in two threads
    don't cross."""

    def __init__(self, queue: FemtoQueue, files: _Files, clock: _QueueClock) -> None:
        self.files, self.clock, self.lock = files, clock, threading.RLock()
        self.node_id = queue._given_node_id or f"{os.getpid()}-{clock.tag}"
        self.max_attempts, self.keep_done = queue.max_attempts, queue.keep_done
        self.timeout_stale_ms, self.length_ns = queue.timeout_stale_ms, queue._length_ns
        self.detached, self.poll_interval_s = queue.detached, queue.poll_interval_s
        self.backlog = _Backlog(self)
        self.lease_dir = _LeaseDir(self)
        self.keys = _KeyIndex(self)
        self.house = _Housekeeper(self)
        self.pusher, self.taker = _KeyPusher(self), _Taker(self)
        self.waits = _Waits(self)
        self.renewer = _LeaseRenewer(self)

    def open_lease_dir(self) -> None:
        """Open our lease directory unless it is open, and reclaim what a former holder left."""
        for entry in self.lease_dir.ensure_open():
            with contextlib.suppress(OSError):  # the next look at leases tries again, and raises
                self.reclaim(entry)

    # From pending/ to in flight

    def claim(self, waiting: str, length_ns: int) -> FemtoTask | None:
        """Rename a waiting task into our lease directory, and read it. None: another worker was
        first, or it can't be delivered."""
        found = _match_waiting(waiting)
        if found is None:
            return None  # not ours
        ident, attempts = found
        was_claimed, attempts = attempts is not None, attempts or 0
        if fcntl is None and _is_keyed(ident):
            return None  # it could be leased, but never finished
        if self.max_attempts is not None and attempts >= self.max_attempts:
            if not self.files.drop_done(waiting):
                self._dead_letter_exhausted(waiting, attempts)
        else:
            counted = min(attempts + 1, _MAX_ATTEMPTS)
            lease = self.lease_dir.claim(waiting, counted, ident, length_ns)
            if lease:
                held = _Lease(lease, length_ns, self.lease_dir.closes)
                return self._read_claimed(waiting, ident, counted, held, was_claimed)
        if attempts and _is_keyed(ident):
            # RACE: its payload was replaced after we listed it; its place is still this one.
            return self.claim(_reset_path(waiting, None), length_ns)
        self.backlog.drop_taken()
        return None

    def _read_claimed(
        self, waiting: str, ident: str, attempts: int, held: _Lease, was_claimed: bool
    ) -> FemtoTask | None:
        """Read a claimed task, with its checkpoint; None: it is gone, corrupt or given back."""
        lease, checkpoint = held.path, None
        try:
            if _is_keyed(ident) and self.files.is_shared:
                data, key = self.keys.read_afresh(lease, ident)
            else:
                data, key = _read_record(self.files.root + lease, ident)
            if key is not None:
                with self.keys.lock_if_shared(ident):
                    if other := self.keys.other_task(key, lease):
                        self.quarantine(lease, str(KeyInFlight(key, other)))
                        return None
            if was_claimed:
                checkpoint = self._read_checkpoint(ident, data)
        except CorruptTask as error:
            self.quarantine(lease, error.reason)
            return None
        except FileNotFoundError:
            self.lease_dir.undo_claim(lease, waiting)
            return None
        except BaseException as error:
            self._return_unreadable(lease, waiting, error)
            raise
        finally:
            self.lease_dir.unread.discard(lease.partition("/")[2])
        anchor_ns = self.clock.anchor_ns
        task = FemtoTask(ident, data, attempts, key, checkpoint, _lease=held, _anchor_ns=anchor_ns)
        if held.closes == self.lease_dir.closes:
            return task
        with contextlib.suppress(LeaseLost):  # RACE: close() in another thread gave it back, or
            self.requeue_uncounted(task)  # could not: its key was busy, its node_id is shared
        return None

    def _return_unreadable(self, lease: str, waiting: str, error: BaseException) -> None:
        """Undo a claim that was interrupted: the task returns to its place; or whose file could not
        be read: to the back, else it would block each worker that takes the oldest task first."""
        target = waiting
        is_transient = getattr(error, "errno", None) in _TRANSIENT_ERRNOS
        if isinstance(error, Exception) and not is_transient and _state_of(waiting) == "pending":
            ident, attempts = _id_of(waiting), _attempts_of(waiting)
            target = f"pending/{_task_name(self.clock.next_order(), attempts, ident)}"
        with contextlib.suppress(FileNotFoundError):  # it had not been claimed yet
            # CRASH: before it, a lease like any
            try:
                self.backlog.note_enqueued(self.keys.move(lease, target))
            except OSError:
                self.orphan(lease)
                raise

    # Checkpoints

    def _read_checkpoint(self, ident: str, data: bytes) -> bytes | None:
        """Return how far the work on that payload had come: of a key, another may be here now."""
        path = f"checkpoints/{ident}"
        exists = _exists_afresh if self.files.is_shared else _exists
        if not exists(self.files.root + path):
            return None
        try:
            saved, _ = self.keys.read_afresh(path, ident)
        except FileNotFoundError:
            return None  # RACE: a person removed it
        except CorruptTask as error:  # power loss: the work begins anew
            _log().warning("checkpoints/%s: %s", ident, error.reason)
            return None
        of_data = _header(data)
        if saved.startswith(of_data):
            return saved[len(of_data) :]
        self.files.remove(f"checkpoints/{ident}")
        return None

    def save_checkpoint(self, task: FemtoTask, payload: bytes) -> None:
        """Put a checkpoint in place, and renew the lease, which is the fence."""
        root, data = self.files.root, task.data
        if task.size_bytes is None:  # of attach(): the payload was not read
            try:
                data, _ = _look_afresh(_read_record, root + task.path, task.id)
            except FileNotFoundError:
                os.stat(root)  # gone: disk trouble
                raise self.lease_lost(task) from None
        record = _header(data) + payload
        with self.files.replacement(self.clock.new_id(), _header(record), record) as aside:
            if not os.path.isdir(f"{root}checkpoints"):
                _make_dir(f"{root}checkpoints", 0o777, self.files.is_durable)
            with self.keys.lock_of(task.id), self.lock:
                self.renew(task)  # it holds for far longer than the next line
                _move_over(root + aside, f"{root}checkpoints/{task.id}")
        self.files.commit_dir("checkpoints")
        _set_checkpoint(task, payload)

    # From in flight

    def end_lease(self, task: FemtoTask, target: str) -> str:
        """Rename the task of a delivery from its lease to `target`; return the path it got.

        Used by the holder to finish, fail, requeue and extend. Leases of other workers end in
        reclaim() and quarantine(). Raises LeaseLost if the lease is gone.
        """
        lease = _lease_of(task)
        if _is_keyed(task.id):
            with self.keys.lock_of(task.id):
                gone_to = self._end(task, lease, target, self.keys.move)
        else:
            gone_to = self._end(task, lease, target, self.files.move)
        if task.checkpoint is not None and _is_end(target):
            self.files.remove(f"checkpoints/{task.id}")
        return gone_to

    def _end(self, task: FemtoTask, lease: _Lease, target: str, move: Callable[..., str]) -> str:
        """Move a task out of its lease, with the lock of its key held if it has one."""
        is_ours = functools.partial(self._is_ours, task, lease, time.monotonic())
        with self.lock:
            try:
                gone_to = move(lease.path, target, is_ours=is_ours)
            except FileNotFoundError:
                directory = os.path.dirname(target)
                # A directory that is gone is disk trouble.
                os.stat(self.files.root + (directory if directory in _STATE_DIRS else ""))
                raise self.lease_lost(task) from None
            lease.outcome = _OUTCOMES.get(target.partition("/")[0], "")
        return gone_to

    def _is_ours(self, task: FemtoTask, lease: _Lease, began_s: float) -> bool:
        """Whether only a person can have ended a lease, if not we: it was running when we began,
        and neither this delivery nor the queue object had ended it."""
        has_ended = lease.outcome or lease.closes != self.lease_dir.closes
        return not has_ended and self.left_ns(task) / 1e9 + time.monotonic() > began_s

    def lease_lost(self, task: FemtoTask) -> LeaseLost:
        """Return the error that says how long ago the lease of a task ended, or why else."""
        late_ns = self.clock.now_ns() - _stamp_of(task.path)
        if late_ns >= 0:
            why = f"its lease ran out {late_ns / 1e9:.3f} s ago; it was taken back, or has ended"
        else:
            why = "it is not leased by this delivery any more: finished, moved, or given up before"
        return LeaseLost(task.id, late_ns >= 0, why)

    def finish(self, task: FemtoTask, keep: bool) -> None:
        """Move a leased task to done/, or remove it."""
        path = _lease_of(task).path
        if keep:
            gone_to = self.end_lease(task, f"done/{task.id}")
            if self.files.is_durable:
                self.files.commit(gone_to)
            return
        # Sync the lease first: after power loss the task must not be in pending/ again.
        with contextlib.suppress(FileNotFoundError):  # the lease directory is gone: LeaseLost below
            self.files.commit(path)
        directory = os.path.dirname(path)
        self.end_lease(task, "")
        self.files.commit_dir(directory)

    def requeue(self, task: FemtoTask, target: str) -> None:
        """Move a leased task back to pending/, or to scheduled/."""
        gone_to = self.end_lease(task, target)
        self.backlog.note_enqueued(gone_to)
        self.files.commit(gone_to)

    def requeue_uncounted(self, task: FemtoTask) -> None:
        """Return a task to the front of pending/, and do not count this delivery."""
        self.requeue(task, _front_path(task.id, _attempts_of(_lease_of(task).path) - 1))

    def fail(self, task: FemtoTask, error: str | BaseException | None) -> None:
        """Move a leased task to failed/ with its reason."""
        target = f"failed/{task.id}"
        self._dead_letter(task.id, error, lambda: self.end_lease(task, target))

    def extend(self, task: FemtoTask, length_ns: int) -> None:
        """Rename a lease to another deadline: length_ns from now."""
        lease = _lease_of(task)
        with self.keys.lock_of(task.id), self.lock:
            if lease.is_renewed:  # the next renewal is due only then
                length_ns = max(length_ns, lease.length_ns)
            deadline_ns = self.clock.now_ns() + length_ns
            renewed, path = False, _with_stamp(lease.path, deadline_ns)
            try:
                self.end_lease(task, path)
                renewed = True
            finally:  # also when Ctrl-C came between the rename and here
                if renewed or os.path.lexists(self.files.root + path):
                    lease.path = path
            self.backlog.next_end_ns = min(self.backlog.next_end_ns, deadline_ns)

    def is_leased(self, task: FemtoTask) -> bool:
        """Whether the lease is still there, whatever its deadline says."""
        return self.files.exists(task.path)

    def left_ns(self, task: FemtoTask) -> int:
        """Return how long a lease still lasts."""
        return _stamp_of(task.path) - self.clock.now_ns()

    def renew(self, task: FemtoTask, wait: bool = True) -> None:
        """Extend a lease by its own length, but never to less than is left.

        Raises BlockingIOError if the lock of its key is not free and wait is False.
        """
        with self.keys.lock_of(task.id, wait), self.lock:
            self.extend(task, max(_lease_of(task).length_ns, self.left_ns(task)))

    def orphan(self, lease: str) -> None:
        """Mark a lease of ours as abandoned: the next reclaim job returns its task to pending/."""
        with self.lock:
            self.lease_dir.orphans.add(lease.partition("/")[2])
            self.backlog.next_end_ns = 0

    def reclaim(self, entry: _Entry) -> None:
        """End a lease that is over, orphaned or of a dead worker: the task returns to its place."""
        # RACE: close() in another thread than the one that reads it: nobody got this delivery.
        attempts = (entry.attempts or 0) - (entry.name in self.lease_dir.unread)
        front = _front_path(entry.id, attempts)
        try:
            target = self.keys.move(entry.path, front, wait=False)
        except FileNotFoundError:
            return  # RACE: its holder settled it, or another observer was first
        except OSError as error:
            if entry.directory == self.lease_dir.directory:
                self.lease_dir.orphans.add(entry.name)  # we are alive: only this mark ends it
            if isinstance(error, BlockingIOError):
                return  # RACE: another process is at work on its key; next time
            raise
        self.lease_dir.orphans.discard(entry.name)
        self.backlog.note_enqueued(target)

    def reclaim_all(self, directory: str, boot: str | None) -> None:
        """Reclaim the leases of a directory whose lock we hold; None: whatever their boot."""
        first_error = _FirstError()
        for entry in self.files.entries(directory):
            if entry.boot != _DETACHED and boot in (None, entry.boot):
                with first_error:
                    self.reclaim(entry)
        first_error.raise_if_any()

    # To failed/, and back

    def _dead_letter(
        self, ident: str, error: str | BaseException | None, move: Callable[[], object]
    ) -> None:
        """Move a task to failed/ with its reason. The rename comes first, and checks the lease: a
        worker that lost it never writes a reason for another delivery. CRASH: after the rename, the
        task is in failed/ without a reason."""
        reason_path = f"failed/{ident}.error"
        if error is None:
            move()
            _unlink_if_exists(self.files.root + reason_path)  # of a failure retried by hand
        else:
            text = _reason(error).encode("utf-8", "backslashreplace")
            aside = f"{self.clock.new_id()}.error"
            with self.files.replacement(aside, text, b"") as path:
                move()
                _move_over(self.files.root + path, self.files.root + reason_path)
        self.files.commit(f"failed/{ident}")

    def _dead_letter_exhausted(self, waiting: str, attempts: int) -> None:
        """Move a task that was delivered too often to failed/."""
        reason = f"delivered {attempts} times without done() or fail(): max_attempts reached"
        with contextlib.suppress(BlockingIOError):  # RACE: its payload is being replaced
            self.quarantine(waiting, reason, wait=False)

    def quarantine(self, source: str, reason: str, wait: bool = True) -> None:
        """Make a dead letter of a task that can't be delivered, and say so in the log.

        If its reason can't be written, move it without one. If that fails too, move it to the back
        of pending/: it must not block other tasks, whose work may free disk space.
        """
        ident = _id_of(source)
        back = _task_name(self.clock.next_order(), _attempts_of(source), ident)
        try:
            self._quarantine(source, back, reason, wait)
        except FileNotFoundError:
            return  # RACE: another worker took it, or quarantined it first
        except BlockingIOError:
            raise
        except OSError:
            try:
                self._quarantine(source, back, None, wait)
            except FileNotFoundError:
                pass  # it has moved: what failed was its reason
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    # RACE: another worker took it. Or it has moved, and what failed was the sync.
                    self.keys.move(source, f"pending/{back}", wait)
                raise
        self.files.remove(f"checkpoints/{ident}")
        _log().error("task %s is in failed/: %s", ident, reason)

    def _quarantine(self, source: str, back: str, reason: str | None, wait: bool) -> None:
        """Move a task to failed/; under the name `back` if a dead letter of its id is there."""
        ident = _id_of(source)
        if os.path.lexists(f"{self.files.root}failed/{ident}"):
            # By hand. It stays as it is, and so does its reason.
            self.keys.move(source, f"failed/{back}", wait)
            return
        target = f"failed/{ident}"
        move = functools.partial(self.keys.move, source, target, wait, is_ours=_always)
        self._dead_letter(ident, reason, move)

    def requeue_failed(self, source: str) -> bool:
        """Put a failed task at the back, its attempts at 0; False if it is not there any more."""
        ident = _id_of(source)
        target = f"pending/{_task_name(self.clock.next_order(), 0, ident)}"
        try:
            with self.keys.lock_of(ident) as held:
                if held is not None:
                    self.keys.reserve(held, source, target)
                # The reason goes first: after the rename, a new one may be written at any time.
                _unlink_if_exists(f"{self.files.root}failed/{ident}.error")
                self.keys.move(source, target, is_ours=_always)
        except FileNotFoundError:
            os.stat(f"{self.files.root}pending")  # gone: disk trouble
            return False  # RACE: another process retried or removed it
        self.backlog.note_enqueued(target)
        self.files.commit(target)
        return True

    # From scheduled/

    def enqueue_scheduled(self, source: str, wait: bool = True) -> str:
        """Move one task that is due to the back of pending/; return its path there.

        It is synced: on btrfs, a later push's sync of pending/ alone left the task in scheduled/
        as well after power loss.
        """
        name = _task_name(self.clock.next_order(), _attempts_of(source), _id_of(source))
        path = self.keys.move(source, f"pending/{name}", wait, _always)
        self.files.commit(path)
        return path


# ==================================================================================================
# 14. Housekeeping: the periodic jobs of pop(): list pending/, enqueue due tasks, reclaim leases of
#     late and dead workers, repair keys, purge done/, remove stale files.
#     Invariant: an OSError of a job never stops deliveries; pop() raises it when no task waits.
# ==================================================================================================

_BASE_INTERVAL_S = 0.4  # between two looks for due tasks and dead workers
_LOOK_INTERVAL_S = 0.1  # between two looks at PAUSED and at our lease directory
_REPAIR_INTERVAL_S = 600.0
_LONGEST_PAUSE_S = 20.0
_LEFTOVER_NS = 3600 * 10**9
_IDLE_NS = 60 * 10**9
_PURGE_SLICE = 1000  # entries of done/ that one look at them takes, at least


class _PeriodicJob:
    """A job that pop() repeats: every_s seconds apart, or 20 times its last duration (at most
    _LONGEST_PAUSE_S) if that is longer."""

    def __init__(self, run: Callable[[_Housekeeper], None], every_s: float) -> None:
        # A plain function: a bound method would make a cycle, which only the garbage collector
        # could free.
        self._run, self.every_s, self.at_s = run, every_s, 0.0
        self.rested_s = 0.0  # when it may run again, if there is a reason to
        self.failed = False

    def run(self, housekeeper: _Housekeeper) -> None:
        """Run it now, and set its next time."""
        started_s, self.failed = time.monotonic(), True
        try:
            self._run(housekeeper)
            self.failed = False
        finally:  # a failed job waits too: it must not run at each pop()
            ended_s = time.monotonic()
            # It may only have hung once.
            pause_s = min(20 * (ended_s - started_s), _LONGEST_PAUSE_S)
            self.rested_s = ended_s + pause_s
            self.at_s = ended_s + max(self.every_s, pause_s)


_Transitions = _Worker


class _Housekeeper:
    """Lists pending/, enqueues due tasks, reclaims leases, removes leftovers. `lock` is the
    queue's: it is held while a job runs."""

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock, self._backlog = worker.files, worker.clock, worker.backlog
        self._lease_dir, self._keys, self._worker = worker.lease_dir, worker.keys, worker
        self._lock, self._keep_done = worker.lock, worker.keep_done
        timeout_stale_ms, keep_done = worker.timeout_stale_ms, worker.keep_done
        self._young_ns = None if timeout_stale_ms is None else _lease_length_ns(timeout_stale_ms)
        self._due_seen_ns = 0  # st_mtime of scheduled/ when it was listed last
        self.finished = 0  # tasks that this object finished since done/ was purged last
        self._done_scan: Any = None  # an os.scandir() of done/ that is being purged
        self.next_run_s = 0.0
        self.look_s, self._is_paused = 0.0, False  # when _look_around() is due, what it saw
        interval_s = min(_BASE_INTERVAL_S, _lease_length_ns(timeout_stale_ms) / 4e9)
        self.listing = _PeriodicJob(_Housekeeper._list_pending, every_s=1.0)
        self._enqueuing = _PeriodicJob(_Housekeeper._enqueue_due, _BASE_INTERVAL_S)
        self._reclaiming = _PeriodicJob(_Housekeeper.reclaim, interval_s)
        self._repairing = _PeriodicJob(_Housekeeper._repair_keys, _REPAIR_INTERVAL_S)
        self._purging = _PeriodicJob(_Housekeeper._purge_done, _BASE_INTERVAL_S)
        sweeping = _PeriodicJob(_Housekeeper.remove_stale_files, _REPAIR_INTERVAL_S)
        self._jobs: tuple[_PeriodicJob, ...]
        self._jobs = (self._enqueuing, self._reclaiming, self._repairing, sweeping)
        if not isinstance(keep_done, bool):
            self._jobs += (self._purging,)

    # What runs when

    def run_due(self) -> None:
        """Run the jobs whose time has come: called when that of next_run_s has."""
        if not self._lock.acquire(blocking=False):
            return  # another thread runs them
        try:
            # What is nearly due too: a waiting worker is woken once for all of them.
            soon_s = time.monotonic() + _BASE_INTERVAL_S / 5
            for job in self._jobs:
                if soon_s >= job.at_s or (job is self._repairing and self._keys.needs_repair):
                    self._run_job(job)
            if time.monotonic() >= self.listing.at_s:
                self.listing.run(self)
            self.next_run_s = min(job.at_s for job in (*self._jobs, self.listing))
        finally:
            self._lock.release()

    def run_overdue(self) -> None:
        """Run the jobs for which a time has come that is known. Call it with the lock held."""
        if _wall_ns() >= self._backlog.next_due_ns:
            self._run_job(self._enqueuing)
        if self._clock.now_ns() >= self._backlog.next_end_ns:
            self._run_job(self._reclaiming)

    def refill(self) -> bool:
        """When the batch is used up, run overdue jobs and list pending/.

        Returns False if there is nothing to deliver. Raises the OSError of a job then.
        """
        with self._lock:
            if self._backlog.names:
                return True  # another thread did
            self.run_overdue()
            self.listing.run(self)
            if self._backlog.names:
                return True
            is_rested = time.monotonic() >= self._enqueuing.rested_s
            changed = [self._enqueuing] if is_rested and self._scheduled_changed() else []
            jobs = changed + [job for job in self._jobs if job.failed and job not in changed]
            for job in jobs:
                job.run(self)
            return bool(jobs)  # none failed: what they moved is to be listed

    def _scheduled_changed(self) -> bool:
        """Whether a task came to scheduled/, or left it, since it was listed."""
        return os.stat(f"{self._files.root}scheduled").st_mtime_ns != self._due_seen_ns

    def _look_around(self) -> bool:
        """Open our lease directory, if it is missing, and return whether the queue is paused.

        Looked at each _LOOK_INTERVAL_S: a pop() of an almost empty queue, which lists pending/
        each time, should not pay for it. A lost claim makes the lease directory suspect.
        """
        now_s = time.monotonic()
        if now_s >= self.look_s or self._is_paused or self._lease_dir.is_suspect:
            self._worker.open_lease_dir()
            self._is_paused = self._files.is_paused
            self.look_s = now_s + _LOOK_INTERVAL_S
        return self._is_paused

    def _run_job(self, job: _PeriodicJob) -> None:
        """Run a maintenance job and defer its OSError. One unreadable directory must not stop
        deliveries; the error is raised when pop() has nothing to deliver."""
        try:
            job.run(self)
        except OSError:
            self._backlog.forget_times()

    def rest_s(self) -> float:
        """Return the time until a task comes due, a lease ends or a job is to run."""
        end_ns = self._backlog.next_end_ns - self._clock.now_ns()
        due_ns = self._backlog.next_due_ns - _wall_ns()
        return min(end_ns / 1e9, due_ns / 1e9, self.next_run_s - time.monotonic())

    def close(self) -> None:
        """Close the listing of done/ that is kept open between two runs."""
        scan, self._done_scan = self._done_scan, None
        if scan is not None:
            scan.close()

    # The jobs

    def _repair_keys(self) -> None:
        """Promote payloads and remove states whose task is gone."""
        self._keys.repair()

    def _list_pending(self) -> None:
        """List the oldest names, unless the queue is paused."""
        if self._look_around():
            self._backlog.clear()
        elif not self._backlog.refill() and not self._files.is_shared:
            self._files.shrink_pending(self._clock.new_id)

    def _enqueue_due(self) -> None:
        """Move what is due to the back of pending/, in the order in which it came due."""
        now_ns = _wall_ns()
        self._backlog.next_due_ns = _NEVER_NS
        self._due_seen_ns = os.stat(f"{self._files.root}scheduled").st_mtime_ns
        first_error = _FirstError()
        for entry in self._files.entries("scheduled"):
            if entry.stamp_ns > now_ns:
                self._backlog.next_due_ns = entry.stamp_ns
                break
            with first_error:
                try:
                    self._worker.enqueue_scheduled(entry.path, wait=False)
                except FileNotFoundError:
                    continue  # RACE: another worker moved it
                except BlockingIOError:
                    # RACE: another process is at work on its key; next time
                    self._backlog.next_due_ns = entry.stamp_ns
        first_error.raise_if_any()

    def reclaim(self) -> None:
        """Reclaim leases that are past their deadline or held by dead workers.

        A directory that can't be read is no reason to leave the others: its error comes last.
        """
        first_error = _FirstError()
        with self._lock:  # check(repair=True) calls this too
            self._backlog.next_end_ns = _NEVER_NS
            for directory in self._files.node_dirs():
                with first_error:
                    self._reclaim_from(directory, first_error)
        first_error.raise_if_any()

    def _reclaim_from(self, directory: str, first_error: _FirstError) -> None:
        """Reclaim the ended leases of one worker, and all of them if it is dead."""
        now_ns = self._clock.now_ns()
        is_own = directory == self._lease_dir.directory
        orphans = self._lease_dir.orphans if is_own else set()
        marked = {*orphans}
        leases = self._files.entries(directory)
        orphans -= marked.difference(entry.name for entry in leases)  # gone, or never made
        running: list[_Entry] = []
        ended: list[_Entry] = []
        for entry in leases:
            is_over = entry.name in orphans or entry.stamp_ns <= now_ns
            (ended if is_over else running).append(entry)
        for entry in ended:
            is_final = self._lease_dir.deadline_is_final(entry) or entry.name in orphans
            if is_final or not self._renewed_recently(entry):
                with first_error:
                    self._worker.reclaim(entry)
        if running:
            self._backlog.next_end_ns = min(self._backlog.next_end_ns, running[0].stamp_ns)
        has_ours = any(entry.boot == self._clock.boot for entry in leases)
        if not is_own and (has_ours or not running):
            self._reclaim_dead_worker(directory, has_ours)

    def _renewed_recently(self, entry: _Entry) -> bool:
        """Whether a lease was taken or renewed less than our own lease length ago.

        Asked of other hosts' leases that have passed their deadlines: by our clock, and the queue
        clocks of hosts drift apart (a suspend, an NTP step after the boot). The wall clocks agree,
        and st_ctime is set by rename(). One in the future tells nothing: the deadline counts.
        """
        if self._young_ns is None:
            return False
        try:
            status = _look_afresh(os.lstat, self._files.root + entry.path)
        except FileNotFoundError:
            return False  # RACE: settled or reclaimed meanwhile
        return 0 <= _wall_ns() - status.st_ctime_ns < self._young_ns

    def _reclaim_dead_worker(self, directory: str, has_ours: bool) -> None:
        """Reclaim a dead worker's leases and remove its directory; leave a living one alone.

        RACE: where flock on a directory is a mount's own affair (FUSE: GlusterFS, sshfs), another
        host's idle worker looks dead. It would make its directory again each second: so one that
        was never seen with leases of this boot is removed only when it is a minute old.
        """
        path = self._files.root + directory
        lock = _open_lease_lock(path)
        if lock is None:
            return
        try:
            if lock.try_exclusive() and lock.is_at_path():
                self._worker.reclaim_all(directory, self._clock.boot)
                self._keys.needs_repair = True  # it may have died before it promoted a payload
                self.next_run_s = 0.0
                if has_ours or not 0 <= _wall_ns() - os.fstat(lock.fd).st_mtime_ns < _IDLE_NS:
                    _remove_empty_dir(path)  # not with another boot's leases, foreign files
        finally:
            lock.close()

    def node_stats(self, directory: str) -> NodeStats:
        """Count the leases of one worker, and say whether it lives."""
        leases = self._files.entries(directory)
        now_ns = self._clock.now_ns()
        of_this_boot = any(entry.boot == self._clock.boot for entry in leases)
        return NodeStats(
            node=_node_of(directory),
            inflight=len(leases),
            expired=sum(entry.stamp_ns <= now_ns for entry in leases),
            liveness=_liveness(self._files.root + directory, of_this_boot),
        )

    def _purge_done(self) -> None:
        """Delete a slice of what was done more than keep_done seconds ago.

        Bounded, whatever is in done/: at most twice as many entries are looked at as this object
        has finished since, or _PURGE_SLICE. The next slice goes on in the same listing.
        """
        most = max(_PURGE_SLICE, 2 * self.finished)
        self.finished = 0
        if self._done_scan is None:
            self._done_scan = os.scandir(f"{self._files.root}done")
        names = [entry.name for entry in itertools.islice(self._done_scan, most)]
        before_s = time.time() - self._keep_done
        for name in filter(_FORMS["done"], names):
            _unlink_if_older(f"{self._files.root}done/{name}", before_s)
        self._purging.every_s = _BASE_INTERVAL_S
        if len(names) < most:
            self.close()
            self._purging.every_s = min(max(_BASE_INTERVAL_S, self._keep_done / 10), 600.0)

    def remove_stale_files(self) -> None:
        """Remove what a killed process left in creating/: it was never acknowledged."""
        for path in self.stale_files():
            if path.endswith(".pending"):
                _remove_empty_dir(self._files.root + path)
            # A directory is foreign, whatever its name.
            elif not os.path.isdir(self._files.root + path):
                _unlink_if_exists(self._files.root + path)

    def stale_files(self) -> list[str]:
        """Return the files in creating/ that are an hour old, and checkpoints, an hour old, whose
        task is gone: its worker was killed between the two, or a person ended it."""
        before_ns = self._clock.now_ns() - _LEFTOVER_NS
        entries = self._files.entries("creating")
        stale = [entry.path for entry in entries if _order_of(entry.id) < before_ns]
        return [f"checkpoints/{ident}" for ident in self._lost_checkpoints()] + stale

    def _lost_checkpoints(self) -> list[str]:
        """Return the ids of old checkpoints without a task; see stale_files()."""
        before_ns = _wall_ns() - _LEFTOVER_NS
        old = set()
        for entry in self._files.entries("checkpoints"):
            with contextlib.suppress(FileNotFoundError):  # RACE: its task has just ended
                if os.lstat(self._files.root + entry.path).st_mtime_ns < before_ns:
                    old.add(entry.id)
        for _ in range(2):  # while we look, tasks move both ways
            if old:
                old -= {it.id for it in self._files.find("scheduled", "pending", "inflight")}
        return sorted(old)


# ==================================================================================================
# 15. Taking: one look for a task, the oldest or a certain one, with the jobs that are due; and
#     reading a task without a lease.
#     Invariant: a look returns None only if it found no task to lease, the queue is paused, other
#     workers won all claims of _MAX_LISTINGS listings, or (wait=False) a key's lock was not free.
# ==================================================================================================


def _read_task(files: _Files, entry: _Entry, anchor_ns: int, data: bool = True) -> FemtoTask | None:
    """Return the task of an entry, without a lease; None if it is not there.

    data=False: by the first line of its file alone; size_bytes is None if that is not valid.
    """
    path, attempts = files.root + entry.path, entry.attempts
    if attempts is None and not _is_end(entry.path):
        attempts = 0
    others: dict[str, Any] = {"_path": entry.path, "_anchor_ns": anchor_ns}
    try:
        if data:
            payload, key = _look_afresh(_read_record, path, entry.id)
        else:
            payload = b""
            key, others["size_bytes"] = _look_afresh(_read_head, path)
    except FileNotFoundError:
        return None  # RACE: it moved on
    if entry.directory == "failed":
        with contextlib.suppress(PermissionError):  # another user's: the task is shown all the same
            others["error"] = files.reason_of(entry.id)
    return FemtoTask(entry.id, payload, attempts, key, **others)


class _Taker:
    """Looks for tasks to lease. `lock` is the queue's."""

    def __init__(self, worker: _Worker) -> None:
        self._files, self._clock, self._backlog = worker.files, worker.clock, worker.backlog
        self._keys, self._lease_dir, self._worker = worker.keys, worker.lease_dir, worker
        self._house, self._lock, self._length_ns = worker.house, worker.lock, worker.length_ns

    def length_of(self, lease_ms: float | None) -> int:
        """Return the length of a delivery's lease in nanoseconds; None: the queue's."""
        return (
            self._length_ns
            if lease_ms is None
            else _lease_length_ns(_positive("lease_ms", lease_ms))
        )

    def take_oldest(self, length_ns: int) -> FemtoTask | None:
        """Run the jobs that are due, and claim the oldest task; None if there is none."""
        listings = 0
        while True:
            if time.monotonic() >= self._house.next_run_s:
                self._house.run_due()
            name = self._backlog.next()
            if not name:
                listings += 1
                if listings > _MAX_LISTINGS or not self._house.refill():
                    return None
                continue
            task = self._worker.claim(f"pending/{name}", length_ns)
            if task is not None:
                return task

    def finder_of(
        self, key: str | None, id: str | None, lease_ms: float | None, wait: bool
    ) -> tuple[Callable[[], FemtoTask | None], str]:
        """Check the arguments of take(); return what looks once, and the line to wait in.

        wait=False: a look finds nothing if another process, which may be stopped, has the lock of
        the key.
        """
        length_ns = self.length_of(lease_ms)
        if (key is None) == (id is None):
            raise TypeError("take needs a key or an id")
        if id is not None:
            _check_id(id)
            return functools.partial(self._take_id, id, length_ns, wait), f"#{id}"
        name = _encode_key(key)
        return functools.partial(self._take_key, name, length_ns, wait), name

    def _take_key(self, name: str, length_ns: int, wait: bool) -> FemtoTask | None:
        """Look once for the task of an encoded key."""
        if not self._keys.may_have_task(name):
            self._run_jobs()
            return None
        tag = _key_tag(name)
        return self._take(
            _new_name(0, tag), functools.partial(self._path_of_key, name, tag), length_ns, wait
        )

    def _take_id(self, ident: str, length_ns: int, wait: bool) -> FemtoTask | None:
        """Look once for the task of an id."""
        return self._take(ident, functools.partial(self._path_of_id, ident), length_ns, wait)

    def _take(
        self, ident: str, find: Callable[[], str], length_ns: int, wait: bool
    ) -> FemtoTask | None:
        """Claim the task at the path that find() returns ("": none), under the lock of its key."""
        self._run_jobs()
        if self._files.is_paused:
            return None
        with self._lock:
            self._house.run_overdue()
        for _ in range(_MAX_LISTINGS):
            if self._lease_dir.is_suspect:
                self._worker.open_lease_dir()
            try:
                with self._keys.lock_of(ident, wait):
                    path = find()
                    task = self._worker.claim(path, length_ns) if path else None
            except BlockingIOError:
                return None
            if task is not None or not path:
                return task  # RACE: else a pop() was quicker, and we see it in flight now
        return None

    def _run_jobs(self) -> None:
        if time.monotonic() >= self._house.next_run_s:
            self._house.run_due()

    def _path_of_key(self, name: str, tag: str) -> str:
        """Return where a key's task is to be had; one in scheduled/ that is due is moved."""
        with self._keys.lock(tag) as held:  # again: the caller has it
            path = self._keys.find(held, name) or ""
        if _state_of(path) == "scheduled" and _stamp_of(path) <= _wall_ns():
            with contextlib.suppress(FileNotFoundError):  # RACE: a person cancelled it
                return self._worker.enqueue_scheduled(path)
        return path if _state_of(path) == "pending" else ""

    def _path_of_id(self, ident: str) -> str:
        """Return where a task of that id waits, "" if it does not."""
        if self._files.exists(f"pending/{ident}"):  # never delivered
            return f"pending/{ident}"
        entry = self._files.find_id(ident, "scheduled", "pending")  # as it moves
        return entry.path if entry else ""


# ==================================================================================================
# 16. Waiting: for an event in the directories, in threads and in coroutines.
#     Invariant: a wait has its watcher before its last look, so that what comes after that look
#     ends the sleep. Coroutines only wait: one thread looks for them.
# ==================================================================================================

# inotify(7): created or moved here; for data_dir also deleted or moved away; directories only.
_IN_COMES, _IN_GOES, _IN_ONLYDIR = 0x100 | 0x80, 0x200 | 0x40, 0x01000000
_LINGER_S = 1.0  # for which a thread waits for the next coroutine
_MAX_IDLE = 4  # watchers that are kept: a user has 128 instances of inotify by default
_Found = TypeVar("_Found")  # by a wait


class _Watcher:
    """Sleeps until a file comes to pending/ or scheduled/, PAUSED is gone, or wake() is called.

    One for each wait. Without inotify, only wake() ends the sleep. sees_all: no event is missed,
    as only this kernel writes there; else a wait must be short.
    """

    def __init__(self, root: str) -> None:
        self._root, self._libc = root, _libc()
        self._fds: list[int] = []  # of inotify, and the ends of a pipe for wake()
        self._no_wake = threading.Lock()  # the same where there is no inotify: wake() unlocks it
        self._no_wake.acquire()
        fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if self._libc else -1
        if fd >= 0:  # -1: too many
            self._fds.append(fd)
            self._fds += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _fork_hooks[self] = _Watcher.close  # what a child reads, its parent never hears
        self.sees_all = self._watch() and _fs_type(root) in _LOCAL_TYPES

    def _watch(self) -> bool:
        """Watch the directories, and those in their places if they were replaced."""
        watched = [("pending", _IN_COMES), ("scheduled", _IN_COMES), ("", _IN_COMES | _IN_GOES)]
        watches = [
            self._libc.inotify_add_watch(fd, os.fsencode(self._root + name), mask | _IN_ONLYDIR)
            for fd in self._fds[:1]
            for name, mask in watched
        ]
        self._pushed = watches[0].to_bytes(4, sys.byteorder, signed=True) if watches else b""
        return min(watches, default=-1) >= 0

    def sleep(self, seconds: float) -> None:
        """Return at the next event, or when the time is over."""
        import select

        if not self._fds:
            self._no_wake.acquire(timeout=seconds)
            return
        poll = select.poll()
        for fd in self._fds[:2]:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(int(seconds * 1000) + 1):
            with contextlib.suppress(BlockingIOError):
                events = os.read(fd, 1 << 16)
                if fd == self._fds[0] and not self._is_one_push(events):
                    # Before the next look: pending/ may be a new directory (shrink_pending).
                    self.sees_all = self._watch() and self.sees_all

    def _is_one_push(self, events: bytes) -> bool:
        """Whether that is one event, of pending/: 16 bytes, from the watch to the name's length."""
        name_bytes = int.from_bytes(events[12:16], sys.byteorder)
        return events.startswith(self._pushed) and len(events) == 16 + name_bytes

    def wake(self) -> None:
        """End the sleep, or the next one; in any thread, or in a signal handler."""
        if not self._fds:
            with contextlib.suppress(RuntimeError):  # it was woken before
                self._no_wake.release()
            return
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._fds[2], b"!")

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        if os is not None:  # None: the interpreter ends
            self.close()


class _Request:
    """A coroutine that waits: how to look for it, and the answer."""

    def __init__(self, look: Callable[[], FemtoTask | None], line: str, closes: int) -> None:
        import asyncio
        from concurrent.futures import Future

        self.look, self.line, self.closes, self.is_over = look, line, closes, False
        self.loop = asyncio.get_running_loop()
        self.answer: Future[FemtoTask | None] = Future()


class _Waits:
    """The waits on one queue object. A look is a function that returns what it found, or None."""

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._house, self._lease_dir = worker, worker.house, worker.lease_dir
        self._longest_poll_s = worker.poll_interval_s
        self._watchers: set[_Watcher] = set()  # of the waits that go on
        self._idle: list[_Watcher] = []  # for the next ones; an old event wakes them for nothing
        # Of coroutines, in their order, by their id(). Weak: their loops and frames hold them.
        self._requests: weakref.WeakValueDictionary[int, _Request] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # held as the thread that serves them starts and ends
        self._is_serving, self._linger_s = False, 0.0  # until when it waits for the next one
        self._server: _Watcher | None = None  # of that thread

    def wait_for(
        self, look: Callable[[], _Found | None], end_s: float, has_events: bool = True
    ) -> _Found | None:
        """Look until something is found, the time has come, or the queue is closed: None.

        has_events=False: it may be found without an event, as when other workers finish a task.
        """
        closes = self._lease_dir.closes
        found = self._look(look, closes)
        if found is not None or time.monotonic() >= end_s:
            return found
        with self._watcher() as watcher:
            return self._wait(watcher, look, end_s, closes, has_events)

    def _wait(
        self,
        watcher: _Watcher,
        look: Callable[[], _Found | None],
        end_s: float,
        closes: int,
        has_events: bool,
    ) -> _Found | None:
        """Look, and sleep, by turns."""
        pauses_s = _backoff_s(self._longest_poll_s)
        while True:
            found = self._look(look, closes)
            left_s = end_s - time.monotonic()
            if found is not None or left_s <= 0 or self._lease_dir.closes != closes:
                return found
            rest_s, pause_s = self._house.rest_s(), next(pauses_s)
            if rest_s <= 0:  # a job failed, or another thread runs it
                rest_s = pause_s
            elif not (watcher.sees_all and has_events):
                rest_s = min(rest_s, pause_s)
            watcher.sleep(min(left_s, rest_s))

    def _look(self, look: Callable[[], _Found | None], closes: int) -> _Found | None:
        """Look once, for a wait that began when the queue had been closed `closes` times."""
        found = look()
        if self._lease_dir.closes == closes:
            return found
        # RACE: closed as we looked. The task goes back, and the lease directory is given up again
        # if we opened it; if it is in use again, it has leases, or will be opened for the next.
        self._give_back(found)
        with (
            self._worker.lock,
            contextlib.suppress(OSError),
        ):  # it is gone; or let the next look see
            if not os.listdir(self._lease_dir.path):
                self._lease_dir.close(_no_op)
        return None

    def _give_back(self, found: object) -> None:
        """Return a task that was found for a wait that is over to its place, uncounted."""
        if not isinstance(found, FemtoTask):
            return
        try:
            self._worker.requeue_uncounted(found)
        except LeaseLost:
            pass  # close() did
        except OSError as error:
            _log().warning("task %s waits for the end of its lease: %s", found.id, error)

    @contextlib.contextmanager
    def _watcher(self) -> Iterator[_Watcher]:
        """Have a watcher for the block."""
        try:
            watcher = self._idle.pop()
        except IndexError:
            watcher = _Watcher(self._worker.files.root)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if watcher.sees_all and len(self._idle) < _MAX_IDLE:
                self._idle.append(watcher)

    def end_all(self, error: BaseException | None = None) -> None:
        """End all waits, after the count of close() has grown; or those of coroutines, with an
        error."""
        for watcher in [*self._watchers]:
            watcher.wake()
        for ref in self._requests.valuerefs():
            request = ref()
            if request is not None:
                self._answer(request, None, error)

    # Coroutines

    async def wait_for_async(
        self, look: Callable[[], FemtoTask | None], end_s: float, line: str
    ) -> FemtoTask | None:
        """Do as wait_for() does, without blocking the event loop; first come, first served in a
        line. A look that takes long holds up the others, not their loops."""
        import asyncio

        request = _Request(look, line, self._lease_dir.closes)
        left_s = max(0, end_s - time.monotonic())
        # The loop holds the request by its timer; the thread does not.
        timer = request.loop.call_later(min(left_s, _FOREVER_NS / 1e9), self._end, request)
        try:
            request.is_over = left_s == 0
            self._start(request)
            return await asyncio.wrap_future(request.answer)
        except BaseException:  # cancelled
            if not request.answer.cancel() and request.answer.exception() is None:
                self._give_back(request.answer.result())  # RACE: the thread was quicker
            raise
        finally:
            timer.cancel()
            self._requests.pop(id(request), None)

    def _end(self, request: _Request) -> None:
        """Have a last look for a coroutine whose time is over."""
        request.is_over = True
        self._wake_server()

    def _wake_server(self) -> None:
        server = self._server
        if server is not None:  # else it is yet to look
            server.wake()

    def _start(self, request: _Request) -> None:
        """Have the thread look for a coroutine from now on."""
        with self._lock:
            self._requests[id(request)] = request
            self._linger_s = time.monotonic() + _LINGER_S
            if self._is_serving:
                self._wake_server()
                return
            self._is_serving = True
            try:
                threading.Thread(target=self._serve, daemon=True).start()
            except BaseException:
                self._is_serving = False
                raise

    def _serve(self) -> None:
        """Look for the coroutines until none has waited for a while: the thread."""
        try:
            with self._watcher() as self._server:
                while self._is_serving:
                    closes = self._lease_dir.closes
                    self._wait(self._server, self._look_for_all, float("inf"), closes, True)
        except BaseException as error:
            self._is_serving = False
            self.end_all(error)
        finally:
            self._server = None

    def _look_for_all(self) -> bool | None:
        """Look for the first coroutine of each line, and for each whose time is over. Return True
        if none has waited for a while: it ends the thread."""
        empty_lines = set()
        for ref in self._requests.valuerefs():
            request = ref()
            # A loop that does not run could not take its task.
            if request is None or not request.loop.is_running():
                continue
            is_due = request.is_over or request.line not in empty_lines
            if is_due and not self._look_for(request):
                empty_lines.add(request.line)
        with self._lock:
            self._is_serving = bool(self._requests) or time.monotonic() < self._linger_s
        return None if self._is_serving else True

    def _look_for(self, request: _Request) -> bool:
        """Look once for a coroutine; answer it if something was found, or if its time is over.
        Return whether there may be more for its line."""
        is_over = request.is_over
        try:
            task = self._look(request.look, request.closes)
        except BaseException as error:
            self._answer(request, None, error)
            return True
        if task is not None or is_over:
            self._answer(request, task)
        return task is not None

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
# 17. Processing: keeping a lease while its task is worked on, and ending it.
#     Invariant: while blocks of processing() run, at most one thread per queue object renews their
#     leases; none does if their leases have no deadline.
# ==================================================================================================

_RENEWAL = 1 / 3  # of its length, after which a lease is renewed
_LONGEST_RETRY_S = 3600.0  # after an exception in processing()


def _retry_delay_s(first_s: float, attempts: int) -> float:
    """Return how long a task waits after a failure. The delay doubles with each attempt; a random
    part of up to half is subtracted, so that tasks that failed together spread out."""
    delay_s = min(first_s * 2.0 ** min(attempts - 1, 64), _LONGEST_RETRY_S)
    return delay_s * (1 - os.urandom(1)[0] / 512)


class _LeaseRenewer:
    """Renews the leases of the tasks that are being processed, in one thread.

    The thread holds the worker, not the queue: a dropped queue object gives up its lease directory
    at once.
    """

    def __init__(self, worker: _Worker) -> None:
        self._worker, self._lock = worker, worker.lock
        # By the id() of the task. Weak: the `with` holds the block, for as long as there is one.
        self._blocks: weakref.WeakValueDictionary[int, _Processing] = weakref.WeakValueDictionary()
        self.stop = threading.Event()  # set: no thread renews
        self.stop.set()
        self.pause_s = 0.0  # seconds between two rounds of the thread

    def add(self, block: _Processing) -> None:
        """Renew a lease from now on; start a thread if none runs, or if its rounds are too rare."""
        lease = _lease_of(block.task)
        pause_s = lease.length_ns / 1e9 * _RENEWAL
        with self._lock:
            self._blocks[id(block.task)], lease.is_renewed = block, True
            if lease.length_ns >= _FOREVER_NS or not (self.stop.is_set() or pause_s < self.pause_s):
                return
            self.stop.set()
            self.stop, self.pause_s = threading.Event(), pause_s
            try:
                threading.Thread(target=self._run, args=(self.stop, pause_s), daemon=True).start()
            except BaseException:
                self.stop.set()
                self.remove(block.task)
                raise

    def remove(self, task: FemtoTask) -> None:
        """Renew a lease no more."""
        with self._lock:
            self._blocks.pop(id(task), None)
            _lease_of(task).is_renewed = False

    def _run(self, stop: threading.Event, pause_s: float) -> None:
        """Renew until nothing is left to renew, or `stop` is set."""
        first_s = pause_s
        while not stop.wait(pause_s):
            try:
                pause_s = self.renew_all(stop)
            except BaseException:  # e.g. of a log handler: the other leases must go on
                pause_s = first_s / 10
            if not pause_s:
                return

    def renew_all(self, stop: threading.Event) -> float:
        """Renew the leases that need it. Return the seconds until the next round. If no lease is
        left, set `stop` and return 0."""
        with self._lock:
            tasks = [block.task for block in self._blocks.values()]
            lengths_ns = [_lease_of(it).length_ns for it in tasks]
            if min(lengths_ns, default=_FOREVER_NS) >= _FOREVER_NS or stop.is_set():
                stop.set()
                return 0
            self.pause_s = min(lengths_ns) / 1e9 * _RENEWAL
        pause_s = self.pause_s
        for task in tasks:
            try:
                self._renew(task)
            except LeaseLost:
                self.remove(task)  # its block will see
            except BlockingIOError:
                pause_s = self.pause_s / 10
            except OSError as error:
                pause_s = self.pause_s / 10
                _log().warning("task %s: its lease is not renewed: %s", task.id, error)
        return pause_s

    def _renew(self, task: FemtoTask) -> None:
        """Renew a lease, unless the next time will do, or its block has ended meanwhile."""
        lease = _lease_of(task)
        left_ns = self._worker.left_ns(task)
        if not lease.is_renewed or lease.outcome:
            return
        if left_ns - self.pause_s * 1e9 >= lease.length_ns * (1 - _RENEWAL):
            return  # the thread runs more often than this lease needs
        # Not waiting for the lock of its key: a process may be stopped while it has it.
        self._worker.renew(task, wait=False)


class _Processing:
    """The block of processing(): see FemtoQueue.processing().

    queue: only its public methods are used. outcome: how the delivery ended, a field of
    WorkCounts; "" while it runs, or if its end could not be written.
    """

    def __init__(self, queue: Any, task: FemtoTask, worker: _Worker) -> None:
        self._queue, self.task = queue, task
        self._worker, self._renewer = worker, worker.renewer
        self._lease, self._pid = _lease_of(task), os.getpid()

    @property
    def outcome(self) -> str:
        return self._lease.outcome

    def __enter__(self) -> FemtoTask:
        """Check or renew the lease, and have it renewed. Raises LeaseLost."""
        task = self.task
        if self._worker.left_ns(task) < self._lease.length_ns * 2 / 3:
            self._worker.renew(task)
        elif not self._worker.is_leased(task):
            raise self._worker.lease_lost(task)
        self._renewer.add(self)
        return task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        """End the delivery by what the block raised, unless the block ended it itself."""
        task = self.task
        if os.getpid() != self._pid:
            return  # a child that was forked in the block does not own the task
        try:
            if not self.outcome and not (isinstance(error, LeaseLost) and error.id == task.id):
                self._end(error)
        except LeaseLost as lost:
            raise lost from error
        except OSError:
            self.orphan()  # another worker may deliver it again
            raise
        finally:
            self._renewer.remove(task)

    def _end(self, error: BaseException | None) -> None:
        """End the delivery, by what the block raised."""
        queue, task, attempts = self._queue, self.task, _attempts_of(self.task.path)
        if error is None:
            queue.done(task)
        elif not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit
            queue.release(task, front=True, counted=False)
        elif queue.max_attempts is not None and attempts >= queue.max_attempts:
            queue.fail(task, error)
        else:
            queue.release(task, delay_s=_retry_delay_s(queue.retry_delay_s, attempts))
            self._lease.outcome = "retried"

    def orphan(self) -> None:
        """Have the task delivered again soon: its delivery can't be ended."""
        self._worker.orphan(self.task.path)


# ==================================================================================================
# 18. Worker pool: the loop behind work() and the command `work`.
#     Invariant: each task that it takes is settled, given back or counted as lost, and no signal
#     comes between two of its steps that would leave a task in flight.
# ==================================================================================================

_ONE_SIGNAL_S = 0.3  # two signals within that are one
_AFTER_FAILURE = {
    "retried": "to be retried",
    "failed": "a dead letter",
    "": "delivered again later",
}


class _WorkerPool:
    """The loop of work(): `concurrency` threads take tasks, one thread at a time, and handle them.
    If concurrency is 1, the calling thread does, unless in_threads is set.

    is_stopped: asked between two tasks. more_signals: stop the pool as SIGINT and SIGTERM do.
    on_stop() is called at the first signal, in its handler, and on_abort(number) at the second.

    Invariant: a task is in _running from before its handler is called until its delivery is
    counted, by the thread that removes it. _changed is held where _running or counts change.
    """

    def __init__(
        self,
        queue: Any,
        handler: Callable[[FemtoTask], object],
        concurrency: int,
        drain: bool,
        is_stopped: Callable[[], object] = _no_op,
        *,
        in_threads: bool = False,
        more_signals: Iterable[int] = (),
        on_stop: Callable[[], object] = _no_op,
        on_abort: Callable[[int], object] = _no_op,
    ) -> None:
        self._pid = os.getpid()
        self._queue, self._handler, self._concurrency = queue, handler, concurrency
        self._drain, self._is_stopped, self._in_threads = drain, is_stopped, in_threads
        self._is_threaded = in_threads or concurrency > 1
        self._more_signals, self._on_stop, self._on_abort = more_signals, on_stop, on_abort
        self.signals: list[int] = []  # that came
        self._last_signal_s = 0.0
        self.counts: Counter[str] = Counter()  # by the fields of WorkCounts
        self._running: dict[int, FemtoTask] = {}  # by their id()
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by the thread that takes a task
        self._threads = 0  # that have not ended
        self._is_drained = self._is_interruptible = False  # a handler runs that signals interrupt
        self._error: BaseException | None = None  # that ends the pool: of a handler, or of pop()

    def run(self) -> WorkCounts:
        """Work until told to stop. Raises what a handler raised to end the pool, and the OSError
        of a pop(), unless a signal came before what ran had finished: that is answered first."""
        with self._signals_handled():
            if self._is_threaded:
                self._start_threads()
                self._wait_for_threads()
            else:
                self._work()
            if len(self.signals) > 1:
                self._abort()
            elif isinstance(self._error, OSError) and self.signals:
                _log().error("work ends by a signal; before it: %s", self._error)
            elif self._error is not None:
                raise self._error
        return WorkCounts(**self.counts)

    def _start_threads(self) -> None:
        for _ in range(self._concurrency):
            # A daemon: a handler that does not return must not keep the process alive.
            thread = threading.Thread(target=self._work, daemon=True)
            with self._changed:
                self._threads += 1
            try:
                thread.start()
            except RuntimeError:
                with self._changed:
                    self._threads -= 1
                if not self._threads:  # else the running ones are enough
                    raise
                return

    def _wait_for_threads(self) -> None:
        with self._changed:
            while self._threads > 0 and len(self.signals) < 2:
                self._changed.wait(_BASE_INTERVAL_S)

    def _work(self) -> None:
        """Take tasks, and handle them, until the pool is stopped or the queue is drained."""
        try:
            while not self._is_stopping():
                with self._turn:
                    task = self._take()
                if task is not None:
                    self._process(task)
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    def _is_stopping(self) -> bool:
        is_over = self.signals or self._is_drained or self._error is not None
        return bool(is_over or self._is_stopped())

    def _take(self) -> FemtoTask | None:
        """Take a task, or wait for one a moment: nothing wakes this wait when is_stopped()
        changes, and with drain, others may end the last task at any moment."""
        queue, wait_s = self._queue, _BASE_INTERVAL_S
        if self._is_stopping():
            return None
        task: FemtoTask | None = queue.pop(0 if self._drain else wait_s)
        if task is None and self._drain:
            self._is_drained = queue.join(0)
            if not self._is_drained:
                task = queue.pop(min(wait_s, queue.poll_interval_s))
        with self._changed:
            if task is None or not self._is_stopping():
                if task is not None:
                    self._running[id(task)] = task
                return task
        queue.release(task, front=True, counted=False)
        return None

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
                processing.orphan()
        finally:
            with self._changed:
                if self._running.pop(id(task), None) is not None:  # else _abort() has counted it
                    self.counts[processing.outcome or "lost"] += 1
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


# ==================================================================================================
# 19. Inspection: check(), a method for each thing that may be odd.
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
            self._file_systems(),
            self._queue_clock(),
            self._foreign(),
            self._records(),
            self._twice(),
            self._workers(),
            self._of_no_use("key without a task", "nothing of it waits", keys.idle, keys.repair),
            self._of_no_use(
                *("leftover", "more than an hour old"), house.stale_files, house.remove_stale_files
            ),
        ):
            try:
                yield from look
            except OSError as error:
                yield Finding(
                    "unreadable", os.path.relpath(error.filename or root, root), str(error)
                )

    def _file_systems(self) -> Iterator[Finding]:
        """A network file system, and directories on another one."""
        root = self._files.root
        kind = _NETWORK_TYPES.get(_fs_type(root))
        if kind is not None:
            text = (
                f"{kind}: other hosts' leases end by their deadlines only, and waiting is polling"
            )
            yield Finding("network file system", ".", text)
        device = os.stat(root).st_dev
        for name in self._directories():
            if os.stat(root + name).st_dev != device:
                yield Finding("file system", name, "another than data_dir's: rename() can't cross")

    def _directories(self) -> list[str]:
        """Return the directories of the queue."""
        root = self._files.root
        names = [name for name in os.listdir(root) if name in _NAMES_IN or _parse_node_dir(name)]
        return sorted(name for name in names if os.path.isdir(root + name))

    def _queue_clock(self) -> Iterator[Finding]:
        """A clock that is ahead of the wall clock."""
        clock = self._worker.clock
        ahead_s = (clock.now_ns() - _wall_ns()) / 1e9
        if ahead_s > 1:
            text = f"{ahead_s:.0f} s ahead of the wall clock: that was set back, or a task is newer"
            yield Finding("clock", f"clock-{clock.boot}", text)

    def _foreign(self) -> Iterator[Finding]:
        """Names that are not the queue's."""
        directories = self._directories()
        forms = {name: _NAMES_IN.get(name, (_FORMS["inflight"],)) for name in directories}
        for directory in (".", *directories):
            known = forms.get(directory, ({*directories, "PAUSED"}.__contains__, _parse_clock))
            for name in sorted(os.listdir(self._files.root + directory)):
                if not any(form(name) for form in known):
                    path = os.path.normpath(f"{directory}/{name}")
                    yield Finding("foreign", path, "not of the queue's")

    def _records(self) -> Iterator[Finding]:
        """Records that are not whole, or can't be read."""
        for entry in self._files.find(*STATES, "keys"):
            try:
                _look_afresh(_read_record, self._files.root + entry.path, entry.id)
            except FileNotFoundError:
                continue  # it moved on
            except OSError as error:
                yield Finding("unreadable", entry.path, str(error))
            except CorruptTask as error:
                if entry.directory == "failed" and self._files.exists(f"{entry.path}.error"):
                    continue  # a dead letter for just that
                mend = self._repair and entry.directory in ("pending", "scheduled")
                if mend:
                    self._worker.quarantine(entry.path, error.reason)
                yield Finding("corrupt", entry.path, error.reason, mend)

    def _twice(self) -> Iterator[Finding]:
        """An id in two places."""
        first: dict[str, str] = {}
        for entry in self._files.find(*STATES, "keys"):
            other = first.setdefault(entry.id, entry.path)
            if other != entry.path and all(map(self._files.exists, (other, entry.path))):
                yield Finding("twice", entry.path, f"there is {other} too")

    def _workers(self) -> Iterator[Finding]:
        """Dead workers, and leases that have ended."""
        house, found = self._worker.house, []
        for directory in self._files.node_dirs():
            stats = house.node_stats(directory)
            if stats.liveness == "dead":
                found.append((directory, "dead worker", f"{stats.inflight} tasks leased"))
            elif stats.expired:
                found.append((directory, "expired", f"{stats.expired} leases have ended"))
        if found and self._repair:
            house.reclaim()
        for directory, kind, text in found:
            stats = house.node_stats(directory)
            is_left = stats.expired or (stats.liveness == "dead" and stats.inflight)
            yield Finding(kind, directory, text, self._repair and not is_left)

    def _of_no_use(
        self, kind: str, text: str, look: Callable[[], list[str]], remove: Callable[[], None]
    ) -> Iterator[Finding]:
        """The files that look() returns, and remove() removes."""
        found = look()
        if found and self._repair:
            remove()
        for path in found:
            yield Finding(kind, path, text, self._repair and not self._files.exists(path))


# ==================================================================================================
# 20. FemtoQueue: the public face. Its methods stand in the order of a task's life.
#     Invariant: _lock is held while the backlog is changed, while pop() runs jobs, and while a task
#     moves into our lease directory or out of it; not while a caller's payload is read or written.
# ==================================================================================================


_SETTINGS = frozenset(
    {"data_dir", "timeout_stale_ms", "sync_after_write", "max_attempts", "keep_done"}
    | {"retry_delay_s", "poll_interval_s", "detached"}
)


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
    retry_delay_s: what processing() and work() wait, in seconds, before a second delivery; twice
    as long before each further one, up to an hour, and up to half of it less, by chance.
    poll_interval_s: the longest pause, in seconds, between two looks of a wait, where inotify
    does not tell (not Linux, or a file system that other hosts write to).
    detached: True makes leases that outlive this object and its process: only their deadlines end
    them, and attach() finds them again.

    Order and deadlines are by the queue clock: the monotonic clock plus an anchor that all
    processes of one boot share, so that setting the date does not move it. Where there is no boot
    id (not Linux) each process anchors itself to the wall clock or the newest task.

    Threads may share an object. After fork() the child's copy is a worker of its own, and a
    pickled object is made anew from its settings.

    Raises TypeError or ValueError for an invalid argument, OSError when a directory cannot be
    made.
    """

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
        _check_places(data_dir, node_id)
        if timeout_stale_ms is not None:
            _positive("timeout_stale_ms", timeout_stale_ms)
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
        self._given_node_id = node_id
        self._length_ns = _lease_length_ns(timeout_stale_ms)
        self._files = _Files(os.fspath(data_dir), self.sync_after_write)
        self._files.make_dirs()
        self._clock = _QueueClock(self._files)
        self._init_worker()
        _fork_hooks[self] = FemtoQueue._after_fork

    def __setattr__(self, name: str, value: object) -> None:
        if name in _SETTINGS and name in self.__dict__:
            raise AttributeError(f"{name} is fixed when the object is made; make another object")
        object.__setattr__(self, name, value)

    def _init_worker(self) -> None:
        """Create the state that belongs to one process: worker id, lock, cached listing. Called
        again in a forked child, which must not share it."""
        worker = self._worker = _Worker(self, self._files, self._clock)
        self.node_id = worker.node_id
        self._lock, self._backlog, self._lease_dir = worker.lock, worker.backlog, worker.lease_dir
        self._keys, self._transitions, self._house = worker.keys, worker, worker.house
        self._taker, self._waits, self._renewer = worker.taker, worker.waits, worker.renewer

    def _after_fork(self) -> None:
        """In a forked child: become a worker of its own."""
        self._worker.house.close()
        self._clock.init_worker()
        self._init_worker()

    # Producing

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
        and it keeps its place (and its time, in scheduled/) and its id, which is returned. Where
        renameat2(2) can't exchange names (NFS, FUSE; not Linux) a pop() in that instant finds no
        task of the key.
        if_in_flight, for a key whose task is leased: "buffer": data waits in keys/ until that
        delivery ends (a newer one replaces it), then joins the queue by its own id, or takes the
        place of the task if that came back; "update": a redelivery carries data, and done() ends
        it with the task, but if a payload is behind it already, data replaces that one; "reject":
        raises KeyInFlight. Keyed tasks need flock: OSError without. A signal handler must not push
        a key that the interrupted thread is just pushing.
        """
        if key is not None or if_in_flight != "buffer":
            return self._push_keyed(data, key, if_in_flight, None)
        ident = self._clock.new_id()
        self._files.publish(ident, data, f"pending/{ident}")
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
        pending = f"{self._files.root}pending"
        sync = _BatchSync(pending, self.sync_after_write)
        try:
            with sync:
                for data in iterable:
                    ident, each = self._clock.new_id(), sync.each_file
                    self._files.publish(ident, data, f"pending/{ident}", sync=each, sync_dir=False)
                    ids.append(ident)
        except Exception as error:
            if sync.failed:
                ids = [it for it in ids if not _unlink_if_exists(f"{pending}/{it}", or_fail=False)]
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
        ident = self._clock.new_id()
        path = f"scheduled/{_task_name(due_ns, 0, ident)}"
        self._files.publish(ident, data, path)
        self._worker.backlog.note_enqueued(path)
        return ident

    def _push_keyed(
        self,
        data: bytes | bytearray | memoryview,
        key: str | None,
        if_in_flight: str,
        due_ns: int | None,
    ) -> str:
        """Check the arguments, and push until no pop() or person is quicker at the waiting task."""
        if if_in_flight not in _IF_IN_FLIGHT:
            wanted = " or ".join(_IF_IN_FLIGHT)
            raise ValueError(f"if_in_flight must be {wanted}, not {if_in_flight!r}")
        name = _encode_key(key)
        payload = data if type(data) is bytes else _as_bytes(data)
        while True:
            if self._worker.lease_dir.is_suspect:
                self._worker.open_lease_dir()
            ident = self._worker.pusher.push(name, payload, if_in_flight, due_ns)
            if ident:
                return ident  # RACE: else a pop() took it, and we see it in flight now

    # Consuming

    def pop(self, timeout: float | None = 0, *, lease_ms: float | None = None) -> FemtoTask | None:
        """Lease the oldest task, or return None when there is none to be had.

        timeout: seconds to wait for one; 0: don't; None: for ever. inotify ends the wait, or else
        a look every poll_interval_s does; so does a task that comes due, a lease that ends and,
        within half a second, a worker that died. Signals get through at once. close() in another
        thread ends the wait: None.
        lease_ms: this delivery's own lease in milliseconds, for extend() and processing() too;
        None: timeout_stale_ms.

        The task is in inflight-<node>/ until done(), fail() or release(), or until the lease
        ends. A corrupt task is moved to failed/, logged, and passed over. OSError, as it came,
        for disk trouble: a task that could not be read is at the back of pending/ then; trouble
        with other workers' directories, scheduled/ or creating/ is raised when no task waits.
        """
        length_ns = self._length_ns if lease_ms is None else self._worker.taker.length_of(lease_ms)
        if timeout == 0:
            return self._worker.taker.take_oldest(length_ns)
        return self._worker.waits.wait_for(
            lambda: self._worker.taker.take_oldest(length_ns), _end_s(timeout)
        )

    async def pop_async(
        self, timeout: float | None = None, *, lease_ms: float | None = None
    ) -> FemtoTask | None:
        """Do as pop() does, without blocking the event loop. First come, first served.

        Cancelling it leaves no task leased: one that it had just got is back at its place, and
        that delivery is not counted.
        """
        length_ns = self._worker.taker.length_of(lease_ms)
        return await self._worker.waits.wait_for_async(
            lambda: self._worker.taker.take_oldest(length_ns), _end_s(timeout), ""
        )

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
        not depend on how many tasks wait, but for pop()'s jobs, which it does too.
        id: the task may wait in pending/, or in scheduled/, due or not; else None is returned.
        done() then cancels it; if it comes back instead, it is due at once. pending/ is listed if
        the task was delivered before.
        timeout and lease_ms: as in pop(). Raises as pop() does, ValueError for an invalid key or
        id, TypeError unless one of the two is given.
        """
        look, _ = self._worker.taker.finder_of(key, id, lease_ms, wait=True)
        return self._worker.waits.wait_for(look, _end_s(timeout))

    async def take_async(
        self,
        key: str | None = None,
        timeout: float | None = None,
        *,
        id: str | None = None,
        lease_ms: float | None = None,
    ) -> FemtoTask | None:
        """Do as take() does, without blocking the event loop; see pop_async()."""
        look, line = self._worker.taker.finder_of(key, id, lease_ms, wait=False)
        return await self._worker.waits.wait_for_async(look, _end_s(timeout), line)

    def drain(self, timeout: float | None = None) -> Iterator[FemtoTask]:
        """Iterate over tasks, leased as by pop(), until none is pending, scheduled or in flight.

        Unlike a loop over pop() it goes on while others hold work that may come back. So does
        what it yielded: end each task before asking for the next. timeout: seconds to wait for a
        task before it ends all the same; None: no limit.
        """
        _end_s(timeout)  # an invalid one is an error now, not at the first task

        def look() -> FemtoTask | None:
            task = self._worker.taker.take_oldest(self._length_ns)
            return task if task is not None or self._files.has_work() else _NO_TASK

        def tasks() -> Iterator[FemtoTask]:
            while (task := self._worker.waits.wait_for(look, _end_s(timeout), False)) is not None:
                if task is _NO_TASK:
                    return
                yield task

        return tasks()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until no task is pending, scheduled or in flight anywhere; take none.

        timeout: seconds to wait; None: no limit. Returns False when the time is over, or when
        close() in another thread ends the wait.
        """

        def look() -> bool | None:
            return None if self._files.has_work() else True

        return self._worker.waits.wait_for(look, _end_s(timeout), False) is True

    # Ending a delivery

    def done(self, task: FemtoTask) -> None:
        """Finish the task: it moves to done/, or is deleted with keep_done=False.

        Raises LeaseLost if the task is not this delivery's any more.
        """
        self._worker.house.finished += 1
        self._worker.finish(task, bool(self.keep_done))

    def fail(self, task: FemtoTask, error: str | BaseException | None = None) -> None:
        """Make the task a dead letter in failed/, where retry() finds it.

        error is the reason, kept in failed/<id>.error: a text, or an exception with its
        traceback. Raises LeaseLost if the task is not this delivery's any more.
        """
        if not isinstance(error, (str, BaseException, type(None))):
            raise TypeError(f"error must be a text or an exception, not {error!r}")
        _lease_of(task)
        self._worker.fail(task, error)

    def release(
        self, task: FemtoTask, *, front: bool = False, delay_s: float = 0, counted: bool = True
    ) -> None:
        """Give the task back: to the back of the queue, to its front, or after a delay.

        front: to the place of its push, before everything younger. delay_s: seconds to wait in
        scheduled/ first, by the wall clock. counted: whether its attempts count this delivery.
        Raises LeaseLost as done() does.
        """
        attempts = _attempts_of(_lease_of(task).path) - (not counted)
        if _finite("delay_s", delay_s) < 0 or (front and delay_s):
            raise ValueError(f"delay_s must be 0 or more, and 0 with front, not {delay_s!r}")
        if delay_s:
            due_ns = _wall_ns() + int(min(delay_s * 1e9, _FOREVER_NS))
            target = f"scheduled/{_task_name(due_ns, attempts, task.id)}"
        elif front:
            target = _front_path(task.id, attempts)
        else:
            target = f"pending/{_task_name(self._clock.next_order(), attempts, task.id)}"
        self._worker.requeue(task, target)

    def extend(self, task: FemtoTask, ms: float | None = None) -> None:
        """Renew the lease: it ends `ms` milliseconds from now (None: as long as it was taken for).

        The task object carries the new lease from then on. Raises LeaseLost as done() does.
        """
        lease = _lease_of(task)
        length_ns = lease.length_ns if ms is None else _lease_length_ns(_positive("ms", ms))
        self._worker.extend(task, length_ns)

    def attach(self, lease: str) -> FemtoTask:
        """Return the task of a lease that another process took, to settle or extend it here.

        lease: the path that task.path had there, its last part, or the task's id. The payload is
        not read: data is b"", and size_bytes None. A detached lease is renewed by what is left of
        it if this object's leases have no end. Raises LeaseLost if there is no such lease (any
        more).
        """
        name = lease.rpartition("/")[2]
        for entry in self._files.find("inflight"):
            if lease == entry.path or name in (entry.name, entry.id):
                length_ns = self._length_ns
                if entry.boot == _DETACHED and length_ns >= _FOREVER_NS:
                    length_ns = max(entry.stamp_ns - self._clock.now_ns(), 10**9)
                closes = self._worker.lease_dir.closes
                others: dict[str, Any] = {"_lease": _Lease(entry.path, length_ns, closes)}
                others |= {"_anchor_ns": self._clock.anchor_ns, "size_bytes": None}
                # It may have a checkpoint, which has to go with it.
                return FemtoTask(entry.id, b"", entry.attempts, None, b"", **others)
        raise LeaseLost(_id_of(name), True, "it is not in flight by that name (any more)")

    # Working

    def processing(self, task: FemtoTask) -> _Processing:
        """Return a context manager that holds the task's lease for its block, and then ends it.

        The lease is renewed in the background, by one thread per queue object. A block that ends
        well is done(task). An exception: the task waits in scheduled/ for another try (see
        retry_delay_s) while task.attempts is below max_attempts, else fail(task, exception).
        KeyboardInterrupt, SystemExit and asyncio.CancelledError: back to the front, and the
        delivery is not counted, so that max_attempts never ends a block which always raises one
        of them. The exception propagates. A task that the block itself ended, by
        done(), fail() or release(), stays so. Raises LeaseLost, at either end of the block, if
        the lease was lost.
        """
        return _Processing(self, task, self._worker)

    def checkpoint(self, task: FemtoTask, data: bytes | bytearray | memoryview) -> None:
        """Save how far the work has come, and renew the lease: checkpoints/<id> holds data.

        The next delivery, after release(), a retry or our death, finds it in task.checkpoint; but
        not with a newer payload of its key. It is gone with done() and fail(). Atomic: there is
        the old one or the new one; with sync_after_write it is on disk when this returns. Raises
        LeaseLost, with nothing saved, if the task is not this delivery's any more; else as push()
        does.
        """
        _lease_of(task)
        self._worker.save_checkpoint(task, bytes(_as_bytes(data)))

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
        second one gives back what runs and returns at once; threads that still handle
        a task then get LeaseLost. A handler that fails is logged (logger "femtoqueue"), and the
        loop goes on; one that raises SystemExit or the like ends it. Disk trouble of pop() ends
        it too, as the OSError that it is, when what runs is finished.
        """
        if not callable(handler):
            raise TypeError(f"handler must be callable, not {handler!r}")
        if type(concurrency) is not int or concurrency < 1:
            raise ValueError(f"concurrency must be an int of 1 or more, not {concurrency!r}")
        if stop is not None and not callable(getattr(stop, "is_set", None)):
            raise TypeError(f"stop must be a threading.Event or None, not {stop!r}")
        lease_dir = self._worker.lease_dir
        closes = lease_dir.closes

        def is_stopped() -> bool:
            return lease_dir.closes != closes or (stop is not None and stop.is_set())

        return _WorkerPool(self, handler, concurrency, drain, is_stopped).run()

    def pause(self) -> None:
        """Hand nothing out, in any process, until resume(): make data_dir/PAUSED.

        Other workers see it when they list pending/ next, within a second or so.
        """
        os.close(os.open(f"{self._files.root}PAUSED", os.O_WRONLY | os.O_CREAT, 0o666))
        with self._worker.lock:
            self._worker.backlog.clear()
            self._worker.house.look_s = 0.0

    def resume(self) -> None:
        """Remove data_dir/PAUSED, by whomever it was made. Waiting calls look again."""
        _unlink_if_exists(f"{self._files.root}PAUSED")

    @property
    def paused(self) -> bool:
        """Whether data_dir/PAUSED is there."""
        self._worker.house.look_s = (
            0.0  # the next pop() is not to hand out what was said to be held back
        )
        return self._files.is_paused

    # Dead letters and upkeep

    def retry(self, id: str) -> None:
        """Put a failed task at the back of the queue, its attempts at 0 again.

        Raises TaskNotFound if no such task is in failed/, KeyInFlight if its key has another task
        by now, ValueError for an invalid id.
        """
        _check_id(id)
        path = f"failed/{id}"
        if not os.path.lexists(self._files.root + path):
            entry = self._files.find_id(id, "failed")
            path = entry.path if entry else ""
        if not path or not self._worker.requeue_failed(path):
            raise TaskNotFound(f"no task {id} in failed/")

    def retry_failed(self) -> int:
        """Put every failed task at the back of the queue, oldest first; return how many.

        Those whose key has another task by now stay.
        """
        count = 0
        for entry in self._files.find("failed"):
            with contextlib.suppress(KeyInFlight):
                count += self._worker.requeue_failed(entry.path)
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
        root, before_s = self._files.root, time.time() - older_than_s
        entries = self._files.find(*sorted(wanted))
        count = sum(_unlink_if_older(root + entry.path, before_s) for entry in entries)
        for entry in self._files.entries("failed", "reason") if "failed" in wanted else ():
            if not os.path.lexists(f"{root}failed/{entry.id}"):
                _unlink_if_older(root + entry.path, before_s)
        return count

    def check(self, repair: bool = False) -> list[Finding]:
        """Look for what is odd in data_dir, and with repair=True mend what is safe to mend.

        Found: directories on another file system or on a network file system; a queue clock ahead
        of the wall clock; names that are not the queue's; records that are not whole, or can't be
        read; an id in two places; dead workers and leases that have ended; keys without a task;
        leftovers in creating/ and checkpoints/, more than an hour old. Mended: corrupt tasks that
        wait go to failed/, what dead workers held back to pending/, keys and leftovers go. Reads
        every task; while others work, what just moves may be found odd.
        """
        return [*_Inspector(self._worker, repair).findings()]

    # Looking

    def stats(self) -> Stats:
        """Count the tasks in each state. Reads names only; tasks that
        move while it counts may be missed or counted twice."""
        files = self._files
        pending = files.entries("pending")
        oldest_ns = min((entry.stamp_ns for entry in pending), default=None)
        nodes = tuple(map(self._worker.house.node_stats, files.node_dirs()))
        return Stats(
            pending=len(pending),
            scheduled=len(files.entries("scheduled")),
            inflight=sum(node.inflight for node in nodes),
            buffered=len(files.entries("keys")),
            done=len(files.entries("done")),
            failed=len(files.entries("failed")),
            oldest_pending_age_s=(
                None if oldest_ns is None else max(0, self._clock.now_ns() - oldest_ns) / 1e9
            ),
            nodes=nodes,
            expired=sum(node.expired for node in nodes),
        )

    def tasks(self, state: str, *, data: bool = True) -> Iterator[FemtoTask]:
        """Iterate over the tasks of a state in name order, without leasing them.

        state: one of STATES. data: False reads headers only, so that large payloads cost
        nothing: data is b"" then. A task that moves on meanwhile is left out. A corrupt one, or
        one that may not be read, is logged and left out, and peek() says what is wrong with it;
        with data=False it has size_bytes None, if its header shows it.
        """
        _check_state(state)
        return self._read_all(self._files.find(state), data)

    def peek(self, id: str | None = None, *, key: str | None = None) -> FemtoTask | None:
        """Return the task of that id, in any state, or the one of that key that waits or is in
        flight, without leasing it.

        None if there is none (or if it moved just then). Looking for an id through pending/ and
        scheduled/ lists them. Raises CorruptTask if its file is not a whole record, ValueError
        for an invalid id or key, TypeError unless one of the two is given.
        """
        if (id is None) == (key is None):
            raise TypeError("peek takes an id or a key")
        if id is None:
            path = self._worker.keys.path_of(key)
            return None if path is None else self._read_entry(_entry_of(path))
        _check_id(id)
        for directory in ("done", "failed", "pending"):
            task = self._read_entry(_entry_of(f"{directory}/{id}"))
            if task is not None:
                return task
        # As it moves.
        states = ("keys", "scheduled", "pending", "inflight", "done", "failed")
        entry = self._files.find_id(id, *states)
        return None if entry is None else self._read_entry(entry)

    def contains(self, key: str) -> bool:
        """Say whether a task of that key waits or is in flight."""
        return self._worker.keys.path_of(key) is not None

    def keys(self, state: str) -> Iterator[str]:
        """Iterate over the keys of a state's tasks: STATES, as for tasks()."""
        _check_state(state)
        keyed = (entry for entry in self._files.find(state) if _is_keyed(entry.id))
        return (task.key for task in self._read_all(keyed, True) if task.key is not None)

    def _read_entry(self, entry: _Entry, data: bool = True) -> FemtoTask | None:
        return _read_task(self._files, entry, self._clock.anchor_ns, data)

    def _read_all(self, entries: Iterable[_Entry], data: bool) -> Iterator[FemtoTask]:
        """Yield the tasks of entries; those that moved on, or can't be read, are left out."""
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
        """Give up this worker's lease directory; its tasks return to pending/ at once.

        Where there is no flock, and while another object lives under the same node_id, that is
        only so at the deadline. Other threads and coroutines that wait in a method of this object
        return at once: pop() and take() None, drain() and work() as if stopped, join() False. The
        object may be used again; its next pop() opens a directory again. Dropping the object, or
        leaving its `with` block, does the same as close().
        """
        lease_dir = self._worker.lease_dir
        with self._worker.lock:
            lease_dir.closes += 1
            self._worker.renewer.stop.set()
            self._worker.waits.end_all()
            self._worker.house.close()
            self._worker.backlog.clear()
            lease_dir.close(lambda: self._worker.reclaim_all(lease_dir.directory, None))

    def __enter__(self) -> FemtoQueue:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The constructor may have raised. _FileLock is None when the interpreter ends.
        worker: _Worker | None = self.__dict__.get("_worker")
        if worker is not None and _FileLock is not None:
            if worker.lease_dir.is_open:
                self.close()
            worker.__dict__.clear()  # it is in a cycle with its parts; what they hold goes now

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments of the constructor, for pickle."""
        return {
            "data_dir": os.path.dirname(self._files.root),
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


# ==================================================================================================
# 21. Tickets: first come, first served, between processes.
#     Invariant: a ticket's file appears locked, and in the order of the numbers: both under the
#     lock of the file "last"; who lost that lock takes its ticket back. A lock that ended never
#     comes back, so that any process may remove the ticket of a dead member.
# ==================================================================================================

_MAX_REDRAWS = 8  # of a ticket's number, by a host that was cut off meanwhile


class _HeldTicket:
    """A ticket of this object: its number, its locked file, when the last touch that was in time
    began (wall clock), and whether it ever was the first in line."""

    __slots__ = ("had_turn", "lock", "number", "touched_s")

    def __init__(self, number: int, lock: _FileLock, touched_s: float) -> None:
        self.number, self.lock, self.touched_s, self.had_turn = number, lock, touched_s, False


class TicketQueue:
    """First come, first served, between processes: a line of tickets in a directory.

        with TicketQueue("line").turn():
            ...                         # one process at a time, in the order in which they came

    A ticket is a file, <ticket>~<boot>~<random>, which its member keeps locked. A dead member is
    passed over at once on its own host, and a living one never is. On other hosts, and after a
    reboot, a ticket is passed over when its file was not touched for stale_timeout seconds (wall
    clock; None: never); is_head() touches it, and turn() does while it waits and while it is held.
    Hosts that share a line need the same stale_timeout, of 10 s or more. There, a waiting member
    that could not touch its ticket for three quarters of that time gives it up: another host may be
    about to pass it over. A member that is cut off during its turn is passed over; is_head() tells
    it then, turn() does not.

    queue_dir is made if it is missing. Threads may share an object; a forked child holds none of
    its parent's tickets. Raises OSError where there is no flock, ValueError or TypeError for an
    invalid stale_timeout.
    """

    def __init__(
        self, queue_dir: str | os.PathLike[str], stale_timeout: float | None = None
    ) -> None:
        self._held: dict[str, _HeldTicket] = {}  # by member
        if stale_timeout is not None:
            _positive("stale_timeout", stale_timeout)
        self.queue_dir = queue_dir
        self.stale_timeout = stale_timeout
        self._files = _Files(os.fspath(queue_dir), is_durable=False)
        self._root = self._files.root
        _make_dir(os.path.dirname(self._root), 0o700, sync=False)
        boot_id = _read_boot_id() or (os.uname().nodename if hasattr(os, "uname") else "")
        self._boot = _boot_tag(boot_id, self._root)
        _fork_hooks[self] = TicketQueue._after_fork

    def register(self) -> tuple[int, str]:
        """Take the next ticket; return its number, from 1, and its member: its file's name in
        queue_dir.

        Blocks only while other processes register. Raises OSError if this host was cut off, and
        others registered, again and again meanwhile.
        """
        redraws = 0
        while True:
            try:
                with self._locked() as last:
                    ticket, member, held = self._register(last)
                self._held[member] = held  # not before: if Ctrl-C comes, its lock ends with `held`
                return ticket, member
            except OSError as error:
                redraws += 1
                if redraws > _MAX_REDRAWS or error.errno not in (*_MISSING_ERRNOS, errno.EEXIST):
                    raise
            time.sleep(_SHARED_LOCK_POLL_S)

    def _register(self, last: _FileLock) -> tuple[int, str, _HeldTicket]:
        """Take the next ticket, with the lock of "last" held; return number, member and file.

        RACE: a host that was cut off has lost that lock (NFS). If another one registered meanwhile,
        or took our file for that of a dead process, raises OSError: ENOENT, ESTALE or EEXIST.
        """
        ticket, began_s = self._next_number(last), time.time()
        name = _ticket_name(ticket, self._boot, os.urandom(8).hex())
        lock = _open_locked(f"{self._root}.{name}")  # not a ticket yet: it must appear locked
        try:
            _move(f"{self._root}.{name}", self._root + name, _always)
            if self._files.is_shared and self._noted() > _last_number_name(ticket):
                # Who drew the higher one may have been first in line, and have its turn.
                raise FileExistsError(errno.EEXIST, "another host was faster", self._root + name)
        except BaseException:
            for path in (f"{self._root}.{name}", self._root + name):
                _unlink_if_exists(path, or_fail=False)
            lock.close()
            raise
        return ticket, name, _HeldTicket(ticket, lock, began_s)

    def _next_number(self, last: _FileLock) -> int:
        """Return the next number, and note it: in "last", whose lock is held.

        On a file system of several hosts the name of an empty file has it: a host may read contents
        that another has written as they were (GlusterFS: for a second), but it lists the new names;
        and of two that rename it, one fails.
        """
        noted = self._noted()
        in_line = (ticket for ticket, _ in self._tickets())
        number = max(int(os.read(last.fd, 20) or 0), int(noted[-20:] or 0), *in_line) + 1
        if not self._files.is_shared:
            os.pwrite(last.fd, b"%020d" % number, 0)
        elif noted:
            os.rename(self._root + noted, self._root + _last_number_name(number))
        else:
            _write_new(self._root + _last_number_name(number), b"")
        return number

    def _noted(self) -> str:
        """Return the name of the file that has the last number, "" if there is none."""
        return max(filter(_parse_last_number, os.listdir(self._root)), default="")

    def is_head(self, ticket: int) -> bool:
        """Say whether that ticket is the first of those whose members live; touch it if it is ours.

        False, too, if ours was not touched for so long that another host may have passed it over.
        If it never was the first, it is removed. If it was, its turn may be another's by now: stop,
        and remove() it.
        """
        is_first = ticket == next((t for t, name in self._tickets() if self._lives(name)), None)
        for member, held in list(self._held.items()):
            if held.number != ticket:
                continue
            if not self._touch(held):  # after the look: that may have taken long
                if not held.had_turn:
                    self.remove(member)
                return False
            held.had_turn |= is_first
        return is_first

    def remove(self, member: str) -> bool:
        """Give up a member's ticket; False if it had none (any more). It may be another's.

        Raises ValueError for a name that register() does not return.
        """
        if not isinstance(member, str) or not _parse_ticket(member) or member[0] == ".":
            raise ValueError(f"member must be a name that register() returned, not {member!r}")
        held = self._held.pop(member, None)
        try:
            return _unlink_if_exists(self._root + member)
        finally:  # if it can't be removed, it must at least not be held any more
            if held is not None:
                held.lock.close()

    def cleanup_stale(self) -> int:
        """Remove the tickets of members that died or went stale; return how many."""
        return sum(not self._lives(name) for _, name in self._tickets())

    def is_empty(self) -> bool:
        """Say whether no living member is in line."""
        return not any(self._lives(name) for _, name in self._tickets())

    def maybe_cleanup(self) -> bool:
        """Remove queue_dir if no living member is in line; say whether it went.

        A register() meanwhile waits, and makes it again. Tickets begin at 1 then. On a file system
        of several hosts it stays: another host may take a lock that was removed for the one there.
        """
        if not os.path.isdir(self._root) or self._files.is_shared:
            return False
        with self._locked():
            if not self.is_empty() or not {*os.listdir(self._root)} <= {"last"}:
                return False
            os.unlink(f"{self._root}last")
            _remove_empty_dir(self._root)  # RACE: not if another process opens a new "last" now
        return not os.path.isdir(self._root)

    @contextlib.contextmanager
    def turn(self, timeout: float | None = None) -> Iterator[int]:
        """Wait for our turn, hold it for the block, and give it up. Yields the ticket.

        timeout: seconds to wait, None: for ever. Raises TimeoutError, out of line then; and
        FemtoQueueError if, while it waits, another host may have passed its ticket over, or a
        person removed it.
        """
        end_s = float("inf") if timeout is None else time.monotonic() + _finite("timeout", timeout)
        ticket, member = self.register()
        over = threading.Event()
        try:
            if self.stale_timeout is not None:
                threading.Thread(target=self._touch_until, args=(member, over), daemon=True).start()
            while not self.is_head(ticket):
                line = [name for _, name in self._tickets()]
                if member not in line:
                    raise FemtoQueueError(f"ticket {ticket} was passed over, or removed")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"ticket {ticket}: no turn within {timeout} s")
                # The next in line looks often, the others seldom.
                time.sleep(min(0.002 * line.index(member), 0.05, left_s))
            yield ticket
        finally:
            over.set()
            if member in self._held:  # not in a forked child; nor if is_head() has removed it
                self.remove(member)

    def __del__(self) -> None:
        if self._held and _FileLock is not None:  # None: the interpreter ends
            for member in list(self._held):
                self.remove(member)

    def _touch_until(self, member: str, over: threading.Event) -> None:
        """Touch a member's ticket now and then, until it is over."""
        while not over.wait((self.stale_timeout or 0) / 4):
            with contextlib.suppress(OSError, KeyError):  # RACE: given up just now
                self._touch(self._held[member])

    def _touch(self, held: _HeldTicket) -> bool:
        """Touch a ticket; False if another host has passed it over, or may do so just now."""
        began_s = time.time()
        try:
            os.utime(held.lock.fd)
        except OSError as error:
            if error.errno not in _MISSING_ERRNOS:
                raise
            return False  # ESTALE
        # RACE: a host that saw it stale may remove it only now, and take its turn. So ours must not
        # be the next, though the ticket is there, and young again. A quarter less: clocks differ.
        if self._is_older(held.touched_s, 0.75) and self._files.is_shared:
            return False
        held.touched_s = began_s
        return True

    def _is_older(self, touched_s: float, part: float = 1) -> bool:
        """Whether a ticket was last touched longer ago than that part of stale_timeout."""
        timeout_s = self.stale_timeout
        return timeout_s is not None and time.time() - touched_s > part * timeout_s

    @contextlib.contextmanager
    def _locked(self) -> Iterator[_FileLock]:
        """Hold the lock of "last", in which the last number stands."""
        while True:
            _make_dir(os.path.dirname(self._root), 0o700, sync=False)
            try:
                lock = _open_locked(f"{self._root}last")
            except OSError as error:
                if error.errno not in _MISSING_ERRNOS:
                    raise
                continue  # RACE: maybe_cleanup() removed the directory
            try:
                for name in os.listdir(self._root):
                    if name.startswith(".") and _parse_ticket(name):
                        # CRASH: of a process that died with this lock
                        _unlink_if_exists(self._root + name)
                yield lock
            finally:
                with contextlib.suppress(OSError):  # what was done under the lock is done
                    lock.close()
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
            lock = _FileLock(path, os.O_RDWR)
            try:
                if _boot_of_ticket(name) == self._boot:
                    dead = lock.try_exclusive()
                else:  # by its open file: what stat() tells may be a minute old (NFS)
                    dead = self._is_older(os.fstat(lock.fd).st_mtime)
            finally:
                lock.close()
        except OSError as error:
            if error.errno not in _MISSING_ERRNOS:
                raise
            return False  # RACE: given up just now
        if dead:
            _unlink_if_exists(path)
        return not dead

    def _after_fork(self) -> None:
        """In a forked child: it holds none of its parent's tickets."""
        self._held = {}


# ==================================================================================================
# 22. Command line: a function for each command. Its docstring is the help and an example.
#     Invariant: it calls public methods of FemtoQueue and FemtoTask only. Of the other rooms it
#     uses _WorkerPool (18), _CommandFailed, _end_s (3), and parsers of ids and keys (2).
# ==================================================================================================


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
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)  # open() returns fd, the lowest free one
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _program() -> str:
    """Return what a person types to run this: the installed command, or the copied file."""
    if os.path.basename(sys.argv[0]) != "femtoqueue.py":
        return "femtoqueue"
    return f"{os.path.basename(sys.executable) or 'python'} -m femtoqueue"


def _run_command(argv: list[str]) -> int:
    """Parse a command line, run its command, and return the exit status."""
    parser, commands = _build_parser()
    name = argv[0] if argv else ""
    if name not in commands:
        if name not in ("-h", "--help", "--version"):
            parser.error(_advise_command(argv, [*commands]))
        parser.parse_args(argv)  # exits
    dashes = argv.index("--") if "--" in argv else len(argv)
    options, unknown = commands[name].parse_known_intermixed_args(argv[1:dashes])
    options.after_dashes = argv[dashes + 1 :]
    if name == "work" and dashes == len(argv):
        _check_dashes(argv, options)
    if unknown:
        known = re.findall("(?<=[ ,])--[a-z-]+", commands[name].format_help())
        near = _nearest(unknown[0].partition("=")[0], known)
        hint = f"did you mean {near}?" if near else options.option_hint
        options.error(f"unknown option {unknown[0]!r}; {hint}")
    _find_directory(options)
    status: int = options.run(options)
    return status


def _nearest(word: str, known: list[str]) -> str:
    """Return the known word that is most like a mistyped one; "" if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, known, 1, 0.65)), "")


def _advise_command(argv: list[str], commands: list[str]) -> str:
    """Say what to type instead of a command line that does not begin with a command."""
    import shlex

    if not argv:
        return f"COMMAND is missing: {', '.join(commands)}"
    name, *rest = argv
    found = [word for word in rest if word in commands]
    if name == "help":
        return f"type: {' '.join([_program(), *found[:1]])} --help"
    if found:
        argv.remove(found[0])
        return f"the command comes first: {_program()} {shlex.join([found[0], *argv])}"
    if name.startswith("-"):
        return f"unknown option {name!r}; see {_program()} --help"
    near = _nearest(name, commands)
    line = f"did you mean: {_program()} {shlex.join([near, *rest])}"
    return f"unknown command {name!r}; {line if near else 'there are ' + ', '.join(commands)}"


def _check_dashes(argv: list[str], options: Any) -> None:
    """Exit with an error if the command of `work` stands there without -- in front of it."""
    import shlex

    words = options.words
    lacks_dir = os.environ.get("FEMTOQUEUE_DIR") and words and not os.path.isdir(words[0])
    skipped = 0 if lacks_dir else 1  # words in front of CMD
    if len(words) > skipped:
        at = argv.index(words[skipped], argv.index(words[0]) + skipped)
        line = f"{shlex.join(argv[:at])} -- {shlex.join(argv[at:])}"
        options.error(f"put the command after --: {_program()} {line}")


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
    return bool(_parse_id(word) or _FORMS["inflight"](word.rpartition("/")[2]))


def _build_parser() -> tuple[Any, dict[str, Any]]:
    """Return the parser of the command line, and those of the commands by their names."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            if message.endswith("expected one argument"):
                message += f"; see {self.prog} --help"
            self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage

    parser = Parser(
        prog=_program(),
        description="A durable task queue in a directory, DIR. COMMAND --help says more.",
        epilog="DIR may come from $FEMTOQUEUE_DIR instead. A TIME is 500ms, 30s, 5m, 2h, 7d, or "
        "seconds. Status: 0 ok, 1 nothing there or a condition not met, 2 wrong use or trouble.",
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
    commands: Any, run: Callable[[Any], int], words: str = "", is_word: Any = None, advice: str = ""
) -> Any:
    """Add a command, named and documented as its function, and return its parser.

    words: its arguments after DIR, for the usage. is_word: tells whether an argument can be one of
    them (None: no); another one in front is DIR. advice: what to type instead of one that cannot.
    """
    import argparse
    import textwrap

    name = run.__name__[1:].removesuffix("_command")
    text, _, example = re.sub("(?m)^ +", "", run.__doc__ or "").strip().partition("Example: ")
    summary = text.partition("\n")[0].rstrip(".")
    command = f"{_program()} {name}"
    usage = f"{command} [options] DIR {words}".rstrip()
    parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:],
        usage=usage,
        description="\n\n".join(textwrap.fill(it, 79) for it in text.split("\n\n")),
        epilog="example:\n  " + example.replace("\n", "\n  ").replace("femtoqueue", _program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run, error=parser.error, command=command, usage=usage)
    parser.set_defaults(is_word=is_word or (lambda word: False))
    parser.set_defaults(word_hint=advice or usage, option_hint=f"see {command} --help")
    return parser


def _invalid(text: str, wanted: str) -> Exception:
    """Return the exception by which argparse rejects the value of an option."""
    import argparse

    return argparse.ArgumentTypeError(f"invalid {text!r}; {wanted}")


def _seconds(text: str, positive: bool = False) -> float:
    """Return the seconds of a TIME."""
    form = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{0,9})?)(ms|s|m|h|d|)", text)
    if form is None:
        raise _invalid(text, "a TIME is 500ms, 30s, 5m, 2h, 7d, or 1.5 for seconds")
    seconds = float(form[1]) * {"ms": 0.001, "m": 60, "h": 3600, "d": 86400}.get(form[2], 1)
    if positive and not seconds:
        raise _invalid(text, "it must be more than 0")
    return seconds


def _timestamp(text: str) -> float:
    """Return seconds since the epoch: local time, unless an offset says otherwise."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()
    except ValueError:
        raise _invalid(text, "WHEN is 2026-12-01T08:00, or 2026-12-01T08:00+01:00") from None


def _count(text: str) -> int:
    """Return a number of up to six digits."""
    if not re.fullmatch("[0-9]{1,6}", text):
        raise _invalid(text, "it must be a number from 0 to 999999")
    return int(text)


def _id_text(text: str) -> str:
    """Return an id as it is."""
    if not _parse_id(text):
        raise _invalid(text, _ID_FORM)
    return text


_ID_FORM = "an ID is the last 29 characters of a task's name, as `ls` prints it"
_LEASE_FORM = "an ID is an id, or the path that `pop` printed"
_TIME: dict[str, Any] = {"metavar": "TIME", "type": _seconds}
_LEASE = {**_TIME, "type": functools.partial(_seconds, positive=True), "default": 30.0}
_NUMBER: dict[str, Any] = {"metavar": "N", "type": _count}
_TAIL_BYTES = 4096  # of the standard error of a command, as the reason of its failure
_SYNC_HELP = "survive power loss, not only the death of processes"


def _add_push(commands: Any) -> None:
    """Add push and its options."""
    parser = _add_command(commands, _push_command, "[PAYLOAD ...]", _is_any)
    parser.set_defaults(option_hint="put a PAYLOAD that begins with - after --")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--lines", action="store_true", help="push each line of standard input")
    add("-0", "--null", action="store_true", help="push each piece that a zero byte ends")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--delay", **_TIME, help="wait for TIME before it joins the queue")
    add("--at", metavar="WHEN", type=_timestamp, help="wait until WHEN, as 2026-12-01T08:00")
    add = parser.add_argument
    add("--key", metavar="TEXT", help="replace the payload of this key's task, if one waits")
    add("--if-in-flight", choices=_IF_IN_FLIGHT, help="if that task is leased (default: buffer)")
    add("--sync", action="store_true", help=_SYNC_HELP)


def _add_work(commands: Any) -> None:
    """Add work and its options."""
    add = _add_command(commands, _work_command, "-- CMD [ARG ...]").add_argument
    add("-j", "--jobs", **_NUMBER, default=1, help="run N commands at a time (default: 1)")
    add("--drain", action="store_true", help="exit when no task waits or is in flight")
    add("--max-attempts", **_NUMBER, default=3, help="give up after N tries; 0: never (default: 3)")
    add("--retry-delay", **_TIME, default=1.0, help="before a second try; doubles (default: 1s)")
    add("--timeout", **_LEASE, help="length of the lease, renewed while CMD runs (default: 30s)")
    add("--task-timeout", **_TIME, help="kill CMD after TIME (default: never)")
    add("--output-dir", metavar="DIR", help="write CMD's output to DIR/ID.out and DIR/ID.err")
    add(
        "--keep-done", **_TIME, default=True, help="delete what is done after TIME (default: never)"
    )
    add("--node", metavar="TEXT", help="name of this worker (default: a fresh one)")
    add("--sync", action="store_true", help=_SYNC_HELP)
    add("-q", "--quiet", action="store_true", help="report no progress")


def _add_leases(commands: Any) -> None:
    """Add the commands that take tasks, and end or renew what `pop` leased."""
    parser = _add_command(commands, _pop_command, advice="for a task by its id: --id ID")
    add = parser.add_argument
    add("--timeout", **_LEASE, help="length of the lease (default: 30s)")
    add("--wait", **_TIME, default=0.0, help="wait for TIME if there is no task (default: 0s)")
    add("--node", metavar="TEXT", default="cli", help="name of the worker (default: cli)")
    add("--payload", action="store_true", help="print the payload")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--key", metavar="TEXT", help="lease the task of this key, out of turn")
    add("--id", metavar="ID", type=_id_text, help="lease this task, out of turn, due or not")
    _add_command(commands, _cancel_command, "ID ...", _is_task, _ID_FORM)
    ids = ("ID ...", _is_task, _LEASE_FORM)
    _add_command(commands, _done_command, *ids)
    add = _add_command(commands, _fail_command, *ids[:2], f"{_LEASE_FORM}; why: --reason TEXT")
    add.add_argument("--reason", metavar="TEXT", help="why it failed")
    ids = (*ids[:2], f"{_LEASE_FORM}; how long: --delay TIME")
    add = _add_command(commands, _release_command, *ids).add_mutually_exclusive_group().add_argument
    add("--front", action="store_true", help="to the front of the queue")
    add("--delay", **_TIME, default=0.0, help="to the back, after TIME (default: 0s)")
    ids = (*ids[:2], f"{_LEASE_FORM}; how long: --timeout TIME")
    add = _add_command(commands, _extend_command, *ids).add_argument
    add("--timeout", **_LEASE, help="length of the lease from now on (default: 30s)")


def _add_views(commands: Any) -> None:
    """Add the commands that only look."""
    states = ("[STATE ...]", STATES.__contains__, f"a STATE is one of {', '.join(STATES)}")
    add = _add_command(commands, _ls_command, *states).add_argument
    add("--all", action="store_true", help="list every state, done too")
    add("--json", action="store_true", help="print a JSON object on each line")
    add = _add_command(commands, _show_command, "ID", _is_task, _ID_FORM).add_argument
    add("--payload", action="store_true", help="print the payload only")
    add = _add_command(commands, _stat_command).add_argument
    add("--json", action="store_true", help="print a JSON object")
    add("--max-age", **_TIME, help="exit with 1 if the oldest pending task is older")
    add("--max-pending", **_NUMBER, help="exit with 1 if more than N tasks are pending")
    add = _add_command(commands, _top_command).add_argument
    add("--interval", **_LEASE | {"default": 1.0}, help="time between two looks (default: 1s)")
    add("-n", "--count", **_NUMBER, help="exit after N looks (default: no limit)")


def _add_maintenance(commands: Any) -> None:
    """Add the commands that operate a queue."""
    _add_command(commands, _pause_command)
    _add_command(commands, _resume_command)
    add = _add_command(commands, _check_command).add_argument
    add("--repair", action="store_true", help="repair what is safe to repair")
    add = _add_command(commands, _retry_command, "[ID ...]", _is_task, _ID_FORM).add_argument
    add("--all", action="store_true", help="retry all that failed")
    add = _add_command(commands, _purge_command, advice="how old: --older-than TIME").add_argument
    add("--older-than", **_TIME, help="delete what ended more than TIME ago (required)")
    add("--failed", action="store_true", help="delete dead letters, too")


# Command line: what several commands use


def _open_queue(options: Any, create: bool = False, **settings: Any) -> FemtoQueue:
    """Open the queue in DIR. Raises FileNotFoundError if there is none, unless create."""
    if os.path.exists(options.dir) and not os.path.isdir(options.dir):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; give a directory", options.dir)
    if not create and not os.path.isdir(os.path.join(options.dir, "pending")):
        text = f"there is no queue; `{_program()} push {options.dir} PAYLOAD` makes one"
        raise FileNotFoundError(errno.ENOENT, text, options.dir)
    return FemtoQueue(options.dir, **settings)


def _for_each_id(options: Any, act: Callable[[str], Any]) -> int:
    """Act on each ID. Report those that are in another state, go on, and return status 1 then."""
    if not options.words:
        options.error(f"an ID is missing: {options.usage}; {options.word_hint}")
    status = 0
    for word in options.words:
        try:
            act(word)
        except FemtoQueueError as error:
            _write_error(f"femtoqueue: {error}")
            status = 1
    return status


def _time_text(seconds: float | None) -> str:
    """Return a span of time in about six characters: 7s, 3m07s, 2h05m, 4d03h."""
    if seconds is None:
        return "-"
    sign, whole = "-" if seconds <= -1 else "", int(abs(seconds))
    for form, unit, part in (("d{:02}h", 86400, 3600), ("h{:02}m", 3600, 60), ("m{:02}s", 60, 1)):
        if whole >= unit:
            return f"{sign}{whole // unit}{form.format(whole % unit // part)}"
    return f"{sign}{whole}s"


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
        push = q.push if due_s is None else functools.partial(q.schedule, time_us=due_s * 1e6)
        for payload in payloads:
            ident = push(payload, **keyed)
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
        _encode_key(options.key)  # raises for an invalid one, before anything is made
        if len(words) > 1 or reads_pieces:
            options.error("--key goes with one payload: of a key, one task waits")
    if options.if_in_flight is not None and options.key is None:
        options.error("--if-in-flight goes with --key TEXT")


def _read_payloads(options: Any) -> Iterator[bytes]:
    """Yield the payloads on standard input, each as soon as it is complete."""
    stream: Any = sys.stdin.buffer
    if sys.stdin.isatty():
        _write_error(f"reading the payload of a task for {options.dir}; end it with Ctrl-D")
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
        options.error(
            f"standard input is empty: {options.command} {options.dir} PAYLOAD; "
            "for an empty task, give '' as PAYLOAD"
        )


# Command line: work


def _work_command(options: Any) -> int:
    """Run CMD for each task, with the payload on its standard input.

    {} in an ARG is replaced by the payload. Give it to `sh -c` as an argument of its own: within
    the script, the payload would be run as code. A payload that cannot be an argument (it has a
    zero byte, or is too long) is a dead letter at once. The environment of CMD has FEMTOQUEUE_ID,
    FEMTOQUEUE_ATTEMPT and FEMTOQUEUE_KEY.

    If CMD exits with 0, the task is done. Else it is tried again later; in the end it is a dead
    letter, with the end of CMD's standard error as the reason.

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
        options.error(f"the command is missing: {options.command} {options.dir} -- CMD ARGS")
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
        """Write to a stream, with the progress line erased meanwhile."""
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
        """End the thread, and report what the pool has done."""
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
        """Run CMD for a task. Raises _CommandFailed, or SystemExit if the worker can't run it."""
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
    Status 1: there is no task to lease.
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
                print(task.path, file=sys.stderr)
            else:
                print(task.path)
            sys.stdout.flush()
        except BaseException:  # a lease that was not printed can not be settled
            q.release(task, front=True, counted=False)
            raise
    return 0


def _cancel_command(options: Any) -> int:
    """Delete tasks that wait, due or not.

    A task in another state stays as it is. Status 1: one of them did not wait, or the queue is
    paused.
    Example: femtoqueue cancel jobs 01795243500123456789-0a1b2c3d
    """
    with _open_queue(options, keep_done=False) as q:

        def cancel(word: str) -> None:
            ident = _id_of(word)
            task = q.take(id=ident)
            if task is None:
                raise TaskNotFound(_why_not_taken(q, ident))
            q.done(task)

        return _for_each_id(options, cancel)


def _why_not_taken(q: FemtoQueue, ident: str) -> str:
    """Say why take(id=) returned None. Raises CorruptTask if the file is not a whole record."""
    if q.paused:
        return f"task {ident} can't be taken: the queue is paused; `{_program()} resume` it first"
    task = q.peek(ident)
    return f"task {ident} is not waiting: {'no such task' if task is None else task.state}"


def _settle_each(options: Any, end: Callable[[FemtoQueue, FemtoTask], Any]) -> int:
    """Settle the lease of each ID, and return the exit status."""
    with _open_queue(options) as q:
        return _for_each_id(options, lambda word: end(q, q.attach(word)))


def _done_command(options: Any) -> int:
    """End tasks that `pop` leased: they move to done/.

    Example: femtoqueue done jobs "$task"
    """
    return _settle_each(options, FemtoQueue.done)


def _fail_command(options: Any) -> int:
    """Make dead letters of tasks that are in flight, with a reason.

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
    or the task is due, key, node. If standard output is not a terminal, tabs separate them, and
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
    """Print the fields of a task, and its payload.

    Example: femtoqueue show jobs 01795243500123456789-0a1b2c3d
    """
    if len(options.words) != 1:
        options.error(f"give one ID: {options.command} {options.dir} ID")
    ident = _id_of(options.words[0])
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
    age_s, troubles = stats.oldest_pending_age_s or 0, []
    if options.max_pending is not None and stats.pending > options.max_pending:
        troubles.append(f"femtoqueue: {stats.pending} tasks are pending")
    if options.max_age is not None and age_s > options.max_age:
        troubles.append(f"femtoqueue: the oldest task waits for {_time_text(age_s)}")
    for text in troubles:
        _write_error(text)
    return int(bool(troubles))


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
    """Show the queue live: counts, rates, workers and their leases.

    The key q ends it. Without a terminal, it prints a block each --interval, --count times.
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
        import termios
        import tty
    except ImportError:  # not POSIX
        is_terminal = False
    if not is_terminal:
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    keys = _KeyReader(fd)
    try:
        tty.setcbreak(fd)
        print("\x1b[?1049h\x1b[?25l", end="", flush=True)  # the alternate screen, no cursor
        yield keys.read
    except OSError as error:
        if error.errno != errno.EIO or error.filename is not None:
            raise  # not the terminal that is gone
    finally:
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            print("\x1b[?25h\x1b[?1049l", end="", flush=True)
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


class _KeyReader:
    """Reads the keys of a terminal, and exits when a signal asks for it.

    RACE: what the handler raises is lost if the signal comes while Python finalizes an object, as
    at the end of an import. So read() looks at the signals, too.
    """

    def __init__(self, fd: int) -> None:
        import select
        import signal

        self._select, self._fd = select.select, fd
        self._signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)

    def read(self, seconds: float) -> str:
        """Wait for a key and return it: "" if none was pressed, Ctrl-D if the terminal is gone."""
        if self._signals:
            sys.exit(128 + self._signals[0])
        if not self._select([self._fd], [], [], seconds)[0]:
            return ""
        with contextlib.suppress(OSError):
            return os.read(self._fd, 1).decode("ascii", "replace") or "\x04"
        return "\x04"

    def _end(self, number: int, frame: object) -> NoReturn:
        self._signals.append(number)
        sys.exit(128 + number)


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
            *_table(
                ({it: getattr(n, it) for it in _NODE_COLUMNS} for n in stats.nodes), _NODE_COLUMNS
            ),
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
    """Hand out no task in any process, until resume.

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

    It reads every task. Status 1: something is odd, and was not repaired.
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
    """Put failed tasks at the back of the queue, as if they were new.

    Example: femtoqueue retry jobs --all
    """
    if bool(options.words) == options.all:
        given = f"{options.command} {options.dir}"
        options.error(f"which tasks? {given} ID ..., or all: {given} --all")
    with _open_queue(options) as q:
        if options.all:
            print(q.retry_failed())
            return 0
        return _for_each_id(options, lambda word: q.retry(_id_of(word)))


def _purge_command(options: Any) -> int:
    """Delete tasks that were done long ago, and print how many.

    With --failed, tasks that failed long ago, too.
    Example: femtoqueue purge jobs --older-than 7d
    """
    if options.older_than is None:
        options.error(f"how old? {options.command} {options.dir} --older-than 7d")
    with _open_queue(options) as q:
        print(q.purge(options.older_than, ("done", "failed") if options.failed else ("done",)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
