"""The three routes that generate: how each writes a request, and what its answer says, in one piece or streamed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pairs.reference import ARGUMENTS, Ask
from pairs.tiny_chat import TABLE

PROMPT_START = 33
"""From where /generate is asked to rate prompts. What is before may come from the cache, two pages of 16 as well."""

TOOL = {"type": "function", "function": {"name": "w", "parameters": ARGUMENTS, "strict": True}}


@dataclass
class Rating:
    """A token and what else was likely there, by the tokens' bytes."""

    token: bytes
    logprob: float
    top: dict[bytes, float]


@dataclass
class Choice:
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None
    matched: str | int | None = None
    ratings: list[Rating] = field(default_factory=list)
    retractions: int | None = None  # where the route says


@dataclass
class Answer:
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_ratings: list[Rating] = field(default_factory=list)


class Generate:
    name, letter, path = "generate", "g", "/generate"
    lacks = {"tools": "it has no messages"}

    def prompt_start(self, ask: Ask) -> int:
        return PROMPT_START

    def body(self, ask: Ask) -> dict[str, Any]:
        sampling = _sampling(ask, "max_new_tokens", "min_new_tokens", "sampling_seed")
        body = {"text": ask.prompt, "sampling_params": sampling, "stream": ask.stream}
        if max(ask.logprobs, ask.prompt_logprobs) >= 0:
            body |= {"return_logprob": True, "top_logprobs_num": max(ask.logprobs, ask.prompt_logprobs)}
        if ask.prompt_logprobs >= 0:
            body["logprob_start_len"] = PROMPT_START
        return body

    def read(self, ask: Ask, body: Any) -> Answer:
        bodies = body if isinstance(body, list) else [body]
        metas = [each["meta_info"] for each in bodies]
        answer = Answer(
            [self._choice(each["text"], meta) for each, meta in zip(bodies, metas, strict=True)],
            metas[0]["cached_tokens"],
            metas[0]["prompt_tokens"],
            sum(meta["completion_tokens"] for meta in metas),
            self._ratings(metas[0], "input"),
        )
        for each, meta in zip(bodies, metas, strict=True):
            assert len(each["output_ids"]) == meta["completion_tokens"]
        return answer

    def join(self, ask: Ask, events: list[Any]) -> Answer:
        """Each event has all that came before it."""
        last: dict[int, Any] = {}
        for event in events:
            before = last.get(event.get("index", 0))
            if before is not None:
                assert event["text"].startswith(before["text"]), "a text that was shown has changed"
                assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
                assert before["meta_info"]["finish_reason"] is None, "an event behind the last one"
            last[event.get("index", 0)] = event
        return self.read(ask, [last[index] for index in sorted(last)])

    def _choice(self, text: str, meta: Any) -> Choice:
        finish = meta["finish_reason"]
        ratings = self._ratings(meta, "output")
        return Choice(text, [], finish["type"], finish.get("matched"), ratings, meta["num_retractions"])

    def _ratings(self, meta: Any, kind: str) -> list[Rating]:
        chosen, top = (meta.get(f"{kind}_{what}_logprobs", []) for what in ("token", "top"))
        return [
            Rating(TABLE[token], value, {TABLE[other]: its for its, other, _ in others or ()})
            for (value, token, _), others in zip(chosen, top, strict=True)
        ]


class OpenAI:
    """What both of OpenAI's routes have in common."""

    def prompt_start(self, ask: Ask) -> int:
        return 1  # nothing rates the first token

    def _body(self, ask: Ask) -> dict[str, Any]:
        body = _sampling(ask, "max_tokens", "min_tokens", "seed") | {"stream": ask.stream}
        if ask.stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def _usage(self, body: Any) -> tuple[int, int, int]:
        usage = body["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], usage["completion_tokens"]

    def _by_choice(self, events: list[Any]) -> dict[int, list[Any]]:
        """Of each choice its events, the one with its end last and no other. Usage comes last of all."""
        *events, usage = events
        assert usage["choices"] == []
        assert usage["usage"] is not None
        choices: dict[int, list[Any]] = {}
        for event in events:
            assert event["usage"] is None
            (choice,) = event["choices"]
            choices.setdefault(choice["index"], []).append(choice)
        for each in choices.values():
            ends = [choice["finish_reason"] is not None for choice in each]
            assert ends == [False] * (len(ends) - 1) + [True], "one end, with the last chunk"
        return choices


class Completions(OpenAI):
    name, letter, path = "completions", "c", "/v1/completions"
    lacks = {"tools": "it has no messages"}

    def body(self, ask: Ask) -> dict[str, Any]:
        body = self._body(ask) | {"prompt": ask.prompt}
        if max(ask.logprobs, ask.prompt_logprobs) >= 0:
            body["logprobs"] = max(ask.logprobs, ask.prompt_logprobs)
        if ask.prompt_logprobs >= 0:
            body["echo"] = True
        return body

    def read(self, ask: Ask, body: Any) -> Answer:
        choices, ratings = [], [self._ratings(choice["logprobs"]) for choice in body["choices"]]
        answer = Answer(choices, *self._usage(body))
        for choice, each in zip(body["choices"], ratings, strict=True):
            if each and each[0].logprob is None:
                answer.prompt_ratings, each[:] = each[1 : answer.prompt_tokens], each[answer.prompt_tokens :]
            echo = ask.prompt if ask.prompt_logprobs >= 0 else ""
            assert choice["text"].startswith(echo)
            text = choice["text"].removeprefix(echo)
            choices.append(Choice(text, [], choice["finish_reason"], choice["matched_stop"], each))
        return answer

    def join(self, ask: Ask, events: list[Any]) -> Answer:
        choices = []
        for index, each in sorted(self._by_choice(events).items()):
            parts = [choice["logprobs"] for choice in each if choice["logprobs"] is not None]
            text = "".join(choice["text"] for choice in each)
            logprobs = {name: [*chain(*(part[name] for part in parts))] for name in parts[0]} if parts else None
            choices.append({**each[-1], "index": index, "text": text, "logprobs": logprobs})
        return self.read(ask, {"choices": choices, "usage": events[-1]["usage"]})

    def _ratings(self, logprobs: Any) -> list[Rating]:
        if logprobs is None:
            return []
        ends = [at + len(token) for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
        assert logprobs["text_offset"] == [0, *ends[:-1]][: len(ends)]
        return [
            Rating(_bytes(token), value, {_bytes(other): its for other, its in (top or {}).items()})
            for token, value, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            )
        ]


class Chat(OpenAI):
    name, letter, path = "chat", "m", "/v1/chat/completions"
    lacks: dict[str, str] = {}

    def body(self, ask: Ask) -> dict[str, Any]:
        body = self._body(ask) | {"messages": [{"role": "user", "content": ask.words}]}
        if ask.logprobs >= 0:
            body |= {"logprobs": True, "top_logprobs": ask.logprobs}
        if ask.prompt_logprobs >= 0:
            body["prompt_logprobs"] = ask.prompt_logprobs
        if ask.tools:
            body |= {"tools": [TOOL], "parallel_tool_calls": ask.parallel_calls}
            body["tool_choice"] = "required" if ask.must_call else "auto"
        return body

    def read(self, ask: Ask, body: Any) -> Answer:
        choices = []
        for choice in body["choices"]:
            message, reason = choice["message"], choice["finish_reason"]
            calls = message["tool_calls"] or []
            assert (reason == "tool_calls") <= bool(calls)
            reason = "stop" if reason == "tool_calls" else reason
            ratings = self._ratings((choice["logprobs"] or {}).get("content", ()))
            choices.append(Choice(message["content"] or "", calls, reason, choice["matched_stop"], ratings))
        rated = body.get("prompt_logprobs") or [None]
        assert rated[0] is None
        return Answer(choices, *self._usage(body), [self._prompt_rating(entries) for entries in rated[1:]])

    def join(self, ask: Ask, events: list[Any]) -> Answer:
        choices = []
        for index, each in sorted(self._by_choice(events).items()):
            deltas = [choice["delta"] for choice in each]
            assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
            calls: list[dict[str, Any]] = []
            for part in chain(*(delta.get("tool_calls") or () for delta in deltas)):
                if part["index"] == len(calls):
                    assert part["id"]
                    calls.append(part)
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            content = "".join(delta.get("content") or "" for delta in deltas)
            parts = [choice["logprobs"]["content"] for choice in each if choice["logprobs"] is not None]
            logprobs = {"content": [*chain(*parts)]} if parts else None
            message = {"content": content, "tool_calls": calls}
            choices.append({**each[-1], "index": index, "message": message, "logprobs": logprobs})
        return self.read(ask, {"choices": choices, "usage": events[-1]["usage"]})

    def _ratings(self, content: Iterable[Any]) -> list[Rating]:
        return [
            Rating(bytes(one["bytes"]), one["logprob"], {bytes(o["bytes"]): o["logprob"] for o in one["top_logprobs"]})
            for one in content
        ]

    def _prompt_rating(self, entries: dict[str, Any]) -> Rating:
        token, *_ = entries
        values = {TABLE[int(token)]: entry["logprob"] for token, entry in entries.items()}
        return Rating(TABLE[int(token)], values[TABLE[int(token)]], values)


ROUTES = (Generate(), Completions(), Chat())
REFUSED = {("chat", "prompt logprobs", "streaming"): "they come with the whole answer only"}


def _sampling(ask: Ask, max_tokens: str, min_tokens: str, seed: str) -> dict[str, Any]:
    wishes = {
        max_tokens: ask.max_tokens,
        min_tokens: ask.min_tokens,
        seed: ask.seed,
        "n": ask.n,
        "temperature": ask.temperature,
        "stop": list(ask.stop),
        "stop_token_ids": list(ask.stop_token_ids),
        "ignore_eos": ask.ignore_eos,
        "regex": ask.regex,
        "presence_penalty": ask.presence_penalty,
        "frequency_penalty": ask.frequency_penalty,
        "repetition_penalty": ask.repetition_penalty,
        "logit_bias": {str(token): value for token, value in ask.logit_bias},
    }
    return {name: value for name, value in wishes.items() if value not in (None, [], {})}


def _bytes(text: str) -> bytes:
    """A token as /v1/completions writes it."""
    if not text.startswith("bytes:"):
        return text.encode()
    return bytes(int(byte, 16) for byte in re.findall(r"\\x(..)", text))
