"""THE training step, in a process of its own: plan to TRL trainer, worst and typical batches, meters.

Run as ``python -m autotune.step``; see :mod:`autotune.step.__main__`. Nothing in the parent imports it.
"""
