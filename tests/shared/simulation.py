"""A scheduler with its real ledger around fakes: a workload, what must come of it, and the run that compares.

`reference` answers one request at a time from the model alone; it shares no code with the scheduler.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from shared.fake_executor import FakeExecutor, FakeModel, fake_logprobs
from shared.fakes import (
    FakeDrafter,
    FakeGrammars,
    ListConsensus,
    RecordingObserver,
    RecordingOutlet,
    ScriptedIntake,
)

from radix import Ledger, check_ledger
from srt.config import SCHEDULE_POLICIES
from srt.limits import Limits
from srt.messages import AbortRequest, FlushCache, Grammar, NewRequest, SamplingParams, pack_ids, unpack_ids
from srt.scheduler.assembly import Settings
from srt.scheduler.control import Control, NoMaintenance
from srt.scheduler.output import Output
from srt.scheduler.planner import Planner
from srt.scheduler.policy import make_queue
from srt.scheduler.scheduler import Scheduler

# 48 tokens: two that end a text, two invisible ones, pieces of characters, and letters in ones, twos and threes.
EOS = (0, 1)
SPECIAL = (0, 1, 2, 3)
TOKEN_BYTES = (
    [b"</s>", b"<|end|>", b"<a>", b"<b>"]
    + [bytes([byte]) for byte in "é€😀".encode()]
    + [b"ab", b"ba", b"aab", b"bb", b"abc", b"ca", b"\n\n", "é".encode()]
    + [bytes([letter]) for letter in b"abcdefghijklmnop"]
    + [b" a", b" b", b"a ", b"b ", b"a b", b"cc", b"c c", b"aaa", b"bbb", b"  ", b"x"]
)
VOCAB = len(TOKEN_BYTES)
IS_SPECIAL = [int(token in SPECIAL) for token in range(VOCAB)]
STOPS = (b"ab", b"bab", b"aba ", "é".encode(), "€".encode(), "😀".encode(), b"<a>", b"a", b"abca", b"c\n\n", b"bbbb")


def request(
    rid: int,
    prompt: Sequence[int],
    max_new_tokens: int = 8,
    *,
    namespace: bytes = b"",
    priority: int = 0,
    seed: int | None = None,
    grammar: str | None = None,
    **sampling: Any,
) -> NewRequest:
    """A namespace is an adapter: the model computes other K/V in each. `grammar` is a text of FakeGrammars."""
    seed = (rid if seed is None else seed) | int.from_bytes(namespace, "little") << 32
    params = SamplingParams(max_new_tokens, seed=seed, **sampling)
    return NewRequest(rid, pack_ids(prompt), params, namespace, priority, grammar and Grammar("fake", grammar))


@dataclass(frozen=True)
class Setting:
    """How a server is configured. `num_pages` and `context_length` bound the pool as `Limits` knows it."""

    page_size: int = 1
    num_pages: int = 64
    context_length: int = 64
    token_budget: int = 16
    max_running: int = 4
    overlap: bool = True
    cache: bool = True
    host_pages: int = 0
    restore_least: int = 1
    policy: str = "fcfs"
    low_priority_first: bool = False
    eos_one_in: int = 24
    skill: int = -1  # of the drafter, in 100; -1: it drafts nothing
    most_guessed: int = 4
    waiting_timeout: float = math.inf

    @property
    def limits(self) -> Limits:
        return Limits(self.context_length, self.num_pages * self.page_size, self.page_size)


def settings_of(setting: Setting) -> Settings:
    return Settings(
        num_pages=setting.num_pages,
        page_size=setting.page_size,
        num_rows=setting.max_running,
        context_length=setting.context_length,
        cache_enabled=setting.cache,
        host_pages=setting.host_pages,
        restore_least=setting.restore_least,
        policy=setting.policy,
        low_priority_first=setting.low_priority_first,
        token_budget=setting.token_budget,
        overlap=setting.overlap,
        eos_token_ids=EOS,
        token_bytes=TOKEN_BYTES,
        is_special=bytes(IS_SPECIAL),
    )


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    reason: str
    matched: int | bytes | None


def reference(message: NewRequest, setting: Setting) -> Answer:
    """What this request must get, whoever else is served."""
    model = FakeModel(VOCAB, EOS, setting.eos_one_in)
    sampling = message.sampling
    stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else EOS)
    constrained = message.grammar is not None
    text = message.grammar.text if constrained else ""
    if text == FakeGrammars.FAULTS[0]:
        return Answer([], "abort", None)
    grammar = 0
    prefix = model.start(sampling)
    for token in unpack_ids(message.ids):
        prefix = model.extend(prefix, token)
    tokens: list[int] = []
    output = b""
    while True:
        allowed = (lambda t, state=grammar: FakeGrammars.allows(state, t)) if constrained else None
        token = model.next_token(prefix, sampling, stop_ids, len(tokens), allowed)
        prefix = model.extend(prefix, token)
        grammar = FakeGrammars.advance(grammar, token)
        if text == FakeGrammars.FAULTS[1] and grammar % 4 == 0:
            return Answer(tokens, "abort", None)
        tokens.append(token)
        seen = len(output)
        if not (token in SPECIAL and sampling.skip_special_tokens):
            output += TOKEN_BYTES[token]
        if len(tokens) >= sampling.min_new_tokens:
            if token in stop_ids:
                return Answer(tokens, "stop", token)
            matches = [
                (start, -len(stop), stop)
                for stop in sampling.stop
                for start in range(len(output))
                if output.startswith(stop, start) and start + len(stop) > seen
            ]
            if matches:
                return Answer(tokens, "stop", min(matches)[2])
        if constrained and FakeGrammars.ends(text, grammar):
            return Answer(tokens, "stop", None)
        if len(tokens) == sampling.max_new_tokens:
            return Answer(tokens, "length", None)


@dataclass
class Simulation:
    setting: Setting
    script: Mapping[int, Sequence[Any]]
    max_steps: int = 0  # as many as `step_bound` says, if 0
    consensus: Any = field(default_factory=ListConsensus)

    def __post_init__(self) -> None:
        s = self.setting
        self._answers: dict[int, list[int]] = {}
        items = [item for items in self.script.values() for item in items]
        self.requests = [item for item in items if isinstance(item, NewRequest)]
        for message in self.requests:
            assert s.limits.refusal(len(message.ids) // 4, message.sampling.max_new_tokens) is None
        model = FakeModel(VOCAB, EOS, s.eos_one_in)
        sizes = {"num_pages": s.num_pages, "page_size": s.page_size, "context_length": s.context_length}
        host = {"host_pages": s.host_pages if s.cache else 0}
        self.ledger = Ledger(
            num_rows=s.max_running, cache_enabled=s.cache, restore_least=s.restore_least, **sizes, **host
        )
        self.executor = FakeExecutor(model, num_rows=s.max_running, **sizes, **host)
        waiting = make_queue(s.policy, self.ledger, s.low_priority_first)
        self.planner = Planner(self.ledger, waiting, s.token_budget, s.max_running)
        self.output = Output(TOKEN_BYTES, IS_SPECIAL)
        self.outlet = RecordingOutlet()
        self.observer = RecordingObserver(self.planner, self.ledger)
        self.grammars = FakeGrammars(VOCAB)
        self.drafter = FakeDrafter(self.grammars, self._expected, s.skill, s.most_guessed)
        self.intake = ScriptedIntake(self.script, self.max_steps or self.step_bound(), grammars=self.grammars)
        self.scheduler = Scheduler(
            ledger=self.ledger,
            planner=self.planner,
            output=self.output,
            executor=self.executor,
            intake=self.intake,
            outlet=self.outlet,
            consensus=self.consensus,
            observer=self.observer,
            grammars=self.grammars,
            control=Control(self.ledger, self.planner, self.outlet, NoMaintenance()),
            drafter=self.drafter,
            eos_token_ids=EOS,
            overlap=s.overlap,
            waiting_timeout=s.waiting_timeout,
        )
        self.intake.stop = self._stop

    def step_bound(self) -> int:
        """More steps than this are a livelock, whatever is retracted.

        Each planned step computes one position at least, and at most every other step plans nothing. A position may
        be computed again after a retraction; since each retraction is paid for by a token of another request, and
        the one retracted goes to the head of the queue, four times is plenty.
        """
        positions = sum(len(m.ids) // 4 + m.sampling.max_new_tokens for m in self.requests)
        waits = 8 * sum(m.grammar is not None for m in self.requests)
        return 2 * 4 * positions + waits + max(self.script, default=0) + 16

    def run(self) -> Simulation:
        self.scheduler.run()
        return self

    def check(self, aborted: Sequence[int] = ()) -> None:
        """Each output is the reference's, or a prefix of it if the request may have been aborted; nothing is left."""
        outlet = self.outlet
        for message in self.requests:
            rid = message.rid
            answer, tokens, finish = reference(message, self.setting), outlet.outputs[rid], outlet.finishes[rid]
            if answer.reason == "abort" and message.grammar.text in finish.message:
                assert tokens == answer.tokens
                assert finish.status in (400, 500)
            elif finish.reason == "abort":
                assert rid in aborted
                assert tokens == answer.tokens[: len(tokens)]
                assert len(tokens) < len(answer.tokens) or answer.reason == "abort"
                assert (finish.message, finish.status) == (f"abort {rid}", 0)
            else:
                assert tokens == answer.tokens
                assert (finish.reason, finish.matched) == (answer.reason, answer.matched)
            opening = outlet.openings[rid]
            assert opening.stop == message.sampling.stop
            assert 0 <= opening.cached_tokens < len(message.ids) // 4
            assert opening.cached_tokens % self.setting.page_size == 0
            self._check_prompt_logprobs(message)
        assert sorted(outlet.finishes) == sorted(message.rid for message in self.requests)
        self.check_nothing_left()

    def _check_prompt_logprobs(self, message: NewRequest) -> None:
        """All that were asked for, once, with the first delta; and the cache was not used where they are."""
        rid, sampling = message.rid, message.sampling
        first, *others = self.outlet.deltas[rid]
        assert all(delta.prompt_logprobs is None for delta in others)
        start = max(1, sampling.prompt_logprobs_start)
        rated = np.array(unpack_ids(message.ids)[start:], np.int32)
        never_ran = first.finish is not None and first.finish.reason == "abort"
        if sampling.prompt_logprobs < 0 or len(rated) == 0 or never_ran:
            assert first.prompt_logprobs is None
            return
        assert first.opening.cached_tokens < start
        chosen, top_ids, top, _ = fake_logprobs(rated, sampling.prompt_logprobs, VOCAB)
        assert first.prompt_logprobs.chosen == tuple(chosen.tolist())
        assert first.prompt_logprobs.top_ids == tuple(map(tuple, top_ids.tolist()))
        assert first.prompt_logprobs.top == tuple(map(tuple, top.tolist()))

    def check_nothing_left(self) -> None:
        ledger = self.ledger
        check_ledger(ledger)
        assert ledger.free_tokens + ledger.cached_tokens == ledger.capacity
        assert ledger.held_tokens == ledger.locked_tokens == 0
        assert ledger.free_rows == self.setting.max_running
        assert len(self.planner.waiting) == len(self.planner.running) == self.planner.waiting.num_tokens == 0
        assert not self.scheduler._requests
        assert not self.scheduler._control._flushes
        assert not self.scheduler._control._asked
        assert not self.grammars.states
        finishes = [finish.reason for finish in self.outlet.finishes.values()]
        assert self.output.aborted == finishes.count("abort")
        assert self.output.finished == len(finishes) - self.output.aborted
        assert self.output.generated_tokens == sum(map(len, self.outlet.outputs.values()))

    def _expected(self, rid: int) -> list[int]:
        if rid not in self._answers:
            message = next(message for message in self.requests if message.rid == rid)
            self._answers[rid] = reference(message, self.setting).tokens
        return self._answers[rid]

    def _stop(self) -> None:
        self.scheduler.stopped = True


def random_simulation(seed: int, tight: bool = False) -> tuple[Simulation, list[int]]:
    """A setting and a workload drawn at random, and the rids that may be aborted in it.

    A tight one has a pool that little more than one request fits in, and many that want to run at once.
    """
    rnd, of_prompts = random.Random(seed), random.Random(f"prompts {seed}")
    page_size = rnd.choice((1, 4, 16))
    context_length = rnd.choice((24, 40, 64))
    least_pages = -(-context_length // page_size)
    setting = Setting(
        page_size=page_size,
        num_pages=least_pages + (rnd.randrange(3) if tight else rnd.choice((0, 2, least_pages, 5 * least_pages))),
        context_length=context_length,
        token_budget=rnd.choice((1, 64, 512)),
        max_running=rnd.choice((3, 6, 12) if tight else (1, 2, 5, 12)),
        overlap=rnd.random() < 0.7,
        cache=rnd.random() < 0.8,
        policy=rnd.choice(SCHEDULE_POLICIES),
        low_priority_first=rnd.random() < 0.5,
        skill=rnd.choice((-1, -1, 100, 80, 0)),
        most_guessed=rnd.choice((1, 4, 20)),
    )
    stems = [[rnd.randrange(VOCAB) for _ in range(rnd.randrange(1, context_length - 4))] for _ in range(3)]
    script: dict[int, list[Any]] = {}
    aborted = []
    num_requests = rnd.randrange(1, 16)
    spread = rnd.choice((1, 20, 60))
    for rid in range(num_requests):
        stem = rnd.choice(stems)
        tail = [rnd.randrange(VOCAB) for _ in range(rnd.choice((0, 0, 1, 6)))]
        prompt = (stem[: rnd.randrange(1, len(stem) + 1)] if rnd.random() < 0.5 else stem) + tail
        prompt = prompt[: context_length // 4 if tight else context_length - 2]
        most_new = setting.limits.max_new_tokens(len(prompt))
        max_new = rnd.randrange(1, most_new + 1) if rnd.random() < (0.3 if tight else 0.7) else most_new
        arrival = rnd.randrange(1, spread + 1)
        message = request(
            rid,
            prompt,
            max_new,
            namespace=rnd.choice((b"", b"", b"\x01")),
            priority=rnd.choice((0, 0, -1, 5)),
            grammar=rnd.choice((None, None, "9", "50", *FakeGrammars.FAULTS)),
            seed=rnd.choice((rid, 5)),
            min_new_tokens=rnd.choice((0, 0, rnd.randrange(max_new + 1))),
            stop=tuple(rnd.sample(STOPS, rnd.choice((0, 0, 1, 3)))),
            stop_token_ids=tuple(rnd.sample(range(VOCAB), rnd.choice((0, 0, 2)))),
            ignore_eos=rnd.random() < 0.4,
            skip_special_tokens=rnd.random() < 0.7,
            logprobs=rnd.choice((-1, -1, 0, 3)),
            prompt_logprobs=of_prompts.choice((-1, -1, 0, 2)),
            prompt_logprobs_start=of_prompts.randrange(len(prompt) + 2),
        )
        script.setdefault(arrival, []).append(message)
        if rnd.random() < 0.25:
            aborted.append(rid)
            for _ in range(rnd.choice((1, 1, 2))):
                step = arrival + rnd.choice((0, 1, 2, rnd.randrange(60)))
                script.setdefault(step, []).append(AbortRequest(rid, f"abort {rid}"))
    for _ in range(rnd.randrange(3)):
        step = rnd.randrange(1, spread + 30)
        script.setdefault(step, []).append(FlushCache(step, rnd.choice((0.0, 0.1))))
        script.setdefault(rnd.randrange(1, 40), []).append(AbortRequest(1000, "nobody"))
    return Simulation(setting, script), aborted


def asked_again(script: Mapping[int, Sequence[Any]], after: int = 300) -> dict[int, list[Any]]:
    """The script, and its requests once more, `after` steps later, under other rids."""
    again = {step: list(items) for step, items in script.items()}
    for step, items in script.items():
        requests = [item for item in items if isinstance(item, NewRequest)]
        copies = [msgspec.structs.replace(item, rid=item.rid + 2000) for item in requests]
        again.setdefault(step + after, []).extend(copies)
    return again
