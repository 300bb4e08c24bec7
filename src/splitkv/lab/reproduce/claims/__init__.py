"""Claims of the sources, a module each, and ours beside: figures, bounds, verdicts."""
