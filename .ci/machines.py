"""Virtual machines with kernels of their own, for proofs that cut their power or their network.

A Machine boots Debian's kernel in QEMU without KVM, in about ten seconds. The image is an archive
of this machine's own Python, tools and libraries (build_image()). The image and the disk are files
in memory. All packets between machines go through this program (Network), and none leaves it. A
machine ends with this program, however the program ends, and leaves no file behind.

The first process in a machine is a Guest. It takes orders from this program, sets the date and
starts processes. These processes write their log to a virtual serial port, which leads to this
program. When the write() of a line returns, this program has the line. So a power cut, which is a
SIGKILL of QEMU, loses no line of the log.
Data that the machine had not yet written to its disk is lost, and the disk keeps the rest.

A session is a process in a machine that evaluates lines of Python, as an interactive interpreter
does, and keeps its variables.
"""

from __future__ import annotations

import compileall
import contextlib
import glob
import itertools
import json
import os
import queue
import re
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from proof import Unable, run

QEMU = "qemu-system-x86_64"
KERNELS = "/boot/vmlinuz-*-cloud-*"
MODULES = "virtio_pci virtio_console virtio_net virtio_blk ext4 nfsv3 nfsv4 nfsd"
UNNEEDED = shutil.ignore_patterns(  # parts of Python's library that no machine needs
    *("test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "tkinter"),
    *("*-packages", "config-*", "*.opt-?.pyc"),
)
MEMORY_MB = 384
# How long a boot and a call may take. Three machines share two cores with other work.
BOOT_S, CALL_S = 120.0, 120.0
# Two options are needed because this computer may be busy during a boot. clocksource=hpet: clocks
# other than the HPET would be calibrated wrongly. no_timer_check: the check of the timer would
# fail.
BOOT = "console=ttyS0 quiet panic=-1 clocksource=hpet no_timer_check mitigations=off apparmor=0"
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /run /tmp /sbin /usr/bin /usr/sbin
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/sbin:/usr/bin PYTHONDONTWRITEBYTECODE=1
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
exec </dev/console >/dev/console 2>&1
mount -t tmpfs none /run
mount -t tmpfs none /tmp
for module in {modules}; do insmod $module; done
ln -s /proc/self/mounts /etc/mtab
ip link set lo up
exec {python} {main}
"""


# The image that a machine boots from


def libraries(programs: Iterable[str]) -> set[str]:
    """Return the shared libraries that programs are linked with. Raises Unable if one is
    missing."""
    output = subprocess.run(
        ["ldd", *programs], check=False, capture_output=True, text=True
    ).stdout
    if missing := re.findall(r"(\S+) => not found", output):
        raise Unable(f"missing libraries: {', '.join(missing)}")
    return set(re.findall(r"(?:=> |^\s)(/\S+)", output, re.MULTILINE))


def find_kernel() -> str:
    """Return the path of Debian's newest kernel for virtual machines, or "" if none is
    installed."""
    return max(glob.glob(KERNELS), default="")


def module_files() -> list[str]:
    release = find_kernel().partition("vmlinuz-")[2]
    command = ("modprobe", "-C", "/dev/null", "-S", release, "--show-depends", "-a")
    return [
        *dict.fromkeys(re.findall(r"insmod (\S+)", run(*command, *MODULES.split())))
    ]


def build_image(
    root: str,
    main: str,
    sources: dict[str, str],
    programs: Iterable[str],
    texts: dict[str, str],
) -> bytes:
    """Return an initial file system for a machine, as a cpio archive.

    The archive holds Python and its library. `sources` maps more files to their directories in the
    machine. `programs` go to /sbin, with the libraries that they need. `texts` maps paths in the
    machine to the texts of files. `root` is a directory in which all files are collected. `main`
    are the arguments with which the machine starts Python.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    linked = [python, *programs]
    modules = module_files()
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        shutil.copytree(
            library, f"{root}{library}", ignore=UNNEEDED, dirs_exist_ok=True
        )
        linked += glob.glob(f"{library}/lib-dynload/*.so")
    places = {
        path: os.path.dirname(path) for path in (python, *libraries(linked), *modules)
    }
    places |= (
        dict.fromkeys(programs, "/sbin")
        | {shutil.which("busybox") or "": "/bin"}
        | sources
    )
    for source, directory in places.items():
        os.makedirs(f"{root}{directory}", exist_ok=True)
        shutil.copy2(source, f"{root}{directory}")
    for directory in {*sources.values()}:  # compiled here, because a machine is slow
        compileall.compile_dir(f"{root}{directory}", maxlevels=0, quiet=1)
    init = INIT.format(modules=" ".join(modules), python=python, main=main)
    for path, text in {"/init": init, **texts}.items():
        os.makedirs(os.path.dirname(f"{root}{path}"), exist_ok=True)
        with open(f"{root}{path}", "w", encoding="ascii") as file:
            file.write(text)
    os.chmod(f"{root}/init", 0o755)
    pack = "chmod -R go+rX . && find . | busybox cpio -o -H newc -R 0:0 >../image"
    run("sh", "-c", f"cd {root} && {pack}")
    with open(f"{root}/../image", "rb") as packed:
        return packed.read()


def memory_file(name: str, content: bytes = b"") -> int:
    """Return a descriptor of a file in memory. The file ends with the processes that have it
    open."""
    fd = os.memfd_create(name, 0)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    return fd


# The network, through which all frames between machines pass


class Network(threading.Thread):
    """A switch between machines.

    Frames from and to a machine in `cut` are dropped silently. So are the frames for which drops()
    returns true.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__(daemon=True)
        kind = (socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ports = {number: socket.socketpair(*kind) for number in numbers}
        self.cut: set[int] = set()
        self.drops: Callable[[int, bytes], bool] = lambda source, frame: False

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for number, (ours, _) in self.ports.items():
            selector.register(ours, selectors.EVENT_READ, number)
        while True:
            for key, _ in selector.select():
                self.forward(key.data, self.ports[key.data][0].recv(1 << 16))

    def forward(self, source: int, frame: bytes) -> None:
        """Pass on a frame: to all other machines if it is a broadcast, else to the machine whose
        number is the last byte of the target address."""
        if source in self.cut or self.drops(source, frame):
            return
        targets = (
            set(self.ports) - {source} if frame[0] & 1 else {frame[5]} & set(self.ports)
        )
        for number in targets - self.cut:
            with contextlib.suppress(
                BlockingIOError
            ):  # the machine is off or too slow: drop the frame
                self.ports[number][0].send(frame, socket.MSG_DONTWAIT)

    def plug(self, number: int) -> int:
        port = self.ports[number][1]
        with contextlib.suppress(BlockingIOError):
            while port.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        return port.fileno()


# Machines


class Call:
    """An order that a machine was given. If the order starts a process, communicate() and kill()
    do the same as those of subprocess.Popen."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.number = number
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.returncode: int | None = None

    def answer(self, timeout_s: float = CALL_S) -> Any:
        """Wait for the answer and return it. Raises subprocess.TimeoutExpired."""
        try:
            return self.answers.get(timeout=timeout_s)
        except queue.Empty:
            raise subprocess.TimeoutExpired(
                f"host {self.machine.number}", timeout_s
            ) from None

    def communicate(self, timeout: float = CALL_S) -> tuple[str, None]:
        if self.returncode is None:
            self.returncode, self.output = self.answer(timeout)
        return self.output, None

    def kill(self) -> None:
        self.machine.ask("kill", process=self.number)

    def evaluate(self, code: str) -> Call:
        return self.machine.ask("evaluate", session=self.number, code=code)


class Machine:
    """A virtual machine, which ends with this program. power_off() is a power cut.

    The program in the machine (Guest) has two ports. Over the port "control" it gets orders and
    sends answers. To the port "notes" its processes write their log. A write to a port returns when
    this program has the data.
    """

    def __init__(self, number: int, network: Network, image: int, disk: int = -1):
        self.number = number
        self.network = network
        self.image = image
        self.disk = disk
        self.on_line: Callable[[str], object] = lambda line: None
        self.numbers = itertools.count(1)
        self.is_on = False

    def boot(self) -> None:
        """Switch the machine on. Call wait_until_up() next."""
        control, notes = socket.socketpair(), socket.socketpair()
        port = self.network.plug(self.number)
        self.console = memory_file("console")
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
        self.control = control[0]
        self.calls = {0: Call(self, 0)}
        self.readers = [
            threading.Thread(
                target=read_lines, args=(control[0], self.read_answer), daemon=True
            ),
            threading.Thread(
                target=read_lines, args=(notes[0], self.read_note), daemon=True
            ),
        ]
        for reader in self.readers:
            reader.start()
        self.is_on = True

    def wait_until_up(self, behind_s: float) -> None:
        """Wait until the machine is up. Then tell the machine the number of seconds by which its
        monotonic clock is behind that of this program, and set the machine's date to `behind_s`
        before the date here."""
        try:
            self.calls[0].answer(BOOT_S)
        except subprocess.TimeoutExpired:
            raise Unable(
                f"machine {self.number} does not boot: {self.console_text()[-2000:]}"
            ) from None
        best_s = float("inf")
        for _ in range(10):
            began_s = time.monotonic()
            there_s = self.ask("clock").answer()
            took_s = time.monotonic() - began_s
            if took_s < best_s:
                best_s = took_s
                offset_s = began_s + took_s / 2 - there_s
        self.ask("set_clock", offset_s=offset_s, wall_s=time.time() - behind_s).answer()

    def command(
        self, port: int, control: int, notes: int, image: int, disk: int
    ) -> list[str]:
        """Return the command that runs QEMU with these descriptors."""
        options = f"""
            -accel tcg -cpu max -m {MEMORY_MB} -nodefaults -no-user-config -no-reboot
            -display none -serial stdio -kernel {find_kernel()} -initrd /dev/fd/{image}
            -netdev dgram,id=net,local.type=fd,local.str={port}
            -device virtio-net-pci,netdev=net,mac=52:54:00:00:00:{self.number:02x},romfile=
            -device virtio-serial-pci
            -chardev socket,id=control,fd={control}
            -device virtserialport,chardev=control,name=control
            -chardev socket,id=notes,fd={notes}
            -device virtserialport,chardev=notes,name=notes
        """
        if disk >= 0:
            options += f"""
                -drive if=none,id=disk,format=raw,file.locking=off,file.filename=/dev/fd/{disk}
                -device virtio-blk-pci,drive=disk
            """
        return [
            "setpriv",
            "--pdeathsig",
            "KILL",
            QEMU,
            *options.split(),
            "-append",
            BOOT,
        ]

    def console_text(self) -> str:
        return os.pread(self.console, 1 << 20, 0).decode(errors="replace")

    def read_answer(self, line: str) -> None:
        number, answer = json.loads(line)
        self.calls[number].answers.put(answer)

    def read_note(self, line: str) -> None:
        """Pass on a line of the log. The process of a session writes its answers to the same port:
        a line that begins with "[" is an answer."""
        if line.startswith("["):
            self.read_answer(line)
        else:
            self.on_line(line)

    def ask(self, what: str, **settings: Any) -> Call:
        """Send an order to the machine. The method `what` of Guest carries out the order."""
        call = Call(self, next(self.numbers))
        self.calls[call.number] = call
        line = json.dumps({"what": what, "number": call.number, **settings})
        with contextlib.suppress(BrokenPipeError):
            # the machine is off: the call has no answer
            self.control.sendall(f"{line}\n".encode())
        return call

    def run(self, *command: str) -> str:
        """Run a command in the machine and return its output. Raises Unable if it fails or
        hangs."""
        call = self.ask("run", command=command)
        try:
            output, _ = call.communicate()
        except subprocess.TimeoutExpired:
            raise Unable(
                f"{command} hangs on host {self.number}: {self.console_text()[-2000:]}"
            ) from None
        if call.returncode:
            raise Unable(f"{' '.join(command)} on host {self.number}: {output}")
        return output

    def power_off(self) -> None:
        self.is_on = False
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join()
        self.control.close()
        os.close(self.console)


def read_lines(port: socket.socket, heard: Callable[[str], object]) -> None:
    with (
        contextlib.suppress(ConnectionError),
        port.makefile("r", encoding="utf-8") as lines,
    ):
        for line in lines:
            if line.endswith("\n"):
                heard(line)


# In a machine


class Guest:
    """The first process of a machine, which carries out orders.

    It forks the other processes, because starting Python takes seconds in a machine.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        ports = {}
        for name in os.listdir("/sys/class/virtio-ports"):
            with open(f"/sys/class/virtio-ports/{name}/name", encoding="ascii") as file:
                ports[file.read().strip()] = f"/dev/{name}"
        self.control, self.notes = (
            os.open(ports[name], os.O_RDWR) for name in ("control", "notes")
        )
        # by pid: the call's number, the output's fd
        self.children: dict[int, tuple[int, int]] = {}
        # by a session's number: the pipe to its process
        self.pipes: dict[int, int] = {}
        # this machine's monotonic clock plus offset_s is the proof's clock
        self.offset_s = 0.0
        self.names = names  # the global names of the sessions

    def serve(self) -> None:
        """Carry out orders, and reap children, for ever."""
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
        """Answer the order with this number."""
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

    def fork(self, number: int, main: Callable[[], None]) -> None:
        """Run main() in a new process. Its exit status and output are the order's answer."""
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

    def session(self, number: int) -> None:
        ours, its = os.pipe()
        self.pipes[number] = its
        self.fork(number, lambda: run_session(ours, self.notes, self.names))

    def evaluate(self, number: int, session: int, code: str) -> None:
        os.write(self.pipes[session], f"{json.dumps([number, code])}\n".encode())


def run_session(orders: int, notes: int, names: dict[str, Any]) -> None:
    """Evaluate an expression, or execute a statement, for each line from the pipe `orders`. Answer
    with "" and the repr() of the result, or with an exception's name and message."""
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
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(frame.name for frame in frames[2:])
