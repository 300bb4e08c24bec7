"""The host side that kernels share: launchers, relaunching, partition, workspace."""
