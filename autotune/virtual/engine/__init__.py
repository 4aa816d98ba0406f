"""Traces a function: the virtual device, the dispatch mode, and the process that runs them."""
