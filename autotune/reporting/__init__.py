"""Terminal output: values are computed first, where tests can check them, and then rendered."""
