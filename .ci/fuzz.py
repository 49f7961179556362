"""Fuzz femtoqueue: random operations, random file names, damaged files.

    python .ci/fuzz.py [--minutes N] [--seed S] [--only KIND ...] [--self-check]

Here a seed also means the run that uses the seed. Three kinds of seeds take turns until the minutes
are over:
  - `lives` is the class Fuzz of test.py. Several objects make random operations on a queue. After
    each operation the result must be the same as that of a model in memory.
  - `names` puts files with mutated names into every directory. A file whose name has a valid form
    is a task like any other. A file with another name is never delivered, moved, changed or
    removed. No call crashes.
  - `contents` damages the files of tasks and the links of keys. A file that is not a whole record
    is never delivered. A task that was not damaged is delivered.
Code of test.py, not of femtoqueue, decides whether a name or a record is valid.

The first failure ends the program and prints the seed. `--seed S --only KIND --minutes 0` runs that
seed again.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from broken import must_catch
from proof import Violation, exit_on_failure, fingerprint, make_entry, proof_parser, say

import femtoqueue
from femtoqueue import FemtoQueue, FemtoTask, KeyInFlight
from test import (
    Clock,
    Fuzz,
    Record,
    demand,
    is_id,
    is_ours,
    is_task,
    memory_dir,
    read_record,
    record,
)

STEPS = 400  # operations in a seed of `lives`
PATIENCE_S = 60  # the real time that a seed may take


def raise_hang(*_: object) -> None:
    raise AssertionError(f"the seed did not end within {PATIENCE_S} s")


class Names:
    """A seed of `names`: files with random names in every directory."""

    DIRECTORIES = (
        *("", "creating", "pending", "pending", "scheduled", "done", "failed", "keys"),
        *("inflight-gone", "inflight-not a node"),
    )

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.clock = Clock(2e9, 1000)
        self.put: dict[str, tuple[str, str, bytes]] = {}  # path: state, kind, payload
        self.ids: set[str] = set()
        self.delivered: Counter[bytes] = Counter()

    def number(self) -> str:
        now_ns = int(self.clock.time() * 1e9)
        numbers = (0, 1, now_ns - 10**13, now_ns - 10**10, now_ns + 10**10, 4 * 10**18)
        special = self.chance.choice((*numbers, 9 * 10**18 - 1, 9 * 10**18, 10**20 - 1))
        return f"{special + self.chance.randrange(-9, 9) if special > 9 else special:020d}"[
            -20:
        ]

    def valid(self) -> str:
        ident = f"{self.number()}-{self.chance.getrandbits(64):016x}"
        attempts = self.chance.choice(("0", "1", "7", "000001", "999999", "1000000"))
        boot = f"{self.chance.getrandbits(32):08x}"
        stamp = f"{self.number()}~{attempts}~"
        return (
            self.chance.choice(("", "", stamp, stamp, f"{stamp}{boot}~", "update~"))
            + ident
        )

    def mutated(self, name: str) -> str:
        at = self.chance.randrange(len(name))
        new = self.chance.choice("0123456789abcfgAFx~-. \n%é٠²\u0967\udcff\U0001f40d")
        return self.chance.choice(
            (
                name,
                name,
                name[:at] + new + name[at + 1 :],
                name[:at] + new + name[at:],
                name[:at] + name[at + 1 :],
                name[:at],
                name[at:],
                name.upper(),
                name[:at] + name[at:].replace("-", "~"),
                new + name,
                name
                + self.chance.choice(
                    (".error", ".swp", "~", ".clock", ".pending", "\n", " ")
                ),
                name.translate({48 + digit: 0x660 + digit for digit in range(10)}),
                f"{self.chance.getrandbits(64):016x}",
                self.chance.choice(
                    ("README", ".DS_Store", "inflight-", "clock-x", "-rf", "...")
                ),
            )
        )

    def put_random(self, count: int) -> None:
        for _ in range(count):
            directory = self.chance.choice(self.DIRECTORIES)
            name = self.mutated(self.valid())
            path = os.path.join(self.path, directory, name)
            state = "inflight" if directory == "inflight-gone" else directory
            fits = name not in ("", "PAUSED", ".", "..") and name[-37:] not in self.ids
            if not fits or len(os.fsencode(name)) > 200 or os.path.lexists(path):
                continue
            self.ids.add(name[-37:])
            kind = self.chance.choice(("file",) * 6 + ("folder", "link", "fifo"))
            payload = f"{len(self.put)} {directory}/{name}".encode(
                "utf-8", "surrogateescape"
            )
            make_entry(path, kind, record(payload), os.path.join(self.path, "target"))
            self.put[path] = state, kind, payload

    def run(self) -> None:
        for directory in self.DIRECTORIES:
            os.makedirs(os.path.join(self.path, directory), exist_ok=True)
        with open(os.path.join(self.path, "target"), "wb") as file:
            file.write(record(b"of a link"))
        if self.chance.random() < 0.3:
            self.put_random(20)  # before the queue makes the file clock-<boot>
        with mock.patch.object(femtoqueue, "time", self.clock):
            q = FemtoQueue(self.path, "n", timeout_stale_ms=5000)
            q.push(b"ours")
            q.push(b"ours", key="k")
            self.put_random(60)
            before = {path: fingerprint(path) for path in self.put}
            self.check_counts(q)
            waiting = "pending", "scheduled", "keys", "inflight"
            self.check_left(before, self.drain(q, *waiting))
            q.retry_failed()
            now_ns = self.drain(q, *waiting, "failed")
            q.purge(0, ("done", "failed"))
            q.close()
            self.check_left(before, now_ns)

    def named(self, state: str) -> list[tuple[str, str, bytes]]:
        rows = ((os.path.basename(path), *it) for path, it in self.put.items())
        return [
            (it[0], *it[2:]) for it in rows if it[1] == state and is_task(state, it[0])
        ]

    def check_counts(self, q: FemtoQueue) -> None:
        stats = q.stats()
        state: Any
        for state in (*femtoqueue.STATES, "keys"):
            count = stats.buffered if state == "keys" else getattr(stats, state)
            named = self.named(state)
            more = 2 * (state == "pending")
            wanted = len(named) + more
            demand(count == wanted, f"stats() counts {count} in {state}, not {wanted}")
            if state != "keys":
                found = {task.data for task in q.tasks(state)} - {b"ours"}
                files = {payload for _, kind, payload in named if kind == "file"}
                demand(found == files, f"tasks({state!r}) differs by {found ^ files}")

    def drain(self, q: FemtoQueue, *states: str) -> int:
        """Pop tasks for 20 simulated minutes, then check what was delivered.

        Each task that was in one of `states` must have been delivered once. A task with a due time
        or a deadline counts only if that time had passed five minutes before the end. Returns the
        time five minutes before the end, on the queue clock in nanoseconds.
        """
        for _ in range(4):
            while task := q.pop():
                self.delivered[task.data] += 1
                q.done(task)
            self.clock.advance(300)
        now_ns = q._clock.now_ns() - 300 * 10**9
        expected = Counter({b"ours": 2})
        for state in states:
            for name, kind, payload in self.named(state):
                if name.startswith("update~"):
                    continue  # such a payload ends with the task in front of it
                timed = state in ("scheduled", "inflight") or (
                    state == "keys" and "~" in name
                )
                clock_ns = (
                    now_ns if state == "inflight" else (self.clock.time() - 300) * 1e9
                )
                if kind == "file" and not (timed and int(name[:20]) > clock_ns):
                    expected[payload] += 1
        had = self.delivered
        demand(
            had == expected, f"too often: {had - expected}; missing: {expected - had}"
        )
        return now_ns

    def check_left(self, before: dict[str, tuple[int, ...]], now_ns: int) -> None:
        """Check that each entry with a foreign name still exists and was not changed.

        An entry in creating/ with a valid name may be removed when it is old, but not before.
        """
        for path, (state, _, _) in self.put.items():
            name = os.path.basename(path)
            if is_ours(state, name) and state in (*femtoqueue.STATES, "keys"):
                continue
            old = (
                state == "creating" and is_ours(state, name) and int(name[:20]) < now_ns
            )
            if not old:
                demand(os.path.lexists(path), f"{path!r} is gone")
                demand(fingerprint(path) == before[path], f"{path!r} was changed")


class Contents:
    """A seed of `contents`: damaged files of tasks, and damaged links of keys."""

    # The last two keys have the same lock.
    KEYS = ("a", "b", "c", "größe %", "k9", "k17")

    def __init__(self, path: str, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.clock = Clock(2e9, 1000)
        self.numbers = iter(range(10**9))
        self.keys: dict[bytes, str | None] = {}  # the key of each payload
        self.pushed: dict[str, bytes] = {}  # the newest payload of each id
        self.newest: dict[str | None, bytes] = {}  # the newest payload of each key
        # The damaged files, by id: the record that the file has now, None if it has no whole one.
        self.damaged: dict[str, Record | None] = {}
        self.delivered: Counter[bytes] = Counter()

    def payload(self) -> bytes:
        return b"%d:" % next(self.numbers) + self.chance.randbytes(
            self.chance.choice((0, 9, 5000))
        )

    def push(
        self, q: FemtoQueue, key: str | None = None, due_s: float | None = None
    ) -> None:
        data = self.payload()
        if due_s is None:
            ident = q.push(data, key=key)
        else:
            ident = q.schedule(data, (self.clock.time() + due_s) * 1e6, key=key)
        self.keys[data] = key
        self.pushed[ident] = data
        self.newest[key] = data

    def fill(self, q: FemtoQueue) -> None:
        """Make tasks in all states, some of them keyed and with a payload buffered behind them."""
        for _ in range(6):
            self.push(q)
        for key in self.KEYS:
            self.push(q, key, self.chance.choice((None, None, 1, 50)))
            self.clock.advance(1e-5)
        for _ in range(2):
            self.push(q, due_s=20)
        for _ in range(self.chance.randrange(6)):
            if task := q.pop():
                self.chance.choice((lambda task: None, q.fail, q.release))(task)
        self.failed = {task.id for task in q.tasks("failed")}
        for key in self.KEYS:
            if self.chance.random() < 0.4:
                q.take(key)
            if self.chance.random() < 0.4:
                self.push(q, key, self.chance.choice((None, None, 50)))
            self.clock.advance(1e-5)

    # Damage

    def damage_record(self, path: str) -> None:
        """Damage the file of a task. Overwrite the old bytes in place, or empty the file first."""
        with open(path, "rb") as file:
            content = file.read()
        content = self.chance.choice((self.corrupted, self.mislabelled))(content)
        with open(path, "r+b" if self.chance.random() < 0.5 else "wb") as file:
            file.truncate(len(content))
            file.write(content)
        self.damaged[path[-37:]] = read_record(content)

    def corrupted(self, content: bytes) -> bytes:
        at = self.chance.randrange(len(content))
        if self.chance.random() < 0.5:
            at = self.chance.randrange(min(len(content), 40))  # in the header
        flipped = bytes([content[at] ^ 1 << self.chance.randrange(8)])
        return self.chance.choice(
            (
                content[:at] + flipped + content[at + 1 :],
                content[:at] + flipped + content[at + 1 :],
                content[:at],
                content[:at] + bytes(len(content) - at),
                content[:at] + content[at + 1 :],
                content + self.chance.randbytes(1),
                self.chance.randbytes(len(content)),
                b"",
                content[content.index(b"\n") + 1 :] if b"\n" in content else b"\n",
            )
        )

    def mislabelled(self, content: bytes) -> bytes:
        """Return the whole payload of a record under a wrong header.

        The header lacks the key of the id, has another key, or quotes a key in a way that
        femtoqueue never uses. Or the header has no key, and its checksum or length is written in
        another form.
        """
        payload = content.partition(b"\n")[2]
        if self.chance.random() < 0.3:
            names = (
                b"",
                b"b",
                *b"% %4 %zz %41 %61 %6a %FF%FE %00 a,b %61b".split(),
                b"a" * 201,
            )
            return record(payload, self.chance.choice(names))
        fields = record(payload).partition(b"\n")[0].split(b" ")
        at = self.chance.choice((1, 2))
        ways = (b"%b ", b" %b", b"-%b", b"000%b", b"9%b", b"9999999999%b", b"%b\r")
        fields[at] = self.chance.choice(
            (*(way % fields[at] for way in ways), fields[at].upper())
        )
        return b" ".join(fields) + b"\n" + payload

    def damage_link(self, path: str, others: list[str]) -> None:
        """Damage the link of a key. It gets a random text, or names a file from `others`, or a file
        that does not exist. Or a file with that text takes its place, or it is removed."""
        text = os.readlink(path)
        task = text.split(" ")[0]
        other = os.path.relpath(self.chance.choice(others), self.path)
        bent = (
            os.fsdecode(self.corrupted(os.fsencode(text)).replace(b"\0", b"0")) or "0"
        )
        behind = f"{task} keys/{os.path.basename(other)}"
        moved = text.replace("pending/", "scheduled/").replace(
            "inflight-filler/", "pending/"
        )
        texts = (
            "nowhere",
            bent,
            bent,
            text * 2,
            other,
            other,
            f"{task} {other}",
            behind,
            moved,
        )
        os.unlink(path)
        way = self.chance.choice(("link", "link", "link", "link", "file", "nothing"))
        if way != "nothing":
            text = self.chance.choice(texts)
            make_entry(path, way, os.fsencode(text), text)

    def run(self) -> None:
        with mock.patch.object(femtoqueue, "time", self.clock):
            q = FemtoQueue(self.path, "filler", timeout_stale_ms=30_000)
            self.fill(q)
            paths = sorted(glob.glob(os.path.join(self.path, "*", "*")))
            links = [it for it in paths if os.path.islink(it)]
            paths = [it for it in paths if is_id(it[-37:]) and "/done/" not in it]
            for path in self.chance.sample(
                paths, min(len(paths), self.chance.randrange(6))
            ):
                self.damage_record(path)
            for path in self.chance.sample(
                links, self.chance.randrange(len(links) + 1)
            ):
                self.damage_link(path, paths)
            if self.chance.random() < 0.5:
                q.close()
            current = {path[-37:] for path in paths}
            self.work()
            self.check(current)

    def work(self) -> None:
        workers = [
            FemtoQueue(self.path, node, timeout_stale_ms=30_000) for node in "mn"
        ]
        pushing = self.chance.random() < 0.5
        for key in self.KEYS if pushing else ():
            # now: the tasks named by links still exist
            if self.chance.random() < 0.5:
                self.push_newer(self.chance.choice(workers), key)
        for _ in range(120):
            self.clock.advance(self.chance.choice((0.001, 0.3, 5, 60)))
            q = self.chance.choice(workers)
            key = self.chance.choice(self.KEYS)
            look = self.chance.randrange(12)
            if look == 0 and pushing:
                self.push_newer(q, key)
            elif look == 1:
                q.contains(key)
            elif look == 2:
                q.retry_failed()
            elif look == 3:
                [*q.tasks(self.chance.choice(femtoqueue.STATES)), q.stats()]
            else:
                self.deliver(q, q.take(key) if look == 4 else q.pop())
        for _ in range(4):
            self.clock.advance(700)
            while task := workers[0].pop():
                self.deliver(workers[0], task)
        for q in workers:
            q.close()

    def push_newer(self, q: FemtoQueue, key: str) -> None:
        """Push another payload of a key. The older payload then need not be delivered."""
        data = self.payload()
        policy: Any = self.chance.choice(("buffer", "update", "reject"))
        self.keys[data] = key
        with contextlib.suppress(KeyInFlight):
            q.push(data, key=key, if_in_flight=policy)
            self.newest.pop(key, None)

    def deliver(self, q: FemtoQueue, task: FemtoTask | None) -> None:
        if task is None:
            return
        was = task.data, task.key
        pushed = task.data in self.keys and self.keys[task.data] == task.key
        # A payload may move to the id of an older task of its key, so the id is not compared.
        damaged = was in self.damaged.values()
        demand(
            pushed or damaged,
            f"{was!r:.99} was delivered as {task.id}, but is in no file",
        )
        self.delivered[task.data] += 1
        q.done(task)

    def check(self, current: set[str]) -> None:
        """Check that each task that was not damaged was delivered.

        For a key only the newest payload counts. This payload may also be in a dead letter, if the
        damaged link of the key did not name its task.
        """
        q = FemtoQueue(self.path, "checker")
        dead = {task.data for task in q.tasks("failed")}
        q.close()
        for ident in sorted(current - self.damaged.keys()):
            data = self.pushed[ident]
            key = self.keys[data]
            if key is None:
                is_found = self.delivered[data] or ident in self.failed
                demand(is_found, f"{ident} was not damaged, but never delivered")
                is_wanted = data not in dead or ident in self.failed
                demand(is_wanted, f"{ident} was not damaged, but is quarantined")
            elif self.newest.get(key) == data:
                demand(
                    self.delivered[data] or data in dead, f"{ident} of {key!r} was lost"
                )


# Seeds


KINDS: dict[str, Callable[[str, int], object]] = {
    "lives": lambda path, seed: Fuzz(path, seed).run(STEPS),
    "names": lambda path, seed: Names(path, seed).run(),
    "contents": lambda path, seed: Contents(path, seed).run(),
}


def run_seed(kind: str, seed: int) -> None:
    """Run a seed. Raises an AssertionError, or another exception, if something is wrong."""
    directory = tempfile.TemporaryDirectory(
        prefix="femtoqueue-fuzz-", dir=memory_dir(), ignore_cleanup_errors=True
    )
    signal.signal(signal.SIGALRM, raise_hang)
    signal.alarm(PATIENCE_S)
    try:
        with directory as path:
            KINDS[kind](path, seed)
    finally:
        signal.alarm(0)


def run_seeds(kinds: Iterable[str], minutes: float, seed: int) -> None:
    """Run seeds of these kinds in turn for some minutes, at least one of each kind. Raises
    Violation for the first seed that fails."""
    end_s = time.monotonic() + minutes * 60
    for count in itertools.count(1):
        for kind in kinds:
            try:
                run_seed(kind, seed + count - 1)
            except Exception as error:
                what = f"{kind}, seed {seed + count - 1}: {type(error).__name__}"
                raise Violation(f"{what}: {error}") from error
        if time.monotonic() > end_s:
            say(f"{count} seeds of {', '.join(kinds)}: no failure")
            return


def main() -> None:
    options = proof_parser(__doc__)
    options.add_argument("--minutes", type=float, default=1, help="default: 1")
    only = "only seeds of these kinds"
    options.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help=only)
    args = options.parse_args()
    say(f"seed {args.seed}")
    femtoqueue._log().disabled = True
    with exit_on_failure(args.seed):
        if args.self_check:
            must_catch(args.seed, lambda kind: ["--only", kind, "--minutes", "2"])
        else:
            run_seeds(args.only, args.minutes, args.seed)


if __name__ == "__main__":
    main()
