"""Features of what stands around a request: what happens meanwhile, and how the server is configured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pairs.plain import FOR_EVER, NUMBERS_FOR_EVER, Plain
from pairs.reference import Ask, Reference, prompt_ids
from pairs.tiny_chat import EOS
from pairs.trial import RID, Trial
from server.server_harness import PATIENCE, wait_until

POOL_TOKENS = 1536
PAGE_SIZE = 16
CHUNK = 64
BASE = ("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "2048", "--schedule-policy", "fcfs")
"""Flags of all servers: whatever the pool holds is computed in one step, in the order in which it comes."""
ENOUGH = 12
"""Tokens, of all that run, after which one is taken away."""


class Abort(Plain):
    """The request would go on for long; it is taken away by its name while another runs beside it."""

    name = "abort"
    does = "1,000 tokens; `/abort_request` takes it away beside another"
    proof = "the beginning of the expected answer; the other's is whole; every slot is free or cached again"
    needs_queue = True

    def ask(self, ask: Ask, reference: Reference) -> Ask:
        if ask.pattern is None:
            return replace(ask, max_tokens=FOR_EVER, ignore_eos=True)
        pattern = ask.regex and NUMBERS_FOR_EVER
        bias = ((EOS, -100.0), *ask.logit_bias)
        return replace(ask, max_tokens=FOR_EVER, regex=pattern, parallel_calls=True, logit_bias=bias)

    def send_beside(self, trial: Trial) -> None:
        self._generated = trial.generated
        self._sibling = Ask(words=f"Not {trial.ask.words}", max_tokens=40)
        sampling = {"temperature": 0, "max_new_tokens": 40}
        self._beside = trial.send_beside(1, text=self._sibling.prompt, sampling_params=sampling)

    def meanwhile(self, trial: Trial) -> None:
        begun = lambda: trial.generated >= self._generated + ENOUGH or trial.is_over  # noqa: E731
        wait_until(begun, PATIENCE, lambda: "it never began")
        assert trial.server.post("/abort_request", {"rid": RID}).status == 200

    def check(self, trial: Trial) -> None:
        assert any(choice.reason == "abort" for choice in trial.answer.choices)
        assert trial.answer.completion_tokens < FOR_EVER * trial.ask.n
        assert self._beside.result()["text"] == trial.reference.choice(self._sibling).text
        trial.server.wait_idle()


class CacheHit(Plain):
    name = "cache hit"
    does = "the prompt was computed before"
    proof = "`cached_tokens` is all but the last token, in whole pages"

    def prepare(self, trial: Trial) -> None:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        trial.server.ask("/generate", text=trial.ask.prompt, sampling_params=sampling)

    def check(self, trial: Trial) -> None:
        """All but the last token, and no token whose logits are asked for; in whole pages."""
        if not trial.answer.completion_tokens:
            return  # it was taken away before it began
        count = len(prompt_ids(trial.ask.prompt)) - 1
        if trial.ask.prompt_logprobs >= 0:
            count = trial.route.prompt_start(trial.ask) - 1
        page = trial.server.info()["page_size"]
        assert trial.answer.cached_tokens == count // page * page


class Retraction(Plain):
    """Others begin with it that fill the pool, until the one that has least must give way: this one."""

    name = "retraction"
    does = "twelve others begin with it in a pool that is too small for all"
    proof = "memory ran short, the request gave way, the others are whole, every slot is free or cached again"
    needs_queue = True
    others, tokens = 12, 60

    def ask(self, ask: Ask, reference: Reference) -> Ask | None:
        """An answer that is over sooner would not be there when memory runs short."""
        if ask.max_tokens == FOR_EVER:
            return ask
        return ask if min(len(choice.tokens) for choice in reference.choices(ask)) >= 14 else None

    def prepare(self, trial: Trial) -> None:
        """A calm while, in which admission forgets its caution: it would let nobody in who might outgrow the pool."""
        sampling = {"max_new_tokens": 800, "temperature": 0, "ignore_eos": True}
        trial.server.ask("/generate", text="calm", sampling_params=sampling)

    def send_beside(self, trial: Trial) -> None:
        self._before = trial.retractions
        ask, info = trial.ask, trial.server.info()
        page, chunk = info["page_size"], info["chunked_prefill_size"]
        growth = self.others * self.tokens + ask.n * ask.max_tokens
        # Admission keeps a tenth of the growth free, and those whose prompts are through first generate already.
        ahead = self.others * POOL_TOKENS // (2 * (chunk - self.others)) if chunk < POOL_TOKENS else 0
        beside = int(0.11 * growth) + 8 + ahead + (100 if "abort" in trial.has else 0)
        own = len(prompt_ids(ask.prompt)) // page - 1 + ask.n  # pages: all but the last are shared
        whole = (POOL_TOKENS // page - own - -(-beside // page)) // self.others * page
        noise = np.random.default_rng(len(ask.words))
        # Their ends are spread over a page, so that hardly a step goes by without one that needs another.
        lengths = [whole - i * page // self.others for i in range(self.others)]
        sampling = {"max_new_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        prompts = [noise.integers(0x21, 0x7E, length).tolist() for length in lengths]
        self._beside = trial.send_beside(self.others, input_ids=prompts, sampling_params=sampling)

    def meanwhile(self, trial: Trial) -> None:
        wait_until(lambda: trial.retractions > self._before or trial.is_over, PATIENCE, lambda: "no retraction")

    def check(self, trial: Trial) -> None:
        assert trial.retractions > self._before
        known = [choice.retractions for choice in trial.answer.choices if choice.retractions is not None]
        assert not known or sum(known) > 0, "another one gave way"
        assert all(len(other["output_ids"]) == self.tokens for other in self._beside.result())
        trial.server.wait_idle()


class ChunkedPrefill(Plain):
    name = "chunked prefill"
    does = "`--chunked-prefill-size 64`, less than the prompt"
    proof = "the expected tokens"
    flags = ("--chunked-prefill-size", str(CHUNK))

    def check(self, trial: Trial) -> None:
        assert trial.server.info()["chunked_prefill_size"] == CHUNK < len(prompt_ids(trial.ask.prompt))


class Ranks(Plain):
    name = "tp 3"
    does = "`--tp-size 3`, in processes"
    proof = "three ranks, whose digests of all decisions are equal in the end"
    flags = ("--tp-size", "3")

    def check(self, trial: Trial) -> None:
        trial.server.wait_idle()
        assert len(trial.server.info()["ranks"]) == 3
        digests = lambda: {(rank["step"], rank["digest"]) for rank in trial.server.info()["ranks"]}  # noqa: E731
        wait_until(lambda: len(digests()) == 1, PATIENCE, lambda: f"ranks differ: {digests()}")


class Pages(Plain):
    name = "page size 16"
    does = "`--page-size 16`"
    proof = "asked again it finds whole pages, and says the same"
    flags = ("--page-size", str(PAGE_SIZE))

    def check(self, trial: Trial) -> None:
        """Whole pages are found again, and what was computed from them is the same."""
        if "abort" in trial.has:
            return
        again = trial.again(prompt_logprobs=-1, stream=False)
        assert again.cached_tokens == (len(prompt_ids(trial.ask.prompt)) - 1) // PAGE_SIZE * PAGE_SIZE
        assert [trial.text_of(choice) for choice in again.choices] == [choice.text for choice in trial.expected]


class NoOverlap(Plain):
    name = "overlap off"
    does = "`--disable-overlap-schedule`"
    proof = "the expected tokens"
    flags = ("--disable-overlap-schedule",)

    def check(self, trial: Trial) -> None:
        assert trial.server.info()["disable_overlap_schedule"]
