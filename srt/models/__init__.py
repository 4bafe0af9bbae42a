"""L4, each rank: the architectures we serve, one a file, imported when a checkpoint names them. No torch here."""

from srt.registry import Registry

MODELS = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "srt.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "srt.models.llama:LlamaForCausalLM",
        "Qwen2ForCausalLM": "srt.models.llama:LlamaForCausalLM",
        "Qwen3ForCausalLM": "srt.models.llama:LlamaForCausalLM",
    },
)
