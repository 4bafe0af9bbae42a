"""Token ids against llama.cpp's, sentencepiece's and transformers' own."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import checkpoints
import pytest
import sentencepiece
import tokenizers
import transformers

from srt.gguf_files import read_gguf
from srt.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_json
from srt.model_config import ModelError
from srt.model_files import locate
from srt.tokenization import Tokenizer

LLAMA_CPP = json.loads((Path(__file__).parent / "data" / "llama_cpp_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def default_tokenizer(default_model):
    return Tokenizer.from_folder(default_model.tokenizer_folder)


@pytest.fixture(scope="session")
def default_metadata(default_model):
    return read_gguf(default_model.gguf_path).metadata


def folder_of(path, description, config=None):
    path.mkdir(exist_ok=True)
    text = description if isinstance(description, str) else json.dumps(description)
    (path / "tokenizer.json").write_text(text, encoding="utf-8")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_the_default_model_reads_text_as_llama_cpp_does(default_tokenizer):
    for text, expected in zip(LLAMA_CPP["texts"], LLAMA_CPP["smollm"], strict=True):
        assert default_tokenizer.encode(text, add_special_tokens=True) == expected, text


@pytest.mark.parametrize(
    ("text", "ids"),
    [("x  1", [104, 256, 33]), ("[  3,   4]", [75, 256, 35, 28, 333, 36, 77]), ("x\n\n3", [104, 1116, 35])],
)
def test_digits_and_spaces_stand_apart(default_tokenizer, text, ids):
    assert default_tokenizer.encode(text, False) == ids


@pytest.mark.parametrize("pre", LLAMA_CPP["differences"])
def test_each_pre_tokenizer_splits_as_llama_cpp_does(default_metadata, pre):
    metadata = {**default_metadata, "tokenizer.ggml.pre": pre}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
    composed = 0
    for index, text in enumerate(LLAMA_CPP["texts"]):
        expected = LLAMA_CPP["differences"][pre].get(str(index), LLAMA_CPP["smollm"][index])
        found = tokenizer.encode(text, add_special_tokens=False).ids
        if found != expected:
            # Qwen's own tokenizer composes characters first, which llama.cpp leaves out.
            assert pre == "qwen2", (text, found, expected)
            composed += 1
    assert composed == (3 if pre == "qwen2" else 0)


def test_every_pre_tokenizer_is_one_that_was_compared():
    compared = {PRE_TOKENIZERS[name] for name in ("smollm", *LLAMA_CPP["differences"])}
    assert set(PRE_TOKENIZERS.values()) == compared


def test_an_unknown_pre_tokenizer_is_refused(default_metadata):
    with pytest.raises(ModelError, match="pre-tokenizer 'martian' is not supported"):
        tokenizer_json({**default_metadata, "tokenizer.ggml.pre": "martian"})
    with pytest.raises(ModelError, match="tokenizer 'bert' is not supported"):
        tokenizer_json({**default_metadata, "tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [1], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1], [2]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}, [1], []),
    ],
)
def test_gguf_says_what_goes_around_a_text(tmp_path, default_metadata, settings, before, after):
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, tokenizer_json({**default_metadata, **settings})))
    plain = tokenizer.encode("Hi there", False)
    assert tokenizer.encode("Hi there", True) == [*before, *plain, *after]


def test_special_tokens_and_sizes(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert (default_tokenizer.bos_token, default_tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (default_tokenizer.eos_token, default_tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ids = default_tokenizer.encode("<|im_start|>user\nHi<|im_end|>", False)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert default_tokenizer.decode(ids) == "user\nHi"
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"
    assert default_tokenizer.encode("", True) == []
    with pytest.raises(ValueError, match="surrogate"):
        default_tokenizer.encode("a\ud800b", False)


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("template", [True, False])
def test_bos_follows_the_post_processor_unless_the_config_says(tmp_path, add_bos, template):
    description = checkpoints.byte_level_tokenizer()
    if template:
        description.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    config = {"bos_token": {"content": "<|im_start|>"}} | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, description.to_str(), config))
    wanted = template if add_bos is None else add_bos
    assert tokenizer.encode("a fox", True)[:1] == ([1] if wanted else tokenizer.encode("a fox", False)[:1])
    assert tokenizer.encode("a fox", True)[wanted:] == tokenizer.encode("a fox", False)


def test_a_special_token_that_is_no_text_is_one_sentence(tmp_path):
    folder = folder_of(tmp_path, checkpoints.byte_level_tokenizer().to_str(), {"bos_token": 7})
    with pytest.raises(ModelError, match="a special token must be a string, not 7"):
        Tokenizer.from_folder(folder)


def test_other_threads_run_while_a_long_text_is_encoded(default_tokenizer):
    text = " ".join(LLAMA_CPP["texts"]) * 60
    busy = threading.Thread(target=default_tokenizer.encode, args=(text, False))
    turns = 0
    busy.start()
    while busy.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # if the GIL were held, one before and one after


# ---- sentencepiece --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    sentences = folder / "text.txt"
    sentences.write_text("\n".join(checkpoints.TEXT + [text for text in LLAMA_CPP["texts"] if text.isprintable()] * 3))
    sentencepiece.SentencePieceTrainer.train(
        input=str(sentences),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        minloglevel=3,
    )
    return folder / "tokenizer.model"


def sentencepiece_metadata(processor):
    size = processor.get_piece_size()

    def kind(index):
        if processor.is_unknown(index):
            return 2
        return 3 if processor.is_control(index) else 6 if processor.is_byte(index) else 1

    import numpy as np

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": np.array([processor.get_score(index) for index in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(index) for index in range(size)], np.int32),
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


def test_a_gguf_of_sentencepiece_reads_text_as_sentencepiece_does(tmp_path, sentencepiece_model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, tokenizer_json(sentencepiece_metadata(processor))))
    bytes_used = 0
    for text in LLAMA_CPP["texts"]:
        if "\0" in text or "▁" in text:  # sentencepiece cannot tell these from its own signs
            continue
        expected = processor.encode(text)
        assert tokenizer.encode(text, False) == expected, text
        assert tokenizer.encode(text, True) == [processor.bos_id(), *expected]
        assert tokenizer.decode(expected) == text
        bytes_used += any(processor.is_byte(index) for index in expected)
    assert bytes_used > 20
    assert tokenizer.token_bytes.strips_leading_space


def test_sentencepiece_without_a_prefix_space(tmp_path, sentencepiece_model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    metadata = {**sentencepiece_metadata(processor), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, tokenizer_json(metadata)))
    assert [processor.id_to_piece(index) for index in tokenizer.encode("a  fox", False)][0] == "a"
    assert tokenizer.decode(tokenizer.encode(" a  fox ", False)) == " a  fox "
    assert not tokenizer.token_bytes.strips_leading_space


@pytest.fixture
def sentencepiece_folder(tmp_path, sentencepiece_model, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    checkpoints.hf_folder(folder, vocab_size=700)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_with_tokenizer_model_only_is_converted_once(sentencepiece_folder):
    said = []
    files = locate(str(sentencepiece_folder), "auto", None, log=said.append)
    assert any("converting" in line for line in said)
    assert not (sentencepiece_folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(files.tokenizer_folder)
    reference = transformers.AutoTokenizer.from_pretrained(sentencepiece_folder)
    for text in ("a fox", " the  rose 12", "größer\nnaïve 日本"):
        assert tokenizer.encode(text, True) == reference.encode(text)
        ids = reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    said.clear()
    assert locate(str(sentencepiece_folder), "auto", None, log=said.append) == files
    assert not said, "converted again"


def test_without_transformers_the_error_names_the_extra(sentencepiece_folder, tmp_path, monkeypatch):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "transformers.py").write_text("raise ImportError('No module named transformers')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'shadow'}:{Path.cwd()}")
    with pytest.raises(ModelError, match=r"lockstep-server\[sentencepiece\]"):
        locate(str(sentencepiece_folder), "auto", None, log=lambda line: None)


def test_a_damaged_tokenizer_model_is_one_sentence(sentencepiece_folder):
    (sentencepiece_folder / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="could not be converted"):
        locate(str(sentencepiece_folder), "auto", None, log=lambda line: None)


def test_neither_torch_nor_transformers_is_loaded():
    code = (
        "import sys, srt.tokenization, srt.chat_template; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
