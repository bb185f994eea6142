"""What one rank of a role does: the verbs behind the handles."""
