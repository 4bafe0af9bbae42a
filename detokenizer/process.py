"""L1, detokenizer process: its door. Receives the leader's token batches, sends the frontend their text.

One message per step in, one out, in order; and one without deltas each time a second passes without a step, so that the
frontend hears that this process lives. It has no state but that of the `Detokenizer` and no loop but this one, which
runs until a signal or the death of its parent ends it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from detokenizer.detokenizer import Detokenizer
from srt.messages import TokenBatch
from srt.process import ChildSpec, Ready, on_dump
from srt.token_bytes import TokenBytes
from srt.transport import Sender, pull

HEARTBEAT_MS = 1000


def main(spec: ChildSpec, ready: Ready) -> None:
    detokenizer = Detokenizer(TokenBytes.from_folder(Path(spec.tokenizer_folder)))
    decoder = msgspec.msgpack.Decoder(TokenBatch)
    with zmq.Context() as context:
        inbound = pull(spec.endpoints.detokenizer, context)
        inbound.setsockopt(zmq.RCVTIMEO, HEARTBEAT_MS)
        outbound = Sender(spec.endpoints.frontend, context)
        on_dump(lambda: f"detokenizer: {detokenizer.num_open} texts open")
        ready({})
        while True:
            try:
                batch = decoder.decode(inbound.recv())
            except zmq.Again:
                batch = TokenBatch(0, ())
            outbound.send(detokenizer.decode(batch))
