"""Many hosts, one queue: on GlusterFS nothing acknowledged is lost, and no task is leased twice.

    python .ci/hosts.py [--seed S] [--only PART] [--self-check]

Needs root, on Linux, with FUSE, iproute2 and util-linux; installs glusterfs-server and
glusterfs-client (Debian) if they are missing. Takes six minutes.

Three hosts on this machine, each with a network, mounts, processes and a boot id of its own, are
joined by a bridge, and hold a volume of three replicas, which each of them mounts. In storms,
producers and workers of tasks without a key and with one, and a member of a line of tickets, run on
all three, while a brick is killed and comes back, a host is cut off and comes back, both at once
(no quorum: nobody may write), and processes are killed all the time. Proved (see verdict.py):

  - each push that returned ends in done/ or failed/, once, with its own bytes;
  - no task is leased twice: whoever has it lives, has not settled it, and its lease has not ended;
  - done() and fail() of one who was cut off raise LeaseLost once another has had the task, and what
    is done or failed is never delivered again (but see below);
  - while all is well nothing raises, and no call takes longer than 40 s;
  - tasks of a producer are claimed in the order of their pushes by each worker;
  - of one key in one storm, and of fifty in the next, what is said below, but that peek() and
    take() may miss the task of one who was killed; turns do not overlap, and after each storm each
    host gets one, but a ticket may be passed over while a host is cut off;
  - all mounts and, after healing, all bricks show the same files (but for lease directories that
    Gluster forgot on one brick, which no mount shows, and what raised pushes left in creating/).

After a replica was down or cut off, healing may bring back a name that had been renamed meanwhile.
The queue drops it if the task has ended, as far as Gluster shows that both are one file. Else a
task that had ended comes once more, or one that waits is claimed by two hosts: both are counted,
and no failure while not all is well; nor is what follows for a key: such a task is delivered after
a newer one, or is a dead letter beside it; or the payload comes once more that a task had before.
Nor is a key's second task that was pushed while a host was cut off, which may lose its locks. Such
dead letters are counted, and the leases that were lost early meanwhile, for the replicas did not
agree on their names.

Without faults, two processes on each host push, two take, release, fail and finish tasks of one
key, then of ten, then of fifty, and all ask for them: contains(), peek() and take(). Proved:

  - a key has at most one task that waits or is in flight, and at most one payload behind it;
  - deliveries of a key do not overlap in time, and carry a payload at least as new as the last push
    that had returned when pop() or take() was called, the last one the last payload (of pushes that
    overlap in time, any may be the last); failed/ holds only what a worker gave to fail();
  - a key whose push had returned, on any host, is not absent: contains() finds it until a delivery
    of that payload or a newer one is about to end, peek() unless it is pushed or moves meanwhile,
    take() unless it is in flight, though a mount shows files as they were up to a second ago;
  - no call raises anything, and no lease is lost before its deadline;
  - turns of two members on each host do not overlap, and come in the order of their tickets.

What a queue needs of another shared file system, between its hosts: of two rename() of one name
one succeeds, and that one only; O_EXCL makes a name once; flock() excludes, and ends with its host;
a name that one call made is found by the next call of any host, or within a second. To try: mount
it where this volume is mounted below, and run the parts one by one.

--only runs one part, with --self-check the faults that it must catch: calm; key, keys and many (one
key, ten, fifty); tickets; storms, or one of these: brick, cut, quorum.

The hosts are nameless namespaces that end with this program, however it ends: processes, mounts,
bricks (in memory) and glusterd's state go with them, and the machine's own are never touched.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import proof
import verdict
from actors import Actor, Noter
from broken import must_catch
from proof import Unable, Violation, run, say
from verdict import LEASE_MS

import femtoqueue

PACKAGES = ("glusterfs-server", "glusterfs-client")
TOOLS = ("glusterd", "gluster", "mount.glusterfs", "ip", "unshare", "nsenter", "setpriv")
HOSTS = (1, 2, 3)
MOUNT, BRICK, LOG = "/run/mnt", "/run/brick/b", "/var/log/glusterfs/run-mnt.log"
# Private, so that the machine's own glusterd, if it has one, is not touched.
PREPARE = """set -e
for dir in /var/lib/glusterd /var/log/glusterfs /run; do mount -t tmpfs none $dir; done
mkdir -p /run/gluster /run/brick /run/mnt
mount -t tmpfs -o size=512m none /run/brick
mkdir /run/brick/b
cat /proc/sys/kernel/random/uuid >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
glusterd
"""
# The first process of a host, which must reap what dies, and end when we do.
INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
# A host that does not answer for so long is cut off: a busy machine must not take so long. After
# the defaults, 42 s and 10 minutes, the same would happen later.
OPTIONS = {
    "network.ping-timeout": "10",
    "server.tcp-user-timeout": "10",
    "cluster.heal-timeout": "5",
    "cluster.shd-max-threads": "4",
    # A name whose file was replaced on one brick only stays unhealed without it, now and then.
    "cluster.favorite-child-policy": "majority",
}
HEAL_S = 240.0  # 54 were seen, on a busy machine
KEYS = {"key": 1, "keys": 10, "many": 50}
STORMS = ("brick", "cut", "quorum")  # one after the other: see episodes()
PARTS = ("calm", *KEYS, "tickets", "storms")
KEYS_S = 10.0  # for one key, again for ten and for fifty, and for tickets
STORM_STALE_S = 10.0  # of a ticket that another host's member does not touch
CLEAR_S = 90.0  # for a turn, in a storm
STORM_KEYS = (1, 50)  # in one storm after the other


Found = Mapping[str, Iterable[str]]  # what is wrong, by what was promised


# Hosts


class Host:
    """Namespaces, held by a process that ends with our end of its pipe."""

    def __init__(self, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number}"
        flags = "--net --mount --pid --fork --kill-child --mount-proc --propagation private"
        self.holder = subprocess.Popen(
            ["unshare", *flags.split(), sys.executable, "-c", INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        if not self.holder.stdout.readline():
            raise Unable(f"no namespaces here: {self.holder.stderr.read().decode().strip()}")

    def command(self, *command: str) -> list[str]:
        pid = self.holder.pid
        enter = ("nsenter", f"--target={pid}", "--mount", "--net")
        return [*enter, f"--pid=/proc/{pid}/ns/pid_for_children", *command]

    def run(self, *command: str) -> str:
        return run(*self.command(*command))

    def ip(self, *arguments: str) -> None:
        run("nsenter", f"--target={self.holder.pid}", "--net", "ip", *arguments)

    def close(self) -> None:
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait()


class Cluster:
    """Three hosts, a switch between them, and a volume that each has mounted."""

    def __init__(self) -> None:
        self.switch = Host(0)
        self.hosts = self.machines = {number: Host(number) for number in HOSTS}

    def build(self) -> None:
        self.switch.ip("link", "add", "bridge", "type", "bridge")
        self.switch.ip("link", "set", "bridge", "up")
        for number, host in self.hosts.items():
            peer = ("peer", "name", "net", "netns", str(host.holder.pid))
            self.switch.ip("link", "add", f"port{number}", "type", "veth", *peer)
            self.switch.ip("link", "set", f"port{number}", "up")
            self.join(number)
            host.ip("addr", "add", f"{host.address}/24", "dev", "net")
            host.ip("link", "set", "net", "up")
            host.ip("link", "set", "lo", "up")
            host.run("sh", "-c", PREPARE)
        for host in self.hosts.values():
            if host.number > 1:
                self.gluster("peer", "probe", host.address)
        bricks = [f"{host.address}:{BRICK}" for host in self.hosts.values()]
        self.gluster("volume", "create", "queue", "replica", "3", *bricks, "force")
        for name, value in OPTIONS.items():
            self.gluster("volume", "set", "queue", name, value)
        self.gluster("volume", "start", "queue")
        for host in self.hosts.values():
            host.run("mount", "-t", "glusterfs", f"{host.address}:/queue", MOUNT)
        self.wait_until(self.whole, 60, "all bricks are connected")

    def gluster(self, *arguments: str, tries: int = 30) -> str:
        """Tell glusterd, which needs a moment until its peers have met."""
        for _ in range(tries - 1):
            with contextlib.suppress(Unable):
                return self.hosts[1].run("gluster", "--mode=script", *arguments)
            time.sleep(0.5)
        return self.hosts[1].run("gluster", "--mode=script", *arguments)

    def kill(self, number: int) -> None:
        self.hosts[number].run("sh", "-c", "kill -9 $(cat /run/gluster/vols/queue/*.pid)")

    def revive(self) -> None:
        self.gluster("volume", "start", "queue", "force")

    def cut(self, number: int) -> None:
        """Out of the bridge: packets go nowhere, and nobody is told."""
        self.switch.ip("link", "set", f"port{number}", "nomaster")

    def join(self, number: int) -> None:
        self.switch.ip("link", "set", f"port{number}", "master", "bridge")

    def whole(self) -> bool:
        """Whether all bricks run, all mounts have all of them, and nothing is left to heal."""
        clients = f"cat {MOUNT}/.meta/graphs/active/queue-client-?/private"
        for host in self.hosts.values():
            if host.run("sh", "-c", clients).count("connected = 1") < len(HOSTS):
                return False
        heal = self.gluster("volume", "heal", "queue", "info")
        return heal.count("Number of entries: 0") == len(HOSTS)

    def to_heal(self) -> list[str]:
        heal = self.gluster("volume", "heal", "queue", "info").splitlines()
        return [line for line in heal if line.startswith(("/", "<"))]

    def lost_bricks(self) -> int:
        """Return how often a mount found that a brick did not answer."""
        count = f"grep -c 'has not responded in the last' {LOG} || true"
        return sum(int(host.run("sh", "-c", count)) for host in self.hosts.values())

    def wait_until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        end_s = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end_s:
                raise Violation(f"not within {seconds:g} s: {what}")
            time.sleep(0.5)

    def close(self) -> None:
        for host in (*self.hosts.values(), self.switch):
            host.close()


# The storm


@dataclass
class Episode:
    """What happens in a storm, and when. holder: a host where a task is held meanwhile; cuts_off: a
    host that goes on is not reached for a while."""

    fault_s: float
    text: str
    fault: Callable[[], object]
    cure_s: float
    cure: Callable[[], object]
    cuts_off: bool = False
    holder: int = 0


class Stage(Noter):
    """Actors on the hosts of a cluster, and what they noted."""

    name = "storm"
    bricks: Iterable[int] = HOSTS  # where files can be seen that no cache is in front of
    is_hard = False  # no call raises, however long the hosts are cut off
    tail_s = 6.0  # of a storm, after its last event

    def __init__(self, cluster: Cluster, log: str, seed: int, part: str) -> None:
        self.cluster, self.log = cluster, log
        self.chance = random.Random(seed)
        self.queue = f"{MOUNT}/jobs-{part}"
        self.running: dict[str, tuple[Any, Actor, Any]] = {}  # host, actor, process
        self.dying: list[Any] = []  # processes that were killed, and wait
        self.starts = itertools.count(1)
        self.lost = cluster.lost_bricks()
        self.at_rest: list[set[str]] = []  # the queue's files whenever nothing runs
        self.over = f"{self.log}.over"
        self.fd = proof.open_log(self.log)

    def start(self, host: int, kind: str, **settings: Any) -> None:
        settings = {"queue": self.queue, **settings}
        self.start_as(host, Actor(kind, "", over=self.over, **settings))

    def launch(self, host: Host, actor: Actor) -> None:
        # Who kills nsenter kills the actor.
        command = ("setpriv", "--pdeathsig", "KILL", sys.executable, __file__)
        process = subprocess.Popen(
            host.command(*command, "--actor", json.dumps(dataclasses.asdict(actor)), self.log),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running[actor.name] = host, actor, process

    def kill_one(self) -> None:
        """Kill a producer or a worker, and start it again under its node_id, if it has one."""
        names = [name for name in self.running if not name.startswith("hold")]
        host, actor, process = self.running.pop(self.chance.choice(names))
        self.note("killed", actor.name)
        process.kill()
        self.dying.append(process)  # one that waits where the network is cut dies after that
        self.start_as(host.number, actor)

    def start_as(self, host: int, actor: Actor) -> None:
        """Start an actor like this one, under a name of its own."""
        name, seed = f"{actor.kind}{host}.{next(self.starts)}", self.chance.randrange(10**9)
        self.launch(self.cluster.machines[host], dataclasses.replace(actor, name=name, seed=seed))

    def finish(self, timeout_s: float) -> None:
        """Wait for all actors, and those that were killed."""
        hang: type[Exception] = Violation
        end_s = time.monotonic() + timeout_s
        for process in self.dying:
            try:
                process.communicate(timeout=max(1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:  # GlusterFS may never answer it
                say("a process that was killed still waits in a call")
                hang = Unable  # as do those who want what it has locked, for no fault of theirs
        self.dying.clear()
        for host, actor, process in self.running.values():
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise hang(f"{actor.name} on host {host.number} hangs") from None
            if process.returncode:
                raise Violation(f"{actor.name} ended with {process.returncode}: {output}")
        self.running.clear()

    def check_machine(self) -> None:
        if self.cluster.lost_bricks() > self.lost:
            raise Unable("this machine is too busy: a brick did not answer while all was well")

    def fault(self, episode: Episode) -> None:
        if episode.holder:
            self.start(episode.holder, "hold")
            self.wait_for("got", "hold")
        self.check_machine()
        self.note("fault", int(episode.cuts_off))
        say(episode.text)
        episode.fault()

    def wait_for(self, word: str, kind: str = "") -> None:
        """Until all that run, or those of a kind, have noted it."""

        def noted() -> bool:
            with open(self.log, encoding="ascii") as file:
                names = {line.split()[1] for line in file if line.split()[2] == word}
            return all(name in names for name in self.running if name.startswith(kind))

        self.cluster.wait_until(noted, 120, f"all are {word}")

    def storm(self, episode: Episode, keys: int) -> None:
        """Let all do what they do, while something happens; then see what is left."""
        self.call_over(False)
        for host in self.cluster.hosts:
            self.start(host, "produce")
            self.start(host, "consume", node_id=f"fixed{host}")
            self.start(host, "consume")
            self.start(host, "push_keys", keys=keys, pause_s=0.05)
            self.start(host, "take_keys", keys=keys)
            self.start(host, "take_turns", stale_s=STORM_STALE_S, timeout_s=CLEAR_S)
        self.wait_for("ready")
        began_s = time.monotonic()
        next_kill_s, end_s = began_s + 2, began_s + episode.cure_s + self.tail_s
        steps: list[tuple[float, Callable[[], object]]] = [
            (episode.fault_s, lambda: self.fault(episode)),
            (episode.cure_s, episode.cure),
        ]
        while steps or time.monotonic() < end_s:
            if steps and time.monotonic() >= began_s + steps[0][0]:
                _, happen = steps.pop(0)
                happen()
            if time.monotonic() >= next_kill_s:
                self.kill_one()
                next_kill_s = time.monotonic() + 1 + 4 * self.chance.random()
            time.sleep(0.05)
        self.call_over()
        self.finish(120)
        self.heal()
        self.on_all(120, "take_turn", stale_s=STORM_STALE_S)
        self.at_rest.append(self.files(1, self.queue))

    def play(self, seconds: float, kinds: Iterable[str], watcher: int = 0, **settings: Any) -> None:
        """Let actors of these kinds do what they do, on each host, for so long."""
        self.call_over(False)
        for host, kind in itertools.product(self.cluster.hosts, kinds):
            self.start(host, kind, **settings)
        self.wait_for("ready")
        if watcher:
            self.start(watcher, "watch", queue=self.queue.replace(MOUNT, BRICK))
            self.wait_for("ready")
        time.sleep(seconds)
        self.call_over()
        self.finish(60)
        self.at_rest.append(self.files(1, self.queue))

    def call_over(self, is_over: bool = True) -> None:
        """Tell the actors that run until they are told to stop."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.over)
        if is_over:
            os.close(os.open(self.over, os.O_CREAT, 0o600))

    def heal(self) -> None:
        began_s = time.monotonic()
        try:
            self.cluster.wait_until(self.cluster.whole, HEAL_S, "the volume is healed")
        except Violation:
            left = self.cluster.to_heal()
            if not left or any("/inflight-" not in line for line in left):
                say(self.cluster.gluster("volume", "heal", "queue", "info", "split-brain"))
                raise Unable(f"GlusterFS did not heal within {HEAL_S:.0f} s: {left}") from None
            # Gluster leaves a worker's directory that was removed where two bricks were cut off.
            say("a lease directory stays on one brick, unhealed")
        self.lost = self.cluster.lost_bricks()
        self.note("healed")
        say(f"healed after {time.monotonic() - began_s:.0f} s")

    def on_all(self, timeout_s: float, kind: str, **settings: Any) -> None:
        """Let an actor on each host do what it does, to its end."""
        for host in self.cluster.hosts:
            self.start(host, kind, **settings)
        self.finish(timeout_s)

    def drain(self) -> None:
        self.on_all(120, "drain", idle_s=LEASE_MS / 1e3 + 3)

    def reasons(self) -> list[str]:
        """Return the lines "./<id>.error:<reason>" of the dead letters that have one."""
        script = f"cd {self.queue}/failed && find . -name '*.error' -exec grep -H . {{}} +"
        return self.cluster.hosts[1].run("sh", "-c", f"{script} || true").splitlines()

    def files(self, host: int, root: str) -> set[str]:
        """Return what a host sees of the queue, through its mount or on its brick."""
        listing = self.cluster.machines[host].run("sh", "-c", f"cd {root} && find . -type f")
        return {line.removeprefix("./") for line in listing.splitlines()}

    def judge(self, events: verdict.Events, found: Found, hard: bool = False) -> None:
        """Judge what was noted, and what is left. found: what else is wrong, by promise. Raises
        Violation if anything is."""
        for number, files in enumerate(self.at_rest, 1):
            wrong = verdict.crowded_at_rest(events, files)
            events.crowds += (f"at rest {number}: {it}" for it in wrong)
        left = lasting(self.files(1, self.queue))
        verdict.judge(events, left, self.reasons(), found, hard)


def episodes(stage: Stage) -> dict[str, Episode]:
    """Return what happens in storms between which the volume heals, as it has to be given the time
    to: a host that goes while another is not whole takes the newest state along."""
    one, two, three = stage.chance.sample(HOSTS, 3)
    net = stage.cluster
    no_quorum = f"host {three} is cut off and the brick of host {one} killed: no quorum"
    killed, cut = f"the brick of host {one} is killed", f"host {two} is cut off"

    def leave() -> None:
        net.cut(three)
        net.kill(one)

    def join() -> None:
        net.join(three)
        net.revive()

    return {
        "brick": Episode(3, killed, lambda: net.kill(one), 10, net.revive),
        "cut": Episode(2, cut, lambda: net.cut(two), 34, lambda: net.join(two), True, holder=two),
        "quorum": Episode(3, no_quorum, leave, 16, join, True),
    }


# Parts


def lasting(files: set[str]) -> set[str]:
    """Return files but for what raised pushes have left: no tasks, and swept away in an hour."""
    return {path for path in files if not path.startswith("creating/")}


def calm(stage: Stage, count: int) -> None:
    """A backlog from all hosts, pushed at once; then a worker on each of them."""
    stage.on_all(60, "fill", count=count)
    time.sleep(1.1)
    stage.on_all(60, "drain", idle_s=1)
    events = verdict.Events(stage.log)
    stage.judge(events, {"out of order": verdict.out_of_order(events)})


def keyed(stage: Stage, keys: int, watcher: int, seconds: float = KEYS_S) -> None:
    """Push, take and finish tasks of a few keys, on all hosts at once."""
    stage.play(seconds, ("push_keys", "take_keys") * 2, watcher, keys=keys)
    stage.on_all(60, "drain", idle_s=2)
    stage.check_machine()
    stage.judge(verdict.Events(stage.log), {}, hard=True)


def tickets(stage: Stage) -> None:
    """Take turns, by two members on each host."""
    stage.play(KEYS_S, ("take_turns",) * 2)
    stage.check_machine()
    events = verdict.Events(stage.log)
    order = sorted(events.turns, key=lambda it: it.got_s)
    pairs = [two for two in itertools.pairwise(order) if two[1].ticket <= two[0].ticket]
    idle = verdict.without_turn(events, HOSTS)
    stage.judge(events, {"hosts have no turn": idle, "turns out of order": map(str, pairs)})


def storms(stage: Stage, episodes: Iterable[Episode]) -> None:
    """Have one storm after the other, of few keys and of many; then finish what is left."""
    for episode, keys in zip(episodes, itertools.cycle(STORM_KEYS)):
        stage.storm(episode, keys)
    stage.drain()
    events, hosts = verdict.Events(stage.log, not stage.is_hard), [*stage.cluster.hosts]
    there, brick = lasting(stage.files(1, stage.queue)), stage.queue.replace(MOUNT, BRICK)
    found = {"hosts have no turn": verdict.without_turn(events, hosts), "views differ": []}
    for host, root in (*((it, stage.queue) for it in hosts), *((it, brick) for it in stage.bricks)):
        stray = lasting(stage.files(host, root)) ^ there
        is_forgotten = root == brick and all(path.startswith("inflight-") for path in stray)
        if stray and not (is_forgotten and events.may_come_back):
            found["views differ"].append(f"{root} of host {host}: {stray}")
    stage.judge(events, found, hard=stage.is_hard)


def play(hosts: Cluster, work: str, seed: int, part: str) -> None:
    """Run a part. Raises Violation if a promise is broken."""
    stage = Stage(hosts, f"{work}/{part}", seed, part)
    if part == "calm":
        calm(stage, 100)
    elif part == "tickets":
        tickets(stage)
    elif part in KEYS:
        keyed(stage, KEYS[part], 1)
    else:
        of = episodes(stage)
        storms(stage, (of[it] for it in (STORMS if part == "storms" else (part,))))


def main() -> None:
    options = proof.proof_parser(__doc__)
    options.add_argument("--only", choices=(*PARTS, *STORMS), help="run only this part")
    options.add_argument("--actor", nargs=2, help=argparse.SUPPRESS)  # its settings, and its log
    args = options.parse_args()
    femtoqueue._log().disabled = True
    if args.actor:
        Actor(**json.loads(args.actor[0])).run(proof.open_log(args.actor[1]))
        return
    say(f"seed {args.seed}")
    with (
        proof.exit_on_failure(args.seed),
        tempfile.TemporaryDirectory(prefix="femtoqueue-hosts-") as work,
    ):
        proof.need_root()
        if not os.path.exists("/dev/fuse"):
            raise Unable("it needs FUSE: there is no /dev/fuse")
        proof.install(TOOLS, *PACKAGES)
        if args.self_check:
            is_wanted = lambda part: args.only in (None, part)  # noqa: E731
            must_catch(args.seed, lambda part: ["--only", part], is_wanted)
            return
        with contextlib.closing(Cluster()) as hosts:
            hosts.build()
            for part in (args.only,) if args.only else PARTS:
                play(hosts, work, args.seed, part)


if __name__ == "__main__":
    main()
