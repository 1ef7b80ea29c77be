"""The `blackthorn` command: its commands, federations of several machines, and processes."""
