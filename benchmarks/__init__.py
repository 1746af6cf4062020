"""Measured figures, with the hardware named. Imports the packages, never the reverse."""
