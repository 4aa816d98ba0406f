"""Runs a real trainer on chosen batches: builds it from a training plan, follows its phases, and measures it."""
