"""/generate over a real socket: single and batch, ids and words, in one piece and streamed."""

import pytest
from frontend_harness import EOS

from srt.frontend.protocol import GenerateRequest, NativeSampling
from srt.messages import unpack_ids

pytestmark = pytest.mark.usefixtures("quiet_engine")

META = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens",
    "completion_tokens", "cached_tokens", "dp_rank", "response_sent_to_client_ts",
}  # fmt: skip


def generate(server, max_new_tokens=3, sampling=None, **body):
    return server.ok("/generate", {**body, "sampling_params": {"max_new_tokens": max_new_tokens, **(sampling or {})}})


def test_a_prompt_that_is_only_computed(server):
    """As SGLang's frontend language does before it forks or selects."""
    answer = generate(server, 0, text="hello")
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert (answer["meta_info"]["completion_tokens"], answer["meta_info"]["prompt_tokens"]) == (0, 5)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_text(server):
    answer = generate(server, 7, text="hello", rid="mine")
    assert (answer["text"], answer["output_ids"]) == ("hellohe", list(b"hellohe"))
    meta = answer["meta_info"]
    assert meta.keys() == META | {"e2e_latency", "timeline"}
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 7, 2)
    assert 0 < meta["e2e_latency"] < 60


def test_put_and_defaults(server):
    status, _, _ = server.request("PUT", "/generate", {"text": "ab"})
    assert status == 200
    sampling = server.engine.received[-1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.logprobs) == (128, 1.0, 0, -1)


def test_input_ids(server):
    answer = generate(server, 2, input_ids=[7, 8, 9], return_prompt_token_ids=True)
    assert (answer["output_ids"], answer["prompt_token_ids"]) == ([7, 8], [7, 8, 9])


def test_batches_are_lists(server):
    assert [one["text"] for one in generate(server, 2, text=["ab", "cd"])] == ["ab", "cd"]
    assert [one["output_ids"] for one in generate(server, 2, input_ids=[[1, 2], [3]])] == [[1, 2], [3, 3]]
    assert len(generate(server, text=["ab"])) == 1
    assert len(generate(server, text="ab", sampling={"n": 3})) == 3


def test_a_batch_may_bring_one_of_each(server):
    answers = server.ok(
        "/generate",
        {
            "text": ["ab", "cd"], "rid": ["one", "two"], "cache_salt": ["x", "y"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "return_logprob": [True, False], "top_logprobs_num": [1, 2],
        },
    )  # fmt: skip
    assert [one["text"] for one in answers] == ["a", "cd"]
    assert [one["meta_info"]["id"] for one in answers] == ["one", "two"]
    assert "output_token_logprobs" in answers[0]["meta_info"]
    assert "output_token_logprobs" not in answers[1]["meta_info"]
    assert len({request.namespace for request in server.engine.received}) == 2


def test_names_of_a_batch_with_one_rid(server):
    answers = generate(server, text=["ab", "cd"], rid="r", sampling={"n": 2})
    assert [one["meta_info"]["id"] for one in answers] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]


def test_stop_reasons(server):
    assert generate(server, 9, text="abc", sampling={"stop": "c"})["meta_info"]["finish_reason"] == {
        "type": "stop", "matched": "c"
    }  # fmt: skip
    assert generate(server, 9, input_ids=[65, EOS])["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_logprobs(server):
    meta = generate(server, 2, text="ab", return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, None], [-0.5, 98, None]]
    assert meta["output_top_logprobs"] == [None, None]
    assert meta["output_token_logprobs_length"] == 2
    meta = generate(
        server,
        1,
        text="ab",
        return_logprob=True,
        top_logprobs_num=4,
        return_text_in_logprobs=True,
        logprob_start_len=-1,
    )["meta_info"]
    assert meta["output_top_logprobs"] == [
        [[-0.5, 97, "a"], [-1.5, 98, "b"], [-2.5, 99, "c"], [-9999.0, 100, "d"]]
    ]  # fmt: skip


def test_logprobs_of_the_prompt(server):
    body = {"text": "abcd", "return_logprob": True, "token_ids_logprob": [7, 9], "return_text_in_logprobs": True}
    meta = generate(server, 1, **body, logprob_start_len=0, top_logprobs_num=1)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"], [-0.5, 100, "d"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 98, "b"]], [[-0.5, 99, "c"]], [[-0.5, 100, "d"]]]
    assert meta["input_token_ids_logprobs"] == [None] + [[[-0.07, 7, "\x07"], [-0.09, 9, "\t"]]] * 3
    assert meta["output_token_ids_logprobs"] == [[[-0.07, 7, "\x07"], [-0.09, 9, "\t"]]]
    meta = generate(server, 0, **body, logprob_start_len=2)["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 99, "c"], [-0.5, 100, "d"]]
    assert meta["input_top_logprobs"] == [None, None]
    assert (meta["output_token_logprobs"], meta["completion_tokens"]) == ([], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert generate(server, 1, **body, logprob_start_len=4)["meta_info"]["input_token_logprobs"] == []


def test_each_prompt_of_a_batch_has_its_own_logprobs(server):
    answers = generate(
        server, 1, text=["ab", "cd", "ef"], return_logprob=[True, True, False], logprob_start_len=[0, -1, 0],
        top_logprobs_num=[1, 0, 0], token_ids_logprob=[[1], None, None],
    )  # fmt: skip
    first, second, third = (answer["meta_info"] for answer in answers)
    assert first["input_token_logprobs"] == [[None, 97, None], [-0.5, 98, None]]
    assert (second["input_token_logprobs"], second["output_token_ids_logprobs"]) == ([], [])
    assert "output_token_logprobs" not in third


@pytest.mark.parametrize("start", [-1, 0, 3])
@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_stream_is_cumulative(server, tokens_per_step, start):
    server.engine.tokens_per_step = tokens_per_step
    body = {
        "text": 'é"\\\n', "sampling_params": {"max_new_tokens": 10}, "return_logprob": True, "top_logprobs_num": 2,
        "return_prompt_token_ids": True, "logprob_start_len": start, "token_ids_logprob": [5],
    }  # fmt: skip
    whole = server.ok("/generate", body)
    events = server.stream("/generate", body)
    for event in events:
        assert whole["text"].startswith(event["text"])
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == whole["output_ids"][:count]
        assert event["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
    assert 1 <= len(events) <= -(-10 // tokens_per_step)  # fewer where the frontend was behind
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    changing = ("id", "e2e_latency", "response_sent_to_client_ts", "timeline")
    for answer in (whole, events[-1]):
        for name in changing:
            del answer["meta_info"][name]
    assert events[-1] == whole


def test_stream_of_a_batch_is_indexed(server):
    events = server.stream("/generate", {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 2, "n": 2}})
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert [event["index"] for event in events if event["meta_info"]["finish_reason"]] == [0, 1, 2, 3]


def test_stream_of_one_has_no_index(server):
    assert all("index" not in event for event in server.stream("/generate", {"text": "ab"}))


def test_null_for_every_optional_field(server):
    body = {**dict.fromkeys(GenerateRequest.__struct_fields__), "text": "ab"}
    server.ok("/generate", body)
    server.ok("/generate", {**body, "sampling_params": dict.fromkeys(NativeSampling.__struct_fields__)})


def test_what_the_router_adds_is_taken(server):
    added = {
        "model": None, "log_metrics": True, "return_text_in_logprobs": False, "return_hidden_states": False,
        "background": False, "no_logs": False, "return_bytes": False, "return_entropy": False, "data_parallel_rank": 0,
        "custom_labels": {"a": "b"},
    }  # fmt: skip
    generate(server, text="ab", **added)


def test_seed(server):
    generate(server, text="ab", sampling={"sampling_seed": 5})
    assert server.engine.received[-1].sampling.seed == 5


def test_prompt_ids_reach_the_engine(server):
    ids = list(range(256)) * 3
    generate(server, 1, input_ids=ids)
    assert unpack_ids(server.engine.received[-1].ids).tolist() == ids
