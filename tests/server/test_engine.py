"""The engine inside a program: its answers, and that nothing is left of it. The weights are random."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_harness import ROOT, wait_until
from shared.python_path import python_path

from srt.config import ConfigError
from srt.engine import Engine
from srt.frontend.errors import RequestError
from srt.model_config import ModelError

FLAGS = {"load_format": "dummy", "dtype": "float32", "random_seed": 1, "max_total_tokens": 4096, "device": "cpu"}
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
ENDLESS = GREEDY | {"max_new_tokens": 3000}
PROMPT = "The sea is"


@pytest.fixture(scope="module")
def engine(small_model: str) -> Iterator[Engine]:
    before = children()
    with Engine(small_model, **FLAGS) as engine:
        yield engine
    assert children() == before


def children() -> dict[int, str]:
    """Command lines of this process's children."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it just ended
            pass
    return found


def test_one_prompt_gives_a_dict_and_many_a_list(engine):
    alone = engine.generate(PROMPT, GREEDY, return_prompt_token_ids=True)
    assert len(alone["output_ids"]) == alone["meta_info"]["completion_tokens"] == 12
    assert alone["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert alone["meta_info"]["timeline"]["tokenize"] > 0
    ids = alone["prompt_token_ids"]
    longer = GREEDY | {"max_new_tokens": 20}
    first, second = engine.generate(["Once upon a time", PROMPT], [GREEDY, longer])
    assert second["output_ids"][:12] == alone["output_ids"]
    assert (len(first["output_ids"]), len(second["output_ids"])) == (12, 20)
    assert engine.generate(input_ids=ids, sampling_params=GREEDY)["text"] == alone["text"]
    assert [one["text"] for one in engine.generate(input_ids=[ids], sampling_params=GREEDY)] == [alone["text"]]


def test_a_stream_grows_to_the_answer(engine):
    prompts = [PROMPT, "Once upon a time"]
    answers = engine.generate(prompts, GREEDY, return_logprob=True)
    texts, last = {0: "", 1: ""}, {}
    for event in engine.generate(prompts, GREEDY, stream=True, return_logprob=True):
        assert event["text"].startswith(texts[event["index"]])
        texts[event["index"]], last[event["index"]] = event["text"], event
    for index, answer in enumerate(answers):
        assert last[index]["text"] == answer["text"]
        assert last[index]["meta_info"]["timeline"]["tokenize"] > 0
        assert last[index]["output_ids"] == answer["output_ids"]
        assert last[index]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]
        assert len(last[index]["meta_info"]["output_token_logprobs"]) == 12


def test_async_calls_run_together(engine):
    async def main() -> None:
        calls = [engine.async_generate(PROMPT, GREEDY) for _ in range(5)]
        answers = await asyncio.gather(*calls)
        events = [event async for event in await engine.async_generate(PROMPT, GREEDY, stream=True)]
        assert {answer["text"] for answer in answers} == {events[-1]["text"]}

    asyncio.run(main())


def test_who_leaves_ends_the_request(engine):
    live = engine._services.manager._live
    stream = engine.generate(PROMPT, ENDLESS, stream=True)
    next(stream)
    stream.close()
    assert not live

    async def cancel() -> None:
        stream = await engine.async_generate(PROMPT, ENDLESS, stream=True)
        await anext(stream)
        await stream.aclose()
        assert not live
        task = asyncio.create_task(engine.async_generate(PROMPT, ENDLESS))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.async_generate(PROMPT, GREEDY)
        assert not live

    asyncio.run(cancel())
    # What has been aborted gives its memory back.
    wait_until(lambda: engine.flush_cache().ok, 20.0, lambda: "requests are still running")


def test_a_forgotten_stream_may_be_collected_in_the_engines_thread(engine):
    live = engine._services.manager._live
    gc.disable()
    try:
        stream = engine.generate(PROMPT, ENDLESS, stream=True)
        next(stream)
        assert live
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        engine._loop.call_soon_threadsafe(gc.collect)
        wait_until(lambda: not live, 20.0, lambda: "the request still runs")
    finally:
        gc.enable()


def test_threads_share_an_engine(engine):
    expected = engine.generate(PROMPT, GREEDY)["text"]
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(engine.generate, PROMPT, GREEDY) for _ in range(8)]
        assert {call.result()["text"] for call in calls} == {expected}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "`temperature` must be"),
        ({"prompt": "x", "sampling_params": {"heat": 1}}, "Unknown field `heat`"),
        ({"prompt": "x", "input_ids": [1]}, "Give one of"),
        ({}, "Give one of"),
        ({"input_ids": [10**9]}, "`input_ids` takes token ids between 0 and"),
        ({"prompt": ["x", "y"], "sampling_params": [{}]}, "`sampling_params` has 1 entries for 2 prompts"),
    ],
)
def test_what_cannot_be_served_is_said(engine, arguments, message):
    with pytest.raises(RequestError, match=message):
        engine.generate(**arguments)
    with pytest.raises(RequestError, match=message):
        next(engine.generate(**arguments, stream=True))


def test_flags_are_checked_before_anything_starts(small_model):
    before = children()
    with pytest.raises(ConfigError, match="--device"):
        Engine(small_model, device="tpu")
    with pytest.raises(ConfigError, match="takes no heat; .*tp_size"):
        Engine(small_model, heat=3)
    with pytest.raises(ConfigError, match="takes no api_key: it speaks no HTTP"):
        Engine(small_model, api_key="k")
    with pytest.raises(ConfigError, match="node 0"):
        Engine(small_model, tp_size=2, nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:5000")
    with pytest.raises(ModelError, match="/no/such/folder"):
        Engine("/no/such/folder")
    assert children() == before


@pytest.mark.slow
def test_a_death_is_told_and_shutdown_ends_what_runs(small_model):
    before = children()
    with Engine(small_model, **FLAGS) as engine:
        stream = engine.generate(PROMPT, ENDLESS, stream=True)
        next(stream)
        scheduler = next(pid for pid in children().keys() - before.keys() if "scheduler 0" in children()[pid])
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(RequestError, match="scheduler 0 .* was killed by SIGKILL"):
            list(stream)
        with pytest.raises(RequestError, match="was killed by SIGKILL"):
            engine.generate(PROMPT, GREEDY)
    assert children() == before
    with pytest.raises(RequestError, match="shut down"):
        engine.generate(PROMPT, GREEDY)
    engine.shutdown()


@pytest.mark.slow
def test_shutdown_ends_answers_on_their_way(small_model):
    before = children()
    engine = Engine(small_model, **FLAGS)
    started = threading.Event()
    answers = []

    def stream() -> None:
        for event in engine.generate(PROMPT, ENDLESS, stream=True):
            started.set()
            answers.append(event)

    def ask() -> None:
        """Until nobody is there any more, and through the very moment in which he goes."""
        with contextlib.suppress(RequestError):
            while True:
                engine.generate(PROMPT, GREEDY)

    threads = [threading.Thread(target=target, daemon=True) for target in (stream, *[ask] * 4)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    left = engine.generate(PROMPT, ENDLESS, stream=True)
    next(left)
    engine.shutdown()
    left.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert answers[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert children() == before


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_program_that_just_ends_leaves_nothing(small_model, tmp_path, ending):
    script = tmp_path / "program.py"
    script.write_text(
        f"from srt.engine import Engine\nengine = Engine({small_model!r}, **{FLAGS!r})\n"
        f"print(len(engine.generate({PROMPT!r}, {GREEDY!r})['output_ids']), flush=True)\n{ending}\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "TMPDIR": str(scratch)}
    # The pipe closes when the last process that has it has ended.
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "12\n", done.stderr
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3}.get(ending, -9)
    assert list(scratch.iterdir()) == []
