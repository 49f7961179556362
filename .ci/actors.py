"""Actors: the processes of storm.py, hosts.py and nfs.py, which use a queue and log their calls.

An actor writes a line before each call, and a line with the result after the call. A line has the
time, the actor's name, a word and values. All times are on the clock of the proof. A host has the
same monotonic clock as the proof, or knows the offset between the two clocks. verdict.py reads the
log and checks that the queue kept its promises.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import time
import traceback
from dataclasses import dataclass
from typing import Any

import verdict
from proof import name_of, payload
from verdict import LEASE_MS, LONGEST_CALL_S, LOOK_UPS

from femtoqueue import (
    FemtoQueue,
    FemtoQueueError,
    FemtoTask,
    KeyInFlight,
    LeaseLost,
    TicketQueue,
)

# How long to retry done(), fail() or release(): on a host that was cut off, these calls may fail
# until the cluster is healed.
SETTLE_S = 240.0
# stale_s of a TicketQueue: after this, another host's untouched ticket is stale
STALE_S = 30.0
SIZES = (0, 50, 5000, 100_000)  # of payloads, in bytes


class Noter:
    """Writes lines to the log."""

    name: str
    fd: int  # of the log, see open_log()
    # this host's monotonic clock plus offset_s is the proof's clock
    offset_s: float = 0.0

    def now_s(self) -> float:
        return time.monotonic() + self.offset_s

    def note(self, word: str, *values: object) -> None:
        """Append a line to the log by one write(). After a SIGKILL the log has each line whose
        note() returned."""
        line = " ".join(map(str, (self.now_s(), self.name, word, *values)))
        os.write(self.fd, f"{line}\n".encode())


@dataclass
class Actor(Noter):
    """A process that uses a queue.

    `kind` is the name of a method. The method returns the pause before the next call in seconds, or
    None if the actor is to end.
    """

    kind: str
    name: str
    queue: str
    over: str = ""  # the actor ends when a file with this path exists
    node_id: str | None = None
    lease_ms: float = LEASE_MS
    sync: bool = False
    max_attempts: int | None = None
    idle_s: float = 0.0
    seed: int | str = 0
    count: int = 0  # of pushes, for fill()
    keys: int = 0  # how many keys there are
    pause_s: float = 0.01  # the longest pause between two pushes
    stale_s: float = STALE_S
    timeout_s: float = LONGEST_CALL_S  # of the wait for a turn
    offset_s: float = 0.0

    def run(self, fd: int) -> None:
        """Act until the end, in a process on the actor's host. `fd` is the log's descriptor."""
        self.fd, self.number = fd, itertools.count(1)  # numbers of the actor's payloads
        self.chance = random.Random(self.seed)
        self.line: TicketQueue | None = None
        with contextlib.ExitStack() as stack:
            if self.kind != "watch":
                self.q = stack.enter_context(self.open_queue())
                self.log_claims()
            self.note("ready")
            while (pause_s := self.step()) is not None and not self.is_over():
                time.sleep(pause_s)
            self.note("closing")

    def step(self) -> float | None:
        pause_s: float | None = getattr(self, self.kind)()
        return pause_s

    def is_over(self) -> bool:
        return os.path.exists(self.over)

    def open_queue(self) -> FemtoQueue:
        while True:
            began_s = self.now_s()
            try:
                return FemtoQueue(
                    self.queue,
                    self.node_id,
                    self.lease_ms,
                    self.sync,
                    max_attempts=self.max_attempts,
                )
            except OSError as error:  # the host is cut off from the others
                self.note_error("open", "-", began_s, error)

    def log_claims(self) -> None:
        """Make the queue record each claim in self.claims, even if the task is not delivered.

        Replaces the method claim() of the queue's lease directory by a wrapper that records the
        task.
        """
        # of the current pop(): id, time before the claim
        self.claims: list[tuple[str, float]] = []
        lease_dir = self.q._worker.lease_dir
        claim = lease_dir.claim

        def noting(directory: str, name: str, lease: Any) -> bool:
            self.claims.append((name[-37:], self.now_s()))
            is_claimed = claim(directory, name, lease)
            if not is_claimed:
                self.claims.pop()
            return is_claimed

        lease_dir.claim = noting  # type: ignore[method-assign]

    def note_error(
        self, what: str, which: object, began_s: float, error: Exception
    ) -> None:
        """Log an error of the call `what` on the task or payload `which`, and pause.

        The line has the errno and the names of the functions that the error passed through.
        """
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:]]
        where = ">".join(name for name in names if name != "<lambda>")
        code = (
            errno.ETIMEDOUT
            if isinstance(error, TimeoutError)
            else getattr(error, "errno", None)
        )
        self.note("error", what, which, began_s, code or 0, where)
        time.sleep(0.2)

    # Pushes

    def push(
        self,
        key: str | None = None,
        due_s: float | None = None,
        policy: Any = "buffer",
        count: int | None = None,
    ) -> None:
        """Push one payload; or, if `count` is given, that many payloads by push_many().

        `due_s`, if given, is the wall time at which the payload is due. OSError and KeyInFlight are
        logged.
        """

        def call() -> list[str]:
            if count is not None:
                return self.q.push_many(datas)
            if due_s is None:
                return [self.q.push(datas[0], key=key, if_in_flight=policy)]
            return [
                self.q.schedule(datas[0], due_s * 1e6, key=key, if_in_flight=policy)
            ]

        sizes = self.chance.choices(
            SIZES, (4, 4, 2, 0.2), k=1 if count is None else count
        )
        names = [f"{self.name}:{next(self.number)}" for _ in sizes]
        datas = [*map(payload, names, sizes)]
        began_s = self.now_s()
        for name in names:
            self.note("push", name, began_s, key or "-", *[due_s] * (due_s is not None))
        try:
            ids = call()
        except (OSError, KeyInFlight) as error:
            ids = getattr(error, "pushed_ids", [])
            for name in names[len(ids) :]:
                self.note_error("push", name, began_s, error)
        for name, ident in zip(names, ids, strict=False):
            self.note("pushed", name, ident, began_s)

    def produce(self) -> float:
        self.push()
        return self.chance.random() * 0.15

    def fill(self) -> None:
        for _ in range(self.count):
            self.push()

    def push_keys(self) -> float:
        key = self.any_key()
        self.push(key)
        if self.chance.random() < 0.3:
            self.look_up(key)
        return self.chance.random() * self.pause_s

    def any_key(self) -> str:
        """Return one of the keys.

        With probability 1/2 the key depends only on the time, so that all hosts choose the same key
        at the same time. Otherwise the key is random.
        """
        if self.chance.random() < 0.5:
            return f"key{int(self.now_s() / 0.5) % self.keys}"
        return f"key{self.chance.randrange(self.keys)}"

    # Deliveries

    def pop(self, key: str | None = None, timeout_s: float = 0) -> FemtoTask | None:
        """Call pop(), or take() if a key is given. Return the task, or None after an OSError.

        The log gets each claim of the call, the result of take(), and the delivery.
        """
        began_s = self.now_s()
        try:
            task = self.q.pop(timeout_s) if key is None else self.q.take(key)
        except OSError as error:
            self.note_error("pop" if key is None else "take", "-", began_s, error)
            return None
        finally:
            while self.claims:
                self.note("claimed", *self.claims.pop())
        if key is not None:
            self.note("looked", "take", key, began_s, int(task is not None))
        if task is not None:
            name = name_of(task.data)
            deadline_s = self.deadline_s(task)
            self.note("got", task.id, began_s, deadline_s, task.attempts, name)
        return task

    def deadline_s(self, task: FemtoTask) -> float:
        """Return the deadline of a task's lease on the proof's clock.

        The name of the lease begins with the deadline on the queue clock.
        """
        name = task.path.rpartition("/")[2]
        return (int(name[:20]) - self.q._clock.anchor_ns) / 1e9 + self.offset_s

    def consume(self) -> float:
        if (task := self.pop()) is None:
            return 0.02
        self.work_on(task)
        self.settle(
            task, self.chance.choices(("done", "fail", "release"), (85, 5, 10))[0]
        )
        return 0

    def work_on(self, task: FemtoTask) -> None:
        """Sleep. Sometimes renew the lease afterwards, and sometimes sleep beyond the deadline."""
        how = self.chance.choices(("short", "long", "renewed", "late"), (90, 5, 3, 2))[
            0
        ]
        time.sleep(
            {"short": 0.02, "late": LEASE_MS / 1e3 + 1}.get(how, 1)
            * self.chance.random()
        )
        if how == "renewed":
            self.extend(task)

    def extend(self, task: FemtoTask) -> None:
        """Renew a lease. LeaseLost is ignored here: settle() gets it again, and logs it."""
        began_s = self.now_s()
        try:
            self.q.extend(task)
        except LeaseLost:
            return
        except OSError as error:
            self.note_error("extend", task.id, began_s, error)
        else:
            self.note("extended", task.id, self.deadline_s(task))

    def settle(self, task: FemtoTask, how: str, **options: Any) -> bool:
        """Call done(), fail() or release(), and retry after an OSError.

        Returns True if the task is settled, False if the lease is lost. Ends the process after
        SETTLE_S.
        """
        give_up_s = self.now_s() + SETTLE_S
        while self.now_s() < give_up_s:
            began_s = self.now_s()
            try:
                self.settle_once(task, how, **options)
            except LeaseLost:
                self.note("end", "lost", task.id, began_s)
                return False
            except OSError as error:
                self.note_error(how, task.id, began_s, error)
            else:
                self.note("end", how, task.id, began_s)
                return True
        raise SystemExit(f"{self.name}: {how}() of {task.id} failed for {SETTLE_S:g} s")

    def settle_once(self, task: FemtoTask, how: str, **options: Any) -> None:
        self.note("settle", task.id)
        getattr(self.q, how)(task, **options)

    def hold(self) -> None:
        """Take one task, sleep beyond its deadline, then call done().

        The actor's host is cut off in between, so that another host gets the task. See
        verdict.not_refused().
        """
        while (task := self.pop()) is None:
            time.sleep(0.02)
        time.sleep(LEASE_MS / 1e3 + 2)
        self.settle(task, "done")

    def drain(self) -> None:
        """Finish tasks until no task came for `idle_s`.

        `idle_s` is longer than a lease: a task whose worker was killed comes back at its deadline.
        """
        idle_since_s = self.now_s()
        while self.now_s() < idle_since_s + self.idle_s:
            if (task := self.pop()) is not None:
                self.settle(task, "done")
                idle_since_s = self.now_s()
            else:
                time.sleep(0.05)

    # Keys

    def take_keys(self) -> float:
        """Look up a key, or pop the next task and settle it; then pause.

        A delivery takes much less time than its lease. During the pauses tasks wait, so that pushes
        replace payloads of waiting tasks too, not only of tasks in flight.
        """
        if self.chance.random() < 0.4:
            self.look_up(self.any_key())
        else:
            self.settle_keyed(self.pop())
        return self.chance.choice((0.02, 0.2)) * self.chance.random()

    def settle_keyed(self, task: FemtoTask | None) -> None:
        if task is not None:
            time.sleep(self.chance.choice((0.0, 0.05)) * self.chance.random())
            self.settle(
                task, self.chance.choices(("done", "fail", "release"), (70, 10, 20))[0]
            )

    def look_up(self, key: str) -> None:
        call = self.chance.choice(LOOK_UPS)
        began_s = self.now_s()
        if call == "take":
            self.settle_keyed(self.pop(key))
            return
        try:
            if call == "contains":
                found = self.q.contains(key)
            elif found := (task := self.q.peek(key=key)) is not None:
                name_of(task.data)  # raises Violation if the payload is torn
        except OSError as error:
            self.note_error(call, "-", began_s, error)
        else:
            self.note("looked", call, key, began_s, int(found))

    def watch(self) -> None:
        """List the queue again and again, and log each key that has more than one task.

        `queue` is a brick: the directory on this host's own disk, where GlusterFS or the NFS server
        stores the files. No client's cache is in between.

        RACE: actors rename tasks during a listing. So one listing may show a task that was settled
        meanwhile beside the next task of the same key. But a task in two listings in a row did
        exist when the first listing ended. So only ids in both listings are counted.
        """
        looks = 0
        before = verdict.places_of_keys(unfinished(self.queue))
        told = set[str]()
        while not self.is_over():
            time.sleep(0.01)
            now = verdict.places_of_keys(unfinished(self.queue))
            live, behind = (a & b for a, b in zip(before, now, strict=True))
            wrong = {*verdict.crowded(live, behind)} - told
            for text in wrong:
                self.note("crowded", text)
            told |= wrong
            looks += 1
            before = now
        self.note("watched", looks)

    # Turns

    def take_turns(self) -> float:
        began_s = self.now_s()
        try:
            self.take_turn()
        except (OSError, FemtoQueueError) as error:
            self.note_error("turn", "-", began_s, error)
        return self.chance.choice((0.0, 0.1)) * self.chance.random()

    def take_turn(self) -> None:
        began_s = self.now_s()
        self.line = self.line or TicketQueue(f"{self.queue}-line", self.stale_s)
        with self.line.turn(self.timeout_s) as ticket:
            self.note("turn", ticket, began_s)
            time.sleep(self.chance.random() * 0.02)
            self.note("turned", ticket)


def unfinished(root: str) -> set[str]:
    """Return the paths of all directory entries of a queue, relative to its root.

    Entries of creating/, done/ and failed/ are left out.
    """
    paths = set()
    for directory in set(os.listdir(root)) - {"creating", "done", "failed"}:
        # RACE: a worker removed its lease directory.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths |= {
                f"{directory}/{name}" for name in os.listdir(f"{root}/{directory}")
            }
    return paths
