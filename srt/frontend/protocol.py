"""L1, frontend: the bodies that clients send, as typed structures.

Every optional field takes an explicit null. A field is used, or listed as having no effect here, or listed as not
built (then only a neutral value passes); any other key is refused by name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from srt.frontend.errors import unsupported

NULL = msgspec.Raw(b"null")
ABSENT = msgspec.field(default_factory=lambda: NULL)
Fields = dict[str, msgspec.Raw]
"""A body as it came, whatever it means."""
Ignored = msgspec.Raw | msgspec.UnsetType

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
TokenIds = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"anyOf": [_IDS, {"type": "array", "items": _IDS}]})]
TextsOrIds = Annotated[
    msgspec.Raw,
    msgspec.Meta(extra_json_schema={"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]

_REFUSALS = {
    "this server takes constraints as `structured_outputs`": ("guided_json guided_regex guided_choice guided_grammar"),
    "stop patterns are not available on this server; use `stop`": ("stop_regex"),
    "token filters are not available on this server; use `logit_bias`": ("allowed_token_ids bad_words"),
    "custom logit processors are not run by this server": ("custom_logit_processor custom_params"),
    "insertion before a suffix is not available on this server": ("suffix"),
    "prompts are not truncated by this server": ("truncate_prompt_tokens"),
    "beam search is not available on this server": ("use_beam_search beam_width"),
    "watermarks are not available on this server": ("watermark"),
    "no adapters are loaded on this server": ("lora_path"),
    "embeddings are not taken as input by this server": ("input_embeds"),
    "this model reads text only": ("image_data video_data audio_data"),
    "this model writes text only": ("audio"),
    "sessions are not available on this server; a shared prefix is cached anyway": ("session_params session_id"),
    "hidden states are not returned by this server": ("return_hidden_states"),
    "routed experts are not returned by this server": ("return_routed_experts"),
    "entropy is not returned by this server": ("return_entropy"),
    "use /generate, which returns token ids": ("return_token_ids return_tokens_as_token_ids"),
    "reasoning is not bounded by this server": ("max_thinking_tokens thinking_token_budget"),
    "reasoning is not enforced by this server": ("require_reasoning"),
    "prefill and decode are not split on this server": (
        "bootstrap_host bootstrap_port bootstrap_room kv_transfer_params"
    ),
    "templates are not taken from requests; start the server with --chat-template": ("chat_template"),
    "retrieval templates are not available on this server": ("documents"),
    "this form is out of date; use `tools` and `tool_choice`": ("functions function_call"),
    "web search is not available on this server": ("web_search_options"),
    "profiles begin at once and are written rank by rank": (
        "start_step profile_by_stage profile_stages merge_profiles with_stack record_shapes"
    ),
    "requests are logged as text, and not dumped": (
        "log_requests_format dump_requests_folder dump_requests_threshold crash_dump_folder"
    ),
    "weights are there with the answer, and generation goes on as before": ("is_async keep_pause"),
}
NOT_BUILT = {name: sentence for sentence, names in _REFUSALS.items() for name in names.split()}


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the native and the OpenAI routes call alike. Ranges are checked in `sampling.py`."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    # constraints, of which there may be one; `constraints.py` reads them
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Any = None
    structural_tag: Any = None

    # not built
    stop_regex: Any = None
    custom_params: Any = None

    # without effect here
    spaces_between_special_tokens: Ignored = msgspec.UNSET
    stream_interval: Ignored = msgspec.UNSET


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None

    beam_width: Any = None
    watermark: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /generate. What may be one per prompt may also be one for all."""

    text: str | list[str] | None = None
    input_ids: TokenIds = ABSENT
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None

    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    session_id: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_entropy: Any = None
    require_reasoning: Any = None
    max_thinking_tokens: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    model: Ignored = msgspec.UNSET
    log_metrics: Ignored = msgspec.UNSET
    return_bytes: Ignored = msgspec.UNSET
    background: Ignored = msgspec.UNSET
    no_logs: Ignored = msgspec.UNSET
    custom_labels: Ignored = msgspec.UNSET
    routing_key: Ignored = msgspec.UNSET
    data_parallel_rank: Ignored = msgspec.UNSET
    routed_dp_rank: Ignored = msgspec.UNSET
    disagg_prefill_dp_rank: Ignored = msgspec.UNSET
    kv_hints: Ignored = msgspec.UNSET


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(SamplingFields, kw_only=True):
    """What both OpenAI routes take, with the names that clients of other servers add."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    rid: str | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    return_timeline: bool | None = None  # in each choice, the seconds of each stretch of its way

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    custom_logit_processor: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    lora_path: Any = None
    session_params: Any = None
    session_id: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    kv_transfer_params: Any = None

    user: Ignored = msgspec.UNSET
    metadata: Ignored = msgspec.UNSET
    store: Ignored = msgspec.UNSET
    service_tier: Ignored = msgspec.UNSET
    safety_identifier: Ignored = msgspec.UNSET
    prompt_cache_key: Ignored = msgspec.UNSET
    prompt_cache_retention: Ignored = msgspec.UNSET
    log_metrics: Ignored = msgspec.UNSET
    no_logs: Ignored = msgspec.UNSET
    background: Ignored = msgspec.UNSET
    custom_labels: Ignored = msgspec.UNSET
    routing_key: Ignored = msgspec.UNSET
    data_parallel_rank: Ignored = msgspec.UNSET
    routed_dp_rank: Ignored = msgspec.UNSET
    disagg_prefill_dp_rank: Ignored = msgspec.UNSET
    return_meta_info: Ignored = msgspec.UNSET
    return_cached_tokens_details: Ignored = msgspec.UNSET


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: TextsOrIds = ABSENT
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    suffix: Any = None


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    function_call: Any = None


class ChatRequest(OpenAIRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    max_thinking_tokens: Any = None
    thinking_token_budget: Any = None

    modalities: Ignored = msgspec.UNSET
    prediction: Ignored = msgspec.UNSET
    verbosity: Ignored = msgspec.UNSET


class EmbeddingRequest(msgspec.Struct):
    input: Any = None
    model: str | None = None


class TokenizeRequest(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] | None = None


class ProfileBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    output_dir: str | None = None
    num_steps: int | None = None

    start_step: Any = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    merge_profiles: Any = None
    with_stack: Any = None
    record_shapes: Any = None

    activities: Ignored = msgspec.UNSET
    profile_id: Ignored = msgspec.UNSET
    profile_prefix: Ignored = msgspec.UNSET


class LoggingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None

    log_requests_format: Any = None
    dump_requests_folder: Any = None
    dump_requests_threshold: Any = None
    crash_dump_folder: Any = None


class UpdateWeightsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None

    is_async: Any = None
    keep_pause: Any = None
    torch_empty_cache: Ignored = msgspec.UNSET
    recapture_cuda_graph: Ignored = msgspec.UNSET
    token_step: Ignored = msgspec.UNSET
    flush_cache: Ignored = msgspec.UNSET  # it always is


def check_supported(request: msgspec.Struct) -> None:
    """Refuses what would change the answer and is not built; null, false and empty ask for nothing."""
    names, values_of, absent = _not_built(type(request))
    values = values_of(request)
    if values == absent:
        return
    for name, value in zip(names, values, strict=True):
        if value is None or value is False or value in ("", [], {}):
            continue
        raise unsupported(name, NOT_BUILT[name])


@functools.cache
def _not_built(kind: type[msgspec.Struct]) -> tuple[list[str], Callable[[Any], tuple], tuple]:
    """The names of a type's fields that are not built, what picks their values, and these where none is given."""
    names = [name for name in kind.__struct_fields__ if name in NOT_BUILT]
    return names, operator.attrgetter(*names), (None,) * len(names)
