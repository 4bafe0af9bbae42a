"""A chat that goes on is given the ids that were read and written before, and what is new is tokenised."""

import asyncio
import itertools
import json
import os

import pytest

from srt.chat_template import ChatTemplate
from srt.frontend.conversations import Conversations
from srt.frontend.decoding import decode
from srt.frontend.protocol import Message
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
    return asyncio.run(words.encode_chat(decode(json.dumps(messages).encode(), list[Message]), **options))


ASKED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Øslo", "days": [1, 2]}}\n</tool_call>'

# Like those of models that think: of past turns only what follows the reasoning is shown.
THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip() }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{% endif %}{{ '<|im_start|>assistant\n<think>\n' }}"""
NOT_THINKING = THINKING.replace("<think>\n", "")


def with_template(default_model, source):
    model = default_model.model_config
    tokenizer = Tokenizer.from_folder(default_model.tokenizer_folder)
    return Words(tokenizer, ChatTemplate({"default": source}, {}), model.vocab_size, model.eos_token_ids)


def calls_back(arguments, content=None):
    """What a client sends after a call: the call as it got it or as it writes it itself, and the result."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        QUESTION,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 C"},
    ]


def common(words, first, second):
    """The text of the ids that both begin with."""
    pairs = zip(unpack_ids(first).tolist(), unpack_ids(second).tolist(), strict=False)
    same = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return words.tokenizer.decode(same, False)


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


AS_GIVEN = '{"city": "Øslo", "days": [1, 2]}'
REWRITTEN = [
    '{"city":"Øslo","days":[1,2]}',
    '{"city": "\\u00d8slo", "days": [1, 2]}',
    '{"days": [1, 2], "city": "Øslo"}',
]


@pytest.mark.parametrize("knows_tools", [False, True])
def test_a_call_that_comes_back_as_it_was_given_has_its_ids(words, default_model, knows_tools):
    words = with_template(default_model, NOT_THINKING) if knows_tools else words
    first = encode(words, QUESTION)
    ids = letter_by_letter(words, ASKED)
    words.was_said(first, TextDelta(1, ASKED, pack_ids(ids)))
    second = encode(words, *calls_back(AS_GIVEN))
    assert second.ids.startswith(first.ids + pack_ids(ids))
    assert words.tokenizer.decode(unpack_ids(second.ids).tolist(), False) == second.text


@pytest.mark.parametrize("arguments", REWRITTEN)
@pytest.mark.parametrize("canonical", [True, False])
def test_a_call_that_comes_back_rewritten_is_cached_up_to_there(words, arguments, canonical):
    first = encode(words, QUESTION)
    ids = words.tokenizer.encode(ASKED, False) if canonical else letter_by_letter(words, ASKED)
    words.was_said(first, TextDelta(1, ASKED, pack_ids(ids)))
    second = encode(words, *calls_back(arguments))
    assert words.tokenizer.decode(unpack_ids(second.ids).tolist(), False) == second.text
    cached = common(words, first.ids + pack_ids(ids), second.ids)
    assert cached.startswith(first.text)
    same = os.path.commonprefix([first.text + ASKED, second.text])
    if canonical:  # up to the token in which the texts part
        assert len(same) - len(cached) < 8
    # The turn after finds all of the second, whatever became of the first.
    answer = letter_by_letter(words, "It rains.")
    words.was_said(second, TextDelta(1, "It rains.", pack_ids(answer)))
    third = encode(words, *calls_back(arguments), {"role": "assistant", "content": "It rains."}, NEXT)
    assert third.ids.startswith(second.ids + pack_ids(answer))


def test_reasoning_that_is_not_shown_again_is_cached_up_to_there(default_model):
    words = with_template(default_model, THINKING)
    first = encode(words, QUESTION)
    thought = "Hm, a greeting.\n</think>\n\nHello there"
    words.was_said(first, TextDelta(1, thought, pack_ids(letter_by_letter(words, thought))))
    said = {"role": "assistant", "content": "Hello there"}
    second = encode(words, QUESTION, said, NEXT)
    shown = first.text.removesuffix("<think>\n")
    assert common(words, first.ids, second.ids) == shown
    assert words.tokenizer.decode(unpack_ids(second.ids).tolist(), False) == second.text
    again = letter_by_letter(words, "More.\n</think>\n\nBye")
    words.was_said(second, TextDelta(1, "More.\n</think>\n\nBye", pack_ids(again)))
    third = encode(words, QUESTION, said, NEXT, {"role": "assistant", "content": "Bye"}, NEXT)
    assert common(words, second.ids, third.ids) == second.text.removesuffix("<think>\n")
    words.close()


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
