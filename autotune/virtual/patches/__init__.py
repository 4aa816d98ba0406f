"""Patches for code that behaves differently on fake tensors."""
