"""The in-process engine: a Flower Grid without processes."""
