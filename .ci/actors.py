"""The processes of storm.py, hosts.py and nfs.py, which use a queue and note what they do.

Each notes what it is about to do and what came of it, a line each, with the time: all hosts have
one clock, or are told how far theirs is behind. verdict.py reads and judges that.
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

from femtoqueue import FemtoQueue, FemtoQueueError, FemtoTask, KeyInFlight, LeaseLost, TicketQueue

SETTLE_S = 240.0  # while a host is not healed, what it had cannot be settled by it
STALE_S = 30.0  # of a ticket that another host's member does not touch
SIZES = (0, 50, 5000, 100_000)


class Noter:
    """Who notes."""

    name: str
    fd: int  # of what it notes, see open_log()
    offset_s: float = 0.0  # what to add to this host's monotonic clock to get the program's

    def now_s(self) -> float:
        """Return the time that all hosts have in common."""
        return time.monotonic() + self.offset_s

    def note(self, word: str, *values: object) -> None:
        """One write() for a line; who is killed has noted all that it was told."""
        line = " ".join(map(str, (self.now_s(), self.name, word, *values)))
        os.write(self.fd, f"{line}\n".encode())


@dataclass
class Actor(Noter):
    """A process that uses a queue: it does what its kind says, and again if that returns for how
    long to pause before."""

    kind: str
    name: str
    queue: str
    over: str = ""  # a file that is there when it is to end
    node_id: str | None = None
    lease_ms: float = LEASE_MS
    sync: bool = False
    max_attempts: int | None = None
    idle_s: float = 0.0
    seed: int | str = 0
    count: int = 0
    keys: int = 0
    pause_s: float = 0.01  # at most, between two pushes
    stale_s: float = STALE_S
    timeout_s: float = LONGEST_CALL_S  # for a turn
    offset_s: float = 0.0

    def start(self, fd: int) -> None:
        """Runs on the host. fd: of what it notes."""
        self.fd, self.number = fd, itertools.count(1)  # of its payloads
        self.chance = random.Random(self.seed)
        self.line: TicketQueue | None = None
        with contextlib.ExitStack() as stack:
            if self.kind != "watch":
                self.q = stack.enter_context(self.opened())
                self.note_claims()
            self.note("ready")
            while (pause_s := self.step()) is not None and not self.is_over():
                time.sleep(pause_s)
            self.note("closing")

    def step(self) -> float | None:
        pause_s: float | None = getattr(self, self.kind)()
        return pause_s

    def is_over(self) -> bool:
        return os.path.exists(self.over)

    def opened(self) -> FemtoQueue:
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
            except OSError as error:  # started while cut off
                self.trouble("open", "-", began_s, error)

    def note_claims(self) -> None:
        """Have pop() note what it claims, delivered or not."""
        self.claims: list[tuple[str, float]] = []  # of this call: the task, and since when
        lease_dir = self.q._worker.lease_dir
        claim = lease_dir.claim

        def noting(source: str, lease: Any) -> bool:
            self.claims.append((source[-29:], self.now_s()))
            is_claimed = claim(source, lease)
            if not is_claimed:
                self.claims.pop()
            return is_claimed

        lease_dir.claim = noting  # type: ignore[method-assign]

    def trouble(self, what: str, which: object, began_s: float, error: Exception) -> None:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:]]
        where = ">".join(name for name in names if name != "<lambda>")
        code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else getattr(error, "errno", None)
        self.note("error", what, which, began_s, code or 0, where)
        time.sleep(0.2)

    # Pushes

    def push(
        self,
        key: str | None = None,
        due_s: float | None = None,
        policy: str = "buffer",
        count: int | None = None,
    ) -> None:
        """Push a payload; or so many, by push_many()."""

        def call() -> list[str]:
            if count is not None:
                return self.q.push_many(datas)
            if due_s is None:
                return [self.q.push(datas[0], key=key, if_in_flight=policy)]
            return [self.q.schedule(datas[0], due_s * 1e6, key=key, if_in_flight=policy)]

        sizes = self.chance.choices(SIZES, (4, 4, 2, 0.2), k=1 if count is None else count)
        names = [f"{self.name}:{next(self.number)}" for _ in sizes]
        datas, began_s = [*map(payload, names, sizes)], self.now_s()
        for name in names:
            self.note("push", name, began_s, key or "-", *[due_s] * (due_s is not None))
        try:
            ids = call()
        except (OSError, KeyInFlight) as error:
            ids = getattr(error, "pushed_ids", [])
            for name in names[len(ids) :]:
                self.trouble("push", name, began_s, error)
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
        """Return one of the keys; half of the time the one that all hosts choose just now."""
        if self.chance.random() < 0.5:
            return f"key{int(self.now_s() / 0.5) % self.keys}"
        return f"key{self.chance.randrange(self.keys)}"

    # Deliveries

    def pop(self, key: str | None = None, timeout_s: float = 0) -> FemtoTask | None:
        began_s = self.now_s()
        try:
            task = self.q.pop(timeout_s) if key is None else self.q.take(key)
        except OSError as error:
            self.trouble("pop" if key is None else "take", "-", began_s, error)
            return None
        finally:
            while self.claims:
                self.note("claimed", *self.claims.pop())
        if key is not None:
            self.note("looked", "take", key, began_s, int(task is not None))
        if task is not None:
            name, deadline_s = name_of(task.data), self.deadline_s(task)
            self.note("got", task.id, began_s, deadline_s, task.attempts, name)
        return task

    def deadline_s(self, task: FemtoTask) -> float:
        """Return when the lease of a task ends."""
        name = task.path.rpartition("/")[2]
        return (int(name[:20]) - self.q._clock.anchor_ns) / 1e9 + self.offset_s

    def consume(self) -> float:
        if (task := self.pop()) is None:
            return 0.02
        self.work_on(task)
        self.settle(task, self.chance.choices(("done", "fail", "release"), (85, 5, 10))[0])
        return 0

    def work_on(self, task: FemtoTask) -> None:
        how = self.chance.choices(("short", "long", "renewed", "late"), (90, 5, 3, 2))[0]
        time.sleep({"short": 0.02, "late": LEASE_MS / 1e3 + 1}.get(how, 1) * self.chance.random())
        if how == "renewed":
            self.extend(task)

    def extend(self, task: FemtoTask) -> None:
        """Renew a lease; who lost it is told so when it settles the task."""
        began_s = self.now_s()
        try:
            self.q.extend(task)
        except LeaseLost:
            return
        except OSError as error:
            self.trouble("extend", task.id, began_s, error)
        else:
            self.note("extended", task.id, self.deadline_s(task))

    def settle(self, task: FemtoTask, how: str, **options: Any) -> bool:
        """Try until it is done, or the lease is lost: then return False."""
        give_up_s = self.now_s() + SETTLE_S
        while self.now_s() < give_up_s:
            began_s = self.now_s()
            try:
                self.end(task, how, **options)
            except LeaseLost:
                self.note("end", "lost", task.id, began_s)
                return False
            except OSError as error:
                self.trouble(how, task.id, began_s, error)
            else:
                self.note("end", how, task.id, began_s)
                return True
        raise SystemExit(f"{self.name}: could not settle {task.id} within {SETTLE_S:g} s")

    def end(self, task: FemtoTask, how: str, **options: Any) -> None:
        self.note("settle", task.id)
        getattr(self.q, how)(task, **options)

    def hold(self) -> None:
        """Take one task, and finish it too late: others must have had it meanwhile."""
        while (task := self.pop()) is None:
            time.sleep(0.02)
        time.sleep(LEASE_MS / 1e3 + 2)
        self.settle(task, "done")

    def drain(self) -> None:
        """Finish everything; what nobody has any more comes back at its deadline."""
        idle_since_s = self.now_s()
        while self.now_s() < idle_since_s + self.idle_s:
            if (task := self.pop()) is not None:
                self.settle(task, "done")
                idle_since_s = self.now_s()
            else:
                time.sleep(0.05)

    # Keys

    def take_keys(self) -> float:
        """Get tasks in turn and by key; a delivery takes far less time than its lease. Pauses let
        payloads be replaced while their task waits, and not only while it is in flight."""
        if self.chance.random() < 0.4:
            self.look_up(self.any_key())
        else:
            self.end_keyed(self.pop())
        return self.chance.choice((0.02, 0.2)) * self.chance.random()

    def end_keyed(self, task: FemtoTask | None) -> None:
        if task is not None:
            time.sleep(self.chance.choice((0.0, 0.05)) * self.chance.random())
            self.settle(task, self.chance.choices(("done", "fail", "release"), (70, 10, 20))[0])

    def look_up(self, key: str) -> None:
        """Ask for a key's task in one of three ways, and note whether there was one."""
        call = self.chance.choice(LOOK_UPS)
        began_s = self.now_s()
        if call == "take":
            self.end_keyed(self.pop(key))
            return
        try:
            if call == "contains":
                found = self.q.contains(key)
            elif found := (task := self.q.peek(key=key)) is not None:
                name_of(task.data)  # raises if it is torn
        except OSError as error:
            self.trouble(call, "-", began_s, error)
        else:
            self.note("looked", call, key, began_s, int(found))

    def watch(self) -> None:
        """Count the tasks of a key on this host's brick, where no cache is in between.

        A task that two listings in a row show was there when the first one ended, even if it was
        renamed meanwhile. So what both show is counted, and nothing is counted twice.
        """
        looks, before = 0, verdict.places_of_keys(unfinished(self.queue))
        told = set[str]()
        while not self.is_over():
            time.sleep(0.01)
            now = verdict.places_of_keys(unfinished(self.queue))
            wrong = {*verdict.crowded(a & b for a, b in zip(before, now, strict=True))} - told
            for text in wrong:
                self.note("crowded", text)
            told |= wrong
            looks, before = looks + 1, now
        self.note("watched", looks)

    # Turns

    def take_turns(self) -> float:
        """Have one turn after the other, in line with the other members."""
        began_s = self.now_s()
        try:
            self.take_turn()
        except (OSError, FemtoQueueError) as error:
            self.trouble("turn", "-", began_s, error)
        return self.chance.choice((0.0, 0.1)) * self.chance.random()

    def take_turn(self) -> None:
        """Wait for a turn, have it, and note both."""
        began_s = self.now_s()
        self.line = self.line or TicketQueue(f"{self.queue}-line", self.stale_s)
        with self.line.turn(self.timeout_s) as ticket:
            self.note("turn", ticket, began_s)
            time.sleep(self.chance.random() * 0.02)
            self.note("turned", ticket)


def unfinished(root: str) -> set[str]:
    """Return the paths of what a queue's directories hold, but for those of finished tasks."""
    paths = set()
    for directory in set(os.listdir(root)) - {"creating", "done", "failed"}:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a worker's own is gone
            paths |= {f"{directory}/{name}" for name in os.listdir(f"{root}/{directory}")}
    return paths
