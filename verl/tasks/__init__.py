"""Several tasks on one actor: shares, weights, constraints, files."""
