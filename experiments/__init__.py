"""The papers' tables and figures, one file a paper, through the product's own strategies."""
