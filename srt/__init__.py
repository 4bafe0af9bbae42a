"""Lockstep's runtime: the shared rooms (config, messages, transport, process) and the layers L1, L2, L4 and L5."""

__version__ = "0.1.0"
