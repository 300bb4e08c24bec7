"""Attention of whole sequences for sm_90."""
