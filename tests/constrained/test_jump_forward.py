"""What a grammar is said to force is all that its masks allow, with a tokenizer whose tokens have many bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import WHITESPACE, Form
from srt.frontend.grammar_check import GrammarCheck
from srt.tokenization import Tokenizer


def record(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA = record(
    order_identifier={"type": "integer", "minimum": 0, "maximum": 99},
    état_de_la_commande={"enum": ["awaiting_payment", "awaiting_shipment", "déjà livré 😀"]},
    customer=record(first_name={"type": "string", "maxLength": 6}, is_returning_customer={"type": "boolean"}),
    currency_code={"const": "EUR and nothing else"},
)
FORMS = [
    Form("json_schema", SCHEMA, "schema", whitespace=WHITESPACE),
    Form("json_schema", SCHEMA, "schema", whitespace=None),
    Form("regex", r"(Dear Sir or Madam|Dear all),\n\nI am writing to (you|them) because of [a-z]{3}\.", "regex"),
    Form("choice", ["the first alternative", "the second alternative", "the  second one"], "choice"),
]


@pytest.fixture(scope="module")
def vocabulary(default_model):
    tokenizer = Tokenizer.from_folder(default_model.tokenizer_folder)
    return tokenizer.vocabulary(default_model.model_config.eos_token_ids)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_each_forced_token_is_alone_in_its_mask(vocabulary, form):
    backend, rnd = LLGuidance(vocabulary), random.Random(3)
    compiled = backend.compile(GrammarCheck(vocabulary)(form).text)
    bits = np.empty((1, -(-len(vocabulary.table) // 32)), np.int32)
    forced_tokens = tokens = 0
    for _ in range(8):
        matcher = compiled.matcher()
        while not matcher.ended:
            forced, certain = matcher.forced(5)
            assert certain == len(forced) <= 5
            for token in [*forced, None]:
                backend.fill([matcher], bits)
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
                if token is not None:
                    assert allowed == [token]
                    forced_tokens += 1
                matcher.accept(rnd.choice(allowed))
                assert not matcher.fault
                tokens += 1
                if matcher.ended:
                    break
    assert forced_tokens > tokens / 5
