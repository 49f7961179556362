"""Use one queue over NFS. Two clients and a server are virtual machines, whose power is cut.

    python .ci/nfs.py [--seed S] [--only PHASE] [--full] [--self-check]

Needs Linux on x86_64 and Debian's qemu-system-x86, linux-image-cloud-amd64, nfs-common, rpcbind and
busybox-static; installs them if they are missing. Downloads nfs-kernel-server and only unpacks it,
so that no server starts on this machine. Takes five minutes without KVM; --full takes half an hour.

There are three machines (machines.py) with Debian's kernel. The server exports its ext4 disk with
the option sync. Two clients mount the disk with default options (hard). The leases of NFS and the
server's grace time last 10 s. The processes in the machines are actors (actors.py). They write
their log to a serial port, so that a power cut loses no line of the log. The log is checked as in
hosts.py. The phases:

  - basic: A client sees what the other client does. The phase covers schedule(), the fence,
    processing(), waiting and a pause. The phases keys, storm and replay cover the other methods.
  - calm: Both clients push tasks, and then drain them in order, each task once.
  - keys: As in hosts.py, for one key and for ten. Meanwhile the queue is listed on the server's own
    disk.
  - storm: Both clients run producers and workers of tasks with and without a key, and members of a
    TicketQueue. Processes are killed all the time. The power of a client is cut and comes back. The
    power of the server is cut twice. A client is cut off for longer than the server keeps the
    client's locks. The phase proves what hosts.py proves in storms, and more. No call raises an
    OSError, because hard mounts wait. (A ticket may be passed over, which raises a
    FemtoQueueError.) No payload is delivered if its push raised an error. No worker gets LeaseLost
    before the deadline of its lease, or from a call that settled the task. Both clients see the
    files that are on the server's disk. A client loses its locks, without being told, if it is cut
    off, or if it reaches a rebooted server too late, after the grace time. Then a key may have two
    tasks. One of the two tasks becomes a dead letter, which is reported and is no failure.
  - replay: The server carries out one request, and its power is cut before the client gets the
    reply. The client sends the request again. The server has forgotten the first request and
    answers that the file does not exist. Each call must return as if nothing had happened.
  - power: Without NFS. A machine has a queue with sync_after_write on its own ext4 disk. It loses
    its power three times, and boots with an earlier date, another boot id and a new monotonic
    clock. Each acknowledged task exists, no finished task comes back, and ids have the order of the
    pushes.

Without options the program runs keys, a short storm and three replays, on NFS 4.2. In the short
storm, the power of each kind of machine is cut once. --only runs one whole phase. --full runs all
phases, or the phase of --only, on NFS 4.2 and 3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import glob
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import hosts
import machines
import verdict
from actors import Actor
from broken import must_catch
from hosts import BRICK, MOUNT
from proof import (
    PROJECT,
    Unable,
    Violation,
    exit_on_failure,
    install,
    proof_parser,
    run,
    say,
)

import femtoqueue

PACKAGES = "qemu-system-x86 linux-image-cloud-amd64 nfs-common rpcbind busybox-static libsqlite3-0"
UNPACKED = "nfs-kernel-server"  # an installation would start a server on this machine
SERVER_TOOLS = ("nfsdcld", "exportfs", "rpc.mountd", "rpc.nfsd")
CLIENT_TOOLS = ("mount.nfs", "rpc.statd", "rpcbind", "sm-notify")
TOOLS = (machines.QEMU, "busybox", "modprobe", "mkfs.ext4", *CLIENT_TOOLS)
SERVER = 9
CLIENTS = (1, 2)
DISK_BYTES = 1 << 30
GRACE_S = 10  # the server's grace time, and the length of its leases
# of the phase keys: long, as a call takes 100 times as long as on a real machine
KEYS_S = 25.0
HOME = "/femtoqueue"  # the directory of the project in a machine
TEXTS = {
    "/etc/exports": f"{BRICK} 10.77.0.0/24(rw,sync,no_root_squash,no_subtree_check)\n",
    "/etc/group": "root:x:0:\n_rpc:x:1:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/netconfig": "udp tpi_clts v inet udp - -\ntcp tpi_cots_ord v inet tcp - -\n"
    "local tpi_cots_ord - loopback - - -\n",
    "/etc/passwd": "root:x:0:0::/:/bin/sh\n_rpc:x:1:1::/run/rpcbind:/bin/sh\n",
    "/etc/protocols": "tcp 6 TCP\nudp 17 UDP\n",
    "/etc/services": "sunrpc 111/tcp portmapper\nsunrpc 111/udp portmapper\n"
    "nfs 2049/tcp\nnfs 2049/udp\n",
}
PREPARE = """
hostname hostNUMBER
ip link set eth0 up
ip addr add 10.77.0.NUMBER/24 dev eth0
mkdir -p /run/mnt /run/brick /run/rpcbind /run/rpc_pipefs /var/lib/nfs
"""
SERVE = f"""
mount -t ext4 /dev/vda /run/brick
mkdir -p {BRICK} /run/brick/nfs
mount --bind /run/brick/nfs /var/lib/nfs
mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/nfsdcld
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t rpc_pipefs none /run/rpc_pipefs
mount -t nfsd none /proc/fs/nfsd
echo {GRACE_S} >/proc/fs/nfsd/nfsv4leasetime
echo {GRACE_S} >/proc/fs/nfsd/nfsv4gracetime
echo {GRACE_S} >/proc/sys/fs/nfs/nlm_grace_period
rpcbind
rpc.statd
nfsdcld -p /run/rpc_pipefs
exportfs -r
rpc.mountd
rpc.nfsd 8
"""
JOIN = f"""
mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak
[ -z "KEPT" ] || echo KEPT | base64 -d | tar -x -C /var/lib/nfs
rpcbind
rpc.statd
mount.nfs 10.77.0.{SERVER}:{BRICK} {MOUNT} -o vers=%s
"""
LOCAL = "local"
MOUNTS = {
    LOCAL: f"mount -t ext4 /dev/vda {MOUNT}",
    "4.2": JOIN % "4.2",
    "3": JOIN % "3",
}


# A server and two clients


def build(work: str) -> bytes:
    """Return the image of the machines. The server's programs come from Debian's package, which is
    only unpacked."""
    run("sh", "-c", f"cd {work} && apt-get download -q {UNPACKED}", timeout_s=120)
    run("dpkg", "-x", *glob.glob(f"{work}/{UNPACKED}_*.deb"), f"{work}/server")
    sources = {f"{PROJECT}/femtoqueue.py": HOME}
    sources |= dict.fromkeys(glob.glob(f"{PROJECT}/.ci/*.py"), f"{HOME}/.ci")
    programs = [shutil.which(tool) or "" for tool in CLIENT_TOOLS]
    programs += [f"{work}/server/usr/sbin/{name}" for name in SERVER_TOOLS]
    main = f"{HOME}/.ci/nfs.py --guest"
    return machines.build_image(f"{work}/root", main, sources, programs, TEXTS)


class Lab:
    """A server with a disk, and its clients; or, for LOCAL, one machine with a disk."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.behind_s = 0.0
        # an archive of rpc.statd's files on each client
        self.kept = dict.fromkeys(CLIENTS, "")
        self.network = machines.Network((SERVER, *CLIENTS))
        with tempfile.TemporaryDirectory(prefix="femtoqueue-nfs-") as work:
            image = machines.memory_file("image", build(work))
        disk = machines.memory_file("disk")
        os.truncate(disk, DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", f"/proc/{os.getpid()}/fd/{disk}")
        with_disk = 1 if version == LOCAL else SERVER
        numbers = (1,) if version == LOCAL else (SERVER, *CLIENTS)
        self.machines = {
            n: machines.Machine(n, self.network, image, disk if n == with_disk else -1)
            for n in numbers
        }
        self.server = self.machines[with_disk]
        self.hosts = {n: self.machines[n] for n in numbers if n != SERVER}
        self.fds = (image, disk)
        self.network.start()

    def start(self, numbers: Iterable[int]) -> None:
        """Boot machines. The server exports its disk, and a client mounts it."""
        machines = [self.machines[number] for number in numbers]
        for machine in machines:
            machine.boot()
        for machine in machines:
            machine.wait_until_up(self.behind_s)
            script = SERVE if machine.number == SERVER else MOUNTS[self.version]
            script = (PREPARE + script).replace("NUMBER", str(machine.number))
            machine.run(
                "sh", "-exc", script.replace("KEPT", self.kept.get(machine.number, ""))
            )

    def keep_statd(self, number: int) -> None:
        """Save the files of a client's rpc.statd, for the next boot.

        A real client has these files on its disk, but a client here has no disk. After a reboot
        rpc.statd reads the files and tells the NFS 3 server to drop the locks of this client.
        """
        if self.version == "3":
            command = "tar -c -C /var/lib/nfs sm state | base64 | tr -d '\n'"
            self.kept[number] = self.machines[number].run("sh", "-c", command)

    def serve(self) -> None:
        self.start([SERVER])

    def close(self) -> None:
        for machine in self.machines.values():
            if machine.is_on:
                machine.power_off()
        for fd in self.fds:
            os.close(fd)

    def count_lost_bricks(self) -> int:
        """Return 0: only GlusterFS reports lost bricks."""
        return 0

    wait_until = hosts.Cluster.wait_until


# A lost reply


class Trap:
    """Passes on all frames until a client has made a certain call to the server. From then on, the
    server's frames are dropped."""

    def __init__(self, call: str) -> None:
        self.pattern = re.compile(call)  # matches the call, in the form of nfs_call()
        self.xid = b""  # the transaction id of the call, after it was passed on
        # set when the server has sent the reply, which is dropped
        self.caught = threading.Event()

    def drops(self, source: int, frame: bytes) -> bool:
        if source == SERVER:
            answer = tcp_payload(frame)
            if self.xid and answer[4:12] == self.xid + b"\0\0\0\1":
                if any(answer[28:32]):
                    # an error, "retry later": wait for the next call
                    self.xid = b""
                else:
                    self.caught.set()
            return bool(self.xid)
        if not self.xid and self.pattern.fullmatch(
            nfs_call(payload := tcp_payload(frame))
        ):
            self.xid = payload[4:8]
        return False


def drop_nothing(source: int, frame: bytes) -> bool:
    return False


def tcp_payload(frame: bytes) -> bytes:
    """Return the payload of a TCP segment over IPv4, or b"" if the frame is something else."""
    if frame[12:14] != b"\x08\0" or frame[23] != 6:
        return b""
    packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")]
    segment = packet[4 * (packet[0] & 15) :]
    return segment[4 * (segment[12] >> 4) :]


class Parts:
    """Reads the values of a message in XDR (RFC 4506), one after the other."""

    def __init__(self, message: bytes, at: int) -> None:
        self.message = message
        self.at = at

    def number(self) -> int:
        self.at += 4
        return int.from_bytes(self.message[self.at - 4 : self.at], "big")

    def opaque(self) -> str:
        length = self.number()
        found = self.message[self.at : self.at + length]
        self.at += length + -length % 4
        return found.decode("latin-1")


def nfs_call(payload: bytes) -> str:
    """Return "rename <old> <new>" or "remove <name>" if a segment begins with such a call, else "".

    A call consists of length, xid, 0 (a call), 2 (the version of RPC), program 100003
    (NFS), version of NFS, procedure, credentials and verifier (RFC 5531). In version 3, a file
    handle and a name follow, twice for a rename (RFC 1813). In version 4, a sequence of operations
    follows, each with its arguments (RFC 8881).
    """
    if payload[8:20] != struct.pack(">III", 0, 2, 100003):
        return ""
    version, procedure = struct.unpack(">II", payload[20:28])
    parts = Parts(payload, 32)
    parts.opaque()
    parts.number()
    parts.opaque()
    if version == 3:
        what, count = {12: ("remove", 1), 14: ("rename", 2)}.get(procedure, ("", 0))
        return " ".join(
            [what, *[(parts.opaque(), parts.opaque())[1] for _ in range(count)]]
        )
    parts.opaque()
    parts.at += 8  # the minor version, and the number of operations
    operation = 0
    while parts.at < len(payload) and (operation := parts.number()) in (22, 32, 53):
        if operation == 22:  # PUTFH: a file handle; 32, SAVEFH, has no arguments
            parts.opaque()
        elif operation == 53:  # SEQUENCE: a session id and four numbers
            parts.at += 32
    what, count = {28: ("remove", 1), 29: ("rename", 2)}.get(operation, ("", 0))
    return " ".join([what, *[parts.opaque() for _ in range(count)]])


# In a machine


class Guest(machines.Guest):
    """The first process of a machine, which starts actors and sessions."""

    def __init__(self) -> None:
        super().__init__(vars(femtoqueue))

    def act(self, number: int, settings: dict[str, Any]) -> None:
        actor = Actor(**{**settings, "offset_s": self.offset_s, "over": "/run/over"})
        self.fork(number, lambda: actor.run(self.notes))

    def over(self, number: int, is_over: bool) -> None:
        if is_over:
            os.close(os.open("/run/over", os.O_CREAT))
        elif os.path.exists("/run/over"):
            os.unlink("/run/over")
        self.answer(number, None)


# Scripts. A line is a call on client a or b; after "=>" stands the repr() of the result, or the
# name of the exception that the call must raise. `a&` begins a call and does not wait; `a=` waits
# for it. `cut <pattern>` applies to the next call: when the server has carried out the request that
# matches the pattern, its reply is dropped, and the server's power is cut. After `# ` stands a
# title. In REPLAYS each title begins a script, and `## ` begins a group of scripts (see replays()).

BASIC = r"""
# a time
a  q.schedule(b"later", (time.time() + 3) * 1e6) and None
b  q.pop()  => None
b  (t := q.pop(60)) and t.data  => b'later'
b  q.done(t)
# the fence
a  q.push(b"fence") and None
a  (t := q.pop(9, lease_ms=2000)) and t.data  => b'fence'
b  (t := q.pop(60)) and (t.data, t.attempts)  => (b'fence', 2)
a  q.extend(t)  => LeaseLost
a  q.done(t)  => LeaseLost
b  q.done(t)
# processing() renews the lease
a  q.push(b"long") and None
a  (t := q.pop(9)) and t.data  => b'long'
a& exec("with q.processing(t): time.sleep(9)")
b  q.pop(7)  => None
a=
b  sorted(t.data for t in q.tasks("done"))  => [b'fence', b'later', b'long']
# waiting
b& (t := q.pop(60)) and t.data
a  q.push(b"soon") and None
b=  => b'soon'
b  q.done(t)
# pause
b  q.paused  => False
a  q.pause()
a  q.push(b"paused") and None
b  q.paused, q.pop(2)  => (True, None)
b& (t := q.pop(60)) and t.data
a  q.resume()
b=  => b'paused'
b  q.done(t)
"""

REPLAYS = r"""
## nothing before
# push
cut rename (\S+) \1
a  q.push(b"x") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'x']
# claim
a  q.push(b"x") and None
cut rename (\S+) \d+~1~\w+~\1
a  (t := q.pop()) and t.data  => b'x'
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b'x']
# replace aside
a  q.push(b"1", key="k") and None
cut rename (\S+) \1
a  q.push(b"2", key="k") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
# replace
a  q.push(b"1", key="k") and None
cut rename (\S+) (?!\1)0\d{19}-\w+
a  q.push(b"2", key="k") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
# replace back
a  q.push(b"1", key="k") and None
a  q.release(q.pop())
cut rename (0\d{19}-\w+) \d+~0~\1
a  q.push(b"2", key="k") and None
b  [q.done(t) or (t.data, t.attempts) for t in q.drain()]  => [(b'2', 1)]
# take along
a  q.push(b"1", key="k") and None
a  (t := q.pop()) and t.data  => b'1'
a  q.push(b"2", key="k") and None
a  q.release(t)
cut rename (0\d{19}-\w+) \d+~1~\w+~(?!\1)\S+
a  (t := q.pop()) and t.data  => b'2'
a  q.done(t)
b  [t.data for state in STATES for t in q.tasks(state)]  => [b'2']
# removal
a  q = FemtoQueue(q.data_dir, None, 600_000, keep_done=False)
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b'x'
cut remove \d+~1~\S+
a  q.done(t)
b  [t.data for state in STATES for t in q.tasks(state)]  => []
# schedule
cut rename (\S+) \d+~0~\1
a  q.schedule(b"x", 0) and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'x']
# first of a key
cut rename (\S+) (?!\1)0\d{19}-\w+
a  q.push(b"x", key="k") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'x']
# due
a  q.schedule(b"x", 0) and None
cut rename \d+~0~(\S+) \d+~0~\1
a  (t := q.pop()) and t.data  => b'x'
a  q.done(t)
## a lease before
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b'x'
# done
cut rename \d+~1~\w+~(\S+) \1
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b'x']
# fail
cut rename \d+~1~\w+~(\S+) \1
a  q.fail(t, "why")
b  [(t.data, t.error) for t in q.tasks("failed")]  => [(b'x', 'why')]
# reason
cut rename \S+ \S+\.error
a  q.fail(t, "why")
b  [(t.data, t.error) for t in q.tasks("failed")]  => [(b'x', 'why')]
# release
cut rename \d+~1~\S+ \d+~1~\S+
a  q.release(t)
b  [q.done(t) or (t.data, t.attempts) for t in q.drain()]  => [(b'x', 2)]
# extend
cut rename \d+~1~\S+ \d+~1~\S+
a  q.extend(t)
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b'x']
# retry
a  q.fail(t, "why")
cut rename (\S+) \d+~0~\1
a  q.retry(t.id)
b  [q.done(t) or (t.data, t.attempts) for t in q.drain()]  => [(b'x', 1)]
# checkpoint
cut rename (?!\d+~)\S+ \S+
a  q.checkpoint(t, b"half")
a  q.release(t)
b  [q.done(t) or (t.data, t.checkpoint) for t in q.drain()]  => [(b'x', b'half')]
## a lease of a key before
a  q.push(b"1", key="k") and None
a  (t := q.pop()) and t.data  => b'1'
# behind a key
cut rename (\S+) (?!\1)0\d{19}-\w+
a  q.push(b"2", key="k") and None
a  q.done(t)
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
# done with a key
a  q.push(b"2", key="k") and None
cut rename \d+~1~\w+~(\S+) \1
a  q.done(t)
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
# promotion
a  q.push(b"2", key="k") and None
cut rename (\S+) \1
a  q.done(t)
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
"""


class Script:
    """Plays a script on two clients, each with its own session and queue object."""

    def __init__(self, lab: Lab, name: str, settings: str) -> None:
        self.lab = lab
        self.name = name
        self.sessions = {
            who: lab.hosts[n].ask("session") for n, who in enumerate("ab", 1)
        }
        self.waiting: dict[str, machines.Call] = {}
        self.pattern = ""  # of the last `cut`, until the next call
        for who in self.sessions:
            self.step(f"{who}  q = FemtoQueue('{MOUNT}/{name}', {settings})")

    def play(self, script: str) -> None:
        for line in script.strip().splitlines():
            if line.startswith("# "):
                say(f"{self.name}: {line[2:]}")
            elif line.startswith("cut "):
                self.pattern = line[4:]
            else:
                self.step(line)
        for session in self.sessions.values():
            session.kill()

    def step(self, line: str) -> None:
        who, mode, code, wanted = re.fullmatch(  # type: ignore[union-attr]
            r"(\w)([ &=])\s*(.*?)(?:  => (.*))?", line
        ).groups()
        if mode != "=":
            self.waiting[who] = self.begin_call(self.sessions[who], code)
        if mode == "&":
            return
        try:
            kind, text = self.waiting.pop(who).answer()
        except subprocess.TimeoutExpired as error:
            kind, text = "TimeoutExpired", f"{error}"
        is_right = kind == wanted if kind else wanted in (None, text)
        if not is_right:
            raise Violation(f"{self.name}: {line}\n    but: {kind} {text}")

    def begin_call(self, session: machines.Call, code: str) -> machines.Call:
        """Begin a call. After a `cut`, wait for the request, then cut the server's power and boot
        the server again."""
        if not self.pattern:
            return session.evaluate(code)
        trap = Trap(self.pattern)
        self.pattern = ""
        self.lab.network.drops = trap.drops
        call = session.evaluate(code)
        if not trap.caught.wait(machines.CALL_S):
            raise Violation(f"{self.name}: no request matched {trap.pattern.pattern}")
        self.lab.server.power_off()
        self.lab.network.drops = drop_nothing
        self.lab.serve()
        return call


def replays() -> Iterator[tuple[str, str]]:
    """Yield the title and the script of each replay. The first lines of a group are put in front of
    each script of the group."""
    for group in re.split("(?m)^## .*\n", REPLAYS)[1:]:
        beginning, *scripts = re.split("(?m)^# ", group)
        for title, script in (it.split("\n", 1) for it in scripts):
            yield title, beginning + script


def replay(lab: Lab, names: Iterable[str]) -> None:
    scripts = dict(replays())
    for name in names or scripts:
        script = Script(lab, name.replace(" ", "-"), "timeout_stale_ms=600_000")
        script.play(scripts[name])
        say(f"replay of {name}: passed")


# Keys and storms, as in hosts.py


class Stage(hosts.Stage):
    """Actors in the machines of a Lab."""

    cluster: Any  # a Lab
    bricks = (SERVER,)
    no_errors = True
    # longer than the grace time, in which the server grants no new lock
    tail_s = GRACE_S + 5.0

    def __init__(self, lab: Lab, seed: int, phase: str) -> None:
        log = f"/proc/self/fd/{machines.memory_file(phase)}"
        super().__init__(lab, log, seed, phase)  # type: ignore[arg-type]
        self.off: list[Actor] = []  # the actors that ran on a host whose power was cut
        # how often, since the client's boot
        self.lost_locks = dict.fromkeys(CLIENTS, 0)
        for machine in lab.machines.values():
            machine.on_line = lambda line: os.write(self.fd, line.encode())

    def launch(self, host: Any, actor: Actor) -> None:
        settings = dataclasses.asdict(actor)
        self.running[actor.name] = host, actor, host.ask("act", settings=settings)

    def set_over(self, is_over: bool = True) -> None:
        for machine in self.cluster.machines.values():
            if machine.is_on:
                machine.ask("over", is_over=is_over).answer()

    def cut_power(self, number: int) -> None:
        """Cut the power of a client, on which actors run."""
        # This takes a while, in which the actors go on. So it comes before the "killed" in the log.
        self.cluster.keep_statd(number)
        for name, (host, actor, _) in list(self.running.items()):
            if host.number == number:
                self.note("killed", name)
                self.off.append(actor)
                del self.running[name]
        self.dying = [call for call in self.dying if call.machine.number != number]
        self.cluster.machines[number].power_off()
        self.lost_locks[number] = 0

    def restore(self, number: int) -> None:
        self.cluster.start([number])
        while self.off:
            actor = self.off.pop()
            self.start_as(number, actor)

    def heal(self) -> None:
        began_s = time.monotonic()
        for number in self.cluster.hosts:
            self.cluster.machines[number].run("touch", f"{MOUNT}/healed{number}")
            self.note_lost_locks(number)
        self.note("healed")
        say(f"all clients reach the server after {time.monotonic() - began_s:.0f} s")

    def note_lost_locks(self, number: int) -> None:
        """Ask the kernel of a client whether the client has lost its locks, and log that.

        A client loses its locks if it was cut off, or if it reached a rebooted server too late,
        after the grace time.
        """
        found = "dmesg | grep -c 'lost .* locks' || true"
        count = int(self.cluster.machines[number].run("sh", "-c", found))
        if count > self.lost_locks[number]:
            self.note("unlocked")
            say(f"host {number} lost its locks")
        self.lost_locks[number] = count


def episodes(stage: Stage) -> dict[str, hosts.Episode]:
    one, other = (stage.chance.choice(CLIENTS) for _ in range(2))
    lab = stage.cluster
    server = stage.cluster.server
    cut = stage.cluster.network.cut
    end, restore = lambda: stage.cut_power(one), lambda: stage.restore(one)
    go, until_s = lambda: cut.add(other), 2 * GRACE_S + 5
    return {
        "server": hosts.Episode(
            4, "the server's power is cut", server.power_off, 5, lab.serve
        ),
        "client": hosts.Episode(4, f"host {one}'s power is cut", end, 5, restore),
        "net": hosts.Episode(
            2, f"host {other} is cut off", go, until_s, cut.clear, True, other
        ),
        "server again": hosts.Episode(
            4, "the server's power is cut again", server.power_off, 5, lab.serve
        ),
    }


# Power


def power(lab: Lab, seed: int) -> None:
    """Cut the power of a machine with a queue on its own disk, three times.

    After each boot the machine's date is another hour behind, and its monotonic clock begins again.
    """
    stage = Stage(lab, seed, "power")
    for boot in range(4):
        stage.set_over(False)
        for kind in ("produce", "consume") * 2:
            stage.start(1, kind, sync=True)
        stage.wait_for("ready")
        time.sleep(4 + 4 * stage.chance.random())
        if boot < 3:
            stage.cut_power(1)
            lab.behind_s += 3600
            lab.start([1])
    stage.set_over()
    stage.finish(machines.CALL_S)
    stage.drain()
    events = verdict.Events(stage.log)
    of = {it.ident: it for it in events.tried.values() if it.ident}
    early = [
        f"{second} was pushed after {first}, but sorts before {first}"
        for first, second in itertools.permutations(of, 2)
        if of[first].ended_s < of[second].began_s and first > second
    ]
    stage.judge(events, {"ids out of order": early})


# All phases

PHASES = ("basic", "calm", "keys", "storm", "replay", "power")
# run by default; of storm and replay only these parts:
SHORT = ("keys", "storm", "replay")
SHORT_STORM = ("client", "server", "net")
SHORT_REPLAYS = ("push", "claim", "done")


def prove(lab: Lab, seed: int, phase: str, short: bool) -> None:
    """Run a phase on a queue of its own. Raises Violation if a promise is broken."""
    if phase == "basic":
        Script(lab, "basic", "timeout_stale_ms=4000").play(BASIC)
    elif phase == "calm":
        hosts.calm(Stage(lab, seed, phase), 50)
    elif phase == "keys":
        for count in (1, 10):
            hosts.keyed(Stage(lab, seed, f"keys{count}"), count, SERVER, KEYS_S)
    elif phase == "storm":
        stage = Stage(lab, seed, phase)
        of = episodes(stage)
        hosts.storms(stage, (of[it] for it in (SHORT_STORM if short else of)))
    elif phase == "replay":
        replay(lab, SHORT_REPLAYS if short else ())
    else:
        power(lab, seed)


def prove_all(
    version: str, seed: int, phases: Iterable[str], short: bool = False
) -> None:
    with contextlib.closing(Lab(version)) as lab:
        began_s = time.monotonic()
        lab.start(lab.machines)
        for what in ("boot", *phases):
            if what != "boot":
                prove(lab, seed, what, short)
            say(f"{what}, {version}: passed, {time.monotonic() - began_s:.0f} s")
            began_s = time.monotonic()


def run_all(args: argparse.Namespace) -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unable("this proof needs Linux on x86_64")
    install((*TOOLS, machines.KERNELS), *PACKAGES.split())
    if args.self_check:
        must_catch(args.seed, lambda phase: ["--only", phase])
        return
    phases = (args.only,) if args.only else PHASES if args.full else SHORT
    is_short = not (args.only or args.full)
    if on_nfs := [phase for phase in phases if phase != "power"]:
        for version in ("4.2", "3") if args.full else ("4.2",):
            prove_all(version, args.seed, on_nfs, is_short)
    if "power" in phases:
        prove_all(LOCAL, args.seed, ["power"])


def main() -> None:
    options = proof_parser(__doc__)
    add = options.add_argument
    add("--only", choices=PHASES, help="run only this phase, the whole of it")
    add("--full", action="store_true", help="run all phases, on both versions of NFS")
    add("--guest", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.guest:
        Guest().serve()
    say(f"seed {args.seed}")
    with exit_on_failure(args.seed):
        try:
            run_all(args)
        except subprocess.TimeoutExpired as error:
            raise Unable(f"{error}") from None


if __name__ == "__main__":
    main()
