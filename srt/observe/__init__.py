"""Shared: how it is told where time goes: the marks of a request's way, the catalogue of metrics, logs and traces."""
