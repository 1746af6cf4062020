"""Analysis of compiled programs: products, memory traffic, collectives, and lower bounds of their
time.
"""
