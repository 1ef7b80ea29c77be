"""What a run is asked for: its keys, the names they may have, and where they do not go together."""
