"""What actors noted, read back and judged: of storm.py, hosts.py and nfs.py.

It tells who had a task, when, and by right; what had been pushed when a look-up began; and what may
be excused.
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

LEASE_MS = 5000  # of all workers
SKEW_S = 0.1  # by which the clocks of hosts may differ
# While all is well. On NFS, 23 were seen: eight processes want one key, on emulated processors, and
# those of the host that has its lock are the first to see it free.
LONGEST_CALL_S = 40.0
LOOK_UPS = ("contains", "peek", "take")


# What was noted


@dataclass
class Delivery:
    """A lease of a task: from got_s until the first of what ends it."""

    actor: str
    id: str
    began_s: float
    got_s: float
    deadline_s: float
    attempts: int
    name: str
    tried_s: float = float("inf")
    ended_s: float = float("inf")
    how: str = ""
    called_s: float = float("inf")  # of the call that succeeded
    is_troubled: bool = False  # a call about it had raised

    def may_have_ended(self, *how: str) -> bool:
        """Whether it ended so, or was about to end when its worker was killed."""
        return self.how in how or (not self.how and self.tried_s < float("inf"))


@dataclass
class Claim:
    """A task was out of others' reach, at most from began_s to ended_s. It may have gone back to
    its place, undelivered: because the lease ended before its key's lock was free, say."""

    actor: str
    began_s: float
    ended_s: float


@dataclass
class Push:
    """One payload, and the times at which push() was called and returned. key: "-" if none."""

    actor: str
    name: str
    began_s: float
    key: str
    due_s: float | None = None
    ended_s: float = float("inf")
    ident: str = ""  # when it was acknowledged


@dataclass
class LookUp:
    """A call that asked for the task of a key, and whether it was told of one."""

    actor: str
    call: str
    began_s: float
    ended_s: float
    found: bool


@dataclass
class Turn:
    """A member of a line had its turn from got_s to ended_s."""

    ticket: int
    actor: str
    began_s: float
    got_s: float
    ended_s: float = float("inf")


def value_of(text: str) -> Any:
    """Return a number, or the text that is none."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Events:
    """What was noted, read back. may_come_back: healing brings names back (GlusterFS)."""

    skew_s = SKEW_S

    def __init__(self, log: str, may_come_back: bool = False) -> None:
        self.may_come_back = may_come_back
        with open(log, encoding="utf-8") as file:
            self.lines = sorted(file.read().splitlines(), key=lambda line: float(line.split()[0]))
        self.tried: dict[str, Push] = {}  # by "<producer>:<number>"
        self.deliveries: dict[str, list[Delivery]] = collections.defaultdict(list)
        self.gone: dict[str, float] = {}  # actor -> when it was killed, or gave up its place
        self.excused: collections.Counter[str] = collections.Counter()  # odd, for a known reason
        self.errors: list[tuple[float, float, str, int]] = []  # begin, end, functions, errno
        self.refused: set[str] = set()  # payloads whose push() raised
        self.faults: list[float] = []
        self.cuts: list[float] = []  # those of the faults that took a host's locks away
        self.heals: list[float] = []
        self.calls: list[tuple[float, float, str]] = []
        self.looks = self.killed = 0
        self.crowds: list[str] = []
        self.look_ups: dict[str, list[LookUp]] = collections.defaultdict(list)  # by key
        self.turns: list[Turn] = []
        # By the last part of the task's id, which is a hash of its key.
        self.claims: dict[str, list[Claim]] = collections.defaultdict(list)
        for line in self.lines:
            at, actor, word, *values = line.split()
            getattr(self, f"read_{word}")(float(at), actor, *map(value_of, values))

    def read_ready(self, at: float, actor: str) -> None:
        pass

    def read_push(self, at: float, actor: str, name: str, began_s: float, *key_due: Any) -> None:
        self.tried[name] = Push(actor, name, began_s, *key_due)

    def read_pushed(self, at: float, actor: str, name: str, ident: str, began_s: float) -> None:
        self.tried[name].ended_s, self.tried[name].ident = at, ident
        self.calls.append((began_s, at, "push"))

    def read_claimed(self, at: float, actor: str, ident: str, began_s: float) -> None:
        self.claims[ident[-8:]].append(Claim(actor, began_s, at))

    def read_got(self, at: float, actor: str, ident: str, began_s: float, *rest: Any) -> None:
        self.deliveries[ident].append(Delivery(actor, ident, began_s, at, *rest))
        self.calls.append((began_s, at, "pop"))

    def read_extended(self, at: float, actor: str, ident: str, deadline_s: float) -> None:
        self.last(actor, ident).deadline_s = deadline_s

    def read_settle(self, at: float, actor: str, ident: str) -> None:
        delivery = self.last(actor, ident)
        delivery.tried_s = min(delivery.tried_s, at)

    def read_end(self, at: float, actor: str, how: str, ident: str, began_s: float) -> None:
        delivery = self.last(actor, ident)
        delivery.how, delivery.ended_s, delivery.called_s = how, at, began_s
        self.calls.append((began_s, at, how))

    def read_error(self, at: float, actor: str, call: str, which: str, *rest: Any) -> None:
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

    def read_looked(self, at: float, actor: str, call: str, key: str, *rest: Any) -> None:
        began_s, found = rest
        self.look_ups[key].append(LookUp(actor, call, began_s, at, found == 1))
        self.calls.append((began_s, at, call))

    def read_turn(self, at: float, actor: str, ticket: int, began_s: float) -> None:
        self.turns.append(Turn(ticket, actor, began_s, at))
        self.calls.append((began_s, at, "turn"))

    def read_turned(self, at: float, actor: str, ticket: int) -> None:
        turn = next(it for it in reversed(self.turns) if it.actor == actor)
        turn.ended_s = at

    def is_doubled(self, first: Delivery, second: Delivery) -> bool:
        """Whether GlusterFS made two of one file. Both deliveries are the same one: each was a
        rename of the file from where it waited, and only one such rename can succeed."""
        one, other = ((it.id, it.attempts, it.name) for it in (first, second))
        is_same = one == other and host_of(first.actor) != host_of(second.actor)
        return self.may_come_back and is_same and not self.is_calm(second.began_s, second.got_s)

    def may_have_come_back(self, ident: str, until_s: float = float("inf")) -> bool:
        """Whether a task had ended by then, while not all was well: GlusterFS may bring it back."""
        ends = (d for d in self.deliveries.get(ident, ()) if d.how in ("done", "fail"))
        troubled = (d for d in ends if not self.is_calm(d.began_s, d.ended_s))
        return self.may_come_back and any(d.ended_s < until_s for d in troubled)

    def may_be_two(self, ident: str) -> bool:
        """Whether a task may stand beside another one of its key: healing brought it back, or a
        host without its locks pushed it."""
        return self.may_have_come_back(ident) or self.lost_locks(ident)

    def is_outdated_by_healing(self, it: Delivery) -> bool:
        """Whether GlusterFS may have kept the payload of a delivery: its task had ended; or another
        delivery, which ended before while not all was well, had a newer one in its place; or two
        claims got the same file just then, and one of them took the newer payload along."""
        if not self.may_come_back:
            return False
        of_task = self.deliveries[it.id]
        older = (d for d in of_task if d.name == it.name and d.got_s <= it.got_s)
        before = (d for d in of_task if d.ended_s < it.got_s)
        is_back = self.may_have_come_back(it.id, it.got_s) or any(
            self.is_newer(it, d) and not self.is_calm(d.began_s, d.ended_s) for d in before
        )
        return is_back or any(self.is_split(*two) for two in itertools.product(older, of_task))

    def is_newer(self, old: Delivery, new: Delivery) -> bool:
        return self.tried[old.name].ended_s < self.tried[new.name].ended_s

    def is_replaced(self, it: Delivery, by: Push) -> bool:
        """Whether the payload of a delivery was, or had to be, replaced by another one."""
        return self.tried[it.name].ended_s < by.began_s

    def must_be_seen(self, push: Push) -> bool:
        """Whether an acknowledged payload of a key must be delivered, if no newer one is."""
        return True

    def is_split(self, old: Delivery, new: Delivery) -> bool:
        """Whether GlusterFS let two claims of one file through, and one took a newer payload along:
        both are the same delivery, and were claimed while not all was well, at the same time."""
        is_same = self.is_newer(old, new) and old.attempts == new.attempts
        is_at_once = old.began_s < new.got_s and new.began_s < old.got_s
        return is_same and is_at_once and not self.is_calm(old.began_s, old.got_s)

    def gone_s(self, actor: str) -> float:
        return self.gone.get(actor, float("inf"))

    def held_until_s(self, it: Delivery) -> float:
        """Return until when a worker had a task by right. It ends when it is settled, which is
        sure to happen only after the call began. Each host has a queue clock of its own, and they
        are set one after the other."""
        return min(it.deadline_s - self.skew_s, it.tried_s, self.gone_s(it.actor))

    def may_lose(self, it: Delivery) -> bool:
        """Whether a lease may be lost early: on GlusterFS, while not all is well, whose replicas
        then do not agree on its name."""
        return self.may_come_back and not self.is_calm(it.got_s, it.ended_s)

    def all_deliveries(self) -> list[Delivery]:
        """Return the deliveries of all tasks, by time."""
        return sorted(itertools.chain(*self.deliveries.values()), key=lambda it: it.got_s)

    def last(self, actor: str, ident: str) -> Delivery:
        return next(d for d in reversed(self.deliveries[ident]) if d.actor == actor)

    def lost_locks(self, ident: str) -> bool:
        """Whether a task may have been pushed after a host was cut off, and before all was well:
        the server takes the locks of such a host away, which knows nothing of it."""
        ends = ((cut, min(h for h in [*self.heals, float("inf")] if h > cut)) for cut in self.cuts)
        times = [(it.began_s, min(it.ended_s, self.gone_s(it.actor))) for it in self.pushes(ident)]
        return any(
            ended_s > cut and began_s < heal for cut, heal in ends for began_s, ended_s in times
        )

    def pushes(self, ident: str) -> list[Push]:
        """Return the pushes that a task is from, or may be: those that returned its id, the first
        and those that replaced its payload, and of a key with its hash those that did not return.
        """
        tag_of = functools.lru_cache(lambda key: femtoqueue._key_tag(femtoqueue._encode_key(key)))
        lost = [it for it in self.tried.values() if it.ended_s == float("inf") and it.key != "-"]
        known = [it for it in self.tried.values() if it.ident == ident]
        return known + [it for it in lost if tag_of(it.key) == ident[-8:]]

    def tell(self, ident: str) -> None:
        """Print what was noted of a task, or of all that have its key, and all faults."""
        told = ident[-8:] if femtoqueue._is_keyed(ident) else ident
        for line in self.lines:
            if told in line or line.split()[2] in ("fault", "healed", "killed"):
                say(f"  {line}")

    def is_calm(self, began_s: float, ended_s: float) -> bool:
        """Whether all was well: nothing was cut off or killed, and all was healed."""
        times = itertools.zip_longest(self.faults, self.heals, fillvalue=float("inf"))
        return all(ended_s < fault or began_s > heal for fault, heal in times)


# Tasks


def host_of(actor: str) -> str:
    return actor.partition(".")[0][-1]


def leased_twice(events: Events) -> Iterator[str]:
    """Yield the deliveries that began while another had the task by right, but for those that did
    so because the file system had made two of one file; see Events.is_doubled()."""
    for ident, deliveries in events.deliveries.items():
        for first, second in itertools.combinations(deliveries, 2):
            until_s = events.held_until_s(first)
            if second.got_s < until_s and events.is_doubled(first, second):
                events.excused["leased twice"] += 1
            elif second.got_s < until_s:
                yield f"{ident} is leased twice: {first.actor} has it until {until_s:.3f}, " + (
                    f"{second.actor} got it at {second.got_s:.3f}"
                )


def not_fenced(events: Events) -> Iterator[str]:
    """Yield what was settled after another delivery began, and what came back that had ended: none
    may on NFS, and none whose deliveries all ended while all was well."""
    for ident, deliveries in events.deliveries.items():
        for first, second in itertools.combinations(deliveries, 2):
            late = first.how in ("done", "fail", "release") and second.got_s < first.called_s
            if late and not events.is_doubled(first, second):
                yield f"{first.how}() by {first.actor}, when {second.actor} had {ident}"
            if first.how in ("done", "fail") and second.began_s > first.ended_s:
                before = deliveries[: deliveries.index(second)]
                is_calm = all(events.is_calm(d.began_s, d.ended_s) for d in before)
                if is_calm or not events.may_come_back:
                    yield f"{ident} had ended ({first}), and came back: {second}"
                else:
                    events.excused["delivered once more after they had ended"] += 1


def troubled(events: Events, hard: bool) -> Iterator[str]:
    """Yield the calls that raised or took too long while all was well, or waited for a turn in
    vain. hard: those that raised while it was not, too; but that a ticket was passed over, a
    FemtoQueueError, may be then."""
    for began_s, ended_s, what, code in events.errors:
        is_in_vain = "turn" in what and code == errno.ETIMEDOUT
        if is_in_vain or events.is_calm(began_s, ended_s) or (hard and code):
            yield f"{what} raised {error_name(code)}, at {began_s:.3f}"
    for began_s, ended_s, what in events.calls:
        if ended_s - began_s > LONGEST_CALL_S and events.is_calm(began_s, ended_s):
            yield f"{what} took {ended_s - began_s:.1f} s while all was well"


def misplaced(events: Events, files: set[str]) -> Iterator[str]:
    """Yield the acknowledged tasks that are not in done/ or failed/, once, and what is there
    though it was not begun."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in files:
        state, _, name = path.partition("/")
        if not state.startswith(("creating", "clock-", "locks")) and not name.endswith(".error"):
            places[name[-29:]].append(path)
    for push in (it for it in events.tried.values() if it.ident and it.ident not in places):
        # Those of a key may have been replaced: see key_faults().
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
            ends += 1  # beside a newer task of its key it became a dead letter
        if not ended or len(paths) > max(1, ends):
            yield f"{ident} stands in {' and '.join(sorted(paths))}"
        names = {delivery.name for delivery in events.deliveries[ident]}
        if not names <= events.tried.keys():
            yield f"{ident} is {names}, which nobody pushed"


def not_so(events: Events, files: set[str]) -> Iterator[str]:
    """Yield the calls that raised though they did what they were to do."""
    for ident, deliveries in events.deliveries.items():
        for name in {it.name for it in deliveries} & events.refused:
            yield f"the push of {name} raised, and {ident} was delivered"
        hows = {it.how for it in deliveries}
        places = {f"done/{ident}", f"failed/{ident}"}
        if events.lost_locks(ident):  # a dead letter that nobody made: see wrong_dead_letters()
            places.discard(f"failed/{ident}")
        if files & places and not hows & {"done", "fail", ""}:
            yield f"{ident} has ended, but those who had it were told {hows}"


def out_of_order(events: Events) -> Iterator[str]:
    """Yield who got a producer's tasks in another order, as of what nobody had before."""
    numbers: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for delivery in events.all_deliveries():
        if delivery.attempts == 1:
            producer, number = delivery.name.split(":")
            numbers[delivery.actor, producer].append(int(number))
    for (actor, producer), order in numbers.items():
        if order != sorted(order):
            yield f"{actor} got the tasks of {producer} in the order {order}"


def error_name(code: int) -> str:
    """Return the name of an errno; of 0 that of an error that has none."""
    return errno.errorcode.get(code, "FemtoQueueError")


def report(events: Events) -> None:
    """Say what there was, so that it can be seen if it was too little."""
    deliveries = events.all_deliveries()
    ends = collections.Counter(d.how or "unsettled" for d in deliveries)
    errors = collections.Counter(f"{what} {error_name(n)}" for _, _, what, n in events.errors)
    longest = max(events.calls, key=lambda call: call[1] - call[0])
    pushes = sum(what == "push" for _, _, what in events.calls)
    say(f"{pushes} pushes, {len(deliveries)} deliveries: {dict(ends)}")
    say(f"{events.killed} processes killed; errors: {dict(errors)}")
    say(f"longest call: {longest[2]}, {longest[1] - longest[0]:.1f} s")
    if events.turns or events.looks:
        say(f"{len(events.turns)} turns, {events.looks} looks at a brick")


# Keys


def places_of_keys(paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the ids of keyed tasks that wait or are in flight, and of those behind them."""
    live, behind = set(), set()
    for path in paths:
        state, _, name = path.partition("/")
        if re.fullmatch(r"(.*~)?0[0-9]{19}-[89a-f][0-9a-f]{7}", name):
            if state == "keys":
                behind.add(name[-29:])
            elif state in ("pending", "scheduled") or state.startswith("inflight-"):
                live.add(name[-29:])
    return live, behind


def crowded(places: Iterable[set[str]]) -> Iterator[str]:
    """Yield what is wrong with the number of tasks of a key, whose hash an id ends with, and with
    that of the payloads behind them."""
    for ids, what in zip(places, ("live tasks", "payloads behind"), strict=True):
        for tag, count in collections.Counter(ident[-8:] for ident in ids).items():
            if count > 1:
                yield f"a key has {count} {what}: {sorted(it for it in ids if it[-8:] == tag)}"


def crowded_at_rest(events: Events, files: set[str]) -> Iterator[str]:
    """The same of what is there when nothing runs, but for those that are excused."""
    alone = ({it for it in ids if not events.may_be_two(it)} for ids in places_of_keys(files))
    return crowded(alone)


def by_key(events: Events) -> Iterator[tuple[list[Delivery], list[Push]]]:
    """Yield the deliveries of each key, by time, and the pushes of it that returned, by time."""
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
    """Yield what is wrong with the deliveries of a key that began during another one."""
    held_until_s, holder = 0.0, None
    for it in deliveries:
        if holder and it.got_s < held_until_s and not events.is_doubled(holder, it):
            yield f"{it.actor} got {it.id} at {it.got_s:.3f}, {holder.actor} had {holder.id} " + (
                f"until {held_until_s:.3f}"
            )
        until_s = events.held_until_s(it)
        if until_s > held_until_s:
            held_until_s, holder = until_s, it


def latest_push(pushes: list[Push], at_s: float) -> Push | None:
    """Return the push that began last among those that had returned by then."""
    returned = bisect.bisect_left(pushes, at_s, key=lambda push: push.ended_s)
    return max(pushes[:returned], key=lambda push: push.began_s, default=None)


def outdated(events: Events, deliveries: list[Delivery], pushes: list[Push]) -> Iterator[str]:
    """Yield what is wrong with the deliveries of a key whose payload had been replaced before their
    calls began."""
    for it in deliveries:
        newer = latest_push(pushes, it.began_s)
        if newer and events.is_replaced(it, newer) and not events.is_outdated_by_healing(it):
            late_s = it.began_s - newer.began_s
            yield f"{it.actor} got {it.name}, {it.id}, {late_s:.3f} s after the push of a newer one"


def never_delivered(
    events: Events, deliveries: list[Delivery], pushes: list[Push]
) -> Iterator[str]:
    """Yield the pushes of a key after which no payload as new was delivered."""
    for push in filter(events.must_be_seen, pushes):
        later = (it for it in reversed(deliveries) if it.got_s > push.began_s)
        if all(events.is_replaced(it, push) for it in later):
            yield f"{push.name}, pushed to {push.key} at {push.began_s:.3f}, and nothing newer"


def must_find(
    events: Events, it: LookUp, newest: Push, deliveries: list[Delivery], pushes: list[Push]
) -> bool:
    """Whether a look-up had to find a task, as the newest push that had returned before it tells:
    a delivery ends when it is settled, and other than by release() only then is the key absent."""
    for d in deliveries:
        is_as_new = events.tried[d.name].ended_s >= newest.began_s
        if is_as_new and d.how != "release" and d.tried_s < it.ended_s:
            return False
    claims, moves = events.claims[newest.ident[-8:]], list[tuple[float, float]]()
    if it.call == "take":  # None, too, if another has the task in flight
        moves = [(d.got_s, d.ended_s) for d in deliveries if d.actor != it.actor]
        moves += [(claim.began_s, claim.ended_s) for claim in claims if claim.actor != it.actor]
    elif it.call == "peek":  # None, too, if it moves: by a claim, when settled, by a push
        moves = [(claim.began_s, claim.ended_s) for claim in claims]
        moves += [(d.tried_s, d.ended_s) for d in deliveries]
        moves += [(push.began_s, push.ended_s) for push in pushes]
    return not any(began < it.ended_s and ended > it.began_s for began, ended in moves)


def bound(
    events: Events, deliveries: list[Delivery], pushes: list[Push]
) -> Iterator[tuple[LookUp, Push]]:
    """Yield the look-ups of a key that had to find a task, and the push that tells so. While
    workers are killed, nothing notes when others take back what those had: only contains() has to
    find it then."""
    calls = ("contains",) if events.killed else LOOK_UPS
    for it in events.look_ups[pushes[0].key]:
        push = latest_push(pushes, it.began_s)
        if push and it.call in calls and must_find(events, it, push, deliveries, pushes):
            yield it, push


def unseen(looked: Iterable[tuple[LookUp, Push]]) -> Iterator[str]:
    """Yield what is wrong with the look-ups that had to find a task."""
    for it, push in looked:
        if not it.found:
            late_s = it.began_s - push.ended_s
            yield f"{it.actor}: {it.call}({push.key}) found nothing at {it.began_s:.3f}, " + (
                f"{late_s:.3f} s after a push by {push.actor}"
            )


def wrong_dead_letters(events: Events, left: set[str], reasons: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the dead letters: no worker gave them to fail(), which writes no
    reason here. reasons: lines "./<id>.error:<reason>"."""
    doubles = set()
    for line in reasons:
        ident = line.removeprefix("./")[:29]
        both = ident, line[-29:]  # of two tasks of a key, either may be the one too many
        if "has a task already" in line and any(map(events.may_be_two, both)):
            events.excused["dead letters beside a task of their key"] += 1
            doubles.add(ident)
        else:
            yield line
    dead = {path.partition("/")[2] for path in left if path.startswith("failed/")}
    for name in (it for it in dead - doubles if not it.endswith(".error")):
        deliveries = events.deliveries.get(name[-29:], [])
        if any(it.may_have_ended("fail") for it in deliveries):
            continue
        if events.may_have_come_back(name):
            events.excused["dead letters that came back"] += 1
        else:
            yield f"{name} is in failed/ after {[d.how for d in deliveries]}"


def lost_early(events: Events) -> Iterator[str]:
    """Yield the leases that were lost before their deadline, but for those that may be."""
    for it in events.all_deliveries():
        if it.how == "lost" and it.ended_s < it.deadline_s - events.skew_s:
            if events.may_lose(it):
                events.excused["leases lost before their deadline"] += 1
            else:
                yield f"{it.actor} lost the lease of {it.id}, which ended later"


def not_refused(events: Events) -> Iterator[str]:
    """Yield the done() of those who were cut off that took effect though others had the task. A
    call that hung may have left no time for others: then the late done() is right."""
    for it in events.all_deliveries():
        if it.actor.startswith("hold"):
            others = [d for d in events.deliveries[it.id] if it.got_s < d.got_s < it.ended_s]
            say(f"done() of one who was cut off: {it.how}; others who had the task: {len(others)}")
            if it.how != "lost" and others:
                yield f"{it.actor} was cut off, and its done() was not refused: {it}, {others}"


def key_faults(events: Events) -> dict[str, list[str]]:
    """Judge the deliveries and look-ups of each key. Return what is wrong, by what was promised."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    looked: list[tuple[LookUp, Push]] = []
    for deliveries, pushes in by_key(events):
        looked += bound(events, deliveries, pushes)
        found["overlapping deliveries"] += overlapping(events, deliveries)
        found["outdated deliveries"] += outdated(events, deliveries, pushes)
        found["pushes never delivered"] += never_delivered(events, deliveries, pushes)
    found["look-ups that found nothing"] += unseen(looked)
    if calls := collections.Counter(it.call for it, _ in looked):
        say(f"look-ups that had to find a task: {dict(calls)}")
    return found


# Turns


def turns_at_once(events: Events) -> Iterator[str]:
    turns = sorted(events.turns, key=lambda it: it.got_s)
    for first, second in itertools.pairwise(turns):
        if second.got_s < min(first.ended_s, events.gone_s(first.actor)):
            yield f"{first} and {second}"


def without_turn(events: Events, hosts: Iterable[int]) -> list[str]:
    return [*{str(host) for host in hosts}.difference(host_of(it.actor) for it in events.turns)]


# All of it


def judge(
    events: Events,
    files: set[str],
    reasons: Iterable[str] = (),
    found: Mapping[str, Iterable[str]] | None = None,
    hard: bool = False,
) -> None:
    """Judge all that was noted, the files that are left, and reasons() of dead letters. found: what
    else is wrong, by what was promised. hard: no call raises, whatever happens. Raise Violation if
    anything is wrong."""
    report(events)
    faults = {
        **key_faults(events),
        "crowded keys": events.crowds,
        "dead letters of no fail()": wrong_dead_letters(events, files, reasons),
        "leases lost early": lost_early(events),
        "double leases": leased_twice(events),
        "fences passed": not_fenced(events),
        "done() that were not refused": not_refused(events),
        "answers that were not so": not_so(events, files) if hard else (),
        "turns overlap": turns_at_once(events),
        "troubles": troubled(events, hard),
        "misplaced": misplaced(events, files),
        **(found or {}),
    }
    raise_any(events, faults)


def raise_any(events: Events, found: Mapping[str, Iterable[str]]) -> None:
    """Print how often each promise was broken, and of what, and raise Violation if one was. And how
    often that is excused: not all was well just then, or was on the way of a call."""
    faults = {what: wrong for what, texts in found.items() if (wrong := [*texts])}
    if events.excused:
        say(f"excused: {dict(events.excused)}")
    for what, wrong in faults.items():
        for ident in re.findall(r"0[0-9]{19}-[0-9a-f]{8}", wrong[0])[:1]:
            events.tell(ident)
        say(f"{len(wrong)} {what}; the first: {wrong[0]}")
    if faults:
        raise Violation("; ".join(f"{len(it)} {what}: {it[0]}" for what, it in faults.items()))
