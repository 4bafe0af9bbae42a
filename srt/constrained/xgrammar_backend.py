"""L4's CPU side, each rank: grammars by xgrammar, for EBNF that llguidance does not read. Loads torch.

A compile here can be neither bounded nor interrupted, so the front door has tried each grammar in a process of its own
before (`srt/constrained/probe.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xgrammar

from srt.schema_rules import GrammarError
from srt.token_bytes import Vocabulary


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

    def compile(self, text: str) -> CompiledGrammar:
        if "(=" in text:
            raise GrammarError("look-ahead assertions are not enforced")
        try:
            return CompiledGrammar(self._compiler.compile_grammar(text))
        except RuntimeError as error:
            raise GrammarError(str(error).rpartition("error")[2].strip(" :\n")) from None

    def fill(self, matchers: Sequence[XGrammarMatcher], bits_MW: np.ndarray) -> None:
        bits = torch.from_numpy(bits_MW)
        for row, matcher in enumerate(matchers):
            matcher.fill(bits, row)


class CompiledGrammar:
    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._grammar = grammar

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._grammar)


class XGrammarMatcher:
    """Ends with EOS: that nothing else may follow is not told before."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._inner = xgrammar.GrammarMatcher(grammar)
        self.fault = ""

    def fill(self, bits: torch.Tensor, row: int) -> None:
        if self.ended or not self._inner.fill_next_token_bitmask(bits, row):
            bits[row] = -1  # all are allowed, says a matcher that leaves the mask alone

    def accept(self, token: int) -> None:
        if not self._inner.accept_token(token):
            self.fault = f"the token {token} does not follow the grammar"

    @property
    def ended(self) -> bool:
        return self._inner.is_terminated()
