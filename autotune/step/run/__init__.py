"""One run of a real trainer on chosen batches: built from a training plan, followed, timed and measured."""
