"""L1, detokenizer process: its door. Receives the leader's token batches, sends the frontend their text.

One message per step in, one out, in order; and one without deltas each time a second passes without one, so that the
frontend hears that this process lives. Where several processes take requests each gets the text of its own. It has no
state but that of the `Detokenizer` and no loop but this one, which runs until a signal or the death of its parent ends
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from detokenizer.detokenizer import Detokenizer
from srt.messages import TextBatch, TextDelta, TokenBatch
from srt.process import ChildSpec, Ready, on_dump
from srt.token_bytes import TokenBytes
from srt.transport import Sender, pull

HEARTBEAT_MS = 1000


class Frontends:
    """The processes that take requests. A request's rid, divided by their number, leaves the number of its own."""

    def __init__(self, senders: Sequence[Sender]) -> None:
        self._senders = senders
        self._last = [0.0] * len(senders)

    def send(self, batch: TextBatch) -> None:
        if len(self._senders) == 1:
            self._senders[0].send(batch)
            return
        shares: list[list[TextDelta]] = [[] for _ in self._senders]
        for delta in batch.deltas:
            shares[delta.rid % len(shares)].append(delta)
        now = time.monotonic()
        # Who gets nothing hears now and then that there were tokens, or at least that this process lives.
        step = batch.step if any(delta.ids for delta in batch.deltas) else 0
        for number, share in enumerate(shares):
            if share:
                own = TextBatch(batch.step, tuple(share), batch.computed, batch.released, batch.detokenized)
            elif now - self._last[number] >= HEARTBEAT_MS / 1000:
                own = TextBatch(step, ())
            else:
                continue
            self._senders[number].send(own)
            self._last[number] = now


def main(spec: ChildSpec, ready: Ready) -> None:
    detokenizer = Detokenizer(TokenBytes.from_folder(Path(spec.tokenizer_folder)))
    decoder = msgspec.msgpack.Decoder(TokenBatch)
    with zmq.Context() as context:
        inbound = pull(spec.endpoints.detokenizer, context)
        inbound.setsockopt(zmq.RCVTIMEO, HEARTBEAT_MS)
        numbers = range(spec.config.frontends)
        frontends = Frontends([Sender(spec.endpoints.frontend_of(number), context) for number in numbers])
        on_dump(lambda: f"detokenizer: {detokenizer.num_open} texts open")
        ready({})
        while True:
            try:
                batch = decoder.decode(inbound.recv())
            except zmq.Again:
                batch = TokenBatch(0, ())
            frontends.send(detokenizer.decode(batch))
