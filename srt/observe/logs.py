"""Shared: the form of log lines, for people or for machines."""

from __future__ import annotations

import json
import logging
import time

import msgspec

TEXT, JSON = "text", "json"


def configure_logging(level: str, title: str, form: str = TEXT) -> None:
    """All that is logged in this process goes to standard error; `title` says whose it is."""
    # What no form shows is not found out: half the price of a line.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = logging.logAsyncioTasks = False
    handler = logging.StreamHandler()
    if form == JSON:
        handler.setFormatter(JsonFormatter(title))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {title}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One object a line. What was logged with `extra={"fields": ...}` is in it under names of its own."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._second, self._shown = -1, ""  # the last one of which there was a line

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        line = {
            "time": f"{self._shown}.{int(record.msecs):03d}+00:00",
            "level": record.levelname.lower(),
            "process": self._title,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # half a character, as in the name of a file that is no UTF-8
            return json.dumps(line, default=str)
