"""L1, frontend: bodies that come compressed. For a thread: what is short may take long to be read, or have no end."""

from __future__ import annotations

import gzip
import io
import zlib

from srt.frontend.errors import RequestError

ENCODINGS = ("gzip", "deflate")


def decompress(raw: bytes, encoding: str, most: int) -> bytes:
    """The first `most` bytes of what was compressed. RequestError for what was not, or is not all there."""
    try:
        if encoding == "gzip":
            return gzip.GzipFile(fileobj=io.BytesIO(raw)).read(most)
        has_head = raw[:1] != b"" and raw[0] & 0x0F == zlib.DEFLATED  # which many leave out
        reader = zlib.decompressobj(zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)
        body = reader.decompress(raw, most)
    except (EOFError, OSError, zlib.error):
        raise misencoded() from None
    if len(body) < most and not reader.eof:
        raise misencoded()
    return body


def misencoded() -> RequestError:
    return RequestError("The body is not encoded as its headers say.")
