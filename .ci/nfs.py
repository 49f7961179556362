"""Real NFS, one queue: two clients and a server in virtual machines, power cuts and lost replies.

    python .ci/nfs.py [--seed S] [--only PHASE] [--full] [--self-check]

Needs Linux on x86_64 and Debian's qemu-system-x86, linux-image-cloud-amd64, nfs-common, rpcbind
and busybox-static; installs them if they are missing, and fetches nfs-kernel-server to unpack it:
no server is started on this machine. Takes five minutes, without KVM; --full takes half an hour.

Three machines (machines.py) with Debian's kernel: a server, with an ext4 disk that it exports with
sync, and two clients that mount it with default options (hard); leases and grace time of the server
are 10 s. Their processes tell this program what they do through a port that a power cut does not
touch. They are those of actors.py, and judged as in hosts.py. Phases:

  - basic: what one client does, the other one sees: schedule, the fence, processing, waiting, a
    pause (what else there is, keys, storm and replay show);
  - calm: a backlog from both clients is taken in order, each task once;
  - keys: as in hosts.py, for one key and for ten; the server's own disk is watched meanwhile;
  - storm: producers and workers on both clients, of tasks without a key and with one, and members
    of a line of tickets, killed all the time, while the power of a client is cut and comes back,
    that of the server twice, and a client is cut off for longer than the server grants it locks.
    As in hosts.py; besides, no call ever raises an error, for hard mounts wait (but a ticket may
    be passed over); no push that raised is delivered; nobody is told that his lease was lost who
    had ended the task, or whose deadline is still to come; both clients see what the server's disk
    has. A client that is cut off, or comes after the grace time, loses its locks, and is not told:
    if a key has two tasks then, the dead letter that one becomes is printed, and no failure;
  - replay: the server carries out one request, and its power is cut before the client has the
    answer. The client asks again, and the server, which has forgotten, says that there is no such
    file. Each call must return as if nothing had happened;
  - power: no NFS: a machine with a queue on its own ext4 disk, sync_after_write, loses its power
    three times and comes back with an earlier date, another boot id and a new monotonic clock.
    What was acknowledged is there, what was done stays done, order is that of the pushes.

Without options it runs keys, a storm with one power cut of each kind, and three replays, on NFS
4.2. --only runs one phase, all of it; --full all phases, or that one, on NFS 4.2 and 3.
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
from proof import PROJECT, Unable, Violation, exit_on_failure, install, proof_parser, run, say

import femtoqueue

PACKAGES = "qemu-system-x86 linux-image-cloud-amd64 nfs-common rpcbind busybox-static libsqlite3-0"
UNPACKED = "nfs-kernel-server"  # installed, it would start a server on this machine
SERVER_TOOLS = ("nfsdcld", "exportfs", "rpc.mountd", "rpc.nfsd")
CLIENT_TOOLS = ("mount.nfs", "rpc.statd", "rpcbind", "sm-notify")
TOOLS = (machines.QEMU, "busybox", "modprobe", "mkfs.ext4", *CLIENT_TOOLS)
SERVER, CLIENTS = 9, (1, 2)
DISK_BYTES = 1 << 30
GRACE_S = 10  # of the server, and how long its leases are
KEYS_S = 25.0  # a call takes a hundred times as long here as on a real machine
HOME = "/femtoqueue"  # of the program in a machine
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
MOUNTS = {LOCAL: f"mount -t ext4 /dev/vda {MOUNT}", "4.2": JOIN % "4.2", "3": JOIN % "3"}


# The laboratory: a server and two clients


def build(work: str) -> bytes:
    """Return the image. The programs of the server are from Debian's package, unpacked only."""
    run("sh", "-c", f"cd {work} && apt-get download -q {UNPACKED}", timeout_s=120)
    run("dpkg", "-x", *glob.glob(f"{work}/{UNPACKED}_*.deb"), f"{work}/server")
    sources = {f"{PROJECT}/femtoqueue.py": HOME}
    sources |= dict.fromkeys(glob.glob(f"{PROJECT}/.ci/*.py"), f"{HOME}/.ci")
    programs = [shutil.which(tool) or "" for tool in CLIENT_TOOLS]
    programs += [f"{work}/server/usr/sbin/{name}" for name in SERVER_TOOLS]
    main = f"{HOME}/.ci/nfs.py --guest"
    return machines.build_image(f"{work}/root", main, sources, programs, TEXTS)


class Lab:
    """A server with a disk and its clients; or, for LOCAL, one machine with a disk. It stands in
    for hosts.Cluster."""

    def __init__(self, version: str) -> None:
        self.version, self.behind_s = version, 0.0
        self.kept = dict.fromkeys(CLIENTS, "")  # an archive of what a client has on its disk
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

    def join(self, numbers: Iterable[int]) -> None:
        """Boot machines; the server offers its disk, and a client mounts it."""
        machines = [self.machines[number] for number in numbers]
        for machine in machines:
            machine.boot()
        for machine in machines:
            machine.join(self.behind_s)
            script = SERVE if machine.number == SERVER else MOUNTS[self.version]
            script = (PREPARE + script).replace("NUMBER", str(machine.number))
            machine.run("sh", "-exc", script.replace("KEPT", self.kept.get(machine.number, "")))

    def keep_statd(self, number: int) -> None:
        """Save what rpc.statd has on the disk of a client, which is in memory here. After a reboot
        rpc.statd reads it, and tells a server of NFS 3 to drop the locks of this client."""
        if self.version == "3":
            command = "tar -c -C /var/lib/nfs sm state | base64 | tr -d '\n'"
            self.kept[number] = self.machines[number].run("sh", "-c", command)

    def serve(self) -> None:
        """Bring the server back."""
        self.join([SERVER])

    def close(self) -> None:
        for machine in self.machines.values():
            if machine.is_on:
                machine.power_off()
        for fd in self.fds:
            os.close(fd)

    def count_lost_bricks(self) -> int:
        return 0

    wait_until = hosts.Cluster.wait_until


# One answer that is lost


class Trap:
    """Lets one call of a client through to the server, and nothing from the server after that."""

    def __init__(self, call: str) -> None:
        self.pattern = re.compile(call)
        self.xid = b""
        self.caught = threading.Event()

    def holds(self, source: int, frame: bytes) -> bool:
        """Whether a frame must not be passed on."""
        if source == SERVER:
            answer = tcp_payload(frame)
            if self.xid and answer[4:12] == self.xid + b"\0\0\0\1":
                if any(answer[28:32]):  # an error: it asks for patience
                    self.xid = b""
                else:
                    self.caught.set()
            return bool(self.xid)
        if not self.xid and self.pattern.fullmatch(nfs_call(payload := tcp_payload(frame))):
            self.xid = payload[4:8]
        return False


def open_to_all(source: int, frame: bytes) -> bool:
    return False


def tcp_payload(frame: bytes) -> bytes:
    """Return what a TCP segment over IPv4 carries, b"" if the frame is none."""
    if frame[12:14] != b"\x08\0" or frame[23] != 6:
        return b""
    packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")]
    segment = packet[4 * (packet[0] & 15) :]
    return segment[4 * (segment[12] >> 4) :]


class Parts:
    """Reads what XDR (RFC 4506) has put into a message."""

    def __init__(self, message: bytes, at: int) -> None:
        self.message, self.at = message, at

    def number(self) -> int:
        self.at += 4
        return int.from_bytes(self.message[self.at - 4 : self.at], "big")

    def opaque(self) -> str:
        length = self.number()
        found = self.message[self.at : self.at + length]
        self.at += length + -length % 4
        return found.decode("latin-1")


def nfs_call(payload: bytes) -> str:
    """Return "rename <old> <new>" or "remove <name>" if a segment begins with that call, else "".

    A call is: length, xid, 0, 2, program 100003, version, procedure, credentials and verifier
    (RFC 5531). Version 3 names handle and name, twice for a rename (RFC 1813); version 4 has a
    sequence of operations, each with its arguments (RFC 8881).
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
        return " ".join([what, *[(parts.opaque(), parts.opaque())[1] for _ in range(count)]])
    parts.opaque()
    parts.at += 8  # the minor version, and the number of operations
    operation = 0
    while parts.at < len(payload) and (operation := parts.number()) in (22, 32, 53):
        if operation == 22:  # PUTFH; 32, SAVEFH, has no arguments
            parts.opaque()
        elif operation == 53:  # SEQUENCE: a session, four numbers
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


# Scripts: one call a line, on client a or b, and what it must return, as repr() has it, or
# raise. `a&` does not wait, `a=` waits for that call. `cut` is about the next call: what the server
# answers to the request that it names is lost, with the server's memory.

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
# a pause
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
# replace
a  q.push(b"1", key="k") and None
cut rename (\S+) (?!\1)0\d{19}-\w+
a  q.push(b"2", key="k") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'2']
# take along
a  q.push(b"1", key="k") and None
a  q.push(b"2", key="k") and None
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
a  q.schedule(b"x", 1) and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'x']
# first of a key
cut rename (\S+) (?!\1)0\d{19}-\w+
a  q.push(b"x", key="k") and None
b  [q.done(t) or t.data for t in q.drain()]  => [b'x']
# due
a  q.schedule(b"x", 1) and None
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
    """Plays a script on two clients, each with a session and a queue object of its own."""

    def __init__(self, lab: Lab, name: str, settings: str) -> None:
        self.lab, self.name = lab, name
        self.sessions = {who: lab.hosts[n].ask("session") for n, who in enumerate("ab", 1)}
        self.waiting: dict[str, machines.Call] = {}
        self.pattern = ""
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
        """Make a call. Raises Violation if it is not answered as it must be."""
        who, mode, code, wanted = re.fullmatch(  # type: ignore[union-attr]
            r"(\w)([ &=])\s*(.*?)(?:  => (.*))?", line
        ).groups()
        if mode != "=":
            self.waiting[who] = self.start(self.sessions[who], code)
        if mode == "&":
            return
        try:
            kind, text = self.waiting.pop(who).answer()
        except subprocess.TimeoutExpired as error:
            kind, text = "TimeoutExpired", f"{error}"
        is_right = kind == wanted if kind else wanted in (None, text)
        if not is_right:
            raise Violation(f"{self.name}: {line}\n    but: {kind} {text}")

    def start(self, session: machines.Call, code: str) -> machines.Call:
        if not self.pattern:
            return session.tell(code)
        trap, self.pattern = Trap(self.pattern), ""
        self.lab.network.holds = trap.holds
        call = session.tell(code)
        if not trap.caught.wait(machines.CALL_S):
            raise Violation(f"{self.name}: no request was {trap.pattern.pattern}")
        self.lab.server.power_off()
        self.lab.network.holds = open_to_all
        self.lab.serve()
        return call


def replays() -> Iterator[tuple[str, str]]:
    """Yield the titles of the replays, and their scripts, which begin as their group does."""
    for group in re.split("(?m)^## .*\n", REPLAYS)[1:]:
        beginning, *scripts = re.split("(?m)^# ", group)
        for title, script in (it.split("\n", 1) for it in scripts):
            yield title, beginning + script


def replay(lab: Lab, names: Iterable[str]) -> None:
    """Calls whose only answer is lost with the server's power."""
    scripts = dict(replays())
    for name in names or scripts:
        script = Script(lab, name.replace(" ", "-"), "timeout_stale_ms=600_000")
        script.play(scripts[name])
        say(f"replay of {name}: holds")


# Keys and storms: as on GlusterFS, see hosts.py


class Stage(hosts.Stage):
    """Actors in the machines of a laboratory."""

    cluster: Any  # a Lab
    bricks = (SERVER,)
    is_hard = True
    tail_s = GRACE_S + 5.0  # in the grace time nobody gets a lock

    def __init__(self, lab: Lab, seed: int, phase: str) -> None:
        log = f"/proc/self/fd/{machines.memory_file(phase)}"
        super().__init__(lab, log, seed, phase)  # type: ignore[arg-type]
        self.off: list[Actor] = []  # what ran on a host whose power was cut
        self.lost_locks = dict.fromkeys(CLIENTS, 0)  # how often, since it was booted
        for machine in lab.machines.values():
            machine.heard = lambda line: os.write(self.fd, line.encode())

    def launch(self, host: Any, actor: Actor) -> None:
        settings = dataclasses.asdict(actor)
        self.running[actor.name] = host, actor, host.ask("act", settings=settings)

    def set_over(self, is_over: bool = True) -> None:
        for machine in self.cluster.machines.values():
            if machine.is_on:
                machine.ask("over", is_over=is_over).answer()

    def cut_power(self, number: int) -> None:
        """End a client, and all that runs there."""
        self.cluster.keep_statd(number)  # first: it takes a while
        for name, (host, actor, _) in list(self.running.items()):
            if host.number == number:
                self.note("killed", name)
                self.off.append(actor)
                del self.running[name]
        self.dying = [call for call in self.dying if call.machine.number != number]
        self.cluster.machines[number].power_off()
        self.lost_locks[number] = 0

    def restore(self, number: int) -> None:
        """Bring a client back, and start there what ran."""
        self.cluster.join([number])
        while self.off:
            actor = self.off.pop()
            self.start_as(number, actor)

    def heal(self) -> None:
        """Wait until each client reaches the server."""
        began_s = time.monotonic()
        for number in self.cluster.hosts:
            self.cluster.machines[number].run("touch", f"{MOUNT}/healed{number}")
            self.note_lost_locks(number)
        self.note("healed")
        say(f"all is well after {time.monotonic() - began_s:.0f} s")

    def note_lost_locks(self, number: int) -> None:
        """Note, if its kernel says so, that a client was cut off, or came after the grace time."""
        found = "dmesg | grep -c 'lost .* locks' || true"
        count = int(self.cluster.machines[number].run("sh", "-c", found))
        if count > self.lost_locks[number]:
            self.note("unlocked")
            say(f"host {number} lost its locks")
        self.lost_locks[number] = count


def episodes(stage: Stage) -> dict[str, hosts.Episode]:
    """Return what happens in storms, one after the other."""
    one, other = (stage.chance.choice(CLIENTS) for _ in range(2))
    lab, server, cut = stage.cluster, stage.cluster.server, stage.cluster.network.cut
    end, restore = lambda: stage.cut_power(one), lambda: stage.restore(one)
    go, until_s = lambda: cut.add(other), 2 * GRACE_S + 5
    return {
        "server": hosts.Episode(4, "the server's power is cut", server.power_off, 5, lab.serve),
        "client": hosts.Episode(4, f"host {one}'s power is cut", end, 5, restore),
        "net": hosts.Episode(2, f"host {other} is cut off", go, until_s, cut.clear, True, other),
        "server again": hosts.Episode(4, "and once more", server.power_off, 5, lab.serve),
    }


# Power


def power(lab: Lab, seed: int) -> None:
    """Cut the power of a machine with a queue on its own disk, three times. Each time the date of
    its next boot is an hour earlier than it should be, and its monotonic clock begins anew."""
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
            lab.join([1])
    stage.set_over()
    stage.finish(machines.CALL_S)
    stage.drain()
    events = verdict.Events(stage.log)
    of = {it.ident: it for it in events.tried.values() if it.ident}
    early = [
        f"{second} was pushed after {first} had been, and sorts before it"
        for first, second in itertools.permutations(of, 2)
        if of[first].ended_s < of[second].began_s and first > second
    ]
    stage.judge(events, {"ids out of order": early})


# Everything

PHASES = ("basic", "calm", "keys", "storm", "replay", "power")
SHORT = ("keys", "storm", "replay")  # and not all of the last two
SHORT_STORM, SHORT_REPLAYS = ("client", "server", "net"), ("push", "claim", "done")


def prove(lab: Lab, seed: int, phase: str, short: bool) -> None:
    """Run a phase, on a queue of its own. Raises Violation if a promise is broken."""
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


def prove_all(version: str, seed: int, phases: Iterable[str], short: bool = False) -> None:
    """Run phases, one after the other, on machines of their own."""
    with contextlib.closing(Lab(version)) as lab:
        began_s = time.monotonic()
        lab.join(lab.machines)
        for what in ("boot", *phases):
            if what != "boot":
                prove(lab, seed, what, short)
            say(f"{what}, {version}: holds, {time.monotonic() - began_s:.0f} s")
            began_s = time.monotonic()


def run_all(args: argparse.Namespace) -> None:
    """Run what was asked for. Raises Violation if a promise is broken."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unable("it needs Linux on x86_64")
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
    add("--only", choices=PHASES, help="run only this phase, all of it")
    add("--full", action="store_true", help="run all phases, on both versions")
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
