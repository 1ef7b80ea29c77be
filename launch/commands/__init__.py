"""The commands of who runs things on one machine, or orders a run from a federation."""
