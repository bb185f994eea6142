"""When things happen: the training loop, evaluation, checkpoints, the run directory and its report."""
