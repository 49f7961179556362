"""What femtoqueue promises, by test: `python test.py [-v] [Class[.test]]`.

Classes are promises, tests are outcomes. Proved here, with real processes: order, leases and
their fencing, liveness, exactly one delivery while nobody dies, no loss when workers are killed
(before every system call of every operation, too), what is corrupt or foreign in the directories,
every failing system call of an operation, editing by hand. Clocks are faked, never slept on.

Not proved here: power loss, full disks and file systems other than the one that holds the
temporary directory (.ci/ has what needs root), and what needs fork() where there is none.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import femtoqueue
from femtoqueue import CorruptTask, FemtoQueue, FemtoQueueError, FemtoTask, LeaseLost, TaskNotFound

HERE = os.path.dirname(os.path.abspath(__file__))
SYSCALLS = tuple(
    "open read write writev close fsync rename replace link unlink mkdir rmdir listdir scandir "
    "stat lstat fstat chmod lseek".split()
)
FORK = unittest.skipUnless(hasattr(os, "fork"), "needs fork()")


class Clock:
    """Stands in for the time module in femtoqueue: real time, shifted by hand."""

    def __init__(self) -> None:
        self.wall_shift_s = self.monotonic_shift_s = 0.0

    def time(self) -> float:
        return time.time() + self.wall_shift_s

    def monotonic(self) -> float:
        return time.monotonic() + self.monotonic_shift_s

    def advance(self, seconds: float) -> None:
        self.wall_shift_s += seconds
        self.monotonic_shift_s += seconds


@contextlib.contextmanager
def hooked(hook: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call hook(name, arguments) before each system call that femtoqueue makes."""
    fake = types.ModuleType("os")
    fake.__dict__.update(os.__dict__)

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            hook(name, args)
            return function(*args, **kwargs)

        return call

    for name in SYSCALLS:
        if hasattr(os, name):
            setattr(fake, name, wrap(name, getattr(os, name)))
    with mock.patch.object(femtoqueue, "os", fake):
        yield


class Child:
    """A forked process that runs work(child): it says lines to us, and waits for our go()."""

    def __init__(self, work: Callable[[Child], object]) -> None:
        said, says = os.pipe()
        waits, goes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(said)
            os.close(goes)
            self._says, self._waits = says, waits
            self._run(work)
        os.close(says)
        os.close(waits)
        self._said, self._goes = os.fdopen(said, encoding="ascii"), goes
        self._status: int | None = None

    def _run(self, work: Callable[[Child], object]) -> None:
        code = 1
        try:
            work(self)
            code = 0
        except BaseException as error:
            import traceback

            traceback.print_exception(error)
        finally:
            os._exit(code)

    def say(self, text: str) -> None:
        os.write(self._says, f"{text}\n".encode("ascii"))

    def wait_for_go(self) -> None:
        if not os.read(self._waits, 1):
            os._exit(0)  # our parent is gone

    def line(self) -> str:
        return self._said.readline().rstrip("\n")

    def go(self) -> None:
        os.write(self._goes, b"g")

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def finish(self) -> tuple[list[str], int]:
        """Return what it said since, and its exit status, when it has ended."""
        lines = [line.rstrip("\n") for line in self._said]
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._said.close()
            os.close(self._goes)
        return lines, self._status

    def end(self) -> None:
        if self._status is None:
            self.kill()
            self.finish()


class QueueCase(unittest.TestCase):
    """A test with a queue directory, whose invariants are checked when it ends."""

    foreign: tuple[str, ...] = ()

    def setUp(self) -> None:
        self.path = tempfile.mkdtemp(prefix="femtoqueue-test-")
        self.addCleanup(shutil.rmtree, self.path, ignore_errors=True)
        femtoqueue._log().disabled = True  # corrupt tasks are logged, and are many here

    def queue(self, node_id: str | None = "n1", **settings: Any) -> FemtoQueue:
        q = FemtoQueue(self.path, node_id, **settings)
        self.addCleanup(q.close)
        return q

    def child(self, work: Callable[[Child], object]) -> Child:
        child = Child(work)
        self.addCleanup(child.end)
        return child

    def clock(self) -> Clock:
        clock = Clock()
        patch = mock.patch.object(femtoqueue, "time", clock)
        patch.start()
        self.addCleanup(patch.stop)
        return clock

    def pop(self, q: FemtoQueue) -> FemtoTask:
        task = q.pop()
        assert task is not None, "a task was there to be popped"
        self.check_invariants()
        return task

    def drain(self, q: FemtoQueue) -> list[bytes]:
        """Pop and finish everything; return the payloads in their order."""
        payloads = []
        while task := q.pop():
            payloads.append(task.data)
            q.done(task)
        self.check_invariants()
        return payloads

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(os.path.join(self.path, directory)))

    def file(self, *parts: str) -> str:
        return os.path.join(self.path, *parts)

    def put(self, name: str, content: bytes, directory: str = "pending") -> str:
        path = self.file(directory, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def check_invariants(self, *, leftovers: bool = False) -> dict[str, str]:
        """Every task stands in one state, under a name of its form; return id -> directory."""
        where: dict[str, str] = {}
        for directory in sorted(os.listdir(self.path)):
            state = "inflight" if directory.startswith("inflight-") else directory
            if state not in femtoqueue.STATES:
                continue
            for name in self.names(directory):
                form = femtoqueue._PARSE[state](name)
                if form is None:
                    known = (state == "failed" and name.endswith(".error")) or name in self.foreign
                    self.assertTrue(known, f"{directory}/{name} is of no form")
                    continue
                self.assertNotIn(form["id"], where, f"in {directory} too")
                where[form["id"]] = directory
        if not leftovers:
            self.assertEqual(set(self.names("creating")) - set(self.foreign), set())
        return where

    def states(self) -> Counter[str]:
        return Counter(self.check_invariants().values())


# A task's life


class Lifecycle(QueueCase):
    def test_a_task_goes_from_pending_through_in_flight_to_done(self) -> None:
        """Each method leaves the task in one directory, under its id or its lease."""
        q = self.queue()
        ident = q.push(b"x")
        self.assertEqual(self.names("pending"), [ident])
        task = self.pop(q)
        self.assertEqual((task.id, task.data, task.attempts), (ident, b"x", 1))
        self.assertEqual((self.names("pending"), len(self.names("inflight-n1"))), ([], 1))
        self.assertIsNone(q.done(task))
        self.assertEqual((self.names("inflight-n1"), self.names("done")), ([], [ident]))
        self.assertIsNone(q.pop())

    def test_file_is_one_header_line_and_the_payload(self) -> None:
        """cat, grep and tail -n +2 work on a task's file."""
        q = self.queue()
        with open(self.file("pending", q.push(b"two\nlines")), "rb") as file:
            self.assertEqual(file.read(), b"FQ1 b8957a1f 9\ntwo\nlines")

    def test_payloads_of_all_sizes_come_out_as_they_went_in(self) -> None:
        """From nothing to 64 MB, and around the sizes at which reading changes its way."""
        q = self.queue()
        for size in (0, 1, 100, 4079, 4080, 4081, 4082, 4096, 10**6, 64 * 10**6):
            payload = random.Random(size).randbytes(size)
            q.push(payload)
            task = self.pop(q)
            self.assertTrue(task.data == payload, f"{size} bytes")
            q.done(task)

    def test_bytes_like_payloads_are_taken_as_their_bytes(self) -> None:
        """bytearray and any contiguous memoryview, whatever the size of its items."""
        q = self.queue()
        q.push(bytearray(b"ab"))
        q.push(memoryview(b"abcd")[1:3])
        q.push(memoryview(b"abcdefgh").cast("I"))
        self.assertEqual(self.drain(q), [b"ab", b"bc", b"abcdefgh"])

    def test_push_of_what_is_no_bytes_is_a_type_error_and_leaves_nothing(self) -> None:
        """A str is told to encode itself; a strided view and an int are refused."""
        q = self.queue()
        with self.assertRaisesRegex(TypeError, "encode it"):
            q.push("text")  # type: ignore[arg-type]
        bad: list[Any] = [7, None, memoryview(b"abcd")[::2], ["x"]]
        for data in bad:
            with self.assertRaisesRegex(TypeError, "bytes-like"):
                q.push(data)
            with self.assertRaises(TypeError):
                q.schedule(data, 0)
        self.assertEqual(self.states(), {})

    def test_done_without_keeping_deletes_the_file(self) -> None:
        q = self.queue(keep_done=False)
        q.push(b"x")
        q.done(self.pop(q))
        self.assertEqual(self.states(), {})

    def test_fail_sets_the_task_aside_with_its_reason(self) -> None:
        """A text is kept as it is; no reason leaves no .error."""
        q = self.queue()
        first, second = q.push(b"1"), q.push(b"2")
        q.fail(self.pop(q), "no such image")
        q.fail(self.pop(q))
        self.assertEqual(self.names("failed"), [first, f"{first}.error", second])
        with open(self.file("failed", f"{first}.error"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "no such image\n")

    def test_fail_with_an_exception_keeps_its_traceback(self) -> None:
        q = self.queue()
        q.push(b"1")
        task = self.pop(q)
        try:
            raise KeyError("größe \udc80")
        except KeyError as error:
            q.fail(task, error)
        with open(self.file("failed", f"{task.id}.error"), encoding="utf-8") as file:
            text = file.read()
        self.assertIn("Traceback", text)
        self.assertIn("test_fail_with_an_exception", text)

    def test_fail_with_another_reason_type_is_refused_and_the_lease_stays(self) -> None:
        q = self.queue()
        q.push(b"1")
        task = self.pop(q)
        with self.assertRaisesRegex(TypeError, "text or an exception"):
            q.fail(task, 7)  # type: ignore[arg-type]
        q.done(task)
        self.assertEqual(self.states(), {"done": 1})

    def test_failing_again_without_a_reason_leaves_no_old_reason(self) -> None:
        """A person's `mv failed/ID pending/` leaves ID.error behind; it must not lie later."""
        q = self.queue()
        q.push(b"1")
        task = self.pop(q)
        q.fail(task, "the first time")
        os.rename(self.file("failed", task.id), self.file("pending", task.id))
        q.fail(self.pop(q))
        self.assertEqual(self.names("failed"), [task.id])

    def test_release_puts_back_to_the_back_or_front_or_after_a_delay(self) -> None:
        q, clock = self.queue(), self.clock()
        for payload in (b"1", b"2", b"3"):
            q.push(payload)
        q.release(self.pop(q))
        two = self.pop(q)
        q.release(two, front=True)
        again = self.pop(q)
        self.assertEqual((again.data, again.attempts), (b"2", 2))
        q.release(again, delay_s=60)
        self.assertEqual(len(self.names("scheduled")), 1)
        self.assertEqual(self.drain(q), [b"3", b"1"])
        clock.advance(61)
        self.assertEqual(self.drain(q), [b"2"])

    def test_release_refuses_a_delay_to_the_front_and_a_negative_one(self) -> None:
        q = self.queue()
        q.push(b"1")
        task = self.pop(q)
        for arguments in (
            {"front": True, "delay_s": 1},
            {"delay_s": -1},
            {"delay_s": float("nan")},
        ):
            with self.assertRaises(ValueError):
                q.release(task, **arguments)  # type: ignore[arg-type]
        with self.assertRaises(TypeError):
            q.release(task, delay_s="1")  # type: ignore[arg-type]
        q.done(task)

    def test_scheduled_task_comes_when_it_is_due_and_joins_the_back(self) -> None:
        q, clock = self.queue(), self.clock()
        ident = q.schedule(b"later", (time.time() + 100) * 1e6)
        self.assertIsNone(q.pop())
        clock.advance(99)
        q.push(b"before")
        self.assertEqual(self.drain(q), [b"before"])
        clock.advance(2)
        q.push(b"a moment earlier, but after the other came due")
        task = self.pop(q)
        self.assertIn(task.data, (b"later", b"a moment earlier, but after the other came due"))
        self.assertIn(ident, self.check_invariants())

    def test_schedule_in_the_past_is_due_at_once(self) -> None:
        """As in 0.4: a time that has passed, even before 1970, is no error."""
        q = self.queue()
        q.schedule(b"b", 1)
        q.schedule(b"a", -5e15)
        self.assertEqual(self.drain(q), [b"a", b"b"])

    def test_schedule_refuses_times_that_are_none(self) -> None:
        q = self.queue()
        for bad in (float("nan"), float("inf"), 9e15, 1e300):
            with self.assertRaises(ValueError):
                q.schedule(b"x", bad)
        not_numbers: list[Any] = ["1", None, True]
        for bad in not_numbers:
            with self.assertRaises(TypeError):
                q.schedule(b"x", bad)
        self.assertEqual(self.states(), {})

    def test_retry_puts_a_failed_task_at_the_back_with_no_attempts(self) -> None:
        q = self.queue()
        ident = q.push(b"1")
        q.fail(self.pop(q), "why")
        q.push(b"2")
        q.retry(ident)
        self.assertEqual(self.names("failed"), [])
        self.assertEqual(self.pop(q).data, b"2")
        self.assertEqual(self.pop(q).attempts, 1)

    def test_retry_failed_retries_all_in_order(self) -> None:
        q = self.queue()
        for payload in (b"1", b"2", b"3"):
            q.push(payload)
        for _ in range(3):
            q.fail(self.pop(q), "why")
        self.assertEqual((q.retry_failed(), q.retry_failed()), (3, 0))
        self.assertEqual(self.drain(q), [b"1", b"2", b"3"])

    def test_retry_of_what_is_not_failed_says_so(self) -> None:
        q = self.queue()
        ident = q.push(b"1")
        with self.assertRaisesRegex(TaskNotFound, ident):
            q.retry(ident)
        for bad in ("", "../pending/x", "x" * 29):
            with self.assertRaisesRegex(ValueError, "not the id"):
                q.retry(bad)
        with self.assertRaises(TypeError):
            q.retry(None)  # type: ignore[arg-type]
        self.assertEqual(self.states(), {"pending": 1})

    def test_purge_deletes_what_was_finished_long_enough_ago(self) -> None:
        """Age counts from done() or fail(), not from push()."""
        q, clock = self.queue(), self.clock()
        q.push_many([b"done", b"failed", b"waiting"])
        q.done(self.pop(q))
        q.fail(self.pop(q), "why")
        self.assertEqual(q.purge(60), 0)
        clock.advance(61)
        self.assertEqual((q.purge(60), self.names("done")), (1, []))
        self.assertEqual((q.purge(60, states=["failed"]), self.names("failed")), (1, []))
        self.assertEqual(self.states(), {"pending": 1})

    def test_purge_of_failed_removes_reasons_whose_task_is_gone(self) -> None:
        q, clock = self.queue(), self.clock()
        q.push(b"1")
        task = self.pop(q)
        q.fail(task, "why")
        os.unlink(self.file("failed", task.id))
        clock.advance(61)
        self.assertEqual((q.purge(60, "failed"), self.names("failed")), (0, []))

    def test_purge_refuses_other_states_and_ages(self) -> None:
        q = self.queue()
        q.push(b"1")
        with self.assertRaisesRegex(ValueError, "pending"):
            q.purge(0, states=("done", "pending"))
        for bad in (-1, float("nan")):
            with self.assertRaises(ValueError):
                q.purge(bad)
        self.assertEqual(self.states(), {"pending": 1})

    def test_max_attempts_ends_a_task_that_is_never_finished(self) -> None:
        """After so many deliveries it is a dead letter, with a reason; others go on."""
        q = self.queue(max_attempts=2)
        ident = q.push(b"poison")
        for _ in range(2):
            q.release(self.pop(q), front=True)
        q.push(b"good")
        self.assertEqual(self.drain(q), [b"good"])
        self.assertEqual(self.names("failed"), [ident, f"{ident}.error"])
        with open(self.file("failed", f"{ident}.error"), encoding="utf-8") as file:
            self.assertIn("2 times", file.read())
        q.retry(ident)
        self.assertEqual(self.pop(q).attempts, 1)

    def test_push_many_keeps_the_order_and_returns_the_ids(self) -> None:
        for sync in (False, True):
            q = self.queue(sync_after_write=sync)
            ids = q.push_many(str(n).encode() for n in range(50))
            self.assertEqual(self.names("pending"), ids)
            self.assertEqual(self.drain(q), [str(n).encode() for n in range(50)])

    def test_push_many_that_fails_half_way_says_how_many_were_pushed(self) -> None:
        """The first ones are in, whole; the type of the error is the error's own."""
        q = self.queue()
        with self.assertRaisesRegex(TypeError, r"encode it.*\(2 tasks of the batch were pushed\)"):
            q.push_many([b"1", b"2", "3", b"4"])  # type: ignore[list-item]
        self.assertEqual(self.drain(q), [b"1", b"2"])
        with self.assertRaisesRegex(TypeError, "for one payload use push"):
            q.push_many(b"123")  # type: ignore[arg-type]

    def test_pausing_hands_nothing_out_until_the_file_is_gone(self) -> None:
        q, clock = self.queue(), self.clock()
        q.push_many([b"1", b"2"])
        self.assertEqual(self.pop(q).data, b"1")
        self.put("PAUSED", b"", directory="")
        clock.advance(2)
        self.assertIsNone(q.pop())
        os.unlink(self.file("PAUSED"))
        self.assertEqual(self.pop(q).data, b"2")

    def test_misuse_of_done_is_named(self) -> None:
        q = self.queue()
        q.push(b"1")
        with self.assertRaisesRegex(TypeError, "FemtoTask"):
            q.done(None)  # type: ignore[arg-type]
        looked_at = next(q.tasks("pending"))
        with self.assertRaisesRegex(LeaseLost, "only pop"):
            q.done(looked_at)
        task = self.pop(q)
        q.done(task)
        with self.assertRaisesRegex(LeaseLost, f"{task.id}.*finished") as caught:
            q.done(task)
        self.assertEqual((caught.exception.id, caught.exception.expired), (task.id, False))


class Looking(QueueCase):
    def test_stats_count_every_state(self) -> None:
        q, clock = self.queue(), self.clock()
        q.push_many([b"%d" % n for n in range(6)])
        q.schedule(b"later", (time.time() + 1000) * 1e6)
        q.done(self.pop(q))
        q.fail(self.pop(q))
        self.pop(q)
        clock.advance(10)
        stats = q.stats()
        self.assertEqual((stats.pending, stats.scheduled, stats.inflight), (3, 1, 1))
        self.assertEqual((stats.done, stats.failed), (1, 1))
        assert stats.oldest_pending_age_s is not None
        self.assertGreaterEqual(stats.oldest_pending_age_s, 10)
        self.assertLess(stats.oldest_pending_age_s, 100)

    def test_stats_of_an_empty_queue_have_no_age(self) -> None:
        stats = self.queue().stats()
        self.assertEqual((stats.pending, stats.oldest_pending_age_s, stats.nodes), (0, None, ()))

    def test_tasks_iterates_over_each_state_without_leasing(self) -> None:
        q = self.queue()
        q.push_many([b"1", b"2", b"3", b"4"])
        q.schedule(b"later", (time.time() + 1000) * 1e6)
        q.done(self.pop(q))
        q.fail(self.pop(q))
        self.pop(q)
        before = self.states()
        found = {state: [task.data for task in q.tasks(state)] for state in femtoqueue.STATES}
        wanted = {"done": [b"1"], "failed": [b"2"], "inflight": [b"3"], "pending": [b"4"]}
        self.assertEqual(found, {**wanted, "scheduled": [b"later"]})
        self.assertEqual(self.states(), before)
        with self.assertRaisesRegex(ValueError, "state must be one of"):
            q.tasks("waiting")

    def test_peek_finds_a_task_in_every_state(self) -> None:
        q = self.queue()
        ident = q.push(b"x")
        self.assertEqual(q.peek(ident), FemtoTask(ident, b"x", 0))
        task = self.pop(q)
        self.assertEqual(q.peek(ident), FemtoTask(ident, b"x", 1))
        q.release(task)
        self.assertEqual(q.peek(ident), FemtoTask(ident, b"x", 1))
        q.fail(self.pop(q))
        self.assertEqual(q.peek(ident), FemtoTask(ident, b"x", 0))
        later = q.schedule(b"later", (time.time() + 1000) * 1e6)
        self.assertEqual(q.peek(later), FemtoTask(later, b"later", 0))
        self.assertIsNone(q.peek("0" * 20 + "-" + "0" * 8))
        with self.assertRaises(ValueError):
            q.peek("../secrets")

    def test_peek_says_what_is_wrong_with_a_corrupt_task(self) -> None:
        q = self.queue()
        ident = q.push(b"x")
        self.put(ident, b"FQ1 00000000 1\nx")
        with self.assertRaisesRegex(CorruptTask, f"{ident}.*checksum"):
            q.peek(ident)
        self.assertEqual(list(q.tasks("pending")), [])

    def test_task_is_frozen_and_shows_no_lease(self) -> None:
        q = self.queue()
        q.push(b"x")
        task = self.pop(q)
        with self.assertRaises(AttributeError):
            task.data = b"y"  # type: ignore[misc]
        self.assertEqual(repr(task), f"FemtoTask(id='{task.id}', data=b'x', attempts=1)")
        self.assertAlmostEqual(task.created.timestamp(), time.time(), delta=60)
        self.assertEqual(str(task.created.tzinfo), "UTC")


# Order


class Ordering(QueueCase):
    @FORK
    def test_first_in_first_out_across_processes(self) -> None:
        """Pushes of different processes, one after the other, come out in that order."""

        def pusher(child: Child) -> None:
            q = FemtoQueue(self.path)
            while True:
                child.wait_for_go()
                child.say(q.push(b"x"))

        children = [self.child(pusher) for _ in range(4)]
        order = random.Random(1)
        ids = []
        for _ in range(100):
            child = order.choice(children)
            child.go()
            ids.append(child.line())
        q = self.queue()
        self.assertEqual([self.pop(q).id for _ in range(100)], ids)

    def test_ids_increase_strictly_within_an_object_even_if_the_clock_stands(self) -> None:
        q = self.queue()
        with mock.patch.object(femtoqueue, "time", Clock()) as clock:
            clock.monotonic = lambda: 1000.0
            ids = [q.push(b"x") for _ in range(5)]
            later = FemtoQueue(self.path, "n2")  # a new process does not go back behind them
            self.assertEqual(ids, sorted(set(ids)))
            later.close()

    def test_order_survives_restarts_and_a_wall_clock_set_back_by_a_year(self) -> None:
        clock = self.clock()
        self.queue().push(b"1")
        clock.wall_shift_s = -365 * 86400.0
        self.queue().push(b"2")
        clock.wall_shift_s = 365 * 86400.0
        self.queue().push(b"3")
        clock.wall_shift_s = 0.0
        q = self.queue()
        q.push(b"4")
        self.assertEqual(self.drain(q), [b"1", b"2", b"3", b"4"])

    def test_order_survives_a_reboot_whose_clocks_both_start_again(self) -> None:
        """Another boot id, monotonic near 0, the wall clock a year back (a dead battery)."""
        clock = self.clock()
        with mock.patch.object(femtoqueue, "_read_boot_id", lambda: "the first boot"):
            self.queue().push(b"1")
        clock.wall_shift_s = -365 * 86400.0
        clock.monotonic_shift_s = 1.0 - time.monotonic()
        with mock.patch.object(femtoqueue, "_read_boot_id", lambda: "the second boot"):
            q = self.queue()
            q.push(b"2")
        self.assertEqual(self.drain(q), [b"1", b"2"])
        self.assertEqual(len([name for name in os.listdir(self.path) if "clock-" in name]), 2)

    def test_order_without_a_boot_id_starts_after_the_newest_task(self) -> None:
        """As on Windows and macOS: each process anchors itself."""
        clock = self.clock()
        with mock.patch.object(femtoqueue, "_read_boot_id", lambda: None):
            self.queue().push(b"1")
            clock.wall_shift_s = -1000.0
            q = self.queue()
            q.push(b"2")
        self.assertEqual(self.drain(q), [b"1", b"2"])

    def test_processes_of_one_boot_share_one_clock(self) -> None:
        """The anchor is made once; one who comes later reads it, whatever the wall clock says."""
        first, clock = self.queue(), self.clock()
        clock.wall_shift_s = 5000.0
        second = self.queue()
        self.assertEqual(second._anchor_ns, first._anchor_ns)
        clock_files = [name for name in os.listdir(self.path) if name.startswith("clock-")]
        self.assertEqual(len(clock_files), 1)

    def test_unreadable_clock_file_is_made_again_after_the_newest_task(self) -> None:
        """Rubbish, or a number no clock can have, in clock-<boot> does not move the order."""
        q = self.queue()
        q.push(b"0")
        path = next(self.file(name) for name in os.listdir(self.path) if "clock-" in name)
        rubbish = (b"", b"x" * 50, b"\0\n", b"8" * 19 + b"\n", b"-" + b"9" * 19 + b"\n", b"12")
        for number, content in enumerate(rubbish, 1):
            with open(path, "wb") as file:
                file.write(content)
            self.queue().push(b"%d" % number)
        self.assertEqual(self.drain(self.queue()), [b"%d" % n for n in range(len(rubbish) + 1)])

    def test_a_task_named_for_the_far_future_does_not_take_the_clock_along(self) -> None:
        """An id at the end of the range, put there by hand, must not leave names without room."""
        os.mkdir(self.file("done"))
        self.put("0" + "8" + "9" * 18 + "-00000000", b"", "done")
        q = self.queue(timeout_stale_ms=None)
        q.push(b"x")
        self.assertLess(int(self.names("pending")[0][:20]), 4 * 10**18)
        q.done(self.pop(q))

    def test_a_popper_with_a_long_batch_sees_released_tasks_within_a_second(self) -> None:
        """A task that another puts back to the front is not stuck behind what was listed."""
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push_many([b"%d" % n for n in range(100)])
        task = self.pop(first)
        self.assertEqual(self.pop(second).data, b"1")
        first.release(task, front=True)
        clock.advance(1.1)
        self.assertEqual(self.pop(second).data, b"0")

    def test_what_a_process_itself_puts_in_front_is_next(self) -> None:
        q = self.queue()
        q.push_many([b"1", b"2", b"3"])
        q.release(self.pop(q), front=True)
        self.assertEqual(self.drain(q), [b"1", b"2", b"3"])

    def test_two_alternating_workers_keep_the_order(self) -> None:
        """Claims that were lost to the other cost no place."""
        first, second = self.queue("a"), self.queue("b")
        first.push_many([b"%02d" % n for n in range(40)])
        popped = [self.pop(q).data for _ in range(20) for q in (first, second)]
        self.assertEqual(popped, [b"%02d" % n for n in range(40)])

    def test_a_huge_backlog_is_taken_in_order_though_only_part_of_it_is_kept(self) -> None:
        """The cut that keeps a sixteenth in memory drops the youngest, and foreign names first."""
        q = self.queue()
        ids = q.push_many([b""] * 300)
        self.foreign = tuple(f"00-{n:03d}.swp" for n in range(40))
        for name in self.foreign:
            self.put(name, b"")
        with mock.patch.multiple(femtoqueue, _BATCH=20, _CHUNK=7):
            self.assertEqual([task.id for task in iter(q.pop, None)], ids)


# Leases


class Leases(QueueCase):
    def test_popping_twice_returns_two_tasks(self) -> None:
        """0.4 gave one process the same task again; a lease is a lease for its holder too."""
        q = self.queue()
        q.push_many([b"1", b"2"])
        self.assertEqual([self.pop(q).data, self.pop(q).data, q.pop()], [b"1", b"2", None])

    def test_a_task_that_waited_long_is_not_stolen_when_it_is_popped(self) -> None:
        """Age counts from the claim, not from push(), as it did in 0.4."""
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push(b"x")
        clock.advance(3600)
        task = self.pop(first)
        self.assertIsNone(second.pop())
        first.done(task)

    def test_a_lease_ends_at_its_deadline_and_not_before(self) -> None:
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push(b"x")
        self.pop(first)
        clock.advance(29)
        self.assertIsNone(second.pop())
        clock.advance(1.1)
        task = self.pop(second)
        self.assertEqual((task.data, task.attempts), (b"x", 2))

    def test_a_late_worker_gets_lease_lost_and_changes_nothing(self) -> None:
        """Whatever it calls, and whoever has the task by then."""
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push(b"x")
        late = self.pop(first)
        clock.advance(31)
        mine = self.pop(second)
        calls: list[Callable[[FemtoTask], None]] = [
            first.done,
            first.release,
            first.extend,
            lambda task: first.fail(task, "too late"),
            lambda task: first.release(task, front=True),
            lambda task: first.release(task, delay_s=5),
            second.done,
        ]
        before = self.names("inflight-b")
        for call in calls:
            with self.assertRaisesRegex(LeaseLost, late.id) as caught:
                call(late)
            self.assertTrue(caught.exception.expired)
            self.assertEqual((self.names("inflight-b"), self.states()), (before, {"inflight-b": 1}))
        second.done(mine)
        self.assertEqual(self.names("failed"), [])

    def test_the_same_worker_getting_its_own_late_task_again_is_fenced_from_before(self) -> None:
        q, clock = self.queue(), self.clock()
        q.push(b"x")
        late = self.pop(q)
        clock.advance(31)
        again = self.pop(q)
        with self.assertRaises(LeaseLost):
            q.done(late)
        q.done(again)

    def test_a_late_done_before_anybody_took_it_back_still_counts(self) -> None:
        """Nobody else has the task: finishing it is right, and redelivering it would not be."""
        q, clock = self.queue(), self.clock()
        q.push(b"x")
        task = self.pop(q)
        clock.advance(31)
        q.done(task)
        self.assertEqual(self.states(), {"done": 1})

    def test_extend_renews_the_lease(self) -> None:
        """The same object goes on; extensions may be longer or shorter than the timeout."""
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push(b"x")
        task = self.pop(first)
        for _ in range(3):
            clock.advance(25)
            first.extend(task)
            self.assertIsNone(second.pop())
        first.extend(task, 100_000)
        clock.advance(99)
        self.assertIsNone(second.pop())
        first.extend(task, ms=1000)
        clock.advance(1.1)
        self.pop(second)
        with self.assertRaises(LeaseLost):
            first.extend(task)

    def test_extend_refuses_what_is_no_duration(self) -> None:
        q = self.queue()
        q.push(b"x")
        task = self.pop(q)
        for bad in (0, -1, float("nan"), float("inf")):
            with self.assertRaises(ValueError):
                q.extend(task, bad)
        q.extend(task, 1e300)  # as long as a lease can be
        q.done(task)

    def test_no_timeout_means_no_deadline_while_the_holder_lives(self) -> None:
        first, second, clock = self.queue("a", timeout_stale_ms=None), self.queue("b"), self.clock()
        first.push(b"x")
        task = self.pop(first)
        clock.advance(10 * 365 * 86400)
        self.assertIsNone(second.pop())
        first.close()
        self.assertEqual(self.pop(second).id, task.id)

    def test_leases_do_not_move_with_the_wall_clock(self) -> None:
        first, second, clock = self.queue("a"), self.queue("b"), self.clock()
        first.push(b"x")
        self.pop(first)
        clock.wall_shift_s = 7 * 86400.0
        self.assertIsNone(second.pop())
        clock.wall_shift_s = -365 * 86400.0
        clock.monotonic_shift_s = 31.0
        self.pop(second)

    def test_two_objects_with_one_node_id_do_not_steal_from_each_other(self) -> None:
        first, second = self.queue("same"), self.queue("same")
        first.push_many([b"1", b"2"])
        one, two = self.pop(first), self.pop(second)
        self.assertEqual((first.pop(), second.pop()), (None, None))
        first.close()
        self.assertIsNone(second.pop())
        first.done(one)
        second.done(two)
        self.assertEqual(self.states(), {"done": 2})

    def test_detached_leases_end_by_their_deadline_only(self) -> None:
        """<boot> 00000000: neither a death nor a restart of the node ends it."""
        q, clock = self.queue(), self.clock()
        q.push(b"x")
        lease = self.pop(q)._lease
        detached = lease.replace(f"~{q._boot}~", "~00000000~")
        os.rename(self.file(lease), self.file(detached))
        q.close()
        self.assertIsNone(self.queue("n1").pop())
        self.assertIsNone(self.queue("other").pop())
        clock.advance(31)
        self.pop(self.queue("other"))


@FORK
class Liveness(QueueCase):
    def worker(self, node_id: str, **settings: Any) -> tuple[Child, str]:
        """A process that has popped a task, says its id and sits on it."""

        def work(child: Child) -> None:
            q = FemtoQueue(self.path, node_id, **settings)
            task = q.pop()
            child.say(task.id if task else "nothing")
            child.wait_for_go()
            assert task is not None
            q.done(task)

        child = self.child(work)
        return child, child.line()

    def pop_within(self, q: FemtoQueue, seconds: float) -> FemtoTask | None:
        end = time.monotonic() + seconds
        while (task := q.pop()) is None and time.monotonic() < end:
            time.sleep(0.01)
        return task

    def test_a_killed_workers_task_is_taken_at_once(self) -> None:
        """Within 2 s where the timeout is 60 s; the clock is real."""
        q = self.queue(timeout_stale_ms=60_000)
        q.push(b"x")
        child, ident = self.worker("victim", timeout_stale_ms=60_000)
        self.assertIsNone(q.pop())
        child.kill()
        child.finish()
        task = self.pop_within(q, 2)
        assert task is not None
        self.assertEqual((task.id, task.attempts), (ident, 2))

    def test_a_dead_workers_directory_is_removed(self) -> None:
        q, clock = self.queue(), self.clock()
        q.push(b"x")
        child, _ = self.worker("victim")
        child.kill()
        child.finish()
        clock.advance(1)
        self.pop(q)
        self.assertFalse(os.path.exists(self.file("inflight-victim")))

    def test_a_restarted_worker_takes_back_what_it_left(self) -> None:
        q = self.queue()
        q.push(b"x")
        child, ident = self.worker("same", timeout_stale_ms=None)
        child.kill()
        child.finish()
        again, taken = self.worker("same")
        self.assertEqual(taken, ident)
        again.go()
        self.assertEqual(again.finish()[1], 0)
        self.assertEqual(self.states(), {"done": 1})

    def test_a_living_worker_is_left_alone_by_another_process_of_its_name(self) -> None:
        q = self.queue("same")
        q.push_many([b"1", b"2"])
        child, first = self.worker("same")
        second = self.pop(q)
        self.assertNotEqual(second.id, first)
        self.assertIsNone(q.pop())
        child.go()
        self.assertEqual(child.finish()[1], 0)

    def test_after_a_reboot_only_the_deadline_counts(self) -> None:
        """A lease of another boot may be another host's: nobody to be seen is no proof of death."""
        with mock.patch.object(femtoqueue, "_read_boot_id", lambda: "before the reboot"):
            q = self.queue("a")
            q.push(b"x")
            q.pop()
            os.close(q._lease_fd or 0)  # as the reboot does: nobody holds the lock
            q._lease_fd = None
        clock, other = self.clock(), self.queue("b")
        self.assertIsNone(other.pop())
        clock.advance(31)
        self.pop(other)

    def test_stats_tell_the_living_from_the_dead(self) -> None:
        q, clock = self.queue("watcher"), self.clock()
        q.push_many([b"1", b"2"])
        alive, _ = self.worker("alive")
        dead, _ = self.worker("dead")
        dead.kill()
        dead.finish()
        clock.advance(31)
        nodes = {node.node: node for node in q.stats().nodes}
        self.assertEqual((nodes["alive"].liveness, nodes["dead"].liveness), ("alive", "dead"))
        self.assertEqual((nodes["alive"].inflight, nodes["alive"].expired), (1, 1))

    def test_close_gives_back_what_was_held(self) -> None:
        """At once, to its old place; and its directory goes."""
        q = self.queue("a")
        q.push_many([b"1", b"2"])
        self.pop(q)
        q.close()
        self.assertEqual(self.states(), {"pending": 2})
        self.assertFalse(os.path.exists(self.file("inflight-a")))
        self.assertEqual(self.drain(self.queue("b")), [b"1", b"2"])

    def test_a_closed_queue_works_again(self) -> None:
        q = self.queue()
        q.push(b"1")
        q.close()
        q.close()
        q.push(b"2")
        self.assertEqual(self.drain(q), [b"1", b"2"])

    def test_dropping_a_queue_leaves_no_descriptor_no_warning_and_no_directory(self) -> None:
        before = self.descriptors()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            q = FemtoQueue(self.path, "dropped")
            q.push(b"x")
            q.pop()
            del q
            gc.collect()
        self.assertEqual(self.descriptors(), before)
        self.assertEqual(self.states(), {"pending": 1})

    def descriptors(self) -> int:
        return len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0

    def test_fork_leaves_the_parents_lock_with_the_parent(self) -> None:
        """A child that outlives its parent must not keep the parent's tasks leased."""

        def parent(child: Child) -> None:
            q = FemtoQueue(self.path, "parent", timeout_stale_ms=None)
            q.pop()
            grandchild = os.fork()
            if grandchild == 0:
                child.say("forked")
                child.wait_for_go()
                os._exit(0)
            child.wait_for_go()

        q = self.queue("observer")
        q.push(b"x")
        child = self.child(parent)
        self.assertEqual(child.line(), "forked")
        child.kill()
        os.waitpid(child.pid, 0)
        self.assertIsNotNone(self.pop_within(q, 10))
        child.go()
        child._status = 0
        child._said.close()
        os.close(child._goes)

    def test_a_forked_child_is_a_worker_of_its_own(self) -> None:
        q = self.queue(None)
        q.push_many([b"1", b"2"])
        mine = self.pop(q)

        def work(child: Child) -> None:
            task = q.pop()
            assert task is not None
            child.say(f"{task.data.decode()} {q.node_id} {q._tag}")
            q.done(task)
            q.close()

        child = self.child(work)
        data, node_id, tag = child.line().split()
        self.assertEqual(child.finish()[1], 0)
        self.assertEqual(data, "2")
        self.assertNotEqual((node_id, tag), (q.node_id, q._tag))
        q.done(mine)
        self.assertEqual(self.states(), {"done": 2})


class Sharing(QueueCase):
    def test_threads_share_one_object(self) -> None:
        """Each task to one thread, while others push through the same object."""
        q = self.queue()
        got: list[bytes] = []
        finished = threading.Event()

        def consume() -> None:
            while True:
                over = finished.is_set()
                task = q.pop()
                if task is not None:
                    got.append(task.data)
                    q.done(task)
                elif over:
                    return

        pushers = [
            threading.Thread(target=lambda n=n: [q.push(b"%d-%d" % (n, i)) for i in range(300)])
            for n in range(3)
        ]
        consumers = [threading.Thread(target=consume) for _ in range(3)]
        for thread in pushers + consumers:
            thread.start()
        for thread in pushers:
            thread.join()
        finished.set()
        for thread in consumers:
            thread.join()
        self.assertEqual(
            Counter(got), Counter(b"%d-%d" % (n, i) for n in range(3) for i in range(300))
        )

    def test_a_renewal_and_a_finish_in_two_threads_do_not_lose_each_other(self) -> None:
        """done() right after extend() in another thread finds the renewed name."""
        q = self.queue()
        for _ in range(200):
            q.push(b"x")
            task = q.pop()
            assert task is not None
            renewal = threading.Thread(target=self.renew, args=(q, task))
            renewal.start()
            q.done(task)
            renewal.join()
        self.assertEqual(self.states(), {"done": 200})

    def renew(self, q: FemtoQueue, task: FemtoTask) -> None:
        with contextlib.suppress(LeaseLost):
            q.extend(task)

    def test_a_pickled_queue_is_made_anew_from_its_settings(self) -> None:
        q = self.queue(None, timeout_stale_ms=None, sync_after_write=True, max_attempts=3)
        q.push(b"x")
        task = self.pop(q)
        copy = pickle.loads(pickle.dumps(q))
        self.addCleanup(copy.close)
        self.assertNotEqual(copy.node_id, q.node_id)
        self.assertEqual((copy.timeout_stale_ms, copy.max_attempts), (None, 3))
        self.assertIsNone(copy.pop())
        self.assertEqual(pickle.loads(pickle.dumps(task)), task)
        copy.done(pickle.loads(pickle.dumps(task)))
        self.assertEqual(self.states(), {"done": 1})

    def test_errors_survive_pickling(self) -> None:
        for error in (LeaseLost("i", True, "why"), CorruptTask("i", "why"), TaskNotFound("why")):
            copy = pickle.loads(pickle.dumps(error))
            self.assertEqual((str(copy), vars(copy)), (str(error), vars(error)))
            self.assertIsInstance(error, FemtoQueueError)


if __name__ == "__main__":
    unittest.main()
