"""Measure attention on the GPU that is here. Needs the extra `splitkv[lab]`."""
