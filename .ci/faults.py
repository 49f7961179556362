"""Make each system call of a queue fail, or kill the process at it, by strace -e inject=.

    python .ci/faults.py [--sample N] [--calls CALL ...] [--seed S] [--self-check]

Needs strace (5.14 or later) and the right to ptrace, on Linux. Does not need root.

A life is a script: a child process calls the public methods of a queue, one after the other. Each
call is a step. The child writes notes to a file outside the queue: one before each step, and one
with the result or the error after the step. Each life is first played under strace without a fault.
Each system call that names a path or a descriptor in the data directory is a point. Then the life
is played again for each point with each fault. The faults are the errnos that the system call may
return (ENOSPC, EIO, EMFILE, EACCES, EINTR, ...), and SIGKILL at the entry of the call.

An injection selects a system call by its name and a number N. All calls with this name are counted,
also those outside the data directory. The clock and the random numbers are simulated, so that the
N-th call is the same in each play of a life. The trace must show that the expected call was hit. By
default a random sample of the injections is made, which has each combination of call, directory and
fault. All injections (--sample 9999) take ten minutes.

Proved for each injection:
  - An injected error is raised, or it has no effect. If it is raised, the step in which the system
    call failed raises the OSError with that errno. The same step is repeated, unless it is a push.
    The repeated step succeeds, or finds its work done. An error in the maintenance is raised by
    the pop() that ran it, or by a later pop().
  - If the error has no effect, each step returns what it may return without a fault. Only the order
    may differ: a pop() may return another task first.
  - No other exception is raised, nothing is written to standard error, and no call hangs.
  - Afterwards the same object (after SIGKILL: the next process) can push and drain.
  - In the end each acknowledged task exists once, in the acknowledged state, with its own bytes. A
    push that raised an error left no task. If the push was to replace a payload, the old or the new
    payload is left. No task is delivered after its done() returned. creating/ is empty, nothing is
    in flight, and stats(), tasks() and peek() agree.

Not proved: calls that fail half-way, for example a short write, or a rename that takes place and
still returns an error. The reason is that strace skips the call at which it injects an error. For
the same reason, a close() that fails leaves the descriptor open, which Linux does not do. Races are
not proved, because a life is one process. Two faults in one life are not proved either.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn
from unittest import mock

from broken import must_catch
from proof import (
    Unable,
    Violation,
    exit_on_failure,
    install,
    name_of,
    open_log,
    payload,
    proof_parser,
    say,
)

import femtoqueue
from femtoqueue import FemtoQueue, FemtoQueueError, FemtoTask
from test import Clock, memory_dir, record

WRITES = ("ENOSPC", "EIO", "EINTR")
CHANGES = ("ENOSPC", "EIO", "EACCES")
STATUS = ("EIO", "EACCES")
# The errors that the calls of the lives may return, by the man pages open(2), rename(2), ... No
# error is injected into a call with an empty tuple.
ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("open", "openat"), ("EIO", "EACCES", "EMFILE", "EINTR", "ENOSPC")),
    **dict.fromkeys(("write", "pwrite64", "fsync", "fdatasync", "syncfs"), WRITES),
    **dict.fromkeys(("rename", "renameat", "renameat2", "mkdir", "mkdirat"), CHANGES),
    **dict.fromkeys(("link", "linkat", "symlinkat"), (*CHANGES, "EPERM")),
    **dict.fromkeys(
        ("unlink", "unlinkat", "rmdir", "chmod", "fchmod", "fchmodat"), STATUS
    ),
    **dict.fromkeys(("fchown", "lchown", "fchownat"), STATUS),
    **dict.fromkeys(
        ("stat", "lstat", "newfstatat", "statx", "access", "faccessat"), STATUS
    ),
    **dict.fromkeys(("faccessat2", "readlinkat"), STATUS),
    **dict.fromkeys(("fstat", "statfs", "fstatfs", "getdents64"), ("EIO",)),
    **dict.fromkeys(("read", "pread64"), ("EIO", "EINTR")),
    "flock": ("ENOLCK", "EINTR"),
    "close": ("EIO", "ENOSPC", "EINTR"),
    **dict.fromkeys(("lseek", "fcntl", "ioctl"), ()),
}
# how the queue reports a file system without flock
SURFACES_AS = {errno.ENOLCK: errno.ENOTSUP}
KILL = "SIGKILL"
LIVE = ("pending", "scheduled", "inflight")
NO_ID = f"{7:020d}-0000000000000007"
AN_HOUR_S, LATER_S = 3600.0, 1000.0
TIMEOUT_S = 30
PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61

# [a word ("try", "ok", "err", "lost", ...), step, its arguments..., its outcome]
Note = list[Any]
Noting = Callable[[Note], None]
Maker = Callable[[str], FemtoQueue]  # makes a queue object with a node_id


class PassingClock(Clock):
    """A simulated clock that advances by a microsecond each time it is read.

    It is an hour ahead of the kernel's clock, so that every file is old enough for purge().
    """

    def __init__(self) -> None:
        super().__init__()
        self.stand_still()
        self.advance(AN_HOUR_S)

    def time(self) -> float:
        self.advance(1e-6)
        return super().time()

    def monotonic(self) -> float:
        self.advance(1e-6)
        return super().monotonic()

    sleep = Clock.advance


# made once, so that all forked processes start with the same time
CLOCK = PassingClock()


@contextlib.contextmanager
def made_up(seed: str) -> Iterator[PassingClock]:
    """Give femtoqueue a simulated clock and random numbers, the same in each process."""
    clock = copy.copy(CLOCK)
    chance = random.Random(seed)
    with (
        mock.patch.object(femtoqueue, "time", clock),
        mock.patch.object(os, "urandom", chance.randbytes),
    ):
        yield clock


def data_of(name: str) -> bytes:
    """Return the payload for a name, which may end with "/<size in bytes>"."""
    return payload(name, int(name.partition("/")[2] or 40))


# A life, in the child


class Life:
    """Calls a queue's methods, and writes a note before and after each call."""

    def __init__(self, make: Maker, clock: PassingClock, note: Noting) -> None:
        self.make = make
        self.clock = clock
        self.note = note
        # All queue objects are kept: an object that is garbage collected closes itself.
        self.queues: list[FemtoQueue] = []

    def step(
        self,
        call: Callable[[], Any],
        *what: Any,
        shown: Callable[[Any], Any] = lambda _: None,
    ) -> Any:
        """Make a call and return its result. After an OSError repeat it, unless it is a push.

        `what` are the name and the arguments of the step in the notes, and `shown` turns the result
        into a value for the note. Returns None if the call keeps failing, or if it raises a
        FemtoQueueError.
        """
        for _ in range(1 if "push" in what[0] else 9):
            self.note(["try", *what])
            try:
                result = call()
                self.note(["ok", *what, shown(result)])
                return result
            except OSError as error:
                self.note(
                    ["err", *what, error.errno, len(getattr(error, "pushed_ids", ()))]
                )
            except FemtoQueueError as error:
                self.note(["lost", *what, type(error).__name__])
                break
        return None

    def open(self, node_id: str = "n1") -> None:
        self.queues.append(self.step(lambda: self.make(node_id), "open") or self.queue)

    @property
    def queue(self) -> FemtoQueue:
        return self.queues[-1]

    def push(
        self,
        name: str,
        key: str | None = None,
        policy: Any = "buffer",
        in_s: float | None = None,
    ) -> None:
        def call() -> str:
            if in_s is None:
                return self.queue.push(data_of(name), key=key, if_in_flight=policy)
            due_us = (self.clock.time() + in_s) * 1e6
            return self.queue.schedule(
                data_of(name), due_us, key=key, if_in_flight=policy
            )

        self.step(call, "push", name, key, policy, (in_s or 0) > 0)

    def push_many(self, *names: str) -> None:
        datas = map(data_of, names)
        self.step(lambda: self.queue.push_many(datas), "push_many", [*names])

    def pop(self, key: str | None = None) -> FemtoTask | None:
        def call() -> FemtoTask | None:
            return self.queue.pop() if key is None else self.queue.take(key)

        task: FemtoTask | None = self.step(
            call, "pop", key, shown=lambda task: task and name_of(task.data)
        )
        return task

    def end(self, task: FemtoTask | None, how: str, **options: Any) -> None:
        if task is not None:
            method = getattr(self.queue, how)
            later = "delay_s" in options
            self.step(
                lambda: method(task, **options), "end", how, name_of(task.data), later
            )

    def call(self, method: str, *arguments: Any) -> None:
        self.step(
            lambda: getattr(self.queue, method)(*arguments),
            "call",
            method,
            [*arguments],
        )

    def retry(self, task: FemtoTask | None) -> None:
        if task is not None:
            self.step(lambda: self.queue.retry(task.id), "retry", name_of(task.data))

    def expire(self) -> None:
        self.clock.advance(40)
        self.note(["over"])

    def look(self) -> None:
        def call() -> tuple[dict[str, str], bool]:
            q = self.queue
            found = found_in(q)
            q.stats(), q.peek(NO_ID), [*q.keys("pending")]
            return found, q.contains("k") and q.peek(key="k") is not None

        self.step(call, "look", shown=lambda seen: seen)

    def die(self) -> None:
        """Drop the locks of all workers, as if they were killed. Put three files into the queue.

        They are a torn task (which no push() leaves), a task whose attempts are used up, and an
        unfinished file in creating/.
        """
        for q in self.queues:
            if (held := q._worker.lease_dir._held) and held.fd is not None:
                fcntl.flock(held.fd, fcntl.LOCK_UN)
        for name, content in (
            (f"pending/{1:020d}-0000000000000001", b"FQ1 00000000 99\nshort"),
            (f"pending/{1:020d}~4~{2:020d}-0000000000000002", record(data_of("spent"))),
            (f"creating/{3:020d}-0000000000000003", b"FQ1"),
        ):
            with open(os.path.join(self.queue.data_dir, name), "wb") as file:
                file.write(content)
        self.note(["over"])
        self.note(["ok", "litter"])

    def drain(self, most: int = 100) -> None:
        for _ in range(most):
            task = self.pop()
            if task is None:
                return
            self.end(task, "done")

    def finish(self) -> None:
        """Show that the same object still works. No error is injected after the note "end"."""
        self.note(["end"])
        self.clock.advance(LATER_S)
        for name in ("after", "afterwards"):
            self.push(name)
            self.drain()
            self.call("close")


def plain(life: Life) -> None:
    life.open()
    life.push("a")
    life.push_many("b", "big/100000", "c", "d", "e")
    life.push("late", in_s=600)
    life.push("due", in_s=-1)
    life.end(life.pop(), "done")
    failed = life.pop()
    life.end(failed, "fail", error="why")
    life.end(life.pop(), "done")
    life.end(life.pop(), "release")
    life.end(life.pop(), "release", front=True)
    task = life.pop()
    life.end(task, "extend", ms=60_000)
    life.end(task, "release", delay_s=30)
    life.retry(failed)
    life.end(life.pop(), "fail")
    life.pop()
    life.expire()
    life.end(life.pop(), "release", front=True)
    life.look()
    life.call("retry_failed")
    life.call("purge", 0)
    life.clock.advance(100)
    life.drain()
    life.call("close")
    life.push("f")
    life.drain()


def keyed(life: Life) -> None:
    life.open()
    life.push("k1", "k")
    life.push("k2", "k")  # replaces k1
    task = life.pop("k")
    life.push("k3", "k")  # is buffered behind k2
    life.push("k4", "k")  # replaces k3
    life.end(task, "release")  # k4 replaces k2
    task = life.pop("k")
    life.push("k5", "k", "update")
    life.push("k6", "k")
    life.end(task, "extend", ms=60_000)
    life.end(task, "done")  # k6 is promoted
    failed = life.pop("k")
    life.end(failed, "fail", error="why")
    life.push("l1", "l", in_s=20)
    life.push("l2", "l", in_s=40)  # replaces l1, and moves the task to a later time
    life.push("l3", "l")
    task = life.pop()
    life.push("m1", "m", in_s=10)
    life.end(task, "release", delay_s=5)
    life.retry(failed)
    task = life.pop("k")
    life.push("k7", "k", in_s=10)
    life.end(task, "done")
    life.look()
    life.clock.advance(100)
    life.drain()


def inherited(life: Life) -> None:
    """Start a worker on a queue where two workers died, one of them with the same node_id. They
    left leases, with buffered payloads behind them."""
    life.clock.advance(-AN_HOUR_S / 2)
    for node_id in ("n0", "n1"):
        leave_leases(life, node_id)
    life.die()
    life.clock.advance(AN_HOUR_S / 2)
    life.note(["begin"])
    life.open()
    life.look()
    life.push("a")
    life.end(life.pop(), "done")
    life.push("k9", "k")
    life.clock.advance(5)
    life.end(life.pop("k"), "done")
    life.end(life.pop(), "fail", error="why")
    life.end(life.pop(), "release", delay_s=20)
    life.drain()
    life.call("purge", 0, ("done", "failed"))
    life.clock.advance(700)
    life.drain()
    life.look()


def leave_leases(life: Life, own: str) -> None:
    life.open(own)
    life.push_many(*(f"{own}-{letter}" for letter in "abcd"))
    life.push(f"{own}-k1", f"k{own}")
    life.push(f"{own}-late", in_s=600)
    life.push(f"{own}-soon", in_s=3)
    life.end(life.pop(), "done")
    life.end(life.pop(), "fail", error="why")
    life.pop()
    life.pop(f"k{own}")
    life.push(f"{own}-k2", f"k{own}")
    # the second worker's payload gets behind the first one's lease
    life.push(f"{own}-k", "k")
    life.pop("k")


# The states that tasks may have after a life


@dataclasses.dataclass(eq=False)
class Slot:
    """A task. Its payload is one of `names`. Its state is one of `states`: "live" (waiting or
    leased), "done", "failed" or "gone" (the task does not exist)."""

    names: set[str]
    states: set[str] = dataclasses.field(default_factory=lambda: {"gone", "live"})
    key: str | None = None
    leased: str = ""  # while the task is leased to the life: the payload's name
    # pop() may not find it yet: it is due later, or needs maintenance
    later: bool = False
    behind: Slot | None = None  # the payload that is buffered behind this task
    # The names of payloads that end with the task in front of them.
    updates: set[str] = dataclasses.field(default_factory=set)


class Ledger:
    """Follows the notes of a life, and knows from them which states each task may be in.

    Raises Violation if a step returned what it must not return.
    """

    def __init__(self, notes: Iterable[Note], *done: str) -> None:
        self.slots: list[Slot] = []
        # The states after done(): "gone" if keep_done is False, or if done/ had no room.
        self.done = {*done}
        self._pushed: list[Slot] = []  # by the step that is being followed
        self._erred: Note = []  # the step before, if it raised an OSError
        self._logged: list[str] = []  # the queue's log messages in this step
        # How many tasks a pop() may pass over, because it may not claim them: for a minute.
        self._barred = 0
        for note in notes:
            self.follow(note)

    def follow(self, note: Note) -> None:
        word, what, *rest = [*note, None]
        if word == "crash":
            raise Violation(f"neither OSError nor FemtoQueueError: {what}")
        if word == "over":
            self.end_leases(is_seen=True)
        if word == "try":
            self._logged = []
        if word == "log":
            self._logged.append(what)
        may_be_lost = (
            self._erred == note[1:-1]
            and what in ("end", "retry")
            and rest[0] != "extend"
        )
        if word == "lost" and not may_be_lost:
            raise Violation(
                f"{note}, though the life held the lease; error before: {self._erred}"
            )
        handler = (
            getattr(self, f"_{what}", None)
            if word in ("try", "ok", "err", "lost")
            else None
        )
        if handler is not None:
            handler(word, *rest[:-1])
        if word != "try":
            self._erred = note[1:-2] if word == "err" else []

    def end_leases(self, is_seen: bool = False) -> None:
        """End the leases of all slots, because the leases expired or the process was killed.

        Each leased task comes back. A payload that is buffered behind a task then replaces the
        task's payload. If the process was killed in done() or fail(), the task may have ended, and
        with it a payload of "update". With `is_seen` the life goes on, and may look at the queue
        before the tasks have come back.
        """
        for slot in [slot for slot in self.slots if slot.leased]:
            behind = slot.behind
            slot.leased = ""
            slot.behind = None
            slot.later |= is_seen
            if behind is not None and behind.states == {"live"}:
                slot.states = (slot.states - {"live"}) | {"gone"}
                behind.later |= is_seen
                self.slots.append(behind)
                if behind.updates and slot.states & {"done", "failed"}:
                    behind.states |= {"gone"}
            elif behind is not None:
                # the process was killed in the push of the buffered payload
                slot.names |= behind.names

    def _look(self, word: str, found: Any = None, *_: Any) -> None:
        if word != "ok":
            return
        states, sees_k = found
        # tasks() logs each file that it has no permission to read, and leaves the file out.
        left_out = sum("Permission denied" in text for text in self._logged)
        misplaced = self.misplaced(states)
        wrong = [
            it
            for it in misplaced
            if not (it[0].later and it[1] in ("gone", "inflight"))
        ]
        if len(wrong) > left_out or any(state != "gone" for _, state in wrong):
            raise Violation(f"the life saw {states}; in a wrong state: {wrong}")
        if not sees_k and any(
            it.key == "k" and it.states == {"live"} for it in self.slots
        ):
            raise Violation(
                f"contains() or peek() does not find the task of a key: {states}"
            )

    def _push(
        self, word: str, name: str, key: str | None, policy: str, later: bool, *_: Any
    ) -> None:
        if word == "try":
            of_key = [
                it for it in self.slots if key and it.key == key and "live" in it.states
            ]
            holder = of_key[-1] if of_key else None
            if holder is None:
                self.slots.append(slot := Slot({name}, key=key))
            elif holder.leased:
                slot = holder.behind = holder.behind or Slot(
                    {name}, key=key, updates={name}
                )
                if policy != "update":
                    slot.updates -= {name}
            else:
                slot = holder
            self._pushed = [slot]
        slot = self._pushed[0]
        slot.later |= later
        if slot.names != {name}:
            slot.names = {name} if word == "ok" else slot.names | {name}
            slot.updates &= slot.names
            return
        slot.states = {"try": {"gone", "live"}, "ok": {"live"}, "err": {"gone"}}[word]
        for other in self.slots:
            if word == "err" and other.behind is slot:
                other.behind = None

    def _push_many(self, word: str, names: list[str], *outcome: Any) -> None:
        if word == "try":
            self._pushed = [Slot({name}) for name in names]
            self.slots += self._pushed
            return
        count = len(names) if word == "ok" else outcome[-1]
        for index, slot in enumerate(self._pushed):
            slot.states = {"live"} if index < count else {"gone"}

    def _pop(self, word: str, key: str | None, name: Any = None, *_: Any) -> None:
        if word == "err" and name == errno.EACCES:
            self._barred = 1
        if word != "ok":
            return
        if name is None:
            waiting = [
                s
                for s in self.slots
                if s.states == {"live"} and not (s.leased or s.later)
            ]
            missed = [s for s in waiting if key in (None, s.key)]
            if len(missed) > self._barred:
                raise Violation(f"pop() found nothing, but these tasks wait: {missed}")
            return
        slot = next(
            (s for s in self.slots if name in s.names and "live" in s.states), None
        )
        if slot is None or slot.leased:
            raise Violation(f"{name} was delivered though it does not wait: {slot}")
        slot.names = {name}
        slot.states = {"live"}
        slot.leased = name

    def _litter(self, _: str) -> None:
        for names in ({"torn 0 pending", "torn 0 failed"}, {"spent"}):
            self.slots.append(Slot(names, {"failed", "live"}, later=True))

    def _end(self, word: str, how: str, name: str, later: bool, *_: Any) -> None:
        slot = next(s for s in self.slots if s.leased == name)
        if how == "extend" or word == "err":
            return
        end = {"done": self.done, "fail": {"failed"}, "release": {"live"}}[how]
        if word == "try":
            slot.states |= end
            slot.later |= later
            return
        slot.states = {*end}
        slot.leased = ""
        if slot.behind is not None and how != "release" and slot.behind.updates:
            slot.behind.names -= slot.behind.updates
            slot.behind.states |= {"gone"}
        if slot.behind is not None and slot.behind.names:
            slot.behind.later |= word == "lost"  # the next pop() promotes it
            self.slots.append(slot.behind)
            if how == "release":
                slot.states = {"gone"}  # the buffered payload replaced it
        slot.behind = None

    def _retry(self, word: str, name: str, *_: Any) -> None:
        for slot in self.slots:
            if name in slot.names and "failed" in slot.states:
                slot.states = {"failed", "live"} if word in ("try", "err") else {"live"}

    def _call(self, word: str, method: str, arguments: list[Any], *_: Any) -> None:
        after = {"retry_failed": "live", "purge": "gone"}.get(method)
        of = (
            {"failed"}
            if method == "retry_failed"
            else {*(["done"], *arguments[1:])[-1]}
        )
        # Both calls log a file that they may not move or remove, and pass it over.
        has_ended = word == "ok" and not any("passed over" in it for it in self._logged)
        for slot in self.slots:
            if after is not None and slot.states & of:
                sure = has_ended and slot.states <= {*of, after}
                slot.states = {after} if sure else slot.states | {after}

    def misplaced(self, found: dict[str, str]) -> list[tuple[Slot, str]]:
        wrong = []
        for slot in self.slots:
            there = [found[name] for name in slot.names if name in found] or ["gone"]
            state = "live" if there[0] in LIVE else there[0]
            if len(there) > 1 or state not in slot.states:
                wrong.append((slot, " and ".join(there)))
        return wrong

    def compare(self, found: dict[str, str]) -> None:
        if wrong := self.misplaced(found):
            raise Violation("; ".join(f"{slot} is {state}" for slot, state in wrong))
        if strangers := found.keys() - {
            name for slot in self.slots for name in slot.names
        }:
            raise Violation(f"these tasks exist but were not acknowledged: {strangers}")


def found_in(q: FemtoQueue) -> dict[str, str]:
    """Return the state of each payload that tasks() yields, by name. Raises Violation if a payload
    is there twice, or if peek() does not agree with tasks()."""
    found: dict[str, str] = {}
    for task in (task for state in femtoqueue.STATES for task in q.tasks(state)):
        name = name_of(task.data)
        if name in found:
            raise Violation(
                f"{name} is there twice: in {found[name]} and, as {task.id}, in {task.state}"
            )
        if (seen := q.peek(task.id)) != task:
            raise Violation(f"peek() returns {seen} for {task}")
        found[name] = task.state
    return found


def contents_of(q: FemtoQueue) -> dict[str, str]:
    """Return the state of each payload, and of each torn task, by name.

    tasks() leaves torn tasks out, and stats() counts them, so that their number is the difference.
    Their names here are "torn <number> <state>". Raises Violation if stats() counts fewer tasks
    than tasks() yields.
    """
    found = found_in(q)
    stats = q.stats()
    counts = Counter(found.values())
    for state in femtoqueue.STATES:
        for number in range(counts[state], getattr(stats, state)):
            found[f"torn {number - counts[state]} {state}"] = state
        if counts[state] > getattr(stats, state):
            raise Violation(f"{stats}, but tasks() yields {counts}")
    return found


def check_end(
    q: FemtoQueue, found: dict[str, str], ledger: Ledger, kept: Collection[str] = ()
) -> None:
    """Check a drained queue: each task is in the state that was acknowledged, none is waiting or in
    flight, and creating/ is empty. `kept` are the paths of files whose unlink() failed."""
    ledger.compare(found)
    stats = q.stats()
    if stats.pending or stats.scheduled or stats.inflight or stats.buffered:
        raise Violation(f"tasks are left after the queue was drained: {stats}")
    left = os.listdir(os.path.join(q.data_dir, "creating"))
    if {f"/creating/{name}" for name in left}.difference(kept):
        raise Violation(f"left in creating/: {left}")


# One injection


@dataclasses.dataclass(frozen=True)
class Scene:
    """A life, with sync_after_write or without."""

    script: str
    sync: bool

    def __str__(self) -> str:
        return f"{self.script}, sync={self.sync}"


@dataclasses.dataclass(frozen=True)
class Job:
    """An injection: a fault at the N-th system call of a kind. That call is on a path or descriptor
    in the data directory."""

    scene: Scene
    call: str
    number: int
    text: str  # the paths in the call, relative to the data directory
    step: int  # the number of the step of the life that makes the call
    # the name of an errno, or SIGKILL; "" for a point, which has no fault yet
    fault: str = ""

    @property
    def kind(self) -> str:
        return KILL if self.fault == KILL else self.call

    def __str__(self) -> str:
        return f"{self.scene}: {self.fault} at {self.call} {self.number} {self.text}"


SCRIPTS = {script.__name__: script for script in (plain, keyed, inherited)}
SCENES = [Scene(*it) for it in itertools.product(SCRIPTS, (False, True))]


class Stage:
    """A new directory for one life: the queue, the notes, the trace, the child's standard error."""

    def __init__(self, work: str, scene: Scene) -> None:
        self.scene = scene
        self.work = work
        self.path = os.path.join(work, "jobs")
        shutil.rmtree(work, ignore_errors=True)
        os.makedirs(work)

    def file(self, name: str) -> str:
        return os.path.join(self.work, name)

    def read(self, name: str) -> str:
        with open(self.file(name), encoding="utf-8", errors="replace") as file:
            return file.read()

    def make(self, node_id: str) -> FemtoQueue:
        is_heir = self.scene.script == "inherited"
        return FemtoQueue(
            self.path,
            node_id,
            sync_after_write=self.scene.sync,
            max_attempts=4 if is_heir else 9,
            keep_done=not is_heir,
        )

    def notes(self) -> list[Note]:
        return read_notes(self.file("notes"))

    def ledger(self, *other_done: str) -> Ledger:
        """Return a Ledger that has followed the notes of this life. `other_done` are further states
        that a task may be in after done()."""
        done = "gone" if self.scene.script == "inherited" else "done"
        return Ledger(self.notes(), done, *other_done)


def note_writer(path: str) -> Noting:
    fd = open_log(path)
    return lambda note: (os.write(fd, f"{json.dumps(note)}\n".encode()), None)[1]


def read_notes(path: str) -> list[Note]:
    """Return the notes of a file. A last line that is not complete is left out."""
    with open(path, encoding="ascii") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def play(
    script: Callable[[Life], None], make: Maker, note: Noting, seed: str
) -> NoReturn:
    try:
        with made_up(seed) as clock:
            life = Life(make, clock, note)
            script(life)
            life.finish()
    except BaseException:
        note(["crash", traceback.format_exc()])
    finally:
        os._exit(0)  # without closing the queue objects: close() is a step of the life


def spawn(stage: Stage, go: int) -> int:
    """Fork a child that plays the stage's life as soon as the pipe `go` is readable. Return its
    process id."""
    # otherwise the child might close the directories of an earlier life at any call
    gc.collect()
    child = os.fork()
    if child == 0:
        gc.disable()
        prctl = ctypes.CDLL(None).prctl
        # Yama: strace, a sibling, may trace it
        prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        select.select([go], [], [])
        note = note_writer(stage.file("notes"))
        os.dup2(os.open(stage.file("stderr"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
        femtoqueue._log().addFilter(
            lambda record: bool(note(["log", record.getMessage()]))
        )
        play(SCRIPTS[stage.scene.script], stage.make, note, "n1")
    return child


def play_traced(stage: Stage, *options: str) -> int:
    """Play the stage's life under strace, and return the exit status of the child.

    The child waits until strace is attached, so that the trace has all calls of the child. Raises
    Violation if strace can't attach, or if the child hangs.
    """
    go, start = os.pipe()
    child = spawn(stage, go)
    command = ["strace", "-f", "-y", "-s", "4096", "-o", stage.file("trace"), *options]
    with subprocess.Popen(
        [*command, "-p", str(child)], stderr=subprocess.PIPE, text=True
    ) as strace:
        assert strace.stderr is not None
        said = strace.stderr.readline()
        os.write(start, b"!")
        if "attached" not in said:
            os.kill(child, signal.SIGKILL)
        try:
            said += strace.communicate(timeout=TIMEOUT_S)[1]
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            said += "the child hangs"
        _, status = os.waitpid(child, 0)
    os.close(go)
    os.close(start)
    if "attached" not in said or "the child hangs" in said:
        raise Violation(f"strace: {said}")
    return status


def points_of(stage: Stage) -> list[Job]:
    """Return the system calls on the data directory in the trace of a whole life.

    Calls before the note "begin", which prepare a life, and after the note "end" are left out.
    """
    points: list[Job] = []
    numbers = Counter[str]()
    step = 0
    for line in stage.read("trace").splitlines():
        match = re.match(r"\d+ +(\w+)\((.*)", line)
        if match is None:
            continue
        numbers[match[1]] += 1
        if match[1] == "write" and "notes>" in line:
            step += r"[\"try\"" in line
            if r"[\"begin\"]" in line:
                points.clear()
            if r"[\"end\"]" in line:
                return points
        if f"<{stage.path}" in line or f'"{stage.path}' in line:
            place = paths_in_call(stage, line)
            points.append(Job(stage.scene, match[1], numbers[match[1]], place, step))
    raise Violation(f"no end in the trace: {stage.read('notes')[-2000:]}")


def paths_in_call(stage: Stage, line: str) -> str:
    """Return the paths in a line of the trace, relative to the data directory. A name is relative
    to the directory whose descriptor precedes it."""
    called = line.rpartition(" = ")[0]
    if re.match(r"\d+ +\w+at2?\(", called):
        called = re.sub(r'\d+<([^>]+)>, "([^/"][^"]*)"', r'"\1/\2"', called)
    return " ".join(re.findall(f'{re.escape(stage.path)}([^>"]*)[>"]', called)) or "."


def check_hit(stage: Stage, job: Job, status: int) -> list[str]:
    """Return the line of the trace in which the fault was injected.

    Raises Violation if another call was hit, or if the child wrote to standard error. The child
    must exit with status 0, or be killed if the fault is SIGKILL.
    """
    trace = stage.read("trace").splitlines()
    hit = (
        trace[-2:-1]
        if job.fault == KILL
        else [line for line in trace if "INJECTED" in line]
    )
    if [paths_in_call(stage, line) for line in hit] != [job.text]:
        raise Violation(f"the fault was injected into another call: {hit}")
    said = stage.read("stderr")
    if said or status != (signal.SIGKILL if job.fault == KILL else 0):
        raise Violation(f"exit status {status}, standard error: {said}")
    return hit


def inject(job: Job, work: str) -> str:
    """Play a life with one fault and check it. Return "killed", "surfaced" or "harmless"."""
    stage = Stage(work, job.scene)
    what = f"signal={KILL}" if job.fault == KILL else f"error={job.fault}"
    where = f"inject={job.call}:{what}:when={job.number}"
    status = play_traced(stage, "-e", f"trace={job.call}", "-e", where)
    hit = check_hit(stage, job, status)
    # done/ may have no room for the task, or this user may not write there. Or keys/ may have no
    # room for the key's state, which is written before the rename to done/. Then done() removes the
    # task.
    is_full = job.fault == "ENOSPC" and re.search("/(done|keys)/", job.text)
    is_refused = job.fault == "EACCES" and re.search(r"/done\b", job.text)
    ledger = stage.ledger("gone") if is_full or is_refused else stage.ledger()
    if job.fault == KILL:
        check_next_process(stage, ledger)
        showed = "killed"
    else:
        showed = how_it_surfaced(job, stage.notes())
    with made_up("later") as clock:
        clock.advance(2 * LATER_S)
        with FemtoQueue(stage.path, "looker") as q:
            failed = (line for line in hit if "unlink" in line and "INJECTED" in line)
            kept = {paths_in_call(stage, line) for line in failed}
            check_end(q, contents_of(q), ledger, kept)
    return showed


def how_it_surfaced(job: Job, notes: list[Note]) -> str:
    """Return "surfaced" if a step raised the injected error, "harmless" if no step raised an error.

    Raises Violation if there was another error, or if another step raised the error. There is one
    exception: if the maintenance failed in an earlier step, a later pop() may raise its error.
    """
    errors = [note for note in notes if note[0] == "err"]
    given = getattr(errno, job.fault)
    if len(errors) > 1 or any(
        e[-2] not in (given, SURFACES_AS.get(given)) for e in errors
    ):
        raise Violation(f"{job.fault} was injected, and the steps raised {errors}")
    if errors:
        before = notes[: notes.index(errors[0])]
        step = sum(note[0] == "try" for note in before)
        late = step > job.step and errors[0][1] != "pop"
        if step < job.step or late:
            raise Violation(
                f"the fault was in step {job.step}, and step {step} raised: {errors}"
            )
        return "surfaced"
    return "harmless"


def check_next_process(stage: Stage, ledger: Ledger) -> None:
    ledger.end_leases()
    with made_up("next") as clock:
        # files in creating/ are removed after an hour
        clock.advance(AN_HOUR_S + LATER_S)
        life = Life(stage.make, clock, ledger.follow)
        life.open()
        contents_of(life.queue)
        life.finish()


def run(job: Job) -> tuple[Job, str, str]:
    work = os.path.join(WORK, str(os.getpid()))
    try:
        return job, inject(job, work), ""
    except Exception as error:
        known = isinstance(error, (Violation, OSError, FemtoQueueError))
        return job, "violations", str(error) if known else traceback.format_exc()


# All injections


def jobs_of(scene: Scene) -> list[Job]:
    """Play a life without a fault, and return an injection for each of its system calls and each
    fault. Raises Violation if a step fails, Unable if ERRORS lacks a system call."""
    stage = Stage(os.path.join(WORK, "usual"), scene)
    play_traced(stage, "-e", "trace=%file,%desc")
    notes = stage.notes()
    stage.ledger()
    if any(note[0] in ("err", "lost") for note in notes) or stage.read("stderr"):
        raise Violation(
            f"a step failed without a fault: {stage.read('stderr')} {notes}"
        )
    points = points_of(stage)
    if unknown := {point.call for point in points} - ERRORS.keys():
        raise Unable(f"ERRORS has no entry for {unknown}")
    return [
        dataclasses.replace(point, fault=fault)
        for point in points
        for fault in (*ERRORS[point.call], KILL)
        if fault != "ENOSPC"
        or "open" not in point.call
        or point.text.startswith("/creating")
    ]


def warm_up() -> None:
    """Play each life once in this process, so that all modules that Python imports on first use are
    loaded. Otherwise the system calls of the children would differ."""
    for scene in SCENES:
        stage = Stage(os.path.join(WORK, "warm"), scene)
        with made_up("n1") as clock:
            SCRIPTS[scene.script](Life(stage.make, clock, lambda _: None))


WORK = ""


@contextlib.contextmanager
def work_dir() -> Iterator[None]:
    """Make the directory WORK for the stages."""
    global WORK
    with tempfile.TemporaryDirectory(
        prefix="femtoqueue-faults-", dir=memory_dir()
    ) as WORK:
        warm_up()
        yield


def results(jobs: list[Job]) -> Iterator[tuple[Job, str, str]]:
    with multiprocessing.get_context("fork").Pool() as pool:
        yield from pool.imap_unordered(run, jobs, chunksize=4)


def sample(jobs: list[Job], count: int, seed: int) -> list[Job]:
    """Choose injections at random: first one of each kind (call, directories and fault), then a
    second one of each kind, and so on."""
    chance = random.Random(seed)
    kinds = Counter[tuple[str, ...]]()
    ranked = []
    for job in chance.sample(jobs, len(jobs)):
        kind = (job.call, job.fault, *re.findall(r"(?:^| )/([a-z]*)", job.text))
        kinds[kind] += 1
        ranked.append((kinds[kind], job))
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])[:count]]


def check(scene: Scene, count: int, seed: int, calls: list[str]) -> None:
    """Make `count` injections into a life; if `calls` is not empty, only at these system calls.

    Prints how many injections had each result. Raises Violation if an injection broke a promise.
    """
    all_jobs = [job for job in jobs_of(scene) if not calls or job.kind in calls]
    jobs = sample(all_jobs, count, seed)
    counts = Counter[str]()
    violations = list[str]()
    for job, showed, wrong in results(jobs):
        counts[showed] += 1
        if wrong:
            violations.append(f"{job}: {wrong}")
    say(f"{scene}: {len(jobs)} of {len(all_jobs)} injections: {dict(counts)}")
    if violations:
        raise Violation("\n".join(violations))


def main() -> None:
    options = proof_parser(__doc__)
    injections = "injections into each life (default: 600)"
    options.add_argument("--sample", type=int, default=600, help=injections)
    calls = "inject only at these system calls; SIGKILL: only kill"
    options.add_argument("--calls", nargs="+", help=calls)
    args = options.parse_args()
    say(f"seed {args.seed}")
    femtoqueue._log().addHandler(logging.NullHandler())
    femtoqueue._log().propagate = False
    with exit_on_failure(args.seed), work_dir():
        install(("strace",), "strace")
        if args.self_check:
            must_catch(
                args.seed, lambda need: ["--sample", "100", "--calls", *need.split()]
            )
            return
        for scene in SCENES:
            check(scene, args.sample, args.seed, args.calls or [])


if __name__ == "__main__":
    main()
