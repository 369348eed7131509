"""One run's description, its folder, running it, and many of them."""
