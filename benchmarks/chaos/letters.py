"""A reward for runs that are killed: it takes a while, in processes of its own."""

import time

# Of a group, so that kills strike while rewards are computed.
SECONDS = 0.01


def has_letter(prompts, completions, completion_ids, **columns):
    """1 for a completion with a small letter, which about a half of random ones have."""
    time.sleep(SECONDS)
    return [float(any("a" <= letter <= "z" for letter in text)) for text in completions]
