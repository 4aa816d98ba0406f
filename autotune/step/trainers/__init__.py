"""The child's side of each trainer: TRL's classes, and what TRL does not offer for all of them alike."""
