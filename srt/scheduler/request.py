"""L2, each rank: one request as the scheduler sees it. Lengths are computed from few stored integers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radix import Tenancy
from srt.messages import Finish, NewRequest, SamplingParams
from srt.scheduler.schedule_batch import Draft, Logprobs


@dataclass(slots=True, eq=False)
class Request:
    rid: int
    serial: int  # order of arrival: the last word of every sort
    namespace: bytes
    priority: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # the request's own, and EOS unless ignored
    tokens: bytearray  # int32 ids of the prompt and of the committed output
    prompt_len: int
    max_length: int  # of prompt and output
    length: int  # tokens, committed or in flight
    logits_from: int  # position of the next of the prompt's logits to compute, where its logprobs are wanted
    planned: int = 0  # positions whose K/V is computed or launched
    in_flight: int = 0  # launched batches that name this request
    synced: int = 0  # the executor's slot table is right for positions below this
    tenancy: Tenancy | None = None  # None while waiting
    finish: Finish | None = None
    cached_tokens: int = -1  # matched when first admitted; -1 before
    restored_tokens: int = 0  # of these, from host memory
    num_retractions: int = 0
    opened: bool = False  # the detokenizer has heard of it
    stop_tail: bytes = b""  # the text's last bytes, as many as may begin a stop string
    stop_tail_size: int = 0  # the most there are
    constrained: bool = False  # by a grammar
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of the prompt up to now, until its first token
    heard: float = 0.0  # its inbox's clock
    drafts: bool = False  # a drafter follows it
    draft: Draft = Draft()  # behind the committed tokens
    unsure: bool = False  # a draft in flight may be refused: how many tokens there are is not known

    @classmethod
    def from_message(
        cls, message: NewRequest, serial: int, eos_token_ids: tuple[int, ...], heard: float = 0.0
    ) -> Request:
        sampling = message.sampling
        prompt_len = len(message.ids) // 4
        # The logits at a position rate the token behind it.
        wanted_from = prompt_len if sampling.prompt_logprobs < 0 else max(1, sampling.prompt_logprobs_start)
        return cls(
            rid=message.rid,
            serial=serial,
            namespace=message.namespace,
            priority=message.priority,
            sampling=sampling,
            stop_token_ids=sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids),
            tokens=bytearray(message.ids),
            prompt_len=prompt_len,
            max_length=prompt_len + max(1, sampling.max_new_tokens),
            length=prompt_len,
            logits_from=min(wanted_from, prompt_len) - 1,
            stop_tail_size=max(map(len, sampling.stop), default=1) - 1,
            constrained=message.grammar is not None,
            heard=heard,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def has_begun(self) -> bool:
        """It has had memory, and may have lost it again."""
        return self.cached_tokens >= 0

    @property
    def wants_forward(self) -> bool:
        return self.finish is None and self.length < self.max_length and not self.unsure

    @property
    def num_uncomputed(self) -> int:
        """Tokens, committed or in flight, whose K/V nobody has launched yet; 1 for a row that decodes."""
        return self.length - self.planned

    @property
    def wants_prompt_logits(self) -> bool:
        return self.logits_from < self.prompt_len - 1

    @property
    def most_cached(self) -> int:
        """How many tokens need not be computed if they are cached: logits are computed anew."""
        return self.logits_from if self.wants_prompt_logits else self.length - 1

    @property
    def max_growth(self) -> int:
        """The most tokens whose K/V is not launched and not counted in `length`."""
        return self.max_length - self.length

    def draft_ahead(self, most: int, most_unsure: int, least: int) -> Draft:
        """What of the draft lies behind all tokens in flight, `most` tokens of it, `most_unsure` of them not certain;
        if these are fewer than `least`, only what is certain.

        Log-probabilities of a token want it sampled.
        """
        known = self.length - self.num_tokens
        tokens = self.draft.tokens[known : known + max(0, min(most, self.max_growth - 1))]
        certain = max(0, self.draft.certain - known) if self.sampling.logprobs < 0 else 0
        certain = min(certain, len(tokens))
        unsure = min(len(tokens) - certain, most_unsure)
        return Draft(tokens[: certain + (unsure if unsure >= least else 0)], certain)

    def key(self, num_tokens: int) -> bytes:
        return bytes(memoryview(self.tokens)[: 4 * num_tokens])

    def token_array(self) -> np.ndarray:
        return np.frombuffer(bytes(self.tokens), np.int32)
