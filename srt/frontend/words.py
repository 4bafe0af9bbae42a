"""L1, frontend: texts and chats to token ids. Owns the tokenising threads.

The tokenizer works without the GIL, so a long prompt delays nobody; only what is short is encoded on the spot.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from srt.chat_template import ChatTemplate, TemplateError
from srt.frontend.conversations import Conversations
from srt.frontend.decoding import decode
from srt.frontend.errors import RequestError
from srt.frontend.openai.messages import chat_for_template
from srt.frontend.protocol import Message
from srt.messages import Ids, TextDelta, unpack_ids
from srt.observe.timeline import arrival
from srt.tokenization import Tokenizer

SHORT_TEXT = 400  # characters, about 0.1 ms
SHORT_CHAT = 8  # messages, which together are a short text
MAX_PROMPTS = 2048  # of one HTTP request

_SHAPE = re.compile(rb"\s*(\[?)\s*([\"\[]?)")

T = TypeVar("T")


class ChatPrompt(NamedTuple):
    text: str  # as rendered
    ids: Ids
    namespace: bytes


class Words:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Prompt ids are taken below `vocab_size`, the number of the model's embeddings."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._template = template
        self._takes_tools = template is None or template.takes_tools
        self._eos_token_ids = frozenset(eos_token_ids)
        table = tokenizer.token_bytes
        specials = (index for index in eos_token_ids if index < len(table.table) and table.is_special[index])
        self._conversations = Conversations([table.table[index].decode() for index in specials])
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="words")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def is_special(self, text: str) -> bool:
        """Whether a text is one token that is left out of answers."""
        index = self.tokenizer.token_id(text)
        return index is not None and self.tokenizer.token_bytes.is_special[index]

    def bytes_of(self, ids: Ids) -> list[bytes]:
        """What each of a model's tokens stands for."""
        table = self.tokenizer.token_bytes.table
        return [table[index] if index < len(table) else b"" for index in unpack_ids(ids)]

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Ids]:
        """One prompt per text. An empty one becomes the BOS token; RequestError if the model has none."""

        def encode_all() -> list[Ids]:
            return [self._encode(text, add_special_tokens) for text in texts]

        prompts = encode_all() if sum(map(len, texts)) <= SHORT_TEXT else await self.in_thread(encode_all)
        arrival().tokenized = time.monotonic()
        return prompts

    async def decode(self, prompts: Sequence[Ids], skip_special_tokens: bool) -> list[str]:
        def decode_all() -> list[str]:
            return [self.tokenizer.decode(unpack_ids(ids).tolist(), skip_special_tokens) for ids in prompts]

        return await self.in_thread(decode_all)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        arguments: dict[str, Any] | None = None,
        namespace: bytes = b"",
    ) -> ChatPrompt:
        """The prompt that the model's template makes of a chat. The template writes BOS itself where it is wanted."""

        arrived = arrival()

        def render() -> str:
            plain, shown_tools = chat_for_template(messages, tools, self._takes_tools)
            text = self._render(plain, add_generation_prompt, continue_final_message, shown_tools, arguments or {})
            arrived.rendered = time.monotonic()
            return text

        def encode(text: str) -> ChatPrompt:
            ids, length = self._conversations.recall(namespace, text)
            if not length:
                ids = self._encode(text, False)
            elif length < len(text):
                ids += self._pack(self.tokenizer.encode(text[length:], False))
            return ChatPrompt(text, ids, namespace)

        if tools or arguments or not _is_short(messages):
            prompt = await self.in_thread(lambda: encode(render()))
        elif len(text := render()) <= 2 * SHORT_TEXT:  # templates may add much of their own
            prompt = encode(text)
        else:
            prompt = await self.in_thread(encode, text)
        arrived.tokenized = time.monotonic()
        return prompt

    def was_said(self, prompt: ChatPrompt, answer: TextDelta) -> None:
        """Keeps a finished answer's ids for the turns to come, if its text says all that they do."""
        ids = unpack_ids(answer.ids)
        if ids and ids[-1] in self._eos_token_ids:
            ids.pop()
        if self.tokenizer.decode(ids, skip_special_tokens=False) == answer.text:
            self._conversations.remember(prompt.namespace, prompt.text, answer.text, prompt.ids + ids.tobytes())

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final: bool,
        tools: Sequence[dict[str, Any]],
        arguments: dict[str, Any],
    ) -> str:
        if self._template is None:
            raise RequestError(
                "This model has no chat template; start the server with --chat-template, or use /v1/completions.",
                param="messages",
            )
        try:
            return self._template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
                tools=list(tools) or None,
                **arguments,
            )
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from None

    def _encode(self, text: str, add_special_tokens: bool) -> Ids:
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer.encode(text, add_special_tokens)
        if not ids:
            if bos is None:
                raise RequestError("The prompt is empty, and this model has no token to start a text with.")
            ids = [bos]
        elif ids[0] == bos and ids[1:2] == [bos]:  # the text brought its own
            ids = ids[1:]
        return self._pack(ids)

    def _pack(self, ids: list[int]) -> Ids:
        packed = array("i", ids).tobytes()
        if self.tokenizer.vocab_size > self.vocab_size and np.frombuffer(packed, np.int32).max() >= self.vocab_size:
            raise RequestError("The prompt has a token that the tokenizer knows but the model does not.")
        return packed


def _is_short(messages: Sequence[Message]) -> bool:
    """Whether a chat is quicker rendered than handed to a thread."""
    if len(messages) > SHORT_CHAT:
        return False
    fields = [(one.content, one.name, one.tool_calls, one.tool_call_id, one.reasoning_content) for one in messages]
    said = [value for of_message in fields for value in of_message if value]
    return all(isinstance(value, str) for value in said) and sum(map(len, said)) <= SHORT_TEXT


def prompt_texts_or_ids(raw: msgspec.Raw, param: str, vocab_size: int) -> tuple[list[str], list[Ids], bool]:
    """Reads str | [str] | [int] | [[int]]: (texts, [], is_list) or ([], prompts, is_list). Else RequestError."""
    said = bytes(raw)
    if said.startswith(b'"'):
        return [_read(said, str, param)], [], False
    shape = b"".join(_SHAPE.match(said).groups())
    if shape == b'["':
        texts = _read(said, list[str], param)
        check_number(len(texts), param)
        return texts, [], True
    if shape == b"[[":
        lists = _read(said, list[list[int]], param)
        check_number(len(lists), param)
        return [], [pack_checked(ids, param, vocab_size) for ids in lists], True
    if shape == b"[":
        return [], [pack_checked(_read(said, list[int], param), param, vocab_size)], False
    raise RequestError(
        f"`{param}` must be a string, a list of strings, a list of token ids or a list of those.", param=param
    )


def _read(said: bytes, kind: Any, param: str) -> Any:
    try:
        return decode(said, kind)
    except RequestError as error:
        raise RequestError(f"`{param}`: {error.message}", param=param) from None


def pack_checked(ids: list[int], param: str, vocab_size: int) -> Ids:
    """RequestError unless there are ids and all lie in the vocabulary."""
    if not ids:
        raise RequestError(f"`{param}` must not be empty.", param=param)
    try:
        packed = array("i", ids).tobytes()
    except OverflowError:
        packed = array("i", [-1]).tobytes()
    values = np.frombuffer(packed, np.int32)
    if values.min() < 0 or values.max() >= vocab_size:
        raise RequestError(f"`{param}` takes token ids between 0 and {vocab_size - 1}.", param=param)
    return packed


def check_number(prompts: int, param: str) -> None:
    """RequestError for more than MAX_PROMPTS."""
    if prompts > MAX_PROMPTS:
        raise RequestError(f"`{param}` takes at most {MAX_PROMPTS} prompts.", param=param)


def namespace(cache_salt: str | None, extra_key: str | None, owner: bytes = b"") -> bytes:
    """Prefixes are shared only between requests that agree in all three."""
    if not cache_salt and not extra_key:
        return owner
    return owner + msgspec.msgpack.encode((cache_salt or "", extra_key or ""))
