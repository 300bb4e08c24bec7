"""Split-KV decode for sm_90."""
