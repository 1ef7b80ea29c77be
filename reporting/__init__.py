"""What is made of a run folder: plots, the report, predictions and what the posterior says."""
