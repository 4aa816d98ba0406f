"""The use case behind ``autotune check``: reads a configuration, finds its problems, and checks whether it fits."""
