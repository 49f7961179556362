"""Measure the speed of femtoqueue, and of its floor: the same work as bare os calls.

    python benchmark_mini.py [--dir DIR] [--runs N] [--large] [--other FILE] [--json FILE | --chart]

A ratio is the floor's time divided by the queue's time. 1.00 means that the queue is as fast as the
system calls alone. Both times are measured in the same run, one after the other, on the same file
system. SQLite, and another file with the interface of femtoqueue 0.4, have ratios too.

The floor is the fastest form of these system calls that we know. It uses directory descriptors, and
names and a header made beforehand. It makes no checks and no checksum. It lists pending/ once for
each batch of names. SQLite is a table in WAL mode with one transaction for each step, and is synced
only in the rows that say so.

Each figure is the median over the runs, with the smallest and the largest value in brackets. Each
run also checks that every pushed task was taken. The goals are printed at the end. On a busy
machine, only the ratios mean much.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time, sleep
from typing import Any

import femtoqueue
from femtoqueue import FemtoQueue, FemtoTask, __version__

PAYLOAD = b"x" * 100
RECORD = b"FQ1 00000000 100\n" + PAYLOAD
LEASE = "01999999999999999999~1~0000bbbb~"
WORKERS = 4
DIRS = ("creating", "pending", "done")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL

# The row, the figure in it, whether the figure must be at least or at most the limit, the limit.
GOALS = (
    ("push", "ratio", ">=", 0.87),
    ("push", "queue_to_other", ">=", 1.45),
    ("pop + done, 1,000 waiting", "ratio", ">=", 0.74),
    ("pop + done, 10,000 waiting", "ratio", ">=", 0.74),
    ("pop + done, 10,000 waiting", "queue_to_other", ">=", 1.28),
    ("push + pop + done, queue empty", "ratio", ">=", 0.74),
    ("push + pop + done, queue empty", "queue_to_other", ">=", 1.45),
    ("push + pop + done, 1,000 waiting", "ratio", ">=", 0.77),
    ("push + pop + done, 1,000 waiting", "queue_to_other", ">=", 1.35),
    ("4 workers, pop + done", "ratio", ">=", 0.76),
    ("wake-up, inotify", "p50", "<=", 0.4),
    ("wake-up, inotify", "p99", "<=", 1.0),
    ("idle, inotify", "cpu", "<=", 0.15),
    ("import femtoqueue", "cached", "<=", 12.0),
)


# The rows of the chart, and what to add to a bar's label: how many processes run. In each of these
# rows tasks are pushed, popped and done.
CHART = {
    "push + pop + done, queue empty": "",
    "2 producers, 2 consumers": f" x{WORKERS}",
}


class Results:
    """The figures of all runs. Prints the medians."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, unit: str, **figures: float) -> None:
        """Add the figures of a run to the row `name`."""
        row = self.rows.setdefault(name, {"unit": unit, "figures": {}})
        for label, value in figures.items():
            row["figures"].setdefault(label, []).append(value)

    def add_times(self, name: str, times: dict[str, float]) -> None:
        """Add the microseconds per task of each contender, and their ratios to the floor."""
        queue, floor = times["queue"], times["floor"]
        figures = {"queue": queue, "floor": floor, "ratio": floor / queue}
        for other in times.keys() - {"queue", "floor"}:
            figures |= {other: times[other], f"ratio_of_{other}": floor / times[other]}
            figures |= {f"queue_to_{other}": times[other] / queue}
        self.add(name, "µs", **figures)

    def median(self, name: str, label: str) -> float | None:
        """Return the median of a figure of a row, or None if it was not measured."""
        values = self.rows.get(name, {"figures": {}})["figures"].get(label)
        return statistics.median(values) if values else None

    def show(self) -> None:
        """Print a line for each row."""
        for name, row in self.rows.items():
            parts = []
            for label, values in row["figures"].items():
                if label.startswith("queue_to"):
                    continue
                unit = "" if label.startswith("ratio") else f" {row['unit']}"
                parts.append(
                    f"{label} {_number(statistics.median(values))}{unit} {_spread(values)}"
                )
            print(f"{name:38} {'   '.join(parts)}")

    def show_chart(self, names: dict[str, str]) -> None:
        """Print tasks per second as a mermaid chart. `names` has the contenders' labels."""
        bars: dict[str, int] = {}
        for row, processes in CHART.items():
            for label, name in names.items():
                microseconds = self.median(row, label)
                if microseconds is not None:  # None: this contender failed
                    bars[name + processes] = round(1e6 / microseconds)
        print("xychart-beta horizontal")
        print(f"    x-axis [{', '.join(json.dumps(bar) for bar in bars)}]")
        # The axis begins at 0. Otherwise it would begin at the shortest bar, which would vanish.
        top = (max(bars.values(), default=0) // 10_000 + 1) * 10_000
        print(f'    y-axis "tasks per second" 0 --> {top}')
        print(f"    bar [{', '.join(map(str, bars.values()))}]")

    def show_goals(self) -> None:
        """Print each goal, and whether it is met."""
        print()
        for name, label, relation, wanted in GOALS:
            value = self.median(name, label)
            if value is None:
                verdict = "not measured"
            else:
                is_met = value >= wanted if relation == ">=" else value <= wanted
                verdict = f"{_number(value)}, {'met' if is_met else 'NOT MET'}"
            print(f"goal: {name}: {label} {relation} {wanted}: {verdict}")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _spread(values: list[float]) -> str:
    return f"[{_number(min(values))}-{_number(max(values))}]" if len(values) > 1 else ""


class Failed(Exception):
    """The tasks that came out are not those that went in."""


def check(what: str, got: object, wanted: object) -> None:
    """Raise Failed unless the two are equal."""
    if got != wanted:
        raise Failed(f"{what}: {got!r}, not {wanted!r}")


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = perf_counter()
    work()
    return perf_counter() - started


def repeated(work: Callable[[], object], count: int) -> float:
    """Make a call `count` times, and return the microseconds for each."""
    started = perf_counter()
    for _ in range(count):
        work()
    return (perf_counter() - started) / count * 1e6


@contextmanager
def fresh_dir(base: str) -> Iterator[str]:
    """Make a directory for a scenario, and remove it afterwards. Then sync the disk, so that the
    dirty pages do not slow down the next scenario."""
    path = tempfile.mkdtemp(prefix="femtoqueue-benchmark-", dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.sync()


# The contenders, which do the same work


class Floor:
    """The bare os calls of a queue, with directory descriptors, and nothing else.

    pending/ is listed when no names are left in the batch. A rename that does not find its file is
    ignored: another worker took the task.
    """

    def __init__(
        self, path: str, tag: str = "0000aaaa0000aaaa", inflight: str = "inflight"
    ) -> None:
        for name in (*DIRS, inflight):
            os.makedirs(os.path.join(path, name), exist_ok=True)
        self.fds = [
            os.open(os.path.join(path, name), os.O_RDONLY) for name in (*DIRS, inflight)
        ]
        self.creating, self.pending, self.done, self.inflight = self.fds
        self.names = iter(task_names(20_000, tag))  # the names of the next pushes
        self.batch: list[str] = []  # names in pending/, the oldest last

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def push(self, sync: bool = False) -> None:
        name = next(self.names)
        fd = os.open(name, CREATE, 0o666, dir_fd=self.creating)
        os.write(fd, RECORD)
        if not sync:
            os.close(fd)
        os.rename(name, name, src_dir_fd=self.creating, dst_dir_fd=self.pending)
        if sync:
            os.fsync(fd)
            os.close(fd)
            os.fsync(self.pending)

    def take(self) -> bool:
        """Claim, read and finish the oldest task. Return False if no task is left."""
        while self.batch or self.list():
            name = self.batch.pop()
            lease = LEASE + name
            try:
                os.rename(
                    name, lease, src_dir_fd=self.pending, dst_dir_fd=self.inflight
                )
            except FileNotFoundError:
                continue
            fd = os.open(lease, os.O_RDONLY, dir_fd=self.inflight)
            os.read(fd, 4096)
            os.close(fd)
            os.rename(lease, name, src_dir_fd=self.inflight, dst_dir_fd=self.done)
            return True
        return False

    def list(self) -> bool:
        """Read a new batch of names. Return whether there are any."""
        self.batch = sorted(os.listdir(self.pending), reverse=True)
        return bool(self.batch)


class Queue:
    """femtoqueue, or another module with the interface of femtoqueue 0.4."""

    def __init__(
        self, path: str, node_id: str = "bench", module: Any = femtoqueue
    ) -> None:
        self.queue = module.FemtoQueue(path, node_id)
        self.close = getattr(self.queue, "close", lambda: None)

    def push(self) -> None:
        self.queue.push(PAYLOAD)

    def take(self) -> bool:
        task = self.queue.pop()
        if task is None:
            return False
        self.queue.done(task)
        return True


class Sqlite:
    """A table of SQLite as a queue."""

    def __init__(self, path: str, synchronous: str = "NORMAL") -> None:
        file = os.path.join(path, "queue.db")
        self.database = sqlite3.connect(file, isolation_level=None, timeout=60)
        self.execute, self.close = self.database.execute, self.database.close
        self.execute("PRAGMA journal_mode=WAL")
        self.execute(f"PRAGMA synchronous={synchronous}")
        self.execute(
            "CREATE TABLE IF NOT EXISTS task (id INTEGER PRIMARY KEY, state, data BLOB)"
        )
        self.execute("CREATE INDEX IF NOT EXISTS waiting ON task (id) WHERE state = 0")

    def push(self) -> None:
        self.execute("INSERT INTO task (state, data) VALUES (0, ?)", (PAYLOAD,))

    def push_many(self, count: int) -> None:
        rows = ((PAYLOAD,) for _ in range(count))
        self.execute("BEGIN")
        self.database.executemany("INSERT INTO task (state, data) VALUES (0, ?)", rows)
        self.execute("COMMIT")

    def take(self) -> bool:
        oldest = "SELECT id FROM task WHERE state = 0 ORDER BY id LIMIT 1"
        claim = f"UPDATE task SET state = 1 WHERE id = ({oldest}) RETURNING id, data"
        rows = self.execute(claim).fetchall()
        if rows:
            self.execute("UPDATE task SET state = 2 WHERE id = ?", (rows[0][0],))
        return bool(rows)


# makes a contender from a directory and a process's number
Maker = Callable[[str, int], Any]

CONTENDERS: dict[str, Maker] = {
    "floor": lambda path, number: Floor(path, f"0000000{number}", f"inflight-{number}"),
    "queue": lambda path, number: Queue(path, f"bench-{number}"),
    "sqlite3": lambda path, number: Sqlite(path),
}


def task_names(count: int, tag: str = "0000aaaa0000aaaa") -> list[str]:
    return [f"{1_700_000_000_000_000_000 + order:020d}-{tag}" for order in range(count)]


def drain(contender: Any, limit: int | None = None) -> int:
    """Take tasks until none is left, or up to `limit` tasks. Return how many."""
    count = 0
    while count != limit and contender.take():
        count += 1
    return count


# The scenarios; those with a Maker return the microseconds per task, by row


def one_process(make: Maker, path: str) -> dict[str, float]:
    """Push and take tasks in one process, with many tasks waiting."""
    it = make(path, 0)
    times = {"push": repeated(it.push, 10_000)}
    times["pop + done, 10,000 waiting"] = repeated(it.take, 3000)
    drain(it, 6000)
    times["pop + done, 1,000 waiting"] = repeated(it.take, 500)
    for _ in range(500):
        it.push()
    times["push + pop + done, 1,000 waiting"] = repeated(
        lambda: (it.push(), it.take()), 2000
    )
    check("tasks left", drain(it), 1000)
    it.close()
    return times


def almost_empty(make: Maker, path: str) -> dict[str, float]:
    """Push and take tasks one by one, in one process; and take from an empty queue."""
    it = make(path, 0)
    it.take()
    times = {
        "push + pop + done, queue empty": repeated(lambda: (it.push(), it.take()), 2000)
    }
    times["pop of an empty queue"] = repeated(it.take, 2000)
    it.close()
    return times


def workers(make: Maker, path: str) -> dict[str, float]:
    """Drain one queue by WORKERS processes."""
    count = 12_000
    it = make(path, 9)
    for _ in range(count):
        it.push()
    it.close()

    def work(number: int, start: Any) -> int:
        it = make(path, number)
        start.wait()
        return drain(it)

    seconds, done = run_together(work)
    check("tasks that the workers did", done, count)
    return {f"{WORKERS} workers, pop + done": seconds / count * 1e6}


def both_sides(make: Maker, path: str) -> dict[str, float]:
    """Run WORKERS processes, of which half push while the others take tasks. A process that finds
    no task sleeps for a moment."""
    each = 3000
    producers = WORKERS // 2
    pushed: Any = multiprocessing.get_context("fork").Semaphore(0)
    make(path, 9).close()

    def work(number: int, start: Any) -> int:
        it = make(path, number)
        start.wait()
        if number < producers:
            try:
                for _ in range(each):
                    it.push()
            finally:
                pushed.release()
            return 0
        count, ended = 0, 0
        while ended < producers:
            # Read before the drain: after the last producer has ended, one more drain is needed.
            ended = pushed.get_value()
            found = drain(it)
            count += found
            if not found:
                sleep(0.0005)
        return count

    seconds, done = run_together(work)
    check("tasks that came out", done, each * producers)
    return {"2 producers, 2 consumers": seconds / done * 1e6}


def run_together(work: Callable[[int, Any], int]) -> tuple[float, int]:
    """Run work(number, start) in WORKERS processes, which begin at the barrier `start`.

    Returns the seconds from the begin until all have ended, and the sum of their results. Raises
    Failed if one of them raised an exception.
    """
    context: Any = multiprocessing.get_context("fork")
    start = context.Barrier(WORKERS + 1)
    finished = context.SimpleQueue()

    def run(number: int) -> None:
        try:
            finished.put(work(number, start))
        except Exception as error:
            finished.put(repr(error))

    processes = [
        context.Process(target=run, args=(number,)) for number in range(WORKERS)
    ]
    for process in processes:
        process.start()
    start.wait()
    started = perf_counter()
    ends = [finished.get() for _ in processes]
    seconds = perf_counter() - started
    for process in processes:
        process.join()
    if errors := [end for end in ends if isinstance(end, str)]:
        raise Failed(errors[0])
    return seconds, sum(ends)


def compare(base: str, results: Results, scenario: Callable[[Maker, str], Any]) -> None:
    """Run a scenario for each contender, in a directory of its own, and add the results."""
    times: dict[str, dict[str, float]] = {}
    for name, make in CONTENDERS.items():
        try:
            with fresh_dir(base) as path:
                for row, microseconds in scenario(make, path).items():
                    times.setdefault(row, {})[name] = microseconds
        except Failed as error:
            if name != "other":
                raise
            print(
                f"{scenario.__name__}: the other file failed: {error}", file=sys.stderr
            )
    for row, by_contender in times.items():
        results.add_times(row, by_contender)


def synced_push(base: str, results: Results, count: int) -> None:
    """Push with sync: `count` tasks one by one, and a batch of 100."""
    with fresh_dir(base) as path:
        floor = Floor(path)
        times = {"floor": repeated(lambda: floor.push(sync=True), count)}
        files = femtoqueue._open_files(path, is_durable=True)

        def sync_all() -> None:
            with files.batch():
                pass

        floor_many = repeated(floor.push, 100) * 100 + repeated(sync_all, 1)
        check("floor", len(os.listdir(floor.pending)), count + 100)
        floor.close()
    with fresh_dir(base) as path, FemtoQueue(path, "bench", sync_after_write=True) as q:
        times["queue"] = repeated(lambda: q.push(PAYLOAD), count)
        batch = [PAYLOAD] * 100
        many = repeated(lambda: q.push_many(batch), 1)
        check("pending", q.stats().pending, count + len(batch))
    with fresh_dir(base) as path:
        table = Sqlite(path, "FULL")
        times["sqlite3"] = repeated(table.push, count)
        table.close()
    results.add_times("push, synced", times)
    results.add_times(
        "push_many of 100, synced", {"queue": many / 100, "floor": floor_many / 100}
    )


def fill(path: str, count: int) -> None:
    """Put `count` tasks into a new queue, in one batch."""
    with FemtoQueue(path, "filler") as q:
        q.push_many(PAYLOAD for _ in range(count))


def backlog(base: str, results: Results, count: int) -> None:
    """Measure the first pop() of a new worker, and the pops after it, with `count` tasks
    waiting."""
    pops = min(count // 2 - 1, 5000)
    with fresh_dir(base) as path:
        fill(path, count)
        pending = os.path.join(path, "pending")
        os.listdir(pending)  # now the directory is in the cache for both measurements
        list_s = timed(lambda: sorted(os.listdir(pending)))
        q = Queue(path)
        first_s = timed(q.queue.pop)
        times = {"queue": repeated(q.take, pops)}
        stats = q.queue.stats()
        check("done and in flight", (stats.done, stats.inflight), (pops, 1))
        q.close()
        floor = Floor(path)
        floor.list()
        times["floor"] = repeated(floor.take, pops)
        floor.close()
    results.add(
        f"first pop, {count:,} waiting",
        "ms",
        queue=first_s * 1e3,
        list_and_sort=list_s * 1e3,
        ratio=list_s / first_s,
    )
    if count > 10_000:  # one_process() measures this row for fewer tasks
        with fresh_dir(base) as path:
            table = Sqlite(path)
            table.push_many(count)
            times["sqlite3"] = repeated(table.take, pops)
            table.close()
        results.add_times(f"pop + done, {count:,} waiting", times)


def bare_replace(floor: Floor, root: str, names: list[str]) -> None:
    """Make the bare os calls of keyed pushes that replace a payload.

    Each push takes the key's lock, reads the key's link, writes a record in creating/, moves the
    waiting task aside, renames the record over it, and moves it back.
    """
    import fcntl

    aside = os.open(f"{root}/aside", os.O_RDONLY)
    for name in names:
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o666, dir_fd=floor.inflight)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.readlink(name, dir_fd=floor.done)
        os.stat(name, dir_fd=floor.pending)
        fd = os.open(name, CREATE, 0o666, dir_fd=floor.creating)
        os.write(fd, RECORD)
        os.close(fd)
        os.rename(name, name, src_dir_fd=floor.pending, dst_dir_fd=aside)
        os.rename(name, name, src_dir_fd=floor.creating, dst_dir_fd=aside)
        os.rename(name, name, src_dir_fd=aside, dst_dir_fd=floor.pending)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
    os.close(aside)


def keyed(base: str, results: Results, count: int) -> None:
    """Measure pushes that replace the payload of a waiting keyed task, and take() by key, with
    `count` other tasks waiting."""
    keys = [f"user:{number}" for number in range(500)]
    with fresh_dir(base) as path, FemtoQueue(path, "bench") as q:
        fill(path, count)
        for key in keys:
            q.push(PAYLOAD, key=key)
        q.take("none")  # the first call of a process does all maintenance: not measured
        replace_s = timed(lambda: [q.push(PAYLOAD[1:], key=key) for key in keys])
        tasks: list[FemtoTask] = []
        take_s = timed(lambda: tasks.extend(filter(None, map(q.take, keys))))
        check(
            "taken",
            {(task.key, task.data) for task in tasks},
            {(k, PAYLOAD[1:]) for k in keys},
        )
        for task in tasks:
            q.done(task)
        check("keys", os.listdir(os.path.join(path, "keys")), [])
    with fresh_dir(base) as path:
        floor, names = Floor(path), task_names(len(keys))
        os.mkdir(os.path.join(path, "aside"))
        for name in names:
            # the lock files and the links of the queue's keys exist, too
            floor.push()
            os.close(os.open(name, CREATE, 0o666, dir_fd=floor.inflight))
            os.symlink(f"pending/{name}", name, dir_fd=floor.done)
        floor_s = timed(lambda: bare_replace(floor, path, names))
        floor.close()
    times = {"queue": replace_s / len(keys) * 1e6, "floor": floor_s / len(keys) * 1e6}
    results.add_times(f"keyed push, replaces, {count:,} waiting", times)
    results.add(f"take(key), {count:,} waiting", "µs", queue=take_s / len(keys) * 1e6)


def polls_of_empty(path: str) -> tuple[float, int]:
    """Drain a queue. Return the microseconds for a pop() of the empty queue, which lists pending/,
    and the size of pending/ in bytes."""
    with FemtoQueue(path, "bench") as q:
        while task := q.pop():
            q.done(task)
        return repeated(q.pop, 2000), os.stat(os.path.join(path, "pending")).st_size


def empty_polls(base: str, results: Results, count: int) -> None:
    """Compare pop() of an empty queue: of a new queue, and of one that had `count` tasks."""
    with fresh_dir(base) as path:
        new_us, _ = polls_of_empty(path)
        fill(path, count)
        grown = os.stat(os.path.join(path, "pending")).st_size
        used_us, shrunk = polls_of_empty(path)
    name = f"pop of empty, {count:,} before"
    results.add(
        name, "µs", new_queue=new_us, used_queue=used_us, ratio=new_us / used_us
    )
    results.add(f"{name}: pending/", "KiB", full=grown / 1024, drained=shrunk / 1024)


def waiter(path: str, count: int, polling: bool) -> None:
    """Be the process that waits in wake_up(). Print "ready", and then for each task the time
    between its push() and the return of pop(10)."""
    if polling:
        femtoqueue._libc = lambda: None  # type: ignore[assignment]
    with FemtoQueue(path, "waiter") as q:
        q.pop(0.001)
        print("ready", flush=True)
        for _ in range(count):
            task = q.pop(10)
            assert task is not None
            print(perf_counter() - float(task.data), flush=True)
            q.done(task)


def wake_up(base: str, results: Results, count: int, polling: bool) -> None:
    """Measure the time from push() in one process to the return of pop(timeout=10) in another."""
    with fresh_dir(base) as path, FemtoQueue(path, "pusher") as q:
        context: Any = multiprocessing.get_context("fork")
        hears, says = context.Pipe(duplex=False)

        def work() -> None:
            os.dup2(says.fileno(), 1)
            waiter(path, count, polling)

        process = context.Process(target=work)
        process.start()
        says.close()
        with os.fdopen(os.dup(hears.fileno()), encoding="ascii") as lines:
            check("waiter", lines.readline(), "ready\n")
            times = []
            for _ in range(count):
                # meanwhile the other process waits again, and polls at long intervals
                sleep(0.02)
                q.push(b"%.9f" % perf_counter())
                times.append(float(lines.readline()))
        process.join()
    times.sort()
    results.add(
        f"wake-up, {'polling' if polling else 'inotify'}",
        "ms",
        p50=times[len(times) // 2] * 1e3,
        p99=times[len(times) * 99 // 100] * 1e3,
    )


def idle(base: str, results: Results, seconds: float, polling: bool) -> None:
    """Measure the CPU time of pop(timeout) while no task comes, in percent of a core."""
    libc = femtoqueue._libc
    try:
        if polling:
            femtoqueue._libc = lambda: None  # type: ignore[assignment]
        with fresh_dir(base) as path, FemtoQueue(path, "idle") as q:
            q.pop(0.1)
            started_s = process_time()
            check("idle", q.pop(seconds), None)
            busy_s = process_time() - started_s
    finally:
        femtoqueue._libc = libc
    name = f"idle, {'polling' if polling else 'inotify'}"
    results.add(name, "% of a core", cpu=busy_s / seconds * 100)


def commands(base: str, results: Results, count: int) -> None:
    """Compare `work -j 2 -- true` on `count` tasks with `xargs -P 2 -n 1 true`."""
    here = os.path.dirname(os.path.abspath(__file__))
    numbers = "".join(f"{number}\n" for number in range(count)).encode()
    with fresh_dir(base) as path:
        fill(path, count)
        command = [sys.executable, os.path.join(here, "femtoqueue.py"), "work", path]
        command += ["-q", "-j", "2", "--drain", "--", "true"]
        work_s = timed(lambda: subprocess.run(command, check=True))
        check("done", len(os.listdir(os.path.join(path, "done"))), count)
    xargs = ["xargs", "-P", "2", "-n", "1", "true"]
    xargs_s = timed(lambda: subprocess.run(xargs, input=numbers, check=True))
    results.add(
        f"work -j 2, {count:,} times true",
        "ms",
        work=work_s / count * 1e3,
        xargs=xargs_s / count * 1e3,
        ratio=xargs_s / work_s,
    )


def import_time(results: Results) -> None:
    """Measure `import femtoqueue` without and with a cached bytecode file."""
    code = (
        "from time import perf_counter as p; s = p(); import femtoqueue; print(p() - s)"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = cache
        first, cached = (
            float(
                subprocess.check_output([sys.executable, "-c", code], cwd=here, env=env)
            )
            for _ in range(2)
        )
    results.add("import femtoqueue", "ms", first=first * 1e3, cached=cached * 1e3)


def file_system(path: str) -> str:
    """Return the type of a path's file system by /proc/mounts, or "unknown"."""
    path, best, kind = os.path.realpath(path), "", "unknown"
    try:
        with open("/proc/mounts", encoding="utf-8") as mounts:
            for line in mounts:
                mount, name = line.split()[1:3]
                inside = os.path.commonpath([path, mount]) == mount
                if inside and len(mount) >= len(best):
                    best, kind = mount, name
    except OSError:
        pass
    return kind


def machine(base: str) -> dict[str, object]:
    """Return what the figures depend on: versions, the system, the file system, the payload."""
    return {
        "femtoqueue": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "file_system": file_system(base),
        "directory": base,
        "payload_bytes": len(PAYLOAD),
    }


def progress(text: str) -> None:
    """Show on standard error what is measured now."""
    print(f"{text:60}", end="\r", file=sys.stderr, flush=True)


def run(base: str, runs: int, large: bool, chart: bool) -> Results:
    """Run all scenarios, or only those of the chart, and return the results."""
    results = Results()
    can_fork = hasattr(os, "fork")
    for number in range(1, runs + 1):
        progress(f"run {number} of {runs}")
        if chart:
            for scenario in (almost_empty, *((both_sides,) if can_fork else ())):
                compare(base, results, scenario)
            continue
        for scenario in (
            one_process,
            almost_empty,
            *((workers, both_sides) if can_fork else ()),
        ):
            compare(base, results, scenario)
        synced_push(base, results, 100)
        import_time(results)
        backlog(base, results, 1000)
        if can_fork:
            keyed(base, results, 1000)
    if chart:
        progress("")
        return results
    for count in (100_000, *([1_000_000] if large else [])):
        progress(f"{count:,} waiting")
        backlog(base, results, count)
        if can_fork:
            keyed(base, results, count)
    for polling in (False, True) if can_fork else ():
        progress("waiting")
        wake_up(base, results, 100, polling)
        idle(base, results, 2 if polling or runs == 1 else 5, polling)
    if shutil.which("xargs"):
        progress("commands")
        commands(base, results, 2000 if runs > 1 else 500)
    progress("polls of an empty queue")
    empty_polls(base, results, 1_000_000 if large else 30_000)
    progress("")
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time femtoqueue against the same work as bare os calls."
    )
    parser.add_argument(
        "--dir", help="a directory on the file system to measure (default: here)"
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each figure (default: 3)"
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="also with 1,000,000 tasks: takes minutes and 5 GB",
    )
    parser.add_argument(
        "--other",
        metavar="FILE",
        help="measure another femtoqueue.py as well (0.4 or later)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", metavar="FILE", help="also write the figures of each run to FILE"
    )
    form.add_argument(
        "--chart",
        action="store_true",
        help="print only tasks per second, as a mermaid chart",
    )
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs must be at least 1")
    if args.dir is not None and not os.path.isdir(args.dir):
        parser.error(f"--dir: no such directory: {args.dir}")
    if args.other is not None and not os.path.isfile(args.other):
        parser.error(f"--other: no such file: {args.other}")
    return args


def load(path: str) -> Any:
    """Import a file as the module femtoqueue_other, beside femtoqueue."""
    spec = importlib.util.spec_from_file_location("femtoqueue_other", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    args = parse_args()
    base = os.path.abspath(args.dir or os.getcwd())
    about = machine(base)
    if not args.chart:
        print("  ".join(f"{name}: {value}" for name, value in about.items()))
    names = {"queue": "femtoqueue", "sqlite3": "SQLite"}
    if args.other:
        module = load(args.other)
        folder = os.path.basename(os.path.dirname(os.path.abspath(args.other)))
        names["other"] = folder.removeprefix("femtoqueue-")
        CONTENDERS["other"] = lambda path, number: Queue(
            path, f"bench-{number}", module
        )
    try:
        results = run(base, args.runs, args.large, args.chart)
    except Failed as error:
        raise SystemExit(f"benchmark_mini.py: {error}") from None
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": about, "results": results.rows}, file, indent=2)
    if args.chart:
        results.show_chart(names)
    else:
        results.show()
        results.show_goals()


if __name__ == "__main__":
    main()
