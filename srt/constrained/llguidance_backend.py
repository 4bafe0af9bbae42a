"""L4's CPU side, each rank, and frontend: grammars by llguidance. Loads no torch.

It works without a clock, so that all ranks and the front door see the same grammar pass or fail; its limits bound what
one grammar may cost a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from srt.schema_rules import NOTHING_FITS, REFERS_ELSEWHERE, GrammarError
from srt.token_bytes import Vocabulary

LIMITS = LLParserLimits(max_items_in_row=6000, verbose_errors=False)
"""Enough for an object with a thousand optional properties."""

THREADS = 2
MAX_FAULT = 300
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_SENTENCES = {
    "NoExtensionBias": NOTHING_FITS,
    "Too many items": (
        "too many rules go on at once, or a text is forced that is too long or never ends: "
        "let rules begin differently, and each come to its end"
    ),
    "too many (expressions|states)|initial lexer configuration|grammar size|fuel exhausted": (
        "it is too large: write fewer alternatives and smaller repetitions"
    ),
    "Failed to generate regex for (integer|float) range": "bounds of numbers must lie between -10**18 and 10**18",
    "number out of range": "numbers must lie between -1e308 and 1e308",
    "Resource '.*' is not present": REFERS_ELSEWHERE,
}
"""Of what the library says about itself and not about the grammar, by how it begins."""
_REGEX_FAULT = re.compile(r"regex parse error:\n *(.*)\n[ ^]*\nerror: ")


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer. `encode` cuts what a grammar forces into the tokens it mostly comes as."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.tokens = list(vocabulary.table) + [b""] * (eos_token_id == len(vocabulary.table))
        self.special_token_ids = [token for token, special in enumerate(vocabulary.is_special) if special]
        self.eos_token_id = eos_token_id
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class LLGuidance:
    def __init__(self, vocabulary: Vocabulary) -> None:
        # Where a model has no EOS, what only ends is told by an id that no row of logits has.
        ends = list(vocabulary.eos_token_ids) or [len(vocabulary.table)]
        self._tokenizer = LLTokenizer(_Vocabulary(vocabulary, ends[0]), eos_token=ends)
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        self._executor = LLExecutor(THREADS)

    def check(self, text: str) -> None:
        """GrammarError as by `compile`, in less than half the time, but for what a parser's first step finds out."""
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, self._tokenizer, limits=LIMITS)
        if is_wrong:
            raise GrammarError(_short(messages[0]))

    def compile(self, text: str) -> CompiledGrammar:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        first_W = np.zeros(self._num_words, np.int32)
        if not matcher.is_error():  # it takes longest mostly, and copies begin with what it has found out
            matcher.unsafe_compute_mask_ptr(first_W.ctypes.data, first_W.nbytes)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        return CompiledGrammar(matcher, first_W)

    def fill(self, matchers: Sequence[LLGuidanceMatcher], bits_MW: np.ndarray) -> None:
        wide_MW = bits_MW
        if bits_MW.shape[1] != self._num_words:
            wide_MW = np.empty((len(bits_MW), self._num_words), np.int32)
        rows = []
        for row, matcher in enumerate(matchers):
            if matcher.first_W is None:
                rows.append((matcher.inner, row))
            else:
                wide_MW[row] = matcher.first_W
        if len(rows) == 1:  # no other thread need wake
            ((inner, row),) = rows
            inner.unsafe_compute_mask_ptr(wide_MW[row].ctypes.data, 4 * self._num_words)
        elif rows:
            self._executor.unsafe_compute_mask_ptr(rows, wide_MW.ctypes.data, 4 * self._num_words, len(wide_MW))
        if wide_MW is not bits_MW:
            bits_MW[:] = wide_MW[:, : bits_MW.shape[1]]


class CompiledGrammar:
    def __init__(self, matcher: LLMatcher, first_W: np.ndarray) -> None:
        self._matcher = matcher
        self._first_W = first_W

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._first_W)


class LLGuidanceMatcher:
    def __init__(self, inner: LLMatcher, first_W: np.ndarray) -> None:
        self.inner = inner
        self.first_W: np.ndarray | None = first_W  # the mask of a grammar's beginning, until a token is looked at

    def accept(self, token: int) -> None:
        self.first_W = None
        self.inner.consume_token(token)

    def look_ahead(self, token: int) -> bool:
        self.first_W = None
        return self.inner.try_consume_tokens([token]) == 1

    def look_back(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    def forced(self, most: int) -> tuple[list[int], int]:
        """Tokens that alone are in the mask, one after the other: where bytes are forced the mask has only the first
        token of those that the tokenizer makes of them.

        A single byte forces no token that is worth a draft, and is found out sooner.
        """
        tokens: list[int] = []
        while len(tokens) < most and len(self.inner.compute_ff_bytes()) > 1:
            forced = self.inner.compute_ff_tokens()[:1]
            if not forced or not self.look_ahead(forced[0]):
                break
            tokens += forced
        self.look_back(len(tokens))
        return tokens, len(tokens)

    @property
    def ended(self) -> bool:
        return self.inner.is_stopped()

    @property
    def fault(self) -> str:
        return _short(self.inner.get_error()) if self.inner.is_error() else ""


def _short(error: str) -> str:
    """Its first paragraph: what follows is a picture of the grammar. The commonest are said in words."""
    for pattern, sentence in _SENTENCES.items():
        if re.match(rf"(\w+ error: )?({pattern})", error):
            return sentence
    error = _UNIMPLEMENTED.sub(r"\1 cannot be enforced", _REGEX_FAULT.sub(r"the pattern `\1`: ", error))
    return " ".join(error.split("\n<state>")[0].split())[:MAX_FAULT]
