"""Shared: where one request's time goes. Owns the names of the marks on its way, and of the stretches between them.

All marks are CLOCK_MONOTONIC in seconds, which is one clock for all processes of a host. Each is set by whoever
gets the request there; scheduler and detokenizer send theirs with the tokens.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from operator import sub

import msgspec
import numpy as np
from msgspec.structs import astuple

from srt.messages import Started, TextBatch

STRETCHES = (
    (
        "parse",
        "received",
        "parsed",
        "the first bytes of the HTTP request are read, until its body is there and decoded",
    ),
    ("render", "parsed", "rendered", "until the chat template has made a prompt of the messages; 0 without a chat"),
    ("tokenize", "rendered", "tokenized", "until the prompt is token ids; 0 where ids were sent"),
    ("dispatch", "tokenized", "sent", "checks and the compilation of a grammar, until it is on its way to the engine"),
    ("transit", "sent", "heard", "until the leader has it in the inbox of a step"),
    ("queue", "heard", "admitted", "until it has a row and memory and is part of a step's plan"),
    ("launch", "admitted", "launched", "until the first forward with it is launched"),
    ("prefill", "launched", "first_token", "until its first token is on the CPU"),
    ("decode", "first_token", "last_token", "until its last token is on the CPU"),
    (
        "release",
        "last_token",
        "released",
        "until the last token leaves for the detokenizer, once all ranks agree on it",
    ),
    ("detokenize", "released", "detokenized", "until the last token is text"),
    ("deliver", "detokenized", "taken", "until the frontend has that text"),
    ("write", "taken", "written", "until the last piece of the answer is about to be handed to the socket"),
)
"""(name, from which mark, to which mark, what happens) in order: each begins where the last one ended."""

NAMES = tuple(name for name, *_ in STRETCHES)
MARKS = ("received", *(end for _, _, end, _ in STRETCHES))


Stretches = msgspec.defstruct("Stretches", [(name, float) for name in NAMES])
"""Seconds by name."""


class Arrival(msgspec.Struct, eq=False):
    """The marks that all choices of one HTTP request have in common; 0 where it has not been, or need not be."""

    received: float
    traceparent: str = ""  # the header of that name
    parsed: float = 0.0
    rendered: float = 0.0
    tokenized: float = 0.0
    written: float = 0.0  # the last choice that came to its end


_arrival: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


def arrive(received: float = 0.0, traceparent: str = "") -> Arrival:
    """From now on `arrival` means the request that has come in, now or when it says, in this task."""
    arrived = Arrival(received or time.monotonic(), traceparent)
    _arrival.set(arrived)
    return arrived


def arrival() -> Arrival:
    """Of the request that this task is about."""
    return _arrival.get() or arrive()


class Timeline(msgspec.defstruct("Marks", [(mark, float, 0.0) for mark in MARKS])):
    """The marks of one choice. What has not happened, or not to this request, is 0 and counts as its predecessor."""

    gone: float = 0.0  # when its client left before its end

    @classmethod
    def of(cls, arrived: Arrival) -> Timeline:
        return cls(arrived.received, arrived.parsed, arrived.rendered, arrived.tokenized)

    def start(self, started: Started) -> None:
        self.heard, self.admitted, self.launched = started.heard, started.admitted, started.launched

    def end(self, batch: TextBatch, taken: float) -> None:
        """Of its last token, which came with `batch`."""
        self.last_token, self.released, self.detokenized = batch.computed, batch.released, batch.detokenized
        self.taken = taken

    def raw(self) -> tuple[float, ...]:
        """The marks as they were set."""
        return astuple(self)[:-1]

    def marks(self) -> list[float]:
        """In order, none before its predecessor."""
        latest = 0.0
        return [latest := mark if mark > latest else latest for mark in self.raw()]

    def stretches(self) -> Stretches:
        """They add up to what lies between the first mark and the last."""
        marks = self.marks()
        return Stretches(*map(sub, marks[1:], marks))


def in_order(raw: np.ndarray) -> np.ndarray:
    """As `Timeline.marks`, of many: float64 [timelines, len(MARKS)]."""
    return np.maximum.accumulate(raw, axis=1)
