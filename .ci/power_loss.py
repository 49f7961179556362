"""Power loss on ext4, xfs and btrfs: what sync_after_write acknowledged is there afterwards.

    python .ci/power_loss.py [--cuts N] [--seed S] [--fs KIND ...] [--self-check]

Needs root, on Linux, with loop devices, e2fsprogs, xfsprogs and btrfs-progs.

A writer pushes, schedules, pops, finishes, fails, releases and replaces keyed tasks on a file
system in an image, whose writeback is held off, and notes each step outside, before it and when
it was acknowledged. At a random moment the image is cloned in one instant (FICLONE, on an xfs that
holds it): what the kernel had not written by then is lost. The clone is mounted, which replays its
journal, and opened as after a reboot. Proved: each acknowledged task is there once, in the state
that was acknowledged (or the next, if that was under way), with its own bytes; nothing torn is
delivered; the queue works on. Without sync_after_write: nothing torn, nothing crashes.

--self-check shows that this can fail: a queue without fsync, one that syncs only directories, and
(on ext4 without a journal) one that syncs only files must all be caught.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from broken import broken, caught_by

import femtoqueue
from femtoqueue import FemtoQueue

FICLONE = 0x40049409
IMAGE_MIB = {"ext4": 64, "ext4-nojournal": 64, "xfs": 320, "btrfs": 256}
MKFS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "ext4-nojournal": ["mkfs.ext4", "-q", "-F", "-O", "^has_journal"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
# Nothing is written that fsync did not ask for.
OPTIONS = {
    "ext4": "commit=3600",
    "ext4-nojournal": "noatime",
    "xfs": "nouuid",
    "btrfs": "commit=3600",
}
HELD_OFF = {
    "/proc/sys/vm/dirty_writeback_centisecs": "0",
    "/proc/sys/vm/dirty_expire_centisecs": "360000",
}
KEYS = 4


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def writeback_held_off() -> Iterator[None]:
    before = {}
    for path, value in HELD_OFF.items():
        with open(path, encoding="ascii") as file:
            before[path] = file.read()
        with open(path, "w", encoding="ascii") as file:
            file.write(value)
    try:
        yield
    finally:
        for path, value in before.items():
            with open(path, "w", encoding="ascii") as file:
                file.write(value)


@contextlib.contextmanager
def mounted(image: str, target: str, options: str) -> Iterator[None]:
    run("mount", "-o", f"loop,{options}", image, target)
    try:
        yield
    finally:
        for _ in range(50):
            if (
                subprocess.run(
                    ["umount", target], check=False, stderr=subprocess.DEVNULL
                ).returncode
                == 0
            ):
                break
            time.sleep(0.05)
        else:
            run("umount", "-l", target)


@contextlib.contextmanager
def workshop() -> Iterator[str]:
    """A directory on an xfs in memory: it can clone an image in one instant."""
    with tempfile.TemporaryDirectory(prefix="femtoqueue-power-") as work:
        memory, store = os.path.join(work, "memory"), os.path.join(work, "store")
        os.mkdir(memory)
        os.mkdir(store)
        run("mount", "-t", "tmpfs", "-o", "size=4g", "none", memory)
        try:
            image = os.path.join(memory, "image")
            with open(image, "wb") as file:
                file.truncate(3 << 30)
            run("mkfs.xfs", "-q", "-m", "reflink=1", image)
            with mounted(image, store, "nouuid"):
                yield store
        finally:
            run("umount", memory)


def clone(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        fcntl.ioctl(new.fileno(), FICLONE, old.fileno())


def payload(number: int, chance: random.Random) -> bytes:
    size = chance.choice((0, 50, 5000, 100_000))
    return b"%d:" % number + random.Random(number).randbytes(size)


def number_of(data: bytes) -> int:
    """Return a payload's number; raises ValueError unless every byte is as it was pushed."""
    head, _, rest = data.partition(b":")
    number = int(head)
    if rest != random.Random(number).randbytes(len(rest)) or len(rest) not in (
        0,
        50,
        5000,
        100_000,
    ):
        raise ValueError(f"payload {number} is torn")
    return number


class Writer:
    """Lives on the file system that will be cut, and notes what it does in a file elsewhere.

    A line is "<try or ok> <number> <states>": from the try on the task may be in those states, from
    the ok on it must be.
    """

    def __init__(self, path: str, log_path: str, seed: int, sync: bool) -> None:
        self.log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.chance, self.numbers = random.Random(seed), iter(range(1, 10**9))
        self.keyed: dict[str, int] = {}
        self.keep_done = self.chance.random() < 0.5
        self.q = FemtoQueue(
            path,
            "writer",
            timeout_stale_ms=None,
            sync_after_write=sync,
            keep_done=self.keep_done,
        )

    def note(self, word: str, number: int, state: str) -> None:
        os.write(self.log, f"{word} {number} {state}\n".encode())

    def push(self) -> None:
        number = next(self.numbers)
        self.note("try", number, "live")
        if self.chance.random() < 0.3:
            self.q.schedule(
                payload(number, self.chance), time.time() * 1e6 + self.chance.choice((0, 1e9))
            )
        else:
            self.q.push(payload(number, self.chance))
        self.note("ok", number, "live")

    def push_many(self) -> None:
        numbers = [next(self.numbers) for _ in range(5)]
        for number in numbers:
            self.note("try", number, "live")
        self.q.push_many(payload(number, self.chance) for number in numbers)
        for number in numbers:
            self.note("ok", number, "live")

    def push_keyed(self) -> None:
        key, number = f"k{self.chance.randrange(KEYS)}", next(self.numbers)
        self.note("try", number, "live")
        old = self.keyed.get(key)
        if old is not None:
            self.note("try", old, "gone")  # replaced
        self.q.push(payload(number, self.chance), key=key)
        if old is not None:
            self.note("ok", old, "gone")
        self.note("ok", number, "live")
        self.keyed[key] = number

    def consume(self) -> None:
        task = self.q.pop()
        if task is None:
            return
        number = number_of(task.data)
        if task.key is not None:
            self.keyed.pop(task.key)
        end = self.chance.choice(("done", "done", "failed", "live"))
        if end == "live" and task.key is not None:
            end = "done"
        noted = "gone" if end == "done" and not self.keep_done else end
        self.note("try", number, noted)
        if end == "done":
            self.q.done(task)
        elif end == "failed":
            self.q.fail(task, "why")
        else:
            self.q.release(task, delay_s=self.chance.choice((0, 1000)))
        self.note("ok", number, noted)

    def go_on(self) -> None:
        while True:
            self.chance.choice(
                (self.push, self.push, self.push_many, self.push_keyed, self.consume, self.consume)
            )()


def allowed(log: str) -> dict[int, set[str]]:
    """Return the states in which each task may be, from what was noted."""
    states: dict[int, set[str]] = {}
    for line in log.splitlines():
        word, number, state = line.split()
        before = states.setdefault(int(number), {"gone"})
        states[int(number)] = {state} if word == "ok" else before | {state}
    return states


class Violation(Exception):
    pass


def check(path: str, log: str, sync: bool) -> int:
    """Open the queue after the cut; raise Violation, or return how many tasks were there."""
    wanted = allowed(log)
    with mock.patch.object(femtoqueue, "_read_boot_id", return_value="the next boot"):
        q = FemtoQueue(path, "writer", timeout_stale_ms=None)
    found: dict[int, str] = {}
    for state in femtoqueue.STATES:
        for task in q.tasks(state):
            number = number_of(task.data)
            if number in found:
                places = subprocess.run(
                    ["find", path, "-name", f"*{task.id}"], check=True, capture_output=True
                )
                raise Violation(f"task {number} stands in two places: {places.stdout.decode()}")
            found[number] = state if state in ("done", "failed") else "live"
    if sync:
        for number, states in wanted.items():
            if found.get(number, "gone") not in states:
                raise Violation(f"task {number} is {found.get(number, 'gone')}, not {states}")
    live = {number for number, name in found.items() if name == "live"}
    late = {number_of(task.data) for task in q.tasks("scheduled")}
    delivered = set()
    q.push(b"0:")
    while waiting := q.pop():
        delivered.add(number_of(waiting.data))
        q.done(waiting)
    if not live - late <= delivered or 0 not in delivered or not delivered <= live | {0}:
        raise Violation(f"live {sorted(live)}, late {sorted(late)}, delivered {sorted(delivered)}")
    q.close()
    return len(found)


def one_cut(store: str, kind: str, seed: int, sync: bool) -> int:
    chance = random.Random(seed)
    image, after = os.path.join(store, "image"), os.path.join(store, "after")
    target, log_path = os.path.join(store, "mnt"), os.path.join(store, "log")
    for path in (image, after, log_path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    os.makedirs(target, exist_ok=True)
    with open(image, "wb") as file:
        file.truncate(IMAGE_MIB[kind] << 20)
    run(*MKFS[kind], image)
    with mounted(image, target, OPTIONS[kind]):
        FemtoQueue(os.path.join(target, "jobs"), "maker", sync_after_write=True).close()
        with open(log_path, "x", encoding="ascii"):
            pass  # on a busy machine the child may not have come so far when we read it
        child = os.fork()
        if child == 0:
            try:
                Writer(os.path.join(target, "jobs"), log_path, seed, sync).go_on()
            finally:
                os._exit(1)
        time.sleep(0.05 + chance.random() * 0.2)
        if not sync:  # as the kernel does now and then
            run("sync", "--file-system", target)
        time.sleep(chance.random() * 0.2)
        with open(log_path, encoding="ascii") as file:
            log = file.read()
        clone(image, after)
        with open(log_path, encoding="ascii") as file:  # what was begun meanwhile may be there
            begun = file.read()[len(log) :]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    log += "".join(
        f"try {line.partition(' ')[2]}\n" for line in begun.splitlines() if line[-1:] in "edn"
    )
    if kind == "ext4-nojournal":
        subprocess.run(
            ["e2fsck", "-y", after],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    if kind == "btrfs":
        run("btrfs", "device", "scan", "--forget")
    with mounted(after, target, OPTIONS[kind]):
        return check(os.path.join(target, "jobs"), log, sync)


def cuts(store: str, kind: str, count: int, seed: int, sync: bool) -> None:
    tasks = 0
    for number in range(seed, seed + count):
        try:
            tasks += one_cut(store, kind, number, sync)
        except (Violation, ValueError, OSError) as error:
            raise SystemExit(
                f"power_loss: FAILED: {kind}, sync={sync}, seed {number}: {error!r}"
            ) from error
    print(f"power_loss: {kind}, sync={sync}: {count} cuts, {tasks} tasks, 0 violations", flush=True)


def self_check(store: str, seed: int) -> None:
    queues = caught_by("power_loss").items()
    for name, kind in [(name, kind) for name, kinds in queues for kind in kinds]:
        with broken(name):
            for number in range(seed, seed + 40):
                try:
                    one_cut(store, kind, number, True)
                except (Violation, ValueError, OSError) as error:
                    print(f"power_loss: {name} on {kind} is caught: {error}", flush=True)
                    break
            else:
                raise SystemExit(f"power_loss: FAILED: {name} on {kind} is not caught in 40 cuts")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=30, help="per file system (default: 30)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--fs", nargs="+", choices=[*MKFS], default=["ext4", "xfs", "btrfs"])
    parser.add_argument(
        "--self-check", action="store_true", help="show that broken queues are caught"
    )
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"power_loss: seed {seed}", flush=True)
    if os.geteuid() != 0:
        raise SystemExit("power_loss: FAILED: it needs root")
    femtoqueue._log().disabled = True
    with writeback_held_off(), workshop() as store:
        if args.self_check:
            self_check(store, seed)
            return
        for kind in args.fs:
            cuts(store, kind, args.cuts, seed, sync=True)
            cuts(store, kind, max(1, args.cuts // 3), seed, sync=False)


if __name__ == "__main__":
    main()
