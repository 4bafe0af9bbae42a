"""The project's own modules as the rules of the house see them: dotted name, path and syntax tree."""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("srt", "radix", "detokenizer", "launch")


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), str(self.path))

    def at(self, node: ast.AST) -> str:
        return f"{self.path.name}:{node.lineno}"


def modules(root: Path = ROOT) -> list[Module]:
    """Every module under `root` that the server is made of; tests and examples are not."""
    found = []
    for package in PACKAGES:
        for path in sorted([*(root / package).rglob("*.py"), *root.glob(f"{package}.py")]):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found.append(Module(name, path))
    return found


def scripts(root: Path = ROOT) -> list[Module]:
    """All Python files that are the project's, tests and examples included."""
    others = [path for folder in ("tests", "examples") for path in sorted((root / folder).rglob("*.py"))]
    return modules(root) + [Module(path.stem, path) for path in others]
