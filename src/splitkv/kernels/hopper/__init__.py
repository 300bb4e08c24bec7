"""The same jobs for sm_90, in Gluon: TMA into shared memory, and loads of many tiles in flight."""
