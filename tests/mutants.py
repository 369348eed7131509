"""Mutation testing: small changes of the methods and of what they stand on, each of which must make a test fail.

``make mutants`` runs it. A mutant changes one node of a function's syntax tree: an operator, a constant, a comparison,
a dropped term or statement, swapped arguments. Which of them are tried is fixed by a hash of the function's name, the
kind of change and its position in the function, so a rename elsewhere changes nothing. ``mutants.toml`` explains those
that no test can see.

Everything is imported and all tests are collected once. A first run notes which test reaches which statement; then
every mutant has a forked process, in which the function gets its changed code and the tests that reach the change run,
the fastest first, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import gc
import hashlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "fedcc"
FILES = (
    "methods/*.py",
    "losses.py",
    "gradients.py",
    "core/method.py",
    "core/model.py",
    "core/step.py",
    "engine/adam.py",
    "engine/plain.py",
)
RELEVANT = re.compile(r"^from (fedcc\.(methods|losses|gradients|core|engine)|tiny|steps|recording)\b", re.MULTILINE)
"""What a test file imports that may reach a mutant ..."""
IRRELEVANT = re.compile(
    r"^from (program|federation|fuzz|launches|fedcc\.(cli|flower|report|experiments))\b|def \w+\(device\b", re.MULTILINE
)
"""... and what it has if it is about something else."""
RELEVANT_TOO = {"test_readings.py", "test_versions.py"}  # of methods, with records and runs besides
SLOW = {"test_engines.py", "test_digits_oracles.py", "test_cuda.py"}  # what they reach, faster tests reach too

SHARE = 0.14  # of all mutants that are tried
SEED = 17
BUDGET = 0.08  # of the CPU time of all tests, for one mutant: a busy machine slows down both
LIMIT = 120  # seconds of CPU time; a mutant that never ends is a dead one

Place = tuple[str, int]
"""A statement: file and line."""


@dataclass(eq=False)
class Mutant:
    """One change: in a list or field of a syntax tree, another node."""

    file: str
    function: str  # its qualified name
    kind: str
    number: int  # among those of the same kind in the function
    place: Place
    old: str
    new: str
    tree: ast.Module = field(repr=False)
    parent: ast.AST = field(repr=False)
    name: str = field(repr=False)  # of the parent's field
    index: int | None = field(repr=False)  # in that field, if it is a list
    node: Any = field(repr=False)

    @property
    def chance(self) -> float:
        """A number from 0 to 1 that depends on the function's name, the kind and the position alone."""
        text = f"{SEED} {self.function} {self.kind} {self.number}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12

    @property
    def change(self) -> str:
        return f"{self.old} -> {self.new}"

    def __str__(self) -> str:
        return f"{self.file}:{self.place[1]} {self.function}: {self.change}"

    def compiled(self) -> CodeType:
        """The code of the outermost function around the change."""
        with self.applied():
            return codes(compile(self.tree, str(SOURCE / self.file), "exec"))[self.function]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The tree with the change, for a while."""
        holder = getattr(self.parent, self.name)
        before = holder if self.index is None else holder[self.index]
        self._put(self.node)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, node: Any) -> None:
        if self.index is None:
            setattr(self.parent, self.name, node)
        else:
            getattr(self.parent, self.name)[self.index] = node


# -- which changes there are

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
VIEWS = {"items", "keys", "values"}  # without them the code would fail at once


def variants(node: ast.AST, parent: ast.AST, name: str) -> Iterator[tuple[str, Any]]:
    """What may stand in a node's place: the kind of change, and the other node."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield "operator", ast.BinOp(left, SWAPS[type(op)](), right)
            yield "left", left
            yield "right", right
        case ast.BoolOp(op, [first, *others]):
            yield "operator", ast.BoolOp(SWAPS[type(op)](), node.values)
            yield "first", first
            yield "others", others[0] if len(others) == 1 else ast.BoolOp(op, others)
        case ast.Compare(left, [op], right) if type(op) in SWAPS:
            yield "comparison", ast.Compare(left, [SWAPS[type(op)]()], right)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(n))):  # -1 is a constant
            yield "constant", ast.Constant(1 - n)
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield "sign", operand
        case ast.Constant(bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.Constant(str(value)) if isinstance(parent, ast.Call) and name == "args":
            yield "text", ast.Constant(f"{value}x")
        case ast.IfExp(test, body, orelse):
            yield "branches", ast.IfExp(test, orelse, body)
        case ast.Slice(lower, upper, step):
            if lower:
                yield "lower", ast.Slice(None, upper, step)
            if upper:
                yield "upper", ast.Slice(lower, None, step)
        case ast.comprehension(target, iterable, [_, *conditions], is_async):
            yield "condition", ast.comprehension(target, iterable, conditions, is_async)
        case ast.If(test, body, orelse):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):  # these have a change of their own
                yield "negation", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
            yield "statement", orelse or ast.Pass()
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign():
            yield "statement", ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.Call(function, arguments, keywords):
            match arguments:
                case [first, second, *others] if not any(isinstance(a, ast.Starred) for a in arguments):
                    yield "arguments", ast.Call(function, [second, first, *others], keywords)
            for i, keyword in enumerate(keywords):
                if keyword.arg not in (None, "strict"):
                    yield f"keyword {i}", ast.Call(function, arguments, [*keywords[:i], *keywords[i + 1 :]])
            if isinstance(function, ast.Attribute) and function.attr not in VIEWS and not arguments and not keywords:
                yield "call", function.value


SKIPPED = {"annotation", "returns", "decorator_list", "args", "type_comment"}
"""Fields without changes: types, decorators, and default values, which belong to a function and not to its code."""


def sites(node: ast.AST, line: int) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, int]]:
    """Every node below one, with the place where it is held and the line of its statement."""
    for name, value in ast.iter_fields(node):
        if name in SKIPPED and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of zip: a check
            inner = child.lineno if isinstance(child, ast.stmt) else line
            yield node, name, index, child, inner
            if not (isinstance(child, ast.UnaryOp) and isinstance(child.operand, ast.Constant)):
                yield from sites(child, inner)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child


def mutants_of(text: str, file: str = "") -> list[Mutant]:
    """All mutants of a module's functions.

    >>> [m.change for m in mutants_of("def f(x, y):\\n    return x - y")]
    ['x - y -> x + y', 'x - y -> x', 'x - y -> y']
    """
    tree, found = ast.parse(text), list[Mutant]()
    for function, node in functions(tree):
        numbers, texts = Counter[str](), Counter[str]()
        for parent, name, index, child, line in sites(node, node.lineno):
            for kind, other in variants(child, parent, name):
                numbers[kind] += 1
                old = shown(child)
                new = shown(other) if not isinstance(other, list) else "; ".join(map(shown, other))
                texts[f"{old} -> {new}"] += 1
                if (again := texts[f"{old} -> {new}"]) > 1:
                    new += f" (no. {again})"
                place = (file, line)
                if isinstance(other, list):
                    other = other[0] if len(other) == 1 else ast.If(ast.Constant(True), other, [])
                other = ast.fix_missing_locations(ast.copy_location(copy.deepcopy(other), child))
                found.append(
                    Mutant(file, function, kind, numbers[kind], place, old, new, tree, parent, name, index, other)
                )
    return found


def shown(node: ast.AST) -> str:
    """A node in one line; of a statement with a body only its head."""
    text = ast.unparse(node).strip()
    lines = text.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


def codes(code: CodeType) -> dict[str, CodeType]:
    """The code of a compiled module's functions and of its classes' methods, by qualified name."""
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= {inner.co_qualname: inner} | (codes(inner) if inner.co_flags & 0x2 == 0 else {})
    return found


def all_mutants() -> list[Mutant]:
    paths = sorted({path for pattern in FILES for path in SOURCE.glob(pattern)})
    return [m for path in paths for m in mutants_of(path.read_text(), str(path.relative_to(SOURCE)))]


def sample(mutants: Sequence[Mutant], share: float = SHARE) -> list[Mutant]:
    """Those that are tried; a smaller share is a part of a larger one."""
    return [m for m in mutants if m.chance < share]


def explanations() -> dict[tuple[str, str, str], str]:
    """Why a mutant changes nothing that a test could see: by file, function and change."""
    text = (TESTS / "mutants.toml").read_text()
    return {
        (file, function, change): reason
        for file, inside in tomllib.loads(text).items()
        for function, changes in inside.items()
        for change, reason in changes.items()
    }


# -- what the tests say


def live_functions(files: set[str]) -> dict[tuple[str, str], list[FunctionType]]:
    """The function objects of these files that are in use, by file and qualified name."""
    found = defaultdict[tuple[str, str], list[FunctionType]](list)
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename in files:
            file = str(Path(thing.__code__.co_filename).relative_to(SOURCE))
            found[file, thing.__code__.co_qualname].append(thing)
    return found


class Instrument(ast.NodeTransformer):
    """Says before every statement that it is reached."""

    def __init__(self, file: str):
        self.file = file

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            call = ast.Call(
                ast.Name("__reached__", ast.Load()), [ast.Constant(self.file), ast.Constant(node.lineno)], []
            )
            return [ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node)), node]
        return node


class Runner:
    """The plugin that replaces pytest's loop over tests by a loop over mutants."""

    def __init__(self, mutants: list[Mutant], jobs: int, folder: Path):
        self.mutants, self.jobs, self.folder = mutants, jobs, folder
        self.failed = ""
        self.ends: dict[Mutant, tuple[str, str]] = {}  # how each ended, and by which test
        self.seconds: dict[str, float] = {}
        self.reach: dict[Place, list[str]] = {}
        self.killers: dict[str, list[str]] = defaultdict(list)  # by function: tests that killed a mutant of it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.live = live_functions({str(SOURCE / m.file) for m in self.mutants})
        gc.freeze()
        begun = time.monotonic()
        if self.baseline():
            say(f"without any mutant {len(self.seconds)} tests pass ({time.monotonic() - begun:.0f} s)")
            self.run_all()
        return True

    # -- in forked processes

    def run(self, names: Sequence[str]) -> str:
        """Run these tests; the name of the first that fails."""
        for i, name in enumerate(names):
            following = self.items[names[i + 1]] if i + 1 < len(names) else None
            item = self.items[name]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return self.failed
        return ""

    def observe(self, names: Sequence[str]) -> dict[str, Any]:
        """Which statements each test reaches, and how long it takes."""
        for file, tree in {m.file: copy.deepcopy(m.tree) for m in self.mutants}.items():
            for _, node in functions(tree):
                node.body = [Instrument(file).visit(n) for n in node.body]
                node.body = [n for entry in node.body for n in (entry if isinstance(entry, list) else [entry])]
            for name, code in codes(compile(tree, str(SOURCE / file), "exec")).items():
                for function in self.live.get((file, name), []):
                    function.__code__ = code
        reached: set[Place] = set()
        builtins.__reached__ = lambda file, line: reached.add((file, line))  # type: ignore[attr-defined]
        notes = {}
        for name in names:
            begun = time.process_time()
            reached.clear()
            if failed := self.run([name]):
                return {"failed": failed}
            notes[name] = [time.process_time() - begun, sorted(reached)]
        return {"notes": notes}

    def attempt(self, mutant: Mutant, names: Sequence[str]) -> dict[str, Any]:
        try:
            code = mutant.compiled()
            functions = self.live[mutant.file, mutant.function]
            if not functions:
                return {"broken": "no such function is in use"}
            if all(same_code(code, function.__code__) for function in functions):
                return {"same": True}
            for function in functions:
                function.__code__ = code
        except (SyntaxError, ValueError) as error:
            return {"broken": str(error)}
        return {"failed": self.run(names)}

    def fork(self, work: Any, *arguments: Any) -> int:
        """Do some work in a process of its own, which writes the answer to a file."""
        sys.stdout.flush()
        if process := os.fork():
            return process
        answer: dict[str, Any] = {"broken": "it ended early"}
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5) if work == self.attempt else (-1, -1))
            with (self.folder / f"{os.getpid()}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            answer = work(*arguments)
        except BaseException:
            answer = {"broken": traceback.format_exc()[-2000:]}
        finally:
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(answer))
            os._exit(0)

    def wait(self) -> tuple[int, dict[str, Any]]:
        """Wait for a process: its number and its answer."""
        process, status = os.wait()
        path = self.folder / f"{process}.json"
        if os.WIFSIGNALED(status):
            return process, {"failed": f"ended by {signal.Signals(os.WTERMSIG(status)).name}"}
        return process, json.loads(path.read_text()) if path.exists() else {"broken": "no answer"}

    # -- in the first process

    def baseline(self) -> bool:
        """Whether all tests pass without a mutant, and what they reach."""
        files = list(dict.fromkeys(name.partition("::")[0] for name in self.items))
        shares = [[n for n in self.items if n.partition("::")[0] in files[i :: self.jobs]] for i in range(self.jobs)]
        for names in shares:
            self.fork(self.observe, names)
        answers = [self.wait()[1] for _ in shares]
        for answer in answers:
            if "notes" not in answer:
                say(f"without any mutant a test fails: {answer}")
                for log in self.folder.glob("*.log"):
                    say(log.read_text()[-3000:])
                return False
            for name, (seconds, places) in answer["notes"].items():
                self.seconds[name] = seconds
                for file, line in places:
                    self.reach.setdefault((file, line), []).append(name)
        return True

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant: first those that have killed others of its function, then the fastest."""
        able = self.reach.get(mutant.place, [])
        order = sorted(able, key=lambda name: (name not in self.killers[mutant.function], self.seconds[name]))
        chosen, total, budget = [], 0.0, BUDGET * sum(self.seconds.values())
        for name in order:
            total += self.seconds[name]
            if total > budget and chosen:
                break
            chosen.append(name)
        return chosen

    def run_all(self) -> None:
        waiting, running, begun = list(self.mutants), dict[int, Mutant](), time.monotonic()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant = waiting.pop(0)
                running[self.fork(self.attempt, mutant, self.tests(mutant))] = mutant
            process, answer = self.wait()
            mutant = running.pop(process)
            if "failed" in answer:
                end = ("killed" if answer["failed"] else "alive", answer["failed"])
            else:
                end = ("same", "") if "same" in answer else ("broken", answer["broken"])
            self.ends[mutant] = end
            if answer.get("failed") in self.items:
                self.killers[mutant.function].append(answer["failed"])
            left = (time.monotonic() - begun) / len(self.ends) * len(waiting)
            say(f"{len(self.ends):4}/{len(self.mutants)} {end[0]:6} {mutant}  <- {end[1]}  {left:.0f} s left")


def same_code(a: CodeType, b: CodeType) -> bool:
    return a.co_code == b.co_code and a.co_consts == b.co_consts and a.co_names == b.co_names


def test_files(kind: str) -> list[Path]:
    texts = {path: path.read_text() for path in sorted((TESTS / kind).glob("test_*.py"))}
    return [
        path
        for path, text in texts.items()
        if (RELEVANT.search(text) and not IRRELEVANT.search(text) and path.name not in SLOW)
        or path.name in RELEVANT_TOO
    ]


def say(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def report(ends: dict[Mutant, tuple[str, str]], explained: dict[tuple[str, str, str], str], whole: bool = True) -> int:
    """The table by file; 1 if a mutant is alive and not explained, or explained and dead or not there.

    A mutant whose explanation begins with "Open" lacks a test; it may die.
    """
    counts = defaultdict[str, Counter[str]](Counter)
    wrong = []
    for mutant, (end, test) in ends.items():
        reason = explained.get((mutant.file, mutant.function, mutant.change))
        if end == "same":
            continue  # Python compiles it to the same code
        word = "explained" if reason and end == "alive" else end
        counts[mutant.file].update([word, "all"])
        if word in ("alive", "broken") or (reason and end == "killed" and not reason.startswith("Open")):
            wrong.append(f"{'explained, yet killed' if reason else word}: {mutant}  {test}")
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"\n{'file':<24} | mutants | killed | explained")
    for name, count in [*sorted(counts.items()), ("all", total)]:
        print(f"{name:<24} | {count['all']:7} | {count['killed']:6} | {count['explained']:9}")
    there = {(m.file, m.function, m.change) for m in ends}
    wrong += [f"explained, but not in the sample: {key}" for key in explained if whole and key not in there]
    for line in wrong:
        print(line)
    return int(bool(wrong) or not total)


def main() -> int:
    parser = argparse.ArgumentParser(description="Change the source a little; some test must fail.")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="mutants whose file, function or change contains this")
    parser.add_argument("--share", type=float, default=SHARE, help="of all mutants, how many; 1 for all of them")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    options = parser.parse_args()

    mutants = all_mutants()
    mutants = [m for m in sample(mutants, options.share) if options.only in str(m)]
    if options.list:
        for mutant in mutants:
            print(mutant)
        print(f"{len(mutants)} mutants")
        return 0

    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(SOURCE.parent), str(TESTS)]
    import hypothesis
    import torch

    import fedcc

    assert Path(fedcc.__file__).is_relative_to(SOURCE), f"another fedcc is imported: {fedcc.__file__}"
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", derandomize=True, max_examples=25, deadline=None, database=None)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(mutants, options.jobs, Path(folder))
        tests = [str(path) for kind in ("unit", "property", "contract") for path in test_files(kind)]
        quiet = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--no-summary"]
        chosen = ["-m", "not slow", "--hypothesis-profile=mutants", f"--basetemp={folder}/temp"]
        status = int(pytest.main([*quiet, *chosen, *tests], plugins=[runner]))
        if status not in (0, 5) or not runner.ends:
            print("the tests could not be run")
            return 1
        status = report(runner.ends, explanations(), whole=not options.only and options.share == SHARE)
    print(f"{time.monotonic() - begun:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
