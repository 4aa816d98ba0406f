"""The cost of planning, and the errors of its estimates and traces."""
