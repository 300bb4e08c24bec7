"""Primitives of the architecture: rings filled by TMA, barriers, clusters, conversions."""
