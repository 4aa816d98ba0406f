"""The project's shared data types as frozen dataclasses; imports the standard library, and numpy to count rows."""
