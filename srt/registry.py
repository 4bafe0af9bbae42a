"""Shared: names of things that are imported only when they are wanted. Imports nothing of ours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


class UnknownName(LookupError):
    """The message says what was asked for and what there is."""


class Registry:
    """A lazy table: name -> "module:attribute". Nothing is imported before `load`."""

    def __init__(self, kind: str, targets: Mapping[str, str]):
        self._kind = kind
        self._targets = dict(targets)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._targets))

    def load(self, name: str) -> Any:
        """The attribute behind `name`. Raises UnknownName."""
        target = self._targets.get(name)
        if target is None:
            raise UnknownName(f"unknown {self._kind} {name!r}; supported are {', '.join(self.names)}")
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)
