"""EBNF that llguidance does not read: tried in a process of its own, then followed by xgrammar."""

import numpy as np
import pytest
from walk import EOS, TABLE, VOCABULARY

from srt.constrained import probe as probing
from srt.constrained.probe import probe
from srt.schema_rules import GrammarError

pytestmark = pytest.mark.slow  # it imports torch and transformers

GRAMMAR = 'root ::= "a" # one of two\n  | "b" [0-9]{2}'


@pytest.fixture(scope="module")
def backend():
    from srt.constrained.xgrammar_backend import XGrammar

    return XGrammar(VOCABULARY)


def allowed(backend, matcher):
    bits = np.zeros((1, -(-len(TABLE) // 32)), np.int32)
    backend.fill([matcher], bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def test_a_matcher_follows_its_grammar_and_ends_with_eos(backend):
    matcher = backend.compile(GRAMMAR).matcher()
    for token in b"b07":
        assert token in allowed(backend, matcher)
        assert EOS not in allowed(backend, matcher)
        matcher.accept(token)
    assert allowed(backend, matcher) == [EOS]
    matcher.accept(EOS)
    assert matcher.ended
    assert not matcher.fault


def test_what_the_grammar_forces_is_a_draft_of_unsure_tokens(backend):
    matcher = backend.compile('root ::= "a"? "bcd" [0-9] "efg"').matcher()
    assert matcher.forced(8) == ([], 0)
    matcher.accept(ord("a"))
    assert matcher.forced(8) == ([*b"bc"], 0)
    assert matcher.forced(1) == ([*b"b"], 0)
    assert [matcher.look_ahead(token) for token in b"bcx"] == [True, True, False]
    assert allowed(backend, matcher) == [ord("d")]
    matcher.look_back(2)
    assert allowed(backend, matcher) == [ord("b")]
    assert not matcher.fault
    for token in b"bcd7efg":
        matcher.accept(token)
    assert matcher.forced(8) == ([], 0)
    matcher.accept(EOS)
    assert matcher.forced(8) == ([], 0)
    assert not matcher.look_ahead(EOS)


def test_a_token_that_does_not_follow_is_a_fault(backend):
    matcher = backend.compile(GRAMMAR).matcher()
    matcher.accept(ord("c"))
    assert matcher.fault


def test_special_tokens_are_no_text(backend):
    matcher = backend.compile('root ::= "<tool>"').matcher()
    assert allowed(backend, matcher) == [ord("<")]


@pytest.mark.parametrize(
    "text", ["root ::= missing", 'root ::= "a" (="b")', "nonsense", "root ::= root", r"root ::= [^\x00-\U0010FFFF]"]
)
def test_what_cannot_be_followed_is_refused(backend, text):
    with pytest.raises(GrammarError):
        backend.compile(text)


def test_the_probe_says_what_a_rank_would(default_model, monkeypatch):
    folder, ends = default_model.tokenizer_folder, default_model.model_config.eos_token_ids
    monkeypatch.setattr(probing, "PATIENCE_S", 300.0)
    probe(GRAMMAR, folder, ends)
    with pytest.raises(GrammarError, match="missing"):
        probe("root ::= missing", folder, ends)
    monkeypatch.setattr(probing, "PATIENCE_S", 0.0)
    with pytest.raises(GrammarError, match="does not compile within"):
        probe(GRAMMAR, folder, ends)
