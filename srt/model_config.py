"""Shared: what a model is, as plain numbers. No torch, no file access.

`ModelConfig.from_hf` reads the dictionaries of config.json and generation_config.json; a GGUF file is first turned into
the same dictionaries (`srt/model_files.py`), so there is one reader of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


class ModelError(Exception):
    """A model that cannot be served, with one sentence that says why and what would do."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions stretch past the trained context. `rope_type` is one of ROPE_TYPES."""

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0: the model's max_position_embeddings
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # the name in config.json's `architectures`, the key of the model registry
    model_type: str
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's vocabulary
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # the checkpoint's: "float32", "float16" or "bfloat16"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of every layer, in elements."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Raises ModelError for what we would otherwise get wrong in silence."""
        raise NotImplementedError
