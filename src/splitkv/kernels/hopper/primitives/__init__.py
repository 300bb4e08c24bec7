"""Primitives that the kernels for sm_90 share: rings filled by TMA, barriers of the hardware,
clusters, fences, votes, reciprocals, sums of rows in the layouts of wgmma, 8-bit conversion."""
