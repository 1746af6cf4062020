"""Weights from and to other programs' files. Which names a model has there is said by its family,
not here."""
