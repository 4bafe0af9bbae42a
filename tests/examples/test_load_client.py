"""The load client against a real socket server whose answers, and the cuts in them, the test decides."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvloop

from examples.load_client import LoadClient, StreamResult
from examples.workloads import multi_turn, random_prompts, shared_prefix

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def event(answer: dict) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def completion(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def chat(delta: dict, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def server(pieces: list[bytes | float]) -> AsyncIterator[tuple[int, list[int]]]:
    """Answers every request with `pieces`: bytes are sent in a packet of their own, numbers are seconds to wait."""
    requests_per_connection: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests_per_connection.append(0)
        number = len(requests_per_connection) - 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                requests_per_connection[number] += 1
                for piece in pieces:
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0.002)
                    else:
                        await asyncio.sleep(piece)
                if b"connection: close" in head.lower():
                    break
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], requests_per_connection


def ask(
    pieces: list[bytes | float], *, keep_alive: bool = False, times: int = 1
) -> tuple[list[StreamResult], list[int]]:
    async def run() -> tuple[list[StreamResult], list[int]]:
        async with server(pieces) as (port, connections):
            client = LoadClient("127.0.0.1", port, keep_alive=keep_alive, timeout=60)
            results = [await client.stream("/v1/completions", {"prompt": [1]}, want_text=True) for _ in range(times)]
            client.close()
            return results, connections

    return asyncio.run(run())


def test_times_are_those_of_the_tokens() -> None:
    pieces = [HEAD, 0.1, chunk(completion("a")), 0.05, chunk(completion("b")), 0.2, chunk(completion("c", "length"))]
    pieces += [chunk(event({"choices": [], "usage": USAGE})), chunk(DONE), b"0\r\n\r\n"]
    (result,), _ = ask(pieces)
    assert not result.error
    assert result.text == "abc"
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (7, 3, 4)
    assert len(result.times) == 3
    assert result.ttft >= 0.1
    assert result.gaps[0] >= 0.05
    assert result.gaps[1] >= 0.2
    assert 0.25 <= result.decode_time <= result.end - result.start - 0.1


def test_events_without_a_token_are_not_timed() -> None:
    early, late = chat({"role": "assistant", "content": ""}), chat({}, "stop")
    pieces = [HEAD, chunk(early), 0.1, chunk(chat({"content": "x"})), chunk(chat({"content": "y"})), 0.1, chunk(late)]
    pieces += [chunk(event({"choices": [], "usage": USAGE})), chunk(DONE), b"0\r\n\r\n"]
    (result,), _ = ask(pieces)
    assert not result.error
    assert len(result.times) == 2
    assert result.ttft >= 0.1
    assert result.decode_time <= result.end - result.start - 0.2  # before the first and after the last token


def test_a_token_need_not_bring_text() -> None:
    pieces = [HEAD, chunk(completion("")), chunk(completion("b")), chunk(completion("", "length")), chunk(DONE)]
    (result,), _ = ask([*pieces, b"0\r\n\r\n"])
    assert len(result.times) == 2
    assert result.text == "b"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_packets_may_cut_anywhere(size: int) -> None:
    whole = HEAD + chunk(completion("a")) + chunk(completion("\n\n") + completion("é"))
    whole += chunk(event({"choices": [], "usage": USAGE}) + DONE) + b"0\r\n\r\n"
    (result,), _ = ask([whole[at : at + size] for at in range(0, len(whole), size)])
    assert not result.error
    assert result.text == "a\n\né"
    assert len(result.times) == 3
    assert result.completion_tokens == 3


def test_a_kept_connection_is_used_again() -> None:
    pieces = [HEAD + chunk(completion("a", "length")) + chunk(DONE) + b"0\r\n\r\n"]
    results, connections = ask(pieces, keep_alive=True, times=3)
    assert [result.text for result in results] == ["a"] * 3
    assert connections == [3]
    results, connections = ask(pieces, keep_alive=False, times=3)
    assert [result.text for result in results] == ["a"] * 3
    assert connections == [1, 1, 1]


def test_connections_that_change_hands_keep_their_answers_apart() -> None:
    """Streams end one turn of the loop after the other, so a request takes a connection that was just given back."""
    workers, waves = 16, 8
    answer = HEAD + chunk(completion("a") + completion("", "stop") + event({"choices": [], "usage": USAGE}) + DONE)
    asking: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                asking.append(writer)
                if len(asking) == workers:
                    wave = asking[:]
                    asking.clear()
                    for one in wave:
                        one.write(answer + chunk(b""))
                        await asyncio.sleep(0)
        writer.close()

    async def run() -> list[StreamResult]:
        results: list[StreamResult] = []
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = LoadClient("127.0.0.1", listening.sockets[0].getsockname()[1], keep_alive=True, timeout=60)

        async def work() -> None:
            for _ in range(waves):
                results.append(await client.stream("/v1/completions", {}))

        async with listening:
            await asyncio.gather(*(work() for _ in range(workers)))
            client.close()
        return results

    results = uvloop.run(run())  # as the benchmarks do
    assert [result.error for result in results] == [""] * (workers * waves)
    assert all(result.completion_tokens == 3 for result in results)


def test_what_goes_wrong_is_an_error_of_the_request() -> None:
    refusal = b'{"error": {"message": "no such model"}}'
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(refusal), refusal)
    (result,), _ = ask([answer[:30], answer[30:-4], answer[-4:]], keep_alive=True)
    assert result.error.startswith("HTTP 404")
    assert "no such model" in result.error
    (result,), _ = ask([HEAD, chunk(completion("a")), b"0\r\n\r\n"])
    assert "broke off" in result.error
    (result,), _ = ask(
        [HEAD, chunk(completion("a")), chunk(event({"error": {"message": "died"}})), chunk(DONE), b"0\r\n\r\n"]
    )
    assert "died" in result.error
    (result,), _ = ask([])
    assert "hung up" in result.error


def test_a_server_that_is_not_there_and_one_that_is_silent() -> None:
    async def run() -> StreamResult:
        client = LoadClient("127.0.0.1", 9, keep_alive=True, timeout=1)
        return await client.stream("/v1/completions", {})

    assert "refused" in asyncio.run(run()).error.lower()

    async def wait() -> StreamResult:
        async with server([HEAD, 3.0]) as (port, _):
            client = LoadClient("127.0.0.1", port, keep_alive=False, timeout=0.2)
            return await client.stream("/v1/completions", {})

    assert "Timeout" in asyncio.run(wait()).error


def test_workloads_are_seeded_and_share_what_they_say() -> None:
    def prompts(seed: int) -> list[list[int]]:
        return [c.prompts[0] for c in random_prompts(seed, num_prompts=20, input_len=50, output_len=9)]

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)
    assert all(len(prompt) == 50 for prompt in prompts(1))
    assert len({tuple(prompt[:4]) for prompt in prompts(1)}) == 20

    grouped = shared_prefix(
        3, groups=4, prompts_per_group=5, system_len=30, question_len=10, output_len=8, ordered=False
    )
    heads = [tuple(c.prompts[0][:30]) for c in grouped]
    assert sorted(heads.count(head) for head in set(heads)) == [5, 5, 5, 5]
    assert len({tuple(c.prompts[0]) for c in grouped}) == 20


def test_a_chat_carries_what_was_said() -> None:
    (talk,) = multi_turn(5, conversations=1, turns=2, first_len=6, question_len=3, output_len=4)
    first = talk.body(0, "m")["messages"]
    assert len(first[0]["content"].split()) == 6
    talk.hear("an answer")
    roles = [message["role"] for message in talk.body(1, "m")["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert talk.messages[1]["content"] == "an answer"
