"""Several processes that take requests for the same engine: what one of them knows, all of them act on.

Here they are in one process, each with a port of its own, so that a test says which of them it speaks to.
"""

import concurrent.futures
import contextlib
import math
import re
import shutil

import openai
import pytest
from frontend_harness import EOS, MODEL, Server, events_of

from detokenizer.process import Frontends
from srt.frontend.live_page import PERIOD
from srt.frontend.tally import Tally
from srt.messages import TextBatch, TextDelta, pack_ids

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ENDLESS = {"prompt": "ab", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("s"), http_workers=2, max_running_requests=4, max_queued_requests=0) as running:
        yield running


@pytest.fixture(autouse=True)
def tidy(server):
    yield
    server.engine.paused, server.engine.hold_at = False, math.inf
    server.wait_for(lambda: not server.engine.live)
    server.wait_for(lambda: not server.services.manager.tally.total)
    server.engine.reset()


def counted(server, name, worker=0):
    page = server.request("GET", "/metrics", worker=worker)[2].decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"lockstep:{name}[{{ ]", line))


@contextlib.contextmanager
def held(server, worker, **body):
    """A stream of this worker that has begun and does not end."""
    server.engine.hold_at = 3
    before = len(server.engine.live)
    sock, _ = server.open_stream(COMPLETIONS, {**ENDLESS, **body}, worker=worker)
    server.wait_for(lambda: len(server.engine.live) == before + body.get("n", 1))
    with sock:
        yield sock


def test_streams_of_all_workers_are_told_apart(server):
    def one(i):
        text = f"<{i}>"
        events = server.stream(COMPLETIONS, {"prompt": text, "max_tokens": 40}, worker=i % 2)
        return "".join(event["choices"][0]["text"] for event in events) == (text * 40)[:40]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(40)))
    rids = [request.rid for request in server.engine.received]
    assert len(set(rids)) == 40
    assert {rid % 3 for rid in rids} == {1, 2}


@pytest.mark.parametrize("body", [{"rid": "job-7"}, {"rid": "job-", "n": 2}, {"abort_all": True}])
def test_an_abort_reaches_the_requests_of_another_worker(server, body):
    with held(server, 1, rid="job-7", n=body.pop("n", 1)) as sock:
        assert server.request("POST", "/abort_request", body)[0] == 200
        server.wait_for(lambda: not server.engine.live)
        assert b'"finish_reason":"abort"' in read_all(sock)


def test_engines_hear_of_an_abort_before_its_answer_is_given(server):
    def abort():
        """Leaves the event loop no turn before the engine has heard."""
        server.workers[1].services.manager.abort(None, "enough")
        server.wait_for(lambda: server.engine.aborted)

    with held(server, 1):
        server.call(abort)


def read_all(sock):
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += sock.recv(65536)
    return data


def test_a_name_is_taken_in_all_workers(server):
    body = {"prompt": "ab", "max_tokens": 1}
    with held(server, 0, rid="mine", n=2):
        for name in ("mine", "mine_1"):
            status, answer = server.post(COMPLETIONS, {**body, "rid": name}, worker=1)
            assert (status, answer["error"]["code"]) == (400, "duplicate_rid")
        server.ok(GENERATE, {"text": "ab", "rid": "mine_2", "sampling_params": {"max_new_tokens": 1}}, worker=1)
    server.wait_for(lambda: not server.services.manager.tally.total)
    for worker in (1, 0, 1):
        assert server.ok(COMPLETIONS, {**body, "rid": "mine"}, worker=worker)["id"] == "mine"
    server.ok(GENERATE, {"text": ["a", "b"], "rid": "mine", "sampling_params": {"max_new_tokens": 1}}, worker=1)


def test_the_queue_is_everybodys(server):
    with held(server, 0), held(server, 1, n=2):
        assert server.request("GET", "/ready", worker=1)[0] == 200
        with held(server, 1):
            for worker in (0, 1):
                assert server.request("GET", "/ready", worker=worker)[0] == 503
                status, answer = server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}, worker=worker)
                assert (status, answer["error"]["code"]) == (503, "queue_full")
    server.wait_for(lambda: not server.services.manager.tally.total)
    assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "n": 4})[0] == 200
    assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "n": 5})[0] == 503


def test_any_worker_tells_the_metrics_of_all(server):
    names = "requests_total", "generation_tokens_total", "e2e_request_latency_seconds_count", "errors_total"
    before = [counted(server, name) for name in names]
    for worker, tokens in ((0, 3), (1, 4), (1, 5)):
        server.ok(COMPLETIONS, {"prompt": "ab", "max_tokens": tokens}, worker=worker)
    assert server.post(COMPLETIONS, {"prompt": 1}, worker=1)[0] == 400
    assert server.post("/abort_request", {}, worker=1)[0] == 400  # of the main process
    server.ok("/v1/responses", {"input": "hi", "max_output_tokens": 6}, worker=1)  # too
    for worker in (0, 1):
        after = [counted(server, name, worker) for name in names]
        assert [now - then for now, then in zip(after, before, strict=True)] == [4, 18, 4, 2]
    assert server.services.metrics.engines[0].total == after[1]
    load = server.get("/v1/loads", worker=1)[1]["loads"][0]
    assert load["gen_throughput"] > 0


def test_the_page_shows_the_requests_of_all(server):
    with held(server, 0), held(server, 1):
        rows = []

        def shown():
            rows[:] = server.get("/page/data", worker=1)[1]["requests"]
            return len(rows) == 2  # the page's data may be as old as PERIOD

        server.wait_for(shown, 60 * PERIOD)
        assert {row[0] for row in rows} == set(server.engine.live)


def test_responses_go_on_at_another_worker(server):
    clients = [
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) for port in server.ports
    ]
    with contextlib.ExitStack() as stack:
        first, second = map(stack.enter_context, clients)
        server.engine.says = list(b"Hello!")
        response = first.responses.create(model=MODEL, input="one", max_output_tokens=50)
        assert second.responses.retrieve(response.id) == response
        with second.responses.stream(
            model=MODEL, input="two", previous_response_id=response.id, max_output_tokens=50
        ) as stream:
            last = stream.get_final_response()
        assert last.output_text == "Hello!"
        prompt = server.tokenizer.decode(list(memoryview(server.engine.received[-1].ids).cast("i")), False)
        assert prompt.index("one") < prompt.index("Hello!") < prompt.index("two")
        server.engine.says, server.engine.hold_at = None, 3
        begun = first.responses.create(model=MODEL, input="hi", background=True)
        assert second.responses.cancel(begun.id).status == "cancelled"
        first.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            second.responses.retrieve(response.id)


def test_a_client_that_leaves_a_stream_of_the_main_process_ends_its_request(server):
    server.engine.hold_at = 3
    sock, _ = server.open_stream("/v1/responses", {"input": "hi", "max_output_tokens": 500}, worker=1)
    server.wait_for(lambda: server.engine.live)
    sock.close()
    server.wait_for(lambda: server.engine.aborted)


def test_an_error_of_the_main_process_is_handed_on(server):
    status, headers, body = server.request("GET", "/v1/responses/nobody", headers={"X-Request-ID": "r7"}, worker=1)
    assert (status, headers["X-Request-ID"]) == (404, "r7")
    assert b"response_not_found" in body
    status, _, body = server.request("POST", "/flush_cache?timeout=x", worker=1)
    assert status == 400
    assert b"timeout" in body


def test_an_answer_to_head_tells_how_long_the_main_processes_is(server):
    told, headers, body = server.request("HEAD", "/v1/responses/nowhere")
    shown = server.request("GET", "/v1/responses/nowhere")[2]
    assert (told, int(headers["Content-Length"]), body) == (404, len(shown), b"")


def test_a_target_that_names_its_host_is_handed_on(server):
    """As clients behind a proxy send it."""
    for path in ("http://example.com/v1/loads", "/v1/loads"):
        assert server.request("GET", path, worker=1)[0] == 200


def test_what_is_configured_holds_in_all(server):
    server.post_raw("/configure_logging", {"log_requests": True, "log_requests_level": 1})
    logs = [worker.services.manager.request_log for worker in (server.frontend, *server.workers)]
    assert [(log.enabled, log.level) for log in logs] == [(True, 1)] * 3
    server.post_raw("/configure_logging", {"log_requests": False})
    assert not any(log.enabled for log in logs)
    server.run(server.services.house.use_weights("/models/other", "v2"))
    server.services.weights.path, server.services.weights.version = "/models/other", "v2"
    for worker in (0, 1):
        assert server.get("/model_info", worker=worker)[1]["weight_version"] == "v2"
        answer = server.ok(GENERATE, {"text": "ab", "sampling_params": {"max_new_tokens": 1}}, worker=worker)
        assert answer["meta_info"]["weight_version"] == "v2"


def test_a_pause_ends_the_requests_of_all(server):
    with held(server, 0), held(server, 1):
        assert server.request("POST", "/pause_generation", {}, worker=1)[0] == 200
        server.wait_for(lambda: len(server.engine.aborted) == 2)
        assert server.request("POST", "/continue_generation", {}, worker=0)[0] == 200


def test_seeds_of_workers_differ(tmp_path):
    with Server(tmp_path, http_workers=2, random_seed=5) as server:
        for worker in (0, 1, 0, 1):
            server.ok(COMPLETIONS, {"prompt": "ab", "max_tokens": 1}, worker=worker)
        assert len({request.sampling.seed for request in server.engine.received}) == 4


def test_the_door_closes_everywhere_at_once(tmp_path):
    with Server(tmp_path, http_workers=2) as server:
        with held(server, 1) as sock:
            server.call(server.frontend.drain)
            for worker in (0, 1):
                assert server.post(COMPLETIONS, {"prompt": "ab"}, worker=worker)[0] == 503
                assert server.request("GET", "/health", worker=worker)[0] == 503
            assert server.run(server.frontend.drained(0.01)) is False
            server.engine.hold_at = math.inf
            assert events_of(dechunked(read_all(sock)))
        assert server.run(server.frontend.drained(60)) is True


def test_a_request_that_the_closing_door_may_have_missed_is_refused(tmp_path, monkeypatch):
    with Server(tmp_path, http_workers=2) as server:
        tally = server.workers[0].services.manager.tally
        take = tally.take

        def take_too_late(*arguments):
            server.frontend.drain()
            return take(*arguments)

        monkeypatch.setattr(tally, "take", take_too_late)
        assert server.post(COMPLETIONS, {"prompt": "ab", "max_tokens": 1})[0] == 503
        assert tally.total == 0


def test_names_are_given_back_where_all_has_been_tidied_up(tmp_path):
    tally = Tally(str(tmp_path / "tally"), 0, 2)
    assert tally.take_names(["one", "two"])
    shutil.rmtree(tmp_path / "tally")
    tally.give_names(["one", "two"])


def dechunked(raw):
    """What is left of an answer whose head and first chunks were read."""
    return re.sub(rb"(^|\r\n)[0-9a-f]+\r\n", b"", raw)[: -len(b"\r\n")]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_failure_ends_the_requests_of_all(is_known, tmp_path):
    """Also one that the main process has found itself."""
    with Server(tmp_path, http_workers=2) as server:
        with held(server, 0) as one, held(server, 1) as other:
            if is_known:
                server.call(server.services.manager.fail, "scheduler 0 was killed by SIGKILL")
            server.call(server.frontend.fail, "scheduler 0 was killed by SIGKILL")
            assert b"was killed by SIGKILL" in read_all(one)
            assert b"was killed by SIGKILL" in read_all(other)
        for worker in (0, 1):
            assert server.request("GET", "/health", worker=worker)[0] == 503


class Heard:
    def __init__(self):
        self.batches = []

    def send(self, batch):
        self.batches.append(batch)


def test_each_frontend_gets_its_own_text_and_signs_of_life():
    ends = [Heard() for _ in range(3)]
    frontends = Frontends(ends)
    deltas = tuple(TextDelta(rid, str(rid), pack_ids([EOS])) for rid in (4, 5, 7))
    frontends.send(TextBatch(9, deltas, 1.0, 2.0, 3.0))
    main, first, second = (end.batches for end in ends)
    assert main == [TextBatch(9, ())]
    assert first == [TextBatch(9, (deltas[0], deltas[2]), 1.0, 2.0, 3.0)]
    assert second == [TextBatch(9, (deltas[1],), 1.0, 2.0, 3.0)]
    frontends.send(TextBatch(10, deltas[:1]))
    assert len(first) == 2
    assert (len(main), len(second)) == (1, 1)
