"""L2, each rank: what a committed token means: does it end its request, and what leaves for the detokenizer.

Stop strings are matched here, on bytes, so that every rank ends a request at the same step without a round trip.
"""

from __future__ import annotations

from collections.abc import Sequence

from srt.messages import Finish, Opening, Started, TokenBatch, TokenDelta, TokenLogprobs, joined
from srt.scheduler.request import Request
from srt.scheduler.schedule_batch import Logprobs, ScheduleBatch, StepResult


class Output:
    """Owns the deltas of the step that is being committed. `token_bytes[i]` are the bytes that token i stands for."""

    def __init__(self, token_bytes: Sequence[bytes], is_special: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._deltas: list[TokenDelta] = []
        self._committed = bytearray()
        # Totals since the start. Prompt and cached tokens count once a request has its first token.
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.finished = self.aborted = 0
        # Of drafts that were checked: how many, their tokens, and those of these that were right.
        self.drafts = self.drafted_tokens = self.accepted_draft_tokens = 0

    def token(self, request: Request, token: int, result: StepResult, index: int, grammar_ends: bool = False) -> None:
        """Appends the token; sets `request.finish` if it is the last one. `index` is its place in the result."""
        sampling = request.sampling
        id_bytes = token.to_bytes(4, "little")
        self._committed += id_bytes
        if sampling.max_new_tokens == 0:
            request.finish = Finish("length", num_retractions=request.num_retractions)
            self.finished += 1
            self._append(request, b"")
            return
        request.tokens += id_bytes
        self.generated_tokens += 1
        is_longest = len(request.tokens) == 4 * request.max_length
        if sampling.stop or token in request.stop_token_ids or is_longest or grammar_ends:
            request.finish = self._finish_of(request, token, grammar_ends)
            self.finished += request.finish is not None
        logprobs = None
        if sampling.logprobs >= 0:
            logprobs = _as_message(result.logprobs.row(index), sampling.logprobs, len(sampling.logprob_ids))
        self._append(request, id_bytes, logprobs)

    def prompt(self, batch: ScheduleBatch, requests: Sequence[Request], values: Logprobs) -> None:
        """Keeps what a step found of prompts until their first tokens are there."""
        begin = 0
        counts = batch.start + batch.length - batch.samples - batch.first_logit
        for request, count in zip(requests, counts.tolist(), strict=True):
            if count:
                request.prompt_logprobs.append(values.rows(slice(begin, begin + count)))
                begin += count

    def abort(self, request: Request, message: str, status: int = 0) -> None:
        request.finish = Finish("abort", message=message, status=status, num_retractions=request.num_retractions)
        self.aborted += 1
        request.prompt_logprobs.clear()
        self._append(request, b"")

    def take(self, step: int) -> TokenBatch:
        """All deltas since the last call, as one message."""
        batch = TokenBatch(step, tuple(self._deltas))
        self._deltas.clear()
        return batch

    def take_committed(self) -> bytes:
        """The ids committed since the last call, for the digest."""
        committed = bytes(self._committed)
        self._committed.clear()
        return committed

    def _finish_of(self, request: Request, token: int, grammar_ends: bool) -> Finish | None:
        sampling = request.sampling
        matched: int | bytes | None = None
        if sampling.stop:
            matched = self._matched_stop(request, token)
        if request.num_output >= sampling.min_new_tokens:
            if token in request.stop_token_ids:
                matched = token
            if matched is not None:
                return Finish("stop", matched, num_retractions=request.num_retractions)
        if grammar_ends:
            return Finish("stop", num_retractions=request.num_retractions)
        if request.num_tokens == request.max_length:
            return Finish("length", num_retractions=request.num_retractions)
        return None

    def _matched_stop(self, request: Request, token: int) -> bytes | None:
        """The stop string that this token completes; of several the one that begins first, then the longest."""
        sampling = request.sampling
        if self._is_special[token] and sampling.skip_special_tokens:
            return None
        seen = len(request.stop_tail)
        tail = request.stop_tail + self._token_bytes[token]
        request.stop_tail = tail[max(0, len(tail) - request.stop_tail_size) :]
        matches = []
        for stop in sampling.stop:
            # One that lies whole in the seen bytes came before min_new_tokens and counts for nothing.
            start = tail.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                matches.append((start, -len(stop), stop))
        return min(matches)[2] if matches else None

    def _append(self, request: Request, ids: bytes, logprobs: TokenLogprobs | None = None) -> None:
        if request.opened:
            self._deltas.append(TokenDelta(request.rid, ids, None, request.finish, logprobs))
        else:
            opening, of_prompt = self._open(request), _of_prompt(request)
            self._deltas.append(TokenDelta(request.rid, ids, opening, request.finish, logprobs, of_prompt))

    def _open(self, request: Request) -> Opening:
        request.opened = True
        sampling = request.sampling
        cached = max(request.cached_tokens, 0)
        if request.num_output > 0 or request.finish.reason != "abort":
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += cached
        return Opening(
            cached,
            sampling.stop,
            sampling.skip_special_tokens,
            sampling.no_stop_trim,
            Started(request.heard),
            request.restored_tokens,
        )


def _of_prompt(request: Request) -> TokenLogprobs | None:
    sampling, parts = request.sampling, request.prompt_logprobs
    if not parts:
        return None
    messages = [_as_message(part, sampling.prompt_logprobs, len(sampling.logprob_ids)) for part in parts]
    parts.clear()
    return joined(messages)


def _as_message(values: Logprobs, num_top: int, num_asked: int) -> TokenLogprobs:
    return TokenLogprobs(
        tuple(values.chosen.tolist()),
        tuple(map(tuple, values.top_ids[:, :num_top].tolist())),
        tuple(map(tuple, values.top[:, :num_top].tolist())),
        tuple(map(tuple, values.asked[:, :num_asked].tolist())) if num_asked else (),
    )
