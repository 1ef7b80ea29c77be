"""The ClientApp, and what makes anybody's ClientApp take part: rules, policies, the ledger."""
