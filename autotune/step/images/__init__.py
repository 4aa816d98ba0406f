"""Reads the sizes of images and tokenises rows that have some."""
