"""Operations on hundreds of names in one directory with a single call, in C; batched_calls.py can do without them."""
