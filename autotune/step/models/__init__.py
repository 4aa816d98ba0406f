"""Models from their source: loaded, drawn at random, shrunken, described."""
