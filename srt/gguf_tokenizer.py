"""Shared: builds tokenizer.json from a GGUF file's vocabulary. No torch, no transformers.

GGUF keeps the vocabulary, the merges or scores, and the *name* of a pre-tokenizer; what each name means is known from
llama.cpp, whose tokens the result reproduces. Names that are not in the table are refused, because a wrong split
changes what the model reads and nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from srt.model_config import ModelError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Values of tokenizer.ggml.token_type that matter here."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, _SPACES))
_SEED_CODER = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES))
_TEKKEN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    )
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have a case, as the model's authors listed them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_V3 = "|".join(
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    )
)


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that split a text one after the other, each keeping what lies between its matches as pieces too."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as it stands is not built from merges
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # Unicode's canonical composition comes first


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
PRE_TOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _PLAIN,
    "mellum": _PLAIN,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "pixtral": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
}


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer.json. Raises ModelError for a kind of tokenizer that we could not reproduce."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    if types is None or len(types) != len(tokens):
        raise ModelError("the GGUF file has no token types (tokenizer.ggml.token_type) for its vocabulary")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelError(f"the GGUF file's tokenizer {kind!r} is not supported; gpt2 and llama are")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token_type == CONTROL,
            }
            for index, (token, token_type) in enumerate(zip(tokens, types.tolist(), strict=True))
            if token_type in (CONTROL, USER_DEFINED) and token
        ],
        "post_processor": _post_processor(metadata, tokens),
        **parts,
    }


def special_token(metadata: dict[str, Any], name: str) -> int | None:
    """The id under tokenizer.ggml.<name>_token_id, if there is one inside the vocabulary."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return index if isinstance(index, int) and 0 <= index < len(metadata["tokenizer.ggml.tokens"]) else None


def adds_bos(metadata: dict[str, Any]) -> bool:
    explicit = metadata.get("tokenizer.ggml.add_bos_token")
    if explicit is not None:
        return bool(explicit)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _pre_tokenizer(metadata).add_bos


def _pre_tokenizer(metadata: dict[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("the GGUF file has no merges (tokenizer.ggml.merges)")
    pre = _pre_tokenizer(metadata)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, {**byte_level, "use_regex": False}]},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocabulary,
            "merges": [_split_merge(merge) for merge in merges],
        },
    }


def _split_merge(merge: str) -> list[str]:
    # A token may itself begin with a space, so the separator is the first one after the first character.
    middle = merge.find(" ", 1)
    if middle < 0:
        raise ModelError(f"the GGUF file's merge {merge!r} does not name two tokens")
    return [merge[:middle], merge[middle + 1 :]]


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: Any) -> dict[str, Any]:
    """Sentencepiece's BPE joins the neighbours whose joined piece scores best; as merges, these are ranked by score."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("the GGUF file has no scores (tokenizer.ggml.scores) for its vocabulary")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces") or metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise ModelError("the GGUF file's sentencepiece text normalization is not supported")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise ModelError(f"the GGUF file's vocabulary has no token for the byte 0x{missing[0]:02X}")
    unknown = special_token(metadata, "unknown")
    normal = [types_of not in (CONTROL, USER_DEFINED, BYTE) for types_of in types.tolist()]
    ranked = sorted((-score, index) for index, score in enumerate(scores.tolist()) if normal[index])
    merges = []
    for _, index in ranked:
        piece = tokens[index]
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in vocabulary and right in vocabulary:
                merges.append([left, right])
    prefix = [{"type": "Prepend", "prepend": "▁"}] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown] if unknown is not None else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    before = [special_token(metadata, "bos")] if adds_bos(metadata) else []
    after = [special_token(metadata, "eos")] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if None in before or None in after:
        raise ModelError("the GGUF file wants a BOS or EOS token added to each text but does not name it")
    if not before and not after:
        return None

    def special(index: int, sequence: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[index], "type_id": sequence}}

    def template(name: str, sequence: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": sequence}}
        return [*(special(index, sequence) for index in before), text, *(special(index, sequence) for index in after)]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in before + after
        },
    }
