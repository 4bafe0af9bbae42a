"""L1, frontend: the routes that ask how the server is. None waits for the engine's word, but for /health_generate:
the rest is read from the board.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from aiohttp import web

import srt
from srt.board import Phase, Record
from srt.config import SECRETS
from srt.frontend import sampling
from srt.frontend.answers import Answer, json_response, long_json_response, text_response
from srt.frontend.errors import RequestError
from srt.frontend.generation import Collector, Prompt
from srt.frontend.metrics import Load
from srt.frontend.openai.chat import Chat
from srt.frontend.protocol import ChatRequest, DetokenizeRequest, NativeSampling, TokenizeRequest
from srt.frontend.services import Services, new_id
from srt.frontend.words import pack_checked
from srt.messages import pack_ids, unpack_ids

HEARTBEAT_LIMIT = 20.0  # seconds of silence after which a process counts as hung
PROBE_LIMIT = 20.0  # seconds for /health_generate


class Management:
    def __init__(self, services: Services, chat: Chat) -> None:
        self._services = services
        self._chat = chat

    # ---- how it is -------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> Answer:
        """Alive: every process is heard of and nothing has failed."""
        self._check_alive()
        return text_response("")

    async def ready(self, request: web.Request) -> Answer:
        """Alive, and one more request would be taken."""
        self._check_alive()
        self._services.manager.check_queue()
        return text_response("")

    async def health_generate(self, request: web.Request) -> Answer:
        """Lets the model generate a token. A busy server passes with any token that it sends meanwhile."""
        services = self._services
        self._check_alive()
        manager = services.manager
        began = time.monotonic()
        ids = pack_ids([services.model.bos_token_id or 0])
        spec = sampling.from_native(
            NativeSampling(max_new_tokens=1, temperature=0.0), vocab_size=services.words.vocab_size
        )
        prompts = [Prompt(new_id("health-"), ids, spec)]
        collector = Collector(prompts, manager.loop)
        with manager.running(prompts, collector, probe=True):
            while not collector.done.done() and manager.last_token < began:
                if time.monotonic() - began > PROBE_LIMIT:
                    raise RequestError(f"No token came within {PROBE_LIMIT:.0f} seconds.", status=503)
                await asyncio.wait([collector.done], timeout=0.05)
            if collector.done.done():
                collector.done.result()  # the error, if it is one
        return text_response("")

    async def model_info(self, request: web.Request) -> Answer:
        services = self._services
        return json_response(
            {
                "model_path": services.weights.path,
                "tokenizer_path": services.config.tokenizer_path or services.config.model_path or services.model_name,
                "served_model_name": services.model_name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": services.weights.version,
                "load_format": services.config.load_format,
                "reasoning_parser": services.formats.reasoning_parser,
                "tool_call_parser": services.formats.tool_call_parser,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": services.model.model_type,
                "architectures": [services.model.architecture],
                "max_model_len": services.limits.context_length,
                "vocab_size": services.words.vocab_size,
                "eos_token_ids": list(services.model.eos_token_ids),
                "bos_token_id": services.model.bos_token_id,
            }
        )

    async def server_info(self, request: web.Request) -> Answer:
        services = self._services
        flags = dataclasses.asdict(services.config)
        for name in SECRETS:
            del flags[name]
        await services.house.count()
        engines = self._records()
        gauges = [records[0].gauges for records in engines]
        limits = services.limits
        return json_response(
            {
                **flags,
                "served_model_name": services.model_name,
                "context_length": limits.context_length,
                "page_size": limits.page_size,
                "version": srt.__version__,
                "status": "ready" if services.manager.is_open else "closed",
                "max_total_num_tokens": limits.pool_tokens,
                "max_req_input_len": max(0, limits.max_total_tokens - 1),
                "startup_time": services.created,
                "frontend": "python",
                "disaggregation_mode": "null",
                "kv_events": self._kv_events(),
                "pool": {
                    name: sum(engine[f"pool_{name}"] for engine in gauges)
                    for name in ("total", "free", "cached", "locked")
                },
                "ranks": [
                    {
                        "dp_rank": dp_rank,
                        "rank": rank,
                        "step": record.step,
                        "digest": f"{record.digest:016x}",
                        "phase": record.phase.name.lower(),
                        "heartbeat_age": round(time.monotonic() - record.heartbeat, 3),
                    }
                    for dp_rank, records in enumerate(engines)
                    for rank, record in enumerate(records)
                ],
                "internal_states": [
                    {
                        **engine,
                        "effective_max_running_requests_per_dp": services.config.max_running_requests,
                        "last_gen_throughput": services.metrics.engines[dp_rank].gen_throughput,
                        "memory_usage": services.memory_usage(dp_rank),
                    }
                    for dp_rank, engine in enumerate(gauges)
                ],
            }
        )

    async def loads(self, request: web.Request) -> Answer:
        services = self._services
        await services.house.count()
        now = time.time()
        return json_response(
            {
                "timestamp": now,
                "version": srt.__version__,
                "accelerator": services.config.device,
                "num_accelerators": services.config.tp_size * services.config.dp_size,
                "loads": [self._load(dp_rank, now) for dp_rank in range(len(services.boards))],
            }
        )

    def _load(self, dp_rank: int, now: float) -> dict[str, Any]:
        services = self._services
        load, rates = Load.of(services.boards[dp_rank]), services.metrics.engines[dp_rank]
        return {
            "timestamp": now,
            "dp_rank": dp_rank,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_waiting_uncached_tokens": load.waiting_tokens,
            "num_used_tokens": load.used,
            "num_total_tokens": load.used + load.waiting_tokens,
            "num_active_tokens": load.used,
            "max_total_num_tokens": load.total,
            "max_running_requests": services.config.max_running_requests,
            "token_usage": load.token_usage,
            "utilization": load.token_usage,
            "gen_throughput": rates.gen_throughput,
            "cache_hit_rate": rates.cache_hit_rate,
            "memory": services.memory_usage(dp_rank),
        }

    async def get_load(self, request: web.Request) -> Answer:
        loads = [Load.of(board) for board in self._services.boards]
        return json_response(
            [
                {
                    "dp_rank": dp_rank,
                    "num_reqs": load.running + load.waiting,
                    "num_waiting_reqs": load.waiting,
                    "num_tokens": load.used + load.waiting_tokens,
                }
                for dp_rank, load in enumerate(loads)
            ]
        )

    async def metrics(self, request: web.Request) -> Answer:
        await self._services.house.count()
        page = self._services.metrics.page(self._services.boards)
        return text_response(page, "text/plain; version=0.0.4")

    async def version(self, request: web.Request) -> Answer:
        return json_response({"version": srt.__version__})

    # ---- words and ids ---------------------------------------------------------------------------------------------

    async def tokenize(self, request: web.Request) -> Answer:
        services = self._services
        body: TokenizeRequest = await services.read(request, TokenizeRequest)
        services.check_model(body.model)
        text = body.prompt if body.prompt is not None else body.text
        if (text is None) == (body.messages is None):
            raise RequestError("Give one of `prompt` and `messages`.", param="prompt")
        if text is None:
            chat = await self._chat.prompt(_chat_request(body), services.owner(request))
            ids = unpack_ids(chat.ids).tolist()
        else:
            add = body.add_special_tokens is not False
            ids = await services.words.in_thread(services.words.tokenizer.encode, text, add)
        return await services.words.in_thread(self._tokens, ids, bool(body.return_token_strs))

    def _tokens(self, ids: list[int], with_texts: bool) -> Answer:
        answer: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": self._services.limits.context_length
        }  # fmt: skip
        if with_texts:
            answer["token_strs"] = list(map(self._services.texts.text, ids))
        return long_json_response(answer)

    async def detokenize(self, request: web.Request) -> Answer:
        services = self._services
        body: DetokenizeRequest = await services.read(request, DetokenizeRequest)
        services.check_model(body.model)
        if body.tokens:
            pack_checked(body.tokens, "tokens", services.words.vocab_size)
        skip = bool(body.skip_special_tokens)
        text = await services.words.in_thread(services.words.tokenizer.decode, body.tokens, skip)
        return json_response({"text": text, "prompt": text})

    # ----------------------------------------------------------------------------------------------------------------

    def _records(self) -> list[list[Record]]:
        """Of each engine those of its ranks."""
        return [[board.read(rank) for rank in range(board.num_ranks)] for board in self._services.boards]

    def _kv_events(self) -> dict[str, Any] | None:
        """Where subscribers find the events of the first engine; each further one has the ports behind."""
        config = self._services.config
        events = config.kv_events
        if events is None:
            return None
        host, _, port = events.endpoint.rpartition(":")
        described = {
            "publisher": events.publisher,
            "endpoint": events.endpoint,
            "topic": events.topic,
            "block_size": self._services.limits.page_size,
            "dp_size": config.dp_size,
        }
        if port.isdigit():
            described |= {"endpoint_host": host.removeprefix("tcp://"), "endpoint_port_base": int(port)}
        if events.replay_endpoint is not None:
            described["replay_endpoint"] = events.replay_endpoint
            replay_port = events.replay_endpoint.rpartition(":")[2]
            if replay_port.isdigit():
                described["replay_endpoint_port_base"] = int(replay_port)
        return described

    def _check_alive(self) -> None:
        """RequestError with 503 that says who is missing."""
        manager = self._services.manager
        manager.check_open()
        now = time.monotonic()
        for dp_rank, records in enumerate(self._records()):
            for rank, record in enumerate(records):
                name = f"Rank {rank}" if self._services.config.dp_size == 1 else f"Rank {rank} of engine {dp_rank}"
                if record.phase in (Phase.STARTING, Phase.STOPPED):
                    raise RequestError(f"{name} is {record.phase.name.lower()}.", status=503)
                if now - record.heartbeat > HEARTBEAT_LIMIT:
                    raise _silent(name, now - record.heartbeat)
        if now - manager.last_heard > HEARTBEAT_LIMIT:
            raise _silent("The detokenizer", now - manager.last_heard)


def _chat_request(body: TokenizeRequest) -> ChatRequest:
    return ChatRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )


def _silent(who: str, seconds: float) -> RequestError:
    return RequestError(f"{who} has been silent for {seconds:.0f} seconds.", status=503)
