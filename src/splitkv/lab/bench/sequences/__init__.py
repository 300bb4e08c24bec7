"""Attention of whole sequences beside other libraries: forward and backward, dense and packed."""
