"""Space enumeration, ledger, driver, samplers and pools: finds the best candidate of a search space."""
