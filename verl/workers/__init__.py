"""What one rank of a role does: the calls behind the handles."""
