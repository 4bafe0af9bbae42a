"""L1, frontend: Anthropic's form of a chat."""
