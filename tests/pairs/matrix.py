"""Which pairs there are, over which routes each is tried, and the page in docs/ that says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pairs.circumstances import (
    PAGE_SIZE,
    Abort,
    CacheHit,
    ChunkedPrefill,
    NoOverlap,
    Pages,
    Ranks,
    Retraction,
)  # fmt: skip
from pairs.plain import FOR_EVER, TOLERANCE
from pairs.reference import Ask, Reference, prompt_ids
from pairs.routes import REFUSED, ROUTES
from pairs.wishes import (
    Choices,
    Grammar,
    LogitBias,
    Logprobs,
    MinTokens,
    Penalties,
    PromptLogprobs,
    Seed,
    Stop,
    Streaming,
    Tools,
)  # fmt: skip

Kind = Any  # a class that is a `Feature`
Route = Any  # one of ROUTES

FEATURES = (
    Tools, Grammar, Seed, Choices, Penalties, LogitBias, Abort, MinTokens, Stop, Logprobs, PromptLogprobs, Streaming,
    CacheHit, Retraction, ChunkedPrefill, Ranks, Pages, NoOverlap,
)  # fmt: skip
"""In the order in which they change a request."""

DOC = Path(__file__).parents[2] / "docs" / "feature-pairs.md"
LEAST_GAP = 2 * TOLERANCE
"""Between what comes and the next best, in logits: less and another order of sums might decide."""

MEETINGS = {
    ("tools", "grammar"): "With `tool_choice` `auto` an answer is one or the other, with `required` it is a 400.",
    ("tools", "stop strings"): "A call that must come is not cut.",
    ("tools", "min_tokens"): "Calls follow each other until there are so many tokens.",
    ("grammar", "min_tokens"): "A grammar that can only end ends its answer all the same.",
    ("grammar", "stop strings"): "A stop cuts the answer, which then is the beginning of one that the grammar has.",
    ("seed", "n > 1"): "The first choice is the one that is given alone; the others have seeds made of it.",
    ("abort", "min_tokens"): "Who takes a request away is not asked to wait.",
    ("abort", "stop strings"): "What was held back because it might become a stop is shown.",
    ("stop strings", "logprobs"): "All tokens are rated, also those of the text that is cut.",
    ("prompt logprobs", "cache hit"): "The cache serves what lies before the first token that is rated.",
    ("prompt logprobs", "retraction"): "What was rated stays; no position comes twice.",
    ("retraction", "cache hit"): "`cached_tokens` is what was found when it was admitted first.",
}
"""What is to be expected where two features want different things. The oracles hold the server to it."""


@dataclass(frozen=True)
class Pair:
    one: Kind
    other: Kind

    @property
    def names(self) -> tuple[str, str]:
        return self.one.name, self.other.name

    @property
    def flags(self) -> tuple[str, ...]:
        return self.one.flags + self.other.flags

    @property
    def routes(self) -> list[Route]:
        return [route for route in ROUTES if not self.why_not(route)]

    def why_not(self, route: Route) -> str:
        """Why the route does not take both features; empty if it does."""
        missing = [route.lacks[name] for name in self.names if name in route.lacks]
        return missing[0] if missing else REFUSED.get((route.name, *self.names), "")

    def __str__(self) -> str:
        return " and ".join(self.names)


PAIRS = [Pair(*pair) for pair in itertools.combinations(FEATURES, 2)]
TRIALS = [(pair, route) for pair in PAIRS for route in pair.routes]


def ask_for(pair: Pair, features: list[Any], reference: Reference) -> Ask:
    """A request that both features change, and whose answer does not hang on the last bits of a logit."""
    for number in range(100):
        ask: Ask | None = _plain(f"{number}: tell of Quebec and the café, in 3 ZX. {pair}", "tools" in pair.names)
        for feature in features:
            ask = ask and feature.ask(ask, reference)
        if ask is not None and _is_clear(ask, reference):
            return ask
    raise AssertionError(f"no prompt shows {pair}")


def _plain(words: str, tools: bool) -> Ask:
    """Its prompt fills whole pages, so that its first token needs another one."""
    missing = -len(prompt_ids(Ask(words, tools=tools).prompt)) % PAGE_SIZE
    return Ask(words + "!" * missing)


def _is_clear(ask: Ask, reference: Reference) -> bool:
    if ask.max_tokens == FOR_EVER:
        ask = replace(ask, max_tokens=80)  # it will be taken away
    return all(choice.gap > LEAST_GAP for choice in reference.choices(ask))


def page() -> str:
    """docs/feature-pairs.md. `PYTHONPATH=.:tests python -m pairs.matrix` writes it."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# Features in pairs"
    yield ""
    yield (
        f"Every pair of {len(FEATURES)} features is tried on one request, over each route that has both: "
        f"{len(PAIRS)} pairs, {len(TRIALS)} trials. What is"
    )
    yield (
        "answered must be what transformers and a few rules of sampling, written apart from the server, predict token "
        "by token, and"
    )
    yield "each feature's own oracle must agree. This page is made from what the tests go by (`tests/pairs/`)."
    yield ""
    yield "## Oracles"
    yield ""
    yield "| feature | what it does to the request | what its oracle looks at |"
    yield "|---|---|---|"
    for kind in FEATURES:
        yield f"| {kind.name} | {kind.does} | {kind.proof} |"
    yield ""
    yield "## Trials"
    yield ""
    letters = ", ".join(f"{route.letter} `{route.path}`" for route in ROUTES)
    yield f"{letters}. Rows and columns are the same features, in the same order; each pair stands once."
    yield ""
    yield "| |" + "".join(f" {kind.name} |" for kind in FEATURES[1:])
    yield "|---" * len(FEATURES) + "|"
    cells = {pair.names: " ".join(route.letter for route in pair.routes) for pair in PAIRS}
    for kind in FEATURES[:-1]:
        yield f"| {kind.name} |" + "".join(f" {cells.get((kind.name, other.name), '')} |" for other in FEATURES[1:])
    yield ""
    yield "## Where they meet"
    yield ""
    for names, sentence in MEETINGS.items():
        yield f"- **{' and '.join(names)}**: {sentence}"
    yield ""
    yield "## What has no meaning"
    yield ""
    without = [str(pair) for pair in PAIRS if not pair.routes]
    yield f"Pairs that mean nothing on any route: {', '.join(without) or 'none'}. These are refused with 400:"
    yield ""
    for route in ROUTES:
        for name, reason in route.lacks.items():
            yield f"- `{route.path}`, {name} with anything: {reason}."
    for (route_name, *names), reason in REFUSED.items():
        path = next(route.path for route in ROUTES if route.name == route_name)
        yield f"- `{path}`, {' and '.join(names)}: {reason}."
    yield ""


if __name__ == "__main__":
    DOC.write_text(page())
