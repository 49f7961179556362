"""Faults of a line or a few: what the tests and the proofs must catch.

    python .ci/broken.py --check
    python .ci/broken.py --tests [N] [--seed S] [--only TEXT]

FAULTS has text of femtoqueue.py, and what to put in its place. The first line of each says which
promise the fault breaks, after it which class of tests should find that, and which proofs must, in
their --self-check, with what these need to know: faults the calls at which a fault shows it (or
SIGKILL), fuzz the kind of seeds, power_loss the file system, hosts and nfs the part; after "~" what
it must say. After a redesign the text is another one; the promise is the same.

Each fault is tried in a copy of the project. --tests does so for each, or for a sample of N by lot
(--seed; the date), and runs test.py there: first the class that should find it, then everything. It
prints which test did. The first failure ends it. A fault marked "hangs" may be caught by a test
that does not end. Exit status 1: a fault is caught by nothing, and a test is missing; or its text
is not found exactly once. --check only looks for the texts, and compiles what they make. --only:
those with this text in their first line.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from proof import PROGRAM, PROJECT, Unable, Violation, docstring_parser, read, say

HANG_S, CLASS_S, ALL_S = 40, 120, 900  # that test.py may take: one that hangs, a class, everything
HANG = "a test that does not end"


@dataclass(frozen=True)
class Fault:
    promise: str
    expected: str  # the class of tests that should find it; "-": only proofs do
    hangs: bool  # a test that does not end has found it
    caught_by: list[tuple[str, str, str]]  # names of proofs, what each needs to know, and must say
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return the source with the fault in it. Raises ValueError if there is no place for it."""
        if source.count(self.old) != 1:
            raise ValueError(f"its text is there {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)

    def copy(self, directory: str) -> str:
        """Return a copy of the project, made in a directory, with the fault in it."""
        project = tempfile.mkdtemp(dir=directory)
        ignored = shutil.ignore_patterns(".git*", "*cache*")
        shutil.copytree(PROJECT, project, ignore=ignored, dirs_exist_ok=True)
        with open(os.path.join(project, "femtoqueue.py"), "w", encoding="utf-8") as file:
            file.write(self.apply(read("femtoqueue.py")))
        return project


def must_catch(
    seed: int,
    options: Callable[[str], Iterable[str]],
    is_wanted: Callable[[str], bool] = lambda need: True,
    tries: int = 1,
) -> None:
    """Show that this proof catches the faults that name it: on a copy of the project, with the
    options for what it needs to know, it fails with one of so many seeds, and says what it must."""
    rows = [
        (fault, need, said)
        for fault in parse_faults(FAULTS)
        for name, need, said in fault.caught_by
        if name == PROGRAM and is_wanted(need)
    ]
    if not rows:
        raise Violation("no fault names this proof")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="femtoqueue-broken-", dir=memory) as directory:
        env = {**os.environ, "TMPDIR": directory}
        for fault, need, said in rows:
            project, text = fault.copy(directory), ""
            for number in range(seed, seed + tries):
                words = f".ci/{PROGRAM}.py", "--seed", f"{number}", *options(need)
                status, text = run_copy(project, *words, env=env)
                if status == 3:
                    raise Unable(text)
                _, failed, failure = text.rpartition(f"{PROGRAM}: FAILED")
                if status == 1 and failed and re.search(said, failure):
                    say(f"{fault.promise}: caught{failure}"[:300].partition("\n")[0])
                    break
            else:
                raise Violation(f"{fault.promise}: not caught, {need}: {text[-3000:]}")


def parse_faults(text: str) -> Iterator[Fault]:
    """Yield the faults of a text: "<promise> | <class> [hangs][; <proof>: <what it needs>[ ~ <what
    it must say>]]...", where a "; " may begin a line; then lines as of a diff, whose new one may be
    left out if it is only `pass`."""
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
a directory of the queue's own is made durable with its parent | Durability
-            _sync_dir(parent)
what can't be looked at is not taken for missing | Faults
             self.lstat(path)
-        except (FileNotFoundError, NotADirectoryError):
+        except OSError:
purge() counts age from the move, not from the push | Model
-        if status.st_ctime <= before_s and
+        if status.st_mtime <= before_s and
an error in one directory does not keep the others waiting | Faults
-            errors.append(error)
+            raise error
the id tells that a task has a key | Keyed
-binascii.crc32(name.encode()) | 1 << 31:08x
+binascii.crc32(name.encode()) & ~(1 << 31):08x
a name whose number has other than 20 digits is foreign | ForeignFiles
-_NS = "0[0-8][0-9]{18}"
+_NS = "0[0-8][0-9]{17,18}"
a name with another tag than 8 hex digits is foreign | ForeignFiles; fuzz: names
-_ID = f"({_NS}-[0-9a-f]{{8}})"
+_ID = f"({_NS}-[0-9a-zA-Z]{{8}})"
a name of another form is not removed | ForeignFiles; storm: ~ left over:
+        [self.remove(f"{directory}/{name}") for name in names if not _parse(directory, name)]
         return [entry for name in names if (entry := _parse(directory, name))]
a node_id that is no part of a name is refused | Lifecycle
-    match = _parse_node_dir("inflight-" + node_id) if isinstance(node_id, str) else None
+    match = re.match("(.*)", f"{node_id}")
a key of more than 200 bytes is refused | Lifecycle
-_MAX_KEY_BYTES = 200
+_MAX_KEY_BYTES = 300
a key that is an Enum goes by its value | Lifecycle
-    return _quote_key(raw)  # not the key itself
+    return _quote_key(str(key))  # not the key itself
front=True leads to the place of the push | Model
-    return f"pending/{_task_name(_stamp_of(ident), attempts, ident)}"
+    return f"pending/{_task_name(_stamp_of(ident) + 10**15, attempts, ident)}"
a NaN is refused as an argument | Lifecycle
-    if not abs(value) < _MAX_NUMBER:  # NaN neither
+    if abs(value) >= _MAX_NUMBER:  # NaN neither
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
a record with bytes behind its payload is never delivered | Corruption
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
a payload that read() gives in parts is whole | Corruption
-    while len(payload) < length and (part
+    while len(payload) < -1 and (part
a link in pending/ is no task | ForeignFiles
-_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) |
+_NO_FOLLOW_OR_BLOCK =
a FIFO in pending/ does not block pop() | ForeignFiles hangs
-_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
+_NO_FOLLOW_OR_BLOCK = getattr(os, "O_NOFOLLOW", 0)
a forked child keeps no lock of its parent | Liveness
-    while _open_lock_fds:
+    while False:
the lock of a file that was removed is no lock | Tickets
-        if not lock.is_at_path():  # RACE: it
+        if lock.fd < 0:  # RACE: it
an error of flock() is raised, unless it says that there are no locks | Faults
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
a file that takes the place of another is synced before | Durability
-                if self.is_durable:
+                if not path:
a push that raises leaves nothing in creating/ | Faults; faults: writev write
-            for leftover in (source, path):
+            for leftover in (path,):
a push that raises leaves no task | Faults
-            for leftover in (source, path):
+            for leftover in (source,):
push() acknowledges only what the disk took | Faults
; faults: writev write rename; storm: ~ found:; hosts: quorum ~ is lost|never delivered
-        self._files.publish(ident, data, f"pending/{ident}")
+        with suppress(OSError):
+            self._files.publish(ident, data, f"pending/{ident}")
a batch whose sync failed is taken back | Durability
-            if not is_synced:
+            if not is_synced and not ids:
keep_done=False: the lease is synced before it goes | Durability
-            self.files.commit(lease.path)
a move goes on when pending/ is replaced meanwhile | Shrinking
-_MAX_REPLACED =
+_MAX_REPLACED = 0 *
a pending/ that is replaced keeps its mode | Shrinking
-                os.fchmod(fd, stat.S_IMODE(old.st_mode))
a large pending/ is replaced only when it is empty | Shrinking
-            if not self._backlog.seen:
+            if self._backlog.seen:
a finished task of which a second name came back is not delivered | Lifecycle
-        if "~1~" not in source and _is_end(target):
+        if not source:
the claim is one rename: a task is leased once | Crash
; faults: SIGKILL; hosts: calm ~ leased twice|stands in; nfs: calm ~ leased twice|stands in
-            os.rename(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            os.link(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            _unlink_if_exists(self._root + source)
the claim is one rename: a task is in some state at each instant | Crash; faults: SIGKILL
-            os.rename(self._root + source, held.prefix + name, dst_dir_fd=held.fd)
+            with open(self._root + source, "rb") as file:
+                content = file.read()
+            os.unlink(self._root + source)
+            with open(f"{self._root}{path}", "wb") as file:
+                file.write(content)
a task that can't be read is passed over by work() | TroubleOfOneTask
-            error.task_id = ident  # type: ignore[union-attr]
a task that can't be read has its attempts counted | TroubleOfOneTask
-                place = self.back_path(place, _attempts_of(lease.path))
+                place = self.back_path(place, _attempts_of(place))
a task that makes trouble again and again is passed over for longer | TroubleOfOneTask
-            self._troubles[ident] = times + 1, now_s + pause_s
+            self._troubles[ident] = 1, now_s + pause_s
work() ends if nothing but trouble with tasks comes | TroubleOfOneTask hangs
-            self._trouble_s = min(self._trouble_s, now_s)
root changes the rights of what it made, by descriptor | ManyUsers
-                fd = os.open(path, flags | os.O_EXCL, 0o666)
+                fd = os.open(path, flags, 0o666)
a due time is compared with a microsecond to spare | ReplacedClock
-    return int(time.time() * 1e9) + 1000
+    return int(time.time() * 1e9)
a monotonic clock that began anew makes a new anchor | ReplacedClock
-            if anchor_ns is not None and self._went_back(anchor_ns):
+            if False:
orders of one object strictly increase | Model
-            order_ns = self._order = now_ns if now_ns > self._order else self._order + 1
+            order_ns = self._order = now_ns
after a boot with an earlier date, new tasks sort behind old ones | Ordering
-            times_ns += [_stamp_of(entry.id) + 1 for entry in entries]
the processes of a boot agree on one clock | Ordering
-        os.link(root + aside, root + name)
+        os.replace(root + aside, root + name)
setting the date changes neither order nor deadlines | Ordering; fuzz: lives; storm: ~ first:
-            now_ns = int(time.monotonic() * 1e9) + self.anchor_ns
+            now_ns = int(time.time() * 1e9)
a name of the year 2200 does not carry the clock along | Ordering
-(it for it in times_ns if it < _FARTHEST_NS)
+times_ns
leases of an earlier boot end though the wall clock was set far back | Liveness
-                times_ns.append(min(files.lstat(directory).st_mtime_ns, entries[-1].stamp_ns))
a wall clock of the year 2100 starts no queue clock | Ordering
-    times_ns = [_EARLIEST_NS, _wall_ns()]
+    return max(_wall_ns(), _EARLIEST_NS) - _monotonic_ns()
+    times_ns = [_EARLIEST_NS]
of a huge directory the oldest names are kept | Ordering
-                names = sorted(names, reverse=True)[-keep:]
+                names = sorted(names, reverse=True)[:keep]
the first in is the first out | Model; fuzz: lives; hosts: calm ~ in the order
-    return sorted(names, reverse=True)[-keep:], seen
+    return sorted(names)[-keep:], seen
what comes back to the front is delivered next | Model
-            if names and name < names[0]:
+            if names and name > names[0]:
what comes back to the front has the order of its push | Lifecycle
-            if names and name < names[0]:
+            if names and name < names[-1]:
who comes back under its node_id takes back what it had | Model
-            elif self._held is None and lock.try_exclusive() and lock.is_at_path():
+            elif self._held is None and not lock.try_exclusive():
a detached lease outlives a restart of its node_id | CommandLine
- for it in leases if it.boot != _DETACHED)
+ for it in leases)
a claim that is interrupted is undone | Faults; faults: read
-                self._take_back(lease, waiting, error)
an error is no empty queue | Faults; faults: read
                 self._take_back(lease, waiting, error)
-                raise
+                return None
a worker can start on a full disk | Faults
-                if error.errno in _OUT_OF_SPACE_ERRNOS and not os.listdir(spare):
+                if not error.errno:
close() gives back what it had | Model
-                    if is_alone:
+                    if not is_alone:
the interpreter ends though a thread had the worker's lock | LeftBehind hangs
-        if not worker.lock.acquire(blocking=not sys.is_finalizing()):
+        if not worker.lock.acquire():
the interpreter ends though a thread opened a lock | LeftBehind hangs
-    if sys.is_finalizing() or thread in
+    if thread in
close() leaves a namesake's leases alone | Model
-            if is_alone is None or (is_alone and lock.is_at_path()):
+            if is_alone in (None, True):
what a dead worker had comes back at once | Model
-            if lock.try_exclusive() and lock.is_at_path():
+            if not lock.try_exclusive():
a lease that can't be moved keeps no other from being ended | Liveness
-            try:
-                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
-            finally:
+            if True:
+                _for_each(self._worker.reclaim, [*self._lease_dir.orphans])
an opening of the lease directory that was interrupted leaves no lock | Faults
-                if lock is not self._held:
-                    lock.close()
a dead worker's lease of another boot ends by its deadline | Liveness
-[it.path for it in leases if boot in (None, it.boot)])
+[it.path for it in leases])
a lease of another host that was just renewed is not taken | Healed
-            elif not self._renewed_recently(entry):
+            elif entry:
the empty directory of another host's worker stays for a minute | Liveness
- < _IDLE_NS:
+ < 0:
a lease ends at its deadline | Model; fuzz: lives
-            if entry.stamp_ns > now_ns:
+            if entry.stamp_ns > now_ns - 10**10:
a lease lasts until its deadline | Model; fuzz: lives; storm: ~ held:
-            if entry.stamp_ns > now_ns:
+            if entry.stamp_ns > now_ns + 10**10:
nothing is delivered before its time | Model; fuzz: lives; storm: ~ due:
-            if due_ns > now_ns:
+            if due_ns > now_ns + 10**9:
what others are writing in creating/ is left alone for an hour | Crash
-_LEFTOVER_NS = 3600 * 10**9
+_LEFTOVER_NS = 1
trouble with a directory is raised when no task waits | Faults
-                    raise job.error
+                    continue
nothing is delivered while PAUSED is there | ByHand
-            is_paused = self._files.exists("PAUSED")
+            is_paused = False
done tasks are kept for keep_done seconds | Lifecycle
- + _PURGE_SLICE_S, time.time() - keep_s
+ + _PURGE_SLICE_S, time.time()
max_attempts is a limit | Model
-            if self.max_attempts is not None and before >= self.max_attempts:
+            if self.max_attempts is not None and before > self.max_attempts:
attempts are counted | Model
-        attempts = min(_attempts_of(source) + 1, _MAX_ATTEMPTS) if "~" in source else 1
+        attempts = 1
a corrupt task goes to failed/, and pop() goes on | Corruption
-            self.quarantine(path, error.reason)
who lost a lease can't end the task | Model
; fuzz: lives; storm: ~ settled:; hosts: cut ~ \(\) by .*, when|not refused
-                raise self.lease_lost(lease) from None
+                return target
done() and fail() raise what the disk says | Faults; faults: rename
                 raise self.lease_lost(lease) from None
+            except OSError:
+                gone_to = target
the rename to failed/ is the fence: the reason is written after it | Model
-            self.move_leased(lease, target, "failed")
-            _unlink_if_exists(f"{self.files.root}{target}.error")  # of a failure retried by hand
             if path:
                 self.files.move_over(path, f"{target}.error")
+            self.move_leased(lease, target, "failed")
a retried task has no reason any more | Model
-                _unlink_if_exists(f"{self.files.root}failed/{ident}.error")
retry() puts a task at the back | Model
-        ident, target = _id_of(source), self.back_path(source, 0)
+        ident, target = _id_of(source), _front_path(_id_of(source), 0)
a checkpoint goes with its task | Model
-        if lease.has_checkpoint and _is_end(target):
+        if lease.has_checkpoint and not target:
a checkpoint belongs to one payload | Model
-    if saved.startswith(of_data):
+    if saved:
a renewal never shortens a lease | Model
-                length_ns = max(lease.length_ns, self.left_ns(lease.path))
+                length_ns = lease.length_ns
the lock of a key is taken | KeyedConcurrency
-            lock.acquire_exclusive(wait)
the lock file of a key stays | -
; hosts: key ~ crowded|overlapping; nfs: keys ~ crowded|overlapping
             if lock is not outer:
+                os.unlink(lock.path)
what is in flight is seen by its key | Model; hosts: key ~ found nothing
-        return self._worker.keys.path_of(_encode_key(key)) != ""
+        return self._worker.keys.path_of(_encode_key(key)).startswith(("pending", "scheduled"))
the state of a key that leads to another's task is not believed | Keyed; fuzz: contents
-        if match and _tag_of(match[2]) == tag and match[4][-9:] in ("-", f"-{tag}"):
+        if match:
if_in_flight="reject" raises | Model
-            if is_leased and if_in_flight == "reject":
+            if is_leased and if_in_flight == "refuse":
done() lets in the newer payload behind a task | Keyed; fuzz: lives; storm: ~ keys:
-                    states[name] = self._promote(newer), ""
+                    states[name] = "", ""
a claim takes the newer payload behind a task along | Keyed
-        return _id_of(path) == _id_of(lease) and not newer
+        return _id_of(path) == _id_of(lease)
a payload that is for later is not delivered now, whoever put its task back | KeyedInterrupted
-        due_ns = _later(newer)
+        due_ns = None
a newer payload is a first attempt, whoever put its task back | LeftBehind
-        if due_ns is None and _attempts_of(lease) == 1:
+        if due_ns is None:
a schedule() that raised leaves the time of what was behind the lease | Keyed
-                self._files.move(target, path)
a payload for later whose sync failed is not delivered now | KeyedByRename
-            if self._files.exists(aside):  # else it
+            if aside:  # else it
a payload that is behind a task is a first attempt | Model
-                target = _reset_path(target, _later(newer))
+                target = _reset_path(target, _later(newer)) if _later(newer) else target
a child drops what its parent locked, also if Ctrl-C met the fork | Liveness
-    with suppress(RuntimeError):  # it is not ours
+    with suppress():  # it is not ours
the task of a block that Ctrl-C ends is delivered again | Work
-        except BaseException:  # trouble with the disk, or
+        except Exception:  # trouble with the disk, or
of two pushes during a listing with foreign files the older one comes first | Meeting
-            if self.seen <= _AT_ONCE:
+            if len(self.names) <= _AT_ONCE:
a chore rests for longer than it took | Faults
-        self._next_s = max(ended_s + self.every_s, self.rested_s)
+        self._next_s = ended_s
an error of a look ends the wait of a coroutine with it | Coroutines
-                request.answer.set_exception(error)
+                request.answer.set_result(task)
a payload that nobody knows does not take the place of a younger one | Keyed
-                if _id_of(newer) < max(_id_of(path), _id_of(before)):
+                if not newer:
a task that came back is noted before it is delivered | Keyed
-        self._save(_tag_of(lease), states)  # or
+        _no_op(_tag_of(lease), states)  # or
a payload that came up counts more than the task before it | Keyed
-        if behind and not newer:
+        if not behind and newer:
what is due does not keep the lock for long | Lifecycle
-lambda _: time.monotonic() < end_s, due
+lambda _: True, due
of two payloads behind a leased task the newer one stays | Model
-                    elif if_in_flight == "update" and not newer:
+                    elif if_in_flight == "update":
a push of a key saves its state before the task | Durability hangs
-            self._save(_key_tag(name), states, sync=True)
a second task of a key, put there by hand, is a dead letter | Keyed
-        if path and _id_of(path) != _id_of(lease):
+        if not name:
a record that a healed replica brings back does not stand for its key | Healed
-                elif entry.id >= _id_of(path):  # an older one has come back (healed)
+                else:
a task is no dead letter beside an older one that came back | Healed
-        if other > ident:
+        if path and other != ident:
a younger task of a key waits while an older one runs | KeyedOnSharedFileSystem
-            if left_ns > 0:
+            if not name:
what a healed replica brings back in keys/ does not follow a younger task | Healed
-                    states[name] = entry.path, _younger(newer, entry.path)
+                    states[name] = entry.path, newer
what a healed replica brings back in keys/ is not taken along | Healed
-        states[name] = lease, _younger(newer, lease)
+        states[name] = lease, newer
of two payloads that hosts put behind a task, the older one goes | KeyedOnSharedFileSystem
-                        states.outdated += (older,)
a lease that a healed replica brings back does not end over its task | Healed
-        target = self._free_path(target)
a task that came back is on disk in its new place before its payload is replaced | Durability
-            self._files.commit(target)  # else btrfs
+            pass  # else btrfs
what is pushed behind a task is younger, whatever the clocks say | KeyedOnSharedFileSystem
-        order = max(self._clock.next_order(), younger)
+        order = self._clock.next_order()
a newer payload that replaces one has no checkpoint of that | Cost
-            self._files.remove(f"checkpoints/{_id_of(path)}")
a newer payload that is taken along has no checkpoint of the older one | Keyed
-        self._files.remove(f"checkpoints/{_id_of(lease)}")  # of the older one
retry() of a task whose key has another raises | Model
         if path:
-            raise KeyInFlight(_decode_key(name), _id_of(path))
+            return
close() ends a wait in another thread | Waiting hangs
-                if found is not None or left_s <= 0 or self._lease_dir.closes != closes:
+                if found is not None or left_s <= 0:
a wait hears of a pending/ that was replaced | Hearing hangs
-        if self._watch():
+        if not self._watches:
a wait looks at a pending/ that was replaced once it is watched | Hearing hangs
-        return self._watches != before
+        return False
a lease whose payload can't be printed is not told | CommandLine
-                sys.stdout.flush()
a cancelled pop_async() loses no task | Coroutines hangs
-        except InvalidStateError:  # RACE: cancelled, or the queue was closed
-            self._give_back(task)
+        except InvalidStateError:
+            pass
Ctrl-C in processing() counts no delivery | Processing
-            queue.release(task, front=True, counted=False)
+            queue.release(task, front=True)
processing() makes a dead letter of the last attempt | Processing
- and attempts >= queue.max_attempts:
+ and attempts > queue.max_attempts:
only what is leased can be attached | Lifecycle
-        is_path = _parse_node_dir(directory) and
+        is_path =
processing() renews the lease | Processing
- or next_left_ns >= lease.length_ns * (1 - _RENEWAL):
+ or next_left_ns:
a child that is forked in processing() does not end the task | Processing
-        if os.getpid() != self._pid or
+        if not self._pid or
a block that is garbage with its queue ends nothing | Processing
- or not vars(self._worker):
+:
a pause is seen soon, however long the last listing took | Lifecycle
- or self._files.exists("PAUSED"):
+:
a task that moves against each look is work that is left | Lifecycle
-        return self._changed_ns() != before
+        return False
a copy of a line holds no ticket | Tickets
-    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds no ticket
+    def _reduce(self) -> tuple[Any, ...]:
two signals at once are one | Work
-        if self.signals and time.monotonic() < self._last_signal_s + _ONE_SIGNAL_S:
+        if self.signals and time.monotonic() < self._last_signal_s:
a signal drops no task that was just claimed | Work
-        self._give_back(task)
         return None
work() leaves the signal handlers as they were | Work
-                signal.signal(number, handler)
work() runs no more than `concurrency` handlers | Work
-for _ in range(self._concurrency)
+for _ in range(self._concurrency + 1)
rm cancels what is scheduled where names can't be exchanged | KeyedByRename
-            is_safe = _state_of(target) == "scheduled"  # no
+            is_safe = not _state_of(target)  # no
a signal handler's exception at the end of a lock is heard | Faults
-is done
-                _raise_if_foreign(error)
+is done
+                pass
what was scheduled behind a task goes with it, to the new time | Keyed
-            self._files.move_over(newer, target, must_exist=True)
-            states[name] = target, ""
a delivery that could not be ended is not forgotten while its key is busy | Keyed
-            return  # RACE: another process is at work on its key; next time
a line that is removed as it is opened is made again | Tickets
-_despite_cleanup(open_dir, path)
+open_dir()
who was removed from a line has no turn of another's number | Tickets
-            is_first = member == first  # not
+            is_first |= member == first  # not
a payload that TMPDIR has no room for is not the first again | CommandLine
-                    self._queue.release(task, counted=False)
                     raise
check(repair=True) leaves what is in flight alone | Checking
-                if self._repair and entry.directory in _WAITING_DIRS:
+                if self._repair and entry.directory:
a new queue is its user's alone | Faults
-    _make_dir(data_dir, 0o700, is_durable)
+    _make_dir(data_dir, 0o755, is_durable)
a setting is not changed in silence | Lifecycle
-        if name in _SETTINGS and name in self.__dict__:
+        if name in _SETTINGS and name not in self.__dict__ and name == "":
a program that outlives its shell in a stop has its task until then | CommandLine
-        while is_stopped and self._is_alive(process):
+        while is_stopped and self._is_told.wait(60) is None:
a command that ends well after the second signal has done its task | CommandLine
-        if not status:
+        if not status and len(self.signals) < 2:
a first signal ends work though standard error is full | CommandLine hangs
-            if select.select([], [2], [], 0)[1]:
+            if select.select([], [], [], 0):
a second signal ends work though a log line is stuck | CommandLine hangs
-    if status > 128:
+    if status > 256:
a signal to all processes of a job does not end the watchdog | CommandLine
-    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
+    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
of two pushes during a listing, the younger does not come first | Meeting
-                self.names = older
a signal handler's TimeoutError is no disk trouble of a job | Faults
-    if error.errno is None:
+    if error is None:
a fork copies no lock that another thread is opening | Meeting
-        with _no_fork():
+        if path:
             self.fd = self._open(path, flags, data_dir)
a renewal gets the lock of a key that is pushed all the time | Meeting
-                time.sleep(_LOCK_PAUSE_S)
+                return False
a synced push that raises puts back what was there | Keyed
-                    self._files.swap(aside, path)
repair() comes again soon for a busy key | Meeting
-                self._worker.house.repairing.sooner(1)
take_async() looks again soon at a busy key | Meeting
-                self.house.wake_s = min(self.house.wake_s, time.monotonic() + 0.01)
a claim that could be neither read nor undone is no delivery | Faults
- self.lease_dir.unread.pop(lease, None) or orphans.get(lease)
+ self.lease_dir.unread.pop(lease, None)
what a reclaim could not give back is not delivered | Meeting
-            return  # RACE: another process is at work on its key; next time
+            self.lease_dir.unread[lease] = source or ""
+            return
nor is one that could not be undone | LeftBehind
-            name = lease.path.partition("/")[2]
+            name = self.unread.pop(lease.path) and lease.path.partition("/")[2]
nor is one whose way back was not there | Faults
-                self.orphans[lease.path] = target
+                self.orphans[lease.path] = self.unread.clear()
a file that can't be claimed keeps no other waiting | Meeting
-            place = self.back_path(place, _attempts_of(place))
a wait's delivery is taken back uncounted until its caller has it | LeftBehind
-        if found is not None or time.monotonic() >= end_s:
-            return self.accept(found)
+        if self.accept(found) is not None or time.monotonic() >= end_s:
+            return found
so is a coroutine's | LeftBehind
-            return self.accept(await asyncio.wrap_future(request.answer))
+            return await asyncio.wrap_future(request.answer)
a claim that is lost leaves another's of the same task alone | Meeting hangs
-        self.unread.pop(path, None)
+        self.unread.clear()
a task that can't be ended ends work() | Work
-                self._error = self._error or error
`release --all` gives back what is renewed meanwhile | CommandLine
-            held = q.attach(task.id)
+            held = q.attach(task.path)
a stop that comes just before a wait is heard in time | CommandLine
-                thread.join(_ONE_SIGNAL_S / 2)
+                thread.join(_BASE_INTERVAL_S)
a command that a signal ends alone has failed | CommandLine
-        return self._is_told.wait(_ONE_SIGNAL_S * may_be)
+        return status < 0 or self._is_told.wait(_ONE_SIGNAL_S * may_be)
an idle worker that runs a task is not idle | Work
-                is_idle = not self._running and time.monotonic() >= self._idle_end_s
+                is_idle = time.monotonic() >= self._idle_end_s
a worker takes nothing after its time limit | Work
-or time.monotonic() >= self._end_s
+or not self._end_s
release() with a delay is not at the front | Lifecycle
- or (front and delay_s):
+:
a dropped object gives up its directory | Liveness
-            self.close()
             # It is in a cycle with
the ticket of a dead member is passed over at once | Tickets hangs
-is_dead = lock.try_exclusive()
+is_dead = None
the ticket of another host is passed over when it is stale, not before | SharedTickets
; hosts: tickets ~ turns overlap
-st_mtime > self._stale_s
+st_mtime > 0
Ctrl-C as a turn ends leaves the line to others | Meeting
-                self._held.pop(member, None)
a number that another host drew meanwhile is higher than ours | SharedTickets
-        if self._noted() > f"last~{number:020d}":
+        if not number:
only names of tickets can be removed as one | Lifecycle
-        if not isinstance(member, str) or not _parse_ticket(member):
+        if not isinstance(member, str):
a member that was late to touch its ticket has no turn | SharedTickets
-    late = 0.75
+    late = 2.0
tickets are drawn in order | Tickets
-        number = max(int(text) if text.isdigit() else 0, highest) + 1
+        number = max(int(text) if text.isdigit() else 0, highest, 1)
a forked child holds none of its parent's tickets | Tickets
-lambda line: line._held.clear()
+lambda line: None
a rename whose reply was lost has not failed | LostReply; nfs: replay ~ but:
-            if before is None or not self._was_moved(before, source, target):
+            if source:
what is where a file was to go may be another | LostReply
-and self.lstat(target).st_ino == before.st_ino
+and before
what left creating/ where it was to go has arrived | LostReply
-        is_ours = _state_of(source) == "creating"
+        is_ours = False
an old file in creating/ may have been swept | LostReply
-_wall_ns() < before.st_mtime_ns + _LEFTOVER_NS // 2
+self.clock
a host whose queue clock is ahead does not sweep what is written | LostReply
-            return self._files.lstat(entry.path).st_ctime_ns < _wall_ns() - _LEFTOVER_NS
+            return bool(self._files.lstat(entry.path))
a task whose lease was over may be another delivery's | LostReply
-        if not (self.heals or (is_lease and _stamp_of(source) <= self.clock.now_ns())):
+        if not self.heals:
a claim whose reply was lost is a delivery | PlaceLost
-            return os.path.basename(lease) in os.listdir(self.path)
+            return False
a finished task that a healed replica brings back is not delivered | Healed
-        if not self._files.is_done(lease.path):
+        if True:
a sync of what another host took is no error | Healed
-    sync_file = _afresh(_Files.sync_file)
+    _sync = _afresh(_Files.sync_file)
a failed statfs() is an error | Faults
-    _call_libc("statfs", path, os.fsencode(path), status)
+    _libc().statfs(os.fsencode(path), status)
a file that was replaced is looked up again | Healed hangs
-        for _ in range(_LOOKS):
+        for _ in range(1):
a mount that hangs makes no phantom | Healed
-        looks = 5 if path in self.phantoms else _LISTED_LOOKS
+        looks = 1
a phantom is one for good | Healed hangs
-        self.phantoms.add(path)
a command's error is status 1 if nothing is there, else 2 | CommandLine
-        return 1 if isinstance(error, FemtoQueueError) else 2
+        return 2 if isinstance(error, FemtoQueueError) else 1
`pop` on an empty queue is status 1 | CommandLine
         if task is None:
-            return 1
+            return 0
a lease that `pop` can't print is given back | CommandLine
-            q.release(task, front=True, counted=False)
`work --drain` is status 1 if a task failed | CommandLine
-        return int(self._drain and (
+        return int(bool(self.signals) and (
`check` is status 1 if something is odd | CommandLine
-    return int(not all(it.repaired for it in findings))
+    return int(not all(it.text for it in findings))
the last piece of --null needs no zero byte | CommandLine
-        yield bytes(rest)
"""


def check(rows: list[Fault]) -> list[str]:
    """Return what is wrong with the list: texts that are not there once, and the like."""
    wrong = []
    source, tests = read("femtoqueue.py"), read("test.py")
    classes = {it.name for it in ast.parse(tests).body if isinstance(it, ast.ClassDef)}
    for fault in rows:
        try:
            compile(fault.apply(source), "femtoqueue.py", "exec")
            if fault.expected not in classes | {"-"}:
                raise ValueError(f"no class of tests: {fault.expected!r}")
            for name, *_ in fault.caught_by:
                read(f".ci/{name}.py")
        except (ValueError, SyntaxError, FileNotFoundError) as error:
            wrong.append(f"{fault.promise}: {error}")
    promises = [fault.promise for fault in rows]
    return wrong + [f"twice: {it}" for it in sorted({*promises}) if promises.count(it) > 1]


def finder(fault: Fault, directory: str) -> str:
    """Return the test that finds a fault, "" if none does. It must fail again, alone: on a busy
    machine a test may fail that does not see the fault."""
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
    """Run test.py, or some of its tests, up to the first failure; return the name of the test."""
    status, output = run_copy(project, "test.py", "-f", *tests, limit_s=limit_s)
    if status is None:
        return HANG
    if found := re.search(r"^(?:FAIL|ERROR): (\w+) \(\w+\.(\w+)", output, re.MULTILINE):
        return f"{found[2]}.{found[1]}"
    if status:
        say(f"{' '.join(tests)}: no test failed, but it ends so:\n{output[-1000:]}")
    return ""


def run_copy(
    project: str,
    *words: str,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """Run a program in a copy of the project; return its status, None if it hangs, and what it
    says."""
    with subprocess.Popen(
        [sys.executable, "-B", *words],
        cwd=project,
        env=env,
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
    """End a process and its group. By the first signal, test.py ends its workers."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            time.sleep(1 if process.poll() is None else 0)


def run_tests(rows: list[Fault]) -> int:
    """Run test.py on each fault, and print what finds it. Return how many nothing finds."""
    missed = 0

    def run(fault: Fault) -> tuple[Fault, str, float]:
        began_s = time.monotonic()
        return fault, finder(fault, directory), time.monotonic() - began_s

    with (
        tempfile.TemporaryDirectory(prefix="femtoqueue-broken-") as directory,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as executor,
    ):
        for fault, found, seconds in executor.map(run, rows):
            missed += not found
            say(f"{fault.promise}: {found or 'CAUGHT BY NOTHING'}, {seconds:.0f} s")
    return missed


def main() -> None:
    parser = docstring_parser(__doc__)
    add = parser.add_argument
    add("--check", action="store_true", help="look whether each fault still has its place")
    add(
        "--tests", nargs="?", type=int, const=0, metavar="N", help="run test.py on N faults, or all"
    )
    add("--seed", default=time.strftime("%Y-%m-%d"), help="of the sample (default: the date)")
    add("--only", default="", metavar="TEXT", help="the faults with this in their promise")
    args = parser.parse_args()
    rows = [*parse_faults(FAULTS)]
    wrong = check(rows)
    if wrong:
        raise SystemExit("\n".join(wrong))
    say(f"{len(rows)} faults, each has its place")
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
