"""Sends a server requests of all kinds, of which many are aborted or left by their client, and looks what has stayed.

    python -m launch --max-total-tokens 8000 &
    python -m examples.soak --requests 2000

Prints one JSON line; the exit code is 0 if every answer was as it should be and afterwards nothing waits, runs or holds
memory. `--pid` of the server's main process adds how much its processes have grown since the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from examples.host import need_server

IDLE_SECONDS = 20.0
WORDS = ("sea", "stone", "lamp", "river", "winter", "letter", "garden", "seven", "bridge", "clock", "paper", "moon")
PREFIXES = ("You are a helpful assistant. " * 12, "def f(x):\n    return x\n" * 20, "")
ENDINGS = {"finish": 5, "leave": 3, "leave_soon": 1, "abort": 2}  # and their weights


class Soak:
    def __init__(self, base_url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = base_url.rstrip("/")
        self._session = session
        self._random = random.Random(seed)

    async def run(self, first: int, last: int, concurrency: int) -> None:
        numbers = iter(range(first, last))

        async def client() -> None:
            for number in numbers:
                await self._one(number)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _one(self, number: int) -> None:
        path, body = self._request(number)
        ending = self._random.choices(list(ENDINGS), list(ENDINGS.values()))[0]
        self.counts[ending] += 1
        patience = self._random.uniform(0.0, 1.0)  # of a client that leaves or aborts
        asking = asyncio.create_task(self._ask(path, body, ending))
        try:
            if ending == "finish":
                await asking
                return
            done, _ = await asyncio.wait([asking], timeout=0.02 * patience if ending == "leave_soon" else patience)
            if ending == "abort":
                async with self._session.post(f"{self._url}/abort_request", json={"rid": body["rid"]}) as response:
                    assert response.status == 200, await response.text()
                await asking
            elif not done:
                asking.cancel()  # closes the connection
                await asyncio.wait([asking])
        except (AssertionError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.problems.append(f"{path} {body} {ending}: {error!r}"[:1000])

    def _request(self, number: int) -> tuple[str, dict[str, Any]]:
        rng = self._random
        text = rng.choice(PREFIXES) + " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 10, 10, 30, 150))))
        stop = rng.choice((None, None, " the", ["\n\n", "and"]))
        n, length, temperature = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 2, 8, 8, 32)), rng.choice((0.0, 1.0))
        common = {"rid": f"soak-{number}", "stream": rng.random() < 0.6}
        sampling = {"n": n, "temperature": temperature, "stop": stop, "ignore_eos": rng.random() < 0.5}
        match rng.randrange(3):
            case 0:
                return "/generate", {**common, "text": text, "sampling_params": {**sampling, "max_new_tokens": length}}
            case 1:
                return "/v1/completions", {**common, **sampling, "prompt": text, "max_tokens": length}
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {**common, **sampling, "messages": messages, "max_tokens": length}

    async def _ask(self, path: str, body: dict[str, Any], ending: str) -> None:
        """Reads the answer to its end and looks whether it is whole."""
        async with self._session.post(self._url + path, json=body) as response:
            assert response.status == 200, f"{response.status} {await response.text()}"
            if not body["stream"]:
                answer = await response.json()
                choices = (
                    answer if path == "/generate" and isinstance(answer, list) else answer.get("choices", [answer])
                )
            else:
                lines = [line async for line in response.content if line.startswith(b"data: ")]
                assert lines[-1].strip() == b"data: [DONE]", lines[-1]
                events = [json.loads(line[6:]) for line in lines[:-1]]
                choices = [choice for event in events for choice in event.get("choices", [event])]
            assert not any("error" in choice for choice in choices), choices
            reasons = [reason for choice in choices if (reason := self._reason(choice)) is not None]
        wanted = body.get("n") or body["sampling_params"]["n"]
        assert len(reasons) == wanted, f"{len(reasons)} of {wanted} choices have ended"
        allowed = {"stop", "length", "abort"} if ending == "abort" else {"stop", "length"}
        assert allowed.issuperset(reasons), reasons
        self.counts.update(f"ended by {reason}" for reason in reasons)

    @staticmethod
    def _reason(choice: dict[str, Any]) -> str | None:
        reason = choice["meta_info"]["finish_reason"] if "meta_info" in choice else choice["finish_reason"]
        return reason["type"] if isinstance(reason, dict) else reason


async def left_behind(session: aiohttp.ClientSession, base_url: str) -> tuple[bool, dict[str, Any]]:
    """Whether the server comes to rest, with every slot free or cached; and what is left if it does not."""

    async def get(path: str) -> Any:
        async with session.get(base_url.rstrip("/") + path) as response:
            return await response.json()

    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        load, pool = (await get("/v1/loads"))["loads"][0], (await get("/server_info"))["pool"]
        left = {"running": load["num_running_reqs"], "waiting": load["num_waiting_reqs"], **pool}
        busy = left["running"] or left["waiting"] or pool["locked"] or pool["free"] + pool["cached"] != pool["total"]
        if not busy or time.monotonic() > deadline:
            return not busy, left
        await asyncio.sleep(0.05)


def memory_mb(main_pid: int) -> dict[str, float]:
    """Private resident memory of a process and its children, by process title."""
    sizes = {}
    children = Path(f"/proc/{main_pid}/task/{main_pid}/children").read_text().split()
    for pid in (str(main_pid), *children):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes[title] = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024
    return sizes


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pid", type=int, help="of the server's main process, to measure memory")
    args = parser.parse_args()
    need_server(args.base_url)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        soak = Soak(args.base_url, session, args.seed)
        began = time.monotonic()
        warm = args.requests // 10
        await soak.run(0, warm, args.concurrency)
        before = memory_mb(args.pid) if args.pid else {}
        await soak.run(warm, args.requests, args.concurrency)
        seconds = time.monotonic() - began
        idle, left = await left_behind(session, args.base_url)
        after = memory_mb(args.pid) if args.pid else {}
    result = {
        "requests": args.requests,
        "seconds": round(seconds, 1),
        "counts": dict(sorted(soak.counts.items())),
        "problems": len(soak.problems),
        "first_problems": soak.problems[:5],
        "idle": idle,
        "left": left,
        "growth_mb": {title: round(after[title] - size, 1) for title, size in before.items()},
    }
    print(json.dumps(result))
    return 0 if idle and not soak.problems else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
