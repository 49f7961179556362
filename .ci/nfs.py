"""DOC"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import glob
import io
import itertools
import json
import os
import py_compile
import queue
import random
import re
import select
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import hosts
from hosts import BRICK, MOUNT, Unable, Violation, run, say

import femtoqueue

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = "qemu-system-x86 linux-image-cloud-amd64 nfs-common rpcbind busybox-static libsqlite3-0"
UNPACKED = "nfs-kernel-server"  # installed, it would start a server on this machine
TOOLS = ("qemu-system-x86_64", "busybox", "mount.nfs", "rpc.statd", "rpcbind", "mkfs.ext4")
MODULES = "virtio_pci virtio_console virtio_net virtio_blk ext4 nfsv3 nfsv4 nfsd"
SERVER = 9
CLIENTS = (1, 2)
KERNELS = "/boot/vmlinuz-*-cloud-*"
MEMORY_MB = 384
DISK_BYTES = 1 << 30
BOOT_S, CALL_S = 120.0, 120.0  # here, where three machines share two cores with other work
GRACE_S = 10
HOME = "/femtoqueue"  # of the program in a machine

SERVICES = """
sunrpc 111/tcp portmapper
sunrpc 111/udp portmapper
nfs 2049/tcp
nfs 2049/udp
"""
BOOT = "console=ttyS0 quiet panic=-1 clocksource=hpet mitigations=off audit=0 apparmor=0"
INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /run /tmp /sbin /usr/bin /usr/sbin
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/sbin:/usr/bin PYTHONDONTWRITEBYTECODE=1
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
mount -t tmpfs none /run
mount -t tmpfs none /tmp
for module in $(cat /modules); do insmod $module || echo "no $module"; done
mkdir -p /run/mnt /run/brick /run/rpcbind /run/rpc_pipefs /run/sendsigs.omit.d /var/lib
ln -s /proc/self/mounts /etc/mtab
ip link set lo up
exec {{python}} {HOME}/.ci/nfs.py --guest
"""
NETWORK = """set -e
hostname {name}
ip link set eth0 up
ip addr add 10.77.0.{number}/24 dev eth0
"""
SERVE = f"""set -ex
mount -t ext4 /dev/vda /run/brick
mkdir -p {BRICK} /run/brick/nfs /var/lib/nfs
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
nfsdcld -p /run/rpc_pipefs/nfsd
exportfs -r
rpc.mountd
rpc.nfsd 8
"""
JOIN = f"""set -ex
mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak
rpcbind
rpc.statd
mount.nfs 10.77.0.{SERVER}:{BRICK} {MOUNT} -o vers=%s
"""
LOCAL = "local"
MOUNTS = {LOCAL: f"mount -t ext4 /dev/vda {MOUNT}", "4.2": JOIN % "4.2", "3": JOIN % "3"}


# The image that a machine boots from: this machine's kernel, Python and tools


class Image:
    """An archive in the format "newc" of cpio(5), in memory."""

    def __init__(self) -> None:
        self.content = io.BytesIO()
        self.paths: set[str] = set()

    def add(self, path: str, mode: int, content: bytes = b"", mtime: int = 0) -> None:
        """Add a file or a directory, and the directories that it is in."""
        parent = os.path.dirname(path)
        if parent not in ("", "/") and parent not in self.paths:
            self.add(parent, stat.S_IFDIR | 0o755)
        if path in self.paths:
            return
        self.paths.add(path)
        name = path.lstrip("/").encode() + b"\0"
        numbers = (len(self.paths), mode, 0, 0, 1, mtime, len(content), 0, 0, 0, 0, len(name), 0)
        self.content.write(b"070701" + b"".join(b"%08x" % number for number in numbers))
        for part in (name, content):
            self.content.write(part)
            self.content.write(b"\0" * (-self.content.tell() % 4))

    def add_file(self, source: str, path: str = "") -> None:
        status = os.stat(source)
        with open(source, "rb") as file:
            self.add(path or source, status.st_mode, file.read(), int(status.st_mtime))

    def close(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return self.content.getvalue()


def library_files() -> Iterator[str]:
    """Yield the files of the standard library that a machine needs, compiled ones too."""
    unneeded = re.compile(
        r"test|tests|idlelib|lib2to3|ensurepip|turtledemo|tkinter|.*-packages|config-.*"
    )
    compiled = f".{sys.implementation.cache_tag}.pyc"
    for root in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if not unneeded.fullmatch(name)]
            yield from (f"{directory}/{n}" for n in files if n.endswith((compiled, ".py", ".so")))


def libraries(programs: Iterable[str]) -> set[str]:
    """Return the shared libraries that programs are linked with."""
    output = subprocess.run(["ldd", *programs], check=False, capture_output=True, text=True).stdout
    if missing := re.findall(r"(\S+) => not found", output):
        raise Unable(f"missing libraries: {', '.join(missing)}")
    return set(re.findall(r"(?:=> |^\s)(/\S+)", output, re.MULTILINE))


def module_files(release: str) -> list[str]:
    """Return the files of MODULES and what they depend on, in the order in which they load."""
    directory = f"/lib/modules/{release}"
    needs: dict[str, list[str]] = {}
    with open(f"{directory}/modules.dep", encoding="ascii") as file:
        for line in file:
            path, _, others = line.partition(":")
            needs[path] = others.split()
    by_name = {os.path.basename(path).partition(".")[0]: path for path in needs}
    chosen: dict[str, None] = {}
    for path in (by_name[name] for name in MODULES.split() if name in by_name):
        chosen.update(dict.fromkeys([*reversed(needs[path]), path]))
    return [f"{directory}/{path}" for path in chosen]


def add_program(image: Image, work: str) -> None:
    """Add this program and what it tests, compiled: a machine is slow."""
    for source, path in (
        (f"{HERE}/../femtoqueue.py", HOME),
        (f"{HERE}/hosts.py", f"{HOME}/.ci"),
        (os.path.abspath(__file__), f"{HOME}/.ci"),
    ):
        name = os.path.basename(source)
        image.add_file(source, f"{path}/{name}")
        compiled = py_compile.compile(source, f"{work}/{name}c", doraise=True)
        assert compiled is not None
        target = f"{name[:-3]}.{sys.implementation.cache_tag}.pyc"
        image.add_file(compiled, f"{path}/__pycache__/{target}")


def unpack_server(work: str) -> str:
    """Fetch Debian's package of the NFS server, and return where its files are."""
    run("sh", "-c", f"cd {work} && apt-get download -q {UNPACKED}", timeout_s=120)
    run("sh", "-c", f"dpkg -x {work}/{UNPACKED}_*.deb {work}/server")
    return f"{work}/server/usr/sbin"


def build_image(release: str) -> bytes:
    image = Image()
    with tempfile.TemporaryDirectory(prefix="femtoqueue-nfs-") as work:
        server = unpack_server(work)
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        programs = {
            shutil.which(tool) or "" for tool in ("rpcbind", "rpc.statd", "sm-notify", "mount.nfs")
        }
        programs |= {
            f"{server}/{name}" for name in ("nfsdcld", "exportfs", "rpc.mountd", "rpc.nfsd")
        }
        library = [*library_files()]
        linked = [python, *programs, *(name for name in library if name.endswith(".so"))]
        for path in {python, *library, *libraries(linked), "/etc/netconfig"}:
            image.add_file(path)
        for path in programs:
            image.add_file(path, f"/sbin/{os.path.basename(path)}")
        add_program(image, work)
    image.add_file(shutil.which("busybox") or "", "/bin/busybox")
    modules = module_files(release)
    for path in modules:
        image.add_file(path)
    names = "".join(f"10.77.0.{number} host{number}\n" for number in (SERVER, *CLIENTS))
    for path, text in {
        "/init": INIT.format(python=python),
        "/modules": " ".join(modules),
        "/etc/hosts": f"127.0.0.1 localhost\n{names}",
        "/etc/passwd": "root:x:0:0::/:/bin/sh\n_rpc:x:1:1::/run/rpcbind:/bin/sh\n",
        "/etc/group": "root:x:0:\n_rpc:x:1:\n",
        "/etc/exports": f"{BRICK} 10.77.0.0/24(rw,sync,no_root_squash,no_subtree_check)\n",
        "/etc/protocols": "tcp 6 TCP\nudp 17 UDP\n",
        "/etc/services": SERVICES,
    }.items():
        image.add(path, stat.S_IFREG | 0o755, text.encode())
    return image.close()


def memory_file(name: str, content: bytes = b"") -> int:
    """Return a descriptor of a file in memory: it goes with us, however we end."""
    fd = os.memfd_create(name, 0)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    return fd


# The network: frames between machines pass through here


class Trap:
    """Lets one call of a client through to the server, and none of the answers from then on."""

    def __init__(self, call: str) -> None:
        self.pattern = re.compile(call)
        self.xid = b""
        self.caught = threading.Event()

    def holds(self, source: int, frame: bytes) -> bool:
        """Whether a frame must not be passed on."""
        if source == SERVER:
            if self.xid and self.xid + b"\0\0\0\1" in tcp_payload(frame):
                self.caught.set()
            return self.caught.is_set()
        if not self.xid and self.pattern.fullmatch(nfs_call(payload := tcp_payload(frame))):
            self.xid = payload[4:8]
        return False


def tcp_payload(frame: bytes) -> bytes:
    """Return what a TCP segment over IPv4 carries, b"" if the frame is none."""
    if frame[12:14] != b"\x08\0" or frame[23] != 6:
        return b""
    packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")]
    segment = packet[4 * (packet[0] & 15) :]
    return segment[4 * (segment[12] >> 4) :]


def nfs_call(payload: bytes) -> str:
    """Return "rename <old> <new>" or "remove <name>" if a segment begins with that call, else "".

    A call (RFC 5531) is: length, xid, 0, 2, program 100003, version, procedure, credentials. A
    name is a length and its bytes. Version 4 has the operation in front of the first name.
    """
    if payload[8:20] != struct.pack(">III", 0, 2, 100003):
        return ""
    version, procedure = struct.unpack(">II", payload[20:28])
    name = rb"\0\0\0[\2-\x7f]([!-~]+)\0{0,3}"
    forms = {  # the number in version 3 and in version 4
        "rename": (14, 29, name + (rb".{36,68}?" if version == 3 else b"") + name),
        "remove": (12, 28, name),
    }
    for what, (old, new, form) in forms.items():
        front = rb".*?" if version == 3 else b".*?" + re.escape(struct.pack(">I", new))
        found = re.fullmatch(front + form + b".*", payload[28:], re.DOTALL)
        if found and (version == 4 or procedure == old):
            return " ".join([what, *(part.decode() for part in found.groups())])
    return ""


class Network(threading.Thread):
    """A switch. What a machine in `cut` sends or should get goes nowhere, and nobody is told."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        kind = (socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ports = {number: socket.socketpair(*kind) for number in (SERVER, *CLIENTS)}
        self.cut: set[int] = set()
        self.trap: Trap | None = None

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for number, (ours, _) in self.ports.items():
            selector.register(ours, selectors.EVENT_READ, number)
        while True:
            for key, _ in selector.select():
                self.forward(key.data, self.ports[key.data][0].recv(1 << 16))

    def forward(self, source: int, frame: bytes) -> None:
        trap = self.trap
        if source in self.cut or (trap and trap.holds(source, frame)):
            return
        targets = set(self.ports) - {source} if frame[0] & 1 else {frame[5]} & set(self.ports)
        for number in targets - self.cut:
            with contextlib.suppress(BlockingIOError):  # it is off, or too slow: the frame is lost
                self.ports[number][0].send(frame, socket.MSG_DONTWAIT)

    def plug(self, number: int) -> int:
        """Return the descriptor of a port, without the frames that a machine left in it."""
        port = self.ports[number][1]
        with contextlib.suppress(BlockingIOError):
            while port.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        return port.fileno()


# Machines


class Call:
    """Something that a machine was asked for; like subprocess.Popen if it is a process."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.returncode: int | None = None

    def answer(self, timeout_s: float = CALL_S) -> Any:
        try:
            return self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise subprocess.TimeoutExpired(f"host {self.machine.number}", timeout_s) from None

    def communicate(self, timeout: float = CALL_S) -> tuple[str, None]:
        if self.returncode is None:
            self.returncode, self.output = self.answer(timeout)
        return self.output, None

    def kill(self) -> None:
        self.machine.ask("kill", process=self.number)


class Machine:
    """A virtual machine. It ends with us, and power_off() is a power cut.

    Its program (Guest) has two ports: over one it gets orders and answers them; over the other its
    processes note what they do. A write to a port returns when we have it.
    """

    def __init__(self, number: int, network: Network, image: int, kernel: str, disk: int = -1):
        self.number, self.network, self.image, self.disk = number, network, image, disk
        self.kernel = kernel
        self.heard: Callable[[str], None] = lambda line: None
        self.numbers = itertools.count(1)
        self.is_on = False

    def boot(self) -> None:
        control, notes = socket.socketpair(), socket.socketpair()
        port, self.console = self.network.plug(self.number), memory_file("console")
        fds = (port, control[1].fileno(), notes[1].fileno(), self.image, self.disk)
        command = self.command(*fds)
        self.process = subprocess.Popen(
            command,
            pass_fds=[fd for fd in fds if fd >= 0],
            stdin=subprocess.DEVNULL,
            stdout=self.console,
            stderr=self.console,
        )
        control[1].close()
        notes[1].close()
        self.control, self.calls = control[0], {0: Call(self, 0)}
        self.readers = [
            threading.Thread(target=read_lines, args=(control[0], self.read_answer), daemon=True),
            threading.Thread(target=read_lines, args=(notes[0], self.read_note), daemon=True),
        ]
        for reader in self.readers:
            reader.start()
        self.is_on = True

    def join(self, behind_s: float) -> None:
        """Wait until it is up, and give it a date and an address."""
        self.wait_for_it()
        self.set_clock(behind_s)
        self.run("sh", "-c", NETWORK.format(name=f"host{self.number}", number=self.number))

    def command(self, port: int, control: int, notes: int, image: int, disk: int) -> list[str]:
        options = {
            "-accel": "tcg",
            "-cpu": "max",
            "-m": str(MEMORY_MB),
            "-nodefaults": "",
            "-no-user-config": "",
            "-no-reboot": "",
            "-display": "none",
            "-serial": "stdio",
            "-kernel": self.kernel,
            "-initrd": f"/dev/fd/{image}",
            "-append": BOOT,
            "-netdev": f"dgram,id=net,local.type=fd,local.str={port}",
        }
        devices = [
            f"virtio-net-pci,netdev=net,mac=52:54:00:00:00:{self.number:02x},romfile=",
            "virtio-serial-pci",
            "virtserialport,chardev=control,name=control",
            "virtserialport,chardev=notes,name=notes",
        ]
        command = ["setpriv", "--pdeathsig", "KILL", TOOLS[0]]
        command += [word for option in options.items() for word in option if word]
        for name, fd in (("control", control), ("notes", notes)):
            command += ["-chardev", f"socket,id={name},fd={fd}"]
        if disk >= 0:
            drive = f"if=none,id=disk,format=raw,file.locking=off,file.filename=/dev/fd/{disk}"
            command += ["-drive", drive]
            devices.append("virtio-blk-pci,drive=disk")
        return command + [word for device in devices for word in ("-device", device)]

    def wait_for_it(self) -> None:
        try:
            self.calls[0].answer(BOOT_S)
        except subprocess.TimeoutExpired:
            raise Unable(f"machine {self.number} does not boot: {self.said()[-2000:]}") from None

    def said(self) -> str:
        return os.pread(self.console, 1 << 20, 0).decode(errors="replace")

    def read_answer(self, line: str) -> None:
        number, answer = json.loads(line)
        self.calls[number].answers.put(answer)

    def read_note(self, line: str) -> None:
        """A session answers here, too: its own process does, when it is done."""
        if line.startswith("["):
            self.read_answer(line)
        else:
            self.heard(line)

    def ask(self, what: str, **settings: Any) -> Call:
        """Give an order, which Guest.<what> carries out."""
        call = Call(self, next(self.numbers))
        self.calls[call.number] = call
        line = json.dumps({"what": what, "number": call.number, **settings})
        with contextlib.suppress(BrokenPipeError):  # it is off: nobody answers
            self.control.sendall(f"{line}\n".encode())
        return call

    def run(self, *command: str) -> str:
        call = self.ask("run", command=command)
        try:
            output, _ = call.communicate()
        except subprocess.TimeoutExpired:
            raise Unable(f"{command} hangs on host {self.number}: {self.said()[-2000:]}") from None
        if call.returncode:
            raise Unable(f"{' '.join(command)} on host {self.number}: {output}")
        return output

    def set_clock(self, behind_s: float) -> None:
        """Learn what its monotonic clock shows, and set its date."""
        best_s = float("inf")
        for _ in range(10):
            began_s = time.monotonic()
            there_s = self.ask("clock").answer()
            took_s = time.monotonic() - began_s
            if took_s < best_s:
                best_s, offset_s = took_s, began_s + took_s / 2 - there_s
        self.ask("set_clock", offset_s=offset_s, wall_s=time.time() - behind_s).answer()

    def power_off(self) -> None:
        self.is_on = False
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join()
        self.control.close()
        os.close(self.console)


def read_lines(port: socket.socket, heard: Callable[[str], None]) -> None:
    """Hand over each whole line until the other end is gone."""
    with contextlib.suppress(ConnectionError), port.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                heard(line)


# In a machine


class Guest:
    """The first process of a machine. Processes are forked: to start Python takes seconds here."""

    def __init__(self) -> None:
        ports = {}
        for name in os.listdir("/sys/class/virtio-ports"):
            with open(f"/sys/class/virtio-ports/{name}/name", encoding="ascii") as file:
                ports[file.read().strip()] = f"/dev/{name}"
        self.control, self.notes = (
            os.open(ports[name], os.O_RDWR) for name in ("control", "notes")
        )
        self.children: dict[int, tuple[int, int]] = {}  # by pid: number and output
        self.pipes: dict[int, int] = {}
        self.offset_s = 0.0

    def serve(self) -> None:
        self.answer(0, "ready")
        rest = b""
        while True:
            self.reap()
            if select.select([self.control], [], [], 0.02)[0]:
                *lines, rest = (rest + os.read(self.control, 1 << 16)).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    getattr(self, order.pop("what"))(**order)

    def answer(self, number: int, what: Any) -> None:
        line = memoryview(f"{json.dumps([number, what])}\n".encode())
        while line:
            line = line[os.write(self.control, line) :]

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number, output = self.children.pop(ended[0], (0, -1))
                if number:
                    text = os.pread(output, 1 << 24, 0).decode(errors="replace")
                    os.close(output)
                    self.answer(number, [os.waitstatus_to_exitcode(ended[1]), text])

    def fork(self, number: int, main: Callable[[], None], stdin: int = -1) -> None:
        """Run main() in a process of its own."""
        output = memory_file("output")
        pid = os.fork()
        if pid:
            self.children[pid] = number, output
            return
        code = 1
        try:
            for fd in (1, 2):
                os.dup2(output, fd)
            main()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(code)

    def run(self, number: int, command: list[str]) -> None:
        self.fork(number, lambda: os.execvp(command[0], command))

    def clock(self, number: int) -> None:
        self.answer(number, time.monotonic())

    def set_clock(self, number: int, offset_s: float, wall_s: float) -> None:
        self.offset_s = offset_s
        time.clock_settime(time.CLOCK_REALTIME, wall_s)
        self.answer(number, None)

    def kill(self, number: int, process: int) -> None:
        for pid, (started, _) in self.children.items():
            if started == process:
                os.kill(pid, signal.SIGKILL)
        self.answer(number, None)

    def act(self, number: int, settings: dict[str, Any]) -> None:
        actor = GuestActor(**{**settings, "offset_s": self.offset_s})
        actor.fd = self.notes
        self.fork(number, actor.start)

    def over(self, number: int, is_over: bool) -> None:
        if is_over:
            os.close(os.open("/run/over", os.O_CREAT))
        elif os.path.exists("/run/over"):
            os.unlink("/run/over")
        self.answer(number, None)

    def files(self, number: int, root: str) -> None:
        """Answer with the paths of all files under a directory."""

        def walk() -> None:
            for directory, _, names in os.walk(root):
                for name in names:
                    path = os.path.relpath(f"{directory}/{name}", root)
                    os.write(1, f"{path}\n".encode())

        self.fork(number, walk)

    def session(self, number: int) -> None:
        """Start a process that evaluates what it is sent."""
        ours, its = os.pipe()
        self.pipes[number] = its
        self.fork(number, lambda: converse(ours, self.notes, number))

    def tell(self, number: int, session: int, code: str) -> None:
        os.write(self.pipes[session], f"{json.dumps([number, code])}\n".encode())


def converse(orders: int, notes: int, session: int) -> None:
    names: dict[str, Any] = {
        "femtoqueue": femtoqueue,
        "time": time,
        "os": os,
        "break_queue": break_queue,
        **vars(femtoqueue),
    }
    with open(orders, encoding="utf-8") as lines:
        for line in lines:
            number, code = json.loads(line)
            try:
                try:
                    result = repr(eval(code, names))
                except SyntaxError:
                    exec(code, names)
                    result = "None"
                answer = ["", result]
            except BaseException as error:
                answer = [type(error).__name__, f"{error} in {where(error)}"]
            os.write(notes, f"{json.dumps([number, answer])}\n".encode())


def where(error: BaseException) -> str:
    """Return the functions that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(frame.name for frame in frames if frame.filename.endswith("femtoqueue.py"))


class GuestActor(hosts.Actor):
    """An actor in a machine: it notes what it does through the machine's port."""

    def open_log(self) -> int:
        return self.fd

    def is_over(self) -> bool:
        return os.path.exists("/run/over")

    def break_queue(self) -> None:
        break_queue(self.broken)


def break_queue(how: str) -> None:
    """Make the mistakes that the proof must see."""
    close, acquire = femtoqueue._KeyStates.close, femtoqueue._FileLock.acquire_exclusive

    def link_and_unlink(self: Any, source: str, attempts: int, ident: str, length_ns: int) -> str:
        deadline_ns = self._clock.now_ns() + length_ns
        name = femtoqueue._lease_name(deadline_ns, attempts, self._clock.boot, ident)
        lease, root = f"{self.directory}/{name}", self._files.root
        try:
            os.link(root + source, root + lease)
        except FileNotFoundError:
            return ""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(root + source)
        return lease

    def removed_lock(self: Any) -> None:
        close(self)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._files.root}locks/{self.tag[-2:]}")

    def cached_path(self: Any, wait: bool = True) -> None:
        """Right on one host: who waited for the lock of a removed file takes that of the new."""
        acquire(self, wait)
        while not self.is_at_path():
            fd = os.open(self.path, femtoqueue._LOCK_FLAGS, 0o666)
            os.dup2(fd, self.fd, inheritable=False)
            os.close(fd)
            acquire(self, wait)

    def no_matter(
        self: Any, aside: str, data: bytes, path: str, *, key: str = "", **_: Any
    ) -> None:
        source, target = f"{self.root}creating/{aside}", self.root + path
        femtoqueue._write_new(source, femtoqueue._header(data, key), data)
        try:
            os.rename(source, target)
        except FileNotFoundError:
            femtoqueue._unlink_if_exists(target)

    if how == "link_and_unlink":
        femtoqueue._LeaseDir.claim = link_and_unlink  # type: ignore[method-assign]
    elif how == "cached_path":
        femtoqueue._KeyStates.close = removed_lock  # type: ignore[method-assign]
        femtoqueue._FileLock.acquire_exclusive = cached_path  # type: ignore[method-assign]
    elif how == "no_matter":
        femtoqueue._Files.publish = no_matter  # type: ignore[assignment]


BROKEN = {"link_and_unlink": "calm", "cached_path": "keys", "no_matter": "replay"}


# The laboratory


class Failed(Exception):
    """A call in a session raised."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Session:
    """A process on a machine that keeps its variables, as an interactive Python does."""

    def __init__(self, machine: Machine, *code: str) -> None:
        self.machine = machine
        self.process = machine.ask("session")
        for line in code:
            self(line)

    def start(self, code: str) -> Call:
        return self.machine.ask("tell", session=self.process.number, code=code)

    @staticmethod
    def result(call: Call, timeout_s: float = CALL_S) -> Any:
        """Return the value, if it is a literal, else its repr(). Raises Failed."""
        kind, text = call.answer(timeout_s)
        if kind:
            raise Failed(kind, text)
        return value_of(text)

    def __call__(self, code: str) -> Any:
        return self.result(self.start(code))


def value_of(text: str) -> Any:
    """Return what a literal stands for, and any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Lab:
    """A server with a disk and its clients; or, for LOCAL, one machine with a disk. It stands in
    for hosts.Cluster."""

    def __init__(self, version: str) -> None:
        self.version, self.network, self.behind_s = version, Network(), 0.0
        kernel = max(glob.glob(KERNELS))
        image = memory_file("image", build_image(kernel.partition("vmlinuz-")[2]))
        disk = memory_file("disk")
        os.truncate(disk, DISK_BYTES)
        run("mkfs.ext4", "-q", "-F", f"/proc/{os.getpid()}/fd/{disk}")
        with_disk = 1 if version == LOCAL else SERVER
        numbers = (1,) if version == LOCAL else (SERVER, *CLIENTS)
        self.machines = {
            n: Machine(n, self.network, image, kernel, disk if n == with_disk else -1)
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
            machine.run("sh", "-c", script)

    def serve(self) -> None:
        """Bring the server back."""
        self.join([SERVER])

    def restart(self) -> None:
        """Begin anew, on the same disk: whatever ran is gone."""
        self.power_off()
        self.network.cut.clear()
        self.network.trap = None
        self.join(self.machines)

    def power_off(self) -> None:
        for machine in self.machines.values():
            if machine.is_on:
                machine.power_off()

    def close(self) -> None:
        self.power_off()
        for fd in self.fds:
            os.close(fd)

    def hear(self, heard: Callable[[str], None]) -> None:
        """Say who gets what the processes on all machines note."""
        for machine in self.machines.values():
            machine.heard = heard

    def lost_bricks(self) -> int:
        return 0

    wait_until = hosts.Cluster.wait_until


class Stage(hosts.Stage):
    """Actors in the machines of a laboratory."""

    cluster: Any  # a Lab

    def __init__(self, lab: Lab, seed: int, broken: str, phase: str) -> None:
        super().__init__(lab, "", seed, broken, phase)  # type: ignore[arg-type]
        self.off: list[hosts.Actor] = []  # what ran on a host whose power was cut
        self.dying: list[Call] = []
        lab.hear(self.hear)

    def new_log(self, work: str, name: str) -> str:
        return f"/proc/self/fd/{memory_file(name)}"

    def hear(self, line: str) -> None:
        os.write(self.me.fd, line.encode())

    def host(self, number: int) -> Machine:
        machine: Machine = self.cluster.machines[number]
        return machine

    def launch(self, host: Any, actor: hosts.Actor) -> None:
        settings = json.loads(actor.settings())
        self.running[actor.name] = host, actor, host.ask("act", settings=settings)

    def call_over(self, is_over: bool = True) -> None:
        for machine in self.cluster.machines.values():
            if machine.is_on:
                machine.ask("over", is_over=is_over).answer()

    def end(self, process: Call) -> None:
        """Kill a process. It may not end before it reaches the server."""
        process.kill()
        self.dying.append(process)

    def finish(self, timeout_s: float) -> list[str]:
        while self.dying:
            self.dying.pop().communicate(timeout_s)
        return super().finish(timeout_s)

    def cut_power(self, number: int) -> None:
        """End a client, and all that runs there."""
        for name, (host, actor, _) in list(self.running.items()):
            if host.number == number:
                self.me.note("killed", name)
                self.off.append(actor)
                del self.running[name]
        self.dying = [call for call in self.dying if call.machine.number != number]
        self.host(number).power_off()

    def restore(self, number: int) -> None:
        """Bring a client back, and start there what ran."""
        self.cluster.join([number])
        while self.off:
            actor = self.off.pop()
            self.start(number, actor.kind, node_id=actor.node_id)

    def heal(self) -> None:
        """Wait until each client reaches the server."""
        began_s = time.monotonic()
        for number in self.cluster.hosts:
            self.host(number).run("touch", f"{MOUNT}/healed{number}")
        self.me.note("healed")
        say(f"all is well after {time.monotonic() - began_s:.0f} s")

    def files(self, host: int, root: str) -> set[str]:
        output, _ = self.host(host).ask("files", root=root).communicate()
        return set(output.splitlines())


# Scripts: one call a line, on client a or b, and what it must return or raise. `a&` does not wait,
# `a=` waits for that call. `cut` is about the next call: what the server answers to the request
# that it names is lost, with the server's memory.

BASIC = r"""
# order
a  [q.push(b"%d" % n) for n in range(4)] and None
b  ts = [q.pop() for n in range(4)]
b  [t.data for t in ts]  => [b"0", b"1", b"2", b"3"]
a  q.pop()  => None
# done, failed, released, retried
b  q.done(ts[0]), q.fail(ts[1], "why"), q.release(ts[2]), q.done(ts[3])
a  [(t.data, t.error) for t in q.tasks("failed")]  => [(b"1", "why")]
a  (t := q.pop(9)) and (t.data, t.attempts)  => (b"2", 2)
a  q.done(t)
a  q.retry_failed()  => 1
b  (t := q.pop(9)) and (t.data, t.attempts)  => (b"1", 1)
# a checkpoint
b  q.checkpoint(t, b"half")
b  q.release(t)
a  (t := q.pop(9)) and (t.data, t.attempts, t.checkpoint)  => (b"1", 2, b"half")
a  q.done(t)
# a time
a  q.schedule(b"later", (time.time() + 3) * 1e6) and None
b  q.pop()  => None
b  (t := q.pop(60)) and t.data  => b"later"
b  q.done(t)
# the fence
a  q.push(b"fence") and None
a  (t := q.pop(9, lease_ms=2000)) and t.data  => b"fence"
b  (t := q.pop(60)) and (t.data, t.attempts)  => (b"fence", 2)
a  q.extend(t)  => LeaseLost
a  q.done(t)  => LeaseLost
b  q.done(t)
# processing() renews the lease
a  q.push(b"long") and None
a  (t := q.pop(9)) and t.data  => b"long"
a& exec("with q.processing(t): time.sleep(9)")
b  q.pop(7)  => None
a=
b  sorted(t.data for t in q.tasks("done"))  => [b"0", b"1", b"2", b"3", b"fence", b"later", b"long"]
# a key that was asked for before it had a task
b  q.contains("k"), q.peek(key="k"), q.take("k")  => (False, None, None)
a  q.push(b"1", key="k") == q.push(b"2", key="k")  => True
b  q.contains("k"), q.peek(key="k").data  => (True, b"2")
b  (t := q.take("k")) and t.data  => b"2"
a  q.push(b"3", key="k") and None
a  q.pop()  => None
b  q.done(t)
a  (t := q.pop(9)) and t.data  => b"3"
a  q.done(t)
b  q.contains("k"), q.peek(key="k"), q.take("k")  => (False, None, None)
# tickets
a  mine, member = (line := TicketQueue("/run/mnt/line")).register()
b  mine, member = (line := TicketQueue("/run/mnt/line")).register()
a  line.is_head(mine)  => True
b  line.is_head(mine)  => False
a  line.remove(member)  => True
b  line.is_head(mine), line.remove(member)  => (True, True)
# waiting
b& (t := q.pop(60)) and t.data
a  q.push(b"soon") and None
b=  => b"soon"
b  q.done(t)
# a pause
b  q.paused  => False
a  q.pause()
a  q.push(b"paused") and None
b  q.paused, q.pop(2)  => (True, None)
b& (t := q.pop(60)) and t.data
a  q.resume()
b=  => b"paused"
b  q.done(t)
"""

REPLAYS = {
    "push": r"""
cut rename (\S+) \1
a  q.push(b"x") and None
b  [t.data for t in q.drain()]  => [b"x"]
""",
    "claim": r"""
a  q.push(b"x") and None
cut rename (\S+) \d+~1~\w+~\1
a  (t := q.pop()) and t.data  => b"x"
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b"x"]
""",
    "done": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename \d+~1~\w+~(\S+) \1
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b"x"]
""",
    "replace": r"""
a  q.push(b"1", key="k") and None
cut rename (\S+) \d+~0~\w+~\1
a  q.push(b"2", key="k") and None
b  [t.data for t in q.drain()]  => [b"2"]
""",
    "replacing record": r"""
a  q.push(b"1", key="k") and None
cut rename (0\d{19}-\w+) \d+~0~\w+~(?!\1)\S+
a  q.push(b"2", key="k") and None
b  [t.data for t in q.drain()]  => [b"2"]
""",
    "replaced and back": r"""
a  q.push(b"1", key="k") and None
cut rename \d+~0~\w+~(\S+) \1
a  q.push(b"2", key="k") and None
b  [t.data for t in q.drain()]  => [b"2"]
""",
    "fail": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename \d+~1~\w+~(\S+) \1
a  q.fail(t, "why")
b  [(t.data, t.error) for t in q.tasks("failed")]  => [(b"x", "why")]
""",
    "reason": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename \S+ \S+\.error
a  q.fail(t, "why")
b  [(t.data, t.error) for t in q.tasks("failed")]  => [(b"x", "why")]
""",
    "release": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename \d+~1~\S+ \d+~1~\S+
a  q.release(t)
b  [(t.data, t.attempts) for t in q.drain()]  => [(b"x", 2)]
""",
    "extend": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename \d+~1~\S+ \d+~1~\S+
a  q.extend(t)
a  q.done(t)
b  [t.data for t in q.tasks("done")]  => [b"x"]
""",
    "retry": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
a  q.fail(t, "why")
cut rename (\S+) \d+~0~\1
a  q.retry(t.id)
b  [(t.data, t.attempts) for t in q.drain()]  => [(b"x", 1)]
""",
    "schedule": r"""
cut rename (\S+) \d+~0~\1
a  q.schedule(b"x", 1) and None
b  [t.data for t in q.drain()]  => [b"x"]
""",
    "checkpoint": r"""
a  q.push(b"x") and None
a  (t := q.pop()) and t.data  => b"x"
cut rename (?!\d+~)\S+ \S+
a  q.checkpoint(t, b"half")
a  q.release(t)
b  [(t.data, t.checkpoint) for t in q.drain()]  => [(b"x", b"half")]
""",
    "first of a key": r"""
cut rename (\S+) \1
a  q.push(b"x", key="k") and None
b  [t.data for t in q.drain()]  => [b"x"]
""",
    "behind a key": r"""
a  q.push(b"1", key="k") and None
a  (t := q.pop()) and t.data  => b"1"
cut rename (\S+) \1
a  q.push(b"2", key="k") and None
a  q.done(t)
b  [t.data for t in q.drain()]  => [b"2"]
""",
    "done with a key": r"""
a  q.push(b"1", key="k") and None
a  (t := q.pop()) and t.data  => b"1"
a  q.push(b"2", key="k") and None
cut rename \d+~1~\w+~(\S+) \1
a  q.done(t)
b  [t.data for t in q.drain()]  => [b"2"]
""",
    "due": r"""
a  q.schedule(b"x", 1) and None
cut rename \d+~0~(\S+) \d+~0~\1
a  (t := q.pop()) and t.data  => b"x"
a  q.done(t)
""",
}


class Script:
    """Plays a script on two clients, each with a session and a queue object of its own."""

    def __init__(self, lab: Lab, name: str, settings: str, broken: str = "") -> None:
        self.lab, self.name = lab, name
        open_queue = f"q = FemtoQueue('{MOUNT}/{name}', {settings})"
        code = (f"break_queue({broken!r})", open_queue)
        self.sessions = {who: Session(lab.hosts[n], *code) for n, who in enumerate("ab", 1)}
        self.waiting: dict[str, Call] = {}
        self.pattern = ""

    def play(self, script: str) -> None:
        """Raises Violation with all that went wrong."""
        wrong, title = [], self.name
        for line in script.strip().splitlines():
            if line.startswith("# "):
                title = line[2:]
            elif line.startswith("cut "):
                self.pattern = line[4:]
            elif text := self.step(line):
                wrong.append(f"{title}: {text}")
        self.close()
        if wrong:
            raise Violation("; ".join(wrong))

    def close(self) -> None:
        for session in self.sessions.values():
            session.process.kill()

    def step(self, line: str) -> str:
        """Make a call; return what is wrong with it, "" if nothing is."""
        who, mode, code, wanted = re.fullmatch(  # type: ignore[union-attr]
            r"(\w)([ &=])\s*(.*?)(?:  => (.*))?", line
        ).groups()
        if mode != "=":
            self.waiting[who] = self.start(self.sessions[who], code)
        if mode == "&":
            return ""
        try:
            found = Session.result(self.waiting.pop(who))
        except (Failed, subprocess.TimeoutExpired) as error:
            found = error
            if getattr(error, "kind", "") == wanted:
                return ""
        if isinstance(found, Exception) or (wanted and found != value_of(wanted)):
            return f"{line}\n    but: {found}"
        return ""

    def start(self, session: Session, code: str) -> Call:
        if not self.pattern:
            return session.start(code)
        trap = self.lab.network.trap = Trap(self.pattern)
        self.pattern = ""
        call = session.start(code)
        if not trap.caught.wait(CALL_S):
            raise Unable(f"{self.name}: no request matched {trap.pattern.pattern}")
        self.lab.server.power_off()
        self.lab.network.trap = None
        self.lab.serve()
        return call


def basic(lab: Lab) -> None:
    """What one client does, the other one sees."""
    Script(lab, "basic", "timeout_stale_ms=4000").play(BASIC)


def replay(lab: Lab, names: Iterable[str], broken: str = "") -> None:
    """Calls whose only answer is lost with the server's power."""
    wrong = []
    for name in names:
        began_s = time.monotonic()
        script = Script(
            lab, f"{name.replace(' ', '-')}{broken}", "timeout_stale_ms=600_000", broken
        )
        try:
            script.play(REPLAYS[name])
            outcome = "holds"
        except Violation as error:
            wrong.append(str(error))
            outcome = f"VIOLATED: {error}"
        say(f"replay of {name}: {time.monotonic() - began_s:.0f} s: {outcome}")
    if wrong:
        raise Violation(f"{len(wrong)} of the replays: {'; '.join(wrong)}")


# Keys and storms: as on GlusterFS, see hosts.py


def keys(lab: Lab, seed: int, broken: str = "") -> None:
    for count in (1,) if broken else (1, 10):
        hosts.keyed(Stage(lab, seed, broken, f"-keys{count}"), count, SERVER)


def storms(lab: Lab, seed: int, names: Iterable[str], broken: str = "") -> None:
    stage = Stage(lab, seed, broken, "-storm")
    for name in names:
        plan = EPISODES[name](stage)
        stage.storm(plan, plan[-1][0] + 6)
        stage.finish(CALL_S)
        stage.heal()
    stage.drain()
    check_storm(stage)


def server_cut(stage: Stage) -> list[tuple[float, Callable[[], None]]]:
    lab = stage.cluster
    return [
        (4, lambda: stage.fault("the server's power is cut", lab.server.power_off)),
        (5, lambda: stage.cure("it comes back", lab.serve)),
    ]


def client_cut(stage: Stage) -> list[tuple[float, Callable[[], None]]]:
    number = stage.chance.choice(CLIENTS)
    return [
        (4, lambda: stage.fault(f"host {number}'s power is cut", lambda: stage.cut_power(number))),
        (5, lambda: stage.cure("it comes back", lambda: stage.restore(number))),
    ]


def net_cut(stage: Stage) -> list[tuple[float, Callable[[], None]]]:
    number, cut = stage.chance.choice(CLIENTS), stage.cluster.network.cut
    return [
        (2, lambda: stage.start(number, "hold")),
        (2, lambda: stage.wait_for("got")),
        (2, lambda: stage.fault(f"host {number} is cut off", lambda: cut.add(number))),
        (2 * GRACE_S + 5, lambda: stage.cure("it comes back", cut.clear)),
    ]


EPISODES = {"server": server_cut, "client": client_cut, "net": net_cut, "server again": server_cut}


def check_storm(stage: Stage) -> None:
    events = hosts.Events(stage.log)
    hosts.report(events)
    hosts.check_hands(events)
    say(f"{hosts.check_fence(events)} that had ended came back once more")
    seen = {number: stage.files(number, stage.queue) for number in CLIENTS}
    there = stage.files(SERVER, stage.queue.replace(MOUNT, BRICK))
    for number, files in seen.items():
        if files != there:
            raise Violation(f"host {number} does not see what the server has: {files ^ there}")
    hosts.check_places(events, there)
    hosts.check_calm(events)
    wrong = [*not_so(events, there)]
    if wrong:
        raise Violation(f"{len(wrong)} answers were not so; the first: {wrong[0]}")


def not_so(events: hosts.Events, files: set[str]) -> Iterator[str]:
    """Yield the errors that a hard mount must hide, at whatever time, and the calls that raised
    though they did what they were to do."""
    for _, at, what, code in events.errors:
        yield f"{what} raised {errno.errorcode[code]} at {at:.3f}"
    for ident, deliveries in events.deliveries.items():
        for name in {it.name for it in deliveries} & events.refused:
            yield f"the push of {name} raised, and {ident} was delivered"
        hows = {it.how for it in deliveries}
        if files & {f"done/{ident}", f"failed/{ident}"} and not hows & {"done", "fail", ""}:
            yield f"{ident} has ended, but those who had it were told {hows}"
    for it in itertools.chain(*events.deliveries.values()):
        if it.how == "lost" and it.ended_s < it.deadline_s - hosts.SKEW_S:
            yield f"{it.actor} lost the lease of {it.id}, which ended later"
        if it.actor.startswith("hold") and it.how != "lost":
            yield f"{it.actor} was cut off, and its done() was not refused: {it}"


# Power


def power(seed: int) -> None:
    """Cut the power of a machine with a queue on its own disk, three times. Each time the date of
    its next boot is an hour earlier than it should be, and its monotonic clock begins anew."""
    with laboratory(LOCAL) as lab:
        stage = Stage(lab, seed, "", "-power")
        for boot in range(4):
            stage.call_over(False)
            for kind in ("produce", "consume") * 2:
                stage.start(1, kind, sync=True)
            stage.wait_for("ready")
            time.sleep(4 + 4 * stage.chance.random())
            if boot < 3:
                stage.cut_power(1)
                lab.behind_s += 3600
                lab.join([1])
        stage.call_over()
        stage.finish(CALL_S)
        stage.drain()
        check_power(stage)


def check_power(stage: Stage) -> None:
    events = hosts.Events(stage.log)
    hosts.report(events)
    hosts.check_hands(events)
    hosts.check_fence(events)
    hosts.check_calm(events)
    hosts.check_places(events, stage.files(1, stage.queue))
    of = {ident: events.tried[name] for ident, name in events.pushed.items()}
    for first, second in itertools.permutations(of, 2):
        if of[first].ended_s < of[second].began_s and first > second:
            raise Violation(f"{second} was pushed after {first} had been, and sorts before it")


# Everything

PHASES = ("basic", "calm", "keys", "storm", "replay", "power")
SHORT = ("keys", "storm", "replay")  # and not all of the last two
SHORT_STORM, SHORT_REPLAYS = ("client", "server", "net"), ("push", "claim", "done")


def prove(lab: Lab, seed: int, phase: str, short: bool = False, broken: str = "") -> None:
    """Run a phase. Raises Violation if a promise is broken."""
    if phase == "basic":
        basic(lab)
    elif phase == "calm":
        hosts.calm(Stage(lab, seed, broken, "-calm"), 50)
    elif phase == "keys":
        keys(lab, seed, broken)
    elif phase == "storm":
        storms(lab, seed, SHORT_STORM if short else EPISODES)
    elif phase == "replay":
        replay(lab, SHORT_REPLAYS[:1] if broken else SHORT_REPLAYS if short else REPLAYS, broken)


def run_phases(version: str, seed: int, phases: Iterable[str], short: bool) -> list[str]:
    """Run phases, and return what went wrong. Each has its own queue."""
    wrong = []
    with laboratory(version) as lab:
        for phase in phases:
            began_s = time.monotonic()
            outcome = "holds"
            try:
                prove(lab, seed, phase, short)
            except Violation as error:
                wrong.append(f"{phase} on NFS {version}: {error}")
                outcome = "VIOLATED"
                lab.restart()
            say(f"{phase} on NFS {version}: {outcome}, {time.monotonic() - began_s:.0f} s")
    return wrong


def self_check(version: str, seed: int) -> list[str]:
    """Return which broken queues are not caught."""
    wrong = []
    with laboratory(version) as lab:
        for broken, phase in BROKEN.items():
            try:
                prove(lab, seed, phase, broken=broken)
                wrong.append(f"{broken} is not caught")
            except Violation as error:
                say(f"{broken} is caught: {error}")
                lab.restart()
    return wrong


@contextlib.contextmanager
def laboratory(version: str) -> Iterator[Lab]:
    lab = Lab(version)
    try:
        began_s = time.monotonic()
        lab.join(lab.machines)
        say(f"{len(lab.machines)} machines are up after {time.monotonic() - began_s:.0f} s")
        yield lab
    finally:
        lab.close()


def missing() -> list[str]:
    """Return what this machine lacks."""
    lacking = [tool for tool in TOOLS if not shutil.which(tool)]
    return lacking if glob.glob(KERNELS) else [*lacking, KERNELS]


def check_machine() -> None:
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Unable("it needs Linux on x86_64")
    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "update", timeout_s=300)
        run("apt-get", "install", "-y", "--no-install-recommends", *PACKAGES.split(), timeout_s=900)
    if missing():
        raise Unable(f"it needs {', '.join(missing())}")


def run_all(args: argparse.Namespace, seed: int) -> list[str]:
    """Run what was asked for, and return what went wrong."""
    check_machine()
    if args.self_check:
        return self_check(args.nfs or "4.2", seed)
    phases = (args.only,) if args.only else PHASES if args.full else SHORT
    on_nfs, wrong = [phase for phase in phases if phase != "power"], []
    for version in ("4.2", "3") if args.full else ("4.2",):
        if on_nfs:
            short = not (args.only or args.full)
            wrong += run_phases(args.nfs or version, seed, on_nfs, short)
    if "power" in phases:
        try:
            power(seed)
            say("power: holds")
        except Violation as error:
            wrong.append(f"power: {error}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Two machines share a queue on NFS.")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--nfs", choices=("4.2", "3"), help="the version; default: 4.2")
    parser.add_argument("--only", choices=PHASES, help="run only this phase, all of it")
    parser.add_argument("--full", action="store_true", help="run all phases, on both versions")
    parser.add_argument(
        "--self-check", action="store_true", help="show that broken queues are caught"
    )
    parser.add_argument("--guest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.guest:
        Guest().serve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("nfs: NOT PROVED: terminated"))
    seed = random.randrange(10**6) if args.seed is None else args.seed
    say(f"seed {seed}")
    try:
        wrong = run_all(args, seed)
    except (Unable, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"nfs: NOT PROVED: {error}") from None
    for text in wrong:
        say(f"FAILED, seed {seed}: {text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
