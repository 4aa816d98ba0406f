"""The user's dataset: loaded, checked, tokenised by TRL's own trainer, described."""
