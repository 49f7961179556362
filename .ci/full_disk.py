"""A queue on a disk that is really full: tmpfs and ext4 mounts of a few MiB. Needs root, on Linux.

Fills the file system by pushing until ENOSPC, then shows: the push that raised left nothing
behind, every acknowledged task is there and whole, pop() and done() work on the full disk, and
when there is room again the same object pushes on. Where inodes have run out, and mkdir() fails,
a worker that starts now drains the queue all the same.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterator

from proof import Violation, ends, make_image, mounted, need_root, say

from femtoqueue import FemtoQueue

PAYLOADS = (100, 5_000, 1_000_000)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


@contextlib.contextmanager
def small_disk(kind: str, size_mib: int, options: str = "") -> Iterator[str]:
    """A small file system of a kind, mounted on a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as work:
        target, image = os.path.join(work, "mnt"), os.path.join(work, "image")
        os.mkdir(target)
        what = ["-t", "tmpfs", "-o", f"size={size_mib}m{options}", "none"]
        if kind != "tmpfs":
            make_image(image, size_mib, f"mkfs.{kind}", "-q")
            what = ["-o", "loop", image]
        with mounted(*what, target):
            yield target


def push_until_full(q: FemtoQueue, size: int, *, many: bool) -> list[str]:
    """Return the ids that were acknowledged before ENOSPC."""
    ids: list[str] = []
    while True:
        try:
            if many:
                ids += q.push_many([os.urandom(size)] * 8)
            else:
                ids.append(q.push(os.urandom(size)))
        except OSError as error:
            expect(error.errno == errno.ENOSPC, f"ENOSPC was to surface, not {error}")
            return ids


def drain(q: FemtoQueue) -> list[bytes]:
    payloads = []
    while task := q.pop():
        payloads.append(task.data)
        q.done(task)
    return payloads


def check(path: str, size: int, *, sync: bool, many: bool) -> int:
    """Fill, drain on the full disk, push again. Returns how many tasks fitted."""
    jobs = os.path.join(path, f"jobs-{size}-{sync}-{many}")
    q = FemtoQueue(jobs, "n1", sync_after_write=sync, keep_done=False)
    q.push(b"first")
    expect(drain(q) == [b"first"], "the queue works")  # and its lease directory is there
    ids = push_until_full(q, size, many=many)
    expect(not os.listdir(os.path.join(jobs, "creating")), "creating/ was to be empty")
    waiting = sorted(os.listdir(os.path.join(jobs, "pending")))
    # Of the batch that met the full disk, the first ones are in: whole, and counted in the error.
    expect(waiting[: len(ids)] == ids, "an acknowledged task is not there")
    expect(many or len(waiting) == len(ids), "a push that raised left a task")
    expect([len(data) for data in drain(q)] == [size] * len(waiting), "all was to be delivered")
    expect(q.stats().failed == 0, "something was corrupt")
    q.push(b"there is room again")
    expect(drain(q) == [b"there is room again"], "the same object works on")
    q.close()
    return len(ids)


def check_start(path: str) -> int:
    """Use up all inodes; then let a new worker start and drain. Returns how many tasks fitted."""
    jobs = os.path.join(path, "jobs")
    ids = push_until_full(FemtoQueue(jobs, "n1"), 100, many=False)
    with FemtoQueue(jobs, "n2", keep_done=False) as q:
        expect(len(drain(q)) == len(ids), "the new worker was to drain the queue")
    with FemtoQueue(jobs, "n3") as q:
        q.push(b"there is room again")
        expect(drain(q) == [b"there is room again"], "the next worker works too")
        expect(os.path.isdir(os.path.join(jobs, "spare")), "the spare directory was to be back")
    return len(ids)


def main() -> None:
    need_root()
    passed = 0
    for kind, size_mib in (("tmpfs", 4), ("ext4", 12)):
        for size, sync, many in itertools.product(PAYLOADS, (False, True), (False, True)):
            with small_disk(kind, size_mib) as path:
                fitted = check(path, size, sync=sync, many=many)
            say(f"{kind}, {size} bytes, sync={sync}, push_many={many}: {fitted} fitted")
            passed += 1
    for kind, size_mib, options in (("tmpfs", 4, ",nr_inodes=100"), ("ext4", 12, "")):
        with small_disk(kind, size_mib, options) as path:
            say(f"{kind}, no inode left for a new worker: {check_start(path)} fitted")
        passed += 1
    say(f"{passed} passed, 0 failed")


if __name__ == "__main__":
    with ends():
        main()
