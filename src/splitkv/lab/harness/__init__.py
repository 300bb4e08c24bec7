"""Instruments that every room of the lab shares: what is timed, how, by whom, and where
results go."""
