"""From traces of small models and few shapes to estimates for any shape, and from few techniques to all of them."""
