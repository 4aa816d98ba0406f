"""The base of a search: reads a configuration of the user's own, and edits it to what was found."""
