"""Time attention on the GPU that is here: decode, whole sequences, a model, what 8 bits cost."""
