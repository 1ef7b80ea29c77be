"""Everything that relies on what Flower does not promise: its private modules, used and changed."""
