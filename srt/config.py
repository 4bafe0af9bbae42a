"""Shared by every process: the server's configuration, one frozen dataclass whose fields are the flags.

`launch.py` parses it, fills what was left to us (None) once, and hands the same JSON to every process.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import msgspec

SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "priority")
CACHE_ISOLATIONS = ("none", "api-key")
LOAD_BALANCE_METHODS = ("cache_aware", "round_robin")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3", "llama4", "mistral", "pythonic", "qwen", "qwen25")
REASONING_PARSERS = ("auto", "none", "deepseek-r1", "kimi", "magistral", "qwen3")
LEAST_BLOCK = 16
"""Tokens per page, below which KV events would say too much about too little."""
_ENDPOINT = re.compile(r"tcp://.+:[0-9]{1,5}|ipc://.+")
SAMPLING_DEFAULTS = ("model", "openai")
METRICS_FAMILIES = ("lockstep", "sglang", "vllm")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(Exception):
    """A flag's value cannot be served; the sentence names the flag and what would do."""


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--kv-events-config` says, under the names that vLLM has for it, and `event_encoding`."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # each further engine takes the port behind
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # that can be replayed
    hwm: int = 100_000  # messages that wait for a slow subscriber; what comes then it misses
    max_queue_size: int = 100_000  # steps that wait to be published
    topic: str = ""
    event_encoding: Literal["map", "array"] = "map"  # vLLM wrote arrays until mid-2026

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """An address without a host of its own is ours to bind; another is a subscriber's, to connect to."""
        here = ("*", "0.0.0.0", "::")
        return self.endpoint.startswith("ipc://") or any(name in self.endpoint for name in here)

    def endpoint_of(self, dp_rank: int) -> str:
        return _endpoint_of(self.endpoint, dp_rank)

    def replay_endpoint_of(self, dp_rank: int) -> str:
        assert self.replay_endpoint is not None
        return _endpoint_of(self.replay_endpoint, dp_rank)


def _endpoint_of(endpoint: str, dp_rank: int) -> str:
    """Each engine's own: ports count on, paths get a suffix."""
    if dp_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{dp_rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + dp_rank}"


def flag(default: Any, help: str, *, choices: Sequence[Any] = (), aliases: Sequence[str] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "aliases": tuple(aliases)})


@dataclass(frozen=True)
class ServerConfig:
    model_path: str | None = flag(
        None, "folder in Hugging Face's layout, .gguf file or hub id; without it a small chat model is fetched once"
    )
    tokenizer_path: str | None = flag(None, "folder with tokenizer.json, if not the model's own")
    served_model_name: str | None = flag(None, "the name clients use; the model path's last part if unset")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on")
    http_workers: int = flag(
        1, "processes that speak HTTP and tokenise; with more than one the main process only directs them"
    )
    device: str = flag("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = flag(
        "auto", "of weights and K/V; auto is bfloat16 for such checkpoints and CPUs, else float16", choices=DTYPES
    )
    kv_cache_dtype: str = flag(
        "auto", "of K/V on a GPU: auto is the weights'; fp8_e4m3 halves it, less exactly", choices=KV_CACHE_DTYPES
    )
    load_format: str = flag("auto", "of the weights; dummy draws them at random", choices=LOAD_FORMATS)
    context_length: int | None = flag(None, "most tokens of prompt and output; the model's own limit if unset")
    mem_fraction_static: float | None = flag(
        None, "share of the free memory that weights and KV cache may take; 0.3 on a CPU if unset, 0.88 on a GPU"
    )
    max_total_tokens: int | None = flag(None, "most tokens in the KV cache, below what the memory would hold")
    max_running_requests: int | None = flag(
        None, "most requests that generate at the same time; 64 on a CPU if unset, 256 on a GPU"
    )
    max_queued_requests: int | None = flag(None, "most requests that wait; one more is answered with 503")
    waiting_timeout: float | None = flag(
        None, "seconds after which a request that has not begun is answered with 503; none of them if unset"
    )
    chunked_prefill_size: int | None = flag(
        None, "most tokens computed in one step; longer prompts go in chunks; 1024 on a CPU if unset, 8192 on a GPU"
    )
    page_size: int | None = flag(
        None, "tokens per page of the KV cache, shared page by page; 1 if unset, 16 with KV events"
    )
    schedule_policy: str = flag("lpm", "order of the waiting queue", choices=SCHEDULE_POLICIES)
    schedule_low_priority_values_first: bool = flag(False, "the lowest priority is the most urgent, not the highest")
    cache_isolation: str = flag("none", "who does not share cached prefixes", choices=CACHE_ISOLATIONS)
    disable_radix_cache: bool = flag(False, "forget the K/V of finished requests")
    hierarchical_cache_gb: float = flag(
        0.0,
        "GiB of host memory per rank for prefixes evicted from the KV cache; they come back instead of being computed",
    )
    disable_cuda_graph: bool = flag(False, "launch each kernel of a decode step by itself, to debug")
    disable_overlap_schedule: bool = flag(
        False, "plan a step only after the last one's tokens are known, as a CPU does anyhow"
    )
    tp_size: int = flag(1, "GPUs (or CPU processes) that share each layer's weights", aliases=("--tp",))
    nnodes: int = flag(1, "hosts over which the ranks are spread evenly; the server is started on each")
    node_rank: int = flag(0, "which of them this is, from 0; node 0 speaks HTTP")
    dist_init_addr: str | None = flag(None, "HOST:PORT of node 0, the same on all nodes, where ranks meet")
    dp_size: int = flag(1, "engines of --tp-size ranks each, between which requests are shared out", aliases=("--dp",))
    load_balance_method: str = flag(
        "cache_aware", "how the engine for a request is chosen", choices=LOAD_BALANCE_METHODS
    )
    watchdog_timeout: float = flag(300.0, "seconds after which an engine whose step does not end counts as hung")
    random_seed: int | None = flag(None, "of dummy weights and of requests that bring no seed")
    api_key: str | None = flag(None, "clients must send it, or one of several with commas between, as a bearer token")
    admin_api_key: str | None = flag(None, "management routes take this key and no other; the API key if unset")
    ssl_certfile: str | None = flag(None, "certificate chain in PEM, to speak HTTPS")
    ssl_keyfile: str | None = flag(None, "its private key, if that is not in the same file")
    cors_origins: str | None = flag(
        None, "web pages whose scripts may use the server: origins with commas between, or * for all"
    )
    max_body_size: int | None = flag(None, "most bytes of a request's body; by the context length if unset")
    sampling_defaults: str = flag(
        "model", "of OpenAI's routes: the model's generation_config.json, or OpenAI's own", choices=SAMPLING_DEFAULTS
    )
    incremental_streaming_output: bool = flag(False, "/generate streams what is new, not all that came so far")
    chat_template: str | None = flag(None, "file with a Jinja chat template, if not the model's own")
    tool_call_parser: str = flag(
        "auto", "form in which the model writes tool calls; auto goes by the chat template", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str = flag(
        "auto", "form in which the model marks its reasoning; auto goes by the template", choices=REASONING_PARSERS
    )
    kv_events_config: str | None = flag(
        None, 'JSON, to tell routers what is cached: {"endpoint": "tcp://*:5557", "replay_endpoint": ..., "topic": ...}'
    )
    inbox_log: str | None = flag(None, "file for all that the scheduler hears and decides, to replay a run from")
    metrics_names: str = flag(
        "lockstep,sglang", "whose names /metrics has, with commas between: lockstep, sglang, vllm"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "URL that takes OpenTelemetry traces as OTLP over HTTP: http://HOST:4318/v1/traces"
    )
    page_show_text: bool = flag(False, "the page at / shows texts from the cache, of everybody's prompts")
    log_format: str = flag("text", "of log lines", choices=LOG_FORMATS)
    log_level: str = flag("info", "least severe level that is logged", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for name, least in (
            ("context_length", 2),
            ("max_total_tokens", 1),
            ("max_running_requests", 1),
            ("max_queued_requests", 0),
            ("chunked_prefill_size", 1),
            ("page_size", 1),
            ("tp_size", 1),
            ("nnodes", 1),
            ("node_rank", 0),
            ("dp_size", 1),
            ("http_workers", 1),
            ("max_body_size", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{flag_name(name)} must be at least {least}, not {value}")
        for family in self.metrics_families:
            if family not in METRICS_FAMILIES:
                raise ConfigError(f"--metrics-names takes {', '.join(METRICS_FAMILIES)}, not {family or 'nothing'}")
        if self.schedule_low_priority_values_first and self.schedule_policy != "priority":
            raise ConfigError("--schedule-low-priority-values-first needs --schedule-policy priority")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError(f"--mem-fraction-static must lie between 0 and 1, not {self.mem_fraction_static}")
        if "" in self.api_keys:
            raise ConfigError("--api-key must not be empty, nor any of several")
        if self.admin_api_key == "":
            raise ConfigError("--admin-api-key must not be empty")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate that belongs to it")
        if self.cache_isolation == "api-key" and len(self.api_keys) == 1:
            raise ConfigError(
                "--cache-isolation api-key isolates nobody where --api-key has one key; give several, or none"
            )
        if not 0 <= self.hierarchical_cache_gb < math.inf:
            raise ConfigError(f"--hierarchical-cache-gb must be at least 0, not {self.hierarchical_cache_gb}")
        for name in ("watchdog_timeout", "waiting_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{flag_name(name)} must be above 0, not {value}")
        if self.random_seed is not None and not 0 <= self.random_seed < 2**63:
            raise ConfigError(f"--random-seed must be at least 0 and below 2**63, not {self.random_seed}")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank must be below --nnodes {self.nnodes}, not {self.node_rank}")
        if self.dist_init_addr is not None:
            split_address(self.dist_init_addr)
        elif self.nnodes > 1:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT: an address of node 0 that the other nodes "
                "reach, and a free port there"
            )
        if self.http_workers > 1 and self.dp_size > 1 and self.load_balance_method != "round_robin":
            raise ConfigError(
                f"--http-workers {self.http_workers} cannot share requests out by what is cached, which each worker "
                "would know in part; take --load-balance-method round_robin, or one worker"
            )
        if self.kv_events is not None:
            _check_kv_events(self.kv_events, self.page_size, self.dp_size)

    @property
    def metrics_families(self) -> list[str]:
        return list(dict.fromkeys(self.metrics_names.split(",")))

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """None where they are off; ConfigError if they are not described as they must be."""
        if self.kv_events_config is None:
            return None
        try:
            config = msgspec.json.decode(self.kv_events_config, type=KvEventsConfig)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'--kv-events-config takes a JSON object like {{"endpoint": "tcp://*:5557"}}: {error}'
            ) from None
        return config if config.is_on else None

    @property
    def frontends(self) -> int:
        """Processes that take requests: the main process, which may be the only one, and the HTTP workers."""
        return 1 if self.http_workers == 1 else 1 + self.http_workers

    @property
    def api_keys(self) -> list[str]:
        """What clients may send; any or none if there are none."""
        return [] if self.api_key is None else self.api_key.split(",")

    @property
    def cors_allowed(self) -> list[str]:
        """Origins of web pages."""
        return [one.strip().rstrip("/") for one in self.cors_origins.split(",")] if self.cors_origins else []

    @property
    def ranks_per_node(self) -> int:
        """Of one engine."""
        return self.tp_size // self.nnodes

    @property
    def ranks_per_host(self) -> int:
        """Of all engines: those that share its cores and its memory."""
        return self.ranks_per_node * self.dp_size

    @property
    def node_ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)

    def summary(self) -> str:
        """For the log."""
        shown = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        shown |= {name: "***" for name in SECRETS if name in shown}
        return " ".join(f"{name}={value}" for name, value in shown.items())

    def shared(self) -> dict[str, str]:
        """By flag, what must be equal on ranks that are to decide alike; long values end in a hash."""
        shown = {}
        for name, value in dataclasses.asdict(self).items():
            if name not in _OF_ONE_NODE:
                text = str(value)
                if len(text) > _SHOWN:
                    text = f"{text[:_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
                shown[flag_name(name)] = text
        return shown


SECRETS = ("api_key", "admin_api_key")
"""What nobody else may see."""
_OF_ONE_NODE = (*SECRETS, "host", "port", "http_workers", "node_rank", "ssl_certfile", "ssl_keyfile")
"""What only its own node reads."""
_SHOWN = 80
_ANY_ADDRESS = ("0.0.0.0", "::")


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT or [IPv6]:PORT as its two parts."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigError(f"--dist-init-addr must be HOST:PORT, with a port between 1 and 65535, not {address}")
    host = host.removeprefix("[").removesuffix("]")
    if host in _ANY_ADDRESS:
        raise ConfigError(f"--dist-init-addr must be an address of node 0 that the other nodes reach, not {address}")
    return host, int(port)


def _check_kv_events(config: KvEventsConfig, page_size: int | None, dp_size: int) -> None:
    if page_size is not None and page_size < LEAST_BLOCK:
        raise ConfigError(
            f"--kv-events-config needs --page-size {LEAST_BLOCK} or more, not {page_size}: an event for every few "
            f"tokens would flood those who listen; leave --page-size out and it is {LEAST_BLOCK}"
        )
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--kv-events-config: {name} must be at least 1, not {getattr(config, name)}")
    for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
        if not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(f"--kv-events-config: {endpoint} is no address; take tcp://*:PORT or ipc://PATH")
    addresses = [config.endpoint_of(rank) for rank in range(dp_size)]
    if config.replay_endpoint is not None:
        addresses += [config.replay_endpoint_of(rank) for rank in range(dp_size)]
    places = [_place_of(address) for address in addresses]
    for place, address in zip(places, addresses, strict=True):
        if place.isdecimal() and int(place) > 65535:
            raise ConfigError(f"--kv-events-config: {address} has a port above 65535; take a lower one")
        if config.binds and places.count(place) > 1:
            raise ConfigError(
                f"--kv-events-config: {address} would be taken twice, since each of {dp_size} engines takes the port "
                "behind the last one's; set endpoint and replay_endpoint that far apart"
            )


def _place_of(address: str) -> str:
    """What only one socket of a host can have: a port, or a path."""
    return address.rpartition(":")[2]


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; --help lists the flags")


def parse_args(argv: Sequence[str] | None = None) -> ServerConfig:
    """Raises ConfigError for an unknown flag and for a value that is none; --help prints and exits."""
    parser = _Parser(prog="launch", description="Serves a language model over HTTP.")
    hints = typing.get_type_hints(ServerConfig)
    for spec in dataclasses.fields(ServerConfig):
        names = [flag_name(spec.name), *spec.metadata["aliases"]]
        default = "" if spec.default is None or isinstance(spec.default, bool) else f" (default: {spec.default})"
        options: dict[str, Any] = {"dest": spec.name, "help": spec.metadata["help"] + default, "default": spec.default}
        kind = _value_type(hints[spec.name])
        if kind is bool:
            options["action"] = "store_true"
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
            if spec.metadata["choices"]:
                options["choices"] = spec.metadata["choices"]
                del options["metavar"]
        parser.add_argument(*names, **options)
    return ServerConfig(**vars(parser.parse_args(argv)))


def _value_type(hint: Any) -> type:
    """The type of a flag's value: `int` for both `int` and `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(member for member in typing.get_args(hint) if member is not types.NoneType)
    return hint
