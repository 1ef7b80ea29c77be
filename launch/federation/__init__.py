"""Taking part in a federation: its server, its clients, their keys, and those who look after it."""
