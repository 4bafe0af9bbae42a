"""Ranks of several hosts meet: each in a thread of its own, at an address of the loopback network."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from srt import rendezvous
from srt.config import ConfigError, ServerConfig
from srt.rendezvous import interface_towards, meet_at_node_0

HOST = "127.0.0.2"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ours")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def node(port, rank, size=2, host=HOST):
    return ServerConfig(tp_size=size, nnodes=size, node_rank=rank, dist_init_addr=f"{host}:{port}")


def met(*configs):
    """What each got, a store or the sentence why not. Rank 0 need not be the first to come."""

    def meet(config):
        try:
            return meet_at_node_0(config, config.node_rank)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(meet, configs))


def listeners(port):
    """The local addresses, as /proc has them, of sockets that listen on the port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            lines = [line.split() for line in file][1:]
        found += [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    return found


def test_all_find_one_store_at_one_address(port, monkeypatch):
    stores = met(node(port, 2, 3), node(port, 1, 3), node(port, 0, 3))
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[0].set("a", "b")
    assert stores[2].get("a") == b"b"
    assert listeners(port) == [f"0200007F:{port:04X}"]
    assert rendezvous.os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert rendezvous.os.environ["NCCL_SOCKET_IFNAME"] == "=ours"


def test_who_is_missing_is_named(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.5)
    assert met(node(port, 0)) == [f"rank 1 did not come to {HOST}:{port} within 0.5 s: start node 1"]


def test_without_node_0_nobody_meets(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.2)
    (answer,) = met(node(port, 1))
    assert answer.startswith(f"node 0 does not answer at --dist-init-addr {HOST}:{port}")


def test_a_rank_may_not_come_twice(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 3)
    answers = met(node(port, 0), node(port, 1), node(port, 1))
    assert "rank 1 is there twice: each node needs a --node-rank of its own" in answers


def test_nodes_of_other_sizes_are_refused(port):
    store = rendezvous._listen(socket.AF_INET, (HOST, port))
    store.set("sizes", "--nnodes 2 --tp-size 2")
    (answer,) = met(node(port, 1, 3))
    assert answer.startswith(
        "another node was started with --nnodes 2 --tp-size 2, this one with --nnodes 3 --tp-size 3"
    )


def test_the_port_must_be_free_and_the_address_node_0s(port):
    with socket.create_server((HOST, port)):
        (answer,) = met(node(port, 0))
    assert answer.startswith(f"--dist-init-addr {HOST}:{port} must be a free port at an address of node 0")
    (answer,) = met(node(port, 0, host="192.0.2.1"))
    assert "192.0.2.1" in answer
    (answer,) = met(node(port, 0, host="no.such.host.invalid"))
    assert answer.startswith("--dist-init-addr no.such.host.invalid is not known here")


def test_the_interface_is_that_of_the_address():
    assert interface_towards(socket.AF_INET, (HOST, 1)) == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                assert interface_towards(socket.AF_INET, (entry.address, 1)) == name
