"""Weights from and to other programs' files. Which names a model has there, its family says, in the
steps of `codec.py`."""
