"""L1, frontend: from the JSON that clients write to typed structures, with sentences on what is wrong with it."""

from __future__ import annotations

import codecs
import functools
import re
from typing import Any, get_args, get_type_hints

import msgspec

from srt.frontend.errors import RequestError

# Lone surrogates are what a client sends that cut a string between the halves of an emoji.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
MOST_WHOLE = 256 * 1024  # bytes of a body in which these are looked for, in up to 50 ms
# To JSON Schema 100.0 is an integer, and there are languages whose programs write each number so. Strings stay.
_WHOLE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?\d+)\.0+(?![\deE])', re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field (`.*?`)", re.DOTALL)


def decode(raw: bytes, kind: Any) -> Any:
    """RequestError where `raw` is not JSON or not a `kind`."""
    try:
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        message = str(error)
        if "`int" in message and "got `float`" in message and len(raw) <= MOST_WHOLE:
            whole = _WHOLE.sub(lambda found: found[1] or found[0], raw)
            if whole != raw:
                return decode(whole, kind)
        said, _, where = message.rpartition(" - at `")  # `$.stop[2]` and the like
        param = re.split(r"[.\[`]", where.removeprefix("$").removeprefix("."), maxsplit=1)[0] if said else None
        if unknown := _UNKNOWN.match(message):
            raise RequestError(
                f"Unknown field {unknown[1]}", param=unknown[1][1:-1], code="unknown_parameter"
            ) from None
        if missing := _MISSING.fullmatch(message):
            param = missing[1]
        if message.startswith("Invalid enum value") and param in (hints := get_type_hints(kind)):
            message += "; it takes " + ", ".join(value for part in get_args(hints[param]) for value in get_args(part))
        raise RequestError(f"Invalid request: {message}", param=param) from None
    except RecursionError:
        raise RequestError("Invalid JSON: nested too deeply") from None
    except ValueError as error:
        if not raw.strip():
            raise RequestError("Invalid JSON: the body is empty") from None
        if raw.startswith(codecs.BOM_UTF8 + b"{"):  # of clients that write it before all text
            return decode(raw.removeprefix(codecs.BOM_UTF8), kind)
        mended = _ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], raw)
        if mended != raw:
            return decode(mended, kind)
        raise RequestError(f"Invalid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind)
