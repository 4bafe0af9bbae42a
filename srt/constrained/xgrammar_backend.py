"""L4's CPU side, each rank: grammars by xgrammar, for EBNF that llguidance does not read. Loads torch.

A compile here can be neither bounded nor interrupted, so the front door has tried each grammar in a process of its own
before (`srt/constrained/probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xgrammar

from srt.schema_rules import NOTHING_FITS, GrammarError
from srt.token_bytes import Vocabulary

Encode = Callable[[str], list[int]]


class XGrammar:
    def __init__(self, vocabulary: Vocabulary) -> None:
        specials = zip(vocabulary.table, vocabulary.is_special, strict=True)
        info = xgrammar.TokenizerInfo(
            [b"" if special else text for text, special in specials],  # no text may be mistaken for one
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.table),
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = info.vocab_size
        self._encode = vocabulary.encode

    def compile(self, text: str) -> CompiledGrammar:
        if "(=" in text:
            raise GrammarError("look-ahead assertions are not enforced")
        try:
            compiled = CompiledGrammar(self._compiler.compile_grammar(text), self._encode)
        except RuntimeError as error:
            raise GrammarError(str(error).rpartition("error")[2].strip(" :\n")) from None
        first = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        compiled.matcher().fill(first, 0)
        if not first.any():
            raise GrammarError(NOTHING_FITS)
        return compiled

    def fill(self, matchers: Sequence[XGrammarMatcher], bits_MW: np.ndarray) -> None:
        bits = torch.from_numpy(bits_MW)
        for row, matcher in enumerate(matchers):
            matcher.fill(bits, row)


class CompiledGrammar:
    def __init__(self, grammar: xgrammar.CompiledGrammar, encode: Encode) -> None:
        self._grammar = grammar
        self._encode = encode

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._grammar, self._encode)


class XGrammarMatcher:
    """Ends with EOS: that nothing else may follow is not told before."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, encode: Encode) -> None:
        self._inner = xgrammar.GrammarMatcher(grammar)
        self._encode = encode
        self.fault = ""

    def fill(self, bits: torch.Tensor, row: int) -> None:
        if self.ended or not self._inner.fill_next_token_bitmask(bits, row):
            bits[row] = -1  # all are allowed, says a matcher that leaves the mask alone

    def accept(self, token: int) -> None:
        if not self._inner.accept_token(token):
            self.fault = f"the token {token} does not follow the grammar"

    def look_ahead(self, token: int) -> bool:
        return not self.ended and self._inner.accept_token(token)

    def look_back(self, count: int) -> None:
        if count:
            self._inner.rollback(count)

    def forced(self, most: int) -> tuple[list[int], int]:
        """The mask has all tokens that begin the text."""
        text = "" if self.ended else self._inner.find_jump_forward_string()
        # Its last token may go on.
        return self._encode(text)[:-1][:most] if text else [], 0

    @property
    def ended(self) -> bool:
        return self._inner.is_terminated()
