"""What the proofs have in common: options, what they print, commands, mounts, payloads, notes."""

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
sys.path.insert(0, PROJECT)  # who imports this module finds femtoqueue
PROGRAM = os.path.basename(sys.argv[0]).removesuffix(".py")


class Unable(Exception):
    """This machine can't show it."""


class Violation(Exception):
    """A promise is broken."""


def say(text: str) -> None:
    """Print a line of the report at once."""
    print(f"{PROGRAM}: {text}", flush=True)


def plain_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a docstring as it stands."""
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=shown)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that most proofs have."""
    made = plain_parser(doc)
    add, seed = made.add_argument, random.randrange(10**6)
    add("--seed", type=int, default=seed, help="default: random; it is printed")
    add("--self-check", action="store_true", help="catch the faults of broken.py that name it")
    return made


@contextlib.contextmanager
def ends(seed: int | None = None) -> Iterator[None]:
    """Let what goes wrong in the block end the program, with a line that says it: with status 1 if
    a promise is broken, 3 if this machine can't show it."""
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
        raise Unable("it needs root")


def run(*command: str, timeout_s: float = 60) -> str:
    """Return what a command prints; raises Unable if there is none, or it fails."""
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
    """Install Debian's packages if a command, or a file of a pattern, is missing; raises Unable if
    it still is."""

    def missing() -> list[str]:
        return [it for it in wanted if not (shutil.which(it) or glob.glob(it))]

    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "update", timeout_s=300)
        run("apt-get", "install", "-y", "--no-install-recommends", *packages, timeout_s=900)
    if missing():
        raise Unable(f"it needs {', '.join(missing())}")


@contextlib.contextmanager
def mounted(*what: str) -> Iterator[None]:
    """Run mount(8); its last argument is where to."""
    run("mount", *what)
    try:
        yield
    finally:
        if subprocess.call(["umount", what[-1]], stderr=subprocess.DEVNULL):
            run("umount", "--lazy", what[-1])  # a process that was killed is not gone yet


def make_image(path: str, size_mib: int, *mkfs: str) -> None:
    """Make a file system in a file."""
    with open(path, "wb") as file:
        file.truncate(size_mib << 20)
    run(*mkfs, path)


@contextlib.contextmanager
def small_disk(kind: str, size_mib: int, options: str = "") -> Iterator[str]:
    """A small file system of a kind, mounted on a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as work:
        target, image = os.path.join(work, "mnt"), os.path.join(work, "image")
        os.mkdir(target)
        what = ["-t", "tmpfs", "-o", f"size={size_mib}m{options}", "none"]
        if kind != "tmpfs":
            make_image(image, size_mib, f"mkfs.{kind}", "-q")
            what = ["-o", "loop", image]
        with mounted(*what, target):
            yield target


# Payloads that prove their own bytes


def payload(name: str, size: int) -> bytes:
    return f"{name} {size}\n".encode() + random.Random(name).randbytes(size)


def name_of(data: bytes) -> str:
    """Return what payload() was given; raises Violation unless each byte is as it was pushed."""
    head, _, rest = data.partition(b"\n")
    name = head.decode(errors="replace").rpartition(" ")[0]
    if data != payload(name, len(rest)):
        raise Violation(f"the bytes of {name!r} are not those that were pushed")
    return name


# Files


def read(name: str) -> str:
    """Return the text of a file of the project."""
    with open(os.path.join(PROJECT, name), encoding="utf-8") as file:
        return file.read()


def litter(path: str, kind: str, content: bytes, target: str = "nowhere") -> None:
    """Make a file, a folder with a file in it, an empty one, a link or a FIFO."""
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
            litter(os.path.join(path, f"{1:020d}-00000001"), "file", content)


def looks(path: str) -> tuple[int, ...]:
    """Return what changes if anybody touches it."""
    status = os.lstat(path)
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def open_log(path: str) -> int:
    """Return a descriptor for what is noted: a line by one write(), so that whoever is killed
    leaves whole lines."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
