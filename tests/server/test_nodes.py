"""A group on two nodes, each a launch of its own: it answers as one rank does, and whatever befalls a node is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from faulty_ranks import ENVIRONMENT, SMALL
from rank_client import Client
from server_harness import PATIENCE, Server, Stopwatch, free_port, running, wait_until
from test_ranks import TIGHT, answers

ANSWER_SECONDS = 5.0  # from the last good token to the error


@pytest.fixture
def watch() -> Iterator[Stopwatch]:
    with Stopwatch() as watch:
        yield watch


@contextlib.contextmanager
def two_nodes(
    model: str,
    *flags: str,
    size: int = 2,
    fault: str = "nothing:0",
    device: str = "fake",
    host: str = "127.0.0.2",
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Server, Server]]:
    """Node 0, at `host`, and node 1, behind the command `prefix`, ready.

    They must end well unless the test has ended them, and leave nothing in any case.
    """
    address = f"{host}:{free_port()}"
    flags += ("--model-path", model, "--tp-size", str(size), "--nnodes", "2", "--dist-init-addr", address)
    env = {**ENVIRONMENT, "FAULT": fault, "DEVICE": device, **(env or {})}
    other = Server(*flags, "--node-rank", "1", module="faulty_ranks", env=env, prefix=prefix)
    zero = Server(*flags, "--node-rank", "0", module="faulty_ranks", env=env)
    nodes = (zero, other)
    try:
        zero.wait_ready()
        yield zero, other
        if zero.process.returncode is None:
            zero.stop()
        assert other.wait() == zero.process.returncode
        for node in nodes:
            node.assert_nothing_left(PATIENCE)
    finally:
        for node in nodes:
            node.dispose()


@contextlib.contextmanager
def cable() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A network of two hosts, of which the second is a namespace of this one.

    Gives this end's interface, its address, and a command that runs another one at the other end.
    """

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    name, end, address = f"ls{os.getpid()}", f"la{os.getpid()}", "10.231.77.1"
    try:
        ip(f"netns add {name}")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make network namespaces")
    try:
        ip(f"link add {end} type veth peer name eth0 netns {name}")
        ip(f"addr add {address}/30 dev {end}")
        ip(f"link set {end} up")
        ip(f"-n {name} addr add 10.231.77.2/30 dev eth0")
        ip(f"-n {name} link set eth0 up")
        ip(f"-n {name} link set lo up")
        yield end, address, ("ip", "netns", "exec", name)
        ip(f"link del {end}")
    finally:
        ip(f"netns del {name}")


def start_clients(server: Server, watch: Stopwatch) -> list[Client]:
    """All of them hear tokens by now."""
    begin = watch.seconds
    clients = [Client(server, seed, watch) for seed in range(6)]
    wait_until(lambda: all(client.last_token > begin for client in clients), PATIENCE, lambda: server.log)
    return clients


def assert_told(clients: list[Client], server: Server, *words: str) -> None:
    """Within seconds, in one sentence that all clients and the log have; no wrong token has come before it."""
    for client in clients:
        client.join(PATIENCE)
        assert not client.is_alive(), "a client hangs"
        assert client.wrong is None
    told = [client for client in clients if all(word in client.error for word in words)]
    assert told, [client.error for client in clients]
    for client in told:
        assert client.error_time - client.last_token < ANSWER_SECONDS
    assert server.wait() == 1
    assert all(word in server.log for word in words)


def test_the_sudden_end_of_a_node_is_told(small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL) as (zero, other):
        assert "node 1 of 2: ranks 1 to 1 of 2, no HTTP" in other.log
        assert f"HTTP is on node 0: http://127.0.0.1:{zero.port}" in other.log
        clients = start_clients(zero, watch)
        wait_until(lambda: sum(client.answers for client in clients) > 6, PATIENCE, lambda: zero.log)
        ranks = zero.info()["ranks"]
        assert all(rank["heartbeat_age"] < 10 for rank in ranks)
        other.signal(signal.SIGKILL)
        assert_told(clients, zero, "node 1 (127.0.0.", "has closed its connection")
        other.process.wait()
        other.assert_nothing_left(PATIENCE)
        zero.assert_nothing_left(PATIENCE)
        other.process.returncode = 1  # which the harness expects of a node that was not killed


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_two_nodes_answer_as_one_rank(small_model: str, size: int) -> None:
    flags = ("--load-format", "dummy", "--random-seed", "1", "--dtype", "float32", *TIGHT)
    with running("--model-path", small_model, *flags) as one:
        expected = answers(one)
    with two_nodes(small_model, *flags, size=size, device="model") as (zero, _):
        assert answers(zero) == expected


@pytest.mark.slow
def test_ranks_of_two_nodes_agree_at_every_step(small_model: str, watch: Stopwatch) -> None:
    """Their clocks are hours apart, and one of them is slow now and then."""
    with two_nodes(small_model, *SMALL, size=4, env={"CHAOS": "1"}) as (zero, _):
        done = threading.Event()
        clients = [Client(zero, seed, watch, until=done, leaves=0.3) for seed in range(10)]
        while zero.info()["ranks"][0]["step"] < 3000:
            assert all(rank["heartbeat_age"] < 10 for rank in zero.info()["ranks"])
            time.sleep(0.05)
        done.set()
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive()
            assert not client.error
            assert client.wrong is None
        zero.wait_idle()
        wait_until(lambda: len({rank["digest"] for rank in zero.info()["ranks"]}) == 1, PATIENCE, lambda: zero.log)


FAULTS = {
    "token:1": ["scheduler 1", "disagree in step", "tokens"],
    "order:1": ["scheduler 1", "disagree in step", "rows"],
    "inbox:1": ["scheduler 1", "hangs behind step"],
    "stop:0": ["scheduler 0", "is stopped"],
    "stop:1": ["scheduler 1", "is stopped, in step", "on node 1"],
    "kill:0": ["scheduler 0", "was killed by SIGKILL"],
    "kill:1": ["scheduler 1", "was killed by SIGKILL, on node 1"],
    "hang:1": ["scheduler 1", "hangs in step"],
    "exception:0": ["scheduler 0 failed in step", "ZeroDivisionError: planted"],
    "exception:1": ["scheduler 1 failed in step", "ZeroDivisionError: planted"],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_either_node_is_told(fault: str, small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL, fault=fault) as (zero, other):
        clients = [Client(zero, seed, watch) for seed in range(6)]
        assert_told(clients, zero, *FAULTS[fault])
        assert other.wait() == 1
        assert all(word in other.log for word in FAULTS[fault][:1])
        assert "most recent call first" in other.log or fault != "hang:1"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["token:1", "stop:1", "kill:1", "rows:1"])
def test_a_fault_between_the_collectives_of_a_real_model(fault: str, small_model: str, watch: Stopwatch) -> None:
    words = {**FAULTS, "rows:1": ["scheduler 1 and scheduler 0 disagree in step", "rows"]}[fault]
    with two_nodes(small_model, *SMALL, fault=fault, device="model") as (zero, _):
        assert_told([Client(zero, seed, watch, checks=False) for seed in range(6)], zero, *words)


@pytest.mark.slow
def test_a_node_that_says_nothing_is_told(small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL) as (zero, other):
        clients = start_clients(zero, watch)
        os.kill(other.process.pid, signal.SIGSTOP)
        assert_told(clients, zero, "node 1 (127.0.0.", "has not been heard of for 2.5 s")
        os.kill(other.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_told(small_model: str, watch: Stopwatch) -> None:
    with (
        cable() as (interface, host, prefix),
        two_nodes(small_model, *SMALL, host=host, prefix=prefix) as (zero, other),
    ):
        clients = start_clients(zero, watch)
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
        assert_told(clients, zero, "node 1 (10.231.77.2) has not been heard of for 2.5 s")
        assert other.wait() == 1
        assert "node 0 (10.231.77.1) has not been heard of for 10 s" in other.log


@pytest.mark.slow
def test_a_node_ends_with_node_0(small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL) as (zero, other):
        zero.signal(signal.SIGKILL)
        zero.process.wait()
        assert other.wait() == 1
        assert "node 0 (127.0.0.2) has closed its connection; stopping" in other.log
        zero.assert_nothing_left(PATIENCE)
        zero.process.returncode = 1


@pytest.mark.slow
def test_a_signal_to_any_node_stops_the_group(small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL) as (zero, other):
        prompt = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        with zero.stream("/generate", **prompt) as stream:
            events = iter(stream)
            next(events)
            other.signal(signal.SIGTERM)
            assert len(list(events)[-1]["output_ids"]) == 200
        assert other.wait() == 0
        assert zero.wait() == 0
        assert "was told to stop" in zero.log


@pytest.mark.slow
def test_the_end_of_the_boards_relay_is_told(small_model: str, watch: Stopwatch) -> None:
    with two_nodes(small_model, *SMALL) as (zero, _):
        clients = start_clients(zero, watch)
        os.kill(zero.pid_of("board relay"), signal.SIGKILL)
        assert_told(clients, zero, "board relay", "was killed by SIGKILL")


def refusals(model: str, *flags: tuple[str, ...], envs: tuple[dict[str, str], ...] = ({}, {})) -> list[str]:
    """What node 0 and node 1 say before both end with exit code 1, for flags of each."""
    address = f"127.0.0.1:{free_port()}"
    nodes = []
    for rank, (own, env) in enumerate(zip(flags, envs, strict=True)):
        common = ("--model-path", model, *SMALL, "--dist-init-addr", address, "--node-rank", str(rank))
        nodes.append(Server(*common, *own, module="faulty_ranks", env={**ENVIRONMENT, **env}))
    try:
        for node in nodes:
            assert node.wait() == 1, node.log
            node.assert_nothing_left()
        return [node.log for node in nodes]
    finally:
        for node in nodes:
            node.dispose()


TWO = ("--tp-size", "2", "--nnodes", "2")


@pytest.mark.slow
def test_flags_that_differ_are_named_on_both(small_model: str, watch: Stopwatch) -> None:
    for log in refusals(small_model, TWO, (*TWO, "--page-size", "2")):
        assert "the --page-size of rank 1 is 2, of rank 0 1; they must be equal" in log


@pytest.mark.slow
def test_a_wrong_token_of_a_node_is_named_on_both(small_model: str, watch: Stopwatch) -> None:
    zero, other = refusals(small_model, TWO, TWO, envs=({}, {"FAULT": "link_token"}))
    assert "127.0.0.1 brought a wrong token; it was not let in" in zero
    assert "node 0 does not know the token that this node brought" in other


@pytest.mark.slow
def test_a_wrong_token_of_a_rank_is_named_on_both(small_model: str, watch: Stopwatch) -> None:
    zero, other = refusals(small_model, TWO, TWO, envs=({}, {"FAULT": "rank_token"}))
    assert "127.0.0.1 brought a wrong token" in zero
    assert "lockstep: node 0, 127.0.0.1, does not know the token that rank 1 brought" in other
