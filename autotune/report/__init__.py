"""What is shown: values are computed first, where tests can check them, and then drawn."""
