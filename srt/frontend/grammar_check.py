"""L1, frontend: what the door lets through, by the same library under the same limits as every rank's compiler."""

from __future__ import annotations

import re
from pathlib import Path

from srt.constrained.llguidance_backend import LLGuidance
from srt.constrained.probe import probe
from srt.frontend.constraints import MAX_TEXT, Form
from srt.frontend.grammar_text import GrammarTexts
from srt.messages import Grammar
from srt.schema_rules import GrammarError
from srt.token_bytes import Vocabulary

MAX_GRAMMAR = 4 * MAX_TEXT  # characters

_ROOT_RULE = re.compile(r"\broot\s*::=")


class GrammarCheck:
    """Called in threads. Without a `folder` of tokenizer.json what llguidance cannot read is refused."""

    def __init__(self, vocabulary: Vocabulary, folder: Path | None = None) -> None:
        special = {
            vocabulary.table[token].decode(): token for token, special in enumerate(vocabulary.is_special) if special
        }
        self._texts = GrammarTexts(special)
        self._llguidance = LLGuidance(vocabulary)
        self._eos_token_ids = vocabulary.eos_token_ids
        self._folder = folder

    def __call__(self, form: Form) -> Grammar:
        """GrammarError if the ranks would not take it. They refuse what is only seen when it is begun."""
        try:
            text = self._texts.of(form)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        if len(text) > MAX_GRAMMAR:  # it goes to every rank, with every request
            raise GrammarError("it becomes too large with its conditions and alternatives written out")
        if form.kind == "json_schema":
            self._llguidance.check(text)
        else:  # what a compiler refuses, another library may do
            self._llguidance.compile(text)
        return Grammar("llguidance", text)

    def has_second(self, form: Form) -> bool:
        """Whether another library may do what this one refuses."""
        return form.kind == "ebnf" and self._folder is not None and _ROOT_RULE.search(form.value) is not None

    def second(self, form: Form) -> Grammar:
        """Takes seconds. xgrammar enforces all of EBNF but look-ahead; of JSON schemas too little."""
        assert self._folder is not None
        probe(form.value, self._folder, self._eos_token_ids)
        return Grammar("xgrammar", form.value)
