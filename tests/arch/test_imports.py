"""Who may import whom: read from the source, and seen in fresh interpreters."""

import ast
import re
import subprocess
import sys

import pytest
from source_tree import PACKAGES, ROOT, Module, modules

# Room: the rooms it may import, beside itself. A module lives in the room with the longest name that is a prefix of its
# own; a room in the list stands for all that lives in it.
ROOMS = {
    "radix": "",
    "detokenizer": "srt.messages srt.process srt.transport srt.token_bytes",
    "launch": """
        srt.config srt.process srt.model_files srt.model_config srt.hardware srt.transport srt.listeners srt.replica
        srt.nodes srt.rank_node srt.watchdog srt.cluster srt.frontend srt.tls srt.observe srt.chat_template
        """,
    "srt": "",
    "srt.engine": "launch srt.config srt.frontend srt.messages srt.observe",
    "srt.messages": "",
    "srt.config": "",
    "srt.registry": "",
    "srt.limits": "",
    "srt.model_config": "",
    "srt.board": "",
    "srt.watchdog": "srt.board",
    "srt.replica": "srt.config srt.board srt.model_files srt.process srt.transport srt.watchdog",
    "srt.board_relay": "srt.board srt.config srt.process srt.transport",
    "srt.nodes": "srt.config srt.transport",
    "srt.rank_node": """
        srt.board srt.config srt.model_files srt.nodes srt.process srt.replica srt.transport srt.watchdog
        """,
    "srt.rendezvous": "srt.config",
    "srt.listeners": "srt.config srt.transport",
    "srt.hardware": "",
    "srt.tls": "srt.config",
    "srt.transport": "",
    "srt.schema_values": "",
    "srt.schema_rules": "srt.schema_values",
    "srt.observe": "srt.messages",
    "srt.process": "srt.observe srt.config srt.model_config srt.transport",
    "srt.gguf_files": "srt.model_config",
    "srt.gguf_tokenizer": "srt.model_config",
    "srt.sentencepiece_conversion": "",
    "srt.gguf_folder": "srt.model_config srt.gguf_files srt.gguf_tokenizer",
    "srt.weight_names": "srt.model_config",
    "srt.model_files": """
        srt.model_config srt.gguf_files srt.gguf_tokenizer srt.gguf_folder srt.weight_names
        """,
    "srt.tokenization": "srt.model_config srt.model_files srt.token_bytes",
    "srt.token_bytes": "srt.model_config",
    "srt.chat_template": "srt.model_config srt.model_files",
    "srt.frontend": """
        srt.constrained.llguidance_backend srt.constrained.probe
        srt.messages srt.config srt.limits srt.transport srt.board srt.tokenization srt.token_bytes srt.chat_template
        srt.schema_rules srt.model_config srt.model_files srt.tls srt.observe srt
        """,
    "srt.frontend.http_worker": """
        srt.frontend srt.board srt.cluster srt.messages srt.model_files srt.process srt.transport
        """,
    "srt.scheduler.schedule_batch": "srt.messages",
    "srt.scheduler.intake": "srt.messages srt.transport",
    "srt.scheduler.outlet": "srt.scheduler srt.messages srt.board srt.transport",
    "srt.scheduler.inbox_log": """
        srt.scheduler srt.scheduler.schedule_batch srt.scheduler.outlet srt.messages srt.board srt.config
        """,
    "srt.scheduler": "srt.scheduler.schedule_batch radix srt.messages srt.board",
    "srt.scheduler.process": """
        srt.scheduler srt.scheduler.intake srt.scheduler.outlet srt.scheduler.inbox_log srt.executor srt.models
        srt.constrained srt.tokenization srt.cluster srt.parallel srt.rendezvous srt.config srt.model_config
        srt.model_files srt.token_bytes srt.board srt.board_relay srt.transport srt.process
        """,
    "srt.parallel": "srt.config srt.kernels",
    "srt.kernels": "",
    "srt.layers": "srt.parallel srt.kernels srt.model_config",
    "srt.models": "srt.layers srt.parallel srt.registry srt.model_config srt.weight_names",
    "srt.executor": """
        srt.scheduler.schedule_batch srt.messages srt.config srt.model_config srt.model_files srt.gguf_files
        srt.weight_names srt.models srt.layers srt.kernels srt.parallel
        """,
    "srt.constrained.backend": "",
    "srt.constrained.llguidance_backend": "srt.schema_rules srt.token_bytes",
    "srt.constrained.xgrammar_backend": "srt.schema_rules srt.token_bytes",
    "srt.constrained.probe": "srt.constrained.xgrammar_backend srt.schema_rules srt.token_bytes",
    "srt.constrained": """
        srt.constrained.backend srt.constrained.llguidance_backend srt.constrained.xgrammar_backend
        srt.scheduler.schedule_batch srt.messages srt.registry srt.schema_rules srt.token_bytes
        """,
    "srt.cluster": "radix srt.messages srt.config",
}
ROOMS = {room: allowed.split() for room, allowed in ROOMS.items()}

HEAVY = ("torch", "triton", "flashinfer", "transformers", "xgrammar")
HEAVY_ROOMS = (
    *("srt.scheduler.process", "srt.executor", "srt.models", "srt.layers", "srt.kernels", "srt.parallel"),
    *("srt.rendezvous", "srt.constrained.xgrammar_backend", "srt.sentencepiece_conversion"),
)
"""The only rooms that may load what is heavy; the others' processes start in a blink and are tested without it."""

DOORS = {
    "launch": [*HEAVY, "aiohttp", "srt.frontend", "srt.scheduler", "detokenizer", "radix"],
    "srt.engine": [*HEAVY, "srt.scheduler", "srt.executor", "detokenizer", "radix"],
    "srt.frontend.app": [*HEAVY, "srt.scheduler", "srt.executor", "detokenizer", "radix"],
    "detokenizer.process": [*HEAVY, "aiohttp", "numpy", "srt.frontend", "srt.scheduler", "srt.executor", "radix"],
    "srt.scheduler.scheduler": [*HEAVY, "aiohttp", "tokenizers", "zmq", "srt.frontend", "srt.executor", "detokenizer"],
    "radix": [*HEAVY, "aiohttp", "msgspec", "zmq", "srt"],
}
"""Each process's door, and what must not be loaded once it is imported."""

DOOR_STRING = re.compile(rf"^((?:{'|'.join(PACKAGES)})(?:\.\w+)*):\w+$")


def room_of(name):
    return max((room for room in ROOMS if is_inside(name, room)), key=len, default=None)


def is_inside(name, room):
    return name == room or name.startswith(room + ".")


def imported(module, names):
    """(node, dotted name) of each import, wherever it stands. `names` are all modules of ours, to tell a submodule."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node, inner if inner in names else base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A "module:attr" string is an import that happens later. Only launch names doors that it may not import.
            match = DOOR_STRING.match(node.value)
            if match and module.name != "launch":
                yield node, match[1]


def violations(found):
    names = {module.name for module in found}
    bad = []
    for module in found:
        room = room_of(module.name)
        if room is None or (room == "srt" and module.name != "srt"):
            bad.append(f"{module.name} has no room: add it to ROOMS")
            continue
        for node, name in dict.fromkeys(imported(module, names)):
            top = name.partition(".")[0]
            if top in HEAVY and room not in HEAVY_ROOMS:
                bad.append(f"{module.at(node)}: {room} may not import {top}")
            if room == "radix" and top not in (*sys.stdlib_module_names, "numpy", "radix"):
                bad.append(f"{module.at(node)}: radix may import numpy and the standard library only, not {name}")
            elif top in PACKAGES and not may_import(room, name):
                bad.append(f"{module.at(node)}: {room} may not import {name}")
    return bad


def may_import(room, name):
    target = room_of(name)
    return target == room or target in ROOMS[room]


def test_modules_import_only_what_their_room_may():
    bad = violations(modules())
    assert not bad, "\n".join(bad)


def test_nothing_is_allowed_that_nobody_does():
    found = modules()
    names = {module.name for module in found}
    done = {(room_of(module.name), room_of(name)) for module in found for _, name in imported(module, names)}
    assert [(room, other) for room, allowed in ROOMS.items() for other in allowed if (room, other) not in done] == []


def test_every_room_is_there():
    names = {module.name for module in modules()}
    rooms = {*ROOMS, *(room for allowed in ROOMS.values() for room in allowed), *HEAVY_ROOMS}
    assert rooms <= {name[: len(room)] for name in names for room in rooms if is_inside(name, room)}


def test_the_table_has_no_cycle():
    done = []

    def visit(room, path):
        assert room not in path, f"cycle: {[*path, room]}"
        if room not in done:
            for target in ROOMS[room]:
                visit(target, [*path, room])
            done.append(room)

    for room in ROOMS:
        visit(room, [])


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("radix/tree.py", "import msgspec"),
        ("radix/tree.py", "from srt import messages"),
        ("detokenizer/x.py", "import radix"),
        ("detokenizer/x.py", "def f():\n    from srt.scheduler.scheduler import Scheduler"),
        ("srt/frontend/app.py", "try:\n    import json\nexcept ImportError:\n    import torch.nn"),
        ("srt/frontend/openai/chat.py", "from ...scheduler import scheduler"),
        ("srt/scheduler/planner.py", "from srt.scheduler import process"),
        ("srt/scheduler/planner.py", "from srt.executor.model_runner import ModelRunner"),
        ("srt/scheduler/planner.py", 'EXECUTORS = {"cpu": "srt.executor.model_runner:ModelRunner"}'),
        ("srt/executor/model_runner.py", "from srt.scheduler.request import Request"),
        ("srt/models/llama.py", "import srt.executor"),
        ("srt/messages.py", "import srt.config"),
        ("srt/newcomer.py", "import json"),
        ("launch.py", "import srt.scheduler.process"),
    ],
)
def test_planted_faults_are_found(tmp_path, place, source):
    others = ["srt/messages.py", "srt/scheduler/scheduler.py", "srt/scheduler/process.py"]
    for path in [*others, place]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source if path == place else "")
    assert len(violations(modules(tmp_path))) == 1


def test_what_is_allowed_is_not_reported(tmp_path):
    module = Module("srt.scheduler.process", tmp_path / "process.py")
    module.path.write_text("import torch\nfrom srt.executor import model_runner\nfrom . import planner")
    launch = Module("launch", tmp_path / "launch.py")
    launch.path.write_text('DOOR = "detokenizer.process:main"\ndef main():\n    from srt.frontend.app import run')
    assert violations([module, launch]) == []


# ---- fresh interpreters ---------------------------------------------------------------------------------------------

LOADED = "import sys; __import__(sys.argv[1]); print(*sys.modules, sep='\\n')"

EACH_ALONE = """
import importlib, os, sys
import aiohttp.web, jinja2.sandbox, msgspec, numpy, tokenizers, zmq
heavy, sys.pycache_prefix, *names = sys.argv[1:]
sys.dont_write_bytecode = False  # what one process compiles the others need not
for name in names:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
            loaded = [other for other in heavy.split(",") if other in sys.modules]
            if loaded:
                print(f"{name} loads {loaded}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def fresh_python(*args):
    return subprocess.run([sys.executable, "-c", *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("door", [door for door in DOORS if any(module.name == door for module in modules())])
def test_a_door_loads_nothing_that_is_not_its_own(door):
    process = fresh_python(LOADED, door)
    assert process.returncode == 0, process.stderr
    loaded = process.stdout.split()
    assert [name for name in loaded if any(is_inside(name, banned) for banned in DOORS[door])] == []


def test_each_light_module_can_be_imported_first(tmp_path):
    """In a process of its own, forked from an interpreter that has loaded nothing of ours."""
    light = [module.name for module in modules() if room_of(module.name) not in HEAVY_ROOMS]
    process = fresh_python(EACH_ALONE, ",".join(HEAVY), str(tmp_path), *light)
    assert process.returncode == 0, process.stderr
    assert not process.stdout, process.stdout
