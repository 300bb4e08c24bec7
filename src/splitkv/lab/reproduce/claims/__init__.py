"""What the sources say, a module each, and what we say beside: figures, bounds, verdicts."""
