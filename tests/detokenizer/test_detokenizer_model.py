"""The default model's tokens as text, against the `tokenizers` library, and through the real process."""

import asyncio
import os
import random
import signal

import msgspec
import pytest
import tokenizers
import zmq

from detokenizer.detokenizer import Detokenizer
from srt.config import ServerConfig
from srt.messages import Finish, Opening, TextBatch, TokenBatch, TokenDelta, pack_ids
from srt.process import Child, ChildSpec
from srt.token_bytes import TokenBytes
from srt.transport import Sender, pull

TEXT = "Ünïcödé, 日本語 and 🙂👩\u200d👩\u200d👧 don't  12345\n\n\t[  3,   4] हिन्दी e\u0301"


@pytest.fixture(scope="module")
def reference(default_model):
    return tokenizers.Tokenizer.from_file(str(default_model.tokenizer_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def token_bytes(default_model):
    return TokenBytes.from_folder(default_model.tokenizer_folder)


def shown_one_by_one(detokenizer, ids, skip_special_tokens=True):
    texts = []
    for index, token in enumerate(ids):
        opening = Opening(0, (), skip_special_tokens, False) if index == 0 else None
        finish = Finish("length") if index == len(ids) - 1 else None
        delta = TokenDelta(1, pack_ids([token]), opening, finish)
        texts.append(detokenizer.decode(TokenBatch(index, (delta,))).deltas[0].text)
    return texts


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_random_ids_give_what_the_library_decodes(token_bytes, reference, skip_special_tokens):
    rng = random.Random(11)
    detokenizer = Detokenizer(token_bytes)
    for _ in range(200):
        ids = [rng.randrange(len(token_bytes.table)) for _ in range(rng.randrange(1, 40))]
        ids[rng.randrange(len(ids))] = rng.randrange(20)  # the special tokens come first in this vocabulary
        shown = "".join(shown_one_by_one(detokenizer, ids, skip_special_tokens))
        assert shown == reference.decode(ids, skip_special_tokens=skip_special_tokens)


def test_a_text_comes_in_whole_characters(token_bytes, reference):
    ids = reference.encode(TEXT, add_special_tokens=False).ids
    shown = shown_one_by_one(Detokenizer(token_bytes), ids)
    assert "".join(shown) == TEXT
    assert sum(map(bool, shown)) > len(TEXT) // 4  # as it grows, not all at the end


def test_the_process_answers_each_step_in_order_until_its_parent_stops_it(default_model, endpoints, reference):
    ids = reference.encode(TEXT, add_special_tokens=False).ids
    spec = ChildSpec(
        title="detokenizer",
        config=ServerConfig(),
        endpoints=endpoints,
        model=default_model.model_config,
        folder=str(default_model.folder),
        tokenizer_folder=str(default_model.tokenizer_folder),
        weights="dummy",
        gguf_path=None,
    )

    async def serve():
        child = await Child.start("detokenizer.process:main", spec)
        try:
            await child.ready()
            os.kill(child.pid, signal.SIGINT)
            os.kill(child.pid, signal.SIGTERM)
            return await asyncio.to_thread(exchange)
        finally:
            await child.stop(60)
            assert await child.obituary() == f"detokenizer (pid {child.pid}) ended with exit code 0"

    def exchange():
        with zmq.Context() as context:
            inbound = pull(endpoints.frontend, context)
            outbound = Sender(endpoints.detokenizer, context)
            for step, token in enumerate(ids):
                opening = Opening(7, (), True, False) if step == 0 else None
                finish = Finish("length") if step == len(ids) - 1 else None
                outbound.send(TokenBatch(step, (TokenDelta(5, pack_ids([token]), opening, finish),)))
            answers = []
            while len(answers) < len(ids) and inbound.poll(60_000):
                answer = msgspec.msgpack.decode(inbound.recv(), type=TextBatch)
                answers += [answer] if answer.deltas else []
            assert inbound.poll(60_000), "an idle process gives no sign of life"
            assert msgspec.msgpack.decode(inbound.recv(), type=TextBatch).deltas == ()
            inbound.close()
            outbound._socket.close()
        return answers

    answers = asyncio.run(serve())
    assert [batch.step for batch in answers] == list(range(len(ids)))
    assert "".join(batch.deltas[0].text for batch in answers) == TEXT
    assert [batch.deltas[0].cached_tokens for batch in answers] == [7] + [-1] * (len(ids) - 1)
