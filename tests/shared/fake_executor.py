"""A fake executor: a model that is a pure function, and a device that checks what it is asked to do.

The device behaves as one CUDA stream does: a launched step takes effect in the order of launching, and only once a
result behind it is asked for. Its K/V memory holds, slot by slot, the hash of the token prefix that the entry was
computed from; so attending to a slot that was reused too early, never written or matched wrongly is seen at once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import Copies, Logprobs, OpenedRow, ScheduleBatch, StepResult, TokenMasks

MODULUS = 2**61 - 1


class FakeModel:
    """The next token follows from the prefix, the request's seed and what is allowed, and from nothing else.

    A prefix is a number, `start` extended by each token. The upper half of a seed stands for an adapter: the same
    tokens have other K/V under another one, which is what namespaces keep apart.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...] = (), eos_one_in: int = 24) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.eos_one_in = eos_one_in

    def start(self, sampling: SamplingParams) -> int:
        return 1 + (sampling.seed >> 32)

    def extend(self, prefix: int, token: int) -> int:
        return (prefix * 1_000_003 + token + 7) % MODULUS

    def next_token(
        self,
        prefix: int,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        num_output: int,
        allowed: Callable[[int], bool] | None = None,
    ) -> int:
        """One in `eos_one_in` tokens is one of `stop_token_ids`; none is before there are `min_new_tokens`."""
        noise = zlib.crc32(b"%d %d" % (prefix, sampling.seed & 0xFFFFFFFF))
        likes_to_stop = stop_token_ids and noise % self.eos_one_in == 0
        token = stop_token_ids[noise % len(stop_token_ids)] if likes_to_stop else (noise >> 8) % self.vocab_size
        # Where a grammar allows nothing but what must not come yet, its word counts.
        for forbidden in (stop_token_ids if num_output < sampling.min_new_tokens else (), ()):
            for _ in range(self.vocab_size):
                if token not in forbidden and (allowed is None or allowed(token)):
                    return token
                token = (token + 1) % self.vocab_size
        raise AssertionError("no token is allowed")


@dataclass
class FakeLaunch:
    batch: ScheduleBatch
    copy: dict[str, bytes]  # the batch's arrays as they were at launch
    masks: TokenMasks | None = None
    tokens: list[int] = field(default_factory=list)
    sampled: bool = False
    executed: bool = False
    asked: bool = False
    prompt: Logprobs | None = None


class FakeExecutor:
    """Asserts all that `Executor` and `ScheduleBatch` promise. `num_pages` counts without the spare page 0."""

    def __init__(
        self,
        model: FakeModel,
        *,
        num_rows: int,
        context_length: int,
        num_pages: int,
        page_size: int,
        host_pages: int = 0,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.num_pages = num_pages
        self.context_length = context_length
        width = -(-context_length // page_size) * page_size
        self.slot_table = np.full((num_rows, width), -1, np.int64)
        self.token_table = np.full((num_rows, width), -1, np.int64)
        self.prefixes = np.full((num_rows, width), -1, np.int64)  # of the tokens up to each position
        self.kv = np.full((num_pages + 1) * page_size, -1, np.int64)
        self.host_kv = np.full((host_pages + 1) * page_size, -1, np.int64)
        self.tenants: dict[int, OpenedRow] = {}
        self.batches: list[ScheduleBatch] = []  # all ever launched
        self.most_unanswered = 0
        self._queue: deque[tuple[Callable[[FakeLaunch], None], FakeLaunch]] = deque()
        self._unanswered: list[FakeLaunch] = []

    # ---- the contract's calls -----------------------------------------------------------------------------------

    def forward(self, batch: ScheduleBatch) -> FakeLaunch:
        assert batch.step == len(self.batches) + 1, "steps are numbered one after the other"
        assert all(launch.sampled for launch in self._unanswered), "a step before this one was not sampled"
        self.batches.append(batch)
        launch = FakeLaunch(batch, {name: array.tobytes() for name, array in _arrays(batch)})
        self._unanswered.append(launch)
        self.most_unanswered = max(self.most_unanswered, len(self._unanswered))
        assert self.most_unanswered <= 2, "more than one step ahead"
        self._queue.append((self._run_forward, launch))
        return launch

    def sample(self, launched: FakeLaunch, masks: TokenMasks | None) -> None:
        assert launched is self._unanswered[-1], "only the last launched step can be sampled"
        assert not launched.sampled, "sampled twice"
        launched.sampled = True
        launched.masks = masks
        self._queue.append((self._run_sample, launched))

    def result(self, launched: FakeLaunch) -> StepResult:
        assert launched.sampled, "not sampled yet"
        assert launched is self._unanswered[0], "results are asked for once, in the order of launching"
        del self._unanswered[0]
        while not launched.executed:
            run, launch = self._queue.popleft()
            run(launch)
        return self._values(launched)

    # ---- the device's side --------------------------------------------------------------------------------------

    def _run_forward(self, launch: FakeLaunch) -> None:
        batch = launch.batch
        for name, array in _arrays(batch):
            assert array.tobytes() == launch.copy[name], f"{name} was changed after the launch"
        rows = list(zip(batch.row.tolist(), batch.start.tolist(), batch.length.tolist(), strict=True))
        self._check_shapes(batch, rows)
        if batch.copies is not None:
            self._copy(batch.copies)
        for opened in batch.opened:
            self._open(opened)
        offset = 0
        for (row, start, length), first in zip(rows, batch.table_start.tolist(), strict=True):
            self.slot_table[row, first : start + length] = batch.slots[offset : offset + start + length - first]
            offset += start + length - first
        for row, position, token in batch.draft.T.tolist():
            assert self.token_table[row, position] == -1, "a draft of what is known"
            self.token_table[row, position] = token
            self.prefixes[row, position] = self.model.extend(int(self.prefixes[row, position - 1]), token)
        self._compute(batch)
        launch.prompt = self._rate_prompts(batch)

    def _copy(self, copies: Copies) -> None:
        for slots, size in zip(copies, map(len, (self.kv, self.host_kv, self.host_kv, self.kv)), strict=True):
            assert slots.dtype == np.int32
            assert ((slots >= self.page_size) & (slots < size)).all(), "a slot outside its memory"
        for targets in (copies.saved_to, copies.loaded_to):
            assert len({*targets.tolist()}) == len(targets), "one slot is the target of two"
        self.host_kv[copies.saved_to] = self.kv[copies.saved_from]
        self.kv[copies.loaded_to] = self.host_kv[copies.loaded_from]

    def _check_shapes(self, batch: ScheduleBatch, rows: list[tuple[int, int, int]]) -> None:
        assert rows
        for name, array in _arrays(batch):
            assert array.dtype == np.int32
            assert array.shape == (len(rows),) or name in ("slots", "draft")
        assert len({row for row, _, _ in rows}) == len(rows), "a row appears twice"
        drafted = [np.sort(batch.draft[1, batch.draft[0] == row]).tolist() for row, _, _ in rows]
        assert batch.num_decode + batch.num_drafted <= len(rows)
        columns = zip(rows, batch.samples.tolist(), batch.first_logit.tolist(), batch.table_start.tolist(), strict=True)
        for i, ((_, start, length), samples, first_logit, table_start) in enumerate(columns):
            assert start >= 0
            assert length >= 1
            assert start + length <= self.context_length
            size = len(drafted[i])
            assert i >= batch.num_decode or (length == samples == 1), "decode rows compute and sample one token"
            if 0 <= i - batch.num_decode < batch.num_drafted:
                assert length == 1 + size > 1, "drafted rows compute one token and a draft"
            assert drafted[i] == list(range(start + length - size, start + length)), "drafts end their rows"
            assert size < length
            assert samples <= size + 1
            assert samples or not size, "a draft that nothing follows"
            assert start <= first_logit <= start + length - samples
            assert i >= batch.num_decode or first_logit == start, "one logit a decode row"
            assert table_start <= start, "the row's new positions need slots"
        assert len(batch.slots) == (batch.start + batch.length - batch.table_start).sum()
        opened = [opened.row for opened in batch.opened]
        assert len(set(opened)) == len(opened)
        assert set(opened) <= {row for row, _, _ in rows}, "a row was opened without work"

    def _open(self, opened: OpenedRow) -> None:
        row, num_tokens = opened.row, len(opened.tokens)
        assert opened.tokens.dtype == np.int32
        assert 0 < opened.prompt_len <= num_tokens
        self.tenants[row] = opened
        self.slot_table[row] = self.token_table[row] = self.prefixes[row] = -1
        self.token_table[row, :num_tokens] = opened.tokens
        prefix = self.model.start(opened.sampling)
        for position, token in enumerate(opened.tokens.tolist()):
            prefix = self.prefixes[row, position] = self.model.extend(prefix, token)

    def _compute(self, batch: ScheduleBatch) -> None:
        """Writes K/V, then attends: all rows at once, as arrays [rows, positions]."""
        position = np.arange(self.slot_table.shape[1])
        start, end = batch.start[:, None], (batch.start + batch.length)[:, None]
        seen, written = position < end, (position >= start) & (position < end)
        slots, prefixes = self.slot_table[batch.row], self.prefixes[batch.row]
        assert (prefixes[written] >= 0).all(), "an input token is not known yet"
        used = slots[seen]
        assert used.min() >= self.page_size, "a position has no slot, or the spare page's"
        assert used.max() < len(self.kv), "a slot outside the pool"
        first_of_page = slots[:, position - position % self.page_size]
        assert (first_of_page[seen] % self.page_size == 0).all(), "a page is not aligned"
        assert (slots == first_of_page + position % self.page_size)[seen].all(), "a page is not in one piece"
        self._check_shared(batch, slots)
        targets = slots[written]
        assert len(set(targets.tolist())) == len(targets), "two rows of one step write to the same slot"
        self.kv[targets] = prefixes[written]
        assert (self.kv[used] == prefixes[seen]).all(), "attends to another prefix's K/V"

    def _check_shared(self, batch: ScheduleBatch, slots: np.ndarray) -> None:
        begin = 0
        for rows, tokens in batch.shared:
            end = begin + rows
            assert rows > 1
            assert tokens > 0
            assert tokens % self.page_size == 0
            assert (batch.start[begin:end] >= tokens).all(), "a row shares what it writes"
            assert (slots[begin:end, :tokens] == slots[begin, :tokens]).all(), "rows of a group read other slots"
            begin = end
        assert begin <= batch.num_decode

    def _run_sample(self, launch: FakeLaunch) -> None:
        batch = launch.batch
        allowed = self._allowed(launch)
        assert len(batch.sampled_rows) == len(batch.sampled_positions) == batch.samples.sum()
        places = iter(zip(batch.sampled_rows.tolist(), batch.sampled_positions.tolist(), strict=True))
        for samples in batch.samples.tolist():
            follows = True  # from tokens that were said
            for left in range(samples - 1, -1, -1):
                row, position = next(places)
                guess = int(self.token_table[row, position])
                assert (guess == -1) == (left == 0), "samples a token that is known"
                token = self._choose(row, position, allowed.get(len(launch.tokens)) if follows else None)
                launch.tokens.append(token)
                if not follows:
                    # Whatever a device leaves here, nobody may build on it.
                    self.token_table[row, position] = self.prefixes[row, position] = -1
                    continue
                self.token_table[row, position] = token
                self.prefixes[row, position] = self.model.extend(int(self.prefixes[row, position - 1]), token)
                follows = token == guess
        launch.executed = True

    def _choose(self, row: int, position: int, allowed: Callable[[int], bool] | None) -> int:
        assert position < self.context_length, "a token beyond the context"
        tenant = self.tenants[row]
        prefix, num_output = int(self.prefixes[row, position - 1]), position - tenant.prompt_len
        return self.model.next_token(prefix, tenant.sampling, tenant.stop_token_ids, num_output, allowed)

    def _allowed(self, launch: FakeLaunch) -> dict[int, Callable[[int], bool]]:
        masks = launch.masks
        if masks is None:
            return {}
        assert masks.places.dtype == masks.bits.dtype == np.int32
        assert masks.bits.shape == (len(masks.places), -(-self.model.vocab_size // 32))
        assert masks.places.max() < launch.batch.samples.sum(), "a mask for a token that is not sampled"
        return {i: _bit_test(words) for i, words in zip(masks.places.tolist(), masks.bits.tolist(), strict=True)}

    def _values(self, launch: FakeLaunch) -> StepResult:
        tokens = np.array(launch.tokens, np.int32)
        rows = launch.batch.sampled_rows.tolist()
        asked = max((self.tenants[row].sampling.logprobs for row in rows), default=-1)
        logprobs = None if asked < 0 else fake_logprobs(tokens, asked, self.model.vocab_size)
        return StepResult(tokens, logprobs, launch.prompt)

    def _rate_prompts(self, batch: ScheduleBatch) -> Logprobs | None:
        tokens, asked = [], 0
        ends = batch.start + batch.length - batch.samples
        for row, first, end in zip(batch.row.tolist(), batch.first_logit.tolist(), ends.tolist(), strict=True):
            if first < end:
                tenant = self.tenants[row]
                assert end < tenant.prompt_len, "rates what was sampled"
                tokens.append(self.token_table[row, first + 1 : end + 1])
                asked = max(asked, tenant.sampling.prompt_logprobs)
        if not tokens:
            return None
        return fake_logprobs(np.concatenate(tokens), asked, self.model.vocab_size)


def fake_logprobs(tokens: np.ndarray, num_top: int, vocab_size: int) -> Logprobs:
    top_ids = (tokens[:, None] + np.arange(num_top, dtype=np.int32)) % vocab_size
    return Logprobs(fake_logprob(tokens), top_ids, fake_logprob(top_ids), np.zeros((len(tokens), 0), np.float32))


def fake_logprob(tokens: np.ndarray) -> np.ndarray:
    return -tokens.astype(np.float32) / 8


def _arrays(batch: ScheduleBatch) -> list[tuple[str, np.ndarray]]:
    names = ("row", "start", "length", "first_logit", "samples", "table_start", "slots", "draft")
    return [(name, getattr(batch, name)) for name in names]


def _bit_test(words: Sequence[int]) -> Callable[[int], bool]:
    return lambda token: bool(words[token // 32] >> token % 32 & 1)
