"""What is said again is not read again, and what is said otherwise is."""

import asyncio

import msgspec
import pytest
from frontend_harness import Server

from srt.frontend import wishes
from srt.frontend.decoding import decode
from srt.frontend.errors import RequestError
from srt.frontend.protocol import Fields
from srt.frontend.wishes import Wishes


class Words:
    async def in_thread(self, function, *args):
        return function(*args)


@pytest.fixture
def made():
    return []


@pytest.fixture
def of(made):
    def make(said):
        made.append(msgspec.json.decode(said))
        if "bad" in made[-1]:
            raise RequestError("bad")
        return made[-1]

    known = Wishes(make, Words())
    return lambda body: asyncio.run(known.of(decode(body, Fields)))


def test_equal_fields_are_read_once(of, made):
    assert of(b'{"n": 1, "stop": ["a"]}') is of(b'{ "n":1,"stop":["a"] }')
    assert of(b'{"n": 2}') == {"n": 2}
    assert len(made) == 2


def test_errors_are_found_again(of, made):
    for _ in range(2):
        with pytest.raises(RequestError):
            of(b'{"bad": 1}')
    assert len(made) == 2


def test_neither_many_nor_long_ones_are_kept(of, made, monkeypatch):
    monkeypatch.setattr(wishes, "MOST_WISHES", 3)
    for n in (1, 2, 3, 4, 2, 3, 4, 1):
        of(b'{"n": %d}' % n)
    assert [wish["n"] for wish in made] == [1, 2, 3, 4, 1]
    long = b'{"s": "%b"}' % (b"x" * wishes.MOST_BYTES)
    assert of(long) == of(long)
    assert len(made) == 7


def test_requests_that_differ_in_little(tmp_path):
    with Server(tmp_path) as server:
        for text, tokens in (("abc", 3), ("xyz", 3), ("abc", 2), ("abc", 3)):
            answer = server.ok("/v1/completions", {"prompt": text, "max_tokens": tokens, "temperature": 0})
            assert answer["choices"][0]["text"] == text[:tokens]
        seeds = [request.sampling.seed for request in server.engine.received]
        assert len(set(seeds)) == 4
        for body in ({"prompt": "a", "n": 0}, {"n": 0}, {"n": 1}):
            assert [server.post("/v1/completions", body)[0] for _ in range(2)] == [400, 400]
