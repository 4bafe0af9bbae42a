"""The requests that the serving benchmark sends: seeded, offline, and of exact length where ids can say it.

Completions are prompted with random token ids. Chats need text: words that are one token each in the vocabularies of
current models, so that lengths are right to a few per cent; the report tells what the server counted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

# Above the special tokens and the single bytes of a vocabulary, and within the smallest in use.
FIRST_ID, LAST_ID = 1000, 30000

_COMMON_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
"""
WORDS = _COMMON_WORDS.split()


@dataclass
class Conversation:
    """One client's requests, sent one after the other. Of a chat each carries the answers to those before it."""

    path: str
    prompts: list[Any]  # ids of a completion, or the user's texts of a chat
    output_lens: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("chat/completions")

    def body(self, turn: int, model: str) -> dict[str, Any]:
        """The request of this turn, greedy and of fixed length: nothing but speed may differ between servers."""
        body: dict[str, Any] = {"model": model}
        if self.is_chat:
            self.messages.append({"role": "user", "content": self.prompts[turn]})
            body["messages"] = self.messages
        else:
            body["prompt"] = self.prompts[turn]
        length = self.output_lens[turn]
        return body | {
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def hear(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)]


def _text(rng: random.Random, length: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def _length(rng: random.Random, most: int, range_ratio: float) -> int:
    """Uniform in [most * range_ratio, most]."""
    return rng.randint(max(1, int(most * range_ratio)), most)


def random_prompts(
    seed: int, *, num_prompts: int, input_len: int, output_len: int, range_ratio: float = 1.0
) -> list[Conversation]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [
        Conversation(
            "/v1/completions",
            [_ids(rng, _length(rng, input_len, range_ratio))],
            [_length(rng, output_len, range_ratio)],
        )
        for _ in range(num_prompts)
    ]


def nano(seed: int, *, num_prompts: int = 256) -> list[Conversation]:
    """nano-vllm's benchmark, number for number: random ids, 100 to 1,024 of them in and out."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(num_prompts)]
    return [Conversation("/v1/completions", [prompt], [rng.randint(100, 1024)]) for prompt in prompts]


def shared_prefix(
    seed: int,
    *,
    groups: int,
    prompts_per_group: int,
    system_len: int,
    question_len: int,
    output_len: int,
    ordered: bool,
) -> list[Conversation]:
    """Groups of prompts with one system prompt each; shuffled unless ordered."""
    rng = random.Random(seed)
    conversations = []
    for _ in range(groups):
        system = _ids(rng, system_len)
        for _ in range(prompts_per_group):
            conversations.append(Conversation("/v1/completions", [system + _ids(rng, question_len)], [output_len]))
    if not ordered:
        rng.shuffle(conversations)
    return conversations


def multi_turn(
    seed: int, *, conversations: int, turns: int, first_len: int, question_len: int, output_len: int
) -> list[Conversation]:
    """Chats whose history grows with what the server really answered."""
    rng = random.Random(seed)
    return [
        Conversation(
            "/v1/chat/completions",
            [_text(rng, first_len if turn == 0 else question_len) for turn in range(turns)],
            [output_len] * turns,
        )
        for _ in range(conversations)
    ]
