"""Shared, frontend: how long a request may be. Pure arithmetic.

What the scheduler's admission could never serve is refused by these formulas, so nothing can wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens. The last token a request generates is never fed back, so its K/V needs no slot."""

    context_length: int
    pool_tokens: int
    page_size: int

    @cached_property
    def max_total_tokens(self) -> int:
        """The largest prompt + output that the context and an otherwise empty pool hold."""
        pool_pages = self.pool_tokens // self.page_size
        return min(self.context_length, pool_pages * self.page_size + 1)

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """The most a prompt of this length may generate; below 1 the prompt itself is too long."""
        return self.max_total_tokens - prompt_tokens

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> str | None:
        """A sentence for the client if this request can never be served, else None."""
        total = prompt_tokens + max_new_tokens
        if total > self.context_length:
            return (
                f"This model's maximum context length is {self.context_length} tokens. However, you requested {total} "
                f"tokens ({prompt_tokens} in the prompt, {max_new_tokens} for the completion). "
                "Please reduce the length of the prompt or of the completion."
            )
        if total > self.max_total_tokens:
            return (
                f"This server's KV cache holds {self.pool_tokens} tokens. However, you requested {total} tokens "
                f"({prompt_tokens} in the prompt, {max_new_tokens} for the completion). "
                "Please reduce the length of the prompt or of the completion."
            )
        return None
