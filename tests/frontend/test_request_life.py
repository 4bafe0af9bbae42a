"""How requests end that do not simply finish: clients that leave, aborts, failures, a full queue, shutting down."""

import concurrent.futures
import contextlib
import gc
import math
import socket
import threading
import time

import pytest
from frontend_harness import Server, events_of, send_request, strict_json

import srt.frontend.anthropic.messages as messages
import srt.frontend.openai.completions as completions
import srt.frontend.openai.responses as responses
import srt.frontend.services as services
import srt.frontend.streaming as streaming
import srt.frontend.words as words
from srt.chat_template import ChatTemplate
from srt.frontend.generation import Generation

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
LONG = {"prompt": "ab", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def tidy(server):
    """Whatever a test does, nothing is left of it."""
    yield
    server.engine.paused, server.engine.hold_at = False, math.inf
    server.wait_for(lambda: not server.engine.live)
    server.wait_for(lambda: not server.services.manager._live)
    assert not server.services.manager.tally._names
    server.engine.reset()


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


def rest_of(sock, data=b""):
    """All that still comes, the chunks' framing taken away."""
    while more := sock.recv(65536):
        data += more
        if data.endswith(b"\r\n0\r\n\r\n"):
            break
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            return b"".join(parts)
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


# ---- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"prompt": ["ab", "cd"], "n": 2}])
def test_leaving_a_stream_aborts_all_its_choices(server, extra):
    server.engine.step_s = 0.005
    sock, _ = server.open_stream(COMPLETIONS, {**LONG, **extra})
    choices = extra.get("n", 1) * (2 if "prompt" in extra else 1)
    server.wait_for(lambda: len(server.engine.live) == choices)
    rids = list(server.engine.live)
    before = server.services.metrics._counters["requests_aborted_total"]
    sock.close()
    server.wait_for(lambda: not server.engine.live)
    assert sorted(server.engine.aborted) == sorted(rids)
    counters = server.services.metrics._counters
    assert counters["requests_aborted_total"] - before == len(rids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LONG),
        (COMPLETIONS, {**LONG, "n": 4}),
        (CHAT, {"messages": HI, "ignore_eos": True}),
        (GENERATE, {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 900}}),
    ],
)
def test_leaving_without_stream(server, path, body):
    server.engine.step_s = 0.005
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        send_request(sock, path, body)
        server.wait_for(lambda: server.engine.live)
    server.wait_for(lambda: not server.engine.live)
    assert server.engine.aborted


def test_leaving_while_waiting_for_the_first_token(server):
    server.engine.paused = True
    socks = []
    for i in range(20):
        sock = socket.create_connection(("127.0.0.1", server.port))
        send_request(sock, GENERATE, {"text": f"wait {i}", "stream": True})
        socks.append(sock)
    server.wait_for(lambda: len(server.engine.live) == 20)
    for sock in socks:
        sock.close()
    server.wait_for(lambda: not server.engine.live)


def test_a_reset_connection(server):
    server.engine.step_s = 0.005
    sock, _ = server.open_stream(CHAT, {"messages": HI, "ignore_eos": True})
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()
    server.wait_for(lambda: not server.engine.live)
    assert server.engine.aborted


def test_a_connection_serves_again_after_a_stream(server):
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        for _ in range(3):
            send_request(sock, COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "stream": True})
            events = events_of(rest_of(sock))
            assert "".join(event["choices"][0]["text"] for event in events) == "abc"


def test_the_end_of_a_stream_is_seen_without_chunks(server):
    body = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
    head = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head % (COMPLETIONS.encode(), len(body)) + body)
        with sock.makefile("rb") as answer:
            data = answer.read()
    assert b"keep-alive" not in data
    assert data.endswith(b"data: [DONE]\n\n")


# ---- aborts ---------------------------------------------------------------------------------------------------------


def test_abort_goes_by_the_beginning_of_the_name(server, threads):
    server.engine.hold_at = 50
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 100}}
    one = threads.submit(server.stream, GENERATE, {**body, "rid": "a1"})
    part = threads.submit(server.stream, GENERATE, {**body, "rid": "a1-b"})
    others = [threads.submit(server.stream, GENERATE, {**body, "rid": rid}) for rid in ("a10", "ba1", "a")]
    server.wait_for(lambda: len(server.engine.live) == 5)
    assert server.request("POST", "/abort_request", {"rid": "a1", "abort_message": "enough"})[0] == 200
    for aborted in (one, part):
        last = aborted.result()[-1]["meta_info"]
        assert last["finish_reason"] == {"type": "abort", "message": "enough", "status_code": None, "err_type": None}
        assert last["completion_tokens"] <= 50
    server.engine.hold_at = math.inf
    for other in others:
        assert other.result()[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 100}


def test_abort_without_stream_is_an_answer(server, threads):
    server.engine.hold_at = 50
    generate = threads.submit(
        server.ok, GENERATE, {"text": "ab", "rid": "g", "sampling_params": {"max_new_tokens": 999}}
    )
    chat = threads.submit(server.ok, CHAT, {"messages": HI, "rid": "c", "n": 2, "ignore_eos": True})
    server.wait_for(lambda: len(server.engine.live) == 3)
    for rid in ("g", "c_1"):  # of the chat, only one choice
        server.post_raw("/abort_request", {"rid": rid})
    assert generate.result()["meta_info"]["finish_reason"]["type"] == "abort"
    server.wait_for(lambda: len(server.engine.live) == 1)
    server.post_raw("/abort_request", {"rid": "c"})
    assert [choice["finish_reason"] for choice in chat.result()["choices"]] == ["abort", "abort"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "abc", "prompt_logprobs": 1}),
        (CHAT, {"messages": HI, "prompt_logprobs": 1}),
        (GENERATE, {"text": "abc", "return_logprob": True, "logprob_start_len": 0}),
    ],
)
def test_abort_before_the_prompt_was_read(server, threads, path, body):
    server.engine.paused = True
    answer = threads.submit(server.ok, path, {**body, "rid": "r"})
    server.wait_for(lambda: server.engine.live)
    server.post_raw("/abort_request", {"rid": "r"})
    shown = str(answer.result())
    assert "abort" in shown
    assert "-0.5" not in shown


@pytest.mark.parametrize(
    ("path", "prompts"), [(GENERATE, {"text": ["ab", "cd"]}), (COMPLETIONS, {"prompt": ["ab", "cd"]})]
)
def test_abort_of_a_batch(server, threads, path, prompts):
    server.engine.hold_at = 50
    sampling = {"sampling_params": {"n": 2, "max_new_tokens": 999}} if path == GENERATE else {"n": 2, "max_tokens": 999}
    batch = threads.submit(server.ok, path, {**prompts, **sampling, "rid": "b"})
    server.wait_for(lambda: len(server.engine.live) == 4)
    assert server.post(GENERATE, {"text": "a", "rid": "b"})[1]["error"]["code"] == "duplicate_rid"
    server.post_raw("/abort_request", {"rid": "b_1"})  # one prompt
    server.wait_for(lambda: len(server.engine.live) == 2)
    server.post_raw("/abort_request", {"rid": "b_0_1"})  # one choice
    server.wait_for(lambda: len(server.engine.live) == 1)
    server.post_raw("/abort_request", {"rid": "b"})
    batch.result()


def test_abort_all(server, threads):
    server.engine.hold_at = 50
    running = [threads.submit(server.ok, COMPLETIONS, LONG) for _ in range(5)]
    server.wait_for(lambda: len(server.engine.live) == 5)
    server.post_raw("/abort_request", {"abort_all": True})
    assert all(one.result()["choices"][0]["finish_reason"] == "abort" for one in running)


def test_abort_of_nothing(server):
    assert server.request("POST", "/abort_request", {"rid": "unknown"})[0] == 200
    for body in ({}, {"rid": ""}, {"rid": None}, {"abort_all": False}):
        assert server.post("/abort_request", body)[0] == 400


def test_one_name_one_request(server, threads):
    server.engine.hold_at = 50
    body = {"text": "ab", "rid": "dup", "sampling_params": {"max_new_tokens": 100}}
    first = threads.submit(server.ok, GENERATE, body)
    server.wait_for(lambda: server.engine.live)
    status, answer = server.post(GENERATE, body)
    assert (status, answer["error"]["code"]) == (400, "duplicate_rid")
    assert server.post(GENERATE, {**body, "rid": "dup_0", "sampling_params": {"max_new_tokens": 1}})[0] == 200
    assert server.post(GENERATE, {"text": ["a", "b"], "rid": ["x", "dup"]})[0] == 400
    server.engine.hold_at = math.inf
    assert first.result()["meta_info"]["completion_tokens"] == 100
    assert server.ok(GENERATE, body)["meta_info"]["id"] == "dup"


# ---- failures -------------------------------------------------------------------------------------------------------


def test_an_early_failure_keeps_its_status(server):
    server.engine.fail_status = 503
    for path, body in ((COMPLETIONS, LONG), (CHAT, {"messages": HI, "n": 2}), (GENERATE, {"text": "ab"})):
        for stream in (False, True):
            status, answer = server.post(path, {**body, "stream": stream})
            assert status == 503
            assert answer["error"]["message"] == "out of luck"


def test_a_late_failure_ends_the_stream(server):
    server.engine.fail_status, server.engine.fail_after = 500, 4
    for path, body in ((COMPLETIONS, {**LONG, "n": 2}), (CHAT, {"messages": HI}), (GENERATE, {"text": "ab"})):
        *events, last = server.stream(path, body)
        assert events
        assert last.keys() == {"error"}
        assert last["error"]["message"] == "out of luck"


def test_the_engine_dies(tmp_path, threads):
    with Server(tmp_path) as server:
        server.engine.hold_at = 50
        streams = [server.open_stream(COMPLETIONS, LONG) for _ in range(3)]
        others = [threads.submit(server.post, COMPLETIONS, LONG) for _ in range(3)]
        server.wait_for(lambda: len(server.engine.live) == 6)
        server.call(server.frontend.fail, "scheduler 0 was killed by SIGKILL")
        for sock, data in streams:
            assert "SIGKILL" in events_of(rest_of(sock, data))[-1]["error"]["message"]
            sock.close()
        for one in others:
            status, answer = one.result()
            assert status == 500
            assert "SIGKILL" in answer["error"]["message"]
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("POST", COMPLETIONS), ("POST", "/flush_cache")):
            status, _, raw = server.request(method, path, LONG if method == "POST" else None)
            assert status == 503
            assert "SIGKILL" in strict_json(raw)["error"]["message"]
        server.call(server.frontend.fail, "again")


def test_draining(tmp_path, threads):
    with Server(tmp_path) as server:
        server.engine.hold_at = 50
        running = threads.submit(server.stream, COMPLETIONS, {**LONG, "max_tokens": 200})
        server.wait_for(lambda: server.engine.live)
        server.call(server.frontend.drain)
        assert server.run(server.frontend.drained(0.01)) is False
        for path, body in ((COMPLETIONS, LONG), (CHAT, {"messages": HI}), (GENERATE, {"text": "a"})):
            assert server.post(path, body)[0] == 503
        assert server.get("/ready")[0] == 503
        server.engine.hold_at = math.inf
        assert server.run(server.frontend.drained(60)) is True
        assert running.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.get("/health")[0] == 503
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port))


def test_draining_waits_for_long_answers_that_are_written(tmp_path, threads, monkeypatch):
    written, begun, may_end = completions.CompletionFormat.body, threading.Event(), threading.Event()

    def body(*arguments):
        begun.set()
        assert may_end.wait(60)
        return written(*arguments)

    monkeypatch.setattr(completions.CompletionFormat, "body", body)
    monkeypatch.setattr(services, "SMALL_ANSWER", 0)
    with Server(tmp_path) as server:
        asked = threads.submit(server.post, COMPLETIONS, {"prompt": "ab", "max_tokens": 2})
        assert begun.wait(60)
        server.call(server.frontend.drain)
        assert server.run(server.frontend.drained(0.01)) is False
        may_end.set()
        assert server.run(server.frontend.drained(60)) is True
        assert asked.result()[0] == 200


def test_a_turn_to_receive_may_come_when_all_is_closed(tmp_path):
    with Server(tmp_path) as server:
        pass
    server.services.manager._receive()


def test_being_told_to_end_is_no_failure(tmp_path, threads):
    with Server(tmp_path) as server:
        server.engine.hold_at = 50
        sock, data = server.open_stream(COMPLETIONS, LONG)
        other = threads.submit(server.post, COMPLETIONS, LONG)
        server.wait_for(lambda: len(server.engine.live) == 2)
        server.call(server.frontend.cut)
        with sock:
            last = events_of(rest_of(sock, data))[-1]
        status, answer = other.result()
        assert status == 503
        assert last["error"]["message"] == answer["error"]["message"]
        assert "was stopped" in answer["error"]["message"]
        assert server.get("/health")[0] == 200


# ---- load -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once(tmp_path, threads):
    with Server(tmp_path, max_running_requests=2, max_queued_requests=4) as server:
        server.engine.paused = True
        body = {"text": "ab", "sampling_params": {"max_new_tokens": 5}}
        answers = [threads.submit(server.post, GENERATE, body) for _ in range(30)]
        refused, accepted = [], []
        server.wait_for(lambda: sum(one.done() for one in answers) == 24)
        assert server.get("/health")[0] == 200
        assert server.get("/ready")[0] == 503
        server.engine.paused = False
        for one in answers:
            status, answer = one.result()
            (accepted if status == 200 else refused).append((status, answer))
        assert len(accepted) == 6
        assert {status for status, _ in refused} == {503}
        assert {answer["error"]["code"] for _, answer in refused} == {"queue_full"}
        assert server.post(GENERATE, {**body, "text": ["ab"] * 7})[0] == 503
        assert server.post(GENERATE, {**body, "text": ["ab"] * 6})[0] == 200


def test_many_streams_at_once(server, threads):
    def one(i):
        text = f"<{i}>"
        events = server.stream(COMPLETIONS, {"prompt": text, "max_tokens": 40})
        return "".join(event["choices"][0]["text"] for event in events) == (text * 40)[:40]

    assert all(threads.map(one, range(64)))


def test_a_big_prompt_delays_nobody(tmp_path):
    with Server(tmp_path, context_length=50_000, pool_tokens=50_000) as server:
        big = {"messages": [{"role": "user", "content": "lorem ipsum " * 100_000}], "max_tokens": 1}
        thread = threading.Thread(target=lambda: answers.append(server.post(CHAT, big, timeout=60)))
        answers, others = [], 0
        thread.start()
        while thread.is_alive():
            assert server.get("/health")[0] == 200
            others += 1
            time.sleep(0.01)
        assert answers[0][0] == 400
        assert answers[0][1]["error"]["code"] == "context_length_exceeded"
        assert others > 10  # not one before and one after


@pytest.mark.parametrize(
    ("path", "field", "where"),
    [
        (CHAT, "messages", (words, "chat_for_template")),
        ("/v1/messages", "messages", (messages, "chat_request")),
        ("/v1/responses", "input", (responses, "input_messages")),
    ],
)  # fmt: skip
def test_long_chats_are_read_beside_the_event_loop(server, monkeypatch, path, field, where):
    read, readers = getattr(*where), []

    def spy(*given):
        readers.append(threading.current_thread())
        return read(*given)

    monkeypatch.setattr(*where, spy)
    said = [{"role": "user", "content": ""}] * 3000
    assert server.post(path, {field: said, **({"max_tokens": 1} if field == "messages" else {})})[0] == 400  # too long
    assert [thread.name.startswith("words") for thread in readers] == [True]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{**HI[0], "name": "x" * 9999}]}, {"messages": [{**HI[0], "reasoning_content": "x" * 9999}]},
        {"messages": HI, "chat_template_kwargs": {"mood": "x" * 9999}},
    ],
)  # fmt: skip
def test_a_chat_is_as_long_as_all_that_its_template_may_show(tmp_path, monkeypatch, body):
    renderers = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **k: renderers.append(threading.current_thread()) or render(*a, **k)
    )
    template = "{{ messages[0].name }}{{ messages[0].reasoning_content }}{{ mood }}"
    with Server(tmp_path, template=template) as server:
        assert server.post(CHAT, body)[0] == 400
    assert [thread.name.startswith("words") for thread in renderers] == [True]


def test_a_short_chat_in_a_long_template_is_encoded_beside_the_event_loop(tmp_path, monkeypatch):
    encode, encoders = words.Words._encode, []
    monkeypatch.setattr(
        words.Words, "_encode", lambda *a: encoders.append((len(a[1]), threading.current_thread().name)) or encode(*a)
    )
    with Server(tmp_path, template="{{ messages[0].content * 100 }}") as server:
        for content in ("abc", "abcdefghij"):
            server.ok(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    assert [(length, name.startswith("words")) for length, name in encoders] == [(300, False), (1000, True)]


def test_a_slow_reader_gets_its_deltas_merged(server, monkeypatch):
    monkeypatch.setattr(streaming, "SOFT_LIMIT", 2000)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    body = {"text": ["abc"] * 8, "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}, "stream": True}
    send_request(sock, GENERATE, body)
    server.wait_for(lambda: server.engine.received)
    server.wait_for(lambda: not server.engine.live)  # the others went on without its reader
    server.wait_for(lambda: not server.services.manager._live)
    events = events_of(rest_of(sock))
    sock.close()
    assert len(events) < 8 * 1000 / 2
    last = {event["index"]: event for event in events}
    assert all(event["text"] == ("abc" * 334)[:1000] for event in last.values())
    assert len(last) == 8


def test_a_reader_that_stopped_loses_its_request(server, monkeypatch):
    monkeypatch.setattr(streaming, "SOFT_LIMIT", -1)
    monkeypatch.setattr(streaming, "HARD_LIMIT", 100)
    server.engine.step_s = 0.001
    sock, data = server.open_stream(COMPLETIONS, LONG)
    raw = rest_of(sock, data)
    sock.close()
    assert events_of(raw)[-1]["error"]["message"] == "The client reads too slowly."
    server.wait_for(lambda: server.engine.aborted)


@contextlib.contextmanager
def no_generation_left(server):
    """The collector comes seldom, and prompts are large."""

    def remaining():
        return [one for one in gc.get_objects() if type(one) is Generation]

    gc.collect()
    gc.disable()
    try:
        yield
        server.wait_for(lambda: not remaining())
    finally:
        gc.enable()


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"text": "abc", "sampling_params": {"max_new_tokens": 9}}),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 9, "n": 2}),
        (CHAT, {"messages": HI, "max_tokens": 9}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 9}),
    ],
)
def test_a_stream_leaves_nothing_to_the_garbage_collector(server, path, body, stays):
    with no_generation_left(server):
        server.engine.hold_at = math.inf if stays else 3
        sock, received = server.open_stream(path, body)
        with sock:
            while stays and not received.endswith(b"0\r\n\r\n"):
                assert (more := sock.recv(65536))
                received += more


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_leaves_nothing_to_the_garbage_collector(server, stream):
    with no_generation_left(server):
        server.engine.fail_status = 503
        assert server.request("POST", COMPLETIONS, {"prompt": "abc", "stream": stream})[0] == 503


def test_who_never_reads_loses_the_connection(server, monkeypatch):
    monkeypatch.setattr(streaming, "SOFT_LIMIT", 2000)
    monkeypatch.setattr(streaming, "HARD_LIMIT", 100)
    monkeypatch.setattr(streaming, "CUT_SECONDS", 0.1)
    body = {"text": ["abc"] * 64, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
    connections = server.frontend._http._runner.server
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        ours = sock.getsockname()
        send_request(sock, GENERATE, body)
        server.wait_for(lambda: server.engine.aborted)
        server.wait_for(
            lambda: ours not in [one.transport.get_extra_info("peername") for one in connections.connections]
        )
        data = b""
        while more := sock.recv(65536):
            data += more
    assert not data.endswith(b"0\r\n\r\n")


def test_an_answer_that_cannot_be_written_harms_no_other(server, threads, monkeypatch):
    events = completions.CompletionFormat.events

    def breaks_on_bad(self, generation, delta):
        assert delta.text != "!"
        return events(self, generation, delta)

    monkeypatch.setattr(completions.CompletionFormat, "events", breaks_on_bad)
    server.engine.step_s = 0.002
    good = threads.submit(server.stream, COMPLETIONS, {"prompt": "ab", "max_tokens": 100})
    *_, last = server.stream(COMPLETIONS, {"prompt": "abc!", "max_tokens": 100})
    assert last["error"]["message"] == "The answer could not be written."
    assert "".join(event["choices"][0]["text"] for event in good.result()) == "ab" * 50


def test_what_cannot_be_written_keeps_no_other_from_ending(server, monkeypatch):
    events = completions.CompletionFormat.events

    def breaks_on_bad(self, generation, delta):
        assert "!" not in delta.text
        return events(self, generation, delta)

    monkeypatch.setattr(completions.CompletionFormat, "events", breaks_on_bad)
    monkeypatch.setattr(streaming, "SOFT_LIMIT", -1)
    server.engine.hold_at = 3
    streams = [server.open_stream(COMPLETIONS, {**LONG, "prompt": prompt}) for prompt in ("abc!", "abcd")]
    server.engine.hold_at = 4
    server.wait_for(lambda: all(one.completion_tokens == 4 for one in server.services.manager.live))
    server.call(server.frontend.cut)
    for sock, data in streams:
        with sock:
            assert "was stopped" in events_of(rest_of(sock, data))[-1]["error"]["message"]


def test_a_tail_that_cannot_be_written_is_an_error(server, monkeypatch):
    def breaks(self, generations):
        raise RecursionError

    monkeypatch.setattr(completions.CompletionFormat, "tail", breaks)
    *_, last = server.stream(COMPLETIONS, {"prompt": "abc", "max_tokens": 3})
    assert last["error"]["message"] == "The answer could not be written."


def test_random_leavings(server):
    """Half the clients leave at some point; afterwards nothing is left anywhere (see `tidy`)."""

    def one(i):
        body = {"prompt": f"<{i}>", "max_tokens": 30, "n": 1 + i % 3, "rid": f"r{i}"}
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        send_request(sock, COMPLETIONS, {**body, "stream": i % 2 == 0})
        time.sleep(i % 7 * 0.003)
        if i % 4 < 2:
            sock.close()
            return True
        if i % 5 == 0:
            server.post_raw("/abort_request", {"rid": f"r{i}"})
        ok = sock.recv(15).startswith(b"HTTP/1.1 200")
        sock.close()
        return ok

    server.engine.step_s = 0.0005
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))
