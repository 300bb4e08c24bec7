"""Kernels for sm_90, in Gluon: tiles arrive by TMA, many of them in flight. See README.md here."""
