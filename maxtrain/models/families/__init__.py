"""One file per model family: its block choices, its Hugging Face names and how its configuration reads."""
