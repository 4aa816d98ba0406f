"""The words of the project as frozen dataclasses; standard library only."""
