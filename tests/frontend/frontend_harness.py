"""The real frontend on a real port, in front of an engine that repeats the prompt.

The engine is a thread at the other ends of the pipes: it decodes what the leader would be sent, gives each live request
one token a step (its prompt's ids, over and over), and turns them into text with the real detokenizer.
"""

import asyncio
import contextlib
import http.client
import json
import math
import socket
import threading
import time
from dataclasses import dataclass, field

import msgspec
import tokenizers
import uvloop
import zmq
from tokenizers import decoders, models, pre_tokenizers

from detokenizer.detokenizer import Detokenizer
from detokenizer.process import Frontends
from srt.board import GAUGES, Board, Phase, RankRecord
from srt.chat_template import ChatTemplate
from srt.cluster.balancer import make_balancer
from srt.config import ServerConfig
from srt.frontend.app import Frontend, make_services
from srt.frontend.http_worker import Worker
from srt.limits import Limits
from srt.listeners import own_listener
from srt.messages import (
    AbortRequest,
    ControlReply,
    Finish,
    FlushCache,
    InboxItem,
    NewRequest,
    Opening,
    ShowTree,
    Started,
    TextBatch,
    TokenBatch,
    TokenDelta,
    TokenLogprobs,
    TreeReply,
    pack_ids,
    unpack_ids,
)
from srt.model_config import ModelConfig, RopeScaling
from srt.tokenization import Tokenizer
from srt.transport import Endpoints, Sender, bursts, pull

MODEL = "tiny"
BOS, EOS = 256, 257
VOCAB = 300  # rows of the embedding; the tokenizer knows fewer ids
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(folder, specials=()):
    """One token per byte (id = the byte), and two special tokens or more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_byte = {char: byte for byte, char in enumerate(map(byte_char, range(256)))}
    tokenizer = tokenizers.Tokenizer(models.BPE({char: to_byte[char] for char in alphabet}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def byte_char(byte):
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [other for other in range(256) if other not in printable].index(byte))


def model_config(bos=BOS):
    return ModelConfig(
        architecture="TinyForCausalLM", model_type="tiny", vocab_size=VOCAB, hidden_size=8, intermediate_size=8,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4,
        rope_scaling=RopeScaling(), max_position_embeddings=4096, tie_word_embeddings=True, qkv_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=False, dtype="float32", bos_token_id=bos, eos_token_ids=(EOS,),
    )  # fmt: skip


@dataclass
class Live:
    request: NewRequest
    ids: list
    made: list = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)


class EchoEngine(threading.Thread):
    """Knobs: `step_s` between steps, `paused` (takes requests, gives no token), `hold_at` (gives none more tokens than
    these), `mute` (drops requests), `silent` (no sign of life when idle), `fail_status` (ends requests at once with
    this status), `tokens_per_step`, `flush_ok`, `may_answer` (an event that control items wait for), `says` (ids
    that every request is given instead of its prompt's, and then EOS).
    """

    def __init__(self, endpoints, board, tokenizer, frontends=1):
        super().__init__(daemon=True)
        self.step_s, self.paused, self.mute, self.fail_status, self.flush_ok = 0.0, False, False, 0, True
        self.fail_after, self.hold_at = 0, math.inf
        self.tokens_per_step, self.silent, self.says = 1, False, None
        self.received, self.aborted, self.live = [], [], {}
        self.asked, self.fault, self.may_answer = [], "", threading.Event()
        self.may_answer.set()
        self.trees_shown = self.most_tokens_shown = 0
        self._ends = endpoints
        self._frontends = frontends
        self._table = tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._record = RankRecord(board, 0)
        self._over = threading.Event()
        self._generated = 0

    def reset(self):
        self.step_s, self.paused, self.mute, self.fail_status, self.flush_ok = 0.0, False, False, 0, True
        self.fail_after, self.hold_at, self.tokens_per_step, self.silent = 0, math.inf, 1, False
        self.says = None
        self.fault = ""
        self.asked.clear()
        self.received.clear()
        self.aborted.clear()

    def run(self):
        context = zmq.Context()
        inbox, replies = pull(self._ends.leader, context), Sender(self._ends.frontend, context)
        numbers = range(self._frontends)
        out = Frontends([Sender(self._ends.frontend_of(number), context) for number in numbers])
        decoder = msgspec.msgpack.Decoder(InboxItem)
        step = 0
        while not self._over.is_set():
            self._publish()
            if inbox.poll(0 if self._growing() else 10):
                with contextlib.suppress(zmq.Again):
                    while True:
                        for message in bursts.decode(inbox.recv(zmq.NOBLOCK)):
                            self._hear(decoder.decode(message), out, replies)
            elif not self.live and not self.silent:
                out.send(TextBatch(0, ()))
            growing = self._growing()
            if not growing:
                continue
            step += 1
            deltas = tuple(map(self._advance, growing))
            now = time.monotonic()
            out.send(self._detokenizer.decode(TokenBatch(step, deltas, now, now)))
            time.sleep(self.step_s)
        context.destroy(linger=0)

    def stop(self):
        self._over.set()
        self.join(60)

    def _growing(self):
        return [] if self.paused else [live for live in self.live.values() if len(live.made) < self.hold_at]

    def _publish(self):
        gauges = dict.fromkeys(GAUGES, 0)
        gauges.update(running=len(self.live), pool_total=1000, pool_free=900, pool_cached=100)
        gauges["pool_free"] -= len(self.live)
        self._record.gauges(**gauges)
        self._record.beat(Phase.IDLE)

    def _hear(self, item, out, replies):
        if isinstance(item, NewRequest):
            self.received.append(item)
            if not self.mute:
                ids = unpack_ids(item.ids).tolist() if self.says is None else [*self.says, EOS]
                self.live[item.rid] = Live(item, ids)
        elif isinstance(item, AbortRequest):
            self.aborted.append(item.rid)
            live = self.live.pop(item.rid, None)
            if live is not None:
                delta = self._delta(live, [], Finish("abort", message=item.message))
                out.send(self._detokenizer.decode(TokenBatch(0, (delta,))))
        elif isinstance(item, ShowTree):
            self.trees_shown, self.most_tokens_shown = self.trees_shown + 1, item.most_tokens
            if not self.mute:
                ids = pack_ids(list(b"abc")), pack_ids(list(b"d" * 100))
                most = 4 * item.most_tokens
                replies.send(TreeReply(item.ticket, ((-1, 3, 1, 0, ids[0][:most]), (0, 100, 0, 5, ids[1][:most]))))
        elif isinstance(item, FlushCache):
            replies.send(ControlReply(item.ticket, self.flush_ok, "" if self.flush_ok else "requests are running"))
        else:
            self.asked.append(item)
            self.may_answer.wait(60)
            replies.send(ControlReply(item.ticket, not self.fault, self.fault))

    def _advance(self, live):
        sampling, new, finish = live.request.sampling, [], None
        if self.fail_status and len(live.made) >= self.fail_after:
            finish = Finish("abort", message="out of luck", status=self.fail_status)
        elif sampling.max_new_tokens == 0:
            finish = Finish("length")
        while finish is None and len(new) < self.tokens_per_step:
            token = live.ids[len(live.made) % len(live.ids)]
            live.made.append(token)
            new.append(token)
            finish = self._finish(live, sampling, token)
        self._generated += len(new)
        delta = self._delta(live, new, finish)
        if finish is not None:
            del self.live[live.request.rid]
        return delta

    def _finish(self, live, sampling, token):
        text = self._table.decode(live.made, False)
        for stop in sampling.stop:
            if stop in text:
                return Finish("stop", stop)
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return Finish("stop", token)
        return Finish("length") if len(live.made) >= sampling.max_new_tokens else None

    def _delta(self, live, new, finish):
        sampling = live.request.sampling
        opening = None
        if len(live.made) == len(new):
            opening = Opening(
                len(live.ids) // 2, sampling.stop, sampling.skip_special_tokens, sampling.no_stop_trim,
                Started(live.heard, live.heard, live.heard),
            )  # fmt: skip
        logprobs = of_prompt = None
        if sampling.logprobs >= 0 and new:
            logprobs = rated(new, sampling.logprobs, sampling.logprob_ids)
        if sampling.prompt_logprobs >= 0 and opening and (new or finish.reason != "abort"):
            start = max(1, sampling.prompt_logprobs_start)
            of_prompt = rated(unpack_ids(live.request.ids)[start:], sampling.prompt_logprobs, sampling.logprob_ids)
        return TokenDelta(live.request.rid, pack_ids(new), opening, finish, logprobs, of_prompt)


def rated(tokens, num_top, ids):
    others = [tuple((token + i) % 256 for i in range(num_top)) for token in tokens]
    values = [tuple(-0.5 - i if i < 3 else float("-inf") for i in range(num_top)) for _ in tokens]
    asked = tuple(tuple(-0.01 * one for one in ids) for _ in tokens) if ids else ()
    return TokenLogprobs((-0.5,) * len(tokens), tuple(others), tuple(values), asked)


class Server:
    """Engine and frontend, each in a thread, for the length of a `with`.

    With `http_workers` these are in the frontend's thread, too, each at a port of its own; `port` is the first one's.
    """

    def __init__(
        self, folder, *, context_length=1024, pool_tokens=1024, bos=BOS, template=True, specials=(), dp_size=1, **flags
    ):
        """`template` may be the source of one."""
        self.tokenizer = byte_tokenizer(folder, specials)
        self.config = ServerConfig(model_path="/models/tiny", served_model_name=MODEL, dp_size=dp_size, **flags)
        self.limits = Limits(context_length, pool_tokens, 1)
        endpoints = [Endpoints(str(folder), dp_rank) for dp_rank in range(dp_size)]
        self.boards = [Board.create(one.board, 1) for one in endpoints]
        self.board = self.boards[0]
        self.engines = [
            EchoEngine(*ends, self.tokenizer, self.config.frontends)
            for ends in zip(endpoints, self.boards, strict=True)
        ]
        self.engine = self.engines[0]
        info = {"pool_tokens": pool_tokens, "memory": {"weights_bytes": 1000, "kv_bytes": 2000, "host_tokens": 64}}
        chat_template = ChatTemplate.from_folder(folder) if template else None
        if isinstance(template, str):
            chat_template = ChatTemplate({"default": template}, {})
        processes = [
            make_services(
                self.config, model_config(bos), MODEL, self.tokenizer, chat_template, self.limits, endpoints,
                self.boards, [info] * dp_size, make_balancer("cache_aware", [pool_tokens] * dp_size, 1),
                process=number,
            )
            for number in range(self.config.frontends)
        ]  # fmt: skip
        self.services = processes[0]
        frontends = [Frontend(*numbered) for numbered in zip(processes, range(self.config.frontends), strict=True)]
        self.frontend, *self.workers = frontends
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(self.config.http_workers)]
        self.ports = [listener.getsockname()[1] for listener in self.listeners]
        self.port = self.ports[0]
        listeners = self.listeners
        if self.workers:
            listeners = [own_listener(listeners, endpoints[0]), *listeners]
        self._serving = list(zip(frontends, listeners, strict=True))
        self._ends = endpoints[0]
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self):
        for engine in self.engines:
            engine.start()
        self._thread.start()
        for frontend, listener in self._serving:
            self.run(frontend.start(listener))
        for worker in self.workers:
            self.call(Worker, worker, self._ends)
        self.call(self.frontend.admit, [self._ends.frontend_of(1 + number) for number in range(len(self.workers))])
        return self

    def __exit__(self, *_):
        for frontend in (*self.workers, self.frontend):
            self.run(frontend.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()
        for engine in self.engines:
            engine.stop()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def call(self, function, *arguments):
        async def wrapped():
            return function(*arguments)

        return self.run(wrapped())

    # ---- the client's side -----------------------------------------------------------------------------------------

    def request(self, method, path, body=None, headers=None, timeout=60, worker=0):
        """(status, headers, bytes); a body that is not bytes goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[worker], timeout=timeout)
        with contextlib.closing(connection):
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path, body, **options):
        status, _, raw = self.request("POST", path, body, **options)
        return status, strict_json(raw)

    def post_raw(self, path, body):
        assert self.request("POST", path, body)[0] == 200

    def get(self, path, **options):
        status, _, raw = self.request("GET", path, **options)
        return status, strict_json(raw) if raw else None

    def ok(self, path, body, **options):
        status, answer = self.post(path, body, **options)
        assert status == 200, answer
        return answer

    def stream(self, path, body, **options):
        """Every event's data, with [DONE] checked to be there once, at the end."""
        status, headers, raw = self.request("POST", path, {**body, "stream": True}, **options)
        assert status == 200, raw
        assert headers["Content-Type"].startswith("text/event-stream")
        return events_of(raw)

    def open_stream(self, path, body, worker=0):
        """A socket with the request sent and the response's first bytes read."""
        sock = socket.create_connection(("127.0.0.1", self.ports[worker]), timeout=60)
        send_request(sock, path, {**body, "stream": True})
        return sock, sock.recv(65536)

    def wait_for(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come true"
            time.sleep(0.005)


def send_request(sock, path, body):
    raw = json.dumps(body).encode()
    sock.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw))


def events_of(raw):
    text = raw.decode()
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("[DONE]") == 1
    lines = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [strict_json(line.removeprefix("data: ")) for line in lines]


def strict_json(raw):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(raw, parse_constant=refuse)
