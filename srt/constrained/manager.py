"""L4's CPU side, each rank: the grammars of this rank and the state of every request that has one.

What it tells the scheduler follows from the calls alone: a compiled grammar counts only once an inbox says that all
ranks have it, and the cache changes only then. Compiling itself happens in threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from srt.constrained.backend import Backend, Compiled, Matcher
from srt.messages import Grammar
from srt.registry import Registry
from srt.scheduler.schedule_batch import Accepted, Draft, TokenMasks
from srt.schema_rules import GrammarError
from srt.token_bytes import Vocabulary

DEFAULT_BACKEND = "llguidance"
BACKENDS = Registry(
    "grammar backend",
    {
        "llguidance": "srt.constrained.llguidance_backend:LLGuidance",
        "xgrammar": "srt.constrained.xgrammar_backend:XGrammar",
    },
)

FORCED_MOST = 24
"""Tokens ahead that are looked for at once, which bounds what a step spends on one request."""

MAX_CACHED = 128  # compiled grammars
MAX_CACHED_TEXT = 4 << 20  # bytes of their texts
THREADS = 2

NOTHING = Draft()

Key = tuple[str, str]


@dataclass
class _Entry:
    """A grammar: queued, then compiling, then compiled on all ranks."""

    serial: int
    size: int
    waiting: list[int] = field(default_factory=list)  # rids
    compiling: Future[tuple[Compiled, Draft]] | None = None
    compiled: Compiled | None = None
    forced: Draft = NOTHING  # at its beginning: found out once, in the thread that compiles


@dataclass
class _State:
    """Where one request stands."""

    grammar: Grammar
    ignore_eos: bool  # an output that may go on does
    is_free: bool  # the token behind which the grammar holds has not come yet
    matcher: Matcher | None = None  # None until its grammar is there
    forced: Draft = NOTHING  # behind the tokens so far, or where the grammar will begin

    def begin(self, entry: _Entry) -> None:
        self.matcher, self.forced = entry.compiled.matcher(), entry.forced

    def ahead(self, draft: Draft) -> Iterator[bool]:
        """Stands behind the certain tokens of a draft, then behind each of the others as long as they are allowed; in
        the end where it stood."""
        was_free, count = self.is_free, 0
        for place, token in enumerate(draft.tokens):
            if place >= draft.certain:
                yield True
            if self.is_free:
                self.is_free = token != self.grammar.starts_after
            elif self.matcher.look_ahead(token):
                count += 1
            else:
                break
        else:
            yield True
        self.matcher.look_back(count)
        self.is_free = was_free


class GrammarManager:
    """`finished(serial)` is called, by any thread, when this rank is done with a grammar.

    Serials under way at the same time lie less than `window` apart.
    """

    def __init__(self, vocabulary: Vocabulary, finished: Callable[[int], None], window: int) -> None:
        self._vocabulary = vocabulary
        self._finished = finished
        self._window = window
        self._num_words = -(-len(vocabulary.table) // 32)
        self._not_ends = _all_but(vocabulary.eos_token_ids, len(vocabulary.table))
        self._backends: dict[str, Backend] = {}
        self._making = threading.Lock()
        self._backend(DEFAULT_BACKEND)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._serial = 0
        self._cache: OrderedDict[Key, _Entry] = OrderedDict()  # least recently asked for first; all stages
        self._queued: deque[Key] = deque()
        self._compiling: dict[int, Key] = {}  # by serial, in order
        self._states: dict[int, _State] = {}

    @property
    def compiling(self) -> Sequence[int]:
        """Serials under way, whose end no inbox has told yet."""
        return tuple(self._compiling)

    # ---- from a grammar to a matcher --------------------------------------------------------------------------------

    def open(self, rid: int, grammar: Grammar, ignore_eos: bool) -> bool:
        state = self._states[rid] = _State(grammar, ignore_eos, grammar.starts_after >= 0)
        key = grammar.backend, grammar.text
        entry = self._cache.get(key)
        if entry is None:
            self._serial += 1
            entry = self._cache[key] = _Entry(self._serial, len(grammar.text))
            self._queued.append(key)
            self._start()
        self._cache.move_to_end(key)
        if entry.compiled is None:
            entry.waiting.append(rid)
            return False
        state.begin(entry)
        return True

    def ready(self, serial: int) -> list[tuple[int, str]]:
        key = self._compiling.pop(serial)
        entry = self._cache[key]
        try:
            entry.compiled, entry.forced = entry.compiling.result()
        except GrammarError as error:
            del self._cache[key]
            fault = str(error)
        else:
            fault = ""
            self._evict()
            for rid in entry.waiting:
                self._states[rid].begin(entry)
        self._start()
        waiting, entry.waiting, entry.compiling = entry.waiting, [], None
        return [(rid, fault) for rid in waiting]

    def drop(self, rid: int) -> None:
        state = self._states.pop(rid)
        if state.matcher is None:
            entry = self._cache.get((state.grammar.backend, state.grammar.text))
            if entry is not None and rid in entry.waiting:
                entry.waiting.remove(rid)

    def _start(self) -> None:
        while self._queued and self._may_start():
            key = self._queued.popleft()
            entry = self._cache[key]
            self._compiling[entry.serial] = key
            entry.compiling = self._threads.submit(self._compile, *key)
            entry.compiling.add_done_callback(lambda _, serial=entry.serial: self._finished(serial))

    def _may_start(self) -> bool:
        """Serials on the board must lie within one window."""
        oldest = next(iter(self._compiling), None)
        return oldest is None or self._cache[self._queued[0]].serial < oldest + self._window

    def _compile(self, backend: str, text: str) -> tuple[Compiled, Draft]:
        compiled = self._backend(backend).compile(text)
        return compiled, _forced(compiled.matcher())

    def _backend(self, name: str) -> Backend:
        with self._making:
            if name not in self._backends:
                self._backends[name] = BACKENDS.load(name)(self._vocabulary)
            return self._backends[name]

    def _evict(self) -> None:
        entries = {key: entry for key, entry in self._cache.items() if entry.compiled is not None}
        count, size = len(entries), sum(entry.size for entry in entries.values())
        for key, entry in entries.items():
            if count <= MAX_CACHED and size <= MAX_CACHED_TEXT:
                return
            del self._cache[key]
            count, size = count - 1, size - entry.size

    # ---- step by step -----------------------------------------------------------------------------------------------

    def masks(self, places: Sequence[int], rids: Sequence[int], drafts: Mapping[int, Draft]) -> TokenMasks:
        states = [self._states[rid] for rid in rids]
        if not drafts:
            return TokenMasks(np.array(places, np.int32), self._fill(states))
        # All that stand behind the same number of unsure tokens at a time.
        every_place, every_bits = [], []
        walks = [state.ahead(drafts.get(rid, NOTHING)) for state, rid in zip(states, rids, strict=True)]
        offset, going = 0, list(zip(places, states, walks, strict=True))
        while going := [(place, state, walk) for place, state, walk in going if next(walk, False)]:
            every_place += [place + offset for place, _, _ in going]
            every_bits.append(self._fill([state for _, state, _ in going]))
            offset += 1
        order = np.argsort(every_place)
        return TokenMasks(np.array(every_place, np.int32)[order], np.concatenate(every_bits)[order])

    def _fill(self, states: Sequence[_State]) -> np.ndarray:
        bits = np.empty((len(states), self._num_words), np.int32)
        for name, backend in list(self._backends.items()):
            mine = [i for i, state in enumerate(states) if state.grammar.backend == name and not state.is_free]
            if len(mine) == len(states):
                backend.fill([state.matcher for state in states], bits)
            elif mine:
                some = np.empty((len(mine), self._num_words), np.int32)
                backend.fill([states[i].matcher for i in mine], some)
                bits[mine] = some
        for i, state in enumerate(states):
            if state.is_free:
                bits[i] = self._not_ends
            elif state.ignore_eos:
                going_on = bits[i] & self._not_ends
                if going_on.any():
                    bits[i] = going_on
        return bits

    def accept(self, rid: int, token: int) -> Accepted:
        state = self._states[rid]
        if state.is_free:
            state.is_free = token != state.grammar.starts_after
            return Accepted(ends=False)
        matcher, (forced, certain) = state.matcher, state.forced
        state.forced = Draft(forced[1:], max(0, certain - 1)) if forced[:1] == (token,) else NOTHING
        matcher.accept(token)
        return Accepted(matcher.ended, matcher.fault)

    def forced(self, rid: int) -> Draft:
        state = self._states[rid]
        if state.is_free:
            return NOTHING
        if not state.forced.tokens:
            state.forced = _forced(state.matcher)
        return state.forced


def _forced(matcher: Matcher) -> Draft:
    tokens, certain = matcher.forced(FORCED_MOST)
    return Draft(tuple(tokens), certain)


def _all_but(forbidden: Sequence[int], size: int) -> np.ndarray:
    allowed = np.zeros(-(-size // 32) * 32, np.uint8)
    allowed[:size] = 1
    allowed[[token for token in forbidden if token < size]] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)
