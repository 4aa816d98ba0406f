"""Sizes of a dataset's rows, and the micro-batches that follow from them."""
