"""Read the log of the actors of storm.py, hosts.py and nfs.py, and check it against the promises.

Events reads the log: the deliveries, pushes, look-ups and turns. Its methods tell until when a
worker surely held a lease, and when the cluster was calm. They also tell for which broken promises
the file system may be the reason: these are counted in `excused`, and are no failure. The functions
below Events yield the other broken promises.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import errno
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proof import Violation, say

import femtoqueue

LEASE_MS = 5000  # timeout_stale_ms of all workers
SKEW_S = 0.1  # the largest difference between the clocks of two hosts
# The longest time that a call may take while the cluster is calm. In nfs.py, calls of 23 s were
# seen: eight processes on emulated processors wait for the lock of one key. When a process unlocks
# the key, waiting processes on the same host notice that first. So the other host may wait long.
LONGEST_CALL_S = 40.0
LOOK_UPS = ("contains", "peek", "take")


# The log


@dataclass
class Delivery:
    """A lease of a task. pop() was called at began_s and returned at got_s. The lease counts from
    got_s on; see Events.held_until_s() for its end."""

    actor: str
    id: str
    began_s: float
    got_s: float
    deadline_s: float
    attempts: int
    name: str
    # when the first call that was to settle the task began
    tried_s: float = float("inf")
    # when the last call that was to settle the task returned
    ended_s: float = float("inf")
    how: str = ""  # "done", "fail", "release", or "lost" after LeaseLost
    called_s: float = float("inf")  # when that last call began
    is_troubled: bool = False  # a call on the task raised an error

    def may_have_ended(self, *how: str) -> bool:
        """Return whether the delivery ended in one of these ways. Also return True if the worker
        was killed in the call that was to settle the task."""
        return self.how in how or (not self.how and self.tried_s < float("inf"))


@dataclass
class Claim:
    """A call of pop() that claimed a task. Between began_s and ended_s the look-ups of other actors
    may miss the task.

    The call may have put the task back undelivered, for example because the lease ended before the
    lock of the task's key was free.
    """

    actor: str
    began_s: float
    ended_s: float


@dataclass
class Push:
    """A payload, and the times at which push() was called and returned. `key` is "-" if the payload
    has no key."""

    actor: str
    name: str
    began_s: float
    key: str
    due_s: float | None = None
    ended_s: float = float("inf")
    ident: str = ""  # the task's id, if push() returned


@dataclass
class LookUp:
    """A call of contains(), peek() or take() with a key, and whether the call found a task."""

    actor: str
    call: str
    began_s: float
    ended_s: float
    found: bool


@dataclass
class Turn:
    """A turn of a TicketQueue, which a member had from got_s to ended_s."""

    ticket: int
    actor: str
    began_s: float
    got_s: float
    ended_s: float = float("inf")


def value_of(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Events:
    """The events of a log.

    `may_come_back` is true on GlusterFS: when a replica that was away is healed, names of files
    that were renamed or removed meanwhile may come back.
    """

    skew_s = SKEW_S

    def __init__(self, log: str, may_come_back: bool = False) -> None:
        self.may_come_back = may_come_back
        with open(log, encoding="utf-8") as file:
            self.lines = sorted(
                file.read().splitlines(), key=lambda line: float(line.split()[0])
            )
        self.tried: dict[str, Push] = {}  # by "<producer>:<number>"
        self.deliveries: dict[str, list[Delivery]] = collections.defaultdict(list)
        # actor: when it was killed or began to close its queue
        self.gone: dict[str, float] = {}
        # How many events broke a promise, but are excused: the file system may be the reason.
        self.excused: collections.Counter[str] = collections.Counter()
        # begin, end, functions, errno
        self.errors: list[tuple[float, float, str, int]] = []
        self.refused: set[str] = set()  # payloads whose push() raised an error
        # when the proof cut off a host, killed a brick, ...
        self.faults: list[float] = []
        # the times of those faults that took a host's locks away
        self.cuts: list[float] = []
        self.heals: list[float] = []  # when all was well again after a fault
        self.calls: list[tuple[float, float, str]] = []  # begin, end, name
        self.looks = self.killed = 0
        self.crowds: list[str] = []
        self.look_ups: dict[str, list[LookUp]] = collections.defaultdict(list)  # by key
        self.turns: list[Turn] = []
        # By the last 16 characters of the task's id, which are a hash of its key.
        self.claims: dict[str, list[Claim]] = collections.defaultdict(list)
        for line in self.lines:
            at, actor, word, *values = line.split()
            getattr(self, f"read_{word}")(float(at), actor, *map(value_of, values))

    def read_ready(self, at: float, actor: str) -> None:
        pass

    def read_push(
        self, at: float, actor: str, name: str, began_s: float, *key_due: Any
    ) -> None:
        self.tried[name] = Push(actor, name, began_s, *key_due)

    def read_pushed(
        self, at: float, actor: str, name: str, ident: str, began_s: float
    ) -> None:
        self.tried[name].ended_s = at
        self.tried[name].ident = ident
        self.calls.append((began_s, at, "push"))

    def read_claimed(self, at: float, actor: str, ident: str, began_s: float) -> None:
        self.claims[ident[-16:]].append(Claim(actor, began_s, at))

    def read_got(
        self, at: float, actor: str, ident: str, began_s: float, *rest: Any
    ) -> None:
        self.deliveries[ident].append(Delivery(actor, ident, began_s, at, *rest))
        self.calls.append((began_s, at, "pop"))

    def read_extended(
        self, at: float, actor: str, ident: str, deadline_s: float
    ) -> None:
        self.last(actor, ident).deadline_s = deadline_s

    def read_settle(self, at: float, actor: str, ident: str) -> None:
        delivery = self.last(actor, ident)
        delivery.tried_s = min(delivery.tried_s, at)

    def read_end(
        self, at: float, actor: str, how: str, ident: str, began_s: float
    ) -> None:
        delivery = self.last(actor, ident)
        delivery.how = how
        delivery.ended_s = at
        delivery.called_s = began_s
        self.calls.append((began_s, at, how))

    def read_error(
        self, at: float, actor: str, call: str, which: str, *rest: Any
    ) -> None:
        began_s, code, where = rest
        if call == "push":
            self.refused.add(which)
        self.errors.append((began_s, at, where, code))

    def read_killed(self, at: float, _: str, actor: str) -> None:
        self.gone.setdefault(actor, at)
        self.killed += 1

    def read_closing(self, at: float, actor: str) -> None:
        self.gone.setdefault(actor, at)

    def read_fault(self, at: float, _: str, is_cut: int) -> None:
        self.faults.append(at)
        if is_cut:
            self.cuts.append(at)

    def read_unlocked(self, at: float, _: str) -> None:
        self.cuts.append(self.faults[-1])

    def read_healed(self, at: float, _: str) -> None:
        self.heals.append(at)

    def read_watched(self, at: float, _: str, looks: int) -> None:
        self.looks = looks

    def read_crowded(self, at: float, _: str, *text: object) -> None:
        self.crowds.append(" ".join(map(str, text)))

    def read_looked(
        self, at: float, actor: str, call: str, key: str, *rest: Any
    ) -> None:
        began_s, found = rest
        self.look_ups[key].append(LookUp(actor, call, began_s, at, found == 1))
        self.calls.append((began_s, at, call))

    def read_turn(self, at: float, actor: str, ticket: int, began_s: float) -> None:
        self.turns.append(Turn(ticket, actor, began_s, at))
        self.calls.append((began_s, at, "turn"))

    def read_turned(self, at: float, actor: str, ticket: int) -> None:
        turn = next(it for it in reversed(self.turns) if it.actor == actor)
        turn.ended_s = at

    def is_excused_pair(self, first: Delivery, second: Delivery) -> bool:
        """Return whether GlusterFS let two claims of one file succeed.

        Then both deliveries have the same id, attempts and payload, on different hosts, while the
        cluster was not calm. Each claim was a rename of the waiting file, and on a correct file
        system only one of the two can succeed.
        """
        one, other = ((it.id, it.attempts, it.name) for it in (first, second))
        is_same = one == other and host_of(first.actor) != host_of(second.actor)
        return (
            self.may_come_back
            and is_same
            and not self.is_calm(second.began_s, second.got_s)
        )

    def may_end_late(self, first: Delivery, second: Delivery) -> bool:
        """Return whether GlusterFS may be the reason that a worker ended the delivery `first` after
        another delivery, `second`, had begun. Then the cluster was not calm, so that the name of
        the worker's lease could come back."""
        return self.may_come_back and not self.is_calm(second.began_s, first.called_s)

    def may_have_come_back(self, ident: str, until_s: float = float("inf")) -> bool:
        """Return whether GlusterFS may bring a task back: done() or fail() of it returned before
        `until_s`, while the cluster was not calm."""
        ends = (d for d in self.deliveries.get(ident, ()) if d.how in ("done", "fail"))
        troubled = (d for d in ends if not self.is_calm(d.began_s, d.ended_s))
        return self.may_come_back and any(d.ended_s < until_s for d in troubled)

    def may_be_two(self, ident: str) -> bool:
        """Return whether a key may have a second task beside this task. Healing may have brought
        the task back. Or a host may have pushed the task after the NFS server had dropped the
        host's locks."""
        return self.may_have_come_back(ident) or self.lost_locks(ident)

    def is_outdated_by_healing(self, it: Delivery) -> bool:
        """Return whether GlusterFS may be the reason that a delivery had an outdated payload.

        There are three cases, each while the cluster was not calm. The task had already ended, and
        came back. Or an earlier delivery of the task had a newer payload, and the older file came
        back. Or two claims got the same file (see is_split()).
        """
        if not self.may_come_back:
            return False
        of_task = self.deliveries[it.id]
        older = (d for d in of_task if d.name == it.name and d.got_s <= it.got_s)
        before = (d for d in of_task if d.ended_s < it.got_s)
        is_back = self.may_have_come_back(it.id, it.got_s) or any(
            self.is_newer(it, d) and not self.is_calm(d.began_s, d.ended_s)
            for d in before
        )
        return is_back or any(
            self.is_split(*two) for two in itertools.product(older, of_task)
        )

    def is_newer(self, old: Delivery, new: Delivery) -> bool:
        return self.tried[old.name].ended_s < self.tried[new.name].ended_s

    def is_replaced(self, it: Delivery, by: Push) -> bool:
        return self.tried[it.name].ended_s < by.began_s

    def must_be_seen(self, push: Push) -> bool:
        """Return whether an acknowledged payload of a key, or a newer one, must be delivered."""
        return True

    def is_split(self, old: Delivery, new: Delivery) -> bool:
        """Return whether GlusterFS let two claims of one file succeed, and `new` took along a newer
        payload. Then both deliveries have the same attempts, and both claims were made at the same
        time, while the cluster was not calm."""
        is_same = self.is_newer(old, new) and old.attempts == new.attempts
        is_at_once = old.began_s < new.got_s and new.began_s < old.got_s
        return is_same and is_at_once and not self.is_calm(old.began_s, old.got_s)

    def gone_s(self, actor: str) -> float:
        """Return when an actor was killed or began to close its queue; infinity if it did not."""
        return self.gone.get(actor, float("inf"))

    def held_until_s(self, it: Delivery) -> float:
        """Return the time until which a worker surely held the lease of a delivery.

        The lease ends at the deadline, with the worker, or when the task is settled. The log does
        not tell when exactly the task was settled, so the begin of the first call that was to
        settle the task counts. `skew_s` is subtracted from the deadline because the hosts' queue
        clocks differ a little.
        """
        return min(it.deadline_s - self.skew_s, it.tried_s, self.gone_s(it.actor))

    def may_lose(self, it: Delivery) -> bool:
        """Return whether a lease may be lost before its deadline. That may happen on GlusterFS
        while the cluster is not calm, because the replicas then differ in the lease's name."""
        return self.may_come_back and not self.is_calm(it.got_s, it.ended_s)

    def all_deliveries(self) -> list[Delivery]:
        return sorted(
            itertools.chain(*self.deliveries.values()), key=lambda it: it.got_s
        )

    def last(self, actor: str, ident: str) -> Delivery:
        return next(d for d in reversed(self.deliveries[ident]) if d.actor == actor)

    def lost_locks(self, ident: str) -> bool:
        """Return whether a push of a task may have run between a cut of a host and the next heal.

        The NFS server drops the locks of a host that is cut off for long, and the host is not told.
        """
        ends = (
            (cut, min(h for h in [*self.heals, float("inf")] if h > cut))
            for cut in self.cuts
        )
        times = [
            (it.began_s, min(it.ended_s, self.gone_s(it.actor)))
            for it in self.pushes(ident)
        ]
        return any(
            ended_s > cut and began_s < heal
            for cut, heal in ends
            for began_s, ended_s in times
        )

    def pushes(self, ident: str) -> list[Push]:
        """Return the pushes that may have made a task or replaced its payload.

        These are the pushes that returned the task's id. A push that did not return is among them
        if the hash of its key is in the id.
        """
        tag_of = functools.lru_cache(
            lambda key: femtoqueue._key_tag(femtoqueue._encode_key(key))
        )
        lost = [
            it
            for it in self.tried.values()
            if it.ended_s == float("inf") and it.key != "-"
        ]
        known = [it for it in self.tried.values() if it.ident == ident]
        return known + [it for it in lost if tag_of(it.key) == ident[-16:]]

    def print_log_of(self, ident: str) -> None:
        told = ident[-16:] if femtoqueue._is_keyed(ident) else ident
        for line in self.lines:
            if told in line or line.split()[2] in ("fault", "healed", "killed"):
                say(f"  {line}")

    def is_calm(self, began_s: float, ended_s: float) -> bool:
        """Return whether the cluster was calm between two times: no host was cut off, no brick was
        killed, and the cluster was healed after each earlier fault."""
        times = itertools.zip_longest(self.faults, self.heals, fillvalue=float("inf"))
        return all(ended_s < fault or began_s > heal for fault, heal in times)


# Tasks


def host_of(actor: str) -> str:
    return actor.partition(".")[0][-1]


def leased_twice(events: Events) -> Iterator[str]:
    """Yield each pair of deliveries of a task if the second delivery began during the lease of the
    first. Pairs that Events.is_excused_pair() explains are excused."""
    for ident, deliveries in events.deliveries.items():
        for first, second in itertools.combinations(deliveries, 2):
            until_s = events.held_until_s(first)
            if second.got_s < until_s and events.is_excused_pair(first, second):
                events.excused["leased twice"] += 1
            elif second.got_s < until_s:
                yield (
                    f"{ident} is leased twice: {first.actor} has it until {until_s:.3f}, "
                    + (f"{second.actor} got it at {second.got_s:.3f}")
                )


def not_fenced(events: Events) -> Iterator[str]:
    """Yield each call that settled a task after another delivery had begun, and each delivery of a
    task after a done() or fail() of the task.

    Events.may_end_late() tells which of the calls are excused. A delivery after done() or fail() is
    excused on GlusterFS if the cluster was not calm in an earlier delivery, in a claim that put the
    task back, or in a push of its key: each of these renames the task.
    """
    for ident, deliveries in events.deliveries.items():
        for first, second in itertools.combinations(deliveries, 2):
            late = (
                first.how in ("done", "fail", "release")
                and second.got_s < first.called_s
            )
            if late and events.may_end_late(first, second):
                events.excused["settled without a lease"] += 1
            elif late and not events.is_excused_pair(first, second):
                yield f"{first.how}() by {first.actor}, when {second.actor} had {ident}"
            if first.how in ("done", "fail") and second.began_s > first.ended_s:
                before = deliveries[: deliveries.index(second)]
                renames: list[Any] = [*before, *events.claims.get(ident[-16:], ())]
                renames += [it for it in events.tried.values() if it.ident == ident]
                is_calm = all(
                    events.is_calm(it.began_s, it.ended_s)
                    for it in renames
                    if it.began_s < second.began_s
                )
                if is_calm or not events.may_come_back:
                    yield (
                        f"{ident} had ended ({first}), and came back: {second}; "
                        + f"faults at {events.faults}"
                    )
                else:
                    events.excused["delivered once more after they had ended"] += 1


def failed_or_slow_calls(events: Events, no_errors: bool) -> Iterator[str]:
    """Yield the calls that raised an error or took too long while the cluster was calm, and the
    waits for a turn that timed out at any time.

    With `no_errors`, also yield the calls that raised an OSError while the cluster was not calm. A
    FemtoQueueError (code 0) is allowed then: it says that the member's ticket was passed over.
    """
    for began_s, ended_s, what, code in events.errors:
        is_timeout = "turn" in what and code == errno.ETIMEDOUT
        if is_timeout or events.is_calm(began_s, ended_s) or (no_errors and code):
            yield f"{what} raised {error_name(code)}, at {began_s:.3f}"
    for began_s, ended_s, what in events.calls:
        if ended_s - began_s > LONGEST_CALL_S and events.is_calm(began_s, ended_s):
            yield f"{what} took {ended_s - began_s:.1f} s while all was well"


def wrong_places(events: Events, files: set[str]) -> Iterator[str]:
    """Yield each acknowledged task that is missing, is unfinished or exists twice, and each task
    without a push. `files` are the paths of the queue's files after all tasks were finished."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in files:
        state, _, name = path.partition("/")
        is_task = not state.startswith(("creating", "clock-", "locks"))
        if is_task and not name.endswith(".error"):
            places[name[-37:]].append(path)
    for push in (
        it for it in events.tried.values() if it.ident and it.ident not in places
    ):
        # A keyed payload may have been replaced before its delivery: see key_faults().
        if push.key == "-" or events.deliveries[push.ident]:
            yield f"{push.name}, {push.ident}, was acknowledged and is lost"
    for ident, paths in places.items():
        hows = ("done", "fail")
        ends = sum(
            it.may_have_ended(*hows) if events.may_come_back else it.how in hows
            for it in events.deliveries[ident]
        )
        ended = all(path.startswith(("done/", "failed/")) for path in paths)
        if femtoqueue._is_keyed(ident) and events.may_have_come_back(ident):
            # it came back, met a newer task of its key, and became a dead letter
            ends += 1
        if not ended or len(paths) > max(1, ends):
            yield f"{ident} stands in {' and '.join(sorted(paths))}"
        names = {delivery.name for delivery in events.deliveries[ident]}
        if not names <= events.tried.keys():
            yield f"{ident} has the payloads {names}, which nobody pushed"


def wrong_answers(events: Events, files: set[str]) -> Iterator[str]:
    for ident, deliveries in events.deliveries.items():
        for name in {it.name for it in deliveries} & events.refused:
            yield f"the push of {name} raised, and {ident} was delivered"
        hows = {it.how for it in deliveries}
        places = {f"done/{ident}", f"failed/{ident}"}
        if events.lost_locks(ident):
            # femtoqueue may have moved it there: see wrong_dead_letters()
            places.discard(f"failed/{ident}")
        if files & places and not hows & {"done", "fail", ""}:
            yield f"{ident} is in done/ or failed/, but its workers' calls ended with {hows}"


def out_of_order(events: Events) -> Iterator[str]:
    """Yield the actors that got the tasks of a producer in another order than that of the pushes.
    Only first deliveries count."""
    numbers: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for delivery in events.all_deliveries():
        if delivery.attempts == 1:
            producer, number = delivery.name.split(":")
            numbers[delivery.actor, producer].append(int(number))
    for (actor, producer), order in numbers.items():
        if order != sorted(order):
            yield f"{actor} got the tasks of {producer} in the order {order}"


def error_name(code: int) -> str:
    return errno.errorcode.get(code, "FemtoQueueError")


def report(events: Events) -> None:
    deliveries = events.all_deliveries()
    ends = collections.Counter(d.how or "unsettled" for d in deliveries)
    errors = collections.Counter(
        f"{what} {error_name(n)}" for _, _, what, n in events.errors
    )
    longest = max(events.calls, key=lambda call: call[1] - call[0])
    pushes = sum(what == "push" for _, _, what in events.calls)
    say(f"{pushes} pushes, {len(deliveries)} deliveries: {dict(ends)}")
    say(f"{events.killed} processes killed; errors: {dict(errors)}")
    say(f"longest call: {longest[2]}, {longest[1] - longest[0]:.1f} s")
    if events.turns or events.looks:
        say(f"{len(events.turns)} turns, {events.looks} listings of a brick")


# Keys


def places_of_keys(paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the ids of the keyed tasks that wait or are in flight, and those of the buffered
    payloads."""
    live, behind = set(), set()
    for path in paths:
        state, _, name = path.partition("/")
        if re.fullmatch(r"(.*~)?0[0-9]{19}-[89a-f][0-9a-f]{15}", name):
            if state == "keys":
                behind.add(name[-37:])
            elif state in ("pending", "scheduled") or state.startswith("inflight-"):
                live.add(name[-37:])
    return live, behind


def several(ids: set[str], most: int, what: str) -> Iterator[str]:
    for tag, count in collections.Counter(ident[-16:] for ident in ids).items():
        if count > most:
            yield f"a key has {count} {what}: {sorted(it for it in ids if it[-16:] == tag)}"


def crowded(live: set[str], behind: set[str]) -> Iterator[str]:
    """Yield each key that has several live tasks, or a task and several buffered payloads.

    A task whose payload is being replaced is in keys/, perhaps beside the newer payload.
    """
    yield from several(live, 1, "live tasks")
    yield from several(live | behind, 2, "tasks and buffered payloads")


def crowded_at_rest(events: Events, files: set[str]) -> Iterator[str]:
    """Yield each key that has several live tasks or several buffered payloads, of the queue's files
    when no actor runs. Tasks that Events.may_be_two() explains are left out."""
    live, behind = (
        {it for it in ids if not events.may_be_two(it)} for ids in places_of_keys(files)
    )
    yield from several(live, 1, "live tasks")
    yield from several(behind, 1, "buffered payloads")


def by_key(events: Events) -> Iterator[tuple[list[Delivery], list[Push]]]:
    """For each key, yield its deliveries and its pushes that returned, both sorted by time."""
    deliveries: dict[str, list[Delivery]] = collections.defaultdict(list)
    pushes: dict[str, list[Push]] = collections.defaultdict(list)
    for delivery in events.all_deliveries():
        deliveries[events.tried[delivery.name].key].append(delivery)
    for push in events.tried.values():
        if push.ended_s < float("inf") and push.key != "-":
            pushes[push.key].append(push)
    for key, of_key in pushes.items():
        yield deliveries[key], sorted(of_key, key=lambda push: push.ended_s)


def overlapping(events: Events, deliveries: list[Delivery]) -> Iterator[str]:
    held_until_s = 0.0
    holder = None
    for it in deliveries:
        if (
            holder
            and it.got_s < held_until_s
            and not events.is_excused_pair(holder, it)
        ):
            yield (
                f"{it.actor} got {it.id} at {it.got_s:.3f}, {holder.actor} had {holder.id} "
                + (f"until {held_until_s:.3f}")
            )
        until_s = events.held_until_s(it)
        if until_s > held_until_s:
            held_until_s = until_s
            holder = it


def latest_push(pushes: list[Push], at_s: float) -> Push | None:
    """Return the push that began last, of the pushes that had returned before `at_s`."""
    returned = bisect.bisect_left(pushes, at_s, key=lambda push: push.ended_s)
    return max(pushes[:returned], key=lambda push: push.began_s, default=None)


def outdated(
    events: Events, deliveries: list[Delivery], pushes: list[Push]
) -> Iterator[str]:
    for it in deliveries:
        newer = latest_push(pushes, it.began_s)
        if (
            newer
            and events.is_replaced(it, newer)
            and not events.is_outdated_by_healing(it)
        ):
            late_s = it.began_s - newer.began_s
            yield f"{it.actor} got {it.name}, {it.id}, {late_s:.3f} s after the push of a newer one"


def never_delivered(
    events: Events, deliveries: list[Delivery], pushes: list[Push]
) -> Iterator[str]:
    for push in filter(events.must_be_seen, pushes):
        later = (it for it in reversed(deliveries) if it.got_s > push.began_s)
        if all(events.is_replaced(it, push) for it in later):
            yield f"{push.name}, pushed to {push.key} at {push.began_s:.3f}, and nothing newer"


def must_find(
    events: Events,
    it: LookUp,
    newest: Push,
    deliveries: list[Delivery],
    pushes: list[Push],
) -> bool:
    """Return whether a look-up had to find a task.

    `newest` is the latest push of the key that had returned before the look-up. The key has a task
    until this payload, or a newer one, is delivered and then settled by done() or fail().
    """
    for d in deliveries:
        is_as_new = events.tried[d.name].ended_s >= newest.began_s
        if is_as_new and d.how != "release" and d.tried_s < it.ended_s:
            return False
    claims = events.claims[newest.ident[-16:]]
    moves = list[tuple[float, float]]()
    if it.call == "take":
        # take() may return None while another actor has the task in flight
        moves = [(d.got_s, d.ended_s) for d in deliveries if d.actor != it.actor]
        moves += [
            (claim.began_s, claim.ended_s)
            for claim in claims
            if claim.actor != it.actor
        ]
    elif it.call == "peek":
        # may return None while a claim, a push or the settling moves the task
        moves = [(claim.began_s, claim.ended_s) for claim in claims]
        moves += [(d.tried_s, d.ended_s) for d in deliveries]
        moves += [(push.began_s, push.ended_s) for push in pushes]
    return not any(began < it.ended_s and ended > it.began_s for began, ended in moves)


def look_ups_that_must_find(
    events: Events, deliveries: list[Delivery], pushes: list[Push]
) -> Iterator[tuple[LookUp, Push]]:
    """Yield the look-ups of a key that had to find a task, each with the latest push before it.

    If workers were killed, only calls of contains() are yielded. Other workers reclaim the tasks of
    a killed worker at times that the log does not have, and peek() and take() may miss a task that
    moves.
    """
    calls = ("contains",) if events.killed else LOOK_UPS
    for it in events.look_ups[pushes[0].key]:
        push = latest_push(pushes, it.began_s)
        if (
            push
            and it.call in calls
            and must_find(events, it, push, deliveries, pushes)
        ):
            yield it, push


def failed_look_ups(looked: Iterable[tuple[LookUp, Push]]) -> Iterator[str]:
    """Yield the look-ups that found no task. `looked` is from look_ups_that_must_find()."""
    for it, push in looked:
        if not it.found:
            late_s = it.began_s - push.ended_s
            yield (
                f"{it.actor}: {it.call}({push.key}) found nothing at {it.began_s:.3f}, "
                + (f"{late_s:.3f} s after a push by {push.actor}")
            )


def wrong_dead_letters(
    events: Events, left: set[str], reasons: Iterable[str]
) -> Iterator[str]:
    """Yield the dead letters that no worker made by fail().

    `reasons` are the lines "./<id>.error:<reason>" of failed/. The actors call fail() without a
    reason, so femtoqueue itself wrote each of these.
    """
    doubles = set()
    for line in reasons:
        ident = line.removeprefix("./")[:37]
        # the reason ends with the id of the other task of the key
        both = ident, line[-37:]
        if "has another task" in line and any(map(events.may_be_two, both)):
            events.excused["dead letters beside a task of their key"] += 1
            doubles.add(ident)
        else:
            yield line
    dead = {path.partition("/")[2] for path in left if path.startswith("failed/")}
    for name in (it for it in dead - doubles if not it.endswith(".error")):
        deliveries = events.deliveries.get(name[-37:], [])
        if any(it.may_have_ended("fail") for it in deliveries):
            continue
        if events.may_have_come_back(name):
            events.excused["dead letters that came back"] += 1
        else:
            hows = [d.how for d in deliveries]
            yield f"{name} is in failed/ though its deliveries ended with {hows}"


def lost_early(events: Events) -> Iterator[str]:
    """Yield the leases that were lost before their deadline. Those that Events.may_lose() explains
    are excused."""
    for it in events.all_deliveries():
        if it.how == "lost" and it.ended_s < it.deadline_s - events.skew_s:
            if events.may_lose(it):
                events.excused["leases lost before their deadline"] += 1
            else:
                yield f"{it.actor} lost the lease of {it.id} before its deadline"


def not_refused(events: Events) -> Iterator[str]:
    """Yield the calls of done() by `hold` actors that took effect though other actors had got the
    task. The host of a `hold` actor was cut off. If no other actor got the task, for example
    because a call hung, a late done() is right."""
    for it in events.all_deliveries():
        if it.actor.startswith("hold"):
            others = [
                d for d in events.deliveries[it.id] if it.got_s < d.got_s < it.ended_s
            ]
            count = len(others)
            say(
                f"done() on a host that was cut off: {it.how}; deliveries to others: {count}"
            )
            if (
                it.how != "lost"
                and others
                and any(events.may_end_late(it, d) for d in others)
            ):
                events.excused["done() after a lost lease"] += 1
            elif it.how != "lost" and others:
                yield f"done() of {it.actor} did not raise LeaseLost: {it}, {others}"


def key_faults(events: Events) -> dict[str, list[str]]:
    """Check the deliveries and look-ups of each key. Return what is wrong, by broken promise."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    looked: list[tuple[LookUp, Push]] = []
    for deliveries, pushes in by_key(events):
        looked += look_ups_that_must_find(events, deliveries, pushes)
        found["overlapping deliveries"] += overlapping(events, deliveries)
        found["outdated deliveries"] += outdated(events, deliveries, pushes)
        found["pushes never delivered"] += never_delivered(events, deliveries, pushes)
    found["look-ups that found nothing"] += failed_look_ups(looked)
    if calls := collections.Counter(it.call for it, _ in looked):
        say(f"look-ups that had to find a task: {dict(calls)}")
    return found


# Turns


def turns_at_once(events: Events) -> Iterator[str]:
    """Yield each pair of turns if the second turn began before the first had ended."""
    turns = sorted(events.turns, key=lambda it: it.got_s)
    for first, second in itertools.pairwise(turns):
        if second.got_s < min(first.ended_s, events.gone_s(first.actor)):
            yield f"{first} and {second}"


def without_turn(events: Events, hosts: Iterable[int]) -> list[str]:
    """Return the hosts whose members had no turn."""
    return [
        *{str(host) for host in hosts}.difference(
            host_of(it.actor) for it in events.turns
        )
    ]


# All checks


def judge(
    events: Events,
    files: set[str],
    reasons: Iterable[str] = (),
    found: Mapping[str, Iterable[str]] | None = None,
    no_errors: bool = False,
) -> None:
    """Check the log, the files that are left, and the reasons of dead letters.

    `found` has the results of other checks: what is wrong, by broken promise. With `no_errors`, no
    call may raise an OSError, even while the cluster is not calm. Raises Violation if a promise is
    broken.
    """
    report(events)
    faults = {
        **key_faults(events),
        "crowded keys": events.crowds,
        "dead letters without a fail()": wrong_dead_letters(events, files, reasons),
        "leases lost early": lost_early(events),
        "double leases": leased_twice(events),
        "settled without a lease": not_fenced(events),
        "done() after a lost lease": not_refused(events),
        "errors of calls that took effect": wrong_answers(events, files)
        if no_errors
        else (),
        "turns overlap": turns_at_once(events),
        "failed or slow calls": failed_or_slow_calls(events, no_errors),
        "misplaced": wrong_places(events, files),
        **(found or {}),
    }
    raise_any(events, faults)


def raise_any(events: Events, found: Mapping[str, Iterable[str]]) -> None:
    """Print how many events were excused, and how often each promise was broken, with an example
    and the log's lines about the example. Raises Violation if a promise was broken."""
    faults = {what: wrong for what, texts in found.items() if (wrong := [*texts])}
    if events.excused:
        say(f"excused: {dict(events.excused)}")
    for what, wrong in faults.items():
        for ident in re.findall(r"0[0-9]{19}-[0-9a-f]{16}", wrong[0])[:1]:
            events.print_log_of(ident)
        say(f"{len(wrong)} {what}; the first: {wrong[0]}")
    if faults:
        raise Violation(
            "; ".join(f"{len(it)} {what}: {it[0]}" for what, it in faults.items())
        )
