"""An additive model of technique combinations: a design selects which to trace, the model predicts the others."""
