"""Where workers run and how a call reaches them."""
