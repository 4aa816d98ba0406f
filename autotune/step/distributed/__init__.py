"""Training with several processes, one of which is this rank: what accelerate and DeepSpeed need but the plan lacks."""
