"""Below the intake nothing may differ between two interpreters that hear the same: a lint over ledger and scheduler.

Ranks agree because each decision is a function of the inboxes and the sampled tokens. Clocks, randomness, the
environment, object identities and the order of a set are other inputs, so they may not occur; nor may a set be made at
all, since whoever holds one will iterate it some day.
"""

import ast

import pytest
from source_tree import modules

OUTSIDE = (
    "srt.scheduler.process",
    "srt.scheduler.intake",
    "srt.scheduler.outlet",
    "srt.scheduler.inbox_log",
    "srt.scheduler.stopwatch",
)
"""In the folder but not below the intake: the composition root, the intake with its clock, the outlet, which naps until
slower ranks have decided, the log, which writes to a file, and the stopwatch, which only dates what leaves."""

FOREIGN_MODULES = (
    *("asyncio", "concurrent", "multiprocessing", "select", "socket", "subprocess", "threading"),
    *(
        "datetime",
        "gc",
        "glob",
        "os",
        "pathlib",
        "platform",
        "random",
        "secrets",
        "tempfile",
        "time",
        "uuid",
        "weakref",
    ),
)
FOREIGN_CALLS = ("hash", "id", "input", "open", "globals", "locals", "vars")
SETS = ("set", "frozenset", "Set", "AbstractSet", "MutableSet", "FrozenSet")
SET_ARITHMETIC = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def faults(tree):
    """(line, what is wrong) of everything in a module that could make ranks differ."""
    for node in ast.walk(tree):
        if what := fault(node):
            yield node.lineno, what


def fault(node):
    match node:
        case ast.Import(names=names):
            return next((f"imports {a.name}" for a in names if a.name.partition(".")[0] in FOREIGN_MODULES), None)
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FOREIGN_MODULES:
            return f"imports from {module}"
        case ast.Call(func=ast.Name(id=name)) if name in FOREIGN_CALLS:
            return f"calls {name}()"
        case ast.Attribute(attr="random", value=ast.Name(id="np" | "numpy")):
            return "numpy's random numbers"
        case ast.Set() | ast.SetComp():
            return "makes a set"
        case ast.Name(id=name) if name in SETS:
            return f"uses {name}"
        case ast.BinOp(op=op, left=left, right=right) if isinstance(op, SET_ARITHMETIC) and (
            is_view(left) or is_view(right)
        ):
            return "makes a set of dict views"
        case _:
            return None


def is_view(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")


def zone():
    return [m for m in modules() if m.name.startswith(("radix", "srt.scheduler")) and m.name not in OUTSIDE]


def test_ledger_and_scheduler_depend_on_nothing_but_their_input():
    bad = [f"{module.name}:{line} {what}" for module in zone() for line, what in faults(module.tree)]
    assert not bad, "\n".join(bad)


def test_the_zone_is_there():
    assert {"radix.tree", "srt.scheduler.scheduler", "srt.scheduler.planner"} <= {module.name for module in zone()}


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import random as r",
        "import os.path",
        "from time import monotonic",
        "def f():\n    from uuid import uuid4",
        "key = hash(tokens)",
        "order = sorted(rows, key=lambda row: id(row))",
        "for row in {1, 2}: pass",
        "rows = {row for row in batch}",
        "rows = set(batch)",
        "rows: set[int] = f()",
        "def f(rows: frozenset[int]): pass",
        "both = a.keys() & b.keys()",
        "gone = a.keys() - b",
        "noise = np.random.rand(3)",
        "noise = numpy.random.default_rng(0)",
        "rows = list(map(set, batches))",
        "with open('/proc/loadavg') as file: pass",
    ],
)
def test_planted_faults_are_found(source):
    assert len(list(faults(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import hashlib\nimport numpy as np\nfrom collections import deque",
        "for key, value in table.items(): pass",
        "rows = {row: 1 for row in batch}",
        "digest = state.hash()\nrow.id = 3\nself.random_seed = 1\ninbox.now - request.time",
        "flags = a | b",
        "rows = dict.fromkeys(batch)",
    ],
)
def test_what_is_deterministic_passes(source):
    assert list(faults(ast.parse(source))) == []
