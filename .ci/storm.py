"""Use one queue in many processes that are killed and stopped; fill the disk and set the clock.

    python .ci/storm.py [--seconds N] [--seed S] [--self-check]

Needs Linux, root to mount a small file system, and Debian's faketime, which is installed if it is
missing.

The processes are producers, schedulers, producers of keyed tasks, workers, and one process that
only reads. Workers call pop() in a loop, call work(), or run the command line. During the storm the
program disturbs the processes:

  - It sends SIGKILL, SIGINT and SIGSTOP. Half of the stops are longer than a lease.
  - It fills the file system for a second.
  - It sets the wall clock back and forth (by libfaketime).
  - It puts foreign files ("rubbish") into the queue's directories.

Each process writes a line to the log before and after each call: see actors.py and verdict.py.
After the storm, workers drain the queue undisturbed. Then this must hold:

    found      Each acknowledged task is in done/ or failed/, once, with its bytes. If a process was
               killed in push(), its task may be there, too. A task is not there if nobody pushed
               it, or if its push() raised an error.
    settled    Each task ends once. A task whose done() or fail() returned is in done/ or failed/
               and was not delivered again. No worker got LeaseLost before its deadline.
    held       During a lease no other worker had the same task, or another task of its key.
    first      First deliveries are in the order of push(), across all processes.
    due        No task was delivered before its due time, by the wall clock at that moment.
    keys       The values of a key were delivered in order, and the last acknowledged value last.
    left over  No task is in pending/, scheduled/, inflight-*/ or keys/. creating/ has at most one
               file for each killed process. The rubbish is unchanged.
    crashed    No exception was raised, except LeaseLost, KeyInFlight, and ENOSPC while the disk was
               full.

A listing may miss one of two tasks that are pushed during the listing. So the check "first" accepts
that a worker gets the younger task first, if one pop() of that worker ran during both pushes. The
check also ignores deliveries near a SIGINT, because interrupted workers put tasks back uncounted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import glob
import itertools
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import proof
import verdict
from actors import Actor, Noter, unfinished
from broken import must_catch
from proof import Unable, Violation, name_of, say
from verdict import Delivery, Push

import femtoqueue
from femtoqueue import FemtoQueue, FemtoTask

LEASE_S = 2.0
SIZE_MIB = 256
FULL_S = 1.0
# the longest time between an event in a process and the line that logs it
SLACK_S = 1.0
CLOCK_SLACK_S = 0.01
CALM_S = 60.0  # how long draining the queue may take
# clock settings
STEPS_S = (0, 0, 0.7, -0.7, 30, -30, 3600, -3600, 86400, -86400, -365 * 86400)
AFTER_ALL_S = 400 * 86400  # a clock setting at which every scheduled task is due
ENDS = (*["done"] * 25, "fail", "extend", "release", "forget", "process")
REASONS = ("storm", "max_attempts", "exit")
WORKERS = ("loop", "work", "command")
FAKETIME = "/usr/lib/*/faketime/libfaketime*.so.1"
SLOTS = (
    *(
        "produce",
        "produce",
        "schedule",
        "keyed",
        "keyed",
        "update",
        *["loop"] * 6,
        "onlook",
    ),
    *("work", "work", "command", "command"),
)
KEYED = [slot for slot, role in enumerate(SLOTS) if role == "keyed"]

# The CMD of the command line's `work`. It does what Role.handle() does, and starts in 30 ms.
HANDLER = r"""
import os, random, select, sys, time
from proof import Violation, name_of, open_log
def note(*words):
    os.write(log, f"{time.monotonic()} {sys.argv[2]} {' '.join(words)}\n".encode())
log, ident = open_log(sys.argv[1]), os.environ["FEMTOQUEUE_ID"]
try:
    name = name_of(sys.stdin.buffer.read())
except Violation:
    note("torn", ident)
    sys.exit(1)
note("got", ident, "-", "-", os.environ["FEMTOQUEUE_ATTEMPT"], name)
select.select([], [], [], random.choice((0, 0, 0.01, 0.1)))
note("settle", ident)
sys.exit(random.random() < 0.05)
"""


# The processes in the storm

# the library logs this if done/ has no room for a task
REMOVED = "is done, and removed"


def log_removals() -> None:
    logger = logging.getLogger("femtoqueue")
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: REMOVED in record.getMessage())
    logger.addHandler(handler)
    logger.disabled = logger.propagate = False


@dataclass
class Role(Actor):
    """An actor of the storm, which ends at SIGTERM. Its kind is its role in SLOTS."""

    slot: int = 0
    calm: bool = False

    def run(self, fd: int) -> None:
        self.stopping = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        super().run(fd)

    def is_over(self) -> bool:
        return self.stopping.is_set()

    def step(self) -> float | None:
        began_s = self.now_s()
        try:
            return super().step()
        except OSError as error:
            self.note_error("step", "-", began_s, error)
            return 0

    def note_error(
        self, what: str, which: object, began_s: float, error: Exception
    ) -> None:
        """Log the error of a full disk or a key in flight, and pause. Raise any other OSError."""
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise error
        # A synced push that raises ENOSPC removes its task again. But if a worker has claimed the
        # task meanwhile, the task stays. And a push with a key may have replaced the payload of a
        # task before ENOSPC. So these errors are logged as errors of the call "kept": verdict.py
        # counts a payload as refused only after an error of the call "push".
        is_keyed = self.kind in ("keyed", "update")
        call = "kept" if what == "push" and (self.sync or is_keyed) else what
        self.note("error", call, which, began_s, getattr(error, "errno", 0), what)
        time.sleep(0.02 if what == "push" else 0.05)

    def produce(self) -> float:
        self.push(
            count=self.chance.randrange(9) if self.chance.random() < 0.1 else None
        )
        return self.chance.choice((0, 0, 0, 0, 0.01, 0.03))

    def schedule(self) -> float:
        self.push(due_s=time.time() + self.chance.uniform(-0.5, 2))
        return self.chance.choice((0, 0.01, 0.04))

    def update(self) -> float:
        return self.keyed("update")

    def keyed(self, *policies: str) -> float:
        """Push a payload with a key of this slot. Only one process at a time has the slot, so that
        the values of a key have an order."""
        policy = self.chance.choice(policies or ("buffer", "buffer", "reject"))
        is_later = self.chance.random() < 0.1
        due_s = time.time() + self.chance.uniform(-0.5, 1) if is_later else None
        self.push(self.key_of(self.slot), due_s, policy)
        return self.chance.choice((0, 0, 0.01, 0.04))

    def key_of(self, slot: int) -> str:
        return f"ключ/{slot}:{self.chance.randrange(5)}"

    def loop(self) -> float:
        key = None
        timeout_s = 0.0
        before_s = self.now_s()
        if not self.calm and self.chance.random() < 0.1:
            key = self.key_of(self.chance.choice(KEYED))
        elif self.chance.random() < 0.1:
            timeout_s = self.chance.uniform(0, 0.3)
        task = self.pop(key, timeout_s)
        if task is None:
            self.note("idle", before_s)
            return self.chance.uniform(0.001, 0.03)
        self.work_on(task)
        self.finish(task, "done" if self.calm else self.chance.choice(ENDS))
        return 0

    def work(self) -> float:
        """Call work(), which returns after SIGTERM or SIGINT; then end."""
        self.q.work(
            self.handle, concurrency=self.chance.choice((1, 3)), stop=self.stopping
        )
        self.stopping.set()
        return 0

    def handle(self, task: FemtoTask) -> None:
        self.note("got", task.id, "-", "-", task.attempts, name_of(task.data))
        self.work_on(task)
        self.note("settle", task.id)
        if self.chance.random() < 0.05:
            raise RuntimeError("storm")

    def work_on(self, task: FemtoTask) -> None:
        if not self.calm:
            chance = self.chance.random()
            time.sleep(
                0 if chance < 0.85 else 0.05 if chance < 0.997 else LEASE_S + 0.5
            )

    def finish(self, task: FemtoTask, how: str) -> None:
        if how == "forget":
            return  # like a handler that hangs: the task comes back at its deadline
        options: dict[str, Any] = {}
        if how == "extend":
            self.extend(task)
            time.sleep(self.chance.choice((0, 0.1)))
        elif how == "fail":
            options = {"error": "storm"}
        elif how == "release":
            options = self.chance.choice(
                ({"delay_s": 0.5}, {"front": True}, {"front": False})
            )
        elif how == "process":
            options = {"in_processing": True}
        due_s = time.time() + options.get("delay_s", 0)
        is_ended = self.settle(
            task, how if how in ("fail", "release") else "done", **options
        )
        if is_ended and "delay_s" in options:
            self.note("delayed", task.id, due_s)

    def settle_once(self, task: FemtoTask, how: str, **options: Any) -> None:
        if not options.pop("in_processing", False):
            super().settle_once(task, how, **options)
            return
        with self.q.processing(task):
            time.sleep(self.chance.choice((0, 0.1)))
            self.note("settle", task.id)

    def onlook(self) -> float:
        state = self.chance.choice(femtoqueue.STATES[:3])
        self.q.stats()
        list(self.q.keys(state))
        self.q.contains(self.key_of(self.chance.randrange(len(SLOTS))))
        for task in self.q.tasks(state):
            name_of(task.data)
        return 0.2


def run_process(storm: Storm, name: str, slot: int) -> None:
    """Be the process of a slot until SIGTERM; or, for the command line, exec femtoqueue.py."""
    role = SLOTS[slot]
    chance = random.Random(f"{storm.seed} {name}")
    if role == "command":
        handler = [sys.executable, "-S", "-c", HANDLER, storm.log, name]
        command = [femtoqueue.__file__, "work", storm.queue_path, "-j", "2"]
        command += ["--timeout", f"{LEASE_S:g}s", "--", *handler]
        os.execv(sys.executable, [sys.executable, *command])
    Role(
        role,
        name,
        storm.queue_path,
        node_id=f"slot-{slot}" if chance.random() < 0.5 else None,
        lease_ms=LEASE_S * 1000,
        sync=chance.random() < 0.2,
        max_attempts=6 if chance.random() < 0.2 else None,
        seed=f"{storm.seed} {name}",
        slot=slot,
        calm=storm.calm,
    ).run(storm.fd)


# The storm


@dataclass
class Process:
    """A process of the storm that os.waitpid() has not returned yet."""

    pid: int
    name: str
    slot: int
    stopped_until_s: float = 0.0  # when to send SIGCONT; 0: the process is not stopped


class Storm(Noter):
    """Runs the processes, and disturbs them as the module's docstring says."""

    name = "storm"

    def __init__(self, path: str, work: str, seed: int) -> None:
        self.path = path
        self.work = work
        self.seed = seed
        self.queue_path = os.path.join(path, "jobs")
        self.logs = os.path.join(work, "logs")
        os.mkdir(self.logs)
        self.chance = random.Random(seed)
        self.log = os.path.join(self.logs, "log")
        self.fd = proof.open_log(self.log)
        self.calm = False
        self.count = 0
        self.processes: list[Process] = []
        self.rubbish: dict[str, tuple[int, ...]] = {}
        self.ballast = -1
        self.room_at_s = math.inf
        self.full_at_s = time.monotonic() + 3
        self.counts: Counter[str] = Counter()
        self.set_clock(0)
        wall_s = time.time() - time.monotonic()
        self.note("wall", wall_s)
        self.set_clock(3600)
        if not 3599 < time.time() - time.monotonic() - wall_s < 3601:
            raise Unable(
                "libfaketime does not set the wall clock, or sets another clock too"
            )
        self.set_clock(0)
        FemtoQueue(self.queue_path).close()

    def start(self, slot: int) -> None:
        self.count += 1
        name = f"{'calm' if self.calm else SLOTS[slot]}{self.count}"
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            self.be_child(name, slot)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self.processes.append(Process(pid, name, slot))

    def be_child(self, name: str, slot: int) -> None:
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(proof.open_log(os.path.join(self.logs, f"{name}.err")), 2)
            log_removals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            run_process(self, name, slot)
        except KeyboardInterrupt:
            pass
        except BaseException as error:
            # ENOSPC is no crash: the disk was full when the process started.
            if getattr(error, "errno", None) != errno.ENOSPC:
                self.note("crashed", ascii(traceback.format_exc()))
        finally:
            os._exit(0)

    def signal(self, process: Process, which: signal.Signals) -> None:
        self.note("signal", process.name, which.name)
        self.counts[which.name] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, which)

    def reap(self) -> None:
        """Forget the processes that have ended, and continue each process that was stopped for long
        enough."""
        for process in [*self.processes]:
            if 0 < process.stopped_until_s <= time.monotonic():
                self.continue_process(process)
            if os.waitpid(process.pid, os.WNOHANG)[0]:
                self.processes.remove(process)

    def continue_process(self, process: Process) -> None:
        process.stopped_until_s = 0.0
        os.kill(process.pid, signal.SIGCONT)
        self.note("signal", process.name, "SIGCONT")

    # Disturbances

    def victim(self) -> Process:
        """Return a random process. The start of a command line takes longer than the usual life of
        the other processes. So command lines are chosen less often."""
        process = self.chance.choice(self.processes)
        if SLOTS[process.slot] == "command" and self.chance.random() < 0.7:
            return self.chance.choice(self.processes)
        return process

    def kill(self) -> None:
        self.signal(self.victim(), signal.SIGKILL)

    def interrupt(self) -> None:
        """Send SIGINT to a process, but only in one second of five. In the other seconds the order
        of deliveries can be checked: see may_have_put_back()."""
        if time.monotonic() % 5 < 1:
            self.signal(self.victim(), signal.SIGINT)

    def stop(self) -> None:
        """Stop a process, in half of the cases for longer than the lease; at most three at once."""
        workers = [
            process for process in self.processes if SLOTS[process.slot] in WORKERS
        ]
        process = self.chance.choice(self.chance.choice((self.processes, workers)))
        if (
            process.stopped_until_s
            or sum(p.stopped_until_s > 0 for p in self.processes) >= 3
        ):
            return
        long = self.chance.random() < 0.5
        span_s = (
            self.chance.uniform(1.1, 1.6) * LEASE_S
            if long
            else self.chance.uniform(0.0, 0.5)
        )
        self.counts["stops longer than the lease"] += long
        self.signal(process, signal.SIGSTOP)
        process.stopped_until_s = time.monotonic() + span_s

    def step_clock(self) -> None:
        self.set_clock(self.chance.choice(STEPS_S))
        self.counts["clock steps"] += 1

    def set_clock(self, offset_s: float) -> None:
        """Set the wall clock of all processes to the real time plus an offset. libfaketime reads
        the offset from a file."""
        clock = os.environ["FAKETIME_TIMESTAMP_FILE"]
        with open(f"{clock}.new", "w", encoding="ascii") as file:
            file.write(f"{offset_s:+f}\n")
        self.note("stepping", offset_s)
        os.rename(f"{clock}.new", clock)
        self.note("stepped", offset_s)

    def fill(self) -> None:
        """Fill the disk with a file, the ballast. Called repeatedly, because processes free
        space."""
        if self.ballast < 0:
            self.counts["full disks"] += 1
            self.ballast = os.open(
                os.path.join(self.path, "ballast"), os.O_WRONLY | os.O_CREAT
            )
            self.room_at_s = time.monotonic() + FULL_S
        size = SIZE_MIB << 20
        while size >= 512:
            try:
                os.posix_fallocate(self.ballast, os.fstat(self.ballast).st_size, size)
            except OSError:
                size //= 2

    def make_room(self) -> None:
        if self.ballast >= 0:
            # not only unlinked: forked children have it open, too
            os.ftruncate(self.ballast, 0)
            os.close(self.ballast)
            os.unlink(os.path.join(self.path, "ballast"))
        self.ballast = -1
        self.room_at_s = math.inf
        self.full_at_s = time.monotonic() + self.chance.uniform(3, 7)

    def put_rubbish(self) -> None:
        """Put a foreign entry into the queue's directory, or into a directory below."""
        root = self.queue_path
        places = [f"{root}/{name}" for name in os.listdir(root)]
        places = [place for place in places if place not in self.rubbish]
        standing = [place for place in places if "inflight-" not in place]
        place = self.chance.choice((root, *self.chance.choice((standing, places))))
        name = self.chance.choice(RUBBISH_NAMES).replace("%", str(len(self.rubbish)))
        path = os.path.join(place, name)
        # An OSError: the disk is full, a worker removed its directory, or `place` is a file.
        with contextlib.suppress(OSError):
            proof.make_entry(
                path, self.chance.choice(RUBBISH), b"FQ1 00000000 3\nnot a task"
            )
        with contextlib.suppress(OSError):
            # with a fault of broken.py, the queue may remove it
            self.rubbish[path] = proof.fingerprint(path)

    def rage(self, seconds: float) -> None:
        """Disturb the processes for some seconds, and start a new one for each that has ended."""
        events = [*[self.kill] * 9, *[self.interrupt] * 8, *[self.stop] * 6]
        events += [*[self.step_clock] * 3, *[self.put_rubbish] * 4]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.reap()
            for slot in range(len(SLOTS)):
                if slot not in {process.slot for process in self.processes}:
                    self.start(slot)
            self.chance.choice(events)()
            now_s = time.monotonic()
            if now_s >= self.room_at_s:
                self.make_room()
            elif self.ballast >= 0 or now_s >= self.full_at_s:
                self.fill()
            time.sleep(self.chance.uniform(0.0, 0.1))

    def end(self) -> None:
        """End all processes. Half of them get SIGTERM, and may finish their tasks. The other half
        get SIGKILL."""
        self.make_room()
        for process in self.processes:
            self.continue_process(process)
            gently = self.chance.random() < 0.5
            self.signal(process, signal.SIGTERM if gently else signal.SIGKILL)
        self.wait_for_all(15)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all processes have ended, or the seconds are over. Then kill what is left of
        their process groups. A process that did not end in time is logged as crashed."""
        end_s = time.monotonic() + seconds
        groups = [process.pid for process in self.processes]
        while self.processes and time.monotonic() < end_s:
            self.reap()
            time.sleep(0.02)
        for process in self.processes:
            self.note("crashed", f"{process.name} does not end")
        for group in groups:  # a command line that was killed leaves its CMD processes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for process in self.processes:
            os.waitpid(process.pid, 0)
        self.processes = []

    def drain(self) -> None:
        """Set the clock so that all tasks are due, and let workers finish all of them
        undisturbed."""
        self.set_clock(AFTER_ALL_S)
        self.calm = True
        for slot in (SLOTS.index("loop"),) * 3:
            self.start(slot)
        end_s = time.monotonic() + CALM_S
        with FemtoQueue(self.queue_path) as q:
            # How many times in a row stats() showed no task. One stats() may miss a task that
            # moves.
            empty = 0
            while empty < 3 and time.monotonic() < end_s:
                time.sleep(0.1)
                stats = q.stats()
                left = stats.pending + stats.scheduled + stats.inflight + stats.buffered
                empty = 0 if left else empty + 1
            if empty < 3:
                self.note(
                    "crashed", f"the queue is not drained after {CALM_S:g} s: {stats}"
                )
        for process in self.processes:
            self.signal(process, signal.SIGTERM)
        self.wait_for_all(15)
        with FemtoQueue(self.queue_path) as q:
            # the first pop() does all the maintenance
            if q.pop() is not None:
                self.note(
                    "crashed", "pop() returned a task after the queue was drained"
                )


RUBBISH = ("file", "folder", "empty", "fifo", "link")
RUBBISH_NAMES = (
    ".DS_Store%",
    "notes%.txt",
    "inflight-%?",
    "0000000000000000000%-0000000g",
    "00000000000000000001-0000000%.tmp",
    "00000000000000000001~x~00000000000000000001-00000%",
    "error%.error",
    "%~",
)


# The checks


def order_of(name: str) -> tuple[int, ...]:
    """Return the place of a payload in the order of its key: the process's number, and the push's
    number in this process."""
    return tuple(map(int, re.findall(r"\d+", name)))


def role_of(actor: str) -> str:
    return actor.rstrip("0123456789")


class History(verdict.Events):
    """The events of the log, with the disturbances of the storm.

    For a delivery by work() or the command line, the log does not say when pop() began. read_got()
    estimates this time: 1 or 3 s before the line in the log, or earlier if the process was stopped.
    The lease is assumed to last for LEASE_S from then on.
    """

    skew_s = 0.0

    def __init__(self, directory: str) -> None:
        # what is wrong, by broken promise
        self.found: dict[str, list[str]] = defaultdict(list)
        # release() with a delay: id, when, due
        self.released: list[tuple[str, float, float]] = []
        self.interrupts: list[float] = []  # when a SIGINT, or a SIGTERM, was sent
        # by process: from, to
        self.stops: dict[str, list[list[float]]] = defaultdict(list)
        self.steps: list[list[float]] = []  # settings of the clock: from, to, offset
        # by process: from, to
        self.pops: dict[str, list[tuple[float, float]]] = defaultdict(list)
        # tasks that done() removed, because done/ had no room for them
        self.removed = set[str]()
        self.wall_s = 0.0  # the real wall clock minus the monotonic clock
        super().__init__(os.path.join(directory, "log"))
        for path in glob.glob(os.path.join(directory, "*.err")):
            self.read_stderr(path)

    def read_stderr(self, path: str) -> None:
        """Read the standard error of a process for exceptions. work() and the command line print
        tracebacks there."""
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        self.removed.update(re.findall(rf"task (\S+) {REMOVED}", text))
        for found in re.findall(r"^\w*(?:Error|Exception)\b.*$", text, re.MULTILINE):
            if "No space left" not in found and not found.startswith(
                "Exception ignored"
            ):
                self.found["crashed"].append(f"{found} ({path})")

    def read_crashed(self, at: float, actor: str, *text: str) -> None:
        self.found["crashed"].append(f"{actor}: {' '.join(map(str, text))}")

    def read_torn(self, at: float, actor: str, ident: str) -> None:
        """Read that a CMD got a torn payload. This is allowed if the worker of the CMD was killed
        or interrupted: it may have ended while it wrote the payload to the CMD."""
        if actor not in self.gone:
            self.found["torn"].append(f"{ident}, of {actor}")

    def read_idle(self, at: float, actor: str, began_s: float) -> None:
        self.pops[actor].append((began_s, at))

    def read_got(
        self, at: float, actor: str, ident: str, began_s: Any, *rest: Any
    ) -> None:
        if began_s == "-":
            slack_s = (3 if role_of(actor) == "command" else 1) * SLACK_S
            began_s = self.awake_since(actor, at - slack_s, at)
            rest = (began_s + LEASE_S, *rest[1:])
        else:
            self.pops[actor].append((began_s, at))
        super().read_got(at, actor, ident, began_s, *rest)

    def read_delayed(self, at: float, actor: str, ident: str, due_s: float) -> None:
        if not femtoqueue._is_keyed(ident):
            self.released.append((ident, at, due_s))

    def read_error(
        self, at: float, actor: str, call: str, which: str, *rest: Any
    ) -> None:
        super().read_error(at, actor, call, which, *rest)
        if which in self.deliveries:
            self.last(actor, which).is_troubled = True

    def may_lose(self, it: Delivery) -> bool:
        """Return whether a call on the task raised ENOSPC: then the lease may be lost early."""
        return it.is_troubled

    def is_replaced(self, it: Delivery, by: Push) -> bool:
        return order_of(it.name) < order_of(by.name)

    def must_be_seen(self, push: Push) -> bool:
        """Return False for a push with the policy "update". Such a push may replace the payload of
        a task in flight. If done() then ends the task, the new payload is not delivered."""
        return f"/{SLOTS.index('update')}:" not in push.key

    def is_excused_pair(self, first: Delivery, second: Delivery) -> bool:
        """Return whether the second delivery was logged only after its own lease had ended, or
        after its worker had died. For the command line, the CMD logs the delivery, and the CMD may
        start after its worker was killed."""
        return second.got_s >= self.held_until_s(second)

    def read_wall(self, at: float, _: str, wall_s: float) -> None:
        self.wall_s = wall_s

    def read_stepping(self, at: float, _: str, offset_s: float) -> None:
        self.steps.append([at, math.inf, offset_s])

    def read_stepped(self, at: float, _: str, offset_s: float) -> None:
        # Until the step is complete, a process may see the old offset or the new one.
        if len(self.steps) > 1:
            self.steps[-2][1] = at

    def read_signal(self, at: float, _: str, whom: str, which: str) -> None:
        if which == "SIGSTOP":
            self.stops[whom].append([at, math.inf])
        elif which == "SIGCONT":
            for stop in self.stops[whom]:
                stop[1] = min(stop[1], at)
        elif which == "SIGKILL":
            self.read_killed(at, _, whom)
        else:
            self.gone.setdefault(whom, at)
            self.interrupts.append(at)

    def awake_since(self, who: str, from_s: float, to_s: float) -> float:
        """Return `from_s` if the process was not stopped between the two times. If it was stopped,
        return the earlier of two times: `from_s`, and SLACK_S before the begin of the stop."""
        spans = [
            stop for stop in self.stops[who] if stop[0] < to_s and stop[1] > from_s
        ]
        return min([from_s, *(stop[0] - SLACK_S for stop in spans)])

    def latest_wall_s(self, from_s: float, to_s: float) -> float:
        ends = (
            min(to_s, until_s) + offset_s
            for since_s, until_s, offset_s in self.steps
            if since_s <= to_s and until_s >= from_s
        )
        return self.wall_s + max(ends)


def check_settled(history: History, states: dict[str, str]) -> Iterator[str]:
    for ident, deliveries in history.deliveries.items():
        ends = [it for it in deliveries if it.how in ("done", "fail")]
        state = states.get(ident, "nowhere")
        if len(ends) > 1:
            yield f"{ident} was finished {len(ends)} times: {ends}"
        elif (
            ends and ident not in history.removed and not state.startswith(ends[0].how)
        ):
            yield f"{ident} was ended by {ends[0].how}(), but its state is: {state}"
    yield from verdict.not_fenced(history)
    yield from verdict.lost_early(history)


def check_first(history: History) -> Iterator[str]:
    """Yield the first deliveries that are not in the order of push(): the promise "first".

    The first delivery of a task is the one with attempts 1. Deliveries that were not logged, or
    were put back uncounted, do not matter.
    """
    firsts: dict[str, tuple[Push, Delivery]] = {}
    for delivery in history.all_deliveries():
        push = history.tried.get(delivery.name)
        if (
            delivery.attempts == 1
            and push
            and push.ident
            and push.key == "-"
            and not push.due_s
        ):
            firsts.setdefault(delivery.id, (push, delivery))
    by_ack = sorted(firsts.values(), key=lambda first: first[0].ended_s)
    older: list[tuple[Push, Delivery]] = []
    latest_s = 0.0
    for push, delivery in sorted(firsts.values(), key=lambda first: first[0].began_s):
        while len(older) < len(by_ack) and by_ack[len(older)][0].ended_s < push.began_s:
            older.append(by_ack[len(older)])
            latest_s = max(latest_s, older[-1][1].began_s)
        if latest_s <= delivery.got_s or may_have_put_back(history, delivery):
            continue
        for before, late in older:
            if late.began_s > delivery.got_s and not may_have_missed(
                history, before, push, delivery.actor
            ):
                yield f"{delivery} came before {late}, pushed {before} and {push}"


def may_have_put_back(history: History, early: Delivery) -> bool:
    """Return whether a SIGINT explains that a task was delivered before an older task. The
    interrupted worker may have had the older task and put it back, and other workers find the older
    task only at their next listing."""
    from_s = history.awake_since(early.actor, early.began_s - 2 * SLACK_S, early.got_s)
    return any(from_s < at_s < early.got_s + SLACK_S / 5 for at_s in history.interrupts)


def may_have_missed(history: History, older: Push, younger: Push, who: str) -> bool:
    """Return whether one pop() of the process `who` ran during both pushes. Then the listing of
    this pop() may have missed the older task."""
    looks = history.pops.get(who)
    if looks is None:
        return older.ended_s > history.awake_since(
            who, younger.began_s - SLACK_S, younger.began_s
        )
    return any(
        from_s < older.ended_s and to_s > younger.began_s for from_s, to_s in looks
    )


def check_due(history: History) -> Iterator[str]:
    """Yield the deliveries before their due time: the promise "due". Only tasks without a key are
    checked, because the due time of a keyed task may change."""
    pushes = [
        it for it in history.tried.values() if it.key == "-" and it.due_s is not None
    ]
    timed = [(it.ident, it.began_s, it.due_s or 0) for it in pushes if it.ident]
    for ident, from_s, due_s in (*timed, *history.released):
        # The process that moved the task to pending/ may have read the clock 0.2 s before `from_s`,
        # or earlier if it was then stopped. So what the clock showed since then counts, too.
        awake_s = [
            history.awake_since(who, from_s - 0.2, from_s) for who in history.stops
        ]
        since_s = min([from_s - 0.2, *awake_s])
        for it in history.deliveries[ident]:
            early_s = due_s - history.latest_wall_s(since_s, it.got_s)
            if it.began_s >= from_s and early_s > CLOCK_SLACK_S:
                yield f"{it.name} was delivered {early_s:.3f} s early: {it}"


def check_keys(history: History, found: Iterable[str]) -> Iterator[str]:
    ended: dict[str, tuple[int, ...]] = defaultdict(tuple)
    removed = (it.name for ident in history.removed for it in history.deliveries[ident])
    for name in history.tried.keys() & {*found, *removed}:
        key = history.tried[name].key
        ended[key] = max(ended[key], order_of(name))
    for _, pushes in verdict.by_key(history):
        key = pushes[0].key
        seen = filter(history.must_be_seen, pushes)
        last = max((order_of(push.name) for push in seen), default=())
        if last > ended[key]:
            yield f"the last value of {key} is {last}, but the last finished one is {ended[key]}"
    yield from itertools.chain(*verdict.key_faults(history).values())


def check_found(
    history: History, queue_path: str, found: dict[str, str], states: dict[str, str]
) -> Iterator[str]:
    """Yield what is wrong with the finished tasks: the promise "found".

    Fills `found` with the id of each finished task, by its payload's name, and `states` with its
    state, by id.
    """
    q = FemtoQueue(queue_path)
    for state in ("done", "failed"):
        for task in q.tasks(state):
            try:
                name = name_of(task.data)
            except Violation as error:
                yield f"{task.id} in {state}/: {error}"
                continue
            if name in found or task.id in states:
                yield f"{name} is there twice, as {task.id} and {found.get(name)}"
            found[name] = task.id
            states[task.id] = state
            # A dead letter without a reason is allowed: the worker may have been killed before it
            # wrote the reason, or the disk was full.
            if task.error and not any(reason in task.error for reason in REASONS):
                yield f"{task.id} failed: {task.error}"
    for name in found:
        if name not in history.tried or name in history.refused:
            why = (
                "its push() raised an error"
                if name in history.tried
                else "it was never pushed"
            )
            yield f"{name} is finished, but {why}"
    for push in history.tried.values():
        is_kept = push.key == "-" and push.ident and push.ident not in history.removed
        if is_kept and found.get(push.name) != push.ident:
            yield f"{push} is finished as {found.get(push.name)}"


def check_left(storm: Storm) -> Iterator[str]:
    """Yield the files that are left in the queue, and the rubbish that was changed: the promise
    "left over"."""
    root = storm.queue_path
    rubbish = {os.path.relpath(path, root) for path in storm.rubbish}
    for path, before in storm.rubbish.items():
        if not os.path.lexists(path) or proof.fingerprint(path) != before:
            yield f"rubbish was changed or removed: {path}"
    for path in unfinished(root) - rubbish:
        if path.partition("/")[0] not in rubbish and not re.fullmatch(
            "locks/[0-9a-f]{2}", path
        ):
            yield path
    for name in {*os.listdir(root)} - rubbish:
        is_idle = name.startswith("inflight-") and not os.listdir(f"{root}/{name}")
        if is_idle or not (
            os.path.isdir(f"{root}/{name}") or name.startswith("clock-")
        ):
            yield name
    creating = {f"creating/{name}" for name in os.listdir(f"{root}/creating")} - rubbish
    deaths = storm.counts["SIGKILL"] + storm.counts["SIGINT"]
    if len(creating) > deaths:
        yield f"{len(creating)} files in creating/, but {deaths} processes were killed: {creating}"
    storm.counts["left in creating/"] = len(creating)


def check(storm: Storm) -> History:
    """Check the log and the queue. Return the history; its attribute `found` has what is wrong."""
    history = History(storm.logs)
    found: dict[str, str] = {}
    states: dict[str, str] = {}
    rules = {  # the first generator fills `found` and `states`
        "found": check_found(history, storm.queue_path, found, states),
        "settled": check_settled(history, states),
        "held": verdict.leased_twice(history),
        "first": check_first(history),
        "due": check_due(history),
        "keys": check_keys(history, found),
        "left over": check_left(storm),
    }
    history.found.update((rule, [*texts]) for rule, texts in rules.items())
    return history


def one_storm(args: argparse.Namespace) -> History:
    work = os.path.dirname(os.environ["FAKETIME_TIMESTAMP_FILE"])
    with proof.small_disk("ext4", SIZE_MIB) as path:
        storm = Storm(path, work, args.seed)
        try:
            storm.rage(args.seconds)
            storm.end()
            storm.drain()
        finally:
            storm.wait_for_all(0)
        history = check(storm)
    verdict.report(history)
    say(f"{len(storm.rubbish)} pieces of rubbish, {dict(storm.counts)}")
    by_role = Counter(role_of(it.actor) for it in history.all_deliveries())
    say("deliveries: " + ", ".join(f"{n} by {role}" for role, n in by_role.items()))
    history.found["idle"] += (role for role in WORKERS if not by_role[role])
    if any(history.found.values()):
        kept = tempfile.mkdtemp(prefix="storm-", dir=os.path.dirname(work))
        shutil.copytree(storm.logs, kept, dirs_exist_ok=True)
        say(f"the logs are in {kept}")
    return history


# A clock that can be set


def run_with_faketime() -> int:
    """Run this program again under libfaketime, with a wall clock whose offset is in a file. Return
    its exit status."""
    proof.install((FAKETIME,), "faketime")
    with tempfile.TemporaryDirectory(prefix="femtoqueue-storm-") as work:
        with open(os.path.join(work, "clock"), "w", encoding="ascii") as file:
            file.write("+0\n")
        with open(
            os.path.join(work, "sitecustomize.py"), "w", encoding="ascii"
        ) as file:
            # clock_nanosleep() fails if only the wall clock is set, so sleep by select().
            file.write("import select, time\n")
            file.write(
                "time.sleep = lambda s: select.select([], [], [], max(s, 0)) and None\n"
            )
        process = subprocess.Popen(
            [sys.executable, *sys.argv],
            env={
                **os.environ,
                "LD_PRELOAD": min(glob.glob(FAKETIME)),
                "FAKETIME_TIMESTAMP_FILE": os.path.join(work, "clock"),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
                # With this fix, a thread that waits for the GIL would wait for 0.1 s at a time.
                "FAKETIME_FORCE_MONOTONIC_FIX": "0",
                "NO_FAKE_STAT": "1",
                "PYTHONPATH": f"{work}:{proof.PROJECT}/.ci",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        try:
            return process.wait()
        finally:
            for name in ("faketime_shm", "sem.faketime_sem"):
                # left by a killed process
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"/dev/shm/{name}_{process.pid}")


def main() -> None:
    options = proof.proof_parser(__doc__)
    seconds = "length of the storm (default: 60)"
    options.add_argument("--seconds", type=float, default=60, help=seconds)
    args = options.parse_args()
    with proof.exit_on_failure(args.seed):
        proof.need_root()
        if args.self_check:
            must_catch(args.seed, lambda _: ["--seconds", "8"], tries=5)
            return
        if "FAKETIME_TIMESTAMP_FILE" not in os.environ:
            sys.exit(run_with_faketime())
        logging.getLogger("femtoqueue").disabled = True
        if os.path.isdir("/dev/shm"):
            tempfile.tempdir = "/dev/shm"  # the image would be too slow on a busy disk
        say(f"seed {args.seed}")
        history = one_storm(args)
        verdict.raise_any(history, history.found)
        say("0 violations")


if __name__ == "__main__":
    main()
