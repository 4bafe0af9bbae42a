"""Fakes for the scheduler's other seams: what a grammar allows and a drafter guesses, and the ends of the loop."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from radix import Ledger
from srt.messages import ControlReply, Grammar, GrammarReady, Inbox, TokenBatch, TokenDelta, unpack_ids
from srt.scheduler.planner import Plan, Planner
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Accepted, Draft, TokenMasks


class FakeGrammars:
    """A grammar of its own kind: what may come next, and whether it ends, depends on all tokens accepted so far.

    Its text is one of `FAULTS`, or says after how many tokens or so it ends.
    """

    FAULTS = ("fails to compile", "fails when followed")

    def __init__(self, vocab_size: int) -> None:
        self.states: dict[int, int] = {}  # by rid: the hash of the accepted tokens
        self.texts: dict[int, str] = {}
        self.dropped: set[int] = set()
        self.compiling: dict[int, tuple[str, list[int]]] = {}  # by serial
        self._vocab_size = vocab_size
        self._known: list[str] = []
        self._serial = 0

    def open(self, rid: int, grammar: Grammar, ignore_eos: bool) -> bool:
        assert rid not in self.texts
        self.texts[rid] = grammar.text
        if grammar.text in self._known:
            self.states[rid] = 0
            return True
        for text, waiting in self.compiling.values():
            if text == grammar.text:
                waiting.append(rid)
                return False
        self._serial += 1
        self.compiling[self._serial] = grammar.text, [rid]
        return False

    def ready(self, serial: int) -> list[tuple[int, str]]:
        text, waiting = self.compiling.pop(serial)
        fault = text if text == self.FAULTS[0] else ""
        if not fault:
            self._known.append(text)
        waiting = [rid for rid in waiting if rid not in self.dropped]
        self.states.update(dict.fromkeys([] if fault else waiting, 0))
        return [(rid, fault) for rid in waiting]

    @staticmethod
    def advance(state: int, token: int) -> int:
        return zlib.crc32(b"%d" % token, state)

    @staticmethod
    def allows(state: int, token: int) -> bool:
        """Half of the tokens, in every other state only one."""
        return token == 4 + (state >> 8) % 40 if state & 1 else (token ^ state >> 1) & 1 == 0

    @classmethod
    def ends(cls, text: str, state: int) -> bool:
        return text not in cls.FAULTS and state % int(text) == 0

    def masks(self, places: list[int], rids: list[int], drafts: Mapping[int, Draft]) -> TokenMasks:
        every_place, lines = [], []
        for place, rid in zip(places, rids, strict=True):
            state = self.states[rid]
            tokens, certain = drafts.get(rid, Draft())
            for index in range(len(tokens) + 1):
                if index >= certain:
                    every_place.append(place + index - certain)
                    lines.append([self.allows(state, token) for token in range(self._vocab_size)])
                if index < len(tokens):
                    assert index >= certain or self.alone(state) == tokens[index], "not as certain as was said"
                    state = self.advance(state, tokens[index])
        allowed = np.zeros((len(lines), -(-self._vocab_size // 32) * 32), np.uint8)
        allowed[:, : self._vocab_size] = lines
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return TokenMasks(np.array(every_place, np.int32), bits)

    def alone(self, state: int) -> int | None:
        """The only token that is allowed, if there is but one."""
        allowed = [token for token in range(self._vocab_size) if self.allows(state, token)]
        return allowed[0] if len(allowed) == 1 else None

    def forced(self, rid: int) -> list[int]:
        tokens, state = [], self.states[rid]
        while (token := self.alone(state)) is not None and not (tokens and self.ends(self.texts[rid], state)):
            tokens.append(token)
            state = self.advance(state, token)
        return tokens

    def accept(self, rid: int, token: int) -> Accepted:
        assert self.allows(self.states[rid], token), "a token the grammar forbids"
        state = self.states[rid] = self.advance(self.states[rid], token)
        text = self.texts[rid]
        fault = text if text == self.FAULTS[1] and state % 4 == 0 else ""
        return Accepted(self.ends(text, state), fault)

    def drop(self, rid: int) -> None:
        assert rid in self.texts
        self.dropped.add(rid)
        self.states.pop(rid, None)


class FakeDrafter:
    """What a grammar forces, as certain, and behind it guesses of which each is right with `skill` in 100.

    It knows the answers: `expected(rid)` are the tokens a request will have been given in the end.
    """

    def __init__(self, grammars: FakeGrammars, expected: Callable[[int], Sequence[int]], skill: int, most: int) -> None:
        self._grammars = grammars
        self._expected = expected
        self._skill = skill
        self._most = most

    def follows(self, request: Request) -> bool:
        return self._skill >= 0 and request.rid % 4 != 0

    def draft(self, request: Request) -> Draft:
        certain = self._grammars.forced(request.rid) if request.constrained else []
        known = request.num_output + len(certain)
        guesses = self._expected(request.rid)[known : known + self._most]
        noise = [zlib.crc32(b"%d %d" % (request.rid, known + place)) for place in range(len(guesses))]
        guesses = [g if n % 100 < self._skill else n % 40 for g, n in zip(guesses, noise, strict=True)]
        return Draft((*certain, *guesses), len(certain))


class RecordingOutlet:
    """Keeps what left, request by request, and checks each request's protocol: one opening first, one finish last."""

    holds = False

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.openings: dict[int, Any] = {}
        self.finishes: dict[int, Any] = {}
        self.deltas: dict[int, list[TokenDelta]] = {}
        self.replies: list[ControlReply] = []
        self.on_delta: Callable[[TokenDelta], None] = lambda delta: None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(TokenBatch)

    def tokens(self, batch: TokenBatch) -> None:
        for delta in self._decoder.decode(self._encoder.encode(batch)).deltas:
            rid = delta.rid
            assert rid not in self.finishes, "a delta behind the finish"
            assert (delta.opening is not None) == (rid not in self.openings), "one opening, with the first delta"
            if delta.opening is not None:
                self.openings[rid] = delta.opening
            if delta.finish is not None:
                self.finishes[rid] = delta.finish
            self.deltas.setdefault(rid, []).append(delta)
            self.outputs.setdefault(rid, []).extend(unpack_ids(delta.ids))
            self.on_delta(delta)

    def reply(self, message: ControlReply) -> None:
        self.replies.append(message)

    def release(self, step: int) -> None:
        pass


class ScriptedIntake:
    """`script[n]` are the items of step n, counted from 1. Calls `stop` once there are none left and nothing runs.

    `later` holds items for the next inbox, whatever its number. An idle scheduler skips to the next step that has
    items. One step takes `seconds_per_step`. Fails when the run takes more than `max_steps`. Grammars are announced a
    few steps after they were asked for, later ones sometimes before earlier ones.
    """

    def __init__(
        self,
        script: Mapping[int, Sequence[Any]],
        max_steps: int,
        seconds_per_step: float = 0.01,
        grammars: FakeGrammars | None = None,
    ) -> None:
        self.later: list[Any] = []
        self.number = 0
        self.idle_waits = 0
        self.waits: list[bool] = []  # step by step
        self.stop: Callable[[], None] = lambda: None
        self._script = {step: list(items) for step, items in script.items() if items}
        self._max_steps = max_steps
        self._seconds_per_step = seconds_per_step
        self._grammars = grammars
        self._asked: dict[int, int] = {}  # serial -> time
        self._time = 0
        self._encoder = msgspec.msgpack.Encoder()

    def next(self, wait: bool) -> Inbox:
        self.number += 1
        self.waits.append(wait)
        self._time += 1
        assert self.number <= self._max_steps, f"not done after {self._max_steps} steps"
        self._announce()
        if wait and not self.later and not self._asked:
            self.idle_waits += 1
            if self._script:
                self._time = max(self._time, min(self._script))
            else:
                self.stop()
        items = self.later + [
            item for step in sorted(self._script) if step <= self._time for item in self._script[step]
        ]
        self.later = []
        self._script = {step: items for step, items in self._script.items() if step > self._time}
        encoded = tuple(self._encoder.encode(item) for item in items)
        return Inbox(self.number, self._time * self._seconds_per_step, encoded)

    def _announce(self) -> None:
        for serial in self._grammars.compiling if self._grammars else ():
            asked = self._asked.setdefault(serial, self._time)
            if self._time - asked > 3 * serial % 7:
                del self._asked[serial]
                self.later.append(GrammarReady(serial))


class RecordingObserver:
    """Keeps how many requests run and wait and how many slots rows hold, step by step."""

    def __init__(self, planner: Planner, ledger: Ledger) -> None:
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.held: list[int] = []
        self._planner = planner
        self._ledger = ledger

    def step(self, unready: Collection[Request]) -> None:
        self.running.append(len(self._planner.running))
        self.waiting.append(len(self._planner.waiting))
        self.held.append(self._ledger.held_tokens + self._ledger.locked_tokens)
        assert self._planner.waiting.num_tokens == sum(request.num_tokens for request in self._planner.waiting)


class ListConsensus:
    """Keeps each step's plan."""

    def __init__(self) -> None:
        self.plans: list[Plan | None] = []

    def step(self, inbox: Inbox, plan: Plan | None) -> None:
        self.plans.append(plan)
