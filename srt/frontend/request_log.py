"""L1, frontend: a line in the log for each request that comes and that ends, if an administrator wants them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from srt.frontend.generation import Generation, Prompt
from srt.messages import Ids, SamplingParams, unpack_ids

MOST_LEVEL = 3
SHORT = 64  # ids that level 2 shows
PLAIN = msgspec.structs.asdict(SamplingParams(0))

log = logging.getLogger(__name__)


class RequestLog:
    """Level 0 has names and numbers, 1 also sampling parameters that are not neutral, 2 the first token ids, 3 all.

    What a client wrote, or its ids, is shown from level 2 on; level 1 says of stop strings and the like how many.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.level = 1
        self._outputs: dict[int, bytearray] = {}

    def configure(self, log_level: str | None, enabled: bool | None, level: int | None) -> None:
        """`log_level` is that of the whole log; None leaves a value as it is."""
        if level is not None:
            self.level = level
        if enabled is not None:
            self.enabled = enabled
        if log_level is not None:
            logging.getLogger().setLevel(log_level.upper())

    def came(self, generation: Generation) -> None:
        if not self.enabled:
            return
        prompt = generation.prompt
        line = f"request {_shown_name(generation)} came: {prompt.num_tokens} tokens in its prompt"
        if self.level >= 1:
            line += f", {prompt.spec.max_new_tokens or 'any number of'} to generate"
            if fields := self._shown_fields(prompt):
                line += f", {fields}"
        if self.level >= 2:
            line += f", {self._shown(prompt.ids)}"
            self._outputs[generation.rid] = bytearray()
        log.info("%s", line)

    def said(self, generation: Generation, ids: Ids) -> None:
        if self._outputs and (output := self._outputs.get(generation.rid)) is not None:
            output += ids

    def ended(self, generation: Generation) -> None:
        output = self._outputs.pop(generation.rid, None)
        if not self.enabled:
            return
        reason = "its client has left" if generation.finish is None else generation.finish.reason
        line = f"request {_shown_name(generation)} ended: {reason}, {generation.completion_tokens} tokens generated"
        if output is not None:
            line += f", {self._shown(bytes(output))}"
        log.info("%s", line)

    def _shown_fields(self, prompt: Prompt) -> dict[str, Any]:
        fields = {name: value for name, value in prompt.spec.fields.items() if value != PLAIN[name]}
        if self.level >= 2:
            return fields
        return {name: len(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def _shown(self, ids: Ids) -> str:
        values = unpack_ids(ids if self.level >= MOST_LEVEL else ids[: 4 * SHORT]).tolist()
        return f"ids {values}{'' if len(ids) == 4 * len(values) else ' and more'}"


def _shown_name(generation: Generation) -> str:
    """A client chose it, and may not begin a line of its own with it."""
    return generation.name.encode("unicode_escape").decode()
