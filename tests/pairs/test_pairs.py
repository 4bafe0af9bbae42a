"""Features in pairs on one request, against the reference and the oracle of each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import tiny_chat
from pairs.circumstances import BASE, Ranks
from pairs.local_server import LocalServer
from pairs.matrix import DOC, TRIALS, Pair, ask_for, page
from pairs.reference import Ask, Reference
from pairs.routes import REFUSED, ROUTES, TOOL
from pairs.trial import Trial
from server.server_harness import Client, running

from srt.transport import Endpoints

QUICK = {
    ("grammar", "n > 1"): "completions",
    ("tools", "streaming"): "chat",
    ("seed", "penalties"): "chat",
    ("min_tokens", "stop strings"): "generate",
    ("logit_bias", "logprobs"): "completions",
    ("prompt logprobs", "cache hit"): "generate",
    ("chunked prefill", "page size 16"): "generate",
    ("abort", "overlap off"): "chat",
}
"""Tried in every run, each over one route. All others take minutes."""

TINY = ("--dtype", "float32", "--tool-call-parser", "hermes", *BASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-chat")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_chat.make(folder)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(model: Any) -> Reference:
    return Reference(model)


class Servers:
    """One at a time. In this process, unless there are several ranks."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder, self._model = folder, model
        self._flags: tuple[str, ...] | None = None
        self._stack = contextlib.ExitStack()

    def with_flags(self, *flags: str) -> Client:
        if flags != self._flags:
            self.close()
            self._flags, everything = flags, ("--model-path", str(self._folder), *TINY, *flags)
            if Ranks.flags[0] in flags:
                server: Any = running(*everything)
            else:
                pipes = Endpoints(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-")))
                server = LocalServer(everything, self._model.state_dict(), pipes)
            self._server = self._stack.enter_context(server)
        return self._server

    def close(self) -> None:
        self._flags = None
        self._stack.close()


@pytest.fixture(scope="module")
def servers(folder: Path, model: Any) -> Iterator[Servers]:
    servers = Servers(folder, model)
    yield servers
    servers.close()


def trials() -> Iterator[Any]:
    assert {*QUICK.items()} <= {(pair.names, route.name) for pair, route in TRIALS}
    for pair, route in sorted(TRIALS, key=lambda trial: trial[0].flags):
        marks = () if QUICK.get(pair.names) == route.name else pytest.mark.slow
        yield pytest.param(pair, route, id=f"{pair}, {route.name}", marks=marks)


@pytest.mark.parametrize(("pair", "route"), list(trials()))
def test_pair(servers: Servers, reference: Reference, pair: Pair, route: Any) -> None:
    features = [pair.one(), pair.other()]
    Trial(servers.with_flags(*pair.flags), route, features, ask_for(pair, features, reference), reference).run()


def test_what_has_no_meaning_is_refused(servers: Servers) -> None:
    server, ask = servers.with_flags(), Ask("Hello.")
    for route in ROUTES:
        for name in route.lacks:
            assert server.post(route.path, {**route.body(ask), name: [TOOL]}).status == 400
    wishes = {"prompt logprobs": {"prompt_logprobs": 1}, "streaming": {"stream": True}}
    for route_name, *names in REFUSED:
        (route,) = (route for route in ROUTES if route.name == route_name)
        together = replace(ask, **{key: value for name in names for key, value in wishes[name].items()})
        assert server.post(route.path, route.body(together)).status == 400
        for name in names:
            assert server.post(route.path, route.body(replace(ask, **wishes[name]))).status == 200
    chat = ROUTES[-1].body(replace(ask, tools=True, regex="a"))
    assert server.post(ROUTES[-1].path, {**chat, "tool_choice": "required"}).status == 400


def test_the_page_in_the_docs_says_what_is_tried() -> None:
    assert DOC.read_text() == page()
