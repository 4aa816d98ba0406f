"""Public documents: the results of the commands, as they are written to JSON."""
