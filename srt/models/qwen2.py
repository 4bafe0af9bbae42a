"""L4, each rank: Qwen2 and Qwen2.5: Llama's decoder with biases on Q, K and V (`qkv_bias`)."""

from srt.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
