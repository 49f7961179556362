"""Broken queues, and faults of one line: what the proofs and the tests must catch.

    python .ci/broken.py --check
    python .ci/broken.py --list
    python .ci/broken.py --tests [N] [--seed S] [--only TEXT] [--jobs N]

BROKEN is for the proofs: in each of these queues one promise is broken, by what stands in the place
of a public method, or of the os or fcntl that femtoqueue uses. Each names the proofs whose
--self-check must catch it; these take it from here. The inside of femtoqueue.py is not mentioned,
but where PRIVATE says so: a redesign leaves this list as it is.

FAULTS is for test.py: text of femtoqueue.py, and what to put in its place. The first line of each
says which promise the fault breaks, and after it which class of tests should find that. After a
redesign the text is another one; the promise is the same.

--tests makes a copy of the project for each fault, or for a sample of N by lot (--seed; the date),
and runs test.py there: first the class that should find it, then everything. It prints which test
did. The first failure ends it. A fault marked "hangs" may be caught by a test that does not end.
Exit status 1: a fault is caught by nothing, and a test is missing; or its text is not found exactly
once. --check only looks for the texts, and compiles what they make. --only: those with this text in
their first line.
"""

from __future__ import annotations

import argparse
import ast
import binascii
import concurrent.futures
import contextlib
import errno
import fcntl
import functools
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
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import femtoqueue
from femtoqueue import FemtoQueue, FemtoTask, LeaseLost, TicketQueue

CLASS_S, HANG_S, ALL_S = 180, 60, 900  # that test.py may take: a class, one that hangs, everything

# How a queue is broken


@dataclass(frozen=True)
class Broken:
    """A queue that breaks a promise. caught_by: by the name of the proof, what that needs to know:
    faults the calls at which a fault shows it (or SIGKILL), fuzz the kind of seeds, storm its rule,
    power_loss the file systems, hosts and nfs the phase, and what it must say."""

    name: str
    promise: str
    caught_by: dict[str, Any]
    patches: Callable[[], list[Any]]

    def begin(self) -> None:
        """Break the queues of this process, for good."""
        for patch in self.patches():
            patch.start()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Break the queues of this process while the block runs."""
        with contextlib.ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


BROKEN: dict[str, Broken] = {}


def breaks(promise: str, **caught_by: Any) -> Callable[[Callable[[], list[Any]]], None]:
    """Put a function that returns patches into BROKEN."""

    def add(patches: Callable[[], list[Any]]) -> None:
        name = patches.__name__
        BROKEN[name] = Broken(name, promise, caught_by, patches)

    return add


def caught_by(proof: str) -> dict[str, Any]:
    """Return the broken queues that a proof must catch, with what it needs to know of each."""
    return {name: it.caught_by[proof] for name, it in BROKEN.items() if proof in it.caught_by}


def break_queue(name: str) -> None:
    """Break the queues of this process, for good; "": don't."""
    if name:
        BROKEN[name].begin()


def broken(name: str) -> contextlib.AbstractContextManager[None]:
    """Break the queues of this process while the block runs; "": don't."""
    return BROKEN[name].applied() if name else contextlib.nullcontext()


class StandIn(types.ModuleType):
    """A module with some functions in the places of its own."""

    def __init__(self, real: Any, functions: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(functions, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def calls(**functions: Any) -> list[Any]:
    """Replace functions of the os that femtoqueue uses."""
    return [mock.patch.object(femtoqueue, "os", StandIn(os, functions))]


def methods(kind: Any = FemtoQueue, /, **functions: Any) -> list[Any]:
    return [mock.patch.object(kind, name, it) for name, it in functions.items()]


def at(path: str, dir_fd: int | None) -> str:
    return path if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"


def moves(move: Callable[[str, str], object], **others: Any) -> list[Any]:
    """Let move(source, target), of absolute paths, stand in the place of rename() and replace()."""

    def rename(
        source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        move(at(source, src_dir_fd), at(target, dst_dir_fd))

    return calls(rename=rename, replace=rename, **others)


def lies(source: str, target: str, of: str, to: str) -> bool:
    """Whether a path leads from a directory to another; both by how their names begin."""
    return os.path.dirname(source).rpartition("/")[2].startswith(of) and (
        os.path.dirname(target).rpartition("/")[2].startswith(to)
    )


def within(*names: str) -> tuple[Callable[[], bool], list[Any]]:
    """Return what tells whether this thread is in one of these methods, and patches for that."""
    depth = threading.local()

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            depth.now = getattr(depth, "now", 0) + 1
            try:
                return real(*args, **options)
            finally:
                depth.now -= 1

        return call

    wrapped = {name: wrap(getattr(FemtoQueue, name)) for name in names}
    return lambda: getattr(depth, "now", 0) > 0, methods(**wrapped)


def stays(of: str, to: str) -> list[Any]:
    """Let pop() and take() not move tasks from a directory to another, and believe they did."""
    is_taking, patches = within("pop", "take")

    def move(source: str, target: str) -> None:
        if not (is_taking() and lies(source, target, of, to)):
            os.replace(source, target)

    return [*patches, *moves(move)]


def no_one_dies(refuses: Callable[[bool], bool]) -> list[Any]:
    """Let the exclusive lock on a lease directory be refused. refuses(ours): ours is the one on
    which we have the shared lock."""
    ours: set[int] = set()

    def flock(fd: int, how: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        is_look = how == fcntl.LOCK_EX | fcntl.LOCK_NB and "/inflight-" in path
        if is_look and refuses(fd in ours):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        fcntl.flock(fd, how)
        ours.add(fd) if how & fcntl.LOCK_SH else None
        ours.discard(fd) if how & fcntl.LOCK_UN else None

    return [mock.patch.object(femtoqueue, "fcntl", StandIn(fcntl, {"flock": flock}))]


def locks_removed(looks_again: bool) -> list[Any]:
    """Let the lock file of a key be removed when it is unlocked. looks_again: who waited for it
    takes that of the new file, as far as the path tells."""
    opened: dict[int, str] = {}

    def record(path: str, flags: int, *args: Any, **options: Any) -> int:
        fd = os.open(path, flags, *args, **options)
        opened[fd] = path
        return fd

    def is_at_path(fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(opened[fd]), os.fstat(fd))
        except OSError:
            return False

    def flock(fd: int, how: int) -> None:
        is_key = "/locks/" in opened.get(fd, "")
        if is_key and how & fcntl.LOCK_UN:
            with contextlib.suppress(OSError):
                os.unlink(opened[fd])
        fcntl.flock(fd, how)
        while is_key and looks_again and how & fcntl.LOCK_EX and not is_at_path(fd):
            new = os.open(opened[fd], os.O_RDWR | os.O_CREAT, 0o666)
            os.dup2(new, fd, inheritable=False)
            os.close(new)
            fcntl.flock(fd, how)

    locks = mock.patch.object(femtoqueue, "fcntl", StandIn(fcntl, {"flock": flock}))
    return [*calls(open=record), locks]


# Pushes


@breaks(
    "push() acknowledges only what the disk took",
    faults=("writev", "write", "rename"),
    hosts=("quorum", "is lost|never delivered"),
)
def swallows() -> list[Any]:
    real = FemtoQueue.push

    def push(q: FemtoQueue, data: Any, **options: Any) -> str:
        try:
            return real(q, data, **options)
        except OSError:
            return f"{time.time_ns():020d}-00000000"

    return methods(push=push)


@breaks("a push that raises leaves nothing, in creating/ neither", faults=("writev", "write"))
def litters() -> list[Any]:
    is_pushing, patches = within("push")

    def unlink(path: str) -> None:
        if not (is_pushing() and "/creating/" in path):
            os.unlink(path)

    return [*patches, *calls(unlink=unlink, remove=unlink)]


@breaks(
    "when push() returns, the task is in pending/",
    faults=("SIGKILL",),
    storm="found",
)
def acknowledges_first() -> list[Any]:
    """The next push() or pop() moves it there."""
    real_push, real_pop = FemtoQueue.push, FemtoQueue.pop
    is_pushing: list[bool] = []
    waiting: list[tuple[str, str]] = []

    def move(source: str, target: str) -> None:
        if is_pushing and lies(source, target, "creating", "pending"):
            waiting.append((source, target))
        else:
            os.replace(source, target)

    def catch_up() -> None:
        while waiting:
            os.rename(*waiting.pop())

    def push(q: FemtoQueue, data: Any, *, key: str | None = None, **options: Any) -> str:
        if key is not None:
            return real_push(q, data, key=key, **options)
        catch_up()
        is_pushing.append(True)
        try:
            return real_push(q, data, **options)
        finally:
            is_pushing.pop()

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        catch_up()
        return real_pop(q, *args, **options)

    return [*methods(push=push, pop=pop), *moves(move)]


@breaks("a lost reply is no lost task: ENOENT is not ignored", nfs=("replay", "but: "))
def no_matter() -> list[Any]:
    def move(source: str, target: str) -> None:
        try:
            os.replace(source, target)
        except FileNotFoundError:
            if not lies(source, target, "creating", "pending"):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)

    return moves(move)


@breaks("nothing is delivered before its time", storm="due")
def due_early() -> list[Any]:
    real = FemtoQueue.schedule

    def schedule(q: FemtoQueue, data: Any, time_us: float, **options: Any) -> str:
        return real(q, data, time_us - 300_000, **options)

    return methods(schedule=schedule)


@breaks("of a key one task waits: a push replaces its payload", fuzz="lives", storm="keys")
def keys_append() -> list[Any]:
    real = FemtoQueue.push

    def push(q: FemtoQueue, data: Any, **_: Any) -> str:
        return real(q, data)

    return methods(push=push)


# Durability


def without(is_synced: Callable[[str], bool]) -> list[Any]:
    """Sync only what is_synced(path) says; not by syncfs(2), which would do it all."""

    def sync(fd: int) -> None:
        if is_synced(f"/proc/self/fd/{fd}"):
            os.fsync(fd)

    no_syncfs = mock.patch.object(femtoqueue, "_find_syncfs", return_value=None)  # PRIVATE
    return [*calls(fsync=sync, fdatasync=sync), no_syncfs]


@breaks("what sync_after_write acknowledged survives", power_loss=("ext4", "xfs", "btrfs"))
def no_fsync() -> list[Any]:
    return without(lambda path: False)


@breaks("sync_after_write: a task's bytes are synced", power_loss=("ext4",))
def directories_only() -> list[Any]:
    return without(os.path.isdir)


@breaks("sync_after_write: a task's name is synced", power_loss=("ext4-nojournal",))
def files_only() -> list[Any]:
    return without(lambda path: not os.path.isdir(path))


# Order, and moves


@breaks("the first in is the first out", fuzz="lives", hosts=("calm", "in the order"))
def youngest_first() -> list[Any]:
    real = FemtoQueue.pop

    def pop(q: FemtoQueue, timeout: float | None = 0, **options: Any) -> FemtoTask | None:
        for name in sorted(os.listdir(f"{q.data_dir}/pending"), reverse=True)[:5]:
            if re.search("(^|~)0[0-9]{19}-[0-9a-f]{8}$", name):
                task = q.take(id=name[-29:], **options)
                if task is not None:
                    return task
        return real(q, timeout, **options)

    return methods(pop=pop)


@breaks("setting the date does not change the order", fuzz="lives", storm="first")
def wall_clock() -> list[Any]:
    real = FemtoQueue.push
    is_pushing: list[bool] = []
    ids: list[str] = []

    def move(source: str, target: str) -> None:
        if is_pushing and lies(source, target, "creating", "pending"):
            order_ns = int(vars(femtoqueue)["time"].time() * 1e9)
            ids[:] = [f"{order_ns:020d}{target[-9:]}"]
            target = f"{os.path.dirname(target)}/{ids[0]}"
        os.replace(source, target)

    def push(q: FemtoQueue, data: Any, *, key: str | None = None, **options: Any) -> str:
        if key is not None:
            return real(q, data, key=key, **options)
        is_pushing.append(True)
        try:
            return real(q, data, **options) and ids[0]
        finally:
            is_pushing.pop()

    return [*methods(push=push), *moves(move)]


@breaks(
    "a task is in one state at each instant, and leased once",
    faults=("SIGKILL",),
    nfs=("calm", "leased twice|stands in"),
)
def link_and_unlink() -> list[Any]:
    def move(source: str, target: str) -> None:
        if os.path.isdir(source) or os.path.lexists(target):
            os.replace(source, target)
            return
        os.link(source, target)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)

    return moves(move)


@breaks("a task is in some state at each instant", faults=("SIGKILL",))
def unlinks_first() -> list[Any]:
    def move(source: str, target: str) -> None:
        if os.path.isdir(source) or lies(source, target, "creating", ""):
            os.replace(source, target)
            return
        with open(source, "rb") as file:
            content = file.read()
        os.unlink(source)
        with open(target, "wb") as file:
            file.write(content)

    return moves(move)


@breaks("the claim is one rename", hosts=("calm", "leased twice|stands in"))
def copy_and_unlink() -> list[Any]:
    def move(source: str, target: str) -> None:
        if not lies(source, target, "pending", "inflight-"):
            os.replace(source, target)
            return
        with contextlib.suppress(OSError):  # ENOENT or ESTALE: another was first
            shutil.copyfile(source, target)
            os.unlink(source)

    return moves(move)


# Deliveries


@breaks("pop() leases", storm="held")
def pop_without_lease() -> list[Any]:
    def pop(q: FemtoQueue, *_: Any, **__: Any) -> FemtoTask | None:
        return next(q.tasks("pending"), None)

    def done(q: FemtoQueue, task: FemtoTask) -> None:
        for name in os.listdir(f"{q.data_dir}/pending"):
            if name.endswith(task.id):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{q.data_dir}/pending/{name}", f"{q.data_dir}/done/{task.id}")

    return methods(pop=pop, done=done)


@breaks("an error is no empty queue", faults=("read",))
def says_empty() -> list[Any]:
    real = FemtoQueue.pop

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        try:
            return real(q, *args, **options)
        except OSError:
            return None

    return methods(pop=pop)


@breaks("after an error the same object works on", faults=("rename", "renameat"))
def gives_up() -> list[Any]:
    real = FemtoQueue.pop
    broke: set[int] = set()

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        try:
            return None if id(q) in broke else real(q, *args, **options)
        except OSError:
            broke.add(id(q))
            raise

    return methods(pop=pop)


@breaks("a task that could not be read is not kept", faults=("read",))
def keeps_claim() -> list[Any]:
    real = FemtoQueue.pop
    errors: list[OSError] = []

    def read(fd: int, count: int) -> bytes:
        try:
            return os.read(fd, count)
        except OSError as error:
            errors.append(error)
            raise

    def move(source: str, target: str) -> None:
        if not (errors and lies(source, target, "inflight-", "pending")):
            os.replace(source, target)

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        errors.clear()
        try:
            return real(q, *args, **options)
        finally:
            errors.clear()

    return [*methods(pop=pop), *moves(move, read=read)]


@breaks("done() raises what the disk says", faults=("rename",))
def done_anyway() -> list[Any]:
    real = FemtoQueue.done

    def done(q: FemtoQueue, task: FemtoTask) -> None:
        with contextlib.suppress(OSError):
            real(q, task)

    return methods(done=done)


@breaks(
    "who lost a lease can't end the task",
    fuzz="lives",
    storm="settled",
    hosts=("cut", r"\(\) by .*, when|not refused"),
)
def done_without_fence() -> list[Any]:
    """Another's lease is ended, if there is one."""
    real = FemtoQueue.done

    def done(q: FemtoQueue, task: FemtoTask) -> None:
        with contextlib.suppress(LeaseLost):
            real(q, task)
            return
        for directory in os.listdir(q.data_dir):
            for name in os.listdir(f"{q.data_dir}/{directory}") if "inflight-" in directory else ():
                if name.endswith(task.id):
                    source, target = f"{directory}/{name}", f"done/{task.id}"
                    with contextlib.suppress(OSError):
                        os.rename(f"{q.data_dir}/{source}", f"{q.data_dir}/{target}")

    return methods(done=done)


@breaks("release(front=True) leads to the front", fuzz="lives")
def front_is_back() -> list[Any]:
    real = FemtoQueue.release

    def release(q: FemtoQueue, task: FemtoTask, **how: Any) -> None:
        real(q, task, **{**how, "front": False})

    return methods(release=release)


@breaks("extend() renews the lease", fuzz="lives")
def extend_does_not() -> list[Any]:
    return methods(extend=lambda *_: None)


@breaks("attempts are counted", fuzz="lives")
def uncounted() -> list[Any]:
    def move(source: str, target: str) -> None:
        if lies(source, target, "inflight-", ("pending")):
            target = re.sub(r"~(\d+)~", lambda it: f"~{max(0, int(it[1]) - 1)}~", target)
        os.replace(source, target)

    return moves(move)


@breaks("max_attempts is a limit", fuzz="lives")
def no_limit() -> list[Any]:
    return stays("pending", "failed")


# Leases that end, and workers that die


@breaks("a lease ends at its deadline", fuzz="lives")
def endless_leases() -> list[Any]:
    return stays("inflight-", "pending")


@breaks("what a dead worker had comes back at once", fuzz="lives")
def dead_keep() -> list[Any]:
    return no_one_dies(lambda ours: not ours)


@breaks("who comes back under its node_id takes back what it had", fuzz="lives")
def comeback_finds_nothing() -> list[Any]:
    is_closing, patches = within("close")
    return [*patches, *no_one_dies(lambda ours: ours and not is_closing())]


@breaks("close() gives back what it had", fuzz="lives")
def goes_with_leases() -> list[Any]:
    is_closing, patches = within("close")
    return [*patches, *no_one_dies(lambda ours: is_closing())]


@breaks("what is due is delivered", fuzz="lives")
def due_stays() -> list[Any]:
    return stays("scheduled", "pending")


# Names and records


@breaks("rubbish stays as it is", storm="left over")
def tidies_up() -> list[Any]:
    real = FemtoQueue.pop

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        for directory in ("pending", "scheduled", "keys"):
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(f"{q.data_dir}/{directory}"):
                    if name[-1] not in "0123456789abcdef":
                        with contextlib.suppress(OSError):
                            os.unlink(f"{q.data_dir}/{directory}/{name}")
        return real(q, *args, **options)

    return methods(pop=pop)


@breaks("a name of another form is never delivered", fuzz="names")
def nineteen_digits() -> list[Any]:
    real = FemtoQueue.pop

    def pop(q: FemtoQueue, *args: Any, **options: Any) -> FemtoTask | None:
        pending = f"{q.data_dir}/pending"
        for name in os.listdir(pending):
            if re.fullmatch("[0-9]{19}-[0-9a-f]{8}", name):
                os.rename(f"{pending}/{name}", f"{pending}/0{name}")
        return real(q, *args, **options)

    return methods(pop=pop)


@breaks("what is not a whole record is never delivered", fuzz="contents")
def no_checksum() -> list[Any]:
    """Each checksum is right, as read() tells it."""
    header = re.compile(rb"FQ1 [0-9a-f]{8} [0-9]{1,19}(?: ([!-~]+))?\n").match

    def read(fd: int, count: int) -> bytes:
        content = os.read(fd, count)
        if form := header(content):
            crc = binascii.crc32(content[form.end() :], binascii.crc32(form[1] or b""))
            content = b"FQ1 %08x%b" % (crc, content[12:])
        return content

    return calls(read=read)


# Keys


@breaks("a newer payload behind a leased task is not lost", fuzz="lives")
def payload_forgotten() -> list[Any]:
    def move(source: str, target: str) -> None:
        if lies(source, target, "keys", "") and not os.path.lexists(target):
            os.unlink(source)
        else:
            os.replace(source, target)

    return moves(move)


@breaks("the state of a key that leads to another's task is not believed", fuzz="contents")
def states_believed() -> list[Any]:
    def parse(content: bytes, tag: str) -> dict[str, Any]:
        lines = content.decode("ascii", "replace").partition("\n\n")[0].splitlines()
        found = [form for line in lines if (form := femtoqueue._parse_key_state(line))]  # PRIVATE
        return {form[1]: femtoqueue._KeyState(form[2], form[4].strip("-")) for form in found}

    return [mock.patch.object(femtoqueue, "_parse_key_states", parse)]  # PRIVATE


@breaks("of a key one task is in flight", hosts=("keys", "crowded|overlapping"))
def removed_lock() -> list[Any]:
    return locks_removed(False)


@breaks("of a key one task is in flight, on NFS", nfs=("keys", "crowded|overlapping"))
def cached_path() -> list[Any]:
    return locks_removed(True)


@breaks("what is in flight is seen by its key", hosts=("keys", "found nothing"))
def waiting_only() -> list[Any]:
    real = FemtoQueue.peek

    def peek(q: FemtoQueue, id: str | None = None, *, key: str | None = None) -> FemtoTask | None:
        if key is None:
            return real(q, id)
        return next((task for task in q.tasks("pending") if task.key == key), None)

    def contains(q: FemtoQueue, key: str) -> bool:
        return peek(q, key=key) is not None

    return methods(peek=peek, contains=contains)


@breaks("turns do not overlap", hosts=("tickets", "turns overlap"))
def strangers_die() -> list[Any]:
    """The tickets of other hosts are passed over."""
    real = TicketQueue.is_head

    def is_head(line: TicketQueue, ticket: int) -> bool:
        real(line, ticket)  # it touches the ticket
        line.cleanup_stale()
        names = [name.split("~") for name in os.listdir(line.queue_dir) if name[0] == "0"]
        boots = {boot for number, boot, _ in names if int(number) == ticket}
        return ticket == min((int(it[0]) for it in names if it[1] in boots), default=0)

    return methods(TicketQueue, is_head=is_head)
