"""`verl train`: settings to objects, run directory, resume, export."""
