"""A user's own configuration or command: read, as a training plan, as a candidate, and edited."""
