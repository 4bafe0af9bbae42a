"""What clients may rely on: they can leave, they can be many, and what they are told is right."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from typing import Any

import pytest
from openai import OpenAI
from server_harness import PATIENCE, Server, at_once, wait_until

STORY = "Once upon a time, in a village by the sea, there lived a"


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


# ---- clients that leave -------------------------------------------------------------------------------------------


def test_a_client_that_leaves_its_stream_frees_its_slots(server: Server) -> None:
    with server.stream("/v1/completions", prompt=STORY, max_tokens=5000, ignore_eos=True) as stream:
        next(iter(stream))
        wait_until(lambda: server.loads()["num_running_reqs"] == 1, PATIENCE, lambda: str(server.loads()))
    server.wait_idle()


def test_a_client_that_leaves_without_a_stream_frees_its_slots(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"prompt": STORY, "max_tokens": 5000, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    wait_until(lambda: server.loads()["num_running_reqs"] == 1, PATIENCE, lambda: str(server.loads()))
    connection.close()
    server.wait_idle()


def test_an_aborted_request_ends_its_stream(server: Server) -> None:
    with server.stream("/generate", rid="mine", text=STORY, sampling_params={"max_new_tokens": 5000}) as stream:
        events = iter(stream)
        next(events)
        assert server.post("/abort_request", {"rid": "mine"}).status == 200
        *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert stream.done
    server.wait_idle()


# ---- many clients -------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again(narrow_server: Server) -> None:
    """One runs, one waits, the third is refused, until the one that waits has left."""
    server = narrow_server
    body = {"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True}
    with server.stream("/v1/completions", **body) as first:
        next(iter(first))
        waiting = http.client.HTTPConnection("127.0.0.1", server.port)
        waiting.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: server.loads()["num_waiting_reqs"] == 1, PATIENCE, lambda: str(server.loads()))
        refused = server.post("/v1/completions", body)
        assert refused.status == 503
        assert "queue" in refused.json["error"]["message"]
        waiting.close()
        wait_until(lambda: server.loads()["num_waiting_reqs"] == 0, PATIENCE, lambda: str(server.loads()))
    server.wait_idle()
    assert server.generate([1, 2, 3], 1)["meta_info"]["completion_tokens"] == 1


def test_health_is_quick_during_a_long_prompt_and_under_load(server: Server) -> None:
    def health_seconds() -> list[float]:
        seconds = []
        for _ in range(25):
            began = time.monotonic()
            assert server.get("/health").status == 200
            seconds.append(time.monotonic() - began)
            time.sleep(0.02)
        return seconds

    text = " ".join(str(number) for number in range(2000))  # 8,000 tokens, since digits are tokens of their own
    body = json.dumps({"text": text[: 4 * 1950], "sampling_params": {"max_new_tokens": 1}})
    long = http.client.HTTPConnection("127.0.0.1", server.port)
    long.request("POST", "/generate", body, {"Content-Type": "application/json"})
    during_prompt = health_seconds()
    wait_until(lambda: server.loads()["num_running_reqs"] == 1, PATIENCE, lambda: str(server.loads()))
    long.close()
    server.wait_idle()  # the chunk that is being computed is the step to wait for

    streams = [server.stream("/v1/completions", prompt=STORY, max_tokens=5000, ignore_eos=True) for _ in range(8)]
    entered = [stream.__enter__() for stream in streams]
    next(iter(entered[0]))
    under_load = health_seconds()
    for stream in streams:
        stream.__exit__(None, None, None)
    server.wait_idle()
    for seconds in (during_prompt, under_load):
        print(f"/health: median {statistics.median(seconds):.4f} s, slowest {max(seconds):.4f} s")
        assert (
            statistics.median(seconds) < 0.1
        )  # a chunk takes several times as long, and so may a busy machine at times


# ---- what is cached -----------------------------------------------------------------------------------------------


def test_a_further_turn_computes_only_what_is_new(client: OpenAI, model: str) -> None:
    """All of the last turn's prompt and answer is found again, but for the last token, which was never fed back."""
    messages: list[Any] = [{"role": "system", "content": "You are a poet who knows many languages."}]
    before = None
    for question in ("Write four lines about the Größe of 海 🌊.", "And now about 3.14159?", "Continue.", "Thank you!"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=16, temperature=0.7, seed=len(messages)
        )
        usage = answer.usage
        if before is not None:
            assert usage.prompt_tokens_details.cached_tokens >= before.total_tokens - 1
        before = usage
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_salts_keep_prefixes_apart(server: Server) -> None:
    def cached(salt: str) -> int:
        body = {"prompt": f"The salt of this text is a secret. {STORY}", "max_tokens": 1, "cache_salt": salt}
        return server.ask("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") > 10


# ---- what is told -------------------------------------------------------------------------------------------------


def test_a_streamed_chat_says_what_the_whole_one_says(client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours and an emoji for each."}],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 11,
        "n": 2,
        "stop": ["3."],
    }
    whole = client.chat.completions.create(**request)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "something comes after the end"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_streamed_completions_say_what_the_whole_ones_say(client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": [STORY, "Größe: 5 cm. 海"], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**request)
    texts, reasons = ["", ""], [None, None]
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_the_last_event_of_generate_is_the_whole_answer(server: Server) -> None:
    body = {"text": STORY, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    whole = server.ask("/generate", **body)
    with server.stream("/generate", **body) as stream:
        events = list(stream)
    assert stream.done
    assert [len(event["output_ids"]) for event in events] == sorted(len(event["output_ids"]) for event in events)
    assert all(later["text"].startswith(event["text"]) for event, later in zip(events, events[1:], strict=False))
    last = events[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert last["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_usage_counts_what_was_read_and_written(server: Server, client: OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count to ten."}]
    prompt_tokens = server.ask("/tokenize", messages=messages)["count"]
    usage = client.chat.completions.create(
        model=model, messages=messages, n=2, max_tokens=7, extra_body={"ignore_eos": True}
    ).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 14)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


# ---- chance -------------------------------------------------------------------------------------------------------


def test_a_seed_says_the_same_alone_and_in_company(server: Server) -> None:
    def text(seed: int) -> str:
        return server.generate(STORY, 12, temperature=1.0, sampling_seed=seed)["text"]

    alone = [text(seed) for seed in range(4)]
    together = at_once([lambda seed=seed: text(seed) for seed in range(4)])
    assert together == alone
    assert len(set(alone)) == 4


def test_choices_differ(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=STORY, n=3, max_tokens=16, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3


def test_without_a_seed_answers_differ(server: Server) -> None:
    assert len({server.generate(STORY, 16, temperature=1.0)["text"] for _ in range(3)}) == 3
