"""L1, frontend: /v1/chat/completions."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from aiohttp import web

from srt.frontend import sampling
from srt.frontend.answers import Response
from srt.frontend.constraints import form_of
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.generation import Prompt
from srt.frontend.openai.chat_constraint import constraint
from srt.frontend.openai.chat_format import ChatFormat
from srt.frontend.openai.common import check_prompt_logprobs, check_request
from srt.frontend.openai.messages import template_arguments
from srt.frontend.openai.tools import ToolUse, read_tools
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.tool_calls import JSON_LIST, JsonFormat
from srt.frontend.protocol import ChatRequest
from srt.frontend.sampling import LogprobWish, SamplingSpec
from srt.frontend.services import Services, check_priority, check_rid, new_id
from srt.frontend.words import ChatPrompt, namespace


class ChatCall(NamedTuple):
    """A chat request ready to be sent, and how to read what comes of it."""

    prompt: Prompt
    chat: ChatPrompt
    answer: AnswerFormat


class Chat:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: web.Request) -> Response:
        services = self._services
        services.manager.check_open()
        body: ChatRequest = await services.read(request, ChatRequest)
        name = check_rid(body.rid or body.request_id) or new_id("chatcmpl-")
        call = await self.accept(body, name, services.owner(request))
        timeline = bool(body.return_timeline)
        form = ChatFormat(services, call.chat, name, body.stream_options, call.answer, timeline)
        return await services.respond(request, [call.prompt], form, bool(body.stream))

    async def accept(self, body: ChatRequest, name: str, owner: bytes) -> ChatCall:
        """RequestError for what cannot be served. Also for the routes that say chats in another form."""
        services = self._services
        check_request(body, services)
        tools = read_tools(body)
        spec, priority = self._sampling(body), check_priority(body.priority)
        chat = await self._chat(body, tools, owner)
        answer = self._answer(body, tools, chat)
        marks = answer.reasoning
        end_token = None if marks is None else services.words.tokenizer.token_id(marks.end)
        form = constraint(form_of(body), tools, answer, end_token)
        if form is not None:
            answer = answer._replace(constrained=True)
        if changed := self._changed_fields(spec, tools, answer):
            spec = dataclasses.replace(spec, fields={**spec.fields, **changed})
        grammar = await services.constraints.grammar(form)
        is_named = bool(body.rid or body.request_id)
        prompt = Prompt(name, chat.ids, spec, chat.namespace, priority, grammar=grammar, is_named=is_named)
        return ChatCall(prompt, chat, answer)

    async def prompt(self, body: ChatRequest, owner: bytes) -> ChatPrompt:
        """Only what the model would be given."""
        self._services.check_model(body.model)
        return await self._chat(body, read_tools(body), owner)

    def _sampling(self, body: ChatRequest) -> SamplingSpec:
        top = sampling.check_top_logprobs(body.top_logprobs, "top_logprobs", sampling.MAX_TOP_LOGPROBS)
        if top and not body.logprobs:
            raise RequestError("`top_logprobs` goes with `logprobs`: true.", param="top_logprobs")
        if body.echo:
            raise unsupported("echo", "the prompt is not echoed into a chat's answer; use /v1/completions")
        max_tokens = (body.max_tokens, "max_tokens")
        if body.max_completion_tokens is not None:
            max_tokens = (body.max_completion_tokens, "max_completion_tokens")
        return sampling.from_openai(
            body,
            vocab_size=self._services.words.vocab_size,
            max_tokens=max_tokens,
            default_max_new_tokens=None,
            defaults=self._services.sampling_defaults,
            logprobs=LogprobWish(top if body.logprobs else -1, check_prompt_logprobs(body)),
        )

    def _changed_fields(self, spec: SamplingSpec, tools: ToolUse, answer: AnswerFormat) -> dict[str, Any]:
        """What tools and reasoning do to how the answer is sampled and shown."""
        words, calls = self._services.words, self._services.formats.calls
        changed: dict[str, Any] = {}
        if any(map(words.is_special, answer.marks)):
            changed["skip_special_tokens"] = False
        if tools.forced:  # a stop would leave arguments that are no JSON
            changed |= {"stop": (), "stop_token_ids": ()}
        if tools.template_tools and not tools.callable and calls is not None:
            # The prompt has the tools all the same, as the turns before had them: the prefix stays in the cache.
            banned = {words.tokenizer.token_id(mark): -100.0 for mark in calls.marks[:1]}
            bias = {**banned, **dict(spec.fields["logit_bias"])}
            changed["logit_bias"] = tuple(sorted((token, value) for token, value in bias.items() if token is not None))
        return changed

    async def _chat(self, body: ChatRequest, tools: ToolUse, owner: bytes) -> ChatPrompt:
        words = self._services.words
        continue_final = bool(body.continue_final_message)
        return await words.encode_chat(
            body.messages,
            add_generation_prompt=not continue_final
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=continue_final,
            tools=tools.template_tools,
            arguments=template_arguments(body),
            namespace=namespace(body.cache_salt, body.extra_key, owner),
        )

    def _answer(self, body: ChatRequest, tools: ToolUse, chat: ChatPrompt) -> AnswerFormat:
        formats = self._services.formats
        calls = formats.calls
        if tools.forced and not isinstance(calls, JsonFormat):
            calls = JSON_LIST  # a grammar can hold the model to it, whatever form it is used to
        if tools.callable and calls is None:
            raise RequestError(
                "How this model writes tool calls is not known; start the server with --tool-call-parser, "
                "or set `tool_choice` to `none` or `required`.",
                param="tools",
            )
        return AnswerFormat(
            chat.text,
            formats.reasoning,
            separate_reasoning=body.separate_reasoning is not False,
            show_reasoning=body.include_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
            calls=calls if tools.callable else None,
            names=tools.names,
            max_calls=tools.max_calls,
        )
