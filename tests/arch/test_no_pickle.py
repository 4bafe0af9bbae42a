"""Nothing that arrives may become code: no pickle, no eval, no shell; nor what uses one of them out of sight."""

import ast

import pytest
from source_tree import scripts

UNSAFE_MODULES = (
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
)
UNSAFE_BUILTINS = ("eval", "exec", "compile", "__import__")
UNSAFE_ATTRIBUTES = (
    *("send_pyobj", "recv_pyobj"),  # pickle, in pyzmq; below, in torch.distributed
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
UNSAFE_CALLS = (
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "asyncio.create_subprocess_shell",
    "jinja2.Environment",
)
UNSAFE_ARGUMENTS = (("shell", True), ("allow_pickle", True), ("weights_only", False))


def faults(tree):
    for node in ast.walk(tree):
        if what := fault(node):
            yield node.lineno, what


def fault(node):
    match node:
        case ast.Import(names=names):
            return next((f"imports {a.name}" for a in names if a.name.partition(".")[0] in UNSAFE_MODULES), None)
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNSAFE_MODULES:
            return f"imports from {module}"
        case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_BUILTINS:
            return f"calls {name}()"
        case ast.Call(func=function) if (name := ast.unparse(function)) in UNSAFE_CALLS:
            return f"calls {name}()"
        case ast.Call(func=function, keywords=keywords) if ast.unparse(function) == "torch.load":
            safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in keywords)
            return None if safe else "torch.load without weights_only=True"
        case ast.Attribute(attr=name) if name in UNSAFE_ATTRIBUTES:
            return f"uses {name}"
        case ast.keyword(arg=str(arg), value=ast.Constant(value=value)) if (arg, value) in UNSAFE_ARGUMENTS:
            return f"{arg}={value}"
        case _:
            return None


def test_nothing_runs_what_it_is_sent():
    bad = [f"{module.path}:{line} {what}" for module in scripts() for line, what in faults(module.tree)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.shared_memory import SharedMemory",
        "def f():\n    import torch, dill",
        "eval('1')",
        "exec(code)",
        "subprocess.run(command, shell=True)",
        "os.system('true')",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "socket.send_pyobj(3)",
        "dist.broadcast_object_list(things)",
        "jinja2.Environment()",
    ],
)
def test_planted_faults_are_found(source):
    assert len(list(faults(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile('a')", "torch.compile(f)", "run(x, shell=False)", "torch.load(x, weights_only=True)"],
)
def test_what_is_safe_passes(source):
    assert list(faults(ast.parse(source))) == []
