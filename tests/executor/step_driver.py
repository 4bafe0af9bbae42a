"""A small scheduler written apart from the real one, so that the executor is tested by its contract alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from srt.executor.model_runner import ModelRunner
from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import Draft, OpenedRow, ScheduleBatch, SharedPrefix, StepResult, TokenMasks

NO_DRAFTS: Mapping[int, Draft] = {}


@dataclass(eq=False)
class Tenant:
    """One request. `slots[i]` holds position i; the first `cached` of them were computed by another."""

    row: int
    tokens: list[int]  # prompt, then what came out
    prompt_len: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)
    cached: int = 0
    computed: int = 0
    told: int = 0  # slot table entries the executor has
    opened: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def decodes(self) -> bool:
        return len(self.output) > 0


def in_common(family: list[Tenant]) -> int:
    """Positions at the head that all have in the same slots."""
    shortest = min(len(tenant.slots) for tenant in family)
    return next((i for i in range(shortest) if len({tenant.slots[i] for tenant in family}) > 1), shortest)


class StepDriver:
    def __init__(self, runner: ModelRunner, *, pool_tokens: int, page_size: int, seed: int = 0):
        self.runner = runner
        self.page_size = page_size
        pages = list(range(1, pool_tokens // page_size + 1))
        random.Random(seed).shuffle(pages)
        self.free = pages
        self.steps = 0

    def tenant(self, row: int, prompt: list[int], sampling: SamplingParams, **extra: object) -> Tenant:
        return Tenant(row, list(prompt), len(prompt), sampling, **extra)  # type: ignore[arg-type]

    def share(self, tenant: Tenant, donor: Tenant, length: int, in_step: bool = False) -> None:
        """The tenant's first `length` positions, whole pages, are the donor's: a cache hit.

        With `in_step` it is the next step, of both, that computes them.
        """
        assert length % self.page_size == 0
        if in_step:
            self._reserve(donor, length)
        else:
            assert donor.computed >= length
        assert tenant.tokens[:length] == donor.tokens[:length]
        tenant.slots = donor.slots[:length]
        tenant.cached = tenant.computed = length

    def _reserve(self, tenant: Tenant, total: int) -> None:
        while len(tenant.slots) < total:
            page = self.free.pop()
            tenant.slots += range(page * self.page_size, (page + 1) * self.page_size)

    def plan(
        self, tenants: list[Tenant], chunk: int, drafts: Mapping[int, Draft] = NO_DRAFTS
    ) -> tuple[ScheduleBatch, list[Tenant]]:
        """Decode rows compute one token, and those of the `drafts`, by row, these too; the others up to `chunk` of
        their prompt. Also the tenant of each sampled token."""
        families = self._families([t for t in tenants if t.decodes and t.row not in drafts])
        ordered = [t for family in families for t in family]
        ordered += [t for t in tenants if t.row in drafts] + [t for t in tenants if not t.decodes]
        entries, sampling = [], []
        opened, start, length, first, samples, table_start, slots = [], [], [], [], [], [], []
        for t in ordered:
            if not t.opened:
                opened.append(
                    OpenedRow(t.row, np.array(t.tokens, np.int32), t.prompt_len, t.sampling, t.stop_token_ids)
                )
                t.opened = True
            size = 1 if t.decodes else min(chunk, t.prompt_len - t.computed)
            end = t.computed + size
            last = int(end >= t.prompt_len)
            tokens, certain = drafts.get(t.row, Draft())
            entries += [(t.row, end + place, token) for place, token in enumerate(tokens)]
            size, end, last = size + len(tokens), end + len(tokens), last + len(tokens) - certain
            sampling += [t] * last
            self._reserve(t, end)
            start.append(t.computed)
            length.append(size)
            samples.append(last)
            first.append(end - last)
            table_start.append(t.told)
            slots += t.slots[t.told : end]
            t.told = t.computed = end
        as_int = [np.array(x, np.int32) for x in ([t.row for t in ordered], start, length, first)]
        batch = ScheduleBatch(
            self.steps,
            tuple(opened),
            sum(t.decodes and t.row not in drafts for t in ordered),
            *as_int,
            np.array(samples, np.int32),
            np.array(table_start, np.int32),
            np.array(slots, np.int32),
            tuple(SharedPrefix(len(family), in_common(family)) for family in families if len(family) > 1),
            len(drafts),
            np.array(entries, np.int32).reshape(-1, 3).T.copy(),
        )
        self.steps += 1
        return batch, sampling

    def _families(self, decode: list[Tenant]) -> list[list[Tenant]]:
        """Those that have the first page in common; who is alone comes last."""
        families: dict[int, list[Tenant]] = {}
        for tenant in decode:
            families.setdefault(tenant.slots[0] if len(tenant.slots) >= self.page_size else -tenant.row, []).append(
                tenant
            )
        return sorted(families.values(), key=lambda family: len(family) == 1)

    def step(self, tenants: list[Tenant], chunk: int = 10**6, masks: TokenMasks | None = None) -> StepResult:
        batch, sampling = self.plan(tenants, chunk)
        launched = self.runner.forward(batch)
        self.runner.sample(launched, masks)
        result = self.runner.result(launched)
        assert len(result.tokens) == len(sampling)
        for tenant, token in zip(sampling, result.tokens.tolist(), strict=True):
            tenant.tokens.append(token)
        return result

    def check(self, tenants: list[Tenant], drafts: Mapping[int, Draft]) -> StepResult:
        """A step with drafts, whose rows must decode: each goes as far as its draft is what was sampled."""
        batch, sampling = self.plan(tenants, 1, drafts)
        launched = self.runner.forward(batch)
        self.runner.sample(launched, None)
        result = self.runner.result(launched)
        assert len(result.tokens) == len(sampling)
        tokens = iter(result.tokens.tolist())
        for tenant in dict.fromkeys(sampling):
            guesses, certain = drafts.get(tenant.row, Draft())
            sampled = [next(tokens) for _ in range(1 + len(guesses) - certain)]
            agreed = next(
                (i for i, (a, b) in enumerate(zip(sampled, guesses[certain:], strict=False)) if a != b),
                len(sampled) - 1,
            )
            tenant.tokens += [*guesses[:certain], *sampled[: agreed + 1]]
            tenant.computed = tenant.told = len(tenant.tokens) - 1
        return result

    def generate_drafted(self, tenants: list[Tenant], answers: list[list[int]], seed: int = 0) -> int:
        """Until all have their answers, with drafts of up to six tokens of these, now and then a wrong one; as certain
        counts what is right. The number of steps."""
        rng, steps = random.Random(seed), 0
        self.generate(tenants, 1)
        while going := [(t, a) for t, a in zip(tenants, answers, strict=True) if len(t.output) < len(a)]:
            drafts = {}
            for t, answer in going:
                tokens = answer[len(t.output) : len(answer) - 1][: rng.choice((0, 2, 6))]
                is_answer = t.output == answer[: len(t.output)] and t.sampling.logprobs < 0
                certain = rng.randrange(len(tokens) + 1) if is_answer else 0
                if tokens[certain:] and rng.random() < 0.5:
                    wrong = rng.randrange(certain, len(tokens))
                    tokens[wrong] = (tokens[wrong] + 1) % 50
                if tokens:
                    drafts[t.row] = Draft(tuple(tokens), certain)
            self.check([t for t, _ in going], drafts)
            steps += 1
        return steps

    def generate(self, tenants: list[Tenant], count: int, chunk: int = 10**6) -> list[list[int]]:
        while any(len(t.output) < count for t in tenants):
            self.step([t for t in tenants if len(t.output) < count], chunk)
        return [t.output for t in tenants]
