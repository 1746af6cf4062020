"""Data of the worked examples in docs/, made by programs that come with the package."""
