"""What the host sides of kernels share: launchers, launching again, partition, workspace."""
