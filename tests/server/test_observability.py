"""What the real processes tell of themselves: where requests' time goes, metrics, the tree, stacks."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from server_harness import PATIENCE, Server, running, wait_until

from srt.observe.anatomy import Client, Sample, measure
from srt.observe.timeline import NAMES

ALWAYS = ("parse", "tokenize", "dispatch", "transit", "queue", "prefill", "decode", "release", "detokenize", "write")
"""What takes time in every request with words for a prompt and more than one token for an answer."""


def check(sample: Sample) -> None:
    assert list(sample.stretches) == list(NAMES)
    assert min(sample.stretches.values()) >= 0
    assert all(sample.stretches[name] > 0 for name in ALWAYS), sample
    assert sample.wire > 0


def observations(server: Server) -> dict[str, int]:
    page = server.get("/metrics").body.decode()
    return {name: int(count) for name, count in re.findall(r"^(\S+_count\{\S*\}) (\d+)$", page, re.MULTILINE)}


@pytest.mark.parametrize("stream", [False, True])
def test_every_stretch_is_measured(server: Server, stream: bool) -> None:
    client = Client(f"http://127.0.0.1:{server.port}", None)
    before = observations(server)
    check(*measure([client], 20, 2, stream, 1))
    assert {name: count - before[name] for name, count in observations(server).items()} == dict.fromkeys(before, 1)


def test_the_tree_is_shown(server: Server) -> None:
    server.generate("The tree of all that was said before", 4)
    (engine,) = server.get("/page/data").json["engines"]
    nodes = engine["tree"]["nodes"]
    assert sum(tokens for _, tokens, _, _ in nodes) >= 8
    assert all(parent < place for place, (parent, *_) in enumerate(nodes))


@pytest.mark.parametrize("title", ["main", "scheduler 0", "detokenizer"])
def test_a_signal_shows_where_a_process_is_and_it_goes_on(server: Server, title: str) -> None:
    said = {"main": "main: 0 requests", "scheduler 0": "pool_total", "detokenizer": "detokenizer: 0 texts open"}[title]
    os.kill(server.pid_of(title), signal.SIGUSR1)
    wait_until(lambda: "most recent call first" in server.log and said in server.log, PATIENCE, lambda: server.log)
    server.generate("Still there", 2)


def test_a_profile_leaves_its_trace_and_nothing_else(server: Server, tmp_path: Path) -> None:
    assert server.post("/start_profile", {"output_dir": str(tmp_path), "num_steps": 2}).status == 200
    server.generate("Where is the time", 4)
    wait_until(lambda: any(tmp_path.glob("*.trace.json.gz")), PATIENCE, lambda: server.log)
    assert [name for name in server.leftovers() if not name.startswith("lockstep-")] == []


@pytest.mark.slow
def test_a_log_for_machines_is_objects_alone(small_model: str) -> None:
    flags = ("--model-path", small_model, "--load-format", "dummy", "--log-format", "json")
    with running(*flags) as server:
        server.generate("Say something", 2)
        for line in server.log.splitlines():
            assert json.loads(line)["process"] in ("main", "scheduler 0", "detokenizer")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_stretches_add_up_and_each_request_is_observed_once(small_model: str, ranks: int) -> None:
    """Alone and sixteen at a time, streamed and not: 200 requests in all, over both numbers of ranks."""
    flags = ("--model-path", small_model, "--load-format", "dummy", "--random-seed", "1", "--tp-size", str(ranks))
    with running(*flags, "--metrics-names", "lockstep,sglang,vllm") as server:
        adding_up, samples = 0, []
        for stream in (False, True):
            for concurrency, repeats in ((1, 18), (16, 2)):
                clients = [Client(f"http://127.0.0.1:{server.port}", None) for _ in range(concurrency)]
                some = measure(clients, 30, 100, stream, repeats)
                for sample in some:
                    check(sample)
                adding_up += sum(sample.adds_up for sample in some)
                samples += some
        print(f"{ranks} ranks: {adding_up} of {len(samples)} add up")
        before = observations(server)
        for number in range(100):
            measure([Client(f"http://127.0.0.1:{server.port}", None)], 5, 2, number % 2 == 0, 1)
            after = observations(server)
            assert {name: count - before[name] for name, count in after.items()} == dict.fromkeys(after, 1)
            before = after
