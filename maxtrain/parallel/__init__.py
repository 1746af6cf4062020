"""Where arrays live: mesh axes, logical axes, processes."""
