"""Use a queue on a full disk: tmpfs and ext4 file systems of a few MiB. Needs root, on Linux.

The program pushes tasks until a push raises ENOSPC, and then shows:
  - this push left no file, and every acknowledged task exists with its bytes;
  - pop() and done() work on the full disk;
  - the same object can push again when there is room;
  - on a file system without a free inode, a new worker raises ENOSPC, because it can't make its
    lease directory, and loses no task. A worker that has this directory drains the queue, and then
    the new one works.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile

from faults import CLOCK, Ledger, Life, Note, check_end, contents_of
from proof import (
    Violation,
    docstring_parser,
    exit_on_failure,
    need_root,
    say,
    small_disk,
)

from femtoqueue import FemtoQueue
from test import memory_dir

PAYLOADS = (100, 5_000, 1_000_000)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Filler(Life):
    """A life on a full disk. A Ledger checks the result of each step.

    keep_done is False, so that draining the queue makes room.
    """

    def __init__(self, path: str, sync: bool = False) -> None:
        self.path = path
        self.notes = list[Note]()
        self.ledger = Ledger([], "gone")
        self.sync = sync
        super().__init__(self.opened, CLOCK, self.noted)
        self.open()

    def opened(self, node_id: str) -> FemtoQueue:
        return FemtoQueue(
            self.path, node_id, sync_after_write=self.sync, keep_done=False
        )

    def noted(self, note: Note) -> None:
        self.notes.append(note)
        self.ledger.follow(note)

    def fill(self, size: int, *, many: bool = False) -> int:
        """Push until a push raises ENOSPC. Check that the queue has exactly the acknowledged tasks,
        and return their number."""
        names = (f"{number}/{size}" for number in itertools.count())
        while self.notes[-1][0] != "err":
            if many:
                self.push_many(*itertools.islice(names, 8))
            else:
                self.push(next(names))
        expect(self.notes[-1][-2] == errno.ENOSPC, f"not ENOSPC: {self.notes[-1]}")
        expect(not os.listdir(f"{self.path}/creating"), "creating/ is not empty")
        found = contents_of(self.queue)
        self.ledger.compare(found)
        return len(found)

    def drain_all(self) -> None:
        self.drain(10**6)
        expect(
            sum(note[0] == "err" for note in self.notes) == 1,
            "a call besides the push failed",
        )
        self.finish()
        with FemtoQueue(self.path, "looker") as q:
            check_end(q, contents_of(q), self.ledger)


def check(path: str, size: int, *, sync: bool, many: bool) -> int:
    life = Filler(os.path.join(path, "jobs"), sync)
    life.push("first")
    life.drain()  # makes the lease directory before the disk is full
    fitted = life.fill(size, many=many)
    life.drain_all()
    return fitted


def check_start(path: str) -> int:
    """Use up all inodes; then start a new worker, which can't take a task until another worker has
    drained the queue. Return how many tasks fitted."""
    life = Filler(os.path.join(path, "jobs"))
    life.push("first")
    life.drain()  # makes the lease directory of the first worker
    fitted = life.fill(100)
    with FemtoQueue(life.path, "n2", keep_done=False) as late:
        try:
            late.pop()
        except OSError as error:
            expect(error.errno == errno.ENOSPC, f"not ENOSPC: {error}")
        else:
            raise Violation("a worker without a lease directory took a task")
        life.drain_all()
        life.push("last")
        expect(
            late.pop() is not None, "the new worker does not work when there is room"
        )
    return fitted


def main() -> None:
    docstring_parser(__doc__).parse_args()
    need_root()
    tempfile.tempdir = memory_dir()  # for the images: faster than on a disk
    for kind, size_mib in (("tmpfs", 4), ("ext4", 12)):
        for size, sync, many in itertools.product(
            PAYLOADS, (False, True), (False, True)
        ):
            with small_disk(kind, size_mib) as path:
                fitted = check(path, size, sync=sync, many=many)
            say(f"{kind}, {size} bytes, sync={sync}, push_many={many}: {fitted} fitted")
    for kind, size_mib, options in (("tmpfs", 4, ",nr_inodes=100"), ("ext4", 12, "")):
        with small_disk(kind, size_mib, options) as path:
            say(f"{kind}, no inode left for a new worker: {check_start(path)} fitted")


if __name__ == "__main__":
    with exit_on_failure():
        main()
