"""Shared: the form of log lines, for people or for machines."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

TEXT, JSON = "text", "json"


def configure_logging(level: str, title: str, form: str = TEXT) -> None:
    """All that is logged in this process goes to standard error; `title` says whose it is."""
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

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._title,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
