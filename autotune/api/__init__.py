"""The use cases, one per module; the only place that wires the parts together."""
