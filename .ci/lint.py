"""Check the text of femtoqueue.py and README.md: the order of the parts, the tables, the size.

    python .ci/lint.py

The program reads the sources and the README, and imports femtoqueue and test. It prints a line for
each check: the figure, its limit, and what is checked. If the figure is over the limit, the lines
below say what is wrong, and the exit status is 1.

The weight, tokens of code, has the last known figure as its limit. A commit that makes the code
smaller also writes the new figure into LIMITS. A commit that makes the code larger raises the limit
and says why. Lines of code have no limit, because it would reward packing. Lines of prose have no
limit, because it would make the sentences worse.
"""

from __future__ import annotations

import ast
import glob
import inspect
import io
import itertools
import keyword
import os
import re
import sys
import tokenize
import unittest
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from proof import PROJECT, docstring_parser, read

import femtoqueue
import test

LIMITS = {
    "tokens of code": 36_354,
}
DOORS = {  # names of later parts that parts above them may use
    *("_Inspector", "_Processing", "_WorkerPool", "_open_files"),
    *("_read_checkpoint", "_save_checkpoint", "_node_stats", "_trust_problem"),
}
HELPERS = {  # functions that rename or unlink, but are not a step in the table of moves
    *("_Files.move", "_Files.remove", "_Files.shrink"),
    *("_Files.unlink", "_Files.unlink_if_exists"),
    "TicketQueue.maybe_cleanup",
    "_Maintenance.remove_stale_files",
    *(
        "_QueueClock._create",
        "_Worker._put_reason",
        "_Worker.move_leased",
        "_Worker.move_task",
    ),
    *(
        "_Keys._link",
        "_Keys._repair",
        "_Keys._swap",
        "_Keys.move_keyed",
        "_SharedKeys._link_or_give_way",
    ),
    *(
        "_SharedKeys._listed",
        "_Maintenance._purge_done",
    ),
    *("FemtoQueue.purge", "FemtoQueue.resume", "_read_checkpoint"),
    *(
        "TicketQueue._join_locked",
        "TicketQueue._lives",
        "TicketQueue._locked",
        "TicketQueue.remove",
    ),
}
MOVES = re.compile(
    r"\b(?:os|files|_files|self)\.(?:rename|rename_onto|replace|move|unlink|unlink_if_\w+)\("
    r"|files\.remove\(|\(os\.unlink,"
)
# Names in prose that are not of femtoqueue.py: programs, system calls, words of an output.
OTHER_NAMES = (
    *("exec", "ls", "make", "syncfs", "tee", "top", "touch"),
    *("mended", "odd", "_NAME_command"),
)
SECTIONS = [
    *(
        "Thirty seconds",
        "When to use it",
        "Install",
        "Guide",
        "The command line",
        "Deploying",
    ),
    *(
        "More than one machine",
        "Guarantees",
        "Speed",
        "Reference",
        "How it works",
        "Changes",
    ),
    "Licence",
]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


SOURCE, README, DOCSTRING = (
    read("femtoqueue.py"),
    read("README.md"),
    femtoqueue.__doc__ or "",
)
TREE = ast.parse(SOURCE)
CLASSES = [it for it in TREE.body if isinstance(it, ast.ClassDef)]

# The parts of femtoqueue.py

BANNERS = [
    (number, match[2], int(match[1]))
    for number, line in enumerate(SOURCE.splitlines(), 1)
    if (match := re.match(r"# (\d+)\. ([A-Z][A-Za-z ]+)[:.]", line))
]


def part_of(line: int) -> int:
    """Return the number of the part in which a line is; 0 before the first part."""
    return sum(start <= line for start, _, _ in BANNERS)


def differences(found: Iterable[object], wanted: Iterable[object]) -> list[str]:
    """Return the pairs of items that differ between two lists."""
    return [f"{a} / {b}" for a, b in itertools.zip_longest(found, wanted) if a != b]


def parts_not_as_listed() -> list[str]:
    """Return the banners that differ from the docstring's list of parts, or have a wrong number."""
    text = DOCSTRING.partition("\nThe parts of this file")[2].split("\n\n")[1]
    # without the names of the groups
    text = re.sub(r"(?m)^ {4}\w[\w ]*?  +", "· ", text)
    listed = [" ".join(it.split()) for it in text.split("·")]
    numbered = [f"{number}. {name}" for number, (_, name, _) in enumerate(BANNERS, 1)]
    banners = [f"{number}. {name}" for _, name, number in BANNERS]
    names = (name for _, name, _ in BANNERS)
    return differences(names, filter(None, listed)) + differences(banners, numbered)


def topics_not_as_listed() -> list[str]:
    """Return the comments "TOPIC: ..." that the docstring does not list, or lists in vain."""
    listed = DOCSTRING.partition('"TOPIC:" and the words: ')[2].split(".\n")[0]
    words = [" ".join(it.split()) for it in listed.split(",")]
    topics = [" ".join(it.split()) for it in re.findall(r"(?m)^# +TOPIC: (.*)", SOURCE)]
    lost = [it for it in words if sum(topic.startswith(it) for topic in topics) != 1]
    return lost + [it for it in topics if not it.startswith((*words, "a new command"))]


def used_from_below() -> list[str]:
    """Return the uses of a name from a part below, and of a private attribute of another part's
    class."""
    homes: dict[str, int] = {}  # the part of each name at top level
    private: dict[int, set[str]] = {}  # by part: the private attributes of its classes
    for node in TREE.body:
        for name in names_made_by(node):
            homes.setdefault(name, part_of(node.lineno))
        private.setdefault(part_of(node.lineno), set()).update(private_names_of(node))
    found = []
    for node in TREE.body:
        here = part_of(node.lineno)
        for part in parts_of(node):
            is_foreign = False
            if isinstance(part, ast.Name) and part.id not in DOORS:
                is_foreign = homes.get(part.id, 0) > here
            elif isinstance(part, ast.Attribute) and re.match(
                "_(?!_|asdict$)", part.attr
            ):
                owner = ast.unparse(part.value)
                is_foreign = part.attr not in private[here] and owner not in (
                    "cls",
                    "os",
                )
            if is_foreign:
                found.append(f"{part.lineno}: {ast.unparse(part)}")
    return found


def parts_of(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes of a syntax tree, except two kinds.

    Annotations are left out: they name the types of objects, and a part of the file may be given an
    object of a class of a later one. _Worker.__init__ is left out, because it makes objects of
    classes in all parts.
    """
    yield node
    for field, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            names = getattr(node, "name", ""), getattr(part, "name", "")
            is_out = field in ("annotation", "returns") or names == (
                "_Worker",
                "__init__",
            )
            if isinstance(part, ast.AST) and not is_out:
                yield from parts_of(part)


def names_made_twice() -> list[str]:
    """Return the names that two statements at top level define: the second one would hold in both
    parts. A name of a condition or of a try block may have two definitions."""
    plain = (*DEFINITIONS, ast.Assign, ast.AnnAssign)
    made = [
        it
        for node in TREE.body
        if isinstance(node, plain)
        for it in names_made_by(node)
    ]
    return sorted({it for it in made if made.count(it) > 1})


def names_made_by(node: ast.stmt) -> list[str]:
    """Return the names that a statement at top level defines."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return [part.id for part in names if isinstance(part.ctx, ast.Store)]


def private_names_of(node: ast.stmt) -> set[str]:
    """Return the private names of the methods and attributes of a class; of another statement, an
    empty set."""
    parts = [*ast.walk(node)] if isinstance(node, ast.ClassDef) else []
    own = [
        it
        for it in parts
        if isinstance(it, ast.Attribute) and ast.unparse(it.value) == "self"
    ]
    names = {it.attr for it in own} | {
        it.name for it in parts if isinstance(it, ast.FunctionDef)
    }
    return {name for name in names if name.startswith("_")}


def longest_part() -> tuple[int, str]:
    """Return the number of lines of code, and the name, of the longest part. The parts FemtoQueue
    and Command line are left out."""
    ends = [start for start, _, _ in BANNERS[1:]] + [len(SOURCE.splitlines()) + 1]
    _, code = code_of()
    lengths = [
        (len(code.intersection(range(start, end))), name)
        for (start, name, _), end in zip(BANNERS, ends, strict=True)
    ]
    return max(it for it in lengths if it[1] not in ("FemtoQueue", "Command line"))


def longest_class() -> tuple[int, str]:
    """Return the number of lines of code, and the name, of the longest class except FemtoQueue."""
    _, code = code_of()
    spans = [(range(it.lineno, (it.end_lineno or 0) + 1), it.name) for it in CLASSES]
    return max(
        (len(code.intersection(lines)), name)
        for lines, name in spans
        if name != "FemtoQueue"
    )


def calls_of_own_name() -> list[str]:
    """Return the calls of a method that has the same name as the calling function.

    Such a call breaks a rule: among the functions that a task passes through one after another,
    each name stands for one function only. Calls of os and of a base class are allowed, and so is a
    method that calls itself.
    """
    found = []
    for function in ast.walk(TREE):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for part in ast.walk(function):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                owner = ast.unparse(part.func.value)
                if part.func.attr == function.name and owner not in (
                    "os",
                    "super()",
                    "object",
                    "self",
                ):
                    found.append(f"{part.lineno}: {owner}.{function.name}()")
    return found


# The table of moves, in the banner of the part Worker

TABLE = re.search(r"(?ms)^#    step +method .*?^#\n", SOURCE)
STEPS = {
    *re.findall(r"(?m)^#    \w[\w ]*?  +([\w.]+)  ", TABLE[0] if TABLE else "")
} - {"method"}


def steps_without_a_method() -> list[str]:
    """Return the functions that the table of moves names but femtoqueue.py does not have."""
    lost = [] if len(STEPS) >= 15 else [f"only {len(STEPS)} steps"]
    return lost + [it for it in sorted(STEPS) if it not in functions()]


def functions() -> dict[str, str]:
    """Return the source of each function and method, by its name."""
    found = {}
    for owner in TREE.body:
        for it in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
            if isinstance(it, (ast.FunctionDef, ast.AsyncFunctionDef)):
                prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                found[f"{prefix}{it.name}"] = ast.unparse(it)
    return found


def moves_without_a_step() -> list[str]:
    """Return the functions that rename or unlink, and are neither in the table of moves nor in
    HELPERS; and the names in HELPERS that do neither."""
    found = {name for name, text in functions().items() if MOVES.search(text)}
    return sorted(found - STEPS - HELPERS) + sorted(HELPERS - found)


# README.md


def section(title: str) -> str:
    """Return the text of the section whose title begins with `title`; for "", the text before the
    first section."""
    parts = re.split(r"(?m)^## (.*)\n", README)
    titles = ["", *parts[1::2]]
    return next(
        text
        for name, text in zip(titles, parts[::2], strict=True)
        if name.startswith(title)
    )


def column(number: int, text: str) -> list[str]:
    """Return the cells of a column of all tables in a text, without the headings."""
    tables = re.findall(r"(?m)(?:^\|.*\n)+", text)
    rows = [row.strip("|").split("|") for it in tables for row in it.splitlines()[2:]]
    return [row[number].strip() for row in rows if len(row) > number]


def sections_out_of_order() -> list[str]:
    return differences(re.findall(r"(?m)^## (.+)", README), SECTIONS)


def links_that_lead_nowhere() -> list[str]:
    """Return the relative links and the anchors that the README uses and that do not exist."""
    text = re.sub(r"(?ms)^```.*?^```$", "", README)
    headings = re.findall(r"(?m)^#+ (.+)", text)
    anchors = {
        "#" + re.sub(r"[^\w -]", "", it.lower()).replace(" ", "-") for it in headings
    }
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    files = [it for it in links if not re.match("#|https://", it)]
    missing = [it for it in files if not os.path.exists(os.path.join(PROJECT, it))]
    return missing + [it for it in links if it[0] == "#" and it not in anchors]


def wrong_names_in_the_diagram() -> list[str]:
    """Return what is wrong in the README's diagrams: arrows from or to a name that is no state,
    states that are missing, and arrows whose first word is not a method of FemtoQueue."""
    diagrams = re.findall(r"(?ms)^```mermaid\n(.*?)^```", section("How it works"))
    edges = re.findall(r"(?m)^    (\S+) --> (\S+): (\w+)", "".join(diagrams))
    states = {name for edge in edges for name in edge[:2]}
    calls = {move for _, to, move in edges if (to, move) != ("pending", "its")}
    wrong = states ^ {*femtoqueue.STATES, "[*]"}
    return [
        *wrong,
        *(it for it in calls if not callable(getattr(femtoqueue.FemtoQueue, it, None))),
    ]


def missing_in_the_reference() -> list[str]:
    """Return what the README's reference lacks: parameters and methods of FemtoQueue, and fields of
    FemtoTask."""
    text, queue = section("Reference"), femtoqueue.FemtoQueue
    parameters = [*inspect.signature(queue).parameters][1:]  # all but data_dir
    names = re.findall(r"`(?:await )?(\w+)`", text)
    methods = [name for name in vars(queue) if name[0] != "_"]
    missing = [it for it in (*methods, *fields_of_a_task()) if it not in names]
    listed = [it.strip("`") for it in column(0, text)]
    return missing + differences(listed[: len(parameters)], parameters)


def fields_of_a_task() -> list[str]:
    """Return the public fields and properties of FemtoTask."""
    it = femtoqueue.FemtoTask
    names = {
        *vars(it("", b"")),
        *it.__annotations__,
        *(n for n, value in vars(it).items() if isinstance(value, property)),
    }
    return sorted(name for name in names if name[0] != "_")


def readme_lines() -> tuple[int, str]:
    return len(README.splitlines()), "cut a part, or whole sentences"


def readme_words() -> tuple[int, str]:
    return len(README.split()), "cut a part, or whole sentences"


def unknown_proofs() -> list[str]:
    """Return the names in the README's table of guarantees that are neither a class of test.py nor
    a program in .ci/."""
    named = ", ".join(column(2, section("Guarantees"))).split(", ")
    return [it for it in named if it.strip("`") not in proofs()]


def proofs() -> set[str]:
    """Return the names of the classes of test.py that have tests, and of the programs in .ci/."""
    types = [it for it in vars(test).values() if isinstance(it, type)]
    cases = [it for it in types if issubclass(it, unittest.TestCase)]
    tests_of = unittest.defaultTestLoader.getTestCaseNames
    programs = {os.path.basename(path) for path in glob.glob(f"{PROJECT}/.ci/*.py")}
    return {it.__name__ for it in cases if tests_of(it)} | programs


# Names in the prose of femtoqueue.py


def prose() -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for it in docstrings():
        yield it.lineno, ast.literal_eval(ast.get_source_segment(SOURCE, it) or "''")


def names_that_do_not_exist() -> list[str]:
    """Return the names in backticks, with () or with _ in front that prose mentions, and that the
    code does not have."""
    known = {*OTHER_NAMES}
    for it in ast.walk(TREE):
        parts = (getattr(it, field, None) for field in ("id", "attr", "arg", "name"))
        known |= {part for part in parts if isinstance(part, str)}
    known |= {*dir(os), *dir(femtoqueue), *sys.stdlib_module_names, *keyword.kwlist}
    lost = []
    for line, text in prose():
        quoted = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
        called = re.findall(r"([A-Za-z_][\w.]*)\(\)|\b(_[A-Za-z]\w*(?:\.\w+)*)", text)
        for name in (*quoted, *map("".join, called)):
            if not {*filter(None, name.split("."))} <= known:
                lost.append(f"{line}: {name}")
    return lost


def races_without_a_test() -> list[str]:
    """Return the comments RACE and CRASH that do not name their test, as in "RACE (Crash): ..."."""
    known = proofs()
    lost = []
    for line, text in prose():
        for it in re.finditer(r"\b(?:RACE|CRASH)(?: \(([^)]*)\))?:", text):
            if not it[1] or not {*it[1].split(", ")} <= known:
                lost.append(f"{line}: {it[0]}")
    return lost


# Weights


def code_of() -> tuple[int, set[int]]:
    """Return the number of tokens of femtoqueue.py, and the numbers of the lines that they are on,
    without comments and docstrings."""
    spans = ((it.lineno, it.end_lineno or 0) for it in docstrings())
    documented = {number for start, end in spans for number in range(start, end + 1)}
    code: set[int] = set()
    tokens = 0
    no_code = ("COMMENT", "NL", "NEWLINE", "ENDMARKER", "INDENT", "DEDENT")
    # How many f-strings are open. Python 3.12 and later splits an f-string into tokens. Here each
    # f-string counts as one token.
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        name = tokenize.tok_name[token.type]
        if name not in no_code and token.start[0] not in documented:
            code.update(range(token.start[0], token.end[0] + 1))
            tokens += depth == 0
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return tokens, code


def weights() -> dict[str, int]:
    tokens, _ = code_of()
    return {"tokens of code": tokens}


def docstrings() -> Iterator[ast.stmt]:
    for node in ast.walk(TREE):
        if (
            isinstance(node, (*DEFINITIONS, ast.Module))
            and ast.get_docstring(node) is not None
        ):
            yield node.body[0]


# The checks

# Returns a list of what is wrong; or a figure, and a name that explains it.
Measure = Callable[[], "list[str] | tuple[int, str]"]
CHECKS: list[tuple[str, int, Measure]] = [
    (
        "parts with a wrong number, or not as the docstring lists them",
        0,
        parts_not_as_listed,
    ),
    ("topics that are not as the docstring lists them", 0, topics_not_as_listed),
    (
        "uses of a name from a part below, or of another part's private name",
        0,
        used_from_below,
    ),
    ("functions that call another function of their name", 0, calls_of_own_name),
    ("names that are defined twice", 0, names_made_twice),
    (
        "lines of code in the longest part except FemtoQueue, Command line",
        380,
        longest_part,
    ),
    ("lines of code in the longest class except FemtoQueue", 350, longest_class),
    ("steps of the table of moves that are not functions", 0, steps_without_a_method),
    (
        "functions that rename or unlink and are not in that table",
        0,
        moves_without_a_step,
    ),
    ("names in prose that do not exist", 0, names_that_do_not_exist),
    ("RACE and CRASH without the name of a test", 0, races_without_a_test),
    ("README: sections out of order", 0, sections_out_of_order),
    ("README: links and anchors that do not exist", 0, links_that_lead_nowhere),
    ("README: wrong or missing names in the diagram", 0, wrong_names_in_the_diagram),
    ("README: calls and fields that the reference lacks", 0, missing_in_the_reference),
    ("README: proofs that do not exist", 0, unknown_proofs),
    ("README: lines", 600, readme_lines),
    ("README: words", 5000, readme_words),
]


def main() -> int:
    docstring_parser(__doc__).parse_args()
    checks = [(what, limit, measure()) for what, limit, measure in CHECKS]
    checks += [
        (f"weight: {name}", LIMITS[name], (it, "")) for name, it in weights().items()
    ]
    status = 0
    for what, limit, found in checks:
        figure, wrong = (
            found if isinstance(found, tuple) else (len(found), "\n".join(found))
        )
        is_over = figure > limit
        print(f"{figure:6} of {limit:6}  {what}{': TOO MUCH' if is_over else ''}")
        for line in wrong.splitlines() if is_over else ():
            print(f"{'':18}{line}")
        status |= is_over
    return status


if __name__ == "__main__":
    sys.exit(main())
