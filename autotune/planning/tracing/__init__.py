"""Provides the planner's traces: a store for one run, backed by a cache on disk."""
