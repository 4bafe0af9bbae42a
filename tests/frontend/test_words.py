"""Prompts to ids where tokenizer and model do not quite fit."""

import asyncio

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from srt.frontend.errors import RequestError
from srt.frontend.words import Words
from srt.messages import unpack_ids
from srt.tokenization import Tokenizer


def test_a_token_without_an_embedding_is_the_clients_fault(tmp_path):
    library = Library(models.BPE({piece: index for index, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<late>"])
    library.save(str(tmp_path / "tokenizer.json"))
    words = Words(Tokenizer.from_folder(tmp_path), None, 256)
    try:
        assert len(unpack_ids(asyncio.run(words.encode(["late"]))[0])) == 4
        with pytest.raises(RequestError, match="the tokenizer knows but the model does not"):
            asyncio.run(words.encode(["some <late> text"]))
    finally:
        words.close()
