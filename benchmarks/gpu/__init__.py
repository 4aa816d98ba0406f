"""What needs a CUDA device: its tests, its allocator, predictions against measurements, and searches."""
