"""What a compiled program says of itself: products, memory traffic, collectives, and how long they
take at least."""
