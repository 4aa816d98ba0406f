"""Training with several processes, of which this one is a rank: what accelerate and DeepSpeed need beside the plan."""
