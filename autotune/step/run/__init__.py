"""Runs a real trainer on chosen batches: builds it from a training plan, follows its phases, times and measures it."""
