"""L4, each rank: dense Qwen3: Llama's decoder with queries and keys normalised head by head (`qk_norm`)."""

from srt.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass
