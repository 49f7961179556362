"""Mutation tests: faults of a few lines in femtoqueue.py that the tests and the proofs must catch.

    python .ci/broken.py --check
    python .ci/broken.py --tests [N] [--seed S] [--only TEXT]

Each row of FAULTS replaces a text of femtoqueue.py by another one, and so breaks a promise. The
first line of a row has the promise, and the class in test.py that should catch the fault. The
proofs that must catch the fault in their --self-check follow. Each proof has an argument:

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
the project. It runs the class that should catch the fault, up to the first failure. If no test of
the class fails, it runs the whole test.py. It prints the test that failed. In a row marked "hangs",
a test that does not end counts as a failure, too. The sample depends on --seed, which is the date
by default. --only takes the rows whose promise contains TEXT.

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

# How long test.py may take: for a class in a row marked "hangs", for another class, for all tests.
HANG_S, CLASS_S, ALL_S = 40, 120, 900
HANG = "a test that does not end"


@dataclass(frozen=True)
class Fault:
    promise: str
    expected: str  # the class in test.py that should catch the fault; "-": only proofs catch it
    hangs: bool  # a test that does not end counts as a failure
    caught_by: list[tuple[str, str, str]]  # a proof's name, its argument, the pattern after "~"
    old: str  # text of femtoqueue.py
    new: str  # the text to put in its place

    def apply(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless `old` occurs exactly once."""
        if source.count(self.old) != 1:
            raise ValueError(f"the text occurs {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)

    def copy(self, directory: str) -> str:
        """Copy the project into a new directory below `directory`, with the fault in
        femtoqueue.py; return the path of the copy."""
        project = tempfile.mkdtemp(dir=directory)
        ignored = shutil.ignore_patterns(".git*", "*cache*")
        shutil.copytree(PROJECT, project, ignore=ignored, dirs_exist_ok=True)
        with open(os.path.join(project, "femtoqueue.py"), "w", encoding="utf-8") as file:
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
            project, text = fault.copy(directory), ""
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
                raise Violation(f"{fault.promise}: not caught with {need}: {text[-3000:]}")


def parse_faults(text: str) -> Iterator[Fault]:
    """Yield the faults of a text in the form of FAULTS.

    The first line of a row is
    "<promise> | <class> [hangs][; <proof>: <argument>[ ~ <pattern>]]...". It may be continued on
    lines that begin with "; ". Then come lines as in a diff. The lines with "-" or " " in front are
    the old text. The lines with "+" or " " in front are the new text. If no line begins with "+" or
    " ", the new text is `pass`.
    """
    for part in re.split(r"\n(?=[^-+; \n])", text.strip()):
        head, *lines = part.replace("\n; ", "; ").splitlines()
        promise, _, finders = head.partition(" | ")
        tests, *proofs = finders.split("; ")
        expected, _, hangs = tests.partition(" ")
        needs = re.findall(r"(?m)^(\w+): (.*?) ?(?:~ (.*))?$", "\n".join(proofs))
        old, new = ("\n".join(it[1:] for it in lines if it[0] in signs) for signs in ("- ", "+ "))
        indent = re.match(" *", old)[0]  # type: ignore[index]
        yield Fault(promise, expected, hangs == "hangs", needs, old, new or f"{indent}pass")


FAULTS = r"""
a new directory of the queue is synced, and so is its parent | Durability
-            _sync_dir(parent)
a file whose lstat() fails does not count as missing | Faults
             self.lstat(path)
-        except (FileNotFoundError, NotADirectoryError):
+        except OSError:
purge() counts age from the move, not from the push | Model
-        if status.st_ctime <= before_s and
+        if status.st_mtime <= before_s and
an error in one directory does not delay work in the others | Faults
-            errors.append(error)
+            raise error
an id shows whether its task has a key | Keyed
-binascii.crc32(name.encode()) | 1 << 31:08x
+binascii.crc32(name.encode()) & ~(1 << 31):08x
a name whose number does not have 20 digits is foreign | ForeignFiles
-_NS = "0[0-8][0-9]{18}"
+_NS = "0[0-8][0-9]{17,18}"
a name whose tag is not 8 hex digits is foreign | ForeignFiles; fuzz: names
-_ID = f"({_NS}-[0-9a-f]{{8}})"
+_ID = f"({_NS}-[0-9a-zA-Z]{{8}})"
a file with a foreign name is not removed | ForeignFiles; storm: ~ left over:
+        [self.remove(f"{directory}/{name}") for name in names if not _parse(directory, name)]
         return [entry for name in names if (entry := _parse(directory, name))]
a node_id that cannot be part of a file name is refused | Lifecycle
-    match = _parse_node_dir("inflight-" + node_id) if isinstance(node_id, str) else None
+    match = re.match("(.*)", f"{node_id}")
a key of more than 200 bytes is refused | Lifecycle
-_MAX_KEY_BYTES = 200
+_MAX_KEY_BYTES = 300
a key that is an Enum counts by its value | Lifecycle
-    return _quote_key(raw)  # not str(key)
+    return _quote_key(str(key))  # not str(key)
front=True puts a task back where its push had put it | Model
-    return f"pending/{_task_name(_stamp_of(ident), attempts, ident)}"
+    return f"pending/{_task_name(_stamp_of(ident) + 10**15, attempts, ident)}"
an argument that is NaN is refused | Lifecycle
-    if not abs(value) < _MAX_NUMBER:  # also true for NaN
+    if abs(value) >= _MAX_NUMBER:  # also true for NaN
max_attempts of True is refused | Lifecycle
-        type(max_attempts) is not int or not 1 <= max_attempts
+        not isinstance(max_attempts, int) or not 1 <= max_attempts
two tasks are equal only if their attempts are | Lifecycle
-        return self.id, self.data, self.attempts, self.key
+        return self.id, self.data, self.key
a payload that is a str is refused | Lifecycle
+        return memoryview(data.encode())
+    if isinstance(data, str):
         raise TypeError("data must be bytes, not str
a record with a wrong checksum is never delivered | Corruption; fuzz: contents
-    if _header(payload, name) != header[0]:
+    if not header[0]:
a record with bytes after its payload is never delivered | Corruption
-    if status.st_size - start != length:
+    if status.st_size - start < length:
a record with the key of another id is never delivered | Corruption
- and _key_tag(name) == _tag_of(ident):
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
a FIFO in pending/ does not block pop() | ForeignFiles hangs
-_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
+_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0)
a forked child closes its parent's lock files | Liveness
-    while _open_lock_fds:
+    while False:
a lock on a file that was removed does not count | Tickets
-        if not lock.is_at_path():  # RACE: maybe_cleanup()
+        if lock.fd < 0:  # RACE: maybe_cleanup()
an error of flock() is raised, unless the file system does not support locks | Faults
-        if error.errno in _NO_FLOCK_ERRNOS:
+        if error.errno:
sync_after_write: the bytes of a push are synced | Durability
; power_loss: ext4; power_loss: xfs; power_loss: btrfs
-                if sync:
+                if not source:
sync_after_write: the name of a push is synced | Durability
-            if sync_dir:
+            if sync_dir and not source:
sync_after_write: the file of a finished task is synced | Durability
-            _sync_path(self.root + path, _READ_FLAGS)
sync_after_write: the directory of a finished task is synced | Durability
-            _sync_dir(self.root + directory)
a file that replaces another is synced before the rename | Durability
-                if self.is_durable:
+                if not path:
a push that raises an error leaves nothing in creating/ | Faults; faults: writev write
-            for leftover in (source, path):
+            for leftover in (path,):
a push that raises an error leaves no task | Faults
-            for leftover in (source, path):
+            for leftover in (source,):
push() does not return an id if the task was not written | Faults
; faults: writev write rename; storm: ~ found:; hosts: quorum ~ is lost|never delivered
-        self._files.publish(ident, data, f"pending/{ident}")
+        with suppress(OSError):
+            self._files.publish(ident, data, f"pending/{ident}")
a batch whose sync failed is removed again | Durability
-            if not is_synced:
+            if not is_synced and not ids:
keep_done=False: the lease is synced before it is removed | Durability
-            self.files.sync_with_dir(lease.path)
a move succeeds though pending/ is replaced meanwhile | Shrinking
-_MAX_REPLACED =
+_MAX_REPLACED = 0 *
a pending/ that is replaced keeps its mode | Shrinking
-        os.fchmod(fd, stat.S_IMODE(old.st_mode))
a large pending/ is replaced only when it is empty | Shrinking
-            if not self._backlog.seen:
+            if self._backlog.seen:
a finished task is not delivered, even if a second name of it came back | Lifecycle
-        if "~1~" not in source and _ends_at(target):
+        if not source:
the claim is one rename: a task is leased once | Crash
; faults: SIGKILL; hosts: calm ~ leased twice|stands in; nfs: calm ~ leased twice|stands in
-            os.rename(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            os.link(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            _unlink_if_exists(self._root + source)
the claim is one rename: a task is in one state at each instant | Crash; faults: SIGKILL
-            os.rename(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            with open(self._root + source, "rb") as file:
+                content = file.read()
+            os.unlink(self._root + source)
+            with open(f"{self._root}{path}", "wb") as file:
+                file.write(content)
work() passes over a task that can't be read | TroubleOfOneTask
-            error.task_id = ident  # type: ignore[union-attr]
a task that can't be read has its attempts counted | TroubleOfOneTask
-                place = self.back_path(place, _attempts_of(lease.path))
+                place = self.back_path(place, _attempts_of(place))
a task whose reading has failed several times is passed over for longer | TroubleOfOneTask
-            self._troubles[ident] = times + 1, now_s + pause_s
+            self._troubles[ident] = 1, now_s + pause_s
work() ends if no task can be read | TroubleOfOneTask hangs
-            self._trouble_s = min(self._trouble_s, now_s)
root changes the mode only of a file that it made itself | ManyUsers
-                fd = os.open(path, flags | os.O_EXCL, 0o666)
+                fd = os.open(path, flags, 0o666)
a due time is compared with a margin of a microsecond | ReplacedClock
-    return int(time.time() * 1e9) + 1000
+    return int(time.time() * 1e9)
a monotonic clock that began again gets a new anchor | ReplacedClock
-            if anchor_ns is not None and self._clock_began_anew(anchor_ns):
+            if False:
orders of one object strictly increase | Model
-            order_ns = self._order = now_ns if now_ns > self._order else self._order + 1
+            order_ns = self._order = now_ns
after a boot with an earlier date, new tasks sort behind old ones | Ordering
-            times_ns += [_stamp_of(entry.id) + 1 for entry in entries]
the processes of a boot agree on one clock | Ordering
-        os.link(root + new_path, root + name)
+        os.replace(root + new_path, root + name)
setting the date changes neither order nor deadlines | Ordering; fuzz: lives; storm: ~ first:
-            now_ns = int(time.monotonic() * 1e9) + self.anchor_ns
+            now_ns = int(time.time() * 1e9)
a name of the year 2200 does not move the queue clock | Ordering
-(it for it in times_ns if it < _LATEST_CLOCK_NS)
+times_ns
leases of an earlier boot end even if the wall clock was set far back | Liveness
-                times_ns.append(min(files.lstat(directory).st_mtime_ns, entries[-1].stamp_ns))
a wall clock in the year 2100 does not set the queue clock | Ordering
-    times_ns, started_ns = [_EARLIEST_NS, _wall_ns()], _monotonic_ns()
+    return max(_wall_ns(), _EARLIEST_NS) - _monotonic_ns()
+    times_ns, started_ns = [_EARLIEST_NS], 0
the batch of a huge directory has the oldest names | Ordering
-                names = sorted(names, reverse=True)[-keep:]
+                names = sorted(names, reverse=True)[:keep]
tasks are delivered in the order of push() | Model; fuzz: lives; hosts: calm ~ in the order
-    return sorted(names, reverse=True)[-keep:], seen
+    return sorted(names)[-keep:], seen
a task put back to the front is delivered next | Model
-            if names and name < names[0]:
+            if names and name > names[0]:
a task put back to the front has the order of its push | Lifecycle
-            if names and name < names[0]:
+            if names and name < names[-1]:
a worker that restarts under its node_id takes back its tasks | Model
-            elif self._dir_lock is None and lock.try_exclusive() and lock.is_at_path():
+            elif self._dir_lock is None and not lock.try_exclusive():
a detached lease outlives a restart of its node_id | CommandLine
- for it in leases if it.boot != _DETACHED)
+ for it in leases)
a claim that is interrupted is undone | Faults; faults: read
-                self._undo_after_error(lease, waiting, error)
an error is raised, not taken for an empty queue | Faults; faults: read
                 self._undo_after_error(lease, waiting, error)
-                raise
+                return None
a worker can start on a full disk | Faults
-                if error.errno in _OUT_OF_SPACE_ERRNOS and not os.listdir(spare):
+                if not error.errno:
close() gives back the worker's tasks | Model
-                    if is_alone:
+                    if not is_alone:
the interpreter exits even if a thread holds the worker's lock | InterruptedDelivery hangs
-        if not worker.lock.acquire(blocking=not sys.is_finalizing()):
+        if not worker.lock.acquire():
the interpreter exits even if a thread is opening a lock | InterruptedDelivery hangs
-    if sys.is_finalizing() or thread in
+    if thread in
close() does not touch the leases of another worker with the same node_id | Model
-            if is_alone is None or (is_alone and lock.is_at_path()):
+            if is_alone in (None, True):
a dead worker's tasks come back at once | Model
-            if lock.try_exclusive() and lock.is_at_path():
+            if not lock.try_exclusive():
if a lease can't be moved, other leases still end | Liveness
-            try:
-                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
-            finally:
+            if True:
+                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
an interrupted opening of the lease directory leaves no lock | Faults
-                if lock is not self._dir_lock:
-                    lock.close()
a process that can't see the boot id can tell that a worker is dead | Liveness
-        elif self._files.is_local:
+        elif False:
a process that can't see the boot id does not take another host's clock for its own | Liveness
-                    return "" if self._files.has_other_mounts() else name[6:]
+                    return name[6:]
clock files of earlier boots do not pile up | Ordering
-                    self._remove_others()
+                    pass
a clock file that was removed while its worker lives is made again | Ordering
-        self._clock.restore()
+        pass
the task of a key is found even if a client on another kind of mount pushed the task | TwoMounts
-        if not self._files.has_other_mounts():
+        if True:
tickets of two kinds of mount have one order | TwoMounts
-        if self._files.has_other_mounts():
-            self._numbers
+        if False:
+            self._numbers
join() waits for a longer tick on a file system whose times have whole seconds | Lifecycle
-(_COARSE_TICK_S if is_coarse else _TICK_S, 0)
+(_TICK_S, 0)
an empty scheduled/ that was large is replaced | Shrinking
-            self._files.shrink("scheduled", self._clock.new_id())
+            pass
register() takes another ticket if flock() fails for a removed file | SharedTickets
-(*_MISSING_ERRNOS, errno.EEXIST, errno.ENOTSUP)
+(*_MISSING_ERRNOS, errno.EEXIST)
if a worker is killed while a job ends, no process of the job is left | CommandLine
-            _kill({self.pid})
+            pass
if the launcher is killed, no process of a job is left | CommandLine
-        _kill({self.pid} if self.pid else self._sessions_of_stdin())
+        pass
a worker in a PID namespace signals no process of the host's /proc | CommandLine
-        if os.readlink("/proc/self") == str(os.getpid()):
+        if os.readlink("/proc/self"):
an environment that is too large makes no dead letters | CommandLine
-        if not (is_argument and error.errno in (errno.E2BIG, errno.EINVAL)):
+        if error.errno not in (errno.E2BIG, errno.EINVAL):
a slow reader gets all output | CommandLine
-max(end_s, self._moved_s + _GRACE_S)
+end_s
a process whose first thread has ended is no zombie | CommandLine
- or int(more[13]) > 1
+ or int(more[13]) > 99
a stopped job can handle SIGTERM | CommandLine
-{self.pid}, number, signal.SIGCONT)
+{self.pid}, number)
a dead worker's lease from another boot ends at its deadline | Liveness
-[it.path for it in leases if not boots or it.boot in boots])
+[it.path for it in leases])
another host's lease that was just renewed is not reclaimed | Healed
-            elif not self._renewed_recently(entry):
+            elif entry:
the empty lease directory of another host's worker is kept for a minute | Liveness
- < _IDLE_NS:
+ < 0:
a lease ends at its deadline | Model; fuzz: lives
-            if entry.stamp_ns > now_ns:
+            if entry.stamp_ns > now_ns - 10**10:
a lease lasts until its deadline | Model; fuzz: lives; storm: ~ held:
-            if entry.stamp_ns > now_ns:
+            if entry.stamp_ns > now_ns + 10**10:
no task is delivered before its due time | Model; fuzz: lives; storm: ~ due:
-            if due_ns > now_ns:
+            if due_ns > now_ns + 10**9:
files that others write in creating/ are left alone for an hour | Crash
-_LEFTOVER_NS = 3600 * 10**9
+_LEFTOVER_NS = 1
an error in a directory is raised when no task waits | Faults
-                    raise job.error
+                    continue
no task is delivered while PAUSED exists | ByHand
-            is_paused = self._files.exists("PAUSED")
+            is_paused = False
done tasks are kept for keep_done seconds | Lifecycle
- + _PURGE_SLICE_S, time.time() - keep_s
+ + _PURGE_SLICE_S, time.time()
max_attempts is a limit | Model
-        if self.max_attempts is not None and before >= self.max_attempts:
+        if self.max_attempts is not None and before > self.max_attempts:
attempts are counted | Model
-        attempts = min(_attempts_of(source) + 1, _MAX_ATTEMPTS) if "~" in source else 1
+        attempts = 1
a corrupt task goes to failed/, and pop() goes on | Corruption
-            self.quarantine(path, error.reason)
a worker that lost its lease can't end the task | Model
; fuzz: lives; storm: ~ settled:; hosts: cut ~ \(\) by .*, when|not refused
-                raise self.lease_lost(lease) from None
+                return target
done() and fail() raise the OSError of their rename | Faults; faults: rename
                 raise self.lease_lost(lease) from None
+            except OSError:
+                gone_to = target
the rename to failed/ is the fence: the reason is written after the rename | Model
-            self.move_leased(lease, target, "failed")
-            # A person may have moved the task out of failed/ before, but not its older reason.
-            _unlink_if_exists(f"{self.files.root}{target}.error")
             if path:
                 self.files.put_in_place(path, f"{target}.error")
+            self.move_leased(lease, target, "failed")
retry() removes the reason of a task | Model
-                _unlink_if_exists(f"{self.files.root}failed/{ident}.error")
retry() puts a task at the back | Model
-        ident, target = _id_of(source), self.back_path(source, 0)
+        ident, target = _id_of(source), _front_path(_id_of(source), 0)
a checkpoint is removed with its task | Model
-        if lease.has_checkpoint and _ends_at(target):
+        if lease.has_checkpoint and not target:
a checkpoint belongs to one payload | Model
-    if saved.startswith(of_data):
+    if saved:
a renewal never shortens a lease | Model
-                length_ns = max(lease.length_ns, self.left_ns(lease.path))
+                length_ns = lease.length_ns
the lock of a key is taken | KeyedConcurrency
-            lock.acquire_exclusive(wait)
the lock file of a key is never removed | -
; hosts: key ~ crowded|overlapping; nfs: keys ~ crowded|overlapping
             if lock is not outer:
+                os.unlink(lock.path)
                 lock.close()
a task in flight is found by its key | Model; hosts: key ~ found nothing
-        return self._worker.keys.path_of(_encode_key(key)) != ""
+        return self._worker.keys.path_of(_encode_key(key)).startswith(("pending", "scheduled"))
a key's state that names another key's task is not trusted | Keyed; fuzz: contents
-        if match and _tag_of(match[2]) == tag and match[4][-9:] in ("-", f"-{tag}"):
+        if match:
a push with if_in_flight="reject" raises an error if the task of the key is leased | Model
-            if is_leased and if_in_flight == "reject":
+            if is_leased and if_in_flight == "refuse":
done() promotes the payload that is buffered behind a task | Keyed; fuzz: lives; storm: ~ keys:
-                    states[name] = self._promote(buffered), ""
+                    states[name] = "", ""
a claim takes along the payload that is buffered behind a task | Keyed
-        return _id_of(path) == _id_of(lease) and not buffered
+        return _id_of(path) == _id_of(lease)
a buffered payload is not delivered before its due time, even after a move | KeyedInterrupted
-        due_ns = _future_due_ns(buffered)
+        due_ns = None
a buffered payload starts with attempt 1, even after an undone claim | InterruptedDelivery
-        if due_ns is None and _attempts_of(lease) == 1:
+        if due_ns is None:
a schedule() that raised an error does not change the due time of the buffered payload | Keyed
-                self._files.move(target, path)
a payload that is due later and whose sync failed is not delivered now | KeyedByRename
-            if self._files.exists(new_path):  # else the new
+            if new_path:  # else the new
a buffered payload starts with attempt 1 | Model
-                target = _fresh_path(target, _future_due_ns(buffered))
+                target = _fresh_path(target, 0) if _future_due_ns(buffered) else target
a child closes its parent's locks, even if Ctrl-C came during the fork | Liveness
-    with suppress(RuntimeError):  # _fork_lock is
+    with suppress():  # _fork_lock is
a task is delivered again if Ctrl-C ends the block of processing() | Work
-        except BaseException:  # trouble with the disk, or
+        except Exception:  # trouble with the disk, or
the older of two pushes during a listing with foreign files comes first | Races
-            if self.seen <= _AT_ONCE:
+            if len(self.names) <= _AT_ONCE:
a housekeeping job pauses for longer than it took | Faults
-        self._next_s = max(ended_s + self.every_s, self.rest_end_s)
+        self._next_s = ended_s
an error of a listing is raised in the coroutine that waits | Coroutines
-                request.answer.set_exception(error)
+                request.answer.set_result(task)
a payload that is in no key state does not replace a younger payload | Keyed
-                if _id_of(buffered) < max(_id_of(path), _id_of(before)):
+                if not buffered:
a keyed task that came back is saved in its key's state before its delivery | Keyed
-        self._save(_tag_of(lease), states)
+        _no_op(_tag_of(lease), states)
after a promotion, the promoted payload is the key's task, not the older task | Keyed
-        if behind and not buffered:
+        if not behind and buffered:
moving due tasks does not hold the lock for long | Lifecycle
-lambda _: time.monotonic() < end_s, due
+lambda _: True, due
the newer of two payloads behind a leased task is kept | Model
-                    elif if_in_flight == "update" and not buffered:
+                    elif if_in_flight == "update":
a push with a key saves the key's state before it puts the payload in place | Durability hangs
-            self._save(_key_tag(name), states, sync=True)
a second task of a key, put in place by hand, becomes a dead letter | Keyed
-        if path and _id_of(path) != _id_of(lease):
+        if not name:
a record that a healed replica brings back does not become its key's task | Healed
-                elif entry.id >= _id_of(path):
+                else:
if an older task of a key comes back, the newer task does not become a dead letter | Healed
-        if other > ident:
+        if path and other != ident:
a younger task of a key waits while an older one runs | KeyedOnSharedFileSystem
-            if left_ns > 0:
+            if not name:
a payload that a healed replica brings back in keys/ is not promoted after a younger task | Healed
-                    states[name] = entry.path, _younger(buffered, entry.path)
+                    states[name] = entry.path, buffered
a payload that a healed replica brings back in keys/ is not taken along by a claim | Healed
-        states[name] = lease, _younger(buffered, lease)
+        states[name] = lease, buffered
the older of two payloads that two hosts put behind a task is removed | KeyedOnSharedFileSystem
-                        states.outdated += (older,)
ending a lease that a healed replica brings back does not replace a newer record | Healed
-        target = self._free_path(target)
the rename of a task that came back is synced before its payload is replaced | Durability
-            # Without this sync, btrfs shows the old name, too, after power loss.
-            self._files.sync_with_dir(target)
+            pass  # else btrfs
a payload pushed behind a task has a later order, even if clocks differ | KeyedOnSharedFileSystem
-        order = max(self._clock.next_order(), younger)
+        order = self._clock.next_order()
a payload that replaces an older one does not get the checkpoint of the older one | Cost
-            self._files.remove(f"checkpoints/{_id_of(path)}")
a payload that a claim takes along does not get the checkpoint of the older one | Keyed
-        self._files.remove(f"checkpoints/{_id_of(lease)}")  # of the older payload
retry() of a task raises an error if its key has another task | Model
         if path:
-            raise KeyInFlight(_decode_key(name), _id_of(path))
+            return
close() ends a wait in another thread | Waiting hangs
-                if found is not None or left_s <= 0 or self._lease_dir.close_count != close_count:
+                if found is not None or left_s <= 0:
a wait notices that pending/ was replaced | WaitingWithInotify hangs
-        if self._watch():
+        if not self._watches:
a wait lists a replaced pending/ once more before it sleeps | WaitingWithInotify hangs
-        return self._watches != before
+        return False
a `pop` that can't print the payload does not print the path of the lease | CommandLine
-                _put(sys.stdout, task.data)
+                sys.stdout.buffer.write(task.data)
a cancelled pop_async() loses no task | Coroutines hangs
-        except InvalidStateError:  # RACE: the coroutine was cancelled, or has been answered
-            self._give_back(task)
+        except InvalidStateError:
+            pass
Ctrl-C in processing() does not count an attempt | Processing
-            queue.release(task, front=True, counted=False)
+            queue.release(task, front=True)
an error in processing() on the last attempt makes a dead letter | Processing
- and attempts >= queue.max_attempts:
+ and attempts > queue.max_attempts:
only a leased task can be attached | Lifecycle
-        is_path = _parse_node_dir(directory) and
+        is_path =
processing() renews the lease | Processing
- or next_left_ns >= lease.length_ns * (1 - _RENEWAL):
+ or next_left_ns:
a child forked in processing() does not end the task | Processing
-        if os.getpid() != self._pid or
+        if not self._pid or
a processing() block that is collected with its queue does not end the task | Processing
- or not vars(self._worker):
+:
a pause is noticed soon, however long the last listing took | Lifecycle
- or self._files.exists("PAUSED"):
+:
a task that moves during each listing counts as work that is left | Lifecycle
-        return self._changed() != before
+        return False
a copy of a TicketQueue holds no ticket | Tickets
-    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds no ticket
+    def _reduce(self) -> tuple[Any, ...]:
two signals at the same time count as one | Work
-        if self.signals and time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
+        if self.signals and time.monotonic() < self._last_signal_s:
a signal does not lose a task that was just claimed | Work
-        self._give_back(task)
         return None
work() leaves the signal handlers as they were | Work
-                signal.signal(number, handler)
work() runs no more than `concurrency` handlers | Work
-for _ in range(self._concurrency)
+for _ in range(self._concurrency + 1)
rm cancels a scheduled task where the file system can't exchange names | KeyedByRename
-            is_safe = _state_of(target) == "scheduled"  # no
+            is_safe = not _state_of(target)  # no
an exception that a signal handler raises while a lock is closed is not lost | Faults
-ignore a disk error
-                _raise_if_no_errno(error)
+ignore a disk error
+                pass
a payload scheduled behind a task moves with the task to the new time | Keyed
-            self._files.put_in_place(buffered, target, must_exist=True)
-            states[name] = target, ""
if a lease can't be reclaimed because its key's lock is held, the lease is reclaimed later | Keyed
-            return  # RACE: another process holds the key's lock. The next reclaim tries again.
a TicketQueue directory that is removed while it is opened is made again | Tickets
-_despite_cleanup(open_dir, path)
+open_dir()
a member whose ticket was removed gets no turn with another member's number | Tickets
-            is_first = member == first
+            is_first |= member == first
a payload that does not fit in TMPDIR fails the tries of its task only | CommandLine
-(is_full and step in (_OUTPUT, _PAYLOAD))
+(is_full and step == _OUTPUT)
check(repair=True) does not touch tasks in flight | Checking
-                if self._repair and entry.directory in _WAITING_DIRS:
+                if self._repair and entry.directory:
only its user can read a new queue | Faults
-    _make_dir(data_dir, 0o700, is_durable)
+    _make_dir(data_dir, 0o755, is_durable)
an assignment to a setting raises an error | Lifecycle
-        if name in _SETTINGS and name in self.__dict__:
+        if name in _SETTINGS and name not in self.__dict__ and name == "":
a program that outlives its shell during a stop keeps its task until the program ends | CommandLine
-        if job.is_stopped:
-            job.end()
+        if len(self.signals) > 1:
+            job.end()
a command that succeeds after the second signal finishes its task | CommandLine
-        return status != 0 and
+        return (status != 0 or len(self.signals) > 1) and
a cancelled end of a block of "async with" settles its task | AsyncProcessing
         finally:
-            end()
+            pass
the end of a block of "async with" does not block the event loop | AsyncProcessing hangs
-                await asyncio.to_thread(end)
+                await asyncio.sleep(0)
a delayed push is not due before its delay is over | Lifecycle
-        if delay_s != 0:
+        if delay_s > 3600:
a search for an unknown id does not list done/ | Lifecycle
-        listed = [state for state in states if state not in _ENDED]
+        listed = states
stats() parses no name of a finished task | Lifecycle
-            **{state: files.count(state) for state in _ENDED},
+            **{state: len(files.entries(state)) for state in _ENDED},
the time since which a task is in its state counts from the last move | Lifecycle
-                since_ns = self._files.lstat(entry.path).st_ctime_ns
+                since_ns = self._files.lstat(entry.path).st_mtime_ns
tasks of 0.4 are not passed over in silence | Compatibility
-        with suppress(PermissionError), os.scandir(root + directory) as entries:
+        with suppress(PermissionError), os.scandir(root + "done") as entries:
the first signal to work() is answered by a line | Work
-        _write_stop_line(b"\n")  # a terminal may show "^C" in front
+        pass
the first signal ends `work` even if standard error is full | CommandLine hangs
-        if select.select([], [2], [], 0)[1]:
+        if select.select([], [], [], 0):
the second signal ends `work` even if the write of a log line blocks | CommandLine hangs
-    if status > 128:
+    if status > 256:
a signal to all processes of a scheduler's job does not end the launcher | CommandLine
-        if name == "SIGCHLD" or signal.getsignal(number) not in (signal.SIG_IGN, None):
+        if name == "SIGCHLD":
the younger of two pushes during a listing does not come first | Races
-                self.names = older
a TimeoutError from a signal handler does not count as a disk error of a job | Faults
-    if error.errno is None:
+    if error is None:
a fork does not copy a lock that another thread is opening | Races
-        with _no_fork():
+        if path:
             self.fd = self._open(path, flags, data_dir)
a renewal gets a key's lock even if the key is pushed all the time | Races
-                time.sleep(_LOCK_PAUSE_S)
+                return False
a synced push that raises an error restores the earlier payload | Keyed
-                    self._files.swap(new_path, path)
repair() retries soon if a key's lock is held | Races
-                self._worker.house.repairing.sooner(1)
take_async() retries soon if a key's lock is held | Races
-                self.house.wake_s = min(self.house.wake_s, time.monotonic() + 0.01)
a claim that could be neither read nor undone is not a delivery | Faults
- self.lease_dir.undelivered.pop(lease, None) or orphans.get(lease)
+ self.lease_dir.undelivered.pop(lease, None)
a task that a reclaim could not put back is not delivered | Races
-            return  # RACE: another process holds the key's lock. The next reclaim tries again.
+            self.lease_dir.undelivered[lease] = source or ""
+            return
a claim that could not be undone does not count as a delivery | InterruptedDelivery
-            name = lease.path.partition("/")[2]
+            name = self.undelivered.pop(lease.path) and lease.path.partition("/")[2]
a claim whose undo failed is put back uncounted later | Faults
-                self.orphans[lease.path] = target
+                self.orphans[lease.path] = self.undelivered.clear()
a file that can't be claimed does not delay other tasks | Races
-            place = self.back_path(place, _attempts_of(place))
a task found by a wait is put back uncounted if the caller does not get it | InterruptedDelivery
-        if found is not None or time.monotonic() >= end_s:
-            return self.hand_over(found)
+        if self.hand_over(found) is not None or time.monotonic() >= end_s:
+            return found
a task found by a coroutine goes back uncounted if the caller does not get it | InterruptedDelivery
-            return self.hand_over(await asyncio.wrap_future(request.answer), wait=False)
+            return await asyncio.wrap_future(request.answer)
a cancelled coroutine does not wait for the lock of a key | Coroutines hangs
-            with self._worker.keys.lock_of(found.id, wait), self._worker.lock:
+            with self._worker.keys.lock_of(found.id), self._worker.lock:
a claim that is lost does not touch another worker's claim of the same task | Races hangs
-        self.undelivered.pop(path, None)
+        self.undelivered.clear()
work() raises the error of a task that can't be ended | Work
-                self._error = self._error or error
`release --all` gives back a task that is renewed meanwhile | CommandLine
-            held = q.attach(task.id)
+            held = q.attach(task.path)
a stop that comes just before a wait is noticed in time | CommandLine
-                thread.join(_SIGNAL_POLL_S)
+                thread.join(_BASE_INTERVAL_S)
a command that is ended by a signal of its own has failed | CommandLine
-        return status != 0 and self._is_told
+        return status < 0 or status != 0 and self._is_told
a worker that runs a task is not idle | Work
-                is_idle = not self._running and time.monotonic() >= self._idle_end_s
+                is_idle = time.monotonic() >= self._idle_end_s
a worker takes no task after its time limit | Work
-or time.monotonic() >= self._end_s
+or not self._end_s
release() refuses a delay together with front=True | Lifecycle
- or (front and delay_s):
+:
a queue object that is collected gives up its lease directory | Liveness
-            _finalize(self.close)
             # The worker and its parts
a dead member's ticket is passed over at once | Tickets hangs
-is_dead = lock.try_exclusive()
+is_dead = None
another host's ticket is passed over when it is stale, not earlier | SharedTickets
; hosts: tickets ~ turns overlap
-st_mtime > self._stale_s
+st_mtime > 0
Ctrl-C at the end of a turn lets the next member have its turn | Races
-                self._held_tickets.pop(member, None)
a ticket is not drawn with a number that another host drew meanwhile | SharedTickets
-        if self._last_name() > f"last~{number:020d}":
+        if not number:
TicketQueue.remove() refuses a name that is not a ticket's | Lifecycle
-        if not isinstance(member, str) or not _parse_ticket(member):
+        if not isinstance(member, str):
a member that touched its ticket too late gets no turn | SharedTickets
-    late_part = 0.75
+    late_part = 2.0
tickets are drawn in order | Tickets
-        number = max(int(text) if text.isdigit() else 0, highest) + 1
+        number = max(int(text) if text.isdigit() else 0, highest, 1)
a forked child holds none of its parent's tickets | Tickets
-lambda line: line._held_tickets.clear()
+lambda line: None
a rename whose reply was lost counts as done | LostReply; nfs: replay ~ but:
-            if before is None or not self._was_moved(before, source, target):
+            if source:
a rename whose reply was lost counts as done only if the same file is at the target | LostReply
-        return self._is_at(before, target)
+        return self.exists(target)
a young file that left creating/ has arrived, even if another worker has moved it on | LostReply
-        is_ours = _state_of(source) == "creating"
+        is_ours = False
an old file that is gone from creating/ does not count as moved for this reason alone | LostReply
-_wall_ns() < before.st_mtime_ns + _LEFTOVER_NS // 2
+self.clock
a host whose queue clock is ahead does not remove files that others write | LostReply
-            return self._files.lstat(entry.path).st_ctime_ns < _wall_ns() - _LEFTOVER_NS
+            return bool(self._files.lstat(entry.path))
after the deadline, a rename of a lease that raised an error does not count as done | LostReply
-        if not (self.is_fuse or (is_lease and _stamp_of(source) <= self.clock.now_ns())):
+        if not self.is_fuse:
a claim whose reply was lost is a delivery | LeaseDirectoryLost
-            return os.path.basename(lease) in os.listdir(self.path)
+            return False
a finished task that a healed replica brings back is not delivered | Healed
-        if not self._files.came_back(lease.path):
+        if True:
a late worker is fenced although the name of its lease came back | Healed
-        if _stamp_of(lease) > self.clock.now_ns():
+        if True:
another worker's lease of a task fences a late worker | Healed
-        if max(stamps, default=0) > _stamp_of(lease) or self._is_at(ours, f"done/{ident}"):
+        if self._is_at(ours, f"done/{ident}"):
a late worker can end its delivery if no other worker got the task | Healed
-        if max(stamps, default=0) > _stamp_of(lease) or self._is_at(ours, f"done/{ident}"):
+        if max(stamps, default=0) > _stamp_of(lease) or ours.st_nlink > 1:
a sync of a file that another host moved is not an error | Healed
-    sync_file = _afresh(_Files.sync_file)
+    _sync = _afresh(_Files.sync_file)
an error of statfs() is raised | Faults
-    _call_libc("statfs", path, os.fsencode(path), status)
+    _libc().statfs(os.fsencode(path), status)
a file that was replaced is looked up again | Healed hangs
-        for _ in range(_LOOKS):
+        for _ in range(1):
a mount that hangs does not make a file a phantom | Healed
-        looks = 5 if path in self.phantoms else _LISTED_LOOKS
+        looks = 1
a phantom stays a phantom | Healed hangs
-        self.phantoms.add(path)
a command's exit status is 1 for a FemtoQueueError, 2 for another error | CommandLine
-        return 1 if isinstance(error, FemtoQueueError) else 2
+        return 2 if isinstance(error, FemtoQueueError) else 1
the exit status of `pop` on an empty queue is 1 | CommandLine
         if task is None:
-            return 1
+            return 0
a lease that `pop` can't print is given back | CommandLine
-            q.release(task, front=True, counted=False)
the exit status of `work --drain` is 1 if a task failed | CommandLine
-        return int(self._drain and (
+        return int(bool(self.signals) and (
the exit status of `check` is 1 if it finds something that is not repaired | CommandLine
-    return int(not all(it.repaired for it in findings))
+    return int(not all(it.text for it in findings))
the last piece of --null needs no zero byte | CommandLine
-        yield bytes(rest)
"""


def check(rows: list[Fault]) -> list[str]:
    """Return what is wrong with the rows.

    Each text must occur exactly once, each changed source must compile, each class and each proof
    must exist, and no two rows may have the same promise.
    """
    wrong = []
    source, tests = read("femtoqueue.py"), read("test.py")
    classes = {it.name for it in ast.parse(tests).body if isinstance(it, ast.ClassDef)}
    for fault in rows:
        try:
            compile(fault.apply(source), "femtoqueue.py", "exec")
            if fault.expected not in classes | {"-"}:
                raise ValueError(f"test.py has no class {fault.expected!r}")
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
    for another reason than the fault.
    """
    project = fault.copy(directory)
    limit_s = HANG_S if fault.hangs else CLASS_S
    for tests in ([fault.expected], []):
        found = first_failure(project, limit_s if tests else ALL_S, *tests)
        if found == HANG and fault.hangs:
            return HANG
        if found not in ("", HANG) and first_failure(project, CLASS_S, found):
            return found
    return ""


def first_failure(project: str, limit_s: float, *tests: str) -> str:
    """Run test.py, or some of its tests, up to the first failure.

    Returns the name of the test that failed, HANG if test.py did not end in time, "" if no test
    failed.
    """
    status, output = run_copy(project, "test.py", "-f", *tests, limit_s=limit_s)
    if status is None:
        return HANG
    if found := re.search(r"^(?:FAIL|ERROR): (\w+) \(\w+\.(\w+)", output, re.MULTILINE):
        return f"{found[2]}.{found[1]}"
    if status:
        say(f"{' '.join(tests)}: exit status {status}, but no test failed:\n{output[-1000:]}")
    return ""


def run_copy(project: str, *words: str, limit_s: float | None = None) -> tuple[int | None, str]:
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
    """End a process and its process group, by SIGINT and at most a second later by SIGKILL. At
    SIGINT test.py ends its workers."""
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
    add("--check", action="store_true", help="only test that each fault can still be applied")
    run = "run test.py on N faults (default: on all of them)"
    add("--tests", nargs="?", type=int, const=0, metavar="N", help=run)
    seed = "seed of the sample (default: the date)"
    add("--seed", default=time.strftime("%Y-%m-%d"), help=seed)
    add("--only", default="", metavar="TEXT", help="only faults with TEXT in their promise")
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
