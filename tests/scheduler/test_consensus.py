"""The digest of all decisions: equal wherever the same inboxes are read, whatever an interpreter does with hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared.simulation import VOCAB, Setting, Simulation, random_simulation, request

from srt.board import RING, Board, RankRecord
from srt.scheduler.consensus import BoardConsensus

TESTS = Path(__file__).parents[1]
SEEDS = (1, 10, 1002, 1008)  # one of each policy


class ReadingConsensus:
    """The real one on a real board, read back after each step."""

    def __init__(self, folder: Path, simulation: Simulation) -> None:
        self.board = Board.create(str(folder / "board"), 1)
        record = RankRecord(self.board, 0)
        self._inner = BoardConsensus(record, simulation.planner, simulation.output, simulation.ledger)
        self.digests: list[int] = []

    def step(self, inbox, plan) -> None:
        self._inner.step(inbox, plan)
        record = self.board.read(0)
        assert record.step == inbox.number
        self.digests.append(record.digest)


def digests_of(folder: Path, simulation: Simulation) -> list[int]:
    consensus = ReadingConsensus(folder, simulation)
    simulation.scheduler._consensus = consensus
    simulation.run()
    last = list(enumerate(consensus.digests, start=1))[-RING:]
    assert [(decision.step, decision.digest) for decision in consensus.board.read(0).recent] == last
    consensus.board.close()
    return consensus.digests


def test_digests_do_not_depend_on_hash_seeds(tmp_path):
    children = []
    for hash_seed in ("0", "1", "2", "3"):
        folder = tmp_path / hash_seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
        command = [sys.executable, __file__, str(folder)]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    outputs = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * 4
    chains = [json.loads(output) for output in outputs]
    assert all(len(chain) > 10 and len(set(chain)) == len(chain) for chain in chains[0])
    assert chains == [chains[0]] * 4


@pytest.mark.parametrize(
    "changed",
    [
        {1: [request(1, [5, 6, 7]), request(2, [5, 6, 8])]},  # another token in a prompt
        {1: [request(2, [5, 6, 7]), request(1, [5, 6, 7])]},  # another order
        {1: [request(1, [5, 6, 7])], 2: [request(2, [5, 6, 7])]},  # another step
    ],
)
def test_digest_sees_what_differs(tmp_path, changed):
    setting = Setting()
    script = {1: [request(1, [5, 6, 7]), request(2, [5, 6, 7])]}
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    first, again, other = (
        digests_of(folder, Simulation(setting, items))
        for folder, items in zip(folders, (script, script, changed), strict=True)
    )
    assert first == again
    assert first[-1] not in other


def test_digest_sees_a_rank_that_samples_another_token(tmp_path):
    """Nothing else differs, and the digest tells at which step it began."""
    chains = []
    for name, vocab_size in (("a", VOCAB), ("b", VOCAB - 1)):
        (tmp_path / name).mkdir()
        simulation = Simulation(Setting(), {1: [request(1, [5, 6, 7], 4, ignore_eos=True)]})
        simulation.executor.model.vocab_size = vocab_size
        chains.append(digests_of(tmp_path / name, simulation))
    same = [a == b for a, b in zip(*chains, strict=True)]
    assert same == [True] * 2 + [False] * (len(same) - 2)


def main(folder: Path) -> None:
    chains = []
    for seed in SEEDS:
        (folder / str(seed)).mkdir()
        simulation, _ = random_simulation(seed, tight=seed >= 1000)
        chains.append(digests_of(folder / str(seed), simulation))
    print(json.dumps(chains))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
