"""Cut the power of a queue on ext4, xfs and btrfs: with sync_after_write nothing is lost.

    python .ci/power_loss.py [--cuts N] [--only KIND ...] [--seed S] [--self-check]

Needs root, on Linux, with loop devices, e2fsprogs, xfsprogs and btrfs-progs.

A life, as in faults.py, uses a queue on a file system in an image. It pushes, schedules, pops,
finishes, fails and releases tasks, and replaces keyed tasks. It writes a note outside the image
before each step and after the step has returned. The life takes half a second. In this time the
kernel writes only what an fsync() demands, because it keeps other dirty pages for 30 s.

At a random moment the image is cloned in one step, by the ioctl FICLONE of the xfs that holds the
image. Data that was not in the image by then is lost. The clone is mounted, and the mount replays
the journal. Then the queue is opened as after a reboot.

Proved, by the Ledger of faults.py:
  - Each acknowledged task exists once, with its own bytes, in the state that was acknowledged, or
    in the next state if a step was under way.
  - No torn task is delivered.
  - The queue works until it is drained.
Without sync_after_write only the last two points are proved.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator

import faults
from broken import must_catch
from proof import (
    Violation,
    exit_on_failure,
    make_image,
    mounted,
    name_of,
    need_root,
    proof_parser,
    run,
    say,
    small_disk,
)

import femtoqueue
from femtoqueue import CorruptTask, FemtoQueue
from test import on_boot

FICLONE = 0x40049409
# Size in MiB, command to make it, mount options. With commit=3600 the kernel commits the journal
# during a life only if fsync() asks for this.
FILE_SYSTEMS = {
    "ext4": (64, "mkfs.ext4 -q -F", "commit=3600"),
    "xfs": (320, "mkfs.xfs -q -f", "nouuid"),
    "btrfs": (256, "mkfs.btrfs -q -f", "commit=3600"),
}
KEYS = 4
SIZES = (0, 50, 5000, 100_000)


@contextlib.contextmanager
def xfs_in_memory() -> Iterator[str]:
    """Make an xfs in memory, which can clone a file in one step; yield its mount point."""
    with small_disk("tmpfs", 4 << 10) as memory:
        image, store = os.path.join(memory, "image"), os.path.join(memory, "store")
        os.mkdir(store)
        make_image(image, 3 << 10, "mkfs.xfs", "-q", "-m", "reflink=1")
        with mounted("-o", "loop,nouuid", image, store):
            yield store


def clone(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        fcntl.ioctl(new.fileno(), FICLONE, old.fileno())


class Work:
    """The life on the file system whose power is cut. The life settles each task before it makes
    the next step. So no task is in flight when the life pushes a payload of a key."""

    def __init__(self, path: str, seed: int, sync: bool) -> None:
        self.path = path
        self.seed = seed
        self.sync = sync
        self.keep_done = random.Random(seed).random() < 0.5
        self.done = "done" if self.keep_done else "gone"

    def make(self, node_id: str) -> FemtoQueue:
        return FemtoQueue(
            self.path,
            node_id,
            None,
            sync_after_write=self.sync,
            keep_done=self.keep_done,
        )

    def play_forever(self, life: faults.Life) -> None:
        chance = random.Random(self.seed)
        names = (f"{number}/{chance.choice(SIZES)}" for number in itertools.count())
        life.open()
        while True:
            step = chance.choice(("push", "push", "many", "key", "take", "take"))
            if step == "push":
                in_s = chance.choice((0.001, 1000)) if chance.random() < 0.3 else None
                life.push(next(names), in_s=in_s)
            elif step == "many":
                life.push_many(*itertools.islice(names, 5))
            elif step == "key":
                life.push(next(names), f"k{chance.randrange(KEYS)}")
            else:
                how = chance.choice(("done", "done", "fail", "release"))
                delay = (
                    {"delay_s": chance.choice((0, 1000))} if how == "release" else {}
                )
                life.end(life.pop(), how, **delay)

    def check(self, notes: list[faults.Note], certain: int) -> int:
        """Open the queue after the cut, drain it and check it. Return how many tasks it had.

        The first `certain` notes were written before the cut. The other notes were written during
        the clone, so that the cut may be between any two of them.
        """
        with on_boot("the next boot"), faults.made_up("next") as clock:
            clock.advance(faults.AN_HOUR_S + faults.LATER_S)
            q = self.make("n1")
            # A push_many() that was under way may leave torn tasks. found_in() leaves them out.
            found = faults.found_in(q)
            if self.sync:
                ledger = self.agreeing(notes, certain, found)
            else:
                ledger = faults.Ledger([], self.done)
                states = (
                    (it, "live" if found[it] in faults.LIVE else found[it])
                    for it in found
                )
                ledger.slots = [faults.Slot({name}, {state}) for name, state in states]
                aside = buffered_in(q) - found.keys()
                ledger.slots += [faults.Slot({name}, later=True) for name in aside]
            ledger.end_leases()
            life = faults.Life(lambda _: q, clock, ledger.follow)
            life.open()
            life.drain(10**6)
            life.finish()
            with FemtoQueue(self.path, "looker") as q:
                faults.check_end(q, faults.found_in(q), ledger)
        return len(found)

    def agreeing(
        self, notes: list[faults.Note], certain: int, found: dict[str, str]
    ) -> faults.Ledger:
        """Return a ledger that agrees with the tasks that were found.

        The ledger of the first `certain` notes is tried first, then the ledger with one more note,
        and so on. Raises Violation if no ledger agrees.
        """
        for cut in range(certain, len(notes) + 1):
            ledger = faults.Ledger(notes[:cut], self.done)
            with contextlib.suppress(Violation):
                ledger.compare(found)
                break
        ledger.compare(found)
        return ledger


def buffered_in(q: FemtoQueue) -> set[str]:
    """Return the names of the whole payloads in keys/. If power loss has undone a part of a push,
    such a payload becomes a task, or is removed because a younger one has replaced it."""
    found = set()
    for entry in q._files.entries("keys"):
        with contextlib.suppress(CorruptTask):
            found.add(name_of(q._files.read_path(entry.path)[0]))
    return found


def one_cut(place: str, kind: str, seed: int, sync: bool) -> int:
    chance = random.Random(seed)
    paths = (os.path.join(place, name) for name in ("image", "after", "mnt", "log"))
    image, after, target, log_path = paths
    os.mkdir(target)
    size_mib, mkfs, options = FILE_SYSTEMS[kind]
    make_image(image, size_mib, *mkfs.split())
    work = Work(os.path.join(target, "jobs"), seed, sync)
    with mounted("-o", f"loop,{options}", image, target):
        FemtoQueue(work.path, "maker", sync_after_write=True).close()
        note = faults.note_writer(log_path)
        child = os.fork()
        if child == 0:
            faults.play(work.play_forever, work.make, note, f"{seed}")
        time.sleep(0.05 + chance.random() * 0.2)
        if not sync:  # as the kernel does from time to time
            run("sync", "--file-system", target)
        time.sleep(chance.random() * 0.2)
        certain = len(faults.read_notes(log_path))
        clone(image, after)
        notes = faults.read_notes(log_path)  # also the notes written during the clone
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if kind == "btrfs":
        run("btrfs", "device", "scan", "--forget")
    with mounted("-o", f"loop,{options}", after, target):
        return work.check(notes, certain)


def cuts(store: str, kind: str, count: int, seed: int, *, sync: bool = True) -> None:
    """Cut the power of `count` lives, and print the result. Raises Violation for the first life
    that broke a promise."""
    tasks = 0
    for number in range(seed, seed + count):
        try:
            with tempfile.TemporaryDirectory(dir=store) as place:
                tasks += one_cut(place, kind, number, sync)
        except (Violation, OSError) as error:
            raise Violation(f"{kind}, sync={sync}, seed {number}: {error!r}") from error
    say(f"{kind}, sync={sync}: {count} cuts, {tasks} tasks, 0 violations")


def main() -> None:
    options = proof_parser(__doc__)
    per = "power cuts per file system (default: 30)"
    options.add_argument("--cuts", type=int, default=30, help=per)
    only = "only these file systems"
    options.add_argument(
        "--only", choices=FILE_SYSTEMS, nargs="+", default=FILE_SYSTEMS, help=only
    )
    args = options.parse_args()
    say(f"seed {args.seed}")
    femtoqueue._log().disabled = True
    with exit_on_failure(args.seed):
        need_root()
        if args.self_check:
            must_catch(args.seed, lambda kind: ["--only", kind, "--cuts", "40"])
            return
        with xfs_in_memory() as store:
            for kind in args.only:
                cuts(store, kind, args.cuts, args.seed)
                cuts(store, kind, max(1, args.cuts // 3), args.seed, sync=False)


if __name__ == "__main__":
    main()
