"""What is done to hundreds of names of one directory by one call, in C: batched_calls.py does the same without it."""
