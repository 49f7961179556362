"""How fast femtoqueue is, side by side with its floor: the same work as bare os calls.

    python benchmark_mini.py [--dir DIR] [--runs N] [--large] [--json]

A ratio is the floor's time over the queue's, both measured in the same run, one after the other,
on the same file system: 1.00 is as fast as the system calls alone. The floor is the fastest form
that we know: directory descriptors, names and header made beforehand, no checks, no checksum.
Each figure is a median over the runs, with its smallest and largest in brackets. Every run also
checks that what went in came out.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time, sleep
from typing import Any

import femtoqueue
from femtoqueue import FemtoQueue, FemtoTask, __version__, _find_syncfs

PAYLOAD = b"x" * 100
HEADER = b"FQ1 00000000 100\n"
WORKERS = 4
DIRS = ("creating", "pending", "inflight", "done")


class Results:
    """Collects figures, run by run, and prints the medians."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, unit: str, **figures: float) -> None:
        row = self.rows.setdefault(name, {"unit": unit, "figures": {}})
        for label, value in figures.items():
            row["figures"].setdefault(label, []).append(value)

    def show(self) -> None:
        for name, row in self.rows.items():
            parts = []
            for label, values in row["figures"].items():
                unit = "" if label.startswith("ratio") else f" {row['unit']}"
                parts.append(
                    f"{label} {_number(statistics.median(values))}{unit} {_spread(values)}"
                )
            print(f"{name:38} {'   '.join(parts)}")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _spread(values: list[float]) -> str:
    return f"[{_number(min(values))}-{_number(max(values))}]" if len(values) > 1 else ""


def check(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise SystemExit(f"{what}: {got!r}, where {wanted!r} was to come out")


def timed(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


@contextmanager
def fresh_dir(base: str) -> Iterator[str]:
    """A directory that is gone afterwards; what the run before dirtied is on the disk before."""
    path = tempfile.mkdtemp(prefix="femtoqueue-benchmark-", dir=base)
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.sync()


class Floor:
    """The bare os calls of a queue, by directory descriptors, and nothing else."""

    def __init__(self, path: str) -> None:
        for name in DIRS:
            os.makedirs(os.path.join(path, name), exist_ok=True)
        self.creating, self.pending, self.inflight, self.done = (
            os.open(os.path.join(path, name), os.O_RDONLY) for name in DIRS
        )

    def close(self) -> None:
        for fd in (self.creating, self.pending, self.inflight, self.done):
            os.close(fd)

    def push(self, names: Iterable[str], *, sync: bool = False) -> None:
        record = HEADER + PAYLOAD
        creating, pending = self.creating, self.pending
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for name in names:
            fd = os.open(name, flags, 0o666, dir_fd=creating)
            os.write(fd, record)
            if not sync:
                os.close(fd)
            os.rename(name, name, src_dir_fd=creating, dst_dir_fd=pending)
            if sync:
                os.fsync(fd)
                os.close(fd)
                os.fsync(pending)

    def drain(self, names: Iterable[tuple[str, str]]) -> None:
        pending, inflight, done = self.pending, self.inflight, self.done
        flags = os.O_RDONLY
        for name, lease in names:
            os.rename(name, lease, src_dir_fd=pending, dst_dir_fd=inflight)
            fd = os.open(lease, flags, dir_fd=inflight)
            os.read(fd, 4096)
            os.close(fd)
            os.rename(lease, name, src_dir_fd=inflight, dst_dir_fd=done)


def task_names(count: int, tag: str = "0000aaaa") -> list[str]:
    return [f"{1_700_000_000_000_000_000 + order:020d}-{tag}" for order in range(count)]


def lease_names(names: list[str]) -> list[tuple[str, str]]:
    return [(name, f"01999999999999999999~1~0000bbbb~{name}") for name in names]


def drain(q: FemtoQueue, limit: int | None = None) -> int:
    count = 0
    while count != limit and (task := q.pop()):
        q.done(task)
        count += 1
    return count


def push_and_drain(base: str, results: Results, count: int) -> None:
    with fresh_dir(base) as path:
        floor, names = Floor(path), task_names(count)
        leases = lease_names(names)
        floor_push, floor_drain = (
            timed(lambda: floor.push(names)),
            timed(lambda: floor.drain(leases)),
        )
        check("floor", len(os.listdir(floor.done)), count)
        floor.close()
    with fresh_dir(base) as path, FemtoQueue(path, "bench") as q:
        push_s = timed(lambda: [q.push(PAYLOAD) for _ in range(count)])
        drain_s = timed(lambda: drain(q))
        check("done", (q.stats().done, {task.data for task in q.tasks("done")}), (count, {PAYLOAD}))
    for name, queue_s, floor_s in (
        ("push", push_s, floor_push),
        ("pop + done", drain_s, floor_drain),
    ):
        results.add(
            name,
            "µs",
            queue=queue_s / count * 1e6,
            floor=floor_s / count * 1e6,
            ratio=floor_s / queue_s,
        )


def synced_push(base: str, results: Results, count: int) -> None:
    with fresh_dir(base) as path:
        floor, names = Floor(path), task_names(count)
        floor_s = timed(lambda: floor.push(names, sync=True))
        sync_all = _find_syncfs(path) or (lambda fd: os.sync())
        more = task_names(100, "0000cccc")
        floor_many = timed(lambda: floor.push(more)) + timed(lambda: sync_all(floor.pending))
        check("floor", len(os.listdir(floor.pending)), count + len(more))
        floor.close()
    with fresh_dir(base) as path, FemtoQueue(path, "bench", sync_after_write=True) as q:
        queue_s = timed(lambda: [q.push(PAYLOAD) for _ in range(count)])
        batch = [PAYLOAD] * 100
        many_s = timed(lambda: q.push_many(batch))
        check("pending", q.stats().pending, count + len(batch))
    with fresh_dir(base) as path:
        sqlite_s = sqlite_inserts(os.path.join(path, "queue.db"), count)
    results.add(
        "push, synced",
        "µs",
        queue=queue_s / count * 1e6,
        floor=floor_s / count * 1e6,
        ratio=floor_s / queue_s,
        sqlite3=sqlite_s / count * 1e6,
        ratio_to_sqlite3=sqlite_s / queue_s,
    )
    results.add(
        "push_many of 100, synced",
        "µs",
        queue=many_s / len(batch) * 1e6,
        floor=floor_many / len(batch) * 1e6,
        ratio=floor_many / many_s,
        ratio_to_single=queue_s / count / (many_s / len(batch)),
    )


def sqlite_inserts(path: str, count: int) -> float:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE task (id INTEGER PRIMARY KEY, data BLOB)")

    def insert() -> None:
        for _ in range(count):
            database.execute("INSERT INTO task (data) VALUES (?)", (PAYLOAD,))

    seconds = timed(insert)
    check("sqlite3", database.execute("SELECT count(*) FROM task").fetchone(), (count,))
    database.close()
    return seconds


def fill(path: str, count: int) -> None:
    """Put `count` valid tasks into a new queue, as fast as it goes."""
    with FemtoQueue(path, "filler") as q:
        q.push_many(PAYLOAD for _ in range(count))


def backlog(base: str, results: Results, count: int) -> None:
    """The first pop of a fresh process, and the pops after it, with `count` tasks waiting."""
    pops = min(count // 2 - 1, 5000)
    with fresh_dir(base) as path:
        fill(path, count)
        pending = os.path.join(path, "pending")
        os.listdir(pending)  # both find it in the cache
        list_s = timed(lambda: sorted(os.listdir(pending)))
        with FemtoQueue(path, "bench") as q:
            first_s = timed(q.pop)
            queue_s = timed(lambda: drain(q, pops))
            stats = q.stats()
            check("done and in flight", (stats.done, stats.inflight), (pops, 1))
        floor, names = Floor(path), sorted(os.listdir(pending))[:pops]
        leases = lease_names(names)
        floor_s = timed(lambda: floor.drain(leases))
        floor.close()
    results.add(
        f"first pop, {count:,} waiting",
        "ms",
        queue=first_s * 1e3,
        list_and_sort=list_s * 1e3,
        ratio=list_s / first_s,
    )
    results.add(
        f"pop + done, {count:,} waiting",
        "µs",
        queue=queue_s / pops * 1e6,
        floor=floor_s / pops * 1e6,
        ratio=floor_s / queue_s,
    )


def bare_replace(floor: Floor, names: list[str]) -> None:
    """A keyed push that replaces: a lock, a record aside, and three renames."""
    import fcntl

    record = HEADER + PAYLOAD
    for name in names:
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o666, dir_fd=floor.done)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.fstat(lock)
        os.stat(name, dir_fd=floor.done)
        os.read(lock, 4096)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=floor.creating)
        os.write(fd, record)
        os.close(fd)
        os.rename(name, name, src_dir_fd=floor.pending, dst_dir_fd=floor.inflight)
        os.rename(name, name, src_dir_fd=floor.creating, dst_dir_fd=floor.inflight)
        os.rename(name, name, src_dir_fd=floor.inflight, dst_dir_fd=floor.pending)
        os.close(lock)


def keyed(base: str, results: Results, count: int) -> None:
    """Pushes that replace a waiting task of their key, and take() by key, with `count` waiting."""
    keys = [f"user:{number}" for number in range(500)]
    with fresh_dir(base) as path, FemtoQueue(path, "bench") as q:
        fill(path, count)
        for key in keys:
            q.push(PAYLOAD, key=key)
        q.take("none")  # the first look at everything is that of any process
        replace_s = timed(lambda: [q.push(PAYLOAD[1:], key=key) for key in keys])
        tasks: list[FemtoTask] = []
        take_s = timed(lambda: tasks.extend(filter(None, map(q.take, keys))))
        check("taken", {(task.key, task.data) for task in tasks}, {(k, PAYLOAD[1:]) for k in keys})
        for task in tasks:
            q.done(task)
        check("keys", os.listdir(os.path.join(path, "keys")), [])
    with fresh_dir(base) as path:
        floor, names = Floor(path), task_names(len(keys))
        floor.push(names)
        for name in names:  # as the locks of the queue's keys are there
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=floor.done))
        floor_s = timed(lambda: bare_replace(floor, names))
        floor.close()
    results.add(
        f"keyed push, replaces, {count:,} waiting",
        "µs",
        queue=replace_s / len(keys) * 1e6,
        floor=floor_s / len(keys) * 1e6,
        ratio=floor_s / replace_s,
    )
    results.add(f"take(key), {count:,} waiting", "µs", queue=take_s / len(keys) * 1e6)


def polls_of_empty(path: str) -> tuple[float, int]:
    """Microseconds per pop() of an empty queue whose batch is listed anew, and pending's size."""
    with FemtoQueue(path, "bench") as q:
        drain(q)
        polls = 2000
        seconds = timed(lambda: [q.pop() for _ in range(polls)])
    return seconds / polls * 1e6, os.stat(os.path.join(path, "pending")).st_size


def empty_polls(base: str, results: Results, count: int) -> None:
    with fresh_dir(base) as path:
        new_us, _ = polls_of_empty(path)
        fill(path, count)
        grown = os.stat(os.path.join(path, "pending")).st_size
        used_us, shrunk = polls_of_empty(path)
    name = f"pop of empty, {count:,} before"
    results.add(name, "µs", new_queue=new_us, used_queue=used_us, ratio=new_us / used_us)
    results.add(f"{name}: pending/", "KiB", full=grown / 1024, drained=shrunk / 1024)


def _run_together(work: Callable[[int, Any], int], count: int) -> float:
    """Run work(number, start) in WORKERS processes; seconds from the start until all are done."""
    context: Any = multiprocessing.get_context("fork")
    start = context.Barrier(WORKERS + 1)
    finished = context.SimpleQueue()

    def run(number: int) -> None:
        finished.put(work(number, start))

    workers = [context.Process(target=run, args=(number,)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    start.wait()
    started = perf_counter()
    total = sum(finished.get() for _ in workers)
    seconds = perf_counter() - started
    for worker in workers:
        worker.join()
    check("tasks that the workers did", total, count)
    return seconds


def together(base: str, results: Results, count: int) -> None:
    """WORKERS processes drain one queue; against as many with a directory slice each."""
    with fresh_dir(base) as path:
        slices = [os.path.join(path, str(number)) for number in range(WORKERS)]
        names = task_names(count // WORKERS)
        floors = []
        for directory in slices:
            os.mkdir(directory)
            floors.append(Floor(directory))
            floors[-1].push(names)

        def bare(number: int, start: Any) -> int:
            leases = lease_names(names)
            start.wait()
            floors[number].drain(leases)
            return len(leases)

        floor_s = _run_together(bare, count)
        for floor in floors:
            floor.close()
    with fresh_dir(base) as path:
        fill(path, count)

        def worker(number: int, start: Any) -> int:
            with FemtoQueue(path, f"bench-{number}") as q:
                start.wait()
                return drain(q)

        queue_s = _run_together(worker, count)
    results.add(
        f"{WORKERS} workers, pop + done",
        "µs",
        queue=queue_s / count * 1e6,
        floor=floor_s / count * 1e6,
        ratio=floor_s / queue_s,
    )


def waiter(path: str, count: int, polling: bool) -> None:
    """Another process: says "ready", then when each pop(timeout=10) returned."""
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
    """From push() in one process to the return of pop(timeout=10) in another."""
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
                sleep(0.02)  # long enough for it to wait again, and to poll seldom
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
    """CPU time that pop(timeout) takes of a core while nothing comes."""
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
    name = f"idle for {seconds:.0f} s, {'polling' if polling else 'inotify'}"
    results.add(name, "% of a core", cpu=busy_s / seconds * 100)


def commands(base: str, results: Results, count: int) -> None:
    """`work -j 2 -- true` on `count` tasks, beside `xargs -P 2 -n 1 true`."""
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
    code = "from time import perf_counter as p; s = p(); import femtoqueue; print(p() - s)"
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = cache
        first, cached = (
            float(subprocess.check_output([sys.executable, "-c", code], cwd=here, env=env))
            for _ in range(2)
        )
    results.add("import femtoqueue", "ms", first=first * 1e3, cached=cached * 1e3)


def file_system(path: str) -> str:
    """The type of the file system that holds the path, where /proc/mounts tells it."""
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
    print(f"{text:60}", end="\r", file=sys.stderr, flush=True)


def run(base: str, runs: int, large: bool) -> Results:
    results = Results()
    for number in range(1, runs + 1):
        progress(f"run {number} of {runs}")
        push_and_drain(base, results, 5000)
        synced_push(base, results, 100)
        if hasattr(os, "fork"):
            together(base, results, 12_000)
        import_time(results)
        for count in (1000, 10_000):
            backlog(base, results, count)
    for count in (100_000, *([1_000_000] if large else [])):
        progress(f"{count:,} waiting")
        backlog(base, results, count)
        if hasattr(os, "fork"):
            for _ in range(runs):
                keyed(base, results, 1000)
                keyed(base, results, count)
    for polling in (False, True) if hasattr(os, "fork") else ():
        progress("waiting")
        wake_up(base, results, 200, polling)
        idle(base, results, 10 if runs > 1 else 2, polling)
    if shutil.which("xargs"):
        progress("commands")
        commands(base, results, 10_000 if runs > 1 else 500)
    progress("polls of an empty queue")
    empty_polls(base, results, 1_000_000 if large else 30_000)
    progress("")
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time femtoqueue against the same work as bare os calls."
    )
    parser.add_argument("--dir", help="a directory on the file system to measure (default: here)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each figure (default: 5)")
    parser.add_argument(
        "--large", action="store_true", help="also with 1,000,000 tasks: minutes, and 5 GB"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, every run's figures")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs must be at least 1")
    if args.dir is not None and not os.path.isdir(args.dir):
        parser.error(f"--dir: no such directory: {args.dir}")
    return args


def main() -> None:
    args = parse_args()
    base = os.path.abspath(args.dir or os.getcwd())
    about = machine(base)
    if not args.json:
        print("  ".join(f"{name}: {value}" for name, value in about.items()))
    results = run(base, args.runs, args.large)
    if args.json:
        print(json.dumps({"machine": about, "results": results.rows}, indent=2))
    else:
        results.show()


if __name__ == "__main__":
    main()
