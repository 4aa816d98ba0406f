"""The use case behind ``autotune check``: reads a configuration, finds what is wrong, and says whether it fits."""
