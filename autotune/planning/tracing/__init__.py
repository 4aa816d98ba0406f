"""Where the planner's traces come from: the store of one run, and the cache on disk behind it."""
