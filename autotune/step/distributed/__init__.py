"""Training with several processes: process group, engines, and their state in probes and traces."""
