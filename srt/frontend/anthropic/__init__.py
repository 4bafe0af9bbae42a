"""L1, main process: Anthropic's form of a chat."""
