"""A run can be taken again from its log: every decision comes out alike, and one that would not is named."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest
from shared.simulation import random_simulation, settings_of

from srt.board import Board, RankRecord
from srt.config import ConfigError
from srt.scheduler.assembly import Settings, assemble
from srt.scheduler.inbox_log import (
    Decided,
    Difference,
    InboxLog,
    LoggedDrafter,
    LoggedExecutor,
    LoggedGrammars,
    LoggedIntake,
    LoggedRecord,
    replay,
)

SEEDS = (*range(12), *range(1000, 1008))


def logged_run(seed: int, folder: Path, settings_in_log: Settings | None = None) -> tuple[str, int]:
    """The log of a random workload, and its number of steps."""
    simulation, _ = random_simulation(seed, tight=seed >= 1000)
    settings = settings_of(simulation.setting)
    path = str(folder / "log")
    log = InboxLog(path)
    log.write(settings_in_log or settings)
    record = RankRecord(Board.create(str(folder / "board"), 1), 0)
    scheduler = assemble(
        settings,
        executor=LoggedExecutor(simulation.executor, log),
        intake=LoggedIntake(simulation.intake, log),
        outlet=simulation.outlet,
        record=LoggedRecord(record, log),
        grammars=LoggedGrammars(simulation.grammars, log),
        drafter=LoggedDrafter(simulation.drafter, log),
    )
    simulation.intake.stop = lambda: setattr(scheduler, "stopped", True)
    scheduler.run()
    assert len(simulation.outlet.finishes) == len(simulation.requests)
    return path, simulation.intake.number


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_is_replayed_to_its_last_decision(seed, tmp_path):
    path, steps = logged_run(seed, tmp_path)
    assert replay(path) == steps


@pytest.mark.parametrize("lost", [1, 5, 100])
def test_a_log_that_breaks_off_is_replayed_as_far_as_it_goes(lost, tmp_path):
    path, steps = logged_run(2, tmp_path)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:-lost])
    assert 0 < replay(path) <= steps


def test_a_scheduler_that_decides_otherwise_is_noticed(tmp_path):
    setting = random_simulation(2)[0].setting
    other = settings_of(dataclasses.replace(setting, num_pages=setting.num_pages + 1))
    path, _ = logged_run(2, tmp_path, settings_in_log=other)
    with pytest.raises(Difference, match="step 1, free"):
        replay(path)


def test_another_token_is_noticed(tmp_path):
    path, _ = logged_run(2, tmp_path)
    data = bytearray(Path(path).read_bytes())
    at, sampled = 0, []
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if data[at + 4 : at + 6] == b"\x92\x03":
            sampled.append(at + 3 + length)  # the last byte of the last token
        at += 4 + length
    data[sampled[-1] - 3] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(Difference, match="tokens"):
        replay(path)


def test_a_place_where_nothing_can_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--inbox-log .*/nowhere/log cannot be written: No such file or directory"):
        InboxLog(str(tmp_path / "nowhere" / "log"))


def test_a_full_disk_is_named():
    log = InboxLog("/dev/full")
    with pytest.raises(ConfigError, match="--inbox-log /dev/full .*No space"):
        log.write(Decided(()))


def test_what_a_disk_takes_in_part_is_not_taken(tmp_path):
    log = InboxLog(str(tmp_path / "log"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            log.write(Decided((1, 2, 3)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log").stat().st_size == 6
