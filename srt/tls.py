"""Shared, frontend: the server's certificate."""

from __future__ import annotations

import ssl

from srt.config import ConfigError, ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None where there is no certificate; ConfigError for one that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:
        key = "" if config.ssl_keyfile is None else f" and --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}{key} cannot be used: {error}") from None
    return context
