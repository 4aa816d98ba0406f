"""What the user's words and this machine come to: model, dataset, hardware, software and memory budget."""
