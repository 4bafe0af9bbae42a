"""Sends a server bodies that nobody should send, to every route, and looks whether it minds.

    python -m launch --context-length 512 --max-total-tokens 8000 &
    python -m examples.fuzz --bodies 10000

Each is a valid body with faults: values of other types and sizes, fields that are missing, strange or doubled, broken
text, cut JSON, headers that lie. Body number i of a seed is always the same: `--first i --bodies 1 --show` sends it
alone. Prints one JSON line; the exit code is 0 if no answer was a 5xx, none was missing, and afterwards nothing waits,
runs or holds memory. `--pid` of the server's main process adds how much its processes have grown since the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
from yarl import URL

from examples.host import need_server
from examples.hostile_bodies import Fuzzer, Shot, fields_of
from examples.soak import left_behind, memory_mb

ANSWER_SECONDS = 120.0
RAW_SECONDS = 1.0


class Gunner:
    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self.statuses: Counter[int] = Counter()
        self.routes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = (0.0, -1)
        self._url = base_url.rstrip("/")
        self._session = session

    async def fire(self, shots: Iterator[Shot], concurrency: int) -> None:
        async def gun() -> None:
            for shot in shots:
                await self._one(shot)

        await asyncio.gather(*(gun() for _ in range(concurrency)))

    async def _one(self, shot: Shot) -> None:
        began = time.monotonic()
        try:
            status, answer = await asyncio.wait_for(self._raw(shot) if shot.raw else self._ask(shot), ANSWER_SECONDS)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            self.problems.append(f"{shot.number} {shot.route}: {error!r}"[:400])
            return
        finally:
            self.slowest = max(self.slowest, (round(time.monotonic() - began, 2), shot.number))
            self.routes[shot.route] += 1
        self.statuses[status] += 1
        if fault := _fault(status, answer):
            self.problems.append(f"{shot.number} {shot.route}: {fault}"[:400])
        if status == 200 and shot.path.startswith("/pause_generation"):
            async with self._session.post(f"{self._url}/continue_generation") as response:
                assert response.status == 200, await response.text()

    async def _ask(self, shot: Shot) -> tuple[int, bytes]:
        url = URL(self._url + shot.path, encoded=True)
        async with self._session.request(shot.method, url, data=shot.body, headers=shot.headers) as response:
            return response.status, await response.read()

    async def _raw(self, shot: Shot) -> tuple[int, bytes]:
        host, _, port = self._url.rpartition("/")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(shot.raw or b"")
            answer = await asyncio.wait_for(reader.read(), RAW_SECONDS)
        except (ConnectionResetError, asyncio.TimeoutError):
            answer = b""  # the server reads no further, or waits for more, and has a right to
        finally:
            writer.close()
        return int(answer.split()[1]) if answer else 0, answer


def _fault(status: int, answer: bytes) -> str:
    """What is wrong with an answer, whatever was asked."""
    if status >= 500:
        return f"{status} {answer[:300]!r}"
    if b"Traceback" in answer:
        return f"a traceback: {answer[:300]!r}"
    if b'"internal_server_error"' in answer or b'"api_error"' in answer:
        return f"an error in the stream: {answer[-300:]!r}"
    if status >= 400 and answer.startswith(b"{") and not _sentence(json.loads(answer)):
        return f"no sentence: {answer[:300]!r}"
    return ""


def _sentence(answer: Any) -> bool:
    if "success" in answer:
        return bool(answer["message"])
    return bool(answer["error"]["message"])


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first body")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server's main process, to measure memory")
    parser.add_argument("--show", action="store_true", help="print what is sent")
    args = parser.parse_args()
    need_server(args.base_url)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), auto_decompress=False) as session:
            async with session.get(f"{args.base_url}/openapi.json") as response:
                fields = fields_of(await response.json())
            # The first profile takes seconds, in which a rank answers nothing.
            await (
                await session.post(f"{args.base_url}/start_profile", json={"num_steps": 1, "output_dir": folder})
            ).read()
            fuzzer, gunner = Fuzzer(args.seed, fields, folder), Gunner(args.base_url, session)
            shots = (fuzzer.shot(number) for number in range(args.first, args.first + args.bodies))
            if args.show:
                shots = list(shots)
                print(*shots, sep="\n")
            shots = iter(shots)
            began = time.monotonic()
            warm = [next(shots) for _ in range(args.bodies // 5)]
            await gunner.fire(iter(warm), args.concurrency)
            before = memory_mb(args.pid) if args.pid else {}
            await gunner.fire(shots, args.concurrency)
            seconds = time.monotonic() - began
            idle, left = await left_behind(session, args.base_url)
            after = memory_mb(args.pid) if args.pid else {}
    result = {
        "bodies": args.bodies,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "statuses": {str(status): count for status, count in sorted(gunner.statuses.items())},
        "slowest": {"seconds": gunner.slowest[0], "number": gunner.slowest[1]},
        "problems": len(gunner.problems),
        "first_problems": gunner.problems[:20],
        "idle": idle,
        "left": left,
        "memory_mb": {title: round(size, 1) for title, size in after.items()},
        "growth_mb": {title: round(after[title] - size, 1) for title, size in before.items()},
    }
    print(json.dumps(result))
    return 0 if idle and not gunner.problems else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
