"""A byte-level vocabulary, and texts walked through masks, token by token."""

import json

import numpy as np

from srt.constrained.llguidance_backend import LLGuidance
from srt.frontend.constraints import Form
from srt.frontend.grammar_check import GrammarCheck
from srt.token_bytes import Vocabulary

EOS, OTHER = 256, 257
TABLE = [bytes([byte]) for byte in range(256)] + [b"<eos>", b"<tool>"]
VOCABULARY = Vocabulary(TABLE, [0] * 256 + [1, 1], (EOS,), lambda text: list(text.encode()))
CHECK = GrammarCheck(VOCABULARY)
BACKEND = LLGuidance(VOCABULARY)


def allowed(matcher):
    """Ids that the mask allows."""
    bits = np.empty((1, -(-len(TABLE) // 32)), np.int32)
    BACKEND.fill([matcher], bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar, ids):
    """Whether every token is in the mask, and EOS behind them."""
    matcher = BACKEND.compile(grammar.text).matcher()
    for token in [*ids, EOS]:
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return matcher.ended and not matcher.fault


def accepts_text(kind, value, text, **options):
    return accepts(CHECK(Form(kind, value, "x", **options)), text.encode())


def accepts_json(schema, instance):
    return accepts_text("json_schema", schema, json.dumps(instance, ensure_ascii=False, separators=(",", ":")))
