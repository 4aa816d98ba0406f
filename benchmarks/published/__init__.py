"""Traces against public tables of measured memory."""
