"""From a problem and a device to a plan: what exists, what is legal, which policy, and why."""
