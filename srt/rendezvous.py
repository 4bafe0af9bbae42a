"""L4, each rank: where the ranks of a group meet, and over which network interface they then talk.

On one host they meet through a file in the server's private folder and talk over the loopback interface. On several
they meet at an address of node 0, which listens there and nowhere else.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time

import psutil
import torch.distributed as dist

from srt.config import ConfigError, ServerConfig, split_address

MEET_SECONDS = 600
"""How long ranks wait for those of nodes that are not there yet."""

POLL_SECONDS = 0.1
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Without it gloo listens where the host's name leads."""

log = logging.getLogger(__name__)


def meet_on_host(path: str, size: int) -> dist.Store:
    os.environ[GLOO_INTERFACE] = "lo"
    os.environ.setdefault(NCCL_INTERFACE, "=lo")  # for what GPUs say to find each other
    return dist.FileStore(path, size)


def meet_at_node_0(config: ServerConfig, rank: int) -> dist.Store:
    """Returns once all ranks are there; ConfigError if one is missing, too many, or cannot be reached."""
    assert config.dist_init_addr is not None
    host, port = split_address(config.dist_init_addr)
    family, _, _, _, address = _resolve(host, port)
    interface = interface_towards(family, address)
    os.environ[GLOO_INTERFACE] = interface
    os.environ.setdefault(NCCL_INTERFACE, f"={interface}")  # an operator may know better
    store = _listen(family, address) if rank == 0 else _reach(address)
    try:
        _await_all(store, config, rank)
    except dist.DistError:
        raise ConfigError(f"node 0 has gone from {config.dist_init_addr} before all ranks were there") from None
    return store


def _await_all(store: dist.Store, config: ServerConfig, rank: int) -> None:
    sizes = f"--nnodes {config.nnodes} --tp-size {config.tp_size}"
    agreed = store.compare_set("sizes", "", sizes).decode()
    if agreed != sizes:
        raise ConfigError(f"another node was started with {agreed}, this one with {sizes}; they must be equal")
    if store.add(f"rank {rank}", 1) > 1:
        raise ConfigError(f"rank {rank} is there twice: each node needs a --node-rank of its own")
    if rank == 0:
        log.info("waiting at %s for the ranks of the other nodes", config.dist_init_addr)
    deadline = time.monotonic() + MEET_SECONDS
    for other in range(config.tp_size):
        while not store.check([f"rank {other}"]):  # the store's own way to wait hears no signal
            if time.monotonic() > deadline:
                node = other // config.ranks_per_node
                raise ConfigError(
                    f"rank {other} did not come to {config.dist_init_addr} within {MEET_SECONDS} s: start node {node}"
                )
            time.sleep(POLL_SECONDS)


def interface_towards(family: int, address: tuple) -> str:
    """The interface that traffic of this host to `address` leaves through, or that has this address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError as error:
            raise ConfigError(f"no route leads to --dist-init-addr {address[0]}: {error.strerror}") from None
        own = probe.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if own in (entry.address for entry in addresses):
            return name
    raise ConfigError(f"no network interface has {own}, this host's address towards --dist-init-addr {address[0]}")


def _resolve(host: str, port: int) -> tuple:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--dist-init-addr {host} is not known here: {error.strerror}") from None


def _listen(family: int, address: tuple) -> dist.Store:
    """torch's own socket would listen on every interface."""
    try:
        listener = socket.create_server(address[:2], family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr {address[0]}:{address[1]} must be a free port at an address of node 0: {error.strerror}"
        ) from None
    return dist.TCPStore(*address[:2], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _reach(address: tuple) -> dist.Store:
    log.info("waiting for node 0 at %s:%d", *address[:2])
    deadline = time.monotonic() + MEET_SECONDS
    while True:
        try:
            socket.create_connection(address[:2], POLL_SECONDS + 1).close()
            return dist.TCPStore(*address[:2], wait_for_workers=False)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"node 0 does not answer at --dist-init-addr {address[0]}:{address[1]}: {error}"
                ) from None
            time.sleep(POLL_SECONDS)
