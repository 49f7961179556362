"""Use one queue on three hosts that share a GlusterFS volume, while bricks and networks fail.

    python .ci/hosts.py [--seed S] [--only PART] [--self-check]

Needs root, on Linux, with FUSE, iproute2 and util-linux; installs glusterfs-server and
glusterfs-client (Debian) if they are missing. Takes six minutes.

The three hosts are on this machine. Each has its own network, mounts, processes and boot id. A
bridge joins their networks. Each host stores one of three replicas of a volume in its brick, a
directory in memory, and mounts the volume.

Storms. On each host run producers and workers of tasks with and without a key, and a member of a
TicketQueue. In the first storm a brick is killed and comes back. In the second storm a host is cut
off and comes back. In the third storm both happen at once, so that no host has a quorum, and no
host may write. Processes are killed all the time. Proved (see verdict.py):

  - Each task whose push() returned ends in done/ or failed/, once, with its own bytes.
  - No task is delivered during the lease of another delivery. A lease lasts until its deadline,
    until the task is settled, or until its worker dies.
  - If a worker lost its lease to another worker, done() and fail() of the first worker raise
    LeaseLost. A finished task is never delivered again (but see below, for both).
  - While the cluster is calm (no host is cut off, no brick is killed, and all is healed), no call
    raises an error, and no call takes longer than 40 s.
  - Each worker claims the tasks of a producer in the order of their pushes.
  - The tasks with a key have one key in one storm, and fifty keys in the next. The promises below,
    under "Keys and tickets", hold for these keys. But peek() and take() may miss the task of a
    worker that was killed.
  - Turns do not overlap. After each storm each host gets a turn. While a host is cut off, its
    ticket may be passed over.
  - All mounts and, after healing, all bricks show the same files. There are two exceptions. Gluster
    may leave a lease directory on one brick, which no mount shows. A push that raised an error may
    leave a file in creating/.

What healing may do. After a replica was down or cut off, healing may bring back the old name of a
file that was renamed meanwhile. Then the following events may happen. Such an event is counted and
reported, and is no failure if it happens while the cluster is not calm:

  - A finished task is delivered once more, or two hosts claim one waiting task.
  - A worker ends a delivery without LeaseLost, although another worker has got the task since.
  - A keyed task is delivered after a newer task of its key, becomes a dead letter beside such a
    task, or is delivered with an earlier payload.
  - A key gets a second task, which was pushed while a host was cut off: that host may lose its
    locks. One of the two tasks becomes a dead letter.
  - A lease is lost before its deadline, because the replicas differ in the lease's name.

Keys and tickets, without faults. On each host two processes push tasks of one key, then of ten
keys, then of fifty. Two others pop, take, release, fail and finish these tasks. All four look up
keys by contains(), peek() and take(). Proved:

  - A key has at most one task that waits or is in flight, and at most one buffered payload. While a
    buffered payload replaces that of its task, both are in keys/, and there is no such task.
  - Deliveries of a key do not overlap in time. A delivery has a payload at least as new as the last
    push that had returned when pop() or take() was called. The last delivery has the last payload.
    If pushes overlap in time, any of them may be the last.
  - failed/ holds only tasks that a worker gave to fail().
  - After a push of a key has returned on any host, calls on all hosts find the key's task until
    that payload, or a newer one, is delivered and settled: contains() always, peek() except while a
    push or a claim moves the task, and take() except while the task is in flight. They find it
    although a mount may show files as they were a second ago.
  - No call raises an error, and no lease is lost before its deadline.
  - Turns of two members on each host do not overlap, and come in the order of their tickets.

A queue on another file system that hosts share needs the following:

  - If two hosts rename() one name, exactly one succeeds.
  - O_EXCL creates a name once.
  - flock() excludes other hosts, and a lock ends when its host dies.
  - A name that one host has made is found on every host, at once or after at most a second.

To try another file system, mount it where this program mounts the volume, and run the parts one by
one.

--only runs one part: calm; key, keys or many (one key, ten keys, fifty keys); tickets; storms, or a
single storm: brick, cut or quorum. With --self-check, --only tries only the faults of broken.py
that name this part or storm.

The hosts are namespaces without names, which end with this program, however the program ends.
Processes, mounts, bricks and the state of glusterd end with them. The machine's own glusterd is
never touched.
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
TOOLS = (
    "glusterd",
    "gluster",
    "mount.glusterfs",
    "ip",
    "unshare",
    "nsenter",
    "setpriv",
)
HOSTS = (1, 2, 3)
MOUNT, BRICK, LOG = "/run/mnt", "/run/brick/b", "/var/log/glusterfs/run-mnt.log"
# These mounts are private to a host, so that the machine's own glusterd is not touched.
PREPARE = """set -e
for dir in /var/lib/glusterd /var/log/glusterfs /run; do mount -t tmpfs none $dir; done
mkdir -p /run/gluster /run/brick /run/mnt
mount -t tmpfs -o size=512m none /run/brick
mkdir /run/brick/b
cat /proc/sys/kernel/random/uuid >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
glusterd
"""
# The first process of a host. It ignores SIGCHLD, so that the kernel reaps dead orphans. It ends at
# the end of its standard input, which is a pipe from this program.
INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
# A host that does not answer for 10 s counts as cut off. So a host must answer within 10 s, even if
# this machine is busy. With the default of both timeouts, 42 s, a host that is cut off would be
# noticed later. With the default of heal-timeout, 10 minutes, healing would begin later.
OPTIONS = {
    "network.ping-timeout": "10",
    "server.tcp-user-timeout": "10",
    "cluster.heal-timeout": "5",
    "cluster.shd-max-threads": "4",
    # Without this option, Gluster sometimes does not heal a name whose file was replaced on a
    # single brick.
    "cluster.favorite-child-policy": "majority",
}
HEAL_S = 240.0  # 54 s were seen, on a busy machine
KEYS = {"key": 1, "keys": 10, "many": 50}
# the first, second and third; episodes() has their faults
STORMS = ("brick", "cut", "quorum")
PARTS = ("calm", *KEYS, "tickets", "storms")
KEYS_S = 10.0  # how long each of the parts key, keys, many and tickets takes
STORM_STALE_S = 10.0  # stale_s of a TicketQueue in a storm
CLEAR_S = 90.0  # timeout of a turn in a storm
STORM_KEYS = (1, 50)  # the number of keys in one storm and in the next


Found = Mapping[str, Iterable[str]]  # what is wrong, by broken promise


# Hosts


class Host:
    """A host: namespaces that a process holds. The process ends when close() or the end of this
    program closes its standard input."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"10.77.0.{number}"
        flags = (
            "--net --mount --pid --fork --kill-child --mount-proc --propagation private"
        )
        self.holder = subprocess.Popen(
            ["unshare", *flags.split(), sys.executable, "-c", INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        if not self.holder.stdout.readline():
            raise Unable(
                f"unshare(1) cannot make namespaces: {self.holder.stderr.read().decode().strip()}"
            )

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
    """Three hosts, a switch between them, and a volume that each host mounts."""

    def __init__(self) -> None:
        self.switch = Host(0)
        self.hosts = self.machines = {number: Host(number) for number in HOSTS}

    def build(self) -> None:
        """Connect the hosts, start glusterd on each, create the volume and mount it."""
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
        self.wait_until(self.is_whole, 60, "all bricks are connected")

    def gluster(self, *arguments: str, tries: int = 30) -> str:
        """Run gluster(8) on host 1 and return its output. Retry if it fails, because glusterd needs
        some time to connect to its peers."""
        for _ in range(tries - 1):
            with contextlib.suppress(Unable):
                return self.hosts[1].run("gluster", "--mode=script", *arguments)
            time.sleep(0.5)
        return self.hosts[1].run("gluster", "--mode=script", *arguments)

    def kill(self, number: int) -> None:
        """Kill the brick of a host."""
        self.hosts[number].run(
            "sh", "-c", "kill -9 $(cat /run/gluster/vols/queue/*.pid)"
        )

    def revive(self) -> None:
        self.gluster("volume", "start", "queue", "force")

    def cut(self, number: int) -> None:
        """Cut off a host: take it out of the bridge, so that its packets are lost silently."""
        self.switch.ip("link", "set", f"port{number}", "nomaster")

    def join(self, number: int) -> None:
        self.switch.ip("link", "set", f"port{number}", "master", "bridge")

    def is_whole(self) -> bool:
        clients = f"cat {MOUNT}/.meta/graphs/active/queue-client-?/private"
        for host in self.hosts.values():
            if host.run("sh", "-c", clients).count("connected = 1") < len(HOSTS):
                return False
        heal = self.gluster("volume", "heal", "queue", "info")
        return heal.count("Number of entries: 0") == len(HOSTS)

    def entries_to_heal(self) -> list[str]:
        heal = self.gluster("volume", "heal", "queue", "info").splitlines()
        return [line for line in heal if line.startswith(("/", "<"))]

    def count_lost_bricks(self) -> int:
        count = f"grep -c 'has not responded in the last' {LOG} || true"
        return sum(int(host.run("sh", "-c", count)) for host in self.hosts.values())

    def wait_until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `true()` holds. Raises Violation after so many seconds."""
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
    """The fault of a storm."""

    fault_s: float  # when `fault` is called, in seconds after the begin of the storm
    text: str  # what the program prints before it calls `fault`
    fault: Callable[[], object]
    cure_s: float  # when `cure` is called, in the same way
    cure: Callable[[], object]
    cuts_off: bool = False  # the network of a running host is cut
    # the host that is cut off while a `hold` actor there has a task; 0: none
    holder: int = 0


class Stage(Noter):
    """Actors on the hosts of a cluster, and their log."""

    name = "storm"
    # the hosts on which a brick can be listed, past all caches
    bricks: Iterable[int] = HOSTS
    # True: no call may raise an OSError, however long the hosts are cut off
    no_errors = False
    tail_s = 6.0  # how long a storm lasts after the cure

    def __init__(self, cluster: Cluster, log: str, seed: int, part: str) -> None:
        self.cluster = cluster
        self.log = log
        self.chance = random.Random(seed)
        self.queue = f"{MOUNT}/jobs-{part}"
        self.running: dict[str, tuple[Any, Actor, Any]] = {}  # host, actor, process
        # processes that were killed and have not been waited for
        self.dying: list[Any] = []
        self.starts = itertools.count(1)  # numbers of the actors
        self.lost = cluster.count_lost_bricks()
        # the queue's files, listed each time that no actor runs
        self.at_rest: list[set[str]] = []
        self.over = f"{self.log}.over"
        self.fd = proof.open_log(self.log)

    def start(self, host: int, kind: str, **settings: Any) -> None:
        settings = {"queue": self.queue, **settings}
        self.start_as(host, Actor(kind, "", over=self.over, **settings))

    def launch(self, host: Host, actor: Actor) -> None:
        # kill_one() kills nsenter. Because of setpriv, the actor dies with nsenter.
        command = ("setpriv", "--pdeathsig", "KILL", sys.executable, __file__)
        process = subprocess.Popen(
            host.command(
                *command, "--actor", json.dumps(dataclasses.asdict(actor)), self.log
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running[actor.name] = host, actor, process

    def kill_one(self) -> None:
        """Kill an actor other than a `hold` actor, and start another one with the same settings."""
        names = [name for name in self.running if not name.startswith("hold")]
        host, actor, process = self.running.pop(self.chance.choice(names))
        self.note("killed", actor.name)
        process.kill()
        # a process that waits for a cut network dies only later
        self.dying.append(process)
        self.start_as(host.number, actor)

    def start_as(self, host: int, actor: Actor) -> None:
        name = f"{actor.kind}{host}.{next(self.starts)}"
        seed = self.chance.randrange(10**9)
        self.launch(
            self.cluster.machines[host],
            dataclasses.replace(actor, name=name, seed=seed),
        )

    def finish(self, timeout_s: float) -> None:
        """Wait until all actors have ended, also those that were killed.

        Raises Violation if an actor fails or hangs; but Unable if it hangs while a killed process
        still hangs in a system call.
        """
        hang: type[Exception] = Violation
        end_s = time.monotonic() + timeout_s
        for process in self.dying:
            try:
                process.communicate(timeout=max(1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:  # GlusterFS may never answer
                say("a killed process still waits in a system call")
                # the other actors may hang because they wait for its locks
                hang = Unable
        self.dying.clear()
        for host, actor, process in self.running.values():
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise hang(f"{actor.name} on host {host.number} hangs") from None
            if process.returncode:
                raise Violation(
                    f"{actor.name} has exit status {process.returncode}: {output}"
                )
        self.running.clear()

    def check_machine(self) -> None:
        """Raise Unable if a brick did not answer in time though there was no fault."""
        if self.cluster.count_lost_bricks() > self.lost:
            raise Unable(
                "this machine is too busy: a brick did not answer, without a fault"
            )

    def make_fault(self, episode: Episode) -> None:
        """Begin the fault of a storm. If the episode has a holder, first start a `hold` actor there
        and wait until it has got a task."""
        if episode.holder:
            self.start(episode.holder, "hold")
            self.wait_for("got", "hold")
        self.check_machine()
        self.note("fault", int(episode.cuts_off))
        say(episode.text)
        episode.fault()

    def wait_for(self, word: str, kind: str = "") -> None:

        def noted() -> bool:
            with open(self.log, encoding="ascii") as file:
                names = {line.split()[1] for line in file if line.split()[2] == word}
            return all(name in names for name in self.running if name.startswith(kind))

        self.cluster.wait_until(noted, 120, f"all actors have logged {word!r}")

    def storm(self, episode: Episode, keys: int) -> None:
        """Run all kinds of actors during a fault and its cure; kill actors all the time. Then heal
        the cluster, let each host have a turn, and list the queue's files."""
        self.set_over(False)
        for host in self.cluster.hosts:
            self.start(host, "produce")
            self.start(host, "consume", node_id=f"fixed{host}")
            self.start(host, "consume")
            self.start(host, "push_keys", keys=keys, pause_s=0.05)
            self.start(host, "take_keys", keys=keys)
            self.start(host, "take_turns", stale_s=STORM_STALE_S, timeout_s=CLEAR_S)
        self.wait_for("ready")
        began_s = time.monotonic()
        next_kill_s = began_s + 2
        end_s = began_s + episode.cure_s + self.tail_s
        steps: list[tuple[float, Callable[[], object]]] = [
            (episode.fault_s, lambda: self.make_fault(episode)),
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
        self.set_over()
        self.finish(120)
        self.heal()
        self.on_all(120, "take_turn", stale_s=STORM_STALE_S)
        self.at_rest.append(self.files(1, self.queue))

    def play(
        self, seconds: float, kinds: Iterable[str], watcher: int = 0, **settings: Any
    ) -> None:
        """Run actors of these kinds on each host for some seconds, without faults, and list the
        queue's files. If `watcher` is a host, a `watch` actor lists its brick meanwhile."""
        self.set_over(False)
        for host, kind in itertools.product(self.cluster.hosts, kinds):
            self.start(host, kind, **settings)
        self.wait_for("ready")
        if watcher:
            self.start(watcher, "watch", queue=self.queue.replace(MOUNT, BRICK))
            self.wait_for("ready")
        time.sleep(seconds)
        self.set_over()
        self.finish(60)
        self.at_rest.append(self.files(1, self.queue))

    def set_over(self, is_over: bool = True) -> None:
        """Make the file that tells the actors to end; or, with is_over=False, remove it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.over)
        if is_over:
            os.close(os.open(self.over, os.O_CREAT, 0o600))

    def heal(self) -> None:
        """Wait until the volume is healed. Raises Unable if that takes longer than HEAL_S."""
        began_s = time.monotonic()
        try:
            self.cluster.wait_until(
                self.cluster.is_whole, HEAL_S, "the volume is healed"
            )
        except Violation:
            left = self.cluster.entries_to_heal()
            if not left or any("/inflight-" not in line for line in left):
                say(
                    self.cluster.gluster(
                        "volume", "heal", "queue", "info", "split-brain"
                    )
                )
                raise Unable(
                    f"GlusterFS did not heal within {HEAL_S:.0f} s: {left}"
                ) from None
            # A worker removed its lease directory while two bricks were cut off. Gluster does not
            # heal that: the directory stays on one brick.
            say("a lease directory stays on one brick, unhealed")
        self.lost = self.cluster.count_lost_bricks()
        self.note("healed")
        say(f"healed after {time.monotonic() - began_s:.0f} s")

    def on_all(self, timeout_s: float, kind: str, **settings: Any) -> None:
        for host in self.cluster.hosts:
            self.start(host, kind, **settings)
        self.finish(timeout_s)

    def drain(self) -> None:
        self.on_all(120, "drain", idle_s=LEASE_MS / 1e3 + 3)

    def reasons(self) -> list[str]:
        """Return the lines "./<id>.error:<reason>" of all dead letters that have a reason."""
        script = (
            f"cd {self.queue}/failed && find . -name '*.error' -exec grep -H . {{}} +"
        )
        return self.cluster.hosts[1].run("sh", "-c", f"{script} || true").splitlines()

    def files(self, host: int, root: str) -> set[str]:
        """Return the paths of the files that a host finds in `root`, relative to `root`: the
        queue's directory on the host's mount or brick."""
        listing = self.cluster.machines[host].run(
            "sh", "-c", f"cd {root} && find . -type f"
        )
        return {line.removeprefix("./") for line in listing.splitlines()}

    def judge(
        self, events: verdict.Events, found: Found, no_errors: bool = False
    ) -> None:
        """Check the log and the files that are left; see verdict.judge(). `found` adds what is
        wrong by other checks. Raises Violation if a promise is broken."""
        for number, files in enumerate(self.at_rest, 1):
            wrong = verdict.crowded_at_rest(events, files)
            events.crowds += (f"at rest {number}: {it}" for it in wrong)
        left = without_creating(self.files(1, self.queue))
        verdict.judge(events, left, self.reasons(), found, no_errors)


def episodes(stage: Stage) -> dict[str, Episode]:
    """Return the faults of the storms, by name.

    The volume must heal between two storms. If a host failed while another one is not healed, the
    newest state of a file could be on the failed host only.
    """
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
        "cut": Episode(
            2, cut, lambda: net.cut(two), 34, lambda: net.join(two), True, holder=two
        ),
        "quorum": Episode(3, no_quorum, leave, 16, join, True),
    }


# Parts


def without_creating(files: set[str]) -> set[str]:
    """Return the files that are not in creating/. A push that raised an error may leave a file
    there. This file is no task, and the maintenance removes it after an hour."""
    return {path for path in files if not path.startswith("creating/")}


def calm(stage: Stage, count: int) -> None:
    stage.on_all(60, "fill", count=count)
    time.sleep(1.1)
    stage.on_all(60, "drain", idle_s=1)
    events = verdict.Events(stage.log)
    stage.judge(events, {"out of order": verdict.out_of_order(events)})


def keyed(stage: Stage, keys: int, watcher: int, seconds: float = KEYS_S) -> None:
    stage.play(seconds, ("push_keys", "take_keys") * 2, watcher, keys=keys)
    stage.on_all(60, "drain", idle_s=2)
    stage.check_machine()
    stage.judge(verdict.Events(stage.log), {}, no_errors=True)


def tickets(stage: Stage) -> None:
    stage.play(KEYS_S, ("take_turns",) * 2)
    stage.check_machine()
    events = verdict.Events(stage.log)
    order = sorted(events.turns, key=lambda it: it.got_s)
    # The numbers begin at 1 again when nobody is in line.
    pairs = [
        (one, next_one)
        for one, next_one in itertools.pairwise(order)
        if 1 < next_one.ticket <= one.ticket
    ]
    idle = verdict.without_turn(events, HOSTS)
    stage.judge(
        events, {"hosts have no turn": idle, "turns out of order": map(str, pairs)}
    )


def storms(stage: Stage, episodes: Iterable[Episode]) -> None:
    """Run storms one after the other, in turn with one key and with fifty. Then finish all tasks,
    compare the files that the mounts and the bricks show, and check the log."""
    for episode, keys in zip(episodes, itertools.cycle(STORM_KEYS)):
        stage.storm(episode, keys)
    stage.drain()
    events = verdict.Events(stage.log, not stage.no_errors)
    hosts = [*stage.cluster.hosts]
    there = without_creating(stage.files(1, stage.queue))
    brick = stage.queue.replace(MOUNT, BRICK)
    found = {
        "hosts have no turn": verdict.without_turn(events, hosts),
        "views differ": [],
    }
    for host, root in (
        *((it, stage.queue) for it in hosts),
        *((it, brick) for it in stage.bricks),
    ):
        stray = without_creating(stage.files(host, root)) ^ there
        is_forgotten = root == brick and all(
            path.startswith("inflight-") for path in stray
        )
        if stray and not (is_forgotten and events.may_come_back):
            found["views differ"].append(f"{root} of host {host}: {stray}")
    stage.judge(events, found, no_errors=stage.no_errors)


def play(hosts: Cluster, work: str, seed: int, part: str) -> None:
    """Run a part on a queue of its own. Raises Violation if a promise is broken."""
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
    # its settings, and its log
    options.add_argument("--actor", nargs=2, help=argparse.SUPPRESS)
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
            raise Unable("this proof needs FUSE: /dev/fuse does not exist")
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
