"""What a probe costs, and whether what it promises is kept."""
