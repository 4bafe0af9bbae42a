"""A whole server within this process: frontend, scheduler, detokenizer and the real model, without their processes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import uvloop
import zmq
from server.server_harness import Client

import launch
from detokenizer.detokenizer import Detokenizer
from srt.board import GRAMMARS, Board, RankRecord
from srt.chat_template import ChatTemplate
from srt.cluster.balancer import make_balancer
from srt.config import ServerConfig, parse_args
from srt.constrained.manager import GrammarManager
from srt.executor.model_runner import ModelRunner
from srt.executor.shape import ExecutorShape
from srt.frontend.app import Frontend, make_services
from srt.limits import Limits
from srt.messages import AbortRequest, Reply, TokenBatch
from srt.model_config import ModelConfig
from srt.models.loader import load_model
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.intake import LeaderIntake
from srt.scheduler.jump_forward import JumpForward
from srt.scheduler.readiness import GrammarReadiness
from srt.tokenization import Tokenizer
from srt.transport import Endpoints, Sender


class LocalServer(Client):
    """For the length of a `with`; `flags` are the server's."""

    def __init__(self, flags: Sequence[str], weights: dict[str, torch.Tensor], endpoints: Endpoints) -> None:
        config, files = launch.prepare(parse_args(flags))
        model, folder = files.model_config, files.tokenizer_folder
        tokenizer, board = Tokenizer.from_folder(folder), Board.create(endpoints.board, 1)
        limits = Limits(config.context_length, config.max_total_tokens, config.page_size)
        self._context = zmq.Context()
        record = RankRecord(board, 0)
        grammars = GrammarManager(tokenizer.vocabulary(model.eos_token_ids), record.grammar, GRAMMARS)
        intake = LeaderIntake(endpoints.leader, self._context, None, GrammarReadiness(board, grammars))
        self._leader = Sender(endpoints.leader, self._context)
        self._scheduler = assemble(
            _settings(config, model, limits, tokenizer),
            executor=_executor(config, model, limits, tokenizer, weights),
            intake=intake,
            outlet=_TextOutlet(Detokenizer(tokenizer.token_bytes), Sender(endpoints.frontend, self._context)),
            record=record,
            grammars=grammars,
            drafter=JumpForward(grammars),
        )
        info = {"pool_tokens": limits.pool_tokens, "memory": {"weights_bytes": 0, "kv_bytes": 0}}
        balancer = make_balancer("cache_aware", [limits.pool_tokens], limits.page_size)
        self._frontend = Frontend(
            make_services(
                config, model, "tiny", tokenizer, ChatTemplate.from_folder(folder), limits, [endpoints],
                [board], [info], balancer,
            )
        )  # fmt: skip
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port = self._sock.getsockname()[1]
        self._loop = uvloop.new_event_loop()
        self._threads = [threading.Thread(target=run) for run in (self._loop.run_forever, self._schedule)]

    def __enter__(self) -> LocalServer:
        for thread in self._threads:
            thread.start()
        self._run(self._frontend.start(self._sock))
        self._loop.call_soon_threadsafe(self._frontend.admit, ())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._frontend.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._scheduler.stopped = True
        self._leader.send([msgspec.msgpack.encode(AbortRequest(-1))])  # so that it wakes up
        for thread in self._threads:
            thread.join()
        self._loop.close()
        self._context.destroy(linger=0)

    def _schedule(self) -> None:
        try:
            self._scheduler.run()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._frontend.fail, repr(error))
            raise

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


class _TextOutlet:
    """Tokens become text on the spot."""

    holds = False

    def __init__(self, detokenizer: Detokenizer, frontend: Sender) -> None:
        self._detokenizer = detokenizer
        self._frontend = frontend

    def tokens(self, batch: TokenBatch) -> None:
        if batch.deltas:
            self._frontend.send(self._detokenizer.decode(batch))

    def reply(self, message: Reply) -> None:
        self._frontend.send(message)

    def release(self, step: int) -> None:
        pass


def _settings(config: ServerConfig, model: ModelConfig, limits: Limits, tokenizer: Tokenizer) -> Settings:
    return Settings(
        num_pages=limits.pool_tokens // limits.page_size,
        page_size=limits.page_size,
        num_rows=config.max_running_requests,
        context_length=limits.context_length,
        cache_enabled=True,
        policy=config.schedule_policy,
        low_priority_first=False,
        token_budget=config.chunked_prefill_size,
        overlap=not config.disable_overlap_schedule,
        eos_token_ids=model.eos_token_ids,
        token_bytes=tuple(tokenizer.token_bytes.table),
        is_special=bytes(tokenizer.token_bytes.is_special),
    )


def _executor(
    config: ServerConfig, model: ModelConfig, limits: Limits, tokenizer: Tokenizer, weights: dict[str, torch.Tensor]
) -> ModelRunner:
    cpu, length = torch.device("cpu"), limits.context_length
    loaded = load_model(model, weights.items(), torch.float32, cpu, context_length=length)
    shape = ExecutorShape(
        num_rows=config.max_running_requests,
        context_length=length,
        pool_tokens=limits.pool_tokens,
        page_size=limits.page_size,
        num_tokens_vocab=tokenizer.vocab_size,
        kv_dtype=torch.float32,
        device=cpu,
    )
    return ModelRunner(loaded, model, shape)
