"""Runs training steps in child processes: builds TRL's trainer from a plan, chooses batches, and measures.

Run as ``python -m autotune.step``; see :mod:`autotune.step.__main__`. The parent process never imports it.
"""
