"""L4, each rank: which device, types and executor a configuration means, and the memory of that device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from srt.config import ServerConfig
from srt.executor.memory_plan import MemoryPlan, available_ram, gib, own_ram
from srt.executor.shape import ExecutorShape
from srt.kernels import cpu
from srt.model_config import ModelConfig, ModelError
from srt.models.llama import LlamaForCausalLM
from srt.parallel import ParallelContext

if TYPE_CHECKING:
    from srt.executor.cuda_runner import CudaRunner
    from srt.executor.model_runner import ModelRunner

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
"""That FlashInfer's attention has kernels for, on every GPU."""
FP8_CAPABILITY = (8, 9)


def resolve_device(config: ServerConfig, index: int) -> torch.device:
    return torch.device("cuda", index) if config.device == "cuda" else torch.device("cpu")


def resolve_dtype(config: ServerConfig) -> torch.dtype:
    """Of weights, and of what is computed with them."""
    return getattr(torch, config.dtype)


def resolve_kv_dtype(config: ServerConfig) -> torch.dtype:
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else resolve_dtype(config)


def free_memory(device: torch.device) -> int:
    """Bytes that weights and pool could still take."""
    return available_ram() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def held_memory(device: torch.device) -> int:
    """Bytes that are taken. Its growth is what was loaded, on a CPU whatever other processes take or free meanwhile."""
    if device.type == "cpu":
        return own_ram()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what passed through while loading
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def make_executor(
    model: LlamaForCausalLM,
    model_config: ModelConfig,
    config: ServerConfig,
    plan: MemoryPlan,
    num_tokens_vocab: int,
    device: torch.device,
    parallel: ParallelContext,
    host_tokens: int,
) -> ModelRunner | CudaRunner:
    """Ready to compute. Raises ModelError if what a GPU needs beside weights and K/V does not fit."""
    assert config.max_running_requests is not None
    assert config.context_length is not None
    assert config.chunked_prefill_size is not None
    shape = ExecutorShape(
        num_rows=config.max_running_requests,
        context_length=config.context_length,
        pool_tokens=plan.pool_tokens,
        page_size=config.page_size,
        num_tokens_vocab=num_tokens_vocab,
        kv_dtype=resolve_kv_dtype(config),
        dtype=resolve_dtype(config),
        device=device,
        parallel=parallel,
        host_tokens=host_tokens,
    )
    if device.type == "cpu":
        from srt.executor.model_runner import ModelRunner

        if not cpu.AVAILABLE and parallel.rank == 0:
            log.warning(
                "the kernels for this CPU were not compiled, or for another version, so steps take longer: install a C "
                "compiler and Python's headers, then this package again"
            )
        return ModelRunner(model, model_config, shape)
    if model_config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(
            f"on a GPU heads may have {known} dimensions, not {model_config.head_dim}; serve with --device cpu"
        )
    capability = torch.cuda.get_device_capability(device)
    if shape.kv_dtype.itemsize == 1 and capability < FP8_CAPABILITY:
        raise ModelError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU of compute capability 8.9 or more, such as an L40S "
            f"or H100; this one has {capability[0]}.{capability[1]}, so leave it out"
        )
    from srt.executor.cuda_runner import CudaRunner

    try:
        runner = CudaRunner(
            model,
            model_config,
            shape,
            most_tokens=config.chunked_prefill_size,
            graphs=not config.disable_cuda_graph,
        )
        runner.warm_up()
    except torch.OutOfMemoryError:
        left = plan.free_before - plan.weights - plan.pool_bytes
        raise ModelError(
            f"{gib(left)} beside weights and KV cache are too little for a step's activations and the CUDA graphs: "
            f"lower --mem-fraction-static (now {plan.fraction:g}), --chunked-prefill-size (now "
            f"{config.chunked_prefill_size}) or --max-running-requests (now {config.max_running_requests})"
        ) from None
    return runner
