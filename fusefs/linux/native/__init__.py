"""Operations on hundreds of names of one directory by one call, in C; without it batched_calls.py does the same."""
