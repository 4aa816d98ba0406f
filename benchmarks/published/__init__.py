"""Traces beside public tables of measured memory."""
