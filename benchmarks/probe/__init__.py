"""The cost of a probe, and the accuracy of its promised figures."""
