"""A chat that goes on is given the ids that were read and written before, and what is new is tokenised."""

import asyncio

import pytest

from srt.chat_template import ChatTemplate
from srt.frontend.conversations import Conversations
from srt.frontend.words import Words
from srt.messages import TextDelta, pack_ids, unpack_ids
from srt.tokenization import Tokenizer

QUESTION = {"role": "user", "content": "Say hello."}
NEXT = {"role": "user", "content": "Größer, bitte 🌊"}


@pytest.fixture
def words(default_model):
    folder = default_model.tokenizer_folder
    words = Words(
        Tokenizer.from_folder(folder),
        ChatTemplate.from_folder(folder, None),
        default_model.model_config.vocab_size,
        default_model.model_config.eos_token_ids,
    )
    yield words
    words.close()


def encode(words, *messages, **options):
    return asyncio.run(words.encode_chat(list(messages), **options))


def letter_by_letter(words, text):
    """Ids that no tokenizer would choose, but a model may."""
    return [index for letter in text for index in words.tokenizer.encode(letter, False)]


@pytest.mark.parametrize("ended", [True, False])
def test_the_ids_of_an_answer_are_kept(words, ended):
    text = "Hello there, 海!"
    first = encode(words, QUESTION)
    ids = letter_by_letter(words, text)
    assert ids != words.tokenizer.encode(text, False)
    end = [words.tokenizer.eos_token_id] if ended else []
    words.was_said(first, TextDelta(1, text, pack_ids(ids + end)))
    second = encode(words, QUESTION, {"role": "assistant", "content": text}, NEXT)
    said = unpack_ids(first.ids).tolist() + ids
    rest = f"<|im_end|>\n<|im_start|>user\n{NEXT['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert unpack_ids(second.ids).tolist() == said + words.tokenizer.encode(rest, False)
    assert words.tokenizer.decode(unpack_ids(second.ids).tolist(), False) == second.text


def test_an_unfinished_answer_goes_on_where_it_was(words):
    ids = letter_by_letter(words, "Hello the")
    first = encode(words, QUESTION)
    words.was_said(first, TextDelta(1, "Hello the", pack_ids(ids)))
    answer = {"role": "assistant", "content": "Hello the"}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    second = encode(words, QUESTION, answer, **options)
    assert second.ids == first.ids + pack_ids(ids)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Hello", "Hello there"),  # a stop string was cut off
        ("Hello", "Hello<|im_start|>"),  # a special token is not shown
    ],
)
def test_ids_that_say_more_than_the_text_are_not_kept(words, text, hidden):
    first = encode(words, QUESTION)
    words.was_said(first, TextDelta(1, text, pack_ids(words.tokenizer.encode(hidden, False))))
    second = encode(words, QUESTION, {"role": "assistant", "content": text}, NEXT)
    assert unpack_ids(second.ids).tolist() == words.tokenizer.encode(second.text, False)


def test_another_namespace_knows_nothing_of_it(words):
    first = encode(words, QUESTION, namespace=b"a")
    words.was_said(first, TextDelta(1, "Hello", pack_ids(letter_by_letter(words, "Hello"))))
    second = encode(words, QUESTION, {"role": "assistant", "content": "Hello"}, NEXT, namespace=b"b")
    assert unpack_ids(second.ids).tolist() == words.tokenizer.encode(second.text, False)


def test_the_longest_beginning_is_found():
    said = Conversations(["<e>"])
    said.remember(b"", "q", "a", pack_ids([1, 2]))
    said.remember(b"", "qa<e>q", "a", pack_ids([1, 2, 3, 4]))
    assert said.recall(b"", "qa<e>qa<e>more") == (pack_ids([1, 2, 3, 4]), 7)
    assert said.recall(b"", "qa<e>other<e>") == (pack_ids([1, 2]), 2)
    assert said.recall(b"", "other<e>qa<e>") == (b"", 0)


def test_the_oldest_are_forgotten_when_there_are_too_many_tokens():
    said = Conversations(["<e>"], capacity=100)
    for number in range(50):
        said.remember(b"", str(number), "", pack_ids([number] * 10))
        said.remember(b"", str(number), "", pack_ids([number] * 10))  # again: it counts once
    known = [number for number in range(50) if said.recall(b"", f"{number}<e>")[1]]
    assert known == list(range(40, 50))
