"""Where workers run and how a verb reaches them."""
