"""Starting processes, keeping them alive, and ending them."""
