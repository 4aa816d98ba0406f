"""An additive model of technique combinations: which to trace (design), and how effects add up to the others."""
