"""The table of bytes against what the tokenizers library makes of whole texts."""

import json
import random

import checkpoints
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from srt.model_config import ModelError
from srt.token_bytes import TokenBytes
from srt.tokenization import Tokenizer, check_token_bytes

BYTES = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
PIECES = ["▁", "▁▁", "a", "▁a", "▁fox", "fo", "x", "é", "日", "<0x4", "▁<", "\n"]


def metaspace_tokenizer(decoder):
    vocabulary = {"<unk>": 0, **BYTES} | {piece: 257 + index for index, piece in enumerate(PIECES)}
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([(piece, -float(i)) for i, piece in enumerate(vocabulary)], 0, True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["[TOOL ▁]"])
    return tokenizer


LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def table_of(tokenizer):
    return TokenBytes.from_tokenizer_json(json.loads(tokenizer.to_str()))


def test_byte_level_tokens_cover_every_byte():
    table = table_of(checkpoints.byte_level_tokenizer())
    assert {piece[0] for piece in table.table if len(piece) == 1} == set(range(256))
    assert [table.table[index] for index in range(3)] == [text.encode() for text in checkpoints.SPECIAL]
    assert list(table.is_special[:4]) == [1, 1, 1, 0]
    assert not table.strips_leading_space


def test_random_tokens_of_the_default_model_join_as_the_library_joins_them(default_model):
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model.tokenizer_folder / "tokenizer.json"))
    table = TokenBytes.from_folder(default_model.tokenizer_folder)
    rng = random.Random(11)
    for _ in range(300):
        ids = [rng.randrange(len(table.table)) for _ in range(rng.randrange(30))]
        for skip in (False, True):
            found = table.decode(ids, skip).decode("utf-8", errors="replace")
            assert found == tokenizer.decode(ids, skip_special_tokens=skip)


def test_skipping_unknown_ids_and_special_tokens():
    table = table_of(checkpoints.byte_level_tokenizer())
    letter = table.table.index(b"a")
    assert table.decode([1, letter, 10_000, -1, letter, 2], skip_special=True) == b"aa"
    assert table.decode([1, letter, 2], skip_special=False) == b"<|im_start|>a<|im_end|>"
    assert table.decode([], skip_special=True) == b""


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (LLAMA_DECODER, True),
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), True),
    ],
)
def test_metaspace(decoder, strips):
    tokenizer = metaspace_tokenizer(decoder)
    table = table_of(tokenizer)
    assert table.strips_leading_space is strips
    ids = dict(tokenizer.get_vocab())
    assert table.table[ids["▁fox"]] == b" fox"
    assert table.table[ids["<0x4"]] == b"<0x4"
    assert table.table[ids["</s>"]] == b"</s>"
    assert table.table[ids["[TOOL ▁]"]] == "[TOOL ▁]".encode()  # an added token is literal
    assert table.table[ids["<0xE6>"]] == (b"<0xE6>" if "ByteFallback" not in str(decoder) else b"\xe6")
    assert table.is_special[ids["</s>"]]
    assert not table.is_special[ids["[TOOL ▁]"]]


def test_byte_fallback_gives_bytes_that_the_library_cannot_show():
    tokenizer = metaspace_tokenizer(LLAMA_DECODER)
    table = table_of(tokenizer)
    for text in ("a fox", "  a", "語 é", "x" * 5, "🦊"):
        ids = tokenizer.encode(text).ids
        assert table.decode(ids, False).removeprefix(b" ").decode() == tokenizer.decode(ids) == text
    first = tokenizer.encode("語").ids[:2]
    assert table.decode(first, False) == b" \xe8"
    check_token_bytes(tokenizer, table)


def test_gaps_in_the_ids_stand_for_nothing():
    description = json.loads(checkpoints.byte_level_tokenizer().to_str())
    description["added_tokens"].append({"id": 330, "content": "<late>", "special": False})
    table = TokenBytes.from_tokenizer_json(description)
    assert len(table.table) == 331
    assert table.table[325] == b""
    assert table.table[330] == b"<late>"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC"},
        {"type": "Replace", "pattern": {"Regex": "▁"}, "content": " "},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "BPEDecoder", "suffix": "</w>"}]},
    ],
)
def test_a_decoder_that_we_do_not_know_is_refused(decoder):
    description = json.loads(checkpoints.byte_level_tokenizer().to_str())
    with pytest.raises(ModelError, match="decoder .* is not supported"):
        TokenBytes.from_tokenizer_json({**description, "decoder": decoder})


def test_a_table_that_disagrees_with_the_library_is_refused(tmp_path):
    tokenizer = metaspace_tokenizer(LLAMA_DECODER)
    tokenizer.decoder = decoders.Sequence([LLAMA_DECODER, decoders.Replace("o", "0")])
    # The order of the steps matters to the library, and this one replaces what was joined before.
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    with pytest.raises(ModelError):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("contents", ["", "[]", "{}", '{"model": 3}', '{"model": {"type": "BPE"}}', "{", "\x00"])
def test_a_broken_tokenizer_json_is_one_sentence(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ModelError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_pre_tokenizers_do_not_matter_to_bytes():
    tokenizer = checkpoints.byte_level_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    check_token_bytes(tokenizer, table_of(tokenizer))
