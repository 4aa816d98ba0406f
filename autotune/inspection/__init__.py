"""Resolves the user's input on this machine: model, dataset, hardware, software and memory budget."""
