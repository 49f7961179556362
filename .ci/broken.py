"""Mutation tests: faults of a few lines in femtoqueue.py that the tests and the proofs must catch.

    python .ci/broken.py --check
    python .ci/broken.py --tests [N] [--seed S] [--only TEXT]

Each row of FAULTS replaces a text of femtoqueue.py by another one, and so breaks a promise. The
first line of a row has the promise, and the class in test.py that should catch the fault. "-k WORD"
chooses the tests of this class whose names contain WORD. The proofs that must catch the fault in
their --self-check follow. Each proof has an argument:

    faults.py            the system calls at which errors are injected, or SIGKILL
    fuzz.py              the kind of seeds
    power_loss.py        the file system
    hosts.py             the part
    nfs.py               the phase
    storm.py             none

An argument may be followed by "~" and a pattern that the proof's failure message must match. When
femtoqueue.py is rewritten, a row gets a new text and keeps its promise.

--check tests that each text is in femtoqueue.py exactly once, and that the changed source compiles.

--tests first tests the same. Then it tries each fault, or a random sample of N faults, in a copy of
the project. It runs the tests that should catch the fault, up to the first failure. If no test
fails, it runs the whole test.py. In a row marked "hangs", a test that does not end counts as a
failure, too. Such a row has a "-k WORD": a whole class may be slow. The sample depends on --seed,
which is the date by default. --only takes the rows whose promise contains TEXT.

The exit status is 1 if --check fails, or if a fault is caught by no test: then a test is missing.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from proof import PROGRAM, PROJECT, Unable, Violation, docstring_parser, read, say

# How long test.py may take: for a row marked "hangs", for a class, for all tests.
HANG_S, CLASS_S, ALL_S = 40, 400, 1200
HANG = "a test that does not end"


@dataclass(frozen=True)
class Fault:
    promise: str
    # the class, or "Class -k WORD", that should catch the fault; "-": only proofs catch it
    expected: str
    hangs: bool  # a test that does not end counts as a failure
    # a proof's name, its argument, the pattern after "~"
    caught_by: list[tuple[str, str, str]]
    old: str  # text of femtoqueue.py
    new: str  # the text to put in its place

    def apply(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless `old` occurs exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(
                f"the text occurs {source.count(self.old)} times: {self.old!r}"
            )
        return source.replace(self.old, self.new)

    def copy(self, directory: str) -> str:
        """Copy the project into a new directory below `directory`, with the fault in
        femtoqueue.py; return the path of the copy."""
        project = tempfile.mkdtemp(dir=directory)
        ignored = shutil.ignore_patterns(".git*", "*cache*")
        shutil.copytree(PROJECT, project, ignore=ignored, dirs_exist_ok=True)
        with open(
            os.path.join(project, "femtoqueue.py"), "w", encoding="utf-8"
        ) as file:
            file.write(self.apply(read("femtoqueue.py")))
        return project


def copies() -> tempfile.TemporaryDirectory[str]:
    """Return a context manager that makes a directory for copies of the project, in memory if
    possible, and removes it."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return tempfile.TemporaryDirectory(prefix="femtoqueue-broken-", dir=memory)


def must_catch(
    seed: int,
    options: Callable[[str], Iterable[str]],
    is_wanted: Callable[[str], bool] = lambda need: True,
    tries: int = 1,
) -> None:
    """Show that the calling proof catches each fault whose row names the proof (--self-check).

    Runs the proof on a copy of the project with the fault. `options` turns the argument in the row
    into command line options. The proof must fail with one of `tries` seeds, from `seed` on, and
    its message must match the row's pattern. Only rows whose argument `is_wanted` accepts are
    tried. Raises Violation if a fault is not caught, Unable if the proof cannot run here.
    """
    rows = [
        (fault, need, said)
        for fault in parse_faults(FAULTS)
        for name, need, said in fault.caught_by
        if name == PROGRAM and is_wanted(need)
    ]
    if not rows:
        raise Violation("no fault names this proof")
    with copies() as directory:
        for fault, need, said in rows:
            project = fault.copy(directory)
            text = ""
            for number in range(seed, seed + tries):
                words = f".ci/{PROGRAM}.py", "--seed", f"{number}", *options(need)
                status, text = run_copy(project, *words)
                if status == 3:
                    raise Unable(text)
                _, failed, failure = text.rpartition(f"{PROGRAM}: FAILED")
                if status == 1 and failed and re.search(said, failure):
                    say(f"{fault.promise}: caught{failure}"[:300].partition("\n")[0])
                    break
            else:
                raise Violation(
                    f"{fault.promise}: not caught with {need}: {text[-3000:]}"
                )


def parse_faults(text: str) -> Iterator[Fault]:
    """Yield the faults of a text in the form of FAULTS.

    The first line of a row is
    "<promise> | <class> [-k <word>] [hangs][; <proof>: <argument>[ ~ <pattern>]]...". It may be
    continued on lines that begin with "; ". Then come lines as in a diff. The lines with "-" or " "
    in front are the old text. The lines with "+" or " " in front are the new text. If no line
    begins with "+" or " ", the new text is `pass`.
    """
    for part in re.split(r"\n(?=[^-+; \n])", text.strip()):
        head, *lines = part.replace("\n; ", "; ").splitlines()
        promise, _, finders = head.partition(" | ")
        tests, *proofs = finders.split("; ")
        expected = tests.removesuffix(" hangs")
        needs = re.findall(r"(?m)^(\w+): (.*?) ?(?:~ (.*))?$", "\n".join(proofs))
        old, new = (
            "\n".join(it[1:] for it in lines if it[0] in signs)
            for signs in ("- ", "+ ")
        )
        indent = re.match(" *", old)[0]  # type: ignore[index]
        yield Fault(
            promise, expected, tests != expected, needs, old, new or f"{indent}pass"
        )


FAULTS = r"""
a new data_dir is synced into its parent | Durability
-        if sync:
+        if not path:
             above =
a new directory of the queue is synced | Durability
         if self.is_durable:
-            self.sync_dir("")
             # Another process may just
a file whose lstat() fails does not count as missing | Faults
-        with _ignore_missing():
-            return self.lstat(path).st_mode
+        with suppress(OSError):
+            return self.lstat(path).st_mode
purge() counts age from the move, not from the push | Model
-            if self.lstat(path).st_ctime <= before_s:
+            if self.lstat(path).st_mtime <= before_s:
an error in one directory does not delay work in the others | Faults
-            errors.append(error)
+            raise error
an id shows whether its task has a key | Keyed
-int.from_bytes(digest, 'big') | 1 << 63:016x
+int.from_bytes(digest, 'big') & ~(1 << 63):016x
a name whose number does not have 20 digits is foreign | ForeignFiles
-_NS = "0[0-8][0-9]{18}"
+_NS = "0[0-8][0-9]{17,18}"
a name whose tag is not 16 hex digits is foreign | ForeignFiles; fuzz: names
-_ID = f"({_NS}-[0-9a-f]{{16}})"
+_ID = f"({_NS}-[0-9a-zA-Z]{{16}})"
a file with a foreign name is not removed | ForeignFiles; storm: ~ left over:
+        [self.remove(f"{directory}/{name}") for name in names if not _parse(directory, name)]
         return [entry for name in sorted(names) if (entry := _parse(directory, name))]
a node_id that cannot be part of a file name is refused | Lifecycle
-    match = _parse_node_dir("inflight-" + _check_str("node_id", node_id))
+    match = re.match("(.*)", f"{node_id}")
a key of more than 200 bytes is refused | Lifecycle
-_MAX_KEY_BYTES = 200
+_MAX_KEY_BYTES = 300
a key that is an Enum counts by its value | Lifecycle
-    return _quote_key(raw)
+    return _quote_key(str(key))
front=True puts a task back where its push had put it | Model
-    return f"pending/{_task_name(_stamp_of(ident), attempts, ident)}"
+    return f"pending/{_task_name(_stamp_of(ident) + 10**15, attempts, ident)}"
an argument that is NaN is refused | Lifecycle
-    if not least <= value < _MAX_NUMBER:  # also true for NaN
+    if value < least or value >= _MAX_NUMBER:  # also true for NaN
max_attempts of True is refused | Lifecycle
-        type(max_attempts) is not int or not 1 <= max_attempts
+        not isinstance(max_attempts, int) or not 1 <= max_attempts
two tasks are equal only if their attempts are | Lifecycle
-        return self.id, self.data, self.attempts, self.key
+        return self.id, self.data, self.key
a payload that is a str is refused | Lifecycle
-        return memoryview(data).cast("B")
+        return memoryview(f"{data}".encode() if isinstance(data, str) else data).cast("B")
a record with a wrong checksum is never delivered | Corruption; fuzz: contents
-    if _header(payload, name) != header[0]:
+    if not header[0]:
a record with bytes after its payload is never delivered | Corruption
-    if status.st_size - start != length:
+    if status.st_size - start < length:
a record with the key of another id is never delivered | Corruption
- or _key_tag(name) != _tag_of(ident):
+:
the checksum of a record covers its key | Compatibility
-binascii.crc32(payload, binascii.crc32(name))
+binascii.crc32(payload)
the rest of a short write is written | Corruption
-        while rest:
+        if rest:
a payload that read() returns in parts is read completely | Corruption
-    while len(payload) < length and (part
+    while len(payload) < -1 and (part
a symbolic link in pending/ is not a task | ForeignFiles
-_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) |
+_NO_FOLLOW_OR_BLOCK =
a FIFO in pending/ does not block pop() | ForeignFiles -k fifos hangs
-_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
+_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0)
a forked child closes its parent's lock files | Liveness
-        _fork_hooks[self] = _OpenFile.close
+        self._fork_hook = _OpenFile.close
a lock on a file that was removed does not count | Tickets
             lock.acquire_exclusive(until_s)
-            if not lock.is_at_path():
+            if lock.fd < 0:
an error of flock() is raised, unless the file system does not support locks | Faults
-        if error.errno in _NO_FLOCK_ERRNOS:
+        if error.errno:
sync_after_write: the bytes of a push are synced | Durability
; power_loss: ext4; power_loss: xfs; power_loss: btrfs
-                if is_synced:
+                if not source:
                     os.fsync(fd)
sync_after_write: the name of a push is synced | Durability
-            if is_synced:
+            if is_synced and not source:
                 self.sync_dir(directory)
sync_after_write: the file of a finished task is synced | Durability
-            self.sync_file(path)
sync_after_write: the directory of a finished task is synced | Durability
-        self.sync_dir(os.path.dirname(path))
a file that replaces another is synced before the rename | Durability
-                if self.is_durable:
+                if not path:
a push that raises an error leaves nothing in creating/ | Faults; faults: writev write
-            for leftover in (f"creating/{new_name}", f"{directory}/{name}"):
+            for leftover in (f"{directory}/{name}",):
a push that raises an error leaves no task | Faults
-            for leftover in (f"creating/{new_name}", f"{directory}/{name}"):
+            for leftover in (f"creating/{new_name}",):
push() does not return an id if the task was not written | Faults
; faults: writev write renameat; storm: ~ found:; hosts: quorum ~ is lost|never delivered
-        self._files.publish(ident, data, "pending", ident, self.sync_after_write)
+        with suppress(OSError):
+            self._files.publish(ident, data, "pending", ident, self.sync_after_write)
an error of push_many() tells the ids of the tasks that were pushed | Lifecycle
-                error.pushed_ids = ids
+                error.pushed_ids = ids[:-1]
sync_after_write: a batch is synced | Durability
-            _call_libc("syncfs", opened.path, opened.fd)
sync_after_write: each task of a batch is synced where syncfs() does not sync all | Durability
-            yield self.is_durable
+            yield False
keep_done=False: the lease is synced before it is removed | Durability
-            self.files.sync_with_dir(lease.path)
a move succeeds though the directory is replaced meanwhile | Shrinking
-            return self.move(source, target)
+            raise
a push succeeds though pending/ is replaced meanwhile | Shrinking
-                    except FileNotFoundError:
                         # RACE (Shrinking): another worker replaces pending/.
+                    except FileExistsError:
+                        # RACE (Shrinking): another worker replaces pending/.
a pending/ that is replaced keeps its mode | Shrinking
-            _follow_owner(made.fd, old, mode)
a large pending/ is replaced when it is empty | Shrinking
-        if not self._batch.seen:
+        if self._batch.seen:
a finished task is not delivered, even if a second name of it came back | Lifecycle
-        if "~1~" not in source and
+        if not source and
the claim is one rename: a task is leased once | Crash
; faults: SIGKILL; hosts: calm ~ leased twice|stands in; nfs: calm ~ leased twice|stands in
-            os.rename(
-                old.prefix + name,
-                held.prefix + new_name,
-                src_dir_fd=old.fd,
-                dst_dir_fd=held.fd,
-            )
+            new = held.prefix + new_name
+            os.link(old.prefix + name, new, src_dir_fd=old.fd, dst_dir_fd=held.fd)
+            with suppress(FileNotFoundError):
+                os.unlink(old.prefix + name, dir_fd=old.fd)
the claim is one rename: a task is in one state at each instant | Crash; faults: SIGKILL
-            os.rename(
-                old.prefix + name,
-                held.prefix + new_name,
-                src_dir_fd=old.fd,
-                dst_dir_fd=held.fd,
-            )
+            fd = os.open(old.prefix + name, os.O_RDONLY, dir_fd=old.fd)
+            with open(fd, "rb") as file:
+                content = file.read()
+            os.unlink(old.prefix + name, dir_fd=old.fd)
+            with open(f"{self._files.path}/{lease.path}", "wb") as file:
+                file.write(content)
a claim moves a task only into the directory whose lock the worker holds | LeaseDirectoryLost
-                held.prefix + new_name,
-                src_dir_fd=old.fd,
-                dst_dir_fd=held.fd,
+                f"{self._files.path}/{lease.path}",
+                src_dir_fd=old.fd,
work() passes over a task that can't be read | TroubleOfOneTask
-            error.task_id = _id_of(place)  # type: ignore[attr-defined]
+            pass
a task that can't be read has its attempts counted | TroubleOfOneTask
-            counted = _attempts_of(lease.path if is_counted else place)
+            counted = _attempts_of(place)
a task whose file or key is locked goes to the back uncounted | TroubleOfOneTask
-            is_counted = is_its_own and not isinstance(error, BlockingIOError)
+            is_counted = is_its_own
a task whose claim failed by another error goes to the back uncounted | Faults
-            counted = _attempts_of(lease.path if is_counted else place)
+            counted = _attempts_of(lease.path)
a task whose claim failed because of the disk does not block other tasks | Faults
- and (is_its_own or not _is_passing(error)):
+ and is_its_own:
a task goes where it was if the system had no descriptor left to read it | Faults
-    return getattr(error, "errno", None) in (None, *_TRANSIENT_ERRNOS)
+    return getattr(error, "errno", None) is None
a scheduled task whose reading failed keeps its due time | Lifecycle
-        if place.startswith("pending/") and (is_its_own
+        if (is_its_own
work() pauses after a task that it passes over | TroubleOfOneTask
-        time.sleep(_BASE_INTERVAL_S)  # it may be the only task
work() ends if nothing but errors of single tasks comes | TroubleOfOneTask -k work_raises hangs
-        if not ident or (now_s >= self._trouble_end_s and not self._running):
+        if not ident:
root changes the mode only of a file that it made itself | ManyUsers
-            flags = _LOCK_FLAGS | os.O_CREAT | os.O_EXCL
+            flags = _LOCK_FLAGS | os.O_CREAT
a due time is compared with a margin of a microsecond | ReplacedClock
-    return _wall_ns() + 1000
+    return _wall_ns()
a run that stopped before its end goes on when no task waits | ReplacedClock
-            if not act():
-                self._unfinished.discard(what)
+            act()
+            self._unfinished.discard(what)
a payload that came to keys/ is looked at soon | Keyed
-_REPAIR_INTERVAL_S = 30.0
+_REPAIR_INTERVAL_S = 600.0
a checkpoint that this user may not read does not stop the delivery | ManyUsers
-    except (CorruptTask, PermissionError, NotADirectoryError) as error:
+    except CorruptTask as error:
work() goes on if the end of a task fails because of the task's file | Work
-                if getattr(error, "errno", None) in _ONE_FILE_ERRNOS:
+                if lease is None:
a clock file whose time no honest clock shows is written again | Ordering
-                return int(text) if _EARLIEST_NS <= now_ns < _LATEST_CLOCK_NS else 0
+                return int(text)
orders of one object strictly increase | Model
-            order_ns = self._order = now_ns if now_ns > self._order else self._order + 1
+            order_ns = self._order = now_ns
after a boot with an earlier date, new tasks sort behind old ones | Ordering
-            times_ns += [order_ns + 1 for order_ns in orders if order_ns < latest_ns]
a machine that boots decades in the past sorts new tasks behind old ones | Ordering
-    return max(_date_ns(), _RELEASE_NS) +
+    return _date_ns() +
a date after 2096 does not set the queue clock | Ordering
-    return now_ns if now_ns < 4 * 10**18 else _RELEASE_NS
+    return now_ns
the processes of a boot agree on one clock | Ordering
-                os.link(
+                os.replace(
setting the date changes neither order nor deadlines | Ordering; fuzz: lives; storm: ~ first:
-            now_ns = int(time.monotonic() * 1e9) + self.anchor_ns
+            now_ns = int(time.time() * 1e9)
a forged id of the far future does not move the queue clock | Trust
- for order_ns in orders if order_ns < latest_ns]
+ for order_ns in orders]
the batch of a huge directory has the oldest names | Ordering
-            del names[:-_MAX_BATCH]
+            del names[_MAX_BATCH:]
tasks are delivered in the order of push() | Model; fuzz: lives; hosts: calm ~ in the order
-            names.sort(reverse=True)
+            names.sort()
a task put back to the front is delivered next | Model
-            if names and name < names[0]:
+            if names and name > names[0]:
a task put back to the front has the order of its push | Lifecycle
-            if names and name < names[0]:
+            if names and name < names[-1]:
a worker that restarts under its node_id takes back its tasks | Model
-        elif self._held is None and lock.try_lock() and lock.is_at_path():
+        elif self._held is None and not lock.try_lock():
a detached lease outlives a restart of its node_id | Transcripts
- for it in self.files.entries(directory) if it.boot != _DETACHED]
+ for it in self.files.entries(directory)]
a claim that is interrupted is undone | Faults; faults: read
             except BaseException as error:
-                self._undo_claim(lease, error)
                 raise
a claim by key or id that is interrupted is undone | Lifecycle
             except BaseException as error:
-                self._undo_claim(lease, error)
                 if not isinstance
an error is raised, not taken for an empty queue | Faults; faults: read
             except BaseException as error:
                 self._undo_claim(lease, error)
-                raise
+                return None
a queue can be opened although no clock file can be made | Faults
-                if error.errno not in _NO_WRITE_ERRNOS:
+                if error:
close() gives back the worker's tasks | Model
-                    if is_alone:
+                    if not is_alone:
the interpreter exits even if a thread holds the worker's lock | InterruptedDelivery -k exits hangs
-        if not worker.lock.acquire(blocking=not sys.is_finalizing()):
+        if not worker.lock.acquire():
close() does not touch the leases of another worker with the same node_id | Model
-            if is_alone is None or (is_alone and lock.is_at_path()):
+            if is_alone in (None, True):
a dead worker's tasks come back at once | Model
-            if not lock.try_lock() or not lock.is_at_path():
+            if lock.try_lock() or not lock.is_at_path():
if a lease can't be moved, other leases still end | Liveness
-            try:
-                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
-            finally:
+            if True:
+                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
an interrupted opening of the lease directory leaves no lock | Faults
             if lock is not self._held:
-                lock.close()
+                pass
a process that can't see the boot id has a boot of its own | Liveness
-        return os.urandom(4).hex(), _compute_anchor(self._files)
+        return "7" * 8, _compute_anchor(self._files)
a process that can't see the boot id starts its clock after the newest id | Ordering
-        return os.urandom(4).hex(), _compute_anchor(self._files)
+        return os.urandom(4).hex(), _wall_ns() - _monotonic_ns()
where flock does not work, no worker takes the leases of a living one | MissingFunctions
-            self._clock.boot = os.urandom(4).hex()
register() takes another ticket if flock() fails for a removed file | SharedTickets
-(*_MISSING_ERRNOS, errno.EEXIST, errno.ENOTSUP)
+(*_MISSING_ERRNOS, errno.EEXIST)
a directory of the queue that is a link is refused | Durability
-_DIR_FLAGS = _ROOT_FLAGS | _NO_FOLLOW_OR_BLOCK
+_DIR_FLAGS = _ROOT_FLAGS
a lock file that is a link is not followed | Trust
-_LOCK_FLAGS = os.O_RDWR | _NO_FOLLOW_OR_BLOCK
+_LOCK_FLAGS = os.O_RDWR
a lease directory that is a link is left alone | ForeignFiles
-        return [name for name in names if not stat.S_ISLNK(self.mode_of(name))]
+        return names
pause() makes no file behind a link | Trust
-            os.close(self._files.create("PAUSED"))
+            os.close(os.open(f"{self._files.path}/PAUSED", os.O_WRONLY | os.O_CREAT))
a push writes only into the directory that the queue has opened | Faults
-            fd = os.open(source, _CREATE_FLAGS, self._file_mode, dir_fd=old.fd)
+            fd = os.open(f"{old.path}/{source}", _CREATE_FLAGS, self._file_mode)
a move stays in the directories that the queue has opened | Faults
-                old.prefix + name,
-                new.prefix + new_name,
-                src_dir_fd=old.fd,
-                dst_dir_fd=new.fd,
+                f"{self.path}/{source}",
+                f"{self.path}/{target}",
a read stays in the directory that the queue has opened | Faults
-                fd = os.open(where.prefix + name, _READ_FLAGS, dir_fd=where.fd)
+                fd = os.open(f"{where.path}/{name}", _READ_FLAGS)
a file is made, looked at and removed only in the directory that the queue has opened | Faults
-            return function(name, *args, dir_fd=where.fd)
+            return function(f"{self.path}/{path}", *args)
a listing shows only a directory of the queue that was opened, not what a link leads to | Faults
-            fd = os.open(directory or ".", _DIR_FLAGS, dir_fd=root.fd)
+            fd = os.open(f"{root.path}/{directory}", _ROOT_FLAGS)
a directory that was replaced is opened anew | Shrinking
-                if opened.is_at_path() if name else opened.status().st_nlink:
+                if name or opened.status().st_nlink:
a data_dir that was removed and made again is opened anew | Faults
-                if opened.is_at_path() if name else opened.status().st_nlink:
+                if not name or opened.is_at_path():
a process that only pushes notices that a directory was replaced | Shrinking
-                self._files.dirs.refresh()
             return f"0{order_ns}-{self.tag}"
a worker notices that a directory was replaced | Shrinking
-            self._files.dirs.refresh()
             if self.directory not in
no task is claimed after the lease directory was found to be gone | LeaseDirectoryLost
-        held = dirs.get(self.directory)
+        held = self._held
a lease directory that was replaced is made and locked again | LeaseDirectoryLost
-            if self.directory not in self._files.dirs:
+            if self._held is None:
a worker uses another directory if it may not open the one of its node_id | ManyUsers
-            except (PermissionError, NotADirectoryError):
+            except FileExistsError:
a worker uses another directory if it may not write to the one of its node_id | ManyUsers
-        if not os.access(lock.prefix + ".", os.W_OK, dir_fd=lock.fd):
+        if not lock:
a worker uses another directory if another process keeps its own locked | Liveness -k for_long hangs
-                if time.monotonic() >= end_s:
-                    raise PermissionError
a lease directory that this user may not read does not end the work | Trust
-        if isinstance(error, PermissionError):
+        if not directory:
             _warn_once(f"passed over: {error}")
those who may not write to data_dir can't lock a lease directory | Trust
-            mode &= 0o7711 | self.lock_mode
+            mode &= 0o7777
root is told that others decide what it works on | Checking
-    if not hasattr(os, "geteuid") or os.geteuid() != 0:
+    if files:
the opening of a queue as root logs who else decides what root works on | ManyUsers
-            _warn_once(f"{self._files.path}: {text}")
the text that is shown of a reason has a limit | ManyUsers
-            return os.read(fd, most_bytes)
+            return os.read(fd, most_bytes << 8)
close() closes the directories of the queue | Lifecycle
-            self._files.dirs.clear()
         finally:
             worker.lock.release()
an error of one file does not end the maintenance | Reported
-            if error.errno in _ONE_FILE_ERRNOS:
+            if error.errno in ():
an error of one file is logged once | Trust
-@functools.lru_cache(10_000)  # one text for each file that this user may not use
 def _warn_once(text: str) -> None:
an error of one file is logged once, however many such files there are | Reported
-@functools.lru_cache(10_000)  # one text for each file that this user may not use
+@functools.lru_cache
 def _warn_once(text: str) -> None:
an error of one file is logged once, although the target of its move has another name | Reported
                 # without the target of a rename, whose name may have the present time
-                _warn_once(f"passed over: {error.strerror}: {error.filename!r}")
+                _warn_once(f"passed over: {error}")
a finished task does not run again if done/ is a mount of its own | Lifecycle
-                        errno.EXDEV,
+                        0,
the functions for open directories are used although a library replaced os.open | MissingFunctions
-_HAS_DIR_FDS = os.rename in os.supports_dir_fd
+_HAS_DIR_FDS = os.open in os.supports_dir_fd
a missing data_dir is trouble with the disk, not a lost lease | Faults
-                self.files.dirs[directory if directory in _STATE_DIRS else "pending"]
+                _no_op(directory)
a look for a key in a missing queue raises an error | Keyed
-            self._files.lstat("pending")  # a missing pending/ is disk trouble
those who may not write to data_dir can't read the lock files | ManyUsers
-        self.lock_mode = 0o600 | writable | writable << 1
+        self.lock_mode = 0o644 | writable
all who may write to data_dir can take the locks | ManyUsers
-        self.lock_mode = 0o600 | writable | writable << 1
+        self.lock_mode = 0o600
only its owner writes the clock file | ManyUsers
-b"%d\n" % anchor_ns, mode=0o644)
+b"%d\n" % anchor_ns, mode=0o666)
all who have access to data_dir read the clock file | Faults
-b"%d\n" % anchor_ns, mode=0o644)
+b"%d\n" % anchor_ns, mode=0o600)
only its owner writes a checkpoint | ManyUsers
-    mode = 0o600 | files.mode & 0o044
+    mode = 0o600 | files.mode & 0o066
those who may not write to data_dir can't write to a task | Trust
-        self._file_mode = 0o644 | writable
+        self._file_mode = 0o666
a wait for a lock ends at the caller's timeout | LockWaits
-            if now_s >= until_s:
+            if not until_s:
a try to take a lock does not wait | Keyed
-            if now_s >= until_s:
+            if until_s and now_s >= until_s:
turn() waits no longer than its timeout for the lock of the line | LockWaits -k turn_ends hangs
-            held = self._join_line(end_s)
+            held = self._join_line(_FOREVER_S)
take() without a timeout waits a little for the lock of the key | LockWaits
-        until_s = _end_s(timeout if timeout != 0 else _LONG_WAIT_S)
+        until_s = _end_s(timeout)
a lease directory that is removed while it is opened is made again | KeyedInterrupted
-            except FileNotFoundError:
+            except BlockingIOError:
                 # RACE (KeyedInterrupted)
a line whose directory was made anew is read anew | Tickets
-        self._files.dirs.refresh()  # another process may have made the directory anew
take_async() does not wait for the lock of a key | LockWaits -k take_async hangs
-        until_s: float = 0,
+        until_s: float = _FOREVER_S,
the reclaim does not wait for the lock of a key | Keyed -k task_of_a_locked_key hangs
-            self.note_arrival(self.move_task(lease, target, 0))
+            self.note_arrival(self.move_task(lease, target))
the move of due tasks does not wait for the lock of a key | Keyed -k task_of_a_locked_key hangs
-            self.files.sync_with_dir(self.move_task(source, target, 0))
+            self.files.sync_with_dir(self.move_task(source, target))
the repair of keys does not wait for the lock of a key | Races -k repair_of_keys hangs
-                with self.lock(tag, 0):
+                with self.lock(tag):
a long wait for a lock is logged | LockWaits
-            if now_s >= began_s + _LONG_WAIT_S:
+            if not began_s:
a lock that was freed is taken within some hundredths of a second | LockWaits
-_LONGEST_LOCK_PAUSE_S = 0.01
+_LONGEST_LOCK_PAUSE_S = 3.0
a push that interrupted a call for the same key raises EDEADLK | LockWaits
-        if self._has_lock(tag):
+        if not tag:
             # A signal handler
a child forked unseen by Python makes ids of its own | Reported
-        if os.getpid() != _process_id:  # inlined: a call would be 5 % of push()
+        if not _process_id:
a child forked unseen by Python claims no task under its parent's name | Liveness
-        if os.getpid() != _process_id:  # inlined: a call would be 2 % of pop()
+        if not _process_id:
a child forked unseen by Python takes no task by key under its parent's name | Liveness
-        _notice_fork()
         return functools.partial(self._worker.take_named, tag, ident, length_ns)
the close() of a child forked unseen by Python does not give back its parent's tasks | Liveness
-        _notice_fork()
         worker = self._worker
a keyed push of a child forked unseen by Python does not use its parent's lock | Liveness
-        _notice_fork()
         # RACE (Keyed): another worker's pop()
a child forked unseen by Python draws tickets of its own | Tickets
-        _notice_fork()
         redraws = 0
a child forked unseen by Python leaves the turn to its parent | Tickets
                 over.set()
-                _notice_fork()
a directory with the name of a ticket does not stop the line | Tickets
-        with _ignore_missing(errno.EISDIR, errno.ENXIO, errno.ELOOP):
+        with _ignore_missing():
a damaged number in a line's "last" is ignored | Tickets
-            int(noted) if noted.isdigit() and noted < b"9" else 0,
+            int(noted) if noted.isdigit() else 0,
a third signal acts as before work() | Work -k third_signal hangs
-            os.kill(os.getpid(), number)
work() goes on if a failure can't be logged | Work
             # a log handler, or a method of the exception itself, may raise
-            with suppress(Exception):
+            with suppress(OSError):
a file that does not fit into memory does not stop check() | Checking
-            except MemoryError:
+            except RecursionError:
a child forked unseen by Python does not remove its parent's tickets | Tickets
-            _notice_fork()
             for member in list(self._held_tickets):
a child's close of its copy of a lock does not unlock the parent's | Liveness
-                if self._may_be_locked and os.getpid() == _process_id:
+                if self._may_be_locked:
a forked child opens its directories anew | Liveness
-        self._files.dirs.clear()
         self._clock.init_worker()
a pop() does not wait for long for the lock of a key | LockWaits -k pop_waits hangs
-        with self.lock(tag, time.monotonic() + self.claim_wait_s):
+        with self.lock(tag):
             newer = self._link_or_give_way
no pop() claims a task while its payload is replaced | KeyedConcurrency
-        aside = _payload_path(ident, _stamp_of(target) if is_scheduled else None)
+        aside = path
a push that replaces a payload delivers the new one | Model
-            self._files.move(new_path, target)  # the push is committed
+            self._files.remove(new_path)
a payload whose replacement was interrupted is not delivered before its due time | KeyedInterrupted
-        aside = _payload_path(ident, _stamp_of(target) if is_scheduled else None)
+        aside = _payload_path(ident, None)
a payload that replaces another starts with attempt 1 | Model
-        target = _fresh_path(path, due_ns)
+        target = path if due_ns is None else _fresh_path(path, due_ns)
         try:
             aside
a push whose task was claimed meanwhile is not lost | Keyed
             self._files.remove(new_path)
-            return ""
+            return ident
after a replacement, no older payload comes from behind the task | Keyed
-            self._files.unlink_if_exists(behind)
a push does not raise an error after its payload is in the queue | Keyed
-        with suppress(OSError), self._repaired_after_error():
+        with suppress(ZeroDivisionError):
             self._files.move(aside, target)
a payload whose replacement ended by a kill becomes a task | KeyedInterrupted
-        path = self._locate(task, *_LIVE, "keys")
+        path = self._locate(task, *_LIVE)
a payload of "update" ends with its task | Model
-        if _is_update(payload):
+        if not payload:
a task that is released keeps its attempts in spite of a payload of "update" | Model
-                if not _is_update(behind):
+                if behind:
a push with if_in_flight="update" returns the id of the leased task | Model
-                    ident = _id_of(path if _is_update(target) else target)
+                    ident = _id_of(target)
a pop() that close() meets does not open the lease directory again | InterruptedDelivery
-                        is_closed = self.lease_dir.close_count != close_count
+                        is_closed = False
a file is opened when another process gives up its lease of the kernel | TroubleOfOneTask
-    for _ in range(_KERNEL_LEASE_TRIES):
+    for _ in range(0):
a task whose file or key is locked does not block other tasks | TroubleOfOneTask
-            isinstance(error, (BlockingIOError, MemoryError))
+            isinstance(error, MemoryError)
if a listing shows only tasks pushed meanwhile, a second one gives their order | Races
-        elif not is_second:
+        elif not seen:
the lost+found of a mount point is no foreign name | Checking
-            elif mode and name != "lost+found" and not
+            elif mode and not
maybe_cleanup() returns False for a mount point | Tickets
-                with suppress(OSError):
+                with nullcontext():
                     os.rmdir(self._files.path)
an exception whose traceback can't be formatted still has a reason | Reported
-    except Exception:
+    except ValueError:
         return f"{type(error).__name__} (its traceback
work() goes on after an exception that has no text | Work
-        with suppress(Exception):  # str() of the handler's exception may raise
+        with suppress(ValueError):
if a worker is killed while a job ends, no process of the job is left | CommandLine
         if not request:  # the worker has ended, or its thread has
-            _kill({self.pid})
+            pass
if the launcher is killed, no process of a job is left | CommandLine
-            _kill({self.pid})
+            pass
         else:
a worker in a PID namespace signals no process of the host's /proc | CommandLine
-        if os.readlink("/proc/self") == str(os.getpid()):
+        if os.readlink("/proc/self"):
an environment that is too large makes no dead letters | CommandLine
-        if is_argument and error.errno in (errno.E2BIG, errno.EINVAL):
+        if error.errno in (errno.E2BIG, errno.EINVAL):
a slow reader gets all output | CommandLine
-max(end_s, self._moved_s + _GRACE_S)
+end_s
a log that nobody reads keeps no task from its end | CommandLine
-"backslashreplace"), 0.0, True)
+"backslashreplace"), _FOREVER_S, True)
the last line of progress is not repeated at the end | CommandLine
-        if self._has_terminal or line == before:
+        if self._has_terminal:
the line of progress is not cleared in the background | CommandLine
- if self._is_shown and _is_in_foreground() else
+ if self._is_shown else
a worker that waits for a process ends at --time-limit | CommandLine -k time_limit_ends
-            if self._is_stopping():
-                self._queue
+            if self._is_told.is_set():
+                self._queue
a payload makes an argument too large for memory: only its task fails | Transcripts
-(OSError, ValueError, MemoryError) as
+(OSError, ValueError) as
a dead letter whose payload did not fit into TMPDIR shows its attempts | Transcripts
-{tempfile.gettempdir()}{_try_text(task)}"
+{tempfile.gettempdir()}"
a worker whose Python is removed takes a keyed task | CommandLine
-    import urllib.parse  # noqa: F401
+    import urllib  # noqa: F401
a dead letter with a huge number in its reason ends no command | CommandLine
-(try (\d{1,6})
+(try (\d+)
a process whose first thread has ended is no zombie | CommandLine
- or int(more[13]) > 1
+ or int(more[13]) > 99
a stopped job can handle SIGTERM | CommandLine
-{self.pid}, number, signal.SIGCONT)
+{self.pid}, number)
a dead worker's lease from another boot ends at its deadline | Liveness
-[it.path for it in leases if boot in ("", it.boot)])
+[it.path for it in leases])
another host's lease that was just renewed is not reclaimed | Healed
- for it in late if not self._renewed_recently(it)]
+ for it in late]
the empty lease directory of another host's worker is kept for a minute | Liveness
- < _IDLE_NS
+ < 0
a lease ends at its deadline | Model; fuzz: lives
- for it in leases if it.stamp_ns <= now_ns]
+ for it in leases if it.stamp_ns <= now_ns - 10**10]
a lease lasts until its deadline | Model; fuzz: lives; storm: ~ held:
- for it in leases if it.stamp_ns <= now_ns]
+ for it in leases if it.stamp_ns <= now_ns + 10**10]
no task is delivered before its due time | Model; fuzz: lives; storm: ~ due:
-        count = bisect.bisect(names, _latest_due_ns(), key=_stamp_of)
+        count = bisect.bisect(names, _latest_due_ns() + 10**9, key=_stamp_of)
files that others write in creating/ are left alone for an hour | Crash
-_LEFTOVER_NS = 3600 * 10**9
+_LEFTOVER_NS = 1
an error in a directory is raised when no task waits | Faults
-        wanted = [*self._unfinished]
+        wanted = list[str]()
no task is delivered while PAUSED exists | ByHand
         if self._files.exists("PAUSED"):
-            self.drop_batch()
+            pass
done tasks are kept for keep_done seconds | Lifecycle
-        before_s = time.time() - self._worker.keep_done
+        before_s = time.time()
max_attempts is a limit | Model
-        if self.max_attempts is not None and before >= self.max_attempts:
+        if self.max_attempts is not None and before > self.max_attempts:
attempts are counted | Model
-        attempts = min(_attempts_of(name) + 1, _MAX_ATTEMPTS) if "~" in name else 1
+        attempts = 1
a corrupt task goes to failed/, and pop() goes on | Corruption
-            self.quarantine(lease.path, error.reason)
a worker that lost its lease can't end the task | Model
; fuzz: lives; storm: ~ settled:; hosts: cut ~ \(\) by .*, when|not refused
-                raise self.lease_lost(lease) from None
+                return target
done() and fail() raise the OSError of their rename | Faults; faults: renameat
                 raise self.lease_lost(lease) from None
+            except OSError:
+                gone_to = target
the rename to failed/ is the fence: the reason is written after the rename | Model
-            self.move_leased(lease, target, "failed")
-            # CRASH (faults.py): the task is in failed/, without a reason, or with an older one.
             self._put_reason(ident, path)
+            self.move_leased(lease, target, "failed")
a task fails although a directory has its name in failed/ | Faults
-            if not os.path.samestat(self.files.lstat(short), self.files.lstat(source)):
+            if not ident:
a task is done although a directory has its name in done/ | Trust
-                if "/done" in str(error.filename2 or error.filename):
+                if not lease:
retry() removes the reason of a task | Model
-                self.files.unlink_if_exists(f"failed/{ident}.error")
retry() puts a task at the back | Model
-        target = self.back_path(source, 0)
+        target = _push_place(ident, 0)
a checkpoint is removed with its task | Model
-        if lease.has_checkpoint and _ends_at(target):
+        if lease.has_checkpoint and not target:
a checkpoint belongs to one payload | ByHand
-    if saved.startswith(of_data):
+    if saved:
a renewal never shortens a lease | Model
-                length_ns = max(lease.length_ns, self.left_ns(lease.path))
+                length_ns = lease.length_ns
a call with a directory that was closed does not go to the working directory | LeaseDirectoryLost
-                fd, self.fd = self.fd, -1
+                fd, self.fd = self.fd, None
a directory of locks that another host replaced is opened anew | Keyed
-    open_lock = _afresh(_Files.open_lock)
a task whose link can't be made on a full disk is delivered | Keyed
-        if not path:
-            self._link(tag, lease, behind)
+        self._link(tag, lease, behind)
one task that can't be moved does not keep the others from being retried | Races
-        return _for_each(retry, self._files.find("failed"))
+        return sum(map(retry, self._files.find("failed")))
a task that comes due when the date is set forward is found at once | ReplacedClock
- or _latest_due_ns() >= self._first_due_ns
+ or not self._changed_ns
the lock of a key is taken | KeyedConcurrency
-            lock.acquire_exclusive(until_s)
             lock.thread = threading.get_ident()
the lock file of a key is never removed | -
; hosts: key ~ crowded|overlapping; nfs: keys ~ crowded|overlapping
             _key_locks[self._files.inode, tag[-2:]] = lock
             yield
+            os.unlink(lock.path)
a task in flight is found by its key | Model; hosts: key ~ found nothing
-        return self._worker.keys.path_of(key) != ""
+        path = self._worker.keys.path_of(key)
+        return path.startswith(("pending", "scheduled"))
a link in keys/ that names another key's task is not trusted | Keyed; fuzz: contents
-            if match and {_tag_of(match[2]), _tag_of(match[4] or match[2])} == {tag}:
+            if match:
a push with if_in_flight="reject" raises an error if the task of the key is leased | Model
-            if is_leased and if_in_flight == "reject":
+            if is_leased and if_in_flight == "refuse":
done() promotes the payload that is buffered behind a task | Keyed; fuzz: lives; storm: ~ keys:
-                    self._link(tag, self._promote(behind))
+                    self._link(tag, "")
a claim takes along the payload that is buffered behind a task | Keyed
-        if _id_of(path) == _id_of(lease.path) and not behind:
+        if _id_of(path) == _id_of(lease.path):
a claim whose lease has ended delivers no older payload | Keyed
-        self._files.lstat(lease.path)
a buffered payload is not delivered before its due time | Keyed
-                    target = _fresh_path(target, _payload_due_ns(behind))
+                    target = _fresh_path(target, None)
a schedule() that raised an error does not change the due time of the buffered payload | Keyed
-                    self._files.move(target, older)
+                    pass
a buffered payload starts with attempt 1 | Model
-                    target = _fresh_path(target, _payload_due_ns(behind))
+                    due_ns = _payload_due_ns(behind)
+                    target = target if due_ns is None else _fresh_path(target, due_ns)
a task is delivered again if Ctrl-C ends the block of processing() | Work
-        except BaseException:  # trouble with the disk; str() of
+        except Exception:  # trouble with the disk; str() of
the older of two pushes during a listing with foreign files comes first | Races
-        if seen <= _AT_ONCE:
+        if len(names) <= _AT_ONCE:
a part of the maintenance pauses for longer than it took | Faults
-                self.next_s[what] = ended_s + max(every_s, rest_s)
+                self.next_s[what] = ended_s
an error of a listing is raised in the coroutine that waits | Coroutines
             except BaseException as error:
                 with suppress(Exception):  # InvalidStateError: cancelled
-                    request.answer.set_exception(error)
+                    request.answer.set_result(None)
a payload that no link names does not replace a younger payload | Keyed
-            if known and self._written_ns(stray) <= self._written_ns(known):
+            if not stray:
of the payloads that no link names, the one written last stays, whatever its id | Keyed
-        for stray in sorted(left, key=self._written_ns, reverse=True):
+        for stray in sorted(left, key=_id_of, reverse=True):
             known = behind or path
-            if known and self._written_ns(stray) <= self._written_ns(known):
+            if known and _id_of(stray) <= _id_of(known):
of the payloads that no link names, only one stays | Keyed
-                self._files.remove(stray)
+                pass
a payload that no link names is delivered | Keyed
-                path = self._promote(stray)
+                pass
a keyed task that a person moved back is linked before its delivery | Keyed
-        self._link(tag, lease, behind)
         return behind
after a promotion, the promoted payload is the key's task, not the older task | Keyed
-        if payload and not (path and payload.startswith("keys/")):
+        if payload and not path:
moving due tasks does not hold the lock for long | Lifecycle
-lambda _: time.monotonic() < end_s, due
+lambda _: True, due
the newer of two payloads behind a leased task is kept | Model
-        if is_update and (not behind or _is_update(behind)):
-            return behind or f"keys/update~{ident}"
+        if is_update:
+            return f"keys/update~{_id_of(behind) or ident}"
a push with a key makes the link before it puts the payload in place | Durability
-            self._link(tag, path or target, target if path else "", sync=True)
             self._swap(new_path, behind, target)
sync_after_write: the link of a key is synced before the payload is put in place | Durability
-            self._link(tag, path or target, target if path else "", sync=True)
+            self._link(tag, path or target, target if path else "")
a second task of a key, put in place by hand, becomes a dead letter | Keyed
-        if path and _id_of(path) != _id_of(lease):
+        if not tag:
a record that a healed replica brings back does not become its key's task | Healed
-        return tasks[-1] if tasks else "", behind
+        return tasks[0] if tasks else "", behind
if an older task of a key comes back, the newer task does not become a dead letter | Healed
-        if _id_of(tasks[-1]) != _id_of(lease):
+        if _id_of(tasks[0]) != _id_of(tasks[-1]):
a younger task of a key waits while an older one runs | KeyedOnSharedFileSystem
-        if _state_of(older) == "inflight" and self._worker.left_ns(older) > 0:
+        if not older:
a payload that a healed replica brings back in keys/ does not replace a younger one | Healed
-        return tasks, behind if is_newer else ""
+        return tasks, behind
the older of two payloads that two hosts put behind a task is removed | KeyedOnSharedFileSystem
-                    self._files.remove(older)
sync_after_write: a replaced payload is synced in its place | Durability
             self._files.sync_dir(os.path.dirname(path))
-        self._files.sync_with_dir(target)
         return _id_of(path)
sync_after_write: a promoted payload is synced | Durability
-        self._files.sync_with_dir(path)
         return path
sync_after_write: a released task is synced | Durability
         self.note_arrival(gone_to)
-        self.files.sync_with_dir(gone_to)
sync_after_write: a retried task is synced | Durability
-        self.files.sync_with_dir(target)
         return True
sync_after_write: a due task is synced in pending/ | Durability
-            self.files.sync_with_dir(self.move_task(source, target, 0))
+            self.move_task(source, target, 0)
done() succeeds though the directory of an attached lease is removed meanwhile | Sharing
-        with suppress(FileNotFoundError):
-            # RACE (Sharing)
+        if True:
+            # RACE (Sharing)
keep_done=False: the directory is synced after the removal | Durability
-            self.files.sync_dir(os.path.dirname(lease.path))
a payload pushed behind a task has a later order, even if clocks differ | KeyedOnSharedFileSystem
-            ident = f"{order_ns + 1:020d}-{_tag_of(ident)}"
+            pass
a payload pushed behind a task with a forged id has an order of the present | Trust
-        if ident <= _id_of(path) and order_ns < _latest_order_ns():
+        if ident <= _id_of(path):
a payload that replaces an older one does not get the checkpoint of the older one | Cost
-            self._files.remove(f"checkpoints/{ident}")
+            pass
         return aside
retry() of a task raises an error if its key has another task | Model
         if path:
-            raise KeyInFlight(key or "", _id_of(path))
+            return
close() ends a wait in another thread | Waiting -k close_ends hangs
-            while self._lease_dir.close_count == close_count:
+            while True:
a wait notices that pending/ was replaced | WaitingWithInotify -k push_between hangs
-        elif not self._watch() and
+        elif
a wait lists a replaced pending/ once more before it sleeps | WaitingWithInotify -k push_into hangs
-        return self._watches != before
+        return False
a `pop` that can't print the payload does not print the path of the lease | Transcripts
-            _put(1, task.data)
+            sys.stdout.buffer.write(task.data)
a cancelled pop_async() loses no task | Coroutines -k goes_back hangs
                     # RACE (Coroutines): the coroutine was cancelled, or close() was called.
-                    self.put_back(task)
+                    pass
Ctrl-C in processing() does not count an attempt | Processing
-            queue.release(task, front=True, counted=False)
+            queue.release(task, front=True)
an error in processing() on the last attempt makes a dead letter | Processing
- and attempts >= queue.max_attempts:
+ and attempts > queue.max_attempts:
only a leased task can be attached | Lifecycle
-        found = (it for it in self._files.find("inflight")
+        found = (it for it in self._files.find(*STATES)
processing() renews the lease | Processing
-        if self.worker.left_ns(self.lease.path) < self.lease.length_ns *
+        if self.worker.left_ns(self.lease.path) > self.lease.length_ns *
a child forked in processing() does not end the task | Processing
-        if os.getpid() != self._pid:
+        if not self._pid:
             return
         try:
a pause is noticed soon, however long the last listing took | Lifecycle
-            "look": (self._look, _BASE_INTERVAL_S),
+            "look": (self._look, _REPAIR_INTERVAL_S),
a task that moves during each listing counts as work that is left | Lifecycle
-        return self._waiting_ctimes_ns() != before
+        return False
a copy of a TicketQueue holds no ticket | Tickets
-    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds no ticket
+    def _reduce(self) -> tuple[Any, ...]:
two signals at the same time count as one | Work
-        if time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
+        if time.monotonic() < self._last_signal_s:
a signal does not lose a task that was just claimed | Work
-            self._give_back(task)
             task = None
work() leaves the signal handlers as they were | Work -k restores
-                signal.signal(number, handler)
work() runs no more than `concurrency` handlers | Work
-for _ in range(self._concurrency)
+for _ in range(self._concurrency + 1)
an exception that a signal handler raises while a lock is closed is not lost | Faults
         except OSError as error:
             # the work under the lock is done, or flock does not work here
-            _raise_if_no_errno(error)
+            pass
if a lease can't be reclaimed because its key's lock is held, the lease is reclaimed later | Keyed
-            return  # RACE (Keyed): another process holds the key's lock
+            pass
a TicketQueue directory that is removed while it is opened is made again | Tickets
-        with suppress(FileNotFoundError):
+        with nullcontext():
             return _open_files(path, is_durable=False)
a member whose ticket was removed gets no turn with another member's number | Tickets
-            is_first = member == first
+            is_first |= member == first
a payload that does not fit in TMPDIR fails the tries of its task only | Transcripts
-            _write_all(payload, task.data)
+            os.write(payload, task.data) == len(task.data) or os.write(9999, b"")
check(repair=True) does not touch tasks in flight | Checking
-                if self._repair and entry.directory in _WAITING_DIRS:
+                if self._repair and entry.directory:
only its user can read a new queue | Faults
-    _make_dir(data_dir, 0o700, is_durable)
+    _make_dir(data_dir, 0o755, is_durable)
a program that outlives its shell during a stop keeps its task until the program ends | CommandLine
-                    job.is_over = not (job.is_stopped or job.is_ending)
+                    job.is_over = len(self.signals) < 2
a command that succeeds after the second signal finishes its task | CommandLine
-        return status != 0 and
+        return (status != 0 or len(self.signals) > 1) and
a cancelled end of a block of "async with" settles its task | AsyncProcessing
-            await asyncio.shield(ended)
+            await ended
the end of a block of "async with" does not block the event loop | AsyncProcessing -k threads hangs
-            ended = loop.run_in_executor(None, self.__exit__, *exc_info)
+            ended = asyncio.sleep(0, self.__exit__(*exc_info))
a delayed push is not due before its delay is over | Lifecycle
-_due_after_ns(delay_s) if delay_s != 0
+_due_after_ns(delay_s) if delay_s > 3600
a search for an unknown id does not list done/ | Lifecycle
-        listed = [state for state in states if state not in _ENDED]
+        listed = states
stats() parses no name of a finished task | Lifecycle
-            **{state: files.count(state) for state in _ENDED},
+            **{state: len(files.entries(state)) for state in _ENDED},
a search for an unknown id parses no name of another task | Lifecycle
-        return next(self.find(*listed, ending=ident), None)
+        return next((it for it in self.find(*listed) if it.id == ident), None)
stats() parses no name of a task that waits | Lifecycle
-        pending, scheduled = map(files.task_names, _WAITING_DIRS)
+        pending, scheduled = [[it.name for it in files.entries(d)] for d in _WAITING_DIRS]
the time since which a task is in its state counts from the last move | Lifecycle
-            since_ns = self._files.lstat(entry.path).st_ctime_ns
+            since_ns = self._files.lstat(entry.path).st_mtime_ns
tasks of 0.4 are not passed over in silence | Compatibility
-(files.scan(directory), 100)
+(files.scan("done"), 100)
the first signal to work() is answered by a line | Work
-        _write_stop_line(b"\n")  # a terminal may show "^C" in front
+        pass
the first signal ends `work` even if standard error is full | CommandLine -k signals_end hangs
-        if select.select([], [2], [], 0)[1]:
+        if select.select([], [], [], 0):
the second signal ends `work` even if the write of a log line blocks | CommandLine -k of_the_log
-    if status > 128:
+    if status > 256:
a signal to all processes of a scheduler's job does not end the launcher | CommandLine
-        if signal.getsignal(number) != signal.SIG_IGN:
+        if not number:
the younger of two pushes during a listing does not come first | Races
-            self.names = older
+            pass
a TimeoutError from a signal handler does not count as a disk error of a job | Faults
-    if error.errno is None:
+    if error is None:
a renewal gets a key's lock even if the key is pushed all the time | Races
-            self._keep_lease(time.monotonic() + wait_s)
+            self._keep_lease(0.0)
a push whose payload can't be put in place gives the task back at once | Keyed
-                if self._files.exists(new_path):
+                if not new_path:
                     self._files.move(target, older)
repair() retries soon if a key's lock is held | Races
-                self._worker.maintenance.sooner("repair", 1)
take_async() retries soon if a key's lock is held | Races
-                self.maintenance.sooner("look", _LONGEST_LOCK_PAUSE_S)
+                pass
a claim whose undo failed is put back uncounted later | Faults
-                self.lease_dir.orphans[lease.path] = place
+                self.lease_dir.orphans[lease.path] = None
a task that this user may not claim does not delay other tasks | TroubleOfOneTask
-                self._worker.batch.barred[lease.source] = until_s
a task that this user may not move does not keep drain() from its end | TroubleOfOneTask
-if f"{directory}/{name}" not in barred and _parse(directory, name):
+if _parse(directory, name):
a directory that can't be written to does not make its tasks those of others | TroubleOfOneTask
-            if isinstance(error, PermissionError) and os.access(
+            if isinstance(error, PermissionError) and str(
tasks that are passed over hide no task behind them | TroubleOfOneTask
-                chunk = [it for it in chunk if f"pending/{it}" not in self.barred]
a task that the kernel protects from this user is no trouble of the worker | TroubleOfOneTask
-                if error.errno == errno.EPERM:
+                if error.errno in ():
a task that this user could not claim is tried again after a minute | TroubleOfOneTask
- in self.barred.items() if end_s >= now_s
+ in self.barred.items()
a task found for a coroutine that was cancelled goes back | Coroutines
-            if not answer.cancel() and answer.exception() is None:
+            if not answer.cancel() and answer.exception():
a task that a wait gives back is not counted | Coroutines
-            orphans.setdefault(lease.path, lease.source)
+            orphans.setdefault(lease.path)
a cancelled coroutine does not wait for the lock of a key | Coroutines
-        with suppress(OSError), self._worker.lock:  # so no renewal
+        with self._worker.keys.lock_of(task.id), self._worker.lock:  # so no renewal
work() raises the error of a task that can't be ended | Work
-                self._error = self._error or error
`release --all` does not take a lease that was renewed after the look | CommandLine
-        it.path
-        for it in _open_queue(options)
+        it.id
+        for it in _open_queue(options)
a stop that comes just before a wait is noticed in time | CommandLine
-                thread.join(_SIGNAL_POLL_S)
+                thread.join(_BASE_INTERVAL_S)
a command that is ended by a signal of its own has failed | Transcripts
-        return status != 0 and self._is_told
+        return status < 0 or status != 0 and self._is_told
a worker that runs a task is not idle | Work
-            if not self._running and time.monotonic() >= self._idle_end_s:
+            if time.monotonic() >= self._idle_end_s:
a worker takes no task after its time limit | Work
-        is_late = time.monotonic() >= self._end_s
+        is_late = not self._end_s
release() refuses a delay together with front=True | Lifecycle
-        if front and delay_s:
+        if front and delay_s < 0:
a queue object that is collected gives up its lease directory | Liveness
+del FemtoQueue.__del__
 class _Keys:
an error of a read or write of "last" names the file | Tickets
-                    raise self._files.named(error, "last") from None
+                    raise
a dead member's ticket is passed over at once | Tickets -k of_a_dead_process
-is_dead = lock.try_lock()
+is_dead = None
another host's ticket is passed over when it is stale, not earlier | SharedTickets
; hosts: tickets ~ turns overlap
-st_mtime > self._stale_s
+st_mtime > 0
Ctrl-C at the end of a turn lets the next member have its turn | Races
-                self._held_tickets.pop(member, None)
a ticket is not drawn with a number that another host drew meanwhile | SharedTickets
-            if sum(_stamp_of(it) >= number for it in self._tickets()) > 1:
+            if not number:
TicketQueue.remove() refuses a name that is not a ticket's | Lifecycle
-        if not isinstance(member, str) or not _parse_ticket(member):
+        if not isinstance(member, str):
a member that touched its ticket too late gets no turn | SharedTickets
-        self._late_s = 0.75 * self._stale_s
+        self._late_s = 2.0 * self._stale_s
tickets are drawn in order | Tickets
-        number = max(numbers) + 1
+        number = 1
a forked child holds none of its parent's tickets | Tickets
-        self._held_tickets.clear()
         self._files.dirs.clear()
a rename whose reply was lost counts as done | LostReply; nfs: replay ~ but:
-            if before is None or not self._was_moved(before, began_ns, source, target):
+            if source:
a rename whose reply was lost counts as done only if the same file is at the target | LostReply
-            return is_new and os.path.samestat(before, after)
+            return is_new
a file that another host moved before the call does not count as moved by the call | LostReply
-            return is_new and os.path.samestat(before, after)
+            return os.path.samestat(before, after)
a young file that left creating/ has arrived, even if another worker has moved it on | LostReply
-        is_ours = _state_of(source) == "creating"
+        is_ours = False
an old file that is gone from creating/ does not count as moved for this reason alone | LostReply
-_wall_ns() < before.st_mtime_ns + _LEFTOVER_NS // 2
+self.clock
a host whose queue clock is ahead does not remove files that others write | LostReply
- and changed_ns < _wall_ns() - age_ns:
+ and changed_ns:
a rename into keys/ that did nothing is made again | KeyedOnSharedFileSystem
-            if target[5:] in self.names("keys"):
+            if target:
after the deadline, a rename of a lease that raised an error does not count as done | LostReply
-        before = None if self.is_fuse or is_late else _Files.lstat(self, source)
+        before = None if self.is_fuse else _Files.lstat(self, source)
a claim whose reply was lost is a delivery | InterruptedOnSharedFileSystem
-        return not files.is_fuse and lease.name
+        return not name and lease.name
a sync of a file that another host moved is not an error | Healed
-    sync_file = _afresh(_Files.sync_file)
+    _sync = _afresh(_Files.sync_file)
an error of statfs() is raised | Faults
-    _call_libc("fstatfs", directory.path, directory.fd, status)
+    _libc().fstatfs(directory.fd, status)
a file that was replaced is looked up again | Healed
-        for _ in range(_LOOKS):
+        for _ in range(1):
a command's exit status is 1 for a FemtoQueueError, 2 for another error | CommandLine
-        return 1 if isinstance(error, FemtoQueueError) else 2
+        return 2 if isinstance(error, FemtoQueueError) else 1
the exit status of `pop` on an empty queue is 1 | Transcripts
     if task is None:
-        return 1
+        return 0
a lease that `pop` can't print is given back | CommandLine
-        q.release(task, front=True, counted=False)
the exit status of `work --drain` is 1 if a task failed | CommandLine
-        return self._drain and (
+        return bool(self.signals) and (
the exit status of `check` is 1 if it finds something that is not repaired | Transcripts
-    return not all(it.repaired for it in findings)
+    return not all(it.text for it in findings)
`top` reads only the dead letters that it shows | CommandLine
-data=False, last=20)
+data=False)
the last piece of --null needs no zero byte | Transcripts
-        yield bytes(rest)
"""


def check(rows: list[Fault]) -> list[str]:
    """Return what is wrong with the rows.

    Each text must occur exactly once, each changed source must compile, each class, test and proof
    must exist, a row marked "hangs" must choose a test, and no two rows may have the same promise.
    """
    wrong = []
    source, tests = read("femtoqueue.py"), read("test.py")
    classes = {
        it.name: " ".join(getattr(member, "name", "") for member in it.body)
        for it in ast.parse(tests).body
        if isinstance(it, ast.ClassDef)
    }
    for fault in rows:
        try:
            compile(fault.apply(source), "femtoqueue.py", "exec")
            name, chooses, word = fault.expected.partition(" -k ")
            if name != "-" and word not in classes.get(name, ()):
                raise ValueError(f"test.py has no {fault.expected!r}")
            if fault.hangs and not chooses:
                raise ValueError("it hangs, and chooses no test")
            for name, *_ in fault.caught_by:
                read(f".ci/{name}.py")
        except (ValueError, SyntaxError, FileNotFoundError) as error:
            wrong.append(f"{fault.promise}: {error}")
    promises = [fault.promise for fault in rows]
    twice = (it for it in sorted({*promises}) if promises.count(it) > 1)
    return wrong + [f"two rows have the promise: {it}" for it in twice]


def test_that_catches(fault: Fault, directory: str) -> str:
    """Return the name of a test that catches a fault, HANG if one does not end, or "".

    A test that failed is run again, alone, and must fail again: on a busy machine a test may fail
    for another reason than the fault. As such a failure ends a run, each run has a second try.
    """
    project = fault.copy(directory)
    limit_s = HANG_S if fault.hangs else CLASS_S
    for tests in (*[fault.expected.split()] * 2, [], []):
        found = first_failure(project, limit_s if tests else ALL_S, *tests)
        if found == HANG and fault.hangs:
            return HANG
        if found not in ("", HANG):
            if first_failure(project, CLASS_S, found):
                return found
            say(f"{fault.promise}: {found} failed once, and not when it ran alone")
    return ""


def first_failure(project: str, limit_s: float, *tests: str) -> str:
    """Run test.py, or some of its tests, up to the first failure.

    Returns the name of the test that failed, HANG if test.py did not end in time, "" if no test
    failed.
    """
    status, output = run_copy(
        project, "test.py", "-f", "--all", *tests, limit_s=limit_s
    )
    if status is None:
        return HANG
    if found := re.search(r"^(?:FAIL|ERROR): (\w+) \(\w+\.(\w+)", output, re.MULTILINE):
        return f"{found[2]}.{found[1]}"
    if status:
        say(
            f"{' '.join(tests)}: exit status {status}, but no test failed:\n{output[-1000:]}"
        )
    return ""


def run_copy(
    project: str, *words: str, limit_s: float | None = None
) -> tuple[int | None, str]:
    """Run a Python program in a copy of the project. Its temporary files are beside the copy. If
    the program is killed, they are removed with the copies.

    Returns the exit status and the output; or None and "" if the program ran longer than `limit_s`.
    """
    with subprocess.Popen(
        [sys.executable, "-B", *words],
        cwd=project,
        env={**os.environ, "TMPDIR": os.path.dirname(project)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            end(process)
    return process.returncode, output.decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group, by SIGINT and at most a second later by SIGKILL."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            time.sleep(1 if process.poll() is None else 0)


def run_tests(rows: list[Fault]) -> int:
    """Run test.py on each fault, and print the test that catches the fault. Return how many faults
    no test catches."""
    missed = 0

    def run(fault: Fault) -> tuple[Fault, str, float]:
        began_s = time.monotonic()
        return fault, test_that_catches(fault, directory), time.monotonic() - began_s

    with (
        copies() as directory,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor,
    ):
        for fault, found, seconds in executor.map(run, rows):
            missed += not found
            say(f"{fault.promise}: {found or 'CAUGHT BY NOTHING'}, {seconds:.0f} s")
    return missed


def main() -> None:
    parser = docstring_parser(__doc__)
    add = parser.add_argument
    add(
        "--check",
        action="store_true",
        help="only test that each fault can still be applied",
    )
    run = "run test.py on N faults (default: on all of them)"
    add("--tests", nargs="?", type=int, const=0, metavar="N", help=run)
    seed = "seed of the sample (default: the date)"
    add("--seed", default=time.strftime("%Y-%m-%d"), help=seed)
    add(
        "--only",
        default="",
        metavar="TEXT",
        help="only faults with TEXT in their promise",
    )
    args = parser.parse_args()
    rows = [*parse_faults(FAULTS)]
    wrong = check(rows)
    if wrong:
        raise SystemExit("\n".join(wrong))
    say(f"{len(rows)} faults, all can be applied")
    if args.tests is None:
        return
    chosen = [it for it in rows if args.only in it.promise and it.expected != "-"]
    if args.tests:
        chosen = random.Random(args.seed).sample(chosen, min(args.tests, len(chosen)))
        say(f"a sample of {len(chosen)}, seed {args.seed}")
    missed = run_tests(chosen)
    say(f"{len(chosen)} faults, {missed} caught by nothing")
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
