"""System calls that fail, and death at system calls: each one in turn, by strace -e inject=.

    python .ci/faults.py [--sample N] [--calls CALL ...] [--seed S] [--self-check]

Needs strace (5.14 or later) and the right to ptrace, on Linux; no root.

A child lives a scripted life of tasks on a queue, through its public interface, and notes outside
what it tries, what is acknowledged and what raises. One life is traced whole: each call in it that
names the data directory, or a descriptor in it, is a point. Then the life is lived once more for
each point and each errno that such a call may give (ENOSPC, EIO, EMFILE, EACCES, EINTR, ...), and
for SIGKILL at its entry. Clock and random numbers are made up, so that the N-th call of a kind is
the same one in each life; the trace must show that it was. (strace -P would not do: it knows
whole paths only, and those of tasks are not known before.) By default a sample by lot, in which
each kind of call, place and fault is; all of them (--sample 9999) take ten minutes.

Proved for each: the error surfaces, untouched, from the step that it happened in (a chore's: from
that pop() or a later one), which succeeds when it is done again, or turns out to be done. Or it is
harmless: each step answers what may be without a fault, but a pop() may give another task first. No
other exception, no traceback, no hang. Then the same object (after SIGKILL: the next
process) pushes and drains. In the end each task that was acknowledged stands once, in the state
that was acknowledged, with its own bytes; a push that raised left nothing (one that was to replace
a payload: the old or the new one); what was done is not delivered again; creating/ is empty,
nothing is in flight, and stats(), tasks() and peek() agree.

Not proved: an injected call is not made, so that nothing is seen of one that fails half-way (a
short write, a rename that took place), and a close() that fails leaves the descriptor open, which
Linux does not. One process, no races. One fault a life.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import fcntl
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
# What the calls of the lives may give: open(2), rename(2), ... Empty: it can't well fail.
ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("open", "openat"), ("EIO", "EACCES", "EMFILE", "EINTR", "ENOSPC")),
    **dict.fromkeys(("write", "pwrite64", "fsync", "fdatasync", "syncfs"), WRITES),
    **dict.fromkeys(("rename", "renameat", "renameat2", "mkdir", "mkdirat"), CHANGES),
    **dict.fromkeys(("link", "linkat"), (*CHANGES, "EPERM")),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir", "chmod", "fchmod", "fchmodat"), STATUS),
    **dict.fromkeys(("fchown", "lchown", "fchownat"), STATUS),
    **dict.fromkeys(("stat", "lstat", "newfstatat", "statx", "access", "faccessat"), STATUS),
    **dict.fromkeys(("fstat", "statfs", "fstatfs", "getdents64"), ("EIO",)),
    **dict.fromkeys(("read", "pread64"), ("EIO", "EINTR")),
    "flock": ("ENOLCK", "EINTR"),
    "close": ("EIO", "ENOSPC", "EINTR"),
    **dict.fromkeys(("lseek", "fcntl", "ioctl"), ()),
}
SURFACES_AS = {errno.ENOLCK: errno.ENOTSUP}  # a file system without flock, the queue says then
KILL = "SIGKILL"
LIVE = ("pending", "scheduled", "inflight")
NO_ID = f"{7:020d}-00000007"
AN_HOUR_S, LATER_S = 3600.0, 1000.0
TIMEOUT_S = 30
PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61

Note = list[Any]  # [try, ok, err, lost or other word, step, its arguments..., its outcome]
Noting = Callable[[Note], None]
Maker = Callable[[str], FemtoQueue]  # of a node_id


class PassingClock(Clock):
    """A microsecond passes with each look. Ahead of the kernel's, so that for purge() each file
    is old."""

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


CLOCK = PassingClock()  # read at the start, the same in all processes that are forked


@contextlib.contextmanager
def made_up(seed: str) -> Iterator[PassingClock]:
    """Let femtoqueue see a clock and random numbers that are the same each time."""
    clock, chance = copy.copy(CLOCK), random.Random(seed)
    with (
        mock.patch.object(femtoqueue, "time", clock),
        mock.patch.object(os, "urandom", chance.randbytes),
    ):
        yield clock


def data_of(name: str) -> bytes:
    """Return the payload of a name, which may end with "/<its size>"."""
    return payload(name, int(name.partition("/")[2] or 40))


# A life, as the child lives it


class Life:
    """Calls a queue's methods, and notes each before and after."""

    def __init__(self, make: Maker, clock: PassingClock, note: Noting) -> None:
        self.make, self.clock, self.note = make, clock, note
        self.queues: list[FemtoQueue] = []  # kept: one that is dropped would close itself

    def step(
        self, call: Callable[[], Any], *what: Any, shown: Callable[[Any], Any] = lambda _: None
    ) -> Any:
        """Do one thing; again if it raised OSError, unless it is a push."""
        for _ in range(1 if "push" in what[0] else 9):
            self.note(["try", *what])
            try:
                result = call()
                self.note(["ok", *what, shown(result)])
                return result
            except OSError as error:
                self.note(["err", *what, error.errno, len(getattr(error, "pushed_ids", ()))])
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
        self, name: str, key: str | None = None, policy: str = "buffer", in_s: float | None = None
    ) -> None:
        def call() -> str:
            if in_s is None:
                return self.queue.push(data_of(name), key=key, if_in_flight=policy)
            due_us = (self.clock.time() + in_s) * 1e6
            return self.queue.schedule(data_of(name), due_us, key=key, if_in_flight=policy)

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
        """done, fail, release or extend what was popped, if anything was."""
        if task is not None:
            method = getattr(self.queue, how)
            later = "delay_s" in options
            self.step(lambda: method(task, **options), "end", how, name_of(task.data), later)

    def call(self, method: str, *arguments: Any) -> None:
        self.step(lambda: getattr(self.queue, method)(*arguments), "call", method, [*arguments])

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
        """All workers lose their locks, as if killed. They left a torn task, which no push() does,
        one that was delivered as often as it may be, and what they were writing."""
        for q in self.queues:
            if held := q._worker.lease_dir._held:
                fcntl.flock(held.fd, fcntl.LOCK_UN)
        for name, content in (
            (f"pending/{1:020d}-00000001", b"FQ1 00000000 99\nshort"),
            (f"pending/{1:020d}~4~{2:020d}-00000002", record(data_of("spent"))),
            (f"creating/{3:020d}-00000003", b"FQ1"),
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
        """Show that the same object works on; nothing is injected from here on."""
        self.note(["end"])
        self.clock.advance(LATER_S)
        for name in ("after", "afterwards"):
            self.push(name)
            self.drain()
            self.call("close")


def plain(life: Life) -> None:
    """Tasks without a key, from the first mkdir on."""
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
    """Tasks that have one."""
    life.open()
    life.push("k1", "k")
    life.push("k2", "k")  # replaces
    task = life.pop("k")
    life.push("k3", "k")  # behind it
    life.push("k4", "k")  # in the place of k3
    life.end(task, "release")  # k4 in its place
    task = life.pop("k")
    life.push("k5", "k", "update")
    life.push("k6", "k")
    life.end(task, "extend", ms=60_000)
    life.end(task, "done")  # k6 is let in
    failed = life.pop("k")
    life.end(failed, "fail", error="why")
    life.push("l1", "l", in_s=20)
    life.push("l2", "l", in_s=40)  # replaces, and moves
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
    """What dead workers left: leases, of our own node too, and what is behind them."""
    life.clock.advance(-AN_HOUR_S / 2)
    for node_id in ("n0", "n1"):
        former(life, node_id)
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


def former(life: Life, own: str) -> None:
    """Make what `inherited` finds, and keep leases in its hands."""
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
    life.push(f"{own}-k", "k")  # behind that of the one before
    life.pop("k")


# What must be true of it


@dataclasses.dataclass(eq=False)
class Slot:
    """A task: the payloads that it may have, one of them, and the states that it may be in."""

    names: set[str]
    states: set[str] = dataclasses.field(default_factory=lambda: {"gone", "live"})
    key: str | None = None
    leased: str = ""  # the payload with which it was delivered, while it is in hand
    later: bool = False  # it may have to wait: for its time, or for the next pop()'s chores
    behind: Slot | None = None  # the newer payload behind a leased task, seen when that ends


class Ledger:
    """Follows the notes of a life; raises Violation for what must not be answered."""

    def __init__(self, notes: Iterable[Note], done: str = "done") -> None:
        self.slots: list[Slot] = []
        self.done = done  # "gone" from when keep_done is False on
        self._pushed: list[Slot] = []
        self._erred: Note = []  # the step that raised last
        self._logged: list[str] = []  # in this step
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
        may_be_lost = self._erred == note[1:-1] and what in ("end", "retry") and rest[0] != "extend"
        if word == "lost" and not may_be_lost:
            raise Violation(f"{note}, though the task was in hand; the error before: {self._erred}")
        handler = getattr(self, f"_{what}", None) if word in ("try", "ok", "err", "lost") else None
        if handler is not None:
            handler(word, *rest[:-1])
        if word != "try":
            self._erred = note[1:-2] if word == "err" else []

    def end_leases(self, is_seen: bool = False) -> None:
        """They expired, or a process was killed: what was leased comes back, with the newer
        payload. is_seen: the life goes on, and may look before that."""
        for slot in [slot for slot in self.slots if slot.leased]:
            behind, slot.leased, slot.behind = slot.behind, "", None
            slot.later |= is_seen
            if behind is not None and behind.states == {"live"}:
                slot.states = (slot.states - {"live"}) | {"gone"}
                behind.later |= is_seen
                self.slots.append(behind)
            elif behind is not None:  # killed while that was pushed
                slot.names |= behind.names

    def _look(self, word: str, found: Any = None, *_: Any) -> None:
        if word != "ok":
            return
        states, sees_k = found
        # tasks() logs what may not be read, and leaves it out.
        left_out = sum("Permission denied" in text for text in self._logged)
        odd = self.misplaced(states)
        wrong = [it for it in odd if not (it[0].later and it[1] in ("gone", "inflight"))]
        if len(wrong) > left_out or any(state != "gone" for _, state in wrong):
            raise Violation(f"seen was {states}, but: {wrong}")
        if not sees_k and any(it.key == "k" and it.states == {"live"} for it in self.slots):
            raise Violation(f"the task of a key is not seen by it: {states}")

    def _push(
        self, word: str, name: str, key: str | None, policy: str, later: bool, *_: Any
    ) -> None:
        if word == "try":
            of_key = [it for it in self.slots if key and it.key == key and "live" in it.states]
            holder = of_key[-1] if of_key else None
            if holder is None:
                self.slots.append(slot := Slot({name}, key=key))
            elif holder.leased and policy == "buffer":
                slot = holder.behind = holder.behind or Slot({name}, key=key)
            else:
                slot = holder
            self._pushed = [slot]
        slot = self._pushed[0]
        slot.later |= later
        if slot.names != {name}:
            slot.names = {name} if word == "ok" else slot.names | {name}
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

    def _pop(self, word: str, key: str | None, name: str | None = None, *_: Any) -> None:
        if word != "ok":
            return
        if name is None:
            waiting = [s for s in self.slots if s.states == {"live"} and not (s.leased or s.later)]
            if missed := [s for s in waiting if key in (None, s.key)]:
                raise Violation(f"pop() found nothing, where there is {missed}")
            return
        slot = next((s for s in self.slots if name in s.names and "live" in s.states), None)
        if slot is None or slot.leased:
            raise Violation(f"{name} was delivered, which was not to be had: {slot}")
        slot.names, slot.states, slot.leased = {name}, {"live"}, name

    def _litter(self, _: str) -> None:
        for names in ({"torn 0 pending", "torn 0 failed"}, {"spent"}):
            self.slots.append(Slot(names, {"failed", "live"}, later=True))

    def _end(self, word: str, how: str, name: str, later: bool, *_: Any) -> None:
        slot = next(s for s in self.slots if s.leased == name)
        if how == "extend" or word == "err":
            return
        end = {"done": self.done, "fail": "failed", "release": "live"}[how]
        if word == "try":
            slot.states |= {end}
            slot.later |= later
            return
        slot.states, slot.leased = {end}, ""
        if slot.behind is not None:
            slot.behind.later |= word == "lost"  # the next pop() lets it in
            self.slots.append(slot.behind)
            if how == "release":
                slot.states = {"gone"}  # the newer payload is in its place
        slot.behind = None

    def _retry(self, word: str, name: str, *_: Any) -> None:
        for slot in self.slots:
            if name in slot.names and "failed" in slot.states:
                slot.states = {"failed", "live"} if word in ("try", "err") else {"live"}

    def _call(self, word: str, method: str, arguments: list[Any], *_: Any) -> None:
        after = {"retry_failed": "live", "purge": "gone"}.get(method)
        of = {"failed"} if method == "retry_failed" else {*(["done"], *arguments[1:])[-1]}
        for slot in self.slots:
            if after is not None and slot.states & of:
                sure = word == "ok" and slot.states <= {*of, after}
                slot.states = {after} if sure else slot.states | {after}

    def misplaced(self, found: dict[str, str]) -> list[tuple[Slot, str]]:
        """Return the tasks that are in no state that they may be in, and where they are."""
        wrong = []
        for slot in self.slots:
            there = [found[name] for name in slot.names if name in found] or ["gone"]
            state = "live" if there[0] in LIVE else there[0]
            if len(there) > 1 or state not in slot.states:
                wrong.append((slot, " and ".join(there)))
        return wrong

    def compare(self, found: dict[str, str]) -> None:
        """Each task is there, once, in a state that it may be in; and no other is there."""
        if wrong := self.misplaced(found):
            raise Violation("; ".join(f"{slot} is {state}" for slot, state in wrong))
        if strangers := found.keys() - {name for slot in self.slots for name in slot.names}:
            raise Violation(f"nobody acknowledged {strangers}")


def found_in(q: FemtoQueue) -> dict[str, str]:
    """Return the state in which each payload is; peek() must agree with it."""
    found: dict[str, str] = {}
    for task in (task for state in femtoqueue.STATES for task in q.tasks(state)):
        name = name_of(task.data)
        if name in found:
            raise Violation(
                f"{name} stands twice: in {found[name]} and, {task.id}, in {task.state}"
            )
        if (seen := q.peek(task.id)) != task:
            raise Violation(f"peek() sees {seen} for {task}")
        found[name] = task.state
    return found


def stands(q: FemtoQueue) -> dict[str, str]:
    """Return the state in which each payload is; stats() must agree with it. And what stats()
    counts, but tasks() does not give: what is torn."""
    found, stats = found_in(q), q.stats()
    counts = Counter(found.values())
    for state in femtoqueue.STATES:
        for number in range(counts[state], getattr(stats, state)):
            found[f"torn {number - counts[state]} {state}"] = state
        if counts[state] > getattr(stats, state):
            raise Violation(f"{stats}, tasks() gives {counts}")
    return found


def check_end(
    q: FemtoQueue, found: dict[str, str], ledger: Ledger, kept: Collection[str] = ()
) -> None:
    """After all was drained: each task is where it was acknowledged to be. kept: paths of
    files whose unlink() failed."""
    ledger.compare(found)
    stats = q.stats()
    if stats.pending or stats.scheduled or stats.inflight or stats.buffered:
        raise Violation(f"after all was drained: {stats}")
    left = os.listdir(os.path.join(q.data_dir, "creating"))
    if {f"/creating/{name}" for name in left}.difference(kept):
        raise Violation(f"left in creating/: {left}")


# One injection


@dataclasses.dataclass(frozen=True)
class Scene:
    script: str
    sync: bool

    def __str__(self) -> str:
        return f"{self.script}, sync={self.sync}"


@dataclasses.dataclass(frozen=True)
class Job:
    """A fault at the N-th call of a kind, which is on the data directory."""

    scene: Scene
    call: str
    number: int
    text: str
    step: int  # of the life
    fault: str = ""

    @property
    def kind(self) -> str:
        return KILL if self.fault == KILL else self.call

    def __str__(self) -> str:
        return f"{self.scene}: {self.fault} at {self.call} {self.number} {self.text}"


SCRIPTS = {script.__name__: script for script in (plain, keyed, inherited)}
SCENES = [Scene(*it) for it in itertools.product(SCRIPTS, (False, True))]


class Stage:
    """A directory, made anew for one life."""

    def __init__(self, work: str, scene: Scene) -> None:
        self.scene, self.work = scene, work
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
        return noted(self.file("notes"))

    def ledger(self) -> Ledger:
        """What was acknowledged in this life."""
        return Ledger(self.notes(), "gone" if self.scene.script == "inherited" else "done")


def writer(path: str) -> Noting:
    fd = open_log(path)
    return lambda note: (os.write(fd, f"{json.dumps(note)}\n".encode()), None)[1]


def noted(path: str) -> list[Note]:
    with open(path, encoding="ascii") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def play(script: Callable[[Life], None], make: Maker, note: Noting, seed: str) -> NoReturn:
    """In a child: live a life, to its end."""
    try:
        with made_up(seed) as clock:
            life = Life(make, clock, note)
            script(life)
            life.finish()
    except BaseException:
        note(["crash", traceback.format_exc()])
    finally:
        os._exit(0)  # as if killed: close() is a step of its own


def spawn(stage: Stage, go: int) -> int:
    """Fork a child that plays the stage's script as soon as `go` is readable."""
    child = os.fork()
    if child == 0:
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # Yama: a sibling may trace us
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        select.select([go], [], [])
        note = writer(stage.file("notes"))
        os.dup2(os.open(stage.file("stderr"), os.O_WRONLY | os.O_CREAT, 0o600), 2)
        femtoqueue._log().addFilter(lambda record: bool(note(["log", record.getMessage()])))
        play(SCRIPTS[stage.scene.script], stage.make, note, "n1")
    return child


def traced(stage: Stage, *options: str) -> int:
    """Play the stage's life under strace, from its first call to its last; return its status."""
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
            said += "it hangs"
        _, status = os.waitpid(child, 0)
    os.close(go)
    os.close(start)
    if "attached" not in said or "it hangs" in said:
        raise Violation(f"strace: {said}")
    return status


def points_of(stage: Stage) -> list[Job]:
    """Return the calls on the data directory, of a life that was traced whole."""
    points: list[Job] = []
    numbers, step = Counter[str](), 0
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
            place = places(stage, line)
            points.append(Job(stage.scene, match[1], numbers[match[1]], place, step))
    raise Violation(f"no end in the trace: {stage.read('notes')[-2000:]}")


def places(stage: Stage, line: str) -> str:
    """Return which paths a call is on: the same in each life."""
    called = line.rpartition(" = ")[0]
    return " ".join(re.findall(f'{re.escape(stage.path)}([^>"]*)[>"]', called)) or "."


def check_hit(stage: Stage, job: Job, status: int) -> list[str]:
    """Was it that call, and nothing said or died but by the fault? Return its line of the trace."""
    trace = stage.read("trace").splitlines()
    hit = trace[-2:-1] if job.fault == KILL else [line for line in trace if "INJECTED" in line]
    if [places(stage, line) for line in hit] != [job.text]:
        raise Violation(f"another call was hit: {hit}")
    said = stage.read("stderr")
    if said or status != (signal.SIGKILL if job.fault == KILL else 0):
        raise Violation(f"exit status {status}, and it said: {said}")
    return hit


def inject(job: Job, work: str) -> str:
    """Play one life with one fault, and check; return how the fault showed."""
    stage = Stage(work, job.scene)
    what = f"signal={KILL}" if job.fault == KILL else f"error={job.fault}"
    where = f"inject={job.call}:{what}:when={job.number}"
    status = traced(stage, "-e", f"trace={job.call}", "-e", where)
    hit = check_hit(stage, job, status)
    ledger = stage.ledger()
    if job.fault == KILL:
        succeed(stage, ledger)
        showed = "killed"
    else:
        showed = outcome(job, stage.notes())
    with made_up("later") as clock:
        clock.advance(2 * LATER_S)
        with FemtoQueue(stage.path, "looker") as q:
            kept = {places(stage, line) for line in hit if "unlink" in line and "INJECTED" in line}
            check_end(q, stands(q), ledger, kept)
    return showed


def outcome(job: Job, notes: list[Note]) -> str:
    errors = [note for note in notes if note[0] == "err"]
    given = getattr(errno, job.fault)
    if len(errors) > 1 or any(e[-2] not in (given, SURFACES_AS.get(given)) for e in errors):
        raise Violation(f"{job.fault} surfaced as {errors}")
    if errors:
        before = notes[: notes.index(errors[0])]
        step = sum(note[0] == "try" for note in before)
        late = step > job.step and errors[0][1] != "pop"
        if step < job.step or late:
            raise Violation(f"the fault in step {job.step} surfaced in {step}: {errors}")
        return "surfaced"
    return "harmless"


def succeed(stage: Stage, ledger: Ledger) -> None:
    """After a kill: the next process finds a legal state, and drains it."""
    ledger.end_leases()
    with made_up("next") as clock:
        clock.advance(AN_HOUR_S + LATER_S)  # leftovers are removed when they are an hour old
        life = Life(stage.make, clock, ledger.follow)
        life.open()
        stands(life.queue)
        life.finish()


def run(job: Job) -> tuple[Job, str, str]:
    """Return the job, how the fault showed, and what was wrong."""
    work = os.path.join(WORK, str(os.getpid()))
    try:
        return job, inject(job, work), ""
    except Exception as error:
        known = isinstance(error, (Violation, OSError, FemtoQueueError))
        return job, "violations", str(error) if known else traceback.format_exc()


# All of them


def jobs_of(scene: Scene) -> list[Job]:
    """Live once without a fault, and return an injection for each call and each fault."""
    stage = Stage(os.path.join(WORK, "usual"), scene)
    traced(stage, "-e", "trace=%file,%desc")
    notes = stage.notes()
    stage.ledger()
    if any(note[0] in ("err", "lost") for note in notes) or stage.read("stderr"):
        raise Violation(f"without a fault: {stage.read('stderr')} {notes}")
    points = points_of(stage)
    if unknown := {point.call for point in points} - ERRORS.keys():
        raise Unable(f"no errno is known for {unknown}; put it into ERRORS")
    return [
        dataclasses.replace(point, fault=fault)
        for point in points
        for fault in (*ERRORS[point.call], KILL)
        if fault != "ENOSPC" or "open" not in point.call or point.text.startswith("/creating")
    ]


def warm_up() -> None:
    """Live each life here, so that what Python imports when it is first needed is there: a child
    must not make other calls than the one before it."""
    for scene in SCENES:
        stage = Stage(os.path.join(WORK, "warm"), scene)
        with made_up("n1") as clock:
            SCRIPTS[scene.script](Life(stage.make, clock, lambda _: None))


WORK = ""


@contextlib.contextmanager
def workshop() -> Iterator[None]:
    global WORK
    # Nothing here is about what is on disk.
    with tempfile.TemporaryDirectory(prefix="femtoqueue-faults-", dir=memory_dir()) as WORK:
        warm_up()
        yield


def results(jobs: list[Job]) -> Iterator[tuple[Job, str, str]]:
    with multiprocessing.get_context("fork").Pool() as pool:
        yield from pool.imap_unordered(run, jobs, chunksize=4)


def sample(jobs: list[Job], count: int, seed: int) -> list[Job]:
    """Choose by lot: one of each kind first (call, directory and fault), then a second, ..."""
    chance, kinds = random.Random(seed), Counter[tuple[str, ...]]()
    ranked = []
    for job in chance.sample(jobs, len(jobs)):
        kind = (job.call, job.fault, *re.findall(r"(?:^| )/([a-z]*)", job.text))
        kinds[kind] += 1
        ranked.append((kinds[kind], job))
    return [job for _, job in sorted(ranked, key=lambda pair: pair[0])[:count]]


def check(scene: Scene, count: int, seed: int, calls: list[str]) -> None:
    """Inject so many faults into a life; calls: only at these. Raises Violation if it was not as it
    must be."""
    all_jobs = [job for job in jobs_of(scene) if not calls or job.kind in calls]
    jobs, counts, violations = sample(all_jobs, count, seed), Counter[str](), list[str]()
    for job, showed, wrong in results(jobs):
        counts[showed] += 1
        if wrong:
            violations.append(f"{job}: {wrong}")
    say(f"{scene}: {len(jobs)} of {len(all_jobs)} injections: {dict(counts)}")
    if violations:
        raise Violation("\n".join(violations))


def main() -> None:
    options = proof_parser(__doc__)
    injections = "so many injections a life (default: 600)"
    options.add_argument("--sample", type=int, default=600, help=injections)
    options.add_argument("--calls", nargs="+", help="only at these, or SIGKILL")
    args = options.parse_args()
    say(f"seed {args.seed}")
    femtoqueue._log().addHandler(logging.NullHandler())
    femtoqueue._log().propagate = False
    with exit_on_failure(args.seed), workshop():
        install(("strace",), "strace")
        if args.self_check:
            must_catch(args.seed, lambda need: ["--sample", "100", "--calls", *need.split()])
            return
        for scene in SCENES:
            check(scene, args.sample, args.seed, args.calls or [])


if __name__ == "__main__":
    main()
