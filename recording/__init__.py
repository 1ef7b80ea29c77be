"""What a run leaves: its folder, its states to go on from, what it spent, and who is told of it."""
