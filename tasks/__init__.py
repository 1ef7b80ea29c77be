"""What is learned: models, data sets and how they are dealt, problems in closed form."""
