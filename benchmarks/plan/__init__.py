"""What planning costs, and how far its estimates and traces are from what they stand for."""
