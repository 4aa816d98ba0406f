"""Time of operators, launches, copies and communication on a GPU."""
