"""Features that are fields of a request.

A later one may look at what those before it have made of the answer, so that what it wishes changes that. Penalties and
logit_bias have hardly more of an oracle than the reference's prediction, token by token, which every answer is compared
with.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import regex
from pairs.plain import FOR_EVER, NUMBERS, TOLERANCE, Plain, if_it_counts
from pairs.reference import ARGUMENTS, Ask, Reference, prompt_ids
from pairs.routes import Rating
from pairs.tiny_chat import EOS, TABLE
from pairs.trial import Trial

NUM_TOP = 3


class Tools(Plain):
    name = "tools"
    does = "`tools` with one strict function, `tool_choice` `required`"
    proof = "arguments parse and `jsonschema` validates them; a call that was cut is the beginning of the expected one"

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        return replace(ask, tools=True, max_tokens=160)

    def check(self, trial: Trial) -> None:
        """Calls that are whole can be read and fit the function's schema; one that was cut is the beginning of such."""
        for choice, expected in zip(trial.answer.choices, trial.expected, strict=True):
            assert choice.calls or choice.text or choice.reason == "abort"
            assert not trial.ask.must_call or choice.text == "" or choice.reason == "abort"
            wanted = re.findall(r'"arguments": ([^}]*\}?)', expected.text)
            said = [call["function"]["arguments"] for call in choice.calls]
            assert [call["function"]["name"] for call in choice.calls] == ["w"] * len(said)
            assert said[:-1] == wanted[: len(said)][:-1]
            assert not said or wanted[len(said) - 1].startswith(said[-1])
            for arguments in said if choice.reason == "stop" else said[:-1]:
                jsonschema.validate(json.loads(arguments), ARGUMENTS)


class Grammar(Plain):
    name = "grammar"
    does = "`regex`"
    proof = "the whole answer matches, a cut one partially, by the `regex` package"

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        return replace(ask, regex=NUMBERS)

    def check(self, trial: Trial) -> None:
        for choice in trial.answer.choices:
            if not choice.calls:
                is_whole = choice.reason == "stop" and choice.matched in (None, EOS)
                assert regex.fullmatch(trial.ask.regex, choice.text, partial=not is_whole), choice.text


class Seed(Plain):
    name = "seed"
    does = "temperature 0.8 and a seed"
    proof = "asked again it says the same"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        return if_it_counts(ask, replace(ask, temperature=0.8, seed=20261130), reference)

    def check(self, trial: Trial) -> None:
        if "abort" not in trial.has:
            again = trial.again()
            assert [trial.text_of(choice) for choice in again.choices] == [e.text for e in trial.expected]


class Choices(Plain):
    name = "n > 1"
    does = "three choices"
    proof = "as many come, each the expected one; the prompt counts once"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        many = replace(ask, n=3)
        differ = len({choice.text for choice in reference.choices(many)}) > 1
        return many if differ == (ask.temperature > 0) else None

    def check(self, trial: Trial) -> None:
        assert len(trial.answer.choices) == 3
        assert trial.answer.prompt_tokens == len(prompt_ids(trial.ask.prompt)), "the prompt counts once"


class Penalties(Plain):
    name = "penalties"
    does = "presence, frequency and repetition penalty, such that the answer changes"
    proof = "the expected tokens, which are the best of recomputed and then penalised logits"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        wishes = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.4}
        return if_it_counts(ask, replace(ask, **wishes), reference)


class LogitBias(Plain):
    name = "logit_bias"
    does = "-100 for a token that came, such that the answer changes"
    proof = "the token is nowhere; the expected tokens come instead"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        """Forbids the token that came where the second choice was."""
        plain = reference.choice(ask)
        if len(plain.free) < 2:
            return None
        ban = (plain.tokens[plain.free[1]], -100.0)
        return if_it_counts(ask, replace(ask, logit_bias=(*ask.logit_bias, ban)), reference)

    def check(self, trial: Trial) -> None:
        (*_, (token, _)) = trial.ask.logit_bias
        for choice in trial.answer.choices:
            assert TABLE[token] not in [rating.token for rating in choice.ratings]


class MinTokens(Plain):
    name = "min_tokens"
    does = "a stop token or EOS that comes, and a bound behind it"
    proof = "so many tokens"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        """The answer would end by a stop token, or by EOS where calls or a grammar are over, and must go on."""
        if ask.max_tokens == FOR_EVER:
            return replace(ask, min_tokens=FOR_EVER)
        if ask.pattern is None:
            plain = reference.choice(ask)
            at = next((i for i in plain.free[3:] if plain.tokens[i] not in plain.tokens[:i]), len(plain.tokens))
            if at + 4 > len(plain.tokens):
                return None
            ends = replace(ask, stop_token_ids=(plain.tokens[at],))
        else:
            ends = replace(ask, parallel_calls=True, logit_bias=((EOS, 40.0), *ask.logit_bias))
        least = len(reference.choice(ends).tokens) + 2
        return if_it_counts(ends, replace(ends, min_tokens=min(least, ends.max_tokens)), reference)

    def check(self, trial: Trial) -> None:
        """A grammar that can only end does, and who takes a request away does not ask."""
        for choice, expected in zip(trial.answer.choices, trial.expected, strict=True):
            if choice.reason != "abort" and not trial.ask.regex:
                assert len(expected.tokens) >= trial.ask.min_tokens
        if trial.ask.n == 1 and trial.answer.choices[0].reason != "abort" and not trial.ask.regex:
            assert trial.answer.completion_tokens >= trial.ask.min_tokens


class Stop(Plain):
    name = "stop strings"
    does = "two characters of the second half, and a string that only begins in the answer"
    proof = "no stop in the text, the right one is named, nothing behind it"

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        """Two characters from the second half of the answer, and one more string that only begins in it."""
        if ask.max_tokens == FOR_EVER:
            return replace(ask, stop=tuple(f"{chr(first)}\x00" for first in range(0x30, 0x40)))
        text = reference.choice(ask).text
        places = range(max(4, len(text) // 2), len(text) - 1)
        ends = [text[at : at + 2] for at in places if text.find(text[at : at + 2]) == at]
        stop = next((end for end in ends if "\ufffd" not in end), None)
        if stop is None:
            return None
        wanted = replace(ask, stop=(stop, f"{text[1:3]}\x00"))
        return wanted if ask.must_call else if_it_counts(ask, wanted, reference)

    def check(self, trial: Trial) -> None:
        if trial.ask.must_call:
            return  # a stop must not cut what is to be JSON: Tools' oracle sees to that
        for choice in trial.answer.choices:
            assert not any(stop in choice.text for stop in trial.ask.stop)
        if "abort" not in trial.has:
            assert trial.answer.choices[0].matched == trial.expected[0].matched


class Logprobs(Plain):
    name = "logprobs"
    does = "three alternatives"
    proof = "every token's value and the best three are transformers' to 1e-3"

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        return replace(ask, logprobs=NUM_TOP)

    def check(self, trial: Trial) -> None:
        """One for each token, of all tokens, also where the text was cut."""
        for choice, expected in zip(trial.answer.choices, trial.expected, strict=True):
            count = len(choice.ratings)
            assert choice.reason == "abort" or count == len(expected.tokens)
            check_ratings(choice.ratings, expected.tokens[:count], expected.logprobs_TV)
        assert sum(len(choice.ratings) for choice in trial.answer.choices) == trial.answer.completion_tokens


class PromptLogprobs(Plain):
    name = "prompt logprobs"
    does = "three alternatives; on `/generate` from position 33 on"
    proof = "the same, of all of the prompt's tokens asked for"

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        return replace(ask, prompt_logprobs=NUM_TOP)

    def check(self, trial: Trial) -> None:
        start, ids = trial.route.prompt_start(trial.ask), prompt_ids(trial.ask.prompt)
        ratings = trial.answer.prompt_ratings
        if not trial.answer.completion_tokens:
            return  # it was taken away before it began
        assert len(ratings) == len(ids) - start
        check_ratings(ratings, ids[start:], trial.reference.prompt_logprobs(trial.ask)[start - 1 :])


def check_ratings(said: list[Rating], tokens: list[int], expected_TV: np.ndarray) -> None:
    ids = {piece: token for token, piece in enumerate(TABLE)}
    assert [rating.token for rating in said] == [TABLE[token] for token in tokens]
    for rating, token, expected_V in zip(said, tokens, expected_TV, strict=False):
        assert abs(rating.logprob - expected_V[token]) < TOLERANCE
        best = np.sort(expected_V)[-NUM_TOP:]
        top = sorted(rating.top.values())[-NUM_TOP:]
        assert np.allclose(top, best, atol=TOLERANCE, rtol=0)
        assert all(abs(value - expected_V[ids[piece]]) < TOLERANCE for piece, value in rating.top.items())


class Streaming(Plain):
    """Its chunks are joined where they come, and judged there: one head, one end, nothing behind."""

    name = "streaming"
    does = "`stream`"
    proof = "one beginning and one end of each choice, usage last; the joined chunks are the answer in one piece"

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        return replace(ask, stream=True)

    def check(self, trial: Trial) -> None:
        """All chunks say what the answer in one piece says."""
        if "abort" in trial.has:
            return
        whole, streamed = trial.again(stream=False), trial.answer
        for one, other in zip(streamed.choices, whole.choices, strict=True):
            assert (one.text, one.reason, one.matched) == (other.text, other.reason, other.matched)
            assert [call["function"] for call in one.calls] == [call["function"] for call in other.calls]
            assert [rating.token for rating in one.ratings] == [rating.token for rating in other.ratings]
        assert streamed.completion_tokens == whole.completion_tokens
        assert streamed.prompt_tokens == whole.prompt_tokens
