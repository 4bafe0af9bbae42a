"""L1, frontend: one choice of a chat's answer as it comes. Owns its parser and what later turns will need."""

from __future__ import annotations

import msgspec

from srt.frontend.generation import Generation, join
from srt.frontend.parsing.answer import AnswerFormat
from srt.frontend.parsing.pieces import Piece
from srt.frontend.words import ChatPrompt, Words
from srt.messages import TextDelta


class ChatAnswer:
    def __init__(self, words: Words, chat: ChatPrompt, form: AnswerFormat) -> None:
        self._words = words
        self._chat = chat
        self._form = form
        self._parser = form.parser()
        self._deltas: list[TextDelta] = []

    @property
    def called(self) -> bool:
        """There are calls, and all of them are whole."""
        return self._parser.called

    def keep(self, delta: TextDelta) -> None:
        """For an answer that is shown as it is; not for its last delta."""
        self._deltas.append(delta)

    def feed(self, generation: Generation, delta: TextDelta) -> list[Piece]:
        """What may be shown now. With the last delta the whole answer is remembered, and its reasoning counted."""
        if delta.logprobs is not None:  # they are much, and not remembered
            delta = msgspec.structs.replace(delta, logprobs=None)
        self._deltas.append(delta)
        pieces = self._parser.feed(delta.text)
        if delta.finish is not None:
            pieces += self._parser.finish()
            whole = join(self._deltas)
            self._words.was_said(self._chat, whole)
            if self._form.reasoning is not None:
                generation.reasoning_tokens = self._form.count_reasoning(self._words.bytes_of(whole.ids))
        return pieces
