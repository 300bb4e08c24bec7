"""What belongs to the architecture: rings filled by TMA, barriers, clusters, conversions."""
