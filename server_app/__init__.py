"""The ServerApp: from settings over the task to a strategy, and the run that it makes."""
