"""A queue on a disk that is really full: tmpfs and ext4 mounts of a few MiB. Needs root, on Linux.

Fills the file system by pushing until ENOSPC, then shows: the push that raised left nothing
behind, every acknowledged task is there and whole, pop() and done() work on the full disk, and
when there is room again the same object pushes on. Where inodes have run out, and mkdir() fails,
a worker that starts now drains the queue all the same.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile

from faults import CLOCK, Ledger, Life, Note, check_end, stands
from proof import Violation, docstring_parser, exit_on_failure, need_root, say, small_disk

from femtoqueue import FemtoQueue
from test import memory_dir

PAYLOADS = (100, 5_000, 1_000_000)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Filler(Life):
    """A life on a full disk, whose answers a Ledger checks. keep_done=False: room comes back."""

    def __init__(self, path: str, sync: bool = False) -> None:
        self.path, self.notes, self.ledger = path, list[Note](), Ledger([], "gone")
        self.sync = sync
        super().__init__(self.opened, CLOCK, self.noted)
        self.open()

    def opened(self, node_id: str) -> FemtoQueue:
        return FemtoQueue(self.path, node_id, sync_after_write=self.sync, keep_done=False)

    def noted(self, note: Note) -> None:
        self.notes.append(note)
        self.ledger.follow(note)

    def fill(self, size: int, *, many: bool = False) -> int:
        """Push until ENOSPC. Return how many tasks fitted: all that were acknowledged, no other."""
        names = (f"{number}/{size}" for number in itertools.count())
        while self.notes[-1][0] != "err":
            if many:
                self.push_many(*itertools.islice(names, 8))
            else:
                self.push(next(names))
        expect(self.notes[-1][-2] == errno.ENOSPC, f"ENOSPC was to surface: {self.notes[-1]}")
        expect(not os.listdir(f"{self.path}/creating"), "creating/ was to be empty")
        found = stands(self.queue)
        self.ledger.compare(found)
        return len(found)

    def drain_all(self) -> None:
        """Drain the full disk, at the first attempt; then the same object works on."""
        self.drain(10**6)
        expect(sum(note[0] == "err" for note in self.notes) == 1, "only the push was to raise")
        self.finish()
        with FemtoQueue(self.path, "looker") as q:
            check_end(q, stands(q), self.ledger)


def check(path: str, size: int, *, sync: bool, many: bool) -> int:
    """Fill, drain on the full disk, push again. Return how many tasks fitted."""
    life = Filler(os.path.join(path, "jobs"), sync)
    life.push("first")
    life.drain()  # the lease directory is there
    fitted = life.fill(size, many=many)
    life.drain_all()
    return fitted


def check_start(path: str) -> int:
    """Use up all inodes; then let a new worker start and drain. Return how many tasks fitted."""
    life = Filler(os.path.join(path, "jobs"))
    fitted = life.fill(100)
    life.open("n2")
    life.drain_all()
    expect(os.path.isdir(os.path.join(life.path, "spare")), "the spare directory was to be back")
    return fitted


def main() -> None:
    docstring_parser(__doc__).parse_args()
    need_root()
    tempfile.tempdir = memory_dir()  # for images: full ones are full as soon in memory
    for kind, size_mib in (("tmpfs", 4), ("ext4", 12)):
        for size, sync, many in itertools.product(PAYLOADS, (False, True), (False, True)):
            with small_disk(kind, size_mib) as path:
                fitted = check(path, size, sync=sync, many=many)
            say(f"{kind}, {size} bytes, sync={sync}, push_many={many}: {fitted} fitted")
    for kind, size_mib, options in (("tmpfs", 4, ",nr_inodes=100"), ("ext4", 12, "")):
        with small_disk(kind, size_mib, options) as path:
            say(f"{kind}, no inode left for a new worker: {check_start(path)} fitted")


if __name__ == "__main__":
    with exit_on_failure():
        main()
