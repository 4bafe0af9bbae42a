"""What the offline benchmark gives the engine: the published workload, and models whose every token has text."""

from examples.model_shapes import SHAPES, write_model
from examples.workloads import nano
from srt.model_config import ModelConfig
from srt.model_files import locate
from srt.tokenization import Tokenizer


def test_nano256_is_the_published_workload():
    conversations = nano(0)
    assert len(conversations) == 256
    assert sum(len(conversation.prompts[0]) for conversation in conversations) == 142_827
    assert sum(conversation.output_lens[0] for conversation in conversations) == 133_966


def test_a_shape_is_a_model_without_weights(tmp_path):
    write_model("smollm2-135m", tmp_path)
    files = locate(str(tmp_path), "dummy", None, log=print)
    assert files.model_config == ModelConfig.from_hf(SHAPES["smollm2-135m"])
    tokenizer = Tokenizer.from_folder(files.tokenizer_folder)
    assert tokenizer.vocab_size == files.model_config.vocab_size
    ids = tokenizer.encode("Zwölf Boxkämpfer", False) + [49151, 4000]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Zwölf Boxkämpfert049151t004000"
    assert b"".join(tokenizer.token_bytes.table[token] for token in ids).decode() == "Zwölf Boxkämpfert049151t004000"
