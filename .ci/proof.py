"""Functions that several proofs use: options, messages, commands, mounts, payloads, files.

A proof is a program in .ci/ that tests promises of femtoqueue on real processes, disks or networks.
The exit status is 0 if the promises hold, 1 if a promise is broken, 3 if this machine cannot run
the proof.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# a program that imports this module can import femtoqueue next
sys.path.insert(0, PROJECT)
PROGRAM = os.path.basename(sys.argv[0]).removesuffix(".py")


class Unable(Exception):
    """This machine cannot run the proof: a tool, a right or a device is missing."""


class Violation(Exception):
    """femtoqueue broke a promise."""


def say(text: str) -> None:
    """Print a line of the report, with the program's name in front, and flush it."""
    print(f"{PROGRAM}: {text}", flush=True)


def docstring_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help prints a docstring with its line breaks."""
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=shown)


def proof_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with --seed and --self-check, which most proofs have."""
    made = docstring_parser(doc)
    add = made.add_argument
    seed = random.randrange(10**6)
    add("--seed", type=int, default=seed, help="default: random; the seed is printed")
    catch = "show that this proof catches each fault of broken.py that names this proof"
    add("--self-check", action="store_true", help=catch)
    return made


@contextlib.contextmanager
def exit_on_failure(seed: int | None = None) -> Iterator[None]:
    """Turn Violation and Unable, raised in the block, into an exit of the program.

    A Violation is printed with the seed, and the exit status is 1. An Unable is printed as "NOT
    PROVED", and the exit status is 3.
    """
    try:
        yield
    except Unable as error:
        print(f"{PROGRAM}: NOT PROVED: {error}", file=sys.stderr)
        raise SystemExit(3) from None
    except Violation as error:
        of_seed = "" if seed is None else f", seed {seed}"
        raise SystemExit(f"{PROGRAM}: FAILED{of_seed}: {error}") from None


# Commands and mounts


def need_root() -> None:
    if os.geteuid() != 0:
        raise Unable("this proof needs root")


def run(*command: str, timeout_s: float = 60) -> str:
    """Run a command and return its standard output.

    Raises Unable if the command does not exist or fails, and subprocess.TimeoutExpired after
    `timeout_s`.
    """
    try:
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise Unable(f"{error}") from None
    if result.returncode:
        raise Unable(f"{' '.join(command)}: {result.stdout}{result.stderr}".strip())
    return result.stdout


def install(wanted: Iterable[str], *packages: str) -> None:
    """Install Debian packages if one of the wanted commands or files is missing.

    `wanted` holds names of commands and glob patterns of files. Raises Unable if a command or a
    file is still missing afterwards.
    """

    def missing() -> list[str]:
        return [it for it in wanted if not (shutil.which(it) or glob.glob(it))]

    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "update", timeout_s=300)
        run(
            "apt-get",
            "install",
            "-y",
            "--no-install-recommends",
            *packages,
            timeout_s=900,
        )
    if missing():
        raise Unable(f"this proof needs {', '.join(missing())}")


@contextlib.contextmanager
def mounted(*what: str) -> Iterator[None]:
    """Run mount(8) with these arguments. The last argument is the mount point, which is unmounted
    at the end of the block."""
    run("mount", *what)
    try:
        yield
    finally:
        if subprocess.call(["umount", what[-1]], stderr=subprocess.DEVNULL):
            run("umount", "--lazy", what[-1])  # a killed process has not exited yet


def make_image(path: str, size_mib: int, *mkfs: str) -> None:
    """Make a file of this size, and a file system in the file with the command `mkfs`."""
    with open(path, "wb") as file:
        file.truncate(size_mib << 20)
    run(*mkfs, path)


@contextlib.contextmanager
def small_disk(kind: str, size_mib: int, options: str = "") -> Iterator[str]:
    """Make and mount a small file system ("tmpfs", "ext4", "xfs", ...); yield the mount point.

    `options` are further mount options of a tmpfs. At the end of the block the file system is
    unmounted and deleted.
    """
    with tempfile.TemporaryDirectory() as work:
        target, image = os.path.join(work, "mnt"), os.path.join(work, "image")
        os.mkdir(target)
        what = ["-t", "tmpfs", "-o", f"size={size_mib}m{options}", "none"]
        if kind != "tmpfs":
            make_image(image, size_mib, f"mkfs.{kind}", "-q")
            what = ["-o", "loop", image]
        with mounted(*what, target):
            yield target


# Payloads whose bytes can be checked without a copy


def payload(name: str, size: int) -> bytes:
    """Return a line with the name and the size, and `size` random bytes seeded by the name."""
    return f"{name} {size}\n".encode() + random.Random(name).randbytes(size)


def name_of(data: bytes) -> str:
    """Return the name that payload() was given. Raises Violation if a byte has changed since."""
    head, _, rest = data.partition(b"\n")
    name = head.decode(errors="replace").rpartition(" ")[0]
    if data != payload(name, len(rest)):
        raise Violation(f"the bytes of {name!r} are not those that were pushed")
    return name


# Files


def read(name: str) -> str:
    with open(os.path.join(PROJECT, name), encoding="utf-8") as file:
        return file.read()


def make_entry(path: str, kind: str, content: bytes, target: str = "nowhere") -> None:
    """Make a directory entry of a kind.

    "file": a file with this content. "link": a symbolic link to `target`. "fifo": a FIFO. "folder":
    a directory that holds a file of this content, with a task's name. Any other kind: an empty
    directory.
    """
    if kind == "link":
        os.symlink(target, path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        with open(path, "xb") as file:
            file.write(content)
    else:
        os.mkdir(path)
        if kind == "folder":
            make_entry(
                os.path.join(path, f"{1:020d}-0000000000000001"), "file", content
            )


def fingerprint(path: str) -> tuple[int, ...]:
    """Return inode, mode, size and mtime of a path. A change of the file changes one of them."""
    status = os.lstat(path)
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def open_log(path: str) -> int:
    """Open a log for appending and return its descriptor.

    Several processes write to a log. Each writes a line by one write(), so that a process that is
    killed leaves only whole lines.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
