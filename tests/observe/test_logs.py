"""Log lines for machines are objects; those for people begin with who speaks."""

import json
import subprocess
import sys
from datetime import datetime, timezone

from arch.source_tree import ROOT

PROGRAM = """
import logging, sys
from srt.observe.logs import configure_logging
configure_logging("info", "scheduler 0", sys.argv[1])
log = logging.getLogger("x")
log.debug("not this")
log.info("running %d", 3, extra={"fields": {"running": 3}})
log.info("a file named \\udc80", extra={"fields": {"folder": __import__("pathlib").Path("x")}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("no")
"""


def lines(form):
    command = [sys.executable, "-c", PROGRAM, form]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()


def test_json_is_one_object_a_line():
    first, odd, second = map(json.loads, lines("json"))
    assert datetime.fromisoformat(first["time"]).tzinfo == timezone.utc
    assert (first["level"], first["process"], first["logger"]) == ("info", "scheduler 0", "x")
    assert (first["message"], first["running"]) == ("running 3", 3)
    assert (odd["message"], odd["folder"]) == ("a file named \udc80", "x")
    assert second["exception"].endswith("ZeroDivisionError: division by zero")


def test_text():
    first, _, second, *_ = lines("text")
    assert first.endswith(" INFO scheduler 0: running 3")
    assert second.endswith(" ERROR scheduler 0: no")


def test_a_signal_prints_stacks_and_what_a_process_says_of_itself():
    program = """
import os, signal, time
from srt.process import on_dump
on_dump()
on_dump(lambda: "ledger: 5 tokens")
def somewhere():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
somewhere()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "in somewhere" in done.stderr
    assert "ledger: 5 tokens" in done.stderr
