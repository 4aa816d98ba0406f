"""Reads a user's own configuration or command, converts it to a training plan or candidate, and edits it."""
