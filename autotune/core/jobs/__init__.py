"""Jobs of child processes: their requests and replies, and how these are exchanged."""
