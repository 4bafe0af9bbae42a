"""Shared, a client's program: splits the wall time of requests to a running server into the stretches that it tells of.

`python -m srt.observe.anatomy --base-url http://127.0.0.1:30000` asks for several (prompt, output) shapes, alone and,
with `--concurrency`, many at a time. It prints the medians, whether they add up to what the client saw, which stretch
grows under load, and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import selectors
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from srt.observe.timeline import NAMES

WIRE = "wire"
"""What is left of the client's time: the network, the last write (`response_send_seconds`), and the client's own."""
LIMIT_SHARE, LIMIT_SECONDS = 0.01, 0.001
BAR = 40

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Sample:
    wall: float  # seconds, from the first byte sent to the last one read
    prompt_tokens: int
    stretches: dict[str, float]

    @property
    def wire(self) -> float:
        return self.wall - sum(self.stretches.values())

    @property
    def adds_up(self) -> bool:
        return abs(self.wire) <= max(LIMIT_SECONDS, LIMIT_SHARE * self.wall)


class Client:
    """One connection to the server, kept open. A plain socket, because an HTTP library's own time, times the number of
    clients in this process, would be counted as the server's.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        url = urlsplit(base_url)
        if url.scheme != "http" or url.hostname is None:
            raise SystemExit(f"anatomy: --base-url must be http://HOST:PORT, not {base_url}")
        try:
            self.socket = socket.create_connection((url.hostname, url.port or 80), timeout=600)
        except OSError as error:
            raise SystemExit(f"anatomy: no server at {base_url} ({error}); start one: python -m launch") from None
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = [f"POST {url.path.rstrip('/')}/generate HTTP/1.1", f"Host: {url.netloc}"]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()

    def request(self, words: int, tokens: int, stream: bool) -> bytes:
        """A prompt of random words, which no cache has, and exactly so many tokens of output."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text = " ".join(random.choices(WORDS, k=words))
        body = json.dumps({"text": text, "sampling_params": sampling, "stream": stream}).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    def send(self, request: bytes) -> None:
        self._raw = bytearray()
        self._end = 0  # where the answer ends; -1: with the last chunk; 0: not known yet
        self._began = time.monotonic()
        self.socket.sendall(request)

    def read(self) -> Answer | None:
        """Takes what is there, up to the last byte of either a length that was said or the last chunk."""
        data = self.socket.recv(1 << 16)
        now = time.monotonic()
        if not data:
            raise SystemExit("anatomy: the server has closed the connection")
        raw = self._raw
        raw += data
        if not self._end:
            head, found, _ = raw.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self._end = len(head) + 4 + int(length[1]) if found and length else -1 if found else 0
        is_whole = len(raw) == self._end or (self._end < 0 and raw.endswith(b"\r\n0\r\n\r\n"))
        return Answer(now - self._began, bytes(raw)) if is_whole else None


class Answer(NamedTuple):
    wall: float  # seconds
    raw: bytes  # head and body

    def sample(self) -> Sample:
        head, _, body = self.raw.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"anatomy: the server answered {self.raw[:500].decode(errors='replace')}")
        if b"text/event-stream" in head:
            body = body.rpartition(b"data: [DONE]")[0].rpartition(b"data: ")[2].partition(b"\n")[0]
        meta = json.loads(body)["meta_info"]
        return Sample(self.wall, meta["prompt_tokens"], meta["timeline"])


def measure(clients: Sequence[Client], words: int, tokens: int, stream: bool, repeats: int) -> list[Sample]:
    """`repeats` requests of each client, all clients at the same time, in one thread that does nothing but send and
    read: what else there is to do comes before and after."""
    requests = {client: [client.request(words, tokens, stream) for _ in range(repeats)] for client in clients}
    answers = []
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send(requests[client].pop())
        while selector.get_map():
            for key, _ in selector.select():
                client = key.data
                answer = client.read()
                if answer is None:
                    continue
                answers.append(answer)
                if requests[client]:
                    client.send(requests[client].pop())
                else:
                    selector.unregister(client.socket)
    return [answer.sample() for answer in answers]


@dataclass(frozen=True)
class Split:
    """Medians of one shape at one concurrency, in seconds."""

    concurrency: int
    prompt: int
    output: int
    wall: float
    parts: dict[str, float]  # NAMES and WIRE
    adding_up: int  # samples that do
    samples: int

    @classmethod
    def of(cls, concurrency: int, output: int, samples: Sequence[Sample]) -> Split:
        parts = {name: statistics.median([sample.stretches[name] for sample in samples]) for name in NAMES}
        parts[WIRE] = statistics.median([sample.wire for sample in samples])
        prompt = round(statistics.median([sample.prompt_tokens for sample in samples]))
        wall = statistics.median([sample.wall for sample in samples])
        return cls(concurrency, prompt, output, wall, parts, sum(s.adds_up for s in samples), len(samples))

    def lines(self, alone: Split | None) -> list[str]:
        """With `alone`, the same shape without load, also how much longer each part takes than there."""
        lines = [
            f"prompt {self.prompt}, output {self.output}, {self.concurrency} at a time: "
            f"wall {self.wall * 1e3:.2f} ms; {self.adding_up} of {self.samples} add up to within 1 % or 1 ms"
        ]
        most = max(self.parts.values())
        for name, seconds in self.parts.items():
            bar = "█" * round(BAR * seconds / most) if most > 0 else ""
            grown = "" if alone is None else f" {(seconds - alone.parts[name]) * 1e3:+10.2f}"
            lines.append(f"  {name:<10} {seconds * 1e3:10.3f} ms {seconds / self.wall:6.1%}{grown}  {bar}".rstrip())
        if alone is not None:
            name = max(self.parts, key=lambda part: self.parts[part] - alone.parts[part])
            lines.append(f"  {name} grows most: {(self.parts[name] - alone.parts[name]) * 1e3:+.2f} ms")
        return lines

    def to_json(self) -> dict[str, Any]:
        shape = {"concurrency": self.concurrency, "prompt": self.prompt, "output": self.output}
        parts = {name: round(seconds * 1e3, 4) for name, seconds in self.parts.items()}
        return {
            **shape, "wall_ms": round(self.wall * 1e3, 3), "ms": parts, "adding_up": self.adding_up,
            "samples": self.samples,
        }  # fmt: skip


def draw(splits: Sequence[Split], path: str) -> None:
    """One bar for each split, in a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("anatomy: --png needs matplotlib: pip install 'lockstep-server[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.6 * len(splits)), layout="constrained")
    labels = [f"{split.prompt} + {split.output}, {split.concurrency} at a time" for split in splits]
    left = [0.0] * len(splits)
    colours = pyplot.get_cmap("tab20").colors
    for colour, name in zip(colours, (*NAMES, WIRE), strict=False):
        shares = [100 * max(split.parts[name], 0.0) / split.wall for split in splits]
        axes.barh(labels, shares, left=left, color=colour, label=name)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    for place, split in enumerate(splits):
        axes.text(101, place, f"{split.wall * 1e3:.1f} ms", va="center")
    axes.set_xlim(0, 115)
    axes.set_xlabel("share of the client's time, in percent (medians)")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=7, fontsize="small")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if less than nine requests of ten added up."""
    parser = argparse.ArgumentParser(prog="anatomy", description="Splits requests' time into its stretches.")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key")
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 256], help="lengths in words, about tokens")
    parser.add_argument("--output", type=int, nargs="+", default=[1, 32], help="lengths in tokens")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1], help="requests at a time; the first is alone"
    )
    parser.add_argument("--repeats", type=int, default=5, help="requests for each shape, at least one of each client")
    parser.add_argument("--stream", action="store_true", help="take the answers as they come")
    parser.add_argument("--png", help="file to draw the splits to")
    args = parser.parse_args(argv)

    splits: list[Split] = []
    for prompt in args.prompt:
        for output in args.output:
            alone = None
            for concurrency in args.concurrency:
                clients = [Client(args.base_url, args.api_key) for _ in range(concurrency)]
                measure(clients[:1], prompt, output, args.stream, 1)  # the first one warms up
                each = -(-args.repeats // concurrency)
                split = Split.of(concurrency, output, measure(clients, prompt, output, args.stream, each))
                print(*split.lines(alone), sep="\n", end="\n\n")
                splits.append(split)
                alone = alone or split
    if args.png:
        draw(splits, args.png)
    print(json.dumps([split.to_json() for split in splits]))
    adding_up, samples = sum(split.adding_up for split in splits), sum(split.samples for split in splits)
    return 0 if adding_up >= 0.9 * samples else 1


if __name__ == "__main__":
    raise SystemExit(main())
