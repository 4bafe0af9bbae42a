"""Every module says what it is: its docstring begins with its layer and process."""

import ast
import re

from source_tree import modules

BEGINNING = re.compile(r"(L[1-5]|Shared|The door|Lockstep's)\b.*[.:]", re.DOTALL)


def test_each_module_begins_with_its_layer_and_process():
    bad = []
    for module in modules():
        docstring = ast.get_docstring(module.tree) or ""
        if module.path.stat().st_size and not BEGINNING.match(docstring):
            bad.append(f"{module.name}: {docstring.partition(chr(10))[0] or 'no docstring'}")
    assert not bad, "\n".join(bad)
