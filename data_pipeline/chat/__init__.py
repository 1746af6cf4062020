"""Chat templates, and which tokens of a conversation are targets."""
