"""Reads and writes files: JSON, YAML, nested mappings, whole files at once, temporary folders."""
