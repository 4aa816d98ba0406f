"""Properties of a dispatched operator: known values, cached metadata, work, caller, serialised form."""
